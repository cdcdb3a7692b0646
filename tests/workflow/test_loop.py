"""A command ends when its work has, whatever was left behind."""

import asyncio
import threading
from contextlib import suppress

import pytest

from hone.workflow import loop
from hone.workflow.loop import run_loop


def test_a_task_that_ignores_its_cancellation_is_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(loop, "GRACE_S", 0.05)

    async def stubborn() -> None:
        while True:
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(1000)

    async def main() -> str:
        task = asyncio.create_task(stubborn(), name="stubborn")
        await asyncio.sleep(0)
        assert not task.done()
        return "done"

    assert run_loop(main()) == "done"
    assert "stubborn did not end within 0.05 s of being cancelled" in caplog.text


def test_a_thread_that_hangs_is_not_waited_for():
    gate = threading.Event()

    async def main() -> int:
        assert await asyncio.to_thread(lambda: 3) == 3
        hanging = asyncio.create_task(asyncio.to_thread(gate.wait))
        await asyncio.sleep(0)
        return 0 if hanging.done() else 1

    assert run_loop(main()) == 1
    gate.set()
