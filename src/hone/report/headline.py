"""Whether the model got better: the first words of a report, and what they rest on.

In:   a Report
Out:  a headline, a few sentences, and a tone (good, bad or unsure)

A run that failed, was interrupted or learned nothing says that before anything else. Whatever makes two
numbers less comparable than they look is said with them: which validations failed, which examples
only one of them scored, that the rewards are of training examples.
"""

from typing import TYPE_CHECKING

from hone.report.estimate import MIN_PAIRS, Estimate
from hone.report.text import counted, interval, number, p_value, when

if TYPE_CHECKING:
    from hone.report.report import Report
    from hone.report.validations import Validation

Tone = str
"""good, bad or unsure: the colour of the answer."""
NAME_SOME = "Name held-out examples with --validation_dataset."


def answer(report: "Report") -> tuple[str, str, Tone]:
    """Headline, what it rests on, tone."""
    history = report.history
    change, rests, tone = _change(report)
    planned = history.run.epochs or 0
    done = f"{len(history.done)} of {counted(planned, 'epoch')}"
    message = (history.finished and history.finished.message) or ""
    if history.status == "unfinished":
        head = f"The run was interrupted after {done}"
        again = "It is not finished; the command below goes on from there."
        return head, f"{again} So far: {_lower(change)}. {rests}".strip(), "unsure"
    if history.status == "failed":
        head = f"The run failed after {done}"
        return head, f"{_sentence(message)} Until then: {_lower(change)}. {rests}".strip(), "bad"
    if history.status != "completed":
        head = f"The run ended as {history.status} after {done}"
        return head, f"{_sentence(message)} Until then: {_lower(change)}. {rests}".strip(), "unsure"
    early = f" {_sentence(message)}" if len(history.done) < planned and message else ""
    return change, rests + early, tone


def _change(report: "Report") -> tuple[str, str, Tone]:
    first, last, gain = report.baseline, report.tuned, report.gain
    if first is None or last is None or gain is None:
        said = [*_idle(report), *_why_nothing(report)]
        head = "Nothing was learned" if report.idle else "Nothing can be compared"
        return head, " ".join(said), "unsure"
    what = "Held-out reward" if report.held_out else "Training reward"
    moved = f"from {number(first.value.mean)} to {number(last.value.mean)}"
    chance = f", {p_value(gain)}" if gain.p is not None else ""
    change = f"The change is {interval(gain)}{_paired(report, gain)}{chance}: "
    if report.idle:
        same = f"{what} went {moved} all the same: that is chance, for the model did not change."
        return "Nothing was learned", " ".join([*_idle(report), same]), "unsure"
    if report.verdict == "better":
        head, tone = f"{what} rose {moved}", "good"
    elif report.verdict == "worse":
        head, tone = f"{what} fell {moved}", "bad"
    else:
        head, tone = f"No certain gain: {_lower(what)} went {moved}", "unsure"
    if report.held_out:
        said = [change + _certainty(report, gain), *_choice(report), *_failures(report)]
        return head, " ".join([*said, *_gaps(report)]), tone
    rests = f"{_why_training(report)} {change}{_certainty(report, gain)}"
    return head, rests, "unsure" if tone == "good" else tone


def _idle(report: "Report") -> list[str]:
    return [f"No job moved the model: {_sentence(report.idle)}"] if report.idle else []


def _paired(report: "Report", gain: Estimate) -> str:
    if not report.deltas:
        return " between different examples"
    assert report.baseline is not None and report.tuned is not None
    most = max(report.baseline.value.n, report.tuned.value.n)
    if report.compared is not None:
        most = max(most, report.compared.before.num_examples, report.compared.after.num_examples)
    if gain.n < most:  # its mean is then not the difference of the two means
        return f", paired over the {gain.n} of {most} examples that both scored"
    return f", paired over {counted(gain.n, 'example')}"


