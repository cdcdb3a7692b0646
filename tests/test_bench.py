"""The benchmarks' own arithmetic and workloads, on numbers made by hand; nothing is timed here."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import httpx2
import numpy as np
import pytest
import torch
from bench import curves, gpu_cycle, gpu_serve
from bench.endpoint import endpoint
from bench.gpu_cycle import longest_gap
from bench.harness import overheads
from bench.peers.packing import packed_step
from bench.process import Contender, ContenderFailed
from bench.publish import held
from bench.report import Goal, cells, markdown_table, merged, read, result, write
from bench.workloads import RolloutShape, TrainShape, groups, prompts, sequences
from tests.patience import PATIENCE_S

from hone.learner.learner import Learner
from hone.models.decoder import Decoder
from hone.models.files import load_tokenizer
from hone.models.find import find
from hone.models.lora import Lora
from hone.types import TrainConfig

FIELDS = {
    "name", "value", "unit", "peer", "peer_value", "ratio", "goal", "met", "machine", "commit",
}  # fmt: skip


def letters(text: str) -> list[int]:
    """A tokenizer: one token a character."""
    return [ord(letter) for letter in text]


def test_a_speed_is_the_median_over_the_peers_median():
    # medians 120 and 40: three times as fast, which is what was asked
    r = result(
        "rollout/x", [100, 120, 999], "tokens/s",
        peer="x", peer_runs=[40, 1, 41], goal=("ratio", ">=", 3.0),
    )  # fmt: skip
    assert (r.value, r.peer_value, r.ratio, r.goal, r.met) == (120, 40, 3, ">= 3x", True)


def test_a_size_is_better_when_it_is_smaller():
    # 1000 against 3900: 3.9 times smaller, not 4
    r = result(
        "memory/total", [1000], "MiB",
        peer="x", peer_runs=[3900], goal=("ratio", ">=", 4.0), smaller_is_better=True,
    )  # fmt: skip
    assert (r.ratio, r.met) == (3.9, False)


@pytest.mark.parametrize(
    ("value", "goal", "met"),
    [
        (50.0, ("value", "<=", 50.0), True),
        (50.001, ("value", "<=", 50.0), False),  # judged before it is rounded
        (7.0, None, None),
        (7.0, ("ratio", ">=", 2.0), None),  # the peer was not measured: neither met nor missed
    ],
)
def test_met_is_about_what_was_measured(value: float, goal: Goal | None, met: bool | None):
    assert result("publish/held", [value], "ms", peer="x", goal=goal).met is met


def test_the_file_has_the_promised_fields_and_reads_back(tmp_path: Path):
    made = [result("a/x", [2], "ms"), result("b/y", [3], "s", peer="p", peer_runs=[6])]
    write(tmp_path / "results.json", made)
    entries = json.loads((tmp_path / "results.json").read_text())
    assert [set(entry) for entry in entries] == [FIELDS, FIELDS]
    assert entries[0]["peer_value"] is None and entries[1]["ratio"] == 0.5
    assert read(tmp_path / "results.json") == made
    assert read(tmp_path / "nothing.json") == []


def test_a_new_run_replaces_its_own_benchmark_only():
    old = [result("a/x", [1], "ms"), result("a/z", [1], "ms"), result("b/y", [1], "ms")]
    results = merged(old, [result("a/x", [2], "ms")])
    assert [(r.name, r.value) for r in results] == [("b/y", 1), ("a/x", 2)]


def test_the_table_says_what_is_not_known():
    r = replace(result("a/x", [1.5], "ms", peer="p", goal=("ratio", ">=", 2.0)), commit="abc")
    assert cells(r) == ("a/x", "1.5 ms", "p", "-", "-", ">= 2x", "-")
    table = markdown_table([r, r]).splitlines()
    assert table[2] == table[3] == "| a/x | 1.5 ms | p | - | - | >= 2x | - |"
    assert table[5:] == [f"Measured on: {r.machine}, at commit abc."]


def test_shapes_count_as_the_issue_does():
    assert RolloutShape().sampled_tokens == 8 * 8 * 32 == 2048
    assert TrainShape().logical_tokens == 8 * (256 + 32) == 2304
    assert TrainShape(prompt_tokens=480).logical_tokens == 4096


def test_prompts_have_their_length_and_share_no_beginning():
    first, again, other = (prompts(letters, 8, 300, seed=seed) for seed in (0, 0, 1))
    assert first == again
    assert {len(p) for p in first + other} == {300}
    assert len({p[0] for p in first}) == 8
    # the same town begins prompt i of every repeat; what follows differs before a cache's 16 tokens
    assert all(a[:16] != b[:16] for a, b in zip(first, other, strict=True))


def test_the_prompts_of_a_step_on_a_gpu_have_512_tokens():
    tokenizer = load_tokenizer(find("smollm2-135m-instruct"))
    chats = [
        [{"role": "user", "content": text}]
        for text in gpu_serve.prompts(gpu_serve.STEP_PROMPT_WORDS)
    ]
    ids: Any = tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=False)
    assert (
        median(map(len, ids)) == 512
    )  # a few first words are two tokens without a space before them


def test_a_group_shares_its_prompt_and_nothing_else():
    (group,) = groups(letters, TrainShape(prompt_tokens=40, completion_tokens=20), seed=3)
    calls = [t.calls[0] for t in group.trajectories]
    assert len(calls) == 8 and len({tuple(c.prompt_ids) for c in calls}) == 1
    assert len({c.completion_ids[0] for c in calls}) == 8
    rows = sequences([group])
    assert [len(row["ids"]) for row in rows] == [60] * 8
    # rewards 0 and 1 in turn: mean and deviation 1/2
    assert [row["advantage"] for row in rows[:2]] == pytest.approx([-1, 1], rel=1e-5)


def test_groups_of_one_share_nothing():
    made = groups(letters, TrainShape(groups=8, group_size=1, prompt_tokens=20), seed=0)
    assert len({g.trajectories[0].calls[0].prompt_ids[0] for g in made}) == 8
    assert {g.trajectories[0].reward for g in made} == {0.0, 1.0}


def test_held_is_the_longest_gap_during_publish_less_the_usual_one():
    # gaps 1 1 1 4 1 1, published from 3.5 to 5: the gap 3..7 touches it; 4 - 1 = 3
    assert held([0, 1, 2, 3, 7, 8, 9], [(3.5, 5)]) == 3
    # twice: the gaps 3..7 and 8..10 touch; the longer one counts
    assert held([0, 1, 2, 3, 7, 8, 10, 11], [(3.5, 5), (9, 9.5)]) == 3


def test_overhead_is_the_difference_of_the_medians_in_milliseconds():
    # medians 3 ms and 5 ms; of 100 steps between 0 and 1 s the 99th percentile is 1 ms further on
    assert overheads([0.001, 0.003, 0.009], [0.004, 0.005, 0.006])["p50"] == pytest.approx(2)
    alone = [i / 100 for i in range(101)]
    assert overheads(alone, [s + 0.001 for s in alone])["p99"] == pytest.approx(1)


def test_the_endpoint_answers_like_a_server_that_records():
    with endpoint() as url:
        body = httpx2.post(f"{url}/chat/completions", json={"model": "m"}, trust_env=False).json()
    (choice,) = body["choices"]
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"]) == 16
    assert body["usage"]["total_tokens"] == 64 + 16


def test_a_contender_that_ends_is_reported_with_its_last_words():
    with pytest.raises(ContenderFailed, match=r"(?s)during 'start': it ended.*No module named"):
        Contender.start("bench.no_such_contender", {}, deadline_s=PATIENCE_S)


def test_plain_packing_computes_the_same_gradient(tiny_llama_dir: Path):
    made = groups(
        lambda text: [i % 500 for i in letters(text)],
        TrainShape(groups=4, group_size=1, prompt_tokens=12, completion_tokens=5),
        seed=0,
    )
    # a row of 40 tokens holds two sequences of 17; a norm of 1e9 clips nothing
    config = TrainConfig(baseline="batch", row_tokens=40, max_grad_norm=1e9)
    decoder = Decoder.load(tiny_llama_dir)
    gradients: list[list[torch.Tensor]] = []
    for packed in (False, True):
        lora = Lora.init(decoder.config)
        learner = Learner(decoder, lora, base_model="tiny")
        if packed:
            assert packed_step(learner, made, config) == 4 * 17
        else:
            learner.train(made, config, probe=False)
        gradients.append([leaf.grad for _, leaf in lora.parameters() if leaf.grad is not None])
    assert len(gradients[0]) == len(gradients[1]) > 0
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-7)


@pytest.mark.e2e
def test_publish_runs_with_a_tiny_model(tiny_model: Path, tmp_path: Path):
    """Its numbers mean nothing; what it calls in engine and learner has to exist."""
    model, out = tmp_path / "model", tmp_path / "results.json"
    shutil.copytree(tiny_model, model)
    config = json.loads((model / "config.json").read_text())
    config["max_position_embeddings"] = 8192  # a tiny model would reach 512 before it is measured
    (model / "config.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "bench", "publish", "--quick"]
    subprocess.run(
        [*command, "--model", str(model), "--out", str(out)], check=True, timeout=PATIENCE_S
    )
    measured = {r.name for r in read(out)}
    assert measured >= {"publish/held", "publish/locked", "publish/together", "publish/wall"}


TREE = """
import os, subprocess, sys

