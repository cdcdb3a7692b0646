"""Where a failure happened: the innermost line of the user's own code.

In:   an exception; the output of a program; the lines a task waits at
Out:  FILE:LINE, or the last line of an output that names no file

Failures are counted by their place: many failures at one line are a bug in that line. A library's
line would not tell two bugs of the user apart, so the user's own line comes first.
"""

import os
import re
import sysconfig
import traceback
from collections.abc import Iterable, Iterator

_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_STDLIB = tuple(os.path.realpath(sysconfig.get_path(n)) + os.sep for n in ("stdlib", "platstdlib"))
_INSTALLED = re.compile(r"[/\\](site-packages|dist-packages|node_modules)[/\\]")
_PYTHON_LIBRARY = re.compile(r"[/\\]lib[/\\]python3\.\d+[/\\]")
_FILE_LINE = re.compile(r'^\s*File "(.+?)", line (\d+)', re.MULTILINE)
_AT = re.compile(r"^\s*at (?:.* \()?(?:file://)?([^\s()]+):(\d+):\d+\)?\s*$", re.MULTILINE)
"""A line of a JavaScript stack; the innermost one is the first."""
_WAITS_AT = re.compile(r"^  (.+):(\d+) in ", re.MULTILINE)
_LINE = re.compile(r"(^<\w+>|\.[A-Za-z]\w*):\d+")
MAX_PLACE = 200
"""Length of the last line of an output that names no file."""


def place_of(error: BaseException) -> str:
    """FILE:LINE of the innermost line of the user's code, in the error or in one that caused it.

    Without such a line, the innermost line of the error; empty for an error that was never raised.
    """
    innermost = ""
    for one in chain_of(error):
        frames = [
            (frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(one.__traceback__)
        ]
        place, is_users = _innermost(frames)
        if is_users:
            return place
        innermost = innermost or place
    return innermost


def place_in(output: str) -> str:
    """The same for a program's output: from its last traceback, else its last line, shortened."""
    frames = [(file, int(line)) for file, line in _FILE_LINE.findall(output)]
    frames = frames or [(file, int(line)) for file, line in reversed(_AT.findall(output))]
    if frames:
        return _innermost(frames)[0]
    lines = output.split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return last[:MAX_PLACE]


def is_line(place: str) -> bool:
    """Whether a place is a line of code, not the last line of an output or of a response."""
    return _LINE.search(place) is not None


def place_waited_at(lines: str) -> str:
    """The same for the lines that a task waits at: `  FILE:LINE in FUNCTION`."""
    return _innermost([(file, int(line)) for file, line in _WAITS_AT.findall(lines)])[0]


def chain_of(error: BaseException) -> Iterator[BaseException]:
    """The error, the members of a group, and all that caused them, each once."""
    waiting, known = [error], set[int]()
    while waiting:
        one = waiting.pop(0)
        if id(one) in known:  # a chain may be circular
            continue
        known.add(id(one))
        yield one
        if isinstance(one, BaseExceptionGroup):
            waiting.extend(one.exceptions)
        cause = one.__cause__ or (None if one.__suppress_context__ else one.__context__)
        if cause is not None:
            waiting.append(cause)


def _innermost(frames: Iterable[tuple[str, int]]) -> tuple[str, bool]:
    """The place of the last frame of the user's code, or of the last one; and which of the two."""
    places = [(f"{file}:{line}", is_users_code(file)) for file, line in frames]
    users = [place for place, own in places if own]
    if users:
        return users[-1], True
    return (places[-1][0] if places else ""), False


def is_users_code(file: str) -> bool:
    """Whether a file belongs neither to hone, nor to a library, nor to Python itself."""
    if file.startswith(("<", "node:")):
        return False
    if _INSTALLED.search(file) or _PYTHON_LIBRARY.search(file):
        return False
    return not file.startswith(_OWN) and not os.path.realpath(file).startswith(_STDLIB)
