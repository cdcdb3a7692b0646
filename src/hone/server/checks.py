"""Checks of models and jobs beyond their types.

In:   ModelSpec, JobRequest
Out:  the TrainConfig of a job, the hash of a request; Unprocessable with each wrong field

JSON can express what files and columns cannot: half a surrogate pair, an infinite number, an
integer of a thousand digits. It is refused here, so that state once written can always be read.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from math import isfinite
from typing import Any

from pydantic import ValidationError

from hone.errors import ModelNotFound, Unprocessable, did_you_mean
from hone.models.find import check_exists
from hone.server.model_args import OWN_SECTIONS, settled
from hone.trajectory import JobRequest
from hone.types import FieldError, ModelSpec, TrainConfig

_HALF = "half of a surrogate pair; send whole characters"


def checked_spec(spec: ModelSpec) -> ModelSpec:
    """The model with its ART sections translated; refuses one that cannot be stored or trained."""
    _check_spec(spec)
    spec = settled(spec)
    _check_spec(spec)
    return spec


def check_base_model(spec: ModelSpec) -> None:
    """Refuse a model whose base weights are missing: a name keeps its base model. Blocking."""
    try:
        check_exists(spec.base_model)
    except (ModelNotFound, OSError, ValueError) as error:  # a name that no path can have
        message = f"{error}\nNothing was registered; send the name of weights that this server has."
        raise Unprocessable([FieldError(("base_model",), message)]) from None


def _check_spec(spec: ModelSpec) -> None:
    wrong: list[FieldError] = []
    longest = max(
        len(part.encode(errors="replace")) for part in re.split(r"[/\\]", spec.base_model)
    )
    if not spec.base_model.isprintable() or longest > 255:
        message = f"{spec.base_model[:60]!r} cannot be the name of a model or of a directory"
        wrong.append(FieldError(("base_model",), message))
    wrong += unwritable(spec.alpha, ("alpha",))
    for field in ("chat_template_kwargs", *OWN_SECTIONS):
        wrong += unwritable(getattr(spec, field), (field,))
    wrong += unwritable(spec.not_applicable, ("not_applicable",))
    if wrong:
        raise Unprocessable(wrong)
    train_config({}, spec.defaults, "defaults")


def check_request(request: JobRequest, config: TrainConfig) -> None:
    """Refuse a job in which no two trajectories can be compared."""
    alone = all(len(group) + len(group.exceptions) <= 1 for group in request.groups)
    # ART's clients send such groups and expect a step that changes nothing (advance_when_flat).
    if alone and request.groups and config.baseline == "group" and not request.advance_when_flat:
        message = (
            "every group has one trajectory, and there is nothing in its group to compare it "
            "with. Sample every input several times (num_generations), or set config "
            "`baseline: batch`, which compares with the mean of the job."
        )
        raise Unprocessable([FieldError(("groups",), message)])


def train_config(
    defaults: Mapping[str, Any], requested: Mapping[str, Any], field: str
) -> TrainConfig:
    """The config of a job: requested values, else the model's defaults, else hone's."""
    known = TrainConfig.model_fields
    wrong = unwritable(requested, (field,))
    for key in requested:
        if key not in known:
            guess = did_you_mean(key, known, cutoff=0.5)
            message = f"no such key.{guess} Known: {', '.join(known)}."
            wrong.append(FieldError((field, key), message))
    if wrong:
        raise Unprocessable(wrong)
    try:
        config = TrainConfig.model_validate({**defaults, **requested})
    except ValidationError as error:
        fields = [FieldError((field, *e["loc"]), e["msg"]) for e in error.errors()]
        raise Unprocessable(fields) from None
    # Text is read as a number too, and "inf" is one.
    if wrong := unwritable(config.model_dump(), (field,)):
        raise Unprocessable(wrong)
    return config


def digest(request: JobRequest) -> str:
    """SHA-256 of a job, without its idempotency key."""
    try:
        plain = request.model_dump(exclude={"idempotency_key"})
        text = json.dumps(plain, sort_keys=True, ensure_ascii=False, default=repr)
        if request.idempotency_key is not None:
            request.idempotency_key.encode()
        return hashlib.sha256(text.encode()).hexdigest()
    except UnicodeEncodeError:
        message = f"in its text: {_HALF}"
    except (RecursionError, ValueError):
        message = "nested too deeply to be read"
    raise Unprocessable([FieldError(("groups",), message)])


def unwritable(value: Any, path: tuple[str | int, ...]) -> list[FieldError]:
    """The values that cannot be written as JSON again, each with its path."""
    if isinstance(value, Mapping):
        bad = [FieldError(path, f"{key!r}: {_HALF}") for key in value if not _is_text(key)]
        inside = (unwritable(v, (*path, k)) for k, v in value.items() if _is_text(k))
        return [*bad, *(error for errors in inside for error in errors)]
    if isinstance(value, list):
        return [error for i, v in enumerate(value) for error in unwritable(v, (*path, i))]
    if isinstance(value, float) and not isfinite(value):
        return [FieldError(path, f"expected a finite number, got {value!r}")]
    if isinstance(value, str) and not _is_text(value):
        return [FieldError(path, _HALF)]
    return []


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
