"""A server's state with one model and recorded calls, and trajectories as clients send them.

In:   a State that is not running
Out:  World: adds recorded calls, resolves trajectories; choices in the forms clients know; a model
      as ART's clients describe it
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hone.chat.template import ChatTemplate
from hone.errors import Unprocessable
from hone.server.serve.tokenizer import BaseTokenizer
from hone.server.state import State
from hone.server.train.choice_calls import Start
from hone.server.train.resolve import ResolvedGroups, resolve_groups
from hone.store.models import ModelRecord
from hone.trajectory import Trajectory, TrajectoryGroup
from hone.types import Call, ModelSpec, RecordedCall, TrainConfig

USER = {"role": "user", "content": "How is the weather?"}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
    }
]


def art_model(name: str, project: str, base_model: str, **trainer_args: Any) -> dict[str, Any]:
    """The model object of openpipe-art 0.5.4, as NAT 1.6.0's adapter fills it."""
    return {
        "name": name,
        "project": project,
        "entity": None,
        "id": None,
        "config": None,
        "trainable": True,
        "inference_api_key": None,
        "inference_base_url": None,
        "inference_model_name": None,
        "base_model": base_model,
        "_internal_config": {
            "init_args": None,
            "engine_args": {"tensor_parallel_size": 1, "gpu_memory_utilization": 0.9},
            "torchtune_args": None,
            "trainer_args": trainer_args,
        },
    }


def logprobs_of(ids: Sequence[int], shift: float = 0.0) -> list[float]:
    """Another number at every place, none of them near 0."""
    return [-0.5 - i / 64 - token / 1024 - shift for i, token in enumerate(ids)]


@dataclass
class World:
    """A server's state with one model, and what it would have recorded."""

    state: State
    record: ModelRecord
    language: BaseTokenizer

    @classmethod
    async def open(cls, state: State, base_model: Path) -> "World":
        record = state.models.register(ModelSpec(name="agent", base_model=str(base_model)))
        return cls(state, record, await state.serving.engines.tokenizer(str(base_model)))

    async def close(self) -> None:
        await self.state.serving.close()
        self.state.store.close()

    @property
    def template(self) -> ChatTemplate:
        return self.language.template

    def prompt(self, messages: list[dict[str, Any]], tools: Any = None) -> list[int]:
        return self.template.render(messages, tools)

    def ids(self, text: str, *, end: bool = True) -> list[int]:
        encoded = self.template.tokenizer.encode(text, add_special_tokens=False)
        return encoded + [self.template.stop_ids[0]] * end

    def letters(self, text: str) -> list[int]:
        """One token a byte: ids that encoding the text again would never give."""
        vocab = self.template.tokenizer.get_vocab()
        return [vocab[chr(byte)] for byte in text.encode()] + [self.template.stop_ids[0]]

    def add(
        self,
        ids: Sequence[int],
        messages: list[dict[str, Any]] | None = None,
        *,
        reply: str = "",
        shift: float = 0.0,
        prompt_ids: list[int] | None = None,
        temperature: float = 0.7,
        step: int = 3,
        **changes: Any,
    ) -> RecordedCall:
        messages = [USER] if messages is None else messages
        fields = {
            "id": f"call-{secrets.token_hex(10)}",
            "rollout": "",
            "index": 0,
            "model": str(self.record.key),
            "requested_model": self.record.key.name,
            "base_model": self.record.spec.base_model,
            "adapter_sha256": None,
            "fingerprint": self.language.fingerprint,
            "created_at": 0.0,
            "messages": messages,
            "reply": {"role": "assistant", "content": reply},
            "finish": "stop",
            "call": Call(
                prompt_ids=prompt_ids or [7, *self.prompt(messages)],
                completion_ids=list(ids),
                logprobs=logprobs_of(ids, shift),
                temperature=temperature,
                step=step,
            ),
        }
        recorded = RecordedCall(**fields | changes)
        self.state.calls.add([recorded])
        return recorded

    async def resolve(self, *trajectories: Trajectory, **config: Any) -> ResolvedGroups:
        return await self.resolve_groups([TrajectoryGroup(list(trajectories))], **config)

    async def resolve_groups(self, groups: list[TrajectoryGroup], **config: Any) -> ResolvedGroups:
        # Its calls are of many steps; test_staleness.py says which of them may be trained.
        settings = TrainConfig(**{"max_staleness": None, **config})
        step, adapter = self.state.serving.newest(self.record)
        sha256 = None if adapter is None else adapter.sha256
        start = Start(self.record, settings, step, sha256, advance_when_flat=True)
        return resolve_groups(groups, self.language, self.state.calls, start)

    async def call(self, *items: Any, tools: Any = None) -> Call:
        """The one call of a conversation."""
        (call,) = await self.calls(*items, tools=tools)
        return call

    async def calls(self, *items: Any, tools: Any = None) -> list[Call]:
        resolved = await self.resolve(talk(*items, tools=tools))
        return resolved.groups[0].trajectories[0].calls

    async def refusal(self, *trajectories: Trajectory, **config: Any) -> str:
        with pytest.raises(Unprocessable) as raised:
            await self.resolve(*trajectories, **config)
        return str(raised.value)


def talk(*items: Any, tools: Any = None, **fields: Any) -> Trajectory:
    return Trajectory(messages_and_choices=list(items), tools=tools, **fields)


def choice(
    ids: Sequence[int], text: str, *, shift: float = 0.0, finish: str = "stop", **changes: Any
) -> dict[str, Any]:
    """As ART's clients send a choice."""
    entries = [
        {"token": f"token_id:{token}", "bytes": [], "logprob": value, "top_logprobs": []}
        for token, value in zip(ids, logprobs_of(ids, shift), strict=True)
    ]
    message = {"role": "assistant", "content": text, "refusal": None, "tool_calls": None}
    return {
        "finish_reason": finish,
        "index": 0,
        "logprobs": {"content": entries, "refusal": None},
        "message": message,
    } | changes


def spelt(ids: Sequence[int], text: str, world: World, **changes: Any) -> dict[str, Any]:
    """A choice whose tokens are text, as other servers return it."""
    made = choice(ids, text, **changes)
    for entry, token in zip(made["logprobs"]["content"], ids, strict=True):
        piece = world.template.piece(token)
        entry |= {"token": piece.decode(errors="replace"), "bytes": list(piece)}
    return made


def by_tokens(**changes: Any) -> Trajectory:
    fields = {"prompt_ids": [1, 2, 3], "completion_ids": [4, 5], "logprobs": [-1.0, -2.0]}
    return Trajectory(calls=[Call(**fields | changes)], reward=1.0)
