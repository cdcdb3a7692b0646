"""Routes of the OpenAI, Anthropic and vLLM APIs: chats, completions, messages, models, tokens.

In:   requests of their clients, inside a rollout (wire/rollout.py) or outside
Out:  answers with token ids, log-probabilities and the step that answered, every call recorded; the
      names that can be requested; token ids and text of a model's tokenizer

Every route needs the key. Tokenizing loads no weights. Anthropic's clients add /v1 to their base URL
themselves: theirs is the server's address, or /rollout/ID under it.
"""

import asyncio
from datetime import UTC, datetime
from functools import partial
from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

import hone
from hone.errors import BadRequest, Conflict, near_names
from hone.server.http.respond import IN_ROLLOUT, add_dialect
from hone.server.serve.policies import ServedName
from hone.server.serve.tokenizer import BaseTokenizer
from hone.server.state import State
from hone.types import RunSpec
from hone.wire.anthropic.response import COUNT, MESSAGES
from hone.wire.openai.chat import read_json
from hone.wire.openai.chat_response import CHAT, TEXT
from hone.wire.openai.tokenize import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from hone.wire.rollout import RolloutScope


def routes(state: State) -> APIRouter:
    """The three APIs; OpenAI's and Anthropic's also under /rollout/ID."""
    router = APIRouter()
    add_dialect(router, state, CHAT, "openai", name="chat", description="Answer a conversation.")
    add_dialect(
        router,
        state,
        TEXT,
        "openai",
        name="complete",
        description="Continue a text, or token ids, without a chat template.",
    )
    add_dialect(
        router,
        state,
        MESSAGES,
        "anthropic",
        name="message",
        description="Answer a conversation of content blocks.",
    )
    add_dialect(
        router,
        state,
        COUNT,
        "anthropic",
        name="count",
        description="Count the tokens of the prompt that a message would have. Nothing is recorded.",
        count=lambda tokens: {"input_tokens": tokens},
    )
    _add_model_routes(router, state)
    _add_tokenizer_routes(router, state)

    @router.get("/version", tags=["vllm"])
    async def version() -> dict[str, Any]:
        """The version of this server."""
        return {"version": hone.__version__}

    # Claude Code and load balancers check in this way whether the server is up.
    @router.head("/", include_in_schema=False)
    @router.head("/version", include_in_schema=False)
    @router.head("/health", include_in_schema=False)
    @router.head("/v1/models", include_in_schema=False)
    async def head() -> Response:
        return Response(media_type="application/json")

    return router


# ---- models -----------------------------------------------------------------------------------


def _add_model_routes(router: APIRouter, state: State) -> None:
    def scope_of(request: Request) -> tuple[RunSpec | None, dict[str, str]]:
        scope = RolloutScope.parse(request.headers, request.path_params.get("rollout_id"))
        try:
            return state.calls.run_of(scope.rollout), dict(scope.aliases)
        except Conflict:  # the run is closed; a request for an answer says so
            return None, dict(scope.aliases)

    async def models(request: Request) -> dict[str, Any]:
        """Every name that can be requested."""
        scope = await asyncio.to_thread(scope_of, request)
        served = await asyncio.to_thread(state.serving.served, *scope)
        entries = [_list_entry(name) for name in served]
        ids = {"first_id": served[0].id, "last_id": served[-1].id} if served else {}
        return {"object": "list", "data": entries, "has_more": False, **ids}

    async def model(name: str, request: Request) -> dict[str, Any]:
        """One name that can be requested."""
        scope = await asyncio.to_thread(scope_of, request)
        return _list_entry(await asyncio.to_thread(state.serving.served_name, name, *scope))

    for prefix in ("", IN_ROLLOUT):
        for path, endpoint in (("/v1/models", models), ("/v1/models/{name:path}", model)):
            router.add_api_route(
                prefix + path, endpoint, tags=["openai"], include_in_schema=not prefix
            )


def _list_entry(served: ServedName) -> dict[str, Any]:
    """A model with OpenAI's fields, and Anthropic's: type, display_name, created_at."""
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


# ---- tokens -----------------------------------------------------------------------------------


def _add_tokenizer_routes(router: APIRouter, state: State) -> None:
    @router.post("/tokenize", tags=["vllm"], openapi_extra=_body(TokenizeRequest))
    async def tokenize(request: Request) -> TokenizeResponse:
        """The token ids of a prompt, or of a chat as its template renders it."""
        body = TokenizeRequest.parse(read_json(await request.body()))
        tokenizer, limit = await _tokenizer(state, body.model)
        encode = partial(_encode, tokenizer, body)
        if body.messages is None:
            tokens = await asyncio.to_thread(encode)
        else:
            tokens = await tokenizer.in_template_thread(encode)
        names: list[str] | None = None
        if body.return_token_strs:
            names = tokenizer.template.tokenizer.convert_ids_to_tokens(tokens)
        return TokenizeResponse(
            count=len(tokens), max_model_len=limit, tokens=tokens, token_strs=names
        )

    @router.post("/detokenize", tags=["vllm"], openapi_extra=_body(DetokenizeRequest))
    async def detokenize(request: Request) -> DetokenizeResponse:
        """The text of token ids, special tokens included."""
        body = DetokenizeRequest.parse(read_json(await request.body()))
        tokenizer, _ = await _tokenizer(state, body.model)
        tokenizer.check_ids(body.tokens, "tokens")
        text = await asyncio.to_thread(tokenizer.template.text, body.tokens)
        return DetokenizeResponse(prompt=text)


def _body(kind: type[BaseModel]) -> dict[str, Any]:
    content = {"application/json": {"schema": kind.model_json_schema()}}
    return {"requestBody": {"required": True, "content": content}}


async def _tokenizer(state: State, model: str | None) -> tuple[BaseTokenizer, int]:
    if model is None:
        named = await asyncio.to_thread(state.serving.roots)
        roots = list(dict.fromkeys(named.values()))
        if len(roots) != 1:
            names = near_names("", roots)
            raise BadRequest(f"model: missing, and more than one could be meant: {names}")
        (model,) = roots
    return await state.serving.tokenizer(model)


def _encode(tokenizer: BaseTokenizer, body: TokenizeRequest) -> list[int]:
    if body.messages is None:
        special = body.add_special_tokens is not False
        encode = tokenizer.template.tokenizer.encode
        return encode(body.prompt, add_special_tokens=special, verbose=False)
    template = tokenizer.with_kwargs(body.chat_template_kwargs or {}).template
    opened = body.add_generation_prompt is not False
    return template.render(body.messages, body.tools, generation_prompt=opened)
