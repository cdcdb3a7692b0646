"""Resolve the trajectory groups of a job to groups whose trajectories carry Calls only.

In:   TrajectoryGroups: by tokens, by reference to recorded rollouts, or as messages and choices
Out:  ResolvedGroups: the same groups as Calls, with counts; or Unprocessable

All invalid fields of a job are reported together, each with its path. What is valid but cannot be
trained is left out and counted by reason. Nothing is guessed: a call that this server did not
record is accepted only if its tokens, its text and its log-probabilities agree.

The counts:

    by_tokens, by_rollout, matched, rerendered, from_text    calls, by their source
    dropped/abandoned, dropped/other_model,                  calls that became context; frozen: to a
    dropped/frozen, dropped/not_named, dropped/no_logprobs   fixed step, such as NAME@0; not_named: not
                                                             in `trained_calls`
    dropped/no_calls, dropped/too_long                       trajectories
    dropped/empty_group                                      groups
    exceptions                                               rollouts that failed
    other_template_args                                      calls whose chat template had other
                                                             arguments, or printed another date; they
                                                             are trained like any other
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from hone.chat.choice_tokens import FieldPath, InvalidField, first_outside, wrong_logprob
from hone.errors import Unprocessable
from hone.models.shape import shape_of
from hone.server.serve.tokenizer import FIXED, BaseTokenizer, differing
from hone.server.train.choice_calls import ChoiceReader, Start
from hone.store.calls import CallStore
from hone.trajectory import Trajectory, TrajectoryGroup
from hone.types import Call, FieldError, RecordedCall
from hone.wire.errors import brief
from hone.wire.rollout import ROLLOUT_ID

MAX_ERRORS = 50
"""Maximum number of invalid fields listed in one error."""

FORMS = ("calls", "rollout", "messages_and_choices", "additional_histories")


@dataclass(frozen=True, slots=True)
class ResolvedGroups:
    """The contents of a job."""

    groups: list[TrajectoryGroup]
    """Every trajectory carries calls, and at least one of them is trained."""
    counts: dict[str, int]
    turns: dict[str, int]
    """How the prompts of the recorded calls were made: metrics of the job."""
    calls: list[str]
    """Ids of the recorded calls among them."""


def resolve_groups(
    groups: Sequence[TrajectoryGroup],
    tokenizer: BaseTokenizer,
    calls: CallStore,
    start: Start,
    field: str = "groups",
) -> ResolvedGroups:
    """The groups as calls. Raises Unprocessable with every wrong field. Blocking."""
    if groups and not any(group.trajectories for group in groups):
        raise Unprocessable([FieldError((field,), _no_trajectories(groups))])
    loss, alone = start.config.loss, all(len(g) + len(g.exceptions) <= 1 for g in groups)
    if alone and groups and loss == "dpo":
        message = (
            "no group has more than one trajectory, and DPO compares two of the same input. Send "
            "groups of two or more with unequal rewards: the preferred one with the larger."
        )
        raise Unprocessable([FieldError((field,), message)])
    compares = start.config.is_on_policy and start.config.baseline == "group"
    # ART's clients send such groups and expect a step that changes nothing (advance_when_flat).
    if alone and groups and compares and not start.advance_when_flat:
        message = (
            "no group has more than one trajectory, and there is nothing to compare it with. Sample "
            "every input several times (num_generations), or set config `baseline: batch`, which "
            "compares with the mean of the job."
        )
        raise Unprocessable([FieldError((field,), message)])
    return _Resolver(tokenizer, calls, start).run(groups, field)


def _no_trajectories(groups: Sequence[TrajectoryGroup]) -> str:
    failures = [failure for group in groups for failure in group.exceptions]
    if not failures:
        return (
            "the groups contain no trajectories. Send the trajectories of each input as one group."
        )
    return (
        f"the groups contain no trajectories (failed rollouts: {len(failures)}, the first with "
        f"{brief(f'{failures[0].type}: {failures[0].message}')}). Correct the rollouts and send their "
        "trajectories."
    )


class _Resolver:
    """Resolves one job."""

    def __init__(self, tokenizer: BaseTokenizer, calls: CallStore, start: Start) -> None:
        record, config = start.record, start.config
        tokenizer = tokenizer.with_kwargs(record.spec.chat_template_kwargs)
        config_file = tokenizer.files.path / "config.json"
        shape = shape_of(tokenizer.files.config, where=str(config_file))
        self._record, self._config, self._start = record, config, start
        self._calls = calls
        self._fingerprint = tokenizer.fingerprint
        self._vocab = shape.vocab
        self._limit = min(config.max_seq_length, shape.max_positions)
        self._counts: Counter[str] = Counter()
        self._turns: Counter[str] = Counter()
        self._choices = ChoiceReader(tokenizer, calls, start, shape.vocab, self._counts)
        self._errors: list[FieldError] = []
        self._used: list[str] = []
        self._rollouts: dict[str, FieldPath] = {}

    def run(self, groups: Sequence[TrajectoryGroup], field: str) -> ResolvedGroups:
        resolved = [self._group(group, (field, g)) for g, group in enumerate(groups)]
        trained = [group for group in resolved if group.trajectories]
        self._counts["dropped/empty_group"] = len(resolved) - len(trained)
        counts = dict(sorted((+self._counts).items()))
        if not self._errors and not trained:
            self._errors.append(FieldError((field,), self._nothing_to_train(counts)))
        if self._errors:
            raise Unprocessable(self._errors[:MAX_ERRORS])
        matched = self._choices.matched
        self._turns.update(count_turns(matched, {call.id for call in matched}))
        turns = dict(sorted(self._turns.items()))
        return ResolvedGroups(trained, counts, turns, [*self._used, *(c.id for c in matched)])

    def _group(self, group: TrajectoryGroup, path: FieldPath) -> TrajectoryGroup:
        self._counts["exceptions"] += len(group.exceptions)
        trajectories = []
        for t, trajectory in enumerate(group.trajectories):
            try:
                resolved = self._trajectory(trajectory, (*path, "trajectories", t))
            except InvalidField as error:
                self._errors.append(error.field)
                continue
            if resolved is not None:
                trajectories.append(resolved)
        return TrajectoryGroup(
            trajectories,
            example=group.example,
            metrics=_finite(group.metrics),
            metadata=_finite(group.metadata),
        )

    def _trajectory(self, trajectory: Trajectory, path: FieldPath) -> Trajectory | None:
        """The trajectory as calls; None if nothing of it can be trained."""
        forms = [name for name in FORMS if getattr(trajectory, name)]
        if {"messages_and_choices", "additional_histories"} <= set(forms):
            forms.remove("additional_histories")
        if len(forms) > 1:
            raise InvalidField(
                path,
                f"{' and '.join(forms)} each say what was sampled; send one of them and leave the "
                "others out",
            )
        if trajectory.trained_calls is not None and forms != ["rollout"]:
            raise InvalidField(
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
        # Only counted here; the learner leaves it out.
        self._counts["dropped/too_long"] += longest > self._limit
        return Trajectory(
            calls=calls,
            reward=trajectory.reward,
            shaped_rewards=trajectory.shaped_rewards,
            metrics=_finite(trajectory.metrics),
            metadata=_finite(trajectory.metadata),
        )

    # ---- three ways to say what was sampled -----------------------------------------------------

    def _by_tokens(self, trajectory: Trajectory, path: FieldPath) -> list[Call]:
        for c, call in enumerate(trajectory.calls):
            self._check_call(call, (*path, "calls", c))
        self._counts["by_tokens"] += len(trajectory.calls)
        return trajectory.calls

    def _by_rollout(self, trajectory: Trajectory, inside: FieldPath) -> list[Call]:
        rollout, path = trajectory.rollout, (*inside, "rollout")
        if not ROLLOUT_ID.fullmatch(rollout):
            raise InvalidField(
                path, f"{rollout!r} is not a rollout id; send the id the agent ran under"
            )
        if rollout in self._rollouts:
            first = ".".join(map(str, self._rollouts[rollout]))
            raise InvalidField(path, f"rollout {rollout!r} is at {first} too; send it once")
        self._rollouts[rollout] = path
        recorded = self._calls.rollout(rollout)
        if not recorded:
            raise InvalidField(
                path,
                f"no call is recorded for rollout {rollout!r}: its agent called no model of this "
                "server under that id, or its calls were pruned; open a run to keep them "
                "(POST /v1/runs)",
            )
        wanted = self._wanted(trajectory, [one.id for one in recorded], inside)
        resolved = [(one.id, self._recorded(one, wanted, path)) for one in recorded]
        self._used += [one.id for one in recorded]
        trained = {name for name, call in resolved if call is not None and call.trained}
        self._counts["by_rollout"] += len(trained)
        self._turns.update(count_turns(recorded, trained))
        return [call for _, call in resolved if call is not None]

    def _wanted(self, trajectory: Trajectory, known: list[str], path: FieldPath) -> set[str]:
        """Ids of the calls that may be trained: those named, or all."""
        if trajectory.trained_calls is None:
            return set(known)
        for i, name in enumerate(trajectory.trained_calls):
            if name not in known:
                raise InvalidField(
                    (*path, "trained_calls", i),
                    f"rollout {trajectory.rollout!r} has no call {brief(name)}. Its calls: "
                    f"{', '.join(known[:20])}{', ...' if len(known) > 20 else ''}.",
                )
        return set(trajectory.trained_calls)

    def _recorded(self, one: RecordedCall, wanted: set[str], path: FieldPath) -> Call | None:
        """One call of a rollout. Calls of other models are context; abandoned calls are dropped."""
        if one.abandoned:
            self._counts["dropped/abandoned"] += 1
            return None
        context = {
            "other_model": one.model != str(self._record.key),
            "frozen": one.is_frozen,
            "not_named": one.id not in wanted,
        }
        for reason, applies in context.items():
            if applies:
                self._counts[f"dropped/{reason}"] += 1
                return one.call.model_copy(update={"trained": False})
        different = differing(one.fingerprint, self._fingerprint)
        if other := [part for part in different if part in FIXED]:
            raise InvalidField(
                path,
                f"call {one.id!r} was answered with other {' and '.join(other)} than "
                f"{one.base_model!r} has now, and its ids may mean something else. Run the rollout "
                "again, or put the old files back.",
            )
        self._counts["other_template_args"] += bool(different)
        self._start.check_step(one.call.step, path, f"call {one.id!r} ")
        same = one.adapter_sha256 == self._start.adapter_sha256 or one.call.step != self._start.step
        if not same and self._config.max_staleness is not None:
            raise InvalidField(
                path,
                f"call {one.id!r} was answered by another step {self._start.step} than "
                f"{str(self._record.key)!r} has now: the model was renamed, or its steps were "
                "deleted and trained anew. Run the rollout again.",
            )
        return one.call

    def _by_messages(self, trajectory: Trajectory, path: FieldPath) -> list[Call]:
        calls = self._choices.read(trajectory, path)
        for h, history in enumerate(trajectory.additional_histories):
            calls += self._choices.read(history, (*path, "additional_histories", h))
        return calls

    # ---- what would be wrong to train on ---------------------------------------------------------

    def _check_call(self, call: Call, path: FieldPath) -> None:
        if not call.trained:  # context may have another vocabulary: it is never computed
            return
        for field in ("prompt_ids", "completion_ids"):
            if wrong := first_outside(getattr(call, field), self._vocab):
                place, token = wrong
                raise InvalidField(
                    (*path, field, place),
                    f"token id {token} is outside the vocabulary of {self._vocab} of "
                    f"{self._record.spec.base_model!r}; train the model that answered the call",
                )
        self._start.check_step(call.step, (*path, "step"))
        for place, value in enumerate(call.logprobs or ()):
            if why := wrong_logprob(value):
                raise InvalidField((*path, "logprobs", place), why)

    def _check_shaped(self, trajectory: Trajectory, trained: int, path: FieldPath) -> None:
        shaped, credit = trajectory.shaped_rewards, self._config.credit
        if shaped is None and credit != "outcome":
            raise InvalidField(
                (*path, "shaped_rewards"),
                f"credit is {credit!r}, which needs one value for each of the {trained} trained "
                "calls; send them, or set credit: outcome",
            )
        if shaped is not None and len(shaped) != trained:
            raise InvalidField(
                (*path, "shaped_rewards"),
                f"{len(shaped)} values for {trained} trained calls; send one for each, in the "
                "order of the calls",
            )

    def _nothing_to_train(self, counts: Mapping[str, int]) -> str:
        counted = ", ".join(f"{name}: {n}" for name, n in counts.items()) or "there are no groups"
        if not self._config.is_on_policy:
            return f"No assistant messages to train on ({counted}). Send whole conversations."
        hint = (
            "Sample with logprobs from this server and send the choices as the client returned "
            "them, or refer to the rollouts by their ids."
        )
        if counts.get("dropped/other_model"):
            hint = (
                f"The rollouts called other models than {str(self._record.key)!r}; let the agent "
                f"request {self._record.key.name!r}, or open a run with that model (POST /v1/runs)."
            )
        return f"No valid assistant messages with logprobs ({counted}). {hint}"


def _finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values without NaN and infinities, which JSON cannot represent."""
    return {k: v for k, v in values.items() if not isinstance(v, float) or isfinite(v)}


