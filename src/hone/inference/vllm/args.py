"""Arguments of a vLLM server: those of the user, checked, and those that hone decides.

In:   engine_args of a model, the arguments that this vLLM knows, what hone needs
Out:  the command line of `vllm serve`, or an error that names the key

Arguments of vLLM's engine are passed through. hone refuses those that it sets itself, with the
reason, and those that load code or name files: clients send engine_args, and a client must not be
able to run its own code in the server, nor to reach files outside the server's root.
"""

import json
from collections.abc import Collection, Mapping
from typing import Any

from hone.errors import ConfigError, did_you_mean

INFERENCE_IDS, TRAINER_IDS = "inference_gpu_ids", "trainer_gpu_ids"
"""GPU ids of vLLM and of the learner. ART's keys, not vLLM's."""
GPU_IDS = (INFERENCE_IDS, TRAINER_IDS)
MIN_LORAS = 3
"""Adapters in one batch: with fewer, requests of the new step wait for those of the old one."""
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM accepts as max_lora_rank."""
MAX_CPU_LORAS = 1024
"""Adapters that vLLM may keep in host memory. The server unloads those it does not need; vLLM must not
drop one of the others, or it would read the files again while requests wait."""
MAX_LOGPROBS = 20
"""Alternatives per token that the OpenAI API may request."""
UNLIMITED = -1
"""vLLM's max_logprobs for any number of them."""

