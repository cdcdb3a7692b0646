"""The groups of a job as bytes, for the server's store and the learner's process.

In:   TrajectoryGroups
Out:  token ids and log-probabilities as arrays, the rest as JSON, all compressed; and back

The calls of a job overlap: the rollouts of a group share a prompt, and a later turn begins with the
earlier ones. A call stores only the ids after its common prefix with the previous call.

Packing and unpacking a large job takes seconds and holds the GIL. The server passes the bytes on
unread; processes with an event loop let another process unpack them.
"""

import json
import sys
import zlib
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

from hone.errors import StateError
from hone.trajectory import TrajectoryGroup
from hone.wire.conversation import common_prefix

MARK = b"hone-groups-1\n"
"""The first bytes: the version of this format."""


def pack_groups(groups: Sequence[TrajectoryGroup]) -> bytes:
    plain = [group.model_dump() for group in groups]
    ids, logprobs = array("i"), array("d")
    previous: list[int] = []
    for call in _calls(plain):
        prompt, completion = call["prompt_ids"], call["completion_ids"]
        shared = common_prefix(previous, prompt)
        ids.extend(prompt[shared:])
        ids.extend(completion)
        if call["logprobs"] is not None:
            logprobs.extend(call["logprobs"])
            call["logprobs"] = True
        call["prompt_ids"], call["completion_ids"] = [shared, len(prompt)], len(completion)
        previous = prompt + completion
    # json rather than pydantic, which would turn a NaN into null; the learner refuses NaN.
    text = json.dumps(plain).encode()
    sizes = json.dumps([len(text), len(ids), len(logprobs)]).encode() + b"\n"
    return MARK + zlib.compress(sizes + text + _bytes(ids) + _bytes(logprobs), 1)


def unpack_groups(packed: bytes) -> list[TrajectoryGroup]:
    if not packed.startswith(MARK):
        raise StateError(
            f"groups of a job: got bytes that begin with {packed[: len(MARK)]!r}, not with {MARK!r}. They "
            "are damaged, or were written by a newer hone: upgrade hone, or submit the job again."
        )
    data = zlib.decompress(packed[len(MARK) :])
    begin = data.index(b"\n") + 1
    text, num_ids, num_logprobs = json.loads(data[:begin])
    plain = json.loads(data[begin : begin + text])
    end = begin + text + 4 * num_ids
    ids = _values("i", data[begin + text : end])
    logprobs = _values("d", data[end : end + 8 * num_logprobs])
    at = scored = 0
    previous: list[int] = []
    for call in _calls(plain):
        (shared, prompt), completion = call["prompt_ids"], call["completion_ids"]
        previous = previous[:shared] + ids[at : at + prompt - shared + completion]
        at += prompt - shared + completion
        call["prompt_ids"], call["completion_ids"] = previous[:prompt], previous[prompt:]
        if call["logprobs"] is not None:
            call["logprobs"] = logprobs[scored : scored + completion]
            scored += completion
    return [TrajectoryGroup(**group) for group in plain]


def _calls(groups: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for group in groups:
        for trajectory in group["trajectories"]:
            yield from trajectory["calls"]


def _bytes(values: "array[Any]") -> bytes:
    """Little-endian, on any machine."""
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def _values(kind: str, data: bytes) -> list[Any]:
    values: array[Any] = array(kind, data)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()
