"""The vLLM engine: the conformance suite, the proof of publish against mutants, and supervision.

One server for most tests, because it takes a minute to start. `make test-vllm` runs this file.
"""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
import torch
from packaging.version import Version
from safetensors.torch import load_file, save_file
from tests.conformance.engine import (
    BFLOAT16,
    FLOAT32,
    PROMPT,
    EngineConformance,
    Served,
    assert_agree,
    spelling_tokenizer,
)
from tests.inference.embedded.test_engine import write_adapter
from tests.patience import PATIENCE_S
from transformers import LlamaConfig, LlamaForCausalLM

from hone.errors import EngineError, EngineFailed
from hone.inference.base import AdapterRef, Completion, Sampling, complete
from hone.inference.vllm.adapter import StagedAdapter
from hone.inference.vllm.engine import VllmEngine
from hone.inference.vllm.process import VllmProcess, require_vllm
from hone.models.decoder import Decoder
from hone.models.lora import tensors_sha256
from hone.server.settings import Settings
from hone.server.telemetry import start_logging, stop_logging

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="module")]

PYTHON = os.environ.get("HONE_TEST_VLLM_PYTHON", sys.executable)
ON_GPU = torch.cuda.is_available()
DTYPE = "bfloat16" if ON_GPU else "float32"
ARGS: dict[str, Any] = {"enforce_eager": True, "max_model_len": 512, "max_cpu_loras": 6}
ARGS |= {"gpu_memory_utilization": 0.2, "kv_cache_memory_bytes": 1 << 30} if ON_GPU else {}


@pytest.fixture(scope="module", autouse=True)
def little_memory() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with heads of 32 (vLLM takes none smaller) whose text is "<id>" per token.

    Its generation_config.json would change every draw, if vLLM read it.
    """
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.04,  # wider weights would make the noise of bfloat16 larger
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    directory = tmp_path_factory.mktemp("model")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(directory)
    spelling_tokenizer().save_pretrained(directory)
    sampling = {"repetition_penalty": 1.3, "top_k": 5, "temperature": 0.3, "eos_token_id": 2}
    (directory / "generation_config.json").write_text(json.dumps(sampling))
    return directory


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[AdapterRef, Path]:
    decoder, root = Decoder.load(model), tmp_path_factory.mktemp("adapters")
    return {write_adapter(root / str(s), decoder, step=s): root / str(s) for s in (1, 2)}


def open_engine(model: Path, directory: Path, **args: Any) -> VllmEngine:
    return VllmEngine.open(
        str(model),
        environment=require_vllm(PYTHON),
        directory=directory,
        args={**ARGS, **args},
        dtype=DTYPE,
        max_length=512,
        max_adapters=4,
        rank=4,
        on_gpu=ON_GPU,
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[VllmEngine]:
    engine = await asyncio.to_thread(open_engine, model, tmp_path_factory.mktemp("vllm"))
    yield engine
    await engine.close()


@pytest_asyncio.fixture(loop_scope="module")
async def published(
    engine: VllmEngine, model: Path, adapters: dict[AdapterRef, Path]
) -> AsyncIterator[Served]:
    for ref, directory in adapters.items():
        await engine.publish(ref, directory)
    yield Served(engine, model, adapters, BFLOAT16 if ON_GPU else FLOAT32)
    for ref in list(adapters):
        await engine.unload(ref)


@pytest.fixture
def served(published: Served) -> Served:
    return published


class TestVllm(EngineConformance):
    own_sampler = False
    knows_both = False

    @pytest.fixture
    def served(self, published: Served) -> Served:
        return published

    @pytest.mark.skip(
        reason="`served` is needed further; the last test of this file closes another"
    )
    async def test_closing_ends_what_runs_with_an_error(self, served: Served) -> None: ...


# ---- what is served ----------------------------------------------------------------------------


LONG = (PROMPT * 10)[:190]
"""More than one block of vLLM's prefix cache: 16 tokens on a GPU, 128 on a CPU."""
ONE = Sampling(max_tokens=12, seed=1)


async def warm(engine: VllmEngine, ref: AdapterRef) -> None:
    """Fill the prefix cache with LONG under an adapter, and show that vLLM reads it from there."""
    await complete(engine, LONG, ONE, ref)
    before = engine.stats().prefilled_tokens
    await complete(engine, LONG, ONE, ref)
    assert 0 < engine.stats().prefilled_tokens - before < len(LONG) - 100


