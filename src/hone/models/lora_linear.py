"""A frozen linear layer of a transformers model, with its part of a LoRA adapter beside it.

In:   the linear layers of a model, by path
Out:  LoraLinear modules in their place; `attach` gives them an adapter's tensors

The factors stay float32 and are cast in the forward pass: a step of 1e-6 would vanish in bfloat16.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hone.models.lora import Layout, Lora

LONG = 2048
"""Row length from which a copy of a layer's weights costs less than another pass over its
output."""


class LoraLinear(nn.Module):
    """x W' + bias, plus scale (x A') B' while an adapter is attached."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.weight = base.weight
        self.bias = base.bias
        self.in_features, self.out_features = base.in_features, base.out_features
        self.a: Tensor | None = None  # [parts * rank, inputs], shared by layers of one input
        self.b: Tensor | None = None  # [outputs, rank]
        self.first = 0
        """The row of `a` where this layer's factor begins."""
        self.scale = 1.0
        self.one_product = False
        """Whether long rows use _OneProduct. Not inside a compiled checkpoint: torch 2.11 keeps there what
        it should recompute."""

    def forward(self, x: Tensor) -> Tensor:
        if self.a is None or self.b is None:
            return F.linear(x, self.weight, self.bias)
        a = self.a[self.first : self.first + self.b.shape[1]].to(x.dtype)
        b = self.b.to(x.dtype)
        if self.one_product and x.numel() >= LONG * self.in_features:
            return _OneProduct.apply(x, self.weight, self.bias, a, b * self.scale)
        return F.linear(x, self.weight, self.bias) + F.linear(F.linear(x, a), b) * self.scale


class _OneProduct(torch.autograd.Function):
    """x W' + bias + (x A') B', with gradients of x, A and B.

    To add two products, the whole output is written and read once more. Where the output is wider than
    the input, [x, x A'] [W, B]' gives the sum in one product; where the input is wider, its gradient is
    computed in that way. The sum is then also rounded only once.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,  # [..., inputs]
        weight: Tensor,  # [outputs, inputs]
        bias: Tensor | None,
        a: Tensor,  # [rank, inputs]
        b: Tensor,  # [outputs, rank]
    ) -> Tensor:
        z = F.linear(x, a)
        ctx.save_for_backward(x, z, weight, a, b)
        outputs, inputs = weight.shape
        if outputs > inputs:
            return F.linear(torch.cat((x, z), -1), torch.cat((weight, b), 1), bias)
        return F.linear(x, weight, bias) + F.linear(z, b)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, z, weight, a, b = ctx.saved_tensors
        grad_z = grad @ b
        outputs, inputs = weight.shape
        if inputs > outputs:
            grad_x = torch.cat((grad, grad_z), -1) @ torch.cat((weight, a))
        else:
            grad_x = grad @ weight + grad_z @ a
        grad_a = grad_z.flatten(0, -2).t() @ x.flatten(0, -2)
        grad_b = grad.flatten(0, -2).t() @ z.flatten(0, -2)
        return grad_x, None, None, grad_a, grad_b


class LoraModules:
    """The LoraLinear modules of one model."""

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        self._modules: dict[str, LoraLinear] = {}
        self._attached: Lora | None = None
        for path, _, _ in (part for parts in layout.adapted.values() for part in parts):
            parent, _, name = path.rpartition(".")
            base = model.get_submodule(path)
            assert isinstance(base, nn.Linear), f"{path} is a {type(base).__name__}"
            self._modules[path] = LoraLinear(base)
            setattr(model.get_submodule(parent), name, self._modules[path])

    def attach(self, lora: Lora | None) -> None:
        """Use this adapter from now on, on the layers that it covers; None: the base model."""
        if lora is self._attached:
            return
        for module in self._modules.values():
            module.a = module.b = None
        for key, parts in () if lora is None else lora.config.adapted.items():
            assert lora is not None
            a, b = lora.factors(key)
            for i, (path, _, _) in enumerate(parts):
                module = self._modules[path]
                module.a, module.b = a, b[i]
                module.first, module.scale = i * lora.rank, lora.scale
        self._attached = lora


def lora_linears(model: nn.Module) -> tuple[LoraLinear, ...]:
    return tuple(module for module in model.modules() if isinstance(module, LoraLinear))


def linear_layers(model: nn.Module, decoder: nn.Module) -> Mapping[str, tuple[int, int]]:
    """Outputs and inputs of every linear layer that an adapter covers by default, by path.

    All of the model's decoder but the routers of experts: not the language-model head, and no vision
    tower, through which no token of a text passes. Experts are no linear layers in
    transformers (one three-dimensional parameter holds them all), so they stay frozen.
    """
    covered = set(decoder.modules())
    return {
        path: (module.out_features, module.in_features)
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and module in covered and not _routes(path)
    }


def _routes(path: str) -> bool:
    return path.rpartition(".")[2] in ("gate", "router", "shared_expert_gate")


def expert_modules(model: nn.Module) -> list[nn.Module]:
    """Modules that hold the experts of a layer in one parameter; no adapter covers them."""
    return [
        module
        for path, module in model.named_modules()
        if "experts" in path and any(p.ndim == 3 for p in module.parameters(recurse=False))
    ]
