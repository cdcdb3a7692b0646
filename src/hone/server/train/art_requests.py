"""The requests of ART's clients, and their translation to hone's types.

In:   ART's model object with its `_internal_config`; trajectory groups; the bodies of its routes
Out:  ModelSpec, TrajectoryGroups, keys of TrainConfig; names of keys that mean nothing here

Every key is honoured, refused, or named as not applicable, by the tables here and in model_args.py.
Null means absent, except for the one key for which null is a value. Groups keep unknown keys: they
are logged as they were sent.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

from hone.options import ONE_WAY, RENAMED, check_only
from hone.server.serve.engine_choice import CheckArg
from hone.server.train.model_args import ENGINE_ONLY, Read, flat, read_args
from hone.train_config import ART_LEARNING_RATE
from hone.trajectory import History, Trajectory, TrajectoryGroup
from hone.types import (
    AnyName,
    Failure,
    ModelKey,
    ModelSpec,
    Name,
    TrainConfig,
    stored_name,
)

INTERNAL = "_internal_config"

ART_DEFAULTS: dict[str, JsonValue] = {"learning_rate": ART_LEARNING_RATE, "max_staleness": None}
"""Keys of TrainConfig with another default than hone's. ART has no staleness limit: its clients may
send rollouts of the previous step, and the metric shows it."""

_PLUGIN_SECTIONS = {"init_args", "engine_args", "trainer_args"}
_PLUGIN_CONSTANTS = {"learning_rate": 5e-05, "beta": 0, "kl_penalty_coef": 0}
"""What NAT's plugin sends in `config` whatever its user wrote: it reads the values from a dict as if
they were attributes. Of the last two it sends the one that its version of ART has."""

_JOB = {
    "config.learning_rate": "learning_rate",
    "config.beta": "beta",
    "config.kl_penalty_coef": "kl_penalty_coef",
    "dev_config.epsilon": "epsilon",
    "dev_config.epsilon_high": "epsilon_high",
    "dev_config.kl_penalty_coef": "kl_penalty_coef",
    "dev_config.scale_rewards": "scale_rewards",
    **{f"dev_config.{theirs}": ours for theirs, ours in RENAMED.items()},
}
"""Keys of a training call, and the key of TrainConfig each one is."""

_ONLY = {
    f"{part}.{key}": values for part in ("config", "dev_config") for key, values in ONE_WAY.items()
}
"""Keys that would change the result, and the values that match what hone does anyway."""


class ArtModel(BaseModel):
    """ART's model object. One without `base_model` is not trained; its trajectories are logged."""

    model_config = ConfigDict(extra="ignore", populate_by_name=True)

    name: AnyName
    project: AnyName = "default"
    entity: str | None = None
    base_model: str | None = Field(default=None, min_length=1, max_length=512)
    internal: dict[str, JsonValue] | None = Field(default=None, alias=INTERNAL)

    @model_validator(mode="before")
    @classmethod
    def _bare(cls, data: Any) -> Any:
        """Accept the model object itself, or under `model`: ART's routes send both."""
        if isinstance(data, dict) and "name" not in data and isinstance(data.get("model"), dict):
            return data["model"]
        return data

    @property
    def key(self) -> ModelKey:
        return ModelKey(stored_name(self.project), stored_name(self.name))


Number = bool | int | float


class ArtHistory(BaseModel):
    """One conversation; a choice is an item with a `message` in it."""

    model_config = ConfigDict(extra="allow")

    messages_and_choices: list[dict[str, Any]] = []
    tools: list[dict[str, Any]] | None = None

    def fields(self) -> dict[str, Any]:
        """The fields of hone's History."""
        tools = [
            tool if "type" in tool else {"type": "function", "function": tool}
            for tool in self.tools or ()
        ]
        return {"messages_and_choices": self.messages_and_choices, "tools": tools or None}


class ArtTrajectory(ArtHistory):
    """One conversation with a reward."""

    additional_histories: list[ArtHistory] = []
    reward: float = Field(default=0.0, allow_inf_nan=False)
    metrics: dict[str, Number | None] = {}
    metadata: dict[str, bool | int | float | str | None] = {}
    logs: list[str] = []

    def to_hone(self) -> Trajectory:
        """As hone's own type."""
        return Trajectory(
            **self.fields(),
            additional_histories=[History(**h.fields()) for h in self.additional_histories],
            reward=self.reward,
            metrics={k: v for k, v in self.metrics.items() if v is not None},
            metadata=dict(self.metadata),
            logs=self.logs,
        )


class ArtFailure(BaseModel):
    """A rollout that raised."""

    model_config = ConfigDict(extra="allow")

    type: str = ""
    message: str = ""
    traceback: str = ""


