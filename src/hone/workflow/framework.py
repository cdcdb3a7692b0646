"""Agents built with a framework: the object that `target` names, or the result of a factory.

In:   `target: module:object`, the model of the workflow
Out:  the framework's object, made once or in every rollout

The framework's own client calls the model, and the server records the calls. An adapter only
provides the address (as arguments of the factory, or as environment variables while the module is
loaded) and the function path (capture.scope.called_by); it reads no messages and no tokens.
"""

import importlib.util
import inspect
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, Self

from pydantic import Field, JsonValue

from hone.capture.base import current
from hone.config.build import Builder
from hone.config.registry import FunctionBaseConfig, LLMRef
from hone.errors import ConfigError, HoneError, did_you_mean
from hone.workflow.address import Address, workflow_llm
from hone.workflow.fit import signature_of
from hone.workflow.llm import LLM
from hone.workflow.target import error_at, load_target

_ADDRESS = ("llm", "base_url", "api_key", "model")


class FrameworkConfig(FunctionBaseConfig):
    """Keys of every framework's workflow."""

    names_functions: ClassVar[bool] = True

    target: str
    """`package.module:object`, or `file.py:object` relative to this file: the agent, or a function
    that returns it. The function gets those of `llm`, `base_url`, `api_key` and `model` that are its
    parameters, and `args`. While the module is loaded, OPENAI_BASE_URL, OPENAI_API_KEY and HONE_MODEL
    are set."""
    llm: LLMRef | None = None
    """A key of `llms`: the model the agent calls. By default the model in training, or the only
    entry of `llms`."""
    args: dict[str, JsonValue] = Field(default_factory=dict)
    """Other arguments of the function, by name."""
    per_rollout: bool = False
    """Call the function in every rollout, for agents that keep state. `base_url` is then the
    rollout's own, for clients that hone cannot mark."""
    description: str | None = None
    """Shown to an agent that chooses among functions."""


def require(module: str, extra: str) -> None:
    """Raise ConfigError unless the framework is installed."""
    top = module.partition(".")[0]
    try:
        spec = importlib.util.find_spec(top) and importlib.util.find_spec(module)
    except ModuleNotFoundError:
        spec = None
    if not spec:
        raise ConfigError(f'{module} is not installed: pip install "hone-rl[{extra}]"')


class Agents:
    """The agent of a workflow: one for all rollouts, or one for each."""

    def __init__(
        self,
        config: FrameworkConfig,
        llm: LLM,
        *,
        is_agent: Callable[[Any], bool],
        kind: str,
        prepare: Callable[[Any], Any],
    ) -> None:
        self._config, self._llm = config, llm
        self._is_agent, self._kind, self._prepare = is_agent, kind, prepare
        self._target: Any = None
        self._agent: Any = None

    @classmethod
    async def load(
        cls,
        config: FrameworkConfig,
        builder: Builder,
        *,
        is_agent: Callable[[Any], bool],
        kind: str,
        prepare: Callable[[Any], Any] = lambda agent: agent,
    ) -> Self:
        """Load the target; raises ConfigError if it does not give an agent.

        `is_agent` tells the framework's objects from functions that make them; `kind` names them in
        messages; `prepare` turns an object into what rollouts use.
        """
        llm = await workflow_llm(config.llm, builder)
        agents = cls(config, llm, is_agent=is_agent, kind=kind, prepare=prepare)
        directory = builder.document.file.resolve().parent
        with _environment(Address.of(llm).environment()):
            agents._target = load_target(config.target, directory)
            if is_agent(agents._target):
                agents._check_object()
                agents._agent = prepare(agents._target)
                return agents
            agents._check_factory()
            if config.per_rollout:
                return agents
            try:
                agents._agent = await agents._make(llm.base_url)
            except Exception as error:  # a user's function may raise anything
                if isinstance(error, HoneError):
                    raise
                where = error_at(error, directory)
                raise ConfigError(f"target {config.target!r} failed: {where}") from error
        return agents

    async def get(self) -> Any:
        """The agent for the open rollout."""
        if self._config.per_rollout:
            return await self._make(self._llm.rollout_url)
        return self._agent

    async def _make(self, base_url: str) -> Any:
        llm = self._llm
        address = {"llm": llm, "base_url": base_url, "api_key": llm.api_key, "model": llm.model}
        names = signature_of(self._target).parameters
        arguments = {name: value for name, value in address.items() if name in names}
        agent = self._target(**{**arguments, **self._config.args})
        if inspect.isawaitable(agent):
            agent = await agent
        if not self._is_agent(agent):
            raise ConfigError(
                f"target {self._config.target!r} returned {type(agent).__name__}; it must return "
                f"{self._kind}"
            )
        return self._prepare(agent)

    def _check_object(self) -> None:
        for key in ("args", "per_rollout"):
            if getattr(self._config, key):
                raise ConfigError(
                    f"{key} is set, and target {self._config.target!r} is no function but "
                    f"{self._kind} already; remove {key}, or name a function that returns one"
                )

    def _check_factory(self) -> None:
        where = f"target {self._config.target!r}"
        if not callable(self._target):
            raise ConfigError(
                f"{where} is {type(self._target).__name__}; it must be {self._kind}, or a function "
                "that returns one"
            )
        parameters = signature_of(self._target).parameters
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        for name in self._config.args:
            if name not in parameters and not takes_any:
                raise ConfigError(
                    f"{where} has no parameter {name!r}, but args.{name} is set."
                    f"{did_you_mean(name, parameters)} Its parameters: {', '.join(parameters)}."
                )
        for name, p in parameters.items():
            has_value = name in _ADDRESS or name in self._config.args
            if (
                p.default is p.empty
                and not has_value
                and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
            ):
                raise ConfigError(
                    f"{where} has the parameter {name!r}, which hone does not pass; set "
                    f"args.{name}, or give it a default. hone passes: {', '.join(_ADDRESS)}."
                )


def content_text(content: Any) -> str:
    """The text of a message's content: a string, or blocks of which some are text."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = [b if isinstance(b, str) else _text_of(b) for b in content]
        return "".join(parts)
    return "" if content is None else str(content)


def _text_of(block: Any) -> str:
    text = block.get("text") if isinstance(block, Mapping) else getattr(block, "text", None)
    return text if isinstance(text, str) else ""


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables only inside the block: other entries of `llms` read some of them too."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def run_name() -> str:
    """A name for the session of the open rollout; a repeated rollout gets another name."""
    scope = current()
    return f"{scope.rollout if scope is not None else 'hone'}-{secrets.token_hex(4)}"
