"""Ancestors-only attention against a dense mask, both implementations, forward and backward."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from hone.learner import attention
from hone.learner.attention import ancestors_attention
from hone.learner.samples import LabelledCall, Sample
from hone.learner.trie import PackedRow, pack

HEADS, KV, DIM = 6, 2, 8


def row_of(*paths: list[int]) -> PackedRow:
    calls = [
        LabelledCall(
            ids=np.array([*path, 0]), prompt=len(path), places=np.array([0]), logprobs=None,
            exact=True, temperature=1.0, advantage=1.0,
        )
        for path in paths
    ]  # fmt: skip
    (row,) = pack([Sample(0, 0, tuple(calls))], row_tokens=10**6).rows
    return row


ROWS = {
    "one path in several blocks": row_of(list(range(150))),
    "siblings": row_of([*range(60), 1, 2], [*range(60), 3, 4, 5], [*range(60), *range(100, 200)]),
    "unrelated trees": row_of([1, 2, 3], [4, 5, 6, 7], [4, 5, 8]),
    "a branch at every level": row_of(*([*range(n), 500, 501] for n in range(1, 12))),
}


def dense(row: PackedRow, window: int | None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    index = torch.arange(len(row))
    seen = (index[None, :] <= index[:, None]) & (index[:, None] < row.leave[None, :])
    if window is not None:
        seen &= row.positions[:, None] - row.positions[None, :] < window
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
    return out[0].transpose(0, 1).reshape(len(row), -1)


def inputs(length: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length)
    # As the decoder hands them over: slices of one fused tensor.
    fused = torch.randn(length, HEADS + 2 * KV, DIM, generator=generator).to(dtype)
    return [part.detach().requires_grad_() for part in fused.split((HEADS, KV, KV), 1)]


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("window", [None, 1, 5, 70])
@pytest.mark.parametrize("anywhere", [False, True])
def test_equals_a_dense_mask(name: str, window: int | None, anywhere: bool, monkeypatch):
    row = ROWS[name]
    if anywhere:  # the path of devices without the CPU's kernel, run here on the CPU
        scores = attention._Scores(None, None, None)
        monkeypatch.setattr(
            attention._OnCpu,
            "apply",
            lambda q, k, v, plan, _: attention._anywhere(q, k, v, plan, scores),
        )
    config: Any = SimpleNamespace(windows=(None, window))
    attend = ancestors_attention(row, config, dtype=torch.float64)
    ours, theirs = inputs(len(row), torch.float64), inputs(len(row), torch.float64)
    actual, expected = attend(1, *ours), dense(row, window, *theirs)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)
    direction = torch.randn(actual.shape, generator=torch.Generator().manual_seed(1)).double()
    actual.backward(direction)
    expected.backward(direction)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-9, atol=1e-11)


def test_in_float32_and_bfloat16():
    row = ROWS["siblings"]
    config: Any = SimpleNamespace(windows=(None,))
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 3e-2)):
        attend = ancestors_attention(row, config, dtype=dtype)
        tensors = inputs(len(row), dtype)
        wide = [t.detach().double() for t in tensors]
        expected = dense(row, None, *wide)
        actual = attend(0, *tensors).double()
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def test_two_runs_give_the_same_bits():
    row = ROWS["a branch at every level"]
    config: Any = SimpleNamespace(windows=(None,))
    results = []
    for _ in range(2):
        tensors = inputs(len(row), torch.float32)
        ancestors_attention(row, config)(0, *tensors).square().sum().backward()
        results.append([t.grad for t in tensors])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
