"""CrewAI's agent, alone and in a crew, over its own OpenAI provider."""
# pyright: reportMissingImports=false

import talk
from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool
from talk import NAMED, SYSTEM, TOOLS, Report


async def answer(question: str, llm) -> str:
    address = {"base_url": llm.base_url, "api_key": llm.api_key}
    model = LLM(f"openai/{llm.model}", custom_openai=True, **address)
    tools = [tool(one.__name__)(one) for one in TOOLS.values()]
    agent = Agent(role="reporter", goal=SYSTEM, backstory="", llm=model, tools=tools)
    return (await agent.kickoff_async(question)).raw


def build(llm, **options) -> Agent:
    address = {"base_url": llm.base_url, "api_key": llm.api_key}
    model = LLM(f"openai/{llm.model}", custom_openai=True, **address, **options)
    tools = [tool(one.__name__)(one) for one in TOOLS.values()]
    return Agent(role="reporter", goal=SYSTEM, backstory="", llm=model, tools=tools)


def answer_sync(question: str, llm) -> str:
    return build(llm).kickoff(question).raw


async def answer_stream(question: str, llm) -> str:
    return (await build(llm, stream=True).kickoff_async(question)).raw


def answer_stream_sync(question: str, llm) -> str:
    return build(llm, stream=True).kickoff(question).raw


def answer_crew(question: str, llm) -> str:
    agent = build(llm, default_headers=NAMED)
    task = Task(description=question, expected_output="A sentence.", agent=agent)
    return Crew(agents=[agent], tasks=[task]).kickoff().raw


async def typed(question: str, llm) -> Report:
    address = {"base_url": llm.base_url, "api_key": llm.api_key}
    model = LLM(f"openai/{llm.model}", custom_openai=True, **address)
    agent = Agent(role="reporter", goal="Report.", backstory="", llm=model)
    return (await agent.kickoff_async(question, response_format=Report)).pydantic


if __name__ == "__main__":
    talk.main(
        {
            "async": answer,
            "sync": answer_sync,
            "async-stream": answer_stream,
            "sync-stream": answer_stream_sync,
            "named": answer_crew,
        },
        typed,
    )
