"""Read the code blocks of a documentation page, and run them.

In:   a Markdown file; marks in HTML comments directly above a block
Out:  Blocks; Stage.run(block) runs them from top to bottom in a directory for that page

The language of a block determines what happens: `python` and `bash` are run, `yaml`, `json`, `jsonl`
and `toml` are parsed. A block without a language, or with `text`, is not code. Marks:

    <!-- file: agent.py -->       write the block to that file; python is compiled, yaml must be a
                                  valid configuration
    <!-- from: tests/x.py -->     a quotation: every line is in that file, in this order
    <!-- slow -->                 run only in `make test-docs`
    <!-- elsewhere: tests/x.py -->  not run: it needs another environment, which that file makes and uses

Commands run as a reader would type them, with three exceptions: a model of one megabyte replaces the
real one, ports are free ones, and `hone serve` runs in the background until the page ends. `make`
commands are not run, because `make` runs these tests.
"""

import json
import os
import re
import shlex
import socket
import subprocess
import sys
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from tests.patience import PATIENCE_S

from hone.config.schema import read

ROOT = Path(__file__).parents[2]
DEMO_MODEL = "smollm2-135m-instruct"
PORTS = ("7623", "8000")
_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<code>.*?)^(?P=indent)```", re.M | re.S
)
_MARK = re.compile(r"<!-- (file|from|slow|elsewhere)(?:: *([^ ]+))? -->\s*$")


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    page: Path
    line: int
    language: str
    code: str
    marks: dict[str, str] = field(default_factory=dict)

    @property
    def slow(self) -> bool:
        return "slow" in self.marks

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """Every block of a page, in order."""
    text = page.read_text(encoding="utf-8")
    result = []
    for match in _FENCE.finditer(text):
        indent = len(match["indent"])
        lines = [line[indent:] for line in match["code"].splitlines()]
        line = text.count("\n", 0, match.start()) + 1
        marks = _marks(text[: match.start()])
        result.append(Block(page, line, match["language"], "\n".join(lines) + "\n", marks))
    return result


def _marks(above: str) -> dict[str, str]:
    marks = {}
    while match := _MARK.search(above):
        marks[match[1]] = match[2] or ""
        above = above[: match.start()]
    return marks


class Stage:
    """The directory in which the blocks of a page run."""

    def __init__(self, directory: Path, model: Path) -> None:
        self.directory = directory
        self._swap = {DEMO_MODEL: str(model)} | dict(zip(PORTS, _free_ports(), strict=True))
        self._servers: list[subprocess.Popen[bytes]] = []
        self._configs: list[Path] = []
        self._env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}

    def played(self, text: str) -> str:
        """The text with the model name and the ports replaced."""
        for real, here in self._swap.items():
            text = re.sub(rf"(?<![\w.-]){re.escape(real)}(?![\w.-])", here, text)
        return text.replace(".venv/bin/", "")

    def run(self, block: Block) -> None:
        """Run, write, parse or compare the block, depending on its language and marks."""
        if source := block.marks.get("from"):
            _check_quoted(block, ROOT / source)
        elif other := block.marks.get("elsewhere"):
            assert (ROOT / other).is_file(), f"{block}: there is no {other}"
        elif name := block.marks.get("file"):
            self._write(block, name)
        elif block.language == "bash":
            for command in _commands(block.code):
                self._command(block, command)
        elif block.language == "python":
            self._shell(block, [sys.executable, "-c", self.played(block.code)])
        else:
            _parse(block)

    def check_configs(self) -> None:
        """Raise if a YAML file of the page is not a valid configuration."""
        for path in self._configs:
            read(path)

    def close(self) -> None:
        for server in self._servers:
            server.terminate()
        for server in self._servers:
            server.wait(PATIENCE_S)

    def _write(self, block: Block, name: str) -> None:
        path = self.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.played(block.code), encoding="utf-8")
        self._configs += [path] * (block.language == "yaml")
        _parse(block)

    def _command(self, block: Block, command: str) -> None:
        words = shlex.split(command, comments=True)
        if not words or words[0] == "make":
            return
        command = self.played(command)
        if command.startswith("hone serve"):
            self._serve(block, command)
        else:
            self._shell(block, ["bash", "-euc", command])

    def _shell(self, block: Block, command: list[str]) -> None:
        done = subprocess.run(
            command,
            cwd=self.directory,
            env=self._env,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            stdin=subprocess.DEVNULL,
        )
        output = f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        assert done.returncode == 0, (
            f"{block}: {command[-1]!r} ended with {done.returncode}\n{output}"
        )

    def _serve(self, block: Block, command: str) -> None:
        ready, tell = os.pipe()
        ports = ["--port", self._swap["7623"], "--inference-port", self._swap["8000"]]
        words = [word for word in shlex.split(command) if word != "&"]
        server = subprocess.Popen(
            [*words[:2], *ports, *words[2:]],
            cwd=self.directory,
            env={**self._env, "HONE_READY_FD": str(tell)},
            stdout=subprocess.DEVNULL,
            pass_fds=(tell,),
        )
        os.close(tell)
        self._servers.append(server)
        with os.fdopen(ready) as pipe:
            assert pipe.readline(), f"{block}: {command!r} ended before it answered"


def _commands(code: str) -> list[str]:
    """The commands of a block; a backslash at the end of a line continues it."""
    joined = code.replace("\\\n", " ")
    return [line for line in joined.splitlines() if line.strip() and not line.startswith("#")]


def _parse(block: Block) -> None:
    if block.language == "yaml":
        yaml.safe_load(block.code)
    elif block.language == "toml":
        tomllib.loads(block.code)
    elif block.language == "json":
        json.loads(block.code)
    elif block.language == "jsonl":
        [json.loads(line) for line in block.code.splitlines()]
    elif block.language == "python":
        compile(block.code, str(block), "exec")


def _check_quoted(block: Block, source: Path) -> None:
    """Check that the lines are in the file in this order; a line of three dots skips some."""
    text, at = source.read_text(encoding="utf-8").splitlines(), 0
    for line in block.code.splitlines():
        if line.strip() in {"", "..."}:
            continue
        while at < len(text) and text[at].rstrip() != line.rstrip():
            at += 1
        assert at < len(text), f"{block}: {line!r} is not in {source.relative_to(ROOT)} there"
        at += 1


def _free_ports() -> list[str]:
    bound = [socket.create_server(("127.0.0.1", 0)) for _ in PORTS]
    ports = [str(sock.getsockname()[1]) for sock in bound]
    for sock in bound:
        sock.close()
    return ports
