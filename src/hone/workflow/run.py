"""Run the workflow once: one input in, one rollout out, whatever happens.

In:   a Function and an input; the rollout's id, the host of the trained model, a deadline
Out:  RolloutResult: output, captured calls and steps, the failure if it failed

A bad rollout is data, not a crash: here, and nowhere else in the harness, every exception of the
user's code is caught. After its timeout a rollout is over, also for code that goes on: its calls to
the trained model are refused, so that nothing is recorded that was not scored.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hone.capture.base import Recorder, SeenCall, Step
from hone.capture.recorded import unseen_calls, with_prompts
from hone.capture.scope import Rollout, recorded
from hone.config.build import build
from hone.config.policy import PolicyCalls
from hone.config.schema import read
from hone.errors import ConfigError, HoneError
from hone.tasks.loop import run_loop
from hone.types import RecordedCall
from hone.workflow.deadline import Deadline
from hone.workflow.failure import RolloutFailure, answered_by_policy, raised, timed_out
from hone.workflow.function import Function

RecordedCalls = Callable[[str], Awaitable[list[RecordedCall]]]
"""Rollout id -> the calls that the server recorded."""
HeldTime = Callable[[str, float], Awaitable[float]]
"""Rollout id, a time of the monotonic clock -> for how long since then the server held its calls."""
GRACE_S = 5.0
"""How long an agent may take to end after it was cancelled."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RolloutResult:
    """One run of the workflow on one input."""

    id: str
    output: Any
    """The return value of the workflow; None if it failed."""
    calls: tuple[SeenCall, ...]
    """Its model calls, in the order in which they were sent."""
    steps: tuple[Step, ...]
    """Its `hone.step` calls."""
    failure: RolloutFailure | None
    seconds: float
    events: tuple[dict[str, Any], ...] = ()
    """Intermediate steps of a workflow of NeMo Agent Toolkit, in that toolkit's form."""
    answered: bool = False
    """Whether the trained policy answered a call; without a training run, whether any model did."""


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The options of `hone run`."""

    config_file: Path
    override: tuple[tuple[str, str], ...] = ()
    input: tuple[str, ...] = ()
    """Inputs, run one by one."""
    input_file: Path | None = None
    """A file whose text is used as another input."""


async def run_rollout(
    workflow: Function,
    input: Any,
    *,
    id: str | None = None,
    host: str | None = None,
    timeout_s: float | None = None,
    temperature: float | None = None,
    step: int | None = None,
    aliases: Mapping[str, str] | None = None,
    recorded_calls: RecordedCalls | None = None,
    held_s: HeldTime | None = None,
    policy: PolicyCalls | None = None,
    infrastructure_exceptions: Sequence[str] = (),
) -> RolloutResult:
    """Run the workflow on the input; an exception of the agent is returned, not raised.

    Args:
        workflow: the workflow to run.
        input: its input.
        id: id of the rollout; random if None. `RUN:REST` belongs to the open run RUN.
        host: host of the trained model; only calls to it are marked. None marks all calls.
        timeout_s: the rollout fails if it takes longer, not counting time that the server held calls.
        temperature: sampling temperature, whatever the agent asks for; 0 is greedy.
        step: the step that answers; the newest one if None.
        aliases: names and the models that they mean in this rollout.
        recorded_calls: reads the calls that the server recorded; called after the agent has ended
            if it used the rollout's URL, since another process may have made calls, or if a
            request named an earlier response instead of sending its whole prompt.
        held_s: asks the server for how long it held the rollout's calls; called when the timeout has
            passed. None extends no timeout.
        policy: which calls the trained policy answers; None: all.
        infrastructure_exceptions: classes of exceptions that are never the policy's failure.
    """
    rollout, recorder = recorded(id, host=host, temperature=temperature, step=step, aliases=aliases)
    recorder.held = None if held_s is None else partial(held_s, rollout.id)
    began = time.perf_counter()
    with rollout:
        try:
            outcome = await _outcome(workflow, input, timeout_s, recorder)
        finally:
            await recorder.close()
    calls = tuple(recorder.calls)
    if recorder.is_incomplete and recorded_calls is not None:
        calls = await _completed(rollout, calls, recorded_calls)
    failure, answered = None, answered_by_policy(calls, policy)
    if isinstance(outcome, _TimedOut):
        extension = outcome.extension
        failure = timed_out(outcome.after_s, outcome.place, calls, extension, answered=answered)
    elif outcome.error is not None:
        listed = infrastructure_exceptions
        failure = raised(outcome.error, calls, answered=answered, listed=listed)
    return RolloutResult(
        id=rollout.id,
        output=None if failure else outcome.output,
        calls=calls,
        steps=tuple(recorder.steps),
        failure=failure,
        seconds=time.perf_counter() - began,
        events=tuple(recorder.events),
        answered=answered,
    )


def run_inputs(options: RunOptions) -> list[RolloutResult]:
    """`hone run`: build the workflow and run it once on each input."""
    inputs = list(options.input)
    if options.input_file is not None:
        try:
            inputs.append(options.input_file.read_text(encoding="utf-8-sig"))
        except OSError as error:
            raise ConfigError(f"--input_file {options.input_file}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"--input_file {options.input_file}: not UTF-8 text ({error.reason} at byte "
                f"{error.start}); save it so"
            ) from error
    if not inputs:
        raise ConfigError("nothing to run on; give --input TEXT or --input_file FILE")
    return run_loop(_run_inputs(options, inputs))


async def _run_inputs(options: RunOptions, inputs: list[str]) -> list[RolloutResult]:
    document = read(options.config_file, options.override)
    async with build(document) as builder:
        await builder.serve()
        workflow = await builder.get_workflow()
        budget = asyncio.Semaphore(builder.get_max_concurrency())

        async def one(input: str) -> RolloutResult:
            async with budget:
                timeout_s = document.finetuning.rollout_timeout_s
                return await run_rollout(
                    workflow, input, timeout_s=timeout_s, **builder.rollout_arguments
                )

        return list(await asyncio.gather(*(one(input) for input in inputs)))


async def _completed(
    rollout: Rollout, seen: tuple[SeenCall, ...], recorded_calls: RecordedCalls
) -> tuple[SeenCall, ...]:
    """The seen calls with their whole prompts, and those that another process made."""
    try:
        calls = await recorded_calls(rollout.id)
    except HoneError as error:
        _log.warning("the calls of rollout %s could not be read: %s", rollout.id, error)
        return seen
    others = unseen_calls(calls, seen, host=rollout.scope.host or "")
    return (*with_prompts(calls, seen), *others)


# ---- the agent's task --------------------------------------------------------------------------


@dataclass(slots=True)
class _Ended:
    """A workflow that returned or raised."""

    output: Any = None
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class _TimedOut:
    """A workflow that did not end in time."""

    after_s: float
    extension: str
    place: str
    output: None = None


async def _outcome(
    workflow: Function, input: Any, timeout_s: float | None, recorder: Recorder
) -> _Ended | _TimedOut:
    # A separate task, so that an agent that catches its cancellation can be abandoned.
    task, deadline = asyncio.create_task(_attempt(workflow, input)), Deadline(timeout_s)
    passing = asyncio.create_task(deadline.passed())
    try:
        await asyncio.wait({task, passing}, return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        recorder.closed = True
        await _stop(task, workflow.name)
        raise
    finally:
        passing.cancel()
    if task.done():
        if task.cancelled():  # the agent cancelled itself
            return _Ended(error=asyncio.CancelledError("the agent cancelled its own task"))
        return task.result()
    assert timeout_s is not None, "wait() returned without a deadline and without a result"
    place = _place(task)
    recorder.closed = True
    await _stop(task, workflow.name)
    return _TimedOut(timeout_s, deadline.extension(), place)


async def _attempt(workflow: Function, input: Any) -> _Ended:
    try:
        return _Ended(output=await workflow(input))
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        return _Ended(error=error)  # the agent awaited a task that it had cancelled
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # noqa: BLE001  # user code: whatever it raises is data
        return _Ended(error=error)


async def _stop(task: "asyncio.Task[_Ended]", name: str) -> None:
    """Cancel the task, and wait up to GRACE_S for it to clean up."""
    task.cancel()
    await asyncio.wait({task}, timeout=GRACE_S)
    if not task.done():
        _log.warning(
            "workflow %r did not end within %g s of being cancelled and is left running; its calls "
            "to the trained model are refused. Let CancelledError pass in it.",
            name,
            GRACE_S,
        )


def _place(task: "asyncio.Task[Any]") -> str:
    """File, line and function of each coroutine that the task waits in, innermost last."""
    lines: list[str] = []
    inner: Any = task.get_coro()
    while inner is not None and getattr(inner, "cr_frame", None) is not None:
        code = inner.cr_frame.f_code
        lines.append(f"  {code.co_filename}:{inner.cr_frame.f_lineno} in {code.co_name}\n")
        inner = inner.cr_await
    return "waiting at\n" + "".join(lines)
