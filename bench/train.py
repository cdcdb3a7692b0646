"""Learning: logical tokens a second of one optimizer step, beside PEFT, TRL, and plain packing.

In:   Setting
Out:  one Result per peer, one for hone's two bodies, one for a step in which nothing can be shared;
      for long prompts one each of speed and of peak memory per peer

A logical token is one that an unshared computation would compute: every completion counts with its
whole prompt. A step is forward, backward, clipping and AdamW; hone's time holds packing as well.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from importlib.metadata import version
from typing import Any

from bench.process import Contender, ContenderFailed
from bench.report import Result, result
from bench.setting import Setting
from bench.workloads import TrainShape, groups, sequences
from hone.models.shape import BODY

DEADLINE_S = 900.0
MIB = 2**20
LONG = {"prompt_tokens": 2048, "completion_tokens": 256}
Start = Callable[[Setting, TrainShape], Contender]
CONFIG = {"learning_rate": 1e-6, "loss": "grpo"}


LONG_ROUNDS = 2
"""A step of the long workload takes the peers minutes."""


def run(setting: Setting) -> Iterator[Result]:
    small = {"prompt_tokens": 48, "completion_tokens": 8} if setting.quick else {}
    long = {"prompt_tokens": 192, "completion_tokens": 24} if setting.quick else LONG
    shared = TrainShape(groups=1, group_size=8, **small)
    alone = TrainShape(groups=8, group_size=1, **small)
    with ExitStack() as stack:
        ours = stack.enter_context(start_ours(setting))
        yield from _beside_peers(setting, ours, shared)
        yield from _bodies(setting, ours, shared)
        yield from _nothing_shared(setting, ours, alone)
        yield from _long(setting, ours, TrainShape(groups=1, group_size=8, **long), shared)


def _beside_peers(setting: Setting, ours: Contender, shape: TrainShape) -> Iterator[Result]:
    starts = {
        "peft": (f"PEFT {version('peft')}, right-padded, full logits", start_peft),
        "peft-kept": (f"PEFT {version('peft')}, right-padded, logits_to_keep", _start_kept),
        "trl": (f"TRL {version('trl')} GRPOTrainer.compute_loss", _start_trl),
    }
    with ExitStack() as stack:
        peers = _started(setting, shape, starts, stack)
        runs = _rounds(setting, ours, peers, shape, rounds=setting.repeats, warm=shape)
    for key, goal in (("peft", 4.0), ("peft-kept", None), ("trl", None)):
        yield result(
            f"train/{key}",
            [run["speed"] for run in runs["hone"]],
            "tokens/s",
            peer=starts[key][0],
            peer_runs=[run["speed"] for run in runs.get(key, ())],
            goal=None if goal is None else ("ratio", ">=", goal),
        )


def _long(
    setting: Setting, ours: Contender, shape: TrainShape, warm: TrainShape
) -> Iterator[Result]:
    """A prompt much longer than its answers; the peers take one sequence at a time, for memory."""
    starts = {
        "peft": (f"PEFT {version('peft')}, sequence by sequence, full logits", _start_peft_long),
        "peft-kept": (
            f"PEFT {version('peft')}, sequence by sequence, logits_to_keep",
            _start_kept_long,
        ),
    }
    with ExitStack() as stack:
        peers = _started(setting, shape, starts, stack)
        rounds = min(setting.repeats, LONG_ROUNDS)
        runs = _rounds(setting, ours, peers, shape, rounds=rounds, warm=warm)
    for key, (shown, _) in starts.items():
        theirs = runs.get(key, ())
        yield result(
            f"train/{key}-long",
            [run["speed"] for run in runs["hone"]],
            "tokens/s",
            peer=shown,
            peer_runs=[run["speed"] for run in theirs],
        )
        yield result(
            f"train/{key}-long-memory",
            [run["peak"] / MIB for run in runs["hone"]],
            "MiB",
            peer=shown,
            peer_runs=[run["peak"] / MIB for run in theirs],
            smaller_is_better=True,
        )


def _started(
    setting: Setting, shape: TrainShape, starts: dict[str, tuple[str, Start]], stack: ExitStack
) -> dict[str, Contender]:
    """The peers that can be started."""
    peers: dict[str, Contender] = {}
    for key, (shown, start) in starts.items():
        if key.partition("-")[0] in setting.without:
            continue
        setting.say(f"train: starting {shown}")
        try:
            peers[key] = stack.enter_context(start(setting, shape))
        except ContenderFailed as error:
            setting.say(f"train: {shown} is left out: {error}")
    return peers


def _rounds(
    setting: Setting,
    ours: Contender,
    peers: dict[str, Contender],
    shape: TrainShape,
    *,
    rounds: int,
    warm: TrainShape,
) -> dict[str, list[dict[str, Any]]]:
    """What everybody measured in every round, with its speed; hone's first."""
    runs: dict[str, list[dict[str, Any]]] = {key: [] for key in ("hone", *peers)}
    for number in range(-1, rounds):  # the first round warms up and is forgotten
        computed = shape if number >= 0 else warm
        made = groups(setting.encode, computed, seed=number)
        for key, contender in (("hone", ours), *peers.items()):
            answer = ask_ours(ours, "train", made) if key == "hone" else ask_peer(contender, made)
            speed = _tokens_per_s(answer, computed)
            peak = answer["peak"] / MIB if "peak" in answer else 0
            setting.say(f"train: round {number}, {key}: {speed:.0f} tokens/s, peak {peak:.0f} MiB")
            if number >= 0:
                runs[key].append({**answer, "speed": speed})
    return runs


