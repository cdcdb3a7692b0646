"""Which engine serves, and which arguments of vLLM a model may send. No vLLM needed."""

import os
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from tests.inference.conftest import write_vllm
from tests.inference.vllm.test_client import Standin, served
from tests.prose import Prose, place_of
from tests.server.small_server import SmallServer
from tests.server.small_server import spec as small_spec

from hone.errors import ConfigError, Conflict, EngineError, EngineFailed
from hone.files.owned import is_owned, make_owned
from hone.inference.base import Sampling, complete
from hone.models import machine
from hone.server.http.app import create_apps
from hone.server.http.training_routes import registered
from hone.server.serve import engine_choice
from hone.server.serve.engine_choice import EngineChoice, Plan
from hone.server.settings import Settings
from hone.server.state import State
from hone.server.train.art_requests import ArtModel, model_spec
from hone.server.train.model_args import PROJECTIONS, checked_spec
from hone.types import ModelKey, ModelSpec


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests that need GPUs say how many, whatever this machine has."""
    monkeypatch.setattr(engine_choice, "num_gpus", lambda device: 0)


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An interpreter that finds a package called vllm, of which only the source is read."""
    package = write_vllm(tmp_path)
    (package / "vllm" / "__init__.py").write_text("raise ImportError('it must not be imported')")
    monkeypatch.setenv("PYTHONPATH", str(package))
    link = tmp_path / "python"  # another path for every test: what it has is remembered
    link.symlink_to(sys.executable)
    return link


@pytest.fixture
def state(tmp_path: Path) -> Any:
    state = State(Settings(root=tmp_path / "hone", device="cpu"))
    yield state
    state.store.close()


def choice(state: State, **settings: Any) -> EngineChoice:
    return EngineChoice(Settings(root=state.settings.root, **settings), state.models)


def spec(name: str = "agent", **fields: Any) -> ModelSpec:
    return ModelSpec(name=name, base_model="tiny", **fields)


def test_auto_selects_vllm_if_it_is_installed_and_there_is_a_gpu(
    state: State, python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert choice(state, engine_python=python).describe() == "embedded"  # no GPU
    monkeypatch.setattr(engine_choice, "num_gpus", lambda device: 1)
    assert choice(state, engine_python=python).describe() == f"vLLM 0.30.1 of {python}"
    assert choice(state, engine_python=python, engine="embedded").describe() == "embedded"
    monkeypatch.delenv("PYTHONPATH")
    without = python.with_name("other")
    without.symlink_to(sys.executable)
    assert choice(state, engine_python=without).describe() == "embedded"


def test_vllm_may_be_installed_in_another_environment(
    state: State, python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without --engine-python it is looked for in hone's own environment."""
    monkeypatch.setattr(engine_choice.sys, "executable", str(python))
    assert choice(state, engine="vllm").describe() == f"vLLM 0.30.1 of {python}"
    assert choice(state).describe() == "embedded"  # no GPU
    monkeypatch.setattr(engine_choice, "num_gpus", lambda device: 1)
    assert choice(state).describe() == f"vLLM 0.30.1 of {python}"


def test_vllm_serves_without_a_gpu_if_it_is_requested(state: State, python: Path) -> None:
    assert choice(state, engine="vllm", engine_python=python).vllm is not None
    url = choice(state, engine_url="http://10.0.0.1:8000")
    assert (url.is_vllm, url.describe()) == (True, "vLLM at http://10.0.0.1:8000")


def test_an_unsupported_vllm_version_is_refused(prose: Prose, state: State, python: Path) -> None:
    metadata = python.parent / "packages" / "vllm-0.30.1.dist-info" / "METADATA"
    metadata.write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.40.0\n")
    with pytest.raises(EngineError) as caught:
        choice(state, engine="vllm", engine_python=python).describe()
    prose(caught)


def test_engine_args_are_kept_for_vllm_and_named_for_the_embedded_engine(
    state: State, python: Path
) -> None:
    sent = spec(engine_args={"max_num_seqs": 8, "gpu_memory_utilization": 0.5, "model": "tiny"})
    vllm = choice(state, engine="vllm", engine_python=python).check_arg()
    settled = checked_spec(sent, vllm)
    assert settled.engine_args == {"max_num_seqs": 8, "gpu_memory_utilization": 0.5}
    assert settled.not_applicable == [] and checked_spec(settled, vllm) == settled
    embedded = checked_spec(sent, choice(state, engine="embedded").check_arg())
    assert embedded.engine_args == {}
    assert embedded.not_applicable == [
        "engine_args.gpu_memory_utilization",
        "engine_args.max_num_seqs",
    ]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"max_num_sqs": 8}, "engine_args.max_num_sqs: this vLLM has no such argument. Did you"),
        ({"_private": 1}, "engine_args._private: this vLLM has no such argument."),
        ({"logprobs_mode": "raw_logits"}, "engine_args.logprobs_mode: 'raw_logits' cannot be set"),
        ({"model": "other"}, "engine_args.model: 'other' is not in this version"),
    ],
)
def test_engine_args_that_cannot_be_honoured_are_refused(
    state: State, python: Path, args: dict[str, Any], says: str
) -> None:
    check_arg = choice(state, engine="vllm", engine_python=python).check_arg()
    with pytest.raises(ConfigError) as refused:
        checked_spec(spec(engine_args=args), check_arg)
    assert str(refused.value).startswith(says)


