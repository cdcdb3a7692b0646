"""Learner processes, one for each base model.

In:   a base model that is about to be trained
Out:  a loaded LearnerProcess

A learner takes seconds to load, so it is launched when its model is prepared, in parallel with the
engine and at a low priority. It is kept between jobs. A learner that dies while it has no job is
replaced at once; one that has been idle for long is closed.

Learners on one GPU run one after the other, because each plans with all memory that vLLM leaves. The
jobs take turns in the order in which they come, and a turn begins by closing the learners of other
base models on that GPU: only the end of a process frees all of its memory.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from hone.errors import Cancelled, LearnerDied
from hone.files.logs import log, say
from hone.inference.background import in_own_thread
from hone.learner.process import LearnerProcess, LearnerSpec
from hone.models.card import CONTEXT
from hone.server.serve.engine_choice import EngineChoice
from hone.server.serve.gpus import visible
from hone.server.serve.tokenizer import BaseTokenizer
from hone.server.settings import Settings

PATIENT = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}
"""Idle threads of the learner must not spin: they would slow down the engine."""
AHEAD_SHARE = 8
"""A learner is launched before its first job only if its weights need less than 1 / AHEAD_SHARE of
the free memory: the engine, which may load at the same time, needs two to three times as much."""

StartLearner = Callable[..., LearnerProcess]
"""LearnerProcess.launch, or a replacement in tests."""
REPLACED = 3
"""How many learners in a row may die without a job and be replaced at once; after that, the next job
launches one."""


@dataclass(slots=True, eq=False)
class _Slot:
    """The learner of one base model."""

    learner: LearnerProcess | None = None
    launching: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a missing learner is launched."""
    ahead: "asyncio.Task[None] | None" = None
    """Launches it before there is a job; once, whether or not it succeeds."""
    busy: bool = False
    """Whether a job uses it."""
    used_at: float = field(default_factory=time.monotonic)
    """When the last job released it."""
    died: str | None = None
    """Why the last one died, until the next one has loaded."""
    deaths: int = 0
    """Number of learners in a row that died without a job."""
    noted: LearnerProcess | None = None
    """The learner whose startup notes were logged."""
    gpu: "LearnerGpu | None" = None
    """The GPU that it was launched on."""


