"""`art.local` under hone's name: `from hone.art.local import LocalBackend`."""

from hone.art.types import LocalTrainResult
from hone.backends.local import LocalBackend

__all__ = ["LocalBackend", "LocalTrainResult"]
