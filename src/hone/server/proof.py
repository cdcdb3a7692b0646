"""Proof of publish: does the engine serve what the learner trained?

In:   the learner's Movement (as a mapping), what the engine says before and after, the new hash
Out:  Proof, or NotProved
Used: service.py, before a step gets its number

Both sides priced the same tokens under the old and the new adapter. If the engine really changed,
its movements lie on a line through the origin against the learner's, with slope one. A movement
that drowns in the difference between the two programs' arithmetic proves nothing either way; then
the hash alone decides, which the engine reads back from its own tensors, and the verdict says so.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hone.errors import NotProved
from hone.inference.base import Probe

SLOPE = (0.5, 1.5)
SIGMAS = 4.0
"""The slope must be known so many standard errors better than SLOPE is wide."""
LEAST_NOISE = 1e-6
"""Of a logprob in float32, even where both sides happened to agree to the bit."""

Verdict = Literal["proved", "unprovable by logprob"]


@dataclass(frozen=True, slots=True)
class Proof:
    """How it is known that the engine serves the new step."""

    verdict: Verdict
    slope: float | None
    """Of the engine's movement against the learner's; None where noise hides it."""
    tokens: int
    """How many tokens were compared."""


def prove(movement: Mapping[str, Any], before: Probe, after: Probe, sha256: str) -> Proof:
    """Raises NotProved where the engine answers with anything but the adapter of this hash."""
    if after.sha256 != sha256:
        raise NotProved(
            f"the engine serves an adapter with hash {after.sha256[:16]}, trained was "
            f"{sha256[:16]}. The step before stays served. Restart the server and send the job again."
        )
    tokens = movement["tokens"]
    places = [(token["sequence"], token["place"] - 1) for token in tokens]
    old = [before.logprobs[sequence][place] for sequence, place in places]
    new = [after.logprobs[sequence][place] for sequence, place in places]
    if not all(map(math.isfinite, [*old, *new])):
        raise NotProved("the engine gives a probe token a logprob that is not finite")
    ours = [token["after"] - token["before"] for token in tokens]
    theirs = [b - a for a, b in zip(old, new, strict=True)]
    noise = _noise([a - token["before"] for a, token in zip(old, tokens, strict=True)])
    length = math.sqrt(sum(x * x for x in ours))
    # A movement is the difference of two noisy values; over the tokens its slope's standard
    # error is sqrt(2) * noise / length.
    if length * (SLOPE[1] - SLOPE[0]) / 2 < SIGMAS * math.sqrt(2) * noise:
        return Proof("unprovable by logprob", None, len(tokens))
    slope = sum(x * y for x, y in zip(ours, theirs, strict=True)) / length**2
    if not SLOPE[0] <= slope <= SLOPE[1]:
        raise NotProved(
            f"over {len(tokens)} trained tokens the engine moved {slope:.3g} times as far as the "
            f"learner, which must lie in [{SLOPE[0]}, {SLOPE[1]}], although the hash "
            f"{sha256[:16]} is right. The step before stays served."
        )
    return Proof("proved", slope, len(tokens))


def _noise(differences: list[float]) -> float:
    """How far engine and learner disagree about one policy, as a root mean square."""
    if not differences:
        return LEAST_NOISE
    mean = sum(x * x for x in differences) / len(differences)
    return max(math.sqrt(mean), LEAST_NOISE)
