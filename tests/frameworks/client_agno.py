"""Agno's agent, over OpenAILike."""
# pyright: reportMissingImports=false

import talk
from agno.agent import Agent
from agno.models.openai import OpenAILike
from talk import NAMED, SYSTEM, TOOLS, Report


async def answer(question: str, llm) -> str:
    model = OpenAILike(id=llm.model, base_url=llm.base_url, api_key=llm.api_key)
    agent = Agent(model=model, system_message=SYSTEM, tools=list(TOOLS.values()), telemetry=False)
    return (await agent.arun(question)).messages[-1].content


def build(llm, **options) -> Agent:
    model = OpenAILike(id=llm.model, base_url=llm.base_url, api_key=llm.api_key, **options)
    return Agent(model=model, system_message=SYSTEM, tools=list(TOOLS.values()), telemetry=False)


def answer_sync(question: str, llm) -> str:
    return build(llm).run(question).messages[-1].content


async def answer_stream(question: str, llm) -> str:
    events = build(llm).arun(question, stream=True, yield_run_output=True)
    *_, output = [event async for event in events]
    return output.messages[-1].content


def answer_stream_sync(question: str, llm) -> str:
    *_, output = build(llm).run(question, stream=True, yield_run_output=True)
    return output.messages[-1].content


async def answer_named(question: str, llm) -> str:
    agent = build(llm, default_headers=NAMED)
    return (await agent.arun(question)).messages[-1].content


async def typed(question: str, llm) -> Report:
    model = OpenAILike(id=llm.model, base_url=llm.base_url, api_key=llm.api_key)
    return (await Agent(model=model, output_schema=Report, telemetry=False).arun(question)).content


if __name__ == "__main__":
    talk.main(
        {
            "async": answer,
            "sync": answer_sync,
            "async-stream": answer_stream,
            "sync-stream": answer_stream_sync,
            "named": answer_named,
        },
        typed,
    )
