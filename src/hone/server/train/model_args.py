"""A registered model, and settings under the names of PEFT, Unsloth, vLLM and TRL.

In:   ModelSpec; sections of keys: init_args, engine_args, peft_args, trainer_args
Out:  fields of ModelSpec and of TrainConfig; names of keys that have no effect

Every key is honoured, refused, or named as not applicable. A key is refused if it would change the
result and cannot be honoured: ignoring it silently would be worse than an error. Null
means absent, because ART's plugins send null for every section that their user left out.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ValidationError

from hone.errors import ModelNotFound, Unprocessable, did_you_mean
from hone.inference.vllm.args import GPU_IDS, SAME_MODEL, SIZES
from hone.models.find import check_exists
from hone.options import check_only
from hone.server.serve.engine_choice import CheckArg
from hone.train_config import unused_keys
from hone.types import FieldError, ModelSpec, TrainConfig
from hone.wire.errors import brief

Path = tuple[str | int, ...]

PROJECTIONS = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
"""The layers that hone's adapters are on, sorted."""

SECTIONS = ("init_args", "engine_args", "peft_args", "trainer_args")
"""Sections of keys, each a field of ModelSpec."""
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

ADAMW = (
    *("adamw_torch", "adamw_torch_fused", "adamw_8bit", "adamw_bnb_8bit"),
    *("paged_adamw_8bit", "paged_adamw_32bit"),
)
"""TRL's names for AdamW; they differ only in how the optimizer's state is stored."""

TARGETS = "peft_args.target_modules"

ENGINE_ONLY: dict[str, tuple[Any, ...]] = {
    f"engine_args.{key}": values
    for key, values in (dict.fromkeys(SIZES, (1, "1")) | SAME_MODEL).items()
}
"""The keys of ONLY that the embedded engine refuses: it runs on one device, with the base model's own
weights."""

ONLY: dict[str, tuple[Any, ...]] = {
    "peft_args.lora_dropout": (0,),
    "peft_args.bias": ("none",),
    "peft_args.use_rslora": (False,),
    "peft_args.init_lora_weights": (True,),
    "peft_args.modules_to_save": ([],),
    "peft_args.layers_to_transform": ([],),
    "peft_args.layers_pattern": (),
    TARGETS: ("all-linear", PROJECTIONS),
    "peft_args.loftq_config": ({},),
    "init_args.full_finetuning": (False,),
    "init_args.load_in_4bit": (False,),
    "init_args.load_in_8bit": (False,),
    "init_args.revision": (),
    "init_args.rope_scaling": (),
    "init_args.resize_model_vocab": (),
    "engine_args.revision": (),
    "engine_args.rope_scaling": (),
    **ENGINE_ONLY,
    "trainer_args.adam_beta1": (0.9,),
    "trainer_args.adam_beta2": (0.99,),
    "trainer_args.adam_epsilon": (1e-8,),
    "trainer_args.optim": ADAMW,
    "trainer_args.lr_scheduler_type": ("constant",),
    "trainer_args.warmup_ratio": (0,),
    "trainer_args.warmup_steps": (0,),
    "rollout_weights_mode": ("lora",),
    "torchtune_args": ({},),
    "tinker_args": ({},),
    "tinker_native_args": ({},),
    "chat_template": (),
    "chat_template_path": (),
}
"""Keys that would change the result, and the values that match what hone does anyway."""

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
    sections: Mapping[str, Any],
    *,
    base_model: str,
    root: Path = (),
    check_arg: CheckArg | None = None,
) -> tuple[Read, Read]:
    """The fields of ModelSpec and of TrainConfig in the sections, checked key by key.

    `check_arg` checks arguments of the engine, which are then a field of ModelSpec.
    """
    spec, defaults = Read(root, ONLY | dict.fromkeys(_MODELS, (base_model,))), Read(root)
    engine_args: dict[str, Any] = {}
    for name, value in flat(sections, SECTIONS, root):
        section, _, key = name.rpartition(".")
        if check_arg and name == TARGETS:
            # The embedded engine takes adapters on all linear layers, vLLM on any of them.
            listed = sorted(map(str, value)) if isinstance(value, list) else value
            all_linear = listed in ("all-linear", PROJECTIONS)
            spec.take(name, [] if all_linear else value, {TARGETS: "target_modules"})
            continue
        if check_arg and name not in _MODELS and (section == "engine_args" or key in GPU_IDS):
            where = ".".join(map(str, (*root, name)))
            if check_arg(where, key, value):
                engine_args[key] = value
            else:
                spec.not_applicable.append(name)
            continue
        (defaults if name in _DEFAULTS else spec).take(name, value, _DEFAULTS | _SPEC)
    if engine_args:
        spec.fields["engine_args"], spec.paths["engine_args"] = engine_args, (*root, "engine_args")
    defaults.checked(TrainConfig)
    return spec, defaults


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
            message = f"expected an object or null, got {type(value).__name__}"
            raise Unprocessable([FieldError((*root, name), message)])
    return pairs


