"""Two turns, of which only the first was good: outcome rewards raise both, per-turn rewards the good one."""

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.e2e.conftest import COMMIT, QWEN, Finetune, Server
from tests.e2e.test_branches import CONFIG

from hone.types import model_directory

pytestmark = pytest.mark.slow

AGENT = """
import itertools

import hone

values = itertools.count()


async def run(question, llm):
    messages = [{"role": "user", "content": question}]
    first = await llm.chat(messages)
    value = float(next(values))  # differs between the two rollouts
    undone = "undo" in question
    hone.step("plan", value=-value if undone else value)
    messages += [{"role": "assistant", "content": first.choices[0].message.content}]
    await llm.chat([*messages, {"role": "user", "content": "go on"}])
    hone.step("answer", value=value if undone else 0.0)  # 0 in both rollouts
    return value


def score(item):
    return float(item.output_obj)
"""


def logprobs(model: Any, call: dict[str, Any]) -> torch.Tensor:
    """Of a call's sampled tokens, with gradients."""
    prompt, sampled = call["prompt_ids"], call["completion_ids"]
    logits = model(torch.tensor([prompt + sampled])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(sampled)[:, None])[:, 0]


def gradient_norm(model: Any, rollouts: list[list[dict[str, Any]]], advantages: Any) -> float:
    """GRPO's first step, written out: the ratio is 1, and each rollout weighs its labels alike."""
    model.zero_grad()
    for calls, row in zip(rollouts, advantages, strict=True):
        labels = sum(len(call["completion_ids"]) for call in calls)
        terms = [a * logprobs(model, call).sum() for a, call in zip(row, calls, strict=True)]
        (-torch.stack(terms).sum() / labels / len(rollouts)).backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return float(torch.cat([grad.flatten() for grad in grads]).norm())


@pytest.mark.parametrize(
    ("credit", "question", "expected"),
    [
        # Two rewards that differ: one standard deviation below and above their mean.
        ("outcome", "how many?", [[-1.0, -1.0], [1.0, 1.0]]),
        # The second turns have equal values: nothing says which of them was better.
        ("per_call", "how many?", [[-1.0, 0.0], [1.0, 0.0]]),
        # Each plan loses what its answer wins back: from there on, both rollouts come to 0.
        ("return_to_go", "do and undo", [[0.0, -1.0], [0.0, 1.0]]),
    ],
)
def test_credit_decides_which_turn_is_raised(
    server: Server,
    environment: dict[str, str],
    tmp_path: Path,
    credit: str,
    question: str,
    expected: list[list[float]],
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    (tmp_path / "rows.json").write_text(json.dumps([{"id": 0, "question": question}]))
    (tmp_path / "agent.py").write_text(AGENT)
    name = f"credit-{credit.replace('_', '-')}"
    config = CONFIG.format(port=server.port, name=name, base=QWEN, rollouts=2)
    (tmp_path / "train.yml").write_text(config)
    finetune = Finetune(tmp_path, environment, ["--config_file=train.yml"])
    finetune.arguments += ["-o", "trainer_adapters.a.training.credit", credit]
    assert finetune.run() == 0, finetune.outputs[-1]

    (job,) = server.jobs(f"e2e/{name}")
    tokens = server.get(f"/v1/training/jobs/{job['id']}/samples?limit=1000")["tokens"]
    sampled = [token for token in tokens if token["kind"] == "sampled"]
    trained = {
        call: {token["advantage"] for token in of}
        for call, of in groupby(sampled, lambda t: (t["trajectory"], t["call"]))
    }
    low, high = sorted(
        {trajectory for trajectory, _ in trained}, key=lambda t: [*trained[t, 0], *trained[t, 1]]
    )
    for trajectory, row in zip((low, high), expected, strict=True):
        for turn, advantage in enumerate(row):
            (value,) = trained[trajectory, turn]
            assert value == pytest.approx(advantage, abs=1e-5)

    records = finetune.lines("trajectories/epoch_000.jsonl")
    records.sort(key=lambda record: record["reward"])
    assert [len(record["shaped_rewards"]) for record in records] == [2, 2]
    rollouts = [
        [call["call"] for call in server.get(f"/v1/rollouts/{record['rollout']}")["calls"]]
        for record in records
    ]
    # The gradient is that of the turns with an advantage, as plain transformers and PEFT compute it.
    hub = Path(environment["HF_HOME"]) / "hub" / f"models--{QWEN.replace('/', '--')}"
    base = hub / "snapshots" / COMMIT
    checkpoints = model_directory(server.root, "e2e", name) / "checkpoints"
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = PeftModel.from_pretrained(model, checkpoints / "0000", is_trainable=True)
    norm = gradient_norm(model, rollouts, expected)
    assert job["metrics"]["learn/grad_norm"] == pytest.approx(norm, rel=1e-3)
    # ... and is not that of the other kind of credit.
    other = [[-1.0, 0.0], [1.0, 0.0]] if credit == "outcome" else [[-1.0, -1.0], [1.0, 1.0]]
    assert gradient_norm(model, rollouts, other) != pytest.approx(norm, rel=0.05)
    # Either way the good turn of the better rollout has become more likely, the other one less.
    turn = 1 if credit == "return_to_go" else 0
    before = [logprobs(model, calls[turn]).sum().item() for calls in rollouts]
    model.load_adapter(checkpoints / "0001", "trained")
    model.set_adapter("trained")
    worse, better = (logprobs(model, calls[turn]).sum().item() for calls in rollouts)
    assert worse < before[0] and better > before[1]
