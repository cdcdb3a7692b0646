"""The OpenAI API: /v1/chat/completions, /v1/completions, /v1/models, and rollouts.

In:   requests of any OpenAI client
Out:  answers with token ids, log-probabilities and the step that gave them; every call recorded

A request belongs to a rollout by the header X-Hone-Rollout or by the address /rollout/ID/v1. There
the header X-Hone-Temperature goes before the request's own temperature, so that whoever runs the
rollout can run it greedily (0) whatever its agent's code says. The header X-Hone-Step names the step
that answers for the run's model, so that an earlier policy can be run with the same agent. The
address may say both, as /rollout/ID,temperature=0,step=3/v1: a client in another process has the
URL and not the headers. Where address and headers name the same thing, they must agree.

The path of one request: parse -> admit -> resolve the name -> make the prompt -> sample -> record ->
answer. Its client leaving at any point of it ends it there.
"""

import asyncio
import re
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Send
from starlette.types import Scope as AsgiScope

from hone.chat.bridge import Asked
from hone.errors import BadRequest, HoneError, UnknownModel
from hone.logs import log
from hone.server import rollouts, tasks
from hone.server.answers import streamed, whole
from hone.server.bodies import accept_large_body
from hone.server.exchange import Where
from hone.server.failures import error_body, openai_error
from hone.server.openai import (
    ChatRequest,
    CompletionRequest,
    effective_temperature,
    read_json,
    written,
)
from hone.server.prepare import Preparation
from hone.server.serving import ServedName
from hone.server.state import State
from hone.server.stream import EventStream, WhileConnected

_ROLLOUT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._~:-]{0,199}")
_STEP = re.compile(r"[0-9]{1,9}")
_NUMBER = re.compile(r"[0-9]{1,20}(\.[0-9]{0,40})?(e-?[0-9]{1,3})?")
_MAX_FUNCTION = 512
MAX_TEMPERATURE = 100
"""As in the body of a request."""
_SETTINGS = {
    "temperature": ("X-Hone-Temperature", "temperature in the request"),
    "step": ("X-Hone-Step", "ask for NAME@STEP"),
}
"""Settings of a rollout by their name in its address: the header, and what does it elsewhere."""


@dataclass(frozen=True)
class _Setting:
    """A setting as the request has it."""

    text: str
    place: str
    """Where it was found, for messages."""
    header: str

    def refused(self, remedy: str) -> BadRequest:
        return BadRequest(f"{self.place} is {self.text[:40]!r}; {remedy}", param=self.header)


def routes(state: State) -> APIRouter:
    """The OpenAI API, also under /rollout/ID, and what is known of rollouts and runs."""
    api = OpenAI(state)
    router = APIRouter(tags=["openai"])
    for prefix in ("", "/rollout/{rollout_id}"):
        # The second address of the same thing is no news for /openapi.json.
        shown: dict[str, Any] = {"include_in_schema": prefix == ""}
        for path, answer, kind in (
            ("/v1/chat/completions", api.chat, ChatRequest),
            ("/v1/completions", api.complete, CompletionRequest),
        ):
            schema = {"schema": kind.model_json_schema()}
            body = {"required": True, "content": {"application/json": schema}}
            router.add_api_route(
                prefix + path,
                answer,
                methods=["POST"],
                openapi_extra={"requestBody": body},
                **shown,
            )
        router.add_api_route(f"{prefix}/v1/models", api.models, **shown)
        router.add_api_route(f"{prefix}/v1/models/{{name:path}}", api.model, **shown)
    router.include_router(rollouts.routes(state))
    return router


