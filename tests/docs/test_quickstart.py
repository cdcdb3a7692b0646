"""The quickstart's run with the real model, on three seeds (`make test-docs`; minutes each)."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from tests.docs.pages import ROOT, blocks


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(
    os.environ.get("HONE_DOCS") != "all", reason="trains the real model; make test-docs"
)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_trained_model_answers_every_class(tmp_path: Path, seed: int):
    """Its first task rewarded any allowed word, and the model learned to say one of them always."""
    for block in blocks(ROOT / "docs/quickstart.md"):
        if "file" in block.marks:
            (tmp_path / block.marks["file"]).write_text(block.code, encoding="utf-8")
    command = [sys.executable, "-m", "hone", "finetune", "--config_file", "config.yml"]
    command += ["--validation_dataset", "heldout.jsonl", "-o", "finetuning.seed", str(seed)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    first, *_, last = sorted((tmp_path / "out/trajectories").glob("validation_*.jsonl"))
    before, after = (
        [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        for file in (first, last)
    )
    # Greedy answers of the base model: 3 of 12 are right, whatever the seed.
    assert sum(row["reward"] for row in before) == 3
    # All 12 were right on three seeds; each drink was ordered four times.
    answers = Counter(row["output"] for row in after)
    assert sum(row["reward"] for row in after) >= 10, answers
    assert all(answers[drink] >= 2 for drink in ("tea", "coffee", "juice")), answers
