"""An agent with one model call: it turns a request in plain words into a JSON tool call.

In:   a request; the model being trained, as `llm`
Out:  the model's answer, unchanged

There is no training code here. This is ordinary OpenAI client code, and `llm` provides the client,
the model name and the parameters.
"""

from typing import Any

SYSTEM = """You are a helpful assistant with tools:
set a timer: {"tool": "timer", "minutes": X}
phone a person: {"tool": "call", "name": X}
play an artist: {"tool": "play", "artist": X}
tell the weather: {"tool": "weather", "city": X}
buy an item: {"tool": "buy", "item": X}
switch the lights: {"tool": "lights", "room": X}"""

# One example. Without it, an untrained small model answers in prose, and never samples a tool call
# that could be rewarded.
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
