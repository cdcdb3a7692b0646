"""What applies to every request: body size, key, log line, and the form of errors."""

import json
import logging
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from tests.patience import PATIENCE_S
from tests.prose import Prose
from tests.server.conftest import MakeState
from tests.server.small_server import CONFIG, token_groups

from hone.errors import Conflict, EngineError, NotInThisVersion, Unavailable
from hone.files.logs import say
from hone.learner.packed import pack_groups
from hone.server.http.app import create_apps
from hone.server.settings import Settings
from hone.server.telemetry import Metrics, start_logging, stop_logging
from hone.server.train.stages import JobStages
from hone.store.jobs import Pin
from hone.types import ModelSpec
from hone.wire.errors import status_of


def client(app: FastAPI) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app)
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1")


async def test_health_says_what_the_server_does(make_state: MakeState):
    control, inference = create_apps(make_state())
    for app in (control, inference):
        async with client(app) as http:
            for path in ("/health", "/healthcheck"):
                status = (await http.get(path)).json()
                assert (status["status"], status["state"], status["queued"]) == ("ok", "idle", 0)


async def test_durations_do_not_follow_a_clock_that_is_set_back(
    make_state: MakeState, monkeypatch: pytest.MonkeyPatch
):
    state = make_state()
    job = state.jobs.add(
        model=state.models.register(ModelSpec(name="agent", base_model="tiny")),
        groups=pack_groups(token_groups()),
        config=CONFIG,
        counts={},
        request_sha256="0" * 64,
    )
    stages = JobStages(
        state.jobs, state.models, state.checkpoints, state.serving.choice, state.metrics
    )
    taken = stages.take(job.id, Pin(0, "ab" * 32, dtype="float32", row_tokens=4096))
    monkeypatch.setattr(time, "time", lambda: 0.0)  # decades ago
    stages.finish(taken, None, {"metrics": {}, "reason": "nothing to learn"})
    seconds = state.metrics.registry.get_sample_value("hone_job_seconds_sum")
    assert seconds is not None and 0 <= seconds < PATIENCE_S
    async with client(create_apps(state)[0]) as http:
        assert 0 <= (await http.get("/health")).json()["uptime_s"] < PATIENCE_S


async def test_health_lists_what_is_served_if_the_key_is_sent(
    make_state: MakeState, tiny_model: Path
):
    state = make_state(api_key="secret", port=7001, inference_port=8001)
    state.models.register(ModelSpec(name="agent", base_model=str(tiny_model)))
    state.models.register(ModelSpec(name="other", base_model="elsewhere"))
    await state.serving.engines.base(str(tiny_model))
    key = {"Authorization": "Bearer secret"}
    control, inference = create_apps(state)
    for app in (control, inference):
        async with client(app) as http:
            stranger = (await http.get("/health")).json()
            assert stranger["status"] == "ok"
            assert not {"port", "inference_port", "base_models", "root"} & set(stranger)
            status = (await http.get("/health", headers=key)).json()
            assert (status["port"], status["inference_port"]) == (7001, 8001)
            root = str(state.settings.root.absolute()) if app is control else None
            assert status.get("root") == root  # the report's commands name it
            assert status["base_models"] == {str(tiny_model): True, "elsewhere": False}
    await state.serving.close()


async def test_half_of_a_surrogate_pair_is_refused_by_every_route(make_state: MakeState):
    """JSON can spell it, and no file, no log and no response can hold it."""
    control, _ = create_apps(make_state())
    schema = control.openapi()
    count = 0
    async with client(control) as http:
        for path, methods in schema["paths"].items():
            for method, operation in methods.items():
                if "requestBody" not in operation:
                    continue
                form = operation["requestBody"]["content"]["application/json"]["schema"]
                form = schema["components"]["schemas"].get(
                    form.get("$ref", "").rpartition("/")[2], form
                )
                keys = form.get("properties", {"model": {}})
                needed = dict.fromkeys(form.get("required", ()), "x")
                for body in (
                    {"\ud800": 1},
                    *({**needed, key: "\ud800"} for key in keys),
                    *({**needed, key: {"\ud800": 1.0, "x": "\ud800"}} for key in keys),
                ):
                    written = json.dumps(body)  # httpx would not write it
                    answer = await http.request(
                        method,
                        re.sub(r"{\w+}", "x", path),
                        content=written,
                        headers={"content-type": "application/json"},
                    )
                    count += 1
                    assert 400 <= answer.status_code < 500, (path, written, answer.text)
                    assert answer.json()["error"]["message"]
    assert count >= 30, count


async def test_training_routes_exist_only_on_the_control_port(make_state: MakeState):
    control, inference = create_apps(make_state())
    async with client(control) as http:
        assert (await http.get("/v1/training/jobs")).status_code == 200
        assert (await http.get("/metrics")).status_code == 200
    async with client(inference) as http:
        for path in ("/v1/training/jobs", "/metrics", "/register", "/_train_model"):
            assert (await http.get(path)).status_code == 404, path


async def test_a_body_that_is_too_large_is_refused_with_or_without_content_length(
    prose: Prose, make_state: MakeState
):
    control, _ = create_apps(make_state(max_body_bytes=1000))

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b" " * 100

    async with client(control) as http:
        for content in (b" " * 1001, pieces()):
            answer = await http.post("/v1/training/models", content=content)
            assert answer.status_code == 413
            prose(answer.json()["error"]["message"])


