"""Kill a server everywhere, and see that nothing accepted is lost: `make chaos`.

In:   a tiny model; how many kills; a seed
Out:  a line per kill; exit 1 if any run ended with other bits, or trained anything twice

First every failpoint, each time it is reached, and those around the learning of a job of DPO and of
SFT; then servers whose learner has a process of its own, killed with it or alone; then pairs of kills
at random times, the second while the server is still recovering from the first. After every kill the job must end as if nothing had happened. Last,
where a small filesystem can be mounted, a disk that fills up under a job and is freed again.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import psutil
from bench.report import record, result
from tests.patience import PATIENCE_S
from tests.server import small_server

from hone.server import service
from hone.store import checkpoints, jobs
from hone.store import database as store

PROGRAM = Path(__file__).with_name("small_server.py")
ROOT_OF_TESTS = PROGRAM.parent.parent.parent
FAILPOINTS = (
    *(*store.FAILPOINTS, *jobs.FAILPOINTS, *checkpoints.FAILPOINTS, *service.FAILPOINTS),
    *small_server.FAILPOINTS,
)
LEARNING = ("job/before-learn", "learner/progress", "job/after-learn", "job/after-save")
"""Failpoints around the learning of a job, which differs by loss."""
IMPORTS = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(ROOT_OF_TESTS)]).strip(os.pathsep)
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": IMPORTS}
KILLED = (-9, -14)
"""By a failpoint, by the alarm."""

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


def each_failpoint(
    servers: Servers, home: Path, *, quick: bool
) -> Iterator[tuple[str, Path, int, str]]:
    """Every failpoint, each time it is reached: the root that its kill left, and the loss."""
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
            yield f"{loss}, {name}:{count}", root, 1, loss


def random_pairs(
    servers: Servers, home: Path, draw: random.Random, whole_s: float
) -> Iterator[tuple[str, Path, int]]:
    """Kills at two random times: of a server, and of the next one that recovers."""
    for i in range(10**6):
        root = home / f"random-{i}"
        root.mkdir()
        after = [draw.uniform(0, whole_s) for _ in range(2)]
        statuses = [servers.run(root, after_s=max(s, 1e-3)) for s in after]
        times = (f"{s:.3f} s" for s, status in zip(after, statuses, strict=True) if status)
        yield f"at {' and '.join(times)}", root, sum(status in KILLED for status in statuses)


def whole_process(root: Path, model: Path, failpoint: str = "", after_s: float = 0.0) -> int:
    """The exit status of a server with a learner in a process of its own."""
    command = [sys.executable, str(PROGRAM), str(root), str(model)]
    env = {**os.environ, **ONE_THREAD, "HONE_FAILPOINT": failpoint}
    child = subprocess.Popen(command, env=env)
    try:
        return child.wait(after_s or PATIENCE_S)
    except subprocess.TimeoutExpired:
        child.kill()
        return child.wait()


def killed_learner(root: Path, model: Path, draw: random.Random) -> tuple[str, Ended]:
    """What came of the job of a server whose learner was killed, alone, at some moment of its work."""
    command = [sys.executable, str(PROGRAM), str(root), str(model)]
    server = subprocess.Popen(command, env={**os.environ, **ONE_THREAD})
    try:
        learner = _child(server.pid)
        after_s = draw.uniform(0, 8)
        time.sleep(after_s)
        with suppress(psutil.NoSuchProcess):
            learner.kill()
        status = server.wait(PATIENCE_S)
    finally:
        server.kill()
        server.wait()
    assert status == 0, f"a server whose learner was killed ended with {status}"
    return f"its learner alone, {after_s:.1f} s old", json.loads((root / "ended.json").read_text())


def _child(pid: int) -> psutil.Process:
    """The learner of a server, as soon as there is one."""
    for _ in range(12000):
        for child in psutil.Process(pid).children():
            if "hone.learner.child" in " ".join(child.cmdline()):
                return child
        time.sleep(0.01)
    raise AssertionError("the server started no learner")


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
        _child(server.pid)  # it has taken the job
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
    kills = bad = 0

    def check(name: str, root: Path, killed: int = 1, loss: str = "grpo") -> None:
        report(name, servers.finish(root, loss=loss), killed, loss)

    def report(name: str, ended: Ended, killed: int = 1, loss: str = "grpo") -> None:
        nonlocal kills, bad
        kills += killed
        wrong = same[loss].differences(ended)
        bad += bool(wrong)
        sys.stdout.write(f"{kills:4d} {'BAD ' if wrong else 'ok  '} {name}\n")
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
            check(*kill)
        for i in range(options.processes):
            root = home / f"process-{i}"
            after_s = draw.uniform(3, 20)
            status = whole_process(root, model, after_s=after_s)
            check(f"with a learner's process, at {after_s:.1f} s (status {status})", root)
            report(*killed_learner(home / f"learner-{i}", model, draw))
        with small_disk(home / "disk", 8 * 2**20) as mounted:
            if mounted:
                report("a disk that filled up", filled_disk(home / "disk", model), 0)
            else:
                sys.stdout.write("     skip a disk that fills up: this user may not mount one\n")
        for name, root, killed in random_pairs(servers, home, draw, whole_s):
            if killed:
                check(name, root, killed)
            if kills >= options.kills:
                break
    finally:
        servers.close()
    sys.stdout.write(f"{kills} kills, {bad} bad\n")
    if kills >= FEWEST:
        record([result("chaos/kills", [kills], "kills"), result("chaos/bad", [bad], "runs")])
    if bad:
        sys.stdout.write(f"what they left: {home}\n")
    else:
        shutil.rmtree(home)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
