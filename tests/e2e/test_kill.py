"""Killed at ten random points, the same command goes on: nothing is run or trained twice."""

import itertools
import json
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.conftest import QWEN, Finetune, Server
from tests.patience import PATIENCE_S

EPOCHS, EXAMPLES, GENERATIONS, HELD_OUT = 8, 4, 3, 2
KILLS = 10
NOISE = {"Traceback", "Task", "asyncio", "Exception", "KeyboardInterrupt", "CancelledError"}

pytestmark = pytest.mark.slow

AGENT = """
async def run(input, llm):
    reply = await llm.chat([{"role": "user", "content": input}], max_tokens=6)
    return reply.choices[0].message.content or ""


def vowels(item):
    text = str(item.output_obj)
    return sum(letter in "aeiou" for letter in text) / max(len(text), 1)
"""

CONFIG = """
llms:
  policy: {{_type: trainable, temperature: 1.0}}
workflow: {{_type: python, target: "agent.py:run", llm: policy}}
eval:
  general:
    max_concurrency: 2
    dataset: {{_type: json, file_path: train.json}}
  evaluators:
    vowels: {{_type: python, target: "agent.py:vowels"}}
trajectory_builders:
  groups: {{_type: rollouts, num_generations: {generations}}}
trainer_adapters:
  server:
    _type: hone_server
    backend: {{ip: 127.0.0.1, port: {port}, name: {name}, base_model: {base_model}}}
    training: {{learning_rate: 1e-3}}
trainers:
  loop: {{_type: rl}}
finetuning:
  enabled: true
  trainer: loop
  trajectory_builder: groups
  trainer_adapter: server
  reward_function: {{name: vowels}}
  num_epochs: {epochs}
  output_dir: out
"""


def prepared(directory: Path, server: Server, environment: dict[str, str], name: str) -> Finetune:
    """Everything a run needs, in a directory."""
    rows = [{"id": f"e{i}", "question": f"word {i}"} for i in range(EXAMPLES + HELD_OUT)]
    (directory / "train.json").write_text(json.dumps(rows[:EXAMPLES]))
    (directory / "val.json").write_text(json.dumps(rows[EXAMPLES:]))
    (directory / "agent.py").write_text(AGENT)
    (directory / "train.yml").write_text(
        CONFIG.format(
            generations=GENERATIONS, port=server.port, name=name, base_model=QWEN, epochs=EPOCHS
        )
    )
    arguments = ["--config_file=train.yml", "--validation_dataset=val.json"]
    return Finetune(directory, environment, [*arguments, "--validation_interval=4"])


def written(finetune: Finetune) -> int:
    """Lines in the journal and in the events: how far it has come."""
    files = [*finetune.output.glob("trajectories/*.jsonl"), finetune.output / "events.jsonl"]
    return sum(path.read_bytes().count(b"\n") for path in files if path.exists())


def kill_after(finetune: Finetune, lines: int) -> bool:
    """Start it and kill it when it has written so many lines more; False if it ended before."""
    before, process = written(finetune), finetune.start()
    while process.poll() is None and written(finetune) < before + lines:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    return finetune.finish(process) == -signal.SIGKILL


def rollouts(finetune: Finetune) -> Iterator[tuple[str, int, str, int]]:
    for path in sorted(finetune.output.glob("trajectories/*.jsonl")):
        for record in finetune.lines(f"trajectories/{path.name}"):
            assert record["failure"] is None, record
            yield record["split"], record["epoch"], record["example"], record["generation"]


def check(finetune: Finetune, server: Server, name: str) -> None:
    """Holds after every kill, and at the end."""
    again = {key: n for key, n in Counter(rollouts(finetune)).items() if n > 1}
    assert not again, f"finished rollouts were run again: {again}"
    jobs = server.jobs(f"trainer_project/{name}") if finetune.events("run_started") else []
    steps = [job["step"] for job in jobs if job["state"] == "done" and job["step"] is not None]
    assert steps == sorted(set(steps)), f"a step was trained twice: {steps}"
    assert len(jobs) <= EPOCHS, [job["id"] for job in jobs]


