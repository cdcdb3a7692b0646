"""ART's names over hone: `import hone.art as art`, and the rest of a script for ART stays.

Names load on first use, as those of `hone` do: no module of hone outside this folder imports it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hone.art import batches as batches
    from hone.art import dev as dev
    from hone.art import errors as errors
    from hone.art import gather as gather
    from hone.art import langgraph as langgraph
    from hone.art import local as local
    from hone.art import model as model
    from hone.art import openai as openai
    from hone.art import rewards as rewards
    from hone.art import serverless as serverless
    from hone.art import trajectories as trajectories
    from hone.art import types as types
    from hone.art import utils as utils
    from hone.art.backend import ArtBackend, Backend
    from hone.art.gather import gather_trajectories, gather_trajectory_groups
    from hone.art.local import LocalBackend
    from hone.art.model import Model, TrainableModel
    from hone.art.serverless.backend import ServerlessBackend
    from hone.art.trajectories import Trajectory, TrajectoryGroup
    from hone.art.types import (
        LocalTrainResult,
        Messages,
        MessagesAndChoices,
        ServerlessTrainResult,
        Tools,
        TrainConfig,
        TrainResult,
        TrainSFTConfig,
    )
    from hone.capture.histories import (
        auto_trajectory,
        capture_auto_trajectory,
        capture_yielded_trajectory,
        yield_trajectory,
    )
    from hone.gather import trajectory_group_batches
    from hone.tasks.retries import retry

__all__ = [
    "ArtBackend",
    "Backend",
    "LocalBackend",
    "LocalTrainResult",
    "Messages",
    "MessagesAndChoices",
    "Model",
    "ServerlessBackend",
    "ServerlessTrainResult",
    "Tools",
    "TrainConfig",
    "TrainResult",
    "TrainSFTConfig",
    "TrainableModel",
    "Trajectory",
    "TrajectoryGroup",
    "auto_trajectory",
    "capture_auto_trajectory",
    "capture_yielded_trajectory",
    "dev",
    "gather_trajectories",
    "gather_trajectory_groups",
    "retry",
    "trajectory_group_batches",
    "yield_trajectory",
]

_HOME = {
    "ArtBackend": "hone.art.backend",
    "Backend": "hone.backends.base",
    "LocalBackend": "hone.backends.local",
    "LocalTrainResult": "hone.art.types",
    "Messages": "hone.types",
    "MessagesAndChoices": "hone.types",
    "Model": "hone.model",
    "ServerlessBackend": "hone.art.serverless.backend",
    "ServerlessTrainResult": "hone.art.types",
    "Tools": "hone.types",
    "TrainConfig": "hone.art.types",
    "TrainResult": "hone.backends.base",
    "TrainSFTConfig": "hone.train_config",
    "TrainableModel": "hone.art.model",
    "Trajectory": "hone.trajectory",
    "TrajectoryGroup": "hone.trajectory",
    "auto_trajectory": "hone.capture.histories",
    "capture_auto_trajectory": "hone.capture.histories",
    "capture_yielded_trajectory": "hone.capture.histories",
    "gather_trajectories": "hone.gather",
    "gather_trajectory_groups": "hone.gather",
    "retry": "hone.tasks.retries",
    "trajectory_group_batches": "hone.gather",
    "yield_trajectory": "hone.capture.histories",
}

_MODULES = frozenset(
    {
        *("backend", "batches", "dev", "errors", "gather", "langgraph", "local", "model", "openai"),
        *("rewards", "serverless", "trajectories", "types", "utils"),
    }
)
"""Modules that are available as attributes without an explicit import, as `art.dev` is."""


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"hone.art.{name}")
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"hone.art has no {name!r}; it has {', '.join(__all__)}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
