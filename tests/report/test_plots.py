"""report/curves.py and plots.py: what is drawn, worked out by hand; every story can be drawn."""

import math
import struct
from pathlib import Path
from typing import Any

import pytest
from tests.finetune.runs import STORIES, Story, events
from tests.report.test_metrics import collected, history_of, rollout, started

from hone.report import plots
from hone.report.curves import curves, smoothed
from hone.report.estimate import Estimate
from hone.report.history import History
from hone.report.text import duration, interval, number


def size(picture: bytes) -> tuple[int, int]:
    assert picture.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", picture[16:24])


def validation(epoch: int, rewards: dict[str, list[float]], mean: float | None) -> dict:
    event = {"at": 9.0 + epoch, "type": "validation", "epoch": epoch, "step": epoch}
    low = min((r for g in rewards.values() for r in g), default=None)
    high = max((r for g in rewards.values() for r in g), default=None)
    event |= {"avg_reward": mean, "min_reward": low, "max_reward": high, "rewards": rewards}
    return event | {"failures": 0, "seconds": 1.0}


def test_the_lines_are_the_numbers():
    lines = [
        started(),
        validation(0, {"a": [0.0], "b": [1.0]}, 0.5),
        rollout(0, "a", 0, 0.0),
        rollout(0, "a", 1, 1.0),
        rollout(0, "b", 0, 0.5),
        collected(0, 0.5),
        validation(1, {}, None),
        collected(1, None, low=None, high=None),
        validation(2, {"a": [1.0], "b": [1.0]}, 1.0),
        collected(2, 0.7, share=0.3),
        collected(3, 0.7, share=0.5),
    ]
    drawn = curves(history_of(lines))
    # Both examples of epoch 0 have the mean 0.5: no width. Epoch 1 gave nothing: no value.
    assert drawn.training[0].value == Estimate(0.5, 0.5, 0.5, 2)
    assert [p.x for p in drawn.training] == [0.0, 1.0, 2.0, 3.0]
    assert drawn.training[1].value is None
    # No rollouts are known of epoch 2, so it has a mean without an interval.
    assert drawn.training[2].value == Estimate(0.7, None, None, 0)
    # [0, 1] is resampled to 0, 0.5 or 1 at 1/4, 1/2, 1/4.
    assert [p.value for p in drawn.held_out] == [
        Estimate(0.5, 0.0, 1.0, 2),
        None,
        Estimate(1.0, 1.0, 1.0, 2),
    ]
    assert drawn.percentile == [(0.0, 1.0), (1.0, 1.0), (2.0, 0.3), (3.0, 0.5)]
    assert drawn.expansions == [(3.0, 0.5)]
    assert drawn.filtered == []  # nothing was filtered out
    assert drawn.bounds == (0.0, 1.0)
    assert drawn.best is None  # the newest is the best


def test_the_best_step_is_marked_where_it_is_not_the_newest():
    lines = [started(), validation(0, {"a": [0.1]}, 0.1), validation(4, {"a": [0.9]}, 0.9)]
    lines.append(validation(6, {"a": [0.5]}, 0.5))
    assert curves(history_of(lines)).best == (4.0, 4)


def test_rounds_stand_between_the_epochs_and_restarts_where_they_happened():
    drawn = curves(History.of(events(Story(epochs=2, rounds=4, interval=1, examples=4))))
    assert [p.x for p in drawn.training] == [0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75]
    drawn = curves(History.of(events(STORIES["resumed"])))
    assert drawn.resumed == [4.0, 9.0]
    assert curves(History.of(events(STORIES["failed"]))).job_failures == [6.0]


def test_a_gap_stays_a_gap_when_smoothed():
    means = smoothed([0.0, 1.0, math.nan, 4.0, 5.0], 3)
    # (0 + 1) / 2, (0 + 1) / 2, the gap, (4 + 5) / 2, (4 + 5) / 2
    assert means[:2] == [0.5, 0.5] and math.isnan(means[2]) and means[3:] == [4.5, 4.5]


@pytest.mark.parametrize("name", STORIES)
def test_every_story_can_be_drawn(name: str, tmp_path: Path):
    history = History.of(events(STORIES[name]))
    plots.reward_plot(history, tmp_path / "reward_plot.png")
    # Two evaluators have an axis each: 1.3 times 780.
    height = 1014 if name == "apart" else 780
    assert size((tmp_path / "reward_plot.png").read_bytes()) == (1500, height)
    assert [path.name for path in tmp_path.iterdir()] == ["reward_plot.png"]


def test_what_two_evaluators_measured_shares_no_axis():
    history = History.of(events(STORIES["apart"]))
    whole = curves(history)
    held_out, training = whole.by_evaluator()
    assert held_out.labels[1] == "held out, by reward (exact_match)"
    assert training.labels[0] == "training, by reward (agent.py:shaped)"
    assert (held_out.training, held_out.filtered, training.held_out) == ([], [], [])
    assert (held_out.held_out, training.training) == (whole.held_out, whole.training)
    # Right or wrong on one axis, the shaped reward from -2 to 3 on the other.
    assert (held_out.bounds, training.bounds) == ((0.0, 1.0), (-2.0, 3.0))
    assert whole.bounds == (-2.0, 3.0)


