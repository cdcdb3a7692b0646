"""report/report.py, examples.py: the answer first, and honest."""

import json
import os
import re
import shlex
import shutil
from base64 import b64encode
from collections.abc import Callable
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from tests.finetune.runs import STORIES, Story, tell
from tests.prose import Prose
from tests.report.test_metrics import collected, job, started
from tests.report.test_plots import validation
from typer.testing import CliRunner

from hone.cli.app import app
from hone.errors import ConfigError
from hone.files.event_log import FILE, read
from hone.report import metrics, report
from hone.report.estimate import Estimate
from hone.report.examples import LONGEST, Example, pick, read_rollouts, shown
from hone.report.headline import headline
from hone.report.history import RunHistory
from hone.report.outcome import measure


def log(tmp_path: Path, *lines: dict) -> Path:
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in lines))
    return tmp_path


def finished(status: str = "completed", **more) -> dict:
    event = {"at": 99.0, "type": "run_finished", "status": status, "message": "", "step": 2}
    return event | {"best_step": 2, "seconds": 99.0} | more


# ---- numbers --------------------------------------------------------------------------------------


def test_baseline_tuned_and_gain_by_hand(tmp_path: Path):
    first = {str(i): [float(i < 2)] for i in range(12)}  # 2 of 12 right
    last = {str(i): [float(i < 8)] for i in range(12)}  # 8 of 12
    place = log(
        tmp_path, started(), validation(0, first, 1 / 6), validation(2, last, 2 / 3), finished()
    )
    result = report.write(place)
    assert json.loads((tmp_path / "report.json").read_text()) == result
    assert (result["baseline"]["mean"], result["baseline"]["n"]) == (pytest.approx(1 / 6), 12)
    assert (result["tuned"]["mean"], result["tuned"]["step"]) == (pytest.approx(2 / 3), 2)
    # Six examples rose by 1, six stayed: 12 squares of 1/2 over 11, so a standard error of 0.1508,
    # times t(0.975, 11 degrees) = 2.201. Six changes of one sign have p = 2 / 2**6.
    gain = result["gain"]
    assert (gain["mean"], gain["n"]) == (0.5, 12)
    assert (gain["low"], gain["high"]) == pytest.approx((0.1682, 0.8318), abs=1e-4)
    assert gain["p"] == pytest.approx(2 / 2**6, abs=0.01)  # of 1,999 of 4,096 flips
    assert gain["certain"] and (gain["better"], gain["worse"], gain["unchanged"]) == (6, 0, 6)
    assert result["verdict"] == "better" and result["measured_on"] == "validation"
    assert result["checkpoint"]["step"] == 2
    assert result["seconds"] == 99.0 and set(result["phases"]) == {
        *("start_s", "rollout_s", "learn_s", "validate_s", "other_s")
    }
    # A picture of every example in the HTML; without pictures, how many.
    text = (tmp_path / "report.md").read_text()
    counts = "6 held-out examples better, 0 worse, 6 unchanged"
    assert f"\nPicture in report.html: {counts}.\n" in text
    assert f'alt="{counts}"' in (tmp_path / "report.html").read_text()


def test_a_validation_that_failed_is_no_baseline(tmp_path: Path):
    place = log(
        tmp_path,
        started(),
        validation(0, {}, None),
        validation(1, {"a": [0.5]}, 0.5),
        validation(2, {"a": [0.75]}, 0.75),
    )
    result = measure(place)
    assert result.baseline is not None and result.baseline.epoch == 1
    assert result.gain == Estimate(0.25, None, None, 1)
    assert result.verdict == "unclear"


def test_a_directory_without_a_run_is_refused(prose: Prose, tmp_path: Path):
    with pytest.raises(ConfigError) as caught:
        report.write(tmp_path)
    prose(caught)


