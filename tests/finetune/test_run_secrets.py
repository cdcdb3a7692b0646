"""Secrets that an agent raises, prints or returns are in no file of a run or of an evaluation."""

import asyncio
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from fastapi import FastAPI, Request, Response
from tests.finetune import rehearsal
from typer.testing import CliRunner

from hone import LocalBackend
from hone.cli import app as cli
from hone.files.redact import HIDDEN
from hone.finetune.run import FinetuneOptions, finetune
from hone.server.http import listen

TOKEN = "value/of the+agent-8Xq2"
"""Of the environment; nothing in its form says that it is a secret."""
PASSWORD = "pa55-of-the-db"
LEAK = f"{TOKEN} at postgres://app:{PASSWORD}@db/x"
ENCODED = "value%2Fof%20the%2Bagent-8Xq2"

AGENT = f"""
import logging
import os
import hone

async def answer(question, llm):
    content = question + " with " + os.environ["AGENT_TOKEN"]
    reply = await llm.chat([{{"role": "user", "content": content}}])
    leak(question)
    return f"{{reply.choices[0].message.content}} {LEAK}"

def leak(question):
    token = os.environ["AGENT_TOKEN"]
    hone.step("login", seen=token)
    logging.getLogger("hone").warning("logged in with %s", token)
    if "fail" in question:
        raise RuntimeError("refused: {LEAK} {ENCODED}")

def alone(question):
    leak(question)
    return {{"text": "{LEAK}", "{TOKEN}": [1, 0.5]}}

def reward(item):
    return (float("{TOKEN}" in str(item.output_obj)), "the output has {LEAK}")

def fails(item):
    raise ValueError("cannot judge {LEAK}")
"""
PROGRAM = f"""
import os, sys
assert os.environ["AGENT_TOKEN"] == "{TOKEN}"
print("{LEAK}")
if "fail" in sys.stdin.read():
    # A message has the last 500 characters, which begin in the middle of the secret.
    sys.exit("refused: {LEAK} {ENCODED} " + "x" * 485)
"""


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AGENT_TOKEN", TOKEN)
    monkeypatch.chdir(tmp_path)


def leaks(directory: Path) -> list[str]:
    """The files that hold one of the secrets."""
    files = [path for path in directory.rglob("*") if path.is_file()]
    assert files, directory
    written = (TOKEN, PASSWORD, ENCODED, "agent-8Xq2")
    return [str(f) for f in files if any(s.encode() in f.read_bytes() for s in written)]


def rows(*questions: str) -> None:
    entries = [{"id": q, "question": q, "answer": "x"} for q in questions]
    Path("rows.json").write_text(json.dumps(entries))


@contextmanager
def service() -> Iterator[str]:
    """A service that an agent runs in, in a thread."""
    app, ready, loop = FastAPI(), threading.Event(), asyncio.new_event_loop()
    found: list[str] = []
    end = asyncio.Event()

    @app.post("/ask")
    async def ask(request: Request) -> Response:
        fails = b"fail" in await request.body()
        return Response(f"refused: {LEAK} {ENCODED}" if fails else LEAK, 500 if fails else 200)

    async def serve() -> None:
        async with listen.serving(app, grace_s=1) as url:
            found.append(url)
            ready.set()
            await end.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert ready.wait(30)
    try:
        yield f"{found[0]}/ask"
    finally:
        loop.call_soon_threadsafe(end.set)
        thread.join()
        loop.close()


@pytest.mark.parametrize("kind", ["python", "command", "http"])
def test_an_evaluation_writes_no_secret_of_its_agent(kind: str, capfd: pytest.CaptureFixture[str]):
    Path("agent.py").write_text(AGENT)
    Path("program.py").write_text(PROGRAM)
    rows("one", "fail")
    with service() as url:
        workflow: dict[str, Any] = {
            "python": {"target": "agent.py:alone"},
            "command": {
                "command": [sys.executable, "-I", "-S", str(Path("program.py").absolute())]
            },
            "http": {"url": url},
        }[kind]
        evaluators = {
            "reward": {"_type": "python", "target": "agent.py:reward"},
            "fails": {"_type": "python", "target": "agent.py:fails"},
        }
        dataset = {"_type": "json", "file_path": "rows.json"}
        llm = {"_type": "openai", "model_name": "m", "base_url": "http://127.0.0.1:9/v1"}
        document = {
            "llms": {"m": {**llm, "api_key": "default"}},
            "workflow": {"_type": kind, **workflow, **({} if kind == "python" else {"llm": "m"})},
            "eval": {
                "general": {"dataset": dataset, "output_dir": "out"},
                "evaluators": evaluators,
            },
        }
        Path("config.yml").write_text(yaml.safe_dump(document))
        result = CliRunner().invoke(cli.app, ["eval", "--config_file=config.yml"])
    assert leaks(Path("out")) == []
    printed = result.output + capfd.readouterr().err
    assert not any(secret in printed for secret in (TOKEN, PASSWORD, ENCODED)), printed
    one, failed = json.loads(Path("out/workflow_output.json").read_text())
    assert HIDDEN in json.dumps(one["generated_answer"])
    assert "refused" in failed["failure"]["traceback"] + failed["failure"]["message"]
    scores = json.loads(Path("out/reward_output.json").read_text())["eval_output_items"]
    assert scores[0]["score"] == 1.0, "the evaluator read the output itself"
    assert scores[0]["reasoning"] == f"the output has {HIDDEN} at postgres://app:{HIDDEN}@db/x"


