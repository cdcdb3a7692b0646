"""The size of a run. What `--dry-run` prints is in test_run.py."""

from pathlib import Path

from tests.finetune.rehearsal import document

from hone.finetune.checks.plan import Span, plan, rollout_time


def test_the_seed_s_own_learning_rate_can_hardly_move_the_model(tmp_path: Path):
    slow = {"a": {"training": {"learning_rate": "1e-6"}}}
    planned = plan(document(tmp_path, trainer_adapters=slow), 50)
    # 50 examples x 2 generations x 20 epochs; 50 groups in steps of 8 are 7 steps an epoch.
    assert (planned.rollouts, planned.jobs, planned.optimizer_steps) == (2000, 20, 140)
    assert planned.is_too_small
    # 140 x 1e-6 = 1.4e-4
    assert "140 optimizer steps at learning_rate 1e-06: each weight moves by about 1.4e-04" in str(
        planned
    )
    assert "can hardly move the model. Raise training.learning_rate" in str(planned)


def test_a_faster_one_can(tmp_path: Path):
    planned = plan(document(tmp_path), 50)
    # 140 x 5e-5 = 7e-3; falling to 0 it is half of that.
    assert not planned.is_too_small
    assert "7.0e-03" in str(planned)
    falling = {"a": {"training": {"schedule": "linear"}}}
    planned = plan(document(tmp_path, trainer_adapters=falling), 50)
    assert "3.5e-03" in str(planned)
    still = {"a": {"training": {"learning_rate": 0}}}
    assert not plan(document(tmp_path, trainer_adapters=still), 50).is_too_small


def test_rounds_and_partial_epochs(tmp_path: Path):
    parts = {"groups_per_step": 12, "examples_per_epoch": 30, "num_epochs": 2}
    planned = plan(document(tmp_path, finetuning=parts), 50)
    # 30 of 50 examples: rounds of 12, 12 and 6, which are 2 + 2 + 1 optimizer steps.
    assert (planned.examples, planned.rounds, planned.jobs) == (30, 3, 6)
    assert (planned.rollouts, planned.optimizer_steps) == (120, 10)
    nothing = plan(document(tmp_path), 0)
    assert (nothing.rollouts, nothing.jobs, nothing.optimizer_steps) == (0, 0, 0)


def test_validation_rollouts(tmp_path: Path):
    reps = {"num_epochs": 7, "validation": {"reps": 3}}
    planned = plan(document(tmp_path, finetuning=reps), 50, validation_examples=10, interval=5)
    # After 0, 5 and 7 epochs, and the first and the best step side by side: (3 + 2) x 10 x 3.
    assert planned.validation_rollouts == 150
    greedy = {"num_epochs": 7, "validation": {"reps": 3, "greedy": True}}
    planned = plan(document(tmp_path, finetuning=greedy), 50, validation_examples=10, interval=5)
    assert planned.validation_rollouts == 150  # greedy answers are compared side by side, too
    assert plan(document(tmp_path), 50).validation_rollouts == 0


def test_the_time_of_the_rollouts(tmp_path: Path):
    parts = {"groups_per_step": 12, "examples_per_epoch": 30, "num_epochs": 2}
    planned = plan(document(tmp_path, finetuning=parts), 50, validation_examples=10, interval=1)
    # Rounds of 24, 24 and 12 rollouts, 8 at a time: 3 + 3 + 2 = 8 waves an epoch. Validations after
    # 0, 1 and 2 epochs: 10 rollouts, 2 waves each; 20 at the end, 3 waves. 16 + 6 + 3 = 25 waves of
    # 2 s. If 8 at a time are no faster than 2: 120 + 30 + 20 = 170 rollouts, 85 pairs of 2 s.
    assert rollout_time(planned, seconds=2.0, concurrency=8) == Span(50.0, 170.0)
    # One at a time: 170 x 2 s, and nothing is uncertain.
    assert rollout_time(planned, seconds=2.0, concurrency=1) == Span(340.0, 340.0)
