"""Which calls of a rollout are trained, and which calls named no rollout.

In:   the calls a hone server recorded (or those the harness saw of another one), the targets
Out:  the calls that are trained, with a value for each; the others, counted by reason

A call is identified by its id and never by its text: two answers may say the same, and only one of
them may be a target. Evaluators may call the same server, so their calls say whose they are
(`EVALUATION`).
"""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from hone.capture.openai import LEFT
from hone.errors import HoneError
from hone.types import ModelInfo, RecordedCall

if TYPE_CHECKING:
    from hone.capture.base import SeenCall, Step

logger = logging.getLogger("hone")

WORKFLOW = "<workflow>"
"""As a target: every call of a rollout, whatever function made it."""
EVALUATION = "<evaluation>"
"""The function that calls of evaluators name."""
UNSEEN = (
    "An agent's calls are seen if its HTTP client is httpx or httpx2, as that of openai is, and if "
    "a thread it starts gets the context (contextvars.copy_context().run; thread pools have it); any "
    "other client, and an agent in a process of its own, must use the base URL "
    "{root}/rollout/ROLLOUT_ID/v1, which is `llm.rollout_url`"
)
NO_LOGPROBS = (
    "No valid assistant messages with logprobs. Let the model be asked at the training server, which "
    "records them; of another endpoint, set `logprobs: true` in its `llms` entry and see that it "
    "returns them."
)

Message = dict[str, Any]


class ModelServer(Protocol):
    """A server that answers for the model in training and records its calls.

    An adapter whose backend is one names it in `server`. Its runs then get every check of
    preflight, and its rollouts are trained on the recorded tokens instead of on text.
    """

    @property
    def base_url(self) -> str:
        """Where it is reached, without /v1."""
        ...

    @property
    def model_name(self) -> str:
        """PROJECT/NAME of the model in training, as the server records its calls."""
        ...

    @property
    def base_model(self) -> str:
        """What the configuration says that the model is trained from."""
        ...

    @property
    def info(self) -> ModelInfo | None:
        """The model as the server sees it; None before `initialize`."""
        ...

    async def recorded(self, rollout: str) -> list[RecordedCall]:
        """The calls that it recorded of a rollout."""
        ...

    async def unscoped_calls(self, run_id: str) -> Mapping[str, int]:
        """Requests to the run's models that named no rollout so far, by model."""
        ...


@dataclass(frozen=True, slots=True)
class Targets:
    """Which calls are trained."""

    functions: frozenset[str] = frozenset({WORKFLOW})
    models: frozenset[str] | None = None
    """Names by which the target model is asked for; None: any."""
    trained: str | None = None
    """PROJECT/NAME of the model in training, as a hone server records it; None: any."""

    def has_function(self, path: str) -> bool:
        """Whether calls made from this path of functions are trained: its end counts.

        `search` is every call of the function `search`, `research.model` that of a node `model` in
        a subgraph `research`.
        """
        if WORKFLOW in self.functions:
            return True
        return any(path == name or path.endswith(f".{name}") for name in self.functions)


@dataclass(frozen=True, slots=True)
class SampledCall:
    """One answer that could be trained."""

    id: str
    place: int
    """Of its request among the rollout's, for steps."""
    messages: list[Message]
    reply: Message
    finish: str
    logprobs: Any
    """An empty dict where the server has them."""
    token_ids: list[int] | None = None
    """Where a foreign server tells them."""
    tokens: Sequence[Any] = ()
    """What was sampled: ids, or the text of each token where a foreign server tells no ids."""
    logprob: float = 0.0
    """The log-probability of all of it."""


@dataclass(frozen=True, slots=True)
class TrainedCalls:
    """What of a rollout is trained."""

    sampled: list[SampledCall] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    """Calls that are not trained, by reason."""
    foreign: bool = False
    """No hone server recorded it: its text and its log-probabilities are all there is."""

    @property
    def reason(self) -> str | None:
        """Why nothing is trained, if nothing is: what the most of its calls lacked."""
        if self.sampled:
            return None
        return self.dropped.most_common(1)[0][0] if self.dropped else "no_calls"


def from_recorded(
    recorded: Sequence[RecordedCall], seen: "Sequence[SeenCall]", targets: Targets
) -> TrainedCalls:
    """What a hone server recorded; `seen` tells by which name each call asked for its model."""
    requests = {choice["call_id"]: c for c in seen for choice in c.choices if "call_id" in choice}
    trained = TrainedCalls()
    for one in sorted(recorded, key=lambda c: (c.index, c.choice)):
        request = requests.pop(one.id, None)
        why = _not_trained(one, request and request.model, targets)
        if why is None:
            trained.sampled.append(_sampled(one, one.index if request is None else request.index))
        else:
            trained.dropped[why] += 1
    # A server records what its client left when it has noticed that, which may be later.
    left = 0 if recorded else sum(call.error == LEFT for call in seen)
    trained.dropped.update(+Counter(abandoned=left, unrecorded=len(requests)))
    return trained


