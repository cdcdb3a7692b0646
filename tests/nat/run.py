"""Run a project of NeMo Agent Toolkit with hone, in an environment that has the toolkit.

In:   nothing; makes .venv-nat once, and a tiny model
Out:  a line for everything proved; exit 1 with what was seen instead at the first that is not

`make test-nat` runs it as `python -m tests.nat.run` from the root of the repository. The project
(`project/`) imports nothing of hone and is installed as its user would install it. Every field of
config.yml and config_post_train.yml has the value of the toolkit's example `rl_with_openpipe_art`;
`base_model`, `baseline: batch` and what makes the run short come from -o.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from tests.art.run import NotShown, say, server, show
from tests.chat.conftest import build_tokenizer
from tests.environments import ROOT, NotInstalled, environment
from tests.plugin.installed import install
from tests.server.conftest import write_model

HERE = Path(__file__).parent
PORT = 7623
"""As in the YAML."""
COMMAND_S = 280.0
PROJECT = "examples/finetuning/rl_with_openpipe_art"
"""Where the project is in a checkout of the toolkit; the YAML names its datasets from there."""
CONFIGS = f"{PROJECT}/src/rl_with_openpipe_art/configs"
ADAPTER = "trainer_adapters.openpipe_trainer_adapter"
PARTS = ("Draft a report about", "Check this report", "workflow")
BUILT = [f"build {part}" for part in PARTS] + [f"close {part}" for part in reversed(PARTS)]
"""The log of report.yml: each component is built once, and closed in reverse order."""

MIXED = """
llms: {model: {_type: openai, model_name: report_run, base_url: "http://localhost:8000/v1", max_tokens: 4}}
functions:
  draft: {_type: ask, llm: model, task: Draft a report about}
  check: {_type: ask, llm: model, task: Check this report}
  count_words: {_type: python, target: "agent.py:count"}
"""
AGENT = '''
def count(text: str) -> str:
    """Counts the words of a text."""
    return f"hone counted {len(text.split()) > 0}"


async def run(text, functions):
    return "hone asked " + str(await functions["draft"](text) is not None)
'''


def main() -> int:
    """Every proof, in order."""
    with tempfile.TemporaryDirectory(prefix="hone-nat-") as scratch:
        place, base = Path(scratch), Path(scratch) / "tiny"
        write_model(base, build_tokenizer("smollm2-instruct"))
        try:
            python = environment(
                "nat", HERE / "constraints.txt", say=lambda line: say(f"        {line}")
            )
            hone = Hone(python, place, base)
            prove_names(hone)
            prove_edges(hone)
            with server(place / "root", port=PORT) as ready:
                prove_example(hone, ready)
                prove_functions(hone, ready)
                prove_mixed(hone)
                prove_endpoint(hone, ready)
                prove_toolkit_endpoint(hone)
        except (NotShown, NotInstalled) as error:
            say(f"FAILED  {error}")
            return 1
    return 0


class Hone:
    """The command `hone` in the toolkit's environment, in a copy of the project."""

    def __init__(self, python: Path, place: Path, base: Path) -> None:
        self.place, self._python = place, python
        self._base = ["-o", f"{ADAPTER}.backend.base_model", str(base)]
        site = install(place / "site", HERE / "project")
        self.log = place / "report.log"
        ours = ("PYTHON", "HONE", "OPENAI", "VIRTUAL_ENV")
        env = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
        path = f"{ROOT / 'src'}{os.pathsep}{site}"
        self._env = env | {"PYTHONPATH": path, "REPORT_LOG": str(self.log)}
        shutil.copytree(HERE / "project", place / PROJECT)

    def run(self, *arguments: str, fails: bool = False, script: Path | None = None) -> str:
        """What the command, or the script, wrote to stdout and stderr."""
        program = ["-m", "hone"] if script is None else [str(script)]
        done = subprocess.run(
            [self._python, *program, *arguments],
            cwd=self.place,
            env=self._env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=COMMAND_S,
            check=False,
        )
        if (done.returncode != 0) != fails:
            raise NotShown(f"hone {' '.join(arguments)}: {done.returncode}\n{done.stdout[-6000:]}")
        return done.stdout

    def finetune(self, config: str, *more: str, fails: bool = False) -> str:
        return self.run("finetune", _file(config), *self._base, *more, fails=fails)

    @contextmanager
    def serve(self, program: Sequence[str], url: str | None = None) -> Iterator[str]:
        """The address of a service that runs until the end of the block.

        `url` is where it answers; without one its first line of output says so.
        """
        log = self.place / "served.log"
        with (
            log.open("w") as errors,
            subprocess.Popen(
                [self._python, *program],
                cwd=self.place,
                env=self._env | {"PYTHONUNBUFFERED": "1"},
                stdout=subprocess.PIPE if url is None else errors,
                stderr=errors,
                text=True,
            ) as process,
        ):
            try:
                if process.stdout is not None:
                    url = process.stdout.readline().rstrip("\n").split(" ")[-1]
                if not url or not _answers(url, process):
                    raise NotShown(f"{' '.join(program)} did not start\n{log.read_text()[-6000:]}")
                yield url
            finally:
                process.send_signal(signal.SIGTERM)
                status = process.wait(timeout=COMMAND_S)
        if status not in (0, -signal.SIGTERM):  # uvicorn raises the signal again
            raise NotShown(f"{' '.join(program)}: {status}\n{log.read_text()[-6000:]}")

    def read(self, path: str) -> Any:
        text = (self.place / ".tmp" / "nat" / path).read_text()
        return (
            [json.loads(line) for line in text.splitlines()]
            if ".jsonl" in path
            else json.loads(text)
        )


