"""Where the time of an epoch went."""

import pytest

from hone.finetune.trainer import Phases


def test_what_no_stage_claims_is_other(monkeypatch: pytest.MonkeyPatch):
    # Begun at 0; rollouts from 1 to 4; read at 10: 3 seconds of rollouts, 7 of others.
    clock = iter([0.0, 1.0, 4.0, 10.0, 12.0, 15.0, 15.0])
    monkeypatch.setattr("hone.finetune.trainer.time.monotonic", lambda: next(clock))
    phases = Phases()
    with phases.timed("rollout_s"):
        pass
    assert phases.take() == {"rollout_s": 3.0, "learn_s": 0.0, "validate_s": 0.0, "other_s": 7.0}
    with phases.timed("learn_s"):
        pass
    # From 10 to 15; learning from 12 to 15.
    assert phases.take() == {"rollout_s": 0.0, "learn_s": 3.0, "validate_s": 0.0, "other_s": 2.0}


def test_a_stage_that_raises_took_its_time_too():
    phases = Phases()
    with pytest.raises(KeyError), phases.timed("rollout_s"):
        raise KeyError
    assert phases.take()["rollout_s"] > 0
