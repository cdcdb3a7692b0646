"""Block masks of a row against the dense mask; one compiled layer for ragged rows."""

from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from tests.learner.families import FAMILIES, write_factors
from tests.learner.test_forward import random_samples
from tests.learner.test_transformers_body_families import random_lora, samples
from torch import Tensor
from transformers import Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP, Qwen2RMSNorm

from hone.learner import flex
from hone.learner.samples import LabelledCall, Sample
from hone.learner.transformers_body import FLEX, TransformersBody
from hone.learner.trie import pack
from hone.models import fit
from hone.models.fit import padded_length
from hone.models.lora import Lora
from hone.models.lora_linear import LayerFactors, LoraLinear, LoraLinears


def padded(seed: int, length: int) -> tuple[Tensor, Tensor]:
    """`leave` and depth of a random row, padded."""
    (row,) = pack(random_samples(seed), row_tokens=10**6, fill=True).rows
    padding = length - len(row)
    assert padding >= 0, len(row)
    ends = torch.arange(len(row) + 1, length + 1)
    return torch.cat((row.leave, ends)), torch.nn.functional.pad(row.positions, (0, padding))


def dense(leave: Tensor, depth: Tensor, window: int | None) -> Tensor:
    index = torch.arange(len(leave))
    seen = (index[None, :] <= index[:, None]) & (index[:, None] < leave[None, :])
    if window is not None:
        seen &= depth[:, None] - depth[None, :] < window
    return seen


@pytest.mark.parametrize("window", [None, 1, 3, 20, 1000])
@pytest.mark.parametrize("seed", range(6))
def test_no_visible_pair_lies_outside_the_blocks(seed, window, monkeypatch):
    monkeypatch.setattr(flex, "BLOCK", 16)
    leave, depth = padded(seed, 1024)
    expected = dense(leave, depth, window)
    mask = flex.block_mask(leave, depth, window)
    blocks = expected.view(64, 16, 64, 16).transpose(1, 2)
    some, whole = blocks.any(-1).any(-1), blocks.all(-1).all(-1)
    partial, full = torch.zeros(64, 64).bool(), torch.zeros(64, 64).bool()
    for query in range(64):
        partial[query, mask.kv_indices[0, 0, query, : mask.kv_num_blocks[0, 0, query]].long()] = 1
        count = mask.full_kv_num_blocks[0, 0, query]
        full[query, mask.full_kv_indices[0, 0, query, :count].long()] = 1
    assert not (partial & full).any()
    assert (whole | ~full).all(), "a block that is not checked pair by pair has a hidden pair"
    assert (partial | full | ~some).all(), "a visible pair is skipped"
    if window is None:  # with a window, blocks are chosen by bounds that may be loose
        assert torch.equal(partial | full, some) and torch.equal(full, whole)
    query, key = torch.meshgrid(torch.arange(1024), torch.arange(1024), indexing="ij")
    zero = torch.zeros((), dtype=torch.int64)
    assert torch.equal(mask.mask_mod(zero, zero, query, key), expected)


