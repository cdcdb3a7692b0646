"""Requests nobody meant to send, and jobs bent out of shape.

In:   HONE_FUZZ_CASES (1,000 in `make test`), a tiny model
Out:  Target: a whole server in this process that says 5xx to nothing, hangs on nothing, loses nothing
"""

import asyncio
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Coroutine
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote

import httpx
from hypothesis import strategies as st
from tests.fakes import ScriptedEngine
from tests.patience import PATIENCE_S

from hone.learner.packed import unpack_groups
from hone.learner.process import LearnerProcess, LearnerSpec, WorkerInfo
from hone.learner.samples import make_samples
from hone.server.http.app import create_apps
from hone.server.settings import Settings
from hone.server.state import State
from hone.store.jobs import FINAL
from hone.types import JobInfo, ModelSpec

T = TypeVar("T")

CASES = int(os.environ.get("HONE_FUZZ_CASES", "1000"))
ROLLOUTS = [f"r{i}" for i in range(6)]
USER = {"role": "user", "content": "the weather"}


class QuickLearner(LearnerProcess):
    """Reads a job as the learner would, and learns nothing: what was accepted can be trained."""

    def __init__(self, spec: LearnerSpec, **_: object) -> None:
        config = json.loads((spec.model_dir / "config.json").read_text())
        self.vocab, self.positions = config["vocab_size"], config["max_position_embeddings"]
        self.sha256 = ""
        self.info = WorkerInfo(
            pid=0, torch="", threads=1, device="cpu", dtype="float32", deterministic=True, sha256=""
        )

    @property
    def alive(self) -> bool:
        return True

    def when_ended(self, call: Any) -> None:
        """It never ends."""

    def ready(self, **_: Any) -> WorkerInfo:
        assert self.info is not None, "it loads where it is made"
        return self.info

    def load(self, directory: Path, **_: Any) -> str:
        self.sha256 = json.loads((directory / "manifest.json").read_text())["sha256"]
        return self.sha256

    def train(self, groups: bytes, config: Any, **_: Any) -> dict[str, Any]:
        made = make_samples(
            unpack_groups(groups), config, vocab=self.vocab, max_positions=self.positions
        )
        return {
            "steps": 0,
            "reason": "nothing is learned here",
            "metrics": {"learn/rollouts": float(len(made.samples))},
            "dropped": {},
            "movement": {"sequences": [], "tokens": []},
            "sha256": self.sha256,
            "logprobs": None,
        }

    def save(self, directory: Path, **_: Any) -> str:
        (directory / "adapter").write_text(self.sha256)
        return self.sha256

    def cancel(self) -> None: ...

    def close(self, **_: Any) -> None: ...


ERROR = {"message", "type", "param", "code"}
"""Keys of an error of the OpenAI API; those of Anthropic's have no `param`."""


