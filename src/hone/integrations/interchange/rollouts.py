"""The rollouts of a run directory, with the tokens of their calls where the server still has them.

In:   a run directory; a function that reads the recorded calls of a rollout
Out:  ExportedRollouts, one for each rollout that has messages

Conversations come from the recorded calls, which have all of them, with tokens. Those of other
models are left out, such as a simulated user or an opponent at a fixed step; in mixed
conversations, `weight: 0` marks messages that the policy did not sample. Without the calls, the run
directory has the last conversation of each rollout, as text. Secrets are removed from the text; the
token ids are those that the model read and sampled.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

from hone.errors import ConfigError
from hone.files.event_log import FILE, read
from hone.files.events import RunStarted
from hone.files.redact import redact_json
from hone.finetune.journal import RUN_FILE, read_records
from hone.integrations.interchange.base import Conversation, ExportedRollout
from hone.types import RecordedCall
from hone.wire.conversation import Continuations

CallsOf = Callable[[str], Sequence[RecordedCall]]
"""The recorded calls of a rollout; none if they are not known."""


def run_started(run: Path) -> RunStarted:
    """How the run was last started; raises ConfigError if the directory holds no run."""
    if not (run / RUN_FILE).exists():
        raise ConfigError(
            f"{run}: holds no run ({RUN_FILE} is missing); name finetuning.output_dir"
        )
    started = [event for event in read(run / FILE) if isinstance(event, RunStarted)]
    if not started:
        raise ConfigError(f"{run}: the run has not started, so there is nothing to export")
    return started[-1]


def exported_rollouts(
    run: Path, calls_of: CallsOf, *, splits: Collection[str], skipped: Counter[str]
) -> Iterator[ExportedRollout]:
    """Rollouts in the order of the files; `skipped` counts those that are left out, by reason."""
    started = run_started(run)
    model = started.name or "policy"
    recorded_as = None if started.project is None else f"{started.project}/{started.name}"
    for path in sorted((run / "trajectories").glob("*.jsonl")):
        records = {(r.round, r.example, r.generation): r for r in read_records(path)}
        tools = {
            record.example: record.request.get("tools")
            for record in records.values()
            if record.request is not None
        }
        for record in records.values():
            if record.split not in splits:
                continue
            calls = calls_of(record.rollout)
            pinned = record.split == "final"  # it names the step that is measured
            conversations = [
                conversation
                for conversation in _conversations(calls)
                if _mark_others(conversation, recorded_as, pinned=pinned)
            ]
            if not calls and record.messages:
                conversations = [Conversation(record.messages, tools.get(record.example))]
            if not conversations:
                skipped["no call of the trained model" if calls else "no messages"] += 1
                continue
            for number, one in enumerate(conversations):
                one.messages, one.tools = redact_json(one.messages), redact_json(one.tools)
                one.id = record.rollout if number == 0 else f"{record.rollout}#{number}"
                one.reward = record.reward
            yield ExportedRollout(record, conversations, model)


def _conversations(calls: Sequence[RecordedCall]) -> list[Conversation]:
    """The conversations of recorded calls; answers are as the model gave them."""
    conversations: list[Conversation] = []
    continuations = Continuations()
    for call in sorted(calls, key=lambda one: (one.index, one.choice)):
        if call.messages is None or call.abandoned:
            continue
        number, known = continuations.add(call.messages, call.reply)
        conversations += [Conversation([])] if number == len(conversations) else []
        one = conversations[number]
        one.messages += [*call.messages[known:], call.reply]
        one.tools = call.tools or one.tools
        one.sampled[len(call.messages)] = call
    return conversations


def _mark_others(conversation: Conversation, policy: str | None, *, pinned: bool) -> bool:
    """Give messages that the policy did not sample `weight: 0`; returns whether it sampled any.

    `policy`: PROJECT/NAME; None: any model that is not at a fixed step.
    """
    places = {
        place
        for place, call in conversation.sampled.items()
        if policy in (None, call.model) and (pinned or not call.is_frozen)
    }
    conversation.messages = [
        {**message, "weight": 0}
        if message.get("role") == "assistant" and i not in places
        else message
        for i, message in enumerate(conversation.messages)
    ]
    return bool(places)
