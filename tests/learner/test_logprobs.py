"""Log-probabilities in chunks against log_softmax over all logits, gradients included."""

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hone.learner import logprobs
from hone.learner.logprobs import Head, Queries, label_logprobs
from hone.models.fit import CUDA_LOGITS


@pytest.fixture(params=[1, 3, 100], ids=lambda rows: f"{rows} rows a chunk")
def chunked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "CHUNK_BYTES", request.param * 11 * 8)


def queries() -> Queries:
    return Queries(
        node=torch.tensor([0, 2, 2, 5, 6]),
        temperature=torch.tensor([1.0, 0.5, 1.0, 2.0, 1.0], dtype=torch.float64),
        label_query=torch.tensor([0, 0, 1, 3, 3, 3, 4]),  # the third query has no label
        target=torch.tensor([4, 4, 9, 0, 1, 10, 3]),
    )


@pytest.mark.usefixtures("chunked")
def test_equals_log_softmax_with_its_gradient():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(7, 6, generator=generator, dtype=torch.float64)
    head = torch.randn(11, 6, generator=generator, dtype=torch.float64)
    scale = torch.randn(7, generator=generator, dtype=torch.float64)
    q = queries()
    theirs = hidden.clone().requires_grad_()
    full = (theirs[q.node] @ head.t() / q.temperature[:, None]).log_softmax(-1)
    expected = full[q.label_query, q.target]
    (expected * scale).sum().backward()
    ours = hidden.clone().requires_grad_()
    actual, entropy = label_logprobs(ours, head, q)
    (actual * scale).sum().backward()
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(entropy, -(full.exp() * full).sum(-1), rtol=1e-12, atol=1e-12)
    assert ours.grad is not None and theirs.grad is not None
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-12)
    assert not entropy.requires_grad


def test_without_gradients_the_same_values():
    hidden, head, q = torch.randn(7, 6), torch.randn(11, 6), queries()
    plain, entropy = label_logprobs(hidden, head, q)
    wanted, entropy_too = label_logprobs(hidden.clone().requires_grad_(), head, q)
    assert torch.equal(plain, wanted) and torch.equal(entropy, entropy_too)
    assert not plain.requires_grad


def test_bfloat16_sums_in_float32():
    hidden, head, q = torch.randn(7, 6).bfloat16(), torch.randn(11, 6).bfloat16(), queries()
    actual, _ = label_logprobs(hidden, head, q)
    assert actual.dtype == torch.float32
    logits = (hidden.float() @ head.float().t())[q.node] / q.temperature.float()[:, None]
    expected = logits.log_softmax(-1)[q.label_query, q.target]
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_extreme_logits_stay_finite():
    hidden = torch.full((1, 1), 1000.0, requires_grad=True)
    head = torch.tensor([[1.0], [-1.0]])
    q = Queries(
        node=torch.tensor([0]), temperature=torch.ones(1, dtype=torch.float64),
        label_query=torch.tensor([0, 0]), target=torch.tensor([0, 1]),
    )  # fmt: skip
    values, entropy = label_logprobs(hidden, head, q)
    assert values.tolist() == [0.0, -2000.0] and entropy.tolist() == [0.0]
    values.sum().backward()
    # d/dh of log p(1) = -1 - 1 = -2, of log p(0) = 1 - 1 = 0
    assert hidden.grad is not None and hidden.grad.item() == pytest.approx(-2.0)


@pytest.mark.parametrize("p", [0.5, 0.99, 0.9999, 0.999999])
def test_the_gradient_of_a_nearly_certain_token_is_exact_in_float32(p: float):
    # head[target] and p @ head agree in all but 1 - p of their digits; float32 has seven.
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 64, generator=generator)
    head = torch.randn(49152, 64, generator=generator) * 0.2
    others = (head[1:].double() @ hidden[0].double()).logsumexp(0)
    lacking = (
        others + torch.tensor(p / (1 - p)).double().log() - head[0].double() @ hidden[0].double()
    )
    head[0] += (lacking * hidden[0] / hidden[0].square().sum()).float()
    q = Queries(
        node=torch.tensor([0]), temperature=torch.ones(1, dtype=torch.float64),
        label_query=torch.tensor([0, 0]), target=torch.tensor([0, 7]),
    )  # fmt: skip
    for label in (0, 1):  # the favourite, and a token that is not
        expected = hidden.double().requires_grad_()
        full = (expected @ head.double().t()).log_softmax(-1)[0, q.target]
        full[label].backward()
        ours = hidden.clone().requires_grad_()
        values, _ = label_logprobs(ours, head, q)
        values[label].backward()
        assert ours.grad is not None and expected.grad is not None
        assert (ours.grad - expected.grad).norm() < 1e-4 * expected.grad.norm()
        assert values[label].item() == pytest.approx(full[label].item(), rel=1e-4)


