"""Why a rollout failed, by the exception of the agent and the answers before it."""

import asyncio
import errno
import http.client
import itertools
import json
import socket
import sqlite3
import ssl
import subprocess
import sys
import urllib.error
from collections.abc import Sequence
from concurrent.futures.process import BrokenProcessPool
from email.message import Message
from types import SimpleNamespace
from typing import Any

import aiohttp
import anthropic
import httpcore
import httpx
import httpx2
import openai
import pytest
import requests
import urllib3
from anthropic import AsyncAnthropic
from openai.types.chat import ChatCompletion
from pydantic import BaseModel
from tests.evaluation.made import call
from tests.prose import Prose
from tests.workflow.endpoint import Endpoint, Reply, serving
from tests.workflow.rollouts import ASK, model, ran, why

from hone.capture.base import SeenCall
from hone.capture.openai import UNANSWERED
from hone.config.policy import PolicyCalls
from hone.errors import (
    AgentCrashed,
    AgentFailed,
    AgentTimeout,
    Busy,
    ConfigError,
    DiskFull,
    EngineFailed,
    PolicyFailure,
    Unreachable,
)
from hone.workflow.failure import answered_by_policy, raised, timed_out
from hone.workflow.llm import LLM
from hone.workflow.outside import outside_in


class Move(BaseModel):
    square: int


def parse(text: str) -> Any:
    return json.loads(text)


def checked(text: str) -> Any:
    return Move.model_validate_json(text)


