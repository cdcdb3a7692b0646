"""Turn trajectory groups as they were sent into groups whose trajectories carry Calls only.

In:   TrajectoryGroups: by tokens, by reference to recorded rollouts, or as messages and choices
Out:  Resolved: the same groups as Calls, what became of everything in them, or Unprocessable

Everything that can be wrong with a job is found here, at the border, and all of it at once: each
wrong field is named by its path. What cannot be trained on, without being wrong, is left out and
counted by reason. Nothing is guessed: a call that this server did not record is only taken where
its tokens, its text and its log-probabilities agree.

What is counted: calls by how they were found (`by_tokens`, `by_rollout`, `matched`, `rerendered`);
`dropped/abandoned`, `dropped/other_model`, `dropped/frozen` (a rollout's calls to a fixed step,
such as NAME@0), `dropped/not_named` (by `trained_calls`) and `dropped/no_logprobs` are calls that became
context;
`dropped/no_calls` and `dropped/too_long` are trajectories, `dropped/empty_group` groups, and
`exceptions` rollouts that failed. `other_template_args` are calls whose chat template had other
arguments than the model's own, or printed another date; they are trained like any other.
"""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from hone.chat.choice_tokens import Path, Refused, first_outside, wrong_logprob
from hone.errors import Unprocessable
from hone.learner.packed import pack_groups
from hone.learner.staleness import too_stale
from hone.models.architecture import DecoderConfig
from hone.server.checks import check_request
from hone.server.choices import Choices
from hone.server.language import FIXED, Language, differing
from hone.server.serving import Serving
from hone.store.calls import CallStore
from hone.store.models import ModelRecord
from hone.trajectory import History, JobRequest, Trajectory, TrajectoryGroup
from hone.types import Call, FieldError, RecordedCall, TrainConfig
from hone.wire.errors import brief
from hone.wire.rollout import ROLLOUT_ID

MAX_ERRORS = 50
"""Wrong fields named in one answer."""
MAX_STEP = MAX_ID = 2**31

FORMS = ("calls", "rollout", "messages_and_choices", "additional_histories")


@dataclass(frozen=True, slots=True)
class Resolved:
    """What a job is made of."""

    groups: list[TrajectoryGroup]
    """Every trajectory carries calls, and at least one of them is trained."""
    counts: dict[str, int]
    calls: list[str]
    """Ids of the recorded calls among them."""


@dataclass(frozen=True, slots=True)
class Start:
    """What a job starts from: the model, its newest step, and how it is to be trained."""

    record: ModelRecord
    config: TrainConfig
    step: int
    adapter_sha256: str | None


@dataclass(frozen=True, slots=True)
class PackedJob:
    """A resolved job as the queue stores it."""

    packed: bytes
    groups: int
    counts: dict[str, int]
    calls: list[str]


def pack_job(request: JobRequest, language: Language, calls: CallStore, start: Start) -> PackedJob:
    """Check, resolve and pack a job. Raises Unprocessable with every wrong field. Blocking."""
    check_request(request, start.config)
    resolved = resolve_groups(request.groups, language, calls, start)
    packed = pack_groups(resolved.groups)
    return PackedJob(packed, len(resolved.groups), resolved.counts, resolved.calls)


async def resolve(
    groups: Sequence[TrajectoryGroup],
    *,
    record: ModelRecord,
    serving: Serving,
    calls: CallStore,
    config: TrainConfig,
) -> Resolved:
    """The groups as calls. Raises Unprocessable with every wrong field."""
    language = await serving.template(record.spec.base_model)
    step, adapter = await asyncio.to_thread(serving.newest, record)
    start = Start(record, config, step, None if adapter is None else adapter.sha256)
    return await asyncio.to_thread(resolve_groups, groups, language, calls, start)


