"""The proof of publish: slope, noise and hash, each with numbers worked out by hand."""

import math

import pytest

from hone.errors import NotProved
from hone.inference.base import Probe
from hone.server.proof import prove

NEW, OLD = "ab" * 32, "cd" * 32

# Two sequences of three tokens; the learner moved three of their tokens.
MOVED = [
    {"sequence": 0, "place": 1, "before": -2.0, "after": -1.9},  # +0.1
    {"sequence": 0, "place": 2, "before": -3.0, "after": -3.2},  # -0.2
    {"sequence": 1, "place": 2, "before": -1.0, "after": -0.8},  # +0.2
]
MOVEMENT = {"sequences": [[5, 6, 7], [8, 9, 10]], "tokens": MOVED}


def probe(values: tuple[float, float, float], sha256: str = NEW) -> Probe:
    """The engine's logprobs of the three tokens; -9 for the one nobody looks at."""
    return Probe(sha256, ((values[0], values[1]), (-9.0, values[2])))


BEFORE = probe((-2.0, -3.0, -1.0), OLD)


def test_an_engine_that_moved_as_the_learner_did():
    proof = prove(MOVEMENT, BEFORE, probe((-1.9, -3.2, -0.8)), NEW)
    assert (proof.verdict, proof.tokens) == ("proved", 3)
    assert proof.slope == pytest.approx(1.0)


def test_the_slope_is_that_of_least_squares_through_the_origin():
    # moved 0.1, -0.1, 0.2: (0.1*0.1 + 0.2*0.1 + 0.2*0.2) / (0.01 + 0.04 + 0.04) = 0.07 / 0.09
    proof = prove(MOVEMENT, BEFORE, probe((-1.9, -3.1, -0.8)), NEW)
    assert proof.slope == pytest.approx(7 / 9)


def test_an_engine_that_kept_the_old_adapter_under_the_new_hash():
    with pytest.raises(NotProved, match=r"over 3 trained tokens the engine moved 0 times as far"):
        prove(MOVEMENT, BEFORE, probe((-2.0, -3.0, -1.0)), NEW)


@pytest.mark.parametrize(
    ("times", "good"), [(-1, False), (0.45, False), (0.55, True), (1.45, True), (1.55, False)]
)
def test_the_slope_must_lie_between_a_half_and_one_and_a_half(times: float, good: bool):
    after = probe((-2.0 + times * 0.1, -3.0 - times * 0.2, -1.0 + times * 0.2))
    if good:
        assert prove(MOVEMENT, BEFORE, after, NEW).slope == pytest.approx(times)
    else:
        with pytest.raises(NotProved, match="must lie in"):
            prove(MOVEMENT, BEFORE, after, NEW)


def test_another_hash_is_refused_whatever_the_logprobs_say():
    with pytest.raises(NotProved, match=f"hash {OLD[:16]}, trained was {NEW[:16]}"):
        prove(MOVEMENT, BEFORE, probe((-1.9, -3.2, -0.8), OLD), NEW)


def test_a_movement_under_the_engines_noise_is_left_to_the_hash():
    # The learner moved by sqrt(0.09) = 0.3 in all. The engine differs from it by 0.04 at each
    # token: 4 sqrt(2) 0.04 = 0.226 is more than half of 0.3. By 0.02 it is 0.113, and less.
    for noise, verdict in ((0.04, "unprovable by logprob"), (0.02, "proved")):
        before = probe((-2.0 + noise, -3.0 - noise, -1.0 + noise), OLD)
        after = probe((-1.9 + noise, -3.2 - noise, -0.8 + noise))
        proof = prove(MOVEMENT, before, after, NEW)
        assert proof.verdict == verdict
        assert (proof.slope is None) == (verdict != "proved")


def test_nothing_moved():
    still = [{**token, "after": token["before"]} for token in MOVED]
    for tokens in (still, []):
        movement = {"sequences": MOVEMENT["sequences"], "tokens": tokens}
        proof = prove(movement, BEFORE, probe((-2.0, -3.0, -1.0)), NEW)
        assert (proof.verdict, proof.slope) == ("unprovable by logprob", None)
        with pytest.raises(NotProved):
            prove(movement, BEFORE, BEFORE, NEW)  # the hash decides


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_an_engine_whose_logprobs_are_no_numbers(value: float):
    with pytest.raises(NotProved, match="not finite"):
        prove(MOVEMENT, BEFORE, probe((-1.9, value, -0.8)), NEW)
