"""Translate ART's advanced options to hone's: those of a model, its engine and a training call.

In:   `_internal_config` of a model, `_config` and the keywords of `train`, as ART's users write them
Out:  fields of ModelSpec, keys of TrainConfig; a ConfigError for what hone cannot do

Every option is honoured, refused with the reason, or listed as having no effect. An option that
would change the result is never ignored. The SDK and the routes for ART's clients use these tables;
those for keys of PEFT, Unsloth, vLLM and TRL are in server/train/model_args.py.
"""

import logging
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from hone.errors import ConfigError, did_you_mean
from hone.wire.errors import brief

log = logging.getLogger("hone")

# ---- what hone does only one way --------------------------------------------------------------

_QUANTIZED = (
    "vLLM and the learner would round the base weights differently, and no step could be proved to be "
    "the one that was trained. If memory is short, lower max_seq_length or train a smaller base_model"
)
_SAME_MODEL = (
    "The engine must serve the model that the learner trains, as its files describe it; otherwise the "
    "log-probabilities would be those of another model"
)
_ADAPTERS = "hone trains LoRA adapters on its own server; set rank and alpha, or peft_args"
_TEMPLATE = (
    "Sampling and training use the base model's own template. Save the base model with the other "
    "template, and name that directory as base_model"
)
_ADAM = "AdamW always uses betas 0.9 and 0.99 and eps 1e-8; set weight_decay and max_grad_norm"
_RATE = "A job uses learning_rate as given; compute schedules in your loop"
_REFERENCE = "The reference of kl_penalty_coef and of beta is the base model"
_RATIO = "Ratios are clipped token by token; set epsilon and epsilon_high"
_EXPERTS = "Engine and learner each compute the routing of experts themselves"
REASONS = {
    "load_in_4bit": _QUANTIZED,
    "load_in_8bit": _QUANTIZED,
    "quantization": _QUANTIZED,
    "quantization_config": _QUANTIZED,
    "load_format": _SAME_MODEL,
    "hf_overrides": _SAME_MODEL,
    "torchtune_args": _ADAPTERS,
    "tinker_args": _ADAPTERS,
    "tinker_native_args": _ADAPTERS,
    "full_finetuning": _ADAPTERS,
    "chat_template": _TEMPLATE,
    "chat_template_path": _TEMPLATE,
    "rollout_weights_mode": "Adapters are served as adapters, as the proof of a step requires",
    "adam_params": _ADAM,
    "adam_beta1": _ADAM,
    "adam_beta2": _ADAM,
    "adam_epsilon": _ADAM,
    "optim": _ADAM,
    "lr_scheduler_type": _RATE,
    "warmup_ratio": _RATE,
    "warmup_steps": _RATE,
    "scale_learning_rate_by_reward_std_dev": _RATE,
    "num_trajectories_learning_rate_multiplier_power": _RATE,
    "advantage_balance": "Positive and negative advantages count alike; shape the rewards instead",
    "allow_training_without_logprobs": (
        "RL trains on sampled tokens, and text without log-probabilities does not identify them; use "
        "train_sft to train on text"
    ),
    "importance_sampling_level": _RATIO,
    "mask_prob_ratio": _RATIO,
    "max_negative_advantage_importance_sampling_weight": _RATIO,
    "kimi_k2_tau": "Use beta or kl_penalty_coef",
    "kl_penalty_reference_step": _REFERENCE,
    "kl_ref_adapter_path": _REFERENCE,
    "loss_fn_config": "Set epsilon, epsilon_high and the other keys of TrainConfig instead",
    "moe_routing_replay_bundle": _EXPERTS,
    "moe_routing_replay_path": _EXPERTS,
    "moe_routing_replay_strict": _EXPERTS,
    "grad_accumulation_sequences": (
        "Optimizer steps consist of whole groups; set groups_per_optimizer_step"
    ),
    "gpu_cost_per_hour_usd": "hone does not compute costs; a job's metrics include its duration",
}
"""Why a key is refused and what to use instead, by the last part of the key."""

ONE_WAY: dict[str, tuple[Any, ...]] = {
    "adam_params": (),
    "advantage_balance": (0,),
    "allow_training_without_logprobs": (False,),
    "grad_accumulation_sequences": (),
    "importance_sampling_level": ("token",),
    "kimi_k2_tau": (),
    "kl_penalty_reference_step": (),
    "kl_ref_adapter_path": (),
    "loss_fn_config": (),
    "mask_prob_ratio": (False,),
    "max_negative_advantage_importance_sampling_weight": (),
    "moe_routing_replay_bundle": (),
    "moe_routing_replay_path": (),
    "moe_routing_replay_strict": (False,),
    "num_trajectories_learning_rate_multiplier_power": (0,),
    "scale_learning_rate_by_reward_std_dev": (False,),
}
"""Options of a training call that would change the result, and the values that hone uses anyway."""

RENAMED = {
    "truncated_importance_sampling": "importance_cap",
    "packed_sequence_length": "row_tokens",
}
"""Options of a training call, and the corresponding keys of TrainConfig."""

NO_EFFECT: dict[str, tuple[Any, ...]] = {
    "logprob_calculation_chunk_size": (1024,),
    "precalculate_logprobs": (False,),
}
"""Options of a training call without effect, and ART's defaults: hone always computes pi_old, in its
own rows."""

