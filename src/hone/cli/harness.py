"""The commands of the harness: finetune, eval, run, validate, info.

In:   their options
Out:  each calls one function and prints its result

Options keep NeMo Agent Toolkit's spelling (`--config_file`), and accept hyphens too. Libraries are
imported when a command runs, so that `hone --help` stays quick.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from hone.cli.terminal import (
    Command,
    LogLevel,
    pairs,
    parse_path,
    parse_seconds,
    print_error,
    print_table,
)
from hone.files.redact import redact
from hone.tasks.interrupt import INTERRUPTED, leave

if TYPE_CHECKING:
    from hone.config.base import DatasetBaseConfig
    from hone.config.schema import Document
    from hone.evaluation.run import EvalSummary

harness = typer.Typer(rich_markup_mode="rich")
info = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")
harness.add_typer(info, name="info")


ConfigFile = Annotated[
    Path,
    typer.Option("--config_file", metavar="FILE", help="The YAML file.", show_default=False),
]
Override = Annotated[
    list[str] | None,
    typer.Option(
        "--override",
        "-o",
        metavar="KEY VALUE",
        help="Set a key of the YAML; may be repeated: -o finetuning.num_epochs 20.",
    ),
]
Dataset = Annotated[
    Path | None,
    typer.Option(
        "--dataset",
        metavar="FILE",
        help="Dataset file to use instead of eval.general.dataset; its extension selects the type.",
    ),
]
ResultPath = Annotated[
    str,
    typer.Option(
        "--result_json_path",
        metavar="JSONPATH",
        help="JSONPath of the answer in the workflow's output; $ is the whole output.",
    ),
]
Endpoint = Annotated[
    str | None,
    typer.Option(
        "--endpoint",
        metavar="URL",
        help="Run the workflow at this address, served by `hone serve-workflow`.",
    ),
]
EndpointTimeout = Annotated[
    float,
    typer.Option(
        "--endpoint_timeout",
        metavar="SECONDS",
        parser=parse_seconds,
        help="Timeout for one run of the workflow at the endpoint.",
    ),
]


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
            help="Held-out examples, run before, during and after training.",
        ),
    ] = None,
    validation_interval: Annotated[
        int,
        typer.Option(
            "--validation_interval",
            metavar="N",  # showing the range would leave no room for the names of the options
            min=1,
            help="Epochs between validations.",
        ),
    ] = 5,
    validation_config_file: Annotated[
        Path | None,
        typer.Option(
            "--validation_config_file",
            metavar="FILE",
            help="Separate YAML file for validations.",
        ),
    ] = None,
    fresh: Annotated[
        bool,
        typer.Option("--fresh", help="Start again at step 0; the files of the old run are kept."),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print what would run; make no requests."),
    ] = False,
    endpoint: Endpoint = None,
    endpoint_timeout: EndpointTimeout = 300.0,
    log_level: LogLevel = None,
) -> None:
    """Train the model behind a workflow on the rewards of its rollouts.

    After an interruption (Ctrl-C or a crash) the same command resumes the run. Exits 0 only if
    every epoch trained, or had nothing to train on.

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
            endpoint=endpoint,
            endpoint_timeout=endpoint_timeout,
            override=pairs(override),
            validation_dataset=validation_dataset,
            validation_interval=validation_interval,
            validation_config_file=validation_config_file,
            fresh=fresh,
            dry_run=dry_run,
        )
    )
    if status == INTERRUPTED:
        leave()  # does not wait for an agent's threads
    raise typer.Exit(status)


@harness.command("report", cls=Command)
def report_command(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", parser=parse_path, show_default=False)
    ],
    log_level: LogLevel = None,
) -> None:
    """Write the report of a run again, from the files in its output_dir; prints its path.

    A run that was killed has a report of its last whole epoch; this one has everything until then.

    Examples:

        hone report .hone/runs/agent
    """
    from hone.report import report

    report.write(directory)
    typer.echo(str(directory / "report.html"))


@harness.command("eval", cls=Command)
def eval_command(
    config_file: ConfigFile,
    dataset: Dataset = None,
    result_json_path: ResultPath = "$",
    skip_workflow: Annotated[
        bool,
        typer.Option("--skip_workflow", help="Only score the outputs in the dataset."),
    ] = False,
    skip_completed_entries: Annotated[
        bool,
        typer.Option(
            "--skip_completed_entries",
            help="Run only the rows without an output.",
        ),
    ] = False,
    reps: Annotated[int, typer.Option("--reps", metavar="N", min=1, help="Runs per row.")] = 1,
    override: Override = None,
    endpoint: Endpoint = None,
    endpoint_timeout: EndpointTimeout = 300.0,
    log_level: LogLevel = None,
) -> None:
    """Run a workflow over a dataset and score its outputs.

    Writes every output, score and model call to eval.general.output_dir. Items that
    failed because of the model count in the averages. Exits 1 if a rollout or an evaluator failed
    for another reason.

    Examples:

        hone eval --config_file=eval.yml

        hone eval --config_file=eval.yml --dataset=test.jsonl --reps 3
    """
    from hone.evaluation.base import EvalOptions
    from hone.evaluation.run import evaluate

    if reps > 1 and (skip_workflow or skip_completed_entries):
        flag = "--skip_workflow" if skip_workflow else "--skip_completed_entries"
        message = f"--reps {reps} and {flag}: rows are run {reps} times or not at all"
        raise typer.BadParameter(message)
    summary = evaluate(
        EvalOptions(
            config_file=config_file,
            dataset=dataset,
            result_json_path=result_json_path,
            skip_workflow=skip_workflow,
            skip_completed_entries=skip_completed_entries,
            endpoint=endpoint,
            endpoint_timeout=endpoint_timeout,
            reps=reps,
            override=pairs(override),
        )
    )
    _print_summary(summary)
    if summary.failed:
        print_error(summary.message)
        raise typer.Exit(1)


