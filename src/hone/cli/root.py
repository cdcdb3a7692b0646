"""The commands for what a server keeps under its root: models delete, models prune, backup.

In:   a root, whether a server runs on it or not
Out:  what would be deleted, with sizes; with --yes, the deletion; a copy of the root

A running server is asked over HTTP, because it must not lose what it uses. If none runs, the same
routes are called in this process, which holds the root's lock meanwhile. Nothing is loaded or trained.
"""

import asyncio
import json
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from hone.cli.terminal import LogLevel, parse_path, print_table
from hone.errors import Conflict, NotFound, Unavailable, did_you_mean
from hone.files.logs import log
from hone.report.text import counted
from hone.types import SERVER_ADDRESS, CheckpointInfo, ModelInfo, stored_name

if TYPE_CHECKING:
    import httpx2

MODELS = "/v1/training/models"
DELETE_S = 600.0
"""Timeout of a request: deleting many gigabytes takes a while."""
DAY_S = 86400.0

Root = Annotated[
    Path,
    typer.Option(
        "--root",
        metavar="DIR",
        parser=parse_path,
        help="Root of the server, running or not.",
    ),
]
Yes = Annotated[
    bool, typer.Option("--yes", help="Delete. Without it, nothing is deleted, only listed.")
]


def size(num_bytes: int) -> str:
    """A human-readable size, such as 1.5 MB."""
    power = min((len(str(num_bytes)) - 1) // 3, 4)
    return f"{num_bytes / 1000**power:.3g} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"


# ---- the server of a root, or its state -----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Control:
    """The training API of a root."""

    client: "httpx2.AsyncClient"
    log_place: str

    async def ask(self, method: str, path: str, **query: Any) -> Any:
        from hone.backends.http import refusal

        response = await self.client.request(method, path, params=query)
        if not response.is_success:
            raise refusal(response, self.log_place)
        return response.json()

    async def models(self) -> list[ModelInfo]:
        return [ModelInfo.model_validate(m, extra="ignore") for m in await self.ask("GET", MODELS)]

    async def steps(self, key: str) -> list[CheckpointInfo]:
        items = await self.ask("GET", f"{MODELS}/{key}/checkpoints")
        return [CheckpointInfo.model_validate(item, extra="ignore") for item in items]


def with_control(root: Path, work: Callable[[Control], Coroutine[Any, Any, None]]) -> None:
    """Run something with the training API of a root."""

    async def run() -> None:
        async with control(root) as opened:
            await work(opened)

    asyncio.run(run())


@asynccontextmanager
async def control(root: Path) -> AsyncIterator[Control]:
    """The training API of the server that runs on a root or, if none runs, of the root itself."""
    import httpx2

    from hone.files.lock import LockFile, LockHeld
    from hone.store.database import state_file

    state_file(root)  # raises
    place = str(root / "logs" / "server.log")
    try:
        lock = LockFile(root / "server.lock")
    except LockHeld:
        address = _address(root)
        key = os.environ.get("HONE_API_KEY") or _key(root)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        opened = httpx2.AsyncClient(
            base_url=address, headers=headers, timeout=DELETE_S, trust_env=False
        )
        async with opened as client:
            try:
                yield Control(client, place)
            except httpx2.TransportError as error:
                raise Unavailable(
                    f"--root {root}: its server does not answer at {address} ({error}). Wait until it "
                    "has started or ended, and try again."
                ) from None
        return
    from hone.server.http.app import create_apps
    from hone.server.settings import Settings
    from hone.server.state import State

    before = log.level
    if log.getEffectiveLevel() == logging.INFO:  # a line for each request is for a server's log
        log.setLevel(logging.WARNING)
    try:
        state = State(Settings(root=root.resolve()))
        try:
            transport = httpx2.ASGITransport(create_apps(state)[0])
            async with httpx2.AsyncClient(
                transport=transport, base_url="http://localhost", timeout=DELETE_S
            ) as client:
                yield Control(client, place)
        finally:
            await state.serving.close()
            state.workers.close()
            state.store.close()
    finally:
        log.setLevel(before)
        lock.release()


def _address(root: Path) -> str:
    try:
        address = json.loads((root / SERVER_ADDRESS).read_text(encoding="utf-8"))
        host, port = str(address["host"]), int(address["port"])
    except (OSError, ValueError, KeyError, TypeError):
        raise Unavailable(
            f"--root {root}: another process uses it, and no server listens yet. Wait until that has "
            "started or ended, and try again."
        ) from None
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _key(root: Path) -> str | None:
    file = root / "api_key"
    return (file.read_text(encoding="utf-8").strip() or None) if file.is_file() else None


def _named(models: list[ModelInfo], name: str) -> str:
    """PROJECT/NAME of a model. Raises NotFound, or Conflict for a name of several projects.

    A NAME may be written as its user called the model, with spaces and slashes.
    """
    keys = {f"{model.project}/{model.name}": model.name for model in models}
    exact = [name] if name in keys else []
    matches = exact or [key for key, own in keys.items() if own == stored_name(name)]
    if len(matches) > 1:
        raise Conflict(f"model {name!r} exists in several projects; use {' or '.join(matches)}")
    if matches:
        return matches[0]
    if name.count("/") == 1 and all(part == stored_name(part) for part in name.split("/")):
        return name  # its row may be unreadable; the server says so
    guess = did_you_mean(name, [*keys, *keys.values()])
    raise NotFound(
        f"no model called {name!r} is registered.{guess} Registered: {', '.join(keys) or 'none'}."
    )


# ---- commands -------------------------------------------------------------------------------------


def delete_command(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="NAME or PROJECT/NAME.", show_default=False)
    ],
    force: Annotated[
        bool, typer.Option("--force", help="Cancel its jobs and close its runs first.")
    ] = False,
    yes: Yes = False,
    root: Root = Path(".hone"),
    log_level: LogLevel = None,
) -> None:
    """Delete a trained model: its steps, history, jobs and runs. Its name becomes free.

    Shows what would be deleted; --yes deletes it. There is no way back: `hone export` saves a step,
    `hone backup` everything. A model with a job that has not ended, or with an open run, is deleted
    only with --force. Works on a running server, too. Base models are not touched.

    Examples:

        hone models delete agent

        hone models delete agent --yes
    """

    async def work(control: Control) -> None:
        key = _named(await control.models(), name)
        if not yes:
            steps = await control.steps(key)
            num_bytes = sum(step.bytes for step in steps)
            typer.echo(f"{key}: {counted(len(steps), 'step')}, {size(num_bytes)}")
            typer.echo("Nothing was deleted; add --yes to delete it.", err=True)
            return
        query = {"force": "true"} if force else {}
        deleted = await control.ask("DELETE", f"{MODELS}/{key}", **query)
        typer.echo(f"{key} deleted: {size(deleted['bytes'])}")

    with_control(root, work)


