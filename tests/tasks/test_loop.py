"""A command ends when its work has ended, whatever tasks and threads are left."""

import asyncio
import gc
import logging
import signal
import threading
from contextlib import suppress

import pytest
from tests.workflow.endpoint import Endpoint, Reply, serving
from tests.workflow.rollouts import ASK, model, ran

from hone.capture.openai import LEFT
from hone.tasks import loop
from hone.tasks.loop import run_loop
from hone.tasks.tally import run_together


def test_a_task_that_ignores_its_cancellation_is_abandoned(
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
    gc.collect()  # asyncio would tell now that a task was destroyed
    assert [r.name for r in caplog.records if r.levelno >= logging.WARNING] == ["hone"]


def test_ctrl_c_cancels_the_work_and_is_raised_when_it_has_ended():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    cleaned = []

    async def main() -> None:
        signal.raise_signal(signal.SIGINT)
        try:
            await asyncio.sleep(1000)
        finally:
            cleaned.append(True)

    try:
        with pytest.raises(KeyboardInterrupt):
            run_loop(main())
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert cleaned


async def test_when_one_of_many_fails_the_others_are_ended_first():
    ended = []

    async def waits(name: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(name)

    async def fails() -> None:
        raise ValueError("one")

    with pytest.raises(ValueError, match="one"):
        await run_together([waits("a"), fails(), asyncio.create_task(waits("b"))])
    assert ended == ["a", "b"]
    assert await run_together(asyncio.sleep(0, n) for n in (1, 2)) == [1, 2]


def test_a_task_of_an_agent_that_exits_fails_its_rollout_and_ends_nothing_else():
    async def tool() -> None:
        raise SystemExit(4)  # as argparse does

    async def agent(question: str) -> None:
        await asyncio.gather(tool(), asyncio.sleep(0))

    async def careless(question: str) -> str:
        task = asyncio.create_task(tool())
        await asyncio.wait({task})
        assert isinstance(task.exception(), SystemExit)
        return "done"

    async def main() -> list[object]:
        results = await asyncio.gather(ran(agent), ran(careless), ran(agent))
        return [result.failure and result.failure.failure.type for result in results]

    assert run_loop(main()) == ["SystemExit", None, "SystemExit"]


def test_a_command_may_exit():
    async def main() -> None:
        await asyncio.sleep(0)
        raise SystemExit(3)

    with pytest.raises(SystemExit, match="3"):
        run_loop(main())


def test_a_thread_that_hangs_is_not_waited_for():
    gate = threading.Event()

    async def main() -> int:
        assert await asyncio.to_thread(lambda: 3) == 3
        hanging = asyncio.create_task(asyncio.to_thread(gate.wait))
        await asyncio.sleep(0)
        return 0 if hanging.done() else 1

    assert run_loop(main()) == 1
    gate.set()


def test_streams_that_agents_leave_open_are_closed_and_leave_no_traceback(
    caplog: pytest.LogCaptureFixture,
):
    left: list[object] = []

    async def main() -> list[str | None]:
        async with serving(Endpoint(*(Reply("a long answer" * 200) for _ in range(10)))) as url:
            llm = model(url)

            async def once(keep: bool) -> None:
                stream = await llm.client.chat.completions.create(
                    model="m", messages=ASK, stream=True
                )
                left.append(stream if keep else None)
                async for _ in stream:
                    break

            async def agent(question: str) -> None:
                await asyncio.gather(*(once(k % 2 == 0) for k in range(4)))

            def plain(question: str) -> None:
                make = llm.sync_client.chat.completions.create
                left.append(next(iter(make(model="m", messages=ASK, stream=True))))

            results = [await ran(agent), await ran(agent), await ran(plain)]
            gc.collect()
            await asyncio.sleep(0)
            await llm.close()
        return [call.error for result in results for call in result.calls]

    assert run_loop(main()) == [LEFT] * 9
    left.clear()
    gc.collect()
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING] == []
