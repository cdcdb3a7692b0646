"""Trie attention on CUDA: FlexAttention with block masks made from a row's subtrees.

In:   a PackedRow
Out:  the row padded to one of a few lengths; one BlockMask per sliding window; `attention`, the function
      that transformers calls

A query q sees a key k if k <= q < leave[k]: the row is in depth-first order and leave[k] ends the
subtree of k. Masks of one kind share their code, and lengths come from a short list, so that a
compiled layer is reused for every later row. FlexAttention without a compiler would hold every pair
of a row in memory, so past the limit of recompilations torch must raise instead of falling back.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hone.learner.offload import to_device
from hone.learner.trie import PackedRow

BLOCK = 128
"""Size of a mask block in tokens, in both directions: the kernel's own granularity."""
RECOMPILES = 512
"""Maximum number of compiled versions of a layer: kinds x lengths x (2 x shapes of adapters + 1). With and
without an adapter, weights have room for it; before the first one, they have none.
A learner lives as long as its server and trains every model of its base model, each with a rank, alpha and
target_modules of its own. Versions that are not used cost nothing."""

BlockMasks = dict[int, Any]
"""BlockMask by window; FULL means no window. A plain dict, because compiled code reads it."""
FULL = 0


def configure_compiler() -> None:
    """Settings of torch's compiler for the layers, in the calling thread.

    Since torch 2.12 every thread has settings of its own, so every thread that runs a layer calls this.

    Reaching the limit of recompilations, which is raised, becomes an error. What is cheap to compute from
    other stored tensors is not stored for the backward pass: the product of gate and up, normalised
    inputs, keys and values of every head. By default torch stores whatever a matrix product reads. Small
    operations that do not depend on each other, such as casts of an adapter's factors, share a kernel: 3,470
    kernels instead of 4,300 for a row of Qwen2.5-3B.
    """
    import torch._dynamo.config as dynamo
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor

    if dynamo.fail_on_recompile_limit_hit and dynamo.recompile_limit >= RECOMPILES:
        return  # as set below
    dynamo.recompile_limit = max(dynamo.recompile_limit, RECOMPILES)
    dynamo.accumulated_recompile_limit = max(dynamo.accumulated_recompile_limit, 4 * RECOMPILES)
    dynamo.fail_on_recompile_limit_hit = True
    functorch.ban_recompute_materialized_backward = False
    inductor.combo_kernels = True


