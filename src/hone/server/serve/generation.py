"""One request while it is answered: sample from its prompt, then record every choice.

In:   a RequestContext, a prompt, sampling parameters
Out:  tokens as they are sampled; every choice recorded when the last one has ended

The calls are committed before `run` returns, and the last byte is sent only then, so every response
that a client received completely is recorded. If the client disconnects or the engine fails,
sampling stops, and the tokens so far are recorded as abandoned; they are never trained. A client that
reads slowly does not slow down its engine: what it has not read waits here.
"""

import asyncio
import logging
import secrets
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import accumulate, repeat
from typing import Any, Literal, Protocol

from hone.chat.bridge import HashedMessages, NextPrompt
from hone.chat.reply import Delta, Reply
from hone.chat.template import Parser
from hone.files.logs import say
from hone.inference.base import FinishReason, SampledToken, Sampling
from hone.server.serve.conversations import PlaceInRollout, RolloutHistory
from hone.server.serve.holds import Hold
from hone.server.serve.policies import Policy, Serving
from hone.server.serve.recorder import Recorder
from hone.server.settings import Settings
from hone.server.telemetry import Metrics
from hone.server.workers import WorkerPool
from hone.store.calls import CallStore
from hone.types import Call, RecordedCall, RunSpec
from hone.wire.rollout import RolloutScope

Size = Literal["small", "medium", "large"]
"""Size class of a request body. Small bodies are read and tokenized on the event loop, medium ones
are read there and tokenized in a thread, large ones are handled in another process."""


class ServingState(Protocol):
    """The parts of the server's State that answer requests."""

    settings: Settings
    calls: CallStore
    metrics: Metrics
    serving: Serving
    recorder: Recorder
    workers: WorkerPool


@dataclass(frozen=True, kw_only=True)
class RequestContext:
    """A request's model, rollout and settings, without its body."""

    state: ServingState
    policy: Policy
    scope: RolloutScope
    history: RolloutHistory
    hold: Hold
    run: RunSpec | None
    size: Size
    """Size of the body, which decides where the prompt is tokenized."""
    prompt_key: str = "messages"
    """The key of the body that contains the prompt."""
    retried: bool = False
    """Whether the client says that it sends the request again."""

    @property
    def max_length(self) -> int:
        """Maximum number of tokens in prompt and answer together."""
        return self.state.serving.max_length(self.policy.base, self.policy.record)

    def spec(self, field: str, default: Any) -> Any:
        """A field of the registered model; the default for a base model."""
        record = self.policy.record
        return default if record is None else getattr(record.spec, field)


class Choice:
    """One answer as it grows."""

    def __init__(self, index: int, call_id: str, parser: Parser) -> None:
        self.index = index
        self.id = call_id
        self.tokens: list[SampledToken] = []
        self.finish: FinishReason | None = None
        self.stop: str | int | None = None
        """The string or id that ended it, if one did."""
        self._parser = parser
        self._parsed = 0
        self._closed = False
        self._reply: Reply | None = None

    def deltas(self) -> list[Delta]:
        """The parts of the message that tokens since the last call have added."""
        ids = [token.id for token in self.tokens[self._parsed :]]
        self._parsed = len(self.tokens)
        return self._parser.feed(ids) + (self._close() if self.finish else [])

    def reply(self) -> Reply:
        """The message; if the answer was cut off, the part that was sampled."""
        if self._reply is None:
            self.deltas()
            self._close()
            self._reply = self._parser.reply(self.finish or "abort")
        return self._reply

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.tokens]

    def reasoning_tokens(self, piece: Callable[[int], bytes]) -> int:
        """Number of tokens up to the end of the reasoning; `piece` gives the bytes of a token."""
        reasoning = (self.reply().reasoning or "").encode()
        if not reasoning:
            return 0
        ends = list(accumulate(len(piece(token.id)) for token in self.tokens))
        text = b"".join(piece(token.id) for token in self.tokens)
        return bisect_left(ends, text.find(reasoning) + len(reasoning)) + 1

    def _close(self) -> list[Delta]:
        closed, self._closed = self._closed, True
        return [] if closed else self._parser.close()


class Output(Protocol):
    """Where new tokens go while a request is answered."""

    def add(self, choice: Choice, tokens: Sequence[SampledToken]) -> None:
        """Send what new tokens add to a choice; does not wait for the client."""
        ...

    async def drain(self) -> None:
        """Wait until the client has read what was sent so far."""
        ...


