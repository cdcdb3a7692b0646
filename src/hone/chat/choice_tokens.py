"""The token ids and log-probabilities in a choice of the OpenAI API.

In:   a choice as JSON gave it
Out:  SampledTokens: as many ids as log-probabilities; InvalidField with the path of what is wrong

Ids are given by name (`token_id:N`, or `token_ids` beside the log-probabilities) or follow from the
bytes of the tokens. Text alone is encoded, and accepted only where that gives the same tokens. Beside
`token_ids`, hone's own clients send plain numbers, `logprobs.token_logprobs`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isfinite
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    Field,
    Strict,
    StrictInt,
    StrictStr,
    ValidationError,
)

from hone.chat.jinja import encode
from hone.chat.template import ChatTemplate
from hone.types import FieldError
from hone.wire.errors import brief, first_problem

FieldPath = tuple[str | int, ...]
"""Where a field is in a request."""

MAX_LOGPROB = 0.01
"""Samplers round; anything above this is a probability or a score, and no log-probability."""
_NAMED = re.compile(r"token_id:[0-9]{1,18}")


class InvalidField(Exception):
    """A field of a job that cannot be trained on, and why."""

    def __init__(self, path: FieldPath, message: str) -> None:
        self.field = FieldError(path, message)
        super().__init__(message)


def wrong_logprob(value: float) -> str | None:
    """What is wrong with a log-probability, if anything."""
    if abs(value) > 1e300 or not isfinite(value):  # also of integers no float can hold
        return f"expected a finite number, got {brief(value)}"
    if value > MAX_LOGPROB:
        return f"expected a log-probability, which is at most 0, got {value!r}"
    return None


def _log_probability(value: float) -> float:
    if why := wrong_logprob(value):
        raise ValueError(why)
    return value


_LogProbability = Annotated[float, Strict(), AfterValidator(_log_probability)]


class _Token(BaseModel):
    token: StrictStr
    logprob: _LogProbability
    bytes: list[Annotated[int, Strict(), Field(ge=0, lt=256)]] | None = None


class _Logprobs(BaseModel):
    content: list[_Token] | None = None
    refusal: list[_Token] | None = None
    token_logprobs: list[_LogProbability] | None = None


class _Choice(BaseModel):
    logprobs: _Logprobs | None = None
    token_ids: list[StrictInt] | None = None


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """Sampled ids, with one log-probability per id."""

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
        try:
            parsed = _Choice.model_validate(choice)
        except ValidationError as error:
            path, (_, message) = error.errors(include_url=False)[0]["loc"], first_problem(error)
            raise InvalidField((*where, *path), message) from None
        logprobs = parsed.logprobs or _Logprobs()
        tokens = logprobs.content or logprobs.refusal or []
        values = [token.logprob for token in tokens] or logprobs.token_logprobs
        if not values:
            return None
        kind = "content" if logprobs.content else "refusal" if tokens else "token_logprobs"
        path = (*where, "logprobs", kind)
        ids = self._ids(tokens, path) if tokens else None
        if parsed.token_ids is not None:
            ids = self._same_ids(parsed.token_ids, len(values), ids, (*where, "token_ids"))
        elif not tokens:
            raise InvalidField(
                path, "the choice has no token_ids, so these tokens cannot be identified"
            )
        elif ids is None:
            ids = self._ids_of_text(tokens, path)
        if wrong := first_outside(ids, self._vocab):
            place, token = wrong
            raise InvalidField(
                (*path, place, "token"),
                f"token id {token} is outside the vocabulary of {self._vocab}; the choice was "
                f"sampled from another model than {self._base_model!r}",
            )
        return SampledTokens(ids, values)

    def _ids(self, tokens: list[_Token], path: FieldPath) -> list[int] | None:
        """The ids of tokens that are named `token_id:N`; None if they are not."""
        if not all(token.token.startswith("token_id:") for token in tokens):
            return None
        for i, token in enumerate(tokens):
            if not _NAMED.fullmatch(token.token):
                raise InvalidField(
                    (*path, i, "token"), f"expected token_id:N, got {brief(token.token)}"
                )
        return [int(token.token.removeprefix("token_id:")) for token in tokens]

    def _same_ids(
        self, ids: list[int], count: int, named: list[int] | None, path: FieldPath
    ) -> list[int]:
        """The choice's own `token_ids`, which must agree with its logprobs."""
        if len(ids) != count:
            raise InvalidField(
                path, f"{len(ids)} ids for {count} logprobs; send one for each token"
            )
        if named is not None and ids != named:
            raise InvalidField(
                path, "differs from the token_id:N of logprobs; send only one of them"
            )
        return ids

    def _ids_of_text(self, tokens: list[_Token], path: FieldPath) -> list[int]:
        """Each token by its bytes; where a token is not known, by encoding all of them at once."""
        pieces = [bytes(t.bytes) if t.bytes else t.token.encode(errors="replace") for t in tokens]
        ids = [self._id_of_bytes.get(piece) for piece in pieces]
        known = [i for i in ids if i is not None]
        if len(known) == len(ids):
            return known
        try:
            encoded = encode(self._tokenizer, b"".join(pieces).decode())
        except UnicodeDecodeError:
            raise InvalidField(path, f"the tokens' bytes are not UTF-8; {_ASK_FOR_IDS}") from None
        if len(encoded) != len(tokens):
            raise InvalidField(
                path,
                f"its text is {len(encoded)} tokens of {self._base_model!r}, and there are "
                f"{len(tokens)} logprobs; {_ASK_FOR_IDS}",
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


def first_outside(ids: Sequence[int], vocab: int) -> tuple[int, int] | None:
    """The place and value of the first id that is not in the vocabulary."""
    if not ids or (min(ids) >= 0 and max(ids) < vocab):
        return None
    return next((i, token) for i, token in enumerate(ids) if not 0 <= token < vocab)
