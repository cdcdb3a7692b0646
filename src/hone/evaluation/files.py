"""The output directory of `hone eval`: the files it writes, and those it may remove.

In:   results, one by one as they finish, then all of them; the configuration
Out:  workflow_output.json, EVALUATOR_output.json, config_original.yml, config_effective.yml,
      config_metadata.json; finished.jsonl until all of these are written

Each finished item is on disk before the next is counted, so a crash loses no finished rollout.
`.hone_files` lists the files that hone wrote, and cleaning removes no others: the directory belongs
to the user and may be a home directory.
"""

import json
import logging
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hone.config.base import EvalDatasetStructure
from hone.config.schema import EVALS, Document, EvalGeneralConfig, EvalOutputConfig, name_of
from hone.config.secrets import Secrets
from hone.errors import ConfigError, Conflict, StateError, StorageError
from hone.evaluation.base import EvalInputItem, EvalOptions, EvalOutput, Score
from hone.evaluation.results import ItemResult
from hone.evaluation.steps import all_steps, events_of, read_steps, seconds_of
from hone.files.disk import append_lines, open_lines, write_atomic
from hone.files.lock import LockFile, holder, lock_directory
from hone.files.redact import HIDDEN, redact_json, redact_urls
from hone.workflow.jsonable import dumps

log = logging.getLogger("hone")

KEY = "eval.general.output_dir"
WRITTEN = ".hone_files"
LOCK = ".hone_lock"
ESCAPED = "backslashreplace"
"""Error handler that writes a lone surrogate, which `json.loads` returns for `\\ud800`, as an
escape."""
FINISHED = "finished.jsonl"
OUTPUT = "workflow_output.json"
CONFIGS = ("config_original.yml", "config_effective.yml", "config_metadata.json")


