"""Run a workflow of NeMo Agent Toolkit inside a rollout.

In:   the toolkit's Workflow and an input; the open rollout
Out:  its output; the rollout's recorder holds the toolkit's intermediate steps

Model calls carry the path of the toolkit's functions, so `target_functions` selects them. A custom
event with a number under `value` in its metadata is also a `hone.step`: this is how toolkit
projects record the value of a step.
"""
# Installed with its extra only.
# pyright: reportMissingImports=false

from collections.abc import Callable, Mapping
from contextlib import suppress
from numbers import Real
from typing import Any

from nat.builder.context import Context
from nat.builder.workflow import Workflow
from nat.data_models.intermediate_step import IntermediateStep, IntermediateStepType
from nat.data_models.runtime_enum import RuntimeTypeEnum
from pydantic import BaseModel

from hone.capture.base import current
from hone.capture.scope import called_by, step
from hone.errors import ConfigError


async def run_workflow(workflow: Workflow, input: Any, *, as_text: bool = False) -> Any:
    """Run it once; `as_text` gives the output the form that the toolkit's evaluators expect."""
    if not workflow.has_single_output:
        raise ConfigError(
            "the function only streams its output; let it also return the whole output"
        )
    outer = len(Context.get().function_path)
    async with workflow.run(input, runtime_type=RuntimeTypeEnum.EVALUATE) as runner:
        runner.context.intermediate_step_manager.subscribe(_note)
        with called_by(_path_below(outer + 1)):  # hone names the function itself
            output = await runner.result()
        return _text(output, runner) if as_text else output


def _path_below(depth: int) -> Callable[[], str]:
    """Names the function that runs now, by the functions that called it."""
    return lambda: ".".join(n.replace(".", "_") for n in Context.get().function_path[depth:])


def _note(event: IntermediateStep) -> None:
    scope = current()
    if scope is None or scope.recorder is None:
        return
    scope.recorder.add_event(event.model_dump())
    payload = event.payload
    if payload.event_type == IntermediateStepType.CUSTOM_END:
        metadata = payload.metadata if isinstance(payload.metadata, Mapping) else {}
        value = metadata.get("value")
        number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else None
        rest = {str(k): held for k, held in metadata.items() if k not in ("name", "value")}
        step(payload.name or "custom", value=number, **rest)


def _text(output: Any, runner: Any) -> Any:
    """As `nat eval` does: text where the toolkit can convert it, a model as JSON."""
    with suppress(ValueError):
        output = runner.convert(output, to_type=str)
    return output.model_dump_json(indent=2) if isinstance(output, BaseModel) else output
