"""`art.dev` under hone's name: the types of ART's advanced options.

In:   what ART's users write in `_internal_config`, `_openai_client_config` and `_config`
Out:  a type for each; options.py says what hone does with every key
"""

from typing import Any, Literal

from typing_extensions import TypedDict  # with extra_items=, which typing does not have yet


class InitArgs(TypedDict, total=False, extra_items=Any):
    """How the base model is loaded, as for Unsloth."""

    model_name: str
    max_seq_length: int
    load_in_4bit: bool
    load_in_8bit: bool
    gpu_memory_utilization: float


class PeftArgs(TypedDict, total=False, extra_items=Any):
    """The adapter, as for PEFT."""

    r: int
    lora_alpha: float
    target_modules: list[str]
    random_state: int


class EngineArgs(TypedDict, total=False, extra_items=Any):
    """Arguments of vLLM's engine, except those that hone sets or that change the model."""

    gpu_memory_utilization: float
    max_model_len: int
    max_num_seqs: int
    tensor_parallel_size: int
    enforce_eager: bool


class TrainerArgs(TypedDict, total=False, extra_items=Any):
    """Training arguments, as for TRL."""

    learning_rate: float
    beta: float
    weight_decay: float
    max_grad_norm: float
    epsilon: float
    epsilon_high: float
    scale_rewards: bool


class InternalModelConfig(TypedDict, total=False):
    """`_internal_config` of a TrainableModel."""

    init_args: InitArgs | None
    engine_args: EngineArgs | None
    peft_args: PeftArgs | None
    trainer_args: TrainerArgs | None
    trainer_gpu_ids: list[int] | None
    inference_gpu_ids: list[int] | None
    chat_template_kwargs: dict[str, Any] | None
    rollout_weights_mode: Literal["lora", "merged"]
    chat_template: str | None
    chat_template_path: str | None
    chat_template_content_format: str | None
    chat_template_tool_schema_format: str | None
    allow_unvalidated_arch: bool
    torchtune_args: dict[str, Any] | None
    tinker_args: dict[str, Any] | None
    tinker_native_args: dict[str, Any] | None


class ServerArgs(TypedDict, total=False, extra_items=Any):
    """How ART starts its OpenAI server."""

    host: str | None
    port: int
    api_key: str | None
    tool_call_parser: str


class OpenAIServerConfig(TypedDict, total=False):
    """`_openai_client_config` of `register`."""

    log_file: str
    server_args: ServerArgs
    engine_args: EngineArgs


class TrainConfig(TypedDict, total=False):
    """`_config` of `TrainableModel.train`."""

    advantage_balance: float
    allow_training_without_logprobs: bool
    epsilon: float
    epsilon_high: float | None
    importance_sampling_level: str
    kimi_k2_tau: float | None
    kl_penalty_coef: float
    kl_ref_adapter_path: str | None
    logprob_calculation_chunk_size: int
    mask_prob_ratio: bool
    max_negative_advantage_importance_sampling_weight: float
    moe_routing_replay_bundle: Any
    moe_routing_replay_path: str | None
    moe_routing_replay_strict: bool
    num_trajectories_learning_rate_multiplier_power: float
    packed_sequence_length: int | None
    plot_tensors: bool
    ppo: bool
    precalculate_logprobs: bool
    scale_learning_rate_by_reward_std_dev: bool
    scale_rewards: bool
    truncated_importance_sampling: float | None
