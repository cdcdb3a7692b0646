"""What every framework's calls must become, as one suite: subclass CaptureConformance and name a client.

In:   a script that runs a framework in its own environment (tests/frameworks/client_*.py)
Out:  failures that name the promise broken

The script talks to a real server over a scripted engine: a system prompt, a turn with two parallel
tool calls, an error 500, the same turn again with one tool call, and an answer. Between the two is a
witness that keeps every byte. What the server recorded is compared with the bytes and with what the
engine sampled; the framework's own account counts for nothing.
"""

import json
import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest
import torch
from peft import PeftModel
from tests.conformance.prompts import rendered
from tests.conformance.scripts import answer, script_of
from tests.conformance.witness import Exchange, Witness
from tests.environments import ROOT, NotInstalled, environment
from tests.fakes import EngineRequest, ScriptedEngine, logprob
from tests.patience import PATIENCE_S
from tests.server.conftest import Server
from tests.server.small_server import LearnerHere
from torch import Tensor
from transformers import AutoModelForCausalLM

from hone.errors import EngineError
from hone.inference.base import AdapterRef, Sampling
from hone.models.lora import Lora
from hone.store.models import ModelRecord
from hone.types import RecordedCall

FRAMEWORKS = ROOT / "tests" / "frameworks"
MODEL = "agent"
ALL, REQUIRE = "HONE_ALL_FRAMEWORKS", "HONE_REQUIRE_FRAMEWORKS"
"""Set by `make test-frameworks`; set where a missing environment is a failure."""
PLAIN = {
    "learning_rate": 1e-3,
    "loss": "dapo",  # every label weighs the same
    "scale_rewards": False,
    "importance_cap": None,
    "max_grad_norm": 1e9,
}
"""A job whose gradient is that of the mean of -advantage x log-probability."""
_QUIET = {"CREWAI_DISABLE_TELEMETRY": "true", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
"""Clients that would otherwise call other hosts."""
_CASE = re.compile(r"in Paris and in Rome\? \(([\w.-]+)\)")


class Talk:
    """The scripted model: what it says next follows from the prompt alone."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.failed: set[str] = set()
        """The rollouts whose second turn has failed once."""

    def __call__(
        self, prompt_ids: Sequence[int], sampling: Sampling, adapter: AdapterRef | None
    ) -> list[int]:
        prompt = self._tokenizer.decode(prompt_ids)
        match = _CASE.search(prompt)
        assert match is not None, f"the question is not in the prompt: {prompt}"
        script = script_of(match[1])
        turn = script.turn(prompt)
        if turn == 1 and match[1] not in self.failed:
            self.failed.add(match[1])
            raise EngineError("the engine fails once in every rollout")
        return self.spell(script.says(turn, match[1]))

    def spell(self, text: str) -> list[int]:
        """The text character by character: encoding it again gives fewer and other ids."""
        pieces = [[p] if "tool_call>" in p else list(p) for p in re.split(r"(</?\w+>)", text)]
        spelt = [self._tokenizer.encode(p, add_special_tokens=False) for ps in pieces for p in ps]
        assert all(len(ids) == 1 for ids in spelt), text
        return [*(one for (one,) in spelt), self._tokenizer.eos_token_id]


@dataclass(frozen=True)
class Served:
    """A running server over the scripted model, with a witness before it."""

    server: Server
    engine: ScriptedEngine
    witness: Witness
    tokenizer: Any
    base_model: Path
    learners: list[LearnerHere]
    """The learner, once a job has started it."""
    typed: Server
    """A server over a real engine and a random model, for typed answers."""
    typed_witness: Witness

    @property
    def step(self) -> int:
        """The step that is served; every framework's training makes another."""
        (newest, *_) = reversed(self.server.state.checkpoints.list(self.model.key))
        return newest.step

    @property
    def model(self) -> ModelRecord:
        return self.server.state.models.find(MODEL)


@dataclass(frozen=True)
class Saw:
    """What came of one rollout, by three witnesses: the bytes, the server and the client."""

    exchanges: list[Exchange]
    """Model calls only."""
    step: int
    """The step that was served."""
    recorded: list[RecordedCall]
    output: str
    seen: list[dict[str, Any]] | None
    """The calls that hone saw in the client's process; None if it was not there."""

    @property
    def calls(self) -> list[RecordedCall]:
        """The recorded calls that were answered."""
        return [call for call in self.recorded if not call.abandoned]

    @property
    def answered(self) -> list[Exchange]:
        return [one for one in self.exchanges if one.status == 200]


def interpreter(name: str, *, usual: bool = True) -> Path:
    """The interpreter of an environment; skips the test if there can be none here.

    `usual`: also in `make test-e2e`, if it is of the first environment.
    """
    if not (usual and name == "a") and os.environ.get(ALL) != "1":
        pytest.skip("`make test-frameworks` runs this")
    try:
        return environment(f"frameworks-{name}", FRAMEWORKS / f"constraints-{name}.txt")
    except NotInstalled as error:
        reason = f"the frameworks' environment {name!r} cannot be made: {error}"
        if os.environ.get(REQUIRE) == "1":
            pytest.fail(reason)
        pytest.skip(reason)


class CaptureConformance:
    """One framework, in every way it can be called."""

    client: ClassVar[str]
    """The script under tests/frameworks that runs it: client_NAME.py."""
    environment: ClassVar[str] = "a"
    """The name of its environment: constraints-NAME.txt."""
    usual: ClassVar[bool] = True
    """Whether `make test-e2e` runs it, if it is of the first environment."""
    ways: ClassVar[Sequence[str]] = (
        *("async", "sync", "async-stream", "sync-stream"),
        *("sync-executor", "async-url"),
    )
    """The rollouts that the script must have run, each named for how it called the model."""
    trained: ClassVar[tuple[str, str]] = ("async", "sync-stream")
    """Two of them, to train on."""
    named: ClassVar[Sequence[str]] = ()
    """Those whose model has a header with the name of the agent (`talk.NAMED`)."""
    continued: ClassVar[Sequence[int | None]] = (None, 0, 1)
    """Which call each prompt continues; None where the client sends back other text than it got."""
    retries_above: ClassVar[bool] = False
    """The layer that retries is above the HTTP client: in its process, each try is a call."""

    @pytest.fixture(scope="class")
    @classmethod
    def saw(cls, served: Served) -> dict[str, Saw]:
        """The client's rollouts, by the way in which they called the model."""
        python, step = interpreter(cls.environment, usual=cls.usual), served.step
        results = run_client(served, cls.client, cls.environment, python)
        results.pop(f"{cls.client}-{cls.environment}.typed")  # of the other server
        name = f"{cls.client}-{cls.environment}"
        return {
            rollout.removeprefix(f"{name}."): Saw(
                [
                    one
                    for one in served.witness.exchanges()
                    if one.rollout == rollout and one.method == "POST"
                ],
                step,
                served.server.state.calls.rollout(rollout),
                **result,
            )
            for rollout, result in results.items()
        }

    def test_every_way_ends_with_the_scripted_answer(self, saw: dict[str, Saw]) -> None:
        assert sorted(saw) == sorted(self.ways)
        for way, one in saw.items():
            assert one.output == answer(f"{self.client}-{self.environment}.{way}")

    def test_the_client_itself_retries_the_error(self, saw: dict[str, Saw]) -> None:
        for one in saw.values():
            assert [exchange.status for exchange in one.exchanges] == [200, 500, 200, 200]
            assert one.exchanges[1].request == one.exchanges[2].request

    def test_every_call_is_recorded_once_in_order_under_its_rollout(
        self, saw: dict[str, Saw]
    ) -> None:
        for one in saw.values():
            assert [call.index for call in one.recorded] == [0, 1, 2, 3]
            assert [{call.id} for call in one.calls] == [x.call_ids for x in one.answered]
            failed = one.recorded[1]  # is on record, and never trained on
            assert failed.abandoned and failed.call.completion_ids == []
            assert failed.call.prompt_ids == one.recorded[2].call.prompt_ids

    def test_no_call_is_unmarked(self, served: Served, saw: dict[str, Saw]) -> None:
        names = (str(served.model.key), served.model.spec.base_model)
        assert served.server.state.calls.unmarked(names) == {}
        lost = [x for x in served.witness.exchanges() if x.method == "POST" and not x.rollout]
        assert lost == []

    def test_ids_logprobs_and_step_are_those_of_the_engine(
        self, served: Served, saw: dict[str, Saw]
    ) -> None:
        for one in saw.values():
            for recorded in one.calls:
                call = recorded.call
                (request,) = _requests(served, call.prompt_ids)
                assert request.adapter is not None and request.adapter.step == one.step
                assert recorded.adapter_sha256 == request.adapter.sha256
                assert call.step == one.step
                assert request.answers == (tuple(call.completion_ids),)
                assert call.logprobs == [logprob(t, i) for i, t in enumerate(call.completion_ids)]
                assert call.exact and not call.forced

    def test_prompts_are_what_the_witness_saw(self, served: Served, saw: dict[str, Saw]) -> None:
        for one in saw.values():
            for exchange, recorded in zip(one.answered, one.calls, strict=True):
                text = served.tokenizer.decode(recorded.call.prompt_ids)
                assert text == rendered(served.tokenizer, exchange, one.answered)

    def test_turns_continue_the_sampled_ids(self, saw: dict[str, Saw]) -> None:
        """What the model sampled is never encoded again, though the client sends it back as text.

        Unless the client sends other text: then the prompt is that text.
        """
        for one in saw.values():
            for after, source in zip(one.calls, self.continued, strict=True):
                assert (after.outcome == "bridged") == (source is not None)
                if source is not None:
                    before = one.calls[source].call
                    path = [*before.prompt_ids, *before.completion_ids]
                    assert after.call.prompt_ids[: len(path)] == path

    def test_hone_saw_the_same_calls_in_the_clients_process(self, saw: dict[str, Saw]) -> None:
        for way, one in saw.items():
            if one.seen is None:
                assert way.endswith("-url")
                continue
            if self.retries_above:
                assert one.seen.pop(1)["status"] == 500
            assert [call["id"] for call in one.seen] == [call.id for call in one.calls]
            assert [call["error"] for call in one.seen] == [None] * 3
            function = "agent.reporter" if way in self.named else "agent"
            assert {call["function"] for call in one.seen} == {function}
            assert {call.call.function for call in one.calls} == {function}
            for call, recorded in zip(one.seen, one.calls, strict=True):
                messages = [_said(message) for message in call["messages"]]
                assert messages == [_said(message) for message in recorded.messages or ()]
            replies = [call["choices"][0]["message"] for call in one.seen]
            assert [_said(reply) for reply in replies] == [_said(call.reply) for call in one.calls]

    def test_a_typed_answer_is_valid_and_recorded(
        self, served: Served, saw: dict[str, Saw]
    ) -> None:
        """The client parsed it, and its model is random: so the server constrained the tokens."""
        rollout = f"{self.client}-{self.environment}.typed"
        (exchange,) = (x for x in served.typed_witness.exchanges() if x.rollout == rollout)
        (recorded,) = served.typed.state.calls.rollout(rollout)
        assert exchange.call_ids == {recorded.id}
        call = recorded.call
        assert call.forced and len(call.forced) < len(call.completion_ids)
        text = recorded.reply["content"] or recorded.reply["tool_calls"][0]["function"]["arguments"]
        assert json.loads(text).keys() == {"city", "warm"}

    def test_the_sampled_tokens_and_only_they_have_gradients(
        self, served: Served, saw: dict[str, Saw]
    ) -> None:
        """The learner's gradient equals that of transformers and PEFT over each call by itself."""
        both = [saw[way] for way in self.trained]  # the second is rewarded
        group = [{"rollout": one.calls[0].rollout, "reward": i} for i, one in enumerate(both)]
        expected = expected_gradient(served, [one.calls for one in both])
        with httpx.Client(base_url=served.server.control_url, timeout=PATIENCE_S) as http:
            done = train(
                http, {"model": MODEL, "groups": [{"trajectories": group}], "config": PLAIN}
            )
        sampled = sum(len(call.call.completion_ids) for one in both for call in one.calls)
        assert done["metrics"]["learn/labels"] == sampled
        gradients = gradient(served.learners[-1].learner.lora)
        assert gradients.keys() == expected.keys()
        total = torch.cat([grad.flatten() for grad in expected.values()]).norm()
        assert total > 0
        for name, grad in expected.items():
            assert (gradients[name] - grad).norm() < 1e-4 * total, name


def gradient(lora: Lora) -> dict[str, Tensor]:
    """What the last job left on the adapter, by PEFT's names."""
    grads = {}
    for key in lora.config.adapted:
        a, b = lora.factors(key)
        grads[key] = a.grad, [part.grad for part in b]
    return dict(Lora(lora.config, grads, rank=lora.rank, alpha=lora.alpha).named())


def expected_gradient(served: Served, calls: Sequence[Sequence[RecordedCall]]) -> dict[str, Tensor]:
    """Of the mean of -advantage x log-probability over the sampled tokens; rewards are 0 and 1."""
    state = served.server.state
    base = AutoModelForCausalLM.from_pretrained(served.base_model, dtype=torch.float32)
    directory = state.checkpoints.get(served.model.key, served.step).path
    model = PeftModel.from_pretrained(base, directory, is_trainable=True)
    count = sum(len(one.call.completion_ids) for rollout in calls for one in rollout)
    for i, rollout in enumerate(calls):
        for one in rollout:
            prompt, completion = one.call.prompt_ids, one.call.completion_ids
            logits = model(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
            picked = (logits / one.call.temperature).log_softmax(-1)
            picked = picked.gather(1, torch.tensor(completion)[:, None])
            (-(i - 0.5) * picked.sum() / count).backward()
    return {
        name.replace(".default", ""): parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def _said(message: dict[str, Any]) -> tuple[str, list[Any]]:
    calls = message.get("tool_calls") or ()
    return message.get("content") or "", [call["function"] for call in calls]


def _requests(served: Served, prompt_ids: list[int]) -> list[EngineRequest]:
    """The requests of the engine with this prompt that it answered."""
    return [one for one in served.engine.requests if list(one.prompt_ids) == prompt_ids]


def run_client(served: Served, client: str, environment: str, python: Path) -> dict[str, Any]:
    """Run a client's script to its end; what it says of each rollout."""
    ours = ("PYTHON", "HONE", "OPENAI", "ANTHROPIC", "LANG", "VIRTUAL_ENV")
    env = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
    given = {
        "framework": f"{client}-{environment}",
        "base_url": f"http://127.0.0.1:{served.witness.port}/v1",
        "model": MODEL,
        "typed_url": f"http://127.0.0.1:{served.typed_witness.port}/v1",
        "typed_model": str(served.base_model),
    }
    done = subprocess.run(
        [python, FRAMEWORKS / f"client_{client}.py"],
        env=env | {"PYTHONPATH": str(ROOT / "src")} | _QUIET,
        input=json.dumps(given),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, f"client_{client}.py ended with {done.returncode}\n{done.stderr}"
    results = json.loads(done.stdout.splitlines()[-1])
    assert results, done.stderr
    return results


def train(http: httpx.Client, body: dict[str, Any]) -> dict[str, Any]:
    """Submit a job and wait for its end; the job."""
    queued = ask(http, "POST", "/v1/training/jobs", body)
    http.get(f"/v1/training/jobs/{queued['id']}/events").raise_for_status()  # until it ends
    ended = ask(http, "GET", f"/v1/training/jobs/{queued['id']}")
    assert ended["state"] == "done", ended
    return ended


def ask(http: httpx.Client, method: str, path: str, body: Any = None) -> dict[str, Any]:
    """The answer's JSON."""
    answer = http.request(method, path, json=body)
    assert answer.is_success, answer.text
    return answer.json()
