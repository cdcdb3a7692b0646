"""Held-out examples that are training examples too."""

import json
from pathlib import Path

import pytest
import yaml
from tests.finetune.command import Command
from tests.prose import Prose, place_of

from hone.config.problems import ConfigProblems
from hone.evaluation.base import EvalInputItem
from hone.finetune.checks.overlap import overlap


def item(id: str, input: object, row: int | None = None) -> EvalInputItem:
    return EvalInputItem(id=id, input_obj=input, row_number=row)


def test_inputs_are_compared_as_json_and_ids_only_where_the_rows_have_them():
    training = [
        item("a", {"x": 1, "y": [2]}),
        item("b", "What?"),
        item("3", "third", row=3),
        item("d", "four"),
    ]
    held_out = [
        item("h1", '{"y": [2], "x": 1}'),  # the same value as text, its keys in another order
        item("h2", " What?\n"),
        item("3", "another third", row=3),  # a number that the file gave it
        item("d", "quatre"),  # the same id with another input
        item("h5", "five"),
    ]
    shared = overlap(training, held_out)
    assert (shared.held_out, shared.by_input, shared.by_id) == (5, ["h1", "h2"], ["d"])
    assert shared.warning is not None
    assert (
        "of 5 held-out examples, some are training examples too: 2 have the input of one ('h1', "
        "'h2'); 1 has the id of one with another input ('d')."
    ) in shared.warning
    assert overlap(training, held_out[4:]).warning is None


def test_rows_that_are_counted_from_0_have_no_ids_either():
    def counted(first: int, texts: str) -> list[EvalInputItem]:
        return [item(str(first + n), text, row=n + 1) for n, text in enumerate(texts)]

    assert overlap(counted(0, "abc"), counted(0, "xyz")).warning is None
    assert overlap(counted(1, "abc"), counted(1, "xyz")).warning is None
    assert overlap(counted(7, "abc"), counted(7, "xyz")).by_id == ["7", "8", "9"]


def test_a_row_that_is_the_input_is_the_same_under_another_id():
    """`structure.disable` makes the whole row the input, its id included."""

    def whole(id: str, row: dict) -> EvalInputItem:
        return EvalInputItem(id=id, input_obj=json.dumps(row), full_dataset_entry=row)

    training = [whole("7", {"id": 7, "city": "Bonn"})]
    held_out = [whole("x", {"id": "x", "city": "Bonn"}), whole("y", {"id": "y", "city": "Rome"})]
    assert overlap(training, held_out).by_input == ["x"]


def test_no_more_than_three_ids_are_named():
    same = [item(str(n), "same") for n in range(5)]
    assert "5 have the input of one ('0', '1', '2', ...)" in (overlap(same, same).warning or "")


def test_shared_examples_are_named_at_the_start_and_in_the_headline(
    command: Command, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
):
    # The training examples ask a and b.
    rows = [
        {"id": "x", "question": "a"},
        {"id": "b", "question": "y"},
        {"id": "z", "question": "z"},
    ]
    (command.directory / "val.json").write_text(json.dumps(rows))
    assert command(validation_dataset=Path("val.json"), dry_run=True) == 0
    planned = capsys.readouterr().out
    assert (
        "\nwarning       of 3 held-out examples, some are training examples too: 1 has" in planned
    )
    assert command(validation_dataset=Path("val.json")) == 0
    assert "1 has the input of one ('x'); 1 has the id of one with another input ('b')" in (
        caplog.text
    )
    (started,) = command.events("run_started")
    assert (started["shared_inputs"], started["shared_ids"]) == (1, 1)
    report = (command.out / "report.md").read_text()
    assert (
        "Of the 3 held-out examples, 1 has the input of a training example and 1 has the id of one "
        "with another input, which the model may have learned by heart."
    ) in report


@pytest.mark.parametrize("dry_run", [False, True])
def test_the_same_file_for_both_is_refused_unless_asked_for(
    prose: Prose, command: Command, dry_run: bool
):
    with pytest.raises(ConfigProblems) as refused:
        command(validation_dataset=Path("train.json"), dry_run=dry_run)
    prose(refused)
    assert place_of(refused) == "--validation_dataset"
    (command.directory / "copy.json").write_bytes((command.directory / "train.json").read_bytes())
    with pytest.raises(ConfigProblems) as caught:
        command(validation_dataset=Path("copy.json"), dry_run=dry_run)
    prose(caught)
    allowed = ("finetuning.validation.allow_training_examples", "true")
    assert command(allowed, validation_dataset=Path("train.json"), dry_run=dry_run) == 0


def test_two_parts_of_one_file_may_be_separated_by_filters(prose: Prose, command: Command):
    document = yaml.safe_load(command.file.read_text())
    dataset = document["eval"]["general"]["dataset"]
    for name, wanted in {"train.yml": "a", "val.yml": "b"}.items():
        dataset["filter"] = {"allowlist": {"field": {"id": [wanted]}}}
        document["finetuning"]["enabled"] = name == "train.yml"
        (command.directory / name).write_text(yaml.safe_dump(document))
    assert command(validation_config_file=command.directory / "val.yml", dry_run=True) == 0
    (command.directory / "val.yml").write_text((command.directory / "train.yml").read_text())
    with pytest.raises(ConfigProblems) as caught:
        command(validation_config_file=command.directory / "val.yml", dry_run=True)
    prose(caught)
