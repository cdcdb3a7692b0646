"""Render a model's own chat template in a separate process, so that a bad one ends only this process.

In:   lines of JSON on stdin: a template and the values that it sees
Out:  a line of JSON for each: the text, or why there is none

A chat template is code that came with a model. The sandbox keeps it away from files, but not from
loops without end or from strings of ten gigabytes, which Jinja may even build while it compiles. A
timer ends the process after some seconds of CPU time, and the system refuses it memory.

The environment is the one that transformers builds (`_compile_jinja_template`, 5.22). It is built
again here because importing transformers takes seconds and a new process must be ready at once.
"""

import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2.ext
from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

COMPILED = 32
"""Compiled templates that are kept."""
MESSAGE_CHARACTERS = 2000
"""Maximum length of an error that a template raises."""


class _Generation(jinja2.ext.Extension):
    """`{% generation %}`, which marks the assistant's text for training; here it only writes it."""

    tags = {"generation"}  # noqa: RUF012  # as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_write"), [], [], body).set_lineno(line)

    def _write(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """`dict(...)`, without the attributes of the class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class _Namespace(Namespace):
    """`namespace(...)`, without attributes that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # as jinja2's: `self` may be an attribute
        values = dict(*args[1:], **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(args[0], values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(
            "Chat templates cannot store underscore-prefixed attributes on a namespace, but got "
            f"{name!r}. Please rename the attribute."
        )


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    # Not Jinja's own: it escapes HTML.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


@lru_cache(maxsize=COMPILED)
def _compile(source: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=_raise_exception,
        strftime_now=_strftime_now,
        dict=_Dict(),
        namespace=_Namespace,
    )
    return environment.from_string(source)


def render(source: str, values: dict[str, Any], max_characters: int) -> dict[str, str]:
    """`text`, or `refusal`: what the template raised, or `limit`: "memory" or "length"."""
    try:
        pieces: list[str] = []
        length = 0
        for piece in _compile(source).generate(**values):
            length += len(piece)
            if length > max_characters:
                return {"limit": "length"}
            pieces.append(piece)
        return {"text": "".join(pieces)}
    except MemoryError:
        return {"limit": "memory"}
    except Exception as error:  # noqa: BLE001  # foreign code: whatever it raises is its answer
        return {"refusal": _message(error)}


def _message(error: Exception) -> str:
    try:
        return str(error)[:MESSAGE_CHARACTERS]
    except Exception:  # noqa: BLE001  # a foreign message that cannot be written
        return type(error).__name__


def limit_memory(extra_bytes: int) -> None:
    """Refuse this process more memory than it has now and `extra_bytes`.

    Not on macOS, which does not enforce the limit: there the parent process watches the memory.
    """
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError, ValueError):  # /proc is Linux's
        with open("/proc/self/statm", encoding="ascii") as file:
            pages = int(file.read().split()[0])
        size = pages * os.sysconf("SC_PAGE_SIZE") + extra_bytes
        resource.setrlimit(resource.RLIMIT_AS, (size, size))


def main(time_s: float, memory_bytes: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C, the parent ends this process
    limit_memory(memory_bytes)
    for line in sys.stdin.buffer:
        # Nothing handles SIGPROF: it ends the process, whatever Python is doing. CPU time: the
        # machine may be busy.
        signal.setitimer(signal.ITIMER_PROF, time_s)
        try:
            answer = json.dumps(render(**json.loads(line)))
        except MemoryError:
            answer = '{"limit": "memory"}'
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(answer + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
