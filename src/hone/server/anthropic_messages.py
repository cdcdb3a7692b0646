"""Routes of the Anthropic Messages API: /v1/messages and /v1/messages/count_tokens.

In:   requests of any Anthropic client, inside a rollout (wire/rollout.py) or outside
Out:  messages with token ids and the step that answered, every call recorded; counts of tokens

Anthropic's clients add /v1 to their base URL themselves: theirs is the server's address, or
/rollout/ID under it.
"""

from fastapi import APIRouter

from hone.server.respond import add_dialect
from hone.server.state import State
from hone.wire.anthropic_response import COUNT, MESSAGES


def routes(state: State) -> APIRouter:
    """The Messages API, also under /rollout/ID."""
    router = APIRouter(tags=["anthropic"])

    message = "Answer a conversation of content blocks."
    add_dialect(router, state, MESSAGES, name="message", description=message)
    add_dialect(
        router,
        state,
        COUNT,
        name="count",
        description="Count the tokens of the prompt that a message would have. Nothing is recorded.",
        count=lambda tokens: {"input_tokens": tokens},
    )
    return router