@pytest.mark.e2e
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's compiler
def test_fifty_ragged_jobs_compile_nothing(monkeypatch):
    """After one row of each padded length, with and without an adapter. Both layers share the code.

    torch has no gradients of FlexAttention on a CPU, so layers are traced with gradients and run without.
    """
    torch_flex = import_module("torch.nn.attention.flex_attention")
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)
    monkeypatch.setattr(flex, "BLOCK", 16)
    monkeypatch.setattr(fit, "SHORTEST_ROW", 64)
    torch._dynamo.reset()
    graphs: list[Any] = []
    computes = True

    def backend(graph: Any, _: Any) -> Any:
        results: list[Tensor] = []

        @torch.no_grad()
        def run(*args: Any) -> list[Tensor]:
            if computes or not results:  # without a compiler, this takes long
                results[:] = graph(*args)
            return [result.detach().requires_grad_() for result in results]

        graphs.append(graph)
        return run

    family = next(family for family in FAMILIES if family.name == "Mistral")
    one, other = (family.model() for _ in range(2))
    raw, options = one.config.to_dict(), {"backend": backend}
    compiled = TransformersBody(one, raw=raw, attention=FLEX, compile_options=options)
    plain = TransformersBody(other, raw=raw)
    adapters = [random_lora(compiled, torch.float32) for _ in range(2)]
    rows: set[tuple[int, int]] = set()  # lengths before and after padding

    def run_job(job: int, lora: Lora | None) -> None:
        (row,) = pack(samples(job)[: 3 + job % 2 * 3], row_tokens=10**6, fill=True).rows
        padded = compiled.arranged(row)
        rows.add((len(row), len(padded)))
        with torch.set_grad_enabled(job % 3 > 0):  # scoring runs the code of training
            actual = compiled.hidden(padded, lora)[padded.query_node]
            if computes:
                expected = plain.hidden(row, lora)[row.query_node]
                torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)

    for job in range(2):
        run_job(job, adapters[0])
        run_job(job, None)
    assert len(graphs) == 4
    for job in range(2, 52):
        computes = job % 10 < 2
        lora = adapters[job % 4 // 2] if job % 5 else None
        with torch.no_grad():
            for _, leaf in () if lora is None else lora.parameters():
                leaf.add_(0.01 * torch.randn(leaf.shape))
        run_job(job, lora)
    assert len(graphs) == 4
    assert len(rows) >= 20 and {length for _, length in rows} == {64, 128}
    torch._dynamo.reset()


@pytest.mark.e2e  # compiles for seconds
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's compiler
def test_a_compiled_layer_stores_gate_and_up_and_not_what_follows_from_them():
    """Their product and the normalised input are computed again in the backward pass."""
    flex.configure_compiler()
    torch._dynamo.reset()
    torch.manual_seed(0)
    config = Qwen2Config(hidden_size=16, intermediate_size=64, hidden_act="silu")
    norm, part = Qwen2RMSNorm(16).double(), Qwen2MLP(config).double()
    factors: list[Tensor] = []
    for names in (("gate_proj", "up_proj"), ("down_proj",)):
        layers = LoraLinears([part.get_submodule(name) for name in names])  # pyright: ignore[reportArgumentType]
        layers.joint = True
        a = torch.randn(2 * len(names), layers.inputs).double().requires_grad_()
        factors.append(a)
        for index, name in enumerate(names):
            b = torch.randn(layers.outputs[index], 2).double().requires_grad_()
            layers.factors[index] = LayerFactors(a, b, 2 * index)
            factors.append(b)
            setattr(part, name, LoraLinear(layers, index))
        write_factors(layers)
    for parameter in (*norm.parameters(), *part.parameters()):
        parameter.requires_grad_(False)
    length = 2048
    x = torch.randn(1, length, 16).double().requires_grad_()

    def layer(x: Tensor) -> Tensor:
        return x + part(norm(x))

    def gradients(run: Any) -> tuple[list[int], list[Tensor]]:
        """Widths of the tensors that are stored per token, and the gradients."""
        stored: dict[int, int] = {}
        weights = {p.untyped_storage().data_ptr() for p in part.parameters()}

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if tensor.numel() % length == 0:
                width = storage.nbytes() // tensor.element_size() // length
                stored[storage.data_ptr()] = width
            elif tensor.numel() > 16 * 64:
                assert storage.data_ptr() in weights, f"a copy of weights: {tensor.shape}"
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            out = run(x)
        return sorted(stored.values()), list(torch.autograd.grad(out.square().sum(), [x, *factors]))

    compiled = torch.compile(layer, backend="aot_eager_decomp_partition", dynamic=False)
    stored, ours = gradients(compiled)
    eager, theirs = gradients(layer)
    assert [width for width in stored if width > 4] == [16, 128], stored
    assert 64 in eager, eager
    torch.testing.assert_close(ours, theirs)
    torch._dynamo.reset()


@pytest.mark.parametrize("seed", range(6))
def test_padding_lets_subtrees_begin_a_block_and_changes_no_path(seed, monkeypatch):
    monkeypatch.setattr(flex, "BLOCK", 16)
    (row,) = pack(random_samples(seed), row_tokens=10**6, fill=True).rows
    length = -(-len(row) // 16) * 16 + 64
    result = flex.padded(row, length)
    assert len(result) == len(result.leave) == len(result.positions) == length
    seen, expected = (dense(x.leave, x.positions, None) for x in (result, row))
    for new, old in zip(result.query_node.tolist(), row.query_node.tolist(), strict=True):
        assert torch.equal(result.token_ids[seen[new]], row.token_ids[expected[old]])
        assert torch.equal(result.positions[seen[new]], row.positions[expected[old]])
    assert seen.diagonal().all()


def test_completions_one_token_short_of_a_block_are_aligned(monkeypatch):
    """Two prompts of two blocks, three completions of 15 each: 16 after padding, so 10 blocks in all."""
    monkeypatch.setattr(flex, "BLOCK", 16)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 90, 32) for _ in range(2)]
    calls = [np.concatenate((p, rng.integers(3, 90, 16))) for p in prompts for _ in range(3)]
    made = [
        Sample(0, i, (LabelledCall(
            ids=ids, prompt=32, places=np.arange(16), logprobs=None, exact=True, temperature=1.0,
            advantage=1.0,
        ),))
        for i, ids in enumerate(calls)
    ]  # fmt: skip
    (row,) = pack(made, row_tokens=1000, fill=True).rows
    assert len(row) == 154
    result = flex.padded(row, 160)
    mask = flex.block_mask(result.leave, result.positions, None)
    # Per prompt: its own two blocks see 1 and 2, each completion its own and the prompt's two.
    blocks = mask.kv_num_blocks + mask.full_kv_num_blocks
    assert blocks[0, 0].tolist() == [1, 2, 3, 3, 3, 1, 2, 3, 3, 3]
    assert mask.kv_num_blocks[0, 0].tolist() == [1] * 10
    plain = torch.nn.functional.pad(row.leave, (0, 6))
    plain[-6:] = torch.arange(155, 161)
    assert flex.block_mask(plain, torch.zeros(160).long(), None).kv_num_blocks.sum() > 20


