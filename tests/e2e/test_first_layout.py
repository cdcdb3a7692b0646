"""Runs that the first layout of hone was killed in go on: their files on disk are still read.

`tests/data/first_layout.tar.xz` holds two directories that `hone finetune` of commit 1345fc5 left
when it and its server were killed: one while the third of five epochs collected rollouts, one while
its job trained. Here they end with that epoch. Both use the tiny model in `hf`.
"""

import hashlib
import json
import os
import tarfile
from collections import Counter
from pathlib import Path

import pytest
from tests.e2e.conftest import Finetune

ARCHIVE = Path(__file__).parent.parent / "data" / "first_layout.tar.xz"
ARGUMENTS = ["--config_file=train.yml", "--validation_dataset=val.json", "--validation_interval=2"]
ARGUMENTS += ["-o", "finetuning.num_epochs", "3"]
EPOCHS, EXAMPLES, GENERATIONS = 3, 3, 3

pytestmark = pytest.mark.slow


def trained(finetune: Finetune) -> list[tuple[int, str, int, str]]:
    """Epoch, example, generation and id of every training rollout."""
    return [
        (record["epoch"], record["example"], record["generation"], record["rollout"])
        for path in sorted(finetune.output.glob("trajectories/epoch_*.jsonl"))
        for record in finetune.lines(f"trajectories/{path.name}")
    ]


def checkpoints(root: Path) -> dict[str, str]:
    """By path, the hash of every checkpoint's weights and manifest."""
    return {
        path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for pattern in ("*.safetensors", "manifest.json")
        for path in sorted(root.glob(f"trainer_project/models/agent/checkpoints/*/{pattern}"))
    }


@pytest.mark.parametrize("killed_while", ["collecting", "training"])
def test_a_run_of_the_first_layout_goes_on(killed_while: str, tmp_path: Path):
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    directory = tmp_path / killed_while
    environment = {
        **os.environ,
        "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_OFFLINE": "1",
        "HONE_HOME": str(tmp_path / "home"),
        "COLUMNS": "200",
    }
    finetune = Finetune(directory, environment, ARGUMENTS)
    events = (finetune.output / "events.jsonl").read_bytes()
    rollouts, steps = trained(finetune), checkpoints(directory / "root")
    submitted = {event["epoch"]: event["job"] for event in finetune.events("job_submitted")}
    run_id = json.loads((finetune.output / "run.json").read_text())["run_id"]
    assert len(submitted) == {"collecting": 2, "training": 3}[killed_while]

    assert finetune.run() == 0, finetune.outputs[-1]

    assert (finetune.output / "events.jsonl").read_bytes().startswith(events)
    assert json.loads((finetune.output / "run.json").read_text())["run_id"] == run_id
    # No rollout was run again, and none is missing.
    assert set(rollouts) <= set(trained(finetune))
    times = Counter(rollout[:3] for rollout in trained(finetune))
    wanted = [
        (epoch, f"e{i}", k)
        for epoch in range(EPOCHS)
        for i in range(EXAMPLES)
        for k in range(GENERATIONS)
    ]
    assert times == Counter(wanted)
    # No job was trained twice: one for each epoch, those of before under their ids.
    done = {event["epoch"]: event["job"] for event in finetune.events("job_done")}
    assert sorted(done) == list(range(EPOCHS)) and len(set(done.values())) == EPOCHS
    assert submitted.items() <= done.items()
    after = checkpoints(directory / "root")
    assert steps.items() <= after.items()
    assert f"trainer_project/models/agent/checkpoints/{EPOCHS:04d}/manifest.json" in after
    report = json.loads((finetune.output / "report.json").read_text())
    assert (report["status"], report["epochs"]) == ("completed", EPOCHS)
