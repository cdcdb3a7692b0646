"""hone: train the agent you already run with reinforcement learning, where it runs.

Names load on first use: `import hone` takes milliseconds, loads no library and patches nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hone import errors as errors
    from hone.backends.base import Backend, TrainResult
    from hone.backends.local import LocalBackend
    from hone.backends.remote import RemoteBackend
    from hone.capture.histories import (
        auto_trajectory,
        capture_auto_trajectory,
        capture_yielded_trajectory,
        yield_trajectory,
    )
    from hone.capture.named import function
    from hone.capture.scope import Rollout, rollout, step
    from hone.gather import (
        gather_trajectories,
        gather_trajectory_groups,
        trajectory_group_batches,
    )
    from hone.model import Model, TrainableModel
    from hone.tasks.retries import retry
    from hone.train_config import TrainConfig, TrainSFTConfig
    from hone.trajectory import History, Trajectory, TrajectoryGroup
    from hone.types import Call, Messages, MessagesAndChoices, Tools

__all__ = [
    "Backend",
    "Call",
    "History",
    "LocalBackend",
    "Messages",
    "MessagesAndChoices",
    "Model",
    "RemoteBackend",
    "Rollout",
    "Tools",
    "TrainConfig",
    "TrainResult",
    "TrainSFTConfig",
    "TrainableModel",
    "Trajectory",
    "TrajectoryGroup",
    "__version__",
    "auto_trajectory",
    "capture_auto_trajectory",
    "capture_yielded_trajectory",
    "function",
    "gather_trajectories",
    "gather_trajectory_groups",
    "retry",
    "rollout",
    "step",
    "trajectory_group_batches",
    "yield_trajectory",
]

__version__ = "0.1.0"

_HOME = {
    "Backend": "backends.base",
    "Call": "types",
    "History": "trajectory",
    "LocalBackend": "backends.local",
    "Messages": "types",
    "MessagesAndChoices": "types",
    "Model": "model",
    "RemoteBackend": "backends.remote",
    "Rollout": "capture.scope",
    "Tools": "types",
    "TrainConfig": "train_config",
    "TrainResult": "backends.base",
    "TrainSFTConfig": "train_config",
    "TrainableModel": "model",
    "Trajectory": "trajectory",
    "TrajectoryGroup": "trajectory",
    "auto_trajectory": "capture.histories",
    "capture_auto_trajectory": "capture.histories",
    "capture_yielded_trajectory": "capture.histories",
    "function": "capture.named",
    "gather_trajectories": "gather",
    "gather_trajectory_groups": "gather",
    "retry": "tasks.retries",
    "rollout": "capture.scope",
    "step": "capture.scope",
    "trajectory_group_batches": "gather",
    "yield_trajectory": "capture.histories",
}


def __getattr__(name: str) -> Any:
    if name == "errors":  # available without an explicit import
        return import_module("hone.errors")
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"hone has no {name!r}; it has {', '.join(__all__)}")
    value = getattr(import_module(f"hone.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
