"""`hone eval` from a YAML file to its files, with a model over real HTTP."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import yaml
from tests.patience import PATIENCE_S
from tests.prose import Prose, place_of
from tests.workflow.endpoint import Endpoint, Reply, serving

from hone.config.build import build
from hone.config.schema import read
from hone.errors import ConfigError, Conflict
from hone.evaluation.base import EvalOptions
from hone.evaluation.run import EvalSummary, evaluate, evaluation

AGENT = """
import hone
from hone.errors import PolicyFailure

async def ask(input, llm):
    answer = await llm.chat([{"role": "user", "content": input}])
    text = answer.choices[0].message.content
    hone.step("asked", value=1.0)
    if text == "crash":
        raise ConnectionError("the tool is broken")
    if text == "lost":
        raise PolicyFailure("no move")
    return text

def reward(output, expected, bonus=0):
    if output == "odd":
        raise ValueError("cannot judge " + output)
    return float(output == expected) + bonus

def tidy(item):
    return item.copy_with_updates(output_obj=item.output_obj.strip())

def broken(item):
    return 3
"""

ROWS = [{"id": n, "question": f"q{n}", "answer": f"a{n}", "kind": "k"} for n in range(3)]


@pytest_asyncio.fixture
async def endpoint() -> AsyncIterator[tuple[Endpoint, str]]:
    endpoint = Endpoint()
    async with serving(endpoint) as url:
        yield endpoint, url


class Workbench:
    """A directory with an agent, a dataset and a configuration."""

    def __init__(self, path: Path, url: str, api_key: str = "sk-secret") -> None:
        self.path, self.out = path, path / "out"
        (path / "evaluated_agent.py").write_text(AGENT, encoding="utf-8")
        (path / "rows.json").write_text(json.dumps(ROWS), encoding="utf-8")
        self.config: dict[str, Any] = {
            "llms": {
                "m": {
                    "_type": "openai",
                    "base_url": url,
                    "api_key": api_key,
                    "model_name": "tiny",
                    "max_retries": 0,
                }
            },
            "workflow": {"_type": "python", "target": "evaluated_agent.py:ask", "llm": "m"},
            "eval": {
                "general": {
                    "max_concurrency": 1,
                    "output_dir": str(self.out),
                    "dataset": {"_type": "json", "file_path": "rows.json"},
                },
                "evaluators": {
                    "exact": {"_type": "exact_match"},
                    "mine": {"_type": "python", "target": "evaluated_agent.py:reward"},
                },
            },
        }

    @property
    def file(self) -> Path:
        file = self.path / "config.yml"
        file.write_text(yaml.safe_dump(self.config, sort_keys=False), encoding="utf-8")
        return file

    async def evaluate(self, **options: Any) -> EvalSummary:
        # In a thread: the command runs a loop of its own, and this one serves the model.
        return await asyncio.to_thread(evaluate, EvalOptions(self.file, **options))

    def written(self, name: str) -> Any:
        return json.loads((self.out / name).read_text("utf-8"))

    @property
    def answers(self) -> list[Any]:
        return [entry["generated_answer"] for entry in self.written("workflow_output.json")]


@pytest.fixture
def bench(endpoint: tuple[Endpoint, str], tmp_path: Path) -> Workbench:
    return Workbench(tmp_path, endpoint[1])


def says(endpoint: tuple[Endpoint, str], *answers: str) -> Endpoint:
    endpoint[0].replies = [Reply(answer) for answer in answers]
    endpoint[0].requests.clear()
    return endpoint[0]


async def test_a_dataset_is_run_scored_and_written(
    endpoint: tuple[Endpoint, str], bench: Workbench
):
    says(endpoint, "a0", "wrong", "a2")
    summary = await bench.evaluate()
    assert (summary.status, summary.items, summary.failed_items) == ("COMPLETED", 3, 0)
    assert not summary.failed and summary.seconds > 0
    assert [(e.name, e.average_score, e.failures) for e in summary.evaluators] == [
        ("exact", pytest.approx(2 / 3), 0),
        ("mine", pytest.approx(2 / 3), 0),
    ]
    assert summary.evaluators[0].output_file == bench.out / "exact_output.json"
    assert [i["score"] for i in bench.written("exact_output.json")["eval_output_items"]] == [
        1,
        0,
        1,
    ]
    entry = bench.written("workflow_output.json")[1]
    assert (entry["id"], entry["question"], entry["kind"]) == ("1", "q1", "k")
    ended, custom = entry["intermediate_steps"]
    assert ended["payload"]["data"]["input"] == [{"role": "user", "content": "q1"}]
    assert ended["payload"]["name"] == "tiny"
    assert ended["function_ancestry"]["function_name"] == "<workflow>"
    assert custom["payload"]["name"] == "asked"
    assert sorted(p.name for p in bench.out.iterdir() if not p.name.startswith(".")) == [
        *("config_effective.yml", "config_metadata.json", "config_original.yml"),
        *("exact_output.json", "mine_output.json", "workflow_output.json"),
    ]


async def test_the_configuration_is_written_without_api_keys(
    endpoint: tuple[Endpoint, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("EVAL_TEST_KEY", "sk-secret")
    bench = Workbench(tmp_path, endpoint[1], api_key="${EVAL_TEST_KEY}")
    says(endpoint, "a0", "a1", "a2")
    over = [("eval.general.max_concurrency", "2"), ("llms.m.temperature", "0.5")]
    await bench.evaluate(override=over, dataset=tmp_path / "rows.json")
    original = yaml.safe_load((bench.out / "config_original.yml").read_text())
    assert original == bench.config
    effective = yaml.safe_load((bench.out / "config_effective.yml").read_text())
    assert effective["eval"]["general"]["max_concurrency"] == 2
    assert (effective["llms"]["m"]["api_key"], effective["llms"]["m"]["temperature"]) == (
        "<hidden>",
        0.5,
    )
    metadata = bench.written("config_metadata.json")
    assert metadata["overrides"] == [{"path": p, "value": v} for p, v in over]
    assert metadata["dataset"] == str(tmp_path / "rows.json")
    assert (metadata["reps"], metadata["skip_workflow"]) == (1, False)
    for file in bench.out.iterdir():
        assert "sk-secret" not in file.read_text()
    assert endpoint[0].header("authorization") == ["Bearer sk-secret"] * 3
    assert endpoint[0].bodies[0]["temperature"] == 0.5


async def test_failures_are_named_and_counted_and_fail_the_command(
    endpoint: tuple[Endpoint, str], bench: Workbench
):
    says(endpoint, "odd", "crash", "odd")
    summary = await bench.evaluate()
    assert (summary.status, summary.failed_items, summary.failed) == ("INTERRUPTED", 1, True)
    exact, mine = summary.evaluators
    # Both that answered are wrong; `mine` could score neither, so it is to blame.
    assert (exact.average_score, exact.failures) == (0.0, 0)
    assert (mine.average_score, mine.failures, mine.policy_failures) == (None, 2, 0)
    first, second = summary.message.splitlines()
    assert first.startswith(
        "1 of 3 items have no output and were not scored; the first: ConnectionError: the tool is "
        "broken."
    )
    assert second.startswith(
        "evaluator 'mine' could not score 2 of 3 items; the first: ValueError: cannot judge odd."
    )
    written = bench.written("mine_output.json")["eval_output_items"]
    assert [item["error"] for item in written] == [
        "ValueError: cannot judge odd",
        "ConnectionError: the tool is broken",
        "ValueError: cannot judge odd",
    ]
    assert [item["failure"] for item in written] == [{"kind": "infrastructure"}] * 3
    assert bench.written("workflow_output.json")[1]["failure"]["kind"] == "infrastructure"


@pytest.mark.parametrize(
    ("instead", "reward"), [("lowest", -1.0), ("drop", -1.0), ({"reward": 0.5}, 0.5)]
)
async def test_failures_of_the_model_count_in_the_average_and_the_command_succeeds(
    endpoint: tuple[Endpoint, str], bench: Workbench, instead: Any, reward: float
):
    bench.config["finetuning"] = {"on_policy_failure": instead}
    bench.config["eval"]["evaluators"]["mine"]["args"] = {"bonus": -1}
    says(endpoint, "wrong", "lost", "odd")
    summary = await bench.evaluate()
    # The model gave no move on one item, and an output that `mine` cannot score on another.
    assert (summary.status, summary.failed_items, summary.failed) == ("COMPLETED", 1, False)
    exact, mine = summary.evaluators
    # exact: 0, 0 and the failure, at the smaller of 0 and the lowest score, 0.
    assert exact.average_score == pytest.approx(0.5 / 3 if reward == 0.5 else 0.0)
    assert (exact.policy_failures, exact.failures) == (1, 0)
    # mine: -1 for the wrong answer, and two failures at the lowest score, -1, or at 0.5.
    assert mine.average_score == pytest.approx((-1 + 2 * reward) / 3)
    assert (mine.policy_failures, mine.failures, mine.failure_reward) == (2, 1, reward)
    assert summary.message == "" and summary.note.splitlines()[1].startswith(
        f"evaluator 'mine': 2 of 3 items failed because of the model; each counts as {reward:g} in "
        "the average. The first: PolicyFailure: no move."
    )
    written = bench.written("mine_output.json")
    assert (written["policy_failures"], written["failure_reward"]) == (2, reward)
    assert [item["score"] for item in written["eval_output_items"]] == [-1.0, None, None]
    assert [item.get("failure") for item in written["eval_output_items"]] == [
        *(None, {"kind": "policy"}, {"kind": "policy"})
    ]
    assert bench.written("workflow_output.json")[1]["failure"]["kind"] == "policy"


async def test_many_failures_at_one_line_are_reported_with_the_line(
    endpoint: tuple[Endpoint, str], bench: Workbench
):
    """They may be a bug of the agent or the evaluator, not failures of the model."""
    says(endpoint, "odd", "a1", "odd")
    summary = await bench.evaluate()
    line = next(n for n, text in enumerate(AGENT.splitlines(), 1) if "cannot judge" in text)
    assert summary.note.endswith(
        f"2 of them failed with ValueError at {bench.path / 'evaluated_agent.py'}:{line}: if that line "
        "has a bug, they say nothing about the model."
    )
    # One of three is not most of them.
    says(endpoint, "odd", "a1", "a2")
    assert "if that line has a bug" not in (await bench.evaluate()).note


async def test_an_evaluation_that_cannot_start_keeps_the_files_of_the_last_one(
    prose: Prose, endpoint: tuple[Endpoint, str], bench: Workbench
):
    says(endpoint, "a0", "a1", "a2")
    await bench.evaluate()
    bench.config["eval"]["evaluators"]["mine"]["target"] = "evaluated_agent.py:rewrad"
    with pytest.raises(ConfigError) as caught:
        await bench.evaluate()
    prose(caught)
    assert bench.answers == ["a0", "a1", "a2"]
    assert len(endpoint[0].requests) == 3


async def test_completed_entries_are_skipped(endpoint: tuple[Endpoint, str], bench: Workbench):
    says(endpoint, "a0", "crash", "a2")
    await bench.evaluate()
    server = says(endpoint, "a1")
    summary = await bench.evaluate(skip_completed_entries=True)
    assert len(server.requests) == 1 and server.bodies[0]["messages"][0]["content"] == "q1"
    assert not summary.failed and bench.answers == ["a0", "a1", "a2"]
    assert summary.evaluators[0].average_score == 1.0
    # All are complete now; and without the flag all are run anew.
    await bench.evaluate(skip_completed_entries=True)
    assert len(server.requests) == 1
    says(endpoint, "b0", "b1", "b2")
    await bench.evaluate()
    assert bench.answers == ["b0", "b1", "b2"]


async def test_another_question_under_the_same_id_is_run(
    endpoint: tuple[Endpoint, str], bench: Workbench
):
    says(endpoint, "a0", "a1", "a2")
    await bench.evaluate()
    rows = [ROWS[0], {**ROWS[1], "question": "changed"}, ROWS[2]]
    (bench.path / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
    server = says(endpoint, "new")
    await bench.evaluate(skip_completed_entries=True)
    assert [b["messages"][0]["content"] for b in server.bodies] == ["changed"]
    assert bench.answers == ["a0", "new", "a2"]


async def test_the_workflow_is_skipped(endpoint: tuple[Endpoint, str], bench: Workbench):
    says(endpoint, "a0", "wrong", "a2")
    await bench.evaluate()
    server = says(endpoint)
    bench.config["eval"]["evaluators"] = {
        "calls": {"_type": "avg_num_llm_calls"},
        "time": {"_type": "avg_workflow_runtime"},
        "mine": {"_type": "python", "target": "evaluated_agent.py:reward", "args": {"bonus": 2}},
    }
    summary = await bench.evaluate(skip_workflow=True)
    assert not summary.failed and not server.requests
    # (1 + 0 + 1) / 3 and 2 for each; each made one call.
    calls, seconds, mine = [e.average_score for e in summary.evaluators]
    assert (calls, mine) == (1.0, pytest.approx(2 + 2 / 3))
    assert seconds is not None and seconds > 0
    # The same from the file by name, into another directory.
    file = bench.path / "kept.json"
    (bench.out / "workflow_output.json").rename(file)
    bench.config["eval"]["general"]["output_dir"] = str(bench.path / "other")
    again = await bench.evaluate(skip_workflow=True, dataset=file)
    assert again.evaluators[2].average_score == mine and not server.requests


async def test_skipping_the_workflow_without_answers_fails(bench: Workbench):
    summary = await bench.evaluate(skip_workflow=True)
    assert (summary.failed_items, summary.evaluators[0].average_score) == (3, None)
    message = "item '0' has no generated answer, and the workflow was not run"
    assert message in summary.message
    failure = bench.written("workflow_output.json")[0]["failure"]
    assert (failure["reason"], failure["message"]) == ("not_run", message)


async def test_repetitions(endpoint: tuple[Endpoint, str], bench: Workbench):
    says(endpoint, "a0", "a1", "a2", "x", "y", "a2")
    summary = await bench.evaluate(reps=2)
    assert summary.items == 6 and summary.evaluators[0].average_score == pytest.approx(4 / 6)
    ids = [i["id"] for i in bench.written("exact_output.json")["eval_output_items"]]
    assert ids == [f"{n}_rep{rep}" for rep in (0, 1) for n in range(3)]


async def test_items_are_prepared_by_the_configured_function(
    endpoint: tuple[Endpoint, str], bench: Workbench
):
    bench.config["eval"]["evaluators"] = {"f": {"_type": "exact_match", "strip": False}}
    output = {"custom_pre_eval_process_function": "evaluated_agent.tidy"}
    bench.config["eval"]["general"]["output"] = output
    says(endpoint, " a0", "a1 ", "a2")
    assert (await bench.evaluate()).evaluators[0].average_score == 1.0
    assert bench.answers == [" a0", "a1 ", "a2"]
    says(endpoint, "a0", "a1", "a2")
    output["custom_pre_eval_process_function"] = "evaluated_agent.broken"
    assert "returned int; it must return the EvalInputItem" in (await bench.evaluate()).message


@pytest.mark.parametrize(
    "options",
    [
        {"reps": 0},
        {"reps": 2, "skip_workflow": True},
        {"skip_workflow": True, "skip_completed_entries": True},
        {"dataset": Path("nowhere.csv")},
        {"result_json_path": "$["},
    ],
)
async def test_invalid_options(prose: Prose, bench: Workbench, options: dict[str, Any]):
    with pytest.raises(ConfigError) as caught:
        await bench.evaluate(**options)
    prose(caught)


@pytest.mark.e2e
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
async def test_an_interrupted_evaluation_can_be_continued(
    endpoint: tuple[Endpoint, str], bench: Workbench, how: signal.Signals
):
    served = says(endpoint, "a0", "a1")
    gate = asyncio.Event()
    served.replies.append(Reply("late", gate=gate))
    code = (
        "import sys; from pathlib import Path; from hone.evaluation.run import *; "
        "evaluate(EvalOptions(Path(sys.argv[1])))"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(bench.file)], env=env, stderr=subprocess.PIPE, text=True
    )
    finished = bench.out / "finished.jsonl"
    async with asyncio.timeout(PATIENCE_S):
        # Requests arrive at once; the first two items are recorded a little later.
        while not finished.exists() or finished.read_bytes().count(b"\n") < 2:
            await asyncio.sleep(0.02)
        while len(served.requests) < 3:
            await asyncio.sleep(0.02)
    child.send_signal(how)
    _, message = await asyncio.to_thread(child.communicate)
    gate.set()
    assert child.returncode == -how
    warning = "interrupted; --skip_completed_entries continues from here"
    assert (warning in message) == (how == signal.SIGINT)
    assert not (bench.out / "workflow_output.json").exists()
    server = says(endpoint, "a2")
    summary = await bench.evaluate(skip_completed_entries=True)
    assert [b["messages"][0]["content"] for b in server.bodies] == ["q2"]
    assert not summary.failed and bench.answers == ["a0", "a1", "a2"]


async def test_a_second_evaluation_in_the_same_directory_is_refused(
    prose: Prose, endpoint: tuple[Endpoint, str], bench: Workbench
):
    gate = asyncio.Event()
    served = says(endpoint, "a0", "a1")
    served.replies.append(Reply("a2", gate=gate))
    first = asyncio.create_task(bench.evaluate())
    async with asyncio.timeout(PATIENCE_S):
        while len(served.requests) < 3:
            await asyncio.sleep(0.02)
    for options in ({}, {"skip_completed_entries": True}, {"skip_workflow": True}):
        with pytest.raises(Conflict) as caught:
            await bench.evaluate(**options)
        prose(caught)
        assert place_of(caught) == "eval.general.output_dir"
    gate.set()
    assert not (await first).failed and bench.answers == ["a0", "a1", "a2"]
    says(endpoint, "b0", "b1", "b2")
    await bench.evaluate()
    assert bench.answers == ["b0", "b1", "b2"]


async def test_an_evaluation_is_built_once_from_a_builder(
    endpoint: tuple[Endpoint, str], bench: Workbench
):
    says(endpoint, "a0", "a0")
    async with build(read(bench.file)) as builder:
        run = await evaluation(builder, evaluators=["exact"], reps=2, timeout_s=30)
        assert [i.id for i in run.items][:4] == ["0_rep0", "1_rep0", "2_rep0", "0_rep1"]
        assert (list(run.evaluators), run.max_concurrency, run.timeout_s) == (["exact"], 1, 30)
        results = [await run.run_item(run.items[n]) for n in (0, 1)]
        assert [r.scores["exact"].value for r in results] == [1.0, 0.0]


async def test_a_missing_judge_is_reported_before_anything_runs(prose: Prose, bench: Workbench):
    for key in ("llm", "llm_name"):
        bench.config["eval"]["evaluators"] = {"judged": {"_type": "llm_judge", key: "mm"}}
        with pytest.raises(ConfigError) as caught:
            await bench.evaluate()
        prose(caught)
        assert place_of(caught).endswith("config.yml:22")


async def test_a_judge_is_built_from_the_yaml(endpoint: tuple[Endpoint, str], bench: Workbench):
    bench.config["eval"]["evaluators"] = {
        "judged": {"_type": "llm_judge", "llm": "m", "rubric": "Be kind.", "max_score": 1},
        "course": {"_type": "trajectory", "llm_name": "m"},
    }
    rows = [ROWS[0]]
    (bench.path / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
    endpoint[0].replies = [Reply("a0"), *[Reply('{"score": 1}')] * 2]
    summary = await bench.evaluate()
    assert [e.average_score for e in summary.evaluators] == [1.0, 0.1]
    assert len(list((bench.out / "judge_cache").iterdir())) == 2
    says(endpoint, "a0")
    again = await bench.evaluate()
    assert [e.average_score for e in again.evaluators] == [1.0, 0.1]
    assert len(endpoint[0].requests) == 1  # the workflow; the verdicts are cached


async def test_an_invalid_evaluator_is_refused_when_it_is_built(prose: Prose, bench: Workbench):
    from hone.config.base import EvaluatorBaseConfig
    from hone.config.registry import find, register_evaluator

    class OddConfig(EvaluatorBaseConfig, name="odd_for_test_eval"):
        pass

    if find("evaluator", "odd_for_test_eval") is None:

        @register_evaluator(config_type=OddConfig)
        async def odd(config: OddConfig, builder: Any) -> AsyncIterator[Any]:
            yield 3

    bench.config["eval"]["evaluators"] = {"odd": {"_type": "odd_for_test_eval"}}
    with pytest.raises(ConfigError) as caught:
        await bench.evaluate()
    prose(caught)
    assert place_of(caught) == "eval.evaluators.odd"


@pytest.mark.parametrize("error", ["SystemExit", "BaseException"])
async def test_an_evaluator_that_exits_is_a_failure_and_an_agent_may_change_the_directory(
    endpoint: tuple[Endpoint, str], bench: Workbench, monkeypatch: pytest.MonkeyPatch, error: str
):
    monkeypatch.chdir(bench.path)
    (bench.path / "moving_agent.py").write_text(
        "import os\ndef run(input):\n    os.chdir('/')\n    return {('a', 1): input}\n"
        f"def leave(item):\n    raise {error}(2)\n",
        encoding="utf-8",
    )
    bench.config["workflow"] = {"_type": "python", "target": "moving_agent.py:run"}
    bench.config["eval"]["general"]["output_dir"] = "out"
    bench.config["eval"]["evaluators"] = {
        "l": {"_type": "python", "target": "moving_agent.py:leave"}
    }
    summary = await bench.evaluate()
    assert f"could not score 3 of 3 items; the first: {error}: 2" in summary.message
    assert summary.evaluators[0].output_file == Path("out/l_output.json")
    assert bench.answers == [{"('a', 1)": f"q{n}"} for n in range(3)]


async def test_items_that_cannot_be_scored_are_refused_before_anything_runs(
    prose: Prose, bench: Workbench
):
    rows = [*ROWS, {"id": "blank", "question": "?"}]
    (bench.path / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
    with pytest.raises(ConfigError) as refused:
        await bench.evaluate()
    prose(refused)
    (bench.path / "rows.json").write_text(json.dumps(ROWS), encoding="utf-8")
    bench.config["eval"]["evaluators"]["mine"]["target"] = "evaluated_reward.py:no_reward"
    (bench.path / "evaluated_reward.py").write_text("def no_reward(output, answer): ...\n")
    with pytest.raises(ConfigError) as caught:
        await bench.evaluate()
    prose(caught)
    assert place_of(caught) == "eval.evaluators.mine"
    assert not bench.out.exists()
