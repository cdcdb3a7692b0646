"""The OpenAI Responses API, driven by the official client against real servers."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tests.chat.conftest import build_tokenizer
from tests.fakes import ScriptedEngine, logprob
from tests.patience import PATIENCE_S
from tests.prose import Prose
from tests.server.conftest import MakeServer, Server, write_model
from tests.server.http.test_chat_routes import CALL, LOOK, TWO_CALLS, WEATHER, client, ids, opened
from tests.server.http.test_respond_stream import LONG, wait_for
from tests.server.http.test_rollout_routes import SAID, spelt_out

from hone.capture.scope import recorded
from hone.types import RecordedCall
from hone.workflow.function import Function
from hone.workflow.llm import LLM
from hone.workflow.run import run_rollout

FLAT_LOOK: dict[str, Any] = {"type": "function", **LOOK["function"]}
FLAT_WEATHER: dict[str, Any] = {"type": "function", **WEATHER["function"]}
CALLED = {"call_id": "c1", "name": "look", "arguments": '{"word": "x"}'}
PATH = "/v1/responses"


Create = Callable[..., Any]


@pytest.fixture(scope="module")
def responses(shared: Server) -> Iterator[Any]:
    with client(shared) as asking:
        yield asking.responses


@pytest.fixture
def create(shared: Server, responses: Any, tiny_model: Path) -> Create:
    """`create(said, **request)`: the response of an engine that says this."""

    def ask(answer: Any, /, **request: Any) -> Any:
        shared.engine.says([answer])
        request = {"model": str(tiny_model), "input": "hello", **request}
        return responses.create(**request)

    return ask


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    # Making one reads every certificate of the machine.
    with httpx.Client(timeout=PATIENCE_S) as client:
        yield client


@pytest.fixture
def refused(shared: Server, tiny_model: Path, http: httpx.Client) -> Create:
    """`refused(status=400, **request)`: the error, in OpenAI's shape; nothing is sampled."""

    def ask(status: int = 400, **request: Any) -> Any:
        before = len(shared.engine.requests)
        body = {"model": str(tiny_model), "input": "hello"} | request
        answer = http.post(shared.inference_url + PATH, json=body)
        assert answer.status_code == status, answer.text
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert len(shared.engine.requests) == before
        return answer.json()["error"]

    return ask


def in_rollout(server: Server, rollout: str) -> Any:
    url = f"{server.inference_url}/rollout/{rollout}/v1"
    return opened(url).responses


def kinds(items: list[Any]) -> list[str]:
    return [item.type for item in items]


# ---- answers ---------------------------------------------------------------------------------


def test_a_response_has_the_prompt_ids_and_the_sampled_ids(
    create: Create, tokenizer: Any, shared: Server
) -> None:
    answer = create(
        "the weather is cold", instructions="be brief", metadata={"a": "b"}, temperature=0.5
    )
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    sampled = [*ids(tokenizer, "the weather is cold"), tokenizer.eos_token_id]
    fed = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert answer.id.startswith("resp_")
    assert (answer.object, answer.status, answer.output_text) == (
        "response",
        "completed",
        "the weather is cold",
    )
    (message,) = answer.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    assert message.content[0].logprobs == []
    assert answer.prompt_token_ids == fed == list(shared.engine.requests[-1].prompt_ids)
    assert answer.token_ids == sampled
    assert answer.policy_step == 0
    usage = answer.usage
    assert (usage.input_tokens, usage.output_tokens) == (len(fed), len(sampled))
    assert usage.total_tokens == len(fed) + len(sampled)
    assert usage.output_tokens_details.reasoning_tokens == 0
    assert (answer.instructions, answer.metadata) == ("be brief", {"a": "b"})
    assert (answer.temperature, answer.top_p, answer.tool_choice) == (0.5, 1.0, "auto")
    (call,) = shared.state.calls.get([answer.call_id])
    assert (call.call.prompt_ids, call.call.completion_ids) == (fed, sampled)
    assert call.call.temperature == 0.5


def test_how_a_response_is_sampled(create: Create, shared: Server) -> None:
    create(
        "ok",
        temperature=0.5,
        top_p=0.9,
        max_output_tokens=7,
        top_logprobs=4,
        include=["message.output_text.logprobs"],
        extra_body={"top_k": 5, "min_p": 0.1, "seed": 3, "stop": ["a"]},
    )
    used = shared.engine.requests[-1].sampling
    assert (used.temperature, used.top_p, used.top_k, used.min_p) == (0.5, 0.9, 5, 0.1)
    assert (used.max_tokens, used.seed, used.stop, used.top_logprobs) == (7, 3, ("a",), 4)


