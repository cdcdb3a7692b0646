"""Preflight: every check passes on a sound run, and each failure says what to change."""

import json
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from tests.fakes import MemoryAdapter, SickAdapter
from tests.finetune.worlds import LossyProxy
from tests.workflow.endpoint import Endpoint, Reply, serving

from hone import LocalBackend
from hone.backends import http
from hone.config.build import Builder, build
from hone.config.schema import ConfigProblems, Document, read
from hone.evaluation.base import EvalInputItem, EvalOutputItem
from hone.evaluation.run import Evaluation, evaluation
from hone.finetune.adapter import ARTTrainerAdapter
from hone.finetune.base import TrainerAdapter, TrajectoryBuilder
from hone.finetune.builder import ARTTrajectoryBuilder
from hone.finetune.checks import check_movement
from hone.finetune.preflight import Check, check_document, failures, plan, preflight

AGENT = """
import asyncio
import json
import urllib.request

import hone
import hone.errors

async def run(question, llm):
    answer = await llm.chat([{"role": "user", "content": question}])
    return answer.choices[0].message.content or ""

async def search(question, llm):
    return await run(f"search {question}", llm)

async def nested(question, functions):
    return await functions["search"](question)

async def silent(question, llm):
    return question

async def broken(question, llm):
    raise RuntimeError("no such table: users")

async def wrong_header(question, llm):
    answer = await llm.client.chat.completions.create(
        model=llm.model,
        messages=[{"role": "user", "content": question}],
        max_tokens=3,
        extra_headers={"X-Hone-Rollout": "somebody-else"},
    )
    return answer.choices[0].message.content or ""

async def refuses(question, llm):
    await run(question, llm)
    raise hone.errors.PolicyFailure("no move", reason="unparseable")

async def impatient(question, llm):
    messages = [{"role": "user", "content": question}]
    client = llm.client.chat.completions
    stream = await client.create(model=llm.model, messages=messages, max_tokens=200, stream=True)
    async for _ in stream:
        await stream.close()
        return "enough"

def asked(url, model, question):
    body = {"model": model, "messages": [{"role": "user", "content": question}], "max_tokens": 3}
    request = urllib.request.Request(f"{url}/chat/completions", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]

async def unseen(question, llm):
    return await asyncio.to_thread(asked, llm.base_url, llm.model, question)

async def half_seen(question, llm):
    return await run(question, llm) + await unseen(question, llm)

def length(item):
    return float(len(item.output_obj))

def fails(item):
    raise KeyError("answer")
"""


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Tables into tables; None removes a key."""
    found = dict(base)
    for key, value in changes.items():
        if value is None:
            found.pop(key, None)
        elif isinstance(value, dict) and isinstance(found.get(key), dict):
            found[key] = merged(found[key], value)
        else:
            found[key] = value
    return found


def document(
    directory: Path,
    url: str = "http://127.0.0.1:7623",
    base: dict[str, Any] | None = None,
    **changes: Any,
) -> Document:
    """The seed's basic configuration over the agent above, with changes."""
    address = urlsplit(url)
    (directory / "agent.py").write_text(AGENT)
    rows = [{"id": f"e{i}", "question": f"Say {i}.", "answer": str(i)} for i in range(50)]
    (directory / "train.json").write_text(json.dumps(rows))
    basic = {
        "llms": {
            "actor": {
                "_type": "openai",
                "model_name": "base",
                "base_url": f"{url}/v1",
                "api_key": "default",
                "temperature": 1.0,
                "max_tokens": 6,
            }
        },
        "functions": {
            "search": {"_type": "python", "target": "agent.py:search", "llm": "actor"},
        },
        "workflow": {"_type": "python", "target": "agent.py:run", "llm": "actor"},
        "eval": {
            "general": {
                "dataset": {"_type": "json", "file_path": str(directory / "train.json")},
            },
            "evaluators": {"reward": {"_type": "python", "target": "agent.py:length"}},
        },
        "trajectory_builders": {"b": {"_type": "openpipe_art_traj_builder"}},
        "trainer_adapters": {
            "a": {
                "_type": "openpipe_art_trainer_adapter",
                "backend": {
                    "ip": address.hostname,
                    "port": address.port,
                    "name": f"agent-{secrets.token_hex(4)}",
                    "project": "suite",
                    "base_model": "base",
                },
            }
        },
        "trainers": {"t": {"_type": "openpipe_art_trainer"}},
        "finetuning": {
            "enabled": True,
            "trainer": "t",
            "trajectory_builder": "b",
            "trainer_adapter": "a",
            "reward_function": {"name": "reward"},
            "num_epochs": 20,
            "output_dir": str(directory / "out"),
        },
    }
    file = directory / "config.yml"
    file.write_text(yaml.safe_dump(merged(merged(basic, base or {}), changes), sort_keys=False))
    return read(file)


