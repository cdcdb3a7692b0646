"""Which calls of a rollout are trained, and which calls named no rollout.

In:   the calls that a hone server recorded, or that the harness saw of another server; the targets
Out:  the calls that are trained, with their values; counts of the others, by reason

A call is identified by its id and never by its text: two answers may be equal, and only one of them
may be a target. Evaluators may call the same server; their calls carry the function `EVALUATION`.
"""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from hone.capture.base import SeenCall, Step
from hone.capture.openai import LEFT
from hone.errors import HoneError
from hone.types import CallSummary, ModelInfo, RecordedCall

logger = logging.getLogger("hone")

WORKFLOW = "<workflow>"
"""Target for every call of a rollout."""
EVALUATION = "<evaluation>"
"""Function name of calls that evaluators make."""
UNSEEN = (
    "hone sees an agent's calls if its HTTP client is httpx or httpx2, like that of openai, and if "
    "threads that it starts get the context (contextvars.copy_context().run; thread pools do this). "
    "Any other client, and an agent in another process, must use the base URL "
    "{root}/rollout/ROLLOUT_ID/v1, which is `llm.rollout_url`"
)
NO_LOGPROBS = (
    "No valid assistant messages with logprobs. Call the model at the training server, which records "
    "them; for another endpoint, set `logprobs: true` in its `llms` entry and check that it returns "
    "them."
)

Message = dict[str, Any]


class ModelServer(Protocol):
    """A server that serves the model in training and records its calls.

    An adapter with such a backend sets `server`. Its runs then get every preflight check, and its
    rollouts are trained on the recorded tokens instead of on text.
    """

    @property
    def base_url(self) -> str:
        """Address of the server, without /v1."""
        ...

    @property
    def model_name(self) -> str:
        """PROJECT/NAME of the model in training, as the server records its calls."""
        ...

    @property
    def base_model(self) -> str:
        """The base model according to the configuration."""
        ...

    @property
    def info(self) -> ModelInfo | None:
        """The model as the server sees it; None before `initialize`."""
        ...

    async def recorded(self, rollout: str) -> list[RecordedCall]:
        """The recorded calls of a rollout, with their messages and tokens."""
        ...

    async def summaries(self, rollout: str) -> list[CallSummary]:
        """The recorded calls of a rollout, without text and tokens: a long rollout is megabytes."""
        ...

    async def unscoped_calls(self, run_id: str) -> Mapping[str, int]:
        """Number of requests to the run's models without a rollout so far, by model."""
        ...


@dataclass(frozen=True, slots=True)
class Targets:
    """Which calls are trained."""

    functions: frozenset[str] = frozenset({WORKFLOW})
    models: frozenset[str] | None = None
    """Names of the target model in requests; None: any."""
    trained: str | None = None
    """PROJECT/NAME of the model in training, as a hone server records it; None: any."""

    def has_function(self, path: str) -> bool:
        """Whether calls with this function path are trained; targets match the end of the path.

        `search` matches every call of the function `search`, `research.model` those of the node
        `model` in the subgraph `research`.
        """
        if WORKFLOW in self.functions:
            return True
        return any(path == name or path.endswith(f".{name}") for name in self.functions)


@dataclass(frozen=True, slots=True)
class SampledCall:
    """One sampled answer that can be trained."""

    id: str
    place: int
    """Index of its request in the rollout."""
    messages: list[Message] = field(default_factory=list)
    """Messages of the request; empty where only the server has the text."""
    reply: Message = field(default_factory=dict)
    finish: str = "stop"
    logprobs: Any = field(default_factory=dict)
    """An empty dict if the server recorded them."""
    token_ids: list[int] | None = None
    """Token ids, if a foreign server returns them."""
    tokens: Any = None
    """Equal for equal answers: the hash of the sampled ids, or the text of each token of a foreign
    server."""
    logprob: float = 0.0
    """Sum of the log-probabilities."""


