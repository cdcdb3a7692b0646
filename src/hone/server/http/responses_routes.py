"""Routes of the OpenAI Responses API: /v1/responses and below.

In:   requests of any client of that API, inside a rollout or outside
Out:  responses and typed events; every call recorded

A response and its recorded call have the same id, so a response can be retrieved and continued
after a restart of the server, as long as the call is kept.
"""

import asyncio
from collections import Counter, defaultdict
from typing import Any

from fastapi import APIRouter
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response

from hone.errors import BadRequest, NotFound
from hone.server.http.respond import IN_ROLLOUT, add_dialect
from hone.server.serve.chat_tasks import max_bytes
from hone.server.state import State
from hone.store.calls import CallStore
from hone.types import RecordedCall
from hone.wire.json import write_json
from hone.wire.openai.dialect import Answer, AnswerHead
from hone.wire.openai.response_events import INPUT_TOKENS, RESPONSES, ResponseWriter
from hone.wire.openai.response_items import (
    ItemIds,
    call_id_of,
    input_items,
    output_items,
    references,
)
from hone.wire.openai.responses import ENCRYPTED, ResponsesRequest, check_includes, response_tool


def routes(state: State) -> APIRouter:
    router = APIRouter()

    def resume(parsed: ResponsesRequest) -> ResponsesRequest:
        return _resume(state.calls, parsed, state.settings.max_seq_length)

    async def retrieve(request: Request, response_id: str) -> Response:
        """A stored response."""
        if request.query_params.get("stream", "").lower() in ("true", "1"):
            raise BadRequest(
                "stream: a stored response is returned whole in this version", param="stream"
            )
        encrypted = _asks_for_encrypted(request)
        call = await asyncio.to_thread(_stored, state.calls, response_id, "response_id")
        return Response(write_json(_response(call, encrypted)), media_type="application/json")

    async def list_input(request: Request, response_id: str) -> Response:
        """The input items of a stored response, those of the responses it continues included."""
        encrypted = _asks_for_encrypted(request)
        call = await asyncio.to_thread(_stored, state.calls, response_id, "response_id")
        page = _page(_input_items(call, encrypted=encrypted), request.query_params)
        return Response(write_json(page), media_type="application/json")

    async def delete(response_id: str) -> dict[str, Any]:
        """Delete a response: it can no longer be retrieved or continued. Its call is kept."""
        call = await asyncio.to_thread(_stored, state.calls, response_id, "response_id")
        await asyncio.to_thread(state.calls.drop_request_fields, call.id)
        return {"id": response_id, "object": "response", "deleted": True}

    async def cancel(response_id: str) -> None:
        """Refused: only background responses can be cancelled, and this server has none."""
        await asyncio.to_thread(_stored, state.calls, response_id, "response_id")
        raise BadRequest(
            f"response {response_id!r} is finished; only a response in the background can be "
            "cancelled, and there are none in this version. To stop one, close its connection.",
            param="response_id",
        )

    create = "Answer a conversation, given as items of the Responses API."
    add_dialect(
        router, state, RESPONSES, "openai", name="create", description=create, resume=resume
    )
    add_dialect(
        router,
        state,
        INPUT_TOKENS,
        "openai",
        name="count",
        description="Count the tokens of the prompt that a response would have. Nothing is recorded.",
        resume=resume,
        count=lambda tokens: {"object": "response.input_tokens", "input_tokens": tokens},
    )
    for prefix in ("", IN_ROLLOUT):
        for suffix, endpoint, method in (
            ("", retrieve, "GET"),
            ("", delete, "DELETE"),
            ("/input_items", list_input, "GET"),
            ("/cancel", cancel, "POST"),
        ):
            path = f"{prefix}{RESPONSES.path}/{{response_id}}{suffix}"
            router.add_api_route(
                path, endpoint, methods=[method], tags=["openai"], include_in_schema=not prefix
            )
    return router


def _resume(calls: CallStore, request: ResponsesRequest, max_seq_length: int) -> ResponsesRequest:
    """The request, with the messages of the response and the items that it refers to.

    Raises BadRequest, before it builds them, where they are longer than any prompt can be: a
    request of a few bytes can name a long item a thousand times.
    """
    previous, named = request.body.previous_response_id, references(request.body.input)
    if previous is None and not named:
        return request
    earlier: list[dict[str, Any]] = []
    if previous is not None:
        call = _stored(calls, previous, "previous_response_id")
        earlier = [*_without_instructions(call), call.reply]
    size = _checked_size(len(write_json({"messages": earlier})), max_seq_length)
    items: dict[str, dict[str, Any] | None] = {}
    by_call: dict[str, Counter[str]] = defaultdict(Counter)
    for name in named:
        by_call[call_id_of(name)][name] += 1
    for call_id, names in by_call.items():
        for call in _recorded(calls, call_id):
            ids = ItemIds(call.id)
            own = [*output_items(call.reply, ids), *_input_items(call)]
            named_items = {item["id"]: item for item in own if item["id"] in names}
            # A stream sends text after a call as a second message; the first one has all of it.
            items |= {
                name: None for name in names if name.startswith(f"{ids.message()}_")
            } | named_items
            size += sum(names[name] * len(write_json(item)) for name, item in named_items.items())
            _checked_size(size, max_seq_length)
    return request.resumed(earlier, items)


