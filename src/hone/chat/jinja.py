"""Render with the Jinja template that came with the model, in a process of its own.

In:   checked Messages and tools
Out:  text or token ids, equal to `apply_chat_template`

The date is frozen: a template that prints today's date would change the prompt of every call at
midnight, and with it what a recorded call means. Turns cannot be bridged: it is unknown where the
template ends one.
"""

import json
import re
from array import array
from collections.abc import Mapping, Sequence
from datetime import date
from functools import cached_property, lru_cache
from typing import Any

from hone.chat.jinja_process import PROCESSES
from hone.chat.messages import Message, ToolCall
from hone.errors import ModelUnsupported, TemplateError, TemplateLimit

_PRINTED_DATE = re.compile(r"""strftime_now\(\s*(?P<quote>['"])(?P<form>.{,200}?)(?P=quote)\s*\)""")
_CALL_BEGINS = re.compile(r"<tool_call>\s*(?=\{)")
_RESERVED = ("messages", "tools", "add_generation_prompt")
"""Values that hone passes to a template itself."""

REMEMBERED_TEXTS = 512
"""Size of the cache of encoded texts: at most 16 MB of text, and as much for the ids."""
MAX_REMEMBERED_TEXT = 32 * 2**10
"""Maximum length of a cached text, in characters."""

_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<|endoftext|>")

PROBE_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look <up> a 'word' \u00e9",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
    },
}
PROBE_CALL = ToolCall(
    "look", '{"word": "caf\\u00e9 <&>", "deep": {"n": [1, 2.5, null, true]}}', "c0"
)


class Jinja:
    """A model's own template, with its arguments."""

    name = "jinja"
    foreign = True
    bridges = False
    strips_reasoning = False

    def __init__(self, tokenizer: Any, kwargs: Mapping[str, Any], today: date) -> None:
        template = getattr(tokenizer, "chat_template", None)
        self.tokenizer = tokenizer
        self.source = template if isinstance(template, str) else json.dumps(template or "")
        """The text of the template, or of all of them where there are several."""
        self.exists = bool(template)
        self.prints_date = "strftime_now" in self.source
        self.kwargs = dict(kwargs)
        self.ignored = tuple(key for key in kwargs if key not in self.source)
        self._used = {key: value for key, value in kwargs.items() if key in self.source}
        self.today = today

    def text(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], generation_prompt: bool
    ) -> str:
        """The rendered text; raises TemplateError where the template refuses the messages."""
        offered = list(tools) or None
        if wrong := [key for key in self._used if key in _RESERVED]:
            raise TemplateError(
                f"chat_template_kwargs: {wrong[0]!r} is set by the request itself; leave it out"
            )
        try:
            source = self._frozen(self.tokenizer.get_chat_template(tools=offered))
            return PROCESSES.render(
                source,
                {
                    **self.tokenizer.special_tokens_map,
                    "documents": None,
                    **self._used,
                    "messages": [_with_reasoning(message.plain()) for message in messages],
                    "tools": offered,
                    "add_generation_prompt": generation_prompt,
                },
            )
        except TemplateLimit:
            raise
        except (TemplateError, ValueError) as error:
            if isinstance(error, ModelUnsupported):
                raise
            raise TemplateError(
                f"messages: the model's chat template refuses them: {error}; "
                "change the messages, or use a model whose template takes them"
            ) from error

    def text_or_none(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], generation_prompt: bool
    ) -> str | None:
        """The rendered text, or None where the template refuses. Raises TemplateLimit."""
        try:
            return self.text(messages, tools, generation_prompt)
        except TemplateLimit:
            raise  # every other text would take as long
        except TemplateError:
            return None

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]],
        *,
        generation_prompt: bool,
    ) -> list[int]:
        return encode(self.tokenizer, self.text(messages, tools, generation_prompt))

    def extend(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        added: Sequence[Message],
        tools: Sequence[dict[str, Any]],
    ) -> None:
        return None

    @property
    def stop_ids(self) -> tuple[int, ...]:
        ends = (token_id(self.tokenizer, end) for end in _TURN_ENDS if end in self.source)
        ids = (self.tokenizer.eos_token_id, *ends)
        return tuple(dict.fromkeys(i for i in ids if i is not None))

    @property
    def turn_ends(self) -> tuple[int, ...]:
        return self.stop_ids

    @cached_property
    def takes_tools(self) -> bool:
        """Whether tools change the prompt; if not, the model would never see them."""
        user = [Message("user", "?")]
        return self.text_or_none(user, [PROBE_TOOL], True) != self.text_or_none(user, [], True)

    @cached_property
    def hermes(self) -> bool:
        """Whether it writes a tool call as JSON between tags."""
        user = Message("user", "?")
        messages = [user, Message("assistant", "", (PROBE_CALL,)), user]
        text = self.text_or_none(messages, [], False) or ""
        match = _CALL_BEGINS.search(text)
        try:
            call = json.loads(text[match.end() : text.rfind("</tool_call>")]) if match else None
        except (ValueError, RecursionError):
            return False
        return call == {"name": PROBE_CALL.name, "arguments": PROBE_CALL.values}

    def _frozen(self, template: str) -> str:
        # The date is inserted as text: transformers passes no functions to a template.
        frozen = _PRINTED_DATE.sub(
            lambda match: json.dumps(self.today.strftime(match["form"])), template
        )
        if "strftime_now(" in frozen:
            raise ModelUnsupported(
                "the model's chat template prints the date in a form that is not written out in "
                "it, so it cannot be frozen for a run; write the form into strftime_now('...')"
            )
        return frozen


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """A message with its reasoning under every name that templates read, as in transformers."""
    names = ("reasoning_content", "thinking", "reasoning")
    reasoning = next((message[name] for name in names if message.get(name) is not None), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def encode(tokenizer: Any, text: str) -> list[int]:
    """The ids of a text, including its special tokens."""
    if len(text) <= MAX_REMEMBERED_TEXT:
        return _encode_remembering(tokenizer, text).tolist()
    return _encode(tokenizer, text)


@lru_cache(maxsize=REMEMBERED_TEXTS)
def _encode_remembering(tokenizer: Any, text: str) -> "array[int]":
    # Every rollout of a group begins with the same prompt.
    return array("i", _encode(tokenizer, text))


def _encode(tokenizer: Any, text: str) -> list[int]:
    # Not verbose: it would warn of prompts that are too long, which are refused anyway.
    return tokenizer.encode(text, add_special_tokens=False, verbose=False)


def token_id(tokenizer: Any, token: str) -> int | None:
    """The id of a token that is in the vocabulary as a whole, or None."""
    id = tokenizer.get_vocab().get(token)
    return id if id is not None and encode(tokenizer, token) == [id] else None
