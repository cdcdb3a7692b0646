"""What a job moved most: the tokens by which a publisher can tell the new adapter from the old.

In:   the job's samples, the decoder, the adapter before and after
Out:  Movement: a few sequences and up to 32 of their tokens with both log-probabilities
Used: learner/learner.py; the server compares the engine's answers with it before it publishes

Values are at temperature 1, whatever the call was sampled at, because that is what an engine
reports for a given sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hone.learner.forward import row_logprobs, twin
from hone.learner.samples import LabelledCall, Sample
from hone.learner.trie import pack
from hone.models.decoder import Decoder
from hone.models.lora import Lora

CALLS = 4
TOKENS = 512
"""The probe is two extra forward passes over so many calls and tokens (one call at least)."""


@dataclass(frozen=True, slots=True)
class MovedToken:
    """`sequences[sequence][place]`, given what stands before it."""

    sequence: int
    place: int
    before: float
    after: float


@dataclass(frozen=True, slots=True)
class Movement:
    """Trained tokens and how far their log-probabilities went, furthest first."""

    sequences: tuple[tuple[int, ...], ...]
    tokens: tuple[MovedToken, ...]


@dataclass(frozen=True, slots=True)
class ProbeCalls:
    """The calls that are looked at."""

    calls: tuple[LabelledCall, ...]

    @classmethod
    def choose(cls, samples: Sequence[Sample]) -> "ProbeCalls":
        """Calls with the largest advantages, shorter ones first: those the step pushes hardest."""
        calls = [call for sample in samples for call in sample.calls if call.advantage != 0]
        calls.sort(key=lambda call: (-abs(call.advantage), len(call.ids)))
        chosen: list[LabelledCall] = []
        left = TOKENS
        for call in calls[:CALLS]:
            if not chosen or len(call.ids) <= left:
                chosen.append(replace(call, temperature=1.0))
                left -= len(call.ids)
        return cls(tuple(chosen))

    def logprobs(self, decoder: Decoder, lora: Lora) -> Tensor:
        """Of every label of the calls, in their order, under this adapter."""
        if not self.calls:
            return torch.empty(0, dtype=torch.float64)
        batch = pack([Sample(0, 0, self.calls)], row_tokens=TOKENS)
        values = torch.empty(len(batch.labels), dtype=torch.float64)
        for row in batch.rows:
            priced, _ = row_logprobs(decoder, row, batch.labels, twin(lora))
            values[row.label] = priced.double().cpu()
        return values

    def movement(self, before: Tensor, after: Tensor, *, limit: int) -> Movement:
        """The `limit` tokens that moved most."""
        where = [
            (i, call.prompt + int(p)) for i, call in enumerate(self.calls) for p in call.places
        ]
        furthest = (after - before).abs().argsort(descending=True, stable=True)[:limit]
        return Movement(
            tuple(tuple(call.ids.tolist()) for call in self.calls),
            tuple(MovedToken(*where[i], float(before[i]), float(after[i])) for i in furthest),
        )
