"""Checkpoints: the adapter, optimizer and manifest of each step, and the model's history.

In:   a function that writes the files of one step
Out:  ROOT/projects/PROJECT/models/NAME/checkpoints/0000, 0001, ...; beside them history.jsonl, and
trajectories/SPLIT/STEP.jsonl with one logged group per line

A directory named by its number is complete and proved. It is written under another name, synced
with a manifest that contains every file's SHA-256, and renamed; a trained step first becomes
NNNN.unproved, which is not served, and gets its number once the engine has proved that it serves
it. So a crash at any moment, or a failed publish, leaves the previous step as the newest.

Old steps may lose their optimizer's state: the manifest is replaced first, atomically, then the file
is removed. Such a step is whole by its manifest; only training from it begins with fresh moments.

A step is corrupted only if a file is missing, does not parse or has another hash. A file that cannot
be read for now is not corrupted: StorageError is raised and nothing is renamed.
"""

import itertools
import json
import logging
import math
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hone.errors import ConfigError, Conflict, NotFound
from hone.files.disk import append_lines, move, sha256_of, storage, sync, write_atomic
from hone.files.logs import say
from hone.files.redact import redact_json
from hone.store.failpoints import failpoint
from hone.types import ModelKey, model_directory

FAILPOINTS = (
    "checkpoint/before-fill",
    "checkpoint/before-fsync",
    "checkpoint/after-fsync",
    "checkpoint/before-rename",
    "checkpoint/after-rename",
    "checkpoint/before-promote",
    "checkpoint/after-promote",
)
MANIFEST = "manifest.json"
OPTIMIZER = "optimizer.safetensors"
HISTORY = "history.jsonl"
UNPROVED = ".unproved"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_STEP = re.compile(r"[0-9]{4,}")
_UNFINISHED = re.compile(r"\.[0-9]{4,}(\.unproved)?\.(partial|deleted)")
"""Steps that were being written or deleted when the server was killed."""


@dataclass(frozen=True)
class Checkpoint:
    """One step on disk."""

    key: ModelKey
    step: int
    path: Path
    sha256: str
    """Hash of the adapter's tensors, which identifies it in an engine."""
    manifest: dict[str, Any]

    @property
    def proved(self) -> bool:
        return not self.path.name.endswith(UNPROVED)

    @property
    def has_optimizer(self) -> bool:
        """Whether training can continue from it exactly."""
        return OPTIMIZER in self.manifest["files"]

    @property
    def bytes(self) -> int:
        """Size of its files on disk, without those that are deleted meanwhile. Raises StorageError."""
        size = 0
        with storage(self.path), suppress(FileNotFoundError):
            for file in self.path.iterdir():
                with suppress(FileNotFoundError):
                    size += file.stat().st_size
        return size


# Named here because `list` is a method below.
Steps = list[int]
Listed = list[Checkpoint]
Lines = list[dict[str, Any]]


