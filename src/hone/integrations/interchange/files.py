"""Write the rollouts of a run in one of the formats, and read conversations of the others.

In:   ExportedRollouts; files and directories with ATIF trajectories or lines of OpenAI's messages
Out:  a file, or a directory with one trajectory each; conversations
"""

import json
import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any, TextIO

from hone.errors import ConfigError
from hone.files.disk import output
from hone.integrations.interchange.atif import from_atif, is_atif, to_atif
from hone.integrations.interchange.base import Conversation, ExportedRollout, json_text
from hone.integrations.interchange.openai_messages import from_line, to_line
from hone.integrations.interchange.parquet import write_parquet

log = logging.getLogger("hone")


class Format(StrEnum):
    """Formats of `hone export-trajectories`."""

    ATIF = "atif"
    OPENAI = "openai"
    PARQUET = "parquet"


def write(path: Path, format: Format, rollouts: Iterable[ExportedRollout]) -> int:
    """Write the rollouts; returns the number of trajectories or lines.

    ATIF has one document per trajectory: a path that ends in .jsonl gets one per line, any other
    path is a directory with one file each.
    """
    if format is Format.PARQUET:
        with _replacing(path) as temporary:
            return write_parquet(temporary, rollouts)
    if format is Format.ATIF and path.suffix != ".jsonl":
        return _write_directory(path, rollouts)
    with _replacing(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        if format is Format.ATIF:
            return _write_lines(file, map(to_atif, rollouts))
        return _write_lines(file, (to_line(one) for r in rollouts for one in r.conversations))


def write_dataset(path: Path, conversations: Iterable[Conversation]) -> int:
    """Write conversations as lines of OpenAI's messages; returns the number of lines."""
    with _replacing(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        return _write_lines(file, map(to_line, conversations))


def _write_lines(file: TextIO, lines: Iterable[Any]) -> int:
    count = 0
    for line in lines:
        file.write(json_text(line) + "\n")
        count += 1
    return count


def _write_directory(path: Path, rollouts: Iterable[ExportedRollout]) -> int:
    if path.suffix or path.is_file():
        raise ConfigError(
            f"-o {path}: ATIF has one document for each trajectory; name a directory, or a file "
            "that ends in .jsonl"
        )
    if path.is_dir() and any(path.iterdir()):
        raise ConfigError(
            f"-o {path}: the directory is not empty, and the trajectories of another export would be "
            "mixed with these; name a new one, or empty it"
        )
    count = 0
    with output(f"-o {path}"):
        path.mkdir(parents=True, exist_ok=True)
        for rollout in rollouts:
            name = rollout.record.rollout.replace(":", "_").replace("/", "_")
            (path / f"{name}.json").write_text(json_text(to_atif(rollout), indent=1), "utf-8")
            count += 1
    return count


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A temporary file that replaces the path when it is complete."""
    if path.is_dir():
        raise ConfigError(f"-o {path}: is a directory; name a file")
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with output(f"-o {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield temporary
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


# ---- reading ------------------------------------------------------------------------------------


def read_conversations(paths: Iterable[Path]) -> Iterator[Conversation]:
    """Conversations of files; of a directory, those of every ATIF trajectory below it."""
    for path in paths:
        if path.is_dir():
            yield from _read_directory(path)
        else:
            yield from _read_file(path)


def _read_directory(path: Path) -> Iterator[Conversation]:
    has_trajectory = False
    for file in sorted(path.rglob("*.json")):
        try:
            document = _document(file)
        except ConfigError as error:  # a log, or an incomplete file of a killed agent
            log.warning("Left out: %s", error)
            continue
        if not is_atif(document):
            continue
        has_trajectory = True
        conversations = from_atif(document, str(file))
        if not conversations:
            log.warning("Left out: %s: has no steps", file)
        yield from conversations
    if not has_trajectory:
        raise ConfigError(f"{path}: holds no ATIF trajectory (a .json file with `steps`)")


def _read_file(path: Path) -> Iterator[Conversation]:
    if path.suffix == ".json":
        document = _document(path)
        entries = document if isinstance(document, list) else [document]
    else:
        entries = _lines(path)
    for number, entry in enumerate(entries, start=1):
        where = f"{path}:{number}"
        if is_atif(entry):
            conversations = from_atif(entry, where)
            if not conversations:
                raise ConfigError(f"{where}: the trajectory has no steps")
            yield from conversations
        else:
            yield from_line(entry, where)


def _lines(path: Path) -> Iterator[Any]:
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from None
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                yield json.loads(line)
            except ValueError as error:
                raise ConfigError(f"{path}:{number}: is not JSON ({error})") from None


def _document(path: Path) -> Any:
    try:
        return json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise ConfigError(f"{path}: is not JSON ({error})") from None