@dataclass(kw_only=True)
class Generation:
    """Everything known before the first token, and the choices as they grow."""

    context: RequestContext
    prompt: NextPrompt
    place: PlaceInRollout
    sampling: Sampling
    make_parser: Callable[[str], Parser]
    """Makes the parser of one choice from the id of its call."""
    fingerprint: str
    parent: RecordedCall | None = None
    """The call that the prompt continues, or else the previous one; their common prefix is stored
    once."""
    messages: list[dict[str, Any]] | None = None
    hashed_messages: HashedMessages | None = None
    tools: list[dict[str, Any]] = field(default_factory=list)
    not_applicable: list[str] = field(default_factory=list)
    """Request keys that have no effect for this model; listed in the response."""
    request_fields: dict[str, Any] | None = None
    """Fields of the request that are recorded with the call."""
    id: str = field(default_factory=lambda: secrets.token_hex(10))
    created_at: float = field(default_factory=time.time)
    choices: list[Choice] = field(init=False)
    _recorded: bool = False
    _abandoned: bool = False

    def __post_init__(self) -> None:
        ids = [f"call-{secrets.token_hex(10)}" for _ in range(self.sampling.n)]
        self.choices = [Choice(i, call, self.make_parser(call)) for i, call in enumerate(ids)]

    @property
    def _source(self) -> RecordedCall | None:
        """The call whose ids the prompt begins with."""
        return self.parent if self.prompt.outcome == "bridged" else None

    async def run(self, out: Output | None = None) -> None:
        """Sample all choices and send new tokens; returns when every choice is recorded.

        The engine has the request until the last token is sampled, however slowly the client reads.
        """
        policy = self.context.policy
        try:
            stream: Any = policy.base.engine.generate(
                self.prompt.ids, self.sampling, policy.adapter, stream=out is not None
            )
            engines, name = self.context.state.serving.engines, policy.base.name
            # An engine aborts its request when the stream is closed early.
            with engines.sampling(name, self.context.hold):
                async with aclosing(stream):
                    async for delta in stream:
                        choice = self.choices[delta.sample]
                        choice.tokens += delta.tokens
                        choice.finish, choice.stop = delta.finish, delta.stop
                        if out is not None:
                            out.add(choice, delta.tokens)
            if out is not None:
                await out.drain()
            await self._record(abandoned=False)
        except BaseException as error:
            has_begun = out is not None and any(choice.tokens for choice in self.choices)
            # A client that leaves a stream has read enough; asked again, it wants another answer.
            if not (has_begun and isinstance(error, asyncio.CancelledError)):
                self.draw_again()
            await self._record(abandoned=True)
            raise

    def draw_again(self) -> None:
        """Let the client's retry draw the answer that it did not receive, recorded or not."""
        self.context.history.release(self.place)

    async def _record(self, *, abandoned: bool) -> None:
        """Record the calls, even if the client disconnects meanwhile."""
        if not self._recorded:
            self._recorded, self._abandoned = True, abandoned
            await self.context.state.recorder.record(self)

    def make_calls(self) -> tuple[list[RecordedCall], RecordedCall | None]:
        """The calls to record. Called by the recorder."""
        return [self._call(choice) for choice in self.choices], self.parent

    def committed(self, calls: Sequence[RecordedCall]) -> None:
        """Let later requests continue the calls, and count them. Called by the recorder."""
        policy, metrics = self.context.policy, self.context.state.metrics
        self.context.history.add(policy.base, calls, self.hashed_messages)
        model, abandoned = policy.model, self._abandoned
        for reason in self.prompt.reasons:
            metrics.turns.labels(self.prompt.outcome, reason).inc()
        metrics.prompt_tokens.labels(model).inc(len(self.prompt.ids))
        if (source := self._source) is not None:
            tokens = len(source.call.prompt_ids) + len(source.call.completion_ids)
            metrics.continued_tokens.labels(model).inc(tokens)
        sampled = sum(len(choice.tokens) for choice in self.choices)
        metrics.sampled_tokens.labels(model).inc(sampled)
        metrics.call_held_s.labels(model).inc(calls[0].held_s)
        for call in calls:
            metrics.calls.labels(model, call.finish).inc()
            metrics.malformed.labels(model).inc(bool(call.malformed) and not abandoned)
        if abandoned:
            metrics.abandoned.inc(len(calls))
            say("abandoned", level=logging.DEBUG, model=model, rollout=self.context.scope.rollout)

    def _call(self, choice: Choice) -> RecordedCall:
        policy, scope, reply = self.context.policy, self.context.scope, choice.reply()
        columns: Iterable[Any] = (
            zip(*choice.tokens, strict=True) if choice.tokens else repeat((), 6)
        )
        ids, logprobs, masked, exact, forced, _ = map(list, columns)
        fields = self.request_fields
        if fields is not None:
            reasoning = choice.reasoning_tokens(policy.base.template.piece)
            fields = {**fields, "reasoning_tokens": reasoning}
        return RecordedCall(
            id=choice.id,
            rollout=scope.rollout,
            index=self.place.index,
            choice=choice.index,
            model=policy.model,
            requested_model=policy.name,
            base_model=policy.base.name,
            adapter_sha256=policy.adapter.sha256 if policy.adapter else None,
            fingerprint=self.fingerprint,
            created_at=self.created_at,
            messages=self.messages,
            tools=self.tools or None,
            request_fields=fields,
            reply=reply.message,
            finish=reply.finish,
            outcome=self.prompt.outcome,
            reasons=list(map(str, self.prompt.reasons)),
            continues=None if (source := self._source) is None else source.id,
            malformed=list(reply.malformed),
            abandoned=self._abandoned,
            held_s=self.context.hold.held_s,
            call=Call(
                prompt_ids=self.prompt.ids,
                completion_ids=ids,
                logprobs=logprobs,
                exact=all(exact),
                forced=[i for i, was_forced in enumerate(forced) if was_forced],
                masked_logprobs=None if masked.count(None) == len(masked) else masked,
                temperature=self.sampling.temperature,
                step=policy.step,
                function=scope.function,
            ),
        )