def _certainty(report: "Report", gain: Estimate) -> str:
    """What the p value says. It decides; where the interval seems to disagree, why it may."""
    if gain.p is None:
        return "one example says nothing about others."
    if gain.n < MIN_PAIRS:
        return f"on fewer than {MIN_PAIRS} examples nothing is certain."
    if not gain.certain:
        if gain.leaves_out_0:
            return (
                "so it may be chance. The interval leaves out 0, but on so few or such uneven changes "
                "it is too narrow; the test decides. More held-out examples would settle it."
            )
        return "so it may be chance. More held-out examples would narrow the interval."
    what = "gain" if gain.mean > 0 else "loss"
    said = f"so the {what} is unlikely to be chance."
    if not gain.leaves_out_0:
        said += " How large it is remains open: a few examples changed by far more than the rest."
    if gain.mean < 0 and report.held_out:
        said += " Serve an earlier step instead (NAME@best, NAME@0)."
    return said


def _choice(report: "Report") -> list[str]:
    """How the step was chosen, and what that means for the numbers."""
    compared = report.compared
    if compared is None or compared.chosen_of < 2:
        return []
    after = compared.after
    name = f"Step {after.step}" if after.step is not None else f"The policy {when(after.epoch)}"
    said = f"{name} was chosen as the best of {compared.chosen_of} validated steps"
    if compared.fresh:
        return [
            f"{said}; it and the first step then answered every example anew, for this comparison."
        ]
    said += " by these same answers. The p value allows for that choice; the interval does not"
    if report.history.run.validation_greedy:
        return [f"{said}. (At temperature 0, answering anew would repeat the answers.)"]
    if report.history.status == "completed":
        return [f"{said}."]
    return [f"{said}. A run that ends well lets both steps answer anew."]


def _failures(report: "Report") -> list[str]:
    """What failures of the model count as, and how many there were."""
    compared = report.compared
    if compared is None or not (compared.before.policy_failures or compared.after.policy_failures):
        return []
    before, after = compared.before, compared.after
    worth = before.failure_reward if after.failure_reward is None else after.failure_reward
    return [
        f"{_rate(before)} of the rollouts failed through the model's own doing before and "
        f"{_rate(after)} after; each counts as {number(worth)} on both sides."
    ]


def _rate(validation: "Validation") -> str:
    return f"{validation.failure_rate or 0.0:.0%}"


def _gaps(report: "Report") -> list[str]:
    """Where the first or the last validation gave no number, another stands in for it."""
    assert report.baseline is not None and report.tuned is not None
    first, last, said = report.baseline.epoch, report.tuned.epoch, []
    if first:
        said.append(f"No validation before the training gave a number: 'before' is {when(first)}.")
    newest = report.history.validations[-1]
    if newest.mean is None and newest.epoch > last:
        said.append(f"The validation {when(newest.epoch)} gave no number: 'after' is {when(last)}.")
    return said


def _why_training(report: "Report") -> str:
    """Why training rewards stand in for held-out ones."""
    first, last = report.baseline, report.tuned
    assert first is not None and last is not None
    of = f"so these are the rewards of epoch {first.epoch + 1} and epoch {last.epoch + 1} on the "
    of += "training examples, which a model may learn by heart."
    if not report.history.run.validation_examples:
        return f"There are no held-out examples, {of} {NAME_SOME}"
    return f"{_validations(report)}, {of}"


def _validations(report: "Report") -> str:
    """How many there were, and what they came to; no full stop."""
    history = report.history
    failed = len(history.validations) - len(history.scored)
    scored = history.scored
    if not history.validations:
        return "Held-out examples were not run yet"
    if not scored:
        return f"None of {counted(failed, 'validation')} gave a number"
    one = f"One validation gave a number, {number(scored[0].mean)} {when(scored[0].epoch)}"
    return f"{one}, and {failed} gave none" if failed else one


def _why_nothing(report: "Report") -> list[str]:
    history = report.history
    held_out = bool(history.run.validation_examples or history.validations)
    said = [f"{_validations(report)}."] if held_out else []
    found = [(epoch, mean) for epoch, mean in report.epoch_means if mean is not None]
    if not found:
        said.append("No training rollout gave a reward.")
    elif len(found) == 1:
        epoch, mean = found[0]
        said.append(
            f"Only epoch {epoch + 1} gave training rewards (mean {number(mean)}), earned before it "
            "was trained on."
        )
    if not held_out and history.status == "completed":
        said.append(NAME_SOME)
    return said


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def _sentence(text: str) -> str:
    text = text.strip()
    return f"{text[:1].upper()}{text[1:]}{'' if not text or text[-1] in '.!?' else '.'}"
