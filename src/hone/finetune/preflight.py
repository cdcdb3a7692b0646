"""Checks before the first epoch: what would make a run fail or learn nothing.

In:   the document, the live parts of a run, and its server
Out:  Checks, each with what to change if it failed

The last checks run one example twice: do the agent's calls reach the model, name their rollout,
come back with tokens, and differ; does the evaluator score them. The two rollouts are in no journal
and are not used for training. Where an earlier check failed, those that build on it are left out.
"""

import asyncio
import math
import secrets
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from hone.capture.scope import rollout
from hone.config.policy import address_of
from hone.errors import HoneError
from hone.finetune.adapter import NO_CONNECTION
from hone.finetune.base import ModelServer, TrainerAdapter, TrajectoryBuilder
from hone.finetune.builder import NO_LOGPROBS, ARTTrajectoryBuilder
from hone.finetune.calls import UNSEEN, TrainedCalls
from hone.finetune.checks import Check, check_document, check_movement, failures, plan
from hone.types import RecordedCall

if TYPE_CHECKING:
    from hone.config.build import Builder, Served
    from hone.config.schema import Document
    from hone.evaluation.run import Evaluation, ItemResult
    from hone.types import Failure
    from hone.workflow.llm import LLM

NO_EXAMPLES = (
    "the dataset has no examples, so there is nothing to run on. Check file_path and filter of "
    "eval.general.dataset, or name another file with --dataset"
)
PROBE_S = 120.0
"""For one token; the model is loaded by then."""
COINCIDENCE = 1e-3
"""Upper bound on the chance of rejecting a good run: two equal rollouts are refused if the model
samples such a pair less often than this. Answers of one or two tokens only give a warning."""

NOTHING = {
    "no_calls": "the server recorded no call of the rollout. See that the agent asks the model at "
    "{url} (its `llms` entry, or base_url) and does not answer from a cache. " + UNSEEN,
    "other_model": "its calls were answered by another model than {model}. Let the agent ask for "
    "{base!r} or {model!r}",
    "frozen": "its calls asked for a fixed step, as NAME@0, the base weights, and are not trained. Let the agent use "
    "the `llms` entry that is trained, or ask for {model!r}",
    "not_target_model": "none of its calls asked for finetuning.target_model {target!r}",
    "not_target_function": "no call came from finetuning.target_functions {functions}",
    "greedy": "its calls were sampled at temperature 0, so all rollouts of an example are the same "
    "and there is nothing to compare. Raise `temperature` in the `llms` entry",
    "abandoned": "the agent left before its answers were complete",
    "no_logprobs": NO_LOGPROBS,
}
"""Why nothing of a rollout could be trained, and what to do."""


async def preflight(
    *,
    document: "Document",
    builder: "Builder",
    trajectory_builder: TrajectoryBuilder,
    trainer_adapter: TrainerAdapter,
    evaluation: "Evaluation",
    run_id: str,
) -> list[Check]:
    """All checks; the run must be open at its server."""
    checks = check_document(document)
    if not evaluation.items:
        checks.append(Check("dataset", False, NO_EXAMPLES))
    if failures(checks):
        return checks
    checks.append(await _healthy(trainer_adapter))
    if failures(checks):
        return checks
    server, served = trainer_adapter.server, trainer_adapter.served
    if server is not None:
        checks.append(_base_model(server))
        if served is not None and server.info is not None:
            checks += await _llms(document, builder, server, served, run_id)
    if isinstance(trajectory_builder, ARTTrajectoryBuilder) and not failures(checks):
        rehearsal = _Rehearsal(document, trajectory_builder, trainer_adapter, evaluation, run_id)
        checks += await rehearsal.checks()
    checks.append(check_movement(plan(document, len(evaluation.items))))
    return checks


# ---- the server ---------------------------------------------------------------------------------


async def _healthy(adapter: TrainerAdapter) -> Check:
    name = "server"
    if adapter.server is not None:
        try:
            return Check(name, True, await adapter.server.check())
        except HoneError as error:
            return Check(name, False, str(error))
    if await adapter.is_healthy():
        return Check(name, True, "the training backend says that it is healthy")
    return Check(
        name,
        False,
        f"{NO_CONNECTION}. is_healthy() of {type(adapter).__name__} says no. See that its "
        f"backend runs and that its keys under `trainer_adapters` are right.",
    )


