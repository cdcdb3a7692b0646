"""`_type: http`: what a service is sent, what is read from its response, and how it fails."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from fastapi import FastAPI, Request, Response
from tests.prose import Prose
from tests.workflow.rollouts import one_answer, why

from hone.config.build import Served, build
from hone.config.policy import Trained, address_of
from hone.config.schema import read
from hone.errors import ConfigError
from hone.server.http import listen
from hone.wire.access import derive_inference_key
from hone.workflow.run import RolloutResult, run_rollout

MODEL = "http://127.0.0.1:9/v1"
ROOT = "http://127.0.0.1:9/rollout/run:1"


class Service:
    """Remembers its requests and answers as it was told to."""

    def __init__(self, content: bytes = b"ok", status: int = 200) -> None:
        self.content, self.status = content, status
        self.requests: list[tuple[str, str, dict[str, str], bytes]] = []
        self.gate: asyncio.Event | None = None
        self.app = FastAPI()
        self.app.api_route("/{path:path}", methods=["GET", "POST", "PUT"])(self._answer)

    async def _answer(self, request: Request, path: str) -> Response:
        body = await request.body()
        target = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        self.requests.append((request.method, target, dict(request.headers), body))
        if self.gate is not None:
            await self.gate.wait()
        return Response(self.content, self.status)


@asynccontextmanager
async def serving(service: Service) -> AsyncIterator[str]:
    async with listen.serving(service.app, grace_s=1) as url:
        yield url


async def result_of(
    directory: Path, workflow: dict[str, Any], input: Any = "x", **options: Any
) -> RolloutResult:
    file = directory / "config.yml"
    entry = {"_type": "openai", "model": "tiny", "base_url": MODEL, "api_key": "secret"}
    document = {"llms": {"m": entry}, "workflow": {"_type": "http", **workflow}}
    file.write_text(yaml.safe_dump(document))
    async with build(read(file)) as builder:
        trained = Trained("mine", frozenset({"mine"}), "base", frozenset({address_of(MODEL)}))
        builder.served = Served(MODEL, "secret", "mine", "localhost", trained)
        return await run_rollout(await builder.get_workflow(), input, id="run:1", **options)


async def test_the_address_is_in_headers_and_the_input_in_the_body(tmp_path: Path):
    service = Service("gr\N{LATIN SMALL LETTER U WITH DIAERESIS}n".encode())
    async with serving(service) as url:
        result = await result_of(tmp_path, {"url": f"{url}/ask"}, "what?")
    assert (result.failure, result.output) == (None, "gr\N{LATIN SMALL LETTER U WITH DIAERESIS}n")
    [(method, target, headers, body)] = service.requests
    assert (method, target, body) == ("POST", "/ask", b'{"input": "what?"}')
    assert headers["content-type"] == "application/json"
    assert (headers["x-hone-base-url"], headers["x-hone-model"]) == (f"{ROOT}/v1", "tiny")
    assert headers["x-hone-rollout"] == "run:1"


async def test_the_address_may_go_into_the_body_other_headers_and_the_url(tmp_path: Path):
    service = Service()
    workflow = {
        "method": "PUT",
        "headers": {"X-Hone-Base-URL": None, "Authorization": "Bearer {api_key}"},
        "body": {"task": "{input}", "text": "do: {input}", "llm": ["{anthropic_base_url}", 3]},
    }
    async with serving(service) as url:
        await result_of(
            tmp_path, {"url": f"{url}/a?m={{model}}&r={{rollout}}", **workflow}, {"n": 1}
        )
    [(method, target, headers, body)] = service.requests
    assert (method, target) == ("PUT", "/a?m=tiny&r=run%3A1")
    assert "x-hone-base-url" not in headers
    assert headers["authorization"] == f"Bearer {derive_inference_key('secret')}"
    # A string that is just the placeholder is the input itself, as JSON.
    assert yaml.safe_load(body) == {"task": {"n": 1}, "text": 'do: {"n": 1}', "llm": [ROOT, 3]}


async def test_a_lone_surrogate_does_not_fail_the_rollout(tmp_path: Path):
    """Text that was cut inside a surrogate pair, as `json.loads` reads it."""
    service = Service()
    async with serving(service) as url:
        for workflow in (
            {"url": url},
            {"url": url, "body": "{input}"},
            {"url": f"{url}/{{input}}", "headers": {"X-Input": "{input}"}},
        ):
            assert (await result_of(tmp_path, workflow, "a\ud83d")).failure is None
    json, text, other = service.requests
    assert (json[3], text[3]) == (b'{"input": "a\\ud83d"}', b"a?")
    assert (other[1], other[2]["x-input"]) == ("/a%3F", "a?")


async def test_a_string_is_sent_as_text_and_get_sends_nothing(tmp_path: Path):
    service = Service()
    async with serving(service) as url:
        await result_of(tmp_path, {"url": url, "body": "Q: {input}"}, "a\n{model}")
        await result_of(tmp_path, {"url": f"{url}/?q={{input}}", "method": "GET"}, "a&b")
    [(_, _, headers, text), (method, target, _, empty)] = service.requests
    assert (text, headers["content-type"]) == (b"Q: a\n{model}", "text/plain; charset=utf-8")
    assert (method, target, empty) == ("GET", "/?q=a%26b", b"")


async def test_the_output_may_be_a_part_of_the_response(prose: Prose, tmp_path: Path):
    service = Service(b'{"choices": [{"message": {"content": "four"}}], "n": 2}')
    async with serving(service) as url:
        # Even if the service has an OpenAI API, the request to it is not a model call.
        ask = {"url": f"{url}/v1/chat/completions"}
        path = "$.choices[0].message.content"
        result = await result_of(tmp_path, {**ask, "output_path": path}, host="127.0.0.1")
        assert (result.output, result.calls) == ("four", ())
        assert (await result_of(tmp_path, {**ask, "output_path": "$.n"})).output == 2
        missing = await result_of(tmp_path, {**ask, "output_path": "$.answer"})
        service.content = b"no json"
        broken = await result_of(tmp_path, {**ask, "output_path": "$.answer"})
    assert why(missing) == why(broken) == ("infrastructure", "no_output")
    assert missing.failure is not None
    prose(missing.failure.failure.message)


@pytest.mark.parametrize(
    ("status", "before", "after"),
    [
        (500, ("infrastructure", "agent_error"), ("policy", "agent_error")),
        (501, *[("infrastructure", "server_error")] * 2),
        (502, *[("infrastructure", "server_error")] * 2),
        (503, *[("infrastructure", "server_error")] * 2),
        (504, *[("infrastructure", "server_error")] * 2),
        (429, *[("infrastructure", "server_error")] * 2),
        (404, ("infrastructure", "agent_error"), ("policy", "agent_error")),
        (302, ("infrastructure", "agent_error"), ("policy", "agent_error")),
        (422, *[("policy", "http_status")] * 2),
    ],
)
async def test_an_error_status_is_a_failure(
    prose: Prose, tmp_path: Path, status: int, before: tuple[str, str], after: tuple[str, str]
):
    async with serving(Service(b"no tool\nof that name", status)) as url:
        secret = url.replace("//", "//me:p@ss@") + "/a?key=hidden"
        workflow = {"url": secret, "policy_failure_statuses": [422]}
        result = await result_of(tmp_path, workflow)
        answered = await result_of(tmp_path, workflow, host="localhost", recorded_calls=one_answer)
    assert (why(result), why(answered)) == (before, after)
    assert result.failure is not None
    failure = result.failure.failure
    prose(failure.message, url=url)
    assert failure.traceback == "no tool\nof that name"


async def test_after_an_answer_only_a_lost_connection_is_infrastructure(tmp_path: Path):
    known = {"host": "localhost", "recorded_calls": one_answer}
    service = Service(b"no json")
    async with serving(service) as url:
        workflow = {"url": url, "output_path": "$.answer"}
        assert why(await result_of(tmp_path, workflow, **known)) == ("policy", "no_output")
        large = {"url": url, "max_output_bytes": 3}
        assert why(await result_of(tmp_path, large, **known)) == ("policy", "output_too_large")
        service.gate = asyncio.Event()
        slow = {"url": url, "timeout_s": 0.1}
        assert why(await result_of(tmp_path, slow, **known)) == ("policy", "timeout")
        service.gate.set()
    gone = await result_of(tmp_path, {"url": "http://127.0.0.1:9/"}, **known)
    assert why(gone) == ("infrastructure", "connection")


async def test_a_service_that_is_slow_silent_or_gone(prose: Prose, tmp_path: Path):
    service = Service()
    service.gate = asyncio.Event()
    async with serving(service) as url:
        slow = await result_of(tmp_path, {"url": url, "timeout_s": 0.2})
        harness = await result_of(tmp_path, {"url": url}, timeout_s=0.2)
        service.gate.set()
    assert why(slow) == why(harness) == ("infrastructure", "timeout")
    assert slow.failure is not None
    prose(slow.failure.failure.message, url=url)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        gone = await result_of(tmp_path, {"url": f"http://127.0.0.1:{closed.getsockname()[1]}/"})
    assert why(gone) == ("infrastructure", "connection")


async def test_a_response_is_bounded_and_may_be_any_bytes(tmp_path: Path):
    async with serving(Service(b"\xff" + b"a" * 5000)) as url:
        result = await result_of(tmp_path, {"url": url, "max_output_bytes": 1000})
        whole = await result_of(tmp_path, {"url": url})
    assert why(result) == ("infrastructure", "output_too_large")
    assert whole.output == "\N{REPLACEMENT CHARACTER}" + "a" * 5000


@pytest.mark.parametrize(
    "workflow",
    [
        {"url": "localhost:80"},
        {"url": "ws://me:pw@a"},
        {"url": "http://a", "output_path": "$["},
        {"url": "http://a", "body": {"a": ["{inptu}"]}},
        {"url": "http://a", "headers": {"H": "{models}"}},
        {"url": "http://a", "method": "GET", "body": "x"},
    ],
)
async def test_mistakes_are_found_before_the_first_rollout(
    prose: Prose, tmp_path: Path, workflow: dict[str, Any]
):
    with pytest.raises(ConfigError) as caught:
        await result_of(tmp_path, workflow)
    prose(caught)
