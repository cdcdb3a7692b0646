"""The server's two ASGI apps: routes, error responses, and the middleware of every request.

In:   State
Out:  the control app, which has every route, and the app with the inference APIs only

Every request passes the same middleware, in this order: body size, key, route, log line. Errors
have the JSON shape of the OpenAI API, or of the dialect the path belongs to; a stack trace goes to
the log and never into a response.
"""

import asyncio
import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any

from fastapi import APIRouter, FastAPI, Response
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Message, Receive, Scope, Send

import hone
from hone.errors import HoneError, StorageError
from hone.files.logs import log, say
from hone.files.redact import redact, redact_json
from hone.server.access import access
from hone.server.http import (
    art_routes,
    auth,
    chat_routes,
    pages,
    responses_routes,
    rollout_routes,
    training_routes,
)
from hone.server.http.respond import HOLD, IN_ROLLOUT
from hone.server.limits import BodyReader, PlainRoute, is_json
from hone.server.serve import policies
from hone.server.settings import Settings
from hone.server.state import State
from hone.server.telemetry import refusal_text
from hone.wire.access import claimed_addresses
from hone.wire.anthropic.response import MESSAGES
from hone.wire.errors import RETRY_HEADER, error_body, error_response, is_final
from hone.wire.openai.chat_response import CHAT, TEXT
from hone.wire.openai.response_events import RESPONSES
from hone.wire.peers import CONNECTION, Connection
from hone.wire.rollout import HELD_HEADER

DIALECTS = (CHAT, TEXT, RESPONSES, MESSAGES)
"""The API dialects; each formats the errors of its own routes."""
_PROJECT = re.compile(r"^/project/([^/]+)(?=/)")
"""Prefix of any OpenAI API path; under it, model names refer to models of this project."""
_ROLLOUT = "/rollout/"
_REQUEST_ID = "hone.request_id"
"""Key in the ASGI scope. The id appears in the log, in response headers and in some dialects'
errors."""


def create_apps(state: State) -> tuple[FastAPI, FastAPI]:
    """The control app, which has every route, and the app with the inference APIs only."""
    parts = (chat_routes.routes, responses_routes.routes, rollout_routes.routes)
    control = _app(state, "hone", (*parts, training_routes.routes, art_routes.routes), control=True)
    inference = _app(state, "hone: OpenAI API", parts, control=False)
    return control, inference


def _app(
    state: State, title: str, parts: tuple[Callable[[State], APIRouter], ...], *, control: bool
) -> FastAPI:
    async def respond(request: Request, error: Exception) -> JSONResponse:
        return _error_response(state, request.scope, error)

    app = FastAPI(
        title=title,
        version=hone.__version__,
        docs_url=None,
        redoc_url=None,
        exception_handlers=dict.fromkeys(
            (HoneError, RequestValidationError, HTTPException), respond
        ),
    )
    plain: dict[str, PlainRoute] = {}
    for routes in parts:
        router = routes(state)
        app.include_router(router)
        plain |= {route.path: route for route in router.routes if isinstance(route, PlainRoute)}
    app.include_router(_status_routes(state, control=control))
    app.include_router(pages.routes())

    app.add_middleware(_Middleware, state=state, control=control, plain=plain)
    if origins := state.settings.allowed_origins:
        # Outside the key check: a browser's preflight request carries no key.
        app.add_middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"]
        )
    return app


