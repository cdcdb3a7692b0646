"""Learning: logical tokens a second of one optimizer step, beside PEFT, TRL, and plain packing.

In:   Setting
Out:  one Result per peer, and one for a step in which nothing can be shared
Used: bench/__main__.py

A logical token is one that an unshared computation would compute: every completion counts with its
whole prompt. A step is forward, backward, clipping and AdamW; hone's time holds packing as well.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from importlib.metadata import version
from typing import Any

from bench.process import Contender, ContenderFailed
from bench.report import Result, result
from bench.setting import Setting
from bench.workloads import TrainShape, groups, sequences

DEADLINE_S = 900.0
CONFIG = {"learning_rate": 1e-6, "loss": "grpo"}


def run(setting: Setting) -> Iterator[Result]:
    small = {"prompt_tokens": 48, "completion_tokens": 8} if setting.quick else {}
    shared = TrainShape(groups=1, group_size=8, **small)
    alone = TrainShape(groups=8, group_size=1, **small)
    with ExitStack() as stack:
        ours = stack.enter_context(start_ours(setting))
        yield from _beside_peers(setting, ours, shared, stack)
        yield from _nothing_shared(setting, ours, alone)


def _beside_peers(
    setting: Setting, ours: Contender, shape: TrainShape, stack: ExitStack
) -> Iterator[Result]:
    shown = {
        "peft": f"PEFT {version('peft')}, right-padded, full logits",
        "trl": f"TRL {version('trl')} GRPOTrainer.compute_loss",
    }
    peers: dict[str, Contender] = {}
    for key, start in (("peft", start_peft), ("trl", _start_trl)):
        if key in setting.without:
            continue
        setting.say(f"train: starting {shown[key]}")
        try:
            peers[key] = stack.enter_context(start(setting, shape))
        except ContenderFailed as error:
            setting.say(f"train: {shown[key]} is left out: {error}")
    speeds: dict[str, list[float]] = {key: [] for key in ("hone", *peers)}
    for number in range(-1, setting.repeats):  # the first round warms up and is forgotten
        made = groups(setting.encode, shape, seed=number)
        for key, contender in (("hone", ours), *peers.items()):
            answer = ask_ours(ours, "train", made) if key == "hone" else ask_peer(contender, made)
            speed = _tokens_per_s(answer, shape)
            setting.say(f"train: round {number}, {key}: {speed:.0f} tokens/s")
            if number >= 0:
                speeds[key].append(speed)
    for key, goal in (("peft", 4.0), ("trl", None)):
        yield result(
            f"train/{key}",
            speeds["hone"],
            "tokens/s",
            peer=shown[key],
            peer_runs=speeds.get(key),
            goal=None if goal is None else ("ratio", ">=", goal),
        )


def _nothing_shared(setting: Setting, ours: Contender, shape: TrainShape) -> Iterator[Result]:
    speeds: dict[str, list[float]] = {"train": [], "packed": []}
    for number in range(-1, setting.repeats):
        made = groups(setting.encode, shape, seed=number)
        # Who comes first changes every round: the second finds warmer caches.
        for do in ("train", "packed") if number % 2 else ("packed", "train"):
            answer = ask_ours(ours, do, made, baseline="batch")
            speed = _tokens_per_s(answer, shape)
            setting.say(f"train: nothing shared, round {number}, {do}: {speed:.0f} tokens/s")
            if number >= 0:
                speeds[do].append(speed)
    yield result(
        "train/nothing-shared",
        speeds["train"],
        "tokens/s",
        peer="plain packing, same decoder",
        peer_runs=speeds["packed"],
        goal=("ratio", ">=", 0.95),
    )


def _tokens_per_s(answer: dict[str, Any], shape: TrainShape) -> float:
    assert answer["tokens"] == shape.logical_tokens, (answer, shape)
    return answer["tokens"] / answer["seconds"]


def start_ours(setting: Setting) -> Contender:
    settings = {"kind": "learner", "model": str(setting.model), "adapter": str(setting.adapter)}
    return Contender.start("bench.ours", settings, name="hone")


def start_peft(setting: Setting, shape: TrainShape) -> Contender:
    settings = {"model": str(setting.model), "adapter": str(setting.adapter)}
    return Contender.start("bench.peers.hf_train", settings)


def _start_trl(setting: Setting, shape: TrainShape) -> Contender:
    settings = {
        "model": str(setting.model),
        "adapter": str(setting.adapter),
        "sequences": shape.sequences,
        "group_size": shape.group_size,
    }
    return Contender.start("bench.peers.trl_train", settings)


def ask_ours(ours: Contender, do: str, made: list[Any], **config: Any) -> dict[str, Any]:
    dumped = [group.model_dump() for group in made]
    return ours.measure(do, groups=dumped, config=CONFIG | config, deadline_s=DEADLINE_S)


def ask_peer(peer: Contender, made: list[Any]) -> dict[str, Any]:
    return peer.measure("train", sequences=sequences(made), deadline_s=DEADLINE_S)
