"""hone clears directories that have its mark, and no others."""

from pathlib import Path

import pytest
from tests.prose import Prose

from hone.errors import StateError
from hone.files.owned import MARK, is_owned, make_owned, remove_owned


def test_a_directory_with_the_mark_is_emptied_and_removed(tmp_path: Path):
    directory = tmp_path / "deep" / "bodies"
    make_owned(directory)
    assert [path.name for path in directory.iterdir()] == [MARK]
    (directory / "folder" / "more").mkdir(parents=True)
    (directory / "file").write_text("left by a killed server")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "thesis.txt").write_text("mine")
    (directory / "link").symlink_to(outside)
    make_owned(directory)
    assert [path.name for path in directory.iterdir()] == [MARK]
    assert (outside / "thesis.txt").exists()
    assert remove_owned(directory) and not directory.exists()


def test_files_that_hone_did_not_create_stay(prose: Prose, tmp_path: Path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(StateError) as caught:
        make_owned(tmp_path)
    prose(caught)
    assert not remove_owned(tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "mine"
    empty = tmp_path / "empty"
    empty.mkdir()
    assert not is_owned(empty)
    make_owned(empty)
    assert is_owned(empty)
    link = tmp_path / "link"
    link.symlink_to(empty)
    assert not is_owned(link) and not remove_owned(link) and is_owned(empty)