async def test_a_prefix_cached_under_one_step_is_recomputed_under_the_next(
    engine: VllmEngine, served: Served
) -> None:
    await engine.unload(served.second)
    await warm(engine, served.first)
    await engine.publish(served.second, served.adapters[served.second])
    for ref in (served.second, served.first):
        (done,) = await complete(engine, LONG, ONE, ref)
        served.assert_agree(done.logprobs, served.expected(LONG, done, ref))


async def test_the_size_of_the_kv_cache_is_what_vllm_allocated(served: Served) -> None:
    stats = served.engine.stats()
    assert stats.kv_budget_bytes is not None
    # 2 layers x keys and values x 2 heads of 32 numbers, in blocks of 16 tokens or a multiple.
    block = 16 * 2 * 2 * 2 * 32 * (2 if ON_GPU else 4)
    assert stats.kv_budget_bytes % block == 0
    assert 0.95 * 2**30 < stats.kv_budget_bytes <= 2**30  # as ARGS and VLLM_CPU_KVCACHE_SPACE say
    assert (stats.kv_reserved_bytes, stats.kv_cached_bytes) == (None, None)


async def test_a_streamed_answer_is_the_whole_one(served: Served) -> None:
    sampling = Sampling(n=2, max_tokens=12, seed=3, top_logprobs=2)
    whole = await complete(served.engine, PROMPT, sampling, served.first)
    streamed = [Completion(), Completion()]
    async for delta in served.engine.generate(PROMPT, sampling, served.first, stream=True):
        streamed[delta.sample].add(delta)
    assert ON_GPU or [done.ids for done in streamed] == [done.ids for done in whole]
    assert [len(done.top) for done in streamed] == [12, 12]
    assert {len(top) for done in streamed for top in done.top} == {2}


async def test_the_answer_ends_with_the_context(served: Served) -> None:
    (done,) = await complete(served.engine, [9] * 500, Sampling(max_tokens=100, seed=4))
    assert (len(done.ids), done.finish) == (12, "length")


async def test_adapters_of_a_larger_rank_are_refused(
    served: Served, model: Path, tmp_path: Path
) -> None:
    config = json.loads((next(iter(served.adapters.values())) / "adapter_config.json").read_text())
    shutil.copytree(served.adapters[served.first], tmp_path / "a")
    (tmp_path / "a" / "adapter_config.json").write_text(json.dumps(config | {"r": 16}))
    with pytest.raises(EngineError, match="rank 16 exceeds the 8 that vLLM was started with"):
        await served.engine.publish(AdapterRef("m", 3, "f" * 64), tmp_path / "a")


async def test_more_adapters_than_vllm_has_slots_for_are_served(
    engine: VllmEngine, model: Path, tmp_path: Path
) -> None:
    decoder = Decoder.load(model)
    refs = {}
    for step in range(11, 18):  # seven; three fit in one batch, six in vLLM's cache (ARGS)
        ref = write_adapter(tmp_path / str(step), decoder, step=step)
        refs[ref] = tmp_path / str(step)
        await engine.publish(ref, refs[ref])
    served = Served(engine, model, refs, BFLOAT16 if ON_GPU else FLOAT32)
    first = next(iter(refs))
    refs[first] = (tmp_path / "11").rename(tmp_path / "moved")  # vLLM reads its copy
    for ref in refs:  # each has just been evicted for the one before it
        (worker,) = await engine._client.rpc("hone_hash", engine._adapters[ref.sha256].id)
        assert not worker["held"]
        (done,) = await complete(engine, PROMPT, Sampling(max_tokens=4, seed=0), ref)
        served.assert_agree(done.logprobs, served.expected(PROMPT, done, ref))
    for ref in refs:  # without a sequence to score, the comparison itself makes vLLM read it
        assert (await engine.probe([], ref)).sha256 == ref.sha256
        await engine.unload(ref)
    assert engine.stats().adapters == ()
    assert list(engine._directory.iterdir()) == []


