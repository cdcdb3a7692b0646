"""Run a project of NeMo Agent Toolkit with hone, in an environment that has the toolkit.

In:   nothing; makes .venv-nat once, and a tiny model
Out:  a line for everything proved; exit 1 with what was seen instead at the first that is not

`make test-nat` runs it as `python -m tests.nat.run` from the root of the repository. The project
(`project/`) imports nothing of hone and is installed as its user would install it. Its YAML is that
of the toolkit's example `rl_with_openpipe_art`; `base_model` and `baseline: batch` come from -o.
"""

import json
import os
import subprocess
import sys
import tempfile
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
ADAPTER = "trainer_adapters.openpipe_trainer_adapter"

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
        for folder in ("configs", "data"):
            subprocess.run(["cp", "-r", HERE / "project" / folder, place], check=True)

    def run(self, *arguments: str, fails: bool = False, script: Path | None = None) -> str:
        """What the command, or the script, wrote to stdout and stderr."""
        program = ["-m", "hone.cli"] if script is None else [str(script)]
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

    def finetune(self, config: str, *more: str) -> str:
        return self.run("finetune", f"--config_file=configs/{config}", *self._base, *more)

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
    checked = hone.run("validate", "--config_file=configs/config.yml", *wrong, fails=True)
    guess = "unknown key 'player_modl'. Did you mean 'player_model'?"
    show("an unknown key of a toolkit's block is an error", guess in checked, checked)
    show("and so is a name that does not exist", "llms has no 'policy'" in checked, checked)


def prove_edges(hone: Hone) -> None:
    """What is refused, closed and passed on where components of the toolkit misbehave."""
    seen = json.loads(hone.run(script=HERE / "edges.py").splitlines()[-1])
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
    batch = ["-o", f"{ADAPTER}.training.baseline", "batch", "-o", "finetuning.num_epochs", "2"]
    output = hone.finetune("config.yml", *batch)
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
    hone.run("eval", "--config_file=configs/config_post_train.yml")
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
    built = ["Draft a report about", "Check this report", "workflow"]
    ordered = [f"build {b}" for b in built] + [f"close {b}" for b in reversed(built)]
    show("the toolkit is built once and closed in reverse order", lines == ordered, lines)
    show(
        "the server is at step 1",
        _model(ready, "tic_tac_toe_project/report_run")["step"] == 1,
        rows,
    )
    hone.run("eval", "--config_file=configs/report.yml")
    again = ["eval", "--config_file=configs/report.yml", "--skip_workflow"]
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
    asked = hone.run("run", "--config_file=ours.yml", "--input", "the coat")
    show("a workflow of hone calls a function of the toolkit", "hone asked True" in asked, asked)
    counted = hone.run("run", "--config_file=theirs.yml", "--input", "the coat")
    show("a workflow of the toolkit has a tool of hone", "hone counted" in counted, counted)


def _own_calls(rows: list[dict[str, Any]], *, least: int = 1, exactly: int | None = None) -> bool:
    """Whether every rollout has calls, and none is in two rollouts."""
    calls = [row["trained_calls"] for row in rows]
    counts = {len(one) for one in calls}
    every = [call for one in calls for call in one]
    enough = min(counts) >= least if exactly is None else counts == {exactly}
    return enough and len(set(every)) == len(every)


def _model(ready: dict[str, Any], name: str) -> dict[str, Any]:
    address = f"http://127.0.0.1:{ready['port']}/v1/training/models/{name}"
    return httpx.get(address).json()


if __name__ == "__main__":
    sys.exit(main())
