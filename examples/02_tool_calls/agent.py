"""An agent of one call: a request in words becomes a JSON tool call.

In:   a request; the model that is trained, as `llm`
Out:  its answer, as it came

Nothing here knows of training: this is the OpenAI client as anybody uses it, and `llm` only says
which model, at which address, with which parameters.
"""

from typing import Any

SYSTEM = """You are a helpful assistant with tools:
set a timer: {"tool": "timer", "minutes": X}
phone a person: {"tool": "call", "name": X}
play an artist: {"tool": "play", "artist": X}
tell the weather: {"tool": "weather", "city": X}
buy an item: {"tool": "buy", "item": X}
switch the lights: {"tool": "lights", "room": X}"""

# The one example. Without it an untrained small model answers in prose, and what is never sampled
# cannot be rewarded.
EXAMPLE = [
    {"role": "user", "content": "Call Alice."},
    {"role": "assistant", "content": '{"tool": "call", "name": "Alice"}'},
]


async def call_a_tool(request: str, llm: Any) -> str:
    """The model's answer to one request."""
    messages = [
        {"role": "system", "content": SYSTEM},
        *EXAMPLE,
        {"role": "user", "content": request},
    ]
    completion = await llm.client.chat.completions.create(
        model=llm.model, messages=messages, **llm.params
    )
    return completion.choices[0].message.content or ""
