"""A whole small server without HTTP: what the tests of the loop run, here or in a child to be killed.

In:   a root directory and a tiny base model
Out:  a State as app.py opens it; as a program, what came of one job
"""

import asyncio
import hashlib
import importlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from tests.patience import PATIENCE_S

from hone.inference.base import Engine
from hone.learner.packed import pack_groups, unpack_groups
from hone.learner.process import LearnerProcess, LearnerSpec, WorkerInfo
from hone.learner.staleness import check_fresh
from hone.server.settings import Settings
from hone.server.state import State
from hone.store import failpoints
from hone.store.jobs import FINAL
from hone.store.models import ModelRecord
from hone.trajectory import Trajectory, TrajectoryGroup
from hone.types import Call, JobInfo, ModelSpec, TrainConfig

CONFIG = TrainConfig(learning_rate=1e-3, groups_per_optimizer_step=1, max_staleness=None)
"""Its groups say step 0, whichever step they are trained from."""
ENDED = "ended.json"
FAILPOINTS = ("learner/progress",)
"""Reached by the learner in this process, after each micro-batch."""


class LearnerHere(LearnerProcess):
    """A learner in this process: the same bits, without the ten seconds a process takes to start."""

    def __init__(self, spec: LearnerSpec, **_: object) -> None:
        import torch

        from hone.learner.body import load_body
        from hone.learner.learner import Learner
        from hone.models.lora import Lora

        torch.set_num_threads(spec.threads)
        body = load_body(spec.model_dir, device="cpu", dtype=getattr(torch, spec.dtype))
        self.learner = Learner(body, Lora.init(body.layout), base_model=spec.base_model)
        self.closed = False
        self.info = WorkerInfo(
            pid=os.getpid(),
            torch=torch.__version__,
            threads=spec.threads,
            device="cpu",
            dtype=spec.dtype,
            deterministic=False,
            sha256=self.learner.lora.sha256,
            notes=body.notes,
        )

    @property
    def alive(self) -> bool:
        return not self.closed

    def when_ended(self, call: Any) -> None: ...

    def ready(self, **_: Any) -> WorkerInfo:
        assert self.info is not None, "it loads where it is made"
        return self.info

    def train(
        self,
        groups: bytes,
        config: Any,
        *,
        job_id: str = "",
        base_step: int | None = None,
        on_progress: Any = None,
        **more: Any,
    ) -> Any:
        unpacked = unpack_groups(groups)
        if base_step is not None:
            check_fresh(job_id, unpacked, base_step, config)

        def report(at: Any) -> None:
            failpoints.failpoint(*FAILPOINTS)
            if on_progress:
                on_progress(asdict(at))

        more = {key: more[key] for key in ("label_logprobs",) if key in more}
        result = self.learner.train(
            unpacked, config, on_progress=report, should_stop=lambda: self.closed, **more
        )
        return json.loads(json.dumps(asdict(result)))

    def save(self, directory: Path, *, picture: bool = False, **_: Any) -> str:
        self.learner.save(directory, picture=picture)
        return self.learner.lora.sha256

    def load(self, directory: Path, *, optimizer: bool = True, **_: Any) -> str:
        self.learner.load(directory, optimizer=optimizer)
        return self.learner.lora.sha256

    def cancel(self) -> None: ...

    def close(self, **_: Any) -> None:
        self.closed = True


class SmallServer(State):
    """A server's state, with a learner in this process, and what tests ask of it."""

    @classmethod
    def at(
        cls,
        root: Path,
        *,
        open_engine: Callable[[str], Engine] | None = None,
        start_learner: Callable[..., LearnerProcess] = LearnerHere,
        **changes: Any,
    ) -> Self:
        """Opened, not started."""
        settings = Settings(**{"root": root, "learner_threads": 1, "device": "cpu", **changes})
        return cls(settings, open_engine=open_engine, start_learner=start_learner)

    def submit(
        self, record: ModelRecord, groups: Sequence[TrajectoryGroup], **changes: Any
    ) -> JobInfo:
        given = {"config": CONFIG, "counts": {}, "request_sha256": "0" * 64, **changes}
        return self.jobs.add(model=record, groups=pack_groups(groups), **given)

    async def ended(self, job_id: str) -> JobInfo:
        """The job once it has ended; sees to it that somebody works on it."""
        self.service.wake()
        return await self.reached(job_id, *FINAL)

    async def reached(self, job_id: str, *events: str) -> JobInfo:
        """The job once it has had one of these events."""
        seen = 0
        async with asyncio.timeout(PATIENCE_S):
            while not any(e.type in events for e in self.jobs.events(job_id, limit=-1)):
                await self.jobs.wait_event(job_id, seen, PATIENCE_S)
                seen = self.jobs.events(job_id, limit=-1)[-1].id
        return self.jobs.get(job_id)

    @classmethod
    @asynccontextmanager
    async def started(cls, root: Path, **changes: Any) -> AsyncIterator[Self]:
        """Opened, started, and closed at the end of the block."""
        server = cls.at(root, **changes)
        async with server.running():
            yield server

    def event_types(self, job_id: str) -> list[str]:
        """The types of a job's events, but for progress."""
        return [e.type for e in self.jobs.events(job_id, limit=-1) if e.type != "progress"]

    async def trained(self, base_model: Path, *firsts: int) -> list[str]:
        """Digests of the steps that jobs make, one after the other, of groups from each `first`."""
        record = self.models.register(spec(base_model))
        made = []
        for first in firsts:
            job = await self.ended(self.submit(record, token_groups(first=first)).id)
            assert job.state == "done" and job.step is not None, job
            made.append(digest(self.checkpoints.get(record.key, job.step).path))
        return made

    async def close(self) -> None:
        """Twice does no harm."""
        await self.service.close()
        await self.serving.close()
        self.store.close()


