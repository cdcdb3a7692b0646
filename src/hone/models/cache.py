"""The cache of converted models: from a GGUF file to an HF directory under $HONE_HOME.

In:   a GGUF file and the model's name
Out:  $HONE_HOME/models/NAME-HASH (default ~/.cache/hone), with its origin in hone.json

A directory under its final name is complete: it is written under another name, synced, and renamed.
The hash covers the file's content and the converter's version, so an edited file or a newer converter
never gets an old conversion.
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

from hone.errors import ServerError
from hone.files.disk import move, sync
from hone.models import gguf

CONVERTER = 1
"""Increased with every change to what models/gguf.py writes."""

_PARTIAL = ".partial"


def cache_home() -> Path:
    """hone's cache directory: $HONE_HOME, else ~/.cache/hone."""
    return Path(os.environ.get("HONE_HOME") or "~/.cache/hone").expanduser()


def models_home() -> Path:
    """The directory of the conversions."""
    return cache_home() / "models"


def converted(source: Path, name: str, *, progress: gguf.ReportProgress | None = None) -> Path:
    """The conversion of `source`; converts it if there is none."""
    with source.open("rb") as stream:
        sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
    target = _target(sha256, name)
    if is_whole(target):
        return target
    home = target.parent
    try:
        home.mkdir(parents=True, exist_ok=True)
        with _locked(target):
            if not is_whole(target):  # another process may have converted it while this one waited
                _remove_partial(home, keep=target)
                _convert(source, sha256, name, target, progress)
    except OSError as error:
        raise ServerError(
            f"{target}: converting {source} failed ({error}).\n"
            "Free space or grant access there, or set HONE_HOME to another directory."
        ) from error
    return target


def existing(sha256: str, name: str) -> Path | None:
    """The conversion of the file with this hash; the file itself may be gone."""
    target = _target(sha256, name)
    return target if is_whole(target) else None


def read_origin(directory: Path) -> dict[str, Any] | None:
    """The hone.json of a converted directory; None if there is none."""
    try:
        return json.loads((directory / "hone.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None


def is_whole(directory: Path) -> bool:
    """Whether every file of the conversion exists with its size."""
    origin = read_origin(directory)
    return origin is not None and all(
        (directory / file).is_file() and (directory / file).stat().st_size == size
        for file, size in origin["files"].items()
    )


def _target(sha256: str, name: str) -> Path:
    key = hashlib.sha256(f"{CONVERTER} {sha256}".encode()).hexdigest()[:12]
    return models_home() / f"{re.sub(r'[^A-Za-z0-9._-]+', '-', name).strip('-.')}-{key}"


@contextmanager
def _locked(target: Path) -> Iterator[None]:
    """Hold the conversion's lock file; the system releases it when the process dies."""
    from filelock import FileLock

    with FileLock(target.with_name(f".{target.name}.lock")):
        yield


def _remove_partial(home: Path, *, keep: Path) -> None:
    """Remove partial directories of killed conversions: those whose lock is free."""
    from filelock import FileLock, Timeout

    for partial in home.glob(f".*{_PARTIAL}"):
        if partial.name == f".{keep.name}{_PARTIAL}":
            continue
        lock = FileLock(partial.with_name(partial.name.removesuffix(_PARTIAL) + ".lock"))
        try:
            with lock.acquire(timeout=0):
                shutil.rmtree(partial)
        except Timeout:
            continue


def _convert(
    source: Path, sha256: str, name: str, target: Path, progress: gguf.ReportProgress | None
) -> None:
    partial = target.with_name(f".{target.name}{_PARTIAL}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        converted = gguf.convert(source, partial, progress=progress)
        files = {file.name: file.stat().st_size for file in sorted(partial.iterdir())}
        origin = {
            "name": name,
            "source": source.name,
            "source_sha256": sha256,
            "converter": CONVERTER,
            "dtype": "float32",
            **asdict(converted),
            "files": files,
        }
        (partial / "hone.json").write_text(json.dumps(origin, indent=2) + "\n", encoding="utf-8")
        for file in (*partial.iterdir(), partial):
            sync(file)
        if target.exists():  # it was complete once, and files have been removed since
            shutil.rmtree(target)
        move(partial, target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
