"""The grammar of an answer: which texts it accepts, for templates with and without tag tokens."""

import json
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import pytest
from tests.chat.conftest import MakeTokenizer
from tests.prose import Prose

from hone.chat.constraint import answer_constraint
from hone.chat.template import ChatTemplate
from hone.chat.tool_choice import ToolChoice
from hone.errors import BadRequest
from hone.inference.base import Constraint
from hone.inference.grammar import Grammars
from hone.wire.openai.output_format import output_format

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}  # fmt: skip
STRICT = {"type": "function", "function": {"name": "add", "parameters": SCHEMA, "strict": True}}
LOOSE = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
FORMAT: dict[str, Any] = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}  # fmt: skip


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


Accepts = Callable[..., bool]


@pytest.fixture(scope="module")
def accepts() -> Iterator[Accepts]:
    """Whether a constraint accepts a whole text, token by token as the tokenizer encodes it.

    Between two texts no token reaches from one into the other.
    """
    known: dict[int, Grammars] = {}

    def accepts(template: ChatTemplate, constraint: Constraint | None, *texts: str) -> bool:
        assert constraint is not None
        tokenizer = template.tokenizer
        grammars = known.setdefault(id(template), Grammars(lambda: tokenizer, len(tokenizer)))
        (matcher,) = grammars.matchers(constraint, 1)
        encoded = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
        for token in chain.from_iterable(encoded):
            if not matcher.allowed()[token]:
                return False
            matcher.accept(token)
        return bool(matcher.allowed()[tokenizer.eos_token_id])

    yield accepts
    for grammars in known.values():
        grammars.close()


def build(
    template: ChatTemplate, tools: list[Any], choice: Any = None, prompt: str = "", **request: Any
) -> Constraint | None:
    parallel = request.pop("parallel", None)
    chosen = ToolChoice.of(template, tools, choice, parallel=parallel)
    ids = template.tokenizer.encode(prompt or "<|im_start|>assistant\n", add_special_tokens=False)
    return answer_constraint(template, chosen, output_format(request), ids)


@pytest.fixture(params=["qwen25", "smollm2"])
def template(request: pytest.FixtureRequest) -> ChatTemplate:
    """The tags of tool calls are tokens of Qwen2.5, and plain text for SmolLM2."""
    return request.getfixturevalue(request.param)


def test_nothing_to_constrain(template: ChatTemplate) -> None:
    assert build(template, []) is None
    assert build(template, [LOOSE]) is None
    assert build(template, [STRICT], "none") is None


def test_a_required_call(template: ChatTemplate, accepts: Accepts) -> None:
    constraint = build(template, [STRICT, LOOSE], "required")
    good = call("add", '{"n": 1}')
    assert accepts(template, constraint, good)
    assert accepts(template, constraint, good + "\n" + call("look", '{"n": -20}'))
    for bad in (
        "",
        "text",
        "text" + good,
        call("other", "{}"),
        call("look", '{"m": 1}'),
        good[:-1],
    ):
        assert not accepts(template, constraint, bad), bad
    once = build(template, [STRICT, LOOSE], "required", parallel=False)
    assert accepts(template, once, good) and not accepts(template, once, good + good)
    named = build(template, [STRICT, LOOSE], {"type": "function", "function": {"name": "look"}})
    assert accepts(template, named, call("look", '{"n": 3}'))
    assert not accepts(template, named, good)


def test_strict_functions_in_free_text(template: ChatTemplate, accepts: Accepts) -> None:
    constraint = build(template, [STRICT, LOOSE])
    good, loose = call("add", '{"n": 1}'), call("look", '{"anything": [1, {}]}')
    for text in ("", "just text <b>", good, f"first {good}", f"{good}\n{loose} then text"):
        assert accepts(template, constraint, text), text
    for bad in (call("add", '{"m": 1}'), "text <tool_call>", f"{good} <tool_call>x</tool_call>"):
        assert not accepts(template, constraint, bad), bad


