"""The content of a report, in any output format.

In:   an Outcome
Out:  a Document: a headline, what it rests on, and sections of blocks

It leads with the answer, and a run that failed or did not improve says that before anything else.
"""

import json
import re
import shlex
from collections.abc import Iterator

from hone.report import plots
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
from hone.report.diagnosis import FLAT, diagnosis
from hone.report.headline import answer
from hone.report.outcome import Outcome, PolicyReward
from hone.report.text import counted, duration, number, signed

SHORTEST_S = 0.05
"""A phase that would be shown as 0.0 s is not shown."""
SHOWN = 8
"""Largest number of epochs named beside a warning."""


def sections(outcome: Outcome, picture: bytes | None = None, *, brief: bool = False) -> Document:
    """The whole report; `picture` is the reward plot, if it is drawn already; `brief` draws none."""
    headline, basis, tone = answer(outcome)
    if picture is None and not brief:
        picture = plots.rewards(outcome.history, plots.WIDE)
    parts = (
        ("", _numbers(outcome)),
        ("Resume the run", _resuming(outcome)),
        ("Reward", _reward(outcome, picture, brief=brief)),
        ("Why the reward does not rise", _flat(outcome)),
        ("Before and after", _examples(outcome)),
        ("Use the model", _commands(outcome)),
        ("What was left out of training", _left_out(outcome)),
        ("Where the time went", _time(outcome)),
        ("Training metrics", () if brief else _learning(outcome)),
        ("Warnings", _warnings(outcome)),
        ("Run details", _details(outcome)),
    )
    filled = ((title, tuple(blocks)) for title, blocks in parts)
    return Document(
        outcome.history.run.name or outcome.history.run.run_id,
        headline,
        basis,
        tone,
        tuple(Section(title, blocks) for title, blocks in filled if blocks),
    )


def _numbers(outcome: Outcome) -> Iterator[Block]:
    first, last, gain = outcome.baseline, outcome.tuned, outcome.gain
    if first is None or last is None or gain is None:
        return
    known = gain.low is not None and gain.high is not None
    ends = f"{signed(gain.low or 0.0)} to {signed(gain.high or 0.0)}" if known else ""
    tiles = [_tile("before", first), _tile("after", last), ("change", signed(gain.mean), ends)]
    if outcome.newest is not None:
        tiles.append(_tile("newest", outcome.newest))
    yield Tiles(tuple(tiles))
    if any(v.policy_failures and v.dropped for v in outcome.history.validations):
        yield Text(
            f"In validations a rollout that failed because of the model counts as "
            f"{number(outcome.history.failure_reward)}: the smaller of 0 and the lowest reward of the "
            "run. finetuning.on_policy_failure: {reward: ...} sets another value, also for training."
        )


def _tile(label: str, policy: PolicyReward) -> tuple[str, str, str]:
    value = policy.value
    if value.low is None or value.high is None:
        note = counted(value.n, "example")
    elif value.low == value.high:
        note = f"all {value.n} examples alike"
    else:
        note = f"{number(value.low)} to {number(value.high)}"
    note += f"; epoch {policy.epoch + 1}" if policy.step is None else f"; step {policy.step}"
    note += f"; {policy.failure_rate:.0%} failed" if policy.failure_rate else ""
    return label, number(value.mean), note


def _resuming(outcome: Outcome) -> Iterator[Block]:
    run, status = outcome.history.run, outcome.history.status
    command = run.again or run.command
    if command and status in ("unfinished", "failed"):
        what = "resume" if status == "unfinished" else "resume when that is fixed"
        yield Commands(((f"{what}; finished rollouts and jobs are kept", command),))


def _reward(outcome: Outcome, picture: bytes | None, *, brief: bool) -> Iterator[Block]:
    history, deltas = outcome.history, list(outcome.deltas.values())
    if picture is not None and (history.rounds or history.validations):
        narrow = None if brief else plots.rewards(history, plots.NARROW)
        yield Picture(picture, narrow, plots.headline(history)[0], "reward_plot.png")
        yield Text(" ".join(_how_to_read(outcome)))
    if len(deltas) > 1 and outcome.held_out and not brief:
        wide, narrow = (plots.example_changes(deltas, size) for size in (plots.WIDE, plots.NARROW))
        rows = tuple((name, str(n)) for name, n in outcome.counts.items())
        table = Table(("held-out examples", "number"), rows)
        yield Picture(wide, narrow, "change of every held-out example", instead=table)


