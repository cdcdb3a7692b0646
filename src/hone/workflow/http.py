"""`_type: http`: a running service as the workflow, one request per rollout.

In:   `url`, and where the rollout's address goes: headers, or placeholders in `body`
Out:  a FunctionInfo that sends the input and returns the response, or a part of it by JSONPath

The service makes its model calls at the address that came with the request, so it can serve many
rollouts at once and each call is recorded under its own rollout. The request to the service is not
a model call, even if the service has an OpenAI API.
"""

import json
from collections.abc import AsyncIterator
from typing import Annotated, Any, ClassVar, Literal, Self
from urllib.parse import quote, urlsplit

import httpx2
from pydantic import AfterValidator, Field, JsonValue, model_validator

from hone.capture.scope import not_captured
from hone.config.build import Builder
from hone.config.registry import FunctionBaseConfig, LLMRef, register_function
from hone.errors import AgentCrashed, PolicyFailure
from hone.files.redact import redact_start, redact_urls
from hone.workflow.address import ADDRESS_NAMES, Address, check_placeholders, fill, workflow_llm
from hone.workflow.fit import as_text
from hone.workflow.function import FunctionInfo
from hone.workflow.jsonable import dumps
from hone.workflow.llm import LLM
from hone.workflow.paths import json_path, values_at
from hone.workflow.service import DETAILS, answered_within, refusal, service_client

_NAMES = ("input", *ADDRESS_NAMES)


