"""RolloutBuilder over a real server with a tiny model: groups, targets, values."""

import asyncio
import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.finetune.worlds import World, metadata, world
from tests.prose import Prose

import hone
from hone import LocalBackend
from hone.errors import ConfigError, Conflict, PolicyFailure
from hone.files.event_log import EventLog, read
from hone.files.events import RolloutDone
from hone.finetune.base import EpisodeItem, EpisodeItemRole, TrajectoryCollection
from hone.finetune.builder import RolloutBuilder, RolloutBuilderConfig
from hone.finetune.rerender import conversations
from hone.workflow.function import Function
from hone.workflow.llm import LLM

USER = EpisodeItemRole.USER
ASSISTANT = EpisodeItemRole.ASSISTANT


# ---- groups -------------------------------------------------------------------------------------


async def test_groups_by_example_with_what_the_server_recorded(
    prose: Prose,
    server: LocalBackend,
    tiny_model: Path,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
):
    caplog.set_level("INFO", "hone")
    async with world(server, tiny_model, generations=3) as w:
        w.bind(w.say, ["one", "two"])
        with EventLog(tmp_path / "events.jsonl") as events:
            meta = {"epoch": 4, "round": 1, "session": 2, "events": events}
            await w.builder.start_run(w.run_id, meta)
            names = [task.get_name() for task in w.builder.evaluation_runs[w.run_id]]
            assert names == [f"eval-run-{w.run_id}-gen-{k}" for k in range(3)]
            with pytest.raises(Conflict) as caught:
                await w.builder.start_run(w.run_id)
            prose(caught, run_id=w.run_id)
            collection = await w.builder.finalize(w.run_id, meta)
        assert w.builder.evaluation_runs == {}
        assert [len(group) for group in collection.trajectories] == [3, 3]
        first = collection.trajectories[0][1]
        details = metadata(first)
        assert first.rollout == f"{w.run_id}:4.1.0.1~2"
        assert {k: details[k] for k in ("id", "run_id", "epoch", "round", "generation")} == {
            "id": "e0", "run_id": w.run_id, "epoch": 4, "round": 1, "generation": 1,
        }  # fmt: skip
        assert details["reasoning"] == {"why": "length"}
        [recorded] = await w.adapter.recorded(first.rollout)
        assert first.trained_calls == [recorded.id]
        question, answer = first.episode
        assert isinstance(question, EpisodeItem) and isinstance(answer, EpisodeItem)
        assert (question.role, question.content) == (USER, "one")
        assert (answer.role, answer.content) == (ASSISTANT, recorded.reply["content"])
        assert answer.logprobs == {}, "the server has them"
        assert first.reward == len(answer.content)
        assert len({t.rollout for g in collection.trajectories for t in g}) == 6
        assert w.builder.dropped == Counter()
        told_events = read(tmp_path / "events.jsonl")
        assert [e.type for e in told_events] == ["rollout"] * 6
        ended = [(e.calls, e.failure_kind) for e in told_events if isinstance(e, RolloutDone)]
        assert ended == [(1, None)] * 6
        # What is built can be trained.
        ref = await w.adapter.submit(collection)
        status = await w.adapter.wait_until_complete(ref)
        assert (status.metadata or {})["counts"]["by_rollout"] == 6
    lines = [record.getMessage() for record in caplog.records]
    assert f"Starting 3 evaluation runs for run_id: {w.run_id}" in lines
    assert f"Built 6 trajectories across 2 examples for run_id: {w.run_id}" in lines


@pytest.mark.e2e
async def test_the_whole_output_of_learner_and_engine_is_in_files_beside_the_servers_log(
    process_server: LocalBackend, tiny_model: Path
):
    async with world(process_server, tiny_model, generations=3) as w:
        w.bind(w.say, ["one", "two"])
        ref = await w.adapter.submit(await w.collect({"epoch": 0, "round": 0}))
        status = await w.adapter.wait_until_complete(ref)
        logs = process_server.root / "logs"
        learner, job = (logs / "learner.log").read_text(), (status.metadata or {})["job"]
        assert re.search(
            rf"\[\d+\] INFO hone.learner: job {job}: .*trajectories by group \[3, 3\]", learner
        )
        assert re.search(rf"job {job}: 1 optimizer steps in .*metrics {{.*learn/loss", learner)
        engine = (logs / "engine.log").read_text()
        assert f"{tiny_model}: EmbeddedEngine of" in engine
        assert f"loaded {w.adapter.model_name}@1 (" in engine


