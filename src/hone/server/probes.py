"""Routes that clients call beside the APIs: /, /version, /tokenize and /detokenize.

In:   the names and bodies that clients of vLLM and Anthropic send
Out:  the version of this server; token ids and text of a model's tokenizer

They need the key like every other route. Tokenizing loads no weights.
"""

import asyncio
from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

import hone
from hone.errors import BadRequest
from hone.server.state import State
from hone.server.tokenizer import BaseTokenizer
from hone.wire.openai_chat import read_json
from hone.wire.tokenize import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)


def routes(state: State) -> APIRouter:
    router = APIRouter(tags=["vllm"])

    @router.get("/")
    async def root() -> dict[str, Any]:
        """What answers here."""
        return {"name": "hone", "version": hone.__version__, "routes": "/openapi.json"}

    @router.get("/version")
    async def version() -> dict[str, Any]:
        """The version of this server."""
        return {"version": hone.__version__}

    # Claude Code and load balancers ask in this way whether the address answers.
    @router.head("/", include_in_schema=False)
    @router.head("/version", include_in_schema=False)
    @router.head("/health", include_in_schema=False)
    @router.head("/v1/models", include_in_schema=False)
    async def head() -> Response:
        return Response(media_type="application/json")

    @router.post("/tokenize", openapi_extra=_body(TokenizeRequest))
    async def tokenize(request: Request) -> TokenizeResponse:
        """The token ids of a prompt, or of a chat as its template renders it."""
        body = TokenizeRequest.parse(read_json(await request.body()))
        tokenizer = await _tokenizer(state, body.model)
        limit = min(tokenizer.max_positions, state.settings.max_seq_length)
        tokens = await asyncio.to_thread(_encode, tokenizer, body)
        names: list[str] | None = None
        if body.return_token_strs:
            names = tokenizer.template.tokenizer.convert_ids_to_tokens(tokens)
        return TokenizeResponse(
            count=len(tokens), max_model_len=limit, tokens=tokens, token_strs=names
        )

    @router.post("/detokenize", openapi_extra=_body(DetokenizeRequest))
    async def detokenize(request: Request) -> DetokenizeResponse:
        """The text of token ids, special tokens included."""
        body = DetokenizeRequest.parse(read_json(await request.body()))
        tokenizer = await _tokenizer(state, body.model)
        text = await asyncio.to_thread(_decode, tokenizer, body.tokens)
        return DetokenizeResponse(prompt=text)

    return router


def _body(kind: type[BaseModel]) -> dict[str, Any]:
    content = {"application/json": {"schema": kind.model_json_schema()}}
    return {"requestBody": {"required": True, "content": content}}


async def _tokenizer(state: State, model: str | None) -> BaseTokenizer:
    if model is None:
        served = await asyncio.to_thread(state.serving.served)
        roots = list(dict.fromkeys(name.root for name in served))
        if len(roots) != 1:
            names = ", ".join(roots) or "nothing yet"
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


def _decode(tokenizer: BaseTokenizer, tokens: list[int]) -> str:
    tokenizer.check_ids(tokens, "tokens")
    return tokenizer.template.text(tokens)
