"""`hone eval` over a hone server: the base model, its steps, and a judge that is trained there."""

import asyncio
import json
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import pytest_asyncio
import yaml
from tests.finetune.worlds import adapter_for, collected, finetuning
from tests.prose import Prose, place_of
from tests.server.conftest import MakeServer

from hone import LocalBackend
from hone.errors import ConfigError
from hone.evaluation.base import EvalOptions
from hone.evaluation.run import EvalSummary, evaluate
from hone.workflow.run import RunOptions, run_inputs

AGENT = """
async def ask(input, llm):
    answer = await llm.chat([{"role": "user", "content": input}], max_tokens=4)
    return answer.choices[0].message.content or "nothing"

async def words(output, llm):
    answer = await llm.chat([{"role": "user", "content": output}], max_tokens=2)
    return float(answer.usage.completion_tokens)
"""

ROWS = [{"id": f"r{n}", "question": f"word {n}", "generated_answer": None} for n in range(2)]


class Workbench:
    """A directory with an agent, rows, and a configuration that names a model of a server."""

    def __init__(self, path: Path, server_url: str, **backend: Any) -> None:
        self.path, self.out = path, path / "out"
        (path / "served_agent.py").write_text(AGENT)
        (path / "rows.json").write_text(json.dumps(ROWS))
        address = urlsplit(server_url)
        backend = {"ip": address.hostname, "port": address.port, "project": "suite", **backend}
        self.llm: dict[str, Any] = {"_type": "trainable"}
        self.config: dict[str, Any] = {
            "llms": {"policy": self.llm},
            "workflow": {"_type": "python", "target": "served_agent.py:ask", "llm": "policy"},
            "eval": {
                "general": {
                    "output_dir": str(self.out),
                    "dataset": {"_type": "json", "file_path": "rows.json"},
                },
                "evaluators": {"calls": {"_type": "avg_num_llm_calls"}},
            },
            "trainer_adapters": {"hone": {"_type": "hone_server", "backend": backend}},
            "finetuning": {"trainer_adapter": "hone"},
        }

    @property
    def file(self) -> Path:
        file = self.path / "config.yml"
        file.write_text(yaml.safe_dump(self.config, sort_keys=False))
        return file

    async def evaluate(self, model: str | None, **options: Any) -> EvalSummary:
        self.llm.pop("model_name", None)
        self.llm |= {} if model is None else {"model_name": model}
        return await asyncio.to_thread(evaluate, EvalOptions(self.file, **options))

    @property
    def steps(self) -> set[tuple[str, int]]:
        """Model asked for and step that answered, of every call of the last evaluation."""
        entries = json.loads((self.out / "workflow_output.json").read_text())
        payloads = [one["payload"] for entry in entries for one in entry["intermediate_steps"]]
        assert len(payloads) == len(ROWS)
        return {(p["name"], p["metadata"]["hone"]["policy_step"]) for p in payloads}


@pytest_asyncio.fixture
async def trained(server: LocalBackend, tiny_model: Path, tmp_path: Path) -> Workbench:
    """A model with two steps, of which the first is the best."""
    adapter = adapter_for(server, tiny_model)
    await adapter.initialize(finetuning())
    for epoch in range(2):
        groups = await collected(adapter, f"run-{adapter.model.name}-{epoch}", epoch=epoch)
        status = await adapter.wait_until_complete(await adapter.submit(groups))
        assert (status.metadata or {}).get("step") == epoch + 1, status
    for step, reward in ((0, 0.1), (1, 0.9), (2, 0.5)):
        await adapter.log_metrics({"reward": reward}, split="val", step=step)
    name = adapter.model.name
    await adapter.model.close()
    await adapter.close()
    return Workbench(tmp_path, server.base_url, name=name, base_model=str(tiny_model), rank=4)


