"""The rollout a request belongs to: X-Hone headers, and the /rollout/ID/v1 base URL.

In:   a rollout's id, the calling function, a temperature, a step, aliases of models
Out:  headers and URLs for clients; and back to a RolloutScope on the server, checked

A client in another process has only the URL, so the URL can carry the other values too:
/rollout/ID,temperature=0,step=3/v1. If URL and headers set the same value, they must agree; only
the header's function takes precedence, because the calling code set it.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self, get_args

from hone.errors import BadRequest
from hone.types import RolloutId

ROLLOUT_HEADER = "X-Hone-Rollout"
FUNCTION_HEADER = "X-Hone-Function"
TEMPERATURE_HEADER = "X-Hone-Temperature"
HELD_HEADER = "X-Hone-Held-S"
"""Header of a response: for how many seconds the server held the request; absent if it did not."""

ATTEMPT = "~"
"""Separates a rollout's name from its attempt in ids such as `run:0.0.3.1~2`."""
ROLLOUT_ID = re.compile(get_args(RolloutId)[1].pattern)
MAX_FUNCTION = 512
_IN_URL = re.compile(r"[A-Za-z0-9_-]+")
_HEADERS = {
    "rollout": ROLLOUT_HEADER,
    "temperature": TEMPERATURE_HEADER,
    "step": "X-Hone-Step",
    "alias": "X-Hone-Alias",
}
_ALIAS = r"[A-Za-z0-9][A-Za-z0-9._:~-]{0,199}=[A-Za-z0-9][A-Za-z0-9._~-]{0,259}"
_FORMS = {
    "rollout": (
        ROLLOUT_ID,
        "use letters, digits and '._~:-', at most 200, and begin with a letter or a digit",
    ),
    "temperature": (
        re.compile(r"(100|[0-9]{1,2})(\.[0-9]{0,40})?(e-?[0-9]{1,3})?"),
        "use 0 for greedy, else a number up to 100",
    ),
    "step": (re.compile(r"[0-9]{1,9}"), "use the number of a step, such as 0"),
    "alias": (
        re.compile(rf"{_ALIAS}(\+{_ALIAS}){{0,99}}"),
        "use ALIAS=MODEL, joined by +, with ~ for each slash",
    ),
    "function": (
        re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*"),
        "use names of letters, digits, _ and -, joined by dots",
    ),
}
ALIAS_TEXT = _FORMS["alias"][0]
MAX_TEMPERATURE = 100.0
"""As in the body of a request."""


@dataclass(frozen=True, slots=True)
class RolloutScope:
    """What a request belongs to, and how its rollout is sampled."""

    rollout: str = ""
    """Empty outside any rollout."""
    function: str = ""
    """Path of the calling function, outermost first, joined by dots; empty outside any."""
    temperature: float | None = None
    """Replaces the temperature of the rollout's requests; None leaves it to them."""
    step: int | None = None
    """The step of the run's model that answers; None is the newest."""
    aliases: tuple[tuple[str, str], ...] = ()
    """Names and the models that they mean in this rollout; a run has its own as well."""

    @property
    def alias_text(self) -> str:
        """The aliases as text, for the header and the URL."""
        # A slash would end the URL segment, even as %2F; no name contains a ~.
        return "+".join(f"{alias}={model}" for alias, model in self.aliases).replace("/", "~")

    @property
    def _settings(self) -> dict[str, str]:
        """The settings that both headers and URL carry."""
        settings = {
            "temperature": "" if self.temperature is None else f"{self.temperature:g}",
            "step": "" if self.step is None else str(self.step),
            "alias": self.alias_text,
        }
        return {name: text for name, text in settings.items() if text}

    @property
    def headers(self) -> dict[str, str]:
        headers = {ROLLOUT_HEADER: self.rollout, FUNCTION_HEADER: self.function}
        headers |= {_HEADERS[name]: text for name, text in self._settings.items()}
        return {name: text for name, text in headers.items() if text}

    def url(self, base_url: str) -> str:
        """The rollout's own base URL at the server with this base URL."""
        segment = self.rollout
        # Names that a URL would have to escape are left out, such as `<workflow>`.
        if names := [name for name in self.function.split(".") if _IN_URL.fullmatch(name)]:
            segment += f",function={'.'.join(names)}"
        segment += "".join(f",{name}={text}" for name, text in self._settings.items())
        return f"{base_url.rstrip('/').removesuffix('/v1')}/rollout/{segment}/v1"

    @classmethod
    def parse(cls, headers: Mapping[str, str], segment: str | None) -> Self:
        """The scope of a request; `segment` follows /rollout/ in its URL. Raises BadRequest."""
        values = {} if segment is None else _parse_segment(segment)
        for name, header in _HEADERS.items():
            text = headers.get(header)
            if text is None or (name == "rollout" and not text):
                continue
            if values.setdefault(name, text) != text:
                raise BadRequest(
                    f"the address says {name} {values[name][:40]!r} and {header} {text[:40]!r}; send "
                    "one",
                    param=header,
                )
        function = headers.get(FUNCTION_HEADER) or values.get("function", "")
        if values and "rollout" not in values:
            header = _HEADERS[next(iter(values))]
            raise BadRequest(
                f"{header} is for rollouts, and this request names none; send {ROLLOUT_HEADER} too",
                param=header,
            )
        for name, text in values.items():
            form, remedy = _FORMS[name]
            too_hot = (
                name == "temperature" and form.fullmatch(text) and float(text) > MAX_TEMPERATURE
            )
            if too_hot or not form.fullmatch(text):
                raise BadRequest(f"{name} is {text[:200]!r}; {remedy}", param=_HEADERS.get(name))
        if len(function) > MAX_FUNCTION:
            raise BadRequest(
                f"{FUNCTION_HEADER} has {len(function)} characters; at most {MAX_FUNCTION}",
                param=FUNCTION_HEADER,
            )
        return cls(
            rollout=values.get("rollout", ""),
            function=function,
            temperature=float(values["temperature"]) if "temperature" in values else None,
            step=int(values["step"]) if "step" in values else None,
            aliases=_parse_aliases(values.get("alias", "")),
        )


def without_attempt(rollout: str) -> str:
    """The rollout's name, which all its attempts share: they draw the same answers.

    A rollout is attempted again after an infrastructure failure, or if the run was interrupted. With
    other draws, answers that bring down the infrastructure would be sampled away.
    """
    return rollout.partition(ATTEMPT)[0]


def _parse_aliases(text: str) -> tuple[tuple[str, str], ...]:
    pairs = (pair.partition("=") for pair in text.replace("~", "/").split("+") if pair)
    return tuple((alias, model) for alias, _, model in pairs)


def _parse_segment(segment: str) -> dict[str, str]:
    """`ID,temperature=0,step=3` as rollout, temperature and step."""
    rollout, *rest = segment.split(",")
    values = {"rollout": rollout}
    for text in rest:
        name, _, value = text.partition("=")
        if name not in _FORMS or name in values:
            raise BadRequest(
                f"the address of the rollout has {text[:40]!r} after its id; use "
                "temperature=NUMBER, step=NUMBER, function=PATH and alias=NAME=MODEL, each once at "
                "most"
            )
        values[name] = value
    return values
