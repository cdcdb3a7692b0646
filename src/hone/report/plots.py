"""Plots of a run: rewards, change of every example, metrics of the learner.

In:   the RunHistory of a run
Out:  reward_plot.png; two more as PNG bytes for the report

A failure is a gap with a cross, never a point at 0. Bands and bars are 95% intervals over examples.
Colours also differ in lightness, and every line has its own marker, for readers who cannot tell
colours apart. The x value of a reward is the number of epochs that its policy was trained for, so training
and validation rewards at the same place belong to the same policy.
"""

import io
import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hone.files.disk import write_atomic
from hone.files.events import JobFailed
from hone.report.estimate import Estimate, around
from hone.report.headline import plot_title
from hone.report.history import Round, RunHistory
from hone.report.outcome import Outcome
from hone.report.text import counted, number

INK, SOFT, FAINT = "#22303c", "#66727c", "#d5dce1"
COOL, WARM, DEEP, RUST, WRONG = "#1f7a8c", "#e2703a", "#123f49", "#a8481b", "#a4262c"
"""Colours: training, held-out, trained groups, held-out numbers, failures."""
MANY = 60
"""With more points a line is smoothed, and the points are drawn faintly."""
FEW_BARS = 16
"""Maximum number of bars that have a tick each."""

styled = style.context("default")
"""Ignores the user's matplotlibrc, which may select LaTeX or a dark background.

matplotlib's settings are shared by all threads, and an agent may plot too, so hone sets its style
on each plot instead of here.
"""

Point = tuple[float, Estimate | None]
"""Epochs that a policy was trained for, and its reward; None if that failed."""


# ---- numbers --------------------------------------------------------------------------------------


def training_rewards(history: RunHistory) -> list[Point]:
    if history.run.generations == 0:  # conversations of a dataset have no rewards
        return []
    return [(r.trained, around(r.metrics.get("avg_reward"), r.by_example)) for r in history.rounds]


def held_out_rewards(history: RunHistory) -> list[Point]:
    return [(float(v.epoch), around(v.mean, v.rewards)) for v in history.validations]


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """Moving average of the known values; a gap stays a gap."""
    known, kernel = ~np.isnan(values), np.ones(window)
    total = np.convolve(np.where(known, values, 0.0), kernel, "same")
    count = np.convolve(known, kernel, "same")
    return list(np.where(known, total / np.maximum(count, 1), np.nan))


# ---- the reward plot ------------------------------------------------------------------------------


@styled
def reward_plot(history: RunHistory, path: Path) -> None:
    write_atomic(path, _png(reward_figure(history)))


def reward_figure(history: RunHistory) -> Figure:
    """Training, held-out and filtered reward, and the curriculum's share."""
    training, held_out = training_rewards(history), held_out_rewards(history)
    evaluator, other = history.run.evaluators
    # Rewards of different evaluators have different scales, so they have different axes.
    two = bool(training and held_out and evaluator and evaluator != other)
    shares = [(r.trained, r.metrics.get("curriculum_percentile") or 1.0) for r in history.rounds]
    strip = any(share < 1 for _, share in shares)
    figure = _figure(5.2 * (1.3 if two else 1.0))
    heights = ([2.5, 2.5] if two else [5.0]) + ([1.0] if strip else [])
    axes = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights, squeeze=False)[:, 0]
    above, below = axes[0], axes[1 if two else 0]
    last = max((x for x, _ in (*training, *held_out)), default=0.0)
    pad = max(0.25, 0.02 * last)
    above.set_xlim(-pad, max(last, 1.0) + 2.2 * pad)
    name = f"training, by {evaluator}" if two else "training"
    _line(below, training, name, "nothing collected", COOL, "o", "-")
    name = "held out at temperature 0" if history.run.validation_greedy else "held out"
    name += f", by {other}" if two else ""
    _line(above, held_out, name, "validation failed", WARM, "D", (0, (5, 2)))
    _learned_from(below, history.rounds)
    _events(above, history)
    ends = {below: (training, DEEP)} | ({above: (held_out, RUST)} if held_out else {})
    for axis, (points, colour) in ends.items():
        _label_last(axis, points, colour)
        _frame(axis, "reward" if two or not evaluator else f"reward: {evaluator[:24]}")
    _title(above, *plot_title(Outcome.of(history)), above=12 + 17 * _legend(above))
    if two:
        _legend(below)
    if strip:
        _strip(axes[-1], shares)
    axes[-1].set_xlabel("epochs trained", color=SOFT, fontsize=10)
    return figure


