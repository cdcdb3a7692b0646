"""Where a run stands, from its events alone."""

from typing import Any

from hone.config.schema import CurriculumLearningConfig, EarlyStoppingConfig, FinetuneConfig
from hone.evaluation.base import EvalInputItem
from hone.events import Event, parse
from hone.finetune.resume import RunState

ITEMS = [EvalInputItem(id=name, input_obj=name) for name in "abcd"]


def event(type: str, **fields: Any) -> Event:
    return parse({"at": 0.0, "type": type, "round": 0, **fields})


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
    assert state.last_job(0) == done(0)
    assert state.last_job(1) is None
    assert [state.collected(epoch) for epoch in range(4)] == [4, 4, 0, 0]


def test_a_round_that_gave_nothing_is_over_until_its_epoch_fails():
    state = RunState(FinetuneConfig(), [collected(0, 0, 0, dropped={"max_tokens": 3})])
    assert state.is_over(0, 0) and state.dropped(0) == {"max_tokens": 3}
    state.add(event("epoch_done", epoch=0, status="failed", phases={}))
    assert not state.is_over(0, 0)  # the same command runs it again
    state.add(collected(0, 4, 4))
    assert not state.is_over(0, 0)
    state.add(done(0))
    assert state.is_over(0, 0)


def test_an_epoch_is_done_when_it_was_closed_well():
    ended = [
        event("epoch_done", epoch=e, status=s, phases={})
        for e, s in enumerate(("completed", "failed"))
    ]
    state = RunState(FinetuneConfig(), ended)
    assert [state.is_done(epoch) for epoch in range(3)] == [True, False, False]
    state.add(event("epoch_done", epoch=1, status="completed", phases={}))
    assert state.is_done(1)


def test_failed_jobs_are_counted_by_round():
    failed = [event("job_failed", epoch=1, round=2, message="")] * 2
    state = RunState(FinetuneConfig(), failed)
    assert (state.failed_jobs(1, 2), state.failed_jobs(1, 0)) == (2, 0)


def validation(epoch: int, mean: float | None) -> Event:
    told = {"avg_reward": mean, "rewards": {"x": [mean]}, "failures": 0, "step": epoch}
    return event(
        "validation", epoch=epoch, **told, error=None if mean is not None else "all failed"
    )


def test_a_validation_that_failed_is_tried_again():
    state = RunState(FinetuneConfig(), [validation(0, None), validation(2, 0.5)])
    assert [state.is_validated(epoch) for epoch in range(3)] == [False, False, True]


def test_it_is_finished_when_it_said_so_and_every_epoch_is_done_or_it_stopped_early():
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


def test_examples_the_curriculum_spares_are_drawn_but_not_run():
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
    state.add(collected(1, curriculum=worse))
    assert state.rounds(ITEMS, 1) == rounds
