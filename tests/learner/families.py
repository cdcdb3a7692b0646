"""Tiny random models of every family, with sizes at which its peculiarities change the result.

docs/build.py makes docs/reference/families.md of them; tests check every field that it prints.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hone.models.lora_linear import LoraLinears

VOCAB = 128
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FULL_THEN_SLIDING = ["full_attention", "sliding_attention"]
SLIDING_THEN_FULL = ["sliding_attention", "full_attention"]


@dataclass(frozen=True)
class Family:
    """One family."""

    name: str
    config: Callable[..., Any]
    """Makes its configuration; keywords replace its sizes."""
    peculiar: str
    """What about it could go wrong."""
    unshared: str = ""
    """Why every path is computed by itself; empty if paths share their prefixes."""
    experts: bool = False
    embedded: bool = False
    """Whether hone's own decoder, and with it the embedded engine, runs this configuration."""
    vllm: bool = False
    """Whether tests/inference/vllm/test_engine_families.py serves it with vLLM."""
    chat: str = ""
    """Its chat template in tests/chat, if rendering and bridging are tested with it."""

    def model(self, dtype: torch.dtype = torch.float32, **sizes: Any) -> Any:
        """The model, in which every parameter is random: norms, sinks and biases too."""
        from transformers import AutoModelForCausalLM

        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            self.config(**sizes), attn_implementation="eager", experts_implementation="eager"
        )
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                if parameter.ndim == 1 and "norm" in name:
                    parameter.add_(noise * 0.2)
                else:
                    parameter.copy_(noise * 0.2)
        return model.to(dtype).eval()


def _config(name: str, **more: Any) -> Callable[[], Any]:
    def make(**sizes: Any) -> Any:
        import transformers

        return getattr(transformers, name)(**(SIZES | more | sizes))

    return make


def _with_vision(name: str, text: Callable[..., Any], **more: Any) -> Callable[..., Any]:
    """The configuration of a model that also reads images, over that of its language model."""

    def make(**sizes: Any) -> Any:
        import transformers

        language = text(**sizes, final_logit_softcapping=None).to_dict()
        return getattr(transformers, name)(text_config=language, vision_config=VISION, **more)

    return make


VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
GEMMA3 = _config(
    "Gemma3TextConfig",
    head_dim=16,
    sliding_window=7,
    layer_types=SLIDING_THEN_FULL,
    query_pre_attn_scalar=20,
    final_logit_softcapping=3.0,
)
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.04 * i for i in range(8)],
    "long_factor": [2.0 + 0.4 * i for i in range(8)],
    "original_max_position_embeddings": 24,
}
"""In test_families.py the first calls are shorter, the second ones longer."""
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}