TENSOR_PARALLEL = "tensor_parallel_size"
"""Number of vLLM's GPUs."""
SIZES = (TENSOR_PARALLEL, "pipeline_parallel_size")
DTYPES = ("dtype", "kv_cache_dtype", "lora_dtype")
"""Arguments that must be hone's dtype, or `auto`, for which hone's dtype is used."""
_READERS = ("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "runai_streamer")
"""vLLM's load formats that read the base model's own files and change nothing."""
SAME_MODEL: dict[str, tuple[Any, ...]] = {
    "quantization": (),
    "quantization_config": (),
    "load_format": _READERS,
    "hf_overrides": (),
}
"""Arguments with which vLLM would serve another model than the learner trains, and the values with
which it does not."""
_COUNTS = (*SIZES, "max_model_len", "max_loras", "max_cpu_loras", "kv_cache_memory_bytes")
_CODE = "it can load code, which a client of the server must not; leave it out"
_SAMPLING = "it would change the log-probabilities that jobs are trained with; leave it out"
_PUBLISH = "hone loads the adapters; leave it out"
_MODEL = "the base model of the registered model is served; leave it out"
_TOKENS = "hone sends and receives token ids; leave it out"
_OUTSIDE = "it reaches beyond the server's root, which a client must not; leave it out"
_ONE = "hone runs one vLLM server per base model; leave it out"

OWNED: dict[str, str] = {
    "model": _MODEL,
    "model_weights": _MODEL,
    "served_model_name": _MODEL,
    "tokenizer": _MODEL,
    "hf_config_path": _MODEL,
    "revision": _MODEL,
    "tokenizer_revision": _MODEL,
    "runner": _TOKENS,
    "convert": _TOKENS,
    "skip_tokenizer_init": _TOKENS,
    "tokens_only": _TOKENS,
    "generation_config": _SAMPLING,
    "override_generation_config": _SAMPLING,
    "logprobs_mode": _SAMPLING,
    "diffusion_config": _SAMPLING,
    "watermark_config": _SAMPLING,
    "enable_lora": _PUBLISH,
    "default_mm_loras": _PUBLISH,
    "lora_target_modules": "adapters are on every linear layer of the model; leave it out",
    "data_parallel_size": _ONE,
    "data_parallel_size_local": _ONE,
    "data_parallel_rank": _ONE,
    "data_parallel_start_rank": _ONE,
    "data_parallel_address": _ONE,
    "data_parallel_rpc_port": _ONE,
    "data_parallel_backend": _ONE,
    "data_parallel_external_lb": _ONE,
    "data_parallel_hybrid_lb": _ONE,
    "data_parallel_multi_port_external_lb": _ONE,
    "nnodes": _ONE,
    "node_rank": _ONE,
    "master_addr": _ONE,
    "master_port": _ONE,
    "device_ids": f"use {INFERENCE_IDS}",
    "prefill_context_parallel_size": (
        f"it needs GPUs that hone does not plan for; use {TENSOR_PARALLEL}"
    ),
    "pipeline_parallel_size": (
        "each stage of vLLM would hold a part of an adapter's layers, and no step could be published; "
        f"use {TENSOR_PARALLEL}"
    ),
    "worker_extension_cls": "hone's own one proves what is served; leave it out",
    "worker_cls": _CODE,
    "scheduler_cls": _CODE,
    "logits_processors": _CODE,
    "io_processor_plugin": _CODE,
    "reasoning_parser_plugin": _CODE,
    "model_class_overrides": _CODE,
    "trust_remote_code": _CODE,
    "code_revision": _CODE,
    "log_config_file": _CODE,
    "logging_config": _CODE,
    "kv_transfer_config": _CODE,
    "ec_transfer_config": _CODE,
    "additional_config": _CODE,
    "distributed_executor_backend": _CODE,
    "structured_outputs_config": _CODE,
    "weight_transfer_config": _CODE,
    "speculative_config": _CODE,
    "spec_method": _CODE,
    "spec_model": _CODE,
    "ec_manager_config": _CODE,
    "download_dir": _OUTSIDE,
    "allowed_local_media_path": _OUTSIDE,
    "mm_encoder_fp8_scale_path": _OUTSIDE,
    "mm_encoder_fp8_scale_save_path": _OUTSIDE,
    "profiler_config": _OUTSIDE,
    "otlp_traces_endpoint": _OUTSIDE,
    "kv_events_config": _OUTSIDE,
    "hf_token": _OUTSIDE,
}
"""Arguments that are refused, with the reason."""
COMPILATION: dict[str, str] = {
    "backend": _CODE,
    "inductor_passes": _CODE,
    "inductor_compile_config": _CODE,  # it names the compiler that is run
    "cache_dir": _OUTSIDE,  # compiled code is also loaded from there
    "debug_dump_path": _OUTSIDE,
}
"""Keys of compilation_config that are refused, with the reason."""
_SAME: dict[str, Any] = {
    "enable_lora": True,
    "generation_config": "vllm",
    "logprobs_mode": "processed_logprobs",
    "data_parallel_size": 1,
    "nnodes": 1,
    "node_rank": 0,
    "pipeline_parallel_size": 1,
    "prefill_context_parallel_size": 1,
}
"""Values of refused arguments that equal what hone sets anyway; false for all others. Null is accepted,
too."""


def check_arg(where: str, key: str, value: Any, known: Collection[str]) -> None:
    """Refuse an argument that vLLM does not know, or that hone decides; `where` names the key."""
    if key in GPU_IDS:
        is_list = isinstance(value, list) and value and all(type(gpu) is int for gpu in value)
        if not is_list or any(gpu < 0 for gpu in value):
            raise ConfigError(f"{where}: {value!r} is not a list of GPU ids, such as [0, 1]")
        repeated = [gpu for i, gpu in enumerate(value) if gpu in value[:i]]
        if repeated:
            raise ConfigError(
                f"{where}: {value!r} names GPU {repeated[0]} more than once; name each GPU once"
            )
        return
    if key in OWNED and value not in (None, _SAME.get(key, False)):
        raise ConfigError(f"{where}: {value!r} cannot be set: {OWNED[key]}")
    if key not in known and key not in OWNED:
        raise ConfigError(f"{where}: this vLLM has no such argument.{did_you_mean(key, known)}")
    if isinstance(value, list) and any(str(item).startswith("-") for item in value):
        raise ConfigError(f"{where}: {value!r} has an item that begins with '-'")
    if value is not None:
        _check_value(where, key, value)


def _check_value(where: str, key: str, value: Any) -> None:
    """Refuse values of the arguments that hone computes with."""
    if key in _COUNTS and (type(value) is not int or value < 1):
        raise ConfigError(f"{where}: {value!r}; expected a whole number above 0")
    if key == "gpu_memory_utilization" and (type(value) not in (int, float) or not 0 < value <= 1):
        raise ConfigError(f"{where}: {value!r}; expected a number above 0 and up to 1")
    if key == "max_loras" and value < MIN_LORAS:
        raise ConfigError(
            f"{where}: {value!r}; hone needs {MIN_LORAS} or more, else requests of a new step wait "
            "for those of the old one"
        )
    if (
        key == "max_logprobs"
        and value != UNLIMITED
        and (type(value) is not int or value < MAX_LOGPROBS)
    ):
        raise ConfigError(
            f"{where}: {value!r}; hone needs {MAX_LOGPROBS} or more, which a client may ask for"
        )
    if key == "max_lora_rank" and value not in RANKS:
        raise ConfigError(f"{where}: {value!r}; vLLM accepts {', '.join(map(str, RANKS))}")
    if key == "compilation_config":
        _check_compilation(where, value)


def _check_compilation(where: str, value: Any) -> None:
    if not isinstance(value, dict):  # vLLM would also read text, in which hone sees no keys
        raise ConfigError(f"{where}: {value!r}; expected an object, such as {{'mode': 0}}")
    for key in value:
        if key in COMPILATION:
            raise ConfigError(f"{where}.{key}: {value[key]!r} cannot be set: {COMPILATION[key]}")


def check_dtype(where: str, value: Any, dtype: str) -> None:
    """Refuse another dtype than the one that hone chose for engine and learner."""
    if value not in ("auto", dtype):
        raise ConfigError(
            f"{where}: {value!r} cannot be set: on this machine hone computes in {dtype}. In another "
            "dtype, the engine's log-probabilities would not be those of the model that the learner "
            f"trains; leave it out or send {dtype!r}"
        )


def rank_limit(rank: int) -> int:
    """The smallest max_lora_rank for adapters of this rank."""
    return next((limit for limit in RANKS if limit >= rank), RANKS[-1])


def server_arguments(
    model: str,
    name: str,
    args: Mapping[str, Any],
    *,
    modules: Collection[str],
    max_adapters: int,
    rank: int,
    sleeps: bool,
) -> list[str]:
    """The arguments of `vllm serve`: those of the user, overridden by what hone needs.

    `modules` are the linear layers that adapters may have. Without them vLLM prepares the head too,
    and then scores a prompt wrongly (CPU) or dies at one longer than max_num_seqs (CUDA, 0.20).
    """
    loras = max(MIN_LORAS, int(args.get("max_loras") or MIN_LORAS))
    merged: dict[str, Any] = {
        "max_logprobs": MAX_LOGPROBS,
        "max_lora_rank": rank_limit(rank),
        "disable_log_stats": True,
        **({"enable_sleep_mode": True} if sleeps else {}),
        **{key: value for key, value in args.items() if key not in OWNED and key not in GPU_IDS},
        "max_loras": loras,
        "max_cpu_loras": max(loras, max_adapters + 2, args.get("max_cpu_loras") or MAX_CPU_LORAS),
        "served_model_name": name,
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        # llguidance, as in the embedded engine: a constraint means the same in both.
        "structured_outputs_config": {"backend": "guidance"},
        "enable_lora": True,
        "lora_target_modules": sorted(modules) or None,
        "disable_uvicorn_access_log": True,
        "enable_prompt_tokens_details": True,
        "api_server_count": 1,
    }
    line = [model]
    for key, value in merged.items():
        line += _option(key, value)
    return line


def _option(key: str, value: Any) -> list[str]:
    flag = "--" + key.replace("_", "-")
    if value is None:
        return []
    if isinstance(value, bool):
        return [flag if value else flag.replace("--", "--no-", 1)]
    if isinstance(value, list):
        return [flag, *(v if isinstance(v, str) else json.dumps(v) for v in value)]
    # As one argument, so that a value that begins with a dash is not read as an option.
    return [f"{flag}={value if isinstance(value, str) else json.dumps(value)}"]
