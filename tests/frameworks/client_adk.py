"""Google ADK's agent over LiteLLM, which is its way to any OpenAI API."""
# pyright: reportMissingImports=false

import talk
from google.adk.agents import LlmAgent
from google.adk.agents.run_config import RunConfig, StreamingMode
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner
from google.genai import types
from talk import SYSTEM, TOOLS


async def answer(question: str, llm, mode: StreamingMode = StreamingMode.NONE) -> str:
    model = LiteLlm(model=f"openai/{llm.model}", api_base=llm.base_url, api_key=llm.api_key)
    agent = LlmAgent(name="reporter", model=model, instruction=SYSTEM, tools=list(TOOLS.values()))
    runner = InMemoryRunner(agent=agent)
    session = await runner.session_service.create_session(app_name=runner.app_name, user_id="hone")
    message = types.Content(role="user", parts=[types.Part(text=question)])
    text = ""
    async for event in runner.run_async(
        user_id="hone",
        session_id=session.id,
        new_message=message,
        run_config=RunConfig(streaming_mode=mode),
    ):
        if event.is_final_response() and event.content:
            text = "".join(part.text or "" for part in event.content.parts)
    return text


async def answer_stream(question: str, llm) -> str:
    return await answer(question, llm, StreamingMode.SSE)


def answer_sync(question: str, llm, mode: StreamingMode = StreamingMode.NONE) -> str:
    model = LiteLlm(model=f"openai/{llm.model}", api_base=llm.base_url, api_key=llm.api_key)
    agent = LlmAgent(name="reporter", model=model, instruction=SYSTEM, tools=list(TOOLS.values()))
    runner = InMemoryRunner(agent=agent)
    runner.auto_create_session = True
    message = types.Content(role="user", parts=[types.Part(text=question)])
    text = ""
    for event in runner.run(
        user_id="hone",
        session_id="one",
        new_message=message,
        run_config=RunConfig(streaming_mode=mode),
    ):
        if event.is_final_response() and event.content:
            text = "".join(part.text or "" for part in event.content.parts)
    return text


def answer_stream_sync(question: str, llm) -> str:
    return answer_sync(question, llm, StreamingMode.SSE)


if __name__ == "__main__":
    talk.main(
        {
            "async": answer,
            "sync": answer_sync,
            "async-stream": answer_stream,
            "sync-stream": answer_stream_sync,
        }
    )
