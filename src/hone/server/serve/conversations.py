"""Conversations in progress: which recorded call the next prompt of each continues.

In:   the messages of a request; the calls that were answered
Out:  prompts to render, and the recorded calls they may continue

The calls of an active rollout are in memory; otherwise they are read again from the CallStore, so a
restarted server continues exactly. Calls outside any rollout share one bounded history per model:
serving must continue a conversation as training does, or the policy would be trained on other
prompts than it answers. Only calls of the same weights are continued.
"""

import hashlib
import heapq
import itertools
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from hone.chat.bridge import Conversation, HashedMessages, RenderedCall, UnrenderedPrompt
from hone.chat.template import ChatTemplate
from hone.server.serve.tokenizer import BaseTokenizer
from hone.store.calls import CallStore
from hone.types import RecordedCall, RunSpec
from hone.wire.rollout import without_attempt

MAX_ROLLOUT_TOKENS = 16 * 2**20
"""Tokens of rollouts in memory; beyond, the least recently used are read from the store."""
MAX_ROLLOUTS = 4096
"""Rollouts in memory."""
MAX_CALLS_OUTSIDE = 512
"""Calls outside any rollout in memory, per model; beyond, the older half is dropped."""
MAX_TOKENS_OUTSIDE = 2 * 2**20


Match = tuple[UnrenderedPrompt, dict[int | None, RecordedCall | None]]
"""A prompt to render, and by its source the call that it is stored as a continuation of."""


@dataclass(frozen=True, slots=True)
class PlaceInRollout:
    """Where a request stands among those of its rollout."""

    index: int
    """How many requests came before it."""
    draw: int
    """Its number in the rollout's seeds. A retry of a request whose answer was not received has the
    number of that request, so that it draws the same answer."""


class _ModelHistory(Conversation):
    """The calls that one set of weights answered, in one rollout or outside any."""

    def __init__(
        self, template: ChatTemplate, calls: Sequence[RecordedCall] = (), *, in_rollout: bool
    ) -> None:
        super().__init__(template, related=in_rollout)
        self.calls: list[RecordedCall] = []
        self.tokens = 0
        self._in_rollout = in_rollout
        for call in calls:
            self.record(call)

    def record(self, call: RecordedCall, request: HashedMessages | None = None) -> None:
        """Add a call that later requests may continue, unless its client never got the answer."""
        if call.messages is None or call.abandoned:
            return
        self.add(
            RenderedCall(
                prompt_ids=call.call.prompt_ids,
                completion_ids=call.call.completion_ids,
                messages=call.messages,
                reply=call.reply,
                tools=call.tools,
                template=call.fingerprint.partition("-")[2],
            ),
            request,
        )
        self.calls.append(call)
        self.tokens += len(call.call.prompt_ids) + len(call.call.completion_ids)

    def match_recorded(self, messages: HashedMessages, tools: list[dict[str, Any]]) -> Match:
        unrendered = self.match(messages, tools)
        last = self.calls[-1] if self.calls and self._in_rollout else None
        return unrendered, {None: last, **{i: self.calls[i] for i, _ in unrendered.candidates}}


