"""A transformers model as the learner's body: every family, on CUDA and on a CPU.

In:   an HF directory
Out:  TransformersBody: hidden states of packed rows under the trie's attention

The trie enters the model through its attention function and its positions (depth in the trie);
nothing else in the model changes. model_properties.py checks what the model does besides attention.
A model in which a token's state depends on more than its ancestors (linear attention, state spaces,
rotary angles that depend on the length) is computed path by path.
"""

import json
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hone.errors import ModelUnsupported
from hone.learner import flex
from hone.learner.attention import SegmentAttention
from hone.learner.model_properties import inspect_model
from hone.learner.offload import HostWeights, free_cached, to_device
from hone.learner.trie import PackedRow
from hone.models import fit
from hone.models.lora import Layout, Lora
from hone.models.lora_linear import LoraModules, expert_modules, lora_linears
from hone.models.shape import adapted_linears, restricted

SEGMENTS, FLEX = "hone_segments", "hone_flex"
"""Names under which the attention functions are registered with transformers."""
FEED_FORWARD = frozenset(["up_proj", "gate_up_proj"])
"""Linear layers that only the feed-forward part has."""


class TransformersBody:
    """A frozen transformers model with LoRA modules beside its linear layers."""

    def __init__(
        self,
        model: Any,
        *,
        raw: Mapping[str, Any],
        memory: int | None = None,
        attention: str | None = None,
        compile_options: Mapping[str, Any] | None = None,
    ) -> None:
        """`memory` replaces the learner's share of the device, in bytes.

        `attention` (SEGMENTS or FLEX) and `compile_options` are for tests and benchmarks.
        """
        self.model = model.eval().requires_grad_(False)
        self.device: torch.device = model.device
        self._raw = raw
        self._memory = memory
        self._text = model.config.get_text_config()
        self._stack: nn.Module = model.get_decoder()
        self._embedding: nn.Module = model.get_input_embeddings()
        _register()
        properties = inspect_model(model, self._stack)
        self.head, self.unshared = properties.head, properties.unshared
        self.windows = tuple(sorted({window for _, window in properties.windows}))
        for module, window in properties.windows:
            module.trie_window = window  # pyright: ignore[reportArgumentType]
        experts = expert_modules(model)
        self._frozen_experts = sum(p.numel() for module in experts for p in module.parameters())
        self.layout: Layout = adapted_linears(raw, model)
        self._lora = LoraModules(model, self.layout)
        free_cached(self.device)  # the memory of weights that were joined
        self._weights = HostWeights(model, self.device)
        self._layers = _wrap_layers(self._stack, self._text.num_hidden_layers)
        self._feed_forward = [_wrap_feed_forward(layer.part) for layer in self._layers]
        self._rank = 0
        self._recomputation: dict[tuple[int, int], fit.Recomputation] = {}  # by length and rank
        self._flex = (attention or (FLEX if self.device.type == "cuda" else SEGMENTS)) == FLEX
        model.set_attn_implementation(FLEX if self._flex else SEGMENTS)
        if self._flex:
            self._lora.join()
            for module in experts:
                # Which experts run depends on the tokens, so their code is not compiled.
                module.forward = torch.compiler.disable(module.forward)
            for layer in self._layers:
                layer.compiled = True
                layer.part.compile(**({"dynamic": False} | dict(compile_options or {})))
        self._embedding.register_forward_hook(_needs_gradient)

    @classmethod
    def load(
        cls,
        directory: Path,
        *,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        memory: int | None = None,
    ) -> "TransformersBody":
        """Load an HF directory."""
        from transformers import AutoModelForCausalLM

        raw = json.loads((directory / "config.json").read_text())
        model: Any = AutoModelForCausalLM.from_pretrained(
            directory, dtype=dtype, local_files_only=True, attn_implementation="eager"
        )
        return cls(model.to(device), raw=raw, memory=memory)

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def vocab(self) -> int:
        return self._text.vocab_size

    @property
    def max_positions(self) -> int:
        return self._text.max_position_embeddings

    @property
    def fills_rows(self) -> bool:
        return self._flex

    @property
    def notes(self) -> tuple[str, ...]:
        """What is unusual about training this model, for the log."""
        notes = []
        if self.unshared:
            notes.append(f"every path is computed by itself: {self.unshared}")
        if self._frozen_experts:
            notes.append(
                f"the experts ({self._frozen_experts:,} parameters) stay frozen; the adapter covers "
                "attention and shared layers"
            )
        return tuple(notes)

    def row_tokens(self, rank: int) -> int:
        return fit.row_tokens(
            self._raw,
            dtype_bytes=self.dtype.itemsize,
            rank=rank,
            device=str(self.device),
            learner=self._memory,
        )

    def release(self, *, weights: bool) -> None:
        if weights:
            self._lora.detach()
            self._weights.release()
        free_cached(self.device)

    def restore(self, rank: int) -> None:
        self._weights.restore()
        self._rank = rank

    def layout_of(self, target_modules: Collection[str]) -> Layout:
        return restricted(self.layout, target_modules)

    def arranged(self, row: PackedRow, like: int = 0) -> PackedRow:
        length = fit.padded_length(max(len(row), like))
        return flex.padded(row, length) if self._flex else row

    def hidden(self, row: PackedRow, lora: Lora | None) -> Tensor:
        self._lora.attach(lora)
        # A pass without gradients runs the same compiled code and drops what the backward pass would
        # need, so its log-probabilities differ only by the weights.
        scoring = not torch.is_grad_enabled()
        if lora is not None:
            self._rank = lora.rank
        plan, count = self.recomputation(row), len(self._layers)
        for index, layer in enumerate(self._layers):
            layer.recompute = scoring or _is_among(index, plan.layers, count)
            for part in self._feed_forward[index]:
                part.recompute = _is_among(index, plan.feed_forward, count)
                for linears in part.linears:
                    linears.joint = self._flex and not part.recompute
        with torch.enable_grad():
            hidden = self._forward(row)
        return hidden.detach() if scoring else hidden

    def _forward(self, row: PackedRow) -> Tensor:
        device = self.device
        token_ids, positions = (to_device(x, device) for x in (row.token_ids, row.positions))
        if self._flex:
            masks = {
                w: flex.block_mask(row.leave, row.positions, w or None, device)
                for w in self.windows
            }
            trie: dict[str, Any] = {"block_masks": masks}
        else:
            trie = {"segments": SegmentAttention(row, device, self.dtype)}
        out = self._stack(
            input_ids=token_ids[None], position_ids=positions[None], use_cache=False, **trie
        )
        return out.last_hidden_state[0]

    def recomputation(self, row: PackedRow) -> fit.Recomputation:
        """What must be recomputed for a row to fit into memory; the same for every pass of a job."""
        if self.device.type != "cuda":
            return fit.Recomputation()
        key = len(row), self._rank
        if key not in self._recomputation:
            self._recomputation[key] = fit.recomputation(
                self._raw,
                tokens=len(row),
                dtype_bytes=self.dtype.itemsize,
                rank=self._rank,
                device=str(self.device),
                learner=self._memory,
                feed_forward=all(self._feed_forward),
            )
        return self._recomputation[key]


