"""Which examples an epoch visits, in which order, and in which rounds.

In:   examples, a seed, how many make an epoch and how many a round
Out:  rounds of examples, the same for the same arguments whenever they are asked for

An example comes again only when all have been seen. The order depends on the seed and on nothing
that happened, so a run that was killed goes on with the same examples.
"""

import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def epoch_of(examples: Sequence[T], *, seed: int, epoch: int, size: int | None = None) -> list[T]:
    """The examples of an epoch; `size` of them, or all."""
    if size is None or size >= len(examples):
        everything = list(examples)
        random.Random(f"{seed}:{epoch}").shuffle(everything)
        return everything
    waiting: list[int] = []
    drawn: list[int] = []
    for past in range(epoch + 1):
        drawn, waiting = waiting[:size], waiting[size:]
        if len(drawn) < size:
            again = list(range(len(examples)))
            random.Random(f"{seed}:{past}").shuffle(again)
            # Those of this epoch's beginning wait until the others were seen.
            again.sort(key=set(drawn).__contains__)
            missing = size - len(drawn)
            drawn, waiting = drawn + again[:missing], again[missing:]
    return [examples[i] for i in drawn]


def rounds_of(examples: Sequence[T], size: int | None) -> list[list[T]]:
    """Cut into rounds of `size`; one round if there is none. The last may be smaller."""
    size = size or max(len(examples), 1)
    return [list(examples[i : i + size]) for i in range(0, len(examples), size)]