async def test_a_running_request_keeps_its_adapter(served: Served) -> None:
    stream = served.engine.generate(PROMPT, Sampling(max_tokens=60, seed=2), served.second)
    done, engine = Completion(), served.engine
    assert isinstance(engine, VllmEngine)
    async for delta in stream:
        done.add(delta)
        if len(done.ids) == 3:
            await engine.unload(served.second)
            assert (engine._directory / served.second.sha256).is_dir()
    assert len(done.ids) == 60
    served.assert_agree(done.logprobs, served.expected(PROMPT, done, served.second))
    assert not (engine._directory / served.second.sha256).exists()


async def test_an_adapter_loaded_into_full_slots_leaves_running_requests_their_own(
    engine: VllmEngine, model: Path, tmp_path: Path
) -> None:
    """Loading it moves the adapters of the running requests to other slots (`_follow_slots`)."""
    decoder = Decoder.load(model)
    paths = [tmp_path / str(step) for step in range(21, 25)]
    *refs, fourth = [write_adapter(path, decoder, step=int(path.name)) for path in paths]
    for ref, path in zip(refs, paths, strict=False):
        await engine.publish(ref, path)

    async def follow(ref: AdapterRef, done: Completion, length: int) -> None:
        async for delta in engine.generate(PROMPT, Sampling(max_tokens=length, seed=1), ref):
            done.add(delta)

    async def load_while_three_run() -> list[Completion] | None:
        """The four answers; None if one of the three had ended before the fourth was loaded."""
        answers = [Completion() for _ in range(3)]
        async with asyncio.TaskGroup() as requests:
            for ref, done, length in zip(refs, answers, (300, 480, 480), strict=True):
                requests.create_task(follow(ref, done, length))
            while not all(len(done.ids) > 9 for done in answers):
                await asyncio.sleep(0.001)
            await engine.publish(fourth, paths[-1])
            full = engine.stats().running == 3
            # vLLM begins with it when the first of the others has ended.
            answers += await complete(engine, PROMPT, Sampling(max_tokens=9, seed=1), fourth)
        return answers if full else None

    answers = await load_while_three_run()
    while answers is None:  # on a busy machine publishing may take longer than 300 tokens
        await engine.unload(fourth)
        answers = await load_while_three_run()
    assert [len(done.ids) for done in answers] == [300, 480, 480, 9]
    for ref, done in zip([*refs, fourth], answers, strict=True):
        (scores,) = (await engine.probe([PROMPT + done.ids], ref)).logprobs
        assert_agree(done.logprobs, scores[len(PROMPT) - 1 :], BFLOAT16 if ON_GPU else FLOAT32)
        await engine.unload(ref)


# ---- mutants: each of these must be noticed ----------------------------------------------------


def mutate(source: Path, target: Path, *, zero: str = "", drop: str = "", old: str = "") -> Path:
    """A copy of an adapter with one tensor zeroed, or the tensors of one module left out."""
    shutil.copytree(source, target)
    tensors = load_file(target / "adapter_model.safetensors")
    changed = {n: t * 0 if zero and zero in n else t for n, t in tensors.items()}
    changed = {n: t for n, t in changed.items() if not drop or drop not in n}
    assert len(changed) < len(tensors) or any((changed[n] != tensors[n]).any() for n in tensors)
    save_file(changed, target / "adapter_model.safetensors")
    return target


MUTANTS = [
    ({"zero": "layers.1.mlp.up_proj.lora_B"}, r"other weights for layers\.1\.mlp\.up_proj\.B"),
    ({"drop": "down_proj"}, r"does not hold layers\.0\.mlp\.down_proj\.A"),
    ({"old": "step 1"}, "other weights for"),
]


@pytest.mark.parametrize(("mutant", "says"), MUTANTS)
async def test_a_publish_of_other_weights_fails(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mutant: Any, says: str
) -> None:
    """vLLM reads a mutated copy, as a defect in staging or in vLLM's loader would make it."""
    engine, second = served.engine, served.second
    assert isinstance(engine, VllmEngine)
    await engine.unload(second)
    stage = VllmEngine._stage

    def stage_mutant(self: VllmEngine, adapter: AdapterRef, directory: Path) -> StagedAdapter:
        staged = stage(self, adapter, directory)
        shutil.rmtree(staged.path)
        if "old" in mutant:
            shutil.copytree(served.adapters[served.first], staged.path)
        else:
            mutate(directory, staged.path, **mutant)
        return staged

    with monkeypatch.context() as patch:
        patch.setattr(VllmEngine, "_stage", stage_mutant)
        with pytest.raises(EngineError, match=rf"publish of step 2 of 'm': vLLM {says}|{says}"):
            await engine.publish(second, served.adapters[second])
    with pytest.raises(EngineError, match="is not served"):
        await complete(engine, PROMPT, Sampling(max_tokens=1), second)
    await engine.publish(second, served.adapters[second])
    assert (await engine.probe([PROMPT], second)).sha256 == second.sha256