class Checkpoints:
    """The steps of every model under one root. Blocking; one writer per model at a time."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._verified: dict[Path, object] = {}
        """The hashes and stats of steps whose files this process has hashed. A rename keeps both."""
        self._best: dict[ModelKey, tuple[int | None, object]] = {}
        """The best step of a model, and what it follows from: metric, steps, history, manifest."""
        self._moving = threading.RLock()
        """Held while steps are renamed, so that no two threads move the same one."""
        self._logging = threading.Lock()
        """Held from looking for an idempotency key to writing it."""

    def model_dir(self, key: ModelKey) -> Path:
        for part in (key.project, key.name):
            if not _NAME.fullmatch(part):
                raise ConfigError(
                    f"{part!r} is not a name: use letters, digits, '.', '_' and '-', and begin "
                    "with a letter or a digit"
                )
        return model_directory(self.root, key.project, key.name)

    # ---- writing ----------------------------------------------------------------------------

    def write(
        self,
        key: ModelKey,
        step: int,
        fill: Callable[[Path], str],
        *,
        proved: bool = True,
        meanwhile: Callable[[Checkpoint], AbstractContextManager[None]] | None = None,
        **manifest: Any,
    ) -> Checkpoint:
        """Write a step from the files that `fill` writes; `fill` returns the adapter's hash.

        `meanwhile` may read the files of the step, at a temporary path, while they are hashed and
        synced; the directory is renamed after it returns.
        """
        target = self._directory(key, step, "" if proved else UNPROVED)
        partial = target.with_name(f".{target.name}.partial")
        with storage(target):
            self._clear(target.parent)
            if not proved and target.exists():  # left by a job that failed or was cancelled
                shutil.rmtree(target)
            partial.mkdir()
            failpoint("checkpoint/before-fill")
            try:
                sha256 = fill(partial)
                content = {
                    "format": 1,
                    "model": str(key),
                    "step": step,
                    "sha256": sha256,
                    "created_at": time.time(),
                    **manifest,
                }
                filled = Checkpoint(key, step, partial, sha256, dict(content))
                with nullcontext() if meanwhile is None else meanwhile(filled):
                    names = sorted(os.listdir(partial))
                    stats = _stats(partial, names)  # before hashing, as in `_wrong`
                    content["files"] = {name: sha256_of(partial / name) for name in names}
                    (partial / MANIFEST).write_text(
                        json.dumps(content, indent=2) + "\n", encoding="utf-8"
                    )
                    failpoint("checkpoint/before-fsync")
                    for file in (*partial.iterdir(), partial):
                        sync(file)
                    failpoint("checkpoint/after-fsync")
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
            failpoint("checkpoint/before-rename")
            move(partial, target)
        self._verified[target] = content["files"], stats
        failpoint("checkpoint/after-rename")
        return Checkpoint(key, step, target, sha256, content)

    def promote(self, checkpoint: Checkpoint) -> Checkpoint:
        """Give a proved step its number, which makes it the newest; durable on return."""
        if checkpoint.proved:  # by an earlier attempt, which may have ended before it was durable
            with storage(checkpoint.path):
                sync(checkpoint.path.parent)
            return checkpoint
        target = checkpoint.path.with_name(f"{checkpoint.step:04d}")
        failpoint("checkpoint/before-promote")
        with storage(target):
            move(checkpoint.path, target)
        self._verified[target] = self._verified.pop(checkpoint.path, None)
        failpoint("checkpoint/after-promote")
        return replace(checkpoint, path=target)

    def delete(self, key: ModelKey, steps: Iterable[int]) -> Steps:
        """Delete steps, but never the newest good one; returns the deleted ones."""
        with self._moving:
            newest = self.newest(key)
            spared = {newest.step} if newest else set()
            gone = sorted(self.steps(key).keys() & set(steps) - spared)
            for step in gone:
                # Renamed first, so that a crash cannot leave an incomplete step under its number.
                path = self._directory(key, step)
                aside = path.with_name(f".{step:04d}.deleted")
                with storage(path):
                    shutil.rmtree(aside, ignore_errors=True)
                    move(path, aside)
                shutil.rmtree(aside, ignore_errors=True)
            return gone

    def move_aside(self, key: ModelKey, target: Path) -> None:
        """Rename the directory of a model that is deleted; nothing if it has none."""
        path = self.model_dir(key)
        with self._moving, storage(path):
            if path.exists():
                move(path, target)

    def keep(
        self,
        key: ModelKey,
        *,
        last: int | None = None,
        best: str | None = None,
        steps: Iterable[int] = (),
        smoothing: float = 1.0,
    ) -> Steps:
        """Delete all but the newest `last`, the best by a metric, and `steps`; returns the deleted."""
        have = self._steps(key)
        spared = {*steps, *(have[-last:] if last else ())}
        if best is not None and (top := self.best(key, best, smoothing)) is not None:
            spared.add(top)
        return self.delete(key, set(have) - spared)

    def drop_optimizers(self, key: ModelKey, *, last: int, steps: Iterable[int] = ()) -> Steps:
        """Remove the optimizer's state of all but the newest `last` steps, the best, and `steps`.

        Returns the steps that lost it.
        """
        have, dropped = self.list(key), []
        spared = {*steps, self.best(key)}
        for checkpoint in have[: -max(last, 1)]:
            file = checkpoint.path / OPTIMIZER
            with self._moving, storage(file):  # not for all: who looks for the newest step waits
                if checkpoint.step in spared or not file.exists():
                    continue
                files = dict(checkpoint.manifest["files"])
                files.pop(OPTIMIZER, None)
                write_atomic(
                    checkpoint.path / MANIFEST,
                    json.dumps({**checkpoint.manifest, "files": files}, indent=2) + "\n",
                )
                file.unlink()
            dropped.append(checkpoint.step)
        return dropped

    # ---- reading ----------------------------------------------------------------------------

    def steps(self, key: ModelKey) -> dict[int, float]:
        """The steps, ascending, and when each was written. Reads the directory and no file."""
        parent, steps = self.model_dir(key) / "checkpoints", dict[int, float]()
        for step in self._steps(key):
            with suppress(FileNotFoundError), storage(parent):  # deleted meanwhile
                steps[step] = (parent / f"{step:04d}").stat().st_mtime
        return steps

    def newest_at(self, key: ModelKey, times: Sequence[float]) -> set[int]:
        """The step that was the newest at each of these times; none where there was none yet."""
        if not times:
            return set()
        written = {one.step: one.manifest["created_at"] for one in self.list(key)}
        before = ([step for step, at in written.items() if at <= time] for time in times)
        return {max(steps) for steps in before if steps}

    def list(self, key: ModelKey) -> Listed:
        """All whole steps, ascending, with their manifests; their other files are not read."""
        read = (self._read(key, step) for step in self._steps(key))
        return [checkpoint for checkpoint in read if checkpoint is not None]

    def newest(self, key: ModelKey) -> Checkpoint | None:
        """The newest step whose files are intact; corrupted ones are set aside."""
        with self._moving:
            for step in reversed(self._steps(key)):
                checkpoint = self._read(key, step)
                wrong = self._wrong(checkpoint)
                if wrong is None:
                    return checkpoint
                aside = self._set_aside(self._directory(key, step))
                say(
                    "a checkpoint is corrupted; the one before is used",
                    level=logging.WARNING,
                    model=str(key),
                    step=step,
                    wrong=wrong,
                    kept_as=aside,
                )
        return None

    def get(self, key: ModelKey, step: int) -> Checkpoint:
        """One step, its files verified."""
        checkpoint = self._read(key, step)
        wrong = self._wrong(checkpoint)
        if wrong is not None:  # its optimizer's state may have been dropped in between
            checkpoint = self._read(key, step)
            wrong = self._wrong(checkpoint)
        if checkpoint is not None and wrong is None:
            return checkpoint
        what = f"is corrupted ({wrong})" if checkpoint else "does not exist"
        others = [one for one in self._steps(key) if one != step]
        raise NotFound(f"step {step} of model {str(key)!r} {what}. Steps: {_shown(others, step)}.")

    def of_job(self, key: ModelKey, job_id: str, step: int) -> Checkpoint | None:
        """A step if the job wrote it, proved or not. Other steps are not read."""
        for suffix in (UNPROVED, ""):
            checkpoint = self._read(key, step, suffix)
            if checkpoint is not None and checkpoint.manifest.get("job") == job_id:
                return None if self._wrong(checkpoint) else checkpoint
        return None

    # ---- history ----------------------------------------------------------------------------

    def log(
        self,
        key: ModelKey,
        step: int,
        metrics: dict[str, float],
        split: str,
        *,
        replace: bool = False,
        run: str | None = None,
        request: tuple[str, str] | None = None,
    ) -> int:
        """Append a line of metrics to history.jsonl, each named SPLIT/METRIC; returns its step.

        `replace`: earlier values of these metrics at this step no longer count. `run`: the run that
        measured them. `request`: idempotency key and hash of a request. If it was logged before,
        nothing is appended; raises Conflict if the key was used for another request.
        """
        named = {f"{split}/{name}": value for name, value in metrics.items()}
        line = {**named, "step": step, "recorded_at": datetime.now(UTC).isoformat()}
        if replace:
            line["replaces"] = True
        if run is not None:
            line["run"] = run
        path = self.model_dir(key) / HISTORY
        with self._logging:
            if request is not None:
                line["request"] = list(request)
                if (logged := self._logged(key, *request)) is not None:
                    with storage(path):
                        sync(path)  # the first attempt may have failed in doing so
                    return logged["step"]
            append_lines(path, json.dumps(line).encode() + b"\n")
        return step

    def _logged(self, key: ModelKey, idempotency_key: str, sha256: str) -> dict[str, Any] | None:
        """The line of a request that was logged before. Raises Conflict for another request."""
        for line in reversed(self.history(key)):
            known_key, known_sha256 = line.get("request") or (None, None)
            if known_key != idempotency_key:
                continue
            if known_sha256 != sha256:
                raise Conflict(
                    f"idempotency_key {idempotency_key!r} was used for other metrics of model "
                    f"{str(key)!r}. Send a new key with a new request."
                )
            return line
        return None

    def history(self, key: ModelKey) -> Lines:
        """Every line that was logged, oldest first."""
        path = self.model_dir(key) / HISTORY
        lines = []
        for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            try:
                lines.append(json.loads(text))
            except ValueError:
                continue  # cut short by a crash
        return lines

    def best(self, key: ModelKey, metric: str = "val/reward", smoothing: float = 1.0) -> int | None:
        """The retained step with the highest mean of a metric, smoothed over steps; None if none.

        Only the values of the run that logged the metric last count, as in that run's report: another
        run may have measured other examples. Values without a run count together, as one run. Of equal
        steps it is the first. 1 means no smoothing; smaller values weight earlier steps, as polars'
        ewm_mean does.
        """
        steps, written = self._steps(key), _written(self.model_dir(key) / HISTORY)
        if written is None:
            return None
        cached = self._best.get(key)
        if cached is not None:
            best, seen = cached
            if seen == (metric, smoothing, steps, written, self._manifest_written(key, best)):
                return best
        means = _smoothed_means(self.history(key), metric, smoothing)
        ranked = sorted(means.keys() & set(steps), key=lambda step: (-means[step], step))
        best = next((step for step in ranked if self._read(key, step) is not None), None)
        seen = metric, smoothing, steps, written, self._manifest_written(key, best)
        self._best[key] = best, seen
        return best

    def _manifest_written(self, key: ModelKey, step: int | None) -> object:
        return None if step is None else _written(self._directory(key, step) / MANIFEST)

    # ---- one directory ----------------------------------------------------------------------

    def _directory(self, key: ModelKey, step: int, suffix: str = "") -> Path:
        return self.model_dir(key) / "checkpoints" / f"{step:04d}{suffix}"

    def _steps(self, key: ModelKey) -> Steps:
        """The steps that have a directory, ascending. Not by `glob`, which hides errors."""
        parent = self.model_dir(key) / "checkpoints"
        try:
            with storage(parent):
                names = os.listdir(parent)
        except FileNotFoundError:
            return []
        return sorted(int(name) for name in names if _STEP.fullmatch(name))

    def _clear(self, parent: Path) -> None:
        """Create the directory of a model's steps, or remove unfinished writes from it."""
        if not parent.exists():
            parent.mkdir(parents=True)
            for new in parent.parents[: len(parent.relative_to(self.root).parts)]:
                sync(new)
        for path in parent.glob(".*"):
            if _UNFINISHED.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)

    def _read(self, key: ModelKey, step: int, suffix: str = "") -> Checkpoint | None:
        """None if there is no manifest or it does not parse. Raises StorageError."""
        path = self._directory(key, step, suffix)
        try:
            with storage(path):
                manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
            if manifest["step"] != step or any("/" in name for name in manifest["files"]):
                return None
            return Checkpoint(key, step, path, manifest["sha256"], manifest)
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None

    def _wrong(self, checkpoint: Checkpoint | None) -> str | None:
        """Why the files are not as they were written; None if they are. Cached until changed."""
        if checkpoint is None:
            return "manifest.json cannot be read"
        path, files = checkpoint.path, checkpoint.manifest["files"]
        try:
            with storage(path):
                seen = files, _stats(path, files)
                if self._verified.get(path) == seen:
                    return None
                for name, sha256 in files.items():
                    if sha256_of(path / name) != sha256:
                        return f"{name} is not what was written"
        except FileNotFoundError as error:
            return f"{Path(error.filename).name} is missing"
        self._verified[path] = seen
        return None

    def _set_aside(self, path: Path) -> Path:
        """Rename a corrupted step to NNNN.corrupt, NNNN.corrupt.2, ...; none is overwritten."""
        numbers = itertools.chain([""], (f".{number}" for number in itertools.count(2)))
        targets = (path.with_name(f"{path.name}.corrupt{number}") for number in numbers)
        target = next(target for target in targets if not target.exists())
        with storage(path):
            move(path, target)
        return target


