"""`_type: langgraph`: a LangGraph graph or LangChain agent as the workflow.

In:   `target: module:graph`: a compiled graph, a StateGraph, or a function that returns one
Out:  a FunctionInfo that runs the graph on one input and returns the text of its last message

The recipe:

    def graph(llm):
        model = ChatOpenAI(base_url=llm.base_url, api_key=llm.api_key, model=llm.model)
        return create_agent(model, tools=[search], system_prompt="...")

Calls carry the path of the nodes that make them, outermost first: `<workflow>.model` in an agent of
LangChain, `<workflow>.research.model` in a graph that has that agent as its node `research`. Each
rollout has its own LangGraph thread, so a checkpointer does not mix them.
"""
# Installed with its extra only.
# pyright: reportMissingImports=false

from collections.abc import AsyncIterator, Mapping
from typing import Any

from pydantic import Field
from pydantic_core import from_json

from hone.capture.scope import called_by
from hone.config.build import Builder
from hone.config.registry import register_function
from hone.errors import PolicyFailure
from hone.workflow.fit import as_text
from hone.workflow.framework import Agents, FrameworkConfig, content_text, require, run_name
from hone.workflow.function import FunctionInfo

MESSAGES = "messages"


class LangGraphConfig(FrameworkConfig, name="langgraph"):
    """A LangGraph graph, run once per rollout."""

    input_key: str | None = MESSAGES
    """The key of the graph's state that gets the input: as a user message if it is `messages`, else
    as it is. null: the input is the whole state, as JSON."""
    output_key: str | None = MESSAGES
    """The key of the final state that is the output: the text of the last message if it is
    `messages`, else its value. null: the whole state."""
    recursion_limit: int | None = Field(default=None, gt=0)
    """Maximum number of steps of the graph; LangGraph's default if not set. A rollout that reaches it
    is a policy failure (`step_limit`)."""


@register_function(config_type=LangGraphConfig)
async def langgraph(config: LangGraphConfig, builder: Builder) -> AsyncIterator[FunctionInfo]:
    """A LangGraph graph or a LangChain agent."""
    require("langgraph", "langchain")
    agents = await Agents.load(
        config,
        builder,
        is_agent=lambda target: hasattr(target, "ainvoke") or _is_builder(target),
        kind="a compiled graph or a StateGraph",
        prepare=lambda graph: graph.compile() if _is_builder(graph) else graph,
    )

    async def run(input: Any) -> Any:
        """Runs the graph on one input."""
        from langgraph.errors import GraphRecursionError

        graph = await agents.get()
        options: dict[str, Any] = {"configurable": {"thread_id": run_name()}}
        if config.recursion_limit is not None:
            options["recursion_limit"] = config.recursion_limit
        try:
            with called_by(_node):
                state = await graph.ainvoke(_state(config.input_key, input), options)
        except GraphRecursionError as error:
            raise PolicyFailure(str(error), reason="step_limit") from error
        return _output(config.output_key, state)

    yield FunctionInfo.from_fn(run, description=config.description)


def _is_builder(target: Any) -> bool:
    return (
        hasattr(target, "compile") and hasattr(target, "add_node") and not isinstance(target, type)
    )


def _state(key: str | None, input: Any) -> Any:
    if key is None:
        return from_json(input) if isinstance(input, str) else input
    if key == MESSAGES:
        return {MESSAGES: [{"role": "user", "content": as_text(input)}]}
    return {key: input}


def _output(key: str | None, state: Any) -> Any:
    if key is None or not isinstance(state, Mapping):
        return state
    value = state.get(key)
    if key == MESSAGES:
        return content_text(value[-1].content) if value else ""
    return value


def _node() -> str:
    """The path of the node that runs, through subgraphs; empty outside any."""
    from langchain_core.runnables.config import var_child_runnable_config

    config = var_child_runnable_config.get() or {}
    # NODE:TASK, joined by | from the outermost graph to the innermost.
    namespace = config.get("metadata", {}).get("langgraph_checkpoint_ns", "")
    return ".".join(part.partition(":")[0].replace(".", "_") for part in namespace.split("|"))
