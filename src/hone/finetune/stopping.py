"""Whether the run still gets better on held-out examples, and when it was best.

In:   the validations so far, finetuning.early_stopping
Out:  the best validation; a reason to stop, or none
Used: trainer.py after each validation; run.py for what it says at the end

Pure functions of what was measured, so that a resumed run comes to the same conclusion.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hone.finetune.history import Validation

if TYPE_CHECKING:
    from hone.config.schema import EarlyStoppingConfig


def best(validations: Sequence[Validation]) -> Validation | None:
    """The one with the highest mean; of equal ones the first."""
    known = [(v.mean, v) for v in validations if v.mean is not None]
    return max(known, key=lambda pair: pair[0])[1] if known else None


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
