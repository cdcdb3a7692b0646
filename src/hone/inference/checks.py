"""Checks of a request, the same for every engine.

In:   prompt ids with Sampling, or sequences to score; the vocabulary and length of the engine's model
Out:  nothing, or an error that names the field
"""

from collections.abc import Sequence

from hone.errors import ConfigError, RequestTooLarge
from hone.inference.base import Sampling

COLDEST = 1e-3
"""Lowest temperature above 0."""


def check_request(
    prompt_ids: Sequence[int],
    sampling: Sampling,
    vocab: int,
    max_length: int,
    *,
    has_decode: bool = True,
    coldest: float = COLDEST,
) -> None:
    """Refuse a request that cannot be sampled; the error names the field."""
    if not prompt_ids:
        raise ConfigError("prompt_ids is empty; send at least one token")
    outside = _outside(prompt_ids, vocab)
    if outside is not None:
        raise ConfigError(f"prompt_ids holds {outside}, outside the vocabulary of {vocab}")
    if len(prompt_ids) >= max_length:
        raise RequestTooLarge(
            f"the prompt has {len(prompt_ids)} tokens; the model reads {max_length} "
            "including the answer. Shorten the conversation."
        )
    check_settings(sampling, vocab, coldest=coldest)
    if sampling.stop and not has_decode:
        raise ConfigError("stop strings need an engine that can turn ids into text")


def check_settings(sampling: Sampling, vocab: int, *, coldest: float = COLDEST) -> None:
    """Refuse settings that the engine cannot sample with; the error names the field.

    `coldest` is the lowest temperature above 0 that it samples at.
    """
    ranges: list[tuple[str, float, float, float]] = [
        ("n", sampling.n, 1, float("inf")),
        ("max_tokens", sampling.max_tokens, 1, float("inf")),
        ("temperature", sampling.temperature, 0, 100),
        ("top_p", sampling.top_p, 1e-9, 1),
        ("top_k", sampling.top_k, 0, float("inf")),
        ("min_p", sampling.min_p, 0, 1),
        ("min_tokens", sampling.min_tokens, 0, sampling.max_tokens),
        ("top_logprobs", sampling.top_logprobs, 0, vocab),
        ("presence_penalty", sampling.presence_penalty, -2, 2),
        ("frequency_penalty", sampling.frequency_penalty, -2, 2),
        ("repetition_penalty", sampling.repetition_penalty, 1e-2, 100),
    ]
    for name, value, low, high in ranges:
        if not low <= value <= high:
            raise ConfigError(f"{name} is {value!r}; it must lie between {low:g} and {high:g}")
    if 0 < sampling.temperature < coldest:
        raise ConfigError(
            f"temperature is {sampling.temperature!r}; use 0 for greedy, else >= {coldest:g}"
        )
    if sampling.min_tokens and (sampling.constraint is not None or sampling.stop):
        other = "stop strings" if sampling.constraint is None else "a constraint"
        raise ConfigError(f"min_tokens: not together with {other}; leave one out")
    if "" in sampling.stop:
        raise ConfigError("stop holds an empty string, which ends every answer at once")
    for token, bias in sampling.logit_bias:
        if not 0 <= token < vocab:
            raise ConfigError(f"logit_bias: {token} is outside the vocabulary of {vocab}")
        if not -100 <= bias <= 100:
            raise ConfigError(f"logit_bias: {bias!r} for token {token}; expected -100 to 100")


def check_sequences(sequences: Sequence[Sequence[int]], vocab: int, max_length: int) -> None:
    """Refuse sequences that cannot be scored; the error names the sequence."""
    for i, ids in enumerate(sequences):
        if not 1 <= len(ids) <= max_length:
            raise ConfigError(
                f"sequence {i} of the probe has {len(ids)} tokens; the model reads 1 to "
                f"{max_length}. Send a shorter one."
            )
        outside = _outside(ids, vocab)
        if outside is not None:
            raise ConfigError(
                f"sequence {i} of the probe holds {outside}, outside the vocabulary of {vocab}"
            )


def _outside(ids: Sequence[int], vocab: int) -> int | None:
    """The first id outside the vocabulary, if there is one."""
    if min(ids) >= 0 and max(ids) < vocab:
        return None
    return next(token for token in ids if not 0 <= token < vocab)
