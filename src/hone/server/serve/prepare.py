"""Build the prompt and sampling parameters of a request; refuse what cannot be answered.

In:   a request of any dialect, or a CompletionRequest, and its RequestContext
Out:  the Generation, ready to run

Refused here, before a token is sampled: prompts and answers that do not fit, tools that the
template cannot render, constraints that do not compile. Only a request that passes gets an index in
its rollout, so refused requests do not change the seeds of later ones.
"""

import asyncio
import sys
from contextlib import nullcontext
from dataclasses import replace

from hone.chat.bridge import HashedMessages, NextPrompt
from hone.chat.constraint import answer_constraint, plain_constraint
from hone.chat.reply import StreamParser
from hone.chat.template import ChatTemplate
from hone.chat.tool_choice import ToolChoice
from hone.errors import BadRequest, GrammarError
from hone.inference.base import Constraint, Sampling
from hone.server.serve.chat_tasks import render, too_long
from hone.server.serve.conversations import Match, PlaceInRollout, request_seed
from hone.server.serve.generation import Generation, RequestContext
from hone.server.serve.tokenizer import BaseTokenizer
from hone.types import RecordedCall
from hone.wire.openai.chat import ChatRequest, CompletionRequest, effective_temperature
from hone.wire.openai.dialect import Request


async def prepare_chat(
    context: RequestContext, dialect_request: Request, messages: HashedMessages
) -> Generation:
    request, limit = dialect_request.chat, context.max_length
    tokenizer, choice, prompt, parent = await _chat_prompt(context, request, messages, limit)
    template = tokenizer.template
    max_tokens = _max_tokens(context, len(prompt.ids), request)
    output, constraint = request.output_format, None
    if output is not None or choice.constrained:
        constraint = await asyncio.to_thread(
            answer_constraint, template, choice, output, prompt.ids
        )
    stop = choice.stop if constraint is None else ()
    param = "tools" if output is None else output.param
    sampling, place = await _sampling(
        context, request, prompt.ids, max_tokens, template, constraint, param, stop
    )
    ignored = [*dialect_request.unused_keys]
    ignored += request.unused_in_template(template.renderer.ignored)
    ignored += ["tools.strict"] if choice.ignores_strict else []
    return Generation(
        context=context,
        prompt=prompt,
        parent=parent,
        place=place,
        sampling=sampling,
        make_parser=lambda call: template.parser(
            prompt_ids=prompt.ids,
            tools=choice.tools,
            stop=request.stop,
            stop_ids=request.stop_token_ids,
            seed=call,
        ),
        fingerprint=tokenizer.fingerprint,
        messages=request.messages,
        hashed_messages=messages,
        tools=choice.tools,
        not_applicable=ignored,
        request_fields=dialect_request.request_fields(ignored),
    )


async def prepare_completion(context: RequestContext, request: CompletionRequest) -> Generation:
    base = context.policy.base
    prompt = await _completion_prompt(context, request.text_or_ids)
    max_tokens = _max_tokens(context, len(prompt.ids), request)
    output = request.output_format
    constraint = None if output is None else await asyncio.to_thread(plain_constraint, output)
    param = "" if output is None else output.param
    sampling, place = await _sampling(
        context, request, prompt.ids, max_tokens, base.template, constraint, param
    )
    return Generation(
        context=context,
        prompt=prompt,
        place=place,
        sampling=sampling,
        make_parser=lambda call: StreamParser(
            base.template.decoder(),
            stop_ids=(*base.template.stop_ids, *request.stop_token_ids),
            stop=request.stop,
            seed=call,
        ),
        fingerprint=base.fingerprint,
        not_applicable=[*request.unused_keys],
    )


# ---- prompts -----------------------------------------------------------------------------------


async def count_prompt_tokens(
    context: RequestContext, request: ChatRequest, messages: HashedMessages
) -> int:
    """The number of prompt tokens this request would have now, even if they do not fit."""
    _, _, prompt, _ = await _chat_prompt(context, request, messages, limit=sys.maxsize)
    return len(prompt.ids)


async def _chat_prompt(
    context: RequestContext, request: ChatRequest, messages: HashedMessages, limit: int
) -> tuple[BaseTokenizer, ToolChoice, NextPrompt, RecordedCall | None]:
    """Also returns the call that the prompt is stored as a continuation of."""
    calls = context.state.calls
    kwargs = {**context.spec("chat_template_kwargs", {}), **request.template_kwargs}

    def match() -> tuple[BaseTokenizer, ToolChoice, Match, NextPrompt | None]:
        day = None if context.run is None else calls.opened_on(context.run)
        tokenizer = context.policy.base.with_kwargs(kwargs, day)
        choice = ToolChoice.of(
            tokenizer.template,
            request.tools,
            request.tool_choice,
            parallel=request.parallel_tool_calls,
        )
        tools = tokenizer.template.check_tools(choice.tools)
        matched = context.history.match(calls, context.policy.base, messages, tools)
        large = context.size == "large"
        prompt = None if large else render(tokenizer, matched[0], limit, context.prompt_key)
        return tokenizer, choice, matched, prompt

    template = context.policy.base.template
    # Other template arguments, or another date, may load another variant of the template.
    dated = context.run is not None and template.renderer.prints_date
    if template.foreign or kwargs or dated:
        matched = await context.policy.base.in_template_thread(match)
    elif context.size == "small" and context.history.is_loaded(calls):
        matched = match()
    else:
        matched = await asyncio.to_thread(match)
    tokenizer, choice, (unrendered, parents), prompt = matched
    if prompt is None:
        foreign = tokenizer.template.foreign
        async with context.policy.base.rendering.process if foreign else nullcontext():
            prompt = await context.state.workers.run(
                render, tokenizer, unrendered, limit, context.prompt_key
            )
    return tokenizer, choice, prompt, parents[prompt.source]


