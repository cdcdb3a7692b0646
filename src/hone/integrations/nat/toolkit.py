"""The builder of NeMo Agent Toolkit: one for each document, in a separate task.

In:   the Builder of hone, for the document and the address of the model in training
Out:  Toolkit: its workflow and functions as functions of hone, its evaluators

The toolkit saves the context variables when a workflow is built, and restores all of them in every
run. If it were built inside a rollout, every later call would get the id of that rollout. So it is
built in an empty context, and one task builds and closes everything.
"""
# Installed with its extra only.
# pyright: reportMissingImports=false

import asyncio
import contextvars
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from nat.builder.context import ContextState
from nat.builder.workflow import Workflow
from nat.builder.workflow_builder import WorkflowBuilder
from nat.cli.type_registry import GlobalTypeRegistry
from nat.data_models.function import EmptyFunctionConfig
from nat.runtime.session import SessionManager
from pydantic import BaseModel

from hone.capture.base import current
from hone.config.build import Builder
from hone.errors import ConfigError, HoneError
from hone.integrations.nat.document import toolkit_config
from hone.integrations.nat.rollout import run_workflow
from hone.workflow.function import FunctionInfo

NAME = "NeMo Agent Toolkit"

log = logging.getLogger("hone")


async def toolkit_of(builder: Builder) -> "Toolkit":
    """The toolkit of the document; the first component that needs it builds it."""
    return await builder.share(NAME, _open)


async def _open(builder: Builder) -> AsyncIterator["Toolkit"]:
    toolkit = Toolkit(await toolkit_config(builder))
    await toolkit.start()
    yield toolkit
    await toolkit.close()


class Toolkit:
    """The components of one document that NeMo Agent Toolkit builds."""

    def __init__(self, config: Any) -> None:
        self._config = config
        self._jobs: asyncio.Queue[Callable[[], Awaitable[None]] | None] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None
        self._builder: Any = None
        self._sessions: SessionManager | None = None
        self._functions: dict[str, Workflow] = {}

    async def start(self) -> None:
        """Build everything; raises ConfigError if a part of it fails."""
        loop = asyncio.get_running_loop()
        # No copy of this context: a variable that is unset is not restored by the toolkit.
        empty = contextvars.Context()
        self._task = loop.create_task(self._live(), name=NAME, context=empty)
        await self._do("could not be built", self._build)

    async def close(self) -> None:
        """Close everything, in reverse order, in the task that built it."""
        assert self._task is not None, "it was started"
        self._jobs.put_nowait(None)
        await self._task

    def workflow(self) -> FunctionInfo:
        """The workflow of the document."""
        sessions = self._sessions
        assert sessions is not None, "the document's workflow is one of the toolkit"

        async def run(input: Any) -> Any:
            async with self._session(sessions) as workflow:
                return await run_workflow(workflow, input, as_text=True)

        return FunctionInfo.from_fn(run, description=self._config.workflow.__doc__)

    def function(self, name: str) -> FunctionInfo:
        """One entry of `functions`."""
        if name not in self._functions:
            raise ConfigError(
                f"functions.{name}: is built for each user, so only a workflow of {NAME} can call it"
            )
        workflow = self._functions[name]

        async def run(input: Any) -> Any:
            return await run_workflow(workflow, input)

        kind = workflow.input_type
        schema = kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None
        description = self._config.functions[name].__doc__
        return FunctionInfo.from_fn(run, input_schema=schema, description=description)

    async def evaluator(self, name: str) -> Any:
        """One entry of `eval.evaluators`, as the toolkit's EvaluatorInfo."""
        config = self._config.eval.evaluators[name]
        await self._do(
            f"could not build eval.evaluators.{name}",
            lambda: self._builder.add_evaluator(name, config),
        )
        return self._builder.get_evaluator(name)

    # ---- the task ------------------------------------------------------------------------------

    async def _live(self) -> None:
        async with AsyncExitStack() as self._stack:
            while (job := await self._jobs.get()) is not None:
                await job()

    async def _do(self, what: str, work: Callable[[], Awaitable[Any]]) -> None:
        """Run something in the task; an error of the user's component is a ConfigError."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def job() -> None:
            try:
                await work()
            except BaseException as error:  # a user's factory may raise anything
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    done.cancel()
                    raise  # this task itself is cancelled
                if isinstance(error, asyncio.CancelledError):
                    error = RuntimeError("it was cancelled by its own code")
                if not done.done():
                    done.set_exception(error)
            else:
                if not done.done():
                    done.set_result(None)

        self._jobs.put_nowait(job)
        try:
            await done
        except HoneError:
            raise
        except Exception as error:
            raise ConfigError(f"{NAME} {what}: {type(error).__name__}: {error}") from error

    async def _build(self) -> None:
        config = self._config
        evaluators, config.eval.evaluators = config.eval.evaluators, {}  # built when they are used
        builder = await self._stack.enter_async_context(_builder(config))
        is_ours = isinstance(config.workflow, EmptyFunctionConfig)
        await builder.populate_builder(config, skip_workflow=is_ours)
        if not is_ours:
            sessions = await SessionManager.create(
                config=config, shared_builder=builder, max_concurrency=0
            )
            self._stack.push_async_callback(sessions.shutdown)
            self._sessions = sessions
        types = GlobalTypeRegistry.get()
        for name, function in config.functions.items():
            if not types.get_function(type(function)).is_per_user:
                self._functions[name] = Workflow.from_entry_fn(
                    config=config,
                    entry_fn=await builder.get_function(name),
                    context_state=ContextState.get(),
                )
        config.eval.evaluators = evaluators
        self._builder = builder

    @asynccontextmanager
    async def _session(self, sessions: SessionManager) -> AsyncIterator[Workflow]:
        """The workflow for one rollout; one that is built for each user is built for the rollout."""
        scope = current()
        user = scope.rollout if scope is not None and scope.rollout else "hone"
        if not sessions.is_workflow_per_user:
            ContextState.get().user_id.set(user)
            yield sessions.workflow
            return
        ready: asyncio.Future[Workflow] = asyncio.get_running_loop().create_future()
        over = asyncio.Event()

        async def hold() -> None:
            async with sessions.session(user_id=user) as session:
                ready.set_result(session.workflow)
                await over.wait()

        task = asyncio.get_running_loop().create_task(hold(), context=contextvars.Context())
        try:
            await asyncio.wait({task, ready}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                await task  # raises
            yield ready.result()
        finally:
            over.set()
            await task


def _builder(config: Any) -> Any:
    """The toolkit's builder, with evaluators where nvidia-nat-eval is installed."""
    try:
        from nat.plugins.eval.runtime.builder import WorkflowEvalBuilder
    except ImportError:
        return WorkflowBuilder(general_config=config.general)
    return WorkflowEvalBuilder(config.general, config.eval.general)
