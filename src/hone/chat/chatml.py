"""Render ChatML with Hermes tool calls, and extend a sampled conversation without changing its ids.

In:   checked Messages and tools; for an extension, the ids that were fed and sampled before
Out:  token ids

`recognise` decides by behaviour: it renders a set of conversations with the model's own template
and with ours and requires the same text. So a renamed or fine-tuned model is recognised, and one
with a changed template is not. Turns can be added without rendering the earlier ones again because
`<|im_end|>` is a single token: the text after it is encoded the same whatever precedes it (which
is checked too).

A template without tools (SmolLM2's drops them silently) gets those of Qwen2.5: listed in the system
message, calls and results in Hermes format. Only there does the text differ from what the model's
own template would give.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hone.chat.jinja import PROBE_CALL, PROBE_TOOL, Jinja, encode, token_id
from hone.chat.messages import Message, ToolCall

VERSION = 1
"""Part of the fingerprint; raise it when the text below changes."""

START, END = "<|im_start|>", "<|im_end|>"

_TOOLS_BEFORE = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
_TOOLS_AFTER = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments "
    "within <tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)


def chatml_text(
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]],
    *,
    default_system: str | None,
    generation_prompt: bool,
) -> str:
    """The whole conversation. `default_system` is the template's own system message."""
    system, rest = default_system, messages
    if messages[0].role == "system":
        system, rest = messages[0].content, messages[1:]
    if tools:
        listed = "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in tools)
        system = "" if system is None else system + "\n\n"
        system += _TOOLS_BEFORE + listed + _TOOLS_AFTER
    head = "" if system is None else f"{START}system\n{system}{END}\n"
    return head + turns_text(rest, generation_prompt=generation_prompt)


def turns_text(messages: Sequence[Message], *, generation_prompt: bool) -> str:
    """Messages after the opening one; tool results that follow each other share one user turn."""
    text: list[str] = []
    for i, message in enumerate(messages):
        if message.role == "tool":
            first = i == 0 or messages[i - 1].role != "tool"
            last = i + 1 == len(messages) or messages[i + 1].role != "tool"
            text.append(f"{START}user" if first else "")
            text.append(f"\n<tool_response>\n{message.content}\n</tool_response>")
            text.append(f"{END}\n" if last else "")
        elif message.tool_calls:
            content = f"\n{message.content}" if message.content else ""
            calls = "".join(map(_call_text, message.tool_calls))
            text.append(f"{START}assistant{content}{calls}{END}\n")
        else:
            text.append(f"{START}{message.role}\n{message.content}{END}\n")
    if generation_prompt:
        text.append(f"{START}assistant\n")
    return "".join(text)


def _call_text(call: ToolCall) -> str:
    values = call.values
    arguments = values if isinstance(values, str) else json.dumps(values, ensure_ascii=False)
    return f'\n<tool_call>\n{{"name": "{call.name}", "arguments": {arguments}}}\n</tool_call>'


@dataclass(frozen=True, slots=True)
class ChatML:
    """One model's ChatML."""

    tokenizer: Any
    end: int
    """The id of `<|im_end|>`."""
    default_system: str | None
    own_tools: bool
    """Whether the model's own template has tools; if not, hone writes the text that lists them."""

    ignored: tuple[str, ...]
    """All template arguments: the template was recognised under them, so they changed no text."""
    prints_date: bool

    foreign = False
    bridges = True
    takes_tools = True
    strips_reasoning = False

    @property
    def name(self) -> str:
        return "chatml" if self.own_tools else "chatml+hermes"

    @property
    def turn_ends(self) -> tuple[int, ...]:
        return (self.end,)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        others = (self.tokenizer.eos_token_id, token_id(self.tokenizer, "<|endoftext|>"))
        return tuple(dict.fromkeys([self.end, *(i for i in others if i is not None)]))

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]],
        *,
        generation_prompt: bool,
    ) -> list[int]:
        text = chatml_text(
            messages,
            tools,
            default_system=self.default_system,
            generation_prompt=generation_prompt,
        )
        return encode(self.tokenizer, text)

    def extend(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        added: Sequence[Message],
        tools: Sequence[dict[str, Any]],
    ) -> list[int]:
        """The next prompt: what was fed, what was sampled, then the added messages."""
        closed = bool(completion_ids) and completion_ids[-1] == self.end
        text = ("" if closed else END) + "\n" + turns_text(added, generation_prompt=True)
        return [*prompt_ids, *completion_ids, *encode(self.tokenizer, text)]