@pytest.mark.parametrize(
    "args",
    [
        {"quantization": "fp8"},
        {"quantization_config": {"bits": 4}},
        {"load_format": "bitsandbytes"},
        {"load_format": "dummy"},
        {"hf_overrides": {"quantization_config": {}}},
    ],
)
@pytest.mark.parametrize("engine", ["vllm", "embedded", "url"])
def test_the_engine_serves_the_weights_that_the_learner_trains(
    prose: Prose, state: State, python: Path, engine: str, args: dict[str, Any]
) -> None:
    url = {"engine_url": "http://10.0.0.1:8000"}
    settings = url if engine == "url" else {"engine": engine, "engine_python": python}
    with pytest.raises(ConfigError) as refused:
        checked_spec(spec(engine_args=args), choice(state, **settings).check_arg())
    prose(refused)


def test_other_formats_of_the_same_weights_reach_vllm(state: State, python: Path) -> None:
    sent = spec(engine_args={"load_format": "safetensors", "quantization": None})
    settled = checked_spec(sent, choice(state, engine="vllm", engine_python=python).check_arg())
    assert settled.engine_args == {"load_format": "safetensors"}


@pytest.mark.parametrize(
    ("key", "dtype", "value", "says"),
    [
        ("dtype", "float32", "auto", None),
        ("dtype", "float32", "float32", None),
        (
            "dtype",
            "float32",
            "bfloat16",
            "'bfloat16' cannot be set: on this machine hone computes ",
        ),
        ("dtype", "bfloat16", "bfloat16", None),
        ("dtype", "bfloat16", "float16", "'float16' cannot be set: "),
        ("kv_cache_dtype", "bfloat16", "bfloat16", None),
        ("kv_cache_dtype", "bfloat16", "fp8", "'fp8' cannot be set: "),
        ("lora_dtype", "float32", "bfloat16", "'bfloat16' cannot be set: "),
    ],
)
def test_vllm_computes_in_the_dtype_of_the_learner(
    prose: Prose,
    state: State,
    python: Path,
    monkeypatch: pytest.MonkeyPatch,
    key: str,
    dtype: str,
    value: str,
    says: str | None,
) -> None:
    monkeypatch.setattr(machine, "choose", lambda device: ("cpu", getattr(torch, dtype)))
    check_arg = choice(state, engine="vllm", engine_python=python).check_arg()
    sent = spec(engine_args={key: value})
    if says is None:
        assert checked_spec(sent, check_arg).engine_args == {key: value}
        return
    with pytest.raises(ConfigError) as refused:
        checked_spec(sent, check_arg)
    prose(refused)
    assert place_of(refused) == f"engine_args.{key}"


@pytest.mark.parametrize("args", [{"quantization": "fp8"}, {"dtype": "float16"}, {"gone": 1}])
def test_stored_engine_args_are_refused_when_the_engine_starts(
    state: State, python: Path, monkeypatch: pytest.MonkeyPatch, args: dict[str, Any]
) -> None:
    vllm = choice(state, engine="vllm", engine_python=python, device="cpu")
    sent = spec(engine_args=args)
    with pytest.raises(ConfigError) as refused:
        checked_spec(sent, vllm.check_arg())
    state.models.register(sent)  # as a version did that did not check it
    with pytest.raises(ConfigError) as at_start:
        vllm.open("tiny")
    again = "Model 'default/agent' was registered with it; register that model again."
    assert str(at_start.value) == f"{refused.value}\n{again}"
    state.models.register(spec())
    opened: list[str] = []
    monkeypatch.setattr(
        "hone.inference.vllm.engine.VllmEngine.open", lambda name, **_: opened.append(name)
    )
    vllm.open("tiny")
    assert opened == ["tiny"]