def test_a_response_that_reaches_its_limit_is_incomplete(create: Create) -> None:
    answer = create("the weather in the city is cold", max_output_tokens=3)
    assert answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output[-1].status == "incomplete"
    assert len(answer.token_ids) == 3
    *_, last = create("the weather in the city is cold", max_output_tokens=3, stream=True)
    assert last.type == "response.incomplete"
    assert last.response.output_text == answer.output_text


def test_log_probabilities_of_the_text_and_of_every_token(create: Create, tokenizer: Any) -> None:
    include = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    answer = create("caf\u00e9", **include)
    sampled = [*ids(tokenizer, "caf\u00e9"), tokenizer.eos_token_id]
    values = [logprob(token, i) for i, token in enumerate(sampled)]
    entries = answer.output[0].content[0].logprobs
    assert b"".join(bytes(e.bytes) for e in entries) == "caf\u00e9".encode()
    assert [entry.logprob for entry in entries] == values[:-1]  # not of the end token
    assert [len(entry.top_logprobs) for entry in entries] == [2] * len(entries)
    assert answer.token_logprobs == values
    events = list(create("caf\u00e9", stream=True, **include))
    sent = [e.logprob for event in events for e in getattr(event, "logprobs", None) or ()]
    assert sent == values[:-1] * 2  # in the deltas, and once more when the text is done
    assert events[-1].response.token_logprobs == values
    part = events[-1].response.output[0].content[0]
    assert [e.logprob for e in part.logprobs] == values[:-1]


def test_chat_completions_and_responses_have_the_same_prompts(
    create: Create, shared: Server, tiny_model: Path
) -> None:
    arguments = '{"word": "caf\u00e9"}'
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": arguments}}
    shared.engine.says(["ok"])
    chat = client(shared).chat.completions.create(
        model=str(tiny_model),
        messages=[
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": t} for t in ("one", "two")]},
            {"role": "assistant", "content": "I look.", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "cold"},
            {"role": "developer", "content": "now"},
            {"role": "assistant", "content": "It is cold."},
            {"role": "user", "content": "thanks"},
        ],
        tools=[LOOK, WEATHER],
    )
    called = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": arguments}
    reply = {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed"}
    answer = create(
        "ok",
        instructions="be brief",
        input=[
            {
                "role": "user",
                "content": [{"type": "input_text", "text": t} for t in ("one", "two")],
            },
            reply | {"content": [{"type": "output_text", "text": "I look.", "annotations": []}]},
            called,
            {"type": "function_call_output", "call_id": "c1", "output": "cold"},
            {"type": "message", "role": "developer", "content": "now"},
            {"role": "assistant", "content": "It is cold."},
            {"role": "user", "content": "thanks"},
        ],
        tools=[FLAT_LOOK | {"strict": False}, FLAT_WEATHER],
    )
    assert answer.prompt_token_ids == chat.prompt_token_ids


# ---- tools -----------------------------------------------------------------------------------


def test_two_parallel_calls(create: Create) -> None:
    answer = create(f"See. {TWO_CALLS}", tools=[FLAT_LOOK, FLAT_WEATHER])
    message, look, weather = answer.output
    assert message.content[0].text == answer.output_text == "See."
    assert (look.type, look.name, look.arguments) == (
        "function_call",
        "look",
        '{"word": "caf\u00e9"}',
    )
    assert (weather.name, weather.arguments) == ("weather", "{}")
    assert look.call_id.startswith("call_")
    assert look.call_id != weather.call_id
    assert len({item.id for item in answer.output}) == 3


def test_a_stream_of_two_calls_has_the_events_of_the_api(create: Create) -> None:
    tools = [FLAT_LOOK, FLAT_WEATHER]
    events = list(create(f"See. {TWO_CALLS}", tools=tools, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    folded: list[str] = []
    for event in events:
        if not (event.type.endswith(".delta") and folded[-1] == event.type):
            folded.append(event.type)
    call = [
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
    ]
    assert folded == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        *call,
        *call,
        "response.completed",
    ]
    done = [event for event in events if event.type == "response.output_item.done"]
    assert [event.output_index for event in done] == [0, 1, 2]
    final = events[-1].response
    assert [event.item.to_dict() for event in done] == [item.to_dict() for item in final.output]
    arguments = {1: "", 2: ""}
    for event in events:
        if event.type == "response.function_call_arguments.delta":
            arguments[event.output_index] += event.delta
    assert arguments == {1: '{"word": "caf\u00e9"}', 2: "{}"}
    whole = create(f"See. {TWO_CALLS}", tools=tools)
    ours = [(i.type, getattr(i, "arguments", "")) for i in final.output]
    assert ours == [(i.type, getattr(i, "arguments", "")) for i in whole.output]


def test_the_client_s_own_stream_of_snapshots(
    responses: Any, shared: Server, tiny_model: Path
) -> None:
    shared.engine.says([f"See. {CALL} the coat"])
    with responses.stream(model=str(tiny_model), input="hello", tools=[FLAT_LOOK]) as stream:
        texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    # Text after a call is a message of its own in a stream.
    assert kinds(final.output) == ["message", "function_call", "message"]
    assert "".join(texts) == final.output_text == "See.\nthe coat"
    assert final.output[1].arguments == '{"word": "caf\u00e9"}'


async def test_the_async_client(make_server: MakeServer, tiny_model: Path) -> None:
    server = make_server(["one"])
    async with openai.AsyncOpenAI(base_url=server.openai_url, api_key="default") as asking:
        answer = await asking.responses.create(model=str(tiny_model), input="hello")
        assert answer.output_text == "one"
        stream = await asking.responses.create(model=str(tiny_model), input="hello", stream=True)
        text = [e.delta async for e in stream if e.type == "response.output_text.delta"]
        assert "".join(text) == "one"


def test_a_call_can_be_required_and_limited_to_some_tools(create: Create, shared: Server) -> None:
    tools = [FLAT_LOOK, FLAT_WEATHER]
    answer = create(CALL, tools=tools, tool_choice={"type": "function", "name": "look"})
    assert [item.name for item in answer.output] == ["look"]
    assert shared.engine.requests[-1].sampling.constraint is not None
    plain = create("ok", tools=tools)
    some = {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "function", "name": "look"}],
    }
    limited = create("ok", tools=tools, tool_choice=some)
    assert limited.prompt_token_ids == create("ok", tools=[FLAT_LOOK]).prompt_token_ids
    assert len(limited.prompt_token_ids) < len(plain.prompt_token_ids)
    none = create("ok", tools=tools, tool_choice="none")
    assert none.prompt_token_ids == create("ok").prompt_token_ids


