"""The model runner: computes the passes of the engine's steps and draws tokens.

In:   what the scheduler and the scorer plan for a step
Out:  filled blocks and slots, hidden states, the tokens drawn for every sample

Only the engine's thread calls it. The scheduler owns the KV cache; the runner writes into it.
"""

import asyncio
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hone.inference.base import Delta
from hone.inference.embedded.adapter_merge import AdapterMerger
from hone.inference.embedded.batch import Batch, Chunk
from hone.inference.embedded.prefix_cache import PrefixCache
from hone.inference.embedded.requests import Branch, Request
from hone.inference.embedded.sampler import draw
from hone.inference.embedded.scoring import Scorer
from hone.inference.embedded.slots import SlotPool
from hone.models.decoder import Decoder

Drawn = dict[asyncio.AbstractEventLoop, list[tuple[Request, Delta]]]
"""A step's deltas, by the event loop that waits for them."""


class ModelRunner:
    """One decoder, its merged copy, and counts of what was computed."""

    def __init__(
        self, decoder: Decoder, *, decode: Callable[[list[int]], str] | None, merge_after: int
    ) -> None:
        self.decoder = decoder
        self.decode = decode
        """Turns ids into text; None: stop strings are not supported."""
        self.merger = AdapterMerger(decoder, after=merge_after)
        self.prefilled = self.decoded = self.sampled = 0

    def forward(
        self,
        probes: Sequence[Chunk],
        prompts: Sequence[Chunk],
        pools: Sequence[SlotPool[Branch]],
        scorer: Scorer,
        prefixes: PrefixCache,
    ) -> Tensor | None:
        """One pass over the step's tokens; the states of the decoding branches, [branches, hidden]."""
        chunks = [*probes, *prompts]
        decodes = [(p, [b.last_id for b in p.sequences], p.sequences[0].lora) for p in pools]
        batch = Batch(self.decoder.config, chunks, decodes, self.decoder.device)
        if not len(batch):
            return None
        decoder, adapters = self.merger.decoder(len(batch), batch.spans)
        hidden = decoder.hidden(batch.token_ids, batch.positions, batch.attend, adapters)
        for chunk in chunks:
            chunk.block.filled = chunk.stop
        *states, decoding = hidden.split(batch.sizes)
        scorer.add_states(list(zip(probes, states, strict=False)))
        for chunk, computed in zip(prompts, states[len(probes) :], strict=True):
            self.prefilled += chunk.stop - chunk.start
            if chunk.block.complete:
                chunk.block.last_hidden = computed[-1].clone()
                prefixes.index(chunk.block)
        return decoding

    def sample(
        self, states: Tensor | None, decoding: Sequence[Branch], new: Sequence[Branch]
    ) -> Drawn:
        """Draw the next token of every sample: by `states`, or by its prompt's last state if new."""
        for branch in decoding:
            branch.num_decoded += 1
        drawn: Drawn = {}
        branches = [*decoding, *new]
        if not branches:
            return drawn
        firsts = [b.block.last_hidden for b in new if b.block.last_hidden is not None]
        parts = ([states] if states is not None else []) + ([torch.stack(firsts)] if firsts else [])
        logits = self.decoder.logits(torch.cat(parts))
        samples = [sample for branch in branches for sample in branch.samples]
        rows = [row for row, branch in enumerate(branches) for _ in branch.samples]
        tokens = draw(logits, rows, [sample.state for sample in samples])
        for sample, token in zip(samples, tokens, strict=True):
            delta = sample.append(token, self.decode)
            drawn.setdefault(sample.request.loop, []).append((sample.request, delta))
        self.decoded += len(decoding)
        self.sampled += len(samples)
        return drawn