def with_ids(recorded: Sequence[RecordedCall], ids: Sequence[str]) -> list[SampledCall]:
    """The recorded calls of these ids, in the order in which they were made."""
    ordered = sorted(recorded, key=lambda c: (c.index, c.choice))
    return [_sampled(one, one.index) for one in ordered if one.id in ids]


def _sampled(one: RecordedCall, place: int) -> SampledCall:
    return SampledCall(
        one.id,
        place,
        one.messages or [],
        one.reply,
        one.finish,
        logprobs={},
        tokens=one.call.completion_ids,
        logprob=sum(one.call.logprobs or ()),
    )


def from_seen(seen: "Sequence[SeenCall]", targets: Targets) -> TrainedCalls:
    """What the harness saw of a foreign server: only answers with log-probabilities count."""
    trained = TrainedCalls(foreign=True)
    dropped = trained.dropped
    for call in seen:
        for place, choice in enumerate(call.choices):
            logprobs = choice.get("logprobs") or {}
            if call.messages is None or "message" not in choice:
                dropped["not_chat"] += 1
            elif targets.models is not None and call.model not in targets.models:
                dropped["not_target_model"] += 1
            elif not targets.has_function(call.function):
                dropped["not_target_function"] += 1
            elif not logprobs.get("content"):
                dropped["no_logprobs"] += 1
            elif call.temperature == 0:
                dropped["greedy"] += 1
            else:
                trained.sampled.append(
                    SampledCall(
                        f"{call.id or call.index}.{place}",
                        call.index,
                        call.messages,
                        choice["message"],
                        choice.get("finish_reason") or "stop",
                        logprobs,
                        choice.get("token_ids"),
                        [entry.get("token") for entry in logprobs["content"]],
                        sum(entry.get("logprob") or 0.0 for entry in logprobs["content"]),
                    )
                )
    return trained


def _not_trained(one: RecordedCall, requested: str | None, targets: Targets) -> str | None:
    """Why a recorded call is not trained."""
    if one.abandoned:
        return "abandoned"
    if targets.trained is not None and one.model != targets.trained:
        return "other_model"
    if one.is_frozen:
        return "frozen"
    if targets.models is not None:
        # A server that did not record what was asked for leaves what this process saw, if it did.
        name = one.asked or requested
        names = {name} if name else {one.model, one.base_model}
        if not names & targets.models:
            return "not_target_model"
    if not targets.has_function(one.call.function):
        return "not_target_function"
    if not one.call.completion_ids or one.call.logprobs is None:
        return "no_logprobs"
    return "greedy" if one.call.temperature == 0 else None


# ---- values of steps ------------------------------------------------------------------------


def shaped_rewards(steps: "Sequence[Step]", sampled: Sequence[SampledCall]) -> list[float] | None:
    """One value per trained call: the sum of the values that were noted for it.

    None where no step has a value. A value noted before any trained call was answered belongs to
    none; one noted for a call that is not trained belongs to the trained call answered before it.
    """
    values = [0.0] * len(sampled)
    trained = {one.place: i for i, one in enumerate(sampled)}
    valued = [(step, step.value) for step in steps if step.value is not None]
    for step, value in valued:
        call = next((trained[index] for index in step.about if index in trained), None)
        if call is not None:
            values[call] += value
    return values if valued else None


# ---- calls that name no rollout -------------------------------------------------------------------


async def count_unscoped(server: ModelServer | None, run_id: str) -> Counter[str]:
    """Requests that named no rollout so far, by model; none where no server can tell.

    hone cannot see them: they are missing from the trajectory, and under the base model's name they
    get the untrained model. Only the server knows of them.
    """
    try:
        return Counter() if server is None else Counter(await server.unscoped_calls(run_id))
    except HoneError as error:
        logger.warning("Calls without a rollout were not counted: %s", error)
        return Counter()


def unscoped_message(server: ModelServer, counts: Counter[str]) -> str:
    """What to tell the user about such requests."""
    by_model = ", ".join(f"{name}: {n}" for name, n in counts.items())
    base = [name for name in counts if name != server.model_name]
    stale = f" Outside a rollout {base[0]!r} is the untrained model." if base else ""
    return (
        f"{counts.total()} calls named no rollout while rollouts ran ({by_model}), and are not "
        f"trained.{stale} {UNSEEN.format(root=server.base_url)}. If somebody else used the server, "
        "nothing is wrong."
    )