def an_evaluation() -> None:
    """Of agent.py, whose answers must be equal to those of the rows."""
    document = {
        "workflow": {"_type": "python", "target": "agent.py:run"},
        "eval": {
            "general": {
                "dataset": {"_type": "json", "file_path": "rows.json"},
                "output": {"dir": "out", "cleanup": False},
            },
            "evaluators": {"match": {"_type": "exact_match"}},
        },
    }
    Path("config.yml").write_text(yaml.safe_dump(document))


def test_answers_to_a_question_with_a_secret_are_reused(tmp_path: Path):
    Path("agent.py").write_text("""
def run(question):
    with open("ran", "a") as file:
        file.write("x")
    return "x"
""")
    rows(f"who owns {TOKEN}?", "login as http://me:pw@host")
    an_evaluation()
    command = ["eval", "--config_file=config.yml", "--skip_completed_entries"]
    for _ in range(2):
        assert CliRunner().invoke(cli.app, command).exit_code == 0
    assert Path("ran").read_text() == "xx", "the second evaluation runs no row again"
    written = json.loads(Path("out/workflow_output.json").read_text())
    assert written[0]["question"] == f"who owns {HIDDEN}?"
    assert written[1]["question"] == "login as http://me:pw@host", "of the dataset: scored again"


def test_an_answer_is_not_scored_again_without_its_secret(caplog: pytest.LogCaptureFixture):
    Path("agent.py").write_text(f"def run(question):\n    return {TOKEN!r}\n")
    Path("rows.json").write_text(json.dumps([{"id": "a", "question": "key?", "answer": TOKEN}]))
    an_evaluation()
    for option, score in (
        (None, 1.0),
        ("--skip_completed_entries", 1.0),
        ("--skip_workflow", 0.0),
    ):
        command = ["eval", "--config_file=config.yml", *filter(None, [option])]
        assert CliRunner().invoke(cli.app, command).exit_code == 0
        assert json.loads(Path("out/match_output.json").read_text())["average_score"] == score
        assert ("1 answers in" in caplog.text) == (option == "--skip_workflow")


@pytest.mark.e2e
def test_a_run_writes_no_secret_of_its_agent(
    shared_server: LocalBackend, tiny_model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    rehearsal.document(
        tmp_path,
        shared_server.base_url,
        functions=None,
        workflow={"target": "agent.py:answer"},
        eval={
            "general": {"dataset": {"file_path": "rows.json"}},
            "evaluators": {"reward": {"target": "agent.py:reward"}},
        },
        llms={"actor": {"model_name": str(tiny_model)}},
        trainer_adapters={"a": {"backend": {"base_model": str(tiny_model), "rank": 4}}},
        trajectory_builders={"b": {"num_generations": 2}},
        finetuning={
            "num_epochs": 1,
            "rollout_retries": 1,
            "validation": {"allow_training_examples": True},
        },
    )
    (tmp_path / "agent.py").write_text(AGENT)
    rows("one", "fail")
    options = FinetuneOptions(
        config_file=tmp_path / "config.yml", validation_dataset=Path("rows.json")
    )
    status = finetune(options)
    out = tmp_path / "out"
    assert status == 0, (out / "events.jsonl").read_text()
    lines = (out / "trajectories" / "epoch_000.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    returned = [r for r in records if r["failure"] is None]
    assert len(returned) == 2 and all(HIDDEN in r["output"] for r in returned)
    assert all(r["reward"] == 1.0 for r in returned), "the evaluator read the output itself"
    assert all(r["metadata"]["reasoning"].startswith(f"the output has {HIDDEN}") for r in returned)
    assert all(r["shaped"][0]["metadata"] == {"seen": HIDDEN} for r in returned)
    failed = [r for r in records if r["failure"] is not None]
    assert failed and all(f"refused: {HIDDEN} at" in r["failure"]["traceback"] for r in failed)
    assert {p.name for p in out.iterdir()} >= {"events.jsonl", "report.html", "report.md"}
    for name in ("atif.jsonl", "openai", "parquet"):
        format, _, _ = name.partition(".")
        command = ["export-trajectories", str(out), "--format", format, "-o", str(out / name)]
        result = CliRunner().invoke(cli.app, [*command, "--root", str(shared_server.root)])
        assert result.exit_code == 0, result.output
    assert leaks(out) == []
    exported = [json.loads(line) for line in (out / "openai").read_text().splitlines()]
    asked = {conversation["messages"][0]["content"] for conversation in exported}
    assert asked == {f"one with {HIDDEN}", f"fail with {HIDDEN}"}
    atif = json.loads((out / "atif.jsonl").read_text().splitlines()[0])
    tokens = [
        step["metrics"]["completion_token_ids"] for step in atif["steps"] if "metrics" in step
    ]
    assert tokens and all(tokens), "the ids stay: they are what was sampled"
    assert TOKEN not in capfd.readouterr().err
    # The same command again reads its own files, and finds nothing to do.
    assert finetune(options) == 0
    assert leaks(out) == []
