"""finetune/checks/preflight.py: the checks that run one example twice."""

import re
from typing import Any

from tests.fakes import ScriptedBuilder
from tests.finetune.rehearsal import Rehearsal, one, reply

from hone.evaluation.base import EvalInputItem, EvalOutputItem
from hone.finetune.checks.preflight import failures


async def test_nested_targets(rehearsal: Rehearsal):
    workflow = {"target": "agent.py:nested", "llm": None, "functions": ["search"]}
    changes: dict[str, Any] = {
        "workflow": workflow,
        "finetuning": {"target_functions": ["search"], "target_model": "actor"},
    }
    assert failures(await rehearsal.checked(**changes)) == []


async def test_calls_that_no_target_matches(rehearsal: Rehearsal):
    check = await rehearsal.failed(finetuning={"target_functions": ["search"]})
    assert check.name == "calls"
    assert "no call came from finetuning.target_functions ['search']" in check.message
    assert "No trajectories collected for epoch" in check.message


async def test_an_agent_that_uses_the_frozen_entry(rehearsal: Rehearsal):
    """Two entries on one base: the one that is not the target gets the base weights."""
    helper = {"_type": "openai", "model_name": str(rehearsal.model), "api_key": "default"}
    changes: dict[str, Any] = {
        "llms": {"helper": {**helper, "base_url": f"{rehearsal.server.base_url}/v1"}},
        "workflow": {"llm": "helper"},
        "finetuning": {"target_model": "actor"},
    }
    check = await rehearsal.failed(**changes)
    assert check.name == "calls"
    assert (
        "its calls requested a fixed step, such as NAME@0, the base weights, and are not"
        in check.message
    )


async def test_an_agent_that_talks_to_the_untrained_model(rehearsal: Rehearsal):
    frozen = {"actor": {"model_name": f"{rehearsal.model}@0"}}
    check = await rehearsal.failed(llms=frozen)
    assert check.name == "calls"
    assert (
        "its calls requested a fixed step, such as NAME@0, the base weights, and are not"
        in check.message
    )


async def test_an_agent_in_a_process_of_its_own(rehearsal: Rehearsal):
    """Its calls are known only to the server: they reach the reward and are counted like others."""
    changes: dict[str, Any] = {
        "workflow": {"target": "agent.py:process", "args": {"base_model": str(rehearsal.model)}},
        "eval": {"evaluators": {"reward": {"target": "agent.py:questions"}}},
    }
    checks = await rehearsal.checked(**changes)
    assert failures(checks) == []
    # Two calls of at most three tokens in each of two rollouts.
    match = re.fullmatch(
        r"the two rollouts took 4 calls, (\d+) sampled tokens.*", one(checks, "cost").message
    )
    assert match is not None and 4 <= int(match[1]) <= 12
    scores = one(checks, "score").message.rpartition(": ")[2].split(", ")
    assert sum(map(float, scores)) == int(match[1])


async def test_an_agent_without_model_calls(rehearsal: Rehearsal):
    check = await rehearsal.failed(workflow={"target": "agent.py:silent"})
    assert check.name == "calls"
    assert "the server recorded no call of the rollout" in check.message
    assert f"{rehearsal.server.base_url}/rollout/ROLLOUT_ID/v1" in check.message


async def test_calls_under_another_rollout(rehearsal: Rehearsal):
    check = await rehearsal.failed(workflow={"target": "agent.py:wrong_header"})
    assert check.name == "calls"
    assert "they name no rollout, or another one" in check.message


async def test_an_agent_that_abandons_its_streams(rehearsal: Rehearsal):
    check = await rehearsal.failed(workflow={"target": "agent.py:impatient"})
    assert check.name == "calls"
    assert "the agent left before its answers were complete" in check.message


async def test_another_endpoint_without_logprobs(rehearsal: Rehearsal):
    [check] = failures(await rehearsal.foreign())
    assert check.name == "calls"
    assert (
        "set `logprobs: true` in its `llms` entry and check that it returns them" in check.message
    )


# ---- sampling -------------------------------------------------------------------------------------


async def test_greedy_sampling(rehearsal: Rehearsal):
    check = await rehearsal.failed(llms={"actor": {"temperature": 0}})
    assert check.name == "calls"
    assert "sampled at temperature 0" in check.message
    assert "Raise `temperature` in the `llms` entry" in check.message


