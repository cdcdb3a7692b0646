"""Weights & Biases: metrics, tables of rollouts, and adapters as artifacts.

In:   Points, tables of rollouts, Adapters
Out:  a run of W&B with the id of the run; without a network (`mode: offline`) its files in
      loggers/wandb, for `wandb sync`

W&B's own step counts rows and may only grow. It is computed from the line of the event, so the
newest step that W&B has says which lines it holds; metrics are drawn over `training_step`.
"""
# Installed with its extra only.
# pyright: reportMissingImports=false

import json
import netrc
import os
import struct
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import Field

from hone.config.registry import LoggerBaseConfig, register_logger
from hone.files.events import RunFinished
from hone.loggers.base import (
    TABLE_COLUMNS,
    Adapter,
    LoggedRollout,
    Point,
    RoundTable,
    Run,
    SentAdapters,
    Sink,
)

AXIS = "training_step"
"""Metric over which the others are drawn, as in ART."""
API = "https://api.wandb.ai"
_HEADER, _BLOCK, _START = struct.Struct("<IHB"), 2**15, 7
"""Format of a .wandb file: that of LevelDB's log, after the first bytes."""
_LAST = (1, 4)
"""Types of a record's last part: the whole record, and its end."""


class WandbConfig(LoggerBaseConfig, name="wandb"):
    """Sends metrics, rollouts and adapters to Weights & Biases."""

    modules: ClassVar[tuple[str, ...]] = ("wandb",)
    extra: ClassVar[str] = "wandb"

    project: str | None = None
    """Project of W&B; the model's project if not set."""
    entity: str | None = None
    """Team or user; the default of the API key if not set."""
    run_name: str | None = None
    """Name of the run; its id if not set."""
    group: str | None = None
    """Group of the run."""
    tags: list[str] = Field(default_factory=list)
    """Tags of the run."""
    mode: Literal["online", "offline"] | None = None
    """`WANDB_MODE`, or `online`, if not set."""
    api_key: str | None = None
    """`WANDB_API_KEY`, or the key of `wandb login`, if not set."""
    base_url: str | None = None
    """`WANDB_BASE_URL`, or W&B's cloud, if not set."""
    rollouts: bool = True
    """Whether a table of the rollouts is sent for each round and validation."""
    adapters: SentAdapters = "last"
    """Adapters that are sent as artifacts, if the server's root is on this machine: none, the newest
    and the best at the end of the run, or that of every step."""

    def refusal(self) -> str | None:
        if self.is_offline or self.api_key or os.environ.get("WANDB_API_KEY"):
            return None
        host = urlsplit(self.base_url or os.environ.get("WANDB_BASE_URL") or API).hostname or ""
        try:
            if netrc.netrc().authenticators(host):
                return None
        except (OSError, netrc.NetrcParseError):
            pass
        return (
            "there is no API key; set WANDB_API_KEY, run `wandb login`, or set mode: offline and "
            "send the run later with `wandb sync`"
        )

    @property
    def is_offline(self) -> bool:
        return (self.mode or os.environ.get("WANDB_MODE")) in ("offline", "disabled", "dryrun")


class WandbSink(Sink):
    """Writes to one run of W&B."""

    def __init__(self, config: WandbConfig, run: Run) -> None:
        import wandb

        self.reads_tables, self.adapters = config.rollouts, config.adapters
        self._wandb, self._model = wandb, run.name or run.id
        self._directory = run.directory / "loggers"
        self._opened = wandb.init(
            project=config.project or run.project or None,
            entity=config.entity,
            name=config.run_name or run.id,
            id=run.id,
            group=config.group,
            tags=config.tags,
            config=run.config,
            dir=str(self._directory),
            mode=config.mode,
            resume="allow",
            settings=wandb.Settings(
                console="off",
                silent=True,
                init_timeout=config.timeout_s,
                x_disable_stats=True,  # they would be those of this process
                disable_git=True,
                save_code=False,
            ),
        )
        self._opened.define_metric(AXIS)
        self._opened.define_metric("*", step_metric=AXIS)
        steps = _offline_steps(self._directory, run.id) if config.is_offline else ()
        self._newest = max(steps, default=self._opened.step - 1)
        self.holds = max(0, self._newest // 2 - 1)
        self._completed = False

    def log(self, point: Point) -> None:
        self._log(2 * point.line, {**point.values, AXIS: point.step, "_timestamp": point.at})

    def table(self, table: RoundTable) -> None:
        data = [_row(one) for one in table.rollouts]
        rows = self._wandb.Table(columns=list(TABLE_COLUMNS), data=data)
        self._log(2 * table.line + 1, {table.name: rows, AXIS: table.step})

    def _log(self, step: int, values: dict[str, Any]) -> None:
        if step > self._newest:
            self._opened.log(values, step=step, commit=True)
            self._newest = step

    def adapter(self, adapter: Adapter) -> None:
        # W&B makes no new version of an artifact whose files it has.
        name = "".join(c if c.isalnum() or c in "-_." else "-" for c in self._model)
        artifact = self._wandb.Artifact(f"{name}-adapter", "model", metadata={"step": adapter.step})
        for file in ("adapter_model.safetensors", "adapter_config.json"):
            artifact.add_file(str(adapter.path / file))
        aliases = [f"step-{adapter.step}", *(["best"] if adapter.is_best else [])]
        aliases += ["latest"] if adapter.is_newest else []
        self._opened.log_artifact(artifact, aliases=aliases)

    def finish(self, finished: RunFinished) -> None:
        self._completed = finished.status == "completed"

    def close(self) -> None:
        self._opened.finish(exit_code=0 if self._completed else 1)


def _row(rollout: LoggedRollout) -> list[Any]:
    values = {
        **rollout.model_dump(include=set(TABLE_COLUMNS)),
        "input": _text(rollout.input),
        "output": _text(rollout.output),
        "failure": rollout.failure_text,
        "conversation": json.dumps(rollout.messages, ensure_ascii=False),
        "step": rollout.step,
    }
    return [values[column] for column in TABLE_COLUMNS]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _offline_steps(directory: Path, run_id: str) -> Iterator[int]:
    """W&B's steps in the files of earlier sessions."""
    for path in directory.glob(f"wandb/offline-run-*-{run_id}/run-{run_id}.wandb"):
        for record in read_records(path.read_bytes()):
            for item in record.history.item:
                if item.key == "_step" or list(item.nested_key) == ["_step"]:
                    yield int(item.value_json)


def read_records(content: bytes) -> Iterator[Any]:
    """The records of a .wandb file, up to the one that was being written."""
    from wandb.proto.wandb_internal_pb2 import Record

    at, parts = _START, b""
    while at + _HEADER.size <= len(content):
        rest = _BLOCK - at % _BLOCK
        if rest < _HEADER.size:
            at += rest
            continue
        _, size, kind = _HEADER.unpack_from(content, at)
        at += _HEADER.size
        if at + size > len(content):
            return
        parts += content[at : at + size]
        at += size
        if kind in _LAST:
            yield Record.FromString(parts)
            parts = b""


@register_logger(config_type=WandbConfig)
async def wandb(config: WandbConfig, run: Run) -> AsyncIterator[WandbSink]:
    """Sends metrics, rollouts and adapters to Weights & Biases."""
    for variable, value in {"API_KEY": config.api_key, "BASE_URL": config.base_url}.items():
        if value:
            os.environ[f"WANDB_{variable}"] = value
    yield WandbSink(config, run)