# ---- what is proved ---------------------------------------------------------------------------


def prove_names(hone: Hone) -> None:
    """Types of all three groups of entry points are known, and hone's own stay hone's."""
    listed = hone.run("info", "components")
    types = ["rl_with_openpipe_art", "step_value_computation", "write_report", "react_agent", "nim"]
    show("types of every group of entry points are listed", all(t in listed for t in types), listed)
    show("a type that hone has too is listed by package", "nat.llm/openai" in listed, listed)
    wrong = ["-o", "workflow.player_modl", "x", "-o", "workflow.player_model", "policy"]
    checked = hone.run("validate", _file("config.yml"), *wrong, fails=True)
    guess = "unknown key 'player_modl'. Did you mean 'player_model'?"
    show("an unknown key of a toolkit's block is an error", guess in checked, checked)
    show("and so is a name that does not exist", "llms has no 'policy'" in checked, checked)


def prove_edges(hone: Hone) -> None:
    """What is refused, closed and passed on where components of the toolkit misbehave."""
    output = hone.run(str(COMMAND_S / 2), script=HERE / "edges.py")
    seen = json.loads(output.splitlines()[-1])
    params, key = seen["llm"]
    sent = {"temperature": 0.0, "max_tokens": 5}
    show("a model of the toolkit sends its parameters", params == sent, params)
    show("its agents get the inference key", key == "hone", key)
    why = "could not be built: RuntimeError: it was cancelled by its own code"
    show("a factory that is cancelled is an error", why in seen["cancelled"], seen)
    show("a cancelled rollout closes its workflow", seen["sessions"] == ["open", "closed"], seen)
    wanted = [None, None, None, "the judge is away", None]
    show("only a text beside a zero is a failed score", seen["errors"] == wanted, seen["errors"])


def prove_example(hone: Hone, ready: dict[str, Any]) -> None:
    """The example's names and YAML: collect, train, publish; then `hone eval`."""
    batch = ["-o", f"{ADAPTER}.training.baseline", "batch"]
    short = ["-o", "llms.openpipe_llm.max_tokens", "12"]
    output = hone.finetune("config.yml", *batch, *short, "-o", "finetuning.num_epochs", "2")
    own = "llms.openpipe_llm: _type 'openai' is hone's own; that of NeMo Agent Toolkit is called"
    show("hone says that its own `openai` is used", own in output, output)
    rows = [
        row
        for epoch in (0, 1)
        for row in hone.read(f"finetuning/tic_tac_toe/trajectories/epoch_00{epoch}.jsonl")
    ]
    show("two epochs of six games are trained", len(rows) == 12, rows)
    show("every game has calls of its own", _own_calls(rows, least=1), rows)
    values = [row["metadata"]["reasoning"] for row in rows]
    means = [sum(one["values"]) / len(one["values"]) for one in values]
    show("the reward is the mean of the moves' values", means == [r["reward"] for r in rows], rows)
    kinds = {"CUSTOM_END", "FUNCTION_START", "LLM_END", "LLM_START", "WORKFLOW_END"}
    show("the evaluator gets model calls and steps", kinds <= set(values[0]["kinds"]), values[0])
    show("the moves' values are shaped rewards too", all(row["shaped"] for row in rows), rows[0])
    steps = {tuple(row["policy_steps"]) for row in rows[6:]}
    show("the second epoch is sampled with step 1", steps == {(1,)}, rows[6:])
    model = _model(ready, "tic_tac_toe_project/tic_tac_toe_training_run")
    show("the server is at step 2", model["step"] == 2, model)
    hone.run("eval", _file("config_post_train.yml"), *short)
    won = hone.read("examples/rl_openpipe/eval/post_train/percent_games_won_output.json")
    scored = [item["error"] for item in won["eval_output_items"]] == [None, None]
    show("hone eval scores with the toolkit's evaluator", scored, won)


