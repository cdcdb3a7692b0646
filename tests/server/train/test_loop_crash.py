"""Nothing accepted is lost: a server killed anywhere ends its job with the same bits, once.

A part of `make chaos`, with the real process of a learner in one case.
"""

import json
import random
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from tests.patience import PATIENCE_S
from tests.server.chaos import FAILPOINTS, KILLED, Same, Servers, whole_process

pytestmark = pytest.mark.e2e

POINTS = [
    "store/before-commit:3",
    "job/after-take",
    "job/after-learn",
    "checkpoint/before-fsync:2",
    "checkpoint/before-rename:2",
    "checkpoint/after-rename:2",
    "job/after-publish",
    "checkpoint/after-promote",
    "job/after-promote",
    "job/before-done",
]
"""Where most can go wrong; `make chaos` takes them all, each time they are reached."""
AFTER_SAVE = POINTS[5:]


@pytest.fixture(scope="module")
def servers(tiny_model: Path) -> Iterator[Servers]:
    started = Servers(tiny_model)
    yield started
    started.close()


@pytest.fixture(scope="module")
def same(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Same:
    """An undisturbed run."""
    ended = servers.finish(tmp_path_factory.mktemp("undisturbed"))
    assert ended["attempts"] == 1
    events = ["queued", "started", "learned", "saved", "published", "proved", "done"]
    assert ended["events"] == events
    same = Same.of(ended)
    assert same.differences(ended) == []
    return same


@pytest.mark.parametrize("point", POINTS)
def test_killed_at_a_failpoint(servers: Servers, same: Same, tmp_path: Path, point: str):
    assert point.partition(":")[0] in FAILPOINTS
    assert servers.run(tmp_path, failpoint=point) == -9
    ended = servers.finish(tmp_path)
    assert same.differences(ended) == []
    # What was saved is not learned again; what was not, is.
    assert ended["events"].count("learned") == (
        2 if point in ("job/after-learn", *POINTS[3:5]) else 1
    )
    assert (ended["attempts"] == 2) == (point != POINTS[0])


@pytest.mark.parametrize(("loss", "count"), [("grpo", 5), ("dpo", 10), ("sft", 4)])
def test_killed_in_the_middle_of_learning(servers: Servers, tmp_path: Path, loss: str, count: int):
    """Some of its six optimizer steps are done, others are not."""
    undisturbed = Same.of(servers.finish(tmp_path / "undisturbed", loss=loss))
    root = tmp_path / "killed"
    assert servers.run(root, loss=loss, failpoint=f"learner/progress:{count}") == -9
    ended = servers.finish(root, loss=loss)
    assert undisturbed.differences(ended) == []
    assert (ended["attempts"], ended["events"].count("learned")) == (2, 1)


@pytest.mark.parametrize("seed", range(4))
def test_killed_at_random_times(servers: Servers, same: Same, tmp_path: Path, seed: int):
    draw = random.Random(seed)
    for _ in range(2):
        assert servers.run(tmp_path, after_s=draw.uniform(0.001, 0.6)) in (0, *KILLED)
    assert same.differences(servers.finish(tmp_path)) == []


def test_a_job_that_brings_the_server_down_three_times_fails(servers: Servers, tmp_path: Path):
    for _ in range(3):
        assert servers.run(tmp_path, failpoint="job/before-learn") == -9
    ended = servers.finish(tmp_path)
    assert ended["state"] == "failed" and ended["attempts"] == 3
    assert "brought the server down 3 times" in ended["failure"]
    assert ended["served"] == [0, None] and ended["disk"] == ["0000"]


def test_a_step_that_cannot_be_published_is_given_up_and_never_served(
    servers: Servers, tmp_path: Path
):
    # Three attempts to learn, and three more for what was learned.
    for _ in range(6):
        assert servers.run(tmp_path, failpoint="job/after-publish") == -9
    ended = servers.finish(tmp_path)
    assert ended["state"] == "failed" and ended["events"].count("learned") == 1
    assert "brought the server down 6 times" in ended["failure"]
    assert ended["served"] == [0, None] and ended["disk"] == ["0000", "0001.unproved"]


def test_a_killed_server_takes_its_learner_with_it(
    servers: Servers, same: Same, tmp_path: Path, tiny_model: Path
):
    assert whole_process(tmp_path, tiny_model, "job/after-save") == -9
    (manifest,) = tmp_path.glob(
        "projects/default/models/agent/checkpoints/0001.unproved/manifest.json"
    )
    learner = json.loads(manifest.read_text())["learner"]
    assert learner["deterministic"] and learner["threads"] == 1
    with suppress(psutil.NoSuchProcess):
        psutil.Process(learner["pid"]).wait(PATIENCE_S)
    # And it gave the same bits as the learner inside the server does.
    assert same.differences(servers.finish(tmp_path)) == []
