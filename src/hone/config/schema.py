"""The document: every section of the YAML, its fields, defaults and bounds.

In:   a file and `-o` overrides
Out:  a Document whose blocks are the configuration objects of their components

The whole file is checked before anything is started, against the types that are registered: a
mistake on the last line must not cost the epoch that came before it.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, PrivateAttr, model_validator

from hone.config import override, plugins
from hone.config.base import (
    DatasetBaseConfig,
    EvalDatasetStructure,
    EvalFilterConfig,
    EvaluatorBaseConfig,
    FunctionBaseConfig,
    LLMBaseConfig,
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
from hone.config.registry import ByType

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


def _function_name(name: str) -> str:
    if not re.fullmatch(r"[!-~]+", name) or "." in name or name == "<workflow>":
        raise ValueError(
            f"a function cannot be called {name!r}: its name travels with every model call, so it "
            f"has no dots, no spaces and only ASCII"
        )
    return name


FunctionName = Annotated[str, AfterValidator(_function_name)]


class CurriculumLearningConfig(Strict):
    """Which groups are trained on, by how well their example is answered already."""

    enabled: bool = False
    """Train on all groups unless true."""
    initial_percentile: float = Field(default=0.3, gt=0, le=1)
    """The share of examples that the first epochs train on."""
    increment_percentile: float = Field(default=0.2, gt=0, le=1)
    """What each expansion adds to that share."""
    expansion_interval: int = Field(default=5, ge=1)
    """Epochs between expansions."""
    min_reward_diff: float = Field(default=0.1, ge=0)
    """Groups whose rewards lie closer together are left out: they say nothing."""
    sort_ascending: bool = False
    """Start with the examples of the lowest reward instead of the highest."""
    random_subsample: float | None = Field(default=None, gt=0, le=1)
    """Train on this share of the groups, drawn anew each epoch; of the trajectories if there is
    one group."""
    skip_excluded: bool = False
    """Do not run examples that the curriculum would leave out anyway, as far as the history of
    their rewards tells."""


class EarlyStoppingConfig(Strict):
    """When to stop before `num_epochs`."""

    metric: Literal["val/reward"] = "val/reward"
    """What must improve: the mean reward on the validation dataset."""
    patience: int = Field(ge=1)
    """So many validations in a row may pass without improvement."""
    min_delta: float = Field(default=0.0, ge=0)
    """Less than this is no improvement."""


class PolicyFailureReward(Strict):
    """What a rollout earns that failed through the model's own doing."""

    reward: float
    """Instead of the evaluator's score, which there is not."""


class ValidationConfig(Strict):
    """How the validation dataset is run."""

    greedy: bool = False
    """At temperature 0, whatever the workflow asks for."""
    reps: int = Field(default=1, ge=1)
    """Rollouts of each example."""


class FinetuneRunConfig(Strict):
    """What the command line said; filled by `hone finetune`."""

    not_yet: ClassVar[Mapping[str, str]] = {
        "endpoint": "run the workflow here",
        "endpoint_timeout": "run the workflow here",
    }

    config_file: Path | None = None
    dataset: Path | None = None
    result_json_path: str = "$"
    override: tuple[tuple[str, str], ...] = ()
    validation_dataset: Path | None = None
    validation_interval: int = Field(default=5, ge=1)
    validation_config_file: Path | None = None


class FinetuneConfig(Strict):
    """The training run."""

    enabled: bool = False
    """`hone finetune` runs only if true; the other commands do not look."""
    trainer: Annotated[str, Names(("trainers",))] | None = None
    """A key of `trainers`."""
    trajectory_builder: Annotated[str, Names(("trajectory_builders",))] | None = None
    """A key of `trajectory_builders`."""
    trainer_adapter: Annotated[str, Names(("trainer_adapters",))] | None = None
    """A key of `trainer_adapters`."""
    reward_function: RewardFunctionConfig | None = None
    target_functions: list[str] = Field(default_factory=lambda: ["<workflow>"], min_length=1)
    """Train on the model calls of these functions; `<workflow>` is every call of a rollout."""
    target_model: str | None = None
    """The model to train: a key of `llms`, or a model's name. Not needed where one entry alone is
    `trainable`, or alone names the model in training or its base at the training server. Other
    entries that name that base get the base weights and are not trained."""
    curriculum_learning: CurriculumLearningConfig = Field(default_factory=CurriculumLearningConfig)
    num_epochs: int = Field(default=1, ge=1)
    """Times round: collect, select, train, publish."""
    output_dir: Path = Path(".tmp/nat/finetuning")
    """Where metrics, plots, trajectories and the report are written, and the run's journal."""

    seed: int = 0
    """Of the order of examples, the sampling of rollouts and the training. Equal seeds give equal
    runs as far as rounding lets them: what else is in a batch may tip a token."""
    resume: Literal["auto", "never"] = "auto"
    """Whether the same command goes on with a run that was interrupted."""
    keep_checkpoints: int | None = Field(default=None, ge=1)
    """Keep so many of the newest steps, and the best one; all of them if not set."""
    early_stopping: EarlyStoppingConfig | None = None
    groups_per_step: int | None = Field(default=None, ge=1)
    """Collect and train an epoch in rounds of so many examples; one round if not set."""
    examples_per_epoch: int | None = Field(default=None, ge=1)
    """An epoch is so many examples, drawn without repetition until all were seen."""
    min_group_size: int = Field(default=2, ge=1)
    """Smaller groups are dropped and counted."""
    on_policy_failure: Literal["drop"] | PolicyFailureReward = "drop"
    """What becomes of rollouts that failed through the model's own doing."""
    max_infrastructure_failures: float = Field(default=0.2, ge=0, le=1)
    """An epoch fails when a larger share of its rollouts failed by no fault of the model."""
    rollout_timeout_s: float = Field(default=600.0, gt=0)
    """For one run of the workflow on one input."""
    rollout_retries: int = Field(default=1, ge=0)
    """How often a rollout is run again that failed by no fault of the model or its evaluator."""
    job_timeout_s: float = Field(default=86400.0, gt=0)
    """For one training job."""
    validation: ValidationConfig = Field(default_factory=ValidationConfig)
    allow_foreign_endpoint: bool = False
    """Train also on rollouts that asked another endpoint than the training server, from the text and
    the logprobs of its answers. That is off-policy: the endpoint does not learn. It must have the
    base model's tokens, and its `llms` entry `logprobs: true`."""

    run_configuration: FinetuneRunConfig | None = Field(default=None, exclude=True)
    """What the command line said; refused in the YAML."""

    @model_validator(mode="after")
    def _the_three_parts_are_named(self) -> Self:
        missing = [part for part in SECTION_OF if getattr(self, part) is None]
        if self.enabled and missing:
            raise ValueError(not_named(missing))
        return self


