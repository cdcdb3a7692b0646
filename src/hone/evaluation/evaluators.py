"""Built-in evaluators of the output: exact_match, contains, regex, numeric, json_match, f1.

In:   the workflow's output, and the expected output of the row
Out:  a number between 0 and 1, and the reason
"""

import json
import math
import re
import string
from collections import Counter
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from hone.config.registry import register_evaluator
from hone.errors import ConfigError
from hone.evaluation import calls as _calls  # noqa: F401  # registers its evaluators
from hone.evaluation import python as _python  # noqa: F401  # registers its evaluator
from hone.evaluation.base import EvalInputItem
from hone.evaluation.rule import Rule, Verdict, expected_of, parsed, rule_evaluator, same, text
from hone.workflow.paths import json_path, values_at

_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?:[eE][-+]?\d+)?")
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")


class ExactMatch(Rule, name="exact_match"):
    """1 if the output equals the expected output; JSON is compared by value."""

    ignore_case: bool = False
    strip: bool = True
    """Ignore white space around the text."""

    def verdict(self, item: EvalInputItem) -> Verdict:
        output, expected = item.output_obj, expected_of(item)
        if isinstance(expected, dict | list) or isinstance(output, dict | list):
            try:
                return float(same(parsed(output), parsed(expected))), None
            except json.JSONDecodeError:
                return 0.0, "one side is JSON, the other is not"
        return float(self._normalized(output) == self._normalized(expected)), None

    def _normalized(self, value: Any) -> str:
        stripped = text(value).strip() if self.strip else text(value)
        return stripped.casefold() if self.ignore_case else stripped


class Contains(Rule, name="contains"):
    """1 if the output contains the expected text, or each of a list of texts."""

    substrings: list[str] = Field(default_factory=list)
    """Look for these instead of the expected output."""
    match: Literal["all", "any"] = "all"
    """Whether all of several texts must occur, or any of them."""
    ignore_case: bool = False

    @property
    def needs_answer(self) -> bool:
        return not self.substrings

    def verdict(self, item: EvalInputItem) -> Verdict:
        wanted = self.substrings or expected_of(item)
        wanted = [text(part) for part in (wanted if isinstance(wanted, list) else [wanted])]
        if not wanted:
            raise ConfigError(f"item {item.id!r}: expects an empty list of texts")
        output = text(item.output_obj)
        fold = str.casefold if self.ignore_case else str
        missing = [part for part in wanted if fold(part) not in fold(output)]
        passed = not missing if self.match == "all" else len(missing) < len(wanted)
        return float(passed), {"missing": missing} if missing else None


def _compiles(pattern: str | None) -> str | None:
    if pattern is not None:
        _compiled(pattern, 0)
    return pattern


def _compiled(pattern: str, flags: int) -> re.Pattern[str]:
    try:
        return re.compile(pattern, flags)
    except re.error as error:
        raise ConfigError(f"{pattern!r} is not a regular expression: {error}") from None


class Regex(Rule, name="regex"):
    """1 if the output matches a regular expression, or if a group captures the expected output."""

    pattern: Annotated[str | None, AfterValidator(_compiles)] = None
    """The regular expression; the expected output if not set."""
    match: Literal["search", "full"] = "search"
    """Search the output for a match, or match all of it (white space around it aside)."""
    group: int | str | None = None
    """The group whose text must equal the expected output."""
    ignore_case: bool = False

    @property
    def needs_answer(self) -> bool:
        return not self.pattern or self.group is not None

    def verdict(self, item: EvalInputItem) -> Verdict:
        flags = re.DOTALL | (re.IGNORECASE if self.ignore_case else 0)
        pattern = _compiled(self.pattern or text(expected_of(item)), flags)
        output = text(item.output_obj)
        full = self.match == "full"
        match = pattern.fullmatch(output.strip()) if full else pattern.search(output)
        if match is None:
            return 0.0, f"no match of {pattern.pattern!r}"
        if self.group is None:
            return 1.0, {"matched": match.group()}
        try:
            captured = match.group(self.group) or ""
        except IndexError:
            raise ConfigError(
                f"group: {pattern.pattern!r} has no group {self.group!r}; there are "
                f"{[*range(1, pattern.groups + 1), *pattern.groupindex]}"
            ) from None
        wanted = text(expected_of(item)).strip()
        fold = str.casefold if self.ignore_case else str
        return float(fold(captured.strip()) == fold(wanted)), {"captured": captured}