def trie_mask(leave: Tensor) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Whether a query sees a key, by their places in the row."""

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (q < leave[k])

    return visible


def windowed_trie_mask(
    leave: Tensor, depth: Tensor, window: Tensor
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """As trie_mask, for keys less than `window` levels above the query."""

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (q < leave[k]) & (depth[q] - depth[k] < window)

    return visible


def soft_cap(cap: float) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Gemma 2's soft cap on attention scores."""

    def capped(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return capped


def padded(row: PackedRow, length: int) -> PackedRow:
    """The row padded to `length`; padding goes before subtrees, so that they start at a block.

    A block with the end of one subtree and the start of another is computed for the queries of
    both. A padding token sees itself and the path around it; no other token sees it. The result
    has no segments.
    """
    starts = np.array([segment.start for segment in row.segments])
    lengths = np.diff(np.append(starts, len(row)))
    subtrees = row.leave.numpy()[starts] - starts
    spare, moved, shift = length - len(row), 0, np.zeros_like(starts)
    for i, (start, subtree) in enumerate(zip(starts, subtrees, strict=True)):
        gap = -(start + moved) % BLOCK
        if 2 * subtree > BLOCK and gap <= spare:
            moved, spare = moved + gap, spare - gap
        shift[i] = moved
    place = np.arange(len(row)) + np.repeat(shift, lengths)
    before = np.zeros(length, dtype=np.int64)  # the node at or before each place
    before[place] = np.arange(len(row))
    before = torch.from_numpy(np.maximum.accumulate(before))
    places = torch.from_numpy(place)
    token_ids, leave = torch.zeros(length, dtype=torch.int64), torch.arange(1, length + 1)
    token_ids[places] = row.token_ids
    # A subtree may end with its last block: padding that sees it costs nothing, and blocks stay full.
    ends = (places[row.leave - 1] // BLOCK + 1) * BLOCK
    following = torch.cat((places, torch.tensor([length])))[row.leave]
    leave[places] = torch.minimum(ends, following)
    return replace(
        row,
        token_ids=token_ids,
        positions=row.positions[before],
        leave=leave,
        segments=(),
        query_node=places[row.query_node],
    )


def block_mask(
    leave: Tensor, depth: Tensor, window: int | None, device: torch.device | str = "cpu"
) -> Any:
    """The BlockMask of a row whose length is a multiple of BLOCK.

    Made from each block's extremes: whether any pair is visible (or, with a window, may be) and whether
    all are. `create_block_mask` would compute every pair. Made on the CPU and then moved, because so many
    small operations take longer on a GPU.
    """
    from torch.nn.attention.flex_attention import BlockMask

    length = len(leave)
    assert length % BLOCK == 0, f"{length} tokens are not a multiple of {BLOCK}"
    blocks = leave.numpy().reshape(-1, BLOCK)
    start = np.arange(0, length, BLOCK)
    query, key = start[:, None], start[None, :]
    below = key < query
    some = (below & (blocks.max(1)[None, :] > query)) | (key == query)
    whole = below & (blocks.min(1)[None, :] >= query + BLOCK)
    if window is not None:
        depths = depth.numpy().reshape(-1, BLOCK)
        shallow, deep = depths.min(1), depths.max(1)
        some &= (shallow[:, None] - deep[None, :] < window) | (key == query)
        whole &= deep[:, None] - shallow[None, :] < window
    partial = some & ~whole
    kv_num_blocks, kv_indices = _ordered(partial, device)
    full_kv_num_blocks, full_kv_indices = _ordered(whole, device)
    q_num_blocks, q_indices = _ordered(partial.T, device)
    full_q_num_blocks, full_q_indices = _ordered(whole.T, device)
    # In 32 bits, because the kernels read them for every pair of a partial block.
    ends, levels = to_device(leave.int(), device), to_device(depth.int(), device)
    visible = (
        trie_mask(ends)
        if window is None
        else windowed_trie_mask(ends, levels, to_device(torch.tensor(window).int(), device))
    )
    return BlockMask(
        seq_lengths=(length, length),
        kv_num_blocks=kv_num_blocks,
        kv_indices=kv_indices,
        full_kv_num_blocks=full_kv_num_blocks,
        full_kv_indices=full_kv_indices,
        q_num_blocks=q_num_blocks,
        q_indices=q_indices,
        full_q_num_blocks=full_q_num_blocks,
        full_q_indices=full_q_indices,
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=visible,
    )


def _ordered(dense: NDArray[np.bool_], device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Per row of blocks, how many are true, and the indices of its blocks with these first."""
    count = torch.from_numpy(dense.sum(-1, dtype=np.int32))
    order = torch.from_numpy(np.argsort(~dense, axis=-1, kind="stable").astype(np.int32))
    return to_device(count[None, None], device), to_device(order[None, None], device)


def attention(
    module: nn.Module,
    query: Tensor,  # [1, heads, L, dim]
    key: Tensor,  # [1, kv_heads, L, dim]
    value: Tensor,  # [1, kv_heads, L, value_dim]
    attention_mask: Any,
    *,
    block_masks: BlockMasks,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in every attention layer."""
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    call = flex_attention if torch.compiler.is_compiling() else _compiled_flex_attention()
    options: dict[str, Any] = {
        "score_mod": None if softcap is None else soft_cap(softcap),
        "block_mask": block_masks[getattr(module, "trie_window", FULL)],
        "scale": scaling,
    }
    # With `enable_gqa` one program of the backward kernel would compute all heads of a group in turn:
    # 1.55 instead of 1.19 ms with 16 heads in 2 groups (H200, 8,192 tokens).
    if (heads := query.shape[1] // key.shape[1]) > 1:
        key, value = _Repeated.apply(key, heads), _Repeated.apply(value, heads)
    if s_aux is None:
        out = call(query, key, value, **options)
    else:
        out, aux = call(query, key, value, return_aux=AuxRequest(lse=True), **options)
        # A sink takes part in the sum of every query and has no value.
        assert aux.lse is not None
        out = out * torch.sigmoid(aux.lse - s_aux.float()[None, :, None])[..., None].to(out.dtype)
    return out.transpose(1, 2).contiguous(), None


class _Repeated(torch.autograd.Function):
    """repeat_interleave of heads [1, heads, L, dim].

    Its own backward pass is `sum` over a dimension in the middle, for which the compiler makes a kernel that
    reads at a fifth of the memory's speed.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, times: int) -> Tensor:
        ctx.times = times
        return x.repeat_interleave(times, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        wide = torch.promote_types(grad.dtype, torch.float32)
        first, *others = (part.to(wide) for part in grad.unflatten(1, (-1, ctx.times)).unbind(2))
        return sum(others, first).to(grad.dtype), None


_compiled: list[Any] = []


def _compiled_flex_attention() -> Any:
    """Compiled once; for layers that are not compiled themselves."""
    if not _compiled:
        from torch.nn.attention.flex_attention import flex_attention

        _compiled.append(torch.compile(flex_attention, dynamic=False))
    return _compiled[0]
