"""`hone serve-workflow`: a workflow as a service, for `--endpoint` and for any other client.

In:   a YAML file; requests with an input
Out:  POST /generate, /generate/full and /v1/chat/completions, GET /health

A request that names a rollout (X-Hone-Rollout and related headers) runs in that rollout: its model
calls carry the id, so the training server records them under the client's rollout. The components
are built once, before the first request.
"""

import asyncio
import ipaddress
import json
import secrets
import signal
import socket
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from typer import BadParameter

from hone.config.build import build
from hone.config.schema import read
from hone.errors import BadRequest, ConfigError, Forbidden, Unauthorized
from hone.evaluation.steps import all_steps
from hone.files.redact import redact
from hone.tasks.interrupt import INTERRUPTED, Interrupts
from hone.tasks.loop import run_loop
from hone.wire.access import (
    KEY_FORM,
    Names,
    check_host,
    check_not_forwarded,
    check_origin,
    has_key,
    is_key,
    key_problem,
)
from hone.wire.errors import status_of
from hone.wire.limits import LimitedBody, TimedProtocol
from hone.wire.peers import CONNECTION, Connection, is_own, own_users
from hone.wire.rollout import RolloutScope
from hone.workflow.endpoint import DATA, STEP
from hone.workflow.function import Function
from hone.workflow.jsonable import as_text, dumps
from hone.workflow.llm import LLM
from hone.workflow.run import RolloutResult, run_rollout

GRACE_S = 5
"""How long requests may keep running after a signal."""
BACKLOG = 2048
MESSAGE = b"\nStopping; press Ctrl-C again to exit at once\n"


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on requests; the defaults are those of `hone serve`."""

    max_body_bytes: int = 64 * 2**20
    """A larger body gets 413."""
    body_timeout_s: float = 30.0
    """Seconds for a body to arrive, plus one for every 64 KiB; a slower one gets 408."""
    header_timeout_s: float = 30.0
    """Seconds for the headers of a request to arrive; then the connection is closed."""


@dataclass(frozen=True, slots=True)
class ServeWorkflowOptions:
    """The options of `hone serve-workflow`."""

    config_file: Path
    override: tuple[tuple[str, str], ...] = ()
    host: str = "127.0.0.1"
    port: int = 8080
    """0 picks a free port."""
    api_key: str | None = None
    """Key that requests must send as a bearer token; required if other machines can reach the
    address."""
    limits: Limits = Limits()


def serve_workflow(options: ServeWorkflowOptions, echo: Callable[[str], None]) -> int:
    """Serve until Ctrl-C or SIGTERM; returns the exit status."""
    if options.api_key is not None and not is_key(options.api_key):
        raise BadParameter(f"--api_key: {KEY_FORM}; leave it out for a service without a key")
    if not _is_loopback(options.host) and not options.api_key:
        raise BadParameter(
            f"--host {options.host}: other machines could run the workflow; set --api_key KEY, and "
            "HONE_ENDPOINT_API_KEY=KEY where `--endpoint` is used"
        )
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    # With the protocol set: else asyncio leaves Nagle's algorithm on, and answers take 40 ms longer.
    with (
        socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as bound,
        Interrupts(MESSAGE) as interrupts,
    ):
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind((options.host, options.port))
            # Now, because two sockets may be bound to one port until one of them listens.
            bound.listen(BACKLOG)
        except OSError as error:
            raise ConfigError(
                f"--host {options.host} --port {options.port}: {error.strerror}; use another address or port"
            ) from None
        try:
            run_loop(_serve(options, bound, interrupts, echo))
        except asyncio.CancelledError:  # Ctrl-C while the components were built
            if not interrupts.received:
                raise
        return INTERRUPTED if interrupts.received else 0


def _is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address; 0.0.0.0 is every address of the machine."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


async def _serve(
    options: ServeWorkflowOptions,
    bound: socket.socket,
    interrupts: Interrupts,
    echo: Callable[[str], None],
) -> None:
    interrupts.cancel_on_interrupt()
    document = read(options.config_file, options.override)
    async with build(document) as builder:
        await builder.serve()
        app = WorkflowApp(
            await builder.get_workflow(),
            name=document.eval.general.workflow_alias or "workflow",
            timeout_s=document.finetuning.rollout_timeout_s,
            rollout_arguments=builder.rollout_arguments,
            llms=builder.live_llms,
            host=options.host,
            api_key=options.api_key,
            limits=options.limits,
        )
        timeout = {"header_timeout_s": options.limits.header_timeout_s}
        config = uvicorn.Config(
            app.routes(),
            http=type("_Http", (TimedProtocol,), timeout),
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=GRACE_S,
        )
        server = _Server(config)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, server.stop)
        interrupts.call_on_interrupt(server.stop)
        host, port = bound.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        echo(f"Serving {options.config_file} at http://{shown}:{port}")
        await server.serve(sockets=[bound])


class _Server(uvicorn.Server):
    """Leaves signals to the loop: uvicorn's own handling would interrupt the closing of components."""

    def capture_signals(self) -> Any:
        return nullcontext()

    def stop(self) -> None:
        self.should_exit = True