def test_the_fused_passes_of_cuda_give_the_plain_numbers():
    """Uncompiled: log-probabilities, entropy, and the gradient with weights in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    logits = 5 * torch.randn(6, 300, generator=generator)
    logits[0, 7] = 60.0  # all but certain
    temperature = torch.tensor([1.0, 0.5, 1.0, 2.0, 1.0, 0.7])[:, None]
    query, target = torch.tensor([0, 0, 1, 3, 3, 5]), torch.tensor([7, 4, 9, 0, 299, 3])
    sums = logprobs.Sums(*logprobs.sums_of(logits, temperature))
    exact = (logits.double() / temperature).log_softmax(-1)
    torch.testing.assert_close(
        sums.logprobs(logits, temperature, query, target).double(),
        exact[query, target],
        rtol=1e-6,
        atol=1e-6,
    )
    entropy = -(exact.exp() * exact).sum(-1)
    torch.testing.assert_close(sums.entropy().double(), entropy, rtol=1e-5, atol=1e-6)
    assert torch.equal(sums.best[:, 0], logits.argmax(-1))
    # Rows of the head with a common part, which cancels only if the weights add up to zero.
    head = (torch.randn(300, 64, generator=generator) + 2).bfloat16()
    weights = logprobs.other_weights(logits, temperature, *sums[:3])
    assert weights.dtype == torch.bfloat16 and (weights.gather(1, sums.best) == 0).all()
    others = exact.exp().scatter(1, sums.best, 0.0)
    whole = (-others).scatter(1, sums.best, others.sum(-1, keepdim=True)) @ head.double()
    error = (sums.pull(weights, head).double() - whole).norm(dim=-1) / whole.norm(dim=-1)
    assert error.max() < 2**-8, (
        error
    )  # the gradient itself is rounded to bfloat16: 2**-9 of each number


class _LargestHeld(TorchDispatchMode):
    """The most bytes of results of at least `least` bytes that exist at once."""

    def __init__(self, least: int) -> None:
        super().__init__()
        self.least, self.held, self.most = least, 0, 0
        self._storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().nbytes() >= self.least:
                self._add(tensor.untyped_storage())
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._storages:
            return
        self._storages.add(key)
        self.held += size
        self.most = max(self.most, self.held)

        def freed() -> None:
            self._storages.discard(key)
            self.held -= size

        weakref.finalize(storage, freed)


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_the_logits_in_memory_are_those_of_the_plan(
    softcap: float | None, monkeypatch: pytest.MonkeyPatch
):
    """The plan of a CUDA row has room for them; the tensors are counted on a CPU, in float32."""
    rows, vocab, in_chunk = 48, 1000, 12
    hidden, weight = torch.randn(rows, 2, requires_grad=True), torch.randn(vocab, 2)
    head = Head(weight, softcap=softcap)
    q = Queries(
        node=torch.arange(rows), temperature=torch.ones(rows),
        label_query=torch.arange(rows), target=torch.arange(rows),
    )  # fmt: skip
    chunk = in_chunk * vocab * weight.itemsize
    monkeypatch.setattr(logprobs, "CHUNK_BYTES", chunk)
    with _LargestHeld(chunk // 2) as held:
        label_logprobs(hidden, head, q)
    chunks = held.most // chunk
    # Logits and odds, with a cap its slopes too; none of the chunk before.
    assert chunks == (2 if softcap is None else 3)
    assert chunks * logprobs._chunk_bytes(head, cuda=True) <= CUDA_LOGITS


@pytest.mark.parametrize(("count", "most", "size"), [(10, 4, 4), (9, 4, 3), (4, 4, 4), (1, 4, 1)])
def test_chunks_on_cuda_are_of_equal_size(count: int, most: int, size: int):
    assert logprobs._even(count, most) == size
