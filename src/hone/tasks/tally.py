"""Run awaitables at once with a limit on failures, and count their results.

In:   awaitables of trajectories
Out:  their results in the order given; an exception in place of each one that failed

When more fail than the limit allows, the last failure is raised after everything that still runs
was cancelled and awaited: no rollout keeps sampling after the call has returned.
"""

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from numbers import Complex, Real
from typing import Any, Protocol, TypeVar, runtime_checkable

from hone.errors import AgentCrashed, ConfigError
from hone.tasks.progress import Progress

R = TypeVar("R")
T = TypeVar("T")


@runtime_checkable
class Scored(Protocol):
    """A trajectory: the fields that are counted."""

    reward: float
    metrics: dict[str, float | int | bool]
    messages_and_choices: list[Any]


@runtime_checkable
class Unfinished(Protocol):
    """A group of rollouts, some of which have not been run."""

    def take_unfinished(self) -> list[Any]: ...


class Tally:
    """Counts of one gather call: rollouts, failures, metrics."""

    def __init__(
        self,
        max_exceptions: float = math.inf,
        bar: Progress | None = None,
        *,
        show_tokens: bool = False,
        max_metrics: int | None = None,
    ) -> None:
        if not max_exceptions >= 0:
            raise ConfigError(
                f"max_exceptions is {max_exceptions!r}: a number of rollouts, or a share of them "
                "between 0 and 1"
            )
        self.allowed, self.bar = max_exceptions, bar or Progress(None)
        self.errors: list[Exception] = []
        self.total = self.ended = self.tokens = 0
        self._show_tokens, self._max_metrics = show_tokens, max_metrics
        self._sums: dict[str, tuple[float, int]] = {}

    def expect(self, count: int) -> None:
        """Add `count` rollouts to the total."""
        self.total += count
        self.bar.update(total=self.total)

    async def watch(self, rollout: Awaitable[Any], *, kind: type | None = None) -> Any:
        """The rollout's result, or its exception if the limit allows another failure."""
        try:
            result = await uncancelled(rollout)
            if kind is not None and not isinstance(result, kind):
                raise TypeError(
                    f"a rollout returned {type(result).__name__}; it must return a {kind.__name__}"
                )
        except Exception as error:  # noqa: BLE001  # user code: whatever it raises is data
            self.fail(error)
            return error
        several = isinstance(result, Iterable) and not isinstance(result, Scored)
        for trajectory in result if several else [result]:
            if isinstance(trajectory, Scored):
                self._add(trajectory)
        self.advance()
        return result

    def fail(self, error: Exception) -> None:
        """Count a failure; raise it if the limit is exceeded."""
        self.errors.append(error)
        self.advance()
        check_budget(self.errors, self.total, self.allowed)

    def advance(self) -> None:
        """Count a rollout that has ended."""
        self.ended += 1
        self.bar.update(done=self.ended, note=self._note())

    def _add(self, trajectory: Scored) -> None:
        counts = [_tokens(item) for item in trajectory.messages_and_choices]
        counts = [count for count in counts if count is not None]
        if counts:
            trajectory.metrics["completion_tokens"] = sum(counts) / len(counts)
            self.tokens += sum(counts)
        for name, value in {"reward": trajectory.reward, **trajectory.metrics}.items():
            if (number := as_float(value)) is not None:
                total, count = self._sums.get(name, (0.0, 0))
                self._sums[name] = (total + number, count + 1)

    def _note(self) -> str:
        means = [f"{name}={total / count:.3g}" for name, (total, count) in self._sums.items()]
        shown = means if self._max_metrics is None else means[: 1 + self._max_metrics]
        shown += [f"tokens={self.tokens}"] if self._show_tokens else []
        shown += [f"exceptions={len(self.errors)}"] if self.errors else []
        return " ".join(shown)


def check_budget(errors: Sequence[Exception], total: int, allowed: float) -> None:
    """Raise the last of the errors if they are more than allowed: a number, or a share below 1."""
    bound = allowed * total if 0 < allowed < 1 else allowed
    if len(errors) > bound:
        error = errors[-1]
        error.add_note(
            f"hone: {len(errors)} of {total} rollouts failed, and max_exceptions={allowed:g} "
            "allows fewer. Raise it to keep failures as data."
        )
        raise error


@dataclass
class Share:
    """One awaitable's part of a tally: one rollout, until it turns out to be several."""

    tally: Tally
    revealed: bool = False

    def reveal(self, count: int) -> None:
        self.tally.expect(count if self.revealed else count - 1)
        self.revealed = True


current_share: ContextVar[Share | None] = ContextVar("hone_gather_share", default=None)
"""The part of the gather call that this code runs in; None outside any."""


async def run_rollouts(rollouts: Sequence[Awaitable[Any]], kind: type) -> list[Any]:
    """Run the rollouts of a group: each one's result, which must be of `kind`, or its exception.

    Outside a gather call every failure is kept; inside one that call's budget counts.
    """
    share = current_share.get()
    if share is not None:
        share.reveal(len(rollouts))
    tally = Tally() if share is None else share.tally
    return await run_all(rollouts, lambda rollout: tally.watch(rollout, kind=kind))


async def run_together(work: Iterable[Awaitable[R]]) -> list[R]:
    """Run all at once, results in order; when one raises, the others are cancelled and awaited."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await cancel_all(tasks)


async def run_all(items: Sequence[T], run: Callable[[T], Coroutine[Any, Any, R]]) -> list[R]:
    """`run_together` of `run(item)`; items whose run had not begun are discarded."""
    try:
        return await run_together(map(run, items))
    finally:
        for item in items:
            discard(item)


async def uncancelled(rollout: Awaitable[R]) -> R:
    """Its result. AgentCrashed if it raises CancelledError although nobody cancels this task."""
    try:
        return await rollout
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise AgentCrashed(
            "the rollout was cancelled by its own code: it awaited a task that had been cancelled, or "
            "raised CancelledError. Catch that in the rollout if it is no failure."
        ) from error


async def cancel_all(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel the tasks and wait until they have ended."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def discard(item: Any) -> None:
    """Close coroutines that will never be awaited, so that Python does not warn about them."""
    for rollout in item.take_unfinished() if isinstance(item, Unfinished) else [item]:
        if inspect.iscoroutine(rollout):
            rollout.close()


def as_float(value: Any) -> float | None:
    """A number of any type, such as a Decimal or a 0-d tensor, as a float; None for other values."""
    kind = type(value)
    is_complex = issubclass(kind, Complex) and not issubclass(kind, Real)
    is_array = getattr(value, "ndim", 0) != 0
    if is_complex or is_array or issubclass(kind, str) or not hasattr(kind, "__float__"):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _tokens(item: Any) -> int | None:
    """Sampled tokens of a choice; None for a message, or if the choice does not say."""

    def of(value: Any, name: str) -> Any:
        return value.get(name) if isinstance(value, dict) else getattr(value, name, None)

    sampled = of(of(item, "logprobs"), "content") or of(item, "token_ids")
    return None if sampled is None else len(sampled)
