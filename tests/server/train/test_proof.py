"""The proof of publish: slope, noise and hash, each with numbers worked out by hand."""

import asyncio
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.patience import PATIENCE_S
from tests.prose import Prose
from tests.server.small_server import SmallServer, spec, token_groups

from hone.errors import NotProved
from hone.inference.base import Probe
from hone.inference.embedded.engine import EmbeddedEngine
from hone.models.decoder import Decoder
from hone.server.train.proof import prove

NEW, OLD = "ab" * 32, "cd" * 32

# Two sequences of three tokens; the learner moved three of their tokens.
MOVED = [
    {"sequence": 0, "place": 1, "before": -2.0, "after": -1.9},  # +0.1
    {"sequence": 0, "place": 2, "before": -3.0, "after": -3.2},  # -0.2
    {"sequence": 1, "place": 2, "before": -1.0, "after": -0.8},  # +0.2
]
MOVEMENT = {"sequences": [[5, 6, 7], [8, 9, 10]], "tokens": MOVED}


def probe(values: tuple[float, float, float], sha256: str | None = NEW) -> Probe:
    """The engine's logprobs of the three tokens; -9 for the one nobody looks at."""
    return Probe(sha256, ((values[0], values[1]), (-9.0, values[2])))


BEFORE = probe((-2.0, -3.0, -1.0), OLD)


def test_an_engine_that_moved_as_the_learner_did():
    proof = prove(MOVEMENT, BEFORE, probe((-1.9, -3.2, -0.8)), NEW)
    assert (proof.verdict, proof.tokens) == ("proved", 3)
    assert proof.slope == pytest.approx(1.0)


def test_a_token_that_the_engine_cannot_score_does_not_count():
    """The last one of a sequence as long as vLLM's context."""
    movement = {**MOVEMENT, "others": [{"sequence": 0, "place": 2, "before": -9.0, "after": -9.0}]}
    before = Probe(OLD, ((-2.0,), (-9.0, -1.0)))
    proof = prove(movement, before, Probe(NEW, ((-1.9,), (-9.0, -0.8))), NEW)
    assert (proof.verdict, proof.tokens) == ("proved", 2)
    assert proof.slope == pytest.approx(1.0)


def test_the_slope_is_that_of_least_squares_through_the_origin():
    # moved 0.1, -0.1, 0.2: (0.1*0.1 + 0.2*0.1 + 0.2*0.2) / (0.01 + 0.04 + 0.04) = 0.07 / 0.09
    proof = prove(MOVEMENT, BEFORE, probe((-1.9, -3.1, -0.8)), NEW)
    assert proof.slope == pytest.approx(7 / 9)


def test_an_engine_that_kept_the_old_adapter_under_the_new_hash(prose: Prose):
    with pytest.raises(NotProved) as caught:
        prove(MOVEMENT, BEFORE, probe((-2.0, -3.0, -1.0)), NEW)
    prose(caught)


@pytest.mark.parametrize(
    ("times", "good"), [(-1, False), (0.45, False), (0.55, True), (1.45, True), (1.55, False)]
)
def test_the_slope_must_lie_between_a_half_and_one_and_a_half(
    prose: Prose, times: float, good: bool
):
    after = probe((-2.0 + times * 0.1, -3.0 - times * 0.2, -1.0 + times * 0.2))
    if good:
        assert prove(MOVEMENT, BEFORE, after, NEW).slope == pytest.approx(times)
    else:
        with pytest.raises(NotProved) as caught:
            prove(MOVEMENT, BEFORE, after, NEW)
        prose(caught)


def test_another_hash_is_refused_whatever_the_logprobs_say(prose: Prose):
    with pytest.raises(NotProved) as caught:
        prove(MOVEMENT, BEFORE, probe((-1.9, -3.2, -0.8), OLD), NEW)
    prose(caught, old=OLD[:16], new=NEW[:16])


