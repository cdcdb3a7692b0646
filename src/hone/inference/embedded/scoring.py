"""Score given sequences for probes: the log-probability of every token.

In:   sequences, an adapter
Out:  the log-probability of every token but the first, once all of them are computed

Sequences go through the same passes as prompts and samples, a chunk at a time, so a probe delays
samples no longer than a prompt does. They never use the prefix cache: a probe must show what the
weights compute now, not what they computed earlier.
"""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import count

import torch
from torch import Tensor
from torch.nn import functional as F

from hone.inference.embedded.batch import Chunk
from hone.inference.embedded.blocks import Block
from hone.inference.embedded.prefill import PrefillQueue
from hone.models.architecture import DecoderConfig
from hone.models.decoder import Decoder
from hone.models.lora import Lora

Scores = tuple[tuple[float, ...], ...]


class ScoredBlock(Block):
    """A block that also keeps its hidden states, for sequences that share its prefix."""

    def __init__(self, key: str, ids: Sequence[int], config: DecoderConfig, like: Tensor) -> None:
        super().__init__(key, ids, config, like)
        self.hidden = like.new_empty((len(ids), config.hidden))
        self.logprobs: list[float] = []
        self.users = 1
        self.nbytes = self.kv_bytes + self.hidden.nbytes

    def copy_prefix(self, source: Block, count: int) -> None:
        super().copy_prefix(source, count)
        assert isinstance(source, ScoredBlock), "prompts and probes have separate queues"
        self.hidden[:count] = source.hidden[:count]
        self.logprobs = source.logprobs[: count - 1]


class Scorer:
    """The probes that wait or are being computed."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._prefills = PrefillQueue()
        self._numbers = count()
        self._waiting: deque[tuple[list[tuple[int, ...]], Lora | None, Future[Scores]]] = deque()
        self._open: list[tuple[list[ScoredBlock], Future[Scores]]] = []

    def __bool__(self) -> bool:
        return bool(self._open or self._waiting)

    @property
    def has_waiting(self) -> bool:
        """Whether a probe has not been started yet."""
        return bool(self._waiting)

    @property
    def nbytes(self) -> int:
        """Memory of the probes that were started."""
        return sum(block.nbytes for blocks, _ in self._open for block in blocks)

    def add(self, sequences: Sequence[Sequence[int]], lora: Lora | None) -> Future[Scores]:
        """Score these sequences under this adapter, once there is memory for them."""
        future = Future[Scores]()
        self._waiting.append(([tuple(ids) for ids in sequences], lora, future))
        return future

    def start(self, reserve: Callable[[int], bool]) -> None:
        """Start waiting probes in order, as long as `reserve` grants their bytes."""
        config, like = self._decoder.config, self._decoder.embedding
        token = (config.kv_bytes_per_token // 4 + config.hidden) * like.itemsize
        while self._waiting:
            sequences, lora, future = self._waiting[0]
            if not future.cancelled():
                if not reserve(token * sum(map(len, sequences))):
                    return
                # Sequences share prefixes within one probe only.
                key = f"probe {next(self._numbers)}"
                blocks = [ScoredBlock(key, ids, config, like) for ids in sequences]
                for block in blocks:
                    self._prefills.add(block, lora)
                self._open.append((blocks, future))
            self._waiting.popleft()

    def chunks(self, limit: int) -> list[Chunk]:
        """The next tokens to compute, `limit` at most."""
        for blocks, future in self._open:
            if future.cancelled():
                for block in blocks:
                    block.users = 0
        self._open = [(blocks, future) for blocks, future in self._open if not future.cancelled()]
        return self._prefills.chunks(limit)

    def add_states(self, computed: Sequence[tuple[Chunk, Tensor]]) -> None:
        """Score the tokens that follow the computed chunks, from their states [tokens, hidden]."""
        for chunk, states in computed:
            assert isinstance(chunk.block, ScoredBlock), "prompts and probes have separate queues"
            chunk.block.hidden[chunk.start : chunk.stop] = states
        blocks = [chunk.block for chunk, _ in computed if isinstance(chunk.block, ScoredBlock)]
        for block in blocks:
            # A token's state scores the next token, which differs after the last copied one.
            done, known = len(block.logprobs), min(block.filled, len(block.ids) - 1)
            if known > done:
                logits = self._decoder.logits(block.hidden[done:known]).float()
                target = torch.tensor(block.ids[done + 1 : known + 1], device=logits.device)
                block.logprobs += (-F.cross_entropy(logits, target, reduction="none")).tolist()

    def resolve(self) -> None:
        """Set the results of the probes whose sequences are all computed."""
        done = [entry for entry in self._open if all(block.complete for block in entry[0])]
        self._open = [entry for entry in self._open if entry not in done]
        for blocks, future in done:
            if future.set_running_or_notify_cancel():
                future.set_result(tuple(tuple(block.logprobs) for block in blocks))

    def fail(self, error: Exception) -> None:
        """Fail every probe: the engine stops."""
        for future in [future for *_, future in (*self._open, *self._waiting)]:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
        self._open = []
        self._waiting.clear()
        self._prefills.clear()
