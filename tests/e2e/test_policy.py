"""Policy, frozen helper and judge on one base model, and a foreign one: only the policy is trained."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.conftest import QWEN, Finetune, Server
from tests.e2e.test_foreign import ANSWERS, endpoint

pytestmark = pytest.mark.slow

NAME, SENT = "frozen", "e2e/frozen"

AGENT = """
import json
import pathlib

import openai

async def hint(question, llm):
    reply = await llm.chat([{"role": "user", "content": f"hint {question}"}])
    return reply.choices[0].message.content or ""

async def critic(question, llm):
    reply = await llm.chat([{"role": "user", "content": question}])
    return reply.choices[0].message.content

async def run(question, llm, functions, base_model):
    advice = await functions["hint"](question) + await functions["critic"](question)
    reply = await llm.chat([{"role": "user", "content": f"{advice} {question}"}])
    # A client of the agent's own, which knows the base model's name and nothing of hone.
    async with openai.AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key) as own:
        last = await own.chat.completions.create(
            model=base_model, messages=[{"role": "user", "content": question}], max_tokens=4
        )
    return (reply.choices[0].message.content or "") + (last.choices[0].message.content or "")

async def score(output, llm):
    reply = await llm.chat([{"role": "user", "content": f"judge {output}"}])
    with pathlib.Path("judged.jsonl").open("a") as file:
        file.write(json.dumps([reply.model, reply.model_extra["policy_step"]]) + "\\n")
    return sum(letter in "aeiou" for letter in output) / max(len(output), 1)
"""

CONFIG = """
llms:
  policy: {{_type: {policy}, temperature: 1.0, max_tokens: 4}}
  helper: {{_type: openai, model_name: {base}, base_url: "{url}", api_key: default, max_tokens: 4}}
  judge: {{_type: openai, model_name: {base}, base_url: "{url}", api_key: default, max_tokens: 4}}
  foreign:
    {{_type: openai, model_name: other, base_url: "{foreign}", api_key: default, logprobs: true}}
functions:
  critic: {{_type: python, target: "agent.py:critic", llm: foreign}}
  hint: {{_type: python, target: "agent.py:hint", llm: helper}}
workflow:
  _type: python
  target: "agent.py:run"
  llm: policy
  functions: [hint, critic]
  args: {{base_model: {base}}}
eval:
  general: {{dataset: {{_type: json, file_path: rows.json}}}}
  evaluators: {{score: {{_type: python, target: "agent.py:score", llm: judge}}}}
trajectory_builders: {{b: {{_type: rollouts, num_generations: 3}}}}
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
  num_epochs: 2
  output_dir: out
"""


@pytest.fixture
def prepared(server: Server, environment: dict[str, str], tmp_path: Path) -> Iterator[Finetune]:
    rows = [{"id": i, "question": f"word {i}"} for i in range(2)]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    (tmp_path / "agent.py").write_text(AGENT)
    url = f"http://127.0.0.1:{server.inference_port}/v1"
    with endpoint(list) as foreign:
        values = {"base": QWEN, "url": url, "port": server.port, "name": NAME}
        trained = CONFIG.format(policy="trainable", foreign=foreign, **values)
        (tmp_path / "train.yml").write_text(trained)
        named = f"openai, model_name: {QWEN}, base_url: '{url}', api_key: default"
        (tmp_path / "unclear.yml").write_text(CONFIG.format(policy=named, foreign=url, **values))
        yield Finetune(tmp_path, environment, ["--config_file=train.yml"])


def test_only_the_policy_is_trained(server: Server, prepared: Finetune, tmp_path: Path):
    assert prepared.run() == 0, prepared.outputs[-1]
    assert (
        f"llms.policy is trained and sends '{SENT}'. llms.helper and llms.judge send '{SENT}@0': "
        "the base weights, which are not trained. The agent's own clients that request "
        f"'{QWEN}' inside a rollout get '{SENT}'."
    ) in prepared.outputs[-1]
    jobs = server.jobs(SENT)
    assert [job["step"] for job in jobs] == [1, 2]
    # 2 examples x 3 generations: the policy by its entry and by the agent's own client, the helper.
    assert [job["counts"] for job in jobs] == [{"by_rollout": 12, "dropped/frozen": 6}] * 2
    for epoch in (0, 1):
        labels = 0
        for record in prepared.lines(f"trajectories/epoch_{epoch:03}.jsonl"):
            calls = server.get(f"/v1/rollouts/{record['rollout']}")["calls"]
            assert [(call["requested_model"], call["call"]["step"]) for call in calls] == [
                (f"{SENT}@0", 0),
                (SENT, epoch),
                (QWEN, epoch),
            ]
            assert {call["model"] for call in calls} == {SENT}
            assert calls[0]["adapter_sha256"] is None
            trained = record["trained_calls"]
            assert trained == [call["id"] for call in calls[1:]]
            # The foreign model's answers, with log-probabilities of their own, are in the prompt only.
            assert any(answer in calls[1]["messages"][0]["content"] for answer in ANSWERS)
            labels += sum(len(call["call"]["completion_ids"]) for call in calls[1:])
        assert jobs[epoch]["metrics"]["learn/labels"] == labels
    # The judge is asked outside of rollouts, two preflight rollouts included: the base each time.
    judged = [json.loads(line) for line in (tmp_path / "judged.jsonl").read_text().splitlines()]
    assert {tuple(one) for one in judged} == {(f"{SENT}@0", 0)}
    assert len(judged) == 14


def test_where_any_entry_could_be_meant_the_run_is_refused(prepared: Finetune):
    prepared.arguments = ["--config_file=unclear.yml"]
    assert prepared.run() == 1
    assert (
        "finetuning.target_model: llms.policy, llms.helper and llms.judge each name the model in "
        f"training or its base model '{QWEN}'; set finetuning.target_model to the key"
    ) in prepared.outputs[-1]
