"""The metrics files of a run.

In:   the History of a run
Out:  training_metrics.jsonl, reward_history.json, validation_history.json, curriculum_state.json

Each file is written whole from the history in memory, and then renamed: a run that was killed and
resumed has files without a gap and without a line twice. Three of them are JSON documents that hold
all epochs, so the bytes written per round grow with the run; nothing is read for them.
"""

import json
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hone.report.history import History, Round

TRAINING, REWARDS = "training_metrics.jsonl", "reward_history.json"
VALIDATIONS, CURRICULUM = "validation_history.json", "curriculum_state.json"


def write(output_dir: Path, history: History) -> None:
    """Write the files; those about validations and the curriculum only if there are any."""
    rounds, run_id = history.rounds, history.run.run_id or None
    lines = [json.dumps(_line(r, run_id)) + "\n" for r in rounds]
    replace(output_dir / TRAINING, "".join(lines))
    replace(output_dir / REWARDS, _indented(reward_history(history)))
    if history.validations:
        replace(output_dir / VALIDATIONS, _indented(validation_history(history)))
    states = [r.collected.curriculum_state for r in rounds if r.collected]
    if known := [state for state in states if state]:
        replace(output_dir / CURRICULUM, _indented(known[-1]))


def replace(path: Path, content: str | bytes) -> None:
    """Write a file whole or not at all: somebody may be reading it."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    beside.write_bytes(content.encode() if isinstance(content, str) else content)
    beside.replace(path)


def reward_history(history: History) -> list[dict[str, Any]]:
    """One entry per epoch. Rounds of an epoch are averaged by their number of trajectories."""
    return [_entry(epoch, history.rounds_of(epoch)) for epoch in history.epochs]


def _entry(epoch: int, rounds: Sequence[Round]) -> dict[str, Any]:
    last = rounds[-1]
    return {
        "epoch": epoch,
        "timestamp": last.collected and _timestamp(last.collected.at),
        "avg_reward": _average(rounds, "avg_reward", "num_trajectories"),
        "min_reward": _extreme(min, rounds, "min_reward"),
        "max_reward": _extreme(max, rounds, "max_reward"),
        "num_trajectories": sum(r.metrics.get("num_trajectories") or 0 for r in rounds),
        "filtered_avg_reward": _average(rounds, "filtered_avg_reward", "filtered_trajectories"),
        "curriculum_percentile": last.metrics.get("curriculum_percentile", 1.0),
    }


def validation_history(history: History) -> list[dict[str, Any]]:
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
    line["dropped"] = collected.dropped
    for key in ("job", "step", "reason", "message", "seconds"):
        if (value := getattr(r.job, key, None)) is not None:
            line[key] = value
    return line | r.learned


def _timestamp(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat()


def _indented(value: Any) -> str:
    return json.dumps(value, indent=2) + "\n"


def _average(rounds: Sequence[Round], key: str, count: str) -> float | None:
    known = [r.metrics for r in rounds if r.metrics.get(key) is not None]
    total = sum(m.get(count) or 0 for m in known)
    return sum(m[key] * (m.get(count) or 0) for m in known) / total if total else None


def _extreme(pick: Callable[..., Any], rounds: Iterable[Round], key: str) -> float | None:
    values = (r.metrics.get(key) for r in rounds)
    return pick((value for value in values if value is not None), default=None)
