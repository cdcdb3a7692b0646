"""report/history.py: which validation was the best, for all who ask."""

from pathlib import Path

from tests.report.test_metrics import history_of, started
from tests.report.test_plots import validation
from tests.report.test_report import log

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
