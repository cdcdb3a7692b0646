"""The digests of an adapter against what vLLM's workers hold; small classes stand in for vLLM's."""

import json
import re
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.inference.embedded.test_engine import write_adapter
from tests.prose import Prose

from hone.errors import ConfigError, EngineError
from hone.inference.base import AdapterRef
from hone.inference.vllm import extension as vllm_worker
from hone.inference.vllm.adapter import StagedAdapter, combined, stage
from hone.inference.vllm.extension import HoneWorker
from hone.models.decoder import Decoder

PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
RANK, MAX_RANK, SLOTS, ID = 4, 8, 3, 5


class Layer:
    """A layer with LoRA buffers [slots, 1, ...], as vLLM 0.20 to 0.32 has them."""

    def __init__(self, shapes: list[tuple[int, int]], tp_rank: int, tp_size: int) -> None:
        self.tp_size, self.tp_rank = tp_size, tp_rank
        self.lora_a_stacked = tuple(
            torch.zeros(SLOTS, 1, MAX_RANK, inputs, dtype=torch.bfloat16) for _, inputs in shapes
        )
        self.lora_b_stacked = tuple(
            torch.zeros(SLOTS, 1, outputs // tp_size, MAX_RANK, dtype=torch.bfloat16)
            for outputs, _ in shapes
        )

    def slice_lora_a(self, a: Any) -> Any:
        return a

    def slice_lora_b(self, b: Any) -> Any:
        if isinstance(b, list):
            return [None if one is None else self.slice_lora_b(one) for one in b]
        return b.chunk(self.tp_size)[self.tp_rank]

    def set(self, slot: int, a: Any, b: Any) -> None:
        parts = zip(a, b, strict=True) if isinstance(a, list) else [(a, b)]
        for i, (one, two) in enumerate(parts):
            if one is not None:
                two = self.slice_lora_b(two)
                self.lora_a_stacked[i][slot, 0, : one.shape[0], : one.shape[1]] = one
                self.lora_b_stacked[i][slot, 0, : two.shape[0], : two.shape[1]] = two


def worker(adapter: Path, *, drop: str = "", tp: tuple[int, int] = (0, 1)) -> Any:
    """A worker that has loaded an adapter: cast, B scaled in place, parts packed, copied to a slot."""
    settings = json.loads((adapter / "adapter_config.json").read_text())
    scale = settings["lora_alpha"] / settings["r"]
    tensors = {
        name: tensor.to(torch.bfloat16)
        for name, tensor in load_file(adapter / "adapter_model.safetensors").items()
        if not drop or drop not in name
    }
    for name in tensors:
        if "lora_B" in name:
            tensors[name] *= scale
    stems = sorted({re.sub(r"\.lora_[AB]\.weight$", "", name) for name in tensors})
    factors = {
        stem.removeprefix("base_model.model."): (
            tensors[f"{stem}.lora_A.weight"],
            tensors[f"{stem}.lora_B.weight"],
        )
        for stem in stems
    }
    loras: dict[str, Any] = {}
    layers: dict[str, Layer] = {"lm_head": Layer([(32, 64)], *tp)}
    packed: dict[str, list[str]] = {}
    for module in list(factors):
        parent, _, last = module.rpartition(".")
        whole = next((name for name, parts in PACKED.items() if last in parts), None)
        names = [f"{parent}.{part}" for part in PACKED[whole]] if whole else [module]
        name = f"{parent}.{whole}" if whole else module
        if name in layers:
            continue
        pairs = [factors.get(part, (None, None)) for part in names]
        given = next(pair for pair in pairs if pair[0] is not None)
        shapes = [
            ((b if b is not None else given[1]).shape[0], given[0].shape[1]) for _, b in pairs
        ]
        a, b = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        layers[name] = layer = Layer(shapes, *tp)
        loras[name] = SimpleNamespace(
            module_name=names[0], lora_a=a if whole else a[0], lora_b=b if whole else b[0]
        )
        if whole:
            packed[name] = names
        layer.set(1, loras[name].lora_a, loras[name].lora_b)
    lora = SimpleNamespace(loras=loras)
    manager = SimpleNamespace(
        list_adapters=lambda: {ID: lora},
        activate_adapter=lambda _: True,
        lora_index_to_id=[None, ID, None],
        modules=layers,
        packed_modules=packed,
        _get_lora_layer_weights=lambda lora, name: lora.loras.get(name),
    )
    extension = HoneWorker()
    extension.model_runner = SimpleNamespace(
        lora_manager=SimpleNamespace(_adapter_manager=manager, list_adapters=lambda: {ID})
    )

    def digests(adapter: int) -> dict[str, Any]:
        extension.hone_hash(adapter)
        while not (held := extension.hone_digests(adapter)).get("ready", True):
            time.sleep(0.001)
        return held

    return SimpleNamespace(digests=digests, manager=manager, lora=lora, extension=extension)


@pytest.fixture
def adapter(tiny_llama_dir: Path, tmp_path: Path) -> tuple[AdapterRef, Path]:
    ref = write_adapter(tmp_path / "adapter", Decoder.load(tiny_llama_dir), step=1)
    file = tmp_path / "adapter" / "adapter_config.json"
    # A scale of 0.75 * 1.1: no power of two, so that B is rounded again.
    file.write_text(json.dumps(json.loads(file.read_text()) | {"lora_alpha": 3.3}))
    return ref, tmp_path / "adapter"


@pytest.fixture
def staged(adapter: tuple[AdapterRef, Path], tmp_path: Path) -> StagedAdapter:
    staged = stage(*adapter, tmp_path / "staged", max_rank=MAX_RANK)
    staged.read()
    return staged


@pytest.mark.parametrize("tp", [[(0, 1)], [(0, 2), (1, 2)]])
def test_workers_that_hold_the_adapter(
    staged: StagedAdapter, adapter: tuple[AdapterRef, Path], tp: list[tuple[int, int]]
) -> None:
    held = [worker(adapter[1], tp=one).digests(ID) for one in tp]
    assert len(held[0]["tensors"]) == 2 * 7 * 2 and held[0]["dtypes"] == ["bfloat16"]
    assert staged.compare(held) is None
    assert staged.compare(held) is None  # the tensors are gone by now, their digests are not
    assert not staged.tensors and combined(held).startswith("vllm-")


def test_one_tensor_that_differs(staged: StagedAdapter, adapter: tuple[AdapterRef, Path]) -> None:
    one = worker(adapter[1])
    name = "model.layers.1.mlp.gate_up_proj"
    weights, layer = one.lora.loras[name], one.manager.modules[name]
    weights.lora_b[1] = torch.zeros_like(weights.lora_b[1])
    layer.lora_b_stacked[1][1] = 0
    assert staged.compare([one.digests(ID)]) == (
        "vLLM holds other weights for layers.1.mlp.up_proj.B"
    )


@pytest.mark.parametrize("slot", [(1, 0, 0, 0), (1, 0, MAX_RANK - 1, 0)])
def test_a_buffer_that_differs_from_the_adapter(
    staged: StagedAdapter, adapter: tuple[AdapterRef, Path], slot: tuple[int, ...]
) -> None:
    one = worker(adapter[1])
    one.manager.modules["model.layers.0.mlp.down_proj"].lora_a_stacked[0][slot] += 1
    wrong = "vLLM computes with other weights in model.layers.0.mlp.down_proj"
    assert staged.compare([worker(adapter[1]).digests(ID), one.digests(ID)]) == wrong


def test_a_layer_without_an_adapter_that_computes_with_one(
    staged: StagedAdapter, adapter: tuple[AdapterRef, Path]
) -> None:
    one = worker(adapter[1])
    one.manager.modules["lm_head"].lora_b_stacked[0][1, 0, 0, 0] = 1
    assert staged.compare([one.digests(ID)]) == "vLLM computes with other weights in lm_head"


@pytest.mark.parametrize("module", ["down_proj", "k_proj"])
def test_a_module_that_was_left_out(
    staged: StagedAdapter, adapter: tuple[AdapterRef, Path], module: str
) -> None:
    wrong = staged.compare([worker(adapter[1], drop=module).digests(ID)])
    assert wrong is not None and wrong.startswith("vLLM does not hold layers.0.")
    assert f"{module}.A" in wrong and wrong.endswith("and 1 more")


def test_a_module_that_vllm_ignores(
    staged: StagedAdapter, adapter: tuple[AdapterRef, Path]
) -> None:
    one = worker(adapter[1])
    del one.manager.modules["model.layers.1.self_attn.o_proj"]
    assert staged.compare([one.digests(ID)]) == "vLLM ignores model.layers.1.self_attn.o_proj"


def test_an_adapter_that_vllm_does_not_hold(
    staged: StagedAdapter, adapter: tuple[AdapterRef, Path]
) -> None:
    one = worker(adapter[1])
    assert one.digests(ID + 1) == {"held": False}
    gone = "vLLM does not hold the adapter (it was evicted)"
    assert staged.compare([one.digests(ID + 1)]) == gone
    one.manager.modules["model.layers.0.mlp.down_proj"] = None  # an error must not leave the worker
    assert "'NoneType' object has no attribute" in (staged.compare([one.digests(ID)]) or "")


def test_the_worker_hashes_while_the_engine_goes_on(
    staged: StagedAdapter, adapter: tuple[AdapterRef, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, hash_now, digest = worker(adapter[1]), threading.Event(), vllm_worker.digest

    def late(tensor: Any) -> str:
        hash_now.wait()
        return digest(tensor)

    monkeypatch.setattr(vllm_worker, "digest", late)
    # Neither call waits; the newest adapter needs no id.
    assert one.extension.hone_hash() == {"held": True, "id": ID, "dtypes": ["bfloat16"]}
    assert one.extension.hone_digests(ID) == {"held": True, "ready": False}
    hash_now.set()
    assert staged.compare([one.digests(ID)]) is None


def test_weights_that_were_loaded_anew_are_hashed_anew(
    staged: StagedAdapter, adapter: tuple[AdapterRef, Path]
) -> None:
    one = worker(adapter[1])
    assert staged.compare([one.digests(ID)]) is None
    other = worker(adapter[1], drop="down_proj")
    one.manager.list_adapters = lambda: {ID: other.lora}  # in place, under the same id
    while not (held := one.extension.hone_digests(ID)).get("ready", True):
        time.sleep(0.001)
    assert len(held["tensors"]) == 2 * 6 * 2
    assert not [name for name in held["tensors"] if "down_proj" in name]
    assert staged.compare([held]) is not None


def test_all_buffers_are_compared_with_one_synchronisation(
    staged: StagedAdapter, adapter: tuple[AdapterRef, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`tolist`, `item` and `bool` are where the CPU waits for a GPU."""
    one, waits = worker(adapter[1]), []
    for name in ("tolist", "item", "__bool__", "__int__", "cpu"):
        method = getattr(torch.Tensor, name)

        def counted(
            tensor: torch.Tensor, *args: Any, name: str = name, method: Any = method
        ) -> Any:
            if threading.current_thread() is threading.main_thread():
                waits.append(name)
            return method(tensor, *args)

        monkeypatch.setattr(torch.Tensor, name, counted)
    held = one.digests(ID)
    monkeypatch.undo()
    assert waits == ["tolist"] and staged.compare([held]) is None


class Loader:
    """vLLM's manager of adapters, as far as it reads them."""

    device = torch.device("cpu")

    def __init__(self, slots: Any = None) -> None:
        self._adapter_manager = slots or SimpleNamespace(_last_slot_layout=None)
        self.read: list[tuple[str, str]] = []
        """The directories that were read, and the threads that read them."""

    def _load_adapter(self, request: Any) -> Any:
        self.read.append((request.lora_path, threading.current_thread().name))
        if "bad" in request.lora_path:
            raise ValueError("no adapter")
        return SimpleNamespace(id=request.lora_int_id, of=request.lora_path)


def asked(path: str, number: int) -> Any:
    return SimpleNamespace(lora_path=path, lora_int_id=number, lora_name="a")


def test_an_adapter_is_read_in_a_thread_before_vllm_asks_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    request = SimpleNamespace(LoRARequest=lambda **fields: SimpleNamespace(**fields))
    monkeypatch.setitem(sys.modules, "vllm.lora.request", request)  # pyright: ignore[reportArgumentType]
    extension, manager = HoneWorker(), Loader()
    extension.model_runner = SimpleNamespace(lora_manager=manager)

    def read(path: str) -> None:
        while not extension.hone_read(path)["ready"]:
            time.sleep(0.001)

    read("/one")
    # Another is read as ever; the one that was read is taken once, with the id that vLLM gives it.
    assert manager._load_adapter(asked("/two", 6)).of == "/two"
    lora = manager._load_adapter(asked("/one", 7))
    assert (lora.of, lora.id) == ("/one", 7)
    assert manager._load_adapter(asked("/one", 8)).id == 8
    paths, threads = zip(*manager.read, strict=True)
    assert paths == ("/one", "/two", "/one")
    assert [name.startswith("hone-") for name in threads] == [True, False, False]
    # An error is vLLM's to report; and what was taken is read anew.
    read("/bad")
    with pytest.raises(ValueError, match="no adapter"):
        manager._load_adapter(asked("/bad", 9))
    for number in (10, 11):
        manager.read.clear()
        read("/one")
        assert manager._load_adapter(asked("/one", number)).id == number
        assert [name.startswith("hone-") for _, name in manager.read] == [True]
    assert "_load_adapter" not in vars(manager)
    extension.model_runner = None
    assert extension.hone_read("/one")["ready"]  # an error must not leave the worker


class Slots:
    """The slots of vLLM 0.20.2: an adapter without one gets that of the adapter used least recently."""

    def __init__(self) -> None:
        self.lora_index_to_id: list[int | None] = [None] * SLOTS
        self.used: list[int] = []
        self._last_mapping: tuple[int, ...] | None = None
        self.slots: list[int] = []
        """The slots with which the tokens of a batch are computed."""

    def activate_adapter(self, number: int) -> bool:
        is_new = number not in self.used
        if is_new:
            gone = self.used.pop(0) if len(self.used) == SLOTS else None
            self.lora_index_to_id[self.lora_index_to_id.index(gone)] = number
        else:
            self.used.remove(number)
        self.used.append(number)
        return is_new

    def set_adapter_mapping(self, mapping: tuple[int, ...]) -> None:
        if self._last_mapping != mapping:
            self.slots = [self.lora_index_to_id.index(number) for number in mapping]
            self._last_mapping = mapping


def test_a_load_while_all_slots_are_used_leaves_running_requests_their_adapters() -> None:
    extension, slots = HoneWorker(), Slots()
    extension.model_runner = SimpleNamespace(lora_manager=Loader(slots))

    def decode() -> list[int | None]:
        """One step of three running requests; the adapters with which it is computed."""
        for number in (1, 2, 3):
            slots.activate_adapter(number)
        slots.set_adapter_mapping((1, 2, 3))
        return [slots.lora_index_to_id[slot] for slot in slots.slots]

    assert decode() == [1, 2, 3]
    for number in (4, 5):
        extension.hone_read("/new")
        slots.activate_adapter(number)  # vLLM loads it
        assert decode() == [1, 2, 3]


def test_an_adapter_that_is_not_staged(
    prose: Prose, adapter: tuple[AdapterRef, Path], tmp_path: Path
) -> None:
    ref, directory = adapter
    with pytest.raises(EngineError) as caught:
        stage(ref, directory, tmp_path / "staged", max_rank=2)
    prose(caught)
    other = AdapterRef("m", 1, "0" * 64)
    with pytest.raises(EngineError) as caught:
        stage(other, directory, tmp_path / "other", max_rank=MAX_RANK).read()
    prose(caught, sha256=ref.sha256[:16])
    file = directory / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"use_rslora": True}))
    with pytest.raises(ConfigError) as caught:
        stage(ref, directory, tmp_path / "staged", max_rank=MAX_RANK)
    prose(caught)
    assert not (tmp_path / "staged").exists()
