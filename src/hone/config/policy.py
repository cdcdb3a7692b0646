"""Choose the policy among the entries of `llms`, and the model name that each entry sends.

In:   a Document; the model in training: its names, its base model, the addresses of its server
Out:  the key of the policy's entry; for every entry the name that goes with its requests

One entry is the policy: the one `finetuning.target_model` names, else the `trainable` one, else the
only one that names the model in training or its base model at the training server. It sends NAME.
Other entries that name that base model send NAME@0, the base weights, which are never trained: a
judge on the same base model must not change while the policy learns. The bare base name is never
sent, because inside a rollout the server answers it with the policy.
"""

import os
from collections.abc import Collection
from dataclasses import dataclass
from urllib.parse import urlsplit

from hone.capture.base import SeenCall, host_of
from hone.config.base import LLMBaseConfig
from hone.config.schema import Document
from hone.errors import ConfigError
from hone.types import names_fixed_step

TRAINABLE = "trainable"
OPENAI_URL = "https://api.openai.com/v1"

Address = tuple[str, int | None]
"""Host and port; without a port, any port of that host."""


@dataclass(frozen=True)
class Trained:
    """The model in training, and where it is served."""

    name: str
    """The model name that the policy's entry sends."""
    names: frozenset[str]
    """Both spellings of the name: NAME and PROJECT/NAME."""
    base_model: str
    addresses: frozenset[Address]
    aliases: frozenset[str] = frozenset()
    """Other names of it inside the run's rollouts."""

    def names_like(self, name: str) -> frozenset[str] | None:
        """All names of the policy, if this is one of them; otherwise None."""
        every = self.names | self.aliases | {self.base_model}
        return every | {f"{name}@latest" for name in every} if name in every else None


@dataclass(frozen=True)
class PolicyCalls:
    """Which calls of a rollout the policy answers: those to its server, with two exceptions.

    Names of a fixed step, and of other entries of `llms`, belong to frozen models and judges.
    """

    hosts: frozenset[str] | None
    """Hosts of the server; None: any host."""
    names: frozenset[str] = frozenset()
    """Names of the policy."""
    others: frozenset[str] = frozenset()
    """Model names that other entries of `llms` send."""

    def has(self, call: SeenCall) -> bool:
        """Whether the call goes to the policy."""
        if call.model in self.others or names_fixed_step(call.model):
            return False
        if self.hosts is None:
            return True
        # Another server may run on the same host; the end of an answer that the agent stopped
        # reading, which has the step, is missing.
        is_ours = call.policy_step is not None or call.model in self.names
        return call.host in self.hosts and is_ours


def policy_calls(document: Document, trained: Trained, policy: str | None) -> PolicyCalls:
    """Which calls go to the policy; `policy` is its key under `llms`."""
    own = trained.names_like(trained.name) or frozenset()
    names = {
        sent_name(config, trained, is_policy=False)
        for key, config in document.llms.items()
        if key != policy
    }
    others = frozenset(name for name in names if name is not None) - own
    hosts = frozenset(host for host, _ in trained.addresses)
    return PolicyCalls(None if document.finetuning.allow_foreign_endpoint else hosts, own, others)


