"""Tasks for bodies that hold trajectories, hone's and ART's: read, pack as a job, log.

In:   the body of a request; the model it trains, and its step
Out:  the request without its groups; the job as the queue stores it, resolved and compressed

The tasks of one request share the parsed body, in a thread of the server or, if the body is large,
in a worker process. From a worker, the groups return to the server only as the bytes to store, never
as objects.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hone.errors import BadRequest
from hone.learner.packed import pack_groups
from hone.server.serve.tokenizer import BaseTokenizer
from hone.server.train.art_requests import LogRequest, TrainRequest
from hone.server.train.choice_calls import Start
from hone.server.train.model_args import json_text
from hone.server.train.resolve import resolve_groups
from hone.store.calls import CallStore
from hone.store.checkpoints import log_groups
from hone.trajectory import JobRequest, TrajectoryGroup, means


@dataclass(frozen=True, slots=True)
class Invalid:
    """A body that does not validate, with pydantic's errors."""

    errors: list[dict[str, Any]]


@dataclass(slots=True)
class Parsed:
    """The body of one request."""

    request: Any = None
    """A JobRequest, TrainRequest or LogRequest."""


@dataclass(frozen=True, slots=True)
class Head:
    """A request without its groups."""

    request: Any
    groups: int
    trajectories: int
    sha256: str
    """VERSION:HASH of the whole request, without its idempotency key."""


DIGEST_VERSION = 1
"""Incremented with every change of what is hashed. A resumed run sends its last request again, and a
newer server must not take that for another request."""

_in_worker = Parsed()


def call(parsed: Parsed | None, task: Callable[..., Any], *args: Any) -> Any:
    """Run a task on a parsed body; None is the body that this worker process parsed last."""
    return task(parsed or _in_worker, *args)


def read(
    parsed: Parsed, kind: type[JobRequest | TrainRequest | LogRequest], body: bytes
) -> Head | Invalid:
    """Parse and validate a body; errors have FastAPI's wording."""
    try:
        parsed.request = request = kind.model_validate(json.loads(body))
    except ValidationError as error:
        errors = error.errors(include_url=False, include_input=False, include_context=False)
        return Invalid([{**e, "loc": ("body", *e["loc"])} for e in errors[:100]])
    except UnicodeDecodeError as error:
        text = f"the body is not UTF-8: {error.reason} at byte {error.start}"
        return Invalid([{"type": "json_invalid", "loc": ("body", error.start), "msg": text}])
    except json.JSONDecodeError as error:
        text = f"JSON decode error: {error.msg}"
        return Invalid([{"type": "json_invalid", "loc": ("body", error.pos), "msg": text}])
    except (RecursionError, ValueError):
        text = "the body is nested too deeply, or has a number too long, to be read"
        raise BadRequest(text, code="invalid_json") from None
    count = sum(len(group.trajectories) for group in request.groups)
    head = request.model_copy(update={"groups": []})
    return Head(head, len(request.groups), count, _digest(request))


def _digest(request: JobRequest | TrainRequest | LogRequest) -> str:
    """Defaults are left out: a field that a later version adds does not change the hash."""
    json_text(getattr(request, "idempotency_key", None), ("idempotency_key",))
    fields = request.model_dump(exclude={"idempotency_key"}, exclude_defaults=True)
    text = json_text(fields, (_groups_field(request),), allow_nan=True)
    return f"{DIGEST_VERSION}:{hashlib.sha256(text.encode()).hexdigest()}"


def _groups_field(request: JobRequest | TrainRequest | LogRequest) -> str:
    return type(request).model_fields["groups"].alias or "groups"


def pack(
    parsed: Parsed, tokenizer: BaseTokenizer, calls: CallStore, start: Start
) -> tuple[int, dict[str, Any]]:
    """How many of the parsed groups can be trained; and the job, as JobStore.add takes it.

    Raises Unprocessable.
    """
    request = parsed.request
    groups = [g if isinstance(g, TrajectoryGroup) else g.to_hone() for g in request.groups]
    resolved = resolve_groups(groups, tokenizer, calls, start, _groups_field(request))
    return len(resolved.groups), {
        "groups": pack_groups(resolved.groups),
        "counts": resolved.counts,
        "metrics": {name: float(count) for name, count in resolved.turns.items()},
        "calls": resolved.calls,
    }


def log(parsed: Parsed, model_dir: Path, split: str, step: int) -> dict[str, float]:
    """Log the parsed groups as they were sent; returns the means of their metrics."""
    groups = parsed.request.groups
    log_groups(model_dir, split, step, [group.model_dump(exclude_unset=True) for group in groups])
    return means(groups)
