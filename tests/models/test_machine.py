"""Which device and number type the machine computes in."""

import pytest
import torch

from hone.models import machine


def test_a_cpu_computes_in_float32_and_is_not_tried():
    assert machine.choose("cpu") == ("cpu", torch.float32)
    if not torch.cuda.is_available():
        assert machine.choose() == ("cpu", torch.float32)


@pytest.mark.gpu
def test_a_cuda_device_with_units_for_it_computes_in_bfloat16():
    assert machine.choose() == ("cuda", torch.bfloat16)
    assert machine.choose("cuda:0") == ("cuda:0", torch.bfloat16)


def test_blas_is_preferred_on_arm_without_sve_only(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.backends.mkldnn, "set_flags", calls.append)
    for arch, capability in (("x86_64", "AVX2"), ("aarch64", "SVE256"), ("aarch64", "DEFAULT")):
        monkeypatch.setattr(machine.platform, "machine", lambda arch=arch: arch)
        monkeypatch.setattr(
            torch.backends.cpu, "get_cpu_capability", lambda capability=capability: capability
        )
        machine.prefer_blas()
    assert calls == [False]