def test_a_single_call_ends_the_answer(template: ChatTemplate, accepts: Accepts) -> None:
    """Not a stop string, which would also end it inside a string that spells the closing tag."""
    text = {"type": "object", "properties": {"s": {"type": "string"}}, "required": ["s"]}
    write = {"type": "function", "function": {"name": "write", "parameters": text, "strict": True}}
    head, _, end = call("write", '{"s": "a </tool_|call>"}').partition("|")
    for choice, before in (("required", ""), ("auto", ""), ("auto", "first ")):
        constraint = build(template, [write], choice, parallel=False)
        assert accepts(template, constraint, before + head, end), (choice, before)
        for more in ("text", "\n<tool_call>"):
            assert not accepts(template, constraint, before + head, end + more), (choice, more)
    assert accepts(template, build(template, [write], parallel=False), "just text")


def test_a_format_beside_tools(template: ChatTemplate, accepts: Accepts) -> None:
    constraint = build(template, [LOOSE], **FORMAT)
    for text in ('{"n": 1}', '{\n  "n": 1\n}', call("look", '{"free": 1}')):
        assert accepts(template, constraint, text), text
    for bad in ('{"m": 1}', "text", '{"n": 1}' + call("look", "{}")):
        assert not accepts(template, constraint, bad), bad


@pytest.mark.parametrize(
    ("request_", "good", "bad"),
    [
        (FORMAT, '{"n": 1}', '{"n": "1"}'),
        ({"guided_regex": "a/b+"}, "a/bb", "a/"),
        ({"guided_grammar": 'start: "a" B\nB: /b+/'}, "abb", "b"),
        ({"guided_grammar": 'root ::= "a" [0-9]'}, "a1", "ab"),
    ],
)
def test_every_format_can_follow_a_reasoning(
    qwen3: ChatTemplate, accepts: Accepts, request_: Any, good: str, bad: str
) -> None:
    free = build(qwen3, [], **request_)
    for text in (
        good,
        f"<think>\nany {{ <tool_call>\n</think>\n\n{good}",
        f"<think></think>{good}",
    ):
        assert accepts(qwen3, free, text), text
    for text in (bad, f"<think>\nwhy\n</think>\n\n{bad}", f"<think>{good}", f"so {good}"):
        assert not accepts(qwen3, free, text), text
    inside = build(qwen3, [], prompt="<|im_start|>assistant\n<think>\n", **request_)
    assert accepts(qwen3, inside, f"why</think>\n\n{good}") and not accepts(qwen3, inside, good)
    closed = build(qwen3, [], prompt="<|im_start|>assistant\n<think>\n\n</think>\n\n", **request_)
    assert accepts(qwen3, closed, good)
    assert not accepts(qwen3, closed, f"<think>why</think>{good}")


def test_a_required_call_after_a_reasoning(qwen3: ChatTemplate, accepts: Accepts) -> None:
    constraint = build(qwen3, [STRICT], "required")
    text = call("add", '{"n": 1}')
    assert accepts(qwen3, constraint, text)
    assert accepts(qwen3, constraint, f"<think>\nwhy\n</think>\n\n{text}")
    assert not accepts(qwen3, constraint, f"<think>\nwhy\n</think>\n\nwell, {text}")


def test_templates_that_cannot_be_constrained_say_so(
    prose: Prose, make_tokenizer: MakeTokenizer
) -> None:
    source = "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}"
    channels = ChatTemplate.load(make_tokenizer("qwen2.5-instruct", source + "{# <|channel|> #}"))
    with pytest.raises(BadRequest) as caught:
        build(channels, [], **FORMAT)
    prose(caught)
    tools = "{% if tools %}{{ tools }}{% endif %}" + source
    plain = ChatTemplate.load(make_tokenizer("qwen2.5-instruct", tools))
    assert build(plain, [], **FORMAT) == build(plain, [], guided_json=json.dumps(SCHEMA))
    with pytest.raises(BadRequest) as caught:
        build(plain, [LOOSE], **FORMAT)
    prose(caught)
