"""The tokens a job is trained on, page by page.

In:   a job's resolved groups, its TrainConfig, the learner's logprobs if they were saved
Out:  TokenPages: every token of every call with its text, kind, logprobs and advantage

Advantages are computed by the learner's own function from what is stored with the job, so that a
page shows what is really trained.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hone.trajectory import TrajectoryGroup
from hone.types import Call, Strict, TrainConfig


class TokenInfo(Strict):
    """One token of one call."""

    group: int
    trajectory: int
    call: int
    place: int
    """Index in the call: prompt first, then completion."""
    id: int
    text: str
    """Its text; a part of a character is shown as U+FFFD."""
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


@dataclass(frozen=True, slots=True)
class _IndexedCall:
    """A call with its indices, advantage and learner's logprobs."""

    group: int
    trajectory: int
    index: int
    call: Call
    advantage: float | None
    learner: Sequence[float] | None
    """One for every completion token that is not forced."""

    def __len__(self) -> int:
        return len(self.call.prompt_ids) + len(self.call.completion_ids)

    def tokens(self, start: int, stop: int, text: Callable[[int], str]) -> Iterator[TokenInfo]:
        call, prompt = self.call, len(self.call.prompt_ids)
        ids = call.prompt_ids + call.completion_ids
        forced = set(call.forced)
        labels = [c for c in range(len(call.completion_ids)) if c not in forced]
        learner = dict(zip(labels, self.learner, strict=True)) if self.learner is not None else {}
        for place in range(start, min(stop, len(ids))):
            at = place - prompt
            is_forced = at in forced
            yield TokenInfo(
                group=self.group,
                trajectory=self.trajectory,
                call=self.index,
                place=place,
                id=ids[place],
                text=text(ids[place]),
                kind="prompt" if at < 0 else "forced" if is_forced else "sampled",
                logprob=None if at < 0 or call.logprobs is None else call.logprobs[at],
                learner_logprob=learner.get(at),
                advantage=None if at < 0 or is_forced else self.advantage,
            )


def page(
    job: str,
    groups: Sequence[TrajectoryGroup],
    config: TrainConfig,
    *,
    vocab: int,
    max_positions: int,
    text: Callable[[int], str],
    learner_logprobs: Sequence[float] | None,
    offset: int,
    limit: int,
) -> TokenPage:
    """`limit` tokens from the `offset`-th on."""
    calls = _indexed_calls(groups, config, vocab, max_positions, learner_logprobs)
    tokens: list[TokenInfo] = []
    seen = 0
    for call in calls:
        start = max(0, offset + len(tokens) - seen)
        if start < len(call) and len(tokens) < limit:
            tokens += call.tokens(start, start + limit - len(tokens), text)
        seen += len(call)
    return TokenPage(job=job, total=seen, offset=offset, tokens=tokens)


def read_logprobs(path: Path) -> list[float] | None:
    """The learner's logprobs that learner/picture.py saved; None if it did not."""
    import numpy as np  # here: the server starts without it

    return np.load(path, allow_pickle=False).tolist() if path.is_file() else None


def _indexed_calls(
    groups: Sequence[TrajectoryGroup],
    config: TrainConfig,
    vocab: int,
    max_positions: int,
    learner_logprobs: Sequence[float] | None,
) -> list[_IndexedCall]:
    from hone.learner.samples import make_samples  # loads numpy, see above

    batch = make_samples(groups, config, vocab=vocab, max_positions=max_positions)
    labelled = {(sample.group, sample.trajectory): sample.calls for sample in batch.samples}
    indexed: list[_IndexedCall] = []
    used = 0
    for g, group in enumerate(groups):
        for t, trajectory in enumerate(group.trajectories):
            left = iter(labelled.get((g, t), ()))
            for c, call in enumerate(trajectory.calls):
                label = next(left, None) if _can_be_labelled(call) else None
                learner = None
                if label is not None and learner_logprobs is not None:
                    learner = learner_logprobs[used : used + len(label.places)]
                    used += len(label.places)
                advantage = None if label is None else label.advantage
                indexed.append(_IndexedCall(g, t, c, call, advantage, learner))
    return indexed


def _can_be_labelled(call: Call) -> bool:
    """As learner/samples.py decides for a trajectory with a non-zero advantage."""
    sampled = len(set(call.forced)) < len(call.completion_ids)
    return call.trained and call.temperature > 0 and sampled
