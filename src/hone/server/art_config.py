"""What ART's clients say about a model and about a job, in hone's words.

In:   ART's model object with its `_internal_config`; `config` and `dev_config` of a training call
Out:  ModelSpec; the keys of TrainConfig a job is asked for; names of keys that mean nothing here

Every key is honoured, refused, or named as not applicable, by the tables here and in model_args.py.
Null means absent, but for the one key whose null means something.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

from hone.server.model_args import DEVICES, Read, check_devices, flat, read_args
from hone.types import ModelKey, ModelSpec, Name, ProjectName, TrainConfig

INTERNAL = "_internal_config"

PLUGIN_LEARNING_RATE = 5e-05
"""What NAT's plugin sends as `config.learning_rate` whatever its user wrote: it reads the value from
a dict as if it were an attribute. The user's own is in `trainer_args`, and wins over this one."""

_JOB = {
    "config.learning_rate": "learning_rate",
    "config.beta": "beta",
    "config.kl_penalty_coef": "kl_penalty_coef",
    "dev_config.epsilon": "epsilon",
    "dev_config.epsilon_high": "epsilon_high",
    "dev_config.kl_penalty_coef": "kl_penalty_coef",
    "dev_config.scale_rewards": "scale_rewards",
    "dev_config.truncated_importance_sampling": "importance_cap",
}
"""Keys of a training call that are TrainConfig's."""

_ONLY: dict[str, tuple[Any, ...]] = {
    "dev_config.advantage_balance": (0,),
    "dev_config.allow_training_without_logprobs": (False,),
    "dev_config.importance_sampling_level": ("token",),
    "dev_config.kimi_k2_tau": (),
    "dev_config.kl_penalty_reference_step": (),
    "dev_config.kl_ref_adapter_path": (),
    "dev_config.mask_prob_ratio": (False,),
    "dev_config.max_negative_advantage_importance_sampling_weight": (),
    "dev_config.num_trajectories_learning_rate_multiplier_power": (0,),
    "dev_config.scale_learning_rate_by_reward_std_dev": (False,),
}
"""Keys that would change the result: the values that are what hone does anyway."""


class ArtModel(BaseModel):
    """ART's model object. One without `base_model` is somebody else's and is only logged for."""

    model_config = ConfigDict(extra="ignore", populate_by_name=True)

    name: Name
    project: ProjectName = "default"
    entity: str | None = None
    base_model: str | None = Field(default=None, min_length=1, max_length=512)
    internal: dict[str, JsonValue] | None = Field(default=None, alias=INTERNAL)

    @model_validator(mode="before")
    @classmethod
    def _bare(cls, data: Any) -> Any:
        """Some routes send it alone, others under `model`; both are taken anywhere."""
        if isinstance(data, dict) and "name" not in data and isinstance(data.get("model"), dict):
            return data["model"]
        return data

    @property
    def key(self) -> ModelKey:
        return ModelKey(self.project, self.name)


def model_spec(model: ArtModel) -> ModelSpec:
    """The model to register. Loads nothing: ART's clients wait five seconds for this."""
    assert model.base_model is not None, "art.py registers only models that can be trained"
    said = model.internal or {}
    spec, defaults = read_args(said, base_model=model.base_model, root=(INTERNAL,))
    return spec.checked(
        ModelSpec,
        name=model.name,
        project=model.project,
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
    config: Mapping[str, Any] | None, dev_config: Mapping[str, Any] | None, spec: ModelSpec
) -> JobConfig:
    """The keys of TrainConfig a training call names, less those its model's own defaults win over."""
    read = Read((), _ONLY)
    sent = dict(dev_config or {})
    plot_tensors = bool(sent.pop("plot_tensors", False))
    ppo = sent.pop("ppo", None)
    # Named and null, it switches the correction off; everywhere else null means absent.
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
    for key, unsaid in (("learning_rate", PLUGIN_LEARNING_RATE), ("beta", 0)):
        if key in spec.defaults and read.fields.get(key) == unsaid:
            del read.fields[key]
    read.checked(TrainConfig)
    return JobConfig(read.fields, plot_tensors, sorted(read.not_applicable))


def server_keys(config: Mapping[str, Any] | None) -> list[str]:
    """Names of what a client asks of ART's OpenAI server; this one is started already."""
    names = []
    for name, value in flat(config or {}, ("server_args", "engine_args"), ("config",)):
        if name in DEVICES:
            check_devices(f"config.{name}", value)
        if name != "server_args.api_key":
            names.append(name)
    return sorted(names)
