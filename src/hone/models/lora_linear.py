"""Frozen linear layers of a transformers model, with their parts of a LoRA adapter beside them.

In:   the linear layers of a model, by path
Out:  LoraLinear modules in their place; `attach` gives them an adapter's tensors

The factors stay float32 and are cast for the products: a step of 1e-6 would vanish in bfloat16. On a GPU,
where every product costs the CPU 0.1 ms before its kernel starts, layers that read the same input (query and
key; gate and up) are one product of the forward pass, and a copy of one factor is in the weights' tensor.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hone.models.lora import Layout, Lora

SIBLINGS = (("q_proj", "k_proj"), ("gate_proj", "up_proj"))
"""Layers of one module that read the same input. Not v_proj: values are stored for the backward pass
as they are, and as a part of a joint output they would keep the whole of it in memory."""

ALIGNED = 8
"""Rows of a weight begin at a multiple of so many numbers, which fast kernels of a GPU need."""

ROUTERS = frozenset(["gate", "router", "shared_expert_gate"])
"""Names of modules that choose experts, or weigh them."""


class LayerFactors(NamedTuple):
    """The adapter of one linear layer."""

    a: Tensor  # [parts * rank, inputs], shared by layers of one input
    b: Tensor  # [outputs, rank]
    first: int
    """The row of `a` where this layer's factor begins."""

    @property
    def own_a(self) -> Tensor:
        return self.a[self.first : self.first + self.b.shape[1]]


