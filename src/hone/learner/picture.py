"""Draw the packed rows of a job as one PNG.

In:   the job's samples, its TrainConfig and optionally the learner's logprobs
Out:  the PNG, and the learner's logprobs as a plain array (LOGPROBS)

It runs in the learner's process, so that the server need not unpack the job. It packs the samples
again by the learner's own functions, so the picture shows what was computed. A label is drawn where
its token is predicted: at its parent. Where several labels have one parent (completions of a shared
prompt), the picture shows their mean.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hone.learner.samples import Samples, by_optimizer_step
from hone.types import TrainConfig

PICTURE = "packed_rows.png"
LOGPROBS = "learner_logprobs.npy"
"""Log-probabilities of all labels in the samples' order, float64; see StepResult.logprobs."""

MAX_ROWS = 120
"""Maximum number of rows drawn; the title states how many there are."""
WIDE = 4
"""Number of rows above which the plot has two columns."""

Floats = NDArray[np.float64]

KINDS = (
    ("prompt, shared", "#4f7cac"),
    ("prompt", "#b9cfe3"),
    ("sampled", "#e9a23b"),
)
_INK, _FAINT, _PAPER = "#2b2f36", "#8b949e", "#e4e7eb"


@dataclass(frozen=True, slots=True)
class Row:
    """One packed row as numbers to draw; NaN where there is nothing."""

    name: str
    kinds: Floats  # [L], index into KINDS
    depth: NDArray[np.int64]  # [L]
    edges: list[tuple[int, int]]
    """Places (parent, child) of every branch."""
    learned: dict[str, Floats]
    """[L] each: advantage, sampler, learner, difference; at the predicting place."""


def draw(
    samples: Samples,
    config: TrainConfig,
    path: Path,
    *,
    learner_logprobs: Sequence[float] | None = None,
    shared: bool = True,
    fill: bool = False,
) -> bool:
    """Write the picture to `path`; False, without a picture, if the job has no labels.

    `shared` and `fill` are those with which the job was packed.
    """
    if not samples.samples:
        return False
    learner = None if learner_logprobs is None else np.asarray(learner_logprobs, dtype=np.float64)
    rows, total, title = lay_out(samples, config, learner, shared=shared, fill=fill)
    if learner is not None:
        np.save(path.with_name(LOGPROBS), learner, allow_pickle=False)
    _paint(rows, title if total == len(rows) else f"{title}; the first {len(rows)} rows", path)
    return True


# ---- numbers --------------------------------------------------------------------------------------


def lay_out(
    samples: Samples,
    config: TrainConfig,
    learner: Floats | None,
    *,
    shared: bool = True,
    fill: bool = False,
) -> tuple[list[Row], int, str]:
    """The rows to draw, the number of all rows, and a title."""
    # It loads torch, which a server without a job to draw never needs.
    from hone.learner.trie import pack

    rows: list[Row] = []
    total = labels = 0
    tokens: Counter[str] = Counter()
    steps = by_optimizer_step(samples, config)
    assert config.row_tokens is not None, "the learner sets it before it draws"
    for s, part in enumerate(steps):
        batch = pack(part, row_tokens=config.row_tokens, shared=shared, fill=fill)
        mine = None if learner is None else learner[labels : labels + len(batch.labels)]
        kind_of = _kinds(part)
        for r, packed in enumerate(batch.rows):
            if len(rows) < MAX_ROWS:
                name = f"step {s + 1}, row {r + 1}" if len(steps) > 1 else f"row {r + 1}"
                rows.append(_row(name, packed, batch.labels, mine, kind_of))
        total += len(batch.rows)
        labels += len(batch.labels)
        tokens["all"] += batch.logical_tokens
        tokens["computed"] += batch.computed_tokens
        tokens["shared"] += batch.shared_tokens
    rollouts, of = _counted(len(samples.samples), "rollout"), _counted(samples.groups, "group")
    title = (
        f"{rollouts} of {of}, {labels:,} labels, {_counted(len(steps), 'optimizer step')}: "
        f"{tokens['all']:,} tokens, of which {tokens['computed']:,} were computed and "
        f"{tokens['shared']:,} shared, in {_counted(total, 'row')}"
    )
    return rows, total, title


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _kinds(samples: Sequence[Any]) -> dict[bytes, int]:
    """The kind of the node at the end of each path of ids, by the hash of the path."""
    rollouts: dict[bytes, set[int]] = {}
    sampled: set[bytes] = set()
    for r, sample in enumerate(samples):
        for call in sample.calls:
            for depth, key in enumerate(_prefixes(call.ids)):
                rollouts.setdefault(key, set()).add(r)
                if depth >= call.prompt:
                    sampled.add(key)
    return {k: 2 if k in sampled else 0 if len(r) > 1 else 1 for k, r in rollouts.items()}