async def _completion_prompt(context: RequestContext, prompt: str | list[int]) -> NextPrompt:
    base = context.policy.base
    if not context.history.is_loaded(context.state.calls):
        await asyncio.to_thread(context.history.load, context.state.calls)
    if isinstance(prompt, str):
        run = context.state.workers.run if context.size == "large" else asyncio.to_thread
        return await run(render, base, prompt, context.max_length, context.prompt_key)
    base.check_ids(prompt, "prompt")  # the engine would fail after the call has begun
    return NextPrompt(ids=prompt, outcome="first", reasons=())


# ---- sampling ----------------------------------------------------------------------------------


def _max_tokens(
    context: RequestContext, prompt: int, request: ChatRequest | CompletionRequest
) -> int:
    """How many tokens may be sampled; BadRequest if prompt and answer do not fit."""
    limit, settings, requested = context.max_length, context.state.settings, request.limit
    if request.fitted and requested is not None:
        requested = min(requested, max(limit - prompt, 1))
    answer = requested or 1
    if prompt + answer > limit:
        raise too_long(context.policy.base, context.prompt_key, prompt, answer, limit)
    return requested or min(limit - prompt, settings.max_tokens or limit)


async def _sampling(
    context: RequestContext,
    request: ChatRequest | CompletionRequest,
    prompt_ids: list[int],
    max_tokens: int,
    template: ChatTemplate,
    constraint: Constraint | None,
    param: str,
    stop: tuple[str, ...] = (),
) -> tuple[Sampling, PlaceInRollout]:
    """The settings of a request, which the engine accepts, and its place in the rollout.

    `param` is the key that set the constraint. Inside a rollout the server's own seed is used, or
    none if the engine's answers do not repeat with equal seeds: vLLM samples requests with a seed
    one by one, which costs a tenth of its speed.
    """
    engine, rollout = context.policy.base.engine, context.scope.rollout
    temperature = request.sampling_temperature
    if context.scope.temperature is not None:
        temperature = effective_temperature(context.scope.temperature)
    penalty = request.repetition_penalty
    context.policy.base.check_ids(request.stop_token_ids, "stop_token_ids")
    if request.min_tokens and (stop or constraint is not None):
        raise BadRequest(
            "min_tokens: not together with a tool choice that ends or constrains the answer; leave "
            "one out",
            param="min_tokens",
            code="unsupported_parameter",
        )
    if (request.min_tokens or 0) > max_tokens:
        raise BadRequest(
            f"min_tokens: {request.min_tokens} is more than the {max_tokens} tokens that the answer "
            "may have; lower it",
            param="min_tokens",
        )
    sampling = Sampling(
        n=request.n or 1,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=request.sampling_top_p,
        top_k=max(request.top_k or 0, 0),
        min_p=request.min_p or 0.0,
        seed=request.seed,
        stop=(*request.stop, *stop),
        stop_ids=tuple(dict.fromkeys((*template.stop_ids, *request.stop_token_ids))),
        min_tokens=request.min_tokens or 0,
        top_logprobs=request.alternatives,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=1.0 if penalty is None else penalty,
        logit_bias=tuple(sorted(request.logit_bias.items())),
        constraint=constraint,
    )
    try:
        await engine.check(sampling)
    except GrammarError as error:
        raise BadRequest(f"{param}: {error}", param=param) from None
    place = context.history.next_place(prompt_ids, retried=context.retried)
    if rollout:
        seed = request_seed(context.run, rollout, place.draw) if engine.repeatable else None
        sampling = replace(sampling, seed=seed)
    return sampling, place


def wants_logprobs(context: RequestContext, request: ChatRequest | CompletionRequest) -> bool:
    """Whether to return log-probabilities, even if the request does not ask for them.

    ART's scripts train on choices but never request log-probabilities. Inside a rollout they are
    returned only on request, because the rollout is trained by its id.
    """
    if isinstance(request, CompletionRequest):
        return request.logprobs is not None
    if request.logprobs or context.spec("token_ids_as_text", False):
        return True
    registered = context.policy.record is not None
    return registered and request.logprobs is None and not context.scope.rollout