class LoraLinears(nn.Module):
    """Layers of one input: x W' + bias, plus scale (x A') B' for those that an adapter covers.

    In bfloat16 the first product is rounded before the second is added, as in vLLM, so parts of the second
    below half of the last digit are lost. A learner that kept them would have other log-probabilities.
    """

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        super().__init__()
        one, *others = linears
        self.wide = _stacked([linear.weight for linear in linears]) if others else one.weight
        """The weights, and the factors of an adapter that are multiplied together with them."""
        self.bias = one.bias
        if others and any(linear.bias is not None for linear in linears):
            self.bias = _stacked([_bias(linear) for linear in linears])
        self.outputs = [linear.out_features for linear in linears]
        self.inputs = one.in_features
        self.factors: list[LayerFactors | None] = [None] * len(linears)
        self.scale = 1.0
        self.joint = False
        """Whether all layers are computed at once. False inside a compiled checkpoint, where torch 2.11 would
        store what it should recompute."""
        self.tied = False
        """Whether other layers have the same weights (Zamba 2). They are then never computed at once with
        factors, because each layer has its own."""
        self._ranks = [0] * len(linears)
        """The factors that `wide` has room for."""
        self._input: Tensor | None = None
        self._results: dict[int, Tensor] = {}

    @property
    def weight(self) -> Tensor:
        return self.wide[: sum(self.outputs), : self.inputs]

    @property
    def beside(self) -> bool:
        """Whether B is beside the weights (or else A below them)."""
        return sum(self.outputs) >= self.inputs

    @torch.no_grad()
    def make_room(self) -> None:
        """Give `wide` the shape that the factors need."""
        ranks = [0 if factors is None else factors.b.shape[1] for factors in self.factors]
        if self.tied or ranks == self._ranks:
            return
        total = sum(ranks)
        below, beside = (0, -(-total // ALIGNED) * ALIGNED) if self.beside else (total, 0)
        self.wide.data = F.pad(self.weight, (0, beside, 0, below))
        self._ranks = ranks
        # Now, while nothing uses the memory of the old tensor: torch would put a smaller one into it, and
        # could not return the rest to the GPU.
        torch.cuda.empty_cache()

    def places(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The parts of `wide` that hold factors, and these."""
        first = self.inputs if self.beside else sum(self.outputs)
        for index, factors in enumerate(self.factors):
            if self.tied or factors is None:
                continue
            last = first + factors.b.shape[1]
            if self.beside:
                yield self.wide[self.rows(index), first:last], factors.b
            else:
                yield self.wide[first:last], factors.own_a
            first = last

    def rows(self, index: int) -> slice:
        """The rows of `weight` that belong to a layer."""
        first = sum(self.outputs[:index])
        return slice(first, first + self.outputs[index])

    def forward(self, x: Tensor, index: int) -> Tensor:
        """The output of one layer; with `joint`, those of the others are kept until they are asked for."""
        if self.tied or not self.joint:
            return self._alone(x, index)
        if len(self.outputs) == 1:
            return self._all(x)[0]
        if self._input is not x or index not in self._results:
            self._input, self._results = x, dict(enumerate(self._all(x)))
        result = self._results.pop(index)
        if not self._results:
            self._input = None
        return result

    def forget(self) -> None:
        """Drop the results that no layer asked for, with all that autograd keeps for them.

        Some models share keys between layers and skip k_proj; an exception skips it, too.
        """
        if self._results:
            self._input, self._results = None, {}

    def _alone(self, x: Tensor, index: int) -> Tensor:
        rows, factors = self.rows(index), self.factors[index]
        y = F.linear(x, self.weight[rows], None if self.bias is None else self.bias[rows])
        if factors is None:
            return y
        z, b = F.linear(x, factors.own_a.to(x.dtype)), factors.b.to(x.dtype) * self.scale
        return torch.addmm(y.flatten(0, -2), z.flatten(0, -2), b.t()).view_as(y)

    def _all(self, x: Tensor) -> Sequence[Tensor]:
        """The outputs of all layers."""
        adapted = [factors for factors in self.factors if factors is not None]
        if not adapted:
            return F.linear(x, self.weight, self.bias).split(self.outputs, -1)
        # The factor in `wide` is not scaled, so the other one is.
        of_a, of_b = (self.scale, 1.0) if self.beside else (1.0, self.scale)
        a = torch.cat([factors.own_a for factors in adapted]).to(x.dtype) * of_a
        b = [None if factors is None else factors.b.to(x.dtype) * of_b for factors in self.factors]
        return _OneProduct.apply(self.outputs, x, self.wide, self.bias, a, *b)


class LoraLinear(nn.Module):
    """One of the layers of a LoraLinears, in the place of a linear layer."""

    def __init__(self, layers: LoraLinears, index: int) -> None:
        super().__init__()
        self.layers, self.index = layers, index
        self.in_features, self.out_features = layers.inputs, layers.outputs[index]

    @property
    def weight(self) -> Tensor:  # some models read it
        return self.layers.weight[self.layers.rows(self.index)]

    @property
    def bias(self) -> Tensor | None:
        bias = self.layers.bias
        return None if bias is None else bias[self.layers.rows(self.index)]

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x, self.index)


class _OneProduct(torch.autograd.Function):
    """x W' + bias + (x A') B', with gradients of x, A and B.

    To add two products, the whole output is read and written once more, and for a narrow product a wide
    tensor is read again. So W has the columns of B beside it where the output is as wide as the input or
    wider, and the rows of A below it otherwise (z = x A', g: gradient of the output). What is left are
    x A' in the first case, and g B in the second:

        g [W, B]         is [g W, g B]
        x [W; A]'        is [x W', z]
        [g, g B] [W; A]  is the gradient of x
    """

    @staticmethod
    def forward(
        ctx: Any,
        outputs: list[int],
        x: Tensor,  # [..., inputs]
        wide: Tensor,  # [W, B] or [W; A]
        bias: Tensor | None,
        a: Tensor,  # [ranks, inputs]
        *b: Tensor | None,  # [outputs, rank] of each layer
    ) -> tuple[Tensor, ...]:
        if len(wide) == sum(outputs):
            y, z = F.linear(x, wide[:, : x.shape[-1]], bias), F.linear(x, a)
        else:
            padded = None if bias is None else F.pad(bias, (0, len(a)))
            y, z = F.linear(x, wide, padded).split((sum(outputs), len(a)), -1)
            z = z.contiguous()  # kept for the backward pass, without `y`
        y = _add_product(y, z, _block_diagonal(b, outputs, a))
        ctx.outputs = outputs
        ctx.save_for_backward(x, z, wide, a, *b)
        return y.split(outputs, -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, z, wide, a, *b = ctx.saved_tensors
        if len(wide) == sum(ctx.outputs):
            # One product per layer: to put the gradients beside each other, the compiler would compute
            # all of them for every place.
            rows = wide[:, : x.shape[-1] + len(a)].split(ctx.outputs)
            products: list[Tensor] = [grad @ own for grad, own in zip(grads, rows, strict=True)]
            grad_x, grad_z = sum(products[1:], products[0]).split((x.shape[-1], len(a)), -1)
            grad_x = grad_x + grad_z @ a
        else:
            grad = torch.cat(grads, -1)
            grad_z = grad @ _block_diagonal(b, ctx.outputs, a)
            grad_x = torch.cat((grad, grad_z), -1) @ wide
        grad_a = grad_z.flatten(0, -2).t() @ x.flatten(0, -2)
        ranks = [0 if part is None else part.shape[1] for part in b]
        grad_b = [
            grad.flatten(0, -2).t() @ own.flatten(0, -2) if own.shape[-1] else None
            for grad, own in zip(grads, z.split(ranks, -1), strict=True)
        ]
        return None, grad_x, None, None, grad_a, *grad_b


@torch.library.custom_op("hone::add_product", mutates_args=())
def _add_product(y: Tensor, z: Tensor, b: Tensor) -> Tensor:
    """y + z B'. The compiler does not look inside, so the sum is rounded before anything reads it."""
    rows, ranks = y.flatten(0, -2), z.flatten(0, -2)
    if y.is_cuda:
        from hone.models.lora_kernel import add_product  # here, because it needs Triton

        return add_product(rows, ranks, b).view(y.shape)
    return torch.addmm(rows, ranks, b.t()).view(y.shape)


@_add_product.register_fake
def _(y: Tensor, z: Tensor, b: Tensor) -> Tensor:
    return torch.empty(y.shape, dtype=y.dtype, device=y.device)


def _block_diagonal(b: Sequence[Tensor | None], outputs: Sequence[int], a: Tensor) -> Tensor:
    """B of all layers [sum of outputs, ranks]: each in the columns of its own A; zero in the others."""
    blocks, before = [], 0
    for part, rows in zip(b, outputs, strict=True):
        if part is None:
            blocks.append(a.new_zeros(rows, len(a)))
            continue
        after = before + part.shape[1]
        blocks.append(F.pad(part, (before, len(a) - after)))
        before = after
    return torch.cat(blocks)


class LoraModules:
    """The LoraLinears of one model."""

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        self._places: dict[str, tuple[LoraLinears, int]] = {}
        self._joint = False
        self._attached: Lora | None = None
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._versions: list[int] = []
        paths = [path for parts in layout.adapted.values() for path, _, _ in parts]
        for siblings in _siblings(paths):
            layers = LoraLinears([_linear(model, path) for path in siblings])
            for index, path in enumerate(siblings):
                self._places[path] = layers, index
                parent, _, name = path.rpartition(".")
                setattr(model.get_submodule(parent), name, LoraLinear(layers, index))
        self._all = lora_linears(model)
        uses = Counter[Tensor](p for m in model.modules() for p in m.parameters(recurse=False))
        for layers in self._all:
            layers.tied = uses[layers.wide] > 1

    def join(self) -> None:
        """Compute the layers of one input at once, with their factors, from the next `attach` on."""
        self._joint = True
        for layers in self._all:
            layers.joint = True

    @torch.no_grad()
    def attach(self, lora: Lora | None) -> None:
        """Use this adapter from now on, on the layers that it covers; None: the base model.

        Its tensors may change between two calls.
        """
        if lora is not self._attached:
            self._attached, self._copies, self._versions = None, [], []
            try:
                self._set_factors(lora)
                if self._joint and lora is not None:
                    for layers in self._all:
                        layers.make_room()
                    self._copies = [pair for layers in self._all for pair in layers.places()]
            except BaseException:
                self._set_factors(None)
                raise
            self._attached = lora
        versions = [source._version for _, source in self._copies]
        if versions != self._versions:
            places, factors = zip(*self._copies, strict=True)
            torch._foreach_copy_(places, factors)  # pyright: ignore[reportPrivateImportUsage]
            self._versions = versions

    def detach(self) -> None:
        """Use the base model, whose weights are stored by themselves again."""
        self.attach(None)
        for layers in self._all:
            layers.make_room()

    def _set_factors(self, lora: Lora | None) -> None:
        for layers, index in self._places.values():
            layers.factors[index] = None
        for key, parts in () if lora is None else lora.config.adapted.items():
            assert lora is not None
            a, b = lora.factors(key)
            for i, (path, _, _) in enumerate(parts):
                layers, index = self._places[path]
                layers.factors[index] = LayerFactors(a, b[i], i * lora.rank)
                layers.scale = lora.scale


def _siblings(paths: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """The paths in tuples: layers of one module that read the same input are together."""
    known, done = set(paths), set[str]()
    for path in paths:
        if path in done:
            continue
        name = path.rpartition(".")[2]
        names = next((names for names in SIBLINGS if name in names), (name,))
        beside = [path.removesuffix(name) + other for other in names]
        present = tuple(other for other in beside if other in known)
        done.update(present)
        yield present


def _linear(model: nn.Module, path: str) -> nn.Linear:
    module = model.get_submodule(path)
    assert isinstance(module, nn.Linear), f"{path} is a {type(module).__name__}"
    return module


def _stacked(tensors: Sequence[Tensor]) -> nn.Parameter:
    return nn.Parameter(torch.cat([tensor.detach() for tensor in tensors]), requires_grad=False)


def _bias(linear: nn.Linear) -> Tensor:
    return linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias


def lora_linears(model: nn.Module) -> tuple[LoraLinears, ...]:
    return tuple(module for module in model.modules() if isinstance(module, LoraLinears))


def linear_layers(model: nn.Module, decoder: nn.Module) -> Mapping[str, tuple[int, int]]:
    """Outputs and inputs of every linear layer that an adapter covers by default, by path.

    All of the model's decoder except the routers of experts: neither the language-model head nor a vision
    tower, through which no token of a text passes. Experts are no linear layers in transformers (one
    three-dimensional parameter holds them all), so they stay frozen.
    """
    covered = set(decoder.modules())
    return {
        path: (module.out_features, module.in_features)
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and _is_plain(module)
        if module in covered and not ROUTERS & set(path.split("."))
    }


def _is_plain(linear: nn.Linear) -> bool:
    """Whether the layer computes x W' + bias.

    DeepSeek V4 has a subclass of nn.Linear that does not; Falcon's does, in a forward of its own.
    """
    kind = type(linear)
    return kind.forward is nn.Linear.forward or kind.__name__ == "FalconLinear"


def expert_modules(model: nn.Module) -> list[nn.Module]:
    """Modules that hold the experts of a layer in one parameter; no adapter covers them."""
    return [
        module
        for path, module in model.named_modules()
        if "experts" in path and any(p.ndim == 3 for p in module.parameters(recurse=False))
    ]
