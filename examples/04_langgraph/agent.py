"""The clerk as a LangGraph graph: ask the model, run the tools it calls, and ask again.

In:   a customer's question, as the user message of the graph's state
Out:  the clerk's answer, as the last message of the state

There is no training code here. `llm` is the model in training; in production, give ChatOpenAI your
own address.
"""
# pyright: reportMissingImports=false

from typing import Any

from langchain_core.messages import SystemMessage
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from shop import INSTRUCTIONS, price, stock

TOOLS = [price, stock]


def graph(llm: Any) -> StateGraph[MessagesState]:
    """The ReAct loop: `model` -> `tools` -> `model` until the model calls no tool."""
    model = ChatOpenAI(base_url=llm.base_url, api_key=llm.api_key, model=llm.model, **llm.params)
    # An untrained small model would not call a tool by itself, nor only with the item.
    first = model.bind_tools(TOOLS, tool_choice="any", strict=True)
    later = model.bind_tools(TOOLS, strict=True)

    async def ask(state: MessagesState) -> dict[str, Any]:
        messages = state["messages"]
        chosen = first if len(messages) == 1 else later
        return {"messages": await chosen.ainvoke([SystemMessage(INSTRUCTIONS), *messages])}

    loop = StateGraph(MessagesState)
    loop.add_node("model", ask)
    loop.add_node("tools", ToolNode(TOOLS))
    loop.add_edge(START, "model")
    loop.add_conditional_edges("model", tools_condition)
    loop.add_edge("tools", "model")
    return loop
