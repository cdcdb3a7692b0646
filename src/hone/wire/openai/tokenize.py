"""Requests and responses of /tokenize and /detokenize, as vLLM has them.

In:   JSON bodies
Out:  checked requests; what cannot be honoured is refused by name
"""

from typing import Any, ClassVar, Self

from pydantic import BaseModel, Field, model_validator

from hone.wire.request_body import Refused, RequestBody


class _Request(RequestBody):
    model: str | None = Field(default=None, min_length=1, max_length=512)
    """As in a chat completion; the only served base model if not set."""


class TokenizeRequest(_Request):
    """Body of POST /tokenize: a prompt, or the messages of a chat."""

    refused: ClassVar[Refused] = {
        "continue_final_message": ("leave it out", False),
        "chat_template": ("leave it out; the model's own is used", ""),
        "mm_processor_kwargs": ("leave it out", {}),
    }

    prompt: str | None = None
    messages: list[Any] | None = None
    """As in a chat completion; rendered with the model's chat template."""
    add_special_tokens: bool | None = None
    """Add the tokenizer's special tokens to a prompt; true by default. Chat templates write their
    own."""
    add_generation_prompt: bool | None = None
    """End the messages with the beginning of an answer; true by default."""
    tools: list[Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Arguments of the model's chat template, e.g. enable_thinking."""
    return_token_strs: bool | None = None
    """Return the tokens as text too, as the vocabulary spells them."""

    @model_validator(mode="after")
    def _prompt_or_messages(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("send a prompt or messages, and not both")
        if self.messages is not None and self.add_special_tokens:
            raise ValueError(
                "add_special_tokens: chat templates write their own; leave it out with messages"
            )
        return self


class TokenizeResponse(BaseModel):
    count: int
    max_model_len: int
    """Maximum tokens of a prompt and its answer together, for the requested model."""
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(_Request):
    """Body of POST /detokenize."""

    tokens: list[int]


class DetokenizeResponse(BaseModel):
    prompt: str
