"""Backend: where a model is served and trained. Protocols and values only.

In:   models, and groups of trajectories to train them on
Out:  where to reach the model; the step a job published
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from hone.train_config import TrainSFTConfig
from hone.trajectory import Trajectory, TrajectoryGroup
from hone.types import CheckpointInfo, ModelInfo, ModelSpec, TrainConfig


class Named(Protocol):
    """A model by its project and name: a TrainableModel, a ModelSpec, a ModelInfo."""

    @property
    def project(self) -> str: ...
    @property
    def name(self) -> str: ...


class Trainable(Named, Protocol):
    """A model that can be registered: a TrainableModel."""

    def spec(self) -> ModelSpec: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """The result of a job."""

    step: int
    """The step that is served now."""
    metrics: dict[str, float] = field(default_factory=dict)
    job: str = ""
    counts: dict[str, int] = field(default_factory=dict)
    """Trajectories by how they were resolved, and dropped ones by reason."""
    reason: str | None = None
    """Why nothing was learned; empty if something was."""
    checkpoint_path: str | None = None
    """Directory of the step, if it is on this machine and `save_checkpoint` was not False."""


@runtime_checkable
class Backend(Protocol):
    """Serves and trains models."""

    async def register(self, model: Trainable) -> ModelInfo:
        """Register a model; the same model again changes nothing."""
        ...

    async def prepare(self, model: Named) -> tuple[str, str]:
        """Load what serving needs; returns base URL and key for an OpenAI client."""
        ...

    async def step(self, model: Named) -> int:
        """The newest published step."""
        ...

    async def train(
        self,
        model: Named,
        trajectory_groups: Iterable[TrajectoryGroup],
        config: TrainConfig | None = None,
        *,
        verbose: bool = False,
        **keys: Any,
    ) -> TrainResult:
        """Train on the groups and wait until the new step is served.

        `keys` are keys of TrainConfig, or options of ART, and override those of `config`.
        """
        ...

    async def train_sft(
        self,
        model: Named,
        trajectories: Iterable[Trajectory],
        config: TrainSFTConfig | None = None,
        *,
        verbose: bool = False,
        **keys: Any,
    ) -> TrainResult:
        """Train on the assistant messages of the conversations, whatever their rewards."""
        ...

    async def checkpoints(self, model: Named) -> list[CheckpointInfo]:
        """The retained steps, oldest first."""
        ...

    async def delete_checkpoints(
        self, model: Named, best_checkpoint_metric: str = "val/reward"
    ) -> list[int]:
        """Delete all steps but the newest and the best by a logged metric; returns the deleted ones."""
        ...

    async def log(
        self, model: Named, metrics: Mapping[str, float], *, split: str, step: int
    ) -> None:
        """Write metrics of a step into the model's history, as SPLIT/METRIC."""
        ...

    async def close(self) -> None:
        """Release this process's resources; the server's state is kept."""
        ...