class OutputDir:
    """The directory of one evaluation."""

    def __init__(self, general: EvalGeneralConfig, structure: EvalDatasetStructure) -> None:
        self._output = general.output or EvalOutputConfig()
        self._structure = structure
        # Absolute: an agent may change the directory of the process.
        self._root, self._here = general.output_dir.absolute(), Path.cwd()
        self._relative = not general.output_dir.is_absolute()
        jobs = self._output.job_management
        job = f"jobs/job_{uuid.uuid4()}" if jobs.append_job_id_to_output_dir else "."
        self.path = self._root / job
        self._lock: LockFile | None = None

    # ---- before -------------------------------------------------------------------------------

    def prepare(
        self, evaluators: Iterable[str], *, keep: bool, config_file: Path | None = None
    ) -> None:
        """Create and lock the directory; unless `keep`, remove an earlier evaluation's files.

        The default directory of `config_file` is refused if it holds the evaluation of another file.
        """
        files = {OUTPUT: "the workflow's output"}
        for name in evaluators:
            file = _file_name(name)
            if file in files:
                raise ConfigError(
                    f"eval.evaluators.{name}: its scores would be written to {file}, which is the "
                    f"file of {files[file]}; rename the evaluator"
                )
            files[file] = f"eval.evaluators.{name}"
        if keep:
            self.path = max(self._jobs(), key=_modified, default=self.path)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise ConfigError(f"{KEY}: {self.path} is a file; name a directory") from None
        except OSError as error:
            raise ConfigError(
                f"{KEY}: {self.path} cannot be created ({error.strerror}); name a directory that "
                "can be written to"
            ) from None
        for name in (*files, FINISHED, WRITTEN, *CONFIGS):
            if (self.path / name).is_dir():
                raise ConfigError(
                    f"{KEY}: {self.path / name} is a directory, and a file must be written there; move "
                    f"it, or name another directory with -o {KEY} DIR"
                )
        self._refuse_other(config_file)
        self._lock = lock_directory(self.path, LOCK, command="hone eval", key=KEY)
        if keep:
            if (self.path / FINISHED).exists():
                open_lines(self.path / FINISHED).close()  # removes a torn last line
        elif self._output.cleanup:
            for name in [*_written(self.path), WRITTEN]:
                (self.path / name).unlink(missing_ok=True)
        else:
            (self.path / FINISHED).unlink(missing_ok=True)
        self._evict()

    def _refuse_other(self, config_file: Path | None) -> None:
        """Refuse a default directory that holds the evaluation of another file of the same name."""
        if config_file is None or self._root != (EVALS / name_of(config_file)).absolute():
            return
        try:
            metadata = json.loads((self.path / CONFIGS[2]).read_text("utf-8"))
            other = self._here / metadata["config_file"]
        except (OSError, ValueError, KeyError, TypeError):
            return
        if other.is_file() and not other.samefile(config_file):
            raise Conflict(
                f"{KEY}: {self._shown(self.path)} holds the evaluation of {metadata['config_file']}, "
                f"and {config_file} has the same name; name another directory with -o {KEY} DIR"
            )

    def close(self) -> None:
        """Release the directory."""
        if self._lock is not None:
            self._lock.release()

    def finished(self) -> dict[str, dict[str, Any]]:
        """Entries with an answer from an earlier evaluation, by id; the later of two counts."""
        entries = [*_listed(self.path / OUTPUT), *_lines(self.path / FINISHED)]
        key = self._structure.generated_answer_key
        by_id = {str(entry.get("id")): entry for entry in entries}
        return {id: entry for id, entry in by_id.items() if entry.get(key) is not None}

    def filled(self, items: Sequence[EvalInputItem], *, runs: bool) -> list[EvalInputItem]:
        """The items, with answers of an earlier evaluation for the same id and question.

        An answer without its secrets may get another score. If `runs`, its item has no answer and is
        run again; else a warning says how many there are.
        """
        entries, keys = self.finished(), self._structure
        hidden = {id for id, e in entries.items() if HIDDEN in dumps(e[keys.generated_answer_key])}
        if runs:
            entries = {id: entry for id, entry in entries.items() if id not in hidden}
        elif hidden:
            log.warning(
                "%d answers in %s are scored without the secrets that hone has hidden (%s)",
                len(hidden),
                self.path,
                HIDDEN,
            )
        filled = []
        for item in items:
            entry = entries.get(item.id)
            if item.output_obj is None and entry is not None and self._answers(entry, item):
                where = f"{self.path}: entry {item.id!r}: its {keys.trajectory_key}"
                trajectory = entry.get(keys.trajectory_key)
                calls, steps = read_steps(trajectory, where)
                item = item.copy_with_updates(
                    output_obj=entry[keys.generated_answer_key],
                    trajectory=calls,
                    steps=steps,
                    events=events_of(trajectory),
                    seconds=seconds_of(entry),
                )
            filled.append(item)
        return filled

    def _answers(self, entry: Mapping[str, Any], item: EvalInputItem) -> bool:
        if not self._structure.disable:
            return _is_written_as(item.input_obj, entry.get(self._structure.question_key))
        row = item.full_dataset_entry if isinstance(item.full_dataset_entry, Mapping) else {}
        return all(
            _is_written_as(value, entry.get(name)) for name, value in row.items() if name != "id"
        )

    def _evict(self) -> None:
        """Remove hone's files from the oldest job directories beyond `max_jobs`."""
        jobs = self._output.job_management
        if not jobs.append_job_id_to_output_dir or not jobs.max_jobs:
            return
        others = [job for job in self._jobs() if job != self.path and holder(job / LOCK) is None]
        age = _created if jobs.eviction_policy == "time_created" else _modified
        for old in sorted(others, key=age)[: max(0, len(others) + 1 - jobs.max_jobs)]:
            _remove_written(old)

    def _jobs(self) -> list[Path]:
        """Directories of jobs that hone wrote to."""
        if not self._output.job_management.append_job_id_to_output_dir:
            return []
        return [job for job in self.path.parent.glob("job_*") if (job / WRITTEN).exists()]

    def write_config(self, document: Document, options: EvalOptions) -> list[Path]:
        """Write the configuration as written and as used, and the options; secrets are hidden."""
        secrets = Secrets(document.loaded.data, options.override)
        metadata = {
            "config_file": str(options.config_file),
            "config_file_type": "path",
            "overrides": [
                {"path": path, "value": secrets.hide(value, path)}
                for path, value in options.override
            ],
            "dataset": None if options.dataset is None else str(options.dataset),
            "result_json_path": options.result_json_path,
            "skip_workflow": options.skip_workflow,
            "skip_completed_entries": options.skip_completed_entries,
            "reps": options.reps,
            "endpoint": options.endpoint and redact_urls(options.endpoint),
            "endpoint_timeout": options.endpoint_timeout,
            "workflow_alias": document.eval.general.workflow_alias,
            "timestamp": datetime.now(UTC).isoformat(),
        }
        return [
            self.write_text(CONFIGS[0], secrets.hide(document.file.read_text("utf-8"))),
            self.write_text(CONFIGS[1], effective(document)),
            self._write(CONFIGS[2], metadata),
        ]

    # ---- during -------------------------------------------------------------------------------

    def add(self, result: ItemResult) -> None:
        """Write a finished item; it is on disk when this returns."""
        self._note(FINISHED)
        scores = {name: _score(one) for name, one in result.scores.items()}
        line = dumps({"entry": self.entry(result), "scores": scores})
        with _writing():
            append_lines(self.path / FINISHED, (line + "\n").encode("utf-8", ESCAPED))

    def entry(self, result: ItemResult) -> dict[str, Any]:
        """One entry of workflow_output.json: the row, and the workflow's output, without secrets."""
        item, keys = result.item, self._structure
        row = item.full_dataset_entry if isinstance(item.full_dataset_entry, Mapping) else {}
        kinds = self._output.workflow_output_step_filter
        entry: dict[str, Any] = {**row, "id": item.id}
        entry.pop("failure", None)  # the row may be an entry of an earlier evaluation's file
        if not keys.disable:
            entry |= {keys.question_key: item.input_obj, keys.answer_key: item.expected_output_obj}
        entry |= {keys.expected_trajectory_key: item.expected_trajectory}
        # Text of the dataset that only looks like a secret is not hidden: the file may be scored again.
        entry = redact_json(_as_values(entry), keep=("id",), forms=False)
        steps = all_steps(item.trajectory, item.steps, item.events, kinds=kinds)
        entry |= redact_json(
            _as_values({keys.generated_answer_key: item.output_obj, keys.trajectory_key: steps})
        )
        if item.seconds is not None:
            entry["seconds"] = item.seconds
        if result.failure is not None:
            cause = result.rollout.failure if result.rollout else None
            entry["failure"] = {
                "kind": cause.kind if cause else "infrastructure",
                "reason": cause.reason if cause else "not_run",
                **redact_json(result.failure.model_dump()),
            }
        return entry

    # ---- after --------------------------------------------------------------------------------

    def write(
        self, results: Sequence[ItemResult], outputs: Iterable[tuple[str, EvalOutput]]
    ) -> tuple[Path, list[Path]]:
        """Write all results, and remove finished.jsonl, which is no longer needed."""
        workflow = self._write(OUTPUT, [self.entry(result) for result in results])
        files = [self._write(_file_name(name), _as_json(output)) for name, output in outputs]
        (self.path / FINISHED).unlink(missing_ok=True)
        return workflow, files

    def write_text(self, name: str, content: str) -> Path:
        """Write a file of the directory atomically."""
        self._note(name)
        with _writing():
            write_atomic(self.path / name, content.encode("utf-8", ESCAPED))
        return self._shown(self.path / name)

    def _shown(self, path: Path) -> Path:
        """The path as the configuration names its directory."""
        inside = self._relative and path.is_relative_to(self._here)
        return path.relative_to(self._here) if inside else path

    def _write(self, name: str, content: Any) -> Path:
        return self.write_text(name, dumps(content, indent=2, ensure_ascii=False) + "\n")

    def _note(self, name: str) -> None:
        """Record that a file belongs to hone, before it is created."""
        written = _written(self.path)
        if name not in written:
            with _writing():
                write_atomic(self.path / WRITTEN, "\n".join([*written, name]) + "\n")


