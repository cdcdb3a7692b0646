"""The state of a run, from its events alone, and what it does next."""

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from tests.finetune.runs import REST

from hone.config.schema import CurriculumLearningConfig, EarlyStoppingConfig, FinetuneConfig
from hone.evaluation.base import EvalInputItem
from hone.files.events import Event, parse
from hone.files.rollout_record import FailureRecord, RolloutRecord
from hone.finetune.journal import Journal
from hone.finetune.resume import (
    RunState,
    epoch_of,
    gave_nothing,
    known_rollouts,
    reason_to_stop,
    rounds_of,
)
from hone.report.history import Validation

ITEMS = [EvalInputItem(id=name, input_obj=name) for name in "abcd"]


def event(type: str, **fields: Any) -> Event:
    return parse({**REST.get(type, {}), "at": 0.0, "type": type, "round": 0, **fields})


def collected(epoch: int, trajectories: int = 4, filtered: int = 4, **fields: Any) -> Event:
    metrics = {"num_trajectories": trajectories, "filtered_trajectories": filtered}
    more = {"dropped": {}, "zero_variance_groups": 0, **fields}
    return event("epoch_collected", epoch=epoch, metrics=metrics, **more)


def done(epoch: int, step: int = 1) -> Event:
    return event("job_done", epoch=epoch, job=f"j{epoch}", step=step, metrics={}, seconds=0.0)


def test_a_round_is_over_when_it_was_trained_or_had_nothing_to_train_on():
    state = RunState(FinetuneConfig(), [collected(0), collected(1, filtered=0), collected(2, 0, 0)])
    assert [state.is_over(epoch, 0) for epoch in range(4)] == [False, True, True, False]
    state.add(done(0))
    assert state.is_over(0, 0) and not state.is_over(0, 1)


def test_a_round_that_gave_nothing_is_over_until_its_epoch_fails():
    state = RunState(FinetuneConfig(), [collected(0, 0, 0, dropped={"max_tokens": 3})])
    assert state.is_over(0, 0)
    state.add(event("epoch_done", epoch=0, status="failed", phases={}))
    assert not state.is_over(0, 0)  # the same command runs it again
    state.add(collected(0, 4, 4))
    assert not state.is_over(0, 0)
    state.add(done(0))
    assert state.is_over(0, 0)


def test_an_epoch_is_done_when_it_completed():
    ended = [
        event("epoch_done", epoch=e, status=s, phases={})
        for e, s in enumerate(("completed", "failed"))
    ]
    state = RunState(FinetuneConfig(), ended)
    assert [state.is_done(epoch) for epoch in range(3)] == [True, False, False]
    state.add(event("epoch_done", epoch=1, status="completed", phases={}))
    assert state.is_done(1)


def test_a_job_gets_a_new_key_after_each_failure():
    failed = [event("job_failed", epoch=1, round=2, message="")] * 2
    state = RunState(FinetuneConfig(), failed)
    assert [state.job_key("r", 1, round) for round in (2, 0)] == ["r:1:2:again2", "r:1:0"]


def validation(epoch: int, mean: float | None) -> Event:
    values = {"avg_reward": mean, "rewards": {"x": [mean]}, "failures": 0, "step": epoch}
    return event(
        "validation", epoch=epoch, **values, error=None if mean is not None else "all failed"
    )


def test_a_validation_that_failed_is_tried_again():
    state = RunState(FinetuneConfig(), [validation(0, None), validation(2, 0.5)])
    assert [state.is_validated(epoch) for epoch in range(3)] == [False, False, True]


def test_a_run_is_finished_when_it_completed_and_every_epoch_is_done_or_it_stopped_early():
    finished = event("run_finished", status="completed", message="", step=1, seconds=0)
    config = FinetuneConfig(early_stopping=EarlyStoppingConfig(patience=1))
    state = RunState(config, [event("epoch_done", epoch=0, status="completed", phases={})])
    assert not state.is_finished(1)
    state.add(finished)
    assert state.is_finished(1) and not state.is_finished(2)
    for epoch in (0, 1):
        state.add(validation(epoch, 0.5))
    assert state.is_finished(2)
    state.add(finished.model_copy(update={"status": "failed"}))
    assert not state.is_finished(1)


def test_examples_that_the_curriculum_skips_are_drawn_but_not_run():
    curriculum = CurriculumLearningConfig(enabled=True, skip_excluded=True)
    known = {"average": 0.1, "spread": 1.0, "epoch": 0, "excluded": True}
    snapshot = {"state": {}, "history": {"a": known, "b": {**known, "excluded": False}}}
    config = FinetuneConfig(curriculum_learning=curriculum, groups_per_step=2)
    state = RunState(config, [collected(0, curriculum=snapshot)])
    rounds = state.rounds(ITEMS, 1)
    assert sorted(id for visit in rounds for id in visit.drawn) == list("abcd")
    assert sorted(item.id for visit in rounds for item in visit.items) == list("bcd")
    assert [len(visit.drawn) for visit in rounds] == [2, 2]
    # What a round of this very epoch taught does not change its later rounds.
    worse = {"state": {}, "history": {"c": {**known, "epoch": 1}}}
    past = [collected(0, curriculum=snapshot), collected(1, curriculum=worse)]
    assert RunState(config, past).rounds(ITEMS, 1) == rounds


# ---- which examples, in which order --------------------------------------------------------------


EXAMPLES = list("abcdefg")


