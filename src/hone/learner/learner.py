"""The learner: trains an adapter on the groups of a job.

In:   TrajectoryGroups and a TrainConfig
Out:  the adapter, updated in place, and a StepResult

A job is atomic: whatever ends it early (a non-finite loss, a cancellation, an error) leaves adapter and
optimizer as they were before. A half-trained adapter under an old step number would look like the real
one.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from hone.errors import Cancelled, NonFinite
from hone.learner.body import Body, as_body
from hone.learner.forward import row_logprobs
from hone.learner.loss import RowLabels, penalised, row_loss, weights
from hone.learner.metrics import Clock, Totals
from hone.learner.offload import to_device
from hone.learner.optim import AdamW
from hone.learner.preference import preference, step_pairs
from hone.learner.probe import Movement, ProbeCalls
from hone.learner.samples import Samples, by_optimizer_step, make_samples
from hone.learner.trie import Batch, pack
from hone.models.decoder import Decoder
from hone.models.lora import Lora, target_modules
from hone.trajectory import TrajectoryGroup
from hone.types import TrainConfig


@dataclass(frozen=True, slots=True)
class JobProgress:
    """The progress of a job; sent before every micro-batch (one row)."""

    phase: str
    step: int
    """Optimizer step, from 0."""
    steps: int
    row: int
    """Row of the optimizer step, from 0."""
    rows: int
    done: int
    """Rows of the job that are computed, in all passes."""
    total: int
    """Rows of the job in all passes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The result of a job."""

    steps: int
    """Optimizer steps taken."""
    reason: str
    """Why none was taken; empty otherwise."""
    metrics: dict[str, float]
    dropped: dict[str, int]
    """Completion tokens without a label, by reason."""
    movement: Movement
    """Probe tokens that the publisher compares with the engine's."""
    sha256: str
    """Hash of the adapter after the job."""
    logprobs: tuple[float, ...] | None = None
    """Log-probabilities of all labels before the job, in the samples' order, if requested; with the losses
    sft and dpo, before the optimizer step that trains them."""


OnProgress = Callable[[JobProgress], None]
ShouldStop = Callable[[], bool]


class Learner:
    """One rank: a frozen model, an adapter, its optimizer."""

    def __init__(self, model: Decoder | Body, lora: Lora, *, base_model: str) -> None:
        self.body = as_body(model)
        self.base_model = base_model
        self.lora = lora.trainable_()
        self.optimizer = AdamW(self.lora.parameters())
        self._last_job: _Drawable | None = None

    def train(
        self,
        groups: Sequence[TrajectoryGroup],
        config: TrainConfig,
        *,
        on_progress: OnProgress | None = None,
        should_stop: ShouldStop | None = None,
        probe: bool = True,
        label_logprobs: bool = False,
    ) -> StepResult:
        """Train on the groups; calls `should_stop` before every row."""
        body = self.body
        row_tokens = config.row_tokens or self.most_row_tokens()
        clock = Clock()
        with clock.phase("pack"):
            samples = make_samples(
                groups, config, vocab=body.vocab, max_positions=body.max_positions
            )
            layout = {"shared": not body.unshared, "fill": body.fills_rows}
            steps = by_optimizer_step(samples, config)
            batches = [pack(step, row_tokens=row_tokens, **layout) for step in steps]
        job = _Job(self, batches, config, clock, on_progress, should_stop, keep=label_logprobs)
        if config.loss == "dpo":
            job.pairs = [step_pairs(step) for step in steps]
        probed = ProbeCalls.choose(samples.samples if probe else (), body.dtype)
        lengths = {len(row) for batch in batches for row in batch.rows}
        body.restore(self.lora.rank)
        with self._atomic():
            with clock.phase("probe"):
                before = probed.logprobs(body, self.lora, lengths)
            job.run()
            with clock.phase("probe"):
                after = probed.logprobs(body, self.lora, lengths)
        metrics = job.totals.metrics(config) | _counts(samples, batches) | clock.metrics()
        metrics["learn/row_tokens"] = float(row_tokens)
        busy = metrics["learn/step_s"] - metrics.get("learn/probe_s", 0.0)
        metrics["learn/tokens_per_s"] = metrics["learn/logical_tokens"] / busy
        logprobs = tuple(torch.cat(job.old_logprobs).tolist()) if job.old_logprobs else None
        if label_logprobs:
            pinned = config.model_copy(update={"row_tokens": row_tokens})
            self._last_job = _Drawable(samples, pinned, layout, logprobs)
        return StepResult(
            steps=len(batches),
            reason="" if batches else _why_no_step(samples, len(groups)),
            metrics=metrics,
            dropped=dict(samples.dropped),
            movement=probed.movement(before, after),
            sha256=self.lora.sha256,
            logprobs=logprobs,
        )

    def release(self, *, weights: bool) -> None:
        """Free device memory between two jobs; with `weights` also that of the base model."""
        self.optimizer.zero_grad()
        self.body.release(weights=weights)

    def most_row_tokens(self) -> int:
        """The value that `row_tokens: null` stands for."""
        return self.body.row_tokens(self.lora.rank)

    def save(self, directory: Path, *, picture: bool = False) -> None:
        """Write the adapter in PEFT's format and the optimizer state; equal learners write equal bytes.

        `picture` adds a picture of the last job, which must have run with `label_logprobs`.
        """
        self.lora.save(directory, base_model=self.base_model)
        self.optimizer.save(directory)
        if picture:
            from hone.learner.picture import PICTURE, draw  # loads matplotlib only when it draws

            assert self._last_job is not None, "train with label_logprobs first"
            job, path = self._last_job, directory / PICTURE
            draw(job.samples, job.config, path, learner_logprobs=job.logprobs, **job.layout)
            self._last_job = None

    def load(self, directory: Path, *, optimizer: bool = True) -> None:
        """Continue from a checkpoint."""
        layout = self.body.layout_of(target_modules(directory))
        lora = Lora.load(directory, layout, device=self.body.device).trainable_()
        state = AdamW(lora.parameters())
        if optimizer:
            state.load(directory)
        self.lora, self.optimizer = lora, state

    @contextmanager
    def _atomic(self) -> Iterator[None]:
        start = self.optimizer.snapshot()
        done = False
        try:
            yield
            done = True
        finally:
            if not done:
                self.optimizer.restore(start)


