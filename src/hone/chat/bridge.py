"""Build the next prompt of a conversation from the ids that were fed and sampled before.

In:   the calls a rollout has made so far; the messages of its next request
Out:  NextPrompt: the prompt's ids, whether they continue a recorded call, and if not, why

Encoding an answer again changes its ids in a quarter of the cases; its log-probabilities would
then belong to tokens that were never sampled, and the turns would not merge in the trie. So where
the leading messages of a request mean the same as a recorded call's messages plus its reply, the
prompt is that call's prompt ids + its sampled ids + the rendered rest.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from typing import Any, Literal

from hone.chat.messages import Message, Tools, check_messages, check_tools
from hone.chat.template import ChatTemplate


class Reason(StrEnum):
    """Why a prompt continues earlier ids or not; the values are metric names."""

    FIRST = "first call"
    """The first call of its rollout; outside of rollouts, a call that continues no other."""
    EXACT = "exact"
    """Bridged, and the message came back as it was returned."""
    ARGUMENTS = "arguments re-serialised"
    """Bridged: the JSON of a tool call was rewritten with the same values."""
    REASONING_KEPT = "reasoning not sent back"
    """Bridged: the ids include reasoning that the agent left out of its messages."""
    TRUNCATED = "truncated"
    """Bridged: the completion had not ended its turn, and the bridge closed it."""
    REPLY_REWRITTEN = "reply rewritten"
    """The messages of a call came back, but with another answer."""
    HISTORY_REWRITTEN = "history rewritten"
    """A recorded answer came back, but not after the messages it answered."""
    TOOLS_CHANGED = "tools changed"
    """The messages continue, but with other tools in the prompt."""
    TEMPLATE_CHANGED = "template changed"
    """Another chat template, or other template arguments."""
    REASONING_STRIPPED = "reasoning stripped"
    """The template removes the reasoning of earlier turns after a new user message."""
    ANSWER_ADDED = "answer not sampled here"
    """The new messages include an assistant message that no call returned; it is encoded."""
    CANNOT = "renderer cannot bridge"
    """The template cannot be continued after a sampled answer."""
    SAME_PROMPT = "same prompt again"
    """A prompt that was sent before: a retry, or one of several samples."""
    OTHER = "another conversation"
    """Messages that continue no recorded call, such as those of a sub-agent."""


Outcome = Literal["first", "bridged", "re-rendered", "branched"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedCall:
    """One recorded call: the ids that were fed and sampled, and its messages."""

    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]
    messages: Sequence[Mapping[str, Any]]
    reply: Mapping[str, Any]
    """The assistant message as the API returned it (Reply.message)."""
    tools: Tools | None = None
    template: str = ""
    """Fingerprint of the template that rendered it; empty matches any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NextPrompt:
    """The ids of the next prompt, and how they were built."""

    ids: list[int]
    outcome: Outcome
    reasons: tuple[Reason, ...]
    source: int | None = None
    """Index of the recorded call that the messages continue."""


def _chained(before: bytes, one: bytes) -> bytes:
    return hashlib.sha256(before + one).digest()


@dataclass(frozen=True, slots=True)
class HashedMessages:
    """The messages of a request, checked, with the hashes they are compared by."""

    messages: list[Message]
    hashes: list[bytes]
    """Hash of each message's meaning."""
    prefixes: list[bytes]
    """Hash of all messages up to and including each one."""

    @classmethod
    def of(cls, messages: list[Message]) -> "HashedMessages":
        hashes = [hashlib.sha256(message.meaning.encode()).digest() for message in messages]
        return cls(messages, hashes, list(accumulate(hashes, _chained)))

    def followed_by(self, message: Message) -> "HashedMessages":
        """These messages and one more."""
        added = HashedMessages.of([message])
        last = _chained(self.prefixes[-1], added.hashes[0])
        return HashedMessages(
            [*self.messages, message], [*self.hashes, *added.hashes], [*self.prefixes, last]
        )


@dataclass(frozen=True, slots=True)
class _Recorded:
    call: RenderedCall
    messages: list[Message]
    """Its messages and the reply."""
    tools: str


@dataclass(frozen=True, slots=True)
class UnrenderedPrompt:
    """A request and the recorded calls it may continue, independent of the Conversation.

    Looking up a Conversation needs a lock; rendering takes long, needs none, and may run in another
    process.
    """

    request: HashedMessages
    tools: list[dict[str, Any]]
    candidates: list[tuple[int, _Recorded]]
    """Calls whose messages and reply the request begins with, the longest first."""
    otherwise: tuple[Outcome, Reason]
    """The outcome if the request continues none of them."""

    def render(self, template: ChatTemplate) -> NextPrompt:
        """The prompt. Raises TemplateError where the template cannot express the messages."""
        outcome, reason = self.otherwise
        source: int | None = None
        for index, recorded in self.candidates:
            prompt = self._continue(template, index, recorded)
            if isinstance(prompt, NextPrompt):
                return prompt
            if source is None:
                source, outcome, reason = index, "re-rendered", prompt
        ids = template.renderer.render(self.request.messages, self.tools, generation_prompt=True)
        return NextPrompt(ids=ids, outcome=outcome, reasons=(reason,), source=source)

    def _continue(
        self, template: ChatTemplate, index: int, recorded: _Recorded
    ) -> NextPrompt | Reason:
        """The prompt that continues this call, or why there is none."""
        messages, call = self.request.messages, recorded.call
        added = messages[len(recorded.messages) :]
        if call.template and call.template != template.fingerprint:
            return Reason.TEMPLATE_CHANGED
        if recorded.tools != _write_tools(self.tools):
            return Reason.TOOLS_CHANGED
        if _reasoning_changed(recorded.messages, messages):
            return Reason.REPLY_REWRITTEN
        ids = template.renderer.extend(call.prompt_ids, call.completion_ids, added, self.tools)
        inserted = any(message.role == "assistant" for message in added)
        rewritten = inserted and self.otherwise[1] == Reason.REPLY_REWRITTEN
        if ids is None:
            return Reason.REPLY_REWRITTEN if rewritten else _why_not(template, added)
        reasons = _differences(template, recorded, messages)
        if inserted:
            reasons.append(Reason.REPLY_REWRITTEN if rewritten else Reason.ANSWER_ADDED)
        reasons = reasons or [Reason.EXACT]
        return NextPrompt(ids=ids, outcome="bridged", reasons=tuple(reasons), source=index)