async def test_sampling_that_is_greedy_in_other_words(rehearsal: Rehearsal):
    check = await rehearsal.failed(llms={"actor": {"top_k": 1, "max_tokens": 12}})
    assert check.name == "sampling"
    assert "are the same, token for token, which is chance in" in check.message
    assert "remove top_k: 1" in check.message


async def test_equal_rollouts_compare_with_the_batch(rehearsal: Rehearsal):
    changes: dict[str, Any] = {
        "llms": {"actor": {"top_k": 1, "max_tokens": 12}},
        "trainer_adapters": {"a": {"training": {"baseline": "batch"}}},
    }
    checks = await rehearsal.checked(**changes)
    assert failures(checks) == [] and one(checks, "sampling").warning


async def test_credit_by_call_without_values(rehearsal: Rehearsal):
    by_call = {"a": {"training": {"credit": "per_call"}}}
    check = await rehearsal.failed(trainer_adapters=by_call)
    assert check.name == "credit"
    assert "recorded none. Record them in the agent" in check.message


async def test_a_coincidence_that_may_be_one(rehearsal: Rehearsal):
    """At so low a temperature the model is certain of every token: both say the same rightly."""
    cold = {"actor": {"temperature": 0.001, "max_tokens": 2}}
    checks = await rehearsal.checked(llms=cold)
    assert failures(checks) == []
    check = one(checks, "sampling")
    assert check.warning
    assert "token for token; the model does so with a probability of 1, so this" in check.message


async def test_another_endpoint_that_repeats_itself(rehearsal: Rehearsal):
    same = [reply("ab", -4, -5)] * 2
    [check] = failures(await rehearsal.foreign(*same))
    assert check.name == "sampling"
    # exp(-9) = 1.234e-4
    assert "which is chance in 1.2e-04 of cases" in check.message
    # exp(-6.5) = 1.503e-3: seldom, and so are all the other things that were not said
    checks = await rehearsal.foreign(*[reply("ab", -2, -4.5)] * 2)
    assert failures(checks) == []
    assert (
        "does so with a probability of 0.0015, so this may be chance"
        in one(checks, "sampling").message
    )
    same = [reply("ab", -4, -5)] * 2
    [check] = failures(await rehearsal.foreign(*same, temperature=0))
    assert check.name == "calls"
    assert "sampled at temperature 0" in check.message


# ---- the agent and the reward ---------------------------------------------------------------------


async def test_an_agent_that_fails(rehearsal: Rehearsal):
    check = await rehearsal.failed(workflow={"target": "agent.py:broken"})
    assert check.name == "workflow"
    assert "failed on example 'e0' (agent_error): RuntimeError: no such table: users" in (
        check.message
    )
    assert "agent.py" in check.message, "it says where"


async def test_infrastructure_failures_are_retried(rehearsal: Rehearsal):
    workflow = {"target": "agent.py:unlucky", "args": {"times": 2}}
    checks = await rehearsal.checked(workflow=workflow)
    assert failures(checks) == []
    check = one(checks, "workflow")
    assert check.warning
    assert (
        "the workflow ran twice on example 'e0', after 2 failed attempts were repeated, the first "
        "(connection): ConnectionResetError: the database restarts"
    ) in check.message


async def test_one_attempt_that_is_repeated(rehearsal: Rehearsal):
    once = {"target": "agent.py:unlucky", "args": {"times": 1}}
    check = one(await rehearsal.checked(workflow=once), "workflow")
    assert (
        "the workflow ran twice on example 'e0', after 1 failed attempt was repeated (connection): "
    ) in check.message


async def test_a_repeated_failure_is_refused(rehearsal: Rehearsal):
    # Two trials, each with one attempt and `rollout_retries: 2` more: at the seventh it would work.
    workflow = {"target": "agent.py:unlucky", "args": {"times": 6}}
    check = await rehearsal.failed(workflow=workflow, finetuning={"rollout_retries": 2})
    assert check.name == "workflow"
    assert "3 times in a row the workflow failed on example 'e0' (connection)" in check.message


