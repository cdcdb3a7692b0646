"""`hone finetune` whose output_dir takes no more: the readable error is the last line."""

import subprocess
import sys
from pathlib import Path

import pytest
from tests.e2e.conftest import Finetune, Server
from tests.e2e.test_kill import prepared
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.slow


def test_a_run_whose_files_cannot_grow_ends_with_the_readable_error(
    server: Server, environment: dict[str, str], tmp_path: Path
):
    """The kernel refuses files of more than 12 KiB; events.jsonl is the first that must grow."""
    finetune: Finetune = prepared(tmp_path, server, environment, "full")
    program = (
        "import resource, sys; "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (12 << 10, resource.RLIM_INFINITY)); "
        "from hone.cli.app import main; sys.argv[0] = 'hone'; main()"
    )
    run = subprocess.run(
        [sys.executable, "-c", program, "finetune", *finetune.arguments],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert run.returncode == 1, run.stderr
    assert "Traceback" not in run.stderr
    last = run.stderr.rstrip("\n").rpartition("\n")[2]
    assert last.startswith("hone: out/") and "File too large" in last, run.stderr
    # The report is not a precondition: with space again, the same command completes the run.
    assert finetune.run() == 0, finetune.outputs[-1]
