"""`_type: ruler`: a judge model scores the rollouts of one example by comparing them.

In:   the answered items of one example, a rubric, and an entry of `llms` (any OpenAI endpoint)
Out:  a score from 0 to 1 for each, with the judge's explanation

The scores say which of these rollouts is better, not how good a policy is: scores of two groups, or
of two epochs, cannot be compared. Verdicts are cached on disk, so a group that is judged again
after a kill gets the same scores.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from hone.config.build import Builder
from hone.config.registry import register_evaluator
from hone.errors import RolloutError
from hone.evaluation.base import BaseEvaluator, EvalInputItem, EvalOutputItem
from hone.evaluation.judge import JudgeBaseConfig, VerdictCache, conversations
from hone.evaluation.ranking import DEFAULT_RUBRIC, TrajectoryScore, rank
from hone.evaluation.rule import text
from hone.trajectory import Messages
from hone.workflow.llm import LLM


class RulerConfig(JudgeBaseConfig, name="ruler"):
    """A model ranks the rollouts of one example (RULER); the score is relative to the others."""

    rubric: str = DEFAULT_RUBRIC
    """What makes a score high or low."""


class Ruler(BaseEvaluator):
    """Asks a model to compare the rollouts of one example."""

    is_service = True

    def __init__(
        self,
        config: RulerConfig,
        llm: LLM,
        *,
        max_concurrency: int,
        cache: VerdictCache | None = None,
    ) -> None:
        super().__init__(max_concurrency=max_concurrency, tqdm_desc="ruler")
        self.config, self.llm, self._cache = config, llm, cache

    async def evaluate_item(self, item: EvalInputItem) -> EvalOutputItem:
        """The score of a single rollout, without others to compare it with."""
        [output] = await self.evaluate_group([item])
        return output

    async def evaluate_group(self, items: Sequence[EvalInputItem]) -> list[EvalOutputItem]:
        trajectories = [_conversations(item) for item in items]
        tools = next((call.tools for item in items for call in item.trajectory if call.tools), None)
        try:
            async with asyncio.timeout(self.config.timeout_s):
                scores = await self._scores(trajectories, tools)
        except TimeoutError:
            who = f"judge {self.llm.name or self.llm.model!r}"
            raise RolloutError(
                f"{who}: no scores within timeout_s={self.config.timeout_s:g}"
            ) from None
        judge = {"judge": self.llm.model, "compared": len(items)}
        return [
            EvalOutputItem(
                id=item.id,
                score=score.score,
                reasoning=judge | {"reasoning": score.explanation},
            )
            for item, score in zip(items, scores, strict=True)
        ]

    async def _scores(
        self, trajectories: list[list[Messages]], tools: list[dict[str, Any]] | None
    ) -> list[TrajectoryScore]:
        rubric, cache = self.config.rubric, self._cache
        key = "" if cache is None else cache.key(self.llm, [rubric, tools, trajectories])
        known = None if cache is None else cache.get(key, _read)
        if known is not None:
            return known
        scores = await rank(
            self.llm, trajectories, rubric=rubric, tools=tools, attempts=self.config.attempts
        )
        if cache is not None:
            cache.put(key, {"scores": [score.model_dump() for score in scores]})
        return scores


def _conversations(item: EvalInputItem) -> list[Messages]:
    """The conversations of a rollout, and its output if that is not the last reply."""
    histories = conversations(item.trajectory) or [
        [{"role": "user", "content": text(item.input_obj)}]
    ]
    output = text(item.output_obj)
    if output != (histories[-1][-1].get("content") or ""):
        histories[-1].append({"role": "output", "content": output})
    return histories


def _read(entry: Any) -> list[TrajectoryScore]:
    return [TrajectoryScore.model_validate(score) for score in entry["scores"]]


@register_evaluator(config_type=RulerConfig)
async def ruler(config: RulerConfig, builder: Builder) -> AsyncIterator[Ruler]:
    """RULER over the rollouts of one example."""
    yield Ruler(
        config,
        await config.get_llm(builder),
        max_concurrency=config.max_concurrency or builder.get_max_concurrency(),
        cache=config.verdicts(builder),
    )
