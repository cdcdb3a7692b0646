"""Every exception hone raises on purpose, drawn as a tree.

    HoneError
    |-- ConfigError (ValueError)          the author of the YAML or of the call must act
    |   |-- ModelNotFound                 no weights under that name; says where it looked
    |   |-- ModelUnsupported              weights found, but of a kind hone cannot run
    |   `-- ModelTooLarge                 weights found, but they cannot fit in memory
    |-- RolloutError (RuntimeError)       the agent or its world must act
    |   |-- RequestTooLarge               a request that could never fit the engine
    |   `-- TemplateError                 messages that the chat template cannot express
    |-- TrainingError (RuntimeError)      the job must be changed
    |   |-- NonFinite                     a loss or a gradient is NaN or infinite
    |   |-- SampleRefused                 a trajectory that cannot be trained on as sent
    |   |-- Cancelled                     the job was asked to stop
    |   `-- LearnerDied                   the learner's process ended under the job
    `-- ServerError (RuntimeError)        the operator must act
        `-- EngineError                   the engine cannot do what was asked of it

A message says where (key, job, file), what (got and expected), and what to do.
"""


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


class RolloutError(HoneError, RuntimeError):
    """The agent, or the world it acts in, failed."""


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


class ServerError(HoneError, RuntimeError):
    """The installation or the machine must be mended by its operator."""


class EngineError(ServerError):
    """The engine cannot do what was asked of it."""
