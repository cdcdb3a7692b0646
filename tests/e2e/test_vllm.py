"""A server with vLLM: trains a job, proves and serves its step, and outlives `kill -9` of any process."""

import asyncio
import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from pathlib import Path
from subprocess import Popen
from typing import Any

import httpx
import psutil
import pytest
import pytest_asyncio
import torch
from peft import PeftModel
from tests.chat.conftest import build_tokenizer
from tests.e2e.conftest import Finetune, Server, serving
from tests.e2e.test_kill import AGENT, EXAMPLES, GENERATIONS, check, prepared
from tests.patience import PATIENCE_S
from tests.server.conftest import write_model
from transformers import AutoModelForCausalLM

from hone import LocalBackend, TrainableModel
from hone.errors import HoneError
from hone.trajectory import JobRequest, Trajectory, TrajectoryGroup
from hone.types import JobInfo, model_directory

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="module")]

PYTHON = os.environ.get("HONE_TEST_VLLM_PYTHON", sys.executable)
ON_GPU = torch.cuda.is_available()
ENGINE_ARGS: dict[str, Any] = {"enforce_eager": True}
ENGINE_ARGS |= {"gpu_memory_utilization": 0.2, "kv_cache_memory_bytes": 1 << 30} if ON_GPU else {}
MOST = 0.3 if ON_GPU else 1e-3
"""How far a log-probability may lie from that of a float32 forward pass."""
EPOCHS = 3
HELD = """
from pathlib import Path

answer = run


async def run(input, llm):
    output = await answer(input, llm)
    while input == "word 3" and Path("hold").exists():
        output = await answer(input, llm)
    return output
"""
"""Appended to the agent: the rollouts of one example go on calling the model. `hold` is a link to a
checkpoint, so it exists once that step is trained."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny-heads-of-32"
    write_model(directory, build_tokenizer("qwen2.5-instruct"), hidden=128)
    penalty = {"repetition_penalty": 1.3, "top_k": 5, "temperature": 0.3}
    (directory / "generation_config.json").write_text(json.dumps(penalty))
    return directory


async def until(condition: Callable[[], Any], finetune: Finetune, process: Popen[str]) -> None:
    """Wait for a condition while `hone finetune` runs."""
    while not condition():
        if process.poll() is not None:
            finetune.finish(process)
            pytest.fail(f"hone finetune ended: {finetune.outputs[-1]}")
        await asyncio.sleep(0.02)


def rolled_out(finetune: Finetune, epoch: int) -> int:
    """The number of rollouts of an epoch that have ended."""
    return len(finetune.lines(f"trajectories/epoch_{epoch:03d}.jsonl"))


def is_running(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def engine_core(server: Server) -> psutil.Process:
    """vLLM's engine process."""
    processes = psutil.Process(server.pid).children(recursive=True)
    return next(one for one in processes if "EngineCore" in " ".join(one.cmdline()))


