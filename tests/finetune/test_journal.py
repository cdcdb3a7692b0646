"""What a killed run needs to resume."""

import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from tests.prose import Prose, place_of

from hone.errors import ConfigError, Conflict, StateError
from hone.files.rollout_record import FailureRecord, RolloutRecord, Split
from hone.finetune.base import (
    EpisodeItem,
    EpisodeItemRole,
    Trajectory,
    TrajectoryCollection,
)
from hone.finetune.journal import Journal, Start, plan_start
from hone.finetune.records import trajectory_of

FACTS = {"llms": {"a": {"temperature": 0.4}}, "finetuning": {"seed": 0}}


def record(example: str = "a", generation: int = 0, **fields: object) -> RolloutRecord:
    values = {"epoch": 0, "split": "train", "rollout": "r:1", "reward": 1.0, **fields}
    return RolloutRecord.model_validate({"example": example, "generation": generation, **values})


def failed(kind: str) -> FailureRecord:
    return FailureRecord.model_validate({"kind": kind, "reason": "connection"})


def test_a_run_keeps_its_id_and_counts_its_starts(tmp_path: Path):
    with Journal.open(tmp_path / "out", FACTS) as first:
        assert re.fullmatch(r"run_[0-9a-f]{8}", first.run_id)
        assert first.session == 1
    with Journal.open(tmp_path / "out", FACTS) as second:
        assert (second.run_id, second.session) == (first.run_id, 2)
    with Journal.open(tmp_path / "theirs", FACTS, prefix="art_run") as theirs:
        assert re.fullmatch(r"art_run_[0-9a-f]{8}", theirs.run_id)
    resumed = plan_start(tmp_path / "out", FACTS, fresh=False).resumed
    assert resumed is not None and (resumed.run_id, resumed.session) == (first.run_id, 3)
    anew = plan_start(tmp_path / "out", FACTS, fresh=True)
    aside = tmp_path / f"out.{first.run_id}"
    assert (anew.resumed, anew.replaced, anew.aside) == (None, first.run_id, aside)
    assert plan_start(tmp_path / "elsewhere", FACTS, fresh=False) == Start()


def test_finished_rollouts_are_there_after_a_restart(tmp_path: Path):
    with Journal.open(tmp_path, FACTS) as journal:
        journal.add(record("a", 0))
        journal.add(record("a", 1, round=1))
        journal.add(record("b", 0, split="val"))
        journal.add(record("c", 0, epoch=1))
    with Journal.open(tmp_path, FACTS) as journal:
        assert set(journal.finished("train", 0)) == {("a", 0)}
        assert set(journal.finished("train", 0, 1)) == {("a", 1)}
        assert set(journal.finished("val", 0)) == {("b", 0)}
        assert journal.finished("train", 1)["c", 0] == record("c", 0, epoch=1)
        assert journal.finished("train", 7) == {}
    assert sorted(p.name for p in (tmp_path / "trajectories").iterdir()) == [
        "epoch_000.jsonl",
        "epoch_001.jsonl",
        "validation_000.jsonl",
    ]


def test_a_rollout_that_the_environment_failed_is_run_again_and_the_last_one_counts(tmp_path: Path):
    with Journal.open(tmp_path, FACTS) as journal:
        journal.add(record("a", 0, reward=None, failure=failed("infrastructure")))
        journal.add(record("b", 0, reward=None, failure=failed("policy")))
        assert set(journal.finished("train", 0)) == {("b", 0)}
        journal.add(record("a", 0, reward=0.5))
        assert journal.finished("train", 0)["a", 0].reward == 0.5
        assert [(r.example, r.reward) for r in journal.records("train", 0)] == [
            ("a", 0.5),
            ("b", None),
        ]