# ---- turns -----------------------------------------------------------------------------------


def continues(first: Any, second: Any) -> bool:
    before = [*first.prompt_token_ids, *first.token_ids]
    return second.prompt_token_ids[: len(before)] == before


@pytest.mark.parametrize("stream", [False, True])
def test_turns_by_items_and_by_previous_response_continue_the_same_ids(
    make_server: MakeServer, tiny_model: Path, tokenizer: Any, stream: bool
) -> None:
    called = [*ids(tokenizer, "See. "), *ids(tokenizer, TWO_CALLS), tokenizer.eos_token_id]
    server = make_server([called, spelt_out(tokenizer), spelt_out(tokenizer)])
    responses = in_rollout(server, "r")
    tools = [FLAT_LOOK, FLAT_WEATHER]

    def ask(**request: Any) -> Any:
        request = {"model": str(tiny_model), "instructions": "be brief", "tools": tools, **request}
        if not stream:
            return responses.create(**request)
        *_, last = responses.create(stream=True, **request)
        return last.response

    first = ask(input="one")
    outputs = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "cold"}
        for item in first.output
        if item.type == "function_call"
    ]
    by_items = ask(input=[{"role": "user", "content": "one"}, *first.output, *outputs])
    assert by_items.output_text == SAID
    assert continues(first, by_items)
    by_id = ask(input=outputs, previous_response_id=first.id)
    assert by_id.prompt_token_ids == by_items.prompt_token_ids
    assert by_id.previous_response_id == first.id
    third = ask(input="go on", previous_response_id=by_id.id)
    assert continues(by_id, third)
    calls = server.state.calls.rollout("r")
    made = [first, by_items, by_id, third]
    assert [call.id for call in calls] == [answer.call_id for answer in made]
    assert [call.call.completion_ids for call in calls] == [answer.token_ids for answer in made]
    assert [call.call.prompt_ids for call in calls] == [a.prompt_token_ids for a in made]
    assert [call.outcome for call in calls] == ["first", "bridged", "bridged", "bridged"]
    assert [len(m.get("tool_calls", ())) for m in calls[1].messages or ()] == [0, 0, 2, 0, 0]


