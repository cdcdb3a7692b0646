"""Render and parse with the library `renderers`, for the model families it knows.

In:   checked Messages and tools; sampled ids
Out:  token ids; completions parsed by the library

Whole conversations are rendered by the model's own template where it has one: the library encodes
separately some pieces that the template writes together (0.1.12, Qwen3: an answer that begins with
a line break gets other ids).

The import takes a second and loads httpx, so it happens only when a model needs it.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hone.chat.jinja import Jinja
from hone.chat.messages import Message, ToolCall
from hone.chat.reply import Delta, Reply, call_id
from hone.errors import TemplateError
from hone.inference.base import FinishReason
from hone.wire.json import load_object

_DATE_FIELDS: dict[str, str] = {
    "date_string": "%d %b %Y",  # Llama 3
    "conversation_start_date": "%Y-%m-%d",  # gpt-oss
}


@dataclass(frozen=True, slots=True)
class Library:
    """One of the library's renderers."""

    renderer: Any
    own: Jinja
    name: str
    strips_reasoning: bool
    """Whether a new user message makes it cut the reasoning out of earlier turns."""
    ignored: tuple[str, ...]
    """Template arguments that have no effect on it."""
    prints_date: bool
    keeping: Any = None
    """The same renderer with all reasoning kept, for histories that have none."""

    bridges = True
    takes_tools = True

    @property
    def foreign(self) -> bool:
        return self.own.exists

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return tuple(self.renderer.get_stop_token_ids())

    @property
    def turn_ends(self) -> tuple[int, ...]:
        return self.stop_ids

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]],
        *,
        generation_prompt: bool,
    ) -> list[int]:
        if self.own.exists:
            return self.own.render(messages, tools, generation_prompt=generation_prompt)
        if not generation_prompt:
            raise TemplateError(
                f"generation_prompt: {self.name!r} has no template of its own and can only be asked "
                "for an answer; leave generation_prompt on"
            )
        return self.library_ids(messages, tools)

    def library_ids(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]
    ) -> list[int]:
        """The prompt as the library writes it."""
        plain = [message.plain() for message in messages]
        try:
            return self.renderer.render_ids(
                plain, tools=list(tools) or None, add_generation_prompt=True
            )
        except (TypeError, ValueError, KeyError) as error:
            raise TemplateError(
                f"messages: the renderer {self.name!r} refuses them: {error}; "
                "check the order of roles, or use a model whose template allows it"
            ) from error

    def extend(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        added: Sequence[Message],
        tools: Sequence[dict[str, Any]],
    ) -> list[int] | None:
        """The next prompt, or None if the library cannot keep the earlier ids unchanged."""
        before = [*prompt_ids, *completion_ids]
        renderer = self.renderer
        if self.keeping is not None:
            text = self.own.tokenizer.decode(before, skip_special_tokens=False)
            renderer = self.renderer if "<think>" in text else self.keeping
        rendered = renderer.bridge_to_next_turn(
            list(prompt_ids),
            list(completion_ids),
            [message.plain() for message in added],
            tools=list(tools) or None,
        )
        if rendered is None or list(rendered.token_ids[: len(before)]) != before:
            return None
        return list(rendered.token_ids)


def known_renderer(name: str) -> str | None:
    """The library's name for its renderer of this hub model, or None."""
    if "/" not in name or name.startswith(("/", ".", "~")):
        return None  # a path; the library knows only hub names
    from renderers.base import MODEL_RENDERER_MAP

    return MODEL_RENDERER_MAP.get(name)


def typed(own: Jinja, renderer_name: str) -> Library | None:
    """The library's own renderer for a family; None if the tokenizer lacks the tokens it needs."""
    from renderers.base import create_renderer, merge_chat_template_kwargs
    from renderers.configs import config_from_name

    config: Any = config_from_name(renderer_name)
    assert config is not None, renderer_name
    fields = type(config).template_field_names()
    dates = {key: own.today.strftime(form) for key, form in _DATE_FIELDS.items() if key in fields}
    used = {key: value for key, value in own.kwargs.items() if key in fields}
    try:
        config = merge_chat_template_kwargs(config, {**dates, **used})
    except ValueError as error:
        raise TemplateError(
            f"chat_template_kwargs: {error}; correct or leave out the key"
        ) from error
    try:
        renderer: Any = create_renderer(own.tokenizer, config)
    except AssertionError:  # the library's error for a missing special token
        return None
    retention = getattr(renderer, "effective_thinking_retention", "all")
    keeping = None
    if renderer_name == "qwen3" and retention != "all":
        settings = {**config.model_dump(), "thinking_retention": "all"}
        keeping = create_renderer(own.tokenizer, type(config).model_validate(settings))
    return Library(
        renderer=renderer,
        own=own,
        name=f"renderers/{renderer_name}",
        strips_reasoning=retention != "all",
        ignored=tuple(key for key in own.kwargs if key not in fields),
        prints_date=bool(dates) or own.prints_date,
        keeping=keeping,
    )


class WholeParser:
    """Parses a completion when it is complete: the library's parsers cannot parse parts."""

    def __init__(
        self,
        library: Library,
        *,
        prompt_ids: Sequence[int],
        tools: Sequence[dict[str, Any]],
        stop: Sequence[str],
        seed: str,
        end_ids: Sequence[int],
    ) -> None:
        self._library = library
        self._unread = frozenset(end_ids) - frozenset(library.stop_ids)
        """End tokens that the library would parse as text."""
        self._prompt_ids = list(prompt_ids)
        self._tools = list(tools)
        self._stop = tuple(stop)
        self._seed = seed
        self._ids: list[int] = []
        self._reply = Reply(content="")

    def feed(self, ids: Sequence[int]) -> list[Delta]:
        self._ids.extend(ids)
        return []

    def close(self) -> list[Delta]:
        renderer = self._library.renderer
        if self._ids and self._ids[-1] in self._unread:
            self._ids.pop()
        try:
            parsed = renderer.parse_response(
                self._ids, tools=self._tools or None, prompt_ids=self._prompt_ids
            )
        except RecursionError:  # deeply nested JSON, against which the library has no guard
            text = self._library.own.tokenizer.decode(self._ids, skip_special_tokens=True)
            self._reply = Reply(content=text, malformed=("JSON nested too deeply",))
            return self._reply.deltas()
        content, malformed = parsed.content, []
        calls: list[ToolCall] = []
        for attempt in parsed.tool_calls:
            try:
                calls.append(self._tool_call(attempt, len(calls)))
            except ValueError as error:
                content += attempt.raw
                if self._tools:
                    malformed.append(f"tool call {attempt.raw[:80]!r}: {error}")
        cut = min((at for at in map(content.find, self._stop) if at >= 0), default=len(content))
        self._reply = Reply(
            content=content[:cut],
            reasoning=parsed.reasoning_content,
            tool_calls=tuple(calls),
            malformed=tuple(malformed),
        )
        return self._reply.deltas()

    def _tool_call(self, attempt: Any, index: int) -> ToolCall:
        if attempt.status != "ok" or not self._tools or not attempt.name:
            raise ValueError(str(attempt.status))
        text = attempt.arguments
        if not isinstance(text, str):
            text = json.dumps({} if text is None else text, ensure_ascii=False)
        load_object(text)
        return ToolCall(attempt.name, text, attempt.id or call_id(self._seed, index))

    def reply(self, finish: FinishReason = "stop") -> Reply:
        return self._reply.ended(finish)
