"""Write docs/reference and the source tree of docs/architecture.md from the code.

In:   the schema of the YAML, TrainConfig and the server's Settings with their attribute docstrings;
      the command line's own help; the routes of the server's two apps;
      the event types and rollout records; the first line of every module
Out:  docs/reference/config.md, cli.md, http.md and run_directory.md; the tree in docs/architecture.md. `make docs`
      writes them; `make check` runs it with --check and fails where they are stale

Every key must say where its default comes from (ORIGIN below): a new key without an origin, or an
origin without a key, stops the build. So the one table of defaults can never be incomplete.
"""

import ast
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import typer
from pydantic import BaseModel
from pydantic_core import PydanticUndefined
from yaml_reference import bound, yaml_reference

from hone.cli import EXITS, app
from hone.events import TYPES as EVENTS
from hone.finetune.records import FailureRecord, RolloutRecord, StepRecord
from hone.server.app import create_apps
from hone.server.settings import Settings
from hone.server.state import State
from hone.types import Strict, TrainConfig

STANDARD = {"help", "install_completion", "show_completion"}
DOCS = Path(__file__).parent
REFERENCE = DOCS / "reference"
SOURCE = DOCS.parent / "src" / "hone"
FOLDERS = (
    *("config", "workflow", "capture", "evaluation", "finetune", "report", "backends"),
    *("wire", "server", "store", "chat", "inference", "learner", "models"),
)
"""In the order in which data visits them."""
TREE = ("<!-- source tree -->\n", "<!-- /source tree -->")
MANY = 12
"""Parameters of a command beyond which its usage does not repeat them."""
GENERATED = "<!-- written by docs/build.py; change the code, then run `make docs` -->"

ORIGIN = {
    "learning_rate": "ART's `TrainConfig`",
    "loss": "the GRPO paper; ART has used `cispo` since 0.5.7 and PPO's clip before",
    "epsilon": "PPO; the same in ART's `ppo` loss",
    "epsilon_high": "as in ART: equal to `epsilon` for the clipped losses, 4 for `cispo`",
    "unit": "ours: a rollout gets one reward, so it is one sequence however many calls it made",
    "dr_grpo_tokens": "ours: Dr. GRPO asks for a constant and leaves its size to the user",
    "scale_rewards": "the GRPO paper and ART; for `dr_grpo` the Dr. GRPO paper, and what TRL advises",
    "credit": "the GRPO paper (outcome supervision) and ART",
    "baseline": "the GRPO paper and ART",
    "beta": "ART up to 0.5.16, where it is the k3 term in the loss",
    "kl_penalty_coef": "ART from 0.5.17, where it is a penalty in the advantage",
    "importance_cap": "truncated importance sampling as published (cap 2); ART leaves it off",
    "groups_per_optimizer_step": "ours; ART steps once per packed row, so its step size hangs on packing",
    "max_grad_norm": "ours: the runs in docs/log.md that learned used 1; not compared with ART's 0.1",
    "weight_decay": "ours: an adapter is small and short-lived; ART decays by 0.1",
    "max_seq_length": "ours: the context of the smallest model supported; ART's is 32768",
    "max_staleness": "ours: GRPO is on-policy; ART trains on whatever it is given",
    "row_tokens": "ours: a prompt that does not fit is computed once for every answer; a constant cannot know",
}
"""Where each default of TrainConfig comes from, and where it differs from ART's."""


def config_reference() -> str:
    """The YAML; then the table of training defaults, and one paragraph per key."""
    _same_keys(TrainConfig, ORIGIN)
    lines = ["# Configuration", "", GENERATED, "", *yaml_reference()]
    lines += ["## TrainConfig", "", _doc(TrainConfig), ""]
    lines += ["| key | type | default | where the default comes from |", "|---|---|---|---|"]
    for key, field in TrainConfig.model_fields.items():
        default = "required" if field.default is PydanticUndefined else f"`{field.default!r}`"
        kind = _type_name(field.annotation).replace("|", "\\|")
        lines.append(f"| `{key}` | `{kind}` | {default} | {ORIGIN[key]} |")
    for key, field in TrainConfig.model_fields.items():
        bounds = ", ".join(filter(None, map(bound, field.metadata)))
        lines += ["", f"**`{key}`** {field.description}" + (f" ({bounds})" if bounds else "")]
    return "\n".join(lines) + "\n"