def one(checks: list[Check], name: str) -> Check:
    [found] = [check for check in checks if check.name == name]
    return found


# ---- what the configuration alone tells -----------------------------------------------------------


def test_a_sound_configuration(tmp_path: Path):
    checks = check_document(document(tmp_path))
    assert failures(checks) == []
    assert [check.name for check in checks] == [
        "reward", "target functions", "target model", "group size",
    ]  # fmt: skip


def test_keys_of_the_originals_say_what_to_set_instead(tmp_path: Path):
    wrong = {"a": {"training": {"gradient_accumulation_steps": 4, "learning_rat": 1}}}
    with pytest.raises(ConfigProblems) as caught:
        document(tmp_path, trainer_adapters=wrong)
    said = str(caught.value)
    assert "not in this version of hone; set groups_per_optimizer_step" in said
    assert "unknown key 'learning_rat'. Did you mean 'learning_rate'?" in said


def test_a_target_function_that_is_not_there(tmp_path: Path):
    doc = document(tmp_path, finetuning={"target_functions": ["<workflow>", "serach"]})
    found = one(check_document(doc), "target functions")
    assert not found.ok
    assert (
        "names 'serach', and `functions` has no such key. Did you mean 'search'?" in found.message
    )
    assert "There are: '<workflow>', 'search'." in found.message
    assert "No trajectories collected for epoch" in found.message


def test_a_target_model_by_key_by_name_and_by_neither(tmp_path: Path):
    for wanted in ("actor", "base"):
        doc = document(tmp_path, finetuning={"target_model": wanted})
        assert one(check_document(doc), "target model").ok
    doc = document(tmp_path, finetuning={"target_model": "acto"})
    found = one(check_document(doc), "target model")
    assert not found.ok
    assert "is 'acto', which is neither a key of `llms` nor the name of a model." in found.message
    assert "Did you mean 'actor'?" in found.message


def test_two_entries_that_cannot_be_told_apart(tmp_path: Path):
    twin = {
        "_type": "openai",
        "model_name": "base",
        "base_url": "http://127.0.0.1:7623/v1",
        "temperature": 0.2,
    }
    doc = document(tmp_path, llms={"critic": twin}, finetuning={"target_model": "actor"})
    found = one(check_document(doc), "target model")
    assert found.ok and found.warning
    assert "llms.actor and 'critic' ask for the same model at the same address" in found.message


def test_one_generation_needs_the_batch(tmp_path: Path):
    single = {"b": {"num_generations": 1}}
    found = one(check_document(document(tmp_path, trajectory_builders=single)), "group size")
    assert not found.ok
    assert "trajectory_builders.b.num_generations is 1" in found.message
    assert "training.baseline: batch in trainer_adapters.a" in found.message
    batch = {"a": {"training": {"baseline": "batch"}}}
    doc = document(tmp_path, trajectory_builders=single, trainer_adapters=batch)
    assert one(check_document(doc), "group size").ok


def test_groups_smaller_than_the_smallest(tmp_path: Path):
    found = one(check_document(document(tmp_path, finetuning={"min_group_size": 4})), "group size")
    assert not found.ok
    assert "num_generations is 2 but finetuning.min_group_size is 4" in found.message


# ---- how much there is to do ------------------------------------------------------------------------


