"""The learner on a CUDA device: the same step as on the CPU, within float32."""

import copy
from pathlib import Path

import pytest
import torch
from tests.learner.families import FAMILIES, Family, write_factors
from tests.learner.test_transformers_body import check_rounding
from tests.learner.test_transformers_body_families import (
    families,
    gradients,
    label_weights,
    random_lora,
    samples,
)

from hone.learner.forward import row_logprobs
from hone.learner.learner import Learner
from hone.learner.offload import to_device
from hone.learner.transformers_body import TransformersBody
from hone.learner.trie import pack
from hone.models.decoder import Decoder
from hone.models.fit import Recomputation
from hone.models.lora import Lora
from hone.models.lora_linear import LayerFactors, LoraLinear, LoraLinears
from hone.trajectory import Trajectory, TrajectoryGroup
from hone.types import Call, TrainConfig

pytestmark = [  # warnings of torch's compiler
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def job() -> list[TrajectoryGroup]:
    generator = torch.Generator().manual_seed(0)

    def ids(count: int) -> list[int]:
        return torch.randint(3, 512, (count,), generator=generator).tolist()

    groups = []
    for _ in range(3):
        prompt = ids(30)
        groups.append(
            TrajectoryGroup(
                trajectories=[
                    Trajectory(
                        calls=[
                            Call(prompt_ids=prompt, completion_ids=ids(12), logprobs=[-6.0] * 12)
                        ],
                        reward=float(i % 3),
                    )
                    for i in range(6)
                ]
            )
        )
    return groups


@pytest.mark.gpu
def test_a_step_on_cuda_equals_one_on_the_cpu(tiny_llama_dir: Path):
    config = TrainConfig(learning_rate=1e-3, beta=0.1, row_tokens=100)
    results = {}
    for device in ("cpu", "cuda"):
        decoder = Decoder.load(tiny_llama_dir, device=device)
        lora = Lora.init(decoder.config, seed=1, device=device)
        learner = Learner(decoder, lora, base_model="tiny")
        metrics = learner.train(job(), config).metrics
        results[device] = metrics, [t.detach().cpu() for _, t in learner.lora.parameters()]
    (cpu, ours), (cuda, theirs) = results["cpu"], results["cuda"]
    for name in ("learn/loss", "learn/grad_norm", "learn/entropy"):
        assert cuda[name] == pytest.approx(cpu[name], rel=1e-4), name
    for a, b in zip(ours, theirs, strict=True):
        # Adam's first step is lr x sign: only where a gradient is rounding may the sign differ.
        assert ((a - b).abs() > 1e-5).float().mean() < 0.01


@pytest.mark.gpu
@families
def test_flex_attention_equals_the_segments_of_the_cpu(
    family: Family, monkeypatch: pytest.MonkeyPatch
):
    """Gradients of a compiled body on CUDA, in float32, against the one on the CPU."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # convolutions
    torch._dynamo.reset()
    results = {}
    for device in ("cpu", "cuda"):
        model = family.model().to(device)
        body = TransformersBody(model, raw=model.config.to_dict())
        batch = pack(samples(3), row_tokens=200, fill=True, shared=not body.unshared)
        weight = label_weights(len(batch.labels), torch.float32)
        lora = random_lora(body, torch.float32)
        values = torch.empty(len(batch.labels))
        for row in batch.rows:
            logprobs, _ = row_logprobs(body, row, batch.labels, lora)
            (logprobs * weight[row.label].to(device)).sum().backward()
            values[row.label] = logprobs.detach().cpu()
        results[device] = values, gradients(lora).cpu()
    (ours, expected), (theirs, actual) = results["cpu"], results["cuda"]
    assert (ours - theirs).abs().max() < 1e-3
    assert (actual - expected).norm() / expected.norm() < 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("rank", [4, 70])
@pytest.mark.parametrize(("outputs", "inputs"), [([200], 64), ([64], 200), ([64, 40], 64)])
@pytest.mark.parametrize("joint", [True, False])
def test_layers_round_as_vllm_does(outputs: list[int], inputs: int, rank: int, joint: bool):
    """On the CPU in test_transformers_body.py."""
    check_rounding(outputs, inputs, rank=rank, joint=joint, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rows", "outputs", "ranks"), [(1, 40, 3), (300, 1032, 8), (65, 130, 70)])
def test_a_product_is_added_to_parts_of_wider_rows(
    rows: int, outputs: int, ranks: int, dtype: torch.dtype
):
    from hone.models.lora_kernel import add_product

    torch.manual_seed(0)
    wide = torch.randn(rows, outputs + 24, device="cuda", dtype=dtype)
    z = torch.randn(rows, ranks + 5, device="cuda", dtype=dtype)[:, :ranks]
    b = torch.randn(ranks, outputs, device="cuda", dtype=dtype).t()
    before = wide.clone()
    for y in (wide[:, :outputs], wide[:, 24:], wide.t().contiguous().t()[:, :outputs]):
        exact = y.double() + z.double() @ b.double().t()
        total = add_product(y, z, b)
        assert total.dtype == dtype
        assert (total - exact).norm() / exact.norm() < (2e-3 if dtype == torch.bfloat16 else 1e-6)
    assert torch.equal(wide, before)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("outputs", "inputs"), [([1032], 1504), ([1504], 1032), ([1032, 1032], 520), ([520, 72], 520)]
)
def test_compiled_joint_layers_have_exact_gradients(outputs: list[int], inputs: int):
    """The compiler pads rows of more than 1,024 numbers, so their stride is not their length."""
    torch.manual_seed(0)
    linears = [torch.nn.Linear(inputs, n, device="cuda").requires_grad_(False) for n in outputs]
    exact = [copy.deepcopy(linear).bfloat16().double() for linear in linears]
    layers = LoraLinears([linear.bfloat16() for linear in linears])
    layers.joint = True
    rank, rows = 8, 500
    x = torch.randn(1, rows, inputs, device="cuda").requires_grad_()
    a = (torch.randn(rank * len(outputs), inputs, device="cuda") / inputs**0.5).requires_grad_()
    b = [torch.randn(n, rank, device="cuda").requires_grad_() for n in outputs]
    weights = [torch.randn(1, rows, n, device="cuda") for n in outputs]
    layers.factors = [LayerFactors(a, own, rank * i) for i, own in enumerate(b)]
    write_factors(layers)
    parts = [LoraLinear(layers, i) for i in range(len(outputs))]

    def joint(x: torch.Tensor) -> list[torch.Tensor]:
        x = torch.nn.functional.silu(x.bfloat16())
        return [part(x) for part in parts]

    def separate(x: torch.Tensor) -> list[torch.Tensor]:
        x = torch.nn.functional.silu(x.double())
        z = (x @ a.double().t()).split(rank, -1)
        return [linear(x) + z[i] @ b[i].double().t() for i, linear in enumerate(exact)]

    results = []
    for layer in (torch.compile(joint, dynamic=False), separate):
        y = layer(x)
        loss = torch.stack([(one * w).sum() for one, w in zip(y, weights, strict=True)]).sum()
        results.append([*y, *torch.autograd.grad(loss, [x, a, *b])])
    for actual, expected in zip(*results, strict=True):
        assert (actual - expected).norm() / expected.norm() < 0.01


@pytest.mark.gpu
def test_recomputed_layers_change_nothing():
    """Whole layers give the same bits. A feed-forward part is fused differently: bfloat16 rounding."""
    torch._dynamo.reset()
    batch = pack(samples(3), row_tokens=200, fill=True)
    results = {}
    for name, chosen in (
        ("none", Recomputation()),
        ("a layer", Recomputation(layers=1)),
        ("layers", Recomputation(layers=2)),
        ("feed-forward", Recomputation(feed_forward=2)),
    ):
        model = FAMILIES[2].model(torch.bfloat16).to("cuda")
        body = TransformersBody(model, raw=model.config.to_dict())
        body.recomputation = lambda row, chosen=chosen: chosen
        lora = random_lora(body, torch.float32)
        for row in batch.rows:
            logprobs, _ = row_logprobs(body, row, batch.labels, lora)
            with torch.no_grad():
                scored, _ = row_logprobs(body, row, batch.labels, lora)
            assert torch.equal(scored, logprobs), name
            logprobs.sum().backward()
        results[name] = gradients(lora)
    for name in ("a layer", "layers"):
        assert torch.equal(results["none"], results[name])
    error = (results["feed-forward"] - results["none"]).norm() / results["none"].norm()
    assert error < 0.02, error


@pytest.mark.gpu
def test_a_row_is_launched_without_waiting_for_the_gpu():
    """Its passes with and without gradients; the learner then waits once, for the log-probabilities."""
    torch._dynamo.reset()
    batch = pack(samples(3), row_tokens=200, fill=True)
    row = batch.rows[0]
    model = FAMILIES[2].model(torch.bfloat16).to("cuda")
    body = TransformersBody(model, raw=model.config.to_dict())
    lora = random_lora(body, torch.float32)

    def passes() -> torch.Tensor:
        with torch.no_grad():
            row_logprobs(body, row, batch.labels, lora)
        logprobs, _ = row_logprobs(body, row, batch.labels, lora)
        logprobs.backward(to_device(torch.ones(len(row.label)), "cuda"))
        return logprobs.detach()

    for _ in range(2):  # the compiler may wait
        passes()
    torch.cuda.set_sync_debug_mode("error")
    try:
        logprobs = passes()
        with pytest.raises(RuntimeError, match="synchronizing"):  # torch would have noticed
            logprobs.cpu()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_released_memory_is_free_and_the_next_job_gives_the_same_bits(tiny_llama_dir: Path):
    """Frozen weights leave the GPU between jobs; parameters and compiled code stay valid."""
    body = TransformersBody.load(tiny_llama_dir, device="cuda", dtype=torch.bfloat16)
    size = sum(parameter.nbytes for parameter in body.model.parameters())
    config, hashes = TrainConfig(learning_rate=1e-3, row_tokens=512), []
    for _ in range(3):
        learner = Learner(body, Lora.init(body.layout, seed=1, device="cuda"), base_model="tiny")
        hashes.append(learner.train(job(), config).sha256)
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated()
        learner.release(weights=True)
        assert torch.cuda.memory_allocated() <= held - size
        # What is left is allocated: the adapter, its optimizer, and cuBLAS' work space.
        assert torch.cuda.memory_reserved() - torch.cuda.memory_allocated() < 64 * 2**20
        assert {parameter.device.type for parameter in body.model.parameters()} == {"cpu"}
    assert len(set(hashes)) == 1
