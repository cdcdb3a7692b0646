"""Metrics files, the reward plot and the report, refreshed during the run.

In:   the run's events.jsonl
Out:  the metrics files and reward_plot.png in output_dir, as of the newest event; a brief report
      after every epoch and validation, which is there if the run is killed

Each refresh reads only the events appended since the last one. A thread writes the files, one
refresh at a time. A plot takes half a second, and its thread shares the interpreter with the
rollouts: if rounds follow quickly, not every one is plotted. A failed write is only a warning: the
numbers are safe in the events, and a full disk must not end a training run.
"""

import asyncio
import logging
import time
from pathlib import Path

from hone.errors import StorageError
from hone.files.event_log import EventLog, EventReader
from hone.report import metrics
from hone.report.history import RunHistory

PLOT_S = 10.0
"""Minimum time between two plots during a run."""

log = logging.getLogger("hone")


class Files:
    """Keeps the files of one run up to date."""

    def __init__(self, events: EventLog, output_dir: Path) -> None:
        self.events, self.output_dir = events, output_dir
        self.history = RunHistory()
        self._reader = EventReader(events.path)
        self._writing: asyncio.Task[None] | None = None
        self._stale = False
        self._plotted, self._next_plot = True, time.monotonic() + PLOT_S
        self._reported = 0
        """Epochs and validations that the report includes."""

    def refresh(self) -> None:
        """Schedule writing the files; returns immediately."""
        self._stale = True
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write())

    async def settle(self, *, plot: bool = True) -> None:
        """Wait until the files, and with `plot` also the plot, include every event."""
        if self._writing is not None:
            await self._writing
        if plot and not self._plotted:
            self._stale, self._next_plot = True, 0.0
            await self._write()

    async def _write(self) -> None:
        while self._stale:
            self._stale = False
            self._plotted = time.monotonic() >= self._next_plot
            try:
                await asyncio.to_thread(self._update, picture=self._plotted)
            except OSError as error:
                message = f"{self.output_dir}: metrics and plot could not be written ({error})"
                log.warning("%s", message)
                self.events.tell("warning", message=message)
            if self._plotted:
                self._next_plot = time.monotonic() + PLOT_S

    def _update(self, *, picture: bool) -> None:
        for event in self._reader.read():
            self.history.add(event)
        write(self.history, self.output_dir, picture=picture)
        ended = len(self.history.done) + len(self.history.validations)
        if ended > self._reported:
            self._reported = ended
            self._report()

    def _report(self) -> None:
        from hone.report import report  # imported here: most programs write none

        try:
            report.write(self.events.path.parent, brief=True, history=self.history)
        except StorageError as error:
            log.warning("The report could not be written: %s", error)
        except Exception as error:  # a mistake in a report must not end a training run
            log.warning("The report could not be written: %s", error, exc_info=error)


def write(history: RunHistory, output_dir: Path, *, picture: bool) -> None:
    metrics.write(output_dir, history)
    if picture:
        from hone.report import plots  # imported here: matplotlib takes a second

        plots.reward_plot(history, output_dir / "reward_plot.png")
