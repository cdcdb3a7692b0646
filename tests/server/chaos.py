"""Kill a server everywhere, and see that nothing accepted is lost: `make chaos`.

In:   a tiny model; how many kills; a seed
Out:  a line per kill, and how many kills met a running job; exit 1 if any run ended with other bits,
      or trained anything twice

First every failpoint, each time it is reached, and those around the learning of a job of DPO and of
SFT; then servers whose learner has a process of its own, killed with it or alone, while the job runs;
then, where a small filesystem can be mounted, a disk that fills up under a job and is freed again;
then pairs of kills at random times, the second while the server is still recovering from the first.
After every kill the job must end as if nothing had happened.
"""

import argparse
import json
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import psutil
from bench.report import record, result
from tests.patience import PATIENCE_S
from tests.server import small_server

from hone.server.train import loop
from hone.store import checkpoints, jobs
from hone.store import database as store

PROGRAM = Path(__file__).with_name("small_server.py")
ROOT_OF_TESTS = PROGRAM.parent.parent.parent
FAILPOINTS = (
    *(*store.FAILPOINTS, *jobs.FAILPOINTS, *checkpoints.FAILPOINTS, *loop.FAILPOINTS),
    *small_server.FAILPOINTS,
)
LEARNING = ("job/before-learn", "learner/progress", "job/after-learn", "job/after-save")
"""Failpoints around the learning of a job, which differs by loss."""
IMPORTS = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(ROOT_OF_TESTS)]).strip(os.pathsep)
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": IMPORTS}
KILLED = (-9, -14)
"""By a failpoint, by the alarm."""

LONGEST_S = 4.0
"""A job with a learner's process runs longer than this: the process has to start."""
TRIES = 5
"""Kills of a job with a learner's process that may come too late, one after another."""

FEWEST = 100
"""Runs with fewer kills are trials and are not recorded."""

Ended = dict[str, Any]


