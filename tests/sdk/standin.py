"""A scripted server, over hone's native routes and with its real types.

In:   events of jobs, as the test emits them; a link that can be cut
Out:  what a RemoteBackend gets from a failing server: lost answers, broken streams, refusals
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from hone.trajectory import JobRequest
from hone.types import Failure, JobEvent, JobInfo, ModelInfo, ModelSpec, TrainConfig

FINAL = {"done", "failed", "cancelled"}


@dataclass
class Job:
    info: JobInfo
    request: JobRequest
    events: list[JobEvent] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class StandIn:
    """Keeps what it was asked; jobs go on when the test says `emit`."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self.jobs: dict[str, Job] = {}
        self.by_key: dict[str, Job] = {}
        self.submitted = asyncio.Event()
        self.refuse: Callable[[Request], Response | None] = lambda request: None
        self.app = FastAPI()
        self.app.middleware("http")(self._note)
        self._routes()

    @property
    def job(self) -> Job:
        (job,) = self.jobs.values()
        return job

    def emit(self, type: str, **data: Any) -> None:
        """The next event of the only job."""
        job = self.job
        event = JobEvent(id=len(job.events) + 1, job=job.info.id, type=type, at=0.0, data=data)
        job.events.append(event)
        if type in FINAL:
            failure = Failure(**data["failure"]) if type == "failed" else None
            fields = {k: v for k, v in data.items() if k in {"step", "metrics", "reason"}}
            job.info = job.info.model_copy(update={"state": type, "failure": failure, **fields})
        job.changed.set()
        job.changed = asyncio.Event()

    async def _note(self, request: Request, call_next: Any) -> Response:
        self.requests.append((request.method, request.url.path, dict(request.headers)))
        return self.refuse(request) or await call_next(request)

    def _routes(self) -> None:
        app = self.app

        @app.post("/v1/training/models", status_code=201)
        async def register(spec: ModelSpec) -> ModelInfo:
            return _info(spec)

        @app.post("/v1/training/models/{project}/{name}/prepare")
        @app.get("/v1/training/models/{project}/{name}")
        async def model(project: str, name: str) -> ModelInfo:
            return _info(ModelSpec(project=project, name=name, base_model="b"))

        @app.post("/v1/training/jobs", status_code=202)
        async def submit(request: JobRequest) -> JobInfo:
            assert request.idempotency_key is not None
            if request.idempotency_key not in self.by_key:
                info = JobInfo(
                    id=f"job-{len(self.jobs)}",
                    model=request.model,
                    base_model="b",
                    state="queued",
                    created_at=0.0,
                    config=TrainConfig.model_validate(request.config),
                    counts={"by_tokens": 1},
                )
                job = self.jobs[info.id] = self.by_key[request.idempotency_key] = Job(info, request)
                job.changed.clear()
                self.submitted.set()
            return self.by_key[request.idempotency_key].info

        @app.get("/v1/training/jobs/{job_id}")
        async def job(job_id: str) -> JobInfo:
            return self.jobs[job_id].info

        @app.post("/v1/training/jobs/{job_id}/cancel")
        async def cancel(job_id: str) -> JobInfo:
            self.emit("cancelled")
            return self.jobs[job_id].info

        @app.get("/v1/training/jobs/{job_id}/events")
        async def events(job_id: str, request: Request) -> StreamingResponse:
            after = int(request.headers.get("last-event-id", 0))
            return StreamingResponse(self._stream(job_id, after), media_type="text/event-stream")

    async def _stream(self, job_id: str, after: int) -> AsyncIterator[str]:
        job = self.jobs[job_id]
        while True:
            changed = job.changed
            for event in job.events[after:]:
                after = event.id
                text = event.model_dump_json()
                yield f"id: {event.id}\nevent: {event.type}\ndata: {text}\n\n"
                if event.type in FINAL:
                    return
            await changed.wait()


def refusal(status: int, message: str, kind: str, **headers: str) -> Response:
    """An error as a hone server spells it."""
    error = {"message": message, "type": "server_error", "param": None, "code": None}
    body = {"error": error, "exception": kind, "detail": message}
    return JSONResponse(body, status, headers=headers)


def _info(spec: ModelSpec) -> ModelInfo:
    return ModelInfo(
        project=spec.project,
        name=spec.name,
        base_model=spec.base_model,
        step=4,
        best_step=None,
        rank=spec.rank,
        alpha=spec.alpha,
        seed=spec.seed,
        inference_base_url="http://10.0.0.9:8000/v1",
        inference_name=spec.name,
        not_applicable=[],
        created_at=0.0,
    )


class Link:
    """A wire between client and server that a test can cut."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._open: set[asyncio.StreamWriter] = set()
        self.lose_answers = 0
        """So many requests still reach the server and are never answered."""
        self.down = False
        self.connections = 0
        self.url = ""

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Link"]:
        server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server:
            yield self
            self.cut()

    def cut(self) -> None:
        """Break every connection there is."""
        for writer in list(self._open):
            writer.transport.abort()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        if self.down:
            writer.transport.abort()
            return
        there, back = await asyncio.open_connection("127.0.0.1", self._port)
        self._open |= {writer, back}
        sending = asyncio.create_task(_pump(reader, back))
        try:
            first = await there.read(65536)
            if self.lose_answers and first:
                self.lose_answers -= 1
                return
            writer.write(first)
            await _pump(there, writer)
        except OSError:
            pass
        finally:
            sending.cancel()
            for end in (writer, back):
                end.transport.abort()
                self._open.discard(end)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        writer.write_eof()
    except OSError:
        pass
