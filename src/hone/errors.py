"""The exceptions of hone, drawn as a tree.

    HoneError
    |-- ConfigError (ValueError)          the author of the YAML or of the call must act
    |   |-- ModelNotFound                 no weights of that name; says where hone looked
    |   |-- ModelUnsupported              weights of a kind that hone cannot run
    |   |-- ModelTooLarge                 weights that do not fit into memory
    |   |-- NotFound                      no model, job, checkpoint or rollout of that name
    |   |   `-- UnknownModel              a request for a model that is not served
    |   |-- Conflict                      the name is in use, or the state does not allow it
    |   |   `-- AmbiguousModel            a model name that several projects have
    |   |-- Unprocessable                 a request with wrong fields; names each of them
    |   |-- BadRequest                    a request that cannot be answered as sent
    |   |-- GrammarError                  a schema, regex or grammar that constrains no answer
    |   |-- NotInThisVersion              known, but not implemented yet
    |   |-- Unauthorized                  no API key, or a wrong one
    |   `-- Forbidden                     a host name, web page or proxy that is not allowed
    |-- RolloutError (RuntimeError)       the agent or its environment must act
    |   |-- PolicyFailure                 the rollout failed because of the model
    |   |-- AgentFailed                   raised by agents: a failure that is not the model's
    |   |   `-- AgentCrashed              raised by hone: the agent's program or service failed
    |   |       `-- AgentTimeout          it did not end in time
    |   |-- RequestTooLarge               a request that does not fit into the engine
    |   `-- TemplateError                 messages that the chat template cannot render
    |       `-- TemplateLimit             a chat template that takes too much time or memory
    |-- TrainingError (RuntimeError)      the job must be changed
    |   |-- NonFinite                     a loss or a gradient is NaN or infinite
    |   |-- SampleRefused                 a trajectory that cannot be trained on as sent
    |   |-- Cancelled                     the job was cancelled
    |   |-- LearnerDied                   the learner's process ended during the job
    |   |-- OutOfMemory                   a GPU ran out of memory during the job
    |   |-- NotProved                     the engine does not serve the trained adapter
    |   `-- TrainingFailed                raised by a client for a job that failed on its server
    `-- ServerError (RuntimeError)        the operator must act
        |-- EngineError                   the engine cannot do what was requested
        |   `-- EngineFailed              the engine crashed and is restarted; retry
        |-- Unavailable                   full, loading or closing; retry later
        |   |-- Busy                      too many requests at once
        |   |-- Unreachable (ConnectionError)   no answer at that address
        |   `-- StorageError (OSError)      a file cannot be read or written now
        |       `-- DiskFull                no space left on the disk
        `-- StateError                    the state on disk cannot be used

A message says where (key, job, file), what (got and expected), and what to do.
"""

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any

from hone.types import FieldError


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """A sentence with the nearest known name, to follow a full stop; empty if none is near."""
    near = get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f" Did you mean {near[0]!r}?" if near else ""


def near_names(name: str, known: Sequence[str], most: int = 5) -> str:
    """The nearest of the known models, at most `most`, and how many there are; for a message.

    A name without a project is compared with the last part of each PROJECT/NAME.
    """
    if len(known) <= most:
        return ", ".join(known) or "none yet"
    spelled = {one.rpartition("/")[2]: one for one in reversed(known)} if "/" not in name else {}
    spelled |= {one: one for one in known}
    near = [spelled[one] for one in get_close_matches(name[:200], spelled, n=most)]
    if not near:
        return f"{len(known)} models, the first {', '.join(known[:most])}"
    return f"{len(known)} models, the nearest {', '.join(dict.fromkeys(near))}"


