"""The picture of a job: the numbers it shows, and that it is drawn from them."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hone.learner import picture
from hone.learner.picture import LOGPROBS, draw, lay_out
from hone.learner.samples import Samples, make_samples
from hone.trajectory import Trajectory, TrajectoryGroup
from hone.types import Call, TrainConfig

CONFIG = TrainConfig(scale_rewards=False, row_tokens=1024)
PLACES: dict[str, Any] = {"vocab": 100, "max_positions": 100}


def group(
    prompt: list[int], completions: list[list[int]], rewards: list[float], logprob: float | None
) -> TrajectoryGroup:
    return TrajectoryGroup(
        [
            Trajectory(
                calls=[
                    Call(
                        prompt_ids=prompt,
                        completion_ids=ids,
                        logprobs=None if logprob is None else [logprob * (i + 1) for i in ids],
                    )
                ],
                reward=reward,
            )
            for ids, reward in zip(completions, rewards, strict=True)
        ]
    )


def small(logprob: float | None = -0.1) -> list[TrajectoryGroup]:
    """Rewards 1, 0, 0 about a mean of 1/3: advantages 2/3, -1/3, -1/3."""
    return [group([10, 11], [[12, 13, 16], [14, 17], [15]], [1.0, 0.0, 0.0], logprob)]


def sampled(groups: list[TrajectoryGroup], config: TrainConfig = CONFIG) -> Samples:
    return make_samples(groups, config, **PLACES)


def test_rows_are_what_the_learner_packs():
    made = sampled(small())
    learner = np.array([-1.0, -2.0, -3.0, -4.0, -5.0, -6.0])
    (row,), total, title = lay_out(made, CONFIG, learner)
    assert total == 1
    # Paths end before their last token: 10 11 12 13, 10 11 14 and 10 11.
    assert row.depth.tolist() == [0, 1, 2, 3, 2]
    assert row.kinds.tolist() == [0, 0, 2, 2, 2]
    assert row.edges == [(1, 2), (1, 4)]
    # At place 1 all three answers begin: (2/3 - 1/3 - 1/3) / 3 = 0.
    nan, third = float("nan"), 1 / 3
    advantage = [nan, 0.0, 2 * third, 2 * third, -third]
    assert row.learned["advantage"] == pytest.approx(advantage, nan_ok=True)
    # Sampler: -0.1 x (id + 1); place 1 has ids 12, 14 and 15: -(1.3 + 1.5 + 1.6) / 3.
    sampler = [nan, -4.4 / 3, -1.4, -1.7, -1.8]
    assert row.learned["sampler"] == pytest.approx(sampler, nan_ok=True)
    # Labels in order: 12 13 16, 14 17, 15. Place 1: -(1 + 4 + 6) / 3.
    assert row.learned["learner"] == pytest.approx([nan, -11 / 3, -2, -3, -5], nan_ok=True)
    assert row.learned["difference"][2] == pytest.approx(-2 + 1.4)
    assert title == (
        "3 rollouts of 1 group, 6 labels, 1 optimizer step: 12 tokens, of which 5 were computed and "
        "4 shared, in 1 row"
    )


def test_a_prompt_of_one_rollout_is_told_from_a_shared_one():
    turn = Call(prompt_ids=[10, 11, 12, 13, 20, 21], completion_ids=[22], logprobs=[-1.0])
    groups = small()
    groups[0].trajectories[0].calls.append(turn)
    made = sampled(groups)
    (row,), _, _ = lay_out(made, CONFIG, None)
    # 10 11, 12 13, then 16 is no label's parent; 20 21 are one rollout's; 14.
    assert row.kinds.tolist() == [0, 0, 2, 2, 1, 1, 2]
    assert "learner" not in row.learned


def test_steps_are_named_and_take_their_own_logprobs():
    groups = [*small(), group([30, 31], [[32], [33, 34]], [0.0, 1.0], -0.1)]
    config = TrainConfig(scale_rewards=False, groups_per_optimizer_step=1, row_tokens=1024)
    made = sampled(groups, config)
    rows, total, _ = lay_out(made, config, -np.arange(1.0, 10.0))
    assert [row.name for row in rows] == ["step 1, row 1", "step 2, row 1"] and total == 2
    # Labels 7, 8 and 9 are 32, 33 and 34; place 1 predicts 32 and 33, place 2 predicts 34.
    assert rows[1].learned["learner"] == pytest.approx([float("nan"), -7.5, -9.0], nan_ok=True)


@pytest.mark.parametrize(
    ("layout", "lengths"),
    [
        # Paths end before their last token: 600 and 601 tokens.
        ({}, [601, 601]),
        ({"fill": True}, [1202]),
        ({"shared": False}, [600, 601, 600, 601]),
    ],
)
def test_rows_have_the_layout_of_the_job(layout: dict[str, bool], lengths: list[int]):
    config = TrainConfig(row_tokens=2048)
    groups = [group([g] * 600, [[1], [2, 3]], [0.0, 1.0], -0.1) for g in (10, 20)]
    made = make_samples(groups, config, vocab=100, max_positions=1000)
    rows, total, _ = lay_out(made, config, None, **layout)
    assert [len(row.kinds) for row in rows] == lengths and total == len(lengths)


def png_size(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", data[16:24])


def test_the_same_job_gives_the_same_picture(tmp_path: Path):
    first, second = tmp_path / "a" / "rows.png", tmp_path / "b" / "rows.png"
    for path in (first, second):
        path.parent.mkdir()
        assert draw(sampled(small()), CONFIG, path, learner_logprobs=[-1.0] * 6)
    assert first.read_bytes() == second.read_bytes()
    assert png_size(first)[0] == 1690
    logprobs = np.load(first.parent / LOGPROBS, allow_pickle=False)
    assert logprobs.tolist() == [-1.0] * 6


def test_without_the_learners_logprobs_its_panels_are_left_out(tmp_path: Path):
    with_them, without = tmp_path / "with.png", tmp_path / "without.png"
    assert draw(sampled(small()), CONFIG, without)
    assert not (tmp_path / LOGPROBS).exists()
    assert draw(sampled(small()), CONFIG, with_them, learner_logprobs=[-1.0] * 6)
    assert png_size(without)[1] < png_size(with_them)[1]


def test_unknown_logprobs_do_not_stop_it(tmp_path: Path):
    assert draw(sampled(small(None)), CONFIG, tmp_path / "rows.png", learner_logprobs=[-1.0] * 6)


def test_a_job_without_labels_has_no_picture(tmp_path: Path):
    flat = [group([10, 11], [[12], [13]], [1.0, 1.0], -0.1)]
    assert not draw(sampled(flat), CONFIG, tmp_path / "rows.png")
    assert list(tmp_path.iterdir()) == []


def test_many_rows_are_drawn_in_two_columns_and_the_title_has_the_total(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(picture, "MAX_ROWS", 6)
    groups = [group([g, g + 20], [[1], [2, 3]], [0.0, 1.0], -0.1) for g in range(10)]
    config = TrainConfig(row_tokens=3, groups_per_optimizer_step=10)
    rows, total, title = lay_out(sampled(groups, config), config, None)
    assert (len(rows), total) == (6, 10)
    assert "in 10 rows" in title
    assert draw(sampled(groups, config), config, tmp_path / "rows.png")
    assert png_size(tmp_path / "rows.png")[0] == 3120
