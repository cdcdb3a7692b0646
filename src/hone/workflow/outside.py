"""Whether the cause of a failure lies outside the agent and its model: network, servers, machine.

In:   an exception with all that caused it; the error output of a program
Out:  a reason to count by, or None: nothing says that the cause lies outside

The default is None: after an answer of the policy the failure is then the policy's. What lies
outside is recognised by what an exception says (a status, an errno, the name of its class), not by
a list of libraries, because agents use more libraries than such a list has.
"""

import asyncio
import errno
import re
import sys
import traceback
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from typing import Any

from hone.errors import (
    AgentCrashed,
    AgentFailed,
    AmbiguousModel,
    ConfigError,
    ServerError,
    UnknownModel,
    Unreachable,
)
from hone.files.place import chain_of

LISTED = "infrastructure_exceptions"
"""The reason of an exception that the YAML lists."""
MODEL_NAME = "model_name"
"""The reason of a request for a model that its server does not have, or has in several projects. The
same request cannot succeed, so such a rollout is not retried."""
_MODEL_CODES = frozenset({UnknownModel.code, AmbiguousModel.code})

_STATE = frozenset({401, 402, 408, 409})
"""Statuses below 500, besides 429, with which a model's server reports its own state or that of the
account; the content of the request, which the policy may have caused, is not the reason."""
_GRPC = {
    "RESOURCE_EXHAUSTED": 429,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
    "INTERNAL": 500,
    "UNKNOWN": 500,
    "DATA_LOSS": 500,
}
"""Codes of gRPC, and the statuses that they are over HTTP."""
_THROTTLED = re.compile(r"Throttl|TooManyRequests|SlowDown|LimitExceeded|ServiceUnavailable")
"""Codes of AWS that come with status 400."""

_NETWORK = frozenset(
    [
        "APIConnectionError",
        "APITimeoutError",
        "AutoReconnect",
        "BadStatusLine",
        "ClientConnectionError",
        "ClientPayloadError",
        "ConnectError",
        "ConnectTimeout",
        "ConnectTimeoutError",
        "ConnectionAbortedError",
        "ConnectionClosed",
        "ConnectionClosedError",
        "ConnectionError",
        "ConnectionFailure",
        "ConnectionLost",
        "ConnectionRefusedError",
        "ConnectionResetError",
        "ConnectionTimeout",
        "BrokenPipeError",
        "EndpointConnectionError",
        "HTTPClientError",
        "IncompleteRead",
        "MaxRetryError",
        "NetworkTimeout",
        "PoolTimeout",
        "ReadTimeout",
        "ReadTimeoutError",
        "RemoteDisconnected",
        "RemoteProtocolError",
        "ServerDisconnectedError",
        "ServerSelectionTimeoutError",
        "ServerTimeoutError",
        "WriteTimeout",
        "gaierror",
        "herror",
    ]
)
"""Classes that mean a network fault, in whatever library."""
_SSL = frozenset({"SSLError", "SSLCertVerificationError", "SSLEOFError", "SSLZeroReturnError"})
_OF_LIBRARY = {
    "requests": {"Timeout", "ChunkedEncodingError", "RetryError"},
    "urllib3": {"TimeoutError", "ProtocolError", "ProxyError"},
    "httpx": {"TransportError"},
    "httpx2": {"TransportError"},
    "httpcore": {"TimeoutException", "ProtocolError", "NetworkError"},
    "httpcore2": {"TimeoutException", "ProtocolError", "NetworkError"},
    "redis": {"TimeoutError", "BusyLoadingError"},
}
"""Classes with names that other libraries use for other things."""
_SERVER = frozenset(
    {"RateLimitError", "TooManyRequests", "ServiceUnavailable", "ServiceUnavailableError"}
)
_REQUEST = frozenset(
    {"UnsupportedProtocol", "LocalProtocolError", "InvalidURL", "InvalidSchema", "MissingSchema"}
)
"""Classes of a request that cannot be sent as written, such as a URL that the model made up. They
inherit from a library's network errors."""
_MACHINE = frozenset(
    {"MemoryError", "OutOfMemoryError", "OutOfMemory", "AcceleratorError"}
    | {"BrokenExecutor", "BrokenProcessPool", "TerminatedWorkerError"}
)
"""Out of memory, on the CPU or a device, and pools whose processes were killed."""
_MACHINE_TEXT = ("CUDA", "HIP", "MPS backend", "can't start new thread")
"""How messages of a RuntimeError begin that report the machine's limits."""

