"""What the server's tests share: a tiny model on disk, and whole servers over a scripted engine.

`make_server(script, **settings)` starts both apps on real uvicorn servers at free ports, in one
event loop in a thread of its own, as `hone serve` does; `make_state` is the same without HTTP.
"""

import asyncio
import json
import os
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from tests.chat.conftest import build_tokenizer
from tests.fakes import ScriptedEngine
from tests.patience import PATIENCE_S
from tests.server.api import Api, Open, opening
from tests.server.worlds import World

from hone.inference.base import Engine
from hone.server.http.app import create_apps
from hone.server.http.listen import GRACE_S, AppServer, bind, port_of
from hone.server.settings import Settings
from hone.server.state import State
from hone.store import calls, jobs, models
from hone.store.database import Store
from hone.store.jobs import JobStore

CLIENTS: list[Any] = []
"""Official clients that tests have opened. Errors keep them in reference cycles, so the garbage
collector may find their sockets before it finds them."""


@pytest.fixture(autouse=True)
def close_clients() -> Iterator[None]:
    """Close the clients that a test opened; those of wider fixtures close themselves."""
    before = len(CLIENTS)
    yield
    for client in CLIENTS[before:]:
        client.close()
    del CLIENTS[before:]


OPENED: list[list[str]] = []
"""Lists that note the files which are opened meanwhile."""


def _note_opened(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and OPENED and isinstance(arguments[0], str | bytes | os.PathLike):
        for files in OPENED:
            files.append(os.fsdecode(arguments[0]))


@pytest.fixture
def opened_files() -> Iterator[list[str]]:
    """The paths of the files that this process opens during the test."""
    _watch_opens()
    files: list[str] = []
    OPENED.append(files)
    yield files
    OPENED.remove(files)


@cache
def _watch_opens() -> None:
    sys.addaudithook(_note_opened)  # cannot be removed, so it is added once


T = TypeVar("T")

VOCAB, HIDDEN, INNER, LAYERS, HEADS, KV_HEADS = 512, 64, 128, 2, 4, 2


def write_model(
    directory: Path, tokenizer: Any, *, seed: int = 0, positions: int = 512, hidden: int = HIDDEN
) -> Path:
    """A random Llama with this tokenizer; weights drawn wide, so that its answers differ."""
    from safetensors.numpy import save_file

    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "vocab_size": VOCAB,
        "tie_word_embeddings": False,
        "eos_token_id": tokenizer.eos_token_id,
    }
    (directory / "config.json").write_text(json.dumps(config))
    draw, kv = np.random.default_rng(seed), hidden // HEADS * KV_HEADS
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, hidden),
        "lm_head.weight": (VOCAB, hidden),
    }
    for i in range(LAYERS):
        at = f"model.layers.{i}"
        shapes |= {
            f"{at}.self_attn.q_proj.weight": (hidden, hidden),
            f"{at}.self_attn.k_proj.weight": (kv, hidden),
            f"{at}.self_attn.v_proj.weight": (kv, hidden),
            f"{at}.self_attn.o_proj.weight": (hidden, hidden),
            f"{at}.mlp.gate_proj.weight": (INNER, hidden),
            f"{at}.mlp.up_proj.weight": (INNER, hidden),
            f"{at}.mlp.down_proj.weight": (hidden, INNER),
        }
    weights = {k: (0.2 * draw.standard_normal(s)).astype(np.float32) for k, s in shapes.items()}
    norms = ["model.norm.weight"]
    for i in range(LAYERS):
        norms += [f"model.layers.{i}.{n}_layernorm.weight" for n in ("input", "post_attention")]
    weights |= {name: np.ones(hidden, np.float32) for name in norms}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """Qwen2.5's template and special tokens over a small byte-level vocabulary."""
    return build_tokenizer("qwen2.5-instruct")


MakeState = Callable[..., State]


@pytest.fixture
def make_state(tmp_path: Path, tokenizer: Any, tiny_model: Path) -> MakeState:
    """`make_state(script, engine=None, open_engine=None, **settings)`: a server's parts, not running."""

    def make(
        script: Any = ("ok",),
        *,
        engine: Engine | None = None,
        open_engine: Callable[[str], Engine] | None = None,
        **settings: Any,
    ) -> State:
        used = engine or ScriptedEngine(script, tokenizer=tokenizer)
        allowed = (str(tiny_model), "*")  # by clients of the inference port
        usual = {"root": tmp_path / "hone", "device": "cpu", "allow_base_models": allowed}
        settings = usual | settings
        return State(Settings(**settings), open_engine=open_engine or (lambda name: used))

    return make


