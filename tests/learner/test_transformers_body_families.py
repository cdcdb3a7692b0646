"""The transformers body of every family: the trie against unshared passes through transformers itself.

The oracle is the model as transformers computes it (eager attention, its own masks, its own head), one
call at a time, with PEFT's formula for the adapter added by hooks.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tests.chat.test_bridge import FAMILIES as CHAT_FAMILIES
from tests.learner.families import FAMILIES, SIZES, VOCAB, Family
from torch import Tensor

from hone.learner.forward import row_logprobs
from hone.learner.samples import LabelledCall, Sample
from hone.learner.transformers_body import SEGMENTS, TransformersBody, _segment_attention
from hone.learner.trie import pack
from hone.models.lora import Lora
from hone.models.shape import own_decoder

families = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)


def samples(seed: int) -> list[Sample]:
    """Two prompts that share a beginning, three completions each, and a second turn; up to 34 tokens."""
    rng = np.random.default_rng(seed)

    def ids(count: int) -> list[int]:
        return rng.integers(3, VOCAB, count).tolist()

    def call(prompt: list[int], completion: list[int]) -> LabelledCall:
        return LabelledCall(
            ids=np.array(prompt + completion),
            prompt=len(prompt),
            places=np.arange(len(completion)),
            logprobs=None,
            exact=True,
            temperature=float(rng.choice([1.0, 0.7])),
            advantage=float(rng.normal()),
        )

    system = ids(6)
    made: list[Sample] = []
    for _ in range(2):
        prompt = system + ids(8)
        for _ in range(3):
            first = ids(int(rng.integers(3, 8)))
            calls = [call(prompt, first), call(prompt + first + ids(4), ids(6))]
            made.append(Sample(0, len(made), tuple(calls)))
    return made


def unshared(model: Any, lora: Lora, calls: list[LabelledCall]) -> Tensor:
    """Log-probabilities of all labels, by whole forward passes of the plain model."""
    factors = dict(lora.named())
    handles = []
    for name, module in model.named_modules():
        stem = f"base_model.model.{name}"
        if f"{stem}.lora_A.weight" not in factors:
            continue
        a, b = factors[f"{stem}.lora_A.weight"], factors[f"{stem}.lora_B.weight"]

        def adapted(_: Any, args: Any, out: Tensor, a: Tensor = a, b: Tensor = b) -> Tensor:
            return out + (args[0] @ a.t()) @ b.t() * lora.scale

        handles.append(module.register_forward_hook(adapted))
    assert 2 * len(handles) == len(factors)
    values = []
    for call in calls:
        ids = torch.from_numpy(call.ids)
        logits = model(input_ids=ids[None, :-1], use_cache=False).logits[0]
        at = call.prompt + torch.from_numpy(call.places)
        logprobs = (logits / call.temperature).log_softmax(-1)
        values.append(logprobs[at - 1, ids[at]])
    for handle in handles:
        handle.remove()
    return torch.cat(values)


def random_lora(body: TransformersBody, dtype: torch.dtype) -> Lora:
    lora = Lora.init(body.layout, rank=3, alpha=6.0, seed=1)
    kind = {"dtype": dtype, "device": body.device}
    generator = torch.Generator().manual_seed(2)
    factors = {}
    for key in lora.config.adapted:
        a, b = lora.factors(key)
        b = tuple(torch.randn(part.shape, generator=generator).to(**kind) * 0.1 for part in b)
        factors[key] = (a.to(**kind), b)
    return Lora(lora.config, factors, rank=3, alpha=6.0).trainable_()


def gradients(lora: Lora) -> Tensor:
    grads = []
    for name, leaf in lora.parameters():
        assert leaf.grad is not None, name
        grads.append(leaf.grad.flatten())
        leaf.grad = None
    return torch.cat(grads)


def label_weights(count: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(5)).to(dtype)


@cache  # three quarters of a comparison's time
def oracle(family: Family, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Log-probabilities of all labels, and the adapter's gradient."""
    model = family.model(dtype)
    body = TransformersBody(family.model(dtype), raw=model.config.to_dict())
    lora = random_lora(body, dtype)
    logprobs = unshared(model, lora, [call for sample in samples(3) for call in sample.calls])
    (logprobs * label_weights(len(logprobs), dtype)).sum().backward()
    return logprobs.detach(), gradients(lora)


