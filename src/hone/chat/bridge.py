"""Build the next prompt of a rollout out of the very ids that were fed and sampled before.

In:   the calls a rollout has made so far; the messages of its next request
Out:  Bridged: the prompt's ids, whether they continue a recorded call, and if not, why

Encoding an answer again changes its ids in a quarter of the cases; its log-probabilities would
then belong to tokens nobody sampled, and the turns of a conversation would not merge in the trie.
So where the leading messages of a request mean the same as a recorded call's messages plus the
message it returned, the prompt is that call's prompt ids + its sampled ids + the rendered rest.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from typing import Any, Literal

from hone.chat.messages import Message, Tools, check_messages, check_tools
from hone.chat.renderers import Library
from hone.chat.template import ChatTemplate


class Why(StrEnum):
    """What became of a turn, in the words the metrics use."""

    FIRST = "first call"
    EXACT = "exact"
    """Bridged, and the message came back as it was returned."""
    ARGUMENTS = "arguments re-serialised"
    """Bridged: the JSON of a tool call was spelt anew, with the same values."""
    REASONING_KEPT = "reasoning not sent back"
    """Bridged: the ids keep a reasoning that the agent left out of its messages."""
    TRUNCATED = "truncated"
    """Bridged: the completion had not ended its turn, and the bridge closed it."""
    REPLY_REWRITTEN = "reply rewritten"
    """The messages of a call came back, but with another answer."""
    HISTORY_REWRITTEN = "history rewritten"
    """A recorded answer came back, but not after the messages it answered."""
    TOOLS_CHANGED = "tools changed"
    TEMPLATE_CHANGED = "template changed"
    """Another chat template or other arguments of it."""
    REASONING_STRIPPED = "reasoning stripped"
    """The template cuts the reasoning of earlier turns once the user speaks again."""
    ANSWER_ADDED = "answer not sampled here"
    """The new messages hold an assistant's that no recorded call returned; it is encoded from text."""
    CANNOT = "renderer cannot bridge"
    SAME_PROMPT = "same prompt again"
    OTHER = "another conversation"


Outcome = Literal["first", "bridged", "re-rendered", "branched"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedCall:
    """One recorded call: what was fed and sampled, and the messages it stood for."""

    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]
    messages: Sequence[Mapping[str, Any]]
    reply: Mapping[str, Any]
    """The assistant message as the API returned it (Reply.message)."""
    tools: Tools | None = None
    template: str = ""
    """Fingerprint of the template that rendered it; empty matches any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bridged:
    """The next prompt, and what became of the turn."""

    ids: list[int]
    outcome: Outcome
    reasons: tuple[Why, ...]
    source: int | None = None
    """Index of the recorded call that was matched."""
    reused: int = 0
    """How many leading ids are exactly that call's prompt and completion."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The messages of a request, checked, with the digests they are compared by."""

    turns: list[Message]
    meanings: list[bytes]
    """A hash of what each message means."""
    prefixes: list[bytes]
    """The same for all messages up to and including each."""

    @classmethod
    def read(cls, turns: list[Message]) -> "Asked":
        meanings = [_meaning(message) for message in turns]
        chain = accumulate(meanings, lambda before, one: hashlib.sha256(before + one).digest())
        return cls(turns, meanings, list(chain))


@dataclass(frozen=True, slots=True)
class _Recorded:
    call: RenderedCall
    turns: list[Message]
    """Its messages and the reply."""
    tools: str


@dataclass(frozen=True, slots=True)
class Match:
    """A request and the recorded calls it may continue, independent of the Conversation.

    A Conversation needs a lock, and rendering takes long; so the two are apart. A Match can also be
    rendered in another process.
    """

    asked: Asked
    tools: list[dict[str, Any]]
    candidates: list[tuple[int, _Recorded]]
    """Calls whose messages and reply the request begins with, the longest first."""
    parting: tuple[Outcome, Why]
    """What becomes of the turn if it continues none of them."""

    def render(self, template: ChatTemplate) -> Bridged:
        """The prompt. Raises TemplateError where the template cannot express the messages."""
        refused: list[tuple[int, RenderedCall, Why]] = []
        for index, recorded in self.candidates:
            bridged = self._continued(template, index, recorded)
            if isinstance(bridged, Bridged):
                return bridged
            refused.append((index, recorded.call, bridged))
        ids = template.renderer.render(self.asked.turns, self.tools, generation_prompt=True)
        if refused:
            index, call, why = refused[0]
            before = [*call.prompt_ids, *call.completion_ids]
            # Rendered again it may still have given the same ids; then the turns merge.
            reused = len(before) if ids[: len(before)] == before else 0
            return Bridged(
                ids=ids, outcome="re-rendered", reasons=(why,), source=index, reused=reused
            )
        outcome, why = self.parting
        return Bridged(ids=ids, outcome=outcome, reasons=(why,))

    def _continued(self, template: ChatTemplate, index: int, recorded: _Recorded) -> Bridged | Why:
        """The prompt that continues this call, or why there is none."""
        asked, call = self.asked.turns, recorded.call
        added = asked[len(recorded.turns) :]
        if call.template and call.template != template.fingerprint:
            return Why.TEMPLATE_CHANGED
        if recorded.tools != _spelt(self.tools):
            return Why.TOOLS_CHANGED
        if _reasoned_otherwise(recorded.turns, asked):
            return Why.REPLY_REWRITTEN
        ids = template.renderer.extend(call.prompt_ids, call.completion_ids, added, self.tools)
        put_in = any(message.role == "assistant" for message in added)
        rewritten = put_in and self.parting[1] == Why.REPLY_REWRITTEN
        if ids is None:
            return Why.REPLY_REWRITTEN if rewritten else _refusal(template, added)
        reasons = _notes(template, recorded, asked)
        if put_in:
            reasons.append(Why.REPLY_REWRITTEN if rewritten else Why.ANSWER_ADDED)
        return Bridged(
            ids=ids,
            outcome="bridged",
            reasons=tuple(reasons) or (Why.EXACT,),
            source=index,
            reused=len(call.prompt_ids) + len(call.completion_ids),
        )


