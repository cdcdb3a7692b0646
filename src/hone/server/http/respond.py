"""Answer one request in any dialect, whole or streamed, while its client is connected.

In:   an HTTP request, and the Dialect (wire/openai/dialect.py) of its route
Out:  the dialect's response or events; every choice recorded

One request: parse (wire/) -> admit -> resolve the model's name (policies.py) -> build the prompt
(prepare.py) -> sample and record (generation.py) -> write (wire/). A client that disconnects
cancels its request at any point.

The response starts with the first event, so an error before it still becomes an HTTP status. After
it, an error becomes an event, and the stream ends without its usual last event.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any, Self

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from hone.chat.bridge import HashedMessages
from hone.errors import HoneError, Unavailable
from hone.files.logs import log
from hone.inference.base import SampledToken
from hone.server.limits import PlainRoute
from hone.server.serve.chat_tasks import (
    ParsedRequest,
    hashed_messages,
    read_request,
    sampling_request,
)
from hone.server.serve.generation import Choice, Generation, RequestContext, Size
from hone.server.serve.prepare import (
    count_prompt_tokens,
    prepare_chat,
    prepare_completion,
    wants_logprobs,
)
from hone.server.state import State
from hone.wire.errors import error_response
from hone.wire.json import write_json
from hone.wire.openai.chat import CompletionRequest, finite
from hone.wire.openai.dialect import Answer, AnswerHead, AnswerWriter, Dialect, Event, Logprobs
from hone.wire.rollout import RolloutScope
from hone.wire.stream import write_event

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies must not buffer the stream
]

_RETRIES = "x-stainless-retry-count"
"""Sent by the clients of OpenAI and Anthropic; 0 in the first request."""

IN_ROLLOUT = "/rollout/{rollout_id}"
"""Base path of a rollout's API; every dialect's routes also exist under it."""

HOLD = "hone.hold"
"""Key in the ASGI scope of the request's Hold."""

SMALL_BYTES = 8 * 2**10
"""Bodies up to this size are tokenized on the event loop, which takes a millisecond or two; handing
one to a thread costs a good part of that."""

MAX_UNSENT_BYTES = 16 * 2**20
"""Events that wait for a client that reads slower than its engine samples; with more, its request
ends with an error."""

Resume = Callable[[Any], Any]
"""Adds the messages of an earlier request, if the request refers to one. Blocking."""


def add_dialect(
    router: APIRouter,
    state: State,
    dialect: Dialect,
    tag: str,
    *,
    name: str,
    description: str,
    resume: Resume | None = None,
    count: Callable[[int], dict[str, Any]] | None = None,
) -> None:
    """The route of a dialect. /openapi.json lists it once, under its first address.

    `count` writes the response of a route that only counts the tokens of the prompt.
    """

    async def endpoint(request: Request) -> Response:
        scope = RolloutScope.parse(request.headers, request.path_params.get("rollout_id"))
        parsed, messages, size = await _read_body(state, request, dialect, resume)
        model = sampling_request(parsed).model
        admission = admitted(state, dialect, model, scope, size=size, request=request)
        if count is None:
            return UntilDisconnect(partial(_respond, state, dialect, parsed, messages, admission))
        assert not isinstance(parsed, CompletionRequest) and messages is not None, parsed
        async with admission as context:
            return JSONResponse(count(await count_prompt_tokens(context, parsed.chat, messages)))

    body = {"required": True, "content": {"application/json": {"schema": dialect.schema}}}
    for prefix in ("", IN_ROLLOUT):
        router.add_api_route(
            prefix + dialect.path,
            endpoint,
            name=name,
            description=description,
            tags=[tag],
            methods=["POST"],
            openapi_extra={"requestBody": body},
            include_in_schema=not prefix,
            route_class_override=PlainRoute,
        )


async def _read_body(
    state: State, request: Request, dialect: Dialect, resume: Resume | None
) -> tuple[ParsedRequest, HashedMessages | None, Size]:
    """The checked request, the messages of a chat, and the size of the body."""
    request.scope["hone.body"].accepts_large = True
    body = await request.body()
    settings = state.settings
    limits = {"max_n": settings.max_n, "max_seq_length": settings.max_seq_length}
    size: Size = "small" if len(body) <= SMALL_BYTES else "medium"
    task = (dialect.parse, dialect.prompt_key, body)
    if len(body) > settings.large_body_bytes:
        size = "large"
        parsed, messages = await state.workers.run(read_request, *task, **limits)
    else:
        parsed, messages = read_request(*task, **limits)
    resumed = parsed if resume is None else await asyncio.to_thread(resume, parsed)
    if resumed is not parsed:
        size = "large" if size == "large" else "medium"
        messages = await asyncio.to_thread(hashed_messages, resumed)
    return resumed, messages, size


