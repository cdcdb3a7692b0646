"""The tokens a job is trained on, page by page.

In:   a job, its resolved groups, and the learner's logprobs if they were saved
Out:  TokenPages: every token of every call with its text, kind, logprobs and advantage

The learner's own function computes the advantages from the stored job, so a page shows what is
really trained.
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Literal

from hone.learner.packed import unpack_groups
from hone.server.serve.tokenizer import BaseTokenizer
from hone.trajectory import TrajectoryGroup
from hone.types import Call, JobInfo, Strict, TrainConfig


class TokenInfo(Strict):
    """One token of one call."""

    group: int
    trajectory: int
    call: int
    place: int
    """Index in the call: prompt first, then completion."""
    id: int
    text: str
    """Its text; an incomplete character is shown as U+FFFD."""
    kind: Literal["prompt", "sampled", "forced"]
    logprob: float | None = None
    """The sampler's logprob, temperature-scaled."""
    learner_logprob: float | None = None
    """The learner's logprob before the job; only for jobs with `plot_tensors`."""
    advantage: float | None = None
    """None if the token is not trained."""


class TokenPage(Strict):
    """Part of a job's tokens, in the order of groups, trajectories and calls."""

    job: str
    total: int
    """Tokens of the whole job."""
    offset: int
    tokens: list[TokenInfo]


def token_page(
    tokenizer: BaseTokenizer,
    job: JobInfo,
    packed: bytes,
    picture_dir: Path | None,
    offset: int,
    limit: int,
) -> str:
    """A TokenPage as JSON: `limit` tokens, starting at `offset`.

    `packed` are the job's groups, `picture_dir` is where learner/picture.py saved its logprobs.
    """
    import numpy as np  # imported here: the server starts without numpy

    from hone.learner.picture import LOGPROBS

    groups = unpack_groups(packed)
    total = sum(
        len(call.prompt_ids) + len(call.completion_ids)
        for group in groups
        for trajectory in group.trajectories
        for call in trajectory.calls
    )
    logprobs: list[float] = []
    if picture_dir is not None and (file := picture_dir / LOGPROBS).is_file():
        logprobs = np.load(file, allow_pickle=False).tolist()
    tokens = islice(_tokens(groups, job.config, tokenizer, iter(logprobs)), offset, offset + limit)
    page = TokenPage(job=job.id, total=total, offset=offset, tokens=list(tokens))
    return page.model_dump_json()


def _tokens(
    groups: Sequence[TrajectoryGroup],
    config: TrainConfig,
    tokenizer: BaseTokenizer,
    learner_logprobs: Iterator[float],
) -> Iterator[TokenInfo]:
    """`learner_logprobs`: one for every trained token, in the same order; or none at all."""
    from hone.learner.samples import make_samples  # loads numpy, see above

    vocab, piece = tokenizer.files.text_config["vocab_size"], tokenizer.template.piece
    batch = make_samples(groups, config, vocab=vocab, max_positions=tokenizer.max_positions)
    labelled = {(sample.group, sample.trajectory): sample.calls for sample in batch.samples}
    for g, group in enumerate(groups):
        for t, trajectory in enumerate(group.trajectories):
            labels = iter(labelled.get((g, t), ()))
            for c, call in enumerate(trajectory.calls):
                label = next(labels, None) if _can_be_labelled(call) else None
                first, forced = len(call.prompt_ids), set(call.forced)
                for place, token in enumerate(call.prompt_ids + call.completion_ids):
                    at = place - first
                    sampled = at >= 0 and at not in forced
                    yield TokenInfo(
                        group=g,
                        trajectory=t,
                        call=c,
                        place=place,
                        id=token,
                        text=piece(token).decode(errors="replace"),
                        kind="prompt" if at < 0 else "sampled" if sampled else "forced",
                        logprob=None if at < 0 or call.logprobs is None else call.logprobs[at],
                        learner_logprob=next(learner_logprobs, None) if label and sampled else None,
                        advantage=label.advantage if label and sampled else None,
                    )


def _can_be_labelled(call: Call) -> bool:
    """As learner/samples.py decides for a trajectory with a non-zero advantage."""
    sampled = len(set(call.forced)) < len(call.completion_ids)
    return call.trained and call.temperature > 0 and sampled
