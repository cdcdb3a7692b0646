"""`report_metrics` of a model: send what a program logs to the same loggers as a run.

In:   names of loggers, and metrics of a step
Out:  `reports/events.jsonl` in the model's directory, and the processes of loggers that read it

The processes start with the first metrics and end with the program. A program that is started again
in the same directory continues the same run of each service.
"""

import atexit
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from hone.config import plugins, registry
from hone.config.base import LoggerBaseConfig
from hone.errors import ConfigError
from hone.files.event_log import FILE, EventLog
from hone.files.lock import LockFile
from hone.loggers.feed import run_of
from hone.loggers.process import Loggers

FOLDER = "reports"
"""Folder in the model's directory."""
LOCK_S = 10.0
WANDB, WANDB_KEY = "wandb", "WANDB_API_KEY"

_open: dict[Path, "Reporter"] = {}
"""Reporters by directory: two models of the same name share their loggers."""


def logger_names(report_metrics: Sequence[str] | None) -> list[str]:
    """The names; as in ART, None is W&B if `WANDB_API_KEY` is set and W&B is installed."""
    if report_metrics is not None:
        return list(report_metrics)
    if not os.environ.get(WANDB_KEY):
        return []
    return [] if configurations([WANDB])[0].problem() else [WANDB]


def configurations(names: Sequence[str], **fields: str | None) -> list[LoggerBaseConfig]:
    """The loggers with their default settings, and those of `fields` that they know."""
    plugins.discover()
    configs = []
    for name in names:
        component = registry.find("logger", name)
        if component is None:
            raise ConfigError(f"report_metrics: {registry.unknown('logger', name)}")
        known = {k: v for k, v in fields.items() if k in component.config_type.model_fields}
        configs.append(component.config_type.model_validate(known))
    return configs


def check(names: Sequence[str]) -> None:
    """Raise ConfigError for a logger that does not exist, or whose package or key is missing."""
    for name, config in zip(names, configurations(names), strict=True):
        if problem := config.problem():
            raise ConfigError(f"report_metrics: {name}: {problem}")


class Reporter:
    """The events and loggers of one model."""

    def __init__(self, directory: Path, configs: Sequence[LoggerBaseConfig], **run: str) -> None:
        """`run`: name, project and base model, for the services.

        The id of the run is chosen with the first event of the directory: the name of the model's
        directory, which has no slashes, and a random suffix, because a service may already have a
        run of another model with the same name.
        """
        self._began = time.monotonic()
        self._events = EventLog(directory / FILE)
        self._loggers = Loggers(configs, self._events)
        with LockFile(directory / "reports.lock", wait_s=LOCK_S):  # two programs, one id
            known = run_of(directory)
            id = known.id if known else f"{directory.parent.name}-{secrets.token_hex(4)}"
            started = {"run_id": id, "session": 1, "epochs": 0, "step": None}
            self._events.append("run_started", **started, **run)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._events.append("metrics", step=step, metrics=dict(metrics))

    def close(self) -> None:
        """End the run, which another program may continue, and wait until everything was sent."""
        seconds = time.monotonic() - self._began
        # Without a step, because adapters of a program are not sent.
        ended = {"status": "completed", "message": None, "step": None, "seconds": seconds}
        self._events.append("run_finished", **ended)
        self._loggers.close()
        self._events.close()


def report(
    directory: Path,
    names: Sequence[str],
    step: int,
    metrics: Mapping[str, float],
    *,
    entity: str | None = None,
    **run: str,
) -> None:
    """Send metrics of a step; returns immediately.

    `run`: name and project of the model, and its base model.
    """
    place = (directory / FOLDER).absolute()
    if place not in _open:
        if not _open:
            atexit.register(close)
        _open[place] = Reporter(place, configurations(names, entity=entity), **run)
    _open[place].log(step, metrics)


def close() -> None:
    """End the loggers of all models, and wait for them; they start again with the next metrics."""
    for place in list(_open):
        _open.pop(place).close()
