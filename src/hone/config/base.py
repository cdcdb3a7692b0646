"""Base classes of component configurations, references between components, shared blocks.

In:   the keys under one `_type` of the YAML
Out:  a ComponentConfig of that component

Unknown keys are refused here, for all components: if a misspelt key were ignored, the run would be
trained with an unintended default.
"""

import importlib.util
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, model_validator
from pydantic_core import CoreSchema, core_schema


class Strict(BaseModel):
    """A block of the YAML. Unknown keys are errors, and numbers are finite."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    not_yet: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Keys of NeMo Agent Toolkit that this version refuses, each with what to do instead."""


class ComponentConfig(Strict):
    """Base of all component configurations; `class X(FunctionBaseConfig, name="my_type")`."""

    type_name: ClassVar[str] = ""
    """The value of `_type` in the YAML."""

    def __init_subclass__(cls, name: str | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if name is not None:
            cls.type_name = name


class FunctionBaseConfig(ComponentConfig):
    """A function, or the workflow that runs on each input."""

    not_yet: ClassVar[Mapping[str, str]] = {"middleware": "wrap the function in your own code"}
    names_functions: ClassVar[bool] = False
    """Whether its calls may carry names that are not in the YAML, such as those of a graph's
    nodes."""


class LLMBaseConfig(ComponentConfig):
    """A model that functions call. Unknown keys are sent with every request."""

    model_config = ConfigDict(extra="allow")

    @property
    def has_openai_api(self) -> bool:
        """Whether the model has an OpenAI API, so that hone can call it itself."""
        return True


class EvaluatorBaseConfig(ComponentConfig):
    """Scores the output of one input."""

    is_service: ClassVar[bool] = False
    """Whether the evaluator asks a model or another service. Its failures are then never the
    policy's."""


@dataclass(frozen=True, slots=True)
class Names:
    """Annotates a string that is the key of a component; `hone validate` checks that it exists."""

    section: tuple[str, ...]


class RewardFunctionConfig(Strict):
    """The evaluator whose score is the reward."""

    name: Annotated[str, Names(("eval", "evaluators"))]
    """A key of `eval.evaluators`."""


class TrajectoryBuilderConfig(ComponentConfig):
    """Runs the workflow and groups its rollouts."""

    reward: RewardFunctionConfig | None = Field(default=None, exclude=True)
    """Filled from `finetuning.reward_function` when a run starts."""


class TrainerAdapterConfig(ComponentConfig):
    """Sends groups of trajectories to a training backend."""

    reward: RewardFunctionConfig | None = Field(default=None, exclude=True)
    """Filled from `finetuning.reward_function` when a run starts."""


class TrainerConfig(ComponentConfig):
    """Runs the epochs."""

    reward: RewardFunctionConfig | None = Field(default=None, exclude=True)
    """Filled from `finetuning.reward_function` when a run starts."""

    def job_keys(self) -> dict[str, Any]:
        """Keys of TrainConfig that the trainer sets for every job."""
        return {}


class LoggerBaseConfig(ComponentConfig):
    """Sends a run to a service or to files."""

    modules: ClassVar[tuple[str, ...]] = ()
    """Modules that the logger imports and that hone itself does not depend on."""
    extra: ClassVar[str] = ""
    """The extra of hone that installs them."""
    reads_calls: ClassVar[bool] = False
    """Whether it sends the model calls of rollouts, which are only recorded for such loggers."""

    timeout_s: float = Field(default=60.0, gt=0)
    """How long a failed request is retried before the logger stops, and how long the end of a run
    waits for a logger that is behind."""
    python: Path | None = None
    """Interpreter that runs the logger, if its packages are installed in another environment; hone
    must be installed there too."""

    def problem(self) -> str | None:
        """Why the logger cannot start, and what to do; None if it can."""
        python = None if self.python is None else str(self.python)
        missing = first_missing(self.modules, python)
        if missing is not None:
            where = "" if python is None else f" in the environment of {python}"
            return f"{missing} is not installed{where}: pip install 'hone-rl[{self.extra}]'"
        return self.refusal()

    def refusal(self) -> str | None:
        """What is wrong with the settings, such as a missing key; None if they are valid."""
        return None


_FIND = """
import importlib.util, sys
for name in sys.argv[1:]:
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        spec = None
    if spec is None:
        sys.exit(name)
"""


def first_missing(modules: Sequence[str], python: str | None = None) -> str | None:
    """The first module that is not installed here, or for another interpreter; None if all are."""
    if python is None:
        return next((name for name in modules if not _is_installed(name)), None)
    command = [python, "-P", "-c", _FIND, "hone", *modules]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    except OSError as error:
        return f"a Python that runs ({error})"
    return done.stderr.strip().rpartition("\n")[2] if done.returncode else None


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


class EvalDatasetStructure(Strict):
    """The columns of a dataset. The short spellings (`question`, `id`) work too."""

    disable: bool = False
    """Give the workflow the whole row, as JSON."""
    id_key: str | None = None
    """The column with the id; the same as `id_key` beside `structure`."""
    question_key: str = "question"
    """The column with the workflow's input."""
    answer_key: str = "answer"
    """The column with the expected output."""
    generated_answer_key: str = "generated_answer"
    """The column for the workflow's output; `--skip_workflow` reads it."""
    trajectory_key: str = "intermediate_steps"
    """The column for the model calls and steps."""
    expected_trajectory_key: str = "expected_intermediate_steps"
    """The column with the expected steps."""
    pass_full_entry: bool = True
    """Evaluators always get the whole row, as `full_dataset_entry`; only `true` is accepted."""

    @model_validator(mode="before")
    @classmethod
    def _short_spellings(cls, block: Any) -> Any:
        if not isinstance(block, Mapping):
            return block
        block = dict(block)
        for short in ("id", "question", "answer", "generated_answer", "trajectory"):
            if short in block:
                if f"{short}_key" in block:
                    raise ValueError(f"has both {short!r} and '{short}_key'; keep one of them")
                block[f"{short}_key"] = block.pop(short)
        return block

    @model_validator(mode="after")
    def _the_row_is_always_passed(self) -> Self:
        if not self.pass_full_entry:
            raise ValueError("pass_full_entry is false, but hone always passes the row; remove it")
        return self


class EvalFilterEntry(Strict):
    """Selects rows by the values in their columns."""

    field: dict[str, list[Any]] = Field(default_factory=dict)
    """Column -> values to match; `*` and `?` are wildcards."""


class EvalFilterConfig(Strict):
    """The rows of a dataset to use."""

    allowlist: EvalFilterEntry | None = None
    """Use only rows that match in every column listed."""
    denylist: EvalFilterEntry | None = None
    """Skip rows that match in any column listed."""


class DatasetBaseConfig(ComponentConfig):
    """A dataset: the inputs of the workflow."""

    not_yet: ClassVar[Mapping[str, str]] = {
        "s3": "copy the file here and name it in `file_path`",
        "remote_file_path": "copy the file here and name it in `file_path`",
    }

    file_path: Path | None = None
    """The file; relative to the current directory, or else to the directory of the YAML."""
    id_key: str = "id"
    """The column with the id. The id of a row without one is its number."""
    structure: EvalDatasetStructure = Field(default_factory=EvalDatasetStructure)
    filter: EvalFilterConfig = Field(default_factory=EvalFilterConfig)

    @model_validator(mode="after")
    def _one_id(self) -> Self:
        inner = self.structure.id_key
        if inner is not None:
            if "id_key" in self.model_fields_set and self.id_key != inner:
                raise ValueError(
                    f"id_key is {self.id_key!r} but structure's id is {inner!r}; keep one of them"
                )
            self.id_key = inner
        return self


class ComponentRef(str):
    """The key of another component. `hone validate` checks that it exists."""

    section: ClassVar[tuple[str, ...]] = ()
    """The section of the YAML that must have the key."""

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: type[Any], handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_after_validator_function(
            cls, core_schema.str_schema(), serialization=core_schema.to_string_ser_schema()
        )


class LLMRef(ComponentRef):
    """A key of `llms`."""

    section = ("llms",)


class FunctionRef(ComponentRef):
    """A key of `functions`."""

    section = ("functions",)


class EvaluatorRef(ComponentRef):
    """A key of `eval.evaluators`."""

    section = ("eval", "evaluators")
