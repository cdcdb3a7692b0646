"""report/headline.py: the first words of a report are true of every run, also of those that failed."""

import json
from pathlib import Path

from tests.report.test_metrics import collected, job, rollout, started
from tests.report.test_plots import validation
from tests.report.test_report import finished, log

from hone.report import report
from hone.report.headline import headline, plot_title
from hone.report.outcome import measure


def test_a_run_that_never_got_a_reward_says_so(tmp_path: Path):
    place = log(tmp_path, started(), finished("failed", message="the server is gone", step=0))
    report.write(place)
    text = (tmp_path / "report.md").read_text()
    assert text.startswith("# The run failed after 0 of 5 epochs\n\nThe server is gone.")
    assert json.loads((tmp_path / "report.json").read_text())["gain"] is None
    assert "Use the model" not in text


def test_one_validation_alone_is_told(tmp_path: Path):
    head, rests = basis(tmp_path, started(), validation(0, {"a": [0.5]}, 0.5), finished())
    assert head == "There is nothing to compare"
    assert rests == (
        "Fewer than two validations have a reward, and fewer than two epochs have training rewards."
    )


def basis(tmp_path: Path, *lines: dict) -> tuple[str, str]:
    return headline(measure(log(tmp_path, *lines)))[:2]


def test_one_epoch_without_held_out_examples(tmp_path: Path):
    head, rests = basis(tmp_path, started(), collected(0, 0.5), job(0), finished())
    assert head == "There is nothing to compare"
    assert rests == (
        "There are no held-out examples, and fewer than two epochs have training rewards. "
        "Name held-out examples with --validation_dataset."
    )


def test_jobs_that_moved_nothing_are_no_gain(tmp_path: Path):
    why = "no gradient step: 4 of 4 groups have equal rewards"
    right = {str(i): [1.0] for i in range(8)}
    wrong = {str(i): [0.0] for i in range(8)}
    lines = [started(), validation(0, wrong, 0.0), collected(0, 0.5), job(0, reason=why)]
    head, rests = basis(tmp_path, *lines, validation(1, right, 1.0), finished())
    assert head == "Nothing was learned"
    assert rests == f"No job changed the model: N{why[1:]}."
    assert measure(tmp_path).verdict == "unclear"
    # One job that did move it is enough.
    head, _ = basis(
        tmp_path, *lines, collected(1, 0.5), job(1), validation(2, right, 1.0), finished()
    )
    assert head == "Held-out reward rose from 0.00 to 1.00"
    # Nothing to compare, and nothing learned.
    head, rests = basis(tmp_path, started(), collected(0, 0.5), job(0, reason=why), finished())
    assert head == "Nothing was learned" and rests.startswith("No job changed the model: ")


def test_the_steps_that_are_compared_are_named(tmp_path: Path):
    """The first and the last validation failed, so the ones after and before them are compared."""
    first, last = {str(i): [0.0] for i in range(8)}, {str(i): [1.0] for i in range(8)}
    _, rests = basis(
        tmp_path,
        started(validation_examples=8),
        validation(0, {}, None),
        validation(1, first, 0.0),
        validation(4, last, 1.0),
        validation(5, {}, None),
        finished(),
    )
    assert rests == (
        "The change from step 1 to step 4 is +1.00 (all examples changed alike), paired over 8 "
        "examples, p = 0.008. The gain is unlikely to be chance."
    )


def test_examples_that_only_one_validation_scored_are_told(tmp_path: Path):
    first, last = {str(i): [0.0] for i in range(8)}, {str(i): [1.0] for i in range(7)}
    _, rests = basis(tmp_path, started(), validation(0, first, 0.0), validation(1, last, 1.0))
    assert ", paired over the 7 of 8 examples that both scored, p = 0.016. " in rests


def test_examples_that_no_validation_scored_are_told(tmp_path: Path):
    # 12 examples are held out, and the agent's own code failed on 6 of them, before and after.
    first, last = (
        validation(i, {str(n): [float(i)] for n in range(6)}, float(i)) | {"num_examples": 12}
        for i in range(2)
    )
    _, rests = basis(tmp_path, started(), first, last)
    assert ", paired over the 6 of 12 examples that both scored, p = 0.031. " in rests


def test_training_rewards_stand_in_only_for_want_of_validations(tmp_path: Path):
    lines = []
    for epoch in range(2):
        lines += [rollout(epoch, str(i), 0, float(epoch)) for i in range(8)]
        lines.append(collected(epoch, float(epoch)))
    head, rests = basis(tmp_path, started(), *lines)
    assert (
        "So far: training reward rose from 0.00 to 1.00. There are no held-out examples, " in rests
    )
    assert head == "The run was interrupted after 0 of 5 epochs"
    held_out = started(validation_examples=8)
    _, rests = basis(tmp_path, held_out, validation(0, {}, None), *lines, finished())
    assert rests.startswith(
        "Fewer than two validations have a reward, so these are the rewards of epoch 1 "
    )
    assert "--validation_dataset" not in rests  # it was named
    _, rests = basis(
        tmp_path, held_out, validation(0, {"a": [0.5]}, 0.5), *lines, validation(2, {}, None)
    )
    assert "Fewer than two validations have a reward, so " in rests


