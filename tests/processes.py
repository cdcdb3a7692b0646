"""Which tests belong to `make test-e2e`, and a guard that no other test does what only those may do.

In:   the tests that pytest collected; every process that a test starts
Out:  the marker `e2e` on all tests of some folders; an error where another test starts a server

`make test` is what a contributor runs after each change: `not e2e`. A test in it starts no server
(`hone serve`, `hone serve-workflow`, `hone finetune`, vLLM, uvicorn), makes no environment and
installs nothing. The server of a test runs in a thread of pytest (`shared_server`, `make_server`).

A test may start a short program that works for it alone: an agent's command, a check of a grammar,
a `python -c`. Such a program is what hone itself starts; a test without it would test something
else. It listens on no port and ends with the test. Where its start takes seconds (a learner loads
torch), or a kill is the subject, the test is e2e all the same, for the sake of `make test`'s time.
So is a test that runs torch's compiler for seconds.
"""

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path, PurePath

import pytest

TESTS = Path(__file__).parent
FOLDERS = tuple(TESTS / name for name in ("docs", "e2e", "examples", "frameworks", "loggers"))
"""All tests of these folders are e2e. Elsewhere the marker is on the file or on the test."""
INSTALLERS = {"npm", "npx", "pip", "pip3", "uv", "virtualenv", "venv", "ensurepip"}
SHELLS = {"bash", "sh"}
SERVERS = {"uvicorn", "vllm"}
COMMANDS = {"serve", "serve-workflow", "finetune"}
"""Commands of hone that are a server, or start one."""


def mark(items: Sequence[pytest.Item]) -> None:
    """Mark the tests of the folders."""
    for item in items:
        if any(item.path.is_relative_to(folder) for folder in FOLDERS):
            item.add_marker(pytest.mark.e2e)


def forbidden(arguments: Sequence[str | bytes | os.PathLike[str]]) -> str | None:
    """What a command does that only an e2e test may do."""
    words = [os.fsdecode(argument) for argument in arguments]
    if not words:
        return None
    program, rest = PurePath(words[0]).name, words[1:]
    if program in SHELLS and "-c" in rest[:-1]:
        at = rest.index("-c") + 1
        script = [word for word in shlex.split(rest[at]) if word != "exec"]
        return forbidden(script) or forbidden(rest[at + 2 :])  # its "$@"
    if program.startswith("python"):
        if "-m" in rest[:-1]:
            at = rest.index("-m")
            program, rest = rest[at + 1].removesuffix(".cli").removesuffix(".main"), rest[at + 2 :]
        elif any("LocalBackend(" in word for word in rest):
            return "starts a server"
    if program in INSTALLERS:
        return "installs packages or makes an environment"
    if program.partition(".")[0] in SERVERS or (program == "hone" and COMMANDS & set(rest)):
        return "starts a server"
    return None


class Guard:
    """Refuses what the running test may not do, and remembers it in case the code hides the error."""

    def __init__(self) -> None:
        self.active = False
        """Whether the running test is not e2e."""
        self.refused: list[str] = []

    def install(self) -> None:
        """From here to the end of the process: an audit hook cannot be removed."""
        sys.addaudithook(self._audit)

    def take(self) -> list[str]:
        """What was refused since the last call."""
        refused, self.refused = self.refused, []
        return refused

    def _audit(self, event: str, values: tuple[object, ...]) -> None:
        if not self.active:
            return
        if event == "subprocess.Popen":
            arguments = values[1]
            words = arguments if isinstance(arguments, list | tuple) else [str(arguments)]
            if why := forbidden(words):
                self._refuse(why, " ".join(os.fsdecode(word) for word in words)[:200])
        elif event == "open" and str(values[0]).endswith("pyvenv.cfg") and "w" in str(values[1]):
            self._refuse("makes an environment", str(values[0]))

    def _refuse(self, why: str, what: str) -> None:
        message = f"this test {why} ({what}): mark it with @pytest.mark.e2e (tests/processes.py)"
        self.refused.append(message)
        raise RuntimeError(message)


GUARD = Guard()
"""Of this process; conftest.py installs it."""
