"""The transformers body in a learner: the decoder's results, files and hashes; what it refuses."""

import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.learner.families import FAMILIES, SIZES, VOCAB, Family, write_factors
from tests.learner.test_transformers_body_families import compared, gradients, random_lora, samples
from tests.prose import Prose
from torch.multiprocessing.reductions import StorageWeakRef

from hone.errors import ConfigError, ModelUnsupported
from hone.learner import flex
from hone.learner.body import DecoderBody, load_body
from hone.learner.learner import Learner
from hone.learner.offload import HostWeights
from hone.learner.picture import PICTURE, draw
from hone.learner.samples import make_samples
from hone.learner.transformers_body import FLEX, TransformersBody
from hone.learner.trie import PackedRow, pack
from hone.models.decoder import Decoder
from hone.models.fit import CUDA_LOGITS, Recomputation
from hone.models.lora import Lora
from hone.models.lora_linear import (
    LayerFactors,
    LoraLinear,
    LoraLinears,
    LoraModules,
    lora_linears,
)
from hone.models.machine import prefer_blas
from hone.models.shape import BODY, Linears, adapted_linears, restricted, runs_own_decoder
from hone.trajectory import TrajectoryGroup
from hone.types import TrainConfig

CONFIG = TrainConfig(learning_rate=1e-3, beta=0.1, groups_per_optimizer_step=1)
BY_NAME = {family.name: family for family in FAMILIES}


@pytest.fixture(scope="module")
def groups(make_group: Callable[..., TrajectoryGroup]) -> list[TrajectoryGroup]:
    return [
        make_group(
            [1, 5, 9, 30 + i, 4], [[7, 8, 9, 2], [7, 8, 10, 11, 2], [20, 2]], [1.0, 0.0, 0.5]
        )
        for i in range(3)
    ]


def learner_of(body: Any) -> Learner:
    lora = Lora.init(body.layout, rank=4, seed=3)
    return Learner(body, lora, base_model="tiny")


def test_a_job_gives_what_the_decoder_gives(
    tiny_llama_dir: Path, groups: list[TrajectoryGroup], tmp_path: Path
):
    own = learner_of(DecoderBody(Decoder.load(tiny_llama_dir, dtype=torch.float64)))
    theirs = learner_of(TransformersBody.load(tiny_llama_dir, dtype=torch.float64))
    assert own.lora.sha256 == theirs.lora.sha256
    a, b = own.train(groups, CONFIG).metrics, theirs.train(groups, CONFIG).metrics
    for name in ("learn/loss", "learn/grad_norm", "learn/entropy", "learn/kl"):
        assert b[name] == pytest.approx(a[name], rel=1e-4), name
    moved = [
        (x - y).abs().max()
        for (_, x), (_, y) in zip(own.lora.named(), theirs.lora.named(), strict=True)
    ]
    assert max(moved) < 1e-5
    # A checkpoint of one is continued by the other, optimizer included.
    for name, learner in (("own", own), ("theirs", theirs)):
        learner.save(tmp_path / name)
    config = [
        json.loads((tmp_path / n / "adapter_config.json").read_text()) for n in ("own", "theirs")
    ]
    assert config[0] == config[1]
    own.load(tmp_path / "theirs")
    theirs.load(tmp_path / "theirs")
    a, b = own.train(groups, CONFIG).metrics, theirs.train(groups, CONFIG).metrics
    assert b["learn/loss"] == pytest.approx(a["learn/loss"], rel=1e-4)


def test_a_pass_without_gradients_gives_the_bits_of_one_with_them(
    tiny_llama_dir: Path, groups: list[TrajectoryGroup]
):
    # Of the second step the old policy is scored in a pass of its own; nothing moves in between.
    learner = learner_of(TransformersBody.load(tiny_llama_dir))
    config = TrainConfig(learning_rate=0, groups_per_optimizer_step=1)
    assert learner.train(groups, config).metrics["learn/ratio"] == 1.0


