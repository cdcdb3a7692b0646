"""One `llms:` entry as a model that agents call with OpenAI's clients.

In:   the entry: address, API key, model name, parameters of every request
Out:  LLM: `client`, `sync_client`, `await llm.chat(messages)`, `rollout_url`

The clients are plain OpenAI clients, so an agent written for them runs unchanged with and without
hone.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Iterable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Self
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

from pydantic import Field, SecretStr, field_validator, model_validator

from hone.capture.base import current, host_of
from hone.config.build import Builder
from hone.config.policy import openai_url
from hone.config.registry import LLMBaseConfig, register_llm_provider
from hone.errors import ConfigError
from hone.model import TIMEOUT_S, connection_to
from hone.wire.access import INFERENCE, derive_inference_key
from hone.workflow.llm_requests import (
    as_arguments,
    check_step,
    is_hone_server,
    respond,
)

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI
    from openai.types.chat import ChatCompletion

MAX_RETRIES = 10
ApiType = Literal["chat_completion", "responses"]


class LLM:
    """A model at an address, and the parameters of every request to it."""

    def __init__(
        self,
        *,
        base_url: str,
        model: str,
        api_key: str = "default",
        name: str = "",
        params: dict[str, Any] | None = None,
        timeout_s: float = TIMEOUT_S,
        max_retries: int = MAX_RETRIES,
        verify_ssl: bool = True,
        rollouts_url: str | None = None,
        rollout_key: str | None = None,
        api_type: ApiType = "chat_completion",
    ) -> None:
        """Makes no request yet.

        Args:
            base_url: base URL of the OpenAI API, usually ending in /v1.
            model: the model name to send.
            api_key: servers on this machine accept any.
            name: its key under `llms`.
            params: parameters of every request, OpenAI's or the server's own.
            timeout_s: timeout of one answer.
            max_retries: how often the client retries a failed request.
            verify_ssl: check the server's certificate.
            rollouts_url: where agents outside this process reach it, if it is a hone server,
                which has a base URL for every rollout.
            rollout_key: the key for agents outside this process; `api_key` if None.
            api_type: the API that `chat` calls; agents with their own client may read it.
        """
        self.name, self.model, self.api_key = name, model, api_key
        self.api_type: ApiType = api_type
        self.rollout_key = rollout_key or api_key
        """The key for an agent in another process. If `api_key` is valid for the training API of a hone
        server, this one is valid only for its inference APIs."""
        self.base_url = dialled(base_url)
        self._params = dict(params or {})
        self._timeout_s, self._max_retries, self._verify = timeout_s, max_retries, verify_ssl
        self._rollouts_url, self._is_foreign = rollouts_url, False
        self._clients: WeakKeyDictionary[Any, AsyncOpenAI] = WeakKeyDictionary()
        self._sync: OpenAI | None = None

    @property
    def request_params(self) -> dict[str, Any]:
        """The parameters of every request, as keys of the request body."""
        return dict(self._params)

    @cached_property
    def params(self) -> dict[str, Any]:
        """The parameters of every request, as arguments of `chat.completions.create`."""
        return as_arguments(self._params)

    @property
    def rollout_url(self) -> str:
        """The base URL at which the server records every call as a call of this rollout.

        Give it as OPENAI_BASE_URL to an agent in another process, or to a client that does not use
        httpx. It carries the temperature and the step of a validation. Outside a rollout, and for a
        server that is not hone's, it is `base_url`.
        """
        scope = current()
        if self._rollouts_url is None or scope is None or not scope.rollout:
            return self.base_url
        if scope.recorder is not None:
            scope.recorder.is_incomplete = True
        return scope.url(dialled(self._rollouts_url))

    async def find_rollouts_url(self) -> None:
        """Find out whether the server is a hone server, so that `rollout_url` works.

        For a process without a training run, such as `hone serve-workflow`.
        """
        if self._rollouts_url is not None or self._is_foreign:
            return
        is_hone = await is_hone_server(self.client)
        self._is_foreign = is_hone is False
        if is_hone:
            self._rollouts_url = self.base_url
            if self.api_key != "default" and not self.api_key.startswith(INFERENCE):
                self.rollout_key = derive_inference_key(self.api_key)

    @property
    def client(self) -> "AsyncOpenAI":
        """One AsyncOpenAI per event loop: `llm.client.chat.completions.create(model=llm.model, ...)`."""
        loop = asyncio.get_running_loop()
        if loop not in self._clients:
            import openai  # imported here: slow, and not every command needs it

            http = openai.DefaultAsyncHttpxClient(**self._connection())
            self._clients[loop] = openai.AsyncOpenAI(**self._options(), http_client=http)
        return self._clients[loop]

    @property
    def sync_client(self) -> "OpenAI":
        """One OpenAI client for plain functions; threads share it."""
        if self._sync is None:
            import openai

            http = openai.DefaultHttpxClient(**self._connection())
            self._sync = openai.OpenAI(**self._options(), http_client=http)
        return self._sync

    async def chat(self, messages: Iterable[Any], **more: Any) -> "ChatCompletion":
        """One chat completion, with `params` and the arguments given here, which take precedence.

        With `api_type: responses` the request is one to /v1/responses, and its response is returned
        as a chat completion. Such a request is not streamed.
        """
        both = {**self.params, **more}
        if "extra_body" in self.params and "extra_body" in more:
            both["extra_body"] = {**self.params["extra_body"], **(more["extra_body"] or {})}
        both.setdefault("model", self.model)
        if self.api_type == "responses":
            return await respond(self.client, list(messages), both)
        return await self.client.chat.completions.create(messages=list(messages), **both)

    async def check_step(self) -> None:
        """Refuse NAME@STEP if the hone server has NAME but not that step."""
        await check_step(self.client, self.model)

    async def close(self) -> None:
        """Close the connections; the next use opens new ones."""
        client = self._clients.pop(asyncio.get_running_loop(), None)
        if client is not None:
            await client.close()
        sync, self._sync = self._sync, None
        if sync is not None:
            sync.close()

    def __repr__(self) -> str:
        return f"LLM({self.name!r}: {self.model!r} at {self.base_url})"

    def _options(self) -> dict[str, Any]:
        return {
            "base_url": self.base_url,
            "api_key": self.api_key,
            "timeout": self._connection()["timeout"],
            "max_retries": self._max_retries,
        }

    def _connection(self) -> dict[str, Any]:
        return {**connection_to(self.base_url, self._timeout_s), "verify": self._verify}


def dialled(base_url: str) -> str:
    """The address to connect to: a server that listens on 0.0.0.0 is reached at 127.0.0.1."""
    parts = urlsplit(base_url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            f"base_url is {base_url!r}; it must look like http://127.0.0.1:8000/v1 or https://..."
        )
    if parts.hostname != "0.0.0.0":
        return base_url
    return parts._replace(netloc=parts.netloc.replace("0.0.0.0", "127.0.0.1")).geturl()


# ---- the configuration -------------------------------------------------------------------------

SECOND_LAYER = ("num_retries", "retry_on_status_codes", "retry_on_errors")


class _OpenAIFields(LLMBaseConfig):
    """Fields of both types. Other keys (`max_tokens`, ...) are sent with every request."""

    model_name: str | None = None
    """The model name to send; `model` is the same."""
    base_url: str | None = None
    """Base URL of the OpenAI API; if not set, $OPENAI_BASE_URL, or else OpenAI's."""
    api_key: SecretStr | None = None
    """$OPENAI_API_KEY if not set; servers on this machine need none."""
    temperature: float | None = Field(default=None, ge=0)
    """Sent with every request."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Sent with every request."""
    seed: int | None = None
    """Sent with every request. Equal seeds give equal answers: do not set it in training."""
    request_timeout: float = Field(default=TIMEOUT_S, gt=0)
    """Timeout of one answer, in seconds."""
    max_retries: int = Field(default=MAX_RETRIES, ge=0)
    """How often the client retries a failed request (connection error, 408, 409, 429, 5xx)."""
    do_auto_retry: bool = True
    """`false` means `max_retries: 0`, unless that is set too."""
    num_retries: int = 5
    """Part of a second layer of retries, which hone does not have; use `max_retries`."""
    retry_on_status_codes: list[int | str] = Field(default=[429, 500, 502, 503, 504])
    """Part of the same layer."""
    retry_on_errors: list[str] | None = None
    """Part of the same layer."""
    thinking: bool | None = None
    """Sent with every request as `chat_template_kwargs: {enable_thinking: ...}`."""
    verify_ssl: bool = True
    """Check the server's certificate."""
    api_type: ApiType = "chat_completion"
    """The API that `llm.chat` calls. An agent with its own client can read it as `llm.api_type`."""

    @field_validator("base_url")
    @classmethod
    def _can_be_dialled(cls, url: str | None) -> str | None:
        if url is not None:
            dialled(url)
        return url

    @model_validator(mode="before")
    @classmethod
    def _model_is_model_name(cls, block: Any) -> Any:
        if not isinstance(block, Mapping) or "model" not in block:
            return block
        if "model_name" in block:
            raise ValueError("has both 'model' and 'model_name'; keep one of them")
        return {"model_name" if key == "model" else key: value for key, value in block.items()}

    @model_validator(mode="after")
    def _nothing_is_ignored(self) -> Self:
        for name in SECOND_LAYER:
            if getattr(self, name) != type(self).model_fields[name].get_default():
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}: not in this version of hone, whose client "
                    "has one layer of retries; remove it and set max_retries"
                )
        return self

    def params(self) -> dict[str, Any]:
        """The parameters of every request."""
        own = {key: getattr(self, key) for key in ("temperature", "top_p", "seed")}
        params = {key: value for key, value in own.items() if value is not None}
        if self.thinking is not None:
            params["chat_template_kwargs"] = {"enable_thinking": self.thinking}
        return params | (self.model_extra or {})

    def llm(
        self,
        name: str,
        *,
        base_url: str,
        api_key: str | None,
        model: str | None,
        rollouts_url: str | None = None,
        rollout_key: str | None = None,
    ) -> LLM:
        """The model at this address; `name` is its key under `llms`."""
        assert model, f"llms.{name} was checked to name a model where it has an address"
        retries = self.max_retries
        if not self.do_auto_retry and "max_retries" not in self.model_fields_set:
            retries = 0
        return LLM(
            name=name,
            base_url=base_url,
            api_key=api_key or _key(base_url),
            model=model,
            params=self.params(),
            timeout_s=self.request_timeout,
            max_retries=retries,
            verify_ssl=self.verify_ssl,
            rollouts_url=rollouts_url,
            rollout_key=rollout_key,
            api_type=self.api_type,
        )


