"""The Messages API, driven by the official anthropic client against real servers."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import openai
import pytest
from pydantic import BaseModel
from tests.chat.conftest import build_tokenizer
from tests.fakes import ScriptedEngine
from tests.patience import PATIENCE_S
from tests.server.conftest import MakeServer, Server, write_model

from hone.capture.scope import recorded
from hone.finetune.calls import Targets, from_seen
from hone.server.http.auth import inference_key
from hone.server.settings import Settings
from hone.server.state import State

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
LOOK: dict[str, Any] = {
    "name": "look",
    "description": "Look up a word",
    "input_schema": {"type": "object", "properties": {"word": {"type": "string"}}},
}
WEATHER: dict[str, Any] = {"name": "weather", "input_schema": {"type": "object"}}
CALL = '<tool_call>\n{"name": "look", "arguments": {"word": "caf\u00e9"}}\n</tool_call>'
TWO_CALLS = CALL + '\n<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'


@pytest.fixture(scope="module")
def http() -> Iterator[Any]:
    with httpx2.Client(
        timeout=PATIENCE_S
    ) as http:  # making one reads every certificate of the machine
        yield http


@pytest.fixture(scope="module")
def client(http: Any) -> Callable[..., Any]:
    """The official client. Any: its types know nothing of hone's fields, nor of plain dicts."""

    def connect(server: Server, *, rollout: str = "", api_key: str = "default") -> Any:
        url = server.inference_url + (f"/rollout/{rollout}" if rollout else "")
        return anthropic.Anthropic(base_url=url, api_key=api_key, max_retries=0, http_client=http)

    return connect


@pytest.fixture(scope="module")
def chat_client(http: Any) -> Callable[..., Any]:
    """OpenAI's client of the same server."""

    def connect(server: Server, *, rollout: str = "") -> Any:
        url = server.inference_url + (f"/rollout/{rollout}" if rollout else "") + "/v1"
        return openai.OpenAI(base_url=url, api_key="default", max_retries=0, http_client=http)

    return connect


@pytest.fixture
def talk(shared: Server, tiny_model: Path, client: Any) -> Callable[..., Any]:
    """`talk(text, rollout="", **request)`: the message of an engine that says this text."""

    def ask(text: str, *, rollout: str = "", streamed: bool = False, **request: Any) -> Any:
        shared.engine.says([text])
        request = {"model": str(tiny_model), "messages": HELLO, "max_tokens": 200, **request}
        messages = client(shared, rollout=rollout).messages
        if not streamed:
            return messages.create(**request)
        with messages.stream(**request) as stream:
            return stream.get_final_message()

    return ask


def blocks(message: Any) -> list[dict[str, Any]]:
    """The content, without the keys of the client's types that are null."""
    return [block.to_dict(exclude_none=True) for block in message.content]


# ---- answers -----------------------------------------------------------------------------------


def test_a_message_has_the_prompt_ids_and_the_sampled_ids(
    talk: Any, shared: Server, tokenizer: Any
) -> None:
    message = talk("the weather is cold")
    fed = tokenizer.apply_chat_template(HELLO, add_generation_prompt=True, return_dict=False)
    sampled = [*tokenizer.encode("the weather is cold"), tokenizer.eos_token_id]
    assert (message.type, message.role) == ("message", "assistant")
    assert blocks(message) == [{"type": "text", "text": "the weather is cold"}]
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert (message.usage.input_tokens, message.usage.output_tokens) == (len(fed), len(sampled))
    assert message.prompt_token_ids == fed == list(shared.engine.requests[-1].prompt_ids)
    assert (message.token_ids, message.policy_step) == (sampled, 0)
    assert message.call_id.startswith("call-") and message.id.startswith("msg_")
    assert message._request_id.startswith("req_")


def test_a_stream_adds_up_to_the_whole_message(talk: Any) -> None:
    for text, more in (("two words", {}), (f"I look.{TWO_CALLS}", {"tools": [LOOK, WEATHER]})):
        whole, streamed = talk(text, **more), talk(text, streamed=True, **more)
        assert _without_ids(blocks(streamed)) == _without_ids(blocks(whole))
        for name in ("stop_reason", "stop_sequence", "usage", "model", "prompt_token_ids"):
            assert getattr(streamed, name) == getattr(whole, name), name
        assert streamed.call_id != whole.call_id


