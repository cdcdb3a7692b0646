"""Linear layers with LoRA, RMS norm and SwiGLU over frozen weights, for inference and training.

In:   activations [N, features]
Out:  activations; `Projection.differentiable` also has gradients of activations and adapters

The caller chooses between inference and training by the method it calls, never by grad mode: the
learner's passes must run the same kernels with and without gradients. Autograd's own graph would
keep two to three times the activations, because it does not know that the base weights never need
a gradient. Each backward here is written out and keeps only what it reads.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from hone.models.lora import Lora

COARSE = (torch.bfloat16, torch.float16)
SLICE = 8192
"""Rows of a vocabulary converted to float32 at a time, on a CPU."""


@dataclass(frozen=True, slots=True)
class Projection:
    """Linear layers that read the same input, as one frozen matrix; adapters are added to it."""

    key: str
    weight: Tensor  # [inputs, outputs]
    bias: Tensor | None  # [outputs]
    sizes: tuple[int, ...]
    packed: Tensor | None = None
    """The same matrix in oneDNN's layout, which inference multiplies by instead."""

    def __call__(self, x: Tensor, adapters: Sequence[tuple[int, int, Lora]]) -> Tensor:
        """For inference: several adapters, each on its own rows; no gradients."""
        if self.packed is None:
            y = _linear(x, self.weight, self.bias)
        else:
            y = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        for start, stop, lora in adapters:
            a, b = lora.fused(self.key, y.dtype)
            y[start:stop].addmm_(x[start:stop] @ a, b, alpha=lora.scale)
        return y

    def differentiable(self, x: Tensor, lora: Lora | None) -> Tensor:
        """For training: one adapter on all rows, or none; gradients of x and of the adapter."""
        if lora is None:
            return _linear(x, self.weight, self.bias)
        a, b = lora.factors(self.key)
        return _LoraLinear.apply(x, self.weight, self.bias, lora.scale, a, *b)

    def pack(self) -> "Projection":
        """A copy with the packed matrix."""
        return replace(self, packed=packed(self.weight.t().contiguous()))

    def merged(self, lora: Lora, norm: Tensor | None = None) -> "Projection":
        """A copy for inference with this adapter merged into the matrix.

        `norm`, the weight [inputs] of the norm before it, is merged too.
        """
        a, b = lora.fused(self.key, self.weight.dtype)
        rows = torch.addmm(self.weight.t(), b.t(), a.t(), alpha=lora.scale)  # [outputs, inputs]
        if norm is not None:
            rows *= norm
        if self.packed is None:
            return replace(self, weight=rows.t())
        return replace(self, packed=packed(rows))


def packed(rows: Tensor) -> Tensor:
    """A matrix [outputs, inputs] in oneDNN's packed layout."""
    return torch.ops.mkldnn._reorder_linear_weight(rows, None)


def wide_product(x: Tensor, y: Tensor) -> Tensor:
    """x @ y in float32 or wider; products of bfloat16 are not rounded to bfloat16.

    Takes [n, k] and [k, m], or the same under equal leading axes.
    """
    if x.dtype not in COARSE:
        return x @ y
    if not x.is_cuda:  # CPUs have no such product; in slices, to avoid a full wide copy of y
        slices = [x.float() @ part.float() for part in y.split(SLICE, -1)]
        return slices[0] if len(slices) == 1 else torch.cat(slices, -1)
    if x.ndim == 2:
        return torch.mm(x, y, out_dtype=torch.float32)
    product = torch.bmm(x.flatten(0, -3), y.flatten(0, -3), out_dtype=torch.float32)
    return product.unflatten(0, x.shape[:-2])


def wide_combination(x: Tensor, rows: Tensor) -> Tensor:
    """x @ rows [m, k] for wide x [n, m], exact to float32's digits also where rows are bfloat16."""
    if rows.dtype not in COARSE:
        return x @ rows
    if x.is_cuda:  # as two products of 8 bits each, because the fast units take bfloat16 alone
        high = x.to(rows.dtype)
        low = (x - high).to(rows.dtype)
        return wide_product(high, rows).add_(wide_product(low, rows))
    total = x.new_zeros(len(x), rows.shape[1])
    for weights, part in zip(x.split(SLICE, 1), rows.split(SLICE), strict=True):
        total.addmm_(weights, part.float())
    return total


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x @ weight if bias is None else torch.addmm(bias, x, weight)


class _LoraLinear(torch.autograd.Function):
    """x W + bias + scale (x A') B', where B is one block per part of the fused W."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        scale: float,
        a: Tensor,
        *b: Tensor,
    ) -> Tensor:
        a, b = a.to(x.dtype), tuple(part.to(x.dtype) for part in b)
        rank = b[0].shape[1]
        y = _linear(x, weight, bias)
        z = F.linear(x, a)
        column = 0
        for i, part in enumerate(b):
            y[:, column : column + len(part)].addmm_(
                z[:, i * rank : (i + 1) * rank], part.t(), alpha=scale
            )
            column += len(part)
        ctx.save_for_backward(x, weight, z, a, *b)
        ctx.scale = scale
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, z, a, *b = ctx.saved_tensors
        rank = b[0].shape[1]
        grad_z, grad_b, column = torch.empty_like(z), [], 0
        for i, part in enumerate(b):
            g, rows = grad[:, column : column + len(part)], slice(i * rank, (i + 1) * rank)
            torch.mul(g @ part, ctx.scale, out=grad_z[:, rows])
            grad_b.append((g.t() @ z[:, rows]).mul_(ctx.scale))
            column += len(part)
        grad_x = torch.addmm(grad @ weight.t(), grad_z, a) if ctx.needs_input_grad[0] else None
        return (grad_x, None, None, None, grad_z.t() @ x, *grad_b)


class _RmsNorm(torch.autograd.Function):
    """x / rms(x) * weight, keeping nothing but x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return rms_norm(x.detach(), weight, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        wide = x.float() if x.dtype in COARSE else x
        inverse = wide.square().mean(-1, keepdim=True).add_(ctx.eps).rsqrt_()
        normed = wide * inverse
        grad = grad.to(wide.dtype) * weight  # wide: most of it may cancel below
        dot = (grad * normed).mean(-1, keepdim=True)
        return (grad - normed.mul_(dot)).mul_(inverse).to(x.dtype), None, None


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x divided by its root mean square, and multiplied by the weight if there is one."""
    if x.requires_grad and weight is not None:
        return _RmsNorm.apply(x, weight, eps)
    if x.is_cuda or x.dtype in COARSE:
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    # On a CPU torch's own makes eight passes over x; this makes three.
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    normed = x * length.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return normed if weight is None else normed.mul_(weight)


class _SwiGlu(torch.autograd.Function):
    """silu(gate) * up of one matrix that holds both, recomputed in the backward."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return swiglu(gate_up.detach())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, -1)
        sigmoid = gate.sigmoid()
        silu = gate * sigmoid
        out = torch.empty_like(gate_up)
        grad_gate, grad_up = out.chunk(2, -1)
        torch.mul(grad, silu, out=grad_up)
        # d silu = sigmoid + silu (1 - sigmoid)
        torch.mul(
            torch.addcmul(sigmoid + silu, silu, sigmoid, value=-1).mul_(up), grad, out=grad_gate
        )
        return out


def swiglu(gate_up: Tensor) -> Tensor:
    """silu of the first half of the columns, times the second half."""
    if gate_up.requires_grad:
        return _SwiGlu.apply(gate_up)
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)
