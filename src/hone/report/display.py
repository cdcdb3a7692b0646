"""A run as it goes on: one picture on a terminal, a line now and then elsewhere.

In:   the events of an EventLog, as a listener
Out:  text on stderr through progress.console(), so that log lines stand above the picture

It knows only what the events say, and nothing waits for it: the picture is drawn by a thread of its
own four times a second, and a log file gets a line every ten seconds and one for every epoch.
"""

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Self

from hone.events import Event, EventLog, read
from hone.progress import LINE_S, console, write
from hone.report.history import History
from hone.report.text import counted, duration, number

if TYPE_CHECKING:
    from rich.console import Group
    from rich.live import Live

BLOCKS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
SPARKS = 28
"""So many epochs at most are drawn as a row of blocks."""
STAGES = {"rollouts", "learning", "validation"}


class State:
    """Where the run stands, as far as its events tell."""

    def __init__(self) -> None:
        self.epochs = self.epoch = self.done = 0
        self.round, self.rounds = 0, 1
        self.stage, self.finished, self.total = "starting", 0, 0
        self.failed = self.tokens = 0
        self.rewards: list[float] = []
        """Of the rollouts of this stage."""
        self.training: dict[tuple[int, int], float | None] = {}
        """By epoch and round."""
        self._history = History()
        self.ended: Event | None = None
        """The newest epoch_done."""
        self.status: str | None = None
        self.started_at = self.stage_at = self.now = 0.0
        self._durations: list[float] = []
        self._epoch_at: float | None = None

    @property
    def held_out(self) -> dict[int, float | None]:
        """By epochs trained; counted anew where the reward of failures fell."""
        return {v.epoch: v.mean for v in self._history.validations}

    def add(self, event: Event) -> None:
        self.now = event["at"]
        self._history.add(event)
        reader = _READERS.get(event["type"])
        if reader is not None:
            reader(self, event)

    def start_again(self, now: float) -> None:
        """What was going on when the last session ended goes on no longer."""
        self.stage, self.status, self.started_at = "starting", None, now
        self.finished = self.total = self.failed = self.tokens = 0
        self.rewards = []

    @property
    def mean(self) -> float | None:
        """Reward of this stage so far."""
        return sum(self.rewards) / len(self.rewards) if self.rewards else None

    def tokens_per_s(self, now: float) -> float | None:
        seconds = now - self.stage_at
        return self.tokens / seconds if self.tokens and seconds > 0 else None

    def left_s(self, now: float) -> float | None:
        """As long as the epochs of this session took on average, less what this one has taken."""
        if not self._durations or self.status is not None:
            return None
        each = sum(self._durations) / len(self._durations)
        spent = 0.0 if self._epoch_at is None else min(now - self._epoch_at, each)
        return max(0.0, each * (self.epochs - self.done) - spent)

    # ---- how each type is read ------------------------------------------------------------

    def _run_started(self, event: Event) -> None:
        self.epochs, self.status = event["epochs"], None
        self.started_at = event.get("began", event["at"])
        # The pace of an earlier session, perhaps on another machine, says nothing about this one.
        self._durations, self._epoch_at = [], None
        self.stage = "starting"

    def _epoch_started(self, event: Event) -> None:
        self.epoch, self.round, self.rounds = event["epoch"], event["round"], event["rounds"]
        self.done = max(self.done, self.epoch)  # of a run that goes on, the first ones are done
        if self._epoch_at is None:
            self._epoch_at = event["at"]
        self._begin("rollouts", event)

    def _validation_started(self, event: Event) -> None:
        self.done = max(self.done, event["epoch"])
        if self._epoch_at is None and event["epoch"] < self.epochs:
            self._epoch_at = event["at"]
        self._begin("validation", event)

    def _begin(self, stage: str, event: Event) -> None:
        """Rollouts that an earlier session has ended are done already."""
        self.stage, self.total, self.stage_at = stage, event.get("rollouts") or 0, self.now
        self.finished = min(event.get("resumed") or 0, self.total)
        self.failed = self.tokens = 0
        self.rewards = []

    def _rollout(self, event: Event) -> None:
        self.finished += 1
        self.tokens += event["tokens"] or 0
        if event["failure_kind"]:
            self.failed += 1
        if event["reward"] is not None:
            self.rewards.append(event["reward"])

    def _collected(self, event: Event) -> None:
        place = event["epoch"], event["round"]
        self.training[place] = event["metrics"].get("avg_reward")

    def _job_submitted(self, event: Event) -> None:
        self._begin("learning", {})

    def _job_progress(self, event: Event) -> None:
        rows = event.get("rows") or 1
        self.total = event["steps"] * rows
        self.finished = max(0, event["step"] - 1) * rows + (event.get("row") or 0)

    def _epoch_done(self, event: Event) -> None:
        self.ended = event
        if event["status"] != "failed":
            self.done = event["epoch"] + 1
        if self._epoch_at is not None:
            self._durations.append(event["at"] - self._epoch_at)
        self._epoch_at = None

    def _run_interrupted(self, event: Event) -> None:
        self.status = self.stage = "interrupted"

    def _run_finished(self, event: Event) -> None:
        self.status, self.stage = str(event["status"]), str(event["status"])


