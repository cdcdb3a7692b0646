"""Microsoft Agent Framework's agent, which calls /v1/responses unless told otherwise."""
# pyright: reportMissingImports=false

import talk
from agent_framework import Agent
from agent_framework.openai import OpenAIChatClient, OpenAIChatCompletionClient
from talk import NAMED, SYSTEM, TOOLS, Report


async def answer(question: str, llm) -> str:
    client = OpenAIChatClient(model=llm.model, base_url=llm.base_url, api_key=llm.api_key)
    agent = Agent(client, instructions=SYSTEM, tools=list(TOOLS.values()))
    return (await agent.run(question)).messages[-1].text


def build(llm, kind=OpenAIChatClient, **options) -> Agent:
    client = kind(model=llm.model, base_url=llm.base_url, api_key=llm.api_key, **options)
    return Agent(client, instructions=SYSTEM, tools=list(TOOLS.values()))


async def answer_stream(question: str, llm) -> str:
    return await streamed(build(llm), question)


async def streamed(agent: Agent, question: str) -> str:
    stream = agent.run(question, stream=True)
    async for _ in stream:
        pass
    return (await stream.get_final_response()).messages[-1].text


async def answer_chat(question: str, llm) -> str:
    return (await build(llm, OpenAIChatCompletionClient).run(question)).messages[-1].text


async def answer_chat_stream(question: str, llm) -> str:
    return await streamed(build(llm, OpenAIChatCompletionClient), question)


async def answer_named(question: str, llm) -> str:
    return (await build(llm, default_headers=NAMED).run(question)).messages[-1].text


async def typed(question: str, llm) -> Report:
    client = OpenAIChatClient(model=llm.model, base_url=llm.base_url, api_key=llm.api_key)
    return (await Agent(client).run(question, options={"response_format": Report})).value


if __name__ == "__main__":
    talk.main(
        {
            "async": answer,
            "async-stream": answer_stream,
            "chat": answer_chat,
            "chat-stream": answer_chat_stream,
            "named": answer_named,
        },
        typed,
    )
