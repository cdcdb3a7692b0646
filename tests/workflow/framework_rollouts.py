"""Run workflows of a framework in its environment; see test_frameworks.py.

In:   JSON on stdin: a base URL, and blocks of `workflow:` by name, some with a `timeout_s`
Out:  JSON on stdout's last line: of each block two rollouts at a time, or why it cannot be built;
      `notes`: by name, the lines of the file `args.note` once the workflow is closed
"""

import asyncio
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

import hone.composition  # noqa: F401  # hone is on the path here, not installed
from hone.config.build import Served, build
from hone.config.policy import Trained, address_of
from hone.config.schema import read
from hone.errors import ConfigError
from hone.workflow.run import run_rollout

AGENTS = Path(__file__).with_name("framework_agents.py")


async def rollouts(url: str, name: str, workflow: dict[str, Any]) -> Any:
    timeout_s = workflow.pop("timeout_s", None)
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "config.yml"
        target = workflow["target"].replace("agents.py", str(AGENTS))
        llm = {"_type": "openai", "model": "tiny", "base_url": url, "api_key": "key"}
        document = {"llms": {"m": llm}, "workflow": {**workflow, "target": target}}
        file.write_text(yaml.safe_dump(document))
        trained = Trained("mine", frozenset({"mine"}), "base", frozenset({address_of(url)}))
        try:
            async with build(read(file)) as builder:
                builder.served = Served(url, "key", "mine", "localhost", trained)
                run = await builder.get_workflow()
                results = await asyncio.gather(
                    *(
                        run_rollout(
                            *(run, f"{name} {i}"),
                            id=f"{name}:{i}",
                            host="127.0.0.1",
                            timeout_s=timeout_s,
                        )
                        for i in range(2)
                    )
                )
        except ConfigError as error:
            return str(error)
    return [
        {
            "output": result.output,
            "failure": result.failure and [result.failure.kind, result.failure.reason],
            "why": result.failure and result.failure.failure.traceback[-2000:],
            "functions": [call.function for call in result.calls],
        }
        for result in results
    ]


async def main() -> None:
    given = json.load(sys.stdin)
    before = dict(os.environ)
    results: dict[str, Any] = {"notes": {}}
    for name, workflow in given["workflows"].items():
        results[name] = await rollouts(given["url"], name, workflow)
        note = Path(workflow.get("args", {}).get("note", ""))
        results["notes"][name] = note.read_text().split() if note.is_file() else []
    results["environment"] = {**before, **os.environ} == before
    sys.stdout.write("\n" + json.dumps(results) + "\n")


asyncio.run(main())
