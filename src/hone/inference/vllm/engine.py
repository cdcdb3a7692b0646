"""The vLLM engine: a vLLM server in a separate process, over its public HTTP interface.

In:   requests as token ids; adapters as PEFT directories
Out:  sampled ids and log-probabilities; the proof that an adapter is served

Every sampling parameter is sent, so that none of vLLM's defaults applies. With top-p, top-k, min-p,
penalties, logit_bias, min_tokens or a constraint, vLLM returns only the log-probability after
masking; such tokens are marked as not exact. vLLM uses the same library for constraints as hone,
maybe in another version: hone checks a constraint before it sends the request, and follows each
answer. A token was forced if hone's copy of the grammar allowed no other, and vLLM reports
probability 1.

An adapter is loaded once, under its hash, from a copy that is kept until vLLM no longer reads it.
It is never replaced in place: vLLM's prefix cache would reuse what the old weights computed. After
loading, the digests of the tensors in vLLM's own buffers are compared with those of the adapter.

Calls into vLLM's workers pause every request. So hone makes few of them, all of them short: the
workers read and hash in threads, while hone reads and hashes the adapter on its side.
"""

import asyncio
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

from hone.errors import EngineError
from hone.inference.background import in_own_thread
from hone.inference.base import BASE_SHA256, AdapterRef, Delta, EngineStats, Probe, Sampling
from hone.inference.checks import check_request, check_sequences, check_settings
from hone.inference.grammar import start_matchers
from hone.inference.vllm.adapter import StagedAdapter, combined, stage
from hone.inference.vllm.client import (
    COLDEST,
    COMPLETIONS,
    CONTROL_S,
    VllmClient,
    completion_body,
    read_delta,
)
from hone.inference.vllm.server import VllmServer, find_server, start_server

GREEDY = Sampling(max_tokens=1, temperature=0)
POLL_S = 0.01
"""Time between two checks whether the workers have read or hashed an adapter."""


