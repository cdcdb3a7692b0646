"""Failures of the policy and of its evaluator, in training and validation: none is lost."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from statistics import fmean
from typing import Any

import pytest
from tests.finetune.trainers import Bench
from tests.prose import Prose
from tests.workflow.endpoint import Endpoint, Reply, serving

from hone.errors import AgentCrashed, ConfigError, PolicyFailure
from hone.evaluation.base import EvalInputItem, EvalOutputItem
from hone.evaluation.evaluators import ExactMatch
from hone.evaluation.judge import LlmJudge
from hone.evaluation.ruler import RulerConfig
from hone.evaluation.run import Evaluation
from hone.files.event_log import read
from hone.files.rollout_record import RolloutRecord, kinds_at_close
from hone.finetune.base import TrainingStatusEnum
from hone.finetune.builder import RolloutBuilder, RolloutBuilderConfig
from hone.finetune.journal import Journal
from hone.report.history import RunHistory
from hone.workflow.function import Function
from hone.workflow.llm import LLM

COMPLETED, FAILED = TrainingStatusEnum.COMPLETED, TrainingStatusEnum.FAILED
LOGPROBS = {"content": [{"token": "4", "logprob": -0.5, "bytes": [52], "top_logprobs": []}]}
VALUES = {"right": "1", "wrong": "0", "bad": "-0.5"}
"""What an answer of the model is worth; the others are malformed."""
BODY = "Internal Server Error"


class Policy(Endpoint):
    """A model that answers by step and question."""

    def __init__(self, answer: Callable[[str], str]) -> None:
        super().__init__()
        self.answer = answer

    def reply_to(self, body: dict[str, Any]) -> Reply:
        text = self.answer(body["messages"][-1]["content"])
        return Reply(text, more={"logprobs": LOGPROBS})


class Reward:
    """The value of the answer; raises KeyError for a malformed one."""

    async def evaluate_item(self, item: EvalInputItem) -> EvalOutputItem:
        known = {**VALUES, **{value: value for value in VALUES.values()}}
        return EvalOutputItem(id=item.id, score=float(known[item.output_obj]))


async def strict(text: str) -> str:
    """An agent that raises KeyError for a malformed answer."""
    return VALUES[text]


async def parsing(text: str) -> str:
    """One that expects JSON."""
    return VALUES[text] if text in VALUES else json.loads(text)


async def lenient(text: str) -> str:
    """One that returns any answer: its evaluator raises."""
    return text


async def fails(text: str) -> str:
    """One that says what is the model's fault."""
    if text not in VALUES:
        raise PolicyFailure(f"{text!r} is no answer")
    return VALUES[text]


Agent = Callable[[str], Any]


class Trained:
    """A bench whose agent calls a model at an endpoint."""

    def __init__(self, bench: Bench, llm: LLM) -> None:
        self.bench, self.llm = bench, llm
        self.ran: Counter[str] = Counter()
        """How often the agent ran on each question."""
        self.agent: Agent = strict
        self.reward: Any = Reward()
        self.options: dict[str, Any] = {}
        """Further arguments of evaluations."""

    def evaluation(self, names: list[str]) -> Evaluation:
        async def run(question: str) -> str:
            self.ran[question] += 1
            answer = await self.llm.chat([{"role": "user", "content": question}])
            return await self.agent(answer.choices[0].message.content or "")

        return Evaluation(
            workflow=Function.of("<workflow>", run),
            items=[EvalInputItem(id=name, input_obj=name) for name in names],
            evaluators={"score": self.reward},
            max_concurrency=4,
            **self.options,
        )

    def train(self, num_examples: int, *, generations: int = 2) -> None:
        names = [f"t{n}" for n in range(num_examples)]
        self.bench.training = self.evaluation(names)
        config = RolloutBuilderConfig(num_generations=generations)
        self.bench.real_builder = RolloutBuilder(config)
        self.bench.real_builder.adapter = self.bench.adapter

    @property
    def history(self) -> RunHistory:
        return RunHistory.of(read(self.bench.directory / "events.jsonl"))

    def records(self, epoch: int = 0, round: int = 0) -> list[RolloutRecord]:
        with Journal.open(self.bench.directory, {}) as journal:
            return journal.records("train", epoch, round)

    def sent(self, job: int) -> list[list[float]]:
        """Rewards of the groups of a job."""
        groups = list(self.bench.adapter.jobs.values())[job].trajectories
        return [sorted(trajectory.reward for trajectory in group) for group in groups]


