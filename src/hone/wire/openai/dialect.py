"""The interface between the server and a dialect of its chat API: request, answer, writer.

In:   the body of a request; an answer as it grows, and when it is finished
Out:  the canonical ChatRequest; the JSON of the dialect's response, or its events

A dialect is one module here, used by server and capture, and one with its routes in server/. The
server handles every dialect's requests alike, because it sees only the ChatRequest.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from hone.wire.openai.chat import ChatRequest

Event = dict[str, Any] | Literal["[DONE]"]
"""The data of one server-sent event."""
Logprobs = list[dict[str, Any]]
"""One entry for each token, as in `logprobs.content` of a chat completion."""


class Request(Protocol):
    """A checked request of any dialect."""

    @property
    def chat(self) -> ChatRequest:
        """The same request as a chat completion."""
        ...

    @property
    def unused_keys(self) -> tuple[str, ...]:
        """Keys that were sent and have no effect, whatever the model."""
        ...

    def request_fields(self, not_applicable: list[str]) -> dict[str, Any] | None:
        """Fields that are recorded with the call, for requests that name this one later.

        `not_applicable` are the keys of the chat completion that change nothing for this model.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerHead:
    """The parts of an answer that are known before its first token."""

    id: str
    """Id of the response: 20 hexadecimal digits, to which a dialect adds its prefix."""
    call_id: str
    """Call id of the first choice."""
    created_at: float
    model: str
    """Model name as it was requested."""
    fingerprint: str
    """Step of the weights that answer."""
    policy_step: int
    prompt_ids: list[int]
    not_applicable: list[str] = field(default_factory=list)
    """Keys of the request that change nothing for this model."""

    @property
    def hone_fields(self) -> dict[str, Any]:
        """Fields about the prompt that hone adds to a response of any dialect."""
        prompt = {"prompt_token_ids": self.prompt_ids, "policy_step": self.policy_step}
        return prompt | ({"not_applicable": self.not_applicable} if self.not_applicable else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One finished choice."""

    index: int
    call_id: str
    message: dict[str, Any]
    """The assistant message, as a chat completion has it."""
    finish: str
    """stop, length or tool_calls."""
    token_ids: list[int]
    reasoning_tokens: int = 0
    """Number of reasoning tokens among them."""
    logprobs: Logprobs | None = None
    malformed: tuple[str, ...] = ()
    """Tool calls that do not parse; their text is in the content."""
    stop: str | None = None
    """The stop string that ended it, if one did."""

    @property
    def hone_fields(self) -> dict[str, Any]:
        """Fields about the answer that hone adds to a response of any dialect."""
        answer = {"token_ids": self.token_ids, "call_id": self.call_id}
        return answer | ({"malformed": list(self.malformed)} if self.malformed else {})


class AnswerWriter(Protocol):
    """Writes the answer to one request: `whole`, or `delta` for each piece and then `end`."""

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]: ...

    def delta(
        self, index: int, deltas: Sequence[dict[str, Any]], logprobs: Logprobs | None
    ) -> list[Event]:
        """The events for new parts of one choice; may be empty. The first event begins the stream.

        `deltas` have the form of a chat completion's chunks: content, reasoning_content or
        tool_calls. Text of the new tokens may still be held back. `logprobs` are those of the new
        tokens; None if the request does not want them.
        """
        ...

    def end(self, answers: Sequence[Answer]) -> list[Event]:
        """The last events; `answers` are the finished choices."""
        ...

    def error(self, status: int, body: dict[str, Any]) -> list[Event]:
        """The last events of a stream that failed; `body` is an error in OpenAI's shape."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """One API for requesting an answer over HTTP."""

    path: str
    """Path of its requests, under the server's address or under /rollout/ID."""
    prompt_key: str
    """The key of the body that holds the prompt, for error messages."""
    schema: dict[str, Any]
    """JSON schema of the body."""
    parse: Callable[[dict[str, Any]], Any]
    """The Request of a body; raises BadRequest naming the first key that is wrong."""
    writer: Callable[[Any, AnswerHead], AnswerWriter]
    """Writes the answer to such a request."""
    named_events: bool = False
    """Whether each event of a stream is named by its `type`."""
    error_body: Callable[[int, dict[str, Any]], dict[str, Any]] = lambda status, body: body
    """An error response of this status; its argument is the error in OpenAI's shape."""