class ArtGroup(BaseModel):
    """Trajectories of one input."""

    model_config = ConfigDict(extra="allow")

    trajectories: list[ArtTrajectory] = []
    exceptions: list[ArtFailure] = []
    metrics: dict[str, Number | None] = {}
    metadata: dict[str, bool | int | float | str | None] = {}
    logs: list[str] = []

    def to_hone(self) -> TrajectoryGroup:
        """As hone's own type."""
        return TrajectoryGroup(
            [trajectory.to_hone() for trajectory in self.trajectories],
            exceptions=[
                Failure(type=e.type, message=e.message, traceback=e.traceback)
                for e in self.exceptions
            ],
            metrics={k: v for k, v in self.metrics.items() if v is not None},
            metadata=dict(self.metadata),
            logs=self.logs,
        )


# ---- bodies -----------------------------------------------------------------------------------


class _Request(BaseModel):
    """A body that carries the model object under `model`, or is one."""

    model_config = ConfigDict(extra="ignore")

    model: ArtModel

    @model_validator(mode="before")
    @classmethod
    def _wrapped(cls, data: Any) -> Any:
        if isinstance(data, dict) and "name" in data and "model" not in data:
            return {"model": data}
        return data


class PrepareRequest(_Request):
    """Options with which ART would start its OpenAI server; hone's is already running."""

    config: dict[str, Any] | None = None


class TrainRequest(_Request):
    """A training call."""

    groups: list[ArtGroup] = Field(alias="trajectory_groups")
    config: dict[str, Any] | None = None
    dev_config: dict[str, Any] | None = None
    verbose: bool | None = None


class LogRequest(_Request):
    """Trajectories to be logged and averaged."""

    groups: list[ArtGroup] = Field(alias="trajectory_groups")
    split: Name = "val"


class KeepRequest(_Request):
    """The checkpoints to keep."""

    steps_to_keep: list[Annotated[int, Field(ge=0, lt=2**31)]]


# ---- keys -------------------------------------------------------------------------------------


def model_spec(model: ArtModel, check_arg: CheckArg | None = None) -> ModelSpec:
    """The model to register. Loads nothing: ART's clients wait five seconds for this."""
    assert model.base_model is not None, "art_routes.py registers only models that can be trained"
    spec, defaults = read_args(
        model.internal or {}, base_model=model.base_model, root=(INTERNAL,), check_arg=check_arg
    )
    return spec.checked(
        ModelSpec,
        name=model.key.name,
        project=model.key.project,
        base_model=model.base_model,
        token_ids_as_text=True,
        defaults=defaults.fields,
        not_applicable=sorted(spec.not_applicable),
    )


@dataclass(frozen=True, slots=True)
class JobConfig:
    """What a training call asks for."""

    config: dict[str, JsonValue]
    """Keys of TrainConfig."""
    plot_tensors: bool
    not_applicable: list[str]


def job_config(
    config: Mapping[str, Any] | None, dev_config: Mapping[str, Any] | None, model: ArtModel
) -> JobConfig:
    """The keys of TrainConfig in a training call, without constants of NAT's plugin.

    All other values are those that the client sent. ART's client always sends a learning rate, and
    nothing in its request says whether its user wrote it.
    """
    read = Read((), _ONLY)
    sent = dict(dev_config or {})
    plot_tensors = bool(sent.pop("plot_tensors", False))
    ppo = sent.pop("ppo", None)
    # An explicit null switches the correction off; for every other key null means absent.
    uncapped = sent.get("truncated_importance_sampling", 0) is None
    for name, value in (
        *flat({"dev_config": sent}, ("dev_config",), ()),
        *flat({"config": dict(config or {})}, ("config",), ()),
    ):
        read.take(name, value, _JOB)
    if ppo is not None:
        read.fields["loss"] = "grpo" if ppo else "cispo"
    if uncapped:
        read.fields["importance_cap"] = None
    if _is_of_plugin(config or {}, model.internal or {}):
        written = (model.internal or {}).get("trainer_args")
        for key in ("learning_rate", "beta"):
            if isinstance(written, dict) and written.get(key) is not None:
                read.fields.pop(key, None)  # the registration has made it a default of the model
    read.checked(TrainConfig)
    return JobConfig(read.fields, plot_tensors, sorted(read.not_applicable))


def _is_of_plugin(config: Mapping[str, Any], internal: Mapping[str, Any]) -> bool:
    """Whether a training call is of NAT's plugin.

    Its `_internal_config` always has these sections, null if its user left them out, and at most one
    more; users of ART write only the sections that they need.
    """
    sections = internal.keys() - {"torchtune_args"} == _PLUGIN_SECTIONS
    constant = all(value == _PLUGIN_CONSTANTS.get(key) for key, value in config.items())
    return sections and constant and "learning_rate" in config


def server_keys(config: Mapping[str, Any] | None) -> list[str]:
    """Keys for starting ART's OpenAI server. hone's is already running, so they are only listed."""
    names = []
    for name, value in flat(config or {}, ("server_args", "engine_args"), ("config",)):
        if name in ENGINE_ONLY:
            check_only(f"config.{name}", value, ENGINE_ONLY[name])
        if name != "server_args.api_key":
            names.append(name)
    return sorted(names)