def test_what_scored_before_is_asked_of_the_rounds_before(tmp_path: Path):
    wanted: list[tuple[Split, int, int]] = [
        ("train", 0, 1),
        ("train", 0, 2),
        ("train", 1, 0),
        ("val", 1, 0),
        ("val", 2, 0),
        ("final", 0, 0),
        ("final", 0, 1),
        ("final", 1, 1),
    ]
    with Journal.open(tmp_path, FACTS) as journal:
        journal.add(record("a", 0, reward=None, failure=failed("policy")))
        assert not any(journal.scored_before(*place) for place in wanted)
        journal.add(record("a", 0, round=1))
        journal.add(record("a", 0, epoch=1, split="val"))
        before = [journal.scored_before(*place) for place in wanted]
    assert before == [False, True, True, False, True, False, True, True]
    with Journal.open(tmp_path, FACTS) as journal:
        again = [journal.scored_before(*place) for place in reversed(wanted)]
    assert again == before[::-1]


def test_a_torn_last_line_is_cut_off_before_the_next_is_written(tmp_path: Path):
    with Journal.open(tmp_path, FACTS) as journal:
        journal.add(record("a", 0))
    path = tmp_path / "trajectories" / "epoch_000.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:20])
    with Journal.open(tmp_path, FACTS) as journal:
        journal.add(record("b", 0))
        assert set(journal.finished("train", 0)) == {("a", 0), ("b", 0)}


def test_a_bad_line_elsewhere_is_an_error_with_its_place(prose: Prose, tmp_path: Path):
    with Journal.open(tmp_path, FACTS) as journal:
        journal.add(record("a", 0))
        path = tmp_path / "trajectories" / "epoch_000.jsonl"
        path.write_bytes(b"\n" + path.read_bytes())  # an empty line is none
        assert [r.example for r in journal.records("train", 0)] == ["a"]
    with Journal.open(tmp_path, FACTS) as journal:
        path.write_bytes(b"\n{}\n" + path.read_bytes())
        with pytest.raises(StateError) as caught:
            journal.records("train", 0)
        prose(caught)
        assert place_of(caught).endswith("epoch_000.jsonl:2")


def test_a_submission_is_the_same_after_a_restart(prose: Prose, tmp_path: Path):
    item = EpisodeItem(role=EpisodeItemRole.ASSISTANT, content="x", logprobs={})
    trajectory = Trajectory(episode=[item], reward=0.1 + 0.2, trained_calls=["c1"])
    collection = TrajectoryCollection(
        trajectories=[[trajectory]], run_id="r", metadata={"epoch": 3}
    )
    # Ids of examples, which look like secrets.
    curriculum = {"history": {"sk-task-000000000001": {"epoch": 3, "excluded": True}}}
    collected = {"metrics": {"avg_reward": 0.3}, "curriculum": curriculum}
    with Journal.open(tmp_path, FACTS) as journal:
        assert journal.submitted(3, 1) is None
        journal.note_submission(3, 1, collection, collected)
    with Journal.open(tmp_path, FACTS) as journal:
        assert journal.submitted(3, 1) == (collection, collected)
        assert journal.submitted(3, 0) is None
        for damaged in ("{", "[]", '{"groups": [[1]], "run_id": "r"}'):
            (tmp_path / "submissions" / "003_001.json").write_text(damaged)
            with pytest.raises(StateError) as caught:
                journal.submitted(3, 1)
            prose(
                caught, why=re.compile(r"(?<=submission \().+(?=\)\. )")
            )  # Python's or pydantic's
            assert place_of(caught).endswith("003_001.json")


def test_another_configuration_is_refused_and_says_what_differs(prose: Prose, tmp_path: Path):
    with Journal.open(tmp_path, FACTS) as journal:
        run_id = journal.run_id
        journal.add(record())
    changed = {"llms": {"a": {"temperature": 0.9}}, "finetuning": {"seed": 0, "x": 1}}
    with pytest.raises(Conflict) as refused:
        Journal.open(tmp_path, changed)
    message = str(refused.value)
    assert run_id in message
    prose(message)
    assert "--fresh" in message
    with Journal.open(tmp_path, FACTS) as journal:
        assert journal.session == 2  # the refused start does not count


def test_a_run_of_which_nothing_ran_takes_another_configuration(prose: Prose, tmp_path: Path):
    with Journal.open(tmp_path, FACTS) as first:
        pass  # its server was not there, say, and the address is mended now
    with Journal.open(tmp_path, {"llms": {}}) as second:
        assert (second.run_id, second.session) == (first.run_id, 2)
        assert second.run.facts == {"llms": {}}
        second.add(record())
    with pytest.raises(Conflict) as caught:
        Journal.open(tmp_path, FACTS)
    prose(caught)