@dataclass(frozen=True, slots=True)
class TrainedCalls:
    """The calls of a rollout that are trained."""

    sampled: list[SampledCall] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    """Calls that are not trained, by reason."""
    foreign: bool = False
    """Whether no hone server recorded the calls, so that only text and log-probabilities are
    known."""

    @property
    def reason(self) -> str | None:
        """Why nothing is trained: the most frequent reason; None if something is."""
        if self.sampled:
            return None
        return self.dropped.most_common(1)[0][0] if self.dropped else "no_calls"


def from_recorded(
    recorded: Sequence[CallSummary], seen: Sequence[SeenCall], targets: Targets
) -> TrainedCalls:
    """Select from the recorded calls; `seen` has their order in this process.

    The selected calls have no text: the server has it.
    """
    requests = {choice["call_id"]: c for c in seen for choice in c.choices if "call_id" in choice}
    trained = TrainedCalls()
    for one in sorted(recorded, key=lambda c: (c.index, c.choice)):
        request = requests.pop(one.id, None)
        why = _not_trained(one, targets)
        if why is None:
            place = one.index if request is None else request.index
            trained.sampled.append(
                SampledCall(
                    one.id,
                    place,
                    finish=one.finish,
                    tokens=one.tokens_sha256,
                    logprob=one.logprob or 0.0,
                )
            )
        else:
            trained.dropped[why] += 1
    # A server records an abandoned call when it notices that the client left, maybe later.
    left = 0 if recorded else sum(call.error == LEFT for call in seen)
    trained.dropped.update(+Counter(abandoned=left, unrecorded=len(requests)))
    return trained


def with_ids(recorded: Sequence[RecordedCall], ids: Sequence[str]) -> list[SampledCall]:
    """The recorded calls with these ids, in the order of the requests."""
    ordered = sorted(recorded, key=lambda c: (c.index, c.choice))
    return [
        SampledCall(one.id, one.index, one.messages or [], one.reply, one.finish)
        for one in ordered
        if one.id in ids
    ]


def from_seen(seen: Sequence[SeenCall], targets: Targets) -> TrainedCalls:
    """Select from the calls to a foreign server; only answers with log-probabilities count."""
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


def _not_trained(one: CallSummary, targets: Targets) -> str | None:
    """Why a recorded call is not trained; None if it is."""
    if one.abandoned:
        return "abandoned"
    if targets.trained is not None and one.model != targets.trained:
        return "other_model"
    if one.is_frozen:
        return "frozen"
    if targets.models is not None and one.requested_model not in targets.models:
        return "not_target_model"
    if not targets.has_function(one.function):
        return "not_target_function"
    if not one.num_tokens or one.logprob is None:
        return "no_logprobs"
    return "greedy" if one.temperature == 0 else None


# ---- values of steps ------------------------------------------------------------------------


def shaped_rewards(steps: Sequence[Step], sampled: Sequence[SampledCall]) -> list[float] | None:
    """One value per trained call: the sum of the values of its `hone.step` calls.

    None if no step has a value. A value before the first trained call is not used; a value for a
    call that is not trained counts for the trained call before it.
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
    """Number of requests without a rollout so far, by model; empty without a hone server.

    Only the server sees these requests: they are missing from the trajectory, and those that name
    the base model are answered by the untrained model.
    """
    try:
        return Counter() if server is None else Counter(await server.unscoped_calls(run_id))
    except HoneError as error:
        logger.warning("Calls without a rollout were not counted: %s", error)
        return Counter()


def unscoped_message(server: ModelServer, counts: Counter[str]) -> str:
    """The warning about such requests."""
    by_model = ", ".join(f"{name}: {n}" for name, n in counts.items())
    base = [name for name in counts if name != server.model_name]
    stale = f" Outside a rollout {base[0]!r} is the untrained model." if base else ""
    return (
        f"{counts.total()} calls named no rollout while rollouts ran ({by_model}), and are not "
        f"trained.{stale} {UNSEEN.format(root=server.base_url)}. If another client used the server, "
        "nothing is wrong."
    )
