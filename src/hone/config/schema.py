"""The schema of the YAML: every section, its fields, defaults and bounds.

In:   a file and `-o` overrides
Out:  a Document whose blocks are the configuration objects of their components

The whole file is validated against the registered types before anything starts: a mistake on the
last line must not surface after the first epoch.
"""

import logging
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PrivateAttr,
    model_validator,
)

from hone.config import override, plugins
from hone.config.base import (
    DatasetBaseConfig,
    EvalDatasetStructure,
    EvalFilterConfig,
    EvaluatorBaseConfig,
    FunctionBaseConfig,
    LLMBaseConfig,
    LoggerBaseConfig,
    Names,
    RewardFunctionConfig,
    Strict,
    TrainerAdapterConfig,
    TrainerConfig,
    TrajectoryBuilderConfig,
)
from hone.config.check import SECTION_OF, check, not_named, unnamed
from hone.config.load import Loaded, load
from hone.config.problems import ConfigProblems, Place, Problem
from hone.config.registry import ByType, toolkit_component
from hone.config.secrets import add_secrets_of
from hone.types import Directory, ModelAlias

__all__ = [
    "ConfigProblems",
    "CurriculumLearningConfig",
    "Document",
    "EarlyStoppingConfig",
    "EvalConfig",
    "EvalDatasetStructure",
    "EvalFilterConfig",
    "EvalGeneralConfig",
    "EvalOutputConfig",
    "FinetuneConfig",
    "FinetuneRunConfig",
    "JobManagementConfig",
    "Place",
    "PolicyFailureReward",
    "Problem",
    "RewardFunctionConfig",
    "ValidationConfig",
    "examine",
    "read",
]


log = logging.getLogger("hone")

RUNS, EVALS = Path(".hone/runs"), Path(".hone/evals")
"""Where runs and evaluations are written if the file does not say where, each under its NAME."""
DEFAULT = "default"
"""NAME without a file."""


def name_of(file: Path) -> str:
    """NAME of a file: its own without the ending, or that of its folder for `config.yml`.

    For `configs/config.yml`, as in projects of NeMo Agent Toolkit, that of the folder above.
    """
    path = Path(os.path.abspath(file))
    parts = (path.stem, *(folder.name for folder in path.parents))
    return next((part for part in parts if part not in ("config", "configs", "")), DEFAULT)


def _function_name(name: str) -> str:
    if not re.fullmatch(r"[!-~]+", name) or "." in name or name == "<workflow>":
        raise ValueError(
            f"a function cannot be called {name!r}: its name travels with every model call, so it "
            f"has no dots, no spaces and only ASCII"
        )
    return name


FunctionName = Annotated[str, AfterValidator(_function_name)]


ToolkitSection = Annotated[dict[str, Any], BeforeValidator(plugins.check_toolkit_section)]


class CurriculumLearningConfig(Strict):
    """Selects the groups to train on by the rewards of their examples so far."""

    enabled: bool = False
    """If false, train on all groups."""
    initial_percentile: float = Field(default=0.3, gt=0, le=1)
    """Share of the examples that the first epochs train on, over all rounds of the epoch."""
    increment_percentile: float = Field(default=0.2, gt=0, le=1)
    """Added to that share at each expansion."""
    expansion_interval: int = Field(default=5, ge=1)
    """Epochs between expansions."""
    min_reward_diff: float = Field(default=0.1, ge=0)
    """Skip groups whose rewards differ by less: there is nothing to learn from them."""
    sort_ascending: bool = False
    """Start with the examples of the lowest reward instead of the highest."""
    random_subsample: float | None = Field(default=None, gt=0, le=1)
    """Train on this share of the groups, sampled again in each epoch; if the epoch has one group, on
    this share of its trajectories."""
    skip_excluded: bool = False
    """Do not run examples that the curriculum would exclude, judging by their rewards so far."""


class EarlyStoppingConfig(Strict):
    """Stops a run before `num_epochs`."""

    metric: Literal["val/reward"] = "val/reward"
    """The metric that must improve: the mean reward on the validation dataset."""
    patience: int = Field(ge=1)
    """Number of validations in a row without improvement after which the run stops."""
    min_delta: float = Field(default=0.0, ge=0)
    """Smallest change that counts as an improvement."""


def _exception_name(name: str) -> str:
    if not all(part.isidentifier() for part in name.split(".")):
        raise ValueError(f"{name!r} is not the name of a class; write Name or package.module.Name")
    if name.removeprefix("builtins.") in ("Exception", "BaseException"):
        raise ValueError(
            f"{name} is every exception, so no failure would be the model's; name the classes that "
            "are not its fault"
        )
    return name