async def test_a_body_that_does_not_parse_names_the_field(make_state: MakeState):
    control, _ = create_apps(make_state())
    async with client(control) as http:
        answer = await http.post("/v1/training/models", json={"name": "../x", "base_model": "b"})
    assert answer.status_code == 422
    assert answer.json()["error"]["param"] == "name"
    assert answer.json()["detail"][0]["loc"] == ["body", "name"]
    assert "input" not in answer.json()["detail"][0]


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        ("application/x-www-form-urlencoded", "the body's Content-Type is 'application/x-www-form"),
        (
            None,
            "no Content-Type is sent; send JSON, and -H 'Content-Type: application/json' with it",
        ),
    ],
)
async def test_a_body_without_the_content_type_of_json(
    make_state: MakeState, tiny_model: Path, sent: str | None, why: str
):
    """What `curl -d` sends unless it is told otherwise."""
    control, _ = create_apps(make_state())
    content = json.dumps({"name": "agent", "base_model": str(tiny_model)}).encode()
    async with client(control) as http:
        headers = {} if sent is None else {"Content-Type": sent}
        answer = await http.post("/v1/training/models", content=content, headers=headers)
        assert answer.status_code == 415
        assert answer.json()["error"]["message"].startswith(why)
        headers = {"Content-Type": "application/json; charset=utf-8"}
        answer = await http.post("/v1/training/models", content=content, headers=headers)
        assert answer.status_code == 201


@pytest.mark.parametrize("sent", ["text/json", "text/plain; charset=json"])
@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/training/jobs", {"model": "agent", "groups": []}, 404),
        ("/_log", {"model": {"name": "agent", "project": "p"}, "trajectory_groups": []}, 200),
    ],
)
async def test_a_route_for_large_bodies_accepts_the_same_content_types(
    make_state: MakeState, path: str, body: dict[str, Any], status: int, sent: str
):
    """A page of another site may send text/plain with any parameter, and without asking first."""
    control, _ = create_apps(make_state())
    content = json.dumps(body).encode()
    async with client(control) as http:
        answer = await http.post(path, content=content, headers={"Content-Type": sent})
        assert answer.status_code == 415, answer.text
        headers = {"Content-Type": "application/JSON"}
        answer = await http.post(path, content=content, headers=headers)
        assert answer.status_code == status, answer.text


async def test_an_unexpected_error_is_json_and_its_traceback_is_logged(
    make_state: MakeState, caplog: pytest.LogCaptureFixture
):
    state = make_state()
    control, _ = create_apps(state)

    @control.get("/broken")
    async def broken() -> None:
        raise ZeroDivisionError("a secret path /etc/x")

    logging.getLogger("hone.server").propagate = True
    async with client(control) as http:
        answer = await http.get("/broken")
    assert answer.status_code == 500
    message = answer.json()["error"]["message"]
    assert str(state.settings.log_file) in message and "secret" not in answer.text
    assert "ZeroDivisionError" in caplog.text


async def test_requests_are_counted_by_route_and_not_by_address(make_state: MakeState):
    state = make_state()
    control, _ = create_apps(state)
    async with client(control) as http:
        for name in ("a", "b"):
            assert (await http.get(f"/v1/training/jobs/{name}")).status_code == 404
        text = (await http.get("/metrics")).text
    assert 'route="/v1/training/jobs/{job_id}",status="404"} 2.0' in text


async def test_routes_that_bypass_fastapi_have_the_same_paths(make_state: MakeState):
    state = make_state()
    control, _ = create_apps(state)
    chat, body = "/v1/chat/completions", {"model": "nobody", "messages": []}
    async with client(control) as http:
        inside = await http.post(f"/rollout/r1{chat}", json=body)
        assert (inside.status_code, inside.json()["error"]["param"]) == (400, "messages")
        assert (await http.post(f"/rollout/r 1{chat}", json=body)).status_code == 400
        assert (await http.post(f"/rollout/{chat}", json=body)).status_code == 404
        assert (await http.post(f"/rollout/r1/more{chat}", json=body)).status_code == 404
        assert (await http.get(f"/rollout/r1{chat}")).status_code == 405
        counted = (await http.get("/metrics")).text
    route = '{route="/rollout/{rollout_id}/v1/chat/completions",status="400"}'
    assert f"hone_requests_total{route} 2.0" in counted


def test_every_error_has_its_status():
    assert [
        status_of(e) for e in (Conflict(), NotInThisVersion(), Unavailable(), EngineError())
    ] == [
        409,
        501,
        503,
        500,
    ]


@pytest.mark.parametrize("as_json", [False, True])
def test_a_log_line_has_its_fields(tmp_path: Path, as_json: bool):
    start_logging(Settings(root=tmp_path, log_format="json" if as_json else "text"))
    try:
        say("job done", job="j 1", took_s=0.123456, step=2)
    finally:
        stop_logging()
    line = (tmp_path / "logs" / "server.log").read_text().strip()
    if as_json:
        fields: dict[str, Any] = json.loads(line)
        assert (fields["what"], fields["job"], fields["step"]) == ("job done", "j 1", 2)
    else:
        assert line.endswith('info job done job="j 1" took_s=0.1235 step=2')


def test_two_servers_in_one_process_have_separate_metrics():
    one, other = Metrics(), Metrics()
    one.jobs.labels("done").inc()
    assert other.registry.get_sample_value("hone_jobs_total", {"state": "done"}) is None
