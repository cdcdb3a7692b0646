"""Streams: the same answers in pieces, every log-probability, and what happens when a client disconnects."""

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tests.fakes import ScriptedEngine, logprob
from tests.patience import PATIENCE_S
from tests.prose import Prose
from tests.server.conftest import MakeServer, MakeState, Server
from tests.server.http.test_chat_routes import CALL, HELLO, LOOK, WEATHER, client
from tests.workflow.rollouts import ran, why

from hone.art.openai import consume_chat_completion_stream, consume_sync_chat_completion_stream
from hone.errors import EngineError
from hone.inference.base import Delta

LONG = "the weather in the city is cold and the wind is strong today, take the coat " * 3


@pytest.fixture
def chunks(shared: Server, tiny_model: Path) -> Callable[..., list[Any]]:
    """`chunks(text, **request)`: the chunks of an answer that says this."""

    def ask(text: str, **request: Any) -> list[Any]:
        shared.engine.says([text])
        request = {"model": str(tiny_model), "messages": HELLO, **request}
        return list(client(shared).chat.completions.create(stream=True, **request))

    return ask


def content(chunks: list[Any], index: int = 0) -> str:
    return "".join(
        choice.delta.content or ""
        for chunk in chunks
        for choice in chunk.choices
        if choice.index == index
    )


def entries(chunks: list[Any], index: int = 0) -> list[Any]:
    """The log-probabilities of one choice, of all chunks together."""
    logprobs = [c for chunk in chunks for c in chunk.choices if c.index == index and c.logprobs]
    return [entry for choice in logprobs for entry in choice.logprobs.content]


def streamed_calls(chunks: list[Any]) -> list[Any]:
    """The tool calls of a stream, put together as the form of the chunks says."""
    calls: list[Any] = []
    for part in [part for c in chunks for part in c.choices[0].delta.tool_calls or ()]:
        if part.id is not None:
            assert (part.index, part.type, part.function.arguments) == (len(calls), "function", "")
            calls.append(part)
        else:
            assert (part.index, part.function.name) == (len(calls) - 1, None)
            calls[-1].function.arguments += part.function.arguments
    return calls