@pytest.mark.parametrize(("mutant", "says"), MUTANTS)
async def test_a_probe_shows_weights_that_changed_after_the_publish(
    served: Served, tmp_path: Path, mutant: Any, says: str
) -> None:
    engine, second = served.engine, served.second
    assert isinstance(engine, VllmEngine)
    source = served.adapters[served.first if "old" in mutant else second]
    path = source if "old" in mutant else mutate(source, tmp_path / "mutant", **mutant)
    body = {"lora_name": second.sha256, "lora_path": str(path), "load_inplace": True}
    await engine._client.post("/v1/load_lora_adapter", body)
    probe = await engine.probe([PROMPT], second)
    assert probe.sha256 != second.sha256 and (probe.sha256 or "").startswith("vllm-")


async def test_an_adapter_loaded_in_place_reads_the_prefix_of_the_weights_before(
    engine: VllmEngine, served: Served, tmp_path: Path
) -> None:
    """Why hone names adapters by their hash and loads none in place.

    vLLM's prefix cache is keyed by the adapter's name and path, and a load in place does not reset
    it. The weights are right then, and so is their digest; the answers are of neither policy.
    """
    third = write_adapter(tmp_path / "3", Decoder.load(served.model), step=3)
    await engine.publish(third, tmp_path / "3")
    await warm(engine, third)
    path = engine._directory / third.sha256
    shutil.copytree(served.adapters[served.second], path, dirs_exist_ok=True)
    body = {"lora_name": third.sha256, "lora_path": str(path), "load_inplace": True}
    await engine._client.post("/v1/load_lora_adapter", body)
    held = await engine._digests(engine._adapters[third.sha256])
    assert engine._adapters[served.second.sha256].compare(held) is None
    (done,) = await complete(engine, LONG, ONE, third)
    with pytest.raises(AssertionError):
        served.assert_agree(done.logprobs, served.expected(LONG, done, served.second))
    await engine._client.post("/reset_prefix_cache", {})
    (done,) = await complete(engine, LONG, ONE, third)
    served.assert_agree(done.logprobs, served.expected(LONG, done, served.second))
    await engine.unload(third)


async def test_an_adapter_with_a_layer_that_vllm_ignores_is_refused(
    served: Served, tmp_path: Path
) -> None:
    """vLLM only warns, or not even that, and computes without it."""
    shutil.copytree(served.adapters[served.first], tmp_path / "a")
    file = tmp_path / "a" / "adapter_model.safetensors"
    tensors = load_file(file)
    seventh = {n.replace("layers.1.", "layers.7."): t.clone() for n, t in tensors.items()}
    tensors = {**seventh, **tensors}
    save_file(tensors, file)
    ref = AdapterRef("m", 3, tensors_sha256(tensors))
    with pytest.raises(EngineError, match=r"step 3 of 'm': vLLM ignores \S*layers\.7\."):
        await served.engine.publish(ref, tmp_path / "a")
    with pytest.raises(EngineError, match="is not served"):
        await complete(served.engine, PROMPT, Sampling(max_tokens=1), ref)


