"""report/display.py: the state of a run, by its events alone; lines, and a live display."""

import io
from pathlib import Path

import pytest
from rich.console import Console
from tests.finetune.runs import REST, STORIES, Story, events
from tests.report.test_metrics import collected, rollout, started

from hone.files.event_log import EventLog
from hone.files.events import parse
from hone.report import display
from hone.report.display import BLOCKS, Display, State, sparks
from hone.tasks.progress import write


def stage(at: float, epoch: int, rollouts: int = 10) -> dict:
    event = {"at": at, "type": "epoch_started", "epoch": epoch, "round": 0, "rounds": 1, "step": 0}
    return REST["epoch_started"] | event | {"rollouts": rollouts}


def done(at: float, epoch: int) -> dict:
    return {"at": at, "type": "epoch_done", "epoch": epoch, "status": "completed", "phases": {}}


def test_the_state_by_hand():
    state = State()
    state.add(parse(started(100.0)))
    state.add(parse(stage(100.0, 0)))
    state.add(parse(rollout(0, "a", 0, 1.0, at=101.0, tokens=30)))
    state.add(parse(rollout(0, "a", 1, 0.0, at=102.0, tokens=10)))
    state.add(parse(rollout(0, "b", 0, None, at=104.0, tokens=0, failure_kind="policy")))
    # 40 tokens in 4 s; the failure of the model counts as 0: (1 + 0 + 0) / 3.
    assert state.progress(104.0) == "3 of 10, reward so far 0.33, 1 failed, 10 tokens/s"
    assert state.left_s(104.0) is None  # no epoch is over yet
    state.add(parse(collected(0, 0.5, at=105.0)))
    state.add(parse(done(110.0, 0)))
    # One epoch took 10 s, four are left; 4 s into the next, 36 s are.
    assert state.left_s(110.0) == 40.0
    state.add(parse(stage(110.0, 1)))
    assert state.left_s(114.0) == 36.0


def test_failures_and_retries_are_counted_as_in_the_report():
    state = State()
    state.add(parse(started(100.0)))
    state.add(parse(stage(100.0, 0)))
    policy = {"failure_kind": "policy", "failure_reason": "evaluator", "tokens": 0}
    state.add(parse(rollout(0, "a", 0, None, at=101.0, **policy)))
    # The evaluator has scored nothing yet: it may be broken.
    assert state.progress(101.0) == "1 of 10, 1 failed"
    away = ["infrastructure: connection"] * 2
    state.add(parse(rollout(0, "a", 1, -1.0, at=102.0, tokens=0, retried=away)))
    # It scored one, with the lowest reward of the run, so the other failure counts as -1.
    assert state.progress(102.0) == "2 of 10, reward so far \u22121.00, 1 failed, 2 retried"
    outside = {"failure_kind": "infrastructure", "failure_reason": "connection", "tokens": 0}
    state.add(parse(rollout(0, "b", 0, None, at=103.0, retried=away[:1], **outside)))
    state.add(parse(rollout(0, "b", 1, 1.0, at=104.0, tokens=0)))
    # (-1 - 1 + 1) / 3
    assert state.progress(104.0) == "4 of 10, reward so far \u22120.33, 2 failed, 3 retried"
    # In the next round, the evaluator is known to work. It has scored no validation yet.
    state.add(parse(stage(105.0, 1)))
    state.add(parse(rollout(1, "a", 0, None, at=106.0, **policy)))
    assert state.progress(106.0) == "1 of 10, reward so far \u22121.00, 1 failed"
    for epoch, reward in enumerate(("", ", reward so far \u22121.00")):
        event = {"type": "validation_started", "epoch": epoch, "rollouts": 2, "resumed": 0}
        state.add(parse(event | {"at": 107.0, "final": False}))
        state.add(parse(rollout(epoch, "x", 0, None, at=108.0, split="val", **policy)))
        assert state.progress(108.0) == f"1 of 2{reward}, 1 failed"
        state.add(parse(rollout(epoch, "y", 0, 1.0, at=109.0, split="val", tokens=0)))