def _how_to_read(outcome: Outcome) -> Iterator[str]:
    drawn = curves(outcome.history)
    if drawn.two_evaluators and drawn.held_out and drawn.training:
        training, held_out = drawn.names
        yield (
            f"Training rewards are measured by {training} and held-out rewards by {held_out}: each has "
            "its own axis, and their heights cannot be compared."
        )
    if drawn.greedy and drawn.held_out:
        yield (
            "Held-out examples were answered at temperature 0, training examples at the workflow's "
            "temperature."
        )
    yield (
        "The band and the bars are 95% intervals over examples. The x axis counts the epochs that the "
        "policy was trained for."
    )
    if outcome.compared is not None and outcome.compared.fresh:
        yield "The curve shows the validations that chose the step; the title shows the new answers."
    if any(p.value is None for p in (*drawn.training, *drawn.held_out)):
        yield "A cross marks what has no reward."


def _flat(outcome: Outcome) -> Iterator[Block]:
    """As it is at the end; what was logged before may have passed."""
    if outcome.verdict != "better" and (text := diagnosis(outcome.history)):
        yield Text(text)


def _examples(outcome: Outcome) -> Iterator[Block]:
    if outcome.examples:
        what = "held-out" if outcome.held_out else "training"
        yield Text(
            f"A few {what} examples: the most improved first, then examples that got worse, still fail "
            "or could not be scored, if there are any."
        )
        yield Pairs(tuple(outcome.examples))


def _commands(outcome: Outcome) -> Iterator[Block]:
    run, model = outcome.history.run, outcome.model
    if model is None or not outcome.step:
        return
    yield Text(_steps(outcome))
    root = f" --root {shlex.quote(run.root)}" if run.root else ""
    body = outcome.request or {"messages": [{"role": "user", "content": "Hello"}]}
    # A terminal shows a whole answer better than a stream of events.
    body = {"model": model, **{k: v for k, v in body.items() if not k.startswith("stream")}}
    url = shlex.quote(f"{run.base_url or 'http://127.0.0.1:8000/v1'}/chat/completions")
    curl = f"curl {url} -H 'Content-Type: application/json' \\\n  -d "
    curl += shlex.quote(json.dumps(body, ensure_ascii=False))
    export = f"hone export {shlex.quote(model)} {shlex.quote(f'./{run.name}-adapter')}{root}"
    serve = [] if run.base_url else [("serve the model", f"hone serve{root}")]
    where = "on the server's machine, " if run.base_url else ""
    yield Commands(
        (
            *serve,
            ("send what the agent sends" if outcome.request else "send a request", curl),
            (f"{where}export a PEFT adapter, or with --merge a whole model", export),
        )
    )


def _steps(outcome: Outcome) -> str:
    """Which step each name of the model means."""
    name, best, step = outcome.history.run.name, outcome.best_step, outcome.step
    if not best:
        none = "No trained step beats the untrained model on held-out examples. "
        names = f"{name} is the newest step, {step}; {name}@0 is the untrained model."
        return names if best is None else none + names
    so_far = "" if outcome.history.status == "completed" else " so far"
    newest = "the same step" if best == step else f"the newest step, {step}"
    return (
        f"{outcome.model} is step {best}, the best on held-out examples{so_far}; {name} is {newest}, "
        f"and {name}@0 is the untrained model."
    )


def _left_out(outcome: Outcome) -> Iterator[Block]:
    history, rounds = outcome.history, outcome.history.rounds
    groups = sum(r.metrics.get("num_groups") or 0 for r in rounds)
    flat = sum(r.num_flat for r in rounds)
    attempts = sum(len(r.rewards.keys() | r.failures.keys()) for r in rounds)
    rows = [
        *((f"rollout failed, {why}", n, attempts) for why, n in history.failures.most_common()),
        *((why, n, 0) for why, n in history.dropped.most_common()),
        ("group with equal rewards: nothing to learn from", flat, groups),
        ("validation rollout failed", sum(v.failures for v in history.validations), 0),
    ]
    counts = [(why, f"{n:,}", f"{n / of:.1%}" if of else "") for why, n, of in rows if n]
    if counts:
        submitted = sum(r.metrics.get("filtered_trajectories") or 0 for r in rounds)
        yield Text(
            f"{counted(attempts, 'training rollout')} in {counted(groups, 'group')}; {submitted:,} "
            "trajectories were submitted for training. A failed rollout is left out and counted; it "
            "does not get a reward of 0."
        )
        yield Table(("reason", "number", "share"), tuple(counts))


PHASE_NAMES = {
    "start_s": "start",
    "rollout_s": "rollouts",
    "learn_s": "learning",
    "validate_s": "validation",
    "other_s": "everything else",
}


