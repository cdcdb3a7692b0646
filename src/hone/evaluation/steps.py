"""Convert a rollout's calls and steps to `intermediate_steps` of workflow_output.json, and back.

In:   SeenCalls and Steps; or such a list, written by hone or by NeMo Agent Toolkit
Out:  dicts in that toolkit's form (parent_id, function_ancestry, payload); or calls and steps again

Log-probabilities and token ids are not written: they are many times as large as the text, and
training reads them from the server's records, never from this file.
"""

import uuid
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

from hone.capture.base import SeenCall, Step
from hone.errors import ConfigError

LLM_END = "LLM_END"
CUSTOM_END = "CUSTOM_END"
OURS = "hone"
"""The key of a payload's metadata for fields that the toolkit's form does not have."""
_BULKY = frozenset({"logprobs", "token_ids", "prompt_token_ids", "prompt_logprobs"})
_FREE = uuid.UUID("8f0f0f52-7a1c-4a35-9d0e-2b7f6f3a1c55")
_FIELDS = (
    *("index", "function", "model", "host", "tools", "usage", "id", "policy_step"),
    *("seconds", "held_s", "status", "error"),
)


def ours(payload: Mapping[str, Any]) -> Mapping[str, Any]:
    """hone's fields of an entry's payload."""
    metadata = payload.get("metadata")
    own = metadata.get(OURS) if isinstance(metadata, Mapping) else None
    return own if isinstance(own, Mapping) else {}


def intermediate_steps(
    calls: Sequence[SeenCall], steps: Sequence[Step], *, kinds: Iterable[str] | None = None
) -> list[dict[str, Any]]:
    """Calls and steps in the order in which they happened; `kinds` selects kinds of event."""
    entries = [(step.calls, 0, _custom_end(step, place)) for place, step in enumerate(steps)]
    # A step recorded after n calls were sent comes after call n-1 and before call n.
    entries += [(call.index, 1, _llm_end(call)) for call in calls]
    ordered = [entry for _, _, entry in sorted(entries, key=lambda entry: entry[:2])]
    return _selected(ordered, kinds)


def all_steps(
    calls: Sequence[SeenCall],
    steps: Sequence[Step],
    events: Sequence[Any],
    *,
    kinds: Iterable[str] | None = None,
) -> list[Any]:
    """The steps of a rollout: NeMo Agent Toolkit's, and the calls and steps that it did not record.

    The toolkit records model calls only if its profiler is installed, and never hone's functions.
    If both recorded the same call or step, the toolkit's entry gets hone's fields.
    """
    if not events:
        return intermediate_steps(calls, steps, kinds=kinds)
    own = [_llm_end(call) for call in calls]
    own += [_custom_end(step, place) for place, step in enumerate(steps)]
    return _selected(_merge(events, own), kinds)


def _selected(entries: list[Any], kinds: Iterable[str] | None) -> list[Any]:
    wanted = None if kinds is None else set(kinds)
    return [e for e in entries if wanted is None or e["payload"]["event_type"] in wanted]


def events_of(entries: Any) -> list[Any]:
    """An `intermediate_steps` list that NeMo Agent Toolkit made; empty if hone made it."""
    listed = entries if isinstance(entries, list) else []
    payloads = [e.get("payload") for e in listed if isinstance(e, Mapping)]
    is_hone = all(isinstance(p, Mapping) and ours(p) for p in payloads)
    return [] if is_hone else listed


def calls_of(entries: Any) -> list[SeenCall]:
    """The model calls of an `intermediate_steps` list."""
    return [_call(payload, n) for n, payload in enumerate(_payloads(entries, LLM_END))]


def steps_of(entries: Any) -> list[Step]:
    """The `hone.step` calls of an `intermediate_steps` list."""
    payloads = [p for p in _payloads(entries, CUSTOM_END) if ours(p)]
    fields = [
        {"name": p["name"], "about": (), "at": p.get("event_timestamp") or 0.0, **ours(p)}
        for p in payloads
    ]
    return [Step(**{**one, "about": tuple(one["about"])}) for one in fields]


def read_steps(entries: Any, where: str) -> tuple[list[SeenCall], list[Step]]:
    """The calls and steps of an `intermediate_steps` list; `where`: its place, for the error."""
    try:
        return calls_of(entries), steps_of(entries)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{where}: cannot be read as the steps of a rollout ({type(error).__name__}: {error}); "
            "remove them, or restore the file"
        ) from None


def seconds_of(entry: Mapping[str, Any]) -> float | None:
    """Duration of an entry's rollout; None if it is no number."""
    value = entry.get("seconds")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value)


def _llm_end(call: SeenCall) -> dict[str, Any]:
    usage = call.usage or {}
    reply = call.reply or {}
    return _entry(
        call.function,
        {
            "event_type": LLM_END,
            "event_timestamp": call.started_at + call.seconds,
            "span_event_timestamp": call.started_at,
            "name": call.model,
            "metadata": {OURS: {key: getattr(call, key) for key in _FIELDS}},
            "data": {
                "input": call.messages,
                "output": reply.get("content") or "",
                "payload": [_slim(choice) for choice in call.choices],
            },
            "usage_info": {"token_usage": _tokens(usage), "num_llm_calls": 1},
        },
        key=f"{call.id}/{call.index}/{call.started_at}",
    )


def _custom_end(step: Step, place: int) -> dict[str, Any]:
    own = {
        "value": step.value,
        "metadata": step.metadata,
        "function": step.function,
        "calls": step.calls,
        "about": step.about,
    }
    return _entry(
        step.function,
        {
            "event_type": CUSTOM_END,
            "event_timestamp": step.at or None,
            "name": step.name,
            "metadata": {OURS: own},
            "data": {"output": step.value},
        },
        key=f"{step.name}/{place}",
    )


