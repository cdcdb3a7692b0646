"""OpenAI messages and choices with log-probabilities to Calls: the form ART's clients send.

In:   a History; what this server recorded; the model's chat template
Out:  one Taken per choice whose log-probabilities are known, in the order they were said

A choice that this server sampled is found again by the call's id, if the client kept it (then it
needs no log-probabilities of its own), or by its token ids, and the call is what was recorded:
prompt, temperature, step. Any other is rendered from text, which is a guess about what its sampler
was fed; it is counted as such, and refused where its ids do not say what its message
says or where the number of ids and of log-probabilities differ.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from hone.chat.bridge import Conversation, RenderedCall
from hone.chat.choice_tokens import Path, Refused, Sampled, TokenReader
from hone.chat.messages import check_messages
from hone.chat.template import ChatTemplate
from hone.errors import NotFound, TemplateError
from hone.server.language import FIXED, differing
from hone.trajectory import History
from hone.types import Call, RecordedCall
from hone.wire.errors import brief

_SAME = 1e-4
"""Log-probabilities this close are the same number, written with fewer digits."""
_CERTAIN = 1e-3
"""A completion less surprising than this has the same log-probabilities after many prompts."""
_CALL = re.compile(r"call-[0-9a-f]{20}")


class Recorded(Protocol):
    """What is asked of calls.CallStore here."""

    def match(self, base_model: str, completion_ids: Sequence[int]) -> list[RecordedCall]: ...
    def get(self, call_ids: Iterable[str]) -> list[RecordedCall]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """A choice as a call, and how it became one."""

    call: Call
    how: Literal["matched", "rerendered"]
    recorded: str | None
    """Id of the recorded call it is."""
    where: Path
    """The choice in the request."""
    other_args: bool = False
    """Its chat template had other arguments, or printed another date, than the model's own."""


class Choices:
    """The choices of one job. Keeps what it looked up, since short answers come up often."""

    def __init__(
        self,
        template: ChatTemplate,
        recorded: Recorded,
        *,
        model: str,
        base_model: str,
        fingerprint: str,
        vocab: int,
        step: int,
    ) -> None:
        """`step`: the newest, which is taken for the step of a choice nobody recorded."""
        self._template = template
        self._store = recorded
        self._model = model
        self._base_model = base_model
        self._fingerprint = fingerprint
        self._step = step
        self._tokens = TokenReader(template, base_model=base_model, vocab=vocab)
        self._found: dict[tuple[int, ...], list[RecordedCall]] = {}
        self.without_logprobs = 0
        """Choices that could only be context."""

    def read(self, history: History, path: Path) -> list[Taken]:
        """The trained choices of a conversation. Raises Refused."""
        talk = _Talk(history, Conversation(self._template))
        taken: list[Taken] = []
        for i, item in enumerate(history.messages_and_choices):
            where = (*path, "messages_and_choices", i)
            message, choice = _split(item, where)
            if choice is not None:
                sampled = self._tokens.read(choice, where) or self._recorded_sample(choice, message)
                if sampled is None:
                    self.without_logprobs += 1
                else:
                    one = self._take(choice, message, sampled, talk, where)
                    taken.append(one)
                    talk.answer(one.call, message)
            talk.said.append(message)
        return taken

    def _take(
        self,
        choice: Mapping[str, Any],
        message: dict[str, Any],
        sampled: Sampled,
        talk: "_Talk",
        where: Path,
    ) -> Taken:
        found = self._named(choice, sampled) or self._match(sampled, talk.said)
        if found is not None:
            call = found.call.model_copy(update={"trained": True})
            return Taken(
                call=call,
                how="matched",
                recorded=found.id,
                where=where,
                other_args=bool(differing(found.fingerprint, self._fingerprint)),
            )
        try:
            prompt = talk.prompt()
            self._same_text(choice, message, sampled.ids, prompt, talk.history, where)
        except TemplateError as error:
            raise Refused(
                where, f"no call of this server is like it, and it cannot be rendered: {error}"
            ) from None
        call = Call(
            prompt_ids=prompt,
            completion_ids=sampled.ids,
            logprobs=sampled.logprobs,
            step=self._step,
        )
        return Taken(call=call, how="rerendered", recorded=None, where=where)

    # ---- which call it was --------------------------------------------------------------------

    def _named(self, choice: Mapping[str, Any], sampled: Sampled) -> RecordedCall | None:
        """The call whose id this server put into the choice, if it still says the same."""
        call = self._by_id(choice)
        if call is None or call.call.completion_ids != sampled.ids:
            return None
        return call if _same(call.call, sampled) else None

    def _recorded_sample(
        self, choice: Mapping[str, Any], message: dict[str, Any]
    ) -> Sampled | None:
        """Of a choice without log-probabilities: those of the call it names, if it says the same."""
        call = self._by_id(choice)
        if call is None or call.call.logprobs is None:
            return None
        if choice.get("token_ids") not in (None, call.call.completion_ids):
            return None
        meant = _meanings([message])
        if meant is None or meant != _meanings([call.reply]):
            return None
        return Sampled(call.call.completion_ids, call.call.logprobs)

    def _by_id(self, choice: Mapping[str, Any]) -> RecordedCall | None:
        """The call whose id this server put into the choice, if it can be trained here."""
        name = choice.get("call_id")
        if not (isinstance(name, str) and _CALL.fullmatch(name)):
            return None
        try:
            (call,) = self._store.get([name])
        except NotFound:
            return None
        return call if call.base_model == self._base_model and self._usable(call) else None

    def _match(self, sampled: Sampled, said: list[dict[str, Any]]) -> RecordedCall | None:
        """The recorded call with these ids and log-probabilities, if there is no doubt which."""
        found = [call for call in self._recorded(sampled.ids) if _same(call.call, sampled)]
        found = [call for call in found if call.model == self._model] or found
        surprising = -sum(sampled.logprobs) > _CERTAIN
        if not (surprising and _equivalent(found)):
            meant = _meanings(said)
            found = [
                call
                for call in found
                if meant is not None
                and call.messages is not None
                and _meanings(call.messages) == meant
            ]
        return found[0] if found and _equivalent(found) else None

    def _recorded(self, ids: list[int]) -> list[RecordedCall]:
        key = tuple(ids)
        if key not in self._found:
            self._found[key] = [
                call for call in self._store.match(self._base_model, ids) if self._usable(call)
            ]
        return self._found[key]

    def _usable(self, call: RecordedCall) -> bool:
        # Arguments of its template and its date are the call's own: its ids are what they are.
        fixed = FIXED.isdisjoint(differing(call.fingerprint, self._fingerprint))
        return fixed and not call.abandoned

    # ---- whether ids and message agree --------------------------------------------------------

    def _same_text(
        self,
        choice: Mapping[str, Any],
        message: dict[str, Any],
        ids: list[int],
        prompt: list[int],
        history: History,
        where: Path,
    ) -> None:
        """Refuse ids that do not say what the message says."""
        finish = "length" if choice.get("finish_reason") == "length" else "stop"
        reply = self._template.parse(ids, prompt_ids=prompt, tools=history.tools, finish=finish)
        (sent,) = check_messages([message])
        (parsed,) = check_messages([reply.message])
        ended = ids[-1] in self._template.stop_ids
        text = self._text(ids[:-1] if ended else ids)
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
        raise Refused(
            where,
            f"its token ids say {brief(text)} and its message says {brief(sent.content)}"
            f"{f' with {len(calls)} tool calls' if calls else ''}; send the choice as the client "
            "returned it, or refer to the rollout by its id",
        )

    def _text(self, ids: list[int]) -> str:
        return self._template.tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )


@dataclass(slots=True)
class _Talk:
    """A conversation as far as it has been read."""

    history: History
    conversation: Conversation
    said: list[dict[str, Any]] = field(default_factory=list)
    unread: list[RenderedCall] = field(default_factory=list)
    """Answers the conversation was not told of yet; where all are found, it never is."""

    def answer(self, call: Call, message: dict[str, Any]) -> None:
        self.unread.append(
            RenderedCall(
                prompt_ids=call.prompt_ids,
                completion_ids=call.completion_ids,
                messages=list(self.said),
                reply=message,
                tools=self.history.tools,
            )
        )

    def prompt(self) -> list[int]:
        """What its next answer is sampled from, if it continues the ids of those before it."""
        while self.unread:
            self.conversation.add(self.unread[0])
            del self.unread[0]
        return self.conversation.prompt(self.said, self.history.tools).ids


def _split(item: Any, where: Path) -> tuple[dict[str, Any], Mapping[str, Any] | None]:
    """The message, and the choice if the item is one."""
    if hasattr(item, "model_dump"):  # a choice as the OpenAI client returned it
        item = item.model_dump()
    if not isinstance(item, Mapping):
        raise Refused(where, f"expected a message or a choice, got {brief(item)}")
    if "message" not in item and "role" in item:
        return _message(item, where), None
    if not isinstance(item.get("message"), Mapping):
        raise Refused(where, f"expected a role or a message in it, got the keys {brief([*item])}")
    message = _message(item["message"], (*where, "message"))
    if message.get("role", "assistant") != "assistant":
        raise Refused((*where, "message", "role"), f"a choice is not by {message['role']!r}")
    return {"role": "assistant"} | message, item


def _message(message: Mapping[str, Any], where: Path) -> dict[str, Any]:
    """Without nulls, which clients send for what is absent."""
    if not all(isinstance(key, str) for key in message):
        raise Refused(where, f"expected text for keys, got {brief([*message])}")
    return {"content": ""} | {key: value for key, value in message.items() if value is not None}


def _same(call: Call, sampled: Sampled) -> bool:
    return call.logprobs is not None and all(
        abs(a - b) <= _SAME for a, b in zip(call.logprobs, sampled.logprobs, strict=True)
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
    # A character cut in half at the end is shown by some servers and left out by others.
    return text.strip().rstrip("\ufffd").rstrip()
