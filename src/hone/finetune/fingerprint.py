"""The fingerprint of a run: what must not change between two starts of it.

In:   the configuration, and the options of the command line
Out:  JSON values that run.json holds, with which the next start is compared; the functions that a
      configuration names

Settings that do not change what is learned are left out: the number of epochs (unless the learning
rate falls over the epochs), early stopping, concurrency, timeouts, and addresses. Datasets and the
user's code are compared by content. The code of a function or a framework's agent is the file that
defines it, and the files that it imports, directly or indirectly, from the configuration's
directory or from its own package; imports are parsed, not executed. For a package in site-packages,
only the named module counts. The code of a program is every file that its command names, with the
imports of Python files, and everything that is copied into its working directory. Secrets are never
written.
"""

import ast
import os
import re
import shlex
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hone.config import registry
from hone.config.problems import Path as Keys
from hone.config.schema import Document, FinetuneRunConfig
from hone.config.secrets import Secrets
from hone.evaluation.datasets import CustomDataset, as_target
from hone.files.disk import sha256_of
from hone.finetune.adapter_config import adapter_config_of
from hone.workflow.command import CommandConfig
from hone.workflow.framework import FrameworkConfig
from hone.workflow.jsonable import plain
from hone.workflow.target import source_of

FREE = (
    "finetuning.num_epochs",
    "finetuning.output_dir",
    "finetuning.resume",
    "finetuning.keep_checkpoints",
    "finetuning.early_stopping",
    "finetuning.max_infrastructure_failures",
    "finetuning.rollout_timeout_s",
    "finetuning.rollout_retries",
    "finetuning.job_timeout_s",
    "eval.general.max_concurrency",
    "eval.general.output_dir",
    "eval.general.output.dir",
    "eval.general.output.cleanup",
    "eval.general.output.job_management",
    "eval.general.output.workflow_output_step_filter",
    "trainer_adapters.*.backend.ip",
    "trainer_adapters.*.backend.port",
    "trainer_adapters.*.backend.inference_port",
    "trainer_adapters.*.backend.root",
    "trainer_adapters.*.backend.engine",
    "trainer_adapters.*.backend.engine_python",
    "trainer_adapters.*.backend.engine_url",
    "trainer_adapters.*.backend.advertise_url",
    "llms.*.base_url",
    "loggers",
    *(
        f"{block}.{key}"
        for block in ("workflow", "functions.*")
        for key in ("url", "timeout_s", "keep_workdir")
    ),
)
"""Keys that may change between two starts."""
_DIGEST = re.compile(r"[0-9a-f]{64}")
FILES = "files"
"""Key under which the names of the compared files are stored, by the key of their content."""
CODE = "code"
"""Key under which the user's code is stored, by file."""


def fingerprint_of(
    document: Document, options: FinetuneRunConfig, validating: Document | None = None
) -> dict[str, Any]:
    """The fingerprint; `validating` is the document of --validation_config_file."""
    written = Secrets(document.loaded.data).hide(document.loaded.data)
    for key in FREE:
        _remove(written, key.split("."))
    adapter = adapter_config_of(document)
    if adapter is not None and adapter.training.schedule == "linear":
        # The learning rate of each job depends on how many are planned.
        written.setdefault("finetuning", {})["num_epochs"] = document.finetuning.num_epochs
    held_out, near = options.validation_dataset, document.file
    if held_out is None and validating is not None:
        held_out, near = _file_of(validating), validating.file
    training = options.dataset or _file_of(document)
    code = code_of(document)
    if validating is not None:
        code |= {f"{name} (validation)": held for name, held in code_of(validating).items()}
    command = {
        "result_json_path": options.result_json_path,
        "dataset": _digest(training, document.file),
        "validation_dataset": _digest(held_out, near),
        "validation_config_file": _digest(options.validation_config_file, document.file),
        "endpoint": True if options.endpoint else None,
    }
    files = {
        "command.dataset": training,
        "command.validation_dataset": held_out,
        "command.validation_config_file": options.validation_config_file,
    }
    named = {key: str(file) for key, file in files.items() if file is not None}
    return plain({**written, CODE: code, "command": command, FILES: named})


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What changed between two starts, one line per key. A file may move; its content counts."""
    files = [dict(fingerprint.get(FILES, {})) for fingerprint in (then, now)]
    before, after = (
        dict(_leaves({key: value for key, value in fingerprint.items() if key != FILES}))
        for fingerprint in (then, now)
    )
    changed = [key for key in {**before, **after} if before.get(key) != after.get(key)]
    return [
        _difference(key, before.get(key), after.get(key), *(named.get(key) for named in files))
        for key in changed
    ]


def _difference(key: str, then: Any, now: Any, file_then: str | None, file_now: str | None) -> str:
    """One line; the files are those whose content the key stands for."""
    file = key.removeprefix(f"{CODE}.")
    if file != key and then and now:
        return f"{file}: the code has changed"
    if file != key:
        return f"{file}: " + ("code that the run did not use" if now else "no longer used")
    if all(isinstance(one, str) and _DIGEST.fullmatch(one) for one in (then, now)):
        if file_then == file_now or file_then is None:
            return f"{key}: the content of {file_now} has changed"
        return f"{key}: {file_now} has another content than {file_then}, which the run started with"
    if file_then or file_now:
        return f"{key}: {file_then or 'no file'} then, {file_now or 'no file'} now"
    return f"{key}: {then!r} then, {now!r} now"


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key and value of every leaf."""
    if not isinstance(value, dict) or not value:
        if value != {} or not path.startswith(CODE):
            yield path, value
        return
    for key, inner in value.items():
        yield from _leaves(inner, f"{path}.{key}" if path else str(key))