class VllmEngine:
    """An Engine over one vLLM server. For one event loop."""

    def __init__(self, server: VllmServer, *, directory: Path) -> None:
        """`directory` is for copies of adapters; vLLM must see it under the same path."""
        self._server = server
        self._vocab, self._max_length, self._base = server.vocab, server.max_length, server.name
        self._grammars = server.grammars
        self._directory = directory
        self._client = VllmClient(server.process, server.url)
        self._adapters: dict[str, StagedAdapter] = {}
        self._unloaded: dict[str, StagedAdapter] = {}
        """Adapters that are not served any more, but that requests use or vLLM did not unload."""
        self._names: set[str] = set()
        """Adapters that vLLM may know: until it confirms that it unloaded them."""
        self._users: Counter[str] = Counter()
        self._last_id = 0
        """vLLM's number for the adapter that was loaded last."""
        self._changing = asyncio.Lock()
        self._awake = asyncio.Event()
        self._awake.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._asleep = False
        """Whether vLLM's memory is freed."""
        self._running = self._waiting = 0
        self._prompt_tokens = self._sampled_tokens = 0
        self._held_s = 0.0

    @classmethod
    def open(cls, name: str, *, directory: Path, **options: Any) -> "VllmEngine":
        """Start a vLLM server for a model by name, see `start_server`. Blocking."""
        return cls(start_server(name, **options), directory=directory)

    @classmethod
    def connect(cls, name: str, url: str, *, directory: Path, max_length: int) -> "VllmEngine":
        """Use a running vLLM server for a model by name. Blocking."""
        return cls(find_server(name, url, max_length=max_length), directory=directory)

    @property
    def failure(self) -> BaseException | None:
        return self._client.failure

    @property
    def max_length(self) -> int:
        return self._max_length

    @property
    def repeatable(self) -> bool:
        return False  # results depend on the rest of the batch

    # ---- sampling -----------------------------------------------------------------------------

    async def check(self, sampling: Sampling) -> None:
        check_settings(sampling, self._vocab, coldest=COLDEST)
        await start_matchers(self._grammars, sampling, 0)

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        adapter: AdapterRef | None = None,
        *,
        stream: bool = True,
    ) -> AsyncIterator[Delta]:
        name = self._name(adapter)
        check_request(prompt_ids, sampling, self._vocab, self._max_length, coldest=COLDEST)
        # Greedy samples are equal: request only one, because vLLM refuses n > 1.
        drawn = replace(sampling, n=1) if sampling.temperature == 0 else sampling
        # vLLM's mask does not include stop ids: where the text may end, it allows the end token.
        matchers = await start_matchers(self._grammars, replace(sampling, stop_ids=()), drawn.n)
        body = completion_body(name, prompt_ids, drawn, self._max_length)
        unfinished = sampling.n
        async with self._admitted(), self._using(name):
            self._prompt_tokens += len(prompt_ids)
            deltas = (self._client.streamed if stream else self._client.whole)(body)
            async with aclosing(deltas):
                async for choice in deltas:
                    alone = None
                    if matchers is not None and choice["token_ids"]:
                        matcher = matchers[choice["index"]]
                        alone = await asyncio.to_thread(matcher.follow, choice["token_ids"])
                    delta = read_delta(choice, sampling, alone)
                    if delta.finish == "abort" or self._client.closed:  # the server is ending
                        raise await self._client.ended("vLLM aborted the request")
                    for sample in range(delta.sample, sampling.n, drawn.n):
                        self._sampled_tokens += len(delta.tokens)
                        unfinished -= delta.finish is not None
                        yield Delta(sample, delta.tokens, delta.finish, delta.stop)
            if unfinished:
                raise await self._client.ended("vLLM ended its answer early")

    @asynccontextmanager
    async def _admitted(self) -> AsyncIterator[None]:
        """Wait until the engine is awake; it does not sleep while the block runs."""
        self._waiting += 1
        try:
            while not self._awake.is_set():
                await self._awake.wait()
        finally:
            self._waiting -= 1
        self._client.check_open()
        self._running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()

    @asynccontextmanager
    async def _using(self, name: str) -> AsyncIterator[None]:
        """Keep an adapter that is unloaded meanwhile until the block ends."""
        self._users[name] += 1
        try:
            yield
        finally:
            self._users[name] -= 1
            if name in self._unloaded and not self._users[name]:
                await asyncio.shield(self._forget(self._unloaded.pop(name)))

    # ---- adapters -----------------------------------------------------------------------------

    async def publish(self, adapter: AdapterRef, directory: Path) -> None:
        """Load an adapter and prove that vLLM holds its tensors; raises EngineError if not."""
        async with self._changing, self._admitted():
            if adapter.sha256 not in self._adapters:
                await self._load(await in_own_thread(self._stage, adapter, directory))

    def _stage(self, adapter: AdapterRef, directory: Path) -> StagedAdapter:
        path, most = self._directory / adapter.sha256, self._server.max_rank
        return stage(adapter, directory, path, max_rank=most)

    async def _load(self, staged: StagedAdapter) -> None:
        name = staged.ref.sha256
        old = self._unloaded.pop(name, None)
        started = perf_counter()
        try:
            dtypes = await self._send_and_read(staged)
            if self._client.url is None:
                hashing = in_own_thread(lambda: [staged.expect(dtype) for dtype in dtypes[:1]])
                held, _ = await asyncio.gather(self._digests(staged), hashing)
                wrong = staged.compare(held)
                if wrong:
                    raise EngineError(f"publish of {staged}: {wrong}. Nothing was changed.")
        except BaseException:
            await asyncio.shield(self._discard(staged))
            raise
        finally:
            if old is not None and old.id is not None:
                with suppress(EngineError):
                    await self._client.rpc("remove_lora", old.id)
        self._held_s = perf_counter() - started
        self._adapters[name] = staged

    async def _send_and_read(self, staged: StagedAdapter) -> list[str]:
        """Have vLLM load an adapter while its tensors are read here; returns vLLM's dtypes for it."""
        both = self._send(staged), in_own_thread(staged.read)
        # Both end before an error is raised, so that a load that vLLM began can be undone.
        dtypes, read = await asyncio.gather(*both, return_exceptions=True)
        if isinstance(read, BaseException):
            raise read
        if isinstance(dtypes, BaseException):
            raise dtypes
        return dtypes

    async def _send(self, staged: StagedAdapter) -> list[str]:
        """Have vLLM load an adapter and begin to hash it."""
        name, foreign = staged.ref.sha256, self._client.url is not None
        if not foreign:
            await self._when_ready("hone_read", str(staged.path))
        if foreign or name in self._names:  # an earlier hone server may have loaded it, too
            with suppress(EngineError):
                await self._drop(name)
        self._names.add(name)
        body = {"lora_name": name, "lora_path": str(staged.path)}
        await self._client.post("/v1/load_lora_adapter", body)
        if foreign:
            return []
        workers = await self._client.rpc("hone_hash")
        ids = {worker.get("id", 0) for worker in workers}
        if len(ids) != 1 or max(ids) <= self._last_id:
            raise EngineError(f"publish of {staged}: vLLM did not load it ({workers})")
        staged.id = self._last_id = ids.pop()
        return workers[0]["dtypes"]

    async def _discard(self, staged: StagedAdapter) -> None:
        """Undo a load that failed; vLLM may not know the name yet."""
        with suppress(EngineError):
            await self._drop(staged.ref.sha256)
        await self._forget(staged)

    async def _drop(self, name: str) -> None:
        """Have vLLM unload a name; raises EngineError also if vLLM does not know it."""
        await self._client.post("/v1/unload_lora_adapter", {"lora_name": name})
        self._names.discard(name)

    async def unload(self, adapter: AdapterRef) -> None:
        # Not while vLLM wakes, and every adapter that it must hold is compared.
        async with self._changing, self._admitted():
            if (name := adapter.sha256) not in self._adapters:
                return
            self._unloaded[name] = self._adapters.pop(name)
            await self._drop(name)
            if not self._users[name]:
                await self._forget(self._unloaded.pop(name))

    async def _forget(self, staged: StagedAdapter) -> None:
        """Free an unloaded adapter. Its files go last: a request may make vLLM read them again."""
        if staged.id is not None and self.failure is None and not self._client.closed:
            with suppress(EngineError):
                await self._client.rpc("remove_lora", staged.id)
        await in_own_thread(shutil.rmtree, staged.path, ignore_errors=True)

    # ---- what it serves -----------------------------------------------------------------------

    async def probe(
        self,
        sequences: Sequence[Sequence[int]],
        adapter: AdapterRef | None = None,
        *,
        with_hash: bool = True,
    ) -> Probe:
        name = self._name(adapter)
        check_sequences(sequences, self._vocab, self._max_length)
        async with self._admitted():
            staged = self._adapters.get(name) if with_hash and self._client.url is None else None
            await self._begin_hashing(staged)
            # One at a time: vLLM computes all logits of a request in one step, and other requests
            # wait for it.
            scores = [await self._score(name, ids) for ids in sequences]
            sha256 = BASE_SHA256 if adapter is None else None
            if staged is not None:  # the buffers are compared once vLLM has computed with them
                held = await self._digests(staged)
                sha256 = combined(held) if staged.compare(held) else staged.ref.sha256
            return Probe(sha256=sha256, logprobs=tuple(scores))

    async def _score(self, name: str, ids: Sequence[int]) -> tuple[float, ...]:
        """The log-probability of every token but the first, at temperature 1."""
        ids = ids[: self._max_length - 1]  # vLLM samples one token after those that it scores
        if len(ids) < 2:
            return ()
        body = completion_body(name, ids, GREEDY, self._max_length, prompt_logprobs=0)
        (choice,) = (await self._client.post(COMPLETIONS, body))["choices"]
        return tuple(
            entry[str(token)]["logprob"]
            for token, entry in zip(ids[1:], choice["prompt_logprobs"][1:], strict=True)
        )

    async def _begin_hashing(self, staged: StagedAdapter | None) -> None:
        """Have the workers hash an adapter while vLLM goes on; `_digests` waits for it."""
        if staged is not None:
            await self._client.rpc("hone_hash", staged.id)

    async def _digests(self, staged: StagedAdapter) -> list[dict[str, Any]]:
        """Per worker, the digests of the tensors it holds, once they are hashed."""
        assert staged.id is not None, staged
        held = await self._when_ready("hone_digests", staged.id)
        if not all(worker["held"] for worker in held):
            # Evicted from vLLM's cache: any request makes vLLM load it again from its files.
            body = completion_body(staged.ref.sha256, [0], GREEDY, self._max_length)
            await self._client.post(COMPLETIONS, body)
            held = await self._when_ready("hone_digests", staged.id)
        return held

    async def _when_ready(self, method: str, argument: Any) -> list[dict[str, Any]]:
        """The result of every worker, once all of their threads have finished."""
        try:
            async with asyncio.timeout(CONTROL_S):
                while True:
                    answers = await self._client.rpc(method, argument)
                    if all(answer.get("ready", True) for answer in answers):
                        return answers
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise EngineError(f"vLLM's {method} did not end within {CONTROL_S:g} s") from None

    def stats(self) -> EngineStats:
        return EngineStats(
            running=self._running,
            waiting=self._waiting,
            adapters=tuple(self._adapters),
            prompt_tokens=self._prompt_tokens,
            prefilled_tokens=self._client.prefilled_tokens,
            decoded_tokens=self._sampled_tokens,
            sampled_tokens=self._sampled_tokens,
            kv_budget_bytes=self._server.kv_bytes,
            kv_reserved_bytes=None,  # vLLM counts blocks only with its own log of statistics
            kv_cached_bytes=None,
            held_s=self._held_s,
        )

    # ---- sleep, wake, close -------------------------------------------------------------------

    async def sleep(self) -> None:
        """Finish what runs and hold new requests; on a GPU vLLM's memory is freed (level 1)."""
        self._client.check_open()
        self._awake.clear()
        await self._idle.wait()
        if self._awake.is_set() or self._asleep:  # woken in the meantime, or already put to sleep
            return
        if self._server.sleeps:
            self._asleep = True
            await self._client.post("/sleep?level=1", {})
        elif self._client.url is None:
            await self._client.post("/reset_prefix_cache", {})

    async def wake(self) -> None:
        """Resume. A vLLM that does not wake, or that lost an adapter while asleep, has failed."""
        if self._asleep and not self._client.closed:
            self._asleep = False
            try:
                await self._client.post("/wake_up", {})
                adapters = list(self._adapters.values())
                for staged in adapters:
                    await self._begin_hashing(staged)
                for staged in adapters:
                    wrong = staged.compare(await self._digests(staged))
                    if wrong:
                        self._client.fail(f"after vLLM's sleep, {staged}: {wrong}")
                        break
            except EngineError as error:
                if self.failure is None:
                    self._client.fail(f"vLLM did not wake: {error}")
        self._awake.set()

    async def close(self) -> None:
        if self._client.url is not None and self.failure is None and not self._client.closed:
            for name in list(self._names):  # their files are removed with this engine
                with suppress(EngineError):
                    await self._drop(name)
        self._client.closed = True  # before waiting requests are admitted
        self._awake.set()
        await self._client.close()
        self._grammars.close()
        await in_own_thread(shutil.rmtree, self._directory, ignore_errors=True)

    def _name(self, adapter: AdapterRef | None) -> str:
        if adapter is None:
            return self._base
        if adapter.sha256 not in self._adapters:
            self._client.check_open()  # one that was replaced holds nothing
            served = ", ".join(name[:16] for name in self._adapters) or "the base model only"
            raise EngineError(
                f"step {adapter.step} of {adapter.model!r} (hash {adapter.sha256[:16]}) is not "
                f"served. Served: {served}."
            )
        return adapter.sha256