def test_one_evaluator_has_one_axis_and_temperature_0_is_named():
    lines = [started(evaluator="match"), validation(0, {"a": [0.1]}, 0.1), collected(0, 0.5)]
    drawn = curves(history_of(lines))
    assert drawn.by_evaluator() == [drawn]
    assert drawn.labels == ("training", "held out")
    lines[0]["validation_greedy"] = True
    assert curves(history_of(lines)).labels == ("training", "held out at temperature 0")
    # Runs of before this was recorded.
    assert not curves(history_of([started(), *lines[1:]])).two_evaluators


def test_a_name_is_no_formula(tmp_path: Path):
    named: dict[str, Any] = {"evaluator": "cost in $ and $x^{", "validation_evaluator": "$"}
    lines = [started(**named), validation(0, {"a": [0.1]}, 0.1), collected(0, 0.5)]
    assert size(plots.rewards(history_of(lines), plots.WIDE)) == (1500, 1014)


def test_there_is_a_picture_for_a_phone():
    history = History.of(events(STORIES["curriculum"]))
    assert size(plots.rewards(history, plots.NARROW)) == (920, 880)


def test_a_run_that_has_not_begun_can_be_drawn():
    history = history_of([started()])
    assert size(plots.rewards(history, plots.WIDE)) == (1500, 780)
    assert plots.headline(history) == ("No reward yet", "")
    ended = {"at": 9.0, "type": "run_finished", "status": "failed", "message": "", "step": 0}
    ended["seconds"] = 9.0
    assert plots.headline(history_of([started(), ended])) == ("No reward", "")
    assert plots.learning(history, plots.WIDE) is None
    history = history_of([started(), collected(0, None, low=None, high=None)])
    assert size(plots.rewards(history, plots.WIDE)) == (1500, 780)


@pytest.mark.parametrize("deltas", [[0.0], [1.0, -1.0], [0.0] * 300, [i / 99 for i in range(99)]])
def test_changes_of_any_shape_can_be_drawn(deltas: list[float]):
    assert size(plots.example_changes(deltas, plots.WIDE))[0] == 1500


def test_the_headline_says_the_finding():
    lines = [started(), validation(0, {str(i): [0.0] for i in range(8)}, 0.0)]
    lines.append(validation(1, {str(i): [1.0] for i in range(8)}, 1.0))
    title, note = plots.headline(history_of(lines))
    assert title == "Held-out reward 0.00 \u2192 1.00"
    assert note == "+1.00 (95% interval +1.00 to +1.00), 8 examples, p = 0.008"


def test_the_headline_of_gaps_and_of_one_epoch():
    lines = [started(), validation(0, {}, None)]
    assert plots.headline(history_of([*lines, collected(0, 0.5)])) == (
        *("Training reward 0.50", "of one epoch"),
    )
    lines += [
        validation(2, {"a": [0.0], "b": [0.0]}, 0.0),
        validation(4, {"a": [1.0], "b": [1.0]}, 1.0),
    ]
    title, note = plots.headline(history_of(lines))
    assert title == "Held-out reward 0.00 \u2192 1.00"
    assert note.endswith("2 examples, p = 0.50, baseline after 2 epochs")
    # Rounds count by what they weigh: (0.2 * 10 + 0.8 * 30) / 40 = 0.65.
    lines = [started(), collected(0, 0.2, n=10), collected(0, 0.8, n=30, round=1)]
    assert plots.headline(history_of(lines))[0] == "Training reward 0.65"


def test_the_headline_of_one_validation():
    lines = [started(), validation(0, {"a": [0.25]}, 0.25)]
    assert plots.headline(history_of(lines)) == (
        *("Held-out reward 0.25 before training", "of one validation"),
    )
    assert plots.headline(history_of([*lines, collected(0, 0.5)])) == (
        *("Training reward 0.50", "of one epoch; held out 0.25 before training"),
    )
    lines = [started(), validation(0, {}, None), validation(2, {"a": [0.5]}, 0.5)]
    assert plots.headline(history_of(lines))[0] == "Held-out reward 0.50 after 2 epochs"


def test_numbers_in_words():
    assert number(None) == "none"
    assert number(-0.525) == "\u22120.53"
    assert number(1234.5) == "1,234"
    assert (
        interval(Estimate(-0.2, -0.4, 0.01, 9)) == "\u22120.20 (95% interval \u22120.40 to +0.01)"
    )
    assert [duration(s) for s in (0.04, 9.96, 59.4, 60, 95, 3600, 3725, 90000, 200000)] == [
        *("0.0 s", "10 s", "59 s", "1 min", "1 min 35 s", "1 h", "1 h 2 min", "25 h", "2 d 7 h")
    ]
