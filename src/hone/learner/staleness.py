"""How far behind the step that is trained its answers may be.

In:   the steps that answered trained calls; the step a job starts from; TrainConfig.max_staleness
Out:  None, or why it is refused and what to do

An answer of an older step was sampled from another distribution than the one the job moves; the
importance weight corrects for that only in part, and nobody sees it in the loss. Looked at twice:
while a job waits in the queue, the one before it may publish a step.
"""

from collections.abc import Sequence

from hone.errors import SampleRefused
from hone.trajectory import TrajectoryGroup
from hone.types import TrainConfig


def too_stale(step: int, base: int, config: TrainConfig) -> str | None:
    """What is wrong with an answer of this step in a job that starts from `base`."""
    limit = config.max_staleness
    if limit is None or 0 <= base - step <= limit:
        return None
    said = f"was answered by step {step}, and the job starts from step {base}"
    if step > base:
        return f"{said}, which is older. Run the rollout again with the step that is served now."
    return (
        f"{said}: {base - step} behind, and max_staleness is {limit}. Run the rollout again with "
        f"the newest step, or set config max_staleness: {base - step} (null for any)."
    )


def check_fresh(
    job_id: str, groups: Sequence[TrajectoryGroup], base: int, config: TrainConfig
) -> None:
    """Raises SampleRefused for the first trained call that the job may not be trained on."""
    for g, group in enumerate(groups):
        for t, trajectory in enumerate(group.trajectories):
            for c, call in enumerate(trajectory.calls):
                if call.trained and (why := too_stale(call.step, base, config)):
                    raise SampleRefused(
                        f"job {job_id!r}: groups.{g}.trajectories.{t}.calls.{c} {why} The step "
                        "that is served changed while the job was queued."
                    )
