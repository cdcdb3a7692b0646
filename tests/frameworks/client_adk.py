"""Google ADK's agent over its own OpenAI model, and over LiteLLM."""
# pyright: reportMissingImports=false

from typing import Any

import talk
from google.adk.agents import LlmAgent
from google.adk.agents.run_config import RunConfig, StreamingMode
from google.adk.integrations.openai import OpenAILlm
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner
from google.genai import types
from talk import SYSTEM, TOOLS, Report


def agent(llm) -> LlmAgent:
    model = OpenAILlm(model=llm.model, base_url=llm.base_url, api_key=llm.api_key)
    return LlmAgent(name="reporter", model=model, instruction=SYSTEM, tools=list(TOOLS.values()))


def agent_litellm(llm) -> LlmAgent:
    model = LiteLlm(model=f"openai/{llm.model}", api_base=llm.base_url, api_key=llm.api_key)
    return LlmAgent(name="reporter", model=model, instruction=SYSTEM, tools=list(TOOLS.values()))


def run(agent: LlmAgent, question: str, mode: StreamingMode) -> tuple[InMemoryRunner, Any]:
    """A runner, and the arguments of its methods."""
    runner = InMemoryRunner(agent=agent)
    runner.auto_create_session = True
    message = types.Content(role="user", parts=[types.Part(text=question)])
    request = {"user_id": "hone", "session_id": "one", "new_message": message}
    return runner, {**request, "run_config": RunConfig(streaming_mode=mode)}


def final_text(events: Any) -> str:
    """The text of the last event."""
    (*_, last) = (event for event in events if event.is_final_response())
    return "".join(part.text or "" for part in last.content.parts)


async def answer(question: str, llm, build=agent, mode: StreamingMode = StreamingMode.NONE) -> str:
    runner, request = run(build(llm), question, mode)
    return final_text([event async for event in runner.run_async(**request)])


async def answer_stream(question: str, llm) -> str:
    return await answer(question, llm, mode=StreamingMode.SSE)


async def answer_litellm(question: str, llm) -> str:
    return await answer(question, llm, agent_litellm)


async def answer_litellm_stream(question: str, llm) -> str:
    return await answer(question, llm, agent_litellm, StreamingMode.SSE)


def answer_sync(question: str, llm, mode: StreamingMode = StreamingMode.NONE) -> str:
    runner, request = run(agent(llm), question, mode)
    return final_text(runner.run(**request))


def answer_stream_sync(question: str, llm) -> str:
    return answer_sync(question, llm, StreamingMode.SSE)


async def typed(question: str, llm) -> Report:
    model = OpenAILlm(model=llm.model, base_url=llm.base_url, api_key=llm.api_key, max_tokens=200)
    typed_agent = LlmAgent(name="typed", model=model, output_schema=Report)
    runner, request = run(typed_agent, question, StreamingMode.NONE)
    text = final_text([event async for event in runner.run_async(**request)])
    return Report.model_validate_json(text)


if __name__ == "__main__":
    talk.main(
        {
            "async": answer,
            "sync": answer_sync,
            "async-stream": answer_stream,
            "sync-stream": answer_stream_sync,
            "litellm": answer_litellm,
            "litellm-stream": answer_litellm_stream,
        },
        typed,
    )
