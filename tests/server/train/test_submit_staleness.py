"""A job is trained on answers of the step it starts from, or says which were not."""

from pathlib import Path

import pytest
from tests.prose import Prose, place_of
from tests.server.small_server import CONFIG, SmallServer, spec, token_groups
from tests.server.worlds import USER, World, by_tokens, choice, talk

from hone.inference.base import AdapterRef
from hone.trajectory import Trajectory
from hone.types import TrainConfig

ADAPTER = "a" * 64


@pytest.fixture
async def world(world: World) -> World:
    """Step 3 is the newest."""
    base = await world.state.serving.engines.base(world.record.spec.base_model)
    base.adapters.promote(world.record.key, AdapterRef(str(world.record.key), 3, ADAPTER), 3)
    return world


def test_stale_calls_are_trained_only_if_max_staleness_allows_it():
    assert TrainConfig().max_staleness == 0


async def test_answers_of_the_newest_step_are_trained(world: World):
    world.add([4, 5], rollout="r1", step=3, adapter_sha256=ADAPTER)
    ids = world.ids("Yes.")
    world.add(ids, step=3, adapter_sha256=ADAPTER)
    resolved = await world.resolve(
        Trajectory(rollout="r1"),
        by_tokens(step=3),
        talk(USER, choice(ids, "Yes.")),
        talk(USER, choice(world.ids("No."), "No.")),  # recorded by nobody: taken for the newest
        max_staleness=0,
    )
    steps = [trajectory.calls[0].step for trajectory in resolved.groups[0]]
    assert steps == [3, 3, 3, 3]


@pytest.mark.parametrize(
    ("step", "why"),
    [
        (
            1,
            "was answered by step 1, and the job starts from step 3: 2 behind, and max_staleness is "
            "0. Run the rollout again with the newest step, or set config max_staleness: 2 (null "
            "for any).",
        ),
        (
            4,
            "was answered by step 4, and the job starts from step 3, which is older. Run the "
            "rollout again with the step that is served now.",
        ),
    ],
)
async def test_answers_of_other_steps_are_refused_by_their_path(world: World, step: int, why: str):
    call = world.add([4, 5], rollout="r1", step=step)
    ids = world.ids("Yes.")
    world.add(ids, step=step)
    refusal = await world.refusal(
        Trajectory(rollout="r1"),
        by_tokens(step=step),
        talk(USER, choice(ids, "Yes.")),
        max_staleness=0,
    )
    at = "groups.0.trajectories"
    assert refusal.splitlines() == [
        f"{at}.0.rollout: call {call.id!r} {why}",
        f"{at}.1.calls.0.step: it {why}",
        f"{at}.2.messages_and_choices.1: it {why}",
    ]


async def test_older_answers_are_accepted_up_to_max_staleness(world: World):
    two, three = by_tokens(step=1), by_tokens(step=0)
    assert (await world.resolve(two, max_staleness=2)).counts == {"by_tokens": 1}
    assert "3 behind, and max_staleness is 2" in await world.refusal(three, max_staleness=2)
    assert (await world.resolve(three, by_tokens(step=9), max_staleness=None)).groups


async def test_context_may_be_of_any_step(world: World):
    context = by_tokens(step=0, trained=False).calls
    resolved = await world.resolve(
        Trajectory(calls=[*context, *by_tokens(step=3).calls]), max_staleness=0
    )
    assert [call.step for call in resolved.groups[0].trajectories[0].calls] == [0, 3]


async def test_a_step_of_the_same_number_and_another_adapter_is_another_step(
    prose: Prose, world: World
):
    """After a rename the old name begins anew, and its old rollouts are still on record."""
    call = world.add([4, 5], rollout="r1", step=3, adapter_sha256="b" * 64)
    refusal = await world.refusal(Trajectory(rollout="r1"), max_staleness=0)
    prose(refusal, call=call.id)
    assert place_of(refusal) == "groups.0.trajectories.0.rollout"


async def test_a_job_that_was_overtaken_in_the_queue_fails_and_says_so(
    prose: Prose, tmp_path: Path, tiny_model: Path
):
    strict = CONFIG.model_copy(update={"max_staleness": 0})
    lenient = CONFIG.model_copy(update={"max_staleness": 2})
    async with SmallServer.started(tmp_path / "hone") as server:
        record = server.models.register(spec(tiny_model))
        jobs = [
            server.submit(record, token_groups(), config=config)
            for config in (strict, strict, lenient)
        ]
        first, overtaken, last = [await server.ended(job.id) for job in jobs]
        assert (first.state, first.step) == ("done", 1)
        assert overtaken.state == "failed" and overtaken.failure is not None
        assert overtaken.failure.type == "SampleRefused"
        prose(overtaken.failure.message, overtaken=overtaken.id)
        assert (last.state, last.step, last.metrics["learn/staleness"]) == ("done", 2, 1)