def wrapped(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError("not a move") from error


def limit(text: str) -> Any:
    raise PolicyFailure("12 moves and no end", reason="step_limit")


def both(text: str) -> Any:
    raise ExceptionGroup("two", [PolicyFailure("one", reason="step_limit"), KeyError("two")])


def policies(text: str) -> Any:
    inner = ExceptionGroup("inner", [PolicyFailure("one", reason="step_limit")])
    raise ExceptionGroup("all", [inner, PolicyFailure("two", reason="other")])


def crash(text: str) -> Any:
    return {}["no such key"]


def leave(text: str) -> Any:
    sys.exit(3)


@pytest.mark.parametrize(
    ("reads", "expected"),
    [
        (parse, ("policy", "unparseable")),
        (checked, ("policy", "unparseable")),
        (wrapped, ("policy", "unparseable")),
        (limit, ("policy", "step_limit")),
        (policies, ("policy", "step_limit")),
        (both, ("policy", "step_limit")),
        (crash, ("policy", "agent_error")),
        (leave, ("policy", "agent_error")),
    ],
)
async def test_an_exception_of_the_agent_is_recorded_as_a_failure(
    reads: Any, expected: tuple[str, str]
):
    async with serving(Endpoint(Reply("no json"))) as url:
        llm = model(url)

        async def agent(question: str) -> Any:
            answer = await llm.chat(ASK)
            return reads(answer.choices[0].message.content)

        result = await ran(agent)
        await llm.close()
    assert why(result) == expected
    assert result.failure is not None and reads.__name__ in result.failure.failure.traceback
    assert len(result.calls) == 1


async def test_a_parse_error_before_any_answer_is_not_the_policy_s_failure():
    async def agent(question: str) -> Any:
        return json.loads(question)

    result = await ran(agent, "no json")
    assert why(result) == ("infrastructure", "agent_error")
    assert result.failure is not None and result.failure.failure.type == "JSONDecodeError"


def cut_short(text: str) -> Any:
    raise openai.LengthFinishReasonError(completion=ChatCompletion.model_construct(usage=None))


def wrong_type(text: str) -> Any:
    return int(text)


CUT = (
    " (answers cut at the token limit before it: 1 of 2; if the agent cannot use such an answer, "
    "raise max_tokens)"
)


@pytest.mark.parametrize(
    ("reads", "expected", "more"),
    [
        (parse, ("policy", "token_limit"), ""),
        (checked, ("policy", "token_limit"), ""),
        (wrapped, ("policy", "token_limit"), ""),
        (cut_short, ("policy", "token_limit"), ""),
        (limit, ("policy", "step_limit"), ""),
        (crash, ("policy", "agent_error"), CUT),
        (wrong_type, ("policy", "agent_error"), CUT),
    ],
)
async def test_after_a_truncated_answer_only_parse_errors_have_the_reason_token_limit(
    reads: Any, expected: tuple[str, str], more: str
):
    async with serving(Endpoint(Reply("ok"), Reply("1, 2, 3", finish="length"))) as url:
        llm = model(url)

        async def agent(question: str) -> Any:
            await llm.chat(ASK)
            answer = await llm.chat(ASK)
            return reads(answer.choices[0].message.content)

        result = await ran(agent)
        await llm.close()
    assert why(result) == expected
    assert result.failure is not None
    failure = result.failure.failure
    assert (" (answers cut at" in failure.message) == bool(more) and failure.message.endswith(more)
    assert reads.__name__ in failure.traceback


async def test_a_bug_of_the_agent_after_whole_answers_does_not_mention_limits(prose: Prose):
    async with serving(Endpoint(Reply("ok"))) as url:
        llm = model(url)

        async def agent(question: str) -> Any:
            await llm.chat(ASK)
            return crash("")

        result = await ran(agent)
        await llm.close()
    assert why(result) == ("policy", "agent_error")
    assert result.failure is not None
    prose(result.failure.failure.message)


FULL = {"error": {"message": "too long", "code": "context_length_exceeded"}}
BUSY = {"error": {"message": "busy"}}


@pytest.mark.parametrize(
    ("replies", "expected"),
    [
        ([Reply(status=500)], ("infrastructure", "server_error")),
        ([Reply(status=429, error=BUSY)], ("infrastructure", "server_error")),
        ([Reply(status=404)], ("infrastructure", "agent_error")),
        # A conversation that grew too long is the policy's; an input that is too long is not.
        ([Reply(), Reply(status=400, error=FULL)], ("policy", "token_limit")),
        ([Reply(status=400, error=FULL)], ("infrastructure", "agent_error")),
        # An answer that was cut does not make the server's failure the policy's.
        ([Reply(finish="length"), Reply(status=503)], ("infrastructure", "server_error")),
        # A request that the server refuses as sent was made from the answer before it.
        ([Reply(), Reply(status=400)], ("policy", "agent_error")),
        ([Reply(), Reply(status=409)], ("infrastructure", "server_error")),
    ],
)
@pytest.mark.parametrize("hidden", ["", "plain", "refusal"])
async def test_requests_that_the_server_refuses(
    replies: list[Reply], expected: tuple[str, str], hidden: str
):
    async with serving(Endpoint(*replies)) as url:
        llm = model(url)

        async def agent(question: str) -> None:
            try:
                for _ in replies:
                    await llm.chat(ASK)
            except openai.APIStatusError as error:
                if hidden == "plain":
                    raise RuntimeError("a framework's own error")  # noqa: B904  # as frameworks do
                if hidden == "refusal":  # without the code, as LiteLLM does
                    raise type(error)("no", response=error.response, body=None)  # noqa: B904
                raise

        assert why(await ran(agent)) == expected
        await llm.close()


async def test_a_server_that_is_not_there_is_a_connection_failure():
    async def agent(question: str) -> None:
        await model("http://127.0.0.1:9/v1").chat(ASK)

    result = await ran(agent)
    assert why(result) == ("infrastructure", "connection")
    # Where, and why: openai itself says 'Connection error.'
    assert result.failure is not None
    failure = result.failure.failure.message
    assert failure.startswith("Connection error. http://") and "cannot be reached: " in failure


@pytest.mark.parametrize(
    ("error", "reason"),
    [(TimeoutError("tool"), "timeout"), (BrokenPipeError("tool"), "connection")],
)
async def test_errors_of_the_environment(error: Exception, reason: str):
    async def agent(question: str) -> None:
        raise error

    assert why(await ran(agent)) == ("infrastructure", reason)


@pytest.mark.parametrize(
    ("error", "before", "after"),
    [
        (
            AgentFailed("x", reason="search_down", details="its stderr"),
            *[("infrastructure", "search_down")] * 2,
        ),
        (
            AgentCrashed("x", reason="exit_status", details="its stderr"),
            ("infrastructure", "exit_status"),
            ("policy", "exit_status"),
        ),
        (
            AgentCrashed("x", reason="killed", details="its stderr", is_outside=True),
            *[("infrastructure", "killed")] * 2,
        ),
        (
            AgentTimeout("x", details="its stderr"),
            ("infrastructure", "timeout"),
            ("policy", "timeout"),
        ),
        (
            PolicyFailure("x", reason="exit_status", details="its stderr"),
            *[("policy", "exit_status")] * 2,
        ),
    ],
)
async def test_a_program_s_failure_is_the_policy_s_if_it_says_so_or_after_an_answer(
    error: Exception, before: tuple[str, str], after: tuple[str, str]
):
    async with serving(Endpoint(Reply(finish="length"))) as url:
        llm = model(url)

        async def at_once(question: str) -> None:
            raise error

        async def later(question: str) -> None:
            await llm.chat(ASK)
            raise error

        first, second = await ran(at_once), await ran(later)
        await llm.close()
    assert (why(first), why(second)) == (before, after)
    assert second.failure is not None and second.failure.failure.traceback == "its stderr"
    hint = "answers cut at the token limit before it: 1 of 1"
    says_so = isinstance(error, AgentCrashed) and not error.is_outside
    assert (hint in second.failure.failure.message) == says_so
    assert second.failure.failure.place == "its stderr"


async def test_a_failure_after_a_refusal_was_handled_is_not_the_refusal():
    async with serving(Endpoint(Reply(), Reply(status=400, error=FULL), Reply(status=503))) as url:
        llm = model(url)

        async def agent(question: str) -> None:
            await llm.chat(ASK)
            try:
                await llm.chat(ASK)
            except openai.BadRequestError:
                await llm.chat(ASK)  # with fewer messages

        assert why(await ran(agent)) == ("infrastructure", "server_error")
        await llm.close()


@pytest.mark.parametrize("answered", [False, True])
async def test_a_conversation_too_long_for_anthropic_s_client(answered: bool):
    full = {"type": "error", **FULL}
    async with serving(Endpoint(*[Reply()] * answered, Reply(status=400, error=full))) as url:
        llm = model(url)

        async def agent(question: str) -> None:
            if answered:
                await llm.chat(ASK)
            root = url.removesuffix("/v1")
            async with AsyncAnthropic(base_url=root, api_key="k", max_retries=0) as client:
                await client.messages.create(model="m", max_tokens=1, messages=ASK)

        expected = ("policy", "token_limit") if answered else ("infrastructure", "agent_error")
        assert why(await ran(agent)) == expected
        await llm.close()


@pytest.mark.parametrize(
    ("replies", "expected"),
    [
        ([Reply(status=529)], ("infrastructure", "server_error")),
        ([Reply(status=404)], ("infrastructure", "agent_error")),
        ([], ("infrastructure", "connection")),
    ],
)
async def test_errors_of_anthropic_s_client_are_classified_too(
    prose: Prose, replies: list[Reply], expected: tuple[str, str]
):
    async with serving(Endpoint(*replies)) as url:
        root = url.removesuffix("/v1") if replies else "http://127.0.0.1:9"

        async def agent(question: str) -> None:
            async with AsyncAnthropic(base_url=root, api_key="k", max_retries=0) as client:
                await client.messages.create(
                    model="m", max_tokens=1, messages=[{"role": "user", "content": question}]
                )

        result = await ran(agent)
    assert why(result) == expected
    if not replies:
        assert result.failure is not None
        prose(result.failure.failure.message)


# ---- the table: what was raised, after which calls, is whose failure -----------------------------

YES = call("yes", started_at=1.0)
CUT_SHORT = call(
    started_at=1.0, choices=[{"message": {"role": "assistant"}, "finish_reason": "length"}]
)
ANSWERED = (YES,)


def unanswered(**fields: Any) -> SeenCall:
    return call(**{"choices": [], "started_at": 2.0, "index": 1, "policy_step": None, **fields})


def chained(*errors: BaseException) -> BaseException:
    """The first error, raised from the second, and so on."""
    for outer, inner in itertools.pairwise(errors):
        outer.__cause__ = inner
    return errors[0]


def handled(outer: BaseException, inner: BaseException) -> BaseException:
    """An error that was raised while another was handled."""
    outer.__context__ = inner
    return outer


def of_openai(status: int, code: str | None = None) -> openai.APIStatusError:
    request = httpx2.Request("POST", "http://h/v1/chat/completions")
    response = httpx2.Response(status, request=request)
    kind = openai.BadRequestError if status == 400 else openai.APIStatusError
    return kind("refused", response=response, body={"code": code})  # type: ignore[arg-type]


def of_anthropic(status: int, code: str | None = None) -> anthropic.APIStatusError:
    request = httpx2.Request("POST", "http://h/v1/messages")
    response = httpx2.Response(status, request=request)
    body = None if code is None else {"type": "error", "error": {"code": code}}
    return anthropic.APIStatusError("refused", response=response, body=body)


def of_httpx(library: Any, status: int) -> Exception:
    request = library.Request("GET", "http://h/")
    return library.HTTPStatusError(
        "refused", request=request, response=library.Response(status, request=request)
    )


def of_requests(status: int) -> requests.HTTPError:
    response = requests.Response()
    response.status_code = status
    return requests.HTTPError("refused", response=response)


def of_aiohttp(status: int) -> aiohttp.ClientResponseError:
    return aiohttp.ClientResponseError(SimpleNamespace(real_url="u"), (), status=status)  # type: ignore[arg-type]


def of_urllib(status: int) -> urllib.error.HTTPError:
    return urllib.error.HTTPError("http://h/", status, "refused", Message(), None)


def named(
    name: str, module: str = "unheard_of.errors", base: Any = Exception, **fields: Any
) -> Any:
    """An error of a class that no list has."""
    error = type(name, (base,), {"__module__": module})("x")
    error.__dict__.update(fields)
    return error


def botocore(status: int, code: str) -> Exception:
    answer = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return named("ClientError", "botocore.exceptions", response=answer)


def grpc(code: str) -> Exception:
    base = type("RpcError", (Exception,), {"__module__": "grpc"})
    return named("AioRpcError", "grpc.aio", base, code=lambda: SimpleNamespace(name=code))


def sqlite(name: str) -> sqlite3.OperationalError:
    error = sqlite3.OperationalError("x")
    error.sqlite_errorname = name
    return error


def connect(host: str, port: int) -> BaseException:
    """What the standard library raises where nothing listens."""
    try:
        http.client.HTTPConnection(host, port, timeout=5).request("GET", "/")
    except OSError as error:
        return error
    raise AssertionError("something listens there")


def network_timeout() -> BaseException:
    """What `socket` raises when nothing arrives in time."""
    here, there = socket.socketpair()
    with here, there:
        here.settimeout(0.01)
        try:
            here.recv(1)
        except TimeoutError as error:
            return error
    raise AssertionError("something arrived")


class Unraisable(Exception):
    @property
    def status_code(self) -> int:
        raise RuntimeError("no status")


class Hostile(Exception):
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)

    def __str__(self) -> str:
        raise RuntimeError("no text")