def test_a_job_is_rows_of_steps():
    state = State()
    state.add(
        parse(
            {"at": 1.0, "type": "job_submitted", "epoch": 0, "round": 0}
            | {"job": "j", "trajectories": 8, "groups": 2, "dropped": {}}
        )
    )
    assert (state.stage, state.progress(1.0)) == ("learning", "")
    # The learner counts from 0 and reports before each row. Its second step has 2 rows, the first
    # had 10, and all 12 were scored before: when it begins the last row, 12 + 10 + 1 are computed.
    progress = {"at": 2.0, "type": "job_progress", "phase": "train", "step": 1, "steps": 2}
    state.add(parse(progress | {"row": 1, "rows": 2, "done": 23, "total": 24}))
    assert state.progress(2.0) == "23 of 24 rows"
    # A backend that counts only steps: the first is done when the second begins.
    state.add(parse(progress))
    assert state.progress(2.0) == "1 of 2 rows"


def test_an_epoch_of_rounds_is_the_mean_of_its_rounds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    with EventLog(tmp_path / "events.jsonl") as log, Display(log) as shown:
        for event in (
            started(0.0, epochs=2),
            *(stage(1.0, 0), collected(0, 0.25, n=30, at=2.0)),
            *(stage(3.0, 0) | {"round": 1}, collected(0, 0.75, n=10, round=1, at=4.0)),
            done(5.0, 0),
        ):
            shown.add(parse(event))
    # (30 x 0.25 + 10 x 0.75) / 40 = 0.375
    assert capsys.readouterr().err == "epoch 1 of 2 done: reward 0.38, 5 s, about 4 s left\n"


def test_lines_where_there_is_no_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with EventLog(tmp_path / "events.jsonl") as log, Display(log) as shown:
        for event in (
            started(0.0, epochs=2),
            stage(0.0, 0),
            rollout(0, "a", 0, 1.0, at=5.0),
            rollout(0, "a", 1, 0.0, at=11.0, tokens=210),
            rollout(0, "b", 0, 1.0, at=12.0),
            collected(0, 0.5, at=13.0),
            done(20.0, 0),
        ):
            shown.add(parse(event))
    # A line after ten seconds (220 tokens in 11 s), none a second later, one for the epoch.
    assert capsys.readouterr().err.splitlines() == [
        "epoch 1 of 2: rollouts 2 of 10, reward so far 0.50, 20 tokens/s",
        "epoch 1 of 2 done: reward 0.50, 20 s, about 20 s left",
    ]


