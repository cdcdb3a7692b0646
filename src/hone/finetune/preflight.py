"""Everything that would make a run fail or learn nothing, found before its first epoch.

In:   the document, the live parts of a run, and its server
Out:  Checks, each with what to change if it failed
Used: run.py, before epoch 1

The last checks run one example twice, in rollouts that are in no journal and are trained on by
nobody: nothing else shows whether the agent's calls reach the model, name their rollout, come back
with tokens, and differ. Where an earlier check failed, those that build on it are left out.
"""

import asyncio
import math
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from hone.capture.scope import host_of, rollout
from hone.errors import HoneError
from hone.finetune import episodes
from hone.finetune.adapter import NO_CONNECTION, ARTTrainerAdapter
from hone.finetune.base import TrainerAdapter, TrajectoryBuilder
from hone.finetune.builder import NO_LOGPROBS, ARTTrajectoryBuilder
from hone.finetune.checks import Check, Plan, check_document, check_movement, plan
from hone.types import RecordedCall

if TYPE_CHECKING:
    from hone.config.build import Builder
    from hone.config.schema import Document
    from hone.evaluation.run import Evaluation, ItemResult
    from hone.workflow.llm import LLM

__all__ = ["Check", "Plan", "check_document", "failures", "plan", "preflight"]

PROBE_S = 120.0
"""For one token; the model is loaded by then."""
COINCIDENCE = 0.05
"""Two rollouts that say the same are suspect if the model would do so less often than this."""

