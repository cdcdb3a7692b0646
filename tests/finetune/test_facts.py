"""What must not change under a run."""

from pathlib import Path

import pytest

from hone.config.build import Served
from hone.config.schema import Document, FinetuneRunConfig, read
from hone.finetune.adapter_config import ARTBackendConfig
from hone.finetune.facts import HIDDEN, address_of, again, evaluators_of, facts_of, shown

YAML = """
llms:
  policy: {_type: openai, model_name: m, base_url: "http://localhost:8000/v1", api_key: sesame}
eval:
  general:
    max_concurrency: 3
    dataset: {_type: json, file_path: rows.json}
trainer_adapters:
  server:
    _type: openpipe_art_trainer_adapter
    backend: {ip: localhost, port: 7623, name: tuned}
finetuning:
  num_epochs: 3
  seed: 4
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.json").write_text("[]")
    (tmp_path / "train.yml").write_text(YAML)
    return tmp_path / "train.yml"


def test_it_keeps_what_is_learned_and_leaves_out_how_long_and_where(file: Path):
    facts = facts_of(read(file), FinetuneRunConfig())
    # sha256 of "[]"
    empty = "4f53cda18c2baa0c0354bb5f9a3ecbe5ed12ab4d8e11ba873c2f11161202b945"
    assert facts == {
        "llms": {"policy": {"_type": "openai", "model_name": "m", "api_key": HIDDEN}},
        "eval": {"general": {"dataset": {"_type": "json", "file_path": "rows.json"}}},
        "trainer_adapters": {
            "server": {"_type": "openpipe_art_trainer_adapter", "backend": {"name": "tuned"}}
        },
        "finetuning": {"seed": 4},
        "command": {
            "result_json_path": "$",
            "dataset": empty,
            "validation_dataset": None,
            "validation_config_file": None,
        },
    }


def test_another_content_of_the_dataset_is_another_run(file: Path):
    before = facts_of(read(file), FinetuneRunConfig())
    (file.parent / "rows.json").write_text('[{"question": "?"}]')
    assert facts_of(read(file), FinetuneRunConfig()) != before
    moved = FinetuneRunConfig(dataset=Path("elsewhere.json"))
    assert facts_of(read(file), moved)["command"]["dataset"] == "elsewhere.json"


def test_no_secret_is_shown():
    told = {"api_key": "a", "HF_TOKEN": "b", "a": [{"secret": "c"}], "id_key": "d", "tokens": 3}
    assert shown(told) == {
        "api_key": HIDDEN,
        "HF_TOKEN": HIDDEN,
        "a": [{"secret": HIDDEN}],
        "id_key": "d",
        "tokens": 3,
    }
    assert shown({"api_key": None, "path": Path("x")}) == {"api_key": None, "path": "x"}


def test_where_the_result_is():
    served = Served(base_url="http://gpu:8000/v1", api_key="k", model="m")
    theirs = ARTBackendConfig.model_validate({"ip": "gpu", "port": 7623})
    assert address_of(served, theirs) == {"base_url": "http://gpu:8000/v1"}
    usual = ARTBackendConfig.model_validate({})
    assert address_of(served, usual) == {}  # `hone serve` finds it without a word
    own = ARTBackendConfig.model_validate({"root": "runs/server"})
    assert address_of(served, own) == {"root": "runs/server"}
    assert address_of(None, None) == {}


def test_the_command_that_goes_on_does_not_begin_anew():
    told = ["finetune", "--config_file=a.yml", "--fresh"]
    assert again(told, "auto") == ["finetune", "--config_file=a.yml"]
    assert again(told[:2], "never") == [*told[:2], "-o", "finetuning.resume", "auto"]


def test_two_evaluators_of_one_name_are_told_apart(tmp_path: Path):
    def document(name: str, evaluator: str) -> Document:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"eval: {{evaluators: {{reward: {evaluator}}}}}")
        return read(tmp_path / name)

    shaped = document("train.yml", '{_type: python, target: "agent.py:shaped"}')
    assert evaluators_of("reward", shaped, None) == {"evaluator": "reward"}
    same = document("val.yml", '{_type: python, target: "agent.py:shaped"}')
    assert evaluators_of("reward", shaped, same) == {"evaluator": "reward"}
    exact = document("val.yml", '{_type: python, target: "agent.py:exact"}')
    assert evaluators_of("reward", shaped, exact) == {
        "evaluator": "reward (agent.py:shaped)",
        "validation_evaluator": "reward (agent.py:exact)",
    }
    other = document("val.yml", "{_type: exact_match}")
    assert evaluators_of("reward", shaped, other)["validation_evaluator"] == "reward (exact_match)"
    # The same words in another directory name another file.
    elsewhere = document("other/val.yml", '{_type: python, target: "agent.py:shaped"}')
    assert evaluators_of("reward", shaped, elsewhere) == {
        "evaluator": "reward (train.yml)",
        "validation_evaluator": "reward (val.yml)",
    }
