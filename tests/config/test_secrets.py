"""Secrets given by `-o`, by the environment or in the YAML appear in no file."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hone.cli import app
from hone.config.secrets import HIDDEN, Secrets


def test_no_secret_is_shown():
    values = {"api_key": "a", "HF_TOKEN": "b", "a": [{"secret": "c"}], "id_key": "d", "tokens": 3}
    assert Secrets().hide(values) == {
        "api_key": HIDDEN,
        "HF_TOKEN": HIDDEN,
        "a": [{"secret": HIDDEN}],
        "id_key": "d",
        "tokens": 3,
    }
    assert Secrets().hide({"api_key": None, "path": Path("x")}) == {"api_key": None, "path": "x"}


def test_a_secret_is_hidden_at_every_place(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JUDGE_TOKEN", "from-the-environment")
    data = {"llm": {"api_key": "from-the-file", "headers": {"X-Both": "from-the-file"}}}
    secrets = Secrets(data, [("llms.a.api_key", "from-an-option"), ("finetuning.seed", "12345678")])
    values = {"url": "https://me:from-the-environment@host/v1", "auth": "Bearer from-an-option"}
    assert secrets.hide(values) == {
        "url": f"https://me:{HIDDEN}@host/v1",
        "auth": f"Bearer {HIDDEN}",
    }
    assert secrets.hide(data)["llm"] == {"api_key": HIDDEN, "headers": {"X-Both": HIDDEN}}
    arguments = ["eval", "-o", "llms.a.api_key", "short", "-o", "finetuning.seed", "12345678"]
    assert secrets.hide_arguments(arguments) == [*arguments[:3], HIDDEN, *arguments[4:]]


def test_the_places_of_an_agents_secrets_are_hidden():
    workflow = {
        "url": "http://me:pw@agent:9000/solve",
        "headers": {"Cookie": "session=1", "X-Path": "/a"},
        "env": {"GITHUB_PAT": "ghp_1", "PATH": "/bin", "PROXY": "http://:pw@proxy:3128"},
        "command": ["agent", "--db=postgres://me:pw@db/x"],
    }
    assert Secrets(workflow).hide(workflow) == {
        "url": f"http://me:{HIDDEN}@agent:9000/solve",
        "headers": {"Cookie": HIDDEN, "X-Path": "/a"},
        "env": {"GITHUB_PAT": HIDDEN, "PATH": "/bin", "PROXY": f"http://:{HIDDEN}@proxy:3128"},
        "command": ["agent", f"--db=postgres://me:{HIDDEN}@db/x"],
    }


def test_every_header_of_a_logger_is_hidden_at_every_place():
    loggers = [
        {
            "_type": "otel",
            "headers": {"x-honeycomb-team": "hcaik_0123456789"},
            "endpoint": "http://h",
        },
        {"_type": "trackio", "server_url": "https://t.example/?write_token=AbCd0123&v=1"},
    ]
    overrides = [("loggers.0.headers.dd", "from-an-option")]
    secrets = Secrets({"loggers": loggers}, overrides)
    assert secrets.hide({"loggers": loggers}) == {
        "loggers": [
            {"_type": "otel", "headers": {"x-honeycomb-team": HIDDEN}, "endpoint": "http://h"},
            {"_type": "trackio", "server_url": f"https://t.example/?write_token={HIDDEN}&v=1"},
        ]
    }
    assert secrets.hide("sent hcaik_0123456789") == f"sent {HIDDEN}"
    arguments = ["finetune", "-o", *overrides[0]]
    assert secrets.hide_arguments(arguments) == [*arguments[:3], HIDDEN]


AGENT = """
async def ask(input, llm):
    return f"{input} {llm.model}"
"""

CONFIG = """
llms:
  policy:
    _type: openai
    model_name: m
    base_url: http://127.0.0.1:9/v1
    api_key: ${AGENT_API_KEY}
workflow: {_type: python, target: agent.py:ask, llm: policy}
eval:
  general:
    output_dir: out
    dataset: {_type: json, file_path: rows.json}
  evaluators:
    match: {_type: exact_match}
"""


def test_an_evaluation_writes_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AGENT_API_KEY", "sk-of-the-environment")
    Path("agent.py").write_text(AGENT)
    Path("config.yml").write_text(CONFIG)
    Path("rows.json").write_text(json.dumps([{"id": "1", "question": "q", "answer": "q m"}]))
    for key, value in (("llms.policy.model_name", "m"), ("llms.policy.api_key", "sk-of-an-option")):
        command = ["eval", "--config_file=config.yml", "-o", key, value]
        result = CliRunner().invoke(app.app, command)
        assert result.exit_code == 0, result.output
    assert "${AGENT_API_KEY}" in Path("out/config_original.yml").read_text()
    written = CONFIG.replace("${AGENT_API_KEY}", "sk-of-the-file")
    Path("config.yml").write_text(f"# proxy: http://me:sk-of-a-proxy@host\n{written}")
    result = CliRunner().invoke(app.app, ["eval", "--config_file=config.yml"])
    assert result.exit_code == 0, result.output
    files = [file for file in Path("out").rglob("*") if file.is_file()]
    assert len(files) > 3
    for file in files:
        assert b"sk-of-" not in file.read_bytes(), file