def _entry(function: str, payload: dict[str, Any], *, key: str) -> dict[str, Any]:
    path = function.split(".") if function else ["root"]
    above = ".".join(path[:-1]) or "root"
    ancestry = {
        "function_id": function or "root",
        "function_name": path[-1],
        "parent_id": above,
        "parent_name": path[-2] if len(path) > 1 else "root",
    }
    blank = {"input": None, "output": None, "chunk": None, "payload": None}
    form = {
        "event_timestamp": None,
        "span_event_timestamp": None,
        "framework": None,
        "tags": None,
        "usage_info": None,
        **payload,
        "data": {**blank, **payload["data"]},
        "UUID": str(uuid.uuid5(_FREE, f"{function}/{key}")),
    }
    return {"parent_id": above, "function_ancestry": ancestry, "payload": form}


def _tokens(usage: Mapping[str, Any]) -> dict[str, int]:
    names = ("prompt_tokens", "completion_tokens", "cached_tokens", "reasoning_tokens")
    counts = {name: int(usage.get(name) or 0) for name in names}
    total = usage.get("total_tokens") or counts["prompt_tokens"] + counts["completion_tokens"]
    return {**counts, "total_tokens": int(total)}


def _slim(choice: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in choice.items() if name not in _BULKY}


# ---- reading ----------------------------------------------------------------------------------


def _payloads(entries: Any, kind: str) -> list[Mapping[str, Any]]:
    listed = entries if isinstance(entries, list) else []
    payloads = [entry.get("payload") for entry in listed if isinstance(entry, Mapping)]
    return [p for p in payloads if isinstance(p, Mapping) and p.get("event_type") == kind]


def _call(payload: Mapping[str, Any], place: int) -> SeenCall:
    """A call as hone wrote it, or as much of one as another program's file has."""
    own, data = ours(payload), payload.get("data") or {}
    ended = payload.get("event_timestamp") or 0.0
    began = payload.get("span_event_timestamp") or ended
    messages, answer = data.get("input"), data.get("payload")
    choices = [dict(choice) for choice in answer or () if isinstance(choice, Mapping)]
    if not own or not isinstance(answer, list):  # in the toolkit's form
        if not isinstance(messages, list):
            messages = [{"role": "user", "content": messages}]
        message = {"role": "assistant", "content": data.get("output") or ""}
        choices = choices or [{"index": 0, "message": message}]
    known: dict[str, Any] = {
        **dict.fromkeys(_FIELDS),
        "index": place,
        "function": "",
        "model": payload.get("name") or "",
        "host": "",
        "usage": (payload.get("usage_info") or {}).get("token_usage"),
        "seconds": ended - began,
        "held_s": 0.0,
        **own,
    }
    fields = {key: known[key] for key in _FIELDS}
    return SeenCall(**fields, messages=messages, choices=choices, started_at=began)


# ---- entries of NeMo Agent Toolkit ---------------------------------------------------------------


def _merge(events: Sequence[Any], own: Sequence[dict[str, Any]]) -> list[Any]:
    """The toolkit's entries with hone's fields, and hone's other entries between them.

    The two have no id in common. A call is the one that ran at the time of the toolkit's entry, the
    one with the same text if there are several; a step is the one with the same name and value.
    """
    merged, left = list(events), list(own)
    for is_same in (_same_id, _same_text, _same_time, _same_step):
        for place, event in enumerate(events):
            if merged[place] is not event:
                continue
            same = next((one for one in left if is_same(event["payload"], one["payload"])), None)
            if same is not None:
                left.remove(same)
                merged[place] = _with_fields(event, same["payload"])
    return sorted([*merged, *left], key=_time_of) if left else merged


def _with_fields(event: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    payload = event["payload"]
    existing = payload.get("metadata")
    metadata = {**(existing if isinstance(existing, Mapping) else {}), OURS: ours(own)}
    return {**event, "payload": {**payload, "metadata": metadata}}


def _time_of(entry: Mapping[str, Any]) -> float:
    return entry["payload"].get("event_timestamp") or 0.0


def _same_id(theirs: Mapping[str, Any], own: Mapping[str, Any]) -> bool:
    """Whether hone wrote the entry, or merged it before."""
    known = ours(theirs).get("id")
    return _is(theirs, own, "LLM_END") and known is not None and known == ours(own)["id"]


def _same_text(theirs: Mapping[str, Any], own: Mapping[str, Any]) -> bool:
    text = (theirs.get("data") or {}).get("output") or ""
    return _same_time(theirs, own) and text == own["data"]["output"]


def _same_time(theirs: Mapping[str, Any], own: Mapping[str, Any]) -> bool:
    if not _is(theirs, own, "LLM_END"):
        return False
    ended = theirs.get("event_timestamp") or 0.0
    began = theirs.get("span_event_timestamp") or ended
    return began <= own["event_timestamp"] and own["span_event_timestamp"] <= ended


def _same_step(theirs: Mapping[str, Any], own: Mapping[str, Any]) -> bool:
    if not _is(theirs, own, "CUSTOM_END"):
        return False
    fields = ours(theirs) or theirs.get("metadata")
    value = fields.get("value") if isinstance(fields, Mapping) else None
    if isinstance(value, bool) or not isinstance(value, Real):
        value = None
    return (theirs.get("name") or "custom", value) == (own["name"], ours(own)["value"])


def _is(theirs: Mapping[str, Any], own: Mapping[str, Any], kind: str) -> bool:
    return theirs["event_type"] == kind == own["event_type"]