FAMILIES = (
    Family(
        "SmolLM2",
        _config("LlamaConfig", tie_word_embeddings=True),
        "one matrix for embeddings and head",
        embedded=True,
        vllm=True,
        chat="smollm2-instruct",
    ),
    Family(
        "Llama 3",
        _config("LlamaConfig", rope_parameters=LLAMA3_ROPE),
        "llama3 rope",
        embedded=True,
        vllm=True,
    ),
    Family(
        "Qwen2.5",
        _config("Qwen2Config"),
        "biases of q, k and v",
        embedded=True,
        vllm=True,
        chat="qwen2.5-instruct",
    ),
    Family(
        "Qwen3",
        _config("Qwen3Config", head_dim=32),
        "norms of q and k; heads together wider than the hidden size",
        embedded=True,
        vllm=True,
        chat="qwen3",
    ),
    Family(
        "Gemma 3",
        GEMMA3,
        "window 7 on every other layer, two ropes, four norms, scaled embedding, capped logits",
        vllm=True,
    ),
    Family(
        "Gemma 3 with vision",
        _with_vision("Gemma3Config", GEMMA3, mm_tokens_per_image=4),
        "as Gemma 3, with plain logits; beside it a vision tower, which no adapter covers",
    ),
    Family(
        "Gemma 2",
        _config(
            "Gemma2Config",
            head_dim=16,
            sliding_window=5,
            layer_types=SLIDING_THEN_FULL,
            query_pre_attn_scalar=20,
            attn_logit_softcapping=2.0,
            final_logit_softcapping=3.0,
        ),
        "window 5 on every other layer, capped scores, capped logits",
        vllm=True,
    ),
    Family(
        "Mistral",
        _config("MistralConfig", sliding_window=6),
        "window 6 on every layer",
        embedded=True,
        vllm=True,
    ),
    Family(
        "Phi-4",
        _config("Phi3Config", sliding_window=9, partial_rotary_factor=0.5),
        "one matrix for q, k and v, one for gate and up; half of each head rotated; window 9",
        vllm=True,
    ),
    Family(
        "SmolLM3",
        _config("SmolLM3Config", no_rope_layers=[1, 0]),
        "a layer without positions",
        embedded=True,
        vllm=True,
    ),
    Family(
        "Granite",
        _config(
            "GraniteConfig",
            embedding_multiplier=3.0,
            attention_multiplier=0.4,
            residual_multiplier=0.6,
            logits_scaling=1.7,
        ),
        "four multipliers",
        vllm=True,
    ),
    Family(
        "OLMo 2",
        _config("Olmo2Config"),
        "norms after the layers and over whole q and k",
        vllm=True,
    ),
    Family(
        "Cohere",
        _config("CohereConfig", logit_scale=0.3),
        "scaled logits, parallel layers",
        vllm=True,
    ),
    Family(
        "Qwen3-MoE",
        _config("Qwen3MoeConfig", head_dim=16, decoder_sparse_step=1, mlp_only_layers=[0], **MOE),
        "experts on one of two layers",
        experts=True,
    ),
    Family(
        "gpt-oss",
        _config(
            "GptOssConfig",
            head_dim=16,
            sliding_window=6,
            layer_types=SLIDING_THEN_FULL,
            num_local_experts=4,
            num_experts_per_tok=2,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        ),
        "random sinks, window 6 on every other layer, experts",
        experts=True,
    ),
    Family(
        "DeepSeek-V2",
        _config(
            "DeepseekV2Config",
            num_key_value_heads=4,
            q_lora_rank=None,
            kv_lora_rank=16,
            qk_nope_head_dim=16,
            qk_rope_head_dim=8,
            v_head_dim=16,
            n_routed_experts=4,
            n_shared_experts=1,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            first_k_dense_replace=1,
            n_group=1,
            topk_group=1,
            topk_method="greedy",
        ),
        "latent attention with values of another width, shared experts",
        experts=True,
    ),
    Family(
        "Phi-4 with longrope",
        _config("Phi3Config", rope_parameters=LONGROPE, original_max_position_embeddings=24),
        "rotary angles change with the length",
        unshared="its rotary angles depend on the length of the text (longrope)",
        vllm=True,
    ),
    Family(
        "LFM2",
        _config(
            "Lfm2Config", layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False
        ),
        "a convolution along the row",
        unshared="layers of type conv are not plain attention over ancestors",
    ),
    Family(
        "Qwen3-Next",
        _config(
            "Qwen3NextConfig",
            head_dim=16,
            layer_types=["linear_attention", "full_attention"],
            linear_num_value_heads=4,
            linear_num_key_heads=2,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            shared_expert_intermediate_size=24,
            **MOE,
        ),
        "linear attention, shared and routed experts",
        unshared="layers of type linear_attention are not plain attention over ancestors",
        experts=True,
    ),
    Family(
        "Bamba",
        _config(
            "BambaConfig",
            attn_layer_indices=[1],
            mamba_n_heads=8,
            mamba_d_head=16,
            mamba_n_groups=1,
            mamba_d_state=16,
            mamba_expand=2,
            mamba_chunk_size=16,
        ),
        "a state space (Mamba 2)",
        unshared="layers of type linear_attention are not plain attention over ancestors",
    ),
)


@torch.no_grad()
def write_factors(layers: LoraLinears) -> None:
    """Give joint layers their factors, as LoraModules does."""
    layers.make_room()
    for place, factor in layers.places():
        place.copy_(factor)