def _base_model(server: ModelServer) -> Check:
    name, info = "base model", server.info
    if info is None:
        return Check(name, False, "the adapter was not initialized; await initialize() first")
    if info.base_model != server.base_model:
        return Check(
            name,
            False,
            f"backend.base_model is {server.base_model!r}, but the server trains "
            f"{server.model_name} over {info.base_model!r}. Set base_model to that, or give the run "
            "another backend.name.",
        )
    return Check(name, True, f"{server.model_name} over {server.base_model!r}, at step {info.step}")


# ---- the `llms` entries -------------------------------------------------------------------------


async def _llms(
    document: "Document", builder: "Builder", server: ModelServer, served: "Served", run_id: str
) -> list[Check]:
    """One token from each entry that is served by the training server."""
    llms = [await builder.get_llm(name) for name in document.llms]
    assert served.trained is not None, "the adapter is initialized"
    ours = [llm for llm in llms if address_of(llm.base_url) in served.trained.addresses]
    if ours or not llms:
        return [await _reaches(llm, server, run_id) for llm in ours]
    there = ", ".join(f"llms.{llm.name} at {llm.base_url}" for llm in llms)
    message = (
        f"the model in training answers at {served.base_url}, and no entry of `llms` asks "
        f"there ({there})."
    )
    if not document.finetuning.allow_foreign_endpoint:
        return [
            Check(
                "llm",
                False,
                f"{message} Set base_url to it, or use _type: trainable without base_url. To train "
                "on what another endpoint says, set finetuning.allow_foreign_endpoint: true.",
            )
        ]
    more = (
        "What it says is trained off-policy, from its text and logprobs (allow_foreign_endpoint); "
        "it does not change by that, so rewards and validation measure the other endpoint, not "
        f"{server.model_name}."
    )
    return [Check("llm", True, f"{message} {more}", warning=True)]


async def _reaches(llm: "LLM", server: ModelServer, run_id: str) -> Check:
    """Whether one token of it comes back with all that training needs, from the right model."""
    import openai  # here: it takes a second

    name, where = f"llm {llm.name}", f"llms.{llm.name} ({llm.model!r} at {llm.base_url})"
    id = f"{run_id}:preflight.{secrets.token_hex(6)}"
    limit = {} if "max_completion_tokens" in llm.params else {"max_tokens": 1}
    request = {"model": llm.model, **llm.params, "n": 1, "logprobs": True, "stream": False, **limit}
    try:
        async with rollout(id), asyncio.timeout(PROBE_S):
            client = llm.client.with_options(max_retries=0)
            hello: list[Any] = [{"role": "user", "content": "Hello"}]
            answer = await client.chat.completions.create(messages=hello, **request)
        recorded = await server.recorded(id)
    except (openai.OpenAIError, HoneError, TimeoutError) as error:
        why = str(error) or type(error).__name__
        return Check(
            name,
            False,
            f"{where} did not answer: {why}\nThe model in training is asked for as "
            f"{server.base_model!r} or {server.model_name!r}.",
        )
    choice = answer.choices[0]
    if not (choice.logprobs and choice.logprobs.content and _extra(choice, "token_ids")):
        return Check(name, False, f"{where} returned no logprobs or no token ids. {NO_LOGPROBS}")
    if not recorded:
        return Check(
            name,
            False,
            f"{where} answered, but the training server recorded no call under the rollout it was "
            f"sent with. Is it the server at {server.base_url}, without a proxy that drops "
            "headers?",
        )
    if recorded[0].model != server.model_name:
        return Check(
            name,
            True,
            f"{where} is answered by {recorded[0].model}, which is not trained; only calls to "
            f"{server.model_name} are",
        )
    if recorded[0].is_frozen:
        return Check(name, True, f"{where} is answered by the base weights, and is not trained")
    step = recorded[0].call.step
    return Check(name, True, f"{where} reaches {server.model_name} at step {step}, with token ids")