@asynccontextmanager
async def trained(bench: Bench, answer: Callable[[str], str]) -> AsyncIterator[Trained]:
    async with serving(Policy(answer)) as url:
        llm = LLM(name="policy", base_url=url, model="m")
        try:
            yield Trained(bench, llm)
        finally:
            await llm.close()


def number(question: str) -> int:
    return int(question[1:])


# ---- the story -----------------------------------------------------------------------------------


@pytest.mark.parametrize("agent", [strict, parsing, lenient, fails])
async def test_a_policy_that_breaks_its_agent_is_not_reported_as_improved(
    bench: Bench, agent: Agent
):
    """Before: right in 15 of 20 (0.75). After: malformed in 8 of 20, right in the others (0.60)."""

    def answer(question: str) -> str:
        if bench.adapter.step == 0:
            return "right" if number(question) % 4 else "wrong"
        return "hm" if number(question) % 5 < 2 else "right"

    async with trained(bench, answer) as run:
        run.agent = agent
        run.train(20, generations=2)
        bench.validation, bench.interval = run.evaluation([f"v{n}" for n in range(20)]), 1
        statuses = await bench.run(2)
        assert [status.status for status in statuses] == [COMPLETED] * 2
        history = run.history
    assert [v.mean for v in history.validations] == pytest.approx([0.75, 0.6, 0.6])
    # A failure of the policy is run once: 2 generations in each of 2 epochs.
    assert {n for question, n in run.ran.items() if question.startswith("t")} == {4}
    # Training: the same answers, so the same means, in what is logged and in what is compared.
    assert [r.metrics["avg_reward"] for r in history.rounds] == pytest.approx([0.75, 0.6])
    means = [fmean(fmean(v) for v in history.rewards(epoch).values()) for epoch in (0, 1)]
    assert means == pytest.approx([0.75, 0.6])
    # And they are trained on: 8 groups of two failures at 0, the smaller of 0 and the lowest, 0.
    assert sorted(run.sent(1)) == [[0.0, 0.0]] * 8 + [[1.0, 1.0]] * 12
    assert [r.collected and r.collected.failure_reward for r in history.rounds] == [None, 0.0]


# ---- the reward of a failure ---------------------------------------------------------------------


def mixed(question: str) -> str:
    """Malformed for t0; worth -0.5 for t1; right for the others."""
    return ("hm", "bad", "right", "right")[min(number(question), 3)]


async def test_a_failure_is_trained_with_the_lowest_reward_of_the_run(bench: Bench):
    def answer(question: str) -> str:
        return (
            mixed(question) if bench.adapter.step == 0 else ("hm" if question == "t0" else "right")
        )

    async with trained(bench, answer) as run:
        run.agent = fails
        run.train(4)
        await bench.run(2)
        assert sorted(run.sent(0)) == [[-0.5] * 2, [-0.5] * 2, [1.0] * 2, [1.0] * 2]
        # The second round has no reward below 1; the run's lowest is still -0.5.
        assert sorted(run.sent(1)) == [[-0.5] * 2, *[[1.0] * 2] * 3]
        collected = bench.events("epoch_collected")
        assert [event["failure_reward"] for event in collected] == [-0.5, -0.5]
        # (2 x -0.5 + 2 x -0.5 + 4 x 1) / 8 = 0.25, then (2 x -0.5 + 6 x 1) / 8 = 0.625.
        assert [event["metrics"]["avg_reward"] for event in collected] == [0.25, 0.625]
        # In the journal such a rollout has no reward, but what is trained of it.
        first = [record for record in run.records() if record.example == "t0"]
        assert [(r.reward, r.is_trained, r.failure_kind) for r in first] == [
            (None, True, "policy")
        ] * 2


async def test_a_killed_run_sends_the_same_submission(bench: Bench):
    """The reward of failures is in the submission: lower rewards that appear later do not change it."""
    async with trained(bench, mixed) as run:
        run.agent = fails
        run.train(4)
        submit = bench.adapter.submit

        async def killed(trajectories: Any) -> Any:
            await submit(trajectories)
            raise asyncio.CancelledError

        bench.adapter.submit = killed
        with pytest.raises(asyncio.CancelledError):
            await bench.run(1)
        [path] = (bench.directory / "submissions").iterdir()
        written = path.read_bytes()
        bench.adapter.submit = submit
        await bench.run(1)
        assert path.read_bytes() == written
        # MemoryAdapter asserts that both are equal, byte for byte.
        assert len(bench.adapter.sent) == 2 and len(bench.adapter.jobs) == 1
        assert sorted(run.sent(0))[:2] == [[-0.5] * 2] * 2
        assert set(run.ran.values()) == {2}


