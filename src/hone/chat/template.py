"""Messages to token ids and back: the only place that renders chat.

In:   OpenAI messages and tools; sampled ids
Out:  Prompts, and Replies with text, reasoning and tool calls

Which renderer speaks for a model is decided once, when it is loaded, by what the model's own
template does, and is part of the fingerprint together with the template, its arguments, the
tokenizer and the date the template prints. Calls recorded under one fingerprint are never
continued under another: the ids would look alike and mean different prompts.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime
from functools import cached_property
from importlib.metadata import version
from typing import Any, Protocol

from hone.chat import chatml
from hone.chat import renderers as library
from hone.chat.jinja import Jinja, encode
from hone.chat.messages import Message, Tools, check_messages, check_tools
from hone.chat.reply import (
    CLOSE_THINK,
    OPEN_THINK,
    ByteDecoder,
    Event,
    Reply,
    StreamParser,
    WindowDecoder,
    byte_pieces,
)
from hone.errors import ModelUnsupported, TemplateError
from hone.inference.base import FinishReason

UNPROVED = (
    "Llama 3",
    "Mistral",
    "Gemma",
    "Phi",
    "SmolLM3",
    "Qwen3.5 and later",
    "DeepSeek",
    "GLM",
    "Kimi",
    "MiniMax",
    "Nemotron",
    "gpt-oss",
)
"""Families whose rendering no test of hone compares with the model's own template."""


class Renderer(Protocol):
    """What a ChatTemplate needs of whoever renders: ChatML, Library or Jinja."""

    @property
    def name(self) -> str: ...
    @property
    def bridges(self) -> bool: ...
    @property
    def takes_tools(self) -> bool: ...
    @property
    def stop_ids(self) -> tuple[int, ...]: ...
    @property
    def turn_ends(self) -> tuple[int, ...]:
        """The stop ids that the template itself puts after an answer."""
        ...

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]],
        *,
        generation_prompt: bool,
    ) -> list[int]: ...
    def extend(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        added: Sequence[Message],
        tools: Sequence[dict[str, Any]],
    ) -> list[int] | None: ...


class Parser(Protocol):
    """Reads one completion: feed it, close it, ask for the reply."""

    def feed(self, ids: Sequence[int]) -> list[Event]: ...
    def close(self) -> list[Event]: ...
    def reply(self, finish: FinishReason = "stop") -> Reply: ...


