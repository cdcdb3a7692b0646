"""Run each example several times, score the rollouts, and group them by example.

In:   an Evaluation (workflow, items, evaluators), the number of generations, the targets
Out:  a TrajectoryCollection, one group per example; what was left out, counted by reason

    start_run   one task per generation; the Evaluation's budget bounds all their rollouts
    finalize    wait, count what failed, group by example

A rollout becomes one record, which is in the journal before anything builds on it: after a kill it
is read from there, and no token is sampled twice. Trajectories refer to records; the text of an
episode is made when somebody reads it.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from pydantic import Field

from hone.capture.scope import outside_rollouts
from hone.config.registry import TrajectoryBuilderConfig, register_trajectory_builder
from hone.errors import ConfigError, Conflict, HoneError
from hone.evaluation.base import EvalOutputItem
from hone.finetune import calls as call_selection
from hone.finetune.base import Comparison, ModelServer, TrajectoryBuilder, TrajectoryCollection
from hone.finetune.calls import EVALUATION, UNSEEN, Targets, TrainedCalls
from hone.finetune.records import (
    FailureRecord,
    RolloutRecord,
    append_line,
    event_fields,
    group_by_example,
    plain,
    record_of,
    reward_or_substitute,
    run_recorded,
)
from hone.finetune.rerender import episode
from hone.finetune.resume import known_rollouts
from hone.tally import run_together
from hone.trajectory import failure_of

if TYPE_CHECKING:
    from hone.capture.base import SeenCall
    from hone.config.build import Builder
    from hone.config.schema import Document, FinetuneConfig
    from hone.evaluation.base import EvalInputItem
    from hone.evaluation.run import Evaluation, ItemResult
    from hone.event_log import EventLog
    from hone.finetune.journal import Journal
    from hone.finetune.values import EpisodeSource

logger = logging.getLogger("hone")

NO_LOGPROBS = (
    "No valid assistant messages with logprobs. Let the model be asked at the training server, which "
    "records them; of another endpoint, set `logprobs: true` in its `llms` entry and see that it "
    "returns them."
)


class ARTTrajectoryBuilderConfig(TrajectoryBuilderConfig, name="openpipe_art_traj_builder"):
    """Runs every example several times and compares the results."""

    num_generations: int = Field(default=2, ge=1)
    """Rollouts per example. More compare better and cost more."""


def num_generations(document: "Document") -> int | None:
    """Rollouts per example of the run's builder; None where the builder is a plugin's own."""
    config = document.trajectory_builders.get(document.finetuning.trajectory_builder or "")
    return config.num_generations if isinstance(config, ARTTrajectoryBuilderConfig) else None


@dataclass(slots=True)
class _Round:
    """What one `start_run` is about."""

    run_id: str
    items: list["EvalInputItem"]
    epoch: int
    round: int
    session: int
    journal: "Journal | None"
    events: "EventLog | None"
    known: dict[tuple[str, int], RolloutRecord]
    """Rollouts that ended before and are not run again, by example and generation."""
    unscoped: Counter[str]
    """Requests by model that had named no rollout when the round began."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Calls and rollouts that are not trained, by reason."""
    sources: dict[str, "EpisodeSource"] = field(default_factory=dict)
    """By rollout id, what makes the text of its trajectory."""


class UnscopedCalls:
    """Counts the calls that reached a server and named no rollout.

    hone cannot see them: they are missing from the trajectory, and under the base model's name they
    get the untrained model. Only the server knows of them.
    """

    def __init__(self, server: ModelServer) -> None:
        self._server = server
        self._is_reported = False

    async def count(self, run_id: str) -> Counter[str]:
        """Requests so far, by model; none where the server does not answer."""
        try:
            return Counter(await self._server.unscoped_calls(run_id))
        except HoneError as error:
            logger.warning("Calls without a rollout were not counted: %s", error)
            return Counter()

    def of_trained(self, counts: Counter[str]) -> int:
        """How many of them the model in training answered: hardly anybody else asks for that."""
        return counts[self._server.model_name]

    def message(self, counts: Counter[str]) -> str:
        """What to tell the user about them."""
        by_model = ", ".join(f"{name}: {n}" for name, n in counts.items())
        base = [name for name in counts if name != self._server.model_name]
        stale = f" Outside a rollout {base[0]!r} is the untrained model." if base else ""
        return (
            f"{counts.total()} calls named no rollout while rollouts ran ({by_model}), and are not "
            f"trained.{stale} {UNSEEN.format(root=self._server.base_url)}. If somebody else used "
            "the server, nothing is wrong."
        )

    def first_message(self, counts: Counter[str]) -> str | None:
        """The message, once; after that only the counts are kept."""
        if not counts or self._is_reported:
            return None
        self._is_reported = True
        return self.message(counts)


