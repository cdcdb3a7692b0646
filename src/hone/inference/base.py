"""The seam every engine stands behind: token ids in, sampled ids and log-probabilities out.

In:   prompt ids, Sampling, the adapter to answer with
Out:  Deltas as they are sampled; one Finish per sample

An adapter is named by the hash of its weights, never by a step number or a path: two adapters
that were called alike at different times must not share a cache, nor be taken for each other.
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class AdapterRef:
    """Which weights answer. `sha256` is that of the adapter's tensors, and identifies it."""

    model: str
    step: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How one request is sampled."""

    n: int = 1
    max_tokens: int = 256
    temperature: float = 1.0
    """0 is greedy; its log-probabilities are those at temperature 1."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps every token."""
    min_p: float = 0.0
    seed: int | None = None
    """None draws one; the sample's index is mixed in, so n samples differ."""
    stop: tuple[str, ...] = ()
    """Strings that end the answer; the ids that spelled them are kept, the text is cut by the reader."""
    stop_ids: tuple[int, ...] = ()
    top_logprobs: int = 0
    """How many alternatives to report beside each sampled token."""

    @property
    def narrowed(self) -> bool:
        """Whether tokens were excluded before the draw."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One draw: what came out, and how likely it was."""

    id: int
    logprob: float
    """Temperature-scaled, before top-p, top-k and min-p."""
    masked_logprob: float | None = None
    """After them; None where nothing was excluded."""
    top: tuple[tuple[int, float], ...] = ()
    """The most likely tokens of this place with their logprobs, best first."""


@dataclass(frozen=True, slots=True)
class Delta:
    """New tokens of one sample; the last one carries why it ended."""

    sample: int
    tokens: tuple[SampledToken, ...]
    finish: FinishReason | None = None
    stop: str | int | None = None
    """The string or id that ended it, if one did."""


@dataclass(slots=True)
class Completion:
    """All deltas of one sample, put together."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    masked_logprobs: list[float] | None = None
    top: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    finish: FinishReason = "abort"
    stop: str | int | None = None

    def add(self, delta: Delta) -> None:
        for token in delta.tokens:
            self.ids.append(token.id)
            self.logprobs.append(token.logprob)
            self.top.append(token.top)
            if token.masked_logprob is not None:
                self.masked_logprobs = self.masked_logprobs or []
                self.masked_logprobs.append(token.masked_logprob)
        if delta.finish is not None:
            self.finish, self.stop = delta.finish, delta.stop


@dataclass(frozen=True, slots=True)
class Probe:
    """What the engine says it serves: read back from its own tensors, not from the request."""

    sha256: str
    logprobs: tuple[tuple[float, ...], ...]
    """Per sequence, of every token but the first, at temperature 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A look at the engine's state; `cached` and `reserved` are of the key-value memory."""

    running: int
    waiting: int
    adapters: tuple[str, ...]
    prompt_tokens: int
    prefilled_tokens: int
    decoded_tokens: int
    """Tokens of answers that were read to sample the next: one for all samples that said the same."""
    sampled_tokens: int
    kv_budget_bytes: int
    kv_reserved_bytes: int
    kv_cached_bytes: int
    held_s: float
    """How long the last publish kept requests from being stepped."""


class Engine(Protocol):
    """What hone asks of whatever samples."""

    @property
    def failure(self) -> BaseException | None:
        """What broke the engine; None while it works. A broken engine never works again."""
        ...

    def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, adapter: AdapterRef | None = None
    ) -> AsyncIterator[Delta]:
        """Sample; closing the iterator early aborts the request. None is the base model."""
        ...

    async def publish(self, adapter: AdapterRef, directory: Path) -> None:
        """Load a PEFT adapter beside those already served; refuses one with another hash."""
        ...

    async def unload(self, adapter: AdapterRef) -> None:
        """Forget an adapter once no request uses it."""
        ...

    async def probe(
        self, sequences: Sequence[Sequence[int]], adapter: AdapterRef | None = None
    ) -> Probe:
        """Hash of the weights really served, and the log-probabilities they give."""
        ...

    def stats(self) -> EngineStats: ...

    async def sleep(self) -> None:
        """Stop stepping and free the key-value memory; requests wait."""
        ...

    async def wake(self) -> None: ...

    async def close(self) -> None:
        """End every request and free everything."""
        ...


async def complete(
    engine: Engine,
    prompt_ids: Sequence[int],
    sampling: Sampling,
    adapter: AdapterRef | None = None,
) -> list[Completion]:
    """All samples of one request, whole."""
    completions = [Completion() for _ in range(sampling.n)]
    async for delta in engine.generate(prompt_ids, sampling, adapter):
        completions[delta.sample].add(delta)
    return completions
