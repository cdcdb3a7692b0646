"""cli/harness.py and cli/terminal.py: finetune, eval, run, validate, info, as users type them."""

import json
import logging
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hone.cli.app import app
from hone.config import registry

AGENT = """
def shout(text):
    if text == "fail":
        raise RuntimeError("no voice")
    return text.upper()


def count(text):
    return {"letters": len(text)}
"""

YAML = """
workflow: {_type: python, target: "agent.py:shout"}
eval:
  general:
    output_dir: out
    dataset: {_type: jsonl, file_path: rows.jsonl}
  evaluators:
    right: {_type: exact_match}
    near: {_type: contains, ignore_case: true}
"""


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory with an agent, a dataset and a configuration."""
    monkeypatch.chdir(tmp_path)
    Path("agent.py").write_text(AGENT, encoding="utf-8")
    Path("a.yml").write_text(YAML, encoding="utf-8")
    rows = [("ab", "AB"), ("cd", "cd"), ("ef", "EF"), ("gh", "no")]
    lines = (json.dumps({"id": i, "question": q, "answer": a}) for i, (q, a) in enumerate(rows))
    Path("rows.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def hone(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


def rows_of(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines() if line.strip()]


def unboxed(text: str) -> str:
    """What a usage error says, without the frame around it."""
    return " ".join(text.replace("\u2502", " ").split())


# ---- validate ---------------------------------------------------------------------------------


def test_validate_lists_the_components_of_a_file():
    result = hone("validate", "--config_file", "a.yml", "-o", "finetuning.seed", "-3")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.splitlines()[0] == "a.yml: valid"
    assert {row[0]: " ".join(row[1:]) for row in rows_of(result.stdout)[1:]} == {
        "llms": "none",
        "functions": "none",
        "workflow": "python",
        "eval.general.dataset": "rows.jsonl (jsonl)",
        "eval.evaluators": "2: right (exact_match), near (contains)",
        "trajectory_builders": "none",
        "trainer_adapters": "none",
        "trainers": "none",
        "finetuning": "not enabled",
    }


def test_validate_of_a_dataset_without_a_file():
    Path("rows.py").write_text("def make():\n    return []\n")
    text = YAML.replace("_type: jsonl", '_type: custom, function: "rows.py:make"')
    Path("a.yml").write_text(text.replace(", file_path: rows.jsonl", ""))
    result = hone("validate", "--config_file", "a.yml")
    assert result.exit_code == 0, result.stderr
    assert ["eval.general.dataset", "custom"] in rows_of(result.stdout)


def test_validate_lists_what_a_run_lacks():
    Path("run.yml").write_text("finetuning: {enabled: true}\n")
    result = hone("validate", "--config_file=run.yml")
    assert result.exit_code == 1
    for key in ("workflow", "finetuning.reward_function", "eval.general.dataset"):
        assert f"run.yml:1: {key}: is missing" in result.stderr


def test_validate_lists_all_problems_and_exits_1():
    Path("a.yml").write_text(YAML.replace("near", "nar").replace("dataset", "datset") + "x: 1\n")
    result = hone("validate", "--config-file=a.yml", "-o", "eval.evaluators.right.strp", "1")
    assert (result.exit_code, result.stdout) == (1, "")
    lines = result.stderr.splitlines()
    assert lines[0] == "hone: the configuration has 3 problems:"
    assert lines[1].startswith("-o eval.evaluators.right.strp: unknown key 'strp'. Did you mean 's")
    assert lines[2].startswith("a.yml:6: eval.general.datset: unknown key 'datset'. Did you mean ")
    assert lines[3].startswith("a.yml:10: x: unknown key 'x'. Known: llms, ")
    assert len(lines) == 4


def test_validate_of_a_missing_file():
    result = hone("validate", "--config_file=b.yml")
    assert (result.exit_code, result.stderr) == (1, "hone: b.yml: there is no such file\n")


def test_an_override_requires_a_key_and_a_value():
    result = hone("validate", "--config_file=a.yml", "-o", "a.b")
    assert result.exit_code == 2
    assert "expected a key and a value" in result.stderr


# ---- run --------------------------------------------------------------------------------------


def test_run_prints_what_the_workflow_returns():
    Path("b.txt").write_text("from a file", encoding="utf-8")
    command = ["run", "--config_file=a.yml", "--input", "one", "--input=two", "--input-file=b.txt"]
    result = hone(*command)
    assert result.exit_code == 0, result.stderr
    assert result.stdout == "ONE\nTWO\nFROM A FILE\n"


def test_run_prints_other_values_as_json():
    override = ("-o", "workflow.target", "agent.py:count")
    result = hone("run", "--config_file=a.yml", "--input", "four", *override)
    assert (result.exit_code, result.stdout) == (0, '{"letters": 4}\n')


def test_run_prints_why_the_workflow_failed():
    result = hone("run", "--config_file=a.yml", "--input", "fail", "--input", "x")
    assert (result.exit_code, result.stdout) == (1, "X\n")
    assert "hone: the workflow failed: RuntimeError: no voice\n" in result.stderr


def test_run_requires_an_input():
    result = hone("run", "--config_file=a.yml")
    assert result.exit_code == 2
    assert "there is no input; give --input" in unboxed(result.stderr)


# ---- eval -------------------------------------------------------------------------------------


def test_eval_prints_a_summary():
    result = hone("eval", "--config_file=a.yml")
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    start = lines.index("=== EVALUATION SUMMARY ===")
    assert lines[start + 1] == "Workflow Status: COMPLETED (4 items)"
    # AB and EF of four are right; without regard to case so is CD.
    table = rows_of("\n".join(lines[start + 3 :]))
    assert table == [
        ["Evaluator", "Avg", "Score", "Failures", "By", "The", "Model", "Output", "File"],
        ["right", "0.5000", "0", "0", "out/right_output.json"],
        ["near", "0.7500", "0", "0", "out/near_output.json"],
    ]


def test_eval_fails_if_a_rollout_failed():
    row = {"id": 9, "question": "fail", "answer": "x"}
    with Path("rows.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    result = hone("eval", "--config_file=a.yml")
    assert result.exit_code == 1
    assert "Workflow Status: INTERRUPTED (5 items)" in result.stdout
    # The failed row has no score: the mean is still over four.
    assert ["right", "0.5000"] in [row[:2] for row in rows_of(result.stdout)]
    assert result.stderr.splitlines()[-1].startswith("hone: ")


def test_reps_and_skip_options_are_exclusive():
    result = hone("eval", "--config_file=a.yml", "--reps", "2", "--skip_workflow")
    assert result.exit_code == 2
    said = "--reps 2 and --skip_workflow: rows are run 2 times or not at all"
    assert said in unboxed(result.stderr)


# ---- finetune ---------------------------------------------------------------------------------


def test_finetune_forwards_its_options(monkeypatch: pytest.MonkeyPatch):
    from hone.finetune import run

    calls: list[run.FinetuneOptions] = []

    def note(options: run.FinetuneOptions) -> int:
        calls.append(options)
        return 3

    monkeypatch.setattr(run, "finetune", note)
    command = ["finetune", "--config_file=a.yml", "--dataset=rows.jsonl", "--result_json_path=$.x"]
    command += ["-o", "finetuning.num_epochs", "50", "--override", "finetuning.seed", "-1"]
    command += ["--validation_dataset", "rows.jsonl", "--validation-interval=3", "--dry_run"]
    result = hone(*command, "--validation_config_file=a.yml", "--fresh")
    assert result.exit_code == 3, result.stderr
    assert calls[0].model_dump() == {
        "config_file": Path("a.yml"),
        "dataset": Path("rows.jsonl"),
        "result_json_path": "$.x",
        "override": (("finetuning.num_epochs", "50"), ("finetuning.seed", "-1")),
        "validation_dataset": Path("rows.jsonl"),
        "validation_interval": 3,
        "validation_config_file": Path("a.yml"),
        "fresh": True,
        "dry_run": True,
        "endpoint": None,
        "endpoint_timeout": 300.0,
    }


def test_finetune_requires_a_training_run():
    result = hone("finetune", "--config_file=a.yml")
    assert result.exit_code == 1
    assert "Finetuning is not enabled in the provided configuration" in result.stderr


@pytest.mark.parametrize("command", ["finetune", "eval"])
@pytest.mark.parametrize("seconds", ["nan", "inf", "0", "-1", "soon"])
def test_the_timeout_of_an_endpoint_is_a_number_of_seconds(command: str, seconds: str):
    endpoint = ["--endpoint=http://127.0.0.1:9", f"--endpoint_timeout={seconds}"]
    result = hone(command, "--config_file=a.yml", *endpoint)
    assert result.exit_code == 2
    message = f"'--endpoint_timeout': '{seconds}'; expected a finite number of seconds above 0"
    assert message in unboxed(result.stderr)


@pytest.mark.parametrize(
    "option", ["--dataset", "--validation_dataset", "--validation_interval", "--config_file"]
)
def test_finetune_requires_existing_files_and_numbers(option: str):
    command = {"--config_file": "a.yml", option: "nowhere.json"}
    result = hone("finetune", *(word for pair in command.items() for word in pair))
    assert result.exit_code == (2 if option.endswith("interval") else 1)
    wrong = (
        "unable to parse string as an integer" if option.endswith("interval") else "nowhere.json"
    )
    assert wrong in unboxed(result.stderr)


# ---- info, help, the log ----------------------------------------------------------------------


def test_info_lists_components_by_kind():
    result = hone("info", "components", "-t", "trainer", "-t", "trainer_adapter")
    assert result.exit_code == 0, result.stderr
    rows = [row for row in rows_of(result.stdout) if "hone" in row[2:3]]
    assert [row[:3] for row in rows] == [
        ["trainer_adapter", "hone_server", "hone"],
        ["trainer", "dpo", "hone"],
        ["trainer", "rl", "hone"],
        ["trainer", "sft", "hone"],
    ]
    every = hone("info", "components").stdout
    assert {row[0] for row in rows_of(every)[1:]} == set(registry.KINDS)


def test_info_knows_its_kinds():
    shown = unboxed(hone("info", "components", "--help").stdout)
    assert f"{', '.join(registry.KINDS[:-1])} or {registry.KINDS[-1]}." in shown
    result = hone("info", "components", "-t", "trianer")
    assert result.exit_code == 2
    assert (
        "-t trianer: no such kind. Known: function, llm_provider, evaluator, "
        "dataset_loader, trajectory_builder, trainer_adapter, trainer, logger."
    ) in unboxed(result.stderr)


COMMANDS = [
    ["finetune"],
    ["eval"],
    ["run"],
    ["validate"],
    ["info", "components"],
    ["models", "list"],
    ["models", "pull"],
    ["models", "show"],
    ["serve"],
    ["art", "run"],
    ["export"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_teaches_and_has_a_log_level(command: list[str]):
    result = hone(*command, "--help")
    assert result.exit_code == 0
    assert "--log-level" in result.stdout
    text = " ".join(result.stdout.split())
    assert "Example" in text and f"hone {' '.join(command)}" in text.partition("Example")[2]


def test_the_log_follows_its_level(caplog: pytest.LogCaptureFixture):
    Path("agent.py").write_text(
        "import logging\n"
        "def shout(text):\n"
        "    for name in ('hone.x', 'other'):\n"
        "        logging.getLogger(name).info('%s informs', name)\n"
        "        logging.getLogger(name).warning('%s warns', name)\n"
        "    return text\n",
        encoding="utf-8",
    )
    command = ["run", "--config_file=a.yml", "--input", "x"]
    lines = hone(*command).stderr.splitlines()
    expected = ["INFO - hone.x informs", "WARNING - hone.x warns", "WARNING - other warns"]
    assert [
        line for line in lines if (" - " in line and "x" in line) or "other" in line
    ] == expected
    assert "informs" not in hone(*command, "--log-level", "warning").stderr
    assert "informs" not in hone("--log-level", "warning", *command).stderr
    assert "warns" not in hone(*command, "--log_level=ERROR").stderr
    assert logging.getLogger("hone").level == logging.NOTSET  # nothing stays behind
    wrong = hone(*command, "--log-level", "loud")
    assert wrong.exit_code == 2
    assert "'loud'; expected debug, info, warning, error or critical" in unboxed(wrong.stderr)


def test_ctrl_c_is_130(monkeypatch: pytest.MonkeyPatch):
    from hone.workflow import run

    def interrupted(options: run.RunOptions) -> list[run.RolloutResult]:
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "run_inputs", interrupted)
    result = hone("run", "--config_file=a.yml", "--input", "x")
    assert (result.exit_code, result.stderr) == (130, "hone: interrupted\n")
