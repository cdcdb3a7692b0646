"""Run each example several times, score the rollouts, and group them by example.

In:   an Evaluation (workflow, items, evaluators), the number of generations, the targets
Out:  a TrajectoryCollection, one group per example; counts of what was dropped, by reason

    start_run   one task per generation; max_concurrency of the Evaluation limits all rollouts
    finalize    wait, count failures, group by example

A finished rollout is one record in the journal: after a kill it is read from there, and no token is
sampled twice. Trajectories refer to records; the text of an episode is made only for an adapter
that reads it.
"""

import asyncio
import logging
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from pydantic import Field

from hone.capture.base import SeenCall
from hone.config.build import Builder
from hone.config.registry import TrajectoryBuilderConfig, register_trajectory_builder
from hone.config.schema import DEFAULT, RUNS, Document, FinetuneConfig
from hone.errors import ConfigError, Conflict, HoneError
from hone.evaluation.base import Score, unscored
from hone.evaluation.run import ItemResult
from hone.files.rollout_record import FailureRecord, RolloutRecord
from hone.finetune.base import (
    ModelServer,
    RoundRequest,
    TrainerAdapter,
    TrajectoryBuilder,
    TrajectoryCollection,
)
from hone.finetune.calls import (
    NO_LOGPROBS,
    Targets,
    TrainedCalls,
    count_unscoped,
    from_recorded,
    from_seen,
    unscoped_message,
    with_ids,
)
from hone.finetune.curriculum import group_by_example
from hone.finetune.records import (
    Place,
    append_line,
    evaluator_failure,
    failure_record,
    ran_of,
    record_of,
    reward_or_substitute,
    score_of_reward,
)
from hone.finetune.rerender import episode
from hone.finetune.resume import known_rollouts
from hone.finetune.rollouts import Rollouts
from hone.tasks.tally import run_together
from hone.trajectory import failure_of
from hone.workflow.jsonable import plain
from hone.workflow.run import RolloutResult

logger = logging.getLogger("hone")


class RolloutBuilderConfig(TrajectoryBuilderConfig, name="rollouts"):
    """Runs every example several times and groups the rollouts by example."""

    num_generations: int = Field(default=2, ge=1)
    """Rollouts per example. More give a better comparison and cost more."""


def num_generations(document: Document) -> int | None:
    """Rollouts per example of the run's builder; None for a plugin's builder."""
    config = document.trajectory_builders.get(document.finetuning.trajectory_builder or "")
    return config.num_generations if isinstance(config, RolloutBuilderConfig) else None


@dataclass(frozen=True, slots=True)
class _Round:
    """State of one `start_run`."""

    rollouts: Rollouts
    unscoped: Counter[str]
    """Requests without a rollout, by model, when the round began."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Calls that are not trained, by reason."""