class ARTTrajectoryBuilder(TrajectoryBuilder):
    """Collects training trajectories through evaluation runs."""

    trajectory_builder_config: ARTTrajectoryBuilderConfig

    def __init__(self, trajectory_builder_config: ARTTrajectoryBuilderConfig) -> None:
        super().__init__(trajectory_builder_config)
        self.num_generations, self.trial = trajectory_builder_config.num_generations, self
        self.server: ModelServer | None = None
        """What records the model's calls; None where the model's server is not hone's."""
        self.unscoped: UnscopedCalls | None = None
        """Counts calls that named no rollout; None where no server can tell."""
        self.llm_names: Callable[[str], frozenset[str]] = lambda key: frozenset()
        """The names by which the target's calls ask for their model, of a key or a model's name."""
        self.comparison = Comparison()
        """How the trajectories of a job are compared."""
        self._rounds: dict[str, _Round] = {}

    def bind_server(self, server: ModelServer) -> None:
        """Train what this server recorded."""
        self.server, self.unscoped = server, UnscopedCalls(server)

    @property
    def targets(self) -> Targets:
        """Which calls are trained; `target_model` is a key of `llms` or the name of a model."""
        config = self._config
        models, wanted = None, config.target_model
        if wanted is not None:
            models = self.llm_names(wanted) | {wanted}
        trained = None if self.server is None else self.server.model_name
        return Targets(frozenset(config.target_functions), models, trained)

    # ---- the two ends of a round --------------------------------------------------------------

    async def start_run(self, run_id: str, meta: dict[str, Any] | None = None) -> None:
        """Begin `num_generations` evaluation runs; rollouts that the journal has are not run."""
        if run_id in self.evaluation_runs:
            raise Conflict(f"Run {run_id} is already in progress.")
        evaluation, config = self._evaluation, self._config
        at = await self._begin(run_id, evaluation.items, meta or {})
        places = {item.id: place for place, item in enumerate(evaluation.items)}
        logger.info("Starting %d evaluation runs for run_id: %s", self._generations, run_id)
        rollouts: list[list[asyncio.Task[RolloutRecord]]] = [[] for _ in range(self._generations)]
        # All generations of an example one after the other: they share its prompt.
        for item in at.items:
            for k, of_generation in enumerate(rollouts):
                rollout = self._rollout(at, item, places.get(item.id, len(places)), k, config)
                of_generation.append(asyncio.create_task(rollout))
        self._rounds[run_id] = at
        self.evaluation_runs[run_id] = [
            asyncio.create_task(run_together(tasks), name=f"eval-run-{run_id}-gen-{k}")
            for k, tasks in enumerate(rollouts)
        ]

    async def _begin(
        self, run_id: str, items: "Sequence[EvalInputItem]", meta: Mapping[str, Any]
    ) -> _Round:
        at = _Round(
            run_id=run_id,
            items=list(meta.get("items") or items),
            epoch=int(meta.get("epoch", 0)),
            round=int(meta.get("round", 0)),
            session=int(meta.get("session", 1)),
            journal=meta.get("journal"),
            events=meta.get("events"),
            known={},
            unscoped=Counter() if self.unscoped is None else await self.unscoped.count(run_id),
        )
        if at.journal is not None:
            at.known = known_rollouts(
                at.journal,
                at.epoch,
                at.round,
                [(item.id, k) for item in at.items for k in range(self._generations)],
                smallest=self._smallest,
                failed_before=meta.get("failed_before", True),
            )
        return at

    async def finalize(
        self, run_id: str, meta: dict[str, Any] | None = None
    ) -> TrajectoryCollection:
        """Wait for all generations; one group for each example that gave enough trajectories."""
        if run_id not in self.evaluation_runs:
            raise ConfigError(f"No evaluation runs found for run_id: {run_id}")
        runs, at = self.evaluation_runs[run_id], self._rounds[run_id]
        try:
            records = [record for ran in await run_together(runs) for record in ran]
        finally:
            self.evaluation_runs.pop(run_id, None)
            self._rounds.pop(run_id, None)
        examples = [item.id for item in at.items]
        groups, left_out = group_by_example(records, examples, self._smallest, at.sources)
        self.dropped = at.dropped + left_out
        await self._count_unscoped(at)
        collection = TrajectoryCollection(trajectories=groups, run_id=run_id)
        logger.info(
            "Built %d trajectories across %d examples for run_id: %s",
            collection.count,
            len(groups),
            run_id,
        )
        if not groups and self.dropped["no_logprobs"]:
            logger.warning("%s", NO_LOGPROBS)
        return collection

    async def _count_unscoped(self, at: _Round) -> None:
        """Count calls that named no rollout; warn about the first of them."""
        if self.unscoped is None:
            return
        counts = await self.unscoped.count(at.run_id) - at.unscoped
        if counts:
            self.dropped["call/unmarked"] += counts.total()
        message = self.unscoped.first_message(counts)
        if message is not None:
            message = f"epoch {at.epoch + 1}: {message}"
            logger.warning("%s", message)
            if at.events is not None:
                at.events.append("warning", message=message)

    async def load_episodes(self, trajectories: TrajectoryCollection) -> None:
        for trajectory in (t for group in trajectories.trajectories for t in group):
            if self.server is None or trajectory.is_readable:
                continue
            metadata = trajectory.metadata or {}
            recorded = await self.server.recorded(metadata["rollout"])
            calls = call_selection.with_ids(recorded, metadata["calls"])
            trajectory.read_from(partial(episode, calls))

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
        self, at: _Round, item: "EvalInputItem", place: int, k: int, config: "FinetuneConfig"
    ) -> RolloutRecord:
        """The record of a rollout: from the journal, or of one that runs now."""
        known = at.known.get((item.id, k))
        if known is not None and (known.is_trained or known.failure):
            return known
        if known is not None and self.server is not None:
            return await self._with_calls(at, known, ())
        reward = self._reward_name

        async def run(rollout: str) -> RolloutRecord:
            result = await self.run_item(item, rollout, reward)
            record = record_of(
                result,
                rollout=rollout,
                split="train",
                epoch=at.epoch,
                round=at.round,
                generation=k,
                reward_name=reward,
            )
            record = await self._with_reward(record, result)
            ran = result.rollout
            return await self._with_calls(at, record, () if ran is None else ran.calls, result)

        record = await run_recorded(
            run,
            at.run_id,
            retries=config.rollout_retries,
            epoch=at.epoch,
            round=at.round,
            item=place,
            generation=k,
            session=at.session,
        )
        if at.journal is not None:
            at.journal.add(record)
        if at.events is not None:
            at.events.append("rollout", **event_fields(record))
        return record

    async def run_item(
        self, item: "EvalInputItem", rollout: str, reward: str | None
    ) -> "ItemResult":
        """One rollout, scored; its evaluators' calls to the server are not the agent's."""
        host = self._evaluation.host
        with nullcontext() if host is None else outside_rollouts(EVALUATION, host=host):
            return await self._evaluation.run_item(
                item, rollout=rollout, evaluators=None if reward is None else [reward]
            )

    async def select_calls(self, rollout: str, seen: "Sequence[SeenCall]") -> TrainedCalls:
        """What of a rollout is trained: of what the server recorded, or of what was seen."""
        if self.server is None:
            return call_selection.from_seen(seen, self.targets)
        calls = await self.server.recorded(rollout)
        if not calls and self._config.allow_foreign_endpoint:
            return call_selection.from_seen(seen, self.targets)
        return call_selection.from_recorded(calls, seen, self.targets)

    async def _with_reward(self, record: RolloutRecord, result: "ItemResult") -> RolloutRecord:
        """The record with the reward of `compute_reward`, which others may override."""
        if record.failure is not None or record.reward is None:
            return record
        score = result.scores[self._reward_name or ""]
        output = EvalOutputItem(id=record.example, score=score.value, reasoning=score.reasoning)
        meta = {"epoch": record.epoch, "round": record.round, "rollout": record.rollout}
        try:
            reward = await self.compute_reward(output, {**meta, "generation": record.generation})
        except Exception as error:  # noqa: BLE001  # a plugin's code: whatever it raises is data
            return _failed(record, "evaluator", error)
        return record.model_copy(update={"reward": reward})

    async def _with_calls(
        self,
        at: _Round,
        record: RolloutRecord,
        seen: "Sequence[SeenCall]",
        result: "ItemResult | None" = None,
    ) -> RolloutRecord:
        """The record with the calls that are trained, if any is."""
        reward = reward_or_substitute(record, self._config)
        if reward is None:
            return record
        try:
            trained = await self.select_calls(record.rollout, seen)
        except HoneError as error:
            return _failed(record, "server_error", error)
        if not trained.sampled:
            at.dropped[trained.reason or "no_calls"] += 1
            return record.model_copy(update={"reward": reward})
        at.dropped.update({f"call/{why}": n for why, n in trained.dropped.items()})
        ran = None if result is None else result.rollout
        metadata: dict[str, Any] = {"reasoning": _reasoning(result, self._reward_name)}
        if trained.foreign and seen:
            metadata["tools"] = plain(seen[0].tools)
        at.sources[record.rollout] = partial(episode, trained.sampled)
        return record.model_copy(
            update={
                "reward": reward,
                "trained_calls": None if trained.foreign else [one.id for one in trained.sampled],
                "episode": episode(trained.sampled) if trained.foreign else None,
                "shaped_rewards": call_selection.shaped_rewards(
                    () if ran is None else ran.steps, trained.sampled
                ),
                "metadata": metadata,
            }
        )

    # ---- its configuration ----------------------------------------------------------------------

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
    def _generations(self) -> int:
        return self.trajectory_builder_config.num_generations

    @property
    def _smallest(self) -> int:
        """Size of the smallest group that is trained; one trajectory compares with a batch, too."""
        with_batch = self.comparison.baseline == "batch"
        by_default = "min_group_size" not in self._config.model_fields_set
        if self._generations == 1 or (with_batch and by_default):
            return 1
        return self._config.min_group_size

    @property
    def _reward_name(self) -> str | None:
        reward = self._config.reward_function
        return None if reward is None else reward.name


