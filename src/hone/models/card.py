"""How the memory of one GPU is divided between vLLM and the learner.

In:   the GPU's memory, the model's bytes, the learner's estimate, the longest sequence
Out:  CardPlan: vLLM's share, the learner's share, and whether vLLM sleeps while the learner trains

The plan depends on these numbers alone, never on the memory that happens to be free: the learner's
share decides how long its rows are, and the same job must give the same bits.

With a fixed split both keep their memory, and nothing is moved between sampling and training. It is
used if vLLM then has a KV cache for SPLIT_SEQUENCES. Otherwise the two take turns with almost
the whole GPU: vLLM sleeps while the learner trains, and while vLLM samples the learner moves its
weights to host memory if there is no room for both.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hone.errors import ModelTooLarge
from hone.models.fit import FULL_SPEED, learner_bytes
from hone.models.shape import shape_of

CONTEXT = 10**9
"""CUDA context and kernels of the learner's process (0.72 GB with a 3B model, one H200), cuBLAS's workspaces,
and what torch's allocator cannot return between two jobs."""
OVERHEAD = 4 * 10**9
"""Memory that vLLM needs besides weights and KV cache: context, activations, CUDA graphs, adapters.
vLLM 0.20.2 had 1.9 GB with SmolLM2 and 2.2 to 2.9 GB with a 3B model (one H200)."""
ASLEEP = 4 * 10**9
"""Memory that vLLM keeps while asleep: context, CUDA graphs, workspaces. vLLM 0.20.2 kept 2.0 GB with a
3B model (one H200)."""
SPARE_SHARE = 0.02
"""Share of the GPU that is left free."""
MOST_SEQUENCES = 256
"""Sequences of full length in vLLM's usual batch; a larger KV cache gains nothing."""
SPLIT_SEQUENCES = 32
"""Sequences of full length that the KV cache of a fixed split must hold."""
ALONE = 0.92
"""vLLM 0.32's own gpu_memory_utilization, which it has on a GPU without the learner."""
SHORTEST = 256
"""Unit of the max_seq_length that a message proposes; shorter sequences are halved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a model needs on the GPU, in bytes."""

    weights: int
    """vLLM's copy of the base weights; the learner has its own."""
    kv_token: int
    """KV cache per token."""
    max_length: int
    """Tokens of the longest sequence."""
    learner: int
    """The learner while it trains rows at full speed, including its copy of the weights."""
    learner_fixed: int
    """The learner without a row: weights, adapter, optimizer."""

    def kv(self, sequences: int) -> int:
        """Bytes of the KV cache for `sequences` of full length."""
        return sequences * self.max_length * self.kv_token