def count_turns(calls: Sequence[RecordedCall], trained: Collection[str]) -> Counter[str]:
    """Metrics `turns/...`: which prompts of trained calls continue sampled ids, and why others do not.

    `calls` are in request order; `trained` contains call ids. A turn is one request; its n choices
    share one prompt and count once. A turn is `forked` if an earlier turn already continued the same
    answer: both share the ids up to that answer.
    """
    by_id = {call.id: call for call in calls}
    continued: set[str] = set()
    requests: set[tuple[str, int]] = set()
    counts: Counter[str] = Counter()
    for call in calls:
        counts["turns/malformed"] += call.id in trained and bool(call.malformed)
        request = (call.rollout, call.index) if call.rollout else (call.id, 0)
        if call.id not in trained or request in requests:
            continue
        requests.add(request)
        outcome = f"turns/{call.outcome}"
        reasons = [reason.replace(" ", "_") for reason in call.reasons]
        if call.continues is not None:
            if call.continues in continued:
                reasons.append("forked")
            continued.add(call.continues)
            if (source := by_id.get(call.continues)) is not None:
                tokens = len(source.call.prompt_ids) + len(source.call.completion_ids)
                counts["turns/continued_tokens"] += tokens
        counts.update([outcome, *(f"{outcome}/{reason}" for reason in reasons)])
        counts["turns/prompt_tokens"] += len(call.call.prompt_ids)
        started = call.outcome in ("re-rendered", "branched") or "forked" in reasons
        counts["turns/branches"] += started
    return counts