def _without_ids(content: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Ids of tool calls are made of the call's own, which no two answers share."""
    return [{key: value for key, value in block.items() if key != "id"} for block in content]


def test_the_events_of_a_stream_in_their_order(
    talk: Any, shared: Server, tiny_model: Path, http: Any
) -> None:
    shared.engine.says([f"ok{CALL}"])
    body = {"model": str(tiny_model), "messages": HELLO, "max_tokens": 99, "stream": True}
    url = f"{shared.inference_url}/v1/messages"
    answer = http.post(url, json={**body, "tools": [LOOK]})
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = [_read_event(part) for part in answer.text.strip().split("\n\n")]
    kinds = [event["type"] for event in events]
    assert kinds[:3] == ["message_start", "ping", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    started = [(e["index"], e["content_block"]) for e in events if "content_block" in e]
    (_, text), (_, used) = started
    assert [index for index, _ in started] == [0, 1]
    assert text == {"type": "text", "text": ""}
    assert (used["type"], used["name"], used["input"]) == ("tool_use", "look", {})
    deltas = [(e["index"], e["delta"]) for e in events if e["type"] == "content_block_delta"]
    content = "".join(delta["text"] for index, delta in deltas if index == 0)
    arguments = "".join(delta["partial_json"] for index, delta in deltas if index == 1)
    assert (content, json.loads(arguments)) == ("ok", {"word": "caf\u00e9"})
    last = events[-2]
    assert last["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert last["token_ids"] == list(shared.engine.requests[-1].answers[0])
    assert last["usage"]["output_tokens"] == len(last["token_ids"])
    assert last["call_id"] == events[0]["message"]["call_id"]


def _read_event(text: str) -> dict[str, Any]:
    name, data = text.split("\n")
    event = json.loads(data.removeprefix("data: "))
    assert name == f"event: {event['type']}"
    return event


async def test_the_async_client(shared: Server, tiny_model: Path) -> None:
    shared.engine.says(["one"])
    request: Any = {"model": str(tiny_model), "messages": HELLO, "max_tokens": 9}
    async with anthropic.AsyncAnthropic(base_url=shared.inference_url, api_key="default") as ask:
        message = await ask.messages.create(**request)
        assert blocks(message) == [{"type": "text", "text": "one"}]
        async with ask.messages.stream(**request) as stream:
            assert "".join([text async for text in stream.text_stream]) == "one"


def test_why_an_answer_ended(talk: Any) -> None:
    for streamed in (False, True):
        cut = talk("one two three four", max_tokens=2, streamed=streamed)
        assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 2)
        stopped = talk("one STOP two", stop_sequences=["END", "STOP"], streamed=streamed)
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "STOP")
        assert blocks(stopped) == [{"type": "text", "text": "one "}]
        called = talk(CALL, tools=[LOOK], stop_sequences=["END"], streamed=streamed)
        assert (called.stop_reason, called.stop_sequence) == ("tool_use", None)
        empty = talk("", streamed=streamed)
        assert (empty.content, empty.stop_reason, empty.usage.output_tokens) == ([], "end_turn", 1)


def test_max_tokens_beyond_the_context_is_lowered_to_what_fits(talk: Any, shared: Server) -> None:
    message = talk("hi", max_tokens=8192)
    room = 512 - message.usage.input_tokens
    assert (message.stop_reason, shared.engine.requests[-1].sampling.max_tokens) == (
        "end_turn",
        room,
    )
    full = talk("word " * 600, max_tokens=8192)
    assert full.stop_reason == "model_context_window_exceeded"
    assert full.usage.input_tokens + full.usage.output_tokens == 512


# ---- tools and thinking ------------------------------------------------------------------------


@pytest.mark.parametrize("streamed", [False, True])
def test_two_parallel_calls_over_two_turns_are_one_token_sequence(
    talk: Any, shared: Server, streamed: bool
) -> None:
    rollout = f"tools-{streamed}"
    ask: dict[str, Any] = {"tools": [LOOK, WEATHER], "system": "Be brief.", "rollout": rollout}
    first = talk(f"I look.{TWO_CALLS}", streamed=streamed, **ask)
    text, look, weather = first.content
    assert (text.text, look.name, look.input) == ("I look.", "look", {"word": "caf\u00e9"})
    assert (weather.name, weather.input, first.stop_reason) == ("weather", {}, "tool_use")
    assert look.id != weather.id
    results = [
        {"type": "tool_result", "tool_use_id": look.id, "content": "a place"},
        {
            "type": "tool_result",
            "tool_use_id": weather.id,
            "content": [{"type": "text", "text": "no sensor"}],
            "is_error": True,
        },
        {"type": "text", "text": "Well?"},
    ]
    messages = [
        *HELLO,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": results},
    ]
    second = talk("cold", messages=messages, streamed=streamed, **ask)
    # The prompt continues what was sampled, to the token.
    sampled = list(shared.engine.requests[-2].answers[0])
    before = [*first.prompt_token_ids, *sampled]
    assert second.prompt_token_ids[: len(before)] == before
    one, two = shared.state.calls.rollout(rollout)
    assert (one.outcome, two.outcome, two.reasons) == ("first", "bridged", ["exact"])
    assert (one.id, two.id) == (first.call_id, second.call_id)
    assert [m["role"] for m in two.messages or []] == [
        *("system", "user", "assistant", "tool", "tool", "user")
    ]
    assert two.messages is not None
    assert two.messages[2] == one.reply
    assert [m["content"] for m in two.messages[3:]] == ["a place", "Error: no sensor", "Well?"]


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, str]]:
    """A server of a model whose template has a reasoning and enable_thinking."""
    tokenizer = build_tokenizer("qwen3")
    model = write_model(tmp_path_factory.mktemp("thinker"), tokenizer)
    engine = ScriptedEngine(tokenizer=tokenizer)
    settings = Settings(root=tmp_path_factory.mktemp("root"), allow_base_models=(str(model),))
    server = Server(State(settings, open_engine=lambda name: engine), engine).start()
    yield server, str(model)
    server.stop()


