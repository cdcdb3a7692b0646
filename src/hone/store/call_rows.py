"""Convert recorded calls to SQLite rows, and back.

In:   a RecordedCall, and the call it continues
Out:  a Row with what the call adds to its parent; whole calls from rows

Ids are int32; log-probabilities are float32 if that loses nothing, otherwise float64. Both use this
machine's byte order: a state directory cannot be moved between processors of different byte order.
"""

import hashlib
import json
import sqlite3
import zlib
from array import array
from collections.abc import Sequence
from typing import Any

from pydantic_core import to_json

from hone.errors import StateError
from hone.store.rows import unreadable
from hone.types import CallSummary, RecordedCall
from hone.wire.conversation import common_prefix

COLUMNS = (
    "id, rollout, run, place, choice, base_model, digest, created_at, size, parent, ids_kept, "
    "turns_kept, ids, completion, logprobs, body"
)
_ROW_BYTES = 200
"""Approximate size of a row without its blobs."""


class Row:
    """A call, stored as what it adds to its parent."""

    def __init__(self, call: RecordedCall, parent: RecordedCall | None) -> None:
        self.call = call
        self.ids_kept = self.turns_kept = 0
        if parent is not None:
            before = [*parent.call.prompt_ids, *parent.call.completion_ids]
            self.ids_kept = common_prefix(before, call.call.prompt_ids)
            turns = [*(parent.messages or ()), parent.reply]
            self.turns_kept = common_prefix(turns, call.messages or [])
        self.parent = parent if self.ids_kept or self.turns_kept else None
        same_tools = self.parent is not None and self.parent.tools == call.tools
        self.ids = ints(call.call.prompt_ids[self.ids_kept :])
        self.completion = ints(call.call.completion_ids)
        self.logprobs = None if call.call.logprobs is None else _floats(call.call.logprobs)
        self.body = _pack(
            {
                "turns": None if call.messages is None else call.messages[self.turns_kept :],
                "tools": "parent's" if same_tools else call.tools,
                **call.model_dump(include=_BODY_FIELDS),
                "call": call.call.model_dump(include=_CALL_FIELDS),
            }
        )
        blobs = (self.ids, self.completion, self.logprobs or b"", self.body)
        self.size = _ROW_BYTES + sum(map(len, blobs))

    def values(self, parent: int | None) -> tuple[Any, ...]:
        call = self.call
        name, colon, _ = call.rollout.partition(":")
        return (
            *(call.id, call.rollout, name if colon else None, call.index, call.choice),
            *(call.base_model, digest(self.completion), call.created_at, self.size, parent),
            *(self.ids_kept, self.turns_kept, self.ids, self.completion, self.logprobs, self.body),
        )


_BODY_FIELDS = {
    *("model", "requested_model", "adapter_sha256", "fingerprint", "reply", "finish"),
    *("outcome", "reasons", "continues", "malformed", "abandoned", "held_s", "request_fields"),
}
_CALL_FIELDS = {"exact", "masked_logprobs", "forced", "temperature", "step", "function", "trained"}


def insert(db: sqlite3.Connection, values: tuple[Any, ...]) -> None:
    marks = ", ".join("?" * len(values))
    db.execute(f"INSERT INTO calls ({COLUMNS}) VALUES ({marks})", values)


def read_calls(query: Any, seqs: Sequence[int]) -> list[RecordedCall]:
    """Whole calls by their `seq`, in this order. `query` runs SQL and returns rows.

    A parent is always older than its child, so it is built first. Raises StateError if one of these
    calls, or a parent, cannot be read.
    """
    rows = query(
        f"""
        WITH RECURSIVE chain (seq) AS (
            SELECT value FROM json_each(?)
            UNION
            SELECT calls.parent FROM calls JOIN chain USING (seq) WHERE calls.parent IS NOT NULL
        )
        SELECT seq, {COLUMNS} FROM calls WHERE seq IN (SELECT seq FROM chain) ORDER BY seq
        """,
        (json.dumps(seqs),),
    )
    whole: dict[int, RecordedCall] = {}
    for row in rows:
        try:
            whole[row["seq"]] = _call(row, row["parent"] and whole[row["parent"]])
        except (ValueError, KeyError, TypeError, zlib.error) as error:
            raise _unreadable(row, error) from None
    return [whole[seq] for seq in seqs]


