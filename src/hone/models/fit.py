"""Check whether a model fits: the memory it needs, the memory available, an error before loading.

In:   a config.json and the use of the model
Out:  Estimate in bytes; ModelTooLarge with needed and available, what to lower, what would fit

Without this check the kernel kills the process half an hour later, without a message. Estimates are
slightly high; `activations` agrees with a measured run (see models/shape.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from hone.errors import ModelTooLarge
from hone.models.files import ModelFiles
from hone.models.known import KNOWN
from hone.models.shape import shape_of

HEAD_ROWS = 1024
"""Number of positions whose logits are in memory at once; the learner's chunks are never larger."""

ADAPTER_BYTES = 28
"""Per LoRA weight, in float32: value, gradient, the two moments of AdamW, and the copies of value and
moments to which a failed job returns."""


LEARNER_SHARE = {"cpu": 1 / 3, "cuda": 1 / 2}
"""Share of a device's total memory for the learner's weights, adapter and one row. The rest is for the
engine, and on a CPU also for the agent, its tools and the page cache."""

MIN_ROW_TOKENS = 1024
"""Shortest default of `row_tokens`, on any machine."""

FULL_SPEED = 8192
"""Tokens of a row; longer rows are hardly faster on a GPU."""

SHORTEST_ROW = 512

COMPILED_SHARE, EXPERTS_SHARE = 0.505, 0.75
"""Shares of the activations that shape.activations counts: of compiled layers, and of layers with experts,
whose code is not compiled. Qwen2.5-3B, bf16, one row of 8,192 on one H200: 0.51 GB per layer, 0.14 GB with
its feed-forward part recomputed; a whole job 27.10 GB, with rank 64 30.22 GB."""

CUDA_LOGITS = 33 << 26
"""Logits of a chunk, their weights in the gradient, and what cuBLAS and the allocator hold (measured)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Bytes by use."""

    weights: int
    kv: int
    activations: int
    adapter: int

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.activations + self.adapter


def estimate(
    config_json: Mapping[str, Any],
    *,
    dtype_bytes: int,
    kv_tokens: int,
    train_row_tokens: int = 0,
    rank: int = 0,
) -> Estimate:
    """Memory for `kv_tokens` cached tokens and training rows of `train_row_tokens`.

    Zero rows and rank 0 estimate serving alone.
    """
    shape = shape_of(config_json)
    activations = train_row_tokens * shape.layers * shape.activations * dtype_bytes
    logits = 2 * 4 * shape.vocab * (min(train_row_tokens, HEAD_ROWS) or 64)
    return Estimate(
        weights=shape.parameters * dtype_bytes,
        kv=2 * shape.layers * shape.kv_heads * shape.head_dim * kv_tokens * dtype_bytes,
        activations=activations + logits,
        adapter=rank * shape.adapter_width * (ADAPTER_BYTES if train_row_tokens else 4),
    )


