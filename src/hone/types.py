"""Values that client and server exchange: calls, models, jobs, checkpoints, TrainConfig.

In:   sampled calls; the user's settings
Out:  validated, frozen values

A Call carries the token ids that the engine received and returned. They are never encoded again
from text: for a small model, 15 of 64 completions gave different ids, and their logprobs would then
belong to tokens that were never sampled.
"""

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    StringConstraints,
    model_validator,
)

from hone.train_config import TrainConfig

_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"
Name = Annotated[str, StringConstraints(pattern=_NAME)]
"""Name of a model, a project or a run. It is used as a directory name, so it contains no path."""
EMPTY_PATH = "is empty; name a path (. is the current directory)"


def _not_empty(path: object) -> object:
    if path == "":
        raise ValueError(EMPTY_PATH)
    return path


Directory = Annotated[Path, BeforeValidator(_not_empty)]
"""A directory to write to. Python reads the empty path, which an unset variable of a shell leaves, as
the current directory."""


def _readable(name: str) -> str:
    if ".." in name.split("/") or not name.isprintable() or "@" in name or name != name.strip():
        raise ValueError(f"{name!r}: use printable characters, no '..', no '@' and no outer spaces")
    return name


AnyName = Annotated[str, StringConstraints(min_length=1, max_length=200), AfterValidator(_readable)]
"""A name as ART's users write them, with spaces and slashes; `stored_name` turns it into a Name."""


def stored_name(name: str) -> str:
    """The Name under which a model or project is stored: its own, if that is one.

    'my agent/v2' becomes 'my-agent-v2-' and eight digits of its hash, so that names do not collide.
    """
    if re.fullmatch(_NAME, name):
        return name
    words = re.sub(r"[^A-Za-z0-9._]+", "-", name).strip("-._")[:100]
    return f"{words or 'model'}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def model_directory(base_path: str | Path, project: str, name: str) -> Path:
    """Where the files of a model are, on a server or here. Nothing else is under `projects`."""
    return Path(base_path) / "projects" / stored_name(project) / "models" / stored_name(name)


RolloutId = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._~:-]{0,199}$")]
"""`RUN:REST` belongs to the open run RUN; without a colon, to none."""


def _address(url: str) -> str:
    """The URL without /v1 and without a trailing slash."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
        raise ValueError(f"{url!r} must look like http://HOST:PORT")
    return url.rstrip("/").removesuffix("/v1")


AdvertisedUrl = Annotated[str, AfterValidator(_address)]
"""Address of a server as agents reach it."""
ModelAlias = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]{0,199}$")]
"""An alias of a model, without a step."""
_FIXED_STEP = re.compile(r"@(best|[0-9]{1,9})$")


def names_fixed_step(model: str) -> bool:
    """Whether a model name requests one step, as NAME@0 or NAME@best; such a model is frozen."""
    return _FIXED_STEP.search(model) is not None


SERVER_ADDRESS = "server.json"
"""File under a server's root with its address, while it runs."""
SERVER_OUTPUT = "logs/server.out"
"""File under a server's root with what it prints, if a client started it."""
Message = dict[str, Any]
"""A message of the OpenAI API."""
Messages = list[Message]
MessageOrChoice = Any
"""A message as a dict; a choice as the OpenAI client returns it, or as a dict of the same keys."""
MessagesAndChoices = list[MessageOrChoice]
Tools = list[dict[str, Any]]
"""Tools of the OpenAI API."""
EngineName = Literal["auto", "embedded", "vllm"]
"""Inference engine of a server."""
DEFAULT_PORT = 7623
"""Port on which a server listens, if none is set."""
DEFAULT_URL = f"http://127.0.0.1:{DEFAULT_PORT}"
DEFAULT_RANK, DEFAULT_ALPHA = 8, 16.0
"""Rank and alpha of an adapter; ART's values."""
Rank = Annotated[int, Field(gt=0, le=512)]
"""LoRA rank."""
Alpha = Annotated[float, Field(gt=0)]
"""LoRA alpha, as in PEFT."""
JobState = Literal["queued", "running", "done", "failed", "cancelled"]


TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class Strict(BaseModel):
    """A frozen value that refuses unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Call(Strict):
    """One request to a model and its answer, as tokens."""

    prompt_ids: list[TokenId] = Field(min_length=1)
    """The prompt's token ids."""
    completion_ids: list[TokenId]
    """The sampled token ids, including the end token."""
    logprobs: list[float] | None = None
    """Temperature-scaled, unmasked log-probability of each completion token; None if unknown."""
    exact: bool = True
    """False if only the log-probability after top-p, top-k, min-p, a penalty or a grammar is known."""
    masked_logprobs: list[float | None] | None = None
    """Log-probability of each completion token after top-p, top-k, min-p, penalties, logit_bias and
    the grammar; null for tokens where they changed nothing, None if they changed none."""
    forced: list[int] = []
    """Positions in the completion that were not chosen: inserted, or the only token that the grammar
    allowed. They get no label."""
    temperature: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Sampling temperature; a greedy call (0) is context and never labelled."""
    step: int = Field(default=0, ge=0, lt=2**31)
    """The policy version that answered; 0 is the base model."""
    function: str = ""
    """Path of the function that made the call."""
    trained: bool = True
    """False if the call is only context (of another model, or of a function that is not a
    target)."""

    @model_validator(mode="after")
    def _logprobs_cover_the_completion(self) -> Self:
        if self.logprobs is not None and len(self.logprobs) != len(self.completion_ids):
            raise ValueError(
                f"logprobs has {len(self.logprobs)} values for {len(self.completion_ids)} "
                "completion_ids; send one for each, or none at all"
            )
        if self.masked_logprobs and len(self.masked_logprobs) != len(self.completion_ids):
            raise ValueError(
                f"masked_logprobs has {len(self.masked_logprobs)} values for "
                f"{len(self.completion_ids)} completion_ids; send one for each, or none at all"
            )
        outside = [i for i in self.forced if not 0 <= i < len(self.completion_ids)]
        if outside:
            raise ValueError(
                f"forced names places {outside} of a completion of {len(self.completion_ids)}"
            )
        return self


@dataclass(frozen=True, slots=True)
class ModelKey:
    """A model's project and name."""

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
    """An exception as data."""

    type: str
    message: str
    traceback: str = ""
    place: str = ""
    """`FILE:LINE` where it was raised, in the user's code if that is part of the stack; for a program
    without a traceback, the last line that it printed."""


class ModelSpec(Strict):
    """A model to be trained: a LoRA adapter with its own name over a base model."""

    model_config = ConfigDict(allow_inf_nan=False)

    name: Name
    project: Name = "default"
    base_model: str = Field(min_length=1, max_length=512)
    """A name from `hone models list`, a hub name or a directory on the server."""
    rank: Rank = DEFAULT_RANK
    """LoRA rank."""
    alpha: Alpha = DEFAULT_ALPHA
    """LoRA alpha, as in PEFT."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of the adapter's initial weights."""
    target_modules: list[str] = []
    """Names of the linear layers that the adapter covers; empty: all. Others need vLLM as engine."""
    token_ids_as_text: bool = False
    """Log-probabilities name tokens `token_id:N`, as ART's clients expect."""
    chat_template_kwargs: dict[str, JsonValue] = {}
    """Arguments of the chat template for every call of this model."""
    defaults: dict[str, JsonValue] = {}
    """Default keys of TrainConfig for jobs of this model."""
    init_args: dict[str, JsonValue] = {}
    """Arguments for loading the base model, as for Unsloth; max_seq_length bounds requests and jobs."""
    engine_args: dict[str, JsonValue] = {}
    """Engine arguments, as for vLLM. Each key is honoured, refused, or listed in not_applicable."""
    peft_args: dict[str, JsonValue] = {}
    """Adapter arguments, as for PEFT: r is rank, lora_alpha alpha, random_state seed."""
    trainer_args: dict[str, JsonValue] = {}
    """Training arguments, as for TRL: learning_rate, beta and others are defaults of the jobs."""
    not_applicable: list[str] = []
    """Keys of the request that have no effect here."""

    @property
    def key(self) -> ModelKey:
        return ModelKey(self.project, self.name)


class ModelInfo(Strict):
    """A registered model."""

    project: str
    name: str
    base_model: str
    step: int
    """The newest published step; 0 is the base model."""
    best_step: int | None
    """The step with the best `val/reward` of the newest run, if one was logged."""
    rank: int
    alpha: float
    seed: int
    inference_base_url: str
    """Base URL for OpenAI clients."""
    inference_name: str
    """The model name to send there."""
    advertised_url: str | None = None
    """Address for agents on other machines, if one is configured."""
    concurrency: int = 8
    """Number of requests at a time that keep its engine busy; more wait."""
    not_applicable: list[str]
    created_at: float


class JobInfo(Strict):
    """A training job: its state and its result."""

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
    """Why a job waits in the queue: a full disk, a crash of the learner or of the engine, another
    learner on its GPU."""
    retries: int = 0
    """Number of crashes of the learner or the engine during the job."""
    server_deaths: int = 0
    """Number of consecutive crashes of the server during the job."""
    base_step: int | None = None
    """The step it starts from, pinned when it starts."""
    base_sha256: str | None = None
    dtype: str | None = None
    """dtype of engine and learner, pinned when it starts."""
    step: int | None = None
    """The step it published."""
    config: TrainConfig
    """The settings that are used."""
    plot_tensors: bool = False
    advance_when_flat: bool = False
    cancel_requested: bool = False
    counts: dict[str, int] = {}
    """Trajectories by how they were resolved, and dropped ones by reason."""
    metrics: dict[str, float] = {}
    reason: str | None = None
    """Why there was no gradient step."""
    failure: Failure | None = None

    @property
    def key(self) -> ModelKey:
        return ModelKey(*self.model.split("/"))


