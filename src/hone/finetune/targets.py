"""The user's own Python behind a run: which functions its file names, and what code they run.

In:   a Document
Out:  Target: the key and the function it names; the code of all of them, as hashes by file

The code of a function is the file it is defined in, and the files that this one imports, directly or
not, from the configuration's directory or from its own package. Imports are read, not executed, so
those inside functions count as well. Of a package in site-packages only the named module counts,
and no file that is not Python.
"""

import ast
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hone.config import registry
from hone.config.problems import Path as Keys
from hone.evaluation.datasets import CustomDataset, as_target
from hone.workflow.target import source_of

if TYPE_CHECKING:
    from hone.config.schema import Document

INSTALLED = frozenset({"site-packages", "dist-packages"})
PREPARE = ("eval", "general", "output", "custom_pre_eval_process_function")


class Target(NamedTuple):
    """A function that the file names."""

    path: Keys
    """The key that names it."""
    target: str
    """`package.module:function` or `file.py:function`."""


def targets_of(document: "Document") -> list[Target]:
    """The functions that a run calls, in the order of the file's sections."""
    scores, reward = document.eval.evaluators, document.finetuning.reward_function
    used = {} if reward is None or reward.name not in scores else {reward.name: scores[reward.name]}
    blocks = [
        *((("functions", name), config) for name, config in document.functions.items()),
        (("workflow",), document.workflow),
        *((("eval", "evaluators", name), config) for name, config in used.items()),
    ]
    named = [
        Target((*path, "target"), config.target)
        for path, config in blocks
        if config is not None and config.type_name == "python" and hasattr(config, "target")
    ]
    general = document.eval.general
    if isinstance(general.dataset, CustomDataset):
        path = ("eval", "general", "dataset", "function")
        named.append(Target(path, as_target(general.dataset.function)))
    if general.output is not None and general.output.custom_pre_eval_process_function:
        named.append(Target(PREPARE, as_target(general.output.custom_pre_eval_process_function)))
    return named


def code_of(document: "Document") -> dict[str, str]:
    """SHA-256 of each file of code, by its path from the configuration's directory."""
    directory = document.file.resolve().parent
    files: dict[Path, Path] = {}  # each with the directory that its imports are looked for in
    entries = [source_of(target, directory) for _, target in targets_of(document)]
    entries += [source_of(f"{name}:_", directory) for name in _plugins(document)]
    queue = [(file, _root(file, directory)) for file in entries if file is not None]
    while queue:
        file, root = queue.pop()
        if file not in files:
            files[file] = root
            queue += [(found, root) for found in _imports(file, root)]
    digests = {
        os.path.relpath(file, directory if file.is_relative_to(directory) else root): (
            hashlib.sha256(file.read_bytes()).hexdigest()
        )
        for file, root in files.items()
    }
    return dict(sorted(digests.items()))


def _plugins(document: "Document") -> Iterator[str]:
    """Modules of the components that are a plugin's."""
    run, general = document.finetuning, document.eval.general
    reward = None if run.reward_function is None else run.reward_function.name
    used = [
        *(("llm_provider", config) for config in document.llms.values()),
        *(("function", config) for config in (*document.functions.values(), document.workflow)),
        ("dataset_loader", general.dataset),
        ("evaluator", document.eval.evaluators.get(reward or "")),
        ("trajectory_builder", document.trajectory_builders.get(run.trajectory_builder or "")),
        ("trainer_adapter", document.trainer_adapters.get(run.trainer_adapter or "")),
        ("trainer", document.trainers.get(run.trainer or "")),
    ]
    for kind, config in used:
        known = None if config is None else registry.find(kind, config.type_name)
        if known is not None and known.package != "hone":
            yield known.factory.__module__


def _root(file: Path, directory: Path) -> Path:
    """Where imports of a file are looked for: beside the YAML, or around the file's package."""
    if file.is_relative_to(directory) and not INSTALLED & set(file.parts):
        return directory
    root = file.parent
    while (root / "__init__.py").is_file():
        root = root.parent
    return root


def _imports(file: Path, root: Path) -> Iterator[Path]:
    """Files under `root` that this one imports; none of an installed package."""
    if INSTALLED & set(file.parts):
        return
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return  # whoever loads it says so
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _files(root, alias.name.split("."))
        elif isinstance(node, ast.ImportFrom):
            near = file.parents[node.level - 1] if node.level else root
            parts = node.module.split(".") if node.module else []
            yield from _files(near, parts)
            for alias in node.names:
                yield from _files(near, [*parts, alias.name])


def _files(root: Path, parts: list[str]) -> Iterator[Path]:
    """The module of that dotted name and the packages it is in, as far as they are files here."""
    for end in range(len(parts) + 1):
        place = root.joinpath(*parts[:end])
        for file in (place / "__init__.py", place.with_name(f"{place.name}.py")):
            if end and file.is_file():
                yield file.resolve()
