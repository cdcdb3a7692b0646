"""What the machine computes fastest."""

import torch

from hone.models import machine


def test_bfloat16_must_be_clearly_faster(monkeypatch):
    for wide, narrow, chosen in (
        (1.0, 1.0, torch.float32),
        (1.0, 0.8, torch.float32),  # 1.25 times: not worth the precision
        (1.0, 0.7, torch.bfloat16),
        (1.0, 100.0, torch.float32),
    ):
        seconds = {torch.float32: wide, torch.bfloat16: narrow}
        monkeypatch.setattr(machine, "_product_s", seconds.__getitem__)
        machine.fastest_dtype.cache_clear()
        assert machine.fastest_dtype("cpu") is chosen
    machine.fastest_dtype.cache_clear()


def test_the_trial_itself_runs_and_warns_about_nothing():
    machine.fastest_dtype.cache_clear()
    assert machine.fastest_dtype("cpu") in (torch.float32, torch.bfloat16)


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
