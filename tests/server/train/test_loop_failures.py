"""Jobs that fail: each has its reason, the previous step stays served, and the next job runs."""

import asyncio
import errno
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.chat.conftest import build_tokenizer
from tests.patience import PATIENCE_S
from tests.prose import Prose
from tests.server.conftest import write_model
from tests.server.small_server import LearnerHere, SmallServer, digest, spec, token_groups

from hone.errors import Conflict, EngineError, EngineFailed, LearnerDied
from hone.inference.base import AdapterRef, Probe
from hone.inference.embedded.engine import EmbeddedEngine
from hone.learner.process import LearnerSpec, WorkerInfo
from hone.models.decoder import Decoder
from hone.server import supervision
from hone.server.train import loop
from hone.server.train.learners import PATIENT
from hone.store import checkpoints
from hone.types import ModelKey

KEY = ModelKey("default", "agent")


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


async def test_a_bad_job_fails_with_its_reason_and_the_next_one_runs(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    async with SmallServer.started(tmp_path / "hone") as server:
        record = server.models.register(spec(tiny_model))
        groups = token_groups()
        groups[0].trajectories[0].calls[0].completion_ids[0] = 9999
        submitted = server.submit(record, groups, calls=["call-1"])
        job = await server.ended(submitted.id)
        assert server.store.query("SELECT * FROM call_refs") == []
        assert job.state == "failed" and job.failure is not None
        assert job.failure.type == "SampleRefused" and "9999" in job.failure.message
        assert job.failure.traceback == ""  # it is in the log: clients see no stack traces
        assert "Traceback" in caplog.text
        assert server.event_types(job.id) == ["queued", "started", "failed"]
        await server.trained(tiny_model, 0)


async def test_a_model_that_cannot_be_loaded_fails_its_jobs(tmp_path: Path):
    async with SmallServer.started(tmp_path / "hone") as server:
        record = server.models.register(spec(tmp_path / "nothing"))
        job = await server.ended(server.submit(record, token_groups()).id)
        assert job.state == "failed" and job.failure is not None
        assert job.failure.type == "ModelNotFound" and job.attempts == 0
        assert server.event_types(job.id) == ["queued", "failed"]


@pytest.mark.parametrize(
    ("seed", "family", "template"),
    [
        (1, "qwen2.5-instruct", None),
        (0, "smollm2-instruct", None),
        (0, "qwen2.5-instruct", "{{ messages[0].content }}"),
    ],
)
async def test_steps_over_other_files_are_refused(
    prose: Prose,
    tmp_path: Path,
    tokenizer: Any,
    seed: int,
    family: str,
    template: str | None,
):
    model = write_model(tmp_path / "model", tokenizer)
    async with SmallServer.started(tmp_path / "hone") as server:
        await server.trained(model, 0)
        write_model(tmp_path / "model", build_tokenizer(family, template), seed=seed)
    async with SmallServer.started(tmp_path / "hone") as again:
        record = again.models.find("agent")
        with pytest.raises(Conflict) as caught:
            await again.service.prepare(record)
        prose(caught)
        with pytest.raises(Conflict) as caught:
            await again.serving.resolve("agent")
        prose(caught)
        job = await again.ended(again.submit(record, token_groups()).id)
        assert job.failure is not None and job.failure.type == "Conflict"


class StuckEngine(EmbeddedEngine):
    """Says that it has published, and goes on with what it had."""

    honest = True
    """Whether it tells the hash of what it really serves."""
    mended = False

    async def publish(self, adapter: AdapterRef, directory: Path) -> None:
        if self.mended or not self._adapters:
            await super().publish(adapter, directory)
            return
        self._adapters[adapter.sha256] = next(iter(self._adapters.values()))

    async def probe(
        self,
        sequences: Sequence[Sequence[int]],
        adapter: AdapterRef | None = None,
        *,
        with_hash: bool = True,
    ) -> Probe:
        probe = await super().probe(sequences, adapter, with_hash=with_hash)
        if self.honest or adapter is None:
            return probe
        return Probe(adapter.sha256, probe.logprobs)


@pytest.mark.parametrize(
    "honest",
    [
        True,
        False,
    ],
)
async def test_an_engine_that_keeps_the_old_adapter_fails_the_proof(
    prose: Prose, tiny_model: Path, tmp_path: Path, honest: bool
):
    def stuck(name: str) -> StuckEngine:
        engine = StuckEngine(Decoder.load(Path(name)), kv_budget_bytes=1 << 24)
        engine.honest = honest
        return engine

    async with SmallServer.started(tmp_path / "hone", open_engine=stuck) as server:
        record = server.models.register(spec(tiny_model))
        (first,) = await server.trained(tiny_model, 0)  # the first adapter it does take
        job = await server.ended(server.submit(record, token_groups(first=10)).id)
        assert job.state == "failed" and job.failure is not None and job.step is None
        assert job.failure.type == "NotProved"
        prose(job.failure.message)
        assert server.event_types(job.id)[-2:] == ["published", "failed"]
        assert server.serving.newest(record)[0] == 1
        disk = server.checkpoints.model_dir(KEY) / "checkpoints"
        assert sorted(p.name for p in disk.iterdir()) == ["0000", "0001", "0002.unproved"]
        not_proved = digest(disk / "0002.unproved")
        # It does not keep its place in the engine, or the same hash would never be loaded again.
        engine = (await server.serving.engines.base(str(tiny_model))).engine
        assert isinstance(engine, StuckEngine)
        assert engine.stats().adapters == (server.checkpoints.get(KEY, 1).sha256,)
    # A restart does not serve it either, and a sound engine gets the same job through.
    async with SmallServer.started(tmp_path / "hone") as again:
        policy = await again.serving.resolve("agent")
        assert policy.step == 1 and digest(again.checkpoints.get(KEY, 1).path) == first
        (second,) = await again.trained(tiny_model, 10)
        assert second == not_proved


async def test_an_unproved_step_is_loaded_again_when_it_is_retried(
    tiny_model: Path, tmp_path: Path
):
    engine = StuckEngine(Decoder.load(tiny_model), kv_budget_bytes=1 << 24)
    async with SmallServer.started(tmp_path / "hone", open_engine=lambda _: engine) as server:
        record = server.models.register(spec(tiny_model))
        await server.trained(tiny_model, 0)
        job = await server.ended(server.submit(record, token_groups(first=10)).id)
        assert job.failure is not None and job.failure.type == "NotProved"
        engine.mended = True
        await server.trained(tiny_model, 10)  # the same bits
        assert server.serving.newest(record)[0] == 2


class ShowsNoTensors(EmbeddedEngine):
    """As a vLLM that somebody else started. Its log-probabilities are rounded to steps of `rounding`."""

    rounding = 0.0

    async def probe(
        self,
        sequences: Sequence[Sequence[int]],
        adapter: AdapterRef | None = None,
        *,
        with_hash: bool = True,
    ) -> Probe:
        probe = await super().probe(sequences, adapter, with_hash=False)
        step = self.rounding
        rows = [[round(p / step) * step if step else p for p in row] for row in probe.logprobs]
        return Probe(None, tuple(map(tuple, rows)))


@pytest.mark.parametrize(
    ("rounding", "verdict"), [(0.0, "proved by logprob alone"), (4.0, "unproved")]
)
async def test_an_engine_that_shows_no_tensors_serves_a_step_and_says_if_it_is_not_proved(
    tiny_model: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    rounding: float,
    verdict: str,
):
    engine = ShowsNoTensors(Decoder.load(tiny_model), kv_budget_bytes=1 << 24)
    engine.rounding = rounding
    async with SmallServer.started(tmp_path / "hone", open_engine=lambda _: engine) as server:
        record = server.models.register(spec(tiny_model))
        job = await server.ended(server.submit(record, token_groups()).id)
        assert job.state == "done" and job.step == 1
        proved = next(e.data for e in server.jobs.events(job.id) if e.type == "proved")
    assert proved["verdict"] == verdict
    said = [r.levelname for r in caplog.records if "served, but not proved" in r.getMessage()]
    assert said == (["WARNING"] if verdict == "unproved" else [])


class TellsCalls(EmbeddedEngine):
    """Remembers publishes and probes in the order in which they began."""

    fails = 0
    """So many publishes of step 2 fail as those of an engine that died."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.calls: list[tuple[str, int, bool]] = []
        self.directories: list[str] = []

    async def publish(self, adapter: AdapterRef, directory: Path) -> None:
        self.calls.append(("publish", adapter.step, True))
        self.directories.append(directory.name)
        if adapter.step == 2 and self.fails:
            self.fails -= 1
            raise EngineFailed("it died")
        await super().publish(adapter, directory)

    async def probe(
        self,
        sequences: Sequence[Sequence[int]],
        adapter: AdapterRef | None = None,
        *,
        with_hash: bool = True,
    ) -> Probe:
        assert sequences
        self.calls.append(("probe", adapter.step if adapter else 0, with_hash))
        return await super().probe(sequences, adapter, with_hash=with_hash)


@pytest.mark.parametrize("fails", [0, 1])
async def test_the_step_before_is_probed_before_the_publish(
    tiny_model: Path, tmp_path: Path, fails: int
):
    """Its hash is not asked for. The step is loaded while it is saved, or else afterwards."""
    engine = TellsCalls(Decoder.load(tiny_model), kv_budget_bytes=1 << 24)
    async with SmallServer.started(tmp_path / "hone", open_engine=lambda _: engine) as server:
        await server.trained(tiny_model, 0)
        assert engine.calls == [("probe", 0, False), ("publish", 1, True), ("probe", 1, True)]
        engine.calls.clear()
        engine.fails = fails
        await server.trained(tiny_model, 10)
    assert not server.service._probing
    before, publish, after = ("probe", 1, False), ("publish", 2, True), ("probe", 2, True)
    assert engine.calls == [before, publish, *[publish] * fails, after]
    saving, saved = ".0002.unproved.partial", "0002.unproved"
    assert engine.directories[1:] == [saving, *[saved] * fails]


async def test_a_step_that_could_not_be_saved_is_loaded_anew_once_it_is(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(supervision, "FIRST_S", 0.01)
    engine = TellsCalls(Decoder.load(tiny_model), kv_budget_bytes=1 << 24)

    def broken(path: Path) -> None:
        monkeypatch.undo()
        raise OSError(errno.EIO, "the disk is broken", str(path))

    async with SmallServer.started(tmp_path / "hone", open_engine=lambda _: engine) as server:
        await server.trained(tiny_model, 0)
        engine.calls.clear()
        monkeypatch.setattr(checkpoints, "sync", broken)
        await server.trained(tiny_model, 10)
    assert engine.calls.count(("publish", 2, True)) == 2


class LoadsSaved(TellsCalls):
    """Waits with a step until it is saved, like an engine that sleeps or is opened again."""

    async def publish(self, adapter: AdapterRef, directory: Path) -> None:
        if directory.name.endswith(".partial"):
            await asyncio.Event().wait()
        await super().publish(adapter, directory)


async def test_no_step_waits_for_long_to_be_saved_until_its_engine_has_loaded_it(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(loop, "LOAD_S", 0.01)
    engine = LoadsSaved(Decoder.load(tiny_model), kv_budget_bytes=1 << 24)
    async with (
        SmallServer.started(tmp_path / "hone", open_engine=lambda _: engine) as server,
        asyncio.timeout(PATIENCE_S),
    ):
        await server.trained(tiny_model, 0)
        await server.trained(tiny_model, 10)
    assert engine.directories == ["0001.unproved", "0002.unproved"]


async def test_an_engine_that_cannot_publish_leaves_no_step(tiny_model: Path, tmp_path: Path):
    class Full(EmbeddedEngine):
        async def publish(self, adapter: AdapterRef, directory: Path) -> None:
            raise MemoryError("no room for another adapter")

    def full(name: str) -> Full:
        return Full(Decoder.load(Path(name)), kv_budget_bytes=1 << 24)

    async with SmallServer.started(tmp_path / "hone", open_engine=full) as server:
        record = server.models.register(spec(tiny_model))
        job = await server.ended(server.submit(record, token_groups()).id)
        assert job.failure is not None and job.failure.type == "MemoryError"
        assert [c.step for c in server.checkpoints.list(KEY)] == [0]
        assert server.serving.newest(record) == (0, None)


@pytest.mark.parametrize("deaths", [1, 3])
async def test_a_learner_that_dies_is_replaced_and_its_job_tried_again(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deaths: int
):
    monkeypatch.setattr(supervision, "FIRST_S", 0.01)
    started: list[tuple[LearnerSpec, Any]] = []

    class Mortal(LearnerHere):
        """The first ones die under their first job."""

        def __init__(self, spec: LearnerSpec, **how: object) -> None:
            super().__init__(spec)
            started.append((spec, how))

        def train(self, *args: Any, **more: Any) -> Any:
            if len(started) <= deaths:
                raise LearnerDied("learner process 7, during 'train': it ended (signal SIGKILL)")
            return super().train(*args, **more)

    async with SmallServer.started(
        tmp_path / "hone", start_learner=Mortal, learner_threads=2
    ) as server:
        record = server.models.register(spec(tiny_model))
        job = await server.ended(server.submit(record, token_groups()).id)
        if deaths == 1:
            assert (job.state, job.retries, job.waiting_for) == ("done", 1, None), job
            again = [e.data for e in server.jobs.events(job.id) if e.type == "queued"][1]
            assert "SIGKILL" in again["waiting_for"]
        else:  # it is taken for the cause
            assert job.state == "failed" and job.failure is not None and job.attempts == 3
            assert job.failure.type == "LearnerDied" and "SIGKILL" in job.failure.message
        await server.trained(tiny_model, 0, 10)
        assert len(started) == deaths + 1  # the last one is kept for the jobs after it
        assert server.service.parts()["learner"] == {"status": "ok", "loaded": True}
        assert all(spec.threads == 2 for spec, _ in started)
        assert all(how == {"gives_way": False, "env": PATIENT} for _, how in started)


class Held:
    """Who waits for it waits until the test lets go."""

    def __init__(self) -> None:
        self.reached, self.let_go = threading.Event(), threading.Event()

    def wait(self) -> None:
        self.reached.set()
        assert self.let_go.wait(PATIENCE_S)


class HeldEngine(EmbeddedEngine):
    def __init__(self, name: str, held: dict[str, Held]) -> None:
        held["engine"].wait()
        super().__init__(Decoder.load(Path(name)), kv_budget_bytes=1 << 24)
        self._held = held

    async def sleep(self) -> None:
        await asyncio.to_thread(self._held["pause"].wait)
        await super().sleep()

    async def publish(self, adapter: AdapterRef, directory: Path) -> None:
        if directory.name.endswith(".partial"):
            raise EngineError("it does not load a step that is not saved")
        await asyncio.to_thread(self._held["publish"].wait)
        await super().publish(adapter, directory)

    async def probe(self, *args: Any, **more: Any) -> Probe:
        await asyncio.to_thread(self._held["proof"].wait)
        return await super().probe(*args, **more)


@pytest.mark.parametrize("waits_for", ["engine", "pause", "learner", "publish", "proof"])
async def test_a_job_is_cancelled_whatever_it_waits_for(
    tiny_model: Path, tmp_path: Path, waits_for: str
):
    """The wait goes on until the test has seen the end of the job."""
    held: defaultdict[str, Held] = defaultdict(Held)
    for stage in {"engine", "pause", "learner", "publish", "proof"} - {waits_for}:
        held[stage].let_go.set()

    class HeldLearner(LearnerHere):
        def ready(self, **_: Any) -> WorkerInfo:
            held["learner"].wait()
            return super().ready()

    async with SmallServer.started(
        tmp_path / "hone",
        open_engine=lambda name: HeldEngine(name, held),
        start_learner=HeldLearner,
        serving_during_training="pause",
    ) as server:
        record = server.models.register(spec(tiny_model))
        job = server.submit(record, token_groups())
        server.service.wake()
        try:
            assert await asyncio.to_thread(held[waits_for].reached.wait, PATIENCE_S)
            await server.reached(job.id, "published" if waits_for == "proof" else "started")
            assert server.jobs.request_cancel(job.id).state == "running"
            ended = await server.ended(job.id)
        finally:
            held[waits_for].let_go.set()
        assert (ended.state, ended.step) == ("cancelled", None)
        assert server.event_types(job.id)[-2:] == ["cancelling", "cancelled"]
        assert server.serving.newest(record) == (0, None)
        assert [c.step for c in server.checkpoints.list(KEY)] == [0]
        base = await server.serving.engines.base(str(tiny_model))
        assert not base.adapters.unproved  # the engine may unload it
        await server.trained(tiny_model, 10)
