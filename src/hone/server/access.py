"""What the client of the current request may load.

In:   the access that http/auth.py granted it; the name of a base model
Out:  whether an engine may be opened for it; an Unprocessable for a path that it may not name
"""

from contextvars import ContextVar
from pathlib import Path
from typing import Literal

from hone.errors import Unprocessable
from hone.models.find import canonical
from hone.server.settings import Settings
from hone.types import FieldError, ModelSpec

Access = Literal["operator", "peer", "inference", "anyone"]
"""An operator (with the key, or of the server's user if it has none) may do everything. A peer (in a
trusted network, without the key) may train, but not name a path. An inference client may use only the inference APIs. Anyone may check the health."""

access: ContextVar[Access] = ContextVar("access", default="operator")
"""Access of the current request; outside any request, the operator's."""


def may_load(settings: Settings, base_model: str) -> bool:
    """Whether the current request may load a base model, given by its canonical name."""
    if access.get() == "operator":
        return True
    if access.get() == "peer":
        return not is_path(base_model)
    allowed = settings.allow_base_models
    if allowed is None:
        allowed = () if settings.api_key else ("*",)
    if "*" in allowed and not is_path(base_model):
        return True
    return base_model in {canonical(name) for name in allowed}


def check_path(spec: ModelSpec) -> None:
    """Refuse a base model that is a path, unless the request is an operator's."""
    base_model = canonical(spec.base_model)
    if access.get() == "peer" and is_path(base_model):
        message = (
            f"{base_model!r} is a path, and a path is taken only from a client with the "
            "server's key or, if it has none, of the server's user. Name a model by its name, or "
            "send the key."
        )
        raise Unprocessable([FieldError(("base_model",), message)])


def is_path(base_model: str) -> bool:
    """Whether a canonical name is a path of this machine."""
    return Path(base_model).is_absolute()
