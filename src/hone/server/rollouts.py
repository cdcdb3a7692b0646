"""What was recorded, by rollout; and runs, whose rollouts are kept until they are closed.

In:   the id of a rollout or of a run
Out:  GET /v1/rollouts/{id}; POST and GET /v1/runs, GET /v1/runs/{id}, POST /v1/runs/{id}/close

A rollout that made no call is an empty list and not an error: an agent may end without asking.
"""

import asyncio
from contextlib import suppress
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query
from pydantic import Field
from starlette.responses import Response

from hone.errors import Conflict, NotFound
from hone.server.state import State
from hone.types import Name, RecordedCall, RolloutId, RunSpec, Strict


class RolloutCalls(Strict):
    """The calls of one rollout, in the order of their requests."""

    rollout: str
    calls: list[RecordedCall]


class RunInfo(Strict):
    """A run as the server sees it."""

    id: str
    model: str | None
    seed: int
    open: bool
    calls: int
    """How many calls of it are kept."""
    unmarked: dict[str, int] = Field(default_factory=dict)
    """Requests to the run's model, and to its base model, that named no rollout (and no function),
    since this server started: agents of the run that cannot be seen, or somebody else."""


def routes(state: State) -> APIRouter:
    router = APIRouter(tags=["rollouts"])

    @router.get("/v1/rollouts/{rollout_id}", response_model=RolloutCalls)
    async def rollout(rollout_id: Annotated[RolloutId, Path()]) -> Response:
        """Every call of a rollout, to the token."""

        def found() -> bytes:
            calls = state.calls.rollout(rollout_id)
            return RolloutCalls(rollout=rollout_id, calls=calls).model_dump_json().encode()

        # Written in a thread: a long rollout is megabytes of JSON.
        return Response(await asyncio.to_thread(found), media_type="application/json")

    @router.post("/v1/runs")
    async def open_run(spec: RunSpec) -> RunInfo:
        """Open a run, or go on with it; its calls are kept until it is closed."""

        def opened() -> dict[str, Any]:
            if spec.model is not None:
                state.models.find(spec.model)
            state.calls.open_run(spec)
            return _said(state, spec.id)

        return RunInfo(**await asyncio.to_thread(opened))

    @router.get("/v1/runs")
    async def runs(limit: Annotated[int, Query(ge=1, le=1000)] = 100) -> list[RunInfo]:
        """Runs: the open ones first, then those that were closed last."""

        def listed() -> list[dict[str, Any]]:
            return [_said(state, run_id) for run_id in state.calls.runs(limit=limit)]

        return [RunInfo(**one) for one in await asyncio.to_thread(listed)]

    @router.get("/v1/runs/{run_id}")
    async def run(run_id: Annotated[Name, Path()]) -> RunInfo:
        """Whether a run is open, and how many calls of it are kept."""
        return RunInfo(**await asyncio.to_thread(_said, state, run_id))

    @router.post("/v1/runs/{run_id}/close")
    async def close_run(run_id: Annotated[Name, Path()]) -> RunInfo:
        """Let go of a run's calls; those a job refers to are kept for it."""

        def closed() -> dict[str, Any]:
            state.calls.close_run(run_id)
            return _said(state, run_id)

        return RunInfo(**await asyncio.to_thread(closed))

    return router


def _said(state: State, run_id: str) -> dict[str, Any]:
    spec, is_open, calls = state.calls.run(run_id)
    told = {**spec.model_dump(), "open": is_open, "calls": calls}
    with suppress(NotFound, Conflict):  # its name may mean another model by now, or several
        record = state.models.find(spec.model or "")
        told["unmarked"] = state.calls.unmarked((str(record.key), record.spec.base_model))
    return told
