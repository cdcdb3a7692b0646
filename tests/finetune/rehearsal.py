"""A run over a real server up to its first epoch: what preflight finds in it.

In:   the seed's basic configuration, with changes
Out:  its document; its live parts; the checks of them
"""

import json
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml
from tests.finetune.worlds import LossyProxy
from tests.workflow.endpoint import Endpoint, Reply, serving

from hone import LocalBackend
from hone.config.build import Builder, build
from hone.config.schema import Document, read
from hone.errors import ConfigError
from hone.evaluation.run import Evaluation, evaluation
from hone.finetune.adapter import HoneServerAdapter
from hone.finetune.base import TrainerAdapter, TrajectoryBuilder
from hone.finetune.checks.preflight import Check, failures, preflight

PROGRAM = """
# An agent that knows nothing of hone: it has its address, its key and the name of a model.
import json
import os
import sys
import urllib.request

for question in sys.argv[2:]:
    body = {"model": sys.argv[1], "messages": [{"role": "user", "content": question}]}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps(body | {"max_tokens": 3}).encode(),
        {
            "Content-Type": "application/json",
            "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"],
        },
    )
    with urllib.request.urlopen(request) as answer:
        print(json.load(answer)["choices"][0]["message"]["content"])
"""

AGENT = """
import asyncio
import json
import os
import subprocess
import sys
import urllib.request

import hone
import hone.errors

async def run(question, llm):
    answer = await llm.chat([{"role": "user", "content": question}])
    return answer.choices[0].message.content or ""

async def search(question, llm):
    return await run(f"search {question}", llm)

async def nested(question, functions):
    return await functions["search"](question)

async def silent(question, llm):
    return question

async def broken(question, llm):
    raise RuntimeError("no such table: users")

async def wrong_header(question, llm):
    answer = await llm.client.chat.completions.create(
        model=llm.model,
        messages=[{"role": "user", "content": question}],
        max_tokens=3,
        extra_headers={"X-Hone-Rollout": "somebody-else"},
    )
    return answer.choices[0].message.content or ""

async def refuses(question, llm):
    await run(question, llm)
    raise hone.errors.PolicyFailure("no move", reason="unparseable")

attempts = []

async def unlucky(question, llm, times):
    # Fails for reasons outside the first so many times.
    attempts.append(question)
    if len(attempts) <= times:
        raise ConnectionResetError("the database restarts")
    return await run(question, llm)

async def misnamed(question, llm, model):
    attempts.append(question)
    messages = [{"role": "user", "content": f"{question}, attempt {len(attempts)}"}]
    await llm.client.chat.completions.create(model=model, messages=messages)

async def half_refuses(question, llm):
    attempts.append(question)
    return await (refuses if len(attempts) == 1 else run)(question, llm)

async def impatient(question, llm):
    messages = [{"role": "user", "content": question}]
    client = llm.client.chat.completions
    stream = await client.create(model=llm.model, messages=messages, max_tokens=200, stream=True)
    async for _ in stream:
        await stream.close()
        return "enough"

def ask(url, model, question):
    body = {"model": model, "messages": [{"role": "user", "content": question}], "max_tokens": 3}
    request = urllib.request.Request(f"{url}/chat/completions", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]

async def unseen(question, llm):
    return await asyncio.to_thread(ask, llm.base_url, llm.model, question)

async def unseen_base(question, llm, base_model):
    return await asyncio.to_thread(ask, llm.base_url, base_model, question)

async def half_seen(question, llm):
    return await run(question, llm) + await unseen(question, llm)

async def process(question, llm, base_model):
    here = {"OPENAI_BASE_URL": llm.rollout_url, "OPENAI_API_KEY": llm.api_key}
    program = await asyncio.create_subprocess_exec(
        sys.executable, "program.py", base_model, question, "Once more.",
        env=os.environ | here, stdout=subprocess.PIPE, cwd=os.path.dirname(__file__),
    )
    output, _ = await program.communicate()
    assert program.returncode == 0
    return output.decode()

def length(item):
    return float(len(item.output_obj))

def questions(calls):
    assert [c.messages[0]["content"] for c in calls] == ["Say 0.", "Once more."], calls
    assert all(c.reply["role"] == "assistant" and c.policy_step == 0 for c in calls)
    return float(sum(c.usage["completion_tokens"] for c in calls))

def fails(item):
    raise KeyError("answer")

def no_number(item):
    raise hone.errors.PolicyFailure("no number in it", reason="unparseable")

def same(item):
    return 0.5

def briefly_down(item):
    attempts.append(item)
    if len(attempts) <= 2:
        raise ConnectionResetError("the judge restarts")
    return float(len(item.output_obj))
"""


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Tables into tables; None removes a key."""
    table = dict(base)
    for key, value in changes.items():
        if value is None:
            table.pop(key, None)
        elif isinstance(value, dict) and isinstance(table.get(key), dict):
            table[key] = merged(table[key], value)
        else:
            table[key] = value
    return table


def document(
    directory: Path,
    url: str = "http://127.0.0.1:7623",
    base: dict[str, Any] | None = None,
    **changes: Any,
) -> Document:
    """The seed's basic configuration over the agent above, with changes."""
    address = urlsplit(url)
    (directory / "agent.py").write_text(AGENT)
    (directory / "program.py").write_text(PROGRAM)
    rows = [{"id": f"e{i}", "question": f"Say {i}.", "answer": str(i)} for i in range(50)]
    (directory / "train.json").write_text(json.dumps(rows))
    basic = {
        "llms": {
            "actor": {
                "_type": "openai",
                "model_name": "base",
                "base_url": f"{url}/v1",
                "api_key": "default",
                "temperature": 1.0,
                "max_tokens": 6,
            }
        },
        "functions": {
            "search": {"_type": "python", "target": "agent.py:search", "llm": "actor"},
        },
        "workflow": {"_type": "python", "target": "agent.py:run", "llm": "actor"},
        "eval": {
            "general": {
                "dataset": {"_type": "json", "file_path": str(directory / "train.json")},
            },
            "evaluators": {"reward": {"_type": "python", "target": "agent.py:length"}},
        },
        "trajectory_builders": {"b": {"_type": "rollouts"}},
        "trainer_adapters": {
            "a": {
                "_type": "hone_server",
                "backend": {
                    "ip": address.hostname,
                    "port": address.port,
                    "name": f"agent-{secrets.token_hex(4)}",
                    "project": "suite",
                    "base_model": "base",
                },
            }
        },
        "trainers": {"t": {"_type": "rl"}},
        "finetuning": {
            "enabled": True,
            "trainer": "t",
            "trajectory_builder": "b",
            "trainer_adapter": "a",
            "reward_function": {"name": "reward"},
            "num_epochs": 20,
            "output_dir": str(directory / "out"),
        },
    }
    file = directory / "config.yml"
    file.write_text(yaml.safe_dump(merged(merged(basic, base or {}), changes), sort_keys=False))
    return read(file)


