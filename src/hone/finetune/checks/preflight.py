"""Checks before the first epoch: mistakes that would make a run fail or learn nothing.

In:   the document, the components of a run, and its server
Out:  Checks; a failed one says what to change

The last checks run one example twice: whether the agent's calls reach the model, name their
rollout, return tokens and differ, and whether the evaluator scores them. A rollout or a score that
fails for reasons other than the model is repeated first, as in the run itself. The rollouts are not
in the journal and are not used for training. Checks that depend on a failed one are left out.
"""

import asyncio
import math
import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from hone.capture.scope import rollout
from hone.config.build import Builder, Served
from hone.config.policy import address_of
from hone.config.schema import Document
from hone.errors import HoneError
from hone.evaluation.run import Evaluation, ItemResult
from hone.finetune.adapter import NO_CONNECTION
from hone.finetune.base import ModelServer, TrainerAdapter, TrajectoryBuilder, TrialRollouts
from hone.finetune.calls import (
    NO_LOGPROBS,
    UNSEEN,
    TrainedCalls,
    count_unscoped,
    unscoped_message,
)
from hone.finetune.checks.plan import Plan, plan, rollout_time
from hone.finetune.rollouts import evaluators_marked
from hone.report.text import counted
from hone.tasks.tally import run_together
from hone.trajectory import is_flat
from hone.types import Failure
from hone.workflow.failure import RolloutFailure
from hone.workflow.llm import LLM
from hone.workflow.outside import MODEL_NAME

PROBE_S = 120.0
"""Timeout for one token; the model is loaded by then."""
COINCIDENCE = 1e-3
"""Upper bound on the chance of rejecting a good run: two equal rollouts are refused if the model
samples such a pair less often than this. Answers of one or two tokens only give a warning."""

NOTHING = {
    "no_calls": "the server recorded no call of the rollout. Check that the agent calls the model at "
    "{url} (its `llms` entry, or base_url) and does not answer from a cache. " + UNSEEN,
    "other_model": "its calls were answered by a model other than {model}. Let the agent request "
    "{base!r} or {model!r}",
    "frozen": "its calls requested a fixed step, such as NAME@0, the base weights, and are not trained. "
    "Let the agent use the `llms` entry that is trained, or request {model!r}",
    "not_target_model": "none of its calls requested finetuning.target_model {target!r}",
    "not_target_function": "no call came from finetuning.target_functions {functions}",
    "greedy": "its calls were sampled at temperature 0, so all rollouts of an example are the same "
    "and there is nothing to compare. Raise `temperature` in the `llms` entry",
    "abandoned": "the agent left before its answers were complete",
    "no_logprobs": NO_LOGPROBS,
}
"""Why nothing of a rollout could be trained, and what to do."""


