"""A reward that compares rollouts: `_type: ruler` over a real server and a scripted judge."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest_asyncio
from tests.evaluation.made import item
from tests.finetune.worlds import World, metadata, world
from tests.patience import PATIENCE_S
from tests.workflow.endpoint import Endpoint, Reply, serving

from hone import LocalBackend
from hone.errors import PolicyFailure
from hone.evaluation.groups import RolloutGroup
from hone.evaluation.judge import VerdictCache
from hone.evaluation.ruler import Ruler, RulerConfig
from hone.finetune.journal import Journal
from hone.workflow.llm import LLM


class Judge(Endpoint):
    """Scores each trajectory by the number it says: n / 10."""

    def reply_to(self, body: dict[str, Any]) -> Reply:
        text = body["messages"][1]["content"]
        outputs = re.findall(r'id="(\d+)">.*?"role": "output", "content": "(\d)', text, re.DOTALL)
        # In another order than they were asked for.
        scores = {id: {"explanation": n, "score": int(n) / 10} for id, n in outputs[::-1]}
        return self.replies.pop(0) if self.replies else Reply(json.dumps({"scores": scores}))


@pytest_asyncio.fixture
async def judge() -> AsyncIterator[tuple[Judge, LLM]]:
    endpoint = Judge()
    async with serving(endpoint) as url:
        llm = LLM(base_url=url, model="wise", name="judge_llm", max_retries=0)
        yield endpoint, llm
        await llm.close()


def ruler(llm: LLM, cache: Path | None = None, **fields: Any) -> Ruler:
    config = RulerConfig.model_validate({"llm": "judge_llm", **fields})
    return Ruler(
        config, llm, max_concurrency=4, cache=None if cache is None else VerdictCache(cache)
    )


class Agents:
    """Agents that ask the model, then say a number of their own: 1, 2, 3, ..."""

    def __init__(self, w: World) -> None:
        self.w, self.numbers = w, iter(range(1, 10))
        self.held: dict[int, asyncio.Event] = {}
        self.failing: set[int] = set()
        self.unreachable: set[int] = set()

    async def run(self, question: str) -> str:
        number = next(self.numbers)
        await self.w.say(question)
        if number in self.held:
            await self.held[number].wait()
        if number in self.failing:
            raise PolicyFailure("gave up", reason="step_limit")
        if number in self.unreachable:
            raise ConnectionError("no environment")
        return str(number)


async def test_the_rollouts_of_an_example_are_scored_together(
    server: LocalBackend, tiny_model: Path, judge: tuple[Judge, LLM]
):
    requests, llm = judge
    async with world(server, tiny_model, generations=3) as w:
        agents = Agents(w)
        agents.failing = {2}
        w.bind(agents.run, ["one", "two"], ruler(llm))
        collection = await w.collect()
    assert len(requests.bodies) == 2, "one request for each example"
    rewards = sorted(t.reward for group in collection.trajectories for t in group)
    # Rollout 2 failed because of the model: the others of its example are compared without it, and
    # it is trained with the smaller of 0 and the lowest score.
    assert rewards == [0.0, 0.1, 0.3, 0.4, 0.5, 0.6]
    assert sorted(len(group) for group in collection.trajectories) == [3, 3]
    for trajectory in (t for group in collection.trajectories for t in group):
        if trajectory.reward == 0.0:
            continue
        reasoning = metadata(trajectory)["reasoning"]
        assert (
            reasoning["reasoning"] == str(round(trajectory.reward * 10))
            and reasoning["judge"] == "wise"
        )


async def test_a_judge_that_fails_gives_the_group_no_reward(
    server: LocalBackend, tiny_model: Path, judge: tuple[Judge, LLM]
):
    requests, llm = judge
    requests.replies = [Reply("both are fine")] * 2
    async with world(server, tiny_model) as w:
        w.bind(Agents(w).run, ["one"], ruler(llm, attempts=2))
        assert (await w.collect()).trajectories == []
        assert w.builder.dropped == {"infrastructure/evaluator": 2}
        assert w.ran["one"] == 2, "the agent is not run again for it"


async def test_a_killed_round_goes_on_with_what_had_ended(
    server: LocalBackend, tiny_model: Path, judge: tuple[Judge, LLM], tmp_path: Path
):
    requests, llm = judge
    async with world(server, tiny_model, generations=3) as w:
        agents = Agents(w)
        agents.held = {3: asyncio.Event(), 6: asyncio.Event()}
        w.bind(agents.run, ["one", "two"], ruler(llm, tmp_path / "cache"), max_concurrency=3)
        with Journal.open(tmp_path / "run", {}) as journal:
            meta = {"journal": journal, "epoch": 2}
            await w.builder.start_run(w.run_id, meta)
            waiting = journal.unscored("train", 2)
            async with asyncio.timeout(PATIENCE_S):
                while not waiting.exists() or waiting.read_bytes().count(b"\n") < 2:
                    await asyncio.sleep(0.01)
            await w.builder.cancel()
            assert requests.bodies == [] and journal.records("train", 2) == []
        w.builder.evaluation_runs.clear()
        before = w.ran.copy()
        waiting.write_bytes(waiting.read_bytes() + b'{"round": 0, "exa')  # as a kill leaves it
        agents.held.clear()
        with Journal.open(tmp_path / "run", {}) as journal:
            meta = {"journal": journal, "epoch": 2, "session": 2}
            collection = await w.collect(meta)
            assert [len(group) for group in collection.trajectories] == [3, 3]
            assert w.ran.total() == before.total() + 4, "two had ended"
            assert len(requests.bodies) == 2 and not waiting.exists()
            first = {r.rollout for r in journal.records("train", 2) if r.rollout.endswith("~1")}
            assert len(first) == 2 and all(r.calls == 1 for r in journal.records("train", 2))
            rewards = {r.rollout: r.reward for r in journal.records("train", 2)}
            again = await w.collect(meta)
            assert {t.rollout: t.reward for g in again.trajectories for t in g} == rewards
            assert len(requests.bodies) == 2, "a scored group is not judged again"


async def test_an_output_with_a_secret_is_not_scored_without_it_after_a_kill(
    server: LocalBackend, tiny_model: Path, judge: tuple[Judge, LLM], tmp_path: Path
):
    requests, llm = judge
    async with world(server, tiny_model, generations=2) as w:
        agents = Agents(w)
        agents.held = {2: asyncio.Event()}

        async def run(question: str) -> str:
            return f"{await agents.run(question)}: api_key=k3y-1234567890"

        w.bind(run, ["one"], ruler(llm), max_concurrency=2)
        with Journal.open(tmp_path / "run", {}) as journal:
            await w.builder.start_run(w.run_id, {"journal": journal})
            waiting = journal.unscored("train", 0)
            async with asyncio.timeout(PATIENCE_S):
                while not waiting.exists() or not waiting.read_bytes().endswith(b"\n"):
                    await asyncio.sleep(0.01)
            await w.builder.cancel()
            assert "k3y" not in waiting.read_text("utf-8")
        w.builder.evaluation_runs.clear()
        with Journal.open(tmp_path / "run", {}) as journal:
            await w.collect({"journal": journal, "session": 2})
            assert all(r.rollout.endswith("~2") for r in journal.records("train", 0)), "both again"
    (compared,) = [body["messages"][1]["content"] for body in requests.bodies]
    assert compared.count("k3y-1234567890") == 2 and "hidden" not in compared


async def test_a_rollout_of_a_later_start_is_compared_with_those_of_the_failed_round(
    server: LocalBackend, tiny_model: Path, judge: tuple[Judge, LLM], tmp_path: Path
):
    requests, llm = judge
    async with world(server, tiny_model, generations=3, rollout_retries=0) as w:
        agents = Agents(w)
        agents.unreachable = {3}
        w.bind(agents.run, ["one"], ruler(llm), max_concurrency=1)
        with Journal.open(tmp_path / "run", {}) as journal:
            await w.collect({"journal": journal})
            assert journal.unscored("train", 0).exists()
        with Journal.open(tmp_path / "run", {}) as journal:
            await w.collect({"journal": journal, "session": 2})
            assert sorted(r.reward or 0 for r in journal.records("train", 0)) == [0.1, 0.2, 0.4]
            assert not journal.unscored("train", 0).exists()
    compared = [
        body["messages"][1]["content"].count('"role": "output"') for body in requests.bodies
    ]
    assert compared == [2, 3], "not judged on its own"


async def test_a_rollout_that_is_run_again_joins_a_group_that_was_scored(
    judge: tuple[Judge, LLM],
):
    requests, llm = judge
    evaluator = ruler(llm)
    group = RolloutGroup([0, 1, 2])

    async def scored(number: int, output: str) -> float | None:
        member = group.member(number)
        member.add(item(output))
        return (await member.score("r", evaluator, None)).value

    first = [asyncio.create_task(scored(n, str(n + 1))) for n in (0, 1)]
    group.leave(2)
    assert [await task for task in first] == [0.1, 0.2]
    # Run again: it alone gets another score.
    assert await scored(1, "7") == 0.7 and len(requests.bodies) == 2
    assert (await group.score("r", evaluator, 0, None)).value == 0.1
