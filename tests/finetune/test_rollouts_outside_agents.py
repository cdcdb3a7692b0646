"""Agents outside this process, many at a time, against one server: programs and a service."""

import asyncio
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Request
from openai import AsyncOpenAI
from tests.finetune.rehearsal import Rehearsal
from tests.prose import Prose
from tests.workflow.rollouts import why

from hone.config.policy import describe
from hone.errors import Forbidden
from hone.finetune.checks.preflight import failures
from hone.server.http import listen
from hone.workflow.run import RolloutResult, run_rollout

AGENTS = 32

# Two turns with the standard library alone, so that it starts at once; "die" is killed in the
# second one, after the first chunk of its answer.
PROGRAM = """
import http.client, json, os, signal, sys
from urllib.parse import urlsplit

question = sys.stdin.read()
url = urlsplit(os.environ["OPENAI_BASE_URL"])

def ask(messages, **more):
    link = http.client.HTTPConnection(url.hostname, url.port)
    body = {"model": os.environ["HONE_MODEL"], "messages": messages, **more}
    key = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    link.request("POST", url.path + "/chat/completions", json.dumps(body), key)
    answer = link.getresponse()
    assert answer.status == 200, answer.read()
    return answer

talk = [{"role": "user", "content": question}]
reply = json.loads(ask(talk, max_tokens=4).read())["choices"][0]["message"]
talk += [reply, {"role": "user", "content": "again"}]
if question.endswith("die"):
    answer = ask(talk, max_tokens=60, stream=True)
    assert answer.readline().startswith(b"data: "), "the answer has begun"
    os.kill(os.getpid(), signal.SIGKILL)
print(json.loads(ask(talk, max_tokens=4).read())["choices"][0]["message"]["content"])
"""


@pytest.mark.e2e
async def test_no_call_crosses_rollouts_although_a_third_of_the_agents_is_killed(
    rehearsal: Rehearsal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    places = tmp_path / "places"
    places.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(places))
    program = {"_type": "command", "command": [sys.executable, "-I", "-S", "-c", PROGRAM]}
    async with rehearsal.live(workflow={**program, "target": None}) as run:
        workflow, served = await run.builder.get_workflow(), run.builder.served
        assert served is not None and served.recorded is not None
        before = await run.adapter.unscoped_calls(run.id)  # by other tests of this server
        questions = [f"number {i}, {'die' if i % 3 == 0 else 'live'}" for i in range(AGENTS)]

        async def one(question: str) -> RolloutResult:
            rollout = f"{run.id}:{question.split()[1].rstrip(',')}"
            return await run_rollout(
                workflow, question, id=rollout, **run.builder.rollout_arguments
            )

        results = await asyncio.gather(*map(one, questions))
        recorded = [await served.recorded(result.id) for result in results]
        assert await run.adapter.unscoped_calls(run.id) == before
    killed = 0
    for question, result, calls in zip(questions, results, recorded, strict=True):
        # The prompt says whose call it is.
        assert {call.messages[0]["content"] for call in calls if call.messages} == {question}
        assert [call.rollout for call in calls] == [result.id] * len(calls)
        assert [call.model for call in calls] == [run.adapter.model_name] * len(calls)
        assert result.answered
        first, *rest = calls
        assert not first.abandoned and first.index == 0
        if question.endswith("die"):
            killed += 1
            assert why(result) == ("infrastructure", "killed")
            assert "was killed by SIGKILL" in str(result.failure)
            assert [call.index for call in rest] in ([], [1])
        else:
            assert result.failure is None and [call.index for call in rest] == [1]
            assert result.output == (rest[0].reply["content"] or "").rstrip("\r\n")
            assert [call.id for call in result.calls] == [call.id for call in calls]
    assert killed == 11  # 0, 3, ... 30
    assert list(places.iterdir()) == []
    assert _processes(f"HONE_ROLLOUT={run.id}:") == []


async def test_a_program_with_a_model_name_in_its_code_is_trained_under_an_alias(
    rehearsal: Rehearsal,
):
    named = PROGRAM.replace('os.environ["HONE_MODEL"]', '"gpt-4o"')
    workflow = {"_type": "command", "command": [sys.executable, "-I", "-S", "-c", named]}
    finetuning = {"model_aliases": ["gpt-4o"], "target_model": "actor"}
    async with rehearsal.live(workflow={**workflow, "target": None}, finetuning=finetuning) as run:
        assert failures(await run.checks()) == []
        served = run.builder.served
        assert served is not None and served.trained is not None
        trained = served.trained
        # As in `hone eval` and `hone run`, whose rollouts belong to no run.
        alone = await run_rollout(await run.builder.get_workflow(), "x", **served.rollout_arguments)
        assert alone.failure is None and len(alone.calls) == 2
        line = describe(run.builder.document, trained, run.builder.policy)
        assert f"Inside a rollout 'gpt-4o' means '{trained.name}'" in line
    check = await rehearsal.failed(workflow={**workflow, "target": None})
    assert "no model called" in check.message and "gpt-4o" in check.message


