"""RemoteBackend when things go wrong: lost answers, broken streams, refusals, cancellation."""

import asyncio
import logging
import re
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import pytest
import pytest_asyncio
from fastapi import Request, Response
from fastapi.responses import JSONResponse
from openai.types.chat import ChatCompletion
from tests.patience import PATIENCE_S
from tests.prose import Prose
from tests.sdk.conftest import serving
from tests.sdk.standin import Link, StandIn, refusal

from hone import RemoteBackend, TrainableModel, TrainConfig, Trajectory, TrajectoryGroup, errors
from hone.backends import http, remote
from hone.backends.base import Backend, TrainResult
from hone.trajectory import JobRequest
from hone.types import Call

MODEL = TrainableModel(name="agent", project="p", base_model="b")


def groups() -> list[TrajectoryGroup]:
    call = Call(prompt_ids=[1], completion_ids=[2], logprobs=[-1.0])
    return [TrajectoryGroup([Trajectory(calls=[call], reward=r) for r in (0, 1)])]


@pytest_asyncio.fixture
async def standin() -> StandIn:
    return StandIn()


@pytest_asyncio.fixture
async def link(standin: StandIn) -> AsyncIterator[Link]:
    async with serving(standin.app) as url, Link(urlsplit(url).port or 0).running() as link:
        yield link


@pytest.fixture
def backend(link: Link) -> RemoteBackend:
    return RemoteBackend(link.url, "secret", patience_s=5)


async def start(backend: RemoteBackend, standin: StandIn, **options: Any) -> "asyncio.Task[Any]":
    """A `train` whose job the server has."""
    task = asyncio.create_task(backend.train(MODEL, groups(), **options))
    await asyncio.wait_for(standin.submitted.wait(), PATIENCE_S)
    return task


# ---- what is sent -----------------------------------------------------------------------------


async def test_metrics_are_sent_again_with_their_key(backend: RemoteBackend, standin: StandIn):
    bodies: list[dict[str, Any]] = []

    @standin.app.post("/v1/training/models/p/agent/metrics")
    async def log(body: dict[str, Any]) -> Response:
        bodies.append(body)
        if len(bodies) == 1:  # logged, and the answer is lost
            return refusal(502, "the proxy has no answer", "Unavailable")
        return JSONResponse({"step": 4})

    for _ in range(2):
        await backend.log(MODEL, {"reward": 0.5}, split="val", step=4)
    first, again, other = (body["idempotency_key"] for body in bodies)
    assert first == again != other


async def test_register_prepare_and_step(backend: RemoteBackend, standin: StandIn):
    assert isinstance(backend, Backend)
    model = TrainableModel(name="agent", project="p", base_model="b")
    await model.register(backend)
    # The port that answered, and not the one the server names, which may be out of reach.
    assert (model.inference_base_url, model.inference_api_key) == (
        f"{backend.base_url}/v1",
        "secret",
    )
    assert model.get_inference_name(step=2) == "p/agent@2"
    assert await model.get_step() == 4
    assert [(method, path) for method, path, _ in standin.requests] == [
        ("POST", "/v1/training/models"),
        ("POST", "/v1/training/models/p/agent/prepare"),
        ("GET", "/v1/training/models/p/agent"),
    ]
    assert {headers["authorization"] for *_, headers in standin.requests} == {"Bearer secret"}


async def test_a_job_says_only_what_was_written(backend: RemoteBackend, standin: StandIn):
    config = TrainConfig(learning_rate=1e-4, loss="dapo")
    task = await start(backend, standin, config=config, beta=0.1, learning_rate=2e-4)
    standin.emit("done", step=5, metrics={"loss": 0.5}, reason=None)
    assert await task == TrainResult(
        step=5, metrics={"loss": 0.5}, job="job-0", counts={"by_tokens": 1}
    )
    sent = standin.job.request
    assert sent.model == "p/agent"
    assert sent.config == {"learning_rate": 2e-4, "loss": "dapo", "beta": 0.1}
    assert [[t.reward for t in group] for group in sent.groups] == [[0, 1]]


