"""Find secrets by the name of a value or by its form, and remove them from text.

In:   the name of a key, an option, a header or an environment variable; text of a message
Out:  whether a value of that name is a secret; the text without the secrets in it

No file or log line that hone writes contains a secret: the configuration, the server's log and
messages about wrong values all use this module.
"""

import re

HIDDEN = "<hidden>"
_NAMES = (
    r"(?:api|access|secret|private)[_-]?key|token|secret|password|passwd|passphrase|authorization|"
    r"credentials?|cookie|pat"
)
_NAME = re.compile(rf"(?:^|[_.-])(?:{_NAMES})$", re.IGNORECASE)
_IN_TEXT = re.compile(
    rf"((?<![^\W_])(?:bearer |sk-|hf_|(?:{_NAMES})['\"]?\s*[:=]\s*['\"]?|api[_-]?key ))[\w-]{{8,}}",
    re.IGNORECASE,
)
_IN_URL = re.compile(r"//([^\s/?#@:]*:)?[^\s/?#]+@")
"""User and password of an address; a user without a password may be a token."""
_IN_QUERY = re.compile(r"([?&]([\w.~%-]+)=)[^\s&#'\"]+")
"""Parameter of an address, its name and its value."""


def is_secret(name: str) -> bool:
    """Whether a key, an option or a variable of this name holds a secret."""
    return _NAME.search(name) is not None


def redact(text: str) -> str:
    """The text without what looks like a secret: `Bearer ...`, `sk-...`, `api_key=...`."""
    return _IN_TEXT.sub(rf"\1{HIDDEN}", redact_urls(text))


def redact_urls(text: str) -> str:
    """The text without the secrets in its addresses: `https://user:password@host?token=...`."""
    return _IN_QUERY.sub(_parameter, _IN_URL.sub(rf"//\1{HIDDEN}@", text))


def _parameter(match: re.Match[str]) -> str:
    return f"{match[1]}{HIDDEN}" if is_secret(match[2]) else match[0]
