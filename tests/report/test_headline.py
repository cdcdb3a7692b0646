"""report/headline.py: the headline of a report is right for every run, also for one that failed."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.report.test_metrics import collected, job, rollout, started
from tests.report.test_plots import validation
from tests.report.test_report import finished, log

from hone.report import report
from hone.report.headline import DIFFERENT_TIMES, headline, plot_title
from hone.report.outcome import measure


def test_a_run_that_never_got_a_reward_says_so(tmp_path: Path):
    place = log(tmp_path, started(), finished("failed", message="the server is gone", step=0))
    report.write(place)
    text = (tmp_path / "report.md").read_text()
    assert text.startswith("# The run failed after 0 of 5 epochs\n\nThe server is gone.")
    assert json.loads((tmp_path / "report.json").read_text())["gain"] is None
    assert "Use the model" not in text


def test_a_single_validation_is_reported(tmp_path: Path):
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
        f"examples, p = 0.008. The gain is unlikely to be chance. {DIFFERENT_TIMES}"
    )


def test_examples_that_only_one_validation_scored_are_reported(tmp_path: Path):
    first, last = {str(i): [0.0] for i in range(8)}, {str(i): [1.0] for i in range(7)}
    _, rests = basis(tmp_path, started(), validation(0, first, 0.0), validation(1, last, 1.0))
    assert ", paired over the 7 of 8 examples that both scored, p = 0.016. " in rests


def test_examples_that_no_validation_scored_are_reported(tmp_path: Path):
    # 12 examples are held out, and the agent's own code failed on 6 of them, before and after.
    first, last = (
        validation(i, {str(n): [float(i)] for n in range(6)}, float(i)) | {"num_examples": 12}
        for i in range(2)
    )
    _, rests = basis(tmp_path, started(), first, last)
    assert ", paired over the 6 of 12 examples that both scored, p = 0.031. " in rests


def test_training_rewards_are_compared_only_without_validations(tmp_path: Path):
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

    for shared, verb in ((1, "was"), (5, "were")):
        head, rests = basis(tmp_path, *lines(shared))
        assert head == "Training reward rose from 0.00 to 1.00"
        # Of the 18 over 9 = 48620 ways to deal the rewards out, two are as extreme; of 1999 random
        # ones none is, so p = 2 * 1 / 2000.
        assert (
            f"is +1.00, between the mean rewards of the two epochs ({shared} of 9 examples {verb} in "
            "both, too few to pair), p = 0.001. The gain is unlikely to be chance." in rests
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
    assert "chosen" not in rests and rests.endswith(f" {DIFFERENT_TIMES}")
    _, rests = basis(tmp_path, started(), *lines, finished())
    choice = "The step was chosen as the best of 2 validated steps"
    allows = f"{choice} by these same answers. The p value allows for that choice; the interval does not."
    assert rests.endswith(f"{allows} {DIFFERENT_TIMES}")
    most = {str(i): [float(i < 7)] for i in range(8)}
    anew = [final(0, 2, half), final(2, 2, most)]
    head, rests = basis(tmp_path, started(), *lines, *anew, finished())
    # Three of eight examples rose: p = 2 / 2**3, where the answers that chose the step say 2 / 2**8.
    assert head == "No significant change: held-out reward went from 0.50 to 0.88"
    assert ", p = 0.25. This may be chance." in rests
    again = f"{choice}; it and the first step then answered every example again, side by side."
    assert rests.endswith(again)
    assert measure(tmp_path).as_dict()["selection"] == {"chosen_of": 2, "fresh_answers": True}
    title, note = plot_title(measure(tmp_path))
    assert title == "Held-out reward 0.50 \u2192 0.88" and note.endswith(", step 2 answered again")
    _, rests = basis(tmp_path, started(), *lines[::2], *anew, finished())
    assert rests.endswith("Both steps answered side by side.")
    # At temperature 0 both answers are those of before, so step 1 counts as a rival: flips in which
    # step 2 changes by 3, or step 1 by 0.5 x 8 = 4 of 8, which is more. p is above 2 / 2**3.
    _, rests = basis(tmp_path, started(validation_greedy=True), *lines, *anew, finished())
    assert rests.endswith(
        f"{again} At temperature 0 these are the answers that chose the step. {allows[-58:]}"
    )


def final(
    epoch: int, round: int, rewards: Mapping[str, Sequence[float | None]], **more: Any
) -> dict:
    """One side of the comparison at the end."""
    known = [r for all_ in rewards.values() for r in all_ if r is not None]
    fields = {"type": "final_validation", "at": epoch + 100.0, "round": round, "rewards": rewards}
    return validation(epoch, {}, sum(known) / len(known)) | fields | more


def test_a_pair_is_left_out_whole_if_one_side_did_not_answer(tmp_path: Path):
    """Eight examples of two repetitions; the first step lost three answers to an outage."""
    zero = {str(i): [0.0, 1.0] for i in range(8)}
    # Each second answer is 1 under both; without pairs, examples 0 to 2 would seem to rise from 0.
    before = zero | {str(i): [0.0, None] for i in range(3)}
    unanswered = {str(i): [1] for i in range(3)}
    lines = [started(), validation(0, zero, 0.5), validation(1, zero, 0.5)]
    ends = [final(0, 1, before, unanswered=unanswered, failures=3), final(1, 1, zero)]
    head, rests = basis(tmp_path, *lines, *ends, finished())
    # Examples 0 to 2 keep their first answer, 0 on both sides; the others have a mean of 0.5:
    # 5 x 0.5 / 8.
    assert head == "No significant change: held-out reward went from 0.31 to 0.31"
    assert "3 pairs of rollouts are left out, because one of the two failed before" in rests
    numbers = measure(tmp_path).as_dict()
    assert numbers["gain"]["mean"] == 0.0 and numbers["bound"] is None
    assert numbers["missing"] == {"left_out_pairs": 3, "lost_pairs": 0}


def test_a_verdict_must_survive_the_worst_case_for_what_was_lost(tmp_path: Path):
    """A policy that breaks its environment on what it cannot answer must not seem better."""
    zero, one = {str(i): [0.0] for i in range(12)}, {str(i): [1.0] for i in range(12)}
    lines = [started(), validation(0, zero, 0.0), validation(1, one, 1.0), final(0, 1, zero)]

    def result(lost: int) -> tuple[str, str]:
        after = one | {str(i): [None] for i in range(lost)}
        places = {str(i): [0] for i in range(lost)}
        return basis(tmp_path, *lines, final(1, 1, after, lost=places, failures=lost), finished())

    # Two lost: in the worst case both are 0, the lowest reward seen. 10 of 12 rise: p = 2 / 2**10,
    # or 0.003 by the random flips of 12 examples.
    head, rests = result(2)
    assert head == "Held-out reward rose from 0.00 to 1.00"
    assert "The gain is unlikely to be chance. 2 pairs of rollouts have no reward, because" in rests
    assert "If the missing rewards, which could be 0.00 to 1.00, were those that" in rests
    # Mean 10/12, standard deviation 0.389, t(11) = 2.201: 0.83 -/+ 0.25, cut at 1.
    assert "it would be +0.83 (95% interval +0.59 to +1.00), p = 0.003." in rests
    numbers = measure(tmp_path).as_dict()
    assert (numbers["verdict"], numbers["bound"]["certain"]) == ("better", True)
    assert numbers["missing"] == {"left_out_pairs": 0, "lost_pairs": 2}
    # Six lost: six of twelve rise, p = 2 / 2**6 with and without the six that stay at 0.
    head, rests = result(6)
    assert "p = 0.031. The gain is unlikely" in rests
    # Seven lost: five are left, p = 2 / 2**5.
    head, rests = result(7)
    assert head == "No significant change: held-out reward went from 0.00 to 1.00"
    assert measure(tmp_path).verdict == "unclear"
    fell = {str(i): [-1.0] for i in range(2)}
    lost = final(
        1, 1, one | {str(i): [None] for i in range(5)}, lost={str(i): [0] for i in range(5)}
    )
    before = final(0, 1, zero | fell)
    # The lowest reward seen is -1: 7 of 12 rise by 1, 3 fall by 1, and 2 stay at -1.
    head, rests = basis(tmp_path, *lines[:3], before, lost, finished())
    assert head == "No significant change: held-out reward went from 0.00 to 1.00"
    assert "It is unclear whether this is chance, because rewards are missing." in rests
    assert "it would be +0.33 " in rests and ", which contradicts it." in rests
    assert measure(tmp_path).verdict == "unclear" and measure(tmp_path).is_contradicted
    assert plot_title(measure(tmp_path))[1].endswith("but unclear, because rewards are missing")


def test_what_the_first_step_lost_counts_against_a_gain_as_well(tmp_path: Path):
    zero, one = {str(i): [0.0] for i in range(9)}, {str(i): [1.0] for i in range(9)}
    before = zero | {str(i): [None] for i in range(2)}
    ends = final(0, 1, before, lost={str(i): [0] for i in range(2)}), final(1, 1, one)
    lines = [started(), validation(0, zero, 0.0), validation(1, one, 1.0)]
    _, rests = basis(tmp_path, *lines, *ends, finished())
    # Both would have been 1, the highest reward seen, and not changed: 7 of 9, p = 2 / 2**7.
    assert "it would be +0.78 " in rests and "p = 0.016." in rests
    # A loss is held against the opposite: the lost ones were 0 before and stay 0.
    ends = final(0, 1, one | {"0": [None]}, lost={"0": [0]}), final(1, 1, zero)
    lines = [started(), validation(0, one, 1.0), validation(1, zero, 0.0)]
    head, rests = basis(tmp_path, *lines, *ends, finished())
    assert head == "Held-out reward fell from 1.00 to 0.00" and "it would be \u22120.89 " in rests


def test_the_worst_case_knows_the_rewards_of_training(tmp_path: Path):
    """No held-out answer got more than 0.5, but a training rollout got 1 by the same evaluator."""
    low, high = {str(i): [0.0] for i in range(9)}, {str(i): [0.5] for i in range(9)}
    ends = final(0, 1, low | {"0": [None]}, lost={"0": [0]}), final(1, 1, high)
    lines = [rollout(0, "t", 0, 1.0), validation(0, low, 0.0), validation(1, high, 0.5), *ends]
    _, rests = basis(tmp_path, started(), *lines, finished())
    # Eight rise by 0.5, and the lost one falls from 1 to 0.5: 3.5 / 9.
    assert "which could be 0.00 to 1.00, were" in rests and "it would be +0.39 " in rests
    # With another evaluator, training rewards have another range: 8 of 9 rise by 0.5.
    other = started(evaluator="judge", validation_evaluator="match")
    _, rests = basis(tmp_path, other, *lines, finished())
    assert "which could be 0.00 to 0.50, were" in rests and "it would be +0.44 " in rests


def test_one_example_of_which_a_repetition_was_lost(tmp_path: Path):
    lines = [started(), validation(0, {"a": [0.0]}, 0.0), validation(1, {"a": [1.0]}, 1.0)]
    ends = final(0, 1, {"a": [0.0, 0.0]}), final(1, 1, {"a": [1.0, None]}, lost={"a": [1]})
    _, rests = basis(tmp_path, *lines, *ends, finished())
    assert "is +1.00, paired over 1 example. One example cannot show a significant change." in rests
    # 1 and 0, the lowest reward seen, instead of the lost one: a mean of 0.5 and no p value.
    assert "speak most against the change, it would be +0.50. " in rests


def test_an_interval_that_two_decimals_cannot_show_is_not_printed(tmp_path: Path):
    first, last = ({str(i): [r + i / 1e5] for i in range(8)} for r in (0.2, 0.7))
    place = log(tmp_path, started(), validation(0, first, 0.2), validation(1, last, 0.7))
    report.write(place, brief=True)
    text = (place / "report.md").read_text()
    assert "| before | 0.20 | step 0 |" in text and "| after | 0.70 | step 1 |" in text


def test_held_out_examples_that_were_trained_are_named_in_the_headline(tmp_path: Path):
    first, last = {str(i): [0.0] for i in range(8)}, {str(i): [1.0] for i in range(8)}
    run = started(validation_examples=8, shared_inputs=2, shared_ids=1)
    lines = run, validation(0, first, 0.0), validation(1, last, 1.0), finished()
    head, rests = basis(tmp_path, *lines)
    shared = "3 of 8 examples share an input or id with training"
    assert head == f"Held-out reward rose from 0.00 to 1.00 ({shared})"
    assert "Of the 8 held-out examples, 2 have the input of a training example and 1 has" in rests


def test_relative_scores_give_no_verdict(tmp_path: Path):
    """RULER compares the rollouts of one policy: 0.5 on average, before and after, or by chance 0.9."""
    lines = []
    for epoch in range(4):
        lines += [rollout(epoch, str(i), 0, 0.5 + 0.1 * epoch) for i in range(8)]
        lines += [collected(epoch, 0.5 + 0.1 * epoch), job(epoch)]
    low, high = ({str(i): [value] for i in range(8)} for value in (0.5, 0.9))
    held_out = [validation(0, low, 0.5), validation(4, high, 0.9)]
    ruler = {"evaluator": "ruler", "relative": True}
    both = started(**ruler, validation_relative=True, validation_examples=8)
    for log_lines in ([started(**ruler), *lines], [both, *lines, *held_out]):
        head, rests = basis(tmp_path, *log_lines, finished(best_step=None))
        assert head == "These scores cannot show a change"
        assert rests.startswith("The evaluator ruler compares the rollouts of one policy with each")
        numbers = measure(tmp_path).as_dict()
        assert (numbers["verdict"], numbers["gain"], numbers["relative"]) == ("unknown", None, True)
        assert numbers["checkpoint"]["best_step"] is None and not measure(tmp_path).compared
    # Held-out examples that are scored one by one show it, whatever the training rewards are.
    head, rests = basis(tmp_path, started(**ruler), *lines, *held_out, finished(best_step=None))
    assert head == "Held-out reward rose from 0.50 to 0.90" and measure(tmp_path).best_step == 4
    # Held-out scores that are relative show nothing, but training rewards may.
    last = started(validation_relative=True, validation_examples=8)
    _, rests = basis(tmp_path, last, *lines, *held_out, finished())
    assert rests.startswith(
        "Held-out scores compare the rollouts of one policy with each other, so "
    )


def test_no_example_with_a_reward_on_both_sides(tmp_path: Path):
    first, last = validation(0, {"a": [0.5]}, 0.5), validation(1, {"b": [0.5]}, 0.5)
    head, rests = basis(tmp_path, started(), first, last, finished())
    assert head == "There is nothing to compare"
    assert rests == "No held-out example has a reward under both of the compared steps."


def test_failures_of_the_model_are_reported_and_count_alike_on_both_sides(tmp_path: Path):
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
