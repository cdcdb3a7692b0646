"""The conversation that every framework has with the scripted model, and how a client runs it.

In:   JSON on stdin: the server's address, the model, the framework's name
Out:  JSON on stdout's last line: each rollout's answer, and the calls that hone saw in this process

Runs in the framework's environment. All rollouts run at the same time: coroutines in one event
loop, plain functions in threads, and one in an executor that its rollout hands the work to. Before
them, one runs as if hone were not here: it has the rollout's base URL and nothing else.
"""

import asyncio
import inspect
import json
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_type_hints

from pydantic import BaseModel, ConfigDict

from hone.capture.scope import recorded, within
from hone.wire.rollout import RolloutScope

SYSTEM = "You report the weather. Use the tools."
NAMED = {"X-Hone-Function": "agent.reporter"}
"""For a model whose calls carry the name of the agent that makes them."""
DEGREES = {"Paris": 12, "Rome": 21}


def weather(city: str) -> str:
    """Look up the temperature in a city, in degrees Celsius."""
    return f"{city}: {DEGREES[city]}"


def fahrenheit(celsius: int) -> str:
    """Convert degrees Celsius to degrees Fahrenheit."""
    return str(celsius * 9 // 5 + 32)


TOOLS = {"weather": weather, "fahrenheit": fahrenheit}
_KINDS = {str: "string", int: "integer"}


def _schema(tool: Callable[..., str]) -> dict[str, Any]:
    hints = get_type_hints(tool)
    properties = {p: {"type": _KINDS[hints[p]]} for p in inspect.signature(tool).parameters}
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    described = {"name": tool.__name__, "description": tool.__doc__, "parameters": parameters}
    return {"type": "function", "function": described}


SCHEMAS: list[Any] = [_schema(tool) for tool in TOOLS.values()]
"""The tools as OpenAI's API describes them, for clients that leave it to their user."""


def results(calls: Any) -> list[Any]:
    """What the tools answered to the calls of an OpenAI message, as messages."""
    return [
        {
            "role": "tool",
            "tool_call_id": call.id,
            "content": TOOLS[call.function.name](**json.loads(call.function.arguments)),
        }
        for call in calls
    ]


def first(question: str) -> list[Any]:
    """The messages of the first call."""
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]


class Report(BaseModel):
    """A typed answer; the model that gives it is a random one, so only the server makes it valid."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Paris", "Rome"]
    warm: bool


@dataclass(frozen=True)
class LLM:
    """The attributes of hone's `llm` that a framework needs."""

    base_url: str
    model: str
    api_key: str = "default"


Agent = Callable[[str, Any], Any]
"""Takes a question and an `llm` and returns the answer; a function or a coroutine function."""


def main(
    agents: Mapping[str, Agent], typed: Callable[[str, Any], Awaitable[Report | None]]
) -> None:
    """Run every agent in a rollout of its own, and two of them in other places as well.

    `typed` asks for a Report, in the framework's default way.
    """
    given = json.load(sys.stdin)
    runs = _Runs(given["framework"], LLM(given["base_url"], given["model"]))
    runs.at_url(agents)
    asyncio.run(runs.all(agents))
    asyncio.run(runs.typed(typed, LLM(given["typed_url"], given["typed_model"])))
    sys.stdout.write("\n" + json.dumps(runs.saw) + "\n")


class _Runs:
    def __init__(self, framework: str, llm: LLM) -> None:
        self._framework, self._llm = framework, llm
        self.saw: dict[str, Any] = {}
        """What came of each rollout, by its id."""

    def at_url(self, agents: Mapping[str, Agent]) -> None:
        """Nothing is patched: no rollout of this process is open yet."""
        name, run = next(iter(agents.items()))
        scope = RolloutScope(f"{self._framework}.{name}-url")
        llm = replace(self._llm, base_url=scope.url(self._llm.base_url))
        output = run(question(scope.rollout), llm)
        if inspect.iscoroutine(output):
            output = asyncio.run(output)
        self._note(scope.rollout, output, None)

    async def all(self, agents: Mapping[str, Agent]) -> None:
        plain = {k: run for k, run in agents.items() if not inspect.iscoroutinefunction(run)}
        coroutines = {k: run for k, run in agents.items() if k not in plain}
        threads = [threading.Thread(target=self._in_thread, args=one) for one in plain.items()]
        if plain:
            one = next(iter(plain.items()))
            threads += [threading.Thread(target=self._in_executor, args=one)]
        for thread in threads:
            thread.start()
        async with asyncio.TaskGroup() as group:
            for one in coroutines.items():
                group.create_task(self._in_loop(*one))
            for thread in threads:
                group.create_task(asyncio.to_thread(thread.join))

    async def typed(self, run: Callable[[str, Any], Awaitable[Report | None]], llm: LLM) -> None:
        rollout, recorder = recorded(f"{self._framework}.typed", host="127.0.0.1")
        with rollout, within("agent"):
            report = await run("How is the weather?", llm)
        self._note(rollout.id, Report.model_validate(report).model_dump_json(), recorder.calls)

    async def _in_loop(self, name: str, run: Agent) -> None:
        rollout, recorder = recorded(f"{self._framework}.{name}", host="127.0.0.1")
        with rollout, within("agent"):
            output = await run(question(rollout.id), self._llm)
        self._note(rollout.id, output, recorder.calls)

    def _in_thread(self, name: str, run: Agent) -> None:
        rollout, recorder = recorded(f"{self._framework}.{name}", host="127.0.0.1")
        with rollout, within("agent"):
            output = run(question(rollout.id), self._llm)
        self._note(rollout.id, output, recorder.calls)

    def _in_executor(self, name: str, run: Agent) -> None:
        rollout, recorder = recorded(f"{self._framework}.{name}-executor", host="127.0.0.1")
        with rollout, within("agent"), ThreadPoolExecutor(1) as pool:
            output = pool.submit(run, question(rollout.id), self._llm).result()
        self._note(rollout.id, output, recorder.calls)

    def _note(self, rollout: str, output: str, calls: Any) -> None:
        seen = None if calls is None else [asdict(call) for call in calls]
        self.saw[rollout] = {"output": output, "seen": seen}


def question(rollout: str) -> str:
    """Another one in every rollout, so that the model can tell them apart."""
    return f"How warm is it in Paris and in Rome? ({rollout})"
