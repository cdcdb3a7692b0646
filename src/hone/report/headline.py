"""Did the model get better: the first words of a report, and what they rest on.

In:   an Outcome
Out:  a headline, a few sentences, and a tone

A run that failed, was interrupted or learned nothing says that before anything else. The sentences
name whatever makes two numbers less comparable than they look: validations that failed, examples
that only one of them scored, rewards of training examples.
"""

from hone.report.blocks import Tone
from hone.report.estimate import MIN_PAIRS, Estimate
from hone.report.metrics import reward_history
from hone.report.outcome import Outcome
from hone.report.text import counted, interval, number, p_value, when
from hone.report.validations import Validation

NAME_EXAMPLES = "Name held-out examples with --validation_dataset."


def answer(outcome: Outcome) -> tuple[str, str, Tone]:
    """Headline, what it rests on, tone."""
    history, planned = outcome.history, outcome.history.run.epochs
    change, basis, tone = _change(outcome)
    done = f"{len(history.done)} of {counted(planned, 'epoch')}"
    message = _sentence((history.finished and history.finished.message) or "")
    so_far = f"{change[:1].lower()}{change[1:]}. {basis}".strip()
    if history.status == "completed":
        early = f" {message}" if len(history.done) < planned and message else ""
        return change, basis + early, tone
    if history.status == "unfinished":
        resume = "It is not finished; the command below resumes it."
        return f"The run was interrupted after {done}", f"{resume} So far: {so_far}", "unsure"
    failed = history.status == "failed"
    head = "The run failed" if failed else f"The run ended with the status {history.status}"
    return f"{head} after {done}", f"{message} Before that: {so_far}", "bad" if failed else "unsure"


def _change(outcome: Outcome) -> tuple[str, str, Tone]:
    first, last, gain = outcome.baseline, outcome.tuned, outcome.gain
    idle = [f"No job changed the model: {_sentence(outcome.idle)}"] if outcome.idle else []
    if first is None or last is None or gain is None:
        head = "Nothing was learned" if idle else "There is nothing to compare"
        return head, " ".join([*idle, *_why_nothing(outcome)]), "unsure"
    what = "held-out reward" if outcome.held_out else "training reward"
    moved = f"from {number(first.value.mean)} to {number(last.value.mean)}"
    if idle:
        chance = f"The {what} still went {moved}, which is chance: the model did not change."
        return "Nothing was learned", f"{idle[0]} {chance}", "unsure"
    head, tone = _verdict(outcome, what, moved)
    p = f", {p_value(gain)}" if gain.p is not None else ""
    change = f"The change is {interval(gain)}{_paired(outcome, gain)}{p}."
    basis = [change, _certainty(outcome, gain)]
    if not outcome.held_out:
        return (
            head,
            " ".join([_why_training(outcome), *basis]),
            "unsure" if tone == "good" else tone,
        )
    basis += [*_choice(outcome), *_failures(outcome), *_gaps(outcome)]
    return head, " ".join(basis), tone


def _verdict(outcome: Outcome, what: str, moved: str) -> tuple[str, Tone]:
    if outcome.verdict == "better":
        return f"{what.capitalize()} rose {moved}", "good"
    if outcome.verdict == "worse":
        return f"{what.capitalize()} fell {moved}", "bad"
    return f"No significant change: {what} went {moved}", "unsure"


def _paired(outcome: Outcome, gain: Estimate) -> str:
    if not outcome.deltas:
        return " between different examples"
    assert outcome.baseline is not None and outcome.tuned is not None
    most = max(outcome.baseline.value.n, outcome.tuned.value.n)
    if outcome.compared is not None:
        most = max(most, outcome.compared.before.num_examples, outcome.compared.after.num_examples)
    if gain.n < most:  # its mean is then not the difference of the two means
        return f", paired over the {gain.n} of {most} examples that both scored"
    return f", paired over {counted(gain.n, 'example')}"


def _certainty(outcome: Outcome, gain: Estimate) -> str:
    """What the p value says. It decides; if the interval seems to disagree, the reason."""
    if gain.p is None:
        return "One example says nothing about others."
    if gain.n < MIN_PAIRS:
        return f"Fewer than {MIN_PAIRS} examples cannot show a significant change."
    if not gain.certain and gain.leaves_out_0:
        return (
            "This may be chance. The interval excludes 0, but with so few or such uneven changes it is "
            "too narrow; the test decides. More held-out examples would settle it."
        )
    if not gain.certain:
        return "This may be chance. More held-out examples would narrow the interval."
    text = f"The {'gain' if gain.mean > 0 else 'loss'} is unlikely to be chance."
    if not gain.leaves_out_0:
        text += " Its size is uncertain: a few examples changed by far more than the rest."
    if gain.mean < 0 and outcome.held_out:
        text += " Serve an earlier step instead (NAME@best, NAME@0)."
    return text