@asynccontextmanager
async def admitted(
    state: State,
    dialect: Dialect,
    model: str,
    scope: RolloutScope,
    *,
    size: Size,
    request: Request,
) -> AsyncIterator[RequestContext]:
    """Count a request as running and keep its model loaded, while the block runs."""
    serving = state.serving
    with (
        serving.admitted(),
        state.metrics.running.track_inprogress(),
        state.holds.request(scope.rollout) as hold,
        state.conversations.history(scope.rollout) as history,
    ):
        request.scope[HOLD] = hold
        run = state.calls.run_of(scope.rollout)
        aliases = dict(scope.aliases)
        async with serving.using(
            model, run=run, step=scope.step, aliases=aliases, hold=hold
        ) as policy:
            yield RequestContext(
                state=state,
                policy=policy,
                scope=scope,
                history=history,
                hold=hold,
                run=run,
                size=size,
                prompt_key=dialect.prompt_key,
                retried=request.headers.get(_RETRIES, "0") != "0",
            )


async def _respond(
    state: State,
    dialect: Dialect,
    request: ParsedRequest,
    messages: HashedMessages | None,
    admission: AbstractAsyncContextManager[RequestContext],
    scope: Scope,
    receive: Receive,
    send: Send,
) -> None:
    async with admission as context:
        if isinstance(request, CompletionRequest):
            generation = await prepare_completion(context, request)
        else:
            assert messages is not None
            generation = await prepare_chat(context, request, messages)
        sampling = sampling_request(request)
        wanted = wants_logprobs(context, sampling)
        logprobs = _LogprobWriter(context, sampling) if wanted else None
        writer = dialect.writer(request, _head(generation))
        if sampling.stream:
            async with EventStream(send, named=dialect.named_events) as out:
                await _stream(generation, writer, logprobs, out, path=scope["path"])
            return
        await generation.run()
        response = write_json(writer.whole(_finished(generation, logprobs)))
    try:
        await Response(response, media_type="application/json")(scope, receive, send)
    except BaseException:
        generation.draw_again()
        raise


async def _stream(
    generation: Generation,
    writer: AnswerWriter,
    logprobs: "_LogprobWriter | None",
    out: "EventStream",
    *,
    path: str,
) -> None:
    """Generate, sending events; the last ones follow when every choice is recorded."""
    try:
        await generation.run(_Deltas(out, writer, logprobs))
        # The log-probabilities were sent; a final response that repeats them gets them from its
        # writer.
        last = writer.end(_finished(generation, None))
    except Exception as error:
        if not out.started:
            raise
        log.error("a stream failed", exc_info=error, extra={"fields": {"path": path}})
        log_file = generation.context.state.settings.log_file
        last = writer.error(*error_response(error, log_file))
    out.send(*last)
    await out.end()


class _Deltas:
    """Sends the tokens of a Generation as events."""

    def __init__(
        self, out: "EventStream", writer: AnswerWriter, logprobs: "_LogprobWriter | None"
    ) -> None:
        self.drain = out.drain
        self._out = out
        self._writer = writer
        self._logprobs = logprobs

    def add(self, choice: Choice, tokens: Sequence[SampledToken]) -> None:
        if self._out.unsent_bytes > MAX_UNSENT_BYTES:
            raise Unavailable(
                f"the client has not read {self._out.unsent_bytes} bytes of its answer, and no more "
                "are kept for it; read faster, or request fewer tokens at a time"
            )
        entries = None if self._logprobs is None else self._logprobs.write(tokens)
        if events := self._writer.delta(choice.index, choice.deltas(), entries):
            self._out.send(*events)


def _head(generation: Generation) -> AnswerHead:
    policy = generation.context.policy
    return AnswerHead(
        id=generation.id,
        call_id=generation.choices[0].id,
        created_at=generation.created_at,
        model=policy.name,
        fingerprint=policy.adapter.sha256 if policy.adapter else generation.fingerprint,
        policy_step=policy.step,
        prompt_ids=generation.prompt.ids,
        not_applicable=generation.not_applicable,
    )


