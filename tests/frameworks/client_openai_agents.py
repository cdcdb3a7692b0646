"""The OpenAI Agents SDK, which calls /v1/responses unless told otherwise."""
# pyright: reportMissingImports=false

import talk
from agents import Agent, OpenAIProvider, RunConfig, Runner, function_tool
from openai import AsyncOpenAI
from talk import SYSTEM, TOOLS, Report


async def answer(question: str, llm) -> str:
    client = AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key)
    config = RunConfig(model_provider=OpenAIProvider(openai_client=client), tracing_disabled=True)
    tools = [function_tool(tool, strict_mode=False) for tool in TOOLS.values()]
    agent = Agent(name="reporter", instructions=SYSTEM, model=llm.model, tools=tools)
    return (await Runner.run(agent, question, run_config=config)).final_output


def build(llm, responses: bool = True) -> tuple[Agent, RunConfig]:
    client = AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key)
    provider = OpenAIProvider(openai_client=client, use_responses=responses)
    config = RunConfig(model_provider=provider, tracing_disabled=True)
    tools = [function_tool(tool, strict_mode=False) for tool in TOOLS.values()]
    return Agent(name="reporter", instructions=SYSTEM, model=llm.model, tools=tools), config


def answer_sync(question: str, llm) -> str:
    agent, config = build(llm)
    return Runner.run_sync(agent, question, run_config=config).final_output


async def answer_stream(question: str, llm, *, responses: bool = True) -> str:
    agent, config = build(llm, responses)
    result = Runner.run_streamed(agent, question, run_config=config)
    async for _ in result.stream_events():
        pass
    return result.final_output


async def answer_chat(question: str, llm) -> str:
    agent, config = build(llm, responses=False)
    return (await Runner.run(agent, question, run_config=config)).final_output


async def answer_chat_stream(question: str, llm) -> str:
    return await answer_stream(question, llm, responses=False)


async def typed(question: str, llm) -> Report:
    client = AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key)
    config = RunConfig(model_provider=OpenAIProvider(openai_client=client), tracing_disabled=True)
    agent = Agent(name="typed", model=llm.model, output_type=Report)
    return (await Runner.run(agent, question, run_config=config)).final_output


if __name__ == "__main__":
    talk.main(
        {
            "async": answer,
            "sync": answer_sync,
            "async-stream": answer_stream,
            "chat": answer_chat,
            "chat-stream": answer_chat_stream,
        },
        typed,
    )
