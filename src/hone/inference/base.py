"""The Engine protocol: token ids in, sampled ids and log-probabilities out.

In:   prompt ids, Sampling, the adapter to answer with
Out:  Deltas as they are sampled; one Finish per sample

An adapter is identified by the hash of its weights, never by a step number or a path: two adapters
that had the same name at different times must not share a cache or be confused.
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

FinishReason = Literal["stop", "length", "abort"]

BASE_SHA256 = "base"
"""The hash of the base model without an adapter."""


@dataclass(frozen=True, slots=True)
class AdapterRef:
    """An adapter. `sha256`, the hash of its tensors, identifies it."""

    model: str
    step: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Constraint:
    """What the text of an answer must match, in the syntax of the library llguidance.

    Equal constraints allow the same answers, so a compiled one is cached under its Constraint.
    """

    kind: Literal["json_schema", "regex", "grammar"]
    text: str
    """A JSON schema as JSON, a regular expression in Rust's syntax, or a grammar in Lark's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling settings of one request."""

    n: int = 1
    max_tokens: int = 256
    temperature: float = 1.0
    """0 means greedy, with log-probabilities at temperature 1."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps every token."""
    min_p: float = 0.0
    seed: int | None = None
    """None means random. The sample's index is mixed in, so the n samples differ."""
    stop: tuple[str, ...] = ()
    """Strings that end the answer. Their ids are kept; the reader cuts the text."""
    stop_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    """Until the answer has so many tokens, `stop_ids` are excluded. Not together with a constraint
    or stop strings."""
    top_logprobs: int = 0
    """Number of most likely tokens to report with each sampled token."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that are already in the answer."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once for every occurrence in the answer so far."""
    repetition_penalty: float = 1.0
    """Divides positive logits of tokens in prompt and answer, and multiplies negative ones."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Token ids with the value added to each one's logit, before the penalties."""
    constraint: Constraint | None = None
    """The answer's text must match this. The tokenizer's end token then also ends the answer."""

    @property
    def truncates(self) -> bool:
        """Whether top-p, top-k or min-p exclude tokens."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)

    @property
    def penalizes(self) -> bool:
        return bool(
            self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0
        )

    @property
    def narrowed(self) -> bool:
        """Whether tokens may be drawn from a distribution other than the model's own."""
        changes = self.constraint is not None or bool(self.logit_bias) or self.min_tokens > 0
        return changes or self.penalizes or self.truncates


class SampledToken(NamedTuple):
    """One sampled token and its log-probability. A tuple: thousands are created per second."""

    id: int
    logprob: float
    """Temperature-scaled log-probability in the model's own distribution; after masking if not
    `exact`."""
    masked_logprob: float | None = None
    """The log-probability after logit_bias, penalties, min_tokens, the constraint, top-p, top-k and
    min-p; None if they changed nothing."""
    exact: bool = True
    """False if the distribution was masked and the engine knows only the log-probability after
    that."""
    forced: bool = False
    """Whether the constraint allowed no other token."""
    top: tuple[tuple[int, float], ...] = ()
    """The most likely tokens at this position with their logprobs, best first."""


@dataclass(frozen=True, slots=True)
class Delta:
    """New tokens of one sample; the last delta has the finish reason."""

    sample: int
    tokens: tuple[SampledToken, ...]
    finish: FinishReason | None = None
    stop: str | int | None = None
    """The string or id that ended it, if one did."""


@dataclass(slots=True)
class Completion:
    """All deltas of one sample, joined."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    masked_logprobs: list[float | None] | None = None
    """None for tokens whose distribution was not masked; None instead of the list if no token's
    was."""
    exact: bool = True
    """Whether every log-probability is that of the model's own distribution."""
    forced: list[int] = field(default_factory=list)
    """Positions of the tokens that a constraint forced."""
    top: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    finish: FinishReason = "abort"
    stop: str | int | None = None

    def add(self, delta: Delta) -> None:
        for token in delta.tokens:
            if token.masked_logprob is not None and self.masked_logprobs is None:
                self.masked_logprobs = [None for _ in self.ids]
            if self.masked_logprobs is not None:
                self.masked_logprobs.append(token.masked_logprob)
            if token.forced:
                self.forced.append(len(self.ids))
            self.ids.append(token.id)
            self.logprobs.append(token.logprob)
            self.top.append(token.top)
            self.exact = self.exact and token.exact
        if delta.finish is not None:
            self.finish, self.stop = delta.finish, delta.stop


@dataclass(frozen=True, slots=True)
class Probe:
    """What the engine really serves: read from its own tensors, not from the request."""

    sha256: str | None
    """Hash of the adapter; None if the engine cannot read its tensors, or was not asked to."""
    logprobs: tuple[tuple[float, ...], ...]
    """Log-probabilities at temperature 1, per sequence, of every token except the first. An engine may
    leave out the last token of a sequence that fills its `max_length`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """The state of the engine and its KV cache."""

    running: int
    waiting: int
    adapters: tuple[str, ...]
    prompt_tokens: int
    prefilled_tokens: int
    decoded_tokens: int
    """Sampled tokens that were fed back to the model; samples with equal tokens count once."""
    sampled_tokens: int
    kv_budget_bytes: int | None
    """Size of the KV cache. None, here and below, if the engine does not know."""
    kv_reserved_bytes: int | None
    kv_cached_bytes: int | None
    held_s: float
    """Seconds that the last publish blocked the steps."""


class Engine(Protocol):
    """The methods that hone needs of an inference engine."""

    @property
    def failure(self) -> BaseException | None:
        """The error that broke the engine; None while it works. A broken engine stays broken."""
        ...

    @property
    def max_length(self) -> int:
        """Maximum tokens of a prompt and its answer together."""
        ...

    @property
    def repeatable(self) -> bool:
        """Whether equal seeds give equal answers, whatever else the engine is doing."""
        ...

    async def check(self, sampling: Sampling) -> None:
        """Refuse unusable sampling settings, such as a constraint that does not compile.

        Raises GrammarError or ConfigError, which say what is wrong. A constraint is compiled once,
        and not on the event loop.
        """
        ...

    def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        adapter: AdapterRef | None = None,
        *,
        stream: bool = True,
    ) -> AsyncIterator[Delta]:
        """Sample; closing the iterator early aborts the request. `adapter` None is the base model.

        Without `stream`, an engine may yield each answer as a single delta.
        """
        ...

    async def publish(self, adapter: AdapterRef, directory: Path) -> None:
        """Load a PEFT adapter in addition to those served; refuses one with another hash."""
        ...

    async def unload(self, adapter: AdapterRef) -> None:
        """Stop serving an adapter; running requests keep it until they end."""
        ...

    async def probe(
        self,
        sequences: Sequence[Sequence[int]],
        adapter: AdapterRef | None = None,
        *,
        with_hash: bool = True,
    ) -> Probe:
        """The hash of the weights really served, and the log-probabilities they give.

        Without `with_hash`, an engine may leave the hash out.
        """
        ...

    def stats(self) -> EngineStats: ...

    async def sleep(self) -> None:
        """Stop stepping and free the KV cache; new requests wait."""
        ...

    async def wake(self) -> None: ...

    async def close(self) -> None:
        """Fail every request and free all memory."""
        ...


async def complete(
    engine: Engine,
    prompt_ids: Sequence[int],
    sampling: Sampling,
    adapter: AdapterRef | None = None,
) -> list[Completion]:
    """All samples of one request, once they have finished."""
    completions = [Completion() for _ in range(sampling.n)]
    async for delta in engine.generate(prompt_ids, sampling, adapter, stream=False):
        completions[delta.sample].add(delta)
    return completions
