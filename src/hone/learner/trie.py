"""Pack samples as one trie over token ids, cut into rows of limited length.

In:   Samples of one optimizer step
Out:  a Batch: PackedRows (what is computed) and Labels (what is trained)

All calls whose ids agree up to a node share it, so a shared prompt is computed once. Labels are stored
beside the trie and belong to calls: two calls that sampled the same token have two labels on one edge,
and a completion quoted in a later prompt is only context there. Nodes without a label below them are
left out; the last token of a call is one of them.

The layout depends only on the set of paths (they are sorted), not on their order.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hone.learner.samples import LabelledCall, Sample
from hone.wire.conversation import common_prefix

Ints = NDArray[np.int64]

ROW = 1024
"""Length up to which a row is filled with unrelated subtrees: longer rows are no faster on a CPU and
need more memory."""
KEEP_WHOLE = 8
"""A subtree that fits the budget is kept whole up to this multiple of the prefix that another row
would repeat: cutting a larger one costs less than an eighth."""
MASKED = -700.0
"""A lower log-probability is a mask's and not the model's: vLLM and OpenAI write minus infinity as
-9999. The learner's probability divided by it would overflow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """The M tokens that an optimizer step trains, in the order of the samples' calls."""

    target: Tensor  # [M] int64, the sampled id
    call: Tensor  # [M] int64, index over the labelled calls of the step
    rollout: Tensor  # [M] int64, index over the samples of the step
    sampler_logprob: Tensor  # [M] float64, NaN where unknown
    exact: Tensor  # [M] bool, whether sampler_logprob is known, of the unmasked distribution
    temperature: Tensor  # [M] float64
    advantage: Tensor  # [M] float64

    def __len__(self) -> int:
        return len(self.target)


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a row without branches; depths are positions in its path."""

    start: int
    stop: int
    depth: int
    ancestors: tuple[tuple[int, int], ...]
    """Row ranges (start, stop) of the path above, from the root down; neighbours are merged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRow:
    """L nodes in depth-first order, each after all of its ancestors; m of the labels."""

    token_ids: Tensor  # [L] int64
    positions: Tensor  # [L] int64, depth in the trie
    leave: Tensor  # [L] int64, end of the node's subtree: q sees k iff k <= q < leave[k]
    segments: tuple[Segment, ...]
    query_node: Tensor  # [Q] int64, row index; one query per distinct (parent, temperature)
    query_temperature: Tensor  # [Q] float64
    label: Tensor  # [m] int64, index into the step's Labels, ascending by query
    label_query: Tensor  # [m] int64, ascending

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One optimizer step: every label is in exactly one row."""

    rows: tuple[PackedRow, ...]
    labels: Labels
    logical_tokens: int
    """Tokens of all labelled calls, without sharing."""
    path_tokens: int
    """Of these, the tokens from which a label is predicted, and those before them."""

    @property
    def computed_tokens(self) -> int:
        return sum(len(row) for row in self.rows)

    @property
    def shared_tokens(self) -> int:
        return self.path_tokens - self.computed_tokens


@dataclass(frozen=True, slots=True)
class _Trie:
    token_ids: Ints  # [N], depth-first
    depth: Ints  # [N]
    starts: Ints  # [S], first node of each segment
    stops: Ints  # [S]
    parents: Ints  # [S], index of the segment above; -1 at a root


def pack(
    samples: Sequence[Sample], *, row_tokens: int, shared: bool = True, fill: bool = False
) -> Batch:
    """All calls of the samples as rows of at most `row_tokens`, or the longest path if longer.

    `fill` puts unrelated subtrees into one row up to that length. Without `shared`, every call is a
    separate row, for models in which a token's state depends on more than its ancestors.
    """
    calls = [call for sample in samples for call in sample.calls]
    # A path ends at the last label's parent; nothing below it is needed.
    paths = [call.ids[: call.prompt + call.places[-1]] for call in calls]
    labels = _labels(samples)
    temperature = labels.temperature.numpy()
    if shared:
        rows = _trie_rows(calls, paths, temperature, row_tokens, fill=fill)
    else:
        rows = _path_rows(calls, paths, temperature)
    return Batch(
        rows=rows,
        labels=labels,
        logical_tokens=sum(len(call.ids) for call in calls),
        path_tokens=sum(len(path) for path in paths),
    )


