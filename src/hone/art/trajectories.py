"""`art.trajectories` under hone's name."""

from hone.trajectory import History, Trajectory, TrajectoryGroup, get_messages
from hone.types import Failure as PydanticException

__all__ = ["History", "PydanticException", "Trajectory", "TrajectoryGroup", "get_messages"]
