"""`hone serve-workflow` in a process of its own, and `--endpoint` of eval and finetune against it."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import openai
import pytest
from fastapi import FastAPI
from fastapi.responses import PlainTextResponse
from tests.finetune.rehearsal import document
from tests.patience import PATIENCE_S
from tests.prose import Prose, place_of
from typer import BadParameter
from typer.testing import CliRunner

from hone import LocalBackend
from hone.cli.app import app
from hone.cli.serve_workflow import ServeWorkflowOptions, serve_workflow
from hone.errors import ConfigError
from hone.evaluation.base import EvalOptions
from hone.evaluation.run import evaluate
from hone.finetune.run import FinetuneOptions, finetune
from hone.server.http import listen
from hone.workflow.endpoint import endpoint_url, open_endpoint
from hone.workflow.run import run_rollout

pytestmark = pytest.mark.e2e

AGENT = """
import atexit
import os
import socket
import stat
import hone
import hone.errors

def connected_without_delay():
    # TCP_NODELAY of every connected TCP socket of this process.
    for number in range(3, 128):
        try:
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            with socket.socket(fileno=os.dup(number)) as one:
                one.getpeername()
                if one.family == socket.AF_INET:
                    yield one.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        except OSError:  # closed, or not connected
            continue

async def search(question, llm):
    answer = await llm.chat([{"role": "user", "content": f"search {question}"}])
    return answer.choices[0].message.content or ""

async def run(question, llm, functions):
    if question == "sockets":
        return list(connected_without_delay())
    if question == "broken":
        raise RuntimeError("no such table: users")
    if question == "unsure":
        raise hone.errors.PolicyFailure("no move", reason="unparseable")
    results = await functions["search"](question)
    hone.step("found", value=float(len(results)))
    answer = await llm.chat([{"role": "user", "content": question}])
    return f"{question}: {answer.choices[0].message.content}"

def steps(item):
    assert [s.name for s in item.steps] == ["found"], item.steps
    return item.steps[0].value

def length(item):
    return float(len(item.output_obj))