def _is_http(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{redact_urls(url)!r} must look like http://HOST:PORT/PATH")
    return url


class HttpConfig(FunctionBaseConfig, name="http"):
    """A running service, called once per rollout; it reads the model's address from the request."""

    names_functions: ClassVar[bool] = True  # in the header X-Hone-Function

    url: Annotated[str, AfterValidator(_is_http)]
    """Address of the agent. It may contain the placeholders of `body`."""
    method: Literal["POST", "PUT", "GET"] = "POST"
    """GET sends no body."""
    llm: LLMRef | None = None
    """A key of `llms`: the model the agent calls. By default the model in training, or the only
    entry of `llms`."""
    headers: dict[str, str | None] = Field(default_factory=dict)
    """Headers of the request, besides X-Hone-Base-URL, X-Hone-Model and X-Hone-Rollout; null leaves
    one out. Values may have the placeholders of `body`."""
    body: JsonValue = Field(default={"input": "{input}"})
    """Body of the request, as JSON, or as plain text if it is one string. Placeholders in its
    strings: `{input}`, `{base_url}`, `{anthropic_base_url}`, `{api_key}`, `{model}`, `{rollout}`."""
    output_path: Annotated[str, AfterValidator(json_path)] | None = None
    """JSONPath of the output in the response, such as `$.choices[0].message.content`. By default the
    output is the text of the whole response."""
    timeout_s: float | None = Field(default=None, gt=0)
    """Stop waiting after this many seconds, not counting time that the training server held the agent's
    calls. `finetuning.rollout_timeout_s` applies too."""
    max_output_bytes: int = Field(default=2**20, gt=0)
    """A larger response is a failure."""
    policy_failure_statuses: list[Annotated[int, Field(ge=400, le=599)]] = Field(
        default_factory=list
    )
    """Statuses with which the agent reports that the model failed, also before its first answer:
    `finetuning.on_policy_failure` applies. After an answer of the model, other statuses are the
    model's failures too, except 408, 409, 425, 429 and those above 500 and lost connections, which
    lie outside."""
    verify_ssl: bool = True
    """Check the service's certificate."""
    description: str | None = None
    """Shown to an agent that chooses among functions."""

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if self.method == "GET" and "body" in self.model_fields_set:
            raise ValueError("method is GET, which sends no body; remove body, or set method: POST")
        check_placeholders("url", self.url, _NAMES)
        for text in _strings(self.body):
            check_placeholders("body", text, _NAMES)
        for name, value in self.headers.items():
            check_placeholders(f"headers.{name}", value or "", _NAMES)
        return self


@register_function(config_type=HttpConfig)
async def http(config: HttpConfig, builder: Builder) -> AsyncIterator[FunctionInfo]:
    """A running service, called over HTTP."""
    llm = await workflow_llm(config.llm, builder)
    async with service_client(config.url, verify=config.verify_ssl) as client:
        service = _Service(config, llm, client)
        yield FunctionInfo.from_fn(service.run, description=config.description)


class _Service:
    """Calls the service of one configuration."""

    def __init__(self, config: HttpConfig, llm: LLM, client: httpx2.AsyncClient) -> None:
        self._config, self._llm, self._client = config, llm, client
        # Without its query, its user and its password, which may hold a key.
        place = urlsplit(config.url)
        host = place.netloc.rpartition("@")[2]
        shown = place._replace(netloc=host, query="", fragment="").geturl()
        self._name = f"{config.method} {shown}"

    async def run(self, input: Any) -> Any:
        """Sends one input to the agent."""
        address = Address.of(self._llm)
        async with answered_within(self._name, self._config.timeout_s, "timeout_s="):
            status, body = await self._answer(address, input)
        self._check(status, body)
        return self._output(body)

    async def _answer(self, address: Address, input: Any) -> tuple[int, bytes]:
        """Status and body of the response; the body is cut after `max_output_bytes` and one."""
        config = self._config
        values = {**address.placeholders, "input": as_text(input)}
        quoted = {name: quote(value, safe="", errors="replace") for name, value in values.items()}
        url = fill(config.url, quoted)
        headers = {
            "X-Hone-Base-URL": address.base_url,
            "X-Hone-Model": address.model,
            "X-Hone-Rollout": address.rollout,
            **config.headers,
        }
        filled = {k: fill(v, values) for k, v in headers.items() if v is not None}
        content = None if config.method == "GET" else _content(config.body, values, input)
        if content is not None and "content-type" not in {name.lower() for name in filled}:
            kind = (
                "text/plain; charset=utf-8" if isinstance(config.body, str) else "application/json"
            )
            filled["Content-Type"] = kind
        raw = [(name.encode(), value.encode(errors="replace")) for name, value in filled.items()]
        with not_captured():
            async with self._client.stream(
                config.method, url, headers=raw, content=content
            ) as response:
                body, limit = bytearray(), config.max_output_bytes
                async for chunk in response.aiter_bytes():
                    body += chunk[: limit + 1 - len(body)]
                    if len(body) > limit:
                        break
        return response.status_code, bytes(body)

    def _check(self, status: int, body: bytes) -> None:
        """Raise if the service reports a failure."""
        if 200 <= status < 300:
            return
        text = body.decode(errors="replace")
        failure = refusal(self._name, status, redact_start(text, DETAILS))
        if status in self._config.policy_failure_statuses:
            raise PolicyFailure(str(failure), reason="http_status", details=failure.details)
        raise failure

    def _output(self, body: bytes) -> Any:
        config = self._config
        if len(body) > config.max_output_bytes:
            raise AgentCrashed(
                f"{self._name} answered with more than max_output_bytes={config.max_output_bytes}",
                reason="output_too_large",
            )
        text = body.decode(errors="replace")
        if config.output_path is None:
            return text
        try:
            values = values_at(config.output_path, json.loads(text))
        except (ValueError, RecursionError):
            values = []
        if not values:
            raise AgentCrashed(
                f"{self._name}: its response has nothing at output_path {config.output_path!r}: "
                f"{redact_start(text, 200)!r}",
                reason="no_output",
                details=redact_start(text, DETAILS),
            )
        return values[0] if len(values) == 1 else values


def _content(body: JsonValue, values: dict[str, str], input: Any) -> bytes:
    if isinstance(body, str):
        return fill(body, values).encode(errors="replace")
    return dumps(_filled(body, values, input)).encode()


def _filled(body: JsonValue, values: dict[str, str], input: Any) -> Any:
    """The body with its placeholders filled in; a string that is just `{input}` becomes the input."""
    if isinstance(body, str):
        return input if body == "{input}" else fill(body, values)
    if isinstance(body, list):
        return [_filled(item, values, input) for item in body]
    if isinstance(body, dict):
        return {key: _filled(value, values, input) for key, value in body.items()}
    return body


def _strings(body: JsonValue) -> list[str]:
    if isinstance(body, str):
        return [body]
    items = body.values() if isinstance(body, dict) else body if isinstance(body, list) else ()
    return [text for item in items for text in _strings(item)]
