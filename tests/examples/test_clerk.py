"""Examples 04 to 07: one task in three frameworks and in Node; each runs two tiny steps."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tests.chat.conftest import build_tokenizer
from tests.conformance.capture import interpreter
from tests.examples.conftest import EXAMPLES
from tests.patience import PATIENCE_S
from tests.server.conftest import write_model

from hone import LocalBackend
from hone.config.schema import read

Example = Callable[[str, str], ModuleType]
FOLDERS = ("04_langgraph", "05_adk", "06_llama_index", "07_node_agent")
TASK = EXAMPLES / "04_langgraph"
# hone's own dependencies come from the environment of the tests, after the framework's.
RUN_HONE = "import site, sys; site.addsitedir({!r}); from hone.cli.app import main; main()"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("models") / "tiny"
    return write_model(place, build_tokenizer("qwen2.5-instruct"), positions=8192)


@pytest.fixture(scope="module")
def node_modules() -> None:
    """What `npm ci` installs, if Node is there."""
    refuse = pytest.fail if os.environ.get("HONE_REQUIRE_FRAMEWORKS") == "1" else pytest.skip
    if not (shutil.which("node") and shutil.which("npm")):
        refuse("node and npm are not installed")
    folder = EXAMPLES / "07_node_agent"
    locked = (folder / "package-lock.json").read_text()
    stamp = folder / "node_modules" / ".installed"
    if not stamp.exists() or stamp.read_text() != locked:
        done = subprocess.run(
            ["npm", "ci", "--no-audit", "--no-fund"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            refuse(f"npm ci ended with {done.returncode}: {done.stderr[-2000:]}")
        stamp.write_text(locked)


def train(python: Path | str, folder: str, server: LocalBackend, model: Path, place: Path, *more):
    """Two epochs of two questions; the lines of events.jsonl."""
    name = place.name.replace("_", "-")
    port = server.base_url.rpartition(":")[2]
    settings = {
        "trainer_adapters.server.backend.base_model": str(model),
        "trainer_adapters.server.backend.name": name,
        "trainer_adapters.server.backend.ip": "127.0.0.1",
        "trainer_adapters.server.backend.port": port,
        "trajectory_builders.rollouts.num_generations": "4",
        "llms.policy.max_tokens": "512",
        "llms.policy.temperature": "1.0",  # equal rewards in every group would train nothing
        "finetuning.num_epochs": "2",
        "finetuning.examples_per_epoch": "2",
        "finetuning.output_dir": str(place / "run"),
        "trainer_adapters.server.backend.inference_port": port,
        **dict(zip(more[::2], more[1::2], strict=True)),
    }
    options = [part for key, value in settings.items() for part in ("-o", key, value)]
    ours = ("PYTHON", "HONE", "OPENAI", "ANTHROPIC", "LANG", "VIRTUAL_ENV")
    env = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
    run = RUN_HONE.format(sysconfig.get_path("purelib"))
    done = subprocess.run(
        [
            python,
            "-c",
            run,
            "finetune",
            "--config_file",
            EXAMPLES / folder / "config.yml",
            *options,
        ],
        env=env | {"PYTHONPATH": str(EXAMPLES.parent / "src")},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return read_lines(place / "run" / "events.jsonl")


def read_lines(file: Path) -> list[dict[str, Any]]:
    """The objects in a JSONL file. Sampled text may contain what str.splitlines takes for a line end."""
    with file.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def check_run(events: list[dict[str, Any]], place: Path) -> None:
    """Two jobs are done; every rollout began with a tool call, and most got its result."""
    jobs = [event for event in events if event["type"] == "job_done"]
    assert [job["step"] for job in jobs] == [1, 2]
    for epoch in range(2):
        rollouts = read_lines(place / "run" / "trajectories" / f"epoch_{epoch:03}.jsonl")
        assert len(rollouts) == 8
        conversations = [rollout["messages"] for rollout in rollouts]
        assert all(messages[2]["tool_calls"] for messages in conversations)
        looked_up = [messages[3] for messages in conversations if len(messages) > 3]
        assert {message["role"] for message in looked_up} == {"tool"}
        assert len(looked_up) >= 4  # a random model may not end the string in time


@pytest.mark.parametrize("folder", FOLDERS[:3])
def test_an_agent_of_a_framework_trains(
    shared_server: LocalBackend, tiny: Path, tmp_path: Path, folder: str
):
    python = interpreter("a")
    check_run(train(python, folder, shared_server, tiny, tmp_path), tmp_path)


@pytest.mark.parametrize("agent", ["openai.mjs", "ai_sdk.mjs"])
def test_an_agent_in_node_trains(
    shared_server: LocalBackend, tiny: Path, tmp_path: Path, node_modules: None, agent: str
):
    command = json.dumps(["node", "{config_dir}/" + agent])
    more = ("workflow.command", command)
    events = train(sys.executable, "07_node_agent", shared_server, tiny, tmp_path, *more)
    check_run(events, tmp_path)


@pytest.fixture(scope="module")
def reward(example: Example) -> Any:
    return example("04_langgraph", "reward")


def calls(*made: tuple[str, str]) -> list[Any]:
    written = [{"function": {"name": name, "arguments": text}} for name, text in made]
    replies = [{"tool_calls": [call]} for call in written]
    return [SimpleNamespace(reply=reply) for reply in (*replies, {"content": "..."}, None)]


@pytest.mark.parametrize(
    ("made", "answer", "worth"),
    [
        ([("price", '{"item": "lamp"}')], "It costs 24.", 1.0),
        ([("price", '{"item":"lamp"}')], "24", 1.0),
        ([("price", '{"item": "lamp"}')], "24 or 25", 0.6),
        ([("price", '{"item": "lamp"}')], "no idea", 0.4),
        ([("price", '{"item": "lamp"}')] * 2, "24", 0.6),
        ([("stock", '{"item": "lamp"}')], "24", 0.4),
        ([("price", '{"item": "a Lamp"}')], "no such item", 0.3),
        ([("price", '{"item": "lamp", "type": "string"}')], "24", 0.5),
        ([("price", '{"item": "rug"}')], "85", 0.2),
        ([("price", '{"item": "la')], "", 0.2),
        ([("price", "[]")], "", 0.2),
        ([], "24", 0.2),
        ([], "124", 0.0),
    ],
)
def test_an_answer_is_worth_what_is_right_of_it(reward: Any, made: Any, answer: str, worth: float):
    expected = '{"tool": "price", "item": "lamp", "number": 24}'
    assert reward.graded(answer, expected, calls(*made)) == worth
    assert reward.exact(answer, expected, calls(*made)) == float(worth == 1.0)


def test_the_files_are_what_the_script_writes(example: Example):
    script: Any = example("04_langgraph", "write_questions")
    assert json.loads((TASK / "shop.json").read_text()) == script.shop()
    for part, size in (("train", 216), ("heldout", 48)):
        lines = (TASK / "data" / f"{part}.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in lines] == script.questions(part)
        assert len({json.loads(line)["id"] for line in lines}) == size
    train_goods, heldout_goods = (set(words.split()) for words in script.GOODS.values())
    assert not train_goods & heldout_goods


@pytest.mark.parametrize("folder", FOLDERS[1:])
def test_the_configurations_differ_in_the_workflow_and_in_names_only(folder: str):
    ours, first = (read(EXAMPLES / name / "config.yml") for name in (folder, "04_langgraph"))
    for config in (ours, first):
        config.finetuning.output_dir = Path()
        adapter: Any = config.trainer_adapters["server"]
        adapter.backend.name = "clerk"
        evaluator: Any = config.eval.evaluators["clerk"]
        evaluator.target = evaluator.target.removeprefix("../04_langgraph/")
    assert ours.llms == first.llms
    assert ours.eval.evaluators == first.eval.evaluators
    assert ours.trainer_adapters == first.trainer_adapters
    assert ours.trajectory_builders == first.trajectory_builders
    assert ours.finetuning == first.finetuning
    for name in (folder, "04_langgraph"):
        heldout = read(EXAMPLES / name / "heldout.yml")
        assert heldout.eval.evaluators["clerk"].target.endswith("reward.py:exact")  # type: ignore[attr-defined]


@pytest.mark.parametrize("folder", FOLDERS)
def test_each_is_small(folder: str):
    files = [*(EXAMPLES / folder).glob("*.py"), *(EXAMPLES / folder).glob("*.mjs")]
    agents = [file for file in files if file.name != "write_questions.py"]
    assert sum(len(file.read_text().splitlines()) for file in agents) <= 150
