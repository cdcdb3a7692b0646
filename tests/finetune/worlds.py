"""A hone server over a tiny model, and the harness's parts pointed at it.

In:   a running LocalBackend, changes to the configuration
Out:  adapters, and rollouts that the server recorded; a proxy that loses things on the way
Used: test_adapter.py, test_builder.py and test_preflight.py
"""

import json
import secrets
from collections.abc import Collection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
from fastapi import Request, Response
from tests.workflow.endpoint import Endpoint

import hone
from hone.backends.remote import RemoteBackend
from hone.config.schema import FinetuneConfig
from hone.finetune.adapter import ARTTrainerAdapter, ARTTrainerAdapterConfig
from hone.finetune.base import EpisodeItem, EpisodeItemRole, Trajectory, TrajectoryCollection

MESSAGES: list[Any] = [{"role": "user", "content": "Say a number."}]


def finetuning(**changes: Any) -> FinetuneConfig:
    """A `finetuning:` section with a reward called `reward`."""
    return FinetuneConfig.model_validate({"reward_function": {"name": "reward"}, **changes})


def adapter_for(
    server: RemoteBackend, base_model: Path | str, training: Any = None, **backend: Any
) -> ARTTrainerAdapter:
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
    return ARTTrainerAdapter(ARTTrainerAdapterConfig.model_validate(config))


async def rollout(adapter: ARTTrainerAdapter, id: str, messages: Any = None, **options: Any) -> Any:
    """One recorded call in a rollout of this id; the choice, as the client returned it."""
    async with hone.rollout(id):
        answer = await adapter.model.openai_client().chat.completions.create(
            model=adapter.model.get_inference_name(),
            messages=messages or MESSAGES,
            **{"max_tokens": 6, "logprobs": True, **options},
        )
    return answer.choices[0]


def said(role: str, content: str, logprobs: Any = None, **metadata: Any) -> EpisodeItem:
    """One message of an episode."""
    return EpisodeItem(
        role=EpisodeItemRole(role), content=content, logprobs=logprobs, metadata=metadata or None
    )


async def collected(
    adapter: ARTTrainerAdapter, run_id: str, *, examples: int = 1, generations: int = 2, **meta: Any
) -> TrajectoryCollection:
    """Groups of recorded rollouts, each rewarded by its generation."""
    await adapter.open_run(run_id, 7)
    groups = []
    for e in range(examples):
        group = []
        for g in range(generations):
            id = f"{run_id}:{meta.get('epoch', 0)}.0.{e}.{g}.s1"
            choice = await rollout(adapter, id)
            group.append(
                Trajectory(
                    episode=[said("user", "Say a number."), said("assistant", "", {})],
                    reward=float(g),
                    metadata={"id": f"e{e}", "rollout": id, "calls": [choice.call_id]},
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
        kept = {name: value for name, value in request.headers.items() if name not in lost}
        async with httpx2.AsyncClient(timeout=60) as client:
            answer = await client.request(
                request.method,
                f"{self._target}/{path}",
                headers=kept,
                content=await request.body(),
            )
        said = answer.json()
        for choice in said.get("choices", ()):
            for key in self._keys:
                choice.pop(key, None)
        return Response(json.dumps(said), answer.status_code, media_type="application/json")
