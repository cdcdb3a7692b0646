"""What one server was started with.

In:   the options of `hone serve`, or LocalBackend's
Out:  Settings, checked
Used: app.py hands it to every part; every limit a client can meet has its default here
"""

from ipaddress import IPv4Network, IPv6Network
from pathlib import Path
from typing import Literal

from pydantic import Field

from hone.types import Strict


class Settings(Strict):
    """Every setting of a server. What a field means is the string under it."""

    root: Path = Path(".hone")
    """Where everything is kept: state, checkpoints, logs. Nothing outside it is written."""
    host: str = "127.0.0.1"
    """Any other than a loopback address needs a key."""
    port: int = Field(default=7623, ge=0, le=65535)
    """The control plane and the OpenAI API; 0 takes a free one."""
    inference_port: int | None = Field(default=8000, ge=0, le=65535)
    """The OpenAI API alone; None opens no second port."""
    engine: Literal["auto", "embedded"] = "auto"
    api_key: str | None = None
    """Clients must send it as a bearer token; on loopback None accepts any key."""
    trust_network: tuple[IPv4Network | IPv6Network, ...] = ()
    """Networks whose clients reach the control plane without a key (ART's send none)."""
    serving_during_training: Literal["continue", "pause"] | None = None
    """None: pause only where engine and learner share one GPU."""
    hold_s: float = Field(default=1200.0, gt=0)
    """How long a request waits while serving is paused before it gets 503."""
    max_body_bytes: int = Field(default=64 * 2**20, gt=0)
    """A larger request is refused with 413 before it is read."""
    max_concurrent: int = Field(default=1024, gt=0)
    """OpenAI requests answered at once; more get 429."""
    max_n: int = Field(default=128, gt=0)
    """Samples of one request."""
    max_tokens: int = Field(default=256, gt=0)
    """Tokens of an answer where the request names no number."""
    max_queued_jobs: int = Field(default=64, gt=0)
    """More get 429."""
    max_adapters: int = Field(default=8, gt=0)
    """Adapters kept loaded in one engine."""
    max_seq_length: int = Field(default=8192, gt=1)
    """Prompt and answer together, at most."""
    keep_calls_s: float = Field(default=7 * 86400.0, gt=0)
    """Recorded calls older than this are pruned, unless a run is open or a job refers to them; so
    are the groups of jobs that ended longer ago."""
    keep_calls_bytes: int = Field(default=4 * 2**30, gt=0)
    """And the oldest ones beyond this size, of the calls and of the groups each."""
    learner_threads: int | None = Field(default=None, gt=0)
    """None: all cores the server may run on. A model's learner, a process with weights of its own, is
    started when the model is prepared for training (the SDK's `register`, `hone finetune`) and never
    for serving alone; on a GPU, and where its weights are an eighth of the free memory or more, not
    before the first job."""
    device: str | None = None
    """None: CUDA if there is one."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_json: bool = False

    @property
    def log_file(self) -> Path:
        return self.root / "logs" / "server.log"

    @property
    def loopback(self) -> bool:
        return self.host in {"127.0.0.1", "localhost", "::1"}