async def test_all_generations_share_one_budget(server: LocalBackend, tiny_model: Path):
    running, most = 0, 0

    async def agent(question: str) -> str:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        return question

    async with world(server, tiny_model, generations=4) as w:
        w.bind(agent, ["a", "b", "c", "d"], max_concurrency=3)
        collection = await w.collect()
        assert most == 3
        # It never asked the model, so there is nothing to train.
        assert collection.trajectories == []
        assert w.builder.dropped == {"no_calls": 16}


async def test_unknown_runs_and_missing_parts(prose: Prose, server: LocalBackend, tiny_model: Path):
    builder = RolloutBuilder(RolloutBuilderConfig())
    assert builder.num_generations == 2
    with pytest.raises(ValueError, match="No evaluation runs found for run_id: nobody"):
        await builder.finalize("nobody")
    with pytest.raises(ConfigError) as caught:
        await builder.start_run("r")
    prose(caught)
    async with world(server, tiny_model) as w:
        w.bind(w.say, ["one"])
        builder.evaluation = w.builder.evaluation
        with pytest.raises(ConfigError) as caught:
            await builder.start_run("r")
        prose(caught)


async def test_one_generation_still_gives_groups_by_example(server: LocalBackend, tiny_model: Path):
    async with world(server, tiny_model, generations=1) as w:
        w.bind(w.say, ["one", "two", "three"])
        assert [len(g) for g in (await w.collect()).trajectories] == [1, 1, 1]


async def test_small_groups_are_dropped_and_counted(server: LocalBackend, tiny_model: Path):
    async with world(server, tiny_model, generations=2, min_group_size=2) as w:
        runs = Counter[str]()

        async def agent(question: str) -> str:
            runs[question] += 1
            if question == "two" and runs[question] == 1:
                raise PolicyFailure("gave up", reason="step_limit")
            return await w.say(question)

        w.bind(agent, ["one", "two"])
        collection = await w.collect()
        assert [metadata(g[0])["id"] for g in collection.trajectories] == ["e0"]
        assert w.builder.dropped == {"policy/step_limit": 1, "small_group": 1}


def test_its_own_log(tmp_path: Path):
    builder = RolloutBuilder(RolloutBuilderConfig(num_generations=4))
    metrics = {"avg": 0.5, "bad": float("nan"), "num_generations": 8, "name": "mine"}
    builder.log_progress("r1", metrics, str(tmp_path))
    [line] = (tmp_path / "trajectory_builder_r1.jsonl").read_text().splitlines()
    entry = json.loads(line)
    assert entry.pop("timestamp")
    assert entry == {"run_id": "r1", **metrics, "bad": "NaN"}


# ---- targets ------------------------------------------------------------------------------------


def nested(w: World) -> Callable[[str], Any]:
    """The workflow asks once, then calls `search`, which asks, then calls `rank`, which asks."""

    async def rank(question: str) -> str:
        return await w.say(f"rank {question}")

    async def search(question: str) -> str:
        answer = await w.say(f"search {question}")
        return answer + await inner(question)

    inner, outer = Function.of("rank", rank), Function.of("search", search)

    async def agent(question: str) -> str:
        return await w.say(f"plan {question}") + await outer(question)

    return agent


@pytest.mark.parametrize(
    ("targets", "prompts", "left"),
    [
        (["<workflow>"], ["plan", "search", "rank"], 0),
        (["search"], ["search"], 2),
        (["rank"], ["rank"], 2),
        (["search", "rank"], ["search", "rank"], 1),
        (["<workflow>", "rank"], ["plan", "search", "rank"], 0),
    ],
)
async def test_only_calls_of_the_target_functions_are_trained(
    server: LocalBackend, tiny_model: Path, targets: list[str], prompts: list[str], left: int
):
    async with world(server, tiny_model, target_functions=targets) as w:
        w.bind(nested(w), ["x"])
        collection = await w.collect()
        for trajectory in collection.trajectories[0]:
            talks = conversations(trajectory)
            assert [talk[0].content for talk in talks] == [f"{word} x" for word in prompts]
            recorded = await w.adapter.recorded(trajectory.rollout)
            trained = [c.id for c in recorded if c.messages[0]["content"].split()[0] in prompts]  # pyright: ignore[reportOptionalSubscript]
            assert trajectory.trained_calls == trained
        assert w.builder.dropped == ({"call/not_target_function": 2 * left} if left else {})
        ref = await w.adapter.submit(collection)
        details = (await w.adapter.wait_until_complete(ref)).metadata or {}
        assert details["counts"]["by_rollout"] == 2 * len(prompts)


