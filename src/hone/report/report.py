"""The report of a run: report.json, report.md, report.html and reward_plot.png.

In:   a run's output_dir: events.jsonl, trajectories/*.jsonl
Out:  the four files; the HTML embeds its pictures and loads nothing from the network

report.j2 has the content. It starts with the answer: a run that failed or did not improve says so
first. html.j2 and markdown.j2 have the two output formats.
"""

import json
import re
import shlex
from base64 import b64encode
from collections import Counter
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from hone.files.disk import write_atomic
from hone.files.rollout_record import file_name
from hone.report import markdown
from hone.report.answers import Answers
from hone.report.diagnosis import FLAT, diagnosis
from hone.report.examples import ReportedRollout, pick, read_rollouts, request
from hone.report.funnel import Funnel, failed_rows, retried_rows
from hone.report.headline import headline, plot_title
from hone.report.history import RunHistory
from hone.report.outcome import Outcome, PolicyReward, measure
from hone.report.text import counted, duration, ends, number, signed

SHORTEST_S = 0.05
"""A phase that would be shown as 0.0 s is not shown."""
LOCAL = {"127.0.0.1", "::1", "localhost"}
"""Hosts that are this machine."""
PHASE_NAMES = {
    "start_s": "start",
    "rollout_s": "rollouts",
    "learn_s": "learning",
    "validate_s": "validation",
    "other_s": "everything else",
}


def write(
    output_dir: Path, *, brief: bool = False, history: RunHistory | None = None
) -> dict[str, Any]:
    """Write the files from the events so far; returns the numbers in report.json.

    `brief` draws nothing, because the command should end soon: the report shows the reward plot if it
    is up to date, and no other pictures. `history`: of a run that may be running; by default the
    events are read.
    """
    outcome = measure(output_dir) if history is None else Outcome.of(history)
    plot = output_dir / "reward_plot.png"
    before, after = _compared_rollouts(output_dir, outcome)
    reward = outcome.history.failure_reward if outcome.held_out else None
    examples, answers = pick(before, after, failure_reward=reward), Answers.of(before, after)
    pictures = {} if brief else _draw(outcome, plot)
    newest_at = _newest_reward_at(outcome.history)
    if not brief or (plot.exists() and plot.stat().st_mtime >= newest_at):
        pictures["rewards"] = plot.read_bytes()
    embedded = {k: f"data:image/png;base64,{b64encode(v).decode()}" for k, v in pictures.items()}
    values = content(outcome, answers, may_run=history is not None) | {
        "examples": examples,
        "commands": _commands(outcome, request(output_dir / "trajectories"), output_dir),
        "pictures": embedded,
    }
    numbers = outcome.as_dict() | {
        "headline": values["headline"],
        "training_data": values["funnel"].as_dict()
        | {"retried": dict(outcome.history.retried)}
        | {"validation_retried": dict(outcome.history.validation_retried)},
        "answers": answers and answers.as_dict(),
        "examples": [asdict(example) for example in examples],
    }
    write_atomic(output_dir / "report.json", json.dumps(numbers, indent=2) + "\n")
    write_atomic(output_dir / "report.md", render("markdown.j2", values))
    write_atomic(output_dir / "report.html", render("html.j2", values))
    return numbers


def render(output_format: str, values: dict[str, Any]) -> str:
    """Render a template; text from a model, a dataset or an error is escaped in both formats."""
    template = _environment(output_format).get_template("report.j2")
    text = template.render(values, format=output_format)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