async def test_a_choice_of_a_hone_server_is_sent_with_plain_numbers_as_logprobs(
    backend: RemoteBackend, standin: StandIn
):
    tokens = [
        {"token": "a", "bytes": [97], "logprob": -0.25, "top_logprobs": []},
        {"token": "b", "bytes": [98], "logprob": -1.5, "top_logprobs": []},
    ]
    choice = {
        "index": 0,
        "finish_reason": "stop",
        "message": {"role": "assistant", "content": "ab"},
        "logprobs": {"content": tokens, "refusal": None},
    }
    ours = {"token_ids": [5, 6], "call_id": f"call-{'0' * 20}", "policy_step": 3}
    made = [
        choice | ours,
        choice,  # of another server
        choice | ours | {"token_ids": [5]},  # the server says what is wrong
        choice | ours | {"logprobs": None},
    ]
    choices = [ChatCompletion.construct(choices=[one]).choices[0] for one in made]
    history = Trajectory(messages_and_choices=choices)
    groups = [TrajectoryGroup([history])]
    await backend.submit(JobRequest(model="p/agent", groups=groups, idempotency_key="one"))
    short, *whole = standin.job.request.groups[0].trajectories[0].messages_and_choices
    assert short["logprobs"] == {"token_logprobs": [-0.25, -1.5]}
    assert short["message"]["content"] == "ab" and short["finish_reason"] == "stop"
    assert {key: short[key] for key in ours} == ours
    sent = [one["logprobs"] and one["logprobs"]["content"] for one in whole]
    assert sent == [tokens, tokens, None]
    # Only in the request: what the user has, and what is logged, is whole.
    logged = history.model_dump()["messages_and_choices"][0]
    assert logged["logprobs"]["content"] == tokens


async def test_every_train_is_a_job_of_its_own(backend: RemoteBackend, standin: StandIn):
    for number in range(2):
        standin.submitted.clear()
        task = await start(backend, standin)
        standin.emit("done", step=number + 1)
        assert (await task).step == number + 1
        standin.jobs.clear()
    assert len(standin.by_key) == 2


@pytest.mark.parametrize(
    "keys",
    [
        {"learning_rat": 1},
        {"loss_fn": "dro"},
        {"zzz": 1},
    ],
)
async def test_unknown_keys_are_refused_before_anything_is_sent(prose: Prose, keys: Any):
    with pytest.raises(errors.ConfigError) as caught:
        await RemoteBackend("http://127.0.0.1:1").train(MODEL, groups(), **keys)
    prose(caught)


async def test_wrong_values_and_groups_are_refused_before_anything_is_sent(prose: Prose):
    backend = RemoteBackend("http://127.0.0.1:1")
    with pytest.raises(ValueError, match="learning_rate"):
        await backend.train(MODEL, groups(), learning_rate=-1)
    with pytest.raises(errors.ConfigError) as caught:
        await backend.train(MODEL, [Trajectory()])  # pyright: ignore[reportArgumentType]  # the mistake
    prose(caught)

    async def never() -> Trajectory:
        return Trajectory()

    unfinished = TrajectoryGroup([never(), never()])
    with pytest.raises(errors.ConfigError) as caught:
        await backend.train(MODEL, [unfinished])
    prose(caught)
    await unfinished


# ---- a server out of reach --------------------------------------------------------------------


async def test_a_lost_answer_makes_no_second_job(
    backend: RemoteBackend, standin: StandIn, link: Link
):
    await backend.step(MODEL)
    link.lose_answers = 2
    task = await start(backend, standin)
    standin.emit("done", step=1)
    assert (await asyncio.wait_for(task, PATIENCE_S)).step == 1
    posts = [path for method, path, _ in standin.requests if method == "POST"]
    assert posts == ["/v1/training/jobs"] * 3
    assert len(standin.jobs) == 1


