"""Routes for recorded rollouts, and for runs, whose rollouts are kept until they are closed.

In:   the id of a rollout or of a run
Out:  GET /v1/rollouts/{id}, its /summary and its /held; POST and GET /v1/runs, GET /v1/runs/{id},
      POST /v1/runs/{id}/close

A rollout without calls gives an empty list, not an error: an agent may make no model call.
"""

import asyncio
import time
from contextlib import suppress
from typing import Annotated

from fastapi import APIRouter, Path, Query
from pydantic import Field
from starlette.responses import Response

from hone.errors import Conflict, NotFound
from hone.server.limits import JsonRoute
from hone.server.serve.holds import covered_s
from hone.server.state import State
from hone.types import CallSummary, Name, RecordedCall, RolloutId, RunSpec, Strict

DAY_S = 86400.0
MAX_WAIT_S = 60.0
"""A response that waits longer looks like a dead server to some proxies."""


class RolloutCalls(Strict):
    """The calls of one rollout, in the order of their requests."""

    rollout: str
    calls: list[RecordedCall]


class RolloutHeld(Strict):
    """For how long the server held the calls of a rollout."""

    rollout: str
    held_s: float
    """Time in which at least one of its calls was held, in seconds. A call is held while serving is
    paused for training, while its engine is loaded, restarted or asleep, and while its adapter is
    loaded; not while it waits for other requests in a working engine."""
    open: int
    """Number of its calls that are being answered."""
    holding: bool
    """Whether one of them is held now."""


class RolloutSummary(Strict):
    """The calls of one rollout without their text and tokens, in the order of their requests."""

    rollout: str
    calls: list[CallSummary]


class RunInfo(RunSpec):
    """A run as the server sees it."""

    open: bool
    calls: int
    """Number of recorded calls of the run."""
    unmarked: dict[str, int] = Field(default_factory=dict)
    """Requests to the run's model and its base model, since this server started, that named no rollout
    and no function. They come from agents of the run that hone cannot mark, or from other clients."""


def routes(state: State) -> APIRouter:
    router = APIRouter(tags=["rollouts"], route_class=JsonRoute)

    # Routes that are no coroutines run in a thread: they read the database, and a long rollout is
    # megabytes of JSON.

    @router.get("/v1/rollouts/{rollout_id}", response_model=RolloutCalls)
    def rollout(rollout_id: Annotated[RolloutId, Path()]) -> Response:
        """Every call of a rollout, with its tokens."""
        calls = RolloutCalls(rollout=rollout_id, calls=state.calls.rollout(rollout_id))
        return Response(calls.model_dump_json(), media_type="application/json")

    @router.get("/v1/rollouts/{rollout_id}/held")
    async def held(
        rollout_id: Annotated[RolloutId, Path()],
        within_s: Annotated[float, Query(gt=0, allow_inf_nan=False)] = DAY_S,
        wait_s: Annotated[float, Query(ge=0, le=MAX_WAIT_S)] = 0.0,
    ) -> RolloutHeld:
        """For how long the calls of a rollout were held in the last `within_s`, open ones included.

        If one is held now, the response waits for it, up to `wait_s`.
        """
        holds = state.holds
        await holds.released(rollout_id, wait_s)
        # Since this server started, `holds` knows; calls from before are only recorded.
        before = state.started_at
        stored = await asyncio.to_thread(state.calls.held, rollout_id, before=before)
        offset = time.time() - time.monotonic()
        earlier = [(begin - offset, end - offset) for begin, end in stored]
        since = time.monotonic() - within_s
        return RolloutHeld(
            rollout=rollout_id,
            held_s=round(covered_s([*earlier, *holds.intervals(rollout_id)], since), 3),
            open=holds.open(rollout_id),
            holding=holds.is_held(rollout_id),
        )

    @router.get("/v1/rollouts/{rollout_id}/summary")
    def summary(rollout_id: Annotated[RolloutId, Path()]) -> RolloutSummary:
        """Every call of a rollout, with counts instead of text and tokens."""
        return RolloutSummary(rollout=rollout_id, calls=state.calls.summaries(rollout_id))

    @router.post("/v1/runs")
    def open_run(spec: RunSpec) -> RunInfo:
        """Open a run, or reopen it; its calls are kept until it is closed."""
        if spec.model is not None:
            # By its key: another project may register a model of the same name during the run.
            model = str(state.models.find(spec.model).key)
            spec = spec.model_copy(update={"model": model})
        for alias in spec.aliases:
            if (record := state.models.find_or_none(alias)) is not None:
                raise Conflict(  # the alias would hide that model inside the run
                    f"alias {alias!r} is the name of the model {record.key} on this server; choose "
                    "another alias, or rename the model"
                )
        state.calls.open_run(spec)
        return _run_info(state, spec.id)

    @router.get("/v1/runs")
    def runs(limit: Annotated[int, Query(ge=1, le=1000)] = 100) -> list[RunInfo]:
        """Runs: the open ones first, then those that were closed last."""
        return [_run_info(state, run_id) for run_id in state.calls.runs(limit=limit)]

    @router.get("/v1/runs/{run_id}")
    def run(run_id: Annotated[Name, Path()]) -> RunInfo:
        """Whether a run is open, and how many calls it has."""
        return _run_info(state, run_id)

    @router.post("/v1/runs/{run_id}/close")
    def close_run(run_id: Annotated[Name, Path()]) -> RunInfo:
        """Close a run, so that its calls can be deleted; calls that a job refers to are kept."""
        state.calls.close_run(run_id)
        return _run_info(state, run_id)

    return router


def _run_info(state: State, run_id: str) -> RunInfo:
    spec, is_open, calls = state.calls.run(run_id)
    unmarked: dict[str, int] = {}
    with suppress(NotFound, Conflict):  # by now its name may refer to another model, or to several
        record = state.models.find(spec.model or "")
        unmarked = state.calls.unmarked((str(record.key), record.spec.base_model))
    return RunInfo(**spec.model_dump(), open=is_open, calls=calls, unmarked=unmarked)
