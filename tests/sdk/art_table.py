"""The table of docs/art.md: every name and option of ART, and what hone does with it, by trying it.

In:   the names and options of openpipe-art 0.5.4 to 0.5.18
Out:  rows of Markdown; `python -m tests.sdk.art_table` writes them into the page
"""

import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import hone.art
from hone import options
from hone.errors import HoneError
from hone.server.train.model_args import normalize_spec
from hone.types import ModelSpec

PAGE = Path(__file__).parents[2] / "docs/art.md"
BEGIN, END = "<!-- art names -->\n", "<!-- /art names -->"

NAMES = [
    "Backend",
    "LocalBackend",
    "LocalTrainResult",
    "Messages",
    "MessagesAndChoices",
    "Model",
    "ServerlessBackend",
    "ServerlessTrainResult",
    "Tools",
    "TrainConfig",
    "TrainResult",
    "TrainableModel",
    "Trajectory",
    "TrajectoryGroup",
    "auto_trajectory",
    "capture_auto_trajectory",
    "capture_yielded_trajectory",
    "dev",
    "gather_trajectories",
    "gather_trajectory_groups",
    "retry",
    "trajectory_group_batches",
    "yield_trajectory",
    "dev.EngineArgs",
    "dev.InitArgs",
    "dev.InternalModelConfig",
    "dev.OpenAIServerConfig",
    "dev.PeftArgs",
    "dev.ServerArgs",
    "dev.TrainConfig",
    "dev.TrainerArgs",
    "backend.Backend",
    "batches.trajectory_group_batches",
    "errors",
    "gather.gather_trajectories",
    "gather.gather_trajectory_groups",
    "langgraph.init_chat_model",
    "langgraph.wrap_rollout",
    "local.LocalBackend",
    "model.Model",
    "model.TrainableModel",
    "openai.consume_chat_completion_stream",
    "openai.consume_sync_chat_completion_stream",
    "rewards.ruler",
    "rewards.ruler_score_group",
    "serverless.backend.ServerlessBackend",
    "trajectories.History",
    "trajectories.Trajectory",
    "trajectories.TrajectoryGroup",
    "trajectories.get_messages",
    "types.Message",
    "types.MessageOrChoice",
    "types.LocalTrainResult",
    "types.Messages",
    "types.MessagesAndChoices",
    "types.ServerlessTrainResult",
    "types.Tools",
    "types.TrainConfig",
    "types.TrainResult",
    "types.TrainSFTConfig",
    "types.Verbosity",
    "utils.format_message",
    "utils.get_model_step",
    "utils.iterate_dataset",
    "utils.limit_concurrency",
    "utils.litellm",
    "utils.log_http_errors",
    "utils.retry",
    "utils.strip_logprobs",
    "Model.backend",
    "Model.get_inference_name",
    "Model.get_step",
    "Model.litellm_completion_params",
    "Model.log",
    "Model.merge_state",
    "Model.openai_client",
    "Model.overwrite_state",
    "Model.read_state",
    "Model.register",
    "Model.write_state",
    "TrainableModel.delete_checkpoints",
    "TrainableModel.train",
    "Trajectory.finish",
    "Trajectory.for_logging",
    "Trajectory.log",
    "Trajectory.messages",
    "Trajectory.track_duration",
    "TrajectoryGroup.log",
    "LocalBackend.close",
    "LocalBackend.register",
    "LocalBackend.train",
]
"""What scripts import from `art`, and the methods that they call."""

DIFFERS = {
    "auto_trajectory": "choices name their recorded tokens by `call_id`; they have no `logprobs`",
    "capture_auto_trajectory": "libraries are patched while it runs, not by `import`",
    "langgraph.init_chat_model": "a plain `ChatOpenAI`; its arguments are honoured",
    "ServerlessBackend": "`hone.RemoteBackend`: a hone server at `base_url`",
    "serverless.backend.ServerlessBackend": "`hone.RemoteBackend`",
    "LocalTrainResult": "the same as `TrainResult`, with `checkpoint_path`",
    "ServerlessTrainResult": "the same as `TrainResult`; there are no artifacts",
    "Backend": "the protocol of hone's backends; `hone.art.ArtBackend` is ART's, for the real package",
    "backend.Backend": "the protocol of hone's backends",
    "Model.log": "trajectories are JSONL below `base_path`; a trained model's metrics are on its server",
    "utils.iterate_dataset": "leaves the global random generator unchanged",
    "TrainableModel.train": "raises if the job fails; flat groups do not advance the step",
}
"""Names that do something else than in ART."""