def _line(
    axis: Axes,
    points: list[Point],
    name: str,
    gap: str,
    colour: str,
    marker: str,
    dashes: Any,
) -> None:
    """One line with its intervals as a band, or as a bar at every point, and crosses for gaps."""
    many, dots = len(points) > MANY, marker == "o"
    # A lone training point beside a held-out one: its bar must not hide behind the other's.
    aside = -0.012 * (axis.get_xlim()[1] - axis.get_xlim()[0]) if dots and len(points) < 3 else 0.0
    xs = [x + aside for x, _ in points]
    ys, lows, highs = (
        [_or_nan(getattr(value, end, None)) for _, value in points]
        for end in ("mean", "low", "high")
    )
    if dots and len(points) > 2:
        axis.fill_between(xs, lows, highs, color=colour, alpha=0.14, linewidth=0, zorder=2)
    else:
        axis.vlines(xs, lows, highs, color=colour, linewidth=1.3, alpha=0.55, zorder=4)
    if many:
        axis.plot(xs, ys, color=colour, linewidth=0.8, alpha=0.4, zorder=4)
        window = _window(len(points))
        ys, name = smoothed(ys, window), f"{name}, mean of {window}"
    gaps = [x for x, value in points if value is None]
    axis.plot(
        xs,
        ys,
        color=colour,
        linewidth=2.0,
        linestyle=dashes,
        marker="" if many else marker,
        markersize=6.0 if dots else 6.6,
        markeredgecolor="white",
        markeredgewidth=0.8,
        label=_plain(name) if len(gaps) < len(points) else None,
        zorder=5 if dots else 6,
    )
    if gaps:
        low, cross = [0.025] * len(gaps), {"marker": "x", "markersize": 7, "markeredgewidth": 2}
        at = {"transform": axis.get_xaxis_transform(), "clip_on": False, "zorder": 7}
        axis.plot(gaps, low, color=colour, linestyle="none", label=gap, **cross, **at)


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def _learned_from(axis: Axes, rounds: list[Round]) -> None:
    """The mean reward of what was trained on, if that is not everything."""
    means = [r.metrics.get("filtered_avg_reward") for r in rounds]
    if any(mean != r.metrics.get("avg_reward") for r, mean in zip(rounds, means, strict=True)):
        ys = smoothed([_or_nan(mean) for mean in means], _window(len(means)))
        axis.plot(
            [r.trained for r in rounds],
            ys,
            color=DEEP,
            linestyle=(0, (1, 1.6)),
            linewidth=1.4,
            label="learned from",
            zorder=4,
        )


def _events(axis: Axes, history: RunHistory) -> None:
    """A ring for the best step, vertical lines for what happened to the run."""
    best = history.best
    if best is not None and best is not history.scored[-1] and best.step is not None:
        axis.plot(
            [best.epoch],
            [best.mean or 0.0],
            color=INK,
            linestyle="none",
            marker="o",
            fillstyle="none",
            markersize=13,
            markeredgewidth=1.3,
            label=f"best, step {best.step}",
            zorder=7,
        )
    failed = [r.trained for r in history.rounds if isinstance(r.job, JobFailed)]
    for xs, colour, dashes, name in (
        (history.resumed_at, SOFT, (0, (4, 3)), "resumed"),
        (failed, WRONG, "-", "job failed"),
    ):
        for i, x in enumerate(xs):
            label = None if i else name
            axis.axvline(x, color=colour, linewidth=1.2, linestyle=dashes, label=label, zorder=1)


def _label_last(axis: Axes, points: list[Point], colour: str) -> None:
    """The last reward, beside its point."""
    known = [(x, value.mean) for x, value in points if value]
    if len(known) > 1:
        style = {"va": "center", "fontsize": 10, "fontweight": "bold", "color": colour}
        axis.annotate(number(known[-1][1]), known[-1], (9, 0), textcoords="offset points", **style)


