"""The token ids and log-probabilities in a choice of the OpenAI API.

In:   a choice as JSON gave it
Out:  SampledTokens: as many ids as log-probabilities; InvalidField with the path of what is wrong

Ids are given by name (`token_id:N`, or `token_ids` beside the log-probabilities) or follow from the
bytes of the tokens. Text alone is encoded, and accepted only where that gives the same tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isfinite
from typing import Any

from hone.chat.jinja import encode
from hone.chat.template import ChatTemplate
from hone.types import FieldError
from hone.wire.errors import brief

FieldPath = tuple[str | int, ...]
"""Where a field is in a request."""

MAX_LOGPROB = 0.01
"""Samplers round; anything above this is a probability or a score, and no log-probability."""
_ID = "token_id:"


class InvalidField(Exception):
    """A field of a job that cannot be trained on, and why."""

    def __init__(self, path: FieldPath, message: str) -> None:
        self.field = FieldError(path, message)
        super().__init__(message)


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """SampledTokens ids, with one log-probability per id."""

    ids: list[int]
    logprobs: list[float]


class TokenReader:
    """Reads the tokens of choices that one base model sampled."""

    def __init__(self, template: ChatTemplate, *, base_model: str, vocab: int) -> None:
        self._tokenizer, self._pieces = template.tokenizer, template.pieces
        self._base_model = base_model
        self._vocab = vocab

    def read(self, choice: Mapping[str, Any], where: FieldPath) -> SampledTokens | None:
        """Ids and log-probabilities of a choice; None if it has no log-probabilities."""
        path = (*where, "logprobs")
        logprobs = choice.get("logprobs")
        if logprobs is None:
            return None
        if not isinstance(logprobs, Mapping):
            raise InvalidField(path, f"expected an object with content, got {brief(logprobs)}")
        key = "content" if logprobs.get("content") or not logprobs.get("refusal") else "refusal"
        entries = logprobs.get(key)
        if not entries:
            return None
        if not isinstance(entries, list):
            raise InvalidField((*path, key), f"expected a list of tokens, got {brief(entries)}")
        values = [_logprob(entry, (*path, key, i)) for i, entry in enumerate(entries)]
        ids = self._ids(choice, entries, (*path, key), where)
        if wrong := first_outside(ids, self._vocab):
            place, token = wrong
            raise InvalidField(
                (*path, key, place, "token"),
                f"token id {token} is outside the vocabulary of {self._vocab}; the choice was "
                f"sampled from another model than {self._base_model!r}",
            )
        return SampledTokens(ids, values)

    def _ids(
        self, choice: Mapping[str, Any], entries: list[Any], path: FieldPath, where: FieldPath
    ) -> list[int]:
        """By `token_id:N`, else by the choice's own `token_ids`, else by the text of the tokens."""
        tokens = [entry["token"] for entry in entries]
        numbers = [token.removeprefix(_ID) for token in tokens if token.startswith(_ID)]
        named = None
        if len(numbers) == len(tokens):
            for i, number in enumerate(numbers):
                if not (number.isascii() and number.isdigit()):
                    raise InvalidField(
                        (*path, i, "token"), f"expected {_ID}N, got {brief(tokens[i])}"
                    )
            # Longer ones are no ids, and Python would take minutes to read a million digits.
            named = [int(number) if len(number) < 19 else 2**63 for number in numbers]
        ids = choice.get("token_ids")
        if ids is None:
            return self._ids_of_text(entries, path) if named is None else named
        field = (*where, "token_ids")
        if not isinstance(ids, list) or not all(type(i) is int for i in ids):
            raise InvalidField(field, f"expected a list of ids, got {brief(ids)}")
        if len(ids) != len(entries):
            raise InvalidField(
                field, f"{len(ids)} ids for {len(entries)} logprobs; send one for each token"
            )
        if named is not None and ids != named:
            raise InvalidField(field, f"other ids than the {_ID}N of logprobs; send one of the two")
        return ids

    def _ids_of_text(self, entries: list[Any], path: FieldPath) -> list[int]:
        """Each token by its bytes; where a token is not known, by encoding all of them at once."""
        pieces = [_bytes_of(entry, (*path, i)) for i, entry in enumerate(entries)]
        ids = [self._id_of_bytes.get(piece) for piece in pieces]
        known = [i for i in ids if i is not None]
        if len(known) == len(ids):
            return known
        try:
            encoded = encode(self._tokenizer, b"".join(pieces).decode())
        except UnicodeDecodeError:
            raise InvalidField(path, f"the tokens' bytes are not UTF-8; {_ASK_FOR_IDS}") from None
        if len(encoded) != len(entries):
            raise InvalidField(
                path,
                f"its text is {len(encoded)} tokens of {self._base_model!r}, and there are "
                f"{len(entries)} logprobs; {_ASK_FOR_IDS}",
            )
        if self._pieces is not None and [self._pieces[i] for i in encoded] != pieces:
            raise InvalidField(
                path,
                f"its text is cut into other tokens than those of {self._base_model!r}; "
                f"{_ASK_FOR_IDS}",
            )
        return encoded

    @cached_property
    def _id_of_bytes(self) -> dict[bytes, int | None]:
        """None for bytes that two tokens share."""
        table: dict[bytes, int | None] = {}
        for i, piece in enumerate(self._pieces or ()):
            if piece:
                table[piece] = None if piece in table else i
        return table


_ASK_FOR_IDS = (
    "ask the endpoint for token ids (vLLM: return_tokens_as_token_ids), or sample from this server"
)


def _logprob(entry: Any, path: FieldPath) -> float:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("token"), str):
        raise InvalidField(path, f"expected an object with token and logprob, got {brief(entry)}")
    value = entry.get("logprob")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidField((*path, "logprob"), f"expected a number, got {brief(value)}")
    if why := wrong_logprob(value):
        raise InvalidField((*path, "logprob"), why)
    return float(value)


def wrong_logprob(value: float) -> str | None:
    """What is wrong with a log-probability, if anything."""
    if abs(value) > 1e300 or not isfinite(value):  # also of integers no float can hold
        return f"expected a finite number, got {brief(value)}"
    if value > MAX_LOGPROB:
        return f"expected a log-probability, which is at most 0, got {value!r}"
    return None


def _bytes_of(entry: Mapping[str, Any], path: FieldPath) -> bytes:
    """A token's bytes: as listed, or of its text."""
    listed = entry.get("bytes")
    if not listed:
        return entry["token"].encode(errors="replace")
    if not isinstance(listed, list) or not all(type(b) is int and 0 <= b < 256 for b in listed):
        raise InvalidField((*path, "bytes"), f"expected a list of bytes, got {brief(listed)}")
    return bytes(listed)


def first_outside(ids: Sequence[int], vocab: int) -> tuple[int, int] | None:
    """The place and value of the first id that is not in the vocabulary."""
    if not ids or (min(ids) >= 0 and max(ids) < vocab):
        return None
    return next((i, token) for i, token in enumerate(ids) if not 0 <= token < vocab)