ABSENT = {
    "guided_completion": "`model.train_sft` on the answers of the larger model",
    "metrics.MetricsBuilder, metrics.track_api_cost": "costs are not counted; `Model.log(metrics=...)` takes any number",
    "utils.sft": "`hone finetune` with the trainer `sft` reads the file, or `model.train_sft`",
    "utils.benchmarking, utils.benchmark_rollout, utils.group_aggregate": "`hone eval`, and the report of a run",
    "utils.trajectory_logging, utils.output_dirs": "`hone export-trajectories`; files are listed in [the run directory](reference/run_directory.md)",
    "utils.s3": "copy the checkpoint's directory; it is a PEFT adapter",
    "preprocessing, loss, unsloth, vllm, transformers": "internals of ART's own server; hone has its own learner",
    "skypilot": "start `hone serve` on the cluster and use `ServerlessBackend`",
    "megatron, tinker, tinker_native": "hone trains LoRA adapters on its own server",
    "pipeline_trainer.PipelineTrainer": "`hone finetune` is the loop with rollouts, training and evaluation",
    "mcp": "generate scenarios with any model, as a dataset for `hone finetune`",
    "utils.record_provenance": "checkpoints have a manifest: the job, the base and the hashes",
    "utils.deployment": "`hone export` writes adapters and merged weights for other servers",
    "LocalBackend._experimental_push_to_s3": "copy the checkpoint's directory; it is a PEFT adapter",
    "LocalBackend._experimental_fork_checkpoint": "merge the adapter (`hone export --merge`) and name the result as `base_model`",
    "Model.update_wandb_config": "the configuration of a job is reported with its metrics",
    "Model.metrics_builder, TrainableModel.set_cost_calculator": "costs are not counted",
}
"""Names that hone.art does not have, and what to use."""

ARGUMENTS: dict[str, tuple[Callable[..., Any], str]] = {
    "Model": (
        hone.art.Model,
        "name project entity id config inference_api_key inference_base_url inference_model_name "
        "base_path report_metrics",
    ),
    "TrainableModel": (hone.art.TrainableModel, "name project base_model _internal_config"),
    "TrainableModel.register": (hone.art.TrainableModel.register, "backend _openai_client_config"),
    "TrainableModel.train": (
        hone.art.TrainableModel.train,
        "trajectory_groups config _config verbose",
    ),
    "LocalBackend": (hone.art.LocalBackend, "in_process path"),
    "ServerlessBackend": (hone.art.ServerlessBackend, "api_key base_url"),
    "Trajectory": (
        hone.art.Trajectory,
        "messages_and_choices tools additional_histories reward initial_policy_version "
        "final_policy_version metrics metadata logs start_time",
    ),
    "TrajectoryGroup": (hone.art.TrajectoryGroup, "trajectories exceptions metadata metrics logs"),
    "TrainConfig": (hone.art.TrainConfig, "learning_rate beta kl_penalty_coef"),
    "gather_trajectory_groups": (
        hone.art.gather_trajectory_groups,
        "groups pbar_desc pbar_total_completion_tokens max_exceptions max_metrics after_each",
    ),
}
"""Arguments that scripts pass."""

TRAINING: dict[str, Any] = {
    "learning_rate": 1e-5,
    "loss_fn": "ppo",
    "ppo": True,
    "normalize_advantages": False,
    "loss_fn_config": {},
    "adam_params": {},
    "kl_penalty_coef": 0.1,
    "epsilon": 0.1,
    "kl_penalty_reference_step": 1,
    "kl_ref_adapter_path": "x",
    "epsilon_high": 0.3,
    "advantage_balance": 0.5,
    "scale_rewards": False,
    "importance_sampling_level": "sequence",
    "max_negative_advantage_importance_sampling_weight": 1.0,
    "mask_prob_ratio": True,
    "kimi_k2_tau": 0.1,
    "precalculate_logprobs": True,
    "packed_sequence_length": 4096,
    "allow_training_without_logprobs": True,
    "truncated_importance_sampling": 2.5,
    "scale_learning_rate_by_reward_std_dev": True,
    "logprob_calculation_chunk_size": 8,
    "num_trajectories_learning_rate_multiplier_power": 1.0,
    "moe_routing_replay_path": "x",
    "moe_routing_replay_strict": True,
    "grad_accumulation_sequences": 2,
}
"""Options of `backend.train` and `model.train(_config=)`, each with a value that is not ART's default."""
DIRECT = ("plot_tensors", "save_checkpoint", "verbose")
"""Arguments of `backend.train` that are no settings of the training."""

