"""`art.batches` under hone's name."""

from hone.gather import trajectory_group_batches

__all__ = ["trajectory_group_batches"]
