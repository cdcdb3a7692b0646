"""Requests of `llm.chat`: parameters as arguments of OpenAI's client, and the Responses API.

In:   parameters of a request, OpenAI's or the server's own
Out:  arguments of `chat.completions.create`; a chat completion from /v1/responses
"""

from typing import TYPE_CHECKING, Any

from hone.errors import ConfigError
from hone.wire.openai_response_reader import read_response
from hone.wire.openai_response_request import response_request

if TYPE_CHECKING:
    from openai import AsyncOpenAI
    from openai.types.chat import ChatCompletion

_OPTIONS = ("extra_headers", "extra_query", "timeout")
"""Arguments of a request that are no part of its body."""


def as_arguments(params: dict[str, Any]) -> dict[str, Any]:
    """Keys that OpenAI does not know go into `extra_body`, which its client passes on."""
    import inspect

    from openai.resources.chat.completions import AsyncCompletions

    known = set(inspect.signature(AsyncCompletions.create).parameters)
    extra = {key: value for key, value in params.items() if key not in known}
    arguments = {key: value for key, value in params.items() if key in known}
    if extra:
        arguments["extra_body"] = {**extra, **arguments.get("extra_body", {})}
    return arguments


async def respond(
    client: "AsyncOpenAI", messages: list[Any], arguments: dict[str, Any]
) -> "ChatCompletion":
    """A chat completion with these arguments of `chat.completions.create`, from /v1/responses."""
    from openai.types.chat import ChatCompletion

    if arguments.get("stream"):
        raise ConfigError(
            "llm.chat(stream=True) has no meaning with api_type 'responses'; use "
            "llm.client.responses.create(stream=True)"
        )
    options = {key: value for key, value in arguments.items() if key in _OPTIONS}
    chat = {key: value for key, value in arguments.items() if key not in (*_OPTIONS, "extra_body")}
    body = response_request({**chat, **arguments.get("extra_body", {}), "messages": messages})
    model, items = body.pop("model"), body.pop("input")
    response = await client.responses.create(model=model, input=items, extra_body=body, **options)
    head = {"object": "chat.completion", "created": int(response.created_at), "model": model}
    return ChatCompletion.construct(**head, **read_response(response.to_dict()))
