"""Early stopping."""

from hone.config.schema import EarlyStoppingConfig
from hone.finetune.resume import reason_to_stop
from hone.report.history import Validation


def measured(*means: float | None) -> list[Validation]:
    return [
        Validation(
            epoch=epoch,
            step=epoch,
            at=0.0,
            mean=mean,
            min=mean,
            max=mean,
            num_examples=1,
            failures=0,
            rewards={"a": [] if mean is None else [mean]},
            policy_failures=0,
            failure_reward=None,
            dropped=True,
            error="failed" if mean is None else None,
        )
        for epoch, mean in enumerate(means)
    ]


PATIENT = EarlyStoppingConfig(patience=2, min_delta=0.05)


def test_it_stops_after_as_many_validations_without_a_rise_as_it_has_patience():
    assert reason_to_stop(measured(0.3, 0.34), PATIENT) is None
    # 0.34 and 0.35 are no more than 0.05 above 0.3.
    reason = reason_to_stop(measured(0.3, 0.34, 0.35), PATIENT)
    assert reason == (
        "val/reward has not risen above 0.3000 by more than 0.05 in 2 validations "
        "(finetuning.early_stopping.patience: 2)"
    )


def test_a_rise_begins_the_wait_anew():
    assert reason_to_stop(measured(0.3, 0.2, 0.4, 0.4), PATIENT) is None


def test_a_validation_that_failed_says_nothing():
    assert reason_to_stop(measured(0.3, None, None, 0.2), PATIENT) is None
    assert reason_to_stop(measured(None, None, None), PATIENT) is None


def test_without_the_section_nothing_stops():
    assert reason_to_stop(measured(0.3, 0.1, 0.1, 0.1), None) is None
