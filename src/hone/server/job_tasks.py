"""Tasks of worker processes for training jobs that are too large for the event loop.

In:   the body of a job, hone's or ART's; the model it trains, and its step
Out:  PackedJob: what the queue stores, resolved and compressed

The tasks of one Worker share what the first of them parsed. The groups of a job never come back to
the server's process as objects, only as the bytes that are stored.
"""

import hashlib
import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hone.errors import BadRequest
from hone.learner.packed import unpack_groups
from hone.server.art_requests import LogRequest, TrainRequest, log_art_groups
from hone.server.chat_tasks import Invalid
from hone.server.model_args import json_text
from hone.server.resolved_job import PackedJob, Start, pack_job
from hone.server.tokenizer import BaseTokenizer
from hone.server.tokens import page, read_logprobs
from hone.store.calls import CallStore
from hone.store.database import Store
from hone.trajectory import JobRequest, means
from hone.types import JobInfo


@dataclass(frozen=True, slots=True)
class ArtHead:
    """A request of ART's clients without its trajectories."""

    request: TrainRequest | LogRequest
    groups: int
    trajectories: int


class _Parsed:
    """The last body that this process parsed."""

    job: JobRequest | None = None
    art: TrainRequest | LogRequest | None = None


def read_job(body: bytes) -> tuple[JobRequest, str] | Invalid:
    """The job without its groups, and its hash."""
    job = _validated(JobRequest, body)
    if isinstance(job, Invalid):
        return job
    return _keep(job)


def read_art(body: bytes, *, log: bool) -> ArtHead | Invalid:
    request = _validated(LogRequest if log else TrainRequest, body)
    if isinstance(request, Invalid):
        return request
    _Parsed.art = request
    groups = request.trajectory_groups
    head = request.model_copy(update={"trajectory_groups": []})
    return ArtHead(head, len(groups), sum(len(group.trajectories) for group in groups))


def art_job(**fields: Any) -> tuple[JobRequest, str]:
    """The job made of ART's groups, without them, and its hash."""
    assert _Parsed.art is not None, "read_art comes first"
    groups = [group.to_hone() for group in _Parsed.art.trajectory_groups]
    return _keep(JobRequest(groups=groups, **fields))


def log_art(model_dir: Path, split: str, step: int) -> dict[str, float]:
    """Log ART's groups; returns the means of their metrics."""
    assert _Parsed.art is not None, "read_art comes first"
    log_art_groups(model_dir, split, step, _Parsed.art.trajectory_groups)
    return means(_Parsed.art.trajectory_groups)


def resolve_job(tokenizer: BaseTokenizer, state_file: Path, start: Start) -> PackedJob:
    """The parsed job as the queue stores it. Raises Unprocessable."""
    assert _Parsed.job is not None, "read_job or art_job comes first"
    return pack_job(_Parsed.job, tokenizer, _calls(state_file), start)


def token_page(
    tokenizer: BaseTokenizer,
    job: JobInfo,
    packed: bytes,
    picture_dir: Path | None,
    offset: int,
    limit: int,
) -> str:
    """A TokenPage as JSON."""
    from hone.learner.picture import LOGPROBS

    return page(
        job.id,
        unpack_groups(packed),
        job.config,
        vocab=tokenizer.files.config["vocab_size"],
        max_positions=tokenizer.max_positions,
        text=lambda token: tokenizer.template.piece(token).decode(errors="replace"),
        learner_logprobs=picture_dir and read_logprobs(picture_dir / LOGPROBS),
        offset=offset,
        limit=limit,
    ).model_dump_json()


def digest(job: JobRequest) -> str:
    """SHA-256 of a job, without its idempotency key."""
    json_text(job.idempotency_key, ("idempotency_key",))
    fields = job.model_dump(exclude={"idempotency_key"})
    return hashlib.sha256(json_text(fields, ("groups",), allow_nan=True).encode()).hexdigest()


def _keep(job: JobRequest) -> tuple[JobRequest, str]:
    _Parsed.job = job
    return job.model_copy(update={"groups": []}), digest(job)


def _validated(kind: Any, body: bytes) -> Any:
    """Validate a body; errors are worded as FastAPI's."""
    try:
        return kind.model_validate(json.loads(body))
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


@lru_cache(maxsize=1)
def _calls(state_file: Path) -> CallStore:
    return CallStore(Store.reading(state_file))