def resolve_groups(
    groups: Sequence[TrajectoryGroup], language: Language, calls: CallStore, start: Start
) -> Resolved:
    """The groups as calls. Raises Unprocessable with every wrong field. Blocking."""
    record, config = start.record, start.config
    template = language.template_for(record.spec.chat_template_kwargs)
    fingerprint = language.fingerprint_of(template)
    config_file = language.files.path / "config.json"
    shape = DecoderConfig.parse(language.files.config, where=str(config_file))
    choices = Choices(
        template,
        calls,
        model=str(record.key),
        base_model=record.spec.base_model,
        fingerprint=fingerprint,
        vocab=shape.vocab,
        step=start.step,
    )
    resolver = _Resolver(
        record=record,
        fingerprint=fingerprint,
        calls=calls,
        choices=choices,
        config=config,
        vocab=shape.vocab,
        limit=min(config.max_seq_length, shape.max_positions),
        step=start.step,
        adapter_sha256=start.adapter_sha256,
    )
    return resolver.run(groups)


class _Resolver:
    """One job being resolved."""

    def __init__(
        self,
        *,
        record: ModelRecord,
        fingerprint: str,
        calls: CallStore,
        choices: Choices,
        config: TrainConfig,
        vocab: int,
        limit: int,
        step: int,
        adapter_sha256: str | None,
    ) -> None:
        """`step`, `adapter_sha256`: the newest, from which the job would start."""
        self._record = record
        self._fingerprint = fingerprint
        self._calls = calls
        self._choices = choices
        self._config = config
        self._vocab = vocab
        self._limit = limit
        self._step = step
        self._adapter_sha256 = adapter_sha256
        self._counts: Counter[str] = Counter()
        self._errors: list[FieldError] = []
        self._used: list[str] = []
        self._rollouts: dict[str, Path] = {}

    def run(self, groups: Sequence[TrajectoryGroup]) -> Resolved:
        kept = [self._group(group, ("groups", g)) for g, group in enumerate(groups)]
        left = [group for group in kept if group.trajectories]
        self._counts["dropped/empty_group"] = len(kept) - len(left)
        self._counts["dropped/no_logprobs"] = self._choices.without_logprobs
        counts = dict(sorted((+self._counts).items()))
        if not self._errors and not left:
            self._errors.append(FieldError(("groups",), self._nothing(counts)))
        if self._errors:
            raise Unprocessable(self._errors[:MAX_ERRORS])
        return Resolved(left, counts, self._used)

    def _group(self, group: TrajectoryGroup, path: Path) -> TrajectoryGroup:
        self._counts["exceptions"] += len(group.exceptions)
        trajectories = []
        for t, trajectory in enumerate(group.trajectories):
            try:
                found = self._trajectory(trajectory, (*path, "trajectories", t))
            except Refused as refused:
                self._errors.append(refused.field)
                continue
            if found is not None:
                trajectories.append(found)
        return TrajectoryGroup(
            trajectories,
            example=group.example,
            metrics=_finite(group.metrics),
            metadata=_finite(group.metadata),
        )

    def _trajectory(self, trajectory: Trajectory, path: Path) -> Trajectory | None:
        """As calls; None where nothing of it can be trained."""
        forms = [name for name in FORMS if getattr(trajectory, name)]
        if {"messages_and_choices", "additional_histories"} <= set(forms):
            forms.remove("additional_histories")
        if len(forms) > 1:
            raise Refused(
                path,
                f"{' and '.join(forms)} each say what was sampled; send one of them and leave the "
                "others out",
            )
        if trajectory.trained_calls is not None and forms != ["rollout"]:
            raise Refused(
                (*path, "trained_calls"),
                "names recorded calls of a rollout, and there is no rollout here; send its id as "
                "rollout, or leave trained_calls out",
            )
        calls: list[Call] = []
        if forms == ["calls"]:
            calls = self._by_tokens(trajectory, path)
        elif forms == ["rollout"]:
            calls = self._by_rollout(trajectory, path)
        elif forms:
            calls = self._by_messages(trajectory, path)
        if not any(call.trained and call.completion_ids for call in calls):
            self._counts["dropped/no_calls"] += 1
            return None
        self._check_shaped(trajectory, sum(call.trained for call in calls), path)
        longest = max(len(c.prompt_ids) + len(c.completion_ids) for c in calls if c.trained)
        # Counted here and left out by the learner, whose rule it is.
        self._counts["dropped/too_long"] += longest > self._limit
        return Trajectory(
            calls=calls,
            reward=trajectory.reward,
            shaped_rewards=trajectory.shaped_rewards,
            metrics=_finite(trajectory.metrics),
            metadata=_finite(trajectory.metadata),
        )

    # ---- three ways to say what was sampled -----------------------------------------------------

    def _by_tokens(self, trajectory: Trajectory, path: Path) -> list[Call]:
        for c, call in enumerate(trajectory.calls):
            self._check_call(call, (*path, "calls", c))
        self._counts["by_tokens"] += len(trajectory.calls)
        return trajectory.calls

    def _by_rollout(self, trajectory: Trajectory, inside: Path) -> list[Call]:
        rollout, path = trajectory.rollout, (*inside, "rollout")
        if not ROLLOUT_ID.fullmatch(rollout):
            raise Refused(path, f"{rollout!r} is no rollout id; send the id the agent ran under")
        if rollout in self._rollouts:
            first = ".".join(map(str, self._rollouts[rollout]))
            raise Refused(path, f"rollout {rollout!r} is at {first} too; train it once")
        self._rollouts[rollout] = path
        recorded = self._calls.rollout(rollout)
        if not recorded:
            raise Refused(
                path,
                f"nothing is recorded of rollout {rollout!r}: its agent called no model of this "
                "server under that id, or its calls were pruned; open a run to keep them "
                "(POST /v1/runs)",
            )
        wanted = self._wanted(trajectory, [one.id for one in recorded], inside)
        calls = [call for one in recorded if (call := self._recorded(one, wanted, path))]
        self._used += [one.id for one in recorded]
        self._counts["by_rollout"] += sum(call.trained for call in calls)
        return calls

    def _wanted(self, trajectory: Trajectory, known: list[str], path: Path) -> set[str]:
        """Ids of the calls that may be trained: those named, or all."""
        if trajectory.trained_calls is None:
            return set(known)
        for i, name in enumerate(trajectory.trained_calls):
            if name not in known:
                raise Refused(
                    (*path, "trained_calls", i),
                    f"rollout {trajectory.rollout!r} has no call {brief(name)}. Its calls: "
                    f"{', '.join(known[:20])}{', ...' if len(known) > 20 else ''}.",
                )
        return set(trajectory.trained_calls)

    def _recorded(self, one: RecordedCall, wanted: set[str], path: Path) -> Call | None:
        """One call of a rollout; other models' are context, and abandoned ones nothing at all."""
        if one.abandoned:
            self._counts["dropped/abandoned"] += 1
            return None
        if one.model != str(self._record.key):
            self._counts["dropped/other_model"] += 1
            return one.call.model_copy(update={"trained": False})
        if one.is_frozen:
            self._counts["dropped/frozen"] += 1
            return one.call.model_copy(update={"trained": False})
        if one.id not in wanted:
            self._counts["dropped/not_named"] += 1
            return one.call.model_copy(update={"trained": False})
        different = differing(one.fingerprint, self._fingerprint)
        if other := [part for part in different if part in FIXED]:
            raise Refused(
                path,
                f"call {one.id!r} was answered with other {' and '.join(other)} than "
                f"{one.base_model!r} has now, and its ids may mean something else. Run the rollout "
                "again, or put the old files back.",
            )
        self._counts["other_template_args"] += bool(different)
        self._check_fresh(one.call.step, path, f"call {one.id!r} ")
        same = one.adapter_sha256 == self._adapter_sha256 or one.call.step != self._step
        if not same and self._config.max_staleness is not None:
            raise Refused(
                path,
                f"call {one.id!r} was answered by another step {self._step} than "
                f"{str(self._record.key)!r} has now: the model was renamed, or its steps were "
                "deleted and trained anew. Run the rollout again.",
            )
        return one.call

    def _check_fresh(self, step: int, path: Path, what: str = "it ") -> None:
        if why := too_stale(step, self._step, self._config):
            raise Refused(path, what + why)

    def _by_messages(self, trajectory: Trajectory, path: Path) -> list[Call]:
        histories: list[tuple[History, Path]] = [(trajectory, path)]
        histories += [
            (history, (*path, "additional_histories", h))
            for h, history in enumerate(trajectory.additional_histories)
        ]
        taken = [one for history, where in histories for one in self._choices.read(history, where)]
        self._counts.update(one.how for one in taken)
        self._counts["other_template_args"] += sum(one.other_args for one in taken)
        for one in taken:
            self._check_fresh(one.call.step, one.where)
        self._used += [one.recorded for one in taken if one.recorded is not None]
        return [one.call for one in taken]

    # ---- what would be wrong to train on ---------------------------------------------------------

    def _check_call(self, call: Call, path: Path) -> None:
        if not isfinite(call.temperature):
            raise Refused((*path, "temperature"), "expected a finite number")
        if call.step > MAX_STEP:
            raise Refused((*path, "step"), f"expected a step, got {call.step}")
        # Calls that are context keep their own vocabulary: they are never computed.
        vocab = self._vocab if call.trained else MAX_ID
        for field in ("prompt_ids", "completion_ids"):
            ids = getattr(call, field)
            if wrong := first_outside(ids, vocab):
                place, token = wrong
                raise Refused(
                    (*path, field, place),
                    f"token id {token} is outside the vocabulary of {vocab} of "
                    f"{self._record.spec.base_model!r}; train the model that answered the call"
                    if call.trained
                    else f"expected a token id, got {token}",
                )
        if not call.trained:
            return
        self._check_fresh(call.step, (*path, "step"))
        for place, value in enumerate(call.logprobs or ()):
            if why := wrong_logprob(value):
                raise Refused((*path, "logprobs", place), why)

    def _check_shaped(self, trajectory: Trajectory, trained: int, path: Path) -> None:
        shaped, path = trajectory.shaped_rewards, (*path, "shaped_rewards")
        if shaped is None:
            if self._config.credit != "outcome":
                raise Refused(
                    path,
                    f"credit is {self._config.credit!r}, which needs one value for each of the "
                    f"{trained} trained calls; send them, or set credit: outcome",
                )
            return
        bad = next((i for i, value in enumerate(shaped) if not isfinite(value)), None)
        if bad is not None:
            raise Refused((*path, bad), f"expected a finite number, got {shaped[bad]!r}")
        if len(shaped) != trained:
            raise Refused(
                path,
                f"{len(shaped)} values for {trained} trained calls; send one for each, in the "
                "order of the calls",
            )

    def _nothing(self, counts: Mapping[str, int]) -> str:
        found = ", ".join(f"{name}: {n}" for name, n in counts.items()) or "there are no groups"
        hint = (
            "Sample with logprobs from this server and send the choices as the client returned "
            "them, or refer to the rollouts by their ids."
        )
        if counts.get("dropped/other_model"):
            hint = (
                f"The rollouts called other models than {str(self._record.key)!r}; let the agent "
                f"ask for {self._record.key.name!r}, or open a run with that model (POST /v1/runs)."
            )
        return f"No valid assistant messages with logprobs ({found}). {hint}"


def _finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """Without NaN and infinities, which JSON cannot carry on."""
    return {k: v for k, v in values.items() if not isinstance(v, float) or isfinite(v)}
