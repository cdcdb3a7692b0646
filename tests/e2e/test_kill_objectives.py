"""The trainers sft and dpo, killed while a job trains: the same command comes to the same end.

Runs in `make chaos`: each case starts three servers.
"""

import json
import os
import signal
import time
from pathlib import Path

import psutil
import pytest
from tests.e2e.conftest import QWEN, Finetune
from tests.server.small_server import digest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("HONE_CHAOS" not in os.environ, reason="slow; `make chaos` runs it"),
]

EPOCHS, ROWS = 2, 48

AGENT = """
async def run(input, llm):
    reply = await llm.chat([{"role": "user", "content": input}], max_tokens=4)
    return reply.choices[0].message.content or ""


def length(item):
    return float(len(str(item.output_obj)))
"""

CONFIG = """
llms:
  policy: {{_type: trainable, temperature: 1.0}}
workflow: {{_type: python, target: "agent.py:run", llm: policy}}
eval:
  general:
    dataset: {{_type: json, file_path: train.json}}
  evaluators:
    length: {{_type: python, target: "agent.py:length"}}
trajectory_builders:
  rows: {{_type: conversations}}
trainer_adapters:
  server:
    _type: hone_server
    backend: {{name: agent, base_model: {base_model}, root: root}}
    training: {{learning_rate: 1e-3, groups_per_optimizer_step: 1}}
trainers:
  loop: {{_type: {trainer}}}
finetuning:
  enabled: true
  trainer: loop
  trajectory_builder: rows
  trainer_adapter: server
  reward_function: {{name: length}}
  num_epochs: {epochs}
  output_dir: out
"""


def prepared(directory: Path, environment: dict[str, str], trainer: str) -> Finetune:
    directory.mkdir()
    rows = [
        {"id": f"e{i}", "question": f"word {i}", "prompt": f"word {i}"}
        | {"chosen": f"It is the word {i}.", "rejected": f"{i}?"}
        for i in range(ROWS)
    ]
    (directory / "train.json").write_text(json.dumps(rows))
    (directory / "agent.py").write_text(AGENT)
    config = CONFIG.format(base_model=QWEN, trainer=trainer, epochs=EPOCHS)
    (directory / "train.yml").write_text(config)
    return Finetune(directory, environment, ["--config_file=train.yml"])


def checkpoints(finetune: Finetune) -> dict[str, str]:
    """The digest of adapter and optimizer of each step."""
    (model,) = finetune.directory.glob("root/projects/*/models/agent/checkpoints")
    return {path.name: digest(path) for path in sorted(model.iterdir())}


def optimizer_steps(finetune: Finetune) -> int:
    """How many the learner has begun in its first job."""
    log = finetune.directory / "root" / "logs" / "learner.log"
    return log.read_text().count('"phase": "train"') if log.exists() else 0


@pytest.mark.parametrize("trainer", ["sft", "dpo"])
def test_killed_while_a_job_trains_it_comes_to_the_same_end(
    environment: dict[str, str], tmp_path: Path, trainer: str
):
    whole = prepared(tmp_path / "whole", environment, trainer)
    assert whole.run() == 0, whole.outputs[-1]

    killed = prepared(tmp_path / "killed", environment, trainer)
    process = killed.start()
    while optimizer_steps(killed) < 3:
        assert process.poll() is None, "it ended"
        time.sleep(0.002)
    everything = psutil.Process(process.pid).children(recursive=True)  # the server and its learner
    for one in (*everything, psutil.Process(process.pid)):
        one.send_signal(signal.SIGKILL)
    assert killed.finish(process) == -signal.SIGKILL, killed.outputs[-1]
    (submitted,) = killed.events("job_submitted")
    assert not killed.events("job_done"), "it was killed too late"

    assert killed.run() == 0, killed.outputs[-1]
    done = killed.events("job_done")
    assert [event["step"] for event in done] == [1, 2]
    assert done[0]["job"] == submitted["job"], "the same job, not another one"
    assert checkpoints(killed) == checkpoints(whole)
    metrics = [
        [(line["epoch"], line["num_trajectories"]) for line in run.lines("training_metrics.jsonl")]
        for run in (whole, killed)
    ]
    assert metrics[0] == metrics[1]
    assert killed.run() == 0, killed.outputs[-1]  # a finished run trains nothing
    assert checkpoints(killed) == checkpoints(whole)
