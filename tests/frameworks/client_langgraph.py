"""LangChain's agent, which is a LangGraph graph, over ChatOpenAI."""
# pyright: reportMissingImports=false

import talk
from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from talk import SYSTEM, TOOLS


async def answer(question: str, llm) -> str:
    model = ChatOpenAI(base_url=llm.base_url, api_key=llm.api_key, model=llm.model)
    agent = create_agent(model, tools=list(TOOLS.values()), system_prompt=SYSTEM)
    state = await agent.ainvoke({"messages": [("user", question)]})
    return state["messages"][-1].text


def answer_sync(question: str, llm) -> str:
    model = ChatOpenAI(base_url=llm.base_url, api_key=llm.api_key, model=llm.model)
    agent = create_agent(model, tools=list(TOOLS.values()), system_prompt=SYSTEM)
    return agent.invoke({"messages": [("user", question)]})["messages"][-1].text


async def answer_stream(question: str, llm) -> str:
    model = ChatOpenAI(base_url=llm.base_url, api_key=llm.api_key, model=llm.model)
    agent = create_agent(model, tools=list(TOOLS.values()), system_prompt=SYSTEM)
    text = ""
    async for chunk, _ in agent.astream({"messages": [("user", question)]}, stream_mode="messages"):
        text = text + chunk.text if chunk.type == "AIMessageChunk" else ""
    return text


def answer_stream_sync(question: str, llm) -> str:
    model = ChatOpenAI(base_url=llm.base_url, api_key=llm.api_key, model=llm.model)
    agent = create_agent(model, tools=list(TOOLS.values()), system_prompt=SYSTEM)
    text = ""
    for chunk, _ in agent.stream({"messages": [("user", question)]}, stream_mode="messages"):
        text = text + chunk.text if chunk.type == "AIMessageChunk" else ""
    return text


if __name__ == "__main__":
    talk.main(
        {
            "async": answer,
            "sync": answer_sync,
            "async-stream": answer_stream,
            "sync-stream": answer_stream_sync,
        }
    )
