"""Chat templates are foreign code: limits on a bad one, through the server's routes."""

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.chat.conftest import build_tokenizer
from tests.patience import PATIENCE_S
from tests.prose import Prose, place_of
from tests.server.conftest import MakeServer, write_model

from hone.chat.jinja_process import JinjaProcesses

pytestmark = pytest.mark.e2e

HI = {"role": "user", "content": "hi"}
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[JinjaProcesses]:
    """Processes with narrow limits, for the whole server."""
    processes = JinjaProcesses(time_s=0.3, memory_bytes=64 << 20)
    monkeypatch.setattr("hone.chat.jinja.PROCESSES", processes)
    yield processes
    processes.close()


def ask(url: str, model: Path, *messages: dict[str, Any], **fields: Any) -> httpx.Response:
    body = {"model": str(model), "messages": messages or [HI], **fields}
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=PATIENCE_S)


@pytest.mark.parametrize(
    "template",
    ["{{ 'A' * 10**10 }}", ENDLESS],
)
def test_a_model_whose_template_takes_too_much_is_refused_and_others_go_on(
    prose: Prose,
    template: str,
    tmp_path: Path,
    tiny_model: Path,
    make_server: MakeServer,
    processes: JinjaProcesses,
):
    bad = write_model(tmp_path / "bad", build_tokenizer("smollm2-instruct", template))
    server = make_server(["ok"])
    refused = ask(server.control_url, bad)
    assert refused.status_code == 400, refused.text
    prose(refused.json()["error"]["message"])
    assert ask(server.control_url, tiny_model).status_code == 200


LARGE = "word " * 20_000  # more than `large_body_bytes`
SENT: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {}),
    "large chat": ("/v1/chat/completions", {"user": LARGE}),
    "tokenize": ("/tokenize", {}),
    "job": ("/v1/training/jobs", {}),
}
"""What may render a model's own template: a path, and keys of its body."""


def job_of(model: str, content: str) -> dict[str, Any]:
    """A job whose only answer must be rendered."""
    written = [{"role": "user", "content": content}, {"role": "assistant", "content": "a"}]
    trajectory = {"messages_and_choices": written, "reward": 1.0}
    config = {"loss": "sft", "learning_rate": 1e-4}
    return {"model": model, "groups": [{"trajectories": [trajectory]}], "config": config}


@pytest.mark.parametrize(
    ("what", "requests"),
    [("chat", 1), ("chat", 70), ("large chat", 6), ("tokenize", 70), ("job", 70)],
)
def test_a_template_that_only_some_messages_make_slow_holds_up_no_other_request(
    what: str,
    requests: int,
    tmp_path: Path,
    tiny_model: Path,
    make_server: MakeServer,
    monkeypatch: pytest.MonkeyPatch,
):
    processes = JinjaProcesses(time_s=PATIENCE_S)
    monkeypatch.setattr("hone.chat.jinja.PROCESSES", processes)
    path, more = SENT[what]
    sometimes = "{% if messages[0].content == 'slow' %}" + ENDLESS + "{% endif %}{{ messages }}"
    bad = write_model(tmp_path / "bad", build_tokenizer("smollm2-instruct", sometimes))
    good = write_model(tmp_path / "good", build_tokenizer("smollm2-instruct", "{{ messages }}"))
    server = make_server(["ok"])
    registered = {"name": "bad", "base_model": str(bad), "rank": 4}
    assert httpx.post(
        f"{server.control_url}/v1/training/models", json=registered, timeout=PATIENCE_S
    ).is_success
    assert ask(server.control_url, bad).status_code == 200
    assert ask(server.control_url, good).status_code == 200
    if "user" in more:  # the worker processes start
        assert ask(server.control_url, good, **more).status_code == 200
    statuses: list[int] = []
    given_up = threading.Event()

    def ask_slow() -> None:
        body = job_of("bad", "slow") if what == "job" else {"model": str(bad), **more}
        if what != "job":
            body["messages"] = [{"role": "user", "content": "slow"}]
        try:
            answer = httpx.post(f"{server.control_url}{path}", json=body, timeout=PATIENCE_S)
        except httpx.HTTPError:
            assert given_up.is_set()
        else:
            statuses.append(answer.status_code)

    threads = [threading.Thread(target=ask_slow) for _ in range(requests)]
    for thread in threads:
        thread.start()
    if what == "large chat":  # another process renders it
        while server.state.workers.busy == 0:
            time.sleep(0.01)
    else:
        while processes._idle or not processes.pids:
            time.sleep(0.01)
    time.sleep(0.5 if requests > 1 else 0.0)  # until all of them have arrived
    assert httpx.get(f"{server.control_url}/health", timeout=PATIENCE_S).status_code == 200
    for other in (tiny_model, good):
        assert ask(server.control_url, other, **more).status_code == 200
    assert statuses == [], "the other model waited for the slow template"
    given_up.set()
    while any(thread.is_alive() for thread in threads):
        processes.close()
        server.state.workers.close()
        time.sleep(0.01)
    assert {*statuses} <= {400, 503}


def test_arguments_of_a_request_cannot_replace_what_the_server_passes(
    prose: Prose, tmp_path: Path, make_server: MakeServer
):
    template = "{{ messages }}{{ tone }}"
    base = write_model(tmp_path / "plain", build_tokenizer("smollm2-instruct", template))
    server = make_server(["ok"])
    refused = ask(server.control_url, base, chat_template_kwargs={"messages": []})
    assert refused.status_code == 400
    message = json.loads(refused.text)["error"]["message"]
    prose(message)
    assert place_of(message) == "chat_template_kwargs"
    assert ask(server.control_url, base, chat_template_kwargs={"tone": "kind"}).status_code == 200
