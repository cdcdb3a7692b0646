"""A request and the policy that answers it, made into an Exchange.

In:   ChatRequest or CompletionRequest; its Policy, rollout and run
Out:  the Exchange to run, and the Form of its answer

What cannot be answered is refused here, before a token is sampled: prompts and answers that do not
fit, tools the template has no word for, calls that cannot be forced. Only a request that passed
takes a place in its rollout, so that the seeds of those after it do not depend on it.
"""

import asyncio
from dataclasses import dataclass
from typing import Any

from hone.chat.bridge import Asked
from hone.chat.choice_tokens import brief, outside
from hone.chat.messages import check_messages
from hone.chat.reply import StreamParser
from hone.chat.template import ChatTemplate
from hone.chat.tool_choice import Offer, offer
from hone.errors import BadRequest
from hone.inference.base import Sampling
from hone.server import tasks
from hone.server.answers import ChatForm, Form, TextForm
from hone.server.exchange import Exchange, Where
from hone.server.openai import ChatRequest, CompletionRequest, LogprobWriter
from hone.server.serving import Policy
from hone.server.settings import Settings
from hone.server.talks import Matched, Scope, Turn, request_seed
from hone.server.tasks import TemplateRef
from hone.server.telemetry import Metrics
from hone.server.workers import WorkerPool
from hone.store.calls import CallStore
from hone.types import RunSpec

