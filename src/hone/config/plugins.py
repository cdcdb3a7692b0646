"""Import the modules that register components: hone's own, and those of installed plugins.

In:   the entry points of group `hone.components`
Out:  a filled registry

A plugin that cannot be imported does not stop a run that does not need it. The error about an
unknown `_type` repeats the reason, because that is when somebody looks for it.
"""

import logging
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points

GROUP = "hone.components"

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
)

logger = logging.getLogger(__name__)


@cache
def discover() -> tuple[str, ...]:
    """Import them all, once; returns one message for each plugin that failed."""
    for module in BUILT_IN:
        import_module(module)
    failed = []
    for entry in sorted(entry_points(group=GROUP), key=lambda e: e.name):
        reason = _load(entry)
        if reason is not None:
            failed.append(reason)
            logger.warning("%s", reason)
    return tuple(failed)


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
