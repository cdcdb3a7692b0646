"""What must not change under a run, so that the same command can go on with it.

In:   the configuration as it was read, and what the command line said beside it
Out:  JSON values that run.json keeps and the next start is compared with; the configuration as it
      is shown to others

Left out is what does not change what is learned: how long to go on (unless the learning rate falls
to 0 over the epochs), when to stop, how much runs at a time, how long to wait, and where the servers
are, which may have moved since. Datasets and the user's code count by their content. Keys that hold
a secret are never written.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hone.config.secrets import Secrets
from hone.finetune.targets import code_of

if TYPE_CHECKING:
    from hone.config.build import Served
    from hone.config.schema import Document, FinetuneRunConfig

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
    "llms.*.base_url",
)
"""Keys that may differ from one start to the next."""
_DIGEST = re.compile(r"[0-9a-f]{64}")
CODE = "code"
"""Under this key: the user's code, file by file."""
LONGEST = 40
"""Letters of a value that tells two evaluators apart."""
USUAL_ROOT = Path(".hone")
"""Where `hone serve` looks unless it is told."""


def facts_of(
    document: "Document", told: "FinetuneRunConfig", validating: "Document | None" = None
) -> dict[str, Any]:
    """What makes two starts the same run; `validating` is the validation's own document, if any."""
    written = Secrets(document.loaded.data).hide(document.loaded.data)
    for key in FREE:
        _remove(written, key.split("."))
    adapter = document.trainer_adapters.get(document.finetuning.trainer_adapter or "")
    if getattr(getattr(adapter, "training", None), "schedule", None) == "linear":
        # The learning rate of each job depends on how many are planned.
        written.setdefault("finetuning", {})["num_epochs"] = document.finetuning.num_epochs
    held_out = _digest(told.validation_dataset, document.file)
    if held_out is None and validating is not None:
        held_out = _digest(_file_of(validating), validating.file)
    code = code_of(document)
    if validating is not None:
        code |= {f"{name} (validation)": held for name, held in code_of(validating).items()}
    return {
        **written,
        CODE: code,
        "command": {
            "result_json_path": told.result_json_path,
            "dataset": _digest(told.dataset or _file_of(document), document.file),
            "validation_dataset": held_out,
            "validation_config_file": _digest(told.validation_config_file, document.file),
        },
    }


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What changed between two starts, a line each."""
    before, after = dict(_leaves(then)), dict(_leaves(json.loads(json.dumps(now))))
    changed = [key for key in {**before, **after} if before.get(key) != after.get(key)]
    return [_difference(key, before.get(key), after.get(key)) for key in changed]


def _difference(key: str, then: Any, now: Any) -> str:
    file = key.removeprefix(f"{CODE}.")
    if file != key and then and now:
        return f"{file}: the code has changed"
    if file != key:
        return f"{file}: " + ("code that the run did not use" if now else "no longer used")
    if all(isinstance(one, str) and _DIGEST.fullmatch(one) for one in (then, now)):
        return f"{key}: the file's content has changed"
    return f"{key}: {then!r} then, {now!r} now"


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key and value of everything that is not itself a table."""
    if not isinstance(value, dict) or not value:
        if value != {} or not path.startswith(CODE):
            yield path, value
        return
    for key, inner in value.items():
        yield from _leaves(inner, f"{path}.{key}" if path else str(key))


def _file_of(document: "Document") -> Path | None:
    dataset = document.eval.general.dataset
    return None if dataset is None else dataset.file_path


def address_of(served: "Served | None", server: Any) -> dict[str, str]:
    """Where a report says that the result is: at a server that stays, or under our own's root."""
    if getattr(server, "ip", None) is not None:
        return {} if served is None else {"base_url": served.base_url}
    root = getattr(server, "root", None)
    return {} if root in (None, USUAL_ROOT) else {"root": str(root)}


def again(arguments: Sequence[str], resume: str) -> list[str]:
    """Of the command that goes on with a run: what would begin anew is taken out or overruled."""
    kept = [argument for argument in arguments if argument != "--fresh"]
    return [*kept, "-o", "finetuning.resume", "auto"] if resume == "never" else kept


def evaluators_of(name: str, training: "Document", validation: "Document | None") -> dict[str, str]:
    """What measures the rewards, in words: two where another document measures them otherwise."""
    if validation is None or validation is training:
        return {"evaluator": name}
    pair = [(document, document.eval.evaluators.get(name)) for document in (training, validation)]
    if any(config is None for _, config in pair):
        return {"evaluator": name}  # building it says what is missing
    made = [
        {"": config.type_name} | Secrets().hide(config.model_dump(mode="json"))
        for _, config in pair
        if config is not None
    ]
    differing = [key for key in made[0] | made[1] if made[0].get(key) != made[1].get(key)]
    near = {document.file.resolve().parent for document, _ in pair}
    if not differing and (len(near) == 1 or ".py" not in str(made[0].get("target"))):
        return {"evaluator": name}
    key = differing[0] if differing else None
    said = [
        document.file.name if key is None else _value(key, one)
        for (document, _), one in zip(pair, made, strict=True)
    ]
    return {"evaluator": f"{name} ({said[0]})", "validation_evaluator": f"{name} ({said[1]})"}


def _value(key: str, config: Mapping[str, Any]) -> str:
    value = str(config.get(key))
    told = value if key in ("", "target") else f"{key}: {value}"
    return told if len(told) <= LONGEST else f"{told[: LONGEST - 3]}..."


def _remove(table: Any, path: Sequence[str]) -> None:
    """Take a key out; `*` is every key of a table."""
    if not isinstance(table, dict):
        return
    for key in list(table) if path[0] == "*" else [path[0]]:
        if len(path) == 1:
            table.pop(key, None)
        else:
            _remove(table.get(key), path[1:])


def _digest(path: str | Path | None, near: Path) -> str | None:
    """What a file holds, not where it lies; None where there is none, or it is no plain file."""
    if path is None:
        return None
    for place in (Path(path), near.parent / path):
        if place.is_file():
            return hashlib.sha256(place.read_bytes()).hexdigest()
    return str(path)
