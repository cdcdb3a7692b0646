"""One rollout: its result, whatever the agent does."""

import asyncio
import contextvars
import logging
import threading
import time
from pathlib import Path

import pytest
from tests.patience import PATIENCE_S
from tests.prose import Prose
from tests.workflow.endpoint import Endpoint, Reply, serving
from tests.workflow.rollouts import ASK, model, ran, why

import hone
from hone.capture.base import current
from hone.errors import ConfigError
from hone.wire.rollout import FUNCTION_HEADER, ROLLOUT_HEADER, TEMPERATURE_HEADER
from hone.workflow import run as run_module
from hone.workflow.function import Function
from hone.workflow.run import RunOptions, run_inputs, run_rollout


async def test_a_rollout_has_output_calls_and_steps():
    endpoint = Endpoint(Reply("four"))
    async with serving(endpoint) as url:
        llm = model(url)

        async def agent(question: str) -> str:
            answer = await llm.chat([{"role": "user", "content": question}])
            hone.step("answered", value=0.5)
            return f"<{answer.choices[0].message.content}>"

        result = await ran(agent, "2+2?", id="run:1", host="127.0.0.1", temperature=0.0)
        await llm.close()
    assert (result.id, result.output, result.failure) == ("run:1", "<four>", None)
    (call,) = result.calls
    assert call.messages == [{"role": "user", "content": "2+2?"}] and call.function == "<workflow>"
    assert [(s.name, s.value, s.calls) for s in result.steps] == [("answered", 0.5, 1)]
    assert result.seconds >= call.seconds > 0
    assert endpoint.header(ROLLOUT_HEADER) == ["run:1"]
    assert endpoint.header(FUNCTION_HEADER) == ["<workflow>"]
    assert endpoint.header(TEMPERATURE_HEADER) == ["0"]
    assert current() is None


async def test_ids_are_random():
    async def agent(question: str) -> str:
        scope = current()
        assert scope is not None
        return scope.rollout

    first, second = await ran(agent), await ran(agent)
    assert first.output == first.id != second.id == second.output


async def test_a_plain_function_runs_in_a_thread_and_its_calls_are_captured():
    async with serving(Endpoint()) as url:
        llm = model(url)

        def agent(question: str) -> tuple[str, bool]:
            llm.sync_client.chat.completions.create(model="m", messages=ASK)
            hone.step("said")
            return question, threading.current_thread() is threading.main_thread()

        result = await ran(agent, "q")
        await llm.close()
    assert result.output == ("q", False)
    assert len(result.calls) == len(result.steps) == 1


class Panic(BaseException):
    """Not an Exception, like a panic of a Rust library or `pytest.fail`."""


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (Panic("index out of bounds"), "index out of bounds"),
        (
            BaseExceptionGroup("two", [SystemExit(1), Panic()]),
            "two (2 sub-exceptions): SystemExit: 1",
        ),
    ],
)
async def test_any_exception_of_an_agent_is_its_failure(error: BaseException, message: str):
    async def agent(question: str) -> None:
        raise error

    def plain(question: str) -> None:
        raise error

    for result in (await ran(agent), await ran(plain)):
        assert why(result) == ("infrastructure", "agent_error")
        assert result.failure is not None
        assert result.failure.failure.type == type(error).__name__
        assert result.failure.failure.message == message


async def test_more_plain_functions_run_at_once_than_a_pool_has_threads():
    together = threading.Barrier(50, timeout=PATIENCE_S)

    def agent(question: str) -> int:
        return together.wait()

    results = await asyncio.gather(*(ran(agent) for _ in range(50)))
    assert sorted(r.output for r in results) == list(range(50))


# ---- deadlines --------------------------------------------------------------------------------


async def test_a_timeout_before_any_answer_is_infrastructure(prose: Prose):
    async with serving(Endpoint(Reply(gate=asyncio.Event()))) as url:
        llm = model(url)

        async def agent(question: str) -> None:
            await llm.chat(ASK)

        result = await ran(agent, timeout_s=0.3)
        await llm.close()
    assert why(result) == ("infrastructure", "timeout")
    assert result.failure is not None
    failure = result.failure.failure
    prose(failure.message)
    assert "in agent" in failure.traceback and "test_run.py" in failure.traceback
    assert result.calls[0].error == "CancelledError"


async def test_a_timeout_after_an_answer_is_the_policy_s():
    async with serving(Endpoint(Reply())) as url:
        llm = model(url)

        async def agent(question: str) -> None:
            await llm.chat(ASK)
            await asyncio.Event().wait()

        assert why(await ran(agent, timeout_s=1)) == ("policy", "timeout")
        await llm.close()


async def test_an_answer_after_the_deadline_is_too_late():
    async def agent(question: str) -> str:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "late"
        return "never"

    assert why(await ran(agent, timeout_s=0.05)) == ("infrastructure", "timeout")


