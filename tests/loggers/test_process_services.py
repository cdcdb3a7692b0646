"""One run, interrupted, resumed and sent again, as every service has it: read back.

The run has two sessions. After it, every cursor is set to 0, as if each logger had been killed
before it could save one, and the command is run again: whatever was sent is sent again.
"""

import base64
import json
import os
import signal
import sqlite3
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.environments import ROOT
from tests.finetune.command import Parts, rising
from tests.loggers.conftest import ANSWERED, ASIDE, ASKED, CHECKED, LoggedCommand, prepared
from tests.loggers.receiver import Received, Receiver

from hone.integrations.loggers.mlflow import MLflowConfig
from hone.integrations.loggers.tensorboard import TensorBoardConfig
from hone.integrations.loggers.wandb import WandbConfig
from hone.loggers import process as loggers
from hone.loggers.reporter import Reporter

REWARDS = {0: 0.2, 1: 0.3}
"""By step: the means of `rising`, 0.1 + 0.2 * generation + 0.1 * epoch, over two generations."""


@dataclass
class Logged:
    """A run, and what arrived."""

    command: LoggedCommand
    place: Path
    otel: Receiver
    langfuse: Receiver
    read: dict[str, Any]


SHOW = """
import sys, trackio
*_, url = trackio.show(open_browser=False, block_thread=False, host="127.0.0.1")
print("ready", url, flush=True)
sys.stdin.read()
"""


@contextmanager
def trackio_server(python: Path, place: Path) -> Iterator[str]:
    """A server of Trackio; its URL with the token."""
    env = os.environ | {"TRACKIO_DIR": str(place)}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([str(python), "-c", SHOW], env=env, **pipes) as process:
        assert process.stdout is not None and process.stdin is not None
        url = next(line.split()[1] for line in process.stdout if line.startswith("ready "))
        yield url
        process.stdin.close()
        process.terminate()


def interrupting(epoch: int, example: str, generation: int) -> float:
    if (epoch, example, generation) == (1, "b", 0):
        signal.raise_signal(signal.SIGINT)
    return rising(epoch, example, generation)


@pytest.fixture(scope="module")
def logged(packages: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Logged]:
    place = tmp_path_factory.mktemp("services")
    with (
        pytest.MonkeyPatch.context() as patch,
        Receiver() as otel,
        Receiver() as langfuse,
        trackio_server(packages, place / "trackio-server") as tracking,
    ):
        patch.chdir(place)
        patch.setenv("PYTHONPATH", f"{ROOT / 'src'}:{ROOT}")
        # A logger that is killed while MLflow creates its database leaves one that MLflow cannot read.
        patch.setattr(loggers, "INTERRUPTED_S", 60.0)
        patch.setenv("TRACKIO_DIR", str(place / "trackio"))
        patch.setenv("LANGFUSE_SECRET_KEY", "sk-lf-open-sesame")
        command, python = prepared(place), {"python": str(packages)}
        command.log_to(
            python | {"_type": "wandb", "mode": "offline", "adapters": "all", "tags": ["t"]},
            python | {"_type": "tensorboard"},
            python | {"_type": "mlflow", "tracking_uri": "sqlite:///ml.db", "adapters": "last"},
            python | {"_type": "trackio", "project": "tracked"},
            python | {"_type": "trackio", "project": "tracked", "server_url": tracking},
            python | {"_type": "otel", "endpoint": otel.url, "content": True},
            python | {"_type": "langfuse", "base_url": langfuse.url, "public_key": "pk-lf-1"},
        )
        Parts.builder.reward = interrupting
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        assert command(validation_dataset=Path("val.json")) == 130
        signal.signal(signal.SIGINT, before)
        Parts.builder.reward = rising
        assert command(validation_dataset=Path("val.json")) == 0
        for cursor in (command.out / "loggers").glob("*.json"):
            cursor.write_text('{"lines": 0}')
        assert command(validation_dataset=Path("val.json")) == 0
        assert command.events("logger_stopped") == []
        (command.out / "otlp").mkdir()
        for number, request in enumerate(otel.requests):
            name = f"{request.path.rpartition('/')[2]}.{number:03d}"
            (command.out / "otlp" / name).write_bytes(request.body)
        for number, request in enumerate(langfuse.at("/api/public/otel/v1/traces"), start=500):
            (command.out / "otlp" / f"traces.{number}").write_bytes(request.body)
        reader = [str(packages), "-P", "-m", "tests.loggers.read_back", str(command.out)]
        done = subprocess.run(reader, capture_output=True, text=True, check=False, env=os.environ)
        assert done.returncode == 0, done.stderr
        yield Logged(command, place, otel, langfuse, json.loads(done.stdout))


