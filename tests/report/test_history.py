"""report/history.py: which validation is the best, for the run and for its report."""

from pathlib import Path
from statistics import fmean

from tests.report.test_metrics import history_of, started
from tests.report.test_plots import validation
from tests.report.test_report import log

from hone.report.comparison import comparison, to_compare
from hone.report.outcome import measure


def validations(*means: float | None) -> list[dict]:
    """One after each epoch; None failed."""
    return [
        validation(epoch, {} if mean is None else {"a": [mean]}, mean)
        for epoch, mean in enumerate(means)
    ]


def test_the_best_is_the_first_of_the_highest():
    best = history_of([started(), *validations(0.1, 0.4, None, 0.4)]).best
    assert best is not None and (best.step, best.mean) == (1, 0.4)
    # Rewards below 0 are rewards, too.
    best = history_of([started(), *validations(None, -2.0, -1.0, -1.0)]).best
    assert best is not None and (best.step, best.mean) == (2, -1.0)
    assert history_of([started(), *validations(None)]).best is None


def test_of_equal_validations_the_report_names_the_same_step_as_the_run(tmp_path: Path):
    lines = [started(), *validations(0.1, 0.4, 0.2, 0.4)]
    outcome = measure(log(tmp_path, *lines))
    assert outcome.best is not None and (outcome.best.step, outcome.best.epoch) == (1, 1)
    assert outcome.best_step == 1


def test_where_nothing_beat_the_untrained_model_that_is_the_best(tmp_path: Path):
    lines = [started(), *validations(0.4, 0.4)]
    outcome = measure(log(tmp_path, *lines))
    assert outcome.best is not None and outcome.best.step == outcome.best_step == 0


def test_of_a_step_that_was_validated_twice_the_last_validation_counts():
    """Epoch 2 changed nothing, so step 1 is validated again; the server keeps the last value, too."""
    lines = validations(0.1, 0.9, 0.3, 0.5)
    lines[2]["step"] = 1
    history = history_of([started(), *lines])
    assert history.best is not None and (history.best.step, history.best.mean) == (3, 0.5)
    # The first step as well: it was lucky once, and is not the best by that.
    lines = validations(0.9, 0.2, 0.4)
    lines[1]["step"] = 0
    history = history_of([started(), *lines])
    assert history.best is not None and history.best.step == 2
    result = comparison(history)
    assert result is not None and (result.before.mean, result.after.step) == (0.9, 2)


def test_a_comparison_keeps_its_policies_if_its_answers_lower_the_failure_reward():
    """Step 2 is the best until the comparison sees -1, which a failure of step 2 counts as then."""

    def measured(step: int, rewards: list[float | None], at: float, **more: object) -> dict:
        known = {str(i): [reward] for i, reward in enumerate(rewards)}
        failed = {str(i): 1 for i, reward in enumerate(rewards) if reward is None}
        mean = fmean(reward for reward in rewards if reward is not None)
        event = validation(step, {}, mean) | {"rewards": known, "at": at, "policy_failures": failed}
        return event | {"on_policy_failure": "drop"} | more

    lines = [measured(0, [0.1, 0.1], 1.0), measured(1, [0.4, 0.4], 2.0)]
    lines.append(measured(2, [None, 1.0], 3.0))
    result = comparison(history_of([started(), *lines]))
    assert result is not None and result.after.step == 2  # (0 + 1) / 2 > 0.4
    final = {"type": "final_validation", "round": 2}
    ends = measured(0, [-1.0, 0.1], 4.0, **final), measured(2, [None, 1.0], 5.0, **final)
    history = history_of([started(), *lines, *ends])
    assert history.best is not None and history.best.step == 1  # (-1 + 1) / 2 < 0.4
    result = comparison(history)
    assert result is not None and result.fresh and result.after.step == 2
    assert to_compare(history) is None
