"""What `tools`, `tool_choice` and `parallel_tool_calls` of a request come to for one template.

In:   the request's tools and choice; the model's chat template
Out:  ToolChoice: the tools the model is shown, what its answer must begin with, and where it ends

There is no grammar in this version. A call is forced by beginning the answer as the template
begins a call; those tokens are not sampled, are recorded as forced, and get no label.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from hone.chat.hermes import CLOSE_CALL, OPEN_CALL
from hone.chat.jinja import encode
from hone.chat.messages import check_tools
from hone.chat.reply import OPEN_THINK
from hone.chat.template import ChatTemplate
from hone.errors import BadRequest, TemplateError

_PROBE = "zq9probe"


@dataclass(frozen=True)
class ToolChoice:
    """The tools of one request, and which of them must be called."""

    tools: list[dict[str, Any]]
    """Shown to the model; calls to them are parsed."""
    forced: str = ""
    """Text that the answer must begin with."""
    single: bool = False
    """The answer ends after its first call."""

    @classmethod
    def of(
        cls,
        template: ChatTemplate,
        tools: Sequence[Any] | None,
        choice: Any,
        *,
        parallel: bool | None,
    ) -> "ToolChoice":
        """Raises BadRequest where the template cannot force the choice."""
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
        if not required and not single:
            return cls(offered)
        opening = _call_opening(template)
        if opening is None:
            raise _impossible(f"the chat template of {template.name!r} writes no Hermes tool calls")
        if not required:
            return cls(offered, single=single)
        before, after = opening
        only = name or (names[0] if len(names) == 1 else None)
        written = "" if only is None else json.dumps(only, ensure_ascii=False)[1:-1] + after
        return cls(offered, before + written, single)

    @property
    def stop(self) -> tuple[str, ...]:
        return (CLOSE_CALL,) if self.single else ()

    def forced_ids(self, template: ChatTemplate, prompt_ids: Sequence[int]) -> list[int]:
        if not self.forced:
            return []
        end = template.tokenizer.decode(list(prompt_ids[-8:]), skip_special_tokens=False)
        if end.rstrip().endswith(OPEN_THINK):
            raise _impossible("the template opens the answer with a reasoning")
        return encode(template.tokenizer, self.forced)


def _function_name(choice: Any) -> str | None:
    if not isinstance(choice, Mapping) or choice.get("type") != "function":
        return None
    function = choice.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None


@lru_cache(maxsize=64)
def _call_opening(template: ChatTemplate) -> tuple[str, str] | None:
    """What a call begins with up to its name, and from there to its arguments.

    None for a template that does not write Hermes calls.
    """
    call = {"id": "c0", "type": "function", "function": {"name": _PROBE, "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    try:
        ids = template.render(messages, generation_prompt=False)
    except TemplateError:
        return None
    match = re.search(
        rf'({OPEN_CALL}\s*\{{"name": ?"){_PROBE}(", ?"arguments": ?)\{{\}}\}}\s*{CLOSE_CALL}',
        template.tokenizer.decode(ids, skip_special_tokens=False),
    )
    return (match[1], match[2]) if match else None


def _impossible(why: str) -> BadRequest:
    return BadRequest(
        f"tool_choice, parallel_tool_calls: {why}; possible here: tool_choice 'auto' and 'none', "
        "with parallel_tool_calls left out or true",
        param="tool_choice",
    )
