"""LangChain's agent, which is a LangGraph graph, over ChatOpenAI."""
# pyright: reportMissingImports=false

from typing import Any

import talk
from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from talk import SYSTEM, TOOLS, Report


def graph(llm):
    model = ChatOpenAI(base_url=llm.base_url, api_key=llm.api_key, model=llm.model)
    return create_agent(model, tools=list(TOOLS.values()), system_prompt=SYSTEM)


def state(question: str) -> dict[str, Any]:
    return {"messages": [("user", question)]}


async def answer(question: str, llm) -> str:
    return (await graph(llm).ainvoke(state(question)))["messages"][-1].text


def answer_sync(question: str, llm) -> str:
    return graph(llm).invoke(state(question))["messages"][-1].text


async def answer_stream(question: str, llm) -> str:
    text = ""
    async for chunk, _ in graph(llm).astream(state(question), stream_mode="messages"):
        text = text + chunk.text if chunk.type == "AIMessageChunk" else ""
    return text


def answer_stream_sync(question: str, llm) -> str:
    text = ""
    for chunk, _ in graph(llm).stream(state(question), stream_mode="messages"):
        text = text + chunk.text if chunk.type == "AIMessageChunk" else ""
    return text


async def typed(question: str, llm) -> Report:
    model = ChatOpenAI(base_url=llm.base_url, api_key=llm.api_key, model=llm.model)
    return await model.with_structured_output(Report).ainvoke(question)


if __name__ == "__main__":
    talk.main(
        {
            "async": answer,
            "sync": answer_sync,
            "async-stream": answer_stream,
            "sync-stream": answer_stream_sync,
        },
        typed,
    )
