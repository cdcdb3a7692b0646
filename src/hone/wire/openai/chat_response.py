"""Chat completions and completions of the OpenAI API: whole, or as the chunks of a stream.

In:   a ChatRequest or CompletionRequest, and its answers
Out:  JSON objects

Every sampled token, including the end token, has its log-probability in the response, streamed or
not, even while the text of a tool call is held back: a chunk has the log-probabilities of all
tokens since the last chunk, even if its delta is empty. `token_ids`, `prompt_token_ids` and
`policy_step` are always present; in a stream they come with the last chunk of each choice.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from hone.wire.openai.chat import ChatRequest, CompletionRequest, usage
from hone.wire.openai.dialect import Answer, AnswerHead, Dialect, Event, Logprobs


class CompletionWriter:
    """Writes a chat completion, or the completion of a text."""

    def __init__(self, request: ChatRequest | CompletionRequest, head: AnswerHead) -> None:
        self._head = head
        self._chat = isinstance(request, ChatRequest)
        self._include_usage = request.include_usage
        self._streamed: dict[int, int] = {}
        """Number of characters sent of each choice, once it has begun."""

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        contents: list[dict[str, Any]] = [
            {"message": {**answer.message, "refusal": None}}
            if self._chat
            else {"text": answer.message["content"]}
            for answer in answers
        ]
        pairs = zip(answers, contents, strict=True)
        choices = [self._end(answer, content, answer.logprobs) for answer, content in pairs]
        head = self._fields("chat.completion")
        return {**head, "choices": choices, "usage": self._usage(answers), **self._head.hone_fields}

    def delta(
        self, index: int, deltas: Sequence[dict[str, Any]], logprobs: Logprobs | None
    ) -> list[Event]:
        """One chunk for each delta of the message; the last has all log-probabilities."""
        text = "".join(delta.get("content", "") for delta in deltas)
        opening = [] if index in self._streamed else [{"role": "assistant", "content": ""}]
        offset = self._streamed.get(index, 0)
        self._streamed[index] = offset + len(text)
        wanted = logprobs is not None
        contents: list[dict[str, Any]] = [{"text": text}] if text or wanted else []
        if self._chat:
            contents = [{"delta": part} for part in (*opening, *deltas)]
            contents = contents or ([{"delta": {}}] if wanted else [])
        last = len(contents) - 1
        return [
            self._chunk([self._choice(index, content, logprobs if i == last else None, offset)])
            for i, content in enumerate(contents)
        ]

    def end(self, answers: Sequence[Answer]) -> list[Event]:
        empty: dict[str, Any] = {"delta": {}} if self._chat else {"text": ""}
        events: list[Event] = [
            self._chunk([self._end(answer, empty, None)]) | self._head.hone_fields
            for answer in answers
        ]
        if self._include_usage:
            events.append(self._chunk([]) | {"usage": self._usage(answers)})
        return [*events, "[DONE]"]

    def error(self, status: int, body: dict[str, Any]) -> list[Event]:
        return [body]

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        no_usage: dict[str, Any] = {"usage": None} if self._include_usage else {}
        return {**self._fields("chat.completion.chunk"), "choices": choices, **no_usage}

    def _end(
        self, answer: Answer, content: dict[str, Any], logprobs: Logprobs | None
    ) -> dict[str, Any]:
        """A whole choice, or its last chunk, with hone's additional fields."""
        choice = self._choice(answer.index, content, logprobs, 0)
        choice |= {"finish_reason": answer.finish, "policy_step": self._head.policy_step}
        return choice | answer.hone_fields

    def _choice(
        self, index: int, content: dict[str, Any], logprobs: Logprobs | None, offset: int
    ) -> dict[str, Any]:
        entries: dict[str, Any] | None = None
        if logprobs and self._chat:
            entries = {"content": logprobs, "refusal": None}
        elif logprobs:
            entries = text_logprobs(logprobs, offset)
        return {"index": index, **content, "logprobs": entries, "finish_reason": None}

    def _fields(self, kind: str) -> dict[str, Any]:
        """`kind` is that of a chat completion; completions have one kind."""
        head = self._head
        return {
            "id": ("chatcmpl-" if self._chat else "cmpl-") + head.id,
            "object": kind if self._chat else "text_completion",
            "created": int(head.created_at),
            "model": head.model,
            "system_fingerprint": f"fp_{head.fingerprint[:12]}",
        }

    def _usage(self, answers: Sequence[Answer]) -> dict[str, int]:
        sampled = sum(len(answer.token_ids) for answer in answers)
        return usage(len(self._head.prompt_ids), sampled)


CHAT = Dialect(
    path="/v1/chat/completions",
    prompt_key="messages",
    schema=ChatRequest.model_json_schema(),
    parse=ChatRequest.parse,
    writer=CompletionWriter,
)
TEXT = Dialect(
    path="/v1/completions",
    prompt_key="prompt",
    schema=CompletionRequest.model_json_schema(),
    parse=CompletionRequest.parse,
    writer=CompletionWriter,
)
"""Completions of a text or of token ids, without a chat template."""


def text_logprobs(entries: Logprobs, offset: int) -> dict[str, Any]:
    """`logprobs` of a text completion; `offset` is where the text of these tokens begins."""
    lengths = [len(bytes(entry["bytes"]).decode(errors="replace")) for entry in entries]
    return {
        "tokens": [entry["token"] for entry in entries],
        "token_logprobs": [entry["logprob"] for entry in entries],
        "top_logprobs": [
            {other["token"]: other["logprob"] for other in entry["top_logprobs"]}
            for entry in entries
        ],
        "text_offset": list(accumulate(lengths[:-1], initial=offset)),
    }
