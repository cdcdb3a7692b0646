"""What must not change between two starts of a run."""

from pathlib import Path
from typing import Any

import pytest
from tests.fakes import MemoryAdapter
from tests.finetune.test_journal import record

from hone.config.build import Served
from hone.config.schema import Document, FinetuneRunConfig, read
from hone.config.secrets import HIDDEN
from hone.finetune.adapter import HoneServerAdapter, HoneServerAdapterConfig
from hone.finetune.fingerprint import (
    differences,
    evaluators_of,
    fingerprint_of,
    resume_arguments,
)
from hone.finetune.journal import Journal

YAML = """
llms:
  policy: {_type: openai, model_name: m, base_url: "http://localhost:8000/v1", api_key: sesame}
eval:
  general:
    max_concurrency: 3
    dataset: {_type: json, file_path: rows.json}
trainer_adapters:
  server:
    _type: hone_server
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


def test_the_fingerprint_has_what_is_learned_and_not_durations_and_addresses(file: Path):
    facts = fingerprint_of(read(file), FinetuneRunConfig())
    # sha256 of "[]"
    empty = "4f53cda18c2baa0c0354bb5f9a3ecbe5ed12ab4d8e11ba873c2f11161202b945"
    assert facts == {
        "llms": {"policy": {"_type": "openai", "model_name": "m", "api_key": HIDDEN}},
        "eval": {"general": {"dataset": {"_type": "json", "file_path": "rows.json"}}},
        "trainer_adapters": {"server": {"_type": "hone_server", "backend": {"name": "tuned"}}},
        "finetuning": {"seed": 4},
        "code": {},
        "command": {
            "result_json_path": "$",
            "dataset": empty,
            "validation_dataset": None,
            "validation_config_file": None,
            "endpoint": None,
        },
        "files": {"command.dataset": "rows.json"},
    }
    # Where the workflow runs may change, but not whether its code is this one's.
    first, second = (FinetuneRunConfig(endpoint=f"http://{h}:1") for h in ("a", "b"))
    elsewhere = fingerprint_of(read(file), first)
    assert elsewhere == fingerprint_of(read(file), second)
    assert differences(facts, elsewhere) == ["command.endpoint: None then, True now"]


def test_another_content_of_the_dataset_is_another_run(file: Path):
    before = fingerprint_of(read(file), FinetuneRunConfig())
    (file.parent / "rows.json").write_text('[{"question": "?"}]')
    assert fingerprint_of(read(file), FinetuneRunConfig()) != before
    assert differences(before, fingerprint_of(read(file), FinetuneRunConfig())) == [
        "command.dataset: the content of rows.json has changed"
    ]
    (file.parent / "copy.json").write_text("[]")
    copied = fingerprint_of(read(file), FinetuneRunConfig(dataset=Path("copy.json")))
    assert differences(before, copied) == [], "a file may move"
    moved = FinetuneRunConfig(dataset=Path("elsewhere.json"))
    assert fingerprint_of(read(file), moved)["command"]["dataset"] == "elsewhere.json"


def test_the_code_of_a_run_is_what_its_functions_are_made_of(file: Path, monkeypatch: Any):
    near = file.parent
    target = 'workflow: {_type: python, target: "agent.py:run"}\n'
    file.write_text(target + YAML.replace("{_type: json,", "{_type: custom, function: rows.load,"))
    (near / "agent.py").write_text(
        "import json\nfrom tools import search\n\ndef run(x):\n    import late\n"
    )
    (near / "tools").mkdir()
    (near / "tools" / "__init__.py").write_text("")
    (near / "tools" / "search.py").write_text("from . import index\nfrom ..other import x\n")
    (near / "tools" / "index.py").write_text("import agent\n")
    (near / "late.py").write_text("")
    (near / "rows.py").write_text("def load(path): ...")
    (near / "unused.py").write_text("")
    expected = ["agent.py", "late.py", "rows.py"]
    expected += ["tools/__init__.py", "tools/index.py", "tools/search.py"]
    before = fingerprint_of(read(file), FinetuneRunConfig())
    assert list(before["code"]) == expected
    (near / "late.py").write_text("changed = True")
    after = fingerprint_of(read(file), FinetuneRunConfig())
    assert differences(before, after) == ["late.py: the code has changed"]
    (near / "late.py").unlink()
    assert differences(before, fingerprint_of(read(file), FinetuneRunConfig())) == [
        "late.py: no longer used"
    ]


@pytest.mark.parametrize("kind", ["langgraph", "adk", "llama_index"])
@pytest.mark.parametrize("block", ["workflow: ", "functions:\n  solver: "])
def test_the_code_of_a_frameworks_agent_counts_and_is_not_loaded(file: Path, kind: str, block: str):
    near = file.parent
    file.write_text(f'{block}{{_type: {kind}, target: "team.py:agent"}}\n' + YAML)
    (near / "team.py").write_text("import prompts\nraise RuntimeError\n")
    (near / "prompts.py").write_text("system = 'Be brief.'")
    before = fingerprint_of(read(file), FinetuneRunConfig())
    assert list(before["code"]) == ["prompts.py", "team.py"]
    (near / "prompts.py").write_text("system = 'Be long.'")
    after = fingerprint_of(read(file), FinetuneRunConfig())
    assert differences(before, after) == ["prompts.py: the code has changed"]


def test_the_code_of_a_program_is_what_its_command_names_and_what_is_copied(file: Path):
    near = file.parent / "yaml"
    for name, text in {
        "bin/agent.sh": "exec node",
        "bin/agent.mjs": "import './tools.mjs'",
        "src/main.py": "import helper",
        "src/helper.py": "",
        "files/prompt.md": "Be brief.",
        "files/node_modules/left-pad/index.js": "",
        "skeleton/data/rules.txt": "",
        "one.txt": "",
        "unused.txt": "",
        "../shared/team.mjs": "",
    }.items():
        (near / name).parent.mkdir(parents=True, exist_ok=True)
        (near / name).write_text(text)
    own = """