ExceptionName = Annotated[str, AfterValidator(_exception_name)]


class PolicyFailureReward(Strict):
    """The reward of a rollout that failed because of the model."""

    reward: float
    """Used in place of the evaluator's score."""


class ValidationConfig(Strict):
    """How the validation dataset is run."""

    greedy: bool = False
    """Sample at temperature 0, whatever the workflow asks for."""
    reps: int = Field(default=1, ge=1)
    """Rollouts per example."""
    allow_training_examples: bool = False
    """Accept the file of the training examples as validation dataset. The held-out reward then says
    nothing about other inputs."""


class FinetuneRunConfig(Strict):
    """The options of `hone finetune`, filled in by the command."""

    config_file: Path | None = None
    dataset: Path | None = None
    result_json_path: str = "$"
    endpoint: str | None = None
    endpoint_timeout: float = Field(default=300.0, gt=0)
    override: tuple[tuple[str, str], ...] = ()
    validation_dataset: Path | None = None
    validation_interval: int = Field(default=5, ge=1)
    validation_config_file: Path | None = None


class FinetuneConfig(Strict):
    """The training run."""

    enabled: bool = False
    """`hone finetune` runs only if true; other commands ignore it."""
    trainer: Annotated[str, Names(("trainers",))] | None = None
    """A key of `trainers`."""
    trajectory_builder: Annotated[str, Names(("trajectory_builders",))] | None = None
    """A key of `trajectory_builders`."""
    trainer_adapter: Annotated[str, Names(("trainer_adapters",))] | None = None
    """A key of `trainer_adapters`."""
    reward_function: RewardFunctionConfig | None = None
    target_functions: list[str] = Field(default_factory=lambda: ["<workflow>"], min_length=1)
    """Train on the model calls of these functions; `<workflow>` means every call of a rollout. In a
    workflow of a framework they are nodes, agents or steps (`researcher`), or the end of a path
    (`research.model`)."""
    target_model: str | None = None
    """The model to train: a key of `llms`, or a model's name. Not needed if only one entry is
    `trainable`, or only one names the model in training or its base model at the training server.
    Other entries that name that base model get the base weights and are not trained."""
    model_aliases: list[ModelAlias] = Field(default_factory=list)
    """Other names of the model in training inside the run's rollouts, such as `gpt-4o`, for agents
    with a model name in their code. Outside the run the server does not know them."""
    curriculum_learning: CurriculumLearningConfig = Field(default_factory=CurriculumLearningConfig)
    num_epochs: int = Field(default=1, ge=1)
    """Number of epochs. One epoch: collect, select, train, publish."""
    output_dir: Directory = Field(
        default=RUNS / DEFAULT, json_schema_extra={"default": str(RUNS / "NAME")}
    )
    """Directory of the run: metrics, plots, trajectories, report, journal. NAME is the name of the
    file without its ending; for `config.yml` that of its folder, and for `configs/config.yml` that of
    the folder above."""

    seed: int = 0
    """Seed of the order of examples, the sampling of rollouts and the training. Equal seeds give
    equal runs up to rounding: the other requests in a batch can change a token."""
    resume: Literal["auto", "never"] = "auto"
    """Whether the same command resumes an interrupted run."""
    keep_checkpoints: int | None = Field(default=None, ge=1)
    """Number of newest checkpoints to keep, besides the best one and the run's first; all if not set."""
    early_stopping: EarlyStoppingConfig | None = None
    groups_per_step: int | None = Field(default=None, ge=1)
    """Examples per round: an epoch is collected and trained in rounds of this size; one round if
    not set."""
    examples_per_epoch: int | None = Field(default=None, ge=1)
    """Examples per epoch, drawn without repetition until all have been used; all if not set."""
    min_group_size: int = Field(default=2, ge=1)
    """Smaller groups are dropped and counted."""
    infrastructure_exceptions: list[ExceptionName] = Field(default_factory=list)
    """Classes of exceptions that are never the model's failure, also after it has answered:
    `SearchDown`, or `my_tools.errors.SearchDown`. They match the class and the classes that it
    inherits from, anywhere in the chain of causes; such a rollout is retried and never scored. Every
    command that runs the workflow uses them. Names are not checked: a class may be imported later.
    Errors of the network, of servers (429, 5xx) and of the machine need not be listed."""
    on_policy_failure: Literal["lowest", "drop"] | PolicyFailureReward = "lowest"
    """Reward of rollouts that failed because of the model. `lowest`: the smaller of 0 and the lowest
    reward of the run so far. `{reward: x}`: this reward. `drop`: they are not trained on, which
    rewards failing; rewards that are reported count them as `lowest` does."""
    max_infrastructure_failures: float = Field(default=0.2, ge=0, le=1)
    """An epoch fails if a larger share of its rollouts failed for reasons other than the model."""
    rollout_timeout_s: float = Field(default=600.0, gt=0)
    """Timeout of one run of the workflow on one input. Time that the training server held its calls does
    not count: serving was paused for training, or an engine or adapter was being loaded."""
    rollout_retries: int = Field(default=1, ge=0)
    """Number of retries of a rollout that failed for reasons other than the model or its evaluator.
    Every attempt is recorded."""
    job_timeout_s: float = Field(default=86400.0, gt=0)
    """Timeout of one training job."""
    validation: ValidationConfig = Field(default_factory=ValidationConfig)
    allow_foreign_endpoint: bool = False
    """Also train on rollouts that called an endpoint other than the training server, from the text
    and the logprobs of its answers. That is off-policy: the endpoint does not learn. It must use
    the base model's tokenizer, and its `llms` entry must have `logprobs: true`."""

    run_configuration: FinetuneRunConfig | None = Field(default=None, exclude=True)
    """The options of the command line; refused in the YAML."""
    record_calls: bool = Field(default=False, exclude=True)
    """Whether rollouts are written with their model calls; set for loggers that send them."""

    @property
    def reward_name(self) -> str | None:
        """The evaluator that computes the rewards; a run always has one."""
        return None if self.reward_function is None else self.reward_function.name

    @model_validator(mode="after")
    def _the_three_parts_are_named(self) -> Self:
        missing = [part for part in SECTION_OF if getattr(self, part) is None]
        if self.enabled and missing:
            raise ValueError(not_named(missing))
        return self


