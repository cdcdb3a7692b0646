"""finetune/report.py, sections.py, page.py, examples.py: the answer first, and honest."""

import json
import re
import shlex
from html.parser import HTMLParser
from pathlib import Path

import pytest
from tests.finetune.runs import STORIES, Story, tell
from tests.finetune.test_metrics import started
from tests.finetune.test_plots import validation

from hone.errors import ConfigError
from hone.finetune import page, report
from hone.finetune.estimate import Estimate
from hone.finetune.examples import LONGEST, pick, shown
from hone.finetune.report import difference, measure
from hone.finetune.sections import sections


def log(tmp_path: Path, *told: dict) -> Path:
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in told))
    return tmp_path


def finished(status: str = "completed", **more) -> dict:
    event = {"at": 99.0, "type": "run_finished", "status": status, "message": "", "step": 2}
    return event | {"best_step": 2, "seconds": 99.0} | more


# ---- numbers --------------------------------------------------------------------------------------


def test_baseline_tuned_and_gain_by_hand(tmp_path: Path):
    first = {str(i): [float(i < 2)] for i in range(8)}  # 2 of 8 right
    last = {str(i): [float(i < 6)] for i in range(8)}  # 6 of 8
    place = log(
        tmp_path, started(), validation(0, first, 0.25), validation(2, last, 0.75), finished()
    )
    found = report.write(place).as_dict()
    assert json.loads((tmp_path / "report.json").read_text()) == found
    assert (found["baseline"]["mean"], found["baseline"]["n"]) == (0.25, 8)
    assert (found["tuned"]["mean"], found["tuned"]["step"]) == (0.75, 2)
    # Four examples rose by 1, four stayed: a resample's mean is k/8, k binomial(8, 1/2), with
    # P(k = 0) = 0.004, P(k <= 1) = 0.035: the 2.5% quantile is 1/8, by symmetry 97.5% is 7/8.
    gain = found["gain"]
    assert (gain["mean"], gain["low"], gain["high"], gain["n"]) == (0.5, 0.125, 0.875, 8)
    assert gain["certain"] and (gain["better"], gain["worse"], gain["unchanged"]) == (4, 0, 4)
    assert found["verdict"] == "better" and found["measured_on"] == "validation"
    assert found["checkpoint"]["step"] == 2
    assert found["seconds"] == 99.0 and set(found["phases"]) == {
        *("rollout_s", "learn_s", "validate_s", "other_s")
    }


def test_a_validation_that_failed_is_no_baseline(tmp_path: Path):
    place = log(
        tmp_path,
        started(),
        validation(0, {}, None),
        validation(1, {"a": [0.5]}, 0.5),
        validation(2, {"a": [0.75]}, 0.75),
    )
    found = measure(place)
    assert found.baseline is not None and found.baseline.epoch == 1
    assert found.gain == Estimate(0.25, None, None, 1)
    assert found.verdict == "unclear"


def test_means_over_different_examples_differ_by_the_root_of_squares():
    # 0.3 +- 0.03 and 0.7 +- 0.04: 0.4 +- sqrt(0.03**2 + 0.04**2) = 0.05
    found = difference(Estimate(0.3, 0.27, 0.33, 20), Estimate(0.7, 0.66, 0.74, 30))
    assert found.low == pytest.approx(0.35) and found.high == pytest.approx(0.45)
    assert (found.mean, found.n) == (pytest.approx(0.4), 20)


def test_a_directory_without_a_run_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"no run to report on .*finetuning.output_dir"):
        report.write(tmp_path)


# ---- what it says first ---------------------------------------------------------------------------

FIRST = {
    "good": ("Held-out reward rose from 0.24 to 0.84", "the gain is not chance", "good"),
    "failed": ("The run failed after 6 of 20 epochs", "loss is not finite", "bad"),
    "unfinished": ("The run was interrupted after 9 of 20", "same command goes on", "unsure"),
    "worse": ("Held-out reward fell", "the loss is not chance", "bad"),
    "one_epoch": ("No certain gain", "the interval holds 0", "unsure"),
    "few": ("No certain gain", "on fewer than 6 examples nothing is certain", "unsure"),
    "no_validation": ("Training reward rose", "may learn by heart. Name held-out", "unsure"),
}


@pytest.mark.parametrize("name", FIRST)
def test_the_report_leads_with_the_answer(name: str, tmp_path: Path):
    tell(STORIES[name], tmp_path)
    document = sections(measure(tmp_path))
    headline, basis, tone = FIRST[name]
    assert document.headline.startswith(headline)
    assert basis in document.basis
    assert document.tone == tone


def test_a_run_that_never_got_a_reward_says_so(tmp_path: Path):
    place = log(tmp_path, started(), finished("failed", message="the server is gone", step=0))
    report.write(place)
    text = (tmp_path / "report.md").read_text()
    assert text.startswith("# The run failed after 0 of 5 epochs\n\nThe server is gone.")
    assert json.loads((tmp_path / "report.json").read_text())["gain"] is None
    assert "Use it" not in text


def test_one_validation_alone_is_told(tmp_path: Path):
    place = log(tmp_path, started(), validation(0, {"a": [0.5]}, 0.5), finished())
    document = sections(measure(place))
    assert document.headline == "Nothing can be compared"
    assert "one validation only (mean reward 0.50)" in document.basis


# ---- what it holds --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["curriculum", "gaps", "no_validation", "unfinished"])
def test_a_report_is_a_whole_page_without_network(name: str, tmp_path: Path):
    tell(STORIES[name], tmp_path)
    report.write(tmp_path)
    text = (tmp_path / "report.html").read_text()
    Balanced().feed(text)
    outside = re.findall(r"(?:src|href|srcset)=\"(?!data:)", text)
    assert not outside and "<script" not in text and "@import" not in text
    assert 'name="viewport"' in text
    assert "<b>& Osaka" not in text  # what came from a dataset is escaped
    assert "nan" not in re.sub(r"base64,[^\"]*", "", text).lower().replace("finance", "")


