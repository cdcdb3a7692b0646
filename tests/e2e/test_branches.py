"""An agent that branches: sub-agents in parallel, a compacted context, two continuations of one answer."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.conftest import QWEN, Finetune, Server

from hone.wire.metric_names import JOB_METRICS

pytestmark = pytest.mark.slow

NAME, ROLLOUTS = "branches", 2

AGENT = """
import asyncio
import itertools

scores = itertools.count()


def user(text):
    return {"role": "user", "content": text}


async def run(question, llm):
    async def ask(messages):
        answer = await llm.chat(messages)
        return [*messages, {"role": "assistant", "content": answer.choices[0].message.content}]

    async def sub_agent(task):
        messages = await ask([{"role": "system", "content": f"You {task}."}, user(question)])
        return await ask([*messages, user("go on")])

    plan = await ask([{"role": "system", "content": "You plan."}, user(question)])
    await asyncio.gather(sub_agent("search"), sub_agent("count"))
    joined = await ask([*plan, user("both are done")])
    # What came before the newest answer is replaced by a summary.
    short = await ask([plan[0], user("in short: all is done"), joined[-1], user("now answer")])
    await asyncio.gather(ask([*short, user("in prose")]), ask([*short, user("in verse")]))
    return short[-1]["content"] or ""


def score(item):
    return float(next(scores))
"""

CONFIG = """
llms: {{policy: {{_type: trainable, temperature: 1.0, max_tokens: 3}}}}
workflow: {{_type: python, target: "agent.py:run", llm: policy}}
eval:
  general: {{dataset: {{_type: json, file_path: rows.json}}}}
  evaluators: {{score: {{_type: python, target: "agent.py:score"}}}}
trajectory_builders: {{b: {{_type: rollouts, num_generations: {rollouts}}}}}
trainer_adapters:
  a:
    _type: hone_server
    backend: {{ip: 127.0.0.1, port: {port}, name: {name}, project: e2e, base_model: {base}}}
    training: {{learning_rate: 1e-3}}
trainers: {{t: {{_type: rl}}}}
finetuning:
  enabled: true
  trainer: t
  trajectory_builder: b
  trainer_adapter: a
  reward_function: {{name: score}}
  num_epochs: 1
  output_dir: out
"""

# Of one rollout: the plan is its first call. The sub-agents are two new conversations, each continued
# once. The plan is continued, then rewritten, and the rewritten conversation is continued twice.
TURNS = {
    "turns/first": 1,
    "turns/first/first_call": 1,
    "turns/branched": 2,
    "turns/branched/another_conversation": 2,
    "turns/re-rendered": 1,
    "turns/re-rendered/history_rewritten": 1,
    "turns/bridged": 5,
    "turns/bridged/forked": 1,
    "turns/branches": 4,
}


def is_prefix(short: Sequence[int], ids: Sequence[int]) -> bool:
    return len(short) < len(ids) and list(ids[: len(short)]) == list(short)


def test_branches_and_shared_tokens_are_counted(
    server: Server, environment: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "rows.json").write_text(json.dumps([{"id": 0, "question": "how many?"}]))
    (tmp_path / "agent.py").write_text(AGENT)
    config = CONFIG.format(port=server.port, name=NAME, base=QWEN, rollouts=ROLLOUTS)
    (tmp_path / "train.yml").write_text(config)
    finetune = Finetune(tmp_path, environment, ["--config_file=train.yml"])
    assert finetune.run() == 0, finetune.outputs[-1]

    (line,) = finetune.lines("training_metrics.jsonl")
    turns = {name: value for name, value in line.items() if name.startswith("turns/")}
    expected = {name: ROLLOUTS * n for name, n in TURNS.items()}
    assert expected.items() <= turns.items()
    # An answer of three tokens has rarely ended its turn: then the bridge closes it, and says so.
    assert turns.get("turns/bridged/exact", 0) + turns.get("turns/bridged/truncated", 0) == 10

    # Tokens, from the recorded ids alone.
    records = finetune.lines("trajectories/epoch_000.jsonl")
    rollouts: list[list[dict[str, Any]]] = [
        server.get(f"/v1/rollouts/{record['rollout']}")["calls"] for record in records
    ]
    assert [len(calls) for calls in rollouts] == [9] * ROLLOUTS
    prompt_tokens = continued = 0
    paths: list[list[int]] = []
    for calls in rollouts:
        ids = [c["call"]["prompt_ids"] + c["call"]["completion_ids"] for c in calls]
        for call in calls:
            prompt = call["call"]["prompt_ids"]
            prompt_tokens += len(prompt)
            continued += max((len(whole) for whole in ids if is_prefix(whole, prompt)), default=0)
        paths += ids
    assert turns["turns/prompt_tokens"] == prompt_tokens
    assert turns["turns/continued_tokens"] == continued
    assert line["learn/logical_tokens"] == sum(map(len, paths))
    # A node per distinct prefix; the last token of a path predicts nothing.
    nodes = {tuple(path[:end]) for path in paths for end in range(1, len(path))}
    assert line["learn/computed_tokens"] == len(nodes)
    assert line["learn/shared_tokens"] == sum(len(path) - 1 for path in paths) - len(nodes)
    assert line["learn/labels"] == sum(
        len(call["call"]["completion_ids"]) for calls in rollouts for call in calls
    )
    patterns = [re.sub("[A-Z]+", r"[\\w-]+", name) for name in JOB_METRICS]
    for name in (name for name in line if "/" in name):
        assert any(re.fullmatch(pattern, name) for pattern in patterns), f"undocumented: {name}"
    report = json.loads((finetune.output / "report.json").read_text())
    assert report["turns"] == turns
    text = (finetune.output / "report.md").read_text()
    assert (
        "18 turns, of which 10 continue sampled ids and 8 start a branch (4 another conversation, "
        "2 forked, 2 history rewritten)."
    ) in text
