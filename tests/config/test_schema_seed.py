"""Every YAML block of the seed documents loads as it stands, and means what they say."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from hone.config.schema import Document, read

SEED = Path(__file__).parents[1] / "data" / "seed"

pytestmark = pytest.mark.usefixtures("plugin")


def over_the_basic_one(name: str, directory: Path) -> Document:
    """A block that is part of a document, put over the whole one by `base:`; its text unchanged."""
    file = directory / "whole.yml"
    text = (SEED / name).read_text(encoding="utf-8")
    file.write_text(f"base: {SEED / 'basic.yml'}\n{text}", encoding="utf-8")
    return read(file)


def plain_text(value: Any) -> Any:
    return value.get_secret_value() if isinstance(value, SecretStr) else value


@pytest.mark.parametrize("file", sorted(SEED.glob("*.yml")), ids=lambda f: f.stem)
def test_every_block_loads_alone_and_over_the_basic_one(file: Path, tmp_path: Path):
    read(file)
    over_the_basic_one(file.name, tmp_path)


def test_all_eight_blocks_are_tested():
    assert {f.stem for f in SEED.glob("*.yml")} == {
        *("basic", "trajectory_builder", "trainer_adapter", "trainer"),
        *("multi_gpu", "memory", "curriculum", "targeting"),
    }


def test_basic_models_and_workflow():
    document = read(SEED / "basic.yml")
    llm: Any = document.llms["training_llm"]
    assert llm.type_name == "openai"
    assert llm.model_name == "Qwen/Qwen2.5-3B-Instruct"
    assert str(llm.base_url) == "http://localhost:8000/v1"
    assert plain_text(llm.api_key) == "default"
    assert llm.temperature == 0.4
    workflow: Any = document.workflow
    assert (workflow.type_name, workflow.llm) == ("my_workflow", "training_llm")


def test_basic_evaluation():
    document = read(SEED / "basic.yml")
    general = document.eval.general
    assert general.max_concurrency == 16
    assert general.output_dir == Path(".tmp/nat/finetuning/eval")
    assert general.dataset is not None
    assert general.dataset.type_name == "json"
    assert general.dataset.file_path == Path("data/training_data.json")
    assert {k: v.type_name for k, v in document.eval.evaluators.items()} == {
        "my_reward": "my_custom_evaluator"
    }


def test_basic_training():
    document = read(SEED / "basic.yml")
    builder: Any = document.trajectory_builders["art_builder"]
    assert (builder.type_name, builder.num_generations) == ("rollouts", 2)
    adapter: Any = document.trainer_adapters["art_adapter"]
    assert adapter.type_name == "hone_server"
    assert (adapter.backend.ip, adapter.backend.port) == ("localhost", 7623)
    assert (adapter.backend.name, adapter.backend.project) == ("my_training_run", "my_project")
    assert adapter.backend.base_model == "Qwen/Qwen2.5-3B-Instruct"
    assert plain_text(adapter.backend.api_key) == "default"
    assert adapter.training.learning_rate == 1e-06  # a number, though YAML 1.1 reads it as text
    assert document.trainers["art_trainer"].type_name == "rl"
    run = document.finetuning
    assert run.enabled
    assert (run.trainer, run.trajectory_builder) == ("art_trainer", "art_builder")
    assert run.trainer_adapter == "art_adapter"
    assert run.reward_function is not None and run.reward_function.name == "my_reward"
    assert run.num_epochs == 20
    assert run.output_dir == Path(".tmp/nat/finetuning/output")


def test_the_reference_of_the_adapter(tmp_path: Path):
    adapter: Any = over_the_basic_one("trainer_adapter.yml", tmp_path).trainer_adapters[
        "art_adapter"
    ]
    assert (adapter.backend.ip, adapter.backend.port) == ("0.0.0.0", 7623)
    assert (adapter.backend.name, adapter.backend.project) == ("training_run_name", "project_name")
    assert adapter.backend.delete_old_checkpoints is False
    assert adapter.backend.init_args["max_seq_length"] == 8192
    assert adapter.backend.engine_args["gpu_memory_utilization"] == 0.9
    assert adapter.backend.engine_args["tensor_parallel_size"] == 1
    assert (adapter.training.learning_rate, adapter.training.beta) == (1e-06, 0.0)


def test_more_devices_and_less_memory(tmp_path: Path):
    adapter: Any = over_the_basic_one("multi_gpu.yml", tmp_path).trainer_adapters["art_adapter"]
    assert adapter.backend.engine_args == {
        "tensor_parallel_size": 2,
        "gpu_memory_utilization": 0.85,
    }
    assert adapter.backend.port == 7623  # from the basic one
    adapter = over_the_basic_one("memory.yml", tmp_path).trainer_adapters["art_adapter"]
    assert adapter.backend.init_args == {"max_seq_length": 4096}
    assert adapter.backend.engine_args == {"gpu_memory_utilization": 0.7}
    alone: Any = read(SEED / "memory.yml").trainer_adapters["art_adapter"]
    assert (alone.backend.ip, alone.backend.port) == (None, None)


def test_curriculum_and_targets(tmp_path: Path):
    run = over_the_basic_one("curriculum.yml", tmp_path).finetuning
    curriculum = run.curriculum_learning
    assert curriculum.enabled and not curriculum.sort_ascending
    assert (curriculum.initial_percentile, curriculum.increment_percentile) == (0.3, 0.2)
    assert (curriculum.expansion_interval, curriculum.min_reward_diff) == (5, 0.1)
    assert run.num_epochs == 20
    run = over_the_basic_one("targeting.yml", tmp_path).finetuning
    assert run.target_functions == ["my_agent_function", "tool_calling_function"]
    assert run.target_model == "training_llm"


def test_the_options_of_the_seed_documents():
    document = read(SEED / "basic.yml", [("finetuning.num_epochs", "50")])
    assert document.finetuning.num_epochs == 50
