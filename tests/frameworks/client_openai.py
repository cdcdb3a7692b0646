"""The plain OpenAI client, with a loop of one's own around it."""
# pyright: reportMissingImports=false

from typing import Any

import talk
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletionMessage
from talk import SCHEMAS, Report, first, results


async def answer(question: str, llm) -> str:
    client = AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key)
    messages = first(question)
    while True:
        completion = await client.chat.completions.create(
            model=llm.model, messages=messages, tools=SCHEMAS
        )
        message = completion.choices[0].message
        if not message.tool_calls:
            return message.content or ""
        messages += [message, *results(message.tool_calls)]


def answer_sync(question: str, llm) -> str:
    client = OpenAI(base_url=llm.base_url, api_key=llm.api_key)
    messages = first(question)
    while True:
        completion = client.chat.completions.create(
            model=llm.model, messages=messages, tools=SCHEMAS
        )
        message = completion.choices[0].message
        if not message.tool_calls:
            return message.content or ""
        messages += [message, *results(message.tool_calls)]


async def answer_stream(question: str, llm) -> str:
    client = AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key)
    messages = first(question)
    while True:
        stream = await client.chat.completions.create(
            model=llm.model, messages=messages, tools=SCHEMAS, stream=True
        )
        message = joined([chunk async for chunk in stream])
        if not message.tool_calls:
            return message.content or ""
        messages += [message, *results(message.tool_calls)]


def answer_stream_sync(question: str, llm) -> str:
    client = OpenAI(base_url=llm.base_url, api_key=llm.api_key)
    messages = first(question)
    while True:
        stream = client.chat.completions.create(
            model=llm.model, messages=messages, tools=SCHEMAS, stream=True
        )
        message = joined(list(stream))
        if not message.tool_calls:
            return message.content or ""
        messages += [message, *results(message.tool_calls)]


def joined(chunks: list[Any]) -> Any:
    """The message that the chunks of a stream add up to."""
    content, calls = "", {}
    for chunk in chunks:
        delta = chunk.choices[0].delta
        content += delta.content or ""
        for part in delta.tool_calls or ():
            call = calls.setdefault(part.index, {"type": "function", "id": part.id})
            function = call.setdefault("function", {"name": "", "arguments": ""})
            function["name"] += part.function.name or ""
            function["arguments"] += part.function.arguments or ""
    return ChatCompletionMessage.model_validate(
        {"role": "assistant", "content": content, "tool_calls": list(calls.values()) or None}
    )


async def typed(question: str, llm) -> Report | None:
    client = AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key)
    completion = await client.chat.completions.parse(
        model=llm.model, messages=[{"role": "user", "content": question}], response_format=Report
    )
    return completion.choices[0].message.parsed


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
