"""`_type: command`: what a program gets, what comes back, how it fails, and what it leaves behind."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.prose import Prose
from tests.workflow.rollouts import one_answer, one_frozen_answer, why

from hone.config.build import Builder, Served, build
from hone.config.policy import PolicyCalls, Trained, address_of
from hone.config.schema import read
from hone.errors import ConfigError
from hone.wire.access import derive_inference_key
from hone.workflow import command
from hone.workflow.function import Function
from hone.workflow.guard import guard
from hone.workflow.run import RolloutResult, run_rollout

PYTHON = [sys.executable, "-I", "-S", "-c"]
SHOW_ENV = "import json, os; print(json.dumps(dict(os.environ)))"


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    places = tmp_path / "tmp"
    places.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(places))
    yield places
    assert list(places.iterdir()) == []
    assert guard.running == 0


@contextlib.asynccontextmanager
async def building(
    directory: Path, workflow: dict[str, Any], *, url: str = "http://127.0.0.1:9/v1", **llm: Any
) -> AsyncIterator[Builder]:
    file = directory / "config.yml"
    entry = {"_type": "openai", "model": "tiny", "base_url": url, "api_key": "secret", **llm}
    document = {"llms": {"m": entry}, "workflow": {"_type": "command", **workflow}}
    file.write_text(yaml.safe_dump(document))
    async with build(read(file)) as builder:
        trained = Trained("mine", frozenset({"mine"}), "base", frozenset({address_of(url)}))
        builder.served = Served(url, "secret", "mine", "localhost", trained)
        yield builder


async def result_of(
    directory: Path, workflow: dict[str, Any], input: Any = "x", **options: Any
) -> RolloutResult:
    async with building(directory, workflow) as builder:
        function: Function = await builder.get_workflow()
        return await run_rollout(function, input, id="run:1", **options)


async def output_of(directory: Path, workflow: dict[str, Any], input: Any = "x") -> Any:
    result = await result_of(directory, workflow, input)
    assert result.failure is None, result.failure
    return result.output


# ---- what the program gets ----------------------------------------------------------------------


async def test_the_environment_has_the_rollout_s_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name, value in {
        "OTHER": "kept",
        "GONE": "removed",
        "OPENAI_API_KEY": "sk-real",
        "HONE_API_KEY": "secret",
        "HONE_WORKFLOW_API_KEY": "secret",
        "HONE_ENDPOINT_API_KEY": "secret",
        "ANTHROPIC_AUTH_TOKEN": "somebody's",
        "HTTPS_PROXY": "http://proxy:3128",
    }.items():
        monkeypatch.setenv(name, value)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    workflow = {
        "command": [*PYTHON, SHOW_ENV],
        "env": {"MY_URL": "{base_url}?m={model}", "GONE": None, "JSON": '{"a": {}}'},
    }
    env = json.loads(await output_of(tmp_path, workflow))
    rollout = "http://127.0.0.1:9/rollout/run:1"
    assert env["OPENAI_BASE_URL"] == env["OPENAI_API_BASE"] == f"{rollout}/v1"
    assert env["ANTHROPIC_BASE_URL"] == rollout  # its client appends /v1/messages
    assert env["OPENAI_API_KEY"] == env["ANTHROPIC_API_KEY"] == derive_inference_key("secret")
    assert "secret" not in env.values()  # it is valid for the training API
    assert env["HONE_MODEL"] == env["OPENAI_MODEL"] == env["ANTHROPIC_MODEL"] == "tiny"
    assert (env["HONE_ROLLOUT"], env["MY_URL"]) == ("run:1", f"{rollout}/v1?m=tiny")
    assert (env["OTHER"], env["JSON"]) == ("kept", '{"a": {}}')
    assert "GONE" not in env and "ANTHROPIC_AUTH_TOKEN" not in env
    assert env["NO_PROXY"] == env["no_proxy"] == "127.0.0.1,localhost,::1"
    assert Path(env["PWD"]).parent == tmp_path / "tmp"


async def test_parameters_of_the_llms_entry_are_passed_on_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level("INFO")
    workflow = {"command": ["sh", "-c", 'printf %s "$HONE_MODEL_PARAMS"']}
    async with building(tmp_path, workflow, temperature=0.5, max_tokens=7) as builder:
        result = await run_rollout(await builder.get_workflow(), "x")
    assert json.loads(result.output) == {"temperature": 0.5, "max_tokens": 7}
    assert "llms.m: temperature, max_tokens: the program has to send these itself" in caplog.text


EVIL = "$(touch /tmp/no) `id` \"'\n{model} {input} äö \N{SNOWMAN}"


@pytest.mark.parametrize(
    "workflow",
    [
        {"command": ["cat"]},
        {"command": [*PYTHON, "import sys; print(sys.argv[1])", "{input}"]},
        {"command": ["cat", "in/question.txt"], "input_file": "in/question.txt"},
        {"command": ["cat", "{input_file}"], "input_file": "q"},
        {"command": ["sh", "-c", "cat > out/a.txt"], "output_file": "out/a.txt"},
        {"command": ["sh", "-c", 'cat > "$1"; echo noise', "sh", "{output_file}"]}
        | {"output_file": "a"},
    ],
)
async def test_input_and_output_are_data_wherever_they_go(tmp_path: Path, workflow: dict[str, Any]):
    assert await output_of(tmp_path, workflow, EVIL) == EVIL


async def test_placeholders_of_the_address_and_of_directories(tmp_path: Path):
    arguments = ["{base_url}", "{anthropic_base_url}", "{model}", "{api_key}", "{rollout}"]
    arguments += ["{config_dir}", "{unknown}"]
    lines = await output_of(tmp_path, {"command": ["printf", "%s\\n", *arguments]})
    root = "http://127.0.0.1:9/rollout/run:1"
    assert lines.splitlines() == [
        *(
            f"{root}/v1",
            root,
            "tiny",
            derive_inference_key("secret"),
            "run:1",
            str(tmp_path),
            "{unknown}",
        )
    ]


async def test_a_row_of_a_dataset_is_json(tmp_path: Path):
    assert json.loads(await output_of(tmp_path, {"command": ["cat"]}, {"a": [1]})) == {"a": [1]}


async def test_each_rollout_has_a_copy_of_the_files(tmp_path: Path):
    (tmp_path / "repo" / "sub").mkdir(parents=True)
    (tmp_path / "repo" / "sub" / "a.txt").write_text("a")
    (tmp_path / "b.txt").write_text("b")
    (tmp_path / "tool.sh").write_text("#!/bin/sh\ncat sub/a.txt b.txt; echo changed > b.txt\n")
    (tmp_path / "tool.sh").chmod(0o755)
    workflow = {"command": ["./tool.sh"], "workdir": "repo", "files": ["b.txt"]}
    assert [await output_of(tmp_path, workflow) for _ in range(2)] == ["ab", "ab"]
    assert (tmp_path / "b.txt").read_text() == "b"


async def test_a_directory_that_the_program_made_read_only_is_removed(tmp_path: Path):
    await output_of(
        tmp_path, {"command": ["sh", "-c", "mkdir -p a/b; touch a/b/c; chmod -R a-w a"]}
    )


CLOSED = """
import os, sys, tempfile
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from guard import remove_tree
if os.geteuid() == 0:
    os.setuid(65534)  # root may read and write whatever the mode is
