"""A hone server as a backend of the real `art` package: openpipe-art 0.5.9 and later.

In:   models and trajectory groups of `art`
Out:  what its Backend protocol promises, from a hone server

Those versions of ART ship no HTTP client: their users write `backend = ArtBackend(URL)` and keep
the rest of the script. This module does not import `art`; it reads its objects by their fields.
`Backend`, the protocol of hone's own backends, is here too: ART has `art.backend.Backend`.
"""

import json
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import replace
from typing import Any

from hone.backends.base import Backend, TrainResult
from hone.backends.remote import RemoteBackend
from hone.errors import NotInThisVersion
from hone.model import TrainableModel
from hone.options import engine_fields
from hone.train_config import ART_LEARNING_RATE
from hone.trajectory import History, Trajectory, TrajectoryGroup
from hone.types import DEFAULT_URL, CheckpointInfo, Failure, stored_name
from hone.wire.metric_names import ART_NAMES

__all__ = ["ArtBackend", "Backend"]


class ArtBackend:
    """`art.Backend` over a hone server."""

    def __init__(self, base_url: str = DEFAULT_URL, api_key: str | None = None) -> None:
        self.server = RemoteBackend(base_url, api_key)

    async def close(self) -> None:
        await self.server.close()

    def _model_inference_name(self, model: Any, step: int | None = None) -> str:
        if not model.trainable:
            name = model.inference_model_name or model.name
        else:
            name = f"{stored_name(model.project)}/{stored_name(model.name)}"
        return name if step is None else f"{name}@{step}"

    async def register(self, model: Any) -> None:
        if model.trainable:
            await self.server.register(_model(model))

    async def _prepare_backend_for_training(
        self, model: Any, config: Mapping[str, Any] | None
    ) -> tuple[str, str]:
        named = _model(model)
        engine_args, _ = engine_fields(
            config
        )  # the rest is about a server that hone does not start
        if engine_args:
            named.engine_args |= engine_args
            await self.server.register(named)
        return await self.server.prepare(named)

    async def _get_step(self, model: Any) -> int:
        return await self.server.step(_model(model))

    async def _delete_checkpoint_files(self, model: Any, steps_to_keep: list[int]) -> None:
        named = {"name": model.name, "project": model.project}
        body = json.dumps({"model": named, "steps_to_keep": steps_to_keep})
        await self.server.ask("POST", "/_delete_checkpoint_files", body)

    async def checkpoints(self, model: Any) -> list[CheckpointInfo]:
        """The retained steps, oldest first."""
        return await self.server.checkpoints(_model(model))

    async def train(
        self, model: Any, trajectory_groups: Iterable[Any], **options: Any
    ) -> TrainResult:
        """Train on the groups; `options` are those of ART's `LocalBackend.train`, and hone's keys.

        As with ART, calls of any earlier step may be trained, and flat groups advance the step. The
        learning rate is that of `options`, else that of the model's `trainer_args`, else ART's.
        """
        named = _model(model)
        options = {"max_staleness": None, "advance_when_flat": True, **options}
        rates = [keys.get("learning_rate") for keys in (options, named.spec().trainer_args)]
        if rates == [None, None] and "config" not in options:
            options["learning_rate"] = ART_LEARNING_RATE
        groups = [_group(group) for group in trajectory_groups]
        result = await self.server.train(named, groups, **options)
        theirs = {ART_NAMES[k]: value for k, value in result.metrics.items() if k in ART_NAMES}
        steps = {"data/step_num_gradient_steps": result.metrics.get("learn/optimizer_steps", 0.0)}
        return replace(result, metrics={**result.metrics, **theirs, **steps})

    async def _train_model(
        self,
        model: Any,
        trajectory_groups: Iterable[Any],
        config: Any,
        dev_config: Mapping[str, Any],
        verbose: bool = False,
    ) -> AsyncIterator[dict[str, float]]:
        """What `TrainableModel.train` of 0.5.9 to 0.5.17 calls."""
        options = {**config.model_dump(exclude_unset=True), **dev_config}
        result = await self.train(model, trajectory_groups, verbose=verbose, **options)
        yield result.metrics

    async def _train_sft(
        self,
        model: Any,
        trajectories: Iterable[Any],
        config: Any,
        dev_config: Mapping[str, Any],
        verbose: bool = False,
    ) -> AsyncIterator[dict[str, float]]:
        raise NotInThisVersion("train_sft through ART's package; use hone.TrainableModel.train_sft")
        yield {}  # makes it a generator, as the protocol requires


def _model(model: Any) -> TrainableModel:
    """ART's model as hone's."""
    return TrainableModel(
        name=model.name,
        project=model.project,
        base_model=model.base_model,
        _internal_config=getattr(model, "_internal_config", None),
    )


def _group(group: Any) -> TrajectoryGroup:
    return TrajectoryGroup(
        [_trajectory(one) for one in group.trajectories],
        exceptions=[
            Failure(type=e.type, message=e.message, traceback=e.traceback) for e in group.exceptions
        ],
        metrics=dict(group.metrics),
        metadata=dict(group.metadata),
        logs=list(group.logs),
    )


def _trajectory(one: Any) -> Trajectory:
    return Trajectory(
        **_history(one),
        additional_histories=[History(**_history(h)) for h in one.additional_histories],
        reward=one.reward,
        initial_policy_version=one.initial_policy_version,
        final_policy_version=one.final_policy_version,
        metrics=dict(one.metrics),
        metadata=dict(one.metadata),
        logs=list(one.logs),
        start_time=one.start_time,
    )


def _history(history: Any) -> dict[str, Any]:
    tools = [
        tool if "type" in tool else {"type": "function", "function": tool}
        for tool in history.tools or ()
    ]
    return {"messages_and_choices": list(history.messages_and_choices), "tools": tools or None}