def address_of(base_url: str) -> Address:
    """Host and port of a URL; all names of this machine are `localhost`."""
    parts = urlsplit(base_url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return host_of(parts.hostname or ""), port


def needs_training_server(config: LLMBaseConfig) -> bool:
    """Whether an entry has no address, so that it uses the training server."""
    return config.type_name == TRAINABLE and getattr(config, "base_url", None) is None


def openai_url(config: LLMBaseConfig) -> str:
    """The base URL of an `openai` entry."""
    written = getattr(config, "base_url", None)
    return written or os.environ.get("OPENAI_BASE_URL") or OPENAI_URL


def choose_policy(document: Document, trained: Trained, target: str | None = None) -> str | None:
    """The key of the policy under `llms`; None if only the agent's own clients call it.

    Raises ConfigError if several entries match, and if the policy's entry names a fixed step.
    `target` replaces `finetuning.target_model`.
    """
    entries = {key: _Entry(config, trained) for key, config in document.llms.items()}
    wanted = target or document.finetuning.target_model
    if wanted in entries:
        return _not_fixed(wanted, entries)
    if wanted is not None:
        is_trained = wanted in trained.names or wanted == trained.base_model
        chosen = [k for k, e in entries.items() if e.written == wanted or (is_trained and e.is_it)]
    else:
        chosen = [k for k, e in entries.items() if e.is_trainable]
        if len(chosen) != 1:
            chosen = [key for key, entry in entries.items() if entry.is_it]
    if len(chosen) > 1:
        raise ConfigError(
            f"{_list(chosen)} each name the model in training or its base model "
            f"{trained.base_model!r}; set finetuning.target_model to the key of the one to train. "
            f"The others then get the base weights where they name the base model."
        )
    return _not_fixed(chosen[0], entries) if chosen else None


def sent_name(config: LLMBaseConfig, trained: Trained, *, is_policy: bool) -> str | None:
    """The model name that an entry sends."""
    entry = _Entry(config, trained)
    if not entry.is_at_server:
        return entry.written
    if entry.stem == trained.base_model and entry.step in (None, "0") and not is_policy:
        return f"{trained.name}@0"
    if entry.step is not None:
        return entry.written
    return trained.name if is_policy or entry.written is None else entry.written


def describe(document: Document, trained: Trained, policy: str | None) -> str:
    """Log text: which entry is trained, which are frozen, what the base model's name means."""
    others = [key for key in document.llms if key != policy]
    frozen = [
        key
        for key in others
        if sent_name(document.llms[key], trained, is_policy=False) == f"{trained.name}@0"
    ]
    parts = []
    if policy is not None:
        sent = sent_name(document.llms[policy], trained, is_policy=True)
        parts.append(f"llms.{policy} is trained and sends {sent!r}.")
    if frozen:
        verb = "sends" if len(frozen) == 1 else "send"
        parts.append(
            f"{_list(frozen)} {verb} '{trained.name}@0': the base weights, which are not trained."
        )
    parts.append(
        f"The agent's own clients that request {trained.base_model!r} inside a rollout get "
        f"{trained.name!r}."
    )
    if aliases := sorted(trained.aliases):
        verb = "means" if len(aliases) == 1 else "mean"
        parts.append(
            f"Inside a rollout {', '.join(map(repr, aliases))} {verb} {trained.name!r} "
            "(finetuning.model_aliases)."
        )
    return " ".join(parts)


class _Entry:
    """One entry of `llms`, compared with the model in training."""

    def __init__(self, config: LLMBaseConfig, trained: Trained) -> None:
        self.written: str | None = getattr(config, "model_name", None)
        self.is_trainable = config.type_name == TRAINABLE
        stem, at, step = (self.written or "").rpartition("@")
        self.stem = stem if at else step
        self.step = step if at and step != "latest" else None
        """The fixed step it names: a number, or `best`."""
        self.is_at_server = self._is_at(config, trained.addresses)
        named = self.stem in trained.names or self.stem == trained.base_model
        unnamed = self.is_trainable and self.written is None
        self.is_it = self.is_at_server and self.step is None and (named or unnamed)
        """Whether it names the model in training or its base model, without a fixed step."""

    def _is_at(self, config: LLMBaseConfig, addresses: Collection[Address]) -> bool:
        if not config.has_openai_api:
            return False
        if self.is_trainable and getattr(config, "base_url", None) is None:
            return True
        host, port = address_of(openai_url(config))
        return (host, port) in addresses or (host, None) in addresses


def _not_fixed(key: str, entries: dict[str, _Entry]) -> str:
    entry = entries[key]
    if entry.is_at_server and entry.step is not None:
        raise ConfigError(
            f"llms.{key} is the model to train, and its model_name {entry.written!r} requests one "
            f"fixed step; leave out '@{entry.step}', or name another entry in "
            "finetuning.target_model; in a file for `hone eval` only, set finetuning.enabled: false"
        )
    return key


def _list(keys: Collection[str]) -> str:
    *first, last = (f"llms.{key}" for key in keys)
    return f"{', '.join(first)} and {last}" if first else last