def _status_routes(state: State, *, control: bool) -> APIRouter:
    router = APIRouter()

    @router.get("/health")
    @router.get("/healthcheck")
    async def health() -> dict[str, Any]:
        """Status of the server and of each of its parts; with the key, also what it serves.

        `status` is `ok` if every part is, else `degraded`. `base_models` says of each base model in
        use whether it is loaded; `waiting` says why a job does not run yet.
        """
        return await _health(state)

    if control:

        @router.get("/metrics", response_class=Response)
        async def metrics() -> Response:
            """Counters, for Prometheus."""
            return Response(generate_latest(state.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    return router


async def _health(state: State) -> dict[str, Any]:
    """The body of /health. Without the key: no names, no jobs, and no reasons (they name paths)."""
    keyed = access.get() != "anyone"
    health: dict[str, Any] = {}
    starting = state.serving.choice.starting()
    parts = {
        "engine": state.serving.engines.status() | ({"starting": starting} if starting else {}),
        **state.service.parts(),
        "pruner": state.pruner.status(),
    }
    try:
        health = await asyncio.to_thread(state.service.status)
        if keyed:
            health["base_models"] = await asyncio.to_thread(state.serving.base_models)
        parts["storage"] = {"status": "ok"}
    except StorageError as error:
        parts["storage"] = {"status": "failing", "reason": str(error)}
    if keyed:
        health |= {"port": state.settings.port, "inference_port": state.settings.inference_port}
        if access.get() == "operator":
            health["root"] = str(state.settings.root.absolute())
    else:
        health.pop("jobs", None)
        health.pop("waiting", None)
        parts = {name: {"status": part["status"]} for name, part in parts.items()}
    works = all(part["status"] == "ok" for part in parts.values())
    return {
        "status": "ok" if works else "degraded",
        "version": hone.__version__,
        "uptime_s": time.monotonic() - state.started,
        **health,
        "parts": parts,
    }


# ---- errors -----------------------------------------------------------------------------------


def _error_response(state: State, scope: Scope, error: Exception) -> JSONResponse:
    body: dict[str, Any]
    if isinstance(error, RequestValidationError):
        status, body = _validation_error(Headers(scope=scope).get("content-type", ""), error)
    elif isinstance(error, HTTPException):
        status, detail = error.status_code, error.detail
        if status == 404 and detail == "Not Found":
            detail = _no_route(scope, state.settings)
        body = error_body(str(detail), status) | {"detail": redact_json(detail)}
    else:
        status, body = error_response(error, state.settings.log_file)
    if status == 500:
        log.error("a request failed", exc_info=error, extra={"fields": {"path": scope["path"]}})
    scope["hone.refusal"] = body["error"]["message"]
    path = re.sub(r"^/rollout/[^/]+", "", scope["path"])
    for dialect in DIALECTS:
        if f"{path}/".startswith(f"{dialect.path}/"):
            body = dialect.error_body(status, body | {"request_id": scope.get(_REQUEST_ID)})
    headers = dict(getattr(error, "headers", None) or {})
    if is_final(error, status):
        headers[RETRY_HEADER] = "false"
    return JSONResponse(body, status, headers=headers)


def _no_route(scope: Scope, settings: Settings) -> str:
    path, (_, port) = scope["path"], scope.get("server") or (None, None)
    text = f"no route {scope['method']} {path[:200]}; GET /docs lists those of this port"
    if "/v1/v1/" in path:
        text += ". The client adds /v1 itself: leave it out of the base URL"
    if path.startswith("/v1/training/") and port == settings.inference_port:
        text += (
            f". This is the port of the inference APIs; the training API is on port {settings.port}"
        )
    return text


def _validation_error(
    content_type: str, error: RequestValidationError
) -> tuple[int, dict[str, Any]]:
    """The error for a body that does not validate. Omits `input`: it may be large, or a secret."""
    if not is_json(content_type) and any(e["loc"] == ("body",) for e in error.errors()):
        sent = (
            f"the body's Content-Type is {content_type[:100]!r}"
            if content_type
            else "no Content-Type is sent"
        )
        text = f"{sent}; send JSON, and -H 'Content-Type: application/json' with it"
        return 415, error_body(text, 415, param="Content-Type") | {"detail": text}
    detail = [{"loc": e["loc"], "msg": redact(e["msg"]), "type": e["type"]} for e in error.errors()]
    where = [str(part) for part in detail[0]["loc"] if part != "body"]
    message = "\n".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in detail[:20])
    return 422, error_body(message, 422, param=".".join(where) or None) | {"detail": detail}


# ---- middleware -------------------------------------------------------------------------------


def _take_project(scope: Scope) -> str | None:
    """Remove /project/NAME from the path of a request; returns the name."""
    match = _PROJECT.match(scope["path"])
    if match is None:
        return None
    scope["path"] = scope["path"][match.end() :]
    scope["raw_path"] = scope["path"].encode()
    return match[1]


async def _caller(scope: Scope, settings: Settings) -> auth.Caller:
    client = scope["client"][0] if scope.get("client") else None
    connection: Connection | None = scope.get("state", {}).get(CONNECTION)
    if connection is None:  # every request over a socket has one (listen.py): this is our own call
        return auth.Caller(client, client, user=os.geteuid())
    return auth.Caller(
        connection.address,
        client,
        user=await connection.user() if settings.api_key is None else None,
        claims=claimed_addresses(scope["headers"]) if settings.forwarded_allow_ips else (),
    )


class _Middleware:
    """Checks body size and key, and logs every request. Plain ASGI: it does not buffer streams."""

    def __init__(
        self, app: Any, *, state: State, control: bool, plain: Mapping[str, PlainRoute]
    ) -> None:
        """`plain`: POST routes that bypass FastAPI, by path."""
        self.app = app
        self.state = state
        self.control = control
        self._plain = plain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = time.perf_counter()
        status = 0
        request_id = scope[_REQUEST_ID] = f"req_{secrets.token_hex(10)}"
        # OpenAI's clients read x-request-id, Anthropic's request-id.
        own = [(name, request_id.encode()) for name in (b"x-request-id", b"request-id")]

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                held_s = scope[HOLD].held_s if HOLD in scope else 0.0
                held = [(HELD_HEADER.lower().encode(), f"{held_s:g}".encode())] if held_s else []
                message["headers"] = [*message.get("headers", ()), *own, *held]
            await send(message)

        try:
            await self._check(scope, receive, watch)
        except Exception as error:  # any error: JSON for the client, the traceback for the log
            response = _error_response(self.state, scope, error)
            if status:
                raise
            await response(scope, receive, watch)
        finally:
            self._log(scope, status, time.perf_counter() - started)

    async def _check(self, scope: Scope, receive: Receive, send: Send) -> None:
        named = _take_project(scope)
        # Decoded once: starlette's Headers decodes on every lookup. The first of several counts.
        headers = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in reversed(scope["headers"])
        }
        settings = self.state.settings
        caller = await _caller(scope, settings)
        granted = auth.check(settings, scope["path"], headers, caller, control=self.control)
        body = BodyReader(receive, headers, settings, self.state.bodies)
        token, within = access.set(granted), policies.project.set(named)
        try:
            scope["hone.body"] = body
            route = self._take_plain(scope)
            await (route.answer if route else self.app)(scope, body, send)
        finally:
            policies.project.reset(within)
            access.reset(token)
            body.release()

    def _take_plain(self, scope: Scope) -> PlainRoute | None:
        if scope["method"] != "POST":
            return None
        path: str = scope["path"]
        if not path.startswith(_ROLLOUT):
            return self._plain.get(path)
        rollout, slash, rest = path.removeprefix(_ROLLOUT).partition("/")
        route = self._plain.get(f"{IN_ROLLOUT}{slash}{rest}") if rollout else None
        if route is not None:
            scope["path_params"] = {"rollout_id": rollout}
        return route

    def _log(self, scope: Scope, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "unknown")
        metrics = self.state.metrics
        metrics.requests.labels(route, status).inc()
        metrics.request_s.labels(route).observe(seconds)
        level = logging.WARNING if status >= 500 else logging.INFO
        fields = {
            "method": scope["method"],
            "path": scope["path"],
            "status": status,
            "ms": round(seconds * 1e3, 2),
            "id": scope[_REQUEST_ID],
        }
        if refusal := scope.get("hone.refusal"):  # some clients show only the status
            fields["reason"] = refusal_text(refusal, self.state.settings.api_key)
        say("request", level=level, **fields)