async def test_a_round_that_was_killed_before_it_closed_has_the_same_result(bench: Bench):
    async with trained(bench, mixed) as run:
        run.agent = fails
        run.train(4)
        builder = bench.real_builder
        assert builder is not None
        finalize = builder.finalize

        async def killed(run_id: str, meta: Any = None) -> Any:
            await finalize(run_id, meta)
            raise asyncio.CancelledError

        builder.finalize = killed
        with pytest.raises(asyncio.CancelledError):
            await bench.run(1)
        run.train(4)
        await bench.run(1)
        assert set(run.ran.values()) == {2}, "no rollout is run again"
        assert sorted(run.sent(0)) == [[-0.5] * 2, [-0.5] * 2, [1.0] * 2, [1.0] * 2]


async def test_dropped_failures_are_not_trained_but_count_in_reported_rewards(bench: Bench):
    async with trained(bench, mixed) as run:
        run.agent = fails
        run.train(4)
        bench.keys = {"on_policy_failure": "drop"}
        await bench.run(1)
        assert sorted(run.sent(0)) == [[-0.5] * 2, [1.0] * 2, [1.0] * 2]
        [collected] = bench.events("epoch_collected")
        assert collected["dropped"] == {"policy/policy": 2}
        assert collected["failure_reward"] is None
        # As above: (2 x -0.5 + 2 x -0.5 + 4 x 1) / 8; without the failures it would be 0.5.
        assert collected["metrics"]["avg_reward"] == 0.25
        assert run.history.rewards(0)["t0"] == [-0.5, -0.5]
        [warning] = bench.events("warning")
        assert "2 of 8 rollouts failed because of the model (policy: 2)" in warning["message"]
        assert "dropping them rewards failing" in warning["message"]


async def test_a_configured_reward_is_used_as_it_is(bench: Bench):
    async with trained(bench, mixed) as run:
        run.agent = fails
        run.train(4)
        bench.keys = {"on_policy_failure": {"reward": -3.0}}
        await bench.run(1)
        assert sorted(run.sent(0)) == [[-3.0] * 2, [-0.5] * 2, [1.0] * 2, [1.0] * 2]
        [collected] = bench.events("epoch_collected")
        assert collected["failure_reward"] == -3.0
        # (2 x -3 + 2 x -0.5 + 4) / 8
        assert collected["metrics"]["avg_reward"] == -0.375
        assert run.history.rewards(0)["t0"] == [-3.0, -3.0]
        assert not bench.events("warning")


# ---- evaluators ------------------------------------------------------------------------------------


class Broken(Reward):
    """Raises for some outputs, or for all."""

    def __init__(self, error: Exception, everywhere: bool = False, service: bool = False) -> None:
        self.error, self.everywhere, self.is_service = error, everywhere, service

    async def evaluate_item(self, item: EvalInputItem) -> EvalOutputItem:
        if self.everywhere or item.output_obj not in VALUES:
            raise self.error
        return await super().evaluate_item(item)


@pytest.mark.parametrize(
    ("reward", "kind"),
    [
        (Broken(KeyError("answer")), "policy"),
        (Broken(ValueError("malformed"), service=True), "infrastructure"),
        (Broken(ConnectionError("the sandbox is away")), "infrastructure"),
        (Broken(KeyError("answer"), everywhere=True), "infrastructure"),
        (Broken(BufferError("listed in the YAML")), "infrastructure"),
        (Broken(ConfigError("the row has no expected output")), "infrastructure"),
    ],
)
async def test_an_evaluator_that_raises_is_classified_when_the_round_closes(
    bench: Bench, reward: Broken, kind: str
):
    async with trained(bench, mixed) as run:
        run.agent, run.reward = lenient, reward
        run.options = {"infrastructure_exceptions": ["BufferError"]}
        run.train(4)
        bench.keys = {"rollout_retries": 2, "max_infrastructure_failures": 1.0}
        await bench.run(1)
        assert set(run.ran.values()) == {2}, "running the agent again does not fix an evaluator"
        number = 8 if reward.everywhere else 2
        assert run.history.failures == {f"{kind}: evaluator": number}
        failed = [r for r in run.records() if r.failure is not None]
        assert [r.failure_kind for r in failed] == [kind] * number
        assert [r.is_trained for r in failed] == [kind == "policy"] * number
        if kind == "policy":
            assert sorted(run.sent(0))[0] == [-0.5] * 2
            assert failed[0].failure and failed[0].failure.place.startswith(__file__)
        elif not reward.everywhere:
            assert sorted(run.sent(0)) == [[-0.5] * 2, [1.0] * 2, [1.0] * 2]


