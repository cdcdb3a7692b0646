"""One learner for each base model: launched ahead of its first job, kept between jobs, replaced.

In:   the Language of a base model that is about to be trained, or of one whose job is here
Out:  its LearnerProcess, loaded; its failure to load, to the job that wanted it
Used: service.py, which closes what is left

A learner takes seconds to load. Who prepares a model is about to train it, so its learner loads
from then on, beside the engine, and gives way to samples; who only asks for answers never prepares,
and pays for no learner. One that dies ahead of its job is the next job's failure, and nothing else's.
"""

import asyncio
from dataclasses import dataclass, field

from hone.errors import HoneError
from hone.learner.worker import LearnerProcess
from hone.server import learning
from hone.server.language import Language
from hone.server.learning import StartLearner
from hone.server.settings import Settings
from hone.server.telemetry import log, say


@dataclass(slots=True, eq=False)
class _Place:
    """The place of one base model's learner."""

    learner: LearnerProcess | None = None
    launching: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by who looks whether there is a learner, and launches it if not."""
    ahead: "asyncio.Task[None] | None" = None
    """Launches it before there is a job; once, whatever comes of it."""


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

    async def ready(self, language: Language) -> LearnerProcess:
        """The learner, loaded; launched now if there is none."""
        place = self._place(language)
        learner = await self._launched(place, language, gives_way=False)
        try:
            await asyncio.to_thread(learner.ready)
        except HoneError:
            place.learner = None  # it closed itself
            raise
        return learner

    async def let_go(self, base_model: str) -> None:
        """Of one that died under its job; the next job gets another."""
        place = self._places.get(base_model)
        if place is not None and place.learner is not None:
            learner, place.learner = place.learner, None
            await asyncio.to_thread(learner.close, deadline_s=0)

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
                place.learner = await asyncio.to_thread(*start, gives_way=gives_way)
                if self._closed:  # which did not see it
                    await asyncio.to_thread(place.learner.close)
            return place.learner


def _say_if_failed(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.warning("no learner could be launched ahead; the first job tries it", exc_info=error)