_READERS: dict[str, Callable[[State, Event], None]] = {
    "run_started": State._run_started,
    "epoch_started": State._epoch_started,
    "rollout": State._rollout,
    "epoch_collected": State._collected,
    "job_submitted": State._job_submitted,
    "job_progress": State._job_progress,
    "validation_started": State._validation_started,
    "epoch_done": State._epoch_done,
    "run_interrupted": State._run_interrupted,
    "run_finished": State._run_finished,
}


class Display:
    """Shows the events of a log while it is open."""

    def __init__(self, events: EventLog, *, clock: Callable[[], float] = time.time) -> None:
        self.events, self.state = events, State()
        self._clock = clock
        self._live: Live | None = None
        self._written_at = 0.0

    def __enter__(self) -> Self:
        for event in read(self.events.path):  # a run that goes on shows its whole curve
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
        """Take it in; where there is no terminal, perhaps say it."""
        self.state.add(event)
        if self._live is None:
            self._say(event)

    # ---- lines ----------------------------------------------------------------------------

    def _say(self, event: Event) -> None:
        state = self.state
        if event["type"] == "epoch_done":
            write(self.epoch_line(state.now))
        elif event["type"] in ("epoch_started", "validation_started", "job_submitted"):
            self._written_at = state.now
            return
        elif state.stage not in STAGES or state.now - self._written_at < LINE_S:
            return
        else:
            named = "" if state.stage == "learning" else f"{state.stage} "
            write(f"{self._where()}: {named}{self.stage_line(state.now)}")
        self._written_at = state.now

    def epoch_line(self, now: float) -> str:
        """What an epoch came to, and how long the rest will take."""
        state, ended = self.state, self.state.ended
        assert ended is not None, "no epoch is over"
        epoch, how = ended["epoch"], "failed" if ended["status"] == "failed" else "done"
        rewards = [mean for (of, _), mean in state.training.items() if of == epoch]
        said = [f"reward {number(rewards[-1])}"] if rewards else []
        if epoch in state.held_out:  # validated in this epoch, by the policy that it began with
            mean = state.held_out[epoch]
            said += ["no held-out reward" if mean is None else f"held out {number(mean)} before it"]
        left = state.left_s(now) if how == "done" else None
        said += [f"{duration(now - state.started_at)}"]
        said += [f"about {duration(left)} left"] if left else []
        return f"epoch {epoch + 1} of {state.epochs} {how}: {', '.join(said)}"

    def stage_line(self, now: float) -> str:
        """How far the stage is."""
        state = self.state
        if state.stage not in STAGES:
            return ""
        if state.stage == "learning":
            return (
                f"learning, {state.finished} of {state.total} rows" if state.total else "learning"
            )
        said = [f"{state.finished} of {state.total}"]
        said += [] if state.mean is None else [f"reward so far {number(state.mean)}"]
        said += [f"{state.failed} failed"] if state.failed else []
        rate = state.tokens_per_s(now)
        said += [] if rate is None else [f"{rate:,.0f} tokens/s"]
        return ", ".join(said)

    def _where(self) -> str:
        state = self.state
        if state.stage == "validation":
            return f"after {counted(state.done, 'epoch')}"
        part = f", round {state.round + 1} of {state.rounds}" if state.rounds > 1 else ""
        return f"epoch {state.epoch + 1} of {state.epochs}{part}"

    # ---- the picture ----------------------------------------------------------------------

    def picture(self) -> "Group":
        """Three bars and rows: the run, the stage, the rewards so far."""
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        state, now = self.state, self._clock()
        if not state.epochs:  # the server is not there yet, so nothing is known of the run
            return Group(Text(state.stage))
        grid = Table.grid(padding=(0, 2))
        grid.add_column(no_wrap=True)
        grid.add_column(no_wrap=True)
        grid.add_column(overflow="fold")
        left = state.left_s(now)
        times = [duration(now - state.started_at)] if state.started_at else []
        times += [f"about {duration(left)} left"] if left else []
        share = self._share()
        grid.add_row(Text(self._where(), "bold"), _bar(share, 1.0), Text(", ".join(times)))
        of_stage = _bar(state.finished, state.total) if state.status is None else Text("")
        grid.add_row(Text(state.stage), of_stage, Text(self.stage_line(now), "dim"))
        for name, by_place in (("training", state.training), ("held out", state.held_out)):
            values = [*by_place.values()]
            if values:
                drawn = sparks(values, console().encoding)
                known = [v for v in values if v is not None]
                ends = f"{number(known[0])} to {number(known[-1])}" if known else "no number yet"
                grid.add_row(Text(name), Text(drawn, "cyan"), Text(ends))
        return Group(grid)

    def _share(self) -> float:
        """Of the whole run; a stage counts as half an epoch."""
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