def test_tensorboard_has_each_value_of_a_step_once(logged: Logged) -> None:
    scalars = logged.read["tensorboard"]
    assert {s: pytest.approx(v) for s, v, _ in scalars["train/reward"]} == REWARDS
    assert [s for s, _, _ in scalars["train/reward"]] == [0, 1]
    assert [(s, v) for s, v, _ in scalars["learn/loss"]] == [(1, 0.5), (2, 0.5)]
    assert [(s, v) for s, v, _ in scalars["val/reward"]] == [(0, 0.5), (2, 0.5)]


def test_wandb_has_one_run_with_metrics_tables_and_adapters(logged: Logged) -> None:
    read = logged.read["wandb"]
    assert read["ids"] == [[logged.command.run_id, "suite"]]
    for name, expected in {"train/reward": {0, 1}, "learn/loss": {1, 2}}.items():
        rows = [row for row in read["rows"] if name in row]
        assert [row["training_step"] for row in rows] == sorted(expected)
    steps = [row["_step"] for row in read["rows"]]
    assert len(set(steps)) == len(steps)  # which a sync would take for the same row
    rewards = {r["training_step"]: r["train/reward"] for r in read["rows"] if "train/reward" in r}
    assert rewards == {step: pytest.approx(reward) for step, reward in REWARDS.items()}
    training = [t for t in read["tables"] if len(t["data"]) == 4]
    assert len(training) == 2
    row = dict(zip(training[0]["columns"], training[0]["data"][0], strict=True))
    assert (row["input"], row["output"], row["example"]) == ("How many?", "7", row["example"])
    assert json.loads(row["conversation"])[:2] == [ASKED, ANSWERED]
    adapters = {tuple(aliases): files for _, aliases, files, _ in read["artifacts"]}
    assert adapters.keys() == {("latest", "step-1"), ("latest", "step-2")}
    assert adapters["latest", "step-2"] == ["adapter_config.json", "adapter_model.safetensors"]


def test_mlflow_has_one_run_with_each_value_once_and_the_last_adapter(logged: Logged) -> None:
    with sqlite3.connect(logged.place / "ml.db") as database:
        ((run, status, name),) = database.execute("SELECT run_uuid, status, name FROM runs")
        ((experiment,),) = database.execute("SELECT name FROM experiments WHERE experiment_id != 0")
        values = database.execute("SELECT key, step, value FROM metrics").fetchall()
        tags = dict(database.execute("SELECT key, value FROM tags").fetchall())
        params = dict(database.execute("SELECT key, value FROM params").fetchall())
    database.close()
    assert (status, name, experiment) == ("FINISHED", logged.command.run_id, "suite")
    assert tags["hone.run"] == logged.command.run_id
    assert params["finetuning.num_epochs"] == "2"
    assert params["trainer_adapters.a.api_key"] == "<hidden>"
    counts = Counter((key, step) for key, step, _ in values)
    assert set(counts.values()) == {1}
    rewards = {step: value for key, step, value in values if key == "train/reward"}
    assert rewards == {step: pytest.approx(reward) for step, reward in REWARDS.items()}
    (weights,) = logged.place.rglob(f"{run}/artifacts/adapters/step_0002/adapter_model.safetensors")
    assert weights.read_text() == "weights 2"


@pytest.mark.parametrize("place", ["trackio", "trackio-server"])
def test_trackio_has_each_row_once_and_the_conversations(logged: Logged, place: str) -> None:
    with sqlite3.connect(logged.place / place / "tracked.db") as database:
        rows = database.execute("SELECT run_name, step, metrics FROM metrics").fetchall()
        traces = database.execute("SELECT key, step, messages, metadata FROM traces").fetchall()
    database.close()
    assert {name for name, *_ in rows} == {logged.command.run_id}
    held = [(step, json.loads(metrics)) for _, step, metrics in rows]
    rewards = [(step, row["train/reward"]) for step, row in held if "train/reward" in row]
    assert rewards == [(step, pytest.approx(reward)) for step, reward in REWARDS.items()]
    assert [step for step, row in held if "learn/loss" in row] == [1, 2]
    trained = [(step, json.loads(m), json.loads(more)) for key, step, m, more in traces]
    assert Counter(step for step, *_ in trained) == {0: 4, 1: 4}
    assert trained[0][1][:2] == [ASKED, ANSWERED]
    assert Counter(round(more["reward"], 3) for *_, more in trained) == {
        0.1: 2,
        0.3: 2,
        0.2: 2,
        0.4: 2,
    }


