"""Which GPUs vLLM and the learner get, down to their processes, and what they do on a shared one."""

import asyncio
import json
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from tests.inference.conftest import write_vllm
from tests.patience import PATIENCE_S
from tests.prose import Prose
from tests.server.small_server import LearnerHere, SmallServer, spec, token_groups

from hone.errors import ConfigError, EngineError, ModelTooLarge
from hone.inference.base import Sampling, complete
from hone.inference.embedded.engine import EmbeddedEngine
from hone.learner.process import LearnerProcess, LearnerSpec
from hone.models import fit, machine
from hone.models.cache import cache_home
from hone.models.card import CONTEXT
from hone.models.decoder import Decoder
from hone.server.serve import engine_choice
from hone.server.serve import gpus as server_gpus
from hone.server.serve.gpus import Gpus, choose_gpus, num_gpus, visible
from hone.server.serve.holds import Hold
from hone.server.serve.policies import OpenEngine
from hone.server.settings import Settings
from hone.types import ModelSpec

RECORD = """
import json, os, signal, sys
names = ("CUDA_VISIBLE_DEVICES", "PYTHONPATH")
def main():
    seen = {"argv": sys.argv, "env": {name: os.environ.get(name) for name in names}}
    open(os.environ["HONE_TEST_RECORD"], "w").write(json.dumps(seen))
    error = os.environ.get("HONE_TEST_ERROR", "no GPU here")
    raise RuntimeError(error) if error else signal.pause()
"""
"""The command line of a vLLM that notes how it was started, and fails; without an error, it hangs."""
GB = 10**9


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs of 24 GB, as far as the server can see."""
    monkeypatch.setattr(engine_choice, "num_gpus", lambda device: 2)
    monkeypatch.setattr(fit, "total_memory", lambda device: 24 * GB)
    monkeypatch.setattr(machine, "choose", lambda device: ("cuda", torch.bfloat16))


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An interpreter with a package called vllm, whose server notes how it was started."""
    monkeypatch.setenv("PYTHONPATH", str(write_vllm(tmp_path, main=RECORD)))
    monkeypatch.setenv("HONE_TEST_RECORD", str(tmp_path / "record.json"))
    link = tmp_path / "python"
    link.symlink_to(sys.executable)
    return link


def started(
    server: SmallServer, base_model: Path, tmp_path: Path, **engine_args: Any
) -> tuple[dict[str, str | None], str | None, str]:
    """Options and visible GPUs of the vLLM that is started for a model, and how it failed."""
    model = spec(base_model, engine_args=engine_args)
    server.serving.register(model)
    server.models.register(model)
    with pytest.raises(EngineError) as failed:
        server.serving.choice.open(str(base_model))
    seen = json.loads((tmp_path / "record.json").read_text())
    words = [word.partition("=") for word in seen["argv"] if word.startswith("--")]
    options = {name: value if equals else None for name, equals, value in words}
    return options, seen["env"]["CUDA_VISIBLE_DEVICES"], str(failed.value)


# ---- numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "device", "expected"),
    [
        ({}, None, Gpus((0,), 0)),
        ({}, "cuda:2", Gpus((2,), 2)),
        ({"tensor_parallel_size": 2}, None, Gpus((0, 1), 0)),
        ({"tensor_parallel_size": 2}, "cuda:3", Gpus((0, 1), 3)),
        ({"inference_gpu_ids": [1]}, None, Gpus((1,), 0)),
        ({"trainer_gpu_ids": [3]}, None, Gpus((0,), 3)),
        (
            {"inference_gpu_ids": [3, 1], "tensor_parallel_size": 2, "trainer_gpu_ids": [1]},
            None,
            Gpus((3, 1), 1),
        ),
    ],
)
def test_the_gpus_of_a_model(args: dict[str, Any], device: str | None, expected: Gpus):
    assert choose_gpus(args, device=device, count=4) == expected


def test_one_gpu_is_shared_unless_both_have_their_own():
    assert Gpus((0, 1), 1).shared == 1 and Gpus((0, 1), 2).shared is None
    assert Gpus().shared is None and Gpus((), 0).shared is None


