"""Where a failure happened: the user's line, whatever library raised below it."""

import json
from pathlib import Path
from typing import Any

import pytest

from hone.files.place import place_in, place_of, place_waited_at
from hone.trajectory import failure_of

SOURCE = """
import json

def read(text):
    return json.loads(text)

def hide(text):
    try:
        read(text)
    except ValueError as error:
        raise RuntimeError("hidden") from error
"""


def load(folder: Path, source: str) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "agent.py"
    file.write_text(source)
    names: dict[str, Any] = {}
    exec(compile(source, str(file), "exec"), names)
    return names


def caught(run: Any, *args: Any) -> BaseException:
    try:
        run(*args)
    except BaseException as error:  # noqa: BLE001  # what it raises is under test
        return error
    raise AssertionError("it raised nothing")


def test_the_user_s_line_comes_before_those_of_libraries_and_of_python(tmp_path: Path):
    agent = load(tmp_path, SOURCE)
    # json.loads on line 5 raises inside json/decoder.py.
    place = f"{tmp_path}/agent.py:5"
    assert place_of(caught(agent["read"], "no json")) == place
    assert failure_of(caught(agent["read"], "no json")).place == place


def test_a_library_s_error_is_placed_by_the_user_s_line_that_caused_it(tmp_path: Path):
    library = load(tmp_path / "site-packages" / "lib", SOURCE)
    user = load(tmp_path / "mine", "def tool(text):\n    raise KeyError(text)\n")

    def call() -> None:
        library["hide"]("x")

    # Here the innermost line of the user is the call in this file.
    assert place_of(caught(call)).startswith(f"{__file__}:")

    def from_cause() -> BaseException:
        error = RuntimeError("from a pool, without a line of the user")
        error.__cause__ = caught(user["tool"], "x")
        return error

    assert place_of(from_cause()) == f"{tmp_path}/mine/agent.py:2"
    group = ExceptionGroup("two", [ValueError("never raised"), from_cause()])  # type: ignore[list-item]
    assert place_of(group) == f"{tmp_path}/mine/agent.py:2"


def test_without_a_line_of_the_user_it_is_the_innermost_line():
    error = caught(json.loads, "no json").with_traceback(None)
    assert place_of(error) == ""
    inner = caught(json.loads, "no json")
    assert inner.__traceback__ is not None
    only_python = inner.with_traceback(inner.__traceback__.tb_next)
    assert "/json/decoder.py:" in place_of(only_python)


PYTHON = """Traceback (most recent call last):
  File "/home/me/agent.py", line 7, in <module>
    main()
  File "/home/me/agent.py", line 4, in main
    json.loads(answer)
  File "/usr/lib/python3.11/json/decoder.py", line 355, in raw_decode
json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)
"""
NODE = """file:///home/me/agent.mjs:3
throw new Error("no");
Error: no
    at parse (/home/me/node_modules/parser/index.js:1:1)
    at answer (file:///home/me/agent.mjs:3:7)
    at main (file:///home/me/agent.mjs:9:1)
    at node:internal/main/run_main_module:23:47
"""


@pytest.mark.parametrize(
    ("output", "place"),
    [
        (PYTHON, "/home/me/agent.py:4"),
        (NODE, "/home/me/agent.mjs:3"),
        ("starting\npanic: index out of range\n\n", "panic: index out of range"),
        ("x" * 500, "x" * 200),
        ("", ""),
    ],
)
def test_a_program_s_output_names_the_place(output: str, place: str):
    assert place_in(output) == place


def test_a_rollout_that_waits_is_placed_where_the_user_waits():
    lines = (
        "waiting at\n  /home/me/agent.py:3 in run\n  /usr/lib/python3.11/asyncio/tasks.py:9 in s\n"
    )
    assert place_waited_at(lines) == "/home/me/agent.py:3"
    assert place_waited_at("waiting at\n") == ""
