"""hone's own engine: continuous batching in plain torch, for CPUs, small models and tests.

In:   requests, at any time, from any event loop
Out:  Deltas, one per sample and step

One thread owns the model and takes all steps:

    admit   requests whose memory can be reserved, in the order they came
    plan    chunks of probes and prompts not read yet + one token for every running branch -> one Batch
    compute hidden states of the whole batch in one pass
    draw    the next token of every sample, deliver it, let finished samples leave

Samples of one prompt that have drawn the same tokens are one row of that pass until they part.

A request keeps the adapter it was admitted with until it ends: publishing puts a new adapter
beside the old one and never changes a sample half-way.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from time import perf_counter, sleep

import torch
from torch import Tensor

from hone.errors import EngineError, EngineFailed
from hone.inference.apart import apart
from hone.inference.base import AdapterRef, Delta, EngineStats, Probe, Sampling
from hone.inference.batch import Batch, Chunk
from hone.inference.kv import Lane
from hone.inference.merging import MERGE_AFTER, Merging, roomy
from hone.inference.requests import Branch, Request, check, deliver
from hone.inference.sampler import draw
from hone.inference.scheduler import Scheduler
from hone.inference.scoring import Scoring, check_sequences
from hone.models.decoder import Decoder
from hone.models.find import find, load_tokenizer
from hone.models.fit import available_memory, require_fit
from hone.models.lora import Lora
from hone.models.machine import choose

PREFILL_TOKENS = 512
"""Prompt tokens read per step while samples run: fills the cores and does not stall the samples."""
GATHER_S, GATHER_AT_MOST_S = 0.003, 0.02
"""An idle engine waits so long for requests that come together: one pass reads their prompts."""
PAUSE_S = 0.002
"""While samples run, an adapter is prepared in small pieces, so that no single step waits for all of it."""
BASE_SHA256 = "base"
"""Stands for the hash of an adapter where there is none."""

Drawn = dict[asyncio.AbstractEventLoop, list[tuple[Request, Delta]]]


class EmbeddedEngine:
    """An Engine over one Decoder in this process."""

    def __init__(
        self,
        decoder: Decoder,
        *,
        decode: Callable[[list[int]], str] | None = None,
        kv_budget_bytes: int | None = None,
        max_running: int = 256,
        prefill_tokens: int = PREFILL_TOKENS,
        merge_after: int = MERGE_AFTER,
        seed: int | None = None,
    ) -> None:
        """`decode` turns ids into text and is needed only for stop strings.

        Without a budget the keys and values may take a quarter of the memory that is free now, all
        copies of them included.
        """
        self._decoder = decoder
        self._decode = decode
        if kv_budget_bytes is None:
            kv_budget_bytes = available_memory(str(decoder.device)) // 4
        self._schedule = Scheduler(
            decoder, budget=kv_budget_bytes, max_running=max_running, prefill_tokens=prefill_tokens
        )
        self._seeds = torch.Generator()
        self._seeds.manual_seed(seed) if seed is not None else self._seeds.seed()
        self._adapters: dict[str, Lora] = {}
        self._scoring = Scoring(decoder)
        self._merging = Merging(decoder, after=merge_after)
        self._unloading: list[tuple[str, Future[None]]] = []
        self._counts = {"prompt": 0, "prefilled": 0, "decoded": 0, "sampled": 0}
        self._held_s = 0.0
        self._asleep = self._closed = False
        self._rested: list[Future[None]] = []
        self._failure: BaseException | None = None
        self._awake = threading.Condition()
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
        """Find a model by name, refuse it if it cannot fit, load it, and start.

        By default on the device and in the number type that `models.machine.choose` names.
        """
        files = find(name)

        def load() -> Decoder:
            where, chosen = choose(device)
            kind = dtype or chosen
            require_fit(files, dtype_bytes=kind.itemsize, device=where)
            decoder = Decoder.load(files.path, device=where, dtype=kind)
            return decoder.pack() if roomy(decoder) else decoder

        tokenizer = load_tokenizer(files)
        return cls(
            apart(load).result(),
            decode=lambda ids: str(tokenizer.decode(ids)),
            kv_budget_bytes=kv_budget_bytes,
        )

    @property
    def dtype(self) -> torch.dtype:
        """The number type it computes in."""
        return self._decoder.dtype

    # ---- what callers see -------------------------------------------------------------------

    @property
    def failure(self) -> BaseException | None:
        return self._failure

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, adapter: AdapterRef | None = None
    ) -> AsyncIterator[Delta]:
        lora = None if adapter is None else self._adapter(adapter)
        check(prompt_ids, sampling, self._decoder.config, has_decode=self._decode is not None)
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
        )
        schedule = self._schedule
        request.require_fit(schedule.budget, schedule.needed(request), schedule.max_running)
        with self._awake:
            self._check_open()
            self._counts["prompt"] += len(prompt_ids)
            schedule.waiting.append(request)
            self._awake.notify()
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
                with self._awake:
                    request.aborted = True
                    self._awake.notify()

    async def publish(self, adapter: AdapterRef, directory: Path) -> None:
        def pause() -> None:
            if self._schedule.running:
                sleep(PAUSE_S)

        def load() -> tuple[Lora, str]:
            config, device = self._decoder.config, self._decoder.device
            lora = Lora.load(directory, config, device=device)
            return lora.fuse(self._decoder.dtype, between=pause), lora.sha256

        lora, found = await asyncio.wrap_future(apart(load, gives_way=True))
        if found != adapter.sha256:
            raise EngineError(
                f"publish of step {adapter.step} of {adapter.model!r}: {directory} holds an adapter "
                f"with hash {found[:16]}, not {adapter.sha256[:16]}. Nothing was changed."
            )
        started = perf_counter()
        with self._awake:
            self._check_open()
            self._adapters[adapter.sha256] = lora
        self._held_s = perf_counter() - started

    async def unload(self, adapter: AdapterRef) -> None:
        unloaded: Future[None] = Future()
        with self._awake:
            self._check_open()
            self._unloading.append((adapter.sha256, unloaded))
            self._awake.notify()
        await asyncio.wrap_future(unloaded)

    async def probe(
        self, sequences: Sequence[Sequence[int]], adapter: AdapterRef | None = None
    ) -> Probe:
        lora = None if adapter is None else self._adapter(adapter)
        check_sequences(sequences, self._decoder.config)
        with self._awake:
            self._check_open()
            scores = self._scoring.add(sequences, lora)
            self._awake.notify()
        sha256 = BASE_SHA256
        if lora is not None:  # meanwhile; probes that are asked for together are read together
            sha256 = await asyncio.wrap_future(apart(lambda: lora.served_sha256, gives_way=True))
        return Probe(sha256=sha256, logprobs=await asyncio.wrap_future(scores))

    def stats(self) -> EngineStats:
        with self._awake:
            schedule = self._schedule
            return EngineStats(
                running=sum(len(row.samples) for lane in schedule.lanes for row in lane.rows),
                waiting=len(schedule.waiting),
                adapters=tuple(self._adapters),
                prompt_tokens=self._counts["prompt"],
                prefilled_tokens=self._counts["prefilled"],
                decoded_tokens=self._counts["decoded"],
                sampled_tokens=self._counts["sampled"],
                kv_budget_bytes=schedule.budget,
                kv_reserved_bytes=schedule.reserved_bytes,
                kv_cached_bytes=schedule.prefixes.unused_bytes,
                held_s=self._held_s,
            )

    async def sleep(self) -> None:
        """Let what runs end, hold what comes, and free the key-value memory."""
        rested: Future[None] = Future()
        with self._awake:
            self._check_open()
            self._asleep = True
            self._rested.append(rested)
            self._awake.notify()
        await asyncio.wrap_future(rested)

    async def wake(self) -> None:
        with self._awake:
            self._asleep = False
            self._awake.notify()

    async def close(self) -> None:
        with self._awake:
            self._closed = True
            self._awake.notify()
        await asyncio.to_thread(self._thread.join)

    # ---- the engine's thread ----------------------------------------------------------------

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while self._wait_for_work():
                    self._step()
        except Exception as error:  # noqa: BLE001  a dead thread must fail its requests, not hang them
            self._failure = error
        ended = self._ended()
        with self._awake:
            self._closed = True
            for request in (*self._schedule.running, *self._schedule.waiting):
                request.fail(ended)
            for future in (*self._rested, *(future for _, future in self._unloading)):
                if future.set_running_or_notify_cancel():
                    future.set_exception(ended)
            self._scoring.fail(ended)
            self._schedule.clear()

    def _wait_for_work(self) -> bool:
        with self._awake:
            while not (self._closed or self._unloading or self._scoring or self._has_requests()):
                if self._rested:
                    self._schedule.clear()
                    self._merging.forget()
                while self._rested:
                    rested = self._rested.pop()
                    if rested.set_running_or_notify_cancel():
                        rested.set_result(None)
                self._awake.wait()
            if not self._schedule.running:
                started = perf_counter()
                while self._awake.wait(GATHER_S) and perf_counter() - started < GATHER_AT_MOST_S:
                    pass
            return not self._closed

    def _has_requests(self) -> bool:
        return bool(self._schedule.running) or self._admissible()

    def _admissible(self) -> bool:
        return bool(self._schedule.waiting) and not self._asleep

    def _step(self) -> None:
        schedule = self._schedule
        with self._awake:
            self._unload()
            schedule.remove_aborted()
            self._scoring.start(schedule.has_room)
            if self._admissible() and not self._scoring.waits:
                schedule.admit()
            lanes, share = schedule.lanes, schedule.share
            probed = self._scoring.chunks(share)
            chunks = schedule.chunks(share - sum(c.stop - c.start for c in probed))
        states = self._read(probed, chunks, lanes)
        with self._awake:
            fresh = schedule.fresh()
        drawn = self._draw(states, [row for lane in lanes for row in lane.rows], fresh)
        with self._awake:
            schedule.rearrange(fresh)
            self._scoring.answer()
            schedule.set_probes(self._scoring.nbytes)
        # Delivered last: whoever hears that a request ended finds its place free.
        for loop, deltas in drawn.items():
            deliver(loop, deltas)

    def _unload(self) -> None:
        """Forget adapters between two steps, under the lock that `stats` takes."""
        while self._unloading:
            sha256, unloaded = self._unloading.pop()
            if not unloaded.set_running_or_notify_cancel():
                continue
            if (lora := self._adapters.pop(sha256, None)) is not None:
                self._merging.forget(lora)
            self._schedule.prefixes.forget(sha256)
            unloaded.set_result(None)

    def _read(
        self, probed: list[Chunk], prompts: list[Chunk], lanes: list[Lane[Branch]]
    ) -> Tensor | None:
        """One pass over the step's tokens; the states of the running branches, [rows, hidden]."""
        chunks = probed + prompts
        decodes = [(lane, [row.last_id for row in lane.rows], lane.rows[0].lora) for lane in lanes]
        batch = Batch(self._decoder.config, chunks, decodes, self._decoder.device)
        if not len(batch):
            return None
        decoder, adapters = self._merging.decoder(len(batch), batch.spans)
        wanted, sizes = batch.wanted(whole=len(probed))
        hidden = decoder.hidden(batch.token_ids, batch.positions, batch.attend, adapters, wanted)
        for chunk in chunks:
            chunk.block.filled = chunk.stop
        *states, running = hidden.split(sizes)
        self._scoring.take(list(zip(probed, states, strict=False)))
        for chunk, read in zip(prompts, states[len(probed) :], strict=True):
            self._counts["prefilled"] += chunk.stop - chunk.start
            if chunk.block.complete:
                chunk.block.last_hidden = read[-1].clone()
                self._schedule.prefixes.index(chunk.block)
        return running

    def _draw(self, states: Tensor | None, running: list[Branch], fresh: list[Branch]) -> Drawn:
        """The next token of every sample that has a state to draw from, by who waits for it."""
        for branch in running:
            branch.own += 1
        drawn: Drawn = {}
        rows = running + fresh
        if not rows:
            return drawn
        firsts = [b.block.last_hidden for b in fresh if b.block.last_hidden is not None]
        parts = ([states] if states is not None else []) + ([torch.stack(firsts)] if firsts else [])
        logits = self._decoder.logits(torch.cat(parts))
        samples = [sample for branch in rows for sample in branch.samples]
        places = [place for place, branch in enumerate(rows) for _ in branch.samples]
        tokens = draw(logits, places, [sample.drawing for sample in samples])
        for sample, token in zip(samples, tokens, strict=True):
            delta = sample.take(token, self._decode)
            drawn.setdefault(sample.request.loop, []).append((sample.request, delta))
        self._counts["decoded"] += len(running)
        self._counts["sampled"] += len(samples)
        return drawn

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
        """Why a request cannot be finished."""
        if self._failure is None:
            return EngineError("the engine was closed; the request was not finished")
        return EngineFailed(
            f"the engine failed ({self._failure!r}) and the request was not finished. Send it "
            "again: a server starts its engine anew."
        )
