"""What `tools`, `tool_choice` and `parallel_tool_calls` of a request come to.

In:   a request's tools and choice; the model's chat template
Out:  Offer: the tools the model is shown, the text its answer is made to begin with, where it ends

There is no grammar in this version. A call is forced by beginning the answer as the template
begins a call; those tokens are put there and not sampled, are recorded as forced, and get no label.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from hone.chat.jinja import encode
from hone.chat.messages import check_tools
from hone.chat.reply import CLOSE_CALL, OPEN_CALL, OPEN_THINK
from hone.chat.template import ChatTemplate
from hone.errors import BadRequest, TemplateError

_PROBE = "zq9probe"


@dataclass(frozen=True)
class Offer:
    """The tools of one request."""

    tools: list[dict[str, Any]]
    """What the model is shown, and whose calls are read."""
    forced: str = ""
    """What the answer begins with."""
    single: bool = False
    """The answer ends after its first call."""

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


def offer(
    template: ChatTemplate, tools: Sequence[Any] | None, choice: Any, parallel: bool | None
) -> Offer:
    """The request's tools, or a BadRequest that says what is possible."""
    offered = check_tools(tools)
    name = _named(choice)
    if name is None and choice not in (None, "auto", "none", "required"):
        raise BadRequest(
            f"tool_choice: got {choice!r}; send 'auto', 'none', 'required' or "
            "{'type': 'function', 'function': {'name': ...}}",
            param="tool_choice",
        )
    if choice == "none":
        return Offer([])
    must = choice == "required" or name is not None
    if not offered:
        if must:
            raise BadRequest(
                "tool_choice: a call is required, but no tools are offered", param="tools"
            )
        return Offer([])
    names = [tool["function"]["name"] for tool in offered]
    if name is not None and name not in names:
        raise BadRequest(
            f"tool_choice: no tool is called {name!r}; offered: {', '.join(names)}",
            param="tool_choice",
        )
    single = name is not None or parallel is False
    if not must and not single:
        return Offer(offered)
    opening = _opening(template)
    if opening is None:
        raise _impossible(f"the chat template of {template.name!r} writes no Hermes tool calls")
    if not must:
        return Offer(offered, single=single)
    before, after = opening
    only = name or (names[0] if len(names) == 1 else None)
    spelt = "" if only is None else json.dumps(only, ensure_ascii=False)[1:-1] + after
    return Offer(offered, before + spelt, single)


def _named(choice: Any) -> str | None:
    if not isinstance(choice, Mapping) or choice.get("type") != "function":
        return None
    function = choice.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None


@lru_cache(maxsize=64)
def _opening(template: ChatTemplate) -> tuple[str, str] | None:
    """What a call begins with up to its name, and from there to its arguments.

    None for a template that does not write Hermes calls.
    """
    call = {"id": "c0", "type": "function", "function": {"name": _PROBE, "arguments": "{}"}}
    talk = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    try:
        ids = template.render(talk, generation_prompt=False).ids
    except TemplateError:
        return None
    text = template.tokenizer.decode(ids, skip_special_tokens=False)
    found = re.search(
        rf'({OPEN_CALL}\s*\{{"name": ?"){_PROBE}(", ?"arguments": ?)\{{\}}\}}\s*{CLOSE_CALL}', text
    )
    return (found[1], found[2]) if found else None


def _impossible(why: str) -> BadRequest:
    return BadRequest(
        f"tool_choice, parallel_tool_calls: {why}; possible here: tool_choice 'auto' and 'none', "
        "with parallel_tool_calls left out or true",
        param="tool_choice",
    )