@register_trajectory_builder(config_type=ARTTrajectoryBuilderConfig)
async def art_trajectory_builder(
    config: ARTTrajectoryBuilderConfig, builder: "Builder"
) -> AsyncIterator[ARTTrajectoryBuilder]:
    """Groups of rollouts of the same example, with what the server recorded of each."""
    trajectory_builder = ARTTrajectoryBuilder(config)

    def names_of(wanted: str) -> frozenset[str]:
        key = wanted if wanted in builder.document.llms else builder.policy
        sent = None if key is None else builder.get_model_name(key)
        trained = None if builder.served is None else builder.served.trained
        if trained is not None and (sent or wanted) in {*trained.names, trained.base_model}:
            # All names that the server answers with the policy, also to an agent's own client.
            every = {*trained.names, trained.base_model}
            return frozenset(every | {f"{name}@latest" for name in every})
        return frozenset() if sent is None else frozenset({sent})

    trajectory_builder.llm_names = names_of
    adapter_name = builder.document.finetuning.trainer_adapter
    if adapter_name is not None:
        adapter = await builder.get_trainer_adapter(adapter_name)
        trajectory_builder.comparison = adapter.comparison
        if adapter.server is not None:
            trajectory_builder.bind_server(adapter.server)
    yield trajectory_builder
    await trajectory_builder.cancel()


def _failed(record: RolloutRecord, reason: str, error: Exception) -> RolloutRecord:
    failure = FailureRecord(
        kind="infrastructure", reason=reason, **plain(failure_of(error).model_dump())
    )
    return record.model_copy(update={"reward": None, "failure": failure})


def _reasoning(result: "ItemResult | None", name: str | None) -> Any:
    score = None if result is None or name is None else result.scores.get(name)
    return None if score is None else plain(score.reasoning)
