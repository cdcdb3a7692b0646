"""`art.openai` under hone's name: a streamed chat completion, read to its end.

In:   a stream of OpenAI's client
Out:  the ChatCompletion that it adds up to; its choices keep fields such as `call_id`
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hone.wire.stream import Chunks

if TYPE_CHECKING:
    from openai import AsyncStream, Stream
    from openai.types.chat import ChatCompletion, ChatCompletionChunk

__all__ = ["consume_chat_completion_stream", "consume_sync_chat_completion_stream"]


async def consume_chat_completion_stream(
    stream: "AsyncStream[ChatCompletionChunk]",
    on_chunk: "Callable[[ChatCompletionChunk, ChatCompletion], Any] | None" = None,
) -> "ChatCompletion":
    """Read a stream to its end.

    Args:
        stream: the return value of the client's `create(stream=True)`.
        on_chunk: called with each chunk and the completion so far; StopIteration ends the stream.
    """
    chunks = Chunks()
    async for chunk in stream:
        chunks.add(chunk.to_dict())
        if on_chunk is not None:
            try:
                on_chunk(chunk, _completion(chunks))
            except StopIteration:
                await stream.close()
                break
    return _completion(chunks)


def consume_sync_chat_completion_stream(
    stream: "Stream[ChatCompletionChunk]",
) -> "ChatCompletion":
    """Read the stream of a sync client to its end."""
    chunks = Chunks()
    for chunk in stream:
        chunks.add(chunk.to_dict())
    return _completion(chunks)


def _completion(chunks: Chunks) -> "ChatCompletion":
    from openai.types.chat import ChatCompletion  # imported here: it takes a second

    fields: dict[str, Any] = chunks.join() | {"object": "chat.completion"}
    return ChatCompletion.construct(**fields)