async def test_calls_of_a_program_that_is_a_function_can_be_the_target(rehearsal: Rehearsal):
    (rehearsal.directory / "boss.py").write_text(
        "async def boss(question, functions):\n    return await functions['prober'](question)\n"
    )
    program = {"_type": "command", "command": [sys.executable, "-I", "-S", "-c", PROGRAM]}
    changes = {
        "functions": {"prober": {**program, "llm": "actor"}},
        "workflow": {"target": "boss.py:boss", "llm": None, "functions": ["prober"]},
        "finetuning": {"target_functions": ["prober"]},
    }
    async with rehearsal.live(**changes) as run:
        workflow, served = await run.builder.get_workflow(), run.builder.served
        assert served is not None
        arguments = run.builder.rollout_arguments
        result = await run_rollout(workflow, "say it", id=f"{run.id}:0", **arguments)
        assert failures(await run.checks()) == []
    assert [call.function for call in result.calls] == ["prober", "prober"]


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ('os.environ["HONE_MODEL"]', ("policy", "exit_status")),
        # Only the base weights had answered it.
        ('os.environ["HONE_MODEL"] + "@0"', ("infrastructure", "exit_status")),
    ],
)
async def test_a_program_that_crashes_on_an_answer_of_the_policy_fails_because_of_it(
    rehearsal: Rehearsal, model: str, expected: tuple[str, str]
):
    crashing = PROGRAM.replace('os.environ["HONE_MODEL"]', model) + 'json.loads("{}")["move"]\n'
    program = {"_type": "command", "command": [sys.executable, "-I", "-S", "-c", crashing]}
    async with rehearsal.live(workflow={**program, "target": None}) as run:
        workflow, arguments = await run.builder.get_workflow(), run.builder.rollout_arguments
        result = await run_rollout(workflow, "say it", id=f"{run.id}:0", **arguments)
    assert why(result) == expected and result.answered == (expected[0] == "policy")
    assert len(result.calls) == 2


async def test_an_agent_gets_the_advertised_address(prose: Prose, rehearsal: Rehearsal):
    url = rehearsal.server.base_url.replace("127.0.0.1", "localhost")
    named = PROGRAM + 'print(os.environ["OPENAI_BASE_URL"])'
    program = {"_type": "command", "command": [sys.executable, "-I", "-S", "-c", named]}

    def adapters(url: str) -> dict[str, Any]:
        return {"a": {"backend": {"advertise_url": url}}}

    async with rehearsal.live(
        workflow={**program, "target": None}, trainer_adapters=adapters(f"{url}/v1")
    ) as run:
        workflow, served = await run.builder.get_workflow(), run.builder.served
        assert served is not None and served.recorded is not None
        known = {"host": served.host, "recorded_calls": served.recorded}
        result = await run_rollout(workflow, "say it", id=f"{run.id}:0", **known)
    assert result.output.endswith(f"\n{url}/rollout/{run.id}:0/v1")
    assert len(result.calls) == 2
    # The server would refuse every call of the agents, so the run does not begin.
    with pytest.raises(Forbidden) as caught:
        async with rehearsal.live(trainer_adapters=adapters("http://gpu1:8000")):
            pass
    prose(caught)


async def test_a_service_is_trained_by_the_address_that_comes_with_each_request(
    rehearsal: Rehearsal,
):
    app, busy, together = FastAPI(), [0], asyncio.Event()

    @app.post("/solve")
    async def solve(request: Request) -> dict[str, str]:
        question = (await request.json())["question"]
        busy[0] += 1
        if busy[0] == 8:
            together.set()
        await together.wait()  # all rollouts are in the service before the first model call
        client = AsyncOpenAI(base_url=request.headers["x-hone-base-url"], api_key="default")
        async with client:
            reply = await client.chat.completions.create(
                model=request.headers["x-hone-model"],
                messages=[{"role": "user", "content": question}],
                max_tokens=4,
            )
        return {"answer": reply.choices[0].message.content or ""}

    async with listen.serving(app, grace_s=1) as url:
        service = {"_type": "http", "url": f"{url}/solve", "output_path": "$.answer"}
        body = {"question": "{input}"}
        workflow = {**service, "body": body, "target": None}
        async with rehearsal.live(workflow=workflow) as run:
            function, served = await run.builder.get_workflow(), run.builder.served
            assert served is not None and served.recorded is not None
            before = await run.adapter.unscoped_calls(run.id)

            async def one(number: int) -> RolloutResult:
                return await run_rollout(
                    function,
                    f"question {number}",
                    id=f"{run.id}:{number}",
                    host=served.host,
                    recorded_calls=served.recorded,
                )

            results = await asyncio.gather(*map(one, range(8)))
            assert await run.adapter.unscoped_calls(run.id) == before
    for number, result in enumerate(results):
        [call] = result.calls
        assert call.messages == [{"role": "user", "content": f"question {number}"}]
        assert result.output == ((call.reply or {})["content"] or "")


def _processes(variable: str) -> list[str]:
    """Processes with this in their environment, which Linux shows."""
    if sys.platform != "linux":
        return []
    held = []
    for place in Path("/proc").iterdir():
        try:
            if place.name.isdigit() and variable.encode() in (place / "environ").read_bytes():
                held.append(place.name)
        except OSError:
            continue
    return held