class JobManagementConfig(Strict):
    """Gives each evaluation its own directory."""

    append_job_id_to_output_dir: bool = False
    """Write to `jobs/job_ID` under the output directory."""
    max_jobs: int = Field(default=0, ge=0)
    """Number of these directories to keep; 0 keeps all."""
    eviction_policy: Literal["time_created", "time_modified"] = "time_created"
    """The oldest by this time are removed first."""


class EvalOutputConfig(Strict):
    """The files that an evaluation writes."""

    not_yet: ClassVar[Mapping[str, str]] = {
        "s3": "copy the directory yourself",
        "remote_dir": "copy the directory yourself",
        "custom_scripts": "run them after `hone eval`",
        "write_atif_workflow_output": "read workflow_output.json",
    }

    dir: Directory | None = None
    """Replaces `output_dir` of `eval.general`."""
    custom_pre_eval_process_function: str | None = None
    """`module.function`, called with each item after the workflow and before the evaluators."""
    cleanup: bool = True
    """First remove the files of an earlier evaluation; no other file is touched."""
    job_management: JobManagementConfig = Field(default_factory=JobManagementConfig)
    workflow_output_step_filter: list[str] | None = None
    """The kinds of step in workflow_output.json (LLM_END, TOOL_END, CUSTOM_END); all if not set."""


class EvalGeneralConfig(Strict):
    """Dataset, output and concurrency of evaluations; training runs use them too."""

    not_yet: ClassVar[Mapping[str, str]] = {
        "profiler": "use the evaluators avg_llm_latency and avg_workflow_runtime",
        "validate_llm_endpoints": "`hone finetune` tries each endpoint before it starts",
        "per_input_user_id": "workflows have no user here",
    }

    max_concurrency: int | None = Field(default=None, ge=1)
    """Number of rollouts at a time, over all generations. If not set, as many as keep the training
    server's engine busy (embedded 64, vLLM its max_num_seqs or 256; agents of `_type: command` at
    most two for each core of this machine), and 8 with other endpoints."""
    workflow_alias: str | None = None
    """The name of the workflow in the output."""
    output_dir: Directory = Field(
        default=EVALS / DEFAULT, json_schema_extra={"default": str(EVALS / "NAME")}
    )
    """Directory of the files of an evaluation; NAME as for `finetuning.output_dir`."""
    output: EvalOutputConfig | None = None
    dataset: Annotated[DatasetBaseConfig, ByType("dataset_loader")] | None = None
    """The dataset to run the workflow on; `--dataset` replaces it."""

    @model_validator(mode="after")
    def _one_directory(self) -> Self:
        if self.output is not None and self.output.dir is not None:
            self.output_dir = self.output.dir
        return self


class EvalConfig(Strict):
    """How outputs are scored."""

    general: EvalGeneralConfig = Field(default_factory=EvalGeneralConfig)
    evaluators: dict[str, Annotated[EvaluatorBaseConfig, ByType("evaluator")]] = Field(
        default_factory=dict
    )
    """Evaluators by name. `finetuning.reward_function.name` selects one of them as the reward."""


