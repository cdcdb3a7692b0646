"""The address at which an agent outside this process reaches the model of its rollout.

In:   the model of a workflow, and the open rollout
Out:  Address: base URLs, key and model name; the same values for `{placeholders}` and environments

Each rollout has its own address: the server records every call that arrives there under that
rollout, whatever language the agent is written in.
"""

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

from hone.capture.base import current, host_of
from hone.config.build import Builder
from hone.config.registry import LLMRef
from hone.errors import ConfigError, did_you_mean
from hone.workflow.llm import LLM

_PLACEHOLDER = re.compile(r"(?<!\$)\{([a-z_]+)\}")
_PROXIES = ("http_proxy", "https_proxy", "all_proxy")
_LOCAL = "127.0.0.1,localhost,::1"


@dataclass(frozen=True, slots=True)
class Address:
    """The model as one rollout reaches it."""

    base_url: str
    """For OpenAI clients; ends in /v1."""
    anthropic_base_url: str
    """For Anthropic clients, which append /v1/messages."""
    api_key: str
    model: str
    rollout: str
    """Id of the rollout; empty outside any."""

    @classmethod
    def of(cls, llm: LLM) -> "Address":
        """The address in the open rollout."""
        scope, url = current(), llm.rollout_url
        rollout = "" if scope is None else scope.rollout
        root = url.rstrip("/").removesuffix("/v1")
        return cls(url, root, llm.rollout_key, llm.model, rollout)

    @property
    def placeholders(self) -> dict[str, str]:
        return asdict(self)

    def environment(self) -> dict[str, str]:
        """The variables that OpenAI's and Anthropic's clients read, and hone's own."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_BASE": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "OPENAI_MODEL": self.model,
            "ANTHROPIC_BASE_URL": self.anthropic_base_url,
            "ANTHROPIC_API_KEY": self.api_key,
            "ANTHROPIC_MODEL": self.model,
            "HONE_MODEL": self.model,
            "HONE_ROLLOUT": self.rollout,
        }


ADDRESS_NAMES = tuple(Address.__dataclass_fields__)


async def workflow_llm(name: LLMRef | None, builder: Builder) -> LLM:
    """The model of a workflow: the named one, else the policy, else the only entry of `llms`."""
    llms = builder.document.llms
    key = name or builder.policy or (next(iter(llms)) if len(llms) == 1 else None)
    if key is not None:
        return await builder.get_llm(key)
    served = builder.served
    if served is not None and not llms:
        return LLM(
            base_url=served.base_url,
            model=served.model,
            api_key=served.api_key,
            rollouts_url=builder.get_rollouts_url(served.base_url),
            rollout_key=builder.get_rollout_key(served.base_url, served.api_key),
        )
    known = f"one of {', '.join(llms)}" if llms else "a key of `llms`, which has no entry yet"
    raise ConfigError(
        f"llm is not set, and which model the agent calls is not clear; set it to {known}"
    )


def fill(text: str, values: Mapping[str, str]) -> str:
    """The text with each known `{name}` replaced by its value; other braces stay.

    In one pass: a value that contains `{name}` is not filled in.
    """
    return _PLACEHOLDER.sub(lambda match: values.get(match[1], match[0]), text)


def placeholders_in(text: str) -> set[str]:
    return {match[1] for match in _PLACEHOLDER.finditer(text)}


def check_placeholders(where: str, text: str, known: Iterable[str]) -> None:
    """Raise ValueError for a name that is nearly one of the known ones."""
    names = sorted(known)
    for name in sorted(placeholders_in(text) - set(names)):
        if maybe := did_you_mean(name, names, cutoff=0.75):
            all_names = ", ".join(f"{{{one}}}" for one in names)
            raise ValueError(
                f"{where}: no placeholder is called {{{name}}}.{maybe} Known: {all_names}"
            )


def child_environment(address: Address, own: Mapping[str, str | None]) -> dict[str, str]:
    """This process's environment with the address in it; `own` is set last, None removes."""
    env = {**os.environ, **address.environment()}
    # Anthropic's client would send the first instead of the key, and it is for another server.
    # The second is valid for the training API, the others for the service of a workflow.
    keys = ("HONE_API_KEY", "HONE_WORKFLOW_API_KEY", "HONE_ENDPOINT_API_KEY")
    for name in ("ANTHROPIC_AUTH_TOKEN", *keys):
        env.pop(name, None)
    host = address.base_url.partition("//")[2].partition("/")[0].rpartition(":")[0]
    if host_of(host) == "localhost" and any(p in env or p.upper() in env for p in _PROXIES):
        for name in ("no_proxy", "NO_PROXY"):
            env[name] = f"{env[name]},{_LOCAL}" if env.get(name) else _LOCAL
    for name, value in own.items():
        if value is None:
            env.pop(name, None)
        else:
            env[name] = fill(value, address.placeholders)
    return env
