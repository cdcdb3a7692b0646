"""Commands for what a server keeps: on a running server, and on a root without one."""

import errno
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.server.conftest import MakeServer, MakeState, make_server, make_state, tokenizer
from typer.testing import CliRunner

from hone.cli.app import app
from hone.cli.root import size
from hone.files.lock import LockFile
from hone.server.state import State
from hone.store.checkpoints import OPTIMIZER
from hone.store.jobs import Pin
from hone.types import ModelKey, ModelSpec, TrainConfig, stored_name

pytestmark = pytest.mark.e2e

__all__ = ["make_server", "make_state", "tokenizer"]

KEY = ModelKey("default", "agent")


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def add_steps(state: State, count: int) -> None:
    """A model `agent` of so many steps of 200 bytes; the second has the best reward."""

    def fill(directory: Path) -> str:
        (directory / "adapter_model.safetensors").write_bytes(b"x" * 50)
        (directory / OPTIMIZER).write_bytes(b"x" * 150)
        return "sha of " + directory.name

    state.models.register(ModelSpec(name="agent", base_model="tiny"))
    for step in range(count):
        state.checkpoints.write(KEY, step, fill, job=None)
    state.checkpoints.log(KEY, 2, {"reward": 1.0}, "val")


@pytest.fixture(params=["running", "stopped"])
def root(
    request: pytest.FixtureRequest, make_server: MakeServer, make_state: MakeState, tmp_path: Path
) -> Iterator[Path]:
    """A root with six steps of one model, with a server or without."""
    root = tmp_path / "hone"
    if request.param == "stopped":
        state = make_state()
        add_steps(state, 6)
        state.store.close()
        yield root
        return
    server = make_server()
    add_steps(server.state, 6)
    port = int(server.control_url.rpartition(":")[2])
    (root / "server.json").write_text(json.dumps({"host": "127.0.0.1", "port": port}))
    with LockFile(root / "server.lock"):
        yield root


def steps_in(root: Path) -> list[str]:
    return sorted(path.name for path in (root).rglob("checkpoints/*"))


def test_old_steps_are_deleted_only_with_yes(root: Path):
    result = run("models", "prune", "--keep", "2", "--root", str(root))
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.stdout.splitlines()]
    assert [row[:2] for row in rows[1:3]] == [["default/agent", "1"], ["default/agent", "3"]]
    assert "add --yes" in result.stderr and len(steps_in(root)) == 6
    younger = run("models", "prune", "--keep", "1", "--older-than", "1", "--root", str(root))
    assert younger.stdout == "no step can go\n"
    result = run("models", "prune", "agent", "--keep", "2", "--yes", "--root", str(root))
    assert "2 steps, " in result.stdout and " deleted" in result.stdout
    assert steps_in(root) == ["0000", "0002", "0004", "0005"]  # first, best, newest two
    unknown = run("models", "prune", "agnet", "--root", str(root))
    assert unknown.exit_code == 1 and "Did you mean 'agent'?" in unknown.stderr


@pytest.mark.parametrize("name", ["default/agnet", "default/agent/checkpoints/1", "../..", ""])
@pytest.mark.parametrize("command", [("prune",), ("delete", "--yes")])
def test_an_invalid_name_deletes_nothing_and_is_reported(
    root: Path, command: tuple[str, ...], name: str
):
    result = run("models", *command, name, "--root", str(root))
    assert result.exit_code == 1 and not result.stdout and result.exception.args == (1,)
    assert "no model" in result.stderr and repr(name) in result.stderr, result.stderr
    assert len(steps_in(root)) == 6


def test_a_model_is_deleted_only_with_yes(root: Path):
    result = run("models", "delete", "agent", "--root", str(root))
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("default/agent: 6 steps, ") and "add --yes" in result.stderr
    assert len(steps_in(root)) == 6
    result = run("models", "delete", "default/agent", "--yes", "--root", str(root))
    assert result.exit_code == 0 and result.stdout.startswith("default/agent deleted: ")
    assert steps_in(root) == []
    result = run("models", "delete", "agent", "--yes", "--root", str(root))
    assert result.exit_code == 1 and "Registered: none" in result.stderr


def test_a_model_is_known_by_its_users_spelling_and_nothing_else_becomes_a_path(
    make_state: MakeState, tmp_path: Path
):
    state = make_state()
    state.models.register(ModelSpec(name=stored_name("my agent/v2"), base_model="tiny"))
    state.store.close()
    arguments = ("models", "delete", "--root", str(tmp_path / "hone"))
    for name in ("../models", "a/b/c", "default/agent@3", "default/.."):
        result = run(*arguments, "--yes", name)
        assert f"no model called {name!r} is registered" in result.stderr, name
    result = run(*arguments, "my agent/v2")
    assert result.stdout.startswith("default/my-agent-v2-"), result.output


def test_without_a_server_no_line_is_logged_for_each_request(make_state: MakeState, tmp_path: Path):
    add_steps(state := make_state(), 1)
    state.store.close()
    result = run("models", "delete", "agent", "--yes", "--root", str(tmp_path / "hone"))
    assert result.exit_code == 0 and result.stderr == ""


def test_a_model_whose_server_was_killed_is_deleted_with_the_job_that_ran(
    make_state: MakeState, tmp_path: Path
):
    state = make_state()
    add_steps(state, 1)
    job = {"groups": b"packed", "config": TrainConfig(), "counts": {}, "request_sha256": "1:0"}
    queued = state.jobs.add(model=state.models.get(KEY), **job)
    state.jobs.take(queued.id, Pin(0, "sha", dtype="float32", row_tokens=64))
    state.store.close()  # on disk, the job runs
    arguments = ("models", "delete", "agent", "--yes", "--root", str(tmp_path / "hone"))
    refused = run(*arguments)
    assert refused.exit_code == 1 and "is running" in refused.stderr
    result = run(*arguments, "--force")
    assert result.exit_code == 0, result.output


def test_a_directory_that_is_not_a_root_is_refused(tmp_path: Path):
    result = run("models", "prune", "--root", str(tmp_path))
    assert result.exit_code == 1 and "there is no server state" in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "command",
    [
        ("models", "prune"),
        ("models", "delete", "agent"),
        ("backup", "copy"),
        ("export", "agent", "copy"),
    ],
)
def test_the_root_of_another_user_is_named(
    make_state: MakeState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
):
    make_state().store.close()

    def denied(path: Path) -> bool:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", denied)  # as in a directory that only its owner may read
    result = run(*command, "--root", str(tmp_path / "hone"))
    assert result.exit_code == 1 and "it belongs to another user" in result.stderr, result.output


def test_a_server_that_does_not_listen_yet_is_named(make_state: MakeState, tmp_path: Path):
    make_state().store.close()
    root = tmp_path / "hone"
    with LockFile(root / "server.lock"):
        result = run("models", "prune", "--root", str(root))
        assert result.exit_code == 1 and "another process uses it" in result.stderr
        (root / "server.json").write_text(json.dumps({"host": "0.0.0.0", "port": 1}))
        result = run("models", "prune", "--root", str(root))
        assert result.exit_code == 1 and "does not answer at http://127.0.0.1:1" in result.stderr


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1500, "1.5 kB"),
        (2_340_000, "2.34 MB"),
        (5 * 10**15, "5e+03 TB"),
    ],
)
def test_sizes_are_human_readable(num_bytes: int, text: str):
    assert size(num_bytes) == text
