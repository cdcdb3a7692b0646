"""Attention over slots and prompts: what is rounded, and when."""

import pytest
import torch

from hone.inference.embedded.batch import attention_from_scores


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_bfloat16_scores_are_scaled_before_anything_is_rounded(device: str):
    generator = torch.Generator().manual_seed(0)
    # 64 products of about 4 x 4 each: scores of 100 and more, where bfloat16 has steps of 0.5.
    shapes = [(2, 3, 5, 64), (2, 3, 40, 64), (2, 3, 40, 64)]
    q, k, v = (
        (torch.randn(shape, generator=generator) * 4).to(device, torch.bfloat16) for shape in shapes
    )
    mask = torch.zeros(2, 1, 5, 40, dtype=torch.bfloat16, device=device)
    mask[..., 30:] = -torch.inf
    out, lse = attention_from_scores(q, k, v, mask)
    scores = q.double() @ k.double().transpose(-1, -2) / 8 + mask.double()
    assert scores.max() > 20
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=0, atol=1e-4)
    expected = scores.softmax(-1) @ v.double()
    assert (out.double() - expected).norm() / expected.norm() < 4e-3
    assert out.dtype == torch.bfloat16
