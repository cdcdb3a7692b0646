"""`art.langgraph` under hone's name: the rollouts of a LangGraph agent as trajectories.

In:   a rollout function; inside it, `init_chat_model()` in place of LangChain's
Out:  the function's Trajectory, with the conversations that its agent had with the model

The chat model is LangChain's own ChatOpenAI, with its tools, structured output, retries and
streams.
"""

import functools
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any, ParamSpec

from hone.capture.base import SeenCall
from hone.capture.histories import capturing
from hone.errors import ConfigError
from hone.model import TIMEOUT_S, Model
from hone.trajectory import Trajectory

P = ParamSpec("P")

_model: ContextVar[Model[Any] | None] = ContextVar("hone_langgraph_model", default=None)


def wrap_rollout(
    model: Model[Any], fn: Callable[P, Awaitable[Trajectory]]
) -> Callable[P, Awaitable[Trajectory]]:
    """The same rollout, whose trajectory gets the calls that its agent made to `model`."""

    @functools.wraps(fn)
    async def rollout(*args: P.args, **kwargs: P.kwargs) -> Trajectory:
        name = model.get_inference_name()

        def is_ours(call: SeenCall) -> bool:
            return call.model.partition("@")[0] == name.partition("@")[0]

        token = _model.set(model)
        try:
            with capturing(is_ours) as captured:
                result = await fn(*args, **kwargs)
        finally:
            _model.reset(token)
        if not isinstance(result, Trajectory):
            raise TypeError(f"the rollout returned a {type(result).__name__}, not a Trajectory")
        if captured.messages_and_choices:
            result.messages_and_choices = captured.messages_and_choices
            result.tools = captured.tools
            result.additional_histories += captured.additional_histories
        return result

    return rollout


def init_chat_model(
    model: str | None = None,
    *,
    model_provider: str | None = None,
    configurable_fields: None = None,
    config_prefix: None = None,
    **kwargs: Any,
) -> Any:
    """A ChatOpenAI of the model that is trained. Call it inside a rollout of `wrap_rollout`.

    Args:
        model: ignored; the rollout's model is used instead.
    model_provider: ignored.
    configurable_fields: refused: one model answers the whole rollout.
    config_prefix: refused, for the same reason.
    **kwargs: arguments of ChatOpenAI; temperature is 1 by default.
    """
    for key, value in (
        ("configurable_fields", configurable_fields),
        ("config_prefix", config_prefix),
    ):
        if value is not None:
            raise ConfigError(
                f"init_chat_model({key}={value!r}): one model answers the whole rollout; leave it out"
            )
    trained = _model.get()
    if trained is None:
        raise ConfigError(
            "init_chat_model() outside a rollout: call it in the function that you pass to "
            "wrap_rollout(model, function)"
        )
    try:
        from langchain_openai import ChatOpenAI  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ConfigError(
            "hone.art.langgraph needs LangChain: pip install 'hone-rl[langchain]'"
        ) from None
    address = {"base_url": trained.inference_base_url, "api_key": trained.inference_api_key}
    defaults = {"temperature": 1.0, "timeout": TIMEOUT_S}
    return ChatOpenAI(**{**defaults, **kwargs, **address, "model": trained.get_inference_name()})