@pytest.mark.parametrize("service", [False, True])
async def test_an_evaluator_may_attribute_a_failure_to_the_model(bench: Bench, service: bool):
    """Also where it scores no output at all: a model that collapsed is no broken evaluator."""
    error = PolicyFailure("no answer in it", reason="empty")
    async with trained(bench, lambda question: "right") as run:
        run.agent, run.reward = lenient, Broken(error, everywhere=True, service=service)
        run.train(4)
        [status] = await bench.run(1)
        assert status.status is COMPLETED
        assert run.history.failures == {"policy: empty": 8}
        assert sorted(run.sent(0)) == [[0.0, 0.0]] * 4


async def test_an_evaluator_that_scores_nothing_fails_the_epoch_and_is_called_again(
    prose: Prose, bench: Bench
):
    async with trained(bench, lambda question: "right") as run:
        run.agent, run.reward = lenient, Broken(KeyError("column"), everywhere=True)
        run.train(4)
        [status] = await bench.run(1)
        assert status.status is FAILED
        message = str(status.message)
        prose(message)
        run.reward.everywhere = False
        [status] = await bench.run(1)
        assert status.status is COMPLETED and set(run.ran.values()) == {4}
        assert run.history.retried == {"infrastructure: evaluator": 8}
        assert run.history.failures == {} and run.history.attempts == 16


def in_turn(*answers: str) -> Callable[[str], str]:
    """Each question, in the order in which they come, gets the next answer; further ones the last."""
    given: dict[str, str] = {}

    def answer(question: str) -> str:
        return given.setdefault(question, answers[min(len(given), len(answers) - 1)])

    return answer


async def kill_before_it_closes(bench: Bench, epochs: int, *, epoch: int, round: int) -> None:
    """A start that is killed when the rollouts of a round are in the journal."""
    builder = bench.real_builder
    assert builder is not None
    finalize = builder.finalize

    async def killed(run_id: str, meta: dict[str, Any] | None = None) -> Any:
        if meta is None or (meta["epoch"], meta["round"]) != (epoch, round):
            return await finalize(run_id, meta)
        await asyncio.gather(*builder.evaluation_runs[run_id])
        raise asyncio.CancelledError

    builder.finalize = killed
    with pytest.raises(asyncio.CancelledError):
        await bench.run(epochs)


@pytest.mark.parametrize("is_killed", [False, True])
async def test_an_evaluator_that_scored_an_earlier_round_is_not_broken(
    bench: Bench, is_killed: bool
):
    """Rounds of two rollouts: in the third, it scores none."""
    async with trained(bench, in_turn("bad", "right", "hm", "right")) as run:
        run.agent, bench.keys["groups_per_step"] = lenient, 1
        run.train(6)
        if is_killed:
            await kill_before_it_closes(bench, 1, epoch=0, round=2)
            run.train(6)
        [status] = await bench.run(1)
        assert status.status is COMPLETED
        assert [run.sent(n) for n in range(6)] == [
            [[reward] * 2] for reward in (-0.5, 1.0, -0.5, 1.0, 1.0, 1.0)
        ]
        assert set(run.ran.values()) == {2}, "no rollout is run again"
        assert [r.failure_kind for r in run.records(round=2)] == ["policy"] * 2
        assert run.history.failures == {"policy: evaluator": 2}
        # The report counts what was trained: (2 * -0.5 + 8 * 1 + 2 * -0.5) / 12.
        [entry] = json.loads((bench.directory / "reward_history.json").read_text())
        assert entry["avg_reward"] == pytest.approx(0.5)
        counted = [reward for r in run.history.rounds for reward in r.rewards.values()]
        assert len(counted) == 12 and fmean(counted) == pytest.approx(0.5)