class Servers:
    """A process that forks a server for each order; see small_server.py."""

    def __init__(self, model: Path) -> None:
        self.model = model
        self._process = subprocess.Popen(
            [sys.executable, str(PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **ONE_THREAD},
        )

    def run(self, root: Path, **kill: Any) -> int:
        """The exit status of one server, killed or not."""
        assert self._process.stdin is not None and self._process.stdout is not None
        (root / "ended.json").unlink(missing_ok=True)
        order = {"root": str(root), "model": str(self.model), **kill}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def finish(self, root: Path, **order: Any) -> Ended:
        """What came of the job, in a server that is left alone."""
        status = self.run(root, **order)
        assert status == 0, f"a server that nobody killed ended with {status}"
        return json.loads((root / "ended.json").read_text())

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(PATIENCE_S)
        self._process.stdout.close()


@dataclass(frozen=True)
class Same:
    """What every run must come to, however often it was killed."""

    digest: str
    sha256: str

    @classmethod
    def of(cls, ended: Ended) -> "Same":
        return cls(ended["digest"], ended["sha256"])

    def differences(self, ended: Ended) -> list[str]:
        """What is wrong with how a run ended; empty if nothing is."""
        wanted = {
            "state": "done",
            "base_step": 0,
            "step": 1,
            "failure": None,
            "served": [1, self.sha256],
            "of_job": [1],
            "disk": ["0000", "0001"],
            "sha256": self.sha256,
            "digest": self.digest,
        }
        wrong = [f"{k} is {ended[k]!r}, not {v!r}" for k, v in wanted.items() if ended[k] != v]
        if ended["events"].count("done") != 1 or ended["events"][-1] != "done":
            wrong.append(f"events are {ended['events']}")
        saved = ended["events"].index("saved") if "saved" in ended["events"] else None
        if saved is not None and "learned" in ended["events"][saved:]:
            wrong.append(f"trained again what was saved: {ended['events']}")
        return wrong


@dataclass(frozen=True)
class Kills:
    """Kills of one server, one after another."""

    name: str
    root: Path
    count: int
    met: int
    """How many of them met a running job."""
    loss: str = "grpo"


def job_runs(root: Path) -> bool:
    """Whether the server at this root has a running job, or had one when it was killed."""
    address = f"{(root / 'state.sqlite').absolute().as_uri()}?mode=ro"
    try:
        with closing(sqlite3.connect(address, uri=True)) as state:
            return bool(state.execute("SELECT 1 FROM jobs WHERE state = 'running'").fetchone())
    except sqlite3.OperationalError:  # not yet made, or just now locked
        return False


def each_failpoint(servers: Servers, home: Path, *, quick: bool) -> Iterator[Kills]:
    """Every failpoint, each time it is reached."""
    first = FAILPOINTS[:2] if quick else FAILPOINTS
    points = [(name, "grpo") for name in first]
    points += [(name, loss) for loss in ("dpo", "sft") for name in LEARNING]
    for name, loss in points:
        for count in range(1, 1000):
            root = home / f"{loss}-{name.replace('/', '-')}-{count}"
            root.mkdir()
            status = servers.run(root, failpoint=f"{name}:{count}", loss=loss)
            if status == 0:
                assert count > 1, f"failpoint {name} is never reached"
                break
            assert status in KILLED, (name, count, status)
            yield Kills(f"{loss}, {name}:{count}", root, 1, job_runs(root), loss)


def random_pairs(
    servers: Servers, home: Path, draw: random.Random, whole_s: float
) -> Iterator[Kills]:
    """Kills at two random times: of a server, and of the next one that recovers."""
    for i in range(10**6):
        root = home / f"random-{i}"
        root.mkdir()
        after = [draw.uniform(0, whole_s) for _ in range(2)]
        killed = met = 0
        for after_s in after:
            was_killed = servers.run(root, after_s=max(after_s, 1e-3)) in KILLED
            killed += was_killed
            met += was_killed and job_runs(root)
        if killed:
            times = " and ".join(f"{s:.3f} s" for s in after)
            yield Kills(f"{killed} at {times}", root, killed, met)


def whole_process(root: Path, model: Path, failpoint: str) -> int:
    """The exit status of a server with a learner in a process of its own."""
    command = [sys.executable, str(PROGRAM), str(root), str(model)]
    env = {**os.environ, **ONE_THREAD, "HONE_FAILPOINT": failpoint}
    return subprocess.run(command, env=env, timeout=PATIENCE_S).returncode


def killed_while_it_trains(
    home: Path, name: str, model: Path, draw: random.Random, *, alone: bool
) -> tuple[Kills, int]:
    """Kill a server, or only its learner, while a job runs; the exit status of the server."""
    for attempt in range(TRIES):
        root, after_s = home / f"{name}-{attempt}", draw.uniform(0, LONGEST_S / 2**attempt)
        command = [sys.executable, str(PROGRAM), str(root), str(model)]
        server = subprocess.Popen(command, env={**os.environ, **ONE_THREAD})
        try:
            learner = _learner_at_work(server, root)
            time.sleep(after_s)
            if not job_runs(root):
                continue  # it was over before
            (learner if alone else server).kill()  # a learner ends with its server
            status = server.wait(PATIENCE_S)
        finally:
            server.kill()
            server.wait()
        who = "its learner alone" if alone else "with a learner's process"
        return Kills(f"{who}, {after_s:.1f} s into the job", root, 1, 1), status
    raise AssertionError(f"{TRIES} jobs ended before their learner could be killed")


def _learner_at_work(server: "subprocess.Popen[bytes]", root: Path) -> psutil.Process:
    """The learner of a server, as soon as there is one and a job runs."""
    for _ in range(12000):
        assert server.poll() is None, f"the server ended with {server.returncode}"
        learner = _child(server.pid)
        if learner is not None and job_runs(root):
            return learner
        time.sleep(0.01)
    raise AssertionError("the server started no learner")


def _child(pid: int) -> psutil.Process | None:
    """The learner of a server, if there is one."""
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(pid).children():
            if "hone.learner.child" in " ".join(child.cmdline()):
                return child
    return None


@contextmanager
def small_disk(at: Path, size: int) -> Iterator[bool]:
    """A filesystem of so many bytes, where this user may mount one; else False."""
    at.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(at)]
    try:
        mounted = subprocess.run(mount, capture_output=True).returncode == 0
    except FileNotFoundError:
        mounted = False
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", str(at)], check=True)


