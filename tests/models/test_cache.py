"""models/cache.py: a conversion is complete or absent, and happens once."""

import json
import os
import signal
import subprocess
import sys
import threading

import pytest
from tests.prose import Prose

from hone.errors import ServerError
from hone.models import cache

pytestmark = pytest.mark.usefixtures("own_home")


def test_a_conversion_is_made_once(tmp_path, make_gguf, own_home):
    make_gguf(tmp_path / "tiny.gguf")
    reports: list[str] = []
    first = cache.converted(
        tmp_path / "tiny.gguf", "my model", progress=lambda what, done, total: reports.append(what)
    )
    # One report for the header, one for each of 2 x 9 + 3 tensors.
    assert len(reports) == 22
    assert first.parent == own_home / "models"
    assert first.name.startswith("my-model-")
    second = cache.converted(
        tmp_path / "tiny.gguf", "my model", progress=lambda *_: reports.append("again")
    )
    assert second == first
    assert "again" not in reports


def test_hone_json_says_where_it_came_from(tmp_path, make_gguf):
    make_gguf(tmp_path / "tiny.gguf")
    origin = cache.read_origin(cache.converted(tmp_path / "tiny.gguf", "tiny"))
    assert origin is not None
    assert (origin["source"], origin["quantisation"], origin["pre_tokenizer"]) == (
        "tiny.gguf",
        "F32",
        "smollm",
    )
    assert len(origin["source_sha256"]) == 64


def test_other_content_gets_another_directory(tmp_path, make_gguf):
    make_gguf(tmp_path / "tiny.gguf")
    first = cache.converted(tmp_path / "tiny.gguf", "tiny")
    make_gguf(tmp_path / "tiny.gguf", pre="qwen2")
    assert cache.converted(tmp_path / "tiny.gguf", "tiny") != first


def test_a_killed_conversion_leaves_nothing_that_counts(tmp_path, make_gguf, own_home):
    make_gguf(tmp_path / "tiny.gguf")
    program = (
        "import os, signal\n"
        "from pathlib import Path\n"
        "from hone.models import cache\n"
        "def progress(what, done, total):\n"
        "    if done == 10: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"cache.converted(Path({str(tmp_path / 'tiny.gguf')!r}), 'tiny', progress=progress)\n"
    )
    killed = subprocess.run([sys.executable, "-c", program], env=os.environ, check=False)
    assert killed.returncode == -signal.SIGKILL
    left = list((own_home / "models").glob(".*.partial"))
    assert len(left) == 1, "the kill must have come in the middle"
    assert [p for p in (own_home / "models").iterdir() if not p.name.startswith(".")] == []

    # A conversion of something else sweeps it away, and the same one works.
    make_gguf(tmp_path / "other.gguf", pre="qwen2")
    cache.converted(tmp_path / "other.gguf", "other")
    assert list((own_home / "models").glob(".*.partial")) == []
    assert cache.is_whole(cache.converted(tmp_path / "tiny.gguf", "tiny"))


def test_an_exception_in_the_middle_leaves_nothing(tmp_path, make_gguf, own_home):
    make_gguf(tmp_path / "tiny.gguf")

    def progress(what: str, done: int, total: int) -> None:
        if done == 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache.converted(tmp_path / "tiny.gguf", "tiny", progress=progress)
    assert [p for p in (own_home / "models").iterdir() if p.suffix != ".lock"] == []


def test_two_at_once_convert_once(tmp_path, make_gguf):
    make_gguf(tmp_path / "tiny.gguf")
    made: list[object] = []
    started: list[str] = []

    def work() -> None:
        def progress(what: str, done: int, total: int) -> None:
            if what == "reading":
                started.append(what)

        made.append(cache.converted(tmp_path / "tiny.gguf", "tiny", progress=progress))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 4
    assert len(set(made)) == 1
    assert len(started) == 1


def test_a_damaged_conversion_is_made_again(tmp_path, make_gguf):
    make_gguf(tmp_path / "tiny.gguf")
    path = cache.converted(tmp_path / "tiny.gguf", "tiny")
    (path / "tokenizer.json").unlink()
    assert not cache.is_whole(path)
    assert cache.converted(tmp_path / "tiny.gguf", "tiny") == path
    assert json.loads((path / "tokenizer.json").read_text())["model"]["type"] == "BPE"


def test_a_home_that_cannot_be_written_says_what_to_do(
    prose: Prose, tmp_path, make_gguf, monkeypatch
):
    make_gguf(tmp_path / "tiny.gguf")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HONE_HOME", str(tmp_path / "file"))
    with pytest.raises(ServerError) as caught:
        cache.converted(tmp_path / "tiny.gguf", "tiny")
    prose(caught)