class HostileMapping(dict[str, Any]):
    def get(self, *_: Any) -> Any:
        raise RuntimeError("no item")


class HostileBody(Exception):
    @property
    def body(self) -> Any:
        raise RuntimeError("no body")


HostileBody.__name__ = "APIStatusError"

OUTSIDE, POLICY = "infrastructure", "policy"
A, B = KeyError("square"), ValueError("x")
TABLE: list[tuple[BaseException, Sequence[SeenCall], tuple[str, str]]] = [
    # An exception of the agent after an answer, of an unknown class.
    (KeyError("square"), ANSWERED, (POLICY, "agent_error")),
    (named("NobodyHasHeardOfIt"), ANSWERED, (POLICY, "agent_error")),
    (named("NobodyHasHeardOfIt"), (), (OUTSIDE, "agent_error")),
    (Unraisable("x"), ANSWERED, (POLICY, "agent_error")),
    (SystemExit(503), ANSWERED, (POLICY, "agent_error")),
    (AssertionError(), ANSWERED, (POLICY, "agent_error")),
    (RecursionError("too deep"), ANSWERED, (POLICY, "agent_error")),
    (asyncio.CancelledError("own task"), ANSWERED, (POLICY, "agent_error")),
    (subprocess.CalledProcessError(1, "python"), ANSWERED, (POLICY, "agent_error")),
    # The agent says it, by hone's exceptions.
    (PolicyFailure("x", reason="step_limit"), (), (POLICY, "step_limit")),
    (chained(PolicyFailure("x"), ConnectionError()), ANSWERED, (POLICY, "policy")),
    (chained(RuntimeError("tool"), PolicyFailure("x")), ANSWERED, (POLICY, "policy")),
    (AgentFailed("search is down"), ANSWERED, (OUTSIDE, "agent_error")),
    (chained(RuntimeError("tool"), AgentFailed("x")), ANSWERED, (OUTSIDE, "agent_error")),
    (AgentTimeout("hone killed it"), ANSWERED, (POLICY, "timeout")),
    (AgentTimeout("hone killed it"), (), (OUTSIDE, "timeout")),
    # Statuses, from any library.
    (of_openai(429), ANSWERED, (OUTSIDE, "server_error")),
    (of_openai(500), ANSWERED, (OUTSIDE, "server_error")),
    (of_openai(408), ANSWERED, (OUTSIDE, "server_error")),
    (of_openai(401), ANSWERED, (OUTSIDE, "server_error")),
    (of_openai(400), ANSWERED, (POLICY, "agent_error")),
    (of_openai(422), ANSWERED, (POLICY, "agent_error")),
    (of_openai(400), (), (OUTSIDE, "agent_error")),
    (of_openai(400, "context_length_exceeded"), ANSWERED, (POLICY, "token_limit")),
    (of_openai(400, "context_length_exceeded"), (), (OUTSIDE, "agent_error")),
    # No answer of a model changes which names its server has.
    (of_openai(404, "model_not_found"), ANSWERED, (OUTSIDE, "model_name")),
    (of_openai(404, "model_not_found"), (), (OUTSIDE, "model_name")),
    (of_openai(409, "model_ambiguous"), ANSWERED, (OUTSIDE, "model_name")),
    (of_anthropic(409, "model_ambiguous"), ANSWERED, (OUTSIDE, "model_name")),
    (of_openai(404), ANSWERED, (POLICY, "agent_error")),
    (of_anthropic(529), ANSWERED, (OUTSIDE, "server_error")),
    (of_anthropic(400), ANSWERED, (POLICY, "agent_error")),
    (of_httpx(httpx, 503), ANSWERED, (OUTSIDE, "server_error")),
    (of_httpx(httpx2, 502), ANSWERED, (OUTSIDE, "server_error")),
    (of_httpx(httpx2, 404), ANSWERED, (POLICY, "agent_error")),  # a page that the model named
    (of_httpx(httpx, 409), ANSWERED, (POLICY, "agent_error")),  # what the model made exists
    (of_requests(503), ANSWERED, (OUTSIDE, "server_error")),
    (of_requests(404), ANSWERED, (POLICY, "agent_error")),
    (of_aiohttp(500), ANSWERED, (OUTSIDE, "server_error")),
    (of_aiohttp(403), ANSWERED, (POLICY, "agent_error")),
    (of_urllib(429), ANSWERED, (OUTSIDE, "server_error")),
    (of_urllib(404), ANSWERED, (POLICY, "agent_error")),
    (botocore(503, "InternalFailure"), ANSWERED, (OUTSIDE, "server_error")),
    (botocore(400, "ThrottlingException"), ANSWERED, (OUTSIDE, "server_error")),
    (botocore(400, "ValidationException"), ANSWERED, (POLICY, "agent_error")),
    (grpc("UNAVAILABLE"), ANSWERED, (OUTSIDE, "server_error")),
    (grpc("RESOURCE_EXHAUSTED"), ANSWERED, (OUTSIDE, "server_error")),
    (grpc("INVALID_ARGUMENT"), ANSWERED, (POLICY, "agent_error")),
    (named("Odd", status="503"), ANSWERED, (OUTSIDE, "server_error")),
    (named("Odd", code=504), ANSWERED, (OUTSIDE, "server_error")),
    (named("Odd", status=True), ANSWERED, (POLICY, "agent_error")),
    (named("Odd", response=SimpleNamespace(status=500)), ANSWERED, (OUTSIDE, "server_error")),
    (chained(RuntimeError("tool"), of_requests(503)), ANSWERED, (OUTSIDE, "server_error")),
    (handled(KeyError("x"), of_openai(503)), ANSWERED, (OUTSIDE, "server_error")),
    (Busy("full"), ANSWERED, (OUTSIDE, "server_error")),
    (EngineFailed("restarts"), ANSWERED, (OUTSIDE, "server_error")),
    (ConfigError("llm.chat: wrong"), ANSWERED, (OUTSIDE, "agent_error")),
    # The network.
    (ConnectionResetError(), ANSWERED, (OUTSIDE, "connection")),
    (connect("127.0.0.1", 9), ANSWERED, (OUTSIDE, "connection")),
    (socket.gaierror(-2, "unknown"), ANSWERED, (OUTSIDE, "connection")),
    (ssl.SSLError(1, "bad record"), ANSWERED, (OUTSIDE, "connection")),
    (Unreachable("x"), ANSWERED, (OUTSIDE, "connection")),
    (openai.APIConnectionError(request=None), ANSWERED, (OUTSIDE, "connection")),  # type: ignore[arg-type]
    (openai.APITimeoutError(request=None), ANSWERED, (OUTSIDE, "timeout")),  # type: ignore[arg-type]
    (anthropic.APIConnectionError(request=None), ANSWERED, (OUTSIDE, "connection")),  # type: ignore[arg-type]
    (httpx.ConnectError("x"), ANSWERED, (OUTSIDE, "connection")),
    (httpx2.ReadError("x"), ANSWERED, (OUTSIDE, "connection")),
    (httpx2.ReadTimeout("x"), ANSWERED, (OUTSIDE, "timeout")),
    (httpx2.UnsupportedProtocol("no http://"), ANSWERED, (POLICY, "agent_error")),
    (httpx.InvalidURL("x"), ANSWERED, (POLICY, "agent_error")),
    (requests.ConnectionError("x"), ANSWERED, (OUTSIDE, "connection")),
    (requests.Timeout("x"), ANSWERED, (OUTSIDE, "timeout")),
    (requests.exceptions.ChunkedEncodingError("x"), ANSWERED, (OUTSIDE, "connection")),
    (requests.exceptions.MissingSchema("x"), ANSWERED, (POLICY, "agent_error")),
    (requests.exceptions.InvalidURL("x"), ANSWERED, (POLICY, "agent_error")),
    (urllib3.exceptions.ProtocolError("x"), ANSWERED, (OUTSIDE, "connection")),
    (urllib3.exceptions.ReadTimeoutError(None, "u", "x"), ANSWERED, (OUTSIDE, "timeout")),  # type: ignore[arg-type]
    (aiohttp.ServerDisconnectedError(), ANSWERED, (OUTSIDE, "connection")),
    (aiohttp.ServerTimeoutError(), ANSWERED, (OUTSIDE, "timeout")),
    (aiohttp.InvalidURL("x"), ANSWERED, (POLICY, "agent_error")),
    (urllib.error.URLError("unknown url type: foo"), ANSWERED, (POLICY, "agent_error")),
    (http.client.IncompleteRead(b""), ANSWERED, (OUTSIDE, "connection")),
    (named("ConnectionError", "redis.exceptions"), ANSWERED, (OUTSIDE, "connection")),
    (named("TimeoutError", "redis.exceptions"), ANSWERED, (OUTSIDE, "timeout")),
    (named("TimeoutError", "playwright._impl._errors"), ANSWERED, (POLICY, "agent_error")),
    (named("RateLimitError", "a_new_sdk"), ANSWERED, (OUTSIDE, "server_error")),
    # A server that answered: the page, the query or the message was the model's.
    (named("HTTPClientError", "tornado.httpclient", code=404), ANSWERED, (POLICY, "agent_error")),
    (named("HTTPClientError", "tornado.httpclient", code=599), ANSWERED, (OUTSIDE, "server_error")),
    (named("HTTPClientError", "botocore.exceptions"), ANSWERED, (OUTSIDE, "connection")),
    (named("TransportQueryError", "gql", type("TransportError", (Exception,), {})), ANSWERED, (POLICY, "agent_error")),
    (named("BadRequest", "telegram", type("NetworkError", (Exception,), {})), ANSWERED, (POLICY, "agent_error")),
    (named("Timeout", "litellm.exceptions", type("APITimeoutError", (Exception,), {}), status_code=408), ANSWERED, (OUTSIDE, "timeout")),
    (httpcore.ReadError("x"), ANSWERED, (OUTSIDE, "connection")),
    # An exception whose attributes raise when they are read.
    (named("Odd", status_code=Hostile()), ANSWERED, (POLICY, "agent_error")),
    (named("Odd", response=HostileMapping(a=1)), ANSWERED, (POLICY, "agent_error")),
    (TimeoutError(Hostile()), ANSWERED, (POLICY, "timeout")),
    (HostileBody("x"), ANSWERED, (POLICY, "agent_error")),
    # Timeouts: of a socket, and of the agent around its own work.
    (network_timeout(), ANSWERED, (OUTSIDE, "timeout")),
    (TimeoutError(errno.ETIMEDOUT, "x"), ANSWERED, (OUTSIDE, "timeout")),
    (TimeoutError("the code that the model wrote"), ANSWERED, (POLICY, "timeout")),
    (TimeoutError(), (), (OUTSIDE, "timeout")),
    (TimeoutError(), (YES, unanswered(error=UNANSWERED)), (OUTSIDE, "timeout")),
    # Disk, descriptors, memory.
    (OSError(errno.ENOSPC, "full"), ANSWERED, (OUTSIDE, "resources")),
    (OSError(errno.EMFILE, "too many"), ANSWERED, (OUTSIDE, "resources")),
    (OSError(errno.EIO, "x"), ANSWERED, (OUTSIDE, "resources")),
    (FileNotFoundError(errno.ENOENT, "x"), ANSWERED, (POLICY, "agent_error")),
    (PermissionError(errno.EACCES, "x"), ANSWERED, (POLICY, "agent_error")),
    (OSError("no errno"), ANSWERED, (POLICY, "agent_error")),
    (DiskFull("x"), ANSWERED, (OUTSIDE, "server_error")),
    (sqlite("SQLITE_FULL"), ANSWERED, (OUTSIDE, "resources")),
    (sqlite("SQLITE_ERROR"), ANSWERED, (POLICY, "agent_error")),  # the model's SQL
    (MemoryError(), ANSWERED, (OUTSIDE, "resources")),
    (chained(RuntimeError("x"), MemoryError()), ANSWERED, (OUTSIDE, "resources")),
    (named("OutOfMemoryError", "torch", RuntimeError), ANSWERED, (OUTSIDE, "resources")),
    (RuntimeError("CUDA error: out of memory"), ANSWERED, (OUTSIDE, "resources")),
    (RuntimeError("can't start new thread"), ANSWERED, (OUTSIDE, "resources")),
    (BrokenProcessPool("killed"), ANSWERED, (OUTSIDE, "resources")),
    # Groups: outside wins.
    (ExceptionGroup("g", [A, ConnectionError()]), ANSWERED, (OUTSIDE, "connection")),
    (ExceptionGroup("g", [PolicyFailure("x"), MemoryError()]), ANSWERED, (OUTSIDE, "resources")),
    (ExceptionGroup("g", [A, ExceptionGroup("h", [B])]), ANSWERED, (POLICY, "agent_error")),
    (chained(ExceptionGroup("g", [A]), of_openai(503)), ANSWERED, (OUTSIDE, "server_error")),
    (chained(RuntimeError("x"), ExceptionGroup("g", [MemoryError()])), ANSWERED, (OUTSIDE, "resources")),
    # The last call got no answer, and the agent hides why.
    (RuntimeError("x"), (YES, unanswered(status=503, error="HTTP 503")), (OUTSIDE, "server_error")),
    (RuntimeError("x"), (YES, unanswered(status=None, error="ReadError")), (OUTSIDE, "connection")),
    (RuntimeError("x"), (YES, unanswered(status=200, error="no choices")), (OUTSIDE, "connection")),
    (RuntimeError("x"), (YES, unanswered(status=400, error="HTTP 400")), (POLICY, "agent_error")),
    (RuntimeError("x"), (unanswered(status=503, started_at=0.0), YES), (POLICY, "agent_error")),
    # It was in flight while the agent failed on another answer.
    (KeyError("x"), (YES, unanswered(status=None, error=UNANSWERED)), (POLICY, "agent_error")),
    (KeyError("x"), (YES, unanswered(status=None, error="CancelledError")), (POLICY, "agent_error")),
    # What cannot be read.
    (json.JSONDecodeError("x", "", 0), ANSWERED, (POLICY, "unparseable")),
    (chained(KeyError("x"), ValueError("y"), json.JSONDecodeError("x", "", 0)), ANSWERED, (POLICY, "unparseable")),
    (handled(KeyError("x"), json.JSONDecodeError("x", "", 0)), ANSWERED, (POLICY, "agent_error")),
    (json.JSONDecodeError("x", "", 0), (CUT_SHORT,), (POLICY, "token_limit")),
    (json.JSONDecodeError("x", "", 0), (), (OUTSIDE, "agent_error")),
    (chained(json.JSONDecodeError("x", "", 0), of_openai(503)), ANSWERED, (OUTSIDE, "server_error")),
]  # fmt: skip


