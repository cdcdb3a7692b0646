"""`python -m bench.gpu_cycle`: GRPO steps on one GPU, by phase; publishes; many sleeps; KL of learner and vLLM.

In:   a Python with vLLM, and a model directory or the shape of one (random weights)
Out:  one JSON object per line, as soon as it is measured

Everything goes through `hone serve` and its HTTP API. `step` samples groups of rollouts and trains on
them. `publish` trains while chats are streamed: how soon the new step answers after its checkpoint was
saved, and the longest gap between two tokens meanwhile. `cycles` trains one small job after the other;
in each the engine sleeps, wakes and publishes, and its tensors are compared with the adapter. `kl` tells
how far the learner's log-probabilities are from vLLM's, beside plain HF + PEFT in bfloat16 on the same tokens.
"""

import argparse
import asyncio
import json
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import psutil

import hone
from bench.gpu_serve import (
    STEP_PROMPT_WORDS,
    Server,
    engine_args,
    hone_server,
    make_parser,
    prompts,
    random_model,
    say,
)
from hone.backends.remote import RemoteBackend
from hone.inference.vllm.process import WORKER
from hone.model import TrainableModel
from hone.trajectory import JobRequest
from hone.types import JobEvent, JobInfo

PHASES = ("started", "learned", "saved", "published", "proved", "done")
"""Events of a job, in order."""
STREAMS = 8
"""Chats that are streamed while a step is published."""
PROBE_S = 0.02
"""Time between two one-token requests meanwhile; none waits for the answer of the one before."""
PROBES = 8
"""Most of them that wait at a time: serving may be paused."""
ROLES = {WORKER: "vllm", "hone.learner.child": "learner"}
"""Parts of command lines, and the role of such a process and its children."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser("bench.gpu_cycle", __doc__)
    parser.add_argument("--only", nargs="+", default=["step", "publish", "cycles"])
    parser.add_argument("--groups", type=int, default=64)
    parser.add_argument("--rollouts", type=int, default=8, help="of every group")
    parser.add_argument(
        "--prompt-words",
        type=int,
        default=STEP_PROMPT_WORDS,
        help="by default 512 tokens with SmolLM2's tokenizer and chat template",
    )
    parser.add_argument("--answer-tokens", type=int, default=256)
    parser.add_argument(
        "--repeats", type=int, default=4, help="of step, publish (the first warms up) and kl"
    )
    parser.add_argument("--cycles", type=int, default=50)
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="of kl")
    parser.add_argument("--max-seq-length", type=int, default=2048)
    options = parser.parse_args(arguments)
    options.scratch.mkdir(parents=True, exist_ok=True)
    model = options.model or random_model(options)
    with hone_server(options) as server:
        asyncio.run(_measure(server, str(model), options))


async def _measure(server: Server, base_model: str, options: argparse.Namespace) -> None:
    pid = server.process and server.process.pid
    async with RemoteBackend(server.url) as backend, httpx.AsyncClient(timeout=None) as http:
        policy = TrainableModel[Any](
            name="cycle",
            project="bench",
            base_model=base_model,
            engine_args=engine_args(options),
            init_args={"max_seq_length": options.max_seq_length},
        )
        began = time.perf_counter()
        await policy.register(backend)
        say("engine started", seconds=time.perf_counter() - began, memory_mb=gpu_memory_mb(pid))
        bench = _Bench(server.url, pid, backend, http, policy, options)
        for name in options.only:
            await getattr(bench, name)()
        say("health", **await backend.health())


class _Bench:
    def __init__(
        self,
        url: str,
        pid: int | None,
        backend: RemoteBackend,
        http: httpx.AsyncClient,
        policy: TrainableModel[Any],
        options: argparse.Namespace,
    ) -> None:
        self._url, self._pid, self._backend, self._http = url, pid, backend, http
        self._policy, self._options = policy, options
        self._proof: dict[str, Any] = {}
        """Of the last job."""

    async def step(self) -> None:
        """A whole GRPO step by phase."""
        options = self._options
        for repeat in range(options.repeats):
            began = time.perf_counter()
            groups = await self._groups(options.groups, options.rollouts, repeat)
            sampled = time.perf_counter()
            job, phases = await self._train(groups)
            say(
                "GRPO step",
                repeat=repeat,
                rollout_s=sampled - began,
                train_and_publish_s=time.perf_counter() - sampled,
                memory_mb=gpu_memory_mb(self._pid),
                **phases,
                **{k: v for k, v in job.metrics.items() if k.endswith(("_s", "tokens"))},
            )

    async def publish(self) -> None:
        """From a checkpoint's rename to the first token of its step, and what streams notice."""
        for repeat in range(self._options.repeats):
            groups = await self._groups(2, 4, repeat)
            ended = asyncio.Event()
            streams = [asyncio.create_task(self._stream(ended, i)) for i in range(STREAMS)]
            probing = asyncio.create_task(self._probe(ended))
            events: dict[str, float] = {}
            job, _ = await self._train(groups, events)
            await asyncio.sleep(1.0)
            ended.set()
            probes = await probing
            chunks = await asyncio.gather(*streams)
            first = min(token for _, token, step in probes if step == job.step)
            events["first token"] = first
            gaps = [pair for chats in chunks for times in chats for pair in pairwise(times)]
            say(
                "publish",
                repeat=repeat,
                rename_to_first_token_s=first - events["saved"],
                done_to_first_token_s=first - events["done"],
                one_token_s=median(token - sent for sent, token, _ in probes),
                longest_gap_s=longest_gap(gaps, events["saved"], events["done"]),
                longest_gaps_s={
                    f"{a} to {b}": longest_gap(gaps, events[a], events[b])
                    for a, b in pairwise([*PHASES[PHASES.index("saved") :], "first token"])
                },
                median_gap_s=median(b - a for a, b in gaps) if gaps else None,
                steps=sorted({step for _, _, step in probes}),
            )

    async def cycles(self) -> None:
        """Many small jobs: memory must stay flat, and every step must be proved."""
        verdicts: dict[str, int] = {}
        memory: list[dict[str, int]] = []
        began = time.perf_counter()
        for cycle in range(self._options.cycles):
            events: dict[str, float] = {}
            job, _ = await self._train(await self._groups(1, 4, cycle), events, verdicts)
            memory.append(gpu_memory_mb(self._pid))
            assert job.state == "done", job
        say(
            "cycles",
            cycles=self._options.cycles,
            seconds=time.perf_counter() - began,
            verdicts=verdicts,
            memory_mb=over_cycles(memory),
        )

    async def kl(self) -> None:
        """KL of sampler and learner on tokens of each step, beside that of plain HF with and without it."""
        options = self._options
        root = options.root or options.scratch / "root"
        checkpoints = root / "projects" / "bench" / "models" / "cycle" / "checkpoints"
        for step in range(options.repeats):
            replies = await self._replies(options.groups, options.rollouts, step)
            groups = [_group(messages, reply, _short_words) for messages, reply in replies]
            job, _ = await self._train(groups, learning_rate=options.learning_rate)
            assert job.base_step == step, "a model that is new"
            plain = await asyncio.to_thread(
                _plain_kl, self._policy.base_model, checkpoints / f"{step:04d}", replies
            )
            learner = job.metrics["learn/mismatch_kl"]
            ratio = learner / plain["plain_hf"]
            say("KL to vLLM", step=step, learner=learner, ratio=ratio, **plain, proof=self._proof)

    # ---- requests ------------------------------------------------------------------------------

    async def _groups(self, count: int, rollouts: int, seed: int) -> list[hone.TrajectoryGroup]:
        replies = await self._replies(count, rollouts, seed)
        return [_group(messages, reply) for messages, reply in replies]

    async def _replies(self, count: int, rollouts: int, seed: int) -> list[tuple[Any, Any]]:
        """Messages and the reply to them, of so many prompts."""

        async def sample(text: str) -> tuple[Any, Any]:
            messages: Any = [{"role": "user", "content": text}]
            reply = await self._policy.openai_client().chat.completions.create(
                model=self._policy.get_inference_name(),
                messages=messages,
                n=rollouts,
                max_tokens=self._options.answer_tokens,
                logprobs=True,
            )
            return messages, reply

        texts = prompts(self._options.prompt_words, count, seed=seed)
        return list(await asyncio.gather(*(sample(text) for text in texts)))

    async def _train(
        self,
        groups: list[hone.TrajectoryGroup],
        events: dict[str, float] | None = None,
        verdicts: dict[str, int] | None = None,
        learning_rate: float = 1e-4,
    ) -> tuple[JobInfo, dict[str, float]]:
        """A job to its end; seconds between its events."""
        at = {} if events is None else events

        def on_event(event: JobEvent) -> None:
            at[event.type] = event.at
            if event.type == "proved":
                self._proof = event.data
                if verdicts is not None:
                    verdict = event.data["verdict"]
                    verdicts[verdict] = verdicts.get(verdict, 0) + 1

        # One optimizer step a job, as TRL takes for such a batch.
        config = {"learning_rate": learning_rate, "groups_per_optimizer_step": len(groups)}
        request = JobRequest(model="bench/cycle", groups=groups, config=config)
        began = time.perf_counter()
        submitted = await self._backend.submit(request)
        submit_s = time.perf_counter() - began
        job = await self._backend.wait(submitted.id, on_event=on_event)
        if job.state != "done" or job.step is None:
            raise RuntimeError(f"the job ended {job.state}: {job.failure or job.reason}")
        known = [name for name in PHASES if name in at]
        return job, {"submit_s": submit_s} | {f"{b}_s": at[b] - at[a] for a, b in pairwise(known)}

    async def _probe(self, ended: asyncio.Event) -> list[tuple[float, float, int]]:
        """One-token requests at a fixed rate: when each was sent, its token came, and by which step.

        Streamed: the end of an answer waits until its call is recorded, the first token does not.
        """
        body = self._body("Say one word.", max_tokens=1)

        async def ask() -> tuple[float, float, int]:
            sent, first, step = time.time(), 0.0, -1
            url = f"{self._url}/v1/chat/completions"
            async with self._http.stream("POST", url, json={**body, "stream": True}) as response:
                response.raise_for_status()
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        first = first or time.time()
                        step = json.loads(line.removeprefix("data: ")).get("policy_step", step)
            return sent, first, step

        asked: list[asyncio.Task[tuple[float, float, int]]] = []
        while not ended.is_set():
            if sum(not one.done() for one in asked[-PROBES:]) < PROBES:
                asked.append(asyncio.create_task(ask()))
            await asyncio.sleep(PROBE_S)
        return await asyncio.gather(*asked)

    async def _stream(self, ended: asyncio.Event, number: int) -> list[list[float]]:
        """Chats that are streamed one after the other: for each, when its pieces arrived."""
        body = self._body(f"{number} tells a story.", max_tokens=self._options.answer_tokens)
        chats: list[list[float]] = []
        while not ended.is_set():
            chats.append([])
            url = f"{self._url}/v1/chat/completions"
            async with self._http.stream("POST", url, json={**body, "stream": True}) as response:
                response.raise_for_status()
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        chats[-1].append(time.time())
        return chats

    def _body(self, text: str, **more: Any) -> dict[str, Any]:
        name = self._policy.get_inference_name()
        return {"model": name, "messages": [{"role": "user", "content": text}], **more}


