"""The files of a model on this machine: config, weights, tokenizer and chat template.

In:   a directory in the Hugging Face layout
Out:  ModelFiles; what is missing from an incomplete directory
"""

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Place = Literal["directory", "gguf", "cache", "hub", "wheel"]
_LINEAR = re.compile(r"\.layers\.\d+\.(?!.*\bexperts\b)(?:\w+\.)*(\w+)\.weight$")
_ROUTERS = {"gate", "router", "shared_expert_gate"}
CONSOLIDATED = "consolidated*.safetensors"
"""A second copy of the weights, in the layout of Mistral's own library."""


@dataclass(frozen=True)
class ModelFiles:
    """A model on this machine, in the Hugging Face layout."""

    name: str
    path: Path
    source: Place
    """Where it was found; "gguf" and "wheel" are converted files."""
    note: str = ""
    """A note about the weights for the user, e.g. that they were quantized."""

    @cached_property
    def config(self) -> dict[str, Any]:
        return json.loads((self.path / "config.json").read_text(encoding="utf-8"))

    @property
    def text_config(self) -> dict[str, Any]:
        """The configuration of the language model; multimodal models nest it."""
        return {**self.config, **self.config.get("text_config", {})}

    @cached_property
    def template(self) -> str | None:
        """The chat template; None for a model that has none."""
        file = self.path / "chat_template.jinja"
        if file.is_file():
            return file.read_text(encoding="utf-8")
        for name in ("chat_template.json", "tokenizer_config.json"):
            file = self.path / name
            if file.is_file():
                template = json.loads(file.read_text(encoding="utf-8")).get("chat_template")
                if isinstance(template, list):  # several templates, by name
                    template = {each["name"]: each["template"] for each in template}.get("default")
                if template is not None:
                    return template
        return None

    @property
    def weight_files(self) -> list[Path]:
        """The safetensors that make up the model, in the order of their names."""
        return weight_files(self.path)

    @cached_property
    def end_ids(self) -> tuple[int, ...]:
        """The end-of-sequence tokens of config.json and generation_config.json."""
        configs = [self.config]
        file = self.path / "generation_config.json"
        if file.is_file():
            configs.append(json.loads(file.read_text(encoding="utf-8")))
        ids: list[int] = []
        for fields in configs:
            eos = fields.get("eos_token_id")
            ids += eos if isinstance(eos, list) else [] if eos is None else [eos]
        return tuple(dict.fromkeys(ids))

    @cached_property
    def weights_sha256(self) -> str:
        """Hash of the weight files, concatenated."""
        return _sha256(self.weight_files)

    @cached_property
    def template_sha256(self) -> str | None:
        if self.template is None:
            return None
        return hashlib.sha256(self.template.encode()).hexdigest()


def load_tokenizer(files: ModelFiles) -> "PreTrainedTokenizerFast":
    """The tokenizer as tokenizer.json describes it."""
    # Not AutoTokenizer: it imports torch and rebuilds some tokenizers from their parts (several
    # seconds), and what it rebuilds is meant to equal the file that is read here.
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(files.path, local_files_only=True)


def weight_files(directory: Path) -> list[Path]:
    """The safetensors that make up the model of a directory, in the order of their names."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        return sorted(directory / name for name in _shards(index))
    return sorted(f for f in directory.glob("*.safetensors") if not f.match(CONSOLIDATED))


def linear_names(files: Iterable[Path]) -> set[str]:
    """Names of the linear layers in these safetensors: `q_proj`, `down_proj`, ...

    Without embeddings, the head, experts and their routers.
    """
    names: set[str] = set()
    for file in files:
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(size))
        for tensor, entry in header.items():
            match = _LINEAR.search(tensor)
            if match and len(entry.get("shape", ())) == 2:
                names.add(match[1])
    return names - _ROUTERS


def missing_file(directory: Path) -> str | None:
    """What is missing from an HF directory; None if it is complete."""
    if not (directory / "config.json").is_file():
        return "config.json is missing"
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        absent = [name for name in _shards(index) if not (directory / name).is_file()]
        if absent:
            return f"{absent[0]} is missing ({index.name} names it)"
    elif not weight_files(directory):
        if any(directory.glob("*.bin")):
            return "the weights are missing as *.safetensors (hone does not read pickled *.bin)"
        return "the weights are missing (*.safetensors)"
    if not (directory / "tokenizer.json").is_file():
        return "tokenizer.json is missing"
    return None


def _shards(index: Path) -> set[str]:
    return set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())


def _sha256(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            while chunk := stream.read(2**20):
                digest.update(chunk)
    return digest.hexdigest()