def _trie_rows(
    calls: Sequence[LabelledCall],
    paths: Sequence[Ints],
    temperature: NDArray[np.float64],
    row_tokens: int,
    *,
    fill: bool,
) -> tuple[PackedRow, ...]:
    trie, nodes = _build(paths)
    parent = np.concatenate([n[c.prompt + c.places - 1] for n, c in zip(nodes, calls, strict=True)])
    budget = max(row_tokens, int(trie.depth.max()) + 1)
    bins = _bins(trie, budget, least=budget if fill else ROW)
    return _rows(trie, bins, parent, temperature)


def _path_rows(
    calls: Sequence[LabelledCall], paths: Sequence[Ints], temperature: NDArray[np.float64]
) -> tuple[PackedRow, ...]:
    """One row per call, with the call's labels."""
    rows, first = [], 0
    for call, path in zip(calls, paths, strict=True):
        trie, _ = _build([path])
        label = np.arange(first, first + len(call.places))
        parent = call.prompt + call.places - 1
        rows.append(_row(trie, np.arange(1), label, parent, temperature[label]))
        first += len(label)
    return tuple(rows)


def _labels(samples: Sequence[Sample]) -> Labels:
    calls = [(r, call) for r, sample in enumerate(samples) for call in sample.calls]
    counts = np.array([len(call.places) for _, call in calls])
    known = np.array([call.logprobs is not None for _, call in calls])
    exact = known & np.array([call.exact for _, call in calls])

    def spread(values: Sequence[float] | NDArray[np.bool_]) -> Tensor:
        return torch.from_numpy(np.repeat(np.asarray(values), counts))

    def logprobs(call: LabelledCall) -> NDArray[np.float64]:
        if call.logprobs is None:
            return np.full(len(call.places), np.nan)
        return call.logprobs[call.places]

    sampler = torch.from_numpy(np.concatenate([logprobs(c) for _, c in calls]))
    return Labels(
        target=torch.from_numpy(np.concatenate([c.ids[c.prompt + c.places] for _, c in calls])),
        call=spread(range(len(calls))),
        rollout=spread([r for r, _ in calls]),
        sampler_logprob=sampler,
        exact=spread(exact) & (sampler > MASKED),
        temperature=spread([float(c.temperature) for _, c in calls]),
        advantage=spread([float(c.advantage) for _, c in calls]),
    )


def _build(paths: Sequence[Ints]) -> tuple[_Trie, list[Ints]]:
    """The trie, and for each path its nodes in order."""
    # Big-endian bytes compare as the ids do. In sorted order a path adds only the nodes after its
    # common prefix with the previous path, and the order of nodes is depth-first.
    order = sorted(range(len(paths)), key=lambda i: paths[i].astype(">u4").tobytes())
    nodes: list[Ints] = [paths[0]] * len(paths)
    tokens: list[Ints] = []
    depths: list[Ints] = []
    parent_of_run: list[tuple[int, int]] = []
    previous, above, count = paths[0][:0], paths[0][:0], 0
    for i in order:
        path = paths[i]
        shared = common_prefix(previous.data, path.data)
        fresh = len(path) - shared
        above = np.concatenate((above[:shared], np.arange(count, count + fresh)))
        if fresh:
            parent_of_run.append((count, above[shared - 1] if shared else -1))
            tokens.append(path[shared:])
            depths.append(np.arange(shared, len(path)))
        nodes[i], previous, count = above, path, count + fresh
    parents = np.arange(-1, count - 1)
    runs = np.array(parent_of_run, dtype=np.int64)
    parents[runs[:, 0]] = runs[:, 1]
    children = np.bincount(parents[parents >= 0], minlength=count)
    begins = (parents != np.arange(-1, count - 1)) | (parents < 0) | (children[parents] > 1)
    starts = np.flatnonzero(begins)
    segment_of = np.cumsum(begins) - 1
    above_start = parents[starts]
    trie = _Trie(
        token_ids=np.concatenate(tokens),
        depth=np.concatenate(depths),
        starts=starts,
        stops=np.append(starts[1:], count),
        parents=np.where(above_start < 0, -1, segment_of[above_start]),
    )
    return trie, nodes


@dataclass(slots=True)
class _Bin:
    """A row being filled: the path down to `tip`, and whole subtrees below that path."""

    tip: int
    used: int
    subtrees: list[int]