def test_a_movement_under_the_engines_noise_is_left_to_the_hash():
    # 1 - p of the three tokens is 0.865, 0.950, 0.632 before and 0.850, 0.959, 0.551 after. The
    # engine differs by 0.01 at each: 3 * 0.01^2 / (0.748 + 0.903 + 0.400) = 1.463e-4 is the square
    # of the logits' noise, and 2.46 times that where three tokens tell it (1 + 4 * 1.535 / 4.206).
    # Each movement's square noise: 3.60e-4 * (0.748 + 0.723) = 5.29e-4, and 6.56e-4, 2.53e-4; times
    # the squares moved, 0.01, 0.04, 0.04: 4.17e-5, whose root is 0.00645. Four times that is under
    # half of 0.09; with 0.02 instead of 0.01 it is 0.0516, and more.
    for noise, verdict in ((0.02, "unprovable by logprob"), (0.01, "proved")):
        before = probe((-2.0 + noise, -3.0 - noise, -1.0 + noise), OLD)
        after = probe((-1.9 + noise, -3.2 - noise, -0.8 + noise))
        proof = prove(MOVEMENT, before, after, NEW)
        assert proof.verdict == verdict
        assert (proof.slope is None) == (verdict != "proved")


def test_tokens_that_say_nothing_do_not_hide_the_noise(prose: Prose):
    """Seen on a GPU in bfloat16: engine and learner agreed by chance on what the job moved most."""
    moved = [(-0.4971, -0.9976), (-1.2869, -1.152), (-1.105, -1.1506), (-0.0025, -0.0032)]
    before = [-0.5512, -1.319, -1.0585, -0.0025]
    after = [-0.7573, -1.152, -0.9095, -0.0037]
    tokens = [
        {"sequence": 0, "place": i + 1, "before": b, "after": a} for i, (b, a) in enumerate(moved)
    ]
    others = [(-2.1, -2.25), (-1.4, -1.22), (-3.0, -3.1), (-0.7, -0.79), (-0.001, -0.001)]
    sequence = {"sequences": [list(range(10))], "tokens": tokens}
    logprobs = [*before, *(theirs for _, theirs in others)]
    old, new = Probe(OLD, (tuple(logprobs),)), Probe(NEW, ((*after, *logprobs[4:]),))
    known = [
        {"sequence": 0, "place": i + 5, "before": ours, "after": ours}
        for i, (ours, _) in enumerate(others)
    ]
    assert prove({**sequence, "others": known}, old, new, NEW).verdict == "unprovable by logprob"
    # Where the others agree to the digit, the same four tokens are what they look like.
    agreed = [
        {**token, "before": t, "after": t} for token, t in zip(known, logprobs[4:], strict=True)
    ]
    still = [{**token, "before": b} for token, b in zip(tokens, before, strict=True)]
    new = Probe(NEW, ((-0.7, *after[1:], *logprobs[4:]),))
    with pytest.raises(NotProved) as caught:
        prove({**sequence, "tokens": still, "others": agreed}, old, new, NEW)
    prose(caught)


def test_tokens_that_are_all_but_certain_have_little_noise():
    # p is 1 - 1e-4 before and 0.5 after: a difference of 1e-5 before is one of 0.05 after.
    token = {"sequence": 0, "place": 1, "before": -1e-4, "after": math.log(0.5)}
    movement = {"sequences": [[1, 2]], "tokens": [token]}
    old = Probe(OLD, ((-1.1e-4,),))
    # sqrt(5) * 0.1 * 0.5 = 0.11 of noise: four times that is more than half of the 0.69 moved.
    assert prove(movement, old, Probe(NEW, ((-0.9,),)), NEW).verdict == "unprovable by logprob"


def test_nothing_moved():
    still = [{**token, "after": token["before"]} for token in MOVED]
    for tokens in (still, []):
        movement = {"sequences": MOVEMENT["sequences"], "tokens": tokens}
        proof = prove(movement, BEFORE, probe((-2.0, -3.0, -1.0)), NEW)
        assert (proof.verdict, proof.slope) == ("unprovable by logprob", None)
        with pytest.raises(NotProved):
            prove(movement, BEFORE, BEFORE, NEW)  # the hash decides


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_an_engine_whose_logprobs_are_no_numbers(prose: Prose, value: float):
    with pytest.raises(NotProved) as caught:
        prove(MOVEMENT, BEFORE, probe((-1.9, value, -0.8)), NEW)
    prose(caught)


