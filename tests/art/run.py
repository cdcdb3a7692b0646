"""Drive ART's real clients, and scripts in ART's style, against a real server.

In:   nothing; makes .venv-art and .venv-art-new once, and a tiny model
Out:  a line for everything proved; exit 1 with what was seen instead at the first that is not

`make test-art` runs it as `python -m tests.art.run` from the root of the repository. NAT's plugin
1.6.0 and openpipe-art 0.5.4, on which it is built, share one environment. openpipe-art 0.5.18 has
another one, with exactly what docs/art.md tells its users to install: packages of other clients
would hide what is missing there. 0.5.17 lies beside it without packages of its own. The scripts run
in hone's environment, the one with LangGraph with the packages of the frameworks.

The clients are unmodified: what they send and how they read the answers is theirs. `openai<3` is
held back, and not for hone's sake: openpipe-art hands the OpenAI client a timeout of httpx, and
from version 3 on that client is built on httpx2 and fails with a TypeError.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
from tests.chat.conftest import build_tokenizer
from tests.environments import ROOT, NotInstalled, environment
from tests.patience import PATIENCE_S
from tests.server.conftest import write_model

from hone.types import stored_name

HERE = Path(__file__).parent
NAT_PORT = 8000
"""NAT's adapter looks for the OpenAI API on this port and on no other."""


REQUIREMENTS = (
    *("openpipe-art==0.5.4", "nvidia-nat-openpipe-art==1.6.0", "openai<3"),
    "httpx2>=2.12",  # of hone's SDK
)
INSTALLED, BESIDE = "0.5.18", "0.5.17"
"""Versions of openpipe-art without an HTTP client; hone.art.ArtBackend is their backend."""
PAGE = ROOT / "docs/art.md"
ART, NEW, NAT = "client_art.py", "client_new.py", "client_nat.py"
SCRIPTS = HERE / "scripts"


class NotShown(Exception):
    """A proof failed."""


def main() -> int:
    """Every proof, in order."""
    with tempfile.TemporaryDirectory(prefix="hone-art-") as scratch:
        base = Path(scratch) / "tiny"
        write_model(base, build_tokenizer("smollm2-instruct"))
        try:
            python = environment("art", REQUIREMENTS, say=lambda line: say(f"        {line}"))
            with server(Path(scratch) / "root") as ready:
                prove_art(python, ready, base)
                newer = environment(
                    "art-new", documented_requirements(), say=lambda line: say(f"        {line}")
                )
                for version in (INSTALLED, BESIDE):
                    prove_newer(newer, version, ready, base)
                prove_nat(python, ready, base)
                prove_ruler_script(ready, base)
            prove_local_scripts(base)
        except (NotShown, NotInstalled) as error:
            say(f"FAILED  {error}")
            return 1
    return 0


# ---- what is proved ---------------------------------------------------------------------------


def prove_art(python: Path, ready: dict[str, Any], base: Path) -> None:
    """openpipe-art 0.5.4: a whole training loop."""
    address = f"http://127.0.0.1:{ready['port']}"
    saw = drive(python, ART, address, str(base), scratch=base.parent)
    served = [f"http://127.0.0.1:{NAT_PORT}/project/proof/v1", "default", "agent"]
    lazy = saw["base_models"] == {str(base): False}
    show("registers and knows its step without loading a model", lazy, saw)
    show("its step is 0 before any training", saw["first_step"] == 0, saw)
    show("is told where to sample", saw["inference"] == served, saw)
    show("tokens are named by id", _ids(saw["before"]), saw["before"])
    show("two training calls make two steps", [saw["step_1"], saw["step_2"]] == [1, 2], saw)
    show(*_moved(saw["before"], saw["after"]), saw)
    show("the untrained model is still served as NAME@0", saw["untrained"] == saw["before"], saw)
    show("flat groups advance the step", saw["step_flat"] == 3, saw)
    show("and leave the adapter as it was", saw["flat"] == saw["after"], saw)
    show("a tampered trajectory is refused with a status", saw["refused"] == 422, saw)
    show("the server outlives close()", saw["step_after_close"] == 3, saw)
    show(
        "a model of the same name in another project is its own",
        saw["other"] == [0, saw["before"]],
        saw,
    )
    show("so is one whose name has spaces and slashes", saw["odd"] == [1, saw["before"]], saw)
    _prove_files(Path(ready["root"]) / "projects" / "proof" / "models" / "agent")


