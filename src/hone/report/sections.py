"""What stands in a report, in which order, whatever it is written in.

In:   a Report
Out:  a Document: a headline, what it rests on, and sections of blocks

It leads with the answer, and a run that failed or did not improve says that before anything else.
"""

import json
import re
import shlex
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from hone.report import diagnosis, plots
from hone.report.blocks import (
    Bar,
    Block,
    Commands,
    Document,
    Pairs,
    Picture,
    Section,
    Table,
    Text,
    Tiles,
)
from hone.report.curves import curves
from hone.report.estimate import Estimate
from hone.report.headline import answer
from hone.report.text import counted, duration, number, signed

if TYPE_CHECKING:
    from hone.report.report import Measured, Report


SHORTEST_S = 0.05
"""A phase that would be shown as 0.0 s is not shown."""
SHOWN = 8
"""Of the epochs with the same warning, so many are named."""


def sections(report: "Report", picture: bytes | None = None, *, brief: bool = False) -> Document:
    """The whole report; `picture` is the reward plot, if it is drawn already; `brief` draws none."""
    headline, basis, tone = answer(report)
    if picture is None and not brief:
        picture = plots.rewards(report.history, plots.WIDE)
    parts = (
        ("", _numbers(report)),
        ("Go on", _going_on(report)),
        ("Reward", _reward(report, picture, brief=brief)),
        ("Why the reward does not rise", _flat(report)),
        ("Before and after", _examples(report)),
        ("Use it", _commands(report)),
        ("What was left out, and why", _left_out(report)),
        ("Where the time went", _time(report)),
        ("How the learning went", () if brief else _learning(report)),
        ("Warnings", _warnings(report)),
        ("This run", _facts(report)),
    )
    found = ((title, tuple(blocks)) for title, blocks in parts)
    name = report.history.run.name or report.history.run.run_id
    kept = tuple(Section(title, blocks) for title, blocks in found if blocks)
    return Document(name, headline, basis, tone, kept)


def _numbers(report: "Report") -> Iterator[Block]:
    first, last, gain = report.baseline, report.tuned, report.gain
    if first is None or last is None or gain is None:
        return
    tiles = [("before", first), ("after", last)]
    if report.newest is not None:
        tiles.append(("newest", report.newest))
    shown = [
        (label, number(m.value.mean), f"{_range(m.value)}{_of(m.step, m.epoch)}{_failed(m)}")
        for label, m in tiles
    ]
    change = (
        "change",
        signed(gain.mean),
        ""
        if gain.low is None or gain.high is None
        else f"{signed(gain.low)} to {signed(gain.high)}",
    )
    yield Tiles((*shown[:2], change, *shown[2:]))
    if any(v.policy_failures and v.dropped for v in report.history.validations):
        yield Text(
            f"In validations a rollout that failed through the model's own doing counts as "
            f"{number(report.history.failure_reward)}: the smaller of 0 and the lowest reward of the "
            "run. finetuning.on_policy_failure: {reward: ...} sets another value, also for training."
        )


def _range(value: Estimate) -> str:
    if value.low is None or value.high is None:
        return counted(value.n, "example")
    if value.low == value.high:
        return f"all {value.n} examples alike"
    return f"{number(value.low)} to {number(value.high)}"


def _failed(measured: "Measured") -> str:
    return f"; {measured.failure_rate:.0%} failed" if measured.failure_rate else ""


def _of(step: int | None, epoch: int) -> str:
    return f"; epoch {epoch + 1}" if step is None else f"; step {step}"


def _going_on(report: "Report") -> Iterator[Block]:
    run, status = report.history.run, report.history.status
    command = run.again or run.command
    if command and status in ("unfinished", "failed"):
        when = "go on from there" if status == "unfinished" else "go on when that is fixed"
        yield Commands(((f"{when}; rollouts and jobs that ended well are kept", command),))


def _reward(report: "Report", picture: bytes | None, *, brief: bool) -> Iterator[Block]:
    history = report.history
    if picture is not None and (history.rounds or history.validations):
        narrow = None if brief else plots.rewards(history, plots.NARROW)
        yield Picture(picture, narrow, plots.headline(history)[0], "reward_plot.png")
        yield Text(" ".join(_how_to_read(report)))
    if len(report.deltas) > 1 and report.held_out and not brief:
        deltas = list(report.deltas.values())
        wide, small = (plots.example_changes(deltas, size) for size in (plots.WIDE, plots.NARROW))
        better, worse = sum(d > 0 for d in deltas), sum(d < 0 for d in deltas)
        counts = (("better", better), ("worse", worse), ("unchanged", len(deltas) - better - worse))
        rows = tuple((name, str(n)) for name, n in counts)
        told = Table(("held-out examples", "how many"), rows)
        yield Picture(wide, small, "change of every held-out example", instead=told)