def test_an_engine_that_shows_no_tensors_is_proved_by_logprobs_alone(prose: Prose):
    moved = probe((-1.9, -3.2, -0.8), None)
    proof = prove(MOVEMENT, BEFORE, moved, NEW)
    assert (proof.verdict, proof.slope) == ("proved by logprob alone", pytest.approx(1.0))
    with pytest.raises(NotProved) as caught:
        prove(MOVEMENT, BEFORE, probe((-2.0, -3.0, -1.0), None), NEW)
    prose(caught)
    still = [{**token, "after": token["before"]} for token in MOVED]
    proof = prove({**MOVEMENT, "tokens": still}, BEFORE, moved, NEW)
    assert (proof.verdict, proof.slope) == ("unproved", None)


# The first step of examples/02_tool_calls on a GPU, in bfloat16: the learner's logprobs before and
# after, as recorded, and those of an engine that adds the product of the adapter to an output that
# is rounded already, as vLLM does. In float32 the same step moves the tokens 0.83 times as far.
FIRST_STEP = [
    (-0.09, -0.0213, -0.0907, -0.0569),
    (-0.0009, -0.0004, -0.0008, -0.0006),
    (-0.0009, -0.0007, -0.0009, -0.0007),
    (-0.0017, -0.0011, -0.0019, -0.0016),
    (-8.3232, -10.0057, -8.5593, -8.925),
    (-2.2559, -2.4917, -2.2475, -2.3966),
    (-2.9495, -3.3182, -3.039, -3.1115),
    (-0.0425, -0.0405, -0.0438, -0.0421),
    (-6.0151, -6.0643, -6.0353, -6.0057),
    (-0.6739, -0.763, -0.6347, -0.6376),
    (-2.9842, -3.2687, -3.0694, -3.0422),
    (-0.0437, -0.055, -0.0471, -0.0465),
    (-6.4894, -6.9326, -6.6226, -6.7073),
    (-0.1291, -0.1461, -0.1093, -0.1639),
    (-2.3578, -2.8697, -2.3657, -2.5893),
    (-0.5121, -0.4827, -0.5016, -0.5113),
    (-0.0003, -0.0003, -0.0004, -0.0003),
    (-8.2836, -9.3073, -8.2009, -8.4969),
    (-0.3042, -0.0827, -0.3246, -0.173),
    (-0.0041, -0.002, -0.0042, -0.0032),
    (-0.0022, -0.0018, -0.0023, -0.0019),
    (-0.0063, -0.0051, -0.0076, -0.007),
    (-1.3954, -1.2333, -1.509, -1.3782),
    (-0.1155, -0.097, -0.1135, -0.108),
    (-0.0002, -0.0001, -0.0002, -0.0002),
    (-0.4375, -0.229, -0.5174, -0.3112),
    (-0.0049, -0.003, -0.0049, -0.0035),
    (-0.0454, -0.0357, -0.0419, -0.0419),
    (-0.0914, -0.0618, -0.0754, -0.0768),
    (-0.0292, -0.0217, -0.0275, -0.0232),
    (-0.1557, -0.1137, -0.1764, -0.1405),
    (-0.0823, -0.0364, -0.0724, -0.0567),
    (-0.2667, -0.0616, -0.3319, -0.1524),
    (-0.0024, -0.001, -0.0022, -0.0016),
    (-0.0008, -0.0006, -0.0007, -0.0008),
    (-0.0026, -0.0019, -0.0027, -0.0024),
    (-0.8133, -0.4116, -0.902, -0.6459),
    (-0.0595, -0.0429, -0.0636, -0.0497),
    (-0, -0, -0.0001, -0),
    (-0.396, -0.1759, -0.3663, -0.276),
    (-0.0005, -0.0004, -0.0007, -0.0005),
    (-0.0061, -0.0052, -0.0067, -0.006),
    (-0.1425, -0.0497, -0.1839, -0.1046),
    (-0.1251, -0.0528, -0.132, -0.1),
    (-0.0246, -0.0148, -0.0288, -0.0177),
    (-0.2437, -0.0517, -0.2995, -0.1277),
    (-0.0022, -0.001, -0.0025, -0.0013),
    (-0.0008, -0.0006, -0.0007, -0.0005),
    (-0.0023, -0.0016, -0.0023, -0.0019),
    (-0.5544, -0.2088, -0.5349, -0.3808),
    (-0.053, -0.034, -0.0539, -0.0502),
    (-0, -0, -0, -0),
    (-0.3807, -0.1665, -0.4078, -0.3188),
    (-0.0004, -0.0003, -0.0004, -0.0004),
    (-0.0033, -0.0024, -0.0034, -0.0031),
    (-0.0676, -0.0415, -0.0731, -0.0616),
    (-0.0011, -0.0009, -0.001, -0.001),
    (-0.005, -0.002, -0.0049, -0.0034),
    (-0.0096, -0.0065, -0.0097, -0.0076),
]
NOT_TRAINED = [  # the learner's logprobs and the engine's, before
    (-7.8412, -7.7631),
    (-0.3179, -0.3608),
    (-6.095, -6.3661),
    (-1.1596, -1.1188),
    (-0.1466, -0.1385),
    (-8.5305, -8.5641),
    (-4.918, -4.814),
    (-1.7901, -1.8416),
    (-0.065, -0.0639),
    (-0.8463, -0.9252),
    (-0.18, -0.1475),
    (-0.0055, -0.0057),
    (-0.0003, -0.0003),
    (-5.7168, -5.839),
    (-0.0015, -0.0012),
    (-0.0136, -0.0156),
    (-2.0235, -2.0293),
    (-0.0011, -0.0012),
    (-0.186, -0.2024),
    (-0.0031, -0.003),
    (-0.0007, -0.0009),
    (-0.0716, -0.0675),
    (-1.2579, -1.3337),
    (-0.0015, -0.0013),
    (-0.0578, -0.0547),
    (-0, -0),
    (-1.8546, -1.8422),
    (-0.2937, -0.2881),
    (-8.3853, -8.4073),
    (-0.0005, -0.0004),
    (-0.3463, -0.3448),
    (-0.0004, -0.0004),
]


