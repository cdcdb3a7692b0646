"""Shared by all commands: option names, the log on stderr, tables on stdout.

In:   `-o KEY VALUE`, `--log-level`; log records; tables
Out:  pairs; `LEVEL - message` lines on the console; a table as wide as the terminal

`--log-level` applies to hone's own records; other libraries log from WARNING on, because at INFO
the HTTP client writes a line for every model call.
"""

import io
import logging
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from typer.core import TyperCommand

from hone.errors import ConfigError
from hone.files.disk import output
from hone.files.redact import redact
from hone.tasks import progress
from hone.types import EMPTY_PATH

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_JOINED = "\0"


class Command(TyperCommand):
    """Accepts `-o KEY VALUE`, and each option with hyphens or underscores.

    typer has no repeatable option of two values, and would print both spellings.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        spelled = {name.replace("_", "-"): name for p in self.params for name in p.opts}
        joined, rest = [], list(args)
        while rest:
            arg = rest.pop(0)
            if arg in ("-o", "--override"):
                if len(rest) < 2:
                    raise typer.BadParameter("expected a key and a value: -o finetuning.seed 1")
                # One word with `=`, so that a value may start with a hyphen.
                arg = f"--override={rest.pop(0)}{_JOINED}{rest.pop(0)}"
            elif arg.startswith("--"):
                name, equals, value = arg.partition("=")
                arg = spelled.get(name.replace("_", "-"), name) + equals + value
            joined.append(arg)
        return super().parse_args(ctx, joined)


def pairs(joined: Sequence[str] | None) -> tuple[tuple[str, str], ...]:
    """The keys and values of `-o`, as Command joined them."""
    split = (pair.partition(_JOINED) for pair in joined or ())
    return tuple((key, value) for key, _, value in split)


def parse_seconds(text: str | float) -> float:
    """A timeout."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise typer.BadParameter(f"{text!r}; expected a finite number of seconds above 0")
    return seconds


def parse_reward(text: str | float) -> float:
    """A reward; NaN is refused, because no reward compares with it."""
    try:
        reward = float(text)
    except ValueError:
        reward = math.nan
    if not math.isfinite(reward):
        raise typer.BadParameter(f"{text!r}; expected a finite number")
    return reward


def parse_path(path: str | Path) -> Path:
    """The path that an option or an argument names; an empty one is refused."""
    if path == "":
        raise typer.BadParameter(EMPTY_PATH)
    return Path(path)


class _Stdout(io.FileIO):
    """Raises ConfigError if stdout cannot be written, and BrokenPipeError if nobody reads it.

    After an error the rest is discarded: Python would write its buffer again at exit, and print a
    second error.
    """

    def write(self, data: "ReadableBuffer", /) -> int:
        if not memoryview(data).nbytes:
            return 0  # click tries an empty write first, and ignores its error
        try:
            with output("standard output"):
                return super().write(data)
        except (ConfigError, BrokenPipeError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            raise


def check_stdout() -> None:
    """Let every write to stdout that fails raise a ConfigError, or BrokenPipeError.

    A closed stdout is refused: the next file that is opened would take its place.
    """
    stdout = sys.stdout
    if stdout is None:
        raise ConfigError(
            "standard output is closed. Redirect it instead, for example to /dev/null."
        )
    if not isinstance(stdout, io.TextIOWrapper):  # replaced by a notebook
        return
    stdout.flush()
    raw = _Stdout(stdout.fileno(), "wb", closefd=False)
    sys.stdout = io.TextIOWrapper(
        raw if stdout.write_through else io.BufferedWriter(raw),  # pyright: ignore[reportArgumentType]
        encoding=stdout.encoding,
        errors=stdout.errors,
        newline="\n",
        line_buffering=stdout.line_buffering,
        write_through=stdout.write_through,
    )


LEVELS = ("debug", "info", "warning", "error", "critical")


class _ToConsole(logging.Handler):
    """Prints above a live display, never into it."""

    def emit(self, record: logging.LogRecord) -> None:
        progress.write(redact(self.format(record)))


def log_from(level: str | None) -> str | None:
    """Log from this level on; None changes nothing."""
    if level is None:
        return None
    if level.lower() not in LEVELS:
        raise typer.BadParameter(f"{level!r}; expected {', '.join(LEVELS[:-1])} or {LEVELS[-1]}")
    log_no_more()
    number = logging.getLevelNamesMapping()[level.upper()]
    handler = _ToConsole()
    handler.setFormatter(logging.Formatter("%(levelname)s - %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(max(number, logging.WARNING))
    logging.getLogger("hone").setLevel(number)
    return level


def log_no_more() -> None:
    """Undo `log_from`, for programs that call a command as a function."""
    root = logging.getLogger()
    for handler in [h for h in root.handlers if isinstance(h, _ToConsole)]:
        root.removeHandler(handler)
        root.setLevel(logging.WARNING)
        logging.getLogger("hone").setLevel(logging.NOTSET)


LogLevel = Annotated[
    str | None,
    typer.Option(
        "--log-level",
        metavar="LEVEL",
        callback=log_from,
        help="Log level: debug, info (the default), warning or error.",
        show_default=False,
    ),
]


def print_error(message: str) -> None:
    """Print why a command failed, without the secrets in the message."""
    typer.echo(f"hone: {redact(message)}", err=True)


def print_table(table: Table) -> None:
    """Print at the terminal's width; into a pipe unwrapped, so that `grep` sees whole lines."""
    console = Console(markup=False, highlight=False)
    if console.is_terminal:
        console.print(table)
        return
    console.width = 1000
    with console.capture() as text:
        console.print(table)
    typer.echo("\n".join(line.rstrip() for line in text.get().splitlines()))