def spec(base_model: Path, name: str = "agent", **changes: Any) -> ModelSpec:
    given = {"name": name, "base_model": str(base_model), "rank": 4, "alpha": 8.0, "seed": 7}
    return ModelSpec(**{**given, **changes})


def token_groups(count: int = 3, *, flat: bool = False, first: int = 0) -> list[TrajectoryGroup]:
    """Groups of three one-call trajectories that share a prompt; equal rewards where `flat`."""
    groups = []
    for g in range(first, first + count):
        sampled = [
            Call(prompt_ids=[1, 20, 30 + g % 50], completion_ids=ids, logprobs=[-5.0] * len(ids))
            for ids in ([100 + g % 50, 50], [60, 150 + g % 50], [80])
        ]
        paired = zip(sampled, [0.5] * 3 if flat else [1.0, 0.0, 0.5], strict=True)
        groups.append(TrajectoryGroup([Trajectory(calls=[c], reward=r) for c, r in paired]))
    return groups


def digest(directory: Path) -> str:
    """Of adapter and optimizer, byte for byte."""
    files = ("adapter_model.safetensors", "adapter_config.json", "optimizer.safetensors")
    return hashlib.sha256(b"".join((directory / name).read_bytes() for name in files)).hexdigest()


# ---- as a program -----------------------------------------------------------------------------


async def one_job(
    root: Path, base_model: Path, loss: str = "grpo", **changes: Any
) -> dict[str, Any]:
    """Submit a job if there is none, work until it has ended, and say what came of it."""
    server = SmallServer.at(root, **changes)
    record = server.models.register(spec(base_model))
    config = TrainConfig(**{**CONFIG.model_dump(), "loss": loss})
    job = server.submit(record, token_groups(6), config=config, idempotency_key="the job")
    await server.service.start()
    job = await server.ended(job.id)
    newest = server.checkpoints.newest(record.key)
    written = server.checkpoints.list(record.key)
    policy = await server.serving.resolve("agent")
    ended = {
        "state": job.state,
        "base_step": job.base_step,
        "step": job.step,
        "attempts": job.attempts,
        "failure": job.failure.message if job.failure else None,
        "served": [policy.step, policy.adapter and policy.adapter.sha256],
        "of_job": [c.step for c in written if c.manifest["job"] == job.id],
        "disk": sorted(
            p.name for p in (server.checkpoints.model_dir(record.key) / "checkpoints").iterdir()
        ),
        "sha256": newest and newest.sha256,
        "digest": newest and digest(newest.path),
        "events": server.event_types(job.id),
    }
    await server.close()
    return ended


def run(order: dict[str, Any], **changes: Any) -> None:
    """One run of a server, to its end or to its death; what came of it is left under its root."""
    root = Path(order["root"])
    if order.get("failpoint"):
        os.environ["HONE_FAILPOINT"] = order["failpoint"]
        importlib.reload(failpoints)
    if order.get("after_s"):
        signal.setitimer(signal.ITIMER_REAL, order["after_s"])  # nobody handles it: it kills
    loss = order.get("loss", "grpo")
    ended = asyncio.run(one_job(root, Path(order["model"]), loss, **changes))
    signal.setitimer(signal.ITIMER_REAL, 0)
    (root / ENDED).write_text(json.dumps(ended))


def fork_for_each_order() -> None:
    """Load everything once; then a child for each line of stdin, its exit status as a line out."""
    import torch
    from transformers import PreTrainedTokenizerFast  # noqa: F401

    import hone.inference.embedded.engine
    import hone.learner.learner  # noqa: F401

    torch.set_num_threads(1)  # no pool of threads that a fork would lose
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            run(json.loads(line))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        sys.stdout.write(json.dumps(os.waitstatus_to_exitcode(status)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        run({"root": sys.argv[1], "model": sys.argv[2]}, start_learner=LearnerProcess.launch)
    else:
        fork_for_each_order()