def _bodies(setting: Setting, ours: Contender, shape: TrainShape) -> Iterator[Result]:
    """hone's own decoder and the transformers model, as the learner's body."""
    with start_ours(setting, env={BODY: "transformers"}) as other:
        decoder, transformers = _in_turn(
            setting,
            shape,
            partial(ask_ours, ours, "train"),
            partial(ask_ours, other, "train"),
            what="decoder and transformers",
        )
    yield result(
        "train/body",
        decoder,
        "tokens/s",
        peer="hone, the transformers model as its body",
        peer_runs=transformers,
    )


def _nothing_shared(setting: Setting, ours: Contender, shape: TrainShape) -> Iterator[Result]:
    trie, packed = _in_turn(
        setting,
        shape,
        partial(ask_ours, ours, "train", baseline="batch"),
        partial(ask_ours, ours, "packed", baseline="batch"),
        what="nothing shared, trie and plain packing",
    )
    yield result(
        "train/nothing-shared",
        trie,
        "tokens/s",
        peer="plain packing, same decoder",
        peer_runs=packed,
        goal=("ratio", ">=", 0.95),
    )


def _in_turn(
    setting: Setting, shape: TrainShape, *asks: Callable[[list[Any]], dict[str, Any]], what: str
) -> tuple[list[float], ...]:
    """Tokens/s of each, in every round but the first, which warms up."""
    speeds: tuple[list[float], ...] = tuple([] for _ in asks)
    for number in range(-1, setting.repeats):
        made = groups(setting.encode, shape, seed=number)
        # Who comes first changes every round: the second finds warmer caches.
        for ask, mine in list(zip(asks, speeds, strict=True))[:: 1 if number % 2 else -1]:
            mine.append(_tokens_per_s(ask(made), shape))
        newest = ", ".join(f"{mine[-1]:.0f}" for mine in speeds)
        setting.say(f"train: {what}, round {number}: {newest} tokens/s")
    return tuple(mine[1:] for mine in speeds)


def _tokens_per_s(answer: dict[str, Any], shape: TrainShape) -> float:
    assert answer["tokens"] == shape.logical_tokens, (answer, shape)
    return answer["tokens"] / answer["seconds"]


def start_ours(setting: Setting, env: dict[str, str] | None = None) -> Contender:
    settings = {"kind": "learner", "model": str(setting.model), "adapter": str(setting.adapter)}
    return Contender.start("bench.ours", settings, name="hone", env=env)


def start_peft(setting: Setting, shape: TrainShape, **changes: Any) -> Contender:
    settings = {"model": str(setting.model), "adapter": str(setting.adapter), **changes}
    return Contender.start("bench.peers.hf_train", settings)


def _start_kept(setting: Setting, shape: TrainShape) -> Contender:
    return start_peft(setting, shape, logits_to_keep=True)


def _start_peft_long(setting: Setting, shape: TrainShape) -> Contender:
    return start_peft(setting, shape, micro_batch=1)


def _start_kept_long(setting: Setting, shape: TrainShape) -> Contender:
    return start_peft(setting, shape, micro_batch=1, logits_to_keep=True)


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
