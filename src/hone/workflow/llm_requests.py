"""Requests of an LLM: parameters as arguments of OpenAI's client, the Responses API, a probe.

In:   parameters of a request, OpenAI's or the server's own
Out:  arguments of `chat.completions.create`; a chat completion from /v1/responses
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from hone.capture.scope import not_captured
from hone.errors import AgentCrashed, ConfigError
from hone.model import CONNECT_S
from hone.wire.openai.response_client import read_response, response_request

if TYPE_CHECKING:
    from openai import AsyncOpenAI
    from openai.types.chat import ChatCompletion

_OPTIONS = ("extra_headers", "extra_query", "timeout")
"""Arguments of a request that are not part of its body."""
_NOT_PARAMETERS = ("self", "messages", "model", "extra_body", *_OPTIONS)


def request_names() -> frozenset[str]:
    """The parameters of a chat completion that OpenAI's client knows."""
    import inspect

    from openai.resources.chat.completions import AsyncCompletions

    known = inspect.signature(AsyncCompletions.create).parameters
    return frozenset(known) - set(_NOT_PARAMETERS)


def as_arguments(params: dict[str, Any]) -> dict[str, Any]:
    """Arguments for OpenAI's client; unknown keys go into `extra_body`, which the client sends."""
    known = {*request_names(), *_NOT_PARAMETERS}
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
    extra = arguments.get("extra_body") or {}
    plain = [_text_message(message, place) for place, message in enumerate(messages)]
    try:
        body = response_request({**chat, **extra, "messages": plain})
    except KeyError as error:
        raise ConfigError(
            f"llm.chat: a message or a tool has no {error}; write them as for a chat completion"
        ) from None
    model, items = body.pop("model"), body.pop("input")
    response = await client.responses.create(model=model, input=items, extra_body=body, **options)
    if response.status in ("failed", "cancelled"):
        why = response.error.message if response.error is not None else "no reason given"
        raise AgentCrashed(
            f"POST {str(client.base_url).rstrip('/')}/responses: the response is "
            f"{response.status}: {why}",
            reason="server_error",
            is_outside=True,
        )
    head = {"object": "chat.completion", "created": int(response.created_at), "model": model}
    return ChatCompletion.construct(**head, **read_response(response.to_dict()))


def _text_message(message: Any, place: int) -> dict[str, Any]:
    """A message of a chat as a dict, with its text parts joined; other parts are refused."""
    plain = message.model_dump(exclude_none=True) if isinstance(message, BaseModel) else message
    if not isinstance(plain, Mapping):
        kind = type(message).__name__
        raise ConfigError(f"llm.chat: messages[{place}] is a {kind}; write a dict with a role")
    content = plain.get("content")
    if content is None or isinstance(content, str):
        return dict(plain)
    texts = []
    for part in content if isinstance(content, list) else [content]:
        text = part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise ConfigError(
                f"llm.chat: messages[{place}] has a part of type {kind!r}, and with api_type "
                "'responses' hone sends text only; use llm.client.responses.create"
            )
        texts.append(text)
    return {**plain, "content": "\n".join(texts)}


async def is_hone_server(client: "AsyncOpenAI") -> bool | None:
    """Whether a hone server answers at the client's address; None if nothing answers now."""
    import openai

    root = str(client.base_url).rstrip("/").removesuffix("/v1")
    probe = client.with_options(base_url=root, max_retries=0, timeout=CONNECT_S)
    try:
        with not_captured():
            about = await probe.get("/", cast_to=object)
    except openai.APIStatusError as error:
        return None if error.status_code >= 500 else False
    except openai.APIConnectionError:
        return None
    return isinstance(about, dict) and about.get("name") == "hone"


async def check_step(client: "AsyncOpenAI", model: str) -> None:
    """Refuse NAME@STEP if the hone server has NAME but not that step.

    Other servers, and servers that cannot be reached, are not checked.
    """
    stem, at, step = model.rpartition("@")
    if not at:
        return
    import openai

    try:
        probe = client.with_options(max_retries=0, timeout=CONNECT_S)
        known = [served.id for served in (await probe.models.list()).data]
    except openai.OpenAIError:
        return
    # A server leaves the project out of names that are in use only once.
    stems = [name for name in (stem, stem.partition("/")[2]) if f"{name}@0" in known]
    if stems and f"{stems[0]}@{step}" not in known:
        steps = [name.rpartition("@")[2] for name in known if name.startswith(f"{stems[0]}@")]
        why = ""
        if step == "best":
            why = "; there is a best step once a run has validated on held-out examples"
        url = str(client.base_url).rstrip("/")
        raise ConfigError(
            f"model_name is {model!r}, and {url} has no such step; it has "
            f"{', '.join(f'@{one}' for one in steps)}{why}"
        )
