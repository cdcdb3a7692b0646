"""What every component's configuration is made of: the base classes, references, shared blocks.

In:   the keys under one `_type` of the YAML
Out:  a ComponentConfig of that component

Unknown keys are refused here, once for all components: a misspelt key that is ignored trains a
run with a default nobody chose, and nothing ever says so.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, model_validator
from pydantic_core import CoreSchema, core_schema


class Strict(BaseModel):
    """A block of the YAML. Keys it does not have are errors."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    not_yet: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Keys of the originals that hone knows and refuses, each with what to do instead."""


class ComponentConfig(Strict):
    """Base of all component configurations; `class X(FunctionBaseConfig, name="my_type")`."""

    type_name: ClassVar[str] = ""
    """What `_type` says in the YAML."""

    def __init_subclass__(cls, name: str | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if name is not None:
            cls.type_name = name


class FunctionBaseConfig(ComponentConfig):
    """A function, or the workflow: what runs on one input."""

    not_yet: ClassVar[Mapping[str, str]] = {"middleware": "wrap the function in your own code"}


class LLMBaseConfig(ComponentConfig):
    """A model that functions call. Keys it does not have go with every request."""

    model_config = ConfigDict(extra="allow")


class EvaluatorBaseConfig(ComponentConfig):
    """What scores the output of one input."""


@dataclass(frozen=True, slots=True)
class Names:
    """Annotates text that is the key of a component; `hone validate` checks that it exists."""

    section: tuple[str, ...]


class RewardFunctionConfig(Strict):
    """Which evaluator's score is the reward."""

    name: Annotated[str, Names(("eval", "evaluators"))]
    """A key of `eval.evaluators`."""


class TrajectoryBuilderConfig(ComponentConfig):
    """What runs the workflow and groups what it did."""

    reward: RewardFunctionConfig | None = Field(default=None, exclude=True)
    """Filled from `finetuning.reward_function` when a run starts."""


class TrainerAdapterConfig(ComponentConfig):
    """What brings groups to a training backend."""

    reward: RewardFunctionConfig | None = Field(default=None, exclude=True)
    """Filled from `finetuning.reward_function` when a run starts."""


class TrainerConfig(ComponentConfig):
    """What runs the epochs."""

    reward: RewardFunctionConfig | None = Field(default=None, exclude=True)
    """Filled from `finetuning.reward_function` when a run starts."""


class EvalDatasetStructure(Strict):
    """Which columns of a dataset mean what. The short spellings (`question`, `id`) work too."""

    disable: bool = False
    """The input is the whole row, as JSON."""
    id_key: str | None = None
    """The column with the id; the same as `id_key` beside `structure`."""
    question_key: str = "question"
    """The column with the workflow's input."""
    answer_key: str = "answer"
    """The column with the expected output."""
    generated_answer_key: str = "generated_answer"
    """Where the workflow's output is written, and read from with `--skip_workflow`."""
    trajectory_key: str = "intermediate_steps"
    """Where the model calls and steps are written."""
    expected_trajectory_key: str = "expected_intermediate_steps"
    """The column with the steps that were expected."""
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
    """Rows by what is in their columns."""

    field: dict[str, list[Any]] = Field(default_factory=dict)
    """Column to accepted values; `*` and `?` are wildcards."""


class EvalFilterConfig(Strict):
    """Which rows of a dataset to use."""

    allowlist: EvalFilterEntry | None = None
    """Only rows that match in every column named."""
    denylist: EvalFilterEntry | None = None
    """No rows that match in any column named."""


class DatasetBaseConfig(ComponentConfig):
    """Where inputs come from."""

    not_yet: ClassVar[Mapping[str, str]] = {
        "s3": "copy the file here and name it in `file_path`",
        "remote_file_path": "copy the file here and name it in `file_path`",
    }

    file_path: Path | None = None
    """The file; relative to the directory the command runs in, or else to the YAML's own."""
    id_key: str = "id"
    """The column with the id. Rows without one get their number."""
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
    """Where the key must stand in the YAML."""

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
