"""A real `hone serve` in a process of its own, over a tiny random model, and `hone finetune` beside it."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest
from tests.chat.conftest import build_tokenizer
from tests.patience import PATIENCE_S
from tests.plugin.installed import install
from tests.server.conftest import write_model

QWEN = "Qwen/Qwen2.5-3B-Instruct"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass(frozen=True)
class Server:
    """Where it answers."""

    port: int
    inference_port: int
    root: Path
    log: Path
    pid: int = 0
    """0: nothing runs there."""

    def get(self, path: str) -> Any:
        answer = httpx2.get(f"http://127.0.0.1:{self.port}{path}", timeout=PATIENCE_S)
        answer.raise_for_status()
        return answer.json()

    def jobs(self, model: str) -> list[dict[str, Any]]:
        """Of one model, the oldest first."""
        return self.get(f"/v1/training/jobs?model={model}")[::-1]


@contextmanager
def serving(root: Path, environment: dict[str, str], *options: str) -> Iterator[Server]:
    """`hone serve` until the end of the block, on free ports unless `options` name others."""
    root.parent.mkdir(parents=True, exist_ok=True)
    output = root.with_name(f"{root.name}.output")
    ready, tell = os.pipe()
    command = [sys.executable, "-m", "hone", "serve", "--root", str(root)]
    command += ["--port", "0", "--inference-port", "0", *options]
    with output.open("wb") as out:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=subprocess.STDOUT,
            pass_fds=(tell,),
            env={**environment, "HONE_READY_FD": str(tell), "HONE_OWNED": "1"},
        )
    os.close(tell)
    try:
        with os.fdopen(ready) as line:
            announcement = line.readline()
        assert announcement, output.read_text()
        where = json.loads(announcement)
        log = Path(where["log"])
        yield Server(where["port"], where["inference_port"], root, log, where["pid"])
    finally:
        process.terminate()
        process.communicate(timeout=PATIENCE_S)


@dataclass
class Finetune:
    """`hone finetune` with its arguments, as often as it is started."""

    directory: Path
    environment: dict[str, str]
    arguments: list[str]
    outputs: list[str] = field(default_factory=list)
    """What each start wrote to stderr."""

    @property
    def output(self) -> Path:
        return self.directory / "out"

    def start(self, *more: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "hone", "finetune", *self.arguments, *more],
            cwd=self.directory,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def finish(self, process: subprocess.Popen[str]) -> int:
        """Its exit status."""
        try:
            _, output = process.communicate(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            _, output = process.communicate()
            pytest.fail(f"hone finetune did not end within {PATIENCE_S} s:\n{output}")
        self.outputs.append(output)
        return process.returncode

    def run(self, *more: str) -> int:
        return self.finish(self.start(*more))

    def lines(self, name: str) -> list[dict[str, Any]]:
        """A file of JSON lines under the output directory, its torn last line left out."""
        path = self.output / name
        raw = path.read_text(encoding="utf-8") if path.exists() else ""
        return [json.loads(line) for line in raw.splitlines(keepends=True) if line.endswith("\n")]

    def events(self, type: str) -> list[dict[str, Any]]:
        return [event for event in self.lines("events.jsonl") if event["type"] == type]


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The plugin installed, and a hub cache in which a tiny model stands under the seed's name."""
    base = tmp_path_factory.mktemp("e2e")
    packages = install(base / "packages")
    folder = base / "hf" / "hub" / f"models--{QWEN.replace('/', '--')}"
    write_model(folder / "snapshots" / COMMIT, build_tokenizer("qwen2.5-instruct"))
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(COMMIT)
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(packages), *_inherited()]),
        "HF_HOME": str(base / "hf"),
        "HF_HUB_OFFLINE": "1",
        "HONE_HOME": str(base / "home"),
        "COLUMNS": "200",
    }


def _inherited() -> Sequence[str]:
    return [path for path in [os.environ.get("PYTHONPATH", "")] if path]


@pytest.fixture(scope="session")
def server(
    environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """One for all of these tests; each uses a model of its own."""
    with serving(tmp_path_factory.mktemp("server") / "root", environment) as running:
        yield running