async def test_a_missing_model_is_requested_once(rehearsal: Rehearsal):
    """Asking again for a name cannot help, so the run stops at once with the server's reason."""
    workflow = {"target": "agent.py:misnamed", "args": {"model": "no-such-model"}}
    check = await rehearsal.failed(workflow=workflow, finetuning={"rollout_retries": 2})
    assert check.name == "workflow"
    assert check.message.startswith("the workflow failed on example 'e0' (model_name): ")
    assert "no model called 'no-such-model' is served. Served: " in check.message
    assert "set finetuning.model_aliases" in check.message


async def test_one_retry_is_made_even_where_rollouts_have_none(rehearsal: Rehearsal):
    workflow = {"target": "agent.py:unlucky", "args": {"times": 2}}
    checks = await rehearsal.checked(workflow=workflow, finetuning={"rollout_retries": 0})
    assert failures(checks) == []


async def test_rollouts_that_fail_by_the_models_doing(rehearsal: Rehearsal):
    worth = {"on_policy_failure": {"reward": -1.0}}
    checks = await rehearsal.checked(workflow={"target": "agent.py:refuses"}, finetuning=worth)
    assert failures(checks) == []
    check = one(checks, "workflow")
    assert check.warning
    assert "both rollouts of example 'e0' failed because of the model (unparseable)" in (
        check.message
    )
    assert "PolicyFailure: no move" in check.message and "agent.py" in check.message


async def test_both_failing_by_the_models_doing_is_refused_where_failures_are_dropped(
    rehearsal: Rehearsal,
):
    dropped = {"on_policy_failure": "drop"}
    refuses = {"target": "agent.py:refuses"}
    check = await rehearsal.failed(workflow=refuses, finetuning=dropped)
    assert check.name == "workflow"
    assert "both rollouts of example 'e0' failed because of the model (unparseable)" in (
        check.message
    )
    assert "nothing would be trained" in check.message
    assert "finetuning.on_policy_failure: lowest" in check.message


async def test_one_that_fails_by_the_models_doing_is_a_warning(rehearsal: Rehearsal):
    dropped = {"on_policy_failure": "drop"}
    half = {"target": "agent.py:half_refuses"}
    checks = await rehearsal.checked(workflow=half, finetuning=dropped)
    assert failures(checks) == []
    check = one(checks, "workflow")
    assert check.warning
    assert "one of two rollouts of example 'e0' failed because of the model (unparseable)" in (
        check.message
    )


async def test_equal_rewards_are_a_warning(rehearsal: Rehearsal):
    equal: dict[str, Any] = {"eval": {"evaluators": {"reward": {"target": "agent.py:same"}}}}
    check = one(await rehearsal.checked(**equal), "rewards")
    assert check.ok and check.warning
    assert "both rollouts of example 'e0' have the reward 0.5. With two rollouts that may be" in (
        check.message
    )
    batch = {"a": {"training": {"baseline": "batch"}}}
    names = [c.name for c in await rehearsal.checked(**equal, trainer_adapters=batch)]
    assert "rewards" not in names, "they are compared with those of other examples"


async def test_answers_that_are_cut_are_a_warning(rehearsal: Rehearsal):
    checks = await rehearsal.checked(llms={"actor": {"max_tokens": 1}})
    check = one(checks, "max_tokens")
    assert check.ok and check.warning
    assert check.message.startswith("2 of the 2 answers that can be trained were cut at")


async def test_the_time_of_the_run_is_estimated(rehearsal: Rehearsal):
    async with rehearsal.live() as run:
        check = one(await run.checks(validation_examples=10), "time")
    # 50 examples x 2 generations x 20 epochs; 10 examples after 0, 5, 10, 15 and 20 epochs, and 2 x
    # 10 at the end.
    assert "2,000 training rollouts and at most 70 validation rollouts" in check.message
    assert check.message.startswith("about ")
    assert check.message.endswith("training comes on top")
    assert f"{run.evaluation.max_concurrency} at a time" in check.message


async def test_an_evaluator_that_is_down_for_a_moment(rehearsal: Rehearsal):
    briefly = {"evaluators": {"reward": {"target": "agent.py:briefly_down"}}}
    assert failures(await rehearsal.checked(eval=briefly)) == []


async def test_an_evaluator_that_fails(rehearsal: Rehearsal):
    broken = {"evaluators": {"reward": {"target": "agent.py:fails"}}}
    check = await rehearsal.failed(eval=broken)
    assert check.name == "score"
    assert "evaluator 'reward' on example 'e0' gives no score: KeyError: 'answer'" in check.message