def _print_summary(summary: "EvalSummary") -> None:
    typer.echo("\n=== EVALUATION SUMMARY ===")
    typer.echo(f"Workflow Status: {summary.status} ({summary.items} items)")
    typer.echo(f"Total Runtime: {summary.seconds:.2f} s\n")
    table = Table(box=None, pad_edge=False)
    table.add_column("Evaluator", overflow="fold")
    table.add_column("Avg Score", justify="right", no_wrap=True)
    table.add_column("Failures", justify="right", no_wrap=True)
    table.add_column("By The Model", justify="right", no_wrap=True)
    table.add_column("Output File", overflow="fold")
    for row in summary.evaluators:
        score = "none" if row.average_score is None else f"{row.average_score:.4f}"
        counted = "" if row.failure_reward is None else f" at {row.failure_reward:g}"
        by_policy = f"{row.policy_failures}{counted}"
        table.add_row(row.name, score, str(row.failures), by_policy, str(row.output_file))
    print_table(table)
    if summary.note:
        typer.echo(f"\n{redact(summary.note)}")


@harness.command("run", cls=Command)
def run_command(
    config_file: ConfigFile,
    input: Annotated[
        list[str] | None,
        typer.Option("--input", metavar="TEXT", help="An input; may be repeated."),
    ] = None,
    input_file: Annotated[
        Path | None,
        typer.Option(
            "--input_file",
            metavar="FILE",
            exists=True,
            dir_okay=False,
            help="A file whose text is used as another input.",
        ),
    ] = None,
    override: Override = None,
    log_level: LogLevel = None,
) -> None:
    """Run a workflow on an input and print its output.

    Examples:

        hone run --config_file=agent.yml --input "Which cat sits on the mat?"

        hone run --config_file=agent.yml --input_file=question.txt
    """
    from hone.workflow.run import RunOptions, run_inputs

    if not input and input_file is None:
        raise typer.BadParameter('there is no input; give --input "TEXT" or --input_file=FILE')
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
        failure = result.failure.failure
        print_error(f"the workflow failed: {failure.type}: {failure.message}")
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
    """Check a YAML file: list all its problems, or its components if there are none.

    A file with `finetuning.enabled: true` must have everything that `hone finetune` needs. Datasets
    are read and the functions of `target:` imported; a reward that cannot be called, and rows
    without the answer it needs, are problems. Nothing is run, and no request is made. Exits 1 if
    there is a problem.

    Examples:

        hone validate --config_file=train.yml

        hone validate --config_file=train.yml -o finetuning.num_epochs 20
    """
    from hone.finetune.checks.documents import read_run

    document = read_run(config_file, pairs(override))
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for section, text in _sections(document):
        table.add_row(section, text)
    typer.echo(f"{config_file}: valid\n")
    print_table(table)


def _sections(document: "Document") -> list[tuple[str, str]]:
    """The components of a document, one line per section."""

    def listed(configs: Any) -> str:
        names = ", ".join(f"{name} ({config.type_name})" for name, config in configs.items())
        return f"{len(configs)}: {names}" if configs else "none"

    general, run = document.eval.general, document.finetuning
    rows = [
        ("llms", listed(document.llms)),
        ("functions", listed(document.functions)),
        ("workflow", document.workflow.type_name if document.workflow else "none"),
        ("eval.general.dataset", _dataset(general.dataset)),
        ("eval.evaluators", listed(document.eval.evaluators)),
        ("trajectory_builders", listed(document.trajectory_builders)),
        ("trainer_adapters", listed(document.trainer_adapters)),
        ("trainers", listed(document.trainers)),
    ]
    if document.loggers:
        rows.append(("loggers", ", ".join(logger.type_name for logger in document.loggers)))
    if run.enabled:
        reward = run.reward_function.name if run.reward_function else "none"
        rows.append(("finetuning", f"{run.num_epochs} epochs, reward {reward}, {run.output_dir}"))
    else:
        rows.append(("finetuning", "not enabled"))
    return rows


def _dataset(config: "DatasetBaseConfig | None") -> str:
    if config is None:
        return "none"
    kind = config.type_name
    return f"{config.file_path} ({kind})" if config.file_path else kind


@info.callback()
def _info() -> None:
    """Show what is installed.

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
            help="Only this kind (repeatable): function, llm_provider, evaluator, dataset_loader, "
            "trajectory_builder, trainer_adapter, trainer or logger.",
        ),
    ] = None,
    log_level: LogLevel = None,
) -> None:
    """List the values of `_type`: hone's own and those of plugins.

    Examples:

        hone info components

        hone info components -t evaluator -t trainer
    """
    from hone.config import plugins, registry

    for name in kind or ():
        if name not in registry.KINDS:
            raise typer.BadParameter(
                f"-t {name}: no such kind. Known: {', '.join(registry.KINDS)}."
            )
    failed = (*plugins.discover(), *(plugins.load_toolkit() or ()))
    table = Table(box=None, pad_edge=False)
    for title in ("kind", "_type", "package", ""):
        table.add_column(title, no_wrap=title != "", overflow="fold")
    for component in registry.known():
        if not kind or component.kind in kind:
            table.add_row(component.kind, component.name, component.package, component.summary)
    print_table(table)
    for reason in failed:
        print_error(str(reason))