def _file_of(document: Document) -> Path | None:
    dataset = document.eval.general.dataset
    return None if dataset is None else dataset.file_path


def program() -> str:
    """The command of this installation of hone, which works in any directory and shell."""
    # Not resolved: the interpreter of an environment is a link to one outside.
    script = Path(sys.executable).absolute().parent / "hone"
    own = [str(script)] if script.is_file() else [sys.executable, "-P", "-m", "hone"]
    return shlex.join(own)


def resume_arguments(arguments: Sequence[str], resume: str) -> list[str]:
    """Arguments of the command that resumes the run."""
    rest = [argument for argument in arguments if argument != "--fresh"]
    return [*rest, "-o", "finetuning.resume", "auto"] if resume == "never" else rest


def evaluators_of(name: str, training: Document, validation: Document | None) -> dict[str, str]:
    """The evaluators, for the report; two if the validation's file has another one."""
    documents = [one for one in (training, validation) if one and name in one.eval.evaluators]
    configs = [one.eval.evaluators[name] for one in documents]
    # The same `file.py:function` in two directories names two files.
    is_file = any(".py:" in str(getattr(config, "target", None)) for config in configs)
    places = {one.file.resolve().parent for one in documents if is_file}
    if len(documents) < 2 or (configs[0] == configs[1] and len(places) < 2):
        return {"evaluator": name}
    names = [getattr(config, "target", config.type_name) for config in configs]
    if names[0] == names[1]:
        names = [document.file.name for document in documents]
    labels = [f"{name} ({one})" for one in names]
    return {"evaluator": labels[0], "validation_evaluator": labels[1]}


def _remove(table: Any, path: Sequence[str]) -> None:
    """Remove a key; `*` is every key of a table."""
    if not isinstance(table, dict):
        return
    for key in list(table) if path[0] == "*" else [path[0]]:
        if len(path) == 1:
            table.pop(key, None)
        else:
            _remove(table.get(key), path[1:])


def _digest(path: str | Path | None, near: Path) -> str | None:
    """SHA-256 of a file; the path itself if it is not a file, None without a path."""
    if path is None:
        return None
    for place in (Path(path), near.parent / path):
        if place.is_file():
            return sha256_of(place)
    return str(path)


# ---- the user's code ------------------------------------------------------------------------------

INSTALLED = frozenset({"site-packages", "dist-packages"})
NO_CODE = INSTALLED | {"__pycache__", "node_modules", ".git"}
"""Directories that are ignored when a program's directory is hashed."""
PREPARE = ("eval", "general", "output", "custom_pre_eval_process_function")


def targets_of(document: Document, evaluators: Collection[str]) -> Iterator[tuple[Keys, str]]:
    """The user's functions that a document names: the key of each, and `file.py:function`."""
    scores = {name: document.eval.evaluators[name] for name in evaluators}
    blocks = [
        *((("functions", name), config) for name, config in document.functions.items()),
        (("workflow",), document.workflow),
        *((("eval", "evaluators", name), config) for name, config in scores.items()),
    ]
    for path, config in blocks:
        if config is not None and config.type_name == "python" and hasattr(config, "target"):
            yield (*path, "target"), config.target
    general = document.eval.general
    if isinstance(general.dataset, CustomDataset):
        yield ("eval", "general", "dataset", "function"), as_target(general.dataset.function)
    if general.output is not None and general.output.custom_pre_eval_process_function:
        yield PREPARE, as_target(general.output.custom_pre_eval_process_function)