def _group(
    messages: Any, reply: Any, reward: Callable[[str], float] | None = None
) -> hone.TrajectoryGroup:
    """The answers to one prompt; without a reward, every other one is good."""
    return hone.TrajectoryGroup(
        hone.Trajectory(
            messages_and_choices=[*messages, choice],
            reward=float(i % 2) if reward is None else reward(choice.message.content or ""),
        )
        for i, choice in enumerate(reply.choices)
    )


def _short_words(text: str) -> float:
    """A reward that is soon learned, so that the adapter's steps are as large as those of a real run."""
    return text.count(" ") / max(1, len(text))


def _plain_kl(model: str, adapter: Path, replies: list[tuple[Any, Any]]) -> dict[str, float]:
    """Mean KL to vLLM per sampled token, of plain HF + PEFT in bfloat16: with the adapter, and without it."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from hone.learner.loss import k3
    from hone.models.find import find

    device = "cuda" if torch.cuda.is_available() else "cpu"
    base: Any = AutoModelForCausalLM.from_pretrained(find(model).path, dtype=torch.bfloat16)
    peft = PeftModel.from_pretrained(base.to(device), adapter, autocast_adapter_dtype=False)
    peft = peft.to(torch.bfloat16).eval()
    sums, tokens = {"plain_hf": 0.0, "plain_hf_without_adapter": 0.0}, 0

    @torch.no_grad()
    def kl(prompt: list[int], choices: Sequence[Any]) -> float:
        longest = max(len(choice.token_ids) for choice in choices)
        padding = [[0] * (longest - len(choice.token_ids)) for choice in choices]
        rows = [prompt + c.token_ids + after for c, after in zip(choices, padding, strict=True)]
        ids = torch.tensor(rows, device=device)
        logits = peft(input_ids=ids, use_cache=False).logits[:, len(prompt) - 1 : -1]
        total = 0.0
        for choice, own, targets in zip(choices, logits, ids[:, len(prompt) :], strict=True):
            count = len(choice.token_ids)
            logprobs = own[:count].float().log_softmax(-1).gather(-1, targets[:count, None])[:, 0]
            sampled = torch.tensor([t.logprob for t in choice.logprobs.content]).double()
            total += float(k3(sampled, logprobs.double().cpu()).sum())
        return total

    for _, reply in replies:
        sums["plain_hf"] += kl(reply.prompt_token_ids, reply.choices)
        with peft.disable_adapter():
            sums["plain_hf_without_adapter"] += kl(reply.prompt_token_ids, reply.choices)
        tokens += sum(len(choice.token_ids) for choice in reply.choices)
    return {name: total / tokens for name, total in sums.items()}


def longest_gap(gaps: Sequence[tuple[float, float]], start: float, end: float) -> float | None:
    """The longest of the gaps that overlap a span of time."""
    return max((b - a for a, b in gaps if b >= start and a <= end), default=None)


def gpu_memory_mb(server: int | None) -> dict[str, int]:
    """Memory of the GPU by role, of the processes of a server; by process id for all others.

    Empty without a GPU. Without the processes whose memory nvidia-smi does not know, as in some
    containers: it prints `[N/A]` then.
    """
    if shutil.which("nvidia-smi") is None:
        return {}
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    lines = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
    fields = ([field.strip() for field in line.split(",")] for line in lines)
    known = [row for row in fields if len(row) == 2 and all(map(str.isdigit, row))]
    roles = {} if server is None else _roles(psutil.Process(server), "other")
    memory: dict[str, int] = {}
    for pid, size in known:
        role = roles.get(int(pid), pid)
        memory[role] = memory.get(role, 0) + int(size)
    return memory


def _roles(process: psutil.Process, inherited: str) -> dict[int, str]:
    """Roles of a process and its descendants by process id; empty if it has ended."""
    try:
        command, children = " ".join(process.cmdline()), process.children()
    except psutil.NoSuchProcess:
        return {}
    own = next((role for part, role in ROLES.items() if part in command), inherited)
    roles = {process.pid: own}
    for child in children:
        roles |= _roles(child, own)
    return roles


def over_cycles(memory: Sequence[dict[str, int]]) -> dict[str, dict[str, int]]:
    """For each role: the memory after the second job and after the last, and the most since the second."""
    later = memory[1:] or memory
    return {
        role: {
            "second": later[0].get(role, 0),
            "last": later[-1].get(role, 0),
            "most": max(sizes.get(role, 0) for sizes in later),
        }
        for role in dict.fromkeys(role for sizes in later for role in sizes)
    }


if __name__ == "__main__":
    main()
