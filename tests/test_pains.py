"""What users of other systems suffer from before the first step: installing, defaults, waits.

docs/promises.md names these tests beside those that lie with the module they are about.
"""

import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter
from functools import cache
from importlib.metadata import distribution, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from hone.types import ModelSpec

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
CORE, SERVER, DEV = (
    [Requirement(line) for line in lines]
    for lines in (PROJECT["dependencies"], EXTRAS["server"], EXTRAS["dev"])
)
SOURCES = sorted((ROOT / "src").rglob("*.py"))

COMPILED = {"apex", "bitsandbytes", "deepspeed", "flash_attn", "triton", "xformers"}
"""Packages whose installation compiles kernels, or fits one CUDA only."""
STACKS = {"ray", "trl", "unsloth", "vllm"}
"""Systems that bring their own versions of torch and transformers."""


@cache
def imported() -> Counter[str]:
    """Top-level packages that hone imports anywhere, also inside functions."""
    packages: Counter[str] = Counter()
    for path in SOURCES:
        if path.name == "extension.py":  # runs in vLLM's own processes, never in hone's
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                packages.update(alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                packages[node.module.partition(".")[0]] += 1
    return packages


@pytest.mark.parametrize("need", [*CORE, *SERVER, *DEV], ids=lambda need: need.name)
def test_one_environment_has_everything(need: Requirement):
    """Harness, server and tools: each is pinned once, and what is pinned and what is here fit."""
    pins = re.findall(
        rf"^{re.escape(canonicalize_name(need.name))}==(\S+)$",
        (ROOT / "constraints.txt").read_text(encoding="utf-8").replace("_", "-").lower(),
        re.M,
    )
    assert len(pins) == 1, f"constraints.txt pins {need.name} {len(pins)} times"
    assert need.specifier.contains(pins[0], prereleases=True)
    assert need.specifier.contains(version(need.name), prereleases=True)


def test_what_they_need_in_turn_is_pinned_too():
    pins = set(re.findall(r"^(\S+)==", (ROOT / "constraints.txt").read_text("utf-8"), re.M))
    here, ahead = set[str](), [*CORE, *SERVER, *DEV]
    while ahead:
        need = ahead.pop()
        name = canonicalize_name(need.name)
        if f"{name}{sorted(need.extras)}" in here:
            continue
        here.add(f"{name}{sorted(need.extras)}")
        assert name in pins, f"constraints.txt does not pin {name}: it can change any day"
        for line in distribution(name).requires or []:
            inner = Requirement(line)
            if not inner.marker or any(
                inner.marker.evaluate({"extra": extra}) for extra in ("", *need.extras)
            ):
                ahead.append(inner)
    assert len(here) > len({*CORE, *SERVER, *DEV})


@pytest.mark.e2e
def test_both_halves_load_in_one_process_and_need_no_variable():
    modules = "hone.cli.app, hone.finetune.run, hone.server.run, hone.learner.learner"
    code = f"import {modules}, sys; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], env={}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert {"torch", "hone.finetune.run", "hone.server.run"} <= set(done.stdout.split())


def test_nothing_has_to_be_compiled():
    names = {need.name.replace("-", "_") for need in (*CORE, *SERVER)}
    assert "torch" in names and not names & COMPILED
    # torch for CUDA brings Triton, which its compiler needs. Only a GPU's kernel imports it.
    assert imported()["torch"] and imported().keys() & COMPILED == {"triton"}
    using = [path.name for path in SOURCES if "import triton" in path.read_text(encoding="utf-8")]
    assert using == ["lora_kernel.py"]
    sources = {path.suffix for path in (ROOT / "src").rglob("*") if path.is_file()}
    assert sources - {".pyc"} <= {".py", ".typed", ".j2"}


def test_no_version_is_held_back_for_another_package():
    for need in (*CORE, *SERVER):
        bounds = {bound.operator for bound in need.specifier}
        assert bounds == {">="}, f"{need}: a lower bound is all that hone asks for"
    assert not {need.name for need in (*CORE, *SERVER)} & STACKS
    assert not imported().keys() & STACKS


def test_an_adapter_begins_beside_every_linear_layer(tiny_llama_dir: Path):
    from hone.models.architecture import DecoderConfig
    from hone.models.lora import Lora

    spec = ModelSpec(name="agent", base_model=str(tiny_llama_dir))
    assert spec.alpha / spec.rank == 2.0
    lora = Lora.init(DecoderConfig.read(tiny_llama_dir), rank=spec.rank, alpha=spec.alpha)
    layers = Counter(
        name.split(".layers.")[1].split(".lora_")[0] for name, _ in lora.named()
    )  # A and B
    attention = [f"self_attn.{part}_proj" for part in "qkvo"]
    inner = [f"mlp.{part}_proj" for part in ("gate", "up", "down")]
    assert layers == {f"{i}.{name}": 2 for i in range(2) for name in [*attention, *inner]}


MAY_SLEEP = {
    # Between two attempts to reach a server, up to its patience; and, while a request waits for an
    # engine, between two looks at what it does to start, which are only shown.
    "backends/http.py": 2,
    "inference/embedded/engine.py": 1,  # a publish steps aside for running samples; it waits for nothing
    "inference/vllm/engine.py": 1,  # vLLM's workers tell nothing by themselves: asked up to a deadline
    "tasks/retries.py": 2,  # hone.retry: between two attempts of the user's own function
    # After the end of the session: between two attempts to reach a logger's service, up to its
    # timeout, and between two looks at what another process of the same logger has sent.
    "loggers/child.py": 1,
    "server/supervision.py": 1,  # the hour of the next pruning, later after failures
    # A rollout's deadline, then what the server held its calls; a call that is held is not polled.
    "workflow/deadline.py": 1,
}


def test_nobody_sleeps_until_something_has_happened():
    counts = Counter[str]()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in SLEEPS:
                counts[path.relative_to(ROOT / "src" / "hone").as_posix()] += 1
    assert counts == MAY_SLEEP, "wait for an event with a deadline, or say here what it waits for"


SLEEPS = {"asyncio.sleep", "time.sleep", "anyio.sleep", "sleep"}