def test_a_response_outlives_the_server(
    make_server: MakeServer, tiny_model: Path, tokenizer: Any
) -> None:
    server = make_server([spelt_out(tokenizer)])
    ask = {"model": str(tiny_model), "instructions": "be brief"}
    first = client(server).responses.create(input="one", metadata={"k": "v"}, **ask)
    server.stop()
    again = make_server([spelt_out(tokenizer)])
    responses = client(again).responses
    stored = responses.retrieve(first.id)
    assert stored.to_dict() == first.to_dict()
    second = responses.create(input="two", previous_response_id=first.id, **ask)
    text = tokenizer.decode(second.prompt_token_ids)
    assert text.count("be brief") == 1
    assert f"one<|im_end|>\n<|im_start|>assistant\n{SAID}<|im_end|>" in text
    # Instructions hold for one response.
    third = responses.create(model=str(tiny_model), input="two", previous_response_id=first.id)
    assert "be brief" not in tokenizer.decode(third.prompt_token_ids)


def test_parallel_calls_may_come_back_each_with_its_output(create: Create) -> None:
    tools = [FLAT_LOOK, FLAT_WEATHER]
    first = create(f"See. {TWO_CALLS}", tools=tools)
    message, *calls = first.output
    turns: list[Any] = [{"role": "user", "content": "hello"}, message]
    for call in calls:
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "cold"}
        turns += [call, output]
    assert continues(first, create("ok", input=turns, tools=tools))


def test_items_can_be_sent_back_as_references(
    create: Create, shared: Server, tokenizer: Any
) -> None:
    tools = [FLAT_LOOK, FLAT_WEATHER]
    first = create(f"See. {TWO_CALLS}", tools=tools)
    named = [{"type": "item_reference", "id": item.id} for item in first.output]
    outputs = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "cold"}
        for item in first.output[1:]
    ]
    question = {"role": "user", "content": "hello"}
    second = create("ok", input=[question, *named, *outputs], tools=tools)
    assert continues(first, second)
    spelt = create("ok", input=[question, *first.output, *outputs], tools=tools)
    assert spelt.prompt_token_ids == second.prompt_token_ids


def test_referenced_items_count_towards_the_size_limit(
    prose: Prose,
    create: Create,
    refused: Create,
    shared: Server,
    http: httpx.Client,
    tiny_model: Path,
) -> None:
    """A request of a few kilobytes can name a long item a thousand times."""
    first = create("the weather is cold " * 20)
    (item,) = first.output
    limit = 256 * shared.state.settings.max_seq_length
    often = [{"id": item.id}] * (limit // len(item.content[0].text) + 1)
    for request in ({"input": often}, {"input": often, "previous_response_id": first.id}):
        error = refused(**request)
        assert (error["param"], error["code"]) == ("input", "context_length_exceeded")
        prose(error["message"])  # and not their tokens
    body = {"model": str(tiny_model), "input": often}
    counted = http.post(f"{shared.inference_url}{PATH}/input_tokens", json=body)
    prose(counted.json()["error"]["message"])
    assert create("hello", input=[{"id": item.id}] * 2).output_text == "hello"


def test_the_tokens_of_a_prompt_are_counted(
    create: Create, responses: Any, shared: Server, tiny_model: Path
) -> None:
    first = create("ok", instructions="be brief", tools=[FLAT_LOOK])
    before = len(shared.state.calls.rollout(""))
    request = {"model": str(tiny_model), "instructions": "be brief", "tools": [FLAT_LOOK]}
    count = responses.input_tokens.count
    assert count(input="hello", **request).input_tokens == first.usage.input_tokens
    longer = count(input="go on", previous_response_id=first.id, **request).input_tokens
    assert len(shared.state.calls.rollout("")) == before
    second = create("ok", input="go on", previous_response_id=first.id, **request)
    assert longer == second.usage.input_tokens > first.usage.total_tokens


@pytest.mark.parametrize(
    "choice",
    [None, "auto", "none", {"type": "allowed_tools", "mode": "auto", "tools": [FLAT_LOOK]}],
)
def test_a_response_is_retrieved_as_it_was_returned(
    create: Create, responses: Any, choice: Any
) -> None:
    tools = [FLAT_LOOK, FLAT_WEATHER | {"strict": True}]
    answer = create(f"See. {CALL}", tools=tools, tool_choice=choice, metadata={"k": "v"})
    assert responses.retrieve(answer.id).to_dict() == answer.to_dict()


def test_the_input_items_of_a_response_are_listed_and_can_be_sent_again(
    create: Create, responses: Any
) -> None:
    look = {"instructions": "Be brief.", "tools": [FLAT_LOOK]}
    first = create(f"See. {CALL}", input="hello", **look)
    (_, call) = first.output
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "a coat"}
    second = create(CALL, input=[output], previous_response_id=first.id, **look)
    again = output | {"call_id": second.output[0].call_id}
    third = create("ok", input=[again], previous_response_id=second.id, **look)
    items = list(responses.input_items.list(third.id, order="asc"))
    assert kinds(items) == [
        *("message", "message", "function_call", "function_call_output"),
        *("function_call", "function_call_output"),
    ]
    assert items[0].content[0].to_dict() == {"type": "input_text", "text": "hello"}
    assert items[1].content[0].text == "See."
    assert [item.call_id for item in items[2:4]] == [call.call_id] * 2
    assert items[3].output == "a coat"
    assert len({item.id for item in items}) == 6
    # Newest first, in pages; the client fetches all of them.
    page = responses.input_items.list(third.id, limit=4)
    assert (page.has_more, len(page.data), page.data[0].id) == (True, 4, items[-1].id)
    assert [item.id for item in page] == [item.id for item in reversed(items)]
    # The items are that conversation, sent themselves or by their ids.
    references = [{"type": "item_reference", "id": item.id} for item in items]
    for sent in (items, references):
        assert create("ok", input=sent, **look).prompt_token_ids == third.prompt_token_ids


