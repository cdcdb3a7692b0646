"""One server for the clients of every framework, over the scripted model, with a witness before it."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest
from tests.chat.conftest import build_tokenizer
from tests.conformance.capture import MODEL, Served, Talk, ask, train
from tests.conformance.witness import Witness
from tests.fakes import ScriptedEngine
from tests.patience import PATIENCE_S
from tests.server.api import job
from tests.server.conftest import Server, write_model
from tests.server.small_server import LearnerHere

from hone.inference.embedded.engine import EmbeddedEngine
from hone.server.settings import Settings
from hone.server.state import State

POSITIONS = 8192
"""Tools take a thousand of the test vocabulary's tokens."""


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Serves step 1, so that a call's step is not 0 by default."""
    place, tokenizer = tmp_path_factory.mktemp("frameworks"), build_tokenizer("qwen2.5-instruct")
    base_model = write_model(place / "tiny", tokenizer, positions=POSITIONS)
    engine = ScriptedEngine(Talk(tokenizer), tokenizer=tokenizer)
    learners: list[LearnerHere] = []

    def start(*spec: Any, **more: Any) -> LearnerHere:
        learners.append(LearnerHere(*spec, **more))
        return learners[-1]

    settings = {"device": "cpu", "learner_threads": 1, "allow_base_models": (str(base_model),)}
    with ExitStack() as stack:
        server, witness = stack.enter_context(
            _witnessed(Settings(root=place / "root", **settings), engine, start_learner=start)
        )
        real = EmbeddedEngine.open(str(base_model), device="cpu")
        typed, typed_witness = stack.enter_context(
            _witnessed(Settings(root=place / "typed", **settings), real)
        )
        with httpx.Client(base_url=server.control_url, timeout=PATIENCE_S) as http:
            spec = {"name": MODEL, "base_model": str(base_model), "rank": 4}
            ask(http, "POST", "/v1/training/models", spec)
            train(http, job(model=MODEL))
        yield Served(server, engine, witness, tokenizer, base_model, learners, typed, typed_witness)


@contextmanager
def _witnessed(settings: Settings, engine: Any, **more: Any) -> Iterator[tuple[Server, Witness]]:
    """A server over this engine, and the witness before its inference port."""
    state = State(settings, open_engine=lambda name: engine, **more)
    server = Server(state, engine).start()
    try:
        witness = Witness(int(server.inference_url.rpartition(":")[2]))
        server.call(witness.start())
        yield server, witness
        server.call(witness.close())
    finally:
        server.stop()