def spans(logged: Logged, first: int, last: int) -> list[dict[str, Any]]:
    """The spans of the requests in this range of numbers, attributes as a dict."""
    results = []
    for name, body in logged.read["otlp"].items():
        kind, _, number = name.partition(".")
        if kind != "traces" or not first <= int(number) < last:
            continue
        for resource in body["resourceSpans"]:
            for scope in resource["scopeSpans"]:
                for span in scope["spans"]:
                    span["attributes"] = attributes(span["attributes"])
                    results.append(
                        span | {"resource": attributes(resource["resource"]["attributes"])}
                    )
    return results


def attributes(pairs: list[dict[str, Any]]) -> dict[str, Any]:
    values = {pair["key"]: next(iter(pair["value"].values())) for pair in pairs}
    return {k: v["values"] if isinstance(v, dict) else v for k, v in values.items()}


def test_otlp_has_a_trace_for_each_rollout_with_gen_ai_attributes(logged: Logged) -> None:
    sent = spans(logged, 0, 500)
    roots = [span for span in sent if "parentSpanId" not in span]
    calls = [span for span in sent if "parentSpanId" in span]
    # 8 training rollouts with 3 calls each and 4 of validations without; all of them sent twice,
    # with the same ids. The rollouts of the comparison at the end are not run: nothing was learned.
    assert len({span["traceId"] for span in roots}) == len(roots) // 2 == 12
    assert len({span["spanId"] for span in calls}) == len(calls) // 2 == 24
    assert {span["traceId"] for span in calls} <= {span["traceId"] for span in roots}
    one = next(span for span in calls if span["attributes"]["gen_ai.response.id"] == "c1")
    span_attributes = one["attributes"]
    assert (one["name"], one["kind"]) == ("chat agent", "SPAN_KIND_CLIENT")
    assert (one["startTimeUnixNano"], one["endTimeUnixNano"]) == ("101000000000", "101500000000")
    assert (span_attributes["gen_ai.operation.name"], span_attributes["gen_ai.request.model"]) == (
        "chat",
        "agent",
    )
    assert (
        span_attributes["gen_ai.usage.input_tokens"],
        span_attributes["gen_ai.usage.output_tokens"],
    ) == ("11", "3")
    assert span_attributes["gen_ai.response.finish_reasons"] == [{"stringValue": "stop"}]
    inputs = json.loads(span_attributes["gen_ai.input.messages"])
    assert inputs[0] == {"role": "system", "parts": [{"type": "text", "content": "Check."}]}
    parent = next(span for span in roots if span["traceId"] == one["traceId"])
    assert one["parentSpanId"] == parent["spanId"]
    assert parent["name"] == "invoke_agent agent"
    assert parent["attributes"]["hone.reward"] in (0.1, 0.2, pytest.approx(0.3), 0.4)
    assert parent["resource"]["service.name"] == "hone"


def test_otlp_has_the_metrics_as_gauges(logged: Logged) -> None:
    points = set()
    for name, body in logged.read["otlp"].items():
        if name.startswith("metrics"):
            for metric in body["resourceMetrics"][0]["scopeMetrics"][0]["metrics"]:
                for point in metric["gauge"]["dataPoints"]:
                    step = attributes(point["attributes"])["hone.step"]
                    points.add((metric["name"], step, point["timeUnixNano"], point["asDouble"]))
    losses = sorted((step, value) for name, step, _, value in points if name == "hone.learn.loss")
    assert losses == [("1", 0.5), ("2", 0.5)]


def test_langfuse_has_generations_and_scores(logged: Logged) -> None:
    sent = spans(logged, 500, 1000)
    key = base64.b64encode(b"pk-lf-1:sk-lf-open-sesame").decode()
    assert {r.headers["authorization"] for r in logged.langfuse.requests} == {f"Basic {key}"}
    generations = [s for s in sent if s["attributes"]["langfuse.observation.type"] == "generation"]
    one = next(s for s in generations if s["attributes"]["gen_ai.response.id"] == "c1")
    assert json.loads(one["attributes"]["langfuse.observation.input"]) == ASIDE
    assert json.loads(one["attributes"]["langfuse.observation.output"]) == CHECKED
    usage = json.loads(one["attributes"]["langfuse.observation.usage_details"])
    assert usage == {"input": 11, "output": 3}
    traces = {s["traceId"] for s in sent}
    assert len(traces) == 12 and len({s["spanId"] for s in generations}) == 24
    scores = [s for r in logged.langfuse.at("/api/public/scores") for s in r.json]
    assert len({s["id"] for s in scores}) == len(scores) // 2 == 24  # two for each rollout
    ids = {base64.b64decode(trace).hex() for trace in traces}
    assert {s["traceId"] for s in scores} == ids
    rewards = {s["id"]: round(s["value"], 3) for s in scores if s["name"] == "reward"}
    assert Counter(rewards.values()) == {0.1: 2, 0.2: 2, 0.3: 2, 0.4: 2, 0.5: 4}