async def test_a_running_vllm_serves_what_hone_trained(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "hone"
    async with SmallServer.started(root) as server:
        await server.trained(tiny_model, 0)
    standin = Standin()
    caplog.set_level("INFO")
    with served(standin) as url:
        async with SmallServer.started(root, engine_url=url) as server:
            registered(server, small_spec(tiny_model))
            async with server.serving.using("agent") as policy:
                assert policy.adapter is not None and policy.step == 1
                await complete(policy.base.engine, [1], Sampling(max_tokens=1), policy.adapter)
            ((name, path),) = standin.loaded.items()
            assert name == policy.adapter.sha256 == standin.bodies[-1]["model"]
            directory, number, copy = Path(path).relative_to(root).parts
            assert (directory, copy) == ("engines", name) and number == f"{os.getpid()}-0"
            assert (Path(path) / "adapter_model.safetensors").exists()
        assert standin.loaded == {} and not Path(path).exists()
    lines = [(one.getMessage(), getattr(one, "fields", None)) for one in caplog.records]
    says = "vLLM was not started by hone: a publish is proved by log-probabilities alone"
    assert lines.count((says, {"url": url})) == 1


def test_starting_vllm_removes_only_directories_of_killed_servers(tmp_path: Path) -> None:
    state = State(Settings(root=tmp_path, device="cpu", engine_url="http://127.0.0.1:9"))
    engines = state.settings.root / "engines"
    killed, mine, file = engines / "1-0", engines / "models", engines / "notes.txt"
    make_owned(killed)
    (killed / "adapter").mkdir()
    mine.mkdir()  # as a project of that name had
    for path in (mine / "adapter_model.safetensors", file):
        path.write_text("mine")
    link = engines / "2-0"
    link.symlink_to(mine)
    first, second = (state.serving.choice._directory() for _ in range(2))
    assert first != second and is_owned(first) and is_owned(second)
    assert {path.name for path in engines.iterdir()} == {
        *(first.name, second.name, mine.name, file.name, link.name)
    }
    assert (mine / "adapter_model.safetensors").read_text() == "mine"
    state.store.close()


async def test_a_running_vllm_that_restarted_gets_its_adapters_again(
    prose: Prose, tiny_model: Path, tmp_path: Path
) -> None:
    root, standin = tmp_path / "hone", Standin()
    async with SmallServer.started(root) as server:
        await server.trained(tiny_model, 0)

    async def ask() -> str:
        async with server.serving.using("agent") as policy:
            assert policy.adapter is not None and policy.step == 1
            await complete(policy.base.engine, [1], Sampling(max_tokens=1), policy.adapter)
            return policy.adapter.sha256

    with served(standin) as url:
        async with SmallServer.started(root, engine_url=url) as server:
            registered(server, small_spec(tiny_model))
            name = await ask()
            standin.loaded.clear()
            with pytest.raises(EngineFailed) as caught:
                await ask()
            prose(caught)
            assert await ask() == name and list(standin.loaded) == [name]


@pytest.mark.parametrize("stream", [False, True])
async def test_vllm_streams_only_to_clients_that_stream(
    tiny_model: Path, tmp_path: Path, *, stream: bool
) -> None:
    standin = Standin()
    with served(standin) as url:
        async with SmallServer.started(tmp_path / "hone", engine_url=url) as server:
            registered(server, small_spec(tiny_model))
            messages = [{"role": "user", "content": "hi"}]
            body = {"model": "agent", "messages": messages, "max_tokens": 1, "stream": stream}
            transport = httpx.ASGITransport(create_apps(server)[1])
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
                response = await http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200 and response.text.startswith("data: ") is stream
    assert '"finish_reason":"length"' in response.text
    assert standin.bodies[-1]["max_tokens"] == 1
    assert standin.bodies[-1].get("stream", False) is stream


def test_a_running_vllm_has_its_arguments_already(prose: Prose, state: State) -> None:
    check_arg = choice(state, engine_url="http://10.0.0.1:8000").check_arg()
    with pytest.raises(ConfigError) as caught:
        checked_spec(spec(engine_args={"max_num_seqs": 8}), check_arg)
    prose(caught)


def test_arts_clients_send_engine_args_and_gpu_ids(
    state: State, python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_choice, "num_gpus", lambda device: 2)
    internal = {
        "engine_args": {"gpu_memory_utilization": 0.7},
        "inference_gpu_ids": [1],
        "trainer_gpu_ids": [0],
    }
    body = {"name": "agent", "base_model": "tiny", "_internal_config": internal}
    check_arg = choice(state, engine="vllm", engine_python=python).check_arg()
    sent = model_spec(ArtModel.model_validate(body), check_arg)
    ids = {"inference_gpu_ids": [1], "trainer_gpu_ids": [0]}
    assert sent.engine_args == {"gpu_memory_utilization": 0.7, **ids}
    assert sent.not_applicable == []


def test_without_a_gpu_the_ids_are_named_as_not_applicable(state: State, python: Path) -> None:
    ids = {"inference_gpu_ids": [1], "trainer_gpu_ids": [0]}
    vllm = choice(state, engine="vllm", engine_python=python)
    settled = checked_spec(spec(engine_args=ids), vllm.check_arg())
    assert settled.engine_args == {}
    assert settled.not_applicable == [f"engine_args.{key}" for key in ids]


ONLY_ALL = (
    "target_modules: on a CPU hone trains all linear layers of this model, not only q_proj. Leave "
    "target_modules out, or set HONE_LEARNER_BODY=transformers for the server."
)
NO_LAYER = (
    "target_modules: this model has no linear layer called 'w1'. It has: down_proj, gate_proj"
)


@pytest.mark.parametrize(
    ("targets", "body", "gpus", "says"),
    [
        (["q_proj"], None, 0, ONLY_ALL),
        (["q_proj"], "transformers", 0, None),
        (["q_proj"], None, 1, None),
        (["w1"], None, 0, NO_LAYER),
        (["w1"], None, 1, NO_LAYER),
        (PROJECTIONS, None, 0, None),
    ],
)
def test_target_modules_that_the_learner_cannot_train_are_not_registered(
    tmp_path: Path,
    python: Path,
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    targets: list[Any],
    body: str | None,
    gpus: int,
    says: str | None,
) -> None:
    if body:
        monkeypatch.setenv("HONE_LEARNER_BODY", body)
    monkeypatch.setattr(engine_choice, "num_gpus", lambda device: gpus)
    state = State(Settings(root=tmp_path / "root", engine="vllm", engine_python=python))
    sent = ModelSpec(name="a", base_model=str(tiny_model), peft_args={"target_modules": targets})
    try:
        if says is None:
            registered(state, sent)
            return
        with pytest.raises(ConfigError) as refused:
            registered(state, sent)
        assert str(refused.value).startswith(says) and state.models.list() == []
    finally:
        state.store.close()


def test_more_gpus_than_there_are(prose: Prose, state: State, python: Path) -> None:
    vllm = choice(state, engine="vllm", engine_python=python)
    with pytest.raises(ConfigError) as caught:
        vllm.register(spec(engine_args={"tensor_parallel_size": 2}), in_use=False)
    prose(caught)


def test_how_many_requests_keep_an_engine_busy(state: State, python: Path) -> None:
    few = spec(engine_args={"max_num_seqs": 8})
    vllm = choice(state, engine="vllm", engine_python=python)
    assert (vllm.concurrency(few), vllm.concurrency(spec())) == (8, 256)
    assert choice(state, engine="embedded").concurrency(spec()) == 64


def test_the_model_registered_last_decides_and_all_of_them_fit(
    prose: Prose, state: State, python: Path
) -> None:
    vllm = choice(state, engine="vllm", engine_python=python, max_seq_length=4096)
    assert vllm._plan("tiny", None) == Plan({}, 8, 4096)
    first = spec(rank=32, defaults={"max_seq_length": 512}, engine_args={"max_num_seqs": 8})
    second = spec("other", rank=4, defaults={"max_seq_length": 9999}, engine_args={})
    assert vllm.register(first, in_use=False) is False
    state.models.register(first)
    assert vllm._plan("tiny", None) == Plan({"max_num_seqs": 8}, 32, 512)
    vllm._opened["tiny"] = vllm._plan("tiny", None)
    assert vllm.register(first, in_use=True) is False
    with pytest.raises(ConfigError) as caught:
        vllm.register(second, in_use=True)
    prose(caught)
    assert vllm.register(second, in_use=False) is True
    state.models.register(second)
    assert vllm._plan("tiny", None) == Plan({}, 32, 4096)


def test_the_model_registered_last_decides_after_a_restart_too(tmp_path: Path) -> None:
    """Neither the first by name nor the last."""

    def args_after_restart(change: Callable[[State], object]) -> dict[str, Any]:
        settings = Settings(root=tmp_path / "hone", device="cpu")
        with closing((state := State(settings)).store):
            change(state)
        with closing((state := State(settings)).store):
            return choice(state)._plan("tiny", None).args

    def register(*specs: ModelSpec) -> Callable[[State], object]:
        return lambda state: [state.models.register(spec) for spec in specs]

    a, b, c = (spec(name, engine_args={"max_num_seqs": i}) for i, name in enumerate("abc", 1))
    assert args_after_restart(register(c, a, b)) == b.engine_args
    # A root of a hone that did not store the order: the newest model.
    assert args_after_restart(lambda s: s.store._writer.execute("DELETE FROM registrations")) == (
        b.engine_args
    )
    again = a.model_copy(update={"engine_args": {"max_num_seqs": 4}})
    assert args_after_restart(register(again)) == again.engine_args
    renamed = ModelKey("default", "a"), ModelKey("default", "e")
    assert args_after_restart(lambda s: s.renames.rename(*renamed)) == again.engine_args
    assert args_after_restart(register(b)) == b.engine_args


@pytest.mark.parametrize("lengths", [(512, None), (None, 512)])
def test_a_model_without_a_length_keeps_the_longest(
    state: State, python: Path, lengths: tuple[int | None, int | None]
) -> None:
    vllm = choice(state, engine="vllm", engine_python=python, max_seq_length=4096)
    for name, length in zip("ab", lengths, strict=True):
        sent = spec(name, defaults={} if length is None else {"max_seq_length": length})
        vllm.register(sent, in_use=False)
        state.models.register(sent)
    assert vllm._plan("tiny", None).max_length == 4096


def test_a_refused_or_repeated_registration_does_not_reopen_vllm(
    prose: Prose, tmp_path: Path, python: Path, tiny_model: Path
) -> None:
    state = State(Settings(root=tmp_path / "root", engine="vllm", engine_python=python))
    base, choice = str(tiny_model), state.serving.choice
    agent = ModelSpec(name="agent", base_model=base, rank=8)
    other = ModelSpec(name="other", base_model=base, engine_args={"max_num_seqs": 8})
    try:
        first, _ = registered(state, agent)
        registered(state, other)
        plan = choice._opened[base] = choice._plan(base, None)
        assert plan == Plan({"max_num_seqs": 8}, 8, state.settings.max_seq_length)
        with pytest.raises(Conflict) as caught:
            registered(state, agent.model_copy(update={"rank": 64}))
        prose(caught)
        assert state.serving.engines.outdated == set() and choice._plan(base, None) == plan
        spelled = agent.model_copy(update={"base_model": f"{base}/"})  # the same model
        with state.serving.engines.using(base):
            assert registered(state, spelled) == (first, False)
        assert registered(state, agent) == (first, False)
        assert state.serving.engines.outdated == set() and choice._plan(base, None) == plan
        registered(state, agent.model_copy(update={"engine_args": {"max_num_seqs": 4}}))
        assert state.serving.engines.outdated == {base}
    finally:
        state.store.close()


def test_arguments_registered_while_vllm_starts_open_it_again(
    state: State, python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm = choice(state, engine="vllm", engine_python=python, device="cpu")
    changed = []

    def starting(*_: Any, args: dict[str, Any], **__: Any) -> None:
        changed.append(vllm.register(spec(engine_args={"max_num_seqs": 4}), in_use=False))
        assert args == {"max_num_seqs": 8}

    monkeypatch.setattr("hone.inference.vllm.engine.VllmEngine.open", starting)
    assert vllm.register(spec(engine_args={"max_num_seqs": 8}), in_use=False) is False
    vllm.open("tiny")
    assert changed == [True]


def test_max_lora_rank_holds_the_adapters_of_every_registered_model(
    prose: Prose, state: State, python: Path
) -> None:
    vllm = choice(state, engine="vllm", engine_python=python)
    with pytest.raises(ConfigError) as refused:
        vllm.register(spec(rank=24, engine_args={"max_lora_rank": 16}), in_use=False)
    prose(refused)
    assert place_of(refused) == "engine_args.max_lora_rank"
    large = spec(rank=24, engine_args={"max_lora_rank": 32})
    vllm.register(large, in_use=False)
    state.models.register(large)
    with pytest.raises(ConfigError) as caught:
        vllm.register(spec("other", rank=4, engine_args={"max_lora_rank": 8}), in_use=False)
    prose(caught)
    assert place_of(caught) == "engine_args.max_lora_rank"
    assert vllm._plan("tiny", None).args == {"max_lora_rank": 32}


def test_a_larger_rank_fits_up_to_vllms_next_limit() -> None:
    plan = Plan({}, 9, 512)
    assert plan.covers(Plan({}, 16, 512)) and not plan.covers(Plan({}, 17, 512))
    assert not plan.covers(Plan({}, 9, 513))
    assert Plan({"max_lora_rank": 64}, 9, 512).covers(Plan({"max_lora_rank": 64}, 60, 512))