def test_the_passes_of_a_job_recompute_the_same(
    tiny_llama_dir: Path, groups: list[TrajectoryGroup], monkeypatch: pytest.MonkeyPatch
):
    """Also that of the reference, which has no adapter: what is recomputed depends on the rank."""
    body = TransformersBody.load(tiny_llama_dir)
    ranks: list[int] = []

    def recomputation(row: PackedRow) -> Recomputation:
        ranks.append(body._rank)
        return Recomputation()

    monkeypatch.setattr(body, "recomputation", recomputation)
    learner_of(body).train(groups[:1], CONFIG, probe=False)
    assert ranks == [4, 4], "the reference, then the training pass"


def test_which_body_is_loaded(
    tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    assert isinstance(load_body(tiny_llama_dir, device="cpu", dtype=torch.float32), DecoderBody)
    monkeypatch.setenv(BODY, "transformers")
    assert isinstance(
        load_body(tiny_llama_dir, device="cpu", dtype=torch.float32), TransformersBody
    )
    monkeypatch.delenv(BODY)
    BY_NAME["Granite"].model().save_pretrained(tmp_path)
    body = load_body(tmp_path, device="cpu", dtype=torch.float32)
    assert isinstance(body, TransformersBody) and not body.unshared
    assert body.head.scale == pytest.approx(1 / 1.7)


def test_some_linear_layers_only(prose: Prose, groups: list[TrajectoryGroup], tmp_path: Path):
    model = BY_NAME["Granite"].model()
    raw = model.config.to_dict()
    body = TransformersBody(model, raw=raw)
    layout = restricted(body.layout, ["q_proj", "down_proj"])
    learner = Learner(body, Lora.init(layout, rank=4, seed=3), base_model="tiny")
    result = learner.train(groups, CONFIG)
    assert result.steps == 3 and result.sha256 == learner.lora.sha256
    learner.save(tmp_path)
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    assert settings["target_modules"] == ["down_proj", "q_proj"]
    other = learner_of(TransformersBody(BY_NAME["Granite"].model(), raw=raw))
    other.load(tmp_path)  # which is trained on as it is, and continues with the same bits
    assert other.lora.sha256 == learner.lora.sha256
    again = [one.train(groups, CONFIG).sha256 for one in (learner, other)]
    assert again[0] == again[1] != result.sha256
    with pytest.raises(ConfigError) as caught:
        restricted(body.layout, ["w1"])
    prose(caught)


def test_the_decoder_trains_all_linear_layers_or_none(
    prose: Prose, tiny_llama_dir: Path, groups: list[TrajectoryGroup], tmp_path: Path
):
    body = TransformersBody.load(tiny_llama_dir)
    part = Lora.init(restricted(body.layout, ["q_proj"]), rank=4)
    Learner(body, part, base_model="tiny").save(tmp_path)
    own = learner_of(DecoderBody(Decoder.load(tiny_llama_dir)))
    with pytest.raises(ConfigError) as caught:
        own.load(tmp_path)
    prose(caught)


def test_a_head_that_is_not_understood_is_refused(prose: Prose, monkeypatch: pytest.MonkeyPatch):
    model = BY_NAME["Granite"].model()
    raw = model.config.to_dict()
    monkeypatch.setattr(
        model.lm_head, "forward", lambda hidden: hidden @ model.lm_head.weight.t() + 3
    )
    with pytest.raises(ModelUnsupported) as caught:
        TransformersBody(model, raw=raw)
    prose(caught, difference=re.compile(r"\d\.\d+"))


def model_of(name: str, **sizes: Any) -> Any:
    """A random model of a family that is in no table of the docs."""
    config = getattr(transformers, f"{name}Config")(**sizes)
    return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(
    "name",
    [
        "Doge",  # of its masks
        "GPT2",
    ],
)
def test_a_model_that_cannot_be_trained_is_refused(prose: Prose, name: str):
    model = model_of(name, **SIZES)
    with pytest.raises(ModelUnsupported) as caught:
        TransformersBody(model, raw=model.config.to_dict())
    prose(caught)


def test_a_model_that_expects_contiguous_attention_is_trained():
    sizes = SIZES | {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "n_group": 1}
    sizes |= {"sliding_window": 7, "topk_group": 1, "moe_intermediate_size": 24}
    model = model_of("Afmoe", **sizes)
    body = TransformersBody(model, raw=model.config.to_dict())
    assert not body.unshared and body.windows == (7,)


SPARSE = {"head_dim": 16, "sliding_window": 7, "moe_intermediate_size": 24}


@pytest.mark.parametrize(
    ("name", "sizes", "frozen"),
    [
        (
            "Gemma4Text",
            {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2}
            | {"vocab_size_per_layer_input": VOCAB},
            "router",
        ),
        (
            "DeepseekV4",
            {"o_groups": 2, "o_lora_rank": 8, "q_lora_rank": 16, "n_routed_experts": 4},
            "o_a_proj",  # a subclass of nn.Linear that computes groups
        ),
    ],
)
def test_an_adapter_covers_no_router_and_no_layer_that_is_not_plain(
    name: str, sizes: dict[str, Any], frozen: str
):
    sizes = SIZES | SPARSE | sizes | {"layer_types": ["sliding_attention"] * 2}
    family = Family(name, lambda: getattr(transformers, f"{name}Config")(**sizes), "")
    model = family.model()
    assert any(frozen in path for path, _ in model.named_modules())
    layout = adapted_linears(model.config.to_dict(), model)
    assert not any(frozen in path for path in layout.adapted)
    assert max(compared(family, torch.float32)) < 1e-4


@pytest.mark.parametrize("name", ["Qwen2.5", "Phi-4", "OLMo 2"])
def test_what_is_recomputed_is_not_kept_and_changes_no_bit(name: str):
    model = BY_NAME[name].model()
    body = TransformersBody(model, raw=model.config.to_dict())
    lora = random_lora(body, torch.float32)
    (row,) = pack(samples(3), row_tokens=400, fill=True).rows
    activations: dict[Recomputation, int] = {}
    grads = []
    for chosen in (
        Recomputation(),
        Recomputation(feed_forward=1),
        Recomputation(feed_forward=2),
        Recomputation(feed_forward=2, layers=1),
        Recomputation(layers=2),
    ):
        body.recomputation = lambda row, chosen=chosen: chosen
        sizes: dict[int, int] = {}

        def keep(tensor: torch.Tensor, sizes: dict[int, int] = sizes) -> torch.Tensor:
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            hidden = body.hidden(row, lora)
        activations[chosen] = sum(sizes.values())
        hidden.square().sum().backward()
        grads.append(gradients(lora))
    assert all(torch.equal(grads[0], other) for other in grads[1:])
    assert list(activations.values()) == sorted(activations.values(), reverse=True)
    assert len(set(activations.values())) == len(activations)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("outputs", "inputs"),
    [([48], 16), ([16], 48), ([16], 16), ([16, 4, 4], 16), ([48, 48], 16), ([4, 6], 48)],
)
def test_joint_layers_have_the_gradients_of_separate_ones(
    outputs: list[int], inputs: int, bias: bool
):
    """With factors in one stack, in several, and with a layer that no adapter covers."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    try:
        linears = [torch.nn.Linear(inputs, n, bias=bias and n != 4) for n in outputs]
        layers = LoraLinears([linear.requires_grad_(False) for linear in linears])
        layers.scale = 0.5
        x = torch.randn(1, 5, inputs).requires_grad_()
        shared = torch.randn(3 * len(outputs), inputs).requires_grad_()
        own = [torch.randn(6, inputs).requires_grad_() for _ in outputs]
        b = [torch.randn(n, 3).requires_grad_() for n in outputs]
        weights = [torch.randn(1, 5, n) for n in outputs]
    finally:
        torch.set_default_dtype(torch.float32)
    stacked = [LayerFactors(shared, b[i], 3 * i) for i in range(len(outputs))]
    separate = [LayerFactors(own[i], b[i], 3) for i in range(len(outputs))]
    for factors in (stacked, separate, [None, *stacked[1:]], [None] * len(outputs)):
        layers.factors = list(factors)
        write_factors(layers)
        results = []
        for layers.joint in (False, True):
            y = [LoraLinear(layers, i)(x) for i in range(len(outputs))]
            loss = torch.stack([(one * w).sum() for one, w in zip(y, weights, strict=True)]).sum()
            grads = torch.autograd.grad(loss, [x, shared, *own, *b], allow_unused=True)
            results.append([*y, *(torch.zeros(()) if grad is None else grad for grad in grads)])
        for one_by_one, joint in zip(*results, strict=True):
            torch.testing.assert_close(joint, one_by_one)
    for one, linear in zip(LoraLinear(layers, 0).weight, linears[0].weight, strict=True):
        assert torch.equal(one, linear)


@pytest.mark.parametrize("joint", [True, False])
@pytest.mark.parametrize(("outputs", "inputs"), [([96], 32), ([32], 96), ([64, 32], 64)])
def test_layers_round_as_vllm_does(outputs: list[int], inputs: int, joint: bool):
    """vLLM adds an adapter's output to one that is rounded to bfloat16, and so loses the smallest parts."""
    check_rounding(outputs, inputs, rank=4, joint=joint)