INTERNAL: dict[str, Any] = {
    "init_args": {"max_seq_length": 64},
    "engine_args": {},
    "peft_args": {},
    "trainer_args": {},
    "trainer_gpu_ids": [0],
    "inference_gpu_ids": [1],
    "chat_template_kwargs": {"x": 1},
    "rollout_weights_mode": "merged",
    "chat_template": "x",
    "chat_template_path": "x",
    "torchtune_args": {"model": "x"},
    "tinker_args": {"renderer_name": "x"},
    "tinker_native_args": {"renderer_name": "x"},
    "allow_unvalidated_arch": True,
    "chat_template_content_format": "openai",
    "chat_template_tool_schema_format": "default",
}
"""Keys of InternalModelConfig."""

SECTIONS: dict[str, dict[str, Any]] = {
    "init_args": {
        "max_seq_length": 64,
        "load_in_4bit": True,
        "load_in_8bit": True,
        "revision": "x",
        "full_finetuning": True,
        "rope_scaling": {"type": "x"},
        "resize_model_vocab": 5,
        **dict.fromkeys(
            ["dtype", "token", "device_map", "fix_tokenizer", "trust_remote_code"], "x"
        ),
        **dict.fromkeys(["use_gradient_checkpointing", "use_exact_model_name", "use_async"], "x"),
        **dict.fromkeys(["fast_inference", "gpu_memory_utilization", "float8_kv_cache"], 1),
        **dict.fromkeys(["random_state", "max_lora_rank", "disable_log_stats"], 1),
        "enable_prefix_caching": True,
        "load_in_16bit": True,
        "model_name": "other",
    },
    "peft_args": {
        "r": 4,
        "lora_alpha": 4,
        "random_state": 7,
        "target_modules": ["q_proj"],
        "bias": "all",
        "lora_dropout": 0.5,
        "layers_to_transform": [1],
        "layers_pattern": "x",
        "use_rslora": True,
        "modules_to_save": ["x"],
        "init_lora_weights": False,
        "loftq_config": {"x": 1},
        "use_gradient_checkpointing": "x",
        "max_seq_length": 9,
        "temporary_location": "x",
    },
    "trainer_args": {
        "learning_rate": 1e-5,
        "beta": 0.1,
        "max_grad_norm": 0.1,
        "weight_decay": 0.1,
        "epsilon": 0.1,
        "epsilon_high": 0.3,
        "scale_rewards": False,
        "adam_beta1": 0.5,
        "adam_beta2": 0.5,
        "adam_epsilon": 1e-6,
        "optim": "sgd",
        "warmup_ratio": 0.1,
        "lr_scheduler_type": "linear",
        "warmup_steps": 10,
        "(any other of TRL's)": 1,
    },
    "engine_args": {
        "quantization": "fp8",
        "quantization_config": {"x": 1},
        "load_format": "bitsandbytes",
        "hf_overrides": {"x": 1},
    },
}
"""Keys of the sections, each with a value that is not ART's default."""

Row = tuple[str, str, str]


def rows() -> Iterator[Row]:
    """ART's name, what hone does with it, and a note."""
    for name in NAMES:
        _resolve(name)
    yield _listed(name for name in NAMES if name not in DIFFERS), "works", ""
    for name, note in DIFFERS.items():
        yield f"`{name}`", "differs", note
    for name, note in ABSENT.items():
        first = name.split(", ")[0]
        assert not _has(first), f"hone.art has {first} by now"
        yield f"`{name}`", "not available", note
    for name, (call, arguments) in ARGUMENTS.items():
        _check_arguments(name, call, arguments.split())
        yield f"arguments of `{name}`: {_listed(arguments.split())}", "works", ""
    cost = "gpu_cost_per_hour_usd"
    paid: dict[str, Any] = {cost: 2.0}
    refused = _refusal(cost, lambda: hone.art.LocalBackend(**paid))
    assert refused is not None
    yield f"arguments of `LocalBackend`: `{cost}`", *refused
    signature = inspect.signature(hone.art.LocalBackend.train).parameters
    assert set(DIRECT) <= set(signature)
    yield f"`train`: {_listed(DIRECT)}", "works", ""
    yield from _grouped("`train`: ", ((k, _training(k, v)) for k, v in TRAINING.items()))
    yield from _grouped("`_internal_config`: ", ((k, _internal(k, v)) for k, v in INTERNAL.items()))
    for section, keys in SECTIONS.items():
        yield from _grouped(
            f"`{section}`: ", ((k, _section(section, k, v)) for k, v in keys.items())
        )
    yield (
        "`engine_args`: any other of vLLM's",
        "works",
        "passed to vLLM, except what hone sets itself; without effect on the embedded engine",
    )


