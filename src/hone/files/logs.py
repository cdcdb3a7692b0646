"""The server's log: a line for each event, and the whole output of the learner and the engines.

In:   what happened, and values that say more; lines that a process printed
Out:  records of the logger `hone.server`, and of `hone.output.PART`; server/telemetry.py writes both
      to files of limited size under ROOT/logs

The output of a process goes to a separate file and never to the console: it can be thousands of
lines, and what a user must see is logged as an event.
"""

import logging
from pathlib import Path
from typing import Any

log = logging.getLogger("hone.server")
"""Fields go in `extra={"fields": {...}}`; see `say`."""

OUTPUTS = ("learner", "engine", "vllm")
"""Parts whose whole output goes to a separate file, ROOT/logs/PART.log."""

_output = logging.getLogger("hone.output")
_output.propagate = False
_output.addHandler(logging.NullHandler())


def say(what: str, *, level: int = logging.INFO, **fields: Any) -> None:
    """Log one line: what happened, then key=value pairs."""
    _log(what, level, {"fields": fields})


def show(what: str, **fields: Any) -> None:
    """Log one line that the console shows too, because a user waits for it."""
    _log(what, logging.INFO, {"fields": fields, "console": True})


def _log(what: str, level: int, extra: dict[str, Any]) -> None:
    if log.isEnabledFor(level):
        # Made here: `log.log` looks for its caller first, which costs more than the rest.
        log.handle(log.makeRecord(log.name, level, "", 0, what, (), None, extra=extra))


def write_output(part: str, line: str, *, pid: int | None = None) -> None:
    """Log one line of a part's output; dropped if no server logs in this process."""
    _output.getChild(part).info("%s%s", "" if pid is None else f"[{pid}] ", line)


def output_file(part: str) -> Path | None:
    """The file of a part's output; None if no server logs in this process."""
    files = [h for h in _output.getChild(part).handlers if isinstance(h, logging.FileHandler)]
    return Path(files[0].baseFilename) if files else None
