"""The conversations going on: what the next turn of each continues.

In:   the messages of a request; the calls that were answered
Out:  Turns: the prompt's ids, the recorded call they continue, the request's place in its rollout

A rollout's calls are kept here while it is active and read again from the CallStore when they are
not, so a restarted server continues exactly where it stood. Calls outside any rollout share one
bounded memory per model: serving continues a conversation as training does, or the policy would be
trained on other prompts than it meets. Only calls of the same weights are ever continued.
"""

import hashlib
import itertools
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from hone.chat.bridge import Asked, Bridged, Conversation, Match, RenderedCall, Why
from hone.chat.template import ChatTemplate
from hone.server.language import Language
from hone.store.calls import CallStore
from hone.types import RecordedCall, RunSpec

ROLLOUT_TOKENS = 16 * 2**20
"""Tokens kept in memory for rollouts; beyond, the least recently used are read from the store."""
ROLLOUTS = 4096
"""Rollouts kept in memory."""
ORDINARY_CALLS = 512
"""Calls outside any rollout that can be continued, per model; beyond, the older half is forgotten."""
ORDINARY_TOKENS = 2 * 2**20


@dataclass(frozen=True)
class Turn:
    """The next prompt, and what it goes on from."""

    ids: list[int]
    outcome: str
    reasons: tuple[str, ...]
    parent: RecordedCall | None
    """The call it continues, or the last one before it; what it shares with it is stored once."""


@dataclass(frozen=True)
class Matched:
    """A request beside the calls it may continue; the prompt is not rendered yet."""

    match: Match
    calls: Sequence[RecordedCall]
    """Those its candidates count by; only ever appended to."""
    last: RecordedCall | None
    alone: bool
    """Outside any rollout, where calls have nothing to do with each other."""

    def turn(self, bridged: Bridged) -> Turn:
        """The turn whose prompt was rendered so."""
        parent = self.last if bridged.source is None else self.calls[bridged.source]
        outcome, reasons = bridged.outcome, tuple(str(why) for why in bridged.reasons)
        if self.alone and bridged.reasons == (Why.OTHER,):
            outcome, reasons, parent = "first", (str(Why.FIRST),), None
        return Turn(bridged.ids, outcome, reasons, parent)


class Talk:
    """What was said to one set of weights, in one rollout or outside any."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._conversation = Conversation(template)
        self._calls: list[RecordedCall] = []
        self.tokens = 0

    def match(self, asked: Asked, tools: list[dict[str, Any]], *, alone: bool) -> "Matched":
        last = self._calls[-1] if self._calls else None
        return Matched(self._conversation.match(asked, tools), self._calls, last, alone)

    def add(self, call: RecordedCall) -> None:
        """A call that later ones may continue; one that nobody received is not."""
        if call.messages is None or call.abandoned:
            return
        self._conversation.add(
            RenderedCall(
                prompt_ids=call.call.prompt_ids,
                completion_ids=call.call.completion_ids,
                messages=call.messages,
                reply=call.reply,
                tools=call.tools,
                template=call.fingerprint.partition("-")[2],
            )
        )
        self._calls.append(call)
        self.tokens += _tokens(call)

    def bounded(self, calls: int, tokens: int) -> "Talk":
        """This one, or one that remembers only the newer half."""
        if len(self._calls) <= calls and self.tokens <= tokens:
            return self
        fewer = Talk(self._template)
        for call in self._calls[(len(self._calls) + 1) // 2 :]:
            fewer.add(call)
        return fewer


class Scope:
    """One rollout, or all that is outside of any, for as long as it is in memory."""

    def __init__(self, rollout: str) -> None:
        self.rollout = rollout
        self.users = 0
        """Requests under way; while there are any, the scope stays in memory."""
        self.counted = 0
        """Its tokens as they were last added up."""
        self._lock = threading.Lock()
        self._talks: dict[str, Talk] = {}
        self._earlier: list[RecordedCall] | None = None
        self._next = 0

    @property
    def tokens(self) -> int:
        return sum(talk.tokens for talk in list(self._talks.values()))

    def next_index(self) -> int:
        """The place of a request among the rollout's; 0 outside any.

        Called once per request, on the event loop, after `match` or `recall`. Takes no lock: the
        loop would wait for whoever reads the rollout's calls from the disk meanwhile.
        """
        index = self._next
        self._next += bool(self.rollout)
        return index

    def match(
        self, calls: CallStore, language: Language, asked: Asked, tools: list[dict[str, Any]]
    ) -> Matched:
        """The recorded calls that a request may continue. Blocking, but renders nothing."""
        with self._lock:
            self._recall(calls)
            return self._talk(language).match(asked, tools, alone=not self.rollout)

    def add(self, language: Language, calls: Sequence[RecordedCall]) -> None:
        """Answers that were given. Blocking."""
        with self._lock:
            talk = self._talk(language)
            for call in calls:
                talk.add(call)
            if not self.rollout:
                self._talks[language.weights_sha256] = talk.bounded(ORDINARY_CALLS, ORDINARY_TOKENS)

    def recall(self, calls: CallStore) -> None:
        """Read what the rollout did before it was last in memory. Blocking."""
        with self._lock:
            self._recall(calls)

    def _recall(self, calls: CallStore) -> None:
        if self._earlier is None:
            self._earlier = calls.rollout(self.rollout) if self.rollout else []
            self._next = max((call.index + 1 for call in self._earlier), default=0)

    def _talk(self, language: Language) -> Talk:
        key = language.weights_sha256
        if key not in self._talks:
            talk = self._talks[key] = Talk(language.template)
            for call in self._earlier or ():
                if call.fingerprint.partition("-")[0] == key[:32]:
                    talk.add(call)
        return self._talks[key]


class Talks:
    """Every scope in memory, least recently used first. For one event loop."""

    def __init__(self, max_tokens: int = ROLLOUT_TOKENS, max_scopes: int = ROLLOUTS) -> None:
        self._scopes: OrderedDict[str, Scope] = OrderedDict()
        self._max_tokens = max_tokens
        self._max_scopes = max_scopes
        self._tokens = 0

    def __len__(self) -> int:
        return len(self._scopes)

    @contextmanager
    def within(self, rollout: str) -> Iterator[Scope]:
        """The scope of a request, which stays in memory while the block runs."""
        scope = self._scopes.get(rollout) or Scope(rollout)
        self._scopes[rollout] = scope
        self._scopes.move_to_end(rollout)
        scope.users += 1
        try:
            yield scope
        finally:
            scope.users -= 1
            self._tokens += scope.tokens - scope.counted
            scope.counted = scope.tokens
            self._make_room()

    def _make_room(self) -> None:
        for rollout, scope in list(itertools.islice(self._scopes.items(), 16)):
            if self._tokens <= self._max_tokens and len(self._scopes) <= self._max_scopes:
                return
            if rollout and not scope.users:
                self._tokens -= scope.counted
                del self._scopes[rollout]


def request_seed(run: RunSpec | None, rollout: str, index: int) -> int:
    """What a rollout's request is sampled by, whatever seed its client sent.

    Equal seeds in an agent's code must not make equal rollouts. The run's name is no part of it:
    two runs with one seed draw alike.
    """
    seed, own = (0, rollout) if run is None else (run.seed, rollout.removeprefix(f"{run.id}:"))
    text = f"{seed} {own} {index}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def _tokens(call: RecordedCall) -> int:
    return len(call.call.prompt_ids) + len(call.call.completion_ids)