def _prefixes(ids: NDArray[np.int64]) -> list[bytes]:
    """A hash of every prefix of a path."""
    from hashlib import blake2b

    state, keys = blake2b(digest_size=12), []
    for token in ids:
        state.update(int(token).to_bytes(8, "little"))
        keys.append(state.digest())
    return keys


def _row(
    name: str, packed: Any, labels: Any, learner: Floats | None, kind_of: dict[bytes, int]
) -> Row:
    ids = packed.token_ids.numpy()
    kinds = np.full(len(packed), np.nan)
    edges: list[tuple[int, int]] = []
    for segment in packed.segments:
        above = [ids[a:b] for a, b in segment.ancestors]
        path = np.concatenate([*above, ids[segment.start : segment.stop]])
        keys = _prefixes(path)[segment.depth :]
        kinds[segment.start : segment.stop] = [kind_of[key] for key in keys]
        if segment.ancestors:
            edges.append((segment.ancestors[-1][1] - 1, segment.start))
    place = packed.query_node.numpy()[packed.label_query.numpy()]
    chosen = packed.label.numpy()
    values = {
        "advantage": labels.advantage.numpy()[chosen],
        "sampler": labels.sampler_logprob.numpy()[chosen],
    }
    if learner is not None:
        values["learner"] = learner[chosen]
        values["difference"] = values["learner"] - values["sampler"]
    learned = {key: _means(place, value, len(packed)) for key, value in values.items()}
    return Row(name, kinds, packed.positions.numpy(), edges, learned)


def _means(place: NDArray[np.int64], values: Floats, size: int) -> Floats:
    """Mean of the known values at each place; NaN where there are none."""
    known = ~np.isnan(values)
    count = np.bincount(place[known], minlength=size).astype(np.float64)
    total = np.bincount(place[known], weights=values[known], minlength=size)
    return np.divide(total, count, out=np.full(size, np.nan), where=count > 0)


# ---- paint ----------------------------------------------------------------------------------------