def test_pages_of_input_items_that_do_not_exist(
    prose: Prose, create: Create, shared: Server, responses: Any
) -> None:
    answer = create("ok")
    for wrong, param in (
        ({"after": "msg_nothing"}, "after"),
        ({"limit": 0}, "limit"),
        ({"limit": 101}, "limit"),
        ({"order": "random"}, "order"),
        ({"include": ["everything"]}, "include"),
    ):
        with pytest.raises(openai.BadRequestError) as error:
            responses.input_items.list(answer.id, **wrong)
        assert error.value.param == param
    with pytest.raises(openai.NotFoundError) as caught:
        responses.input_items.list("resp_nothing")
    prose(caught)
    with pytest.raises(openai.BadRequestError) as caught:
        create("ok", input=[{"type": "item_reference", "id": f"msg_{answer.id[5:]}in7"}])
    prose(caught, answer=answer.id[5:])


def test_responses_that_are_not_stored(
    prose: Prose, create: Create, shared: Server, responses: Any
) -> None:
    stored, unkept = create("ok"), create("ok", store=False)
    assert (stored.store, unkept.store) == (True, False)
    assert responses.retrieve(stored.id).output_text == "ok"
    with pytest.raises(openai.BadRequestError) as caught:
        responses.cancel(stored.id)
    prose(caught)
    responses.delete(stored.id)
    for gone in (stored.id, unkept.id, "resp_nothing", stored.call_id):
        with pytest.raises(openai.NotFoundError) as caught:
            responses.retrieve(gone)
        prose(caught)
        with pytest.raises(openai.NotFoundError) as error:
            create("ok", previous_response_id=gone)
        prose(error)
        assert error.value.param == "previous_response_id"
    # The calls themselves stay on record.
    assert len(shared.state.calls.get([stored.call_id, unkept.call_id])) == 2


