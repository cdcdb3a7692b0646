"""The model of transformers as the learner's body: every family, on CUDA and on a CPU.

In:   an HF directory
Out:  TransformersBody: hidden states of packed rows under the trie's attention

The trie reaches the model as its attention function and as positions (depth in the trie); nothing else
of the model changes. What a model does besides attention is checked when it is loaded: windows are
read from the masks that it asks for, and the head is compared with the logits that it computes itself.
A model in which a token's state depends on more than its ancestors (linear attention, state spaces,
rotary angles that depend on the length) is computed path by path.
"""

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hone.errors import ModelUnsupported
from hone.learner import flex
from hone.learner.attention import SegmentAttention
from hone.learner.logprobs import Head
from hone.learner.trie import PackedRow
from hone.models import fit
from hone.models.lora import Layout, Lora
from hone.models.lora_linear import LoraModules, expert_modules
from hone.models.shape import adapted_linears, restricted

SEGMENTS, FLEX, INSPECT = "hone_segments", "hone_flex", "hone_inspect"
"""Names of the attention functions, as transformers calls them."""

SHARED_LAYERS = frozenset(["full_attention", "sliding_attention"])
"""Kinds of layers that see ancestors only."""
FEED_FORWARD = frozenset(["up_proj", "gate_up_proj"])
"""Linear layers that only the feed-forward part has."""
LENGTH_ROPES = frozenset(["dynamic", "longrope"])
"""Rotary embeddings whose angles depend on the length of the text."""


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
        self._raw = raw
        self._memory = memory
        self._text = model.config.get_text_config()
        self._stack: nn.Module = model.get_decoder()
        self._embedding: nn.Module = model.get_input_embeddings()
        _register()
        facts = _inspect(model, self._stack)
        self.head, self.unshared = facts.head, facts.unshared
        self.windows = tuple(sorted({window for _, window in facts.windows}))
        for module, window in facts.windows:
            module.trie_window = window  # pyright: ignore[reportArgumentType]
        experts = expert_modules(model)
        self._frozen_experts = sum(p.numel() for module in experts for p in module.parameters())
        self.layout: Layout = adapted_linears(raw, model)
        self._lora = LoraModules(model, self.layout)
        self._layers = _wrap_layers(self._stack, self._text.num_hidden_layers)
        self._feed_forward = [_wrap_feed_forward(layer.part) for layer in self._layers]
        self._rank = 0
        self._flex = (attention or (FLEX if self.device.type == "cuda" else SEGMENTS)) == FLEX
        model.set_attn_implementation(FLEX if self._flex else SEGMENTS)
        if self._flex:
            flex.allow_recompiles()
            for module in experts:
                # Which experts run depends on the tokens, so their code is compiled by no one.
                module.forward = torch.compiler.disable(module.forward)
            for layer in self._layers:
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
    def device(self) -> torch.device:
        return self.model.device

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

    def layout_of(self, target_modules: Collection[str]) -> Layout:
        return restricted(self.layout, target_modules)

    def arranged(self, row: PackedRow) -> PackedRow:
        return flex.padded(row, fit.padded_length(len(row))) if self._flex else row

    def hidden(self, row: PackedRow, lora: Lora | None) -> Tensor:
        self._lora.attach(lora)
        # A pass without gradients runs as one with them and drops what the backward pass would need:
        # the same compiled code, so its log-probabilities differ by weights and by nothing else.
        scoring = not torch.is_grad_enabled()
        if lora is not None:
            self._rank = lora.rank
        plan, count = self.recomputation(row), len(self._layers)
        for index, layer in enumerate(self._layers):
            layer.recompute = scoring or _is_among(index, plan.layers, count)
            for part in self._feed_forward[index]:
                part.recompute = _is_among(index, plan.feed_forward, count)
        with torch.enable_grad():
            hidden = self._forward(row)
        return hidden.detach() if scoring else hidden

    def _forward(self, row: PackedRow) -> Tensor:
        device = self.device
        token_ids, positions = row.token_ids.to(device), row.positions.to(device)
        if self._flex:
            leave = row.leave.to(device)
            masks = {w: flex.block_mask(leave, positions, w or None) for w in self.windows}
            trie: dict[str, Any] = {"block_masks": masks}
        else:
            trie = {"segments": SegmentAttention(row, device, self.dtype)}
        out = self._stack(
            input_ids=token_ids[None], position_ids=positions[None], use_cache=False, **trie
        )
        return out.last_hidden_state[0]

    def recomputation(self, row: PackedRow) -> fit.Recomputation:
        """What of a row does not fit into the learner's memory; the same for every pass over it."""
        if self.device.type != "cuda":
            return fit.Recomputation()
        return fit.recomputation(
            self._raw,
            tokens=len(row),
            dtype_bytes=self.dtype.itemsize,
            rank=self._rank,
            device=str(self.device),
            learner=self._memory,
        )


