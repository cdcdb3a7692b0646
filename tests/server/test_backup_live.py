"""Backups of a server process while it trains: each copy serves, and trains to the same bits."""

import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.patience import PATIENCE_S
from tests.server.api import AGENT, JOBS, job
from tests.server.test_run import serving
from typer.testing import CliRunner

from hone.cli.app import app

pytestmark = pytest.mark.e2e

CONFIG = {"learning_rate": 1e-3, "max_staleness": None}
COUNT = 5


def states(client: httpx.Client) -> list[str]:
    """Of the jobs, the oldest first."""
    return [job["state"] for job in reversed(client.get(JOBS).json())]


def wait_done(client: httpx.Client, count: int) -> None:
    until = time.monotonic() + PATIENCE_S
    while (now := states(client)).count("done") < count:
        assert not {"failed", "cancelled"} & set(now), client.get(JOBS).json()
        assert time.monotonic() < until, now
        time.sleep(0.02)


def hashes(client: httpx.Client) -> dict[int, str]:
    return {one["step"]: one["sha256"] for one in client.get(f"{AGENT}/checkpoints").json()}


def run(*arguments: Any) -> Any:
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exit_code == 0, result.output
    return result


def test_a_copy_of_a_training_server_serves_and_trains_to_the_same_bits(
    tiny_model: Path, tmp_path: Path
):
    live, copies = tmp_path / "live", []
    options = ("--device", "cpu", "--learner-threads", "1", "--engine", "embedded")
    with serving("--root", str(live), *options) as (_, output):
        base = f"http://127.0.0.1:{output['port']}"
        with httpx.Client(base_url=base, timeout=PATIENCE_S) as client:
            spec = {"name": "agent", "base_model": str(tiny_model), "rank": 4}
            assert client.post("/v1/training/models", json=spec).status_code == 201
            for number in range(COUNT):
                body = job(config=CONFIG, idempotency_key=f"k{number}")
                assert client.post(JOBS, json=body).status_code == 202
            for number in range(COUNT):  # one copy between any two jobs, or inside one
                wait_done(client, number)
                copies.append(tmp_path / f"copy-{number}")
                run("backup", copies[-1], "--root", live)
            wait_done(client, COUNT)
            trained = hashes(client)
            assert sorted(trained) == list(range(COUNT + 1))
            # A running server is asked to prune; it keeps the first and the newest.
            run("models", "prune", "--keep", 1, "--yes", "--root", live)
            assert sorted(hashes(client)) == [0, COUNT]
    for copy in (copies[1], copies[-1]):
        with serving("--root", str(copy), *options) as (_, output):
            base = f"http://127.0.0.1:{output['port']}"
            with httpx.Client(base_url=base, timeout=PATIENCE_S) as client:
                wait_done(client, COUNT)
                assert hashes(client) == trained
                repeated = client.post(JOBS, json=job(config=CONFIG, idempotency_key="k0")).json()
                assert (repeated["state"], repeated["step"]) == ("done", 1)
                question = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
                answer = client.post("/v1/chat/completions", json=question | {"model": "agent"})
                assert answer.status_code == 200, answer.text
                run("models", "delete", "agent", "--yes", "--root", copy)
                assert client.get(AGENT).status_code == 404
