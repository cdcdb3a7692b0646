"""Did the model improve: the headline of a report and of a plot, and what it is based on.

In:   an Outcome
Out:  a headline, a few sentences, and a tone; the title of the reward plot

A run that failed, was interrupted or learned nothing says that before anything else. The sentences
name whatever makes two numbers less comparable than they look: the steps that are compared and when
they answered, rollouts that are left out or lost, rewards of training examples.
"""

from collections.abc import Iterator

from hone.report.estimate import MIN_PAIRS, Estimate
from hone.report.outcome import Outcome
from hone.report.text import counted, have, interval, number, p_value

DIFFERENT_TIMES = (
    "The two steps answered at different times, so a passing fault of the environment can look like a "
    "change."
)


def headline(outcome: Outcome) -> tuple[str, str, str]:
    """Headline, what it is based on, and a tone: good, bad or unsure."""
    history, planned = outcome.history, outcome.history.run.epochs
    change, basis, tone = _change(outcome)
    message = _sentence(history.finished.message if history.finished else None)
    if history.status == "completed":
        stopped_early = history.num_done < planned
        return change, f"{basis} {message}".strip() if stopped_early else basis, tone
    done = f"after {history.num_done} of {counted(planned, 'epoch')}"
    so_far = f"So far: {change[:1].lower()}{change[1:]}. {basis}"
    if history.status == "unfinished":
        resume = "It is not finished; the command below resumes it."
        return f"The run was interrupted {done}", f"{resume} {so_far}", "unsure"
    ended = "failed" if history.status == "failed" else f"ended with the status {history.status}"
    return f"The run {ended} {done}", f"{message} {so_far}", "bad"


def _change(outcome: Outcome) -> tuple[str, str, str]:
    first, last, gain = outcome.baseline, outcome.tuned, outcome.gain
    if outcome.idle:
        reason = f"No job changed the model: {_sentence(outcome.idle)}"
        return "Nothing was learned", reason, "unsure"
    run = outcome.history.run
    if outcome.is_relative:
        name = f"The evaluator {run.evaluator}" if run.evaluator else "The evaluator"
        reason = (
            f"{name} compares the rollouts of one policy with each other, so its scores stay about the "
            "same however good the policy is. Validate with an evaluator that scores each rollout by "
            "itself (--validation_config_file)."
        )
        return "These scores cannot show a change", reason, "unsure"
    if run.validation_relative:
        missing, hint = "Held-out scores compare the rollouts of one policy with each other", []
    elif run.validation_examples or outcome.history.validations:
        missing, hint = "Fewer than two validations have a reward", []
    else:
        missing = "There are no held-out examples"
        hint = ["Name held-out examples with --validation_dataset."]
    if first is None or last is None or gain is None:
        if outcome.held_out:
            missing = "No held-out example has a reward under both of the compared steps"
            return "There is nothing to compare", f"{missing}.", "unsure"
        reason = f"{missing}, and fewer than two epochs have training rewards."
        return "There is nothing to compare", " ".join([reason, *hint]), "unsure"
    what = "held-out reward" if outcome.held_out else "training reward"
    moved = f"from {number(first.mean)} to {number(last.mean)}"
    head, tone = {
        "better": (f"{what.capitalize()} rose {moved}", "good" if outcome.held_out else "unsure"),
        "worse": (f"{what.capitalize()} fell {moved}", "bad"),
    }.get(outcome.verdict, (f"No significant change: {what} went {moved}", "unsure"))
    if outcome.held_out and (n := run.shared_inputs + run.shared_ids):
        share = "shares" if n == 1 else "share"
        examples = counted(run.validation_examples or n, "example")
        head += f" ({n} of {examples} {share} an input or id with training)"
    steps = f" from step {first.step} to step {last.step}" if last.step is not None else ""
    p = f", {p_value(gain)}" if gain.p is not None else ""
    size = interval(gain, paired=bool(outcome.deltas))
    change = f"The change{steps} is {size}{_paired(outcome, gain)}{p}."
    basis = [change, _certainty(outcome, gain), *_missing(outcome), _choice(outcome)]
    basis += [_failures(outcome), _shared_with_training(outcome)]
    if not outcome.held_out:
        epochs = f"epoch {first.epoch + 1} and epoch {last.epoch + 1}"
        training = (
            f"{missing}, so these are the rewards of {epochs} on the training examples, which "
        )
        basis = [f"{training}a model can memorize.", *hint, *basis]
    return head, " ".join(filter(None, basis)), tone


def _paired(outcome: Outcome, gain: Estimate) -> str:
    """The examples that are compared; some may have a reward under only one of the policies."""
    assert outcome.baseline is not None and outcome.tuned is not None
    most = max(outcome.baseline.n, outcome.tuned.n)
    if not outcome.deltas:
        if not outcome.shared:
            return ", between the mean rewards of different examples"
        few = f"{outcome.shared} of {counted(most, 'example')} {'was' if outcome.shared == 1 else 'were'} in both"
        return f", between the mean rewards of the two epochs ({few}, too few to pair)"
    if outcome.compared is not None:
        most = max(most, outcome.compared.before.num_examples, outcome.compared.after.num_examples)
    if gain.n < most:  # its mean is then not the difference of the two means
        return f", paired over the {gain.n} of {most} examples that both scored"
    return f", paired over {counted(gain.n, 'example')}"


