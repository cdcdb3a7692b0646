"""`art.utils.strip_logprobs` under hone's name."""

import copy
from typing import Any


def strip_logprobs(value: Any) -> Any:
    """A copy in which no dict has the key `logprobs`, and the attribute of that name is None."""
    return _stripped(copy.deepcopy(value))


def _stripped(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _stripped(below) for key, below in value.items() if key != "logprobs"}
    if isinstance(value, list | tuple):
        return type(value)(map(_stripped, value))
    for key, below in getattr(value, "__dict__", {}).items():
        setattr(value, key, None if key == "logprobs" else _stripped(below))
    return value
