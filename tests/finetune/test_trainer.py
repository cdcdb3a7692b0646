"""The client loop, over a builder and an adapter that need no model."""

import json
import logging
import re
from typing import Any

import pytest
from tests.fakes import ScriptedBuilder
from tests.finetune.trainers import Bench, evaluation, rising
from tests.prose import Prose

from hone.config.schema import (
    CurriculumLearningConfig,
    EarlyStoppingConfig,
)
from hone.errors import ConfigError, PolicyFailure
from hone.files.event_log import read
from hone.finetune.base import TrainingStatusEnum
from hone.finetune.trainer import EpochTrainer, RLTrainerConfig
from hone.report.history import RunHistory

COMPLETED, FAILED = TrainingStatusEnum.COMPLETED, TrainingStatusEnum.FAILED


async def test_three_epochs_are_three_jobs(bench: Bench):
    statuses = await bench.run(3)
    assert [status.status for status in statuses] == [COMPLETED] * 3
    assert [status.metadata["step"] for status in statuses] == [1, 2, 3]
    run_id = statuses[0].run_id
    assert bench.adapter.sent == [f"{run_id}:{epoch}:0" for epoch in range(3)]
    # Four examples, two generations each.
    assert [job.count for job in bench.adapter.jobs.values()] == [8, 8, 8]
    assert bench.adapter.opened == [(run_id, 0)]
    assert len(bench.builder.ran) == 24


async def test_the_console_reads_as_in_the_seed(bench: Bench, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, logger="hone"):
        await bench.run(2)
    messages = [record.message for record in caplog.records]
    assert re.fullmatch(r"Starting epoch 1 for run run_[0-9a-f]{8}", messages[0])
    # Mean of 0.1 and 0.3.
    assert messages[1] == "Epoch 1 progress logged - Avg Reward: 0.2000, Trajectories: 8"
    assert re.fullmatch(r"Training run_[0-9a-f]{8} completed successfully\.", messages[2])
    assert messages[3] == "Completed epoch 1/2"
    assert messages[5] == "Epoch 2 progress logged - Avg Reward: 0.3000, Trajectories: 8"


async def test_the_reward_of_an_epoch_is_that_of_all_its_rounds(
    bench: Bench, caplog: pytest.LogCaptureFixture
):
    """Three of four examples in the first round, the last in the second."""
    bench.keys = {"groups_per_step": 3}
    rewards = dict(zip("abcd", (0.1, 0.2, 0.3, 0.8), strict=True))
    bench.builder = ScriptedBuilder(lambda epoch, example, generation: rewards[example])
    with caplog.at_level(logging.INFO, logger="hone"):
        await bench.run(1)
    messages = [record.message for record in caplog.records if "Avg Reward" in record.message]
    rounds = {e["round"]: e["metrics"] for e in bench.events("epoch_collected")}
    first, second = (rounds[i]["avg_reward"] for i in (0, 1))
    # All four: (0.1 + 0.2 + 0.3 + 0.8) / 4 = 0.35, whichever of them came first.
    assert messages == [
        f"Epoch 1 round 1 of 2 - Avg Reward: {first:.4f}, Trajectories: 6",
        f"Epoch 1 round 2 of 2 - Avg Reward: {second:.4f}, Trajectories: 2",
        "Epoch 1 progress logged - Avg Reward: 0.3500, Trajectories: 8",
    ]


