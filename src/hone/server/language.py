"""How a base model is talked to: its files, tokenizer and chat template, without its weights.

In:   the name of a base model
Out:  Language, with the fingerprint that recorded calls carry

The fingerprint holds weights, tokenizer, template, its arguments and the date it prints, each by
itself. What was made under another of the first three is never continued and never trained on: its
ids would mean something else. Arguments and date are a request's own.

Hashing the weights reads every byte of them, so the hash is kept beside the state with size and
time of each file, and computed again when one changes.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any

from hone.chat.reply import ByteDecoder, TextDecoder, WindowDecoder, byte_pieces
from hone.chat.template import ChatTemplate
from hone.errors import Conflict, ModelUnsupported
from hone.models.files import ModelFiles, load_tokenizer
from hone.models.find import find
from hone.store.checkpoints import Checkpoint

PARTS = ("weights", "tokenizer", "chat template", "template arguments", "date")
"""Of a fingerprint, in this order."""
FIXED = frozenset(PARTS[:3])
"""What ids mean depends on these; a mismatch is refused."""


@dataclass(frozen=True, eq=False)
class Language:
    """A base model as text: everything but the weights."""

    name: str
    files: ModelFiles
    template: ChatTemplate
    weights_sha256: str
    max_positions: int
    """Tokens the model reads at most, the answer included."""

    @classmethod
    def load(cls, base_model: str, root: Path, *, today: date | None = None) -> "Language":
        """Find the model (downloading it if need be) and read its tokenizer. Blocking."""
        files = find(base_model)
        template = ChatTemplate.load(
            load_tokenizer(files), base_model, today=today, end_ids=files.end_ids
        )
        positions = files.config.get("max_position_embeddings")
        if not isinstance(positions, int):
            raise ModelUnsupported(
                f"{files.path / 'config.json'}: max_position_embeddings is {positions!r}; "
                "hone needs to know how long a prompt may be"
            )
        return cls(base_model, files, template, _weights_sha256(files, root), positions)

    @cached_property
    def fingerprint(self) -> str:
        """Of the model with its template as it is."""
        return self.fingerprint_of(self.template)

    def fingerprint_of(self, template: ChatTemplate) -> str:
        """Of the model under this template, which may have arguments of its own."""
        return f"{self.weights_sha256[:32]}-{template.fingerprint}"

    def check_made_for(self, checkpoint: Checkpoint) -> None:
        """Refuse a step that was trained over other files than this model has now."""
        made = checkpoint.manifest.get("fingerprint", self.fingerprint)
        other = [part for part in differing(made, self.fingerprint) if part in FIXED]
        if other:
            raise Conflict(
                f"step {checkpoint.step} of model {str(checkpoint.key)!r} was trained over other "
                f"{' and '.join(other)} than {self.name!r} has now ({self.files.path}). Put the "
                "old files back, or register a model of another name over the new ones."
            )

    def template_for(self, kwargs: Mapping[str, Any], day: date | None = None) -> ChatTemplate:
        """The template under these arguments, on this day if it prints one. May block."""
        template = self.template if day is None or not self._prints_date else self._on(day)
        return template.with_kwargs(kwargs)

    def _on(self, day: date) -> ChatTemplate:
        if day not in self._dated:
            if len(self._dated) >= 32:
                self._dated.clear()
            self._dated[day] = self.template.on(day)
        return self._dated[day]

    @cached_property
    def _dated(self) -> dict[date, ChatTemplate]:
        return {}

    @cached_property
    def _prints_date(self) -> bool:
        written = "strftime_now" in (self.files.template or "")
        return written or getattr(self.template.renderer, "prints_date", False)

    def piece(self, token: int) -> bytes:
        """The bytes a token spells."""
        pieces = self._pieces
        if pieces is not None:
            return pieces[token] if 0 <= token < len(pieces) else b""
        return self.template.tokenizer.decode([token], skip_special_tokens=False).encode()

    def decoder(self) -> TextDecoder:
        """Turns sampled ids into text, a piece at a time."""
        pieces = self._pieces
        return WindowDecoder(self.template.tokenizer) if pieces is None else ByteDecoder(pieces)

    @cached_property
    def _pieces(self) -> list[bytes] | None:
        return byte_pieces(self.template.tokenizer)


def differing(one: str, other: str) -> list[str]:
    """Which parts of two fingerprints are not the same; what one of them lacks is not compared."""
    both = zip(PARTS, one.split("-"), other.split("-"), strict=False)
    return [part for part, a, b in both if a != b]


def _weights_sha256(files: ModelFiles, root: Path) -> str:
    """The hash of the weights, from the note of it under `root` if the files are still the same."""
    stats = [(file.name, file.stat()) for file in files.weight_files]
    seen = [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]
    key = hashlib.sha256(str(files.path).encode()).hexdigest()[:32]
    note = root / "cache" / "weights" / f"{key}.json"
    try:
        said = json.loads(note.read_text(encoding="utf-8"))
        if said["files"] == seen:
            return said["sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        pass  # no note, or half of one: the weights themselves are read
    sha256 = files.weights_sha256
    note.parent.mkdir(parents=True, exist_ok=True)
    fresh = note.with_suffix(f".{os.getpid()}.tmp")
    text = json.dumps({"path": str(files.path), "files": seen, "sha256": sha256})
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(note)
    return sha256
