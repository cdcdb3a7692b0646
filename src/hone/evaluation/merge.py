"""Merge hone's calls and steps into the intermediate steps of NeMo Agent Toolkit.

In:   entries that the toolkit noted; entries of the calls and steps that hone saw
Out:  all of them in the order of time, each call and step once

The two have no id in common. A call is the one that ran at the time of the toolkit's entry, the one
with the same text if there are several; a step is the one with the same name and value.
"""

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

OURS = "hone"
"""The key of a payload's metadata for fields that the toolkit's form does not have."""


def ours(payload: Mapping[str, Any]) -> Mapping[str, Any]:
    """Hone's fields of an entry's payload."""
    metadata = payload.get("metadata")
    own = metadata.get(OURS) if isinstance(metadata, Mapping) else None
    return own if isinstance(own, Mapping) else {}


def merge(events: Sequence[Any], own: Sequence[dict[str, Any]]) -> list[Any]:
    """The toolkit's entries with hone's fields, and hone's other entries between them."""
    merged, left = list(events), list(own)
    for is_same in (_same_id, _same_text, _same_time, _same_step):
        for place, event in enumerate(events):
            if merged[place] is not event:
                continue
            found = next((one for one in left if is_same(event["payload"], one["payload"])), None)
            if found is not None:
                left.remove(found)
                merged[place] = _with_fields(event, found["payload"])
    return sorted([*merged, *left], key=_time_of) if left else merged


def _with_fields(event: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    payload = event["payload"]
    held = payload.get("metadata")
    metadata = {**(held if isinstance(held, Mapping) else {}), OURS: ours(own)}
    return {**event, "payload": {**payload, "metadata": metadata}}


def _time_of(entry: Mapping[str, Any]) -> float:
    return entry["payload"].get("event_timestamp") or 0.0


# ---- the same call or step ---------------------------------------------------------------------


def _same_id(theirs: Mapping[str, Any], own: Mapping[str, Any]) -> bool:
    """An entry that hone wrote, or has merged before."""
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
    held = ours(theirs) or theirs.get("metadata")
    value = held.get("value") if isinstance(held, Mapping) else None
    if isinstance(value, bool) or not isinstance(value, Real):
        value = None
    return (theirs.get("name") or "custom", value) == (own["name"], ours(own)["value"])


def _is(theirs: Mapping[str, Any], own: Mapping[str, Any], kind: str) -> bool:
    return theirs["event_type"] == kind == own["event_type"]
