"""tasks/interrupt.py: one Ctrl-C ends a run with a report, two exit at once, and asyncio logs nothing."""

import asyncio
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import httpx2
import pytest
import yaml
from filelock import FileLock
from tests.finetune.command import DOCUMENT, Command
from tests.patience import PATIENCE_S

from hone.tasks import interrupt
from hone.tasks.interrupt import INTERRUPTED, Interrupts

pytestmark = pytest.mark.usefixtures("ctrl_c")


def test_the_first_cancels_the_task_and_its_cleanup_is_not_disturbed(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(interrupt, "SAME_S", 1e9)  # however slow this machine is
    cleaned = []

    async def run(interrupts: Interrupts) -> None:
        interrupts.cancel_on_interrupt()
        signal.raise_signal(signal.SIGINT)
        try:
            await asyncio.Event().wait()
        finally:
            signal.raise_signal(signal.SIGINT)  # the same Ctrl-C, passed on by `uv run`
            await asyncio.sleep(0)
            cleaned.append(True)

    with Interrupts() as interrupts, pytest.raises(asyncio.CancelledError):
        asyncio.run(run(interrupts))
    assert cleaned and interrupts.received
    assert capfd.readouterr().err.count("press Ctrl-C again to exit at once") == 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_it_ends_in_order_if_stderr_is_closed():
    """As in `hone finetune 2>&1 | head`."""
    reader, writer = os.pipe()
    os.close(reader)
    stderr = os.dup(2)

    async def run(interrupts: Interrupts) -> None:
        interrupts.cancel_on_interrupt()
        signal.raise_signal(signal.SIGINT)
        await asyncio.Event().wait()

    os.dup2(writer, 2)
    try:
        with Interrupts() as interrupts, pytest.raises(asyncio.CancelledError):
            asyncio.run(run(interrupts))
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(writer)
    assert interrupts.received


def test_asyncio_s_errors_are_logged_at_debug_level(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
):
    async def fails() -> None:
        raise ConnectionError("cut off")

    async def run(interrupts: Interrupts) -> None:
        interrupts.cancel_on_interrupt()
        task = asyncio.create_task(fails())
        await asyncio.sleep(0)
        signal.raise_signal(signal.SIGINT)
        del task  # nobody will ask how it ended
        await asyncio.Event().wait()

    caplog.set_level(logging.DEBUG)
    with Interrupts() as interrupts, pytest.raises(asyncio.CancelledError):
        asyncio.run(run(interrupts))
    (record,) = [r for r in caplog.records if "never retrieved" in r.getMessage()]
    assert (record.levelname, record.name) == ("DEBUG", "hone")


def test_before_there_is_a_run_it_is_what_it_always_was():
    with Interrupts(), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_a_program_that_listens_itself_keeps_listening():
    heard = []
    signal.signal(signal.SIGINT, lambda *_: heard.append(1))
    with Interrupts() as interrupts:
        signal.raise_signal(signal.SIGINT)
    assert heard == [1] and not interrupts.received


STUBBORN = """
import asyncio, threading, time
from hone.tasks.interrupt import Interrupts

async def run(interrupts):
    interrupts.cancel_on_interrupt()
    print("running", flush=True)
    try:
        await asyncio.Event().wait()
    finally:
        print("cleaning", flush=True)
        time.sleep(600)  # a clean-up that blocks the loop itself

threading.Thread(target=time.sleep, args=(600,)).start()  # and a thread nobody ends
with Interrupts() as interrupts:
    asyncio.run(run(interrupts))
"""


def test_the_second_ctrl_c_exits_at_once():
    process = subprocess.Popen(
        [sys.executable, "-c", STUBBORN],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stdout is not None and process.stdout.readline() == "running\n"
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "cleaning\n"
    time.sleep(interrupt.SAME_S * 1.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == INTERRUPTED
    assert "Traceback" not in stderr and "asyncio" not in stderr


HANGS = """
import asyncio
import atexit
import threading
import time

atexit.register(print, "exit function")

async def run(kind):
    print("running", flush=True)
    if kind == "blocks the loop":
        time.sleep(600)
    if kind == "leaves a thread":
        threading.Thread(target=time.sleep, args=(600,)).start()
        return
    await asyncio.Event().wait()
"""


@pytest.mark.e2e
@pytest.mark.parametrize("kind", ["waits", "blocks the loop", "leaves a thread", "nothing runs"])
def test_a_served_workflow_is_ended_whatever_it_does(kind: str, tmp_path: Path):
    """Only a workflow that blocks the event loop or leaves a thread needs a second Ctrl-C."""
    (tmp_path / "agent_hangs.py").write_text(HANGS)
    file = tmp_path / "hangs.yml"
    file.write_text("workflow: {_type: python, target: 'agent_hangs.py:run'}\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "hone", "serve-workflow", f"--config_file={file}", "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    url = process.stdout.readline().split()[-1]
    answers: list[httpx2.Response] = []

    def ask() -> None:
        with suppress(httpx2.TransportError):  # the service exited at once
            answers.append(httpx2.post(f"{url}/generate", json=kind, timeout=PATIENCE_S))

    client = threading.Thread(target=ask)
    if kind != "nothing runs":
        client.start()
        assert process.stdout.readline() == "running\n"
    if kind == "leaves a thread":
        client.join()
    process.send_signal(signal.SIGINT)
    if kind in ("blocks the loop", "leaves a thread"):
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(interrupt.SAME_S * 5)
        process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == INTERRUPTED
    assert stderr.startswith("\nStopping; press Ctrl-C again to exit at once\n")
    assert "Traceback" not in stderr
    assert ("exit function" in stdout) == (kind in ("waits", "nothing runs"))
    if kind == "waits":
        client.join()
        assert answers[0].status_code == 503 and "the service is stopping" in answers[0].text


@pytest.mark.e2e
def test_a_server_that_is_starting_is_ended_at_once(tmp_path: Path):
    """It waits for a root that an orphan seems to use, and would say after a minute that it cannot.

    The command runs in the background of a script: its shell starts it with SIGINT ignored.
    """
    command, root = Command(tmp_path), tmp_path / "root"
    document = {
        **DOCUMENT,
        "trajectory_builders": {"b": {"_type": "rollouts", "num_generations": 2}},
        "trainer_adapters": {
            "a": {
                "_type": "hone_server",
                "backend": {"name": "agent", "base_model": "nobody/none", "root": str(root)},
            }
        },
    }
    command.file.write_text(yaml.safe_dump(document))
    root.mkdir()
    orphan = subprocess.Popen([sys.executable, "-c", ""])
    orphan.wait()
    (root / "server.owner").write_text(str(orphan.pid))
    with FileLock(root / "server.lock"):
        finetune = [sys.executable, "-m", "hone", "finetune", f"--config_file={command.file}"]
        process = subprocess.Popen(
            ["sh", "-c", '"$@" & echo $!; wait $!', "sh", *finetune],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        output = root / "logs" / "server.out"
        while process.poll() is None and not output.exists():
            time.sleep(0.01)
        os.kill(pid, signal.SIGINT)
        _, stderr = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == INTERRUPTED
    *_, last = stderr.splitlines()
    assert last.endswith(f"Interrupted. The same command resumes run {command.run_id}.")
    assert "Traceback" not in stderr
    assert output.read_text() == "", "it was not waited for"
