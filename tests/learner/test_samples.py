"""Groups to samples: what is labelled, what is dropped and counted, what is refused."""

import math

import pytest
from tests.prose import Prose

from hone.errors import SampleRefused
from hone.learner.samples import Samples, make_samples
from hone.trajectory import Trajectory, TrajectoryGroup
from hone.types import Call, TrainConfig


def samples(*groups: TrajectoryGroup, vocab: int = 100, **config: object) -> Samples:
    settings = TrainConfig(**{"scale_rewards": False, **config})  # pyright: ignore[reportArgumentType]
    return make_samples(groups, settings, vocab=vocab, max_positions=1000)


def group(*trajectories: Trajectory) -> TrajectoryGroup:
    return TrajectoryGroup(trajectories=list(trajectories))


def one(reward: float, *calls: Call, shaped: list[float] | None = None) -> Trajectory:
    calls = calls or (Call(prompt_ids=[1, 2], completion_ids=[3, 4, 5], logprobs=[-1, -2, -3]),)
    return Trajectory(calls=list(calls), reward=reward, shaped_rewards=shaped)


def test_ids_logprobs_and_advantages_are_carried():
    result = samples(group(one(1.0), one(0.0)))
    first, second = result.samples
    (call,) = first.calls
    assert call.ids.tolist() == [1, 2, 3, 4, 5]
    assert (call.prompt, call.places.tolist(), call.temperature, call.exact) == (
        2,
        [0, 1, 2],
        1.0,
        True,
    )
    assert call.logprobs is not None and call.logprobs.tolist() == [-1, -2, -3]
    assert call.advantage == 0.5 and second.calls[0].advantage == -0.5
    assert result.groups == 1 and not result.dropped


def test_a_flat_group_gives_nothing_and_is_counted():
    result = samples(group(one(1.0), one(1.0)), group(one(0.0), one(1.0)))
    assert {s.group for s in result.samples} == {1}
    assert (result.flat_groups, result.groups) == (1, 1)
    assert result.dropped == {"flat_group": 6}


def test_a_call_keeps_the_step_that_answered_it():
    call = Call(prompt_ids=[1], completion_ids=[2], step=7)
    assert [s.calls[0].step for s in samples(group(one(1.0, call), one(0.0))).samples] == [7, 0]


def test_context_is_not_labelled():
    greedy = Call(prompt_ids=[1], completion_ids=[2, 3], temperature=0)
    foreign = Call(prompt_ids=[7000], completion_ids=[8000], trained=False)  # not our vocabulary
    forced = Call(prompt_ids=[1], completion_ids=[4, 5, 6], forced=[1])
    result = samples(group(one(1.0, greedy, foreign, forced), one(0.0, greedy)))
    (sample,) = result.samples
    (call,) = sample.calls
    assert call.places.tolist() == [0, 2]
    assert call.logprobs is None
    # greedy twice 2 tokens, foreign 1, forced 1
    assert result.dropped == {"temperature_0": 4, "not_trained": 1, "forced": 1}


def test_a_call_of_forced_tokens_or_of_nothing_has_no_label():
    empty = Call(prompt_ids=[1], completion_ids=[])
    forced = Call(prompt_ids=[1], completion_ids=[2], forced=[0])
    result = samples(group(one(1.0, empty, forced), one(0.0)))
    assert [s.trajectory for s in result.samples] == [1]


def test_a_long_rollout_is_dropped_whole_and_leaves_the_comparison():
    long = Call(prompt_ids=[1] * 6, completion_ids=[2])
    short = Call(prompt_ids=[1], completion_ids=[2])
    result = samples(
        group(one(9.0, short, long), one(1.0, short), one(0.0, short)), max_seq_length=6
    )
    # mean of the two that remain is 1/2
    assert [(s.trajectory, s.calls[0].advantage) for s in result.samples] == [(1, 0.5), (2, -0.5)]
    assert result.long_rollouts == 1 and result.dropped == {"too_long": 2}
    assert not samples(group(one(9.0, long), one(0.0, short)), max_seq_length=6).samples
    exact = samples(group(one(9.0, long), one(0.0, short)), max_seq_length=7)
    assert len(exact.samples) == 2


def test_per_call_credit_counts_trained_calls_only():
    a = Call(prompt_ids=[1], completion_ids=[2])
    context = Call(prompt_ids=[1], completion_ids=[2], trained=False)
    greedy = Call(prompt_ids=[1], completion_ids=[2], temperature=0)
    g = group(
        one(0.0, a, context, greedy, a, shaped=[1, 2, 4]), one(0.0, a, a, a, shaped=[3, 2, 0])
    )
    first, second = samples(g, credit="per_call").samples
    assert [c.advantage for c in first.calls] == [-1, 2]  # the greedy call's column is skipped
    assert [c.advantage for c in second.calls] == [1, 0, -2]
    # sums from each call on: 7 6 4 and 5 2 0
    first, second = samples(g, credit="return_to_go").samples
    assert [c.advantage for c in first.calls] == [1, 2]
    assert [c.advantage for c in second.calls] == [-1, -2, -2]


def test_batch_baseline_compares_across_groups():
    result = samples(group(one(1.0)), group(one(0.0)), group(one(2.0)), baseline="batch")
    assert [s.calls[0].advantage for s in result.samples] == [0, -1, 1]
    assert not samples(group(one(1.0)), group(one(1.0)), baseline="batch").samples


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_logprobs_are_refused(prose: Prose, bad: float):
    call = Call(prompt_ids=[1], completion_ids=[2, 3], logprobs=[-1.0, bad])
    with pytest.raises(SampleRefused) as caught:
        samples(group(one(1.0), one(0.0)), group(one(1.0), one(0.0, call, call.model_copy())))
    prose(caught)


@pytest.mark.parametrize(("prompt", "completion"), [([1, 100], [2]), ([1], [2, 100])])
def test_ids_outside_the_vocabulary_are_refused(
    prose: Prose, prompt: list[int], completion: list[int]
):
    call = Call(prompt_ids=prompt, completion_ids=completion)
    with pytest.raises(SampleRefused) as caught:
        samples(group(one(1.0), one(0.0, call)))
    prose(caught)


def test_credit_per_call_needs_shaped_rewards(prose: Prose):
    with pytest.raises(SampleRefused) as caught:
        samples(group(one(1.0), one(0.0)), credit="per_call")
    prose(caught)


def test_dr_grpo_does_not_divide_by_the_spread_unless_it_is_told_to():
    # mean 1, deviations 2, -1, -1; their root mean square is sqrt(2)
    three = group(one(3.0), one(0.0), one(0.0))

    def advantages(loss: str) -> list[float]:
        made = samples(three, scale_rewards=None, loss=loss)
        return [s.calls[0].advantage for s in made.samples]

    assert advantages("dr_grpo") == [2.0, -1.0, -1.0]
    divided = pytest.approx([2 / math.sqrt(2), -1 / math.sqrt(2), -1 / math.sqrt(2)], rel=1e-5)
    for loss in ("grpo", "dapo", "cispo"):
        assert advantages(loss) == divided
    # What is written is used as it stands, whatever the loss.
    written = samples(three, loss="dr_grpo", scale_rewards=True).samples
    assert [s.calls[0].advantage for s in written] == divided
    written = samples(three, loss="grpo", scale_rewards=False).samples
    assert [s.calls[0].advantage for s in written] == [2.0, -1.0, -1.0]
