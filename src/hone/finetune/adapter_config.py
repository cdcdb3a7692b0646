"""Configuration of the built-in trainer adapter: the server, the model, and the training.

In:   a block of `trainer_adapters` with `_type: hone_server`
Out:  HoneServerAdapterConfig; the keys of each job

`training` has every key of a job. Keys that are not in the YAML are not sent, so that the server's
defaults apply; only learning_rate and beta always are.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, JsonValue, field_validator, model_validator

from hone.capture.base import host_of
from hone.config.base import Strict
from hone.config.policy import Trained, address_of
from hone.config.registry import TrainerAdapterConfig
from hone.config.schema import Document
from hone.model import TrainableModel
from hone.types import (
    DEFAULT_ALPHA,
    DEFAULT_RANK,
    AdvertisedUrl,
    Alpha,
    Directory,
    EngineName,
    Name,
    Rank,
    TrainConfig,
)


class BackendConfig(Strict):
    """Server that trains and serves the model; without `ip` the run starts its own."""

    ip: str | None = Field(None, min_length=1)
    """Host of a running `hone serve`; 0.0.0.0 means 127.0.0.1. Without `ip` and `port` the run
    starts its own server and stops it at the end."""
    port: int | None = Field(None, ge=1, le=65535)
    """Control port of the server."""
    inference_port: int | None = Field(None, ge=1, le=65535)
    """Port of the server's OpenAI API, if agents use a port other than `port`."""
    advertise_url: AdvertisedUrl | None = None
    """Address of the server for agents on other machines or in containers, such as
    `http://gpu1:8000`, if it differs from `ip` and `port`. By default that of `hone serve
    --advertise-url`."""
    name: Name = "trainer_run"
    """Name of the trained model on the server."""
    project: Name = "trainer_project"
    base_model: str = Field("Qwen/Qwen2.5-7B-Instruct", min_length=1, max_length=512)
    """Model to train: a name from `hone models list`, a hub name, or a directory on the server."""
    api_key: str = "default"
    """API key of the server; `default` is enough for the same user on the same machine."""
    delete_old_checkpoints: bool = False
    """Before each job, delete all steps except the newest, the best and the run's first."""
    init_args: dict[str, JsonValue] | None = None
    """How the base model is loaded, for example `max_seq_length`."""
    engine_args: dict[str, JsonValue] | None = None
    """How the model is served, for example `gpu_memory_utilization`."""
    peft_args: dict[str, JsonValue] | None = None
    """Adapter settings under PEFT's names: `r`, `lora_alpha`."""
    server_config: dict[str, JsonValue] | None = None
    """Settings with which ART would start its OpenAI server. The `engine_args` in it are used like
    those above; the rest does not apply to a running server and is listed in the log."""
    root: Directory = Path(".hone")
    """Directory in which the run's own server keeps its state."""
    engine: EngineName = "auto"
    """Inference engine of the run's own server, as `hone serve --engine`."""
    engine_python: Path | None = None
    """Python interpreter with vLLM for the run's own server, as `hone serve --engine-python`."""
    engine_url: str | None = None
    """Running vLLM server for the run's own server to use, as `hone serve --engine-url`. May also be
    written as `engine: {url: URL}`."""
    rank: Rank = DEFAULT_RANK
    """LoRA rank."""
    alpha: Alpha = DEFAULT_ALPHA
    """LoRA alpha, as in PEFT."""

    @property
    def url(self) -> str | None:
        """Address of the running server; None for the run's own."""
        return None if self.ip is None else f"http://{bracketed(self.ip)}:{self.port}"

    def trainable_model(self) -> TrainableModel[Any]:
        """The model as it is registered at the server."""
        served = (self.server_config or {}).get("engine_args")
        return TrainableModel(
            name=self.name,
            project=self.project,
            base_model=self.base_model,
            rank=self.rank,
            alpha=self.alpha,
            init_args=self.init_args or {},
            engine_args={
                **(served if isinstance(served, dict) else {}),
                **(self.engine_args or {}),
            },
            peft_args=self.peft_args or {},
        )

    def trained(self, name: str | None = None, *urls: str, aliases: Iterable[str] = ()) -> Trained:
        """Names and addresses of the model in training; `urls` are those of its server.

        Without URLs, any port of `ip`: only the server knows which one serves inference.
        """
        at_ip = [] if self.ip is None else [(host_of(self.ip), None)]
        return Trained(
            name=name or self.name,
            names=frozenset({self.name, f"{self.project}/{self.name}"}),
            base_model=self.base_model,
            addresses=frozenset(map(address_of, urls) if urls else at_ip),
            aliases=frozenset(aliases),
        )

    @model_validator(mode="before")
    @classmethod
    def _engine_has_a_url(cls, block: Any) -> Any:
        match block:
            case {"engine": {"url": url, **more}} if not more and "engine_url" not in block:
                rest = {key: value for key, value in block.items() if key != "engine"}
                return {**rest, "engine_url": url}
        return block

    @field_validator("ip")
    @classmethod
    def _ip_is_a_host(cls, ip: str | None) -> str | None:
        if ip is not None and ("/" in ip or ip.count(":") == 1):  # IPv6 has more
            raise ValueError(
                f"got {ip!r}; expected a host name or an address, without http:// and without a "
                "port, which has its own key `port`"
            )
        return ip

    @model_validator(mode="after")
    def _ip_and_port_go_together(self) -> Self:
        if (self.ip is None) != (self.port is None):
            there, missing = ("ip", "port") if self.port is None else ("port", "ip")
            raise ValueError(
                f"{there} is {getattr(self, there)!r} but {missing} is not set; set both for a "
                "server that runs already, or neither to have one started"
            )
        if self.advertise_url is not None and self.ip is None:
            raise ValueError(
                f"advertise_url is {self.advertise_url!r} but ip is not set: the run's own server "
                "listens on 127.0.0.1 only, where other machines and containers cannot reach it. "
                "Start `hone serve --host 0.0.0.0 --advertise-url "
                f"{self.advertise_url}`, and set ip and port"
            )
        if self.inference_port is not None and self.ip is None:
            raise ValueError(
                f"inference_port is {self.inference_port} but ip is not set: the run's own "
                "server picks its ports; remove inference_port, or set ip and port"
            )
        engine = [k for k in self.server_options() if self.ip is not None]
        if engine:
            raise ValueError(
                f"{engine[0]} is for the run's own server, and ip is {self.ip!r}; remove one "
                "of the two, or start that server with the option"
            )
        return self

    def server_options(self) -> dict[str, str]:
        """Settings of the run's own server that are not the default, by name."""
        names = {"engine", "engine_python", "engine_url"}
        changed = self.model_dump(include=names, exclude_defaults=True)
        return {name: str(value) for name, value in changed.items()}


