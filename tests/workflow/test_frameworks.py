"""`_type: langgraph`, `adk` and `llama_index`: real agents of each, in the frameworks' environment."""

import asyncio
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.conformance.capture import interpreter
from tests.patience import PATIENCE_S
from tests.prose import Prose
from tests.workflow.endpoint import Endpoint, Reply, serving

from hone.config.build import build
from hone.config.schema import read
from hone.errors import ConfigError
from hone.wire.rollout import FUNCTION_HEADER, ROLLOUT_HEADER

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("framework_rollouts.py")


class Model(Endpoint):
    """Calls the first tool once, then answers."""

    def reply_to(self, body: dict[str, Any]) -> Reply:
        if body.get("tools") and body["messages"][-1]["role"] != "tool":
            return Reply("", tools=[(body["tools"][0]["function"]["name"], '{"city": "Rome"}')])
        return Reply("done")

    def seen(self, name: str) -> dict[str, list[str | None]]:
        """The function paths of the requests that carry the question of each rollout."""
        paths: dict[str, list[str | None]] = {}
        for headers, body in self.requests:
            question = re.search(rf"{name} [01]", json.dumps(body["messages"]))
            if question:
                rollout = headers.get(ROLLOUT_HEADER.lower(), "")
                assert rollout == question[0].replace(" ", ":"), "a call of another rollout"
                paths.setdefault(rollout, []).append(headers.get(FUNCTION_HEADER.lower()))
        return paths


async def results_of(
    model: Endpoint, workflows: dict[str, dict[str, Any]], **env: str
) -> dict[str, Any]:
    python = await asyncio.to_thread(interpreter, "a")
    async with serving(model) as url:
        program = await asyncio.create_subprocess_exec(
            *(str(python), str(SCRIPT)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src"), **env},
        )
        given = json.dumps({"url": url, "workflows": workflows}).encode()
        out, err = await asyncio.wait_for(program.communicate(given), PATIENCE_S)
    assert program.returncode == 0, err.decode()[-3000:]
    return json.loads(out.decode().splitlines()[-1])


def check(model: Model, results: Any, name: str, paths: Sequence[str], output: Any) -> None:
    """Both rollouts gave the output, and their calls carry these paths, here and at the server."""
    for result in results[name]:
        assert result["failure"] is None, result["why"]
        assert result["output"] == output
        assert sorted(result["functions"]) == sorted(paths)
    at_server = model.seen(name)
    assert set(at_server) == {f"{name}:0", f"{name}:1"}
    assert all(sorted(map(str, seen)) == sorted(paths) for seen in at_server.values())


async def test_graphs_of_langgraph():
    model, block = Model(), {"_type": "langgraph"}
    workflows = {
        "react": {**block, "target": "agents.py:react"},
        "nested": {**block, "target": "agents.py:nested", "args": {"note": "noted"}},
        "own": {**block, "target": "agents.py:nested", "per_rollout": True},
        "endless": {**block, "target": "agents.py:endless", "recursion_limit": 4}
        | {"input_key": "x", "output_key": None},
        "import": {**block, "target": "agents.py:at_import"},
        "tool": {**block, "target": "agents.py:weather"},
        "broken": {**block, "target": "agents.py:broken"},
        "typo": {**block, "target": "agents.py:nested", "args": {"nte": 1}},
        "object": {**block, "target": "agents.py:at_import", "per_rollout": True},
    }
    results = await results_of(model, workflows, HONE_TEST_AT_IMPORT="1", OPENAI_API_KEY="other")
    check(model, results, "react", ["<workflow>.model"] * 2, "done")
    nodes = ["<workflow>.plan", "<workflow>.team.act"]
    check(model, results, "nested", nodes, "noted")
    check(model, results, "own", nodes, "")
    check(model, results, "import", ["<workflow>.ask"], "done")
    assert [r["failure"] for r in results["endless"]] == [["policy", "step_limit"]] * 2
    assert re.search(r"failed: .*\.py:\d+: KeyError: 'no such tool'", results["broken"])
    assert "has the parameter 'city', which hone does not pass; set args.city" in results["tool"]
    assert "has no parameter 'nte', but args.nte is set. Did you mean 'note'?" in results["typo"]
    assert "per_rollout is set, and target" in results["object"]
    assert results["environment"], "variables are set while a target is loaded, and then not"


async def test_agents_of_adk(tmp_path: Path):
    tools = {"_type": "adk", "target": "agents.py:adk_tools"}
    model, block = Model(), {"_type": "adk"}
    workflows = {
        "helper": {**block, "target": "agents.py:adk_helper"},
        "team": {**block, "target": "agents.py:adk_team"},
        "limit": {**block, "target": "agents.py:adk_helper", "max_llm_calls": 1},
        "shared": {**tools, "args": {"note": str(tmp_path / "shared")}},
        "each": {**tools, "args": {"note": str(tmp_path / "each")}, "per_rollout": True},
        "own": {**tools, "args": {"note": str(tmp_path / "own"), "own": True}},
    }
    results = await results_of(model, workflows)
    check(model, results, "helper", ["<workflow>.helper"] * 2, "done")
    team = ["<workflow>.team.both.a", "<workflow>.team.both.b", "<workflow>.team.last"]
    check(model, results, "team", team, "done")
    assert [r["failure"] for r in results["limit"]] == [["policy", "step_limit"]] * 2
    closed = {"shared": ["closed"], "each": ["closed"] * 2, "own": []}
    for name, lines in closed.items():
        check(model, results, name, ["<workflow>.helper"] * 2, "done")
        assert results["notes"][name] == lines  # a Runner of the user's is theirs to close


async def test_agents_and_workflows_of_llama_index(tmp_path: Path):
    note = str(tmp_path / "note")
    model, block = Model(), {"_type": "llama_index"}
    workflows = {
        "helper": {**block, "target": "agents.py:index_helper"},
        "flow": {**block, "target": "agents.py:index_flow", "input_key": "question"},
        "limit": {**block, "target": "agents.py:index_helper", "max_iterations": 1},
        "wrong": {**block, "target": "agents.py:react"},
        "waits": {**block, "target": "agents.py:index_waits", "args": {"note": note}}
        | {"input_key": "question", "timeout_s": 2},
    }
    results = await results_of(model, workflows)
    check(model, results, "helper", ["<workflow>.helper"] * 2, "done")
    check(model, results, "flow", ["<workflow>.think"], "done")
    assert [r["failure"] for r in results["limit"]] == [["policy", "step_limit"]] * 2
    assert "it must return an agent or a Workflow of llama_index" in results["wrong"]
    assert [r["failure"] for r in results["waits"]] == [["infrastructure", "timeout"]] * 2
    assert sorted(results["notes"]["waits"]) == ["began", "began", "ended", "ended"]


@pytest.mark.parametrize(
    "kind",
    ["langgraph", "adk", "llama_index"],
)
async def test_a_framework_that_is_not_installed_names_its_extra(
    prose: Prose, tmp_path: Path, kind: str
):
    file = tmp_path / "config.yml"
    file.write_text(f"workflow: {{_type: {kind}, target: 'agent.py:agent'}}\n")
    with pytest.raises(ConfigError) as caught:
        async with build(read(file)) as builder:
            await builder.get_workflow()
    prose(caught)