def _bins(trie: _Trie, budget: int, least: int) -> list[Ints]:
    """Segments of each row, ascending, ancestors included.

    A subtree that fits stays whole. One that does not is cut below its first segment: children that
    are cut themselves come first, in separate rows; the others go, first fit, into any row below
    that segment, since all of those repeat the same prefix.
    """
    lengths = (trie.stops - trie.starts).tolist()
    depth = trie.depth[trie.starts].tolist()
    parents = trie.parents.tolist()
    sizes, ends = list(lengths), list(range(1, len(lengths) + 1))
    children: list[list[int]] = [[] for _ in parents]
    cut: dict[int, list[_Bin]] = {}
    roots: list[int] = []

    def fitting(prefix: int) -> int:
        """Limit of a row that shares a prefix of this length with the next one."""
        return min(budget, max(least, KEEP_WHOLE * prefix))

    def fill(tip: int, used: int, below: list[int]) -> list[_Bin]:
        whole = [s for s in below if s not in cut]
        bins = [b for s in below for b in cut.pop(s, ())]
        for s in whole:
            target = next((b for b in bins if b.used + sizes[s] <= fitting(used)), None)
            if target is None:
                target = _Bin(tip, used, [])
                bins.append(target)
            target.subtrees.append(s)
            target.used += sizes[s]
        return bins

    for s in reversed(range(len(parents))):  # children come after their parents
        children[s].reverse()
        prefix = depth[s] + lengths[s]
        if children[s] and depth[s] + sizes[s] > fitting(prefix):
            cut[s] = fill(s, prefix, children[s])
        if (p := parents[s]) >= 0:
            sizes[p] += sizes[s]
            ends[p] = max(ends[p], ends[s])
            children[p].append(s)
        else:
            roots.append(s)
    rows = []
    for b in fill(-1, 0, roots[::-1]):
        segments = {i for s in b.subtrees for i in range(s, ends[s])}
        while b.tip >= 0:
            segments.add(b.tip)
            b.tip = parents[b.tip]
        rows.append(np.array(sorted(segments), dtype=np.int64))
    return rows


def _rows(
    trie: _Trie, bins: list[Ints], parent: Ints, temperature: NDArray[np.float64]
) -> tuple[PackedRow, ...]:
    """Build the rows; each label belongs to the first row that computes its parent."""
    order = np.argsort(parent, kind="stable")
    ordered = parent[order]
    first = np.searchsorted(ordered, trie.starts)
    last = np.searchsorted(ordered, trie.stops)
    labelled: set[int] = set()
    rows = []
    for segments in bins:
        fresh = [s for s in segments.tolist() if s not in labelled]
        labelled.update(fresh)
        label = np.concatenate([order[first[s] : last[s]] for s in fresh])
        rows.append(_row(trie, segments, label, parent[label], temperature[label]))
    return tuple(rows)


def _row(
    trie: _Trie, chosen: Ints, label: Ints, parent: Ints, temperature: NDArray[np.float64]
) -> PackedRow:
    lengths = (trie.stops - trie.starts)[chosen]
    stops = np.cumsum(lengths)
    starts = stops - lengths
    # Row index minus trie index is one number per segment.
    shift = starts - trie.starts[chosen]
    nodes = np.arange(int(stops[-1])) - np.repeat(shift, lengths)
    row_of = {s: i for i, s in enumerate(chosen.tolist())}
    segments: list[Segment] = []
    leave = stops.copy()
    above = [row_of.get(p, -1) for p in trie.parents[chosen].tolist()]
    for i, p in enumerate(above):
        ranges: tuple[tuple[int, int], ...] = ()
        if p >= 0:
            up = segments[p]
            ranges = _joined(up.ancestors, (up.start, up.stop))
        depth = int(trie.depth[trie.starts[chosen[i]]])
        segments.append(Segment(int(starts[i]), int(stops[i]), depth, ranges))
    for i in reversed(range(len(above))):
        if above[i] >= 0:
            leave[above[i]] = max(leave[above[i]], leave[i])
    node = parent + shift[np.searchsorted(trie.starts[chosen], parent, side="right") - 1]
    by_query = np.lexsort((label, temperature, node))
    node, temperature, label = node[by_query], temperature[by_query], label[by_query]
    opens = np.append(True, (np.diff(node) != 0) | (np.diff(temperature) != 0))
    return PackedRow(
        token_ids=torch.from_numpy(trie.token_ids[nodes]),
        positions=torch.from_numpy(trie.depth[nodes]),
        leave=torch.from_numpy(np.repeat(leave, lengths)),
        segments=tuple(segments),
        query_node=torch.from_numpy(node[opens]),
        query_temperature=torch.from_numpy(temperature[opens]),
        label=torch.from_numpy(label),
        label_query=torch.from_numpy(np.cumsum(opens) - 1),
    )


def _joined(
    ranges: tuple[tuple[int, int], ...], end: tuple[int, int]
) -> tuple[tuple[int, int], ...]:
    if ranges and ranges[-1][1] == end[0]:
        return (*ranges[:-1], (ranges[-1][0], end[1]))
    return (*ranges, end)