NOTHING = {
    "no_calls": "the server recorded no call of the rollout. See that the agent asks the model at "
    "{url} (its `llms` entry, or base_url), that it does not answer from a cache, that a thread it "
    "starts gets the context (contextvars.copy_context().run; thread pools have it), and that its "
    "HTTP client is httpx or httpx2; any other client must use the base URL "
    "{root}/rollout/ROLLOUT_ID/v1",
    "other_model": "its calls were answered by another model than {model}. Let the agent ask for "
    "{base!r} or {model!r}",
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
        checks.append(Check("dataset", False, "the dataset has no examples; see eval.general"))
    if failures(checks):
        return checks
    adapter = trainer_adapter if isinstance(trainer_adapter, ARTTrainerAdapter) else None
    checks.append(await _healthy(trainer_adapter))
    if failures(checks):
        return checks
    if adapter is not None:
        checks.append(_base_model(adapter))
        checks += await _llms(document, builder, adapter, run_id)
    if isinstance(trajectory_builder, ARTTrajectoryBuilder) and not failures(checks):
        checks += await _Twice(document, trajectory_builder, adapter, evaluation, run_id).checks()
    falling = adapter is not None and adapter.adapter_config.training.schedule == "linear"
    checks.append(check_movement(plan(document, len(evaluation.items)), falling=falling))
    return checks


def failures(checks: Sequence[Check]) -> list[Check]:
    """Those that forbid to go on."""
    return [check for check in checks if not check.ok]


# ---- the server ---------------------------------------------------------------------------------


async def _healthy(adapter: TrainerAdapter) -> Check:
    name = "server"
    if not isinstance(adapter, ARTTrainerAdapter):
        if await adapter.is_healthy():
            return Check(name, True, "the training backend says that it is healthy")
        return Check(name, False, f"{NO_CONNECTION}. is_healthy() of the adapter says no.")
    try:
        health = await adapter.backend.health()
        served = adapter.served
        await adapter.backend.served_models(served.base_url if served else None)
    except HoneError as error:
        return Check(name, False, adapter.no_connection(str(error)))
    version = health.get("version", "unknown")
    return Check(name, True, f"hone {version} answers at {adapter.backend.base_url}")


def _base_model(adapter: ARTTrainerAdapter) -> Check:
    wanted, info = adapter.adapter_config.backend.base_model, adapter.info
    name = "base model"
    if info is None:
        return Check(name, False, "the adapter was not initialized; await initialize() first")
    if info.base_model != wanted:
        return Check(
            name,
            False,
            f"backend.base_model is {wanted!r}, but the server trains {adapter.model_name} over "
            f"{info.base_model!r}. Set base_model to that, or give the run another backend.name.",
        )
    return Check(name, True, f"{adapter.model_name} over {wanted!r}, at step {info.step}")


# ---- the `llms` entries -------------------------------------------------------------------------


async def _llms(
    document: "Document", builder: "Builder", adapter: ARTTrainerAdapter, run_id: str
) -> list[Check]:
    """One token from each entry that is served by the training server."""
    llms = [await builder.get_llm(name) for name in document.llms]
    ours = [llm for llm in llms if _address(llm.base_url) in _addresses(adapter)]
    allowed = document.finetuning.allow_foreign_endpoint
    if ours or not llms:
        return [await _reaches(llm, adapter, run_id) for llm in ours]
    assert adapter.served is not None, "the adapter is initialized"
    there = ", ".join(f"llms.{llm.name} at {llm.base_url}" for llm in llms)
    message = (
        f"the model in training answers at {adapter.served.base_url}, and no entry of `llms` asks "
        f"there ({there})."
    )
    if not allowed:
        return [
            Check(
                "llm",
                False,
                f"{message} Set base_url to it, or use _type: trainable without base_url. To train "
                "on what another endpoint says, set finetuning.allow_foreign_endpoint: true.",
            )
        ]
    more = "Its text is encoded again and trained off-policy (allow_foreign_endpoint)."
    return [Check("llm", True, f"{message} {more}", warning=True)]


def _addresses(adapter: ARTTrainerAdapter) -> set[tuple[str, int | None]]:
    assert adapter.served is not None and adapter.info is not None, "the adapter is initialized"
    own = (adapter.backend.base_url, adapter.served.base_url, adapter.info.inference_base_url)
    return {_address(url) for url in own}


def _address(url: str) -> tuple[str, int | None]:
    parts = urlsplit(url)
    return host_of(parts.hostname or ""), parts.port or (443 if parts.scheme == "https" else 80)


async def _reaches(llm: "LLM", adapter: ARTTrainerAdapter, run_id: str) -> Check:
    """Whether one token of it comes back with all that training needs, from the right model."""
    import openai  # here: it takes a second

    name, where = f"llm {llm.name}", f"llms.{llm.name} ({llm.model!r} at {llm.base_url})"
    id = f"{run_id}:preflight.{secrets.token_hex(6)}"
    limit = {} if "max_completion_tokens" in llm.params else {"max_tokens": 1}
    asked = {"model": llm.model, **llm.params, "n": 1, "logprobs": True, "stream": False, **limit}
    try:
        async with rollout(id), asyncio.timeout(PROBE_S):
            client = llm.client.with_options(max_retries=0)
            hello: list[Any] = [{"role": "user", "content": "Hello"}]
            answer = await client.chat.completions.create(messages=hello, **asked)
        recorded = await adapter.recorded(id)
    except (openai.OpenAIError, HoneError, TimeoutError) as error:
        said = str(error) or type(error).__name__
        return Check(
            name,
            False,
            f"{where} did not answer: {said}\nThe model in training is asked for as "
            f"{adapter.adapter_config.backend.base_model!r} or {adapter.model_name!r}.",
        )
    choice = answer.choices[0]
    if not (choice.logprobs and choice.logprobs.content and _extra(choice, "token_ids")):
        return Check(name, False, f"{where} returned no logprobs or no token ids. {NO_LOGPROBS}")
    if not recorded:
        return Check(
            name,
            False,
            f"{where} answered, but the training server recorded no call under the rollout it was "
            f"sent with. Is it the server at {adapter.backend.base_url}, without a proxy that drops "
            "headers?",
        )
    if recorded[0].model != adapter.model_name:
        return Check(
            name,
            True,
            f"{where} is answered by {recorded[0].model}, which is not trained; only calls to "
            f"{adapter.model_name} are",
        )
    step = recorded[0].call.step
    return Check(name, True, f"{where} reaches {adapter.model_name} at step {step}, with token ids")


def _extra(choice: Any, key: str) -> Any:
    """A field that OpenAI's own API does not have."""
    return (choice.model_extra or {}).get(key)


# ---- one example, twice -------------------------------------------------------------------------


class _Twice:
    """Two rollouts of the first example, and what they tell."""

    def __init__(
        self,
        document: "Document",
        builder: ARTTrajectoryBuilder,
        adapter: ARTTrainerAdapter | None,
        evaluation: "Evaluation",
        run_id: str,
    ) -> None:
        self._document, self._builder, self._adapter = document, builder, adapter
        self._evaluation, self._item = evaluation, evaluation.items[0]
        draw = secrets.token_hex(6)
        self._ids = [f"{run_id}:preflight.{draw}.{i}" for i in (0, 1)]
        reward = document.finetuning.reward_function
        assert reward is not None, "check_document came first"
        self._reward = reward.name

    async def checks(self) -> list[Check]:
        """In the order in which one depends on the other; stops at the first that fails."""
        runs = await asyncio.gather(
            *(
                self._evaluation.run_item(self._item, rollout=id, evaluators=[self._reward])
                for id in self._ids
            )
        )
        found = [self._ran(runs)]
        if not failures(found):
            recorded = await self._recorded()
            both = [self._found(run, calls) for run, calls in zip(runs, recorded, strict=True)]
            found.append(self._calls(both))
            if not failures(found):
                trained = [
                    [call for call in calls if call.id in {one.id for one in some.sampled}]
                    for calls, some in zip(recorded, both, strict=True)
                ]
                found.append(self._differ(trained))
        found += [self._scored(runs), self._cost(runs)]
        return found

    def _ran(self, runs: "Sequence[ItemResult]") -> Check:
        name = "workflow"
        for run in runs:
            failure = None if run.rollout is None else run.rollout.failure
            if failure is not None and failure.kind == "infrastructure":
                said = failure.failure
                return Check(
                    name,
                    False,
                    f"the workflow failed on example {self._item.id!r} ({failure.reason}): "
                    f"{said.type}: {said.message}{_tail(said.traceback)}",
                )
        failed = [run.rollout.failure for run in runs if run.rollout and run.rollout.failure]
        if len(failed) == len(runs):
            said = failed[0].failure
            return Check(
                name,
                True,
                f"both rollouts of example {self._item.id!r} failed, as it seems by the model's own "
                f"doing ({failed[0].reason}): {said.type}: {said.message}{_tail(said.traceback)}",
                warning=True,
            )
        return Check(name, True, f"the workflow ran twice on example {self._item.id!r}")

    async def _recorded(self) -> list[list[RecordedCall]]:
        ask = self._builder.recorded
        return [[] if ask is None else await ask(id) for id in self._ids]

    def _found(self, run: "ItemResult", recorded: list[RecordedCall]) -> episodes.Found:
        seen = () if run.rollout is None else run.rollout.calls
        if self._builder.recorded is None:
            return episodes.of_seen(seen, self._builder.targets)
        return episodes.of_recorded(recorded, seen, self._builder.targets)

    def _calls(self, both: Sequence[episodes.Found]) -> Check:
        name = "calls"
        for found in both:
            lost = found.dropped["unrecorded"]
            if lost:
                return Check(
                    name,
                    False,
                    f"{lost} calls of a rollout were answered by a hone server, but not recorded "
                    "under the rollout: they name no rollout, or another one. Let the agent leave "
                    "the header X-Hone-Rollout alone.",
                )
            if found.reason is not None:
                return Check(name, False, self._nothing(found.reason))
        counts = [len(found.sampled) for found in both]
        others = sum((found.dropped for found in both), start=type(both[0].dropped)())
        context = ", ".join(f"{n} {why}" for why, n in others.items())
        more = f"; not trained: {context}" if context else ""
        message = f"{counts[0]} and {counts[1]} calls of the two rollouts can be trained{more}"
        return Check(name, True, message)

    def _nothing(self, reason: str) -> str:
        adapter, config = self._adapter, self._document.finetuning
        known = {
            "url": adapter.served.base_url if adapter and adapter.served else "the server",
            "root": adapter.backend.base_url if adapter else "http://SERVER",
            "model": adapter.model_name if adapter else "the model in training",
            "base": adapter.adapter_config.backend.base_model if adapter else "",
            "target": config.target_model,
            "functions": config.target_functions,
        }
        why = NOTHING.get(reason, f"its calls cannot be trained ({reason})").format(**known)
        return (
            f"nothing of a rollout of example {self._item.id!r} could be trained: {why}. As it is, "
            "the run would end with 'No trajectories collected for epoch'."
        )

    def _differ(self, trained: Sequence[Sequence[RecordedCall]]) -> Check:
        name = "sampling"
        if self._builder.recorded is None:
            return Check(name, True, "not compared: the endpoint tells no token ids")
        ids = [[call.call.completion_ids for call in calls] for calls in trained]
        if ids[0] != ids[1]:
            return Check(name, True, "two rollouts of one example differ")
        surprise = sum(sum(call.call.logprobs or ()) for call in trained[0])
        chance = math.exp(min(0.0, surprise))
        message = f"two rollouts of example {self._item.id!r} are the same, token for token"
        if chance >= COINCIDENCE:
            message += f"; the model does so in {chance:.0%} of cases, so this may be chance"
            return Check(name, True, message, warning=True)
        return Check(
            name,
            False,
            f"{message}, which is chance in {chance:.1e} of cases: groups of equal rollouts teach "
            "nothing. Raise `temperature` in the `llms` entry, remove top_k: 1, a small top_p or a "
            "cache.",
        )

    def _scored(self, runs: "Sequence[ItemResult]") -> Check:
        name, where = "score", f"evaluator {self._reward!r} on example {self._item.id!r}"
        scores = [run.scores[self._reward] for run in runs if self._reward in run.scores]
        failed = [score.failure for score in scores if score.failure is not None]
        if scores and len(failed) == len(scores):
            said = failed[0]
            return Check(
                name,
                False,
                f"{where} gives no score: {said.type}: {said.message}{_tail(said.traceback)}",
            )
        values = ", ".join(f"{s.value:g}" for s in scores if s.value is not None) or "none yet"
        return Check(name, True, f"{where}: {values}", warning=bool(failed) or not scores)

    def _cost(self, runs: "Sequence[ItemResult]") -> Check:
        ran = [run.rollout for run in runs if run.rollout is not None]
        calls = sum(len(one.calls) for one in ran)
        tokens = sum((c.usage or {}).get("completion_tokens", 0) for one in ran for c in one.calls)
        seconds = max((one.seconds for one in ran), default=0.0)
        return Check(
            "cost",
            True,
            f"the two rollouts took {calls} calls, {tokens} sampled tokens and {seconds:.1f} s; "
            "they are trained on by nobody",
        )


def _tail(traceback: str, lines: int = 4) -> str:
    tail = "\n".join(traceback.rstrip().splitlines()[-lines:])
    return f"\n{tail}" if tail else ""
