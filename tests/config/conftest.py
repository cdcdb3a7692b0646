"""The plugin of tests/plugin, installed and discovered in this process; YAML files from text."""

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent

import pytest
from tests.plugin.installed import unpack

from hone.config import plugins


@pytest.fixture(scope="session")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where it is installed; its components are registered while the tests run."""
    directory = unpack(tmp_path_factory.mktemp("plugin"))
    sys.path.append(str(directory))
    importlib.invalidate_caches()
    plugins.discover.cache_clear()
    assert plugins.discover() == ()
    yield directory
    sys.path.remove(str(directory))
    plugins.discover.cache_clear()


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Text as a file of the working directory, named without the directory."""
    monkeypatch.chdir(tmp_path)

    def file(text: str, name: str = "a.yml") -> Path:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(dedent(text), encoding="utf-8")
        return Path(name)

    return file
