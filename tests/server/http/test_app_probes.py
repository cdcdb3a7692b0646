"""Requests of clients besides chats: the version, the models, token ids and text."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import openai
import pytest
from tests.fakes import ScriptedEngine
from tests.patience import PATIENCE_S
from tests.prose import Prose
from tests.server.conftest import MakeServer, Server

import hone
from hone.server.http.auth import inference_key
from hone.server.settings import Settings
from hone.server.state import State
from hone.types import ModelSpec

HELLO: list[Any] = [{"role": "user", "content": "hello caf\u00e9"}]
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, tokenizer: Any, tiny_model: Path
) -> Iterator[Server]:
    engine = ScriptedEngine(tokenizer=tokenizer)
    settings = Settings(root=tmp_path_factory.mktemp("root"), allow_base_models=(str(tiny_model),))
    server = Server(State(settings, open_engine=lambda name: engine), engine).start()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def http(server: Server) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=server.inference_url, timeout=PATIENCE_S) as http:
        yield http


def test_a_prompt_is_tokenized_and_detokenized(http: Any, tokenizer: Any, tiny_model: Path) -> None:
    text = "caf\u00e9<|im_end|> the weather"
    body = {"model": str(tiny_model), "prompt": text, "return_token_strs": True}
    answer = http.post("/tokenize", json=body).json()
    ids = tokenizer.encode(text)
    assert answer == {
        "count": len(ids),
        "max_model_len": 512,
        "tokens": ids,
        "token_strs": tokenizer.convert_ids_to_tokens(ids),
    }
    # The only base model that is served need not be named.
    assert http.post("/detokenize", json={"tokens": ids}).json() == {"prompt": text}
    assert http.post("/tokenize", json={"prompt": ""}).json()["count"] == 0
    longer = http.post("/tokenize", json={"prompt": "word " * 2000}).json()
    assert longer["count"] > longer["max_model_len"]


def test_tokenizing_a_chat_gives_the_ids_of_its_prompt(
    http: Any, server: Server, tiny_model: Path
) -> None:
    ask: dict[str, Any] = {"model": str(tiny_model), "messages": HELLO, "tools": [LOOK]}
    fed = http.post("/v1/chat/completions", json=ask).json()["prompt_token_ids"]
    count = len(server.engine.requests)
    answer = http.post("/tokenize", json=ask).json()
    assert (answer["tokens"], answer["count"]) == (fed, len(fed))
    assert answer["token_strs"] is None
    bare = http.post("/tokenize", json={**ask, "add_generation_prompt": False}).json()["tokens"]
    assert bare == fed[: len(bare)] and len(bare) < len(fed)
    assert len(server.engine.requests) == count


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "x", "messages": HELLO}),
        ("/tokenize", {"messages": []}),
        ("/tokenize", {"messages": [{"role": "user", "content": 3}]}),
        ("/tokenize", {"messages": HELLO, "tools": [{}]}),
        ("/tokenize", {"messages": HELLO, "continue_final_message": True}),
        ("/tokenize", {"messages": HELLO, "chat_template": "{{x}}"}),
        ("/tokenize", {"messages": HELLO, "add_special_tokens": True}),
        ("/tokenize", {"prompt": "x", "modle": "m"}),
        ("/tokenize", {"prompt": 3}),
        ("/tokenize", {"prompt": "\ud800"}),
        ("/detokenize", {"tokens": [1, 512]}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": ["x"]}),
        ("/detokenize", {"tokens": [2**70]}),
        ("/detokenize", {}),
    ],
)
def test_invalid_fields_are_named(prose: Prose, http: Any, path: str, body: dict[str, Any]) -> None:
    written = json.dumps(body)  # httpx would not write half of a surrogate pair
    answer = http.post(path, content=written, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    prose(answer.json()["error"]["message"])


def test_unknown_models_are_not_found(http: Any) -> None:
    for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": []})):
        answer = http.post(path, json={**body, "model": "gpt-unknown"})
        assert answer.status_code == 404 and "gpt-unknown" in answer.text


def test_probes_of_clients_at_start(prose: Prose, http: Any) -> None:
    for path in ("/", "/version"):
        assert http.get(path).json()["version"] == hone.__version__
    for path in ("/", "/version", "/health", "/v1/models"):
        answer = http.head(path)
        assert (answer.status_code, answer.content) == (200, b""), path
        assert http.get(path).status_code == 200
    for method, path in (
        ("GET", "/api/version"),
        ("GET", "/api/tags"),
        ("POST", "/api/show"),
        ("GET", "/props"),
        ("GET", "/v1"),
        ("POST", "/v1/embeddings"),
        ("GET", "/v1/messages/batches"),
        ("GET", "/favicon.ico"),
    ):
        answer = http.request(method, path)
        assert answer.status_code == 404, path
        prose(answer.json()["error"]["message"])
    doubled = http.post("/rollout/r/v1/v1/messages", json={})
    assert doubled.status_code == 404 and "leave it out of the base URL" in doubled.text


def test_both_vendors_clients_list_the_models(server: Server, tiny_model: Path, http: Any) -> None:
    key: Any = {"api_key": "default", "max_retries": 0}
    with anthropic.Anthropic(base_url=server.inference_url, **key) as client:
        (model,) = client.models.list(limit=20)
        assert (model.id, model.type, model.display_name) == (str(tiny_model), "model", model.id)
        assert client.models.retrieve(str(tiny_model)).created_at.year == 1970
        with pytest.raises(anthropic.NotFoundError):
            client.models.retrieve("claude-unknown")
    with openai.OpenAI(base_url=server.openai_url, **key) as client:
        assert [m.id for m in client.models.list()] == [str(tiny_model)]


def test_the_key_and_the_inference_key_open_them(
    make_server: MakeServer, tiny_model: Path, http: Any
) -> None:
    server = make_server(api_key="secret-key-1")
    server.state.models.register(ModelSpec(name="agent", base_model=str(tiny_model)))
    routes: list[Any] = [("GET", "/", {}), ("HEAD", "/", {}), ("GET", "/version", {})]
    routes += [("POST", "/tokenize", {"model": "agent", "prompt": "x"})]
    routes += [("POST", "/detokenize", {"model": "agent", "tokens": [1]})]
    for url in (server.control_url, server.inference_url):
        for method, path, body in routes:
            for key in ("secret-key-1", inference_key(server.state.settings)):
                headers = {"x-api-key": str(key)}
                answer = http.request(method, url + path, json=body, headers=headers)
                assert answer.status_code == 200, (path, answer.text)
            status = http.request(method, url + path, json=body).status_code
            assert status == (200 if path == "/" else 401), path


def test_the_limit_is_that_of_the_requested_model(
    http: Any, server: Server, tiny_model: Path
) -> None:
    base = str(tiny_model)  # 512 positions, and the server allows 8,192 tokens
    for name, length in (("short", 80), ("long", 4096)):
        spec = ModelSpec(name=name, base_model=base, defaults={"max_seq_length": length})
        server.state.models.register(spec)
    for model, limit in (("short", 80), ("short@0", 80), ("long", 512), (base, 512)):
        answer = http.post("/tokenize", json={"model": model, "prompt": "x"}).json()
        assert answer["max_model_len"] == limit, model