def _shown(steps: Steps, near: int, most: int = 10) -> str:
    """Steps for a message: all of few, otherwise the nearest, and how many there are."""
    if len(steps) <= most:
        return ", ".join(map(str, steps)) or "none"
    nearest = sorted(sorted(steps, key=lambda step: abs(step - near))[:5])
    return (
        f"{len(steps)} from {steps[0]} to {steps[-1]}, the nearest {', '.join(map(str, nearest))}"
    )


def _smoothed_means(lines: Lines, metric: str, smoothing: float) -> dict[int, float]:
    """The smoothed mean of a metric by step, of the run that logged it last."""
    lines = [
        line
        for line in lines
        if isinstance(line.get(metric), int | float) and math.isfinite(line[metric])
    ]
    values: dict[int, list[float]] = {}
    for line in lines:
        if line.get("run") != lines[-1].get("run"):
            continue
        if line.get("replaces"):
            values.pop(line["step"], None)
        values.setdefault(line["step"], []).append(line[metric])
    total = weight = 0.0
    smoothed = {}
    for step in sorted(values):
        total = sum(values[step]) / len(values[step]) + (1 - smoothing) * total
        weight = 1 + (1 - smoothing) * weight
        smoothed[step] = total / weight
    return smoothed


def _stats(directory: Path, names: Iterable[str]) -> list[tuple[int, int, int]]:
    """What differs once one of the files has been changed."""
    return [_state((directory / name).stat()) for name in names]