async def test_an_agent_that_ignores_its_cancellation_is_abandoned_and_its_calls_are_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(run_module, "GRACE_S", 0.2)
    ended = asyncio.Event()
    endpoint = Endpoint(Reply(gate=asyncio.Event()))
    async with serving(endpoint) as url:
        llm = model(url)

        async def agent(question: str) -> None:
            refused = 0
            while refused < 3:
                try:
                    await llm.chat(ASK)
                except asyncio.CancelledError:
                    refused += 1
                    await asyncio.sleep(0.2)
            ended.set()

        with caplog.at_level(logging.WARNING):
            assert why(await ran(agent, timeout_s=2)) == ("infrastructure", "timeout")
        assert "is left running; its calls to the trained model are refused" in caplog.text
        # Another rollout keeps the libraries patched: calls of the task that was left running are refused.
        await run_rollout(Function.of("w", lambda x: time.sleep(1)), "x")
        await asyncio.wait_for(ended.wait(), PATIENCE_S)
        await llm.close()
    assert len(endpoint.requests) == 1


async def test_a_thread_that_keeps_running_is_abandoned_and_its_calls_are_refused():
    went_on, refused = threading.Event(), threading.Event()
    endpoint = Endpoint()
    async with serving(endpoint) as url:
        llm = model(url)

        def agent(question: str) -> None:
            llm.sync_client.chat.completions.create(model="m", messages=ASK)
            went_on.wait(PATIENCE_S)
            try:
                llm.sync_client.chat.completions.create(model="m", messages=ASK)
            except asyncio.CancelledError:
                refused.set()
                raise

        result = await ran(agent, timeout_s=1)
        went_on.set()
        assert await asyncio.to_thread(refused.wait, PATIENCE_S)
        await llm.close()
    assert why(result) == ("policy", "timeout")
    assert len(endpoint.requests) == len(result.calls) == 1


async def test_cancelling_a_rollout_cancels_the_agent():
    begun, cleaned = asyncio.Event(), asyncio.Event()

    async def agent(question: str) -> None:
        try:
            begun.set()
            await asyncio.Event().wait()
        finally:
            cleaned.set()

    task = asyncio.create_task(ran(agent))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cleaned.is_set() and current() is None


async def test_an_agent_that_cancels_itself_fails_alone():
    async def inner(question: str) -> None:
        part = asyncio.create_task(asyncio.sleep(60))
        part.cancel()
        await part

    async def whole(question: str) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(60)

    for agent in (inner, whole):
        result = await ran(agent)
        assert why(result) == ("infrastructure", "agent_error")
        assert result.failure is not None and result.failure.failure.type == "CancelledError"


async def test_rollouts_do_not_see_each_other_s_context():
    mark: contextvars.ContextVar[str] = contextvars.ContextVar("mark", default="clean")

    async def agent(question: str) -> str:
        before = mark.get()
        mark.set(question)
        await asyncio.sleep(0)
        return f"{before}->{mark.get()}"

    results = [await ran(agent, "a"), await ran(agent, "b")]
    assert [r.output for r in results] == ["clean->a", "clean->b"]


# ---- hone run ---------------------------------------------------------------------------------

AGENT = """
async def agent(question, llm):
    answer = await llm.chat([{"role": "user", "content": question}])
    return answer.choices[0].message.content
"""


async def test_inputs_are_run_through_the_workflow_of_a_file(tmp_path: Path):
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "question.txt").write_text("from a file")
    endpoint = Endpoint()
    async with serving(endpoint) as url:
        config = tmp_path / "config.yml"
        config.write_text(
            "llms:\n"
            f"  model: {{_type: openai, model_name: m, base_url: '{url}', max_tokens: 7}}\n"
            "workflow: {_type: python, target: 'agent.py:agent', llm: model}\n"
        )
        options = RunOptions(
            config,
            override=(("llms.model.max_tokens", "9"),),
            input=("one", "two"),
            input_file=tmp_path / "question.txt",
        )
        results = await asyncio.to_thread(run_inputs, options)
    assert [r.output for r in results] == ["ok", "ok", "ok"]
    questions = [call.messages[0]["content"] for r in results for call in r.calls if call.messages]
    assert questions == ["one", "two", "from a file"]
    assert [body["max_tokens"] for body in endpoint.bodies] == [9, 9, 9]


def test_a_missing_input_is_an_error(prose: Prose, tmp_path: Path):
    with pytest.raises(ConfigError) as caught:
        run_inputs(RunOptions(tmp_path / "c.yml"))
    prose(caught)
    with pytest.raises(ConfigError) as caught:
        run_inputs(RunOptions(tmp_path / "c.yml", input_file=tmp_path / "missing"))
    prose(caught)
    (tmp_path / "picture").write_bytes(b"ab\xbd")
    with pytest.raises(ConfigError) as caught:
        run_inputs(RunOptions(tmp_path / "c.yml", input_file=tmp_path / "picture"))
    prose(caught)
