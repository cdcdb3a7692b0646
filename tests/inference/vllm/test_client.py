"""The vLLM engine as a client of a server that runs already; a small server stands in for vLLM."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from tests.conformance.engine import spelled, spelling_tokenizer
from tests.inference.embedded.test_engine import write_adapter
from tests.patience import PATIENCE_S
from tests.prose import Prose

from hone.errors import ConfigError, EngineError, EngineFailed, GrammarError
from hone.inference.base import AdapterRef, Constraint, Sampling, complete
from hone.inference.grammar import Grammars
from hone.inference.vllm.engine import VllmEngine
from hone.inference.vllm.extension import digest, tensor_name
from hone.inference.vllm.process import VllmProcess
from hone.inference.vllm.server import VllmServer
from hone.models.decoder import Decoder
from hone.models.lora import read_tensors


class Standin:
    """Answers as vLLM does, with token 7 unless told otherwise; `broken` requests get no answer."""

    def __init__(self) -> None:
        self.version, self.healthy, self.broken = "0.31.0", True, False
        self.breaks = 0
        """So many requests get no answer."""
        self.top = {"token_id:7": 0.0, "token_id:8": -9999.0}
        self.ids = [7]
        self.values: list[float] = []
        """Log-probabilities of `ids`, if they are not that of token 7 in `top`."""
        self.pieces = 1
        """So many events with `ids` has the answer to a request that streams."""
        self.refuses = ""
        self.holds: asyncio.Event | None = None
        """Set when a request arrives; it then gets no answer, or the beginning of a stream."""
        self.loaded: dict[str, str] = {}
        self.keeps = 0
        """So many requests to unload an adapter fail."""
        self.bodies: list[dict[str, Any]] = []
        self.app = FastAPI()
        self.app.get("/version")(lambda: {"version": self.version})
        self.app.get("/health")(lambda: Response(status_code=200 if self.healthy else 503))
        self.app.get("/v1/models")(self.models)
        self.app.post("/v1/completions")(self.complete)
        self.app.post("/v1/load_lora_adapter")(self.load)
        self.app.post("/v1/unload_lora_adapter")(self.unload)

    def models(self) -> dict[str, Any]:
        adapters = [{"id": name, "parent": "tiny"} for name in self.loaded]
        return {"data": [*adapters, {"id": "tiny", "parent": None, "max_model_len": 300}]}

    async def complete(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        if self.holds is not None:
            self.holds.set()

            async def gone() -> AsyncIterator[bytes]:
                yield b'data: {"choices": []}\n\n'
                while not await request.is_disconnected():
                    await asyncio.sleep(0.01)

            if body.get("stream"):
                return StreamingResponse(gone())
            async for _ in gone():
                pass
        if self.broken or self.breaks > 0:
            self.breaks -= 1
            transport: Any = request.scope["extensions"]["test.transport"]
            transport.abort()
        if body["model"] not in {"tiny", *self.loaded}:
            return JSONResponse({"error": {"message": "no such model"}}, 404)
        refuses = self.refuses
        if body.get("temperature") == 0 and body["n"] > 1:
            refuses = f"n must be 1 when using greedy sampling, got {body['n']}."
        if refuses:
            return JSONResponse({"error": {"message": refuses}}, 400)
        count = len(self.ids)
        values = self.values or [self.top["token_id:7"]] * count
        logprobs = {"token_logprobs": values, "top_logprobs": [self.top] * count}
        choice = {"index": 0, "token_ids": self.ids, "logprobs": logprobs}
        choice["finish_reason"] = "length"
        answer = {"choices": [choice], "usage": {"prompt_tokens": 3}}
        if body.get("stream"):
            last = f"data: {json.dumps(answer)}\n\n"
            choice["finish_reason"] = None
            first = f"data: {json.dumps({'choices': [choice]})}\n\n"
            return StreamingResponse(iter([first] * (self.pieces - 1) + [last]))
        return JSONResponse(answer)

    async def load(self, request: Request) -> Response:
        body = await request.json()
        if body["lora_name"] in self.loaded:
            return JSONResponse({"error": {"message": "has already been loaded"}}, 400)
        self.loaded[body["lora_name"]] = body["lora_path"]
        return Response("Success")

    async def unload(self, request: Request) -> Response:
        if self.keeps > 0:
            self.keeps -= 1
            return Response("out of file descriptors", status_code=500)
        known = self.loaded.pop((await request.json())["lora_name"], None)
        return Response("Success", status_code=200 if known else 404)


class OwnStandin(Standin):
    """A server that hone has started: it sleeps, wakes and shows the adapters that it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.ids_of: dict[str, int] = {}
        """vLLM's numbers of what was loaded, by path."""
        self.last_id = 0
        self.loads = True
        """Whether loading an adapter does anything."""
        self.unread = 0
        """So many times an adapter is not read yet."""
        self.unready = 0
        """So many times the digests are not ready."""
        self.lost = False
        """Whether it has forgotten an adapter's weights."""
        self.wakes, self.reason = True, ""
        """Whether it wakes, and why it does not."""
        self.app.post("/sleep")(self.sleep)
        self.app.post("/wake_up")(self.wake)
        self.app.post("/collective_rpc")(self.rpc)

    async def load(self, request: Request) -> Response:
        response = await super().load(request)
        self.calls.append("load")
        if self.loads:
            self.last_id += 1
            self.ids_of[list(self.loaded.values())[-1]] = self.last_id
        return response

    async def unload(self, request: Request) -> Response:
        self.calls.append("unload")
        return await super().unload(request)

    async def complete(self, request: Request) -> Response:
        self.calls.append("complete")
        body = await request.json()
        if "prompt_logprobs" not in body:
            return await super().complete(request)
        if body["max_tokens"] < 1 or len(body["prompt"]) + body["max_tokens"] > 300:
            return JSONResponse({"error": {"message": "it does not fit"}}, 400)
        scores = [None, *({str(token): {"logprob": -1.0}} for token in body["prompt"][1:])]
        return JSONResponse({"choices": [{"prompt_logprobs": scores}]})

    def sleep(self, level: int) -> None:
        self.calls.append(f"sleep {level}")

    def wake(self) -> Response:
        self.calls.append("wake")
        return Response(self.reason, status_code=200 if self.wakes else 500)

    async def rpc(self, request: Request) -> dict[str, Any]:
        body = await request.json()
        self.calls.append(body["method"])
        if body["method"] == "hone_read":
            assert Path(body["args"][0]).is_dir()
            self.unread -= 1
            return {"results": [{"ready": self.unread < 0}]}
        if body["method"] == "hone_hash":
            (given,) = body["args"] or [max(self.ids_of.values(), default=0)]
            return {"results": [{"held": True, "id": given, "dtypes": ["float32"]}]}
        (adapter,) = body["args"]
        if body["method"] == "remove_lora":
            self.ids_of = {path: one for path, one in self.ids_of.items() if one != adapter}
            return {"results": [None]}
        if adapter not in self.ids_of.values():
            return {"results": [{"held": False}]}
        (path,) = [path for path, number in self.ids_of.items() if number == adapter]
        if self.unready:
            self.unready -= 1
            return {"results": [{"held": True, "ready": False}]}
        settings = json.loads((Path(path) / "adapter_config.json").read_text())
        scale, tensors = settings["lora_alpha"] / settings["r"], {}
        for name, tensor in read_tensors(Path(path) / "adapter_model.safetensors").items():
            stem, _, factor = name.removesuffix(".weight").rpartition(".lora_")
            value = tensor * scale if factor == "B" else tensor
            value = value * 0 if self.lost else value
            tensors[tensor_name(stem.removeprefix("base_model.model."), factor)] = digest(value)
        held = {"held": True, "ready": True, "tensors": tensors, "wrong": [], "ignored": []}
        return {"results": [{**held, "dtypes": ["float32"]}]}


