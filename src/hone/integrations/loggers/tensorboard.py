"""TensorBoard: metrics as event files, in the run directory.

In:   Points
Out:  `tensorboard/` in the run directory (or `log_dir`), for `tensorboard --logdir`

Each session writes its own file. It first reads the earlier files, and does not write their values
again.
"""
# Installed with its extra only.
# pyright: reportMissingImports=false

from collections.abc import AsyncIterator
from pathlib import Path
from typing import ClassVar

from hone.config.registry import LoggerBaseConfig, register_logger
from hone.loggers.base import Point, Run, Sink
from hone.types import Directory

Key = tuple[str, int, float]
"""Name, step and time of a value."""


class TensorBoardConfig(LoggerBaseConfig, name="tensorboard"):
    """Writes metrics as TensorBoard event files."""

    modules: ClassVar[tuple[str, ...]] = ("tensorboard",)
    extra: ClassVar[str] = "tensorboard"

    log_dir: Directory | None = None
    """Event files are written to a directory named after the run's id in here; to `tensorboard` in the
    run directory if not set."""


class TensorBoardSink(Sink):
    """Writes event files."""

    def __init__(self, directory: Path) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._written = _written(directory)
        self._writer = EventFileWriter(str(directory))

    def log(self, point: Point) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        for name, value in point.values.items():
            key = name, point.step, point.at
            if key not in self._written:
                summary = Summary(value=[Summary.Value(tag=name, simple_value=value)])
                self._writer.add_event(Event(wall_time=point.at, step=point.step, summary=summary))
                self._written.add(key)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _written(directory: Path) -> set[Key]:
    """The values in the event files of earlier sessions."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    return {
        (value.tag, event.step, event.wall_time)
        for path in directory.glob("events.out.tfevents.*")
        for event in LegacyEventFileLoader(str(path)).Load()
        for value in event.summary.value
    }


@register_logger(config_type=TensorBoardConfig)
async def tensorboard(config: TensorBoardConfig, run: Run) -> AsyncIterator[TensorBoardSink]:
    """Writes metrics as TensorBoard event files."""
    own = run.directory / "tensorboard"
    yield TensorBoardSink(config.log_dir / run.id if config.log_dir else own)
