"""A vLLM server that is ready for an engine: started by hone, or found at a URL.

In:   a model by name, the user's arguments; or a URL
Out:  VllmServer: how to reach it, and what it can do

Nothing depends on vLLM's defaults: the server is started so that no generation_config.json applies
and log-probabilities are temperature-scaled. A server that the user started is checked for this.
"""

import ssl
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import httpx2

from hone.errors import ConfigError, EngineError, EngineFailed
from hone.files.logs import say, show
from hone.inference.grammar import Grammars
from hone.inference.vllm.args import RANKS, rank_limit, server_arguments
from hone.inference.vllm.client import CONNECT_S, CONTROL_S, check_logprobs
from hone.inference.vllm.process import VllmEnvironment, VllmProcess, check_version
from hone.models.files import ModelFiles, linear_names, load_tokenizer
from hone.models.find import find

LONGROPE = ("longrope", "su")
"""The kind of rotary embedding, by its name in a config.json and by an earlier one."""
BASE_NAME = "base"
"""The name of the base model in a vLLM that hone starts."""


@dataclass(frozen=True, kw_only=True)
class VllmServer:
    """A vLLM server that answers."""

    vocab: int
    max_length: int
    max_rank: int
    name: str
    """Its name for the base model."""
    process: VllmProcess | None = None
    """The process of a server that hone started; the others have a `url`."""
    url: str | None = None
    sleeps: bool = False
    """Whether it supports sleep mode, which frees its memory."""
    kv_bytes: int | None = None
    """Size of its KV cache, of all GPUs together; None if it cannot be asked."""
    grammars: Grammars
    """Checks constraints for the model's tokenizer before vLLM gets them."""


def start_server(
    name: str,
    *,
    environment: VllmEnvironment,
    args: Mapping[str, Any],
    dtype: str,
    max_length: int,
    max_adapters: int,
    rank: int,
    on_gpu: bool,
    env: Mapping[str, str] | None = None,
    less_memory: str = "",
    start: Callable[[VllmProcess], AbstractContextManager[object]] = lambda _: nullcontext(),
) -> VllmServer:
    """Start a vLLM server for a model by name. Blocking.

    `max_length` applies unless `args` has a max_model_len; the model's own limit always applies, and
    exceeding it in `args` is an error. `dtype` replaces that in `args`. `env` is added to the
    environment of its processes. `less_memory` says what to do if it runs out of memory. `start` is
    entered while the process starts, so that its owner can stop it.
    """
    files = find(name)
    sleeps = on_gpu and args.get("enable_sleep_mode") is not False
    args = {**args, "dtype": dtype}
    length = _length(name, files, args.get("max_model_len"), max_length)
    arguments = server_arguments(
        str(files.path),
        BASE_NAME,
        {**args, "max_model_len": length},
        modules=linear_names(files.weight_files),
        max_adapters=max_adapters,
        rank=rank,
        sleeps=sleeps,
    )
    process = VllmProcess(less_memory=less_memory)
    began = perf_counter()
    show("vLLM starts", base_model=name, version=environment.version, log=process.log)

    def tell(stage: str) -> None:
        show(stage, base_model=name, after_s=round(perf_counter() - began))

    try:
        with start(process):
            process.start(environment, arguments, env=env, tell=tell)
        with httpx2.Client(transport=httpx2.HTTPTransport(uds=str(process.socket))) as client:
            check_logprobs(client, "http://vllm", BASE_NAME)
            kv_bytes = _kv_bytes(client)
    except httpx2.HTTPError as error:
        process.stop()  # its log is then read to the end
        reason = str(error).partition("\n")[0]
        raise EngineFailed(f"vLLM cannot answer: {reason}. {process.log_end()}") from None
    except BaseException:
        process.stop()
        raise
    return VllmServer(
        vocab=int(files.text_config["vocab_size"]),
        max_length=length,
        max_rank=int(args.get("max_lora_rank") or rank_limit(rank)),
        name=BASE_NAME,
        process=process,
        sleeps=sleeps,
        kv_bytes=kv_bytes,
        grammars=_grammars(files),
    )


def _length(name: str, files: ModelFiles, requested: Any, default: int) -> int:
    """Maximum tokens of a sequence: `requested`, else `default` up to the model's limit."""
    limit, long_from = int(files.text_config["max_position_embeddings"]), _long_from(files)
    why = "that is its max_position_embeddings"
    if long_from is not None:
        limit = min(limit, long_from)
        why = "vLLM would use the long factors of its longrope for shorter sequences too"
    if requested is not None and int(requested) > limit:
        raise ConfigError(
            f"engine_args.max_model_len: {requested}; {name!r} is served up to {limit} tokens: {why}. "
            f"Set it to {limit} or less."
        )
    if requested is None and long_from is not None and limit < default:
        say(f"vLLM serves sequences of up to {limit} tokens: {why}", base_model=name)
    return min(int(requested or default), limit)


def _long_from(files: ModelFiles) -> int | None:
    """The length from which on a model with longrope has other rotary angles; None for others.

    transformers, and so the learner, chooses the angles by the length of each sequence; vLLM by the
    longest that it takes.
    """
    config = files.text_config
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    start = "original_max_position_embeddings"
    length = rope.get(start) or config.get(start)
    kind = rope.get("rope_type") or rope.get("type")
    return int(length) if length and kind in LONGROPE else None


def _kv_bytes(client: httpx2.Client) -> int:
    body = {"method": "hone_kv_bytes"}
    response = client.post("http://vllm/collective_rpc", json=body, timeout=CONTROL_S)
    return sum(sum(worker) for worker in response.raise_for_status().json()["results"])


def find_server(name: str, url: str, *, max_length: int) -> VllmServer:
    """A running vLLM server, for a model by name. Blocking."""
    files, url = find(name), url.rstrip("/").removesuffix("/v1")
    try:
        # As aiohttp, which sends the requests: no proxy from the environment, and OpenSSL's
        # certificates.
        tls = ssl.create_default_context()
        with httpx2.Client(timeout=CONNECT_S, trust_env=False, verify=tls) as client:
            version = client.get(f"{url}/version").raise_for_status().json()["version"]
            check_version(version, where=url)
            cards = client.get(f"{url}/v1/models").raise_for_status().json()["data"]
            card = next(card for card in cards if not card.get("parent"))
            long_from = _long_from(files)
            if long_from is not None and card["max_model_len"] > long_from:
                raise EngineError(
                    f"--engine-url {url}: it uses the long factors of longrope for every sequence, and "
                    f"the learner does not. Start vLLM with --max-model-len {long_from}."
                )
            check_logprobs(client, url, card["id"])
    except (httpx2.HTTPError, StopIteration, KeyError, ValueError) as error:
        raise EngineError(
            f"--engine-url {url}: no vLLM server with a model answers ({error!r})"
        ) from None
    say("vLLM was not started by hone: a publish is proved by log-probabilities alone", url=url)
    return VllmServer(
        vocab=int(files.text_config["vocab_size"]),
        max_length=min(card["max_model_len"], max_length),
        max_rank=RANKS[-1],
        name=card["id"],
        url=url,
        grammars=_grammars(files),
    )


def _grammars(files: ModelFiles) -> Grammars:
    return Grammars(lambda: load_tokenizer(files), int(files.text_config["vocab_size"]))