def check_rounding(
    outputs: list[int], inputs: int, *, rank: int, joint: bool, device: str = "cpu"
) -> None:
    """Compiled on a GPU, as layers are there."""
    prefer_blas()  # torch would warn that bfloat16 is slow
    torch.manual_seed(0)
    x = torch.randn(1, 300, inputs, device=device, dtype=torch.bfloat16)
    linears = [torch.nn.Linear(inputs, n).to(device, torch.bfloat16) for n in outputs]
    bases = [linear.requires_grad_(False)(x) for linear in linears]
    layers = LoraLinears(linears)
    layers.joint, layers.scale = joint, 2.0
    a = torch.randn(rank * len(outputs), inputs, device=device) / inputs**0.5
    b = [torch.randn(n, rank, device=device) / (1000 * rank**0.5) for n in outputs]
    layers.factors = [LayerFactors(a, own, rank * i) for i, own in enumerate(b)]
    write_factors(layers)
    parts = [LoraLinear(layers, i) for i in range(len(outputs))]

    def run(x: torch.Tensor) -> list[torch.Tensor]:
        # The consumer would be one kernel with the addition, without rounding between them.
        return [3 * part(x).float() for part in parts]

    results = (run if device == "cpu" else torch.compile(run, dynamic=False))(x)
    for i, (one, base) in enumerate(zip(results, bases, strict=True)):
        z = torch.nn.functional.linear(x, a[rank * i : rank * (i + 1)].bfloat16())
        delta = z.double() @ (2 * b[i]).bfloat16().double().t()
        expected = (base.double() + delta).bfloat16()
        assert 0.2 < (expected == base).double().mean() < 0.8, (
            "the adapter is small, but not too small"
        )
        assert (one != 3 * expected.float()).double().mean() < 0.03