def test_what_measured_is_named(tmp_path: Path):
    log(tmp_path, started(evaluator="match"), collected(0, 0.5), finished())
    result = measure(tmp_path).as_dict()
    assert (result["evaluator"], result["validation_evaluator"]) == ("match", "match")
    lines: dict[str, Any] = {
        "evaluator": "r (agent.py:shaped)",
        "validation_evaluator": "r (exact_match)",
    }
    log(tmp_path, started(**lines), collected(0, 0.5), finished())
    result = measure(tmp_path).as_dict()
    assert {key: result[key] for key in lines} == lines


def test_a_report_can_be_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tell(Story(epochs=2, interval=1, examples=4), tmp_path / "out")
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["report", "out"])
    assert (result.exit_code, result.stdout) == (0, "out/report.html\n"), result.output
    assert json.loads((tmp_path / "out" / "report.json").read_text())["epochs"] == 2
    refused = CliRunner().invoke(app, ["report", "."])
    assert refused.exit_code == 1 and "no run to report on" in refused.stderr


RECORDED = Path(__file__).parent / "recorded"


def test_a_recorded_run_directory_gives_the_same_files(tmp_path: Path):
    """The run was resumed, and has rounds, a curriculum, policy failures and a final validation.

    A change of the report or of the metrics changes recorded/expected with it.
    """
    shutil.copytree(RECORDED, tmp_path, dirs_exist_ok=True)
    metrics.write(tmp_path, RunHistory.of(read(tmp_path / FILE)))
    report.write(tmp_path, brief=True)
    expected = {path.name: path.read_bytes() for path in (RECORDED / "expected").iterdir()}
    # Versions of scipy differ in the last digit of an interval.
    numbers = rounded(expected.pop("report.json"))
    assert rounded((tmp_path / "report.json").read_bytes()) == numbers
    assert len(expected) == 4
    assert {name: (tmp_path / name).read_bytes() for name in expected} == expected


def rounded(report: bytes) -> Any:
    return json.loads(report, parse_float=lambda digits: round(float(digits), 9))


# ---- what it says first ---------------------------------------------------------------------------

FIRST = {
    "good": ("Held-out reward rose from 0.30 to 0.83", "The gain is unlikely to be chance", "good"),
    "failed": ("The run failed after 6 of 20 epochs", "loss is not finite", "bad"),
    "unfinished": (
        "The run was interrupted after 9 of 20",
        "not finished; the command below resumes it",
        "unsure",
    ),
    "worse": ("Held-out reward fell", "The loss is unlikely to be chance", "bad"),
    "one_epoch": ("No significant change", "This may be chance", "unsure"),
    "few": (
        "No significant change",
        "Fewer than 6 examples cannot show a significant change",
        "unsure",
    ),
    "no_validation": ("Training reward rose", "can memorize. Name held-out", "unsure"),
}


@pytest.mark.parametrize("name", FIRST)
def test_the_report_leads_with_the_answer(name: str, tmp_path: Path):
    tell(STORIES[name], tmp_path)
    head, basis, tone = headline(measure(tmp_path))
    assert head.startswith(FIRST[name][0]) and FIRST[name][1] in basis and tone == FIRST[name][2]
    report.write(tmp_path, brief=True)
    assert (tmp_path / "report.md").read_text().startswith(f"# {head}\n\n{basis}\n")
    html = (tmp_path / "report.html").read_text()
    assert f'<h1 class="{tone}">{head}</h1>' in html


# ---- what it holds --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of a story with its report, which is drawn once."""

    @cache
    def draw(name: str) -> Path:
        place = tmp_path_factory.mktemp(name)
        tell(STORIES[name], place)
        report.write(place)
        return place

    return draw


@pytest.mark.parametrize("name", ["curriculum", "gaps", "no_validation", "unfinished"])
def test_a_report_is_a_whole_page_without_network(name: str, drawn: Callable[[str], Path]):
    text = (drawn(name) / "report.html").read_text()
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