def filled_disk(disk: Path, model: Path) -> Ended:
    """What came of the job of a server whose disk was full while it ran, and was freed then."""
    root, ballast = disk / "hone", disk / "ballast"
    root.mkdir()
    env = {**os.environ, **ONE_THREAD}
    server = subprocess.Popen([sys.executable, str(PROGRAM), str(root), str(model)], env=env)
    try:
        _learner_at_work(server, root)
        with suppress(OSError), ballast.open("wb", buffering=0) as out:
            while out.write(bytes(4096)):
                pass
        assert shutil.disk_usage(disk).free < 4096
        time.sleep(20)  # long enough for it to learn, and to find no room
        assert server.poll() is None, "it ended on a full disk"
        ballast.unlink()
        status = server.wait(PATIENCE_S)
    finally:
        server.kill()
        server.wait()
    assert status == 0, f"a server whose disk was full ended with {status}"
    return json.loads((root / "ended.json").read_text())


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--processes", type=int, default=4, help="of them, with a learner's process"
    )
    parser.add_argument("--quick", action="store_true", help="leave out most of the failpoints")
    options = parser.parse_args()
    from tests.chat.conftest import build_tokenizer
    from tests.server.conftest import write_model

    draw = random.Random(options.seed)
    home = Path(tempfile.mkdtemp(prefix="hone-chaos-"))
    model = write_model(home / "model", build_tokenizer("qwen2.5-instruct"))
    servers = Servers(model)
    kills = met = bad = 0

    def check(killed: Kills) -> None:
        report(killed, servers.finish(killed.root, loss=killed.loss))

    def report(killed: Kills, ended: Ended) -> None:
        nonlocal kills, met, bad
        kills += killed.count
        met += killed.met
        wrong = same[killed.loss].differences(ended)
        bad += bool(wrong)
        sys.stdout.write(f"{kills:4d} {'BAD ' if wrong else 'ok  '} {killed.name}\n")
        sys.stdout.writelines(f"          {line}\n" for line in wrong)
        sys.stdout.flush()

    try:
        same = {
            loss: Same.of(servers.finish(home / f"undisturbed-{loss}", loss=loss))
            for loss in ("grpo", "dpo", "sft")
        }
        started = perf_counter()
        servers.finish(home / "again")
        whole_s = perf_counter() - started
        for kill in each_failpoint(servers, home, quick=options.quick):
            check(kill)
        for i in range(options.processes):
            both, _ = killed_while_it_trains(home, f"process-{i}", model, draw, alone=False)
            check(both)
            alone, status = killed_while_it_trains(home, f"learner-{i}", model, draw, alone=True)
            assert status == 0, f"a server whose learner was killed ended with {status}"
            report(alone, json.loads((alone.root / "ended.json").read_text()))
        with small_disk(home / "disk", 8 * 2**20) as mounted:
            if mounted:
                filled = Kills("a disk that filled up", home / "disk", 0, 0)
                report(filled, filled_disk(home / "disk", model))
            else:
                sys.stdout.write("     skip a disk that fills up: this user may not mount one\n")
        for pair in random_pairs(servers, home, draw, whole_s):
            check(pair)
            if kills >= options.kills:
                break
    finally:
        servers.close()
    sys.stdout.write(f"{kills} kills, {met} of them met a running job; {bad} bad\n")
    if not met:
        sys.stdout.write("no kill met a running job: this run shows nothing\n")
    if kills >= FEWEST:
        counts = {"chaos/kills": kills, "chaos/met": met}
        record(
            [
                *(result(name, [count], "kills") for name, count in counts.items()),
                result("chaos/bad", [bad], "runs"),
            ]
        )
    if bad:
        sys.stdout.write(f"what they left: {home}\n")
    else:
        shutil.rmtree(home)
    return 1 if bad or not met else 0


if __name__ == "__main__":
    sys.exit(main())
