"""The learner in a process of its own: the same bits, and a clear error when it dies."""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.patience import PATIENCE_S
from tests.prose import Prose

from hone.errors import Cancelled, LearnerDied, SampleRefused, StorageError
from hone.learner.child import NICENESS
from hone.learner.learner import Learner
from hone.learner.packed import pack_groups
from hone.learner.process import MARK, LearnerProcess, LearnerSpec, WorkerInfo
from hone.models.decoder import Decoder
from hone.models.lora import Lora
from hone.trajectory import TrajectoryGroup
from hone.types import TrainConfig

STDERR = re.compile(r"(?<=stderr:\n).*", re.DOTALL)
WHEN = re.compile(r"optimizer step \d+, micro-batch \d+ \(\w+\)")

pytestmark = pytest.mark.e2e

Started = tuple[LearnerProcess, WorkerInfo]


def spec(directory: Path, **changes: Any) -> LearnerSpec:
    return LearnerSpec(model_dir=directory, base_model="tiny", threads=1, **changes)


@pytest.fixture(scope="module")
def shared(tiny_llama_dir: Path) -> Iterator[Started]:
    worker = LearnerProcess.start(spec(tiny_llama_dir))
    assert worker.info is not None
    yield worker, worker.info
    worker.close()


@pytest.fixture
def doomed(tiny_llama_dir: Path) -> Iterator[Started]:
    """One to be killed."""
    worker = LearnerProcess.start(spec(tiny_llama_dir))
    assert worker.info is not None
    yield worker, worker.info
    worker.close(deadline_s=2)


@pytest.fixture
def job(make_group: Callable[..., TrajectoryGroup]) -> list[TrajectoryGroup]:
    return [make_group([1, 2, 3 + g], [[4, 5], [6, 7 + g], [8]], [1.0, 0.0, 0.5]) for g in range(3)]


CONFIG = TrainConfig(learning_rate=1e-3, groups_per_optimizer_step=1)


def test_the_process_gives_the_bits_of_this_one(
    shared: Started, job, tiny_llama_dir: Path, tmp_path: Path
):
    worker, info = shared
    assert info.threads == 1 and info.deterministic and info.pid != os.getpid()
    decoder = Decoder.load(tiny_llama_dir)
    here = Learner(decoder, Lora.init(decoder.config), base_model="tiny")
    assert info.sha256 == here.lora.sha256
    worker.save(tmp_path / "start")
    seen: list[dict[str, Any]] = []
    result = worker.train(pack_groups(job), CONFIG, on_progress=seen.append)
    assert result["sha256"] == here.train(job, CONFIG).sha256 != info.sha256
    assert result["steps"] == 3 and result["movement"]["tokens"]
    assert [p["phase"] for p in seen] == ["old"] * 2 + ["train"] * 3
    assert worker.save(tmp_path / "there") == result["sha256"]
    here.save(tmp_path / "here")
    for file in (tmp_path / "here").iterdir():
        assert (tmp_path / "there" / file.name).read_bytes() == file.read_bytes(), file.name
    # back to the start, and the same job again, after its memory was freed
    worker.release(weights=True)
    assert worker.load(tmp_path / "start") == info.sha256
    assert worker.train(pack_groups(job), CONFIG)["sha256"] == result["sha256"]


def test_errors_keep_their_kind_and_the_process_lives(
    prose: Prose, shared: Started, job, make_group
):
    worker, _ = shared
    with pytest.raises(SampleRefused) as caught:
        worker.train(pack_groups([make_group([1], [[9999], [3]], [1.0, 0.0])]), CONFIG)
    prose(caught)
    with pytest.raises(SampleRefused) as caught:
        worker.train(
            pack_groups([make_group([1], [[2], [3]], [1.0, 0.0], logprob=float("nan"))]), CONFIG
        )
    prose(caught)
    assert worker.train(pack_groups(job), CONFIG)["steps"] == 3


def test_cancelling_ends_the_job_and_not_the_process(
    prose: Prose, shared: Started, job, tmp_path: Path
):
    worker, _ = shared
    worker.save(tmp_path / "before")
    many = job * 300

    def cancel_once(progress: dict[str, Any]) -> None:
        if progress["phase"] == "old" and progress["step"] == 3:
            threading.Thread(target=worker.cancel).start()

    with pytest.raises(Cancelled) as caught:
        worker.train(pack_groups(many), CONFIG, on_progress=cancel_once)
    prose(caught, when=WHEN)
    worker.save(tmp_path / "after")
    for file in (tmp_path / "before").iterdir():
        assert (tmp_path / "after" / file.name).read_bytes() == file.read_bytes(), file.name
    assert (
        worker.train(pack_groups(job), CONFIG)["steps"] == 3
    )  # an old cancellation does not reach a new job
    worker.cancel()  # nothing runs: nothing happens
    assert worker.train(pack_groups(job), CONFIG)["steps"] == 3


def test_a_killed_learner_is_reported_with_its_signal(prose: Prose, doomed: Started, job):
    worker, info = doomed

    def kill(_: dict[str, Any]) -> None:
        os.kill(info.pid, signal.SIGKILL)

    with pytest.raises(LearnerDied) as caught:
        worker.train(pack_groups(job), CONFIG, on_progress=kill)
    prose(caught, stderr=STDERR)
    with pytest.raises(LearnerDied) as caught:  # and so is every later request
        worker.save(Path("nowhere"))
    prose(caught, stderr=STDERR)


