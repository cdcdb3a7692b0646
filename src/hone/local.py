"""`art.local` under hone's name: `from hone.local import LocalBackend`."""

from hone.backends.base import TrainResult as LocalTrainResult
from hone.backends.local import LocalBackend

__all__ = ["LocalBackend", "LocalTrainResult"]
