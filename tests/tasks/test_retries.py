"""retry: how often, how long between, and what is not retried; plain and async."""

import asyncio
import inspect
import logging

import pytest
from tests.prose import Prose

import hone
from hone.errors import ConfigError


class Flaky:
    """Fails so many times, then answers."""

    def __init__(self, failures: int, error: type[Exception] = OSError) -> None:
        self.calls, self.failures, self.error = 0, failures, error

    def __call__(self, answer: str) -> str:
        self.calls += 1
        if self.calls <= self.failures:
            raise self.error(f"call {self.calls}")
        return answer


def test_a_plain_function_is_called_until_it_answers(caplog: pytest.LogCaptureFixture):
    flaky, seen = Flaky(2), []

    @hone.retry(delay=0.001, on_retry=lambda error, attempt: seen.append((str(error), attempt)))
    def ask(answer: str) -> str:
        """What it says."""
        return flaky(answer)

    with caplog.at_level(logging.WARNING, logger="hone"):
        assert ask("yes") == "yes"
    assert seen == [("call 1", 1), ("call 2", 2)]
    # 0.001 s, then twice as long.
    assert [r.getMessage().split("; ")[1] for r in caplog.records] == [
        "again in 0.001 s",
        "again in 0.002 s",
    ]
    assert (ask.__name__, ask.__doc__) == ("ask", "What it says.")


async def test_an_async_function_stays_one():
    flaky = Flaky(1)

    @hone.retry(delay=0.001)
    async def ask(answer: str) -> str:
        await asyncio.sleep(0)
        return flaky(answer)

    assert inspect.iscoroutinefunction(ask)
    assert await ask("yes") == "yes"
    assert flaky.calls == 2


@pytest.mark.parametrize("attempts", [1, 3])
async def test_the_last_failure_is_raised(attempts: int):
    plain, later = Flaky(9), Flaky(9)
    again = hone.retry(max_attempts=attempts, delay=0.001)

    async def ask() -> str:
        return later("never")

    with pytest.raises(OSError, match=f"call {attempts}"):
        again(plain)("never")
    with pytest.raises(OSError, match=f"call {attempts}"):
        await again(ask)()
    assert (plain.calls, later.calls) == (attempts, attempts)


def test_other_exceptions_are_not_retried():
    flaky = Flaky(1, KeyError)
    with pytest.raises(KeyError):
        hone.retry(exceptions=(OSError,), delay=0.001)(flaky)("never")
    assert flaky.calls == 1


async def test_a_cancelled_call_is_not_retried():
    calls = 0

    @hone.retry(delay=0.001)
    async def ask() -> None:
        nonlocal calls
        calls += 1
        await asyncio.sleep(60)

    task = asyncio.create_task(ask())
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert calls == 1


def test_zero_attempts_are_refused(prose: Prose):
    with pytest.raises(ConfigError) as caught:
        hone.retry(max_attempts=0)
    prose(caught)
