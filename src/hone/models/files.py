"""The files of a model on this machine: config, weights, tokenizer and chat template.

In:   a directory in the Hugging Face layout
Out:  ModelFiles; what is missing from an incomplete directory; ModelUnsupported for a file that
      cannot be read, with its path
"""

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hone.errors import ModelUnsupported
from hone.files.disk import storage
from hone.models.architecture import FAMILIES, check_types
from hone.models.weight_check import read_header, sha256_of_finite

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Place = Literal["directory", "gguf", "cache", "hub", "wheel"]
_LINEAR = re.compile(r"\.layers\.\d+\.(?!.*\bexperts\b)(?:\w+\.)*(\w+)\.weight$")
_ROUTERS = {"gate", "router", "shared_expert_gate"}
SUFFIX = ".safetensors"
AGAIN = "Download or copy it again, or use another model."
SIZES = {
    "num_hidden_layers": 10_000,
    "hidden_size": 1_000_000,
    "num_attention_heads": 100_000,
    "vocab_size": 100_000_000,
    "max_position_embeddings": 1_000_000_000,
}
"""Sizes of a model in config.json, and the largest that hone believes."""
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
        return read_object(self.path / "config.json")

    @property
    def text_config(self) -> dict[str, Any]:
        """The configuration of the language model; multimodal models nest it."""
        nested = self.config.get("text_config", {})
        if not isinstance(nested, dict):
            raise ModelUnsupported(
                f"{self.path / 'config.json'}: text_config is {nested!r:.80}, not an object. {AGAIN}"
            )
        return {**self.config, **nested}

    def check_config(self) -> None:
        """Refuse a config.json whose sizes are missing or impossible."""
        file, fields = self.path / "config.json", self.text_config
        if not isinstance(fields.get("model_type"), str):
            raise ModelUnsupported(
                f"{file}: model_type is {fields.get('model_type')!r:.80}, not a name. {AGAIN}"
            )
        own = fields["model_type"] in FAMILIES
        for key, most in SIZES.items():
            size = fields.get(key)
            # A nested configuration of another family may leave out what transformers knows.
            needed = own or key in ("vocab_size", "max_position_embeddings")
            if (needed or size is not None) and (type(size) is not int or not 0 < size <= most):
                raise ModelUnsupported(
                    f"{file}: {key} is {size!r:.80}; hone needs a number from 1 to {most}. {AGAIN}"
                )
        if own:
            check_types(fields, where=str(file))
            heads, hidden = fields["num_attention_heads"], fields["hidden_size"]
            if fields.get("head_dim") is not None or hidden >= heads:
                return
            raise ModelUnsupported(
                f"{file}: num_attention_heads is {heads}, more than hidden_size ({hidden}). {AGAIN}"
            )

    @cached_property
    def template(self) -> str | None:
        """The chat template; None for a model that has none."""
        file = self.path / "chat_template.jinja"
        if file.is_file():
            return _read_text(file)
        for name in ("chat_template.json", "tokenizer_config.json"):
            file = self.path / name
            if file.is_file():
                template = read_object(file).get("chat_template")
                match template:
                    case [*named]:  # several templates, by name
                        by_name = {e.get("name"): e for e in named if isinstance(e, dict)}
                        template = by_name.get("default", {}).get("template")
                if isinstance(template, str):
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
            configs.append(read_object(file))
        ids: list[int] = []
        for fields in configs:
            eos = fields.get("eos_token_id")
            ids += eos if isinstance(eos, list) else [] if eos is None else [eos]
        if wrong := [id for id in ids if type(id) is not int or id < 0]:
            raise ModelUnsupported(
                f"{self.path}: eos_token_id of config.json or generation_config.json has "
                f"{wrong[0]!r:.80}, which is no token id. {AGAIN}"
            )
        return tuple(dict.fromkeys(ids))

    @cached_property
    def weights_sha256(self) -> str:
        """Hash of the weight files, concatenated. Refuses weights that are not finite."""
        return sha256_of_finite(self.weight_files)

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

    try:
        return PreTrainedTokenizerFast.from_pretrained(files.path, local_files_only=True)
    except Exception as error:  # foreign files: the library raises all kinds
        raise ModelUnsupported(
            f"{files.path}: the tokenizer cannot be read from tokenizer.json and "
            f"tokenizer_config.json ({error!s:.200}). {AGAIN}"
        ) from error


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
        for tensor in read_header(file):
            match = _LINEAR.search(tensor.name)
            if match and len(tensor.shape) == 2:
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


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object of a file. Raises ModelUnsupported."""
    try:
        content = json.loads(_read_text(file))
    except (ValueError, RecursionError) as error:
        if isinstance(error, ModelUnsupported):
            raise
        raise ModelUnsupported(f"{file}: not JSON ({error}). {AGAIN}") from error
    if not isinstance(content, dict):
        raise ModelUnsupported(f"{file}: holds {content!r:.80}, not a JSON object. {AGAIN}")
    return content


def _read_text(file: Path) -> str:
    with storage(file):
        try:
            return file.read_text(encoding="utf-8")
        except (FileNotFoundError, IsADirectoryError, UnicodeDecodeError) as error:
            raise ModelUnsupported(f"{file}: cannot be read ({error}). {AGAIN}") from error


def _shards(index: Path) -> set[str]:
    names = read_object(index).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise ModelUnsupported(f"{index}: weight_map names no files. {AGAIN}")
    for name in names.values():
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(SUFFIX):
            raise ModelUnsupported(
                f"{index}: weight_map names {name!r:.80}, which is no {SUFFIX} file beside it. {AGAIN}"
            )
    return set(names.values())
