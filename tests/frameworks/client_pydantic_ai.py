"""Pydantic AI's agent, over Responses (its `openai:` models) and over Chat Completions."""
# pyright: reportMissingImports=false

import talk
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from talk import SYSTEM, TOOLS, Report


async def answer(question: str, llm) -> str:
    provider = OpenAIProvider(base_url=llm.base_url, api_key=llm.api_key)
    model = OpenAIResponsesModel(llm.model, provider=provider)
    agent = Agent(model, instructions=SYSTEM, tools=list(TOOLS.values()))
    return (await agent.run(question)).output


def build(llm, kind) -> Agent:
    provider = OpenAIProvider(base_url=llm.base_url, api_key=llm.api_key)
    return Agent(
        kind(llm.model, provider=provider), instructions=SYSTEM, tools=list(TOOLS.values())
    )


def answer_sync(question: str, llm) -> str:
    return build(llm, OpenAIResponsesModel).run_sync(question).output


async def answer_stream(question: str, llm) -> str:
    return (await build(llm, OpenAIResponsesModel).run(question, event_stream_handler=drain)).output


def answer_stream_sync(question: str, llm) -> str:
    agent = build(llm, OpenAIResponsesModel)
    return agent.run_sync(question, event_stream_handler=drain).output


async def drain(context, events) -> None:
    """With a handler the requests are streamed."""
    async for _ in events:
        pass


async def answer_chat(question: str, llm) -> str:
    return (await build(llm, OpenAIChatModel).run(question)).output


async def answer_chat_stream(question: str, llm) -> str:
    return (await build(llm, OpenAIChatModel).run(question, event_stream_handler=drain)).output


async def typed(question: str, llm) -> Report:
    provider = OpenAIProvider(base_url=llm.base_url, api_key=llm.api_key)
    agent = Agent(OpenAIResponsesModel(llm.model, provider=provider), output_type=Report)
    return (await agent.run(question)).output


if __name__ == "__main__":
    talk.main(
        {
            "async": answer,
            "sync": answer_sync,
            "async-stream": answer_stream,
            "sync-stream": answer_stream_sync,
            "chat": answer_chat,
            "chat-stream": answer_chat_stream,
        },
        typed,
    )