@pytest.mark.parametrize("sha256", [NEW, None])
def test_a_first_step_that_rounding_hides_in_part_is_proved(sha256: str | None):
    tokens = [
        {"sequence": 0, "place": i + 1, "before": before, "after": after}
        for i, (before, after, _, _) in enumerate(FIRST_STEP)
    ]
    others = [
        {"sequence": 1, "place": i + 1, "before": before, "after": before}
        for i, (before, _) in enumerate(NOT_TRAINED)
    ]
    movement = {"sequences": [], "tokens": tokens, "others": others}
    rest = tuple(theirs for _, theirs in NOT_TRAINED)
    old = Probe(OLD, (tuple(row[2] for row in FIRST_STEP), rest))
    new = Probe(sha256, (tuple(row[3] for row in FIRST_STEP), rest))
    proof = prove(movement, old, new, NEW)
    assert proof.verdict == ("proved" if sha256 else "proved by logprob alone")
    assert proof.slope == pytest.approx(0.55, abs=0.02)
    stale = prove(movement, old, Probe(sha256, old.logprobs), NEW)
    assert stale.verdict == ("unprovable by logprob" if sha256 else "unproved")


@pytest.mark.parametrize("tokens", [8, 20, 300])
@pytest.mark.parametrize("times_noise", [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0])
def test_rounding_is_no_reason_to_refuse_a_right_step(tokens: int, times_noise: float):
    """Both programs round on their own, and the engine may lose a part of the movement by it.

    On a GPU, right steps had slopes of 0.38, 0.47, 0.47 and 0.48, and of 1.62 over eight tokens.
    """
    generator = np.random.default_rng([tokens, int(10 * times_noise)])
    verdicts = {"right": set[str](), "part": set[str](), "stale": set[str]()}
    for _ in range(100):
        count = tokens + 32  # the others do not move
        logprobs = -generator.exponential(1.5, count)
        uncertain = -np.expm1(logprobs)
        moves = generator.normal(0, 0.03 * times_noise, count) * uncertain
        moves[tokens:] = 0

        def rounded(values: Any, uncertain: Any = uncertain) -> Any:
            error = generator.standard_t(4, len(values)) * 0.03 * uncertain
            return np.minimum(values + error, 0)

        learner, old = (rounded(logprobs), rounded(logprobs + moves)), rounded(logprobs)
        known = [
            {"sequence": 0, "place": i + 1, "before": float(b), "after": float(a)}
            for i, (b, a) in enumerate(zip(*learner, strict=True))
        ]
        movement = {"sequences": [[0]], "tokens": known[:tokens], "others": known[tokens:]}
        right, part = rounded(logprobs + moves), rounded(logprobs + 0.4 * moves)
        for engine, new in (("right", right), ("part", part), ("stale", old)):
            before, after = (Probe(NEW, (tuple(map(float, values)),)) for values in (old, new))
            try:
                verdicts[engine].add(prove(movement, before, after, NEW).verdict)
            except NotProved:
                verdicts[engine].add("refused")
    assert "refused" not in verdicts["right"] | verdicts["part"]
    assert "proved" not in verdicts["stale"]
    if tokens == 300 and times_noise == 10:  # and where the movement is clear, it is seen
        assert verdicts == {"right": {"proved"}, "part": {"proved"}, "stale": {"refused"}}


