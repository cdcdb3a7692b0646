"""Settings in the words of PEFT, Unsloth, vLLM and TRL, translated to hone's.

In:   sections of keys: init_args, engine_args, peft_args, trainer_args
Out:  fields of ModelSpec and of TrainConfig; names of keys that mean nothing here

Every key is honoured, refused, or named as not applicable. A key is refused if it would change the
result and cannot be honoured: training as if it were not there would be worse than an error. Null
means absent, because ART's plugins send null for every section that their user left out.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ValidationError

from hone.errors import ConfigError, Unprocessable
from hone.types import FieldError, ModelSpec, TrainConfig
from hone.wire.errors import brief

Path = tuple[str | int, ...]

PROJECTIONS = frozenset(
    ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
)
"""The layers that hone's adapters are on."""

SECTIONS = ("init_args", "engine_args", "peft_args", "trainer_args")
OWN_SECTIONS = ("init_args", "engine_args", "peft_args")
"""Sections that are fields of ModelSpec; for trainer_args it has `defaults`."""

_SPEC = {
    "peft_args.r": "rank",
    "peft_args.lora_alpha": "alpha",
    "peft_args.random_state": "seed",
    "chat_template_kwargs": "chat_template_kwargs",
}
"""Keys that are fields of ModelSpec."""

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
"""Keys that are fields of TrainConfig: defaults of every job."""

ONLY: dict[str, tuple[Any, ...]] = {
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
}
"""Keys that would change the result, and the values that equal what hone does anyway."""

DEVICES = ("engine_args.tensor_parallel_size", "engine_args.pipeline_parallel_size")
_MODELS = ("init_args.model_name", "engine_args.model")


@dataclass
class Read:
    """The keys read so far: fields by hone's names, each with the path that the client used."""

    root: Path
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=lambda: ONLY)
    fields: dict[str, Any] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)
    not_applicable: list[str] = field(default_factory=list)

    def take(self, name: str, value: Any, honoured: Mapping[str, str]) -> None:
        """Sort one key: honoured, refused, or not applicable."""
        path = (*self.root, *name.split("."))
        if name in honoured:
            self.fields[honoured[name]] = value
            self.paths[honoured[name]] = path
        elif name in self.only:
            check_only(".".join(map(str, path)), value, self.only[name])
        else:
            self.not_applicable.append(name)

    def checked(self, kind: type[BaseModel], **rest: Any) -> Any:
        """A validated model of these fields; errors name the path that the client used."""
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


def read_args(
    sections: Mapping[str, Any], *, base_model: str, root: Path = ()
) -> tuple[Read, Read]:
    """The fields of ModelSpec and of TrainConfig in the sections, checked key by key."""
    spec, defaults = Read(root), Read(root)
    for name, value in flat(sections, SECTIONS, root):
        where = ".".join(map(str, (*root, name)))
        if name in _DEFAULTS:
            defaults.take(name, value, _DEFAULTS)
        elif name in DEVICES:
            check_devices(where, value)
        elif name in _MODELS:
            check_only(where, value, (base_model,))
        elif name == "peft_args.target_modules":
            _check_projections(where, value)
        else:
            spec.take(name, value, _SPEC)
    defaults.checked(TrainConfig)
    return spec, defaults


def settled(spec: ModelSpec) -> ModelSpec:
    """The same model with hone's own keys only; two keys that disagree are refused."""
    sections = {name: getattr(spec, name) for name in OWN_SECTIONS}
    if not any(sections.values()):
        return spec
    own, defaults = read_args(sections, base_model=spec.base_model)
    # A field at its default does not count as set: clients send whole models.
    known = ModelSpec.model_fields
    values = {name: getattr(spec, name) for name in own.fields}
    _check_agree(own, {k: v for k, v in values.items() if v != known[k].default}, "")
    _check_agree(defaults, spec.defaults, "defaults.")
    rest = spec.model_dump(exclude={*OWN_SECTIONS, "defaults", "not_applicable"})
    ignored = sorted({*spec.not_applicable, *own.not_applicable})
    both = {**spec.defaults, **defaults.fields}
    return own.checked(ModelSpec, **rest | {"defaults": both, "not_applicable": ignored})


def _check_agree(read: Read, values: Mapping[str, Any], prefix: str) -> None:
    for name, value in read.fields.items():
        if name in values and values[name] != value:
            raise Unprocessable(
                [
                    FieldError(
                        read.paths[name],
                        f"{brief(value)}, and {prefix}{name} is {values[name]!r}; send one of the two",
                    )
                ]
            )


def flat(sections: Mapping[str, Any], nested: tuple[str, ...], root: Path) -> list[tuple[str, Any]]:
    """`section.key` and value of every key that is not null."""
    pairs = []
    for name, value in sections.items():
        if value is None:
            continue
        if name not in nested:
            pairs.append((name, value))
        elif isinstance(value, Mapping):
            pairs += [(f"{name}.{key}", one) for key, one in value.items() if one is not None]
        else:
            what = f"expected an object or null, got {type(value).__name__}"
            raise Unprocessable([FieldError((*root, name), what)])
    return pairs


def check_only(where: str, value: Any, allowed: tuple[Any, ...]) -> None:
    """Refuse any other value."""
    if value not in allowed:
        fix = f"leave it out or send {allowed[0]!r}" if allowed else "leave it out"
        raise ConfigError(f"{where}: {brief(value)} is not in this version; {fix}")


def check_devices(where: str, value: Any) -> None:
    """Refuse more than the one device that an engine runs on."""
    if value not in (1, "1"):
        raise ConfigError(
            f"{where}: {brief(value)} devices were asked for, and this engine runs on 1; "
            "leave it out or send 1"
        )


def _check_projections(where: str, value: Any) -> None:
    if value != "all-linear" and not (
        isinstance(value, list) and {*map(str, value)} == PROJECTIONS
    ):
        raise ConfigError(
            f"{where}: {brief(value)} is not in this version; leave it out: adapters are on "
            f"{', '.join(sorted(PROJECTIONS))}"
        )
