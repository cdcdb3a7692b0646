"""`hone finetune`: run or resume a finetuning run.

In:   FinetuneOptions, as the command line fills them
Out:  an exit status: 0 only if every epoch was trained or had nothing to train on, 130 after
      Ctrl-C; the files of the run in output_dir

    read the configuration -> journal and events -> builder, adapter, trainer -> the server is
    reached -> training and validation sets -> preflight -> THE CLIENT LOOP (trainer.py) -> report

The workflow is built after the adapter, because a model can be called only when its server is
known. Everything is closed in reverse order, also after a failure.
"""

import asyncio
import logging
import shlex
import sys
import time
from collections import Counter
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hone.config.build import Builder, build
from hone.config.policy import describe
from hone.config.registry import is_alias
from hone.config.schema import Document, FinetuneConfig, FinetuneRunConfig
from hone.config.secrets import Secrets
from hone.errors import ConfigError, HoneError, ServerError
from hone.evaluation.run import Evaluation, evaluation
from hone.files.disk import write_atomic
from hone.files.event_log import FILE, EventLog
from hone.files.redact import redact
from hone.finetune.base import TrainerAdapter, TrainingJobStatus, TrainingStatusEnum
from hone.finetune.checks.documents import read_documents
from hone.finetune.checks.overlap import overlap
from hone.finetune.checks.plan import dry_run
from hone.finetune.checks.preflight import Check, failures, preflight
from hone.finetune.dataset_builder import dataset_config_of
from hone.finetune.fingerprint import evaluators_of, fingerprint_of, program, resume_arguments
from hone.finetune.journal import Journal
from hone.finetune.resume import RunState
from hone.loggers.process import Loggers
from hone.report.display import Display
from hone.report.text import counted
from hone.tasks.interrupt import INTERRUPTED, Interrupts
from hone.tasks.loop import run_loop
from hone.tasks.tally import cancel_all

log = logging.getLogger("hone")

LOGGED_CHECKS = ("cost", "time", "movement")
"""Checks whose messages are logged even if they pass."""
COMPLETED = TrainingStatusEnum.COMPLETED
COMPARED_VALIDATION = (
    "the evaluator {reward!r} compares the rollouts of one policy with each other, so the validation "
    "reward does not show whether the policy improves: the report has no verdict, no step is chosen as "
    "the best, and early stopping does not apply. Name a file in --validation_config_file in which "
    "{reward!r} is an evaluator of another type."
)
NO_DIFFERENCE = (
    ". Groups of equal rewards teach nothing: raise num_generations or `temperature`, or let the reward "
    "tell better answers from worse ones"
)


class FinetuneOptions(FinetuneRunConfig):
    """Options of the command line; `config_file` is always set."""

    fresh: bool = False
    dry_run: bool = False


def finetune(options: FinetuneOptions) -> int:
    """Run or resume; returns the exit status. If it is not 0, the last log line says why."""
    began, started = time.time(), time.monotonic()
    document, validation = read_documents(options)
    calls = any(logger.reads_calls for logger in document.loggers)
    config = document.finetuning.model_copy(
        update={"run_configuration": options, "record_calls": calls}
    )
    fingerprint = fingerprint_of(document, options, validation)
    fresh = options.fresh or config.resume == "never"
    if options.dry_run:
        lines, refusal = asyncio.run(
            dry_run(document, validation, options, fingerprint, fresh=fresh)
        )
        sys.stdout.write(redact("\n".join(lines)) + "\n")
        if refusal is not None:
            log.error("run: %s", refusal)
        return 0 if refusal is None else 1
    secrets = Secrets(document.loaded.data, options.override)
    with (
        Interrupts() as interrupts,
        Journal.open(
            config.output_dir, fingerprint, fresh=fresh, prefix=_prefix(document)
        ) as journal,
        EventLog(config.output_dir / FILE) as events,
        Display(events),
        Loggers(document.loggers, events) as loggers,
    ):
        run = Run(
            document,
            validation,
            config,
            options,
            journal,
            events,
            interrupts,
            loggers,
            secrets,
            began,
            started,
        )
        if run.state.is_finished(config.num_epochs):
            ended = run.state.history.finished
            message = ended and ended.message
            loggers.close()  # sends what is missing
            log.info("Run %s is finished, nothing to do. %s", journal.run_id, message)
            return 0
        try:
            status = run_loop(run.go())
        except (KeyboardInterrupt, asyncio.CancelledError):
            return run.interrupted()
        return run.interrupted() if interrupts.received else status