class Conversation:
    """The calls of one rollout. They may branch: the longest one that can be continued counts."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._calls: list[_Recorded] = []
        self._by_turns: dict[bytes, list[int]] = {}
        self._prompts: set[bytes] = set()
        self._replies: set[bytes] = set()

    def add(self, call: RenderedCall) -> None:
        turns = [*check_messages(call.messages), *check_messages([call.reply])]
        said = Asked.read(turns)
        *_, prompt, whole = said.prefixes
        self._prompts.add(prompt)
        self._by_turns.setdefault(whole, []).append(len(self._calls))
        self._replies.add(said.meanings[-1])
        self._calls.append(_Recorded(call, turns, _spelt(check_tools(call.tools))))

    def prompt(
        self, messages: object, tools: Tools | None = None, *, template: ChatTemplate | None = None
    ) -> Bridged:
        """The next prompt. `template` stands in where the request has arguments of its own."""
        template = template or self._template
        turns, offered = template.check(messages, tools)
        return self.match(Asked.read(turns), offered).render(template)

    def match(self, asked: Asked, tools: list[dict[str, Any]]) -> Match:
        """The recorded calls a request may continue. Renders nothing."""
        candidates = [
            (index, self._calls[index])
            for digest in reversed(asked.prefixes)
            for index in reversed(self._by_turns.get(digest, ()))
        ]
        return Match(asked, tools, candidates, self._parting(asked))

    def _parting(self, asked: Asked) -> tuple[Outcome, Why]:
        """Why a request that is not the continuation of a call's answer is not."""
        if not self._calls:
            return "first", Why.FIRST
        prefixes, turns = asked.prefixes, asked.turns
        rewritten = any(
            prompt in self._prompts and answer.role == "assistant" and whole not in self._by_turns
            for prompt, answer, whole in zip(prefixes, turns[1:], prefixes[1:], strict=False)
        )
        if rewritten:
            return "re-rendered", Why.REPLY_REWRITTEN
        replied = zip(turns, asked.meanings, strict=True)
        if any(m.role == "assistant" and meaning in self._replies for m, meaning in replied):
            return "re-rendered", Why.HISTORY_REWRITTEN
        return "branched", Why.SAME_PROMPT if prefixes[-1] in self._prompts else Why.OTHER


def bridge(
    template: ChatTemplate, previous: RenderedCall, messages: object, tools: Tools | None = None
) -> Bridged:
    """The next prompt after one recorded call."""
    conversation = Conversation(template)
    conversation.add(previous)
    return conversation.prompt(messages, tools)


def _notes(template: ChatTemplate, recorded: _Recorded, asked: list[Message]) -> list[Why]:
    pairs = list(zip(recorded.turns, asked, strict=False))
    notes: list[Why] = []
    if any(
        [call.arguments for call in ours.tool_calls] != [call.arguments for call in sent.tool_calls]
        for ours, sent in pairs
    ):
        notes.append(Why.ARGUMENTS)
    if any(ours.reasoning and not sent.reasoning for ours, sent in pairs):
        notes.append(Why.REASONING_KEPT)
    completion = recorded.call.completion_ids
    if not completion or completion[-1] not in template.renderer.turn_ends:
        notes.append(Why.TRUNCATED)
    return notes


def _refusal(template: ChatTemplate, added: Sequence[Message]) -> Why:
    renderer = template.renderer
    if not renderer.bridges:
        return Why.CANNOT
    if any(message.role == "assistant" for message in added):
        return Why.ANSWER_ADDED
    strips = isinstance(renderer, Library) and renderer.strips_reasoning
    if strips and any(message.role == "user" for message in added):
        return Why.REASONING_STRIPPED
    return Why.CANNOT


def _reasoned_otherwise(turns: Sequence[Message], asked: Sequence[Message]) -> bool:
    """Whether a reasoning came back changed. One that was left out does not count."""
    return any(
        ours.reasoning and sent.reasoning and ours.reasoning != sent.reasoning
        for ours, sent in zip(turns, asked, strict=False)
    )


def _meaning(message: Message) -> bytes:
    return hashlib.sha256(message.meaning.encode()).digest()


def _spelt(tools: Sequence[dict[str, Any]]) -> str:
    # Order and spelling are part of the prompt's text, so they are not sorted away.
    return json.dumps(list(tools), ensure_ascii=False)