def test_training_rewards_with_few_shared_examples_are_compared_unpaired(tmp_path: Path):
    """5 changes of one sign cannot be significant, but 9 rewards against 9 others can."""

    def lines(shared: int) -> list[dict]:
        first = [rollout(0, f"a{i}", 0, 0.0) for i in range(9)]
        last = [rollout(1, f"a{i}" if i < shared else f"b{i}", 0, 1.0) for i in range(9)]
        return [started(), *first, collected(0, 0.0), *last, collected(1, 1.0), finished()]

    for shared in (1, 5):
        head, rests = basis(tmp_path, *lines(shared))
        assert head == "Training reward rose from 0.00 to 1.00"
        # Of the 18 over 9 = 48620 ways to deal the rewards out, two are as extreme; of 1999 random
        # ones none is, so p = 2 * 1 / 2000.
        assert (
            f"is +1.00, between the mean rewards of different examples ({shared} of 9 were in both "
            "epochs, too few to pair), p = 0.001. The gain is unlikely to be chance." in rests
        )
        assert measure(tmp_path).verdict == "better" and not measure(tmp_path).deltas
    _, rests = basis(tmp_path, *lines(6))
    assert "is +1.00 (all examples changed alike), paired over the 6 of 9 examples" in rests
    _, rests = basis(tmp_path, *lines(0))
    assert "is +1.00, between the mean rewards of different examples, p = 0.001." in rests


def test_so_few_different_examples_cannot_show_a_change(tmp_path: Path):
    """Two against two: the 4 over 2 = 6 ways to deal them out give p = 2 / 6 at best."""
    lines = []
    for epoch in range(2):
        lines += [rollout(epoch, f"{epoch}{i}", 0, float(epoch)) for i in range(2)]
        lines.append(collected(epoch, float(epoch)))
    head, rests = basis(tmp_path, started(), *lines, finished())
    assert head == "No significant change: training reward went from 0.00 to 1.00"
    assert "p = 0.33. This may be chance." in rests and "cannot show" not in rests
    assert measure(tmp_path).verdict == "unclear"


def test_words_follow_the_p_value_where_the_interval_says_something_else(tmp_path: Path):
    zero = {str(i): [0.0] for i in range(8)}
    # 4 of 8 rose by 1: the t interval is 0.05 to 0.95, and p = 2 / 2**4.
    some = {str(i): [float(i < 4)] for i in range(8)}
    lines = [started(), validation(0, zero, 0.0), validation(1, some, 0.5), finished()]
    head, rests = basis(tmp_path, *lines)
    assert head == "No significant change: held-out reward went from 0.00 to 0.50"
    assert rests.startswith(
        "The change from step 0 to step 1 is +0.50 (95% interval +0.05 to +0.95), paired over 8 examples, p = 0.12. This "
        "may be chance. The interval excludes 0, but"
    )
    assert measure(tmp_path).verdict == "unclear"
    # All rose, seven of them by little: p = 2 / 2**8, and the interval reaches below 0.
    uneven = {str(i): [1.0 if i == 0 else 0.01] for i in range(8)}
    lines = [started(), validation(0, zero, 0.0), validation(1, uneven, 0.13), finished()]
    head, rests = basis(tmp_path, *lines)
    assert head == "Held-out reward rose from 0.00 to 0.13"
    assert "p = 0.008. The gain is unlikely to be chance. Its size is uncertain" in rests
    assert measure(tmp_path).verdict == "better"


def test_the_words_say_how_the_step_was_chosen(tmp_path: Path):
    """Fresh answers, a p value that allows for the choice, or nothing to say."""
    zero, half, one = ({str(i): [float(i < n)] for i in range(8)} for n in (0, 4, 8))
    lines = [validation(0, zero, 0.0), validation(1, half, 0.5), validation(2, one, 1.0)]
    _, rests = basis(tmp_path, started(), *lines[::2], finished())
    assert "chosen" not in rests
    _, rests = basis(tmp_path, started(), *lines, finished())
    choice = "The step was chosen as the best of 2 validated steps"
    allows = f"{choice} by these same answers. The p value allows for that choice; the interval does not."
    assert rests.endswith(allows)
    most = {str(i): [float(i < 7)] for i in range(8)}
    anew = [
        validation(0, half, 0.5) | {"type": "final_validation"},
        validation(2, most, 0.875) | {"type": "final_validation"},
    ]
    head, rests = basis(tmp_path, started(), *lines, *anew, finished())
    # Three of eight examples rose: p = 2 / 2**3, where the answers that chose the step say 2 / 2**8.
    assert head == "No significant change: held-out reward went from 0.50 to 0.88"
    assert ", p = 0.25. This may be chance." in rests
    assert rests.endswith(f"{choice}; it and the first step then answered every example again.")
    assert measure(tmp_path).as_dict()["selection"] == {"chosen_of": 2, "fresh_answers": True}
    title, note = plot_title(measure(tmp_path))
    assert title == "Held-out reward 0.50 \u2192 0.88" and note.endswith(", step 2 answered again")


def test_failures_of_the_model_are_told_and_count_alike_on_both_sides(tmp_path: Path):
    """All of step 0 answer -0.5 or fail; none of step 1 fails. A failure counts as -0.5."""
    first = {str(i): [-0.5 if i < 4 else None] for i in range(8)}
    lines = validation(0, {}, -0.5) | {"rewards": first, "on_policy_failure": "drop"}
    lines |= {"policy_failures": {str(i): 1 for i in range(4, 8)}, "failures": 4}
    after = validation(1, {str(i): [1.0] for i in range(8)}, 1.0)
    head, rests = basis(tmp_path, started(), lines, after, finished())
    assert head == "Held-out reward rose from \u22120.50 to 1.00"
    assert rests.endswith(
        "50% of the rollouts failed because of the model before and 0% after; each counts as "
        "\u22120.50 on both sides."
    )
    numbers = measure(tmp_path).as_dict()
    assert (numbers["baseline"]["failure_rate"], numbers["tuned"]["failure_rate"]) == (0.5, 0.0)
    assert numbers["failure_reward"] == -0.5 and numbers["gain"]["n"] == 8