def test_the_seed_s_own_learning_rate_can_hardly_move_the_model(tmp_path: Path):
    slow = {"a": {"training": {"learning_rate": "1e-6"}}}
    planned = plan(document(tmp_path, trainer_adapters=slow), 50)
    # 50 examples x 2 generations x 20 epochs; 50 groups in steps of 8 are 7 steps an epoch.
    assert (planned.rollouts, planned.jobs, planned.optimizer_steps) == (2000, 20, 140)
    found = check_movement(planned)
    assert found.ok and found.warning
    # 140 x 1e-6 = 1.4e-4
    assert "140 optimizer steps at learning_rate 1e-06: each weight moves by about 1.4e-04" in (
        found.message
    )
    assert "can hardly move the model. Raise training.learning_rate" in found.message


def test_a_faster_one_can(tmp_path: Path):
    found = check_movement(plan(document(tmp_path), 50))
    # 140 x 5e-5 = 7e-3; falling to 0 it is half of that.
    assert not found.warning
    assert "7.0e-03" in found.message
    assert "3.5e-03" in check_movement(plan(document(tmp_path), 50), falling=True).message
    still = {"a": {"training": {"learning_rate": 0}}}
    assert not check_movement(plan(document(tmp_path, trainer_adapters=still), 50)).warning


def test_rounds_and_partial_epochs(tmp_path: Path):
    parts = {"groups_per_step": 12, "examples_per_epoch": 30, "num_epochs": 2}
    planned = plan(document(tmp_path, finetuning=parts), 50)
    # 30 of 50 examples: rounds of 12, 12 and 6, which are 2 + 2 + 1 optimizer steps.
    assert (planned.examples, planned.rounds, planned.jobs) == (30, 3, 6)
    assert (planned.rollouts, planned.optimizer_steps) == (120, 10)
    nothing = plan(document(tmp_path), 0)
    assert (nothing.rollouts, nothing.jobs, nothing.optimizer_steps) == (0, 0, 0)


# ---- at the server --------------------------------------------------------------------------------


@asynccontextmanager
async def live(
    tmp_path: Path, server: LocalBackend, model: Path, **changes: Any
) -> AsyncIterator[tuple[Builder, TrajectoryBuilder, ARTTrainerAdapter, Evaluation, str]]:
    """The parts of a run over a real server, built from the document as `hone finetune` does."""
    base = {
        "llms": {"actor": {"model_name": str(model)}},
        "trainer_adapters": {"a": {"backend": {"base_model": str(model)}}},
    }
    doc = document(tmp_path, server.base_url, base, **changes)
    async with build(doc) as builder:
        adapter = await builder.get_trainer_adapter("a")
        assert isinstance(adapter, ARTTrainerAdapter)
        trajectories = await builder.get_trajectory_builder("b")
        await trajectories.initialize(doc.finetuning)
        await adapter.initialize(doc.finetuning)
        builder.served = adapter.served
        run_id = f"art_run_{secrets.token_hex(4)}"
        await adapter.open_run(run_id, 0)
        async with evaluation(builder) as evaluating:
            trajectories.bind_evaluation(evaluating)
            yield builder, trajectories, adapter, evaluating, run_id


async def checked(tmp_path: Path, server: LocalBackend, model: Path, **changes: Any) -> list[Check]:
    async with live(tmp_path, server, model, **changes) as parts:
        builder, trajectories, adapter, evaluating, run_id = parts
        return await preflight(
            document=builder.document,
            builder=builder,
            trajectory_builder=trajectories,
            trainer_adapter=adapter,
            evaluation=evaluating,
            run_id=run_id,
        )


async def failed(tmp_path: Path, server: LocalBackend, model: Path, **changes: Any) -> Check:
    [found] = failures(await checked(tmp_path, server, model, **changes))
    return found


async def test_a_sound_run(tmp_path: Path, server: LocalBackend, tiny_model: Path):
    checks = await checked(tmp_path, server, tiny_model)
    assert failures(checks) == []
    assert [check.name for check in checks] == [
        "reward", "target functions", "target model", "group size", "server", "base model",
        "llm actor", "workflow", "calls", "sampling", "score", "cost", "movement",
    ]  # fmt: skip
    assert "at step 0, with token ids" in one(checks, "llm actor").message
    assert "1 and 1 calls of the two rollouts can be trained" in one(checks, "calls").message
    assert one(checks, "sampling").message == "two rollouts of one example differ"
    assert "took 2 calls" in one(checks, "cost").message
    assert "trained on by nobody" in one(checks, "cost").message