class OpenAI:
    """The routes, over one server's state."""

    def __init__(self, state: State) -> None:
        self._state = state

    async def chat(self, request: Request) -> Response:
        """Answer a conversation."""
        return await self._respond(request, ChatRequest)

    async def complete(self, request: Request) -> Response:
        """Continue a text, or token ids, without a chat template."""
        return await self._respond(request, CompletionRequest)

    async def models(self) -> dict[str, Any]:
        """Every name that can be asked for."""
        served = await asyncio.to_thread(self._state.serving.served)
        return {"object": "list", "data": [_listed(name) for name in served]}

    async def model(self, name: str) -> dict[str, Any]:
        """One name that can be asked for."""
        served = await asyncio.to_thread(self._state.serving.served)
        found = next((entry for entry in served if entry.id == name), None)
        if found is None:
            names = ", ".join(entry.id for entry in served) or "nothing yet"
            raise UnknownModel(f"no model called {name[:200]!r} is served. Served: {names}.")
        return _listed(found)

    async def _respond(
        self, request: Request, kind: type[ChatRequest] | type[CompletionRequest]
    ) -> Response:
        where = _where(request)
        accept_large_body(request)
        asked, read = await self._read(await request.body(), kind)

        async def answer(scope: AsgiScope, receive: Receive, send: Send) -> None:
            out = EventStream(send)
            try:
                said = await self._answer(asked, read, where, out)
            except Exception as error:
                if not out.begun:
                    raise
                await out.say(self._excuse(error, request.url.path))
                await out.end()
                return
            if said is not None:
                await Response(written(said), media_type="application/json")(scope, receive, send)

        return WhileConnected(answer)

    async def _read(
        self, body: bytes, kind: type[ChatRequest] | type[CompletionRequest]
    ) -> tuple[ChatRequest | CompletionRequest, Asked | None]:
        """The request; of a large one, which a worker process reads, also its checked messages."""
        settings, workers = self._state.settings, self._state.workers
        if len(body) <= settings.large_body_bytes:
            return kind.parse(read_json(body), max_n=settings.max_n), None
        limits = {"max_n": settings.max_n, "max_seq_length": settings.max_seq_length}
        if kind is CompletionRequest:
            return await workers.run(tasks.read_completion, body, **limits), None
        chat = await workers.run(tasks.read_chat, body, **limits)
        return chat.request, chat.asked

    async def _answer(
        self,
        asked: ChatRequest | CompletionRequest,
        read: Asked | None,
        where: Where,
        out: EventStream,
    ) -> dict[str, Any] | None:
        """The answer, or None where it was streamed."""
        state, serving = self._state, self._state.serving
        with (
            serving.admitted(),
            state.metrics.running.track_inprogress(),
            serving.talks.within(where.rollout) as scope,
        ):
            await serving.ready()
            run = state.calls.run_of(where.rollout)
            policy = await serving.resolve(
                asked.model, rollout=where.rollout or None, run=run, step=where.step
            )
            async with serving.using(policy):
                known = Preparation(
                    policy=policy,
                    where=where,
                    scope=scope,
                    run=run,
                    settings=state.settings,
                    calls=state.calls,
                    metrics=state.metrics,
                    workers=state.workers,
                )
                if isinstance(asked, ChatRequest):
                    exchange, form = await known.chat(asked, read)
                else:
                    exchange, form = await known.complete(asked)
                if not asked.stream:
                    return await whole(exchange, form)
                await streamed(exchange, form, out, include_usage=asked.include_usage)
                return None

    def _excuse(self, error: Exception, path: str) -> dict[str, Any]:
        """An error after the first byte, as an event."""
        log.error("a stream failed", exc_info=error, extra={"fields": {"path": path}})
        if isinstance(error, HoneError):
            return error_body(error)
        message = f"this server has a defect; its trace is in {self._state.settings.log_file}"
        return openai_error(message, 500)


def _where(request: Request) -> Where:
    """The rollout and function a request names, checked."""
    header, address = request.headers.get("x-hone-rollout"), request.path_params.get("rollout_id")
    named, parameters = (None, {}) if address is None else _read_address(address)
    if header and named and header != named:
        raise BadRequest(
            f"the address names rollout {named!r} and X-Hone-Rollout {header!r}; send one",
            param="X-Hone-Rollout",
        )
    rollout = header or named or ""
    if (rollout or named is not None) and not _ROLLOUT.fullmatch(rollout):
        raise BadRequest(
            f"rollout {rollout[:200]!r}: use letters, digits and '._~:-', at most 200, and begin "
            "with a letter or a digit",
            param="X-Hone-Rollout",
        )
    function = request.headers.get("x-hone-function", "")
    if len(function) > _MAX_FUNCTION:
        raise BadRequest(
            f"X-Hone-Function has {len(function)} characters; at most {_MAX_FUNCTION}",
            param="X-Hone-Function",
        )
    settings = {name: _setting(request, name, parameters.get(name), rollout) for name in _SETTINGS}
    return Where(rollout, function, _temperature(settings["temperature"]), _step(settings["step"]))


def _read_address(segment: str) -> tuple[str, dict[str, str]]:
    """`ID,temperature=0,step=3` as the id and its parameters, whose values are not checked."""
    id, *rest = segment.split(",")
    parameters: dict[str, str] = {}
    for text in rest:
        name, _, value = text.partition("=")
        if name not in _SETTINGS or name in parameters:
            raise BadRequest(
                f"the address of the rollout has {text[:40]!r} after its id; use "
                "temperature=NUMBER and step=NUMBER, each once at most"
            )
        parameters[name] = value
    return id, parameters


def _setting(request: Request, name: str, in_address: str | None, rollout: str) -> _Setting | None:
    """What the request says of the temperature or the step of its rollout."""
    header, instead = _SETTINGS[name]
    in_header = request.headers.get(header)
    if in_header is None:
        return (
            None if in_address is None else _Setting(in_address, f"{name} in the address", header)
        )
    if not rollout:
        raise BadRequest(
            f"{header} is for rollouts, and this request names none; send X-Hone-Rollout with it, "
            f"or {instead}",
            param=header,
        )
    if in_address is not None and in_address != in_header:
        raise BadRequest(
            f"the address says {name} {in_address[:40]!r} and {header} {in_header[:40]!r}; send one",
            param=header,
        )
    return _Setting(in_header, header, header)


def _step(setting: _Setting | None) -> int | None:
    if setting is None:
        return None
    if not _STEP.fullmatch(setting.text):
        raise setting.refused("use the number of a step, such as 0")
    return int(setting.text)


def _temperature(setting: _Setting | None) -> float | None:
    """Inside the same bounds as a request's own."""
    if setting is None:
        return None
    value = float(setting.text) if _NUMBER.fullmatch(setting.text) else None
    if value is None or value > MAX_TEMPERATURE:
        raise setting.refused("use 0 for greedy, else a number up to 100")
    return effective_temperature(value)


def _listed(served: ServedName) -> dict[str, Any]:
    return {
        "id": served.id,
        "object": "model",
        "created": int(served.created_at),
        "owned_by": "hone",
        "root": served.root,
        "step": served.step,
    }