"""


LIMITED = """
import pathlib, sys
from hone.cli.serve_workflow import Limits, ServeWorkflowOptions as Options, serve_workflow
limits = Limits(max_body_bytes=1000, body_timeout_s=0.2, header_timeout_s=0.2)
serve_workflow(Options(pathlib.Path(sys.argv[1][len("--config_file="):]), port=0, limits=limits), print)
"""
COMMAND = ("-m", "hone", "serve-workflow")


@contextmanager
def workflow(file: Path, *options: str, program: tuple[str, ...] = COMMAND) -> Iterator[str]:
    """The address of a served workflow."""
    log = file.parent / "serve.log"
    with (
        log.open("w") as errors,
        subprocess.Popen(
            [sys.executable, *program, f"--config_file={file}", "--port", "0", *options],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        ) as process,
    ):
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith(f"Serving {file} at http://"), log.read_text()
            yield line.split()[-1]
        finally:
            process.send_signal(signal.SIGTERM)
            status = process.wait(timeout=PATIENCE_S)
        assert status == 0, log.read_text()


@pytest.fixture(scope="module")
def config(
    tmp_path_factory: pytest.TempPathFactory, shared_server: LocalBackend, tiny_model: Path
) -> Path:
    """A run whose workflow calls a function; both call the model."""
    directory = tmp_path_factory.mktemp("served")
    shared_server.start()
    base = {
        "llms": {"actor": {"model_name": str(tiny_model)}},
        "trainer_adapters": {"a": {"backend": {"base_model": str(tiny_model)}}},
        "functions": {"search": {"target": "served.py:search"}},
        "workflow": {"target": "served.py:run", "functions": ["search"]},
        "eval": {
            "general": {"output_dir": str(directory / "eval")},
            "evaluators": {
                "reward": {"target": "served.py:length"},
                "steps": {"_type": "python", "target": "served.py:steps"},
                "calls": {"_type": "avg_num_llm_calls"},
            },
        },
        "finetuning": {"num_epochs": 1, "target_functions": ["search"]},
    }
    (directory / "served.py").write_text(AGENT)
    file = document(directory, shared_server.base_url, base).file
    (directory / "train.json").write_text(
        json.dumps([{"id": f"e{i}", "question": f"Say {i}.", "answer": ""} for i in range(2)])
    )
    return file


@pytest.fixture(scope="module")
def address(config: Path) -> Iterator[str]:
    with workflow(config) as url:
        yield url


def post(url: str, body: Any, **headers: str) -> httpx2.Response:
    return httpx2.post(url, json=body, headers=headers, timeout=PATIENCE_S)


def test_every_route_runs_the_workflow(address: str):
    assert httpx2.get(f"{address}/health", timeout=PATIENCE_S).json() == {"status": "healthy"}
    answer = post(f"{address}/generate", {"input_message": "Say x."})
    assert answer.status_code == 200 and answer.json()["value"].startswith("Say x.: ")
    assert post(f"{address}/generate", {"input": "Say y."}).json()["value"].startswith("Say y.: ")
    lines = [line for line in post(f"{address}/generate/full", "Say z.").text.splitlines() if line]
    kinds = [line.partition(": ")[0] for line in lines]
    assert kinds == ["intermediate_data"] * 3 + ["data"]  # a call, a step, a call; the output
    first = json.loads(lines[0].partition(": ")[2])
    assert first["function_ancestry"]["function_id"] == "<workflow>.search"
    assert json.loads(first["payload"])["event_type"] == "LLM_END"
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none") as client:
        messages: Any = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hm"},
        ]
        whole = client.chat.completions.create(model="agent", messages=messages)
        assert (whole.choices[0].message.content or "").startswith("Hm: ")
        assert whole.usage is not None and whole.usage.completion_tokens > 0
        stream = client.chat.completions.create(model="agent", messages=messages, stream=True)
        pieces = [chunk.choices[0].delta.content or "" for chunk in stream]
        assert "".join(pieces).startswith("Hm: ")


def test_failures_have_a_reason(prose: Prose, address: str):
    failed = post(f"{address}/generate", {"input_message": "broken"})
    assert failed.status_code == 500
    prose(failed.json()["error"]["message"])
    with (
        openai.OpenAI(base_url=f"{address}/v1", api_key="x", max_retries=0) as client,
        pytest.raises(openai.InternalServerError) as caught,
    ):
        client.chat.completions.create(
            model="agent", messages=[{"role": "user", "content": "broken"}]
        )
    prose(caught)
    for path, body, why in (
        ("/generate", b"{", "the body is not JSON"),
        ("/v1/chat/completions", b"{}", "messages: has no message"),
        (
            "/v1/chat/completions",
            b'{"messages": [{"role": "user", "content": [{"text": 7}]}]}',
            "messages: the user's content has a int, not text",
        ),
    ):
        answer = httpx2.post(f"{address}{path}", content=body, timeout=PATIENCE_S)
        assert answer.status_code == 400 and why in answer.json()["error"]["message"]
    refused = post(f"{address}/generate", "x", **{"X-Hone-Rollout": "not an id"})
    assert refused.status_code == 400 and "rollout is 'not an id'" in refused.text


@pytest.mark.parametrize(
    ("headers", "why"),
    [
        ({"Host": "rebound.example"}, "Host is 'rebound.example'"),
        ({"Origin": "https://other.example"}, "Origin is 'https://other.example'"),
        ({"X-Forwarded-For": "10.0.0.1"}, "the request was forwarded by a proxy"),
    ],
)
def test_web_pages_and_proxies_are_refused(address: str, headers: dict[str, str], why: str):
    refused = post(f"{address}/generate", {"input": "broken"}, **headers)
    assert refused.status_code == 403 and why in refused.text
    assert httpx2.get(f"{address}/health", headers=headers, timeout=PATIENCE_S).status_code == 403
    own = {"Host": "localhost:1", "Origin": "http://localhost:3000"}
    assert post(f"{address}/generate", {"input": "broken"}, **own).status_code == 500


def test_the_rollout_of_a_request_is_that_of_its_model_calls(
    address: str, config: Path, shared_server: LocalBackend
):
    headers = {"X-Hone-Rollout": "elsewhere-7", "X-Hone-Temperature": "0"}
    first, second = (post(f"{address}/generate", "Say 7.", **headers).json() for _ in range(2))
    assert first == second  # greedy
    calls = httpx2.get(
        f"{shared_server.base_url}/v1/rollouts/elsewhere-7", timeout=PATIENCE_S
    ).json()["calls"]
    functions = [call["call"]["function"] for call in calls]
    assert functions == ["<workflow>.search", "<workflow>"] * 2


def test_responses_are_sent_without_delay(address: str):
    delays = post(f"{address}/generate", "sockets").json()["value"]
    assert delays and all(delays), delays


TAKES_THE_PORT = """
import socket
with socket.socket() as other:
    other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    other.bind(("127.0.0.1", {port}))
    other.listen()
