"""Every setting of a server is an option of `hone serve`, and documented."""

from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from hone.cli import app
from hone.server import run
from hone.server.settings import Settings, flag

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"

VALUES = {
    "device": "cpu",
    "api_key": "secret",
    "advertise_url": "http://10.0.0.7:9000",
    "trust_network": "10.0.0.0/8",
    "forwarded_allow_ips": "127.0.0.1/32",
    "inference_port": "9001",
    "port": "9000",
}


def other_value(name: str) -> str:
    """A valid text for this setting that is not its default."""
    field = Settings.model_fields[name]
    kinds = get_args(field.annotation) or (field.annotation,)
    if name in VALUES:
        return VALUES[name]
    for kind in (field.annotation, *kinds):
        if get_origin(kind) is Literal:
            return next(str(v) for v in get_args(kind) if v != field.default)
    if int in kinds or float in kinds:
        return str((int(field.default) if field.default else 6) + 1)
    return "other"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """What servers were started with; none is."""
    seen: list[Settings] = []
    monkeypatch.setattr(run, "serve", lambda settings, echo: seen.append(settings))
    monkeypatch.delenv("HONE_API_KEY", raising=False)
    return seen


def invoke(*arguments: str, **more: Any) -> Any:
    return CliRunner().invoke(app.app, arguments, **more)


@pytest.mark.parametrize("name", Settings.model_fields)
def test_every_setting_has_an_option(name: str, started: list[Settings]):
    default = Settings.model_fields[name].default
    if Settings.model_fields[name].annotation is bool:
        arguments = [f"--no-{flag(name)[2:]}" if default else flag(name)]
    else:
        arguments = [flag(name), other_value(name)]
    result = invoke("serve", *arguments)
    assert result.exit_code == 0, result.output
    usual = Settings()
    assert [n for n in Settings.model_fields if getattr(started[0], n) != getattr(usual, n)] == [
        name
    ]


@pytest.mark.parametrize("command", [["art"], ["art", "run"]], ids=" ".join)
def test_arts_command_has_the_same_options(command: list[str], started: list[Settings]):
    result = invoke(*command, "--max-tokens", "7", "--log-format", "json", "--api-key", "k")
    assert result.exit_code == 0, result.output
    assert started == [Settings(port=7999, max_tokens=7, log_format="json", api_key="k")]


def test_without_options_the_defaults_are_those_of_settings(started: list[Settings]):
    assert invoke("serve").exit_code == 0
    assert started == [Settings()]


def test_every_option_is_documented():
    command: Any = get_command(app.app)
    options = {o for p in command.commands["serve"].params for o in p.opts}
    assert {flag(name) for name in Settings.model_fields} <= options
    commands = (REFERENCE / "cli.md").read_text(encoding="utf-8")
    section = commands.partition("## hone serve\n")[2].partition("\n## ")[0]
    table = (REFERENCE / "http.md").read_text(encoding="utf-8")
    for name, field in Settings.model_fields.items():
        assert field.description, f"{name} says nothing about itself"
        help_text = " ".join(field.description.split())
        assert f"`{flag(name)}" in section and help_text in section, name
        assert f"| `{name}` |" in table, name


def test_several_values_and_no_second_port(started: list[Settings]):
    networks = ["--trust-network", "10.0.0.0/8", "--trust-network", "192.168.0.0/16"]
    assert invoke("serve", *networks, "--inference-port", "-1").exit_code == 0
    assert [str(n) for n in started[0].trust_network] == ["10.0.0.0/8", "192.168.0.0/16"]
    assert started[0].inference_port is None


def test_a_key_that_is_refused_is_not_shown(started: list[Settings]):
    result = invoke("serve", env={"HONE_API_KEY": "se cret"})
    assert result.exit_code == 2 and not started
    assert "--api-key: expected at least one character" in result.stderr
    assert "cret" not in result.output


def test_an_empty_key_is_refused_and_an_empty_variable_is_none(started: list[Settings]):
    result = invoke("serve", "--api-key", "")
    assert result.exit_code == 2 and "--api-key: expected at least one" in result.stderr
    assert not started
    assert invoke("serve", env={"HONE_API_KEY": ""}).exit_code == 0
    assert started[0].api_key is None
