"""Without `ip` the harness starts a server, stops it, and finds its jobs again the next time."""

import json
import signal
import time
from pathlib import Path

import pytest
from tests.e2e.conftest import QWEN, Finetune, Server
from tests.e2e.test_kill import prepared

pytestmark = pytest.mark.slow


@pytest.fixture
def finetune(environment: dict[str, str], tmp_path: Path) -> Finetune:
    nobody = Server(port=9, inference_port=9, root=tmp_path, log=tmp_path / "log")
    finetune = prepared(tmp_path, nobody, environment, "own")
    config = (tmp_path / "train.yml").read_text().replace("ip: 127.0.0.1, port: 9, ", "")
    assert QWEN in config and "port" not in config
    (tmp_path / "train.yml").write_text(config)
    finetune.arguments += ["-o", "finetuning.num_epochs", "2"]
    return finetune


def test_killed_while_it_trains_the_job_is_found_again(finetune: Finetune):
    process = finetune.start()
    while not finetune.events("job_submitted") and process.poll() is None:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    assert finetune.finish(process) == -signal.SIGKILL, finetune.outputs[-1]
    (submitted,) = finetune.events("job_submitted")
    assert not finetune.events("job_done")

    assert finetune.run() == 0, finetune.outputs[-1]
    first, second = finetune.events("job_done")
    assert (first["job"], first["step"], second["step"]) == (submitted["job"], 1, 2)
    assert len(finetune.lines("trajectories/epoch_000.jsonl")) == 12
    report = json.loads((finetune.output / "report.json").read_text())
    assert report["epochs"] == 2
