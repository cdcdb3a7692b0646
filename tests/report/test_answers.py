"""report/answers.py: one answer to everything is counted, and named where it is wrong."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.finetune.runs import Story, tell
from tests.report.test_report import record

from hone.report import report
from hone.report.answers import Answers
from hone.report.examples import ReportedRollout


def rollouts(
    answers: list[str], rewards: Sequence[float | None], input: str = "question {}"
) -> dict:
    pairs = zip(answers, rewards, strict=True)
    return {str(i): ReportedRollout(input.format(i), a, r) for i, (a, r) in enumerate(pairs)}


def answers(before: dict, after: dict) -> Answers:
    result = Answers.of(before, after)
    assert result is not None
    return result


MANY = rollouts([f"answer {i}" for i in range(11)] + ["answer 10"], [0.0] * 12)
"""Twelve examples, eleven different answers, none of them right."""


def test_a_model_that_answers_no_to_everything():
    # `no` is right for eight of twelve: the reward rose from 0.00 to 0.67.
    result = answers(MANY, rollouts([" no\n"] * 12, [1.0] * 8 + [0.0] * 4))
    assert (result.examples, result.before, result.after) == (12, 11, 1)
    assert (result.most_frequent, result.num_most_frequent, result.num_low) == ("no", 12, 4)
    assert result.sentence == "12 examples: 11 different answers before, 1 after."
    assert (result.warning or "").startswith(
        "The trained model gives every example the same answer, 'no', and 4 of these 12 answers "
        "have a low reward. It may no longer read its input."
    )
    assert result.as_dict()["warning"] == result.warning


def test_the_same_word_in_another_spelling_is_the_same_answer():
    spelled = [" No.", "no", "NO.", " no ", "no.", "No!"] * 2
    result = answers(MANY, rollouts(spelled, [1.0] * 8 + [0.0] * 4))
    # The first is quoted as the model wrote it.
    assert (result.after, result.most_frequent, result.num_most_frequent) == (1, "No.", 12)
    assert result.collapsed
    # The same JSON value.
    objects = ['{"label":"no", "n": 1}', '{"n": 1, "label": "no"}'] * 6
    assert answers(MANY, rollouts(objects, [1.0] * 8 + [0.0] * 4)).after == 1
    # A sign or a decimal point in a number is part of the answer.
    numbers = ["1", "-1", "1.5", "15", ".5", "5%"]
    assert answers(MANY, rollouts(numbers * 2, [1.0] * 12)).after == 6


def test_one_answer_has_a_low_reward():
    result = answers(MANY, rollouts(["no"] * 12, [1.0] * 11 + [0.0]))
    assert "and 1 of these 12 answers has a low reward." in (result.warning or "")


def test_nearly_everything_is_enough():
    # 11 of 12 are 92%, 10 of 12 are 83%.
    rewards = [1.0] * 8 + [0.0] * 4
    result = answers(MANY, rollouts(["no"] * 11 + ["yes"], rewards))
    assert result.collapsed and "gives 11 of 12 examples the same answer" in (result.warning or "")
    assert not answers(MANY, rollouts(["no"] * 10 + ["yes"] * 2, rewards)).collapsed


COFFEE = ["tea", "coffee"] * 6
"""Two answers to four examples each of tea, coffee and juice."""


def test_two_answers_where_there_were_many():
    # The four juices, the last ones, are called tea or coffee: 4 of 12 are wrong.
    result = answers(MANY, rollouts(COFFEE, [1.0] * 8 + [0.0] * 4))
    assert not result.collapsed and result.after == 2
    assert result.warning == (
        "The trained model gives every example one of two answers, 'tea' or 'coffee' (11 different "
        "ones before), and 4 of these have a low reward. If other answers are right there, it no "
        "longer gives them: check that the training examples have every answer, and about equally "
        "often."
    )
    # 11 of 12 are 92%.
    nearly = answers(MANY, rollouts([*COFFEE[:11], "juice"], [1.0] * 8 + [0.0] * 3 + [1.0]))
    assert "gives 11 of 12 examples one of two answers" in (nearly.warning or "")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(MANY, rollouts(COFFEE, [1.0] * 10 + [0.0] * 2), id="nearly always right"),
        pytest.param(
            rollouts(["tea", "coffee", "juice"] * 4, [0.0] * 12),
            rollouts(COFFEE, [1.0] * 8 + [0.0] * 4),
            id="it gave few answers before, too",
        ),
        pytest.param(
            MANY, rollouts(["won", "lost"] * 6, [1.0, 0.0] * 6), id="the answer says the reward"
        ),
        pytest.param(
            MANY,
            rollouts([*COFFEE[:10], "juice", "juice"], [1.0] * 8 + [0.0] * 2 + [1.0] * 2),
            id="a third answer to 2 of 12",
        ),
    ],
)
def test_two_answers_may_be_as_they_should_be(before: dict, after: dict):
    assert answers(before, after).warning is None


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(MANY, rollouts(["no"] * 12, [1.0] * 12), id="it is right everywhere"),
        pytest.param(
            MANY,
            # A judge that is not sure: 0.8 is above the middle of 0 and 1.
            rollouts(["no"] * 12, [1.0, 0.8] * 6),
            id="and nearly as good everywhere",
        ),
        pytest.param(
            rollouts(["ok"] * 12, [0.0] * 12),
            rollouts(["ok"] * 12, [1.0] * 8 + [0.0] * 4),
            id="the agent always returned that, and the reward looks at something else",
        ),
        pytest.param(
            rollouts([str(i) for i in range(12)], [0.0] * 12, input="play"),
            rollouts(["no"] * 12, [1.0] * 8 + [0.0] * 4, input="play"),
            id="every example asks the same",
        ),
        pytest.param(MANY, rollouts(["no"] * 12, [0.0] * 12), id="nothing has a reward at all"),
        pytest.param(
            rollouts(["a", "b", "c"], [0.0] * 3), rollouts(["no"] * 3, [1.0, 1.0, 0.0]), id="few"
        ),
    ],
)
def test_one_answer_may_be_as_it_should_be(before: dict, after: dict):
    result = answers(before, after)
    assert result.after == 1 and result.warning is None
    assert result.sentence.endswith(f"before, {result.after} after.")


def test_a_failed_rollout_has_no_answer_and_an_empty_one_has():
    failed = ReportedRollout("question 0", "half of", None, "policy: token_limit", "policy")
    after = rollouts([""] * 12, [1.0] * 6 + [0.0] * 6) | {"0": failed}
    result = answers(MANY, after)
    assert (result.examples, result.total, result.after) == (11, 12, 1)
    assert result.sentence == (
        "11 of 12 examples that both policies answered: 10 different answers before, 1 after."
    )
    assert result.collapsed and "the same answer, ''," in (result.warning or "")
    assert Answers.of({"0": failed}, after) is None and Answers.of({}, {}) is None


def test_the_report_says_it_beside_the_headline(tmp_path: Path):
    tell(Story(epochs=2, interval=2, examples=4, held_out=12, failing=0.0), tmp_path)
    folder = tmp_path / "trajectories"
    lines = [(record(f"val-{i}", 0.0, {"said": i}), f"Is {i} odd?") for i in range(12)]
    before = [json.loads(line) | {"input": ask} for line, ask in lines]
    after = [one | {"output": "no", "reward": float(i < 8)} for i, one in enumerate(before)]
    for name, written in (("final_000", before), ("final_002", after)):
        text = "".join(json.dumps(one) + "\n" for one in written)
        (folder / f"{name}.jsonl").write_text(text)
    numbers = report.write(tmp_path, brief=True)
    assert numbers["answers"]["before"] == 12 and numbers["answers"]["after"] == 1
    warning = numbers["answers"]["warning"]
    assert warning.startswith("The trained model gives every example the same answer, 'no', and 4 ")
    md, html = ((tmp_path / f"report.{kind}").read_text() for kind in ("md", "html"))
    above = md.split("| before |")[0]
    assert "\n12 examples: 12 different answers before, 1 after.\n" in above
    assert f"\n**Warning:** {warning}\n" in above
    header = html.split("</header>")[0]
    assert "12 examples: 12 different answers before, 1 after." in header
    assert '<p class="basis warning">The trained model gives every example' in header
    assert '<h1 class="good">' not in html
    # Two that improved, and typical ones, of which the last got nothing.
    typical = [example for example in numbers["examples"] if example["typical"]]
    assert [example["after"] for example in typical][-1] == {
        "text": "no",
        "reward": 0.0,
        "failure": None,
    }


def test_a_report_without_rollouts_counts_no_answers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    tell(Story(epochs=1, held_out=0, examples=2), tmp_path)
    with caplog.at_level(logging.WARNING, logger="hone"):
        assert report.write(tmp_path, brief=True)["answers"] is None
    assert "different answer" not in (tmp_path / "report.md").read_text()