def _prove_files(directory: Path) -> None:
    steps = sorted(path.name for path in (directory / "checkpoints").glob("[0-9]*"))
    # The mean val/reward is 0.5 at step 0 and 1.5 at step 1; step 3 is the newest.
    show("the newest and the best checkpoint are kept", steps == ["0001", "0003"], steps)
    history = [json.loads(line) for line in (directory / "history.jsonl").open()]
    rewards = {line["step"]: line["val/reward"] for line in history if "val/reward" in line}
    show("val/reward is in the history", rewards == {0: 0.5, 1: 1.5}, history)
    losses = [line["step"] for line in history if "train/loss" in line]
    show("and so are the losses, at the steps they made", losses == [1, 2], history)
    logged = (directory / "trajectories" / "val" / "0000.jsonl").read_text().splitlines()
    choice = json.loads(logged[0])["trajectories"][0]["messages_and_choices"][1]
    whole = len(logged) == 2 and choice["logprobs"]["content"][0]["token"].startswith("token_id:")
    show("logged trajectories keep their log-probabilities", whole, logged)


def documented_requirements() -> list[str]:
    """What docs/art.md tells users of newer versions to install, and the client that hone needs."""
    command = re.search(r"`pip install (openpipe-art==[^`]+)`", PAGE.read_text(encoding="utf-8"))
    if command is None:
        raise NotShown(f"{PAGE.name} has no `pip install openpipe-art==...`")
    requirements = shlex.split(command[1])
    show(f"the page installs openpipe-art {INSTALLED}", INSTALLED in requirements[0], requirements)
    return [*requirements, "httpx2>=2.12"]


def prove_newer(python: Path, version: str, ready: dict[str, Any], base: Path) -> None:
    """openpipe-art 0.5.17 and 0.5.18, with hone's backend for them."""
    address, path = f"http://127.0.0.1:{ready['port']}", str(ROOT / "src")
    if version != INSTALLED:
        package = python.parents[1] / f"openpipe-art-{version}"
        path = f"{package}:{path}"
        if not package.exists():
            pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet"]
            requirement = ["--no-deps", "--target", package, f"openpipe-art=={version}"]
            subprocess.run([*pip, *requirement], check=True)
    saw = drive(python, NEW, address, str(base), scratch=base.parent, PYTHONPATH=path)
    show(f"openpipe-art {version} accepts hone's backend", saw["version"] == version, saw)
    name = f"{stored_name(f'new art {version}')}/{stored_name('my agent/v2')}"
    show("names with spaces and slashes are served", saw["name"] == name, saw)
    show("training calls make steps", [saw["step_1"], saw["step_2"]] == [[1, 1], [2, 2]], saw)
    show("every choice was found among the recorded calls", saw["counts"] == {"matched": 8}, saw)
    by_model = 3 if version == "0.5.17" else None
    show("model.train works where ART has it", saw.get("trained_by_model") == by_model, saw)
    show(*_moved(saw["before"], saw["after"]), saw)
    show("the untrained model is still served as NAME@0", saw["untrained"] == saw["before"], saw)
    show("flat groups advance the step by one", saw["flat"] == 1, saw)
    # val/reward is -1 at step 1 and -2 at step 2: its own history decides what ART keeps.
    show("the newest and the best checkpoint are kept", saw["kept"] == [1, 3 + bool(by_model)], saw)
    show("a choice of LiteLLM names its recorded call", saw["litellm"] == [True, True], saw)
    refused = "AdamW always uses betas" in saw["refused"]
    show("an option that hone cannot honour is refused with the reason", refused, saw)