@dataclass
class Target:
    """A server in an event loop of its own; requests go to its ASGI app without a socket."""

    root: Path
    base_model: Path
    tokenizer: Any
    statuses: Counter[int] = field(default_factory=Counter)
    accepted: list[str] = field(default_factory=list)
    choices: list[dict[str, Any]] = field(default_factory=list)
    """Answers of this server to USER."""

    def start(self) -> "Target":
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="server")
        self._thread.start()
        self._run(self._open())
        return self

    def send(self, method: str, path: str, body: bytes = b"", **headers: str) -> httpx.Response:
        """The answer; fails on a 5xx, on silence, and on an error that is not in the one shape."""
        sent_headers = {"content-type": "application/json", **headers}
        try:
            answer = self._run(self._request(method, path, body, sent_headers))
        except TimeoutError:
            raise AssertionError(f"no answer in {PATIENCE_S:g} s: {method} {path}") from None
        self.statuses[answer.status_code] += 1
        assert answer.status_code < 500 or answer.status_code == 501, answer.text
        if answer.status_code >= 400:
            response = answer.json()
            if "/v1/messages" in path:
                assert response["type"] == "error" and response["request_id"], response
                assert {"message", "type"} <= set(response["error"]) <= ERROR, response
            else:
                assert set(response["error"]) == ERROR, response
            assert "Traceback" not in answer.text
        if answer.status_code == 202:
            self.accepted.append(JobInfo.model_validate_json(answer.content).id)
        return answer

    async def _request(
        self, method: str, url: str, body: bytes, headers: dict[str, str]
    ) -> httpx.Response:
        """As uvicorn would hand it over. Not by httpx, which refuses some URLs that a socket takes."""
        target = url.removeprefix("http://localhost").partition("#")[0] or "/"
        raw_path, _, query = target.partition("?")
        sent = {"host": "localhost", "content-length": str(len(body)), **headers}
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": unquote(raw_path),
            "raw_path": raw_path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": [(k.lower().encode(), v.encode(errors="replace")) for k, v in sent.items()],
            "client": ("127.0.0.1", 50000),
            "server": ("127.0.0.1", 80),
        }
        pending = [{"type": "http.request", "body": body, "more_body": False}]
        over = asyncio.Event()
        received: list[Any] = []

        async def receive() -> Any:
            if pending:
                return pending.pop()
            await over.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            received.append(message)
            if message["type"] == "http.response.body" and not message.get("more_body"):
                over.set()

        # What the app raises after its answer has begun, uvicorn logs; the answer is judged here.
        with suppress(Exception):
            await self._app(scope, receive, send)
        start, *rest = received
        content = b"".join(message.get("body", b"") for message in rest)
        return httpx.Response(start["status"], headers=start["headers"], content=content)

    def ended(self) -> dict[str, JobInfo]:
        """Every job once it has ended; those that were accepted must be among them."""
        give_up = time.monotonic() + PATIENCE_S
        while True:
            jobs = {job.id: job for job in self.state.jobs.list(limit=-1)}
            open_jobs = [job for job in jobs.values() if job.state not in FINAL]
            if not open_jobs:
                break
            assert time.monotonic() < give_up, open_jobs[0]
            time.sleep(0.01)
        lost = [job for job in self.accepted if job not in jobs]
        assert not lost, lost
        return jobs

    def stop(self) -> None:
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE_S)
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE_S)

    async def _open(self) -> None:
        settings = Settings(root=self.root, device="cpu", max_queued_jobs=10**6)
        said = ("cold and the wind is strong", "warm")
        self.engine = engine = ScriptedEngine(said, tokenizer=self.tokenizer)
        self.state = State(settings, open_engine=lambda name: engine, start_learner=QuickLearner)
        self._running = self.state.running()
        await self._running.__aenter__()
        self._app = app = create_apps(self.state)[0]
        self.openapi = app.openapi()
        # An error inside the app must come back as the answer a client would get.
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        self._client = httpx.AsyncClient(transport=transport, base_url="http://localhost")
        base = str(self.base_model)
        for name in ("agent", "spare"):
            self.state.models.register(ModelSpec(name=name, base_model=base, rank=2))
        for rollout in ROLLOUTS:
            body = {"model": "agent", "messages": [USER], "logprobs": True, "n": 2}
            answer = await self._client.post(f"/rollout/{rollout}/v1/chat/completions", json=body)
            self.choices += answer.raise_for_status().json()["choices"]

    async def _close(self) -> None:
        await self._client.aclose()
        await self._running.__aexit__(None, None, None)
        await self._loop.shutdown_default_executor()


# ---- jobs ----------------------------------------------------------------------------------------

TEXTS = st.sampled_from(
    [
        "",
        "\ud800",
        "a\x00b",
        "../../etc",
        "token_id:7",
        "token_id:" + "9" * 5000,
        "call-" + "0" * 20,
        "r0",
        "assistant",
        "tool",
        "length",
        "@huge@",
    ]
)
"""`@huge@` becomes a number of 5,000 digits."""

ODD = TEXTS | st.sampled_from(
    [None, True, -1, 2**63, 10**400, 1e308, float("nan"), float("inf"), [], {}, [[]], {"\ud800": 1}]
)
"""What JSON can say and few expect."""

ANY = st.recursive(
    ODD | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=6,
).map(deepcopy)  # it may be changed again later, and the next case must not see that


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