_ERRNOS = frozenset(
    getattr(errno, name)
    for name in [
        "ENOSPC",
        "EDQUOT",
        "EROFS",
        "EIO",
        "EMFILE",
        "ENFILE",
        "ENOMEM",
        "EAGAIN",
        "ENOBUFS",
        "ENOLCK",
        "ENODEV",
        "ENXIO",
        "ESTALE",
        "ENETDOWN",
        "ENETUNREACH",
        "ENETRESET",
        "EHOSTDOWN",
        "EHOSTUNREACH",
        "ETIMEDOUT",
        "EADDRINUSE",
        "EADDRNOTAVAIL",
        "ECONNREFUSED",
        "ECONNRESET",
        "ECONNABORTED",
        "EPIPE",
    ]
    if hasattr(errno, name)
)
"""Errors of the operating system that no answer of a model causes. Others are the agent's own: a
file that does not exist may have been named by the model."""
_SQLITE = ("SQLITE_FULL", "SQLITE_IOERR", "SQLITE_NOMEM", "SQLITE_BUSY", "SQLITE_LOCKED")
_NETWORK_MODULES = frozenset(
    [
        "socket",
        "ssl",
        "http",
        "urllib",
        "urllib3",
        "requests",
        "aiohttp",
        "httpx",
        "httpx2",
        "httpcore",
        "httpcore2",
        "botocore",
        "aiobotocore",
        "websockets",
        "grpc",
        "redis",
        "pymongo",
        "asyncpg",
        "psycopg",
        "openai",
        "anthropic",
    ]
)


def outside_reason(error: BaseException, listed: Collection[str] = ()) -> str | None:
    """The reason if the error, or one that caused it, came from outside; otherwise None.

    `listed` are the class names of `finetuning.infrastructure_exceptions`.
    """
    return next((r for one in chain_of(error) if (r := reason_of(one, listed))), None)


def reason_of(error: BaseException, listed: Collection[str] = ()) -> str | None:
    """The same for one error, without those that caused it."""
    try:
        return _reason(error, listed)
    except Exception:  # noqa: BLE001  # it reads attributes, and a user's exception may raise anything
        return None


def _reason(error: BaseException, listed: Collection[str]) -> str | None:
    if is_listed(error, listed):
        return LISTED
    if isinstance(error, AgentFailed):
        is_outside = not isinstance(error, AgentCrashed) or error.is_outside
        return error.reason if is_outside else None
    if isinstance(error, Unreachable):
        return "connection"
    if isinstance(error, ConfigError):
        return "agent_error"  # the author's mistake, whatever the model answers
    if api_code(error) in _MODEL_CODES:
        return MODEL_NAME
    if isinstance(error, ServerError) or _is_refusal(error):
        return "server_error"
    names = {kind.__name__ for kind in type(error).__mro__}
    answers = [status for status in _statuses(error) if 400 <= status < 500 and status != 408]
    if names & _REQUEST or answers:
        # A server answered; libraries derive this from their network errors, too. 408 is a timeout,
        # also of LiteLLM's client itself.
        return None
    return _network_reason(error, names) or _machine_reason(error, names)


def is_listed(error: BaseException, listed: Collection[str]) -> bool:
    """Whether the class of the error, or one that it inherits from, has one of these names."""
    return bool(listed) and any(
        _is_named(kind, name) for kind in type(error).__mro__ for name in listed
    )