@pytest.mark.parametrize(
    ("error", "calls", "expected"),
    TABLE,
    ids=[f"{n}-{type(row[0]).__name__}" for n, row in enumerate(TABLE)],
)
def test_whose_failure_it_is(
    error: BaseException, calls: Sequence[SeenCall], expected: tuple[str, str]
):
    failure = raised(error, calls)
    assert (failure.kind, failure.reason) == expected


async def test_an_exception_that_raises_when_it_is_read_is_a_failure_too():
    async def agent(question: str) -> None:
        raise Hostile

    result = await ran(agent)
    assert why(result) == ("infrastructure", "agent_error")
    assert result.failure is not None
    failure = result.failure.failure
    assert (failure.type, failure.message) == ("Hostile", "<no text: RuntimeError>")
    assert "in agent" in failure.traceback and failure.place.startswith(f"{__file__}:")


class Quota(Exception):
    pass


class DailyQuota(Quota):
    pass


@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        ("DailyQuota", "infrastructure"),
        ("Quota", "infrastructure"),  # a class that it inherits from
        (f"{__name__}.Quota", "infrastructure"),
        ("other.module.Quota", "policy"),
        ("quota", "policy"),
        ("not_imported.Anywhere", "policy"),
    ],
)
def test_exceptions_listed_in_the_yaml_are_infrastructure(listed: str, expected: str):
    error = chained(RuntimeError("tool"), DailyQuota("100 searches"))
    assert raised(error, ANSWERED, listed=[listed]).kind == expected


