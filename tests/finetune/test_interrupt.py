"""finetune/interrupt.py: one Ctrl-C ends a run in order, two leave at once, and asyncio says nothing."""

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from hone.finetune import interrupt
from hone.finetune.interrupt import INTERRUPTED, Interrupts


@pytest.fixture(autouse=True)
def pythons_own_listener() -> Iterator[None]:
    """As a program starts; pytest's workers do not listen to Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_the_first_cancels_the_task_and_its_cleanup_is_not_disturbed(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(interrupt, "SAME_S", 1e9)  # however slow this machine is
    cleaned = []

    async def run(interrupts: Interrupts) -> None:
        interrupts.end_this()
        signal.raise_signal(signal.SIGINT)
        try:
            await asyncio.Event().wait()
        finally:
            signal.raise_signal(signal.SIGINT)  # the same Ctrl-C, passed on by `uv run`
            await asyncio.sleep(0)
            cleaned.append(True)

    with Interrupts() as interrupts, pytest.raises(asyncio.CancelledError):
        asyncio.run(run(interrupts))
    assert cleaned and interrupts.heard
    assert capfd.readouterr().err.count("Ctrl-C again leaves at once") == 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_asyncio_would_say_is_left_to_debug(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
):
    async def fails() -> None:
        raise ConnectionError("cut off")

    async def run(interrupts: Interrupts) -> None:
        interrupts.end_this()
        task = asyncio.create_task(fails())
        await asyncio.sleep(0)
        signal.raise_signal(signal.SIGINT)
        del task  # nobody will ask how it ended
        await asyncio.Event().wait()

    caplog.set_level(logging.DEBUG)
    with Interrupts() as interrupts, pytest.raises(asyncio.CancelledError):
        asyncio.run(run(interrupts))
    (said,) = [r for r in caplog.records if "never retrieved" in r.getMessage()]
    assert (said.levelname, said.name) == ("DEBUG", "hone")


def test_before_there_is_a_run_it_is_what_it_always_was():
    with Interrupts(), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_a_program_that_listens_itself_keeps_listening():
    heard = []
    signal.signal(signal.SIGINT, lambda *_: heard.append(1))
    with Interrupts() as interrupts:
        signal.raise_signal(signal.SIGINT)
    assert heard == [1] and not interrupts.heard


STUBBORN = """
import asyncio, threading, time
from hone.finetune.interrupt import Interrupts

async def run(interrupts):
    interrupts.end_this()
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


def test_the_second_leaves_at_once_whatever_hangs():
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
    _, said = process.communicate(timeout=60)
    assert process.returncode == INTERRUPTED
    assert "Traceback" not in said and "asyncio" not in said
