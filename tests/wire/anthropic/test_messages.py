"""Bodies of Anthropic's clients as chat requests: what is honoured, refused by name, or ignored."""

import json
from typing import Any

import pytest
from tests.prose import Prose

from hone.errors import BadRequest
from hone.wire.anthropic.blocks import BILLING
from hone.wire.anthropic.messages import IGNORED, CountRequest, MessagesRequest

ASK: dict[str, Any] = {
    "model": "m",
    "max_tokens": 9,
    "messages": [{"role": "user", "content": "hello"}],
}
PNG = {"type": "base64", "media_type": "image/png", "data": "aGk="}


def chat(**fields: Any) -> Any:
    return MessagesRequest.parse({**ASK, **fields}).chat


def messages(*sent: tuple[str, Any], **fields: Any) -> list[dict[str, Any]]:
    return chat(
        messages=[{"role": role, "content": text} for role, text in sent], **fields
    ).messages


def refused(**fields: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        MessagesRequest.parse({**ASK, **fields})
    assert str(caught.value).startswith(f"{caught.value.param}:")
    return caught.value


def text(*lines: str) -> list[dict[str, Any]]:
    return [
        {"type": "text", "text": line, "cache_control": {"type": "ephemeral"}} for line in lines
    ]


def use(id: str, name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": id, "name": name, "input": arguments, "caller": None}


def result(id: str, content: Any = None, **more: Any) -> dict[str, Any]:
    sent = {"type": "tool_result", "tool_use_id": id, **more}
    return sent if content is None else sent | {"content": content}


# ---- messages ----------------------------------------------------------------------------------


def test_blocks_of_text_mean_the_same_as_text():
    plain = messages(("user", "one\ntwo"), ("assistant", "three"), ("user", "four"), system="s\nt")
    assert plain == [
        {"role": "system", "content": "s\nt"},
        {"role": "user", "content": "one\ntwo"},
        {"role": "assistant", "content": "three"},
        {"role": "user", "content": "four"},
    ]
    blocks = messages(
        ("user", text("one", "two")),
        ("assistant", text("three")),
        ("user", text("four")),
        system=text("s", "t"),
    )
    assert blocks == plain


def test_two_parallel_calls_and_their_results_keep_ids_and_order():
    calls = [use("b", "look", word="caf\u00e9"), use("a", "weather")]
    answers = [result("a", text("cold", "wet")), result("b", "a place"), *text("Well?", "Say.")]
    assert messages(("user", "hi"), ("assistant", [*text("I "), *calls]), ("user", answers)) == [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": "I ",
            "tool_calls": [
                {
                    "id": "b",
                    "type": "function",
                    "function": {"name": "look", "arguments": '{"word": "caf\u00e9"}'},
                },
                {"id": "a", "type": "function", "function": {"name": "weather", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "a", "content": "cold\nwet"},
        {"role": "tool", "tool_call_id": "b", "content": "a place"},
        {"role": "user", "content": "Well?\nSay."},
    ]


@pytest.mark.parametrize(
    ("block", "content"),
    [
        (result("a"), ""),
        (result("a", "no such file", is_error=True), "Error: no such file"),
        (result("a", "Error 404", is_error=True), "Error 404"),
        (result("a", is_error=True), "Error"),
        (result("a", "fine", is_error=False), "fine"),
    ],
)
def test_a_failed_tool_says_so_in_its_text(block: dict[str, Any], content: str):
    *_, last = messages(("user", "?"), ("assistant", [use("a", "f")]), ("user", [block]))
    assert last == {"role": "tool", "tool_call_id": "a", "content": content}


def test_thinking_becomes_reasoning_and_what_is_redacted_is_left_out():
    blocks = [
        {"type": "thinking", "thinking": "hm", "signature": "x"},
        {"type": "redacted_thinking", "data": "secret"},
        *text("yes"),
    ]
    _, answer, _ = messages(("user", "?"), ("assistant", blocks), ("user", "!"))
    assert answer == {"role": "assistant", "content": "yes", "reasoning_content": "hm"}
    omitted = [{"type": "thinking", "thinking": "", "signature": "x"}, *text("yes")]
    _, answer, _ = messages(("user", "?"), ("assistant", omitted), ("user", "!"))
    assert answer == {"role": "assistant", "content": "yes"}


def test_consecutive_messages_of_one_role_are_one_turn():
    assert messages(
        ("user", "one"),
        ("user", "two"),
        ("assistant", text("a")),
        ("assistant", [use("x", "f")]),
        ("user", [result("x", "1")]),
        ("user", "three"),
        ("system", "be brief"),
        ("user", "four"),
    ) == [
        {"role": "user", "content": "one\ntwo"},
        {
            "role": "assistant",
            "content": "a",
            "tool_calls": [
                {"id": "x", "type": "function", "function": {"name": "f", "arguments": "{}"}}
            ],
        },
        {"role": "tool", "tool_call_id": "x", "content": "1"},
        {"role": "user", "content": "three"},
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "four"},
    ]


def test_the_billing_block_of_claude_code_is_no_instruction():
    system = text(f"{BILLING} cc_version=2.1; cch=4f2a1;", "You are an agent.")
    assert messages(("user", "hi"), system=system)[0]["content"] == "You are an agent."
    (only,) = messages(("user", "hi"), system=system[:1])
    assert only["role"] == "user"


# ---- parameters --------------------------------------------------------------------------------


def test_parameters_of_the_chat_request():
    request = chat(stop_sequences=["\n"], temperature=0.5, top_p=0.9, top_k=5, stream=True)
    assert (request.limit, request.stop, request.stream) == (9, ["\n"], True)
    assert (request.temperature, request.top_p, request.top_k) == (0.5, 0.9, 5)
    assert request.tools is None and request.chat_template_kwargs is None


def test_tools_have_the_shape_and_order_of_chat_tools():
    schema = {"type": "object", "properties": {"word": {"type": "string"}}}
    look = {"name": "look", "description": "Look up", "input_schema": schema}
    plain = {"type": "custom", "name": "go", "input_schema": {}, "cache_control": {"type": "e"}}
    tools = chat(tools=[look, plain, {**plain, "strict": True}]).tools
    assert json.dumps(tools[0]) == json.dumps(
        {
            "type": "function",
            "function": {"name": "look", "description": "Look up", "parameters": schema},
        }
    )
    assert tools[1]["function"] == {"name": "go", "parameters": {}}
    assert tools[2]["function"] == {"name": "go", "parameters": {}, "strict": True}


NAMED = {"type": "function", "function": {"name": "go"}}


@pytest.mark.parametrize(
    ("choice", "expected", "parallel"),
    [
        ({"type": "auto"}, "auto", None),
        ({"type": "any"}, "required", None),
        ({"type": "none"}, "none", None),
        ({"type": "tool", "name": "go"}, NAMED, None),
        ({"type": "auto", "disable_parallel_tool_use": True}, "auto", False),
        ({"type": "any", "disable_parallel_tool_use": False}, "required", True),
    ],
)
def test_tool_choice(choice: dict[str, Any], expected: Any, parallel: bool | None):
    request = chat(tools=[{"name": "go", "input_schema": {}}], tool_choice=choice)
    assert (request.tool_choice, request.parallel_tool_calls) == (expected, parallel)


@pytest.mark.parametrize(
    ("thinking", "expected"),
    [
        ({"type": "enabled", "budget_tokens": 1024}, True),
        ({"type": "adaptive", "display": "omitted"}, True),
        ({"type": "disabled"}, False),
    ],
)
def test_thinking_is_an_argument_of_the_template(thinking: dict[str, Any], expected: bool):
    assert chat(thinking=thinking).chat_template_kwargs == {"enable_thinking": expected}


def test_a_schema_for_the_answer_is_a_response_format():
    form = {"type": "json_schema", "schema": {"type": "object"}}
    expected = {"name": "output", "schema": {"type": "object"}}
    for place in ({"output_config": {"format": form}}, {"output_format": form}):
        request = chat(**place)
        assert request.response_format == {"type": "json_schema", "json_schema": expected}
    assert refused(output_format={**form, "schema": 3}).param == "output_format.schema"


def test_keys_that_change_nothing_are_accepted():
    assert chat(**dict.fromkeys(IGNORED, "anything"), output_config={"effort": "low"}) == chat()
    assert chat(temperature=None, system=None, tools=None) == chat()


# ---- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "9"}, "max_tokens"),
        ({"top_k": 2**63}, "top_k"),
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"model": None}, "model"),
        ({"temperature": float("nan")}, "temperature"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"stop_sequence": ["x"]}, "stop_sequence"),
        ({"prompt": "x"}, "prompt"),
        ({"mcp_servers": []}, "mcp_servers"),
        ({"container": "x"}, "container"),
        ({"thinking": {"type": "on"}}, "thinking.type"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            "tools[0]",
        ),
        ({"system": 3}, "system"),
        ({"system": [{"type": "image", "source": PNG}]}, "system[0]"),
    ],
)
def test_a_wrong_key_is_named(prose: Prose, fields: dict[str, Any], param: str):
    error = refused(**fields)
    assert error.param == param
    prose(str(error))


