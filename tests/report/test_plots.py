"""report/plots.py: what is drawn, worked out by hand; every story can be drawn."""

import math
import struct
from pathlib import Path
from typing import Any

import matplotlib
import pytest
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from tests.finetune.runs import STORIES, Story, events
from tests.report.test_metrics import collected, history_of, rollout, started

from hone.report import plots
from hone.report.estimate import Estimate
from hone.report.headline import plot_title
from hone.report.history import RunHistory
from hone.report.outcome import Outcome
from hone.report.plots import held_out_rewards, smoothed, training_rewards
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


def labels(lines: list[dict] | RunHistory) -> list[list[str]]:
    """What the legend of each axis names."""
    history = lines if isinstance(lines, RunHistory) else history_of(lines)
    legends = [axis.get_legend() for axis in plots.reward_figure(history).axes]
    return [[text.get_text() for text in legend.get_texts()] for legend in legends if legend]


def title(lines: list[dict]) -> tuple[str, str]:
    return plot_title(Outcome.of(history_of(lines)))


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
    # Both examples of epoch 0 have the mean 0.5: no spread, no interval. Epoch 1 gave nothing: no
    # value. No rollouts are known of epochs 2 and 3, so they have a mean without an interval.
    assert training_rewards(history_of(lines)) == [
        (0.0, Estimate(0.5, None, None, 2)),
        (1.0, None),
        (2.0, Estimate(0.7, None, None, 0)),
        (3.0, Estimate(0.7, None, None, 0)),
    ]
    # The t interval of [0, 1] is cut to the range of the rewards.
    assert held_out_rewards(history_of(lines)) == [
        (0.0, Estimate(0.5, 0.0, 1.0, 2)),
        (1.0, None),
        (2.0, Estimate(1.0, None, None, 2)),
    ]
    # A gap is a cross. Nothing was filtered out, and the newest step is the best.
    assert labels(lines) == [["training", "nothing collected", "held out", "validation failed"]]
    rewards, strip = plots.reward_figure(history_of(lines)).axes
    assert rewards.get_ylim() == (-0.04, 1.04)
    assert [text.get_text() for text in strip.texts] == ["100%", "30%", "50%"]


def test_the_best_step_is_marked_where_it_is_not_the_newest():
    lines = [started(), validation(0, {"a": [0.1]}, 0.1), validation(4, {"a": [0.9]}, 0.9)]
    assert labels(lines) == [["held out"]]
    lines.append(validation(6, {"a": [0.5]}, 0.5))
    assert labels(lines) == [["held out", "best, step 4"]]
    # Of equal ones the first; the untrained model, where nothing beat it.
    lines = [started(), validation(0, {"a": [0.4]}, 0.4), validation(1, {"a": [0.4]}, 0.4)]
    assert labels(lines) == [["held out", "best, step 0"]]


def test_rounds_stand_between_the_epochs_and_restarts_where_they_happened():
    history = RunHistory.of(events(Story(epochs=2, rounds=4, interval=1, examples=4)))
    xs = [x for x, _ in training_rewards(history)]
    assert xs == [0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75]
    history = RunHistory.of(events(STORIES["resumed"]))
    assert history.resumed_at == [4.0, 9.0]
    assert labels(history) == [["training", "held out", "best, step 10", "resumed"]]
    assert labels(RunHistory.of(events(STORIES["failed"])))[0][-1] == "job failed"


def test_what_was_learned_from_is_a_line_where_that_is_not_everything():
    lines = [started(), collected(0, 0.5), collected(1, 0.5)]
    assert labels(lines) == [["training"]]
    lines[1]["metrics"]["filtered_avg_reward"] = 0.75
    assert labels(lines) == [["training", "learned from"]]


def test_a_gap_stays_a_gap_when_smoothed():
    means = smoothed([0.0, 1.0, math.nan, 4.0, 5.0], 3)
    # (0 + 1) / 2, (0 + 1) / 2, the gap, (4 + 5) / 2, (4 + 5) / 2
    assert means[:2] == [0.5, 0.5] and math.isnan(means[2]) and means[3:] == [4.5, 4.5]


@pytest.mark.parametrize("name", STORIES)
def test_every_simulated_run_can_be_drawn(name: str, tmp_path: Path):
    history = RunHistory.of(events(STORIES[name]))
    plots.reward_plot(history, tmp_path / "reward_plot.png")
    # Two evaluators have an axis each: 1.3 times 780.
    height = 1014 if name == "apart" else 780
    assert size((tmp_path / "reward_plot.png").read_bytes()) == (1500, height)
    assert [path.name for path in tmp_path.iterdir()] == ["reward_plot.png"]


def test_what_two_evaluators_measured_shares_no_axis():
    figure = plots.reward_figure(RunHistory.of(events(STORIES["apart"])))
    assert labels(RunHistory.of(events(STORIES["apart"]))) == [
        ["held out, by reward (exact_match)", "validation failed"],
        ["training, by reward (agent.py:shaped)", "learned from"],
    ]
    # Right or wrong on one axis, the shaped reward from -2 to 3 on the other.
    held_out, training, _ = (axis.get_ylim() for axis in figure.axes)
    assert held_out == (-0.04, 1.04) and training[0] < 0 and training[1] > 2


