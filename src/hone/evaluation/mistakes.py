"""Mistakes of evaluators and rows that show before anything runs.

In:   the configuration of an evaluator; the items of a dataset
Out:  what is wrong, as text; None if nothing is

A reward with a wrong signature, or without the answer it compares with, fails on every rollout, and
each rollout has been paid for by then. The user's modules are imported; no function is called.
"""

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path

from hone.config.base import EvaluatorBaseConfig
from hone.errors import ConfigError
from hone.evaluation.base import EvalInputItem
from hone.evaluation.python import PythonEvaluatorConfig, parts_of
from hone.evaluation.rule import Rule
from hone.workflow.target import load_target

ROWS_SHOWN = 5


def signature_mistake(config: EvaluatorBaseConfig, directory: Path) -> str | None:
    """Why hone cannot call the evaluator's function; None also for one that cannot be loaded.

    `directory`: that of the YAML.
    """
    function = _function(config, directory)
    if not isinstance(config, PythonEvaluatorConfig) or not callable(function):
        return None
    arguments = {*config.args, *(["llm"] if config.llm is not None else [])}
    try:
        parts_of(config.target, function, arguments)
    except ConfigError as error:
        return str(error)
    return None


def needs_answer(config: EvaluatorBaseConfig, directory: Path) -> str | None:
    """What requires the row's expected output, for a message; None if it is not required."""
    if isinstance(config, Rule):
        return f"_type: {config.type_name}" if config.needs_answer else None
    function = _function(config, directory)
    if not isinstance(config, PythonEvaluatorConfig) or not callable(function):
        return None
    try:
        expected = inspect.signature(function).parameters.get("expected")
    except (TypeError, ValueError):
        return None
    if expected is None or expected.name in config.args:
        return None
    is_required = expected.default is inspect.Parameter.empty
    return f"{config.target} takes `expected`" if is_required else None


def missing_answers(
    items: Sequence[EvalInputItem], column: str, needed_by: str, where: str
) -> str | None:
    """A message about rows without an expected output, with their numbers and ids."""
    missing = [item for item in items if item.expected_output_obj is None]
    if not missing:
        return None
    shown = [
        f"row {item.row_number} (id {item.id!r})" if item.row_number else f"id {item.id!r}"
        for item in missing[:ROWS_SHOWN]
    ]
    more = ", ..." if len(missing) > ROWS_SHOWN else ""
    default = ", or give `expected` a default" if needed_by.endswith("`expected`") else ""
    return (
        f"{where}: no {column!r} in {len(missing)} of {len(items)} rows, and {needed_by}: "
        f"{', '.join(shown)}{more}. Fill the column or remove these rows{default}."
    )


def check_evaluators(evaluators: Mapping[str, EvaluatorBaseConfig], directory: Path) -> None:
    """Raise ConfigError for the first evaluator with a wrong signature."""
    for name, config in evaluators.items():
        if (message := signature_mistake(config, directory)) is not None:
            raise ConfigError(f"eval.evaluators.{name}: {message}")


def check_answers(
    items: Sequence[EvalInputItem],
    evaluators: Mapping[str, EvaluatorBaseConfig],
    directory: Path,
    *,
    column: str,
    where: str,
) -> None:
    """Raise ConfigError if an evaluator requires an answer that a row does not have."""
    for name, config in evaluators.items():
        needed_by = needs_answer(config, directory)
        message = needed_by and missing_answers(items, column, needed_by, where)
        if message:
            raise ConfigError(f"eval.evaluators.{name}: {message}")


def _function(config: EvaluatorBaseConfig, directory: Path) -> object:
    """The user's function; None if there is none, or it cannot be loaded."""
    if not isinstance(config, PythonEvaluatorConfig):
        return None
    try:
        return load_target(config.target, directory)
    except ConfigError:
        return None  # it is reported elsewhere