def test_a_listed_name_may_be_the_one_that_a_package_exports():
    # requests.ConnectionError is defined in requests.exceptions.
    error = requests.exceptions.InvalidJSONError("x")
    assert raised(error, ANSWERED).kind == "policy"
    assert raised(error, ANSWERED, listed=["requests.exceptions.RequestException"]).reason == (
        "infrastructure_exceptions"
    )
    assert raised(error, ANSWERED, listed=["requests.RequestException"]).kind == "infrastructure"


async def test_a_timeout_of_the_agent_s_own_work_is_the_policy_s_and_of_a_request_is_not():
    """asyncio.timeout raises one class, whatever it interrupts."""
    endpoint = Endpoint(Reply("while True: pass"))
    with socket.create_server(("127.0.0.1", 0)) as silent:  # connects, and never answers
        port = silent.getsockname()[1]
        async with serving(endpoint) as url:
            llm = model(url)

            async def runs_code(question: str) -> None:
                await llm.chat(ASK)
                async with asyncio.timeout(0.01):
                    await asyncio.sleep(60)  # the code that the model wrote

            async def fetches(question: str) -> None:
                await llm.chat(ASK)
                async with asyncio.timeout(0.2), httpx2.AsyncClient() as client:
                    await client.get(f"http://127.0.0.1:{port}/search")

            own, network = await ran(runs_code), await ran(fetches)
            await llm.close()
    assert why(own) == ("policy", "timeout")
    assert why(network) == ("infrastructure", "timeout")


