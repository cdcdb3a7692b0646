"""Calls that the harness captures: whole, streamed, refused, interrupted, retried."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import httpx2
import openai
import pytest
from tests.patience import PATIENCE_S
from tests.prose import Prose
from tests.workflow.endpoint import Endpoint, Reply, serving
from tests.workflow.rollouts import ran

import hone
from hone.capture.base import Recorder, SeenCall
from hone.capture.scope import outside_rollouts, recorded, within
from hone.wire.rollout import FUNCTION_HEADER, ROLLOUT_HEADER, TEMPERATURE_HEADER

ASK: Any = [{"role": "user", "content": "hi"}]
TOOLS: Any = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def client(url: str, **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=url, api_key="k", **{"max_retries": 0, **options})


def only(recorder: Recorder) -> SeenCall:
    (call,) = recorder.calls
    return call


async def test_all_fields_of_an_answer_are_captured():
    reply = Reply(
        "the sum",
        tools=[("add", '{"a": 1}')],
        more={"call_id": "c-7", "token_ids": [5, 6], "logprobs": {"content": [{"logprob": -1}]}},
        top={"policy_step": 4},
    )
    async with serving(Endpoint(reply)) as url, client(url) as ask:
        rollout, recorder = recorded("r")
        with rollout, within("<workflow>"), within("plan"):
            await ask.chat.completions.create(model="m", messages=ASK, tools=TOOLS)
    call = only(recorder)
    assert (call.index, call.function, call.model) == (0, "<workflow>.plan", "m")
    assert (call.host, call.status, call.error) == ("localhost", 200, None)
    assert call.messages == ASK and call.tools == TOOLS
    function = {"name": "add", "arguments": '{"a": 1}'}
    answer = {"role": "assistant", "content": "the sum"}
    assert call.reply == answer | {
        "tool_calls": [{"id": "t0", "type": "function", "function": function}]
    }
    assert call.finish == "tool_calls"
    assert call.usage == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    assert (call.id, call.policy_step) == ("c-7", 4)
    # Logprobs that a hone server recorded stay there; the ids are captured.
    assert call.choices[0]["token_ids"] == [5, 6] and "logprobs" not in call.choices[0]
    assert call.seconds > 0 and call.started_at > 1e9


async def test_logprobs_of_a_foreign_server_are_kept():
    reply = Reply(more={"logprobs": {"content": [{"token": "ok", "logprob": -0.5}]}})
    async with serving(Endpoint(reply)) as url, client(url) as ask:
        rollout, recorder = recorded()
        with rollout:
            await ask.chat.completions.create(model="m", messages=ASK, logprobs=True, temperature=0)
    call = only(recorder)
    assert call.temperature == 0
    assert call.parameters == {"logprobs": True, "temperature": 0}
    assert call.choices[0]["logprobs"]["content"][0]["logprob"] == -0.5
    assert (call.id, call.policy_step) == ("answer-1", None)


async def test_calls_outside_rollouts_carry_only_the_function():
    endpoint = Endpoint()
    async with serving(endpoint) as url, client(url) as ask:
        with outside_rollouts("<evaluation>", host="127.0.0.1"):
            await ask.chat.completions.create(model="m", messages=ASK)
            with recorded("r")[0]:
                await ask.chat.completions.create(model="m", messages=ASK)
        with outside_rollouts("<evaluation>", host="elsewhere"):
            await ask.chat.completions.create(model="m", messages=ASK)
        await ask.chat.completions.create(model="m", messages=ASK)
    assert endpoint.header(FUNCTION_HEADER) == ["<evaluation>", None, None, None]
    assert endpoint.header(ROLLOUT_HEADER) == [None, "r", None, None]


def as_chat(call: SeenCall) -> tuple[Any, ...]:
    """What must not depend on how the answer came."""
    usage = call.usage and {k: call.usage[k] for k in ("prompt_tokens", "completion_tokens")}
    return call.reply, call.finish, usage, call.id, call.policy_step, call.status, call.error


REPLIES = [
    Reply("two words"),
    Reply("", tools=[("add", '{"a": 1}'), ("sub", '{"b": [2]}')]),
    Reply("cut sh", finish="length", more={"call_id": "c", "policy_step": 2}),
]


@pytest.mark.parametrize("reply", REPLIES)
@pytest.mark.parametrize("library", [httpx, httpx2])
async def test_a_stream_is_captured_like_a_whole_answer(reply: Reply, library: Any):
    async with serving(Endpoint(reply, reply)) as url, client(url) as ask:
        rollout, recorder = recorded()
        with rollout:
            await ask.chat.completions.create(model="m", messages=ASK)
            async with library.AsyncClient() as http:
                body = {"model": "m", "messages": ASK, "stream": True}
                async with http.stream("POST", f"{url}/chat/completions", json=body) as response:
                    lines = [line async for line in response.aiter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    whole, streamed = recorder.calls
    assert as_chat(streamed) == as_chat(whole)
    assert streamed.messages == whole.messages


async def test_a_stream_reaches_the_openai_client_unchanged():
    async with serving(Endpoint(Reply("hello"), Reply("hello"))) as url, client(url) as ask:
        rollout, recorder = recorded()
        with rollout:
            stream = await ask.chat.completions.create(model="m", messages=ASK, stream=True)
            got = [c.choices[0].delta.content async for c in stream if c.choices]
        outside = await ask.chat.completions.create(model="m", messages=ASK, stream=True)
        assert got == [c.choices[0].delta.content async for c in outside if c.choices]
    call = only(recorder)
    assert call.reply == {"role": "assistant", "content": "hello"} and call.error is None


async def test_sync_clients_in_threads_are_captured_too():
    endpoint = Endpoint(Reply("one"), Reply("two"))
    async with serving(endpoint) as url:

        def play() -> str:
            with openai.OpenAI(base_url=url, api_key="k") as ask:
                whole = ask.chat.completions.create(model="m", messages=ASK)
                stream = ask.chat.completions.create(model="m", messages=ASK, stream=True)
                text = "".join(c.choices[0].delta.content or "" for c in stream if c.choices)
                return f"{whole.choices[0].message.content} {text}"

        rollout, recorder = recorded("r")
        with rollout:
            assert await asyncio.to_thread(play) == "one two"
    assert [call.reply and call.reply["content"] for call in recorder.calls] == ["one", "two"]
    assert endpoint.header(ROLLOUT_HEADER) == ["r", "r"]


async def test_a_compressed_stream_is_read():
    async with serving(Endpoint(Reply("squeezed", compressed=True))) as url, client(url) as ask:
        rollout, recorder = recorded()
        with rollout:
            stream = await ask.chat.completions.create(model="m", messages=ASK, stream=True)
            assert [c async for c in stream]
    assert only(recorder).reply == {"role": "assistant", "content": "squeezed"}


async def test_an_abandoned_stream_has_an_error_and_its_partial_answer():
    async with serving(Endpoint(Reply("a long answer" * 200))) as url, client(url) as ask:
        rollout, recorder = recorded()
        with rollout:
            stream = await ask.chat.completions.create(model="m", messages=ASK, stream=True)
            async for chunk in stream:
                if chunk.choices[0].delta.content:
                    break
            await stream.close()
    call = only(recorder)
    assert call.error == "the client left the stream before its end" and call.finish is None
    assert call.reply is not None and call.reply["content"].startswith("a")


async def test_a_stream_without_usage_counts_its_token_ids():
    ids = {"prompt_token_ids": [1, 2, 3, 4]}
    logprobs = {"content": [{"token": t, "logprob": -1.0} for t in "abc"]}
    recorded_here = {"token_ids": [7, 8], "call_id": "c", "logprobs": logprobs}
    replies = [
        Reply(usage=False, more=recorded_here, top=ids),
        Reply(usage=False, more={"logprobs": logprobs}),  # a server that sends no ids
        Reply(usage=False),
    ]
    async with serving(Endpoint(*replies)) as url, client(url) as ask:
        rollout, recorder = recorded()
        with rollout:
            for _ in replies:
                stream = await ask.chat.completions.create(model="m", messages=ASK, stream=True)
                assert [chunk async for chunk in stream]
    assert [call.usage for call in recorder.calls] == [
        {"completion_tokens": 2, "prompt_tokens": 4, "total_tokens": 6},
        {"completion_tokens": 3},
        None,
    ]


async def test_a_broken_stream_has_an_error_and_its_partial_answer():
    async with serving(Endpoint(Reply("abcdef", cut_after=4))) as url, client(url) as ask:
        rollout, recorder = recorded()
        # openai wraps what breaks in the middle of a stream, or lets the library's own pass.
        with rollout, pytest.raises((openai.OpenAIError, httpx.HTTPError, httpx2.HTTPError)):
            stream = await ask.chat.completions.create(model="m", messages=ASK, stream=True)
            async for _ in stream:
                pass
    call = only(recorder)
    assert call.reply == {"role": "assistant", "content": "abc"}
    assert call.error is not None and "RemoteProtocolError" in call.error


async def test_an_error_response_is_captured_with_its_reason():
    error = {"error": {"message": "no model is called 'm'", "code": "model_not_found"}}
    async with serving(Endpoint(Reply(status=404, error=error))) as url, client(url) as ask:
        rollout, recorder = recorded()
        with rollout, pytest.raises(openai.NotFoundError):
            await ask.chat.completions.create(model="m", messages=ASK)
    call = only(recorder)
    assert (call.status, call.error) == (404, "HTTP 404: no model is called 'm'")
    assert call.choices == [] and call.reply is None and call.finish is None
    assert call.messages == ASK


async def test_a_call_that_cannot_connect_is_captured():
    rollout, recorder = recorded()
    with rollout, pytest.raises(openai.APIConnectionError):
        async with client("http://127.0.0.1:9/v1") as ask:
            await ask.chat.completions.create(model="m", messages=ASK)
    call = only(recorder)
    assert call.status is None and call.error is not None and "ConnectError" in call.error


async def test_a_client_s_own_retry_is_the_same_call():
    broken = Reply(status=500, error={"error": {"message": "busy"}})
    async with (
        serving(Endpoint(broken, broken, Reply("at last"))) as url,
        client(url, max_retries=2) as ask,
    ):
        rollout, recorder = recorded()
        with rollout:
            await ask.chat.completions.create(model="m", messages=ASK)
            assert recorder.sent == 1
            await ask.chat.completions.create(model="m", messages=ASK)  # the same, not a retry
    first, second = recorder.calls
    assert (first.index, first.status, first.error) == (0, 200, None)
    assert first.reply == {"role": "assistant", "content": "at last"}
    assert second.index == 1 and first.seconds > second.seconds


async def test_retries_of_equal_concurrent_calls_are_not_confused():
    broken = [Reply(status=500)] * 8
    async with serving(Endpoint(*broken)) as url, client(url, max_retries=1) as ask:
        rollout, recorder = recorded()
        with rollout:
            jobs = (ask.chat.completions.create(model="m", messages=ASK) for _ in range(8))
            await asyncio.gather(*jobs)
    assert [call.index for call in recorder.calls] == list(range(8))
    assert [call.status for call in recorder.calls] == [200] * 8


async def test_a_call_in_progress_is_listed_as_unanswered():
    gate = asyncio.Event()
    async with serving(Endpoint(Reply(gate=gate))) as url, client(url) as ask:
        rollout, recorder = recorded()
        with rollout:
            task = asyncio.create_task(ask.chat.completions.create(model="m", messages=ASK))
            while not recorder.sent:
                await asyncio.sleep(0)
            call = only(recorder)
            assert (call.error, call.status, call.messages) == ("no answer yet", None, ASK)
            gate.set()
            await task
        assert only(recorder).error is None


async def test_a_cancelled_call_is_captured_as_cancelled():
    async with serving(Endpoint(Reply(gate=asyncio.Event()))) as url, client(url) as ask:
        rollout, recorder = recorded()
        with rollout:
            task = asyncio.create_task(ask.chat.completions.create(model="m", messages=ASK))
            while not recorder.sent:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
    assert only(recorder).error == "CancelledError"


async def test_the_other_two_apis_are_captured():
    replies = Reply("plain"), Reply("both", tools=[("add", "{}")], finish="length")
    async with serving(Endpoint(*replies)) as url, client(url) as ask:
        rollout, recorder = recorded()
        with rollout:
            await ask.completions.create(model="m", prompt="once")
            await ask.responses.create(model="m", input="hi", instructions="be brief")
    text, answer = recorder.calls
    assert text.messages is None and text.choices[0]["text"] == "plain"
    assert text.reply == {"role": "assistant", "content": "plain"}
    assert answer.messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
    ]
    assert answer.reply is not None and answer.reply["content"] == "both"
    assert answer.reply["tool_calls"][0]["function"] == {"name": "add", "arguments": "{}"}
    assert answer.finish == "length" and answer.id == "resp-1"
    assert not text.is_chat and not answer.is_chat
    assert answer.usage == {"prompt_tokens": 4, "completion_tokens": 6, "total_tokens": 10}


async def test_calls_to_other_hosts_are_captured_and_not_marked():
    endpoint = Endpoint()
    async with serving(endpoint) as url, client(url) as ask:
        rollout, recorder = recorded("r", host="models.example:8000")
        with rollout:
            await ask.chat.completions.create(model="m", messages=ASK)
        other, _ = recorded("s", host="127.0.0.1:1", temperature=0)
        with other:
            await ask.chat.completions.create(model="m", messages=ASK)
    assert only(recorder).host == "localhost"
    assert endpoint.header(ROLLOUT_HEADER) == [None, "s"]
    assert endpoint.header(TEMPERATURE_HEADER) == [None, "0"]


async def test_a_rollout_that_is_over_makes_no_more_calls():
    endpoint = Endpoint()
    async with serving(endpoint) as url, client(url) as ask, client(url) as judge:
        rollout, recorder = recorded("r", host="127.0.0.1")
        with rollout:
            await ask.chat.completions.create(model="m", messages=ASK)
            recorder.closed = True
            with pytest.raises(asyncio.CancelledError, match="rollout 'r' is over"):
                await ask.chat.completions.create(model="m", messages=ASK)
        elsewhere, closed = recorded("r", host="models.example")
        closed.closed = True
        with elsewhere:  # calls that would not be marked are not refused
            await judge.chat.completions.create(model="m", messages=ASK)
    assert recorder.sent == 1 and closed.sent == 0
    assert endpoint.header(ROLLOUT_HEADER) == ["r", None]


async def test_concurrent_rollouts_capture_their_own_calls():
    async with serving(Endpoint()) as url, client(url) as ask:

        async def play(number: int) -> list[str]:
            rollout, recorder = recorded(f"r{number}")
            with rollout:
                for turn in range(3):
                    messages: Any = [{"role": "user", "content": f"{number}.{turn}"}]
                    await ask.chat.completions.create(model="m", messages=messages)
            return [call.messages[0]["content"] for call in recorder.calls if call.messages]

        answers = await asyncio.gather(*(play(i) for i in range(12)))
    assert answers == [[f"{i}.{turn}" for turn in range(3)] for i in range(12)]


async def test_steps_know_how_many_calls_were_sent_before_them():
    async with serving(Endpoint()) as url, client(url) as ask:
        rollout, recorder = recorded()
        with rollout, within("<workflow>"):
            hone.step("start")
            await ask.chat.completions.create(model="m", messages=ASK)
            with within("judge"):
                hone.step("good move", value=1, move="e4")
    first, second = recorder.steps
    assert (first.name, first.value, first.calls, first.function) == (
        "start",
        None,
        0,
        "<workflow>",
    )
    assert (second.value, second.metadata, second.calls) == (1.0, {"move": "e4"}, 1)
    assert second.function == "<workflow>.judge"


async def test_a_value_belongs_to_the_call_of_the_task_that_records_it():
    """Two calls in flight; the one sent first is answered and judged last."""
    gates = [asyncio.Event(), asyncio.Event()]
    endpoint = Endpoint(Reply(gate=gates[0]), Reply(gate=gates[1]))
    async with serving(endpoint) as url, client(url) as ask:
        rollout, recorder = recorded()

        async def play(turn: int, judged: asyncio.Event) -> None:
            await ask.chat.completions.create(model="m", messages=ASK)
            hone.step("move", value=turn)
            judged.set()

        with rollout, within("<workflow>"):
            done = [asyncio.Event(), asyncio.Event()]
            players = [asyncio.create_task(play(0, done[0]))]
            while len(endpoint.requests) < 1:
                await asyncio.sleep(0)
            players.append(asyncio.create_task(play(1, done[1])))
            while len(endpoint.requests) < 2:
                await asyncio.sleep(0)
            gates[1].set()
            await done[1].wait()
            hone.step("the newest answer of those it started", value=5)
            gates[0].set()
            await asyncio.gather(*players)
            await ask.chat.completions.create(model="m", messages=ASK)
            hone.step("its own", value=7)
    about = {step.value: step.about for step in recorder.steps}
    assert {value: calls[0] for value, calls in about.items()} == {1: 1, 5: 1, 0: 0, 7: 2}
    # If the most likely call is not trained, the value goes to the one answered before it.
    assert about[7] == (2, 0, 1) and about[5] == (1,)


async def test_a_value_recorded_in_a_thread_belongs_to_the_call_of_that_thread():
    """All calls are answered before any value is noted."""
    answered = threading.Barrier(4, timeout=PATIENCE_S)
    async with serving(Endpoint()) as url:

        def play(turn: int) -> None:
            with openai.OpenAI(base_url=url, api_key="k") as ask:
                ask.chat.completions.create(model=f"m{turn}", messages=ASK)
                answered.wait()
                hone.step("move", value=turn)

        def agent(question: str) -> None:
            with ThreadPoolExecutor(4) as pool:
                list(pool.map(play, range(4)))

        result = await ran(agent)
    models = [call.model for call in result.calls]
    assert sorted(models) == ["m0", "m1", "m2", "m3"]
    assert {step.value: models[step.about[0]] for step in result.steps} == {
        turn: f"m{turn}" for turn in range(4)
    }


def test_a_step_outside_a_rollout_of_the_harness_is_ignored(prose: Prose):
    hone.step("anywhere", value=0.5)
    with hone.rollout():
        hone.step("the SDK keeps none")
    with pytest.raises(hone.errors.ConfigError) as caught:
        hone.step("x", value=float("nan"))
    prose(caught)


def test_a_recorder_counts_what_many_threads_send():
    recorder, start = Recorder(), threading.Barrier(8)

    class Sent:
        def __init__(self, index: int) -> None:
            self.index = index

        def read(self) -> SeenCall:
            raise AssertionError(self.index)

        async def close(self) -> None: ...

    def send() -> None:
        start.wait()
        for _ in range(500):
            recorder.add_call(Sent)
            recorder.add_step("s", None, {}, "")

    threads = [threading.Thread(target=send) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert recorder.sent == 8 * 500 and len(recorder.steps) == 8 * 500
    indices: list[int] = []
    recorder.resume(lambda call: isinstance(call, Sent) and bool(indices.append(call.index)))
    assert indices == list(range(4000))[::-1]