def prove_functions(hone: Hone, ready: dict[str, Any]) -> None:
    """Two functions and a tool: one function is trained, and everything is closed in order."""
    hone.log.unlink(missing_ok=True)
    output = hone.finetune("report.yml")
    rows = hone.read("report/run/trajectories/epoch_000.jsonl")
    show(
        "eight reports are written, in two calls each", [r["calls"] for r in rows] == [2] * 8, rows
    )
    show("one call of each is trained, that of `draft`", _own_calls(rows, exactly=1), rows)
    show("the other is left out", "call/not_target_function: 8" in output, output)
    steps = [tuple(one) for one in rows[0]["metadata"]["reasoning"]["steps"]]
    wanted = [("LLM_END", "draft"), ("TOOL_END", "<workflow>"), ("LLM_END", "check")]
    show(
        "the evaluator sees calls and tool in order",
        [s for s in steps if s in wanted] == wanted,
        steps,
    )
    lines = hone.log.read_text().splitlines()
    show("the toolkit is built once and closed in reverse order", lines == BUILT, lines)
    show(
        "the server is at step 1",
        _model(ready, "tic_tac_toe_project/report_run")["step"] == 1,
        rows,
    )
    hone.run("eval", _file("report.yml"))
    again = ["eval", _file("report.yml"), "--skip_workflow"]
    first = hone.read("report/eval/few_words_output.json")
    hone.run(*again)
    second = hone.read("report/eval/few_words_output.json")
    show("--skip_workflow gives the evaluator the same steps", first == second, [first, second])


def prove_mixed(hone: Hone) -> None:
    """Functions of hone and of the toolkit call each other."""
    (hone.place / "agent.py").write_text(AGENT)
    ours = "workflow: {_type: python, target: 'agent.py:run', functions: [draft]}\n"
    theirs = "workflow: {_type: write_report, draft: draft, check: check, tools: [count_words]}\n"
    for file, workflow in (("ours.yml", ours), ("theirs.yml", theirs)):
        (hone.place / file).write_text(MIXED + workflow)
    output = hone.run("run", "--config_file=ours.yml", "--input", "the coat")
    show("a workflow of hone calls a function of the toolkit", "hone asked True" in output, output)
    counted = hone.run("run", "--config_file=theirs.yml", "--input", "the coat")
    show("a workflow of the toolkit has a tool of hone", "hone counted" in counted, counted)