class ChatTemplate:
    """How one model is talked to."""

    def __init__(
        self,
        own: Jinja,
        renderer: Renderer,
        *,
        name: str,
        kwargs: Mapping[str, Any],
        today: date,
        end_ids: Sequence[int] = (),
    ) -> None:
        self.tokenizer = own.tokenizer
        self.renderer = renderer
        self.name = name
        self.kwargs = dict(kwargs)
        self._own = own
        self.today = today
        self._end_ids = tuple(end_ids)
        self._vocabulary = _Vocabulary(own.tokenizer)
        self._variants: dict[str, ChatTemplate] = {}

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
        kwargs = dict(chat_template_kwargs or {})
        today = today or datetime.now(UTC).date()
        own = Jinja(tokenizer, kwargs, today)
        renderer: Renderer | None = None
        known = library.known_renderer(name)
        if known is not None:
            renderer = _agreeing(library.typed(own, known, kwargs, today), _NAMED_TALKS)
        if renderer is None and own.exists:
            renderer = chatml.recognise(own)
        if renderer is None and CLOSE_THINK in own.source and chatml.START in own.source:
            renderer = _agreeing(library.typed(own, "qwen3", kwargs, today), chatml.PROBE_TALKS)
        if renderer is None and not own.exists:
            raise ModelUnsupported(
                f"{name or 'this tokenizer'}: it has no chat template; use the instruct version of "
                "the model, or set chat_template in its tokenizer_config.json"
            )
        return cls(own, renderer or own, name=name, kwargs=kwargs, today=today, end_ids=end_ids)

    def with_kwargs(self, kwargs: Mapping[str, Any] | None) -> "ChatTemplate":
        """This template under further arguments, as one request may send them."""
        if not kwargs:
            return self
        key = json.dumps(kwargs, sort_keys=True, default=repr)
        if key not in self._variants:
            if len(self._variants) >= 64:  # arguments come from clients; do not keep them all
                self._variants.clear()
            variant = ChatTemplate.load(
                self.tokenizer,
                self.name,
                chat_template_kwargs={**self.kwargs, **kwargs},
                today=self.today,
                end_ids=self._end_ids,
            )
            variant._vocabulary = self._vocabulary
            self._variants[key] = variant
        return self._variants[key]

    @property
    def renderer_name(self) -> str:
        return self.renderer.name

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end the assistant's turn, the template's own first."""
        # Asked for with every call, and a renderer may look through its whole vocabulary for them.
        return tuple(dict.fromkeys((*self.renderer.stop_ids, *self._end_ids)))

    def on(self, day: date) -> "ChatTemplate":
        """The template as it was on another day."""
        return ChatTemplate.load(
            self.tokenizer,
            self.name,
            chat_template_kwargs=self.kwargs,
            today=day,
            end_ids=self._end_ids,
        )

    @property
    def ignored_kwargs(self) -> tuple[str, ...]:
        """Template arguments that were given and change nothing for this model."""
        if isinstance(self.renderer, library.Library):
            return self.renderer.ignored
        if isinstance(self.renderer, chatml.ChatML):
            return tuple(self.kwargs)  # recognised under these arguments: they changed no text
        return self._own.ignored

    @property
    def reads_tool_calls(self) -> bool:
        """Whether a tool call in an answer is recognised; if not, it stays in the text."""
        return self._hermes or isinstance(self.renderer, library.Library)

    @cached_property
    def _hermes(self) -> bool:
        return isinstance(self.renderer, chatml.ChatML) or self._own.hermes

    @cached_property
    def fingerprint(self) -> str:
        """Equal for templates that give equal ids for every conversation.

        TOKENIZER-TEMPLATE-ARGUMENTS-DATE: each part by itself, so that a reader of two can say
        which of them differs. The renderer stands with the arguments, which have a say in it.
        """
        foreign = self.renderer if isinstance(self.renderer, library.Library) else None
        dated = foreign.prints_date if foreign else self._own.prints_date
        arguments = {
            "kwargs": {k: v for k, v in self.kwargs.items() if k not in self.ignored_kwargs},
            "renderer": self.renderer_name,
            "version": version("renderers") if foreign else chatml.VERSION,
        }
        date = self.today.isoformat() if dated else None
        parts = (self._vocabulary.digest, self._own.source, arguments, date)
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

    def check(
        self, messages: object, tools: Tools | None
    ) -> tuple[list[Message], list[dict[str, Any]]]:
        """Messages and tools as values; refuses tools that would vanish without a word."""
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

    def parser(
        self,
        *,
        prompt_ids: Sequence[int] = (),
        tools: Tools | None = None,
        stop: Sequence[str] = (),
        seed: str = "",
    ) -> Parser:
        """A parser for one completion. Without tools, tool calls are text; `seed` names the call."""
        if isinstance(self.renderer, library.Library) and not self._hermes:
            return library.WholeParser(
                self.renderer,
                prompt_ids=prompt_ids,
                tools=check_tools(tools),
                stop=stop,
                seed=seed,
                end_ids=self._end_ids,
            )
        pieces = self._vocabulary.pieces
        thinks = CLOSE_THINK in self._own.source
        return StreamParser(
            WindowDecoder(self.tokenizer) if pieces is None else ByteDecoder(pieces),
            stop_ids=self.stop_ids,
            tools=bool(tools) and self._hermes,
            thinks=thinks,
            reasoning_open=thinks and self._opens_reasoning(prompt_ids),
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
        """What a whole completion says; the same as its stream, added up."""
        parser = self.parser(prompt_ids=prompt_ids, tools=tools, stop=stop, seed=seed)
        parser.feed(completion_ids)
        parser.close()
        return parser.reply(finish)

    def _opens_reasoning(self, prompt_ids: Sequence[int]) -> bool:
        end = self.tokenizer.decode(list(prompt_ids[-8:]), skip_special_tokens=False)
        return end.rstrip().endswith(OPEN_THINK)


_NAMED_TALKS: chatml.Talks = (
    ([Message("user", "One.")], []),
    ([Message("system", "Two."), Message("user", "3")], []),
)


def _agreeing(renderer: library.Library | None, talks: chatml.Talks) -> library.Library | None:
    """The library's renderer, unless the tokenizer carries a template that says something else."""
    if renderer is None or not renderer.own.exists:
        return renderer
    for messages, tools in talks:
        text = renderer.own.text_or_none(messages, tools, True)
        if text is None or encode(renderer.own.tokenizer, text) != renderer.library_ids(
            messages, tools
        ):
            return None
    return renderer


class _Vocabulary:
    """What is derived from the tokenizer alone, once for a template and all its variants."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    @cached_property
    def pieces(self) -> list[bytes] | None:
        return byte_pieces(self.tokenizer)

    @cached_property
    def digest(self) -> str:
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None:
            identity: Any = sorted(self.tokenizer.get_vocab().items())
        else:
            # Truncation and padding are settings of the last call, not of the vocabulary.
            identity = json.loads(backend.to_str())
            identity.update(truncation=None, padding=None)
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
