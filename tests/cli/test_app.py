"""cli/app.py: what is printed where, and with which exit status."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from tests.chat.conftest import build_tokenizer
from tests.patience import PATIENCE_S
from tests.server.conftest import write_model
from typer.testing import CliRunner

import hone
from hone.cli.app import EXITS, app

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def empty_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No models here, no network, an empty working directory."""
    from huggingface_hub import constants

    monkeypatch.setenv("HONE_HOME", str(tmp_path / "hone-home"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf-home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    # The hub's client reads its environment when it is imported, which was long ago here.
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf-home" / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)


def run(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


def test_version():
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"hone {hone.__version__}\n")


@pytest.mark.parametrize("arguments", [["--help"], ["models", "-h"], ["models", "pull", "--help"]])
def test_help_teaches_with_an_example(arguments):
    result = run(*arguments)
    assert result.exit_code == 0
    assert "hone models " in result.stdout


def test_list_names_known_models_and_what_is_here():
    result = run("models", "list")
    assert result.exit_code == 0
    rows = {line.split()[0]: line.split() for line in result.stdout.splitlines() if line}
    assert rows["Qwen/Qwen2.5-0.5B-Instruct"] == [
        "Qwen/Qwen2.5-0.5B-Instruct",
        "494M",
        "Apache-2.0",
        "no",
    ]
    assert "smollm2-135m-instruct" in rows


def test_show_describes_a_model_that_is_not_downloaded():
    result = run("models", "show", "Qwen/Qwen2.5-0.5B-Instruct")
    assert result.exit_code == 0, result.output
    rows = dict(line.split(maxsplit=1) for line in result.stdout.splitlines())
    assert rows["where"] == "not here; run `hone models pull Qwen/Qwen2.5-0.5B-Instruct`"
    assert rows["parameters"] == "494,032,768"
    assert rows["layers"] == "24 x 896, 14 heads, 2 kv"
    assert rows["context"] == "32,768 tokens"
    # Weights 1884.6 MiB, KV 2 x 24 x 128 x 8192 x 4 bytes = 192 MiB, 64 rows of logits 74.2 MiB.
    assert rows["serving"].startswith("2.1 GiB in float32, 8,192 tokens of KV cache: ")


@pytest.mark.parametrize(
    ("family", "template", "tools"),
    [
        ("qwen2.5-instruct", None, "reach the prompt, in the model's own format"),
        ("qwen3", None, "reach the prompt, in the model's own format"),
        # SmolLM2's own template drops them without a word.
        (
            "smollm2-instruct",
            None,
            "reach the prompt, in hone's template: the model's own drops them",
        ),
        (
            "smollm2-instruct",
            "{# tools #}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}",
            "do not reach the prompt: the template drops them, so hone refuses requests with tools",
        ),
        # It notices that there are tools, but names none.
        (
            "smollm2-instruct",
            "{% if tools %}You have tools.{% endif %}{{ messages[-1].content }}",
            "do not reach the prompt: the template does not print their names",
        ),
        (
            "smollm2-instruct",
            "{% if tools %}{{ raise_exception('no tools') }}{% endif %}{{ messages[-1].content }}",
            "do not reach the prompt: the template refuses them (no tools)",
        ),
        # Printed, but in a format that hone cannot read back.
        (
            "smollm2-instruct",
            "{{ tools }} {% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}",
            "reach the prompt, in the model's own format; hone does not parse the calls in answers",
        ),
    ],
)
def test_show_reports_whether_the_template_uses_tools(tmp_path, family, template, tools):
    model = write_model(tmp_path / "model", build_tokenizer(family, template))
    # Only the tokenizer is read: weights that cannot be loaded do not matter.
    (model / "model.safetensors").write_bytes(b"")
    result = run("models", "show", "./model")
    assert result.exit_code == 0, result.output
    assert _rows(result.stdout)["tools"] == tools


def _rows(table: str) -> dict[str, str]:
    """Labels and values of a printed table; folded lines are joined."""
    rows: dict[str, str] = {}
    for line in table.splitlines():
        label, _, value = line.partition(" ")
        last = label or next(reversed(rows))
        rows[last] = f"{rows[last]} {value.strip()}" if last in rows else value.strip()
    return rows


def test_an_unknown_model_is_three_lines_on_stderr_and_exit_1():
    result = run("models", "show", "nobody/nothing")
    assert result.exit_code == 1
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 3
    assert lines[0] == "hone: no model called 'nobody/nothing' was found."


def test_a_wrong_command_is_a_usage_error():
    assert run("models", "shwo").exit_code == 2
    assert run("models", "pull").exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "status", "where"),
    [
        (["serve", "--root", ""], 2, "--root ''"),
        (["export", "agent", "out", "--root", ""], 2, "'--root'"),
        (["export", "agent", ""], 2, "'DIR'"),
        (["export-trajectories", "run", "-o", ""], 2, "'-o'"),
    ],
)
def test_an_empty_path_is_not_the_current_directory(
    tmp_path: Path, arguments: list[str], status: int, where: str
):
    result = run(*arguments)
    assert result.exit_code == status, result.stderr
    text = " ".join(result.stderr.replace("\u2502", " ").split())
    assert where in text and "is empty; name a path (. is the current directory)" in text
    assert not list(tmp_path.iterdir())


