"""The results of a job, over HTTP: events, tokens, checkpoints, a model with other answers."""

import json
import zlib
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.patience import PATIENCE_S
from tests.prose import Prose
from tests.server.api import AGENT, JOBS, Api, Open, group
from tests.server.conftest import MakeServer, Server
from tests.server.small_server import LearnerHere
from tests.server.worlds import by_tokens

from hone.inference.embedded.engine import EmbeddedEngine
from hone.learner.picture import PICTURE
from hone.server.settings import Settings
from hone.server.state import State
from hone.types import Call, CheckpointInfo, ModelKey, ModelSpec, TrainConfig

# ---- events and tokens ------------------------------------------------------------------------


async def test_events_follow_a_job_to_its_end(open_api: Open):
    api = await open_api()
    await api.register()
    accepted = await api.submit(config={"learning_rate": 1e-3})
    events = await api.events(accepted)
    kinds = [event["event"] for event in events if event["event"] != "progress"]
    assert kinds == ["queued", "started", "learned", "saved", "published", "proved", "done"]
    ids = [int(event["id"]) for event in events]
    assert ids == sorted(set(ids))
    done = json.loads(events[-1]["data"])
    assert done["job"] == accepted.id and done["data"]["step"] == 1
    resumed = await api.events(accepted, headers={"Last-Event-ID": events[-2]["id"]})
    assert resumed == events[-1:]
    assert await api.events(accepted, params={"after": ids[-2]}) == events[-1:]
    assert await api.events(accepted, headers={"Last-Event-ID": events[-1]["id"]}) == []
    assert (await api.ask("GET", AGENT))["step"] == 1
    where = f"{JOBS}/{accepted.id}/events"
    await api.ask("GET", where, headers={"Last-Event-ID": "x"}, status=422)
    await api.ask("GET", f"{JOBS}/job-0/events", status=404)


@pytest.mark.e2e
async def test_tokens_of_a_job_page_by_page(api: Api):
    forced = Call(
        prompt_ids=[40, 41],
        completion_ids=[42, 43],
        logprobs=[0.0, -2.0],
        forced=[0],
    )
    context = Call(prompt_ids=[50], completion_ids=[51], trained=False)
    trajectories = [
        {"calls": [forced.model_dump(), context.model_dump()], "reward": 1.0},
        {"calls": [by_tokens().calls[0].model_dump()], "reward": 0.0},
    ]
    accepted = await api.submit(
        groups=[{"trajectories": trajectories}], config={"scale_rewards": False}
    )
    where = f"{JOBS}/{accepted.id}/samples"
    page = await api.ask("GET", where)
    assert (page["job"], page["total"], page["offset"]) == (accepted.id, 11, 0)
    seen = [
        (t["trajectory"], t["call"], t["place"], t["id"], t["kind"], t["logprob"], t["advantage"])
        for t in page["tokens"]
    ]
    # Rewards 1 and 0 about their mean: advantages 0.5 and -0.5.
    assert seen == [
        (0, 0, 0, 40, "prompt", None, None),
        (0, 0, 1, 41, "prompt", None, None),
        (0, 0, 2, 42, "forced", 0.0, None),
        (0, 0, 3, 43, "sampled", -2.0, 0.5),
        (0, 1, 0, 50, "prompt", None, None),
        (0, 1, 1, 51, "sampled", None, None),
        (1, 0, 0, 1, "prompt", None, None),
        (1, 0, 1, 2, "prompt", None, None),
        (1, 0, 2, 3, "prompt", None, None),
        (1, 0, 3, 4, "sampled", -1.0, -0.5),
        (1, 0, 4, 5, "sampled", -2.0, -0.5),
    ]
    language = await api.state.serving.engines.tokenizer(api.base_model)
    assert page["tokens"][0]["text"] == language.template.piece(40).decode(errors="replace") != ""
    pages = [
        await api.ask("GET", where, params={"offset": offset, "limit": 4})
        for offset in (0, 4, 8, 12)
    ]
    assert [token for part in pages for token in part["tokens"]] == page["tokens"]
    await api.ask("GET", where, params={"offset": -1}, status=422)
    await api.ask("GET", f"{JOBS}/job-0/samples", status=404)


