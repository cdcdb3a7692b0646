"""A run that ended because of its agent goes on when what the agent needs is there."""

import json
from pathlib import Path

import pytest
from tests.e2e.conftest import QWEN, Finetune, Server

pytestmark = pytest.mark.slow

CONFIG = """
llms: {{model: {{_type: trainable, temperature: 1.0, max_tokens: 4}}}}
workflow: {{_type: python, target: "agent.py:run", llm: model}}
eval:
  general: {{dataset: {{_type: json, file_path: rows.json}}}}
  evaluators: {{length: {{_type: python, target: "agent.py:length"}}}}
trajectory_builders: {{b: {{_type: rollouts, num_generations: 2}}}}
trainer_adapters:
  a:
    _type: hone_server
    backend: {{ip: 127.0.0.1, port: {port}, name: agent, project: mended, base_model: {model}}}
trainers: {{t: {{_type: rl}}}}
finetuning:
  enabled: true
  trainer: t
  trajectory_builder: b
  trainer_adapter: a
  reward_function: {{name: length}}
  on_policy_failure: drop
  output_dir: out
"""
AGENT = """
from pathlib import Path

from hone.errors import PolicyFailure

async def run(question, llm):
    answer = await llm.chat([{"role": "user", "content": question}])
    runs = Path("runs")
    with runs.open("a") as file:
        file.write(".")
    # The first two are preflight's.
    if not Path("fixed").exists() and len(runs.read_text()) > 2:
        raise PolicyFailure("cannot be parsed", reason="unparseable")
    return answer.choices[0].message.content or ""

def length(item):
    return float(len(item.output_obj))
"""


def test_rollouts_that_failed_are_run_anew(
    server: Server, environment: dict[str, str], tmp_path: Path
):
    rows = [{"id": i, "question": f"Say {i}.", "answer": ""} for i in range(3)]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    (tmp_path / "train.yml").write_text(CONFIG.format(model=QWEN, port=server.port))
    (tmp_path / "agent.py").write_text(AGENT)
    finetune = Finetune(tmp_path, environment, ["--config_file=train.yml"])
    assert finetune.run() == 1
    assert (
        "No trajectories collected for epoch 1. Left out: policy/unparseable: 6."
        in (finetune.outputs[-1])
    )
    assert (
        "run the same command again: rollouts that gave nothing to train on are run again"
        in (finetune.outputs[-1])
    )

    (tmp_path / "fixed").touch()
    assert finetune.run() == 0, finetune.outputs[-1]
    assert len(finetune.lines("trajectories/epoch_000.jsonl")) == 12
    [job] = server.jobs("mended/agent")
    assert job["counts"]["by_rollout"] == 6
    assert finetune.run() == 0
    assert "nothing to do" in finetune.outputs[-1]
