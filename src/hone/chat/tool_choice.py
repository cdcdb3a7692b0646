"""What `tools`, `tool_choice` and `parallel_tool_calls` of a request come to for one template.

In:   the request's tools and choice; the model's chat template
Out:  ToolChoice: the tools the model is shown, which of them must be called, and where the answer ends

How the template writes a call is read from a call that it renders. chat/constraint.py makes a grammar
of it where calls are required, or functions are strict.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from hone.chat.hermes import CLOSE_CALL, OPEN_CALL
from hone.chat.messages import check_tools
from hone.chat.template import ChatTemplate
from hone.errors import BadRequest, TemplateError
from hone.wire.openai.chat import tool_call

_PROBE = "zq9probe"


@dataclass(frozen=True)
class CallSyntax:
    """A tool call between its tags: around the function's name, and after its arguments."""

    before_name: str
    after_name: str
    end: str


@dataclass(frozen=True)
class ToolChoice:
    """The tools of one request, and which of them must be called."""

    tools: list[dict[str, Any]]
    """Shown to the model; calls to them are parsed."""
    required: bool = False
    """The answer consists of calls."""
    name: str | None = None
    """The function that must be called."""
    single: bool = False
    """The answer ends after its first call."""
    syntax: CallSyntax | None = None
    """How the template writes a call; None if it does not write Hermes calls."""

    @classmethod
    def of(
        cls,
        template: ChatTemplate,
        tools: Sequence[Any] | None,
        choice: Any,
        *,
        parallel: bool | None,
    ) -> "ToolChoice":
        """Raises BadRequest where the template cannot express the choice."""
        offered, name = check_tools(tools), _function_name(choice)
        if name is None and choice not in (None, "auto", "none", "required"):
            raise BadRequest(
                f"tool_choice: got {choice!r}; send 'auto', 'none', 'required' or "
                "{'type': 'function', 'function': {'name': ...}}",
                param="tool_choice",
            )
        required = choice == "required" or name is not None
        if choice == "none" or not (offered or required):
            return cls([])
        if not offered:
            raise BadRequest(
                "tool_choice: a call is required, but no tools are offered", param="tools"
            )
        names = [tool["function"]["name"] for tool in offered]
        if name is not None and name not in names:
            raise BadRequest(
                f"tool_choice: no tool is called {name!r}; offered: {', '.join(names)}",
                param="tool_choice",
            )
        single = name is not None or parallel is False
        syntax = _call_syntax(template)
        if syntax is None and (required or single):
            raise BadRequest(
                f"tool_choice, parallel_tool_calls: the chat template of {template.name!r} writes no "
                "Hermes tool calls; possible here: tool_choice 'auto' and 'none', with "
                "parallel_tool_calls left out or true",
                param="tool_choice",
            )
        return cls(offered, required, name, single, syntax)

    @property
    def constrained(self) -> bool:
        """Whether the choice itself constrains the answer, whatever its output format."""
        strict = self.syntax is not None and self._has_strict
        return bool(self.tools) and (self.required or strict)

    @property
    def ignores_strict(self) -> bool:
        """Whether a function is strict, and the template's calls cannot be constrained."""
        return self.syntax is None and self._has_strict

    @property
    def _has_strict(self) -> bool:
        return any(tool["function"].get("strict") is True for tool in self.tools)

    @property
    def stop(self) -> tuple[str, ...]:
        """Strings that end a free answer after its single call.

        A constraint ends the answer itself: there, a string in the arguments may spell the tag.
        """
        return (CLOSE_CALL,) if self.single else ()


def _function_name(choice: Any) -> str | None:
    match choice:
        case {"type": "function", "function": {"name": str(name)}}:
            return name
    return None


@lru_cache(maxsize=64)
def _call_syntax(template: ChatTemplate) -> CallSyntax | None:
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "tool_calls": [tool_call("c0", _PROBE, "{}")]},
    ]
    try:
        ids = template.render(messages, generation_prompt=False)
    except TemplateError:
        return None
    match = re.search(
        rf'{OPEN_CALL}(\s*\{{"name": ?"){_PROBE}(", ?"arguments": ?)\{{\}}(\}}\s*){CLOSE_CALL}',
        template.tokenizer.decode(ids, skip_special_tokens=False),
    )
    return CallSyntax(match[1], match[2], match[3]) if match else None