def recognise(own: Jinja) -> ChatML | None:
    """ChatML for this model, if its own template agrees with ours."""
    tokenizer, rendered = own.tokenizer, own.text_or_none
    end = token_id(tokenizer, END)
    if end is None or token_id(tokenizer, START) is None or not _splits_at_end(tokenizer):
        return None
    bare = rendered([_USER], [], False)
    if bare is None or not bare.endswith(turns_text([_USER], generation_prompt=False)):
        return None
    head = bare[: -len(turns_text([_USER], generation_prompt=False))]
    default_system = head.removeprefix(f"{START}system\n").removesuffix(f"{END}\n") or None
    own_tools = rendered([_USER], [PROBE_TOOL], False) != bare
    agrees = all(
        rendered(messages, tools, generation_prompt)
        == chatml_text(
            messages, tools, default_system=default_system, generation_prompt=generation_prompt
        )
        for messages, tools in (*_CONVERSATIONS, *(_TOOL_CONVERSATIONS if own_tools else ()))
        for generation_prompt in (False, True)
    )
    if not agrees:
        return None
    return ChatML(tokenizer, end, default_system, own_tools, tuple(own.kwargs), own.prints_date)


def _splits_at_end(tokenizer: Any) -> bool:
    """Whether the text after `<|im_end|>` is encoded the same whatever precedes it."""
    after = "\n" + turns_text([_USER], generation_prompt=True)
    return all(
        encode(tokenizer, before + END + after)
        == encode(tokenizer, before + END) + encode(tokenizer, after)
        for before in ("", "word", " ", "\n\n", "\u00e9\u4f60")
    )


Conversations = tuple[tuple[list[Message], list[dict[str, Any]]], ...]

_SYSTEM = Message("system", "Be brief.")
_USER = Message("user", "Hello, \u4f60\u597d!")
_ANSWER = Message("assistant", "Good day.")

# Each conversation tests something that real templates do: default system messages, other white
# space, reasoning cut from history, a special case for the last answer, later system messages.
_CONVERSATIONS: Conversations = (
    ([_USER], []),
    ([_SYSTEM, _USER], []),
    ([Message("system", ""), _USER], []),
    ([_SYSTEM, _USER, _ANSWER, _USER], []),
    ([_USER, _ANSWER], []),
    ([_USER, Message("assistant", "  two \n\n"), Message("user", " \n three  \n")], []),
    ([_USER, Message("assistant", "<think>\nwhy\n</think>\n\nso"), _USER], []),
    ([_USER, Message("assistant", "said", reasoning="thought"), _USER], []),
    ([_USER, _ANSWER, _SYSTEM, _USER, Message("assistant", "")], []),
)
_TOOL_CONVERSATIONS: Conversations = (
    ([_USER], [PROBE_TOOL]),
    ([_SYSTEM, _USER, _ANSWER], [PROBE_TOOL, PROBE_TOOL]),
    (
        [
            _USER,
            Message("assistant", "", (PROBE_CALL,)),
            Message("tool", "one", tool_call_id="c0"),
            Message("assistant", "two calls", (PROBE_CALL, PROBE_CALL)),
            Message("tool", " two\n"),
            Message("tool", ""),
            _USER,
        ],
        [PROBE_TOOL],
    ),
    (
        [_USER, Message("assistant", "", (PROBE_CALL,), reasoning="thought"), Message("tool", "x")],
        [],
    ),
)
PROBE_CONVERSATIONS = _CONVERSATIONS + _TOOL_CONVERSATIONS
