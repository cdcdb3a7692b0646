"""The commands export-trajectories and import-trajectories.

In:   a run directory and the server that recorded its calls; files of other programs
Out:  a file in one of the formats; the number of trajectories on stdout
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hone.cli.terminal import LogLevel, parse_path, parse_reward
from hone.integrations.interchange.files import Format

if TYPE_CHECKING:
    from hone.integrations.interchange.rollouts import CallsOf

log = logging.getLogger("hone")

exchange = typer.Typer(rich_markup_mode="rich")

USUAL_ROOT = Path(".hone")

Output = Annotated[
    Path,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE",
        parser=parse_path,
        help="Output file or directory.",
        show_default=False,
    ),
]
MinReward = Annotated[
    float | None,
    typer.Option(
        "--min-reward",
        "--min_reward",
        metavar="REWARD",
        parser=parse_reward,
        help="Leave out trajectories with a lower reward or none.",
    ),
]


@exchange.command("export-trajectories")
def export_command(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN_DIR",
            help="Directory of the run: finetuning.output_dir.",
            show_default=False,
        ),
    ],
    output: Output,
    format: Annotated[Format, typer.Option("--format", help="Output format.")] = Format.ATIF,
    split: Annotated[
        list[str] | None,
        typer.Option(
            "--split", help="Split to export: train, val or final; may be repeated. All by default."
        ),
    ] = None,
    min_reward: MinReward = None,
    root: Annotated[
        Path | None,
        typer.Option(
            "--root",
            metavar="DIR",
            parser=parse_path,
            help="Root of the server with the recorded calls; the run's own by default.",
        ),
    ] = None,
    server: Annotated[
        str | None,
        typer.Option(
            "--server", metavar="URL", help="Address of the server, to use instead of its root."
        ),
    ] = None,
    log_level: LogLevel = None,
) -> None:
    """Export the rollouts of a run for other programs; prints how many.

    atif: Harbor's Agent Trajectory Interchange Format, a directory with one file per rollout, or
    one line each in a FILE.jsonl. openai: lines of JSON with OpenAI's messages, a dataset for
    supervised fine-tuning. parquet: one row per conversation.

    Token ids and log-probabilities (atif and parquet) come from the server's root.

    Examples:

        hone export-trajectories .hone/runs/agent --format atif -o trajectories/

        hone export-trajectories .hone/runs/agent --format openai --min-reward 1 -o good.jsonl
    """
    from hone.integrations.interchange.files import write
    from hone.integrations.interchange.rollouts import exported_rollouts, run_started

    splits = split or ["train", "val", "final"]
    if unknown := [name for name in splits if name not in ("train", "val", "final")]:
        raise typer.BadParameter(f"--split {unknown[0]!r}; expected train, val or final")
    skipped = Counter[str]()
    with _recorded_calls(run_started(run), root, server) as calls_of:
        rollouts = exported_rollouts(run, calls_of, splits=splits, skipped=skipped)
        if min_reward is not None:
            rollouts = (r for r in rollouts if r.reward is not None and r.reward >= min_reward)
        count = write(output, format, rollouts)
    for reason, number in skipped.items():
        log.info("%d rollouts left out: %s", number, reason)
    typer.echo(f"{count} written to {output}")


@exchange.command("import-trajectories")
def import_command(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="Files or directories to read.", show_default=False),
    ],
    output: Output,
    min_reward: MinReward = None,
    log_level: LogLevel = None,
) -> None:
    """Convert trajectories of other programs to a dataset for supervised fine-tuning.

    Reads ATIF trajectories (files, lines of a .jsonl, or a directory with .json files in it, such as
    the jobs of Harbor) and lines of JSON with OpenAI's messages. Writes lines of JSON with
    `messages`, `tools`, `id` and `reward`, and prints how many.

    Examples:

        hone import-trajectories jobs/ -o dataset.jsonl

        hone import-trajectories a.jsonl b.jsonl --min-reward 0.5 -o dataset.jsonl
    """
    from hone.integrations.interchange.files import read_conversations, write_dataset

    conversations = read_conversations(files)
    first = next(conversations, None)  # a mistake in the first file must not truncate the output
    rest = conversations if first is None else chain([first], conversations)
    if min_reward is not None:
        rest = (one for one in rest if one.reward is not None and one.reward >= min_reward)
    typer.echo(f"{write_dataset(output, rest)} written to {output}")


@contextmanager
def _recorded_calls(started: object, root: Path | None, server: str | None) -> "Iterator[CallsOf]":
    """A function that reads a rollout's recorded calls from the server or from its root."""
    base_url = getattr(started, "base_url", None)
    if server is None and root is None and base_url is not None:
        server = str(base_url).removesuffix("/v1")
    if server is not None:
        from hone.backends.remote import RemoteBackend

        backend = RemoteBackend(server)
        with asyncio.Runner() as runner:
            yield lambda rollout: runner.run(backend.calls(rollout))
        return
    root = root or Path(getattr(started, "root", None) or USUAL_ROOT)
    state = root / "state.sqlite"
    if not state.is_file():
        log.warning(
            "%s: there is no server state, so token ids, log-probabilities and all but the last "
            "conversation of each rollout are missing; name the server's root with --root",
            root,
        )
        yield lambda rollout: ()
        return
    from hone.store.calls import CallStore
    from hone.store.database import Store

    store = Store(state, None)
    try:
        yield CallStore(store).rollout
    finally:
        store.close()