LOSSES = {"cispo": "cispo", "ppo": "grpo"}
"""`loss_fn` of ART, and `loss` of TrainConfig."""


def check_only(where: str, value: Any, allowed: tuple[Any, ...]) -> None:
    """Refuse any other value; lists may be in any order."""
    plain = sorted(value, key=str) if isinstance(value, list) else value
    if plain not in allowed:
        fix = f"leave it out or send {allowed[0]!r}" if allowed else "leave it out"
        reason = REASONS.get(re.findall(r"\w+", where)[-1])
        why = "" if reason is None else f". {reason}"
        raise ConfigError(f"{where}: {brief(value)} is not in this version; {fix}{why}")


# ---- a model ----------------------------------------------------------------------------------

_SECTIONS = ("init_args", "engine_args", "peft_args", "trainer_args", "chat_template_kwargs")
_GPU_IDS = ("trainer_gpu_ids", "inference_gpu_ids")
_FIXED: dict[str, tuple[Any, ...]] = {
    "rollout_weights_mode": ("lora",),
    "chat_template": (),
    "chat_template_path": (),
    "torchtune_args": ({},),
    "tinker_args": ({},),
    "tinker_native_args": ({},),
}
_UNUSED = frozenset(
    {
        "chat_template_content_format",
        "chat_template_tool_schema_format",
        "allow_unvalidated_arch",
        "_decouple_vllm_and_unsloth",
    }
)
"""Options without effect: the server formats content parts and tools as each template expects."""


def model_fields(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The fields of ModelSpec in an `_internal_config`; null means absent."""
    options = {key: value for key, value in config.items() if value is not None}
    known = {*_SECTIONS, *_GPU_IDS, *_FIXED, *_UNUSED}
    for key, value in options.items():
        where = f"_internal_config.{key}"
        if key not in known:
            hint = did_you_mean(key, known)
            raise ConfigError(f"{where}: no such key.{hint} Known: {', '.join(sorted(known))}.")
        if key in _FIXED:
            check_only(where, value, _FIXED[key])
        if key in _SECTIONS and not isinstance(value, Mapping):
            raise ConfigError(f"{where}: expected a dict, got {type(value).__name__}")
    fields = {key: dict(options[key]) for key in _SECTIONS if key in options}
    if ids := {key: options[key] for key in _GPU_IDS if key in options}:
        fields["engine_args"] = fields.get("engine_args", {}) | ids
    return fields


def without_effect(config: Mapping[str, Any]) -> list[str]:
    """The keys of an `_internal_config` that change nothing here."""
    return sorted(key for key in _UNUSED if config.get(key) is not None)


def engine_fields(config: Mapping[str, Any] | None) -> tuple[dict[str, Any], list[str]]:
    """The engine_args in an OpenAIServerConfig, and the other keys, which have no effect."""
    options = dict(config or {})
    engine = {k: v for k, v in (options.pop("engine_args", None) or {}).items() if v is not None}
    server = options.pop("server_args", None) or {}
    return engine, sorted([*options, *(f"server_args.{key}" for key in server)])


# ---- a training call --------------------------------------------------------------------------


def train_keys(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a training call under hone's names; hone's own options are unchanged."""
    keys = dict(options)
    for key, allowed in ONE_WAY.items():
        if (value := keys.pop(key, None)) is not None:
            check_only(f"train({key})", value, allowed)
    for key, defaults in NO_EFFECT.items():
        if (value := keys.pop(key, None)) is not None and value not in defaults:
            _log_no_effect(key)
    for key in ("loss_fn", "ppo"):
        if (chosen := keys.pop(key, None)) is not None:
            _set(keys, "loss", _loss(key, chosen), f"{key}={chosen!r}")
    if keys.pop("normalize_advantages", None) is False:
        _set(keys, "scale_rewards", False, "normalize_advantages=False")
    for theirs, ours in RENAMED.items():
        if theirs in keys:
            keys[ours] = keys.pop(theirs)
    # In ART, null means the default. For these keys of hone, null has a meaning.
    nullable = ("importance_cap", "row_tokens", "max_staleness", "scale_rewards", "epsilon_high")
    return {key: value for key, value in keys.items() if value is not None or key in nullable}


def _loss(key: str, chosen: Any) -> str:
    """The loss that ART's `loss_fn` or `ppo` selects."""
    name = ("ppo" if chosen else "cispo") if key == "ppo" else chosen
    if name not in LOSSES:
        known = " or ".join(map(repr, LOSSES))
        raise ConfigError(
            f"train(loss_fn={name!r}): hone has {known} of ART's; `loss` of TrainConfig also "
            "takes 'dapo' and 'dr_grpo'"
        )
    return LOSSES[name]


def _set(keys: dict[str, Any], key: str, value: Any, option: str) -> None:
    """Set the key for an option of ART; ConfigError if it is already set to something else."""
    if keys.get(key, value) not in (value, None):
        raise ConfigError(
            f"train({option}) is {key}={value!r}, which contradicts {key}={keys[key]!r}; write one "
            "of the two"
        )
    keys[key] = value


@cache
def _log_no_effect(key: str) -> None:
    log.info("train(%s) has no effect: the learner always computes pi_old, in its own rows", key)