place = Path(tempfile.mkdtemp(prefix="hone-closed-"))
print(place, flush=True)
tree, outside = place / "tree", place / "outside"
(tree / "a" / "b").mkdir(parents=True)
(tree / "a" / "b" / "c").touch()
outside.mkdir(0o500)
(tree / "link").symlink_to(outside)
for folder in (tree / "a" / "b", tree / "a", tree):
    folder.chmod(0)
remove_tree(tree)
print(tree.exists(), oct(outside.stat().st_mode & 0o777))
"""


def test_a_directory_that_the_program_made_unreadable_is_removed():
    done = subprocess.run(
        [*PYTHON, CLOSED, str(Path(command.__file__).parent)], capture_output=True, text=True
    )
    place, _, rest = done.stdout.partition("\n")
    shutil.rmtree(place, ignore_errors=True)
    assert rest.split() == ["False", "0o500"], done.stderr


@pytest.mark.parametrize(("keep", "remaining"), [("never", 0), ("failed", 1), ("always", 2)])
async def test_working_directories_can_be_kept(
    tmp_path: Path, nothing_is_left: Path, keep: str, remaining: int
):
    workflow = {"command": ["sh", "-c", "echo $0 > note; exit $0", "{input}"], "keep_workdir": keep}
    assert (await result_of(tmp_path, workflow, "0")).failure is None
    failed = await result_of(tmp_path, workflow, "4")
    places = sorted(nothing_is_left.iterdir())
    assert len(places) == remaining
    if remaining:
        assert failed.failure is not None
        place = failed.failure.failure.message.rpartition(" ")[2]
        assert (Path(place) / "note").read_text() == "4\n"
    for place in places:
        (place / "note").unlink()
        place.rmdir()


# ---- how it fails -------------------------------------------------------------------------------


async def test_exit_status_and_stderr_are_the_failure(prose: Prose, tmp_path: Path):
    script = "echo one >&2; echo 'two: no such tool' >&2; exit 3"
    result = await result_of(tmp_path, {"command": ["sh", "-c", script]})
    assert why(result) == ("infrastructure", "exit_status")
    assert result.failure is not None
    prose(result.failure.failure.message)
    assert result.failure.failure.traceback == "one\ntwo: no such tool"

    policy = {"command": ["sh", "-c", script], "policy_failure_exit_codes": [3]}
    assert why(await result_of(tmp_path, policy)) == ("policy", "exit_status")

    killed = await result_of(tmp_path, {"command": ["sh", "-c", "kill -9 $$"]})
    assert why(killed) == ("infrastructure", "killed")
    assert killed.failure is not None
    prose(killed.failure.failure.message)


TRACEBACK = r'Traceback (most recent call last):\n  File "agent.py", line 7\n'


@pytest.mark.parametrize(
    ("script", "more", "expected"),
    [
        ("exit 3", {}, ("policy", "exit_status")),
        ("exit 3", {"infrastructure_exit_codes": [3]}, ("infrastructure", "exit_status")),
        ("exit 4", {"infrastructure_exit_codes": [3]}, ("policy", "exit_status")),
        (f"printf '{TRACEBACK}KeyError: 1' >&2; exit 1", {}, ("policy", "exit_status")),
        (
            f"printf '{TRACEBACK}json.decoder.JSONDecodeError: Expecting value' >&2; exit 1",
            {},
            ("policy", "unparseable"),
        ),
        (
            "echo 'SyntaxError: Unexpected token h in JSON at position 0' >&2; exit 1",
            {},
            ("policy", "unparseable"),
        ),
        ("echo 'SyntaxError: missing )' >&2; exit 1", {}, ("policy", "exit_status")),
        (
            f"printf '{TRACEBACK}openai.RateLimitError: Error code: 429' >&2; exit 1",
            {},
            ("infrastructure", "server_error"),
        ),
        ("kill -9 $$", {}, ("infrastructure", "killed")),
        ("kill -TERM $$", {}, ("infrastructure", "killed")),
        ("kill -SEGV $$", {}, ("policy", "killed")),
        ("sh -c 'kill -9 $$'; exit $?", {}, ("infrastructure", "killed")),
        ("exit 137", {"policy_failure_exit_codes": [137]}, ("policy", "exit_status")),
        ("sleep 60", {"timeout_s": 0.2}, ("policy", "timeout")),
        ("yes", {"max_output_bytes": 1000}, ("policy", "output_too_large")),
        ("true", {"output_file": "out.txt"}, ("policy", "no_output")),
    ],
)
async def test_after_an_answer_a_program_s_failure_is_the_policy_s_unless_it_was_killed(
    tmp_path: Path, script: str, more: dict[str, Any], expected: tuple[str, str]
):
    workflow = {"command": ["sh", "-c", script], **more}
    policy = PolicyCalls(frozenset({"localhost"}), frozenset({"mine"}))
    known = {"host": "localhost", "policy": policy}
    after = await result_of(tmp_path, workflow, recorded_calls=one_answer, **known)
    assert why(after) == expected and after.answered
    # An answer of the base weights is not one of the policy.
    before = await result_of(tmp_path, workflow, recorded_calls=one_frozen_answer, **known)
    is_said = "policy_failure_exit_codes" in more
    assert why(before)[0] == ("policy" if is_said else "infrastructure") and not before.answered


async def test_a_program_that_cannot_start_is_an_infrastructure_failure(tmp_path: Path):
    async with building(tmp_path, {"command": ["{config_dir}/agent.sh"]}) as builder:
        (tmp_path / "agent.sh").write_text("#!/no/such/shell\n")
        (tmp_path / "agent.sh").chmod(0o755)
        workflow: Function = await builder.get_workflow()
        result = await run_rollout(workflow, "x", id="run:1", recorded_calls=one_answer)
    assert why(result) == ("infrastructure", "not_started")


async def test_the_place_of_a_program_s_failure_is_read_from_its_stderr(tmp_path: Path):
    script = f"printf '{TRACEBACK}KeyError: 1' >&2; exit 1"
    result = await result_of(tmp_path, {"command": ["sh", "-c", script]})
    assert result.failure is not None and result.failure.failure.place == "agent.py:7"


def test_an_exit_code_cannot_be_in_both_lists(prose: Prose, tmp_path: Path):
    codes = {"policy_failure_exit_codes": [3, 4], "infrastructure_exit_codes": [4, 5]}
    file = tmp_path / "config.yml"
    file.write_text(yaml.safe_dump({"workflow": {"_type": "command", "command": ["x"], **codes}}))
    with pytest.raises(ConfigError) as caught:
        read(file)
    prose(caught)


async def test_a_program_that_does_not_end_in_time_is_killed(prose: Prose, tmp_path: Path):
    quiet = await result_of(tmp_path, {"command": ["sleep", "60"], "timeout_s": 0.2})
    assert why(quiet) == ("infrastructure", "timeout")
    assert quiet.failure is not None
    prose(quiet.failure.failure.message)
    # Of the harness's own deadline too, and the directory is gone when it returns.
    harness = await result_of(tmp_path, {"command": ["sleep", "60"]}, timeout_s=0.2)
    assert why(harness) == ("infrastructure", "timeout")


async def test_output_is_bounded_and_may_be_any_bytes(prose: Prose, tmp_path: Path):
    endless = {"command": ["yes"], "max_output_bytes": 1000}
    result = await result_of(tmp_path, endless)
    assert why(result) == ("infrastructure", "output_too_large")
    assert result.failure is not None
    assert result.failure is not None
    prose(result.failure.failure.message)

    large = {"command": ["sh", "-c", "yes | head -c 3000 > o"], "output_file": "o"}
    assert why(await result_of(tmp_path, {**large, "max_output_bytes": 1000})) == (
        *("infrastructure", "output_too_large"),
    )
    assert len(await output_of(tmp_path, large)) == 2999  # without the last newline

    noisy = {"command": ["sh", "-c", "yes | head -c 300000 >&2; echo end >&2; exit 1"]}
    noise = await result_of(tmp_path, noisy)
    assert noise.failure is not None
    assert noise.failure.failure.traceback.endswith("y\nend")
    assert len(noise.failure.failure.traceback) < 20_000

    garbage = await output_of(tmp_path, {"command": ["printf", "a\\377\\000b"]})
    assert garbage == "a\N{REPLACEMENT CHARACTER}\0b"


async def test_a_program_may_ignore_a_large_input(prose: Prose, tmp_path: Path):
    assert await output_of(tmp_path, {"command": ["echo", "ok"]}, "x" * 5_000_000) == "ok"
    argument = {"command": ["echo", "{input}"]}
    for input in ("x" * 5_000_000, "a\0b"):
        result = await result_of(tmp_path, argument, input)
        assert why(result) == ("infrastructure", "not_started")
        assert result.failure is not None
        prose(result.failure.failure.message)


async def test_an_output_file_that_was_not_written_is_a_failure(prose: Prose, tmp_path: Path):
    result = await result_of(tmp_path, {"command": ["true"], "output_file": "answer.txt"})
    assert why(result) == ("infrastructure", "no_output")
    assert result.failure is not None
    prose(result.failure.failure.message)


@pytest.mark.parametrize(
    "workflow",
    [
        {"command": ["no-such-program-x1"]},
        {"command": ["./missing.sh"]},
        {"command": "echo hi"},
        {"command": []},
        {"command": ["cat", {"input": None}]},
        {"command": ["cat", "{inputs}"]},
        {"command": ["cat", "{output_file}"]},
        {"command": ["cat"], "output_file": "../x"},
        {"command": ["cat"], "env": {"A": "{base_ur}"}},
        {"command": ["cat"], "workdir": "nowhere"},
        {"command": ["cat"], "files": ["nothing"]},
        {"command": ["cat"], "llm": "mm"},
    ],
)
async def test_mistakes_are_found_before_the_first_rollout(
    prose: Prose, tmp_path: Path, workflow: dict[str, Any]
):
    with pytest.raises(ConfigError) as caught:
        async with building(tmp_path, workflow) as builder:
            await builder.get_workflow()
    prose(caught)


# ---- what it leaves behind ----------------------------------------------------------------------

FAMILY = """
import os, subprocess, sys, time
detached = subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"],
                            start_new_session=True)