def _prefix(document: Document) -> str:
    """How the id of a run begins; with the toolkit's name of the trainer, as in its documents."""
    block = document.loaded.data["trainers"][document.finetuning.trainer]
    return "art_run" if is_alias("trainer", block) else "run"


@dataclass
class Run:
    """One session of a run, from its start to its end."""

    document: Document
    validation: Document | None
    """The document of --validation_config_file."""
    config: FinetuneConfig
    options: FinetuneOptions
    journal: Journal
    events: EventLog
    interrupts: Interrupts
    loggers: Loggers
    secrets: Secrets
    began: float
    """When the command started."""
    started: float
    """The same by the monotonic clock, for how long it takes."""

    def __post_init__(self) -> None:
        assert self.config.reward_name is not None, "no run is read without one"
        self.reward = self.config.reward_name
        self.state = RunState.follow(self.config, self.events)

    async def go(self) -> int:
        """Train, write the report, and return the exit status."""
        self.interrupts.cancel_on_interrupt()
        self._write_configuration()
        try:
            async with AsyncExitStack() as stack:
                statuses = await self._train(stack)
            status, message = self._verdict(statuses)
        except HoneError as error:
            status, message = TrainingStatusEnum.FAILED, str(error)
        if self.interrupts.received:  # also if closing failed
            raise asyncio.CancelledError
        history = self.state.history
        self.events.append(
            "run_finished",
            status=status,
            message=message,
            step=history.jobs[-1].step if history.jobs else history.run.step,
            best_step=None if history.best is None else history.best.step,
            seconds=time.monotonic() - self.started,
        )
        self.loggers.close()  # before the report, which counts those that stopped
        self._report()
        if status is COMPLETED:
            write = log.info if self._why_untrained() is None else log.warning
            write("%s", message)
            return 0
        log.error("%s", message)
        return 1

    async def _train(self, stack: AsyncExitStack) -> list[TrainingJobStatus]:
        """Build the components, run preflight, run the loop."""
        config, builder = self.config, await stack.enter_async_context(build(self.document))
        adapter = await builder.get_trainer_adapter(str(config.trainer_adapter))
        trajectories = await builder.get_trajectory_builder(str(config.trajectory_builder))
        trainer = await builder.get_trainer(
            str(config.trainer), trajectory_builder=trajectories, trainer_adapter=adapter
        )
        trainer.bind_run(self.journal, self.events, self.state)
        stack.push_async_callback(trainer.cleanup)
        await trainer.initialize(config)
        builder.served = adapter.served
        builder.choose_policy()
        # Conversations of a dataset are trained as they are, and never scored.
        scored = dataset_config_of(self.document) is None
        training = await self._evaluation(builder, self.options.dataset, scores_rows=scored)
        held_out = await self._validation(stack, builder)
        trainer.bind_evaluations(training, held_out)
        shared = overlap(training.items, held_out.items if held_out else [])
        await self._announce(
            adapter,
            examples=len(training.items),
            generations=trajectories.num_generations,
            validation_examples=shared.held_out,
            shared_inputs=len(shared.by_input),
            shared_ids=len(shared.by_id),
            relative=training.compares(),
            validation_relative=held_out is not None and held_out.compares(),
        )
        if shared.warning is not None:
            log.warning("%s", shared.warning)
            self.events.append("warning", message=shared.warning)
        if held_out is not None and held_out.compares():
            message = COMPARED_VALIDATION.format(reward=self.reward)
            log.warning("%s", message)
            self.events.append("warning", message=message)
        if builder.served is not None and builder.served.trained is not None:
            log.info("%s", describe(self.document, builder.served.trained, builder.policy))
        if not self.state.history.rounds:
            checks = await preflight(
                document=self.document,
                builder=builder,
                trajectory_builder=trajectories,
                trainer_adapter=adapter,
                evaluation=training,
                run_id=self.journal.run_id,
                validation_examples=shared.held_out,
                validation_interval=self.options.validation_interval,
            )
            self._refuse_failed(checks)
        return await self._while_served(adapter, trainer.run(config.num_epochs))

    async def _while_served(
        self, adapter: TrainerAdapter, work: Coroutine[Any, Any, list[TrainingJobStatus]]
    ) -> list[TrainingJobStatus]:
        """The result of the work; raises ServerError as soon as the backend has ended for good.

        Otherwise every rollout would fail on its own, after the retries of its clients.
        """
        working, ended = asyncio.create_task(work), asyncio.create_task(adapter.ended())
        try:
            await asyncio.wait((working, ended), return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            why = ended.result()
            raise ServerError(f"{why}\nThe same command resumes run {self.journal.run_id}.")
        finally:
            await cancel_all((working, ended))

    async def _evaluation(
        self, builder: Builder, dataset: Path | None, *, scores_rows: bool = True
    ) -> Evaluation:
        endpoint = self.options.endpoint
        return await evaluation(
            builder,
            dataset=dataset,
            result_json_path=self.options.result_json_path,
            evaluators=[self.reward],
            timeout_s=self.config.rollout_timeout_s,
            endpoint=(endpoint, self.options.endpoint_timeout) if endpoint else None,
            scores_rows=scores_rows,
        )

    async def _validation(self, stack: AsyncExitStack, builder: Builder) -> Evaluation | None:
        """The held-out set, if the command named one."""
        dataset = self.options.validation_dataset
        if self.validation is not None:
            served, policy = builder.served, builder.policy
            builder = await stack.enter_async_context(build(self.validation))
            builder.served = served
            builder.choose_policy(policy)
        elif dataset is None:
            return None
        return await self._evaluation(builder, dataset)

    async def _announce(self, adapter: TrainerAdapter, **sizes: int | None) -> None:
        resumed, step = self.journal.session > 1, await adapter.policy_step()
        arguments = self.secrets.hide_arguments(sys.argv[1:])
        fields = {
            "run_id": self.journal.run_id,
            "session": self.journal.session,
            "began": self.began,
            "config_file": str(self.options.config_file),
            "command": shlex.join(["hone", *arguments]),
            # Paths in the arguments and in the YAML file may be relative to this directory.
            "again": f"cd {shlex.quote(str(Path.cwd()))} && {program()} "
            + shlex.join(resume_arguments(arguments, self.config.resume)),
            "program": program(),
            "step": step,
            "epochs": self.config.num_epochs,
            "seed": self.config.seed,
            **sizes,
            "validation_interval": self.options.validation_interval,
            "validation_greedy": self.config.validation.greedy,
            **evaluators_of(self.reward, self.document, self.validation),
            **asdict(adapter.comparison),
            "output_dir": str(self.config.output_dir),
            "resumed": resumed,
        }
        self.events.append("run_started", **adapter.describe() | fields)
        if resumed:
            done = self.state.epochs_done(self.config.num_epochs)
            log.info("Resuming run %s: %s done", self.journal.run_id, done)
        elif step:
            log.warning(
                "The model is at step %d already, and this run begins there; --fresh begins at 0",
                step,
            )

    def _refuse_failed(self, checks: list[Check]) -> None:
        """Log the checks; raise ConfigError if one failed."""
        self.events.append("preflight", checks=[asdict(check) for check in checks])
        for check in (one for one in checks if one.ok):  # the others are raised below
            quiet = log.info if check.name in LOGGED_CHECKS else log.debug
            write = log.warning if check.warning else quiet
            write("Preflight: %s: %s", check.name, check.message)
        if wrong := failures(checks):
            messages = "\n".join(f"{check.name}: {check.message}" for check in wrong)
            failed = counted(len(wrong), "check")
            raise ConfigError(f"the run was not started; {failed} failed:\n{messages}")

    # ---- at the end -----------------------------------------------------------------------

    def _verdict(self, statuses: list[TrainingJobStatus]) -> tuple[TrainingStatusEnum, str]:
        run_id = self.journal.run_id
        bad = [one for one in statuses if one.status is not COMPLETED]
        if bad:
            epoch = (bad[0].metadata or {}).get("epoch", len(statuses) - 1)
            message = (bad[0].message or "").removeprefix(f"epoch {epoch + 1}: ")
            return bad[0].status, f"epoch {epoch + 1} of run {run_id}: {message}"
        if not statuses:
            return TrainingStatusEnum.FAILED, f"run {run_id}: the trainer trained no epoch"
        epochs, stopped = counted(len(statuses), "epoch"), self.state.reason_to_stop()
        is_early = stopped and len(statuses) < self.config.num_epochs
        if (why := self._why_untrained()) is not None:
            after = f" The run stopped early: {stopped}" if is_early else ""
            return COMPLETED, f"Nothing was trained in {epochs} of run {run_id}: {why}.{after}"
        if is_early:
            return COMPLETED, f"Stopped early after {epochs}: {stopped}"
        return COMPLETED, f"Finetuning completed successfully: {epochs}, run {run_id}"

    def _why_untrained(self) -> str | None:
        """Why no job of the run changed the model; None if one did."""
        jobs, rounds = self.state.history.jobs, self.state.history.rounds
        if not jobs:
            # A plugin's trainer may write neither.
            selected = any(r.metrics.get("filtered_trajectories") for r in rounds)
            return "the curriculum left no group to train on" if rounds and not selected else None
        reasons = Counter(job.reason for job in jobs)
        [(reason, count), *_] = reasons.most_common()
        if not all(reasons):
            return None
        most = f" ({count} of {counted(len(jobs), 'job')})" if len(reasons) > 1 else ""
        rounds = self.state.history.rounds
        groups = sum(r.metrics.get("num_groups") or 0 for r in rounds)
        advice = NO_DIFFERENCE if 0 < groups <= sum(r.num_flat for r in rounds) else ""
        return f"{(reason or '').strip().rstrip('.')}{most}{advice}"

    def interrupted(self) -> int:
        """Write a brief report; the exit status is 130, even if that fails."""
        history = self.state.history
        try:
            if history.finished is None:  # otherwise its report exists
                if history.run.session == self.journal.session:
                    self.events.append("run_interrupted")  # ends the running phase
                self._report(brief=True)
        except Exception as error:  # noqa: BLE001  # the exit status must be 130
            log.warning("The report could not be written: %s: %s", type(error).__name__, error)
        anew = self.options.fresh or self.config.resume == "never"
        more = " Leave out --fresh and finetuning.resume: never." if anew else ""
        log.error("Interrupted. The same command resumes run %s.%s", self.journal.run_id, more)
        return INTERRUPTED

    def _write_configuration(self) -> None:
        import yaml  # imported here: `import hone.finetune.run` should stay quick

        text = yaml.safe_dump(self.secrets.hide(self.document.loaded.data), sort_keys=False)
        write_atomic(self.config.output_dir / "config_effective.yml", text)

    def _report(self, *, brief: bool = False) -> None:
        """Write the report; there is none for a run that never started."""
        if not self.state.history.sessions:
            return
        from hone.report import report  # imported here: it loads matplotlib

        numbers = report.write(self.config.output_dir, brief=brief)
        if numbers["status"] == COMPLETED and self._why_untrained() is None:
            log.info("Result: %s", numbers["headline"])
        answers = numbers["answers"]
        if answers and answers["warning"]:
            log.warning("%s", answers["warning"])
        log.info("Report: %s", self.config.output_dir / "report.html")
