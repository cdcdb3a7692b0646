"""Every exception hone raises on purpose, drawn as a tree.

    HoneError
    |-- ConfigError (ValueError)          the author of the YAML or of the call must act
    |   |-- ModelNotFound                 no weights under that name; says where it looked
    |   |-- ModelUnsupported              weights found, but of a kind hone cannot run
    |   |-- ModelTooLarge                 weights found, but they cannot fit in memory
    |   |-- NotFound                      no model, job, checkpoint or rollout of that name
    |   |   `-- UnknownModel              a request for a model that is not served
    |   |-- Conflict                      the name or the state is taken; says by what
    |   |-- Unprocessable                 a request whose fields are wrong; names each of them
    |   |-- BadRequest                    a request that cannot be answered as it was sent
    |   |-- NotInThisVersion              known, but not built yet
    |   `-- Unauthorized                  no key, or not the right one
    |-- RolloutError (RuntimeError)       the agent or its world must act
    |   |-- PolicyFailure                 the model, not its world, made the rollout fail
    |   |-- RequestTooLarge               a request that could never fit the engine
    |   `-- TemplateError                 messages that the chat template cannot express
    |-- TrainingError (RuntimeError)      the job must be changed
    |   |-- NonFinite                     a loss or a gradient is NaN or infinite
    |   |-- SampleRefused                 a trajectory that cannot be trained on as sent
    |   |-- Cancelled                     the job was asked to stop
    |   |-- LearnerDied                   the learner's process ended under the job
    |   |-- NotProved                     the engine does not serve what was trained
    |   `-- TrainingFailed                what a client raises for a job that failed on its server
    `-- ServerError (RuntimeError)        the operator must act
        |-- EngineError                   the engine cannot do what was asked of it
        |   `-- EngineFailed              the engine broke and is started again; try again
        |-- Unavailable                   not now: full, loading or closing; try again
        |   |-- Busy                      too many requests at once
        |   |-- Unreachable (ConnectionError)   nobody answers at that address
        |   `-- StorageError (OSError)      a file cannot be read or written just now
        |       `-- DiskFull                there is no space left
        `-- StateError                    the state on disk cannot be used as it is

A message says where (key, job, file), what (got and expected), and what to do.
"""

from collections.abc import Sequence

from hone.types import FieldError


class HoneError(Exception):
    """Base of everything hone raises on purpose."""


class ConfigError(HoneError, ValueError):
    """Something the author wrote is wrong."""


class ModelNotFound(ConfigError):
    """No weights under that name."""


class ModelUnsupported(ConfigError):
    """Weights of a kind hone cannot run."""


class ModelTooLarge(ConfigError):
    """Weights that cannot fit in memory."""


class NotFound(ConfigError):
    """Nothing of that name."""


class UnknownModel(NotFound):
    """A request for a model that is not served; says which are."""

    param = "model"
    code = "model_not_found"


class Conflict(ConfigError):
    """The name, or the state it is in, does not allow it."""


class Unprocessable(ConfigError):
    """A request whose fields are wrong, all of them named at once."""

    def __init__(self, fields: Sequence[FieldError]) -> None:
        self.fields = tuple(fields)
        lines = (f"{'.'.join(map(str, f.path))}: {f.message}" for f in self.fields)
        super().__init__("\n".join(lines))


class BadRequest(ConfigError):
    """A request that cannot be answered as it was sent; `param` names the key at fault."""

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400
    ) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.status = status


class NotInThisVersion(ConfigError):
    """Known, but not built yet; never accepted and ignored."""


class Unauthorized(ConfigError):
    """No key, or not the right one."""


class RolloutError(HoneError, RuntimeError):
    """The agent, or the world it acts in, failed."""


class PolicyFailure(RolloutError):
    """The model made the rollout fail: an answer of no use, a limit it ran into.

    Agents raise it; `finetuning.on_policy_failure` says what becomes of the rollout.
    """

    def __init__(self, message: str, *, reason: str = "policy") -> None:
        """`reason` is one word, by which such failures are counted: `step_limit`."""
        super().__init__(message)
        self.reason = reason


class RequestTooLarge(RolloutError):
    """A request that could never fit the engine, however long it waited."""


class TemplateError(RolloutError):
    """Messages the chat template cannot express."""


class TrainingError(HoneError, RuntimeError):
    """A job failed."""


class NonFinite(TrainingError):
    """A loss or a gradient is NaN or infinite."""


class SampleRefused(TrainingError):
    """A trajectory that cannot be trained on as it was sent."""


class Cancelled(TrainingError):
    """The job was asked to stop, and did."""


class LearnerDied(TrainingError):
    """The learner's process ended while it had a job."""


class NotProved(TrainingError):
    """The engine does not serve what was trained."""


class TrainingFailed(TrainingError):
    """A job failed on its server; says which, why, and where its log is."""


class ServerError(HoneError, RuntimeError):
    """The installation or the machine must be mended by its operator."""


class EngineError(ServerError):
    """The engine cannot do what was asked of it."""


class EngineFailed(EngineError):
    """The engine broke under a request. The server starts it again: the request may be repeated."""

    status = 503

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.headers = {"Retry-After": str(retry_after_s)}


class Unavailable(ServerError):
    """Not now: full, loading or closing."""


class Busy(Unavailable):
    """Too many requests at once."""

    status = 429
    code = "rate_limit_exceeded"

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.headers = {"Retry-After": str(retry_after_s)}


class Unreachable(Unavailable, ConnectionError):
    """Nobody answers at that address, or not the server that was expected there."""


class StorageError(Unavailable, OSError):
    """The operating system refuses to read or write a file. The file itself may be in order."""


class DiskFull(StorageError):
    """No space left on the disk, or no quota."""


class StateError(ServerError):
    """The state on disk cannot be used as it is."""