async def test_a_target_that_no_call_comes_from(server: LocalBackend, tiny_model: Path):
    async with world(server, tiny_model, target_functions=["nobody"]) as w:
        w.bind(nested(w), ["x"])
        assert (await w.collect()).trajectories == []
        assert w.builder.dropped == {"not_target_function": 2}


@pytest.mark.parametrize("spelling", ["actor", "model name"])
async def test_only_calls_to_the_target_model_are_trained_by_either_spelling(
    server: LocalBackend, tiny_model: Path, spelling: str
):
    """Two entries of `llms` reach the model in training under two names; one is the target."""
    async with world(server, tiny_model) as w:
        base = str(tiny_model)
        actor = LLM(name="actor", base_url=w.llm.base_url, model=base, params={"max_tokens": 3})
        w.builder.llm_names = lambda key: frozenset({actor.model} if key == "actor" else ())
        assert w.builder.run_config is not None
        w.builder.run_config.target_model = "actor" if spelling == "actor" else base

        async def agent(question: str) -> str:
            messages = [{"role": "user", "content": f"act {question}"}]
            answer = await actor.chat(messages)
            return (answer.choices[0].message.content or "") + await w.say("criticise")

        w.bind(agent, ["x"])
        [group] = (await w.collect()).trajectories
        for trajectory in group:
            assert [talk[0].content for talk in conversations(trajectory)] == ["act x"]
        assert w.builder.dropped == {"call/not_target_model": 2}
        await actor.close()


async def test_calls_to_other_models_are_context(server: LocalBackend, tiny_model: Path):
    async with world(server, tiny_model) as w:

        async def agent(question: str) -> str:
            judge = await w.say("judge", model=str(tiny_model) + "@0")
            return judge + await w.say(question) + await w.say("greedy", temperature=0)

        w.bind(agent, ["x"])
        [group] = (await w.collect()).trajectories
        assert [len(t.trained_calls or ()) for t in group] == [1, 1]
        assert w.builder.dropped == {"call/other_model": 2, "call/greedy": 2}


# ---- conversations and values ---------------------------------------------------------------------


async def test_turns_extend_a_conversation_and_a_new_prompt_begins_another(
    server: LocalBackend, tiny_model: Path
):
    async with world(server, tiny_model) as w:

        async def agent(question: str) -> str:
            talk: list[Any] = [{"role": "system", "content": "short"}]
            for turn in ("a", "b"):
                talk.append({"role": "user", "content": f"{question} {turn}"})
                answer = await w.llm.chat(talk)
                talk.append({"role": "assistant", "content": answer.choices[0].message.content})
            return await w.say("another")

        w.bind(agent, ["x"])
        [group] = (await w.collect()).trajectories
        for trajectory in group:
            first, second = conversations(trajectory)
            roles = [item.role.value for item in first]
            assert roles == ["system", "user", "assistant", "user", "assistant"]
            assert [item.role.value for item in second] == ["user", "assistant"]
            assert len(trajectory.trained_calls or ()) == 3


async def test_a_step_s_value_belongs_to_the_last_trained_call_before_it(
    server: LocalBackend, tiny_model: Path
):
    async with world(server, tiny_model) as w:
        runs = 0

        async def agent(question: str) -> str:
            nonlocal runs
            runs += 1
            if runs > 1:
                return await w.say(question)  # tells nothing
            hone.step("early", value=100.0)  # before any call: belongs to none
            await w.say("first")
            hone.step("move", value=0.5, cell=3)
            hone.step("move", value=0.25)
            hone.step("note")
            await w.say("second")
            await w.say("not trained", temperature=0)
            hone.step("end", value=2.0)
            return "done"

        w.bind(agent, ["x"])
        [group] = (await w.collect()).trajectories
        values = sorted((t.shaped_rewards or [] for t in group), key=len)
        # 0.5 + 0.25 after the first call; 2.0 after the second, since the third is not trained.
        assert values == [[0.0], [0.75, 2.0]]
        ref = await w.adapter.submit(
            TrajectoryCollection(trajectories=[group], run_id=w.run_id, metadata={"key": "shaped"})
        )
        status = await w.adapter.wait_until_complete(ref)
        assert status.status.value == "completed", status.message
