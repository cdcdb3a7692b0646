"""`_type: llama_index`: a LlamaIndex agent or workflow as the workflow.

In:   `target: module:agent`: a FunctionAgent, an AgentWorkflow, any Workflow, or a function that
      returns one
Out:  a FunctionInfo that runs it on one input and returns the text of its response

The recipe:

    def agent(llm):
        model = OpenAILike(model=llm.model, api_base=llm.base_url, api_key=llm.api_key,
                           is_chat_model=True, is_function_calling_model=True)
        return FunctionAgent(name="helper", llm=model, tools=[search], system_prompt="...")

Calls carry the name of the agent that makes them: `<workflow>.helper`; in a workflow without agents,
the name of the step. LlamaIndex's own instrumentation tells which of them runs.
"""
# Installed with its extra only.
# pyright: reportMissingImports=false

import asyncio
from collections.abc import AsyncIterator
from contextvars import ContextVar
from typing import Any

from pydantic import Field

from hone.capture.scope import called_by
from hone.config.build import Builder
from hone.config.registry import register_function
from hone.errors import AgentTimeout, PolicyFailure
from hone.workflow.fit import as_text
from hone.workflow.framework import Agents, FrameworkConfig, content_text, require
from hone.workflow.function import FunctionInfo

USER_MSG = "user_msg"
_MAX_ITERATIONS = "max iterations"

_step: ContextVar[str] = ContextVar("hone_llama_index_step", default="")
"""Name of the agent or the step that runs."""


class LlamaIndexConfig(FrameworkConfig, name="llama_index"):
    """A LlamaIndex agent or workflow, run once per rollout."""

    input_key: str = USER_MSG
    """The argument of `run` that gets the input: as text if it is `user_msg`, else as it is."""
    max_iterations: int | None = Field(default=None, gt=0)
    """Maximum number of steps of an agent; LlamaIndex's default if not set. A rollout that reaches it
    is a policy failure (`step_limit`)."""


@register_function(config_type=LlamaIndexConfig)
async def llama_index(config: LlamaIndexConfig, builder: Builder) -> AsyncIterator[FunctionInfo]:
    """A LlamaIndex agent or workflow."""
    require("llama_index.core", "llama-index")
    from llama_index.core.instrumentation import get_dispatcher
    from llama_index.core.workflow import Workflow
    from workflows.errors import WorkflowRuntimeError, WorkflowTimeoutError

    agents = await Agents.load(
        config,
        builder,
        is_agent=lambda target: isinstance(target, Workflow),
        kind="an agent or a Workflow of llama_index",
    )
    limits = {} if config.max_iterations is None else {"max_iterations": config.max_iterations}

    async def run(input: Any) -> Any:
        """Runs the agent on one input."""
        workflow = await agents.get()
        value = as_text(input) if config.input_key == USER_MSG else input
        try:
            with called_by(_step.get):
                handler = workflow.run(**{config.input_key: value}, **limits)
                try:
                    return _output(await asyncio.shield(handler))
                except asyncio.CancelledError:
                    await handler.cancel_run()  # steps are separate tasks, which would keep running
                    raise
        except WorkflowTimeoutError as error:
            raise AgentTimeout(str(error)) from error
        except WorkflowRuntimeError as error:
            if _MAX_ITERATIONS in str(error).lower():
                raise PolicyFailure(str(error), reason="step_limit") from error
            raise

    dispatcher, names = get_dispatcher(), _step_names()
    dispatcher.add_span_handler(names)
    yield FunctionInfo.from_fn(run, description=config.description)
    dispatcher.span_handlers.remove(names)


def _output(result: Any) -> Any:
    """The text of an agent's response; of any other workflow, its result."""
    response = getattr(result, "response", None)
    if response is None or not hasattr(response, "blocks"):
        return result
    return content_text(response.content)


def _step_names() -> Any:
    from llama_index.core.instrumentation.span_handlers import BaseSpanHandler

    class StepNames(BaseSpanHandler[Any]):
        """Records which step of a workflow begins; keeps no spans."""

        def new_span(self, id_: str, bound_args: Any, *_: Any, **__: Any) -> None:
            # Called in the task of the step, before its code.
            event = bound_args.arguments.get("ev")
            if event is not None:
                method = id_.partition("-")[0].rpartition(".")[2]
                _step.set(getattr(event, "current_agent_name", None) or method)

        def prepare_to_exit_span(self, *_: Any, **__: Any) -> None:
            return None

        def prepare_to_drop_span(self, *_: Any, **__: Any) -> None:
            return None

    return StepNames()