class Conversation:
    """Calls of one rollout. They may branch: the longest one that can be continued counts."""

    def __init__(self, template: ChatTemplate, *, related: bool = True) -> None:
        """`related`: calls that continue no other one still belong to the same conversation."""
        self._template = template
        self._related = related
        self._calls: list[_Recorded] = []
        self._by_prefix: dict[bytes, list[int]] = {}
        self._prompts: set[bytes] = set()
        self._replies: set[bytes] = set()

    def add(self, call: RenderedCall, request: HashedMessages | None = None) -> None:
        """`request`: the call's messages, if they are already hashed."""
        request = request or HashedMessages.of(check_messages(call.messages))
        (reply,) = check_messages([call.reply])
        hashed = request.followed_by(reply)
        *_, prompt, whole = hashed.prefixes
        self._prompts.add(prompt)
        self._by_prefix.setdefault(whole, []).append(len(self._calls))
        self._replies.add(hashed.hashes[-1])
        self._calls.append(_Recorded(call, hashed.messages, _write_tools(check_tools(call.tools))))

    def prompt(self, messages: object, tools: Tools | None = None) -> NextPrompt:
        checked, checked_tools = self._template.check(messages, tools)
        return self.match(HashedMessages.of(checked), checked_tools).render(self._template)

    def match(self, request: HashedMessages, tools: list[dict[str, Any]]) -> UnrenderedPrompt:
        """The recorded calls a request may continue. Renders nothing."""
        candidates = [
            (index, self._calls[index])
            for prefix in reversed(request.prefixes)
            for index in reversed(self._by_prefix.get(prefix, ()))
        ]
        return UnrenderedPrompt(request, tools, candidates, self._otherwise(request))

    def _otherwise(self, request: HashedMessages) -> tuple[Outcome, Reason]:
        """The outcome of a request that continues no recorded answer."""
        if not self._calls:
            return "first", Reason.FIRST
        prefixes, messages = request.prefixes, request.messages
        rewritten = any(
            prompt in self._prompts and answer.role == "assistant" and whole not in self._by_prefix
            for prompt, answer, whole in zip(prefixes, messages[1:], prefixes[1:], strict=False)
        )
        if rewritten:
            return "re-rendered", Reason.REPLY_REWRITTEN
        answers = zip(messages, request.hashes, strict=True)
        if any(m.role == "assistant" and hashed in self._replies for m, hashed in answers):
            return "re-rendered", Reason.HISTORY_REWRITTEN
        if prefixes[-1] in self._prompts:
            return "branched", Reason.SAME_PROMPT
        return ("branched", Reason.OTHER) if self._related else ("first", Reason.FIRST)


def _differences(
    template: ChatTemplate, recorded: _Recorded, messages: list[Message]
) -> list[Reason]:
    """How a continued conversation differs from the one that was recorded."""
    pairs = list(zip(recorded.messages, messages, strict=False))
    reasons: list[Reason] = []
    if any(
        [call.arguments for call in ours.tool_calls] != [call.arguments for call in sent.tool_calls]
        for ours, sent in pairs
    ):
        reasons.append(Reason.ARGUMENTS)
    if any(ours.reasoning and not sent.reasoning for ours, sent in pairs):
        reasons.append(Reason.REASONING_KEPT)
    completion = recorded.call.completion_ids
    if not completion or completion[-1] not in template.renderer.turn_ends:
        reasons.append(Reason.TRUNCATED)
    return reasons


def _why_not(template: ChatTemplate, added: Sequence[Message]) -> Reason:
    renderer = template.renderer
    if not renderer.bridges:
        return Reason.CANNOT
    if any(message.role == "assistant" for message in added):
        return Reason.ANSWER_ADDED
    if renderer.strips_reasoning and any(message.role == "user" for message in added):
        return Reason.REASONING_STRIPPED
    return Reason.CANNOT


def _reasoning_changed(recorded: Sequence[Message], sent: Sequence[Message]) -> bool:
    """Whether a message came back with different reasoning; leaving it out is not a change."""
    return any(
        ours.reasoning and theirs.reasoning and ours.reasoning != theirs.reasoning
        for ours, theirs in zip(recorded, sent, strict=False)
    )


def _write_tools(tools: Sequence[dict[str, Any]]) -> str:
    # Order and spelling are part of the prompt's text, so keys are not sorted.
    return json.dumps(list(tools), ensure_ascii=False)