def test_joint_layers_compute_with_the_newest_factors():
    """After a step of the optimizer, with another rank, with fewer layers, and with none."""
    model = BY_NAME["Qwen2.5"].model().requires_grad_(False)
    layout = adapted_linears(model.config.to_dict(), model)
    modules = LoraModules(model, layout)
    modules.join()
    # Query and key are one product, gate and up another.
    assert len(lora_linears(model)) == 5 * model.config.num_hidden_layers
    weights = [parameter.clone() for parameter in model.parameters()]
    first, second = (Lora.init(layout, rank=rank).trainable_() for rank in (4, 3))
    keys, queries = (
        Lora.init(restricted(layout, names), rank=3).trainable_()
        for names in (["k_proj", "down_proj"], ["q_proj", "gate_proj"])
    )
    ids = torch.arange(1, 9)[None]

    def logits(joint: bool) -> torch.Tensor:
        for layers in lora_linears(model):
            layers.joint = joint
        return model(input_ids=ids, use_cache=False).logits

    base = logits(joint=True)
    for lora in (first, first, second, keys, queries, None, queries, first):
        with torch.no_grad():
            for _, leaf in () if lora is None else lora.parameters():
                leaf.add_(0.1 * torch.randn(leaf.shape))
        modules.attach(lora)
        expected = logits(joint=False)
        torch.testing.assert_close(logits(joint=True), expected, rtol=1e-4, atol=1e-5)
        assert torch.allclose(expected, base, atol=1e-4) is (lora is None)
    modules.detach()
    for parameter, weight in zip(model.parameters(), weights, strict=True):
        assert torch.equal(parameter, weight) and parameter.is_contiguous()


