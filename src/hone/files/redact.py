"""Find secrets by the name of a value, by its form or by its value, and remove them from text.

In:   the name of a key, an option, a header or an environment variable; text; JSON values; the
      environment, and values that other modules add
Out:  whether a value of that name is a secret; the text or the JSON value without the secrets in it

No file or log line that hone writes contains a secret: whatever writes text passes it through
`redact` or `redact_json`. Three rules find secrets. By value: the secrets of the environment, of the
configuration and the server's keys, wherever they occur. By name: `api_key=...`, `"password":
"..."`. By form: FORMS, and the passwords of addresses.

Most text is not secret, and text that is mangled misleads its reader. So a value that is a plain
word or a placeholder is never removed, and a name without a value that looks random is not enough.
Every pattern takes time linear in the text: what follows a repetition cannot make it start again.
A secret that is split between two texts is not recognized.
"""

import base64
import binascii
import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any
from urllib.parse import quote, quote_plus, unquote

HIDDEN = "<hidden>"
SHORTEST = 8
"""Minimum length: a shorter value may occur in other text by chance, so it is hidden only under its
name."""

# ---- names --------------------------------------------------------------------------------------

_NAME = re.compile(
    r"(?:^|[_.-])(?:(?:api|access|account|auth|encryption|master|private|secret|signing|subscription)"
    r"[_-]?key|(?:auth)?token|secret|authorization|credentials?|cookie|pat)(?:[_-]?[0-9]{1,3})?$"
    r"|(?:password|passwd|passphrase|[_.-]pwd)(?:[_-]?[0-9]{1,3})?$"
    r"|(?-i:(?<=[a-z0-9])(?:(?:Api|Access|Account|Private|Secret)Key|Token|Secret|Credentials))$",
    re.IGNORECASE,
)
_OF_TOKENIZER = re.compile(
    r"(?:^|[_.-])(?:bos|eos|pad|unk|sep|cls|mask|stop|special|image|audio|video|next|last|first|max)"
    r"[_-]?tokens?$",
    re.IGNORECASE,
)
"""Names of tokens that a model reads."""
_MAY_BE_OTHER = frozenset({"token", "secret", "cookie", "pat", "credential", "credentials"})
"""Names that also mean something else, such as the word of a guessing game."""
_MAYBE_SECRET = re.compile(r"(?:^|_)(?:KEY|PASS|AUTH|DSN|CREDS?|SAS|WEBHOOK)$", re.IGNORECASE)
"""Names of environment variables that hold a secret if their value looks random."""


@lru_cache(maxsize=4096)
def is_secret(name: str) -> bool:
    """Whether a key, an option or a variable of this name holds a secret."""
    return _NAME.search(name) is not None and _OF_TOKENIZER.search(name) is None


# ---- values -------------------------------------------------------------------------------------

_PLACEHOLDERS = frozenset(
    [
        "change-me",
        "change_me",
        "fake-key",
        "fake_key",
        "dummy-key",
        "dummy_key",
        "no-key",
        "no-key-required",
        "not-needed",
        "not_needed",
        "not-required",
        "not-used",
        "api-key",
        "api_key",
        "placeholder",
        "test-key",
        "test_key",
        "test-token",
        "local-key",
        "sk-no-key-required",
        "sk-not-needed",
        "12345678",
        "123456789",
        "1234567890",
    ]
)
_PLACEHOLDER = re.compile(r"[<$%{*]|(?:sk-)?your[-_ ]|(?:[A-Za-z]{1,4}[-_])?(.)\1*$", re.IGNORECASE)
"""`<key>`, `${KEY}`, `%s`, `***`, `your-key-here`, `sk-xxxxxxxx`."""
_LONGEST_WORD = 16
_DIGIT = re.compile(r"[0-9]")


def is_placeholder(value: str) -> bool:
    """Whether a value is too short or too common to be replaced wherever it occurs.

    Servers on one machine accept any key, so people write `default`, `EMPTY` or another word.
    """
    return len(value) < SHORTEST or value.lower() in _PLACEHOLDERS or _is_no_secret(value)


def _is_no_secret(value: str) -> bool:
    """Whether a value is a plain word or a template, whatever its name."""
    one_case = value[1:].islower() or value.isupper()
    is_word = len(value) < _LONGEST_WORD and value.isalpha() and one_case
    return is_word or _PLACEHOLDER.match(value) is not None


def _looks_random(value: str) -> bool:
    """Whether a value of 16 characters or more has letters and digits, and is no path or address."""
    return (
        len(value) >= _LONGEST_WORD
        and _DIGIT.search(value) is not None
        and re.search(r"[A-Za-z]", value) is not None
        and re.search(r"\s|^[./~]|://", value) is None
    )


