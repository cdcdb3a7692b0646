"""No text that a server writes has a secret: its logs, its errors, its jobs, logged trajectories."""

import json
import logging
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest
from tests.server.conftest import MakeState

from hone import model_files
from hone.errors import BadRequest, FieldError, Unprocessable
from hone.files.logs import OUTPUTS, log, say, write_output
from hone.files.redact import HIDDEN, redact_json
from hone.server.http.app import create_apps
from hone.server.settings import Settings
from hone.server.supervision import Part
from hone.server.telemetry import start_logging, stop_logging
from hone.store.checkpoints import log_groups
from hone.store.database import Store
from hone.store.jobs import JobStore
from hone.store.models import ModelStore
from hone.trajectory import Trajectory, TrajectoryGroup, failure_of
from hone.types import Failure, ModelSpec, TrainConfig
from hone.wire.access import derive_inference_key

TOKEN = "value/of the+server-8Xq2"
PASSWORD = "pa55-of-the-db"
JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJ1c2VyLTQyIn0.c2lnbmF0dXJlLW9mLWEtand0"
LEAK = f"{TOKEN} at postgres://app:{PASSWORD}@db/x with {JWT}"
SHOWN = f"{HIDDEN} at postgres://app:{HIDDEN}@db/x with {HIDDEN}"
KEY = "the-key-of-the-server"


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVER_TOKEN", TOKEN)


def has_secret(text: str) -> bool:
    parts = (TOKEN, PASSWORD, *JWT.split("."), KEY, derive_inference_key(KEY))
    return any(part in text for part in parts)


def _message() -> None:
    log.warning("cannot connect: %s", LEAK)


def _field() -> None:
    say("a part failed", reason=LEAK, nested={"text": [LEAK]}, step=3)


def _exception() -> None:
    try:
        try:
            raise ConnectionError(LEAK)
        except ConnectionError as cause:
            raise RuntimeError(f"the engine: {LEAK}") from cause
    except RuntimeError as error:
        log.error("a job failed", exc_info=error)


def _stack() -> None:
    log.warning("a stack", stack_info=True)


def _keys() -> None:
    say("keys", given=f"{KEY} and {derive_inference_key(KEY)}")


@pytest.mark.parametrize("format", ["text", "json"])
@pytest.mark.parametrize("write", [_message, _field, _exception, _stack, _keys])
def test_the_log_has_no_secret(
    write: Any, format: Literal["text", "json"], tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    start_logging(Settings(root=tmp_path, log_format=format))
    try:
        write()
    finally:
        stop_logging()
    written = (tmp_path / "logs" / "server.log").read_text()
    assert written and not has_secret(written + capfd.readouterr().err)
    if write is _stack:
        assert "test_secrets.py" in written
    else:
        assert HIDDEN in written
    if write is _exception:
        assert "ConnectionError" in written and "RuntimeError: the engine: <hidden>" in written
    if format == "json":
        assert all(json.loads(line) for line in written.splitlines())


@pytest.mark.parametrize("part", OUTPUTS)
def test_the_output_of_a_part_has_no_secret(part: str, tmp_path: Path):
    start_logging(Settings(root=tmp_path))
    try:
        write_output(part, f"loading with {LEAK}", pid=7)
    finally:
        stop_logging()
    written = (tmp_path / "logs" / f"{part}.log").read_text()
    assert written.endswith(f"[7] loading with {SHOWN}\n")


@pytest.mark.parametrize(
    "error",
    [
        BadRequest(f"cannot read {LEAK}"),
        Unprocessable([FieldError(("messages", 0), f"cannot read {LEAK}")]),
    ],
)
async def test_an_error_response_has_no_secret(error: Exception, make_state: MakeState):
    control, _ = create_apps(make_state(api_key=KEY))

    @control.get("/broken")
    async def broken() -> None:
        raise error

    transport = httpx.ASGITransport(control)
    headers = {"Authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(
        transport=transport, base_url="http://127.0.0.1", headers=headers
    ) as http:
        for path in ("/broken", f"/nothing?{LEAK}", f"/{JWT}"):
            answer = await http.get(path)
            assert answer.status_code >= 400
            assert not has_secret(answer.text), answer.text
        assert "cannot read" in (await http.get("/broken")).text


def test_a_job_stores_no_secret(store: Store, queue: JobStore):
    model = ModelStore(store).register(ModelSpec(name="agent", base_model="tiny"))
    added = {"config": TrainConfig(), "counts": {}, "request_sha256": "a" * 64}
    job = queue.add(model=model, groups=b"", **added)
    queue.move(job.id, "running")
    queue.move(job.id, "queued", waiting_for=f"no engine: {LEAK}")
    assert queue.get(job.id).waiting_for == f"no engine: {SHOWN}"
    queue.move(job.id, "running")
    queue.move(job.id, "failed", failure=Failure(type="LearnerDied", message=f"died: {LEAK}"))
    failure = queue.get(job.id).failure
    assert failure == Failure(type="LearnerDied", message=f"died: {SHOWN}")
    events = [event.model_dump_json() for event in queue.events(job.id, limit=-1)]
    assert events and not has_secret("".join(events))


def test_the_health_of_a_part_has_no_secret():
    part = Part("engine")
    logging.getLogger("hone.server").addHandler(logging.NullHandler())
    part.fail(RuntimeError(LEAK))
    assert part.status()["reason"] == f"RuntimeError: {SHOWN}"


def test_a_failed_rollout_has_no_secret():
    try:
        raise RuntimeError(LEAK)
    except RuntimeError as error:
        failure = failure_of(error)
    assert failure.message == SHOWN
    assert "Traceback" in failure.traceback and not has_secret(
        failure.traceback.replace("LEAK", "")
    )


def test_logged_trajectories_have_no_secret_and_keep_their_tokens(tmp_path: Path):
    token = {"token": "value", "logprob": -0.5, "bytes": [1], "top_logprobs": []}
    choice: dict[str, Any] = {
        "index": 0,
        "finish_reason": "stop",
        "message": {"role": "assistant", "content": LEAK},
        "logprobs": {"content": [token], "refusal": None},
    }
    messages: list[Any] = [{"role": "user", "content": LEAK}, choice]
    group = TrajectoryGroup([Trajectory(messages_and_choices=messages, reward=0.5)])
    model_files.log_trajectories(tmp_path, "train", 1, [group])
    log_groups(tmp_path, "val", 1, [group.model_dump(mode="json")])
    for split in ("train", "val"):
        written = (tmp_path / "trajectories" / split / "0001.jsonl").read_text()
        assert not has_secret(written)
        [trajectory] = json.loads(written)["trajectories"]
        user, answer = trajectory["messages_and_choices"]
        assert (user["content"], answer["message"]["content"]) == (SHOWN, SHOWN)
        assert answer["logprobs"]["content"][0] == token
        assert trajectory["reward"] == 0.5


def test_ids_hashes_and_numbers_of_a_job_stay():
    value = {
        "job": "job_0123456789abcdef",
        "sha256": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
        "completion_ids": [1, 2, 3],
        "logprobs": [-0.5],
        "token_ids": [151643],
        "max_tokens": 12345678,
    }
    assert redact_json(value) == value
