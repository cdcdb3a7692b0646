"""`art.serverless.backend` under hone's name: `ServerlessBackend(api_key=..., base_url=...)`."""

from hone.backends.base import TrainResult as ServerlessTrainResult
from hone.backends.remote import RemoteBackend as ServerlessBackend

__all__ = ["ServerlessBackend", "ServerlessTrainResult"]