class JobEvent(Strict):
    """An event of a job; ids increase within a job."""

    id: int
    job: str
    type: str
    at: float
    data: dict[str, Any]


class CheckpointInfo(Strict):
    """The checkpoint of one step."""

    step: int
    sha256: str
    job: str | None
    created_at: float
    metrics: dict[str, float]
    bytes: int = 0
    """Size of its files."""
    optimizer: bool = True
    """Whether it has the state of its optimizer. Old steps lose it (keep_optimizer_steps)."""
    in_use: bool = False
    """Whether an open run started from it: the run's last validation compares it with the best step."""


class RunSpec(Strict):
    """An open run: the calls of its rollouts are kept until it is closed."""

    id: Name
    model: str | None = None
    """NAME or PROJECT/NAME: the model that answers to the base model's name inside this run. The server
    stores it as PROJECT/NAME."""
    seed: int = Field(default=0, ge=0)
    aliases: tuple[ModelAlias, ...] = Field(default=(), max_length=100)
    """Names that mean `model` inside this run, for agents with a model name in their code."""

    @model_validator(mode="after")
    def _aliases_mean_a_model(self) -> Self:
        if self.aliases and self.model is None:
            raise ValueError(f"aliases {', '.join(self.aliases)} mean `model`, which is not set")
        return self


class _Recorded(Strict):
    """What the two forms of a recorded call share."""

    id: str
    index: int
    """Its index among the rollout's requests."""
    choice: int = 0
    model: str
    """PROJECT/NAME, or the base model's name."""
    requested_model: str
    """The model name of the request."""
    base_model: str
    finish: str
    abandoned: bool = False
    """The client disconnected before the last byte; never labelled."""

    @property
    def is_frozen(self) -> bool:
        """Whether it named a fixed step, as NAME@0 or NAME@best; such a call is never labelled."""
        return names_fixed_step(self.requested_model)


class RecordedCall(_Recorded):
    """A call as the server recorded it, with its messages and tokens."""

    rollout: str
    """Empty for a call outside any rollout."""
    adapter_sha256: str | None
    fingerprint: str
    """WEIGHTS-TOKENIZER-TEMPLATE-ARGUMENTS-DATE: the first digits of the hash of each."""
    created_at: float
    messages: list[dict[str, Any]] | None
    """None for /v1/completions."""
    tools: list[dict[str, Any]] | None = None
    request_fields: dict[str, Any] | None = None
    """Fields of a /v1/responses request, while that response is stored; None in other dialects."""
    reply: dict[str, Any]
    outcome: str = "first"
    """first, bridged, re-rendered or branched."""
    reasons: list[str] = []
    continues: str | None = None
    """Id of the call whose prompt and completion ids a bridged prompt begins with."""
    malformed: list[str] = []
    """Tool calls and reasoning in the answer that do not parse, one sentence each."""
    held_s: float = 0.0
    """How long the server held the request before its engine got it: while serving was paused for
    training, or engine or adapter were loaded. Choices of one request have the same value."""
    call: Call


class CallSummary(_Recorded):
    """A recorded call without its text and tokens: what decides whether it is trained."""

    function: str = ""
    """Path of the function that made the call."""
    temperature: float
    step: int
    """The policy version that answered."""
    num_tokens: int
    """Number of sampled tokens."""
    logprob: float | None
    """Sum of their log-probabilities; None if those are unknown."""
    tokens_sha256: str
    """Hash of the sampled token ids: equal answers have the same."""

    @classmethod
    def of(cls, one: RecordedCall) -> Self:
        """The summary of a recorded call."""
        fields = one.model_dump(include=set(_Recorded.model_fields))
        fields |= one.call.model_dump(include={"function", "temperature", "step"})
        return cls.with_tokens(fields, one.call.completion_ids, one.call.logprobs)

    @classmethod
    def with_tokens(
        cls, fields: dict[str, Any], sampled: list[int], logprobs: list[float] | None
    ) -> Self:
        """The summary with these fields, and counts of the sampled ids and their log-probabilities."""
        return cls(
            **fields,
            num_tokens=len(sampled),
            logprob=None if logprobs is None else sum(logprobs),
            tokens_sha256=hashlib.sha256(repr(sampled).encode()).hexdigest(),
        )
