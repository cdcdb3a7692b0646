"""The metrics files of a run.

In:   the RunHistory of a run
Out:  training_metrics.jsonl, reward_history.json, validation_history.json, curriculum_state.json

Each file is written whole from the history in memory, and then renamed: a run that was killed and
resumed has files without a gap and without a line twice. Three of them are JSON documents that hold
all epochs, so the bytes written per round grow with the run; nothing is read for them.
"""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hone.files.disk import write_atomic
from hone.report.history import Round, RunHistory


def write(output_dir: Path, history: RunHistory) -> None:
    """Write the files; those about validations and the curriculum only if there are any."""
    rounds, run_id = history.rounds, history.run.run_id or None
    lines = [json.dumps(_line(r, run_id)) + "\n" for r in rounds]
    write_atomic(output_dir / "training_metrics.jsonl", "".join(lines))
    states = [r.collected.curriculum_state for r in rounds if r.collected]
    curriculum = [state for state in states if state]
    for name, value in {
        "reward_history": reward_history(history),
        "validation_history": validation_history(history) or None,
        "curriculum_state": curriculum[-1] if curriculum else None,
    }.items():
        if value is not None:
            write_atomic(output_dir / f"{name}.json", json.dumps(value, indent=2) + "\n")


def reward_history(history: RunHistory) -> list[dict[str, Any]]:
    """One entry per epoch. Rounds of an epoch are averaged by their number of trajectories."""
    return [epoch_entry(epoch, history.rounds_of(epoch)) for epoch in history.epochs]


def epoch_entry(epoch: int, rounds: Sequence[Round]) -> dict[str, Any]:
    """The numbers of an epoch over all of its rounds; there is at least one."""
    last = rounds[-1]
    return {
        "epoch": epoch,
        "timestamp": last.collected and _timestamp(last.collected.at),
        "avg_reward": _average(rounds, "avg_reward", "num_trajectories"),
        "min_reward": min(_known(rounds, "min_reward"), default=None),
        "max_reward": max(_known(rounds, "max_reward"), default=None),
        "num_trajectories": sum(_known(rounds, "num_trajectories")),
        "filtered_avg_reward": _average(rounds, "filtered_avg_reward", "filtered_trajectories"),
        "curriculum_percentile": last.metrics.get("curriculum_percentile", 1.0),
    }


def validation_history(history: RunHistory) -> list[dict[str, Any]]:
    """One entry per validation; a failed one has no reward and says why."""
    return [
        {
            "epoch": v.epoch,
            "timestamp": _timestamp(v.at),
            "avg_reward": v.mean,
            "min_reward": v.min,
            "max_reward": v.max,
            "num_examples": v.num_examples,
            "step": v.step,
            "failures": v.failures,
            "policy_failures": v.policy_failures,
            "failure_rate": v.failure_rate,
            "failure_reward": v.failure_reward,
            "error": v.error,
        }
        for v in history.validations
    ]


def _line(r: Round, run_id: str | None) -> dict[str, Any]:
    collected = r.collected
    assert collected is not None, r
    line = {"epoch": r.epoch, "timestamp": _timestamp(collected.at), "run_id": run_id} | r.metrics
    if collected.curriculum_state:
        line["curriculum_state"] = collected.curriculum_state
    if r.of > 1:
        line["round"] = r.index
    line["zero_variance_groups"] = collected.zero_variance_groups
    line["dropped"] = dict(r.dropped)
    job = {
        key: getattr(r.job, key, None) for key in ("job", "step", "reason", "message", "seconds")
    }
    return line | {key: value for key, value in job.items() if value is not None} | r.learned


def _timestamp(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat()


def _known(rounds: Sequence[Round], key: str) -> list[Any]:
    return [r.metrics[key] for r in rounds if r.metrics.get(key) is not None]


def _average(rounds: Sequence[Round], key: str, count: str) -> float | None:
    weighed = [r for r in rounds if r.metrics.get(key) is not None and r.metrics.get(count)]
    total = sum(_known(weighed, count))
    return sum(r.metrics[key] * r.metrics[count] for r in weighed) / total if total else None