@st.composite
def token_calls(draw: st.DrawFn) -> dict[str, Any]:
    ids = draw(st.lists(st.integers(0, 511), min_size=1, max_size=6))
    call: dict[str, Any] = {
        "prompt_ids": draw(st.lists(st.integers(0, 511), min_size=1, max_size=6)),
        "completion_ids": ids,
        "logprobs": [-0.5] * len(ids),
    }
    if draw(st.booleans()):
        call["temperature"] = draw(st.floats(0, 2))
        call["trained"] = draw(st.booleans())
        call["forced"] = draw(st.lists(st.integers(0, len(ids) - 1), max_size=2))
    return call


@st.composite
def trajectories(draw: st.DrawFn, choices: list[dict[str, Any]]) -> dict[str, Any]:
    """One that is right: by tokens, by rollout, or by messages and choices."""
    scored: dict[str, Any] = {"reward": draw(st.floats(-2, 2))}
    form = draw(st.integers(0, 3))
    if form == 0:
        calls = draw(st.lists(token_calls(), min_size=1, max_size=2))
        trained = sum(call.get("trained", True) for call in calls)
        shaped = {"shaped_rewards": [draw(st.floats(-1, 1))] * trained}
        shaped = shaped if draw(st.booleans()) else {}
        return {"calls": calls, **shaped} | scored
    if form == 1:
        return {"rollout": draw(st.sampled_from(ROLLOUTS))} | scored
    messages = [USER, draw(st.sampled_from(choices))] * (form - 1)
    return {"messages_and_choices": messages} | scored


@st.composite
def bodies(draw: st.DrawFn, choices: list[dict[str, Any]]) -> bytes:
    """A job, right or with a few places changed."""
    group = st.builds(
        lambda members: {"trajectories": members},
        st.lists(trajectories(choices), min_size=2, max_size=3),
    )
    groups = deepcopy(draw(st.lists(group, min_size=1, max_size=3)))
    # Its answers are all of step 0, and jobs that were accepted before have moved the model on.
    config = {"max_staleness": None}
    job: dict[str, Any] = {"model": "agent", "groups": groups, "config": config}
    if draw(st.integers(0, 3)) == 0:
        keys = ["learning_rate", "epsilon", "credit", "baseline", "loss", "lr", "\ud800"]
        values = st.sampled_from([0.1, 1, 16, "per_call", "batch", "dapo"]) | ANY
        config |= draw(st.dictionaries(st.sampled_from(keys), values, max_size=2))
        job["advance_when_flat"] = draw(st.integers(0, 9)) == 0
        job["idempotency_key"] = f"key {draw(st.integers(0, 99))}"
    # At every level, since a walk from the top seldom ends at the bottom.
    every = [t for g in groups for t in g["trajectories"]]
    inner = [*every, *(call for t in every for call in t.get("calls", ()))]
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 1, 2, 5]))):
        mutate(draw, draw(st.sampled_from([job, draw(st.sampled_from(inner))])))
    text = json.dumps(job).replace('"@huge@"', "1" + "0" * 5000)
    cut = draw(st.integers(0, 60))
    return text.encode()[: -cut if cut < 3 and cut else None]