class SecretValues:
    """The values that are secret in this process: of its environment, and those that are added."""

    def __init__(self) -> None:
        self._added: frozenset[str] = frozenset()
        self._environment: dict[str, str] | None = None
        self._written: tuple[str, ...] = ()
        """Every way to write a value; the longest first, since one may be the beginning of another."""

    def add(self, values: Iterable[str]) -> None:
        """Hide these values from now on; placeholders are left out."""
        new = {v for v in values if v not in self._added and not is_placeholder(v)}
        if new:
            self._added |= new
            self._update(dict(os.environ))

    def read_environment(self) -> None:
        """Notice variables that this program has set, for example from a `.env` file."""
        environment = dict(os.environ)
        if environment != self._environment:
            self._update(environment)

    def hide(self, text: str) -> str:
        """The text without these values."""
        if self._environment is None:
            self.read_environment()
        for value in self._written:
            if value in text:
                text = text.replace(value, HIDDEN)
        return text

    def _update(self, environment: dict[str, str]) -> None:
        values = self._added | {v for v in _of_environment(environment) if not is_placeholder(v)}
        written = {form for value in values for form in _written_forms(value)}
        self._written = tuple(sorted(written, key=lambda form: (-len(form), form)))
        self._environment = environment


SECRETS = SecretValues()
"""One for the process: every text that it writes is checked for all of its secrets."""


def add_secrets(values: Iterable[str]) -> None:
    """Hide these values in every text that this process writes; placeholders are left out."""
    SECRETS.add(values)


def _of_environment(environment: Mapping[str, str]) -> Iterator[str]:
    for name, value in environment.items():
        if is_secret(name):
            if not _is_path(name, value):
                yield value
        elif _MAYBE_SECRET.search(name) and _looks_random(value):
            yield value
        if "://" in value:
            yield from url_secrets(value)


def _is_path(name: str, value: str) -> bool:
    """Whether a variable with a secret name holds the path of a file or directory, as APP_PWD may."""
    if not value.startswith(("/", "./", "~")):
        return False
    return name.lower().endswith("credentials") or os.path.exists(os.path.expanduser(value))


def url_secrets(text: str) -> Iterator[str]:
    """The passwords of addresses and their secret parameters, as written and decoded."""
    for url in _BETWEEN_URLS.split(text):
        for match in _URL_PASSWORD.finditer(url):
            yield from {match[1], unquote(match[1])}
    for match in _IN_QUERY.finditer(text):
        if is_secret(match[2]):
            yield from {match[3], unquote(match[3])}


def _written_forms(value: str) -> set[str]:
    """The value as it is, in JSON, in Python and in an address."""
    in_json = {json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1]}
    in_url = (
        {quote(value), quote(value, safe=""), quote_plus(value)} if _is_encodable(value) else set()
    )
    return {value, repr(value)[1:-1], *in_json, *in_url}


def _is_encodable(value: str) -> bool:
    """False for bytes of the environment that are not UTF-8."""
    try:
        return bool(value.encode())
    except UnicodeEncodeError:
        return False


# ---- forms --------------------------------------------------------------------------------------

