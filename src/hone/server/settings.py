"""Settings of a server, and the options of `hone serve`, one for every field.

In:   the values of the options, or LocalBackend's; a command function that takes `**options`
Out:  Settings, checked; the function with one option for each field

Every limit a client can meet has its default here. The help of an option is the docstring of its
field, so a new setting is reachable and documented as soon as it exists.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from ipaddress import IPv4Network, IPv6Network
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import Field, ValidationError, field_validator
from pydantic.fields import FieldInfo

from hone.types import DEFAULT_PORT, AdvertisedUrl, Directory, EngineName, Strict
from hone.wire.access import KEY_FORM, is_key

Command = TypeVar("Command", bound=Callable[..., Any])


class Settings(Strict):
    """Every setting of a server, described by the string under it."""

    root: Directory = Path(".hone")
    """Directory for state, checkpoints and logs. Only downloaded and converted models and temporary
    files are outside it."""
    host: str = "127.0.0.1"
    """Address to listen on. Any address other than a loopback address requires a key."""
    port: int = Field(default=DEFAULT_PORT, ge=0, le=65535)
    """Port of the training API and the inference APIs; 0 picks a free port."""
    inference_port: int | None = Field(default=8000, ge=0, le=65535)
    """Port of the inference APIs only; 0 picks a free port, -1 opens none."""
    advertise_url: AdvertisedUrl | None = None
    """Address at which agents on other machines or in containers reach the inference APIs, such as
    `http://gpu1:8000`. Runs pass it to the agents that they start."""
    engine: EngineName = "auto"
    """Inference engine: embedded runs in this process, vllm starts vLLM in a separate process. auto
    uses vllm if it is installed and the machine has a CUDA GPU, otherwise embedded."""
    engine_python: Path | None = None
    """Python interpreter of the environment in which vLLM is installed. By default the one that runs
    this server."""
    engine_url: str | None = None
    """Address of a running vLLM server to use instead of starting one. It must see this server's root
    under the same path. A publish is then proved by log-probabilities alone."""
    api_key: str | None = None
    """Key that clients must send as a bearer token. Without one, a server on a loopback address
    accepts only processes of the user that runs it and of root, and any other server generates a key
    and keeps it under the root."""
    trust_network: tuple[IPv4Network | IPv6Network, ...] = ()
    """Network whose clients may use the training API without a key (ART's clients send none). The key
    that they receive there is valid for the inference APIs only, and they cannot register a path. On
    a server without a key, `127.0.0.1/32` lets in all users of the machine."""
    allowed_hosts: tuple[str, ...] = ()
    """Host name under which clients may reach this server, besides localhost, the machine's host name
    and, with a key, its addresses. `.example.com` allows every name with that suffix, `*` any
    name."""
    allowed_origins: tuple[str, ...] = ()
    """Origin of web pages that may call this server (`https://chat.example.com`). Pages from other
    sites are refused, even with a key."""
    forwarded_allow_ips: tuple[IPv4Network | IPv6Network, ...] = ()
    """Reverse proxy whose X-Forwarded-For and X-Forwarded-Proto headers are trusted. None by default. A
    proxy that names its client in another header, or in none, needs a key, also in a trusted network.
    A server without a key refuses every forwarded request."""
    allow_base_models: tuple[str, ...] | None = None
    """Base model that clients of the inference port, or with the inference key, may request besides
    registered models and their base models: a name or a path. `*` allows every name on this machine,
    but no path. Default: every name if the server has no key, none if it has one."""
    serving_during_training: Literal["continue", "pause"] | None = None
    """Whether requests wait while a job trains. By default they wait if engine and learner share one
    GPU."""
    hold_s: float = Field(default=1200.0, gt=0)
    """Seconds that a request waits while serving is paused or its engine loads; then it gets
    503."""
    pause_s: float = Field(default=600.0, gt=0)
    """Seconds that a job waits for running requests to end, if serving pauses for it, and for the
    proof of its step. After that, serving continues and the job tries again later."""
    max_body_bytes: int = Field(default=64 * 2**20, gt=0)
    """Maximum size of a request body; a larger one gets 413 before it is read."""
    max_small_body_bytes: int = Field(default=2**20, gt=0)
    """Maximum size of a request body without a conversation, trajectory or prompt, such as one that
    registers a model; a larger one gets 413."""
    large_body_bytes: int = Field(default=64 * 2**10, gt=0)
    """Size above which a body is parsed, validated and tokenized in a separate process."""
    body_processes: int = Field(default=2, gt=0)
    """Number of processes for large bodies; each starts when it is first needed."""
    max_bodies_bytes: int = Field(default=512 * 2**20, gt=0)
    """Maximum total size of large bodies in memory; requests above it get 429."""
    body_timeout_s: float = Field(default=30.0, gt=0)
    """Seconds for a body to arrive, plus one for every 64 KiB; a slower one gets 408."""
    header_timeout_s: float = Field(default=30.0, gt=0)
    """Seconds for the headers of a request to arrive; then the connection is closed."""
    write_timeout_s: float = Field(default=60.0, gt=0)
    """Seconds for which a client may read nothing of its response; then the connection is closed. A call
    that was being answered counts as abandoned."""
    max_connections: int | None = Field(default=None, gt=0)
    """Maximum number of open connections per port; more are refused. By default as many as the limit of
    open files allows."""
    max_concurrent: int = Field(default=1024, gt=0)
    """Maximum number of inference requests at the same time; more get 429."""
    max_n: int = Field(default=128, gt=0)
    """Maximum `n` of a request."""
    max_tokens: int | None = Field(default=None, gt=0)
    """Maximum tokens of an answer if the request sets no limit. By default, what fits the
    context."""
    max_queued_jobs: int = Field(default=64, gt=0)
    """Maximum number of queued training jobs; more get 429."""
    max_adapters: int = Field(default=8, gt=0)
    """Maximum number of adapters that one engine keeps loaded."""
    max_seq_length: int = Field(default=8192, gt=1)
    """Maximum tokens of a prompt and its answer together."""
    keep_calls_s: float = Field(default=7 * 86400.0, gt=0)
    """Seconds for which recorded calls and the groups of ended jobs are kept. Calls of an open run or of
    a job that has not ended are kept longer."""
    keep_calls_bytes: int = Field(default=4 * 2**30, gt=0)
    """Total size of recorded calls and groups of ended jobs above which the oldest are deleted."""
    keep_events_s: float = Field(default=30 * 86400.0, gt=0)
    """Seconds for which the events of an ended job are kept, except its last one, and closed runs whose
    calls are deleted."""
    keep_progress: int = Field(default=1000, gt=0)
    """Number of progress events kept in memory; they are never written to disk."""
    keep_trajectories_bytes: int = Field(default=4 * 2**30, gt=0)
    """Total size of the trajectories that ART's clients log, above which the oldest files are
    deleted."""
    keep_optimizer_steps: int = Field(default=8, gt=0)
    """Number of newest steps of a model that keep the state of their optimizer; step 0 and the best step
    keep it, too. Older steps are served and exported as before, but training that starts from one
    begins with a fresh optimizer."""
    keep_steps: int | None = Field(default=None, gt=0)
    """Number of newest steps of a model to keep; step 0, the best step, those that jobs need and those
    that open runs started from are kept, too. By default all."""
    idle_run_s: float = Field(default=2 * 86400.0, gt=0)
    """Seconds after which a run without new calls is closed, so that its calls can be deleted; a run
    whose model has a job that has not ended stays open. A client that comes back reopens it."""
    idle_engine_s: float = Field(default=6 * 3600.0, gt=0)
    """Seconds after which an engine without requests is closed; the next request loads it again."""
    idle_learner_s: float = Field(default=3600.0, gt=0)
    """Seconds after which a learner without jobs is closed; the next job starts another."""
    learner_threads: int | None = Field(default=None, gt=0)
    """Threads per learner; by default one for each core that the server may use. A learner is a separate
    process with its own weights. It starts when a model is prepared for training (the SDK's
    `register`, `hone finetune`), never for serving only. On a GPU, or if its weights need an eighth
    or more of the free memory, it starts with the first job."""
    device: str | None = None
    """Device for engine and learner: `cpu`, `cuda` or `cuda:N`. By default CUDA if available."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Minimum level to log."""
    log_format: Literal["text", "json"] = "text"
    """Format of log lines."""

    log_bytes: int = Field(default=64 * 2**20, ge=4096)
    """Size at which server.log is rotated to server.log.1."""
    log_files: int = Field(default=4, ge=1)
    """Rotated log files to keep."""

    @field_validator("inference_port", mode="before")
    @classmethod
    def _minus_one_opens_none(cls, value: object) -> object:
        return None if value == -1 else value

    @field_validator("api_key")
    @classmethod
    def _no_key_is_empty(cls, value: str | None) -> str | None:
        if value is not None and not is_key(value):
            raise ValueError(f"{KEY_FORM}; leave it out for a server that makes its own")
        return value

    @field_validator("device")
    @classmethod
    def _known_device(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"cpu|cuda(:[0-9]+)?", value):
            raise ValueError("expected cpu, cuda or cuda:N, where N is the number of a GPU")
        return value

    @property
    def log_file(self) -> Path:
        return self.root / "logs" / "server.log"

    @property
    def loopback(self) -> bool:
        return self.host in {"127.0.0.1", "localhost", "::1"}


# ---- options of `hone serve` ------------------------------------------------------------

_ENVIRONMENT = {"api_key": "HONE_API_KEY"}
_METAVARS = {
    "root": "DIR",
    "engine_python": "FILE",
    "trust_network": "CIDR",
    "forwarded_allow_ips": "CIDR",
    "allowed_hosts": "HOST",
    "allowed_origins": "ORIGIN",
    "allow_base_models": "MODEL",
}


def flag(field: str) -> str:
    """The option that sets a field."""
    return "--" + field.replace("_", "-")


def settings_options(**defaults: Any) -> Callable[[Command], Command]:
    """Give a command every option of Settings; `defaults` replace those of the fields."""

    def add_options(command: Command) -> Command:
        signature = inspect.signature(command)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        options = [
            _parameter(name, field, defaults.get(name, field.default))
            for name, field in Settings.model_fields.items()
        ]
        setattr(command, "__signature__", signature.replace(parameters=[*own, *options]))  # noqa: B010
        command.__annotations__ |= {option.name: option.annotation for option in options}
        return command

    return add_options


def read_settings(options: Mapping[str, Any]) -> Settings:
    """Settings from the values of the options; a wrong one is an error of usage that names it."""
    from typer import BadParameter  # imported here: a server in another process does not need it

    # An option that was not given and has no default is None; so is a list that is empty.
    values = {name: value for name, value in options.items() if value is not None}
    try:
        return Settings(**values)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]) if first["loc"] else ""
        message = first["msg"].removeprefix("Value error, ")
        # A refused key may still be valid elsewhere, so it is not shown.
        value = "" if name == "api_key" else f" {first['input']!r}"
        raise BadParameter(f"{flag(name)}{value}: {message}") from None


def _parameter(name: str, field: FieldInfo, default: Any) -> inspect.Parameter:
    import typer  # imported here: a server in another process does not need it

    kind, metavar = _type_of(field.annotation)
    option = typer.Option(
        f"{flag(name)}/--no-{flag(name)[2:]}" if kind is bool else flag(name),
        help=" ".join((field.description or "").split()),
        envvar=_ENVIRONMENT.get(name),
        metavar=_METAVARS.get(name, metavar),
        show_default=default not in (None, ()),
    )
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None if default == () else default,
        annotation=Annotated[kind | None if default in (None, ()) else kind, option],
    )


def _type_of(annotation: Any) -> tuple[Any, str | None]:
    """The type typer reads an option as, and what stands for its value in the help."""
    if get_origin(annotation) in (Union, UnionType):
        inner = [part for part in get_args(annotation) if part is not NoneType]
        return _type_of(inner[0]) if len(inner) == 1 else (str, None)
    if get_origin(annotation) is tuple:
        return list[str], None
    if get_origin(annotation) is Literal:
        return str, "|".join(map(str, get_args(annotation)))
    # A path is read as text: an empty one would become Path("."), which Settings accepts.
    return (annotation if annotation in (bool, int, float) else str), None
