"""The examples' modules by folder, and a model that answers from a script through a real client."""

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx2
import openai
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def example() -> Iterator[Callable[[str, str], ModuleType]]:
    """`example(folder, module)`: loaded anew; the folder is importable as hone makes it."""
    before, path = dict(sys.modules), list(sys.path)

    def load(folder: str, name: str) -> ModuleType:
        sys.path.insert(0, str(EXAMPLES / folder))
        spec = importlib.util.spec_from_file_location(name, EXAMPLES / folder / f"{name}.py")
        assert spec is not None and spec.loader is not None, name
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        return module

    yield load
    sys.path[:] = path
    for name in set(sys.modules) - set(before):
        if str(EXAMPLES) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def scripted(answer: Callable[[list[dict[str, Any]]], str], **params: Any) -> Any:
    """An `llm` as agents get it: the real client, over a wire that ends in this process.

    `requests` collects the request bodies.
    """
    requests: list[dict[str, Any]] = []

    def reply(request: httpx2.Request) -> httpx2.Response:
        body = json.loads(request.content)
        requests.append(body)
        choice = {
            "index": 0,
            "finish_reason": "stop",
            "message": {"role": "assistant", "content": answer(body["messages"])},
        }
        head = {"id": "c", "object": "chat.completion", "created": 0, "model": body["model"]}
        return httpx2.Response(200, json={**head, "choices": [choice]})

    client = openai.AsyncOpenAI(
        base_url="http://model.invalid/v1",
        api_key="none",
        http_client=openai.DefaultAsyncHttpxClient(transport=httpx2.MockTransport(reply)),
    )
    return SimpleNamespace(client=client, model="scripted", params=params, requests=requests)
