"""What stands in a report, in which order, whatever it is written in.

In:   a Report
Out:  a Document: a headline, what it rests on, and sections of blocks
Used: report.py; page.py turns it into HTML and Markdown

It leads with the answer, and a run that failed or did not improve says that before anything else.
"""

import json
import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hone.finetune import plots
from hone.finetune.estimate import MIN_PAIRS, Estimate
from hone.finetune.examples import Example
from hone.finetune.words import counted, duration, interval, number, signed

if TYPE_CHECKING:
    from hone.finetune.report import Report

Tone = str
"""good, bad or unsure: the colour of the answer."""


@dataclass(frozen=True, slots=True)
class Text:
    words: str


@dataclass(frozen=True, slots=True)
class Tiles:
    """Numbers to be seen first: label, value, note."""

    tiles: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True, slots=True)
class Table:
    """Columns after the first are numbers, unless told otherwise."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numbers: bool = True


@dataclass(frozen=True, slots=True)
class Picture:
    wide: bytes
    narrow: bytes
    alt: str
    file: str | None = None
    """Where it also lies beside the report."""


@dataclass(frozen=True, slots=True)
class Bar:
    """Parts of a whole: label, share of it, what it comes to."""

    parts: tuple[tuple[str, float, str], ...]


@dataclass(frozen=True, slots=True)
class Commands:
    """What to type, each with what it does."""

    commands: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Pairs:
    examples: tuple[Example, ...]


Block = Text | Tiles | Table | Picture | Bar | Commands | Pairs


@dataclass(frozen=True, slots=True)
class Section:
    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class Document:
    name: str
    """What the run trained."""
    headline: str
    basis: str
    """What the headline rests on, in a sentence or two."""
    tone: Tone
    sections: tuple[Section, ...]


def sections(report: "Report") -> Document:
    """The whole report."""
    headline, basis, tone = _answer(report)
    parts = (
        ("", _numbers(report)),
        ("Reward", _reward(report)),
        ("Before and after", _examples(report)),
        ("Use it", _commands(report)),
        ("What was left out, and why", _left_out(report)),
        ("Where the time went", _time(report)),
        ("How the learning went", _learning(report)),
        ("Warnings", _warnings(report)),
        ("This run", _facts(report)),
    )
    found = ((title, tuple(blocks)) for title, blocks in parts)
    name = str(report.history.run.get("name") or report.history.run["run_id"])
    kept = tuple(Section(title, blocks) for title, blocks in found if blocks)
    return Document(name, headline, basis, tone, kept)


# ---- the answer -----------------------------------------------------------------------------------


def _answer(report: "Report") -> tuple[str, str, Tone]:
    """Headline, what it rests on, tone."""
    history = report.history
    change, rests, tone = _change(report)
    planned = history.run.get("epochs") or 0
    done = f"{len(history.done)} of {counted(planned, 'epoch')}"
    message = str((history.finished or {}).get("message") or "")
    if history.status == "unfinished":
        head = f"The run was interrupted after {done}"
        again = "The same command goes on from there."
        return head, f"{again} So far: {_lower(change)}. {rests}".strip(), "unsure"
    if history.status == "failed":
        head = f"The run failed after {done}"
        return head, f"{_sentence(message)} Until then: {_lower(change)}. {rests}".strip(), "bad"
    if history.status != "completed":
        head = f"The run ended as {history.status} after {done}"
        return head, f"{_sentence(message)} Until then: {_lower(change)}. {rests}".strip(), "unsure"
    early = f" {_sentence(message)}" if len(history.done) < planned and message else ""
    return change, rests + early, tone


def _change(report: "Report") -> tuple[str, str, Tone]:
    first, last, gain = report.baseline, report.tuned, report.gain
    if first is None or last is None or gain is None:
        return "Nothing can be compared", _why_nothing(report), "unsure"
    what = "Held-out reward" if report.held_out else "Training reward"
    moved = f"from {number(first.value.mean)} to {number(last.value.mean)}"
    if report.verdict == "better":
        head, tone = f"{what} rose {moved}", "good"
    elif report.verdict == "worse":
        head, tone = f"{what} fell {moved}", "bad"
    else:
        head, tone = f"No certain gain: {_lower(what)} went {moved}", "unsure"
    rests = f"The change is {interval(gain)}{_paired(report, gain)}: {_certainty(report, gain)}"
    if not report.held_out:
        rests = (
            "There are no two validations to compare, so these are the rewards of the first and "
            "the last epoch on the training examples, which a model may learn by heart. Name "
            f"held-out examples with --validation_dataset. {rests}"
        )
        tone = "unsure" if tone == "good" else tone
    return head, rests, tone


def _paired(report: "Report", gain: Estimate) -> str:
    if not report.deltas:
        return " between different examples"
    return f", paired over {counted(gain.n, 'example')}"


def _certainty(report: "Report", gain: Estimate) -> str:
    if gain.low is None or gain.high is None:
        return "one example says nothing about others."
    if gain.n < MIN_PAIRS:
        return f"on fewer than {MIN_PAIRS} examples nothing is certain."
    if not gain.certain:
        return "the interval holds 0, so it may be chance. More held-out examples would narrow it."
    if gain.mean > 0:
        return "the interval leaves out 0, so the gain is not chance."
    use = " Serve an earlier step instead (NAME@best, NAME@0)." if report.held_out else ""
    return f"the interval leaves out 0, so the loss is not chance.{use}"


def _why_nothing(report: "Report") -> str:
    scored = report.history.scored
    if scored:
        mean = number(scored[0].mean)
        return f"There is one validation only (mean reward {mean}), and nothing to hold it against."
    return "No two epochs gave rewards."


def _numbers(report: "Report") -> Iterator[Block]:
    first, last, gain = report.baseline, report.tuned, report.gain
    if first is None or last is None or gain is None:
        return
    tiles = [("before", first), ("after", last)]
    if report.best is not None:
        tiles.append(("best", report.best))
    shown = [
        (label, number(m.value.mean), f"{_range(m.value)}{_of(m.step, m.epoch)}")
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
    if report.best is not None:
        yield Text(
            "The best step was chosen by these same examples, so its number flatters it a little."
        )


def _range(value: Estimate) -> str:
    if value.low is None or value.high is None:
        return counted(value.n, "example")
    if value.low == value.high:
        return f"all {value.n} examples alike"
    return f"{number(value.low)} to {number(value.high)}"


def _of(step: int | None, epoch: int) -> str:
    return f"; epoch {epoch + 1}" if step is None else f"; step {step}"


# ---- sections -------------------------------------------------------------------------------------


def _reward(report: "Report") -> Iterator[Block]:
    history = report.history
    if history.rounds or history.validations:
        wide, narrow = (plots.rewards(history, size) for size in (plots.WIDE, plots.NARROW))
        yield Picture(wide, narrow, plots.headline(history)[0], "reward_plot.png")
        yield Text(
            "Band and bars are 95% intervals over examples. A point stands above the epochs its "
            "policy had been trained for; what failed is a gap with a cross."
        )
    if len(report.deltas) > 1 and report.held_out:
        deltas = list(report.deltas.values())
        wide, narrow = (plots.example_changes(deltas, size) for size in (plots.WIDE, plots.NARROW))
        yield Picture(wide, narrow, "change of every held-out example")


def _examples(report: "Report") -> Iterator[Block]:
    if report.examples:
        what = "held-out" if report.held_out else "training"
        yield Text(
            f"A few {what} examples: the most improved, then what got worse or still fails, if any."
        )
        yield Pairs(tuple(report.examples))


def _commands(report: "Report") -> Iterator[Block]:
    run, model = report.history.run, report.model
    if model is None or not report.step:
        return
    name, best = run["name"], report.best_step
    if not best:
        none = "" if best is None else "No trained step beats the untrained model held out. "
        newest = f"{name} is the newest step, {report.step}; {name}@0 is the untrained model."
        yield Text(none + newest)
    else:
        newest = "the same" if best == report.step else f"the newest one, step {report.step}"
        yield Text(
            f"{model} is step {best}, the best on held-out examples; {name} alone is {newest}, "
            f"and {name}@0 the untrained model."
        )
    place = f" --root {shlex.quote(str(run['root']))}" if run.get("root") else ""
    served = run.get("base_url")
    ask = next((e.input for e in report.examples if len(e.input) <= 160), "Hello")
    body = {"model": model, "messages": [{"role": "user", "content": ask}]}
    url = shlex.quote(f"{served or 'http://127.0.0.1:8000/v1'}/chat/completions")
    talk = f"curl {url} -H 'Content-Type: application/json' \\\n  -d "
    talk += shlex.quote(json.dumps(body, ensure_ascii=False))
    taken = f"hone export {shlex.quote(model)} {shlex.quote(f'./{name}-adapter')}{place}"
    serve = [] if served else [("serve it", f"hone serve{place}")]
    where = "on the server's machine, take it elsewhere" if served else "take it elsewhere"
    yield Commands(
        (
            *serve,
            ("ask it", talk),
            (f"{where}: a PEFT adapter, or with --merge a model of its own", taken),
        )
    )


def _left_out(report: "Report") -> Iterator[Block]:
    history = report.history
    rounds = history.rounds
    groups = sum(r.metrics.get("num_groups") or 0 for r in rounds)
    flat = sum(r.collected["zero_variance_groups"] or 0 for r in rounds if r.collected)
    rows: list[tuple[str, ...]] = []
    attempts = sum(len(r.rewards.keys() | r.failures.keys()) for r in rounds)
    for why, n in Counter(history.failures).most_common():
        rows.append((f"rollout failed, {why}", f"{n:,}", _share(n, attempts)))
    for why, n in history.dropped.most_common():
        rows.append((why, f"{n:,}", ""))
    if groups:
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
        f"{kept:,} trajectories were learned from. What failed is left out and counted, never "
        "taken for a reward of 0."
    )
    yield Table(("what", "how many", "share"), tuple(rows))


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else ""


PHASE_NAMES = {
    "rollout_s": "rollouts",
    "learn_s": "learning",
    "validate_s": "validation",
    "other_s": "everything else",
}


def _time(report: "Report") -> Iterator[Block]:
    seconds, phases = report.history.seconds, report.history.phases
    if seconds <= 0:
        return
    parts = ((PHASE_NAMES[name], spent) for name, spent in phases.items())
    yield Text(_speed(report))
    yield Bar(tuple((name, spent / seconds, duration(spent)) for name, spent in parts))


def _speed(report: "Report") -> str:
    history = report.history
    sampling = history.phases["rollout_s"] + history.phases["validate_s"]
    text = f"{duration(history.seconds)} in all"
    if len(history.sessions) > 1:
        text += f", over {len(history.sessions)} sessions (the run was started again)"
    if sampling > 0 and history.tokens:
        text += (
            f"; {counted(history.rollouts, 'rollout')}, {history.calls:,} model calls and "
            f"{history.tokens:,} sampled tokens, {history.tokens / sampling:,.0f} a second"
        )
    return f"{text}."


def _learning(report: "Report") -> Iterator[Block]:
    pictures = [plots.learning(report.history, size) for size in (plots.WIDE, plots.NARROW)]
    if pictures[0] is not None and pictures[1] is not None:
        yield Picture(pictures[0], pictures[1], "what the learner measured in every job")


def _warnings(report: "Report") -> Iterator[Block]:
    found = Counter(warning["message"] for warning in report.history.warnings)
    for message, times in found.items():
        yield Text(f"{message}{f' ({times} times)' if times > 1 else ''}")


def _facts(report: "Report") -> Iterator[Block]:
    history, run = report.history, report.history.run
    used = next(
        (r.job["config"] for r in reversed(history.rounds) if r.job and r.job.get("config")), {}
    )
    facts = {
        "model": f"{run.get('project')}/{run.get('name')}" if run.get("name") else None,
        "base model": run.get("base_model"),
        "run": run.get("run_id"),
        "configuration": run.get("config_file"),
        "command": run.get("command"),
        "seed": run.get("seed"),
        "epochs": f"{len(history.done)} of {run.get('epochs')}",
        "training examples": run.get("examples"),
        "generations of each": run.get("generations"),
        "held-out examples": run.get("validation_examples"),
        "learning rate": used.get("learning_rate", run.get("learning_rate")),
        "loss": used.get("loss"),
        "beta": used.get("beta"),
    }
    rows = tuple(
        (k, f"{v:g}" if isinstance(v, float) else str(v)) for k, v in facts.items() if v is not None
    )
    yield Table(("", ""), rows, numbers=False)


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def _sentence(text: str) -> str:
    text = text.strip()
    return f"{text[:1].upper()}{text[1:]}{'' if not text or text[-1] in '.!?' else '.'}"
