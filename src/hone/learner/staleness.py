"""The staleness limit: how many steps behind a trained call may be.

In:   the steps that answered trained calls; the step a job starts from; TrainConfig.max_staleness
Out:  None, or the reason for the refusal and what to do

A call of an older step was sampled from a different distribution than the one the job trains; the
importance weight corrects for that only in part, and the loss does not show it. The limit is checked
at submission and again at the start of the job, because another job may publish a step in between.
"""

from collections.abc import Sequence

from hone.errors import SampleRefused
from hone.trajectory import TrajectoryGroup
from hone.types import TrainConfig


def too_stale(step: int, base: int, config: TrainConfig) -> str | None:
    """Why a call of this step is refused in a job that starts from `base`; None if it is not."""
    limit = config.max_staleness
    if limit is None or not config.is_on_policy or 0 <= base - step <= limit:
        return None
    cause = f"was answered by step {step}, and the job starts from step {base}"
    if step > base:
        return f"{cause}, which is older. Run the rollout again with the step that is served now."
    return (
        f"{cause}: {base - step} behind, and max_staleness is {limit}. Run the rollout again with "
        f"the newest step, or set config max_staleness: {base - step} (null for any)."
    )


def check_fresh(
    job_id: str, groups: Sequence[TrajectoryGroup], base: int, config: TrainConfig
) -> None:
    """Raise SampleRefused for the first trained call that is too stale."""
    for g, group in enumerate(groups):
        for t, trajectory in enumerate(group.trajectories):
            for c, call in enumerate(trajectory.calls):
                if call.trained and (why := too_stale(call.step, base, config)):
                    raise SampleRefused(
                        f"job {job_id!r}: groups.{g}.trajectories.{t}.calls.{c} {why} The step "
                        "that is served changed while the job was queued."
                    )