@pytest.mark.timeout(1800)
async def test_killed_with_the_engine_in_the_middle_of_rollouts_the_rerun_finishes(
    environment: dict[str, str], model_dir: Path, tmp_path: Path
) -> None:
    """Before the tests that share `backend`: a second vLLM would slow this one down."""
    environment = environment | {"VLLM_CPU_KVCACHE_SPACE": "1"}
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    serve = (tmp_path / "root", environment, "--engine", "vllm", "--engine-python", PYTHON)
    checkpoints = model_directory(tmp_path / "root", "trainer_project", "killed") / "checkpoints"
    hold, others = tmp_path / "hold", (EXAMPLES - 1) * GENERATIONS

    hold.symlink_to(checkpoints / "0001")
    with serving(*serve, "--port", port) as server, ExitStack() as stack:
        finetune = prepared(tmp_path, server, environment, "killed")
        (tmp_path / "agent.py").write_text(AGENT + HELD)
        for key, value in {
            "finetuning.num_epochs": str(EPOCHS),
            "eval.general.max_concurrency": str(EXAMPLES * GENERATIONS),
            "trainer_adapters.server.backend.base_model": str(model_dir),
            "trainer_adapters.server.backend.engine_args": json.dumps(ENGINE_ARGS),
        }.items():
            finetune.arguments += ["-o", key, value]
        process = finetune.start()
        stack.callback(process.kill)
        await until(lambda: rolled_out(finetune, 1) == others, finetune, process)
        both = [psutil.Process(server.pid), psutil.Process(process.pid)]
        processes = [*both, *(child for one in both for child in one.children(recursive=True))]
        stack.callback(lambda: [one.kill() for one in processes if is_running(one)])
        assert engine_core(server) in processes
        for one in both:
            one.send_signal(signal.SIGKILL)
        assert finetune.finish(process) == -signal.SIGKILL, finetune.outputs[-1]
        deadline = time.monotonic() + PATIENCE_S
        while left := [one for one in processes if is_running(one)]:
            assert time.monotonic() < deadline, left
            await asyncio.sleep(0.02)
    assert rolled_out(finetune, 1) == others
    assert [event["epoch"] for event in finetune.events("job_done")] == [0]

    hold.unlink()
    hold.symlink_to(checkpoints / "0002")
    with serving(*serve, "--port", port) as server, ExitStack() as stack:
        process = finetune.start()
        stack.callback(process.kill)
        await until(lambda: rolled_out(finetune, 2) == others, finetune, process)
        killed = engine_core(server)
        killed.send_signal(signal.SIGKILL)
        hold.unlink()
        await until(lambda: len(finetune.events("job_done")) == EPOCHS, finetune, process)
        assert finetune.finish(process) == 0, finetune.outputs[-1]
        check(finetune, server, "killed")
        assert {rolled_out(finetune, i) for i in range(EPOCHS)} == {EXAMPLES * GENERATIONS}
        done = [(event["epoch"], event["step"]) for event in finetune.events("job_done")]
        assert done == [(epoch, epoch + 1) for epoch in range(EPOCHS)]
        jobs = server.jobs("trainer_project/killed")
        assert [job["state"] for job in jobs] == ["done"] * EPOCHS
        report = json.loads((finetune.output / "report.json").read_text())
        assert (report["status"], report["epochs"]) == ("completed", EPOCHS)
        assert not is_running(killed) and is_running(engine_core(server))
        body = {"model": "killed", "prompt": [5, 6, 7], "max_tokens": 1}
        url = f"http://127.0.0.1:{port}/v1/completions"
        answer = httpx.post(url, json=body, timeout=PATIENCE_S).raise_for_status().json()
        assert answer["policy_step"] == EPOCHS


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def backend(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalBackend]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        patch.setenv("HF_HUB_OFFLINE", "1")
        settings = {"engine": "vllm", "engine_python": PYTHON}
        with LocalBackend(tmp_path_factory.mktemp("hone"), settings=settings) as backend:
            await backend.connect()
            yield backend


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def agent(backend: LocalBackend, model_dir: Path) -> TrainableModel[Any]:
    agent: TrainableModel[Any] = TrainableModel(
        name="agent",
        project="test",
        base_model=str(model_dir),
        rank=4,
        engine_args=ENGINE_ARGS,
        init_args={"max_seq_length": 256},
    )
    await agent.register(backend)
    return agent