def test_reasoning_is_returned_and_sent_back_as_items(
    prose: Prose, make_server: MakeServer, tmp_path: Path, tokenizer: Any
) -> None:
    tokenizer = build_tokenizer("qwen3")
    model = str(write_model(tmp_path / "thinking", tokenizer))
    thought = "<think>\nthe wind is cold\n</think>\n\nTake the coat."
    calling = "<think>\nthe wind is cold\n</think>\n\n" + CALL
    engine = ScriptedEngine([calling, thought, thought], tokenizer=tokenizer)
    server = make_server(engine=engine, allow_base_models=(model,))
    responses = client(server).responses
    tools = {"tools": [FLAT_LOOK], "include": ["reasoning.encrypted_content"]}
    first = responses.create(model=model, input="hello", **tools)
    assert responses.retrieve(first.id).to_dict() == first.to_dict()
    reasoning, call = first.output
    assert reasoning.content[0].text == "the wind is cold"
    assert call.type == "function_call"
    counted = first.usage.output_tokens_details.reasoning_tokens
    assert tokenizer.decode(first.token_ids[:counted]).endswith("the wind is cold")
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "cold"}
    question = {"role": "user", "content": "hello"}
    *_, last = responses.create(
        model=model, input=[question, *first.output, output], stream=True, **tools
    )
    assert continues(first, last.response)
    assert kinds(last.response.output) == ["reasoning", "message"]
    assert last.response.output_text == "Take the coat."
    # A client that keeps only what is encrypted.
    opaque = reasoning.to_dict() | {"content": []}
    third = responses.create(model=model, input=[question, opaque, call, output], **tools)
    assert third.prompt_token_ids == last.response.prompt_token_ids
    with pytest.raises(openai.BadRequestError) as caught:
        foreign = opaque | {"encrypted_content": "gAAAA-foreign"}
        responses.create(model=model, input=[question, foreign, call, output], **tools)
    prose(caught)
    events = list(responses.create(model=model, input="hello", stream=True))
    deltas = [e.delta for e in events if e.type == "response.reasoning_text.delta"]
    assert "".join(deltas) == "the wind is cold"
    assert "response.reasoning_text.done" in kinds(events)
    # The effort is the template's, where it has it.
    quiet = responses.create(model=model, input="hello", reasoning={"effort": "none"})
    assert "<think>\n\n</think>" in tokenizer.decode(quiet.prompt_token_ids)
    low = responses.create(model=model, input="hello", reasoning={"effort": "low"})
    assert (getattr(quiet, "not_applicable", None), low.not_applicable) == (
        None,
        ["reasoning.effort"],
    )
    assert responses.retrieve(low.id).to_dict() == low.to_dict()


def test_a_call_that_does_not_parse_comes_back_as_it_was(create: Create, responses: Any) -> None:
    broken = '<tool_call>\n{"name": "look", "arguments": {"word": }}\n</tool_call>'
    first = create(broken, tools=[FLAT_LOOK])
    (call,) = first.output
    assert (call.arguments, len(first.malformed)) == ('{"word": }', 1)
    assert responses.retrieve(first.id).to_dict() == first.to_dict()
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "no JSON"}
    question = {"role": "user", "content": "hello"}
    assert continues(first, create("ok", input=[question, call, output], tools=[FLAT_LOOK]))


async def test_an_llm_of_the_harness_may_call_this_api(shared: Server, tiny_model: Path) -> None:
    """With the arguments of a chat completion, and the same prompt."""
    called = {"name": "look", "arguments": '{"word": "x"}'}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "hello"}]},
        {"role": "assistant", "content": "See."}
        | {"tool_calls": [{"id": "c1", "type": "function", "function": called}]},
        {"role": "tool", "tool_call_id": "c1", "content": "a coat"},
    ]
    named = {"type": "function", "function": {"name": "look"}}
    arguments: Any = {"tools": [LOOK], "tool_choice": named, "max_tokens": 99, "seed": 3}
    completions: list[Any] = []
    for kind in ("chat_completion", "responses"):
        llm = LLM(base_url=f"{shared.inference_url}/v1", model=str(tiny_model), api_type=kind)
        shared.engine.says([CALL])
        completions.append(await llm.chat(messages, **arguments))
        await llm.close()
    chat, response = completions
    assert response.prompt_token_ids == chat.prompt_token_ids
    (ours,), (theirs,) = response.choices, chat.choices
    assert ours.message.tool_calls[0].function == theirs.message.tool_calls[0].function
    assert (ours.finish_reason, ours.token_ids) == ("tool_calls", theirs.token_ids)
    assert response.usage.completion_tokens == chat.usage.completion_tokens
    calls = shared.state.calls.get([theirs.call_id, ours.call_id])
    assert [call.request_fields is None for call in calls] == [True, False]
    assert shared.engine.requests[-1].sampling == shared.engine.requests[-2].sampling


# ---- what the harness sees -------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_the_harness_sees_what_the_server_recorded(
    shared: Server, create: Create, stream: bool
) -> None:
    rollout, recorder = recorded()
    output = {"type": "function_call_output", "call_id": "c1", "output": "cold"}
    items = [{"role": "user", "content": "hello"}, {"type": "function_call", **CALLED}, output]
    with rollout:
        answer = create(
            f"See. {TWO_CALLS}",
            input=items,
            instructions="be brief",
            tools=[FLAT_LOOK, FLAT_WEATHER],
            stream=stream,
        )
        for event in answer if stream else ():
            if event.type == "response.completed":
                break  # before the stream is closed
        if stream:
            answer.close()
    (seen,) = recorder.calls
    assert seen.id is not None
    (call,) = shared.state.calls.get([seen.id])
    assert (seen.error, seen.finish) == (None, "tool_calls")
    assert (seen.messages, seen.tools) == (call.messages, call.tools)
    assert seen.reply == call.reply
    assert seen.choices[0]["token_ids"] == call.call.completion_ids
    assert seen.policy_step == 0
    counted = {"prompt_tokens": len(call.call.prompt_ids)}
    counted["completion_tokens"] = len(call.call.completion_ids)
    assert seen.usage == counted | {"total_tokens": sum(counted.values())}
    assert seen.parameters == {"stream": stream} or not stream


