"""Large bodies are read by another process: the event loop answers others meanwhile."""

import asyncio
import errno
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from tests.fakes import ScriptedEngine
from tests.patience import PATIENCE_S
from tests.prose import Prose, place_of
from tests.server.api import JOBS, Open, group, job
from tests.server.conftest import MakeState, Server

from hone.chat import chatml
from hone.errors import DiskFull, Unavailable, Unprocessable
from hone.files.owned import MARK
from hone.learner.packed import unpack_groups
from hone.server.serve import chat_tasks
from hone.server.settings import Settings
from hone.server.state import State
from hone.server.train import tasks
from hone.server.workers import NICENESS, WorkerPool
from hone.types import FieldError

pytestmark = pytest.mark.e2e

LARGE = 600
"""Bytes; what is larger goes to a worker."""
LONG = "the weather " * 60


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, tokenizer: Any, tiny_model: Path
) -> Iterator[Server]:
    """One for all tests: its worker takes seconds to start."""
    engine = ScriptedEngine(["ok"], tokenizer=tokenizer)
    options = Settings(
        root=tmp_path_factory.mktemp("hone"),
        device="cpu",
        large_body_bytes=LARGE,
        body_processes=1,
        allow_base_models=(str(tiny_model),),
    )
    server = Server(State(options, open_engine=lambda name: engine), engine)
    yield server.start()
    server.stop()