class WorkflowApp:
    """The routes of one workflow."""

    def __init__(
        self,
        workflow: Function,
        *,
        name: str = "workflow",
        timeout_s: float | None = None,
        rollout_arguments: dict[str, Any] | None = None,
        llms: Callable[[], Sequence[LLM]] = tuple,
        host: str = "127.0.0.1",
        api_key: str | None = None,
        limits: Limits | None = None,
    ) -> None:
        self._llms, self._limits = llms, limits or Limits()
        self._workflow, self._name, self._timeout_s = workflow, name, timeout_s
        self._arguments, self._key = rollout_arguments or {}, api_key
        # With a key, any host name is accepted, such as a Kubernetes service: a web page has no
        # key.
        self._names = Names(host, bool(api_key), ("*",) if api_key else ())

    def routes(self) -> Starlette:
        """The ASGI application."""
        routes = [
            Route("/health", self._checked(self._health, needs_key=False), methods=["GET"]),
            Route("/generate", self._checked(self._generate), methods=["POST"]),
            Route("/generate/full", self._checked(self._generate_full), methods=["POST"]),
            Route("/v1/chat/completions", self._checked(self._chat), methods=["POST"]),
        ]
        return Starlette(routes=routes)

    async def _health(self, request: Request) -> Response:
        return _json({"status": "healthy"})

    def _check(self, headers: Mapping[str, str]) -> None:
        """Raise Forbidden for requests from web pages or proxies, as `hone serve` does."""
        check_host(self._names, headers, "--api_key KEY and send the key")
        check_origin(headers, ())
        if not self._key:
            check_not_forwarded(headers, "--api_key")

    def _checked(
        self, answer: Callable[[Request], Coroutine[Any, Any, Response]], *, needs_key: bool = True
    ) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The route with its checks; a request that cannot be answered gets an error status."""

        async def route(request: Request) -> Response:
            try:
                self._check(request.headers)
                if self._key and needs_key and not has_key(self._key, request.headers):
                    how = "send the key of --api_key: Authorization: Bearer KEY"
                    raise Unauthorized(f"{key_problem(request.headers)}; {how}")
                if not self._key and needs_key:
                    await _check_user(request)
                return await answer(request)
            except (Unauthorized, Forbidden, BadRequest) as error:
                return _error(status_of(error), str(error))
            except HTTPException as error:  # a body that is too large or too slow
                return _error(error.status_code, error.detail, error.headers)
            except ClientDisconnect:
                return _error(499, "the client disconnected")
            except asyncio.CancelledError:  # uvicorn does this GRACE_S after a signal
                return _error(503, "the service is stopping")

        return route

    async def _generate(self, request: Request) -> Response:
        result = await self._run(request, _input(await self._body(request)))
        if result.failure is not None:
            return _failed(result)
        return _json({"value": result.output})

    async def _generate_full(self, request: Request) -> Response:
        result = await self._run(request, _input(await self._body(request)))
        steps = all_steps(result.calls, result.steps, result.events)
        lines = [STEP + dumps(_line(entry)) for entry in steps]
        if result.failure is None:
            lines.append(DATA + dumps({"value": result.output}))
        else:
            lines.append(dumps(_failure(result)))
        return Response("".join(f"{line}\n\n" for line in lines), media_type="text/event-stream")

    async def _chat(self, request: Request) -> Response:
        body = await self._body(request)
        result = await self._run(request, _last_message(body))
        if result.failure is not None:
            return _failed(result)
        output = result.output if isinstance(result.output, str) else dumps(result.output)
        completion = {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": body.get("model") or self._name,
        }
        if not body.get("stream"):
            message = {"role": "assistant", "content": output}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            whole = {"object": "chat.completion", "choices": [choice], "usage": _usage(result)}
            return _json(completion | whole)
        deltas = [({"role": "assistant", "content": output}, None), ({}, "stop")]
        chunks = [
            completion
            | {
                "object": "chat.completion.chunk",
                "choices": [{"index": 0, "delta": delta, "finish_reason": finish}],
            }
            for delta, finish in deltas
        ]
        lines = [*map(dumps, chunks), "[DONE]"]
        stream = "".join(f"{DATA}{line}\n\n" for line in lines)
        return Response(stream, media_type="text/event-stream")

    async def _body(self, request: Request) -> Any:
        limits = self._limits
        body = LimitedBody(
            request.receive,
            request.headers,
            max_bytes=limits.max_body_bytes,
            timeout_s=limits.body_timeout_s,
        )
        try:
            return json.loads(await Request(request.scope, body).body())
        except (ValueError, RecursionError):
            raise BadRequest('the body is not JSON; send {"input_message": ...}') from None

    async def _run(self, request: Request, input: Any) -> RolloutResult:
        """Run the workflow in the request's rollout; stop it if the client disconnects."""
        scope = RolloutScope.parse(request.headers, None)
        if scope.rollout:
            await asyncio.gather(*(llm.find_rollouts_url() for llm in self._llms()))
        arguments = dict(self._arguments)
        if scope.aliases:
            arguments["aliases"] = dict(scope.aliases)
        run = asyncio.create_task(
            run_rollout(
                self._workflow,
                input,
                id=scope.rollout or None,
                temperature=scope.temperature,
                step=scope.step,
                timeout_s=self._timeout_s,
                **arguments,
            )
        )
        left = asyncio.create_task(_left(request))
        try:
            await asyncio.wait({run, left}, return_when=asyncio.FIRST_COMPLETED)
            if not run.done():
                raise ClientDisconnect
            return run.result()
        finally:
            left.cancel()
            run.cancel()
            await asyncio.wait({run, left})