def _certainty(outcome: Outcome, gain: Estimate) -> str:
    """What the p value says, which decides; if the interval seems to disagree, also the reason."""
    if gain.p is None:
        return "One example cannot show a significant change."
    if outcome.deltas and gain.n < MIN_PAIRS:
        return f"Fewer than {MIN_PAIRS} examples cannot show a significant change."
    more = f"More {'held-out ' if outcome.held_out else ''}examples would settle it."
    if not gain.certain and gain.excludes_zero:
        return (
            "This may be chance. The interval excludes 0, but with so few or such uneven changes it is "
            f"too narrow; the test decides. {more}"
        )
    if not gain.certain:
        return f"This may be chance. {more}"
    if outcome.is_contradicted:
        return "It is unclear whether this is chance, because rewards are missing."
    text = f"The {'gain' if gain.mean > 0 else 'loss'} is unlikely to be chance."
    if gain.low is not None and not gain.excludes_zero:
        text += " Its size is uncertain: a few examples changed by far more than the rest."
    if gain.mean < 0 and outcome.held_out:
        text += " Serve an earlier step instead (NAME@best, NAME@0)."
    return text


def _choice(outcome: Outcome) -> str:
    """How the step was chosen, when the two answered, and what that means for the numbers."""
    compared = outcome.compared
    if compared is None:
        return ""
    if compared.chosen_of < 2:
        return "Both steps answered side by side." if compared.fresh else DIFFERENT_TIMES
    chosen = f"The step was chosen as the best of {compared.chosen_of} validated steps"
    allowance = "The p value allows for that choice; the interval does not."
    if not compared.fresh:
        return f"{chosen} by these same answers. {allowance} {DIFFERENT_TIMES}"
    again = f"{chosen}; it and the first step then answered every example again, side by side."
    if compared.others:
        return f"{again} At temperature 0 these are the answers that chose the step. {allowance}"
    return again


def _missing(outcome: Outcome) -> Iterator[str]:
    """What is left out of the change, and the change in the worst case for what was lost."""
    compared, bound = outcome.compared, outcome.bound
    if compared is None:
        return
    if n := compared.num_left_out:
        yield (
            f"{counted(n, 'pair')} of rollouts {'is' if n == 1 else 'are'} left out, because one of the "
            "two failed before the model answered."
        )
    if bound is not None:
        n, seen = len(compared.lost), f"{number(compared.lowest)} to {number(compared.highest)}"
        contradicts = "" if not outcome.is_contradicted else ", which contradicts it"
        yield (
            f"{counted(n, 'pair')} of rollouts {'has' if n == 1 else 'have'} no reward, because the "
            "environment failed after the model had answered. If the missing rewards, which could be "
            f"{seen}, were those that speak most against the change, it would be "
            f"{', '.join(filter(None, (interval(bound), p_value(bound))))}{contradicts}."
        )


def _failures(outcome: Outcome) -> str:
    """How many rollouts failed because of the model, and what reward they count as."""
    if outcome.compared is None:
        return ""
    before, after = outcome.compared.before, outcome.compared.after
    reward = before.failure_reward if after.failure_reward is None else after.failure_reward
    if reward is None:
        return ""
    return (
        f"{before.failure_rate or 0.0:.0%} of the rollouts failed because of the model before and "
        f"{after.failure_rate or 0.0:.0%} after; each counts as {number(reward)} on both sides."
    )


def _shared_with_training(outcome: Outcome) -> str:
    """How many held-out examples the model was trained on."""
    run = outcome.history.run
    parts = []
    if run.shared_inputs:
        parts.append(f"{have(run.shared_inputs)} the input of a training example")
    if run.shared_ids:
        parts.append(f"{have(run.shared_ids)} the id of one with another input")
    if not outcome.held_out or not parts:
        return ""
    count = counted(run.validation_examples or 0, "held-out example")
    return f"Of the {count}, {' and '.join(parts)}, which the model may have learned by heart."


def _sentence(text: str | None) -> str:
    text = (text or "").strip()
    return f"{text[:1].upper()}{text[1:]}{'' if not text or text[-1] in '.!?' else '.'}"


def plot_title(outcome: Outcome) -> tuple[str, str]:
    """The result in a few words, and how certain it is."""
    first, last, gain, compared = outcome.baseline, outcome.tuned, outcome.gain, outcome.compared
    if first and last and gain:
        what = "Held-out" if outcome.held_out else "Training"
        again = f"step {last.step} answered again" if compared and compared.fresh else ""
        size = interval(gain, paired=bool(outcome.deltas))
        doubt = "but unclear, because rewards are missing" if outcome.is_contradicted else ""
        notes = size, counted(gain.n, "example"), p_value(gain), again, doubt
        text = f"{what} reward {number(first.mean)} \u2192 {number(last.mean)}"
        return text, ", ".join(filter(None, notes))
    history = outcome.history
    for what, means in {
        "Training": [r.metrics.get("avg_reward") for r in history.rounds],
        "Held-out": [v.mean for v in history.validations],
    }.items():
        if known := [mean for mean in means if mean is not None]:
            return f"{what} reward {number(known[-1])}", ""
    return "No reward" if history.finished else "No reward yet", ""
