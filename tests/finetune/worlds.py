"""A hone server over a tiny model, and the harness's parts pointed at it.

In:   a running LocalBackend, changes to the configuration
Out:  adapters, builders, and rollouts that the server recorded; a proxy that loses things on the way
"""

import json
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
from fastapi import Request, Response
from tests.patience import PATIENCE_S
from tests.workflow.endpoint import Endpoint

import hone
from hone import LocalBackend
from hone.backends.remote import RemoteBackend
from hone.config.schema import FinetuneConfig
from hone.evaluation.base import EvalInputItem, EvalOutputItem
from hone.evaluation.run import Evaluation
from hone.finetune.adapter import HoneServerAdapter, HoneServerAdapterConfig
from hone.finetune.base import EpisodeItem, EpisodeItemRole, Trajectory, TrajectoryCollection
from hone.finetune.builder import RolloutBuilder, RolloutBuilderConfig
from hone.workflow.function import Function
from hone.workflow.llm import LLM

MESSAGES: list[Any] = [{"role": "user", "content": "Say a number."}]


def finetuning(**changes: Any) -> FinetuneConfig:
    """A `finetuning:` section with a reward called `reward`."""
    return FinetuneConfig.model_validate({"reward_function": {"name": "reward"}, **changes})


def adapter_for(
    server: RemoteBackend, base_model: Path | str, training: Any = None, **backend: Any
) -> HoneServerAdapter:
    """One for a model nobody has used yet, at a server that runs already."""
    address = urlsplit(server.base_url)
    fields = {
        "ip": address.hostname,
        "port": address.port,
        "name": f"agent-{secrets.token_hex(4)}",
        "project": "suite",
        "base_model": str(base_model),
        "rank": 4,
        **backend,
    }
    config = {"backend": fields, "training": training or {}}
    return HoneServerAdapter(HoneServerAdapterConfig.model_validate(config))


async def rollout(adapter: HoneServerAdapter, id: str, messages: Any = None, **options: Any) -> Any:
    """One recorded call in a rollout of this id; the choice, as the client returned it."""
    async with hone.rollout(id):
        answer = await adapter.model.openai_client().chat.completions.create(
            model=adapter.model.get_inference_name(),
            messages=messages or MESSAGES,
            **{"max_tokens": 6, "logprobs": True, **options},
        )
    return answer.choices[0]


def message(role: str, content: str, logprobs: Any = None, **metadata: Any) -> EpisodeItem:
    """One message of an episode."""
    return EpisodeItem(
        role=EpisodeItemRole(role), content=content, logprobs=logprobs, metadata=metadata or None
    )


async def collected(
    adapter: HoneServerAdapter, run_id: str, *, examples: int = 1, generations: int = 2, **meta: Any
) -> TrajectoryCollection:
    """Groups of recorded rollouts, each rewarded by its generation."""
    await adapter.open_run(run_id, 7)
    groups = []
    for e in range(examples):
        group = []
        for g in range(generations):
            id = f"{run_id}:{meta.get('epoch', 0)}.0.{e}.{g}~1"
            choice = await rollout(adapter, id)
            group.append(
                Trajectory(
                    episode=[message("user", "Say a number."), message("assistant", "", {})],
                    reward=float(g),
                    rollout=id,
                    trained_calls=[choice.call_id],
                    metadata={"id": f"e{e}"},
                )
            )
        groups.append(group)
    return TrajectoryCollection(trajectories=groups, run_id=run_id, metadata=meta or None)


class LossyProxy(Endpoint):
    """Hands requests on to a hone server and loses some of what it carries."""

    def __init__(self, target: str, *, headers: Collection[str] = (), keys: Collection[str] = ()):
        """`headers` of requests and `keys` of each choice are lost."""
        super().__init__()
        self._target, self._headers, self._keys = target, headers, keys
        self.app.router.routes.clear()
        self.app.api_route("/{path:path}", methods=["GET", "POST"])(self._hand_on)

    async def _hand_on(self, request: Request, path: str) -> Response:
        lost = {"host", "content-length", *self._headers}
        headers = {name: value for name, value in request.headers.items() if name not in lost}
        async with httpx2.AsyncClient(timeout=PATIENCE_S) as client:
            answer = await client.request(
                request.method,
                f"{self._target}/{path}",
                headers=headers,
                content=await request.body(),
            )
        message = answer.json()
        for choice in message.get("choices", ()):
            for key in self._keys:
                choice.pop(key, None)
        return Response(json.dumps(message), answer.status_code, media_type="application/json")


# ---- a builder -----------------------------------------------------------------------------------


class Length:
    """A reward: how long the output is; `bad` says of which items it fails."""

    def __init__(self, bad: tuple[str, ...] = ()) -> None:
        self.bad = bad

    async def evaluate_item(self, item: EvalInputItem) -> EvalOutputItem:
        if item.id in self.bad:
            raise ValueError(f"no idea about {item.id}")
        return EvalOutputItem(id=item.id, score=len(item.output_obj), reasoning={"why": "length"})


@dataclass
class World:
    """A builder over a server, and what its agent may use."""

    adapter: HoneServerAdapter
    builder: RolloutBuilder
    llm: LLM
    run_id: str
    ran: Counter[str] = field(default_factory=Counter)
    """How often the agent ran on each input."""

    def bind(
        self, agent: Callable[..., Any], inputs: list[str], reward: Any = None, **options: Any
    ) -> None:
        async def counted(question: str) -> Any:
            self.ran[question] += 1
            return await agent(question)

        items = [EvalInputItem(id=f"e{i}", input_obj=text) for i, text in enumerate(inputs)]
        self.builder.bind_evaluation(
            Evaluation(
                workflow=Function.of("<workflow>", counted),
                items=items,
                evaluators={"reward": reward or Length()},
                **{"max_concurrency": 4, "host": "localhost", **options},
            )
        )

    async def say(self, question: str, **options: Any) -> str:
        answer = await self.llm.chat([{"role": "user", "content": question}], **options)
        return answer.choices[0].message.content or ""

    async def collect(self, meta: dict[str, Any] | None = None) -> TrajectoryCollection:
        await self.builder.start_run(self.run_id, meta)
        return await self.builder.finalize(self.run_id, meta)


@asynccontextmanager
async def world(
    server: LocalBackend, model: Path, *, generations: int = 2, **config: Any
) -> AsyncIterator[World]:
    adapter = adapter_for(server, model)
    run = finetuning(**config)
    await adapter.initialize(run)
    run_id = f"art_run_{secrets.token_hex(4)}"
    await adapter.open_run(run_id, 0)
    assert adapter.served is not None
    served = adapter.served
    llm = LLM(
        name="actor",
        base_url=served.base_url,
        model=served.model,
        params={"max_tokens": 5, "temperature": 1.0},
    )
    builder = RolloutBuilder(RolloutBuilderConfig(num_generations=generations))
    await builder.initialize(run)
    builder.adapter, adapter.reads_episodes = adapter, True
    try:
        yield World(adapter, builder, llm, run_id)
    finally:
        await llm.close()
        await adapter.close()


def metadata(trajectory: Trajectory) -> dict[str, Any]:
    assert trajectory.metadata is not None
    return trajectory.metadata
