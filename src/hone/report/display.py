"""Progress of a run: a live display on a terminal, a line now and then elsewhere.

In:   the events of an EventLog, as a listener
Out:  text on stderr through progress.console(), so that log lines appear above the display

Nothing waits for it: a thread of its own draws the display four times a second, and a log file gets
a line every ten seconds and one per epoch.
"""

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Self

from hone.event_log import EventLog, read
from hone.events import (
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
from hone.progress import LINE_S, console, write
from hone.report.history import History
from hone.report.text import counted, duration, number

if TYPE_CHECKING:
    from rich.console import Group
    from rich.live import Live

BLOCKS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
SPARKS = 28
"""Longest row of blocks, one per epoch."""
STAGES = {"rollouts", "learning", "validation"}


class State:
    """Where the run stands, according to its events."""

    def __init__(self) -> None:
        self.epochs = self.epoch = self.done = 0
        self.round, self.rounds = 0, 1
        self.stage, self.finished, self.total = "starting", 0, 0
        self.failed = self.tokens = 0
        self.rewards: list[float] = []
        """Rewards of this stage."""
        self._history = History()
        self.status: str | None = None
        self.started_at = self.stage_at = self.now = 0.0
        self._durations: list[float] = []
        self._epoch_at: float | None = None

    @property
    def training(self) -> dict[tuple[int, int], float | None]:
        """Mean training reward by epoch and round."""
        return {(r.epoch, r.index): r.metrics.get("avg_reward") for r in self._history.rounds}

    @property
    def held_out(self) -> dict[int, float | None]:
        """Mean held-out reward by epochs trained."""
        return {v.epoch: v.mean for v in self._history.validations}

    def add(self, event: Event) -> None:
        self.now = event.at
        self._history.add(event)
        match event:
            case RunStarted():
                self._start_run(event)
            case EpochStarted():
                self.epoch, self.round, self.rounds = event.epoch, event.round, event.rounds
                self._start_stage("rollouts", event)
            case ValidationStarted():
                self._start_stage("validation", event)
            case RolloutDone():
                self._add_rollout(event)
            case JobSubmitted():
                self._reset_stage("learning")
            case JobProgress():
                rows = event.rows or 1
                self.total = event.steps * rows
                self.finished = max(0, event.step - 1) * rows + (event.row or 0)
            case EpochDone():
                self._end_epoch(event)
            case RunInterrupted():
                self.status = self.stage = "interrupted"
            case RunFinished():
                self.status = self.stage = event.status

    def start_again(self, now: float) -> None:
        """Forget the stage in which the last session ended."""
        self._reset_stage("starting")
        self.status, self.started_at = None, now

    @property
    def mean(self) -> float | None:
        """Mean reward of this stage so far."""
        return sum(self.rewards) / len(self.rewards) if self.rewards else None

    def tokens_per_s(self, now: float) -> float | None:
        seconds = now - self.stage_at
        return self.tokens / seconds if self.tokens and seconds > 0 else None

    def left_s(self, now: float) -> float | None:
        """Estimated time left, at the pace of this session's epochs."""
        if not self._durations or self.status is not None:
            return None
        each = sum(self._durations) / len(self._durations)
        spent = 0.0 if self._epoch_at is None else min(now - self._epoch_at, each)
        return max(0.0, each * (self.epochs - self.done) - spent)

    def _start_run(self, event: RunStarted) -> None:
        self.epochs, self.stage, self.status = event.epochs, "starting", None
        self.started_at = event.command_at
        # The pace of an earlier session, perhaps on another machine, says nothing about this one.
        self._durations, self._epoch_at = [], None

    def _start_stage(self, stage: str, event: EpochStarted | ValidationStarted) -> None:
        self._reset_stage(stage, event.rollouts, event.resumed)
        self.done = max(self.done, event.epoch)  # a resumed run does not repeat the first epochs
        if self._epoch_at is None and event.epoch < self.epochs:
            self._epoch_at = event.at

    def _reset_stage(self, stage: str, total: int = 0, resumed: int = 0) -> None:
        """`resumed`: rollouts that an earlier session finished."""
        self.stage, self.total, self.stage_at = stage, total, self.now
        self.finished, self.failed, self.tokens = min(resumed, total), 0, 0
        self.rewards = []

    def _add_rollout(self, event: RolloutDone) -> None:
        self.finished += 1
        self.tokens += event.tokens or 0
        self.failed += event.failure_kind is not None
        if event.reward is not None:
            self.rewards.append(event.reward)

    def _end_epoch(self, event: EpochDone) -> None:
        if event.status != "failed":
            self.done = event.epoch + 1
        if self._epoch_at is not None:
            self._durations.append(event.at - self._epoch_at)
        self._epoch_at = None


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
        self.state.start_again(self._clock())
        self.events.listeners.append(self.add)
        if console().is_terminal:
            from rich.live import Live  # here, because it takes 0.2 s and a log needs none

            self._live = Live(console=console(), get_renderable=self.picture, refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.events.listeners.remove(self.add)
        if self._live is not None:
            self._live.stop()

    def add(self, event: Event) -> None:
        """Update the state; without a terminal, perhaps write a line."""
        self.state.add(event)
        if self._live is None:
            self._write_line(event)

    # ---- lines ----------------------------------------------------------------------------

    def _write_line(self, event: Event) -> None:
        state = self.state
        if isinstance(event, EpochDone):
            write(self.epoch_line(event))
        elif not isinstance(event, EpochStarted | ValidationStarted | JobSubmitted):
            if state.stage not in STAGES or state.now - self._written_at < LINE_S:
                return
            name = "" if state.stage == "learning" else f"{state.stage} "
            write(f"{self._where()}: {name}{self.stage_line(state.now)}")
        self._written_at = state.now

    def epoch_line(self, ended: EpochDone) -> str:
        """The rewards of an epoch, and how long the rest will take."""
        state, epoch, failed = self.state, ended.epoch, ended.status == "failed"
        rewards = [mean for (of, _), mean in state.training.items() if of == epoch]
        parts = [f"reward {number(rewards[-1])}"] if rewards else []
        if epoch in state.held_out:  # validated in this epoch, before it was trained
            mean = state.held_out[epoch]
            parts.append(
                "no held-out reward" if mean is None else f"held out {number(mean)} before it"
            )
        parts.append(duration(state.now - state.started_at))
        left = None if failed else state.left_s(state.now)
        parts += [f"about {duration(left)} left"] if left else []
        status = "failed" if failed else "done"
        return f"epoch {epoch + 1} of {state.epochs} {status}: {', '.join(parts)}"

    def stage_line(self, now: float) -> str:
        """Progress of the stage."""
        state, rate = self.state, self.state.tokens_per_s(now)
        if state.stage not in STAGES:
            return ""
        if state.stage == "learning":
            rows = f", {state.finished} of {state.total} rows" if state.total else ""
            return f"learning{rows}"
        parts = [f"{state.finished} of {state.total}"]
        parts += [] if state.mean is None else [f"reward so far {number(state.mean)}"]
        parts += [f"{state.failed} failed"] if state.failed else []
        parts += [] if rate is None else [f"{rate:,.0f} tokens/s"]
        return ", ".join(parts)

    def _where(self) -> str:
        state = self.state
        if state.stage == "validation":
            return f"after {counted(state.done, 'epoch')}"
        part = f", round {state.round + 1} of {state.rounds}" if state.rounds > 1 else ""
        return f"epoch {state.epoch + 1} of {state.epochs}{part}"

    # ---- the picture ----------------------------------------------------------------------

    def picture(self) -> "Group":
        """One row each for the run, the stage, and the rewards so far."""
        from rich.console import Group
        from rich.table import Column, Table
        from rich.text import Text

        state, now = self.state, self._clock()
        if not state.epochs:  # the server is not up yet, so nothing is known about the run
            return Group(Text(state.stage))
        columns = (Column(no_wrap=True), Column(no_wrap=True), Column(overflow="fold"))
        grid = Table.grid(*columns, padding=(0, 2))
        left = state.left_s(now)
        times = [duration(now - state.started_at)] if state.started_at else []
        times += [f"about {duration(left)} left"] if left else []
        bar = _bar(self._share(), 1.0)
        grid.add_row(Text(self._where(), "bold"), bar, Text(", ".join(times)))
        of_stage = _bar(state.finished, state.total) if state.status is None else Text("")
        grid.add_row(Text(state.stage), of_stage, Text(self.stage_line(now), "dim"))
        for name, by_place in (("training", state.training), ("held out", state.held_out)):
            if values := [*by_place.values()]:
                known = [v for v in values if v is not None]
                ends = f"{number(known[0])} to {number(known[-1])}" if known else "no number yet"
                line = Text(sparks(values, console().encoding), "cyan")
                grid.add_row(Text(name), line, Text(ends))
        return Group(grid)

    def _share(self) -> float:
        """Share of the whole run that is done; a stage counts as half an epoch."""
        state = self.state
        if not state.epochs or state.status is not None:
            return 1.0 if state.status == "completed" else state.done / max(state.epochs, 1)
        here = min(1.0, state.finished / state.total) / 2 if state.total else 0.0
        here += 0.5 if state.stage == "learning" else 0.0
        inside = (state.round + here) / max(state.rounds, 1) if state.stage != "validation" else 0.0
        return min(1.0, (state.done + inside) / state.epochs)


def _bar(done: float, total: float) -> Any:
    from rich.progress_bar import ProgressBar

    return ProgressBar(total=total or None, completed=done, width=SPARKS, pulse=False)


def sparks(values: Sequence[float | None], encoding: str = "utf-8") -> str:
    """The newest values as blocks of eight heights; a gap where there is none."""
    shown = values[-SPARKS:]
    known = [v for v in values if v is not None]
    blocks = BLOCKS if encoding.lower().startswith("utf") else "_.-=+*#@"
    if not known:
        return " " * len(shown)
    # From 0 for the usual rewards, so that a small change does not look like a large one.
    low, high = min(*known, 0.0), max(*known, 1.0 if min(known) >= 0 else 0.0)
    span = (high - low) or 1.0
    return "".join(" " if v is None else blocks[int((v - low) / span * 7.999)] for v in shown)
