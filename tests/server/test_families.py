"""A server over a model that hone's own decoder does not know: its jobs, its notes, its adapters."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from tests.fakes import ScriptedEngine
from tests.learner.families import FAMILIES
from tests.prose import Prose, place_of
from tests.server.small_server import SmallServer, spec, token_groups

from hone.errors import ConfigError, ModelUnsupported
from hone.inference.embedded.engine import EmbeddedEngine
from hone.server.train.model_args import checked_spec
from hone.types import Call

BY_NAME = {family.name: family for family in FAMILIES}


def write(name: str, directory: Path, tokenizer: Any) -> Path:
    BY_NAME[name].model().save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def accept(where: str, key: str, value: Any) -> bool:
    """The check of engine_args of a vLLM that takes all of them."""
    return True


async def test_a_job_over_experts_says_what_it_does_not_train(
    tmp_path: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture
):
    base = write("Qwen3-MoE", tmp_path / "moe", tokenizer)
    caplog.set_level(logging.INFO)
    engine = ScriptedEngine(["ok"], tokenizer=tokenizer)
    async with SmallServer.started(tmp_path / "hone", open_engine=lambda _: engine) as server:
        record = server.models.register(spec(base))
        groups = token_groups()
        for call in (c for g in groups for t in g.trajectories for c in t.calls):
            _within(call)
        job = await server.ended(server.submit(record, groups).id)
        learned = [e.data for e in server.jobs.events(job.id, limit=-1) if e.type == "learned"]
        assert learned and learned[0]["metrics"]["learn/optimizer_steps"] == 3, job
        (note,) = learned[0]["notes"]
        assert note.startswith("the experts (") and "stay frozen" in note
        again = await server.ended(server.submit(record, groups).id)
        assert again.id != job.id
    assert [r.getMessage() for r in caplog.records].count(note) == 1  # once for a learner


def _within(call: Call) -> None:
    """Ids of the tiny families' vocabulary."""
    call.prompt_ids[:] = [i % 60 for i in call.prompt_ids]
    call.completion_ids[:] = [i % 60 for i in call.completion_ids]


async def test_an_adapter_covers_the_layers_that_were_asked_for(tmp_path: Path, tokenizer: Any):
    base = write("Granite", tmp_path / "granite", tokenizer)
    sent = spec(base, peft_args={"target_modules": ["q_proj", "v_proj"]})
    settled = checked_spec(sent, accept)
    assert settled.target_modules == ["q_proj", "v_proj"] and settled.peft_args == {}
    engine = ScriptedEngine(["ok"], tokenizer=tokenizer)
    async with SmallServer.started(tmp_path / "hone", open_engine=lambda _: engine) as server:
        record = server.models.register(settled)
        groups = token_groups()
        for call in (c for g in groups for t in g.trajectories for c in t.calls):
            _within(call)
        job = await server.ended(server.submit(record, groups).id)
        steps = [c.path for c in server.checkpoints.list(record.key)]
        assert len(steps) == 2, job
        for path in steps:
            config = json.loads((path / "adapter_config.json").read_text())
            assert config["target_modules"] == ["q_proj", "v_proj"]


async def test_a_model_with_layers_that_cannot_be_trained_gets_no_first_step(
    prose: Prose, tmp_path: Path, tokenizer: Any, tiny_model: Path
):
    """As for a base model that had to be downloaded, so that it was unknown when registered."""
    engine = ScriptedEngine(["ok"], tokenizer=tokenizer)
    async with SmallServer.started(tmp_path / "hone", open_engine=lambda _: engine) as server:
        record = server.models.register(spec(tiny_model, target_modules=["q_proj"]))
        with pytest.raises(ConfigError) as caught:
            await server.service.prepare(record)
        prose(caught)
        assert place_of(caught) == "target_modules"
        assert server.checkpoints.list(record.key) == []


@pytest.mark.parametrize(
    "sent", [{"target_modules": ["q_proj"]}, {"peft_args": {"target_modules": ["q_proj"]}}]
)
def test_the_embedded_engine_takes_adapters_on_all_linear_layers(
    prose: Prose, sent: dict[str, Any]
):
    with pytest.raises(ConfigError) as caught:
        checked_spec(spec(Path("tiny"), **sent))
    prose(caught)
    everything = spec(Path("tiny"), peft_args={"target_modules": "all-linear"})
    assert checked_spec(everything, accept).target_modules == []


def test_the_embedded_engine_names_vllm(prose: Prose, tmp_path: Path, tokenizer: Any):
    base = write("Granite", tmp_path / "granite", tokenizer)
    with pytest.raises(ModelUnsupported) as caught:
        EmbeddedEngine.open(str(base))
    prose(caught)