async def test_a_broken_stream_goes_on_after_the_last_event(
    backend: RemoteBackend,
    standin: StandIn,
    link: Link,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("hone.tasks.progress.LINE_S", 0.0)  # a line for every event
    lines: list[str] = []

    async def shown(count: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while len(lines) < count:
                await asyncio.sleep(0.005)
                lines.extend(capsys.readouterr().err.splitlines())

    task = await start(backend, standin, verbose=True)
    standin.emit("queued")
    standin.emit("started")
    await shown(2)
    link.cut()
    standin.emit("progress", phase="train", step=0, steps=1, row=1, rows=4)
    await shown(3)
    standin.emit("done", step=1)
    assert (await asyncio.wait_for(task, PATIENCE_S)).step == 1
    await shown(5)
    assert lines == [
        "train p/agent: 0/0 queued",
        "train p/agent: 0/0 started",
        "train p/agent: 1/4 train step 1/1",
        "train p/agent: 4/4 done",
        "train p/agent: 4/4 done",
    ]
    requests = [headers for _, path, headers in standin.requests if path.endswith("/events")]
    assert [headers["last-event-id"] for headers in requests] == ["0", "2"]


async def test_a_stream_that_ends_early_is_opened_again(
    backend: RemoteBackend, standin: StandIn, monkeypatch: pytest.MonkeyPatch
):
    refused = iter([refusal(503, "closing", "Unavailable")] * 2)

    def refuse(request: Request) -> Response | None:
        return next(refused, None) if request.url.path.endswith("/events") else None

    standin.refuse = refuse
    task = await start(backend, standin)
    standin.emit("done", step=1)
    assert (await asyncio.wait_for(task, PATIENCE_S)).step == 1


async def test_a_silent_stream_is_reopened(
    backend: RemoteBackend, standin: StandIn, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(http, "SILENCE_S", 0.2)
    task = await start(backend, standin)
    async with asyncio.timeout(PATIENCE_S):
        while sum(path.endswith("/events") for _, path, _ in standin.requests) < 2:
            await asyncio.sleep(0.01)
    standin.emit("done", step=1)
    assert (await asyncio.wait_for(task, PATIENCE_S)).step == 1


async def test_the_error_after_the_last_retry_names_the_job(
    prose: Prose,
    backend: RemoteBackend,
    standin: StandIn,
    link: Link,
    caplog: pytest.LogCaptureFixture,
):
    backend.patience_s = 0.3
    task = await start(backend, standin)
    async with asyncio.timeout(PATIENCE_S):
        while not any(path.endswith("/events") for _, path, _ in standin.requests):
            await asyncio.sleep(0.01)
    link.down = True
    link.cut()
    with pytest.raises(errors.Unavailable) as caught:
        await asyncio.wait_for(task, PATIENCE_S)
    prose(caught, why=re.compile(r"(?<=answers there \().+?(?=\)\. Start)"))  # httpx's words
    assert caught.value.__notes__ == [
        "Job job-0 was accepted and continues when its server is back."
    ]
    (waits,) = [r.message for r in caplog.records if "Waiting up to" in r.message]  # told once
    assert "no hone server answers there" in waits and waits.endswith("0.3 s for it to come back.")


async def test_a_wrong_address_fails_soon_and_says_what_to_do(
    prose: Prose, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(http, "FIRST_S", 0.3)
    backend = RemoteBackend("http://127.0.0.1:1")  # patience is for servers that answered once
    with pytest.raises(errors.Unavailable) as caught:
        await asyncio.wait_for(backend.step(MODEL), PATIENCE_S)
    prose(caught)


async def test_retry_after_is_respected(backend: RemoteBackend, standin: StandIn):
    answers = iter([refusal(429, "full", "Busy", **{"Retry-After": "1"})])
    standin.refuse = lambda request: next(answers, None)
    started = asyncio.get_running_loop().time()
    assert await backend.step(MODEL) == 4
    assert asyncio.get_running_loop().time() - started >= 1


async def test_a_final_error_is_not_retried(prose: Prose, backend: RemoteBackend, standin: StandIn):
    standin.refuse = lambda _: refusal(
        503, "for good", "Unavailable", **{"x-should-retry": "false"}
    )
    with pytest.raises(errors.Unavailable) as caught:
        await asyncio.wait_for(backend.step(MODEL), PATIENCE_S)
    prose(caught)
    assert len(standin.requests) == 1


async def test_an_engine_that_cannot_start_is_started_once(
    prose: Prose, backend: RemoteBackend, standin: StandIn
):
    """Another start takes minutes and ends in the same way; a request to an engine is retried."""
    standin.refuse = lambda _: refusal(503, "out of memory", "EngineFailed", **{"Retry-After": "1"})
    with pytest.raises(errors.EngineFailed) as caught:
        await asyncio.wait_for(backend.prepare(MODEL), PATIENCE_S)
    prose(caught)
    assert len(standin.requests) == 1
    answers = iter([refusal(503, "crashed", "EngineFailed", **{"Retry-After": "1"})])
    standin.refuse = lambda _: next(answers, None)
    assert await backend.step(MODEL) == 4


# ---- refusals ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "kind", "raised"),
    [
        (400, "invalid_request_error", errors.ConfigError),
        (401, "Unauthorized", errors.Unauthorized),
        (403, "Forbidden", errors.Forbidden),
        (404, "NotFound", errors.NotFound),
        (404, "ModelNotFound", errors.ModelNotFound),
        (409, "Conflict", errors.Conflict),
        (413, "_TooLarge", errors.ConfigError),
        (422, "SampleRefused", errors.SampleRefused),
        (501, "NotInThisVersion", errors.NotInThisVersion),
        (500, "EngineError", errors.EngineError),
        (500, "server_error", errors.ServerError),
    ],
)
async def test_an_error_response_raises_its_exception(
    backend: RemoteBackend, standin: StandIn, status: int, kind: str, raised: type[Exception]
):
    standin.refuse = lambda request: refusal(status, "this is why", kind)
    with pytest.raises(raised, match="this is why") as caught:
        await backend.step(MODEL)
    assert type(caught.value) is raised
    assert ("logs/server.log" in str(caught.value)) == (status == 500)
    assert len(standin.requests) == 1, "what is refused is not sent again"


async def test_wrong_fields_are_named(backend: RemoteBackend, standin: StandIn):
    # The stand-in checks bodies as the real one does: by hone's types, in FastAPI.
    with pytest.raises(errors.Unprocessable) as caught:
        await backend.ask("POST", "/v1/training/models", '{"name": "../x", "base_model": "b"}')
    assert [field.path for field in caught.value.fields] == [("name",)]


async def test_another_server_than_hone(prose: Prose, backend: RemoteBackend, standin: StandIn):
    standin.refuse = lambda request: Response("<html>nginx</html>", 404)
    with pytest.raises(errors.NotFound) as caught:
        await backend.step(MODEL)
    prose(caught)


@pytest.mark.parametrize(
    ("address", "used"),
    [
        ("http://0.0.0.0:7999", "http://127.0.0.1:7999"),
        ("http://gpu:7623/", "http://gpu:7623"),
        ("https://gpu/v1", "https://gpu"),
    ],
)
def test_addresses(address: str, used: str):
    assert RemoteBackend(address).base_url == used


@pytest.mark.parametrize(
    "wrong",
    ["localhost:7623", "ftp://x", "http://", "http://gpu:one", "http://gpu:76230", "http://[::1"],
)
def test_invalid_addresses(prose: Prose, wrong: str):
    with pytest.raises(errors.ConfigError) as caught:
        RemoteBackend(wrong)
    prose(caught)


# ---- how jobs end -----------------------------------------------------------------------------


async def test_a_failed_job_says_which_why_and_where_to_look(
    prose: Prose, backend: RemoteBackend, standin: StandIn
):
    task = await start(backend, standin)
    failure = {"type": "NonFinite", "message": "the loss of row 3 is nan", "traceback": ""}
    standin.emit("failed", failure=failure)
    with pytest.raises(errors.TrainingFailed) as caught:
        await task
    prose(caught, base_url=backend.base_url)


async def test_a_job_cancelled_by_another_client_is_reported_as_cancelled(
    prose: Prose, backend: RemoteBackend, standin: StandIn
):
    task = await start(backend, standin)
    standin.emit("cancelled")
    with pytest.raises(errors.Cancelled) as caught:
        await task
    prose(caught)


async def test_a_job_without_a_gradient_step_says_why(backend: RemoteBackend, standin: StandIn):
    task = await start(backend, standin)
    standin.emit("done", step=4, reason="every group is flat")
    assert (await task).reason == "every group is flat"


async def test_cancelling_train_cancels_the_job(backend: RemoteBackend, standin: StandIn):
    task = await start(backend, standin)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert standin.job.info.state == "cancelled"


async def test_cancelling_train_before_its_answer_came_cancels_the_job_too(
    backend: RemoteBackend, standin: StandIn, link: Link
):
    await backend.step(MODEL)
    link.lose_answers = 1  # the server has the job, and the client does not know its name
    task = await start(backend, standin)
    task.cancel()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert standin.job.info.state == "cancelled"


async def test_cancelling_does_not_hang_on_a_server_that_is_gone(
    backend: RemoteBackend, standin: StandIn, link: Link, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(remote, "WITHDRAW_S", 0.3)
    task = await start(backend, standin)
    link.down = True
    link.cut()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, PATIENCE_S)


async def test_a_job_that_takes_too_long_is_cancelled(
    prose: Prose, backend: RemoteBackend, standin: StandIn
):
    task = await start(backend, standin, timeout_s=0.5)
    with pytest.raises(errors.TrainingFailed) as caught:
        await asyncio.wait_for(task, PATIENCE_S)
    prose(caught)
    assert standin.job.info.state == "cancelled"


def test_one_backend_serves_many_event_loops(standin: StandIn):
    async def step() -> int:
        async with serving(standin.app) as url:
            return await RemoteBackend(url).step(MODEL)

    assert [asyncio.run(step()) for _ in range(2)] == [4, 4]


# ---- jobs by their ids ------------------------------------------------------------------------


async def test_a_job_is_submitted_waited_for_and_asked_about(
    backend: RemoteBackend, standin: StandIn
):
    request = JobRequest(model="p/agent", groups=groups(), idempotency_key="k")
    job = await backend.submit(request)
    assert (await backend.submit(request)).id == job.id, "the same key is the same job"
    heard: list[str] = []
    waiting = asyncio.create_task(
        backend.wait(job.id, on_event=lambda event: heard.append(event.type))
    )
    standin.emit("queued")
    standin.emit("done", step=3)
    done = await asyncio.wait_for(waiting, PATIENCE_S)
    assert (done.state, done.step, heard) == ("done", 3, ["queued", "done"])
    assert await backend.job(job.id) == done
    polled = [path for method, path, _ in standin.requests if method == "GET"]
    assert polled.count(f"/v1/training/jobs/{job.id}") == 2, "once after the last event, once here"


async def test_why_a_job_waits_is_logged_each_reason_once(
    backend: RemoteBackend, standin: StandIn, caplog: pytest.LogCaptureFixture
):
    job = await backend.submit(JobRequest(model="p/agent", groups=groups(), idempotency_key="k"))
    standin.emit("queued")
    for why in ("/root: the disk is full. Free some space.", "the learner was killed"):
        for _ in range(3):  # as often as the server tries
            standin.emit("started")
            standin.emit("queued", waiting_for=why)
    standin.emit("done", step=3)
    with caplog.at_level(logging.WARNING, logger="hone"):
        await backend.wait(job.id)
    assert caplog.messages == [
        f"Job {job.id} waits in the queue: /root: the disk is full. Free some space.",
        f"Job {job.id} waits in the queue: the learner was killed",
    ]


async def test_a_cancelled_wait_does_not_cancel_the_job(backend: RemoteBackend, standin: StandIn):
    job = await backend.submit(JobRequest(model="p/agent", groups=groups(), idempotency_key="k"))
    with pytest.raises(TimeoutError):
        await backend.wait(job.id, timeout_s=0.1)
    assert standin.job.info.state == "queued"
    assert (await backend.cancel(job.id)).state == "cancelled"


async def test_an_unreachable_server_is_a_connection_error_too(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(http, "FIRST_S", 0.1)
    with pytest.raises(ConnectionError, match="no hone server answers there"):
        await RemoteBackend("http://127.0.0.1:1").health()
    assert issubclass(errors.Unreachable, errors.Unavailable)


async def test_another_address_of_the_server_is_given_up_soon(
    prose: Prose, backend: RemoteBackend, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(http, "FIRST_S", 0.1)
    await backend.step(MODEL)  # it has answered, and would be waited for
    with pytest.raises(errors.Unreachable) as caught:
        await backend.served_models("http://127.0.0.1:1/v1")
    prose(caught)


async def test_fields_of_a_newer_server_are_ignored(backend: RemoteBackend, standin: StandIn):
    info = await backend.register(MODEL)
    added = {**info.model_dump(), "invented_later": {"deep": 1}}
    standin.refuse = lambda request: JSONResponse(added)
    assert await backend.model_info(MODEL) == info
