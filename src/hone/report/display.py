"""Progress of a run: a live display on a terminal, a line now and then elsewhere.

In:   the events of an EventLog, as a listener
Out:  text on stderr through progress.console(), so that log lines appear above the display

The run never waits for it: a separate thread draws the display four times a second. Without a
terminal, there is a line every ten seconds and one per epoch.
"""

import time
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Self

from hone.files.event_log import EventLog, read
from hone.files.events import (
    EpochDone,
    EpochStarted,
    Event,
    JobProgress,
    JobSubmitted,
    RolloutDone,
    RunFinished,
    RunInterrupted,
    RunStarted,
    ValidationStarted,
)
from hone.files.rollout_record import kinds_at_close
from hone.report.history import RunHistory
from hone.report.metrics import epoch_entry
from hone.report.text import counted, duration, number
from hone.tasks.progress import LINE_S, console, write

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

BLOCKS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
SPARKS = 28
"""Maximum number of blocks in the row of rewards, one per epoch."""
STAGES = {"rollouts", "learning", "validation"}


class State:
    """The progress of the run, according to its events."""

    def __init__(self) -> None:
        self.history = RunHistory()
        self.now = self.started_at = 0.0
        self.epoch = self.done = self.round = 0
        self.rounds = 1
        self.is_final = False
        """Whether two policies answer side by side, at the end of the run."""
        self._scored_before = False
        """Whether the evaluator of the stage's rollouts scored one before the stage."""
        self._paced_from: tuple[float, int] | None = None
        """When this session started working, and the number of epochs done by then."""
        self._done_at = 0.0
        self.start_stage("starting")

    def start_stage(self, stage: str, total: int = 0, resumed: int = 0) -> None:
        """`resumed`: rollouts that an earlier session finished."""
        self.stage, self.total, self.finished = stage, total, min(resumed, total)
        self.stage_at, self.failed, self.retried, self.tokens = self.now, 0, 0, 0
        self._ended: list[RolloutDone] = []

    def add(self, event: Event) -> None:
        self.now = event.at
        self.history.add(event)
        match event:
            case RunStarted():
                self.start_stage("starting")
                # The pace of an earlier session does not count: it may have run on another machine.
                self.started_at, self._paced_from = event.command_at, None
            case EpochStarted() | ValidationStarted():
                self._start_rollouts(event)
                self.is_final = isinstance(event, ValidationStarted) and event.final
            case RolloutDone():
                self.finished += 1
                self.tokens += event.tokens
                self.failed += event.failure_kind is not None
                self.retried += len(event.retried)
                self._ended.append(event)
            case JobSubmitted():
                self.start_stage("learning")
            case JobProgress():
                self.finished, self.total = event.progress
            case EpochDone():
                self.done = max(self.done, event.epoch + (event.status != "failed"))
                self._done_at = event.at
            case RunInterrupted():
                self.start_stage("interrupted")
            case RunFinished():
                self.start_stage(event.status)

    def _start_rollouts(self, event: EpochStarted | ValidationStarted) -> None:
        self.done = max(self.done, event.epoch)  # a resumed run does not repeat the first epochs
        if self._paced_from is None:
            self._paced_from = event.at, self.done
        if isinstance(event, EpochStarted):
            self.epoch, self.round, self.rounds = event.epoch, event.round, event.rounds
            self._scored_before = self.history.has_scored
        else:
            self._scored_before = self.history.has_scored_validation
        stage = "rollouts" if isinstance(event, EpochStarted) else "validation"
        self.start_stage(stage, event.rollouts, event.resumed)

    def left_s(self, now: float) -> float | None:
        """Estimated time left, at the pace of this session's epochs."""
        began_at, done_before = self._paced_from or (0.0, self.done)
        if self.done == done_before or self.stage not in STAGES:
            return None
        each = (self._done_at - began_at) / (self.done - done_before)
        spent = min(now - self._done_at, each)
        return max(0.0, each * (self.history.run.epochs - self.done) - spent)

    @property
    def rewards(self) -> dict[int, list[float]]:
        """Rewards of the stage that count, by epoch; failures of the model count as in the report.

        In the comparison at the end, two policies answer: those of two epochs.
        """
        ended, history = tuple(self._ended), self.history  # a copy: another thread reads it
        recorded = ((one.failure_kind, one.failure_reason) for one in ended)
        kinds = kinds_at_close(recorded, scored_before=self._scored_before)
        is_training = self.stage == "rollouts"
        instead = history.training_failure_reward if is_training else history.failure_reward
        rewards: dict[int, list[float]] = {}
        for one, kind in zip(ended, kinds, strict=True):
            reward = instead if kind == "policy" and one.reward is None else one.reward
            if kind != "infrastructure" and reward is not None:
                rewards.setdefault(one.epoch, []).append(reward)
        return rewards

    @property
    def where(self) -> str:
        if self.stage == "validation" and self.is_final:
            return "the first and the best step side by side"
        if self.stage == "validation":
            return f"after {counted(self.done, 'epoch')}"
        part = f", round {self.round + 1} of {self.rounds}" if self.rounds > 1 else ""
        return f"epoch {self.epoch + 1} of {self.history.run.epochs}{part}"

    def progress(self, now: float) -> str:
        """Progress of the stage."""
        if self.stage not in STAGES or not self.total:
            return ""
        if self.stage == "learning":
            return f"{self.finished} of {self.total} rows"
        parts = [f"{self.finished} of {self.total}"]
        means = {epoch: number(fmean(rewards)) for epoch, rewards in self.rewards.items()}
        if self.is_final:
            means = {k: f"{mean} after {counted(k, 'epoch')}" for k, mean in sorted(means.items())}
        if means:
            parts.append(f"reward so far {' and '.join(means.values())}")
        if self.failed:
            parts.append(f"{self.failed} failed")
        if self.retried:
            parts.append(f"{self.retried} retried")
        if self.tokens and now > self.stage_at:
            parts.append(f"{self.tokens / (now - self.stage_at):,.0f} tokens/s")
        return ", ".join(parts)

    def epoch_line(self, ended: EpochDone) -> str:
        """The reward of an epoch, and how long the rest will take."""
        failed, history = ended.status == "failed", self.history
        rounds = history.rounds_of(ended.epoch)
        parts = []
        if rounds:
            parts.append(f"reward {number(epoch_entry(ended.epoch, rounds)['avg_reward'])}")
        parts.append(duration(self.now - self.started_at))
        if not failed and (left := self.left_s(self.now)):
            parts.append(f"about {duration(left)} left")
        status = "failed" if failed else "done"
        return f"epoch {ended.epoch + 1} of {history.run.epochs} {status}: {', '.join(parts)}"


