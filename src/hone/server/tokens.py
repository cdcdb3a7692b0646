"""What a job was trained on, token by token.

In:   a job's resolved groups, its TrainConfig, the learner's logprobs where they were kept
Out:  TokenPages: every token of every call with its text, kind, logprobs and advantage

Advantages are computed by the function the learner uses, from what is stored with the job, so a
page shows what was trained and not what was meant to be.
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
    """In the call: prompt first, then completion."""
    id: int
    text: str
    """What it spells; a piece of a character is shown as U+FFFD."""
    kind: Literal["prompt", "sampled", "forced"]
    logprob: float | None = None
    """The sampler's, temperature-scaled."""
    learner_logprob: float | None = None
    """The learner's before the job; known for jobs with `plot_tensors`."""
    advantage: float | None = None
    """None where the token has no label."""


class TokenPage(Strict):
    """A stretch of a job's tokens, in the order of groups, trajectories and calls."""

    job: str
    total: int
    """Tokens of the whole job."""
    offset: int
    tokens: list[TokenInfo]


@dataclass(frozen=True, slots=True)
class _Placed:
    """A call, where it stands, and what was learned from it."""

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
            put = at in forced
            yield TokenInfo(
                group=self.group,
                trajectory=self.trajectory,
                call=self.index,
                place=place,
                id=ids[place],
                text=text(ids[place]),
                kind="prompt" if at < 0 else "forced" if put else "sampled",
                logprob=None if at < 0 or call.logprobs is None else call.logprobs[at],
                learner_logprob=learner.get(at),
                advantage=None if at < 0 or put else self.advantage,
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
    placed = _placed(groups, config, vocab, max_positions, learner_logprobs)
    tokens: list[TokenInfo] = []
    seen = 0
    for one in placed:
        start = max(0, offset + len(tokens) - seen)
        if start < len(one) and len(tokens) < limit:
            tokens += one.tokens(start, start + limit - len(tokens), text)
        seen += len(one)
    return TokenPage(job=job, total=seen, offset=offset, tokens=tokens)


def read_logprobs(path: Path) -> list[float] | None:
    """The learner's logprobs as learner/picture.py keeps them; None if it did not."""
    import numpy as np  # the server is up without it

    return np.load(path, allow_pickle=False).tolist() if path.is_file() else None


def _placed(
    groups: Sequence[TrajectoryGroup],
    config: TrainConfig,
    vocab: int,
    max_positions: int,
    learner_logprobs: Sequence[float] | None,
) -> list[_Placed]:
    from hone.learner.samples import make_samples  # loads numpy, see above

    made = make_samples(groups, config, vocab=vocab, max_positions=max_positions)
    labelled = {(sample.group, sample.trajectory): sample.calls for sample in made.samples}
    placed: list[_Placed] = []
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
                placed.append(_Placed(g, t, c, call, advantage, learner))
    return placed


def _can_be_labelled(call: Call) -> bool:
    """As learner/samples.py decides it for the calls of a trajectory that teaches something."""
    sampled = len(set(call.forced)) < len(call.completion_ids)
    return call.trained and call.temperature > 0 and sampled
