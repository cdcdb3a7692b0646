"""An OpenAI endpoint that answers at once, in a process of its own, and what is asked of it.

In:   POSTs, of which it reads no more than the length
Out:  always the same chat completion, as large as a real one of 16 tokens with log-probabilities;
      `crowd`: seconds a call of many at once

`python -m bench.endpoint` prints its port and serves until its stdin closes.
"""

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

TOKENS = 16
AT_ONCE = 16
MESSAGES: Any = [
    {"role": "system", "content": "You turn requests into tool calls. " * 8},
    {"role": "user", "content": "What is the weather in Turin tomorrow?"},
]


@contextmanager
def endpoint() -> Iterator[str]:
    """Its base URL, while it runs; it stays in the caller's process group."""
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.endpoint"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None, "started with pipes"
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}/v1"
    finally:
        process.stdin.close()
        process.wait(10)
        process.stdout.close()


async def crowd(ask: Callable[[], Awaitable[object]], count: int) -> float:
    """Seconds a call of so many calls, of which 16 run at a time."""
    slots = asyncio.Semaphore(AT_ONCE)

    async def one() -> None:
        async with slots:
            await ask()

    began = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(count)))
    return (time.perf_counter() - began) / count


def answer() -> dict[str, Any]:
    words = [f" word{i}" for i in range(TOKENS)]
    logprobs = [
        {"token": word, "logprob": -0.5, "bytes": list(word.encode()), "top_logprobs": []}
        for word in words
    ]
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "".join(words)},
        "logprobs": {"content": logprobs, "refusal": None},
        "finish_reason": "stop",
        "token_ids": list(range(1000, 1000 + TOKENS)),
        "policy_step": 0,
        "call_id": "call-1",
    }
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [choice],
        "usage": {"prompt_tokens": 64, "completion_tokens": TOKENS, "total_tokens": 64 + TOKENS},
        "prompt_token_ids": list(range(2000, 2064)),
        "policy_step": 0,
    }


async def _serve() -> None:
    body = json.dumps(answer()).encode()
    head = (
        f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    whole = head.encode() + body

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = head.split(b"content-length:")[1].split(b"\r\n")[0]
                await reader.readexactly(int(length))
                writer.write(whole)
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    server.close()


if __name__ == "__main__":
    asyncio.run(_serve())
