"""Rows to items: ids, filters, structure, repetitions."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from tests.evaluation.made import call, step
from tests.prose import Prose, place_of

from hone.config.base import DatasetBaseConfig
from hone.errors import ConfigError
from hone.evaluation.base import EvalInput, EvalInputItem
from hone.evaluation.datasets import (
    CsvDataset,
    CustomDataset,
    JsonDataset,
    JsonlDataset,
    ParquetDataset,
    XlsDataset,
    load_items,
)
from hone.evaluation.steps import intermediate_steps


def wrote(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text(json.dumps(rows), encoding="utf-8")
    return path


def loaded(tmp_path: Path, rows: list[dict[str, Any]], **config: Any) -> list[EvalInputItem]:
    path = wrote(tmp_path / "rows.json", rows)
    return load_items(JsonDataset.model_validate({"file_path": path, **config}))


def ids(items: list[EvalInputItem]) -> list[str]:
    return [item.id for item in items]


def test_a_row_becomes_an_item(tmp_path: Path):
    row = {"id": 3, "question": "2+2?", "answer": 4, "level": "easy"}
    assert loaded(tmp_path, [row]) == [
        EvalInputItem(
            id="3", input_obj="2+2?", expected_output_obj=4, full_dataset_entry=row, row_number=1
        )
    ]


def test_rows_without_an_id_get_their_number(tmp_path: Path):
    rows = [{"question": "a"}, {"question": "b", "id": ""}, {"question": "c", "id": "x"}]
    assert ids(loaded(tmp_path, rows)) == ["1", "2", "x"]


def test_a_filter_does_not_renumber_the_others(tmp_path: Path):
    rows = [{"question": q, "level": level} for q, level in [("a", 1), ("b", 2), ("c", 2)]]
    items = loaded(tmp_path, rows, filter={"allowlist": {"field": {"level": [2]}}})
    assert ids(items) == ["2", "3"]


def test_filters_accept_wildcards_and_match_every_column(tmp_path: Path):
    rows = [
        {"id": f"{kind}{n}", "question": "q", "kind": kind, "n": n}
        for kind in ("math-a", "math-b", "code")
        for n in (1, 2)
    ]
    allow = {"allowlist": {"field": {"kind": ["math-*", "cod?"], "n": [1]}}}
    deny = {"denylist": {"field": {"kind": ["*-b"]}}}
    assert ids(loaded(tmp_path, rows, filter=allow)) == ["math-a1", "math-b1", "code1"]
    assert ids(loaded(tmp_path, rows, filter=allow | deny)) == ["math-a1", "code1"]


def test_a_filter_on_a_missing_column_is_an_error(prose: Prose, tmp_path: Path):
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, [{"question": "q"}], filter={"denylist": {"field": {"levl": [1]}}})
    prose(caught)
    assert place_of(caught) == "eval.general.dataset.filter.denylist.field.levl"


@pytest.mark.parametrize(
    "rows",
    [
        [
            {"id": 1, "question": "a"},
            {"id": "x", "question": "b"},
            {"id": "1", "question": "c"},
        ],
        # The second row has no id and gets its number, which is taken.
        [{"id": 2, "question": "a"}, {"question": "b"}],
    ],
)
def test_two_rows_with_the_same_id_are_an_error(
    prose: Prose, tmp_path: Path, rows: list[dict[str, Any]]
):
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, rows)
    prose(caught)
    prose(caught)


def test_blank_questions_are_left_out_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    rows = [{"question": "a"}, {"question": "  "}, {"question": None}, {"question": 7}, {}]
    with caplog.at_level(logging.WARNING):
        items = loaded(tmp_path, rows)
    assert [item.input_obj for item in items] == ["a", 7]
    with caplog.at_level(logging.WARNING):
        loaded(tmp_path, rows)  # a command reads it to check it, and again to run on it
    assert caplog.text.count("3 of 5 rows have no question and are left out: 2, 3, 5") == 1


def test_other_columns_by_either_spelling(tmp_path: Path):
    rows = [{"key": "k", "q": "a", "gold": "b"}]
    for structure in (
        {"question": "q", "answer": "gold"},
        {"question_key": "q", "answer_key": "gold"},
    ):
        (item,) = loaded(tmp_path, rows, id_key="key", structure=structure)
        assert (item.id, item.input_obj, item.expected_output_obj) == ("k", "a", "b")


def test_the_error_for_a_missing_question_column_lists_the_columns(prose: Prose, tmp_path: Path):
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, [{"prompt": "a", "answer": "b"}])
    prose(caught)


def test_without_structure_the_input_is_the_row(tmp_path: Path):
    row = {"id": "a", "board": [[1]], "name": "\u00e9"}
    (item,) = loaded(tmp_path, [row], structure={"disable": True})
    assert item.input_obj == '{"id": "a", "board": [[1]], "name": "\u00e9"}'
    assert item.full_dataset_entry == row


def test_repetitions_have_ids_of_their_own(tmp_path: Path):
    path = wrote(
        tmp_path / "rows.json", [{"id": "a", "question": "1"}, {"id": "b", "question": "2"}]
    )
    items = load_items(JsonDataset(file_path=path), reps=2)
    assert [(i.id, i.input_obj) for i in items] == [
        ("a_rep0", "1"),
        ("b_rep0", "2"),
        ("a_rep1", "1"),
        ("b_rep1", "2"),
    ]
    assert ids(load_items(JsonDataset(file_path=path), reps=1)) == ["a", "b"]


def test_an_answer_of_an_earlier_run_is_read_too(tmp_path: Path):
    calls, steps = [call()], [step()]
    row = {
        "id": "a",
        "question": "q",
        "generated_answer": "g",
        "intermediate_steps": intermediate_steps(calls, steps),
        "expected_intermediate_steps": [{"any": "thing"}],
        "seconds": 1.5,
    }
    (item,) = loaded(tmp_path, [row])
    assert (item.output_obj, item.trajectory, item.steps) == ("g", calls, steps)
    assert (item.expected_trajectory, item.seconds) == ([{"any": "thing"}], 1.5)


def test_the_file_on_the_command_line_may_be_of_any_type(tmp_path: Path):
    lines = tmp_path / "other.jsonl"
    lines.write_text('{"id": "a", "ask": "x"}\n{"id": "b", "ask": "y"}\n', encoding="utf-8")
    table = tmp_path / "other.csv"
    table.write_text("id,ask\na,x\nb,y\n", encoding="utf-8")
    # The configured structure and filter hold for it all the same.
    config = JsonDataset.model_validate(
        {
            "file_path": tmp_path / "missing.json",
            "structure": {"question": "ask"},
            "filter": {"denylist": {"field": {"id": ["b"]}}},
        }
    )
    for path in (lines, table):
        assert [(i.id, i.input_obj) for i in load_items(config, path)] == [("a", "x")]


def test_each_type_reads_its_files(prose: Prose, tmp_path: Path):
    (tmp_path / "rows").write_text('{"id": 1, "question": "a"}\n', encoding="utf-8")
    assert ids(load_items(JsonlDataset(file_path=tmp_path / "rows"))) == ["1"]
    (tmp_path / "a.tsv").write_text("id\tquestion\n1\ta\n", encoding="utf-8")
    assert ids(load_items(CsvDataset(file_path=tmp_path / "a.tsv"))) == ["1"]
    rows_xls = Path(__file__).parent / "rows.xls"
    assert ids(load_items(XlsDataset(file_path=rows_xls))) == ["1", "2"]
    with pytest.raises(ConfigError) as caught:
        load_items(ParquetDataset(file_path=rows_xls))
    prose(caught)


def test_a_relative_path_is_tried_here_and_then_beside_the_yaml(
    prose: Prose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    here, beside = tmp_path / "here", tmp_path / "beside"
    for place in (here, beside):
        (place / "data").mkdir(parents=True)
    monkeypatch.chdir(here)
    config = JsonDataset(file_path=Path("data/rows.json"))
    with pytest.raises(ConfigError) as caught:
        load_items(config, near=beside)
    prose(caught)
    with pytest.raises(ConfigError) as refused:
        load_items(config, near=here)
    prose(refused)
    wrote(beside / "data" / "rows.json", [{"id": "beside", "question": "q"}])
    assert ids(load_items(config, near=beside)) == ["beside"]
    wrote(here / "data" / "rows.json", [{"id": "here", "question": "q"}])
    assert ids(load_items(config, near=beside)) == ["here"]


@pytest.mark.parametrize(
    ("config", "override"),
    [
        (None, None),
        (JsonDataset(), None),
        (None, Path("nowhere.json")),
    ],
)
def test_no_dataset(prose: Prose, config: DatasetBaseConfig | None, override: Path | None):
    with pytest.raises(ConfigError) as caught:
        load_items(config, override)
    prose(caught)


def test_a_dataset_without_rows_to_run_is_an_error(prose: Prose, tmp_path: Path):
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, [{"question": " "}])
    prose(caught)


def test_a_function_makes_the_items(prose: Prose, tmp_path: Path):
    (tmp_path / "made_rows.py").write_text(
        "from hone.evaluation.base import EvalInput, EvalInputItem\n"
        "def items(file_path, count):\n"
        "    made = [EvalInputItem(id=n, input_obj=str(file_path)) for n in range(count)]\n"
        "    return EvalInput(eval_input_items=made)\n"
        "def rows(file_path):\n"
        "    return [{'question': 'a'}]\n"
        "def nothing(file_path):\n"
        "    return 3\n",
        encoding="utf-8",
    )
    config = CustomDataset(function="made_rows.items", kwargs={"count": 2})
    items = load_items(config, near=tmp_path)
    assert [(i.id, i.input_obj) for i in items] == [("0", "None"), ("1", "None")]
    file = tmp_path / "any.thing"
    file.touch()
    assert load_items(config, file, near=tmp_path)[0].input_obj == str(file)
    assert ids(load_items(CustomDataset(function="made_rows.py:rows"), near=tmp_path)) == ["1"]
    with pytest.raises(ConfigError) as caught:
        load_items(CustomDataset(function="made_rows:nothing"), near=tmp_path)
    prose(caught)
    with pytest.raises(ConfigError) as caught:
        load_items(CustomDataset(function="made_rows.itms"), near=tmp_path)
    prose(caught)
    assert place_of(caught) == "eval.general.dataset.function"


def test_items_with_the_same_id_are_an_error(prose: Prose):
    class Twice:
        def load(self, path: Path | None) -> EvalInput:
            return EvalInput(eval_input_items=[EvalInputItem(id="a", input_obj=n) for n in (1, 2)])

    with pytest.raises(ConfigError) as caught:
        load_items(JsonDataset(), loader=Twice())
    prose(caught)


@pytest.mark.parametrize(
    "content",
    [
        '[{"question": "q", "intermediate_steps": [{"payload": {"event_type": "LLM_END", "data": "x"}}]}]',
        '[{"question": "q", "expected_intermediate_steps": "no"}]',
        '[{"question": ' + "9" * 5000 + "}]",
        "[" * 100000 + "]" * 100000,
    ],
)
def test_rows_that_cannot_be_read_are_named(prose: Prose, tmp_path: Path, content: str):
    file = tmp_path / "rows.json"
    file.write_text(content)
    with pytest.raises(ConfigError) as caught:
        load_items(None, file)
    assert str(caught.value).startswith(str(file))
    prose(caught)


def test_a_directory_is_not_a_dataset(prose: Prose, tmp_path: Path):
    (tmp_path / "rows.json").mkdir()
    with pytest.raises(ConfigError) as caught:
        load_items(None, tmp_path / "rows.json")
    prose(caught)