def test_an_epoch_is_every_example_once_in_an_order_of_its_own():
    first, second = (epoch_of(EXAMPLES, seed=1, epoch=e) for e in (0, 1))
    assert sorted(first) == sorted(second) == EXAMPLES
    assert first != second
    assert first == epoch_of(EXAMPLES, seed=1, epoch=0)
    assert first != epoch_of(EXAMPLES, seed=2, epoch=0)


def test_an_example_comes_again_only_when_all_were_seen():
    # 7 examples, 3 an epoch: the first 7 draws are epochs 0 and 1 and one of epoch 2.
    epochs = [epoch_of(EXAMPLES, seed=0, epoch=e, size=3) for e in range(14)]
    assert all(len(set(epoch)) == 3 for epoch in epochs)
    drawn = list(chain(*epochs))
    assert sorted(drawn[:7]) == EXAMPLES
    # 14 epochs of 3 are 42 draws, six times each of the seven.
    assert {drawn.count(example) for example in EXAMPLES} == {6}
    assert all(drawn.index(e) < 7 for e in EXAMPLES)


def test_a_size_above_the_number_of_examples_is_all():
    assert sorted(epoch_of(EXAMPLES, seed=0, epoch=3, size=99)) == EXAMPLES


def test_rounds_cut_an_epoch_in_order():
    assert rounds_of(EXAMPLES, 3) == [["a", "b", "c"], ["d", "e", "f"], ["g"]]
    assert rounds_of(EXAMPLES, None) == [EXAMPLES]
    assert rounds_of([], None) == []


# ---- which rollouts of a round are known ---------------------------------------------------------


WANTED = {("a", 0), ("a", 1), ("b", 0), ("b", 1)}


def ended(place: str, *, trained: bool = False, failed: str | None = None) -> RolloutRecord:
    """`a0` is generation 0 of example a."""
    return RolloutRecord(
        epoch=0,
        round=0,
        split="train",
        example=place[0],
        generation=int(place[1]),
        rollout=f"r:{place}",
        reward=1.0 if trained else None,
        trained_calls=["call-1"] if trained else None,
        failure=FailureRecord(kind=failed, reason="x") if failed else None,  # pyright: ignore[reportArgumentType] - one of two words
    )


POLICY = [ended(place, failed="policy") for place in ("a0", "a1", "b0", "b1")]


@pytest.mark.parametrize(
    ("records", "smallest", "nothing"),
    [
        (POLICY, 2, True),
        (POLICY[:3], 2, False),  # b1 has not ended: the round goes on
        ([*POLICY[:3], ended("b1", failed="infrastructure")], 2, True),
        ([*POLICY[:3], ended("b1", trained=True)], 2, True),  # a group of one is none
        ([*POLICY[:3], ended("b1", trained=True)], 1, False),
        ([*POLICY[:2], ended("b0", trained=True), ended("b1", trained=True)], 2, False),
        ([ended("a0"), ended("a1"), ended("b0"), ended("b1")], 2, True),  # it asked nobody
    ],
)
def test_a_round_that_gave_nothing(records: list[RolloutRecord], smallest: int, nothing: bool):
    assert gave_nothing(records, WANTED, smallest) is nothing


def known(directory: Path, *records: RolloutRecord) -> list[str]:
    with Journal.open(directory, {}) as journal:
        for record in records:
            journal.add(record)
        places = known_rollouts(journal, 0, 0, WANTED, smallest=2)
    return sorted(f"{example}{k}" for example, k in places)


def test_only_what_can_be_trained_is_kept_of_a_round_that_came_to_nothing(tmp_path: Path):
    assert known(tmp_path, *POLICY[:3]) == ["a0", "a1", "b0"]
    assert known(tmp_path, ended("b1", trained=True)) == ["b1"]
    # Run again, b0 gave something too: now there is a group, and a's failures are its result.
    assert known(tmp_path, ended("b0", trained=True)) == ["a0", "a1", "b0", "b1"]


# ---- early stopping ------------------------------------------------------------------------------


def measured(*means: float | None) -> list[Validation]:
    return [
        Validation(
            epoch=epoch,
            step=epoch,
            at=0.0,
            mean=mean,
            min=mean,
            max=mean,
            num_examples=1,
            failures=0,
            rewards={"a": [] if mean is None else [mean]},
            policy_failures=0,
            failure_reward=None,
            error="failed" if mean is None else None,
        )
        for epoch, mean in enumerate(means)
    ]


PATIENT = EarlyStoppingConfig(patience=2, min_delta=0.05)


def test_it_stops_after_as_many_validations_without_a_rise_as_it_has_patience():
    assert reason_to_stop(measured(0.3, 0.34), PATIENT) is None
    # 0.34 and 0.35 are no more than 0.05 above 0.3.
    reason = reason_to_stop(measured(0.3, 0.34, 0.35), PATIENT)
    assert reason == (
        "val/reward has not risen above 0.3000 by more than 0.05 in 2 validations "
        "(finetuning.early_stopping.patience: 2)"
    )


def test_a_rise_begins_the_wait_anew():
    assert reason_to_stop(measured(0.3, 0.2, 0.4, 0.4), PATIENT) is None


def test_a_failed_validation_does_not_count():
    assert reason_to_stop(measured(0.3, None, None, 0.2), PATIENT) is None
    assert reason_to_stop(measured(None, None, None), PATIENT) is None


def test_without_early_stopping_nothing_stops():
    assert reason_to_stop(measured(0.3, 0.1, 0.1, 0.1), None) is None