def row_tokens(
    config_json: Mapping[str, Any],
    *,
    dtype_bytes: int,
    rank: int,
    device: str,
    total: int | None = None,
    learner: int | None = None,
) -> int:
    """Tokens of the longest training row that fits into the learner's share of `device`.

    From the total memory, never from the free memory: the same job must give the same bits.
    `learner` replaces that share, in bytes. On CUDA layers are recomputed where a row of FULL_SPEED
    tokens would not fit otherwise.
    """
    kind = device.partition(":")[0]
    if learner is None:
        there = total_memory(device) if total is None else total
        learner = int(there * LEARNER_SHARE[kind])
    if kind == "cuda":
        plan = _CudaPlan.of(config_json, dtype_bytes=dtype_bytes, rank=rank)
        plain = plan.most_tokens(learner, Recomputation())
        recomputed = min(FULL_SPEED, plan.most_tokens(learner, Recomputation(layers=plan.layers)))
        return _shorter_length(max(plain, recomputed, MIN_ROW_TOKENS))

    def needed(tokens: int) -> int:
        return estimate(
            config_json, dtype_bytes=dtype_bytes, kv_tokens=0, train_row_tokens=tokens, rank=rank
        ).total

    least = needed(MIN_ROW_TOKENS)
    # From here on a row of twice as many tokens needs more activations and nothing else.
    each = (needed(2 * MIN_ROW_TOKENS) - least) // MIN_ROW_TOKENS
    spare = learner - least
    return MIN_ROW_TOKENS + max(0, spare // each)


@dataclass(frozen=True, slots=True)
class Recomputation:
    """Layers that are recomputed in the backward pass because their activations do not fit."""

    feed_forward: int = 0
    layers: int = 0
    """Layers that are recomputed whole; only their input is stored."""


def recomputation(
    config_json: Mapping[str, Any],
    *,
    tokens: int,
    dtype_bytes: int,
    rank: int,
    device: str,
    learner: int | None = None,
    feed_forward: bool = True,
) -> Recomputation:
    """The least recomputation that a CUDA row needs: feed-forward parts, then whole layers.

    Without `feed_forward`, only whole layers: the model cannot recompute the part in every layer.
    """
    if learner is None:
        learner = int(total_memory(device) * LEARNER_SHARE["cuda"])
    plan = _CudaPlan.of(config_json, dtype_bytes=dtype_bytes, rank=rank)
    all_layers = range(plan.layers + 1)
    choices = [Recomputation(feed_forward=n) for n in all_layers]
    if not (feed_forward and plan.feed_forward):
        choices = choices[:1]
    # Then whole layers, while the others still recompute their feed-forward parts.
    choices += [Recomputation(choices[-1].feed_forward, layers=n) for n in all_layers]
    return next((c for c in choices if plan.most_tokens(learner, c) >= tokens), choices[-1])


def learner_bytes(
    config_json: Mapping[str, Any], tokens: int, *, dtype_bytes: int, rank: int
) -> int:
    """Memory of the learner on CUDA with a row of `tokens`, without recomputation."""
    plan = _CudaPlan.of(config_json, dtype_bytes=dtype_bytes, rank=rank)
    row = CUDA_LOGITS + tokens * plan.layers * plan.activations if tokens else 0
    return plan.fixed + row


@dataclass(frozen=True, slots=True)
class _CudaPlan:
    """Bytes of a row on CUDA, with some of the layers recomputed."""

    layers: int
    fixed: int
    """Weights, adapter with its optimizer."""
    activations: int
    """Per token and layer, for the backward pass."""
    feed_forward: int
    """Of these, what the feed-forward part keeps."""
    passed: int
    """Per token and layer, if the layer is recomputed: its input."""

    @classmethod
    def of(cls, config_json: Mapping[str, Any], *, dtype_bytes: int, rank: int) -> "_CudaPlan":
        shape = shape_of(config_json)
        share = COMPILED_SHARE if shape.feed_forward else EXPERTS_SHARE
        activations = int(shape.activations * share)
        return cls(
            layers=shape.layers,
            # The factors that are in the tensors of the weights are copies.
            fixed=shape.parameters * dtype_bytes
            + rank * shape.adapter_width * (ADAPTER_BYTES + dtype_bytes),
            activations=activations * dtype_bytes,
            # Gate and up; their product is recomputed anyway.
            feed_forward=min(shape.feed_forward * 2 // 3, activations - shape.hidden) * dtype_bytes,
            passed=shape.hidden * dtype_bytes,
        )

    def most_tokens(self, memory: int, chosen: Recomputation) -> int:
        """The longest row that fits."""
        whole = self.layers - chosen.layers
        each = whole * self.activations + chosen.layers * self.passed
        each -= self.feed_forward * min(chosen.feed_forward, whole)
        spare = memory - self.fixed
        # The peak is either the logits of the head or, later, the recomputation of one layer.
        again = (
            self.activations if chosen.layers else self.feed_forward if chosen.feed_forward else 0
        )
        return max(0, min((spare - CUDA_LOGITS) // each, spare // (each + again)))


def padded_length(tokens: int) -> int:
    """The length to which a row of `tokens` is padded on CUDA: 512, 768, 1024, 1536, 2048, ...

    Layers are compiled for each length, so there must be few of them.
    """
    length = SHORTEST_ROW
    while length < tokens:
        length *= 2
    shorter = length * 3 // 4
    return shorter if tokens <= shorter and length > SHORTEST_ROW else length


def _shorter_length(tokens: int) -> int:
    """The longest padded length that is at most `tokens`."""
    return next(n for n in range(tokens, 0, -1) if n == SHORTEST_ROW or padded_length(n) == n)


def total_memory(device: str = "cpu") -> int:
    """Total bytes of `device`; on a CPU no more than the control group allows."""
    if device.startswith("cuda"):
        import torch

        return torch.cuda.get_device_properties(device).total_memory
    import psutil

    there, allowed = psutil.virtual_memory().total, cgroup_limit()
    return there if allowed is None else min(there, allowed)


def available_memory(device: str = "cpu") -> int:
    """Free bytes of `device`; on a CPU no more than the control group still allows."""
    if device.startswith("cuda"):
        import torch

        return torch.cuda.mem_get_info(device)[0]
    import psutil

    free = psutil.virtual_memory().available
    allowed = cgroup_available()
    return free if allowed is None else min(free, allowed)


CGROUPS, MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def cgroup_available(root: Path = CGROUPS, membership: Path = MEMBERSHIP) -> int | None:
    """Bytes left under the lowest limit above this process; None without a limit.

    Version 2 and the `memory` controller of version 1. Inactive file pages count as free,
    because the kernel reclaims them before it kills a process.
    """
    return min((left for _, left in _cgroup_limits(root, membership)), default=None)


def cgroup_limit(root: Path = CGROUPS, membership: Path = MEMBERSHIP) -> int | None:
    """The lowest limit above this process in bytes; None without a limit."""
    return min((limit for limit, _ in _cgroup_limits(root, membership)), default=None)


def _cgroup_limits(root: Path = CGROUPS, membership: Path = MEMBERSHIP) -> list[tuple[int, int]]:
    """Limit and remaining bytes of every limited control group above this process."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return []
    limits: list[tuple[int, int]] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = root, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base = root / "memory"
            names = (
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file",
            )
        else:
            continue
        relative = PurePosixPath(path.lstrip("/"))
        # A container often sees its own group as the root while /proc names the host's path; the
        # folders that do not exist here are skipped, the root itself is always looked at.
        for folder in [relative, *relative.parents]:
            limit = _cgroup(base / folder, *names)
            if limit is not None:
                limits.append(limit)
    return limits


def _cgroup(folder: Path, limit: str, usage: str, inactive: str) -> tuple[int, int] | None:
    try:
        most = int((folder / limit).read_text())
        used = int((folder / usage).read_text())
        stat = (folder / "memory.stat").read_text().split()
    except (OSError, ValueError):  # no such group, or its limit is the word "max"
        return None
    reclaimable = int(stat[stat.index(inactive) + 1]) if inactive in stat else 0
    return most, max(0, most - used + reclaimable)


def require_fit(
    files: ModelFiles,
    *,
    dtype_bytes: int = 4,
    kv_tokens: int = 8192,
    train_row_tokens: int = 0,
    rank: int = 0,
    device: str = "cpu",
    available: int | None = None,
) -> Estimate:
    """The estimate; raises ModelTooLarge if there is not enough memory."""
    wanted = {
        "dtype_bytes": dtype_bytes,
        "kv_tokens": kv_tokens,
        "train_row_tokens": train_row_tokens,
        "rank": rank,
    }
    needed = estimate(files.config, **wanted)
    there = available_memory(device) if available is None else available
    if needed.total <= there:
        return needed
    raise ModelTooLarge(
        f"{files.name} needs {gib(needed.total)} on {device} and {gib(there)} is free: weights "
        f"{gib(needed.weights)}, KV cache of {kv_tokens:,} tokens {gib(needed.kv)}, "
        f"activations {gib(needed.activations)}, adapter {gib(needed.adapter)}.\n"
        f"{_lower(needed, there, dtype_bytes)}{_alternative(files.name, there, wanted)}"
    )


def _lower(needed: Estimate, there: int, dtype_bytes: int) -> str:
    """What to lower, largest saving first."""
    if needed.weights >= there:
        half = dtype_bytes > 2 and needed.weights // 2 < there
        return "The weights alone do not fit" + (
            "; on a device with bf16 they would take half. " if half else ". "
        )
    parts = sorted(
        [(needed.kv, "the KV cache's tokens"), (needed.activations, "row_tokens")], reverse=True
    )
    return f"Lower {' or '.join(what for size, what in parts if size > 0)}. "


def _alternative(name: str, there: int, wanted: dict[str, int]) -> str:
    """The largest known model that fits."""
    fitting = [
        (shape_of(known.config).parameters, known.name)
        for known in KNOWN.values()
        if known.name != name and estimate(known.config, **wanted).total <= there
    ]
    if not fitting:
        return "No model hone knows would fit; free memory or use a larger machine."
    return f"{max(fitting)[1]} would fit."


def gib(size: int) -> str:
    """A size in MiB or GiB, as text."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
