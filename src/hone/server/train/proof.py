"""Proof of publish: does the engine serve what the learner trained?

In:   the learner's Movement (as a mapping), the engine's probes before and after, the new hash
Out:  Proof, or NotProved

Learner and engine compute log-probabilities of the same tokens under the old and the new adapter.
If the engine really changed, its movements plotted against the learner's lie on a line through the
origin. The slope is one if both compute exactly. In bfloat16 it is less certain: the adapter's product
is added to a rounded output, so most of a small product is lost, and the engine may lose other parts
than the learner. There the slope only has to be clearly above zero and not far above one.
A movement that is not clearly larger than the rounding error proves nothing; then the hash, which
the engine computes from its own tensors, decides, and the verdict says so. An engine that cannot
read its tensors is proved by log-probabilities alone, or not at all; the verdict says which.
"""

import asyncio
import math
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

from hone.errors import NotProved, Unavailable
from hone.inference.base import Probe

SLOPE = (0.5, 1.5)
"""Bounds of the slope in float32."""
ROUNDED_SLOPE = (0.1, 2.0)
"""Bounds of the slope in bfloat16."""
ROUNDED = 1e-3
"""Logit noise above which learner or engine must be rounding; float32 has a hundredth of it."""
SIGMAS = 4.0
"""Number of standard errors by which a slope must exceed a bound to be clearly outside it."""
OUTLIER = 3.0
"""Movements are capped at this multiple of the median, so that no single token decides."""
MIN_NOISE = 1e-6
"""Smallest assumed noise of a float32 logprob, even if both sides agree bit for bit."""

Verdict = Literal["proved", "unprovable by logprob", "proved by logprob alone", "unproved"]
"""The first two verdicts rest on the hash, with or without log-probabilities; the others have no
hash."""
UNPROVED = (
    "the step is served, but not proved: this vLLM does not show its tensors, and the step moved "
    "log-probabilities less than rounding does"
)


@dataclass(frozen=True, slots=True)
class Proof:
    """Evidence that the engine serves the new step."""

    verdict: Verdict
    slope: float | None
    """Slope of the engine's movement against the learner's; None if noise hides it."""
    tokens: int
    """Number of tokens compared."""


def beginnings(movement: Mapping[str, Any], max_length: int) -> list[Sequence[int]]:
    """The sequences as far as the engine's context reaches; a job's calls may be longer."""
    return [ids[:max_length] for ids in movement["sequences"]]


async def probed(
    before: Awaitable[Probe], after: Awaitable[Probe], *, pause_s: float
) -> tuple[Probe, Probe]:
    """Both probes of the engine; raises Unavailable if other requests keep it from them."""
    try:
        async with asyncio.timeout(pause_s):
            old, new = await asyncio.gather(before, after)
            return old, new
    except TimeoutError:
        raise Unavailable(
            f"the engine did not compute the log-probabilities of the proof within {pause_s:g} s "
            "(pause_s); the job tries again. If requests of several models keep vLLM busy, raise "
            "engine_args.max_loras"
        ) from None


