"""Plots of a run: rewards, change of every example, metrics of the learner.

In:   the History of a run
Out:  reward_plot.png; the same and two more as PNG bytes for the report

What failed is a gap and a cross, never a point at 0. Bands and bars are 95% intervals over examples.
Colours differ in lightness too, and every line has its own marker, so that nobody has to tell colours
apart.
"""

import math
from collections.abc import Callable, Sequence
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hone.report import canvas, metrics
from hone.report.canvas import FAINT, INK, NARROW, NARROW_BELOW, SOFT, WIDE
from hone.report.comparison import comparison
from hone.report.curves import Curves, Point, curves, smoothed
from hone.report.estimate import Rewards, gain
from hone.report.history import History, Round
from hone.report.text import counted, interval, number, p_value, when
from hone.report.validations import Validation

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["NARROW", "WIDE", "example_changes", "headline", "learning", "reward_plot", "rewards"]

COOL, WARM, DEEP, RUST, WRONG = "#1f7a8c", "#e2703a", "#123f49", "#a8481b", "#a4262c"
"""Colours: training, held-out, what was trained on, held-out numbers, failures."""
MANY = 60
"""With more points a line is smoothed, and the points are drawn faintly."""
LONGEST = 24
"""Characters of an evaluator's name that fit beside an axis."""


# ---- figures --------------------------------------------------------------------------------------


def reward_plot(history: History, path: Path) -> None:
    """Training, held-out and filtered reward, and the curriculum's share, as one PNG."""
    metrics.replace(path, rewards(history, WIDE))


def shows_all(picture: bytes, history: History) -> bool:
    """Whether the picture is the reward plot that would be drawn now."""
    return mark(history).encode() in picture


def mark(history: History) -> str:
    """Comment in the file of a reward plot: a hash of everything that is drawn."""
    return _mark(curves(history), headline(history))


def _mark(drawn: Curves, titles: tuple[str, str]) -> str:
    return f"[rewards {sha256(repr((drawn, titles)).encode()).hexdigest()[:16]}]"


def rewards(history: History, size: tuple[float, float]) -> bytes:
    """The reward plot as PNG bytes."""
    drawn = curves(history)
    # Rewards of different evaluators have different scales, so they have different axes.
    parts = drawn.by_evaluator()
    heights = [5.0 / len(parts)] * len(parts) + ([1.0] if drawn.percentile else [])
    figure = canvas.figure((size[0], size[1] * (1.0 if len(parts) == 1 else 1.3)))
    axes = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights, squeeze=False)[:, 0]
    title, note = headline(history)
    for axis, part in zip(axes, parts, strict=False):
        canvas.style(axis)
        _frame(axis, part, last=drawn.last)
        rows = canvas.legend(axis, _lines(axis, part) + _marks(axis, part))
        name = drawn.names[0] if len(parts) == 1 else None  # otherwise the legends name them
        label = f"reward: {name}" if name and len(name) <= LONGEST else "reward"
        axis.set_ylabel(canvas.plain(label), color=SOFT, fontsize=10)
        if axis is axes[0]:
            canvas.title(axis, title, note, legend_rows=rows)
    if drawn.percentile:
        _share(axes[-1], drawn, narrow=size[0] < NARROW_BELOW)
    axes[-1].set_xlabel("epochs trained", color=SOFT, fontsize=10)
    return canvas.png(figure, comment=_mark(drawn, (title, note)))


def headline(history: History) -> tuple[str, str]:
    """The result in a few words, and how certain it is."""
    scored, compared = history.scored, comparison(history)
    if compared is not None:
        first, last = compared.before, compared.after
        title = f"Held-out reward {number(first.mean)} \u2192 {number(last.mean)}"
        late = f", baseline {when(first.epoch)}" if first.epoch else ""
        late += f", step {last.step} answered again" if compared.fresh else ""
        tried = [v.rewards for v in compared.tried]
        return title, _certainty(first.rewards, last.rewards, tried) + late + _failing(first, last)
    epochs = [(e["epoch"], e["avg_reward"]) for e in metrics.reward_history(history)]
    known = [(epoch, mean) for epoch, mean in epochs if mean is not None]
    once = f"{number(scored[0].mean)} {when(scored[0].epoch)}" if scored else ""
    if not known and once:
        return f"Held-out reward {once}", "of one validation"
    if not known:
        return "No reward" if history.finished else "No reward yet", ""
    if len(known) == 1:
        note = f"of one epoch; held out {once}" if once else "of one epoch"
        return f"Training reward {number(known[0][1])}", note
    (first, before), (last, after) = known[0], known[-1]
    title = f"Training reward {number(before)} \u2192 {number(after)}"
    return title, _certainty(history.rewards(first), history.rewards(last))


