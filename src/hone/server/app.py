"""The parts of a server, wired: state, routes, and what every request passes through.

In:   Settings
Out:  State (everything a server holds) and two ASGI apps over it: control, and OpenAI alone

Every request passes one gate, in this order: its size, its key, its route, its log line. Errors
leave in one JSON shape; a stack trace goes to the log and never into a response.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Self

from fastapi import APIRouter, FastAPI, Response
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse

import hone
from hone import errors
from hone.errors import HoneError
from hone.inference.base import Engine
from hone.learner.worker import LearnerProcess
from hone.logs import log, say
from hone.server import art, art_log, auth, chat, training
from hone.server.bodies import BodyBudget, BodyReader, Message, Receive
from hone.server.failures import error_body, openai_error, status_of
from hone.server.learning import StartLearner
from hone.server.rename import finish_renames
from hone.server.service import TrainingService
from hone.server.serving import Serving
from hone.server.settings import Settings
from hone.server.supervision import Part, repeat
from hone.server.telemetry import Metrics, refusal_text
from hone.server.workers import WorkerPool
from hone.store import calls, jobs, models
from hone.store.calls import CallStore
from hone.store.checkpoints import Checkpoints
from hone.store.database import Store
from hone.store.jobs import JobStore
from hone.store.models import ModelStore
from hone.store.root import make_root

Send = Callable[[Message], Awaitable[None]]

PRUNE_S = 600.0
"""Recorded calls, and the groups of ended jobs, are pruned so often."""
DRAIN_S = 5.0
"""Requests that were cut off when the server stops have so long to be recorded."""


@dataclass(slots=True)
class State:
    """Everything one server holds."""

    settings: Settings
    store: Store
    models: ModelStore
    jobs: JobStore
    calls: CallStore
    checkpoints: Checkpoints
    serving: Serving
    service: TrainingService
    metrics: Metrics
    workers: WorkerPool
    """Processes that read large request bodies."""
    bodies: BodyBudget
    pruner: Part = field(default_factory=lambda: Part("pruner"))
    started_at: float = field(default_factory=time.time)

    @classmethod
    def open(
        cls,
        settings: Settings,
        *,
        open_engine: Callable[[str], Engine] | None = None,
        start_learner: StartLearner = LearnerProcess.launch,
    ) -> Self:
        """Open or make the state under `settings.root`; loads no model."""
        make_root(settings.root)
        metrics = Metrics()
        schemas = (models.SCHEMA, jobs.SCHEMA, calls.SCHEMA)
        store = Store(settings.root / "state.sqlite", schemas=schemas)
        known, recorded = ModelStore(store), CallStore(store)
        queue = JobStore(store, keep_progress=settings.keep_progress)
        checkpoints = Checkpoints(settings.root)
        serving = Serving(known, checkpoints, settings, open_engine)
        service = TrainingService(
            jobs=queue,
            models=known,
            checkpoints=checkpoints,
            serving=serving,
            calls=recorded,
            settings=settings,
            metrics=metrics,
            start_learner=start_learner,
        )
        state = cls(
            settings=settings,
            store=store,
            models=known,
            jobs=queue,
            calls=recorded,
            checkpoints=checkpoints,
            serving=serving,
            service=service,
            metrics=metrics,
            workers=WorkerPool(settings.body_processes),
            bodies=BodyBudget(settings.max_bodies_bytes),
        )
        finish_renames(state)
        return state

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Take jobs and prune calls until the block ends; then close everything in reverse."""
        try:
            await self.service.start()
            pruning = asyncio.create_task(repeat(self.pruner, self._prune, PRUNE_S))
            try:
                yield
            finally:
                pruning.cancel()
                with suppress(asyncio.CancelledError):
                    await pruning
        finally:
            await self.service.close()
            await self.serving.drain(DRAIN_S)
            await self.serving.close()
            await asyncio.to_thread(self.workers.close)
            self.store.close()

    async def _prune(self) -> None:
        """Delete what is kept too long, and close what nobody has used for long."""
        settings, calls, jobs = self.settings, self.calls, self.jobs
        bounds = {"max_age_s": settings.keep_calls_s, "max_bytes": settings.keep_calls_bytes}
        for run in await asyncio.to_thread(calls.close_idle_runs, settings.idle_run_s):
            say("run closed: it was idle", run=run, idle_s=settings.idle_run_s)
        if gone := await asyncio.to_thread(calls.prune, **bounds):
            say("calls pruned", calls=gone)
        if gone := await asyncio.to_thread(jobs.prune, **bounds):
            say("groups of ended jobs pruned", jobs=gone)
        await asyncio.to_thread(jobs.prune_events, max_age_s=settings.keep_events_s)
        logged = (art_log.prune, settings.root, settings.keep_trajectories_bytes)
        if gone := await asyncio.to_thread(*logged):
            say("logged trajectories pruned", files=gone)
        await self.serving.close_idle(settings.idle_engine_s)
        await self.service.close_idle()