def is_outside_status(status: int) -> bool:
    """Whether an HTTP status of any server says that the cause lies outside."""
    return status == 429 or 500 <= status < 600


def is_outside_answer(status: int) -> bool:
    """The same for a model's server, which also reports its own state below 500."""
    return is_outside_status(status) or status in _STATE


def api_code(error: BaseException) -> str | None:
    """The code in an error response of a model's server; Anthropic's client has it only in the body."""
    if not any(kind.__name__ == "APIStatusError" for kind in type(error).__mro__):
        return None
    body, code = _get(error, "body"), _get(error, "code")
    code = code or (_item(body, "error", "code") if isinstance(body, Mapping) else None)
    return code if isinstance(code, str) else None


def _is_named(kind: type, name: str) -> bool:
    if "." not in name:
        return kind.__name__ == name
    if f"{kind.__module__}.{kind.__qualname__}" == name:
        return True
    module, _, last = name.rpartition(".")  # a name that a package exports from another module
    return getattr(sys.modules.get(module), last, None) is kind


# ---- statuses -----------------------------------------------------------------------------------


def _is_refusal(error: BaseException) -> bool:
    """Whether it carries the status of a server that is overloaded or broken."""
    is_model = any(kind.__name__ == "APIStatusError" for kind in type(error).__mro__)
    is_outside = is_outside_answer if is_model else is_outside_status
    return any(map(is_outside, _statuses(error)))


def _statuses(error: BaseException) -> Iterator[int]:
    """The statuses of an error, under the names that libraries use."""
    if isinstance(error, SystemExit):
        return  # its code is that of a process
    response = _get(error, "response")
    values = [_get(error, name) for name in ("status_code", "status", "code", "http_status")]
    values += [_get(response, name) for name in ("status_code", "status")]
    if any(kind.__name__ == "RpcError" for kind in type(error).__mro__) and callable(values[2]):
        with suppress(Exception):  # a library's method
            values.append(values[2]())
    if isinstance(response, Mapping):  # botocore
        values.append(_item(response, "ResponseMetadata", "HTTPStatusCode"))
        if _THROTTLED.search(str(_item(response, "Error", "Code") or "")):
            yield 429
    for value in values:
        if (status := _as_status(value)) is not None:
            yield status


def _as_status(value: Any) -> int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return int(value)
    name = value if isinstance(value, str) else getattr(value, "name", None)
    if not isinstance(name, str):
        return None
    if re.fullmatch(r"[1-5]\d\d", name):
        return int(name)
    return _GRPC.get(name)


def _get(value: Any, name: str) -> Any:
    """An attribute; None if there is none, or if reading it raises."""
    with suppress(Exception):  # a user's exception may raise anything
        return getattr(value, name, None)
    return None


def _item(value: Mapping[Any, Any], *path: str) -> Any:
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None  # type: ignore[assignment]
    return value


# ---- network and machine ------------------------------------------------------------------------


def _network_reason(error: BaseException, names: set[str]) -> str | None:
    if isinstance(error, TimeoutError | asyncio.CancelledError):
        if _is_network_timeout(error):
            return "timeout"
        names = names - {"TimeoutError"}
    if names & _SERVER:
        return "server_error"
    own = {
        kind.__name__
        for kind in type(error).__mro__
        if kind.__name__ in _OF_LIBRARY.get(kind.__module__.partition(".")[0], ())
    }
    network = (names & (_NETWORK | _SSL)) | own
    if not network:
        return None
    late = any("Timeout" in name for name in names)
    return "timeout" if late else "connection"


def _is_network_timeout(error: BaseException) -> bool:
    """Whether a timeout, or the cancellation by one, hit a network library.

    Python has one class for a socket's timeout and for `asyncio.timeout` around the agent's own
    work, such as code that the model wrote. They differ in where they were raised.
    """
    if isinstance(error, TimeoutError):
        text = str(error.args[0]) if error.args else ""
        if error.errno is not None or text == "timed out" or "operation timed out" in text:
            return True
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = str(frame.f_globals.get("__name__", ""))
        if module.partition(".")[0] in _NETWORK_MODULES:
            return True
    return False


