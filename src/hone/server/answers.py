"""Answers in the shape of the OpenAI API, whole or in chunks.

In:   an Exchange, before, while and after it runs
Out:  the JSON of chat completions and of completions

Every sampled token has its log-probability in the answer, the end token too, streamed or not, also
while the text of a tool call is held back: a chunk carries the log-probabilities of all tokens
since the last one, even where its delta is empty. `token_ids`, `prompt_token_ids` and `policy_step`
are always there; in a stream they come with the last chunk of each choice.
"""

from typing import Any, Protocol

from hone.chat.reply import CallDelta, ContentDelta, Event
from hone.server.exchange import Choice, Exchange, Piece
from hone.server.openai import LogprobWriter, usage
from hone.server.stream import EventStream


class Form(Protocol):
    """One kind of answer: what is said of a choice."""

    kind: str
    prefix: str

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        """The choices of the chunks that a piece becomes."""
        ...

    def last(self, choice: Choice) -> dict[str, Any]:
        """The end of a streamed choice, without what all ends have."""
        ...

    def whole(self, choice: Choice) -> dict[str, Any]: ...


class ChatForm:
    """chat.completion and chat.completion.chunk."""

    kind, prefix = "chat.completion", "chatcmpl-"

    def __init__(self, writer: LogprobWriter | None) -> None:
        """Without a writer no log-probabilities are given."""
        self._writer = writer
        self._begun: set[int] = set()

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        index = piece.choice.index
        deltas = [_delta(event) for event in piece.events]
        if index not in self._begun:
            self._begun.add(index)
            deltas.insert(0, {"role": "assistant", "content": ""})
        if not deltas and self._writer is not None:
            deltas = [{}]
        said = [
            {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            for delta in deltas
        ]
        if self._writer is not None and piece.tokens:
            said[-1]["logprobs"] = self._logprobs(piece.tokens)
        return said

    def last(self, choice: Choice) -> dict[str, Any]:
        reply = choice.reply()
        return {"delta": {}, "logprobs": None, "finish_reason": reply.finish} | _malformed(choice)

    def whole(self, choice: Choice) -> dict[str, Any]:
        reply = choice.reply()
        return {
            "message": {**reply.message, "refusal": None},
            "logprobs": None if self._writer is None else self._logprobs(choice.tokens),
            "finish_reason": reply.finish,
        } | _malformed(choice)

    def _logprobs(self, tokens: Any) -> dict[str, Any]:
        assert self._writer is not None
        return {"content": [self._writer.entry(token) for token in tokens], "refusal": None}


class TextForm:
    """text_completion, streamed or not."""

    kind, prefix = "text_completion", "cmpl-"

    def __init__(self, writer: LogprobWriter | None) -> None:
        self._writer = writer
        self._said: dict[int, int] = {}

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        index = piece.choice.index
        text = "".join(event.text for event in piece.events if isinstance(event, ContentDelta))
        if not text and self._writer is None:
            return []
        offset = self._said.get(index, 0)
        self._said[index] = offset + len(text)
        logprobs = self._logprobs(piece.tokens, offset)
        return [{"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}]

    def last(self, choice: Choice) -> dict[str, Any]:
        return {"text": "", "logprobs": None, "finish_reason": choice.reply().finish}

    def whole(self, choice: Choice) -> dict[str, Any]:
        reply = choice.reply()
        logprobs = self._logprobs(choice.tokens, 0)
        return {"text": reply.content, "logprobs": logprobs, "finish_reason": reply.finish}

    def _logprobs(self, tokens: Any, offset: int) -> dict[str, Any] | None:
        return None if self._writer is None else self._writer.legacy(tokens, offset)


async def whole(exchange: Exchange, form: Form) -> dict[str, Any]:
    """Run the exchange; the answer in one piece."""
    await exchange.run()
    return {
        **_head(exchange, form, form.kind),
        "choices": [
            {"index": choice.index, **form.whole(choice), **_ids(exchange, choice)}
            for choice in exchange.choices
        ],
        "usage": usage(len(exchange.turn.ids), exchange.sampled),
        **_prompt(exchange),
    }


async def streamed(
    exchange: Exchange, form: Form, out: EventStream, *, include_usage: bool
) -> None:
    """Run the exchange, sending chunks; the ends of all choices follow when they are recorded."""
    kind = form.kind if form.kind == "text_completion" else f"{form.kind}.chunk"
    head = _head(exchange, form, kind)
    empty: dict[str, Any] = {"usage": None} if include_usage else {}

    async def tell(piece: Piece) -> None:
        said = form.chunks(piece)
        if said:
            await out.say(*({**head, "choices": [choice], **empty} for choice in said))

    await exchange.run(tell)
    ends = [
        {"index": choice.index, **form.last(choice), **_ids(exchange, choice)}
        for choice in exchange.choices
    ]
    await out.say(*({**head, "choices": [end], **empty, **_prompt(exchange)} for end in ends))
    if include_usage:
        spent = usage(len(exchange.turn.ids), exchange.sampled)
        await out.say({**head, "choices": [], "usage": spent})
    await out.done()


def _head(exchange: Exchange, form: Form, kind: str) -> dict[str, Any]:
    adapter = exchange.policy.adapter
    return {
        "id": form.prefix + exchange.id,
        "object": kind,
        "created": int(exchange.created_at),
        "model": exchange.policy.asked,
        "system_fingerprint": f"fp_{(adapter.sha256 if adapter else exchange.fingerprint)[:12]}",
    }


def _ids(exchange: Exchange, choice: Choice) -> dict[str, Any]:
    return {"token_ids": choice.ids, "policy_step": exchange.policy.step, "call_id": choice.id}


def _prompt(exchange: Exchange) -> dict[str, Any]:
    said = {"prompt_token_ids": exchange.turn.ids, "policy_step": exchange.policy.step}
    ignored = exchange.not_applicable
    return said | ({"not_applicable": ignored} if ignored else {})


def _malformed(choice: Choice) -> dict[str, Any]:
    """What looked like a tool call and was none; its text is in the content."""
    malformed = choice.reply().malformed
    return {"malformed": list(malformed)} if malformed else {}


def _delta(event: Event) -> dict[str, Any]:
    if isinstance(event, ContentDelta):
        return {"content": event.text}
    if not isinstance(event, CallDelta):
        return {"reasoning_content": event.text}
    function = {"name": event.call.name, "arguments": event.call.arguments}
    call = {"index": event.index, "id": event.call.id, "type": "function", "function": function}
    return {"tool_calls": [call]}
