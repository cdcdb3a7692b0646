"""The seed's own basic configuration, against a `hone serve` that somebody else started."""

import json
from pathlib import Path

import pytest
from tests.e2e.conftest import QWEN, Finetune, Server

BASIC = Path(__file__).parents[1] / "data" / "seed" / "basic.yml"

pytestmark = pytest.mark.slow


def test_the_seeds_configuration_trains_and_reports(
    server: Server, environment: dict[str, str], tmp_path: Path
):
    (tmp_path / "data").mkdir()
    rows = [{"id": i, "question": f"say {w}", "answer": w} for i, w in enumerate(("ant", "bee"))]
    (tmp_path / "data" / "training_data.json").write_text(json.dumps(rows))
    (tmp_path / "data" / "val.json").write_text(json.dumps([{"question": "say c", "answer": "c"}]))
    finetune = Finetune(
        tmp_path,
        environment,
        [
            f"--config_file={BASIC}",
            "--validation_dataset=data/val.json",
            "--validation_interval=5",
            *("-o", "trainer_adapters.art_adapter.backend.port", str(server.port)),
            *("-o", "llms.training_llm.base_url", f"http://localhost:{server.inference_port}/v1"),
            *("-o", "finetuning.num_epochs", "2"),
            *("-o", "finetuning.output_dir", "out"),
        ],
    )
    assert finetune.run() == 0, finetune.outputs[-1]
    output = finetune.outputs[-1]
    run_id = json.loads((finetune.output / "run.json").read_text())["run_id"]
    assert run_id.startswith("art_run_")
    for line in (
        f"INFO - Starting epoch 1 for run {run_id}",
        f"INFO - Starting 2 evaluation runs for run_id: {run_id}",
        f"INFO - Built 4 trajectories across 2 examples for run_id: {run_id}",
        "INFO - Submitted 4 trajectories in 2 groups for training",
        f"INFO - Training {run_id} completed successfully.",
        "INFO - Completed epoch 1/2",
        "INFO - Completed epoch 2/2",
    ):
        assert line in output, output

    jobs = server.jobs("my_project/my_training_run")
    assert [job["state"] for job in jobs] == ["done", "done"]
    assert {job["base_model"] for job in jobs} == {QWEN}
    # Written 1e-6, which YAML 1.1 takes for text; what the server used comes back with the job.
    assert {job["config"]["learning_rate"] for job in jobs} == {1e-6}
    assert [e["config"]["learning_rate"] for e in finetune.events("job_done")] == [1e-6, 1e-6]

    # The LLM entry names the base model; inside the run that is the newest step.
    records = finetune.lines("trajectories/epoch_001.jsonl")
    steps = {job["step"] for job in jobs if job["step"] is not None}
    assert all(step in {0} | steps for record in records for step in record["policy_steps"])
    report = json.loads((finetune.output / "report.json").read_text())
    assert report["epochs"] == 2
    assert {"baseline", "tuned", "gain", "phases", "checkpoint"} <= set(report)
    assert (finetune.output / "report.html").exists()
    assert finetune.run() == 0
    assert "nothing to do" in finetune.outputs[-1]
    assert len(server.jobs("my_project/my_training_run")) == 2


PLUGIN = """
llms:
  model: {{_type: openai, model_name: {model}, base_url: "http://127.0.0.1:{port}/v1", api_key: default}}
workflow: {{_type: my_workflow, llm: model, max_tokens: 4}}
eval:
  general: {{dataset: {{_type: json, file_path: rows.json}}}}
  evaluators: {{near: {{_type: my_custom_evaluator}}}}
trajectory_builders: {{b: {{_type: plain_builder}}}}
trainer_adapters: {{a: {{_type: file_adapter, directory: jobs}}}}
trainers: {{t: {{_type: plain_trainer}}}}
finetuning:
  enabled: true
  trainer: t
  trajectory_builder: b
  trainer_adapter: a
  reward_function: {{name: near}}
  num_epochs: 2
  output_dir: out
"""


def test_a_plugins_own_three_parts_run_without_hones(
    server: Server, environment: dict[str, str], tmp_path: Path
):
    (tmp_path / "rows.json").write_text(json.dumps([{"question": "say a", "answer": "a"}]))
    (tmp_path / "train.yml").write_text(PLUGIN.format(model=QWEN, port=server.inference_port))
    finetune = Finetune(tmp_path, environment, ["--config_file=train.yml"])
    assert finetune.run() == 0, finetune.outputs[-1]
    assert len(list((tmp_path / "jobs").iterdir())) == 2
    assert [line["epoch"] for line in finetune.lines("training_metrics.jsonl")] == [0, 1]
    assert "Finetuning completed successfully: 2 epochs" in finetune.outputs[-1]