class _Recomputed(nn.Module):
    """A part of the model that can be recomputed in the backward pass instead of stored."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part
        self.linears = lora_linears(part)
        self.recompute = False

    def __getattr__(self, name: str) -> Any:  # models read attributes of their layers
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("part"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.recompute:
            return self.part(*args, **kwargs)
        call = partial(self.part, **kwargs) if kwargs else self.part
        return checkpoint(call, *args, use_reentrant=False, preserve_rng_state=False)


class _Layer(_Recomputed):
    """A layer of the model."""

    compiled = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        call = partial(self._run, **kwargs)
        if not self.recompute:
            return call(*args)
        return checkpoint(call, *args, use_reentrant=False, preserve_rng_state=False)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if self.compiled:
            flex.configure_compiler()  # here, because autograd recomputes on a thread of its own
        try:
            return self.part(*args, **kwargs)
        finally:
            for linears in self.linears:
                linears.forget()


def _wrap_layers(stack: nn.Module, count: int) -> list[_Layer]:
    """Wrap the layers of the stack in place."""
    for module in stack.children():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            layers = [_Layer(layer) for layer in module]
            for index, layer in enumerate(layers):
                module[index] = layer
            return layers
    raise ModelUnsupported(
        f"{type(stack).__name__}: found no list of {count} layers in it, so hone cannot train it. "
        "Choose another model."
    )


def _wrap_feed_forward(layer: nn.Module) -> list[_Recomputed]:
    """Wrap the feed-forward part of a layer: most of its activations, a third of its operations."""
    for name, child in layer.named_children():
        linears = {path.rpartition(".")[2] for path, _ in child.named_modules()}
        if FEED_FORWARD & linears and not expert_modules(child):
            part = _Recomputed(child)
            setattr(layer, name, part)
            return [part]
    return []


def _is_among(index: int, chosen: int, count: int) -> bool:
    """Whether this index is among `chosen` indices spread evenly over `count`."""
    return (index + 1) * chosen // count > index * chosen // count


def _needs_gradient(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    """The first layer then runs the same compiled code as the others."""
    return output.requires_grad_() if torch.is_grad_enabled() else output


def _register() -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(SEGMENTS, _segment_attention)
    AttentionInterface.register(FLEX, flex.attention)


def _segment_attention(
    module: nn.Module,
    query: Tensor,  # [1, heads, L, dim]
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *,
    segments: SegmentAttention,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    window = getattr(module, "trie_window", flex.FULL)
    out = segments(q, k, v, window=window or None, scale=scaling, softcap=softcap, sinks=s_aux)
    return out.view(1, len(q), q.shape[1], -1), None
