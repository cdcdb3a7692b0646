"""Agents of three frameworks, as a user writes them; framework_rollouts.py runs them."""
# pyright: reportMissingImports=false, reportMissingModuleSource=false

import asyncio
import os
from pathlib import Path
from typing import Any


def weather(city: str) -> str:
    """Look up the weather in a city."""
    return f"sun in {city}"


def add_line(file: str, line: str) -> None:
    with Path(file).open("a") as opened:
        opened.write(f"{line}\n")


# ---- LangGraph ----------------------------------------------------------------------------------


def react(llm: Any) -> Any:
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(base_url=llm.base_url, api_key=llm.api_key, model=llm.model)
    return create_agent(model, tools=[weather], system_prompt="Be brief.")


def nested(base_url: str, api_key: str, model: str, note: str = "") -> Any:
    """A StateGraph: a plain node, then a subgraph with an async one, kept in a checkpointer."""
    from langchain_openai import ChatOpenAI
    from langgraph.checkpoint.memory import InMemorySaver
    from langgraph.graph import START, MessagesState, StateGraph

    chat = ChatOpenAI(base_url=base_url, api_key=api_key, model=model)

    def plan(state: MessagesState) -> Any:
        assert len(state["messages"]) == 1, "another rollout's thread"
        return {"messages": [chat.invoke(state["messages"])]}

    async def act(state: MessagesState) -> Any:
        return {"messages": [await chat.ainvoke(state["messages"]), ("ai", note)]}

    inner = StateGraph(MessagesState).add_node("act", act).add_edge(START, "act").compile()
    outer = StateGraph(MessagesState).add_node("plan", plan).add_node("team", inner)
    outer = outer.add_edge(START, "plan").add_edge("plan", "team")
    return outer.compile(checkpointer=InMemorySaver())


def broken(llm: Any) -> Any:
    raise KeyError("no such tool")


def endless(llm: Any) -> Any:
    from langgraph.graph import START, StateGraph

    graph = StateGraph(dict).add_node("again", lambda state: state)
    return graph.add_edge(START, "again").add_edge("again", "again")


# ---- Google ADK ---------------------------------------------------------------------------------


def _lite(llm: Any) -> Any:
    from google.adk.models.lite_llm import LiteLlm

    return LiteLlm(f"openai/{llm.model}", api_base=llm.base_url, api_key=llm.api_key)


def adk_helper(llm: Any) -> Any:
    from google.adk.agents import LlmAgent

    return LlmAgent(name="helper", model=_lite(llm), instruction="Be brief.", tools=[weather])


def adk_team(llm: Any) -> Any:
    from google.adk.agents import LlmAgent, ParallelAgent, SequentialAgent
    from google.adk.apps import App

    a, b, last = (LlmAgent(name=name, model=_lite(llm)) for name in ("a", "b", "last"))
    both = ParallelAgent(name="both", sub_agents=[a, b])
    return App(name="app", root_agent=SequentialAgent(name="team", sub_agents=[both, last]))


def adk_tools(llm: Any, note: str, own: bool = False) -> Any:
    """An agent with a toolset, which notes that it is closed; or a runner of the user's own."""
    from google.adk.agents import LlmAgent
    from google.adk.runners import InMemoryRunner
    from google.adk.tools.base_toolset import BaseToolset
    from google.adk.tools.function_tool import FunctionTool

    class Tools(BaseToolset):
        async def get_tools(self, readonly_context: Any = None) -> Any:
            return [FunctionTool(weather)]

        async def close(self) -> None:
            add_line(note, "closed")

    agent = LlmAgent(name="helper", model=_lite(llm), tools=[Tools()])
    return InMemoryRunner(agent=agent, app_name="own") if own else agent


# ---- LlamaIndex ---------------------------------------------------------------------------------


def _like(llm: Any) -> Any:
    from llama_index.llms.openai_like import OpenAILike

    kind = {"is_chat_model": True, "is_function_calling_model": True}
    return OpenAILike(model=llm.model, api_base=llm.base_url, api_key=llm.api_key, **kind)


def index_helper(llm: Any) -> Any:
    from llama_index.core.agent.workflow import FunctionAgent

    return FunctionAgent(name="helper", llm=_like(llm), tools=[weather], system_prompt="Be brief.")


async def index_flow(llm: Any) -> Any:
    from llama_index.core.workflow import StartEvent, StopEvent, Workflow, step

    model = _like(llm)

    class Flow(Workflow):
        @step
        async def think(self, ev: StartEvent) -> StopEvent:
            return StopEvent(result=(await model.acomplete(ev.question)).text)

    return Flow()


def index_waits(note: str) -> Any:
    """A step that does not end by itself, and notes that it ends."""
    from llama_index.core.workflow import StartEvent, StopEvent, Workflow, step

    class Waits(Workflow):
        @step
        async def wait(self, ev: StartEvent) -> StopEvent:
            add_line(note, "began")
            try:
                await asyncio.Event().wait()
            finally:
                add_line(note, "ended")
            return StopEvent()

    return Waits(timeout=None)


# ---- a client that is built when the module is loaded -------------------------------------------

if os.environ.get("HONE_TEST_AT_IMPORT"):
    from langchain_openai import ChatOpenAI
    from langgraph.graph import START, MessagesState, StateGraph

    _model = ChatOpenAI(model=os.environ["HONE_MODEL"])

    async def _ask(state: MessagesState) -> Any:
        return {"messages": [await _model.ainvoke(state["messages"])]}

    at_import = StateGraph(MessagesState).add_node("ask", _ask).add_edge(START, "ask")
