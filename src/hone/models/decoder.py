"""The decoder of the engine and the learner: token ids and positions to hidden states.

In:   an HF directory of the Llama, Qwen, Mistral or SmolLM family
Out:  Decoder.hidden (inference) and Decoder.hidden_for_training, on one flat axis of tokens

Engine and learner share one implementation, so their log-probabilities differ only by the order of
sums. The caller chooses the kernels by the method it calls; grad mode changes no result. `attend`
decides which tokens see each other, so there is no batch axis, no padding and no mask here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hone.models.architecture import DecoderConfig
from hone.models.layers import Projection, packed, rms_norm, swiglu, wide_product
from hone.models.lora import Lora
from hone.models.machine import packs, prefer_blas
from hone.models.weights import Tensors, read_tensors

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""attend(layer, q [N, heads, head_dim], k [N, kv_heads, head_dim], v as k) -> [N, heads * head_dim]"""

Span = tuple[int, int, Lora]
"""Tokens start..stop use this adapter."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's frozen weights; linear layers that read the same input are one matrix."""

    input_norm: Tensor | None  # [hidden]; None: merged into the next matrix
    post_norm: Tensor | None  # [hidden]
    q_norm: Tensor | None  # [head_dim], Qwen3
    k_norm: Tensor | None  # [head_dim], Qwen3
    qkv: Projection
    out: Projection
    gate_up: Projection
    down: Projection

    def pack(self) -> "Layer":
        """A copy with every matrix packed for inference."""
        return replace(
            self,
            qkv=self.qkv.pack(),
            out=self.out.pack(),
            gate_up=self.gate_up.pack(),
            down=self.down.pack(),
        )

    def merged(self, lora: Lora) -> "Layer":
        """A copy for inference with this adapter and the norms' weights merged into the matrices.

        Only in float32: in a coarser dtype, small changes would be rounded away.
        """
        assert self.out.weight.dtype == torch.float32, (
            "merging in a coarse type changes the adapter"
        )
        return replace(
            self,
            input_norm=None,
            post_norm=None,
            qkv=self.qkv.merged(lora, self.input_norm),
            out=self.out.merged(lora),
            gate_up=self.gate_up.merged(lora, self.post_norm),
            down=self.down.merged(lora),
        )


