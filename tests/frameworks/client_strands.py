"""Strands' agent, over its OpenAIModel, which streams unless told otherwise."""
# pyright: reportMissingImports=false

import talk
from strands import Agent, tool
from strands.models.openai import OpenAIModel
from talk import NAMED, SYSTEM, TOOLS, Report


async def answer(question: str, llm) -> str:
    address = {"base_url": llm.base_url, "api_key": llm.api_key}
    model = OpenAIModel(client_args=address, model_id=llm.model)
    tools = [tool(one) for one in TOOLS.values()]
    agent = Agent(model=model, system_prompt=SYSTEM, tools=tools, callback_handler=None)
    return str(await agent.invoke_async(question)).strip()


def build(llm, headers=None, **options) -> Agent:
    address = {"base_url": llm.base_url, "api_key": llm.api_key, "default_headers": headers}
    model = OpenAIModel(client_args=address, model_id=llm.model, **options)
    tools = [tool(one) for one in TOOLS.values()]
    return Agent(model=model, system_prompt=SYSTEM, tools=tools, callback_handler=None)


def answer_sync(question: str, llm) -> str:
    return str(build(llm)(question)).strip()


async def answer_events(question: str, llm) -> str:
    *_, last = [event async for event in build(llm).stream_async(question)]
    return str(last["result"]).strip()


async def answer_whole(question: str, llm) -> str:
    return str(await build(llm, stream=False).invoke_async(question)).strip()


def answer_whole_sync(question: str, llm) -> str:
    return str(build(llm, stream=False)(question)).strip()


async def answer_named(question: str, llm) -> str:
    return str(await build(llm, NAMED).invoke_async(question)).strip()


async def typed(question: str, llm) -> Report:
    address = {"base_url": llm.base_url, "api_key": llm.api_key}
    model = OpenAIModel(client_args=address, model_id=llm.model)
    agent = Agent(model=model, callback_handler=None)
    return await agent.structured_output_async(Report, question)


if __name__ == "__main__":
    talk.main(
        {
            "async-stream": answer,
            "sync-stream": answer_sync,
            "events-stream": answer_events,
            "async": answer_whole,
            "sync": answer_whole_sync,
            "named": answer_named,
        },
        typed,
    )