class Balanced(HTMLParser):
    """Every tag that opens is closed, in order."""

    VOID = frozenset({"meta", "img", "source", "link", "br"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, (tag, self.open, self.getpos())


def test_the_commands_are_the_ones_to_type(tmp_path: Path):
    tell(Story(epochs=2, interval=1, examples=4, more={"base_url": None}), tmp_path)
    report.write(tmp_path)
    text = (tmp_path / "report.md").read_text()
    block = text.split("```bash\n")[1].split("```")[0]
    commands = [line for line in block.replace("\\\n", "").splitlines() if line[0] != "#"]
    serve, curl, export = (shlex.split(command) for command in commands)
    assert serve == ["hone", "serve", "--root", ".demo/server"]
    assert export == [
        *("hone", "export", "tool_caller@best", "./tool_caller-adapter", "--root", ".demo/server")
    ]
    assert curl[:2] == ["curl", "http://127.0.0.1:8000/v1/chat/completions"]
    body = json.loads(curl[-1])
    assert body["model"] == "tool_caller@best"
    assert body["messages"][0]["content"].startswith("What is the weather in")


def test_a_server_of_somebody_else_is_asked_where_it_is(tmp_path: Path):
    told = Story(epochs=2, interval=1, examples=4, more={"base_url": "http://gpu:8000/v1"})
    tell(told, tmp_path)
    report.write(tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "curl http://gpu:8000/v1/chat/completions" in text and "hone serve" not in text
    assert "# on the server's machine, take it elsewhere" in text


def test_no_trained_step_beats_the_base_model(tmp_path: Path):
    tell(STORIES["worse"], tmp_path)
    report.write(tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "No trained step beats the untrained model" in text
    assert "tool_caller@best" not in text.split("## Use it")[1].split("##")[0]


def test_markdown_has_no_heading_over_pictures_that_stand_in_the_html_alone(tmp_path: Path):
    tell(STORIES["gaps"], tmp_path)
    told = sections(measure(tmp_path))
    assert "<h2>How the learning went</h2>" in page.html(told)
    text = page.markdown(told)
    assert "How the learning went" not in text and "## Where the time went" in text


def test_what_was_left_out_is_counted(tmp_path: Path):
    told = tell(STORIES["gaps"], tmp_path)
    rollouts = [e for e in told if e["type"] == "rollout" and e["split"] == "train"]
    limit = sum(e["failure_reason"] == "token_limit" for e in rollouts)
    text = page.markdown(sections(measure(tmp_path)))
    assert (
        f"| rollout failed, policy: token_limit | {limit} | {limit / len(rollouts):.1%} |" in text
    )
    # Every third epoch of 16 drops 2 for their evaluator: 0, 3, 6, 9, 12, 15.
    assert "| evaluator failed | 12 |" in text


# ---- examples -------------------------------------------------------------------------------------


def record(example: str, reward: float | None, output: object = "x", **more) -> str:
    fields = {"example": example, "generation": 0, "reward": reward, "output": output, "input": "?"}
    return json.dumps(fields | {"failure": None, "messages": []} | more) + "\n"


def test_examples_show_what_got_worse_too(tmp_path: Path):
    before, after = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    lost = {"kind": "infrastructure", "reason": "timeout", "message": "after 600 s"}
    before.write_text(
        record("up", 0.0, "wrong")
        + record("down", 1.0, {"a": 1})
        + record("zero", 0.0)
        + record("same", 1.0)
        + record("gone", 0.5, None, messages=[{"role": "assistant", "content": "said"}])
        + record("up", 0.0, "another attempt", generation=1)
    )
    after.write_text(
        record("up", 1.0, "right")
        + record("down", 0.25, [])
        + record("zero", 0.0)
        + record("same", 1.0)
        + record("gone", None, None, failure=lost)
        + '{"example": "torn'
    )
    found = {example.id: example for example in pick(before, after)}
    assert {id: example.kind for id, example in found.items()} == {
        "up": "improved",
        "down": "got worse",
        "gone": "got worse",
        "zero": "still failing",
    }
    assert found["up"].before.text == "wrong" and found["up"].after.reward == 1.0
    assert found["down"].before.text == '{"a": 1}' and found["down"].after.text == "[]"
    assert found["gone"].before.text == "said"
    assert found["gone"].after.text == "failed (infrastructure: timeout: after 600 s)"
    assert found["gone"].after.reward is None


def test_examples_need_no_files(tmp_path: Path):
    assert pick(tmp_path / "none.jsonl", tmp_path / "none.jsonl") == []


def test_long_texts_are_cut_and_say_so():
    text = shown("y" * (LONGEST + 1234))
    assert text == "y" * LONGEST + " ... (1,234 characters more)"
    assert shown(None) == "(nothing)" and shown(" ") == "(empty)"
    assert shown({"b": "\u00e9"}) == '{"b": "\u00e9"}'


def test_a_fence_in_an_answer_does_not_end_the_fence(tmp_path: Path):
    tell(Story(epochs=2, interval=1, examples=4, held_out=3), tmp_path)
    folder = tmp_path / "trajectories"
    (folder / "validation_000.jsonl").write_text(record("a", 0.0, "```\ncode\n```"))
    (folder / "validation_002.jsonl").write_text(record("a", 1.0, "fine"))
    text = page.markdown(sections(measure(tmp_path)))
    assert "````\n```\ncode\n```\n````" in text
