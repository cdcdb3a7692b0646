"""Export a trained step for other programs.

In:   a server's root, NAME[@N|@latest|@best], an empty or new directory
Out:  a PEFT adapter, or a merged Hugging Face model; tokenizer and chat template with either

The exported template is the one that hone renders with: the base model's, with the arguments that
the model was registered with. The directory appears complete or not at all.
"""

import json
import re
import shutil
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from hone.disk import move, output
from hone.errors import Conflict, NotFound
from hone.models.files import ModelFiles
from hone.models.find import find
from hone.models.wheels import WHEELS
from hone.store.checkpoints import MANIFEST, Checkpoint, Checkpoints
from hone.store.database import Store
from hone.store.models import SCHEMA, ModelRecord, ModelStore

_AT = re.compile(r"(?P<name>[^@]+)(@(?P<at>latest|best|[0-9]+))?")
_HUB_CACHE = re.compile(r"models--(.+?)--(.+)")
_TOKENIZER = ("tokenizer.json", "special_tokens_map.json")


def export(root: Path, name: str, directory: Path, *, merge: bool = False) -> Path:
    """Write the step of that name into the directory, and return it."""
    record, checkpoint = _look_up(root, name)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise Conflict(f"{directory} exists and is not empty; name a new directory")
    files = find(record.spec.base_model)
    partial = directory.absolute().with_name(f".{directory.absolute().name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    with output(str(directory)):
        partial.mkdir(parents=True)
        try:
            if merge:
                _write_merged(checkpoint, files, partial)
            else:
                _write_adapter(checkpoint, files, partial)
            _write_tokenizer(files, record.spec.chat_template_kwargs, partial)
            shutil.copyfile(checkpoint.path / MANIFEST, partial / MANIFEST)
            if directory.exists():
                directory.rmdir()
            move(partial, directory.absolute())
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    return directory


def _look_up(root: Path, name: str) -> tuple[ModelRecord, Checkpoint]:
    state = root / "state.sqlite"
    if not state.is_file():
        raise NotFound(f"--root {root}: there is no server state; name the right root")
    match = _AT.fullmatch(name)
    if match is None:
        raise NotFound(f"{name!r}: expected NAME, NAME@N, NAME@latest or NAME@best")
    with closing(Store(state, (SCHEMA,))) as store:
        record = ModelStore(store).find(match["name"])
    checkpoints, at = Checkpoints(root), match["at"]
    if at in (None, "latest"):
        newest = checkpoints.newest(record.key)
        if newest is None:
            raise NotFound(f"{name!r}: the model has no step yet; train it first")
        return record, newest
    step = checkpoints.best(record.key) if at == "best" else int(at)
    if step is None:
        raise NotFound(f"{name!r}: no val/reward was logged for any step that is kept")
    return record, checkpoints.get(record.key, step)


def _write_adapter(checkpoint: Checkpoint, files: ModelFiles, directory: Path) -> None:
    shutil.copyfile(
        checkpoint.path / "adapter_model.safetensors", directory / "adapter_model.safetensors"
    )
    settings = _json(checkpoint.path / "adapter_config.json")
    settings["base_model_name_or_path"] = public_name(files)
    _write_json(directory / "adapter_config.json", settings)


def public_name(files: ModelFiles) -> str:
    """The public name of the base model: its name on the hub, otherwise a path on this machine.

    A model from a wheel gets the name of the original that was quantized: PEFT does not know hone's
    names, and a path into this machine's cache is useless elsewhere.
    """
    if files.source in ("cache", "hub"):
        return files.name
    if files.source == "wheel":
        return WHEELS[files.name].original
    for part in files.path.parts:  # a snapshot in the hub's cache
        if match := _HUB_CACHE.fullmatch(part):
            return "/".join(match.groups())
    return str(files.path)


def _write_merged(checkpoint: Checkpoint, files: ModelFiles, directory: Path) -> None:
    if checkpoint.manifest["weights_sha256"] != files.weights_sha256:
        raise Conflict(
            f"step {checkpoint.step} of {str(checkpoint.key)!r} was trained over other weights than "
            f"those in {files.path} now, and merging would give nonsense. Put the old weights back, "
            "or export the adapter without --merge."
        )
    # Imported here: they take seconds to load.
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(files.path, dtype="auto")
    adapted: Any = PeftModel.from_pretrained(base, str(checkpoint.path))
    adapted.merge_and_unload().save_pretrained(directory)


def _write_tokenizer(files: ModelFiles, kwargs: Mapping[str, Any], directory: Path) -> None:
    for name in _TOKENIZER:
        if (files.path / name).is_file():
            shutil.copyfile(files.path / name, directory / name)
    if (files.path / "tokenizer_config.json").is_file():
        settings = _json(files.path / "tokenizer_config.json")
        settings.pop("chat_template", None)  # it has its own file
        _write_json(directory / "tokenizer_config.json", settings)
    if files.template is not None:
        preset = "".join(_preset(key, value) for key, value in kwargs.items() if key.isidentifier())
        template = preset + files.template
        (directory / "chat_template.jinja").write_text(template, encoding="utf-8")


def _preset(key: str, value: Any) -> str:
    """Jinja that sets a template argument to the value hone uses, unless the caller sets it."""
    return f"{{%- if {key} is not defined %}}{{%- set {key} = {_literal(value)} %}}{{%- endif -%}}"


def _literal(value: Any) -> str:
    """A JSON value in Jinja's syntax, which differs only in null."""
    if value is None:
        return "none"
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{json.dumps(k)}: {_literal(v)}' for k, v in value.items())}}}"
    return json.dumps(value)


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
