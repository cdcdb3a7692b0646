"""Turn recorded calls that this process did not make into SeenCalls.

In:   the recorded calls of one rollout; the calls that this process made
Out:  calls of other processes as SeenCalls, in the order of their requests; prompts of seen calls

An agent in another process calls the model at the rollout's URL. Evaluators, files and reports read
SeenCalls, wherever the request was sent from.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from hone.capture.base import SeenCall
from hone.capture.openai import LEFT
from hone.types import RecordedCall


def unseen_calls(
    recorded: Sequence[RecordedCall], seen: Sequence[SeenCall], *, host: str
) -> list[SeenCall]:
    """One SeenCall per request that is not in `seen`; `host` is the server's host."""
    known = {choice.get("call_id") for call in seen for choice in call.choices}
    ordered = sorted(recorded, key=lambda one: (one.index, one.choice))
    requests = [list(choices) for _, choices in groupby(ordered, key=lambda one: one.index)]
    others = [choices for choices in requests if not any(one.id in known for one in choices)]
    return [
        _seen(choices, index=place, host=host) for place, choices in enumerate(others, len(seen))
    ]


def with_prompts(recorded: Sequence[RecordedCall], seen: Sequence[SeenCall]) -> list[SeenCall]:
    """The seen calls; those without messages get the recorded messages."""
    messages = {one.id: one.messages for one in recorded}
    return [
        replace(call, messages=messages[call.id])
        if call.messages is None and call.id in messages
        else call
        for call in seen
    ]


def _seen(choices: Sequence[RecordedCall], *, index: int, host: str) -> SeenCall:
    first = choices[0]
    prompt = len(first.call.prompt_ids)
    sampled = sum(len(one.call.completion_ids) for one in choices)
    return SeenCall(
        index=index,
        function=first.call.function,
        model=first.requested_model,
        host=host,
        messages=first.messages,
        tools=first.tools,
        choices=[
            {
                "index": one.choice,
                "message": one.reply,
                "finish_reason": one.finish,
                "token_ids": one.call.completion_ids,
                "call_id": one.id,
                "policy_step": one.call.step,
            }
            for one in choices
        ],
        usage={
            "prompt_tokens": prompt,
            "completion_tokens": sampled,
            "total_tokens": prompt + sampled,
        },
        id=first.id,
        policy_step=first.call.step,
        started_at=first.created_at,
        seconds=0.0,
        status=None if first.abandoned else 200,
        error=LEFT if first.abandoned else None,
        temperature=first.call.temperature,
        held_s=first.held_s,
    )
