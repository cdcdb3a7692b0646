"""`_type: python`: targets, their arguments, and mistakes in them."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.prose import Prose
from tests.workflow.endpoint import Endpoint, Reply, serving

from hone.config.build import build
from hone.config.schema import read
from hone.errors import ConfigError
from hone.workflow.target import load_target


@pytest.fixture(autouse=True)
def modules_are_forgotten(tmp_path: Path) -> Iterator[None]:
    path = list(sys.path)
    yield
    assert sys.path == path, "the directory is importable while the target loads, and then not"
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


def document(directory: Path, workflow: str, more: str = "") -> Any:
    file = directory / "config.yml"
    file.write_text(f"workflow: {{_type: python, {workflow}}}\n{more}")
    return read(file)


async def run(directory: Path, workflow: str, input: Any, more: str = "") -> Any:
    async with build(document(directory, workflow, more)) as builder:
        return await (await builder.get_workflow())(input)


async def test_a_file_beside_the_yaml_can_import_the_files_beside_it(tmp_path: Path):
    (tmp_path / "agent_b7.py").write_text(
        "from words_b7 import shout\nasync def run(input: str):\n    return shout(input)\n"
    )
    (tmp_path / "words_b7.py").write_text("def shout(text):\n    return text.upper()\n")
    assert await run(tmp_path, "target: 'agent_b7.py:run'", "hi") == "HI"
    assert load_target("agent_b7.py:run", tmp_path) is sys.modules["agent_b7"].run
    assert load_target("agent_b7:run", tmp_path) is sys.modules["agent_b7"].run


async def test_a_file_in_a_folder_and_a_module_of_a_package(tmp_path: Path):
    package = tmp_path / "pack_b7" / "inner"
    package.mkdir(parents=True)
    (package / "agent.py").write_text(
        "class Agent:\n    @staticmethod\n    def run(input):\n        return [input]\n"
    )
    assert await run(tmp_path, "target: 'pack_b7.inner.agent:Agent.run'", "a") == ["a"]
    assert await run(tmp_path, "target: 'pack_b7/inner/agent.py:Agent.run'", "b") == ["b"]


async def test_two_files_with_the_same_name_are_two_modules(tmp_path: Path):
    for number in "12":
        (tmp_path / number).mkdir()
        code = f"def run(input):\n    return {number}\n"
        (tmp_path / number / "agent_b8.py").write_text(code)
        (tmp_path / number / "json.py").write_text(code)
    import json

    for name in ("agent_b8", "json"):  # the second hides nothing of the standard library's
        got = [load_target(f"{name}.py:run", tmp_path / number)("x") for number in "12"]
        assert got == [1, 2]
        again = load_target(f"{name}.py:run", tmp_path / "2")
        assert again is load_target(f"{name}.py:run", tmp_path / "2")
    assert sys.modules["json"] is json


AGENT = """
import hone

async def agent(input, llm, functions, greeting, loud=False):
    results = await functions["search"]({"query": input, "limit": 2})
    answer = await llm.chat([{"role": "user", "content": f"{greeting} {results}"}], top_p=0.5)
    hone.step("found", value=len(results))
    return answer.choices[0].message.content

def search(query: str, limit: int, factor: int) -> list:
    return [query] * limit * factor
"""


async def test_it_gets_the_model_the_functions_and_the_arguments(tmp_path: Path):
    (tmp_path / "agent_c1.py").write_text(AGENT)
    endpoint = Endpoint(Reply("found"))
    async with serving(endpoint) as url:
        more = (
            f"llms: {{m: {{_type: openai, model: tiny, base_url: '{url}', top_k: 4}}}}\n"
            "functions: {search: {_type: python, target: 'agent_c1.py:search', args: {factor: 2}}}\n"
        )
        workflow = (
            "target: 'agent_c1.py:agent', llm: m, functions: [search], args: {greeting: hello}"
        )
        assert await run(tmp_path, workflow, "x", more) == "found"
    (body,) = endpoint.bodies
    # search("x", 2, factor=2) is ["x"] * 4
    assert body["messages"][0]["content"] == "hello ['x', 'x', 'x', 'x']"
    assert (body["model"], body["top_p"], body["top_k"]) == ("tiny", 0.5, 4)


async def test_a_row_fills_several_parameters(tmp_path: Path):
    (tmp_path / "agent_c2.py").write_text(
        "def play(board: list, turn: str, depth: int = 1):\n    return board, turn, depth\n"
    )
    row = '{"board": [1], "turn": "x"}'
    assert await run(tmp_path, "target: 'agent_c2.py:play'", row) == ([1], "x", 1)
    assert await run(tmp_path, "target: 'agent_c2.py:play', args: {depth: 3}", row) == ([1], "x", 3)


BROKEN = """
def agent(input, model_name=None): ...
def wants(input, llm, functions=None): ...
def wants_functions(input, functions): ...
def nothing(): ...
def only_llm(llm): ...
async def pieces(input):
    yield input
def plain_pieces(input):
    yield input
anything = 3
"""


@pytest.mark.parametrize(
    "workflow",
    [
        "target: agent",
        "target: 'a.py:'",
        "target: 'missing.py:agent'",
        "target: 'no.such.module:agent'",
        "target: 'broken_c3.py:agnt'",
        "target: 'broken_c3.py:anything'",
        "target: 'broken_c3.py:nothing'",
        "target: 'broken_c3.py:wants'",
        "target: 'broken_c3.py:wants_functions'",
        "target: 'broken_c3.py:agent', llm: m",
        "target: 'broken_c3.py:agent', args: {modelname: a}",
        "target: 'broken_c3.py:pieces'",
        "target: 'broken_c3.py:plain_pieces'",
        "target: 'broken_c3.py:only_llm', llm: m",
    ],
)
async def test_a_function_that_cannot_be_called_is_refused_when_it_is_built(
    prose: Prose, tmp_path: Path, workflow: str
):
    (tmp_path / "broken_c3.py").write_text(BROKEN)
    more = "llms: {m: {_type: openai, model: m, base_url: 'http://127.0.0.1:9/v1'}}\n"
    with pytest.raises(ConfigError) as caught:
        async with build(document(tmp_path, workflow, more)) as builder:
            await builder.get_workflow()
    prose(caught)


async def test_an_error_of_a_file_that_loads_is_reported_with_its_place(
    prose: Prose, tmp_path: Path
):
    (tmp_path / "fails_c4.py").write_text("import no_such_thing_c4\n")
    with pytest.raises(ConfigError) as refused:
        load_target("fails_c4.py:run", tmp_path)
    prose(refused)
    for source in (
        "x = 1\n1 / 0\n",
        "import json\njson.loads('')\n",
        "def run(input:\n",
        "raise SystemExit(4)\n",
    ):
        (tmp_path / "fails_c5.py").write_text(source)
        with pytest.raises(ConfigError) as caught:
            load_target("fails_c5.py:run", tmp_path)
        prose(caught)
        assert "fails_c5" not in sys.modules
