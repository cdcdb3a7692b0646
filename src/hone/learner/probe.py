"""What a job moved most: the tokens by which a publisher can tell the new adapter from the old.

In:   the job's samples, the decoder, the adapter before and after
Out:  Movement: a few sequences, up to 32 of their tokens with both log-probabilities, and some
      more by which noise can be told
Used: learner/learner.py; the server compares the engine's answers with it before it publishes

Values are at temperature 1, whatever the call was sampled at, because that is what an engine
reports for a given sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hone.learner.forward import row_logprobs, twin
from hone.learner.samples import LabelledCall, Sample
from hone.learner.trie import pack
from hone.models.decoder import Decoder
from hone.models.lora import Lora

CALLS = 4
TOKENS = 320
"""The probe is two extra forward passes over so many calls and tokens (one call at least), here and
in the engine: on a CPU it was half of a small job's time with 512."""
OTHERS = 32
"""So many more tokens of the same calls are priced, whether they moved or not."""


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
    others: tuple[MovedToken, ...] = ()
    """Some more, prompts included, evenly spread: the moved ones are too few to tell from them how
    far two programs' arithmetic differs, and in bfloat16 that is as much as a small step moves."""


@dataclass(frozen=True, slots=True)
class ProbeCalls:
    """The calls that are looked at, labelled where their tokens are priced."""

    calls: tuple[LabelledCall, ...]
    trained: Tensor  # [M] bool, per label of the calls: whether the job trains it

    @classmethod
    def choose(cls, samples: Sequence[Sample]) -> "ProbeCalls":
        """Calls with the largest advantages, shorter ones first: those the step pushes hardest."""
        calls = [call for sample in samples for call in sample.calls if call.advantage != 0]
        calls.sort(key=lambda call: (-abs(call.advantage), len(call.ids)))
        chosen: list[LabelledCall] = []
        left = TOKENS
        for call in calls[:CALLS]:
            if not chosen or len(call.ids) <= left:
                chosen.append(call)
                left -= len(call.ids)
        watched = [_watched(call, OTHERS // len(chosen)) for call in chosen]
        trained = [torch.as_tensor(of_call) for _, of_call in watched]
        return cls(
            tuple(call for call, _ in watched),
            torch.cat(trained) if trained else torch.empty(0, dtype=torch.bool),
        )

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
        """The `limit` trained tokens that moved most, and the others."""
        where = [
            (i, call.prompt + int(p)) for i, call in enumerate(self.calls) for p in call.places
        ]

        def moved(labels: Tensor) -> tuple[MovedToken, ...]:
            return tuple(MovedToken(*where[i], float(before[i]), float(after[i])) for i in labels)

        trained, others = self.trained.nonzero()[:, 0], (~self.trained).nonzero()[:, 0]
        furthest = (after - before)[trained].abs().argsort(descending=True, stable=True)[:limit]
        sequences = tuple(tuple(call.ids.tolist()) for call in self.calls)
        return Movement(sequences, moved(trained[furthest]), moved(others))


def _watched(call: LabelledCall, others: int) -> tuple[LabelledCall, NDArray[np.bool_]]:
    """The call at temperature 1, labelled at its own places and at `others` more; which are its own."""
    own = call.prompt + call.places
    rest = np.setdiff1d(np.arange(1, len(call.ids)), own)
    spread = rest[np.linspace(0, len(rest) - 1, min(others, len(rest))).round().astype(int)]
    places = np.union1d(own, spread)
    labelled = replace(call, prompt=1, places=places - 1, logprobs=None, temperature=1.0)
    return labelled, np.isin(places, own)