@pytest.mark.e2e
def test_an_unwritable_stdout_is_a_one_line_error_and_a_closed_pipe_is_silent(tmp_path: Path):
    def hone_to(stdout: int, *arguments: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "hone", *arguments]
        done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True)
        return done.returncode, done.stderr

    Path("agent.py").write_text("def echo(text):\n    return text\n")
    Path("a.yml").write_text("workflow: {_type: python, target: 'agent.py:echo'}\n")
    says = "hone: standard output: cannot be written to (No space left on device). "
    commands = [["--version"], ["validate", "--config_file=a.yml"]]
    for arguments in (*commands, ["run", "--config_file=a.yml", "--input", "x"]):
        with open("/dev/full", "wb") as full:
            status, stderr = hone_to(full.fileno(), *arguments)
        assert status == 1
        assert stderr.startswith(says) and stderr.count("\n") == 1, stderr
        reading, writing = os.pipe()
        os.close(reading)
        assert hone_to(writing, *arguments) == (1, "")
        os.close(writing)


def test_a_closed_stdout_is_one_line_on_stderr():
    command = ["sh", "-c", 'exec "$@" >&-', "sh", sys.executable, "-m", "hone", "--version"]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    says = "hone: standard output is closed. Redirect it instead, for example to /dev/null.\n"
    assert (done.returncode, done.stderr) == (1, says)