def _how_to_read(report: "Report") -> Iterator[str]:
    drawn = curves(report.history)
    if drawn.apart and drawn.held_out and drawn.training:
        training, held_out = drawn.names
        yield (
            f"Training rewards are measured by {training} and held-out ones by {held_out}: each has "
            "an axis of its own, and their heights cannot be compared."
        )
    if drawn.greedy and drawn.held_out:
        yield (
            "Held-out examples were answered at temperature 0, training examples at the workflow's."
        )
    yield (
        "Band and bars are 95% intervals over examples. A point stands above the epochs its policy "
        "had been trained for."
    )
    if report.compared is not None and report.compared.fresh:
        yield (
            "The curve shows the validations that chose the step; the title shows the fresh answers."
        )
    if any(p.value is None for p in (*drawn.training, *drawn.held_out)):
        yield "What gave no number is a gap with a cross."


def _flat(report: "Report") -> Iterator[Block]:
    """As it stands at the end; what was said on the way may have passed."""
    if report.verdict != "better" and (said := diagnosis.diagnosis(report.history)):
        yield Text(said)


def _examples(report: "Report") -> Iterator[Block]:
    if report.examples:
        what = "held-out" if report.held_out else "training"
        yield Text(
            f"A few {what} examples: the most improved, then what got worse, still fails or "
            "could not be scored, if any."
        )
        yield Pairs(tuple(report.examples))


def _commands(report: "Report") -> Iterator[Block]:
    run, model = report.history.run, report.model
    if model is None or not report.step:
        return
    name, best = run.name, report.best_step
    if not best:
        none = "" if best is None else "No trained step beats the untrained model held out. "
        newest = f"{name} is the newest step, {report.step}; {name}@0 is the untrained model."
        yield Text(none + newest)
    else:
        newest = "the same" if best == report.step else f"the newest one, step {report.step}"
        yield Text(
            f"{model} is step {best}, the best on held-out examples{_so_far(report)}; {name} alone is {newest}, "
            f"and {name}@0 the untrained model."
        )
    place = f" --root {shlex.quote(run.root)}" if run.root else ""
    served = run.base_url
    asked = report.request or {"messages": [{"role": "user", "content": "Hello"}]}
    # A terminal shows a whole answer better than a stream of events.
    body = {"model": model, **{k: v for k, v in asked.items() if not k.startswith("stream")}}
    url = shlex.quote(f"{served or 'http://127.0.0.1:8000/v1'}/chat/completions")
    talk = f"curl {url} -H 'Content-Type: application/json' \\\n  -d "
    talk += shlex.quote(json.dumps(body, ensure_ascii=False))
    taken = f"hone export {shlex.quote(model)} {shlex.quote(f'./{name}-adapter')}{place}"
    serve = [] if served else [("serve it", f"hone serve{place}")]
    where = "on the server's machine, take it elsewhere" if served else "take it elsewhere"
    yield Commands(
        (
            *serve,
            ("ask it what the agent asks" if report.request else "ask it", talk),
            (f"{where}: a PEFT adapter, or with --merge a model of its own", taken),
        )
    )


def _so_far(report: "Report") -> str:
    return "" if report.history.status == "completed" else " so far"


def _left_out(report: "Report") -> Iterator[Block]:
    history = report.history
    rounds = history.rounds
    groups = sum(r.metrics.get("num_groups") or 0 for r in rounds)
    flat = sum(r.num_flat for r in rounds)
    rows: list[tuple[str, ...]] = []
    attempts = sum(len(r.rewards.keys() | r.failures.keys()) for r in rounds)
    for why, n in Counter(history.failures).most_common():
        rows.append((f"rollout failed, {why}", f"{n:,}", _share(n, attempts)))
    for why, n in history.dropped.most_common():
        rows.append((why, f"{n:,}", ""))
    if flat:
        rows.append(
            ("group with equal rewards: nothing to learn from", f"{flat:,}", _share(flat, groups))
        )
    invalid = sum(v.failures for v in history.validations)
    if invalid:
        rows.append(("validation rollout failed", f"{invalid:,}", ""))
    if not rows:
        return
    kept = sum(r.metrics.get("filtered_trajectories") or 0 for r in rounds)
    yield Text(
        f"{counted(attempts, 'training rollout')} in {counted(groups, 'group')}; "
        f"{kept:,} trajectories were sent to be learned from. What failed is left out and counted, never "
        "taken for a reward of 0."
    )
    yield Table(("what", "how many", "share"), tuple(rows))


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else ""


PHASE_NAMES = {
    "start_s": "start",
    "rollout_s": "rollouts",
    "learn_s": "learning",
    "validate_s": "validation",
    "other_s": "everything else",
}


