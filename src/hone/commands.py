"""The harness's commands: finetune, eval, run, validate, info.

In:   their options
Out:  each calls one function of the part it belongs to and prints what that returns

Options keep the spelling of the seed documents (`--config_file`), and take a hyphen as well.
Libraries load when a command runs, so that `hone --help` stays quick.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from hone.errors import ConfigError, NotInThisVersion
from hone.finetune.interrupt import INTERRUPTED, leave
from hone.terminal import Command, LogLevel, pairs, print_table

if TYPE_CHECKING:
    from hone.config.schema import Document
    from hone.evaluation.run import EvalSummary

harness = typer.Typer(rich_markup_mode="rich")
info = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")
harness.add_typer(info, name="info")


def _refuse_endpoint(ctx: typer.Context, value: str | None) -> str | None:
    if value is not None:
        raise NotInThisVersion(
            f"--endpoint {value}: not in this version of hone. The workflow runs here; name it "
            f"in the YAML (workflow: {{_type: python, target: my_package.agent:run}})."
        )
    return value


ConfigFile = Annotated[
    Path,
    typer.Option("--config_file", metavar="FILE", help="The YAML.", show_default=False),
]
Override = Annotated[
    list[str] | None,
    typer.Option(
        "--override",
        "-o",
        metavar="KEY VALUE",
        help="Set one key of the YAML, as often as needed: -o finetuning.num_epochs 20.",
    ),
]
Dataset = Annotated[
    Path | None,
    typer.Option(
        "--dataset",
        metavar="FILE",
        help="Instead of eval.general.dataset; its type by its extension.",
    ),
]
ResultPath = Annotated[
    str,
    typer.Option(
        "--result_json_path",
        metavar="JSONPATH",
        help="Which part of the workflow's output is its answer; $ is all of it.",
    ),
]
Endpoint = Annotated[str | None, typer.Option("--endpoint", hidden=True, callback=_refuse_endpoint)]


@harness.command("finetune", cls=Command)
def finetune_command(
    config_file: ConfigFile,
    dataset: Dataset = None,
    result_json_path: ResultPath = "$",
    override: Override = None,
    validation_dataset: Annotated[
        Path | None,
        typer.Option(
            "--validation_dataset",
            metavar="FILE",
            help="Held-out examples, run before, during and after the training.",
        ),
    ] = None,
    validation_interval: Annotated[
        int,
        typer.Option(
            "--validation_interval",
            metavar="N",  # the range beside it would leave no room for the names of the options
            min=1,
            help="Epochs from one validation to the next.",
        ),
    ] = 5,
    validation_config_file: Annotated[
        Path | None,
        typer.Option(
            "--validation_config_file",
            metavar="FILE",
            help="Another YAML for validations.",
        ),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start anew at step 0; the old run's files are kept.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Say what would run; contact nobody."),
    ] = False,
    endpoint: Endpoint = None,
    log_level: LogLevel = None,
) -> None:
    """Train the model behind a workflow on the rewards of what it does.

    Interrupted (Ctrl-C, or worse), the same command goes on where it was. Exits 0 only if every
    epoch trained, or had nothing to train on.

    Examples:

        hone finetune --config_file=train.yml

        hone finetune --config_file=train.yml --validation_dataset=val.json

        hone finetune --config_file=train.yml -o finetuning.num_epochs 50
    """
    from hone.finetune.run import FinetuneOptions, finetune

    status = finetune(
        FinetuneOptions(
            config_file=config_file,
            dataset=dataset,
            result_json_path=result_json_path,
            override=pairs(override),
            validation_dataset=validation_dataset,
            validation_interval=validation_interval,
            validation_config_file=validation_config_file,
            fresh=fresh,
            dry_run=dry_run,
        )
    )
    if status == INTERRUPTED:
        leave()  # an agent's threads may take as long as they like
    raise typer.Exit(status)


@harness.command("eval", cls=Command)
def eval_command(
    config_file: ConfigFile,
    dataset: Dataset = None,
    result_json_path: ResultPath = "$",
    skip_workflow: Annotated[
        bool,
        typer.Option("--skip_workflow", help="Score the outputs that the dataset holds."),
    ] = False,
    skip_completed_entries: Annotated[
        bool,
        typer.Option(
            "--skip_completed_entries",
            help="Run only the rows that hold no output yet.",
        ),
    ] = False,
    reps: Annotated[int, typer.Option("--reps", metavar="N", min=1, help="Runs of each row.")] = 1,
    override: Override = None,
    endpoint: Endpoint = None,
    log_level: LogLevel = None,
) -> None:
    """Run a workflow over a dataset and score what it returns.

    Writes every output, score and model call to eval.general.output_dir. Exits 1 if a rollout or
    an evaluator failed: a failure has no score.

    Examples:

        hone eval --config_file=eval.yml

        hone eval --config_file=eval.yml --dataset=test.jsonl --reps 3
    """
    from hone.evaluation.base import EvalOptions
    from hone.evaluation.run import evaluate

    if reps > 1 and (skip_workflow or skip_completed_entries):
        flag = "--skip_workflow" if skip_workflow else "--skip_completed_entries"
        raise ConfigError(f"--reps {reps} and {flag}: rows are run {reps} times or not at all")
    summary = evaluate(
        EvalOptions(
            config_file=config_file,
            dataset=dataset,
            result_json_path=result_json_path,
            skip_workflow=skip_workflow,
            skip_completed_entries=skip_completed_entries,
            reps=reps,
            override=pairs(override),
        )
    )
    _print_summary(summary)
    if summary.failed:
        typer.echo(f"hone: {summary.message}", err=True)
        raise typer.Exit(1)


def _print_summary(summary: "EvalSummary") -> None:
    typer.echo("\n=== EVALUATION SUMMARY ===")
    typer.echo(f"Workflow Status: {summary.status} ({summary.items} items)")
    typer.echo(f"Total Runtime: {summary.seconds:.2f} s\n")
    table = Table(box=None, pad_edge=False)
    table.add_column("Evaluator", overflow="fold")
    table.add_column("Avg Score", justify="right", no_wrap=True)
    table.add_column("Failures", justify="right", no_wrap=True)
    table.add_column("Output File", overflow="fold")
    for one in summary.evaluators:
        score = "none" if one.average_score is None else f"{one.average_score:.4f}"
        table.add_row(one.name, score, str(one.failures), str(one.output_file))
    print_table(table)


@harness.command("run", cls=Command)
def run_command(
    config_file: ConfigFile,
    input: Annotated[
        list[str] | None,
        typer.Option("--input", metavar="TEXT", help="One input; may be given again."),
    ] = None,
    input_file: Annotated[
        Path | None,
        typer.Option(
            "--input_file",
            metavar="FILE",
            exists=True,
            dir_okay=False,
            help="Its text is one more input.",
        ),
    ] = None,
    override: Override = None,
    log_level: LogLevel = None,
) -> None:
    """Run a workflow on an input and print what it returns.

    Examples:

        hone run --config_file=agent.yml --input "Which cat sits on the mat?"

        hone run --config_file=agent.yml --input_file=question.txt
    """
    from hone.workflow.run import RunOptions, run_inputs

    if not input and input_file is None:
        raise ConfigError('hone run: there is no input; give --input "TEXT" or --input_file=FILE')
    results = run_inputs(
        RunOptions(
            config_file=config_file,
            override=pairs(override),
            input=tuple(input or ()),
            input_file=input_file,
        )
    )
    failed = False
    for result in results:
        if result.failure is None:
            typer.echo(_shown(result.output).encode("utf-8", "backslashreplace"))
            continue
        failed = True
        said = result.failure.failure
        typer.echo(f"hone: the workflow failed: {said.type}: {said.message}", err=True)
    if failed:
        raise typer.Exit(1)


def _shown(output: Any) -> str:
    from hone.workflow.jsonable import dumps

    if isinstance(output, str):
        return output
    return dumps(output, ensure_ascii=False)


@harness.command("validate", cls=Command)
def validate_command(
    config_file: ConfigFile, override: Override = None, log_level: LogLevel = None
) -> None:
    """Check a YAML file and say all that is wrong with it, or what is in it.

    A file with `finetuning.enabled: true` must have all that `hone finetune` needs. Datasets are read
    and the functions of `target:` imported; nothing is run or contacted. Exits 1 if anything is wrong.

    Examples:

        hone validate --config_file=train.yml

        hone validate --config_file=train.yml -o finetuning.num_epochs 20
    """
    from hone.finetune.documents import read_run

    document = read_run(config_file, pairs(override), resources=True)
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for section, said in _sections(document):
        table.add_row(section, said)
    typer.echo(f"{config_file}: valid\n")
    print_table(table)


def _sections(document: "Document") -> list[tuple[str, str]]:
    """What a document holds, a line for each section."""

    def listed(held: Any) -> str:
        names = ", ".join(f"{name} ({config.type_name})" for name, config in held.items())
        return f"{len(held)}: {names}" if held else "none"

    general, run = document.eval.general, document.finetuning
    data = general.dataset
    rows = [
        ("llms", listed(document.llms)),
        ("functions", listed(document.functions)),
        ("workflow", document.workflow.type_name if document.workflow else "none"),
        ("eval.general.dataset", f"{data.file_path} ({data.type_name})" if data else "none"),
        ("eval.evaluators", listed(document.eval.evaluators)),
        ("trajectory_builders", listed(document.trajectory_builders)),
        ("trainer_adapters", listed(document.trainer_adapters)),
        ("trainers", listed(document.trainers)),
    ]
    if run.enabled:
        reward = run.reward_function.name if run.reward_function else "none"
        rows.append(("finetuning", f"{run.num_epochs} epochs, reward {reward}, {run.output_dir}"))
    else:
        rows.append(("finetuning", "not enabled"))
    return rows


@info.callback()
def _info() -> None:
    """Say what this installation has.

    hone info components
    """


@info.command("components", cls=Command)
def components_command(
    kind: Annotated[
        list[str] | None,
        typer.Option(
            "--types",
            "-t",
            metavar="KIND",
            help="Only these: function, llm_provider, evaluator, dataset_loader, "
            "trajectory_builder, trainer_adapter or trainer.",
        ),
    ] = None,
    log_level: LogLevel = None,
) -> None:
    """List what a YAML file can name as `_type`, hone's own and the plugins'.

    Examples:

        hone info components

        hone info components -t evaluator -t trainer
    """
    from hone.config import plugins, registry

    for one in kind or ():
        if one not in registry.KINDS:
            raise ConfigError(f"-t {one}: no such kind. Known: {', '.join(registry.KINDS)}.")
    failed = plugins.discover()
    table = Table(box=None, pad_edge=False)
    for title in ("kind", "_type", "package", ""):
        table.add_column(title, no_wrap=title != "", overflow="fold")
    for found in registry.known():
        if not kind or found.kind in kind:
            table.add_row(found.kind, found.name, found.package, found.summary)
    print_table(table)
    for reason in failed:
        typer.echo(f"hone: {reason}", err=True)