async def test_an_evaluator_that_blames_the_model_stops_the_run_where_failures_are_dropped(
    rehearsal: Rehearsal,
):
    blames = {"evaluators": {"reward": {"target": "agent.py:no_number"}}}
    checks = await rehearsal.checked(eval=blames)
    assert failures(checks) == []
    check = one(checks, "score")
    assert check.warning
    assert "the model failed (unparseable): PolicyFailure: no number in it" in check.message
    check = await rehearsal.failed(eval=blames, finetuning={"on_policy_failure": "drop"})
    assert check.name == "score" and "nothing would be trained" in check.message
    assert "finetuning.on_policy_failure: lowest" in check.message


async def test_an_evaluator_that_fails_on_one_of_two_outputs_is_a_warning(rehearsal: Rehearsal):
    outputs: list[object] = []

    class Picky:
        async def evaluate_item(self, item: EvalInputItem) -> EvalOutputItem:
            outputs.append(item.output_obj)
            if item.output_obj == outputs[0]:
                raise ValueError("two words")
            return EvalOutputItem(id=item.id, score=1.0)

    async with rehearsal.live() as run:
        run.evaluation.evaluators["reward"] = Picky()
        check = one(await run.checks(), "score")
        await run.adapter.model.close()
    assert check.ok and check.warning
    where = "evaluator 'reward' on example 'e0': 1; on the other rollout it gives no score: "
    assert check.message.startswith(f"{where}ValueError: two words")


# ---- calls that name no rollout -------------------------------------------------------------------


async def test_an_agent_whose_client_cannot_be_seen(rehearsal: Rehearsal):
    args = {"base_model": str(rehearsal.model)}
    checks = await rehearsal.checked(workflow={"target": "agent.py:unseen_base", "args": args})
    [check] = failures(checks)
    assert "the server recorded no call of the rollout" in check.message
    assert "its HTTP client is httpx or httpx2" in check.message
    # The base model's name means the run's model only inside a rollout of the run.
    strange = one(checks, "unmarked calls")
    assert strange.warning
    assert f"2 calls named no rollout while rollouts ran ({rehearsal.model}: 2)" in strange.message
    assert f"Outside a rollout {str(rehearsal.model)!r} is the untrained model." in strange.message


async def test_unmarked_calls_beside_marked_ones(rehearsal: Rehearsal):
    backend = {"name": "half-seen"}
    changes: dict[str, Any] = {
        "workflow": {"target": "agent.py:half_seen"},
        "llms": {"actor": {"model_name": "suite/half-seen"}},
        "trainer_adapters": {"a": {"backend": backend}},
    }
    check = await rehearsal.failed(**changes)
    assert check.name == "unmarked calls"
    assert "2 calls named no rollout while rollouts ran (suite/half-seen: 2)" in check.message
    assert f"{rehearsal.server.base_url}/rollout/ROLLOUT_ID/v1" in check.message


async def test_calls_of_a_judge_at_the_same_server_cause_no_warning(rehearsal: Rehearsal):
    async with rehearsal.live() as run:
        adapter = run.adapter
        before = await adapter.backend.unmarked(run.id)
        answers: list[str] = []

        class Judge:
            async def evaluate_item(self, item: EvalInputItem) -> EvalOutputItem:
                answer = await adapter.model.openai_client().chat.completions.create(
                    model=str(rehearsal.model),
                    messages=[{"role": "user", "content": "good?"}],
                    max_tokens=2,
                )
                answers.append(answer.id)
                return EvalOutputItem(id=item.id, score=1.0)

        run.evaluation.evaluators["reward"] = Judge()
        assert failures(await run.checks()) == []
        assert len(answers) == 2
        assert await adapter.backend.unmarked(run.id) == before
        await adapter.model.close()


# ---- a builder of somebody's own ------------------------------------------------------------------


async def test_a_builder_of_somebody_s_own_that_can_try_a_rollout_gets_every_check(
    rehearsal: Rehearsal,
):
    async with rehearsal.live(llms={"actor": {"temperature": 0}}) as run:
        theirs = ScriptedBuilder(lambda *place: 1.0)
        assert failures(await run.checks(builder=theirs)) == []
        theirs.trial = run.trajectories.trial
        [check] = failures(await run.checks(builder=theirs))
    assert "sampled at temperature 0" in check.message
