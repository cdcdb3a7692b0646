"""Tests that need what this machine does not have are skipped, each with the reason.

A marker names the need (pyproject.toml lists them); everything else always runs. `make test` runs the tests without the
marker `e2e`, `make test-e2e` those with it (processes.py). Both run as many processes as there are cores (at most
MOST_PROCESSES), each with one thread: two pools of two threads on two cores wait for each other. At the end they print the
CPU seconds that all processes took; CPU_GOAL_S is the most that `make test` should take on two cores.
The properties draw the same examples in every run; `make test ARGS=--hypothesis-profile=search` draws new ones, ten times as many.
"""

import gc
import json
import logging
import os
import signal
import ssl
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings
from tests import processes

from hone.files import redact

if TYPE_CHECKING:
    from hone import LocalBackend

MOST_PROCESSES = 8  # each takes a gigabyte or two
CPU_GOAL_S = 600
CPU_LIMIT = "HONE_TEST_CPU_S"
"""A run that takes more CPU seconds fails. Nothing sets it: machines differ, so a gate only prints."""
OTHER_VERB = {"not e2e": "make test-e2e", "e2e": "make test"}
VLLM_PYTHON = "HONE_TEST_VLLM_PYTHON"  # `make test-vllm` sets it

if "PYTEST_XDIST_WORKER" in os.environ:  # before torch is imported, and for what the tests start
    os.environ.setdefault("OMP_NUM_THREADS", "1")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # So a shell starts what runs in its background; what the tests start must hear Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)

pytest_plugins = ["tests.prose"]
pytest.register_assert_rewrite("tests.conformance")  # its files are imported, not collected

settings.register_profile("same", derandomize=True)
settings.register_profile("search", max_examples=1000)
settings.load_profile("same")


def pytest_xdist_auto_num_workers() -> int:
    return min(
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        MOST_PROCESSES,
    )


def _no_cuda() -> str | None:
    import torch  # here, because most runs have no such test and torch takes seconds to load

    return None if torch.cuda.is_available() else "no CUDA device"


def _no_package(name: str) -> str | None:
    return None if find_spec(name) else f"{name} is not installed"


def _no_vllm() -> str | None:
    return None if os.environ.get(VLLM_PYTHON) else f"{VLLM_PYTHON} names no interpreter with vLLM"


NEEDS = {
    "gpu": _no_cuda,
    "vllm": _no_vllm,
    "browser": lambda: _no_package("playwright"),
    "trl": lambda: _no_package("trl"),
}


_new_context = ssl.create_default_context


@cache
def _context_of(cafile: str) -> ssl.SSLContext:
    return _new_context(cafile=cafile)


def _create_context(*args: Any, **options: Any) -> ssl.SSLContext:
    """All clients of httpx share a context; reading the certificates takes 0.05 s for each otherwise."""
    if not args and options.keys() == {"cafile"}:
        return _context_of(options["cafile"])
    return _new_context(*args, **options)


ssl.create_default_context = _create_context
processes.GUARD.install()
WORKERS: list[dict[str, float]] = []
"""What each process of pytest-xdist reported when it ended."""
LEFT_OUT: list[int] = []
"""How many tests `-m` left to the other verb."""


