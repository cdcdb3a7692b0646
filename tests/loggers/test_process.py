"""Loggers get everything once, and a logger that fails does not affect the run."""

import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import psutil
import pytest
from tests.environments import ROOT
from tests.finetune.command import Parts, rising
from tests.loggers import file_sink
from tests.loggers.conftest import AGAIN, ANSWERED, ASIDE, ASKED, CHECKED, SURE, LoggedCommand
from tests.loggers.receiver import Received, Receiver
from tests.prose import Prose

from hone.config.base import LoggerBaseConfig
from hone.config.problems import ConfigProblems
from hone.config.registry import known
from hone.config.schema import read
from hone.files.event_log import EventLog
from hone.loggers import child as worker
from hone.loggers import process as loggers
from hone.loggers.refusals import Outbox

assert file_sink.FileConfig.type_name == "file"


def lines(path: Path, kind: str) -> list[list[Any]]:
    return [line[1:] for line in map(json.loads, path.read_text().splitlines()) if line[0] == kind]


def sent(command: LoggedCommand, name: str = "file") -> int:
    return json.loads((command.out / "loggers" / f"{name}.json").read_text())["lines"]


def num_events(command: LoggedCommand) -> int:
    return len((command.out / "events.jsonl").read_text().splitlines())


def test_a_logger_gets_metrics_rollouts_tables_adapters_and_the_end(command: LoggedCommand):
    command.log_to({"_type": "file", "path": "log"})
    assert command(validation_dataset=Path("val.json"), validation_interval=1) == 0
    log = Path("log")
    assert lines(log, "opened") == [[command.run_id, "agent"]]
    metrics = {(name, step): value for name, step, value in lines(log, "metric")}
    # rising: 0.1 + 0.2 * generation + 0.1 * epoch, for two generations
    assert metrics["train/reward", 0] == pytest.approx(0.2)
    assert metrics["train/reward", 1] == pytest.approx(0.3)
    assert metrics["learn/loss", 1] == metrics["learn/loss", 2] == 0.5
    assert [metrics["val/reward", step] for step in (0, 1, 2)] == [0.5, 0.5, 0.5]
    assert metrics["time/rollout_s", 2] >= 0
    rollouts = lines(log, "rollout")
    assert Counter(rollout for rollout, *_ in rollouts).most_common(1)[0][1] == 1
    talk = [[[ASKED], ANSWERED], [ASIDE, CHECKED], [[ASKED, ANSWERED, AGAIN], SURE]]
    assert [calls for _, _, calls in rollouts if calls] == [talk] * 8  # 2 epochs x 2 x 2
    tables = lines(log, "table")
    assert ["train/rollouts", 0, [pytest.approx(r) for r in (0.1, 0.3, 0.1, 0.3)]] in tables
    assert ["val/rollouts", 1, [0.5, 0.5]] in tables
    # Of none the reward is the best: that is the base model's. Each is the newest when it is sent.
    assert lines(log, "adapter") == [[1, False, True], [2, False, True]]
    assert lines(log, "finish") == [["completed"]]
    assert sent(command) == num_events(command)
    assert command.events("logger_stopped") == []