def test_ten_kills_lose_nothing_and_repeat_nothing(
    server: Server, environment: dict[str, str], tmp_path: Path
):
    finetune, draw = prepared(tmp_path, server, environment, "killed"), random.Random(4)
    # Each epoch writes about 2 x 12 + 5 lines; ten kills spread over eight of them.
    whole = EPOCHS * (2 * EXAMPLES * GENERATIONS + 5)
    kills = 0
    while kills < KILLS:
        killed = kill_after(finetune, draw.randint(1, 2 * whole // KILLS))
        assert killed, f"it ended after {kills} kills: make the run longer\n{finetune.outputs[-1]}"
        kills += 1
        check(finetune, server, "killed")
    assert finetune.run() == 0, finetune.outputs[-1]
    check(finetune, server, "killed")

    expected = {
        ("train", epoch, f"e{i}", generation)
        for epoch in range(EPOCHS)
        for i in range(EXAMPLES)
        for generation in range(GENERATIONS)
    } | {("val", epoch, f"e{EXAMPLES + i}", 0) for epoch in (0, 4, 8) for i in range(HELD_OUT)}
    held_out = json.loads((finetune.output / "validation_history.json").read_text())
    assert [entry["epoch"] for entry in held_out] == [0, 4, 8]
    best = max(held_out, key=lambda entry: entry["avg_reward"])
    compared = best if best["epoch"] else held_out[-1]  # it and the first answered side by side
    finals = itertools.product((0, compared["epoch"]), range(HELD_OUT))
    expected |= {("final", epoch, f"e{EXAMPLES + i}", 0) for epoch, i in finals}
    assert set(rollouts(finetune)) == expected
    jobs = server.jobs("trainer_project/killed")
    assert [job["state"] for job in jobs] == ["done"] * EPOCHS
    done = {event["epoch"]: event["job"] for event in finetune.events("job_done")}
    assert [done[epoch] for epoch in range(EPOCHS)] == [job["id"] for job in jobs]

    curve = finetune.lines("training_metrics.jsonl")
    assert [line["epoch"] for line in curve] == list(range(EPOCHS))
    for line in curve:
        records = finetune.lines(f"trajectories/epoch_{line['epoch']:03d}.jsonl")
        mean = sum(record["reward"] for record in records) / len(records)
        assert line["avg_reward"] == pytest.approx(mean)
    model = server.get("/v1/training/models/trainer_project/killed")
    assert (model["step"], model["best_step"]) == (EPOCHS, best["step"])
    report = json.loads((finetune.output / "report.json").read_text())
    assert report["epochs"] == EPOCHS


def test_ctrl_c_says_that_the_same_command_goes_on(
    server: Server, environment: dict[str, str], tmp_path: Path
):
    finetune = prepared(tmp_path, server, environment, "interrupted")
    finetune.arguments += ["-o", "finetuning.num_epochs", "3"]
    process = finetune.start()
    while written(finetune) < 20 and process.poll() is None:
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    assert finetune.finish(process) == 130, finetune.outputs[-1]
    last = finetune.outputs[-1].strip().splitlines()[-1]
    assert "Interrupted. The same command resumes run run_" in last
    assert not NOISE & set(finetune.outputs[-1].split()), finetune.outputs[-1]
    assert json.loads((finetune.output / "report.json").read_text())["status"] == "unfinished"
    text = (finetune.output / "report.md").read_text()
    assert text.startswith("# The run was interrupted after ")
    assert f"/hone finetune {' '.join(finetune.arguments)}\n" in text
    assert finetune.run() == 0, finetune.outputs[-1]
    report = json.loads((finetune.output / "report.json").read_text())
    assert (report["status"], report["epochs"]) == ("completed", 3)
    check(finetune, server, "interrupted")
    assert len(server.jobs("trainer_project/interrupted")) == 3


def test_ctrl_c_at_any_point_says_nothing_of_asyncio(
    server: Server, environment: dict[str, str], tmp_path: Path
):
    finetune, draw = prepared(tmp_path, server, environment, "often"), random.Random(6)
    for _ in range(3):
        before, more, process = written(finetune), draw.randint(1, 60), finetune.start()
        while process.poll() is None and written(finetune) < before + more:
            time.sleep(0.002)
        process.send_signal(signal.SIGINT)
        assert finetune.finish(process) == 130, finetune.outputs[-1]
        assert not NOISE & set(finetune.outputs[-1].split()), finetune.outputs[-1]
        check(finetune, server, "often")
    report = json.loads((finetune.output / "report.json").read_text())
    assert (report["status"], report["sessions"]) == ("unfinished", 3)


def test_fresh_starts_at_step_0_and_keeps_the_old_run(
    server: Server, environment: dict[str, str], tmp_path: Path
):
    finetune = prepared(tmp_path, server, environment, "fresh")
    finetune.arguments += ["-o", "finetuning.num_epochs", "1"]
    assert finetune.run() == 0, finetune.outputs[-1]
    first = json.loads((finetune.output / "run.json").read_text())["run_id"]
    refused = finetune.run("-o", "finetuning.seed", "7")
    assert refused == 1
    assert "finetuning.seed: None then, 7 now" in finetune.outputs[-1]
    assert "--fresh" in finetune.outputs[-1]
    assert finetune.run("-o", "finetuning.seed", "7", "--fresh") == 0, finetune.outputs[-1]
    assert (tmp_path / f"out.{first}" / "report.json").exists()
    (started,) = finetune.events("run_started")
    assert started["step"] == 0
    assert [event["step"] for event in finetune.events("job_done")] == [1]
    models = {f"{m['project']}/{m['name']}": m["step"] for m in server.get("/v1/training/models")}
    assert models[f"trainer_project/fresh.{first}"] == 1
    assert models["trainer_project/fresh"] == 1


def test_a_server_that_is_not_there_is_named(environment: dict[str, str], tmp_path: Path):
    nobody = Server(port=9, inference_port=9, root=tmp_path, log=tmp_path / "log")
    finetune = prepared(tmp_path, nobody, environment, "nobody")
    assert finetune.run() == 1
    assert "ERROR - Failed to connect to ART backend. http://127.0.0.1:9" in finetune.outputs[-1]
    assert "curl http://127.0.0.1:9/health" in finetune.outputs[-1]
    assert "Traceback" not in finetune.outputs[-1]


def test_a_dry_run_contacts_nobody(environment: dict[str, str], tmp_path: Path):
    nobody = Server(port=9, inference_port=9, root=tmp_path, log=tmp_path / "log")
    finetune = prepared(tmp_path, nobody, environment, "dry")
    process = finetune.start("--dry-run")
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
    # 4 examples x 3 generations x 8 epochs, and 2 held-out examples before, at 4 and at 8.
    assert "8 epochs of 1 round: 96 rollouts of at least one model call, 8 jobs" in output
    assert "2 examples x 1 after 0, 4, 8 epochs: 6 rollouts" in output
    assert not finetune.output.exists()