@pytest.mark.e2e
async def test_tokens_that_were_pruned_are_gone_and_said_to_be(prose: Prose, open_api: Open):
    api = await open_api()
    await api.register()
    job = await api.ended(await api.submit())
    where = f"{JOBS}/{job.id}/samples"
    await api.ask("GET", where)
    assert api.state.jobs.prune(max_age_s=0, max_bytes=0) == 1
    error = (await api.ask("GET", where, status=410))["error"]
    assert error["code"] == "pruned"
    prose(error["message"])
    assert (await api.ask("GET", f"{JOBS}/{job.id}"))["metrics"] == job.metrics


@pytest.mark.e2e
async def test_a_job_that_is_drawn_keeps_the_learners_logprobs(
    open_api: Open, monkeypatch: pytest.MonkeyPatch
):
    api = await open_api()
    await api.register()
    # The answer 4 6 is worth nothing more than 4 7: only the first group is learned from.
    groups = [group(1.0, 0.0), group(0.5, 0.5)]
    accepted = await api.submit(groups=groups, plot_tensors=True)
    ended = await api.ended(accepted)
    assert ended.step == 1
    directory = api.state.checkpoints.model_dir(ModelKey("default", "agent")) / "checkpoints/0001"
    assert (directory / PICTURE).read_bytes().startswith(b"\x89PNG")
    with monkeypatch.context() as here:  # a worker process unpacks the groups, not the server
        here.delattr(zlib, "decompress")
        tokens = (await api.ask("GET", f"{JOBS}/{accepted.id}/samples"))["tokens"]
    known = [(t["group"], t["trajectory"], t["place"], t["learner_logprob"]) for t in tokens]
    known = [one for one in known if one[3] is not None]
    assert [one[:3] for one in known] == [(0, 0, 3), (0, 0, 4), (0, 1, 3), (0, 1, 4)]
    # Both begin with the same token after the same prompt.
    assert known[0][3] == known[2][3] < 0 and known[1][3] != known[3][3]
    learned = json.loads((await api.events(accepted))[-1]["data"])["data"]["metrics"]
    assert learned["learn/labels"] == 4


# ---- checkpoints ------------------------------------------------------------------------------


async def test_checkpoints_are_listed_kept_and_deleted(prose: Prose, open_api: Open):
    api = await open_api()
    await api.register()
    for _ in range(4):
        config = {"learning_rate": 1e-3, "max_staleness": None}
        await api.ended(await api.submit(config=config))
    where = f"{AGENT}/checkpoints"
    checkpoints = [CheckpointInfo.model_validate(one) for one in await api.ask("GET", where)]
    assert [one.step for one in checkpoints] == [0, 1, 2, 3, 4]
    assert checkpoints[0].job is None and checkpoints[4].job is not None
    assert checkpoints[4].metrics["learn/optimizer_steps"] == 1
    assert len({one.sha256 for one in checkpoints}) == 5

    assert await api.ask("DELETE", f"{where}/0") == [0]
    await api.ask("DELETE", f"{where}/0", status=404)
    answer = await api.ask("DELETE", f"{where}/4", status=409)
    prose(answer["error"]["message"])
    answer = await api.ask("DELETE", where, status=422)
    prose(answer["error"]["message"])
    metrics = {"split": "val", "step": 2, "metrics": {"reward": 1.0}}
    await api.ask("POST", f"{AGENT}/metrics", json=metrics)
    query = {"keep_last": 1, "keep_best": "val/reward"}
    assert await api.ask("DELETE", where, params=query) == [1, 3]
    assert await api.ask("DELETE", where, params={"keep": [2, 9]}) == []
    assert await api.ask("DELETE", where, params={"keep": [9]}) == [2]
    assert [one["step"] for one in await api.ask("GET", where)] == [4]