async def test_a_trainable_llm_needs_no_address(
    tmp_path: Path, server: LocalBackend, tiny_model: Path
):
    llm = {"_type": "trainable", "base_url": None, "model_name": None, "api_key": None}
    changes: dict[str, Any] = {"llms": {"actor": llm}, "finetuning": {"target_model": "actor"}}
    checks = await checked(tmp_path, server, tiny_model, **changes)
    assert failures(checks) == []


async def test_nested_targets(tmp_path: Path, server: LocalBackend, tiny_model: Path):
    workflow = {"target": "agent.py:nested", "llm": None, "functions": ["search"]}
    changes: dict[str, Any] = {
        "workflow": workflow,
        "finetuning": {"target_functions": ["search"], "target_model": "actor"},
    }
    assert failures(await checked(tmp_path, server, tiny_model, **changes)) == []


async def test_calls_that_no_target_matches(tmp_path: Path, server: LocalBackend, tiny_model: Path):
    found = await failed(tmp_path, server, tiny_model, finetuning={"target_functions": ["search"]})
    assert found.name == "calls"
    assert "no call came from finetuning.target_functions ['search']" in found.message
    assert "No trajectories collected for epoch" in found.message


async def test_a_server_that_went_away(
    tmp_path: Path, server: LocalBackend, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(http, "FIRST_S", 0.2)
    async with live(tmp_path, server, tiny_model) as parts:
        builder, trajectories, adapter, evaluating, run_id = parts
        adapter.backend.patience_s = 0.2
        adapter.backend.base_url = "http://127.0.0.1:1"
        checks = await preflight(
            document=builder.document,
            builder=builder,
            trajectory_builder=trajectories,
            trainer_adapter=adapter,
            evaluation=evaluating,
            run_id=run_id,
        )
    [found] = failures(checks)
    assert found.name == "server"
    assert found.message.startswith("Failed to connect to ART backend. ")
    assert "curl http://127.0.0.1:1/health" in found.message


async def test_an_llm_that_asks_elsewhere(tmp_path: Path, server: LocalBackend, tiny_model: Path):
    elsewhere = {"actor": {"base_url": "http://127.0.0.1:9/v1"}}
    found = await failed(tmp_path, server, tiny_model, llms=elsewhere)
    assert found.name == "llm"
    assert f"answers at {server.base_url}/v1, and no entry of `llms` asks there" in found.message
    assert "llms.actor at http://127.0.0.1:9/v1" in found.message
    assert "_type: trainable" in found.message and "allow_foreign_endpoint: true" in found.message


async def test_an_llm_that_asks_for_nothing_that_is_served(
    tmp_path: Path, server: LocalBackend, tiny_model: Path
):
    found = await failed(tmp_path, server, tiny_model, llms={"actor": {"model_name": "gpt-99"}})
    assert found.name == "llm actor"
    assert "no model called 'gpt-99' is served" in found.message
    assert f"asked for as {str(tiny_model)!r} or 'suite/agent-" in found.message


async def test_an_agent_that_talks_to_the_untrained_model(
    tmp_path: Path, server: LocalBackend, tiny_model: Path
):
    frozen = {"actor": {"model_name": f"{tiny_model}@0"}}
    found = await failed(tmp_path, server, tiny_model, llms=frozen)
    assert found.name == "calls"
    assert "answered by another model than suite/agent-" in found.message


async def test_greedy_sampling(tmp_path: Path, server: LocalBackend, tiny_model: Path):
    found = await failed(tmp_path, server, tiny_model, llms={"actor": {"temperature": 0}})
    assert found.name == "calls"
    assert "sampled at temperature 0" in found.message
    assert "Raise `temperature` in the `llms` entry" in found.message


async def test_sampling_that_is_greedy_in_other_words(
    tmp_path: Path, server: LocalBackend, tiny_model: Path
):
    found = await failed(
        tmp_path, server, tiny_model, llms={"actor": {"top_k": 1, "max_tokens": 12}}
    )
    assert found.name == "sampling"
    assert "are the same, token for token, which is chance in" in found.message
    assert "remove top_k: 1" in found.message


async def test_an_agent_that_never_asks(tmp_path: Path, server: LocalBackend, tiny_model: Path):
    found = await failed(tmp_path, server, tiny_model, workflow={"target": "agent.py:silent"})
    assert found.name == "calls"
    assert "the server recorded no call of the rollout" in found.message
    assert f"{server.base_url}/rollout/ROLLOUT_ID/v1" in found.message


async def test_calls_under_another_rollout(tmp_path: Path, server: LocalBackend, tiny_model: Path):
    found = await failed(tmp_path, server, tiny_model, workflow={"target": "agent.py:wrong_header"})
    assert found.name == "calls"
    assert "they name no rollout, or another one" in found.message


async def test_an_agent_that_fails(tmp_path: Path, server: LocalBackend, tiny_model: Path):
    found = await failed(tmp_path, server, tiny_model, workflow={"target": "agent.py:broken"})
    assert found.name == "workflow"
    assert "failed on example 'e0' (agent_error): RuntimeError: no such table: users" in (
        found.message
    )
    assert "agent.py" in found.message, "it says where"


async def test_an_evaluator_that_fails(tmp_path: Path, server: LocalBackend, tiny_model: Path):
    broken = {"evaluators": {"reward": {"target": "agent.py:fails"}}}
    found = await failed(tmp_path, server, tiny_model, eval=broken)
    assert found.name == "score"
    assert "evaluator 'reward' on example 'e0' gives no score: KeyError: 'answer'" in found.message


async def test_a_model_that_was_trained_over_another_base(
    tmp_path: Path, server: LocalBackend, tiny_model: Path
):
    async with live(tmp_path, server, tiny_model) as parts:
        builder, trajectories, adapter, evaluating, run_id = parts
        assert adapter.info is not None
        adapter.info = adapter.info.model_copy(update={"base_model": "other"})
        checks = await preflight(
            document=builder.document,
            builder=builder,
            trajectory_builder=trajectories,
            trainer_adapter=adapter,
            evaluation=evaluating,
            run_id=run_id,
        )
    found = one(checks, "base model")
    assert not found.ok
    assert f"backend.base_model is {str(tiny_model)!r}, but the server trains" in found.message


# ---- what else can be wrong -------------------------------------------------------------------------


async def test_an_adapter_of_somebodys_own(tmp_path: Path, server: LocalBackend, tiny_model: Path):
    async with live(tmp_path, server, tiny_model) as parts:
        builder, trajectories, _, evaluating, run_id = parts

        async def found(adapter: TrainerAdapter) -> Check:
            checks = await preflight(
                document=builder.document,
                builder=builder,
                trajectory_builder=trajectories,
                trainer_adapter=adapter,
                evaluation=evaluating,
                run_id=run_id,
            )
            return one(checks, "server")

        assert (await found(MemoryAdapter())).ok
        sick = await found(SickAdapter())
    assert not sick.ok
    assert sick.message == (
        "Failed to connect to ART backend. is_healthy() of SickAdapter says no. See that its "
        "backend runs and that its keys under `trainer_adapters` are right."
    )


async def test_no_examples_and_an_adapter_that_was_not_initialized(
    tmp_path: Path, server: LocalBackend, tiny_model: Path
):
    async with live(tmp_path, server, tiny_model) as parts:
        builder, trajectories, adapter, evaluating, run_id = parts
        known: dict[str, Any] = {
            "document": builder.document,
            "builder": builder,
            "trajectory_builder": trajectories,
            "trainer_adapter": adapter,
            "evaluation": evaluating,
            "run_id": run_id,
        }
        items, evaluating.items = evaluating.items, []
        [empty] = failures(await preflight(**known))
        evaluating.items, adapter.info = items, None
        [unknown] = failures(await preflight(**known))
    assert empty.name == "dataset"
    assert "Check file_path and filter of eval.general.dataset" in empty.message
    assert "--dataset" in empty.message
    assert unknown.message == "the adapter was not initialized; await initialize() first"


async def lossy(
    tmp_path: Path, server: LocalBackend, model: Path, **lost: Any
) -> tuple[Check, str]:
    """What is refused where agents reach the server through a proxy; and the proxy's address."""
    async with serving(LossyProxy(server.base_url, **lost)) as url:
        changes: dict[str, Any] = {
            "llms": {"actor": {"base_url": url}},
            "trainer_adapters": {"a": {"backend": {"inference_port": urlsplit(url).port}}},
        }
        return await failed(tmp_path, server, model, **changes), url


@pytest.mark.parametrize("key", ["logprobs", "token_ids"])
async def test_an_answer_without_what_training_needs(
    tmp_path: Path, server: LocalBackend, tiny_model: Path, key: str
):
    found, url = await lossy(tmp_path, server, tiny_model, keys=[key])
    assert found.name == "llm actor"
    assert f"at {url}) returned no logprobs or no token ids." in found.message
    assert "No valid assistant messages with logprobs. Let the model be asked at the training " in (
        found.message
    )


async def test_a_proxy_that_drops_the_rollout(
    tmp_path: Path, server: LocalBackend, tiny_model: Path
):
    found, _ = await lossy(tmp_path, server, tiny_model, headers=["x-hone-rollout"])
    assert found.name == "llm actor"
    assert "recorded no call under the rollout it was sent with" in found.message
    assert f"Is it the server at {server.base_url}, without a proxy that drops headers?" in (
        found.message
    )


async def test_a_coincidence_that_may_be_one(
    tmp_path: Path, server: LocalBackend, tiny_model: Path
):
    """At so low a temperature the model is certain of every token: both say the same rightly."""
    cold = {"actor": {"temperature": 0.001, "max_tokens": 2}}
    checks = await checked(tmp_path, server, tiny_model, llms=cold)
    assert failures(checks) == []
    found = one(checks, "sampling")
    assert found.warning
    assert "are the same, token for token; the model does so in 100% of cases, so this may be " in (
        found.message
    )


async def test_rollouts_that_fail_by_the_models_doing(
    tmp_path: Path, server: LocalBackend, tiny_model: Path
):
    checks = await checked(tmp_path, server, tiny_model, workflow={"target": "agent.py:refuses"})
    assert failures(checks) == []
    found = one(checks, "workflow")
    assert found.warning
    assert "as it seems by the model's own doing (unparseable): PolicyFailure: no move" in (
        found.message
    )


async def test_an_agent_that_leaves_before_the_end(
    tmp_path: Path, server: LocalBackend, tiny_model: Path
):
    found = await failed(tmp_path, server, tiny_model, workflow={"target": "agent.py:impatient"})
    assert found.name == "calls"
    assert "the agent left before its answers were complete" in found.message


async def test_calls_that_ask_for_another_entry_than_the_target(
    tmp_path: Path, server: LocalBackend, tiny_model: Path
):
    critic = {"_type": "openai", "model_name": f"{tiny_model}@0", "api_key": "default"}
    changes: dict[str, Any] = {
        "llms": {"critic": {**critic, "base_url": f"{server.base_url}/v1"}},
        "finetuning": {"target_model": "critic"},
    }
    found = await failed(tmp_path, server, tiny_model, **changes)
    assert found.name == "calls"
    assert "none of its calls asked for finetuning.target_model 'critic'" in found.message


# ---- calls that name no rollout -----------------------------------------------------------------------


async def test_an_agent_whose_client_cannot_be_seen(
    tmp_path: Path, server: LocalBackend, tiny_model: Path
):
    workflow = {"workflow": {"target": "agent.py:unseen"}}
    checks = await checked(tmp_path, server, tiny_model, **workflow)
    [found] = failures(checks)
    assert "the server recorded no call of the rollout" in found.message
    assert "its HTTP client is httpx or httpx2" in found.message
    # The base model's name means the run's model only inside a rollout of the run.
    strange = one(checks, "unmarked calls")
    assert strange.warning
    assert f"2 calls named no rollout while rollouts ran ({tiny_model}: 2)" in strange.message
    assert f"Outside a rollout {str(tiny_model)!r} is the untrained model." in strange.message


async def test_unmarked_calls_beside_marked_ones(
    tmp_path: Path, server: LocalBackend, tiny_model: Path
):
    backend = {"name": "half-seen"}
    changes: dict[str, Any] = {
        "workflow": {"target": "agent.py:half_seen"},
        "llms": {"actor": {"model_name": "suite/half-seen"}},
        "trainer_adapters": {"a": {"backend": backend}},
    }
    found = await failed(tmp_path, server, tiny_model, **changes)
    assert found.name == "unmarked calls"
    assert "2 calls named no rollout while rollouts ran (suite/half-seen: 2)" in found.message
    assert f"{server.base_url}/rollout/ROLLOUT_ID/v1" in found.message


async def test_a_judge_at_the_same_server_is_no_stranger(
    tmp_path: Path, server: LocalBackend, tiny_model: Path
):
    async with live(tmp_path, server, tiny_model) as parts:
        _, trajectories, adapter, evaluating, run_id = parts
        before = await adapter.backend.unmarked(run_id)
        asked: list[str] = []

        class Judge:
            async def evaluate_item(self, item: EvalInputItem) -> EvalOutputItem:
                answer = await adapter.model.openai_client().chat.completions.create(
                    model=str(tiny_model),
                    messages=[{"role": "user", "content": "good?"}],
                    max_tokens=2,
                )
                asked.append(answer.id)
                return EvalOutputItem(id=item.id, score=1.0)

        evaluating.evaluators["reward"] = Judge()
        assert isinstance(trajectories, ARTTrajectoryBuilder)
        await trajectories.run_item(evaluating.items[0], f"{run_id}:j", "reward")
        assert len(asked) == 1
        assert await adapter.backend.unmarked(run_id) == before
        await adapter.model.close()


# ---- an endpoint that is not the server's -----------------------------------------------------------


def told(text: str, *logprobs: float) -> Reply:
    """An answer whose letters are its tokens."""
    content = [
        {"token": letter, "logprob": value, "bytes": list(letter.encode()), "top_logprobs": []}
        for letter, value in zip(text, logprobs, strict=True)
    ]
    return Reply(text, more={"logprobs": {"content": content, "refusal": None}})


async def foreign(
    tmp_path: Path, server: LocalBackend, model: Path, *replies: Reply, **actor: Any
) -> list[Check]:
    async with serving(Endpoint(*replies)) as url:
        return await checked(
            tmp_path,
            server,
            model,
            llms={"actor": {"base_url": url, **actor}},
            finetuning={"allow_foreign_endpoint": True},
        )


async def test_another_endpoint_is_allowed_and_called_off_policy(
    tmp_path: Path, server: LocalBackend, tiny_model: Path
):
    checks = await foreign(tmp_path, server, tiny_model, told("ab", -1, -2), told("ac", -1, -2))
    assert failures(checks) == []
    found = one(checks, "llm")
    assert found.warning
    assert "trained off-policy, from its text and logprobs (allow_foreign_endpoint)" in (
        found.message
    )
    assert "rewards and validation measure the other endpoint, not suite/agent-" in found.message
    assert "1 and 1 calls of the two rollouts can be trained" in one(checks, "calls").message
    assert one(checks, "sampling").message == "two rollouts of one example differ"


async def test_another_endpoint_without_logprobs(
    tmp_path: Path, server: LocalBackend, tiny_model: Path
):
    [found] = failures(await foreign(tmp_path, server, tiny_model))
    assert found.name == "calls"
    assert "set `logprobs: true` in its `llms` entry and see that it returns them" in found.message


async def test_another_endpoint_that_repeats_itself(
    tmp_path: Path, server: LocalBackend, tiny_model: Path
):
    same = [told("ab", -4, -5)] * 2
    [found] = failures(await foreign(tmp_path, server, tiny_model, *same))
    assert found.name == "sampling"
    # exp(-9) = 1.234e-4
    assert "which is chance in 1.2e-04 of cases" in found.message
    same = [told("ab", -4, -5)] * 2
    [found] = failures(await foreign(tmp_path, server, tiny_model, *same, temperature=0))
    assert found.name == "calls"
    assert "sampled at temperature 0" in found.message