def wait_for(happened: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while not happened():
        assert time.monotonic() < end, what
        time.sleep(0.01)


# ---- ART's way to read a stream ----------------------------------------------------------------


async def test_arts_functions_read_a_stream_to_its_end(shared: Server, tiny_model: Path) -> None:
    request = {"model": str(tiny_model), "messages": HELLO, "tools": [LOOK], "logprobs": True}
    two = f"See. {CALL}{CALL}"
    shared.engine.says([two])
    whole = client(shared).chat.completions.create(**request)
    shared.engine.says([two])
    stream = client(shared).chat.completions.create(**request, stream=True)
    joined = consume_sync_chat_completion_stream(stream)
    assert joined.object == "chat.completion" and len(joined.choices) == 1
    streamed: Any = joined.choices[0].to_dict()
    expected: Any = whole.choices[0].to_dict()
    for choice in (streamed, expected):  # ids of the answer are its own
        assert choice.pop("call_id") and choice["message"].pop("refusal", None) is None
        assert all(call.pop("id") for call in choice["message"]["tool_calls"])
    assert streamed == expected and len(expected["message"]["tool_calls"]) == 2

    seen: list[str] = []

    def stop_early(chunk: Any, so_far: Any) -> None:
        seen.append(so_far.choices[0].message.content or "")
        if len(seen) == 3:
            raise StopIteration

    asking = openai.AsyncOpenAI(base_url=f"{shared.inference_url}/v1", api_key="k")
    async with asking:
        shared.engine.says([LONG])
        stream = await asking.chat.completions.create(**request, stream=True)
        left = await consume_chat_completion_stream(stream, stop_early)
        assert left.choices[0].message.content == seen[-1] and LONG.startswith(seen[-1])
        shared.engine.says([LONG])
        stream = await asking.chat.completions.create(**request, stream=True)
        assert (await consume_chat_completion_stream(stream)).choices[0].message.content == LONG


# ---- what is streamed ------------------------------------------------------------------------


def test_the_chunks_of_a_stream_add_up_to_the_answer(chunks: Any, tokenizer: Any) -> None:
    stream = chunks("caf\u00e9 \u4f60\u597d \U0001f600 ok")
    sampled = [
        *tokenizer.encode("caf\u00e9 \u4f60\u597d \U0001f600 ok", add_special_tokens=False),
        tokenizer.eos_token_id,
    ]
    assert content(stream) == "caf\u00e9 \u4f60\u597d \U0001f600 ok"
    assert "\ufffd" not in content(stream)
    assert stream[0].choices[0].delta.role == "assistant"
    assert len({chunk.id for chunk in stream}) == 1
    *others, last = stream
    assert [chunk.choices[0].finish_reason for chunk in others] == [None] * len(others)
    assert last.choices[0].finish_reason == "stop"
    assert last.choices[0].token_ids == sampled
    assert (last.choices[0].policy_step, last.policy_step) == (0, 0)
    assert last.prompt_token_ids == tokenizer.apply_chat_template(
        HELLO, add_generation_prompt=True, return_dict=False
    )
    assert all(chunk.usage is None for chunk in stream)
    assert entries(stream) == []


def test_usage_comes_last_if_it_is_requested(chunks: Any) -> None:
    stream = chunks("ok", stream_options={"include_usage": True})
    *_, end, usage = stream
    assert usage.choices == []
    assert usage.usage.completion_tokens == len(end.choices[0].token_ids)
    assert usage.usage.prompt_tokens == len(end.prompt_token_ids)


class WaitingEngine(ScriptedEngine):
    """Samples a token only when the client has received the one before."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.received = threading.Semaphore()

    async def generate(self, *args: Any, **options: Any) -> AsyncIterator[Delta]:
        async for delta in super().generate(*args, **options):
            if not await asyncio.to_thread(self.received.acquire, timeout=PATIENCE_S):
                raise EngineError("the client did not receive the token before this one")
            yield delta


def test_arguments_arrive_while_the_call_is_being_sampled(
    make_server: MakeServer, tokenizer: Any, tiny_model: Path
) -> None:
    engine = WaitingEngine([f"See. {CALL}"], tokenizer=tokenizer)
    server = make_server(engine=engine)
    stream, arrived = [], []
    for chunk in client(server).chat.completions.create(
        model=str(tiny_model), messages=HELLO, tools=[LOOK], stream=True, logprobs=True
    ):
        stream.append(chunk)
        for part in chunk.choices[0].delta.tool_calls or ():
            text = b"".join(bytes(e.bytes) for e in entries(stream)).decode()
            arrived.append((part.function.name or part.function.arguments, text))
        if chunk.choices[0].logprobs:
            engine.received.release()
    (call,) = streamed_calls(stream)
    assert call.function.arguments == '{"word": "caf\u00e9"}'
    name, *fragments = arrived
    # The name comes as soon as the arguments are an object, before any of them is sampled.
    assert name[0] == "look" and name[1].endswith('"arguments":')
    assert len(fragments) > 3
    read = ""
    for fragment, text in fragments:
        read += fragment
        assert text.rstrip("}").endswith(read.rstrip("}")), "no more than one token behind"
    assert "</tool_call>" not in fragments[-1][1]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("arguments", "max_tokens", "failure"),
    [
        ('{"word": oops}', 100, ("policy", "unparseable")),
        ('{"word": "the weather in the city is cold"}', 24, ("policy", "token_limit")),
    ],
)
async def test_a_call_that_does_not_parse_is_a_failure_of_the_policy(
    make_server: MakeServer,
    tiny_model: Path,
    arguments: str,
    max_tokens: int,
    failure: tuple[str, str],
    stream: bool,
) -> None:
    """It was text, and an agent that reads `tool_calls` failed as if by its own fault."""
    text = f'<tool_call>\n{{"name": "look", "arguments": {arguments}}}\n</tool_call>'
    server = make_server([text])
    request: Any = {"model": str(tiny_model), "messages": HELLO, "tools": [LOOK]}

    async def agent(question: str) -> Any:
        async with openai.AsyncOpenAI(base_url=server.openai_url, api_key="default") as asking:
            answer: Any = await asking.chat.completions.create(
                **request, max_tokens=max_tokens, stream=stream
            )
            calls = (
                streamed_calls([chunk async for chunk in answer])
                if stream
                else answer.choices[0].message.tool_calls
            )
            return json.loads(calls[0].function.arguments)

    result = await ran(agent, id="r")
    assert why(result) == failure, result.failure
    assert len(result.calls[0].choices[0]["malformed"]) == 1
    (call,) = server.state.calls.rollout("r")
    (sampled,) = call.reply["tool_calls"]
    assert sampled["function"]["name"] == "look"
    assert arguments.startswith(sampled["function"]["arguments"])
    assert call.malformed == result.calls[0].choices[0]["malformed"]
    metrics = httpx.get(f"{server.control_url}/metrics").text
    assert f'hone_calls_malformed_total{{model="{tiny_model}"}} 1.0' in metrics


def test_logprobs_are_complete_also_while_a_tool_call_is_held_back(chunks: Any) -> None:
    """The defect ART's README warns of: the tokens of a call had none."""
    stream = chunks(f"See. {CALL} {CALL}", tools=[LOOK, WEATHER], logprobs=True, top_logprobs=1)
    end = stream[-1].choices[0]
    assert end.finish_reason == "tool_calls"
    tokens = entries(stream)
    assert [e.logprob for e in tokens] == [logprob(t, i) for i, t in enumerate(end.token_ids)]
    assert b"".join(bytes(e.bytes) for e in tokens) == f"See. {CALL} {CALL}<|im_end|>".encode()
    silent = [c for c in stream[:-1] if c.choices[0].delta.content is None]
    silent = [c for c in silent if c.choices[0].delta.tool_calls is None]
    assert len(silent) > 20, "chunks with an empty delta carry what would be lost"
    calls = streamed_calls(stream)
    assert [(call.index, call.function.name) for call in calls] == [(0, "look"), (1, "look")]
    assert json.loads(calls[0].function.arguments) == {"word": "caf\u00e9"}
    assert calls[0].id != calls[1].id


def test_without_logprobs_there_are_no_empty_chunks(chunks: Any) -> None:
    stream = chunks(CALL, tools=[LOOK])
    first, *others, end = stream
    assert first.choices[0].delta.role == "assistant"
    assert end.choices[0].finish_reason == "tool_calls"
    assert all(chunk.choices[0].delta.tool_calls for chunk in others)


def test_chunks_name_the_choice_they_belong_to(shared: Server, tiny_model: Path) -> None:
    shared.engine.says(["one", "the second is longer"])
    stream = list(
        client(shared).chat.completions.create(
            model=str(tiny_model), messages=HELLO, n=2, stream=True, logprobs=True
        )
    )
    assert (content(stream, 0), content(stream, 1)) == ("one", "the second is longer")
    ends: dict[int, Any] = {c.choices[0].index: c.choices[0] for c in stream[-2:]}
    for index, end in ends.items():
        assert [e.logprob for e in entries(stream, index)] == [
            logprob(t, i) for i, t in enumerate(end.token_ids)
        ]
    recorded = shared.state.calls.get([ends[0].call_id, ends[1].call_id])
    assert [call.choice for call in recorded] == [0, 1]


def test_streamed_and_whole_are_the_same_answer(shared: Server, tiny_model: Path) -> None:
    shared.engine.says([f"  so \n{CALL}\n"])
    ask = client(shared).chat.completions.create
    whole: Any = ask(model=str(tiny_model), messages=HELLO, tools=[LOOK], logprobs=True)
    stream = list(
        ask(model=str(tiny_model), messages=HELLO, tools=[LOOK], logprobs=True, stream=True)
    )
    (choice,) = whole.choices
    assert content(stream) == choice.message.content
    assert stream[-1].choices[0].token_ids == choice.token_ids
    assert [e.logprob for e in entries(stream)] == [e.logprob for e in choice.logprobs.content]
    (call,) = streamed_calls(stream)
    assert call.function.arguments == choice.message.tool_calls[0].function.arguments


# ---- order and endings -----------------------------------------------------------------------


def test_the_call_is_recorded_before_its_last_chunk_is_sent(
    shared: Server, tiny_model: Path
) -> None:
    shared.engine.says(["the weather is cold"])
    body = {"model": str(tiny_model), "messages": HELLO, "stream": True}
    headers = {"X-Hone-Rollout": "in-order"}
    seen: list[int] = []
    with httpx.stream(
        "POST", f"{shared.openai_url}/chat/completions", json=body, headers=headers
    ) as answer:
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        for line in answer.iter_lines():
            if line.startswith("data: {") and json.loads(line[6:])["choices"][0]["finish_reason"]:
                seen.append(len(shared.state.calls.rollout("in-order")))
                break  # a client that reads no further has still got a whole answer
    assert seen == [1]
    (call,) = shared.state.calls.rollout("in-order")
    assert not call.abandoned


def test_a_refusal_before_the_first_token_has_a_status(prose: Prose, chunks: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        chunks("ok", messages=[{"role": "user", "content": "x" * 600}])
    prose(caught)
    with pytest.raises(openai.NotFoundError):
        chunks("ok", model="nobody")


def test_an_engine_that_fails_half_way_ends_the_stream_with_an_error(
    prose: Prose, make_server: MakeServer, tiny_model: Path
) -> None:
    server = make_server(["the weather is cold"])
    server.engine.failing = EngineError("the engine was closed; the request was not finished")
    stream = []
    with pytest.raises(openai.APIError) as caught:
        for chunk in client(server).chat.completions.create(
            model=str(tiny_model), messages=HELLO, stream=True
        ):
            stream.append(chunk)
    prose(caught)
    assert stream, "it had begun"
    (call,) = server.state.calls.rollout("")
    assert (call.abandoned, call.finish) == (True, "abort")


# ---- clients that leave ----------------------------------------------------------------------


@pytest.fixture
def slow(make_server: MakeServer, tokenizer: Any) -> Server:
    return make_server(engine=ScriptedEngine([LONG], tokenizer=tokenizer, delay_s=0.02))


def abandoned_call(server: Server, rollout: str) -> Any:
    wait_for(lambda: server.engine.aborted == 1, "the engine was not told to stop")
    wait_for(lambda: bool(server.state.calls.rollout(rollout)), "the call was not recorded")
    (call,) = server.state.calls.rollout(rollout)
    assert call.abandoned
    assert call.finish == "abort"
    whole = server.engine.requests[0].answers[0]
    assert call.call.completion_ids == list(whole[: len(call.call.completion_ids)])
    assert len(call.call.completion_ids) < len(whole)
    return call


def test_a_client_that_disconnects_during_a_stream_abandons_its_call(
    slow: Server, tiny_model: Path
) -> None:
    body = {"model": str(tiny_model), "messages": HELLO, "stream": True}
    url = f"{slow.inference_url}/rollout/gone/v1/chat/completions"
    with httpx.stream("POST", url, json=body) as answer:
        lines = answer.iter_lines()
        for _ in range(6):
            next(lines)
    call = abandoned_call(slow, "gone")
    assert call.call.completion_ids
    assert call.reply["content"], "what it had said until then"
    # The next turn of the rollout does not continue what nobody received.
    answer = httpx.post(url, json={"model": str(tiny_model), "messages": HELLO, "max_tokens": 2})
    assert answer.status_code == 200
    second = slow.state.calls.rollout("gone")[1]
    assert (second.index, second.outcome) == (1, "first")
    seeds = [request.sampling.seed for request in slow.engine.requests]
    assert seeds[0] != seeds[1], "an agent that broke off an answer and asks again gets another"


def test_a_client_that_received_nothing_gets_the_same_answer_when_it_retries(
    slow: Server, tiny_model: Path
) -> None:
    body = {"model": str(tiny_model), "messages": HELLO}
    url = f"{slow.inference_url}/rollout/gone/v1/chat/completions"
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(url, json=body, timeout=0.2)
    abandoned_call(slow, "gone")
    for _ in range(2):
        httpx.post(url, json=body | {"max_tokens": 2})
    first, second, third = (request.sampling.seed for request in slow.engine.requests)
    assert first == second != third


def test_a_client_that_disconnects_before_the_answer_abandons_its_call(
    slow: Server, tiny_model: Path
) -> None:
    body = {"model": str(tiny_model), "messages": HELLO, "n": 1}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{slow.openai_url}/chat/completions",
            json=body,
            headers={"X-Hone-Rollout": "impatient"},
            timeout=0.4,
        )
    abandoned_call(slow, "impatient")
    metrics = httpx.get(f"{slow.control_url}/metrics").text
    assert "hone_calls_abandoned_total 1.0" in metrics
    assert "hone_requests_running 0.0" in metrics


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_that_outlasts_the_grace_of_a_stop_is_recorded_as_abandoned(
    make_server: MakeServer, make_state: MakeState, tokenizer: Any, tiny_model: Path, stream: bool
) -> None:
    engine = ScriptedEngine([LONG], tokenizer=tokenizer, delay_s=0.02)
    server = make_server(engine=engine, grace_s=0)
    url = f"{server.inference_url}/rollout/late/v1/chat/completions"
    body = {"model": str(tiny_model), "messages": HELLO, "stream": stream}
    got: list[Exception] = []

    def ask() -> None:
        try:
            httpx.post(url, json=body, timeout=PATIENCE_S)
        except httpx.RemoteProtocolError as error:
            got.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    wait_for(lambda: engine.running == 1, "the request did not begin")
    server.stop()
    asking.join(PATIENCE_S)
    assert stream is False or got, "a stream that is cut off does not look like one that ended"
    again = make_state()
    (call,) = again.calls.rollout("late")
    assert (call.abandoned, call.finish) == (True, "abort")
    assert len(call.call.completion_ids) < len(engine.requests[0].answers[0])
    again.store.close()


def test_a_client_that_disconnects_during_a_pause_leaves_no_call(
    slow: Server, tiny_model: Path
) -> None:
    pause = slow.state.serving.engines.paused()
    slow.call(pause.__aenter__())
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{slow.openai_url}/chat/completions",
            json={"model": str(tiny_model), "messages": HELLO},
            timeout=0.2,
        )
    wait_for(
        lambda: "hone_requests_running 0.0" in httpx.get(f"{slow.control_url}/metrics").text,
        "the request still waits",
    )
    slow.call(pause.__aexit__(None, None, None))
    assert slow.engine.requests == []
    assert slow.state.calls.rollout("") == []


async def test_half_of_the_clients_disconnect_and_the_others_get_complete_answers(
    slow: Server, tiny_model: Path
) -> None:
    async with httpx.AsyncClient(
        timeout=PATIENCE_S, limits=httpx.Limits(max_connections=40)
    ) as asking:

        async def one(i: int) -> str:
            body = {"model": str(tiny_model), "messages": HELLO, "stream": True}
            url = f"{slow.inference_url}/rollout/r{i}/v1/chat/completions"
            async with asking.stream("POST", url, json=body) as answer:
                text = ""
                async for line in answer.aiter_lines():
                    if i % 2 and len(text) > 5:
                        return text
                    if line.startswith("data: {"):
                        text += json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
                return text

        answers = await asyncio.gather(*(one(i) for i in range(20)))
    assert all(text == LONG for text in answers[::2])
    wait_for(lambda: slow.engine.aborted == 10, "some were not aborted")
    wait_for(lambda: all(slow.state.calls.rollout(f"r{i}") for i in range(20)), "some are lost")
    abandoned = [slow.state.calls.rollout(f"r{i}")[0].abandoned for i in range(20)]
    assert abandoned == [False, True] * 10