def _time(outcome: Outcome) -> Iterator[Block]:
    seconds, phases = outcome.history.seconds, outcome.history.phases
    if seconds > 0:
        parts = [(PHASE_NAMES[name], s) for name, s in phases.items() if s >= SHORTEST_S]
        yield Text(_speed(outcome))
        yield Bar(tuple((name, s / seconds, duration(s)) for name, s in parts))


def _speed(outcome: Outcome) -> str:
    history, tokens = outcome.history, outcome.trained_tokens
    sampling = history.phases["rollout_s"] + history.phases["validate_s"]
    text = f"{duration(history.seconds)} in total"
    if history.sessions > 1:
        text += f", over {history.sessions} sessions (the run was resumed)"
    if sampling > 0 and history.tokens:
        text += (
            f"; {counted(history.rollouts, 'rollout')}, {counted(history.calls, 'model call')} and "
            f"{counted(history.tokens, 'sampled token')}, {history.tokens / sampling:,.0f} per second"
        )
    if tokens:
        text += (
            f"; {counted(tokens['logical'], 'training token')}, of which {tokens['computed']:,} were "
            f"computed and {tokens['shared']:,} shared"
        )
    if history.phases["start_s"] >= SHORTEST_S:
        text += ". Start is the time from the command to the first rollout: server, model, checks"
    return f"{text}."


def _learning(outcome: Outcome) -> Iterator[Block]:
    wide, narrow = (plots.learning(outcome.history, size) for size in (plots.WIDE, plots.NARROW))
    if wide is None:
        return
    rows = []
    for name, points in plots.measured(outcome.history).items():
        known = [y for _, y in points if y is not None]
        ends = known[0], known[-1], min(known), max(known)
        rows.append((name, *(f"{y:.3g}" if abs(y) < 1000 else f"{y:,.0f}" for y in ends)))
    table = Table(("metric of the jobs", "first", "last", "lowest", "highest"), tuple(rows))
    yield Picture(wide, narrow, "metrics of the training jobs", instead=table)


_EPOCH_WARNING = re.compile(r"(?:epoch (\d+): )?(.*)", re.S)


def _warnings(outcome: Outcome) -> Iterator[Block]:
    """Each once, with its epochs; the diagnosis of a flat reward has its own section."""
    by_text: dict[str, list[str]] = {}
    for message in outcome.history.warnings:
        match = _EPOCH_WARNING.fullmatch(message)
        if match is not None and not message.startswith(FLAT):
            by_text.setdefault(match[2], []).append(match[1] or "")
    for text, epochs in by_text.items():
        known = list(dict.fromkeys(epoch for epoch in epochs if epoch))
        if len(known) == 1:
            yield Text(f"Epoch {known[0]}: {text}")
        elif known:
            listed = ", ".join(known[:SHOWN]) + (", ..." if len(known) > SHOWN else "")
            yield Text(f"{len(known)} epochs ({listed}): {text}")
        else:
            yield Text(f"{text}{f' ({len(epochs)} times)' if len(epochs) > 1 else ''}")


def _learning_rate(outcome: Outcome) -> str | float | None:
    """Learning rate of the jobs; the first, the last and the bounds if it changed."""
    configs = [job.config or {} for job in outcome.history.jobs]
    rates = [c["learning_rate"] for c in configs if c.get("learning_rate") is not None]
    if len(set(rates)) < 2:
        return rates[0] if rates else outcome.history.run.learning_rate
    text = f"{rates[0]:g} in the first job, {rates[-1]:g} in the last"
    if {rates[0], rates[-1]} != {min(rates), max(rates)}:
        text += f", between {min(rates):g} and {max(rates):g}"
    return text


def _details(outcome: Outcome) -> Iterator[Block]:
    history, run = outcome.history, outcome.history.run
    used = next((job.config for job in reversed(history.jobs) if job.config), {})
    training, held_out = run.evaluators
    two = training != held_out and run.validation_examples
    details = {
        "model": f"{run.project}/{run.name}" if run.name else None,
        "base model": run.base_model,
        "run": run.run_id,
        "configuration": run.config_file,
        "command": run.command,
        "seed": run.seed,
        "epochs": f"{len(history.done)} of {run.epochs}",
        "training examples": run.examples,
        "generations per example": run.generations,
        "held-out examples": run.validation_examples,
        "evaluator": f"{training}; held out {held_out}" if two else training,
        "learning rate": _learning_rate(outcome),
        "loss": used.get("loss"),
        "beta": used.get("beta"),
        "row_tokens": used.get("row_tokens"),
    }
    known = ((k, v) for k, v in details.items() if v is not None)
    rows = ((k, f"{v:g}" if isinstance(v, float) else str(v)) for k, v in known)
    yield Table(("", ""), tuple(rows), numbers=False)
