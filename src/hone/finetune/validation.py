"""Run the policy on held-out examples, at one point of the run.

In:   an Evaluation of the validation set, the epochs of training behind it, the journal
Out:  the fields of a `validation` event: mean, bounds, rewards by example, failures, or an error

A rollout that failed through the model's own doing lowers the mean: left out, a policy that breaks
on half of the examples and solves the rest would score 1. A rollout that its environment failed
says nothing about the model and is left out; where too many did, the validation has no mean.
"""

import time
from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from hone.errors import RolloutError
from hone.finetune.base import RolloutRecord
from hone.finetune.records import record_of, rollout_id, told, worth, worth_another
from hone.finetune.stats import check_failures
from hone.report.text import counted
from hone.workflow.loop import ended_together

if TYPE_CHECKING:
    from hone.config.schema import FinetuneConfig
    from hone.evaluation.base import EvalInputItem
    from hone.evaluation.run import Evaluation
    from hone.events import EventLog
    from hone.finetune.journal import Journal
    from hone.report.history import History


async def validate(
    evaluation: "Evaluation",
    *,
    epoch: int,
    step: int | None,
    config: "FinetuneConfig",
    journal: "Journal",
    events: "EventLog",
    history: "History",
    final: bool = False,
) -> dict[str, Any]:
    """Every example `validation.reps` times; rollouts that ended before a kill are kept.

    `final`: `step` answers, which may be an earlier one, instead of the newest.
    """
    started, split = time.monotonic(), "final" if final else "val"
    known = journal.finished(split, epoch)
    wanted = [
        (place, item, rep)
        for place, item in enumerate(evaluation.items)
        for rep in range(config.validation.reps)
    ]
    events.append(
        "validation_started", epoch=epoch, rollouts=len(wanted), resumed=len(known), final=final
    )

    pinned = step if final else None

    async def rollout(place: int, item: "EvalInputItem", rep: int) -> RolloutRecord:
        if (item.id, rep) in known:
            return known[item.id, rep]
        record = await _run(evaluation, item, (epoch, place, rep), config, journal, pinned)
        journal.add(record)
        events.append("rollout", **told(record))
        return record

    records = await ended_together(rollout(*one) for one in wanted)
    where = (
        f"final validation of step {step}"
        if final
        else f"validation after {counted(epoch, 'epoch')}"
    )
    outcome = _outcome(records, where, config, history)
    answered = {s for record in records for s in record.policy_steps}  # those of helpers as well
    if final and answered and pinned not in answered and not outcome["error"]:
        outcome |= {"avg_reward": None, "error": f"{where}: step {max(answered)} answered instead"}
    return {"epoch": epoch, "step": step, **outcome, "seconds": time.monotonic() - started}


async def _run(
    evaluation: "Evaluation",
    item: "EvalInputItem",
    at: tuple[int, int, int],
    config: "FinetuneConfig",
    journal: "Journal",
    step: int | None,
) -> RolloutRecord:
    """One rollout, run again if its world failed it; `at` is epoch, place and repetition.

    `step`: of the policy in a final validation; None for the newest one.
    """
    epoch, place, rep = at
    split = "val" if step is None else "final"
    assert config.reward_function is not None, "a run without a reward was let through"
    reward = config.reward_function.name
    record = None
    for retry in range(config.rollout_retries + 1):
        rollout = rollout_id(
            journal.run_id,
            epoch=epoch,
            item=place,
            generation=rep,
            session=journal.session,
            retry=retry,
            split=split,
        )
        temperature = 0.0 if config.validation.greedy else None
        result = await evaluation.run_item(
            item, rollout=rollout, temperature=temperature, step=step, evaluators=[reward]
        )
        record = record_of(
            result, rollout=rollout, split=split, epoch=epoch, generation=rep, reward_name=reward
        )
        if not worth_another(record):
            break
    assert record is not None, config.rollout_retries
    return record.model_copy(update={"reward": worth(record, config)})


def _outcome(
    records: Sequence[RolloutRecord], where: str, config: "FinetuneConfig", history: "History"
) -> dict[str, Any]:
    rewards: dict[str, list[float | None]] = {}
    failed = Counter[str]()
    for record in records:
        rewards.setdefault(record.example, []).append(record.reward)
        if record.failure is not None and record.failure.kind == "policy":
            failed[record.example] += 1
    instead = config.on_policy_failure
    known = [record.reward for record in records if record.reward is not None]
    if instead == "drop" and failed:
        known += [min([history.failure_reward, *known])] * failed.total()
    error = None
    try:
        check_failures(records, where=where, allowed=config.max_infrastructure_failures)
        if not known:
            raise RolloutError(f"{where}: no rollout could be scored")
    except RolloutError as refused:
        error, known = str(refused), []
    return {
        "avg_reward": fmean(known) if known else None,
        "min_reward": min(known, default=None),
        "max_reward": max(known, default=None),
        "num_examples": len(rewards),
        "failures": sum(record.reward is None for record in records),
        "policy_failures": dict(failed),
        "on_policy_failure": instead if instead == "drop" else instead.reward,
        "rewards": rewards,
        "error": error,
    }