class RolloutHistory:
    """The calls of one rollout, or of all requests outside any, while they are in memory."""

    def __init__(self, rollout: str) -> None:
        self.rollout = rollout
        self.users = 0
        """Requests in progress; while there are any, the history stays in memory."""
        self.counted = 0
        """Number of its tokens, when they were last counted."""
        self._lock = threading.RLock()
        self._by_weights: dict[str, _ModelHistory] = {}
        self._stored: list[RecordedCall] | None = None
        self._next = 0
        self._next_draw = 0
        self._released_draws: list[int] = []
        """A heap."""
        self._unconfirmed: tuple[list[int], int] | None = None
        """Prompt and draw of the last call in the store: the server may have died before its client
        received the answer. None as soon as another request came."""

    @property
    def tokens(self) -> int:
        return sum(history.tokens for history in list(self._by_weights.values()))

    def next_place(self, prompt_ids: list[int], *, retried: bool = False) -> PlaceInRollout:
        """The place of a request in its rollout; always the first outside any.

        `retried`: the client says that it sends the request again. It may retry because it was
        refused, so only the first request after a restart can stand for the last call in the store.

        Called once per request, on the event loop, after `match` or `load`. Takes no lock: the loop
        would wait for a thread that reads the rollout's calls from the disk.
        """
        if not self.rollout:
            return PlaceInRollout(0, 0)
        if self._released_draws:
            draw = heapq.heappop(self._released_draws)
        elif retried and self._unconfirmed is not None and self._unconfirmed[0] == prompt_ids:
            draw = self._unconfirmed[1]
        else:
            draw = self._next_draw
            self._next_draw += 1
        self._unconfirmed = None
        self._next += 1
        return PlaceInRollout(self._next - 1, draw)

    def release(self, place: PlaceInRollout) -> None:
        """Let the next request draw as this one did, whose client got no answer."""
        if self.rollout:
            heapq.heappush(self._released_draws, place.draw)

    def match(
        self,
        calls: CallStore,
        tokenizer: BaseTokenizer,
        messages: HashedMessages,
        tools: list[dict[str, Any]],
    ) -> Match:
        """The recorded calls that a request may continue. Blocking, but renders nothing."""
        with self._lock:
            self.load(calls)
            return self._of_weights(tokenizer).match_recorded(messages, tools)

    def add(
        self,
        tokenizer: BaseTokenizer,
        calls: Sequence[RecordedCall],
        request: HashedMessages | None = None,
    ) -> None:
        """Add the calls that answered a request. Blocking."""
        with self._lock:
            history = self._of_weights(tokenizer)
            for call in calls:
                history.record(call, request)
            count = len(history.calls)
            too_large = count > MAX_CALLS_OUTSIDE or history.tokens > MAX_TOKENS_OUTSIDE
            if too_large and not self.rollout:
                newer = history.calls[(count + 1) // 2 :]
                self._by_weights[tokenizer.weights_sha256] = _ModelHistory(
                    tokenizer.template, newer, in_rollout=False
                )

    def is_loaded(self, calls: CallStore) -> bool:
        """Whether `load` has nothing to read: its calls are in memory, or it has none yet."""
        if self._stored is None and self._lock.acquire(blocking=False):  # fails while another loads
            try:
                if not (self.rollout and calls.has_rollout(self.rollout)):
                    self._stored = []
            finally:
                self._lock.release()
        return self._stored is not None

    def load(self, calls: CallStore) -> None:
        """Read the calls of the rollout before it was last in memory. Blocking."""
        with self._lock:
            if self._stored is None:
                self._stored = calls.rollout(self.rollout) if self.rollout else []
                self._next = max((call.index + 1 for call in self._stored), default=0)
                answered = {c.index: c.call.prompt_ids for c in self._stored if not c.abandoned}
                self._next_draw = len(answered)
                if answered:
                    self._unconfirmed = (answered[max(answered)], self._next_draw - 1)

    def _of_weights(self, tokenizer: BaseTokenizer) -> _ModelHistory:
        key = tokenizer.weights_sha256
        if key not in self._by_weights:
            stored = (c for c in self._stored or () if c.fingerprint.partition("-")[0] == key[:32])
            self._by_weights[key] = _ModelHistory(
                tokenizer.template, list(stored), in_rollout=bool(self.rollout)
            )
        return self._by_weights[key]


class Conversations:
    """Every history in memory, least recently used first. For one event loop."""

    def __init__(
        self, max_tokens: int = MAX_ROLLOUT_TOKENS, max_rollouts: int = MAX_ROLLOUTS
    ) -> None:
        self._histories: OrderedDict[str, RolloutHistory] = OrderedDict()
        self._max_tokens = max_tokens
        self._max_rollouts = max_rollouts
        self._tokens = 0

    def __len__(self) -> int:
        return len(self._histories)

    @contextmanager
    def history(self, rollout: str) -> Iterator[RolloutHistory]:
        """The history of a request's rollout, which stays in memory while the block runs."""
        history = self._histories.setdefault(rollout, RolloutHistory(rollout))
        self._histories.move_to_end(rollout)
        history.users += 1
        try:
            yield history
        finally:
            history.users -= 1
            self._tokens += history.tokens - history.counted
            history.counted = history.tokens
            self._evict()

    def _evict(self) -> None:
        for rollout, history in list(itertools.islice(self._histories.items(), 16)):
            if self._tokens <= self._max_tokens and len(self._histories) <= self._max_rollouts:
                return
            if rollout and not history.users:
                self._tokens -= history.counted
                del self._histories[rollout]


def request_seed(run: RunSpec | None, rollout: str, draw: int) -> int:
    """The seed of a rollout's request, whatever seed its client sent.

    Equal seeds in an agent's code must not make equal rollouts. The run's name is no part of it:
    two runs with one seed draw alike. The attempt is no part of it either: a rollout that is run
    again draws the same answers.
    """
    own = without_attempt(rollout)
    seed, own = (0, own) if run is None else (run.seed, own.removeprefix(f"{run.id}:"))
    text = f"{seed} {own} {draw}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
