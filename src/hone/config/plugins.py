"""Import the modules that register components: hone's own, and those of installed plugins.

In:   the entry points of group `hone.components`; those of NeMo Agent Toolkit, where it is installed
Out:  a filled registry

A plugin that cannot be imported does not stop a run that does not need it. The error about an
unknown `_type` repeats the reason, because that is when a user needs it. The toolkit is imported
only for a `_type` that hone does not have, because importing it takes seconds.
"""

import logging
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version
from typing import Any

from pydantic import ValidationInfo

GROUP = "hone.components"
TOOLKIT = "nvidia-nat-core"
"""The package of NeMo Agent Toolkit."""

BUILT_IN = (
    "hone.workflow.python",
    "hone.workflow.command",
    "hone.workflow.http",
    "hone.workflow.langgraph",
    "hone.workflow.adk",
    "hone.workflow.llama_index",
    "hone.workflow.llm",
    "hone.evaluation.datasets",
    "hone.evaluation.evaluators",
    "hone.evaluation.judge",
    "hone.evaluation.ruler",
    "hone.finetune.builder",
    "hone.finetune.adapter",
    "hone.finetune.trainer",
    "hone.sinks.wandb",
    "hone.sinks.langfuse",
    "hone.sinks.openpipe",
    "hone.sinks.mlflow",
    "hone.sinks.tensorboard",
    "hone.sinks.trackio",
    "hone.sinks.otel",
    "hone.finetune.dataset_builder",
    "hone.finetune.objectives",
)

logger = logging.getLogger(__name__)


@cache
def discover() -> tuple[str, ...]:
    """Import them all, once; returns one message for each plugin that failed."""
    for module in BUILT_IN:
        import_module(module)
    return load_group(GROUP)


def load_group(group: str) -> tuple[str, ...]:
    """Import the modules of a group of entry points; returns one message for each that failed."""
    failed = []
    for entry in sorted(entry_points(group=group), key=lambda e: e.name):
        reason = _load(entry)
        if reason is not None:
            failed.append(reason)
            logger.warning("%s", reason)
    return tuple(failed)


@cache
def is_toolkit_installed() -> bool:
    """Whether NeMo Agent Toolkit is installed in this environment."""
    try:
        return bool(version(TOOLKIT))
    except PackageNotFoundError:
        return False


@cache
def load_toolkit() -> tuple[str, ...] | None:
    """Register the components of NeMo Agent Toolkit, once; None where it is not installed.

    Returns one message for each of its plugins that failed.
    """
    discover()  # first, so that hone and its plugins get their names
    if not is_toolkit_installed():
        return None
    return import_module("hone.nat.components").register()


def check_toolkit_section(value: Any, info: ValidationInfo) -> Any:
    """A section of NeMo Agent Toolkit, checked by the toolkit; an empty one needs no toolkit."""
    if not value:
        return {}
    if load_toolkit() is None:
        raise ValueError(
            "belongs to NeMo Agent Toolkit, which is not installed in this environment: pip install "
            "'hone-rl[nat]', or remove it and do the same in the code of your function"
        )
    import_module("hone.nat.document").check_section(info.field_name, value)
    return value


def _load(entry: EntryPoint) -> str | None:
    try:
        entry.load()
    except Exception as error:  # noqa: BLE001  # a third party's module may raise anything
        package = entry.dist.name if entry.dist else "?"
        return (
            f"plugin {entry.name!r} of package {package!r} could not be imported "
            f"({entry.value}: {type(error).__name__}: {error})"
        )
    return None