def cli_reference() -> str:
    """Every command with its arguments and options, depth first."""
    lines = [
        "# Commands",
        "",
        GENERATED,
        "",
        "## Exit status",
        "",
        "| status | meaning |",
        "|---|---|",
    ]
    lines += [*(f"| {status} | {meaning} |" for status, meaning in EXITS.items()), ""]
    for path, command in _walk("hone", typer.main.get_command(app)):
        parameters = [
            p for p in command.params if p.name not in STANDARD and not getattr(p, "hidden", False)
        ]
        usage = " ".join([path, *map(_placeholder, parameters)])
        if len(parameters) > MANY:
            usage = f"{path} [OPTIONS]"
        lines += [f"## {path}", "", (command.help or "").strip(), ""]
        children = getattr(command, "commands", {})
        lines += ["```", usage + (" COMMAND" if children else ""), "```", ""]
        lines += [_explained(parameter) for parameter in parameters]
        lines += [f"- `{path} {name}`" for name in children]
        lines += [""]
    return "\n".join(lines).rstrip() + "\n"


def http_reference() -> str:
    """Every route of the server, by the part it belongs to, and the limits a client can meet."""
    lines = ["# HTTP", "", GENERATED, ""]
    with TemporaryDirectory() as root:
        state = State.open(Settings(root=Path(root)))
        try:
            control, inference = create_apps(state)
        finally:
            state.store.close()
    alone = {(path, method) for path, method, _ in _routes(inference)}
    lines += ["Routes marked * are on the inference port too. `GET /openapi.json` has every field."]
    lines += ["", "| method | path | what it does |", "|---|---|---|"]
    for path, method, said in _routes(control):
        mark = " *" if (path, method) in alone else ""
        lines.append(f"| {method} | `{path}`{mark} | {said} |")
    lines += ["", "## Settings", "", _doc(Settings), "", "| setting | default | |", "|---|---|---|"]
    for key, field in Settings.model_fields.items():
        lines.append(
            f"| `{key}` | `{field.default}` | {' '.join((field.description or '').split())} |"
        )
    return "\n".join(lines) + "\n"


RUN_FILES = {
    "`run.json`": "id, seed and fingerprint of the run, and how many times it was started",
    "`config_effective.yml`": "the configuration with overrides applied, without secrets",
    "`events.jsonl`": "what happened, in order: see below",
    "`trajectories/`": "every rollout: see below",
    "`submissions/NNN_RRR.json`": "what was submitted for training in round RRR of epoch NNN",
    "`training_metrics.jsonl`": "one line per round: rewards, curriculum, job, learner metrics",
    "`reward_history.json`": "one entry per epoch: mean, lowest and highest reward",
    "`validation_history.json`": "one entry per validation",
    "`curriculum_state.json`": "state of the curriculum, if there is one",
    "`reward_plot.png`": "training and held-out reward over epochs",
    "`report.html`, `report.md`, `report.json`": "the verdict, for people and for programs",
}


def run_directory_reference() -> str:
    """The files of a run's output_dir, and the fields of events.jsonl and trajectories/."""
    lines = ["# The run directory", "", GENERATED, ""]
    lines += [
        "`hone finetune` writes these files into `finetuning.output_dir`. Epochs, rounds and "
    ]
    lines[-1] += "generations are numbered from 0."
    lines += ["", "| file | content |", "|---|---|"]
    lines += [f"| {name} | {content} |" for name, content in RUN_FILES.items()]
    lines += ["", "## events.jsonl", "", "One JSON object per line, in the order in which things "]
    lines[-1] += (
        "happened; a line is never changed. Every event has `at`, the time in seconds since 1970, and "
        "`type`. Fields with a default may be missing from the logs of earlier versions. Plugins may "
        "append events of their own types, and readers ignore fields they do not know. A resumed run "
        "may log an epoch twice; the later event counts."
    )
    for name, event in EVENTS.items():
        lines += ["", f"### `{name}`", "", _doc(event), *_fields(event, skip=("at", "type"))]
    lines += ["", "## trajectories/", "", "`epoch_NNN.jsonl` holds the training rollouts of epoch "]
    lines[-1] += (
        "NNN, `validation_NNN.jsonl` the validation after NNN epochs of training, and "
        "`final_NNN.jsonl` the comparison at the end of the run, one rollout per line. "
        f"{_doc(RolloutRecord)}"
    )
    lines += _fields(RolloutRecord)
    for name, model in {"failure": FailureRecord, "shaped": StepRecord}.items():
        lines += ["", f"### `{name}`", "", _doc(model), *_fields(model)]
    return "\n".join(lines) + "\n"


