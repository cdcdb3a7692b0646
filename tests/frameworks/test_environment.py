"""Where the frameworks cannot be installed, their tests are skipped; in the gate, they fail."""

import re
import tomllib
from pathlib import Path

import pytest
from tests import environments
from tests.conformance import capture


def test_without_packages_tests_are_skipped_and_the_gate_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environments, "ROOT", tmp_path)
    monkeypatch.setattr(capture, "FRAMEWORKS", tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv(capture.REQUIRE, raising=False)
    (tmp_path / "constraints-a.txt").write_text("no-such-package-of-hone==1.0\n")
    with pytest.raises(pytest.skip.Exception, match="cannot be made: pip ended with 1"):
        capture.interpreter("a")
    monkeypatch.setenv(capture.REQUIRE, "1")
    with pytest.raises(pytest.fail.Exception, match="no-such-package-of-hone"):
        capture.interpreter("a")
    assert not (tmp_path / ".venv-frameworks-a" / ".installed").exists()


def test_the_other_environments_are_for_the_longer_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(capture.ALL, raising=False)
    for name, usual in (("b", True), ("a", False)):
        with pytest.raises(pytest.skip.Exception, match="make test-frameworks"):
            capture.interpreter(name, usual=usual)


def test_every_extra_that_a_reader_is_told_of_exists() -> None:
    known = tomllib.loads((environments.ROOT / "pyproject.toml").read_text())
    extras = known["project"]["optional-dependencies"].keys()
    guide = (environments.ROOT / "docs" / "guides" / "frameworks.md").read_text()
    table = re.findall(r"^\| \[[^|]+\| `([\w-]+)` \|", guide, re.M)
    assert len(table) == 13
    code = [
        file.read_text()
        for file in (environments.ROOT / "src/hone/integrations/frameworks").glob("*.py")
    ]
    named = re.findall(r'require\("[\w.]+", "([\w-]+)"\)', "\n".join(code))
    apart = [one["extra"] for pair in known["tool"]["uv"]["conflicts"] for one in pair]
    assert len(named) == 3
    assert {*table, *named, *apart} <= extras