def effective(document: Document) -> str:
    """The configuration as YAML, with `base:`, variables and overrides; secrets are hidden."""
    import yaml

    data = Secrets(document.loaded.data).hide(document.loaded.data)
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True)


@contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except StorageError as error:
        raise StateError(
            f"{error} The items that had finished are in {FINISHED}; --skip_completed_entries goes "
            "on from there."
        ) from error


def _as_json(output: EvalOutput) -> dict[str, Any]:
    # Not by model_dump, which refuses some values that an evaluator may put into `reasoning`.
    keys = ("id", "score", "reasoning", "error")
    items = [
        redact_json(_as_values({key: getattr(item, key) for key in keys}), keep=("id",))
        for item in output.eval_output_items
    ]
    for entry, item in zip(items, output.eval_output_items, strict=True):
        if item.failure_kind is not None:
            entry["failure"] = {"kind": item.failure_kind}
    content = {"average_score": output.average_score, "eval_output_items": items}
    if output.policy_failures:
        content |= {
            "policy_failures": output.policy_failures,
            "failure_reward": output.failure_reward,
        }
    return content


def _score(score: Score) -> dict[str, Any]:
    error = None if score.failure is None else f"{score.failure.type}: {score.failure.message}"
    texts = redact_json(_as_values({"reasoning": score.reasoning, "error": error}))
    return {"score": score.value, **texts}


