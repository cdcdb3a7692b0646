"""Progress on stderr: a bar on a terminal, a line every ten seconds elsewhere.

In:   the number done, the total, and a note (a mean reward, a phase)
Out:  text on stderr, never on stdout, which belongs to the user's program

All output of hone goes through one console, so that a log line is printed above a bar and never
inside it.
"""

import sys
import time
from functools import cache
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.console import Console

LINE_S = 10.0
"""Seconds between lines without a terminal."""


class Progress:
    """A context manager that shows progress.

    With `what=None` it shows nothing; with `lines=False`, nothing without a terminal.
    """

    def __init__(self, what: str | None, *, lines: bool = True) -> None:
        self.what, self.done, self.total, self.note = what, 0, 0, ""
        self._lines = lines and what is not None
        self._bar = None
        self._written_at = time.monotonic()

    def __enter__(self) -> Self:
        if self.what is not None and console().is_terminal:
            from rich import progress  # imported here: it takes 0.2 s, and few programs need it

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
        """Update the given values; the others stay the same."""
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
    """The console that all output shares. It looks up sys.stderr at every write."""
    from rich.console import Console  # imported here for the same reason

    return Console(stderr=True)


def write(line: str) -> None:
    """Print one line above a live display: no markup, no wrapping, no colours."""
    console().print(line, markup=False, highlight=False, emoji=False, soft_wrap=True)