@pytest.fixture
async def world(make_state: MakeState, tiny_model: Path) -> AsyncIterator[World]:
    """A server's parts with one model, to add recorded calls to."""
    world = await World.open(make_state(), tiny_model)
    yield world
    await world.close()


@dataclass
class Server:
    """A running server, from the outside and from the inside."""

    state: State
    engine: Any
    """The engine of every base model; a ScriptedEngine unless the test gave another."""
    control_url: str = ""
    inference_url: str = ""
    grace_s: int = GRACE_S
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)
    _servers: list[AppServer] = field(default_factory=list)
    _thread: threading.Thread | None = None

    @property
    def openai_url(self) -> str:
        return f"{self.inference_url}/v1"

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run something in the server's event loop, from the test's thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE_S)

    def start(self) -> "Server":
        ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(ready,), name="server")
        self._thread.start()
        assert ready.wait(PATIENCE_S), "the server did not start"
        return self

    def stop(self) -> None:
        self.state.jobs.stop_waiting()
        for server in self._servers:
            server.should_exit = True
        assert self._thread is not None
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "the server did not stop"
        self._loop.close()

    def _run(self, ready: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve(ready))
        self._loop.run_until_complete(self._loop.shutdown_default_executor())

    async def _serve(self, ready: threading.Event) -> None:
        bound = [bind(), bind()]
        self.control_url, self.inference_url = (f"http://127.0.0.1:{port_of(b)}" for b in bound)
        self._servers += [
            AppServer(app, self.state.settings, grace_s=self.grace_s)
            for app in create_apps(self.state)
        ]
        async with self.state.running():
            serving = [
                asyncio.create_task(server.serve(sockets=[sock]))
                for server, sock in zip(self._servers, bound, strict=True)
            ]
            for server in self._servers:
                await server.ready.wait()
            ready.set()
            await asyncio.gather(*serving)


MakeServer = Callable[..., Server]


@pytest.fixture(scope="module")
def shared(
    tmp_path_factory: pytest.TempPathFactory, tokenizer: Any, tiny_model: Path
) -> Iterator[Server]:
    """One server for all tests that need none of their own."""
    engine = ScriptedEngine(tokenizer=tokenizer)
    root, allowed = tmp_path_factory.mktemp("root"), (str(tiny_model),)
    settings = Settings(root=root, allow_base_models=allowed)
    server = Server(State(settings, open_engine=lambda name: engine), engine).start()
    yield server
    server.stop()


@pytest.fixture
def make_server(make_state: MakeState, tokenizer: Any) -> Iterator[MakeServer]:
    """`make_server(script, engine=None, **settings)`: started; stopped when the test ends."""
    started: list[Server] = []

    def make(
        script: Any = ("ok",),
        *,
        engine: Engine | None = None,
        grace_s: int = GRACE_S,
        **settings: Any,
    ) -> Server:
        used = engine or ScriptedEngine(script, tokenizer=tokenizer)
        server = Server(make_state(engine=used, **settings), used, grace_s=grace_s)
        started.append(server)
        return server.start()

    yield make
    for server in started:
        if server._thread is not None and server._thread.is_alive():
            server.stop()


@pytest.fixture
def server(make_server: MakeServer) -> Server:
    """A server that answers "ok" to everything."""
    return make_server()


@pytest.fixture
async def open_api(tmp_path: Path, tokenizer: Any, tiny_model: Path) -> AsyncIterator[Open]:
    """`await open_api(held=False, **settings)`: a running server without sockets."""
    async with opening(tmp_path / "hone", tokenizer, tiny_model) as make:
        yield make


@pytest.fixture
async def api(open_api: Open) -> Api:
    """With the model `agent`; jobs wait for ever."""
    api = await open_api(held=True)
    await api.register()
    return api


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """Of models and jobs alone."""
    opened = Store(tmp_path / "state.sqlite", (models.SCHEMA, jobs.SCHEMA, calls.SCHEMA))
    yield opened
    opened.close()


@pytest.fixture
def queue(store: Store) -> JobStore:
    return JobStore(store)