Prepared = tuple[Exchange, Form]


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """What is known of a request besides its body."""

    policy: Policy
    where: Where
    scope: Scope
    run: RunSpec | None
    settings: Settings
    calls: CallStore
    metrics: Metrics
    workers: WorkerPool

    async def chat(self, asked: ChatRequest, read: Asked | None = None) -> Prepared:
        """`read`: the messages, where a worker process has checked them because they are large."""
        template, offered, turn = await self._turn(asked, read)
        forced = offered.forced_ids(template, turn.ids)
        room = self._room(len(turn.ids), asked.limit, len(forced), "messages")
        place = self.scope.next_index()
        sent = asked.chat_template_kwargs or {}
        ignored = [key for key in template.ignored_kwargs if key in sent]
        exchange = Exchange(
            **self._common(place),
            turn=turn,
            sampling=self._sampling(asked, room, place, template, offered.stop),
            parsers=lambda call: template.parser(
                prompt_ids=turn.ids, tools=offered.tools, stop=asked.stops, seed=call
            ),
            fingerprint=self.policy.base.fingerprint_of(template),
            messages=asked.messages,
            tools=offered.tools,
            forced=forced,
            not_applicable=[f"chat_template_kwargs.{key}" for key in ignored],
        )
        return exchange, ChatForm(self._writer(asked) if self._gives_logprobs(asked) else None)

    async def complete(self, asked: CompletionRequest) -> Prepared:
        base, prompt = self.policy.base, asked.text_or_ids
        ids = await self._encoded(prompt)
        room = self._room(len(ids), asked.limit, 0, "prompt")
        place = self.scope.next_index()
        exchange = Exchange(
            **self._common(place),
            turn=Turn(ids, "first", (), None),
            sampling=self._sampling(asked, room, place, base.template, ()),
            parsers=lambda call: StreamParser(
                base.decoder(), stop_ids=base.template.stop_ids, stop=asked.stops, seed=call
            ),
            fingerprint=base.fingerprint,
            messages=None,
            tools=[],
            forced=[],
            not_applicable=[],
        )
        return exchange, TextForm(self._writer(asked) if asked.logprobs is not None else None)

    async def _turn(
        self, asked: ChatRequest, read: Asked | None
    ) -> tuple[ChatTemplate, Offer, Turn]:
        """The prompt; a large one is rendered and tokenized by a worker process."""
        if read is None:
            return await asyncio.to_thread(self._rendered, asked)
        template, offered, matched = await asyncio.to_thread(self._matched, asked, read)
        ref = TemplateRef.of(template, self.policy.base.files)
        bridged, tokens = await self.workers.run(tasks.render, ref, matched.match, self._limit)
        if tokens > self._limit:
            self._room(tokens, asked.limit, 0, "messages")
        return template, offered, matched.turn(bridged)

    def _rendered(self, asked: ChatRequest) -> tuple[ChatTemplate, Offer, Turn]:
        """Blocking."""
        read = Asked.read(check_messages(asked.messages))
        template, offered, matched = self._matched(asked, read)
        return template, offered, matched.turn(matched.match.render(template))

    def _matched(self, asked: ChatRequest, read: Asked) -> tuple[ChatTemplate, Offer, Matched]:
        """Blocking."""
        sent = asked.chat_template_kwargs or {}
        day = None if self.run is None else self.calls.opened_on(self.run)
        template = self.policy.base.spoken({**self._spec("chat_template_kwargs", {}), **sent}, day)
        offered = offer(template, asked.tools, asked.tool_choice, asked.parallel_tool_calls)
        tools = template.check_tools(offered.tools)
        return template, offered, self.scope.match(self.calls, self.policy.base, read, tools)

    async def _encoded(self, prompt: str | list[int]) -> list[int]:
        await asyncio.to_thread(self.scope.recall, self.calls)
        base = self.policy.base
        if isinstance(prompt, list):
            self._check_ids(prompt)
            return prompt
        if len(prompt) <= self.settings.large_body_bytes:
            return await asyncio.to_thread(base.template.tokenizer.encode, prompt)
        ref = TemplateRef.of(base.template, base.files)
        ids, tokens = await self.workers.run(tasks.tokenize, ref, prompt, self._limit)
        if tokens > self._limit:
            self._room(tokens, None, 0, "prompt")
        return ids

    def _check_ids(self, prompt: list[int]) -> None:
        """Refuse ids that only the engine would find wrong, once the call has begun."""
        base = self.policy.base
        vocab = base.files.config["vocab_size"]
        if wrong := outside(prompt, vocab):
            place, token = wrong
            raise BadRequest(
                f"prompt[{place}]: token id {brief(token)} is outside the vocabulary of {vocab} of "
                f"{base.name!r}; send ids of its tokenizer",
                param="prompt",
            )

    def _common(self, place: int) -> dict[str, Any]:
        return {
            "policy": self.policy,
            "scope": self.scope,
            "where": self.where,
            "place": place,
            "calls": self.calls,
            "metrics": self.metrics,
        }

    def _spec(self, field: str, default: Any) -> Any:
        """A field of the registered model; the default for a base model."""
        record = self.policy.record
        return default if record is None else getattr(record.spec, field)

    def _gives_logprobs(self, asked: ChatRequest) -> bool:
        """ART's scripts train on choices and never ask for their log-probabilities.

        Inside a rollout they are left out unless asked for: it is trained by its id.
        """
        if asked.logprobs or self._spec("token_ids_as_text", False):
            return True
        registered = self.policy.record is not None
        return registered and asked.logprobs is None and not self.where.rollout

    def _writer(self, asked: ChatRequest | CompletionRequest) -> LogprobWriter:
        as_ids = asked.return_tokens_as_token_ids or self._spec("token_ids_as_text", False)
        return LogprobWriter(self.policy.base, as_ids=bool(as_ids))

    @property
    def _limit(self) -> int:
        """Tokens of prompt and answer together, at most."""
        return min(self.policy.base.max_positions, self.settings.max_seq_length)

    def _room(self, prompt: int, asked: int | None, forced: int, param: str) -> int:
        """Tokens that may be sampled; BadRequest where prompt and answer cannot fit."""
        positions, settings, limit = self.policy.base.max_positions, self.settings, self._limit
        answer = max(asked or 1, forced + 1)
        if prompt + answer > limit:
            whose = "the model" if limit == positions else "this server (max_seq_length)"
            raise BadRequest(
                f"{param}: {prompt} tokens, and {answer} of answer, are more than the {limit} of "
                f"{whose}; shorten the prompt or lower max_tokens",
                param=param,
                code="context_length_exceeded",
            )
        if asked is not None:
            return max(answer - forced, 1)
        most = limit - prompt
        if settings.max_tokens is not None:
            most = min(most, settings.max_tokens)
        return max(most - forced, 1)

    def _temperature(self, asked: ChatRequest | CompletionRequest) -> float:
        if self.where.temperature is not None:
            return self.where.temperature
        return asked.sampling_temperature

    def _sampling(
        self,
        asked: ChatRequest | CompletionRequest,
        room: int,
        place: int,
        template: ChatTemplate,
        stop: tuple[str, ...],
    ) -> Sampling:
        seed = asked.seed
        if self.where.rollout:
            seed = request_seed(self.run, self.where.rollout, place)
        return Sampling(
            n=asked.n or 1,
            max_tokens=room,
            temperature=self._temperature(asked),
            top_p=asked.sampling_top_p,
            top_k=max(asked.top_k or 0, 0),
            min_p=asked.min_p or 0.0,
            seed=seed,
            stop=(*asked.stops, *stop),
            stop_ids=template.stop_ids,
            top_logprobs=asked.alternatives,
        )