raise LookupError("the port was free")
"""


def exchanged(address: str, sent: bytes) -> bytes:
    """What the service sends until it closes the connection."""
    at = urlsplit(address)
    with socket.create_connection((at.hostname, at.port), timeout=PATIENCE_S) as connection:
        connection.sendall(sent)
        return b"".join(iter(lambda: connection.recv(65536), b""))


def test_requests_are_limited_in_size_and_time(config: Path):
    head = b"POST /generate HTTP/1.1\r\nHost: localhost\r\n"
    announced, chunked = b"Content-Length: %d\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n"
    large = [announced % 1001, announced % 2**22 + b"[" * 2**22, chunked + b"3e9\r\n" + b"[" * 1001]
    with workflow(config, program=("-c", LIMITED)) as url:
        assert exchanged(url, head) == b""
        received = exchanged(url, head + announced % 1000 + b"{")
        assert received.startswith(b"HTTP/1.1 408 ") and b"1 bytes of the body arrived" in received
        for body in large:
            received = exchanged(url, head + body)
            assert received.startswith(b"HTTP/1.1 413 ") and b"larger than 1000 bytes" in received
        assert httpx2.get(f"{url}/health", timeout=PATIENCE_S).json() == {"status": "healthy"}


def test_the_port_is_reserved_while_components_are_built(prose: Prose, tmp_path: Path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (tmp_path / "agent_s7.py").write_text(TAKES_THE_PORT.format(port=port))
    config = tmp_path / "agent.yml"
    config.write_text("workflow: {_type: python, target: 'agent_s7.py:run'}\n")
    with pytest.raises(ConfigError) as caught:
        serve_workflow(ServeWorkflowOptions(config, port=port), print)
    prose(caught)


def test_a_key_is_required_beyond_this_machine(config: Path):
    with pytest.raises(BadParameter, match=r"--host 0\.0\.0\.0: other machines could run"):
        serve_workflow(ServeWorkflowOptions(config, host="0.0.0.0"), print)
    for key in ("", " ", "schl\u00fcssel"):  # no client can send one of these
        options = ServeWorkflowOptions(config, host="192.0.2.1", api_key=key)
        with pytest.raises(BadParameter, match="--api_key: expected at least one character, all"):
            serve_workflow(options, print)
    command = ["serve-workflow", f"--config_file={config}", "--api_key", ""]
    assert CliRunner().invoke(app, command).exit_code == 2, "as every invalid value"
    with workflow(config, "--api_key", "sesame") as url:
        for sent, why in (
            ({}, "the request has no API key; "),
            ({"Authorization": "Bearer key"}, "wrong; "),
        ):
            answer = post(f"{url}/generate", {"input": "broken"}, **sent)
            assert answer.status_code == 401 and why in answer.text
        for sent, status in (
            ({"Authorization": "Bearer sesame"}, 500),
            ({"Authorization": "bearer sesame", "Host": "workflow.cluster:8080"}, 500),
            ({"x-api-key": "sesame"}, 500),
            ({"Authorization": "sesame"}, 401),
            ({"Authorization": "Bearer sesame", "Origin": "https://other.example"}, 403),
        ):
            answer = post(f"{url}/generate", {"input": "broken"}, **sent)
            assert answer.status_code == status, (sent, answer.text)
        assert httpx2.get(f"{url}/health", timeout=PATIENCE_S).status_code == 200


@pytest.mark.parametrize("path", ["", "/generate", "/generate/full"])
def test_eval_runs_the_workflow_at_the_endpoint(address: str, config: Path, path: str):
    summary = evaluate(EvalOptions(config, endpoint=f"{address}{path}"))
    assert not summary.failed, summary.message
    assert {one.name: one.average_score for one in summary.evaluators}["calls"] == 2.0
    entries = json.loads((config.parent / "eval" / "workflow_output.json").read_text())
    for entry in entries:
        called = [s["function_ancestry"]["function_id"] for s in entry["intermediate_steps"]]
        assert called == ["<workflow>.search", "<workflow>", "<workflow>"]
        assert entry["generated_answer"].startswith(f"{entry['question']}: ")
    metadata = json.loads((config.parent / "eval" / "config_metadata.json").read_text())
    assert metadata["endpoint"] == f"{address}{path}"


def test_failures_at_the_endpoint_keep_their_kind(
    prose: Prose, address: str, config: Path, tmp_path: Path
):
    rows = [{"id": q, "question": q, "answer": ""} for q in ("broken", "unsure")]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    summary = evaluate(EvalOptions(config, dataset=tmp_path / "rows.json", endpoint=address))
    assert summary.failed_items == 2
    assert "no such table: users" in summary.message
    summary = evaluate(EvalOptions(config, endpoint="http://127.0.0.1:9"))
    assert "POST http://127.0.0.1:9/generate/full failed" in summary.message
    with pytest.raises(ConfigError) as caught:
        evaluate(EvalOptions(config, endpoint="somewhere"))
    prose(caught)
    assert place_of(caught) == "--endpoint somewhere"
    with pytest.raises(ConfigError) as caught:
        evaluate(EvalOptions(config, endpoint=address, skip_workflow=True))
    prose(caught)


def test_finetune_trains_on_rollouts_of_the_endpoint(address: str, config: Path):
    assert finetune(FinetuneOptions(config_file=config, endpoint=address)) == 0
    lines = (config.parent / "out" / "trajectories" / "epoch_000.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert len(rows) == 4  # two examples, two generations
    assert [row["calls"] for row in rows] == [2] * 4
    trained = [row["trained_calls"] for row in rows]  # `search` alone is the target
    assert [len(calls) for calls in trained] == [1] * 4
    assert len({calls[0] for calls in trained}) == 4


PROGRAM = """
import json, os, urllib.request
body = json.dumps({"model": os.environ["OPENAI_MODEL"], "max_tokens": 2, "messages": [
    {"role": "user", "content": "hi"}]}).encode()
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
sent = urllib.request.Request(url, body, {"Content-Type": "application/json"})
urllib.request.urlopen(sent).read()
print(os.environ["OPENAI_BASE_URL"])
"""


def test_a_program_behind_the_service_makes_its_calls_in_the_rollout(
    shared_server: LocalBackend, tiny_model: Path, tmp_path: Path
):
    url, file = f"{shared_server.base_url}/v1", tmp_path / "program.yml"
    entry = {"_type": "openai", "base_url": url, "model_name": str(tiny_model)}
    program = {"_type": "command", "command": [sys.executable, "-c", PROGRAM]}
    file.write_text(json.dumps({"llms": {"m": entry}, "workflow": program}))
    with workflow(file) as service:
        answer = post(f"{service}/generate", "x", **{"X-Hone-Rollout": "program-7"})
    assert answer.status_code == 200, answer.text
    assert answer.json()["value"].strip() == f"{shared_server.base_url}/rollout/program-7/v1"
    calls = httpx2.get(
        f"{shared_server.base_url}/v1/rollouts/program-7", timeout=PATIENCE_S
    ).json()["calls"]
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        ('data: {"value": "a\u2028b"}\n\n', "a\u2028b"),
        ('data: {"value": "x"}\r\n\r\n', "x"),
        ('data: "x"\n\n', "a line that is not a JSON object: '\"x\"'"),
        ("data: {\n\n", "a line that is not a JSON object: '{'"),
        ('intermediate_data: {"payload": "# Step"}\n', "not a JSON object: '# Step'"),
        ('intermediate_data: {"payload": null}\n', "not a JSON object: 'None'"),
    ],
)
async def test_lines_of_any_service_are_read(answer: str, value: str):
    app = FastAPI()
    app.post("/generate/full")(lambda: PlainTextResponse(answer))
    async with listen.serving(app, grace_s=1) as url:
        (result,) = [await run_rollout(one, "x") async for one in open_endpoint(url, 30)]
    if result.failure is None:
        assert result.output == value
    else:
        assert value in result.failure.failure.message


@pytest.mark.skipif(not socket.has_ipv6, reason="needs IPv6")
def test_addresses_that_the_service_prints_are_those_of_endpoint(prose: Prose, tmp_path: Path):
    with pytest.raises(ConfigError) as caught:
        endpoint_url("http://127.0.0.1:8080/?key=x")
    prose(caught)
    (tmp_path / "echo.py").write_text("def run(x):\n    return x\n")
    file = tmp_path / "echo.yml"
    file.write_text('workflow: {_type: python, target: "echo.py:run"}')
    with workflow(file, "--host", "::1") as url:
        assert url.startswith("http://[::1]:")
        assert (
            httpx2.post(endpoint_url(url), json="hi", timeout=PATIENCE_S).text
            == 'data: {"value": "hi"}\n\n'
        )