@pytest.mark.parametrize("inside", ["file", "file/below"])
def test_a_directory_that_cannot_be_made_is_named(prose: Prose, tmp_path: Path, inside: str):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError) as caught:
        Journal.open(tmp_path / inside, FACTS)
    prose(caught)
    assert place_of(caught) == "finetuning.output_dir"


def test_only_so_many_differences_are_named(prose: Prose, tmp_path: Path):
    with Journal.open(tmp_path, {f"k{i}": i for i in range(11)}) as journal:
        journal.add(record())
    with pytest.raises(Conflict) as caught:
        Journal.open(tmp_path, {f"k{i}": i + 1 for i in range(11)})
    prose(caught)


def test_fresh_keeps_the_old_directory_under_its_run(tmp_path: Path):
    out = tmp_path / "out"
    with Journal.open(out, FACTS, fresh=True) as journal:
        old = journal.run_id
        assert journal.run.anew and journal.run.replaces is None
        journal.begun_anew()
        journal.add(record("a", 0))
    other = {"other": True}
    with Journal.open(out, other, fresh=True) as journal:
        assert journal.run_id != old and journal.session == 1
        assert journal.run.anew and journal.run.replaces == old
        assert journal.finished("train", 0) == {}
    assert (tmp_path / f"out.{old}" / "trajectories" / "epoch_000.jsonl").exists()
    with Journal.open(out, other) as journal:
        assert journal.run.anew, "killed before the backend was told: it is told at the next start"
        journal.begun_anew()
    with Journal.open(out, other) as journal:
        assert not journal.run.anew


def test_fresh_is_refused_if_the_new_name_exists(prose: Prose, tmp_path: Path):
    with Journal.open(tmp_path / "out", FACTS) as journal:
        taken = tmp_path / f"out.{journal.run_id}"
    taken.mkdir()
    with pytest.raises(Conflict) as caught:
        Journal.open(tmp_path / "out", FACTS, fresh=True)
    prose(caught)


@pytest.mark.e2e
def test_two_processes_do_not_share_a_directory(tmp_path: Path):
    with Journal.open(tmp_path, FACTS):
        program = f"""
            from pathlib import Path
            from hone.errors import Conflict
            from hone.finetune.journal import Journal
            try:
                Journal.open(Path({str(tmp_path)!r}), {{}})
            except Conflict as error:
                print(error)
        """
        ran = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True
        )
        assert "is in use by another `hone finetune` (process " in ran.stdout, ran.stderr


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("content", ['{"hello": 1}', "", '{"run_id": "r', "[]"])
def test_a_damaged_run_file_is_named_and_kept(
    prose: Prose, tmp_path: Path, content: str, fresh: bool
):
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(StateError) as error:
        Journal.open(tmp_path, FACTS, fresh=fresh)
    prose(error)
    assert (tmp_path / "run.json").read_text() == content


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("left", ["events.jsonl", "trajectories", "submissions"])
def test_a_directory_without_its_run_file_is_not_a_new_run(
    prose: Prose, tmp_path: Path, left: str, fresh: bool
):
    (tmp_path / left).touch()
    with pytest.raises(StateError) as caught:
        Journal.open(tmp_path, FACTS, fresh=fresh)
    prose(caught)
    assert place_of(caught).endswith("run.json")
    assert not (tmp_path / "run.json").exists()


def test_closing_twice_does_nothing(tmp_path: Path):
    journal = Journal.open(tmp_path, FACTS)
    journal.close()
    journal.close()


# ---- one record per rollout ---------------------------------------------------------------------


def trained(example: str = "a", **fields: Any) -> RolloutRecord:
    """A rollout whose calls a server recorded."""
    return record(example, rollout=f"r:{example}", trained_calls=["c1"], **fields)


