"""Routes of the OpenAI API: /v1/chat/completions, /v1/completions and /v1/models.

In:   requests of any OpenAI client, inside a rollout (wire/rollout.py) or outside
Out:  responses with token ids, log-probabilities and the step that answered; every call recorded
"""

import asyncio
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request

from hone.errors import Conflict, UnknownModel
from hone.server import rollouts
from hone.server.respond import IN_ROLLOUT, add_dialect
from hone.server.serving import ServedName
from hone.server.state import State
from hone.wire.openai_chat_response import CHAT, TEXT
from hone.wire.rollout import RolloutScope


def routes(state: State) -> APIRouter:
    """The OpenAI API, also under /rollout/ID, and the recorded rollouts and runs."""
    router = APIRouter(tags=["openai"])

    def served_to(request: Request) -> list[ServedName]:
        scope = RolloutScope.parse(request.headers, request.path_params.get("rollout_id"))
        try:
            run = state.calls.run_of(scope.rollout)
        except Conflict:  # the run is closed; a request for an answer says so
            run = None
        return state.serving.served(run, dict(scope.aliases))

    async def models(request: Request) -> dict[str, Any]:
        """Every name that can be asked for."""
        served = await asyncio.to_thread(served_to, request)
        entries = [_list_entry(name) for name in served]
        ids = {"first_id": served[0].id, "last_id": served[-1].id} if served else {}
        return {"object": "list", "data": entries, "has_more": False, **ids}

    async def model(name: str, request: Request) -> dict[str, Any]:
        """One name that can be asked for."""
        served = await asyncio.to_thread(served_to, request)
        for entry in served:
            if entry.id == name:
                return _list_entry(entry)
        names = ", ".join(entry.id for entry in served) or "nothing yet"
        raise UnknownModel(f"no model called {name[:200]!r} is served. Served: {names}.")

    add_dialect(router, state, CHAT, name="chat", description="Answer a conversation.")
    complete = "Continue a text, or token ids, without a chat template."
    add_dialect(router, state, TEXT, name="complete", description=complete)
    for prefix in ("", IN_ROLLOUT):
        for path, endpoint in (("/v1/models", models), ("/v1/models/{name:path}", model)):
            router.add_api_route(prefix + path, endpoint, include_in_schema=not prefix)
    router.include_router(rollouts.routes(state))
    return router


def _list_entry(served: ServedName) -> dict[str, Any]:
    """A model as OpenAI's clients know it, and as Anthropic's do: type, display_name, created_at."""
    return {
        "id": served.id,
        "object": "model",
        "type": "model",
        "display_name": served.id,
        "created": int(served.created_at),
        "created_at": datetime.fromtimestamp(int(served.created_at), UTC).isoformat(),
        "owned_by": "hone",
        "root": served.root,
        "step": served.step,
    }