def _finished(generation: Generation, logprobs: "_LogprobWriter | None") -> list[Answer]:
    piece = generation.context.policy.base.template.piece
    answers: list[Answer] = []
    for choice in generation.choices:
        reply = choice.reply()
        answer = Answer(
            index=choice.index,
            call_id=choice.id,
            message=reply.message,
            finish=reply.finish,
            token_ids=choice.ids,
            reasoning_tokens=choice.reasoning_tokens(piece),
            logprobs=None if logprobs is None else logprobs.write(choice.tokens),
            malformed=reply.malformed,
            stop=choice.stop if isinstance(choice.stop, str) else None,
        )
        answers.append(answer)
    return answers


class _LogprobWriter:
    """Writes sampled tokens as entries of `logprobs.content`."""

    def __init__(self, context: RequestContext, request: Any) -> None:
        as_ids = request.return_tokens_as_token_ids or context.spec("token_ids_as_text", False)
        self._texts = context.policy.base.template.token_texts
        self._as_ids = bool(as_ids)

    def write(self, tokens: Sequence[SampledToken]) -> Logprobs:
        logprobs = [token.logprob for token in tokens]
        entries = self._entries([token.id for token in tokens], logprobs)
        for entry, token in zip(entries, tokens, strict=True):
            top = token.top
            entry["top_logprobs"] = self._entries(*zip(*top, strict=True)) if top else []
        return entries

    def _entries(self, ids: Sequence[int], logprobs: Sequence[float]) -> Logprobs:
        """The entries. There are hundreds per answer, so this makes no Python call per token."""
        texts = map(self._texts.__getitem__, ids)
        if not all(map(math.isfinite, logprobs)):
            logprobs = list(map(finite, logprobs))
        entries = [
            {"token": text, "logprob": logprob, "bytes": octets}
            for (text, octets), logprob in zip(texts, logprobs, strict=True)
        ]
        if self._as_ids:
            for entry, token in zip(entries, ids, strict=True):
                entry["token"] = f"token_id:{token}"
        return entries


# ---- connections -------------------------------------------------------------------------------


class UntilDisconnect(Response):
    """Runs `answer(scope, receive, send)`, and cancels it when the client disconnects."""

    def __init__(self, answer: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        super().__init__()
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answering = asyncio.ensure_future(self._answer(scope, receive, send))
        leaving = asyncio.create_task(_disconnect(receive))
        leaving.add_done_callback(lambda _: answering.cancel())
        try:
            await answering
        except (asyncio.CancelledError, HoneError):
            if not leaving.done():
                raise
        finally:
            leaving.cancel()


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream:
    """Server-sent events over one ASGI response; the first event starts it.

    A task writes them, so that sending does not wait for the client. Closing the stream before `end`
    throws away what was not written.
    """

    def __init__(self, send: Send, *, named: bool) -> None:
        """`named`: each event is named by its `type`."""
        self._send = send
        self._named = named
        self._unsent = bytearray()
        self._changed = asyncio.Event()
        self._drained = asyncio.Event()
        self._ending = False
        self._writing: asyncio.Task[None] | None = None
        self.started = False

    @property
    def unsent_bytes(self) -> int:
        """Bytes that wait for the client."""
        return len(self._unsent)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)

    def send(self, *events: Event) -> None:
        if self._writing is None:
            self.started = True
            self._writing = asyncio.create_task(self._write())
        elif self._writing.done():
            self._writing.result()
        for event in events:
            self._unsent += write_event(event, named=self._named)
        self._drained.clear()
        self._changed.set()

    async def drain(self) -> None:
        """Wait until the client, or the network, has taken what was sent so far."""
        if self._writing is not None:
            drained = asyncio.create_task(self._drained.wait())
            try:
                await asyncio.wait([drained, self._writing], return_when=asyncio.FIRST_COMPLETED)
            finally:
                drained.cancel()
            if self._writing.done():
                self._writing.result()

    async def end(self) -> None:
        self._ending = True
        self._changed.set()
        if self._writing is not None:
            await self._writing

    async def _write(self) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": _HEADERS}
        await self._send(start)
        while True:
            await self._changed.wait()
            while self._unsent:
                body = bytes(self._unsent)
                self._unsent.clear()
                await self._send_body(body)
            if self._ending:
                await self._send_body(b"", more=False)
                return
            await self._send_body(b"")  # uvicorn waits here for the reader, and writes nothing
            if not self._unsent and not self._ending:
                self._changed.clear()
                self._drained.set()

    async def _send_body(self, body: bytes, *, more: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": more})