def _choice(outcome: Outcome) -> list[str]:
    """How the step was chosen, and what that means for the numbers."""
    compared = outcome.compared
    if compared is None or compared.chosen_of < 2:
        return []
    after = compared.after
    name = f"Step {after.step}" if after.step is not None else f"The policy {when(after.epoch)}"
    chosen = f"{name} was chosen as the best of {compared.chosen_of} validated steps"
    if compared.fresh:
        return [f"{chosen}; it and the first step then answered every example again."]
    basis = [f"{chosen} by these same answers."]
    basis.append("The p value allows for that choice; the interval does not.")
    if outcome.history.run.validation_greedy:
        basis.append("At temperature 0, answering again would repeat the answers.")
    elif outcome.history.status != "completed":
        basis.append("At the end of a run both steps answer again.")
    return basis


def _failures(outcome: Outcome) -> list[str]:
    """How many rollouts failed because of the model, and what reward they count as."""
    compared = outcome.compared
    if compared is None or not (compared.before.policy_failures or compared.after.policy_failures):
        return []
    before, after = compared.before, compared.after
    worth = before.failure_reward if after.failure_reward is None else after.failure_reward
    return [
        f"{_rate(before)} of the rollouts failed because of the model before and {_rate(after)} "
        f"after; each counts as {number(worth)} on both sides."
    ]


def _rate(validation: Validation) -> str:
    return f"{validation.failure_rate or 0.0:.0%}"


def _gaps(outcome: Outcome) -> list[str]:
    """What is compared instead, if the first or the last validation has no reward."""
    assert outcome.baseline is not None and outcome.tuned is not None
    first, last, gaps = outcome.baseline.epoch, outcome.tuned.epoch, []
    if first:
        gaps.append(f"No validation before training has a reward, so 'before' is {when(first)}.")
    newest = outcome.history.validations[-1]
    if newest.mean is None and newest.epoch > last:
        gaps.append(f"The validation {when(newest.epoch)} failed, so 'after' is {when(last)}.")
    return gaps


def _why_training(outcome: Outcome) -> str:
    """Why training rewards are compared."""
    first, last = outcome.baseline, outcome.tuned
    assert first is not None and last is not None
    so = f"so these are the rewards of epoch {first.epoch + 1} and epoch {last.epoch + 1} on the "
    so += "training examples, which a model can memorize."
    if not outcome.history.run.validation_examples:
        return f"There are no held-out examples, {so} {NAME_EXAMPLES}"
    return f"{_validations(outcome)}, {so}"


def _validations(outcome: Outcome) -> str:
    """How many validations there were, and their rewards; no full stop."""
    history, scored = outcome.history, outcome.history.scored
    if not history.validations:
        return "No validation was run yet"
    if not scored:
        return "No validation has a reward"
    failed = len(history.validations) - len(scored)
    one = f"Only one validation has a reward, {number(scored[0].mean)} {when(scored[0].epoch)}"
    return f"{one} ({failed} failed)" if failed else one


def _why_nothing(outcome: Outcome) -> list[str]:
    history = outcome.history
    held_out = bool(history.run.validation_examples or history.validations)
    reasons = [f"{_validations(outcome)}."] if held_out else []
    epochs = [e for e in reward_history(history) if e["avg_reward"] is not None]
    if not epochs:
        reasons.append("No training rollout has a reward.")
    elif len(epochs) == 1:
        number_, mean = epochs[0]["epoch"] + 1, number(epochs[0]["avg_reward"])
        reasons.append(
            f"Only epoch {number_} has training rewards (mean {mean}), earned before the model was "
            "trained on them."
        )
    if not held_out and history.status == "completed":
        reasons.append(NAME_EXAMPLES)
    return reasons


def _sentence(text: str | None) -> str:
    text = (text or "").strip()
    return f"{text[:1].upper()}{text[1:]}{'' if not text or text[-1] in '.!?' else '.'}"
