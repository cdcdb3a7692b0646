"""The learner's probe: log-probabilities of some of a job's tokens, before and after it.

In:   the job's samples, the model, the adapter before and after
Out:  Movement: a few sequences, their trained tokens with both log-probabilities, and some others
      that show the noise

A publisher compares them with the engine's, to tell the new adapter from the old one. Values are at
temperature 1, whatever the call was sampled at, because an engine reports these for a sequence.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hone.learner.body import Body, as_body
from hone.learner.forward import row_logprobs
from hone.learner.samples import LabelledCall, Sample
from hone.learner.trie import pack
from hone.models.decoder import Decoder
from hone.models.lora import Lora
from hone.wire.conversation import common_prefix

Ints = NDArray[np.int64]

OTHERS = 32
"""Number of other tokens of the same calls that are scored, whether they moved or not."""


@dataclass(frozen=True, slots=True)
class Reach:
    """How much the probe computes: two more forward passes, here and in the engine."""

    calls: int
    tokens: int
    """Maximum tokens of all calls together, with shared prefixes counted once; at least one
    call."""
    scored: int = 512
    """The same, with every call counted whole: vLLM scores sequences without its prefix cache."""
    context: int | None = None
    """Tokens before the first trained one; None for all of them."""
    span: int | None = None
    """Tokens from the first trained one on; None for all to the end."""
    longest: int | None = None
    """Tokens of one call: an engine that scores a sequence holds all its logits at once."""


WHOLE = Reach(calls=4, tokens=320, longest=384)
SHORT = Reach(calls=4, tokens=96, context=24, span=24)
"""In a window tokens move half as far as in their whole context. In float32 that is still sixty times
the numerical difference of two programs (SmolLM2, learning rate 1e-5), for a third of the work. In
bfloat16 that difference is as large as a step's movement, so calls are scored whole, up to 384 tokens:
while vLLM scores them, running requests wait (Qwen2.5-3B on one H200: 0.06 s; 0.1 s for 512 tokens)."""


@dataclass(frozen=True, slots=True)
class MovedToken:
    """The token `sequences[sequence][place]`, with its log-probability before and after the job."""

    sequence: int
    place: int
    before: float
    after: float


@dataclass(frozen=True, slots=True)
class Movement:
    """Tokens with their log-probabilities before and after."""

    sequences: tuple[tuple[int, ...], ...]
    tokens: tuple[MovedToken, ...]
    """All trained tokens. Those that moved furthest would be those with the largest rounding error."""
    others: tuple[MovedToken, ...] = ()
    """Other tokens, prompts included, evenly spread. They show the numerical difference of learner and
    engine, which in bfloat16 is as large as a small step's movement."""


@dataclass(frozen=True, slots=True)
class ProbeCalls:
    """The calls of the probe, with labels at the tokens to score."""

    calls: tuple[LabelledCall, ...]
    trained: Tensor  # [M] bool, per label of the calls: whether the job trains it

    @classmethod
    def choose(cls, samples: Sequence[Sample], dtype: torch.dtype) -> "ProbeCalls":
        """The calls with the largest advantages, shorter ones first."""
        reach = SHORT if dtype in (torch.float32, torch.float64) else WHOLE
        calls = [call for sample in samples for call in sample.calls if call.advantage != 0]
        calls.sort(key=lambda call: (-abs(call.advantage), len(call.ids)))
        chosen: list[_Window] = []
        left, unscored = reach.tokens, reach.scored
        for call in calls[: 4 * reach.calls]:
            window = _Window.cut(call, reach, [other.ids for other in chosen])
            if len(chosen) == reach.calls or left <= 0:
                break
            length = len(window.ids)
            fits = length - window.known <= left and length <= unscored
            if len(window.own) and (not chosen or fits):
                chosen.append(window)
                left -= length - window.known
                unscored -= length
        watched = [
            window.watched(extra) for window, extra in zip(chosen, _spread(chosen), strict=True)
        ]
        trained = [torch.as_tensor(of_call) for _, of_call in watched]
        return cls(
            tuple(call for call, _ in watched),
            torch.cat(trained) if trained else torch.empty(0, dtype=torch.bool),
        )

    @torch.no_grad()
    def logprobs(self, model: Decoder | Body, lora: Lora, lengths: Collection[int] = ()) -> Tensor:
        """Log-probabilities of all labels of the calls, in order, under this adapter.

        `lengths` of the job's rows: the probe's rows are padded like the shortest that is no shorter,
        so that nothing is compiled for the probe alone.
        """
        if not self.calls:
            return torch.empty(0, dtype=torch.float64)
        body = as_body(model)
        batch = pack([Sample(0, 0, self.calls)], row_tokens=WHOLE.tokens, shared=not body.unshared)
        values = torch.empty(len(batch.labels), dtype=torch.float64)
        for row in batch.rows:
            like = min((length for length in lengths if length >= len(row)), default=0)
            scored, _ = row_logprobs(body, row, batch.labels, lora, like=like)
            values[row.label] = scored.double().cpu()
        return values

    def movement(self, before: Tensor, after: Tensor) -> Movement:
        where = [
            (i, call.prompt + int(p)) for i, call in enumerate(self.calls) for p in call.places
        ]

        def moved(labels: Tensor) -> tuple[MovedToken, ...]:
            return tuple(MovedToken(*where[i], float(before[i]), float(after[i])) for i in labels)

        trained, others = self.trained.nonzero()[:, 0], (~self.trained).nonzero()[:, 0]
        sequences = tuple(tuple(call.ids.tolist()) for call in self.calls)
        return Movement(sequences, moved(trained), moved(others))


@dataclass(frozen=True, slots=True)
class _Window:
    """Part of a call, scored without the tokens before it."""

    call: LabelledCall
    ids: Ints
    own: Ints  # places of the window that the job trains and no other window has
    known: int
    """Length of the prefix it shares with another window."""

    @classmethod
    def cut(cls, call: LabelledCall, reach: Reach, others: Sequence[Ints]) -> "_Window":
        own = call.prompt + call.places
        first = int(own[0])
        start = 0 if reach.context is None else max(0, first - reach.context)
        stop = len(call.ids) if reach.span is None else first + reach.span
        if reach.longest is not None and stop - start > reach.longest:
            stop = min(stop, first + reach.longest // 3)
            start = max(0, stop - reach.longest)
        ids = call.ids[start:stop]
        known = max((common_prefix(ids.data, other.data) for other in others), default=0)
        own = own[own < stop] - start
        return cls(call, ids, own[own >= known], known)

    @property
    def rest(self) -> Ints:
        """Places that are not trained and belong to no other window."""
        return np.setdiff1d(np.arange(max(1, self.known), len(self.ids)), self.own)

    def watched(self, extra: Ints) -> tuple[LabelledCall, NDArray[np.bool_]]:
        """A call at temperature 1 with labels at its own places and `extra`, and which are its own."""
        places = np.union1d(self.own, extra)
        labelled = replace(
            self.call, ids=self.ids, prompt=1, places=places - 1, logprobs=None, temperature=1.0
        )
        return labelled, np.isin(places, self.own)


def _spread(windows: Sequence[_Window]) -> list[Ints]:
    """OTHERS places that are not trained, evenly from all windows."""
    rests = [window.rest for window in windows]
    total = sum(map(len, rests))
    picked = np.linspace(0, total - 1, min(OTHERS, total)).round().astype(int)
    ends = np.cumsum([len(rest) for rest in rests])
    return [
        rest[picked[(picked >= end - len(rest)) & (picked < end)] - (end - len(rest))]
        for rest, end in zip(rests, ends, strict=True)
    ]