def _time(report: "Report") -> Iterator[Block]:
    seconds, phases = report.history.seconds, report.history.phases
    if seconds <= 0:
        return
    parts = ((PHASE_NAMES[name], spent) for name, spent in phases.items() if spent >= SHORTEST_S)
    yield Text(_speed(report))
    yield Bar(tuple((name, spent / seconds, duration(spent)) for name, spent in parts))


def _speed(report: "Report") -> str:
    history = report.history
    sampling = history.phases["rollout_s"] + history.phases["validate_s"]
    text = f"{duration(history.seconds)} in all"
    if history.sessions > 1:
        text += f", over {history.sessions} sessions (the run was started again)"
    if sampling > 0 and history.tokens:
        text += (
            f"; {counted(history.rollouts, 'rollout')}, {counted(history.calls, 'model call')} and "
            f"{counted(history.tokens, 'sampled token')}, {history.tokens / sampling:,.0f} a second"
        )
    if trained := report.trained_tokens():
        text += (
            f"; {counted(trained['logical'], 'token')} to learn from, of which {trained['computed']:,} "
            f"were computed and {trained['shared']:,} shared"
        )
    start = history.phases["start_s"] >= SHORTEST_S
    why = " Start is from the command to the first rollout: server, model, checks." if start else ""
    return f"{text}.{why}"


def _learning(report: "Report") -> Iterator[Block]:
    wide, narrow = (plots.learning(report.history, size) for size in (plots.WIDE, plots.NARROW))
    if wide is None:
        return
    rows = []
    for name, points in plots.measured(report.history).items():
        known = [y for _, y in points if y is not None]
        ends = known[0], known[-1], min(known), max(known)
        rows.append((name, *(f"{y:.3g}" if abs(y) < 1000 else f"{y:,.0f}" for y in ends)))
    told = Table(("measured in every job", "first", "last", "lowest", "highest"), tuple(rows))
    yield Picture(wide, narrow, "what the learner measured in every job", instead=told)


_OF_EPOCH = re.compile(r"epoch (\d+): (.*)", re.S)


def _warnings(report: "Report") -> Iterator[Block]:
    """Each once, with its epochs; why the reward is flat stands in a section of its own."""
    found: dict[str, list[str]] = {}
    for message in report.history.warnings:
        if not message.startswith(diagnosis.FLAT):
            match = _OF_EPOCH.fullmatch(message)
            epoch, said = match.groups() if match else ("", message)
            found.setdefault(said, []).append(epoch)
    for said, epochs in found.items():
        known = list(dict.fromkeys(epoch for epoch in epochs if epoch))
        if len(known) == 1:
            yield Text(f"Epoch {known[0]}: {said}")
        elif known:
            listed = ", ".join(known[:SHOWN]) + (", ..." if len(known) > SHOWN else "")
            yield Text(f"{len(known)} epochs ({listed}): {said}")
        else:
            yield Text(f"{said}{f' ({len(epochs)} times)' if len(epochs) > 1 else ''}")


def _learning_rate(report: "Report") -> str | float | None:
    """What the jobs used; the first and the last where that changed, and the bounds beyond them."""
    used = [(job.config or {}).get("learning_rate") for job in report.history.jobs]
    rates = [rate for rate in used if rate is not None]
    if len(set(rates)) < 2:
        return rates[0] if rates else report.history.run.learning_rate
    said = f"{rates[0]:g} at first, {rates[-1]:g} at last"
    if {rates[0], rates[-1]} != {min(rates), max(rates)}:
        said += f", between {min(rates):g} and {max(rates):g}"
    return said


def _evaluators(report: "Report") -> str | None:
    training, held_out = report.history.run.evaluators
    if training == held_out or not report.history.run.validation_examples:
        return training
    return f"{training}; held out {held_out}"


def _facts(report: "Report") -> Iterator[Block]:
    history, run = report.history, report.history.run
    used = next((job.config for job in reversed(history.jobs) if job.config), {})
    facts = {
        "model": f"{run.project}/{run.name}" if run.name else None,
        "base model": run.base_model,
        "run": run.run_id,
        "configuration": run.config_file,
        "command": run.command,
        "seed": run.seed,
        "epochs": f"{len(history.done)} of {run.epochs}",
        "training examples": run.examples,
        "generations of each": run.generations,
        "held-out examples": run.validation_examples,
        "reward": _evaluators(report),
        "learning rate": _learning_rate(report),
        "loss": used.get("loss"),
        "beta": used.get("beta"),
        "row_tokens": used.get("row_tokens"),
    }
    rows = tuple(
        (k, f"{v:g}" if isinstance(v, float) else str(v)) for k, v in facts.items() if v is not None
    )
    yield Table(("", ""), rows, numbers=False)