workflow:
  _type: command
  command: [bin/agent.sh, "{config_dir}/bin/agent.mjs", "{config_dir}/../shared/team.mjs", one.txt]
  files: [files, one.txt]
  workdir: skeleton
functions:
  other: {_type: command, command: [python, "{config_dir}/src/main.py", "{input}", LONG]}
""".replace("LONG", "/" + 5000 * "x")
    (near / "train.yml").write_text(own + YAML)
    outputs = [("finetuning.output_dir", "yaml/skeleton/out")]
    before = fingerprint_of(read(near / "train.yml", outputs), FinetuneRunConfig())
    counted = ["bin/agent.mjs", "bin/agent.sh", "files/prompt.md", "one.txt"]
    counted += ["skeleton/data/rules.txt", "src/helper.py", "src/main.py"]
    assert list(before["code"]) == sorted([*counted, "team.mjs"])
    for name in counted:
        (near / name).write_text("rewritten")
    (near / "unused.txt").write_text("rewritten")
    (near / "files/new.md").write_text("")
    (near / "skeleton/out").mkdir()
    (near / "skeleton/out/run.json").write_text("")
    after = fingerprint_of(read(near / "train.yml", outputs), FinetuneRunConfig())
    assert set(differences(before, after)) == {
        "files/new.md: code that the run did not use",
        "src/helper.py: no longer used",
        *(f"{name}: the code has changed" for name in counted if name != "src/helper.py"),
    }


@pytest.mark.parametrize(
    ("own", "changes"),
    [
        (
            "workflow: {_type: http, url: 'http://a:1/solve'}",
            {"workflow.url": "http://b:2/solve", "workflow.timeout_s": "9"},
        ),
        (
            "functions: {f: {_type: command, command: [agent]}}",
            {"functions.f.timeout_s": "9", "functions.f.keep_workdir": "failed"},
        ),
        (
            "",
            {
                "trainer_adapters.server.backend.ip": "10.0.0.5",
                "trainer_adapters.server.backend.advertise_url": "http://10.0.0.5:8000",
            },
        ),
    ],
)
def test_where_an_agent_is_and_how_long_it_may_take_are_free(
    file: Path, own: str, changes: dict[str, str]
):
    file.write_text(f"{own}\n{YAML}")
    before = fingerprint_of(read(file), FinetuneRunConfig())
    after = fingerprint_of(read(file, list(changes.items())), FinetuneRunConfig())
    assert differences(before, after) == []


def test_how_long_to_go_on_is_free_unless_the_learning_rate_depends_on_it(file: Path):
    longer = [("finetuning.num_epochs", "9")]
    named = [("finetuning.trainer_adapter", "server")]
    linear = [*named, ("trainer_adapters.server.training.schedule", "linear")]
    before, after = (
        fingerprint_of(read(file, o), FinetuneRunConfig()) for o in (named, named + longer)
    )
    assert differences(before, after) == []
    before, after = (
        fingerprint_of(read(file, o), FinetuneRunConfig()) for o in (linear, linear + longer)
    )
    assert differences(before, after) == ["finetuning.num_epochs: 3 then, 9 now"]


def test_a_validation_file_of_its_own_counts_with_its_rows_and_its_code(file: Path):
    near = file.parent
    own = """
