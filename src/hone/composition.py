"""The composition root: import every module of hone that registers a component of the YAML.

In:   nothing
Out:  a registry with hone's own workflows, datasets, evaluators, builders, adapters, trainers and
      loggers; the bridge to NeMo Agent Toolkit

Loaded through hone's entry point of group `hone.components` (pyproject.toml) at the first use of a
configuration, before the entry points of plugins. No module imports it: what it imports would
otherwise depend on itself.
"""

from typing import Any

from hone.config import plugins
from hone.evaluation import datasets, evaluators, judge, ruler
from hone.finetune import adapter, builder, dataset_builder, objectives, trainer
from hone.integrations.frameworks import adk, langgraph, llama_index
from hone.integrations.loggers import langfuse, mlflow, openpipe, otel, tensorboard, trackio, wandb
from hone.workflow import command, http, llm, python

__all__ = [
    "NemoToolkit",
    "adapter",
    "adk",
    "builder",
    "command",
    "dataset_builder",
    "datasets",
    "evaluators",
    "http",
    "judge",
    "langfuse",
    "langgraph",
    "llama_index",
    "llm",
    "mlflow",
    "objectives",
    "openpipe",
    "otel",
    "python",
    "ruler",
    "tensorboard",
    "trackio",
    "trainer",
    "wandb",
]


class NemoToolkit:
    """Imports NeMo Agent Toolkit, which takes seconds, when a document needs it."""

    def register(self) -> tuple[str, ...]:
        from hone.integrations.nat import components

        return components.register()

    def check_section(self, name: str, value: Any) -> None:
        from hone.integrations.nat import document

        document.check_section(name, value)


plugins.register_toolkit(NemoToolkit())