FORMS: dict[str, tuple[tuple[str, ...], str]] = {
    "hone": (("hone-",), r"{start}hone-(?=[\w-]*[0-9])(?:inference-)?[\w-]{{32}}(?![\w-])"),
    "JSON web token": (("eyJ",), r"{start}eyJ[\w-]{{8,}}+\.(?=[\w-]{{4}}|\.)[\w.-]*+"),
    "AWS access key id": (("AKIA", "ASIA"), r"{word}A[KS]IA[A-Z2-7]{{16}}(?!\w)"),
    "GitHub": (
        ("ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_"),
        r"{word}(?:gh[pousr]_[A-Za-z0-9]{{20,}}+|github_pat_\w{{22,}}+)",
    ),
    "GitLab": (("glpat-", "gldt-", "glrt-", "glptt-"), r"{word}gl(?:pat|dt|rt|ptt)-[\w.-]{{20,}}+"),
    "Google": (
        ("AIza", "ya29.", "GOCSPX-", "1//0"),
        r"{word}(?:AIza[\w-]{{30,}}+|ya29\.[\w.-]{{20,}}+|GOCSPX-[\w-]{{20,}}+|1//0[\w-]{{30,}}+)",
    ),
    "Slack": (
        ("xox", "xapp-"),
        r"{word}(?:xox[a-z](?:\.xox[a-z])?-[\w-]{{10,}}+|xoxe\.[\w.-]{{10,}}+|xapp-[0-9]-[\w-]{{10,}}+)",
    ),
    "Slack and Discord addresses": (
        ("hooks.slack.com/", "/api/webhooks/"),
        r"(?:(?<=hooks\.slack\.com/services/)|(?<=hooks\.slack\.com/workflows/)"
        r"|(?<=hooks\.slack\.com/triggers/)|(?<=/api/webhooks/))[\w/-]{{10,}}+",
    ),
    "OpenAI, Anthropic, OpenRouter": (("sk-",), r"{start}sk-(?=[\w-]*[0-9])[\w-]{{16,}}+"),
    "Hugging Face": (("hf_", "api_org_"), r"{word}(?:hf|api_org)_[A-Za-z0-9]{{30,}}+"),
    "NVIDIA": (("nvapi-",), r"{word}nvapi-[\w-]{{40,}}+"),
    "Groq, xAI, Perplexity, Tavily": (
        ("gsk_", "xai-", "pplx-", "tvly-"),
        r"{word}(?:gsk_|xai-|pplx-|tvly-(?:dev-|prod-)?)[A-Za-z0-9]{{30,}}+",
    ),
    "LangSmith": (("lsv2_",), r"{word}lsv2_(?:pt|sk)_[A-Za-z0-9_]{{32,}}+"),
    "Databricks": (("dapi",), r"{word}dapi[a-f0-9]{{32}}(?!\w)"),
    "DigitalOcean": (("_v1_",), r"{word}do[opr]_v1_[a-f0-9]{{64}}"),
    "npm": (("npm_",), r"{word}npm_[A-Za-z0-9]{{36}}"),
    "PyPI": (("pypi-AgE",), r"{word}pypi-AgE[\w-]{{16,}}+"),
    "Stripe": (
        ("k_live_", "k_test_", "whsec_"),
        r"{word}(?:[sr]k_(?:live|test)_[A-Za-z0-9]{{16,}}+|whsec_[A-Za-z0-9+/=]{{24,}}+)",
    ),
    "SendGrid": (("SG.",), r"{word}SG\.[\w-]{{16,64}}+\.[\w-]{{16,}}+"),
    "Telegram": ((":AA",), r"{word}[0-9]{{8,10}}:AA[\w-]{{33}}"),
    "private key": (
        ("PRIVATE KEY",),
        r"(?:(?<=PRIVATE KEY-----)|(?<=PRIVATE KEY BLOCK-----))(?:\s|\\[nr])*+(?:[A-Z][A-Za-z-]{{0,20}}: [^\n\\]{{0,200}}+(?:\s|\\[nr])*+){{0,5}}+"
        r"[A-Za-z0-9+/]{{32,}}+(?:[A-Za-z0-9+/=\s]|\\[nr])*+",
    ),
}
"""The issuer of the secret; literals that every such text contains; the pattern of the secret."""
_EDGES = {
    # Also after `\n` in the text of a string, and after a character of an address such as `%3D`.
    "start": r"(?:(?<![\w-])|(?<=\\[nrt])|(?<=%[0-9A-F]{2}))",
    "word": r"(?:(?<![A-Za-z0-9])|(?<=\\[nrt])|(?<=%[0-9A-F]{2}))",
}
_FORMS = [
    (hint, re.compile(pattern.format(**_EDGES), re.ASCII))
    for hints, pattern in FORMS.values()
    for hint in hints
]
_BEARER = re.compile(
    r"(?:(?<=\bBearer )(?!(?i:auth|token|credential|scheme|header|instrument|secur|share|certificate|"
    r"bond|channel|service|format|method|prefix|access)|[{$%])|(?<=\bbearer )(?=[^\s'\",;<>]*[0-9]))"
    r"[^\s'\"`,;<>\\]{8,}+"
)
_BASIC = re.compile(r"(?<=\b[Bb]asic )[A-Za-z0-9+/_-]{8,}+={0,2}")
_AUTHORIZATION = re.compile(
    r"(?i:(?<=authorization)|(?<=authorization['\"]))\\?['\"]?\s{0,3}[:=]\s{0,3}\\?['\"]?"
    r"(?:Token|ApiKey|Api-Key|Key|Digest|Negotiate|NTLM|AWS4-[A-Z0-9-]+|GenieKey) (?=[^'\"\n]{0,200}[0-9])"
    r"([^\n'\"\\][^\n'\\]{7,1000})"
)
_COOKIE = re.compile(r"(?i:cookie)['\"]?\s{0,3}[:=]\s{0,3}['\"]?([\w.-]+=[^\s'\"][^\n'\"]*+)")
_API_KEY = re.compile(r"[Kk][Ee][Yy](?: provided:)? ([\w-]{8,}+)")
"""A word after `key`; it counts if `api` precedes."""
_BETWEEN_URLS = re.compile(r"[\s,;]+(?=[a-z][a-z0-9+.-]*://)")
_URL_PASSWORD = re.compile(r"://[^\s:/?#@'\"<>]*:(?![0-9]+[/?#])(\S+)@")
"""Password of an address in a variable: it may contain any character."""
_IN_URL = re.compile(r"//([^\s/?#@:'\"`<>]*:)?[^\s/?#'\"`<>]+@")
"""User and password of an address; a user without a password may be a token."""
_IN_URL_UNENCODED = re.compile(
    r"(?<=[a-z]://)([^\s/?#@:'\"`<>]{1,128}:)(?![0-9]+[/?#])[^\s@'\"`<>]{1,200}@(?=[\w.-])"
)
"""A password with a slash, a question mark or a hash, which should be encoded."""
_IN_QUERY = re.compile(r"([?&]([\w.~%-]+)=)([^\s&#'\"<>\\]+)")
"""Parameter of an address, its name and its value."""
_SIGNATURE = re.compile(r"(?:^|[_.-])(?:sig|signature)$", re.IGNORECASE)
_NAMED = re.compile(
    r"(?<![\w.$-])([A-Za-z_$-][\w.$-]*+)(\\?['\"]?\]?\s{0,3}(?:=>|:=|[:=])\s{0,3})(\\?['\"`]?)",
    re.ASCII,
)
"""A name, what separates it from its value, and the quote that begins the value."""
_OPTION = re.compile(r"(?<![\w-])(--[A-Za-z][\w-]*+)( )(['\"]?)", re.ASCII)
"""The same for an option of a command."""
_UNQUOTED = re.compile(r"[^\s'\"`,;&<>(){}\[\]\\|]+")
_TO_SPACE = re.compile(r"[^\s'\"`<>]+")
_EXPRESSION = re.compile(r"[a-z_][a-z0-9_]*(?:\.[a-z_][a-z0-9_]*)+|_*[A-Za-z]+(?:_+[A-Za-z]+)+")
"""An expression of a program, such as `settings.api_key2` or `HONE_API_KEY`."""
_LONGEST_QUOTED = 4096
_DECIDES = 128
"""Number of characters of a value without quotes that decide whether it is a secret."""