def needs_of(
    config_json: Mapping[str, Any], *, dtype_bytes: int, rank: int, max_length: int, gpus: int = 1
) -> Needs:
    """What a model needs on one of the `gpus` that vLLM uses; the learner is on one of them."""
    shape = shape_of(config_json)
    kv_token = 2 * shape.layers * shape.kv_heads * shape.head_dim * dtype_bytes
    learner = {"dtype_bytes": dtype_bytes, "rank": rank}
    return Needs(
        weights=shape.parameters * dtype_bytes // gpus,
        kv_token=kv_token // gpus,
        max_length=max_length,
        learner=learner_bytes(config_json, FULL_SPEED, **learner),
        learner_fixed=learner_bytes(config_json, 0, **learner),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CardPlan:
    """Bytes of one GPU by use."""

    total: int
    weights: int
    """vLLM's weights."""
    kv: int
    """vLLM's KV cache."""
    learner: int
    """Maximum that the learner may use while it trains."""
    learner_idle: int
    """What the learner keeps while vLLM samples."""
    sleeps: bool
    """Whether vLLM sleeps while the learner trains."""

    @property
    def utilization(self) -> float:
        """vLLM's gpu_memory_utilization."""
        return (self.weights + OVERHEAD + self.kv) / self.total

    @property
    def offloads(self) -> bool:
        """Whether the learner's weights leave the GPU while vLLM samples."""
        return self.learner_idle <= CONTEXT

    @property
    def spare(self) -> int:
        """Free while vLLM samples."""
        return self.total - self.weights - OVERHEAD - self.kv - self.learner_idle

    def describe(self) -> str:
        """The plan in one line."""
        vllm = f"weights {gb(self.weights)}, KV cache {gb(self.kv)}, other {gb(OVERHEAD)}"
        vllm_then = "vLLM asleep" if self.sleeps else "vLLM as before"
        return (
            f"{gb(self.total)} GB of GPU memory; sampling: vLLM {self.utilization:.2f} ({vllm}), "
            f"learner {gb(self.learner_idle)}, spare {gb(self.spare)}; training: {vllm_then}, learner "
            f"{gb(self.learner)}"
        )


def plan_card(
    total: int,
    needs: Needs,
    *,
    utilization: float | None = None,
    sleep: bool | None = None,
    kv: int | None = None,
) -> CardPlan:
    """Divide a GPU of `total` bytes.

    `utilization` is the user's gpu_memory_utilization, which applies while vLLM samples, `kv` the
    user's kv_cache_memory_bytes. `sleep` False requests a fixed split, True sleep mode; None
    chooses. Raises ModelTooLarge with what would fit.
    """
    plan = _divided(total, needs, utilization, sleep, kv)
    # vLLM itself checks whether it fits into the user's share: it measures, this estimates.
    problem = _problem(plan, needs, planned=utilization is None)
    if problem is None:
        return plan
    advice = memory_advice(total, needs, utilization=utilization, sleep=sleep, kv=kv)
    raise ModelTooLarge(f"CUDA out of memory: {problem}.\n{advice}")


def _divided(
    total: int,
    needs: Needs,
    utilization: float | None,
    sleep: bool | None,
    users_kv: int | None = None,
) -> CardPlan:
    usable = total - int(SPARE_SHARE * total)
    beside = usable - needs.weights - OVERHEAD  # for the KV cache and the learner
    fixed = needs.learner_fixed + CONTEXT
    wanted = needs.kv(SPLIT_SEQUENCES) if users_kv is None else users_kv
    if utilization is not None:
        sleeps = sleep is not False
        kv = max(0, int(utilization * total) - needs.weights - OVERHEAD)
    else:
        beside_learner = beside - needs.learner - CONTEXT
        sleeps = beside_learner < wanted if sleep is None else sleep
        stays = beside - fixed >= wanted
        kv = beside - (fixed if stays else CONTEXT) if sleeps else max(beside_learner, needs.kv(1))
        kv = min(kv, needs.kv(MOST_SEQUENCES))
    if users_kv is not None:
        kv = users_kv
    left = total - needs.weights - OVERHEAD - kv
    learner = usable - ASLEEP if sleeps else min(left, beside - kv)
    learner_idle = (fixed if fixed <= left else CONTEXT) if sleeps else learner
    return CardPlan(
        total=total,
        weights=needs.weights,
        kv=kv,
        learner=learner,
        learner_idle=learner_idle,
        sleeps=sleeps,
    )


def _problem(plan: CardPlan, needs: Needs, *, planned: bool = True) -> str | None:
    """Why a plan does not work: no room for one sequence in vLLM, or for the learner's weights."""
    share = gb(plan.kv + plan.weights + OVERHEAD)
    if plan.kv <= 0 and planned:
        return f"{share} GB for vLLM do not hold its weights ({gb(plan.weights + OVERHEAD)} GB)"
    if plan.kv < needs.kv(1) and planned:
        return f"{share} GB for vLLM do not hold a sequence of {needs.max_length:,} tokens"
    if plan.utilization > 1 and planned:
        return f"vLLM with a KV cache of {gb(plan.kv)} GB needs {share} GB"
    fixed = needs.learner_fixed + CONTEXT
    if plan.learner < fixed:
        return f"{gb(plan.learner)} GB for the learner do not hold its weights ({gb(fixed)} GB)"
    return None


def memory_advice(
    total: int,
    needs: Needs,
    *,
    utilization: float | None = None,
    sleep: bool | None = None,
    kv: int | None = None,
    generations: int | None = None,
    tensor_parallel: int = 1,
    has_vllm: bool = True,
    has_learner: bool = True,
) -> str:
    """What to do when memory was exhausted: the four settings, with values that would fit.

    `utilization`, `sleep` and `kv` as for `plan_card`. Without `has_vllm` no vLLM of the server uses the
    GPU, and its settings are left out. Without `has_learner` vLLM has the GPU for itself.
    """
    fewer = _fewer(generations)
    if not has_vllm:
        return (
            f"What needs less memory: reduce max_seq_length to {next(_shorter(needs.max_length))}; "
            f"{fewer}; or choose a smaller base_model."
        )
    if not has_learner:
        needs = replace(needs, learner=0, learner_fixed=0)
        utilization, sleep = utilization or ALONE, False
    more = _more_gpus(total, needs, tensor_parallel, sleep)
    current = utilization or min(1.0, _divided(total, needs, None, sleep, kv).utilization)
    for length in _shorter(needs.max_length):
        shorter = replace(needs, max_length=length)
        planned = _divided(total, shorter, None, sleep)
        # Two digits: the share that holds one sequence is rounded up, the preferred one down.
        least = -(-100 * (needs.weights + OVERHEAD + shorter.kv(1)) // total)
        share = max(least, int(100 * min(planned.utilization, current - 0.1))) / 100
        plans = (planned, _divided(total, shorter, share, sleep))
        if all(_problem(plan, shorter) is None for plan in plans):
            left_out = "" if kv is None else "leave kv_cache_memory_bytes out; "
            return (
                f"What would fit on a GPU of {gb(total)} GB: {left_out}{_change(current, share)}; reduce "
                f"max_seq_length to {length}; {fewer}{more}."
            )
    return (
        f"This model does not fit on a GPU of {gb(total)} GB, whatever gpu_memory_utilization, "
        f"max_seq_length and num_generations are: choose a smaller base_model{more}."
    )


def foreign_advice(url: str, num_gpus: int) -> str:
    """What to do about the memory of a vLLM that the server did not start."""
    move = ", or set engine_args.trainer_gpu_ids to another GPU" if num_gpus > 1 else ""
    return (
        f"If the vLLM at {url} uses the learner's GPU, start it with a smaller "
        f"--gpu-memory-utilization{move}."
    )


def _fewer(generations: int | None) -> str:
    """Advice on num_generations; a group needs two to be compared."""
    if generations is None:  # without a job, the value is not known
        return "halve num_generations"
    if generations <= 2:
        return f"keep num_generations at {generations}"
    return f"reduce num_generations to {max(2, generations // 2)}"


def _change(current: float, share: float) -> str:
    """Advice on gpu_memory_utilization, which may be right already."""
    if round(100 * current) == round(100 * share):
        return f"keep gpu_memory_utilization at {share:.2f}"
    verb = "increase" if share > current else "reduce"
    return f"{verb} gpu_memory_utilization to {share:.2f}"


def _more_gpus(total: int, needs: Needs, tensor_parallel: int, sleep: bool | None) -> str:
    """Advice to divide vLLM among more GPUs; empty if the learner, which has one, is too large."""
    for times in (2, 4, 8):
        part = replace(needs, weights=needs.weights // times, kv_token=needs.kv_token // times)
        if _problem(_divided(total, part, None, sleep), part) is None:
            count = times * tensor_parallel
            return f"; or increase tensor_parallel_size to {count}, with as many GPUs"
    return ""


def _shorter(length: int) -> Iterator[int]:
    """Half of a length, a quarter, ..."""
    if length < 2 * SHORTEST:
        yield length // 2
    while (length := length // 2) >= SHORTEST:
        yield length // SHORTEST * SHORTEST


def gb(size: int) -> str:
    """Bytes as gigabytes (10**9), as text."""
    return f"{size / 10**9:.1f}"