@dataclass(slots=True, eq=False)
class _Turns:
    """Whose turn it is on one GPU."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """First come, first served."""
    base_model: str = ""


class Learners:
    """Learners by base model, at most one for each."""

    def __init__(
        self, settings: Settings, start_learner: StartLearner, choice: EngineChoice
    ) -> None:
        self._settings = settings
        self._start_learner = start_learner
        self._choice = choice
        self._slots: dict[str, _Slot] = {}
        self._turns: dict[int, _Turns] = {}
        """By GPU."""
        self._closed = False

    def launch_ahead(self, tokenizer: BaseTokenizer) -> None:
        """Start loading the learner once, if there is enough memory; does not wait."""
        slot = self._slot(tokenizer)
        if slot.ahead is None and not self._closed:
            slot.ahead = asyncio.create_task(self._load_ahead(slot, tokenizer))

    @asynccontextmanager
    async def turn(
        self, base_model: str, on_wait: Callable[[str], Awaitable[object]]
    ) -> AsyncIterator[None]:
        """The GPU of a base model's learner for this learner alone, while the block runs.

        `on_wait` gets the reason if the block has to wait. On a CPU it never has to.
        """
        gpu = (await in_own_thread(self._choice.gpus, base_model)).trainer
        if gpu is None:
            yield
            return
        turns = self._turns.setdefault(gpu, _Turns())
        if turns.lock.locked():
            await on_wait(
                f"GPU {gpu} is used by the learner of {turns.base_model!r}; learners on one GPU run "
                "one after the other. trainer_gpu_ids in engine_args names another GPU."
            )
        async with turns.lock:
            turns.base_model = base_model
            await self._close_others(gpu, base_model)
            yield

    async def _close_others(self, gpu: int, base_model: str) -> None:
        for name, slot in list(self._slots.items()):
            there = slot.gpu is not None and slot.gpu.number == gpu
            if name == base_model or not there or slot.learner is None:
                continue
            async with slot.launching:
                await self._drop(slot, deadline_s=10.0)
            say("learner closed: another one trains on its GPU", base_model=name, gpu=gpu)

    @asynccontextmanager
    async def borrow(
        self, tokenizer: BaseTokenizer, waiting: AbstractAsyncContextManager[None]
    ) -> AsyncIterator[LearnerProcess]:
        """A loaded learner while the block runs; launched now if there is none.

        One that dies while a job uses it is dropped, and the next job gets another. So is one that
        is still loading when `waiting` raises Cancelled: it would take the memory of the engine.
        """
        slot = self._slot(tokenizer)
        slot.busy = True
        try:
            learner = await self._launched(slot, tokenizer, gives_way=False)
            try:
                async with waiting:
                    info = await in_own_thread(learner.ready)
            except Cancelled:
                await self._drop(slot)
                raise
            slot.died, slot.deaths = None, 0
            for note in info.notes if learner is not slot.noted else ():
                say(note, base_model=tokenizer.name)
            slot.noted = learner
            yield learner
        except LearnerDied as error:
            slot.died = str(error).partition("\n")[0]
            await self._drop(slot)
            raise
        finally:
            slot.busy, slot.used_at = False, time.monotonic()

    async def close_idle(self, idle_s: float) -> None:
        """Close learners that have been idle for this long; the next job launches another."""
        for name, slot in list(self._slots.items()):
            if slot.busy or slot.learner is None or time.monotonic() < slot.used_at + idle_s:
                continue
            async with slot.launching:
                slot.ahead = None
                await self._drop(slot, deadline_s=10.0)
            say("learner closed: it was idle", base_model=name, idle_s=idle_s)

    def status(self) -> dict[str, Any]:
        """Whether all learners are alive."""
        dead = {name: slot.died for name, slot in self._slots.items() if slot.died}
        if dead:
            reason = "; ".join(f"{name}: {why}" for name, why in dead.items())
            return {"status": "restarting", "reason": reason}
        loaded = any(slot.learner is not None for slot in self._slots.values())
        return {"status": "ok", "loaded": loaded}

    async def close(self) -> None:
        """End them all; the job that one of them runs gets LearnerDied. May be called twice."""
        self._closed = True
        for slot in self._slots.values():
            if slot.learner is not None:
                await in_own_thread(slot.learner.close)
        ahead = [slot.ahead for slot in self._slots.values() if slot.ahead is not None]
        # These tasks close what they have just launched.
        await asyncio.gather(*ahead, return_exceptions=True)

    def _slot(self, tokenizer: BaseTokenizer) -> _Slot:
        return self._slots.setdefault(tokenizer.name, _Slot())

    async def _load_ahead(self, slot: _Slot, tokenizer: BaseTokenizer) -> None:
        try:
            if not await in_own_thread(fits_beside_engine, tokenizer, self._choice):
                return
            learner = await self._launched(slot, tokenizer, gives_way=True)
            if not self._closed:
                say("its learner is loaded before the first job", base_model=tokenizer.name)
                await in_own_thread(learner.ready)
                slot.died = None
        except Exception as error:  # noqa: BLE001  any error: the first job gets it again
            text = "no learner could be launched in advance; the first job launches one"
            log.warning(text, exc_info=error)

    async def _launched(
        self, slot: _Slot, tokenizer: BaseTokenizer, *, gives_way: bool
    ) -> LearnerProcess:
        """The learner, which may still be loading."""
        async with slot.launching:
            gpu = await in_own_thread(LearnerGpu.of, self._choice, tokenizer.name)
            # Another GPU, or another share of it: a model with other engine_args was registered.
            outdated = slot.learner is not None and (not slot.learner.alive or slot.gpu != gpu)
            if outdated and not self._closed:  # one that was closed is not replaced
                await self._drop(slot)
            if slot.learner is None:
                slot.learner = learner = await in_own_thread(
                    self._launch, tokenizer, gpu, gives_way=gives_way
                )
                slot.gpu = gpu
                slot.used_at = time.monotonic()
                self._watch(slot, learner, tokenizer)
                if self._closed:  # `close` ran while it was launched
                    await in_own_thread(slot.learner.close)
            return slot.learner

    def _launch(
        self, tokenizer: BaseTokenizer, gpu: "LearnerGpu", *, gives_way: bool
    ) -> LearnerProcess:
        """A learner process that has begun to load the base model. Blocking."""
        device, dtype, _ = self._choice.machine()
        on_gpu = device.startswith("cuda") and gpu.number is not None
        spec = LearnerSpec(
            model_dir=tokenizer.files.path,
            base_model=tokenizer.name,
            threads=self._settings.learner_threads or usable_cores(),
            device="cuda" if on_gpu else device,  # the only one that it sees
            dtype=dtype,
            memory=gpu.memory if on_gpu else None,
        )
        env = PATIENT | (visible([gpu.number]) if on_gpu and gpu.number is not None else {})
        return self._start_learner(spec, gives_way=gives_way, env=env)

    def _watch(self, slot: _Slot, learner: LearnerProcess, tokenizer: BaseTokenizer) -> None:
        loop = asyncio.get_running_loop()

        def ended() -> None:
            with suppress(RuntimeError):  # the loop is closed: the server has stopped
                loop.call_soon_threadsafe(self._on_end, slot, learner, tokenizer)

        learner.when_ended(ended)

    def _on_end(self, slot: _Slot, learner: LearnerProcess, tokenizer: BaseTokenizer) -> None:
        """A learner ended. The job that uses one handles that itself; without a job it is replaced."""
        if slot.learner is not learner or slot.busy or self._closed:
            return
        slot.died = f"learner process {learner.pid} ended while it had no job"
        log.warning(
            "a learner died while it had no job and is replaced",
            extra={"fields": {"base_model": tokenizer.name, "pid": learner.pid}},
        )
        slot.deaths += 1
        if slot.deaths <= REPLACED:
            slot.ahead = asyncio.create_task(self._load_ahead(slot, tokenizer))

    async def _drop(self, slot: _Slot, deadline_s: float = 0.0) -> None:
        learner, slot.learner = slot.learner, None
        if learner is not None:
            await in_own_thread(learner.close, deadline_s=deadline_s)


@dataclass(frozen=True, slots=True)
class LearnerGpu:
    """A learner's GPU, and its share of that GPU's memory."""

    number: int | None = None
    """None: the learner runs on the CPU."""
    memory: int | None = None
    """Bytes for its tensors if it shares the GPU with vLLM; None for the default."""

    @classmethod
    def of(cls, choice: EngineChoice, base_model: str) -> "LearnerGpu":
        """The GPU and the share of a base model's learner. Blocking."""
        card = choice.card(base_model)
        memory = None if card is None else card.learner - CONTEXT
        return cls(choice.gpus(base_model).trainer, memory)


def usable_cores() -> int:
    """Cores this process may run on; in a container often fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def fits_beside_engine(tokenizer: BaseTokenizer, choice: EngineChoice) -> bool:
    """Whether a learner without a job leaves enough memory for the engine; never on a shared GPU."""
    from hone.models.fit import available_memory, estimate

    device, _, dtype_bytes = choice.machine()
    if device != "cpu":
        return False
    weights = estimate(tokenizer.files.config, dtype_bytes=dtype_bytes, kv_tokens=0).weights
    return weights < available_memory() // AHEAD_SHARE
