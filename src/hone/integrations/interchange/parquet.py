"""Rollouts as a Parquet file: one row for each conversation.

In:   rollouts
Out:  a file with one row per conversation: messages, reward, and the tokens of every sampled message

Values of any form (messages, tools, scores, input, output) are columns of JSON text: their keys
differ from row to row, and Parquet has one schema. Token ids and log-probabilities are lists.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hone.integrations.interchange.base import ExportedRollout, json_text

ROWS_AT_ONCE = 500
"""Rows per row group; the token ids of a whole run might not fit into memory."""


def write_parquet(path: Path, rollouts: Iterable[ExportedRollout]) -> int:
    """Write the file; returns the number of rows."""
    import pyarrow as pa  # imported here: it takes a second
    import pyarrow.parquet as pq

    call = pa.struct(
        [
            ("message", pa.int32()),
            ("call_id", pa.string()),
            ("model", pa.string()),
            ("policy_step", pa.int32()),
            ("temperature", pa.float64()),
            ("prompt_token_ids", pa.list_(pa.int32())),
            ("token_ids", pa.list_(pa.int32())),
            ("logprobs", pa.list_(pa.float64())),
        ]
    )
    texts = ("messages", "tools", "scores", "input", "output", "failure")
    schema = pa.schema(
        [
            *((name, pa.string()) for name in ("id", "rollout", "example", "split", "model")),
            *((name, pa.int32()) for name in ("epoch", "round", "generation", "conversation")),
            *((name, pa.float64()) for name in ("reward", "seconds")),
            *((name, pa.string()) for name in texts),
            ("calls", pa.list_(call)),
        ]
    )
    count, waiting = 0, []
    with pq.ParquetWriter(path, schema) as writer:
        for row in (row for rollout in rollouts for row in _rows(rollout)):
            waiting.append({name: row.get(name) for name in schema.names})
            count += 1
            if len(waiting) == ROWS_AT_ONCE:
                writer.write_table(pa.Table.from_pylist(waiting, schema))
                waiting = []
        writer.write_table(pa.Table.from_pylist(waiting, schema))
    return count


def _rows(rollout: ExportedRollout) -> Iterable[dict[str, Any]]:
    row = rollout.details()
    for key in ("scores", "input", "output", "failure"):
        row[key] = None if row[key] is None else json_text(row[key])
    for number, one in enumerate(rollout.conversations):
        yield row | {
            "id": one.id,
            "model": rollout.model,
            "conversation": number,
            "messages": json_text(one.messages),
            "tools": None if one.tools is None else json_text(one.tools),
            "calls": [
                {
                    "message": place,
                    "call_id": call.id,
                    "model": call.model,
                    "policy_step": call.call.step,
                    "temperature": call.call.temperature,
                    "prompt_token_ids": call.call.prompt_ids,
                    "token_ids": call.call.completion_ids,
                    "logprobs": call.call.logprobs,
                }
                for place, call in sorted(one.sampled.items())
            ],
        }
