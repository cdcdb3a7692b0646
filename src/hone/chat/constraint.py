"""The constraint on one answer: its output format and its tool calls, in the template's syntax.

In:   OutputFormat and ToolChoice of a request; the model's chat template; the prompt's ids
Out:  a Constraint for the engine, or None for a free answer

An output format alone is passed on unchanged. Everything else becomes one grammar: tool calls in
the template's syntax with their arguments as JSON, the reasoning before the answer, free text
around calls of strict functions. The reasoning is unconstrained, but the answer cannot end in it:
the constraint begins where the reasoning is closed.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from hone.chat.hermes import CLOSE_CALL, OPEN_CALL
from hone.chat.jinja import token_id
from hone.chat.reply import CLOSE_THINK, OPEN_THINK
from hone.chat.template import ChatTemplate
from hone.chat.tool_choice import CallSyntax, ToolChoice
from hone.errors import BadRequest
from hone.inference.base import Constraint
from hone.wire.openai.output_format import ANY_OBJECT, OutputFormat, check_nesting

WHITESPACE = r"( |\r?\n[ \t]{0,32})?"
"""White space between JSON tokens. Without a limit, small models write line breaks until
max_tokens."""


def answer_constraint(
    template: ChatTemplate,
    choice: ToolChoice,
    output: OutputFormat | None,
    prompt_ids: Sequence[int],
) -> Constraint | None:
    """The constraint, or None. Raises BadRequest if it cannot be expressed for this template."""
    calls = choice.constrained or (bool(choice.tools) and output is not None)
    if not calls and output is None:
        return None
    reasoning = template.reasoning(prompt_ids)
    if not calls and reasoning == "none":
        assert output is not None
        return plain_constraint(output)
    rules: list[str] = []
    body = "output"
    if calls:
        if choice.syntax is None:
            raise BadRequest(
                f"tools: the chat template of {template.name!r} writes no Hermes tool calls; leave out "
                "response_format or the tools",
                param="tools",
            )
        rules += _call_rules(choice, choice.syntax, template)
        body = "call" if choice.single else "call (BREAK call)*"
        if not choice.required:
            free = output is None
            body = _text_and_calls(template, rules, choice) if free else f"{body} | output"
    if "output" in body:
        assert output is not None
        rules.append(f"output: {_embedded(output)}")
    start = f"start: {_reasoning(reasoning, template)}({body})"
    rules.append(r"BREAK: /\n{0,2}/")
    return Constraint("grammar", "\n".join([start, *rules]) + "\n")


def plain_constraint(output: OutputFormat) -> Constraint:
    """The constraint of an output format for the whole answer."""
    if output.kind == "json_schema":
        return Constraint("json_schema", _schema_text(output.value))
    if output.kind == "regex":
        return Constraint("regex", output.value)
    return Constraint("grammar", _lark(output))


def _symbol(template: ChatTemplate, tag: str) -> str:
    """A tag of the template in the grammar's syntax: as one token, or as text."""
    # llguidance treats every added token of the form <...> as special: no text matches it.
    id = token_id(template.tokenizer, tag)
    return _literal(tag) if id is None else f"<[{id}]>"


def _call_rules(choice: ToolChoice, syntax: CallSyntax, template: ChatTemplate) -> list[str]:
    """`call`: one call of an allowed function."""
    called = [tool["function"] for tool in choice.tools]
    if choice.name is not None:
        called = [function for function in called if function["name"] == choice.name]
    arguments: list[str] = []
    for function in called:
        constrained = choice.required or function.get("strict") is True
        schema = _parameters(function) if constrained else dict(ANY_OBJECT)
        name = json.dumps(function["name"], ensure_ascii=False)[1:-1]
        arguments.append(f"{_literal(name + syntax.after_name)} %json {_schema_text(schema)}")
    opening, closing = _symbol(template, OPEN_CALL), _symbol(template, CLOSE_CALL)
    return [
        f"call: {opening} rest",
        f"rest: {_literal(syntax.before_name)} function {_literal(syntax.end)} {closing}",
        "function: " + "\n  | ".join(arguments),
    ]


def _parameters(function: Mapping[str, Any]) -> dict[str, Any]:
    where = f"tools: the parameters of {function['name']!r}"
    schema = function.get("parameters")
    if schema is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(schema, Mapping):
        raise BadRequest(f"{where} are not a JSON schema", param="tools")
    check_nesting(schema, where)
    return {"type": "object", **schema}


def _text_and_calls(template: ChatTemplate, rules: list[str], choice: ToolChoice) -> str:
    """Text with calls in it, or with a single one at its end; adds the rules that this needs."""
    rules.append(f"TEXT: /(?s:.*)/ & ~/(?s:.*){OPEN_CALL}(?s:.*)/")
    if token_id(template.tokenizer, OPEN_CALL) is not None:
        return "TEXT call?" if choice.single else "TEXT (call TEXT)*"
    # A tag of several tokens: text up to its first occurrence, which only a lazy rule can end.
    rules.append(f"opened[lazy]: /(?s:.*){OPEN_CALL}/")
    return "opened rest | TEXT" if choice.single else "(opened rest)* TEXT"


def _reasoning(reasoning: str, template: ChatTemplate) -> str:
    """The grammar of the reasoning before the answer, followed by a space."""
    if reasoning == "none":
        return ""
    opening, close = (token_id(template.tokenizer, tag) for tag in (OPEN_THINK, CLOSE_THINK))
    if reasoning == "channels" or close is None or opening is None:
        raise BadRequest(
            "response_format, tool_choice: this model's reasoning does not end with one token, so the "
            "constraint has no place to begin; turn the reasoning off, or leave out response_format, "
            "strict functions and a required tool_choice"
        )
    # Everything but the tokens that end the reasoning or the answer.
    others = ",".join(map(str, sorted({close, *template.stop_ids})))
    thought = f"<[^{others}]>* <[{close}]> /[ \\n]{{0,4}}/"
    return f"{thought} " if reasoning == "open" else f"(<[{opening}]> {thought})? "


def _embedded(output: OutputFormat) -> str:
    """An output format inside a grammar."""
    if output.kind == "json_schema":
        return f"%json {_schema_text(output.value)}"
    if output.kind == "regex":
        from llguidance import regex_to_lark

        return f"/{regex_to_lark(output.value, '')}/"
    return f"%lark {{\n{_lark(output)}\n}}"


def _lark(output: OutputFormat) -> str:
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return any_to_lark(output.value)
    except Exception as error:  # noqa: BLE001  the converter of llguidance raises whatever it meets
        message = f"{output.param}: the GBNF grammar cannot be converted to Lark: {error}"
        raise BadRequest(message, param=output.param) from None


def _schema_text(schema: Mapping[str, Any]) -> str:
    """JSON on one line, so that equal schemas make equal constraints."""
    options = {"whitespace_pattern": WHITESPACE}
    own = schema.get("x-guidance")
    if isinstance(own, Mapping):
        options |= own
    return json.dumps({**schema, "x-guidance": options}, ensure_ascii=False)


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