@cache
def _environment(output_format: str) -> Environment:
    """Compiles a template once: a running run writes a report after every epoch."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        finalize=markdown.escape if output_format == "markdown.j2" else None,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    functions = counted, duration, number, markdown.fenced, markdown.one_line, markdown.script
    environment.filters |= {function.__name__: function for function in functions}
    return environment


# ---- what the template shows ----------------------------------------------------------------------


def content(
    outcome: Outcome, answers: Answers | None = None, *, may_run: bool = False
) -> dict[str, Any]:
    """The values of the template, except for its pictures, examples and commands.

    `may_run`: whether an unfinished run may be running.
    """
    history, run = outcome.history, outcome.history.run
    head, basis, tone = headline(outcome)
    if may_run and history.status == "unfinished":
        head = f"Not finished: {history.num_done} of {counted(run.epochs, 'epoch')} done"
        basis = basis.replace("It is not finished; the", "If the run has stopped, the", 1)
    if answers and answers.collapsed and tone == "good":
        tone = "unsure"
    phases = [(PHASE_NAMES[k], s) for k, s in history.phases.items() if s >= SHORTEST_S]
    warnings = (w for w in history.warnings if not w.startswith(FLAT))  # it has its own section
    return {
        "outcome": outcome,
        "history": history,
        "run": run,
        "headline": head,
        "basis": basis,
        "tone": tone,
        "answers": answers,
        "plot_title": plot_title(outcome)[0],
        "tiles": _tiles(outcome),
        "diagnosis": None if outcome.verdict == "better" else diagnosis(history),
        "funnel": Funnel.of(history),
        "failed_round": history.failed_round,
        "failed_rows": failed_rows(history.failed_round),
        "retried": retried_rows(history),
        "phases": [(name, s / history.seconds, duration(s)) for name, s in phases],
        "sampling_s": history.phases["rollout_s"] + history.phases["validate_s"],
        "warnings": Counter(re.sub(r"^epoch \d+: ", "", warning) for warning in warnings),
        "details": _details(outcome),
    }


def _tiles(outcome: Outcome) -> list[tuple[str, str, str]]:
    """The most important numbers: label, value, note."""
    first, last, gain = outcome.baseline, outcome.tuned, outcome.gain
    if first is None or last is None or gain is None:
        return []
    change = "change", signed(gain.mean), ends(gain)
    tiles = [_tile("before", first), _tile("after", last), change]
    return [*tiles, _tile("newest", outcome.newest)] if outcome.newest else tiles


def _tile(label: str, policy: PolicyReward) -> tuple[str, str, str]:
    low, high = number(policy.low), number(policy.high)
    interval = "" if low == high else f"{low} to {high}; "
    place = f"epoch {policy.epoch + 1}" if policy.step is None else f"step {policy.step}"
    failed = f"; {policy.failure_rate:.0%} failed" if policy.failure_rate else ""
    return label, number(policy.mean), f"{interval}{place}{failed}"


def _commands(
    outcome: Outcome, body: dict[str, Any] | None, output_dir: Path
) -> list[tuple[str, str]]:
    """How to use the model: what each command does, and the command, which works in any directory."""
    run, model = outcome.history.run, outcome.model
    if model is None or not outcome.step:
        return []
    asks = "send what the agent sends" if body else "send a request"
    body = body or {"messages": [{"role": "user", "content": "Hello"}]}
    # A terminal shows a whole answer better than a stream of events.
    body = {"model": model, **{k: v for k, v in body.items() if not k.startswith("stream")}}
    url = shlex.quote(f"{run.base_url or 'http://127.0.0.1:8000/v1'}/chat/completions")
    data = shlex.quote(json.dumps(body, ensure_ascii=False))
    headers = "-H 'Content-Type: application/json'"
    if run.needs_key:
        asks += "; HONE_API_KEY is the server's key"
        headers += ' -H "Authorization: Bearer $HONE_API_KEY"'
    program, serve = run.program or "hone", []
    folder = str(output_dir.absolute() / f"{run.name}-adapter")
    root, where = f" --root {shlex.quote(run.root)}" if run.root else "", ""
    if run.base_url is None:
        serve = [("serve the model", f"{program} serve{root}")]
    elif urlsplit(run.base_url).hostname not in LOCAL:
        program, folder, where = "hone", f"./{run.name}-adapter", "on the server's machine, "
    if run.base_url and not root:  # the server did not tell
        root = ' --root "${HONE_ROOT:-.hone}"'
        where = "on the server's machine, where HONE_ROOT is the root of the server, "
    return [
        *serve,
        (asks, f"curl {url} {headers} \\\n  -d {data}"),
        (
            f"{where}export a PEFT adapter, or with --merge a whole model",
            f"{program} export {shlex.quote(model)} {shlex.quote(folder)}{root}",
        ),
    ]


def _details(outcome: Outcome) -> dict[str, str]:
    history, run = outcome.history, outcome.history.run
    settings = next((job.config for job in reversed(history.jobs) if job.config), {})
    training, held_out = run.evaluators
    two = training != held_out and run.validation_examples
    details = {
        "model": f"{run.project}/{run.name}" if run.name else None,
        "base model": run.base_model,
        "run": run.run_id,
        "configuration": run.config_file,
        "command": run.command,
        "seed": run.seed,
        "epochs": f"{history.num_done} of {run.epochs}",
        "training examples": run.examples,
        "generations per example": run.generations,
        "held-out examples": run.validation_examples,
        "evaluator": f"{training}; held out {held_out}" if two else training,
        "learning rate": settings.get("learning_rate") or run.learning_rate,
        "loss": settings.get("loss"),
        "beta": settings.get("beta"),
        "row_tokens": settings.get("row_tokens"),
    }
    known = ((k, v) for k, v in details.items() if v is not None)
    return {k: f"{v:g}" if isinstance(v, float) else str(v) for k, v in known}


# ---- from files -----------------------------------------------------------------------------------


def _draw(outcome: Outcome, plot: Path) -> dict[str, bytes]:
    """The plots other than the reward plot, which has its own file."""
    from hone.report import plots  # imported here: matplotlib takes a second

    plots.reward_plot(outcome.history, plot)
    learning = plots.learning(outcome.history)
    pictures = {} if learning is None else {"learning": learning}
    if len(outcome.deltas) > 1 and outcome.held_out:
        pictures["changes"] = plots.example_changes(outcome.deltas)
    return pictures


def _newest_reward_at(history: RunHistory) -> float:
    collected = [r.collected.at for r in history.rounds if r.collected]
    return max([*collected, *(v.at for v in history.validations)], default=0.0)


def _compared_rollouts(
    output_dir: Path, outcome: Outcome
) -> tuple[dict[str, ReportedRollout], dict[str, ReportedRollout]]:
    """The first rollout of each example under the two policies that are compared."""
    compared, folder = outcome.compared, output_dir / "trajectories"
    if outcome.baseline is None or outcome.tuned is None:
        return {}, {}
    split = "train" if compared is None else "final" if compared.fresh else "val"
    epochs = outcome.baseline.epoch, outcome.tuned.epoch
    before, after = (read_rollouts(folder / file_name(split, epoch)) for epoch in epochs)
    return before, after