class _Recomputed(nn.Module):
    """A part of the model that may be computed again in the backward pass instead of kept."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part
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


def _wrap_layers(stack: nn.Module, count: int) -> list[_Recomputed]:
    """Wrap the layers of the stack in place."""
    for module in stack.children():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            layers = [_Recomputed(layer) for layer in module]
            for index, layer in enumerate(layers):
                module[index] = layer
            return layers
    raise ModelUnsupported(
        f"{type(stack).__name__}: found no list of {count} layers in it, so hone cannot train it. "
        "Choose another model."
    )


def _wrap_feed_forward(layer: nn.Module) -> list[_Recomputed]:
    """Wrap the feed-forward part of a layer, which keeps most, for a third of the operations."""
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


# ---- what a model is, found out when it is loaded ---------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Window:
    """What the mask function of a layer allows: `size` keys, or all (flex.FULL), or neither."""

    size: int
    regular: bool = True


@dataclass(frozen=True, slots=True)
class _Facts:
    head: Head
    windows: tuple[tuple[nn.Module, int], ...]
    """Attention modules with their windows; flex.FULL: none."""
    unshared: str


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(SEGMENTS, _segment_attention)
    AttentionInterface.register(FLEX, flex.attention)
    AttentionInterface.register(INSPECT, _inspected_attention)
    AttentionMaskInterface.register(INSPECT, _inspected_mask)


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


def _inspected_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **more: Any
) -> tuple[Tensor, None]:
    more["seen"].append((module, attention_mask))
    return value.repeat_interleave(query.shape[1] // value.shape[1], 1).transpose(1, 2), None


def _inspected_mask(*_: Any, mask_function: Callable[..., Any], **__: Any) -> _Window:
    """The window of a mask function, read off two queries far from the start."""
    zero = torch.tensor(0)

    def window(query: int) -> int:
        def visible(distance: int) -> bool:
            places = torch.tensor(query), torch.tensor(query - distance)
            return bool(mask_function(zero, zero, *places))

        low, high = 0, 1 << 24
        if visible(high):
            return flex.FULL
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if visible(middle) else (low, middle)
        return high

    sizes = {window((1 << 25) + shift) for shift in (0, 1, 1009)}
    return _Window(sizes.pop(), regular=not sizes)


@torch.no_grad()
def _inspect(model: Any, stack: nn.Module) -> _Facts:
    """Run a few tokens, and see what the model does around its attention."""
    text = model.config.get_text_config()
    before = model.config._attn_implementation
    model.set_attn_implementation(INSPECT)
    seen: list[tuple[nn.Module, Any]] = []
    token_ids = torch.arange(4, device=model.device)[None] % text.vocab_size
    try:
        hidden = stack(input_ids=token_ids, use_cache=False, seen=seen).last_hidden_state[0]
        logits = model(input_ids=token_ids, use_cache=False, seen=[]).logits[0]
    finally:
        model.set_attn_implementation(before)
    windows = [(module, _window_of(mask)) for module, mask in seen]
    head = _head(model, text)
    _check_head(head, hidden, logits, type(model).__name__)
    return _Facts(
        head,
        tuple((module, window.size) for module, window in windows),
        _why_unshared(text, [window for _, window in windows]),
    )


def _window_of(mask: Any) -> _Window:
    return mask if isinstance(mask, _Window) else _Window(flex.FULL)


def _why_unshared(text: Any, windows: list[_Window]) -> str:
    layers = text.num_hidden_layers
    other = sorted(set(getattr(text, "layer_types", None) or ()) - SHARED_LAYERS)
    ropes = _rope_types(getattr(text, "rope_parameters", None) or {})
    if len(windows) != layers or other:
        kinds = f" ({', '.join(other)})" if other else ""
        attention = sum(window.regular for window in windows)
        return (
            f"{attention} of {layers} layers are attention over ancestors; the others{kinds} carry "
            "a state along the row"
        )
    if not all(window.regular for window in windows):
        return "its attention windows depend on the place in the text"
    if length := sorted(ropes & LENGTH_ROPES):
        return f"its rotary angles depend on the length of the text ({', '.join(length)})"
    return ""


def _rope_types(rope: Mapping[str, Any]) -> set[str]:
    nested = [value for value in rope.values() if isinstance(value, dict)]
    own = rope.get("rope_type") or "default"
    return {own}.union(*(_rope_types(value) for value in nested))


def _head(model: Any, text: Any) -> Head:
    """The head with the scale and cap that the model's configuration names."""
    linear = model.get_output_embeddings()
    scale = float(getattr(text, "logit_scale", None) or 1.0)  # Cohere
    scale *= float(getattr(text, "lm_head_multiplier", None) or 1.0)  # Falcon-H1
    scale /= float(getattr(text, "logits_scaling", None) or 1.0)  # Granite
    softcap = getattr(text, "final_logit_softcapping", None)  # Gemma
    return Head(linear.weight, linear.bias, scale, softcap)


def _check_head(head: Head, hidden: Tensor, logits: Tensor, name: str) -> None:
    actual, expected = head.logits(hidden).double(), logits.double()
    error = float((actual - expected).norm() / expected.norm())
    # bfloat16 keeps eight bits; a scale that is left out would be far off.
    if not error < (0.02 if hidden.dtype in (torch.bfloat16, torch.float16) else 1e-4):
        raise ModelUnsupported(
            f"{name}: its logits are not those of its head (relative difference {error:.2g}), so it "
            "does something between them that hone does not know. Choose another model."
        )
