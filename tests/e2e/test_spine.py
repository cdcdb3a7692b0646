"""The whole of it on a tiny random model: the reward goes up, on examples it never trained on."""

import json
from pathlib import Path

import pytest
from tests.e2e.conftest import Server
from tests.e2e.test_kill import prepared

pytestmark = pytest.mark.slow


AGENT = """
async def run(input, llm):
    reply = await llm.chat([{"role": "user", "content": input}], max_tokens=1)
    return reply.choices[0].message.content or ""


def vowels(item):
    return float(any(letter in "aeiou" for letter in str(item.output_obj)))
"""


def test_the_reward_goes_up(server: Server, environment: dict[str, str], tmp_path: Path):
    finetune = prepared(tmp_path, server, environment, "spine")
    (tmp_path / "agent.py").write_text(AGENT)
    for key, value in {
        "finetuning.num_epochs": "8",
        "trajectory_builders.groups.num_generations": "16",
        "trainer_adapters.server.training.learning_rate": "1e-2",
        "trainer_adapters.server.training.groups_per_optimizer_step": "1",
        "eval.general.max_concurrency": "16",
        "finetuning.validation.reps": "32",
    }.items():
        finetune.arguments += ["-o", key, value]
    assert finetune.run("--validation_interval=4") == 0, finetune.outputs[-1]
    held_out = json.loads((finetune.output / "validation_history.json").read_text())
    first, last = held_out[0]["avg_reward"], held_out[-1]["avg_reward"]
    # A random model says a word with a vowel now and then.
    assert last > first + 0.25, [entry["avg_reward"] for entry in held_out]
    curve = [line["avg_reward"] for line in finetune.lines("training_metrics.jsonl")]
    assert sum(curve[-3:]) / 3 > sum(curve[:3]) / 3 + 0.1, curve
    # Every rollout was sampled by the step that the job before it published.
    steps = [0] + [event["step"] for event in finetune.events("job_done")]
    for epoch, step in enumerate(steps[:-1]):
        records = finetune.lines(f"trajectories/epoch_{epoch:03d}.jsonl")
        assert {tuple(record["policy_steps"]) for record in records} == {(step,)}, epoch
    report = json.loads((finetune.output / "report.json").read_text())
    # Two trained steps were validated, one of them was chosen, and it and step 0 answered anew.
    assert report["selection"] == {"chosen_of": 2, "fresh_answers": True}
    for measured, (epoch, step) in {
        "baseline": (0, 0),
        "tuned": (report["tuned"]["epoch"], report["tuned"]["step"]),
    }.items():
        records = finetune.lines(f"trajectories/final_{epoch:03d}.jsonl")
        assert {tuple(record["policy_steps"]) for record in records} == {(step,)}
        mean = sum(record["reward"] for record in records) / len(records)
        assert report[measured]["mean"] == pytest.approx(mean)
    assert report["tuned"]["mean"] > report["baseline"]["mean"]
