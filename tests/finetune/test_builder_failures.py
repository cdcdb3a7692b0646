"""RolloutBuilder over a real server with a tiny model: failures, resumed rounds, calls that hone cannot see."""

import asyncio
import json
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.finetune.worlds import Length, metadata, world
from tests.patience import PATIENCE_S
from tests.prose import Prose

from hone import LocalBackend
from hone.errors import ConfigError, PolicyFailure, Unavailable
from hone.files.event_log import EventLog, read
from hone.files.events import WarningLogged
from hone.finetune.base import EpisodeItemRole
from hone.finetune.builder import count_unscoped
from hone.finetune.journal import Journal

USER = EpisodeItemRole.USER
ASSISTANT = EpisodeItemRole.ASSISTANT


# ---- failures -----------------------------------------------------------------------------------


async def test_infrastructure_failures_are_retried_and_leave_the_group(
    server: LocalBackend, tiny_model: Path
):
    async with world(server, tiny_model, rollout_retries=1, min_group_size=1) as w:
        tried = Counter[str]()

        async def agent(question: str) -> str:
            tried[question] += 1
            if question == "always" or (question == "once" and tried[question] == 1):
                raise ConnectionError("sandbox is away")
            return await w.say(question)

        w.bind(agent, ["fine", "once", "always"])
        collection = await w.collect()
        # `once` fails one of its two generations; the second try has a rollout id of its own.
        assert tried == {"fine": 2, "once": 3, "always": 4}
        rollouts = [t.rollout for t in collection.trajectories[1]]
        assert sorted(id.rpartition("~")[2] for id in rollouts) == ["1", "1.1"]
        assert [metadata(g[0])["id"] for g in collection.trajectories] == ["e0", "e1"]
        assert w.builder.dropped == {"infrastructure/connection": 2}


async def test_a_name_of_two_projects_is_requested_once(
    prose: Prose, server: LocalBackend, tiny_model: Path
):
    """Neither the client nor the run repeats a request that cannot succeed."""
    for project in ("one", "two"):
        spec = {"name": "twin", "project": project, "base_model": str(tiny_model)}
        await server.ask("POST", "/v1/training/models", json.dumps(spec))
    statuses: list[int] = []
    errors: list[str] = []

    async def note(response: Any) -> None:
        statuses.append(response.status_code)

    async with (
        world(server, tiny_model, rollout_retries=2, min_group_size=1) as w,
        openai.DefaultAsyncHttpxClient(event_hooks={"response": [note]}) as http,
    ):
        client = openai.AsyncOpenAI(
            base_url=f"{server.base_url}/v1", api_key="default", max_retries=5, http_client=http
        )

        async def agent(question: str) -> str:
            messages: Any = [{"role": "user", "content": question}]
            with pytest.raises(openai.ConflictError) as raised:
                await client.chat.completions.create(model="twin", messages=messages)
            errors.append(str(raised.value))
            raise raised.value

        w.bind(agent, ["one", "two"])
        assert (await w.collect()).trajectories == []
        assert statuses == [409] * 4, "two generations of two examples"
        [message] = set(errors)
        prose(message)
        assert w.builder.dropped == {"infrastructure/model_name": 4}


async def test_an_evaluator_that_raises_on_one_output_only_is_the_policys_failure(
    server: LocalBackend, tiny_model: Path
):
    async with world(server, tiny_model) as w:
        w.bind(w.say, ["one", "two"], Length(bad=("e1",)))
        collection = await w.collect()
        assert [metadata(g[0])["id"] for g in collection.trajectories] == ["e0", "e1"]
        # Lengths are positive, so the smaller of 0 and the lowest reward is 0.
        assert [t.reward for t in collection.trajectories[1]] == [0.0, 0.0]
        assert all(len(t.trained_calls or ()) == 1 for t in collection.trajectories[1])
        assert w.builder.dropped == {} and w.builder.failure_reward == 0.0
        assert w.ran == {"one": 2, "two": 2}


async def test_an_evaluator_that_scores_nothing_is_no_zero_and_no_second_rollout(
    server: LocalBackend, tiny_model: Path
):
    async with world(server, tiny_model) as w:
        w.bind(w.say, ["one", "two"], Length(bad=("e0", "e1")))
        assert (await w.collect()).trajectories == []
        assert w.builder.dropped == {"infrastructure/evaluator": 4}
        assert w.ran == {"one": 2, "two": 2}


