"""The docs list every field that an agent and a reward receive; the quickstart has enough rows."""

import dataclasses
import json
import re
from collections import Counter
from typing import Any

import yaml
from tests.docs.pages import ROOT, blocks

from hone.capture.base import SeenCall, Step
from hone.workflow.llm import LLM

QUICKSTART, REWARD = ROOT / "docs/quickstart.md", ROOT / "docs/guides/reward.md"
DRINKS = ("tea", "coffee", "juice")


def table(text: str, head: str) -> list[str]:
    """The names in the first column of the table with this header."""
    rows = text.partition(f"| `{head}` | is |\n|---|---|\n")[2].partition("\n\n")[0]
    return [re.match(r"\| `(?:llm\.)?(\w+)", row)[1] for row in rows.splitlines()]  # pyright: ignore[reportOptionalSubscript]


def public(kind: type) -> set[str]:
    fields = (
        {one.name for one in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else ()
    )
    return {name for name in (*vars(kind), *fields) if not name.startswith("_")}


def test_every_field_of_llm():
    llm = LLM(base_url="http://127.0.0.1:1/v1", model="m")
    real = public(LLM) | {name for name in vars(llm) if not name.startswith("_")}
    documented = table(QUICKSTART.read_text(encoding="utf-8"), "llm")
    assert len(documented) == len(set(documented)) and set(documented) == real


def test_every_field_of_a_call_and_of_a_step():
    text = REWARD.read_text(encoding="utf-8")
    for head, kind in (("calls[i]", SeenCall), ("steps[i]", Step)):
        documented = table(text, head)
        assert len(documented) == len(set(documented)) and set(documented) == public(kind), head


def test_the_quickstart_is_judged_by_enough_held_out_examples_without_the_noise_of_one_draw():
    files = {b.marks["file"]: b.code for b in blocks(QUICKSTART) if "file" in b.marks}
    held_out = [json.loads(line) for line in files["heldout.jsonl"].splitlines()]
    trained = [json.loads(line) for line in files["train.jsonl"].splitlines()]
    assert len({row["id"] for row in held_out}) >= 12
    assert not {r["question"] for r in held_out} & {r["question"] for r in trained}
    validation = yaml.safe_load(files["config.yml"])["finetuning"]["validation"]
    assert validation.get("greedy") or validation.get("reps", 1) > 1


def test_no_answer_of_the_quickstart_is_rewarded_for_two_drinks():
    """Credit for any allowed word taught the model one word: it answered `no` to all questions."""
    files = {b.marks["file"]: b.code for b in blocks(QUICKSTART) if "file" in b.marks}
    code: dict[str, Any] = {}
    exec(files["reward.py"], code)
    rewards = {
        (said, wanted): code["right_drink"](said, wanted) for said in DRINKS for wanted in DRINKS
    }
    assert rewards == {pair: float(pair[0] == pair[1]) for pair in rewards}
    for name in ("train.jsonl", "heldout.jsonl"):
        answers = [json.loads(line)["answer"] for line in files[name].splitlines()]
        assert Counter(answers) == dict.fromkeys(DRINKS, 4)
