"""Requests to the embedded engine and the samples they ask for.

In:   prompt ids and Sampling
Out:  Request (one prompt, n samples), SampledSequence (one answer as it grows), Branch (samples of
      one prompt whose tokens are equal so far)

A request that can never fit is refused before it is queued: it would block all later ones.
"""

import asyncio
from collections.abc import Callable, Sequence

from hone.errors import GrammarError, HoneError, RequestTooLarge
from hone.inference.base import Delta, FinishReason, SampledToken, Sampling
from hone.inference.embedded.blocks import Block
from hone.inference.embedded.sampler import SampleState, random_stream
from hone.inference.embedded.slots import slot_capacity
from hone.inference.grammar import Matcher
from hone.models.architecture import DecoderConfig
from hone.models.lora import Lora


class Request:
    """One call of generate()."""

    def __init__(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        config: DecoderConfig,
        *,
        lora: Lora | None,
        key: str,
        seed: int,
        loop: asyncio.AbstractEventLoop,
        matchers: Sequence[Matcher] | None = None,
    ) -> None:
        """`matchers`: one for every sample, for a request with a constraint."""
        self.prompt_ids = tuple(prompt_ids)
        self.sampling = sampling
        self.lora = lora
        self.key = key
        self.loop = loop
        self.max_tokens = min(sampling.max_tokens, config.max_positions - len(prompt_ids))
        self.deltas: asyncio.Queue[Delta | BaseException] = asyncio.Queue()
        self.samples = [
            SampledSequence(self, i, seed, matchers[i] if matchers else None)
            for i in range(sampling.n)
        ]
        self.reserved = 0
        self.aborted = False
        self._block: Block | None = None

    @property
    def block(self) -> Block:
        assert self._block is not None, "the request was not admitted yet"
        return self._block

    @property
    def done(self) -> bool:
        return all(sample.done for sample in self.samples)

    def start(self, block: Block, reserved: int) -> None:
        self._block = block
        self.reserved = reserved

    def end(self) -> Block:
        """Release the prompt's block, so that a reader of the deltas does not keep its memory."""
        block, self._block = self.block, None
        return block

    def slot_tokens(self) -> int:
        """Tokens to reserve slots for, if all samples ran to their limit.

        The last token of an answer is sampled but never fed back.
        """
        decoded = self.max_tokens - 1
        return len(self.samples) * slot_capacity(decoded) if decoded else 0

    def require_fit(self, budget: int, wanted: int, max_running: int) -> None:
        """Refuse a request that needs `wanted` bytes or more samples than the engine ever has."""
        if wanted > budget:
            raise RequestTooLarge(
                f"the request needs {wanted / 2**20:.0f} MiB of KV cache (prompt of "
                f"{len(self.prompt_ids)} tokens, n={self.sampling.n}, max_tokens={self.max_tokens}); "
                f"the engine has {budget / 2**20:.0f} MiB.\n"
                "Lower max_tokens or n, or give the engine a larger kv_budget_bytes."
            )
        if self.sampling.n > max_running:
            raise RequestTooLarge(
                f"n={self.sampling.n} samples; the engine runs {max_running} at a time. Lower n."
            )

    def fail(self, error: HoneError) -> None:
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.deltas.put_nowait, error)


class SampledSequence:
    """One answer: the ids drawn so far, and the state of its random stream."""

    def __init__(
        self, request: Request, index: int, seed: int, matcher: Matcher | None = None
    ) -> None:
        self.request = request
        self.index = index
        self.state = SampleState(
            request.sampling,
            random_stream(seed, index),
            prompt_ids=request.prompt_ids,
            matcher=matcher,
        )
        self.ids = self.state.ids
        self.finish: FinishReason | None = None

    @property
    def done(self) -> bool:
        return self.finish is not None

    def append(self, token: SampledToken, decode: Callable[[list[int]], str] | None) -> Delta:
        """Append a drawn token and decide whether the answer ends here."""
        self.ids.append(token.id)
        self.finish, stop = self._finish(token.id, decode)
        if self.state.matcher is not None:
            self._follow(self.state.matcher, token.id)
        return Delta(self.index, (token,), self.finish, stop)

    def _follow(self, matcher: Matcher, token: int) -> None:
        """Advance the constraint; one that became too complex fails the request."""
        if not matcher.error and not self.done:
            matcher.accept(token)
        if matcher.error and not self.request.aborted:
            self.request.aborted = True
            self.request.fail(
                GrammarError(
                    f"the constraint became too complex after {len(self.ids)} tokens of the answer "
                    f"({matcher.error.partition(chr(10))[0]}); simplify it"
                )
            )

    def _finish(
        self, token: int, decode: Callable[[list[int]], str] | None
    ) -> tuple[FinishReason | None, str | int | None]:
        sampling = self.request.sampling
        matcher = self.state.matcher
        if token in sampling.stop_ids or (matcher is not None and matcher.ends(token)):
            return "stop", token
        if sampling.stop and decode is not None:
            # Every token is at least one byte, so a stop string that the newest token completes spans at
            # most as many tokens as it has bytes; four more keep a split character whole.
            reach = max(len(text.encode()) for text in sampling.stop) + 4
            text = decode(self.ids[-reach:])
            for stop in sampling.stop:
                if stop in text:
                    return "stop", stop
        return ("length", None) if len(self.ids) >= self.request.max_tokens else (None, None)


class Branch:
    """Samples of one prompt that have drawn the same tokens so far: one sequence, computed once.

    Short and structured answers are often equal, the more so the longer a model is trained: of
    eight tool calls for one request, a trained model writes one or two different ones. Every sample
    still uses its own noise, so it gets the same tokens as if it were alone.
    """

    def __init__(self, samples: list[SampledSequence], num_decoded: int = 0) -> None:
        self.samples = samples
        self.num_decoded = num_decoded
        """Sampled tokens that have keys and values."""

    @property
    def block(self) -> Block:
        return self.samples[0].request.block

    @property
    def lora(self) -> Lora | None:
        return self.samples[0].request.lora

    @property
    def key(self) -> str:
        return self.samples[0].request.key

    @property
    def last_id(self) -> int:
        return self.samples[0].ids[-1]

    def split(self) -> list["Branch"]:
        """After a draw: branches of the unfinished samples, by the token they drew."""
        by_token: dict[int, list[SampledSequence]] = {}
        for sample in self.samples:
            if not sample.done:
                by_token.setdefault(sample.ids[-1], []).append(sample)
        return [Branch(samples, self.num_decoded) for samples in by_token.values()]


def deliver(loop: asyncio.AbstractEventLoop, deltas: list[tuple[Request, Delta]]) -> None:
    """Hand a step's deltas to the event loop of their requests, in one call."""

    def put() -> None:
        for request, delta in deltas:
            request.deltas.put_nowait(delta)

    if not loop.is_closed():
        loop.call_soon_threadsafe(put)
