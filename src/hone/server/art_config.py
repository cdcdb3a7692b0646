"""What ART's clients say about a model and about a job, in hone's words.

In:   ART's model object with its `_internal_config`; `config` and `dev_config` of a training call
Out:  ModelSpec; the keys of TrainConfig a job is asked for; names of keys that mean nothing here
Used: art.py

Every key is honoured, refused, or named as not applicable. Refused is what would change the result
and cannot be done: training on as if it had not been said would be worse than an error. Null means
absent throughout, because ART's plugins send null for every section their user left out.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

from hone.errors import ConfigError, Unprocessable
from hone.types import FieldError, ModelKey, ModelSpec, Name, TrainConfig

Path = tuple[str | int, ...]

INTERNAL = "_internal_config"

PLUGIN_LEARNING_RATE = 5e-05
"""What NAT's plugin sends as `config.learning_rate` whatever its user wrote: it reads the value from
a dict as if it were an attribute. The user's own is in `trainer_args`, and wins over this one."""

PROJECTIONS = frozenset(
    ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
)
"""What an adapter of hone's is made of."""

_SPEC = {
    "peft_args.r": "rank",
    "peft_args.lora_alpha": "alpha",
    "peft_args.random_state": "seed",
    "chat_template_kwargs": "chat_template_kwargs",
}
"""Keys of `_internal_config` that are fields of ModelSpec."""

_DEFAULTS = {
    "init_args.max_seq_length": "max_seq_length",
    "trainer_args.learning_rate": "learning_rate",
    "trainer_args.beta": "beta",
    "trainer_args.max_grad_norm": "max_grad_norm",
    "trainer_args.weight_decay": "weight_decay",
    "trainer_args.epsilon": "epsilon",
    "trainer_args.epsilon_high": "epsilon_high",
    "trainer_args.scale_rewards": "scale_rewards",
}
"""Keys of `_internal_config` that are TrainConfig's, for every job that does not say otherwise."""

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
    "peft_args.lora_dropout": (0,),
    "peft_args.bias": ("none",),
    "peft_args.use_rslora": (False,),
    "peft_args.init_lora_weights": (True,),
    "peft_args.modules_to_save": ([],),
    "peft_args.layers_to_transform": ([],),
    "peft_args.layers_pattern": (),
    "peft_args.loftq_config": ({},),
    "init_args.full_finetuning": (False,),
    "init_args.revision": (),
    "init_args.rope_scaling": (),
    "init_args.resize_model_vocab": (),
    "engine_args.revision": (),
    "engine_args.rope_scaling": (),
    "trainer_args.adam_beta1": (0.9,),
    "trainer_args.adam_beta2": (0.99,),
    "trainer_args.adam_epsilon": (1e-8,),
    "torchtune_args": ({},),
    "tinker_args": ({},),
    "tinker_native_args": ({},),
    "chat_template": (),
    "chat_template_path": (),
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

_DEVICES = ("engine_args.tensor_parallel_size", "engine_args.pipeline_parallel_size")
_MODELS = ("init_args.model_name", "engine_args.model")
_SECTIONS = ("init_args", "engine_args", "peft_args", "trainer_args")


class ArtModel(BaseModel):
    """ART's model object. One without `base_model` is somebody else's and is only logged for."""

    model_config = ConfigDict(extra="ignore", populate_by_name=True)

    name: Name
    project: Name = "default"
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


@dataclass
class _Read:
    """What was found so far: fields by hone's names, each with where ART's client wrote it."""

    root: Path
    fields: dict[str, Any] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)
    not_applicable: list[str] = field(default_factory=list)

    def take(self, name: str, value: Any, honoured: Mapping[str, str]) -> None:
        """Sort one key: honoured, refused, or not applicable."""
        path = (*self.root, *name.split("."))
        if name in honoured:
            self.fields[honoured[name]] = value
            self.paths[honoured[name]] = path
        elif name in _ONLY:
            _check_only(".".join(map(str, path)), value, _ONLY[name])
        else:
            self.not_applicable.append(name)

    def checked(self, kind: type[BaseModel], **rest: Any) -> Any:
        """A value of these fields; what is wrong is named as the client wrote it."""
        try:
            return kind.model_validate({**rest, **self.fields})
        except ValidationError as wrong:
            raise Unprocessable(
                [
                    FieldError(
                        (*self.paths.get(str(e["loc"][0]), e["loc"]), *e["loc"][1:]), e["msg"]
                    )
                    for e in wrong.errors()
                ]
            ) from None


def model_spec(model: ArtModel) -> ModelSpec:
    """The model to register. Loads nothing: ART's clients wait five seconds for this."""
    assert model.base_model is not None, "art.py registers only models that can be trained"
    spec, defaults = _Read((INTERNAL,)), _Read((INTERNAL,))
    for name, value in _flat(model.internal or {}, _SECTIONS, (INTERNAL,)):
        if name in _DEFAULTS:
            defaults.take(name, value, _DEFAULTS)
        elif name in _DEVICES:
            _check_devices(f"{INTERNAL}.{name}", value)
        elif name in _MODELS:
            _check_only(f"{INTERNAL}.{name}", value, (model.base_model,))
        elif name == "peft_args.target_modules":
            _check_projections(f"{INTERNAL}.{name}", value)
        else:
            spec.take(name, value, _SPEC)
    defaults.checked(TrainConfig)
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
    read = _Read(())
    sent = dict(dev_config or {})
    plot_tensors = bool(sent.pop("plot_tensors", False))
    ppo = sent.pop("ppo", None)
    # Named and null, it switches the correction off; everywhere else null means absent.
    uncapped = sent.get("truncated_importance_sampling", 0) is None
    for name, value in (
        *_flat({"dev_config": sent}, ("dev_config",), ()),
        *_flat({"config": dict(config or {})}, ("config",), ()),
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
    for name, value in _flat(config or {}, ("server_args", "engine_args"), ("config",)):
        if name in _DEVICES:
            _check_devices(f"config.{name}", value)
        if name != "server_args.api_key":
            names.append(name)
    return sorted(names)


def _flat(
    sections: Mapping[str, Any], nested: tuple[str, ...], root: Path
) -> list[tuple[str, Any]]:
    """`section.key` and value of everything that was said."""
    found = []
    for name, value in sections.items():
        if value is None:
            continue
        if name not in nested:
            found.append((name, value))
        elif isinstance(value, Mapping):
            found += [(f"{name}.{key}", one) for key, one in value.items() if one is not None]
        else:
            what = f"expected an object or null, got {type(value).__name__}"
            raise Unprocessable([FieldError((*root, name), what)])
    return found


def _check_only(where: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if value not in allowed:
        fix = f"leave it out or send {allowed[0]!r}" if allowed else "leave it out"
        raise ConfigError(f"{where}: {_brief(value)} is not in this version; {fix}")


def _check_devices(where: str, value: Any) -> None:
    if value not in (1, "1"):
        raise ConfigError(
            f"{where}: {_brief(value)} devices were asked for, and this engine runs on 1; "
            "leave it out or send 1"
        )


def _check_projections(where: str, value: Any) -> None:
    if value != "all-linear" and not (isinstance(value, list) and _texts(value) == PROJECTIONS):
        raise ConfigError(
            f"{where}: {_brief(value)} is not in this version; leave it out: adapters are on "
            f"{', '.join(sorted(PROJECTIONS))}"
        )


def _texts(values: list[Any]) -> set[str]:
    return {str(value) for value in values}


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