def _checked_size(size: int, max_seq_length: int) -> int:
    if size > max_bytes(max_seq_length):
        raise BadRequest(
            f"input: the earlier messages and items that it names have {size} bytes or more, more "
            f"than {max_seq_length} tokens (max_seq_length) can hold; shorten the prompt",
            param="input",
            code="context_length_exceeded",
        )
    return size


def _recorded(calls: CallStore, call_id: str) -> list[RecordedCall]:
    """The call of a stored response; nothing if there is none."""
    try:
        (call,) = calls.get([call_id])
    except NotFound:
        return []
    stored = call.request_fields is not None and call.messages is not None and not call.abandoned
    return [call] if stored else []


def _stored(calls: CallStore, response_id: str, param: str) -> RecordedCall:
    recorded = _recorded(calls, call_id_of(response_id)) if response_id.startswith("resp_") else []
    if not recorded:
        raise BadRequest(
            f"{param}: no response is stored as {response_id[:200]!r}. It was never finished here, "
            "was sent with store: false, was deleted, or its call is no longer kept; send the "
            "conversation as input items instead.",
            param=param,
            code="previous_response_not_found" if param != "response_id" else "not_found",
            status=404,
        )
    return recorded[0]


def _without_instructions(call: RecordedCall) -> list[dict[str, Any]]:
    """The messages of a call without its instructions, which apply to one response only."""
    messages, fields = call.messages or [], call.request_fields or {}
    return messages if fields.get("instructions") is None else messages[1:]


def _input_items(call: RecordedCall, *, encrypted: bool = False) -> list[dict[str, Any]]:
    return input_items(_without_instructions(call), ItemIds(call.id), encrypted=encrypted)


def _page(items: list[dict[str, Any]], query: QueryParams) -> dict[str, Any]:
    """The requested page of items; `items` has the oldest first."""
    order, limit = query.get("order", "desc"), query.get("limit", "20")
    if order not in ("asc", "desc"):
        raise BadRequest(f"order: expected 'asc' or 'desc', got {order[:80]!r}", param="order")
    if not limit.isdecimal() or not 1 <= int(limit[:9]) <= 100:
        raise BadRequest(f"limit: expected 1 to 100, got {limit[:80]!r}", param="limit")
    ordered = items if order == "asc" else items[::-1]
    if (after := query.get("after")) is not None:
        places = [place for place, item in enumerate(ordered) if item["id"] == after]
        if not places:
            raise BadRequest(f"after: no item is listed as {after[:80]!r}", param="after")
        ordered = ordered[places[0] + 1 :]
    page = ordered[: int(limit)]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(page) < len(ordered),
    }


def _asks_for_encrypted(request: Request) -> bool:
    """Whether the query includes `encrypted_content`, the only optional field that items have."""
    query = request.query_params
    names = [*query.getlist("include"), *query.getlist("include[]")]
    try:
        return ENCRYPTED in check_includes(names)
    except ValueError as error:
        raise BadRequest(f"include: {error}", param="include") from None


def _response(call: RecordedCall, encrypted: bool) -> dict[str, Any]:
    """A stored response as it was returned, without log-probabilities."""
    fields = dict(call.request_fields or {})
    if fields.get("tools") is None:
        fields["tools"] = list(map(response_tool, call.tools or ()))
    reasoning_tokens = fields.pop("reasoning_tokens", 0)
    encrypted |= fields.pop("encrypted", False)
    head = AnswerHead(
        id=call.id,
        call_id=call.id,
        created_at=call.created_at,
        model=call.requested_model,
        fingerprint=call.fingerprint,
        policy_step=call.call.step,
        prompt_ids=call.call.prompt_ids,
        not_applicable=fields.pop("not_applicable", []),
    )
    answer = Answer(
        index=call.choice,
        call_id=call.id,
        message=call.reply,
        finish=call.finish,
        token_ids=call.call.completion_ids,
        reasoning_tokens=reasoning_tokens,
        malformed=tuple(call.malformed),
    )
    return ResponseWriter(head, fields, encrypted=encrypted).whole([answer])