def one(checks: list[Check], name: str) -> Check:
    [table] = [check for check in checks if check.name == name]
    return table


@dataclass(frozen=True)
class Live:
    """The parts of a run, built from its document as `hone finetune` does."""

    builder: Builder
    trajectories: TrajectoryBuilder
    adapter: HoneServerAdapter
    evaluation: Evaluation
    id: str

    async def checks(
        self,
        adapter: TrainerAdapter | None = None,
        builder: TrajectoryBuilder | None = None,
        validation_examples: int = 0,
    ) -> list[Check]:
        """Of the parts as they are now, or with another adapter or trajectory builder."""
        return await preflight(
            document=self.builder.document,
            builder=self.builder,
            trajectory_builder=builder or self.trajectories,
            trainer_adapter=adapter or self.adapter,
            evaluation=self.evaluation,
            run_id=self.id,
            validation_examples=validation_examples,
            validation_interval=5,
        )


@dataclass(frozen=True)
class Rehearsal:
    """Runs over one server and one model, each with changes to the configuration."""

    directory: Path
    server: LocalBackend
    model: Path

    @asynccontextmanager
    async def live(self, **changes: Any) -> AsyncIterator[Live]:
        base = {
            "llms": {"actor": {"model_name": str(self.model)}},
            "trainer_adapters": {"a": {"backend": {"base_model": str(self.model)}}},
        }
        doc = document(self.directory, self.server.base_url, base, **changes)
        async with build(doc) as builder:
            adapter = await builder.get_trainer_adapter("a")
            assert isinstance(adapter, HoneServerAdapter)
            trajectories = await builder.get_trajectory_builder("b")
            await trajectories.initialize(doc.finetuning)
            await adapter.initialize(doc.finetuning)
            builder.served = adapter.served
            with suppress(ConfigError):  # preflight says so too
                builder.choose_policy()
            run_id = f"art_run_{secrets.token_hex(4)}"
            await adapter.open_run(run_id, 0)
            evaluating = await evaluation(builder)
            trajectories.bind_evaluation(evaluating)
            yield Live(builder, trajectories, adapter, evaluating, run_id)

    async def checked(self, **changes: Any) -> list[Check]:
        async with self.live(**changes) as run:
            return await run.checks()

    async def failed(self, **changes: Any) -> Check:
        """The one check that fails."""
        [table] = failures(await self.checked(**changes))
        return table

    async def lossy(self, **lost: Any) -> tuple[Check, str]:
        """What is refused where agents reach the server through a proxy; and its address."""
        async with serving(LossyProxy(self.server.base_url, **lost)) as url:
            changes: dict[str, Any] = {
                "llms": {"actor": {"base_url": url}},
                "trainer_adapters": {"a": {"backend": {"inference_port": urlsplit(url).port}}},
            }
            return await self.failed(**changes), url

    async def foreign(self, *replies: Reply, **actor: Any) -> list[Check]:
        """Where the agent asks an endpoint that is not the server's, and may."""
        async with serving(Endpoint(*replies)) as url:
            return await self.checked(
                llms={"actor": {"base_url": url, **actor}},
                finetuning={"allow_foreign_endpoint": True},
            )


def reply(text: str, *logprobs: float) -> Reply:
    """An answer whose letters are its tokens."""
    content = [
        {"token": letter, "logprob": value, "bytes": list(letter.encode()), "top_logprobs": []}
        for letter, value in zip(text, logprobs, strict=True)
    ]
    return Reply(text, more={"logprobs": {"content": content, "refusal": None}})
