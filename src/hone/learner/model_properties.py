"""Properties of a transformers model outside its attention, inspected when it is loaded.

In:   a model
Out:  ModelProperties: its head, the window of each attention layer, and whether paths share prefixes

A few tokens run through the model with an attention function that records its arguments. Windows
are read from the masks that the model requests, and the head is compared with the logits that the
model computes itself: a property that hone does not know is an error, not a wrong gradient.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hone.errors import ModelUnsupported
from hone.learner import flex
from hone.learner.logprobs import Head

INSPECT = "hone_inspect"
"""Name under which the attention function is registered with transformers."""
SHARED_LAYERS = frozenset(["full_attention", "sliding_attention"])
"""Kinds of layers that see ancestors only."""
LENGTH_ROPES = frozenset(["dynamic", "longrope"])
"""Rotary embeddings whose angles depend on the length of the text."""


@dataclass(frozen=True, slots=True)
class _Window:
    """The keys that a layer's mask function allows: the last `size`, or all (flex.FULL)."""

    size: int
    regular: bool = True


@dataclass(frozen=True, slots=True)
class ModelProperties:
    """The result of the inspection."""

    head: Head
    windows: tuple[tuple[nn.Module, int], ...]
    """Attention modules with their windows; flex.FULL: none."""
    unshared: str
    """Why every path is computed separately; empty if paths share their prefixes."""


def _inspected_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **more: Any
) -> tuple[Tensor, None]:
    more["seen"].append((module, attention_mask))
    heads = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
    return heads.transpose(1, 2).contiguous(), None


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


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(INSPECT, _inspected_attention)
    AttentionMaskInterface.register(INSPECT, _inspected_mask)


@torch.no_grad()
def inspect_model(model: Any, stack: nn.Module) -> ModelProperties:
    """Run a few tokens through the model and inspect what it does outside its attention."""
    text = model.config.get_text_config()
    _register()
    before = model.config._attn_implementation
    model.set_attn_implementation(INSPECT)
    seen: list[tuple[nn.Module, Any]] = []
    token_ids = torch.arange(4, device=model.device)[None] % text.vocab_size
    try:
        hidden = stack(input_ids=token_ids, use_cache=False, seen=seen).last_hidden_state[0]
        logits = model(input_ids=token_ids, use_cache=False, seen=[]).logits[0]
    except Exception as error:  # the model's own code, which may do anything with its masks
        raise ModelUnsupported(
            f"{type(model).__name__}: it cannot be run with hone's attention ({error!r}). Choose "
            "another model."
        ) from error
    finally:
        model.set_attn_implementation(before)
    windows = [(module, _window_of(mask)) for module, mask in seen]
    head = _head(model, text)
    _check_head(head, hidden, logits, type(model).__name__)
    return ModelProperties(
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
    if other:
        return f"layers of type {', '.join(other)} are not plain attention over ancestors"
    if len(windows) != layers:
        return (
            f"its {layers} layers call the attention function {len(windows)} times, not once each"
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
