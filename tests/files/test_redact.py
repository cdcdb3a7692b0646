"""What counts as a secret: by its name, by its form and by its value; and what does not."""

import itertools
import json
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hone.files.redact import (
    HIDDEN,
    add_secrets,
    is_placeholder,
    is_secret,
    redact,
    redact_json,
    redact_start,
)
from hone.wire.access import derive_inference_key

JWT = (
    "eyJhbGciOiJIUzI1NiIsInR5cCI6IkpXVCJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0."
    "dozjgNryP4J3jVmNHl0w5N_XgL0n3I9PlFUP0THsR8U"
)
AWS = "wJalrXUtnFEMI/K7MDENG+bPxRfiCYzEXAMPLEKEY"
RANDOM = "Zx81Kq0Lr7Wm5Tn2Vb9Yc4Hd6Jf3Gs1PaQe"
PEM = "MIIEvQIBADANBgkqhkiG9w0BAQEFAASC\nBKcwggSjAgEAAoIBAQC7VJTUt9Us8cKj\n"


@pytest.mark.parametrize(
    "name",
    [
        *("api_key", "HF_TOKEN", "Authorization", "llms.a.api_key", "db_password", "secret-key"),
        *("Cookie", "Set-Cookie", "GITHUB_PAT", "pat", "db_passwd", "ssh_passphrase", "PGPASSWORD"),
        *("apiKey", "clientSecret", "SecretAccessKey", "OPENAI_API_KEY_2", "AWS_SESSION_TOKEN"),
        *("MYSQL_PWD", "_authToken", "x-api-key", "AccountKey"),
    ],
)
def test_values_under_secret_names_are_secrets(name: str):
    assert is_secret(name)


@pytest.mark.parametrize(
    "name",
    [
        *("id_key", "max_tokens", "question_key", "keys", "path", "pattern", "PWD", "compat", ""),
        *("eos_token", "pad_token", "AccessKeyId", "OLDPWD", "tokenizer", "secretary", "monkey"),
    ],
)
def test_values_under_other_names_are_not_secrets(name: str):
    assert not is_secret(name)


@pytest.mark.parametrize(
    "secret",
    [
        JWT,
        JWT.rpartition(".")[0],  # cut, or without a signature
        "AKIAIOSFODNN7EXAMPLE",
        "ASIAIOSFODNN7EXAMPLE",
        *(f"gh{kind}_{RANDOM}" for kind in "pousr"),
        f"github_pat_11ABCDEFG0_{RANDOM}",
        f"glpat-{RANDOM}",
        f"hone-{RANDOM[:32]}",
        derive_inference_key("another key"),
        f"AIza{RANDOM}",
        f"ya29.a0AfH6SMB-{RANDOM}",
        f"GOCSPX-{RANDOM}",
        *(f"xox{kind}-123456789012-{RANDOM}" for kind in "bpas"),
        f"xoxe.xoxp-1-{RANDOM}",
        f"xapp-1-A0123456789-{RANDOM}",
        *(f"{prefix}{RANDOM}" for prefix in ("sk-", "sk-proj-", "sk-ant-api03-", "sk-or-v1-")),
        f"hf_{RANDOM}",
        f"nvapi-{RANDOM}-{RANDOM}",
        f"gsk_{RANDOM}",
        f"npm_{RANDOM}0",
        f"pypi-AgEIcHlwaS5vcmc{RANDOM}",
        *(f"{prefix}{RANDOM}" for prefix in ("sk_live_", "rk_live_", "whsec_")),
        f"SG.{RANDOM}.{RANDOM}",
        "123456789:AAEhBOweik6ad9r_QXMENQjcrGbqCr4K-bc",
        "dapi0123456789abcdef0123456789abcdef",
    ],
)
def test_a_key_is_known_by_its_form(secret: str):
    texts = (
        "{}",
        "got '{}'.",
        "a={};b",
        '{{"x": "{}"}}',
        "line\n{}\nline",
        r"'line\n{}\n'",
        "%3D{}",
    )
    for text in texts:
        assert redact(text.format(secret)) == text.format(HIDDEN)


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        ("got Bearer abcdefghij", f"got Bearer {HIDDEN}"),
        ("Authorization: Bearer a.b/c+d==~!%x", f"Authorization: Bearer {HIDDEN}"),
        ("Authorization: Basic dXNlcjpwYXNzd29yZA==", f"Authorization: Basic {HIDDEN}"),
        ("Authorization: Token 9944b09199c62bcf", f"Authorization: Token {HIDDEN}"),
        ('curl -H "X-Api-Key: abc123+/def" h', f'curl -H "X-Api-Key: {HIDDEN}" h'),
        ("Set-Cookie: sid=a b; Path=/\nok", f"Set-Cookie: {HIDDEN}\nok"),
        ("api_key='12345678'", f"api_key='{HIDDEN}'"),
        ('{"password": "correct-horse"}', f'{{"password": "{HIDDEN}"}}'),
        (r"{\"password\": \"correct-horse\"}", rf"{{\"password\": \"{HIDDEN}\"}}"),
        ('cfg["api_key"] = "abcd-efgh"', f'cfg["api_key"] = "{HIDDEN}"'),
        (f"aws_secret_access_key={AWS} x", f"aws_secret_access_key={HIDDEN} x"),
        (f"aws_secret_access_key = {AWS}\n", f"aws_secret_access_key = {HIDDEN}\n"),
        (f'"SecretAccessKey": "{AWS}"', f'"SecretAccessKey": "{HIDDEN}"'),
        ("export DB_PASSWORD=p(a,s;s&w)d\nnext", f"export DB_PASSWORD={HIDDEN}\nnext"),
        ("password: hunter2!hunter2\n", f"password: {HIDDEN}\n"),
        ("--api-key abcdefgh1234 --port 1", f"--api-key {HIDDEN} --port 1"),
        ("--password=correct-horse run", f"--password={HIDDEN} run"),
        ("Incorrect API key provided: ab12cd34ef", f"Incorrect API key provided: {HIDDEN}"),
        ("at http://me:a:b@c@host:80/x", f"at http://me:{HIDDEN}@host:80/x"),
        ("postgres://u:pa/ss#1?@db:5432/x", f"postgres://u:{HIDDEN}@db:5432/x"),
        ("redis://:pw@host https://ghp_1@host", f"redis://:{HIDDEN}@host https://{HIDDEN}@host"),
        ("POST http://h/?write_token=Ab.Cd+1&to=x", f"POST http://h/?write_token={HIDDEN}&to=x"),
        ("http://b/o?se=1&sig=a%2Fb%2Bc%3D", f"http://b/o?se=1&sig={HIDDEN}"),
        (
            "https://hooks.slack.com/services/T00/B00/XXXX",
            f"https://hooks.slack.com/services/{HIDDEN}",
        ),
        ("write_token=AbCdEfGh01", f"write_token={HIDDEN}"),
        (
            f"-----BEGIN PRIVATE KEY-----\n{PEM}-----END PRIVATE KEY-----",
            f"-----BEGIN PRIVATE KEY-----{HIDDEN}-----END PRIVATE KEY-----",
        ),
        (
            json.dumps({"private_key": f"-----BEGIN RSA PRIVATE KEY-----\n{PEM}"}),
            f'{{"private_key": "-----BEGIN RSA PRIVATE KEY-----{HIDDEN}"}}',
        ),
    ],
)
def test_a_secret_in_a_text_is_hidden(text: str, redacted: str):
    assert redact(text) == redacted
    assert redact(redacted) == redacted


