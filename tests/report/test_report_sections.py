"""report/report.j2: what each section says, by numbers worked out by hand."""

from pathlib import Path
from typing import Any

from tests.finetune.runs import REST
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

from hone.report import diagnosis, report
from hone.report.outcome import measure


def section_text(place: Path, title: str) -> str | None:
    """What stands under a heading of the Markdown, without pictures; None where it is not there."""
    return under(brief(place), title)


def brief(place: Path, kind: str = "md") -> str:
    report.write(place, brief=True)
    return (place / f"report.{kind}").read_text()


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
        "dropped": {},
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
    html = brief(tmp_path, "html")
    assert '<i class="start" style="width:20.00%" title="start"></i>' in html
    assert '<i class="everything" style="width:15.00%" title="everything else"></i>' in html
    assert 'title="validation"' not in html


def test_shared_tokens_are_reported(tmp_path: Path):
    log(
        tmp_path,
        started(10.0),
        started_epoch(10.0),
        collected(0, 0.5, at=20.0),
        submitted(20.0),
        job(0, logical_tokens=1000.0, computed_tokens=300.0, shared_tokens=650.0)
        | {"at": 30.0, "config": {"row_tokens": 4096}},
        finished() | {"at": 40.0},
    )
    assert measure(tmp_path).as_dict()["trained_tokens"] == {
        "logical": 1000,
        "computed": 300,
        "shared": 650,
    }
    text = section_text(tmp_path, "Where the time went")
    assert text is not None
    # 1,000 = 300 + 650 + 50: the last token of each of 50 calls is predicted, and predicts nothing.
    assert (
        "1,000 training tokens: 300 computed, 650 shared with other calls, and 50 at the end of "
        "calls, from which nothing is predicted."
    ) in text
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
        REST["validation_started"]
        | {"at": 1055.0, "type": "validation_started", "epoch": 1, "rollouts": 8},
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


# ---- the plot and the settings --------------------------------------------------------------------


def test_the_learning_rate_is_the_one_that_the_jobs_had(tmp_path: Path):
    log(tmp_path, started(learning_rate=2e-5), collected(0, 0.5))
    assert "| learning rate | 2e-05 |" in (section_text(tmp_path, "Run details") or "")
    jobs = [collected(0, 0.5), job(0) | {"config": {"learning_rate": 5e-5}}]
    log(tmp_path, started(learning_rate=2e-5), *jobs)
    assert "| learning rate | 5e-05 |" in (section_text(tmp_path, "Run details") or "")


def test_two_evaluators_are_named_where_both_measured(tmp_path: Path):
    named: dict[str, Any] = {
        "evaluator": "r (agent.py:shaped)",
        "validation_evaluator": "r (exact_match)",
    }
    both = "| evaluator | r (agent.py:shaped); held out r (exact_match) |"
    log(tmp_path, started(**named, validation_examples=1), collected(0, 2.0))
    assert both in (section_text(tmp_path, "Run details") or "")
    # Without held-out examples, nothing of them.
    log(tmp_path, started(**named, validation_examples=0), collected(0, 2.0))
    details = section_text(tmp_path, "Run details") or ""
    assert both not in details and "| evaluator | r (agent.py:shaped) |" in details


def test_pictures_are_in_the_html_and_named_in_the_markdown(tmp_path: Path):
    log(tmp_path, started(), collected(0, 0.2), job(0, entropy=0.9), finished())
    report.write(tmp_path)
    text, html = ((tmp_path / f"report.{kind}").read_text() for kind in ("md", "html"))
    assert under(text, "Training metrics") == (
        "Picture in report.html: metrics of the training jobs."
    )
    assert 'alt="metrics of the training jobs"' in html


# ---- going on -------------------------------------------------------------------------------------


def test_a_failed_run_names_the_command_that_resumes_it(tmp_path: Path):
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
    earlier = diagnosis.diagnosis(history_of(flat_run([flat] * 3)))
    assert earlier is not None and "in the last 3 epochs" in earlier
    log(tmp_path, *flat_run([flat] * 5), warning(earlier), finished())
    text = brief(tmp_path)
    # All of them at 0.5, in each of the five.
    assert (under(text, "Why the reward does not rise") or "").startswith(
        "The reward did not rise by more than chance in the last 5 epochs: 0.500 -> 0.500 (+0.000, "
        "standard error 0.000).\nMeasured: 0 of 20 groups had equal rewards"
    )
    assert text.count(diagnosis.FLAT) == 1 and under(text, "Warnings") is None
    # It rose after all.
    risen = [flat] * 3 + [{str(i): [1.0] * 8 for i in range(4)}]
    log(tmp_path, *flat_run(risen), warning(earlier), finished())
    assert diagnosis.FLAT not in brief(tmp_path)
    assert measure(tmp_path).as_dict()["warnings"] == [earlier]  # for programs, all there was


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
        "nothing was learned: no gradient step (3 times)\n\n"
        "the disk is nearly full (2 times)\n\n"
        "the curriculum left no group to train on\n\n"
        "slow (10 times)"
    )


def test_the_failures_that_ended_a_run_are_counted(tmp_path: Path):
    """The round was not collected: no other table has its rollouts."""

    def crashed(generation: int, example: str = "a") -> dict:
        why = {"failure_kind": "policy", "failure_reason": "agent_error"}
        return rollout(0, example, generation, None, at=3.0 + generation, **why)

    outside = {"failure_kind": "infrastructure", "failure_reason": "connection"}
    events = (
        started(1.0),
        started_epoch(2.0),
        *(crashed(generation) for generation in range(5)),
        rollout(0, "b", 0, 1.0, at=9.0),
        rollout(0, "b", 1, None, at=9.5, **outside),
        done(10.0, 0) | {"status": "failed"},
    )
    title = "Failures in the round that ended the run"
    log(tmp_path, *events, finished("failed", at=11.0))
    text = section_text(tmp_path, title)
    assert text is not None and text.startswith("Round 1 of 1 of epoch 1 was not trained on.")
    # 5 of 7 are 71.4%, 1 of 7 is 14.3%.
    assert "| agent_error (the agent raised an exception) | 5 of 7 | 71.4% |" in text
    assert "connection, or the connection" not in text and "| 1 of 7 | 14.3% |" in text
    # The next start fails before it runs it again, or runs it again and collects it.
    failed = finished("failed", at=11.0)
    log(tmp_path, *events, failed, started(20.0), finished("failed", at=21.0))
    assert section_text(tmp_path, title) is None
    rerun = [
        started(20.0),
        started_epoch(21.0),
        *(rollout(0, "a", g, 1.0, at=22.0) for g in range(5)),
    ]
    ended = collected(0, 1.0, at=23.0), done(24.0, 0), finished(at=25.0)
    log(tmp_path, *events, failed, *rerun, *ended)
    assert section_text(tmp_path, title) is None
    # A run that still works has not failed.
    log(tmp_path, *events[:-1])
    assert section_text(tmp_path, title) is None
