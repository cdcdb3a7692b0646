"""The embedded engine: continuous batching in plain torch, for CPUs, small models and tests.

In:   requests, at any time, from any event loop
Out:  Deltas, one per sample and step

One thread owns the model and takes all steps:

    admit     requests whose memory can be reserved, in the order they came
    schedule  chunks of probes and prompts to prefill + one token of every decoding branch -> one Batch
    forward   hidden states of the whole batch in one pass
    sample    the next token of every sample; deliver it; finished samples leave

Samples of one prompt that have drawn the same tokens are one branch until they differ.

A request keeps its adapter until it ends: publishing adds a new adapter and never changes the
weights of a running sample.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from time import perf_counter, sleep

import torch

from hone.errors import EngineError, EngineFailed, ModelUnsupported
from hone.inference.background import in_own_thread, run_in_background
from hone.inference.base import BASE_SHA256, AdapterRef, Delta, EngineStats, Probe, Sampling
from hone.inference.checks import check_request, check_sequences, check_settings
from hone.inference.embedded.adapter_merge import MERGE_AFTER, has_memory_for_copy
from hone.inference.embedded.requests import Request, deliver
from hone.inference.embedded.runner import ModelRunner
from hone.inference.embedded.scheduler import Scheduler
from hone.inference.embedded.scoring import Scorer
from hone.inference.grammar import Grammars, start_matchers
from hone.models.architecture import DecoderConfig
from hone.models.decoder import Decoder
from hone.models.files import load_tokenizer
from hone.models.find import find
from hone.models.fit import available_memory, require_fit
from hone.models.lora import Lora
from hone.models.machine import choose

PREFILL_TOKENS = 512
"""Prompt tokens per step while samples decode: enough to fill the cores without stalling samples."""
GATHER_S, MAX_GATHER_S = 0.003, 0.02
"""Time that an idle engine waits for more requests, so that one pass prefills all their prompts."""
PAUSE_S = 0.002
"""Pause between the layers of an adapter that is loaded while samples decode."""


class EmbeddedEngine:
    """An Engine over one Decoder in this process."""

    def __init__(
        self,
        decoder: Decoder,
        *,
        decode: Callable[[list[int]], str] | None = None,
        grammars: Grammars | None = None,
        kv_budget_bytes: int | None = None,
        max_running: int = 256,
        prefill_tokens: int = PREFILL_TOKENS,
        merge_after: int = MERGE_AFTER,
        seed: int | None = None,
    ) -> None:
        """`decode` turns ids into text; only stop strings need it. Constraints need `grammars`.

        The default budget of the KV cache, copies included, is a quarter of the free memory.
        """
        self._decoder = decoder
        self._grammars = grammars
        if kv_budget_bytes is None:
            kv_budget_bytes = available_memory(str(decoder.device)) // 4
        self._scheduler = Scheduler(
            decoder, budget=kv_budget_bytes, max_running=max_running, prefill_tokens=prefill_tokens
        )
        self._seeds = torch.Generator()
        self._seeds.manual_seed(seed) if seed is not None else self._seeds.seed()
        self._adapters: dict[str, Lora] = {}
        self._scorer = Scorer(decoder)
        self._runner = ModelRunner(decoder, decode=decode, merge_after=merge_after)
        self._unloading: list[tuple[str, Future[None]]] = []
        self._prompt_tokens = 0
        self._held_s = 0.0
        self._asleep = self._closed = False
        self._falling_asleep: list[Future[None]] = []
        self._failure: BaseException | None = None
        self._wakeup = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="hone-engine", daemon=True)
        self._thread.start()

    @classmethod
    def open(
        cls,
        name: str,
        *,
        device: str | None = None,
        dtype: torch.dtype | None = None,
        kv_budget_bytes: int | None = None,
    ) -> "EmbeddedEngine":
        """Find a model by name, check that it fits into memory, load it and start.

        The default device and dtype are those of `models.machine.choose`.
        """
        files = find(name)
        try:
            DecoderConfig.parse(files.config, where=str(files.path / "config.json"))
        except ModelUnsupported as error:
            raise ModelUnsupported(
                f"{error}\nThis limit is the embedded engine's; vLLM serves more families. Install "
                "vLLM and start the server with --engine vllm."
            ) from None

        def load() -> Decoder:
            where, chosen = choose(device)
            kind = dtype or chosen
            require_fit(files, dtype_bytes=kind.itemsize, device=where)
            decoder = Decoder.load(files.path, device=where, dtype=kind)
            return decoder.pack() if has_memory_for_copy(decoder) else decoder

        tokenizer = load_tokenizer(files)
        decoder = run_in_background(load).result()
        return cls(
            decoder,
            decode=lambda ids: str(tokenizer.decode(ids)),
            grammars=Grammars(lambda: tokenizer, decoder.config.vocab),
            kv_budget_bytes=kv_budget_bytes,
        )

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return self._decoder.dtype

    # ---- called from event loops ------------------------------------------------------------

    @property
    def failure(self) -> BaseException | None:
        return self._failure

    @property
    def max_length(self) -> int:
        return self._decoder.config.max_positions

    @property
    def repeatable(self) -> bool:
        return True

    async def check(self, sampling: Sampling) -> None:
        check_settings(sampling, self._decoder.config.vocab)
        await start_matchers(self._grammars, sampling, 0)

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        adapter: AdapterRef | None = None,
        *,
        stream: bool = True,  # every step is delivered immediately, which costs nothing
    ) -> AsyncIterator[Delta]:
        lora = None if adapter is None else self._adapter(adapter)
        has_decode, config = self._runner.decode is not None, self._decoder.config
        check_request(
            prompt_ids, sampling, config.vocab, config.max_positions, has_decode=has_decode
        )
        matchers = await start_matchers(self._grammars, sampling, sampling.n)
        seed = sampling.seed
        if seed is None:
            seed = int(torch.randint(2**62, (), generator=self._seeds))
        request = Request(
            prompt_ids,
            sampling,
            self._decoder.config,
            lora=lora,
            key=BASE_SHA256 if adapter is None else adapter.sha256,
            seed=seed,
            loop=asyncio.get_running_loop(),
            matchers=matchers,
        )
        scheduler = self._scheduler
        request.require_fit(scheduler.budget, scheduler.needed(request), scheduler.max_running)
        with self._wakeup:
            self._check_open()
            self._prompt_tokens += len(prompt_ids)
            scheduler.waiting.append(request)
            self._wakeup.notify()
        unfinished = sampling.n
        try:
            while unfinished:
                delta = await request.deltas.get()
                if isinstance(delta, BaseException):
                    unfinished = 0
                    raise delta
                unfinished -= delta.finish is not None
                yield delta
        finally:
            if unfinished:
                with self._wakeup:
                    request.aborted = True
                    self._wakeup.notify()

    async def publish(self, adapter: AdapterRef, directory: Path) -> None:
        def pause() -> None:
            if self._scheduler.running:
                sleep(PAUSE_S)

        def load() -> tuple[Lora, str]:
            config, device = self._decoder.config, self._decoder.device
            lora = Lora.load(directory, config, device=device)
            return lora.fuse(self._decoder.dtype, between=pause), lora.sha256

        lora, sha256 = await asyncio.wrap_future(run_in_background(load, low_priority=True))
        if sha256 != adapter.sha256:
            raise EngineError(
                f"publish of step {adapter.step} of {adapter.model!r}: {directory} holds an adapter "
                f"with hash {sha256[:16]}, not {adapter.sha256[:16]}. Nothing was changed."
            )
        started = perf_counter()
        with self._wakeup:
            self._check_open()
            self._adapters[adapter.sha256] = lora
        self._held_s = perf_counter() - started

    async def unload(self, adapter: AdapterRef) -> None:
        unloaded: Future[None] = Future()
        with self._wakeup:
            self._check_open()
            self._unloading.append((adapter.sha256, unloaded))
            self._wakeup.notify()
        await asyncio.wrap_future(unloaded)

    async def probe(
        self,
        sequences: Sequence[Sequence[int]],
        adapter: AdapterRef | None = None,
        *,
        with_hash: bool = True,
    ) -> Probe:
        lora = None if adapter is None else self._adapter(adapter)
        check_sequences(sequences, self._decoder.config.vocab, self.max_length)
        with self._wakeup:
            self._check_open()
            scores = self._scorer.add(sequences, lora)
            self._wakeup.notify()
        sha256 = BASE_SHA256 if lora is None else None
        if lora is not None and with_hash:  # hashed while the engine's thread computes the probe
            sha256 = await asyncio.wrap_future(
                run_in_background(lambda: lora.served_sha256, low_priority=True)
            )
        return Probe(sha256=sha256, logprobs=await asyncio.wrap_future(scores))

    def stats(self) -> EngineStats:
        with self._wakeup:
            scheduler = self._scheduler
            return EngineStats(
                running=sum(len(b.samples) for pool in scheduler.pools for b in pool.sequences),
                waiting=len(scheduler.waiting),
                adapters=tuple(self._adapters),
                prompt_tokens=self._prompt_tokens,
                prefilled_tokens=self._runner.prefilled,
                decoded_tokens=self._runner.decoded,
                sampled_tokens=self._runner.sampled,
                kv_budget_bytes=scheduler.budget,
                kv_reserved_bytes=scheduler.reserved_bytes,
                kv_cached_bytes=scheduler.prefixes.unused_bytes,
                held_s=self._held_s,
            )

    async def sleep(self) -> None:
        """Finish running requests, hold new ones, and free the KV cache."""
        asleep: Future[None] = Future()
        with self._wakeup:
            self._check_open()
            self._asleep = True
            self._falling_asleep.append(asleep)
            self._wakeup.notify()
        await asyncio.wrap_future(asleep)

    async def wake(self) -> None:
        with self._wakeup:
            self._asleep = False
            self._wakeup.notify()

    async def close(self) -> None:
        with self._wakeup:
            self._closed = True
            self._wakeup.notify()
        await in_own_thread(self._thread.join)
        if self._grammars is not None:
            self._grammars.close()

    # ---- the engine's thread ----------------------------------------------------------------

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while self._wait_for_work():
                    self._step()
        except Exception as error:  # noqa: BLE001  a dead thread must fail its requests, not hang them
            self._failure = error
        ended = self._ended()
        with self._wakeup:
            self._closed = True
            for request in (*self._scheduler.running, *self._scheduler.waiting):
                request.fail(ended)
            for future in (*self._falling_asleep, *(future for _, future in self._unloading)):
                if future.set_running_or_notify_cancel():
                    future.set_exception(ended)
            self._scorer.fail(ended)
            self._scheduler.clear()

    def _wait_for_work(self) -> bool:
        with self._wakeup:
            while not (self._closed or self._unloading or self._scorer or self._has_requests()):
                if self._falling_asleep:
                    self._scheduler.clear()
                    self._runner.merger.forget()
                while self._falling_asleep:
                    asleep = self._falling_asleep.pop()
                    if asleep.set_running_or_notify_cancel():
                        asleep.set_result(None)
                self._wakeup.wait()
            if not self._scheduler.running:
                started = perf_counter()
                while self._wakeup.wait(GATHER_S) and perf_counter() - started < MAX_GATHER_S:
                    pass
            return not self._closed

    def _has_requests(self) -> bool:
        return bool(self._scheduler.running) or self._admissible()

    def _admissible(self) -> bool:
        return bool(self._scheduler.waiting) and not self._asleep

    def _step(self) -> None:
        scheduler = self._scheduler
        with self._wakeup:
            self._unload()
            scheduler.remove_aborted()
            self._scorer.start(scheduler.reserve_probe)
            if self._admissible() and not self._scorer.has_waiting:
                scheduler.admit()
            pools, limit = scheduler.pools, scheduler.prefill_limit
            probes = self._scorer.chunks(limit)
            prompts = scheduler.chunks(limit - sum(c.stop - c.start for c in probes))
        states = self._runner.forward(probes, prompts, pools, self._scorer, scheduler.prefixes)
        with self._wakeup:
            new = scheduler.new_branches()
        decoding = [branch for pool in pools for branch in pool.sequences]
        drawn = self._runner.sample(states, decoding, new)
        with self._wakeup:
            scheduler.update(new)
            self._scorer.resolve()
            scheduler.set_probe_bytes(self._scorer.nbytes)
        # Last, so that a finished request's memory is free before its reader sees the end.
        for loop, deltas in drawn.items():
            deliver(loop, deltas)

    def _unload(self) -> None:
        """Unload adapters between two steps; the caller holds the lock."""
        while self._unloading:
            sha256, unloaded = self._unloading.pop()
            if not unloaded.set_running_or_notify_cancel():
                continue
            if (lora := self._adapters.pop(sha256, None)) is not None:
                self._runner.merger.forget(lora)
            self._scheduler.prefixes.forget(sha256)
            unloaded.set_result(None)

    def _adapter(self, adapter: AdapterRef) -> Lora:
        try:
            return self._adapters[adapter.sha256]
        except KeyError:
            raise EngineError(
                f"step {adapter.step} of {adapter.model!r} (hash {adapter.sha256[:16]}) is not "
                f"served. Served: {', '.join(k[:16] for k in self._adapters) or 'the base model only'}."
            ) from None

    def _check_open(self) -> None:
        if self._closed:
            raise self._ended()

    def _ended(self) -> EngineError:
        """The error for a request that cannot be finished."""
        if self._failure is None:
            return EngineError("the engine was closed; the request was not finished")
        return EngineFailed(
            f"the engine failed ({self._failure!r}) and the request was not finished. Send it "
            "again: the server restarts its engine."
        )