def _frame(axis: Axes, label: str) -> None:
    """The axis goes from 0 to 1 for rewards in that range."""
    _style(axis)
    axis.locator_params(axis="x", nbins=12, integer=True)
    axis.set_ylabel(_plain(label), color=SOFT, fontsize=10)
    low, high = axis.dataLim.intervaly
    if not (low < 0 or high > 1):
        axis.set_ylim(-0.04, 1.04)


def _strip(axis: Axes, shares: list[tuple[float, float]]) -> None:
    """The share of the groups that the curriculum admits, in its own strip below the rewards."""
    _style(axis)
    xs = [*(x for x, _ in shares), axis.get_xlim()[1]]
    heights = [100 * share for _, share in (*shares, shares[-1])]
    axis.fill_between(xs, heights, step="post", color=FAINT, alpha=0.8, linewidth=0)
    axis.step(xs, heights, where="post", color=SOFT, linewidth=1.2)
    axis.set_ylim(0, 112)
    axis.set_yticks([0, 50, 100], ["0", "50%", "100%"])
    axis.set_ylabel("admitted", color=SOFT, fontsize=9)
    levels = [here for i, here in enumerate(shares) if not i or here[1] != shares[i - 1][1]]
    span = axis.get_xlim()[1] - axis.get_xlim()[0]
    if any(b[0] - a[0] < 0.05 * span for a, b in pairwise(levels)):  # too close to be read
        levels = levels[-1:]
    for x, share in levels:
        place, style = (x, 100 * share), {"va": "top", "fontsize": 8.5, "color": INK}
        axis.annotate(f"{share:.0%}", place, (3, -3), textcoords="offset points", **style)


# ---- the other plots ------------------------------------------------------------------------------


@styled
def example_changes(deltas: Sequence[float]) -> bytes:
    return _png(changes_figure(deltas))


def changes_figure(deltas: Sequence[float]) -> Figure:
    """Change of each held-out example, the largest first."""
    figure = _figure(4.2)
    axis = figure.add_subplot()
    _style(axis)
    ordered = sorted(deltas, reverse=True)
    count, places = len(ordered), range(1, len(ordered) + 1)
    colours = [COOL if d > 0 else WARM for d in ordered]
    width = 0.86 * min(1.0, count / FEW_BARS)  # a bar of few examples is not wider than one of many
    axis.bar(places, ordered, width=width, color=colours, linewidth=0, zorder=3)
    unchanged = [place for place, d in zip(places, ordered, strict=True) if d == 0]
    axis.scatter(unchanged, [0.0] * len(unchanged), s=9, color=SOFT, linewidths=0, zorder=4)
    axis.axhline(0, color=INK, linewidth=0.8, zorder=4)
    axis.set_xlim(0.2, count + 0.8)
    if count <= FEW_BARS:
        axis.set_xticks(places)
    else:
        axis.locator_params(axis="x", nbins=8, integer=True)
    better, worse = sum(d > 0 for d in ordered), sum(d < 0 for d in ordered)
    note = f"change of the reward of each of {counted(count, 'example')}"
    _title(axis, f"{better} better, {worse} worse, {len(unchanged)} unchanged", note, above=12)
    axis.set_xlabel("example", color=SOFT, fontsize=10)
    axis.set_ylabel("change", color=SOFT, fontsize=10)
    return figure


PANELS = {
    "loss": "learn/loss",
    "preference accuracy": "learn/reward_accuracy",
    "preference margin": "learn/reward_margin",
    "groups with equal rewards": "flat",
    "entropy": "learn/entropy",
    "clipped tokens": "learn/clip_frac",
    "gradient norm": "learn/grad_norm",
    "sampler mismatch (KL)": "learn/mismatch_kl",
    "learner, tokens per second": "learn/tokens_per_s",
}
"""Metrics of the jobs; only those that were measured are drawn. The loss of a policy gradient says
nothing about progress: it is drawn where there is no ratio to clip, for DPO and SFT."""