class Document(Strict):
    """A whole configuration."""

    llms: dict[str, Annotated[LLMBaseConfig, ByType("llm_provider")]] = Field(default_factory=dict)
    """Models that functions call, by name."""
    functions: dict[FunctionName, Annotated[FunctionBaseConfig, ByType("function")]] = Field(
        default_factory=dict
    )
    """Functions that the workflow and other functions call, by name."""
    workflow: Annotated[FunctionBaseConfig, ByType("function")] | None = None
    """The function that runs on each input."""
    eval: EvalConfig = Field(default_factory=EvalConfig)
    trajectory_builders: dict[
        str, Annotated[TrajectoryBuilderConfig, ByType("trajectory_builder")]
    ] = Field(default_factory=dict)
    """Named by `finetuning.trajectory_builder`."""
    trainer_adapters: dict[str, Annotated[TrainerAdapterConfig, ByType("trainer_adapter")]] = Field(
        default_factory=dict
    )
    """Named by `finetuning.trainer_adapter`."""
    trainers: dict[str, Annotated[TrainerConfig, ByType("trainer")]] = Field(default_factory=dict)
    """Named by `finetuning.trainer`."""
    finetuning: FinetuneConfig = Field(default_factory=FinetuneConfig)
    loggers: list[Annotated[LoggerBaseConfig, ByType("logger", bare=True)]] = Field(
        default_factory=list
    )
    """Services and files that a training run is sent to; a name (`tensorboard`), or a block with
    `_type`."""
    general: ToolkitSection = Field(default_factory=dict)
    """Telemetry and other settings of NeMo Agent Toolkit. This section and those below are passed to
    the toolkit unchanged, for its functions, and require it to be installed."""
    function_groups: ToolkitSection = Field(default_factory=dict)
    middleware: ToolkitSection = Field(default_factory=dict)
    embedders: ToolkitSection = Field(default_factory=dict)
    retrievers: ToolkitSection = Field(default_factory=dict)
    memory: ToolkitSection = Field(default_factory=dict)
    object_stores: ToolkitSection = Field(default_factory=dict)
    authentication: ToolkitSection = Field(default_factory=dict)
    ttc_strategies: ToolkitSection = Field(default_factory=dict)
    optimizer: ToolkitSection = Field(default_factory=dict)

    _loaded: Loaded | None = PrivateAttr(None)

    @property
    def loaded(self) -> Loaded:
        """The values of the file before validation, and the place of each key."""
        assert self._loaded is not None, "a Document comes from schema.read"
        return self._loaded

    def remember(self, loaded: Loaded) -> None:
        """Keep the values that it was validated from, and name directories after their file."""
        self._loaded = loaded
        for block, directory in ((self.finetuning, RUNS), (self.eval.general, EVALS)):
            if "output_dir" not in block.model_fields_set:
                block.output_dir = directory / name_of(loaded.file)

    @property
    def file(self) -> Path:
        """The file it was read from."""
        return self.loaded.file


def examine(
    file: Path, overrides: Sequence[tuple[str, str]] = ()
) -> tuple[Loaded, Document | None, list[Problem]]:
    """The values of a file, the document if its blocks are valid, and all problems."""
    plugins.discover()
    loaded = load(file)
    wrong = override.apply(loaded, overrides, Document)
    add_secrets_of(loaded.data)
    document, problems = check(loaded, Document)
    if document is not None:
        document.remember(loaded)
        _log_names_of_both(document)
    return loaded, document, list(dict.fromkeys([*wrong, *problems, *unnamed(loaded)]))


def _log_names_of_both(document: Document) -> None:
    """Log whose component is used if NeMo Agent Toolkit has one of the same name."""
    blocks = [
        *(("llm_provider", f"llms.{key}", config) for key, config in document.llms.items()),
        *(("function", f"functions.{key}", config) for key, config in document.functions.items()),
        ("function", "workflow", document.workflow),
        *(
            ("evaluator", f"eval.evaluators.{key}", config)
            for key, config in document.eval.evaluators.items()
        ),
    ]
    for kind, where, config in blocks:
        other = None if config is None else toolkit_component(kind, config.type_name)
        if config is not None and other is not None:
            log.info(
                "%s: _type %r is hone's own; that of NeMo Agent Toolkit is called %r",
                *(where, config.type_name, other.name),
            )


def read(file: Path, overrides: Sequence[tuple[str, str]] = ()) -> Document:
    """Load and validate a file; raises ConfigProblems with all its problems."""
    _, document, wrong = examine(file, overrides)
    if document is None or wrong:
        raise ConfigProblems(wrong)
    return document
