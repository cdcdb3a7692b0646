"""Packed groups: the identity, another format, and the small size of a shared prompt."""

import math
import random
import zlib

import pytest
from tests.prose import Prose

from hone.errors import StateError
from hone.learner.packed import pack_groups, unpack_groups
from hone.trajectory import Trajectory, TrajectoryGroup
from hone.types import Call


def random_call(draw: random.Random) -> Call:
    def ids(least: int) -> list[int]:
        most = draw.choice([2, 2**31])  # few different ones, so that calls have common prefixes
        return [draw.randrange(most) for _ in range(draw.randint(least, 6))]

    completion = ids(0)
    logprobs = [draw.choice([-0.1, -1e-300, -math.inf, draw.random()]) for _ in completion]
    return Call(
        prompt_ids=ids(1),
        completion_ids=completion,
        logprobs=draw.choice([None, logprobs]),
        exact=draw.random() < 0.5,
        function=draw.choice(["", "a/\u00e9"]),
    )


@pytest.mark.parametrize("seed", range(50))
def test_unpacking_gives_what_was_packed(seed: int):
    draw = random.Random(seed)
    groups = [
        TrajectoryGroup(
            [
                Trajectory(calls=[random_call(draw) for _ in range(draw.randint(0, 3))], reward=0.5)
                for _ in range(draw.randint(0, 3))
            ],
            example="a",
        )
        for _ in range(draw.randint(0, 3))
    ]
    again = unpack_groups(pack_groups(groups))
    assert [g.model_dump() for g in again] == [g.model_dump() for g in groups]


def test_nan_is_kept_for_the_learner_to_refuse():
    call = Call(prompt_ids=[1], completion_ids=[2], logprobs=[math.nan])
    (group,) = unpack_groups(pack_groups([TrajectoryGroup([Trajectory(calls=[call])])]))
    assert group.trajectories[0].calls[0].logprobs is not None
    assert math.isnan(group.trajectories[0].calls[0].logprobs[0])


def test_another_format_is_refused(prose: Prose):
    with pytest.raises(StateError) as caught:
        unpack_groups(b"hone-groups-9\n" + zlib.compress(b"[]"))
    prose(caught)


def test_a_prompt_is_stored_once_for_all_of_its_rollouts_and_turns():
    draw = random.Random(0)

    def some(count: int) -> list[int]:
        return [draw.randrange(2**17) for _ in range(count)]

    system = some(1000)
    rollouts = []
    for _ in range(8):
        first, answer = system + some(20), some(10)
        second = first + answer + some(20)
        made = [(first, answer), (second, some(10))]
        rollouts.append(
            [Call(prompt_ids=p, completion_ids=c, logprobs=[-1.0] * 10) for p, c in made]
        )
    packed = pack_groups([TrajectoryGroup([Trajectory(calls=calls) for calls in rollouts])])
    # 1,000 ids once, then 60 for each of the eight rollouts, four bytes each before compression.
    assert len(packed) < 4 * (1000 + 8 * 60) + 1000