def _extra(choice: Any, key: str) -> Any:
    """A field that OpenAI's own API does not have."""
    return (choice.model_extra or {}).get(key)


# ---- one example, run twice ---------------------------------------------------------------------


class _Rehearsal:
    """Two rollouts of the first example, and what they show."""

    def __init__(
        self,
        document: "Document",
        builder: ARTTrajectoryBuilder,
        adapter: TrainerAdapter,
        evaluation: "Evaluation",
        run_id: str,
    ) -> None:
        self._document, self._builder, self._adapter = document, builder, adapter
        self._item = evaluation.items[0]
        draw = secrets.token_hex(6)
        self._run_id = run_id
        self._ids = [f"{run_id}:preflight.{draw}.{i}" for i in (0, 1)]
        reward = document.finetuning.reward_function
        assert reward is not None, "check_document came first"
        self._reward = reward.name

    async def checks(self) -> list[Check]:
        """In the order in which one depends on the other; stops at the first that fails."""
        unscoped = self._builder.unscoped
        before = Counter[str]() if unscoped is None else await unscoped.count(self._run_id)
        results = await asyncio.gather(
            *(self._builder.run_item(self._item, id, self._reward) for id in self._ids)
        )
        checks = [self._ran(results)]
        if not failures(checks):
            both = [
                await self._builder.select_calls(id, run.rollout.calls if run.rollout else ())
                for id, run in zip(self._ids, results, strict=True)
            ]
            checks.append(self._calls([trained for trained, _ in both]))
            if unscoped is not None:
                counts = await unscoped.count(self._run_id) - before
                if counts:
                    # Calls by the base model's name may be somebody else's: only a warning.
                    ok, message = not unscoped.of_trained(counts), unscoped.message(counts)
                    checks.append(Check("unmarked calls", ok, message, warning=ok))
            if not failures(checks):
                checks.append(self._differ([_sampled(trained, calls) for trained, calls in both]))
                checks += self._valued(results)
        return [*checks, self._scored(results), self._cost(results)]

    def _ran(self, results: "Sequence[ItemResult]") -> Check:
        name, example = "workflow", repr(self._item.id)
        failed = [run.rollout.failure for run in results if run.rollout and run.rollout.failure]
        for one in failed:
            if one.kind == "infrastructure":
                message = f"the workflow failed on example {example} ({one.reason}): "
                return Check(name, False, message + _described(one.failure))
        if len(failed) == len(results):
            message = (
                f"both rollouts of example {example} failed, as it seems by the model's own doing "
                f"({failed[0].reason}): {_described(failed[0].failure)}"
            )
            return Check(name, True, message, warning=True)
        return Check(name, True, f"the workflow ran twice on example {example}")

    def _calls(self, both: Sequence[TrainedCalls]) -> Check:
        name = "calls"
        for trained in both:
            lost = trained.dropped["unrecorded"]
            if lost:
                return Check(
                    name,
                    False,
                    f"{lost} calls of a rollout were answered by a hone server, but not recorded "
                    "under the rollout: they name no rollout, or another one. Let the agent leave "
                    "the header X-Hone-Rollout alone.",
                )
            if trained.reason is not None:
                return Check(name, False, self._nothing(trained.reason))
        counts = [len(trained.sampled) for trained in both]
        others = sum((trained.dropped for trained in both), start=Counter[str]())
        context = ", ".join(f"{n} {why}" for why, n in others.items())
        more = f"; not trained: {context}" if context else ""
        message = f"{counts[0]} and {counts[1]} calls of the two rollouts can be trained{more}"
        return Check(name, True, message)

    def _nothing(self, reason: str) -> str:
        server, served = self._adapter.server, self._adapter.served
        config = self._document.finetuning
        known = {
            "url": served.base_url if served else "the server",
            "root": server.base_url if server else "http://SERVER",
            "model": server.model_name if server else "the model in training",
            "base": server.base_model if server else "",
            "target": config.target_model,
            "functions": config.target_functions,
        }
        why = NOTHING.get(reason, f"its calls cannot be trained ({reason})").format(**known)
        return (
            f"nothing of a rollout of example {self._item.id!r} could be trained: {why}. As it is, "
            "the run would end with 'No trajectories collected for epoch'."
        )

    def _differ(self, both: Sequence["_SampledTokens"]) -> Check:
        name = "sampling"
        if both[0].tokens != both[1].tokens:
            return Check(name, True, "two rollouts of one example differ")
        chance = math.exp(min(0.0, both[0].logprob))
        message = f"two rollouts of example {self._item.id!r} are the same, token for token"
        if self._builder.comparison.baseline == "batch":
            message += "; training.baseline: batch still compares them with those of other examples"
            return Check(name, True, message, warning=True)
        if chance >= COINCIDENCE:
            message += (
                f"; the model does so with a probability of {chance:.2g}, so this may be chance"
            )
            return Check(name, True, message, warning=True)
        return Check(
            name,
            False,
            f"{message}, which is chance in {chance:.1e} of cases: groups of equal rollouts teach "
            "nothing. Raise `temperature` in the `llms` entry, remove top_k: 1, a small top_p or a "
            "cache.",
        )

    def _valued(self, results: "Sequence[ItemResult]") -> list[Check]:
        """Whether the calls have the values that they are compared by."""
        credit = self._builder.comparison.credit
        steps = [step for run in results if run.rollout for step in run.rollout.steps]
        if credit == "outcome":
            return []
        name, count = "credit", sum(step.value is not None for step in steps)
        if count:
            return [Check(name, True, f"calls are compared by {count} values of hone.step")]
        return [
            Check(
                name,
                False,
                f"training.credit is {credit!r}, which compares calls by the values of "
                f"hone.step(name, value=...), and two rollouts of example {self._item.id!r} noted "
                "none. Note them in the agent, or set training.credit: outcome.",
            )
        ]

    def _scored(self, results: "Sequence[ItemResult]") -> Check:
        name, where = "score", f"evaluator {self._reward!r} on example {self._item.id!r}"
        scores = [run.scores[self._reward] for run in results if self._reward in run.scores]
        failed = [score.failure for score in scores if score.failure is not None]
        if scores and len(failed) == len(scores):
            return Check(name, False, f"{where} gives no score: {_described(failed[0])}")
        values = ", ".join(f"{s.value:g}" for s in scores if s.value is not None) or "none yet"
        return Check(name, True, f"{where}: {values}", warning=bool(failed) or not scores)

    def _cost(self, results: "Sequence[ItemResult]") -> Check:
        ran = [run.rollout for run in results if run.rollout is not None]
        calls = sum(len(one.calls) for one in ran)
        tokens = sum((c.usage or {}).get("completion_tokens", 0) for one in ran for c in one.calls)
        seconds = max((one.seconds for one in ran), default=0.0)
        return Check(
            "cost",
            True,
            f"the two rollouts took {calls} calls, {tokens} sampled tokens and {seconds:.1f} s; "
            "they are not used for training",
        )


class _SampledTokens(NamedTuple):
    """What of one rollout can be trained."""

    tokens: list[Any]
    """Of each call: ids, or the text of each token where the endpoint returns no ids."""
    logprob: float
    """The log-probability of all of it."""


def _sampled(trained: TrainedCalls, recorded: Sequence[RecordedCall]) -> _SampledTokens:
    if trained.foreign:
        content = [one.logprobs["content"] for one in trained.sampled]
        tokens = [[entry.get("token") for entry in entries] for entries in content]
        logprob = sum(e.get("logprob") or 0.0 for entries in content for e in entries)
        return _SampledTokens(tokens, logprob)
    ids = {one.id for one in trained.sampled}
    calls = [one.call for one in recorded if one.id in ids]
    logprob = sum(sum(call.logprobs or ()) for call in calls)
    return _SampledTokens([call.completion_ids for call in calls], logprob)


def _described(failure: "Failure", lines: int = 4) -> str:
    """What was raised, with the end of its traceback."""
    tail = "\n".join(failure.traceback.rstrip().splitlines()[-lines:])
    return f"{failure.type}: {failure.message}" + (f"\n{tail}" if tail else "")
