"""Files of rows: what is read, and the errors for files that cannot be read."""

import datetime
import decimal
import json
from pathlib import Path
from typing import Any

import openpyxl
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.prose import Prose

from hone.errors import ConfigError
from hone.evaluation import rows

ROWS = [{"id": 1, "question": "a?", "answer": "x"}, {"id": 2, "question": "b?", "answer": None}]


def wrote(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_json_and_jsonl(tmp_path: Path):
    whole = wrote(tmp_path / "rows.json", json.dumps(ROWS))
    lines = wrote(tmp_path / "rows.JSONL", "\n\n".join(map(json.dumps, ROWS)) + "\n")
    assert rows.read(whole) == ROWS
    assert rows.read(lines) == ROWS


def test_a_byte_order_mark_is_not_part_of_the_first_column(tmp_path: Path):
    assert rows.read(wrote(tmp_path / "a.csv", "\ufeffid,question\r\n1,a?\r\n")) == [
        {"id": "1", "question": "a?"}
    ]
    assert rows.read(wrote(tmp_path / "a.jsonl", '\ufeff{"id": 1}')) == [{"id": 1}]


def test_only_newlines_end_lines_in_jsonl(tmp_path: Path):
    text = json.dumps({"question": "a\u2028b\x85c"}, ensure_ascii=False)
    assert rows.read(wrote(tmp_path / "a.jsonl", text)) == [{"question": "a\u2028b\x85c"}]


def test_csv_is_text_and_empty_cells_are_none(tmp_path: Path):
    text = 'id,question,answer\n1,"a, ""b""\nc",x\n\n2,,\n3,d\n'
    assert rows.read(wrote(tmp_path / "a.csv", text)) == [
        {"id": "1", "question": 'a, "b"\nc', "answer": "x"},
        {"id": "2", "question": None, "answer": None},
        {"id": "3", "question": "d", "answer": None},
    ]
    assert rows.read(wrote(tmp_path / "a.tsv", "id\tq\n1\ta,b\n")) == [{"id": "1", "q": "a,b"}]


def test_a_cell_may_be_longer_than_the_limit_of_the_csv_module(tmp_path: Path):
    import csv

    before = csv.field_size_limit()
    long = "x" * 200_000
    assert rows.read(wrote(tmp_path / "a.csv", f"id\n{long}\n")) == [{"id": long}]
    assert csv.field_size_limit() == before


def test_parquet(tmp_path: Path):
    table = pyarrow.Table.from_pylist(
        [
            {
                "id": 1,
                "when": datetime.datetime(2026, 1, 2, 3, 4),
                "price": decimal.Decimal("2.50"),
                "tags": ["a"],
                "raw": b"ab",
                "took": datetime.timedelta(seconds=90),
                "who": {"name": "x"},
            }
        ]
    )
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert rows.read(tmp_path / "a.parquet") == [
        {
            "id": 1,
            "when": "2026-01-02T03:04:00",
            "price": 2.5,
            "tags": ["a"],
            "raw": "ab",
            "took": 90.0,
            "who": {"name": "x"},
        }
    ]


def sheet(path: Path, lines: list[list[Any]]) -> Path:
    book = openpyxl.Workbook()
    first = book.active
    assert first is not None
    for line in lines:
        first.append(line)
    book.create_sheet("other").append(["not", "read"])
    book.save(path)
    return path


def test_xlsx(tmp_path: Path):
    path = sheet(
        tmp_path / "a.xlsx",
        [
            ["id", "question", None],
            [1, "a?"],
            [None, None, None],
            [2, datetime.date(2026, 1, 2)],
        ],
    )
    assert rows.read(path) == [
        {"id": 1, "question": "a?"},
        {"id": 2, "question": "2026-01-02T00:00:00"},
    ]


def test_xls():
    # Written with Excel 97's format: 1 is stored as 1.0, TRUE as 1, a date as days since 1900.
    assert rows.read(Path(__file__).parent / "rows.xls") == [
        {"id": 1, "question": "a?", "score": 0.5, "right": True, "when": "2026-01-02T00:00:00"},
        {"id": 2, "question": "b?", "score": None, "right": False, "when": None},
    ]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.json", '{"id": 1}'),
        ("a.json", '[{"id": 1},\n {"id": }]'),
        ("a.json", '{"id": 1}\n{"id": 2}'),
        ("a.json", '[{"id": 1}, "x"]'),
        ("a.jsonl", '{"id": 1}\n{"id"'),
        ("a.jsonl", '[\n{"id": 1}]'),
        ("a.jsonl", "[1]\n"),
        ("a.json", b"\xff\xfe["),
        ("a.jsonl", b'{"a": "\xe9"}'),
        ("a.csv", b"a\n\xe9\n"),
        ("a.csv", "id,q\n1,a,b\n"),
        ("a.csv", "id,id\n1,2\n"),
        ("a.csv", 'id,q\n1,"a\n'),
        ("a.parquet", b"PAR0"),
        ("a.xlsx", b"PK"),
        ("a.xls", b"PK"),
        ("a.txt", "x"),
    ],
)
def test_an_unreadable_file_is_an_error(
    prose: Prose, tmp_path: Path, name: str, content: str | bytes
):
    path = wrote(tmp_path / name, content)
    with pytest.raises(ConfigError) as caught:
        rows.read(path)
    prose(caught)
    assert str(caught.value).startswith(str(path))


def test_an_empty_file_of_a_table_has_no_rows(tmp_path: Path):
    assert rows.read(wrote(tmp_path / "a.csv", "")) == []


@pytest.mark.parametrize(
    ("package", "name"), [("pyarrow", "a.parquet"), ("openpyxl", "a.xlsx"), ("xlrd", "a.xls")]
)
def test_a_missing_library_is_named(
    prose: Prose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, name: str
):
    monkeypatch.setitem(__import__("sys").modules, package, None)
    with pytest.raises(ConfigError) as caught:
        rows.read(wrote(tmp_path / name, b""))
    prose(caught)


CELLS = st.text(
    st.characters(blacklist_categories=["Cs"], blacklist_characters="\x00\r"), min_size=1
)


@settings(max_examples=60, deadline=None)
@given(table=st.lists(st.lists(CELLS, min_size=2, max_size=2), min_size=1, max_size=5))
def test_a_table_survives_a_round_trip(
    tmp_path_factory: pytest.TempPathFactory, table: list[list[str]]
):
    import csv

    path = tmp_path_factory.mktemp("csv") / "a.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([["a", "b"], *table])
    assert rows.read(path) == [{"a": a, "b": b} for a, b in table]