# ---- requests for answers ------------------------------------------------------------------------

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
SAMPLING: dict[str, list[Any]] = {
    "n": [1, 2],
    "temperature": [0, 0.5, 1.5],
    "top_p": [0.0, 0.9],
    "top_k": [-1, 5],
    "min_p": [0.1],
    "max_tokens": [1, 7],
    "min_tokens": [0, 1],
    "seed": [3],
    "stop": ["wind", ["cold", "x"]],
    "stop_token_ids": [[7], []],
    "presence_penalty": [0.5],
    "repetition_penalty": [1.1],
    "logit_bias": [{"7": -100}],
    "skip_special_tokens": [True, False],
    "structured_outputs": [{"regex": "a+"}],
    "stream": [True, False],
    "stream_options": [{"include_usage": True}],
}
CHAT_ONLY: dict[str, list[Any]] = {
    "tools": [[TOOL]],
    "tool_choice": ["auto", "none", "required"],
    "parallel_tool_calls": [False],
    "logprobs": [True],
    "response_format": [{"type": "json_object"}],
    "reasoning_effort": ["low", "none"],
    "verbosity": ["low"],
    "chat_template_kwargs": [{"enable_thinking": False}],
    "user": ["me"],
}
BLOCKS = [{"role": "user", "content": [{"type": "text", "text": "the weather"}]}]
INFERENCE: dict[str, tuple[dict[str, Any], dict[str, list[Any]]]] = {
    "/v1/chat/completions": ({"messages": [USER]}, SAMPLING | CHAT_ONLY),
    "/v1/completions": ({"prompt": "the weather"}, SAMPLING | {"logprobs": [0, 3]}),
    "/v1/responses": (
        {"input": "the weather"},
        {
            "max_output_tokens": [5],
            "instructions": ["be brief"],
            "reasoning": [{"effort": "low"}],
            "text": [{"verbosity": "low"}],
            "store": [True, False],
            "include": [["message.output_text.logprobs"]],
            "stream": [True, False],
            "stop_token_ids": [[7]],
        },
    ),
    "/v1/responses/input_tokens": ({"input": "the weather"}, {"instructions": ["be brief"]}),
    "/v1/messages": (
        {"messages": BLOCKS, "max_tokens": 7},
        {
            "system": ["be brief", BLOCKS[0]["content"]],
            "stop_sequences": [["wind"]],
            "temperature": [0.5],
            "top_k": [5],
            "thinking": [{"type": "disabled"}],
            "tools": [[{"name": "look", "input_schema": {"type": "object"}}]],
            "tool_choice": [{"type": "auto"}],
            "metadata": [{"user_id": "me"}],
            "stream": [True, False],
        },
    ),
    "/v1/messages/count_tokens": ({"messages": BLOCKS}, {"system": ["be brief"]}),
    "/tokenize": ({"prompt": "the weather"}, {"return_token_strs": [True]}),
    "/detokenize": ({"tokens": [7, 8, 9]}, {}),
}
"""The routes of the inference APIs that have a body: what it must have, and what it may have."""


@st.composite
def inference_bodies(draw: st.DrawFn, route: str) -> bytes:
    """A request for a model that exists, right or with a few places changed."""
    needed, possible = INFERENCE[route]
    keys = (
        draw(st.lists(st.sampled_from(sorted(possible)), unique=True, max_size=3))
        if possible
        else []
    )
    body = deepcopy(needed) | {key: deepcopy(draw(st.sampled_from(possible[key]))) for key in keys}
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 1, 2]))):
        mutate(draw, body)
    # Last: with another name, nothing else of the request would be read.
    body["model"] = draw(st.sampled_from(["agent"] * 9 + ["agent@0", "default/agent", "x"]))
    return json.dumps(body).replace('"@huge@"', "1" + "0" * 5000).encode()


def mutate(draw: st.DrawFn, value: dict[str, Any]) -> None:
    """Change one place: another value of its kind, any value, none, or something beside it."""
    parent: Any = value
    while parent:  # walk down at random, so that a long list does not draw all changes to itself
        keys = list(parent) if isinstance(parent, dict) else range(len(parent))
        key = draw(st.sampled_from(keys))
        if not isinstance(parent[key], dict | list) or draw(st.integers(0, 5)) == 0:
            break
        parent = parent[key]
    else:
        return
    kind = draw(st.integers(0, 9))
    if kind == 0:
        del parent[key]
    elif kind == 1 and isinstance(parent, list):
        parent.insert(key, deepcopy(parent[key]))
    elif kind == 2 and isinstance(parent, dict):
        names = st.sampled_from(["\ud800", "trained", "tools"]) | st.text(max_size=6)
        parent[draw(names)] = draw(ANY)
    elif kind == 3:
        parent[key] = deep(draw(st.sampled_from([50, 300, 900])))
    elif kind == 4:
        parent[key] = draw(ANY)
    else:
        parent[key] = draw(alike(parent[key]))


def alike(value: Any) -> st.SearchStrategy[Any]:
    """Values of the same kind, which pass the first look: a wrong id, an impossible number."""
    if isinstance(value, bool):
        return st.booleans()
    if isinstance(value, int):
        return st.sampled_from([-1, 0, 511, 512, 2**31, 2**63, 10**30]) | st.integers(-600, 600)
    if isinstance(value, float):
        odd = [float("nan"), float("inf"), 0.0, 1e308, -1e308, 1e-320]
        return st.sampled_from(odd) | st.floats(-2, 2)
    if isinstance(value, str):
        return TEXTS
    if isinstance(value, list):
        return st.sampled_from([value[:1], value + value, value[::-1]]).map(deepcopy)
    return ANY