def test_joint_layers_with_one_weight_have_factors_of_their_own():
    """As the shared blocks of Zamba 2; a layer that no adapter covers shares the weight, too."""
    torch.manual_seed(0)
    linears = {name: torch.nn.Linear(8, 8, bias=False) for name in "abc"}
    weight = torch.nn.Parameter(torch.randn(8, 8), requires_grad=False)
    for linear in linears.values():
        linear.weight = weight
    model = torch.nn.ModuleDict(linears)
    layout = Linears({name: ((name, 8, 8),) for name in "ab"})
    modules = LoraModules(model, layout)
    modules.join()
    lora = Lora.init(layout, rank=3).trainable_()
    with torch.no_grad():
        for _, leaf in lora.parameters():
            leaf.normal_()
    x, before = torch.randn(5, 8), weight.clone()
    modules.attach(lora)
    for name in "ab":
        a, (b,) = lora.factors(name)
        expected = x @ before.t() + lora.scale * (x @ a.t()) @ b.t()
        torch.testing.assert_close(model[name](x), expected)
    torch.testing.assert_close(model["c"](x), x @ before.t())
    modules.detach()
    assert torch.equal(weight, before)


@pytest.mark.parametrize("count", [1, 2])
def test_the_memory_of_a_weight_is_free_when_the_cache_is_emptied(
    monkeypatch: pytest.MonkeyPatch, count: int
):
    """Otherwise a smaller tensor gets it, and the rest stays with torch: 1.2 GB of a 3B model."""
    layers = LoraLinears([torch.nn.Linear(8, 4, bias=False) for _ in range(count)])
    layers.factors[0] = LayerFactors(torch.randn(2, 8), torch.randn(4, 2), 0)
    old, freed = StorageWeakRef(layers.wide.untyped_storage()), list[bool]()
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.append(old.expired()))
    layers.make_room()
    assert freed == [True]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyboardInterrupt])
def test_the_base_model_is_itself_after_an_adapter_that_was_not_attached(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
):
    model = BY_NAME["Qwen2.5"].model().requires_grad_(False)
    layout = adapted_linears(model.config.to_dict(), model)
    modules = LoraModules(model, layout)
    modules.join()
    ids = torch.arange(1, 9)[None]
    base = model(input_ids=ids, use_cache=False).logits
    lora = Lora.init(layout, rank=3).trainable_()
    with torch.no_grad():
        for _, leaf in lora.parameters():
            leaf.normal_()
    calls: list[LoraLinears] = []

    def fail(layers: LoraLinears) -> None:
        calls.append(layers)
        if len(calls) == 4:
            raise error
        make_room(layers)

    make_room = LoraLinears.make_room
    monkeypatch.setattr(LoraLinears, "make_room", fail)
    with pytest.raises(error):
        modules.attach(lora)
    modules.attach(None)
    torch.testing.assert_close(model(input_ids=ids, use_cache=False).logits, base)


def test_a_kept_result_is_not_given_to_another_input():
    linears = [torch.nn.Linear(4, n) for n in (4, 2)]
    layers = LoraLinears(linears)
    layers.joint = True
    first, second = (LoraLinear(layers, i) for i in range(2))
    x, other = torch.randn(2, 3, 4)
    first(x)
    torch.testing.assert_close(second(other), linears[1](other))
    torch.testing.assert_close(second(other), linears[1](other))  # asked twice
    torch.testing.assert_close(first(other), linears[0](other))


DENSE = {"head_dim": 16, "num_experts_per_tok": 0}


@pytest.mark.parametrize(
    ("name", "sizes", "parts"),
    [
        ("Qwen2", {}, True),
        ("Lfm2", {"layer_types": ["conv", "full_attention"]}, False),
        ("Phi", {}, False),
        ("GPTNeoX", {}, False),
        ("NemotronH", {"layers_block_type": ["attention", "mlp"]} | DENSE, False),
    ],
)
def test_only_parts_that_can_be_recomputed_are_planned(
    name: str, sizes: dict[str, Any], parts: bool
):
    """The plan must be able to count on the part in every layer; NemotronH has it in one of two."""
    model = model_of(name, **SIZES | sizes)
    body = TransformersBody(model, raw=model.config.to_dict(), memory=CUDA_LOGITS + (8 << 20))
    body.device = torch.device("cuda")  # plans for it, and computes nothing
    (row,) = pack(samples(3), row_tokens=10**6, fill=True).rows
    plans = [body.recomputation(flex.padded(row, 500 * n)) for n in range(1, 30)]
    assert plans[0] == Recomputation() and plans[-1].layers == 2
    assert any(plan.feed_forward for plan in plans) is parts


