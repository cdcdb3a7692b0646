"""The body of a request in any dialect: which keys are ignored, refused, or checked by a model.

In:   a JSON object
Out:  a RequestBody; BadRequest names the first wrong key

Every key is honoured, refused by name, or listed in `ignored` with the reason why it has no effect;
the response names the ignored keys that were sent. A key that would change the answer is never
ignored: if it is not supported, it is accepted only with a value that requests nothing.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError

from hone.errors import BadRequest
from hone.wire.errors import bad_request, brief

Refused = Mapping[str, tuple[Any, ...]]
"""Keys that are not in this version: what to do instead, and the values that request nothing."""


class RequestBody(BaseModel):
    """Checked keys of a request."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True
    )
    kind: ClassVar[str] = "this request"
    """What has the keys, for error messages."""
    ignored: ClassVar[Mapping[str, str]] = {}
    """Keys that many clients send, accepted with any value, and why they have no effect."""
    refused: ClassVar[Refused] = {}
    _unused: tuple[str, ...] = PrivateAttr(default=())

    @classmethod
    def parse(cls, body: dict[str, Any]) -> Self:
        """The request; raises BadRequest naming the first key that is wrong."""
        # Clients send null for keys that are not set.
        sent = {k: v for k, v in body.items() if v is not None}
        read = {k: v for k, v in sent.items() if k not in cls.ignored}
        try:
            request = cls.model_validate(
                {k: v for k, v in read.items() if not cls._is_neutral(k, v)}
            )
        except ValidationError as error:
            raise bad_request(error, cls.kind, [*cls.model_fields, *cls.ignored]) from None
        request._unused = tuple(key for key in sent if key in cls.ignored)
        return request

    @property
    def unused_keys(self) -> tuple[str, ...]:
        """Keys that were sent and have no effect, whatever the model."""
        return self._unused

    @classmethod
    def _is_neutral(cls, key: str, value: Any) -> bool:
        """Whether a key that is not in this version requests nothing. Raises BadRequest if it does."""
        if key not in cls.refused:
            return False
        instead, *neutral = cls.refused[key]
        # In Python 0 == False and 1 == True; in JSON they are not.
        if any(value == other and type(value) is type(other) for other in neutral):
            return True
        got = f"{brief(value)} is " if neutral else ""
        message = f"{key}: {got}not in this version; {instead}"
        raise BadRequest(message, param=key, code="unsupported_parameter")


class GenerationBody(RequestBody):
    """A request for an answer."""

    model: str = Field(min_length=1, max_length=512)
    """NAME, NAME@STEP, NAME@latest, NAME@best, PROJECT/NAME, or a base model."""
    temperature: float | None = Field(default=None, ge=0, le=100, allow_inf_nan=False)
    """0 is greedy: the call is recorded at temperature 0, as context that is never trained on. So is
    every value below 0.001, at which scores would overflow."""
    top_p: float | None = Field(default=None, ge=0, le=1)
    """0 is greedy, like temperature 0."""
    stream: bool | None = None

    def request_fields(self, not_applicable: list[str]) -> dict[str, Any] | None:
        """Fields that are recorded with the call, for requests that name this one later.

        `not_applicable` are the keys of the chat completion that change nothing for this model.
        """
        return None
