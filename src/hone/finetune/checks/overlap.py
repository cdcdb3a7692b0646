"""Held-out examples that are training examples too.

In:   the items of both sets; the documents and the dataset files of a command
Out:  the shared examples, by input and by id; a mistake if both sets are the same file

A model can learn its training examples by heart. A held-out reward over the same examples then says
nothing about others, and the report would call it an improvement.
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hone.config.schema import Document, FinetuneRunConfig
from hone.evaluation.base import EvalInputItem
from hone.files.disk import sha256_of
from hone.report.text import counted, have

IDS_SHOWN = 3
KEY = "finetuning.validation.allow_training_examples"


@dataclass(frozen=True, slots=True)
class Overlap:
    """Ids of held-out examples that occur in training."""

    held_out: int
    """Number of held-out examples."""
    by_input: Sequence[str]
    """Their input is that of a training example."""
    by_id: Sequence[str]
    """Their id is that of a training example with another input."""

    @property
    def warning(self) -> str | None:
        """The warning at the start of a run; None if nothing is shared."""
        parts = []
        if self.by_input:
            parts.append(f"{have(len(self.by_input))} the input of one ({_shown(self.by_input)})")
        if self.by_id:
            parts.append(
                f"{have(len(self.by_id))} the id of one with another input ({_shown(self.by_id)})"
            )
        if not parts:
            return None
        return (
            f"of {counted(self.held_out, 'held-out example')}, some are training examples too: "
            f"{'; '.join(parts)}. A model can learn these by heart, so the held-out reward may "
            "overstate what it learned. Remove them from one of the two datasets."
        )


def overlap(training: Sequence[EvalInputItem], held_out: Sequence[EvalInputItem]) -> Overlap:
    """The held-out examples that occur in training; inputs are compared as JSON values.

    Rows without an id are numbered, and two files number their rows alike: such ids say nothing. If
    the whole row is the input, its id does not count as a part of it.
    """
    inputs = {_normalized(item) for item in training}
    ids = {item.id for item in training if _has_id(item)}
    by_input = [item.id for item in held_out if _normalized(item) in inputs]
    known = set(by_input)
    by_id = [i.id for i in held_out if _has_id(i) and i.id in ids and i.id not in known]
    return Overlap(len(held_out), by_input, by_id)


def same_dataset(
    options: FinetuneRunConfig, document: Document, validation: Document | None
) -> str | None:
    """Why the held-out examples are the training examples; None if they are not, or may be.

    Two documents may draw different rows from one file, by their filters or functions.
    """
    if document.finetuning.validation.allow_training_examples:
        return None
    training = _file(document, options.dataset)
    held_out = _file(validation or document, options.validation_dataset)
    if training is None or held_out is None or not _alike(document, validation):
        return None
    if training.resolve() == held_out.resolve():
        how = f"{held_out} is the file of the training examples"
    elif sha256_of(training) == sha256_of(held_out):
        how = f"{held_out} has the same content as {training}, the training examples"
    else:
        return None
    return (
        f"{how}. A model can learn these by heart, so the held-out reward would say nothing about "
        f"other inputs. Name other examples, or set {KEY}: true."
    )


def _alike(document: Document, validation: Document | None) -> bool:
    """Whether both documents make the same items of the same file."""
    if validation is None:
        return True
    configs = [one.eval.general.dataset for one in (document, validation)]
    dumps = [None if c is None else c.model_dump(exclude={"file_path"}) for c in configs]
    return dumps[0] == dumps[1]


def _file(document: Document, override: Path | None) -> Path | None:
    """The dataset's file, if there is one."""
    config = document.eval.general.dataset
    named = override or (None if config is None else config.file_path)
    if named is None:
        return None
    places = [named] if override is not None else [named, document.file.parent / named]
    return next((place for place in places if place.is_file()), None)


def _has_id(item: EvalInputItem) -> bool:
    """Whether its id is more than the number of its row, counted from 1 or from 0."""
    number = item.row_number
    return number is None or item.id not in (str(number), str(number - 1))


def _normalized(item: EvalInputItem) -> str:
    """The input as canonical JSON; text that is JSON counts as its value."""
    value: Any = item.input_obj
    if isinstance(value, str):
        value = value.strip()
        if value[:1] in ("{", "["):
            with suppress(ValueError):
                value = json.loads(value)
    if isinstance(value, dict) and value == item.full_dataset_entry:
        value = {key: field for key, field in value.items() if str(field) != item.id}
    try:
        return json.dumps(value, sort_keys=True, default=str)
    except TypeError:  # keys that are not text
        return repr(value)


def _shown(ids: Sequence[str]) -> str:
    more = ", ..." if len(ids) > IDS_SHOWN else ""
    return ", ".join(map(repr, ids[:IDS_SHOWN])) + more