def redact(text: str) -> str:
    """The text without secrets, by value, by form and by name."""
    SECRETS.read_environment()
    return _redacted(text)


def redact_start(text: str, length: int) -> str:
    """The first characters of a text, without a part of a secret at the cut."""
    return redact(text[: length + _LONGEST_QUOTED])[:length]


def redact_line(text: str) -> str:
    """The same for a line of a log: without looking for new variables in the environment.

    That takes longer than all else for a short text, and a server sets none while it runs.
    """
    return _redacted(text)


def redact_json(value: Any, *, keep: Collection[str] = (), forms: bool = True) -> Any:
    """A JSON value without the secrets in its texts. Numbers and tokens stay as they are.

    `keep`: keys of the outermost object whose values are not changed: ids, by which records are
    found again. `forms`: False hides only known values, for text that must be compared later.
    """
    SECRETS.read_environment()
    hide = _redacted if forms else SECRETS.hide
    if isinstance(value, Mapping) and keep:
        rest = {key: inner for key, inner in value.items() if key not in keep}
        return {key: value[key] for key in keep if key in value} | _redacted_json(rest, hide)
    return _redacted_json(value, hide)


def redact_urls(text: str) -> str:
    """The text without the secrets in its addresses: `https://user:password@host?token=...`."""
    if "@" in text and "//" in text:
        text = _IN_URL.sub(rf"//\1{HIDDEN}@", text)
        text = _IN_URL_UNENCODED.sub(rf"\1{HIDDEN}@", text)
    return _IN_QUERY.sub(_parameter, text) if "=" in text else text


