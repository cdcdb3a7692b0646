"""Conversions, each made once: from a GGUF file to its HF directory under $HONE_HOME.

In:   a GGUF and the name it goes by
Out:  $HONE_HOME/models/NAME-HASH (default ~/.cache/hone), with hone.json saying where it came from

A directory under its final name is whole: it is written under another name, synced, and renamed.
The hash is of the file's content and of the converter's version, so neither an edited file nor an
improved converter is ever answered with an old conversion.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hone.disk import move, sync
from hone.errors import ServerError
from hone.models import gguf

CONVERTER = 1
"""Raised with every change to what models/gguf.py writes."""

_PARTIAL = ".partial"


def cache_home() -> Path:
    """Where hone keeps what it can make again: $HONE_HOME, else the user's cache."""
    return Path(os.environ.get("HONE_HOME") or "~/.cache/hone").expanduser()


def models_home() -> Path:
    """Where conversions are kept."""
    return cache_home() / "models"


def converted(source: Path, name: str, *, progress: gguf.Progress | None = None) -> Path:
    """The conversion of `source`, made now if there is none."""
    with source.open("rb") as stream:
        sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
    target = _target(sha256, name)
    if is_whole(target):
        return target
    home = target.parent
    try:
        home.mkdir(parents=True, exist_ok=True)
        with _alone(target):
            if not is_whole(target):  # another process may have made it while this one waited
                _sweep(home, but=target)
                _make(source, sha256, name, target, progress)
    except OSError as error:
        raise ServerError(
            f"{target}: converting {source} failed ({error}).\n"
            "Free space or grant access there, or set HONE_HOME to another directory."
        ) from error
    return target


def existing(sha256: str, name: str) -> Path | None:
    """The conversion of a file known by its hash, which itself need not be here any more."""
    target = _target(sha256, name)
    return target if is_whole(target) else None


def about(directory: Path) -> dict[str, Any] | None:
    """What hone.json says of a converted directory; None where there is none to read."""
    try:
        return json.loads((directory / "hone.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None


def is_whole(directory: Path) -> bool:
    """Whether every file the conversion wrote is still there at its size."""
    said = about(directory)
    return said is not None and all(
        (directory / file).is_file() and (directory / file).stat().st_size == size
        for file, size in said["files"].items()
    )


def _target(sha256: str, name: str) -> Path:
    key = hashlib.sha256(f"{CONVERTER} {sha256}".encode()).hexdigest()[:12]
    return models_home() / f"{re.sub(r'[^A-Za-z0-9._-]+', '-', name).strip('-.')}-{key}"


@contextmanager
def _alone(target: Path) -> Iterator[None]:
    """Held by one process at a time; the system lets go of it when that process dies."""
    from filelock import FileLock

    with FileLock(target.with_name(f".{target.name}.lock")):
        yield


def _sweep(home: Path, *, but: Path) -> None:
    """Remove what killed conversions left: a partial directory whose lock is free."""
    from filelock import FileLock, Timeout

    for partial in home.glob(f".*{_PARTIAL}"):
        if partial.name == f".{but.name}{_PARTIAL}":
            continue
        lock = FileLock(partial.with_name(partial.name.removesuffix(_PARTIAL) + ".lock"))
        try:
            with lock.acquire(timeout=0):
                shutil.rmtree(partial)
        except Timeout:
            continue


def _make(
    source: Path, sha256: str, name: str, target: Path, progress: gguf.Progress | None
) -> None:
    partial = target.with_name(f".{target.name}{_PARTIAL}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        origin = gguf.convert(source, partial, progress=progress)
        files = {file.name: file.stat().st_size for file in sorted(partial.iterdir())}
        said = {
            "name": name,
            "source": source.name,
            "source_sha256": sha256,
            "converter": CONVERTER,
            "dtype": "float32",
            **asdict(origin),
            "files": files,
        }
        (partial / "hone.json").write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")
        for file in (*partial.iterdir(), partial):
            sync(file)
        if target.exists():  # it was whole once, and something has been removed from it since
            shutil.rmtree(target)
        move(partial, target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
