"""What was recorded of one rollout -> a trajectory, or the reason why there is none.

In:   the calls a hone server recorded (or those the harness saw, of a foreign one), what is a target
Out:  an episode of messages, the ids of the calls that are trained, a value for each of them

A call is found by its id and never by its text: two answers may say the same, and only one of them
may be a target. Calls that continue a conversation extend it; what does not continue one exactly
begins another, so nothing is lost where an agent branches, retries or rewrites its context.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hone.capture.openai import LEFT
from hone.finetune.base import EpisodeItem, EpisodeItemRole
from hone.types import RecordedCall

if TYPE_CHECKING:
    from hone.capture.base import SeenCall, Step

WORKFLOW = "<workflow>"
"""As a target: every call of a rollout, whatever function made it."""

Message = dict[str, Any]

_ROLES = {
    "user": EpisodeItemRole.USER,
    "human": EpisodeItemRole.USER,
    "assistant": EpisodeItemRole.ASSISTANT,
    "ai": EpisodeItemRole.ASSISTANT,
    "system": EpisodeItemRole.SYSTEM,
    "developer": EpisodeItemRole.SYSTEM,
    "tool": EpisodeItemRole.TOOL,
    "function": EpisodeItemRole.FUNCTION,
}
_KEPT = ("tool_calls", "tool_call_id", "function_call", "name", "reasoning_content")


@dataclass(frozen=True, slots=True)
class Targets:
    """Which calls are trained."""

    functions: frozenset[str] = frozenset({WORKFLOW})
    models: frozenset[str] | None = None
    """Names by which the target model is asked for; None: any."""
    trained: str | None = None
    """PROJECT/NAME of the model in training, as a hone server records it; None: any."""

    def has_function(self, path: str) -> bool:
        """Whether calls made from this path of functions are trained: the innermost one counts."""
        return WORKFLOW in self.functions or path.rpartition(".")[2] in self.functions


@dataclass(frozen=True, slots=True)
class Sampled:
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


@dataclass(frozen=True, slots=True)
class Found:
    """What of a rollout is trained."""

    sampled: list[Sampled]
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


def of_recorded(
    recorded: Sequence[RecordedCall], seen: "Sequence[SeenCall]", targets: Targets
) -> Found:
    """What a hone server recorded; `seen` tells by which name each call asked for its model."""
    asked, places = _asked(seen)
    sampled: list[Sampled] = []
    dropped = Counter[str]()
    for one in sorted(recorded, key=lambda c: (c.index, c.choice)):
        why = _not_trained(one, asked, targets)
        if why is not None:
            dropped[why] += 1
            continue
        sampled.append(
            Sampled(
                id=one.id,
                place=places.get(one.id, one.index),
                messages=one.messages or [],
                reply=one.reply,
                finish=one.finish,
                logprobs={},
            )
        )
    if not recorded:
        # A server records what its client left when it has noticed that, which may be later.
        dropped["abandoned"] += sum(call.error == LEFT for call in seen)
    ids = {one.id for one in recorded}
    dropped["unrecorded"] += sum(id not in ids for id in asked)
    return Found(sampled, +dropped)


def of_seen(seen: "Sequence[SeenCall]", targets: Targets) -> Found:
    """What the harness saw of a foreign server: only answers with log-probabilities count."""
    sampled: list[Sampled] = []
    dropped = Counter[str]()
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
                finish = choice.get("finish_reason") or "stop"
                id = f"{call.id or call.index}.{place}"
                reply, ids = choice["message"], choice.get("token_ids")
                sampled.append(Sampled(id, call.index, call.messages, reply, finish, logprobs, ids))
    return Found(sampled, dropped, foreign=True)


def _asked(seen: "Sequence[SeenCall]") -> tuple[dict[str, str], dict[str, int]]:
    """By id of the recorded call: the model it asked for, and its place among all calls."""
    asked, places = {}, {}
    for call in seen:
        for choice in call.choices:
            if id := choice.get("call_id"):
                asked[id], places[id] = call.model, call.index
    return asked, places


def _not_trained(one: RecordedCall, asked: Mapping[str, str], targets: Targets) -> str | None:
    """Why a recorded call is not trained."""
    if one.abandoned:
        return "abandoned"
    if targets.trained is not None and one.model != targets.trained:
        return "other_model"
    if one.is_frozen:
        return "frozen"
    if targets.models is not None:
        # A server that did not record what was asked for leaves what this process saw, if it did.
        asked_for = one.asked or asked.get(one.id)
        names = {asked_for} if asked_for else {one.model, one.base_model}
        if not names & targets.models:
            return "not_target_model"
    if not targets.has_function(one.call.function):
        return "not_target_function"
    if not one.call.completion_ids or one.call.logprobs is None:
        return "no_logprobs"
    return "greedy" if one.call.temperature == 0 else None


# ---- values of steps ------------------------------------------------------------------------


def shaped(steps: "Sequence[Step]", sampled: Sequence[Sampled]) -> list[float] | None:
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


# ---- episodes -------------------------------------------------------------------------------


def episode(sampled: Sequence[Sampled]) -> list[EpisodeItem]:
    """Every conversation, one after the other; `metadata["conversation"]` numbers them."""
    talks: list[list[tuple[Message, Sampled | None]]] = []
    for one in sampled:
        talk = next((t for t in reversed(talks) if _continues(one.messages, t)), None)
        if talk is None:
            talk = []
            talks.append(talk)
        talk += [(message, None) for message in one.messages[len(talk) :]]
        talk.append((one.reply, one))
    return [_item(message, by, k) for k, talk in enumerate(talks) for message, by in talk]


def _continues(messages: list[Message], talk: list[tuple[Message, Sampled | None]]) -> bool:
    if len(talk) > len(messages):
        return False
    return all(_said(a) == _said(b) for a, (b, _) in zip(messages, talk, strict=False))


def _said(message: Message) -> tuple[Any, ...]:
    """What makes two messages the same, however a client spells what it leaves out."""
    calls = [
        (call.get("function", {}).get("name"), call.get("function", {}).get("arguments"))
        for call in message.get("tool_calls") or ()
    ]
    return message.get("role"), _text(message.get("content")), calls


def _item(message: Message, by: Sampled | None, conversation: int) -> EpisodeItem:
    role = _ROLES.get(str(message.get("role")), EpisodeItemRole.OTHER)
    kept: dict[str, Any] = {key: message[key] for key in _KEPT if message.get(key)}
    kept["conversation"] = conversation
    if by is not None:
        kept |= {"call": by.id, "finish_reason": by.finish}
        if by.token_ids is not None:
            kept["token_ids"] = by.token_ids
    logprobs = None
    if role is EpisodeItemRole.ASSISTANT:
        logprobs = {} if by is None else by.logprobs
    text = _text(message.get("content"))
    return EpisodeItem(role=role, content=text, logprobs=logprobs, metadata=kept)


def _text(content: Any) -> str:
    """The text of a message; of one in parts, what can be read of them."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list):
        texts = [part.get("text") if isinstance(part, dict) else None for part in content]
        if all(isinstance(text, str) for text in texts):
            return "".join(str(text) for text in texts)
    return json.dumps(content)