def _redacted(text: str) -> str:
    if len(text) < SHORTEST:
        return text
    text = redact_urls(SECRETS.hide(text))
    for hint, pattern in _FORMS:
        if hint in text:
            text = pattern.sub(HIDDEN, text)
    lower = text.lower()
    if "earer " in text:
        text = _BEARER.sub(HIDDEN, text)
    if "asic " in text:
        text = _BASIC.sub(_basic, text)
    if "uthorization" in lower:
        text = _AUTHORIZATION.sub(_first_group, text)
    if "cookie" in lower:
        text = _COOKIE.sub(_first_group, text)
    if "key " in lower or "key provided" in lower:
        text = _API_KEY.sub(_api_key, text)
    if "--" in text:
        text = _without_named(text, _OPTION)
    return _without_named(text, _NAMED) if "=" in text or ":" in text else text


_TOKENS = frozenset({"logprobs", "top_logprobs"})
"""Keys of values that describe tokens one by one; their `token` is no secret."""


def _redacted_json(value: Any, hide: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return hide(value)
    if isinstance(value, Mapping):
        return {
            hide(key) if isinstance(key, str) else key: inner
            if key in _TOKENS
            else HIDDEN
            if _is_named_secret(key, inner) and hide is _redacted
            else _redacted_json(inner, hide)
            for key, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [one if isinstance(one, int | float) else _redacted_json(one, hide) for one in value]
    return value


def _is_named_secret(name: Any, value: Any) -> bool:
    if not isinstance(name, str) or not isinstance(value, str) or not is_secret(name):
        return False
    return _is_quoted_secret(name, value)


def _parameter(match: re.Match[str]) -> str:
    name = match[2]
    hidden = is_secret(name) or (len(match[3]) >= SHORTEST and _SIGNATURE.search(name))
    return f"{match[1]}{HIDDEN}" if hidden else match[0]


def _first_group(match: re.Match[str]) -> str:
    return match[0][: match.start(1) - match.start()] + HIDDEN


def _api_key(match: re.Match[str]) -> str:
    before = match.string[max(0, match.start() - 4) : match.start()].lower()
    is_key = before.rstrip(" _-").endswith("api") and _DIGIT.search(match[1])
    return _first_group(match) if is_key else match[0]


def _basic(match: re.Match[str]) -> str:
    """Hidden if it is the base64 of USER:PASSWORD."""
    try:
        decoded = base64.b64decode(match[0] + "=" * (-len(match[0]) % 4), altchars=None)
        return HIDDEN if ":" in decoded.decode() else match[0]
    except (binascii.Error, ValueError):
        return match[0]


def _without_named(text: str, pattern: re.Pattern[str]) -> str:
    """The text without the values of secret names: `api_key=...`, `"password": "..."`."""
    pieces, end = list[str](), 0
    for match in pattern.finditer(text):
        name = match[1].strip("$-.")
        if match.start() < end or not is_secret(name):
            continue
        span = _secret_value(text, match, name)
        if span is not None:
            pieces += [text[end : span[0]], HIDDEN]
            end = span[1]
    return "".join([*pieces, text[end:]]) if pieces else text


def _secret_value(text: str, match: re.Match[str], name: str) -> tuple[int, int] | None:
    """Where the value of a name begins and ends; None if it does not look like a secret."""
    between, mark, start = match[2], match[3], match.end()
    if mark:
        end = text.find(mark, start, start + _LONGEST_QUOTED)
        if end >= 0:
            return (start, end) if _is_quoted_secret(name, text[start:end]) else None
    # In `NAME=value` of a shell, the value ends at a space; elsewhere it may be one of a list.
    ends = _TO_SPACE if between == "=" and not mark and name.isupper() else _UNQUOTED
    first = ends.match(text, start, start + _DECIDES)
    if first is None or not _is_unquoted_secret(name, between, first[0].rstrip(".:!?"), ends):
        return None
    whole = ends.match(text, start)
    assert whole is not None, "it begins with what was found"
    end = start + len(whole[0].rstrip(".:!?"))
    return None if text[end : end + 1] in ("(", "[") else (start, end)


def _is_unquoted_secret(name: str, between: str, value: str, ends: re.Pattern[str]) -> bool:
    if len(value) < SHORTEST or _is_no_secret(value) or _EXPRESSION.fullmatch(value):
        return False
    if _DIGIT.search(value):
        return True
    if ends is _TO_SPACE:
        return name.lower() not in _MAY_BE_OTHER
    # `password=correct-horse` is no expression; `password: case-sensitive` may be documentation.
    return between in ("=", " ") and re.search(r"[^\w./]", value) is not None


def _is_quoted_secret(name: str, value: str) -> bool:
    if len(value) < SHORTEST or _is_no_secret(value) or _EXPRESSION.fullmatch(value):
        return False
    if re.search(r"\s", value):
        return False
    return name.lower() not in _MAY_BE_OTHER or _DIGIT.search(value) is not None