@pytest.mark.parametrize("policy", ["drop", "lowest", {"reward": -1.0}])
async def test_failures_of_the_policy(server: LocalBackend, tiny_model: Path, policy: Any):
    async with world(server, tiny_model, on_policy_failure=policy) as w:

        async def agent(question: str) -> str:
            text = await w.say(question)
            if w.ran[question] == 1:
                raise PolicyFailure(f"{text!r} is no move", reason="unparseable")
            return text

        w.bind(agent, ["one"], max_concurrency=1)
        collection = await w.collect()
        if policy == "drop":
            assert w.builder.dropped == {"policy/unparseable": 1, "small_group": 1}
            assert collection.trajectories == []
        else:
            assert w.builder.dropped == {}
            [group] = collection.trajectories
            lowest = 0.0 if policy == "lowest" else -1.0
            assert sorted(t.reward for t in group)[0] == lowest == w.builder.failure_reward
            assert all(len(t.trained_calls or ()) == 1 for t in group)


async def test_a_server_that_cannot_be_asked_is_a_failure_of_the_world(
    server: LocalBackend, tiny_model: Path
):
    async with world(server, tiny_model, rollout_retries=0) as w:

        async def summaries(rollout: str) -> Any:
            raise Unavailable("closing")

        w.adapter.summaries = summaries
        w.bind(w.say, ["one"])
        assert (await w.collect()).trajectories == []
        assert w.builder.dropped == {"infrastructure/server_error": 2}


async def test_a_cancelled_collection_leaves_nothing_running(
    server: LocalBackend, tiny_model: Path
):
    async with world(server, tiny_model) as w:
        begun = asyncio.Event()

        async def agent(question: str) -> str:
            begun.set()
            await asyncio.Event().wait()
            return question

        w.bind(agent, ["one", "two"])
        await w.builder.start_run(w.run_id)
        waiting = asyncio.create_task(w.builder.finalize(w.run_id))
        await asyncio.wait_for(begun.wait(), PATIENCE_S)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert w.builder.evaluation_runs == {}
        names = {task.get_name() for task in asyncio.all_tasks()}
        assert not any(name.startswith("eval-run") for name in names)
        await w.builder.start_run(w.run_id)  # and it can begin again
        for task in w.builder.evaluation_runs[w.run_id]:
            task.cancel()
        await asyncio.gather(*w.builder.evaluation_runs[w.run_id], return_exceptions=True)


# ---- going on -----------------------------------------------------------------------------------


async def test_rollouts_in_the_journal_are_not_run_again(
    prose: Prose, server: LocalBackend, tiny_model: Path, tmp_path: Path
):
    async with world(server, tiny_model, rollout_retries=0, min_group_size=1) as w:
        broken = True

        async def agent(question: str) -> str:
            if question == "two" and broken:
                raise ConnectionError("away")
            return await w.say(question)

        w.bind(agent, ["one", "two"])
        facts = {}
        with Journal.open(tmp_path, facts) as journal:
            meta = {"epoch": 0, "round": 0, "journal": journal, "session": journal.session}
            first = await w.collect(meta)
        assert w.ran == {"one": 2, "two": 2}
        broken, w.adapter.reads_episodes = False, False
        with Journal.open(tmp_path, facts) as journal:
            meta = {"epoch": 0, "round": 0, "journal": journal, "session": journal.session}
            second = await w.collect(meta)
        # Those that ended well are read; those that their world failed are run, as session 2.
        assert w.ran == {"one": 2, "two": 4}
        # The journal refers to recorded calls; their text is fetched for those who read it.
        with pytest.raises(ConfigError) as caught:
            _ = second.trajectories[0][0].episode
        prose(caught)
        await w.builder.load_episodes(second)
        assert second.trajectories[0] == first.trajectories[0]
        assert [t.rollout[-2:] for t in second.trajectories[1]] == ["~2", "~2"]
        with Journal.open(tmp_path, facts) as journal:
            meta = {"epoch": 0, "round": 0, "journal": journal, "session": journal.session}
            third = await w.collect(meta)
            # Another epoch, another round: nothing is known of them.
            other = await w.collect({**meta, "round": 1})
        await w.builder.load_episodes(third)
        assert third == second
        assert w.ran == {"one": 4, "two": 6}
        assert other.trajectories[0][0].rollout.startswith(f"{w.run_id}:0.1.0.")


