"""What crosses the wire: calls, models, jobs, checkpoints, and how a job is to be trained.

In:   what the engine sampled; what the user asked for
Out:  checked, frozen values

A Call carries the ids the engine was fed and returned. They are never encoded again from text:
15 of 64 completions of a small model come back as other ids, and their logprobs would then
describe tokens nobody sampled.
"""

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    StringConstraints,
    model_validator,
)

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
"""Of a model, a project, a run. Each becomes a directory, so none can climb out of one."""
_ROOT_FILES = re.compile(r"api_key|cache|evals|logs|runs|(server|state)\..*", re.IGNORECASE)
"""What a server keeps under its root beside the directories of projects."""


def _not_a_root_file(project: str) -> str:
    if _ROOT_FILES.fullmatch(project):
        raise ValueError(f"{project!r} is a file of the server's own; choose another project name")
    return project


ProjectName = Annotated[Name, AfterValidator(_not_a_root_file)]
"""A project becomes a directory under the server's root."""
RolloutId = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._~:-]{0,199}$")]
"""`RUN:REST` belongs to the open run RUN; without a colon, to none."""
_FIXED_STEP = re.compile(r"@(best|[0-9]{1,9})$")
SERVER_ADDRESS = "server.json"
"""File under a server's root that says where it listens, while it runs."""
JobState = Literal["queued", "running", "done", "failed", "cancelled"]


