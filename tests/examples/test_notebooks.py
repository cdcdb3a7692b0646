"""The notebooks: every code cell runs, on a real server with a model of a megabyte."""

import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.chat.conftest import build_tokenizer
from tests.examples.conftest import EXAMPLES
from tests.examples.notebook import code_cells, is_parameters, read, run_cells, source
from tests.server.conftest import write_model

from hone import LocalBackend
from hone.types import model_directory

TIC_TAC_TOE = Path("tic_tac_toe/tic-tac-toe.ipynb")
TEMPORAL_CLUE = Path("temporal-clue.ipynb")
NOTEBOOKS = sorted(EXAMPLES.rglob("*.ipynb"))
RECORDED = {TIC_TAC_TOE.name, TEMPORAL_CLUE.name}
"""File names of those stored with the output of a run of SmolLM2."""
SMALL: dict[str, Any] = {"STEPS": 2, "ROLLOUTS": 3, "HELD_OUT": 2}


SHARED = {"art.LocalBackend(path=ROOT)": "art.LocalBackend(path=ROOT, share=True)"}
"""Uses the server that runs at ROOT, for it takes seconds to start."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with room for a puzzle, of which its tokenizer makes many tokens."""
    tokenizer = build_tokenizer("qwen2.5-instruct")
    return write_model(tmp_path_factory.mktemp("models") / "tiny", tokenizer, positions=1024)


@pytest.fixture
def examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy, because a notebook writes beside itself; what it imports is forgotten afterwards."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = dict(sys.modules)
    ignored = shutil.ignore_patterns(".hone", "node_modules")
    yield shutil.copytree(EXAMPLES, tmp_path / "examples", ignore=ignored)
    for name in ("game", "puzzles"):
        sys.modules.pop(name, None)
        if name in before:
            sys.modules[name] = before[name]


def steps_of(root: Path, project: str, name: str) -> list[str]:
    return sorted(p.name for p in (model_directory(root, project, name) / "checkpoints").iterdir())


async def test_tic_tac_toe_trains(examples: Path, tiny: Path, shared_server: LocalBackend):
    root = shared_server.root
    printed = await run_cells(
        examples / TIC_TAC_TOE,
        {**SMALL, "BASE_MODEL": str(tiny), "ROOT": str(root), "GAMES": 2},
        # A random model names no cell; values that differ show that the loop trains.
        {**SHARED, "value = -0.5": "value = len(answer) / 10"},
    )
    assert steps_of(root, "tic-tac-toe", "agent-001") == ["0000", "0001", "0002"]
    assert printed[1] == "1X3\nO5X\n7O9\n"
    lines = [line.split(":")[0] for line in printed[-2].splitlines()]
    assert lines == ["step 0", "trained step 1", "trained step 2", "step 2"]
    assert re.fullmatch(r"(?s)123\n456\n789  ->  .*(not won|won)\n", printed[-1])


async def test_temporal_clue_trains_every_seed(
    examples: Path, tiny: Path, shared_server: LocalBackend
):
    root = shared_server.root
    printed = await run_cells(
        examples / TEMPORAL_CLUE,
        {**SMALL, "BASE_MODEL": str(tiny), "ROOT": str(root), "PUZZLES": 2, "SEEDS": [0, 1]},
        # Nor does it answer in four parts.
        {
            **SHARED,
            'score(choice.message.content or "", puzzle.solution)': (
                'len(choice.message.content or "") / 100'
            ),
        },
    )
    for seed in (0, 1):
        steps = steps_of(root, "temporal-clue", f"agent-001-{seed}")
        assert steps == ["0000", "0001", "0002"]
    lines = [line.split(":")[0] for line in printed[-2].splitlines()]
    assert lines == [f"agent-001-{seed} step {step}" for seed in (0, 1) for step in (0, 1, 2)]
    assert "config_8b.yml: valid" in printed[-1]
    assert "over Qwen/Qwen3-8B" in printed[-1] and "7,680 rollouts" in printed[-1]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_its_file_is_whole_and_its_output_is_that_of_its_cells_in_order(path: Path):
    notebook = read(path)
    cells = code_cells(notebook)
    assert [is_parameters(cell) for cell in cells] == [True] + [False] * (len(cells) - 1)
    assert "import hone.art as art" in source(cells[1])
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids)
    counts = [cell["execution_count"] for cell in cells]
    whole = list(range(1, len(cells) + 1))  # run once, from the top
    assert counts == (whole if path.name in RECORDED else [None] * len(cells))
    assert all(out["output_type"] == "stream" for cell in cells for out in cell["outputs"])
    assert "/home/" not in json.dumps(notebook) and "/tmp" not in json.dumps(notebook)


def test_both_are_where_readers_of_art_look_for_them():
    assert [EXAMPLES / TEMPORAL_CLUE, EXAMPLES / TIC_TAC_TOE] == NOTEBOOKS
