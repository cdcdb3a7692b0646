"""What counts as a secret, by its name and by its form."""

import pytest

from hone.redact import HIDDEN, is_secret, redact


@pytest.mark.parametrize(
    "name",
    [
        *("api_key", "HF_TOKEN", "Authorization", "llms.a.api_key", "db_password", "secret-key"),
        *("Cookie", "Set-Cookie", "GITHUB_PAT", "pat", "db_passwd", "ssh_passphrase"),
    ],
)
def test_a_name_that_says_so_holds_a_secret(name: str):
    assert is_secret(name)


@pytest.mark.parametrize(
    "name", ["id_key", "max_tokens", "question_key", "keys", "path", "pattern", "PWD", "compat", ""]
)
def test_other_names_do_not(name: str):
    assert not is_secret(name)


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        ("got Bearer abcdefghij", f"got Bearer {HIDDEN}"),
        ("the key sk-0123456789 is wrong", f"the key sk-{HIDDEN} is wrong"),
        ("hf_abcdefgh: no access", f"hf_{HIDDEN}: no access"),
        ("api_key='12345678'", f"api_key='{HIDDEN}'"),
        ('{"password": "correct-horse"}', f'{{"password": "{HIDDEN}"}}'),
        ("at http://me:a:b@c@host:80/x", f"at http://me:{HIDDEN}@host:80/x"),
        ("redis://:pw@host https://ghp_1@host", f"redis://:{HIDDEN}@host https://{HIDDEN}@host"),
        (
            "http://host:80/v1/@scope?to=a@b and me@host",
            "http://host:80/v1/@scope?to=a@b and me@host",
        ),
        ("POST http://h/?write_token=Ab.Cd+1&to=x", f"POST http://h/?write_token={HIDDEN}&to=x"),
        ("write_token=AbCdEfGh01", f"write_token={HIDDEN}"),
        ("path=/usr/share/words pattern=abcdefghij", "path=/usr/share/words pattern=abcdefghij"),
        ("a task-oriented model of 12345678 tokens", "a task-oriented model of 12345678 tokens"),
    ],
)
def test_a_secret_in_a_text_is_hidden(text: str, redacted: str):
    assert redact(text) == redacted