@pytest.fixture(autouse=True)
def _no_secrets_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process hides every secret that it was given; a test hides its own."""
    monkeypatch.setattr(redact, "SECRETS", redact.SecretValues())


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    processes.mark(items)  # first: `-m` reads the markers after this
    for marker, lacking in NEEDS.items():
        marked = [item for item in items if item.get_closest_marker(marker)]
        if marked and (reason := lacking()):
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=reason))
    # A file's tests stay in one process, so the long files begin first and short ones fill the end.
    long = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in long)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Free the collector of the million objects that imports leave: a full collection took 0.7 s."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    processes.GUARD.active = item.get_closest_marker("e2e") is None
    try:
        return (yield)
    finally:
        processes.GUARD.active = False


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    try:
        return (yield)
    finally:
        refused = processes.GUARD.take()
        if refused:  # hone may have taken the error for one of its own
            pytest.fail(refused[0], pytrace=False)


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    wants = {"not e2e": False, "e2e": True}.get(items[0].config.option.markexpr)
    if wants is not None and all((i.get_closest_marker("e2e") is None) is wants for i in items):
        LEFT_OUT.append(len(items))


def pytest_sessionfinish(session: pytest.Session) -> None:
    report = getattr(session.config, "workeroutput", None)
    if report is not None:
        report.update(cpu_s=sum(os.times()[:4]), left_out=sum(LEFT_OUT))
    elif _too_much() and session.exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    WORKERS.append(getattr(node, "workeroutput", {}))


def _cpu_s() -> float:
    """What the tests have taken so far, with the processes that they started and that have ended."""
    here = os.times()  # its children are the workers, which count themselves
    return sum(here[:2] if WORKERS else here[:4]) + sum(w.get("cpu_s", 0) for w in WORKERS)


def _too_much() -> bool:
    return _cpu_s() > float(os.environ.get(CPU_LIMIT) or "inf")


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config
) -> None:
    verb = OTHER_VERB.get(config.option.markexpr)
    if verb is None or config.option.collectonly:
        return
    goal = f" (goal for all of `make test`: {CPU_GOAL_S} s)" if verb == "make test-e2e" else ""
    terminalreporter.write_line(f"{_cpu_s():.0f} CPU seconds{goal}")
    if _too_much():
        limit = f"{CPU_LIMIT}={os.environ[CPU_LIMIT]}"
        terminalreporter.write_line(
            f"FAILED: more than {limit}; find the tests with --durations=30"
        )
    left_out = max([sum(LEFT_OUT), *(int(w.get("left_out", 0)) for w in WORKERS)])
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and left_out:
        named = " ".join(config.invocation_params.args).partition(config.option.markexpr)[2].strip()
        terminalreporter.write_line(f"Nothing ran here. Run: {verb} ARGS={named!r}", red=True)
    elif left_out:
        terminalreporter.write_line(f"{verb} runs {left_out} more of these tests")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama that fits in a megabyte, with Qwen2.5's tokenizer and chat template."""
    from tests.chat.conftest import build_tokenizer
    from tests.server.conftest import write_model

    place = tmp_path_factory.mktemp("models") / "tiny-chat"
    return write_model(place, build_tokenizer("qwen2.5-instruct"))


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[LocalBackend]":
    """A whole server in a thread of this process, learner included; each test uses models of its own.

    The backend uses it as it would use the server of another command on the same root.
    """
    from tests.server.conftest import Server
    from tests.server.small_server import LearnerHere

    from hone import LocalBackend
    from hone.server.settings import Settings
    from hone.server.state import State
    from hone.types import SERVER_ADDRESS

    root = tmp_path_factory.mktemp("hone")
    settings = Settings(root=root, device="cpu", learner_threads=1)
    server = Server(State(settings, start_learner=LearnerHere), None).start()
    assert server._thread is not None
    server._thread.name = "shared server"
    # What it logs is in its own file where it is a process; here it must not reach a test's output.
    logging.getLogger("hone.server").addFilter(lambda line: line.threadName != "shared server")
    host, _, port = server.control_url.removeprefix("http://").partition(":")
    address = {"host": host, "port": int(port), "pid": os.getpid()}
    (root / SERVER_ADDRESS).write_text(json.dumps(address), encoding="utf-8")
    with LocalBackend(root, share=True) as backend:
        backend.start()
        assert backend.shared, "it did not find the server"
        yield backend
    server.stop()


@pytest.fixture(scope="session")
def process_server(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[LocalBackend]":
    """A server in processes of its own, for the e2e tests of a process; it takes seconds to load."""
    from hone import LocalBackend

    with LocalBackend(tmp_path_factory.mktemp("hone")) as backend:
        backend.start()
        yield backend


@pytest.fixture(scope="session")
def tiny_llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama that learns in seconds: vocabulary 512, untied, weights drawn wide (0.2).

    With a real vocabulary or narrow weights its distribution is flat, and no reward is ever seen.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.2,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    directory = tmp_path_factory.mktemp("tiny-llama")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(directory)
    return directory