class Decoder:
    """Frozen base weights and the computation over them."""

    def __init__(
        self,
        config: DecoderConfig,
        *,
        embedding: Tensor,  # [vocab, hidden]
        head: Tensor,  # [vocab, hidden]
        norm: Tensor,  # [hidden]
        layers: Sequence[Layer],
    ) -> None:
        self.config = config
        self.embedding = embedding
        self.head = head
        self.norm = norm
        self.layers = tuple(layers)
        self._packed_head: Tensor | None = None
        self._inv_freq, self._rotary_scale = _frequencies(config, embedding.device)
        self._tables: tuple[Tensor, Tensor] | None = None

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the matrices, most of the weights."""
        matrices = [p.weight for x in self.layers for p in (x.qkv, x.out, x.gate_up, x.down)]
        return sum(m.nbytes for m in matrices) + self.head.nbytes

    @classmethod
    def load(
        cls,
        directory: Path,
        *,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> "Decoder":
        """Load an HF directory. On a CPU, processes that load the same model share its pages."""
        if torch.device(device).type == "cpu" and dtype == torch.float32:
            prefer_blas()
        config = DecoderConfig.read(directory)
        return cls.build(config, read_tensors(directory, config, dtype=dtype, device=device))

    @classmethod
    def build(cls, config: DecoderConfig, tensors: Tensors) -> "Decoder":
        """Build from the tensors of models/weights.py."""

        def projection(layer: int, key: str) -> Projection:
            parts = config.projections[key]
            return Projection(
                key=f"{layer}.{key}",
                weight=tensors[f"layers.{layer}.{key}.weight"],
                bias=tensors.get(f"layers.{layer}.{key}.bias"),
                sizes=tuple(outputs for _, outputs, _ in parts),
            )

        layers = [
            Layer(
                input_norm=tensors[f"layers.{i}.input_norm"],
                post_norm=tensors[f"layers.{i}.post_norm"],
                q_norm=tensors.get(f"layers.{i}.q_norm"),
                k_norm=tensors.get(f"layers.{i}.k_norm"),
                qkv=projection(i, "qkv"),
                out=projection(i, "out"),
                gate_up=projection(i, "gate_up"),
                down=projection(i, "down"),
            )
            for i in range(config.layers)
        ]
        embedding = tensors["embedding"]
        return cls(
            config,
            embedding=embedding,
            head=embedding if config.tied else tensors["head"],
            norm=tensors["norm"],
            layers=layers,
        )

    def hidden(
        self,
        token_ids: Tensor,  # [N] int64
        positions: Tensor,  # [N] int64
        attend: Attend,
        adapters: Sequence[Span] = (),
    ) -> Tensor:
        """Hidden states after the last norm, [N, hidden], for inference: no gradients."""
        cos, sin = self._rotation(positions)
        x = self.embedding[token_ids]
        for index, layer in enumerate(self.layers):
            y = rms_norm(x, layer.input_norm, self.config.norm_eps)
            q, k, v = self._heads(index, layer.qkv(y, adapters), cos, sin)
            x.add_(layer.out(attend(index, q, k, v), adapters))
            y = rms_norm(x, layer.post_norm, self.config.norm_eps)
            x.add_(layer.down(swiglu(layer.gate_up(y, adapters)), adapters))
        return rms_norm(x, self.norm, self.config.norm_eps)

    def hidden_for_training(
        self,
        token_ids: Tensor,  # [N] int64
        positions: Tensor,  # [N] int64
        attend: Attend,
        lora: Lora | None = None,
    ) -> Tensor:
        """Hidden states after the last norm, [N, hidden], with gradients of the adapter's tensors.

        Under `torch.no_grad` the same kernels run and give the same bits.
        """
        cos, sin = self._rotation(positions)
        x = self.embedding[token_ids]
        for index, layer in enumerate(self.layers):
            y = rms_norm(x, layer.input_norm, self.config.norm_eps)
            q, k, v = self._heads(index, layer.qkv.differentiable(y, lora), cos, sin)
            x = x + layer.out.differentiable(attend(index, q, k, v), lora)
            y = rms_norm(x, layer.post_norm, self.config.norm_eps)
            y = swiglu(layer.gate_up.differentiable(y, lora))
            x = x + layer.down.differentiable(y, lora)
        return rms_norm(x, self.norm, self.config.norm_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of every token of the vocabulary, [N, vocab], float32 or wider."""
        if self._packed_head is None:
            return wide_product(hidden, self.head.t())
        return torch.ops.mkldnn._linear_pointwise(hidden, self._packed_head, None, "none", [], "")

    def pack(self) -> "Decoder":
        """A decoder for inference with packed copies of its matrices, where these are faster.

        On Arm without SVE it is a tenth faster and takes twice the memory; elsewhere it is `self`.
        """
        if not packs(self.device, self.dtype):
            return self
        decoder = self.with_layers([layer.pack() for layer in self.layers])
        decoder._packed_head = packed(self.head)
        return decoder

    def with_layers(self, layers: Sequence[Layer]) -> "Decoder":
        """A copy with other layers."""
        decoder = Decoder(
            self.config, embedding=self.embedding, head=self.head, norm=self.norm, layers=layers
        )
        decoder._packed_head = self._packed_head
        return decoder

    def _heads(
        self, index: int, qkv: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, [N, heads, head_dim] each, normed and rotated as the layer does."""
        config, layer = self.config, self.layers[index]
        heads, kv, dim = config.heads, config.kv_heads, config.head_dim
        qkv = qkv.view(-1, heads + 2 * kv, dim)
        qk, v = qkv[:, : heads + kv], qkv[:, heads + kv :]
        if layer.q_norm is not None and layer.k_norm is not None:
            q = rms_norm(qk[:, :heads], layer.q_norm, config.norm_eps)
            k = rms_norm(qk[:, heads:], layer.k_norm, config.norm_eps)
            qk = torch.cat((q, k), 1)
        if config.rotary[index]:
            qk = (qk * cos).addcmul_(qk.roll(dim // 2, -1), sin)
        return qk[:, :heads], qk[:, heads:], v

    def _rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines, and sines signed for a rotation by half the dimensions; [N, 1, head_dim]."""
        if self._tables is None:
            # As transformers: angles in float32 whatever the weights' type, then cast.
            steps = torch.arange(self.config.max_positions, device=self.device).float()
            angles = torch.outer(steps, self._inv_freq)
            sin, cos = angles.sin() * self._rotary_scale, angles.cos() * self._rotary_scale
            self._tables = (
                torch.cat((cos, cos), -1).to(self.dtype)[:, None],
                torch.cat((-sin, sin), -1).to(self.dtype)[:, None],
            )
        cos, sin = self._tables
        return cos[positions], sin[positions]


def _frequencies(config: DecoderConfig, device: torch.device) -> tuple[Tensor, float]:
    """Rotary frequencies and scale; kinds other than the default come from transformers."""
    raw: dict[str, Any] = config.raw
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64, device=device).float()
        return 1.0 / (config.rope_theta ** (exponents / config.head_dim)), 1.0
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    fields = {key: value for key, value in raw.items() if key != "model_type"}
    hf_config = AutoConfig.for_model(config.family, **fields)
    inv_freq, scale = ROPE_INIT_FUNCTIONS[kind](hf_config, device)
    return inv_freq, float(scale)
