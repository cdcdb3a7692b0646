"""The directory of an evaluation: what is written, when, and what may be removed."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from tests.evaluation.made import call, item, step
from tests.prose import Prose, place_of

from hone.capture.base import SeenCall
from hone.config.base import EvalDatasetStructure
from hone.config.schema import EvalGeneralConfig, read
from hone.errors import ConfigError, Conflict, StateError
from hone.evaluation.base import EvalOptions, Score, output_of
from hone.evaluation.files import OutputDir
from hone.evaluation.results import ItemResult
from hone.files.lock import lock_directory
from hone.types import Failure
from hone.workflow.run import RolloutFailure, RolloutResult


def opened(path: Path, *, keep: bool = False, structure: Any = None, **output: Any) -> OutputDir:
    general = EvalGeneralConfig.model_validate({"output_dir": path, "output": output})
    directory = OutputDir(general, EvalDatasetStructure.model_validate(structure or {}))
    directory.prepare(["exact"], keep=keep)
    directory.close()  # tests open one directory again and again
    return directory


def answered(output: Any = "out", **fields: Any) -> ItemResult:
    row = {"id": 7, "question": "q", "answer": "exp", "level": 3}
    done = item(output, "exp", **{"id": "7", "full_dataset_entry": row, **fields})
    return ItemResult(done, None, {"exact": Score(0.5, "near")})


def test_the_files_of_an_evaluation(tmp_path: Path):
    out = opened(tmp_path / "new" / "dir")
    result = answered(trajectory=[call()], steps=[step()], seconds=1.5)
    whole, files = out.write([result], [("exact", output_of([("7", Score(0.5, "near"))]))])
    (entry,) = json.loads(whole.read_text())
    assert [entry.pop(k)[0]["payload"]["event_type"] for k in ("intermediate_steps",)] == [
        "LLM_END"
    ]
    assert entry == {
        "id": "7",
        "question": "q",
        "answer": "exp",
        "level": 3,
        "generated_answer": "out",
        "expected_intermediate_steps": [],
        "seconds": 1.5,
    }
    assert [f.name for f in files] == ["exact_output.json"]
    assert json.loads(files[0].read_text()) == {
        "average_score": 0.5,
        "eval_output_items": [{"id": "7", "score": 0.5, "reasoning": "near", "error": None}],
    }


def test_a_directory_that_cannot_be_created_is_named(prose: Prose):
    with pytest.raises(ConfigError) as caught:
        opened(Path("/proc/x"))
    prose(caught)
    assert place_of(caught) == "eval.general.output_dir"


def test_a_lone_surrogate_is_written_as_its_escape(tmp_path: Path):
    out = opened(tmp_path)
    whole, _ = out.write([answered("cut \ud83d")], [])
    assert b'"cut \\ud83d"' in whole.read_bytes()
    assert json.loads(whole.read_text("utf-8"))[0]["generated_answer"] == "cut \ud83d"


def test_only_the_configured_kinds_of_steps_are_written(tmp_path: Path):
    def kinds(**output: Any) -> list[str]:
        result = answered(trajectory=[call()], steps=[step()])
        entry = opened(tmp_path, **output).entry(result)
        return [one["payload"]["event_type"] for one in entry["intermediate_steps"]]

    assert kinds() == ["LLM_END", "CUSTOM_END"]
    assert kinds(workflow_output_step_filter=["CUSTOM_END"]) == ["CUSTOM_END"]


def test_columns_have_the_configured_names(tmp_path: Path):
    structure = {"question": "q", "answer": "gold", "generated_answer": "mine", "trajectory": "t"}
    result = answered(full_dataset_entry={"q": "q", "gold": "exp"})
    entry = opened(tmp_path, structure=structure).entry(result)
    assert entry == {
        "id": "7",
        "q": "q",
        "gold": "exp",
        "mine": "out",
        "t": [],
        "expected_intermediate_steps": [],
    }


def test_a_failure_is_written_without_an_output(tmp_path: Path):
    failure = RolloutFailure("policy", "token_limit", Failure(type="T", message="m", traceback="t"))
    calls: tuple[SeenCall, ...] = ()
    rollout = RolloutResult("r", None, calls, (), failure, 0.1)
    entry = opened(tmp_path).entry(ItemResult(item(None, "exp"), rollout, {}))
    assert entry["generated_answer"] is None
    assert entry["failure"] == {
        "kind": "policy",
        "reason": "token_limit",
        "type": "T",
        "message": "m",
        "traceback": "t",
        "place": "",
    }
    # Read as a dataset and answered now: the old failure is gone.
    again = answered(full_dataset_entry={"question": "q", "failure": entry["failure"]})
    assert "failure" not in opened(tmp_path).entry(again)


def test_finished_items_are_read_after_a_crash(tmp_path: Path):
    crashed = opened(tmp_path)
    crashed.add(answered("first"))
    crashed.add(answered("second", id="8"))
    with (tmp_path / "finished.jsonl").open("a") as file:
        file.write('{"entry": {"id": "9", "generated_answer": "torn"')
    later = opened(tmp_path, keep=True)
    assert {k: v["generated_answer"] for k, v in later.finished().items()} == {
        "7": "first",
        "8": "second",
    }
    scores = json.loads((tmp_path / "finished.jsonl").read_text().splitlines()[0])["scores"]
    assert scores == {"exact": {"score": 0.5, "reasoning": "near", "error": None}}
    later.add(answered("third", id="9"))
    assert opened(tmp_path, keep=True).finished()["9"]["generated_answer"] == "third"
    later.write([answered("first")], [])
    assert not (tmp_path / "finished.jsonl").exists()
    assert list(opened(tmp_path, keep=True).finished()) == ["7"]


def test_items_are_filled_where_id_and_question_are_the_same(tmp_path: Path):
    out = opened(tmp_path)
    out.add(answered("kept", trajectory=[call()], steps=[step()], seconds=2.0))
    out.add(ItemResult(item(None, id="failed"), None, {}))
    same, other = item(id="7"), item(id="7", input_obj="another question")
    has_one, failed = item("its own", id="7"), item(id="failed")
    filled = opened(tmp_path, keep=True).filled([same, other, has_one, failed], runs=True)
    assert [i.output_obj for i in filled] == ["kept", None, "its own", None]
    assert (filled[0].trajectory, filled[0].steps, filled[0].seconds) == ([call()], [step()], 2.0)


def test_items_without_structure_are_the_same_if_their_rows_are(tmp_path: Path):
    structure = {"disable": True}
    row = {"id": 7, "question": "q", "board": [1]}
    out = opened(tmp_path, structure=structure)
    out.add(answered("kept", input_obj=json.dumps(row), full_dataset_entry=row))
    other = {**row, "board": [2]}
    items = [item(id="7", input_obj=json.dumps(r), full_dataset_entry=r) for r in (row, other)]
    filled = opened(tmp_path, keep=True, structure=structure).filled(items, runs=True)
    assert [i.output_obj for i in filled] == ["kept", None]


def test_cleaning_removes_only_what_hone_wrote(tmp_path: Path):
    out = opened(tmp_path)
    out.write([answered()], [("old", output_of([]))])
    (tmp_path / "mine.txt").write_text("precious")
    (tmp_path / "folder").mkdir()
    opened(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".hone_lock", "folder", "mine.txt"]


def test_paths_outside_the_directory_are_not_removed(tmp_path: Path):
    inside, outside = tmp_path / "in", tmp_path / "outside.txt"
    inside.mkdir()
    outside.write_text("precious")
    (inside / ".hone_files").write_text(f"../outside.txt\n{outside}\n..\n\n")
    opened(inside)
    assert outside.read_text() == "precious"


def test_without_cleanup_other_files_stay(tmp_path: Path):
    out = opened(tmp_path)
    out.add(answered())
    out.write([], [("old", output_of([]))])
    opened(tmp_path, cleanup=False)
    assert (tmp_path / "old_output.json").exists()


def test_jobs_have_directories_and_the_oldest_are_removed(tmp_path: Path):
    jobs = {"append_job_id_to_output_dir": True, "max_jobs": 2}
    made = []
    for n in range(3):
        out = opened(tmp_path, job_management=jobs)
        assert out.path.parent == tmp_path / "jobs" and out.path.name.startswith("job_")
        out.write_text("config_original.yml", "a: 1")
        os.utime(out.path / "config_original.yml", (n, n))
        made.append(out.path)
    assert [path.exists() for path in made] == [False, True, True]
    # Files that a user put into a job's directory stay, and so does the directory.
    (made[1] / "mine.txt").write_text("precious")
    opened(tmp_path, job_management=jobs)
    assert [p.name for p in made[1].iterdir()] == ["mine.txt"]


def test_continuing_uses_the_directory_of_the_last_job(tmp_path: Path):
    jobs = {"append_job_id_to_output_dir": True}
    first = opened(tmp_path, job_management=jobs)
    first.add(answered("kept"))
    later = opened(tmp_path, keep=True, job_management=jobs)
    assert later.path == first.path
    assert list(later.finished()) == ["7"]


def test_an_invalid_output_directory(prose: Prose, tmp_path: Path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError) as caught:
        opened(tmp_path / "file")
    prose(caught)
    assert place_of(caught) == "eval.general.output_dir"
    out = OutputDir(EvalGeneralConfig(output_dir=tmp_path), EvalDatasetStructure())
    with pytest.raises(ConfigError) as caught:
        out.prepare(["workflow"], keep=False)
    prose(caught)
    assert place_of(caught) == "eval.evaluators.workflow"
    (tmp_path / "workflow_output.json").write_text("[{")
    with pytest.raises(ConfigError) as caught:
        out.finished()
    prose(caught)
    (tmp_path / "workflow_output.json").unlink()
    (tmp_path / "finished.jsonl").write_text("{}}\n")
    with pytest.raises(ConfigError) as caught:
        out.finished()
    prose(caught)
    assert place_of(caught).endswith("finished.jsonl:1")


def test_a_default_directory_belongs_to_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.yml").write_text("{}")

    def evaluate(name: str, *override: tuple[str, str]) -> Path:
        file = Path(name, "train.yml")
        document = read(file, override)
        directory = OutputDir(document.eval.general, EvalDatasetStructure())
        directory.prepare(["exact"], keep=False, config_file=document.file)
        directory.write_config(document, EvalOptions(config_file=file))
        directory.close()
        return directory.path

    assert evaluate("a") == evaluate("a") == tmp_path / ".hone/evals/train"
    with pytest.raises(Conflict) as error:
        evaluate("b")
    assert str(error.value) == (
        "eval.general.output_dir: .hone/evals/train holds the evaluation of a/train.yml, and "
        "b/train.yml has the same name; name another directory with -o eval.general.output_dir DIR"
    )
    for name in ("a", "b"):  # a directory that is named is the user's decision
        assert evaluate(name, ("eval.general.output_dir", "out")) == tmp_path / "out"
    (tmp_path / "a/train.yml").unlink()
    assert evaluate("b") == tmp_path / ".hone/evals/train"


def test_names_of_evaluators_become_names_of_files(tmp_path: Path):
    out = opened(tmp_path)
    _, (file,) = out.write([], [("../a b", output_of([]))])
    assert file == tmp_path / ".._a_b_output.json"


def test_a_directory_in_the_place_of_a_file_is_reported_before_anything_runs(
    prose: Prose, tmp_path: Path
):
    (tmp_path / "workflow_output.json").mkdir()
    with pytest.raises(ConfigError) as caught:
        opened(tmp_path)
    prose(caught)


def test_files_that_are_not_hones_own_are_named(prose: Prose, tmp_path: Path):
    out = opened(tmp_path)
    (tmp_path / "finished.jsonl").write_text("[1]\n")
    with pytest.raises(ConfigError) as caught:
        out.finished()
    prose(caught)
    assert place_of(caught).endswith("finished.jsonl:1")
    (tmp_path / "workflow_output.json").write_bytes(b"\xff")
    with pytest.raises(ConfigError) as caught:
        out.finished()
    prose(caught)
    assert place_of(caught).endswith("workflow_output.json")


@pytest.mark.parametrize("names", [["workflow"], ["my score", "my_score"]])
def test_two_evaluators_with_the_same_file_are_refused(
    prose: Prose, tmp_path: Path, names: list[str]
):
    general = EvalGeneralConfig.model_validate({"output_dir": tmp_path})
    directory = OutputDir(general, EvalDatasetStructure())
    with pytest.raises(ConfigError) as caught:
        directory.prepare(names, keep=False)
    prose(caught)


def test_a_full_disk_is_reported(prose: Prose, tmp_path: Path):
    out = opened(tmp_path)
    (tmp_path / "finished.jsonl").symlink_to("/dev/full")
    with pytest.raises(StateError) as caught:
        out.add(answered())
    prose(caught)


def test_a_running_job_is_not_removed(tmp_path: Path):
    jobs = {"append_job_id_to_output_dir": True, "max_jobs": 1}
    first = opened(tmp_path, job_management=jobs)
    first.add(answered())
    with lock_directory(first.path, ".hone_lock", command="hone eval", key="k"):
        opened(tmp_path, job_management=jobs)
        assert first.path.exists()
    opened(tmp_path, job_management=jobs)
    assert not first.path.exists()