async def test_rollouts_that_gave_nothing_are_not_run_again_and_say_why_again(
    server: LocalBackend, tiny_model: Path, tmp_path: Path
):
    async with world(server, tiny_model) as w:

        async def agent(question: str) -> str:
            if question == "two":
                return "from memory"
            options = {"temperature": 0} if question == "three" else {}
            return await w.say(question, **options)

        w.bind(agent, ["one", "two", "three"])
        for _ in range(2):
            with Journal.open(tmp_path, {}) as journal:
                meta = {"epoch": 0, "round": 0, "journal": journal, "session": journal.session}
                collection = await w.collect(meta | {"failed_before": False})
            assert [len(group) for group in collection.trajectories] == [2]
            assert w.builder.dropped == {"no_calls": 2, "greedy": 2}
            assert w.ran == {"one": 2, "two": 2, "three": 2}


async def test_a_round_without_trajectories_is_run_again(
    server: LocalBackend, tiny_model: Path, tmp_path: Path
):
    async with world(server, tiny_model, on_policy_failure="drop") as w:
        broken = True

        async def agent(question: str) -> str:
            text = await w.say(question)
            if broken and (question == "two" or w.ran[question] == 1):
                raise PolicyFailure(f"{text!r} is no move", reason="unparseable")
            return text

        w.bind(agent, ["one", "two"], max_concurrency=1)
        collection = None
        for _ in range(2):
            with Journal.open(tmp_path, {}) as journal:
                meta = {"epoch": 0, "round": 0, "journal": journal, "session": journal.session}
                collection = await w.collect(meta)
            broken = False
        assert collection is not None
        # The second rollout of "one" ended well, but a group of one teaches nothing.
        assert w.ran == {"one": 3, "two": 4}
        assert [len(group) for group in collection.trajectories] == [2, 2]
        first = [t.rollout for t in collection.trajectories[0]]
        assert [id.rpartition("~")[2] for id in first] == ["2", "1"]


# ---- calls that name no rollout ---------------------------------------------------------------------


async def test_calls_that_hone_cannot_see_are_counted_and_reported_once(
    prose: Prose,
    server: LocalBackend,
    tiny_model: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
):
    def unseen(question: str) -> None:
        body = {"model": w.llm.model, "messages": [{"role": "user", "content": question}]}
        request = urllib.request.Request(
            f"{w.llm.base_url}/chat/completions", json.dumps({**body, "max_tokens": 2}).encode()
        )
        request.add_header("Content-Type", "application/json")
        urllib.request.urlopen(request).close()

    async with world(server, tiny_model) as w:

        async def agent(question: str) -> str:
            await asyncio.to_thread(unseen, question)
            return await w.say(question)

        w.bind(agent, ["one", "two"])
        with EventLog(tmp_path / "events.jsonl") as events:
            for epoch in range(2):
                collection = await w.collect({"epoch": epoch, "events": events})
                # 2 examples x 2 generations, each with one call that was seen and one that was not.
                assert w.builder.dropped == {"call/unmarked": 4}
                assert [len(group) for group in collection.trajectories] == [2, 2]
            events = read(tmp_path / "events.jsonl")
            warnings = [e.message for e in events if isinstance(e, WarningLogged)]
        [message] = warnings
        prose(message)
        assert f"{server.base_url}/rollout/ROLLOUT_ID/v1" in message
        assert [r.getMessage() for r in caplog.records if r.levelname == "WARNING"] == warnings
        # A server that cannot be asked costs the count, not the epoch.
        w.adapter.backend.patience_s, w.adapter.backend.base_url = 0.2, "http://127.0.0.1:1"
        assert await count_unscoped(w.adapter, w.run_id) == Counter()
        assert "Calls without a rollout were not counted" in caplog.text


# ---- an endpoint that is not hone's -----------------------------------------------------------------


async def test_what_was_seen_of_a_foreign_endpoint(
    server: LocalBackend, tiny_model: Path, caplog: pytest.LogCaptureFixture
):
    """The same server, asked as if nobody could ask it what it recorded."""
    async with world(server, tiny_model, min_group_size=1) as w:
        w.adapter.server = None
        w.bind(w.say, ["one"])
        collection = await w.collect()
        # hone's own answers carry no logprobs in what the harness keeps: nothing to train on.
        assert collection.trajectories == []
        assert w.builder.dropped == {"no_logprobs": 2}
        [warning] = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
        assert warning.startswith("No valid assistant messages with logprobs")
        assert "`logprobs: true`" in warning