def _failing(before: Validation, after: Validation) -> str:
    """Rates of policy failures; empty without any."""
    if not before.policy_failures and not after.policy_failures:
        return ""
    rates = (f"{v.failure_rate or 0.0:.0%}" for v in (before, after))
    return ", failures " + " \u2192 ".join(rates)


def _certainty(before: Rewards, after: Rewards, tried: Sequence[Rewards] = ()) -> str:
    change = gain(before, after, tried=tried)
    if change is None or change.low is None:
        return ""
    p = f", {p_value(change)}" if change.p is not None else ""
    return f"{interval(change)}, {counted(change.n, 'example')}{p}"


def example_changes(deltas: Sequence[float], size: tuple[float, float]) -> bytes:
    """Change of each held-out example, the largest first."""
    figure = canvas.figure((size[0], size[1] * 0.8))
    axis = figure.add_subplot()
    canvas.style(axis)
    ordered = sorted(deltas, reverse=True)
    better, worse = sum(d > 0 for d in ordered), sum(d < 0 for d in ordered)
    colours = [COOL if d > 0 else WARM for d in ordered]
    axis.bar(range(1, len(ordered) + 1), ordered, width=0.86, color=colours, linewidth=0, zorder=3)
    level = [i + 1 for i, d in enumerate(ordered) if d == 0]
    axis.scatter(level, [0.0] * len(level), s=9, color=SOFT, linewidths=0, zorder=4)
    axis.axhline(0, color=INK, linewidth=0.8, zorder=4)
    largest = max((abs(d) for d in ordered), default=1.0) or 1.0
    axis.set_ylim(min(*ordered, 0.0) - 0.08 * largest, max(*ordered, 0.0) + 0.08 * largest)
    axis.set_xlim(0.2, max(len(ordered), 16) + 0.8)
    every = max(1, math.ceil(len(ordered) / 8))
    axis.set_xticks(range(every, len(ordered) + 1, every))
    same = len(ordered) - better - worse
    canvas.title(
        axis,
        f"{better} better, {worse} worse, {same} unchanged",
        f"change of the reward of each of {len(ordered)} examples",
    )
    axis.set_xlabel("example", color=SOFT, fontsize=10)
    axis.set_ylabel("change", color=SOFT, fontsize=10)
    return canvas.png(figure)


PANELS: tuple[tuple[str, Callable[[Round], float | None]], ...] = (
    ("groups with equal rewards", lambda r: _flat_share(r)),
    ("entropy", lambda r: r.learned.get("learn/entropy")),
    ("clipped tokens", lambda r: r.learned.get("learn/clip_frac")),
    ("gradient norm", lambda r: r.learned.get("learn/grad_norm")),
    ("sampler mismatch (KL)", lambda r: r.learned.get("learn/mismatch_kl")),
    ("learner, tokens per second", lambda r: r.learned.get("learn/tokens_per_s")),
)
"""Metrics of the jobs; only those that were measured are drawn."""


def measured(history: History) -> dict[str, list[tuple[float, float | None]]]:
    """Epochs trained and value, by panel, without panels that have no values."""
    series = {name: [(r.trained, value(r)) for r in history.rounds] for name, value in PANELS}
    return {
        name: points for name, points in series.items() if any(y is not None for _, y in points)
    }


