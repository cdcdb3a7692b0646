"""Examples 08 and 09: the agent of 02_tool_calls by DPO and by SFT; each runs two tiny steps."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.chat.conftest import build_tokenizer
from tests.examples.conftest import EXAMPLES
from tests.server.conftest import write_model

from hone import LocalBackend
from hone.config.schema import read
from hone.finetune.run import FinetuneOptions, finetune

HELD_OUT = EXAMPLES / "02_tool_calls" / "data" / "heldout.jsonl"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("models") / "tiny"
    return write_model(place, build_tokenizer("qwen2.5-instruct"), positions=8192)


def train(folder: str, server: LocalBackend, model: Path, place: Path, **more: str) -> list[Any]:
    """Two epochs of a few examples; the lines of events.jsonl."""
    port = server.base_url.rpartition(":")[2]
    override = {
        "trainer_adapters.server.backend.base_model": str(model),
        "trainer_adapters.server.backend.name": folder,
        "trainer_adapters.server.backend.ip": "127.0.0.1",
        "trainer_adapters.server.backend.port": port,
        "trainer_adapters.server.backend.inference_port": port,
        "finetuning.num_epochs": "2",
        "finetuning.examples_per_epoch": "4",
        "finetuning.output_dir": str(place / "run"),
        **more,
    }
    rows = HELD_OUT.read_text().splitlines()[:2]
    (place / "heldout.jsonl").write_text("\n".join(rows) + "\n")
    options = FinetuneOptions(
        config_file=EXAMPLES / folder / "config.yml",
        validation_config_file=EXAMPLES / folder / "heldout.yml",
        validation_dataset=place / "heldout.jsonl",
        override=tuple(override.items()),
    )
    assert finetune(options) == 0
    lines = (place / "run" / "events.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def check(events: list[Any], place: Path) -> list[dict[str, float]]:
    """Two steps are published and measured on held-out requests; returns the jobs' metrics."""
    jobs = [event for event in events if event["type"] == "job_done"]
    assert [job["step"] for job in jobs] == [1, 2]
    measured = [event for event in events if event["type"] == "validation"]
    assert [event["num_examples"] for event in measured] == [2, 2]
    assert (place / "run" / "report.html").exists()
    assert (place / "run" / "reward_plot.png").exists()
    return [job["metrics"] for job in jobs]


def test_dpo_trains_on_pairs_of_rollouts(shared_server: LocalBackend, tiny: Path, tmp_path: Path):
    # The reward of a random model is 0: the test's own prefers short answers.
    agent = tmp_path / "short.py"
    agent.write_text("def short(output):\n    return -float(len(output))\n")
    target = ("eval.evaluators.tool_call.target", f"{agent}:short")
    first, second = check(
        train("08_dpo", shared_server, tiny, tmp_path, **dict([target])), tmp_path
    )
    assert first["learn/loss"] == pytest.approx(0.6931472, abs=1e-4)
    assert 1 <= second["learn/pairs"] <= 4 and second["learn/rollouts"] == 2 * second["learn/pairs"]
    assert "learn/reward_margin" in second


def test_sft_trains_on_the_calls_alone(shared_server: LocalBackend, tiny: Path, tmp_path: Path):
    events = train("09_sft", shared_server, tiny, tmp_path)
    first, second = check(events, tmp_path)
    assert second["learn/loss"] < first["learn/loss"]
    assert first["learn/rollouts"] == 4
    # Only the last message of each conversation is trained.
    sent = json.loads((tmp_path / "run" / "submissions" / "000_000.json").read_text())
    (episode,) = {tuple(m["role"] for m in group[0]["episode"]) for group in sent["groups"]}
    assert episode == ("system", "user", "assistant", "user", "assistant")
    counts = next(event["counts"] for event in events if event["type"] == "job_done")
    assert counts == {"from_text": 4}


def test_both_have_the_agent_and_the_requests_of_02_tool_calls():
    original: Any = read(EXAMPLES / "02_tool_calls" / "config.yml")
    for folder in ("08_dpo", "09_sft"):
        config: Any = read(EXAMPLES / folder / "config.yml")
        assert config.workflow.target == f"../02_tool_calls/{original.workflow.target}"
        assert config.llms == original.llms
        assert config.eval.general.dataset.file_path.name == "train.jsonl"
