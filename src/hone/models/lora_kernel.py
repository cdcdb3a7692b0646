"""y + z B' on a GPU, in one pass over y.

In:   y [rows, outputs], the rounded output of a frozen linear layer; z [rows, ranks]; B [outputs, ranks]
Out:  their sum, rounded once more

`torch.addmm` first copies y, and torch's compiler would not round the sum. Strides are read at every call:
the compiler pads rows, so that those seen while tracing may be others.
"""

import torch
import triton  # pyright: ignore[reportMissingImports]  # comes with torch for CUDA
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

ROWS, COLUMNS = 64, 128
"""What one program computes."""
FEWEST, MOST = 16, 64
"""Columns of z that a program multiplies at once; tensor cores need 16."""


def add_product(y: Tensor, z: Tensor, b: Tensor) -> Tensor:
    """The rows of `y` may be parts of wider ones."""
    y = y if y.stride(1) == 1 else y.contiguous()
    (rows, outputs), ranks = y.shape, b.shape[1]
    total = torch.empty(rows, outputs, dtype=y.dtype, device=y.device)
    grid = (-(-rows // ROWS), -(-outputs // COLUMNS))
    step = min(max(FEWEST, 1 << (ranks - 1).bit_length()), MOST)
    with torch.cuda.device(y.device):
        _add_product[grid](  # pyright: ignore[reportIndexIssue]
            total,
            y,
            z.contiguous(),
            b.contiguous(),
            rows,
            outputs,
            ranks,
            y.stride(0),
            ROWS=ROWS,
            COLUMNS=COLUMNS,
            STEP=step,
        )
    return total


@triton.jit
def _add_product(
    total,
    y,
    z,
    b,
    rows,
    outputs,
    ranks,
    stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    inside = (row < rows) & (column < outputs)
    wide = row.to(tl.int64)
    sums = tl.load(y + wide * stride + column, mask=inside, other=0.0).to(tl.float32)
    for first in range(0, ranks, STEP):
        rank = first + tl.arange(0, STEP)
        left = tl.load(
            z + wide * ranks + rank[None, :], mask=(row < rows) & (rank[None, :] < ranks), other=0.0
        )
        right = tl.load(
            b + column * ranks + rank[:, None],
            mask=(column < outputs) & (rank[:, None] < ranks),
            other=0.0,
        )
        sums = tl.dot(left, right, sums, input_precision="ieee")
    tl.store(total + wide * outputs + column, sums.to(total.dtype.element_ty), mask=inside)