@pytest.mark.parametrize(
    "text",
    [
        "token: 12 tokens",
        "the secret is patience",
        "secret: patience",
        'the game: {"secret": "elephant", "token": "something"}',
        "password: must be at least 8 characters",
        '{"password": "must be at least 8 characters"}',
        '{"api_key": "required", "password": "string"}',
        "api_key: your-api-key-here",
        "OPENAI_API_KEY=sk-xxxxxxxxxxxxxxxxxxxxxxxx",
        "password=${DB_PASSWORD} token=$GITHUB_TOKEN key={api_key} api_key=<your key>",
        "connect(user=user, password=password, token=get_token(1))",
        "token = tokenizer.encode(text)[0]; password = input('Password: ')",
        "token=self.next_token secret = settings.secret2.value",
        "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
        "commit 2076a34c1b9b0a1e8f2f4d1f0b8c7a6e5d4c3b2a",
        "art_run_0a1b2c3d:1.0.12.3.s1r2 req_0123456789abcdef0123 call_00000001",
        "risk-averse-behaviour, task-oriented, Risk-Management-2024, ask-me-anything-2024",
        "ein sk-Kurs, sk-learn, hf_transfer, hf_hub_download, ghp_, npm_config_registry",
        "Basic understanding of Bearer authentication; a standard-bearer position",
        'headers = {"Authorization": f"Bearer {api_key}"}; -H "Authorization: Bearer $HONE_API_KEY"',
        '{"api_key": "HONE_API_KEY", "password": "my_secret_value"} token=EXPIRED_TOKEN',
        "cookie: chocolate chip",
        "eos_token: '<|endoftext|>' and max_tokens=12345678",
        "path=/usr/share/words pattern=abcdefghij",
        "http://host:80/v1/@scope?to=a@b and me@host",
        '{"url":"http://h/x","email":"me@host"}',
        "git@github.com:me/repo.git //comment: a@b",
        "ratio 3:4, at 12:30:45, C:\\temp\\x, x := y, {'a': 'b'}, eyJhIjoxfQ.",
        "-----BEGIN PRIVATE KEY----- begins such a file, and is followed by base64",
        "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk",
    ],
)
def test_ordinary_text_is_not_changed(text: str):
    assert redact(text) == text


def test_a_secret_of_the_environment_is_hidden_in_every_spelling(monkeypatch: pytest.MonkeyPatch):
    value = 'p/ä"s s\\1\n'
    monkeypatch.setenv("SOME_SERVICE_TOKEN", value)
    written = [
        value,
        json.dumps(value)[1:-1],
        quote(value),
        quote(value, safe=""),
        repr(value)[1:-1],
    ]
    written.append(json.dumps(value, ensure_ascii=False)[1:-1])
    for text in written:
        assert redact(f"before {text} after") == f"before {HIDDEN} after"