@pytest.mark.parametrize(
    ("times", "good"), [(1, True), (0.2, False), (0.05, False), (3, False), (10, False)]
)
def test_certain_tokens_do_not_hide_how_far_the_others_moved(
    prose: Prose, times: float, good: bool
):
    """Late in a supervised job most tokens are all but certain, and move next to nothing."""
    generator = np.random.default_rng(0)
    doubts = np.where(
        np.arange(40) < 26, 10 ** generator.uniform(-6, -3, 40), generator.uniform(0.05, 0.6, 40)
    )
    logits = generator.normal(0, 0.2, 40)

    def moved(factor: float) -> list[float]:
        exact = np.log1p(-doubts) + factor * logits * doubts
        return (exact + generator.normal(0, 1e-5, 40) * doubts).tolist()

    learner, old, new = (moved(0), moved(1)), moved(0), moved(times)
    tokens = [
        {"sequence": 0, "place": i + 1, "before": b, "after": a}
        for i, (b, a) in enumerate(zip(*learner, strict=True))
    ]
    movement = {"sequences": [[0] * 41], "tokens": tokens}
    before, after = Probe(OLD, (tuple(old),)), Probe(NEW, (tuple(new),))
    if good:
        assert prove(movement, before, after, NEW).slope == pytest.approx(1, abs=0.01)
    else:
        with pytest.raises(NotProved) as caught:
            prove(movement, before, after, NEW)
        prose(caught)


async def test_a_proof_that_other_requests_hold_up_is_tried_again(
    prose: Prose, tiny_model: Path, tmp_path: Path
):
    class Held(EmbeddedEngine):
        holds = True

        async def probe(
            self, sequences: Any, adapter: Any = None, *, with_hash: bool = True
        ) -> Probe:
            if Held.holds and with_hash:  # of the new step
                await asyncio.Event().wait()
            return await super().probe(sequences, adapter, with_hash=with_hash)

    def held(name: str) -> Held:
        return Held(Decoder.load(Path(name)), kv_budget_bytes=1 << 24)

    root = tmp_path / "hone"
    async with SmallServer.started(root, open_engine=held, pause_s=0.5) as server:
        job = server.submit(server.models.register(spec(tiny_model)), token_groups())
        server.service.wake()
        async with asyncio.timeout(PATIENCE_S):
            while (why := server.jobs.get(job.id).waiting_for) is None:
                last = server.jobs.events(job.id, limit=-1)[-1].id
                await server.jobs.wait_event(job.id, last, 1.0)
        prose(why)
        Held.holds = False
        ended = await server.ended(job.id)
    assert (ended.state, ended.step, ended.attempts) == ("done", 1, 1)


async def test_an_engine_with_a_shorter_context_scores_what_it_can(
    tiny_model: Path, tmp_path: Path
):
    """vLLM's max_model_len may be below the length of a job's calls, which another server sampled."""

    class Short(EmbeddedEngine):
        @property
        def max_length(self) -> int:
            return 4

    def short(name: str) -> Short:
        return Short(Decoder.load(Path(name)), kv_budget_bytes=1 << 24)

    async with SmallServer.started(tmp_path / "hone", open_engine=short) as server:
        job = server.submit(server.models.register(spec(tiny_model)), token_groups())
        server.service.wake()
        ended = await server.ended(job.id)
        proof = next(e.data for e in server.jobs.events(job.id) if e.type == "proved")
    assert (ended.state, ended.step) == ("done", 1), ended.failure
    assert proof["verdict"] == "proved" and proof["tokens"] > 0