@pytest.mark.parametrize(
    ("args", "count"),
    [
        ({"tensor_parallel_size": 2}, 1),
        ({"tensor_parallel_size": 2, "inference_gpu_ids": [1]}, 2),
        ({"inference_gpu_ids": [0, 3]}, 2),
        ({"trainer_gpu_ids": [2]}, 2),
        ({"trainer_gpu_ids": [0, 1]}, 2),
    ],
)
def test_more_gpus_than_there_are_is_an_error(prose: Prose, args: dict[str, Any], count: int):
    with pytest.raises(ConfigError) as caught:
        choose_gpus(args, device=None, count=count)
    prose(caught)


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (
            {"inference_gpu_ids": [0, 1]},
            "engine_args.inference_gpu_ids: [0, 1] names 2 GPUs, and vLLM uses 1; set "
            "engine_args.tensor_parallel_size to 2, or name 1 GPU",
        ),
        (
            {"inference_gpu_ids": [1, 0, 2], "tensor_parallel_size": 2},
            "engine_args.inference_gpu_ids: [1, 0, 2] names 3 GPUs, and vLLM uses 2; set "
            "engine_args.tensor_parallel_size to 3, or name 2 GPUs",
        ),
    ],
)
def test_gpus_that_vllm_would_not_use_are_refused(args: dict[str, Any], why: str):
    with pytest.raises(ConfigError) as refused:
        choose_gpus(args, device=None, count=4)
    assert str(refused.value) == why


def test_stored_gpu_ids_that_are_refused_now_name_their_model(
    prose: Prose, gpus: None, vllm: Path, tiny_model: Path, tmp_path: Path
):
    server = SmallServer.at(tmp_path / "hone", engine="vllm", engine_python=vllm, device=None)
    model = spec(tiny_model, engine_args={"inference_gpu_ids": [0, 1], "trainer_gpu_ids": [1]})
    with pytest.raises(ConfigError) as caught:
        server.serving.register(model)
    prose(caught)
    server.models.register(model)  # as a version did that did not check it
    with pytest.raises(ConfigError) as caught:
        server.serving.choice.open(str(tiny_model))
    prose(caught)
    server.store.close()
    # Other engines do not use them.
    others: list[tuple[dict[str, Any], tuple[int, ...]]] = [
        ({"engine": "embedded"}, (0,)),
        ({"engine_url": "http://127.0.0.1:9"}, ()),
    ]
    for settings, inference in others:
        server = SmallServer.at(tmp_path / "hone", device=None, **settings)
        assert server.serving.choice.gpus(str(tiny_model)) == Gpus(inference, 1)
        server.store.close()


