"""plugins.py: an installed package is discovered; a broken one is reported, and the others load."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.patience import PATIENCE_S

from hone.config import plugins, registry
from hone.errors import ConfigError

MINE = {
    ("function", "my_workflow"),
    ("evaluator", "my_custom_evaluator"),
    ("trajectory_builder", "plain_builder"),
    ("trainer_adapter", "file_adapter"),
    ("trainer", "plain_trainer"),
}


def hone(path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A process of its own, whose only plugins are those under `path`."""
    environment = {**os.environ, "PYTHONPATH": str(path)}
    command = [sys.executable, "-m", "hone", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE_S, env=environment
    )


@pytest.mark.usefixtures("plugin")
def test_an_installed_package_is_discovered():
    components = {(r.kind, r.name) for r in registry.known() if r.package == "hone_test_plugin"}
    assert components == MINE


def test_every_part_of_hone_registers_what_the_seed_documents_name():
    plugins.discover()
    for kind, name in [
        ("llm_provider", "openai"),
        ("llm_provider", "trainable"),
        ("function", "python"),
        *(("dataset_loader", n) for n in ("json", "jsonl", "csv", "parquet", "xls", "custom")),
        *(("evaluator", n) for n in ("exact_match", "contains", "regex", "numeric", "json_match")),
        *(("evaluator", n) for n in ("tool_call_match", "f1", "python", "llm_judge", "trajectory")),
        ("trajectory_builder", "rollouts"),
        ("trajectory_builder", "openpipe_art_traj_builder"),
        ("trainer_adapter", "hone_server"),
        ("trainer_adapter", "openpipe_art_trainer_adapter"),
        ("trainer", "rl"),
        ("trainer", "openpipe_art_trainer"),
    ]:
        assert registry.find(kind, name) is not None, (kind, name)


@pytest.mark.e2e
def test_a_process_finds_it_by_its_entry_point(plugin: Path):
    done = hone(plugin, "info", "components", "-t", "trainer", "-t", "evaluator")
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    assert ["trainer", "plain_trainer", "hone_test_plugin", "The", "shortest"] in [
        r[:5] for r in rows
    ]
    assert "my_custom_evaluator" in done.stdout
    assert "my_workflow" not in done.stdout  # a function


def test_hone_s_own_components_are_found_without_its_metadata(monkeypatch: pytest.MonkeyPatch):
    """A checkout on PYTHONPATH has no entry points; the command line needs none."""
    monkeypatch.setattr(plugins, "entry_points", lambda group: [])
    monkeypatch.setattr(plugins, "_composition", [])
    monkeypatch.setattr(plugins, "_toolkits", [])
    plugins.discover.cache_clear()
    try:
        with pytest.raises(ConfigError) as caught:
            plugins.discover()
        assert "pip" in str(caught.value)
        loaded: list[str] = []
        plugins.compose_with(lambda: loaded.append("composition"))
        assert plugins.discover() == () and loaded == ["composition"]
    finally:
        plugins.discover.cache_clear()


@pytest.mark.e2e
def test_a_package_that_fails_is_reported_and_the_others_load(tmp_path: Path):
    (tmp_path / "broken_plugin.py").write_text("import nowhere_at_all\n", encoding="utf-8")
    metadata = tmp_path / "broken_plugin-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Name: broken-plugin\nVersion: 1.0\n", encoding="utf-8")
    (metadata / "entry_points.txt").write_text(
        "[hone.components]\nbroken = broken_plugin\n", encoding="utf-8"
    )
    reason = (
        "plugin 'broken' of package 'broken-plugin' could not be imported (broken_plugin: "
        "ModuleNotFoundError: No module named 'nowhere_at_all')"
    )
    good = tmp_path / "good.yml"
    good.write_text("eval: {evaluators: {a: {_type: exact_match}}}\n", encoding="utf-8")
    done = hone(tmp_path, "validate", "--config_file", str(good))
    assert done.returncode == 0
    assert f"WARNING - {reason}\n" in done.stderr
    # Who misses what the package would have brought is told why it is not there.
    bad = tmp_path / "bad.yml"
    bad.write_text("workflow: {_type: theirs}\n", encoding="utf-8")
    done = hone(tmp_path, "validate", "--config_file", str(bad))
    assert done.returncode == 1
    [line] = [line for line in done.stderr.splitlines() if "bad.yml:1:" in line]
    assert "workflow._type: no function is called 'theirs'. Known: " in line
    assert line.endswith(f"Note: {reason}.")
    done = hone(tmp_path, "info", "components", "-t", "function")
    assert done.returncode == 0 and f"hone: {reason}" in done.stderr