@dataclass(frozen=True, slots=True)
class _Drawable:
    """A finished job, for its picture."""

    samples: Samples
    config: TrainConfig
    layout: dict[str, bool]
    """Keywords with which its samples were packed."""
    logprobs: tuple[float, ...] | None


class _Job:
    """One call of `train`: the passes over its rows."""

    def __init__(
        self,
        learner: Learner,
        batches: list[Batch],
        config: TrainConfig,
        clock: Clock,
        on_progress: OnProgress | None,
        should_stop: ShouldStop | None,
        *,
        keep: bool,
    ) -> None:
        self.learner = learner
        self.batches = batches
        self.config = config
        self.clock = clock
        self.totals = Totals()
        self.keep = keep
        self.pairs: list[Tensor] = []
        """Per optimizer step, the pairs of its samples, [P, 2]; only for the loss dpo."""
        self.old_logprobs: list[Tensor] = []
        """Per optimizer step, what StepResult.logprobs holds of its labels, if requested."""
        self._on_progress = on_progress
        self._should_stop = should_stop
        self._done = self._total = 0

    def run(self) -> None:
        config, batches = self.config, self.batches
        # In the first optimizer step the old policy is the one being differentiated; only the
        # penalty's mean over the step needs its values before the first row is trained.
        first = 0 if config.kl_penalty_coef > 0 else 1
        needs_reference = config.beta > 0 or config.kl_penalty_coef > 0 or config.loss == "dpo"
        old: list[Tensor | None] = [None] * len(batches)
        reference: list[Tensor | None] = [None] * len(batches)
        rows = [len(batch.rows) for batch in batches]
        self._total = sum(rows) * (1 + needs_reference + (config.loss == "dpo"))
        self._total += sum(rows[first:]) if config.is_on_policy else 0
        if config.is_on_policy:
            for i in range(first, len(batches)):
                old[i] = self._score(i, "old", self.learner.lora)
        if needs_reference:
            lora = self.learner.lora if config.dpo_reference == "job" else None
            reference = [self._score(i, "reference", lora) for i in range(len(batches))]
        for i in range(len(batches)):
            self._step(i, old[i], reference[i])
        if batches:  # no loss follows the last step, so nothing else would show an overflow
            leaves = [leaf.detach() for _, leaf in self.learner.optimizer.parameters]
            last = len(batches) - 1, len(batches[-1].rows) - 1
            _finite(get_total_norm(leaves).item(), "the adapter's norm", *last)

    def _step(self, index: int, old: Tensor | None, reference: Tensor | None) -> None:
        batch, config = self.batches[index], self.config
        body, lora, optimizer = self.learner.body, self.learner.lora, self.learner.optimizer
        weight, advantage = weights(batch.labels, config), batch.labels.advantage
        loss_of_step = 0.0
        if config.kl_penalty_coef > 0:
            assert old is not None and reference is not None, "run() scores both for the penalty"
            advantage = penalised(advantage, old, reference, config.kl_penalty_coef)
        if config.loss == "dpo":
            advantage, loss_of_step = self._prefer(index, reference)
        if self.keep:
            self.old_logprobs.append(torch.empty(len(batch.labels), dtype=torch.float64))
        optimizer.zero_grad()
        norms: list[Tensor] = []  # of the gradient so far, after every row
        for r, row in enumerate(batch.rows):
            self._report("train", index, r)
            with self.clock.phase("forward"):
                new, entropy = row_logprobs(body, row, batch.labels, lora)
                # The only wait for the device in a row: what the loss needs, at once.
                values, entropies = torch.stack((new.detach(), entropy)).cpu()
                values.requires_grad_()
                picked = RowLabels(
                    old=values.detach().double() if old is None else old[row.label],
                    sampler=batch.labels.sampler_logprob[row.label],
                    exact=batch.labels.exact[row.label],
                    advantage=advantage[row.label],
                    weight=weight[row.label],
                    reference=None if reference is None else reference[row.label],
                )
                if self.keep:
                    self.old_logprobs[index][row.label] = picked.old
                loss, sums = row_loss(values, picked, config)
                share = _finite(loss.item(), "the loss", index, r)
                if config.loss != "dpo":  # whose value is that of the pairs
                    loss_of_step += share
            with self.clock.phase("backward"):
                (slope,) = torch.autograd.grad(loss, values)
                new.backward(to_device(slope, new.device))
                norms.append(get_total_norm(optimizer.grads))
            self.totals.add(sums | {"entropy": entropies.double().sum()})
        with self.clock.phase("backward"):
            grad_norms = torch.stack(norms).tolist()
            for r, norm in enumerate(grad_norms):
                _finite(norm, "the gradient's norm", index, r)
        with self.clock.phase("optimizer"):
            leaves = [leaf for _, leaf in optimizer.parameters]
            clip_grads_with_norm_(leaves, config.max_grad_norm, norms[-1])
            rate = config.learning_rate_of(index)
            optimizer.step(learning_rate=rate, weight_decay=config.weight_decay)
        self.totals.close_step(batch.labels, loss=loss_of_step, grad_norm=grad_norms[-1])

    def _prefer(self, index: int, reference: Tensor | None) -> tuple[Tensor, float]:
        """DPO's advantages of a step's labels, and its loss, by a pass without gradients."""
        assert reference is not None, "run() scores the reference for dpo"
        policy, pairs = self._score(index, "policy", self.learner.lora), self.pairs[index]
        rollout = self.batches[index].labels.rollout
        preferred = preference(policy, reference, rollout, pairs, self.config)
        self.totals.add_pairs(len(pairs), preferred.sums)
        return preferred.advantage, _finite(preferred.loss, "the loss", index, 0)

    @torch.no_grad()
    def _score(self, index: int, phase: str, lora: Lora | None) -> Tensor:
        """Log-probabilities of all labels of an optimizer step, without gradients, [M] float64."""
        batch = self.batches[index]
        values = torch.empty(len(batch.labels), dtype=torch.float64)
        for r, row in enumerate(batch.rows):
            self._report(phase, index, r)
            with self.clock.phase(phase):
                scored, _ = row_logprobs(self.learner.body, row, batch.labels, lora)
                values[row.label] = scored.double().cpu()
        return values

    def _report(self, phase: str, step: int, row: int) -> None:
        if self._should_stop is not None and self._should_stop():
            raise Cancelled(
                f"optimizer step {step}, micro-batch {row} ({phase}): the job was asked to stop; "
                "adapter and optimizer are as they were before it."
            )
        if self._on_progress is not None:
            steps, rows = len(self.batches), len(self.batches[step].rows)
            self._on_progress(JobProgress(phase, step, steps, row, rows, self._done, self._total))
        self._done += 1