def _written(path: Path) -> tuple[int, int, int] | None:
    """What differs once a file has been changed; None if there is none."""
    try:
        with storage(path):
            return _state(path.stat())
    except FileNotFoundError:
        return None


def _state(stat: os.stat_result) -> tuple[int, int, int]:
    return stat.st_size, stat.st_mtime_ns, stat.st_ino


# ---- logged trajectories ------------------------------------------------------------------------


def log_groups(model_dir: Path, split: str, step: int, groups: Iterable[dict[str, Any]]) -> Path:
    """Append groups to the file of a step, without secrets in their text.

    Raises RecursionError if one is nested too deeply.
    """
    lines = "".join(json.dumps(redact_json(group)) + "\n" for group in groups)
    path = model_dir / "trajectories" / split / f"{step:04d}.jsonl"
    append_lines(path, lines.encode())
    return path


def prune_groups(root: Path, max_bytes: int) -> int:
    """Delete the oldest files beyond a total size; returns how many were deleted."""
    files = [
        (path, path.stat()) for path in root.glob("projects/*/models/*/trajectories/*/*.jsonl")
    ]
    files.sort(key=lambda file: file[1].st_mtime, reverse=True)
    sizes = itertools.accumulate(stat.st_size for _, stat in files)
    to_delete = [path for (path, _), size in zip(files, sizes, strict=True) if size > max_bytes]
    for path in to_delete:
        path.unlink(missing_ok=True)
    return len(to_delete)
