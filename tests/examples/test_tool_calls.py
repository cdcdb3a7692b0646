"""examples/02_tool_calls is the task of examples/01_one_file, through an OpenAI client."""

import json
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from tests.examples.conftest import EXAMPLES, scripted

from hone.config.schema import read
from hone.evaluation.datasets import load_items

FOLDER = EXAMPLES / "02_tool_calls"
PARTS = {"training": "train.jsonl", "heldout": "heldout.jsonl"}
Example = Callable[[str, str], ModuleType]


@pytest.fixture(scope="module")
def task(example: Example) -> Any:
    return example("01_one_file", "task")


@pytest.fixture(scope="module")
def agent(example: Example) -> Any:
    return example("02_tool_calls", "agent")


@pytest.fixture(scope="module")
def reward(example: Example) -> Any:
    return example("02_tool_calls", "reward")


def rows(name: str) -> list[dict[str, str]]:
    lines = (FOLDER / "data" / name).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("part", PARTS)
def test_the_files_hold_the_requests_of_the_first_example(task: Any, part: str):
    items = task.items(part)
    examples = rows(PARTS[part])
    assert [row["question"] for row in examples] == [item.request for item in items]
    assert [json.loads(row["answer"]) for row in examples] == [item.answer for item in items]
    assert (
        len({row["id"] for row in examples})
        == len(examples)
        == {"training": 480, "heldout": 72}[part]
    )


@pytest.mark.parametrize("part", PARTS)
def test_the_files_are_what_the_script_writes(example: Example, part: str):
    script: Any = example("02_tool_calls", "write_requests")
    written = "\n".join(script.lines(part)) + "\n"
    assert (FOLDER / "data" / PARTS[part]).read_text(encoding="utf-8") == written


async def test_the_agent_sends_the_first_example_s_prompt(task: Any, agent: Any):
    llm = scripted(lambda messages: f"answer to {messages[-1]['content']}", max_tokens=18)
    for item in (task.items("training")[0], task.items("heldout")[-1]):
        assert await agent.call_a_tool(item.request, llm) == f"answer to {item.request}"
        sent = llm.requests.pop()
        assert sent == {"model": "scripted", "max_tokens": 18, "messages": task.prompt(item)}


@pytest.mark.parametrize(
    ("text", "worth"),
    [
        ('{"tool": "timer", "minutes": 12}', 1.0),
        (' {"minutes":12,"tool":"timer"}\n', 1.0),
        ('{"tool": "timer", "minutes": "12"}', 0.5),
        ('{"tool": "timer", "minutes": 12.0}', 0.5),
        ('{"tool": "timer", "minutes": 12, "name": "tea"}', 0.3),
        ('{"tool": "timer", "seconds": 12}', 0.5),
        ('{"tool": "timer", "name": "Alice"}', 0.3),
        ('{"tool": "call", "minutes": 12}', 0.5),
        ('{"tool": "call", "name": 12}', 0.3),
        ('{"tool": "call", "name": "Alice"}', 0.1),
        ("{}", 0.1),
        ('["timer", 12]', 0.0),
        ("Here you go: 12 minutes.", 0.0),
        ("", 0.0),
        ("[" * 100_000, 0.0),
    ],
)
def test_an_answer_is_worth_what_is_right_of_it(task: Any, reward: Any, text: str, worth: float):
    expected = '{"tool": "timer", "minutes": 12}'
    assert reward.graded(text, expected) == worth
    in_the_first_example = task.reward(text, task.Item("", "timer", 12))
    assert reward.exact(text, expected) == float(worth == 1.0) == float(in_the_first_example == 1.0)


def test_the_configurations_load_and_share_all_but_the_reward():
    config, heldout = read(FOLDER / "config.yml"), read(FOLDER / "heldout.yml")
    assert len(load_items(config.eval.general.dataset, None, near=FOLDER)) == 480
    assert len(load_items(heldout.eval.general.dataset, None, near=FOLDER)) == 72
    assert config.workflow == heldout.workflow and config.llms == heldout.llms
    evaluators: list[Any] = [c.eval.evaluators["tool_call"] for c in (config, heldout)]
    assert [evaluator.target for evaluator in evaluators] == ["reward.py:graded", "reward.py:exact"]
    assert config.finetuning.reward_function is not None
    assert config.finetuning.reward_function.name == "tool_call"
    # No request twice: an epoch is drawn without repetition.
    assert config.finetuning.examples_per_epoch is not None
    assert config.finetuning.num_epochs * config.finetuning.examples_per_epoch <= 480


def test_it_is_small():
    assert sum(len(file.read_text().splitlines()) for file in FOLDER.glob("*.py")) <= 150