def commands_of(place: Path) -> list[list[str]]:
    """The words of each command of the report's last block of commands."""
    report.write(place, brief=True)
    block = (place / "report.md").read_text().split("```bash\n")[-1].split("```")[0]
    lines = block.replace("\\\n", "").splitlines()
    return [shlex.split(line) for line in lines if line[0] != "#"]


def test_the_commands_are_the_ones_to_type(tmp_path: Path):
    """They work wherever they are pasted: with the path of hone, its root and the new directory."""
    story = Story(epochs=2, interval=1, examples=4)
    story.more = {"base_url": None, "program": "'/my envs/one/bin/hone'"}
    tell(story, tmp_path)
    serve, curl, export = commands_of(tmp_path)
    hone, root = "/my envs/one/bin/hone", ["--root", ".demo/server"]
    assert serve == [hone, "serve", *root]
    folder = str(tmp_path / "tool_caller-adapter")
    assert export == [hone, "export", "tool_caller@best", folder, *root]
    assert curl[:2] == ["curl", "http://127.0.0.1:8000/v1/chat/completions"]
    body = json.loads(curl[-1])
    assert body["model"] == "tool_caller@best"
    assert body["messages"] == [{"role": "user", "content": "Hello"}]  # no request was kept


def test_a_relative_output_dir_becomes_an_absolute_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    tell(Story(epochs=2, interval=1, examples=4), tmp_path / "out")
    monkeypatch.chdir(tmp_path)
    assert commands_of(Path("out"))[-1][3] == str(tmp_path / "out" / "tool_caller-adapter")


def test_the_command_sends_what_the_agent_sends(tmp_path: Path):
    """System prompt, tools and parameters of a recorded call; the shortest of the held-out set."""
    tell(Story(epochs=1, examples=4, held_out=3), tmp_path)
    file = tmp_path / "trajectories" / "validation_000.jsonl"
    system = {"role": "system", "content": "Answer in JSON. Don't explain."}
    records = [json.loads(line) for line in file.read_text().splitlines()]
    for record, word in zip(records, ("longest", "long", "it"), strict=True):
        record["request"] = {
            "messages": [system, {"role": "user", "content": word}],
            "tools": [{"type": "function", "function": {"name": "weather"}}],
            "temperature": 0.7,
            "max_tokens": 64,
            "stream": True,
        }
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    report.write(tmp_path, brief=True)
    text = (tmp_path / "report.md").read_text()
    assert "# send what the agent sends\n" in text
    curl = shlex.split(
        text.split("# send what the agent sends\n")[1].split("\n#")[0].replace("\\\n", "")
    )
    wanted = {key: value for key, value in records[2]["request"].items() if key != "stream"}
    assert json.loads(curl[-1]) == {"model": "tool_caller@best", **wanted}


