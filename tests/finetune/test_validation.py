"""finetune/validation.py: held-out examples before, during and after; what failed is no 0."""

import json

from tests.finetune.trainers import Bench, evaluation

from hone.config.schema import ValidationConfig
from hone.errors import PolicyFailure
from hone.events import read
from hone.finetune.base import TrainingStatusEnum

COMPLETED = TrainingStatusEnum.COMPLETED


async def test_validation_comes_first_at_each_interval_and_last(bench: Bench):
    bench.validation, bench.interval = evaluation("xy"), 2
    await bench.run(3)
    found = bench.events("validation")
    assert [(e["epoch"], e["step"], e["avg_reward"]) for e in found] == [
        (0, 0, 0.5),
        (2, 2, 0.5),
        (3, 3, 0.5),
    ]
    assert found[0]["rewards"] == {"x": [0.5], "y": [0.5]}
    assert ("val", 2, {"reward": 0.5}) in bench.adapter.logged
    order = [e["type"] for e in read(bench.directory / "events.jsonl")]
    assert order.index("validation") < order.index("epoch_started")
    names = {p.name for p in (bench.directory / "trajectories").glob("validation_*")}
    assert names == {"validation_000.jsonl", "validation_002.jsonl", "validation_003.jsonl"}
    await bench.run(3)
    assert len(bench.events("validation")) == 3


async def test_a_validation_that_fails_is_a_gap_and_no_zero(bench: Bench):
    def broken(input: str) -> str:
        raise ConnectionError("no route to the tool")

    bench.validation = evaluation("xy", broken)
    bench.keys = {"rollout_retries": 0}
    statuses = await bench.run(1)
    assert [status.status for status in statuses] == [COMPLETED]
    first, _ = bench.events("validation")
    assert (first["avg_reward"], first["failures"]) == (None, 2)
    assert first["rewards"] == {"x": [None], "y": [None]}
    assert "2 of 2 rollouts failed by no fault of the model" in first["error"]
    assert not [entry for entry in bench.adapter.logged if entry[0] == "val"]
    history = json.loads((bench.directory / "validation_history.json").read_text())
    assert history[0]["avg_reward"] is None


async def test_greedy_validation_repeats_each_example(bench: Bench):
    seen: list[str] = []
    bench.validation = evaluation("x", lambda input: (seen.append(input), "1")[1])
    bench.keys = {"validation": ValidationConfig(greedy=True, reps=3)}
    await bench.run(1)
    assert seen == ["x"] * 6  # before and after
    assert bench.events("validation")[0]["rewards"] == {"x": [1.0, 1.0, 1.0]}


async def test_an_evaluator_that_fails_is_not_asked_by_running_the_agent_again(bench: Bench):
    ran: list[str] = []
    bench.validation = evaluation("x", lambda input: (ran.append(input), "no number")[1])
    bench.keys = {"rollout_retries": 2}
    await bench.run(1)
    assert ran == ["x"] * 2  # before and after
    first, _ = bench.events("validation")
    assert (first["avg_reward"], first["rewards"], first["failures"]) == (None, {"x": [None]}, 1)


async def test_failures_of_the_policy_are_worth_what_the_configuration_says(bench: Bench):
    def fails(input: str) -> str:
        raise PolicyFailure("no move", reason="step_limit")

    bench.validation = evaluation("x", fails)
    bench.keys = {"on_policy_failure": {"reward": -1.0}}
    await bench.run(1)
    first, _ = bench.events("validation")
    assert (first["avg_reward"], first["rewards"], first["failures"]) == (-1.0, {"x": [-1.0]}, 0)