# ---- one model ------------------------------------------------------------------------------


def checked_spec(spec: ModelSpec, check_arg: CheckArg | None = None) -> ModelSpec:
    """The model with its sections translated; refuses one that cannot be stored or trained."""
    for field_name, value in spec.model_dump().items():
        json_text(value, (field_name,))
    spec = normalize_spec(spec, check_arg)
    train_config({}, spec.defaults, "defaults")
    return spec


def check_base_model(spec: ModelSpec) -> None:
    """Refuse a model whose base weights are missing: its base cannot be changed later. Blocking."""
    try:
        check_exists(spec.base_model)
    except (ModelNotFound, OSError, ValueError) as error:  # not a valid file name
        message = f"{error}\nNothing was registered; send the name of weights that this server has."
        raise Unprocessable([FieldError(("base_model",), message)]) from None


def normalize_spec(spec: ModelSpec, check_arg: CheckArg | None = None) -> ModelSpec:
    """The same model with hone's own keys only; two keys that disagree are refused."""
    sections = {name: getattr(spec, name) for name in SECTIONS}
    own, defaults = read_args(sections, base_model=spec.base_model, check_arg=check_arg)
    if check_arg is None:
        check_only("target_modules", spec.target_modules, ([], PROJECTIONS))
    fields = spec.model_dump(exclude=set(SECTIONS))
    # A field at its default does not count as set: clients send whole models.
    sent = {k: v for k, v in fields.items() if v != ModelSpec.model_fields[k].default}
    _check_agree(own, sent, "")
    _check_agree(defaults, spec.defaults, "defaults.")
    fields["defaults"] |= defaults.fields
    fields["not_applicable"] = sorted({*spec.not_applicable, *own.not_applicable})
    return own.checked(ModelSpec, **fields)


def _check_agree(read: Read, values: Mapping[str, Any], prefix: str) -> None:
    for name, value in read.fields.items():
        if values.get(name, value) != value:
            message = f"{brief(value)}, and {prefix}{name} is {values[name]!r}; send one of the two"
            raise Unprocessable([FieldError(read.paths[name], message)])


def train_config(
    defaults: Mapping[str, Any], requested: Mapping[str, Any], field: str
) -> TrainConfig:
    """The config of a job: requested values, else the model's defaults, else hone's.

    Defaults for another loss are left out, and default `learning_rates` where a `learning_rate` is
    requested; a requested key without effect is refused.
    """
    loss = requested.get("loss", defaults.get("loss"))
    unused = {*unused_keys(loss), *(["learning_rates"] if "learning_rate" in requested else [])}
    defaults = {key: v for key, v in defaults.items() if key not in unused}
    json_text(requested, (field,))
    known = TrainConfig.model_fields
    wrong = [
        FieldError(
            (field, key),
            f"no such key.{did_you_mean(key, known, cutoff=0.5)} Known: {', '.join(known)}.",
        )
        for key in requested
        if key not in known
    ]
    if not wrong:
        try:
            return TrainConfig.model_validate({**defaults, **requested})
        except ValidationError as error:
            wrong = [FieldError((field, *e["loc"]), e["msg"]) for e in error.errors()]
    raise Unprocessable(wrong)


def json_text(value: Any, path: Path, *, allow_nan: bool = False) -> str:
    """A value as JSON text that files and database columns can store.

    Refuses what JSON can express but they cannot store: lone surrogates, infinite numbers, integers
    with thousands of digits.
    """
    try:
        text = json.dumps(
            value, sort_keys=True, ensure_ascii=False, default=repr, allow_nan=allow_nan
        )
        text.encode()
        return text
    except UnicodeEncodeError:
        message = "it holds half of a surrogate pair; send whole characters"
    except (RecursionError, ValueError):
        message = "it is nested too deeply, or holds a number that is not finite or too long"
    raise Unprocessable([FieldError(path, message)])