def _share_flat(round: Round) -> dict[str, float]:
    groups, collected = round.metrics.get("num_groups"), round.collected
    if not groups or collected is None or collected.zero_variance_groups is None:
        return {}
    return {"flat": round.num_flat / groups}


@styled
def learning(history: RunHistory) -> bytes | None:
    """One small plot per metric of the jobs; None without any."""
    measured = [r.learned | _share_flat(r) for r in history.rounds]
    known = {key for m in measured for key in m}
    if "learn/clip_frac" in known:
        known.discard("learn/loss")
    shown = {name: key for name, key in PANELS.items() if key in known}
    if not shown:
        return None
    lines = math.ceil(len(shown) / 3)
    figure = _figure(0.35 + 1.75 * lines)
    for i, (name, key) in enumerate(shown.items()):
        axis = figure.add_subplot(lines, 3, i + 1)
        _style(axis)
        points = [(r.trained, m.get(key)) for r, m in zip(history.rounds, measured, strict=True)]
        ys = [math.nan if y is None else y for _, y in points]
        many = len(ys) > MANY
        axis.plot(
            [x for x, _ in points],
            ys,
            color=COOL,
            linewidth=0.9 if many else 1.6,
            marker="" if many else "o",
            markersize=3.5,
            clip_on=False,
        )
        # Mismatches below 1e-6 are rounding errors.
        top = max([1e-6, *(y for y in ys if not math.isnan(y))])
        axis.set_ylim(min([0.0, *ys]), 1.05 if key == "flat" else 1.15 * top)
        axis.yaxis.set_major_formatter("{x:g}")
        axis.set_title(name, loc="left", fontsize=9.5, color=INK, pad=6)
        axis.tick_params(labelsize=8)
        axis.locator_params(axis="y", nbins=4)
        axis.locator_params(axis="x", nbins=5, integer=True)
        if i >= len(shown) - 3:
            axis.set_xlabel("epochs trained", color=SOFT, fontsize=8.5)
    return _png(figure)


# ---- the common style -----------------------------------------------------------------------------


def _figure(height: float) -> Figure:
    # Not pyplot: this may run in a thread.
    return Figure(figsize=(10.0, height), dpi=150, facecolor="white", layout="tight")


def _png(figure: Figure) -> bytes:
    picture = io.BytesIO()
    figure.savefig(picture, metadata={"Software": None})
    return picture.getvalue()


def _style(axis: Axes) -> None:
    axis.grid(axis="y", color=FAINT, linewidth=0.7)
    axis.set_axisbelow(True)
    axis.tick_params(length=0, labelcolor=INK, labelsize=9)
    axis.spines[:].set_visible(False)
    axis.spines["bottom"].set_visible(True)
    axis.spines["bottom"].set_color(FAINT)


def _title(axis: Axes, text: str, note: str, *, above: float) -> None:
    """Two lines, `above` points above the axis."""
    place: dict[str, Any] = {
        "xycoords": "axes fraction",
        "textcoords": "offset points",
        "va": "bottom",
        "annotation_clip": False,
    }
    axis.annotate(note, (0.0, 1.0), (0.0, above), fontsize=10, color=SOFT, **place)
    bold = {"fontsize": 13, "fontweight": "bold", "color": INK}
    axis.annotate(text, (0.0, 1.0), (0.0, above + 18), **bold, **place)


def _legend(axis: Axes) -> int:
    """Put the legend above the plot, where no line crosses it; return its number of rows."""
    _, labels = axis.get_legend_handles_labels()
    if not labels:
        return 0
    rows = math.ceil(sum(len(label) + 8 for label in labels) / 120)  # about as many fit beside it
    axis.legend(
        loc="lower left",
        bbox_to_anchor=(0.0, 1.0),
        borderaxespad=0.4,
        borderpad=0.0,
        ncols=math.ceil(len(labels) / rows),
        frameon=False,
        fontsize=9.5,
        labelcolor=INK,
        handlelength=2.2,
        columnspacing=1.6,
        labelspacing=0.35,
    )
    return rows


def _plain(text: str) -> str:
    """Escape dollar signs: matplotlib reads text between two of them as a formula."""
    return text.replace("$", r"\$")


def _window(points: int) -> int:
    return 2 * (points // 40) + 1 if points > MANY else 1
