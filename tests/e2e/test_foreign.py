"""An agent whose model is served by somebody else: trained from text and logprobs, or refused."""

import itertools
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.chat.conftest import build_tokenizer
from tests.e2e.conftest import QWEN, Finetune, Server

pytestmark = pytest.mark.slow

Tokens = Callable[[str], list[str]]
"""How the endpoint's model cuts its text."""
ANSWERS = ("yes", "no, never")
LOGPROB = -0.5

CONFIG = """
llms:
  model:
    _type: openai
    model_name: somebody-elses
    base_url: {url}
    api_key: default
    temperature: 1.0
    logprobs: true
workflow: {{_type: python, target: "agent.py:run", llm: model}}
eval:
  general:
    max_concurrency: 1
    dataset: {{_type: json, file_path: rows.json}}
  evaluators: {{length: {{_type: python, target: "agent.py:length"}}}}
trajectory_builders: {{b: {{_type: rollouts, num_generations: 2}}}}
trainer_adapters:
  a:
    _type: hone_server
    backend: {{ip: 127.0.0.1, port: {port}, name: {name}, project: foreign, base_model: {model}}}
    training: {{learning_rate: 1e-3}}
trainers: {{t: {{_type: rl}}}}
finetuning:
  enabled: true
  trainer: t
  trajectory_builder: b
  trainer_adapter: a
  reward_function: {{name: length}}
  num_epochs: 2
  output_dir: out
  allow_foreign_endpoint: {allowed}
"""

AGENT = """
async def run(question, llm):
    answer = await llm.chat([{"role": "user", "content": question}])
    return answer.choices[0].message.content

def length(item):
    return float(len(item.output_obj))
"""


@contextmanager
def endpoint(tokens: Tokens) -> Iterator[str]:
    """An OpenAI API that gives its two answers in turn, with logprobs if they are asked for."""
    turn = itertools.cycle(ANSWERS)

    def choice(request: dict[str, Any]) -> dict[str, Any]:
        text = next(turn)
        content = [
            {"token": t, "logprob": LOGPROB, "bytes": list(t.encode())} for t in tokens(text)
        ]
        logprobs = {"content": content} if request.get("logprobs") else None
        message = {"role": "assistant", "content": text}
        return {"index": 0, "finish_reason": "stop", "message": message, "logprobs": logprobs}

    class Answering(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            completion = {
                "id": "x",
                "object": "chat.completion",
                "created": 1,
                "model": request["model"],
            }
            body = json.dumps({**completion, "choices": [choice(request)]}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Answering) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1"
        finally:
            server.shutdown()
            thread.join()


def own_tokens(text: str) -> list[str]:
    """As the base model cuts it."""
    tokenizer = build_tokenizer("qwen2.5-instruct")
    return [tokenizer.decode([id]) for id in tokenizer.encode(text, add_special_tokens=False)]


def prepared(
    directory: Path, environment: dict[str, str], server: Server, url: str, **keys: Any
) -> Finetune:
    rows = [{"id": i, "question": f"Is it {i}?", "answer": ""} for i in range(2)]
    (directory / "rows.json").write_text(json.dumps(rows))
    (directory / "agent.py").write_text(AGENT)
    values = {"url": url, "port": server.port, "model": QWEN, "allowed": "true", **keys}
    (directory / "train.yml").write_text(CONFIG.format(**values))
    return Finetune(directory, environment, ["--config_file=train.yml"])


def test_answers_of_another_endpoint_are_trained(
    server: Server, environment: dict[str, str], tmp_path: Path
):
    with endpoint(own_tokens) as url:
        finetune = prepared(tmp_path, environment, server, url, name="trained")
        assert finetune.run() == 0, finetune.outputs[-1]
    assert "no entry of `llms` asks there" in finetune.outputs[-1]
    assert (
        "trained off-policy, from their text and logprobs (allow_foreign_endpoint)"
        in (finetune.outputs[-1])
    )
    jobs = server.jobs("foreign/trained")
    assert [(job["state"], job["step"]) for job in jobs] == [("done", 1), ("done", 2)]
    # 2 examples x 2 generations, each one call; none of them is the server's own.
    assert [job["counts"] for job in jobs] == [{"rerendered": 4}] * 2
    # Each example was answered once with each text, so every token of both is a label, twice.
    labels = 2 * sum(len(own_tokens(text)) for text in ANSWERS)
    assert [job["metrics"]["learn/labels"] for job in jobs] == [labels] * 2
    # The base model has its own opinion of these tokens: a random one gives each about 1/vocabulary,
    # the endpoint said exp(-0.5).
    assert all(job["metrics"]["learn/mismatch_kl"] > 0.1 for job in jobs)
    assert [event["counts"] for event in finetune.events("job_done")] == [{"rerendered": 4}] * 2
    texts = {line["output"] for line in finetune.lines("trajectories/epoch_000.jsonl")}
    assert texts == set(ANSWERS)


def test_another_endpoint_is_refused_unless_it_is_allowed(
    server: Server, environment: dict[str, str], tmp_path: Path
):
    with endpoint(own_tokens) as url:
        finetune = prepared(tmp_path, environment, server, url, name="refused", allowed="false")
        assert finetune.run() == 1
    assert f"no entry of `llms` asks there (llms.model at {url})" in finetune.outputs[-1]
    assert "set finetuning.allow_foreign_endpoint: true" in finetune.outputs[-1]
    assert server.jobs("foreign/refused") == []


def test_another_models_tokens_are_refused_with_the_reason(
    server: Server, environment: dict[str, str], tmp_path: Path
):
    def halves(text: str) -> list[str]:
        return [text[: len(text) // 2], text[len(text) // 2 :]]

    with endpoint(halves) as url:
        finetune = prepared(tmp_path, environment, server, url, name="cut")
        assert finetune.run() == 1
    # "y" and "es": the base model has no token "es", and spells the word in three.
    assert (
        f"its text is 3 tokens of {QWEN!r}, and there are 2 logprobs; ask the endpoint for token "
        "ids (vLLM: return_tokens_as_token_ids), or sample from this server"
    ) in finetune.outputs[-1]
    assert server.jobs("foreign/cut") == []
