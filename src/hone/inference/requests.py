"""A request on its way through the embedded engine, and the samples it asks for.

In:   prompt ids and Sampling
Out:  Request (what is reserved and read once), Sample (one answer as it grows), Branch (answers
      that have been the same so far)

What can never fit is refused here, before it waits: a request that no amount of waiting can
serve would hold up all that came after it.
"""

import asyncio
from collections.abc import Callable, Sequence

from hone.errors import ConfigError, EngineError, RequestTooLarge
from hone.inference.base import Delta, FinishReason, SampledToken, Sampling
from hone.inference.blocks import Block
from hone.inference.kv import lane_capacity
from hone.inference.sampler import Drawing, stream
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
    ) -> None:
        self.prompt_ids = tuple(prompt_ids)
        self.sampling = sampling
        self.lora = lora
        self.key = key
        self.loop = loop
        self.max_tokens = min(sampling.max_tokens, config.max_positions - len(prompt_ids))
        self.deltas: asyncio.Queue[Delta | BaseException] = asyncio.Queue()
        self.samples = [Sample(self, i, seed) for i in range(sampling.n)]
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
        """Let go of the prompt's block: whoever still reads the answer must not keep its memory."""
        block, self._block = self.block, None
        return block

    def row_tokens(self) -> int:
        """Tokens to reserve memory for, as if all samples ran to their limit.

        The last token of an answer is sampled and never read.
        """
        own = self.max_tokens - 1
        return len(self.samples) * lane_capacity(own) if own else 0

    def require_fit(self, budget: int, wanted: int, max_running: int) -> None:
        """Refuse a request that needs `wanted` bytes or more samples than the engine ever has."""
        if wanted > budget:
            raise RequestTooLarge(
                f"the request needs {wanted / 2**20:.0f} MiB of key-value memory (prompt of "
                f"{len(self.prompt_ids)} tokens, n={self.sampling.n}, max_tokens={self.max_tokens}); "
                f"the engine has {budget / 2**20:.0f} MiB.\n"
                "Lower max_tokens or n, or give the engine a larger kv_budget_bytes."
            )
        if self.sampling.n > max_running:
            raise RequestTooLarge(
                f"n={self.sampling.n} samples; the engine runs {max_running} at a time. Lower n."
            )

    def fail(self, error: EngineError) -> None:
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.deltas.put_nowait, error)


class Sample:
    """One answer: the ids drawn so far, and where its random stream stands."""

    def __init__(self, request: Request, index: int, seed: int) -> None:
        self.request = request
        self.index = index
        self.drawing = Drawing(request.sampling, stream(seed, index))
        self.ids: list[int] = []
        self.finish: FinishReason | None = None

    @property
    def done(self) -> bool:
        return self.finish is not None

    def take(self, token: SampledToken, decode: Callable[[list[int]], str] | None) -> Delta:
        """Append what was drawn and decide whether the answer ends here."""
        self.ids.append(token.id)
        self.finish, stop = self._finish(token.id, decode)
        return Delta(self.index, (token,), self.finish, stop)

    def _finish(
        self, token: int, decode: Callable[[list[int]], str] | None
    ) -> tuple[FinishReason | None, str | int | None]:
        sampling = self.request.sampling
        if token in sampling.stop_ids:
            return "stop", token
        if sampling.stop and decode is not None:
            # Every token spells at least one byte, so the newest stop string, if it is complete,
            # lies within its length in tokens; four more keep a split character whole.
            reach = max(len(text.encode()) for text in sampling.stop) + 4
            text = decode(self.ids[-reach:])
            for stop in sampling.stop:
                if stop in text:
                    return "stop", stop
        return ("length", None) if len(self.ids) >= self.request.max_tokens else (None, None)


class Branch:
    """Samples of one prompt that have drawn the same tokens so far: one row, computed once.

    Short and structured answers are mostly alike, the more so the better a model is trained: of
    eight tool calls to one request a trained model writes one or two different ones. Every sample
    still draws by its own noise, so what it says is what it would have said alone.
    """

    def __init__(self, samples: list[Sample], own: int = 0) -> None:
        self.samples = samples
        self.own = own
        """Own tokens that have keys and values."""

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

    def parted(self) -> list["Branch"]:
        """After a draw: those who go on, by the token they drew."""
        by_token: dict[int, list[Sample]] = {}
        for sample in self.samples:
            if not sample.done:
                by_token.setdefault(sample.ids[-1], []).append(sample)
        return [Branch(samples, self.own) for samples in by_token.values()]


def check(
    prompt_ids: Sequence[int], sampling: Sampling, config: DecoderConfig, *, has_decode: bool
) -> None:
    """Refuse what cannot be sampled, naming the field."""
    if not prompt_ids:
        raise ConfigError("prompt_ids is empty; send at least one token")
    wrong = next((t for t in prompt_ids if not 0 <= t < config.vocab), None)
    if wrong is not None:
        raise ConfigError(f"prompt_ids holds {wrong}, outside the vocabulary of {config.vocab}")
    if len(prompt_ids) >= config.max_positions:
        raise RequestTooLarge(
            f"the prompt has {len(prompt_ids)} tokens; the model reads {config.max_positions} "
            "including the answer. Shorten the conversation."
        )
    ranges: list[tuple[str, float, float, float]] = [
        ("n", sampling.n, 1, float("inf")),
        ("max_tokens", sampling.max_tokens, 1, float("inf")),
        ("temperature", sampling.temperature, 0, 100),
        ("top_p", sampling.top_p, 1e-9, 1),
        ("top_k", sampling.top_k, 0, float("inf")),
        ("min_p", sampling.min_p, 0, 1),
        ("top_logprobs", sampling.top_logprobs, 0, config.vocab),
    ]
    for name, value, low, high in ranges:
        if not low <= value <= high:
            raise ConfigError(f"{name} is {value!r}; it must lie between {low:g} and {high:g}")
    if 0 < sampling.temperature < 1e-3:
        raise ConfigError(
            f"temperature is {sampling.temperature!r}; use 0 for greedy, else >= 0.001"
        )
    if "" in sampling.stop:
        raise ConfigError("stop holds an empty string, which ends every answer at once")
    if sampling.stop and not has_decode:
        raise ConfigError("stop strings need an engine that can turn ids into text")


def deliver(loop: asyncio.AbstractEventLoop, deltas: list[tuple[Request, Delta]]) -> None:
    """Hand a step's deltas to the loop that asked for them, in one call."""

    def put() -> None:
        for request, delta in deltas:
            request.deltas.put_nowait(delta)

    if not loop.is_closed():
        loop.call_soon_threadsafe(put)
