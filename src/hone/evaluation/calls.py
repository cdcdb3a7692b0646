"""Built-in evaluators of the model calls: tool_call_match, latency, tokens, counts.

In:   the captured model calls of a rollout
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
"""Name and arguments; arguments that are not JSON remain text and match nothing."""


class ToolCallMatch(Rule, name="tool_call_match"):
    """1 if the tools that were called, with their arguments, are those that the row expects.

    Tool calls are written {"name": ..., "arguments": {...}} or as in the OpenAI API; one, a list
    of them, or the JSON text of either.
    """

    source: Literal["auto", "output", "calls"] = "auto"
    """Where to look for tool calls: in the workflow's output, or in the model's answers. `auto`: in
    the output if it consists of tool calls, otherwise in the answers."""
    arguments: Literal["exact", "subset", "ignore"] = "exact"
    """`subset`: further arguments are allowed."""
    ordered: bool = False
    """Whether the order matters."""
    extra: Literal["forbid", "allow"] = "forbid"
    """Whether there may be more calls than expected."""
    partial: bool = False
    """Score the share of calls that match, instead of 1 for all and 0 otherwise."""
    tolerance: float = Field(default=0.0, ge=0)
    """Maximum difference between numbers that count as equal."""

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
        actual = self._actual(item)
        matched = self._matched(actual, expected)
        total = len(expected) if self.extra == "allow" else max(len(expected), len(actual))
        share = matched / total if total else 1.0
        value = share if self.partial else float(share == 1.0)
        calls = [{"name": name, "arguments": arguments} for name, arguments in actual]
        return value, {"made": calls, "matched": matched, "expected": len(expected)}

    def _actual(self, item: EvalInputItem) -> list[ToolCall]:
        if self.source != "calls":
            try:
                output = tool_calls(parsed(item.output_obj))
            except json.JSONDecodeError:
                output = None
            if output is not None or self.source == "output":
                return output or []
        replies = [call.reply or {} for call in item.trajectory]
        return [
            call for reply in replies for call in tool_calls(reply.get("tool_calls") or []) or []
        ]

    def _matched(self, actual: Sequence[ToolCall], expected: Sequence[ToolCall]) -> int:
        if self.ordered:
            return _longest_common(actual, expected, self._equal)
        if not actual or not expected:
            return 0
        from scipy.optimize import linear_sum_assignment  # imported here: it takes a second

        # Not the first match: with `subset` or a tolerance, another call may need that one.
        equal = [[self._equal(call, wanted) for wanted in expected] for call in actual]
        pairs = zip(*linear_sum_assignment(equal, maximize=True), strict=True)
        return sum(equal[row][column] for row, column in pairs)

    def _equal(self, actual: ToolCall, wanted: ToolCall) -> bool:
        (name, arguments), (wanted_name, wanted_arguments) = actual, wanted
        if name != wanted_name or self.arguments == "ignore":
            return name == wanted_name
        if not isinstance(arguments, dict) or not isinstance(wanted_arguments, dict):
            return False
        if self.arguments == "subset":
            arguments = {key: arguments[key] for key in wanted_arguments if key in arguments}
        return same(arguments, wanted_arguments, self.tolerance)


def tool_calls(value: Any) -> list[ToolCall] | None:
    """The tool calls in a value: one, a list, or a message with them; None for anything else."""
    if isinstance(value, dict) and isinstance(value.get("tool_calls"), list):
        value = value["tool_calls"]
    calls = []
    for entry in value if isinstance(value, list) else [value]:
        function = entry.get("function", entry) if isinstance(entry, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            return None
        calls.append((function["name"], _arguments(function.get("arguments"))))
    return calls


def _arguments(value: Any) -> Any:
    if value is None or value == "":
        return {}
    try:
        return json.loads(value) if isinstance(value, str) else value
    except json.JSONDecodeError:
        return value


def _longest_common(actual: Sequence[Any], wanted: Sequence[Any], equal: Any) -> int:
    """The length of the longest common subsequence."""
    best = [0] * (len(wanted) + 1)
    for call in actual:
        before = best[:]
        for n, other in enumerate(wanted):
            best[n + 1] = before[n] + 1 if equal(call, other) else max(before[n + 1], best[n])
    return best[-1]


# ---- time and tokens --------------------------------------------------------------------------


class _Measure(Rule):
    """Time or tokens that an item took."""

    max_concurrency: int = Field(default=8, ge=1)
    """Accepted for compatibility with NeMo Agent Toolkit; has no effect."""

    @property
    def needs_answer(self) -> bool:
        return False


class AvgLlmLatency(_Measure, name="avg_llm_latency"):
    """Mean seconds of the item's model calls."""

    def verdict(self, item: EvalInputItem) -> Verdict:
        return fmean(_some(item, [call.seconds for call in item.trajectory])), _count(item)


class AvgWorkflowRuntime(_Measure, name="avg_workflow_runtime"):
    """Seconds that the workflow took for the item."""

    def verdict(self, item: EvalInputItem) -> Verdict:
        if item.seconds is None:
            raise ConfigError(f"item {item.id!r}: the workflow was not run, so it took no time")
        return item.seconds, None


class AvgNumLlmCalls(_Measure, name="avg_num_llm_calls"):
    """Number of model calls that the workflow made for the item."""

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
            f"item {item.id!r}: no captured model call has this value; the workflow makes no calls, or "
            "its client is neither httpx nor httpx2"
        )
    return values


def _count(item: EvalInputItem) -> dict[str, int]:
    return {"calls": len(item.trajectory)}


for _rule in (ToolCallMatch, AvgLlmLatency, AvgWorkflowRuntime, AvgNumLlmCalls, AvgTokensPerLlmEnd):
    register_evaluator(config_type=_rule)(rule_evaluator)
