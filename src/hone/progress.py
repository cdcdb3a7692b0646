"""Counts, shown while one waits: a bar on a terminal, a line now and then elsewhere.

In:   how much of how much is done, and a note (a mean reward, a phase)
Out:  text on stderr, never on stdout, which belongs to the user's program

A log file gets one line every ten seconds and one at the end, not a bar drawn a thousand times.
All that hone says goes through one console, so that a line stands above a bar and never in it.
"""

import sys
import time
from functools import cache
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.console import Console

LINE_S = 10.0
"""How often a line is written where there is no terminal."""


class Progress:
    """Use it as a context manager.

    `what` None shows nothing at all; `lines` False nothing where there is no terminal.
    """

    def __init__(self, what: str | None, *, lines: bool = True) -> None:
        self.what, self.done, self.total, self.note = what, 0, 0, ""
        self._lines = lines and what is not None
        self._bar = None
        self._written_at = time.monotonic()

    def __enter__(self) -> Self:
        if self.what is not None and console().is_terminal:
            from rich import progress  # here, because it takes 0.2 s and few programs need it

            self._bar = progress.Progress(
                progress.TextColumn("{task.description}", markup=False),
                progress.BarColumn(),
                progress.MofNCompleteColumn(),
                progress.TimeElapsedColumn(),
                progress.TextColumn("{task.fields[note]}", markup=False),
                console=console(),
            )
            self._bar.add_task(self.what, total=self.total or None, note="")
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif self._lines and self.total:
            self._write()

    def update(
        self, *, done: int | None = None, total: int | None = None, note: str | None = None
    ) -> None:
        """Show these from now on; what is left out stays."""
        self.done = self.done if done is None else done
        self.total = self.total if total is None else total
        self.note = self.note if note is None else note
        if self._bar is not None:
            task = self._bar.task_ids[0]
            self._bar.update(task, completed=self.done, total=self.total or None, note=self.note)
        elif self._lines and time.monotonic() - self._written_at >= LINE_S:
            self._write()

    def _write(self) -> None:
        self._written_at = time.monotonic()
        print(f"{self.what}: {self.done}/{self.total} {self.note}".rstrip(), file=sys.stderr)  # noqa: T201  # to stderr, where bars go


@cache
def console() -> "Console":
    """The only one: what is shown at the same time shares the screen.

    It looks up sys.stderr at every write.
    """
    from rich.console import Console  # here for the same reason

    return Console(stderr=True)


def write(line: str) -> None:
    """One line, as it is, above whatever is being shown: no markup, no wrapping, no colours."""
    console().print(line, markup=False, highlight=False, emoji=False, soft_wrap=True)