@pytest.mark.parametrize(
    ("sent", "param"),
    [
        ("hello", "messages[0]"),
        ({"role": "tool", "content": "x"}, "messages[0]"),
        ({"role": {}, "content": "x"}, "messages[0]"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": []}, "messages[0].content"),
        ({"role": "user", "content": ["x"]}, "messages[0].content[0]"),
        (
            {"role": "user", "content": [{"type": "image", "source": PNG}]},
            "messages[0].content[0]",
        ),
        (
            {"role": "user", "content": [{"type": "document", "source": PNG}]},
            "messages[0].content[0]",
        ),
        (
            {"role": "user", "content": [result("a", [{"type": "image", "source": PNG}])]},
            "messages[0].content[0].content[0]",
        ),
        (
            {"role": "user", "content": [use("a", "f")]},
            "messages[0].content[0]",
        ),
        (
            {"role": "user", "content": [{"type": "text", "text": 3}]},
            "messages[0].content[0].text",
        ),
        (
            {"role": "user", "content": [{"type": "tool_result"}]},
            "messages[0].content[0].tool_use_id",
        ),
        (
            {"role": "assistant", "content": [{**use("a", "f"), "input": "{}"}]},
            "messages[0].content[0].input",
        ),
        ({"role": "assistant", "content": "The answer is ("}, "messages"),
    ],
)
def test_a_wrong_message_is_named(prose: Prose, sent: Any, param: str):
    error = refused(messages=[sent])
    assert error.param == param
    prose(str(error))


def test_counting_needs_no_max_tokens():
    body = {"model": "m", "messages": ASK["messages"]}
    assert CountRequest.parse(body).chat.limit is None
