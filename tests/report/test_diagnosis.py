"""report/diagnosis.py: why a reward stays flat."""

from tests.report.test_metrics import Line, flat_run, history_of, rollout

from hone.report.diagnosis import diagnosis


def diagnosed(lines: list[Line]) -> str | None:
    return diagnosis(history_of(lines))


def test_a_reward_that_rises_needs_no_diagnosis():
    rising = [{str(i): [e / 4, e / 4 + 0.1] for i in range(10)} for e in range(4)]
    assert diagnosed(flat_run(rising)) is None


def test_two_epochs_are_too_few_to_tell():
    assert diagnosed(flat_run([{"a": [0.0, 1.0], "b": [0.0, 1.0]}] * 2)) is None


def test_relative_rewards_are_flat_whatever_the_policy_learns():
    groups = {str(i): [0.2, 0.8] for i in range(10)}
    assert diagnosed(flat_run([groups] * 3)) is not None
    assert diagnosed(flat_run([groups] * 3, relative=True)) is None


def test_never_solved():
    groups = {str(i): [0.0] * 2 for i in range(9)} | {"9": [0.0, 1.0]}
    text = diagnosed(flat_run([groups] * 3, generations=2, learning_rate=1e-6))
    assert text is not None
    lines = text.splitlines()
    assert lines[0].startswith(
        "The reward did not rise by more than chance in the last 3 epochs: 0.050 -> 0.050"
    )
    # 3 epochs of 10 groups, 9 of them flat.
    assert "27 of 30 groups had equal rewards (90%)" in lines[1]
    assert "clip_frac 0.020; learning rate 1e-06, 3 optimizer steps so far; 2 gen" in lines[1]
    assert "lowest reward of the run" in lines[2] and "partial credit" in lines[2]
    assert "num_generations is 2" in lines[3] and "to 8" in lines[3]
    assert "learning rate 1e-06 is small" in lines[4] and "by at most 3e-06" in lines[4]


def test_all_solved():
    groups = {str(i): [1.0] * 8 for i in range(9)} | {"9": [0.0] + [1.0] * 7}
    text = diagnosed(flat_run([groups] * 3))
    assert text is not None
    assert "highest reward of the run: these examples are solved" in text
    assert "num_generations" not in text


def test_an_evaluator_that_gives_equal_rewards():
    text = diagnosed(flat_run([{str(i): [0.5] * 8 for i in range(4)}] * 3))
    assert text is not None
    assert "every rollout of the run has the reward 0.5" in text


def test_too_much_clipping():
    lines = flat_run([{str(i): [0.0, 1.0] * 4 for i in range(4)}] * 3)
    for event in lines:
        if event["type"] == "job_done":
            event["metrics"]["learn/clip_frac"] = 0.4
    text = diagnosed(lines)
    assert text is not None
    assert "clip_frac is 0.40" in text and "Halve" in text


def test_jobs_that_never_took_a_step():
    lines = flat_run([{str(i): [0.0, 1.0] * 4 for i in range(4)}] * 3)
    for event in lines:
        if event["type"] == "job_done":
            event["metrics"] = {}
            event["reason"] = "no gradient step: 4 of 4 groups have equal rewards"
    text = diagnosed(lines)
    assert text is not None
    assert "no job has changed the model yet: no gradient step: 4 of 4" in text


def test_a_falling_reward_is_called_that():
    falling = [{str(i): [1 - e / 4, 0.9 - e / 4] for i in range(10)} for e in range(3)]
    text = diagnosed(flat_run(falling))
    assert text is not None
    assert "the reward falls" in text and "training.beta" in text


def test_dpo_is_held_to_its_reference_by_its_own_beta():
    lines = flat_run([{str(i): [1 - e / 4, 0.9 - e / 4] for i in range(10)} for e in range(3)])
    for event in lines:
        if event["type"] == "job_done":
            del event["metrics"]["learn/clip_frac"]
            event["metrics"]["learn/reward_accuracy"] = 0.75
    text = diagnosed(lines)
    assert text is not None
    assert "reward_accuracy 0.750" in text and "a larger trainers.*.beta" in text
    assert "training.beta" not in text and "clip" not in text


def test_a_flat_reward_without_a_known_cause():
    text = diagnosed(flat_run([{str(i): [0.0, 1.0] * 4 for i in range(4)}] * 3))
    assert text is not None
    assert "none of these explains it" in text


def test_failures_are_named():
    lines = flat_run([{str(i): [0.0, 1.0] * 4 for i in range(4)}] * 3)
    lost = {"failure_kind": "policy", "failure_reason": "token_limit"}
    lines[1:1] = [rollout(0, f"x{i}", 0, None, **lost) for i in range(12)]
    text = diagnosed(lines)
    assert text is not None
    assert "12 of 108 rollouts failed" in text