async def ask(backend: LocalBackend, rollout: str, **request: Any) -> dict[str, Any]:
    body = {
        "model": "agent",
        "messages": [{"role": "user", "content": "the weather in the city " * 18}],
        "max_tokens": 12,
        "logprobs": True,
        **request,
    }
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        url = f"{backend.base_url}/v1/chat/completions"
        answer = await client.post(url, json=body, headers={"X-Hone-Rollout": rollout})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def check_recorded(
    backend: LocalBackend, rollout: str, model_dir: Path, adapter: Path | None
) -> None:
    """The recorded log-probabilities are those of a plain forward pass under this adapter."""
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    model = model if adapter is None else PeftModel.from_pretrained(model, adapter)
    recorded = [one.call for one in await backend.calls(rollout) if not one.abandoned]
    assert recorded
    for call in recorded:
        assert call.logprobs is not None and call.exact
        with torch.no_grad():
            logits = model(torch.tensor([call.prompt_ids + call.completion_ids])).logits[0]
        rows = (logits[len(call.prompt_ids) - 1 : -1] / call.temperature).log_softmax(-1)
        wanted = rows.gather(1, torch.tensor(call.completion_ids)[:, None])[:, 0].tolist()
        assert max(abs(a - b) for a, b in zip(call.logprobs, wanted, strict=True)) <= MOST


async def train(backend: LocalBackend, agent: TrainableModel[Any], rollout: str) -> JobInfo:
    calls = [recorded.call for recorded in await backend.calls(rollout)]
    group = TrajectoryGroup(
        [Trajectory(calls=[call], reward=float(i % 2)) for i, call in enumerate(calls)]
    )
    config: dict[str, Any] = {"learning_rate": 1e-2}
    job = await backend.submit(JobRequest(model="test/agent", groups=[group], config=config))
    return await backend.wait(job.id)


async def events(backend: LocalBackend, job: JobInfo) -> dict[str, Any]:
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        answer = await client.get(f"{backend.base_url}/v1/training/jobs/{job.id}/events")
    blocks = [
        dict(line.split(": ", 1) for line in b.split("\n")) for b in answer.text.split("\n\n") if b
    ]
    return {block["event"]: json.loads(block["data"]) for block in blocks}


async def prefilled_tokens(backend: LocalBackend, prompt_tokens: int) -> int:
    """Tokens that vLLM computed of all prompts so far, once engine.log counts all of them."""
    line = re.compile(rf"running 0, .* prompt_tokens {prompt_tokens}, prefilled_tokens (\d+)")
    deadline = time.monotonic() + PATIENCE_S
    while not (counts := line.findall((backend.root / "logs" / "engine.log").read_text())):
        assert time.monotonic() < deadline, "engine.log does not count the prompts"
        await asyncio.sleep(0.5)
    return int(counts[-1])


async def test_a_job_is_trained_published_with_proof_and_served(
    backend: LocalBackend, agent: TrainableModel[Any], model_dir: Path
) -> None:
    info = await backend.model_info(agent)
    assert (info.step, info.not_applicable) == (0, [])
    usages = [(await ask(backend, "warm"))["usage"] for _ in range(2)]
    prompts = sum(usage["prompt_tokens"] for usage in usages)
    assert await prefilled_tokens(backend, prompts) < prompts, "vLLM's prefix cache was not used"
    await ask(backend, "r0", n=4, seed=1)
    await check_recorded(backend, "r0", model_dir, None)
    for step in (1, 2):
        job = await train(backend, agent, f"r{step - 1}")
        assert (job.state, job.step) == ("done", step), job
        proof = (await events(backend, job))["proved"]
        verdicts = ("proved", "unprovable by logprob") if ON_GPU else ("proved",)
        assert proof["data"]["verdict"] in verdicts, proof
        answer = await ask(backend, f"r{step}", n=4, seed=1)
        assert answer["policy_step"] == step
        checkpoints = model_directory(backend.root, "test", "agent") / "checkpoints"
        (adapter,) = checkpoints.glob(f"*{step}")
        await check_recorded(backend, f"r{step}", model_dir, adapter)


async def test_narrowed_answers_are_recorded_as_inexact(
    backend: LocalBackend, agent: TrainableModel[Any]
) -> None:
    await ask(backend, "narrow", top_p=0.5)
    (recorded,) = await backend.calls("narrow")
    assert not recorded.call.exact