child = subprocess.Popen(["sleep", "600"])
with open(sys.argv[1] + ".part", "w") as note:
    note.write(f"{os.getpid()} {child.pid} {detached.pid}")
os.rename(sys.argv[1] + ".part", sys.argv[1])
if sys.argv[2] == "stay":
    time.sleep(600)
"""


def alive(pids: list[int]) -> list[int]:
    """Those that run; a zombie has ended."""
    listed = subprocess.run(
        ["ps", "-o", "pid=,stat=", "-p", ",".join(map(str, pids))], capture_output=True, text=True
    )
    rows = [line.split() for line in listed.stdout.splitlines()]
    return [int(pid) for pid, state in rows if not state.startswith("Z")]


async def written(note: Path) -> list[int]:
    while not note.exists():
        await asyncio.sleep(0.01)
    return [int(pid) for pid in note.read_text().split()]


linux_only = pytest.mark.skipif(sys.platform != "linux", reason="only Linux shows environments")


@linux_only
async def test_children_end_with_the_program_even_in_sessions_of_their_own(tmp_path: Path):
    note = tmp_path / "pids"
    workflow = {"command": [*PYTHON, FAMILY, str(note), "go"]}
    assert (await result_of(tmp_path, workflow)).failure is None
    pids = await written(note)
    assert len(pids) == 3 and alive(pids) == []


@linux_only
@pytest.mark.parametrize("how", ["timeout", "cancel"])
async def test_children_end_with_a_rollout_that_is_stopped(tmp_path: Path, how: str):
    note = tmp_path / "pids"
    workflow = {"command": [*PYTHON, FAMILY, str(note), "stay"]}
    if how == "timeout":
        result = await result_of(tmp_path, {**workflow, "timeout_s": 5})
        assert why(result) == ("infrastructure", "timeout")
    else:
        task = asyncio.create_task(result_of(tmp_path, workflow))
        await written(note)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    pids = await written(note)
    assert len(pids) == 3 and alive(pids) == []


@linux_only
async def test_children_end_although_the_rollout_is_cancelled_twice(tmp_path: Path):
    note = tmp_path / "pids"
    stubborn = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + FAMILY
    workflow = {"command": [*PYTHON, stubborn, str(note), "stay"]}
    async with building(tmp_path, workflow) as builder:
        task = asyncio.create_task((await builder.get_workflow())("x"))
        pids = await written(note)
        task.cancel()
        for _ in range(5):
            await asyncio.sleep(0)  # until it waits for the program to end after SIGTERM
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert len(pids) == 3
    # A thread removes the directory.
    while alive(pids) or list((tmp_path / "tmp").iterdir()) or guard.running:
        await asyncio.sleep(0.01)


async def test_a_rollout_that_is_cancelled_while_files_are_copied_leaves_none(
    tmp_path: Path, nothing_is_left: Path
):
    for i in range(500):
        (tmp_path / "repo" / str(i) / "sub").mkdir(parents=True)
    async with building(tmp_path, {"command": ["true"], "workdir": "repo"}) as builder:
        task = asyncio.create_task((await builder.get_workflow())("x"))
        while not list(nothing_is_left.glob("*/*")):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    for thread in threading.enumerate():
        if thread.name == "hone-_prepare":
            thread.join()
    assert list(nothing_is_left.iterdir()) == []


@pytest.mark.e2e
@linux_only
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
async def test_nothing_is_left_when_hone_is_stopped(
    tmp_path: Path, nothing_is_left: Path, number: int
):
    note, file = tmp_path / "pids", tmp_path / "config.yml"
    workflow = {"_type": "command", "command": [*PYTHON, FAMILY, str(note), "stay"]}
    llm = {"_type": "openai", "model": "m", "base_url": "http://127.0.0.1:9/v1"}
    file.write_text(yaml.safe_dump({"llms": {"m": llm}, "workflow": workflow}))
    run = ["run", "--config_file", str(file), "--input", "x"]
    command = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "hone", *run),
        env={**os.environ, "TMPDIR": str(nothing_is_left)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    pids = await written(note)
    assert len(alive(pids)) == 3 and len(list(nothing_is_left.iterdir())) == 1
    command.send_signal(number)
    await command.wait()
    # A separate process cleans up after SIGKILL.
    while alive(pids) or list(nothing_is_left.iterdir()):
        await asyncio.sleep(0.05)