async def _check_user(request: Request) -> None:
    """Refuse another user of this machine; for a service without a key."""
    connection: Connection | None = request.scope.get("state", {}).get(CONNECTION)
    if connection is not None and not is_own(await connection.user()):
        raise Unauthorized(
            f"the service has no key, so it accepts only {own_users()}. Start it with --api_key KEY, "
            "and send that key: Authorization: Bearer KEY"
        )


async def _left(request: Request) -> None:
    """Returns when the client has closed the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _input(body: Any) -> Any:
    """The workflow's input: the value of `input_message`, or else the whole body."""
    if isinstance(body, dict) and len(body) == 1:
        return next((body[key] for key in ("input_message", "input") if key in body), body)
    return body


def _last_message(body: Any) -> str:
    """The text of the last message of the user."""
    messages = body.get("messages") if isinstance(body, dict) else None
    for message in reversed(messages if isinstance(messages, list) else []):
        if isinstance(message, dict) and message.get("role") == "user":
            content = message.get("content")
            if isinstance(content, list):
                texts = [part.get("text") for part in content if isinstance(part, dict)]
                content = "".join(_text(text) for text in texts if text is not None)
            return "" if content is None else _text(content)
    raise BadRequest("messages: has no message of the role 'user', so the workflow has no input")


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise BadRequest(f"messages: the user's content has a {type(value).__name__}, not text")
    return value


def _line(entry: dict[str, Any]) -> dict[str, Any]:
    """One step in the toolkit's form; function_ancestry is hone's addition."""
    payload = entry["payload"]
    return {
        "id": str(payload.get("UUID")),
        "parent_id": entry.get("parent_id"),
        "type": "markdown",
        "name": str(payload.get("name") or payload["event_type"]),
        "payload": dumps(payload),
        "function_ancestry": entry.get("function_ancestry"),
    }


def _failed(result: RolloutResult) -> Response:
    """The response of a rollout that failed: 503 if a retry may succeed, as `_type: http` reads it."""
    assert result.failure is not None, "the rollout failed"
    status = 503 if result.failure.cause == "outside" else 500
    return _json({"error": _failure(result)}, status=status)


def _failure(result: RolloutResult) -> dict[str, Any]:
    assert result.failure is not None, "the rollout failed"
    failure = result.failure.failure
    return {
        "code": "workflow_error",
        "message": failure.message,
        "details": failure.type,
        "kind": result.failure.kind,
        "cause": result.failure.cause,
        "reason": result.failure.reason,
        "traceback": failure.traceback,
    }


def _usage(result: RolloutResult) -> dict[str, int]:
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    return {n: sum(int((call.usage or {}).get(n) or 0) for call in result.calls) for n in names}


def _json(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(dumps(value), status, headers, media_type="application/json")


def _error(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    return _json({"error": {"message": redact(as_text(message))}}, status, headers)