def test_the_harness_sees_the_received_part_of_a_stream(
    shared: Server, create: Create, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared.engine, "delay_s", 0.01)
    rollout, recorder = recorded()
    with rollout:
        stream = create(LONG, stream=True)
        event = next(event for event in stream if event.type == "response.output_text.delta")
        stream.close()
    (seen,) = recorder.calls
    assert seen.error == "the client left the stream before its end" and seen.finish is None
    assert seen.reply is not None and seen.reply["content"] == event.delta
    wait_for(lambda: shared.engine.running == 0, "it is still answered")


@pytest.mark.parametrize("stream", [False, True])
def test_the_harness_sees_the_whole_prompt_of_a_request_that_names_earlier_items(
    shared: Server, create: Create, stream: bool
) -> None:
    tools = [FLAT_LOOK, FLAT_WEATHER]

    def turn(text: str, **request: Any) -> Any:
        answer = create(text, stream=stream, tools=tools, **request)
        return list(answer)[-1].response if stream else answer

    rollout, recorder = recorded()
    with rollout:
        first = turn(f"See. {TWO_CALLS}", instructions="be brief")
        outputs = [
            {"type": "function_call_output", "call_id": item.call_id, "output": "cold"}
            for item in first.output
            if item.type == "function_call"
        ]
        new = {"instructions": "be long", "previous_response_id": first.id}
        second = turn("ok", input=outputs, **new)
        turn("ok", input="go on", previous_response_id=second.id)
        named = {"type": "item_reference", "id": second.output[0].id}
        turn("ok", input=[named, {"role": "user", "content": "go on"}])
    assert [len(seen.messages or ()) for seen in recorder.calls] == [2, 5, 6, 2]
    for seen in recorder.calls:
        assert seen.id is not None
        (call,) = shared.state.calls.get([seen.id])
        assert seen.messages == call.messages
        assert "previous_response_id" not in seen.parameters
    assert not recorder.is_incomplete


async def test_a_response_from_outside_the_rollout_is_read_from_the_records(
    shared: Server, create: Create
) -> None:
    first = create("ok", input="one")

    def agent(text: str) -> str:
        return create("ok", input=text, previous_response_id=first.id).output_text

    async def read_calls(rollout: str) -> list[RecordedCall]:
        return shared.state.calls.rollout(rollout)

    workflow = Function.of("<workflow>", agent)
    (unknown,) = (await run_rollout(workflow, "two")).calls
    assert unknown.error is None and unknown.messages is None
    (known,) = (await run_rollout(workflow, "two", recorded_calls=read_calls)).calls
    assert [m["content"] for m in known.messages or ()] == ["one", "ok", "two"]


