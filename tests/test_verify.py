"""verify.py: what passed is written with its commit, and what changed since is listed."""

import json
import platform
import re
import subprocess
from pathlib import Path

import pytest
from tests.environments import ROOT
from tests.verify import RECORD, VERBS, Verb, main, read

MAKEFILE = """
good other:
\t@echo "run $@ [$(ARGS)] $$WORD" >> ran.log
bad:
\t@exit 3
writes:
\t@echo 1 > source.txt
"""
VERBS_HERE = {
    "bad": Verb("bad"),
    "good": Verb("good", environment=(("WORD", "now"),)),
    "other": Verb("other", ("own",)),
}


def git(root: Path, *arguments: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    command = ["git", *who, *arguments]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout


def commit(root: Path) -> str:
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message", "m")
    return git(root, "rev-parse", "HEAD").strip()


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):  # of a hook that runs the tests
        monkeypatch.delenv(name, raising=False)
    # As `make verify ARGS="good"` would hand it down.
    monkeypatch.setenv("MAKEFLAGS", " -- ARGS=good")
    for folder in ("src", "own", "tests", "bench"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "file.txt").write_text("1")
    (tmp_path / "Makefile").write_text(MAKEFILE)
    (tmp_path / ".gitignore").write_text("ran.log\n")
    git(tmp_path, "init", "--quiet")
    commit(tmp_path)
    return tmp_path


def test_a_pass_is_written_with_its_commit_and_a_failure_stops_nobody(
    root: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    head = git(root, "rev-parse", "HEAD").strip()
    assert main([], root=root, verbs=VERBS_HERE) == 1
    record = read(root)
    assert list(record) == ["good", "other"]
    assert record["good"]["commit"] == head
    assert record["good"]["machine"] == platform.machine()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\dZ", record["good"]["date"])
    lines = (root / RECORD).read_text().splitlines()
    assert len(lines) == 4, "a line for each, between the braces"
    assert (root / "ran.log").read_text() == "run good [] now\nrun other [] \n"
    output = capfd.readouterr().out
    assert "bad         FAILED with status 2" in output  # make's own, for a recipe's 3
    assert f"good        passed in 0 s at {head[:10]}" in output


def test_a_failure_keeps_the_earlier_pass(root: Path) -> None:
    assert main(["good"], root=root, verbs=VERBS_HERE) == 0
    before = read(root)
    (root / "Makefile").write_text("good:\n\t@exit 1\n")
    commit(root)
    assert main(["good"], root=root, verbs=VERBS_HERE) == 1
    assert read(root) == before


@pytest.mark.parametrize("file", ["src/file.txt", "new.txt"])
def test_with_uncommitted_changes_nothing_is_written(
    root: Path, file: str, capfd: pytest.CaptureFixture[str]
) -> None:
    (root / file).write_text("2")
    assert main(["good"], root=root, verbs=VERBS_HERE) == 0
    assert read(root) == {}
    assert f"not recorded: {file} not committed" in capfd.readouterr().out


def test_a_change_while_it_runs_is_not_recorded_either(root: Path) -> None:
    assert main(["w"], root=root, verbs={"w": Verb("writes")}) == 0
    assert read(root) == {}


def test_what_the_verbs_write_is_no_change(root: Path) -> None:
    (root / "bench" / "results.json").write_text("[]")
    (root / RECORD).write_text("{}")
    assert main(["good"], root=root, verbs=VERBS_HERE) == 0
    assert list(read(root)) == ["good"]
    commit(root)
    assert main(["--behind", "good"], root=root, verbs=VERBS_HERE) == 0


def test_behind_lists_those_whose_sources_changed(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def behind() -> dict[str, str]:
        capsys.readouterr()
        status = main(["--behind", "good", "other"], root=root, verbs=VERBS_HERE)
        lines = capsys.readouterr().out.splitlines()
        assert status == (0 if lines == ["none is behind"] else 1)
        return {line.split()[0]: line.split(maxsplit=1)[1] for line in lines if status}

    assert behind() == {"good": "has not passed yet", "other": "has not passed yet"}
    main(["good", "other"], root=root, verbs=VERBS_HERE)
    commit(root)
    assert behind() == {}
    (root / "bench" / "file.txt").write_text("2")  # a source of all but `other`
    (changed,) = behind().items()
    assert changed[0] == "good" and changed[1].endswith("; changed since: bench/file.txt")
    commit(root)
    assert [*behind()] == ["good"]
    for n in range(5):
        (root / "own" / f"{n}.txt").write_text("new and not committed")
    own = "own/0.txt, own/1.txt, own/2.txt and 2 more"
    assert behind()["other"].endswith(f"; changed since: {own}")


def test_src_is_a_source_of_every_verb(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["good", "other"], root=root, verbs=VERBS_HERE)
    (root / "src" / "file.txt").write_text("2")
    assert main(["--behind", "good", "other"], root=root, verbs=VERBS_HERE) == 1
    assert capsys.readouterr().out.count("changed since: src/file.txt") == 2


def test_a_commit_that_is_gone_is_behind(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["good"], root=root, verbs=VERBS_HERE)
    record = read(root)
    record["good"]["commit"] = "0" * 40
    (root / RECORD).write_text(json.dumps(record))
    assert main(["--behind", "good"], root=root, verbs=VERBS_HERE) == 1
    assert "which is not a commit of this repository" in capsys.readouterr().out


def test_an_unknown_verb_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--behind", "arts"])
    assert ended.value.code == 2
    assert "no verb is called 'arts'; there are check, test, e2e, art" in capsys.readouterr().err


def test_every_verb_is_a_target_and_its_sources_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for name, verb in VERBS.items():
        assert re.search(rf"^{re.escape(verb.target)}:", makefile, re.M), name
        missing = [path for path in verb.sources if not (ROOT / path).exists()]
        assert missing == [], name
    # Every target that tests something is one of them; `seeds` and `bench` only measure.
    tested = re.findall(r"^(test[\w-]*|check|chaos|fuzz):", makefile, re.M)
    assert sorted(tested) == sorted(verb.target for verb in VERBS.values())