async def test_answers_match_their_schema_regex_and_grammar(
    backend: LocalBackend, agent: TrainableModel[Any]
) -> None:
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {"word": {"enum": ["red", "blue"]}, "count": {"type": "integer"}},
        "required": ["word", "count"],
        "additionalProperties": False,
    }
    named = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}
    answer = await ask(backend, "schema", n=8, max_tokens=100, response_format=named)
    for text in _whole(answer):
        value = json.loads(text)
        assert value["word"] in ("red", "blue") and isinstance(value["count"], int)
    recorded = await backend.calls("schema")
    for call in (one.call for one in recorded):
        # At temperature 1 no token of a random model is certain, but those that must come.
        certain = [i for i, value in enumerate(call.masked_logprobs or []) if value == 0]
        assert not call.exact and call.forced == certain
        assert call.forced and len(call.forced) < len(call.completion_ids)
    # As chat/constraint.py writes tool calls: text, JSON, and a token by its id.
    lark = f'start: "call " %json {json.dumps(schema)} <[419]>'
    answer = await ask(backend, "grammar", n=8, max_tokens=100, guided_grammar=lark)
    for text in _whole(answer):
        assert text.startswith("call ") and text.endswith("</tool_call>")
        assert json.loads(text[5:-12])["word"] in ("red", "blue")
    answer = await ask(backend, "regex", max_tokens=20, guided_regex="(ab|cd){2}[0-9]")
    assert re.fullmatch("(ab|cd){2}[0-9]", answer["choices"][0]["message"]["content"])


def _whole(answer: dict[str, Any]) -> list[str]:
    """The answers that ended by themselves; a random model may fill the others with spaces."""
    choices = [one for one in answer["choices"] if one["finish_reason"] != "length"]
    assert choices, answer
    return [choice["message"]["content"] for choice in choices]


async def test_the_context_is_that_of_init_args(
    backend: LocalBackend, agent: TrainableModel[Any]
) -> None:
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        body = {"model": "agent", "prompt": [5] * 300, "max_tokens": 4}
        answer = await client.post(f"{backend.base_url}/v1/completions", json=body)
    assert answer.status_code == 400 and "256" in answer.text, answer.text


async def test_a_streamed_answer(backend: LocalBackend, agent: TrainableModel[Any]) -> None:
    body = {"model": "agent", "prompt": [5, 6, 7], "max_tokens": 6, "stream": True, "seed": 1}
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        answer = await client.post(f"{backend.base_url}/v1/completions", json=body)
    assert answer.status_code == 200 and answer.text.rstrip().endswith("data: [DONE]")
    assert answer.text.count("data: ") > 4


async def test_engine_args_that_vllm_does_not_know_are_refused(
    backend: LocalBackend, model_dir: Path
) -> None:
    wrong: TrainableModel[Any] = TrainableModel(
        name="other", project="test", base_model=str(model_dir), engine_args={"max_num_seq": 3}
    )
    with pytest.raises(HoneError, match=r"engine_args.max_num_seq: .*mean 'max_num_seqs'"):
        await backend.register(wrong)


def vllm_server(backend: LocalBackend) -> psutil.Process:
    """The vLLM server that hone's server has started."""
    assert backend._server is not None
    children = psutil.Process(backend._server.pid).children()
    return next(one for one in children if "hone_vllm_worker" in " ".join(one.cmdline()))


async def test_a_crashed_engine_is_replaced_and_serves_the_newest_step(
    backend: LocalBackend, agent: TrainableModel[Any], model_dir: Path
) -> None:
    before = vllm_server(backend)
    before.send_signal(signal.SIGKILL)
    try:
        answer = await ask(backend, "after-crash", seed=1)
    except AssertionError as refused:  # the request that finds the crash; the next one waits
        assert "EngineFailed" in str(refused)
        answer = await ask(backend, "after-crash", seed=1)
    assert answer["policy_step"] == 2
    assert vllm_server(backend).pid != before.pid
    (adapter,) = (model_directory(backend.root, "test", "agent") / "checkpoints").glob("*2")
    await check_recorded(backend, "after-crash", model_dir, adapter)
