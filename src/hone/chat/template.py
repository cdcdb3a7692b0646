"""Chat templates: messages to token ids and back.

In:   OpenAI messages and tools; sampled ids
Out:  the ids of prompts; Replies with text, reasoning and tool calls

The renderer of a model is chosen once, when it is loaded, by what the model's own template does. It
is part of the fingerprint, together with the template, its arguments, the tokenizer and the date
that the template prints. Calls recorded with one fingerprint are never continued with another:
equal ids would stand for different prompts.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, date, datetime
from functools import cached_property, lru_cache
from importlib.metadata import version
from typing import Any, Literal

from hone.chat import chatml
from hone.chat import renderers as library
from hone.chat.jinja import PROBE_TOOL, Jinja, encode
from hone.chat.messages import Message, Tools, check_messages, check_tools
from hone.chat.reply import (
    CLOSE_THINK,
    OPEN_THINK,
    ByteDecoder,
    Reply,
    StreamParser,
    WindowDecoder,
    byte_pieces,
)
from hone.errors import ModelUnsupported, TemplateError
from hone.inference.base import FinishReason
from hone.wire.conversation import common_prefix
from hone.wire.openai.chat import tool_call

Reasoning = Literal["none", "open", "optional", "channels"]
"""`none`: the template has no <think> tags, or the prompt has closed them. `open`: the prompt has
opened them. `optional`: the model may open them. `channels`: it has channels instead of tags."""
Renderer = chatml.ChatML | library.Library | Jinja
Parser = StreamParser | library.WholeParser
"""Parses one completion: feed it, close it, then read the reply."""


class TokenTexts(dict[int, tuple[str, list[int]]]):
    """The text of each token, and the list of its bytes, which must not be modified.

    Entries are created on first use and cached: every answer needs hundreds of them, most of them
    repeatedly.
    """

    def __init__(self, piece: Callable[[int], bytes]) -> None:
        super().__init__()
        self._piece = piece

    def __missing__(self, token: int) -> tuple[str, list[int]]:
        piece = self._piece(token)
        self[token] = text = piece.decode(errors="replace"), list(piece)
        return text


class ChatTemplate:
    """The chat template of one model, with its arguments."""

    def __init__(
        self, own: Jinja, renderer: Renderer, *, name: str, end_ids: Sequence[int]
    ) -> None:
        self.tokenizer, self.kwargs, self.today = own.tokenizer, own.kwargs, own.today
        self.renderer = renderer
        self.name = name
        self._own = own
        self._end_ids = tuple(end_ids)
        self._variants: dict[str, ChatTemplate] = {}
        self._endings: dict[bool, int] = {}
        self.token_texts = TokenTexts(self.piece)

    @classmethod
    def load(
        cls,
        tokenizer: Any,
        name: str | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        today: date | None = None,
        end_ids: Sequence[int] = (),
    ) -> "ChatTemplate":
        """Choose the renderer for a tokenizer; `today` is what a template that prints dates prints.

        `end_ids` are the tokens that end an answer by the model's configuration files.
        """
        name = name or str(getattr(tokenizer, "name_or_path", ""))
        own = Jinja(tokenizer, chat_template_kwargs or {}, today or datetime.now(UTC).date())
        renderer: Renderer | None = None
        known = library.known_renderer(name)
        if known is not None:
            renderer = _agreeing(library.typed(own, known), _NAMED_CONVERSATIONS)
        if renderer is None and own.exists:
            renderer = chatml.recognise(own)
        if renderer is None and CLOSE_THINK in own.source and chatml.START in own.source:
            renderer = _agreeing(library.typed(own, "qwen3"), chatml.PROBE_CONVERSATIONS)
        if renderer is None and not own.exists:
            raise ModelUnsupported(
                f"{name or 'this tokenizer'}: it has no chat template; use the instruct version of "
                "the model, or set chat_template in its tokenizer_config.json"
            )
        template = cls(own, renderer or own, name=name, end_ids=end_ids)
        # Now, not on the event loop of a request: both may run the model's template.
        _ = template.renderer.takes_tools, template._hermes
        return template

    @property
    def foreign(self) -> bool:
        """Whether rendering runs the model's own template, which may take seconds."""
        return self.renderer.foreign

    def with_kwargs(
        self, kwargs: Mapping[str, Any] | None, day: date | None = None
    ) -> "ChatTemplate":
        """This template with further arguments, as requests send them, printing another day."""
        today = day if day is not None and self.renderer.prints_date else self.today
        if not kwargs and today == self.today:
            return self
        key = json.dumps([kwargs, today], sort_keys=True, default=repr)
        variant = self._variants.get(key)
        if variant is None:
            variant = ChatTemplate.load(
                self.tokenizer,
                self.name,
                chat_template_kwargs={**self.kwargs, **(kwargs or {})},
                today=today,
                end_ids=self._end_ids,
            )
            if len(self._variants) >= 64:  # arguments come from clients; do not keep them all
                self._variants.clear()
            self._variants[key] = variant
        return variant  # another thread may have cleared them since

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end the assistant's turn, the template's own first."""
        # Cached: every call needs them, and a renderer may search its whole vocabulary for them.
        return tuple(dict.fromkeys((*self.renderer.stop_ids, *self._end_ids)))

    @cached_property
    def _hermes(self) -> bool:
        return isinstance(self.renderer, chatml.ChatML) or self._own.hermes

    @cached_property
    def fingerprint(self) -> str:
        """Equal for templates that give equal ids for every conversation.

        TOKENIZER-TEMPLATE-ARGUMENTS-DATE: one hash per part, so that two fingerprints show which
        part differs. The renderer is hashed with the arguments, on which it depends.
        """
        foreign = isinstance(self.renderer, library.Library)
        arguments = {
            "kwargs": {k: v for k, v in self.kwargs.items() if k not in self.renderer.ignored},
            "renderer": self.renderer.name,
            "version": version("renderers") if foreign else chatml.VERSION,
        }
        date = self.today.isoformat() if self.renderer.prints_date else None
        parts = (_vocabulary_digest(self.tokenizer), self._own.source, arguments, date)
        texts = (json.dumps(part, sort_keys=True, default=repr) for part in parts)
        return "-".join(hashlib.sha256(text.encode()).hexdigest()[:16] for text in texts)

    def render(
        self,
        messages: object,
        tools: Tools | None = None,
        *,
        generation_prompt: bool = True,
    ) -> list[int]:
        """The ids of the whole conversation, from text. Raises TemplateError, naming the field, if it cannot."""
        checked, offered = self.check(messages, tools)
        return self.renderer.render(checked, offered, generation_prompt=generation_prompt)

    def answer_ids(
        self, messages: Sequence[object], reply: object, tools: Tools | None = None
    ) -> list[int]:
        """The ids of a written answer to these messages, as the model would have to sample them.

        They begin after the generation prompt and end with the token that ends the turn, the first
        one after the text; some templates end the whole conversation with another token. Raises
        TemplateError if the template does not write the answer after its generation prompt.
        """
        prompt = self.render(list(messages), tools)
        whole = self.render([*messages, reply], tools, generation_prompt=False)
        if whole[: len(prompt)] == prompt:
            ids = whole[len(prompt) :]
        else:  # the answer's first token merged with the prompt's last, or the text differs
            before, text = self.text(prompt), self.text(whole)
            if not text.startswith(before):
                raise TemplateError(
                    f"the chat template of {self.name!r} does not write an answer after its "
                    "generation prompt, so it is unknown which tokens are the answer's; use another "
                    "template, or train on answers that were sampled"
                )
            ids = encode(self.tokenizer, text[len(before) :])
        calls = isinstance(reply, Mapping) and bool(reply.get("tool_calls"))
        first = max(len(ids) - self._ending(calls=calls), 0)
        end = next((i for i in range(first, len(ids)) if ids[i] in self.stop_ids), None)
        return [*ids, self.stop_ids[0]] if end is None else ids[: end + 1]

    def _ending(self, *, calls: bool) -> int:
        """Number of ids that the template writes after the text, or the calls, of a last answer."""
        if calls not in self._endings:
            one, other = (self._answered(text, calls=calls) for text in "ab")
            self._endings[calls] = common_prefix(one[::-1], other[::-1])
        return self._endings[calls]

    def _answered(self, text: str, *, calls: bool) -> list[int]:
        call = tool_call("call00000", "f", json.dumps({"x": text}))
        answer = {"content": "", "tool_calls": [call]} if calls else {"content": text}
        messages = [{"role": "user", "content": "x"}, {"role": "assistant", **answer}]
        return self.render(messages, generation_prompt=False)

    def check(
        self, messages: object, tools: Tools | None
    ) -> tuple[list[Message], list[dict[str, Any]]]:
        """Checked messages and tools; refuses tools that the template would drop silently."""
        offered = self.check_tools(tools)
        return check_messages(messages), offered

    def check_tools(self, tools: Tools | None) -> list[dict[str, Any]]:
        offered = check_tools(tools)
        if offered and not self.renderer.takes_tools:
            raise TemplateError(
                f"tools: the chat template of {self.name!r} has no place for tools and they would "
                "vanish; describe them in the system message, or use a model that has tools"
            )
        return offered

    def describe_tools(self) -> str:
        """Whether tools reach the prompt, and why not: renders a request with a tool."""
        missing = "do not reach the prompt: the template"
        if not self.renderer.takes_tools:
            return f"{missing} drops them, so hone refuses requests with tools"
        try:
            prompt = self.text(self.render([{"role": "user", "content": "?"}], [PROBE_TOOL]))
        except TemplateError as error:
            return f"{missing} refuses them ({error.__cause__ or error})"
        function = PROBE_TOOL["function"]
        if not all(
            name in prompt for name in (function["name"], *function["parameters"]["properties"])
        ):
            return f"{missing} does not print their names"
        if isinstance(self.renderer, chatml.ChatML) and not self.renderer.own_tools:
            return "reach the prompt, in hone's template: the model's own drops them"
        parsed = self._hermes or isinstance(self.renderer, library.Library)
        note = "" if parsed else "; hone does not parse the calls in answers"
        return f"reach the prompt, in the model's own format{note}"

    def parser(
        self,
        *,
        prompt_ids: Sequence[int] = (),
        tools: Tools | None = None,
        stop: Sequence[str] = (),
        stop_ids: Sequence[int] = (),
        seed: str = "",
    ) -> Parser:
        """A parser for one completion. Without tools, tool calls are text; `seed` names the call.

        `stop_ids` end it besides the template's own.
        """
        if isinstance(self.renderer, library.Library) and not self._hermes:
            return library.WholeParser(
                self.renderer,
                prompt_ids=prompt_ids,
                tools=check_tools(tools),
                stop=stop,
                seed=seed,
                end_ids=(*self._end_ids, *stop_ids),
            )
        return StreamParser(
            self.decoder(),
            stop_ids=(*self.stop_ids, *stop_ids),
            tools=bool(tools) and self._hermes,
            thinks=CLOSE_THINK in self._own.source,
            reasoning_open=self.reasoning(prompt_ids) == "open",
            stop=stop,
            seed=seed,
        )

    def parse(
        self,
        completion_ids: Sequence[int],
        *,
        prompt_ids: Sequence[int] = (),
        tools: Tools | None = None,
        stop: Sequence[str] = (),
        finish: FinishReason = "stop",
        seed: str = "",
    ) -> Reply:
        """The reply of a whole completion; the same as that of its stream."""
        parser = self.parser(prompt_ids=prompt_ids, tools=tools, stop=stop, seed=seed)
        parser.feed(completion_ids)
        parser.close()
        return parser.reply(finish)

    @property
    def pieces(self) -> list[bytes] | None:
        """The bytes of every token of a byte-level vocabulary; None for any other kind."""
        return byte_pieces(self.tokenizer)

    def piece(self, token: int) -> bytes:
        """The bytes of a token."""
        if self.pieces is not None:
            return self.pieces[token] if 0 <= token < len(self.pieces) else b""
        return self.tokenizer.decode([token], skip_special_tokens=False).encode()

    def text(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens included."""
        return self.tokenizer.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def decoder(self) -> ByteDecoder | WindowDecoder:
        """Turns sampled ids into text, piece by piece."""
        return WindowDecoder(self.tokenizer) if self.pieces is None else ByteDecoder(self.pieces)

    def reasoning(self, prompt_ids: Sequence[int]) -> Reasoning:
        """Whether the answer to a prompt may hold reasoning."""
        if CLOSE_THINK not in self._own.source:
            channels = "<|channel" in self._own.source or self.renderer.name == "renderers/gpt-oss"
            return "channels" if channels else "none"
        end = self.tokenizer.decode(list(prompt_ids[-8:]), skip_special_tokens=False).rstrip()
        if end.endswith(OPEN_THINK):
            return "open"
        return "none" if end.endswith(CLOSE_THINK) else "optional"


_NAMED_CONVERSATIONS: chatml.Conversations = (
    ([Message("user", "One.")], []),
    ([Message("system", "Two."), Message("user", "3")], []),
)


def _agreeing(
    renderer: library.Library | None, conversations: chatml.Conversations
) -> library.Library | None:
    """The library's renderer, unless the tokenizer's own template renders otherwise."""
    if renderer is None or not renderer.own.exists:
        return renderer
    for messages, tools in conversations:
        text = renderer.own.text_or_none(messages, tools, True)
        if text is None:
            return None
        if encode(renderer.own.tokenizer, text) != renderer.library_ids(messages, tools):
            return None
    return renderer


@lru_cache(maxsize=64)
def _vocabulary_digest(tokenizer: Any) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        identity: Any = sorted(tokenizer.get_vocab().items())
    else:
        # Truncation and padding are settings of the last call, not of the vocabulary.
        identity = json.loads(backend.to_str())
        identity.update(truncation=None, padding=None)
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
