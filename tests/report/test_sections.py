"""report/sections.py: what each section says, by numbers worked out by hand."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.report.test_metrics import (
    collected,
    flat_run,
    history_of,
    job,
    rollout,
    started,
    started_epoch,
)
from tests.report.test_plots import validation
from tests.report.test_report import finished, log

from hone.report import diagnosis, page, plots, report
from hone.report.outcome import measure
from hone.report.sections import sections


def section_text(place: Path, title: str) -> str | None:
    """What stands under a heading of the Markdown, without pictures; None where it is not there."""
    text = page.markdown(sections(measure(place), brief=True))
    return under(text, title)


def under(text: str, title: str) -> str | None:
    parts = text.split(f"\n## {title}\n\n")
    return parts[1].split("\n\n## ")[0].strip() if len(parts) > 1 else None


def done(at: float, epoch: int, **phases: float) -> dict:
    measured = {"rollout_s": 0.0, "learn_s": 0.0, "validate_s": 0.0, "other_s": 0.0} | phases
    event = {"at": at, "type": "epoch_done", "epoch": epoch, "status": "completed"}
    return event | {"phases": measured}


def submitted(at: float) -> dict:
    return {"at": at, "type": "job_submitted", "epoch": 0, "round": 0, "job": "j0"} | {
        "trajectories": 8,
        "groups": 2,
    }


# ---- where the time went --------------------------------------------------------------------------


def test_time_counts_from_the_command_and_the_start_is_a_part_of_it(tmp_path: Path):
    log(
        tmp_path,
        started(10.0, began=0.0),
        started_epoch(20.0),
        rollout(0, "a", 0, 0.5, at=30.0, calls=2, tokens=400),
        collected(0, 0.5, at=60.0),
        submitted(60.0),
        job(0) | {"at": 85.0},
        done(86.0, 0, rollout_s=40.0, learn_s=25.0, other_s=1.0),
        finished() | {"at": 100.0},
    )
    numbers = measure(tmp_path).as_dict()
    # Given at 0, first rollout at 20, over at 100; 100 - 20 - 40 - 25 = 15. 400 tokens in 40 s.
    assert numbers["seconds"] == 100.0
    assert numbers["phases"] == {
        "start_s": 20.0,
        "rollout_s": 40.0,
        "learn_s": 25.0,
        "validate_s": 0.0,
        "other_s": 15.0,
    }
    assert section_text(tmp_path, "Where the time went") == (
        "1 min 40 s in total; 1 rollout, 2 model calls and 400 sampled tokens, 10 per second. Start is "
        "the time from the command to the first rollout: server, model, checks.\n\n"
        "| phase | share | time |\n|---|---|---|\n"
        "| start | 20% | 20 s |\n"
        "| rollouts | 40% | 40 s |\n"
        "| learning | 25% | 25 s |\n"
        "| everything else | 15% | 15 s |"
    )
    # Each part has its colour by name: the one that took no time takes none from the others.
    html = page.html(sections(measure(tmp_path), brief=True))
    assert '<i class="start" style="width:20.00%" title="start"></i>' in html
    assert '<i class="everything" style="width:15.00%" title="everything else"></i>' in html
    assert 'title="validation"' not in html


def test_tokens_that_were_shared_are_told(tmp_path: Path):
    log(
        tmp_path,
        started(10.0),
        started_epoch(10.0),
        collected(0, 0.5, at=20.0),
        submitted(20.0),
        job(0, logical_tokens=1000.0, computed_tokens=300.0)
        | {"at": 30.0, "config": {"row_tokens": 4096}},
        finished() | {"at": 40.0},
    )
    assert measure(tmp_path).as_dict()["trained_tokens"] == {
        "logical": 1000,
        "computed": 300,
        "shared": 700,
    }
    text = section_text(tmp_path, "Where the time went")
    assert text is not None
    assert "1,000 training tokens, of which 300 were computed and 700 shared." in text
    (tmp_path / "none").mkdir()
    log(tmp_path / "none", started(10.0), started_epoch(10.0), collected(0, 0.5, at=20.0))
    assert measure(tmp_path / "none").as_dict()["trained_tokens"] == {}


def test_a_log_that_does_not_know_the_command_has_no_start(tmp_path: Path):
    log(tmp_path, started(10.0), started_epoch(10.0), collected(0, 0.5, at=20.0))
    assert section_text(tmp_path, "Where the time went") == (
        "10 s in total.\n\n| phase | share | time |\n|---|---|---|\n| rollouts | 100% | 10 s |"
    )


def test_what_never_ended_has_its_time_by_stage(tmp_path: Path):
    log(
        tmp_path,
        started(4.0, began=0.0),
        started_epoch(10.0),
        rollout(0, "a", 0, 0.5, at=30.0),  # killed here
        started(1004.0, began=1000.0, session=2),
        started_epoch(1010.0),
        rollout(0, "a", 0, 0.5, at=1020.0),
        collected(0, 0.5, at=1040.0),
        submitted(1040.0),
        job(0) | {"at": 1055.0},
        done(1055.0, 0, rollout_s=30.0, learn_s=15.0),
        {"at": 1055.0, "type": "validation_started", "epoch": 1, "rollouts": 8},
        {"at": 1070.0, "type": "run_interrupted"},
    )
    # 30 s and 70 s: start 10 + 10, rollouts 20 of the killed epoch + 30, learning 15, and 15 of a
    # validation that gave nothing. 20 tokens in 50 + 15 s are 0.3 a second.
    assert section_text(tmp_path, "Where the time went") == (
        "1 min 40 s in total, over 2 sessions (the run was resumed); 2 rollouts, 2 model calls "
        "and 20 sampled tokens, 0 per second. Start is the time from the command to the first rollout: server, "
        "model, checks.\n\n"
        "| phase | share | time |\n|---|---|---|\n"
        "| start | 20% | 20 s |\n"
        "| rollouts | 50% | 50 s |\n"
        "| learning | 15% | 15 s |\n"
        "| validation | 15% | 15 s |"
    )


# ---- how the learning went ------------------------------------------------------------------------


def test_what_the_jobs_measured_is_told_without_pictures(tmp_path: Path):
    log(
        tmp_path,
        started(),
        *(collected(0, 0.2, zero_variance_groups=2), job(0, entropy=0.9, clip_frac=0.0125)),
        *(collected(1, 0.3, zero_variance_groups=4), job(1, entropy=0.25)),
        *(collected(2, 0.4, zero_variance_groups=1), job(2, entropy=0.5)),
        *(collected(3, 0.5, zero_variance_groups=3), job(3, reason="no gradient step")),
        finished(),
    )
    document = sections(measure(tmp_path))
    # Of 5 groups each time: 2, 4, 1, 3. The last job measured nothing, so 0.5 is the last entropy.
    assert under(page.markdown(document), "Training metrics") == (
        "| metric of the jobs | first | last | lowest | highest |\n|---|---|---|---|---|\n"
        "| groups with equal rewards | 0.4 | 0.6 | 0.2 | 0.8 |\n"
        "| entropy | 0.9 | 0.5 | 0.25 | 0.9 |\n"
        "| clipped tokens | 0.0125 | 0.0125 | 0.0125 | 0.0125 |"
    )
    text = page.html(document)  # which has the picture instead
    assert 'alt="metrics of the training jobs"' in text and "<th>lowest</th>" not in text


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ([], "2e-05"),  # as it was configured
        ([5e-5, 5e-5], "5e-05"),  # as the jobs had it
        ([5e-5, 3e-5, 1e-5], "5e-05 in the first job, 1e-05 in the last"),
        ([1e-5, 5e-5, 2e-5], "1e-05 in the first job, 2e-05 in the last, between 1e-05 and 5e-05"),
        ([1e-5, 5e-5, 1e-5], "1e-05 in the first job, 1e-05 in the last, between 1e-05 and 5e-05"),
    ],
)
def test_a_learning_rate_that_changed_is_told_as_what_it_was(
    rates: Sequence[float], expected: str, tmp_path: Path
):
    jobs = []
    for epoch, rate in enumerate(rates):
        jobs += [collected(epoch, 0.5), job(epoch) | {"config": {"learning_rate": rate}}]
    log(tmp_path, started(learning_rate=2e-5), *jobs)
    assert (
        f"| learning rate | {expected} |"
        in (section_text(tmp_path, "Run details") or "").splitlines()
    )


# ---- what measured the rewards --------------------------------------------------------------------

READING = (
    "The band and the bars are 95% intervals over examples. The x axis counts the epochs that the "
    "policy was trained for."
)


def beside_its_plot(tmp_path: Path, *events: dict) -> tuple[str | None, str | None]:
    """How to read the plot, and the facts, of a report that draws nothing new."""
    log(tmp_path, *events)
    (tmp_path / "reward_plot.png").write_bytes(plots.mark(history_of(list(events))).encode())
    report.write(tmp_path, brief=True)
    text = (tmp_path / "report.md").read_text()
    reward = under(text, "Reward")
    return reward and reward.split("\n\n")[1], under(text, "Run details")


def test_two_evaluators_are_named_and_temperature_0_is_too(tmp_path: Path):
    named: dict[str, Any] = {
        "evaluator": "r (agent.py:shaped)",
        "validation_evaluator": "r (exact_match)",
    }
    begun = started(**named, validation_greedy=True, validation_examples=1)
    reading, facts = beside_its_plot(
        tmp_path, begun, validation(0, {"a": [0.5]}, 0.5), collected(0, 2.0)
    )
    assert reading == (
        "Training rewards are measured by r (agent.py:shaped) and held-out rewards by r "
        "(exact_match): each has its own axis, and their heights cannot be compared. Held-out examples were "
        f"answered at temperature 0, training examples at the workflow's temperature. {READING}"
    )
    assert "| evaluator | r (agent.py:shaped); held out r (exact_match) |" in (facts or "")
    # Without held-out examples, nothing of them.
    begun = started(**named, validation_greedy=True, validation_examples=0)
    reading, facts = beside_its_plot(tmp_path, begun, collected(0, 2.0))
    assert reading == READING and "| evaluator | r (agent.py:shaped) |" in (facts or "")


def test_one_evaluator_is_named_once_and_a_gap_where_there_is_one(tmp_path: Path):
    begun = started(evaluator="match", validation_greedy=False, validation_examples=1)
    reading, facts = beside_its_plot(
        tmp_path,
        begun,
        validation(0, {"a": [0.5]}, 0.5),
        collected(0, 0.5),
        validation(1, {}, None),
    )
    assert reading == f"{READING} A cross marks what has no reward."
    assert "| evaluator | match |" in (facts or "")


# ---- going on -------------------------------------------------------------------------------------


def test_a_run_that_failed_goes_on_when_that_is_mended(tmp_path: Path):
    anew: dict[str, Any] = {"command": "hone finetune --config_file=a.yml --fresh"}
    goes_on: dict[str, Any] = anew | {"again": "hone finetune --config_file=a.yml"}
    log(tmp_path, started(**goes_on), finished("failed", message="CUDA out of memory"))
    assert section_text(tmp_path, "Resume the run") == (
        "```bash\n# resume when that is fixed; finished rollouts and jobs are kept\n"
        "hone finetune --config_file=a.yml\n```"
    )
    log(tmp_path, started(command="hone finetune --config_file=old.yml"))  # of before `again`
    assert "\nhone finetune --config_file=old.yml\n" in (
        section_text(tmp_path, "Resume the run") or ""
    )
    log(tmp_path, started(**goes_on), finished())
    assert section_text(tmp_path, "Resume the run") is None


# ---- warnings -------------------------------------------------------------------------------------


def warning(message: str) -> dict:
    return {"at": 9.0, "type": "warning", "message": message}


def test_of_the_diagnoses_only_the_one_that_holds_at_the_end_is_shown(tmp_path: Path):
    flat = {str(i): [0.0, 1.0] * 4 for i in range(4)}
    said_before = diagnosis.diagnosis(history_of(flat_run([flat] * 3)))
    assert said_before is not None and "in the last 3 epochs" in said_before
    log(tmp_path, *flat_run([flat] * 5), warning(said_before), finished())
    text = page.markdown(sections(measure(tmp_path), brief=True))
    # All of them at 0.5, in each of the five.
    assert (under(text, "Why the reward does not rise") or "").startswith(
        "The reward did not rise by more than chance in the last 5 epochs: 0.500 -> 0.500 (+0.000, "
        "standard error 0.000).\nMeasured: 0 of 20 groups had equal rewards"
    )
    assert text.count(diagnosis.FLAT) == 1 and under(text, "Warnings") is None
    # It rose after all.
    risen = [flat] * 3 + [{str(i): [1.0] * 8 for i in range(4)}]
    log(tmp_path, *flat_run(risen), warning(said_before), finished())
    assert diagnosis.FLAT not in page.markdown(sections(measure(tmp_path), brief=True))
    assert measure(tmp_path).as_dict()["warnings"] == [said_before]  # for programs, all there was


def test_a_held_out_reward_that_rose_needs_no_diagnosis(tmp_path: Path):
    flat = flat_run([{str(i): [0.0, 1.0] * 4 for i in range(4)}] * 3)
    first, last = ({str(i): [reward] for i in range(8)} for reward in (0.0, 1.0))
    log(tmp_path, *flat, validation(0, first, 0.0), validation(3, last, 1.0), finished())
    assert section_text(tmp_path, "Why the reward does not rise") is None
    log(tmp_path, *flat, validation(0, last, 1.0), validation(3, first, 0.0), finished())
    assert section_text(tmp_path, "Why the reward does not rise") is not None


def test_the_same_warning_of_several_epochs_stands_once(tmp_path: Path):
    log(
        tmp_path,
        started(),
        warning("epoch 1: nothing was learned: no gradient step"),
        warning("the disk is nearly full"),
        warning("epoch 2: the curriculum left no group to train on"),
        warning("epoch 2: nothing was learned: no gradient step"),
        warning("epoch 2: nothing was learned: no gradient step"),  # again after a restart
        warning("the disk is nearly full"),
        *(warning(f"epoch {epoch}: slow") for epoch in range(1, 11)),
        finished(),
    )
    assert section_text(tmp_path, "Warnings") == (
        "2 epochs (1, 2): nothing was learned: no gradient step\n\n"
        "the disk is nearly full (2 times)\n\n"
        "Epoch 2: the curriculum left no group to train on\n\n"
        "10 epochs (1, 2, 3, 4, 5, 6, 7, 8, ...): slow"
    )


def test_groups_that_differ_are_not_counted_among_what_was_left_out(tmp_path: Path):
    lost = collected(0, 0.5, dropped={"evaluator failed": 2})
    log(tmp_path, started(), rollout(0, "a", 0, 0.5), lost)
    left_out = section_text(tmp_path, "What was left out of training") or ""
    assert left_out.startswith(
        "1 training rollout in 5 groups; 10 trajectories were submitted for "
    )
    assert left_out.endswith("|---|---|---|\n| evaluator failed | 2 |  |")
    log(tmp_path, started(), rollout(0, "a", 0, 0.5), lost | {"zero_variance_groups": 3})
    # 3 of 5
    assert (section_text(tmp_path, "What was left out of training") or "").endswith(
        "| group with equal rewards: nothing to learn from | 3 | 60.0% |"
    )