def _body(model: Path, *texts: str, **more: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return {"model": str(model), "messages": messages, **more}


async def _post(server: Server, body: Any, path: str = "/v1/chat/completions") -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        return await client.post(server.inference_url + path, content=content, headers=headers)


async def test_a_large_chat_is_parsed_and_tokenized_in_another_process(
    server: Server, tiny_model: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = chatml.encode

    def encode_small(tokenizer: Any, text: str) -> list[int]:
        assert len(text) < LARGE, "a large text is tokenized in the server's own process"
        return encode(tokenizer, text)

    def refuse(body: bytes) -> Any:
        raise AssertionError("a large body is parsed in the server's own process")

    monkeypatch.setattr(chatml, "encode", encode_small)
    monkeypatch.setattr(chat_tasks, "read_json", refuse)
    path = "/rollout/r0/v1/chat/completions"
    answer = await _post(server, _body(tiny_model, LONG), path)
    assert answer.status_code == 200, answer.text
    (worker,) = server.state.workers.pids
    assert worker != os.getpid()
    (call,) = server.state.calls.rollout("r0")
    monkeypatch.undo()
    text = tokenizer.apply_chat_template(call.messages, tokenize=False, add_generation_prompt=True)
    assert call.call.prompt_ids == tokenizer.encode(text, add_special_tokens=False)


async def test_a_large_turn_continues_the_ids_of_the_one_before(
    server: Server, tiny_model: Path
) -> None:
    path = "/rollout/r1/v1/chat/completions"
    reply = (await _post(server, _body(tiny_model, LONG), path)).json()["choices"][0]
    body = _body(tiny_model, LONG, reply["message"]["content"], "and tomorrow?")
    assert (await _post(server, body, path)).status_code == 200
    first, second = server.state.calls.rollout("r1")
    before = [*first.call.prompt_ids, *first.call.completion_ids]
    assert second.outcome == "bridged" and second.index == 1
    assert second.call.prompt_ids[: len(before)] == before


async def test_a_large_request_of_the_responses_api(
    server: Server, tiny_model: Path, tokenizer: Any
) -> None:
    path = "/rollout/r2/v1/responses"
    first = (await _post(server, {"model": str(tiny_model), "input": "the wind"}, path)).json()
    body = {"model": str(tiny_model), "input": LONG, "previous_response_id": first["id"]}
    second = (await _post(server, body, path)).json()
    before = [*first["prompt_token_ids"], *first["token_ids"]]
    assert second["prompt_token_ids"][: len(before)] == before
    assert LONG in tokenizer.decode(second["prompt_token_ids"])
    body = {"model": str(tiny_model), "input": "x" * 3000}
    error = (await _post(server, body, path)).json()["error"]
    assert (error["param"], error["code"]) == ("input", "context_length_exceeded")


async def test_other_requests_are_answered_while_a_large_body_is_read(
    server: Server, tiny_model: Path
) -> None:
    """The worker is stopped, so the large request takes for ever; all share one scope."""
    await _post(server, _body(tiny_model, LONG))
    (worker,) = server.state.workers.pids
    os.kill(worker, signal.SIGSTOP)
    try:
        large = [asyncio.create_task(_post(server, _body(tiny_model, LONG))) for _ in range(40)]
        async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
            health = await client.get(server.control_url + "/health")
        small = await asyncio.gather(*(_post(server, _body(tiny_model, "hi")) for _ in range(30)))
        assert health.status_code == 200
        assert [answer.status_code for answer in small] == [200] * 30
        assert not any(task.done() for task in large)
    finally:
        os.kill(worker, signal.SIGCONT)
    assert {(await task).status_code for task in large} == {200}
    assert server.state.workers.pids == [worker]


@pytest.mark.parametrize(
    ("path", "make", "param"),
    [
        ("/v1/chat/completions", lambda m: b"[" * LARGE, None),
        ("/v1/chat/completions", lambda m: _body(m, LONG, tempo=1), "tempo"),
        ("/v1/chat/completions", lambda m: _body(m, LONG * 5), "messages"),
        ("/v1/chat/completions", lambda m: _body(m, "a" * 10**6), "messages"),
        (
            "/v1/chat/completions",
            lambda m: _body(m, "hi", metadata={}) | {"tools": [[]] * 150000},
            "messages",
        ),
        (
            "/v1/completions",
            lambda m: {"model": str(m), "prompt": [5] * 10000},
            "prompt",
        ),
        (
            "/v1/completions",
            lambda m: {"model": str(m), "prompt": "a" * 3 * 10**6},
            "prompt",
        ),
        ("/v1/completions", lambda m: {"model": str(m), "prompt": LONG * 5}, "prompt"),
    ],
)
async def test_invalid_large_requests_are_refused_like_small_ones(
    prose: Prose,
    server: Server,
    tiny_model: Path,
    path: str,
    make: Callable[[Path], Any],
    param: str | None,
) -> None:
    answer = await _post(server, make(tiny_model), path)
    error = answer.json()["error"]
    assert answer.status_code == 400, answer.text
    assert error["param"] == param
    prose(error["message"])
    assert len(answer.content) < 2000


async def test_a_worker_that_dies_costs_its_request_alone(
    prose: Prose, server: Server, tiny_model: Path
) -> None:
    await _post(server, _body(tiny_model, LONG))
    (worker,) = server.state.workers.pids
    os.kill(worker, signal.SIGSTOP)
    lost = asyncio.create_task(_post(server, _body(tiny_model, LONG)))
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        await client.get(server.control_url + "/health")
    while not server.state.workers.busy:
        await asyncio.sleep(0)
    os.kill(worker, signal.SIGKILL)
    answer = await lost
    assert answer.status_code == 503
    prose(answer.json()["error"]["message"])
    assert (await _post(server, _body(tiny_model, LONG))).status_code == 200
    assert server.state.workers.pids != [worker]


async def test_a_large_job_becomes_the_job_that_a_small_one_would(
    open_api: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JSON may be padded with spaces: the same job, larger."""
    api = await open_api(held=True, large_body_bytes=20000, body_processes=1)
    await api.register()

    async def large(**fields: Any) -> httpx.Response:
        return await api.client.post(JOBS, content=json.dumps(job() | fields).ljust(30000))

    small = await api.submit(idempotency_key="k")
    wrong = {"groups": [group(1.0, 0.0), group(2.0)], "config": {"learning_rat": 1}}
    outside = job()
    outside["groups"][0]["trajectories"][1]["calls"][0]["prompt_ids"] = [10**6]
    refusals = [
        await api.refused(groups=3),
        await api.refused(**wrong),
        await api.refused(groups=outside["groups"]),
        await api.refused(404, model="nobody"),
    ]
    for name in ("json", "resolve_groups"):
        monkeypatch.delattr(tasks, name)  # not needed in this process
    repeated, other = await large(idempotency_key="k"), await large(idempotency_key="l")
    assert (repeated.status_code, other.status_code) == (202, 202), other.text
    assert repeated.json()["id"] == small.id
    ids = (small.id, other.json()["id"])
    stored = [unpack_groups(api.state.jobs.packed_groups(name)) for name in ids]
    of_large, same = ([one.model_dump() for one in groups] for groups in stored)
    assert of_large == same
    assert other.json()["counts"] == small.counts == {"by_tokens": 2}
    answers = [
        await large(groups=3),
        await large(**wrong),
        await large(groups=outside["groups"]),
        await large(model="nobody"),
    ]
    assert [answer.json() for answer in answers] == refusals


async def test_errors_keep_their_fields_on_the_way_back(prose: Prose) -> None:
    pool = WorkerPool(1)
    try:
        with pytest.raises(Unprocessable) as raised:
            await pool.run(_raise_unprocessable)
        assert raised.value.fields == (FieldError(("groups", 0), "wrong"),)
        prose(raised)
        assert place_of(raised) == "groups.0"
    finally:
        pool.close()


def _raise_unprocessable() -> None:
    raise Unprocessable([FieldError(("groups", 0), "wrong")])


PRIORITY = """
import os, threading

def niceness():
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

WHILE_IMPORTED = niceness()

def nicenesses(body):
    return WHILE_IMPORTED, niceness()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="threads have a niceness of their own on Linux")
async def test_a_process_starts_at_the_priority_of_the_server_and_reads_at_a_lower_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a busy engine, its imports would take many seconds at the low priority."""
    (tmp_path / "priority_task.py").write_text(PRIORITY)
    monkeypatch.syspath_prepend(tmp_path)
    task = importlib.import_module("priority_task")
    own = task.niceness()
    pool = WorkerPool(1)
    try:
        assert [await pool.run(task.nicenesses, b"body") for _ in range(2)] == [(own, NICENESS)] * 2
    finally:
        pool.close()


async def test_a_task_beyond_its_deadline_is_stopped(prose: Prose) -> None:
    pool = WorkerPool(1, deadline_s=0.1)
    try:
        with pytest.raises(Unavailable) as caught:
            await pool.run(time.sleep, 600)
        prose(caught)
        assert pool.pids == []
    finally:
        pool.close()


def _files(body: bytes, directory: Path) -> list[bytes]:
    return sorted(file.read_bytes() for file in directory.rglob("*") if file.is_file())


async def test_temporary_files_of_bodies_are_under_the_root_and_removed(
    tmp_path: Path, make_state: MakeState
) -> None:
    make_state().store.close()
    left = tmp_path / "hone" / ".bodies" / "hone-body-x" / "0"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"of a server that was killed")
    state = make_state()
    assert not left.exists()
    try:
        assert await state.workers.run(_files, b"a body", left.parents[1]) == [b"", b"a body"]
        assert [path.name for path in left.parents[1].iterdir()] == [MARK]
    finally:
        state.workers.close()
        state.store.close()


async def test_a_full_disk_does_not_count_as_a_dead_process(
    prose: Prose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, body: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    pool = WorkerPool(1, directory=tmp_path / "bodies")
    try:
        worker = await pool.run(os.getpid)
        with monkeypatch.context() as patch, pytest.raises(DiskFull) as caught:
            patch.setattr(Path, "write_bytes", full)
            await pool.run(_files, b"a body", tmp_path)
        prose(caught)
        assert pool.pids == [worker]
    finally:
        pool.close()


_OWNER = """
import asyncio, os, sys, time
from hone.server.workers import NICENESS, WorkerPool

async def main():
    pool = WorkerPool(1)
    print(await pool.run(os.getpid), flush=True)
    await pool.run(time.sleep, 600)

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_a_worker_at_work_ends_with_a_server_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "owner.py"
    script.write_text(_OWNER)
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        worker = psutil.Process(int(owner.stdout.readline()))
        owner.kill()
    worker.wait(PATIENCE_S)
