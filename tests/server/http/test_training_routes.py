"""The training API over HTTP: models and jobs, and their invalid requests."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.patience import PATIENCE_S
from tests.prose import Prose
from tests.server.api import AGENT, JOBS, Api, Open, group, job
from tests.server.worlds import by_tokens
from tests.store.test_checkpoints import filler

from hone.errors import StorageError
from hone.server.http.training_routes import inference_url
from hone.server.settings import Settings
from hone.types import JobInfo, RecordedCall

# ---- models -----------------------------------------------------------------------------------


async def test_a_model_is_registered_once(prose: Prose, open_api: Open):
    api = await open_api(held=True)
    first = await api.register(alpha=8, seed=3, not_applicable=["gpu_memory_utilization"])
    again = await api.register(
        status=200, alpha=8, seed=3, not_applicable=["gpu_memory_utilization"]
    )
    assert first == again
    assert first.model_dump() == {
        "project": "default",
        "name": "agent",
        "base_model": api.base_model,
        "step": 0,
        "best_step": None,
        "rank": 4,
        "alpha": 8.0,
        "seed": 3,
        "inference_base_url": "http://localhost:8000/v1",
        "advertised_url": None,
        "inference_name": "agent",
        "not_applicable": ["gpu_memory_utilization"],
        "concurrency": 64,
        "created_at": first.created_at,
    }
    assert await api.ask("GET", AGENT) == first.model_dump()
    assert await api.ask("GET", "/v1/training/models") == [first.model_dump()]
    answer = await api.ask(
        "POST",
        "/v1/training/models",
        json={"name": "agent", "base_model": api.base_model, "rank": 8},
        status=409,
    )
    prose(answer["error"]["message"])


async def test_a_model_is_registered_only_if_its_weights_exist(
    prose: Prose, open_api: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    api = await open_api()
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "config.json").write_text("{}")
    for wrong, why in (
        (f"{api.base_model}-typo", "no model called"),
        (str(empty), "the weights are missing"),
        ("nobody/has-this-model", "HF_HUB_OFFLINE is set"),
    ):
        spec = {"name": "agent", "base_model": wrong}
        answer = await api.ask("POST", "/v1/training/models", json=spec, status=422)
        assert answer["error"]["param"] == "base_model"
        assert why in answer["error"]["message"]
        prose(answer["error"]["message"])
        assert await api.ask("GET", "/v1/training/models") == []
    # The name is free for the corrected registration.
    assert (await api.register()).base_model == api.base_model
    # What is registered is not looked for again: a server may restart before a disk is mounted.
    copied = tmp_path / "copied"
    shutil.copytree(api.base_model, copied)
    await api.register(name="second", base_model=str(copied))
    shutil.rmtree(copied)
    await api.register(name="second", base_model=str(copied), status=200)


async def test_keys_of_other_programs_are_honoured_refused_or_named(prose: Prose, open_api: Open):
    api = await open_api(held=True)
    made = await api.register(
        rank=8, peft_args={"r": 2}, engine_args={"gpu_memory_utilization": 0.9}
    )
    assert (made.rank, made.not_applicable) == (2, ["engine_args.gpu_memory_utilization"])
    spec = {"name": "big", "base_model": api.base_model, "engine_args": {"tensor_parallel_size": 2}}
    answer = await api.ask("POST", "/v1/training/models", json=spec, status=400)
    prose(answer["error"]["message"])


async def test_a_name_of_two_projects_is_requested_with_its_project(prose: Prose, api: Api):
    other = await api.register(project="other")
    assert other.inference_name == "other/agent"
    assert (await api.ask("GET", AGENT))["inference_name"] == "default/agent"
    refusal = await api.refused(409)
    prose(refusal["error"]["message"])


async def test_an_unknown_model_is_not_found(prose: Prose, api: Api):
    answer = await api.ask("GET", "/v1/training/models/default/agnet", status=404)
    prose(answer["error"]["message"])
    answer = await api.refused(404, model="agnet")
    prose(answer["error"]["message"])


@pytest.mark.parametrize(
    ("fields", "path", "why"),
    [
        ({"defaults": {"learning_rat": 1}}, "defaults.learning_rat", "you mean 'learning_rate'?"),
        ({"defaults": {"epsilon": -1}}, "defaults.epsilon", "greater than 0"),
        ({"base_model": "a\x00b"}, "base_model", "Nothing was registered"),
        ({"base_model": "a/" + "b" * 300}, "base_model", "Nothing was registered"),
        ({"seed": 10**30}, "seed", "less than 9223372036854775808"),
        ({"name": "a/b"}, "name", "should match pattern"),
        ({"rank": 0}, "rank", "greater than 0"),
        ({"colour": "red"}, "colour", "not permitted"),
    ],
)
async def test_a_wrong_model_is_refused_by_its_field(
    open_api: Open, fields: dict[str, Any], path: str, why: str
):
    api = await open_api(held=True)
    spec = {"name": "agent", "base_model": api.base_model} | fields
    answer = await api.ask("POST", "/v1/training/models", json=spec, status=422)
    assert answer["error"]["param"] == path
    assert answer["detail"][0]["loc"] == ["body", *path.split(".")]
    assert why in answer["detail"][0]["msg"]
    assert await api.ask("GET", "/v1/training/models") == []


@pytest.mark.parametrize("value", ["1e999", "NaN"])
async def test_numbers_that_json_cannot_hold_are_refused(api: Api, value: str):
    text = '{"name": "b", "base_model": "c", "alpha": ' + value + "}"
    answer = await api.ask("POST", "/v1/training/models", content=text, status=422)
    assert answer["error"]["param"] == "alpha"
    text = '{"split": "val", "metrics": {"reward": ' + value + "}}"
    answer = await api.ask("POST", f"{AGENT}/metrics", content=text, status=422)
    assert answer["error"]["param"] == "metrics.reward"


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("", "http://127.0.0.1:8000/v1"),
        ("gpu.lan", "http://gpu.lan:8000/v1"),
        ("gpu.lan:7623", "http://gpu.lan:8000/v1"),
        ("[::1]:7623", "http://[::1]:8000/v1"),
        ("0.0.0.0:7623", "http://127.0.0.1:8000/v1"),
        ("a/b?c", "http://127.0.0.1:8000/v1"),
    ],
)
def test_the_address_is_the_one_the_caller_used(host: str, url: str):
    assert inference_url(Settings(), host) == url


def test_without_a_second_port_it_is_the_first():
    settings = Settings(inference_port=None)
    assert inference_url(settings, "gpu.lan:80", "https") == "https://gpu.lan:7623/v1"


async def test_preparing_loads_the_engine_and_writes_step_0(api: Api):
    assert await api.ask("GET", f"{AGENT}/checkpoints") == []
    info = await api.ask("POST", f"{AGENT}/prepare")
    assert info["step"] == 0
    (first,) = await api.ask("GET", f"{AGENT}/checkpoints")
    assert first["step"] == 0 and first["job"] is None
    assert await api.ask("POST", f"{AGENT}/prepare") == info


async def test_logged_metrics_choose_the_best_step(api: Api):
    await api.ask("POST", f"{AGENT}/prepare")
    body = {"split": "val", "metrics": {"reward": 0.5}}
    assert await api.ask("POST", f"{AGENT}/metrics", json=body) == {"step": 0}
    assert (await api.ask("GET", AGENT))["best_step"] == 0
    body = {"split": "val", "step": 4, "metrics": {"reward": 0.9}}
    assert await api.ask("POST", f"{AGENT}/metrics", json=body) == {"step": 4}
    # Step 4 is better but not retained.
    assert (await api.ask("GET", AGENT))["best_step"] == 0
    body = {"split": "val", "step": 0, "metrics": {"reward": -0.5}, "replace": True}
    await api.ask("POST", f"{AGENT}/metrics", json=body)
    (record,) = api.state.models.list()
    assert api.state.checkpoints.history(record.key)[-1]["replaces"] is True
    # The newest run decides, although the value without a run is higher.
    await api.ask(
        "POST", f"{AGENT}/metrics", json=body | {"run": "r1", "metrics": {"reward": -1.0}}
    )
    line = api.state.checkpoints.history(record.key)[-1]
    assert (line["run"], line["val/reward"]) == ("r1", -1.0)
    assert (await api.ask("GET", AGENT))["best_step"] == 0


async def test_metrics_that_are_sent_again_with_their_key_are_logged_once(prose: Prose, api: Api):
    await api.ask("POST", f"{AGENT}/prepare")
    (record,) = api.state.models.list()
    body = {"split": "val", "metrics": {"reward": 0.5}, "idempotency_key": "k"}
    sent = (api.ask("POST", f"{AGENT}/metrics", json=body) for _ in range(4))
    assert await asyncio.gather(*sent) == [{"step": 0}] * 4  # also at the same time
    api.state.checkpoints.write(record.key, 1, filler("step 1"))
    # The newest step is another one by now: the metrics stay those of step 0.
    assert await api.ask("POST", f"{AGENT}/metrics", json=body) == {"step": 0}
    (line,) = api.state.checkpoints.history(record.key)
    assert (line["step"], line["val/reward"]) == (0, 0.5)
    other = body | {"metrics": {"reward": 0.6}}
    refused = await api.ask("POST", f"{AGENT}/metrics", json=other, status=409)
    prose(refused["error"]["message"])
    # Another key is another measurement, and so is each request without one.
    for _ in range(2):
        body |= {"idempotency_key": None}
        await api.ask("POST", f"{AGENT}/metrics", json=body)
    await api.ask("POST", f"{AGENT}/metrics", json=body | {"idempotency_key": "l"})
    assert len(api.state.checkpoints.history(record.key)) == 4


# ---- jobs -------------------------------------------------------------------------------------


async def test_a_job_says_what_it_is_trained_with(open_api: Open):
    api = await open_api(held=True)
    await api.register(defaults={"learning_rate": 1e-4, "epsilon": 0.3})
    accepted = await api.submit(config={"epsilon": 0.1}, plot_tensors=True)
    config = accepted.config
    assert (config.learning_rate, config.epsilon, config.beta) == (1e-4, 0.1, 0.0)
    assert (accepted.state, accepted.plot_tensors) == ("queued", True)
    assert accepted.model == "default/agent" and accepted.counts == {"by_tokens": 2}
    assert (await api.ask("GET", f"{JOBS}/{accepted.id}"))["config"] == config.model_dump()


async def test_a_requested_learning_rate_replaces_the_list_of_the_model(open_api: Open):
    api = await open_api(held=True)
    await api.register(defaults={"learning_rates": [1e-4, 1e-5]})
    assert (await api.submit()).config.learning_rate_of(1) == 1e-5
    assert (await api.submit(config={"learning_rate": 1e-3})).config.learning_rate_of(1) == 1e-3


async def test_jobs_are_listed_newest_first(api: Api):
    await api.register(name="other")
    first = await api.submit()
    second = await api.submit(model="other")
    third = await api.submit(model="default/agent")
    await api.ask("POST", f"{JOBS}/{third.id}/cancel")

    async def ids(**query: Any) -> list[str]:
        return [one["id"] for one in await api.ask("GET", JOBS, params=query)]

    assert await ids() == [third.id, second.id, first.id]
    assert await ids(model="agent") == [third.id, first.id]
    assert await ids(state="cancelled") == [third.id]
    assert await ids(limit=1) == [third.id]
    assert (await api.ask("GET", JOBS, params={"state": "over"}, status=422))["detail"]
    await api.ask("GET", JOBS, params={"model": "nobody"}, status=404)
    await api.ask("GET", f"{JOBS}/job-0", status=404)


@pytest.mark.parametrize(
    ("config", "path"),
    [
        ({"learning_rte": 1e-5}, "config.learning_rte"),
        ({"colour": 1}, "config.colour"),
        ({"learning_rate": -1}, "config.learning_rate"),
        ({"learning_rate": "inf"}, "config.learning_rate"),
        ({"loss": "ppo"}, "config.loss"),
        ({"baseline": None}, "config.baseline"),
    ],
)
async def test_a_wrong_config_is_refused_by_its_key(
    prose: Prose, api: Api, config: dict[str, Any], path: str
):
    refusal = await api.refused(config=config)
    assert refusal["error"]["param"] == path
    prose(refusal["error"]["message"])
    assert await api.ask("GET", JOBS) == []


async def test_an_invalid_field_of_a_trajectory_is_named_by_its_path(api: Api):
    wrong = group(1.0, 0.0)
    wrong["trajectories"][1]["calls"][0]["completion_ids"][1] = 99999
    refusal = await api.refused(groups=[group(1.0, 0.0), wrong])
    loc = ["body", "groups", 1, "trajectories", 1, "calls", 0, "completion_ids", 1]
    assert [field["loc"] for field in refusal["detail"]] == [loc]
    assert (refusal["error"]["type"], refusal["exception"]) == (
        "invalid_request_error",
        "Unprocessable",
    )
    assert refusal["error"]["param"] == "groups.1.trajectories.1.calls.0.completion_ids.1"
    # And by pydantic where the types are wrong, in the same shape.
    wrong["trajectories"][1]["calls"][0]["completion_ids"][1] = "x"
    refusal = await api.refused(groups=[wrong])
    loc[2] = 0
    assert [field["loc"] for field in refusal["detail"]] == [loc]


async def test_text_that_cannot_be_written_is_refused(prose: Prose, api: Api):
    body = json.dumps(job(groups=[group(1.0, 0.0, example="\ud800")]))
    answer = await api.ask("POST", JOBS, content=body, status=422)
    prose(answer["error"]["message"])


async def test_the_error_for_groups_of_one_names_the_baseline_to_set(prose: Prose, api: Api):
    alone = [group(1.0), group(0.0)]
    refusal = await api.refused(groups=alone)
    assert refusal["error"]["param"] == "groups"
    prose(refusal["error"]["message"])
    await api.submit(groups=alone, config={"baseline": "batch"})
    # One of two failed: it was meant to be compared, and the job will say that it was not.
    failed = [{"type": "ValueError", "message": "boom"}]
    accepted = await api.submit(groups=[group(1.0, exceptions=failed)])
    assert accepted.counts == {"by_tokens": 1, "exceptions": 1}
    await api.submit(groups=alone, advance_when_flat=True)


@pytest.mark.parametrize("loss", ["grpo", "dpo", "sft"])
async def test_groups_without_trajectories_are_refused_as_such(api: Api, loss: str):
    async def refusal(*groups: dict[str, Any]) -> str:
        refused = await api.refused(groups=list(groups), config={"loss": loss})
        assert refused["error"]["param"] == "groups"
        return refused["error"]["message"]

    message = (
        "the groups contain no trajectories. Send the trajectories of each input as one group."
    )
    assert message in await refusal(group(), group())
    boom = {"type": "ValueError", "message": "boom"}
    message = (
        "the groups contain no trajectories (failed rollouts: 3, the first with 'ValueError: boom'). "
        "Correct the rollouts and send their trajectories."
    )
    assert message in await refusal(group(exceptions=[boom]), group(exceptions=[boom, boom]))


@pytest.mark.parametrize("loss", ["grpo", "dpo"])
async def test_groups_of_one_among_empty_groups_are_refused_as_such(
    prose: Prose, api: Api, loss: str
):
    refusal = await api.refused(groups=[group(1.0), group()], config={"loss": loss})
    prose(refusal["error"]["message"])


async def test_the_same_key_and_request_are_the_same_job(prose: Prose, api: Api):
    first = await api.submit(idempotency_key="k")
    assert (await api.submit(idempotency_key="k")).id == first.id
    refusal = await api.refused(409, idempotency_key="k", plot_tensors=True)
    prose(refusal["error"]["message"], first=first.id)
    assert (await api.submit()).id != first.id
    assert len(await api.ask("GET", JOBS)) == 2


async def test_repeating_a_request_starts_a_job_that_was_queued_but_not_started(
    open_api: Open, monkeypatch: pytest.MonkeyPatch
):
    api = await open_api()
    await api.register()

    def broken() -> None:
        raise StorageError("state.sqlite: Input/output error")

    with monkeypatch.context() as disk:
        disk.setattr(api.state.service, "wake", broken)  # after the job is on disk
        await api.refused(503, idempotency_key="k")
    (queued,) = await api.ask("GET", JOBS)
    assert queued["state"] == "queued"
    repeated = await api.submit(idempotency_key="k")
    assert repeated.id == queued["id"]
    await api.ended(repeated)


async def test_a_full_queue_refuses_new_jobs_and_accepts_repeated_ones(open_api: Open):
    api = await open_api(held=True, max_queued_jobs=2)
    await api.register()
    running = await api.submit()
    async with asyncio.timeout(PATIENCE_S):
        while api.state.jobs.get(running.id).state != "running":
            await asyncio.sleep(0.01)
    first, _ = await api.submit(idempotency_key="k"), await api.submit()
    answer = await api.client.post(JOBS, json=job())
    assert answer.status_code == 429 and answer.headers["retry-after"] == "10"
    assert "2 jobs are queued, the maximum of this server" in answer.text
    assert (await api.submit(idempotency_key="k")).id == first.id
    await api.ask("POST", f"{JOBS}/{first.id}/cancel")
    await api.submit()


async def test_jobs_sent_at_once_do_not_pass_the_limit_of_the_queue(open_api: Open):
    api = await open_api(held=True, max_queued_jobs=3)
    await api.register()
    running = await api.submit()
    async with asyncio.timeout(PATIENCE_S):
        while api.state.jobs.get(running.id).state != "running":
            await asyncio.sleep(0.01)
    # Each is sent twice: a repetition is the same job, also when that job has filled the queue.
    keys = [f"key {n}" for n in range(8) for _ in range(2)]
    answers = await asyncio.gather(
        *(api.client.post(JOBS, json=job(idempotency_key=key)) for key in keys)
    )
    assert sum(api.state.jobs.waiting().values()) == 3
    accepted = {key: a.json()["id"] for key, a in zip(keys, answers, strict=True) if a.is_success}
    assert len(accepted) == 3
    for key, answer in zip(keys, answers, strict=True):
        if key in accepted:
            assert (answer.status_code, answer.json()["id"]) == (202, accepted[key])
        else:
            assert answer.status_code == 429 and answer.headers["retry-after"] == "10"


async def test_cancelling_a_queued_job_ends_it(api: Api):
    await api.submit()
    waiting = await api.submit()
    cancelled = JobInfo.model_validate(await api.ask("POST", f"{JOBS}/{waiting.id}/cancel"))
    assert cancelled.state == "cancelled"
    assert [event["event"] for event in await api.events(waiting)] == ["queued", "cancelled"]
    assert await api.ask("POST", f"{JOBS}/{waiting.id}/cancel") == cancelled.model_dump()
    await api.ask("POST", f"{JOBS}/job-0/cancel", status=404)


async def record(api: Api, *rollouts: str) -> list[dict[str, Any]]:
    """One recorded call per rollout; a group that refers to them."""
    language = await api.state.serving.engines.tokenizer(api.base_model)
    for rollout in rollouts:
        call = RecordedCall(
            id=f"call-{rollout}",
            rollout=rollout,
            index=0,
            model="default/agent",
            requested_model="agent",
            base_model=api.base_model,
            adapter_sha256=None,
            fingerprint=language.fingerprint,
            created_at=0.0,
            messages=None,
            reply={},
            finish="stop",
            call=by_tokens().calls[0],
        )
        api.state.calls.add([call])
    scored = [{"rollout": rollout, "reward": i} for i, rollout in enumerate(rollouts)]
    return [{"trajectories": scored}]


async def test_calls_are_kept_until_the_job_that_needs_them_has_ended(open_api: Open):
    api = await open_api()
    await api.register()
    body = job(groups=await record(api, "a", "b"), idempotency_key="k")
    accepted = JobInfo.model_validate(await api.ask("POST", JOBS, json=body, status=202))
    assert accepted.counts == {"by_rollout": 2}
    await api.ended(accepted)
    assert api.state.calls.prune(max_age_s=0, max_bytes=0) == 2
    # Sent again after its calls are gone, it is still the same job.
    assert (await api.ask("POST", JOBS, json=body, status=202))["id"] == accepted.id


async def test_calls_of_a_waiting_job_are_not_pruned(api: Api):
    groups = await record(api, "a", "b")
    await api.submit()  # so that the next one waits
    waiting = await api.submit(groups=groups)
    assert api.state.calls.prune(max_age_s=0, max_bytes=0) == 0
    await api.ask("POST", f"{JOBS}/{waiting.id}/cancel")
    assert api.state.calls.prune(max_age_s=0, max_bytes=0) == 2
