"""A deadline and the time that the server held calls; over a real server: tests/server/test_deadlines.py."""

import asyncio
import time

import pytest
from tests.prose import Prose
from tests.workflow.rollouts import ran, why

from hone.capture.scope import recorded
from hone.errors import AgentTimeout, Unreachable
from hone.workflow.deadline import Deadline
from hone.workflow.service import answered_within


class Held:
    """Answers in turn for how long the server has held calls, the last one for ever."""

    def __init__(self, *answers: float | Exception) -> None:
        self.answers = list(answers)
        self.asked: list[float] = []
        """How long the rollout had run at each question."""

    async def __call__(self, rollout: str, since: float) -> float:
        self.asked.append(time.monotonic() - since)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


async def forever(question: str) -> None:
    await asyncio.Event().wait()


async def test_the_deadline_moves_only_by_the_held_time(prose: Prose):
    # 0.1 s; then 0.2 s were held: until 0.3 s; then 0.25 s: until 0.35 s; then nothing more.
    held = Held(0.2, 0.25, 0.25)
    result = await ran(forever, timeout_s=0.1, held_s=held)
    assert why(result) == ("infrastructure", "timeout")
    assert [asked >= due for asked, due in zip(held.asked, (0.1, 0.3, 0.35), strict=True)] == (
        [True] * 3
    )
    assert result.failure is not None
    prose(result.failure.failure.message)


async def test_work_that_ends_in_the_extension_succeeds():
    asked, go_on = asyncio.Event(), asyncio.Event()

    async def held(rollout: str, since: float) -> float:
        asked.set()
        return 300.0

    async def agent(question: str) -> str:
        await go_on.wait()
        return "late but well"

    running = asyncio.create_task(ran(agent, timeout_s=0.05, held_s=held))
    await asked.wait()
    go_on.set()
    assert (await running).output == "late but well"


async def test_work_that_ends_while_the_server_is_asked_succeeds():
    asked = asyncio.Event()

    async def held(rollout: str, since: float) -> float:
        asked.set()
        return await asyncio.get_running_loop().create_future()

    async def agent(question: str) -> str:
        await asked.wait()
        return "well"

    assert (await ran(agent, timeout_s=0.05, held_s=held)).output == "well"


@pytest.mark.parametrize("error", [Unreachable("no server answers"), TimeoutError()])
async def test_the_deadline_does_not_move_if_the_server_cannot_be_asked(
    prose: Prose, error: Exception, caplog: pytest.LogCaptureFixture
):
    held = Held(0.1, error)
    result = await ran(forever, timeout_s=0.05, held_s=held)
    assert why(result) == ("infrastructure", "timeout") and len(held.asked) == 2
    assert result.failure is not None
    prose(result.failure.failure.message)
    assert "cannot be asked for how long it held calls" in caplog.text


async def test_the_server_is_asked_only_after_a_deadline():
    held = Held(300.0)

    async def agent(question: str) -> str:
        return "at once"

    for timeout_s in (None, 300.0):
        assert (await ran(agent, timeout_s=timeout_s, held_s=held)).output == "at once"
    assert held.asked == []


async def test_the_timeout_of_a_service_is_extended_like_the_rollouts(prose: Prose):
    rollout, recorder = recorded("r")
    held = Held(0.1, 0.1)
    recorder.held = lambda since: held("r", since)
    with rollout, pytest.raises(AgentTimeout) as raised:
        async with answered_within("POST /", 0.05, "timeout_s="):
            await asyncio.Event().wait()
    assert len(held.asked) == 2
    prose(raised)


async def test_a_block_that_ends_in_time_is_not_cancelled():
    async with Deadline(300.0).limit():
        pass
    async with Deadline(None).limit():
        pass
    with pytest.raises(TimeoutError):
        async with Deadline(0.01).limit():
            await asyncio.Event().wait()