@pytest.mark.parametrize("case", ["stored", "recomputed", "failed"])
def test_no_result_is_kept_of_a_layer_that_the_model_skips(
    monkeypatch: pytest.MonkeyPatch, case: str
):
    """As the layers that share the keys of an earlier one do; and as an error does."""
    model = BY_NAME["Qwen2.5"].model()
    body = TransformersBody(model, raw=model.config.to_dict())
    body.recomputation = lambda row: Recomputation(layers=2 * (case == "recomputed"))
    kept = lora_linears(model)
    body._lora.join()
    attention = model.get_decoder().layers[1].self_attn
    width = attention.k_proj.out_features
    counts: list[int] = []  # of the layers with a result that was not asked for

    def skipped(x: torch.Tensor) -> torch.Tensor:
        counts.append(sum(bool(layers._results) for layers in kept))
        if case == "failed":
            raise torch.OutOfMemoryError
        return x[..., :width]

    monkeypatch.setattr(attention.k_proj, "forward", skipped)
    (row,) = pack(samples(3), row_tokens=10**6, fill=True).rows
    with pytest.raises(torch.OutOfMemoryError) if case == "failed" else nullcontext():
        body.hidden(body.arranged(row), random_lora(body, torch.float32)).square().sum().backward()
    assert counts == [1] * (1 + (case == "recomputed"))
    assert not any(layers._results for layers in kept)
    assert all(layers._input is None for layers in kept)


