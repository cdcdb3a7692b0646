"""Which rollouts of a round are known already, and when all of it is run anew."""

from pathlib import Path

import pytest

from hone.finetune.journal import Journal, RunFingerprint
from hone.finetune.records import FailureRecord, RolloutRecord
from hone.finetune.resume import gave_nothing, known_rollouts

WANTED = {("a", 0), ("a", 1), ("b", 0), ("b", 1)}


def ended(place: str, *, trained: bool = False, failed: str | None = None) -> RolloutRecord:
    """`a0` is generation 0 of example a."""
    return RolloutRecord(
        epoch=0,
        round=0,
        split="train",
        example=place[0],
        generation=int(place[1]),
        rollout=f"r:{place}",
        reward=1.0 if trained else None,
        trained_calls=["call-1"] if trained else None,
        failure=FailureRecord(kind=failed, reason="x") if failed else None,  # pyright: ignore[reportArgumentType] - one of two words
    )


POLICY = [ended(place, failed="policy") for place in ("a0", "a1", "b0", "b1")]


@pytest.mark.parametrize(
    ("records", "smallest", "nothing"),
    [
        (POLICY, 2, True),
        (POLICY[:3], 2, False),  # b1 has not ended: the round goes on
        ([*POLICY[:3], ended("b1", failed="infrastructure")], 2, True),
        ([*POLICY[:3], ended("b1", trained=True)], 2, True),  # a group of one is none
        ([*POLICY[:3], ended("b1", trained=True)], 1, False),
        ([*POLICY[:2], ended("b0", trained=True), ended("b1", trained=True)], 2, False),
        ([ended("a0"), ended("a1"), ended("b0"), ended("b1")], 2, True),  # it asked nobody
    ],
)
def test_a_round_that_gave_nothing(records: list[RolloutRecord], smallest: int, nothing: bool):
    assert gave_nothing(records, WANTED, smallest) is nothing


def known(directory: Path, *records: RolloutRecord) -> list[str]:
    with Journal.open(directory, RunFingerprint(0, {})) as journal:
        for record in records:
            journal.add(record)
        places = known_rollouts(journal, 0, 0, WANTED, smallest=2)
    return sorted(f"{example}{k}" for example, k in places)


def test_only_what_can_be_trained_is_kept_of_a_round_that_came_to_nothing(tmp_path: Path):
    assert known(tmp_path, *POLICY[:3]) == ["a0", "a1", "b0"]
    assert known(tmp_path, ended("b1", trained=True)) == ["b1"]
    # Run again, b0 gave something too: now there is a group, and a's failures are its result.
    assert known(tmp_path, ended("b0", trained=True)) == ["a0", "a1", "b0", "b1"]