def _unreadable(row: sqlite3.Row, error: Exception) -> StateError:
    why = ValueError(f"no {error}") if isinstance(error, KeyError) else error
    return unreadable(f"call {row['id']!r} of rollout {row['rollout']!r}", why)


def _call(row: sqlite3.Row, parent: RecordedCall | None) -> RecordedCall:
    body = _unpack(row["body"])
    ids, turns, tools = _read_ints(row["ids"]), body.pop("turns"), body.pop("tools")
    if parent is not None:
        before = [*parent.call.prompt_ids, *parent.call.completion_ids]
        ids = before[: row["ids_kept"]] + ids
        known = [*(parent.messages or ()), parent.reply]
        turns = None if turns is None else known[: row["turns_kept"]] + turns
        tools = parent.tools if tools == "parent's" else tools
    completion = _read_ints(row["completion"])
    logprobs = None
    if row["logprobs"] is not None:
        logprobs = _read_floats(row["logprobs"], len(completion))
    tokens = {"prompt_ids": ids, "completion_ids": completion, "logprobs": logprobs}
    fields = body | {
        "id": row["id"],
        "rollout": row["rollout"],
        "index": row["place"],
        "choice": row["choice"],
        "base_model": row["base_model"],
        "created_at": row["created_at"],
        "messages": turns,
        "tools": tools,
        "call": body["call"] | tokens,
    }
    return RecordedCall.model_validate(fields, extra="ignore")


SUMMARY_COLUMNS = "id, rollout, place, choice, base_model, completion, logprobs, body"
"""The columns of a summary: neither the prompt nor the call that it continues."""


def summary_of(row: sqlite3.Row) -> CallSummary:
    """The summary of the call in a row. Raises StateError if it cannot be read."""
    try:
        body, sampled = _unpack(row["body"]), _read_ints(row["completion"])
        logprobs = row["logprobs"]
        fields = {
            "id": row["id"],
            "index": row["place"],
            "choice": row["choice"],
            "base_model": row["base_model"],
            **_some(body, "model", "requested_model", "finish", "abandoned"),
            **_some(body["call"], "function", "temperature", "step"),
        }
        return CallSummary.with_tokens(
            fields, sampled, None if logprobs is None else _read_floats(logprobs, len(sampled))
        )
    except (ValueError, KeyError, TypeError, zlib.error) as error:
        raise _unreadable(row, error) from None


def _some(values: dict[str, Any], *names: str) -> dict[str, Any]:
    """The values of these names that there are; an older hone may not have written all of them."""
    return {name: values[name] for name in names if name in values}


def held_s(body: bytes) -> float:
    """The field of this name in the body of a row."""
    return _unpack(body).get("held_s", 0.0)


def without_request_fields(body: bytes) -> bytes:
    """The body of a row, without the fields of the request."""
    return _pack(_unpack(body) | {"request_fields": None})


def ints(ids: Sequence[int]) -> bytes:
    return array("i", ids).tobytes()


def _read_ints(blob: bytes) -> list[int]:
    return array("i", blob).tolist()


def _floats(values: Sequence[float]) -> bytes:
    short = array("f", values)
    return (short if short.tolist() == list(values) else array("d", values)).tobytes()


def _read_floats(blob: bytes, count: int) -> list[float]:
    return array("f" if len(blob) == 4 * count else "d", blob).tolist()


def digest(ids: bytes) -> bytes:
    return hashlib.sha256(ids).digest()[:16]


def _pack(value: dict[str, Any]) -> bytes:
    text = to_json(value)  # infinite numbers in the form that Python's json writes and reads
    return b"z" + zlib.compress(text, 1) if len(text) > 512 else b"j" + text


def _unpack(blob: bytes) -> dict[str, Any]:
    return json.loads(zlib.decompress(blob[1:]) if blob[:1] == b"z" else blob[1:])
