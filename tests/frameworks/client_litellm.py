"""LiteLLM's own functions, with a loop of one's own around them."""
# pyright: reportMissingImports=false

from typing import Any

import litellm
import talk
from talk import SCHEMAS, Report, first, results


def where(llm: Any) -> dict[str, Any]:
    return {"model": f"openai/{llm.model}", "api_base": llm.base_url, "api_key": llm.api_key}


async def answer(question: str, llm) -> str:
    messages = first(question)
    while True:
        response = await litellm.acompletion(**where(llm), messages=messages, tools=SCHEMAS)
        message = response.choices[0].message
        if not message.tool_calls:
            return message.content
        messages += [message, *results(message.tool_calls)]


def answer_sync(question: str, llm) -> str:
    messages = first(question)
    while True:
        response = litellm.completion(**where(llm), messages=messages, tools=SCHEMAS)
        message = response.choices[0].message
        if not message.tool_calls:
            return message.content
        messages += [message, *results(message.tool_calls)]


async def answer_stream(question: str, llm) -> str:
    messages = first(question)
    while True:
        stream = await litellm.acompletion(
            **where(llm), messages=messages, tools=SCHEMAS, stream=True
        )
        chunks = [chunk async for chunk in stream]
        message = litellm.stream_chunk_builder(chunks).choices[0].message
        if not message.tool_calls:
            return message.content
        messages += [message, *results(message.tool_calls)]


def answer_stream_sync(question: str, llm) -> str:
    messages = first(question)
    while True:
        stream = litellm.completion(**where(llm), messages=messages, tools=SCHEMAS, stream=True)
        message = litellm.stream_chunk_builder(list(stream)).choices[0].message
        if not message.tool_calls:
            return message.content
        messages += [message, *results(message.tool_calls)]


async def typed(question: str, llm) -> Report:
    messages = [{"role": "user", "content": question}]
    response = await litellm.acompletion(**where(llm), messages=messages, response_format=Report)
    return Report.model_validate_json(response.choices[0].message.content)


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