class OpenAIConfig(_OpenAIFields, name="openai"):
    """A model behind an OpenAI API. Other keys (`max_tokens`, ...) are sent with every request."""

    @model_validator(mode="after")
    def _has_a_model(self) -> Self:
        if not self.model_name:
            raise ValueError("model_name is not set; name the model to send requests to")
        return self


class TrainableConfig(_OpenAIFields, name="trainable"):
    """The model in training; without `base_url` it is at the server of `finetuning.trainer_adapter`."""

    base_url: str | None = None
    """Base URL of the OpenAI API; if not set, that of the training server."""

    @model_validator(mode="after")
    def _has_a_model_where_it_has_an_address(self) -> Self:
        if self.base_url and not self.model_name:
            raise ValueError(
                "base_url is set and model_name is not; name the model that is served there"
            )
        return self


@register_llm_provider(config_type=OpenAIConfig)
async def openai_llm(config: OpenAIConfig, builder: Builder) -> AsyncIterator[LLM]:
    """A model behind an OpenAI API."""
    llm = llm_at(config, builder, _name_of(config, builder), openai_url(config))
    yield llm
    await llm.close()


@register_llm_provider(config_type=TrainableConfig)
async def trainable_llm(config: TrainableConfig, builder: Builder) -> AsyncIterator[LLM]:
    """The model in training, wherever it is served."""
    name = _name_of(config, builder)
    if config.base_url is not None:
        llm = llm_at(config, builder, name, config.base_url)
    else:
        if builder.served is None and builder.document.finetuning.trainer_adapter is not None:
            await builder.serve()  # a judge may be built first if the workflow is skipped
        served = builder.served
        if served is None:
            raise ConfigError(
                "base_url is not set, and nothing serves the model yet; set base_url, or name a "
                "trainer adapter in finetuning.trainer_adapter, which starts or finds the server"
            )
        llm = llm_at(config, builder, name, served.base_url, served.api_key)
    try:
        await llm.check_step()
    except ConfigError:
        await llm.close()
        raise
    yield llm
    await llm.close()


def llm_at(
    config: OpenAIConfig | TrainableConfig,
    builder: Builder,
    name: str,
    url: str,
    key: str | None = None,
) -> LLM:
    """The entry `name` at this address; `key` is used if the entry has none."""
    key = config.api_key.get_secret_value() if config.api_key else key
    return config.llm(
        name,
        base_url=url,
        api_key=key,
        model=builder.get_model_name(name),
        rollouts_url=builder.get_rollouts_url(url),
        rollout_key=builder.get_rollout_key(url, key),
    )


def _name_of(config: LLMBaseConfig, builder: Builder) -> str:
    """The entry's key."""
    return next((key for key, held in builder.document.llms.items() if held is config), "")


def _key(base_url: str) -> str:
    key = os.environ.get("OPENAI_API_KEY")
    if key:
        return key
    if host_of(urlsplit(base_url).hostname or "") == "localhost":
        return "default"
    raise ConfigError(
        f"{base_url} needs a key; set api_key (${{MY_KEY}} takes it from the "
        "environment), or OPENAI_API_KEY"
    )
