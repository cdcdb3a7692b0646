"""report/history.py and metrics.py: events to numbers and files; why a reward stays flat."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from tests.finetune.runs import REST, STORIES, Story, events

from hone.files.events import parse
from hone.report import metrics
from hone.report.history import RunHistory
from hone.report.metrics import reward_history

Line = dict[str, Any]

KEYS = [
    "avg_reward",
    "min_reward",
    "max_reward",
    "num_trajectories",
    "num_groups",
    "filtered_trajectories",
    "filtered_groups",
    "filtered_avg_reward",
    "filtered_min_reward",
    "filtered_max_reward",
    "curriculum_percentile",
]


def history_of(lines: Iterable[Line]) -> RunHistory:
    return RunHistory.of(map(parse, lines))


def started(at: float = 0.0, **more: Any) -> Line:
    facts = {"run_id": "art_run_1", "session": 1, "epochs": 5, "step": 0, "generations": 8}
    return {"at": at, "type": "run_started"} | facts | more


def rollout(epoch: int, example: str, generation: int, reward: float | None, **more: Any) -> Line:
    place = {"epoch": epoch, "round": 0, "example": example, "generation": generation}
    rest = {"failure_kind": None, "tokens": 10}
    event = {"at": epoch + 0.5, "type": "rollout", "split": "train", "reward": reward}
    return REST["rollout"] | event | place | rest | more


def collected(epoch: int, average: float | None, *, round: int = 0, **more: Any) -> Line:
    n = more.pop("n", 10)
    numbers = {
        "avg_reward": average,
        "min_reward": more.pop("low", 0.0),
        "max_reward": more.pop("high", 1.0),
        "num_trajectories": n,
        "num_groups": more.pop("groups", 5),
        "filtered_trajectories": n,
        "filtered_avg_reward": average,
        "curriculum_percentile": more.pop("share", 1.0),
    }
    event = REST["epoch_collected"] | {"at": epoch + 0.6, "type": "epoch_collected"}
    event |= {"epoch": epoch, "round": round}
    return event | {"metrics": numbers, "dropped": {}, "zero_variance_groups": 0} | more


def job(epoch: int, *, reason: str = "", **learned: float) -> Line:
    event = {"at": epoch + 0.8, "type": "job_done", "epoch": epoch, "round": 0, "job": f"j{epoch}"}
    names = {f"learn/{name}": value for name, value in learned.items()}
    return event | {"step": epoch + 1, "metrics": names, "reason": reason, "seconds": 0.2}


def flat_run(per_epoch: list[dict[str, list[float]]], **facts: Any) -> list[Line]:
    """Epochs of (example -> rewards), each with a job."""
    log = [started(**facts)]
    for epoch, groups in enumerate(per_epoch):
        values = [r for g in groups.values() for r in g]
        flat = sum(min(g) == max(g) for g in groups.values())
        for example, rewards in groups.items():
            log += [rollout(epoch, example, i, r) for i, r in enumerate(rewards)]
        average = sum(values) / len(values)
        log.append(collected(epoch, average, groups=len(groups), zero_variance_groups=flat))
        rate = facts.get("learning_rate", 5e-5)
        log.append(job(epoch, optimizer_steps=1, clip_frac=0.02, learning_rate=rate))
    return log


# ---- history --------------------------------------------------------------------------------------


def test_what_happened_twice_counts_once_and_its_time_twice():
    log = [
        started(0.0),
        rollout(
            0, "a", 0, None, at=5.0, failure_kind="infrastructure", failure_reason="connection"
        ),
        rollout(0, "b", 0, 0.2, at=10.0),
        started(1000.0, session=2),
        started_epoch(1001.0),
        rollout(0, "a", 0, 1.0, at=1002.0),
        collected(0, 0.6, at=1004.0),
    ]
    history = history_of(log)
    assert history.rewards(0) == {"a": [1.0], "b": [0.2]}
    assert history.failures == {}
    # 10 s in the first session, 4 s in the second; the 990 s between them were not spent.
    assert history.seconds == 14.0
    assert history.resumed_at == [0.0]
    assert (history.rollouts, history.calls, history.tokens) == (3, 3, 30)
    assert history.status == "unfinished"


def started_epoch(at: float, epoch: int = 0) -> Line:
    event = {"at": at, "type": "epoch_started", "epoch": epoch, "round": 0, "rounds": 1, "step": 0}
    return REST["epoch_started"] | event | {"rollouts": 2}


def test_phases_add_up_to_the_time_since_the_command():
    done = {"at": 80.0, "type": "epoch_done", "epoch": 0, "status": "completed"}
    validation = {"at": 85.0, "type": "validation", "epoch": 1, "step": 1, "avg_reward": 0.5}
    log = [
        started(10.0, began=2.0),
        {"at": 13.0, "type": "preflight", "checks": []},
        started_epoch(14.0),
        collected(0, 0.5, at=54.0),
        job(0) | {"at": 74.0},
        done | {"phases": {}},
        REST["validation_started"]
        | {"at": 80.0, "type": "validation_started", "epoch": 1, "rollouts": 1},
        validation | {"rewards": {"a": [0.5]}, "failures": 0, "seconds": 5.0},
        {"at": 90.0, "type": "run_finished", "status": "completed", "message": "", "step": 1}
        | {"seconds": 88.0},
    ]
    history = history_of(log)
    # The command was given at 2, the server answered at 10, the first rollout began at 14.
    assert history.seconds == 88.0
    # 88 - 12 - 40 - 20 - 5 = 11
    assert history.phases == {
        "start_s": 12.0,
        "rollout_s": 40.0,
        "learn_s": 20.0,
        "validate_s": 5.0,
        "other_s": 11.0,
    }


def test_an_epoch_that_never_ended_took_its_time_too():
    log = [
        started(1.0, began=0.0),
        started_epoch(2.0),
        collected(0, 0.5, at=32.0),
        {
            "at": 33.0,
            "type": "job_submitted",
            "epoch": 0,
            "round": 0,
            "job": "j",
            "trajectories": 8,
            "groups": 2,
            "dropped": {},
        },
        {"at": 43.0, "type": "run_interrupted"},
    ]
    # 2 s of start, rollouts from 2 to 32, the job from 32 to 43.
    expected = {
        "start_s": 2.0,
        "rollout_s": 30.0,
        "learn_s": 11.0,
        "validate_s": 0.0,
        "other_s": 0.0,
    }
    assert history_of(log).phases == expected
    # Started again at 103 by a command of 100, it finds its job and ends it.
    done = {"at": 110.0, "type": "epoch_done", "epoch": 0, "status": "completed"}
    log += [
        started(103.0, began=100.0, session=2),
        collected(0, 0.5, at=104.0),
        {
            "at": 105.0,
            "type": "job_submitted",
            "epoch": 0,
            "round": 0,
            "job": "j",
            "trajectories": 8,
            "groups": 2,
            "dropped": {},
        },
        job(0) | {"at": 109.0},
        done | {"phases": {}},
    ]
    history = history_of(log)
    # 43 s and 10 s. Start 2 + 4, learning 11 + 5, and one second after the job.
    expected = {
        "start_s": 6.0,
        "rollout_s": 30.0,
        "learn_s": 16.0,
        "validate_s": 0.0,
        "other_s": 1.0,
    }
    assert history.seconds == 53.0 and history.phases == expected


@pytest.mark.parametrize("name", STORIES)
def test_the_numbers_of_every_simulated_run_add_up(name: str):
    history = RunHistory.of(events(STORIES[name]))
    assert sum(history.phases.values()) == pytest.approx(history.seconds)
    assert [r.epoch for r in history.rounds] == sorted(r.epoch for r in history.rounds)
    assert len({(r.epoch, r.index) for r in history.rounds}) == len(history.rounds)


# ---- files ----------------------------------------------------------------------------------------


def test_the_files_hold_the_keys_of_the_originals_in_order(tmp_path: Path):
    log = list(events(Story(epochs=6, curriculum=True, interval=2, failed_validations=(2,))))
    metrics.write(tmp_path, RunHistory.of(log))
    lines = [json.loads(x) for x in (tmp_path / "training_metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [0, 1, 2, 3, 4, 5]
    assert list(lines[0])[:14] == ["epoch", "timestamp", "run_id", *KEYS]
    assert lines[5]["curriculum_state"]["current_percentile"] == 0.5
    assert lines[0]["learn/learning_rate"] == 5e-5
    assert lines[0]["timestamp"].startswith("2025-10-09T")
    rewards = json.loads((tmp_path / "reward_history.json").read_text())
    assert [entry["curriculum_percentile"] for entry in rewards] == [0.3] * 5 + [0.5]
    assert rewards[0]["filtered_avg_reward"] > rewards[0]["avg_reward"]
    validations = json.loads((tmp_path / "validation_history.json").read_text())
    assert [v["epoch"] for v in validations] == [0, 2, 4, 6]
    assert validations[1]["avg_reward"] is None  # a failure is not a reward of 0
    assert validations[1]["error"] == "connection refused"
    state = json.loads((tmp_path / "curriculum_state.json").read_text())
    assert state["last_expansion_epoch"] == 5


def test_a_resumed_run_has_the_files_of_one(tmp_path: Path):
    log = list(events(Story(epochs=6, killed_at=(2, 4))))
    for count in range(0, len(log), 97):  # written now and then, as a run does
        metrics.write(tmp_path, RunHistory.of(log[:count]))
    metrics.write(tmp_path, RunHistory.of(log))
    lines = [json.loads(x) for x in (tmp_path / "training_metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [0, 1, 2, 3, 4, 5]
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "reward_history.json",
        "training_metrics.jsonl",
        "validation_history.json",
    ]


def test_an_epoch_without_trajectories_has_its_line_and_no_reward():
    (entry,) = reward_history(history_of([started(), collected(0, None, n=0, low=None, high=None)]))
    assert entry["avg_reward"] is None and entry["min_reward"] is None
    assert entry["num_trajectories"] == 0


def test_rounds_are_averaged_by_their_number_of_trajectories():
    log = [
        started(),
        collected(0, 0.2, n=10, low=0.1, high=0.5, share=0.3),
        collected(0, 0.8, n=30, low=0.4, high=0.9, share=0.5, round=1),
        collected(0, None, n=0, low=None, high=None, share=0.5, round=2),
    ]
    (entry,) = reward_history(history_of(log))
    # (0.2 * 10 + 0.8 * 30) / 40 = 0.65
    assert entry["avg_reward"] == pytest.approx(0.65)
    assert (entry["min_reward"], entry["max_reward"]) == (0.1, 0.9)
    assert (entry["num_trajectories"], entry["curriculum_percentile"]) == (40, 0.5)