def prove_local_scripts(base: Path) -> None:
    """Scripts with `import hone.art as art` and a local backend, as they stand."""
    played = run_script("game_2048.py", str(base), scratch=base.parent)
    steps = [line.split() for line in played.stdout.splitlines()]
    ran = [(step, count) for step, _, count in steps] == [("1", "6"), ("2", "6")]
    show("a loop over games of 2048 trains two steps", ran, played.stdout)
    model = base.parent / ".hone/projects/2048/models/agent-002"  # the default base_path
    has_state = json.loads((model / "state.json").read_text()) == {"games": 2}
    logged = sorted(path.name for path in (model / "trajectories/val").iterdir())
    show(
        "its state and trajectories are kept",
        has_state and logged == ["0000.jsonl", "0001.jsonl"],
        logged,
    )
    shown = "training API  http://127.0.0.1" in played.stderr
    show("in_process shows the server's output", shown, played.stderr[-2000:])
    trained = run_script("local_dev.py", str(base), scratch=base.parent)
    lines = [line.split() for line in trained.stdout.splitlines()]
    used = [[step, *rest] for step, _, *rest in lines]
    wanted = [[step, "cispo", "False", "None"] for step in ("1", "2")]
    show(
        "a local backend with art.dev's options trains as they say", used == wanted, trained.stdout
    )
    saved = all((Path(path) / "adapter_config.json").is_file() for _, path, *_ in lines)
    ranks = [
        json.loads((Path(path) / "adapter_config.json").read_text())["r"] for _, path, *_ in lines
    ]
    show("and its checkpoints are where it says", saved and ranks == [2, 2], lines)
    is_logged = (
        "no effect here: engine_args.enforce_eager, engine_args.max_num_seqs" in trained.stderr
    )
    show("options without effect are named", is_logged, trained.stderr[-2000:])


def prove_ruler_script(ready: dict[str, Any], base: Path) -> None:
    """RULER with a LangGraph agent, over a hone server at a URL and a scripted judge."""
    file = ROOT / "tests/frameworks/constraints-a.txt"
    python = environment("frameworks-a", file, say=lambda line: say(f"        {line}"))
    # LangGraph and all that it needs from there, and what only hone needs from hone's environment.
    packages = next((python.parents[1] / "lib").glob("python*/site-packages"))
    with judge() as address:
        arguments = str(base), f"http://127.0.0.1:{ready['port']}", address
        done = run_script("ruler_langgraph.py", *arguments, scratch=base.parent, packages=packages)
    saw = json.loads(done.stdout.splitlines()[-1])
    show("RULER scores the rollouts of a LangGraph agent", saw["step"] == 1, saw)
    spread = all(1.0 in rewards and 0.0 <= min(rewards) < 1.0 for rewards in saw["rewards"])
    show("the judge's scores are the rewards", spread, saw)
    show("its calls are the trajectory", saw["roles"] == ["system", "user", "assistant"], saw)
    show("with the tools that it was given", saw["tools"] == ["look_up"], saw)
    show("all of them are found", saw["counts"] == {"matched": 6}, saw)


def prove_nat(python: Path, ready: dict[str, Any], base: Path) -> None:
    """NAT 1.6.0's ARTTrainerAdapter: initialize, submit, wait."""
    saw = drive(python, NAT, str(ready["port"]), str(base), scratch=base.parent)
    statuses = [status for status, _ in saw["jobs"]]
    show("NAT's adapter sees two jobs completed", statuses == ["completed"] * 2, saw)
    show("and the step rise from 0 to 2", [saw["first_step"], saw["step"]] == [0, 2], saw)
    show(*_moved(saw["before"], saw["after"]), saw)
    address = f"http://127.0.0.1:{ready['port']}/v1/training/jobs"
    jobs = httpx.get(address, params={"model": "proof/nat-run"}).json()
    jobs = jobs if isinstance(jobs, list) else jobs["data"]
    used = {(job["config"]["learning_rate"], job["config"]["beta"]) for job in jobs}
    show("its user's learning rate was used, not its constant", used == {(1e-3, 0.01)}, jobs)
    counts = [job["counts"] for job in jobs]
    show("every choice was found among the recorded calls", _all_matched(counts), counts)


