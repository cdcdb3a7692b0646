"""Interrupted or not, a run with `max_concurrency: 1` ends with the same adapter, bit for bit.

The server is killed in `make chaos`: that case starts two more servers.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.e2e.conftest import Finetune, Server, serving
from tests.e2e.test_kill import prepared

EPOCHS = 3

pytestmark = pytest.mark.slow


def one_at_a_time(
    directory: Path, server: Server, environment: dict[str, str], name: str
) -> Finetune:
    """A run whose rollouts follow one another."""
    directory.mkdir()
    finetune = prepared(directory, server, environment, name)
    finetune.arguments += ["-o", "finetuning.num_epochs", str(EPOCHS)]
    finetune.arguments += ["-o", "eval.general.max_concurrency", "1"]
    return finetune


def adapters(server: Server, name: str) -> list[str]:
    """The hash of every step, step 0 first."""
    steps = server.get(f"/v1/training/models/trainer_project/{name}/checkpoints")
    return [one["sha256"] for one in sorted(steps, key=lambda one: one["step"])]


@pytest.fixture(scope="module")
def uninterrupted(
    server: Server, environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> list[str]:
    """The adapters of a run that nobody kills."""
    directory = tmp_path_factory.mktemp("uninterrupted") / "run"
    finetune = one_at_a_time(directory, server, environment, "whole")
    assert finetune.run() == 0, finetune.outputs[-1]
    hashes = adapters(server, "whole")
    assert len(set(hashes)) == EPOCHS + 1, "a step changed nothing"
    return hashes


def collecting(finetune: Finetune) -> bool:
    """In the middle of the second epoch's rollouts."""
    return len(finetune.lines("trajectories/epoch_001.jsonl")) >= 5


def training(finetune: Finetune) -> bool:
    """While the second epoch's job is queued or runs."""
    return len(finetune.events("job_submitted")) == 2


def start_until(finetune: Finetune, reached: Callable[[Finetune], bool]) -> subprocess.Popen[str]:
    """Start it; returns at a point of the run."""
    process = finetune.start()
    while not reached(finetune):
        if process.poll() is not None:
            finetune.finish(process)
            pytest.fail(f"it ended too early:\n{finetune.outputs[-1]}")
        time.sleep(0.002)
    return process


@pytest.mark.parametrize("reached", [collecting, training])
def test_a_killed_run_ends_with_the_adapter_of_one_that_was_not(
    reached: Callable[[Finetune], bool],
    uninterrupted: list[str],
    server: Server,
    environment: dict[str, str],
    tmp_path: Path,
):
    name = f"killed-{reached.__name__}"
    finetune = one_at_a_time(tmp_path / "run", server, environment, name)
    process = start_until(finetune, reached)
    process.kill()
    assert finetune.finish(process) == -signal.SIGKILL
    assert finetune.run() == 0, finetune.outputs[-1]
    assert adapters(server, name) == uninterrupted


@pytest.mark.skipif("HONE_CHAOS" not in os.environ, reason="slow; `make chaos` runs it")
def test_so_does_a_run_whose_server_was_killed(
    uninterrupted: list[str], environment: dict[str, str], tmp_path: Path
):
    root = tmp_path / "server"
    with serving(root, environment) as server:
        finetune = one_at_a_time(tmp_path / "run", server, environment, "orphan")
        process = start_until(finetune, collecting)
        os.kill(server.pid, signal.SIGKILL)
    ports = ("--port", str(server.port), "--inference-port", str(server.inference_port))
    with serving(root, environment, *ports) as server:
        if finetune.finish(process):  # too many rollouts failed before the server was back
            assert finetune.run() == 0, finetune.outputs[-1]
        assert adapters(server, "orphan") == uninterrupted