def prove(movement: Mapping[str, Any], before: Probe, after: Probe, sha256: str) -> Proof:
    """Raises NotProved if the engine serves anything but the adapter of this hash."""
    if after.sha256 is not None and after.sha256 != sha256:
        raise NotProved(
            f"the engine serves an adapter with hash {after.sha256[:16]}, not the trained one "
            f"({sha256[:16]}). The previous step stays served. Restart the server and send the job again."
        )
    tokens = _scored(movement["tokens"], before, after)
    others = _scored(movement.get("others", ()), before)
    old, new = _at(tokens, before), _at(tokens, after)
    if not all(map(math.isfinite, [*old, *new])):
        raise NotProved("the engine gives a probe token a logprob that is not finite")
    logit_noise = _logit_noise([*tokens, *others], before)
    noise = [_noise_of(token, logit_noise) for token in tokens]
    # In units of each token's noise, so that the standard error of the slope is 1 / sqrt(square).
    ours = [(t["after"] - t["before"]) / n for t, n in zip(tokens, noise, strict=True)]
    theirs = [(b - a) / n for a, b, n in zip(old, new, noise, strict=True)]
    most = max(SIGMAS, OUTLIER * median(map(abs, ours))) if ours else SIGMAS
    pairs = [_bounded(a, b, most) for a, b in zip(ours, theirs, strict=True)]
    square = sum(x * x for x, _ in pairs)
    # The part of the learner's movement that rounding cannot explain.
    real = max(0.0, 1 - len(tokens) / square) if square else 0.0
    unclear = Proof(
        "unproved" if after.sha256 is None else "unprovable by logprob", None, len(tokens)
    )
    if SLOPE[0] * real * math.sqrt(square) <= SIGMAS:
        return unclear
    slope = sum(x * y for x, y in pairs) / square
    error, (lowest, highest) = 1 / math.sqrt(square), SLOPE
    if logit_noise > ROUNDED:
        # The residuals count too: rounding errors are neither normal nor equal for all tokens.
        spread = math.sqrt(sum((x * (y - slope * x)) ** 2 for x, y in pairs)) / square
        error, (lowest, highest) = max(error, spread), ROUNDED_SLOPE
    if slope + SIGMAS * error < lowest or slope - SIGMAS * error > highest:
        raise NotProved(
            f"over {len(tokens)} trained tokens the engine moved {slope:.3g} times as far as the "
            f"learner, which must lie in [{lowest}, {highest}]"
            + (f", although the hash {sha256[:16]} is right" if after.sha256 else "")
            + ". The previous step stays served."
        )
    if slope <= SIGMAS * error:
        return unclear
    return Proof("proved" if after.sha256 else "proved by logprob alone", slope, len(tokens))


def _bounded(ours: float, theirs: float, most: float) -> tuple[float, float]:
    """A pair of movements scaled down together: the token's weight changes, not its slope."""
    shrink = min(1.0, most / abs(ours)) if ours else 1.0
    limit = OUTLIER * most
    return ours * shrink, max(-limit, min(theirs * shrink, limit))


def _scored(tokens: Iterable[Mapping[str, Any]], *probes: Probe) -> list[Mapping[str, Any]]:
    """The tokens that the engine scored."""
    return [t for t in tokens if all(t["place"] <= len(p.logprobs[t["sequence"]]) for p in probes)]


def _at(tokens: Iterable[Mapping[str, Any]], probe: Probe) -> list[float]:
    """The engine's logprobs of these tokens."""
    return [probe.logprobs[token["sequence"]][token["place"] - 1] for token in tokens]


def _logit_noise(known: Sequence[Mapping[str, Any]], before: Probe) -> float:
    """How much rounding moves a logit, estimated from the disagreement about the old policy.

    A logit moves the logprob of a token of probability p by 1 - p: a token that is almost certain
    shows no noise, however coarse the arithmetic.
    """
    old = _at(known, before)
    seen = sum((a - token["before"]) ** 2 for a, token in zip(old, known, strict=True))
    squares = [_uncertainty(token["before"]) ** 2 for token in known]
    weight = sum(squares)
    if weight == 0:
        return 0.0
    # With few uncertain tokens the estimate is unreliable, so it is raised.
    few = 1 + 4 * sum(d * d for d in squares) / weight**2
    return math.sqrt(few * seen / weight)


def _noise_of(token: Mapping[str, Any], logit_noise: float) -> float:
    """How far engine and learner may differ in the token's movement because of rounding."""
    uncertain = math.hypot(_uncertainty(token["before"]), _uncertainty(token["after"]))
    return math.hypot(logit_noise * uncertain, math.sqrt(2) * MIN_NOISE)


def _uncertainty(logprob: float) -> float:
    """1 - p."""
    return -math.expm1(min(logprob, 0.0))
