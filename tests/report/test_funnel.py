"""report/funnel.py: from rollouts to what was trained, in numbers that add up."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.finetune.runs import STORIES, events
from tests.report.test_metrics import collected, history_of, job, rollout, started
from tests.report.test_report import finished, log
from tests.report.test_report_sections import section_text

import hone
from hone.files.rollout_record import EVALUATOR
from hone.report import report
from hone.report.funnel import FAILURES, REASONS, Funnel, explain
from hone.report.history import RunHistory
from hone.workflow.outside import LISTED

SOURCE = Path(hone.__file__).parent


def submitted(**dropped: int) -> dict:
    event = {"at": 0.7, "type": "job_submitted", "epoch": 0, "round": 0, "job": "j0"}
    return event | {"trajectories": 10, "groups": 5, "dropped": dropped}


def failed(example: str, generation: int, kind: str, reason: str, reward: float | None = None):
    return rollout(*(0, example, generation, reward), failure_kind=kind, failure_reason=reason)


def one_round(**more: Any) -> list[dict]:
    """16 rollouts: 4 fail outside the model, 1 is in a small group, 3 are not selected, 8 are sent.

    Two of the failures of the model are trained with the reward -1, one made no call.
    """
    metrics = {"n": 11, "groups": 5}
    dropped = {"infrastructure/timeout": 3, "infrastructure/connection": 1}
    dropped |= {"small_group": 1, "call/abandoned": 2}
    event = collected(0, 0.5, dropped=dropped | more, failure_reward=-1.0, **metrics)
    event["metrics"] |= {"filtered_trajectories": 8}
    return [
        started(),
        *(rollout(0, "a", i, 0.5) for i in range(10)),
        *(failed("b", i, "infrastructure", "timeout") for i in range(3)),
        failed("b", 3, "infrastructure", "connection"),
        *(failed("c", i, "policy", "unparseable") for i in range(2)),
        event,
        submitted(),
        job(0, rollouts=4.0, flat_rollouts=3.0, long_rollouts=1.0)
        | {"counts": {"dropped/abandoned": 2}},
    ]


def test_a_round_by_hand():
    funnel = Funnel.of(history_of(one_round()))
    assert funnel.collected == 16
    assert funnel.left_out == {
        "infrastructure/timeout": 3,
        "infrastructure/connection": 1,
        "small_group": 1,
        "curriculum": 3,
    }
    assert (funnel.submitted, funnel.trained) == (8, 4)
    assert funnel.no_gradient == {"equal_rewards": 3, "too_long": 1}
    assert funnel.sentence == (
        "16 training rollouts: 8 left out before a job, 8 submitted. Of those submitted, 4 gave no "
        "gradient and 4 were trained."
    )
    assert funnel.calls == {"call/abandoned": 2}
    assert funnel.failures == {"unparseable": 2}
    assert funnel.failure_rewards == {"unparseable": [-1.0, -1.0]}


@pytest.mark.parametrize("name", STORIES)
def test_the_numbers_of_any_run_add_up(name: str):
    history = RunHistory.of(events(STORIES[name]))
    funnel = Funnel.of(history)
    assert funnel.collected == funnel.left_out.total() + funnel.submitted
    assert funnel.submitted == funnel.no_gradient.total() + funnel.trained
    assert funnel.collected == sum(len({*r.rewards, *r.failures}) for r in history.rounds)
    assert funnel.is_known and not funnel.left_out["other"]


def test_what_was_dropped_is_not_said_to_be_trained():
    lines = one_round(**{"policy/unparseable": 2})
    lines[-3]["metrics"]["num_trajectories"] = 9
    funnel = Funnel.of(history_of(lines))
    assert funnel.failures == {} and funnel.left_out["policy/unparseable"] == 2
    assert funnel.collected == 16


def test_a_job_that_failed_or_never_was_trains_nothing():
    *lines, _ = one_round()
    lost = {"at": 0.8, "type": "job_failed", "epoch": 0, "round": 0, "message": "out of memory"}
    for more, left, gone in (
        ([lost], 8, {"job_failed": 8}),
        ([], 8, {"job_running": 8}),
    ):
        funnel = Funnel.of(history_of([*lines, *more]))
        assert (funnel.left_out.total(), funnel.no_gradient, funnel.trained) == (left, gone, 0)
    funnel = Funnel.of(history_of(lines[:-1]))
    assert funnel.left_out["not_submitted"] == 8 and funnel.submitted == 0


def test_a_backend_that_does_not_count():
    *lines, done = one_round()
    funnel = Funnel.of(history_of([*lines, done | {"metrics": {"learn/loss": 0.5}}]))
    assert funnel.sentence == "16 training rollouts: 8 left out before a job, 8 submitted."
    assert funnel.as_dict()["trained"] is None


def test_a_crash_that_was_run_again_is_not_called_an_outside_failure(tmp_path: Path):
    """A round that crashes at one line stops the run; after the fix its rollouts are run again."""
    again = rollout(0, "a", 0, 1.0)
    crashed = again | {"reward": None, "failure_kind": "policy", "failure_reason": "agent_error"}
    lines = one_round()
    log(tmp_path, lines[0], crashed, again, *lines[1:], finished())
    text = section_text(tmp_path, "Run again") or ""
    assert text.startswith("These attempts failed and were run again, at once or in a later start")
    assert "| the model failed: agent_error (the agent raised an exception) | 1 | 0 |" in text


def test_the_tables_of_a_report(tmp_path: Path):
    lines = one_round()
    lines[1]["retried"] = ["infrastructure: timeout", "infrastructure: killed"]
    held_out = rollout(0, "v", 0, 1.0, split="val", retried=["infrastructure: timeout"])
    log(tmp_path, *lines, held_out, finished())
    assert section_text(tmp_path, "Left out of training") == (
        "16 training rollouts: 8 left out before a job, 8 submitted. Of those submitted, 4 gave no "
        "gradient and 4 were trained.\n\n"
        "| reason | when | number | share |\n|---|---|---|---|\n"
        "| failed outside the model: timeout (the rollout, or a request in it, took too long) "
        "| before the job | 3 | 18.8% |\n"
        "| curriculum: the curriculum did not select the group | before the job | 3 | 18.8% |\n"
        "| failed outside the model: connection (a server could not be reached, or the connection "
        "was lost) | before the job | 1 | 6.2% |\n"
        "| small_group: too few rollouts of the group are left to compare "
        "(finetuning.min_group_size) | before the job | 1 | 6.2% |\n"
        "| equal_rewards: all rewards of the group are equal, so there is nothing to compare "
        "| in the job | 3 | 18.8% |\n"
        "| too_long: a call is longer than training.max_seq_length | in the job | 1 | 6.2% |\n"
        "| abandoned: the agent stopped reading the answer before its end, so it was not recorded "
        "whole |  | 2 calls |  |"
    )
    assert (section_text(tmp_path, "Trained with the failure's reward") or "").endswith(
        "| reason | number | reward |\n|---|---|---|\n"
        "| the model failed: unparseable (the answer could not be parsed) | 2 | \u22121.00 |"
    )
    assert (section_text(tmp_path, "Run again") or "").endswith(
        "| reason | training | validation |\n|---|---|---|\n"
        "| failed outside the model: timeout (the rollout, or a request in it, took too long) "
        "| 1 | 1 |\n"
        "| failed outside the model: killed (the agent's program was killed) | 1 | 0 |"
    )
    data = report.write(tmp_path, brief=True)["training_data"]
    assert data["trained_failures"] == {"unparseable": {"number": 2, "rewards": [-1.0, -1.0]}}
    assert data["retried"] == {"infrastructure: timeout": 1, "infrastructure: killed": 1}
    text = (tmp_path / "report.md").read_text()
    assert "does not get a reward of 0" not in text


# ---- every reason has an explanation ---------------------------------------------------------------


RETURNED = {
    ("calls", "_not_trained"): "dropped",
    ("failure", "_cause"): "failure",
    ("failure", "_missing_answer"): "failure",
    ("outside", "reason_of"): "failure",
    ("outside", "_network_reason"): "failure",
    ("outside", "_machine_reason"): "failure",
    ("outside", "outside_in"): "failure",
}
"""Functions that return a reason."""
OTHER = {"agent", "outside", "policy", "infrastructure", "length", "reason", "Timeout"}
"""Words beside a reason: kinds of failures, a value that is compared, a key that is read."""


def strings(node: ast.AST) -> Iterator[str]:
    for one in ast.walk(node):
        if isinstance(one, ast.Constant) and isinstance(one.value, str):
            yield one.value


def reasons(path: Path) -> Iterator[tuple[str, str]]:
    """Reasons that the code of a file gives: of failures, and of what is dropped."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            for key in node.keywords:
                if key.arg == "reason" and re.search("Crash|Fail|Timeout|failure", name):
                    yield from (("failure", text) for text in strings(key.value))
            places = {"RolloutFailure": 1, "of": 1, "failure_record": 1}
            if name in places and len(node.args) > places[name]:
                yield from (("failure", text) for text in strings(node.args[places[name]]))
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            name = getattr(node.value, "id", getattr(node.value, "attr", ""))
            if name == "dropped" and isinstance(node.slice.value, str):
                yield "dropped", node.slice.value
        elif isinstance(node, ast.FunctionDef) and (path.stem, node.name) in RETURNED:
            kind = RETURNED[path.stem, node.name]
            for one in ast.walk(node):
                if isinstance(one, ast.Return) and one.value is not None:
                    yield from ((kind, text) for text in strings(one.value))


