"""Everything that would make a run fail or learn nothing, found before its first epoch.

In:   the document, the live parts of a run, and its server
Out:  Checks, each with what to change if it failed

The last checks run one example twice (twice.py). Where an earlier check failed, those that build on
it are left out.
"""

import asyncio
import secrets
from typing import TYPE_CHECKING, Any

from hone.capture.scope import rollout
from hone.config.policy import address_of
from hone.errors import HoneError
from hone.finetune.adapter import NO_CONNECTION, ARTTrainerAdapter
from hone.finetune.base import TrainerAdapter, TrajectoryBuilder
from hone.finetune.builder import NO_LOGPROBS, ARTTrajectoryBuilder
from hone.finetune.checks import Check, check_document, check_movement, failures, plan
from hone.finetune.twice import Twice

if TYPE_CHECKING:
    from hone.config.build import Builder
    from hone.config.schema import Document
    from hone.evaluation.run import Evaluation
    from hone.workflow.llm import LLM

NO_EXAMPLES = (
    "the dataset has no examples, so there is nothing to run on. Check file_path and filter of "
    "eval.general.dataset, or name another file with --dataset"
)
PROBE_S = 120.0
"""For one token; the model is loaded by then."""


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
    adapter = trainer_adapter if isinstance(trainer_adapter, ARTTrainerAdapter) else None
    checks.append(await _healthy(trainer_adapter))
    if failures(checks):
        return checks
    if adapter is not None:
        checks.append(_base_model(adapter))
        if adapter.info is not None:
            checks += await _llms(document, builder, adapter, run_id)
    if isinstance(trajectory_builder, ARTTrajectoryBuilder) and not failures(checks):
        checks += await Twice(document, trajectory_builder, adapter, evaluation, run_id).checks()
    falling = adapter is not None and adapter.adapter_config.training.schedule == "linear"
    checks.append(check_movement(plan(document, len(evaluation.items)), falling=falling))
    return checks


# ---- the server ---------------------------------------------------------------------------------


async def _healthy(adapter: TrainerAdapter) -> Check:
    name = "server"
    if not isinstance(adapter, ARTTrainerAdapter):
        if await adapter.is_healthy():
            return Check(name, True, "the training backend says that it is healthy")
        return Check(
            name,
            False,
            f"{NO_CONNECTION}. is_healthy() of {type(adapter).__name__} says no. See that its "
            f"backend runs and that its keys under `trainer_adapters` are right.",
        )
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
    assert adapter.served is not None and adapter.served.trained is not None, "it is initialized"
    ours = [llm for llm in llms if address_of(llm.base_url) in adapter.served.trained.addresses]
    allowed = document.finetuning.allow_foreign_endpoint
    if ours or not llms:
        return [await _reaches(llm, adapter, run_id) for llm in ours]
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
    more = (
        "What it says is trained off-policy, from its text and logprobs (allow_foreign_endpoint); "
        "it does not change by that, so rewards and validation measure the other endpoint, not "
        f"{adapter.model_name}."
    )
    return [Check("llm", True, f"{message} {more}", warning=True)]


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
    if recorded[0].is_frozen:
        return Check(name, True, f"{where} is answered by the base weights, and is not trained")
    step = recorded[0].call.step
    return Check(name, True, f"{where} reaches {adapter.model_name} at step {step}, with token ids")


def _extra(choice: Any, key: str) -> Any:
    """A field that OpenAI's own API does not have."""
    return (choice.model_extra or {}).get(key)
