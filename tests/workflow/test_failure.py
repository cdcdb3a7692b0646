"""Why a rollout failed: whose doing it was, by what the agent raised and the answers before it."""

import json
import sys
from typing import Any

import openai
import pytest
from anthropic import AsyncAnthropic
from openai.types.chat import ChatCompletion
from pydantic import BaseModel
from tests.workflow.endpoint import Endpoint, Reply, serving
from tests.workflow.rollouts import ASK, model, ran, why

from hone.errors import AgentFailed, AgentTimeout, PolicyFailure


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
        (both, ("infrastructure", "agent_error")),
        (crash, ("infrastructure", "agent_error")),
        (leave, ("infrastructure", "agent_error")),
    ],
)
async def test_what_the_agent_raises_is_data(reads: Any, expected: tuple[str, str]):
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


async def test_unparseable_before_any_answer_is_not_the_policy_s_doing():
    async def agent(question: str) -> Any:
        return json.loads(question)

    result = await ran(agent, "no json")
    assert why(result) == ("infrastructure", "agent_error")
    assert result.failure is not None and result.failure.failure.type == "JSONDecodeError"


def cut_short(text: str) -> Any:
    raise openai.LengthFinishReasonError(completion=ChatCompletion.model_construct(usage=None))


def wrong_type(text: str) -> Any:
    return int(text)  # may be the model's doing or the agent's: that cannot be told


CUT = (
    " (answers cut at the token limit before it: 1 of 2; an agent that cannot continue with such an "
    "answer raises hone.errors.PolicyFailure)"
)


@pytest.mark.parametrize(
    ("reads", "expected", "more"),
    [
        (parse, ("policy", "token_limit"), ""),
        (checked, ("policy", "token_limit"), ""),
        (wrapped, ("policy", "token_limit"), ""),
        (cut_short, ("policy", "token_limit"), ""),
        (limit, ("policy", "step_limit"), ""),
        (crash, ("infrastructure", "agent_error"), CUT),
        (wrong_type, ("infrastructure", "agent_error"), CUT),
    ],
)
async def test_after_an_answer_that_was_cut_only_what_cannot_read_it_is_the_token_limit(
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


async def test_a_bug_of_the_agent_after_whole_answers_says_nothing_of_limits():
    async with serving(Endpoint(Reply("ok"))) as url:
        llm = model(url)

        async def agent(question: str) -> Any:
            await llm.chat(ASK)
            return crash("")

        result = await ran(agent)
        await llm.close()
    assert why(result) == ("infrastructure", "agent_error")
    assert result.failure is not None and result.failure.failure.message == "'no such key'"


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
    ],
)
@pytest.mark.parametrize("hidden", ["", "plain", "refusal"])
async def test_what_the_server_refuses(
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
async def test_the_world_s_own_errors(error: Exception, reason: str):
    async def agent(question: str) -> None:
        raise error

    assert why(await ran(agent)) == ("infrastructure", reason)


@pytest.mark.parametrize(
    ("error", "before", "after"),
    [
        (
            AgentFailed("x", reason="exit_status", details="its stderr"),
            *[("infrastructure", "exit_status")] * 2,
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
async def test_a_program_s_failure_is_the_policy_s_if_it_says_so_or_hangs_after_an_answer(
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
    assert (hint in second.failure.failure.message) == (after[0] == "infrastructure")


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
async def test_errors_of_anthropic_s_client_are_told_apart_too(
    replies: list[Reply], expected: tuple[str, str]
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
        assert "127.0.0.1:9/v1/messages cannot be reached" in str(result.failure)