ALL_DROPPED = (
    ", and finetuning.on_policy_failure: drop leaves such rollouts out, so nothing would be trained. Fix "
    "the {part} if the failure is its own, or set finetuning.on_policy_failure: lowest, which trains them "
    "with the lowest reward, or {{reward: x}}"
)
"""Added to the message if both rollouts of preflight failed because of the model, under `drop`."""


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check."""

    name: str
    ok: bool
    message: str
    """The result; for a failed check also what to change."""
    warning: bool = False
    """The check passed, but its message is a warning."""


def failures(checks: Sequence[Check]) -> list[Check]:
    return [check for check in checks if not check.ok]


async def preflight(
    *,
    document: Document,
    builder: Builder,
    trajectory_builder: TrajectoryBuilder,
    trainer_adapter: TrainerAdapter,
    evaluation: Evaluation,
    run_id: str,
    validation_examples: int = 0,
    validation_interval: int = 5,
) -> list[Check]:
    """Run all checks; the run must be open on the server."""
    checks = [await _healthy(trainer_adapter)]
    if failures(checks):
        return checks
    server, served = trainer_adapter.server, trainer_adapter.served
    if server is not None and server.info is not None:
        checks.append(_base_model(server))
        if served is not None:
            checks += await _llms(document, builder, server, served, run_id)
    trial = trajectory_builder.trial
    planned = plan(
        document,
        len(evaluation.items),
        validation_examples=validation_examples,
        interval=validation_interval,
    )
    if trial is not None and not failures(checks):
        trials = _Trials(document, trainer_adapter, evaluation, run_id)
        checks += await trials.checks(trial, planned)
    return [*checks, Check("movement", True, str(planned), warning=planned.is_too_small)]


# ---- the server ---------------------------------------------------------------------------------


async def _healthy(adapter: TrainerAdapter) -> Check:
    if await adapter.is_healthy():
        return Check("server", True, "the training backend says that it is healthy")
    return Check(
        "server",
        False,
        f"{NO_CONNECTION}. is_healthy() of {type(adapter).__name__} returned False. Check that "
        f"its backend is running and that its keys under `trainer_adapters` are right.",
    )


def _base_model(server: ModelServer) -> Check:
    assert server.info is not None
    served, name = server.info.base_model, server.model_name
    if served == server.base_model:
        return Check("base model", True, f"{name} over {served!r}, at step {server.info.step}")
    return Check(
        "base model",
        False,
        f"backend.base_model is {server.base_model!r}, but the server trains {name} over "
        f"{served!r}. Set base_model to that, or give the run another backend.name.",
    )


# ---- the `llms` entries -------------------------------------------------------------------------


async def _llms(
    document: Document, builder: Builder, server: ModelServer, served: Served, run_id: str
) -> list[Check]:
    """One token from each entry that is served by the training server."""
    reachable = [name for name, config in document.llms.items() if config.has_openai_api]
    llms = [await builder.get_llm(name) for name in reachable]
    assert served.trained is not None, "the adapter is initialized"
    ours = [llm for llm in llms if address_of(llm.base_url) in served.trained.addresses]
    if ours or not llms:
        checks = [await _reaches(llm, server, run_id) for llm in ours]
        policies = [llm.name for llm in ours if llm.model in served.trained.names]
        if len(policies) > 1:
            message = (
                f"{', '.join(f'llms.{name}' for name in policies)} request the model in training, "
                "so calls of all of them are trained. To train one only, let the others request "
                f"{server.base_model!r} or {served.trained.name}@0, the base weights."
            )
            checks.append(Check("llm", True, message, warning=True))
        return checks
    there = ", ".join(f"llms.{llm.name} at {llm.base_url}" for llm in llms)
    message = (
        f"the model in training answers at {served.base_url}, and no entry of `llms` asks "
        f"there ({there})."
    )
    if document.finetuning.allow_foreign_endpoint:
        more = (
            "Its answers are trained off-policy, from their text and logprobs "
            "(allow_foreign_endpoint). Training does not change that endpoint, so rewards and "
            f"validation measure the endpoint, not {server.model_name}."
        )
        return [Check("llm", True, f"{message} {more}", warning=True)]
    more = (
        "Set base_url to it, or use _type: trainable without base_url. To train on what another "
        "endpoint says, set finetuning.allow_foreign_endpoint: true."
    )
    return [Check("llm", False, f"{message} {more}")]


async def _reaches(llm: LLM, server: ModelServer, run_id: str) -> Check:
    """Request one token, and check that the response has everything that training needs."""
    import openai  # imported here: it takes a second

    name, where = f"llm {llm.name}", f"llms.{llm.name} ({llm.model!r} at {llm.base_url})"
    id = f"{run_id}:preflight.{secrets.token_hex(6)}"
    limit = {} if "max_completion_tokens" in llm.params else {"max_tokens": 1}
    request = {"model": llm.model, **llm.params, "n": 1, "logprobs": True, "stream": False, **limit}
    try:
        async with rollout(id), asyncio.timeout(PROBE_S):
            client = llm.client.with_options(max_retries=0)
            hello: list[Any] = [{"role": "user", "content": "Hello"}]
            answer = await client.chat.completions.create(messages=hello, **request)
        recorded = await server.summaries(id)
    except (openai.OpenAIError, HoneError, TimeoutError) as error:
        why = str(error) or type(error).__name__
        return Check(
            name,
            False,
            f"{where} did not answer: {why}\nRequest the model in training as "
            f"{server.base_model!r} or {server.model_name!r}.",
        )
    choice = answer.choices[0]
    if not (choice.logprobs and choice.logprobs.content and getattr(choice, "token_ids", None)):
        return Check(name, False, f"{where} returned no logprobs or no token ids. {NO_LOGPROBS}")
    if not recorded:
        return Check(
            name,
            False,
            f"{where} answered, but the training server recorded no call under the rollout it was "
            f"sent with. Is it the server at {server.base_url}, without a proxy that drops "
            "headers?",
        )
    [call, *_] = recorded
    if call.model == server.model_name and not call.is_frozen:
        step = call.step
        return Check(name, True, f"{where} reaches {call.model} at step {step}, with token ids")
    who = "the base weights" if call.model == server.model_name else call.model
    return Check(name, True, f"{where} is answered by {who}, and is not trained")


# ---- one example, run twice ---------------------------------------------------------------------


class _Trials:
    """The checks that run one example twice."""

    def __init__(
        self, document: Document, adapter: TrainerAdapter, evaluation: Evaluation, run_id: str
    ) -> None:
        self._config, self._adapter = document.finetuning, adapter
        self._evaluation, self._run_id = evaluation, run_id
        self._example = f"example {evaluation.items[0].id!r}"
        self._repeated: list[RolloutFailure] = []
        """Failures of attempts that were repeated."""

    async def checks(self, trial: TrialRollouts, planned: Plan) -> list[Check]:
        """The checks in the order of their dependencies; stops at the first that fails."""
        server = self._adapter.server
        before = await count_unscoped(server, self._run_id)
        with evaluators_marked(self._evaluation):
            results = await run_together([self._run() for _ in range(2)])
        checks = [self._ran(results)]
        if not failures(checks):
            both = [
                await trial.select_calls(run.rollout.id, run.rollout.calls)
                for run in results
                if run.rollout is not None
            ]
            checks.append(self._calls(both))
            counts = await count_unscoped(server, self._run_id) - before
            if server is not None and counts:
                # Calls to the base model's name may be another user's: only a warning.
                ok, message = not counts[server.model_name], unscoped_message(server, counts)
                checks.append(Check("unmarked calls", ok, message, warning=ok))
            if not failures(checks):
                checks += [self._differ(both), *self._truncated(both), *self._valued(results)]
        checks += [self._scored(results), *self._equal(results)]
        cost, time = self._cost(results, planned)
        return [*checks, cost, *([] if failures(checks) else [time])]

    async def _run(self) -> ItemResult:
        """Run and score the example; what fails for reasons other than the model is repeated."""
        evaluation = self._evaluation
        result, retries = await self._attempt(), max(1, self._config.rollout_retries)
        for _ in range(retries):
            failure = result.rollout and result.rollout.failure
            if failure is None or failure.kind == "policy" or failure.reason == MODEL_NAME:
                break
            self._repeated.append(failure)
            result = await self._attempt()
        for _ in range(retries):  # of the evaluator alone: the workflow has run
            scores = result.scores.values()
            if all(score.failure is None or score.blames_policy for score in scores):
                break
            scored = await evaluation.score_item(result.item)
            result = ItemResult(result.item, result.rollout, scored.scores)
        return result

    async def _attempt(self) -> ItemResult:
        id = f"{self._run_id}:preflight.{secrets.token_hex(6)}"
        return await self._evaluation.run_item(self._evaluation.items[0], rollout=id)

    def _ran(self, results: Sequence[ItemResult]) -> Check:
        failed = [run.rollout.failure for run in results if run.rollout and run.rollout.failure]
        for one in failed:
            if one.kind == "infrastructure":
                times = 1 + max(1, self._config.rollout_retries)
                message = f"{times} times in a row the workflow failed on {self._example}"
                if one.reason == MODEL_NAME:
                    message = f"the workflow failed on {self._example}"
                message = f"{message} ({one.reason}): {_described(one.failure)}"
                return Check("workflow", False, message)
        repeated = ""
        if self._repeated:
            first, n = self._repeated[0], len(self._repeated)
            attempts = (
                "1 failed attempt was repeated"
                if n == 1
                else f"{n} failed attempts were repeated, the first"
            )
            repeated = f", after {attempts} ({first.reason}): {_described(first.failure)}"
        if not failed:
            message = f"the workflow ran twice on {self._example}{repeated}"
            return Check("workflow", True, message, warning=bool(repeated))
        both = len(failed) == len(results)
        message = (
            f"{'both' if both else 'one of two'} rollouts of {self._example} failed because of the "
            f"model ({failed[0].reason})"
        )
        dropped = both and self._config.on_policy_failure == "drop"
        message += ALL_DROPPED.format(part="agent") if dropped else ""
        message = f"{message}: {_described(failed[0].failure)}{repeated}"
        return Check("workflow", not dropped, message, warning=not dropped)

    def _calls(self, both: Sequence[TrainedCalls]) -> Check:
        for trained in both:
            if lost := trained.dropped["unrecorded"]:
                return Check(
                    "calls",
                    False,
                    f"{lost} calls of a rollout were answered by a hone server, but not recorded "
                    "under the rollout: they name no rollout, or another one. Let the agent leave "
                    "the header X-Hone-Rollout alone.",
                )
            if trained.reason is not None:
                return Check("calls", False, self._nothing(trained.reason))
        counts = [len(trained.sampled) for trained in both]
        others = sum((trained.dropped for trained in both), start=Counter[str]())
        context = ", ".join(f"{n} {why}" for why, n in others.items())
        more = f"; not trained: {context}" if context else ""
        message = f"{counts[0]} and {counts[1]} calls of the two rollouts can be trained{more}"
        return Check("calls", True, message)

    def _nothing(self, reason: str) -> str:
        server, served = self._adapter.server, self._adapter.served
        why = NOTHING.get(reason, f"its calls cannot be trained ({reason})").format(
            url=served.base_url if served else "the server",
            root=server.base_url if server else "http://SERVER",
            model=server.model_name if server else "the model in training",
            base=server.base_model if server else "",
            target=self._config.target_model,
            functions=self._config.target_functions,
        )
        return (
            f"nothing of a rollout of {self._example} could be trained: {why}. As it is, the run "
            "would end with 'No trajectories collected for epoch'."
        )

    def _differ(self, both: Sequence[TrainedCalls]) -> Check:
        first, second = ([call.tokens for call in trained.sampled] for trained in both)
        if first != second:
            return Check("sampling", True, "two rollouts of one example differ")
        chance = math.exp(min(0.0, sum(call.logprob for call in both[0].sampled)))
        message = f"two rollouts of {self._example} are the same, token for token"
        if self._adapter.comparison.baseline == "batch":
            message += "; training.baseline: batch still compares them with those of other examples"
            return Check("sampling", True, message, warning=True)
        if chance >= COINCIDENCE:
            message += (
                f"; the model does so with a probability of {chance:.2g}, so this may be chance"
            )
            return Check("sampling", True, message, warning=True)
        return Check(
            "sampling",
            False,
            f"{message}, which is chance in {chance:.1e} of cases: groups of equal rollouts teach "
            "nothing. Raise `temperature` in the `llms` entry, remove top_k: 1, a small top_p or a "
            "cache.",
        )

    def _truncated(self, both: Sequence[TrainedCalls]) -> list[Check]:
        """A warning about answers that ended at their token limit."""
        answers = [call for trained in both for call in trained.sampled]
        cut = sum(call.finish == "length" for call in answers)
        if not cut:
            return []
        message = (
            f"{cut} of the {len(answers)} answers that can be trained were cut at the token limit. "
            "They are scored and trained as they are; unless answers should be that short, raise "
            "`max_tokens` in the `llms` entry or in the agent's request."
        )
        return [Check("max_tokens", True, message, warning=True)]

    def _valued(self, results: Sequence[ItemResult]) -> list[Check]:
        """Whether the calls have the values that `credit` compares."""
        credit = self._adapter.comparison.credit
        steps = [step for run in results if run.rollout for step in run.rollout.steps]
        if credit == "outcome" or any(step.value is not None for step in steps):
            return []
        return [
            Check(
                "credit",
                False,
                f"training.credit is {credit!r}, which compares calls by the values of "
                f"hone.step(name, value=...), and two rollouts of {self._example} "
                "recorded none. Record them in the agent, or set training.credit: outcome.",
            )
        ]

    def _scored(self, results: Sequence[ItemResult]) -> Check:
        reward = self._config.reward_name
        where = f"evaluator {reward!r} on {self._example}"
        scores = [run.scores[reward] for run in results if reward in run.scores]
        failed = [score.failure for score in scores if score.failure is not None]
        if scores and all(score.blames_policy for score in scores):
            dropped = self._config.on_policy_failure == "drop"
            message = f"{where} says that the model failed ({scores[0].reason})"
            message += ALL_DROPPED.format(part="evaluator") if dropped else ""
            message = f"{message}: {_described(failed[0])}"
            return Check("score", not dropped, message, warning=not dropped)
        if scores and len(failed) == len(scores):
            return Check("score", False, f"{where} gives no score: {_described(failed[0])}")
        values = ", ".join(f"{s.value:g}" for s in scores if s.value is not None)
        if failed:
            values += f"; on the other rollout it gives no score: {_described(failed[0])}"
        values = values or "no score, because both rollouts failed"
        return Check("score", True, f"{where}: {values}", warning=bool(failed) or not scores)

    def _equal(self, results: Sequence[ItemResult]) -> list[Check]:
        """A warning about two equal rewards, if only rollouts of one example are compared."""
        reward, comparison = self._config.reward_name or "", self._adapter.comparison
        scores = [run.scores[reward].value for run in results if reward in run.scores]
        values = [value for value in scores if value is not None]
        compares = self._evaluation.compares([reward])  # such a reward was not compared here
        if len(values) < 2 or not is_flat(values) or compares:
            return []
        if comparison.baseline == "batch" or comparison.credit != "outcome":
            return []
        message = (
            f"both rollouts of {self._example} have the reward {values[0]:g}. With two rollouts that "
            "may be chance; groups of equal rewards teach nothing. If most groups of the first epoch "
            "are equal, raise num_generations or `temperature`, or let the reward tell better "
            "answers from worse ones."
        )
        return [Check("rewards", True, message, warning=True)]

    def _cost(self, results: Sequence[ItemResult], planned: Plan) -> tuple[Check, Check]:
        """What the two rollouts took, and the estimated time of all."""
        ran = [run.rollout for run in results if run.rollout is not None]
        calls = [call for one in ran for call in one.calls]
        tokens = sum((call.usage or {}).get("completion_tokens", 0) for call in calls)
        seconds = [one.seconds for one in ran] or [0.0]
        message = (
            f"the two rollouts took {len(calls)} calls, {tokens} sampled tokens and "
            f"{max(seconds):.1f} s; they are not used for training"
        )
        at_a_time = self._evaluation.max_concurrency
        span = rollout_time(planned, seconds=fmean(seconds), concurrency=at_a_time)
        held_out = counted(planned.validation_rollouts, "validation rollout")
        more = f" and at most {held_out}" if planned.validation_rollouts else ""
        time = (
            f"about {span} for {counted(planned.rollouts, 'training rollout')}{more}, {at_a_time} at "
            f"a time; a rough estimate from two rollouts of one example, {span.meaning}; training "
            "comes on top"
        )
        return Check("cost", True, message), Check("time", True, time)


def _described(failure: Failure) -> str:
    """The exception, with the end of its traceback."""
    tail = failure.traceback.rstrip().splitlines()[-4:]
    return "\n".join([f"{failure.type}: {failure.message}", *tail])