@pytest.mark.parametrize("is_killed", [False, True])
async def test_an_evaluator_that_scored_an_earlier_epoch_is_not_broken(
    bench: Bench, is_killed: bool
):
    answers = ["bad"]
    async with trained(bench, lambda question: answers[0]) as run:
        run.agent = lenient
        run.train(1)
        [first] = await bench.run(1)
        answers[0] = "hm"
        run.train(1)
        if is_killed:
            await kill_before_it_closes(bench, 2, epoch=1, round=0)
            run.train(1)
        second = (await bench.run(2))[-1]
        assert first.status is second.status is COMPLETED
        assert [run.sent(n) for n in range(2)] == [[[-0.5, -0.5]]] * 2
        assert sum(run.ran.values()) == 4
        assert [r.failure_kind for r in run.records(1)] == ["policy"] * 2
        assert run.history.failures == {"policy: evaluator": 2}


async def test_an_evaluator_that_never_scored_stops_a_small_round_again_after_a_resume(
    bench: Bench,
):
    """Scores of a validation do not count: its evaluator may be another one."""
    async with trained(bench, lambda question: "right") as run:
        bench.validation = run.evaluation(["v0", "v1"])
        run.agent, run.reward = lenient, Broken(KeyError("column"), everywhere=True)
        bench.keys["groups_per_step"] = 1
        run.train(6)
        for again in (0, 2):
            [status] = await bench.run(1)
            assert status.status is FAILED and not bench.adapter.jobs
            assert run.history.retried == ({"infrastructure: evaluator": again} if again else {})
            message = str(status.message)
            assert "2 of 2 rollouts failed because of the infrastructure (evaluator: 2)" in message
            assert f"  KeyError: 'column' ({__file__}:" in message
            assert [r.failure_kind for r in run.records()] == ["infrastructure"] * 2
        run.reward.everywhere = False
        [status] = await bench.run(1)
        assert status.status is COMPLETED and len(bench.adapter.jobs) == 6
        assert run.history.retried == {"infrastructure: evaluator": 4}
        assert run.history.failures == {}


async def test_a_validation_without_a_score_counts_if_an_earlier_one_had_one(bench: Bench):
    answers = ["right"]
    async with trained(bench, lambda question: answers[0]) as run:
        run.agent = lenient
        run.train(1)
        bench.validation = run.evaluation(["v0", "v1"])
        submit = bench.adapter.submit

        async def trains(trajectories: Any) -> Any:
            answers[0] = "hm"
            return await submit(trajectories)

        bench.adapter.submit = trains
        [status] = await bench.run(1)
        assert status.status is COMPLETED
        assert [(v.mean, v.policy_failures, v.error) for v in run.history.validations] == [
            (1.0, 0, None),
            (0.0, 2, None),
        ]
        with Journal.open(bench.directory, {}) as journal:
            assert len(journal.finished("val", 1)) == 2, "none is run again"


