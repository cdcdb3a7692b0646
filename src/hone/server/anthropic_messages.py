"""Routes of the Anthropic Messages API: /v1/messages and /v1/messages/count_tokens.

In:   requests of any Anthropic client, inside a rollout (wire/rollout.py) or outside
Out:  messages with token ids and the step that answered, every call recorded; counts of tokens

Anthropic's clients add /v1 to their base URL themselves: theirs is the server's address, or
/rollout/ID under it.
"""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from hone.server.respond import add_dialect, count_tokens, respond
from hone.server.state import State
from hone.wire.anthropic_response import COUNT, MESSAGES


def routes(state: State) -> APIRouter:
    """The Messages API, also under /rollout/ID."""
    router = APIRouter(tags=["anthropic"])

    async def message(request: Request) -> Response:
        """Answer a conversation of content blocks."""
        return await respond(state, request, MESSAGES)

    async def count(request: Request) -> Response:
        """Count the tokens of the prompt that a message would have. Nothing is recorded."""
        return JSONResponse({"input_tokens": await count_tokens(state, request, COUNT)})

    add_dialect(router, MESSAGES, message)
    add_dialect(router, COUNT, count)
    return router
