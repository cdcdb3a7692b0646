"""Preflight: every check passes on a sound run, and each failure says what to change."""

from typing import Any

import pytest
from tests.fakes import MemoryAdapter, SickAdapter
from tests.finetune.rehearsal import Rehearsal, one, reply

from hone.backends import http
from hone.finetune.checks.preflight import failures


async def test_a_valid_run(rehearsal: Rehearsal):
    checks = await rehearsal.checked()
    assert failures(checks) == []
    by_chance = {"rewards", "max_tokens"}  # two answers may be equally long, or end at six tokens
    assert [check.name for check in checks if check.name not in by_chance] == [
        "server", "base model", "llm actor", "workflow", "calls", "sampling", "score", "cost", "time", "movement",
    ]  # fmt: skip
    assert "at step 0, with token ids" in one(checks, "llm actor").message
    assert "1 and 1 calls of the two rollouts can be trained" in one(checks, "calls").message
    assert one(checks, "sampling").message == "two rollouts of one example differ"
    assert "took 2 calls" in one(checks, "cost").message
    assert "not used for training" in one(checks, "cost").message


async def test_a_trainable_llm_needs_no_address(rehearsal: Rehearsal):
    llm = {"_type": "trainable", "base_url": None, "model_name": None, "api_key": None}
    changes: dict[str, Any] = {"llms": {"actor": llm}, "finetuning": {"target_model": "actor"}}
    checks = await rehearsal.checked(**changes)
    assert failures(checks) == []


async def test_a_server_that_went_away(
    rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(http, "FIRST_S", 0.2)
    async with rehearsal.live() as run:
        run.adapter.backend.patience_s = 0.2
        run.adapter.backend.base_url = "http://127.0.0.1:1"
        [check] = failures(await run.checks())
    assert check.name == "server"
    assert check.message.startswith("Failed to connect to ART backend. is_healthy() of HoneServer")
    assert "curl http://127.0.0.1:1/health" in caplog.text


async def test_a_model_that_was_trained_over_another_base(rehearsal: Rehearsal):
    async with rehearsal.live() as run:
        assert run.adapter.info is not None
        run.adapter.info = run.adapter.info.model_copy(update={"base_model": "other"})
        check = one(await run.checks(), "base model")
    assert not check.ok
    assert f"backend.base_model is {str(rehearsal.model)!r}, but the server trains" in check.message


async def test_an_adapter_of_somebodys_own(rehearsal: Rehearsal):
    async with rehearsal.live() as run:
        assert one(await run.checks(MemoryAdapter()), "server").ok
        sick = one(await run.checks(SickAdapter()), "server")
    assert not sick.ok
    assert sick.message == (
        "Failed to connect to ART backend. is_healthy() of SickAdapter returned False. Check that "
        "its backend is running and that its keys under `trainer_adapters` are right."
    )


# ---- the `llms` entries ---------------------------------------------------------------------------


async def test_an_llm_at_another_address(rehearsal: Rehearsal):
    elsewhere = {"actor": {"base_url": "http://127.0.0.1:9/v1"}}
    check = await rehearsal.failed(llms=elsewhere)
    assert check.name == "llm"
    assert (
        f"answers at {rehearsal.server.base_url}/v1, and no entry of `llms` asks there"
        in check.message
    )
    assert "llms.actor at http://127.0.0.1:9/v1" in check.message
    assert "_type: trainable" in check.message and "allow_foreign_endpoint: true" in check.message


async def test_an_llm_with_a_model_that_is_not_served(rehearsal: Rehearsal):
    check = await rehearsal.failed(llms={"actor": {"model_name": "gpt-99"}})
    assert check.name == "llm actor"
    assert "no model called 'gpt-99' is served" in check.message
    assert f"in training as {str(rehearsal.model)!r} or 'suite/agent-" in check.message


async def test_two_entries_that_name_the_model_in_training(rehearsal: Rehearsal):
    actor = {"_type": "openai", "model_name": "suite/both", "api_key": "default"}
    actor["base_url"] = f"{rehearsal.server.base_url}/v1"
    changes: dict[str, Any] = {
        "llms": {"actor": actor, "critic": {**actor, "max_tokens": 3}},
        "trainer_adapters": {"a": {"backend": {"name": "both"}}},
        "finetuning": {"target_model": "actor"},
    }
    checks = await rehearsal.checked(**changes)
    assert failures(checks) == []
    check = one(checks, "llm")
    assert check.warning
    assert "llms.actor, llms.critic request the model in training, so calls of all" in check.message


@pytest.mark.parametrize("key", ["logprobs", "token_ids"])
async def test_an_answer_without_what_training_needs(rehearsal: Rehearsal, key: str):
    check, url = await rehearsal.lossy(keys=[key])
    assert check.name == "llm actor"
    assert f"at {url}) returned no logprobs or no token ids." in check.message
    assert "No valid assistant messages with logprobs. Call the model at the training server" in (
        check.message
    )


async def test_a_proxy_that_drops_the_rollout(rehearsal: Rehearsal):
    check, _ = await rehearsal.lossy(headers=["x-hone-rollout"])
    assert check.name == "llm actor"
    assert "recorded no call under the rollout it was sent with" in check.message
    assert (
        f"Is it the server at {rehearsal.server.base_url}, without a proxy that drops headers?"
        in (check.message)
    )


async def test_another_endpoint_is_allowed_and_called_off_policy(rehearsal: Rehearsal):
    checks = await rehearsal.foreign(reply("ab", -1, -2), reply("ac", -1, -2))
    assert failures(checks) == []
    check = one(checks, "llm")
    assert check.warning
    assert "trained off-policy, from their text and logprobs (allow_foreign_endpoint)" in (
        check.message
    )
    assert "rewards and validation measure the endpoint, not suite/agent-" in check.message
    assert "1 and 1 calls of the two rollouts can be trained" in one(checks, "calls").message
    assert one(checks, "sampling").message == "two rollouts of one example differ"


# ---- an adapter of somebody's own -----------------------------------------------------------------


async def test_an_adapter_of_somebody_s_own_with_a_server_gets_every_check(rehearsal: Rehearsal):
    async with rehearsal.live() as run:

        async def names(adapter: MemoryAdapter | None = None) -> list[str]:
            # Whether two rewards are equal, which is a check of its own, depends on what was sampled.
            checks = await run.checks(adapter)
            return [check.name for check in checks if check.name != "rewards"]

        theirs = MemoryAdapter()
        without = await names(theirs)
        theirs.server, theirs.served = run.adapter, run.adapter.served
        hone_s = await names()
        assert await names(theirs) == hone_s
        assert {"base model", "llm actor"} == set(hone_s) - set(without)
