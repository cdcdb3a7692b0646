"""The built-in evaluators that look at the calls: tool_call_match, latency, tokens, counts.

In:   the model calls of a rollout as the harness saw them on the wire
Out:  whether the right tools were called; seconds, tokens and calls as plain numbers
"""

import json
from collections.abc import Sequence
from statistics import fmean
from typing import Any, Literal

from pydantic import Field

from hone.config.registry import register_evaluator
from hone.errors import ConfigError
from hone.evaluation.base import EvalInputItem
from hone.evaluation.rule import Rule, Verdict, expected_of, parsed, rule_evaluator, same

ToolCall = tuple[str, Any]
"""Name and arguments; arguments that are no JSON stay text, and equal nothing."""


class ToolCallMatch(Rule, name="tool_call_match"):
    """1 if the tools that were called, with their arguments, are those that the row expects.

    Tool calls are written {"name": ..., "arguments": {...}} or as in the OpenAI API; one, a list
    of them, or the JSON text of either.
    """

    source: Literal["auto", "output", "calls"] = "auto"
    """Where they are looked for: in the workflow's output or in the model's answers. `auto`: in
    the output if it is tool calls, or else in the answers."""
    arguments: Literal["exact", "subset", "ignore"] = "exact"
    """`subset`: arguments beyond the expected ones do not matter."""
    ordered: bool = False
    """The order counts."""
    extra: Literal["forbid", "allow"] = "forbid"
    """Whether there may be more calls than expected."""
    partial: bool = False
    """The share of calls that match, instead of 1 for all and 0 otherwise."""
    tolerance: float = Field(default=0.0, ge=0)
    """Numbers among the arguments may differ by so much."""

    def verdict(self, item: EvalInputItem) -> Verdict:
        try:
            expected = tool_calls(parsed(expected_of(item)))
        except json.JSONDecodeError:
            expected = None
        if expected is None:
            raise ConfigError(
                f"item {item.id!r}: expects {item.expected_output_obj!r}; tool calls are written "
                '{"name": ..., "arguments": {...}}, or a list of such'
            )
        made = self._made(item)
        matched = self._matched(made, expected)
        total = len(expected) if self.extra == "allow" else max(len(expected), len(made))
        share = matched / total if total else 1.0
        value = share if self.partial else float(share == 1.0)
        told = [{"name": name, "arguments": arguments} for name, arguments in made]
        return value, {"made": told, "matched": matched, "expected": len(expected)}

    def _made(self, item: EvalInputItem) -> list[ToolCall]:
        if self.source != "calls":
            try:
                found = tool_calls(parsed(item.output_obj))
            except json.JSONDecodeError:
                found = None
            if found is not None or self.source == "output":
                return found or []
        replies = [call.reply or {} for call in item.trajectory]
        return [one for reply in replies for one in tool_calls(reply.get("tool_calls") or []) or []]

    def _matched(self, made: Sequence[ToolCall], expected: Sequence[ToolCall]) -> int:
        if self.ordered:
            return _longest_common(made, expected, self._equal)
        left = list(made)
        matched = 0
        for wanted in expected:
            place = next((n for n, one in enumerate(left) if self._equal(one, wanted)), None)
            if place is not None:
                matched += 1
                del left[place]
        return matched

    def _equal(self, made: ToolCall, wanted: ToolCall) -> bool:
        (name, arguments), (wanted_name, wanted_arguments) = made, wanted
        if name != wanted_name or self.arguments == "ignore":
            return name == wanted_name
        if not isinstance(arguments, dict) or not isinstance(wanted_arguments, dict):
            return False
        if self.arguments == "subset":
            arguments = {key: arguments[key] for key in wanted_arguments if key in arguments}
        return same(arguments, wanted_arguments, self.tolerance)


def tool_calls(value: Any) -> list[ToolCall] | None:
    """The tool calls a value is: one, a list, a message with them; None if it is none."""
    if isinstance(value, dict) and isinstance(value.get("tool_calls"), list):
        value = value["tool_calls"]
    listed = value if isinstance(value, list) else [value]
    found = []
    for one in listed:
        function = one.get("function", one) if isinstance(one, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            return None
        found.append((function["name"], _arguments(function.get("arguments"))))
    return found


def _arguments(value: Any) -> Any:
    if value is None or value == "":
        return {}
    try:
        return json.loads(value) if isinstance(value, str) else value
    except json.JSONDecodeError:
        return value


def _longest_common(made: Sequence[Any], wanted: Sequence[Any], equal: Any) -> int:
    """How many of the wanted stand in the made ones, in their order."""
    best = [0] * (len(wanted) + 1)
    for one in made:
        before = best[:]
        for n, other in enumerate(wanted):
            best[n + 1] = before[n] + 1 if equal(one, other) else max(before[n + 1], best[n])
    return best[-1]


# ---- time and tokens --------------------------------------------------------------------------


class _Measure(Rule):
    """What an item cost."""

    max_concurrency: int = Field(default=8, ge=1)
    """Accepted as in NeMo Agent Toolkit; nothing here waits."""


class AvgLlmLatency(_Measure, name="avg_llm_latency"):
    """Mean seconds of the item's model calls."""

    def verdict(self, item: EvalInputItem) -> Verdict:
        return fmean(_some(item, [call.seconds for call in item.trajectory])), _count(item)


class AvgWorkflowRuntime(_Measure, name="avg_workflow_runtime"):
    """Seconds that the workflow took on the item."""

    def verdict(self, item: EvalInputItem) -> Verdict:
        if item.seconds is None:
            raise ConfigError(f"item {item.id!r}: the workflow was not run, so it took no time")
        return item.seconds, None


class AvgNumLlmCalls(_Measure, name="avg_num_llm_calls"):
    """How many model calls the workflow made on the item."""

    def verdict(self, item: EvalInputItem) -> Verdict:
        return float(len(item.trajectory)), None


class AvgTokensPerLlmEnd(_Measure, name="avg_tokens_per_llm_end"):
    """Mean tokens (prompt and completion) of the item's model calls."""

    def verdict(self, item: EvalInputItem) -> Verdict:
        used = [call.usage for call in item.trajectory if call.usage is not None]
        counts = [usage.get("total_tokens") or _sum(usage) for usage in used]
        return fmean(_some(item, counts)), _count(item)


def _sum(usage: dict[str, int]) -> int:
    return usage.get("prompt_tokens", 0) + usage.get("completion_tokens", 0)


def _some(item: EvalInputItem, values: list[Any]) -> list[Any]:
    if not values:
        raise ConfigError(
            f"item {item.id!r}: no model call was seen that tells it; the workflow makes none, or "
            "its client is neither httpx nor httpx2"
        )
    return values


def _count(item: EvalInputItem) -> dict[str, int]:
    return {"calls": len(item.trajectory)}


for _rule in (ToolCallMatch, AvgLlmLatency, AvgWorkflowRuntime, AvgNumLlmCalls, AvgTokensPerLlmEnd):
    register_evaluator(config_type=_rule)(rule_evaluator)