def _fields(model: type[BaseModel], skip: tuple[str, ...] = ()) -> list[str]:
    rows = []
    for key, field in model.model_fields.items():
        if key not in skip:
            default = field.get_default(call_default_factory=True)
            value = "" if default is PydanticUndefined else f"`{json.dumps(default)}`"
            kind = _type_name(field.annotation).replace("|", "\\|")
            text = " ".join((field.description or "").split())
            rows.append(f"| `{key}` | `{kind}` | {value} | {text} |")
    return ["", "| field | type | default | |", "|---|---|---|---|", *rows] if rows else []


def architecture() -> str:
    """docs/architecture.md with the tree of the source as it is."""
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    before, _, rest = text.partition(TREE[0])
    _, _, after = rest.partition(TREE[1])
    return f"{before}{TREE[0]}```\n{source_tree()}```\n{TREE[1]}{after}"


def source_tree() -> str:
    """Every module with the first line of its docstring; the modules of the root first."""
    folders = {path.parent for path in SOURCE.rglob("*.py")} - {SOURCE}
    order = [SOURCE, *(SOURCE / name for name in FOLDERS if SOURCE / name in folders)]
    if unknown := folders - set(order):
        sys.exit(f"docs/build.py: FOLDERS lacks {sorted(map(str, unknown))}; say where they stand")
    lines: list[str] = []
    for folder in order:
        depth = "" if folder is SOURCE else "  "
        name = "src/hone/" if folder is SOURCE else f"{folder.name}/"
        lines.append(f"{depth}{name:<25}{_first_line(folder / '__init__.py')}")
        modules = sorted(folder.glob("*.py"), key=lambda path: (path.name != "base.py", path.name))
        for path in modules:
            if path.name != "__init__.py":
                lines.append(f"{depth}  {path.name:<23}{_first_line(path)}")
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _first_line(path: Path) -> str:
    said = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return said.partition("\n")[0]


def _routes(app: Any) -> list[tuple[str, str, str]]:
    """Path, method and first line of what it says of itself, sorted."""
    return sorted(
        (path, method.upper(), route.get("description", "").partition("\n")[0])
        for path, methods in app.openapi()["paths"].items()
        for method, route in methods.items()
    )


# typer brings a click of its own, so commands and parameters are known by shape, not by class.
def _walk(path: str, command: Any) -> list[tuple[str, Any]]:
    found = [(path, command)]
    for name, child in getattr(command, "commands", {}).items():
        found += _walk(f"{path} {name}", child)
    return found


def _placeholder(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        name = parameter.metavar or parameter.name.upper()
        return name if parameter.required else f"[{name}]"
    return parameter.opts[0] if parameter.required else f"[{parameter.opts[0]}]"


def _explained(parameter: Any) -> str:
    option = parameter.param_type_name == "option"
    name = " ".join(filter(None, [*(parameter.opts if option else ()), parameter.metavar]))
    name = name or parameter.name.upper()
    flag = getattr(parameter, "is_flag", False)
    default = "" if flag or parameter.default is None else f" Default: `{parameter.default}`."
    return f"- `{name}`: {parameter.help or ''}{default}"


def _same_keys(model: type[Strict], origin: dict[str, str]) -> None:
    missing = model.model_fields.keys() - origin.keys()
    stale = origin.keys() - model.model_fields.keys()
    if missing or stale:
        sys.exit(
            f"docs/build.py: ORIGIN and {model.__name__} disagree; no origin for "
            f"{sorted(missing)}, no key for {sorted(stale)}; say where each default comes from"
        )


def _type_name(annotation: object) -> str:
    text = str(annotation) if not isinstance(annotation, type) else annotation.__name__
    return text.replace("typing.", "")


def _doc(model: type[BaseModel]) -> str:
    return " ".join((model.__doc__ or "").split())


def main(check: bool) -> None:
    """Write the pages, or say which are stale."""
    pages = {
        REFERENCE / "config.md": config_reference(),
        REFERENCE / "cli.md": cli_reference(),
        REFERENCE / "http.md": http_reference(),
        REFERENCE / "run_directory.md": run_directory_reference(),
        DOCS / "architecture.md": architecture(),
    }
    REFERENCE.mkdir(exist_ok=True)
    stale: list[str] = []
    for path, text in pages.items():
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(path.relative_to(DOCS.parent).as_posix())
        if not check:
            path.write_text(text, encoding="utf-8")
    if check and stale:
        sys.exit(f"docs/build.py: stale: {', '.join(stale)}; run `make docs` and commit them")
    print(f"docs: {'up to date' if not stale else 'wrote ' + ', '.join(stale)}")


if __name__ == "__main__":
    main(check="--check" in sys.argv[1:])