def _as_values(value: Any) -> Any:
    """The value as a reader of the file gets it."""
    return json.loads(dumps(value))


def _is_written_as(value: Any, written: Any) -> bool:
    """Whether a value of the dataset, with its secrets hidden, equals the value in the file."""
    return value == written or redact_json(_as_values(value), forms=False) == written


def _file_name(evaluator: str) -> str:
    return re.sub(r"[^\w.-]", "_", evaluator) + "_output.json"


def _created(job: Path) -> float:
    # Written once, at the start; file systems do not record when a directory was created.
    first = job / "config_original.yml"
    return first.stat().st_mtime if first.exists() else 0.0


def _modified(job: Path) -> float:
    return job.stat().st_mtime


def _written(directory: Path) -> list[str]:
    """Names of the files that hone wrote here; paths outside the directory are ignored."""
    try:
        names = (directory / WRITTEN).read_text("utf-8", "replace").splitlines()
    except FileNotFoundError:
        return []
    plain = [name for name in names if name and Path(name).name == name]
    return [name for name in plain if not (directory / name).is_dir()]


def _remove_written(directory: Path) -> None:
    for name in [*_written(directory), WRITTEN, LOCK]:
        (directory / name).unlink(missing_ok=True)
    if any(directory.iterdir()):
        log.warning("%s: holds files that hone did not write, and stays", directory)
    else:
        directory.rmdir()


def _listed(path: Path) -> list[dict[str, Any]]:
    try:
        content = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return []
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not JSON ({error}); remove it to start over") from None
    return [one for one in content if isinstance(one, dict)] if isinstance(content, list) else []


def _lines(path: Path) -> list[dict[str, Any]]:
    """The entries of finished items."""
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    entries = []
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)["entry"]
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}:{number}: not JSON ({error}); remove the line") from None
        except (KeyError, TypeError):
            entry = None
        if not isinstance(entry, dict):
            raise ConfigError(f"{path}:{number}: not a finished item; remove the line")
        entries.append(entry)
    return entries