def test_one_evaluator_has_one_axis_and_temperature_0_is_named():
    lines = [started(evaluator="match"), validation(0, {"a": [0.1]}, 0.1), collected(0, 0.5)]
    assert labels(lines) == [["training", "held out"]]
    lines[0]["validation_greedy"] = True
    assert labels(lines) == [["training", "held out at temperature 0"]]


def test_a_name_is_not_a_formula(tmp_path: Path):
    named: dict[str, Any] = {"evaluator": "cost in $ and $x^{", "validation_evaluator": "$"}
    lines = [started(**named), validation(0, {"a": [0.1]}, 0.1), collected(0, 0.5)]
    plots.reward_plot(history_of(lines), tmp_path / "plot.png")
    assert size((tmp_path / "plot.png").read_bytes()) == (1500, 1014)


def test_the_users_settings_of_matplotlib_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """With `text.usetex` every text would be set by LaTeX, which servers do not have."""
    history = RunHistory.of(events(Story(epochs=2, examples=4, held_out=4)))
    plots.reward_plot(history, tmp_path / "a.png")
    changes, learning = plots.example_changes([1.0, 0.0]), plots.learning(history)
    monkeypatch.setitem(matplotlib.rcParams, "text.usetex", True)
    monkeypatch.setenv("PATH", "")
    plots.reward_plot(history, tmp_path / "b.png")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    assert (plots.example_changes([1.0, 0.0]), plots.learning(history)) == (changes, learning)
    assert matplotlib.rcParams["text.usetex"]


def test_figures_of_an_agent_look_the_same_while_a_plot_is_drawn(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """A thread draws the plots, and settings of matplotlib hold for all threads."""
    seen: list[object] = []
    save = Figure.savefig

    def savefig(self: Figure, *args: Any, **options: Any) -> None:
        for key in ("axes.grid", "figure.dpi", "axes.spines.top"):
            seen.append(matplotlib.rcParams[key])
        save(self, *args, **options)

    monkeypatch.setattr(Figure, "savefig", savefig)
    plots.reward_plot(history_of([started()]), tmp_path / "plot.png")
    assert seen == [False, 100.0, True]


def test_a_run_that_has_not_begun_can_be_drawn(tmp_path: Path):
    for lines in ([started()], [started(), collected(0, None, low=None, high=None)]):
        plots.reward_plot(history_of(lines), tmp_path / "plot.png")
        assert size((tmp_path / "plot.png").read_bytes()) == (1500, 780)
    assert title([started()]) == ("No reward yet", "")
    ended = {"at": 9.0, "type": "run_finished", "status": "failed", "message": "", "step": 0}
    ended["seconds"] = 9.0
    assert title([started(), ended]) == ("No reward", "")
    assert plots.learning(history_of([started()])) is None


@pytest.mark.parametrize("deltas", [[0.0], [1.0, -1.0], [0.0] * 300, [i / 99 for i in range(99)]])
def test_changes_of_any_shape_can_be_drawn(deltas: list[float]):
    assert size(plots.example_changes(deltas))[0] == 1500


@pytest.mark.parametrize("count", [1, 4, 12, 40])
def test_the_axis_of_the_changes_ends_with_the_last_example(count: int):
    figure = plots.changes_figure([0.5] * count)
    figure.draw_without_rendering()
    (axis,) = figure.axes
    low, high = axis.get_xlim()
    assert 0 < low < 1 and count < high < count + 1
    ticks = [float(tick) for tick in axis.get_xticks() if low <= tick <= high]
    assert ticks and set(ticks) <= set(range(1, count + 1))
    assert count > plots.FEW_BARS or ticks == list(range(1, count + 1))
    # The bars are as wide as those of 16 examples, if there are fewer: 0.86 / 16 of the axis.
    widths = [bar.get_width() for bar in axis.patches if isinstance(bar, Rectangle)]
    assert widths == pytest.approx([0.86 * count / max(count, 16)] * count)


def test_the_title_says_the_finding():
    lines = [started(), validation(0, {str(i): [0.0] for i in range(8)}, 0.0)]
    lines.append(validation(1, {str(i): [1.0] for i in range(8)}, 1.0))
    assert title(lines) == (
        "Held-out reward 0.00 \u2192 1.00",
        "+1.00 (all examples changed alike), 8 examples, p = 0.008",
    )


def test_the_title_of_a_run_with_nothing_to_compare():
    lines = [started(), validation(0, {"a": [0.25]}, 0.25)]
    assert title(lines) == ("Held-out reward 0.25", "")
    assert title([*lines, collected(0, 0.5)]) == ("Training reward 0.50", "")
    assert title([started(), validation(0, {}, None), collected(0, 0.5)])[0] == (
        "Training reward 0.50"
    )


def test_numbers_in_words():
    assert number(None) == "none"
    assert number(-0.525) == "\u22120.53"
    assert number(1234.5) == "1,234"
    assert (
        interval(Estimate(-0.2, -0.4, 0.01, 9)) == "\u22120.20 (95% interval \u22120.40 to +0.01)"
    )
    assert [duration(s) for s in (0.04, 9.96, 59.4, 60, 95, 3600, 3725, 90000, 200000)] == [
        *("0.0 s", "10 s", "59 s", "1 min", "1 min 35 s", "1 h", "1 h 2 min", "1 d 1 h", "2 d 7 h")
    ]
