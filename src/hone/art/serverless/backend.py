"""`art.serverless.backend` under hone's name: `ServerlessBackend(api_key=..., base_url=...)`."""

from hone.art.types import ServerlessTrainResult
from hone.backends.remote import RemoteBackend

__all__ = ["ServerlessBackend", "ServerlessTrainResult"]

ServerlessBackend = RemoteBackend
