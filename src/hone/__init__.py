"""hone: reinforcement-train the agent you already run, where it runs."""

from hone.trajectory import Trajectory, TrajectoryGroup
from hone.types import Call, TrainConfig

__all__ = ["Call", "TrainConfig", "Trajectory", "TrajectoryGroup", "__version__"]

__version__ = "0.1.0"