@pytest.mark.e2e  # compiles for seconds
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's compiler
def test_a_compiled_feed_forward_part_that_is_recomputed_is_not_kept():
    model = BY_NAME["Qwen2.5"].model()
    body = TransformersBody(model, raw=model.config.to_dict())
    (part,) = body._feed_forward[0]
    body._lora.join()
    compiled = torch.compile(part, dynamic=False, backend="aot_eager_decomp_partition")
    body._lora.attach(random_lora(body, torch.float32))
    x = torch.randn(1, 64, model.config.hidden_size).requires_grad_()
    kept, grads = [], []
    for part.recompute in (False, True):
        for linears in part.linears:
            linears.joint = not part.recompute
        sizes: dict[int, int] = {}

        def keep(tensor: torch.Tensor, sizes: dict[int, int] = sizes) -> torch.Tensor:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            y = compiled(x)
        kept.append(sum(sizes.values()))
        grads += torch.autograd.grad(y.square().sum(), x)
    inner = 4 * x.shape[1] * model.config.intermediate_size
    assert kept[0] - kept[1] >= 2 * inner, (kept, inner)  # at least gate and up
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "heads", "device", "own"),
    [
        ("Qwen2.5", 4, "cpu", True),
        ("Qwen2.5", 4, "cuda", False),
        ("Qwen2.5", 8, "cuda:1", True),  # heads of 8, which FlexAttention does not compute
        ("Granite", 8, "cpu", False),
    ],
)
def test_the_own_decoder_runs_on_cpus_and_where_flex_attention_cannot(
    family: str, heads: int, device: str, own: bool
):
    config = next(f for f in FAMILIES if f.name == family).model().config.to_dict()
    config |= {"num_attention_heads": heads, "head_dim": config["hidden_size"] // heads}
    assert runs_own_decoder(config, device) is own


@pytest.mark.e2e  # it compiles for seconds
def test_a_row_is_padded_like_a_longer_one():
    model = BY_NAME["Qwen2.5"].model()
    body = TransformersBody(model, raw=model.config.to_dict(), attention=FLEX)
    (row,) = pack(samples(3), row_tokens=10**6, fill=True).rows
    assert len(row) < 512
    assert [len(body.arranged(row, like)) for like in (0, 513, 1500)] == [512, 768, 1536]


def test_the_compiler_has_hones_settings_in_every_thread_that_runs_a_layer():
    """The learner's process loads on one thread and trains on another; autograd has its own."""
    import torch._dynamo.config as dynamo
    import torch._functorch.config as functorch

    def in_thread(call: Callable[[], Any]) -> Any:
        with ThreadPoolExecutor(max_workers=1) as pool:
            return pool.submit(call).result()

    class Layer(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            stores = functorch.ban_recompute_materialized_backward
            seen.append((dynamo.recompile_limit, dynamo.fail_on_recompile_limit_hit, stores))
            return x.square()

    seen: list[tuple[int, bool, bool]] = []
    model = BY_NAME["Qwen2.5"].model()
    raw = model.config.to_dict()
    layer = in_thread(lambda: TransformersBody(model, raw=raw, attention=FLEX)._layers[0])
    layer.part, layer.recompute = Layer(), True
    x = torch.ones(3, requires_grad=True)
    y = in_thread(lambda: layer(x))
    in_thread(lambda: y.sum().backward())
    assert seen == [(flex.RECOMPILES, True, False)] * 2  # the pass and its recomputation


def test_a_job_of_joint_layers_gives_what_separate_ones_give(groups: list[TrajectoryGroup]):
    """With an optimizer step after every group: each computes with the factors of the step before."""
    adapters = []
    for joint in (False, True):
        model = BY_NAME["Qwen2.5"].model(torch.float64)
        body = TransformersBody(model, raw=model.config.to_dict())
        if joint:
            body._lora.join()
        learner = learner_of(body)
        assert learner.train(groups, CONFIG).metrics["learn/optimizer_steps"] > 1
        adapters.append(torch.cat([leaf.flatten() for _, leaf in learner.lora.parameters()]))
    torch.testing.assert_close(*adapters, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("joint", [False, True])
def test_weights_that_were_offloaded_train_the_same_bits(
    groups: list[TrajectoryGroup], joint: bool
):
    model = BY_NAME["Qwen2.5"].model()
    body = TransformersBody(model, raw=model.config.to_dict())
    if joint:
        body._lora.join()
    before = [(parameter, parameter.data) for parameter in model.parameters()]
    results = []
    for away in (False, True):
        learner = learner_of(body)
        if away:
            learner.release(weights=True)
            learner.release(weights=True)  # twice does no harm
            assert all(parameter.data_ptr() != data.data_ptr() for parameter, data in before)
        results.append(learner.train(groups, CONFIG).sha256)
    assert results[0] == results[1]
    assert [parameter for parameter, _ in before] == list(model.parameters()), "the same objects"


@pytest.mark.e2e  # it compiles for seconds
def test_the_picture_has_the_rows_of_a_job_without_sharing(
    groups: list[TrajectoryGroup], tmp_path: Path
):
    model = BY_NAME["LFM2"].model()
    body = TransformersBody(model, raw=model.config.to_dict())
    learner = learner_of(body)
    config = CONFIG.model_copy(update={"row_tokens": 1024})
    result = learner.train(groups, config, label_logprobs=True)
    paths = sum(len(group.trajectories) for group in groups)
    assert result.metrics["learn/micro_batches"] == paths
    assert result.metrics["learn/shared_tokens"] == 0
    learner.save(tmp_path, picture=True)
    made = make_samples(groups, config, vocab=body.vocab, max_positions=body.max_positions)
    expected = tmp_path / "expected.png"
    assert draw(made, config, expected, learner_logprobs=result.logprobs, shared=False)
    assert (tmp_path / PICTURE).read_bytes() == expected.read_bytes()


def test_a_partial_restore_of_weights_can_be_offloaded_again(monkeypatch: pytest.MonkeyPatch):
    """A restore that runs out of memory leaves nothing behind on the GPU."""
    model = BY_NAME["Qwen2.5"].model()
    weights = HostWeights(model, torch.device("cpu"))
    weights.release()
    host = [parameter.data_ptr() for parameter in model.parameters()]
    copy, copies = torch.Tensor.to, 0

    def copy_two(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        nonlocal copies
        copies += 1
        if copies == 3:
            raise torch.OutOfMemoryError
        return copy(tensor, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "to", copy_two)
        with pytest.raises(torch.OutOfMemoryError):
            weights.restore()
    weights.release()
    assert [parameter.data_ptr() for parameter in model.parameters()] == host
    weights.restore()
    returned = {parameter.data_ptr() for parameter in model.parameters()}
    assert not returned & set(host)
