"""Metrics and pictures of a run, written beside it while it goes on.

In:   the run's events
Out:  the metrics files and reward_plot.png in output_dir, as of the newest event

They are written in a thread, one at a time, from the events on disk. A picture takes half a second,
and its thread shares the interpreter with the rollouts: where rounds follow fast, not every one is
drawn. What cannot be written is a warning: the numbers are safe in the events, and a full disk must
not end a training run.
"""

import asyncio
import logging
import time
from pathlib import Path

from hone.events import EventLog, read
from hone.report import metrics
from hone.report.history import History

PICTURE_S = 10.0
"""While a run goes on, pictures are drawn so far apart, or farther."""

log = logging.getLogger("hone")


class Files:
    """Keeps the files of one run up to date."""

    def __init__(self, events: EventLog, output_dir: Path) -> None:
        self.events, self.output_dir = events, output_dir
        self._writing: asyncio.Task[None] | None = None
        self._stale = False
        self._drawn, self._next_picture = True, time.monotonic() + PICTURE_S

    def refresh(self) -> None:
        """Have them written soon; returns at once."""
        self._stale = True
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write())

    async def settle(self) -> None:
        """Until they hold everything, the picture too."""
        if self._writing is not None:
            await self._writing
        if not self._drawn:
            self._stale, self._next_picture = True, 0.0
            await self._write()

    async def _write(self) -> None:
        while self._stale:
            self._stale = False
            self._drawn = time.monotonic() >= self._next_picture
            try:
                await asyncio.to_thread(
                    write, self.events.path, self.output_dir, picture=self._drawn
                )
            except OSError as error:
                said = f"{self.output_dir}: metrics and plot could not be written ({error})"
                log.warning("%s", said)
                self.events.tell("warning", message=said)
            if self._drawn:
                self._next_picture = time.monotonic() + PICTURE_S


def write(events: Path, output_dir: Path, *, picture: bool) -> None:
    """Anew, from the events on disk."""
    history = History.of(read(events))
    metrics.write(output_dir, history)
    if picture:
        from hone.report import plots  # here, because matplotlib takes a second to import

        plots.reward_plot(history, output_dir / "reward_plot.png")