@pytest.mark.parametrize(
    ("host", "hone", "needs_key"),
    [("gpu", "hone", True), ("gpu", "hone", False), ("127.0.0.1", "/env/bin/hone", True)],
)
def test_a_server_of_somebody_else_is_asked_where_it_is(
    host: str, hone: str, needs_key: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    story = Story(epochs=2, interval=1, examples=4)
    story.more = {"base_url": f"http://{host}:8000/v1", "needs_key": needs_key}
    story.more |= {"program": "/env/bin/hone", "root": None}
    tell(story, tmp_path)
    curl, export = commands_of(tmp_path)
    assert curl[1] == f"http://{host}:8000/v1/chat/completions"
    assert ("Authorization: Bearer $HONE_API_KEY" in curl) is needs_key
    # On another machine neither the path of hone nor a directory of this one exists.
    folder = str(tmp_path / "tool_caller-adapter") if host != "gpu" else "./tool_caller-adapter"
    root = ["--root", "${HONE_ROOT:-.hone}"]
    assert export == [hone, "export", "tool_caller@best", folder, *root]
    text = (tmp_path / "report.md").read_text()
    assert ("HONE_API_KEY is the server's key" in text) is needs_key
    assert (
        "# on the server's machine, where HONE_ROOT is the root of the server, export a PEFT adapter"
        in text
    )


@pytest.mark.parametrize("host", ["gpu", "127.0.0.1"])
def test_a_shared_server_that_tells_its_root_is_exported_from(host: str, tmp_path: Path):
    story = Story(epochs=2, interval=1, examples=4)
    story.more = {"base_url": f"http://{host}:8000/v1", "root": "/srv/my root"}
    story.more["program"] = "/env/bin/hone"
    tell(story, tmp_path)
    _, export = commands_of(tmp_path)
    assert export[-2:] == ["--root", "/srv/my root"]
    text = (tmp_path / "report.md").read_text()
    elsewhere = "# on the server's machine, export a PEFT adapter"
    assert "HONE_ROOT" not in text and (elsewhere in text) is (host == "gpu")


def test_no_trained_step_beats_the_base_model(tmp_path: Path):
    tell(STORIES["worse"], tmp_path)
    report.write(tmp_path, brief=True)
    text = (tmp_path / "report.md").read_text()
    assert "No trained step beats the untrained model" in text
    assert "tool_caller@best" not in text.split("## Use the model")[1].split("##")[0]


@pytest.mark.parametrize("name", ["gaps", "no_validation"])
def test_no_section_is_empty(name: str, drawn: Callable[[str], Path]):
    assert "<h2>Training metrics</h2>" in (drawn(name) / "report.html").read_text()
    lines = [line for line in (drawn(name) / "report.md").read_text().splitlines() if line]
    headings = [i for i, line in enumerate(lines) if line.startswith("## ")]
    assert "## Training metrics" in lines and "## Where the time went" in lines
    assert all(not line.startswith("#") for i in headings for line in lines[i + 1 : i + 2])
    assert headings[-1] < len(lines) - 1


def test_what_was_left_out_is_counted(tmp_path: Path):
    lines = tell(STORIES["gaps"], tmp_path)
    rollouts = [e for e in lines if e["type"] == "rollout" and e["split"] == "train"]
    limit = sum(e["failure_reason"] == "token_limit" for e in rollouts)
    report.write(tmp_path, brief=True)
    text = (tmp_path / "report.md").read_text()
    assert (
        "| the model failed: token_limit (an answer or the conversation reached its limit of tokens) "
        f"| before the job | {limit} | {limit / len(rollouts):.1%} |"
    ) in text
    # A reason is named once, whatever its place in the events.
    below = text.split("## Left out")[1]
    assert below.count("token_limit") == 1 and "policy: " not in below


# ---- of a run that was interrupted ----------------------------------------------------------------


@pytest.fixture
def interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One of five epochs, the newest event with a reward at 10; nothing can be drawn."""
    monkeypatch.delattr("hone.report.plots._png")
    goes_on = "hone finetune --config_file=a.yml"
    return log(
        tmp_path,
        started(name="agent", command=f"{goes_on} --fresh", again=goes_on),
        validation(0, {"a": [0.25]}, 0.25),
        collected(0, 0.5),
        job(0, entropy=0.5),
        {"at": 9.0, "type": "epoch_done", "epoch": 0, "status": "completed", "phases": {}},
        validation(1, {"a": [0.75]}, 0.75),
        {"at": 12.0, "type": "run_interrupted"},
    )


def test_a_brief_report_says_that_the_run_is_not_finished_and_how_to_go_on(interrupted: Path):
    result = report.write(interrupted, brief=True)
    assert (result["status"], result["verdict"], result["message"]) == (
        "unfinished",
        "unclear",
        None,
    )
    assert (result["epochs"], result["epochs_planned"]) == (1, 5)
    assert result["seconds"] == pytest.approx(12.0)
    assert json.loads((interrupted / "report.json").read_text()) == result
    text = (interrupted / "report.md").read_text()
    assert text.startswith(
        "# The run was interrupted after 1 of 5 epochs\n\nIt is not finished; the command below "
        "resumes it. So far: no significant change: held-out reward went from 0.25 to 0.75. "
    )
    # It does not begin anew.
    assert text.split("## Resume the run\n\n")[1].startswith(
        "```bash\n# resume; finished rollouts and jobs are kept\n"
        "hone finetune --config_file=a.yml\n```\n"
    )
    html = (interrupted / "report.html").read_text()
    assert "<pre>hone finetune --config_file=a.yml</pre>" in html
    assert "<h1" in html and ">The run was interrupted after 1 of 5 epochs</h1>" in html


def test_a_brief_report_draws_nothing(interrupted: Path):
    report.write(interrupted, brief=True)
    names = {path.name for path in interrupted.iterdir()}
    assert names == {"events.jsonl", "report.json", "report.md", "report.html"}
    text = (interrupted / "report.md").read_text()
    assert "## Reward" not in text and "Training metrics" not in text and "![" not in text
    assert "<img" not in (interrupted / "report.html").read_text()
    with pytest.raises(NameError, match="_png"):
        report.write(interrupted)  # which would draw


def test_a_brief_report_shows_a_plot_that_is_up_to_date(interrupted: Path):
    plot = interrupted / "reward_plot.png"
    plot.write_bytes(b"drawn before")
    # The newest reward is that of the validation at 10.
    for drawn_at, is_shown in ((10.5, True), (9.5, False)):
        os.utime(plot, (drawn_at, drawn_at))
        report.write(interrupted, brief=True)
        text, html = ((interrupted / f"report.{kind}").read_text() for kind in ("md", "html"))
        shown_as = "![Held-out reward 0.25 \u2192 0.75](reward_plot.png)"
        assert (f"## Reward\n\n{shown_as}\n" in text) is is_shown
        source = f'<img src="data:image/png;base64,{b64encode(b"drawn before").decode()}"'
        assert html.count("<img") == html.count(source) == int(is_shown)
        assert plot.read_bytes() == b"drawn before"


# ---- examples -------------------------------------------------------------------------------------


def record(example: str, reward: float | None, output: object = "x", **more) -> str:
    fields = {"example": example, "generation": 0, "reward": reward, "output": output, "input": "?"}
    return json.dumps(fields | {"failure": None, "messages": []} | more) + "\n"


def picked(before: Path, after: Path) -> list[Example]:
    return pick(read_rollouts(before), read_rollouts(after))


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
    result = {example.id: example for example in picked(before, after)}
    assert {id: example.kind for id, example in result.items()} == {
        "up": "improved",
        "down": "got worse",
        "gone": "could not be scored",
        "zero": "still failing",
        "same": "unchanged",  # typical: of the four that have a change, in the middle
    }
    assert result["up"].before.text == "wrong" and result["up"].after.reward == 1.0
    assert result["down"].before.text == '{"a": 1}' and result["down"].after.text == "[]"
    assert result["gone"].before.text == "said"
    assert result["gone"].after.failure == "infrastructure: timeout: after 600 s"
    assert result["gone"].after.text == "(nothing)" and result["gone"].after.reward is None


def test_an_example_that_failed_once_is_neither_better_nor_worse(tmp_path: Path):
    before, after = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    lost = {"kind": "infrastructure", "reason": "connection", "message": ""}
    long = {"kind": "policy", "reason": "token_limit", "message": ""}
    before.write_text(record("first", None, None, failure=lost) + record("rated", 0.5))
    after.write_text(record("first", 1.0) + record("rated", 0.0, None, failure=long))
    result = {example.id: example for example in picked(before, after)}
    assert result["first"].kind == "could not be scored"
    assert result["first"].before.failure == "infrastructure: connection"
    assert (result["first"].before.reward, result["first"].after.reward) == (None, 1.0)
    # A failure of the model may have been given a reward: then it was scored.
    assert result["rated"].kind == "got worse" and result["rated"].after.reward == 0.0
    # Both failed, too; one of them is shown, and it is no gain and no loss.
    after.write_text(record("first", None, None, failure=lost) + record("rated", None, "x"))
    (shown_one,) = picked(before, after)
    assert shown_one.kind == "could not be scored"


def test_a_failed_example_shows_what_the_model_answered(tmp_path: Path):
    before, after = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    bad = {"kind": "policy", "reason": "unparseable", "message": "line 1: no JSON"}
    call = {"type": "function", "function": {"name": "move", "arguments": "{"}}
    said = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "first"},
        {"role": "tool", "content": "result"},
        {"role": "assistant", "content": "I move.", "tool_calls": [call]},
    ]
    before.write_text(record("a", None, None, failure=bad, messages=said))
    after.write_text(record("a", 1.0, "right"))
    (example,) = pick(read_rollouts(before), read_rollouts(after), failure_reward=-1.0)
    assert example.before.text == f"I move.\n{json.dumps([call])}"
    assert example.before.failure == "policy: unparseable: line 1: no JSON"
    assert example.before.reward == -1.0
    tell(Story(epochs=2, interval=2, examples=4, held_out=3), tmp_path)
    for name, file in (("final_000", before), ("final_002", after)):
        shutil.copy(file, tmp_path / "trajectories" / f"{name}.jsonl")
    report.write(tmp_path, brief=True)
    failed = "failed (policy: unparseable: line 1: no JSON); the model answered:"
    assert failed in (tmp_path / "report.html").read_text()
    assert f"before: 0.00; {failed}\n\n```\nI move.\n" in (tmp_path / "report.md").read_text()


def test_typical_examples_are_at_the_quartiles_of_the_change(tmp_path: Path):
    """Twelve examples that changed by 1.1, 1.0, ... 0.0: places 3, 6 and 9 of that order."""
    before, after = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    before.write_text("".join(record(f"e{i}", 0.0) for i in range(12)))
    after.write_text("".join(record(f"e{i}", i / 10) for i in range(12)))
    result = picked(before, after)
    assert [example.id for example in result] == ["e11", "e10", "e8", "e5", "e2", "e0"]
    assert [example.id for example in result if example.typical] == ["e8", "e5", "e2"]
    assert result[-1].kind == "still failing"
    # Of three, all are shown anyway.
    after.write_text("".join(record(f"e{i}", i / 10) for i in range(3)))
    assert not any(example.typical for example in picked(before, after))


def test_a_line_of_a_killed_run_is_skipped_and_no_other(tmp_path: Path):
    """Cut inside a character; the others hold separators of lines that JSON does not escape."""
    fields = {"generation": 0, "reward": 1.0, "input": "caf\u00e9\u2028\u0085", "output": "x"}
    lines = [
        json.dumps({"example": example, **fields}, ensure_ascii=False).encode() for example in "ab"
    ]
    file = tmp_path / "epoch_000.jsonl"
    file.write_bytes(lines[0] + b"\n" + lines[1][: lines[1].index(b"\xc3") + 1])
    (example,) = picked(file, file)
    assert (example.id, example.input) == ("a", fields["input"].strip())


def test_examples_need_no_files(tmp_path: Path):
    assert picked(tmp_path / "none.jsonl", tmp_path / "none.jsonl") == []


def test_long_texts_are_cut_and_say_so():
    text = shown("y" * (LONGEST + 1234))
    assert text == "y" * LONGEST + " ... (1,234 characters more)"
    assert shown("") == shown(" ") == "(nothing)"


def test_a_fence_in_an_answer_does_not_end_the_fence(tmp_path: Path):
    tell(Story(epochs=2, interval=2, examples=4, held_out=3), tmp_path)
    folder = tmp_path / "trajectories"
    (folder / "final_000.jsonl").write_text(record("a", 0.0, "```\ncode\n```"))
    (folder / "final_002.jsonl").write_text(record("a", 1.0, "fine"))
    report.write(tmp_path, brief=True)
    text = (tmp_path / "report.md").read_text()
    assert "````\n```\ncode\n```\n````" in text