class Numeric(Rule, name="numeric"):
    """1 if a number in the output is close to the expected number."""

    tolerance: float = Field(default=1e-6, ge=0)
    """Maximum absolute difference."""
    relative_tolerance: float = Field(default=0.0, ge=0)
    """Maximum difference relative to the expected number; the larger of the two limits applies."""
    which: Literal["last", "first", "whole"] = "last"
    """The number of the output to compare; `whole`: the output must be a number and nothing else."""

    def verdict(self, item: EvalInputItem) -> Verdict:
        expected = _number(expected_of(item), "whole")
        if expected is None:
            raise ConfigError(
                f"item {item.id!r}: expects {item.expected_output_obj!r}, which is not a number"
            )
        number = _number(item.output_obj, self.which)
        if number is None:
            return 0.0, "no number in the output"
        near = max(self.tolerance, self.relative_tolerance * abs(expected))
        return float(abs(number - expected) <= near), {"number": number, "expected": expected}


def _number(value: Any, which: str) -> float | None:
    if isinstance(value, int | float):
        return float(value) if math.isfinite(value) else None
    output = text(value).strip().replace("\N{MINUS SIGN}", "-")
    if which == "whole":
        bare = output.strip("$%").replace(",", "").strip()
        numbers = [bare] if _NUMBER.fullmatch(bare) else []
    else:
        numbers = _NUMBER.findall(output)
    numbers = [number for number in numbers if any(c.isdigit() for c in number)]
    if not numbers:
        return None
    chosen = float(numbers[0 if which == "first" else -1].replace(",", ""))
    return chosen if math.isfinite(chosen) else None


class JsonMatch(Rule, name="json_match"):
    """The share of JSONPaths at which the output and the expected JSON are equal."""

    paths: list[Annotated[str, AfterValidator(json_path)]] = Field(
        default_factory=lambda: ["$"], min_length=1
    )
    """JSONPaths (RFC 9535); `$` compares everything."""
    match: Literal["share", "all"] = "share"
    """`all`: 1 only if they are equal at every path."""
    tolerance: float = Field(default=0.0, ge=0)
    """Maximum difference between numbers that count as equal."""

    def verdict(self, item: EvalInputItem) -> Verdict:
        try:
            expected = parsed(expected_of(item))
        except json.JSONDecodeError as error:
            raise ConfigError(f"item {item.id!r}: what it expects is not JSON: {error}") from None
        try:
            output = parsed(item.output_obj)
        except json.JSONDecodeError as error:
            return 0.0, f"the output is not JSON: {error}"
        differing = [
            path
            for path in self.paths
            if not same(values_at(path, output), values_at(path, expected), self.tolerance)
        ]
        share = 1 - len(differing) / len(self.paths)
        value = share if self.match == "share" else float(not differing)
        return value, {"differing": differing} if differing else None


class F1(Rule, name="f1"):
    """Harmonic mean of precision and recall over words, case, punctuation and articles aside.

    With a list of expected texts, the best score counts.
    """

    def verdict(self, item: EvalInputItem) -> Verdict:
        expected = expected_of(item)
        wanted = expected if isinstance(expected, list) else [expected]
        if not wanted:
            raise ConfigError(f"item {item.id!r}: expects an empty list of texts")
        words = _words(text(item.output_obj))
        return max(_f1(words, _words(text(answer))) for answer in wanted), None


def _words(text: str) -> list[str]:
    bare = text.casefold().translate(str.maketrans("", "", string.punctuation))
    return _ARTICLES.sub(" ", bare).split()


def _f1(words: list[str], wanted: list[str]) -> float:
    shared = (Counter(words) & Counter(wanted)).total()
    if not words or not wanted:
        return float(words == wanted)
    return 2 * shared / (len(words) + len(wanted))


for _rule in (ExactMatch, Contains, Regex, Numeric, JsonMatch, F1):
    register_evaluator(config_type=_rule)(rule_evaluator)