def test_a_programs_run_is_finished_and_any_metric_name_is_sent(
    packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'src'}:{ROOT}")
    place, python = tmp_path / "agent" / "reports", packages
    configs = [
        WandbConfig(python=python, mode="offline"),
        MLflowConfig(python=python, tracking_uri=f"sqlite:///{tmp_path}/ml.db"),
        TensorBoardConfig(python=python),
    ]
    reporter = Reporter(place, configs, name="agent", project="p")
    reporter.log(0, {"accuracy@5": 1.0, "reward": 0.5})
    reporter.log(1, {"reward": 0.75})
    reporter.close()
    (place / "otlp").mkdir()
    reader = [str(packages), "-P", "-m", "tests.loggers.read_back", str(place)]
    done = subprocess.run(reader, capture_output=True, text=True, check=True, env=os.environ)
    wandb = json.loads(done.stdout)["wandb"]
    assert wandb["exits"] == [0]
    assert [row["reward"] for row in wandb["rows"]] == [0.5, 0.75]
    with sqlite3.connect(tmp_path / "ml.db") as database:
        ((status,),) = database.execute("SELECT status FROM runs")
        values = set(database.execute("SELECT key, step, value FROM metrics").fetchall())
    database.close()
    assert status == "FINISHED"
    assert values == {("accuracy_5", 0, 1.0), ("reward", 0, 0.5), ("reward", 1, 0.75)}
    assert "logger_stopped" not in (place / "events.jsonl").read_text()


BATCHES = """
import sys
from pathlib import Path
from hone.files.rollout_record import CallRecord
from hone.loggers.base import Point, LoggedRollout, Run
from hone.integrations.loggers.langfuse import LangfuseConfig, LangfuseSink
from hone.integrations.loggers.otel import OTelConfig, OTelSink

kind, url = sys.argv[1:]
run = Run("r", Path("."))
if kind == "otel":
    sink = OTelSink(OTelConfig(endpoint=url), run)
else:
    sink = LangfuseSink(LangfuseConfig(base_url=url, public_key="p", secret_key="s"), run)
calls = [CallRecord(id=str(i), function="f", model="m", at=0, seconds=0) for i in range(9)]
fields = {"epoch": 0, "split": "train", "example": "a", "reward": 1.0, "model_calls": calls}
for i in range(60):
    sink.rollout(LoggedRollout(generation=i, rollout=f"r:{i}", **fields))
try:
    sink.flush()
except Exception as error:
    assert "404" in str(error), error
else:
    raise AssertionError("nothing was refused")
sink.log(Point({"bad" if kind == "otel" else "x": 1.0}, 0, 1.0, 1))
sink.log(Point({"good": 1.0}, 0, 1.0, 2))
sink.flush()
print(sink.refused)
"""


@pytest.mark.parametrize(("kind", "traces", "refused"), [("otel", 2, 1), ("langfuse", 3, 0)])
def test_spans_are_sent_once_and_a_refused_metric_alone_is_skipped(
    packages: Path, kind: str, traces: int, refused: int
) -> None:
    requests: list[str] = []

    def status(request: Received) -> int:
        requests.append(request.path)
        if b"hone.bad" in request.body:
            return 400
        return 404 if len(requests) == 1 else 200

    with Receiver(status) as service:
        command = [str(packages), "-P", "-c", BATCHES, kind, service.url]
        env = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
        assert (done.returncode, done.stdout) == (0, f"{refused}\n"), done.stderr
        sent = Counter(request.path.rpartition("/")[2] for request in service.requests)
    assert sent["traces"] == traces  # 60 rollouts with 9 calls each: 600 spans, each once
    assert sent["metrics"] == refused  # that of the other one


def test_no_file_holds_a_secret(logged: Logged) -> None:
    for path in logged.command.out.rglob("*"):
        assert path.is_dir() or b"sesame" not in path.read_bytes(), path