def _ids(answer: dict[str, Any]) -> bool:
    return all(token.startswith("token_id:") for token in answer["tokens"])


def _moved(before: dict[str, Any], after: dict[str, Any]) -> tuple[str, bool]:
    """Whether a greedy answer changed, or how far the log-probability of any of its tokens went.

    Which token moves most depends on the machine: its last bits decide what is sampled and trained.
    """
    if before["tokens"] != after["tokens"]:
        return "the served answer is another one", True
    pairs = zip(before["logprobs"], after["logprobs"], strict=True)
    moved = max(abs(new - old) for old, new in pairs)
    return f"the served log-probabilities moved, by up to {moved:.3g}", moved > 1e-3


def _all_matched(counts: list[dict[str, int]]) -> bool:
    return bool(counts) and all(count == {"matched": 8} for count in counts)


def show(what: str, shown: bool, saw: object) -> None:
    """Say what was proved, or stop."""
    if not shown:
        raise NotShown(f"{what}\n        saw {json.dumps(saw, default=str)[:4000]}")
    say(f"proved  {what}")


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


# ---- what it takes ----------------------------------------------------------------------------


def drive(
    python: Path, script: str, *arguments: str, scratch: Path, **variables: str
) -> dict[str, Any]:
    """Run a client's script; what it saw."""
    done = run(python, HERE / script, *arguments, scratch=scratch, **variables)
    return json.loads(done.stdout.splitlines()[-1])


def run_script(
    script: str, *arguments: str, scratch: Path, packages: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a script in ART's style in hone's environment, with more packages before its own."""
    path = os.pathsep.join(map(str, filter(None, (ROOT / "src", packages))))
    python = Path(sys.executable)
    return run(python, SCRIPTS / script, *arguments, scratch=scratch, PYTHONPATH=path)


def run(
    python: Path, script: Path, *arguments: str, scratch: Path, **variables: str
) -> subprocess.CompletedProcess[str]:
    ours = ("PYTHON", "HONE", "OPENAI", "WANDB", "VIRTUAL_ENV")
    env = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
    done = subprocess.run(
        [python, script, *arguments],
        cwd=scratch,  # the clients write beside where they run
        env=env | variables,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    if done.returncode != 0:
        raise NotShown(f"{script.name} ended with {done.returncode}\n{done.stderr[-6000:]}")
    return done


@contextmanager
def judge() -> Iterator[str]:
    """An OpenAI API whose model scores trajectories: 1 for the first, and less for each next one."""

    class Judge(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            ids = re.findall(r'<trajectory id="(\d+)">', request["messages"][-1]["content"])
            scores = {one: {"explanation": "so", "score": 1 / int(one)} for one in ids}
            message = {"role": "assistant", "content": json.dumps({"scores": scores})}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            head = {"id": "j", "object": "chat.completion", "created": 0, "model": request["model"]}
            body = json.dumps({**head, "choices": [choice]}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def server(root: Path, *, port: int = 0) -> Iterator[dict[str, Any]]:
    """A `hone serve` of its own; what it said when it was ready."""
    reading, writing = os.pipe()
    command = [Path(sys.executable).parent / "hone", "serve", "--root", root]
    command += ["--port", str(port), "--inference-port", str(NAT_PORT)]
    process = subprocess.Popen(
        command,
        env=os.environ | {"HONE_READY_FD": str(writing)},
        pass_fds=(writing,),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(writing)
    try:
        with os.fdopen(reading) as ready:
            line = ready.readline()  # ends when the server dies, too
        if not line:
            raise NotShown(
                f"hone serve did not start: {process.communicate(timeout=PATIENCE_S)[1]}"
            )
        yield json.loads(line) | {"root": str(root)}
    finally:
        process.terminate()
        process.communicate(timeout=PATIENCE_S)


if __name__ == "__main__":
    sys.exit(main())