def test_a_resumed_run_goes_on_where_the_logger_stopped(
    command: LoggedCommand, ctrl_c: None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(loggers, "INTERRUPTED_S", 60.0)  # not killed between sending and the cursor

    def interrupting(epoch: int, example: str, generation: int) -> float:
        if (epoch, example, generation) == (1, "b", 0):
            signal.raise_signal(signal.SIGINT)
        return rising(epoch, example, generation)

    command.log_to({"_type": "file", "path": "log"})
    Parts.builder.reward = interrupting
    assert command() == 130
    Parts.builder.reward = rising
    assert command() == 0
    counts = Counter((name, step) for name, step, _ in lines(Path("log"), "metric"))
    assert counts["train/reward", 0] == counts["train/reward", 1] == 1
    assert counts["learn/loss", 1] == counts["learn/loss", 2] == 1
    assert len(lines(Path("log"), "rollout")) == 8
    assert len(lines(Path("log"), "table")) == 2
    opened = len(lines(Path("log"), "opened"))
    assert command() == 0
    assert len(lines(Path("log"), "finish")) == 1
    assert len(lines(Path("log"), "opened")) == opened  # a run that is sent is not opened again


def test_a_killed_logger_is_reported_once_and_sends_the_rest_the_next_time(
    command: LoggedCommand, caplog: pytest.LogCaptureFixture
):
    # What was sent after the last flush is sent again: this service recognizes it.
    service = {"_type": "file", "path": "log", "reads_back": True}
    command.log_to(service | {"trouble": "dies"})
    assert command() == 0
    (stopped,) = command.events("logger_stopped")
    assert stopped["logger"] == "file" and stopped["unsent"] > 0
    assert (
        "Logger file stopped: its process ended with -9. The run continues;" in stopped["message"]
    )
    assert [r.message for r in caplog.records if "Logger file" in r.message] == [stopped["message"]]
    report = json.loads((command.out / "report.json").read_text())
    assert report["warnings"] == [stopped["message"]]
    command.log_to(service)
    assert command() == 0  # the run is finished, its logger is not
    assert sent(command) == num_events(command)
    counts = Counter((name, step) for name, step, _ in lines(Path("log"), "metric"))
    assert {counts["train/reward", step] for step in (0, 1)} == {1}
    assert len(lines(Path("log"), "rollout")) == 8 and lines(Path("log"), "finish")


KILLED = """
import os, signal
from pathlib import Path
from tests.loggers.file_sink import FileConfig
from hone.files.event_log import EventLog
from hone.loggers.process import Loggers

events = EventLog(Path("out/events.jsonl"))
loggers = Loggers([FileConfig(path=Path("log").absolute())], events)
events.append("run_started", run_id="r", session=1, epochs=1, step=0)
for step in range(100):
    events.append("metrics", step=step, metrics={"x": step})
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_run_leaves_no_gap_and_no_step_twice(command: LoggedCommand):
    killed = subprocess.run([sys.executable, "-c", KILLED], check=False)
    assert killed.returncode == -signal.SIGKILL
    config = file_sink.FileConfig(path=Path("log").absolute())
    with EventLog(command.out / "events.jsonl") as events:
        # It waits for the process of the killed run, which still sends what it can.
        resumed = loggers.Loggers([config], events)
        events.append("run_started", run_id="r", session=2, epochs=1, step=0)
        for step in range(100, 110):
            events.append("metrics", step=step, metrics={"x": step})
        resumed.close()
    steps = [step for name, step, _ in lines(Path("log"), "metric") if name == "x"]
    assert steps == list(range(110))
    assert sent(command) == num_events(command) == 112


def test_a_damaged_cursor_sends_the_run_again(command: LoggedCommand):
    cursor = command.out / "loggers" / "file.json"
    cursor.parent.mkdir(parents=True)
    cursor.write_text("")
    config = file_sink.FileConfig(path=Path("log").absolute())
    with EventLog(command.out / "events.jsonl") as events:
        running = loggers.Loggers([config], events)
        events.append("run_started", run_id="r", session=1, epochs=1, step=0)
        events.append("metrics", step=1, metrics={"x": 1})
        running.close()
    assert lines(Path("log"), "metric") == [["x", 1, 1.0]]
    assert sent(command) == 2 and not command.events("logger_stopped")
    assert "file.json cannot be read" in (cursor.parent / "file.log").read_text()


def test_a_logger_that_dies_with_a_damaged_cursor_does_not_fail_the_run(command: LoggedCommand):
    cursor = command.out / "loggers" / "file.json"
    cursor.parent.mkdir(parents=True)
    cursor.write_text('{"lines": "many"}')
    config = file_sink.FileConfig(path=Path("log").absolute(), trouble="dies", dies_at="x")
    with EventLog(command.out / "events.jsonl") as events:
        running = loggers.Loggers([config], events)
        events.append("run_started", run_id="r", session=1, epochs=1, step=0)
        events.append("metrics", step=1, metrics={"x": 1})
        running.close()
    assert [event["unsent"] for event in command.events("logger_stopped")] == [2]


def test_a_service_that_refuses_stops_its_logger_and_no_other(
    command: LoggedCommand, monkeypatch: pytest.MonkeyPatch
):
    bad = {"_type": "file", "path": "bad", "trouble": "refuses", "timeout_s": 0.1}
    command.log_to(bad | {"api_key": "open-sesame"}, {"_type": "file", "path": "good"})
    assert command() == 0
    (stopped,) = command.events("logger_stopped")
    assert stopped["message"].startswith(
        "Logger file stopped: ConnectionError: Bearer <hidden> is refused. The run continues;"
    )
    assert lines(Path("good"), "finish") == [["completed"]]
    for path in command.out.rglob("*"):
        assert path.is_dir() or b"sesame" not in path.read_bytes(), path


def test_a_logger_that_hangs_delays_the_end_by_its_timeout_only(
    command: LoggedCommand, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(loggers, "GRACE_S", 2.0)
    command.log_to({"_type": "file", "path": "log", "trouble": "hangs", "timeout_s": 0.1})
    assert command() == 0
    (stopped,) = command.events("logger_stopped")
    assert "it was still sending at the end of the run" in stopped["message"]


def test_a_pause_between_two_tries_ends_with_the_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def sleep(seconds: float) -> None:
        raise AssertionError(f"it sleeps for {seconds} s")

    monkeypatch.setattr(worker, "FIRST_PAUSE_S", 600.0)
    monkeypatch.setattr("hone.loggers.child.time.sleep", sleep)
    stdin, parent = os.pipe()
    settings = worker.Settings(name="x", type="x", module="x", config={}, directory=tmp_path)
    config = LoggerBaseConfig(timeout_s=1e6)
    logger, tries = worker.Worker(settings, config, worker.EventPipe(stdin)), []

    def send() -> str:
        tries.append(1)
        if len(tries) == 1:
            os.write(parent, b".")  # an event, which is no reason to try again
            os.close(parent)
            raise ConnectionError("the service is restarted")
        return "sent"

    assert logger._try(send) == "sent" and logger.pipe.ended
    os.close(stdin)


def test_a_missing_package_or_key_is_reported_before_the_run_starts(
    command: LoggedCommand, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("OPENPIPE_API_KEY", raising=False)
    command.log_to("wandb", "openpipe", {"_type": "mlflow", "python": "nowhere/python"})
    with pytest.raises(ConfigProblems) as refused:
        command()
    messages = {".".join(map(str, p.path)): p.message for p in refused.value.problems}
    assert messages["loggers.0"] == "wandb is not installed: pip install 'hone-rl[wandb]'"
    assert messages["loggers.1"] == (
        "api_key is missing; set it, or the environment variable OPENPIPE_API_KEY"
    )
    assert "nowhere/python" in messages["loggers.2"]
    assert not command.out.exists()


def test_a_misspelt_logger_is_refused(prose: Prose, command: LoggedCommand):
    command.log_to("tensorbord")
    with pytest.raises(ConfigProblems) as caught:
        command()
    prose(caught, known=re.compile(r"(?<=Known: ).*"))


def test_loggers_may_change_between_two_starts(command: LoggedCommand):
    assert command() == 0
    command.log_to({"_type": "file", "path": "log"})
    assert command(("finetuning.num_epochs", "3")) == 0
    steps = [step for name, step, _ in lines(Path("log"), "metric") if name == "train/reward"]
    assert steps == [0, 1, 2]


def test_openpipe_logs_every_call_with_its_reward(
    command: LoggedCommand, monkeypatch: pytest.MonkeyPatch
):
    failed: list[Received] = []

    def once(request: Received) -> int:
        if not request.path.endswith("/report"):
            return 200
        failed.append(request)
        return 503 if len(failed) == 2 else 200

    monkeypatch.setenv("OPENPIPE_API_KEY", "opk-open-sesame")
    with Receiver(once) as service:
        command.log_to({"_type": "openpipe", "base_url": f"{service.url}/api/v1"})
        assert command(("finetuning.num_epochs", "1")) == 0
        calls = service.at("/api/v1/report")
    assert len(calls) == 12  # 2 examples x 2 generations x 3 calls; the refused one was sent again
    first = calls[0].json
    assert calls[0].headers["authorization"] == "Bearer opk-open-sesame"
    assert first["reqPayload"]["messages"] == [ASKED] and first["reqPayload"]["model"] == "agent"
    assert first["respPayload"]["choices"][0] == {
        "index": 0,
        "message": ANSWERED,
        "finish_reason": "stop",
    }
    assert first["respPayload"]["usage"]["total_tokens"] == 14
    assert (first["requestedAt"], first["receivedAt"]) == (100_000, 100_500)
    metadata = [one.json["reqPayload"]["metadata"] for one in calls]
    assert len({(m["hone.rollout"], m["hone.call"]) for m in metadata}) == 12
    assert Counter(m["hone.reward"] for m in metadata) == {"0.1": 6, "0.30000000000000004": 6}


def test_openpipe_has_each_call_once_if_its_logger_is_killed(
    command: LoggedCommand, monkeypatch: pytest.MonkeyPatch
):
    """Killed after the fifth call arrived, the second of its rollout, and before it was answered."""

    def kill(request: Received) -> int:
        if request.path.endswith("/report") and len(service.at("/api/v1/report")) == 4:
            children = psutil.Process().children()  # servers of other tests too
            (worker,) = [child for child in children if "hone.loggers.child" in child.cmdline()]
            worker.kill()
        return 200

    def count(request: Received) -> dict[str, Any]:
        if not request.path.endswith("/update-metadata"):
            return {}
        sought = [(one["field"], one["equals"]) for one in request.json["filters"]]
        logs = [one.json["reqPayload"]["metadata"] for one in service.at("/api/v1/report")]
        matched = [m for m in logs if all(m[f.partition(".")[2]] == v for f, v in sought)]
        return {"matchedLogs": len(matched)}

    monkeypatch.setenv("OPENPIPE_API_KEY", "opk-open-sesame")
    with Receiver(kill, count) as service:
        command.log_to({"_type": "openpipe", "base_url": f"{service.url}/api/v1"})
        assert command(("finetuning.num_epochs", "1")) == 0
        assert len(service.at("/api/v1/report")) == 5
        assert command(("finetuning.num_epochs", "1")) == 0
        calls = [one.json["reqPayload"]["metadata"] for one in service.at("/api/v1/report")]
    assert len({(m["hone.rollout"], m["hone.call"]) for m in calls}) == len(calls) == 12


def test_a_call_that_openpipe_refuses_for_good_is_skipped_and_counted(
    command: LoggedCommand, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    requests: list[Received] = []

    def second(request: Received) -> int:
        if not request.path.endswith("/report"):
            return 200
        requests.append(request)
        return 422 if len(requests) == 2 else 200

    monkeypatch.setenv("OPENPIPE_API_KEY", "opk-open-sesame")
    with Receiver(second) as service:
        command.log_to({"_type": "openpipe", "base_url": f"{service.url}/api/v1"})
        assert command(("finetuning.num_epochs", "1")) == 0
        assert (len(service.at("/api/v1/report")), len(requests)) == (11, 12)
    assert command.events("logger_stopped") == []
    cursor = json.loads((command.out / "loggers" / "openpipe.json").read_text())
    assert (cursor["refused"], cursor["lines"]) == (1, num_events(command))
    (warning,) = [r.message for r in caplog.records if "Logger openpipe" in r.message]
    assert warning.startswith("Logger openpipe: its service refused 1 items, which were skipped.")


def test_a_batch_is_sent_without_the_items_that_are_refused_for_good():
    class Refused(Exception):
        status_code = 400

    taken: list[int] = []
    refused: list[Exception] = []

    def send(batch: list[int]) -> None:
        if {3, 8} & set(batch):
            raise Refused
        taken.extend(batch)

    box = Outbox(4, send, refused.append)
    box.items += range(10)
    box.flush()
    assert taken == [0, 1, 2, 4, 5, 6, 7, 9] and len(refused) == 2 and box.items == []


@pytest.mark.parametrize(
    ("adapters", "expected"),
    [
        ("last", [[2, True, False], [3, False, True]]),
        ("all", [[1, False, True], [2, False, True], [3, False, True], [2, True, False]]),
    ],
)
def test_the_best_adapter_is_marked_and_the_newest_is_the_latest(
    command: LoggedCommand, adapters: Literal["last", "all"], expected: list[Any]
):
    root = Path("root").absolute()
    for step in (1, 2, 3):
        (root / "projects" / "p" / "models" / "agent" / "checkpoints" / f"{step:04d}").mkdir(
            parents=True
        )
    started = {"run_id": "r", "session": 1, "epochs": 3, "step": 0, "root": str(root)}
    config = file_sink.FileConfig(path=Path("log").absolute(), adapters=adapters)
    with EventLog(command.out / "events.jsonl") as events:
        running = loggers.Loggers([config], events)
        events.append("run_started", **started, name="agent", project="p", base_model="b")
        for epoch, reward in enumerate((0.1, 0.9, 0.2)):
            job = {"epoch": epoch, "round": 0, "step": epoch + 1, "job": "j", "seconds": 1.0}
            events.append("job_done", **job, metrics={"learn/loss": 0.1})
            result = {"avg_reward": reward, "rewards": {"x": [reward]}, "failures": 0}
            events.append("validation", epoch=epoch, step=epoch + 1, **result)
        ended = {"status": "completed", "message": "", "seconds": 1.0}
        events.append("run_finished", **ended, step=3, best_step=2)
        running.close()
    assert lines(Path("log"), "adapter") == expected


def test_the_recipes_of_the_guide_are_valid_and_name_extras_that_exist(tmp_path: Path):
    guide = (ROOT / "docs" / "guides" / "loggers.md").read_text()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    blocks = re.findall(r"```yaml\n(.*?)```", guide, re.S)
    types = set()
    for block in blocks:
        (tmp_path / "x.yml").write_text(block)
        types |= {logger.type_name for logger in read(tmp_path / "x.yml").loggers}
    assert types == {one.name for one in known("logger") if one.package == "hone"}
    named = set(re.findall(r"hone-rl\[([\w-]+)\]", guide))
    needed = {getattr(one.config_type, "extra", "") for one in known("logger")} - {""}
    assert named == needed <= extras["optional-dependencies"].keys()
