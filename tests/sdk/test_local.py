"""LocalBackend owns its server: starts it once, ends it always, and says what went wrong."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from tests.patience import PATIENCE_S
from tests.prose import Prose, place_of

from hone import LocalBackend, TrainableModel
from hone.backends import local as module
from hone.errors import ConfigError, ServerError

pytestmark = pytest.mark.e2e


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def gone(pid: int) -> bool:
    deadline = time.monotonic() + PATIENCE_S
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not alive(pid)


def server_pid(backend: LocalBackend) -> int:
    assert backend._server is not None
    return backend._server.pid


async def test_nothing_starts_before_it_is_used_and_many_users_start_one(
    prose: Prose, tmp_path: Path
):
    backend = LocalBackend(tmp_path / "root")
    assert not (tmp_path / "root").exists()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(5):
            tasks.create_task(backend.connect())
    pid = server_pid(backend)
    assert backend.base_url.startswith("http://127.0.0.1:")
    started = (tmp_path / "root/logs/server.log").read_text().count("server started")
    assert (alive(pid), started) == (True, 1)
    await backend.close()
    assert not alive(pid)
    await backend.close()  # once more is nothing
    with pytest.raises(ServerError) as caught:
        await backend.connect()
    prose(caught)


async def test_a_restarted_server_continues(tmp_path: Path):
    model = TrainableModel(name="agent", project="p", base_model="smollm2-135m-instruct")
    for _ in range(2):
        async with LocalBackend(tmp_path) as backend:
            assert (await backend.register(model)).step == 0
    log = (tmp_path / "logs/server.log").read_text()
    assert log.count("model registered") == 1, "the second server knew it"


def test_its_output_is_rotated_and_its_last_words_are_shown(tmp_path: Path):
    output = tmp_path / "logs" / "server.out"
    output.parent.mkdir()
    output.write_text("x" * 5000)
    with LocalBackend(tmp_path, settings={"log_bytes": "4096"}) as backend:
        backend.start()
        assert output.with_name("server.out.1").read_text() == "x" * 5000
        with output.open("a") as file:
            file.write("the last line\n")
        assert backend._server is not None
        backend._server.kill()
        backend._server.wait(PATIENCE_S)
        shown = str(backend.lost())
    assert "exit status -9" in shown and shown.endswith("\nthe last line")
    assert "x" * 10 not in shown


def test_a_key_is_asked_for_and_sent(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HONE_API_KEY", "secret")
    with LocalBackend(tmp_path) as backend:
        model = TrainableModel(name="agent", base_model=str(tiny_model))
        info = asyncio.run(backend.register(model))
        assert info.name == "agent"
        backend.api_key = "wrong"
        with pytest.raises(Exception, match="send the server's key"):
            asyncio.run(backend.step(model))


def test_a_root_in_use_is_refused_in_the_server_s_words(prose: Prose, tmp_path: Path):
    with LocalBackend(tmp_path) as first:
        first.start()
        second = LocalBackend(tmp_path)
        with pytest.raises(ServerError) as caught:
            second.start()
        prose(caught)
        assert str(tmp_path / "logs") in str(caught.value)
        assert first.lost() is None
        assert "training API" in first.output.read_text(), "what the first one said is still there"


def test_a_root_that_cannot_be_written_to_is_refused(prose: Prose, tmp_path: Path):
    (tmp_path / "file").touch()
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "logs").touch()
    for root in (tmp_path / "file", tmp_path / "root"):
        with LocalBackend(root) as backend, pytest.raises(ServerError) as refused:
            backend.start()
        prose(refused)
        assert place_of(refused) == str(root)


def test_an_empty_path_is_not_the_current_directory(prose: Prose):
    with pytest.raises(ConfigError) as caught:
        LocalBackend("")
    prose(caught)


def test_a_server_that_printed_nothing_may_have_had_no_space_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with LocalBackend(tmp_path) as backend, pytest.raises(ServerError) as refused:
        backend.start()
    said = r"ended \(1\)\. It printed nothing to .*/server\.out; [0-9.]+ MiB are free there\."
    assert re.search(said, str(refused.value))


def test_a_server_on_the_same_root_is_shared_where_that_is_asked_for(tmp_path: Path):
    with LocalBackend(tmp_path, api_key="k") as first:
        first.start()
        second = LocalBackend(tmp_path, share=True, api_key="k")
        asyncio.run(second.health())
        assert (second.base_url, second.shared) == (first.base_url, True)
        second.stop()
        assert asyncio.run(first.health())["status"] == "ok", "it is not the second one's to stop"
        third = LocalBackend(tmp_path, share=True, api_key="k")
        third.start()
        assert third.lost() is None
    assert not (tmp_path / "server.json").exists()
    ended = pytest.raises(ServerError, match="which another command had started, has ended")
    with socket.socket() as taken, ended:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Bound, so that no other test's server gets this port; nothing answers there.
        taken.bind(("127.0.0.1", int(third.base_url.rpartition(":")[2])))
        asyncio.run(third.health())


def test_where_no_server_answers_one_is_started_though_sharing_is_allowed(tmp_path: Path):
    stale = {"host": "127.0.0.1", "port": 1, "pid": os.getpid()}
    (tmp_path / "server.json").write_text(json.dumps(stale))
    with LocalBackend(tmp_path, share=True) as backend:
        backend.start()
        assert not backend.shared and server_pid(backend)


def test_a_server_that_never_answers_is_given_up(
    prose: Prose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "START_S", 0.01)
    backend = LocalBackend(tmp_path)
    with pytest.raises(ServerError) as caught:
        backend.start()
    prose(caught, free=re.compile(r"[\d.]+ MiB"))
    assert backend._server is None


async def test_a_server_that_died_is_reported_at_once(
    prose: Prose, tmp_path: Path, tiny_model: Path
):
    async with LocalBackend(tmp_path) as backend:
        model = TrainableModel(name="agent", base_model=str(tiny_model))
        await backend.register(model)
        ended = asyncio.create_task(backend.ended())
        await backend.step(model)
        assert not ended.done()
        os.kill(server_pid(backend), signal.SIGKILL)
        assert "ended with exit status -9" in str(await asyncio.wait_for(ended, PATIENCE_S))
        backend.patience_s = 3600  # for servers that may come back
        with pytest.raises(ServerError) as caught:
            await backend.step(model)
        prose(caught)
        assert str(tmp_path / "logs" / "server.log") in str(caught.value)


@pytest.mark.parametrize("end", ["raise SystemExit(3)", "import os; os.kill(os.getpid(), 9)"])
def test_the_server_ends_with_its_process_however_that_ends(tmp_path: Path, end: str):
    code = (
        "import hone, sys\n"
        f"backend = hone.LocalBackend({str(tmp_path)!r})\n"
        "backend.start()\n"
        "print(backend._server.pid, flush=True)\n"
        f"{end}\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert gone(int(done.stdout)), done.stderr
    assert "server stopping" in (tmp_path / "logs/server.log").read_text()
