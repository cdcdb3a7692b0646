"""`art.gather` under hone's name."""

from hone.gather import gather_trajectories, gather_trajectory_groups

__all__ = ["gather_trajectories", "gather_trajectory_groups"]