@pytest.mark.parametrize("seed", range(3))
def test_the_blocks_are_those_that_torch_makes_of_every_pair(seed):
    from torch.nn.attention.flex_attention import create_block_mask

    leave, depth = padded(seed, 1024)
    actual = flex.block_mask(leave, depth, None)
    wanted = create_block_mask(flex.trie_mask(leave), None, None, 1024, 1024, device="cpu")
    assert torch.equal(actual.to_dense(), wanted.to_dense())
    assert actual.full_kv_num_blocks is not None and wanted.full_kv_num_blocks is not None
    assert torch.equal(actual.full_kv_num_blocks, wanted.full_kv_num_blocks)
    assert torch.equal(actual.kv_num_blocks, wanted.kv_num_blocks)
    for name in ("q_num_blocks", "full_q_num_blocks"):
        blocks, expected = getattr(actual, name), getattr(wanted, name)
        assert torch.equal(blocks, expected), name


def test_the_limit_of_recompilations_is_above_what_a_server_needs():
    # A GPU of 141 GB holds rows of 196,608 tokens of the smallest models: 18 lengths. Two kinds of layers
    # (Gemma 3), five ranks, each with the base model in the same tensors: 2 x 18 x 11 = 396.
    lengths = {padded_length(tokens) for tokens in range(1, 196_609, 64)}
    assert len(lengths) == 18
    assert 2 * len(lengths) * (2 * 5 + 1) == 396 <= flex.RECOMPILES


@pytest.mark.e2e  # it compiles for seconds
def test_reaching_the_limit_of_recompilations_is_an_error(monkeypatch):
    """torch would go on without a compiler, and FlexAttention then holds every pair of a row."""
    from torch._dynamo.exc import FailOnRecompileLimitHit

    def double(x: Tensor) -> Tensor:
        return x * 2

    monkeypatch.setattr(flex, "RECOMPILES", 6)
    compiled = torch.compile(double, backend="eager", dynamic=False)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=3, fail_on_recompile_limit_hit=False):
        flex.configure_compiler()
        for length in range(1, flex.RECOMPILES + 1):
            compiled(torch.ones(length))
        with pytest.raises(FailOnRecompileLimitHit):
            compiled(torch.ones(flex.RECOMPILES + 1))
    torch._dynamo.reset()


def test_repeated_heads_have_the_gradient_of_repeat_interleave():
    """In bfloat16 with one rounding, of a sum in float32."""
    torch.manual_seed(0)
    for dtype in (torch.float64, torch.bfloat16):
        x = torch.randn(1, 2, 5, 4, dtype=dtype, requires_grad=True)
        grad = torch.randn(1, 14, 5, 4, dtype=dtype)
        out = flex._Repeated.apply(x, 7)
        assert torch.equal(out, x.repeat_interleave(7, 1))
        (actual,) = torch.autograd.grad(out, x, grad)
        expected = grad.double().unflatten(1, (2, 7)).sum(2)
        torch.testing.assert_close(
            actual.double(), expected, rtol=2**-8 if dtype.itemsize == 2 else 1e-12, atol=1e-12
        )
