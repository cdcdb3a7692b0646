"""A logger that writes to a file, and fails as a test says.

In:   Points, Rollouts, adapters, the end of the run
Out:  lines of JSON in `path`, one for everything that is sent
"""

import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from hone.config.registry import LoggerBaseConfig, register_logger
from hone.files.events import RunFinished
from hone.loggers.base import Adapter, LoggedRollout, Point, RoundTable, Run, Sink


class FileConfig(LoggerBaseConfig, name="file"):
    """Of these tests."""

    reads_calls: ClassVar[bool] = True

    path: Path = Field(default_factory=lambda: Path(os.environ["HONE_TEST_LOG"]))
    api_key: str = ""
    adapters: Literal["last", "all"] = "all"
    trouble: Literal["none", "refuses", "hangs", "dies"] = "none"
    dies_at: str = "train/reward"
    """The metric after which the process is killed, before it flushes."""
    reads_back: bool = False
    """Whether lines that the file has already are not written again, as a service with ids does."""


class FileSink(Sink):
    reads_rollouts = True
    reads_tables = True

    def __init__(self, config: FileConfig, run: Run) -> None:
        self._config, self.adapters = config, config.adapters
        held = config.path.read_text().splitlines() if config.path.exists() else []
        self._held = set(held if config.reads_back else ())
        sys.stdout.write(f"connected with {config.api_key}\n")  # as packages of services do
        self._write("opened", run.id, run.name)

    def log(self, point: Point) -> None:
        for name, value in point.values.items():
            self._write("metric", name, point.step, value)
        if self._config.trouble == "dies" and self._config.dies_at in point.values:
            os.kill(os.getpid(), signal.SIGKILL)

    def rollout(self, rollout: LoggedRollout) -> None:
        calls = [[m, r] for _, m, r in rollout.conversations()]
        self._write("rollout", rollout.rollout, rollout.reward, calls)

    def table(self, table: RoundTable) -> None:
        self._write("table", table.name, table.step, [one.reward for one in table.rollouts])

    def adapter(self, adapter: Adapter) -> None:
        self._write("adapter", adapter.step, adapter.is_best, adapter.is_newest)

    def finish(self, finished: RunFinished) -> None:
        self._write("finish", finished.status)

    def flush(self) -> None:
        if self._config.trouble == "refuses":
            raise ConnectionError(f"Bearer {self._config.api_key} is refused")
        if self._config.trouble == "hangs":
            time.sleep(3600)

    def _write(self, *values: Any) -> None:
        line = json.dumps(values)
        if line not in self._held:
            with self._config.path.open("a") as file:
                file.write(line + "\n")


@register_logger(config_type=FileConfig)
async def file(config: FileConfig, run: Run) -> AsyncIterator[FileSink]:
    """Writes to a file."""
    yield FileSink(config, run)