def _paint(rows: list[Row], title: str, path: Path) -> None:
    # Matplotlib takes a second to load. Its own Figure, and not pyplot: this runs in a thread.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    known = [key for key in _MAPS if key in rows[0].learned]
    wide = len(rows) > WIDE
    names = ["kinds", "tree", *(known if wide else sorted(known, key=_ONE_COLUMN.index))]
    columns = 2 if wide else 1
    lines = -(-len(names) // columns)
    strip = min(9.0, max(0.6, 0.3 * len(rows)))
    heights = [strip] * lines if wide else [2.5 * strip if n == "tree" else strip for n in names]
    height = sum(heights) + 0.6 * lines + 0.75
    figure = Figure(figsize=(11 * columns + 2, height), dpi=130)
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(
        *(lines, columns),
        height_ratios=heights,
        hspace=0.6 * lines / sum(heights),
        wspace=0.19,
        left=1.1 / (11 * columns + 2),
        right=1 - 0.75 / (11 * columns + 2),
        top=1 - 0.8 / height,
        bottom=0.5 / height,
    )
    left = 0.2 / (11 * columns + 2)
    figure.suptitle(
        title, x=left, y=1 - 0.12 / height, ha="left", va="top", fontsize=12, color=_INK
    )
    width = max(len(row.kinds) for row in rows)
    for i, name in enumerate(names):
        axis = figure.add_subplot(grid[divmod(i, columns)])
        _style(axis, rows, width)
        if name in _MAPS:
            _paint_map(axis, name, rows, width)
        else:
            (_paint_kinds if name == "kinds" else _paint_tree)(axis, rows, width)
        if i >= len(names) - columns:
            axis.set_xlabel("place in the row", color=_INK, fontsize=9)
    figure.savefig(path, metadata={"Software": None}, facecolor="white")


def _style(axis: Any, rows: list[Row], width: int) -> None:
    axis.set_xlim(-0.5, width - 0.5)
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.set_facecolor(_PAPER)
    every = -(-len(rows) // 40)
    places = range(0, len(rows), every)
    axis.set_yticks(list(places), [rows[i].name for i in places])
    axis.tick_params(colors=_INK, labelsize=8, length=2)
    for side in axis.spines.values():
        side.set_color(_FAINT)
        side.set_linewidth(0.6)
    for i in range(1, len(rows) if len(rows) <= 60 else 0):
        axis.axhline(i - 0.5, color="white", linewidth=1.2, zorder=3)


def _title(axis: Any, text: str, note: str = "") -> None:
    axis.set_title(text, loc="left", fontsize=10, fontweight="bold", color=_INK, pad=5)
    if note:
        axis.set_title(note, loc="right", fontsize=8.5, color=_FAINT, pad=5)


def _paint_kinds(axis: Any, rows: list[Row], width: int) -> None:
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    image = _image([row.kinds for row in rows], width)
    colours = ListedColormap([colour for _, colour in KINDS])
    axis.imshow(image, aspect="auto", cmap=colours, vmin=-0.5, vmax=2.5, interpolation="none")
    _title(axis, "Tokens")
    axis.legend(
        handles=[Patch(color=colour, label=name) for name, colour in KINDS],
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        ncols=len(KINDS),
        frameon=False,
        fontsize=8.5,
        handlelength=1.0,
        columnspacing=1.2,
    )


def _paint_tree(axis: Any, rows: list[Row], width: int) -> None:
    """Depth over place: a path climbs, a branch starts at the depth of its parent."""
    from matplotlib.collections import LineCollection

    deepest = max(int(row.depth.max()) for row in rows) or 1
    kinds: list[list[Any]] = [[] for _ in KINDS]
    edges = []
    for i, row in enumerate(rows):
        height = i + 0.42 - 0.84 * row.depth / deepest
        points = np.stack([np.arange(len(height)), height], axis=1)
        begins = np.flatnonzero(np.diff(row.depth, prepend=-2) != 1)
        breaks = np.flatnonzero(np.diff(row.kinds)) + 1
        cuts = np.unique(np.concatenate([begins, breaks, [len(height)]]))
        for start, stop in pairwise(cuts):
            joined = start - 1 if start not in begins else start
            run = points[joined:stop]
            if len(run) == 1:  # a dot of its own
                run = run + np.array([[-0.4, 0.0], [0.4, 0.0]])
            kinds[int(row.kinds[start])].append(run)
        edges += [points[[parent, child]] for parent, child in row.edges]
    axis.add_collection(LineCollection(edges, colors=_FAINT, linewidths=0.6, zorder=4))
    for (_, colour), lines in zip(KINDS, kinds, strict=True):
        axis.add_collection(LineCollection(lines, colors=colour, linewidths=1.8, zorder=5))
    _title(axis, "Edges and depth", f"a path climbs, a branch goes back; up to {deepest + 1} deep")


_MAPS = {
    "advantage": ("Advantage", "of the tokens learned at each place", "RdBu"),
    "difference": ("Learner minus sampler", "0 where both computed alike", "PuOr"),
    "sampler": ("Log-probability, sampler", "when it was sampled", "viridis"),
    "learner": ("Log-probability, learner", "before training on it", "viridis"),
}
"""Title, note and colours, in the order of two columns."""
_ONE_COLUMN = ("advantage", "sampler", "learner", "difference")
"""The order of one column."""


def _paint_map(axis: Any, key: str, rows: list[Row], width: int) -> None:
    title, note, colours = _MAPS[key]
    bounds = _bounds(key, rows)
    if bounds is None:
        _title(axis, title, "unknown for every label")
        return
    image = _image([row.learned[key] for row in rows], width)
    drawn = axis.imshow(
        image, aspect="auto", cmap=colours, vmin=bounds[0], vmax=bounds[1], interpolation="none"
    )
    _title(axis, title, note)
    bar = axis.inset_axes((1.008, 0.0, 0.01, 1.0))
    axis.figure.colorbar(drawn, cax=bar).outline.set_visible(False)
    bar.tick_params(labelsize=7.5, colors=_INK, length=2)
    bar.locator_params(nbins=5)


def _bounds(key: str, rows: list[Row]) -> tuple[float, float] | None:
    """The colour scale: symmetric about 0, or one for both log-probabilities so they compare."""
    together = ("sampler", "learner") if key in ("sampler", "learner") else (key,)
    values = np.concatenate([row.learned[k] for row in rows for k in together if k in row.learned])
    values = values[np.isfinite(values)]
    if not len(values):
        return None
    if len(together) == 1:
        largest = max(float(np.abs(values).max()), 1e-6)
        return -largest, largest
    # One very unlikely token would make all others look the same.
    return min(float(np.percentile(values, 1)), -1e-6), 0.0


def _image(rows: list[Floats], width: int) -> Floats:
    image = np.full((len(rows), width), np.nan)
    for i, row in enumerate(rows):
        image[i, : len(row)] = row
    return image
