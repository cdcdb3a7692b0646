"""Turn OpenAI messages and choices with log-probabilities, as ART's clients send them, into Calls.

In:   a History; the calls this server recorded; the model's chat template
Out:  one Call per choice whose log-probabilities are known, in their order; for the losses that
      train on text (dpo, sft), one Call per assistant message

A choice that this server sampled is matched with its recorded call by the call's id, if the client
sent it (then it needs no log-probabilities of its own), or by its token ids; prompt, temperature and
step are the recorded ones. The prompt of any other choice is rendered from text, which is a guess
about what its sampler was fed: it is counted as such, and refused where ids and message differ or
where the numbers of ids and of log-probabilities do. An assistant message that is trained as text is
rendered with the model's template; `weight: 0`, as in OpenAI's fine-tuning format, makes it context.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

from hone.chat.bridge import Conversation, RenderedCall
from hone.chat.choice_tokens import FieldPath, InvalidField, SampledTokens, TokenReader
from hone.chat.messages import check_messages
from hone.errors import NotFound, TemplateError, TemplateLimit
from hone.learner.staleness import too_stale
from hone.server.serve.tokenizer import FIXED, BaseTokenizer, differing
from hone.store.calls import CallStore
from hone.store.models import ModelRecord
from hone.trajectory import History
from hone.types import Call, RecordedCall, TrainConfig
from hone.wire.errors import brief

_SAME = 1e-4
"""Log-probabilities this close are taken as equal: one may be written with fewer digits."""
_CERTAIN = 1e-3
"""Below this total surprisal, a completion can have the same log-probabilities after many
prompts."""
_CALL = re.compile(r"call-[0-9a-f]{20}")


@dataclass(frozen=True, slots=True)
class Start:
    """What a job starts from: the model, its newest step, and the training settings."""

    record: ModelRecord
    config: TrainConfig
    step: int
    adapter_sha256: str | None
    advance_when_flat: bool = False

    def check_step(self, step: int, path: FieldPath, what: str = "it ") -> None:
        """Refuse a call of this step if it is too stale for the job, or newer than its start."""
        if why := too_stale(step, self.step, self.config):
            raise InvalidField(path, what + why)


class ChoiceReader:
    """Reads the choices of one job; caches what it looked up, since short answers are frequent."""

    def __init__(
        self,
        tokenizer: BaseTokenizer,
        recorded: CallStore,
        start: Start,
        vocab: int,
        counts: Counter[str],
    ) -> None:
        """`counts`: where calls are counted by where they came from."""
        self._template, self._fingerprint = tokenizer.template, tokenizer.fingerprint
        self._store = recorded
        self._start = start
        self._base_model = start.record.spec.base_model
        self._tokens = TokenReader(self._template, base_model=self._base_model, vocab=vocab)
        self._counts = counts
        self._with_ids = cache(partial(recorded.match, self._base_model))
        self.matched: list[RecordedCall] = []
        """The recorded calls of the choices."""

    def read(self, history: History, path: FieldPath) -> list[Call]:
        """The trained choices of a conversation. Raises InvalidField."""
        transcript = _Transcript(history, Conversation(self._template))
        calls: list[Call] = []
        for i, item in enumerate(history.messages_and_choices):
            where = (*path, "messages_and_choices", i)
            message, choice = _split(item, where)
            call = None
            if not self._start.config.is_on_policy:
                call = self._written(choice, message, transcript, where)
            elif choice is not None:
                call = self._sampled(choice, message, transcript, where)
            if call is not None:
                calls.append(call)
                transcript.answer(call, message)
            transcript.messages.append(message)
        return calls

    def _sampled(
        self,
        choice: Mapping[str, Any],
        message: dict[str, Any],
        transcript: "_Transcript",
        where: FieldPath,
    ) -> Call | None:
        """A choice as a call: the one that was recorded, or its text; None without logprobs."""
        recorded = self._named(choice)
        sampled = self._tokens.read(choice, where) or _unchanged(recorded, choice, message)
        if sampled is None:
            self._counts["dropped/no_logprobs"] += 1
            return None
        if recorded is None or not _same(recorded.call, sampled):
            recorded = self._match(sampled, transcript.messages)
        if recorded is not None:
            other = bool(differing(recorded.fingerprint, self._fingerprint))
            self._counts["other_template_args"] += other
            self._start.check_step(recorded.call.step, where)
            return self._matched(recorded)
        try:
            prompt = transcript.prompt()
            self._check_text(choice, message, sampled.ids, prompt, transcript.history, where)
        except TemplateLimit:
            raise  # every other conversation would take as long
        except TemplateError as error:
            raise InvalidField(
                where, f"it matches no call of this server, and it cannot be rendered: {error}"
            ) from None
        self._counts["rerendered"] += 1
        return Call(
            prompt_ids=prompt,
            completion_ids=sampled.ids,
            logprobs=sampled.logprobs,
            step=self._start.step,
        )

    def _written(
        self,
        choice: Mapping[str, Any] | None,
        message: dict[str, Any],
        transcript: "_Transcript",
        where: FieldPath,
    ) -> Call | None:
        """An assistant message as a call: the one that was recorded, or its text; else None."""
        weight = message.pop("weight", 1)
        if message.get("role") != "assistant" or not weight:
            return None
        recorded = None if choice is None else self._named(choice)
        if recorded is not None and _unchanged(recorded, choice or {}, message) is not None:
            return self._matched(recorded)
        try:
            prompt = transcript.prompt()
            ids = self._template.answer_ids(transcript.messages, message, transcript.history.tools)
        except TemplateLimit:
            raise  # every other conversation would take as long
        except TemplateError as error:
            raise InvalidField(where, str(error)) from None
        self._counts["from_text"] += 1
        return Call(prompt_ids=prompt, completion_ids=ids, step=self._start.step)

    # ---- the recorded call ---------------------------------------------------------------------

    def _matched(self, recorded: RecordedCall) -> Call:
        self._counts["matched"] += 1
        self.matched.append(recorded)
        return recorded.call.model_copy(update={"trained": True})

    def _named(self, choice: Mapping[str, Any]) -> RecordedCall | None:
        """The call whose id is in the choice, if it can be trained here."""
        name = choice.get("call_id")
        if not (isinstance(name, str) and _CALL.fullmatch(name)):
            return None
        try:
            (call,) = self._store.get([name])
        except NotFound:
            return None
        return call if call.base_model == self._base_model and self._usable(call) else None

    def _match(self, sampled: SampledTokens, messages: list[dict[str, Any]]) -> RecordedCall | None:
        """The recorded call with these ids and log-probabilities, if it is unambiguous."""
        calls = self._with_ids(tuple(sampled.ids))
        calls = [call for call in calls if self._usable(call) and _same(call.call, sampled)]
        model = str(self._start.record.key)
        calls = [call for call in calls if call.model == model] or calls
        surprising = -sum(sampled.logprobs) > _CERTAIN
        if not (surprising and _equivalent(calls)):
            meanings = _meanings(messages)
            calls = [
                call
                for call in calls
                if meanings is not None
                and call.messages is not None
                and _meanings(call.messages) == meanings
            ]
        return calls[0] if calls and _equivalent(calls) else None

    def _usable(self, call: RecordedCall) -> bool:
        # Template arguments and date may differ: they do not change what the ids mean.
        fixed = FIXED.isdisjoint(differing(call.fingerprint, self._fingerprint))
        return fixed and not call.abandoned

    # ---- ids against the message ---------------------------------------------------------

    def _check_text(
        self,
        choice: Mapping[str, Any],
        message: dict[str, Any],
        ids: list[int],
        prompt: list[int],
        history: History,
        where: FieldPath,
    ) -> None:
        """Refuse token ids whose text differs from the message."""
        finish = "length" if choice.get("finish_reason") == "length" else "stop"
        reply = self._template.parse(ids, prompt_ids=prompt, tools=history.tools, finish=finish)
        (sent,) = check_messages([message])
        (parsed,) = check_messages([reply.message])
        ended = ids[-1] in self._template.stop_ids
        text = self._template.text(ids[:-1] if ended else ids)
        content = _trimmed(sent.content)
        calls = [(call.name, call.values) for call in sent.tool_calls]
        if calls == [(call.name, call.values) for call in parsed.tool_calls]:
            if content in (_trimmed(parsed.content), _trimmed(text)):
                return
            # A stop string ended it: the ids spell that string, and the text was cut before it.
            if not ended and finish == "stop" and text.lstrip().startswith(content):
                return
        if not calls and content == _trimmed(text):
            return
        raise InvalidField(
            where,
            f"its token ids say {brief(text)} and its message says {brief(sent.content)}"
            f"{f' with {len(calls)} tool calls' if calls else ''}; send the choice as the client "
            "returned it, or refer to the rollout by its id",
        )


@dataclass(slots=True)
class _Transcript:
    """A conversation as far as it has been read."""

    history: History
    conversation: Conversation
    messages: list[dict[str, Any]] = field(default_factory=list)
    pending: list[RenderedCall] = field(default_factory=list)
    """Answers not yet added to the conversation, which only rendering needs."""

    def answer(self, call: Call, message: dict[str, Any]) -> None:
        self.pending.append(
            RenderedCall(
                prompt_ids=call.prompt_ids,
                completion_ids=call.completion_ids,
                messages=list(self.messages),
                reply=message,
                tools=self.history.tools,
            )
        )

    def prompt(self) -> list[int]:
        """The prompt of the next answer, continuing the ids of those before it where possible."""
        while self.pending:
            self.conversation.add(self.pending[0])
            del self.pending[0]
        return self.conversation.prompt(self.messages, self.history.tools).ids


def _split(item: Any, where: FieldPath) -> tuple[dict[str, Any], Mapping[str, Any] | None]:
    """The message, and the choice if the item is one."""
    if hasattr(item, "model_dump"):  # a choice as the OpenAI client returned it
        item = item.model_dump()
    if not isinstance(item, Mapping):
        raise InvalidField(where, f"expected a message or a choice, got {brief(item)}")
    if "message" not in item and "role" in item:
        return _message(item, where), None
    if not isinstance(item.get("message"), Mapping):
        raise InvalidField(
            where, f"expected a role or a message in it, got the keys {brief([*item])}"
        )
    message = _message(item["message"], (*where, "message"))
    if message.get("role", "assistant") != "assistant":
        raise InvalidField(
            (*where, "message", "role"),
            f"a choice has the role 'assistant', not {message['role']!r}",
        )
    return {"role": "assistant"} | message, item


def _message(message: Mapping[str, Any], where: FieldPath) -> dict[str, Any]:
    """Without nulls, which clients send for what is absent."""
    if not all(isinstance(key, str) for key in message):
        raise InvalidField(where, f"expected text for keys, got {brief([*message])}")
    return {"content": ""} | {key: value for key, value in message.items() if value is not None}


def _unchanged(
    call: RecordedCall | None, choice: Mapping[str, Any], message: dict[str, Any]
) -> SampledTokens | None:
    """The tokens of the call that a choice without log-probabilities names, if it says the same."""
    if call is None or call.call.logprobs is None:
        return None
    if choice.get("token_ids") not in (None, call.call.completion_ids):
        return None
    meaning = _meanings([message])
    if meaning is None or meaning != _meanings([call.reply]):
        return None
    return SampledTokens(call.call.completion_ids, call.call.logprobs)


def _same(call: Call, sampled: SampledTokens) -> bool:
    """Whether a call has these ids and log-probabilities."""
    return (
        call.completion_ids == sampled.ids
        and call.logprobs is not None
        and all(abs(a - b) <= _SAME for a, b in zip(call.logprobs, sampled.logprobs, strict=True))
    )


def _equivalent(calls: Sequence[RecordedCall]) -> bool:
    """Whether it makes no difference which of them is trained."""
    kinds = {
        (tuple(c.call.prompt_ids), c.call.temperature, c.call.exact, tuple(c.call.forced))
        for c in calls
    }
    return len(kinds) == 1


def _meanings(messages: Sequence[Mapping[str, Any]]) -> list[str] | None:
    try:
        return [message.meaning for message in check_messages(messages)]
    except TemplateError:
        return None


def _trimmed(text: str) -> str:
    # Some servers show an incomplete character at the end, others omit it.
    return text.strip().rstrip("\ufffd").rstrip()
