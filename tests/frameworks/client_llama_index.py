"""LlamaIndex's agent over its client of any OpenAI API."""
# pyright: reportMissingImports=false

import talk
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from talk import SYSTEM, TOOLS, Report

OPTIONS = {"is_chat_model": True, "is_function_calling_model": True}


def agent(llm) -> FunctionAgent:
    model = OpenAILike(model=llm.model, api_base=llm.base_url, api_key=llm.api_key, **OPTIONS)
    return FunctionAgent(llm=model, system_prompt=SYSTEM, tools=list(TOOLS.values()))


async def answer_stream(question: str, llm) -> str:
    return str(await agent(llm).run(question))


async def answer(question: str, llm) -> str:
    whole = agent(llm)
    whole.streaming = False
    return str(await whole.run(question))


def answer_sync(question: str, llm, *, stream: bool = False) -> str:
    """LlamaIndex has no agent for plain functions, so this is the loop around the model."""
    model = OpenAILike(model=llm.model, api_base=llm.base_url, api_key=llm.api_key, **OPTIONS)
    tools = [FunctionTool.from_defaults(fn=tool) for tool in TOOLS.values()]
    messages = [
        ChatMessage(role="system", content=SYSTEM),
        ChatMessage(role="user", content=question),
    ]
    while True:
        if stream:
            *_, response = model.stream_chat_with_tools(
                tools, chat_history=messages, allow_parallel_tool_calls=True
            )
        else:
            response = model.chat_with_tools(
                tools, chat_history=messages, allow_parallel_tool_calls=True
            )
        calls = model.get_tool_calls_from_response(response, error_on_no_tool_call=False)
        if not calls:
            return response.message.content
        messages.append(response.message)
        for call in calls:
            content = TOOLS[call.tool_name](**call.tool_kwargs)
            more = {"tool_call_id": call.tool_id}
            messages.append(ChatMessage(role="tool", content=content, additional_kwargs=more))


def answer_stream_sync(question: str, llm) -> str:
    return answer_sync(question, llm, stream=True)


async def typed(question: str, llm) -> Report:
    model = OpenAILike(model=llm.model, api_base=llm.base_url, api_key=llm.api_key, **OPTIONS)
    return (await model.as_structured_llm(Report).acomplete(question)).raw


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