def test_gpu_ids_index_the_gpus_that_the_server_sees(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible([1, 0]) == {"CUDA_VISIBLE_DEVICES": "1,0"} and visible([]) == {}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-5")
    assert visible([1, 0]) == {"CUDA_VISIBLE_DEVICES": "GPU-5,4"}


@pytest.fixture
def one_gpu_for_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch sees a GPU; no driver has a device file."""
    monkeypatch.setattr(server_gpus, "DRIVER", tmp_path / "nvidiactl")
    monkeypatch.setattr(server_gpus, "OTHER_DRIVERS", (tmp_path / "dxg", tmp_path / "kfd"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(fit, "total_memory", lambda device: 24 * GB)
    monkeypatch.setattr(machine, "choose", lambda device: ("cuda", torch.bfloat16))


@pytest.mark.parametrize("device", [None, "cuda", "cuda:0"])
def test_the_gpus_are_those_that_torch_sees(one_gpu_for_torch: None, device: str | None):
    """WSL2 and ROCm have no /dev/nvidiactl."""
    assert num_gpus(device) == 1 and num_gpus("cpu") == 0


@pytest.mark.parametrize("driver", [None, "nvidiactl", "dxg", "kfd"])
def test_torch_is_loaded_only_if_there_may_be_a_gpu(
    one_gpu_for_torch: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, driver: str | None
):
    monkeypatch.setitem(sys.modules, "torch", None)  # an import fails
    if driver is None:
        assert num_gpus(None) == 0 and num_gpus("cpu") == 0
        return
    (tmp_path / driver).touch()
    assert num_gpus("cpu") == 0
    with pytest.raises(ImportError, match="torch"):
        num_gpus(None)


@pytest.mark.parametrize("device", [None, "cuda"])
def test_vllm_shares_a_gpu_of_another_driver_by_a_plan(
    one_gpu_for_torch: None, vllm: Path, tiny_model: Path, tmp_path: Path, device: str | None
):
    server = SmallServer.at(tmp_path / "hone", engine="auto", engine_python=vllm, device=device)
    assert server.serving.choice.describe().startswith("vLLM ")
    options, visible_gpus, _ = started(server, tiny_model, tmp_path, gpu_memory_utilization=0.9)
    card = server.serving.choice.card(str(tiny_model))
    assert card is not None and card.sleeps
    assert server.serving.on_gpu_of(str(tiny_model)) == {str(tiny_model): True}
    assert visible_gpus == "0" and "--enable-sleep-mode" in options
    server.store.close()


# ---- processes -----------------------------------------------------------------------------------


def test_vllm_is_started_with_its_share_of_a_gpu_that_it_shares(
    prose: Prose,
    gpus: None,
    vllm: Path,
    tiny_model: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
):
    server = SmallServer.at(tmp_path / "hone", engine="vllm", engine_python=vllm, device=None)
    caplog.set_level("INFO")
    options, visible_gpus, _ = started(server, tiny_model, tmp_path)
    # A tiny model: almost nothing but 4 GB of overhead and 256 sequences of its context.
    card = server.serving.choice.card(str(tiny_model))
    assert card is not None and not card.sleeps
    assert visible_gpus == "0" and "--no-enable-sleep-mode" in options
    assert float(options["--gpu-memory-utilization"] or 0) == pytest.approx(0.17, abs=0.01)
    (plan,) = (record for record in caplog.records if "GPU memory" in record.getMessage())
    assert plan.getMessage().startswith("24.0 GB of GPU memory; sampling: vLLM 0.17 (weights 0.0")
    assert vars(plan)["console"]

    args = {"gpu_memory_utilization": 0.9, "dtype": "auto"}
    options, _, _ = started(server, tiny_model, tmp_path, **args)
    assert options["--dtype"] == "bfloat16"  # the learner's, not what vLLM would choose
    assert options["--gpu-memory-utilization"] == "0.9" and "--enable-sleep-mode" in options

    options, _, _ = started(server, tiny_model, tmp_path, kv_cache_memory_bytes=8 * GB)
    assert options["--kv-cache-memory-bytes"] == str(8 * GB)
    assert float(options["--gpu-memory-utilization"] or 0) == pytest.approx(0.5, abs=0.01)
    assert caplog.text.count("KV cache 8.0") == 1
    with pytest.raises(ConfigError) as caught:
        started(server, tiny_model, tmp_path, kv_cache_memory_bytes="8G")
    prose(caught)
    server.store.close()


def test_gpu_ids_reach_vllm(gpus: None, vllm: Path, tiny_model: Path, tmp_path: Path):
    server = SmallServer.at(tmp_path / "hone", engine="vllm", engine_python=vllm, device=None)
    args = {"inference_gpu_ids": [1, 0], "tensor_parallel_size": 2}
    options, visible_gpus, _ = started(server, tiny_model, tmp_path, **args)
    assert visible_gpus == "1,0" and options["--tensor-parallel-size"] == "2"
    args = {"inference_gpu_ids": [1], "trainer_gpu_ids": [0]}
    options, visible_gpus, _ = started(server, tiny_model, tmp_path, **args)
    assert visible_gpus == "1" and "--no-enable-sleep-mode" in options
    assert "--gpu-memory-utilization" not in options  # vLLM's own default: nobody else is there
    server.store.close()


async def test_gpu_ids_reach_the_learner(
    prose: Prose,
    gpus: None,
    vllm: Path,
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    launched: list[tuple[LearnerSpec, dict[str, str]]] = []
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)  # torch sets it once it compiles

    def launch(spec: LearnerSpec, **more: Any) -> LearnerProcess:
        learner = LearnerProcess.launch(spec.model_copy(update={"device": "cpu"}), **more)
        launched.append((spec, psutil.Process(learner.pid).environ()))
        learner.close()
        raise ConfigError("seen")

    settings: dict[str, Any] = {"engine": "vllm", "engine_python": vllm, "device": None}
    server = SmallServer.at(tmp_path / "hone", start_learner=launch, **settings)
    tokenizer = await server.serving.engines.tokenizer(str(tiny_model))
    for args in ({"trainer_gpu_ids": [1]}, {"inference_gpu_ids": [1], "trainer_gpu_ids": [1]}):
        model = spec(tiny_model, engine_args=args)
        server.serving.register(model)
        server.models.register(model)
        with pytest.raises(ConfigError) as caught:
            async with server.service._learners.borrow(tokenizer, nullcontext()):
                pass
        prose(caught)
    card = server.serving.choice.card(str(tiny_model))
    assert card is not None and 10 * GB < card.learner < 24 * GB
    (alone, env), (shares, _) = launched
    assert env["CUDA_VISIBLE_DEVICES"] == "1" and env["GOMP_SPINCOUNT"] == "0"
    # Compiled layers outlive the process.
    assert env["TORCHINDUCTOR_CACHE_DIR"] == str(cache_home() / "inductor")
    assert (alone.device, alone.dtype, alone.memory) == ("cuda", "bfloat16", None)
    assert shares.memory == card.learner - CONTEXT
    server.store.close()


# ---- memory that does not suffice ----------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
        "ValueError: Free memory on device cuda:0 (3/24 GiB) on startup is less than desired GPU "
        "memory utilization (0.9, 21.6 GiB)",
        "ValueError: No available memory for the cache blocks.",
    ],
)
def test_a_vllm_without_enough_memory_says_what_would_fit(
    prose: Prose,
    gpus: None,
    vllm: Path,
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: str,
):
    server = SmallServer.at(tmp_path / "hone", engine="vllm", engine_python=vllm, device=None)
    monkeypatch.setenv("HONE_TEST_ERROR", f"\n{error}")
    _, _, why = started(server, tiny_model, tmp_path, gpu_memory_utilization=0.9)
    first, _, rest = why.partition("\n")
    # There is no job, and so no number of generations. (4 GB + a tiny model) / 24 GB = 0.167.
    assert first == (
        "CUDA out of memory. What would fit on a GPU of 24.0 GB: reduce gpu_memory_utilization to "
        "0.17; reduce max_seq_length to 256; halve num_generations; or increase "
        "tensor_parallel_size to 2, with as many GPUs."
    )
    assert error.partition(":")[2][:60] in rest  # and vLLM's own words
    monkeypatch.setenv("HONE_TEST_ERROR", "\nValueError: another mistake")
    _, _, why = started(server, tiny_model, tmp_path)
    assert "out of memory" not in why
    disturbed = "AssertionError: Error in memory profiling. Initial free memory 134.02 GiB, current"
    monkeypatch.setenv("HONE_TEST_ERROR", f"\n{disturbed}")
    _, _, why = started(server, tiny_model, tmp_path)
    assert disturbed in why
    prose(why)
    server.store.close()


def test_a_gpu_that_is_divided_for_another_base_model_is_named(
    prose: Prose,
    gpus: None,
    vllm: Path,
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    server = SmallServer.at(tmp_path / "hone", engine="vllm", engine_python=vllm, device=None)
    choice, other = server.serving.choice, shutil.copytree(tiny_model, tmp_path / "other")
    server.serving.register(spec(other, "other", engine_args={"gpu_memory_utilization": 0.4}))
    os.mkfifo(tmp_path / "pipe")
    with ThreadPoolExecutor() as pool, monkeypatch.context() as patch:
        patch.setenv("HONE_TEST_ERROR", "")
        patch.setenv("HONE_TEST_RECORD", str(tmp_path / "pipe"))
        first = pool.submit(choice.open, str(other))
        (tmp_path / "pipe").read_bytes()  # it has started
        patch.undo()
        monkeypatch.setenv("HONE_TEST_ERROR", "\ntorch.OutOfMemoryError: CUDA out of memory.")
        for args in ({"gpu_memory_utilization": 0.4}, {"inference_gpu_ids": [1]}):
            _, _, why = started(server, tiny_model, tmp_path, trainer_gpu_ids=[1], **args)
            assert "is already divided" not in why
        _, _, why = started(server, tiny_model, tmp_path)
        prose(why)
        assert caplog.text.count(f"GPU 0 is already divided for {str(other)!r}, ") == 1
        choice.close()
        assert "stopped while it was starting" in str(first.exception())
    assert choice.less_memory(str(tiny_model)).startswith("What would fit")
    server.store.close()


OWN_GPUS = {"inference_gpu_ids": [1], "trainer_gpu_ids": [0]}
LEARNER_ADVICE = (
    "What needs less memory: reduce max_seq_length to 256; reduce num_generations to 2; or choose a "
    "smaller base_model."
)
FOREIGN = (
    "If the vLLM at http://127.0.0.1:9 uses the learner's GPU, start it with a smaller "
    "--gpu-memory-utilization"
)


@pytest.mark.parametrize(
    ("settings", "args", "count", "says"),
    [
        ({"engine": "vllm"}, OWN_GPUS, 2, LEARNER_ADVICE),
        ({"engine": "vllm"}, {**OWN_GPUS, "gpu_memory_utilization": 0.5}, 2, LEARNER_ADVICE),
        ({"engine": "embedded"}, {}, 2, LEARNER_ADVICE),
        (
            {"engine_url": "http://127.0.0.1:9"},
            {},
            2,
            f"{LEARNER_ADVICE}\n{FOREIGN}, or set engine_args.trainer_gpu_ids to another GPU.",
        ),
        ({"engine_url": "http://127.0.0.1:9"}, {}, 1, f"{LEARNER_ADVICE}\n{FOREIGN}."),
    ],
)
def test_a_learner_gets_no_advice_about_a_vllm_that_takes_none_of_its_memory(
    gpus: None,
    vllm: Path,
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    args: dict[str, Any],
    count: int,
    says: str,
):
    monkeypatch.setattr(engine_choice, "num_gpus", lambda device: count)
    server = SmallServer.at(tmp_path / "hone", engine_python=vllm, device=None, **settings)
    server.models.register(spec(tiny_model, engine_args=args))
    assert server.serving.choice.less_memory(str(tiny_model), 4) == says
    server.store.close()


@pytest.mark.parametrize(
    "args",
    [
        # (4 GB + a tiny model) / 16 GB = 0.25. Without a value, vLLM takes 0.92.
        {},
        {"gpu_memory_utilization": 0.2},
        {"kv_cache_memory_bytes": 20 * GB},
    ],
)
def test_a_vllm_alone_on_its_gpu_says_what_would_fit_there(
    prose: Prose,
    gpus: None,
    vllm: Path,
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    args: dict[str, Any],
):
    sizes = {"cuda:0": 24 * GB, "cuda:1": 16 * GB}
    monkeypatch.setattr(fit, "total_memory", lambda device: sizes[device])
    monkeypatch.setenv("HONE_TEST_ERROR", "\ntorch.OutOfMemoryError: CUDA out of memory.")
    server = SmallServer.at(tmp_path / "hone", engine="vllm", engine_python=vllm, device=None)
    _, _, why = started(server, tiny_model, tmp_path, **OWN_GPUS, **args)
    prose(why)
    server.store.close()


OUT_OF_MEMORY = """
import torch
from hone.learner import body

def exhausted(*args, **kwargs):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\\nmore of torch")

"""


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("place", "engine"),
    [
        ("Decoder.load", "vllm"),
        ("DecoderBody.hidden", "vllm"),
        ("DecoderBody.hidden", "embedded"),
    ],
)
async def test_a_learner_without_enough_memory_fails_its_job_and_says_what_would_fit(
    gpus: None,
    vllm: Path,
    tiny_model: Path,
    tmp_path: Path,
    place: str,
    engine: Any,
):
    """When it loads the model, and in the first row of the job."""
    (tmp_path / "sitecustomize.py").write_text(f"{OUT_OF_MEMORY}body.{place} = exhausted\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])

    def embedded(_: OpenEngine) -> OpenEngine:
        return lambda name: EmbeddedEngine(Decoder.load(Path(name)), kv_budget_bytes=1 << 24)

    def launch(spec: LearnerSpec, *, env: dict[str, str], **more: Any) -> LearnerProcess:
        spec = spec.model_copy(update={"device": "cpu", "dtype": "float32"})
        return LearnerProcess.launch(spec, env={**env, "PYTHONPATH": path}, **more)

    settings = Settings(root=tmp_path / "hone", engine=engine, engine_python=vllm)
    server = SmallServer(settings, around_open=embedded, start_learner=launch)
    async with server.running():
        model = spec(tiny_model, engine_args={"gpu_memory_utilization": 0.9})
        record = server.models.register(model)
        job = await server.ended(server.submit(record, token_groups()).id)
        assert (job.state, job.attempts, job.retries) == ("failed", 1, 0)
        assert job.failure is not None and job.failure.type == "OutOfMemory"
        first, advice = job.failure.message.splitlines()
        assert first == "CUDA out of memory. Tried to allocate 2.00 GiB."
        # A group has three generations. Settings of vLLM do not apply to the embedded engine.
        expected = {
            "embedded": "What needs less memory: reduce max_seq_length to 256; reduce "
            "num_generations to 2; or choose a smaller base_model.",
            "vllm": "What would fit on a GPU of 24.0 GB: reduce gpu_memory_utilization to 0.17; "
            "reduce max_seq_length to 256; reduce num_generations to 2; or increase "
            "tensor_parallel_size to 2, with as many GPUs.",
        }
        assert advice == expected[engine]


# ---- one GPU for both ----------------------------------------------------------------------------


class Released(LearnerHere):
    """Notes when it frees its memory."""

    moments: list[str]

    def release(self, *, weights: bool, **_: Any) -> None:
        self.moments.append("learner releases all" if weights else "learner releases")
        self.learner.release(weights=weights)


@pytest.mark.parametrize(
    ("engine_args", "setting", "expected"),
    [
        # A tenth of 24 GB holds the tiny learner: it frees only what a job needs.
        ({"gpu_memory_utilization": 0.9}, None, ["asleep", "learner releases", "awake"]),
        # Nothing but the context: the weights leave too.
        ({"gpu_memory_utilization": 0.96}, None, ["asleep", "learner releases all", "awake"]),
        ({}, None, ["asleep", "learner releases", "awake"]),
        ({}, "continue", ["learner releases"]),
        ({"inference_gpu_ids": [1]}, None, []),
        ({"inference_gpu_ids": [1]}, "pause", ["asleep", "awake"]),
    ],
)
async def test_requests_are_held_where_both_are_on_one_gpu(
    gpus: None,
    vllm: Path,
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    engine_args: dict[str, Any],
    setting: Any,
    expected: list[str],
):
    moments: list[str] = []

    class Watched(EmbeddedEngine):
        async def sleep(self) -> None:
            await super().sleep()
            if moments[-1:] != ["asleep"]:
                moments.append("asleep")

        async def wake(self) -> None:
            moments.append("awake")
            await super().wake()

    def start_learner(spec: LearnerSpec, **more: Any) -> Released:
        assert spec.device == "cuda"
        asleep = ["asleep"] if "gpu_memory_utilization" in engine_args else []
        assert moments == asleep, "it loads where there is room for it"
        learner = Released(spec.model_copy(update={"dtype": "float32"}), **more)
        learner.moments = moments
        return learner

    settings = Settings(
        root=tmp_path / "hone",
        engine="vllm",
        engine_python=vllm,
        serving_during_training=setting,
        learner_threads=1,
    )
    server = SmallServer(
        settings,
        around_open=lambda _: (
            lambda name: Watched(Decoder.load(Path(name)), kv_budget_bytes=1 << 24)
        ),
        start_learner=start_learner,
    )
    async with server.running():
        model: ModelSpec = spec(tiny_model, engine_args=engine_args)
        server.serving.register(model)
        record = server.models.register(model)
        job = await server.ended(server.submit(record, token_groups()).id)
        assert job.state == "done", job.failure
        assert moments == expected


@pytest.mark.parametrize(
    ("trained", "other", "held"),
    [
        ({}, {"inference_gpu_ids": [1]}, {"trained"}),
        ({}, {}, {"trained", "other"}),
        # The learner is on GPU 0, which only the other engine uses.
        ({"inference_gpu_ids": [1]}, {"inference_gpu_ids": [0]}, {"other"}),
    ],
)
async def test_a_job_holds_the_requests_to_engines_on_its_gpu_only(
    gpus: None,
    vllm: Path,
    tiny_model: Path,
    tmp_path: Path,
    trained: dict[str, Any],
    other: dict[str, Any],
    held: set[str],
):
    bases = {name: tmp_path / name for name in ("trained", "other")}
    asleep: set[str] = set()
    answered: list[str] = []

    class Watched(EmbeddedEngine):
        name = ""

        async def sleep(self) -> None:
            await super().sleep()
            asleep.add(self.name)

    def open_engine(path: str) -> Watched:
        engine = Watched(Decoder.load(Path(path)), kv_budget_bytes=1 << 24)
        engine.name = Path(path).name
        return engine

    async def ask(name: str) -> None:
        async with server.serving.using(name, hold=Hold()) as policy:
            await complete(policy.base.engine, [1], Sampling(max_tokens=1), policy.adapter)
        answered.append(name)

    class Asking(Released):
        """Sends a request to every engine that is not held while it trains."""

        def train(self, *args: Any, **more: Any) -> Any:
            for name in bases.keys() - held:
                asyncio.run_coroutine_threadsafe(ask(name), loop).result(PATIENCE_S)
            return super().train(*args, **more)

    def start_learner(spec: LearnerSpec, **more: Any) -> Asking:
        learner = Asking(spec.model_copy(update={"dtype": "float32"}), **more)
        learner.moments = []
        return learner

    settings = Settings(
        root=tmp_path / "hone", engine="vllm", engine_python=vllm, learner_threads=1
    )
    server = SmallServer(settings, around_open=lambda _: open_engine, start_learner=start_learner)
    loop = asyncio.get_running_loop()
    async with server.running():
        for name, args in {"other": other, "trained": trained}.items():
            shutil.copytree(tiny_model, bases[name])
            model: ModelSpec = spec(bases[name], name=name, engine_args=args)
            server.serving.register(model)
            server.models.register(model)
            await ask(name)
        answered.clear()
        record = server.models.find("trained")
        job = await server.ended(server.submit(record, token_groups()).id)
        assert job.state == "done", job.failure
        assert asleep == held and set(answered) == bases.keys() - held
        for name in bases:
            await ask(name)


# ---- several learners ----------------------------------------------------------------------------


class Turns:
    """A server with two base models; their learners wait at a gate, and note what they do."""

    def __init__(self, tmp_path: Path, tiny_model: Path, trainer: dict[str, int]) -> None:
        self.moments: list[str] = []
        self.gate = threading.Event()
        self.bases = {name: tmp_path / name for name in trainer}
        turns = self

        class Noting(LearnerHere):
            def __init__(self, spec: LearnerSpec, **more: Any) -> None:
                self.name = Path(spec.base_model).name
                turns.moments.append(f"{self.name} loads")
                super().__init__(spec.model_copy(update={"dtype": "float32"}), **more)

            def train(self, *args: Any, **more: Any) -> Any:
                turns.moments.append(f"{self.name} trains")
                assert turns.gate.wait(PATIENCE_S)
                return super().train(*args, **more)

            def close(self, **more: Any) -> None:
                turns.moments.append(f"{self.name} closes")
                super().close(**more)

        def open_engine(path: str) -> EmbeddedEngine:
            return EmbeddedEngine(Decoder.load(Path(path)), kv_budget_bytes=1 << 24)

        settings = Settings(root=tmp_path / "hone", engine="embedded", learner_threads=1)
        self.server = SmallServer(settings, around_open=lambda _: open_engine, start_learner=Noting)
        self.records = {}
        for name, gpu in trainer.items():
            shutil.copytree(tiny_model, self.bases[name])
            args = {"trainer_gpu_ids": [gpu]}
            model = spec(self.bases[name], name=name, engine_args=args)
            self.records[name] = self.server.models.register(model)

    def submit(self, name: str) -> str:
        job = self.server.submit(self.records[name], token_groups())
        self.server.service.wake()
        return job.id

    async def noted(self, *moments: str) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not set(moments) <= set(self.moments):
                await asyncio.sleep(0.01)

    async def waits(self, job: str) -> str:
        """Why a job waits, once it does."""
        async with asyncio.timeout(PATIENCE_S):
            while (reason := self.server.jobs.get(job).waiting_for) is None:
                await asyncio.sleep(0.01)
        return reason


async def test_learners_on_one_gpu_run_one_after_the_other(
    gpus: None, tiny_model: Path, tmp_path: Path
):
    turns = Turns(tmp_path, tiny_model, {"a": 0, "b": 0})
    server = turns.server
    async with server.running():
        first = turns.submit("a")
        await turns.noted("a trains")
        second = turns.submit("b")
        reason = await turns.waits(second)
        assert reason.startswith(f"GPU 0 is used by the learner of {str(turns.bases['a'])!r}")
        status = server.service.status()
        assert (status["jobs"], status["waiting"]) == ([first], {second: reason})
        assert status["queued"] == 1 and server.jobs.get(second).attempts == 0
        assert turns.moments == ["a loads", "a trains"]
        turns.gate.set()
        for job in (first, second):
            assert (await server.ended(job)).state == "done", server.jobs.get(job).failure
        expected = ["a loads", "a trains", "a closes", "b loads", "b trains"]
        assert turns.moments == expected  # the memory of a is free before b loads
        assert "waiting" not in server.service.status()
        # The learner stays for the next job of its base model.
        await server.ended(turns.submit("b"))
        assert turns.moments == [*expected, "b trains"]


async def test_learners_on_two_gpus_run_side_by_side(gpus: None, tiny_model: Path, tmp_path: Path):
    turns = Turns(tmp_path, tiny_model, {"a": 0, "b": 1})
    async with turns.server.running():
        for name in turns.records:  # no engine is opened on a GPU that a learner uses
            await turns.server.serving.resolve(name)
        jobs = [turns.submit(name) for name in turns.records]
        await turns.noted("a trains", "b trains")
        turns.gate.set()
        for job in jobs:
            assert (await turns.server.ended(job)).state == "done"
        assert not any("closes" in moment for moment in turns.moments)


async def test_a_job_that_waits_for_its_gpu_can_be_cancelled_and_survives_a_stop(
    gpus: None, tiny_model: Path, tmp_path: Path
):
    turns = Turns(tmp_path, tiny_model, {"a": 0, "b": 0, "c": 0})
    server = turns.server
    async with server.running():
        first = turns.submit("a")
        await turns.noted("a trains")
        cancelled, stopped = turns.submit("b"), turns.submit("c")
        await turns.waits(cancelled)
        await turns.waits(stopped)
        server.jobs.request_cancel(cancelled)
        asyncio.get_running_loop().call_later(0.05, turns.gate.set)  # while the service closes
        await server.service.close()
        states = {job: server.jobs.get(job).state for job in (first, cancelled, stopped)}
        assert states == {first: "queued", cancelled: "cancelled", stopped: "queued"}
        assert server.jobs.get(stopped).attempts == 0
        assert not any(moment.startswith(("b", "c")) for moment in turns.moments)


def test_a_model_that_fits_nowhere_is_refused_before_vllm_starts(
    prose: Prose,
    gpus: None,
    vllm: Path,
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(fit, "total_memory", lambda device: 4 * GB)
    server = SmallServer.at(tmp_path / "hone", engine="vllm", engine_python=vllm, device=None)
    with pytest.raises(ModelTooLarge) as caught:
        server.serving.choice.open(str(tiny_model))
    prose(caught)
    assert not (tmp_path / "record.json").exists()
    server.store.close()
