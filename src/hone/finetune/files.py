"""Metrics and pictures of a run, written beside it while it goes on.

In:   the run's events
Out:  the metrics files and reward_plot.png in output_dir, as of the newest event
Used: trainer.py, after each round and each validation

A picture takes half a second, which the next rollout must not wait for: they are written in a
thread, one at a time, from the events on disk. What cannot be written is a warning: the numbers are
safe in the events, and a full disk must not end a training run.
"""

import asyncio
import logging
from pathlib import Path

from hone.events import EventLog, read
from hone.finetune import metrics
from hone.finetune.history import History

log = logging.getLogger("hone")


class Files:
    """Keeps the files of one run up to date."""

    def __init__(self, events: EventLog, output_dir: Path) -> None:
        self.events, self.output_dir = events, output_dir
        self._writing: asyncio.Task[None] | None = None
        self._stale = False

    def refresh(self) -> None:
        """Have them written soon; returns at once."""
        self._stale = True
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write())

    async def settle(self) -> None:
        """Until they hold everything."""
        if self._writing is not None:
            await self._writing

    async def _write(self) -> None:
        while self._stale:
            self._stale = False
            try:
                await asyncio.to_thread(write, self.events.path, self.output_dir)
            except OSError as error:
                said = f"{self.output_dir}: metrics and plot could not be written ({error})"
                log.warning("%s", said)
                self.events.tell("warning", message=said)


def write(events: Path, output_dir: Path) -> None:
    """Everything, anew, from the events on disk."""
    from hone.finetune.report import plots  # here, because matplotlib takes half a second to import

    history = History.of(read(events))
    metrics.write(output_dir, history)
    plots.reward_plot(history, output_dir / "reward_plot.png")