def learning(history: History, size: tuple[float, float]) -> bytes | None:
    """One small plot per metric of the jobs; None without any."""
    series = measured(history)
    if not series:
        return None
    columns = 2 if size[0] < NARROW_BELOW else 3
    lines = math.ceil(len(series) / columns)
    figure = canvas.figure((size[0], 0.35 + 1.75 * lines))
    for i, (name, points) in enumerate(series.items()):
        axis = figure.add_subplot(lines, columns, i + 1)
        canvas.style(axis)
        xs, ys = [x for x, _ in points], [math.nan if y is None else y for _, y in points]
        many = len(xs) > MANY
        marker = {} if many else {"marker": "o", "markersize": 3.5}
        axis.plot(xs, ys, color=COOL, linewidth=0.9 if many else 1.6, clip_on=False, **marker)
        known = [y for y in ys if not math.isnan(y)]
        low, top = min(known), max(known)
        top = max(top, 1e-6) if "mismatch" in name else top or 1.0  # rounding errors are none
        axis.set_ylim(min(0.0, low * 1.1), 1.05 if "groups" in name else top * 1.15)
        axis.yaxis.set_major_formatter("{x:g}")
        axis.set_title(name, loc="left", fontsize=9.5, color=INK, pad=6)
        axis.tick_params(labelsize=8)
        axis.locator_params(axis="y", nbins=4)
        canvas.whole_numbers(axis, 5)
        if i >= len(series) - columns:
            axis.set_xlabel("epochs trained", color=SOFT, fontsize=8.5)
    return canvas.png(figure)


def _flat_share(r: Round) -> float | None:
    groups = r.metrics.get("num_groups")
    return r.num_flat / groups if groups else None


# ---- the reward plot, part by part ----------------------------------------------------------------


def _frame(axis: "Axes", drawn: Curves, *, last: float) -> None:
    """Axes from 0 to 1 for rewards in that range, else from the lowest to the highest."""
    pad = max(0.25, 0.02 * last)
    axis.set_xlim(-pad, max(last, 1.0) + pad * 2.2)
    canvas.whole_numbers(axis, 12)
    low, high = drawn.bounds or (0.0, 1.0)
    if low >= 0 and high <= 1:
        low, high = 0.0, 1.0
    margin = 0.04 * ((high - low) or 1.0)
    axis.set_ylim(low - margin, high + margin)


def _share(axis: "Axes", drawn: Curves, *, narrow: bool) -> None:
    """The curriculum's share in its own strip below the rewards."""
    canvas.style(axis)
    xs, shares = (list(column) for column in zip(*drawn.percentile, strict=True))
    right = axis.get_xlim()[1]
    heights = [100 * share for share in (*shares, shares[-1])]
    axis.fill_between([*xs, right], heights, step="post", color=FAINT, alpha=0.8, linewidth=0)
    axis.step([*xs, right], heights, where="post", color=SOFT, linewidth=1.2)
    axis.set_ylim(0, 112)
    axis.set_yticks([0, 50, 100], ["0", "50%", "100%"])
    axis.set_ylabel("admitted", color=SOFT, fontsize=9)
    span = right - axis.get_xlim()[0]
    levels = [(xs[0], shares[0]), *drawn.expansions]
    apart = span * (0.11 if narrow else 0.05)
    if any(b[0] - a[0] < apart for a, b in pairwise(levels)):  # too close to be read
        levels = [levels[-1]]
    for x, share in levels:
        at: dict[str, Any] = {"xytext": (3, -3), "textcoords": "offset points", "va": "top"}
        axis.annotate(f"{share:.0%}", (x, 100 * share), **at, fontsize=8.5, color=INK)


def _lines(axis: "Axes", drawn: Curves) -> list[Any]:
    name, other = drawn.labels
    training = _line(axis, drawn.training, COOL, "o", "-", name)
    held_out = _line(axis, drawn.held_out, WARM, "D", (0, (5, 2)), other)
    _label_last(axis, drawn)
    handles = [line for line in (training, held_out) if line is not None]
    if any(y is not None for _, y in drawn.filtered):
        xs, ys = [x for x, _ in drawn.filtered], [_nan(y) for _, y in drawn.filtered]
        ys = smoothed(ys, _window(len(ys)))
        style: dict[str, Any] = {"linestyle": (0, (1, 1.6)), "linewidth": 1.4, "zorder": 4}
        handles += axis.plot(xs, ys, color=DEEP, label="learned from", **style)
    return handles


