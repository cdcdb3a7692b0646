"""Sequences priced token by token: what an engine's probe says of given text.

In:   sequences, an adapter
Out:  the log-probability of every token but the first, once all of them have been read

Sequences go through the same passes as prompts and samples, a share of a pass at a time, so a
probe holds nobody longer than a prompt does. They are read anew every time, never from the
cache of prompts: a probe says what the weights give now, not what they once gave.
"""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import count

import torch
from torch import Tensor
from torch.nn import functional as F

from hone.errors import ConfigError
from hone.inference.batch import Chunk
from hone.inference.blocks import Block
from hone.inference.reading import Reading
from hone.models.architecture import DecoderConfig
from hone.models.decoder import Decoder
from hone.models.lora import Lora

Scores = tuple[tuple[float, ...], ...]


class Scored(Block):
    """A sequence that also keeps its hidden states, for those who begin alike."""

    def __init__(self, key: str, ids: Sequence[int], config: DecoderConfig, like: Tensor) -> None:
        super().__init__(key, ids, config, like)
        self.hidden = like.new_empty((len(ids), config.hidden))
        self.logprobs: list[float] = []
        self.users = 1
        self.nbytes = self.kv_bytes + self.hidden.nbytes

    def copy_front(self, source: Block, count: int) -> None:
        super().copy_front(source, count)
        assert isinstance(source, Scored), "prompts and probes are read apart"
        self.hidden[:count] = source.hidden[:count]
        self.logprobs = source.logprobs[: count - 1]


class Scoring:
    """Probes on their way through the engine."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._reading = Reading()
        self._numbers = count()
        self._waiting: deque[tuple[list[tuple[int, ...]], Lora | None, Future[Scores]]] = deque()
        self._open: list[tuple[list[Scored], Future[Scores]]] = []

    def __bool__(self) -> bool:
        return bool(self._open or self._waiting)

    @property
    def waits(self) -> bool:
        """Whether a probe has not been started yet."""
        return bool(self._waiting)

    @property
    def nbytes(self) -> int:
        """Memory of the probes that were started."""
        return sum(block.nbytes for blocks, _ in self._open for block in blocks)

    def add(self, sequences: Sequence[Sequence[int]], lora: Lora | None) -> Future[Scores]:
        """Price these under this adapter, once there is memory for them."""
        future = Future[Scores]()
        self._waiting.append(([tuple(ids) for ids in sequences], lora, future))
        return future

    def start(self, fits: Callable[[int], bool]) -> None:
        """Start the probes that wait, in order, as long as `fits` says yes to their bytes."""
        config, like = self._decoder.config, self._decoder.embedding
        token = (config.kv_bytes_per_token // 4 + config.hidden) * like.itemsize
        while self._waiting:
            sequences, lora, future = self._waiting[0]
            if not future.cancelled():
                if not fits(token * sum(map(len, sequences))):
                    return
                # Sequences start from others of their own probe only.
                key = f"probe {next(self._numbers)}"
                blocks = [Scored(key, ids, config, like) for ids in sequences]
                for block in blocks:
                    self._reading.add(block, lora)
                self._open.append((blocks, future))
            self._waiting.popleft()

    def chunks(self, limit: int) -> list[Chunk]:
        """What the next pass reads of them."""
        for blocks, future in self._open:
            if future.cancelled():
                for block in blocks:
                    block.users = 0
        self._open = [(blocks, future) for blocks, future in self._open if not future.cancelled()]
        return self._reading.chunks(limit)

    def take(self, read: Sequence[tuple[Chunk, Tensor]]) -> None:
        """The hidden states [tokens, hidden] of chunks that were read: price what they tell."""
        for chunk, states in read:
            assert isinstance(chunk.block, Scored), "prompts and probes are read apart"
            chunk.block.hidden[chunk.start : chunk.stop] = states
        blocks = [chunk.block for chunk, _ in read if isinstance(chunk.block, Scored)]
        for block in blocks:
            # The state of a token prices the next one: the last of a copied front another than there.
            done, known = len(block.logprobs), min(block.filled, len(block.ids) - 1)
            if known > done:
                logits = self._decoder.logits(block.hidden[done:known]).float()
                target = torch.tensor(block.ids[done + 1 : known + 1], device=logits.device)
                block.logprobs += (-F.cross_entropy(logits, target, reduction="none")).tolist()

    def answer(self) -> None:
        """Tell those whose sequences have all been read."""
        done = [entry for entry in self._open if all(block.complete for block in entry[0])]
        self._open = [entry for entry in self._open if entry not in done]
        for blocks, future in done:
            if future.set_running_or_notify_cancel():
                future.set_result(tuple(tuple(block.logprobs) for block in blocks))

    def fail(self, error: Exception) -> None:
        """Nothing more will be read."""
        for future in [future for *_, future in (*self._open, *self._waiting)]:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
        self._open = []
        self._waiting.clear()
        self._reading.clear()


def check_sequences(sequences: Sequence[Sequence[int]], config: DecoderConfig) -> None:
    """Refuse what cannot be read, naming the sequence."""
    for i, ids in enumerate(sequences):
        if not 1 <= len(ids) <= config.max_positions:
            raise ConfigError(
                f"sequence {i} of the probe has {len(ids)} tokens; the model reads 1 to "
                f"{config.max_positions}. Send a shorter one."
            )
        wrong = next((t for t in ids if not 0 <= t < config.vocab), None)
        if wrong is not None:
            raise ConfigError(
                f"sequence {i} of the probe holds {wrong}, outside the vocabulary of {config.vocab}"
            )