class HoneError(Exception):
    """Base class of hone's exceptions. They can be pickled, whatever their constructors take."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (type(self), str(self), vars(self))


def _rebuilt(kind: type[HoneError], message: str, fields: dict[str, Any]) -> HoneError:
    error = kind.__new__(kind, message)
    error.__dict__.update(fields)
    return error


class ConfigError(HoneError, ValueError):
    """Something the author wrote is wrong."""


class ModelNotFound(ConfigError):
    """No weights of that name."""


class ModelUnsupported(ConfigError):
    """Weights of a kind that hone cannot run."""


class ModelTooLarge(ConfigError):
    """Weights that do not fit into memory."""


class NotFound(ConfigError):
    """Nothing of that name."""


class UnknownModel(NotFound):
    """A request for a model that is not served; says which are."""

    param = "model"
    code = "model_not_found"


class Conflict(ConfigError):
    """The name is in use, or the state does not allow it."""


class AmbiguousModel(Conflict):
    """A model name that several projects have; names the candidates."""

    param = "model"
    code = "model_ambiguous"


class Unprocessable(ConfigError):
    """A request with wrong fields; names all of them."""

    def __init__(self, fields: Sequence[FieldError]) -> None:
        self.fields = tuple(fields)
        lines = (f"{'.'.join(map(str, f.path))}: {f.message}" for f in self.fields)
        super().__init__("\n".join(lines))


class BadRequest(ConfigError):
    """A request that cannot be answered as sent; `param` names the wrong key."""

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400
    ) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.status = status


class GrammarError(ConfigError):
    """A JSON schema, regular expression or grammar that answers cannot be constrained by."""


class NotInThisVersion(ConfigError):
    """Known, but not implemented yet. Such options are refused, never ignored."""


class Unauthorized(ConfigError):
    """No API key, or a wrong one."""


class Forbidden(ConfigError):
    """A host name, web page or proxy that the server does not allow, whatever the API key."""

    def __init__(self, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        self.code = code


class RolloutError(HoneError, RuntimeError):
    """The agent or its environment failed."""


class PolicyFailure(RolloutError):
    """The rollout failed because of the model: an unusable answer, a limit it reached.

    Agents raise it; `finetuning.on_policy_failure` says what to do with the rollout.
    """

    def __init__(self, message: str, *, reason: str = "policy", details: str = "") -> None:
        """`reason` is one word, to count failures by, such as `step_limit`.

        `details` is shown in place of the traceback.
        """
        super().__init__(message)
        self.reason = reason
        self.details = details


class AgentFailed(RolloutError):
    """The rollout failed for a reason that is not the model's, such as a tool that is down.

    Agents raise it; the rollout is retried and never scored, whatever the model answered before.
    """

    def __init__(self, message: str, *, reason: str = "agent_error", details: str = "") -> None:
        """`reason` is one word, to count failures by; `details` is the agent's own output."""
        super().__init__(message)
        self.reason = reason
        self.details = details


class AgentCrashed(AgentFailed):
    """The agent's program or service failed. hone raises it; agents raise AgentFailed.

    After an answer of the model it is a failure of the policy, unless `is_outside`.
    """

    def __init__(
        self,
        message: str,
        *,
        reason: str = "agent_error",
        details: str = "",
        is_outside: bool = False,
    ) -> None:
        """`is_outside`: the cause is neither the agent nor the model, such as a lost connection."""
        super().__init__(message, reason=reason, details=details)
        self.is_outside = is_outside


class AgentTimeout(AgentCrashed):
    """The agent did not end in time: a failure of the policy if the model had answered it."""

    def __init__(self, message: str, *, details: str = "") -> None:
        super().__init__(message, reason="timeout", details=details)


class RequestTooLarge(RolloutError):
    """A request that does not fit into the engine, however long it waits."""


class TemplateError(RolloutError):
    """Messages that the chat template cannot render."""


class TemplateLimit(TemplateError):
    """A chat template that takes too much time or memory, or writes too much."""


class TrainingError(HoneError, RuntimeError):
    """A job failed."""


class NonFinite(TrainingError):
    """A loss or a gradient is NaN or infinite."""


class SampleRefused(TrainingError):
    """A trajectory that cannot be trained on as sent."""


class Cancelled(TrainingError):
    """The job was cancelled."""


class LearnerDied(TrainingError):
    """The learner's process ended during a job."""


class OutOfMemory(TrainingError):
    """A GPU ran out of memory during the job; says what to reduce."""


class NotProved(TrainingError):
    """The engine does not serve the trained adapter."""


class TrainingFailed(TrainingError):
    """A job failed on its server; says which, why, and where its log is."""


class ServerError(HoneError, RuntimeError):
    """The operator must fix the installation or the machine."""


class EngineError(ServerError):
    """The engine cannot do what was requested."""


class EngineFailed(EngineError):
    """The engine crashed during a request. The server restarts it; the request may be retried."""

    status = 503

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.headers = {"Retry-After": str(retry_after_s)}


class Unavailable(ServerError):
    """Full, loading or closing; retry later."""

    headers: Mapping[str, str] = MappingProxyType({"Retry-After": "1"})


class Busy(Unavailable):
    """Too many requests at once."""

    status = 429
    code = "rate_limit_exceeded"

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.headers = {"Retry-After": str(retry_after_s)}


class Unreachable(Unavailable, ConnectionError):
    """No answer at that address, or another server than expected."""


class StorageError(Unavailable, OSError):
    """The operating system refuses to read or write a file. The file itself may be intact."""


class DiskFull(StorageError):
    """No space left on the disk, or no quota."""


class StateError(ServerError):
    """The state on disk cannot be used."""
