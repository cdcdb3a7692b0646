"""processes.py: a test of `make test` starts no server, makes no environment and installs nothing."""

import subprocess
import sys
import venv
from pathlib import Path

import pytest
from tests import processes
from tests.environments import ROOT
from tests.processes import forbidden

PYTHON = sys.executable
SERVER, INSTALLER = "starts a server", "installs packages or makes an environment"


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ([PYTHON, "-m", "hone", "serve", "--root", "r"], SERVER),
        ([PYTHON, "-W", "error", "-m", "hone", "serve-workflow", "--port", "0"], SERVER),
        (["/venv/bin/hone", "--log-level", "debug", "finetune"], SERVER),
        ([PYTHON, "-m", "uvicorn", "app:app"], SERVER),
        ([PYTHON, "-m", "vllm.entrypoints.openai.api_server"], SERVER),
        (["vllm", "serve", "model"], SERVER),
        ([PYTHON, "-c", "import hone; hone.LocalBackend('r').start()"], SERVER),
        (["sh", "-c", '"$@" & wait', "sh", PYTHON, "-m", "hone", "serve"], SERVER),
        (["sh", "-c", "exec hone serve --port 0"], SERVER),
        ([PYTHON, "-m", "pip", "install", "x"], INSTALLER),
        ([Path("/venv/bin/pip"), "install", "x"], INSTALLER),
        ([PYTHON, "-m", "venv", "place"], INSTALLER),
        ([b"npm", b"ci"], INSTALLER),
        # What a test may start: a program that works for it alone.
        ([PYTHON, "-m", "hone.learner.child"], None),
        ([PYTHON, "-P", "-m", "hone.loggers.child"], None),
        ([PYTHON, "-m", "hone", "validate", "--config_file=serve.yml"], None),
        ([PYTHON, "-c", "print('serve')"], None),
        (["sh", "-c", "echo serve"], None),
        (["git", "status"], None),
        ([], None),
    ],
)
def test_what_only_an_e2e_test_may_start(command: list[str], why: str | None) -> None:
    assert forbidden(command) == why


def test_it_is_refused_before_it_starts_and_remembered(tmp_path: Path) -> None:
    command = [PYTHON, "-m", "hone", "serve", "--root", str(tmp_path / "root")]
    with pytest.raises(RuntimeError, match=r"this test starts a server .*pytest\.mark\.e2e"):
        subprocess.run(command, check=True)
    with pytest.raises(RuntimeError, match="this test makes an environment"):
        venv.create(tmp_path / "venv", with_pip=False)
    assert subprocess.run([PYTHON, "-c", "print(7)"], capture_output=True).stdout == b"7\n"
    assert [message.split(" (")[0] for message in processes.GUARD.take()] == [
        "this test starts a server",
        "this test makes an environment",
    ]
    assert not (tmp_path / "root").exists()


TESTS = """
import subprocess, sys
import pytest

def test_hidden():
    try:
        subprocess.run([sys.executable, "-m", "pip", "--version"])
    except RuntimeError:
        pass  # as code does that takes every error for one of its own

@pytest.mark.e2e
def test_marked():
    subprocess.run([sys.executable, "-m", "pip", "--version"], check=True)
"""


@pytest.mark.e2e
def test_a_test_that_breaks_the_rule_fails_and_the_marker_decides_which_verb_runs_it(
    tmp_path: Path,
) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "conftest.py").write_text("from tests.conftest import *\n")

    def run(*options: str) -> subprocess.CompletedProcess[str]:
        command = [PYTHON, "-m", "pytest", "-q", "-n", "1", "-c", str(ROOT / "pyproject.toml")]
        command += ["--rootdir", str(tmp_path), "-p", "no:cacheprovider"]
        return subprocess.run(
            [*command, *options], capture_output=True, text=True, cwd=ROOT, check=False
        )

    both = run(str(tmp_path))
    assert both.returncode == 1, both.stdout
    assert "2 passed, 1 error" in both.stdout
    assert "this test installs packages or makes an environment" in both.stdout
    here = run("-m", "e2e", str(tmp_path))
    assert here.returncode == 0 and "1 passed" in here.stdout, here.stdout
    assert "make test runs 1 more of these tests" in here.stdout
    other = run("-m", "not e2e", f"{tmp_path}/test_it.py::test_marked")
    assert other.returncode == pytest.ExitCode.NO_TESTS_COLLECTED, other.stdout
    named = f"Run: make test-e2e ARGS='{tmp_path}/test_it.py::test_marked'"
    assert f"Nothing ran here. {named}" in other.stdout


def test_every_folder_of_e2e_tests_exists() -> None:
    assert [folder for folder in processes.FOLDERS if not list(folder.glob("test_*.py"))] == []
