"""Real implementations of hone's protocols that answer from a script, type-checked.

In:   what to answer, as text or as ids
Out:  ScriptedEngine: an Engine that remembers what it was asked and under which adapter;
      ScriptedBuilder and MemoryAdapter: the harness's parts without a model and without a server
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from hone.config.registry import TrainerAdapterConfig, TrajectoryBuilderConfig
from hone.errors import EngineError, EngineFailed
from hone.files.rollout_record import FailureRecord, RolloutRecord
from hone.finetune.base import (
    RoundRequest,
    TrainerAdapter,
    TrainingJobRef,
    TrainingJobStatus,
    TrainingStatusEnum,
    TrajectoryBuilder,
    TrajectoryCollection,
)
from hone.finetune.base import Trajectory as HarnessTrajectory
from hone.finetune.records import Place, trajectory_of
from hone.finetune.resume import known_rollouts
from hone.finetune.rollouts import run_recorded
from hone.inference.base import (
    AdapterRef,
    Delta,
    Engine,
    EngineStats,
    Probe,
    SampledToken,
    Sampling,
)

Answer = str | Sequence[int]
"""Text is encoded, and the end of the turn added; ids are given back as they are."""
Script = Callable[[Sequence[int], Sampling, AdapterRef | None], Answer]


@dataclass(frozen=True)
class EngineRequest:
    """One request as the engine got it, and what it gave for each sample."""

    prompt_ids: tuple[int, ...]
    sampling: Sampling
    adapter: AdapterRef | None
    answers: tuple[tuple[int, ...], ...]
    stream: bool = True


def logprob(token: int, place: int) -> float:
    """What the scripted engine says of a token: a float32, and another at every place."""
    return -(1 + token % 13) / 16 - place / 1024


class ScriptedEngine:
    """Answers from a script, over again from its beginning; `asked` holds every request."""

    def __init__(
        self,
        script: Iterable[Answer] | Script = ("ok",),
        *,
        tokenizer: Any = None,
        end: int | None = None,
        delay_s: float = 0.0,
        scores: Callable[[Sequence[int], AdapterRef | None], Sequence[float]] | None = None,
    ) -> None:
        """`delay_s` passes before every token; `scores` are the log-probabilities of a probe."""
        self.says(script)
        self._tokenizer = tokenizer
        self._end = getattr(tokenizer, "eos_token_id", None) if end is None else end
        self._scores = scores or (lambda ids, _: [logprob(t, i) for i, t in enumerate(ids)][1:])
        self.delay_s = delay_s
        self.requests: list[EngineRequest] = []
        self.published: dict[str, tuple[AdapterRef, Path]] = {}
        self.unloaded: list[AdapterRef] = []
        self.aborted = 0
        """Requests whose reader left before their end."""
        self.stuck = False
        """Say yes to every publish from now on and go on serving what was served: a broken engine."""
        self.masks = False
        """Know only the log-probability after top-p, top-k and min-p, as vLLM does."""
        self.repeatable = True
        """Whether equal seeds give equal answers; not with vLLM."""
        self.failing: Exception | None = None
        """Raised by every request, at its token number `fails_at`."""
        self.fails_at = 1
        self.failure: BaseException | None = None
        """What broke the engine: set it, and the server must open another."""
        self.max_length = 1 << 30
        self.running = 0
        self.most_running = 0
        self.closed = False
        self._awake = asyncio.Event()
        self._awake.set()

    def says(self, script: Iterable[Answer] | Script) -> None:
        """Answer from this script from now on."""
        self._script = script if callable(script) else _in_turn(script)

    # ---- the Engine protocol ----------------------------------------------------------------

    async def check(self, sampling: Sampling) -> None: ...

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        adapter: AdapterRef | None = None,
        *,
        stream: bool = True,
    ) -> AsyncIterator[Delta]:
        self._check(adapter)
        await self._awake.wait()
        answers = [self._answer(prompt_ids, sampling, adapter) for _ in range(sampling.n)]
        self.requests.append(
            EngineRequest(
                tuple(prompt_ids),
                sampling,
                adapter,
                tuple(tuple(answer.ids) for answer in answers),
                stream,
            )
        )
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        whole = False
        try:
            for place in range(max(len(answer.ids) for answer in answers)):
                await asyncio.sleep(self.delay_s)
                if self.failing is not None and place >= self.fails_at:
                    raise self.failing
                for sample, answer in enumerate(answers):
                    if place < len(answer.ids):
                        delta = answer.delta(sample, place, sampling.top_logprobs)
                        if self.masks and sampling.narrowed:
                            tokens = tuple(token._replace(exact=False) for token in delta.tokens)
                            delta = replace(delta, tokens=tokens)
                        yield delta
            whole = True
        finally:
            self.running -= 1
            self.aborted += not whole

    async def publish(self, adapter: AdapterRef, directory: Path) -> None:
        self._check(None)
        self.published[adapter.sha256] = (adapter, directory)

    async def unload(self, adapter: AdapterRef) -> None:
        self.unloaded.append(adapter)
        self.published.pop(adapter.sha256, None)

    async def probe(
        self,
        sequences: Sequence[Sequence[int]],
        adapter: AdapterRef | None = None,
        *,
        with_hash: bool = True,
    ) -> Probe:
        self._check(adapter)
        served = adapter
        if self.stuck and self.published:
            served = next(iter(self.published.values()))[0]
        sha256 = "base" if served is None else served.sha256
        return Probe(sha256, tuple(tuple(self._scores(ids, served)) for ids in sequences))

    def stats(self) -> EngineStats:
        return EngineStats(
            running=self.running,
            waiting=0,
            adapters=tuple(self.published),
            prompt_tokens=sum(len(request.prompt_ids) for request in self.requests),
            prefilled_tokens=sum(len(request.prompt_ids) for request in self.requests),
            decoded_tokens=sum(
                len(ids) - 1 for request in self.requests for ids in request.answers
            ),
            sampled_tokens=sum(len(ids) for request in self.requests for ids in request.answers),
            kv_budget_bytes=0,
            kv_reserved_bytes=0,
            kv_cached_bytes=0,
            held_s=0.0,
        )

    async def sleep(self) -> None:
        self._awake.clear()

    async def wake(self) -> None:
        self._awake.set()

    async def close(self) -> None:
        self.closed = True

    # ---- what it answers --------------------------------------------------------------------

    def _check(self, adapter: AdapterRef | None) -> None:
        if self.failure is not None:
            raise EngineFailed(f"the engine failed ({self.failure!r})")
        if self.closed:
            raise EngineError("the engine is closed")
        if adapter is not None and adapter.sha256 not in self.published:
            raise EngineError(f"step {adapter.step} of {adapter.model!r} is not served")

    def _answer(
        self, prompt_ids: Sequence[int], sampling: Sampling, adapter: AdapterRef | None
    ) -> "_Scripted":
        script = self._script(prompt_ids, sampling, adapter)
        if isinstance(script, str):
            ids = self._tokenizer.encode(script, add_special_tokens=False)
            ids += [] if self._end is None else [self._end]
        else:
            ids = list(script)
        for i, token in enumerate(ids[: sampling.max_tokens]):
            if token in sampling.stop_ids:
                return _Scripted(ids[: i + 1], token)
            if sampling.stop:
                text = self._tokenizer.decode(ids[: i + 1])
                stop_string = next((stop for stop in sampling.stop if stop in text), None)
                if stop_string is not None:
                    return _Scripted(ids[: i + 1], stop_string)
        return _Scripted(ids[: sampling.max_tokens], None)


@dataclass(frozen=True)
class _Scripted:
    ids: list[int]
    stop: str | int | None
    """What ended it; None where it was cut at its length."""

    def delta(self, sample: int, place: int, alternatives: int) -> Delta:
        token, value = self.ids[place], logprob(self.ids[place], place)
        others = [(token + i, value - i) for i in range(alternatives)]
        drawn = SampledToken(token, value, top=tuple(others))
        if place + 1 < len(self.ids):
            return Delta(sample, (drawn,))
        return Delta(sample, (drawn,), "length" if self.stop is None else "stop", self.stop)


def _in_turn(answers: Iterable[Answer]) -> Script:
    turn: Iterator[Answer] = itertools.cycle(answers)
    return lambda prompt_ids, sampling, adapter: next(turn)


def _is_an_engine(engine: ScriptedEngine) -> Engine:
    """Checked by the type checker, not by running it."""
    return engine


# ---- the harness: a builder and an adapter without a model ------------------------------------


class ScriptedBuilder(TrajectoryBuilder):
    """Rolls out nothing: `reward(epoch, example, generation)` is what a rollout was worth.

    None is a rollout its world failed, a string a failure of the policy for that reason.
    """

    def __init__(
        self,
        reward: Callable[[int, str, int], float | str | None],
        *,
        generations: int = 2,
        crash: Callable[[int, str, int], bool] = lambda *at: False,
    ) -> None:
        super().__init__(TrajectoryBuilderConfig())
        self.num_generations = generations
        self.reward, self.crash = reward, crash
        self.ran: list[tuple[int, str, int]] = []
        """Every rollout that was run, not those the journal knew."""
        self._records: list[RolloutRecord] = []

    async def start_run(self, run_id: str, meta: dict[str, Any] | None = None) -> None:
        assert meta is not None
        request = RoundRequest.of(run_id, meta)
        assert request.journal is not None and request.items is not None
        epoch, round, failed = request.epoch, request.round, request.failed_before
        generations = range(self.num_generations or 1)
        wanted = [(item.id, k) for item in request.items for k in generations]
        known = known_rollouts(
            request.journal, epoch, round, wanted, smallest=1, failed_before=failed
        )
        self._records = []
        for number, item in enumerate(request.items):
            for generation in generations:
                record = known.get((item.id, generation))
                if record is None:
                    run = partial(self._rollout, epoch, round, item.id, generation)
                    place = Place("train", epoch, round, generation)
                    record = await run_recorded(run, request, place, item=number, retries=0)
                self._records.append(record)

    async def _rollout(
        self, epoch: int, round: int, example: str, generation: int, id: str
    ) -> RolloutRecord:
        if self.crash(epoch, example, generation):
            raise RuntimeError(f"the agent's host fell over at {example}")
        self.ran.append((epoch, example, generation))
        reward = self.reward(epoch, example, generation)
        failure = None
        if reward is None:
            failure = FailureRecord(kind="infrastructure", reason="connection", type="OSError")
        elif isinstance(reward, str):
            failure = FailureRecord(kind="policy", reason=reward)
        return RolloutRecord(
            epoch=epoch,
            round=round,
            split="train",
            example=example,
            generation=generation,
            rollout=id,
            reward=None if failure else float(reward or 0),
            failure=failure,
            episode=None if failure else [],
        )

    async def finalize(
        self, run_id: str, meta: dict[str, Any] | None = None
    ) -> TrajectoryCollection:
        groups: dict[str, list[HarnessTrajectory]] = {}
        self.dropped.clear()
        for record in self._records:
            if not record.is_trained:
                self.dropped[record.failure.reason if record.failure else "unscored"] += 1
                continue
            groups.setdefault(record.example, []).append(trajectory_of(record))
        return TrajectoryCollection(trajectories=list(groups.values()), run_id=run_id)

    def log_progress(
        self, run_id: str, metrics: dict[str, Any], output_dir: str | None = None
    ) -> None: ...


class MemoryAdapter(TrainerAdapter):
    """Trains nothing: keeps what it was sent, by key, as a server does."""

    def __init__(self, *, fail: Callable[[str], str | None] = lambda key: None) -> None:
        super().__init__(TrainerAdapterConfig())
        self.fail = fail
        """Why the job of a key fails; None: it does not."""
        self.jobs: dict[str, TrajectoryCollection] = {}
        """Every job there is; one that was sent twice is here once."""
        self.sent: list[str] = []
        self.step = 0
        self.logged: list[tuple[str, int | None, dict[str, float]]] = []
        self.keep_last: list[int] = []
        self.pruned: list[set[int]] = []
        """The steps that each pruning had to spare."""
        self.opened: list[tuple[str, int]] = []
        self.anew: list[str | None] = []
        self.hangs = False
        self.reason: str | None = None
        """Why its jobs make no gradient step; None: they make one."""
        self.moves = True
        """Whether a job publishes a new step."""
        self._steps: dict[str, int] = {}

    async def is_healthy(self) -> bool:
        return True

    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef:
        key = (trajectories.metadata or {})["key"]
        self.sent.append(key)
        before = self.jobs.setdefault(key, trajectories)
        assert before.model_dump_json() == trajectories.model_dump_json(), "another job, same key"
        if key not in self._steps and self.fail(key) is None:
            self.step += self.moves
            self._steps[key] = self.step
        return TrainingJobRef(
            run_id=trajectories.run_id, backend="memory", metadata={"job": f"job-{key}", "key": key}
        )

    async def status(self, ref: TrainingJobRef) -> TrainingJobStatus:
        key = (ref.metadata or {})["key"]
        why = self.fail(key)
        metadata = {
            "job": f"job-{key}",
            "step": self._steps.get(key),
            "metrics": {"learn/loss": 0.5},
            "reason": self.reason,
        }
        return TrainingJobStatus(
            run_id=ref.run_id,
            backend=ref.backend,
            status=TrainingStatusEnum.FAILED if why else TrainingStatusEnum.COMPLETED,
            message=why,
            metadata=metadata,
        )

    async def wait_until_complete(
        self, ref: TrainingJobRef, poll_interval: float = 10.0
    ) -> TrainingJobStatus:
        if self.hangs:
            await asyncio.Event().wait()
        return await self.status(ref)

    def log_progress(
        self, ref: TrainingJobRef, metrics: dict[str, Any], output_dir: str | None = None
    ) -> None: ...

    async def open_run(self, run_id: str, seed: int) -> None:
        self.opened.append((run_id, seed))

    async def policy_step(self) -> int | None:
        return self.step

    async def log_metrics(
        self, metrics: Mapping[str, float], *, split: str, step: int | None
    ) -> None:
        self.logged.append((split, step, dict(metrics)))

    async def prune(self, keep_last: int) -> None:
        self.keep_last.append(keep_last)
        self.pruned.append({*self.needed_steps})

    async def start_anew(self, old_run_id: str | None) -> None:
        self.anew.append(old_run_id)
        self.step = 0


class SickAdapter(MemoryAdapter):
    """An adapter of somebody's own whose backend is not well."""

    async def is_healthy(self) -> bool:
        return False