CHILDREN = {
    "server": ["hone_vllm_worker.py", "hone.learner.child", "body"],
    "hone_vllm_worker.py": ["VLLM::EngineCore"],
}
name = sys.argv[1]
os.write(1, f"{name} {os.getpid()}\\n".encode())  # at once: the others write there, too
for child in CHILDREN.get(name, []):
    subprocess.Popen([sys.executable, __file__, child])
sys.stdin.read()
"""
"""A server, vLLM with its engine, a learner and a worker process."""


@pytest.fixture
def server_tree(tmp_path: Path) -> Iterator[dict[str, int]]:
    """Process ids by name."""
    script = tmp_path / "tree.py"
    script.write_text(TREE)
    command, pipe = [sys.executable, str(script), "server"], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as server:
        assert server.stdout is not None
        lines = [server.stdout.readline().split() for _ in range(5)]
        yield {name: int(pid) for name, pid in lines}


def test_gpu_memory_is_that_of_roles_and_left_out_where_it_is_not_known(
    server_tree: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    sizes = dict(zip(server_tree, (1, 20, 300, 4000, 50_000), strict=True))
    lines = [f"{server_tree[name]}, {size}" for name, size in sizes.items()]
    stranger = os.getpid()
    lines += [f"{stranger}, 7", "13, [N/A]", "[N/A], 5", "[Insufficient Permissions]"]
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert gpu_cycle.gpu_memory_mb(server_tree["server"]) == {
        "other": sizes["server"] + sizes["body"],
        "vllm": sizes["hone_vllm_worker.py"] + sizes["VLLM::EngineCore"],
        "learner": sizes["hone.learner.child"],
        str(stranger): 7,
    }
    by_pid = {str(pid): sizes[name] for name, pid in server_tree.items()}
    assert gpu_cycle.gpu_memory_mb(None) == by_pid | {str(stranger): 7}


def test_memory_of_cycles_is_counted_from_the_second_job_on():
    memory = [{"vllm": 90}, {"vllm": 50}, {"vllm": 70, "learner": 8}, {"vllm": 60}]
    assert gpu_cycle.over_cycles(memory) == {
        "vllm": {"second": 50, "last": 60, "most": 70},
        "learner": {"second": 0, "last": 0, "most": 8},
    }
    assert gpu_cycle.over_cycles(memory[:1]) == {"vllm": {"second": 90, "last": 90, "most": 90}}


def test_the_longest_gap_of_a_phase_may_begin_before_it():
    gaps = [(0.0, 1.0), (1.0, 1.2), (3.0, 5.0)]
    assert longest_gap(gaps, 0.9, 1.1) == 1.0
    assert longest_gap(gaps, 1.05, 2.0) == pytest.approx(0.2)
    assert longest_gap(gaps, 6.0, 7.0) is None


def test_the_curves_of_the_newest_runs_are_drawn(tmp_path: Path):
    def runs(*rewards: list[float]) -> dict[str, Any]:
        lines = [
            {"what": curves.WHAT, "example": "02", "seed": 9 - seed, "rewards": values}
            | {"before": values[0], "after": values[-1]}
            for seed, values in enumerate(rewards)
        ]
        return {"measured": [{"what": "GRPO step"}, *lines]}

    records = tmp_path / "gpu.json"
    both = [runs([0.0, 0.1]), runs([0.25, 0.5], [0.75, 1.0]), {"measured": []}]
    records.write_text(json.dumps({"runs": both}))
    found = curves.recorded(records)
    assert [run["seed"] for run in found["02"]] == [8, 9]
    training, held_out = curves.picture("02", found["02"]).axes
    lines = [np.asarray(line.get_ydata()).tolist() for line in training.lines]
    assert lines == [[0.75, 1.0], [0.25, 0.5], [0.5, 0.75]]  # each, and their mean
    assert np.asarray(held_out.lines[-1].get_ydata()).tolist() == [0.5, 0.75]
    assert [text.get_text() for text in held_out.texts] == ["0.50", "0.75"]


def test_gpu_json_has_the_curves_of_both_examples():
    found = curves.recorded(curves.RECORDS)
    seeds = {example: [run["seed"] for run in runs] for example, runs in found.items()}
    assert seeds == {"02_tool_calls": list(range(6)), "03_tic_tac_toe": list(range(6))}
