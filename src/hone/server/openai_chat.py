"""Routes of the OpenAI API: /v1/chat/completions, /v1/completions and /v1/models.

In:   requests of any OpenAI client, inside a rollout (wire/rollout.py) or outside
Out:  responses with token ids, log-probabilities and the step that answered; every call recorded

One request: parse (wire/openai_chat.py) -> admit -> resolve the model's name (serving.py) -> build
the prompt (prepare.py) -> sample and record (generation.py) -> respond (responses.py). A client
that disconnects cancels its request at any point.
"""

import asyncio
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from hone.chat.bridge import HashedMessages
from hone.errors import UnknownModel
from hone.logs import log
from hone.server import rollouts
from hone.server.bodies import accept_large_body
from hone.server.chat_tasks import read_request
from hone.server.generation import RequestContext
from hone.server.prepare import prepare_chat, prepare_completion
from hone.server.responses import EventStream, UntilDisconnect
from hone.server.serving import ServedName
from hone.server.state import State
from hone.wire.errors import error_response
from hone.wire.json import write_json
from hone.wire.openai_chat import ChatRequest, CompletionRequest
from hone.wire.rollout import RolloutScope

Kind = type[ChatRequest] | type[CompletionRequest]


def routes(state: State) -> APIRouter:
    """The OpenAI API, also under /rollout/ID, and the recorded rollouts and runs."""
    router = APIRouter(tags=["openai"])

    async def chat(request: Request) -> Response:
        """Answer a conversation."""
        return await _respond(state, request, ChatRequest)

    async def complete(request: Request) -> Response:
        """Continue a text, or token ids, without a chat template."""
        return await _respond(state, request, CompletionRequest)

    async def models() -> dict[str, Any]:
        """Every name that can be asked for."""
        served = await asyncio.to_thread(state.serving.served)
        return {"object": "list", "data": [_list_entry(name) for name in served]}

    async def model(name: str) -> dict[str, Any]:
        """One name that can be asked for."""
        served = await asyncio.to_thread(state.serving.served)
        for entry in served:
            if entry.id == name:
                return _list_entry(entry)
        names = ", ".join(entry.id for entry in served) or "nothing yet"
        raise UnknownModel(f"no model called {name[:200]!r} is served. Served: {names}.")

    for prefix in ("", "/rollout/{rollout_id}"):
        # /openapi.json lists each route once, under its first address.
        shown: dict[str, Any] = {"include_in_schema": prefix == ""}
        for path, endpoint, kind in (
            ("/v1/chat/completions", chat, ChatRequest),
            ("/v1/completions", complete, CompletionRequest),
        ):
            schema = {"schema": kind.model_json_schema()}
            body = {"required": True, "content": {"application/json": schema}}
            shown_body = {"openapi_extra": {"requestBody": body}, **shown}
            router.add_api_route(prefix + path, endpoint, methods=["POST"], **shown_body)
        router.add_api_route(f"{prefix}/v1/models", models, **shown)
        router.add_api_route(f"{prefix}/v1/models/{{name:path}}", model, **shown)
    router.include_router(rollouts.routes(state))
    return router


async def _respond(state: State, request: Request, kind: Kind) -> Response:
    rollout = RolloutScope.parse(request.headers, request.path_params.get("rollout_id"))
    accept_large_body(request)
    body = await request.body()
    settings = state.settings
    limits = {"max_n": settings.max_n, "max_seq_length": settings.max_seq_length}
    large = len(body) > settings.large_body_bytes
    if large:
        read = await state.workers.run(read_request, kind, body, **limits)
    else:
        read = read_request(kind, body, **limits)

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        out = EventStream(send)
        try:
            response = await _answer(state, *read, rollout, out, large=large)
        except Exception as error:
            if not out.started:
                raise
            fields = {"path": request.url.path}
            log.error("a stream failed", exc_info=error, extra={"fields": fields})
            await out.send(error_response(error, settings.log_file)[1])
            await out.end()
            return
        if response is not None:
            body = write_json(response)
            await Response(body, media_type="application/json")(scope, receive, send)

    return UntilDisconnect(answer)


async def _answer(
    state: State,
    request: ChatRequest | CompletionRequest,
    messages: HashedMessages | None,
    scope: RolloutScope,
    out: EventStream,
    *,
    large: bool,
) -> dict[str, Any] | None:
    """The response, or None where it was streamed."""
    serving = state.serving
    with (
        serving.admitted(),
        state.metrics.running.track_inprogress(),
        state.conversations.history(scope.rollout) as history,
    ):
        await serving.ready()
        run = state.calls.run_of(scope.rollout)
        policy = await serving.resolve(request.model, run=run, step=scope.step)
        async with serving.using(policy):
            context = RequestContext(
                state=state, policy=policy, scope=scope, history=history, run=run, large=large
            )
            if isinstance(request, ChatRequest):
                assert messages is not None
                response = await prepare_chat(context, request, messages)
            else:
                response = await prepare_completion(context, request)
            if not request.stream:
                return await response.whole()
            await response.stream(out, include_usage=request.include_usage)
            return None


def _list_entry(served: ServedName) -> dict[str, Any]:
    return {
        "id": served.id,
        "object": "model",
        "created": int(served.created_at),
        "owned_by": "hone",
        "root": served.root,
        "step": served.step,
    }
