"""Durable files: the old content or the new, and last lines that a crash cut short."""

import os
import threading
from pathlib import Path

import pytest
from tests.prose import Prose, place_of

from hone.errors import DiskFull
from hone.files.disk import append_lines, open_lines, write_atomic

LONG = b"y" * 3 * 2**20


def test_a_file_is_replaced_whole_or_not_at_all(
    prose: Prose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "f.json"
    write_atomic(path, "old")
    write_atomic(path, b"new")
    assert path.read_bytes() == b"new"

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskFull) as caught:
        write_atomic(path, "newer")
    prose(caught)
    assert place_of(caught).endswith("f.json")
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["f.json"]
    with pytest.raises(DiskFull) as caught:
        append_lines(tmp_path / "log" / "f.jsonl", b"{}\n")
    prose(caught)
    assert place_of(caught).endswith("log/f.jsonl")


@pytest.mark.parametrize(
    ("content", "whole"),
    [
        (b"", b""),
        (b'{"a": 1}\n', b'{"a": 1}\n'),
        (b'{"a": 1}\n{"b"', b'{"a": 1}\n'),
        (b'{"a": 1}\n{"b"\n', b'{"a": 1}\n'),  # a power cut can leave the newline and lose a page
        (b'{"b"', b""),
        (b'{"a": 1}\n[]\n', b'{"a": 1}\n'),
        (b'{"a": 1}\n{"b": "%s"}\n{' % LONG, b'{"a": 1}\n{"b": "%s"}\n' % LONG),
    ],
)
def test_a_torn_last_line_is_cut(tmp_path: Path, content: bytes, whole: bytes):
    path = tmp_path / "f.jsonl"
    path.write_bytes(content)
    with open_lines(path) as file:
        file.write(b"{}\n")
    assert path.read_bytes() == whole + b"{}\n"


def test_writers_of_one_file_do_not_cut_each_others_lines(tmp_path: Path):
    path = tmp_path / "f.jsonl"
    line = b'{"a": "%s"}\n' % (
        b"x" * 2**20
    )  # large enough for the kernel to write it in several parts

    def write() -> None:
        for _ in range(5):
            append_lines(path, line)

    writers = [threading.Thread(target=write) for _ in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert path.read_bytes() == line * 20