def test_ctrl_c_ends_any_command_with_130(monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr("hone.models.catalogue.entries", interrupted)
    result = run("models", "list")
    assert (result.exit_code, result.stderr) == (130, "hone: interrupted\n")


@pytest.mark.parametrize(
    "module",
    [
        "raise_signal(SIGINT)",
        # A package that goes on without a part that it failed to import.
        "try:\n    raise_signal(SIGINT)\nexcept BaseException:\n    pass",
    ],
)
def test_ctrl_c_during_the_imports_is_no_traceback(tmp_path: Path, module: str):
    (tmp_path / "typer.py").write_text(f"from signal import SIGINT, raise_signal\n{module}\n")
    script = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["hone"]
    start, _, function = script.partition(":")
    done = subprocess.run(
        [sys.executable, "-c", f"from {start} import {function}; {function}()", "--version"],
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT / 'src'}"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (130, "hone: interrupted\n")


LEAVES = """
import atexit, concurrent.futures, pathlib, threading
here = pathlib.Path(__file__).parent
atexit.register((here / "atexit").touch)
pool = concurrent.futures.ThreadPoolExecutor()
notes = (here / "notes").open("w")

async def run(input):  # a thread that a daemon starts is one too
    if input == "fail":
        raise ValueError("no such cat")
    notes.write(input)
    if input == "wait":
        for i in range(5):
            threading.Thread(target=threading.Event().wait, name=f"poller-{i}").start()
    return pool.submit(str.upper, input).result()
"""


@pytest.mark.e2e
@pytest.mark.parametrize("input", ["wait", "idle pool"])
def test_a_command_ends_without_threads_that_its_workflow_left(tmp_path: Path, input: str):
    (tmp_path / "agent.py").write_text(LEAVES)
    file = tmp_path / "agent.yml"
    file.write_text("workflow: {_type: python, target: 'agent.py:run'}")
    command = [sys.executable, "-m", "hone", "run", f"--config_file={file}", f"--input={input}"]
    done = subprocess.run(
        [*command, "--input=fail"], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert (done.returncode, done.stdout) == (1, input.upper() + "\n")
    assert "ValueError: no such cat" in done.stderr
    message = (
        "hone: the workflow left threads running ('poller-0', 'poller-1', 'poller-2' and 2 more)"
    )
    assert (message in done.stderr) == ("5 s" in done.stderr) == (input == "wait")
    assert (tmp_path / "notes").read_text() == input
    assert (tmp_path / "atexit").exists()


def test_every_exit_status_is_explained():
    page = (ROOT / "docs/reference/cli.md").read_text()
    assert sorted(EXITS) == [0, 1, 2, 130]
    for status, meaning in EXITS.items():
        assert f"| {status} | {meaning} |\n" in page


@pytest.mark.e2e
def test_the_command_converts_once_and_logs_it(tmp_path, tiny_gguf):
    def hone_models(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "hone", "models", *arguments],
            env=os.environ,
            capture_output=True,
            text=True,
            check=False,
        )

    first = hone_models("pull", str(tiny_gguf))
    assert first.returncode == 0, first.stderr
    assert Path(first.stdout.strip()).parent == tmp_path / "hone-home" / "models"
    assert first.stderr == f"converting {tiny_gguf} to safetensors, once\n"
    second = hone_models("show", str(tiny_gguf))
    assert second.stderr == ""
    rows = dict(line.split(maxsplit=1) for line in second.stdout.splitlines())
    assert rows["where"] == f"{first.stdout.strip()} (gguf)"
    assert rows["weights"].startswith("from tiny.gguf (tiny.gguf: F32 x 12)")
    assert rows["licence"] == "mit"
    assert rows["template"] == "none: it cannot chat unless you give one"
    assert "tools" not in rows
    failed = hone_models("show", "nobody/nothing")
    assert failed.returncode == 1
    assert "Traceback" not in failed.stderr


@pytest.fixture
def tiny_gguf(tmp_path: Path) -> Path:
    """One layer of hidden size 8, without a chat template."""
    import gguf
    import numpy as np

    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_license("mit")
    writer.add_context_length(64)
    writer.add_embedding_length(8)
    writer.add_block_count(1)
    writer.add_feed_forward_length(16)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(["a", "b", "ab", "<end>"])
    writer.add_token_types([1, 1, 1, 3])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(3)
    square, wide = np.ones((8, 8), np.float32), np.ones((16, 8), np.float32)
    norm, words = np.ones(8, np.float32), np.ones((4, 8), np.float32)
    for name, array in {
        "token_embd": words,
        "output": words,
        "output_norm": norm,
        "blk.0.attn_norm": norm,
        "blk.0.ffn_norm": norm,
        "blk.0.attn_q": square,
        "blk.0.attn_k": square,
        "blk.0.attn_v": square,
        "blk.0.attn_output": square,
        "blk.0.ffn_gate": wide,
        "blk.0.ffn_up": wide,
        "blk.0.ffn_down": wide.T.copy(),
    }.items():
        writer.add_tensor(f"{name}.weight", array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