async def kill_after_three(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start that is killed when three rollouts are in the journal."""
    added, add = Counter[str](), Journal.add

    def add_three(journal: Journal, record: RolloutRecord) -> None:
        add(journal, record)
        added.update(["rollout"])
        if added["rollout"] == 3:
            raise asyncio.CancelledError

    with monkeypatch.context() as patched, pytest.raises(asyncio.CancelledError):
        patched.setattr(Journal, "add", add_three)
        await bench.run(1)


async def test_failures_of_a_broken_evaluator_stay_so_if_the_next_run_is_killed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
):
    async with trained(bench, lambda question: "right") as run:
        run.agent, run.reward = lenient, Broken(KeyError("column"), everywhere=True)
        run.train(4)
        await bench.run(1)
        run.reward.everywhere = False
        await kill_after_three(bench, monkeypatch)
        [status] = await bench.run(1)
        assert status.status is COMPLETED
        assert run.sent(0) == [[1.0, 1.0]] * 4 and run.history.failures == {}


async def test_crashes_at_one_line_are_run_again_if_the_next_run_is_killed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
):
    async with trained(bench, lambda question: "right") as run:
        tools: dict[str, int] = {}

        async def crashes(text: str) -> str:
            return VALUES[text] if tools[text] else ""

        run.agent = crashes
        run.train(3)
        [status] = await bench.run(1)
        assert status.status is FAILED
        tools["right"] = 1
        # Three of six are scored, so half of the round has still crashed, which is not more.
        await kill_after_three(bench, monkeypatch)
        [status] = await bench.run(1)
        assert status.status is COMPLETED
        assert run.sent(0) == [[1.0, 1.0]] * 3 and run.history.failures == {}


async def test_an_evaluator_whose_configuration_says_so_is_a_service(bench: Bench):
    async with trained(bench, mixed) as run:
        run.agent, run.options = lenient, {"services": ["score"]}
        run.train(4)
        bench.keys = {"max_infrastructure_failures": 1.0}
        await bench.run(1)
        assert run.history.failures == {"infrastructure: evaluator": 2}
    assert LlmJudge.is_service and RulerConfig.is_service and not ExactMatch.is_service


async def test_a_function_before_the_evaluators_that_raises_follows_the_same_rule(bench: Bench):
    def prepare(item: EvalInputItem) -> EvalInputItem:
        return item.copy_with_updates(output_obj=VALUES[item.output_obj])

    async with trained(bench, mixed) as run:
        run.agent, run.options = lenient, {"prepare": prepare}
        run.train(4)
        await bench.run(1)
        assert run.history.failures == {"policy: evaluator": 2}
        assert sorted(run.sent(0)) == [[-0.5] * 2, [-0.5] * 2, [1.0] * 2, [1.0] * 2]


async def test_a_group_of_exceptions_names_the_first(bench: Bench):
    async def together(text: str) -> str:
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(strict(text))
        return task.result()

    async with trained(bench, mixed) as run:
        run.agent = together
        run.train(4)
        await bench.run(1)
        [failure] = {r.failure.message for r in run.records() if r.failure}
        assert failure == "unhandled errors in a TaskGroup (1 sub-exception): KeyError: 'hm'"


@pytest.mark.parametrize("value", [float("nan"), None, "high"])
async def test_an_output_without_a_usable_score_is_the_policys(bench: Bench, value: Any):
    class Odd(Reward):
        async def evaluate_item(self, item: EvalInputItem) -> EvalOutputItem:
            if item.output_obj not in VALUES:
                return EvalOutputItem(id=item.id, score=value)
            return await super().evaluate_item(item)

    async with trained(bench, mixed) as run:
        run.agent, run.reward = lenient, Odd()
        run.train(4)
        await bench.run(1)
        assert run.history.failures == {"policy: evaluator": 2}
        assert sorted(run.sent(0))[:2] == [[-0.5] * 2] * 2


async def test_an_evaluator_that_takes_too_long_for_one_output_is_the_policys(bench: Bench):
    class Slow(Reward):
        async def evaluate_item(self, item: EvalInputItem) -> EvalOutputItem:
            if item.output_obj not in VALUES:
                await asyncio.Event().wait()
            return await super().evaluate_item(item)

    async with trained(bench, mixed) as run:
        run.agent, run.reward = lenient, Slow()
        run.train(4)
        bench.training.timeout_s = 2.0
        await bench.run(1)
        assert run.history.failures == {"policy: evaluator": 2}
        [failure] = {r.failure.message for r in run.records() if r.failure}
        assert failure == "item 't0': the evaluator did not end within 2 s"


async def test_a_plugin_whose_compute_reward_raises_follows_the_same_rule(bench: Bench):
    class Picky(RolloutBuilder):
        async def compute_reward(self, output_item: Any, meta: Any = None) -> float:
            return {"bad": -0.5, "right": 1.0}[output_item.reasoning]

    class Told(Reward):
        async def evaluate_item(self, item: EvalInputItem) -> EvalOutputItem:
            return EvalOutputItem(id=item.id, score=0.0, reasoning=item.output_obj)

    async with trained(bench, mixed) as run:
        run.agent, run.reward = lenient, Told()
        run.train(4)
        bench.real_builder = Picky(RolloutBuilderConfig(num_generations=2))
        bench.real_builder.adapter = bench.adapter
        await bench.run(1)
        assert run.history.failures == {"policy: evaluator": 2}
        assert sorted(run.sent(0)) == [[-0.5] * 2, [-0.5] * 2, [1.0] * 2, [1.0] * 2]


# ---- attempts -------------------------------------------------------------------------------------


async def test_every_attempt_is_recorded_and_counted(bench: Bench):
    async with trained(bench, lambda question: "right") as run:
        tried: Counter[str] = Counter()

        async def unlucky(text: str) -> str:
            tried["all"] += 1
            if tried["all"] in (1, 2, 5):
                raise ConnectionError("the sandbox is away")
            return VALUES[text]

        run.agent = unlucky
        run.train(4)
        bench.keys = {"rollout_retries": 2}
        await bench.run(1)
        records = run.records()
        retries = sorted(len(record.retries) for record in records)
        assert sum(retries) == 3 and all(record.failure is None for record in records)
        [first, *_] = [one for record in records for one in record.retries]
        assert (first.kind, first.reason, first.type) == (
            "infrastructure",
            "connection",
            "ConnectionError",
        )
        assert first.message == "the sandbox is away" and first.place.startswith(__file__)
        history = run.history
        assert (history.attempts, history.rollouts) == (11, 8)
        assert history.retried == {"infrastructure: connection": 3} and history.failures == {}


async def test_failures_of_an_earlier_session_count_as_attempts(bench: Bench):
    async with trained(bench, lambda question: "right") as run:
        broken = True

        async def unlucky(text: str) -> str:
            if broken:
                raise ConnectionError("the sandbox is away")
            return VALUES[text]

        run.agent = unlucky
        run.train(4)
        bench.validation = run.evaluation(["v0", "v1"])
        bench.keys = {"rollout_retries": 1}
        await bench.run(1)
        broken = False
        await bench.run(1)
        history = run.history
        # Two attempts of each of 8 rollouts in the first session, one in the second.
        assert (history.attempts, history.retried.total()) == (24, 16)
        assert history.retried == {"infrastructure: connection": 16}
        # Validation before: 2 x 2 failed attempts, then 2 good ones; validation after: 2 good ones.
        assert (history.validation_attempts, history.validation_retried.total()) == (8, 4)


# ---- one line ---------------------------------------------------------------------------------------


async def test_a_round_that_crashes_at_one_line_stops_the_run_and_is_run_again(
    prose: Prose, bench: Bench
):
    def answer(question: str) -> str:
        return "wrong" if number(question) < 3 else "right"

    async with trained(bench, answer) as run:
        tools = {"right": 1}

        async def crashes(text: str) -> str:
            tools[text]
            return VALUES[text]

        run.agent = crashes
        run.train(4)
        [status] = await bench.run(1)
        assert status.status is FAILED and not bench.adapter.jobs
        message = str(status.message)
        line = crashes.__code__.co_firstlineno + 1
        prose(message)
        assert f"{__file__}:{line}: KeyError" in message
        tools["wrong"] = 2
        [status] = await bench.run(1)
        assert status.status is COMPLETED
        assert run.ran == {"t0": 4, "t1": 4, "t2": 4, "t3": 2}
        assert sorted(run.sent(0)) == [[0.0, 0.0], [0.0, 0.0], [0.0, 0.0], [1.0, 1.0]]
        assert run.history.retried == {"policy: agent_error": 6}


async def test_an_evaluator_that_crashes_at_one_line_stops_the_run_too(bench: Bench):
    def answer(question: str) -> str:
        return "hm" if number(question) < 3 else "right"

    async with trained(bench, answer) as run:
        run.agent = lenient
        run.train(4)
        [status] = await bench.run(1)
        assert status.status is FAILED
        assert "6 of 8 rollouts failed with the same exception at the same line" in str(
            status.message
        )
        assert "KeyError: 'hm'" in str(status.message)


class Parsing(Reward):
    """Expects JSON, or says that the model failed."""

    def __init__(self, read: Agent) -> None:
        self.read = read

    async def evaluate_item(self, item: EvalInputItem) -> EvalOutputItem:
        return EvalOutputItem(id=item.id, score=float(await self.read(item.output_obj)))


@pytest.mark.parametrize(
    ("agent", "reward"),
    [
        (parsing, Reward()),
        (fails, Reward()),
        (lenient, Parsing(parsing)),
        (lenient, Parsing(fails)),
    ],
)
async def test_failures_that_training_can_correct_are_a_warning_that_names_the_line(
    prose: Prose, bench: Bench, agent: Agent, reward: Reward
):
    def answer(question: str) -> str:
        return "hm" if number(question) < 3 else "right"

    async with trained(bench, answer) as run:
        run.agent, run.reward = agent, reward
        run.train(4)
        [status] = await bench.run(1)
        assert status.status is COMPLETED
        assert sorted(run.sent(0)) == [*[[0.0, 0.0]] * 3, [1.0, 1.0]]
        [warning] = bench.events("warning")
        message = warning["message"]
        prose(message)


async def test_a_service_that_names_no_line_does_not_stop_the_run(bench: Bench):
    """`500 Internal Server Error` hides the exception and its line."""

    async def served(text: str) -> str:
        if text not in VALUES:
            raise AgentCrashed("POST http://a answered with status 500", details=BODY)
        return VALUES[text]

    def answer(question: str) -> str:
        return "hm" if number(question) < 3 else "right"

    async with trained(bench, answer) as run:
        run.agent = served
        run.train(4)
        [status] = await bench.run(1)
        assert status.status is COMPLETED
        assert {r.failure.place for r in run.records() if r.failure} == {BODY}
        [warning] = bench.events("warning")
        assert "6 of 8 rollouts failed because of the model (agent_error: 6)" in warning["message"]
        assert f"at {BODY}" not in warning["message"]


async def test_three_crashes_in_a_small_round_may_be_chance(bench: Bench):
    async with trained(bench, lambda question: "hm") as run:
        run.agent = strict
        run.train(1, generations=3)
        [status] = await bench.run(1)
        assert status.status is COMPLETED and run.sent(0) == [[0.0] * 3]


async def test_small_rounds_that_crash_at_one_line_stop_the_epoch(bench: Bench):
    """Rounds of two rollouts: after the second, all four rollouts of the epoch crashed."""
    async with trained(bench, lambda question: "hm") as run:
        known = {"right": 1}

        async def crashes(text: str) -> str:
            known[text]
            return VALUES["wrong"]

        run.agent, bench.keys["groups_per_step"] = crashes, 1
        run.train(6)
        [status] = await bench.run(1)
        assert status.status is FAILED and run.sent(0) == [[0.0, 0.0]]
        assert "epoch 1: 4 of 4 rollouts failed with the same exception at the same line" in str(
            status.message
        )
        # The second round is run again. In the first one, which was trained, they stay as they are.
        known["hm"] = 1
        [status] = await bench.run(1)
        assert status.status is COMPLETED and len(bench.adapter.jobs) == 6
        assert sorted(run.ran.values()) == [2, 2, 2, 2, 2, 4]
        assert [r.failure_kind for r in run.records()] == ["policy", "policy"]


async def test_crashes_in_half_of_the_rollouts_of_small_rounds_do_not_stop_the_epoch(bench: Bench):
    asked = Counter[str]()

    def answer(question: str) -> str:
        asked[question] += 1
        return "hm" if asked[question] == 1 else "right"

    async with trained(bench, answer) as run:
        run.agent, bench.keys["groups_per_step"] = strict, 1
        run.train(6)
        [status] = await bench.run(1)
        assert status.status is COMPLETED  # 6 of 12
        assert [run.sent(n) for n in range(6)] == [[[0.0, 1.0]]] * 6


async def test_a_validation_that_crashes_at_one_line_counts_and_warns(bench: Bench):
    """A trained policy that breaks its agent is a result; the run goes on."""

    def answer(question: str) -> str:
        return "hm" if question.startswith("v") and number(question) < 5 else "right"

    async with trained(bench, answer) as run:
        run.agent = strict
        run.train(2)
        bench.validation = run.evaluation([f"v{n}" for n in range(8)])
        [status] = await bench.run(1)
        assert status.status is COMPLETED
        # 5 at 0 and 3 at 1.
        assert [v.mean for v in run.history.validations] == pytest.approx([0.375, 0.375])
        [before, after] = bench.events("warning")
        assert before["message"].startswith("validation after 0 epochs: 5 of 8 rollouts failed")
        assert after["message"].startswith("validation after 1 epoch: 5 of 8 rollouts failed")
        assert "They count as failures of the model." in after["message"]
        assert "run again" not in after["message"]


def test_the_kinds_at_close_depend_on_what_else_was_scored():
    policy, world, fine = ("policy", "evaluator"), ("infrastructure", "evaluator"), (None, None)
    assert kinds_at_close([policy, fine]) == ["policy", None]
    assert kinds_at_close([policy, policy]) == ["infrastructure"] * 2
    # Another failure of the policy is not a score.
    assert kinds_at_close([policy, ("policy", "unparseable")]) == ["infrastructure", "policy"]
    assert kinds_at_close([world, fine]) == ["infrastructure", None]
    assert kinds_at_close([]) == []
    # It scored an earlier round.
    assert kinds_at_close([policy, policy, world], scored_before=True) == [
        *["policy"] * 2,
        "infrastructure",
    ]