class RolloutBuilder(TrajectoryBuilder):
    """Collects training trajectories through evaluation runs."""

    trajectory_builder_config: RolloutBuilderConfig

    def __init__(self, trajectory_builder_config: RolloutBuilderConfig) -> None:
        super().__init__(trajectory_builder_config)
        self.num_generations, self.trial = trajectory_builder_config.num_generations, self
        self.adapter: TrainerAdapter | None = None
        """The adapter that trains the collected trajectories."""
        self.llm_names: Callable[[str], frozenset[str]] = lambda key: frozenset()
        """The model names that requests to the target may carry. The target is a key of `llms` or a
        model name."""
        self._rounds: dict[str, _Round] = {}
        self._reported_unscoped = False

    @property
    def server(self) -> ModelServer | None:
        """The server that records the model's calls; None if it is not a hone server."""
        return None if self.adapter is None else self.adapter.server

    @property
    def targets(self) -> Targets:
        """Which calls are trained; `target_model` is a key of `llms` or the name of a model."""
        wanted = self._config.target_model
        models = None if wanted is None else self.llm_names(wanted) | {wanted}
        trained = None if self.server is None else self.server.model_name
        return Targets(frozenset(self._config.target_functions), models, trained)

    async def start_run(self, run_id: str, meta: dict[str, Any] | None = None) -> None:
        """Start `num_generations` evaluation runs, without the rollouts that the journal has."""
        if run_id in self.evaluation_runs:
            raise Conflict(f"Run {run_id} is already in progress.")
        request, evaluation = RoundRequest.of(run_id, meta), self.bound_evaluation
        generations = range(self.trajectory_builder_config.num_generations)
        items = request.items or evaluation.items
        known = {}
        if request.journal is not None:
            wanted = [(item.id, k) for item in items for k in generations]
            known = known_rollouts(
                request.journal,
                request.epoch,
                request.round,
                wanted,
                smallest=self._smallest,
                failed_before=request.failed_before,
            )
        rollouts = Rollouts(
            evaluation,
            self._config,
            replace(request, items=items),
            generations,
            known=known,
            split="train",
        )
        at = _Round(rollouts, await count_unscoped(self.server, run_id))
        self._rounds[run_id] = at
        record = partial(self._record, at.dropped)
        logger.info("Starting %d evaluation runs for run_id: %s", len(generations), run_id)
        # All generations of an example one after another: the server computes their prompt once.
        tasks = [
            [asyncio.create_task(rollouts.run(item, k, record)) for k in generations]
            for item in items
        ]
        self.evaluation_runs[run_id] = [
            asyncio.create_task(
                run_together([of_item[k] for of_item in tasks]), name=f"eval-run-{run_id}-gen-{k}"
            )
            for k in generations
        ]

    async def finalize(
        self, run_id: str, meta: dict[str, Any] | None = None
    ) -> TrajectoryCollection:
        """Wait for all generations; returns one group per example with enough trajectories."""
        if run_id not in self.evaluation_runs:
            raise ConfigError(f"No evaluation runs found for run_id: {run_id}")
        try:
            runs = await run_together(self.evaluation_runs[run_id])
        finally:
            del self.evaluation_runs[run_id]
            at = self._rounds.pop(run_id)
        records = at.rollouts.close([record for run in runs for record in run])
        examples = [item.id for item in at.rollouts.items]
        before = RoundRequest.of(run_id, meta).failure_reward
        reward = self._failure_reward(records, before)
        groups, dropped = group_by_example(records, examples, self._smallest, reward)
        self.dropped = at.dropped + dropped
        failed = any(r.failure_kind == "policy" and r.is_trained for r in records)
        self.failure_reward = reward if failed else None
        await self._report_unscoped(at, run_id)
        collection = TrajectoryCollection(trajectories=groups, run_id=run_id)
        if self.adapter is None or self.adapter.reads_episodes:
            await self.load_episodes(collection)
        logger.info(
            "Built %d trajectories across %d examples for run_id: %s",
            collection.count,
            len(groups),
            run_id,
        )
        if not groups and self.dropped["no_logprobs"]:
            logger.warning("%s", NO_LOGPROBS)
        return collection

    async def _report_unscoped(self, at: _Round, run_id: str) -> None:
        """Count calls without a rollout; warn the first time."""
        counts = await count_unscoped(self.server, run_id) - at.unscoped
        if self.server is None or not counts:
            return
        self.dropped["call/unmarked"] += counts.total()
        if not self._reported_unscoped:
            self._reported_unscoped = True
            request = at.rollouts.request
            message = f"epoch {request.epoch + 1}: {unscoped_message(self.server, counts)}"
            logger.warning("%s", message)
            if request.events is not None:
                request.events.append("warning", message=message)

    async def load_episodes(self, trajectories: TrajectoryCollection) -> None:
        for trajectory in (t for group in trajectories.trajectories for t in group):
            if self.server is not None and "episode" not in vars(trajectory):
                recorded = await self.server.recorded(trajectory.rollout)
                calls = with_ids(recorded, trajectory.trained_calls or ())
                trajectory.episode = episode(calls)

    def log_progress(
        self, run_id: str, metrics: dict[str, Any], output_dir: str | None = None
    ) -> None:
        """Append a line to trajectory_builder_RUN.jsonl."""
        append_line(
            output_dir or RUNS / DEFAULT,
            f"trajectory_builder_{run_id}.jsonl",
            {"run_id": run_id, "num_generations": self.num_generations, **metrics},
        )

    # ---- one rollout ----------------------------------------------------------------------------

    async def select_calls(self, rollout: str, seen: Sequence[SeenCall]) -> TrainedCalls:
        """The calls that are trained: recorded by the server, or seen by this process."""
        if self.server is None:
            return from_seen(seen, self.targets)
        calls = await self.server.summaries(rollout)
        if not calls and self._config.allow_foreign_endpoint:
            return from_seen(seen, self.targets)
        return from_recorded(calls, seen, self.targets)

    async def _record(
        self, dropped: Counter[str], result: ItemResult, place: Place
    ) -> RolloutRecord:
        """The record with its reward, and with the calls that are trained or why none is."""
        config, ran = self._config, ran_of(result)
        score, failure = score_of_reward(result, config.reward_name)
        reward, metadata = None, {}
        if score is not None:
            reward, failure = await self._reward(score, ran, place)
            metadata = {} if failure else {"reasoning": plain(score.reasoning)}
        reward = reward_or_substitute(reward, failure, config)
        is_policy = failure is not None and failure.kind == "policy"
        trained = None
        if reward is not None or (is_policy and config.on_policy_failure == "lowest"):
            try:
                trained = await self.select_calls(ran.id, result.item.trajectory)
            except HoneError as error:
                reward = None
                failure = failure_record("infrastructure", "server_error", failure_of(error))
        if trained is not None and trained.sampled:
            dropped.update({f"call/{why}": n for why, n in trained.dropped.items()})
        return record_of(
            result,
            place,
            reward=reward,
            failure=failure,
            trained=trained,
            metadata=metadata,
            with_calls=config.record_calls,
        )

    async def _reward(
        self, score: Score, ran: RolloutResult, place: Place
    ) -> tuple[float | None, FailureRecord | None]:
        """The reward by `compute_reward`, which a plugin may override, or why there is none."""
        assert score.output is not None, "the evaluator gave a value"
        where = {"epoch": place.epoch, "round": place.round, "generation": place.generation}
        try:
            reward = await self.compute_reward(score.output, {**where, "rollout": ran.id})
            if reward is not None and not math.isfinite(reward := float(reward)):
                raise ValueError(
                    f"compute_reward returned {reward}; return a finite number, or None where "
                    "there is no reward"
                )
        except Exception as error:  # noqa: BLE001  # a plugin may raise anything; it is recorded
            listed = self._config.infrastructure_exceptions
            return None, evaluator_failure(unscored(error, listed=listed), answered=ran.answered)
        return reward, None

    def _failure_reward(self, records: Sequence[RolloutRecord], before: float) -> float:
        """Reward of policy failures; `before`: the run's lowest reward before this round, 0 at most."""
        instead = self._config.on_policy_failure
        if not isinstance(instead, str):
            return instead.reward
        own = [r.reward for r in records if r.failure is None and r.reward is not None]
        return min([0.0, before, *own])

    @property
    def _config(self) -> FinetuneConfig:
        if self.run_config is None:
            raise ConfigError(
                f"{type(self).__name__} was not initialized; await initialize(run_config) first"
            )
        return self.run_config

    @property
    def _smallest(self) -> int:
        """Size of the smallest group that is trained; 1 if groups are compared with the batch."""
        with_batch = self.adapter is not None and self.adapter.comparison.baseline == "batch"
        by_default = "min_group_size" not in self._config.model_fields_set
        if self.num_generations == 1 or (with_batch and by_default):
            return 1
        return self._config.min_group_size


@register_trajectory_builder(config_type=RolloutBuilderConfig)
async def rollout_builder(
    config: RolloutBuilderConfig, builder: Builder
) -> AsyncIterator[RolloutBuilder]:
    """Groups of rollouts of the same example, with the calls that the server recorded."""
    trajectory_builder = RolloutBuilder(config)

    def names_of(wanted: str) -> frozenset[str]:
        key = wanted if wanted in builder.document.llms else builder.policy
        sent = wanted if key is None else builder.get_model_name(key) or wanted
        trained = None if builder.served is None else builder.served.trained
        if trained is None:
            return frozenset({sent})
        # All names of the policy: an agent's own client may send a name other than the entry's.
        return trained.names_like(sent) or frozenset({sent})

    trajectory_builder.llm_names = names_of
    adapter = builder.document.finetuning.trainer_adapter
    if adapter is not None:
        trajectory_builder.adapter = await builder.get_trainer_adapter(adapter)
    yield trajectory_builder
    await trajectory_builder.cancel()