def test_only_an_answer_of_the_trained_policy_counts():
    policy = PolicyCalls(frozenset({"localhost"}), frozenset({"agent"}), frozenset({"critic"}))
    frozen, critic = call(model="agent@0"), call(model="critic")
    judge = call(model="gpt-4o", host="api.openai.com", policy_step=None)
    for one in (frozen, critic, judge, unanswered(model="agent")):
        assert not answered_by_policy([one], policy)
    assert answered_by_policy([judge, call(model="agent")], policy)
    # Where no policy is known, as in `hone eval` of any endpoint, all answers count.
    assert answered_by_policy([judge], None) and not answered_by_policy([unanswered()], None)
    failure = raised(KeyError("x"), [judge], answered=answered_by_policy([judge], policy))
    assert (failure.kind, failure.reason) == ("infrastructure", "agent_error")


async def test_an_exception_after_a_frozen_model_s_answer_is_not_the_policy_s():
    policy = PolicyCalls(frozenset({"localhost"}), frozenset({"m"}))
    async with serving(Endpoint(Reply("no"), Reply("no"))) as url:
        llm, base = model(url), LLM(base_url=url, model="m@0", max_retries=0)

        async def agent(which: str) -> Any:
            await (base if which == "base" else llm).chat(ASK)
            return crash("")

        frozen = await ran(agent, "base", policy=policy)
        trained = await ran(agent, "policy", policy=policy)
        await llm.close()
        await base.close()
    assert (why(frozen), frozen.answered) == (("infrastructure", "agent_error"), False)
    assert (why(trained), trained.answered) == (("policy", "agent_error"), True)