Outcome = tuple[str, str]


def _training(key: str, value: Any) -> Outcome:
    if key == "grad_accumulation_sequences":
        return _refusal(key, lambda: hone.art.TrainConfig.model_validate({key: value})) or (
            "works",
            "",
        )
    if refused := _refusal(key, lambda: options.train_keys({key: value})):
        return refused
    keys = options.train_keys({key: value})
    if not keys:
        return "no effect", "the learner always computes pi_old, in its own rows"
    ((ours, _),) = keys.items()
    return "works", "" if ours == key else f"as `{ours}`"


def _internal(key: str, value: Any) -> Outcome:
    if refused := _refusal(key, lambda: options.model_fields({key: value})):
        return refused
    fields = options.model_fields({key: value})
    if not fields:
        return "no effect", "the server renders every base model with its own template"
    return "works", "" if key in fields else f"in `{next(iter(fields))}`"


def _section(section: str, key: str, value: Any) -> Outcome:
    plain = ModelSpec(name="a", base_model="b")
    if refused := _refusal(
        key, lambda: normalize_spec(plain.model_copy(update={section: {key: value}}))
    ):
        return refused
    spec = normalize_spec(plain.model_copy(update={section: {key: value}}))
    if spec.not_applicable:
        return "no effect", "logged when the model is registered"
    return "works", ""


def _refusal(key: str, attempt: Callable[[], object]) -> Outcome | None:
    try:
        attempt()
    except (HoneError, ValueError) as error:
        reason = options.REASONS.get(
            key, "It would change the result; hone supports one setting only"
        )
        assert key in str(error) and (key not in options.REASONS or reason in str(error)), error
        return "refused", reason
    return None


def _grouped(prefix: str, outcomes: Iterable[tuple[str, Outcome]]) -> Iterator[Row]:
    """One row for all keys with the same outcome."""
    together: dict[Outcome, list[str]] = {}
    for key, outcome in outcomes:
        together.setdefault(outcome, []).append(key)
    for (what, note), keys in together.items():
        yield prefix + _listed(keys), what, note


def _listed(keys: Iterable[str]) -> str:
    return ", ".join(key[1:-1] if key.startswith("(") else f"`{key}`" for key in keys)


def _resolve(name: str) -> Any:
    """What a name of `art` is in hone.art; a module, or an attribute of one or of a class."""
    value: Any = hone.art
    for part in name.split("."):
        try:
            value = getattr(value, part)
        except AttributeError:
            value = importlib.import_module(f"{value.__name__}.{part}")
    return value


def _has(name: str) -> bool:
    try:
        _resolve(name)
    except (AttributeError, ModuleNotFoundError):
        return False
    return True


def _check_arguments(name: str, call: Callable[..., Any], arguments: Iterable[str]) -> None:
    fields: Mapping[str, Any] = getattr(call, "model_fields", {})
    taken = {*fields, *inspect.signature(call).parameters}
    more = {"_internal_config"}  # accepted by a validator
    assert set(arguments) <= taken | more, (name, set(arguments) - taken)


def table() -> str:
    """The rows as Markdown, with ART's package name."""
    lines = ["| in `art` | in `hone.art` | |", "|---|---|---|"]
    lines += [f"| {name} | {what} | {note} |" for name, what, note in rows()]
    return "\n".join(lines).replace(" |  |", " | |") + "\n"


def main() -> None:
    head, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(head + BEGIN + table() + END + rest.partition(END)[2], encoding="utf-8")
    sys.stdout.write(f"wrote {PAGE.name}\n")


if __name__ == "__main__":
    main()
