"""No request makes the server fail, hang, or lose what it accepted."""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from tests.server.target import CASES, INFERENCE, Target, bodies, inference_bodies

from hone.server.settings import Settings
from hone.server.state import State

pytestmark = pytest.mark.e2e

USUAL = 1000
JOBS = "/v1/training/jobs"
SLOW = ("POST /v1/training/jobs", "POST /_train_model", "POST /_log")
"""Schemathesis takes half a second to think of one; `bodies` makes them by the thousand."""


def examples(count: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The same cases in every run of the test-suite; others in every run of `make fuzz`."""
    return settings(
        max_examples=count,
        deadline=None,
        database=None,
        derandomize=CASES <= USUAL,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=[*HealthCheck],  # pyright: ignore[reportArgumentType] - its members
    )


@pytest.fixture(scope="module")
def target(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, tokenizer: Any
) -> Iterator[Target]:
    from huggingface_hub import constants

    with pytest.MonkeyPatch.context() as patch:
        # Models of made-up names are looked for; they must not be looked for on the network.
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        patch.setenv("HONE_HOME", str(tmp_path_factory.mktemp("home")))
        target = Target(tmp_path_factory.mktemp("hone"), tiny_model, tokenizer).start()
        yield target
        target.stop()


@pytest.mark.timeout(max(600, CASES // 5))
def test_invalid_requests(target: Target):
    schema = schemathesis.openapi.from_dict(target.openapi)
    operations: list[Any] = [result.ok() for result in schema.get_all_operations()]  # pyright: ignore[reportAttributeAccessIssue] - a wrong schema fails here
    assert len(operations) > 30
    each = max(1, CASES * 4 // 10 // (2 * len(operations)))
    for operation in operations:
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            count = max(1, each // 8) if operation.label in SLOW else each
            _fuzz(target, operation, mode, count)


def _fuzz(target: Target, operation: Any, mode: GenerationMode, count: int) -> None:
    from hypothesis.errors import Unsatisfiable

    # A model that was renamed or deleted is gone; the one that jobs are sent for must stay.
    removes = operation.label.endswith("/rename") or operation.label.startswith("DELETE ")
    name = "spare" if removes else "agent"
    known = {"project": "default", "name": name, "rollout_id": "r0", "step": 0}

    @examples(count)
    @given(case=operation.as_strategy(generation_mode=mode), data=st.data())
    def run(case: Any, data: st.DataObject) -> None:
        jobs = target.accepted[-1:] or ["job-0"]
        for key in case.path_parameters:
            if data.draw(st.integers(0, 3)):
                case.path_parameters[key] = {**known, "job_id": jobs[0]}.get(key, "x")
        if isinstance(case.body, dict) and data.draw(st.booleans()):
            for key, value in {"model": "agent", "base_model": str(target.base_model)}.items():
                if isinstance(case.body.get(key), str):
                    case.body[key] = value
        sent = requests.Request(**case.as_transport_kwargs(base_url="http://localhost")).prepare()
        body: Any = sent.body.encode() if isinstance(sent.body, str) else sent.body or b""
        headers = {k: str(v) for k, v in sent.headers.items() if k.lower() == "last-event-id"}
        target.send(str(sent.method), str(sent.url), body, **headers)

    try:
        run()
    except Unsatisfiable:
        return  # nothing about this request can be wrong


@pytest.mark.timeout(max(600, CASES // 5))
def test_malformed_output_formats(target: Target, capsys: pytest.CaptureFixture[str]):
    """Every inference route, with a model that exists, so that the rest of the body is read."""
    operations = [
        (method, path)
        for path, methods in target.openapi["paths"].items()
        for method, operation in methods.items()
        if {"openai", "anthropic", "vllm"} & {*operation.get("tags", ())}
    ]
    without_body = {path for method, path in operations if "{response_id}" in path}
    assert {path for method, path in operations if method == "post"} - without_body == {*INFERENCE}
    addresses = [*INFERENCE, *(f"/rollout/r0{route}" for route in INFERENCE if "/v1/" in route)]
    sent, answered, sampled = Counter[str](), Counter[str](), Counter[str]()

    def bend(address: str) -> None:
        @examples(max(8, CASES * 3 // 10 // len(addresses)))
        @given(body=inference_bodies(address.removeprefix("/rollout/r0")))
        def run(body: bytes) -> None:
            before = len(target.engine.requests)
            answer = target.send("POST", address, body)
            sent[address] += 1
            answered[address] += answer.status_code == 200
            sampled[address] += len(target.engine.requests) - before

        run()

    for address in addresses:
        bend(address)
    for method, path in operations:
        if method == "post" and path not in without_body:
            continue
        for prefix in ("", "/rollout/r0") if path.startswith("/v1/") else ("",):
            body = json.dumps({"model": "agent", "input": "the weather"}).encode()
            response = json.loads(target.send("POST", "/v1/responses", body).content)["id"]
            address = prefix + path.format(name="agent", response_id=response)
            status = target.send(method.upper(), address).status_code
            name = f"{method} {prefix}{path}"
            sent[name] += 1
            # A response is complete when it is returned, and cannot be cancelled.
            answered[name] += status == (400 if path.endswith("/cancel") else 200)
    with capsys.disabled():
        for address, count in sent.items():
            counts = f"{answered[address]:6d} answered {sampled[address]:6d} sampled"
            print(f"  {address:56s} {count:6d} sent {counts}")  # noqa: T201  # the result
    assert not [address for address in sent if not answered[address]], "never reached"
    asks = ("completions", "/responses", "/messages")
    unsampled = [a for a in addresses if a.endswith(asks) and sampled[a] < sent[a] // 4]
    assert not unsampled, "their bodies seldom reach the engine"


@pytest.mark.timeout(max(600, CASES // 5))
def test_malformed_jobs(target: Target):
    before = target.statuses.copy()

    @examples(max(CASES - before.total(), CASES // 2))
    @given(body=bodies(target.choices))
    def run(body: bytes) -> None:
        answer = target.send("POST", JOBS, body)
        assert answer.status_code in (202, 400, 404, 409, 422), answer.text

    run()
    statuses = target.statuses - before
    assert min(statuses[202], statuses[422]) > CASES // 20, statuses


def test_nothing_accepted_is_lost(target: Target):
    """After all of the above: every job is there, was trained or cancelled, and outlives the server."""
    assert target.statuses.total() >= CASES, "the tests above run first"
    jobs = target.ended()
    # A body bent where it said max_staleness may have been on time when it was accepted only.
    bad = [
        job
        for job in jobs.values()
        if job.state not in ("done", "cancelled")
        and not (job.failure and job.failure.type == "SampleRefused")
    ]
    assert not bad, bad[0]
    listed = json.loads(target.send("GET", f"{JOBS}?limit=1000").content)
    assert {job["id"] for job in listed} == set(list(jobs)[:1000])
    target.stop()
    again = State(Settings(root=target.root, device="cpu"))
    try:
        assert {job.id: job for job in again.jobs.list(limit=-1)} == jobs
        assert all(again.jobs.packed_groups(job) for job in list(jobs)[:50])
    finally:
        again.store.close()
    target.start()
