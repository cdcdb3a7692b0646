"""Routes of the Anthropic Messages API: /v1/messages and /v1/messages/count_tokens.

In:   requests of any Anthropic client, inside a rollout (wire/rollout.py) or outside
Out:  messages with token ids and the step that answered, every call recorded; counts of tokens

Anthropic's clients add /v1 to their base URL themselves: theirs is the server's address, or
/rollout/ID under it.
"""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from hone.server.prepare import count_prompt_tokens
from hone.server.respond import add_dialect, admitted, read_body, respond
from hone.server.state import State
from hone.wire.anthropic_messages import MessagesRequest
from hone.wire.anthropic_response import CountDialect, MessagesDialect
from hone.wire.rollout import RolloutScope

MESSAGES, COUNT = MessagesDialect(), CountDialect()


def routes(state: State) -> APIRouter:
    """The Messages API, also under /rollout/ID."""
    router = APIRouter(tags=["anthropic"])

    async def message(request: Request) -> Response:
        """Answer a conversation of content blocks."""
        return await respond(state, request, MESSAGES)

    async def count_tokens(request: Request) -> Response:
        """Count the tokens of the prompt that a message would have. Nothing is recorded."""
        scope = RolloutScope.parse(request.headers, request.path_params.get("rollout_id"))
        parsed, messages, large = await read_body(state, request, COUNT)
        assert isinstance(parsed, MessagesRequest) and messages is not None, parsed
        async with admitted(state, COUNT, parsed.model, scope, large=large) as context:
            count = await count_prompt_tokens(context, parsed.chat, messages)
        return JSONResponse({"input_tokens": count})

    add_dialect(router, MESSAGES, message)
    add_dialect(router, COUNT, count_tokens)
    return router
