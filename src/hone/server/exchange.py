"""One request on its way: from a prompt to recorded answers.

In:   a Policy, a prompt, how to sample it
Out:  Pieces as they are sampled; every choice recorded when the last one has ended

The calls are committed before `run` returns, and only then is the last byte sent: what a client
has seen to its end is on record. If the client leaves, or the engine fails, the engine is told to
stop and what was sampled so far is recorded as abandoned, which is never trained on.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hone.chat.reply import Event, Reply
from hone.chat.template import Parser
from hone.inference.base import Delta, FinishReason, SampledToken, Sampling
from hone.logs import say
from hone.server.serving import Policy
from hone.server.talks import Scope, Turn
from hone.server.telemetry import Metrics
from hone.store.calls import CallStore
from hone.types import Call, RecordedCall


@dataclass(frozen=True)
class Where:
    """What a request belongs to, as its headers or its address say."""

    rollout: str = ""
    """Empty outside any rollout."""
    function: str = ""
    temperature: float | None = None
    """What the rollout is sampled at, whatever its requests say; None leaves it to them."""
    step: int | None = None
    """The step that answers where a request asks for the run's model; None is the newest."""


@dataclass(frozen=True)
class Piece:
    """More of one choice: the tokens, and what they make certain."""

    choice: "Choice"
    tokens: Sequence[SampledToken]
    events: list[Event]


class Choice:
    """One answer as it grows."""

    def __init__(self, index: int, call_id: str, parser: Parser) -> None:
        self.index = index
        self.id = call_id
        self.tokens: list[SampledToken] = []
        """Forced ones first, then the sampled ones."""
        self.over = False
        self._finish: FinishReason = "abort"
        self._parser = parser

    def begin(self, forced: Sequence[int]) -> Piece:
        """Tokens that were put there: certain, so their log-probability is 0."""
        tokens = [SampledToken(token, 0.0) for token in forced]
        self.tokens += tokens
        return Piece(self, tokens, self._parser.feed(forced))

    def take(self, delta: Delta) -> Piece:
        self.tokens += delta.tokens
        events = self._parser.feed([token.id for token in delta.tokens])
        if delta.finish is not None:
            self._finish, self.over = delta.finish, True
            events = [*events, *self._parser.close()]
        return Piece(self, delta.tokens, events)

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.tokens]

    def reply(self) -> Reply:
        """What it says; of an answer that was cut off, what it said until then."""
        if not self.over:
            self._parser.close()
            self.over = True
        return self._parser.reply(self._finish)


@dataclass(kw_only=True)
class Exchange:
    """Everything known before the first token, and the choices as they grow."""

    policy: Policy
    turn: Turn
    scope: Scope
    where: Where
    place: int
    """Among the rollout's requests."""
    sampling: Sampling
    parsers: Callable[[str], Parser]
    """Makes the parser of one choice, by the id of its call."""
    fingerprint: str
    messages: list[dict[str, Any]] | None
    tools: list[dict[str, Any]]
    forced: list[int]
    not_applicable: list[str]
    """Keys of the request that change nothing for this model; named in the answer."""
    calls: CallStore
    metrics: Metrics
    id: str = field(default_factory=lambda: secrets.token_hex(10))
    created_at: float = field(default_factory=time.time)
    choices: list[Choice] = field(init=False)
    _settled: bool = False

    def __post_init__(self) -> None:
        ids = [f"call-{secrets.token_hex(10)}" for _ in range(self.sampling.n)]
        self.choices = [Choice(i, call, self.parsers(call)) for i, call in enumerate(ids)]

    @property
    def sampled(self) -> int:
        return sum(len(choice.tokens) for choice in self.choices)

    async def run(self, tell: Callable[[Piece], Awaitable[None]] | None = None) -> None:
        """Sample to the end, telling each piece; returns when every choice is recorded."""
        try:
            if self.forced:
                for choice in self.choices:
                    piece = choice.begin(self.forced)
                    if tell is not None:
                        await tell(piece)
            await self._sample(tell)
            await self._record()
        except BaseException:
            await self._record(abandoned=True)
            raise

    async def _sample(self, tell: Callable[[Piece], Awaitable[None]] | None) -> None:
        policy = self.policy
        prompt = [*self.turn.ids, *self.forced]
        stream = policy.base.engine.generate(prompt, self.sampling, policy.adapter)
        try:
            async for delta in stream:
                piece = self.choices[delta.sample].take(delta)
                if tell is not None:
                    await tell(piece)
        finally:
            # An engine's iterator aborts its request when it is closed early.
            await stream.aclose()  # pyright: ignore[reportAttributeAccessIssue] - Engine promises it

    async def _record(self, *, abandoned: bool = False) -> None:
        if self._settled:
            return
        self._settled = True
        # Shielded: whoever leaves now cannot undo half a commit; the calls are recorded whole.
        await asyncio.shield(asyncio.to_thread(self._store, abandoned))

    def _store(self, abandoned: bool) -> None:
        recorded = [self._recorded(choice, abandoned) for choice in self.choices]
        self.calls.add_many(recorded, parent=self.turn.parent)
        self.scope.add(self.policy.base, recorded)
        self._count(recorded, abandoned)

    def _recorded(self, choice: Choice, abandoned: bool) -> RecordedCall:
        policy, reply = self.policy, choice.reply()
        return RecordedCall(
            id=choice.id,
            rollout=self.where.rollout,
            index=self.place,
            choice=choice.index,
            model=policy.model,
            asked=policy.asked,
            base_model=policy.base.name,
            adapter_sha256=policy.adapter.sha256 if policy.adapter else None,
            fingerprint=self.fingerprint,
            created_at=self.created_at,
            messages=self.messages,
            tools=self.tools or None,
            reply=reply.message,
            finish=reply.finish,
            outcome=self.turn.outcome,
            reasons=list(self.turn.reasons),
            abandoned=abandoned,
            call=Call(
                prompt_ids=self.turn.ids,
                completion_ids=choice.ids,
                logprobs=[token.logprob for token in choice.tokens],
                forced=list(range(min(len(self.forced), len(choice.tokens)))),
                temperature=self.sampling.temperature,
                step=policy.step,
                function=self.where.function,
            ),
        )

    def _count(self, recorded: list[RecordedCall], abandoned: bool) -> None:
        model, metrics = self.policy.model, self.metrics
        for why in self.turn.reasons:
            metrics.turns.labels(self.turn.outcome, why).inc()
        metrics.prompt_tokens.labels(model).inc(len(self.turn.ids))
        metrics.sampled_tokens.labels(model).inc(self.sampled)
        for call in recorded:
            metrics.calls.labels(model, call.finish).inc()
        if abandoned:
            metrics.abandoned.inc(len(recorded))
            say("abandoned", level=logging.DEBUG, model=model, rollout=self.where.rollout)