def prune_command(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME]...", help="NAME or PROJECT/NAME; all by default.", show_default=False
        ),
    ] = None,
    keep: Annotated[
        int, typer.Option("--keep", metavar="N", min=1, help="Newest steps to keep.")
    ] = 8,
    older_than: Annotated[
        float,
        typer.Option(
            "--older-than", metavar="DAYS", min=0, help="Delete only steps of at least this age."
        ),
    ] = 0.0,
    yes: Yes = False,
    root: Root = Path(".hone"),
    log_level: LogLevel = None,
) -> None:
    """Delete old steps of trained models.

    Lists the steps that can go, with their sizes; --yes deletes them. The newest steps (--keep), step
    0, the best step by `val/reward` and the first step of each open run always stay. Works on a
    running server, too. To have a server do this by itself, start it with --keep-steps.

    Examples:

        hone models prune

        hone models prune agent --keep 3 --older-than 30 --yes
    """

    async def work(control: Control) -> None:
        models = await control.models()
        chosen = {_named(models, name) for name in names or ()}
        for key in chosen:
            await control.steps(key)  # raises NotFound
        table = Table(box=None, pad_edge=False)
        for title in ("model", "step", "days old", "size"):
            table.add_column(
                title, overflow="fold", justify="left" if title == "model" else "right"
            )
        total = count = 0
        for model in models:
            key = f"{model.project}/{model.name}"
            if chosen and key not in chosen:
                continue
            for step in _old_steps(model, await control.steps(key), keep, older_than):
                if yes:
                    await control.ask("DELETE", f"{MODELS}/{key}/checkpoints/{step.step}")
                days = (time.time() - step.created_at) / DAY_S
                table.add_row(key, str(step.step), f"{days:.0f}", size(step.bytes))
                total, count = total + step.bytes, count + 1
        if not count:
            typer.echo("no step can go")
            return
        print_table(table)
        typer.echo(f"\n{counted(count, 'step')}, {size(total)}{' deleted' if yes else ''}")
        if not yes:
            typer.echo("Nothing was deleted; add --yes to delete them.", err=True)

    with_control(root, work)


def _old_steps(
    model: ModelInfo, steps: list[CheckpointInfo], keep: int, older_than: float
) -> list[CheckpointInfo]:
    """The steps that can go, ascending."""
    before = time.time() - older_than * DAY_S
    spared = {0, model.step, model.best_step, *(step.step for step in steps if step.in_use)}
    return [step for step in steps[:-keep] if step.step not in spared and step.created_at <= before]


def backup_command(
    directory: Annotated[
        Path,
        typer.Argument(
            metavar="DIR", parser=parse_path, help="A new or empty directory.", show_default=False
        ),
    ],
    root: Root = Path(".hone"),
    log_level: LogLevel = None,
) -> None:
    """Copy the state and the checkpoints of a server, which may be running; prints the directory.

    The copy is consistent: the database as it was at one moment, and every step that it names, with
    its hashes checked. On the same file system, files of steps are hard links and need no space; for
    a copy that survives the loss of the disk, name a directory on another one.

    The copy is a root: `hone serve --root DIR` serves its models and continues its jobs. It has no API
    key (a server makes its own), no logs, and not the directories of `hone finetune` and `hone eval`.
    Only its owner may read it.

    Examples:

        hone backup /mnt/backups/hone-monday

        hone backup ./copy --root /srv/hone
    """
    from hone.store.backup import backup

    done = backup(root, directory)
    for step in done.damaged:
        typer.echo(f"hone: left out: {step}", err=True)
    typer.echo(f"{counted(done.models, 'model')}, {counted(done.steps, 'step')}", err=True)
    typer.echo(str(directory))
    if done.damaged:
        raise typer.Exit(1)
