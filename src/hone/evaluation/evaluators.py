"""The built-in rewards that look at the output: exact_match, contains, regex, numeric, json_match, f1.

In:   what the workflow returned, and what the row expects
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
from hone.evaluation import calls as _calls  # noqa: F401  # registers what looks at the calls
from hone.evaluation import python as _python  # noqa: F401  # registers the user's functions
from hone.evaluation.base import EvalInputItem
from hone.evaluation.paths import json_path, values_at
from hone.evaluation.rule import Rule, Verdict, expected_of, parsed, rule_evaluator, same, text

_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?:[eE][-+]?\d+)?")
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")


class ExactMatch(Rule, name="exact_match"):
    """1 if the output equals what the row expects; JSON values are compared as values."""

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
        mine, theirs = self._form(output), self._form(expected)
        return float(mine == theirs), None

    def _form(self, value: Any) -> str:
        form = text(value)
        form = form.strip() if self.strip else form
        return form.casefold() if self.ignore_case else form


class Contains(Rule, name="contains"):
    """1 if the output contains what the row expects: a text, or each of a list of texts."""

    substrings: list[str] = Field(default_factory=list)
    """Look for these instead of what the row expects."""
    match: Literal["all", "any"] = "all"
    """Of several texts, how many must be there."""
    ignore_case: bool = False

    def verdict(self, item: EvalInputItem) -> Verdict:
        wanted = self.substrings or expected_of(item)
        wanted = [text(one) for one in (wanted if isinstance(wanted, list) else [wanted])]
        if not wanted:
            raise ConfigError(f"item {item.id!r}: expects an empty list of texts")
        said = text(item.output_obj)
        fold = str.casefold if self.ignore_case else str
        missing = [one for one in wanted if fold(one) not in fold(said)]
        held = not missing if self.match == "all" else len(missing) < len(wanted)
        return float(held), {"missing": missing} if missing else None


def _compiles(pattern: str | None) -> str | None:
    if pattern is not None:
        _compiled(pattern, 0)
    return pattern


def _compiled(pattern: str, flags: int) -> re.Pattern[str]:
    try:
        return re.compile(pattern, flags)
    except re.error as error:
        raise ConfigError(f"{pattern!r} is no regular expression: {error}") from None


class Regex(Rule, name="regex"):
    """1 if the output matches a regular expression, or if what it captures is the answer."""

    pattern: Annotated[str | None, AfterValidator(_compiles)] = None
    """What the row expects is the pattern if this is not set."""
    match: Literal["search", "full"] = "search"
    """Somewhere in the output, or the whole of it (white space around it aside)."""
    group: int | str | None = None
    """What this group captures must equal what the row expects."""
    ignore_case: bool = False

    def verdict(self, item: EvalInputItem) -> Verdict:
        flags = re.DOTALL | (re.IGNORECASE if self.ignore_case else 0)
        pattern = _compiled(self.pattern or text(expected_of(item)), flags)
        said = text(item.output_obj)
        found = pattern.search(said) if self.match == "search" else pattern.fullmatch(said.strip())
        if found is None:
            return 0.0, f"no match of {pattern.pattern!r}"
        if self.group is None:
            return 1.0, {"matched": found.group()}
        try:
            captured = found.group(self.group) or ""
        except IndexError:
            raise ConfigError(
                f"group: {pattern.pattern!r} has no group {self.group!r}; there are "
                f"{[*range(1, pattern.groups + 1), *pattern.groupindex]}"
            ) from None
        wanted = text(expected_of(item)).strip()
        fold = str.casefold if self.ignore_case else str
        return float(fold(captured.strip()) == fold(wanted)), {"captured": captured}


class Numeric(Rule, name="numeric"):
    """1 if a number in the output is near enough to the one the row expects."""

    tolerance: float = Field(default=1e-6, ge=0)
    """They may differ by so much."""
    relative_tolerance: float = Field(default=0.0, ge=0)
    """Or by so much of the expected one."""
    which: Literal["last", "first", "whole"] = "last"
    """Which number of the output counts; `whole`: the output must be nothing but one."""

    def verdict(self, item: EvalInputItem) -> Verdict:
        expected = _number(expected_of(item), "whole")
        if expected is None:
            raise ConfigError(
                f"item {item.id!r}: expects {item.expected_output_obj!r}, which is no number"
            )
        said = _number(item.output_obj, self.which)
        if said is None:
            return 0.0, "no number in the output"
        near = max(self.tolerance, self.relative_tolerance * abs(expected))
        return float(abs(said - expected) <= near), {"number": said, "expected": expected}


def _number(value: Any, which: str) -> float | None:
    if isinstance(value, int | float):
        return float(value) if math.isfinite(value) else None
    said = text(value).strip().replace("\N{MINUS SIGN}", "-")
    if which == "whole":
        bare = said.strip("$%").replace(",", "").strip()
        numbers = [bare] if _NUMBER.fullmatch(bare) else []
    else:
        numbers = [found.group() for found in _NUMBER.finditer(said)]
    numbers = [number for number in numbers if any(c.isdigit() for c in number)]
    if not numbers:
        return None
    chosen = float(numbers[0 if which == "first" else -1].replace(",", ""))
    return chosen if math.isfinite(chosen) else None


class JsonMatch(Rule, name="json_match"):
    """The share of JSONPaths at which the output, as JSON, has what the expected JSON has."""

    paths: list[Annotated[str, AfterValidator(json_path)]] = Field(
        default_factory=lambda: ["$"], min_length=1
    )
    """JSONPaths (RFC 9535); `$` compares everything."""
    match: Literal["share", "all"] = "share"
    """`all`: 1 only if every path agrees."""
    tolerance: float = Field(default=0.0, ge=0)
    """Numbers may differ by so much."""

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

    Of a list of expected texts the best counts.
    """

    def verdict(self, item: EvalInputItem) -> Verdict:
        expected = expected_of(item)
        wanted = expected if isinstance(expected, list) else [expected]
        if not wanted:
            raise ConfigError(f"item {item.id!r}: expects an empty list of texts")
        said = _words(text(item.output_obj))
        return max(_f1(said, _words(text(one))) for one in wanted), None


def _words(said: str) -> list[str]:
    bare = said.casefold().translate(str.maketrans("", "", string.punctuation))
    return _ARTICLES.sub(" ", bare).split()


def _f1(said: list[str], wanted: list[str]) -> float:
    shared = (Counter(said) & Counter(wanted)).total()
    if not said or not wanted:
        return float(said == wanted)
    return 2 * shared / (len(said) + len(wanted))


for _rule in (ExactMatch, Contains, Regex, Numeric, JsonMatch, F1):
    register_evaluator(config_type=_rule)(rule_evaluator)