THOUGHT = "<think>\nhm, cold\n</think>\n\nyes"


@pytest.mark.parametrize("streamed", [False, True])
def test_thinking_blocks_are_returned_and_can_be_sent_back(
    thinker: tuple[Server, str], streamed: bool, client: Any
) -> None:
    server, model = thinker
    server.engine.says([f"{THOUGHT}{CALL}"])
    rollout = f"thinking-{streamed}"
    messages = client(server, rollout=rollout).messages

    def ask(sent: list[Any], **more: Any) -> Any:
        request = {"model": model, "messages": sent, "max_tokens": 99, "tools": [LOOK], **more}
        if not streamed:
            return messages.create(**request)
        with messages.stream(**request) as stream:
            return stream.get_final_message()

    first = ask(HELLO, thinking={"type": "enabled", "budget_tokens": 1024})
    thinking, text, used = first.content
    assert (thinking.thinking, text.text, used.name) == ("hm, cold", "yes", "look")
    assert thinking.signature and not hasattr(first, "not_applicable")
    result = {"type": "tool_result", "tool_use_id": used.id, "content": "1"}
    later = [
        *HELLO,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    second = ask(later, thinking={"type": "adaptive"})
    fed = [*first.prompt_token_ids, *server.engine.requests[-2].answers[0]]
    assert second.prompt_token_ids[: len(fed)] == fed
    # Blocks whose text the client did not get are still continued by the ids that were sampled.
    hidden = ask(HELLO, thinking={"type": "enabled", "budget_tokens": 1024, "display": "omitted"})
    assert (hidden.content[0].type, hidden.content[0].thinking) == ("thinking", "")
    later[1] = {"role": "assistant", "content": hidden.content}
    ask(later, thinking={"type": "enabled", "budget_tokens": 1024})
    *_, last = server.state.calls.rollout(rollout)
    assert (last.outcome, last.reasons) == ("bridged", ["reasoning not sent back"])


def test_thinking_is_switched_off_where_the_template_can(
    thinker: tuple[Server, str], talk: Any, client: Any, chat_client: Any
) -> None:
    server, model = thinker
    server.engine.says(["ok"])
    ask: Any = {"model": model, "messages": HELLO, "max_tokens": 9}
    message = client(server).messages.create(**ask, thinking={"type": "disabled"})
    plain = client(server).messages.create(**ask)
    assert message.prompt_token_ids != plain.prompt_token_ids
    chat = chat_client(server).chat.completions.create(
        **ask, extra_body={"chat_template_kwargs": {"enable_thinking": False}}
    )
    assert message.prompt_token_ids == chat.prompt_token_ids
    # The other model's template has no reasoning: the response says that the key changed nothing.
    assert talk("ok", thinking={"type": "disabled"}).not_applicable == ["thinking"]
    assert not hasattr(talk("ok"), "not_applicable")


def test_a_tool_can_be_required_and_calls_limited_to_one(talk: Any, shared: Server) -> None:
    named: dict[str, Any] = {"tools": [LOOK], "tool_choice": {"type": "tool", "name": "look"}}
    message = talk(CALL, **named)
    assert [b.name for b in message.content] == ["look"]
    constraint = shared.engine.requests[-1].sampling.constraint
    assert constraint is not None and constraint.text.startswith("start: (call)")
    one = {"type": "auto", "disable_parallel_tool_use": True}
    message = talk(TWO_CALLS, tools=[LOOK, WEATHER], tool_choice=one)
    assert [b.name for b in message.content] == ["look"]
    assert (message.stop_reason, message.stop_sequence) == ("tool_use", None)
    message = talk(CALL, tools=[LOOK], tool_choice={"type": "none"})
    assert [b.type for b in message.content] == ["text"]


def test_the_answer_follows_a_schema(shared: Server, tiny_model: Path, client: Any) -> None:
    shared.engine.says(['{"n": 4}'])
    ask: Any = {"model": str(tiny_model), "messages": HELLO, "max_tokens": 99}
    message = client(shared).messages.parse(**ask, output_format=Number)
    assert message.parsed_output == Number(n=4)
    assert shared.engine.requests[-1].sampling.constraint is not None


class Number(BaseModel):
    n: int


@pytest.mark.parametrize("streamed", [False, True])
def test_a_call_that_is_no_json_reaches_the_agent_and_is_continued_to_the_token(
    talk: Any, shared: Server, streamed: bool
) -> None:
    rollout = f"broken-{streamed}"
    ask: dict[str, Any] = {"tools": [LOOK], "rollout": rollout, "streamed": streamed}
    arguments = '{"word": "a", word: 2}'
    text = f'<tool_call>\n{{"name": "look", "arguments": {arguments}}}\n</tool_call>'
    first = talk(text, **ask)
    (used,) = first.content
    assert used.input["INVALID_JSON"] == arguments
    result = {"type": "tool_result", "tool_use_id": used.id, "content": "?", "is_error": True}
    later = [
        *HELLO,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    talk("ok", messages=later, **ask)
    *_, last = shared.state.calls.rollout(rollout)
    assert (last.outcome, last.reasons) == ("bridged", ["exact"])
    cut = talk(text, max_tokens=20, **ask)
    assert cut.stop_reason == "max_tokens" and "INVALID_JSON" in cut.content[0].input


# ---- recording ---------------------------------------------------------------------------------


def test_every_call_of_a_rollout_is_recorded_once_with_the_ids_of_the_response(
    talk: Any, shared: Server, tiny_model: Path
) -> None:
    whole = talk("one", rollout="alike")
    streamed = talk("two", rollout="alike", streamed=True, extra_body={"temperature": 0.5})
    one, two = shared.state.calls.rollout("alike")
    assert (one.id, one.call.prompt_ids) == (whole.call_id, whole.prompt_token_ids)
    assert one.call.completion_ids == whole.token_ids
    assert (two.id, two.call.prompt_ids) == (streamed.call_id, streamed.prompt_token_ids)
    assert two.call.completion_ids == list(shared.engine.requests[-1].answers[0])
    assert (one.call.temperature, two.call.temperature) == (1.0, 0.5)
    assert all(call.call.logprobs and not call.abandoned for call in (one, two))


def test_the_same_conversation_has_the_same_prompt_as_through_chat_completions(
    shared: Server, tiny_model: Path, client: Any, chat_client: Any
) -> None:
    shared.engine.says([f"I look.{TWO_CALLS}", "cold"])
    parameters = LOOK["input_schema"]
    look = {"name": "look", "description": "Look up a word", "parameters": parameters}
    weather = {"name": "weather", "parameters": {"type": "object"}}
    tools: list[Any] = [{"type": "function", "function": one} for one in (look, weather)]
    model = str(tiny_model)
    chat = chat_client(shared, rollout="as-chat").chat.completions
    conversation: list[Any] = [{"role": "system", "content": "Be brief."}, *HELLO]
    one = chat.create(model=model, messages=conversation, tools=tools)
    calls = one.choices[0].message.tool_calls
    conversation += [one.choices[0].message.to_dict()]
    conversation += [
        {"role": "tool", "tool_call_id": call.id, "content": call.id[:1]} for call in calls
    ]
    two = chat.create(
        model=model, messages=[*conversation, {"role": "user", "content": "?"}], tools=tools
    )

    messages = client(shared, rollout="as-messages").messages
    ask: Any = {"model": model, "max_tokens": 99, "system": "Be brief.", "tools": [LOOK, WEATHER]}
    first = messages.create(messages=HELLO, **ask)
    results: list[Any] = [
        {"type": "tool_result", "tool_use_id": block.id, "content": block.id[:1]}
        for block in first.content[1:]
    ]
    turn = {"role": "user", "content": [*results, {"type": "text", "text": "?"}]}
    answer = {"role": "assistant", "content": first.content}
    second = messages.create(messages=[*HELLO, answer, turn], **ask)
    assert first.prompt_token_ids == one.prompt_token_ids
    assert second.prompt_token_ids == two.prompt_token_ids
    recorded = [shared.state.calls.rollout(name) for name in ("as-chat", "as-messages")]
    assert [c.outcome for c in recorded[0]] == [c.outcome for c in recorded[1]]


def test_count_tokens_is_the_usage_of_the_real_call(talk: Any, shared: Server, client: Any) -> None:
    first = talk(f"I look.{CALL}", tools=[LOOK], rollout="counted")
    result = {"type": "tool_result", "tool_use_id": first.content[1].id, "content": "1"}
    ask: dict[str, Any] = {
        "model": first.model,
        "tools": [LOOK],
        "messages": [
            *HELLO,
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": [result]},
        ],
    }
    num_requests, recorded = len(shared.engine.requests), len(shared.state.calls.rollout("counted"))
    counting = client(shared, rollout="counted").messages
    count = counting.count_tokens(**ask).input_tokens
    # As Claude Code asks.
    beta = counting.count_tokens(**ask, extra_query={"beta": "true"}).input_tokens
    assert len(shared.engine.requests) == num_requests
    assert len(shared.state.calls.rollout("counted")) == recorded == 1
    assert talk("ok", rollout="counted", **ask).usage.input_tokens == count == beta
    # A prompt that does not fit is counted too: agents shorten their history by this number.
    long = [{"role": "user", "content": "word " * 1000}]
    assert counting.count_tokens(model=first.model, messages=long).input_tokens > 512


def test_calls_of_an_open_rollout_are_marked_and_seen_as_chats(
    shared: Server, tiny_model: Path, client: Any, chat_client: Any
) -> None:
    """The agent's client knows nothing of the rollout: httpx2 is patched while it is open."""
    shared.engine.says([f"I look.{CALL}"])
    ask: Any = {"model": str(tiny_model), "messages": HELLO, "max_tokens": 99, "tools": [LOOK]}
    rollout, recorder = recorded("in-process")
    with rollout:
        client(shared).messages.create(**ask, system="Be brief.")
        with client(shared).messages.stream(**ask, system="Be brief.") as stream:
            stream.get_final_message()
        client(shared).messages.count_tokens(model=ask["model"], messages=HELLO)
        with pytest.raises(anthropic.BadRequestError):
            client(shared).messages.create(**{**ask, "max_tokens": 0})
        function = {"name": "look", "description": "Look up a word"}
        function["parameters"] = LOOK["input_schema"]
        chat = {**ask, "tools": [{"type": "function", "function": function}]}
        chat["messages"] = [{"role": "system", "content": "Be brief."}, *HELLO]
        chat_client(shared).chat.completions.create(**chat)
    whole, streamed, wrong, as_chat = recorder.calls
    one, two, three = shared.state.calls.rollout("in-process")
    assert [call.id for call in (whole, streamed, as_chat)] == [one.id, two.id, three.id]
    for call, record in ((whole, one), (streamed, two)):
        assert (call.messages, call.tools) == (as_chat.messages, as_chat.tools)
        assert call.reply == record.reply and call.finish == "tool_calls"
        assert (call.usage, call.policy_step, call.error) == (as_chat.usage, 0, None)
        assert call.choices[0]["token_ids"] == record.call.completion_ids
        assert call.parameters["max_tokens"] == 99 and "system" not in call.parameters
    assert (wrong.status, wrong.choices) == (400, []) and "max_tokens" in str(wrong.error)
    # Of a foreign server nothing else would be known: without log-probabilities it is not trained.
    seen = from_seen([whole, streamed], Targets())
    assert (seen.sampled, dict(seen.dropped)) == ([], {"no_logprobs": 2})


def test_requests_to_other_services_at_that_path_are_not_calls(shared: Server, http: Any) -> None:
    rollout, recorder = recorded("other")
    with rollout:
        http.post(f"{shared.inference_url}/v1/messages", json={"text": "an SMS"})
    assert recorder.calls == [] and shared.state.calls.rollout("other") == []


# ---- errors and access -------------------------------------------------------------------------


def test_wrong_input_is_a_bad_request_in_anthropics_shape(
    talk: Any, shared: Server, http: Any
) -> None:
    before = len(shared.engine.requests)
    image = {"type": "image", "source": {"type": "url", "url": "http://x.example/a.png"}}
    nested: dict[str, Any] = {}
    for _ in range(65):
        nested = {"items": nested}
    for wrong, says in (
        (
            {"messages": [{"role": "user", "content": [image]}]},
            "messages[0].content[0]: got a block",
        ),
        ({"max_tokens": 0}, "max_tokens: Input should be greater than or equal to 1"),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            "tools[0]: got a tool",
        ),
        ({"messages": [{"role": "user", "content": "word " * 1000}]}, "messages: 4"),
        ({"extra_body": {"mcp_servers": []}}, "mcp_servers: not in this version"),
        (
            {"extra_body": {"output_format": {"type": "json_schema", "schema": nested}}},
            "output_config.format.schema: nested more than",
        ),
    ):
        with pytest.raises(anthropic.BadRequestError) as caught:
            talk("never", **wrong)
        body: Any = caught.value.body
        assert set(body) == {"type", "error", "request_id"} and body["type"] == "error"
        assert body["error"]["type"] == "invalid_request_error"
        assert body["error"]["message"].startswith(says), body
        assert body["request_id"] == caught.value.request_id
    with pytest.raises(anthropic.NotFoundError) as unknown:
        talk("never", model="claude-unknown")
    missing: Any = unknown.value.body
    assert missing["error"]["type"] == "not_found_error"
    assert len(shared.engine.requests) == before
    for path in ("/v1/messages", "/rollout/r/v1/messages", "/v1/messages/count_tokens"):
        answer = http.post(shared.inference_url + path, content=b"{")
        assert (answer.status_code, answer.json()["type"]) == (400, "error"), path
        answer = http.get(shared.inference_url + path)
        assert (answer.status_code, answer.json()["type"]) == (405, "error"), path


def test_a_stream_that_fails_ends_with_an_error_event(
    make_server: MakeServer, tiny_model: Path, client: Any
) -> None:
    server = make_server(["one two three"])
    server.engine.failing = RuntimeError("broken")
    seen: list[str] = []
    ask: Any = {"model": str(tiny_model), "messages": HELLO, "max_tokens": 9}
    with (
        client(server).messages.stream(**ask) as stream,
        pytest.raises(anthropic.APIStatusError) as caught,
    ):
        for event in stream:
            seen.append(event.type)
    assert seen[0] == "message_start" and "message_stop" not in seen
    body: Any = caught.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "api_error")