workflow: {_type: python, target: "judged.py:run"}
eval: {general: {dataset: {_type: json, file_path: held.json}}}
"""
    (near / "val.yml").write_text(own)
    (near / "judged.py").write_text("def run(x): ...")
    (near / "held.json").write_text("[]")
    options = FinetuneRunConfig(validation_config_file=near / "val.yml")

    def facts() -> dict[str, Any]:
        return fingerprint_of(read(file), options, read(near / "val.yml"))

    before = facts()
    (near / "judged.py").write_text("def run(x): return x")
    (near / "held.json").write_text("[1]")
    assert differences(before, facts()) == [
        "judged.py (validation): the code has changed",
        "command.validation_dataset: the content of held.json has changed",
    ]
    (near / "moved.json").write_text("[1]")
    (near / "val.yml").write_text(own.replace("held.json", "moved.json"))
    assert differences(before, facts())[1:] == [
        "command.validation_dataset: moved.json has another content than held.json, which the run "
        "started with",
        f"command.validation_config_file: the content of {near / 'val.yml'} has changed",
    ]


def test_where_the_result_is():
    served = Served(base_url="http://gpu:8000/v1", api_key="k", model="m")

    def address(**backend: Any) -> dict[str, Any]:
        config = HoneServerAdapterConfig.model_validate({"backend": backend})
        adapter = HoneServerAdapter(config)
        adapter.served = served
        description = adapter.describe()
        return {key: description[key] for key in ("base_url", "root") if key in description}

    assert address(ip="gpu", port=7623) == {"base_url": "http://gpu:8000/v1", "root": None}
    # Absolute: a report may be read anywhere.
    assert address() == {"root": str(Path.cwd() / ".hone")}
    assert address(root="runs/server") == {"root": str(Path.cwd() / "runs" / "server")}
    nothing = dict.fromkeys(("name", "project", "base_model", "learning_rate"))
    assert MemoryAdapter().describe() == nothing


def test_the_resume_command_does_not_start_anew():
    options = ["finetune", "--config_file=a.yml", "--fresh"]
    assert resume_arguments(options, "auto") == ["finetune", "--config_file=a.yml"]
    assert resume_arguments(options[:2], "never") == [
        *options[:2],
        "-o",
        "finetuning.resume",
        "auto",
    ]


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


def test_a_number_that_json_does_not_have_is_the_same_at_the_next_start(file: Path, tmp_path: Path):
    limits = "functions: {f: {_type: python, target: 'f.py:f', args: {most: .inf, least: .nan}}}\n"
    file.write_text(YAML + limits)
    facts = fingerprint_of(read(file), FinetuneRunConfig())
    for start in (1, 2):
        with Journal.open(tmp_path / "out", facts) as journal:
            assert journal.session == start
            journal.add(record())
    changed = {**facts, "functions": {"f": {"args": {"most": 3}}}}
    assert any("most: 'Infinity' then, 3 now" in line for line in differences(facts, changed))
