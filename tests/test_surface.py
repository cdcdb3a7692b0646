"""The public surface: which names there are, how light `import hone` is, what errors exist."""

import inspect
import re
import subprocess
import sys

import pytest
from tests.patience import PATIENCE_S

import hone
from hone import art, errors

HEAVY = {"torch", "transformers", "peft", "fastapi", "openai", "matplotlib", "renderers"} | {
    "httpx",
    "httpx2",
    "numpy",
    "rich",
    "uvicorn",
}


def test_public_names():
    assert sorted(hone.__all__) == [
        "Backend",
        "Call",
        "History",
        "LocalBackend",
        "Messages",
        "MessagesAndChoices",
        "Model",
        "RemoteBackend",
        "Rollout",
        "Tools",
        "TrainConfig",
        "TrainResult",
        "TrainSFTConfig",
        "TrainableModel",
        "Trajectory",
        "TrajectoryGroup",
        "__version__",
        "auto_trajectory",
        "capture_auto_trajectory",
        "capture_yielded_trajectory",
        "function",
        "gather_trajectories",
        "gather_trajectory_groups",
        "retry",
        "rollout",
        "step",
        "trajectory_group_batches",
        "yield_trajectory",
    ]
    assert set(hone.__all__) <= set(dir(hone))
    assert all(getattr(hone, name) is not None for name in hone.__all__)
    assert hone.errors is errors


def test_an_unknown_name_is_answered_with_the_known_ones():
    with pytest.raises(AttributeError, match="hone has no 'LocalApi'; it has Backend, Call,"):
        hone.LocalApi  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]  # the mistake
    assert not hasattr(hone, "skypilot")


def test_names_of_art_are_in_its_wing_only():
    modules = {"dev", "langgraph", "local", "rewards", "serverless", "trajectories", "utils"}
    aliases = {"LocalTrainResult", "ServerlessBackend", "ServerlessTrainResult"}
    assert not [name for name in modules | aliases if hasattr(hone, name)]
    code = f"import hone.art as art; print(*[n for n in {modules | aliases} if hasattr(art, n)])"
    assert set(_python(code).split()) == modules | aliases
    with pytest.raises(AttributeError) as caught:
        art.LocalApi  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]  # the mistake
    assert set(art.__all__) <= set(str(caught.value).replace(",", "").split())


def test_star_import_gives_every_name():
    done = _python("from hone import *; print(*dir())")
    assert set(hone.__all__) <= set(done.split())


LIGHT = ("errors", "types", "trajectory", "model", "gather", "tasks.retries", "capture.scope")


def test_importing_the_sdk_loads_nothing_heavy():
    modules = ["hone", *(f"hone.{name}" for name in (*LIGHT, "backends.base"))]
    # A process of its own: this one has long loaded torch for other tests.
    loaded = set(_python(f"import sys, {', '.join(modules)}; print(*sys.modules)").split())
    assert loaded.issuperset(modules), "the subprocess did not import what was asked"
    assert not loaded.intersection(HEAVY)


def test_the_backends_load_no_tensors():
    code = "import sys, hone; hone.LocalBackend, hone.RemoteBackend; print(*sys.modules)"
    assert not set(_python(code).split()) & (HEAVY - {"httpx2", "rich"})


def test_import_hone_loads_no_other_module_of_hone():
    loaded = _python("import sys, hone; print(*sys.modules)").split()
    assert [name for name in loaded if name.split(".")[0] == "hone"] == ["hone"]


def test_art_s_names_load_on_first_use():
    loaded = _python("import sys, hone.art; print(*sys.modules)").split()
    assert [name for name in loaded if name.split(".")[0] == "hone"] == ["hone", "hone.art"]
    assert not set(loaded) & HEAVY
    code = "for name in (*art.__all__, *art._MODULES): getattr(art, name)"
    loaded = _python(f"import sys, hone.art as art\n{code}\nprint(*sys.modules)").split()
    assert {"hone.art.backend", "hone.art.rewards", "hone.art.utils"} <= set(loaded)
    assert not set(loaded) & {"torch", "transformers", "fastapi", "uvicorn", "openai"}


def test_importing_the_sdk_patches_nothing():
    code = (
        "import httpx, httpx2, openai, asyncio\n"
        "def seen():\n"
        "    kinds = [k for m in (httpx, httpx2) for k in vars(m).values() if isinstance(k, type)]\n"
        "    kinds += [openai.OpenAI, openai.AsyncOpenAI, asyncio.Task]\n"
        "    return {k: dict(vars(k)) for k in kinds}, [dict(vars(m)) for m in (httpx, httpx2)]\n"
        "before = seen()\n"
        "import hone\n"
        "for name in hone.__all__: getattr(hone, name)\n"
        "assert seen() == before\n"
        "with hone.rollout(): assert seen() != before\n"
        "assert seen() == before\n"
    )
    _python(code)


def _python(code: str) -> str:
    """What a process of its own prints."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_command_line_says_its_help_without_torch():
    code = (
        "import sys\n"
        "from hone.cli.app import main\n"
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
    loaded: dict[str, set[str]] = {}
    above: list[tuple[int, str]] = []  # (column, name) of the ancestors of the next line
    for line in text.splitlines():
        match = re.match(r"^( {4}[|` -]*)([A-Z]\w*)(?: \((\w+)\))?", line)
        if not match:
            continue
        column, name, refined = len(match[1]), match[2], match[3]
        while above and above[-1][0] >= column:
            above.pop()
        bases = {above[-1][1] if above else "Exception"}
        loaded[name] = bases | ({refined} if refined else set())
        above.append((column, name))
    return loaded


def test_a_drawn_tree_is_read_as_drawn():
    drawn = _drawn_tree("    A\n    |-- B (ValueError)   why\n    |   `-- C   why\n    `-- D\n")
    assert drawn == {"A": {"Exception"}, "B": {"A", "ValueError"}, "C": {"B"}, "D": {"A"}}