def test_keys_in_either_header_open_the_inference_routes_alone(
    make_server: MakeServer, tiny_model: Path, http: Any, client: Any
) -> None:
    server = make_server(["ok"], api_key="secret-key-1")
    body = {"model": str(tiny_model), "messages": HELLO, "max_tokens": 9}
    path, training = "/v1/messages", "/v1/training/jobs"
    own, narrow = "secret-key-1", inference_key(server.state.settings)
    for url in (server.inference_url, server.control_url):
        for key in (own, narrow):
            for headers in ({"x-api-key": key}, {"Authorization": f"Bearer {key}"}):
                headers |= {"anthropic-version": "2023-06-01", "anthropic-beta": "tools-2024-04-04"}
                assert http.post(url + path, json=body, headers=headers).status_code == 200
        for wrong in ("", "secret-key-", "default", "\xfc"):
            for name in ("x-api-key", "authorization"):
                raw = {name: wrong.encode("latin-1")}
                for route in (path, f"/rollout/r{path}", f"{path}/count_tokens"):
                    answer = http.post(url + route, json=body, headers=raw)
                    assert answer.status_code == 401, (route, name, wrong)
                    assert answer.json()["error"]["type"] == "authentication_error"
    assert http.get(server.control_url + training, headers={"x-api-key": own}).status_code == 200
    keyed = http.get(server.control_url + training, headers={"x-api-key": str(narrow)})
    assert keyed.status_code == 401
    with pytest.raises(anthropic.AuthenticationError):
        client(server, api_key="wrong").messages.create(**body)
    assert client(server, api_key=own).messages.create(**body).stop_reason == "end_turn"
