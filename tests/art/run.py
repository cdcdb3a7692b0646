"""Drive ART's real clients, in an environment of their own, against a real server.

In:   nothing; makes .venv-art once, and a tiny model
Out:  a line for everything proved; exit 1 with what was seen instead at the first that is not

`make test-art` runs it as `python -m tests.art.run` from the root of the repository. Both clients
are installed into one environment: NAT's plugin 1.6.0 is built on openpipe-art 0.5.4.

The clients are unmodified: what they send and how they read the answers is theirs. `openai<3` is
the one thing held back, and not for hone's sake: openpipe-art 0.5.4 hands the OpenAI client a
timeout of httpx, and from version 3 on that client is built on httpx2 and fails with a TypeError.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from tests.chat.conftest import build_tokenizer
from tests.environments import NotInstalled, environment
from tests.server.conftest import write_model

HERE = Path(__file__).parent
CLIENT_S = 280.0
"""A client's whole script."""
START_S = 30.0
NAT_PORT = 8000
"""NAT's adapter looks for the OpenAI API on this port and on no other."""


REQUIREMENTS = ("openpipe-art==0.5.4", "nvidia-nat-openpipe-art==1.6.0", "openai<3")
ART, NAT = "client_art.py", "client_nat.py"


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
                prove_nat(python, ready, base)
        except (NotShown, NotInstalled) as error:
            say(f"FAILED  {error}")
            return 1
    return 0


# ---- what is proved ---------------------------------------------------------------------------


def prove_art(python: Path, ready: dict[str, Any], base: Path) -> None:
    """openpipe-art 0.5.4: a whole training loop."""
    address = f"http://127.0.0.1:{ready['port']}"
    saw = drive(python, ART, address, str(base), scratch=base.parent)
    served = [f"http://127.0.0.1:{NAT_PORT}/v1", "default", "agent"]
    show("registers and knows its step without loading a model", saw["register_s"] < 5, saw)
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
    _prove_files(Path(ready["root"]) / "proof" / "models" / "agent")


def _prove_files(directory: Path) -> None:
    kept = sorted(path.name for path in (directory / "checkpoints").glob("[0-9]*"))
    # The mean val/reward is 0.5 at step 0 and 1.5 at step 1; step 3 is the newest.
    show("the newest and the best checkpoint are kept", kept == ["0001", "0003"], kept)
    history = [json.loads(line) for line in (directory / "history.jsonl").open()]
    rewards = {line["step"]: line["val/reward"] for line in history if "val/reward" in line}
    show("val/reward is in the history", rewards == {0: 0.5, 1: 1.5}, history)
    losses = [line["step"] for line in history if "train/loss" in line]
    show("and so are the losses, at the steps they made", losses == [1, 2], history)
    logged = (directory / "trajectories" / "val" / "0000.jsonl").read_text().splitlines()
    choice = json.loads(logged[0])["trajectories"][0]["messages_and_choices"][1]
    whole = len(logged) == 2 and choice["logprobs"]["content"][0]["token"].startswith("token_id:")
    show("logged trajectories keep their log-probabilities", whole, logged)


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
    """Whether a greedy answer changed, or how far the log-probability of its first token went."""
    if before["tokens"][0] != after["tokens"][0]:
        return "the served answer is another one", True
    moved = abs(before["logprobs"][0] - after["logprobs"][0])
    return f"the served log-probabilities moved, by {moved:.3g}", moved > 1e-3


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


def drive(python: Path, script: str, *arguments: str, scratch: Path) -> dict[str, Any]:
    """Run a client's script; what it saw."""
    ours = ("PYTHON", "HONE", "OPENAI", "WANDB", "VIRTUAL_ENV")
    env = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
    done = subprocess.run(
        [python, HERE / script, *arguments],
        cwd=scratch,  # the clients write beside where they run
        env=env,
        capture_output=True,
        text=True,
        timeout=CLIENT_S,
        check=False,
    )
    if done.returncode != 0:
        raise NotShown(f"{script} ended with {done.returncode}\n{done.stderr[-6000:]}")
    return json.loads(done.stdout.splitlines()[-1])


@contextmanager
def server(root: Path) -> Iterator[dict[str, Any]]:
    """A `hone serve` of its own; what it said when it was ready."""
    reading, writing = os.pipe()
    command = [Path(sys.executable).parent / "hone", "serve", "--root", root]
    command += ["--port", "0", "--inference-port", str(NAT_PORT)]
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
            raise NotShown(f"hone serve did not start: {process.communicate(timeout=START_S)[1]}")
        yield json.loads(line) | {"root": str(root)}
    finally:
        process.terminate()
        process.communicate(timeout=START_S)


if __name__ == "__main__":
    sys.exit(main())