@pytest.mark.parametrize(
    ("name", "value", "secret"),
    [
        ("OPENAI_API_KEY", "not-an-openai-key", "not-an-openai-key"),
        ("DATABASE_URL", "postgresql://app:s3cr3t%2Fpw@db/x", "s3cr3t/pw"),
        ("DATABASE_URL", "postgresql://app:s3cr3t/pw#1@db/x", "s3cr3t/pw#1"),
        ("PROXY", "http://h/?write_token=abcdefgh1", "abcdefgh1"),
        ("PGPASSWORD", "correct-horse", "correct-horse"),
        ("WANDB_KEY", "0123456789abcdef0123456789abcdef", "0123456789abcdef0123456789abcdef"),
        ("URLS", "redis://:first-pw@h,redis://:other-pw@h", "other-pw"),
    ],
    ids=itertools.count(),  # pytest sets a variable to the name of the test
)
def test_which_variables_hold_secrets(
    name: str, value: str, secret: str, monkeypatch: pytest.MonkeyPatch
):
    assert redact(f"is {secret} it") == f"is {secret} it"
    monkeypatch.setenv(name, value)
    assert redact(f"is {secret} it") == f"is {HIDDEN} it"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("OPENAI_API_KEY", v) for v in ("default", "EMPTY", "dummy", "none", "test", "changeme")),
        *(("OPENAI_API_KEY", v) for v in ("not-needed", "sk-no-key-required", "local", "disabled")),
        ("POSTGRES_PASSWORD", "postgres"),
        ("GOOGLE_APPLICATION_CREDENTIALS", "/home/me/.config/credentials.json"),
        ("SORT_KEY", "customer_id"),
        ("PWD", "/home/me/project-2024"),
        ("APP_PWD", str(Path(__file__).parent)),
        ("EOS_TOKEN", "<|endoftext|>"),
    ],
)
def test_a_placeholder_is_not_hidden_in_other_text(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(name, value)
    assert redact(f"the word {value} in a sentence") == f"the word {value} in a sentence"


def test_values_that_are_added_are_hidden():
    add_secrets(["from-the-file", "short", "default"])
    text = "from-the-file short default"
    assert redact(text) == f"{HIDDEN} short default"
    assert is_placeholder("default") and not is_placeholder("from-the-file")


def test_a_text_is_cut_after_its_secrets_are_removed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AGENT_TOKEN", "value-of-the-agent")
    assert redact_start("got value-of-the-agent", 10) == "got <hidde"
    assert redact_start("abcdefgh ijk", 10) == "abcdefgh i"


def test_json_keeps_its_structure_numbers_and_tokens(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AGENT_TOKEN", "value-of-agent")
    logprobs = {"content": [{"token": "value-of-agent", "logprob": -0.5, "bytes": [1, 2]}]}
    value = {
        "rollout": "value-of-agent",
        "reward": 0.25,
        "ids": [1, 2, 3],
        "none": None,
        "failed": True,
        "nested": {"rollout": "value-of-agent", "password": "abc-def-ghi", "token": "word"},
        "texts": ["sk-" + RANDOM, "http://u:p@h"],
        "value-of-agent": 1,
        "logprobs": logprobs,
    }
    assert redact_json(value, keep=("rollout",)) == {
        "rollout": "value-of-agent",
        "reward": 0.25,
        "ids": [1, 2, 3],
        "none": None,
        "failed": True,
        "nested": {"rollout": HIDDEN, "password": HIDDEN, "token": "word"},
        "texts": [HIDDEN, f"http://u:{HIDDEN}@h"],
        HIDDEN: 1,
        "logprobs": logprobs,
    }
    assert redact_json("http://u:p@h value-of-agent", forms=False) == f"http://u:p@h {HIDDEN}"


@given(st.text(alphabet="aB1 =:'\"@/?&-_.<>{}\n\\eyJsktoken%", max_size=60))
def test_what_was_redacted_does_not_change_again(text: str):
    once = redact(f"api_key={text} Authorization: Bearer {text} http://u:{text}@h")
    assert redact(once) == once


HOSTILE = (
    *("a", "eyJ", "eyJa-", "//a:b", "a://b:c", "Authorization: Token ", "bearer ", "Bearer x"),
    *("token:", "token=", "token='", 'token="a', "PRIVATE KEY-----A: ", "PRIVATE KEY-----A: x\n"),
    *("cookie:", "cookie=", "-", "--a ", "?a=b&", "sk-a ", "sk-a", "token ", '"', "api key "),
    *("Basic ", "xoxb-", "ghp_", "@", "//a@", "\\n", "token=a.b.", "A_PASSWORD=aaaaaaaaa("),
)


@pytest.mark.parametrize("part", HOSTILE)
def test_hostile_text_takes_linear_time(part: str):
    """A quadratic pattern takes minutes for this text, where a linear one takes about a second."""
    redact(part * (200_000 // len(part)))