def create_apps(state: State) -> tuple[FastAPI, FastAPI]:
    """The control plane, which has every route, and the OpenAI API alone."""
    control = _app(state, "hone", (chat.routes, training.routes, art.routes), control=True)
    inference = _app(state, "hone: OpenAI API", (chat.routes,), control=False)
    return control, inference


def _app(
    state: State, title: str, parts: tuple[Callable[[State], APIRouter], ...], *, control: bool
) -> FastAPI:
    app = FastAPI(title=title, version=hone.__version__, docs_url=None, redoc_url=None)
    for routes in parts:
        app.include_router(routes(state))
    app.include_router(_own_routes(state, control=control))
    app.add_exception_handler(HoneError, _refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_middleware(_Gate, state=state, control=control)
    if origins := state.settings.allowed_origins:
        # Outside the gate: a browser asks without the key whether the page may send it.
        app.add_middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"]
        )
    return app


def _own_routes(state: State, *, control: bool) -> APIRouter:
    router = APIRouter()

    @router.get("/health")
    @router.get("/healthcheck")
    async def health(request: Request) -> dict[str, Any]:
        """Whether it works, part by part; to those who have the key, also what it serves where.

        `status` is `ok` if every part is, else `degraded`. `base_models` says of each base model in
        use whether it is loaded.
        """
        client = request.client.host if request.client else None
        try:
            auth.check(state.settings, "", request.headers, client, control=control)
        except errors.Unauthorized:
            return await _health(state, keyed=False)
        return await _health(state, keyed=True)

    if control:

        @router.get("/metrics", response_class=Response)
        async def metrics() -> Response:
            """Counters, for Prometheus."""
            return Response(generate_latest(state.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    return router


async def _health(state: State, *, keyed: bool) -> dict[str, Any]:
    """How the server is. Without the key: no names, no jobs, no reasons, which may name paths."""
    parts = {"engine": state.serving.status(), **state.service.parts()}
    parts["pruner"] = state.pruner.status()
    said: dict[str, Any] = {"version": hone.__version__, "uptime_s": time.time() - state.started_at}
    try:
        said |= await asyncio.to_thread(state.service.status)
        if keyed:
            said["base_models"] = await asyncio.to_thread(state.serving.base_models)
        parts["storage"] = {"status": "ok"}
    except errors.StorageError as error:
        parts["storage"] = {"status": "failing", "reason": str(error)}
    works = all(part["status"] == "ok" for part in parts.values())
    said = {"status": "ok" if works else "degraded", **said, "parts": parts}
    if keyed:
        ports = {"port": state.settings.port, "inference_port": state.settings.inference_port}
        return said | ports
    said.pop("jobs", None)
    said["parts"] = {name: {"status": part["status"]} for name, part in parts.items()}
    return said


# ---- errors -----------------------------------------------------------------------------------


def _answer(error: HoneError) -> JSONResponse:
    headers = getattr(error, "headers", None)
    return JSONResponse(error_body(error), status_of(error), headers=headers)


async def _refused(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HoneError), error
    answer = _answer(error)
    if answer.status_code == 500:
        log.error("a request failed", exc_info=error, extra={"fields": {"path": request.url.path}})
    return answer


async def _invalid(request: Request, error: Exception) -> JSONResponse:
    """A body that does not parse. `input` is left out: it may be megabytes, or a secret."""
    assert isinstance(error, RequestValidationError), error
    sent = request.headers.get("content-type", "")
    # FastAPI reads a body as JSON only if it is said to be: a page could send any other unasked.
    if "json" not in sent and any(e["loc"] == ("body",) for e in error.errors()):
        said = f"the body's Content-Type is {sent[:100]!r}" if sent else "no Content-Type is sent"
        text = f"{said}; send JSON, and -H 'Content-Type: application/json' with it"
        body = openai_error(text, 415, param="Content-Type")
        return JSONResponse(body | {"detail": text}, 415)
    detail = [{"loc": e["loc"], "msg": e["msg"], "type": e["type"]} for e in error.errors()]
    first = detail[0]
    where = [str(part) for part in first["loc"] if part != "body"]
    message = "\n".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in detail[:20])
    body = openai_error(message, 422, param=".".join(where) or None)
    return JSONResponse(body | {"detail": detail}, 422)


async def _http(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException), error
    body = openai_error(str(error.detail), error.status_code)
    return JSONResponse(body | {"detail": error.detail}, error.status_code, headers=error.headers)


# ---- the gate ---------------------------------------------------------------------------------


class _Gate:
    """What every request passes: size, key, log line. Plain ASGI, so that streams stay streams."""

    def __init__(self, app: Any, *, state: State, control: bool) -> None:
        self.app = app
        self.state = state
        self.control = control

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = time.perf_counter()
        status, reason = 0, ""

        async def sending(message: Message) -> None:
            nonlocal status, reason
            if message["type"] == "http.response.start":
                status = message["status"]
            elif status >= 400 and not reason:
                reason = refusal_text(message.get("body", b""), self.state.settings.api_key)
            await send(message)

        try:
            await self._pass(scope, receive, sending)
        except HoneError as error:
            if status:
                raise
            await _answer(error)(scope, receive, sending)
        except Exception as error:  # whatever it is: JSON for the client, the trace for the log
            log.error("a request failed", exc_info=error, extra={"fields": {"path": scope["path"]}})
            if status:
                raise
            text = f"this server has a defect; its trace is in {self.state.settings.log_file}"
            await JSONResponse(openai_error(text, 500), 500)(scope, receive, sending)
        finally:
            self._note(scope, status, time.perf_counter() - started, reason)

    async def _pass(self, scope: Message, receive: Receive, send: Send) -> None:
        headers = {k.decode("latin-1").lower(): v.decode("latin-1") for k, v in scope["headers"]}
        settings = self.state.settings
        client = scope["client"][0] if scope.get("client") else None
        access = auth.check(settings, scope["path"], headers, client, control=self.control)
        try:
            body = BodyReader(receive, headers, settings, self.state.bodies)
        except HTTPException as refusal:
            await (await _http(Request(scope), refusal))(scope, receive, send)
            return
        token = auth.access.set(access)
        try:
            scope["hone.body"] = body
            await self.app(scope, body, send)
        finally:
            auth.access.reset(token)
            body.release()

    def _note(self, scope: Message, status: int, seconds: float, reason: str) -> None:
        route = getattr(scope.get("route"), "path", "unknown")
        metrics = self.state.metrics
        metrics.requests.labels(route, status).inc()
        metrics.request_s.labels(route).observe(seconds)
        level = logging.WARNING if status >= 500 else logging.INFO
        fields = {"method": scope["method"], "path": scope["path"], "status": status}
        # Some clients show their users the status alone.
        why = {"reason": reason} if reason else {}
        say("request", level=level, **fields, ms=round(seconds * 1e3, 2), **why)