class Strict(BaseModel):
    """A frozen value that refuses keys it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Call(Strict):
    """One request to a model and its answer, to the token."""

    prompt_ids: list[int] = Field(min_length=1)
    """What the engine was fed."""
    completion_ids: list[int]
    """What it sampled, the end token included."""
    logprobs: list[float] | None = None
    """Temperature-scaled, unmasked log-probability of each completion token; None if unknown."""
    exact: bool = True
    """False where only the log-probability after top-p, top-k, min-p or a grammar is known."""
    forced: list[int] = []
    """Places in the completion that were put there and not sampled; they get no label."""
    temperature: float = Field(default=1.0, ge=0)
    """0 means greedy: such a call is context, never labelled."""
    step: int = Field(default=0, ge=0)
    """The policy version that answered; 0 is the base model."""
    function: str = ""
    """Path of the function that made the call."""
    trained: bool = True
    """False: the call is context only (another model's, a function that is not a target)."""

    @model_validator(mode="after")
    def _logprobs_cover_the_completion(self) -> Self:
        if self.logprobs is not None and len(self.logprobs) != len(self.completion_ids):
            raise ValueError(
                f"logprobs has {len(self.logprobs)} values for {len(self.completion_ids)} "
                "completion_ids; send one for each, or none at all"
            )
        outside = [i for i in self.forced if not 0 <= i < len(self.completion_ids)]
        if outside:
            raise ValueError(
                f"forced names places {outside} of a completion of {len(self.completion_ids)}"
            )
        return self


class TrainConfig(Strict):
    """How one job is trained. Every key is used; the step's metrics say what was used."""

    learning_rate: float = Field(default=5e-6, ge=0)
    """AdamW's step size (0 measures without moving the weights)."""
    loss: Literal["grpo", "dapo", "dr_grpo", "cispo"] = "grpo"
    """How labels are weighted and clipped; see learner/loss.py."""
    epsilon: float = Field(default=0.2, gt=0)
    """The ratio is bounded below at 1 - epsilon (and above, unless epsilon_high is set)."""
    epsilon_high: float | None = None
    """The ratio's upper bound is 1 + epsilon_high; cispo caps the ratio itself there (default 5)."""
    unit: Literal["rollout", "call"] = "rollout"
    """What counts as one sequence where a loss averages per sequence."""
    dr_grpo_tokens: int = Field(default=1024, gt=0)
    """dr_grpo divides by sequences x this constant instead of by lengths."""
    scale_rewards: bool | None = None
    """Divide advantages by the group's standard deviation. Null: yes, except for dr_grpo, which by its
    definition does not; true and false are used as given, whatever the loss."""
    credit: Literal["outcome", "per_call", "return_to_go"] = "outcome"
    """Which reward a call is compared by: the trajectory's, its own, or the sum from it on."""
    baseline: Literal["group", "batch"] = "group"
    """What rewards are compared with: their group's mean, or the mean of the whole job."""
    beta: float = Field(default=0.0, ge=0)
    """Weight of the k3 divergence from the base model, in the loss."""
    kl_penalty_coef: float = Field(default=0.0, ge=0)
    """Weight of the divergence from the base model, as a penalty in the advantage."""
    importance_cap: float | None = Field(default=2.0, gt=0)
    """Upper bound of pi_old / pi_sampler; None switches the correction off."""
    max_staleness: int | None = Field(default=0, ge=0)
    """How many steps behind the one it starts from a job's answers may be; None: any."""
    groups_per_optimizer_step: int = Field(default=8, gt=0)
    """Most groups of one optimizer step. Groups are dealt evenly: 17 are 6, 6 and 5, not 8, 8 and 1."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this global norm."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's decay of the adapter's weights."""
    max_seq_length: int = Field(default=8192, gt=1)
    """Rollouts with a longer call are dropped whole and counted, never cut."""
    row_tokens: int | None = Field(default=None, gt=0)
    """Most tokens computed together; the longest path always fits. Null: as many as fit into the
    learner's share of the machine's total memory, recorded with the job when it starts."""

    @property
    def divides_by_spread(self) -> bool:
        """Whether advantages are divided by the group's standard deviation."""
        return self.loss != "dr_grpo" if self.scale_rewards is None else self.scale_rewards

    @property
    def clip_high(self) -> float:
        """How far above 1 the ratio may count."""
        if self.epsilon_high is not None:
            return self.epsilon_high
        return 4.0 if self.loss == "cispo" else self.epsilon


@dataclass(frozen=True, slots=True)
class ModelKey:
    """Which model: its project and its name."""

    project: str
    name: str

    def __str__(self) -> str:
        return f"{self.project}/{self.name}"


@dataclass(frozen=True, slots=True)
class FieldError:
    """One wrong field of a request: its path, and what is wrong with it."""

    path: tuple[str | int, ...]
    message: str


class Failure(Strict):
    """Why something ended badly, for those who were not there."""

    type: str
    message: str
    traceback: str = ""


class ModelSpec(Strict):
    """A model to be trained: a name of its own over a base model."""

    name: Name
    project: ProjectName = "default"
    base_model: str = Field(min_length=1, max_length=512)
    """A name of `hone models list`, a hub name or a directory on the server."""
    rank: int = Field(default=8, gt=0, le=512)
    """Of the LoRA adapter."""
    alpha: float = Field(default=16.0, gt=0)
    seed: int = Field(default=0, ge=0)
    """Of the adapter's first weights."""
    token_ids_as_text: bool = False
    """Log-probabilities name tokens `token_id:N`, as ART's clients expect."""
    chat_template_kwargs: dict[str, JsonValue] = {}
    """Arguments of the chat template for every call of this model."""
    defaults: dict[str, JsonValue] = {}
    """Keys of TrainConfig that jobs of this model use unless they say otherwise."""
    init_args: dict[str, JsonValue] = {}
    """How Unsloth would load the base model; max_seq_length becomes every job's default."""
    engine_args: dict[str, JsonValue] = {}
    """What vLLM would be started with. Each key is honoured, refused, or named in not_applicable."""
    peft_args: dict[str, JsonValue] = {}
    """PEFT's words for the adapter: r is rank, lora_alpha alpha, random_state seed."""
    not_applicable: list[str] = []
    """Keys that were sent and mean nothing here; reported back by name."""

    @property
    def key(self) -> ModelKey:
        return ModelKey(self.project, self.name)


class ModelInfo(Strict):
    """A registered model as the server sees it."""

    project: str
    name: str
    base_model: str
    step: int
    """The newest published step; 0 is the base model."""
    best_step: int | None
    """The step with the best logged `val/reward`, if one was logged."""
    rank: int
    alpha: float
    seed: int
    inference_base_url: str
    """Where OpenAI clients reach it."""
    inference_name: str
    """The model name to ask for there."""
    not_applicable: list[str]
    created_at: float


class JobInfo(Strict):
    """A training job: where it stands, and what came of it."""

    id: str
    model: str
    """PROJECT/NAME."""
    base_model: str
    state: JobState
    created_at: float
    started_at: float | None = None
    ended_at: float | None = None
    attempts: int = 0
    waiting_for: str | None = None
    """Why a job that had started is queued again: a full disk, a learner or an engine that died."""
    retries: int = 0
    """How often the learner or the engine died under it."""
    server_deaths: int = 0
    """At how many consecutive deaths of the server it was running."""
    base_step: int | None = None
    """The step it goes on from, pinned when it starts."""
    base_sha256: str | None = None
    dtype: str | None = None
    """Number type that engine and learner compute in, pinned when it starts."""
    step: int | None = None
    """The step it published."""
    config: "TrainConfig"
    """What is really used."""
    seed: int = 0
    plot_tensors: bool = False
    advance_when_flat: bool = False
    cancel_requested: bool = False
    counts: dict[str, int] = {}
    """How the trajectories were resolved, and what was dropped, by reason."""
    metrics: dict[str, float] = {}
    reason: str | None = None
    """Why there was no gradient step, if there was none."""
    failure: Failure | None = None


class JobEvent(Strict):
    """Something that happened to a job; ids ascend within a job."""

    id: int
    job: str
    type: str
    at: float
    data: dict[str, Any]


class CheckpointInfo(Strict):
    """What one step left on disk."""

    step: int
    sha256: str
    job: str | None
    created_at: float
    metrics: dict[str, float]


class RunSpec(Strict):
    """An open run: its rollouts' calls are kept until it is closed."""

    id: Name
    model: str | None = None
    """NAME or PROJECT/NAME: what the base model's name means inside this run."""
    seed: int = Field(default=0, ge=0)


class RecordedCall(Strict):
    """A call as the server recorded it, with the messages it stood for."""

    id: str
    rollout: str
    """Empty for a call outside any rollout."""
    index: int
    """Its place among the rollout's requests."""
    choice: int = 0
    model: str
    """PROJECT/NAME, or the base model's name."""
    asked: str = ""
    """The name the request asked for; empty for calls of servers that did not record it."""
    base_model: str
    adapter_sha256: str | None
    fingerprint: str
    """WEIGHTS-TOKENIZER-TEMPLATE-ARGUMENTS-DATE, the beginnings of a hash of each."""
    created_at: float
    messages: list[dict[str, Any]] | None
    """None for /v1/completions."""
    tools: list[dict[str, Any]] | None = None
    reply: dict[str, Any]
    finish: str
    outcome: str = "first"
    """first, bridged, re-rendered or branched."""
    reasons: list[str] = []
    abandoned: bool = False
    """The client left before the last byte; never labelled."""
    call: Call

    @property
    def is_frozen(self) -> bool:
        """It asked for one fixed step, as NAME@0 or NAME@best: in a rollout it is never labelled."""
        return _FIXED_STEP.search(self.asked) is not None