def _machine_reason(error: BaseException, names: set[str]) -> str | None:
    is_machine = bool(names & _MACHINE)
    is_machine |= isinstance(error, OSError) and error.errno in _ERRNOS
    is_machine |= str(_get(error, "sqlite_errorname") or "").startswith(_SQLITE)
    if isinstance(error, RuntimeError):
        with suppress(Exception):
            is_machine |= str(error).startswith(_MACHINE_TEXT)
    return "resources" if is_machine else None


# ---- a program's error output -------------------------------------------------------------------

_TRACEBACK = "Traceback (most recent call last):"
_CHAINED = ("direct cause of the following exception", "the above exception, another exception")
_HEADING = re.compile(r"^(?:Uncaught )?(?:[A-Za-z_]\w*\.)*([A-Za-z_]\w*)(?::\s*(.*))?$")
_STATUS_CLASSES = frozenset(
    {"HTTPError", "HTTPStatusError", "ClientResponseError", "APIStatusError", "APIError"}
    | {"InternalServerError", "ServerError", "ClientError"}
)
_NAME_CLASSES = frozenset({"NotFoundError", "ConflictError"})
_MODEL_CODE_TEXT = re.compile(rf"'code': '({'|'.join(sorted(_MODEL_CODES))})'")
_STATUS_TEXT = re.compile(r"\b(429|5\d\d)\b")
_ERRNO_TEXT = re.compile(r"\[Errno (\d+)\]")
_CODES = re.compile(
    r"\b(ECONNREFUSED|ECONNRESET|ECONNABORTED|ETIMEDOUT|EAI_AGAIN|EPIPE|EHOSTUNREACH|ENETUNREACH"
    r"|ENOSPC|EMFILE|ENFILE|EIO|EDQUOT|EROFS|ENOMEM)\b"
)
_LAST_LINES = 40


def outside_in(output: str) -> str | None:
    """The reason if a program's error output ends with an error from outside; otherwise None.

    Reads the last traceback of Python with those that caused it, or the last lines of any other
    program: the names of the classes, statuses and error codes of the operating system.
    """
    for line in _last_error(output):
        heading = _HEADING.match(line)
        if heading is None:
            if "JavaScript heap out of memory" in line:
                return "resources"
            if re.match(r"\s+(code|errno): ", line) and _CODES.search(line):
                return "connection"
            continue
        name, text = heading[1], heading[2] or ""
        if name in _NAME_CLASSES and _MODEL_CODE_TEXT.search(text):
            return MODEL_NAME
        if name in _SERVER or (name in _STATUS_CLASSES and _STATUS_TEXT.search(text[:80])):
            return "server_error"
        if name in _NETWORK | _SSL:
            return "timeout" if "Timeout" in name else "connection"
        number = _ERRNO_TEXT.search(text[:80])
        if name in _MACHINE or (number is not None and int(number[1]) in _ERRNOS):
            return "resources"
        if name == "Error" and _CODES.search(text[:200]):
            return "connection"
    return None


def is_unparseable_in(output: str) -> bool:
    """Whether a program's error output ends with an error that says that text could not be parsed."""
    last = output.rpartition(_TRACEBACK)[2].splitlines()[-_LAST_LINES:]
    errors = [(heading[1], heading[2] or "") for line in last if (heading := _HEADING.match(line))]
    return any(
        name in ("JSONDecodeError", "ValidationError", "ZodError")
        or (name == "SyntaxError" and "JSON" in text)
        for name, text in errors
    )


def _last_error(output: str) -> list[str]:
    """The lines of the last error, innermost cause first."""
    *before, last = output.split(_TRACEBACK)
    if not before:
        return output.splitlines()[-_LAST_LINES:]
    parts = [last]
    while len(before) > 1 and any(text in before[-1] for text in _CHAINED):
        parts.append(before.pop())
    return [line for part in reversed(parts) for line in part.splitlines()]
