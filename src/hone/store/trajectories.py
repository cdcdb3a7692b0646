"""Logged trajectories of a model, as files to look at.

In:   trajectory groups as JSON objects
Out:  MODEL/trajectories/SPLIT/STEP.jsonl, one group a line; the oldest files are pruned
"""

import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hone.disk import append_lines, storage


def log_groups(model_dir: Path, split: str, step: int, groups: Iterable[dict[str, Any]]) -> Path:
    """Append groups to the file of a step. Raises RecursionError if one is nested too deeply."""
    lines = "".join(json.dumps(group) + "\n" for group in groups)
    path = model_dir / "trajectories" / split / f"{step:04d}.jsonl"
    with storage(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        append_lines(path, lines.encode())
    return path


def prune_groups(root: Path, max_bytes: int) -> int:
    """Delete the oldest files beyond a total size; returns how many were deleted."""
    files = [(path, path.stat()) for path in root.glob("*/models/*/trajectories/*/*.jsonl")]
    files.sort(key=lambda file: file[1].st_mtime, reverse=True)
    sizes = itertools.accumulate(stat.st_size for _, stat in files)
    doomed = [path for (path, _), size in zip(files, sizes, strict=True) if size > max_bytes]
    for path in doomed:
        path.unlink(missing_ok=True)
    return len(doomed)
