"""The plain Anthropic client, with a loop of one's own around it."""
# pyright: reportMissingImports=false

from typing import Any

import talk
from anthropic import Anthropic, AsyncAnthropic
from talk import SCHEMAS, SYSTEM, TOOLS, Report

OPTIONS: dict[str, Any] = {
    "max_tokens": 1024,
    "system": SYSTEM,
    "tools": [
        {
            "name": schema["function"]["name"],
            "description": schema["function"]["description"],
            "input_schema": schema["function"]["parameters"],
        }
        for schema in SCHEMAS
    ],
}


def results(message: Any) -> list[Any]:
    """The message, and what the tools answered."""
    done = [
        {
            "type": "tool_result",
            "tool_use_id": block.id,
            "content": TOOLS[block.name](**block.input),
        }
        for block in message.content
        if block.type == "tool_use"
    ]
    return [
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": done},
    ]


def text(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def address(llm: Any) -> str:
    """The client adds /v1 itself."""
    return llm.base_url.removesuffix("/v1")


async def answer(question: str, llm) -> str:
    client = AsyncAnthropic(base_url=address(llm), api_key=llm.api_key)
    messages: list[Any] = [{"role": "user", "content": question}]
    while True:
        message = await client.messages.create(model=llm.model, messages=messages, **OPTIONS)
        if message.stop_reason != "tool_use":
            return text(message)
        messages += results(message)


def answer_sync(question: str, llm) -> str:
    client = Anthropic(base_url=address(llm), api_key=llm.api_key)
    messages: list[Any] = [{"role": "user", "content": question}]
    while True:
        message = client.messages.create(model=llm.model, messages=messages, **OPTIONS)
        if message.stop_reason != "tool_use":
            return text(message)
        messages += results(message)


async def answer_stream(question: str, llm) -> str:
    client = AsyncAnthropic(base_url=address(llm), api_key=llm.api_key)
    messages: list[Any] = [{"role": "user", "content": question}]
    while True:
        async with client.messages.stream(model=llm.model, messages=messages, **OPTIONS) as stream:
            message = await stream.get_final_message()
        if message.stop_reason != "tool_use":
            return text(message)
        messages += results(message)


def answer_stream_sync(question: str, llm) -> str:
    client = Anthropic(base_url=address(llm), api_key=llm.api_key)
    messages: list[Any] = [{"role": "user", "content": question}]
    while True:
        with client.messages.stream(model=llm.model, messages=messages, **OPTIONS) as stream:
            message = stream.get_final_message()
        if message.stop_reason != "tool_use":
            return text(message)
        messages += results(message)


async def typed(question: str, llm) -> Report | None:
    client = AsyncAnthropic(base_url=address(llm), api_key=llm.api_key)
    message = await client.messages.parse(
        model=llm.model,
        max_tokens=200,
        messages=[{"role": "user", "content": question}],
        output_format=Report,
    )
    return message.parsed_output


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
