"""Turn examples into groups of trajectories: run each several times, score, keep what can be trained.

In:   an Evaluation (workflow, items, evaluators), how many generations, what is a target
Out:  a TrajectoryCollection, one group per example; what was left out, counted by reason

    start_run   one task per generation, all rollouts of all of them under the Evaluation's budget
    finalize    wait, count what failed, group by example

A rollout is in the journal before anybody counts on it, with the trajectory made of it: after a
kill it is read from there, and not one token is sampled twice.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from pydantic import Field

from hone.capture.scope import apart
from hone.config.registry import TrajectoryBuilderConfig, register_trajectory_builder
from hone.errors import ConfigError, Conflict, HoneError
from hone.finetune import episodes
from hone.finetune.base import (
    FailureRecord,
    RolloutRecord,
    Trajectory,
    TrajectoryBuilder,
    TrajectoryCollection,
)
from hone.finetune.comparison import Comparison
from hone.finetune.groups import Collected, collected, grouped
from hone.finetune.records import (
    append_line,
    plain,
    record_of,
    rollout_id,
    told,
    worth,
    worth_another,
)
from hone.finetune.rounds import Round
from hone.finetune.unmarked import EVALUATION, Unmarked
from hone.trajectory import failure_of
from hone.types import RecordedCall
from hone.workflow.loop import ended_together

if TYPE_CHECKING:
    from hone.capture.base import SeenCall
    from hone.config.build import Builder
    from hone.config.schema import FinetuneConfig
    from hone.evaluation.base import EvalInputItem
    from hone.evaluation.run import Evaluation, ItemResult

logger = logging.getLogger("hone")

NO_LOGPROBS = (
    "No valid assistant messages with logprobs. Let the model be asked at the training server, which "
    "records them; of another endpoint, set `logprobs: true` in its `llms` entry and see that it "
    "returns them."
)

Recorded = Callable[[str], Awaitable[list[RecordedCall]]]
"""Rollout id -> what the server recorded of it."""


class ARTTrajectoryBuilderConfig(TrajectoryBuilderConfig, name="openpipe_art_traj_builder"):
    """Runs every example several times and compares what came of it."""

    num_generations: int = Field(default=2, ge=1)
    """Rollouts per example. More compare better and cost more."""


class ARTTrajectoryBuilder(TrajectoryBuilder):
    """Collects training trajectories through evaluation runs."""

    trajectory_builder_config: ARTTrajectoryBuilderConfig

    def __init__(self, trajectory_builder_config: ARTTrajectoryBuilderConfig) -> None:
        super().__init__(trajectory_builder_config)
        self.evaluation_runs: dict[str, list[asyncio.Task[list[RolloutRecord]]]] = {}
        """By run id, a task for each generation."""
        self.recorded: Recorded | None = None
        """What the server recorded of a rollout; None where the model's server is not hone's."""
        self.unmarked: Unmarked | None = None
        """What the server knows of calls that named no rollout; None where it cannot tell."""
        self.model: str | None = None
        """PROJECT/NAME of the model in training; only its calls are trained. None: all models."""
        self.llm_names: Callable[[str], frozenset[str]] = lambda key: frozenset()
        """The names by which the target's calls ask for their model, of a key or a model's name."""
        self.comparison = Comparison()
        """How the trajectories of a job are compared."""
        self.last_stats: Collected | None = None
        self._rounds: dict[str, Round] = {}
        self._counted: Counter[str] = Counter()

    @property
    def num_generations(self) -> int:
        return self.trajectory_builder_config.num_generations

    @property
    def targets(self) -> episodes.Targets:
        """Which calls are trained; `target_model` is a key of `llms` or the name of a model."""
        config = self._config
        models, wanted = None, config.target_model
        if wanted is not None:
            models = self.llm_names(wanted) | {wanted}
        return episodes.Targets(frozenset(config.target_functions), models, self.model)

    # ---- the two ends of a round --------------------------------------------------------------

    async def start_run(self, run_id: str, meta: dict[str, Any] | None = None) -> None:
        """Begin `num_generations` evaluation runs; rollouts that the journal has are not run."""
        if run_id in self.evaluation_runs:
            raise Conflict(f"Run {run_id} is already in progress.")
        evaluation, config = self._evaluation, self._config
        at = Round.of(
            run_id,
            evaluation.items,
            meta,
            generations=self.num_generations,
            smallest=self._smallest,
            unmarked=None if self.unmarked is None else await self.unmarked.count(run_id),
        )
        places = {item.id: place for place, item in enumerate(evaluation.items)}
        logger.info("Starting %d evaluation runs for run_id: %s", self.num_generations, run_id)
        self._counted = Counter()
        rollouts: list[list[asyncio.Task[RolloutRecord]]] = [
            [] for _ in range(self.num_generations)
        ]
        # All generations of an example one after the other: they share its prompt.
        for item in at.items:
            for k, of_generation in enumerate(rollouts):
                rollout = self._rollout(at, item, places.get(item.id, len(places)), k, config)
                of_generation.append(asyncio.create_task(rollout))
        self._rounds[run_id] = at
        self.evaluation_runs[run_id] = [
            asyncio.create_task(ended_together(tasks), name=f"eval-run-{run_id}-gen-{k}")
            for k, tasks in enumerate(rollouts)
        ]

    async def finalize(
        self, run_id: str, meta: dict[str, Any] | None = None
    ) -> TrajectoryCollection:
        """Wait for all generations; one group for each example that gave enough trajectories."""
        if run_id not in self.evaluation_runs:
            raise ConfigError(f"No evaluation runs found for run_id: {run_id}")
        runs, at = self.evaluation_runs[run_id], self._rounds[run_id]
        try:
            records = [record for ran in await ended_together(runs) for record in ran]
        finally:
            self.evaluation_runs.pop(run_id, None)
            self._rounds.pop(run_id, None)
        groups, left_out = grouped(records, [item.id for item in at.items], self._smallest)
        self.dropped = self._counted + left_out
        if self.unmarked is not None and (found := await self.unmarked.count(run_id) - at.unmarked):
            self.dropped["call/unmarked"] += found.total()
            self._warn(at, self.unmarked.first_message(found))
        resumed = {record.rollout for record in at.known.values()}
        self.last_stats = stats = collected(records, groups, resumed)
        logger.info(
            "Built %d trajectories across %d examples for run_id: %s",
            stats.trajectories,
            stats.groups,
            run_id,
        )
        if not groups and self.dropped["no_logprobs"]:
            logger.warning("%s", NO_LOGPROBS)
        return TrajectoryCollection(trajectories=groups, run_id=run_id)

    def _warn(self, at: Round, message: str | None) -> None:
        if message is not None:
            message = f"epoch {at.epoch + 1}: {message}"
            logger.warning("%s", message)
            if at.events is not None:
                at.events.append("warning", message=message)

    def log_progress(
        self, run_id: str, metrics: dict[str, Any], output_dir: str | None = None
    ) -> None:
        """Append a line to trajectory_builder_RUN.jsonl."""
        append_line(
            output_dir or "./.tmp/nat/finetuning/trajectory_builder",
            f"trajectory_builder_{run_id}.jsonl",
            run_id=run_id,
            num_generations=self.num_generations,
            **metrics,
        )

    # ---- one rollout ----------------------------------------------------------------------------

    async def _rollout(
        self, at: Round, item: "EvalInputItem", place: int, k: int, config: "FinetuneConfig"
    ) -> RolloutRecord:
        """From the journal, or run now: again where its world failed it."""
        known = at.known.get((item.id, k))
        if known is not None and (known.trajectory or known.failure or self.recorded):
            return await self._resumed(at, known)
        reward = None if config.reward_function is None else config.reward_function.name
        record = None
        for retry in range(config.rollout_retries + 1):
            id = rollout_id(
                at.run_id,
                epoch=at.epoch,
                round=at.round,
                item=place,
                generation=k,
                session=at.session,
                retry=retry,
            )
            result = await self.run_item(item, id, reward)
            record = record_of(
                result,
                rollout=id,
                split="train",
                epoch=at.epoch,
                round=at.round,
                generation=k,
                reward_name=reward,
            )
            record = await self._with_trajectory(at, record, result)
            if not worth_another(record):
                break
        assert record is not None, config.rollout_retries
        if at.journal is not None:
            at.journal.add(record)
        if at.events is not None:
            at.events.append("rollout", **told(record))
        return record

    async def run_item(
        self, item: "EvalInputItem", rollout: str, reward: str | None
    ) -> "ItemResult":
        """One rollout, scored; what its evaluators ask the server is not taken for the agent's."""
        host = self._evaluation.host
        with nullcontext() if host is None else apart(EVALUATION, host=host):
            return await self._evaluation.run_item(
                item, rollout=rollout, evaluators=None if reward is None else [reward]
            )

    async def found(
        self, rollout: str, seen: "Sequence[SeenCall]"
    ) -> tuple[episodes.Found, list[RecordedCall]]:
        """What of a rollout can be trained, and what the server recorded of it."""
        if self.recorded is None:
            return episodes.of_seen(seen, self.targets), []
        calls = await self.recorded(rollout)
        if not calls and self._config.allow_foreign_endpoint:
            return episodes.of_seen(seen, self.targets), []
        return episodes.of_recorded(calls, seen, self.targets), calls

    async def _resumed(self, at: Round, record: RolloutRecord) -> RolloutRecord:
        if record.trajectory is not None or record.failure is not None:
            return record
        return await self._with_trajectory(at, record, None)

    async def _with_trajectory(
        self, at: Round, record: RolloutRecord, result: "ItemResult | None"
    ) -> RolloutRecord:
        """The record with what is trained of it, if anything is."""
        reward = worth(record, self._config)
        if reward is None:
            return record
        ran = None if result is None else result.rollout
        seen, steps = ((), ()) if ran is None else (ran.calls, ran.steps)
        try:
            found, _ = await self.found(record.rollout, seen)
        except HoneError as error:
            said = failure_of(error).model_dump()
            failure = FailureRecord(kind="infrastructure", reason="server_error", **said)
            return record.model_copy(update={"reward": None, "failure": failure})
        self._count(found)
        if not found.sampled:
            return record.model_copy(update={"reward": reward})
        names: dict[str, Any] = {
            "id": record.example,
            "run_id": at.run_id,
            "epoch": at.epoch,
            "round": at.round,
            "generation": record.generation,
            "rollout": record.rollout,
            "calls": None if found.foreign else [one.id for one in found.sampled],
            "reasoning": _reasoning(result, self._reward_name),
        }
        if found.foreign and seen:
            names["tools"] = plain(seen[0].tools)
        trajectory = Trajectory(
            episode=episodes.episode(found.sampled),
            reward=reward,
            shaped_rewards=episodes.shaped(steps, found.sampled),
            metadata=names,
        )
        return record.model_copy(update={"reward": reward, "trajectory": trajectory})

    def _count(self, found: episodes.Found) -> None:
        """Calls that are not trained of a rollout that is; the others are counted as rollouts."""
        if found.sampled:
            self._counted.update({f"call/{why}": n for why, n in found.dropped.items()})
        else:
            self._counted[found.reason or "no_calls"] += 1

    # ---- what it was given ----------------------------------------------------------------------

    @property
    def _config(self) -> "FinetuneConfig":
        if self.run_config is None:
            raise ConfigError(
                "ARTTrajectoryBuilder was not initialized; await initialize(run_config) first"
            )
        return self.run_config

    @property
    def _evaluation(self) -> "Evaluation":
        if self.evaluation is None:
            raise ConfigError(
                "ARTTrajectoryBuilder has no evaluation yet; call bind_evaluation(...) first"
            )
        return self.evaluation

    @property
    def _smallest(self) -> int:
        """Size of the smallest group that is trained; one trajectory compares with a batch, too."""
        with_batch = self.comparison.baseline == "batch"
        by_default = "min_group_size" not in self._config.model_fields_set
        if self.num_generations == 1 or (with_batch and by_default):
            return 1
        return self._config.min_group_size

    @property
    def _reward_name(self) -> str | None:
        named = self._config.reward_function
        return None if named is None else named.name


