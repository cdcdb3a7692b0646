"""The package of tests/plugin at work: its own workflow, reward, builder, adapter and trainer."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.patience import PATIENCE_S

from hone.config.build import build
from hone.config.schema import read
from hone.evaluation.run import evaluation

pytestmark = pytest.mark.usefixtures("plugin")

YAML = """
llms:
  m: {_type: openai, model_name: parrot, base_url: "http://127.0.0.1:${PARROT}/v1", api_key: x}
workflow: {_type: my_workflow, llm: m, system_prompt: Repeat.}
eval:
  general:
    output_dir: eval
    dataset: {_type: jsonl, file_path: rows.jsonl}
  evaluators:
    near: {_type: my_custom_evaluator, ignore_case: true}
trajectory_builders: {b: {_type: plain_builder, num_generations: 2}}
trainer_adapters: {a: {_type: file_adapter, directory: jobs}}
trainers: {t: {_type: plain_trainer, stop_at: 0.9}}
finetuning:
  enabled: true
  trainer: t
  trajectory_builder: b
  trainer_adapter: a
  reward_function: {name: near}
  output_dir: out
"""


class Parrot(BaseHTTPRequestHandler):
    """Answers every chat with its last message in capitals."""

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        message = {"role": "assistant", "content": request["messages"][-1]["content"].upper()}
        answer: dict[str, Any] = {"id": "c", "object": "chat.completion", "created": 0}
        answer |= {"model": request["model"]}
        answer["choices"] = [{"index": 0, "message": message, "finish_reason": "stop"}]
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing on stderr."""


@pytest.fixture
def parrot(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Parrot)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("PARROT", str(server.server_port))
    yield server.server_port
    server.shutdown()
    server.server_close()
    thread.join()


ROWS = """\
{"id": 1, "question": "ab", "answer": "ab"}
{"id": 2, "question": "ab", "answer": "abab"}
"""
# The answer to "ab" is "AB": without regard to case that is 1 for "ab", and 2*2/6 for "abab".
MEAN = (1 + 4 / 6) / 2


async def test_it_trains_from_its_yaml(write: Callable[..., Path], parrot: int):
    write(ROWS, "rows.jsonl")
    async with build(read(write(YAML))) as builder:
        run = builder.document.finetuning
        trainer = await builder.get_trainer(
            "t",
            trajectory_builder=await builder.get_trajectory_builder("b"),
            trainer_adapter=await builder.get_trainer_adapter("a"),
        )
        await trainer.initialize(run)
        trainer.bind_evaluations(await evaluation(builder), None)
        statuses = await trainer.run(2)
    assert [status.status for status in statuses] == ["completed", "completed"]
    lines = Path("out/training_metrics.jsonl").read_text(encoding="utf-8").splitlines()
    # Two examples, two generations; the mean is below stop_at, so both epochs ran.
    assert [json.loads(line) for line in lines] == [
        {"epoch": 0, "avg_reward": pytest.approx(MEAN), "num_trajectories": 4},
        {"epoch": 1, "avg_reward": pytest.approx(MEAN), "num_trajectories": 4},
    ]
    assert statuses[0].metadata is not None
    job = Path(statuses[0].metadata["file"]).read_text(encoding="utf-8").splitlines()
    first, second = (json.loads(line) for line in job)
    assert [t["reward"] for t in first] == [1.0, 1.0]
    assert [t["metadata"] for t in second] == [{"id": "2", "generation": g} for g in (0, 1)]
    assert [(m["role"], m["content"]) for m in first[0]["episode"]] == [
        ("system", "Repeat."),
        ("user", "ab"),
        ("assistant", "AB"),
    ]


@pytest.mark.e2e
def test_hone_finetune_runs_it(write: Callable[..., Path], parrot: int, plugin: Path):
    write(ROWS, "rows.jsonl")
    write(YAML)
    command = [sys.executable, "-m", "hone", "finetune", "--config_file=a.yml"]
    done = subprocess.run(
        [*command, "-o", "finetuning.num_epochs", "2", "-o", "trainers.t.stop_at", "0.8"],
        env={**os.environ, "PYTHONPATH": str(plugin)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    # The mean of 0.833 reaches stop_at, so the second epoch did not run.
    [line] = Path("out/training_metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(line)["avg_reward"] == pytest.approx(MEAN)
    [job] = Path("jobs").glob("plain_run_*_0.jsonl")
    assert len(job.read_text(encoding="utf-8").splitlines()) == 2