class Display:
    """Shows the events of a log while it is open."""

    def __init__(self, events: EventLog, *, clock: Callable[[], float] = time.time) -> None:
        self.events, self.state = events, State()
        self._clock = clock
        self._live: Live | None = None
        self._written_at = 0.0

    def __enter__(self) -> Self:
        for event in read(self.events.path):  # a resumed run shows its whole curve
            self.state.add(event)
        self.state.start_stage("starting")  # not the stage in which the last session ended
        self.state.started_at = self._clock()
        self.events.listeners.append(self.add)
        if console().is_terminal:
            from rich.live import Live  # imported here: it takes 0.2 s, and a log does not need it

            self._live = Live(console=console(), get_renderable=self.picture, refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.events.listeners.remove(self.add)
        if self._live is not None:
            self._live.stop()

    def add(self, event: Event) -> None:
        """Update the state; without a terminal, perhaps write a line."""
        state = self.state
        state.add(event)
        if self._live is not None:
            return
        if isinstance(event, EpochDone):
            write(state.epoch_line(event))
        elif not isinstance(event, EpochStarted | ValidationStarted | JobSubmitted):
            if state.stage not in STAGES or state.now - self._written_at < LINE_S:
                return
            write(f"{state.where}: {state.stage} {state.progress(state.now)}".rstrip())
        self._written_at = state.now

    def picture(self) -> "Table":
        """One row each for the run, the stage, and the rewards so far."""
        from rich.progress_bar import ProgressBar
        from rich.table import Column, Table
        from rich.text import Text

        state, history, now = self.state, self.state.history, self._clock()
        columns = (Column(no_wrap=True), Column(no_wrap=True), Column(overflow="fold"))
        grid = Table.grid(*columns, padding=(0, 2))
        if history.run.epochs:  # otherwise the server is not up yet
            times = [duration(now - state.started_at)] if state.started_at else []
            times += [f"about {duration(left)} left"] if (left := state.left_s(now)) else []
            bar = ProgressBar(history.run.epochs, state.done, SPARKS)
            grid.add_row(Text(state.where, "bold"), bar, ", ".join(times))
        works = state.stage in STAGES
        bar = ProgressBar(state.total or None, state.finished, SPARKS) if works else ""
        grid.add_row(Text(state.stage), bar, Text(state.progress(now), "dim"))
        for name, values in {
            "training": [r.metrics.get("avg_reward") for r in history.rounds],
            "held out": [v.mean for v in history.validations],
        }.items():
            if known := [v for v in values if v is not None]:
                ends = f"{number(known[0])} to {number(known[-1])}"
                grid.add_row(name, Text(sparks(values, console().encoding), "cyan"), ends)
        return grid


def sparks(values: Sequence[float | None], encoding: str = "utf-8") -> str:
    """The newest values as blocks of eight heights; a gap where there is none."""
    known = [v for v in values if v is not None]
    blocks = BLOCKS if encoding.lower().startswith("utf") else "_.-=+*#@"
    # From 0 for the usual rewards, so that a small change does not look like a large one.
    low = min([*known, 0.0])
    span = max([*known, 0.0 if low < 0 else 1.0]) - low
    heights = [v if v is None else int((v - low) / span * 7.999) for v in values[-SPARKS:]]
    return "".join(" " if height is None else blocks[height] for height in heights)
