"""The bodies of ART's requests.

In:   JSON of ART's clients, of all versions
Out:  PrepareRequest, TrainRequest, LogRequest, KeepRequest

A body carries the model under `model`, or is the model itself: ART's versions differ. Keys that hone
does not use are ignored, because each version adds some.
"""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from hone.server.art_config import ArtModel
from hone.server.art_log import ArtGroup
from hone.types import Name


class _Request(BaseModel):
    """A body with the model under `model`, or the model itself."""

    model_config = ConfigDict(extra="ignore")

    model: ArtModel

    @model_validator(mode="before")
    @classmethod
    def _wrapped(cls, data: Any) -> Any:
        if isinstance(data, dict) and "name" in data and "model" not in data:
            return {"model": data}
        return data


class PrepareRequest(_Request):
    """Arguments of ART's OpenAI server, which runs already here."""

    config: dict[str, Any] | None = None


class TrainRequest(_Request):
    """Groups to train on."""

    trajectory_groups: list[ArtGroup]
    config: dict[str, Any] | None = None
    dev_config: dict[str, Any] | None = None
    verbose: bool | None = None


class LogRequest(_Request):
    """Groups to log, with their mean metrics."""

    trajectory_groups: list[ArtGroup]
    split: Name = "val"


class KeepRequest(_Request):
    """The checkpoints to keep."""

    steps_to_keep: list[Annotated[int, Field(ge=0, lt=2**31)]]