def code_of(document: Document) -> dict[str, str]:
    """SHA-256 of each file of code, by its path from the configuration's directory."""
    directory = document.file.resolve().parent
    files: dict[Path, Path] = {}  # each with the directory in which its imports are looked up
    reward = [n for n in document.eval.evaluators if n == document.finetuning.reward_name]
    blocks = [*document.functions.values(), document.workflow]
    targets = [
        *(target for _, target in targets_of(document, reward)),
        *(f"{module}:_" for module in _plugins(document)),
        *(block.target for block in blocks if isinstance(block, FrameworkConfig)),
    ]
    sources = [source_of(target, directory) for target in targets]
    queue = [(file, _root(file, directory)) for file in sources if file is not None]
    for block in blocks:
        if isinstance(block, CommandConfig):
            queue += _program(block, document, directory)
    while queue:
        file, root = queue.pop()
        if file not in files:
            files[file] = root
            queue += [(imported, root) for imported in _imports(file, root)]
    digests = {
        os.path.relpath(file, directory if file.is_relative_to(directory) else root): sha256_of(
            file
        )
        for file, root in files.items()
    }
    return dict(sorted(digests.items()))


def _plugins(document: Document) -> Iterator[str]:
    """Modules of the components that plugins registered."""
    run, general = document.finetuning, document.eval.general
    used = [
        *(("llm_provider", config) for config in document.llms.values()),
        *(("function", config) for config in (*document.functions.values(), document.workflow)),
        ("dataset_loader", general.dataset),
        ("evaluator", document.eval.evaluators.get(run.reward_name or "")),
        ("trajectory_builder", document.trajectory_builders.get(run.trajectory_builder or "")),
        ("trainer_adapter", document.trainer_adapters.get(run.trainer_adapter or "")),
        ("trainer", document.trainers.get(run.trainer or "")),
    ]
    for kind, config in used:
        known = None if config is None else registry.find(kind, config.type_name)
        if known is not None and known.package != "hone":
            yield known.factory.__module__


def _program(
    config: CommandConfig, document: Document, directory: Path
) -> Iterator[tuple[Path, Path]]:
    """Files of a program, each with the directory in which its imports are looked up."""
    for place, argument in enumerate(config.command):
        written = argument.replace("{config_dir}", str(directory))
        # Other arguments are relative to the working directory of a rollout.
        if "/" in written if place == 0 else os.path.isabs(written):
            named = os.path.join(directory, written)
            if os.path.isfile(named):  # Path.is_file raises for a text too long for a path
                file = Path(named).resolve()
                yield file, file.parent
    outputs = [one.output_dir.resolve() for one in (document.finetuning, document.eval.general)]
    copied = config.files if config.workdir is None else [config.workdir, *config.files]
    for source in [(directory / path).resolve() for path in copied]:
        inside = source.rglob("*") if source.is_dir() else [source]
        for file in sorted(inside):
            is_output = any(file.is_relative_to(output) for output in outputs)
            if (
                file.is_file()
                and not is_output
                and not NO_CODE & set(file.relative_to(source).parts)
            ):
                yield file, source.parent


def _root(file: Path, directory: Path) -> Path:
    """Where imports of a file are looked up: the YAML's directory, or that of its package."""
    if file.is_relative_to(directory) and not INSTALLED & set(file.parts):
        return directory
    root = file.parent
    while (root / "__init__.py").is_file():
        root = root.parent
    return root


def _imports(file: Path, root: Path) -> Iterator[Path]:
    """Files under `root` that this one imports; none of an installed package."""
    if INSTALLED & set(file.parts) or file.suffix != ".py":
        return
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return  # loading it raises the error
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
    """Files of a module and of the packages that contain it, if they are under `root`."""
    for end in range(len(parts) + 1):
        place = root.joinpath(*parts[:end])
        for file in (place / "__init__.py", place.with_name(f"{place.name}.py")):
            if end and file.is_file():
                yield file.resolve()