@register_trajectory_builder(config_type=ARTTrajectoryBuilderConfig)
async def art_trajectory_builder(
    config: ARTTrajectoryBuilderConfig, builder: "Builder"
) -> AsyncIterator[ARTTrajectoryBuilder]:
    """Groups of rollouts of the same example, with what the server recorded of each."""
    made = ARTTrajectoryBuilder(config)

    def names_of(wanted: str) -> frozenset[str]:
        key = wanted if wanted in builder.document.llms else builder.policy
        sent = None if key is None else builder.get_model_name(key)
        trained = None if builder.served is None else builder.served.trained
        if trained is not None and (sent or wanted) in {*trained.names, trained.base_model}:
            # All that the server answers with the policy, also to a client of the agent's own.
            every = {*trained.names, trained.base_model}
            return frozenset(every | {f"{name}@latest" for name in every})
        return frozenset() if sent is None else frozenset({sent})

    made.llm_names = names_of
    named = builder.document.finetuning.trainer_adapter
    if named is not None:
        adapter = await builder.get_trainer_adapter(named)
        made.recorded = getattr(adapter, "recorded", None)
        made.unmarked = getattr(adapter, "unmarked", None)
        made.model = getattr(adapter, "model_name", None)
        made.comparison = Comparison.of(getattr(adapter, "adapter_config", None))
    yield made
    for runs in made.evaluation_runs.values():
        for task in runs:
            task.cancel()


def _reasoning(result: "ItemResult | None", name: str | None) -> Any:
    score = None if result is None or name is None else result.scores.get(name)
    return None if score is None else plain(score.reasoning)
