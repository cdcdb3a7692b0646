"""One learner for each base model: launched ahead of its first job, kept between jobs, replaced.

In:   the Language of a base model that is about to be trained, or of one whose job is here
Out:  its LearnerProcess, loaded; its failure to load, to the job that wanted it

A learner takes seconds to load. Who prepares a model is about to train it, so its learner loads
from then on, beside the engine, and gives way to samples; who only asks for answers never prepares,
and pays for no learner. One that dies without a job is noticed and replaced at once; one that has
had no job for long is closed.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from hone.errors import HoneError, LearnerDied
from hone.learner.worker import LearnerProcess
from hone.logs import log, say
from hone.server import learning
from hone.server.language import Language
from hone.server.learning import StartLearner
from hone.server.settings import Settings

REPLACED = 3
"""So many learners in a row that die without a job are replaced; then the next job launches one."""


@dataclass(slots=True, eq=False)
class _Place:
    """The place of one base model's learner."""

    learner: LearnerProcess | None = None
    launching: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by who looks whether there is a learner, and launches it if not."""
    ahead: "asyncio.Task[None] | None" = None
    """Launches it before there is a job; once, whatever comes of it."""
    gives_way: bool = False
    """It was launched ahead of a job."""
    busy: bool = False
    """A job has it."""
    used_at: float = field(default_factory=time.monotonic)
    """When the last job let go of it."""
    died: str | None = None
    """Why there is none, if the last one died; until the next has loaded."""
    deaths: int = 0
    """How many in a row died without a job."""


class Learners:
    """Learners by base model; none of them is started twice."""

    def __init__(self, settings: Settings, start_learner: StartLearner) -> None:
        self._settings = settings
        self._start_learner = start_learner
        self._places: dict[str, _Place] = {}
        self._closed = False

    def launch_ahead(self, language: Language) -> None:
        """Let it begin to load where there is room for it; returns at once."""
        place = self._place(language)
        if place.ahead is None and not self._closed:
            place.ahead = asyncio.create_task(self._launch_ahead(place, language))
            place.ahead.add_done_callback(_say_if_failed)

    @asynccontextmanager
    async def borrow(self, language: Language) -> AsyncIterator[LearnerProcess]:
        """A job's learner, loaded, for the length of the block; launched now if there is none.

        One that dies under the job is dropped, and the next job gets another.
        """
        place = self._place(language)
        place.busy = True
        try:
            yield await self._ready(place, language)
        except LearnerDied as error:
            place.died = str(error).partition("\n")[0]
            await self._drop(place)
            raise
        finally:
            place.busy, place.used_at = False, time.monotonic()

    async def _ready(self, place: _Place, language: Language) -> LearnerProcess:
        if place.learner is not None and not place.learner.alive:
            await self._drop(place)
        try:
            learner = await self._loaded(place, language)
        except LearnerDied:
            if not place.gives_way:
                raise
            # One that was launched ahead, and died before this job had it.
            learner = await self._loaded(place, language)
        place.died, place.deaths = None, 0
        return learner

    async def _loaded(self, place: _Place, language: Language) -> LearnerProcess:
        learner = await self._launched(place, language, gives_way=False)
        try:
            await asyncio.to_thread(learner.ready)
        except HoneError:
            place.learner = None  # it closed itself
            raise
        return learner

    async def close_idle(self, idle_s: float) -> None:
        """Close those that no job has used for so long; the next job launches another."""
        for name, place in list(self._places.items()):
            if place.busy or place.learner is None or time.monotonic() < place.used_at + idle_s:
                continue
            async with place.launching:
                place.ahead = None
                await self._drop(place, deadline_s=10.0)
            say("learner closed: it was idle", base_model=name, idle_s=idle_s)

    def status(self) -> dict[str, Any]:
        """Whether the learner of every base model that has one lives."""
        dead = {name: place.died for name, place in self._places.items() if place.died}
        if dead:
            reason = "; ".join(f"{name}: {why}" for name, why in dead.items())
            return {"status": "restarting", "reason": reason}
        loaded = any(place.learner is not None for place in self._places.values())
        return {"status": "ok", "loaded": loaded}

    async def close(self) -> None:
        """End them all; a job that one of them was running is told so by its end. Twice is fine."""
        self._closed = True
        for place in self._places.values():
            if place.learner is not None:
                await asyncio.to_thread(place.learner.close)
        ahead = [place.ahead for place in self._places.values() if place.ahead is not None]
        await asyncio.gather(*ahead, return_exceptions=True)  # which close what they launch now

    def _place(self, language: Language) -> _Place:
        return self._places.setdefault(language.name, _Place())

    async def _launch_ahead(self, place: _Place, language: Language) -> None:
        if await asyncio.to_thread(learning.has_room_ahead, language, self._settings):
            await self._launched(place, language, gives_way=True)
            say("its learner loads ahead of the first job", base_model=language.name)

    async def _launched(
        self, place: _Place, language: Language, *, gives_way: bool
    ) -> LearnerProcess:
        """The learner, which may be loading still."""
        async with place.launching:
            if place.learner is None:
                start = (learning.launch, self._start_learner, language, self._settings)
                place.learner = learner = await asyncio.to_thread(*start, gives_way=gives_way)
                place.used_at, place.gives_way = time.monotonic(), gives_way
                self._watch(place, learner, language)
                if self._closed:  # which did not see it
                    await asyncio.to_thread(place.learner.close)
            return place.learner

    def _watch(self, place: _Place, learner: LearnerProcess, language: Language) -> None:
        loop = asyncio.get_running_loop()

        def ended() -> None:
            with suppress(RuntimeError):  # the loop is closed: the server has stopped
                loop.call_soon_threadsafe(self._notice, place, learner, language)

        learner.when_ended(ended)

    def _notice(self, place: _Place, learner: LearnerProcess, language: Language) -> None:
        """A learner ended. One under a job is the job's to tell; one without a job is replaced."""
        if place.learner is not learner or place.busy or self._closed:
            return
        place.died = f"learner process {learner.pid} ended while it had no job"
        log.warning(
            "a learner died while it had no job and is replaced",
            extra={"fields": {"base_model": language.name, "pid": learner.pid}},
        )
        place.deaths += 1
        if place.deaths <= REPLACED:
            place.ahead = asyncio.create_task(self._replace(place, language))
            place.ahead.add_done_callback(_say_if_failed)

    async def _replace(self, place: _Place, language: Language) -> None:
        await self._drop(place)
        await self._launch_ahead(place, language)
        if place.learner is not None:
            await asyncio.to_thread(place.learner.ready)
            place.died = None

    async def _drop(self, place: _Place, deadline_s: float = 0.0) -> None:
        learner, place.learner = place.learner, None
        if learner is not None:
            await asyncio.to_thread(learner.close, deadline_s=deadline_s)


def _say_if_failed(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.warning("no learner could be launched ahead; the first job tries it", exc_info=error)