class ScheduledTrainConfig(TrainConfig, Strict):
    """How each job is trained: every key of a job, and a schedule over the jobs of the run."""

    not_yet: ClassVar[Mapping[str, str]] = {
        "gradient_accumulation_steps": "set groups_per_optimizer_step",
        "per_device_train_batch_size": "set groups_per_optimizer_step",
        "lr_scheduler_type": "set schedule: constant or linear",
        "num_generations": "set it in the trajectory builder",
        "max_steps": "set finetuning.num_epochs",
        "num_train_epochs": "set finetuning.num_epochs",
    }

    schedule: Literal["constant", "linear"] = "constant"
    """linear: the learning rate falls from learning_rate in the first job to 0 after the last
    planned one."""
    plot_tensors: bool = False
    """Write a plot of the packed training rows beside each checkpoint."""

    def job_keys(self, place: int, planned: int) -> dict[str, Any]:
        """Training keys of job number `place` (from 0) of `planned` jobs."""
        own = {"schedule", "plot_tensors"}
        # The schedule needs a rate. Both are sent so that the log and the report can name them.
        written = self.model_dump(exclude_unset=True, exclude=own)
        left = 1.0 if self.schedule == "constant" else 1 - place / planned
        return {**written, "learning_rate": self.learning_rate * left, "beta": self.beta}


class HoneServerAdapterConfig(TrainerAdapterConfig, name="hone_server"):
    """Trains on a hone server: a running one, or one that the run starts."""

    backend: BackendConfig
    training: ScheduledTrainConfig = Field(default_factory=ScheduledTrainConfig)


def adapter_config_of(document: Document) -> HoneServerAdapterConfig | None:
    """The block of the run's trainer adapter; None for a plugin's adapter."""
    config = document.trainer_adapters.get(document.finetuning.trainer_adapter or "")
    return config if isinstance(config, HoneServerAdapterConfig) else None


def bracketed(host: str) -> str:
    """The host for a URL: IPv6 in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