async def test_the_metrics_have_the_names_and_the_order_of_the_original(bench: Bench):
    await bench.run(1)
    (collected,) = bench.events("epoch_collected")
    assert list(collected["metrics"].items()) == [
        ("avg_reward", pytest.approx(0.2)),
        ("min_reward", pytest.approx(0.1)),
        ("max_reward", pytest.approx(0.3)),
        ("num_trajectories", 8),
        ("num_groups", 4),
        ("filtered_trajectories", 8),
        ("filtered_groups", 4),
        ("filtered_avg_reward", pytest.approx(0.2)),
        ("filtered_min_reward", pytest.approx(0.1)),
        ("filtered_max_reward", pytest.approx(0.3)),
        ("curriculum_percentile", 1.0),
    ]
    assert collected["zero_variance_groups"] == 0
    (line,) = (bench.directory / "training_metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["epoch"] == 0
    assert (bench.directory / "reward_plot.png").stat().st_size > 1000


async def test_a_finished_run_has_nothing_left_and_more_epochs_go_on(bench: Bench):
    first = await bench.run(2)
    assert await bench.run(2) == first
    assert len(bench.builder.ran) == 16
    statuses = await bench.run(3)
    assert [status.metadata["step"] for status in statuses] == [1, 2, 3]
    assert len(bench.builder.ran) == 24
    assert len(bench.adapter.jobs) == 3


async def test_a_start_after_a_crash_runs_only_what_did_not_end(bench: Bench):
    bench.builder.crash = lambda epoch, example, generation: (
        (epoch, len(bench.builder.ran))
        == (
            1,
            8 + 3,
        )
    )
    statuses = await bench.run(3)
    assert [status.status for status in statuses] == [COMPLETED, FAILED]
    assert "the agent's host fell over" in statuses[1].message
    assert len(bench.builder.ran) == 8 + 3
    bench.builder.crash = lambda *at: False
    assert [status.status for status in await bench.run(3)] == [COMPLETED] * 3
    assert len(bench.builder.ran) == len(set(bench.builder.ran)) == 24
    assert len(bench.adapter.jobs) == 3


async def test_a_journaled_submission_is_sent_again_unchanged(bench: Bench):
    """Killed between noting a submission and hearing of its end, at each of the places between."""
    trainer = await bench.start()
    await trainer.run_epoch(0, trainer.journal.run_id)
    await trainer.cleanup()
    bench.builder.reward = lambda *at: pytest.fail("a rollout was run again")
    statuses = await bench.run(1)
    assert [status.status for status in statuses] == [COMPLETED]
    (key,) = bench.adapter.jobs
    assert bench.adapter.sent == [key, key]
    assert bench.adapter.step == 1


async def test_a_job_that_failed_is_tried_again_under_another_key(bench: Bench):
    bench.adapter.fail = lambda key: "CUDA out of memory" if key.endswith(":1:0") else None
    statuses = await bench.run(3)
    assert [status.status for status in statuses] == [COMPLETED, FAILED]
    assert statuses[1].message == "CUDA out of memory"
    assert bench.events("epoch_done")[-1]["status"] == "failed"
    statuses = await bench.run(3)
    assert [status.status for status in statuses] == [COMPLETED] * 3
    assert [key.split(":", 1)[1] for key in bench.adapter.sent] == [
        "0:0",
        "1:0",
        "1:0:again1",
        "2:0",
    ]
    assert len(bench.builder.ran) == 24


async def test_rounds_split_an_epoch_and_a_restart_goes_on_in_its_middle(bench: Bench):
    bench.keys = {"groups_per_step": 3}
    trainer = await bench.start()
    job = await trainer.run_epoch(0, trainer.journal.run_id, 0)
    assert job is not None
    await trainer._wait(job, 0, 0)
    await trainer.cleanup()
    statuses = await bench.run(1)
    assert [status.metadata["step"] for status in statuses] == [2]
    # Four examples in rounds of three: groups of 3 and 1.
    assert [len(job.trajectories) for job in bench.adapter.jobs.values()] == [3, 1]
    assert len(bench.builder.ran) == len(set(bench.builder.ran)) == 8
    started = bench.events("epoch_started")
    assert [(e["round"], e["rounds"], e["rollouts"]) for e in started] == [(0, 2, 6), (1, 2, 2)]
    plan = [job.metadata for job in bench.adapter.jobs.values()]
    assert [p and (p["epoch"], p["round"], p["rounds"], p["epochs"]) for p in plan] == [
        (0, 0, 2, 1),
        (0, 1, 2, 1),
    ]


async def test_an_epoch_of_some_examples(bench: Bench):
    bench.keys = {"examples_per_epoch": 2}
    await bench.run(2)
    ran = [{example for epoch, example, _ in bench.builder.ran if epoch == e} for e in (0, 1)]
    assert ran[0] | ran[1] == set("abcd")
    assert not ran[0] & ran[1]


async def test_it_stops_when_held_out_reward_stops_rising(bench: Bench):
    bench.validation, bench.interval = evaluation("x"), 1
    bench.keys = {"early_stopping": EarlyStoppingConfig(patience=2)}
    statuses = await bench.run(9)
    # 0.5 at 0; no rise at 1 and 2; so epochs 0 and 1 were trained.
    assert len(statuses) == 2
    assert [e["epoch"] for e in bench.events("validation")] == [0, 1, 2]
    assert len(await bench.run(9)) == 2
    assert len(bench.adapter.jobs) == 2


async def test_too_many_infrastructure_failures_fail_the_epoch_and_are_run_again(bench: Bench):
    # One of four examples is a quarter of the rollouts; a fifth is allowed.
    bench.builder.reward = lambda e, example, g: None if example == "a" else rising(e, example, g)
    (status,) = await bench.run(1)
    assert status.status is FAILED
    assert (
        "epoch 1: 2 of 8 rollouts failed because of the infrastructure (connection: 2)"
        in status.message
    )
    assert "max_infrastructure_failures allows 20%" in status.message
    assert not bench.adapter.jobs
    bench.builder.reward, before = rising, len(bench.builder.ran)
    (status,) = await bench.run(1)
    assert status.status is COMPLETED
    assert [example for _, example, _ in bench.builder.ran[before:]] == ["a", "a"]


async def test_dropped_policy_failures_are_a_warning(
    bench: Bench, caplog: pytest.LogCaptureFixture
):
    bench.builder.reward = lambda e, example, g: "token_limit" if g else 0.5
    bench.keys = {"num_epochs": 1, "on_policy_failure": "drop"}
    with caplog.at_level(logging.INFO, logger="hone"):
        (status,) = await bench.run(1)
    assert status.status is COMPLETED
    assert bench.events("epoch_collected")[0]["dropped"] == {"token_limit": 4}
    assert "Left out of epoch 1: token_limit: 4" in caplog.text
    (warning,) = bench.events("warning")
    assert "4 of 8 rollouts failed because of the model (token_limit: 4)" in warning["message"]
    assert "without finetuning.on_policy_failure: drop they are trained on" in warning["message"]


async def test_an_epoch_without_trajectories_fails_with_the_seeds_words(bench: Bench):
    bench.builder.reward = lambda *at: "token_limit"
    (status,) = await bench.run(1)
    assert status.status is FAILED
    assert status.message.startswith("No trajectories collected for epoch 1. Left out: token_limit")
    assert "finetuning.target_functions ['<workflow>']" in status.message
    # Nothing is trained, but all of the policy's failures count, at 0.
    assert bench.events("epoch_collected")[0]["metrics"]["avg_reward"] == 0.0


async def test_a_curriculum_that_leaves_nothing_is_a_skip(bench: Bench):
    bench.builder.reward = lambda *at: 0.5
    bench.keys = {"curriculum_learning": CurriculumLearningConfig(enabled=True)}
    statuses = await bench.run(2)
    assert [(s.status, s.message) for s in statuses] == [
        (COMPLETED, "No trajectories to train on")
    ] * 2
    assert bench.events("epoch_collected")[0]["zero_variance_groups"] == 4
    assert await bench.run(2) == statuses
    assert len(bench.builder.ran) == 16


async def test_the_curriculums_share_holds_over_small_rounds_and_a_resumed_epoch(bench: Bench):
    # Half of four groups in rounds of one: 0.5 -> 1 trains the first, 1.0 -> 1 not the second,
    # 1.5 -> 2 the third, 2.0 -> 2 not the fourth.
    bench.builder.reward = lambda e, example, g: 0.4 + 0.2 * g
    curriculum = CurriculumLearningConfig(enabled=True, initial_percentile=0.5)
    bench.keys = {"curriculum_learning": curriculum, "groups_per_step": 1}
    bench.adapter.fail = lambda key: "out of luck" if key.endswith(":0:2") else None
    (status,) = await bench.run(1)
    assert status.status is FAILED
    (*_, status) = await bench.run(2)
    assert status.status is COMPLETED
    counts = [event["metrics"]["filtered_groups"] for event in bench.events("epoch_collected")]
    # The round whose job failed is in the events twice.
    assert counts == [*(1, 0, 1), *(1, 0), *(1, 0, 1, 0)]
    assert bench.events("warning") == [], "a round without a group is not a problem"


async def test_the_curriculum_goes_on_where_it_was(bench: Bench):
    # Mean reward by example: a 0.2, b 0.4, c 0.6, d 0.8; easiest first.
    bench.builder.reward = lambda e, example, g: 0.2 * (1 + "abcd".index(example)) + 0.2 * g - 0.1
    curriculum = CurriculumLearningConfig(
        enabled=True, initial_percentile=0.5, increment_percentile=0.25, expansion_interval=2
    )
    bench.keys = {"curriculum_learning": curriculum}
    for epochs in (1, 3, 5):
        await bench.run(epochs)
    trained = [
        sorted({(t.metadata or {})["id"] for group in job.trajectories for t in group})
        for job in bench.adapter.jobs.values()
    ]
    # Half of four in epochs 0 and 1, three quarters in 2 and 3, all in 4.
    assert trained == [list("cd"), list("cd"), list("bcd"), list("bcd"), list("abcd")]
    state = json.loads((bench.directory / "curriculum_state.json").read_text())
    assert state["current_percentile"] == 1.0
    assert state["total_groups"] == 4
    assert state["included_groups"] == list("abcd")


async def test_excluded_examples_are_not_run(bench: Bench):
    bench.builder.reward = lambda e, example, g: 0.2 * (1 + "abcd".index(example)) + 0.2 * g - 0.1
    curriculum = CurriculumLearningConfig(enabled=True, initial_percentile=0.5, skip_excluded=True)
    bench.keys = {"curriculum_learning": curriculum}
    await bench.run(1)
    await bench.run(2)
    assert {example for epoch, example, _ in bench.builder.ran if epoch == 1} == set("cd")


async def test_an_epoch_of_excluded_examples_runs_them_all(bench: Bench):
    """The draw of an epoch may consist of examples that the curriculum would skip."""
    bench.builder.reward = lambda e, example, g: 0.2 * (1 + "abcd".index(example)) + 0.2 * g - 0.1
    curriculum = CurriculumLearningConfig(
        enabled=True, initial_percentile=0.3, expansion_interval=50, skip_excluded=True
    )
    # With this seed two of the excluded examples are drawn together in the third epoch.
    bench.keys = {"examples_per_epoch": 2, "seed": 3, "curriculum_learning": curriculum}
    statuses = await bench.run(4)
    assert [status.status for status in statuses] == [COMPLETED] * 4
    ran = [{example for epoch, example, _ in bench.builder.ran if epoch == e} for e in range(4)]
    assert all(ran) and len(ran[2]) == 2


async def test_old_checkpoints_are_pruned_while_the_job_runs(bench: Bench):
    bench.keys = {"keep_checkpoints": 2}
    await bench.run(2)
    assert bench.adapter.keep_last == [2, 2]
    assert bench.adapter.pruned == [set(), set()]  # there is no verdict on held-out examples


async def test_pruning_spares_the_first_step_of_the_run_and_its_best(bench: Bench):
    """The run begins at step 5; step 6 is the best. Both may be compared at the end."""
    rewards = {5: "0.1", 6: "0.9", 7: "0.4", 8: "0.3"}
    bench.adapter.step, bench.interval = 5, 1
    bench.validation = evaluation("xy", lambda input: rewards[bench.adapter.step])
    bench.keys = {"keep_checkpoints": 1}
    await bench.run(3)
    assert bench.adapter.pruned == [{5}, {5, 6}, {5, 6}]


@pytest.mark.parametrize("instead", ["lowest", {"reward": 0.0}])
async def test_pruning_spares_what_a_lower_reward_of_failures_can_make_the_best(
    bench: Bench, instead: Any
):
    """Step 7 fails on one of two examples: 0.5, until step 8 gives -5 and makes it (-5 + 1) / 2."""

    def answer(input: str) -> str:
        if bench.adapter.step == 7 and input == "x":
            raise PolicyFailure("no move", reason="step_limit")
        x, y = {5: ("0.1", "0.1"), 6: ("0.4", "0.4"), 7: ("", "1"), 8: ("-5", "1")}[
            bench.adapter.step
        ]
        return x if input == "x" else y

    bench.adapter.step, bench.interval = 5, 1
    bench.validation = evaluation("xy", answer)
    bench.keys = {"keep_checkpoints": 1, "on_policy_failure": instead}
    await bench.run(3)
    best = RunHistory.of(read(bench.directory / "events.jsonl")).best
    assert best is not None and best.step == (6 if instead == "lowest" else 7)
    assert bench.adapter.pruned == [{5}, {5, 6}, {5, 6, 7} if instead == "lowest" else {5, 7}]


async def test_an_adapter_that_never_answers_is_given_up(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("hone.finetune.trainer.GRACE_S", 0.0)
    bench.keys, bench.adapter.hangs = {"job_timeout_s": 0.05}, True
    (status,) = await bench.run(1)
    assert status.status is FAILED
    assert "the adapter did not report the end of the job within 0.05 s" in status.message


async def test_a_flat_reward_is_explained(bench: Bench):
    bench.builder.reward = lambda epoch, example, generation: 0.5
    await bench.run(3)
    assert any("did not rise" in e["message"] for e in bench.events("warning"))


async def test_its_own_words(prose: Prose, bench: Bench):
    fresh = EpochTrainer(RLTrainerConfig())
    assert (fresh._job_refs, fresh._run_id) == ([], None)
    assert (fresh._reward_history, fresh._validation_history) == ([], [])
    with pytest.raises(ConfigError) as caught:
        await fresh.run(1)
    prose(caught)
    trainer = await bench.start()
    assert re.fullmatch(r"run_[0-9a-f]{8}", trainer._run_id or "")
    await trainer.run(2)
    metrics = await trainer.get_metrics(trainer.journal.run_id)
    assert metrics["total_epochs"] == len(metrics["jobs"]) == 2
    assert {job["status"].status for job in metrics["jobs"]} == {COMPLETED}
    assert [entry["avg_reward"] for entry in trainer._reward_history] == [
        pytest.approx(0.2),
        pytest.approx(0.3),
    ]
    await trainer.cleanup()


async def test_without_examples_to_run_it_says_what_to_bind(bench: Bench):
    trainer = await bench.start()
    bench.builder.evaluation = None
    (status,) = await trainer.run(1)
    assert "no evaluation is bound yet; call bind_evaluation(...) first" in (status.message or "")
    await trainer.cleanup()
