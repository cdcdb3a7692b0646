"""A failure of a workflow behind `--endpoint`: the service reports its cause, the client knows the policy."""

import json
import os
from typing import Any

import httpx2
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from tests.workflow.rollouts import one_answer, one_frozen_answer, ran, why

from hone.cli.serve_workflow import WorkflowApp
from hone.config.policy import PolicyCalls
from hone.errors import AgentFailed, PolicyFailure
from hone.server.http import listen
from hone.wire import peers
from hone.workflow.endpoint import open_endpoint
from hone.workflow.function import Function
from hone.workflow.run import RolloutResult

POLICY = PolicyCalls(frozenset({"localhost"}), frozenset({"mine"}))


async def remote(app: Starlette, **options: Any) -> RolloutResult:
    async with listen.serving(app, grace_s=1) as url:
        known = {"host": "localhost", "policy": POLICY, **options}
        (result,) = [await ran(one, **known) async for one in open_endpoint(url, 10.0)]
    return result


def failing(error: Exception) -> Starlette:
    async def agent(question: str) -> None:
        raise error

    return WorkflowApp(Function.of("<workflow>", agent)).routes()


@pytest.mark.parametrize(
    ("error", "after", "before"),
    [
        (KeyError("move"), ("policy", "agent_error"), ("infrastructure", "agent_error")),
        (TimeoutError("tool"), ("policy", "timeout"), ("infrastructure", "timeout")),
        (ConnectionError("x"), *[("infrastructure", "connection")] * 2),
        (AgentFailed("x", reason="search"), *[("infrastructure", "search")] * 2),
        (PolicyFailure("x", reason="step_limit"), *[("policy", "step_limit")] * 2),
    ],
)
async def test_the_service_reports_the_cause_and_the_client_knows_whether_the_policy_answered(
    error: Exception, after: tuple[str, str], before: tuple[str, str]
):
    """The service sees no call here: its agent may have made them in another process."""
    assert why(await remote(failing(error), recorded_calls=one_answer)) == after
    assert why(await remote(failing(error), recorded_calls=one_frozen_answer)) == before


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ({"details": "KeyError", "message": "'move'"}, ("policy", "agent_error")),
        ({"details": "RateLimitError", "message": "429"}, ("infrastructure", "server_error")),
        ({"details": "APIConnectionError", "message": "x"}, ("infrastructure", "connection")),
        ({}, ("policy", "agent_error")),
    ],
)
async def test_the_toolkit_s_service_reports_only_the_class(
    line: dict[str, str], expected: tuple[str, str]
):
    async def answer(request: Any) -> PlainTextResponse:
        return PlainTextResponse(json.dumps({"code": "workflow_error", **line}))

    app = Starlette(routes=[Route("/generate/full", answer, methods=["POST"])])
    assert why(await remote(app, recorded_calls=one_answer)) == expected


@pytest.mark.parametrize("key", [None, "sesame"])
@pytest.mark.parametrize("user", [os.geteuid(), os.geteuid() + 12345, None])
async def test_a_service_without_a_key_is_for_the_user_that_runs_it(
    monkeypatch: pytest.MonkeyPatch, user: int | None, key: str | None
):
    async def find_user(*_: object) -> int | None:
        return user

    async def agent(question: str) -> str:
        return question

    monkeypatch.setattr(peers, "find_user", find_user)
    app = WorkflowApp(Function.of("<workflow>", agent), api_key=key).routes()
    sent = {"Authorization": f"Bearer {key or 'default'}"}
    async with listen.serving(app, grace_s=1) as url, httpx2.AsyncClient(headers=sent) as http:
        assert (await http.get(f"{url}/health")).status_code == 200
        for path in ("/generate", "/generate/full", "/v1/chat/completions"):
            body = {"input_message": "x", "messages": [{"role": "user", "content": "x"}]}
            answer = await http.post(url + path, json=body)
            if key is None and user != os.geteuid():
                assert answer.status_code == 401 and "--api_key KEY" in answer.text, path
            else:
                assert answer.status_code == 200, path


@pytest.mark.parametrize(("error", "status"), [(KeyError("x"), 500), (ConnectionError("x"), 503)])
async def test_the_status_of_a_failure_says_whether_a_retry_may_succeed(
    error: Exception, status: int
):
    async with listen.serving(failing(error), grace_s=1) as url, httpx2.AsyncClient() as client:
        answer = await client.post(f"{url}/generate", json={"input": "x"})
        chat = {"messages": [{"role": "user", "content": "x"}]}
        completion = await client.post(f"{url}/v1/chat/completions", json=chat)
    assert (answer.status_code, completion.status_code) == (status, status)
