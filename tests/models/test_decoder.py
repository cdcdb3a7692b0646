"""The decoder computes what transformers computes, for every family and variant it accepts."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from tests.patience import PATIENCE_S
from tests.prose import Prose
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from hone.errors import ConfigError, ModelUnsupported
from hone.models.architecture import HARMLESS, DecoderConfig
from hone.models.decoder import Attend, Decoder
from hone.models.lora import Lora
from hone.models.weights import prune

SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
CONFIGS = {
    "llama with biases": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "llama tied, llama3 rope": LlamaConfig(
        **SIZES, tie_word_embeddings=True, rope_parameters=LLAMA3
    ),
    "llama, yarn": LlamaConfig(**SIZES, rope_parameters=YARN),
    "qwen2": Qwen2Config(**SIZES),
    "qwen2, late windows": Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=6, max_window_layers=2
    ),
    "qwen3": Qwen3Config(**SIZES, head_dim=32),
    "mistral": MistralConfig(**SIZES, sliding_window=None),
    "mistral, window": MistralConfig(**SIZES, sliding_window=7),
    "smollm3, layers without rope": SmolLM3Config(**SIZES),
    "smollm3, a head of its own": SmolLM3Config(
        **SIZES, tie_word_embeddings=False, no_rope_layers=[1, 0, 1, 1, 0]
    ),
    "smollm3, windows and biases": SmolLM3Config(
        **SIZES, use_sliding_window=True, sliding_window=6, attention_bias=True, mlp_bias=True
    ),
    "llama, linear rope": LlamaConfig(
        **SIZES, rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    ),
}


def whole_sequence(decoder: Decoder) -> Attend:
    """Plain causal attention over one sequence."""

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        places = torch.arange(len(q))
        distance = places[:, None] - places
        window = decoder.config.windows[layer] or len(q)
        out = F.scaled_dot_product_attention(
            *(t.transpose(0, 1)[None] for t in (q, k, v)),
            attn_mask=(distance >= 0) & (distance < window),
            enable_gqa=True,
        )
        return out[0].transpose(0, 1).flatten(1)

    return attend


def training_logits(decoder: Decoder, ids: torch.Tensor, lora: Lora | None = None) -> torch.Tensor:
    places = torch.arange(len(ids))
    hidden = decoder.hidden_for_training(ids, places, whole_sequence(decoder), lora)
    return decoder.logits(hidden)


def logits(decoder: Decoder, ids: torch.Tensor, lora: Lora | None = None) -> torch.Tensor:
    spans = [] if lora is None else [(0, len(ids), lora)]
    hidden = decoder.hidden(ids, torch.arange(len(ids)), whole_sequence(decoder), spans)
    return decoder.logits(hidden)


def random_model(config: PretrainedConfig, directory: Path) -> torch.nn.Module:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name:  # all ones and zeros would hide a missing one
            parameter.data = torch.rand_like(parameter) + 0.5
    model.save_pretrained(directory)
    return model


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_those_of_transformers(name: str, tmp_path: Path):
    model = random_model(CONFIGS[name], tmp_path)
    ids = torch.randint(0, 300, (40,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        theirs = model(ids[None]).logits[0]
        decoder = Decoder.load(tmp_path)
        ours, in_training = logits(decoder, ids), training_logits(decoder, ids)
    # Logits reach 7; float32 sums in another order differ by some 1e-5.
    torch.testing.assert_close(ours, theirs, atol=5e-5, rtol=0)
    torch.testing.assert_close(in_training, theirs, atol=5e-5, rtol=0)


@pytest.mark.parametrize("name", ["llama with biases", "qwen3"])
def test_gradients_of_an_adapter_equal_pefts(name: str, tmp_path: Path):
    model = random_model(CONFIGS[name], tmp_path).double()
    settings = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
    theirs = get_peft_model(model, settings, autocast_adapter_dtype=False)
    generator = torch.Generator().manual_seed(3)
    for parameter in theirs.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(0, 0.1, generator=generator)
    theirs.save_pretrained(str(tmp_path / "adapter"))
    decoder = Decoder.load(tmp_path, dtype=torch.float64)
    lora = Lora.load(tmp_path / "adapter", decoder.config)
    for _, tensor in lora.parameters():
        tensor.data = tensor.data.double()
    lora.trainable_()
    ids = torch.randint(0, 300, (17,), generator=generator)
    weights = torch.randn(17, 300, generator=generator, dtype=torch.float64)
    (theirs(ids[None]).logits[0] * weights).sum().backward()
    (training_logits(decoder, ids, lora) * weights).sum().backward()
    named = {n.replace(".default", ""): p.grad for n, p in theirs.named_parameters()}
    for (path, _), grad in zip(lora.named(), _grads(lora), strict=True):
        # The rotary tables are float32 on both sides, and so are the norms inside
        # transformers: a few 1e-6 of the largest is what is left.
        reference = named[path]
        assert reference is not None
        torch.testing.assert_close(
            grad, reference, atol=float(reference.abs().max()) * 5e-6, rtol=0
        )


def _grads(lora: Lora):
    """Gradients in the order of named(): A is one leaf for all parts of a projection."""
    for key in lora._factors:
        a, b = lora.factors(key)
        for i, part in enumerate(b):
            assert a.grad is not None and part.grad is not None
            yield a.grad[i * lora.rank : (i + 1) * lora.rank]
            yield part.grad


def test_rows_of_different_adapters_do_not_mix(tiny_llama_dir: Path):
    decoder = Decoder.load(tiny_llama_dir)
    loras = [Lora.init(decoder.config, rank=2, seed=s) for s in (1, 2)]
    for lora in loras:
        for name, tensor in lora.named():
            if "lora_B" in name:
                tensor.normal_(0, 0.3, generator=torch.Generator().manual_seed(lora.rank))
    ids, positions = torch.tensor([3, 4, 5, 6]), torch.zeros(4, dtype=torch.int64)

    def alone(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        groups = q.shape[1] // v.shape[1]
        return v.repeat_interleave(groups, 1).flatten(1)  # every token sees itself only

    with torch.no_grad():
        mixed = decoder.hidden(ids, positions, alone, [(0, 1, loras[0]), (2, 4, loras[1])])
        apart = [
            decoder.hidden(ids[:1], positions[:1], alone, [(0, 1, loras[0])]),
            decoder.hidden(ids[1:2], positions[:1], alone),
            decoder.hidden(ids[2:], positions[:2], alone, [(0, 2, loras[1])]),
        ]
    torch.testing.assert_close(mixed, torch.cat(apart), atol=1e-5, rtol=0)


def test_saved_adapters_load_in_peft_and_give_the_same_logits(tiny_llama_dir: Path, tmp_path: Path):
    decoder = Decoder.load(tiny_llama_dir)
    lora = Lora.init(decoder.config, rank=4, seed=1)
    for name, tensor in lora.named():
        if "lora_B" in name:
            tensor.normal_(0, 0.2, generator=torch.Generator().manual_seed(9))
    lora.save(tmp_path, base_model="tiny")
    base = AutoModelForCausalLM.from_pretrained(tiny_llama_dir, dtype=torch.float32)
    theirs = PeftModel.from_pretrained(base, tmp_path)
    ids = torch.arange(3, 40)
    with torch.no_grad():
        torch.testing.assert_close(
            logits(decoder, ids, lora), theirs(ids[None]).logits[0], atol=5e-5, rtol=0
        )


def test_save_load_save_is_byte_equal_and_keeps_the_hash(tiny_llama_dir: Path, tmp_path: Path):
    config = DecoderConfig.read(tiny_llama_dir)
    lora = Lora.init(config, seed=4)
    lora.save(tmp_path / "a", base_model="tiny")
    again = Lora.load(tmp_path / "a", config)
    again.save(tmp_path / "b", base_model="tiny")
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert again.sha256 == lora.sha256 != Lora.init(config, seed=5).sha256


@torch.inference_mode()
@pytest.mark.parametrize("name", ["llama with biases", "qwen2", "qwen3"])
def test_a_packed_decoder_computes_the_same(name: str, tmp_path: Path):
    # On machines where packing wins nothing it is the same decoder, and this says little.
    random_model(CONFIGS[name], tmp_path)
    plain = Decoder.load(tmp_path)
    packed = plain.pack()
    lora = Lora.init(plain.config, rank=4)
    for path, tensor in lora.named():
        if "lora_B" in path:
            tensor.normal_(0, 0.2, generator=torch.Generator().manual_seed(9))
    for ids in (torch.arange(3, 40), torch.tensor([7])):
        for adapter in (None, lora):
            ours, theirs = logits(packed, ids, adapter), logits(plain, ids, adapter)
            torch.testing.assert_close(ours, theirs, atol=5e-5, rtol=0)


@torch.inference_mode()
@pytest.mark.parametrize("laid_out", ["plain", "packed"])
@pytest.mark.parametrize("name", ["llama with biases", "qwen2", "qwen3"])
def test_merged_layers_compute_what_the_adapter_beside_it_does(
    name: str, laid_out: str, tmp_path: Path
):
    random_model(CONFIGS[name], tmp_path)
    decoder = Decoder.load(tmp_path)
    decoder = decoder if laid_out == "plain" else decoder.pack()
    lora = Lora.init(decoder.config, rank=4)
    for path, tensor in lora.named():
        if "lora_B" in path:
            tensor.normal_(0, 0.2, generator=torch.Generator().manual_seed(9))
    ids = torch.arange(3, 40)
    before = logits(decoder, ids, None)
    merged = decoder.with_layers([layer.merged(lora) for layer in decoder.layers])
    torch.testing.assert_close(
        logits(merged, ids, None), logits(decoder, ids, lora), atol=1e-4, rtol=0
    )
    # The one it was made from is as it was.
    assert torch.equal(logits(decoder, ids, None), before)
    assert (before - logits(merged, ids, None)).abs().max() > 0.1


def test_the_served_hash_notices_a_fused_copy_that_went_stale(tiny_llama_dir: Path):
    config = DecoderConfig.read(tiny_llama_dir)
    lora = Lora.init(config, seed=4).fuse(torch.float32)
    assert lora.served_sha256 == lora.sha256
    lora.factors("1.down")[1][0][0, 0] += 1
    assert lora.served_sha256 == "corrupt:1.down"


def test_an_adapter_in_training_is_never_sampled_from_a_copy(tiny_llama_dir: Path):
    decoder = Decoder.load(tiny_llama_dir)
    lora = Lora.init(decoder.config, seed=4).fuse(torch.float32).trainable_()
    ids = torch.arange(3, 20)
    with torch.no_grad():
        before = logits(decoder, ids, lora)
        for _, leaf in lora.parameters():
            leaf += 0.1
        after = logits(decoder, ids, lora)
    torch.testing.assert_close(
        after, training_logits(decoder, ids, lora).detach(), atol=1e-4, rtol=1e-5
    )
    assert (after - before).abs().max() > 0.1


def test_harmless_fields_of_a_configuration_change_nothing(tmp_path: Path):
    """Each at a value that is not the usual one; transformers computes the same, and so does hone."""
    model = random_model(CONFIGS["qwen3"], tmp_path)
    values = dict.fromkeys(HARMLESS, 7) | {
        "dtype": "float32",
        "torch_dtype": "float32",
        "architectures": ["Qwen3ForCausalLM"],
        "transformers_version": "4.0.0",
        "tokenizer_class": "LlamaTokenizer",
        "_name_or_path": "elsewhere",
        "attention_dropout": 0.5,
        "initializer_range": 0.5,
        "use_cache": False,
    }
    for name in [
        *(name for name in HARMLESS if "attn_implementation" in name),
        *("id2label", "label2id", "task_specific_params", "transformers.js_config", "problem_type"),
        *("return_dict", "output_attentions", "output_hidden_states", "torchscript"),
        *(name for name in HARMLESS if name.endswith("token_id")),
    ]:
        values.pop(name)  # transformers itself refuses a number here, or changes what it returns
    raw = json.loads((tmp_path / "config.json").read_text()) | values
    (tmp_path / "config.json").write_text(json.dumps(raw))
    ids = torch.arange(3, 40)
    with torch.no_grad():
        again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
        theirs = again(ids[None]).logits[0]
        torch.testing.assert_close(theirs, model(ids[None]).logits[0], atol=0, rtol=0)
        torch.testing.assert_close(logits(Decoder.load(tmp_path), ids), theirs, atol=5e-5, rtol=0)


@pytest.mark.parametrize(
    "config", [LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config, SmolLM3Config]
)
def test_a_field_that_is_left_out_means_what_it_means_to_transformers(config: type):
    sizes = {k: SIZES[k] for k in list(SIZES)[:5]} | {"max_position_embeddings": 256}
    theirs = config(**sizes)
    ours = DecoderConfig.parse({"model_type": theirs.model_type, **sizes}, where="config.json")
    assert ours.kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == getattr(theirs, "head_dim", sizes["hidden_size"] // 4)
    assert ours.norm_eps == theirs.rms_norm_eps
    assert ours.tied == theirs.tie_word_embeddings
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert set(ours.windows) == {getattr(theirs, "sliding_window", None)}


@pytest.mark.parametrize(
    "change",
    [
        {"final_logit_softcapping": 30.0},
        {"attention_multiplier": 0.1},
        {"use_rope": False},
        {"partial_rotary_factor": 0.5},
        {"rope_interleaved": True},
        {"sliding_window": 128},
        {"layer_types": ["sliding_attention"] * 5},
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        {"rope_scaling": {"type": "mrope", "mrope_section": [1]}},
        {"rope_parameters": {"mrope_section": [1]}},
        {"rope_parameters": {"partial_rotary_factor": 0.5}},
        {"model_type": "mistral", "attention_bias": True},
        {"model_type": "qwen3", "layer_types": ["linear_attention"] * 5},
        {"model_type": "mamba"},
        {"hidden_act": "gelu"},
        {"quantization_config": {"bits": 4}},
    ],
)
def test_what_the_decoder_cannot_compute_is_refused(prose: Prose, change: dict):
    raw = LlamaConfig(**SIZES).to_dict() | change
    with pytest.raises(ModelUnsupported) as caught:
        DecoderConfig.parse(raw, where="config.json")
    prose(caught)


def _stored(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.contiguous() for name, tensor in model.state_dict().items()}


def test_tensors_that_the_decoder_does_not_use_are_refused(prose: Prose, tmp_path: Path):
    tensors = _stored(random_model(CONFIGS["mistral"], tmp_path))
    file, last = tmp_path / "model.safetensors", "model.layers.4.self_attn"
    save_file(tensors | {f"{last}.rotary_emb.inv_freq": torch.ones(8)}, file)
    Decoder.load(tmp_path)  # a table that old checkpoints hold and nobody reads
    save_file(tensors | {f"{last}.q_proj.bias": torch.ones(64)}, file)
    with pytest.raises(ModelUnsupported) as caught:
        Decoder.load(tmp_path)
    prose(caught)


def test_a_bias_that_the_configuration_asks_for_must_be_there(prose: Prose, tmp_path: Path):
    tensors = _stored(random_model(CONFIGS["llama with biases"], tmp_path))
    del tensors["model.layers.0.self_attn.o_proj.bias"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelUnsupported) as caught:
        Decoder.load(tmp_path)
    prose(caught)


def test_a_tied_head_may_be_stored_twice_but_not_differ(prose: Prose, tmp_path: Path):
    model = random_model(CONFIGS["smollm3, layers without rope"], tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    raw.pop("tie_word_embeddings", None)  # as in SmolLM3's own file: tied is this family's default
    (tmp_path / "config.json").write_text(json.dumps(raw))
    ids = torch.arange(3, 40)
    tensors = _stored(model)
    with torch.no_grad():
        theirs = model(ids[None]).logits[0]
        for stored in (True, False):
            if not stored:
                tensors.pop("lm_head.weight", None)
            else:
                tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
            save_file(tensors, tmp_path / "model.safetensors")
            ours = logits(Decoder.load(tmp_path), ids)
            torch.testing.assert_close(ours, theirs, atol=5e-5, rtol=0)
    save_file(tensors | {"lm_head.weight": torch.ones(300, 64)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelUnsupported) as caught:
        Decoder.load(tmp_path)
    prose(caught)


def test_a_second_copy_of_the_weights_is_not_loaded(tmp_path: Path):
    random_model(CONFIGS["mistral"], tmp_path)
    save_file(
        {"layers.0.attention.wq.weight": torch.ones(4)}, tmp_path / "consolidated.safetensors"
    )
    Decoder.load(tmp_path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("alpha_pattern", {"q_proj": 32}),
        ("rank_pattern", {"q_proj": 2}),
        ("use_rslora", True),
        ("use_dora", True),
        ("modules_to_save", ["lm_head"]),
        ("bias", "all"),
        ("lora_bias", True),
        ("alora_invocation_tokens", [1]),
        ("layer_replication", [[0, 2]]),
        ("trainable_token_indices", [3]),
        ("init_lora_weights", "pissa"),
        ("peft_type", "IA3"),
        ("a_field_of_a_later_peft", {"factor": 2}),
    ],
)
def test_an_adapter_that_is_more_than_plain_lora_is_refused(
    prose: Prose, tiny_llama_dir: Path, tmp_path: Path, field: str, value: object
):
    config = DecoderConfig.read(tiny_llama_dir)
    Lora.init(config).save(tmp_path, base_model="tiny")
    file = tmp_path / "adapter_config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps(LoraConfig(r=8, lora_alpha=16).to_dict() | settings, default=list))
    Lora.load(tmp_path, config)  # all that PEFT writes by default
    file.write_text(json.dumps(settings | {field: value}))
    with pytest.raises(ConfigError) as caught:
        Lora.load(tmp_path, config)
    prose(caught)


def test_an_adapter_of_another_model_is_refused(prose: Prose, tiny_llama_dir: Path, tmp_path: Path):
    Lora.init(DecoderConfig.parse(LlamaConfig(**SIZES).to_dict(), where="x")).save(
        tmp_path, base_model="other"
    )
    with pytest.raises(ConfigError) as caught:
        Lora.load(tmp_path, DecoderConfig.read(tiny_llama_dir))
    prose(caught)


def test_processes_share_the_pages_of_a_large_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A model above the threshold is laid out once in the cache, and loads equal from there."""
    monkeypatch.setenv("HONE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("hone.models.weights.SHARE_FROM_BYTES", 0)
    random_model(CONFIGS["qwen2"], tmp_path / "model")
    ids = torch.arange(3, 30)
    first = Decoder.load(tmp_path / "model")
    (shared,) = (tmp_path / "home" / "weights").glob("*.safetensors")
    written = shared.stat().st_mtime_ns
    second = Decoder.load(tmp_path / "model")
    assert shared.stat().st_mtime_ns == written
    assert torch.equal(logits(first, ids), logits(second, ids))
    assert str(shared) in Path("/proc/self/maps").read_text()


_LOAD = """
import sys
from pathlib import Path
from hone.models import weights
from hone.models.decoder import Decoder
weights.SHARE_FROM_BYTES = 0
write = weights._write_whole
def watched(*arguments):
    print("wrote", flush=True)
    write(*arguments)
weights._write_whole = watched
print("ready", flush=True)
sys.stdin.readline()
Decoder.load(Path(sys.argv[1]))
"""


@pytest.mark.e2e
def test_processes_that_load_at_once_lay_out_once(tmp_path: Path):
    random_model(CONFIGS["qwen2"], tmp_path / "model")
    environment = os.environ | {"HONE_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-c", _LOAD, str(tmp_path / "model")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, env=environment, **pipes) for _ in range(3)]
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    wrote = [process.communicate("go\n", timeout=PATIENCE_S)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert sorted(wrote) == ["", "", "wrote\n"]


def test_laid_out_weights_of_replaced_sources_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HONE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("hone.models.weights.SHARE_FROM_BYTES", 0)
    home = tmp_path / "home" / "weights"

    def cached() -> set[str]:
        return {file.name for file in home.iterdir() if file.suffix != ".lock"}

    for name in ("one", "two"):
        random_model(CONFIGS["qwen2"], tmp_path / name)
        Decoder.load(tmp_path / name)
    assert len(cached()) == 4  # the weights of both, and what each was made from
    before = cached()
    os.utime(tmp_path / "one" / "model.safetensors", ns=(1, 1))  # written anew
    (home / "interrupted.safetensors.part").touch()
    Decoder.load(tmp_path / "one")
    assert len(cached()) == 4 and len(cached() & before) == 2  # those of "two" stay
    shutil.rmtree(tmp_path / "two")
    assert len(prune(home)) == 1 and len(cached()) == 2
    Decoder.load(tmp_path / "one")