def compared(
    family: Family, dtype: torch.dtype, mutate: Callable[[TransformersBody], object] | None = None
) -> tuple[float, float]:
    """Largest error of a log-probability; error of the gradient relative to its norm."""
    model = family.model(dtype)
    body = TransformersBody(model, raw=model.config.to_dict())
    if mutate is not None:
        mutate(body)
    lora = random_lora(body, dtype)
    batch = pack(samples(3), row_tokens=60, shared=not body.unshared)
    weight = label_weights(len(batch.labels), dtype)
    expected, wanted = oracle(family, dtype)
    actual = torch.empty_like(expected)
    for row in batch.rows:
        logprobs, _ = row_logprobs(body, row, batch.labels, lora)
        (logprobs * weight[row.label]).sum().backward()
        actual[row.label] = logprobs.detach()
    error = (actual - expected).abs().max()
    return error.item(), ((gradients(lora) - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize(
    "family", [family for family in FAMILIES if not family.unshared], ids=lambda family: family.name
)
def test_the_trie_equals_unshared_passes_in_float64(family: Family):
    """Not of models that share nothing: there, both sides compute the same passes."""
    # transformers computes norms and softmax in float32 whatever the model's type.
    error, gradient = compared(family, torch.float64)
    assert error < 1e-5 and gradient < 1e-6, (error, gradient)


@families
def test_the_trie_equals_unshared_passes_in_float32(family: Family):
    error, gradient = compared(family, torch.float32)
    assert error < 1e-4 and gradient < 1e-5, (error, gradient)


QKVO, FEED_FORWARD = "q_proj k_proj v_proj o_proj", "gate_proj up_proj down_proj"
LATENT, LINEAR = "q_proj kv_a_proj_with_mqa kv_b_proj o_proj", "in_proj_qkvz in_proj_ba out_proj"
COVERED = {
    "Qwen3-MoE": {"0.self_attn": QKVO, "0.mlp": FEED_FORWARD, "1.self_attn": QKVO},
    "gpt-oss": {"0.self_attn": QKVO, "1.self_attn": QKVO},
    "DeepSeek-V2": {"0.self_attn": LATENT, "0.mlp": FEED_FORWARD}
    | {"1.self_attn": LATENT, "1.mlp.shared_experts": FEED_FORWARD},
    "Qwen3-Next": {"0.linear_attn": LINEAR, "0.mlp.shared_expert": FEED_FORWARD}
    | {"1.self_attn": QKVO, "1.mlp.shared_expert": FEED_FORWARD},
}
"""The layers that an adapter covers: all but routers and routed experts."""


@families
def test_what_the_body_reports(family: Family):
    model = family.model()
    body = TransformersBody(model, raw=model.config.to_dict())
    assert body.unshared == family.unshared
    assert not body.unshared or body.notes[0].endswith(f"computed by itself: {body.unshared}")
    assert any("experts" in note for note in body.notes) is family.experts
    assert (own_decoder(model.config.to_dict()) is not None) is family.embedded
    assert not family.chat or family.chat in CHAT_FAMILIES
    config = model.config.get_text_config()
    width = config.num_attention_heads * (getattr(config, "head_dim", None) or 0)
    assert ("heads together wider" in family.peculiar) is (width > config.hidden_size)
    if family.experts:
        paths = [path for parts in body.layout.adapted.values() for path, _, _ in parts]
        assert sorted(paths) == sorted(
            f"model.layers.{module}.{name}"
            for module, names in COVERED[family.name].items()
            for name in names.split()
        )


MAMBA = {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16}


@pytest.mark.parametrize(
    ("name", "sizes", "why"),
    [
        ("FalconH1", MAMBA, "layers of type hybrid are not plain attention over ancestors"),
        ("Bloom", {}, "its 2 layers call the attention function 0 times, not once each"),
    ],
)
def test_why_paths_share_nothing(name: str, sizes: dict[str, Any], why: str):
    """Layers of Falcon-H1 have attention and a state. Bloom's attention cannot be replaced."""
    config = getattr(transformers, f"{name}Config")(**SIZES, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config)
    assert TransformersBody(model, raw=config.to_dict()).unshared == why


# ---- what the oracle must notice ---------------------------------------------------------------------


def _wider_windows(body: TransformersBody) -> None:
    for module in body.model.modules():
        if getattr(module, "trie_window", 0):
            module.trie_window += 1


def _plain_head(body: TransformersBody) -> None:
    body.head = replace(body.head, scale=1.0, softcap=None)


def _shared_anyway(body: TransformersBody) -> None:
    body.unshared = ""


def _no_sinks(body: TransformersBody) -> None:
    from transformers import AttentionInterface

    def attention(*args: Any, s_aux: Any = None, **more: Any) -> Any:
        return _segment_attention(*args, **more)

    AttentionInterface.register(SEGMENTS, attention)


def _uncapped_scores(body: TransformersBody) -> None:
    from transformers import AttentionInterface

    def attention(*args: Any, softcap: Any = None, **more: Any) -> Any:
        return _segment_attention(*args, **more)

    AttentionInterface.register(SEGMENTS, attention)


@pytest.mark.parametrize(
    ("name", "mutate"),
    [
        ("Mistral", _wider_windows),
        ("Gemma 3", _wider_windows),
        ("gpt-oss", _wider_windows),
        ("Granite", _plain_head),
        ("Cohere", _plain_head),
        ("Gemma 2", _plain_head),
        ("gpt-oss", _no_sinks),
        ("Gemma 2", _uncapped_scores),
        ("Phi-4 with longrope", _shared_anyway),
        ("LFM2", _shared_anyway),
        ("Qwen3-Next", _shared_anyway),
        ("Bamba", _shared_anyway),
    ],
)
def test_the_oracle_notices(name: str, mutate: Callable[[TransformersBody], object]):
    """A window one too wide, a factor left out, a prefix shared: a hundred times the tolerance above."""
    from transformers import AttentionInterface

    family = next(family for family in FAMILIES if family.name == name)
    try:
        error, gradient = compared(family, torch.float32, mutate)
    finally:
        AttentionInterface.register(SEGMENTS, _segment_attention)
    assert error > 1e-2 and gradient > 1e-3, (error, gradient)