def test_an_unknown_error_ends_the_process_with_a_traceback(prose: Prose, doomed: Started, job):
    worker, _ = doomed
    many: Any = "many"
    with pytest.raises(LearnerDied) as caught:
        worker.train(pack_groups(job), CONFIG, base_step=many)
    assert "Traceback" in str(caught.value) and "TypeError" in str(caught.value)
    prose(caught, stderr=STDERR)


def test_a_child_whose_parent_dies_inside_a_line_ends():
    with subprocess.Popen(
        [sys.executable, "-m", "hone.learner.child"], stdin=subprocess.PIPE, stderr=subprocess.PIPE
    ) as child:
        try:
            _, stderr = child.communicate(b'{"do": "sta', timeout=PATIENCE_S)
        finally:
            child.kill()
    assert (child.returncode, stderr) == (0, b"")


def test_a_child_that_dies_inside_a_message_is_reported_at_once(prose: Prose):
    message = MARK + '{"event": "do'
    child = subprocess.Popen(
        [sys.executable, "-c", f"import sys; sys.stdout.write({message!r})"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    worker = LearnerProcess(child)
    ended = threading.Event()
    worker.when_ended(ended.set)
    with pytest.raises(LearnerDied) as caught:
        worker.ready(deadline_s=PATIENCE_S)
    prose(caught, stderr=STDERR)
    assert ended.wait(PATIENCE_S) and not worker.alive


def test_a_disk_that_fails_is_reported_and_the_process_lives(
    prose: Prose, shared: Started, job, tmp_path: Path
):
    worker, _ = shared
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError) as caught:
        worker.save(tmp_path / "file" / "below")
    prose(caught)
    with pytest.raises(StorageError) as caught:
        worker.load(tmp_path / "file" / "below")
    prose(caught)
    assert worker.alive and worker.train(pack_groups(job), CONFIG)["steps"] == 3


def test_a_silent_learner_is_killed_at_its_deadline(prose: Prose, doomed: Started, job):
    worker, info = doomed
    os.kill(info.pid, signal.SIGSTOP)
    with pytest.raises(LearnerDied) as caught:
        worker.train(pack_groups(job), CONFIG, silence_s=0.5)
    prose(caught, stderr=STDERR)


@pytest.fixture
def run_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Lets Python itself run some code in every process it starts, before any of ours."""

    def place(code: str) -> None:
        (tmp_path / "sitecustomize.py").write_text(code)
        inherited = os.environ.get("PYTHONPATH", "")
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), inherited]))

    return place


def test_a_model_that_is_not_there_fails_the_start(prose: Prose, tmp_path: Path):
    with pytest.raises(LearnerDied) as caught:
        LearnerProcess.start(spec(tmp_path / "nothing"))
    assert "nothing/config.json" in str(caught.value)
    prose(caught, stderr=STDERR)


SHOUTING = (
    "import threading, time\n"
    "def shout():\n"
    "    while True:\n"
    "        os.write(1, b'noise without a newline')\n"
    "        time.sleep(0.001)\n"
    "threading.Thread(target=shout, daemon=True).start()\n"
)
"""What libraries print must not reach the messages."""


@pytest.mark.skipif(sys.platform != "linux", reason="only there a thread has its own niceness")
def test_a_learner_has_low_priority_while_it_loads_and_not_during_jobs(
    tiny_llama_dir: Path, tmp_path: Path, job, run_first: Callable[[str], None]
):
    # Writes down who is made how nice.
    run_first(
        "import os\n"
        "from pathlib import Path\n"
        "really = os.setpriority\n"
        "def noted(which, who, niceness):\n"
        f"    Path({str(tmp_path)!r}, str(os.getpid())).write_text(f'{{which}} {{who}} {{niceness}}')\n"
        "    really(which, who, niceness)\n"
        "os.setpriority = noted\n" + SHOUTING
    )
    polite = LearnerProcess.launch(spec(tiny_llama_dir), gives_way=True)
    plain = LearnerProcess.launch(spec(tiny_llama_dir))
    try:
        assert polite.ready() == polite.info and plain.ready() == plain.info
        which, who, niceness = map(int, (tmp_path / str(polite.pid)).read_text().split())
        assert which == os.PRIO_PROCESS and niceness == NICENESS
        assert who != polite.pid and not (tmp_path / str(plain.pid)).exists()
        # The thread that learns has its process' id.
        nice = [os.getpriority(os.PRIO_PROCESS, pid) for pid in (polite.pid, plain.pid)]
        assert nice == [os.getpriority(os.PRIO_PROCESS, 0)] * 2
        assert (
            polite.train(pack_groups(job), CONFIG)["sha256"]
            == plain.train(pack_groups(job), CONFIG)["sha256"]
        )
        # One that does not end is ended.
        os.kill(plain.pid, signal.SIGSTOP)
        plain.close(deadline_s=0.2)
        with pytest.raises(ProcessLookupError):
            os.kill(plain.pid, 0)
    finally:
        polite.close()
        plain.close()


def test_a_caller_that_leaves_cancels_its_job(shared: Started, job):
    worker, _ = shared

    def leave(_: dict[str, Any]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        worker.train(pack_groups(job * 300), CONFIG, on_progress=leave)
    assert (
        worker.train(pack_groups(job), CONFIG)["steps"] == 3
    )  # and its late messages are not taken for ours
