"""What the policy is worth on held-out examples, at one point of the run.

In:   an Evaluation of the validation set, the epochs of training behind it, the journal
Out:  the fields of a `validation` event: mean, bounds, rewards by example, failures, or an error
Used: trainer.py, before the first epoch, at each interval and at the end

A rollout that failed is no 0: it is counted, and where too many failed by no fault of the model
the validation has no mean at all and appears as a gap.
"""

import time
from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from hone.errors import RolloutError
from hone.finetune.base import RolloutRecord
from hone.finetune.records import record_of, rollout_id, told, worth, worth_another
from hone.finetune.stats import check_failures
from hone.workflow.loop import ended_together

if TYPE_CHECKING:
    from hone.config.schema import FinetuneConfig
    from hone.evaluation.base import EvalInputItem
    from hone.evaluation.run import Evaluation
    from hone.events import EventLog
    from hone.finetune.journal import Journal


async def validate(
    evaluation: "Evaluation",
    *,
    epoch: int,
    step: int | None,
    config: "FinetuneConfig",
    journal: "Journal",
    events: "EventLog",
) -> dict[str, Any]:
    """Every example `validation.reps` times; rollouts that ended before a kill are kept."""
    started = time.monotonic()
    known = journal.finished("val", epoch)
    wanted = [
        (place, item, rep)
        for place, item in enumerate(evaluation.items)
        for rep in range(config.validation.reps)
    ]
    events.append("validation_started", epoch=epoch, rollouts=len(wanted), resumed=len(known))

    async def rollout(place: int, item: "EvalInputItem", rep: int) -> RolloutRecord:
        if (item.id, rep) in known:
            return known[item.id, rep]
        record = await _run(evaluation, item, (epoch, place, rep), config, journal)
        journal.add(record)
        events.append("rollout", **told(record))
        return record

    records = await ended_together(rollout(*one) for one in wanted)
    outcome = _outcome(records, f"validation after {epoch} epochs", config)
    return {"epoch": epoch, "step": step, **outcome, "seconds": time.monotonic() - started}


async def _run(
    evaluation: "Evaluation",
    item: "EvalInputItem",
    at: tuple[int, int, int],
    config: "FinetuneConfig",
    journal: "Journal",
) -> RolloutRecord:
    """One rollout, run again if its world failed it; `at` is epoch, place and repetition."""
    epoch, place, rep = at
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
            split="val",
        )
        temperature = 0.0 if config.validation.greedy else None
        result = await evaluation.run_item(
            item, rollout=rollout, temperature=temperature, evaluators=[reward]
        )
        record = record_of(
            result, rollout=rollout, split="val", epoch=epoch, generation=rep, reward_name=reward
        )
        if not worth_another(record):
            break
    assert record is not None, config.rollout_retries
    return record.model_copy(update={"reward": worth(record, config)})


def _outcome(
    records: Sequence[RolloutRecord], where: str, config: "FinetuneConfig"
) -> dict[str, Any]:
    rewards: dict[str, list[float | None]] = {}
    for record in records:
        rewards.setdefault(record.example, []).append(record.reward)
    known = [record.reward for record in records if record.reward is not None]
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
        "rewards": rewards,
        "error": error,
    }