def test_a_failed_epoch_is_not_done(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with EventLog(tmp_path / "events.jsonl") as log, Display(log) as shown:
        for event in (
            started(3.0, epochs=9, began=0.0),
            *(stage(4.0, 0), collected(0, 0.5, at=5.0), done(6.0, 0)),
            *(stage(6.0, 1), collected(1, 0.6, at=7.0), done(8.0, 1)),
            *(stage(8.0, 2), done(10.0, 2) | {"status": "failed"}),
        ):
            shown.add(parse(event))
    # Since the command was given at 0; epochs of 2 s each, of which 8 and 7 are left.
    assert capsys.readouterr().err.splitlines() == [
        "epoch 1 of 9 done: reward 0.50, 6 s, about 16 s left",
        "epoch 2 of 9 done: reward 0.60, 8 s, about 14 s left",
        "epoch 3 of 9 failed: 10 s",
    ]


def test_a_run_that_goes_on_shows_its_whole_curve(tmp_path: Path):
    with EventLog(tmp_path / "events.jsonl") as log:
        fields = {k: v for k, v in collected(0, 0.25).items() if k not in ("at", "type")}
        log.append("epoch_collected", **fields)
        with Display(log) as shown:
            log.append("epoch_collected", **fields | {"epoch": 1})
            assert [r.epoch for r in shown.state.history.rounds] == [0, 1]
        log.append("epoch_collected", **fields | {"epoch": 2})
        assert len(shown.state.history.rounds) == 2  # it no longer listens


@pytest.mark.parametrize("name", ["good", "gaps", "resumed", "failed", "rounds", "no_validation"])
def test_one_picture_on_a_terminal_and_lines_above_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    screen = Console(file=io.StringIO(), force_terminal=True, width=100)
    monkeypatch.setattr("hone.tasks.progress.console", lambda: screen)
    monkeypatch.setattr(display, "console", lambda: screen)
    with EventLog(tmp_path / "events.jsonl") as log, Display(log) as shown:
        for event in events(STORIES[name]):
            shown.add(event)
        write("a line of the log")
        assert shown.picture() is not None
    assert isinstance(screen.file, io.StringIO)
    text = screen.file.getvalue()
    assert "a line of the log" in text
    assert "training" in text and ("held out" in text) == (name != "no_validation")


def test_every_moment_of_a_run_can_be_drawn(tmp_path: Path):
    screen = Console(file=io.StringIO(), width=80)
    with EventLog(tmp_path / "events.jsonl") as log:
        shown = Display(log, clock=lambda: shown.state.now)
        for event in events(Story(epochs=2, examples=3, generations=2, held_out=3, interval=1)):
            shown.state.add(event)
            screen.print(shown.picture())


def test_before_the_run_and_after_ctrl_c(tmp_path: Path):
    screen = Console(file=io.StringIO(), width=80)
    with EventLog(tmp_path / "events.jsonl") as log:
        shown = Display(log, clock=lambda: 9.0)
        screen.print(shown.picture())
        for event in (started(1.0), stage(2.0, 0), {"at": 3.0, "type": "run_interrupted"}):
            shown.state.add(parse(event))
        screen.print(shown.picture())
    assert isinstance(screen.file, io.StringIO)
    lines = [line.split() for line in screen.file.getvalue().splitlines()]
    assert lines[0] == ["starting"]
    assert lines[1][:4] == ["epoch", "1", "of", "5"] and lines[2] == ["interrupted"]


@pytest.mark.parametrize("ended", ["run_interrupted", "kill -9"])
def test_a_run_that_goes_on_is_starting_until_it_works_again(ended: str, tmp_path: Path):
    """Not interrupted, not in the stage in which it was killed, and not running since then."""
    with EventLog(tmp_path / "events.jsonl") as log:
        for event in (started(1.0), stage(2.0, 0), rollout(0, "a", 0, 1.0, at=3.0)):
            log.append(event["type"], **{k: v for k, v in event.items() if k not in ("type", "at")})
        if ended == "run_interrupted":
            log.append("run_interrupted")
        with Display(log, clock=lambda: 5000.0) as shown:
            assert shown.state.stage == "starting"
            assert (shown.state.finished, shown.state.total) == (0, 0)
            assert shown.state.started_at == 5000.0
            shown.state.add(parse(started(5001.0)))
            # One rollout of ten has ended before: nine are left.
            shown.state.add(parse(stage(5002.0, 0) | {"resumed": 1}))
            assert (shown.state.finished, shown.state.total) == (1, 10)


def test_the_row_of_rewards_starts_at_zero():
    # Rewards from 0 to 1 in eight heights: 0, 0.5 -> int(0.5 * 7.999) = 3, 1 -> 7.
    assert sparks([0.0, 0.5, None, 1.0]) == f"{BLOCKS[0]}{BLOCKS[3]} {BLOCKS[7]}"
    assert sparks([0.5, 0.51]) == BLOCKS[3] + BLOCKS[4]
    # From -1 to 1.
    assert sparks([-1.0, 0.0, 1.0]) == BLOCKS[0] + BLOCKS[3] + BLOCKS[7]
    assert sparks([None]) == " "
    assert sparks([0.0, 1.0], "ascii") == "_@"


def test_the_comparison_at_the_end_shows_both_policies():
    state = State()
    state.add(parse(started(100.0)))
    event = {"at": 101.0, "type": "validation_started", "epoch": 5, "rollouts": 8, "resumed": 0}
    state.add(parse(event | {"final": True}))

    def answer(epoch: int, example: str, reward: float | None, at: float, **more: object) -> None:
        event = rollout(epoch, example, 0, reward, at=at, tokens=0, split="final", **more)
        state.add(parse(event | {"round": 5}))

    answer(5, "a", 1.0, 102.0)
    assert state.progress(102.0) == "1 of 8, reward so far 1.00 after 5 epochs"
    answer(0, "a", 0.0, 103.0)
    answer(0, "b", 0.5, 104.0)
    # The evaluator scored others, so this failure is the model's: (1 + 0) / 2 after 5 epochs.
    failed = {"failure_kind": "policy", "failure_reason": "evaluator"}
    answer(5, "b", None, 105.0, **failed)
    both = "reward so far 0.25 after 0 epochs and 0.50 after 5 epochs"
    assert state.progress(105.0) == f"4 of 8, {both}, 1 failed"
    assert state.where == "the first and the best step side by side"
    # The next validation is of one policy.
    state.add(parse(event | {"at": 110.0, "final": False, "epoch": 6}))
    state.add(parse(rollout(6, "a", 0, 0.5, at=111.0, tokens=0, split="val")))
    assert state.progress(111.0) == "1 of 8, reward so far 0.50"
    assert state.where == "after 6 epochs"
