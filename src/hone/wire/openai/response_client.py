"""Convert between chat completions and the Responses API of any server.

In:   a request for a chat completion; requests and responses that passed over the wire
Out:  the body of /v1/responses; messages, and the shape of a chat completion

Reading never raises because of what a server or a client sent: what a chat cannot represent is left
out or left unchanged.
"""

from collections.abc import Mapping
from typing import Any

from hone.errors import BadRequest
from hone.wire.openai.chat import assistant_message, tool_call
from hone.wire.openai.response_items import ItemIds, input_items, read_input
from hone.wire.openai.responses import LOGPROBS, chat_tool, response_tool

_RENAMED = {"max_tokens": "max_output_tokens", "max_completion_tokens": "max_output_tokens"}


def response_request(chat: Mapping[str, Any]) -> dict[str, Any]:
    """A request for a chat completion, as one of the Responses API.

    Keys of both APIs, and keys of hone or vLLM only, are unchanged. Items have no ids, because the
    server does not know ids of another server.
    """
    body = {_RENAMED.get(key, key): value for key, value in chat.items() if value is not None}
    items = input_items(body.pop("messages"), ItemIds(""))
    body["input"] = [{k: v for k, v in item.items() if k not in ("id", "status")} for item in items]
    if tools := body.get("tools"):
        body["tools"] = [response_tool(tool) for tool in tools]
    match body.get("tool_choice"):
        case {"function": {**function}}:
            body["tool_choice"] = {"type": "function", **function}
    if (form := body.pop("response_format", None)) is not None:
        body["text"] = {"format": {"type": form["type"], **form.get("json_schema", {})}}
    if body.pop("logprobs", False):
        body["include"] = [LOGPROBS]
    if (effort := body.pop("reasoning_effort", None)) is not None:
        body["reasoning"] = {"effort": effort}
    return body


def read_messages(
    sent: str | list[Any], items: Mapping[str, dict[str, Any] | None]
) -> list[dict[str, Any]]:
    """The messages of an `input` to any server; items without a chat equivalent are unchanged.

    `items` are those that an item_reference may name, by id.
    """
    try:
        return read_input(sent, items)
    except BadRequest:
        assert isinstance(sent, list), "a text is a message"
        return sent


def read_response(response: Mapping[str, Any]) -> dict[str, Any]:
    """A response of any server in the shape of a chat completion."""
    output = response.get("output")
    message = _read_output(output if isinstance(output, list) else [])
    cut = (response.get("incomplete_details") or {}).get("reason") == "max_output_tokens"
    finish = "length" if cut else "tool_calls" if "tool_calls" in message else "stop"
    if response.get("status") == "in_progress":  # a stream that was cut off
        finish = None
    used = response.get("usage") or {}
    names = {"input_tokens": "prompt_tokens", "output_tokens": "completion_tokens"}
    recorded = ("token_ids", "call_id", "policy_step")
    return {
        "id": response.get("id"),
        "choices": [
            {"index": 0, "message": message, "finish_reason": finish}
            | {key: response[key] for key in recorded if key in response}
        ],
        "usage": {names.get(key, key): value for key, value in used.items()},
        **{k: response[k] for k in ("prompt_token_ids", "policy_step") if k in response},
    }


def _read_output(output: list[Any]) -> dict[str, Any]:
    """The assistant message, as far as a chat message can represent it."""
    items = [item for item in output if isinstance(item, dict)]
    texts = [text_of(item, "content") for item in items if item.get("type") == "message"]
    thoughts = [
        text_of(item, "content") or text_of(item, "summary")
        for item in items
        if item.get("type") == "reasoning"
    ]
    calls = [
        tool_call(item.get("call_id"), item.get("name"), item.get("arguments"))
        for item in items
        if item.get("type") == "function_call"
    ]
    return assistant_message("".join(texts), calls, thoughts)


def text_of(item: Mapping[str, Any], key: str) -> str:
    """The text of the parts of an item."""
    parts = item.get(key)
    parts = parts if isinstance(parts, list) else []
    return "".join(str(part.get("text") or "") for part in parts if isinstance(part, dict))


def read_tools(body: Mapping[str, Any]) -> list[Any] | None:
    """The tools of a request as those of a chat completion."""
    tools = body.get("tools")
    if not isinstance(tools, list):
        return None
    try:
        return [chat_tool(tool, "tools") for tool in tools]
    except BadRequest:
        return tools