def test_a_submission_names_rollouts_and_holds_no_text(prose: Prose, tmp_path: Path):
    text = [EpisodeItem(role=EpisodeItemRole.USER, content="a long question")]
    with Journal.open(tmp_path, FACTS) as journal:
        journal.add(trained("a"))
        journal.add(record("b", rollout="r:b", episode=text, metadata={"reasoning": "good"}))
        trajectories = [trajectory_of(one) for one in journal.records("train", 0)]
        trajectories[0].shaped_rewards = [0.0]
        sent = TrajectoryCollection(trajectories=[trajectories], run_id="r", metadata={"epoch": 0})
        journal.note_submission(0, 0, sent, {"metrics": {}})
    file = json.loads((tmp_path / "submissions" / "000_000.json").read_text())
    assert file["groups"] == [
        [
            {"rollout": "r:a", "reward": 1.0, "shaped_rewards": [0.0]},
            {"rollout": "r:b", "reward": 1.0, "shaped_rewards": None},
        ]
    ]
    with Journal.open(tmp_path, FACTS) as journal:
        noted = journal.submitted(0, 0)
        assert noted is not None and noted[0].metadata == {"epoch": 0}
        [first, second] = noted[0].trajectories[0]
        assert first.metadata == trajectories[0].metadata and first.shaped_rewards == [0.0]
        assert second == trajectories[1]  # its text is in the journal, as no server has it
        (tmp_path / "trajectories" / "epoch_000.jsonl").write_text("")
    with (
        Journal.open(tmp_path, FACTS) as journal,
        pytest.raises(StateError) as caught,
    ):
        journal.submitted(0, 0)
    prose(caught)


def test_a_text_that_a_plugin_wrote_is_the_same_after_a_restart(tmp_path: Path):
    """Whatever the server or the journal has of its rollout."""
    text = [EpisodeItem(role=EpisodeItemRole.USER, content="as the agent said it")]
    edited = [EpisodeItem(role=EpisodeItemRole.USER, content="shorter")]
    with Journal.open(tmp_path, FACTS) as journal:
        journal.add(trained("a"))
        journal.add(record("b", rollout="r:b", episode=text))
        trajectories = [trajectory_of(one) for one in journal.records("train", 0)]
        for trajectory in trajectories:
            trajectory.episode = edited
        sent = TrajectoryCollection(trajectories=[trajectories], run_id="r")
        journal.note_submission(0, 0, sent, {"metrics": {}})
    with Journal.open(tmp_path, FACTS) as journal:
        noted = journal.submitted(0, 0)
        assert noted is not None and noted[0] == sent


def test_metadata_that_a_plugin_changed_is_the_same_after_a_restart(tmp_path: Path):
    """Otherwise another request would be sent under the key of the first."""
    with Journal.open(tmp_path, FACTS) as journal:
        journal.add(trained("a"))
        journal.add(trained("b"))
        trajectories = [trajectory_of(one) for one in journal.records("train", 0)]
        metadata = trajectories[0].metadata = {**(trajectories[0].metadata or {}), "level": 3}
        trajectories[1].trained_calls = []
        sent = TrajectoryCollection(trajectories=[trajectories], run_id="r")
        journal.note_submission(0, 0, sent, {"metrics": {}})
    with Journal.open(tmp_path, FACTS) as journal:
        noted = journal.submitted(0, 0)
        assert noted is not None
        assert noted[0].trajectories[0][0].metadata == metadata
        assert noted[0].trajectories[0][1].metadata == trajectories[1].metadata
        assert noted[0].trajectories[0][1].trained_calls == []


def test_a_round_costs_the_same_however_many_were_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """100 epochs of 3 rounds: no file of rollouts is read again after it was written."""
    read: list[Path] = []
    read_bytes = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: (read.append(path), read_bytes(path))[1])
    with Journal.open(tmp_path, FACTS) as journal:
        for epoch in range(100):
            for round in range(3):
                read.clear()
                assert journal.finished("train", epoch, round) == {}
                for name in "ab":
                    journal.add(trained(name, epoch=epoch, round=round))
                assert len(journal.records("train", epoch, round)) == 2
                assert len(journal.finished("train", epoch, round)) == 2
                trajectories = [
                    [trajectory_of(one) for one in journal.records("train", epoch, round)]
                ]
                sent = TrajectoryCollection(trajectories=trajectories, run_id="r")
                journal.note_submission(epoch, round, sent, {})
                assert read == []