# ---- over a real connection -------------------------------------------------------------------


def test_events_arrive_while_the_job_goes_on(make_server: MakeServer, tiny_model: Path):
    """Not collected on the way: the first one is read before the second has happened."""
    server = make_server()
    state = server.state
    record = state.models.register(ModelSpec(name="agent", base_model=str(tiny_model)))
    added = state.jobs.add(
        model=record, groups=b"", config=TrainConfig(), counts={}, request_sha256="0" * 64
    )
    url = f"{server.control_url}{JOBS}/{added.id}/events"
    with httpx.stream("GET", url, timeout=PATIENCE_S) as answer:
        lines = (line for line in answer.iter_lines() if line.startswith("event: "))
        assert next(lines) == "event: queued"
        state.jobs.request_cancel(added.id)
        assert next(lines) == "event: cancelled"
        assert next(lines, None) is None


def test_from_chat_to_a_better_model(make_server: MakeServer, tiny_model: Path, tmp_path: Path):
    """Agents sample, are scored by rollout or by choices, and the next answer is another model's."""
    engine = EmbeddedEngine.open(str(tiny_model), device="cpu")
    settings = Settings(root=tmp_path / "real", device="cpu", learner_threads=1)
    state = State(settings, open_engine=lambda name: engine, start_learner=LearnerHere)
    server = Server(state, engine).start()
    try:
        with httpx.Client(base_url=server.control_url, timeout=PATIENCE_S) as client:
            spec = {"name": "agent", "base_model": str(tiny_model)}
            assert client.post("/v1/training/models", json=spec).status_code == 201
            groups, wanted = _sampled_groups(client)
            body = {"model": "agent", "groups": groups, "config": {"learning_rate": 1e-2}}
            accepted = client.post(JOBS, json=body)
            assert accepted.status_code == 202, accepted.text
            # Two answers by their rollout, two by the choices that came back; none is rendered.
            assert accepted.json()["counts"] == {"by_rollout": 4, "matched": 4}
            events = client.get(f"{JOBS}/{accepted.json()['id']}/events").text
            assert "event: proved" in events and events.rstrip().split("\n")[-2] == "event: done"
            done = client.get(f"{JOBS}/{accepted.json()['id']}").json()
            # The sampler's logprobs are the learner's: the same tokens after the same prompts.
            assert done["metrics"]["learn/mismatch_kl"] < 1e-6
            assert (
                done["metrics"]["learn/labels_exact"] == done["metrics"]["learn/labels"] == wanted
            )
            assert done["step"] == 1
            answer = client.post("/v1/chat/completions", json=_question("again"))
            assert answer.json()["choices"][0]["policy_step"] == 1
    finally:
        server.stop()


def _question(text: str, **fields: Any) -> dict[str, Any]:
    question = {"role": "user", "content": text}
    return {"model": "agent", "messages": [question], "max_tokens": 8, "logprobs": True} | fields


def _sampled_groups(client: httpx.Client) -> tuple[list[Any], int]:
    """Two groups of two-turn talks at temperature 0.7, and how many tokens were sampled in them."""
    groups, tokens = [], 0
    for g in range(2):
        trajectories: list[dict[str, Any]] = []
        for t in range(2):
            messages: list[Any] = [{"role": "user", "content": f"the weather {g}"}]
            trajectory: dict[str, Any] = {"reward": float(t)}
            for turn in ("and the wind", ""):
                plain = [item.get("message", item) for item in messages]
                body = _question("", messages=plain, temperature=0.7, seed=t)
                at = f"/rollout/g{g}-t{t}" if t else ""
                answer = client.post(f"{at}/v1/chat/completions", json=body)
                (choice,) = answer.raise_for_status().json()["choices"]
                tokens += len(choice["token_ids"])
                messages += [choice, {"role": "user", "content": turn}]
            form = {"rollout": f"g{g}-t{t}"} if t else {"messages_and_choices": messages}
            trajectories.append(trajectory | form)
        groups.append({"trajectories": trajectories})
    return groups, tokens