class JobManagementConfig(Strict):
    """A directory of its own for each evaluation."""

    append_job_id_to_output_dir: bool = False
    """Write to `jobs/job_ID` under the output directory."""
    max_jobs: int = Field(default=0, ge=0)
    """Keep so many of them; 0 keeps all."""
    eviction_policy: Literal["time_created", "time_modified"] = "time_created"
    """Which ones go first: the oldest by this time."""


class EvalOutputConfig(Strict):
    """What an evaluation writes."""

    not_yet: ClassVar[Mapping[str, str]] = {
        "s3": "copy the directory yourself",
        "remote_dir": "copy the directory yourself",
        "custom_scripts": "run them after `hone eval`",
        "write_atif_workflow_output": "read workflow_output.json",
    }

    dir: Path | None = None
    """Instead of `output_dir` beside it."""
    custom_pre_eval_process_function: str | None = None
    """`module.function`, given each item after the workflow and before the evaluators."""
    cleanup: bool = True
    """Remove first what an earlier evaluation wrote there; nothing else is touched."""
    job_management: JobManagementConfig = Field(default_factory=JobManagementConfig)
    workflow_output_step_filter: list[str] | None = None
    """Which kinds of step workflow_output.json holds (LLM_END, TOOL_END, CUSTOM_END); all if not
    set."""


class EvalGeneralConfig(Strict):
    """Dataset, output and concurrency of evaluations; training runs use them too."""

    not_yet: ClassVar[Mapping[str, str]] = {
        "profiler": "use the evaluators avg_llm_latency and avg_workflow_runtime",
        "validate_llm_endpoints": "`hone finetune` tries each endpoint before it starts",
        "per_input_user_id": "workflows have no user here",
    }

    max_concurrency: int = Field(default=8, ge=1)
    """Rollouts at a time, over all generations."""
    workflow_alias: str | None = None
    """What the workflow is called in the output."""
    output_dir: Path = Path(".tmp/nat/examples/default")
    """Where the files of an evaluation are written."""
    output: EvalOutputConfig | None = None
    dataset: Annotated[DatasetBaseConfig, ByType("dataset_loader")] | None = None
    """What the workflow is run on; `--dataset` replaces it."""

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
    """Scores by name. `finetuning.reward_function.name` picks one of them as the reward."""


class Document(Strict):
    """A whole configuration."""

    not_yet: ClassVar[Mapping[str, str]] = dict.fromkeys(
        (
            *("authentication", "embedders", "function_groups", "general", "memory", "middleware"),
            *("object_stores", "optimizer", "retrievers", "ttc_strategies"),
        ),
        "remove it, and do in your function's own code what it did",
    )

    llms: dict[str, Annotated[LLMBaseConfig, ByType("llm_provider")]] = Field(default_factory=dict)
    """Models that functions call, by name."""
    functions: dict[FunctionName, Annotated[FunctionBaseConfig, ByType("function")]] = Field(
        default_factory=dict
    )
    """What the workflow and other functions may call, by name."""
    workflow: Annotated[FunctionBaseConfig, ByType("function")] | None = None
    """What runs on each input."""
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

    _loaded: Loaded | None = PrivateAttr(None)

    @property
    def loaded(self) -> Loaded:
        """What was read, before it was checked, and where each key of it stands."""
        assert self._loaded is not None, "a Document comes from schema.read"
        return self._loaded

    def remember(self, loaded: Loaded) -> None:
        """Keep what it was made of."""
        self._loaded = loaded

    @property
    def file(self) -> Path:
        """The file it was read from."""
        return self.loaded.file


def examine(
    file: Path, overrides: Sequence[tuple[str, str]] = ()
) -> tuple[Loaded, Document | None, list[Problem]]:
    """What a file holds, the document if its blocks can be read, and everything wrong with it."""
    plugins.discover()
    loaded = load(file)
    wrong = override.apply(loaded, overrides, Document)
    document, problems = check(loaded, Document)
    if document is not None:
        document.remember(loaded)
    return loaded, document, list(dict.fromkeys([*wrong, *problems, *unnamed(loaded)]))


def read(file: Path, overrides: Sequence[tuple[str, str]] = ()) -> Document:
    """Load and check a file; raises ConfigProblems with everything that is wrong with it."""
    _, document, wrong = examine(file, overrides)
    if document is None or wrong:
        raise ConfigProblems(wrong)
    return document
