"""Whether the run still gets better on held-out examples.

In:   the validations so far, finetuning.early_stopping
Out:  a reason to stop, or none

A pure function of what was measured, so that a resumed run comes to the same conclusion.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hone.report.validations import Validation

if TYPE_CHECKING:
    from hone.config.schema import EarlyStoppingConfig


def reason_to_stop(
    validations: Sequence[Validation], config: "EarlyStoppingConfig | None"
) -> str | None:
    """Why to stop, if the last `patience` validations brought no improvement."""
    if config is None:
        return None
    top: float | None = None
    waited = 0
    for validation in validations:
        if validation.mean is None:
            continue  # a validation that failed says nothing either way
        if top is None or validation.mean > top + config.min_delta:
            top, waited = validation.mean, 0
        else:
            waited += 1
    if top is None or waited < config.patience:
        return None
    return (
        f"{config.metric} has not risen above {top:.4f} by more than {config.min_delta:g} in "
        f"{waited} validations (finetuning.early_stopping.patience: {config.patience})"
    )
