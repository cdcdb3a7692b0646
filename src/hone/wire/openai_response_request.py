"""A request for a chat completion, as one of the Responses API.

In:   the body of /v1/chat/completions
Out:  the body of /v1/responses, for hone's server and for others

Keys that both APIs have, and keys that only a server of hone or of vLLM has, stay as they are.
"""

from collections.abc import Mapping
from typing import Any

from hone.wire.openai_response_items import ItemIds, input_items
from hone.wire.openai_responses import LOGPROBS, response_tool

_RENAMED = {"max_tokens": "max_output_tokens", "max_completion_tokens": "max_output_tokens"}


def response_request(chat: Mapping[str, Any]) -> dict[str, Any]:
    """Items have no ids: those of another server's would mean nothing to it."""
    body = {_RENAMED.get(key, key): value for key, value in chat.items() if value is not None}
    items = input_items(body.pop("messages"), ItemIds(""))
    body["input"] = [{k: v for k, v in item.items() if k not in ("id", "status")} for item in items]
    if tools := body.get("tools"):
        body["tools"] = [response_tool(tool) for tool in tools]
    choice = body.get("tool_choice")
    if isinstance(choice, Mapping) and isinstance(choice.get("function"), Mapping):
        body["tool_choice"] = {"type": "function", **choice["function"]}
    if (form := body.pop("response_format", None)) is not None:
        body["text"] = {"format": {"type": form["type"], **form.get("json_schema", {})}}
    if body.pop("logprobs", False):
        body["include"] = [LOGPROBS]
    if (effort := body.pop("reasoning_effort", None)) is not None:
        body["reasoning"] = {"effort": effort}
    return body
