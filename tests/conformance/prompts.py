"""The prompt that a chat template makes of a request of any dialect, worked out without hone.

In:   an exchange that the witness saw, a tokenizer of transformers
Out:  the text of the prompt
"""

import json
from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import Any

from tests.conformance.witness import Exchange

Messages = list[dict[str, Any]]


def rendered(tokenizer: Any, exchange: Exchange, others: Sequence[Exchange] = ()) -> str:
    """The request as the prompt of its model; it may name the response of one of the others."""
    request = deepcopy(exchange.request)
    if exchange.path.endswith("/chat/completions"):
        messages, tools = request["messages"], request.get("tools")
    elif exchange.path.endswith("/responses"):
        messages, tools = list(_of_responses(request, others)), _tools(request, "parameters")
    else:
        assert exchange.path.endswith("/v1/messages"), exchange.path
        messages, tools = list(_of_messages(request)), _tools(request, "input_schema")
    for message in messages:
        message["content"] = _text(message.get("content"))
        for call in message.get("tool_calls") or ():
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return tokenizer.apply_chat_template(
        messages, tools=tools, tokenize=False, add_generation_prompt=True
    )


def _text(content: Any) -> str:
    """The text of a message, whose content may be a list of parts."""
    if isinstance(content, list):
        return "".join(part["text"] for part in content)
    return content or ""


def _tools(request: dict[str, Any], schema: str) -> Messages:
    """Their keys in the order of the request, which the template keeps."""
    names = {"name": "name", "description": "description", schema: "parameters", "strict": "strict"}
    return [
        {
            "type": "function",
            "function": {names[key]: tool[key] for key in tool if key in names and tool[key]},
        }
        for tool in request["tools"]
    ]


def _call(id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _items(request: dict[str, Any], others: Sequence[Exchange]) -> list[Any]:
    """The items of a request, those of the responses that it continues included."""
    items = request["input"]
    items = [{"role": "user", "content": items}] if isinstance(items, str) else items
    if (previous := request.get("previous_response_id")) is None:
        return items
    for other in others:
        response = other.events[-1].get("response", other.events[-1])
        if response["id"] == previous:
            return [*_items(other.request, others), *response["output"], *items]
    raise AssertionError(f"{previous} is none of the responses")


def _of_responses(request: dict[str, Any], others: Sequence[Exchange]) -> Iterator[dict[str, Any]]:
    if request.get("instructions"):
        yield {"role": "system", "content": request["instructions"]}
    turn: dict[str, Any] | None = None  # of the assistant: its text and its calls are items
    for item in _items(request, others):
        kind = item.get("type", "message")
        if kind == "function_call":
            turn = turn or {"role": "assistant", "content": ""}
            call = _call(item["call_id"], item["name"], item["arguments"])
            turn.setdefault("tool_calls", []).append(call)
            continue
        if turn:
            yield turn
            turn = None
        if kind == "function_call_output":
            yield {"role": "tool", "content": item["output"]}
        elif item["role"] == "assistant":
            turn = {"role": "assistant", "content": _text(item["content"])}
        else:
            yield {"role": item["role"], "content": _text(item["content"])}
    if turn:
        yield turn


def _of_messages(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield {"role": "system", "content": _text(request["system"])}
    for message in request["messages"]:
        blocks = message["content"]
        if isinstance(blocks, str):
            yield message
            continue
        results = [block for block in blocks if block["type"] == "tool_result"]
        for block in results:
            yield {"role": "tool", "content": _text(block["content"])}
        if results:
            continue
        uses = [block for block in blocks if block["type"] == "tool_use"]
        yield {
            "role": message["role"],
            "content": [block for block in blocks if block["type"] == "text"],
            "tool_calls": [_call(b["id"], b["name"], json.dumps(b["input"])) for b in uses],
        }