def prove_endpoint(hone: Hone, ready: dict[str, Any]) -> None:
    """`hone serve-workflow` runs the toolkit's workflow, and `--endpoint` trains it there."""
    name, hone_cli = "served_run", ["-m", "hone"]
    model = ["-o", "llms.openpipe_llm.model_name", name]
    hone.log.unlink(missing_ok=True)
    run = ["-o", f"{ADAPTER}.backend.name", name, "-o", "finetuning.num_epochs", "2"]
    run += ["-o", "finetuning.output_dir", ".tmp/nat/served/run"]
    served = [*hone_cli, "serve-workflow", _file("report.yml"), "--port", "0", *model]
    with hone.serve(served) as url:
        hone.finetune("report.yml", "--endpoint", url, *model, *run)
    rows = [row for n in (0, 1) for row in hone.read(f"served/run/trajectories/epoch_00{n}.jsonl")]
    show("two epochs of eight reports are written at the endpoint", len(rows) == 16, rows)
    show("the calls of the target function are trained", _own_calls(rows, exactly=1), rows)
    recorded = [_recorded(ready, row["rollout"]) for row in rows]
    both = [[function for _, function in calls] for calls in recorded]
    named = both == [["<workflow>.draft", "<workflow>.check"]] * 16
    show("every call is recorded under its rollout and function", named, both)
    drafts = [[id for id, function in calls if function.endswith("draft")] for calls in recorded]
    trained = [row["trained_calls"] for row in rows]
    show("and its rollout is trained on it", drafts == trained, [drafts, trained])
    steps = [{tuple(row["policy_steps"]) for row in rows[n : n + 8]} for n in (0, 8)]
    show("the second epoch is sampled with step 1", steps == [{(0,)}, {(1,)}], steps)
    model_row = _model(ready, f"tic_tac_toe_project/{name}")
    show("the server is at step 2", model_row["step"] == 2, model_row)
    tools = {row["metadata"]["reasoning"]["tool"] for row in rows}
    show("the evaluator gets the tool's step over the wire", tools == {"count_words"}, tools)
    lines = hone.log.read_text().splitlines()
    show("the service builds it once; the client does not", lines == BUILT, lines)


def prove_toolkit_endpoint(hone: Hone) -> None:
    """`nat serve` of the toolkit itself: `hone eval` works there, and `hone finetune` says no."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    # Without the sections that need the toolkit's plugin for ART.
    text = (hone.place / CONFIGS / "report.yml").read_text()
    (hone.place / "serve.yml").write_text(text.partition("trajectory_builders:")[0])
    served = ["-m", "nat.cli.main", "serve", "--config_file=serve.yml"]
    served += ["--host", "127.0.0.1", "--port", port]
    with hone.serve(served, f"http://127.0.0.1:{port}") as url:
        hone.run("eval", _file("report.yml"), "--endpoint", url)
        scores = hone.read("report/eval/few_words_output.json")["eval_output_items"]
        kinds = [kind for kind, _ in scores[0]["reasoning"]["steps"]]
        tools = [item["reasoning"]["tool"] for item in scores]
        show("hone eval scores what `nat serve` runs", tools == ["count_words"] * 2, scores)
        show("with the toolkit's steps", kinds.count("LLM_END") == 2, scores)
        measured = hone.read("report/eval/latency_output.json")["average_score"]
        show("which evaluators of hone read as model calls", measured > 0, measured)
        fresh = ["-o", "finetuning.output_dir", ".tmp/nat/refused"]
        refused = hone.finetune("report.yml", "--endpoint", url, *fresh, fails=True)
    why = "the server recorded no call of the rollout"
    show("hone finetune refuses it: its calls name no rollout", why in refused, refused)


def _file(config: str) -> str:
    return f"--config_file={CONFIGS}/{config}"


def _answers(url: str, process: subprocess.Popen[str]) -> bool:
    """Wait until the service is healthy; False if it ended before."""
    until = time.monotonic() + COMMAND_S
    while process.poll() is None and time.monotonic() < until:
        try:
            if httpx.get(f"{url}/health").is_success:
                return True
        except httpx.TransportError:
            time.sleep(0.2)
    return False


def _own_calls(rows: list[dict[str, Any]], *, least: int = 1, exactly: int | None = None) -> bool:
    """Whether every rollout has calls, and none is in two rollouts."""
    calls = [row["trained_calls"] for row in rows]
    counts = {len(one) for one in calls}
    every = [call for one in calls for call in one]
    enough = min(counts) >= least if exactly is None else counts == {exactly}
    return enough and len(set(every)) == len(every)


def _recorded(ready: dict[str, Any], rollout: str) -> list[tuple[str, str]]:
    """Id and function of each call that the server recorded under the rollout."""
    address = f"http://127.0.0.1:{ready['port']}/v1/rollouts/{rollout}"
    calls = httpx.get(address).json()["calls"]
    return [(call["id"], call["call"]["function"]) for call in calls]


def _model(ready: dict[str, Any], name: str) -> dict[str, Any]:
    address = f"http://127.0.0.1:{ready['port']}/v1/training/models/{name}"
    return httpx.get(address).json()


if __name__ == "__main__":
    sys.exit(main())
