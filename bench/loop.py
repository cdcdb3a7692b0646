"""The client loop: how long nobody samples after a training job has ended.

In:   Setting
Out:  a Result in milliseconds

`hone finetune` as a user runs it, against a server of its own process, for some epochs. The wait is
from the moment the server calls the job done (its new step is served by then) to the moment the
first rollout of the next epoch enters the user's code, which writes down when that was. Both clocks
are this machine's.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from bench.process import ContenderFailed
from bench.report import Result, result
from bench.setting import Setting

DEADLINE_S = 600.0
EPOCHS = 6
GOAL_MS = 100.0

AGENT = """
import time


async def run(input, llm):
    entered = time.time()
    await llm.chat([{"role": "user", "content": input}], max_tokens=4)
    return entered


def score(item):
    return float(item.output_obj) % 1
"""

CONFIG = """
llms:
  policy: {{_type: trainable, temperature: 1.0}}
workflow: {{_type: python, target: "agent.py:run", llm: policy}}
eval:
  general:
    dataset: {{_type: json, file_path: train.json}}
  evaluators:
    score: {{_type: python, target: "agent.py:score"}}
trajectory_builders:
  groups: {{_type: rollouts, num_generations: 4}}
trainer_adapters:
  server:
    _type: hone_server
    backend: {{ip: 127.0.0.1, port: {port}, base_model: "{model}"}}
trainers:
  loop: {{_type: rl}}
finetuning:
  enabled: true
  trainer: loop
  trajectory_builder: groups
  trainer_adapter: server
  reward_function: {{name: score}}
  num_epochs: {epochs}
  output_dir: out
"""


def run(setting: Setting) -> Iterator[Result]:
    directory = setting.scratch / "loop"
    directory.mkdir()
    # The wait before the first epoch is not one of these, so there is one less than epochs.
    epochs = 2 if setting.quick else max(EPOCHS, setting.repeats + 1)
    waits = [1e3 * seconds for seconds in measured(directory, setting.model, epochs)]
    setting.say(f"loop: waits in ms: {[round(wait, 1) for wait in waits]}")
    yield result("loop/wait_after_training", waits, "ms", goal=("value", "<=", GOAL_MS))
    yield result("loop/longest_wait_after_training", [max(waits)], "ms")


def measured(directory: Path, model: Path, epochs: int) -> list[float]:
    """Seconds from the end of each job to the first rollout after it."""
    from hone import LocalBackend

    (directory / "agent.py").write_text(AGENT)
    rows = [{"id": c, "question": f"Say a word that begins with {c}."} for c in "abcd"]
    (directory / "train.json").write_text(json.dumps(rows))
    with LocalBackend(directory / "server") as backend:
        backend.start()
        port = backend.base_url.rpartition(":")[2]
        text = CONFIG.format(port=port, model=model, epochs=epochs)
        (directory / "train.yml").write_text(text)
        _finetune(directory)
        return list(_waits(directory / "out", _ends(backend.base_url)))


def _finetune(directory: Path) -> None:
    command = [sys.executable, "-m", "hone", "finetune", "--config_file=train.yml"]
    ran = subprocess.run(
        command, cwd=directory, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    if ran.returncode:
        raise ContenderFailed(f"hone finetune ended with {ran.returncode}:\n{ran.stderr[-2000:]}")


def _ends(base_url: str) -> dict[str, float]:
    """When the server called each job done."""
    import httpx2

    jobs = httpx2.get(f"{base_url}/v1/training/jobs", timeout=30).json()
    return {job["id"]: job["ended_at"] for job in jobs}


def _waits(output: Path, ends: dict[str, float]) -> Iterator[float]:
    events = [json.loads(line) for line in (output / "events.jsonl").read_text().splitlines()]
    jobs = {event["epoch"]: event["job"] for event in events if event["type"] == "job_done"}
    for before, epoch in pairwise(sorted(jobs)):
        lines = (output / "trajectories" / f"epoch_{epoch:03d}.jsonl").read_text().splitlines()
        yield min(json.loads(line)["output"] for line in lines) - ends[jobs[before]]
