"""`report_metrics` of a model: send what a program logs to the same loggers as a run.

In:   names of loggers, and metrics of a step
Out:  `reports/events.jsonl` in the model's directory, and the processes of loggers that read it

The processes start with the first metrics and end with the program. A program that is started again
under the same model name continues the same run of each service.
"""

import atexit
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from hone.config import plugins, registry
from hone.config.base import LoggerBaseConfig
from hone.config.secrets import Secrets
from hone.errors import ConfigError
from hone.event_log import FILE, EventLog
from hone.sinks.loggers import Loggers

FOLDER = "reports"
"""Folder in the model's directory."""
WANDB, WANDB_KEY = "wandb", "WANDB_API_KEY"

_open: dict[Path, "Reporter"] = {}
"""By directory: two models of one name share their loggers."""


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

        The id of the run is the name of the model's directory, which has no slashes.
        """
        started = {"run_id": directory.parent.name, "session": 1, "epochs": 0, "step": None}
        self._events = EventLog(directory / FILE)
        self._loggers = Loggers(configs, self._events, Secrets())
        self._events.append("run_started", **started, **run)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._events.append("metrics", step=step, metrics=dict(metrics))

    def close(self) -> None:
        """Wait until everything was sent."""
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
    """Send metrics of a step; returns at once.

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