def _finite(value: float, what: str, step: int, row: int) -> float:
    if value - value != 0:
        raise NonFinite(
            f"optimizer step {step}, micro-batch {row}: {what} is {value!r}; adapter and optimizer are as they were before the job. "
            "Lower learning_rate, or look for extreme rewards or logprobs in this job."
        )
    return value


def _counts(samples: Samples, batches: list[Batch]) -> dict[str, float]:
    counts = {
        "learn/optimizer_steps": len(batches),
        "learn/micro_batches": sum(len(batch.rows) for batch in batches),
        "learn/groups": samples.groups,
        "learn/flat_groups": samples.flat_groups,
        "learn/flat_rollouts": samples.flat_rollouts,
        "learn/rollouts": len(samples.samples),
        "learn/long_rollouts": samples.long_rollouts,
        "learn/logical_tokens": sum(batch.logical_tokens for batch in batches),
        "learn/computed_tokens": sum(batch.computed_tokens for batch in batches),
        "learn/shared_tokens": sum(batch.shared_tokens for batch in batches),
    }
    call_steps = [call.step for sample in samples.samples for call in sample.calls]
    if call_steps:  # staleness is the job's base step minus the oldest
        counts |= {"learn/oldest_call_step": min(call_steps)}
        counts |= {"learn/newest_call_step": max(call_steps)}
    dropped = {f"learn/labels_dropped/{why}": n for why, n in samples.dropped.items()}
    return {name: float(n) for name, n in (counts | dropped).items()}


def _why_no_step(samples: Samples, groups: int) -> str:
    reasons = [f"{samples.flat_groups} of {groups} groups have equal rewards"]
    if samples.long_rollouts:
        reasons.append(f"{samples.long_rollouts} rollouts are longer than max_seq_length")
    in_reasons = {"flat_group", "too_long"}
    others = [
        f"{why}: {n} tokens" for why, n in sorted(samples.dropped.items()) if why not in in_reasons
    ]
    if others or not samples.dropped:
        reasons.append(f"no token is left to train ({', '.join(others) or 'no calls'})")
    return f"no gradient step: {'; '.join(reasons)}"
