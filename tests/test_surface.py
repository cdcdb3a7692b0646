"""The public surface: which names there are, how light `import hone` is, what errors exist."""

import inspect
import re
import subprocess
import sys

import pytest

import hone
from hone import errors

HEAVY = ("torch", "transformers", "peft", "fastapi", "openai", "matplotlib", "renderers", "httpx")


def test_public_names():
    assert sorted(hone.__all__) == [
        "Call",
        "TrainConfig",
        "Trajectory",
        "TrajectoryGroup",
        "__version__",
    ]
    assert all(hasattr(hone, name) for name in hone.__all__)


@pytest.mark.parametrize("module", ["hone", "hone.errors", "hone.types", "hone.trajectory"])
def test_importing_the_sdk_loads_nothing_heavy(module: str):
    # A process of its own: this one has long loaded torch for other tests.
    code = f"import sys, {module}; print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert module in loaded, "the subprocess did not import what was asked"
    assert not loaded.intersection(HEAVY)


def test_the_command_line_says_its_help_without_torch():
    code = (
        "import sys\n"
        "from hone.cli import main\n"
        "sys.argv = ['hone', '--help']\n"
        "try:\n"
        "    main()\n"
        "except SystemExit as stop:\n"
        "    assert not stop.code, stop.code\n"
        "print('MODULES', *sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    shown, modules = done.stdout.split("MODULES")
    assert "models" in shown
    assert not set(modules.split()).intersection({"torch", "transformers", "matplotlib"})


def test_error_tree_in_the_docstring_is_the_tree_of_classes():
    drawn = _drawn_tree(errors.__doc__ or "")
    real = {
        name: {base.__name__ for base in value.__bases__}
        for name, value in vars(errors).items()
        if inspect.isclass(value) and value.__module__ == errors.__name__
    }
    assert drawn == real


def _drawn_tree(text: str) -> dict[str, set[str]]:
    """Name of each class -> names of its bases, read from indentation and parentheses."""
    found: dict[str, set[str]] = {}
    above: list[tuple[int, str]] = []  # (column, name) of the ancestors of the next line
    for line in text.splitlines():
        match = re.match(r"^( {4}[|` -]*)([A-Z]\w*)(?: \((\w+)\))?", line)
        if not match:
            continue
        column, name, refined = len(match[1]), match[2], match[3]
        while above and above[-1][0] >= column:
            above.pop()
        bases = {above[-1][1] if above else "Exception"}
        found[name] = bases | ({refined} if refined else set())
        above.append((column, name))
    return found


def test_a_drawn_tree_is_read_as_drawn():
    drawn = _drawn_tree("    A\n    |-- B (ValueError)   why\n    |   `-- C   why\n    `-- D\n")
    assert drawn == {"A": {"Exception"}, "B": {"A", "ValueError"}, "C": {"B"}, "D": {"A"}}