@pytest.mark.slow
async def test_the_base_model_the_newest_step_and_any_other_are_evaluated(
    prose: Prose, trained: Workbench, tiny_model: Path
):
    name = trained.config["trainer_adapters"]["hone"]["backend"]["name"]
    for model, model_name, step in (
        (None, f"suite/{name}", 2),
        (f"{name}@1", f"{name}@1", 1),
        (f"{name}@best", f"{name}@best", 1),
        (f"suite/{name}@0", f"suite/{name}@0", 0),
        (str(tiny_model), str(tiny_model), 0),
    ):
        summary = await trained.evaluate(model)
        assert not summary.failed, summary.message
        assert (summary.items, summary.evaluators[0].average_score) == (2, 1.0)
        assert trained.steps == {(model_name, step)}
    # The same by the address alone, as a model is used once its training is over.
    served = trained.config.pop("trainer_adapters")["hone"]["backend"]
    del trained.config["finetuning"]
    trained.llm["base_url"] = f"http://127.0.0.1:{served['port']}/v1"
    assert not (await trained.evaluate(f"{name}@best")).failed
    assert trained.steps == {(f"{name}@best", 1)}
    (result,) = await asyncio.to_thread(run_inputs, RunOptions(trained.file, input=("word",)))
    assert [(c.model, c.policy_step) for c in result.calls] == [(f"{name}@best", 1)]
    # A step that is not there is refused before anything runs, and the last evaluation stays.
    for wrong in (f"{name}@7", f"suite/{name}@7"):
        with pytest.raises(ConfigError) as caught:
            await trained.evaluate(wrong)
        prose(caught, served=served["port"])
    assert trained.steps == {(f"{name}@best", 1)}
    # The server reports a model that is not registered.
    summary = await trained.evaluate("nobody@3")
    assert summary.failed_items == 2 and "no model called 'nobody@3' is served" in summary.message


@pytest.mark.slow
async def test_a_best_step_that_nothing_measured_is_refused(
    prose: Prose, server: LocalBackend, tiny_model: Path, tmp_path: Path
):
    bench = Workbench(
        tmp_path, server.base_url, name="unmeasured", base_model=str(tiny_model), rank=4
    )
    with pytest.raises(ConfigError) as caught:
        await bench.evaluate("unmeasured@best")
    prose(caught)


@pytest.mark.slow
async def test_a_model_in_training_can_judge_existing_answers(
    make_server: MakeServer, tiny_model: Path, tmp_path: Path
):
    server = make_server(['{"reasoning": "so so", "score": 4}'])
    bench = Workbench(
        tmp_path,
        server.control_url,
        inference_port=urlsplit(server.inference_url).port,
        name="judge",
        base_model=str(tiny_model),
    )
    rows = [{**row, "generated_answer": f"said {n}"} for n, row in enumerate(ROWS)]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    bench.config["eval"]["evaluators"] = {
        "judged": {"_type": "llm_judge", "llm": "policy"},
        "words": {"_type": "python", "target": "served_agent.py:words", "llm": "policy"},
    }
    summary = await bench.evaluate(None, skip_workflow=True)
    assert not summary.failed, summary.message
    # 4 of 10; and two tokens each, where it is stopped.
    assert [one.average_score for one in summary.evaluators] == [0.4, 2.0]
    # Two items, each judged by two evaluators; the workflow made no call.
    assert len(server.engine.requests) == 4


async def test_a_judge_that_is_not_served_is_named(prose: Prose, tmp_path: Path):
    bench = Workbench(tmp_path, "http://127.0.0.1:9")
    del bench.config["trainer_adapters"], bench.config["finetuning"]
    bench.config["eval"]["evaluators"] = {"judged": {"_type": "llm_judge", "llm": "policy"}}
    with pytest.raises(ConfigError) as caught:
        await bench.evaluate(None, skip_workflow=True)
    prose(caught)
    assert place_of(caught).endswith("config.yml:2")


@pytest.mark.e2e
async def test_eval_and_run_use_the_server_that_holds_the_root(
    tiny_model: Path, tmp_path: Path
) -> None:
    with LocalBackend(tmp_path / "hone") as holder:
        holder.start()
        bench = Workbench(tmp_path, holder.base_url, name="shared", base_model=str(tiny_model))
        backend = bench.config["trainer_adapters"]["hone"]["backend"]
        del backend["ip"], backend["port"]
        backend["root"] = str(tmp_path / "hone")
        summary = await bench.evaluate(None)
        assert not summary.failed, summary.message
        (result,) = await asyncio.to_thread(run_inputs, RunOptions(bench.file, input=("word",)))
        assert result.failure is None
        health = await holder.health()
    assert health["status"] == "ok"
    log = (tmp_path / "hone" / "logs" / "server.log").read_text()
    assert log.count("server started") == 1