@pytest.mark.parametrize(
    ("calls", "kind"),
    [
        ((), "infrastructure"),
        ((YES,), "policy"),
        ((YES, unanswered(error=UNANSWERED, status=None)), "policy"),  # it would never end
        ((YES, unanswered(error="HTTP 503", status=503)), "infrastructure"),  # it waits to retry
    ],
)
def test_a_kill_by_hone_s_limit_is_the_policy_s_after_an_answer(
    calls: Sequence[SeenCall], kind: str
):
    assert timed_out(1.0, "waiting at\n", calls).kind == kind


PYTHON = """Traceback (most recent call last):
  File "agent.py", line 3, in <module>
{}

{}
Traceback (most recent call last):
  File "agent.py", line 5, in <module>
{}
"""
CAUSE = "The above exception was the direct cause of the following exception:"
CONTEXT = "During handling of the above exception, another exception occurred:"
LOGGED = "INFO another request"
UNKNOWN = {"error": {"message": "no", "code": "model_not_found"}}


@pytest.mark.parametrize(
    ("stderr", "reason"),
    [
        (PYTHON.format("KeyError: 'a'", CONTEXT, "openai.RateLimitError: Error code: 429"), "server_error"),
        (PYTHON.format("openai.RateLimitError: Error code: 429", CAUSE, "KeyError: 'a'"), "server_error"),
        # The program had handled and logged it.
        (PYTHON.format("openai.RateLimitError: Error code: 429", LOGGED, "KeyError: 'a'"), None),
        (PYTHON.format("ValueError: 500", CAUSE, "KeyError: 503"), None),
        ("Traceback (most recent call last):\nopenai.APIConnectionError: Connection error.", "connection"),
        ("Traceback (most recent call last):\nhttpx.ReadTimeout", "timeout"),
        ("Traceback (most recent call last):\nurllib.error.HTTPError: HTTP Error 503: Busy", "server_error"),
        ("Traceback (most recent call last):\nurllib.error.HTTPError: HTTP Error 404: None", None),
        ("Traceback (most recent call last):\nOSError: [Errno 28] No space left on device", "resources"),
        ("Traceback (most recent call last):\nOSError: [Errno 2] No such file", None),
        (f"Traceback (most recent call last):\nopenai.NotFoundError: Error code: 404 - {UNKNOWN}", "model_name"),
        (f"Traceback (most recent call last):\nKeyError: {UNKNOWN}", None),
        ("Traceback (most recent call last):\nMemoryError", "resources"),
        ("InternalServerError: 503 status code (no body)\n    at f (/a.mjs:1:1)", "server_error"),
        ("Error: connect ECONNREFUSED 127.0.0.1:80\n    at f (/a.mjs:1:1)", "connection"),
        ("FATAL ERROR: Reached heap limit - JavaScript heap out of memory", "resources"),
        ("Error: the model said ConnectionError", None),
        ("panic: index out of range", None),
        ("", None),
    ],
)  # fmt: skip
def test_the_stderr_of_a_program_may_show_an_infrastructure_failure(
    stderr: str, reason: str | None
):
    assert outside_in(stderr) == reason
