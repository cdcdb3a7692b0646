"""`python -m bench.gpu_serve`: rollouts through `hone serve` beside plain `vllm serve`, on a GPU.

In:   a Python with vLLM, and a model directory or the shape of one (random weights)
Out:  one JSON object per line, as soon as it is measured

Both servers run the same vLLM with the same arguments on one GPU, and answer the same chats with the
same adapter in turn: log-probabilities and token ids are asked for, every client sends its next chat
when the last is answered. hone records every call besides. The adapter is trained here, by one job
of hone's server.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from bench.gpu import SHAPES
from hone.inference.vllm.args import MAX_CPU_LORAS

PROMPTS = 64
"""Different prompts; each is asked again and again, as the rollouts of a group are."""
PROMPT_WORDS, ANSWER_TOKENS = 420, 128
STEP_PROMPT_WORDS = 482
"""Of gpu_cycle.py and peers/trl_step.py: 512 tokens with SmolLM2's tokenizer and chat template."""
MAX_SEQ_LENGTH = 2048
ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Layers that have adapters; without this vLLM computes LoRA for the head, too, and hone's does not."""
START_S = 600.0
WARM_UP_S = 5.0


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser("bench.gpu_serve", __doc__)
    parser.set_defaults(gpu_memory_utilization=0.5)
    parser.add_argument("--clients", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--seconds", type=float, default=30.0, help="of every measurement")
    parser.add_argument("--repeats", type=int, default=2, help="of every measurement")
    parser.add_argument("--client", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--vllm-url", help="of a vllm serve that runs; by default one is started")
    options = parser.parse_args(arguments)
    if options.client:
        url, model, clients, seconds = options.client
        print(json.dumps(asyncio.run(_closed_loop(url, model, int(clients), float(seconds)))))
        return
    options.scratch.mkdir(parents=True, exist_ok=True)
    model = options.model or random_model(options)
    with _vllm(options, model) as plain, hone_server(options) as ours:
        adapter = asyncio.run(_train_one_step(ours.url, model, options))
        if plain.process:
            _wait(plain)
        _load_adapter(plain.url, adapter)
        servers = {
            "hone serve": (ours.url + "/rollout/{rollout}/v1", "bench/policy"),
            "vllm serve": (plain.url + "/v1", "policy"),
        }
        for clients in options.clients:
            rates: dict[str, list[float]] = {name: [] for name in servers}
            for repeat in range(-1, options.repeats):  # the first warms up
                for name, (url, served) in servers.items():
                    seconds = options.seconds if repeat >= 0 else WARM_UP_S
                    measured = _measure(name, url, served, clients, seconds)
                    if repeat >= 0:
                        rates[name].append(measured["tokens_per_s"])
                        say(name, clients=clients, repeat=repeat, **measured)
            hone_rate, vllm_rate = (median(rates[name]) for name in servers)
            say(
                "rollouts, hone serve beside vllm serve",
                clients=clients,
                ratio=hone_rate / vllm_rate,
                hone_tokens_per_s=hone_rate,
                vllm_tokens_per_s=vllm_rate,
            )


def _measure(name: str, url: str, model: str, clients: int, seconds: float) -> dict[str, float]:
    """Tokens/s of so many clients, which are a process of their own."""
    command = [sys.executable, "-m", "bench.gpu_serve", "--client", url, model]
    run = subprocess.run([*command, str(clients), str(seconds)], capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError(f"{name}: the clients failed: {run.stderr[-2000:]}")
    return json.loads(run.stdout.splitlines()[-1])


# ---- clients -----------------------------------------------------------------------------------


async def _closed_loop(url: str, model: str, clients: int, seconds: float) -> dict[str, float]:
    """Completion tokens per second of so many clients, each with one chat at a time."""
    import aiohttp

    headers = {"Authorization": "Bearer default"}
    texts = prompts()
    tokens = answers = 0
    latencies: list[float] = []
    end = 0.0

    async def talk(client: aiohttp.ClientSession, number: int) -> None:
        nonlocal tokens, answers
        at = number
        while (began := time.perf_counter()) < end:
            async with client.post(
                f"{url.format(rollout=f'{number}-{began}')}/chat/completions",
                json={
                    "model": model,
                    "messages": [{"role": "user", "content": texts[at % len(texts)]}],
                    "max_tokens": ANSWER_TOKENS,
                    "temperature": 1.0,
                    "logprobs": True,
                    "return_token_ids": True,
                },
            ) as reply:
                reply.raise_for_status()
                answer = await reply.json()
            now = time.perf_counter()
            assert answer["choices"][0]["logprobs"]["content"], "no log-probabilities"
            if now < end:
                tokens += answer["usage"]["completion_tokens"]
                answers += 1
                latencies.append(now - began)
            at += clients

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, headers=headers) as client:
        end = time.perf_counter() + seconds
        await asyncio.gather(*(talk(client, number) for number in range(clients)))
    return {
        "tokens_per_s": tokens / seconds,
        "answers_per_s": answers / seconds,
        "median_latency_s": median(latencies),
    }


def prompts(num_words: int = PROMPT_WORDS, count: int = PROMPTS, seed: int = 0) -> list[str]:
    """Different texts of so many words."""
    generator = random.Random(seed)
    words = [
        "the",
        "a",
        "river",
        "stone",
        "light",
        "house",
        "runs",
        "sees",
        "small",
        "old",
        "new",
        "under",
        "over",
        "green",
    ]
    return [" ".join(generator.choices(words, k=num_words)) for _ in range(count)]


# ---- servers -----------------------------------------------------------------------------------


def engine_args(options: argparse.Namespace) -> dict[str, Any]:
    """vLLM's arguments, for both servers."""
    share = options.gpu_memory_utilization
    given = {} if share is None else {"gpu_memory_utilization": share}
    return given | {"max_num_seqs": 256} | options.engine_args


@contextmanager
def hone_server(options: argparse.Namespace) -> Iterator["Server"]:
    """A `hone serve` with vLLM, or that at `--url`."""
    if options.url:
        yield Server(options.url)
        return
    port = _free_port()
    command = [sys.executable, "-m", "hone", "serve", "--root", str(options.scratch / "root")]
    command += ["--port", str(port), "--inference-port", "-1", "--engine", "vllm"]
    command += ["--engine-python", options.engine_python]
    with _server(command, options.scratch / "hone.log", f"http://127.0.0.1:{port}") as server:
        _wait(server)
        yield server


@contextmanager
def _vllm(options: argparse.Namespace, model: Path) -> Iterator["Server"]:
    """A `vllm serve` that starts, or that at `--vllm-url`."""
    if options.vllm_url:
        yield Server(options.vllm_url)
        return
    port = _free_port()
    command = ["env", "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1", options.engine_python]
    command += ["-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1"]
    command += ["--model", str(model), "--served-model-name", "base", "--port", str(port)]
    command += ["--max-model-len", str(MAX_SEQ_LENGTH), "--enable-lora", "--max-loras", "3"]
    command += ["--max-lora-rank", "8", "--max-cpu-loras", str(MAX_CPU_LORAS)]
    command += ["--lora-target-modules", *ADAPTED, "--generation-config", "vllm"]
    command += ["--logprobs-mode", "processed_logprobs", "--disable-log-stats"]
    command += ["--disable-uvicorn-access-log"]
    for key, value in engine_args(options).items():
        command += [f"--{key.replace('_', '-')}", str(value)]
    with _server(command, options.scratch / "vllm.log", f"http://127.0.0.1:{port}") as server:
        yield server


def _load_adapter(url: str, directory: Path) -> None:
    import httpx

    body = {"lora_name": "policy", "lora_path": str(directory)}
    httpx.post(f"{url}/v1/load_lora_adapter", json=body, timeout=60).raise_for_status()


@dataclass(frozen=True)
class Server:
    """A server that runs, or is starting."""

    url: str
    log: Path = Path()
    process: subprocess.Popen[bytes] | None = None
    """None: this program has not started it."""
    began: float = field(default_factory=time.perf_counter)


@contextmanager
def _server(command: list[str], log: Path, url: str) -> Iterator[Server]:
    """Start a server; it is ended with its children."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield Server(url, log, process)
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def _wait(server: Server) -> None:
    """Until it answers /health."""
    import httpx

    while True:
        ended = server.process is None or server.process.poll() is not None
        if ended or time.perf_counter() > server.began + START_S:
            raise RuntimeError(f"{server.url} did not start: {server.log.read_text()[-3000:]}")
        try:
            if httpx.get(f"{server.url}/health", timeout=5).status_code == 200:
                break
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    say(f"{server.log.stem} started", seconds=time.perf_counter() - server.began)


async def _train_one_step(url: str, model: Path, options: argparse.Namespace) -> Path:
    """Train one step by hone's server; the directory of its adapter."""
    import hone
    from hone.backends.remote import RemoteBackend

    async with RemoteBackend(url) as backend:
        policy = hone.TrainableModel(
            name="policy",
            project="bench",
            base_model=str(model),
            engine_args=engine_args(options),
            init_args={"max_seq_length": MAX_SEQ_LENGTH},
        )
        began = time.perf_counter()
        await policy.register(backend)
        say("hone's engine started", seconds=time.perf_counter() - began)
        messages: Any = [{"role": "user", "content": prompts()[0]}]
        reply = await policy.openai_client().chat.completions.create(
            model=policy.get_inference_name(),
            messages=messages,
            n=8,
            max_tokens=ANSWER_TOKENS,
            logprobs=True,
        )
        group = hone.TrajectoryGroup(
            hone.Trajectory(messages_and_choices=[*messages, choice], reward=float(i % 2))
            for i, choice in enumerate(reply.choices)
        )
        began = time.perf_counter()
        result = await policy.train([group], learning_rate=1e-3)
        say("one job", seconds=time.perf_counter() - began, step=result.step, **result.metrics)
        await policy.close()
    root = options.root or options.scratch / "root"
    steps = root / "projects" / "bench" / "models" / "policy" / "checkpoints"
    return max(path.parent for path in steps.glob("*/adapter_config.json"))


# ---- a model of random weights -----------------------------------------------------------------


def random_model(options: argparse.Namespace) -> Path:
    """Random weights in the shape of Qwen2.5, with the vocabulary of another model's tokenizer."""
    import torch
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    directory = options.scratch / f"random-{options.random}"
    if (directory / "config.json").is_file():
        return directory
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    sizes: dict[str, Any] = SHAPES[options.random] | {"vocab_size": len(tokenizer)}
    config = Qwen2Config(
        **sizes,
        max_position_embeddings=32768,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.bos_token_id,
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen2ForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    del model
    torch.cuda.empty_cache()  # or vLLM, which may have been given the whole GPU, could not wake up
    return directory


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def say(what: str, **values: Any) -> None:
    """Print one JSON object."""
    rounded = {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in values.items()}
    print(json.dumps({"what": what, **rounded}), flush=True)


def make_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """The options of this module and of gpu_cycle.py."""
    parser = argparse.ArgumentParser(prog=f"python -m {name}", description=description)
    parser.add_argument("--engine-python", default=sys.executable, help="a Python with vLLM")
    parser.add_argument("--model", type=Path, help="a model directory; else --random")
    parser.add_argument("--random", choices=sorted(SHAPES), default="3b", help="shape of Qwen2.5")
    parser.add_argument("--tokenizer", help="directory of a tokenizer with a chat template")
    parser.add_argument("--scratch", type=Path, default=Path(name.replace(".", "-")))
    parser.add_argument("--gpu-memory-utilization", type=float, help="by default hone plans")
    parser.add_argument("--engine-args", type=json.loads, default={}, help="of vLLM, as JSON")
    parser.add_argument("--url", help="of a hone server that runs; by default one is started")
    parser.add_argument("--root", type=Path, help="of that server")
    return parser


if __name__ == "__main__":
    main()