def test_every_reason_that_the_code_gives_is_explained():
    rooms = ("workflow", "evaluation", "integrations/frameworks")
    files = [path for room in rooms for path in (SOURCE / room).glob("*.py")]
    files += [SOURCE / "finetune" / f"{name}.py" for name in ("builder", "records", "rerender")]
    files += [SOURCE / "finetune" / f"{name}.py" for name in ("calls", "curriculum")]
    given = {one for file in files for one in reasons(file)}
    given |= {("failure", EVALUATOR), ("failure", LISTED)}
    # These are counted by keyword.
    given |= {("dropped", name) for name in ("abandoned", "unrecorded", "no_calls", "no_reward")}
    failures = {text for kind, text in given if kind == "failure"} - OTHER
    dropped = {text.removeprefix("call/") for kind, text in given if kind == "dropped"}
    assert {"timeout", "exit_status", "step_limit", "token_limit", "evaluator"} <= failures
    assert {"greedy", "frozen", "small_group", "message_order", "unmarked"} <= dropped
    assert failures - FAILURES.keys() == set() and dropped - REASONS.keys() == set()


def test_a_reason_of_a_plugin_is_shown_as_it_is():
    assert explain("policy/no move") == "the model failed: no move"
    assert explain("too boring") == "too boring"
    assert explain("call/greedy") == "greedy: the answer was sampled at temperature 0"