def _label_last(axis: "Axes", drawn: Curves) -> None:
    """The last reward, beside its point."""
    points, colour = (drawn.held_out, RUST) if drawn.held_out else (drawn.training, DEEP)
    known = [(p.x, p.value.mean) for p in points if p.value]
    if len(known) > 1:
        at: dict[str, Any] = {"xytext": (9, 0), "textcoords": "offset points", "va": "center"}
        axis.annotate(
            number(known[-1][1]), known[-1], **at, fontsize=10, fontweight="bold", color=colour
        )


def _line(
    axis: "Axes", points: list[Point], colour: str, marker: str, style: Any, name: str
) -> Any:
    """One line with its intervals as a band, or as a bar at every point."""
    if not any(p.value for p in points):
        return None
    dots = marker == "o"
    many = len(points) > MANY
    # A lone training point beside a held-out one: its bar must not hide behind the other's.
    aside = -0.012 * (axis.get_xlim()[1] - axis.get_xlim()[0]) if dots and len(points) < 3 else 0.0
    xs = [p.x + aside for p in points]
    ys = [_nan(p.value and p.value.mean) for p in points]
    lows = [
        _nan(p.value and (p.value.mean if p.value.low is None else p.value.low)) for p in points
    ]
    highs = [
        _nan(p.value and (p.value.mean if p.value.high is None else p.value.high)) for p in points
    ]
    if dots and len(points) > 2:
        axis.fill_between(xs, lows, highs, color=colour, alpha=0.14, linewidth=0, zorder=2)
    else:
        axis.vlines(xs, lows, highs, color=colour, linewidth=1.3, alpha=0.55, zorder=4)
    if many:
        axis.plot(xs, ys, color=colour, linewidth=0.8, alpha=0.4, zorder=4)
        window = _window(len(points))
        ys, name = smoothed(ys, window), f"{name}, mean of {window}"
    (line,) = axis.plot(
        xs,
        ys,
        color=colour,
        linewidth=2.0,
        linestyle=style,
        marker="" if many else marker,
        markersize=6.0 if dots else 6.6,
        markeredgecolor="white",
        markeredgewidth=0.8,
        label=canvas.plain(name),
        zorder=5 if dots else 6,
    )
    return line


def _marks(axis: "Axes", drawn: Curves) -> list[Any]:
    """A ring for the best step, crosses for what failed, vertical lines for what happened."""
    handles = []
    floor = axis.get_xaxis_transform()
    for points, colour, name in (
        (drawn.held_out, WARM, "validation failed"),
        (drawn.training, COOL, "nothing collected"),
    ):
        xs = [p.x for p in points if p.value is None]
        if xs:
            handles += axis.plot(
                *(xs, [0.025] * len(xs)),
                transform=floor,
                clip_on=False,
                linestyle="none",
                marker="x",
                markersize=7,
                markeredgewidth=2,
                color=colour,
                label=name,
                zorder=7,
            )
    if drawn.best:
        x, step = drawn.best
        y = next(p.value.mean for p in drawn.held_out if p.x == x and p.value)
        ring: dict[str, Any] = {"linestyle": "none", "marker": "o", "fillstyle": "none"}
        label = f"best, step {step}"
        handles += axis.plot(
            *([x], [y]),
            color=INK,
            markersize=13,
            markeredgewidth=1.3,
            label=label,
            zorder=7,
            **ring,
        )
    for xs, colour, style, name in (
        ([x for x, _ in drawn.expansions], SOFT, (0, (1, 4)), "curriculum grows"),
        (drawn.resumed, SOFT, (0, (4, 3)), "resumed"),
        (drawn.job_failures, WRONG, "-", "job failed"),
    ):
        lines = [
            axis.axvline(x, color=colour, linewidth=1.2, linestyle=style, zorder=1) for x in xs
        ]
        if lines:
            lines[0].set_label(name)
            handles.append(lines[0])
    return handles


def _window(points: int) -> int:
    return 2 * (points // 40) + 1 if points > MANY else 1


def _nan(value: float | None) -> float:
    return math.nan if value is None else value
