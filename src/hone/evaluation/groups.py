"""A group of rollouts that are scored together: each waits for the others, then all get a score.

In:   the answered items of one example's rollouts, as they end; an evaluator that compares them
Out:  a Score for each rollout

A rollout that failed leaves the group, and the others are compared without it. A rollout that joins
after the group was scored, because it was run again, is compared with the others, whose scores do
not change: they may already be on disk.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hone.evaluation.base import EvalInputItem, GroupEvaluator, Score, score_group


class RolloutGroup:
    """The rollouts of one example; scored once each of them has ended."""

    def __init__(
        self, members: Iterable[int], ended: Mapping[int, EvalInputItem] | None = None
    ) -> None:
        """`members`: numbers of the rollouts to wait for; `ended`: items of earlier rollouts."""
        self._items = dict(ended or {})
        self._running = set(members)
        self._complete = asyncio.Event()
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._scores: defaultdict[str, dict[int, Score]] = defaultdict(dict)

    def member(
        self, number: int, on_end: Callable[[EvalInputItem], None] = lambda item: None
    ) -> "Member":
        """One rollout of the group; `on_end` gets its item before it waits for the others."""
        return Member(self, number, on_end)

    def leave(self, number: int) -> None:
        """The rollout has ended, with or without a score."""
        self._running.discard(number)
        if not self._running:
            self._complete.set()

    def add(self, number: int, item: EvalInputItem) -> None:
        """The rollout has an output to score."""
        self._items[number] = item
        for scores in self._scores.values():
            scores.pop(number, None)
        self.leave(number)

    async def score(
        self,
        name: str,
        evaluator: GroupEvaluator,
        number: int,
        timeout_s: float | None,
        **cause: Any,
    ) -> Score:
        """Wait until every rollout has ended, then score them together.

        `cause`: arguments of `score_group` that say whose failure an exception is.
        """
        await self._complete.wait()
        async with self._locks[name]:
            scores = self._scores[name]
            if number not in scores:
                numbers = sorted(self._items)
                items = [self._items[n] for n in numbers]
                compared = await score_group(evaluator, items, timeout_s=timeout_s, **cause)
                for n, one in zip(numbers, compared, strict=True):
                    scores.setdefault(n, one)
            return scores[number]


class Member:
    """One rollout of a group."""

    def __init__(
        self, group: RolloutGroup, number: int, on_end: Callable[[EvalInputItem], None]
    ) -> None:
        self._group, self._number, self._on_end = group, number, on_end

    def add(self, item: EvalInputItem) -> None:
        """The rollout has an output to score."""
        self._on_end(item)
        self._group.add(self._number, item)

    async def score(
        self,
        name: str,
        evaluator: GroupEvaluator,
        timeout_s: float | None,
        **cause: Any,
    ) -> Score:
        """Its score, once all rollouts of the group have ended."""
        return await self._group.score(name, evaluator, self._number, timeout_s, **cause)