async def test_a_publish_and_its_proof_stop_vllm_for_a_few_short_calls_only(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM takes the adapter that a thread has read: its files may be gone by then."""
    engine, second = served.engine, served.second
    assert isinstance(engine, VllmEngine)
    await engine.unload(second)
    calls, rpc, post = [], engine._client.rpc, engine._client.post

    async def counted(method: str, *args: Any) -> list[Any]:
        if method not in calls[-1:]:  # asked again until it is ready
            calls.append(method)
        return await rpc(method, *args)

    async def posted(path: str, body: Any) -> Any:
        if path == "/v1/load_lora_adapter":
            calls.append("load")
            (Path(body["lora_path"]) / "adapter_model.safetensors").unlink()
        return await post(path, body)

    monkeypatch.setattr(engine._client, "rpc", counted)
    monkeypatch.setattr(engine._client, "post", posted)
    await engine.publish(second, served.adapters[second])
    assert calls == ["hone_read", "load", "hone_hash", "hone_digests"]
    calls.clear()
    assert (await engine.probe([PROMPT], served.first, with_hash=False)).sha256 is None
    assert calls == []
    assert (await engine.probe([PROMPT], second)).sha256 == second.sha256
    assert calls == ["hone_hash", "hone_digests"]


async def test_the_logprob_proof_needs_no_hash(served: Served) -> None:
    sequence = [*PROMPT, 8, 9, 10]
    one, two = [
        (await served.engine.probe([sequence], ref)).logprobs[0]
        for ref in (served.first, served.second)
    ]
    assert max(abs(a - b) for a, b in zip(one, two, strict=True)) > 0.5


# ---- sleep ---------------------------------------------------------------------------------------


async def test_an_engine_wakes_with_the_adapters_it_had(served: Served) -> None:
    engine = served.engine
    before = await engine.probe([PROMPT], served.second)
    for _ in range(2):
        await engine.sleep()
        await engine.wake()
    after = await engine.probe([PROMPT], served.second)
    assert after.sha256 == served.second.sha256
    served.assert_agree(after.logprobs[0], before.logprobs[0])
    assert engine.failure is None


# ---- a server of others --------------------------------------------------------------------------


async def test_a_server_that_runs_already_is_proved_by_logprobs_alone(
    engine: VllmEngine, model: Path, adapters: dict[AdapterRef, Path], tmp_path: Path
) -> None:
    proxy = subprocess.Popen(
        [sys.executable, "-c", PROXY, str(engine._client.process.socket)],  # pyright: ignore[reportOptionalMemberAccess]
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert proxy.stdout is not None
        url = f"http://127.0.0.1:{proxy.stdout.readline().strip()}/v1"
        foreign = await asyncio.to_thread(
            VllmEngine.connect, str(model), url, directory=tmp_path / "shared", max_length=400
        )
        assert foreign.max_length == 400
        ref, directory = next(iter(adapters.items()))
        await foreign.publish(ref, directory)
        probe = await foreign.probe([PROMPT], ref)
        assert probe.sha256 is None
        served = Served(foreign, model, adapters, BFLOAT16 if ON_GPU else FLOAT32)
        (done,) = await complete(foreign, PROMPT, Sampling(max_tokens=4, seed=0), ref)
        served.assert_agree(done.logprobs, served.expected(PROMPT, done, ref))
        await foreign.unload(ref)
        await foreign.close()
    finally:
        proxy.kill()
        proxy.wait()
        if proxy.stdout is not None:
            proxy.stdout.close()


PROXY = """
import asyncio, sys
async def copy(reader, writer):
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()
async def main():
    async def serve(reader, writer):
        r, w = await asyncio.open_unix_connection(sys.argv[1])
        await asyncio.gather(copy(reader, w), copy(r, writer), return_exceptions=True)
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()
asyncio.run(main())
"""


# ---- supervision ---------------------------------------------------------------------------------


def group(pid: int) -> list[psutil.Process]:
    """The live processes of a process group."""
    members = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == pid and process.status() != psutil.STATUS_ZOMBIE:
                members.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return members


def wait_until(what: Any, within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while not (done := what()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return bool(done)


async def test_no_process_of_vllm_listens_beyond_this_machine(engine: VllmEngine) -> None:
    if Version(require_vllm(PYTHON).version) < Version("0.28"):
        pytest.skip("vLLM up to 0.27 opens torch's TCPStore on all interfaces; the guide says so")
    assert engine._client.process is not None and engine._client.process.pid is not None
    members = group(engine._client.process.pid)
    assert len(members) >= 2, "the server and its engine core"
    sockets = [one for member in members for one in member.net_connections("inet")]
    listening = [one.laddr for one in sockets if one.status == psutil.CONN_LISTEN]
    assert [place for place in listening if place[0] not in ("127.0.0.1", "::1")] == []


OWNER = """
import sys, threading, time
from hone.inference.vllm.process import VllmProcess, require_vllm
process = VllmProcess()
arguments = [sys.argv[2], "--enforce-eager", "--max-model-len", "512", "--dtype", sys.argv[3]]
arguments += ["--enable-lora"]
run = lambda: process.start(require_vllm(sys.argv[1]), arguments)
threading.Thread(target=run, daemon=True).start()
while process.pid is None:
    time.sleep(0.05)
print(process.pid, flush=True)
time.sleep(600)
"""


async def test_vllm_dies_with_its_owner(model: Path) -> None:
    """Also by SIGKILL, and with the workers it has started by then."""
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, PYTHON, str(model), DTYPE],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    try:
        # The server, its engine core, and what multiprocessing starts beside them.
        assert wait_until(lambda: len(group(pid)) >= 3, 120), group(pid)
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        assert wait_until(lambda: not group(pid), 10), group(pid)
    finally:
        owner.stdout.close()
        for process in group(pid):
            process.kill()


@pytest.fixture
def logs(tmp_path: Path) -> Iterator[Path]:
    """The directory of a server's logs."""
    settings = Settings(root=tmp_path)
    start_logging(settings)
    yield settings.log_file.parent
    stop_logging()


async def test_workers_die_with_their_server(model: Path, logs: Path) -> None:
    process = VllmProcess()
    assert process.log == logs / "vllm.log"
    arguments = [str(model), "--enforce-eager", "--max-model-len", "512", "--dtype", DTYPE]
    arguments += ["--enable-lora"]
    if ON_GPU:
        arguments += ["--gpu-memory-utilization", "0.2", "--kv-cache-memory-bytes", str(1 << 30)]
    stages: list[str] = []
    process.start(require_vllm(PYTHON), arguments, tell=stages.append)
    assert {"vLLM loads the weights", "vLLM has allocated its KV cache"} <= set(stages)
    pid = process.pid
    assert pid is not None and process.failure is None
    try:
        os.kill(pid, signal.SIGKILL)
        assert process.wait(PATIENCE_S)
        assert wait_until(lambda: not group(pid), 10), group(pid)
        failure = process.failure
        assert isinstance(failure, EngineFailed)
        assert "exit status -9" in str(failure) and str(process.log) in str(failure)
        assert "Application startup complete" in str(failure), failure
        assert f"[{pid}]" in (logs / "vllm.log").read_text(), "its whole output"
    finally:
        process.stop()


async def test_a_server_that_cannot_start_says_why(model: Path) -> None:
    process = VllmProcess()
    arguments = [str(model), "--max-model-len", "100000", "--dtype", DTYPE]
    with pytest.raises(EngineFailed, match=r"(?s)exit status 1\..*max_model_len"):
        process.start(require_vllm(PYTHON), arguments)
    assert not process.socket.parent.exists()


# ---- the end: the engine of this file is broken, then closed ------------------------------------


async def test_a_crashed_engine_is_a_failure_that_says_why(
    engine: VllmEngine, adapters: dict[AdapterRef, Path]
) -> None:
    assert engine._client.process is not None
    pid = engine._client.process.pid
    assert pid is not None
    running = asyncio.ensure_future(complete(engine, PROMPT, Sampling(max_tokens=450)))
    await asyncio.sleep(0.5)
    core = [one for one in group(pid) if "EngineCore" in one.name()]
    for one in core or group(pid):
        one.kill()
    with pytest.raises(EngineFailed, match=r"(?s)The last lines of its log"):
        await running
    assert isinstance(engine.failure, EngineFailed)
    assert await asyncio.to_thread(wait_until, lambda: not group(pid), 30)
    with pytest.raises(EngineFailed):
        await complete(engine, PROMPT, Sampling(max_tokens=1))


async def test_closing_ends_what_runs_with_an_error(model: Path, tmp_path: Path) -> None:
    engine = await asyncio.to_thread(open_engine, model, tmp_path)
    running = asyncio.ensure_future(complete(engine, PROMPT, Sampling(max_tokens=450)))
    while not engine.stats().running:
        assert not running.done(), running
        await asyncio.sleep(0.001)
    await engine.close()
    with pytest.raises(EngineError, match="closed"):
        await running
    with pytest.raises(EngineError, match="closed"):
        await complete(engine, PROMPT, Sampling(max_tokens=1))
    assert engine.failure is None and not list(tmp_path.glob("adapters/*"))