@pytest.fixture
def own() -> Iterator[tuple[OwnStandin, VllmProcess]]:
    """A stand-in at the socket of a process that hone would have started."""
    standin, process = OwnStandin(), VllmProcess(less_memory="Reduce max_seq_length to 64.")
    config = uvicorn.Config(
        standin.app, uds=str(process.socket), log_level="warning", lifespan="off"
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        thread.join(0.01)
    yield standin, process
    server.should_exit = True
    thread.join()
    process.stop()


def engine_of(process: VllmProcess, directory: Path) -> VllmEngine:
    server = VllmServer(
        vocab=512,
        max_length=300,
        max_rank=64,
        name="tiny",
        process=process,
        sleeps=True,
        kv_bytes=1 << 20,
        grammars=Grammars(lambda: None, 512),
    )
    return VllmEngine(server, directory=directory / "adapters")


@pytest.mark.parametrize("reason", ["CUDA Error: out of memory", "Internal Server Error"])
async def test_an_engine_that_does_not_wake_has_failed_and_holds_no_request(
    prose: Prose, own: tuple[OwnStandin, VllmProcess], tmp_path: Path, reason: str
) -> None:
    standin, process = own
    engine = engine_of(process, tmp_path)
    standin.wakes, standin.reason = False, reason
    await engine.sleep()
    waiting = asyncio.create_task(complete(engine, [1, 2, 3], Sampling(max_tokens=1)))
    await engine.wake()
    with pytest.raises(EngineFailed) as failed:
        async with asyncio.timeout(PATIENCE_S):
            await waiting
    *_, advice, why = str(failed.value).splitlines()
    prose(why)
    short = advice == "CUDA out of memory. Reduce max_seq_length to 64."
    assert short is ("memory" in reason), advice
    await engine.close()
    # The server has replaced it: a job that still uses it is told to try again.
    for adapter in (None, AdapterRef("m", 1, "0" * 64)):
        with pytest.raises(EngineFailed) as caught:
            await engine.probe([[1, 2]], adapter)
        prose(caught)


@pytest.mark.parametrize("lost", [False, True])
async def test_the_digest_is_compared_again_after_waking(
    prose: Prose,
    own: tuple[OwnStandin, VllmProcess],
    adapter: tuple[AdapterRef, Path],
    tmp_path: Path,
    lost: bool,
) -> None:
    standin, process = own
    engine = engine_of(process, tmp_path)
    await engine.publish(*adapter)
    assert engine.stats().kv_budget_bytes == 1 << 20
    standin.calls.clear()
    await engine.sleep()
    standin.lost = lost
    await engine.wake()
    assert standin.calls == ["sleep 1", "wake", "hone_hash", "hone_digests"]
    if lost:
        prose(str(engine.failure))
        with pytest.raises(EngineFailed) as caught:
            await complete(engine, [1, 2, 3], Sampling(max_tokens=1), adapter[0])
        prose(caught)
    else:
        assert engine.failure is None
        await complete(engine, [1, 2, 3], Sampling(max_tokens=1), adapter[0])
    await engine.close()


@pytest.mark.parametrize("asleep", [True, False])
async def test_an_adapter_unloaded_as_vllm_wakes_does_not_fail_it(
    own: tuple[OwnStandin, VllmProcess],
    adapter: tuple[AdapterRef, Path],
    tmp_path: Path,
    asleep: bool,
) -> None:
    """Unloading begins while vLLM sleeps, or while its digests are compared."""
    standin, process = own
    engine = engine_of(process, tmp_path)
    await engine.publish(*adapter)
    await engine.sleep()
    standin.unready = 20  # the comparison after waking takes a while
    standin.calls.clear()
    unloading = asyncio.create_task(engine.unload(adapter[0])) if asleep else None
    await asyncio.sleep(0)
    waking = asyncio.create_task(engine.wake())
    async with asyncio.timeout(PATIENCE_S):
        while "hone_digests" not in standin.calls and not waking.done():
            await asyncio.sleep(0.001)
        await (unloading or engine.unload(adapter[0]))
        await waking
    assert engine.failure is None and engine.stats().adapters == ()
    await engine.close()


async def test_a_publish_and_its_proof_make_few_calls_into_the_workers(
    own: tuple[OwnStandin, VllmProcess],
    adapter: tuple[AdapterRef, Path],
    tiny_llama_dir: Path,
    tmp_path: Path,
) -> None:
    """Every one of them stops all requests while it lasts."""
    standin, process = own
    engine = engine_of(process, tmp_path)
    await engine.publish(*adapter)
    second = write_adapter(tmp_path / "b", Decoder.load(tiny_llama_dir), step=2)
    standin.calls.clear()
    old = await engine.probe([[1, 2, 3]], adapter[0], with_hash=False)
    assert (old.sha256, old.logprobs) == (None, ((-1.0, -1.0),))
    assert standin.calls == ["complete"]
    standin.calls.clear()
    await engine.publish(second, tmp_path / "b")
    assert standin.calls == ["hone_read", "load", "hone_hash", "hone_digests"]
    standin.calls.clear()
    new = await engine.probe([[1, 2, 3], [4, 5]], second)
    assert (new.sha256, new.logprobs) == (second.sha256, ((-1.0, -1.0), (-1.0,)))
    # Hashed while vLLM scores; compared when it has.
    assert sorted(standin.calls[:3]) == ["complete", "complete", "hone_hash"]
    assert standin.calls[3:] == ["hone_digests"]
    assert (await engine.probe([])).sha256 == "base"
    await engine.close()


async def test_a_probe_that_fills_the_engines_length_lacks_its_last_token(
    prose: Prose, own: tuple[OwnStandin, VllmProcess], tmp_path: Path
) -> None:
    """vLLM samples one token after those that it scores; a call of that length can be trained on."""
    engine = engine_of(own[1], tmp_path)
    probe = await engine.probe([[1] * 300, [1] * 299])
    assert probe.logprobs == ((-1.0,) * 298, (-1.0,) * 298)
    with pytest.raises(ConfigError) as caught:
        await engine.probe([[1] * 301])
    prose(caught)
    await engine.close()


async def test_workers_are_asked_until_they_have_read_and_hashed(
    own: tuple[OwnStandin, VllmProcess], adapter: tuple[AdapterRef, Path], tmp_path: Path
) -> None:
    standin, process = own
    engine = engine_of(process, tmp_path)
    standin.unread, standin.unready = 1, 2
    await engine.publish(*adapter)
    calls = [*["hone_read"] * 2, "load", "hone_hash", *["hone_digests"] * 3]
    assert standin.calls == calls
    assert engine.stats().adapters == (adapter[0].sha256,)
    await engine.close()


@pytest.mark.parametrize("fault", ["not loaded", "other weights", "another hash"])
async def test_a_publish_that_fails_leaves_nothing_in_vllm(
    prose: Prose,
    own: tuple[OwnStandin, VllmProcess],
    adapter: tuple[AdapterRef, Path],
    tmp_path: Path,
    fault: str,
) -> None:
    standin, process = own
    engine = engine_of(process, tmp_path)
    ref, directory = adapter
    standin.loads, standin.lost = fault != "not loaded", fault == "other weights"
    says = {"not loaded": "vLLM did not load it", "other weights": "holds other weights for"}
    if fault == "another hash":
        ref = AdapterRef("m", 1, "0" * 64)
    with pytest.raises(EngineError) as caught:
        await engine.publish(ref, directory)
    prose(caught, get=says.get(fault, "holds an adapter with hash"))
    assert standin.loaded == {} and engine.stats().adapters == ()
    assert ("remove_lora" in standin.calls) == (fault != "not loaded")
    assert not (tmp_path / "adapters" / ref.sha256).exists()
    await engine.close()


@pytest.mark.parametrize("undone", [False, True])
async def test_an_adapter_that_vllm_did_not_unload_can_be_published_again(
    prose: Prose,
    own: tuple[OwnStandin, VllmProcess],
    adapter: tuple[AdapterRef, Path],
    tmp_path: Path,
    undone: bool,
) -> None:
    """It was served, or a publish that failed was `undone`."""
    standin, process = own
    engine = engine_of(process, tmp_path)
    standin.lost, standin.keeps = undone, 1
    if undone:
        with pytest.raises(EngineError) as caught:
            await engine.publish(*adapter)
        prose(caught)
    else:
        await engine.publish(*adapter)
        with pytest.raises(EngineError) as caught:
            await engine.unload(adapter[0])
        prose(caught)
    assert list(standin.loaded) == [adapter[0].sha256] and engine.stats().adapters == ()
    with pytest.raises(EngineError) as caught:
        await complete(engine, [1, 2], Sampling(max_tokens=1), adapter[0])
    prose(caught)
    standin.lost = False
    await engine.publish(*adapter)
    assert (await engine.probe([[1, 2]], adapter[0])).sha256 == adapter[0].sha256
    (done,) = await complete(engine, [1, 2], Sampling(max_tokens=1), adapter[0])
    assert done.ids == [7] and "remove_lora" in standin.calls  # of the old copy
    await engine.unload(adapter[0])
    assert standin.loaded == {} and not (tmp_path / "adapters" / adapter[0].sha256).exists()
    await engine.close()


@contextmanager
def served(standin: Standin) -> Iterator[str]:
    """The URL at which the stand-in answers in the block."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            transport = getattr(getattr(send, "__self__", None), "transport", None)
            scope.setdefault("extensions", {})["test.transport"] = transport
        await standin.app(scope, receive, send)

    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", lifespan="off"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        thread.join(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture
def vllm() -> Iterator[tuple[Standin, str]]:
    standin = Standin()
    with served(standin) as url:
        yield standin, url


def connect(model: Path, url: str, directory: Path) -> VllmEngine:
    return VllmEngine.connect(str(model), url, directory=directory, max_length=8192)


@pytest.fixture
def adapter(tiny_llama_dir: Path, tmp_path: Path) -> tuple[AdapterRef, Path]:
    return write_adapter(tmp_path / "a", Decoder.load(tiny_llama_dir), step=1), tmp_path / "a"


async def test_no_proxy_of_the_environment_is_used(
    vllm: tuple[Standin, str], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Otherwise the checks would go through the proxy and the requests would not."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    _, url = vllm
    engine = await asyncio.to_thread(connect, model, url, tmp_path / "adapters")
    (completion,) = await complete(engine, [1], Sampling(max_tokens=1))
    assert completion.ids == [7]
    await engine.close()


@pytest.mark.parametrize("stream", [True, False])
async def test_closing_ends_requests_under_way(
    prose: Prose, vllm: tuple[Standin, str], model: Path, tmp_path: Path, stream: bool
):
    standin, url = vllm
    engine = await asyncio.to_thread(connect, model, url, tmp_path / "adapters")
    standin.holds = asyncio.Event()

    async def ask() -> None:
        async for _ in engine.generate([1, 2], Sampling(max_tokens=1), stream=stream):
            pass

    task = asyncio.create_task(ask())
    while not standin.holds.is_set():
        await asyncio.sleep(0.01)
    await engine.close()
    with pytest.raises(EngineError) as caught:
        await asyncio.wait_for(task, PATIENCE_S)
    prose(caught)


async def test_every_sampling_parameter_is_sent(
    vllm: tuple[Standin, str], model: Path, tmp_path: Path
) -> None:
    standin, url = vllm
    engine = await asyncio.to_thread(connect, model, f"{url}/v1/", tmp_path / "shared")
    assert engine.max_length == 300
    way = Sampling(max_tokens=999, temperature=0.5, top_p=0.9, seed=3, stop_ids=(5,), stop=("x",))
    (done,) = await complete(engine, [1, 2, 3], way)
    assert (done.ids, done.masked_logprobs, done.exact) == ([7], [0.0], False)
    sent = dict(standin.bodies[-1])
    assert sent.pop("seed") not in (3, None)
    assert sent == {
        "model": "tiny",
        "prompt": [1, 2, 3],
        "n": 1,
        "max_tokens": 297,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logit_bias": None,
        "structured_outputs": None,
        "stop": ["x"],
        "stop_token_ids": [5],
        "min_tokens": 0,
        "ignore_eos": True,
        "logprobs": 0,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "skip_special_tokens": False,
        "add_special_tokens": False,
    }
    await complete(engine, [1], Sampling(max_tokens=1, temperature=0, top_p=0.5, top_k=3))
    assert {k: standin.bodies[-1][k] for k in ("top_p", "top_k")} == {"top_p": 1.0, "top_k": 0}
    await engine.close()


async def test_constraints_penalties_and_bias_are_sent(
    prose: Prose, vllm: tuple[Standin, str], model: Path, tmp_path: Path
) -> None:
    standin, url = vllm
    spelling_tokenizer().save_pretrained(model)
    engine = await asyncio.to_thread(connect, model, url, tmp_path / "shared")
    constraint = spelled("/(<7>)+/")
    way = Sampling(
        max_tokens=1,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.5,
        logit_bias=((7, 2.0), (9, -100.0)),
        constraint=constraint,
    )
    (done,) = await complete(engine, [1, 2, 3], way)
    sent = standin.bodies[-1]
    penalties = ("presence_penalty", "frequency_penalty", "repetition_penalty")
    assert [sent[key] for key in penalties] == [0.5, -0.5, 1.5]
    assert sent["logit_bias"] == {"7": 2.0, "9": -100.0}
    assert sent["structured_outputs"] == {"grammar": constraint.text}
    assert not sent["ignore_eos"]  # the end of the text is the tokenizer's end token
    assert (done.logprobs, done.exact, done.forced) == ([0.0], False, [0])
    await complete(engine, [1], Sampling(constraint=Constraint("regex", "(?s:.*)")))
    assert standin.bodies[-1]["structured_outputs"] == {"regex": "(?s:.*)"}
    with pytest.raises(GrammarError) as caught:
        await engine.check(Sampling(constraint=spelled('"x"')))
    prose(caught)
    standin.refuses = "this backend knows no Lark"
    for stream in (False, True):
        with pytest.raises(GrammarError) as caught:
            async for _ in engine.generate([1], way, stream=stream):
                pass
        prose(caught)
    await engine.close()


async def test_forced_tokens_are_those_that_the_constraint_left_alone(
    vllm: tuple[Standin, str], model: Path, tmp_path: Path
) -> None:
    standin, url = vllm
    spelling_tokenizer().save_pretrained(model)
    engine = await asyncio.to_thread(connect, model, url, tmp_path / "shared")
    narrowed: list[dict[str, Any]] = [{}, {"top_p": 0.95}, {"top_k": 2}, {"min_p": 0.05}]
    for more in narrowed:
        # Every log-probability is 0: likely tokens have that too. Stop ids are not in vLLM's mask.
        constraint = spelled('"<7>" /(<7>|<8>)(<9>)/')
        way = Sampling(max_tokens=4, stop_ids=(3, 2), constraint=constraint, **more)
        standin.ids = [7, 7, 9, 2]
        (done,) = await complete(engine, [1, 2, 3], way)
        assert (done.ids, done.forced) == ([7, 7, 9, 2], [0, 2, 3]), more
        # vLLM's library may be another version, which leaves a choice where hone's leaves none.
        standin.values = [0.0, -0.4, -0.1, 0.0]
        (done,) = await complete(engine, [1, 2, 3], way)
        assert done.forced == [0, 3], more
        # It allowed another token than hone's would have. From there on only vLLM knows: a token that
        # is certain was forced, unless top-p, top-k or min-p excluded the others.
        standin.ids, standin.values = [7, 5, 9, 2], [0.0, -0.4, -0.1, 0.0]
        (done,) = await complete(engine, [1, 2, 3], way)
        assert done.forced == ([0] if more else [0, 3]), more
        standin.values = []
    await engine.close()


async def test_greedy_samples_are_drawn_once(
    vllm: tuple[Standin, str], model: Path, tmp_path: Path
) -> None:
    """They are equal, and vLLM refuses to draw several."""
    standin, url = vllm
    engine = await asyncio.to_thread(connect, model, url, tmp_path / "shared")
    standin.bodies.clear()
    standin.ids, standin.values = [7, 8], [-0.5, -0.25]
    done = await complete(engine, [1, 2, 3], Sampling(n=3, max_tokens=2, temperature=0))
    assert [(one.ids, one.logprobs, one.finish) for one in done] == [
        ([7, 8], [-0.5, -0.25], "length")
    ] * 3
    assert [body["n"] for body in standin.bodies] == [1]
    assert engine.stats().running == 0
    await engine.close()


async def test_a_temperature_that_vllm_would_raise_is_refused(
    prose: Prose, vllm: tuple[Standin, str], model: Path, tmp_path: Path
) -> None:
    """Below 0.01 vLLM samples at 0.01, and the log-probabilities would be of that."""
    _, url = vllm
    engine = await asyncio.to_thread(connect, model, url, tmp_path / "shared")
    with pytest.raises(ConfigError) as caught:
        await engine.check(Sampling(temperature=0.009))
    prose(caught)
    with pytest.raises(ConfigError) as caught:
        await complete(engine, [1], Sampling(temperature=0.009))
    prose(caught)
    await complete(engine, [1], Sampling(temperature=0.01))
    await engine.close()


async def test_a_server_that_samples_otherwise_than_the_learner_is_refused(
    prose: Prose, vllm: tuple[Standin, str], model: Path, tmp_path: Path
) -> None:
    standin, url = vllm
    standin.top = {"token_id:7": -0.5, "token_id:8": -1.5}
    with pytest.raises(EngineError) as caught:
        await asyncio.to_thread(connect, model, url, tmp_path / "shared")
    prose(caught)
    standin.version = "0.19.1"
    with pytest.raises(EngineError) as caught:
        await asyncio.to_thread(connect, model, url, tmp_path / "shared")
    prose(caught)
    standin.version = "0.31.0"
    config = json.loads((model / "config.json").read_text())
    config["rope_scaling"] = {"type": "longrope", "original_max_position_embeddings": 256}
    (model / "config.json").unlink()
    (model / "config.json").write_text(json.dumps(config | {"rope_parameters": None}))
    with pytest.raises(EngineError) as caught:
        await asyncio.to_thread(connect, model, url, tmp_path / "shared")
    prose(caught)
    with pytest.raises(EngineError) as caught:
        await asyncio.to_thread(connect, model, "http://127.0.0.1:9", tmp_path / "shared")
    prose(caught)


async def test_an_adapter_that_an_earlier_server_left_is_loaded_anew(
    vllm: tuple[Standin, str], model: Path, tmp_path: Path, adapter: tuple[AdapterRef, Path]
) -> None:
    standin, url = vllm
    engine = await asyncio.to_thread(connect, model, url, tmp_path / "shared")
    ref, directory = adapter
    standin.loaded[ref.sha256] = "/gone"
    await engine.publish(ref, directory)
    assert standin.loaded == {ref.sha256: str(tmp_path / "shared" / ref.sha256)}
    assert (await engine.probe([], ref)).sha256 is None
    (done,) = await complete(engine, [1], Sampling(max_tokens=1), ref)
    assert done.ids == [7] and standin.bodies[-1]["model"] == ref.sha256
    await engine.close()
    assert standin.loaded == {} and not (tmp_path / "shared").exists()


async def test_an_adapter_that_was_not_unloaded_is_unloaded_as_the_engine_closes(
    prose: Prose,
    vllm: tuple[Standin, str],
    model: Path,
    tmp_path: Path,
    adapter: tuple[AdapterRef, Path],
) -> None:
    standin, url = vllm
    engine = await asyncio.to_thread(connect, model, url, tmp_path / "shared")
    await engine.publish(*adapter)
    standin.keeps = 1
    with pytest.raises(EngineError) as caught:
        await engine.unload(adapter[0])
    prose(caught)
    assert list(standin.loaded) == [adapter[0].sha256]
    await engine.close()
    assert standin.loaded == {}


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_whose_connection_is_lost_is_sent_once_more(
    vllm: tuple[Standin, str], model: Path, tmp_path: Path, *, stream: bool
) -> None:
    standin, url = vllm
    engine = await asyncio.to_thread(connect, model, url, tmp_path / "shared")
    standin.bodies.clear()
    standin.breaks = 1
    body = {"model": "tiny", "prompt": [1]}
    client = engine._client
    choices = [c async for c in (client.streamed(body) if stream else client.whole(body))]
    assert len(standin.bodies) == 2 and standin.bodies[0] == standin.bodies[1]
    assert [choice["token_ids"] for choice in choices] == [[7]]
    await engine.close()


async def test_a_lost_connection_breaks_no_engine_that_still_answers(
    prose: Prose, vllm: tuple[Standin, str], model: Path, tmp_path: Path
) -> None:
    standin, url = vllm
    engine = await asyncio.to_thread(connect, model, url, tmp_path / "shared")
    standin.broken = True
    with pytest.raises(EngineFailed) as caught:
        await complete(engine, [1], Sampling(max_tokens=1))
    prose(caught)
    assert engine.failure is None
    standin.broken = False
    assert len(await complete(engine, [1], Sampling(max_tokens=1))) == 1
    standin.broken, standin.healthy = True, False
    with pytest.raises(EngineFailed) as caught:
        await complete(engine, [1], Sampling(max_tokens=1))
    prose(caught)
    assert isinstance(engine.failure, EngineFailed)
    await engine.close()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_server_that_has_lost_its_adapters_has_failed(
    prose: Prose,
    vllm: tuple[Standin, str],
    model: Path,
    tmp_path: Path,
    adapter: tuple[AdapterRef, Path],
    *,
    stream: bool,
) -> None:
    standin, url = vllm
    engine = await asyncio.to_thread(connect, model, url, tmp_path / "shared")
    await engine.publish(*adapter)
    standin.loaded.clear()  # as after a restart
    with pytest.raises(EngineFailed) as caught:
        async for _ in engine.generate([1], Sampling(max_tokens=1), adapter[0], stream=stream):
            pass
    prose(caught)
    assert isinstance(engine.failure, EngineFailed)
    await engine.close()