# ---- refusals --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "param", "words"),
    [
        ({"input": None}, "input", "missing"),
        ({"input": []}, "input", "at least one item"),
        ({"input": [7]}, "input", "input[0]: expected an object, got 7"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input", "input[0].role"),
        ({"input": [{"role": "user"}]}, "input", "input[0].content"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input",
            "reads text only",
        ),
        (
            {"input": [{"type": "function_call", "name": "f", "arguments": "[]", "call_id": "c"}]},
            "input",
            "input[0].arguments",
        ),
        (
            {"input": [{"type": "function_call_output", "output": "x"}]},
            "input",
            "input[0].call_id",
        ),
        ({"input": [{"type": "web_search_call", "id": "x"}]}, "input", "'web_search_call' is not"),
        ({"input": [{"type": "item_reference", "id": "msg_x"}]}, "input", "no item is stored"),
        ({"input": [{"type": "item_reference"}]}, "input", "input[0].id"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]", "'web_search' is not in this version"),
        ({"tools": [{"type": "file_search", "vector_store_ids": []}]}, "tools[0]", "'file_search'"),
        ({"tools": [LOOK]}, "tools[0].function", "not in this version"),
        ({"tools": [{"type": "function"}]}, "tools[0].name", "the name of a function"),
        ({"tool_choice": {"type": "web_search_preview"}}, "tool_choice", "not in this version"),
        ({"tool_choice": "required"}, "tools", "no tools are offered"),
        ({"truncation": "auto"}, "truncation", "'disabled'"),
        ({"background": True}, "background", "not in this version"),
        ({"conversation": "conv_1"}, "conversation", "previous_response_id"),
        ({"n": 2}, "n", "send several requests"),
        ({"max_tokens": 5}, "max_tokens", "max_output_tokens"),
        ({"max_completion_tokens": 5}, "max_completion_tokens", "max_output_tokens"),
        ({"messages": []}, "messages", "messages: not in this version; send them as input"),
        ({"max_output_tokens": 0}, "max_output_tokens", "greater than or equal to 1"),
        ({"max_output_tokens": 10**9}, "input", "shorten the prompt"),
        ({"temperature": -1}, "temperature", "greater than or equal to 0"),
        ({"include": ["everything"]}, "include", "cannot be included"),
        ({"text": {"format": {"type": "xml"}}}, "text.format", "text.format"),
        (
            {"text": {"format": {"type": "json_schema", "name": "x"}}},
            "text.format.schema",
            "schema",
        ),
        ({"text": {"shape": 1}}, "text.shape", "text.format"),
        ({"reasoning": {"effort": 3}}, "reasoning", "effort"),
        ({"instruction": "x"}, "instruction", "Did you mean 'instructions'?"),
        ({"chat_template_kwargs": 1}, "chat_template_kwargs", "dictionary"),
        ({"metadata": {"a": 1}}, "metadata.a", "string"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "include_obfuscation"),
    ],
)
def test_unsupported_keys_are_refused_by_name(
    refused: Create, request_: dict[str, Any], param: str, words: str
) -> None:
    error = refused(**request_)
    assert error["param"] == param
    assert words in error["message"]


def test_keys_with_neutral_values_are_accepted(create: Create) -> None:
    plain = create("ok")
    other = create(
        "ok",
        background=False,
        truncation="disabled",
        user="me",
        service_tier="auto",
        max_tool_calls=3,
        prompt_cache_key="k",
        stream_options=None,
        tools=[],
        tool_choice="auto",
        text={"format": {"type": "text"}, "verbosity": "low"},
        reasoning={"effort": None},
        include=["file_search_call.results"],
    )
    assert other.prompt_token_ids == plain.prompt_token_ids
    assert {*other.not_applicable} == {
        *("user", "service_tier", "max_tool_calls", "prompt_cache_key", "text.verbosity")
    }


def test_a_key_opens_the_responses_api(make_server: MakeServer, tiny_model: Path) -> None:
    from hone.server.http.auth import inference_key

    server = make_server(["ok"], api_key="k")
    body = {"model": str(tiny_model), "input": "hello"}
    url = server.control_url + PATH
    assert httpx.post(url, json=body).json()["error"]["code"] == "invalid_api_key"
    key = {"Authorization": f"Bearer {inference_key(server.state.settings)}"}
    made = httpx.post(url, json=body, headers=key)
    assert made.status_code == 200
    assert httpx.get(f"{url}/{made.json()['id']}", headers=key).json()["status"] == "completed"


# ---- failures --------------------------------------------------------------------------------


def test_a_failure_in_mid_stream_is_an_event(make_server: MakeServer, tiny_model: Path) -> None:
    server = make_server(["the weather is cold"])
    server.engine.failing = ZeroDivisionError("broken")
    with client(server) as asking:
        *_, last = asking.responses.create(model=str(tiny_model), input="x", stream=True)
        assert last.type == "response.failed"
        assert (last.response.status, last.response.error.code) == ("failed", "server_error")
        with pytest.raises(openai.NotFoundError):
            asking.responses.retrieve(last.response.id)
    assert server.state.calls.rollout("")[0].abandoned


def test_a_client_that_leaves_in_mid_stream(make_server: MakeServer, tiny_model: Path) -> None:
    server = make_server([LONG])
    server.engine.delay_s = 0.01
    responses = in_rollout(server, "r")
    with responses.create(model=str(tiny_model), input="x", stream=True) as stream:
        begun = next(stream)
    wait_for(lambda: server.engine.aborted == 1, "it was not aborted")
    wait_for(lambda: bool(server.state.calls.rollout("r")), "it is lost")
    (call,) = server.state.calls.rollout("r")
    assert call.abandoned
    with pytest.raises(openai.NotFoundError):
        responses.create(model=str(tiny_model), input="y", previous_response_id=begun.response.id)
