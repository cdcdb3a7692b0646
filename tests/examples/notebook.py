"""Run the code cells of a notebook in this process, with top-level await as Jupyter has it.

In:   a notebook; optionally other values for its cell tagged `parameters`
Out:  what each code cell printed

`python -m tests.examples.notebook examples/temporal-clue.ipynb` runs it as it stands and keeps what
its cells printed. Jupyter is not needed, and is not among the requirements.
"""

import ast
import asyncio
import contextlib
import inspect
import io
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def code_cells(notebook: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def source(cell: Mapping[str, Any]) -> str:
    return "".join(cell["source"])


def is_parameters(cell: Mapping[str, Any]) -> bool:
    return "parameters" in cell["metadata"].get("tags", [])


async def run_cells(
    path: Path,
    parameters: Mapping[str, Any] | None = None,
    replaced: Mapping[str, str] | None = None,
    *,
    echo: bool = False,
) -> list[str]:
    """Run the cells in the notebook's directory; returns what each one printed.

    Args:
        path: the notebook.
        parameters: values that its cell tagged `parameters` must define, instead of its own.
        replaced: code to replace; each text must occur exactly once.
        echo: print it here too, as it comes.
    """
    cells = code_cells(read(path))
    sources = [source(cell) for cell in cells]
    for old, new in (replaced or {}).items():
        assert sum(text.count(old) for text in sources) == 1, f"{path}: {old!r}"
        sources = [text.replace(old, new) for text in sources]
    namespace: dict[str, Any] = {"__name__": "__main__"}
    printed: list[str] = []
    with contextlib.chdir(path.parent):
        for number, (cell, text) in enumerate(zip(cells, sources, strict=True)):
            output = _Output(sys.stdout if echo else None)
            with contextlib.redirect_stdout(output):
                code = compile(
                    text, f"{path.name}[{number}]", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
                )
                pending = eval(code, namespace)
                if inspect.iscoroutine(pending):
                    await pending
            if is_parameters(cell) and parameters:
                unknown = parameters.keys() - namespace.keys()
                assert not unknown, f"{path}: its parameters have no {sorted(unknown)}"
                namespace.update(parameters)
            printed.append(output.getvalue())
    return printed


class _Output(io.StringIO):
    """Keeps what is printed, and prints it on."""

    def __init__(self, onward: Any) -> None:
        super().__init__()
        self._onward = onward

    def write(self, text: str) -> int:
        if self._onward is not None:
            self._onward.write(text)
            self._onward.flush()
        return super().write(text)


def keep_output(path: Path, printed: list[str]) -> None:
    """Write what the cells printed into the notebook."""
    notebook = read(path)
    for number, (cell, text) in enumerate(zip(code_cells(notebook), printed, strict=True), 1):
        lines = text.splitlines(keepends=True)
        stream = {"name": "stdout", "output_type": "stream", "text": lines}
        cell["execution_count"], cell["outputs"] = number, [stream] if lines else []
    # Written whole or not at all: a run can take a quarter of an hour.
    part = path.with_suffix(".part")
    part.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(part, path)


if __name__ == "__main__":
    notebook_path = Path(sys.argv[1]).resolve()
    keep_output(notebook_path, asyncio.run(run_cells(notebook_path, echo=True)))
