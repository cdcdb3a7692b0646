"""Peak memory of one train step of 4,096 logical tokens, beside the padded, full-logits path.

In:   Setting
Out:  Results for the whole process and for what the step adds to the loaded model

Every run is a fresh process: an allocator does not give back what an earlier step took. Counted
are resident pages (bench/rss.py), interpreter, libraries and weights included.
"""

from collections.abc import Iterator
from typing import Any

from bench.report import Result, result
from bench.setting import Setting
from bench.train import ask_ours, ask_peer, start_ours, start_peft
from bench.workloads import TrainShape, groups

MIB = 2**20
MOST_RUNS = 3
"""Memory hardly varies from run to run."""
PEER = "PEFT, right-padded, full logits"


def run(setting: Setting) -> Iterator[Result]:
    if setting.quick:
        shape = TrainShape(group_size=8, prompt_tokens=48, completion_tokens=16)
    else:
        shape = TrainShape(group_size=8, prompt_tokens=480, completion_tokens=32)
    runs: dict[str, list[dict[str, Any]]] = {"hone": [], "peft": []}
    for number in range(min(setting.repeats, MOST_RUNS)):
        made = groups(setting.encode, shape, seed=number)
        with start_ours(setting) as ours:
            # Twice, and the larger counts: the first step makes what later ones keep.
            answers = [ask_ours(ours, "train", made) for _ in range(2)]
        runs["hone"].append(max(answers, key=lambda a: a["peak"]))
        with start_peft(setting, shape) as peer:
            answers = [ask_peer(peer, made) for _ in range(2)]
        runs["peft"].append(max(answers, key=lambda a: a["peak"]))
        for key, seen in runs.items():
            peak, loaded = seen[-1]["peak"] / MIB, seen[-1]["loaded"] / MIB
            setting.say(f"memory: run {number}, {key}: {peak:.0f} MiB, loaded {loaded:.0f} MiB")
    yield result(
        "memory/total",
        [run["peak"] / MIB for run in runs["hone"]],
        "MiB",
        peer=PEER,
        peer_runs=[run["peak"] / MIB for run in runs["peft"]],
        goal=("ratio", ">=", 4.0),
        smaller_is_better=True,
    )
    yield result(
        "memory/above-loaded",
        [(run["peak"] - run["loaded"]) / MIB for run in runs["hone"]],
        "MiB",
        peer=PEER,
        peer_runs=[(run["peak"] - run["loaded"]) / MIB for run in runs["peft"]],
        smaller_is_better=True,
    )
