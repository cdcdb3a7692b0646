"""An Evaluation: rollouts under one limit, scored, and failures separate from scores."""

import asyncio
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from pydantic import BaseModel
from tests.evaluation.made import call, item
from tests.patience import PATIENCE_S
from tests.prose import Prose
from tests.workflow.endpoint import Endpoint, Reply, serving

import hone
from hone.capture.base import current
from hone.errors import ConfigError, PolicyFailure
from hone.evaluation.base import EvalInputItem, EvalOutputItem, Score
from hone.evaluation.evaluators import ExactMatch
from hone.evaluation.judge import Judge, LlmJudge
from hone.evaluation.results import extracted
from hone.evaluation.rule import RuleEvaluator
from hone.evaluation.run import Evaluation, ItemResult
from hone.wire.rollout import ROLLOUT_HEADER, TEMPERATURE_HEADER
from hone.workflow.function import Function
from hone.workflow.llm import LLM
from hone.workflow.run import RolloutResult

EXACT = {"exact": RuleEvaluator(ExactMatch())}


def items(*answers: Any) -> list[EvalInputItem]:
    return [item(None, a, id=str(n), input_obj=a) for n, a in enumerate(answers)]


def over(fn: Any, rows: list[EvalInputItem], **options: Any) -> Evaluation:
    known: dict[str, Any] = {"evaluators": EXACT, "max_concurrency": 4}
    return Evaluation(workflow=Function.of("<workflow>", fn), items=rows, **(known | options))


async def echo(input: str) -> str:
    return input


async def test_items_are_run_and_scored_in_order():
    async def shout(input: str) -> str:
        await asyncio.sleep(0.01 if input == "a" else 0)
        hone.step("shouted", value=0.5)
        return input.upper()

    seen: list[str] = []
    run = over(shout, items("a", "B", "C"))
    ended = await run.run(on_result=lambda r: seen.append(r.item.id))
    assert [r.item.output_obj for r in ended.results] == ["A", "B", "C"]
    assert [r.scores["exact"] for r in ended.results] == [Score(0.0), Score(1.0), Score(1.0)]
    (name, output) = ended.evaluation_results[0]
    assert (name, output.average_score) == ("exact", pytest.approx(2 / 3))
    assert sorted(seen) == ["0", "1", "2"] and seen[-1] == "0"
    assert not ended.workflow_interrupted
    first = ended.results[0]
    assert [s.value for s in first.item.steps] == [0.5]
    assert first.rollout is not None and first.item.seconds == first.rollout.seconds >= 0.01
    assert [i.id for i in ended.eval_input.eval_input_items] == ["0", "1", "2"]


async def test_a_failed_rollout_is_not_scored():
    async def picky(input: str) -> str:
        if input == "bad":
            raise ConnectionError("of course")
        if input == "worse":
            raise PolicyFailure("no call", reason="unparseable")
        return input

    ended = await over(picky, items("a", "bad", "worse")).run()
    assert ended.workflow_interrupted
    kinds = [r.rollout and r.rollout.failure and r.rollout.failure.kind for r in ended.results]
    assert kinds == [None, "infrastructure", "policy"]
    assert [r.scores for r in ended.results[1:]] == [{}, {}]
    output = dict(ended.evaluation_results)["exact"]
    # Of what was scored, 1, and of the failure of the policy, which counts as 0.
    assert (output.average_score, output.policy_failures, output.failure_reward) == (0.5, 1, 0.0)
    assert [one.score for one in output.eval_output_items] == [1.0, None, None]
    assert [one.failure_kind for one in output.eval_output_items] == [
        *(None, "infrastructure", "policy")
    ]
    assert [one.error for one in output.eval_output_items] == [
        None,
        "ConnectionError: of course",
        "PolicyFailure: no call",
    ]


async def test_max_concurrency_holds_over_all_runs():
    running, most = Counter(), Counter()

    async def busy(input: str) -> str:
        running["now"] += 1
        most["now"] = max(most["now"], running["now"])
        await asyncio.sleep(0.002)
        running["now"] -= 1
        return input

    run = over(busy, items(*"abcdefgh"), max_concurrency=3)
    await asyncio.gather(run.run(), run.run(), run.run())
    assert most["now"] == 3


async def test_scoring_holds_no_slot():
    gate = asyncio.Event()

    class Slow:
        async def evaluate_item(self, item: EvalInputItem) -> EvalOutputItem:
            await gate.wait()
            return EvalOutputItem(id=item.id, score=1)

    ran: list[str] = []

    async def note(input: str) -> str:
        ran.append(input)
        if len(ran) == 3:
            gate.set()  # every rollout ran although none is scored yet
        return input

    run = over(note, items(*"abc"), max_concurrency=1, evaluators={"slow": Slow()})
    ended = await asyncio.wait_for(run.run(), PATIENCE_S)
    assert [r.scores["slow"].value for r in ended.results] == [1.0] * 3


async def test_only_the_requested_evaluators_run(prose: Prose):
    run = over(echo, items("a"), evaluators=EXACT | {"other": EXACT["exact"]})
    assert list((await run.run_item(run.items[0], evaluators=["other"])).scores) == ["other"]
    assert list((await run.run_item(run.items[0])).scores) == ["exact", "other"]
    with pytest.raises(ConfigError) as caught:
        await run.run_item(run.items[0], evaluators=["exat"])
    prose(caught)


async def test_calls_carry_the_rollout_and_those_of_a_judge_do_not():
    policy, judge = Endpoint(Reply("a")), Endpoint(Reply('{"score": 5}'))
    async with serving(policy) as url, serving(judge) as judge_url:
        llm = LLM(base_url=url, model="m", max_retries=0)
        wise = LLM(base_url=judge_url, model="wise", max_retries=0)

        async def ask(input: str) -> str:
            answer = await llm.chat([{"role": "user", "content": input}])
            return answer.choices[0].message.content or ""

        config = LlmJudge.model_validate({"llm": "wise"})
        judged = Judge(config, wise, max_concurrency=1)
        run = over(ask, items("a"), evaluators=EXACT | {"judged": judged}, host="localhost")
        ended = await run.run(rollout_id=lambda i: f"run:{i.id}", temperature=0)
        await llm.close()
        await wise.close()
    (result,) = ended.results
    assert {name: s.value for name, s in result.scores.items()} == {"exact": 1.0, "judged": 0.5}
    assert result.rollout is not None and result.rollout.id == "run:0"
    assert policy.header(ROLLOUT_HEADER) == ["run:0"]
    assert policy.header(TEMPERATURE_HEADER) == ["0"]
    assert judge.header(ROLLOUT_HEADER) == [None]
    (seen,) = result.item.trajectory
    assert (seen.model, seen.reply and seen.reply["content"]) == ("m", "a")
    assert current() is None


class Answer(BaseModel):
    city: str


@dataclass
class Plain:
    city: str


@pytest.mark.parametrize(
    ("returned", "path", "output"),
    [
        ("Paris", "$", "Paris"),
        ({"city": "Paris"}, "$", {"city": "Paris"}),
        ({"city": "Paris"}, "$.city", "Paris"),
        ('{"city": "Paris"}', "$.city", "Paris"),
        (Answer(city="Paris"), "$", {"city": "Paris"}),
        (Answer(city="Paris"), "$.city", "Paris"),
        (Plain("Paris"), "$.city", "Paris"),
        ([{"city": "a"}, {"city": "b"}], "$[*].city", "a"),
    ],
)
async def test_the_output_is_the_value_at_the_path(returned: Any, path: str, output: Any):
    async def give(input: str) -> Any:
        return returned

    run = over(give, items(output), result_json_path=path)
    result = await run.run_item(run.items[0])
    assert result.item.output_obj == output
    assert result.scores["exact"].value == 1.0


@dataclass
class Unwritable:
    lock: Any = field(default_factory=threading.Lock)  # cannot be copied


@pytest.mark.parametrize(
    ("calls", "answered", "kind"),
    [
        ((call("prose"),), True, "policy"),
        ((call("prose", model="m@0"),), False, "infrastructure"),  # a frozen model's answer
        ((call(), call(choices=[], status=503, started_at=101.0)), True, "infrastructure"),
    ],
)
@pytest.mark.parametrize(
    ("output", "reason"), [("prose", "unparseable"), (Unwritable(), "agent_error")]
)
def test_an_unusable_output_after_an_answer_is_the_policy_s_failure(
    calls: Any, answered: bool, kind: str, output: Any, reason: str
):
    result = extracted(
        RolloutResult("r", output, calls, (), None, 1.0, answered=answered), "$.city"
    )
    assert result.failure is not None and result.failure.kind == kind
    assert result.failure.reason == (reason if len(calls) == 1 else "server_error")


@pytest.mark.parametrize(
    "returned",
    [
        "prose",
        {"town": 1},
    ],
)
async def test_a_path_without_a_value_is_a_failure(prose: Prose, returned: Any):
    async def give(input: str) -> Any:
        return returned

    run = over(give, items("x"), result_json_path="$.city")
    result = await run.run_item(run.items[0])
    assert result.scores == {} and result.rollout is not None
    failure = result.rollout.failure
    # No model was called, so it is not the model's failure.
    assert failure is not None and (failure.kind, failure.reason) == (
        "infrastructure",
        "unparseable",
    )
    prose(failure.failure.message)
    with pytest.raises(ConfigError) as caught:
        over(give, items("x"), result_json_path="$[")
    prose(caught)


async def test_existing_outputs_may_be_scored():
    async def never(input: str) -> str:
        raise AssertionError("not to be run")

    rows = [item("a", "a", id="0"), item(None, "b", id="1")]
    ended = await over(never, rows).run(rerun=lambda i: False)
    assert ended.results[0] == ItemResult(rows[0], None, {"exact": Score(1.0)})
    assert ended.results[1].scores == {}
    assert ended.workflow_interrupted
    assert dict(ended.evaluation_results)["exact"].eval_output_items[1].error == (
        "NoOutput: item '1' has no generated answer, and the workflow was not run"
    )


async def test_items_are_prepared_before_they_are_scored(prose: Prose):
    async def lower(item: EvalInputItem) -> EvalInputItem:
        return item.copy_with_updates(output_obj=item.output_obj.lower())

    def fails(item: EvalInputItem) -> EvalInputItem:
        raise KeyError("no")

    row = item(None, "a", input_obj="A")
    assert (await over(echo, [row], prepare=lower).run_item(row)).scores["exact"].value == 1.0
    failed = (await over(echo, [row], prepare=fails).run_item(row)).scores["exact"]
    assert failed.failure is not None and failed.failure.type == "KeyError"
    wrong: Any = lambda item: None  # noqa: E731
    lost = (await over(echo, [row], prepare=wrong).run_item(row)).scores["exact"]
    assert lost.failure is not None
    prose(lost.failure.message)


async def test_a_callback_that_raises_cancels_the_other_rollouts():
    started: list[str] = []

    async def slow(input: str) -> str:
        started.append(input)
        await asyncio.sleep(0 if input == "a" else 60)
        return input

    def refuse(result: ItemResult) -> None:
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        await asyncio.wait_for(over(slow, items("a", "b")).run(on_result=refuse), PATIENCE_S)
    assert started == ["a", "b"]
    assert len(asyncio.all_tasks()) == 1


async def test_a_rollout_has_a_timeout():
    async def sleeps(input: str) -> str:
        await asyncio.sleep(60)
        return input

    run = over(sleeps, items("a"), timeout_s=0.05)
    result = await run.run_item(run.items[0])
    assert result.rollout is not None and result.rollout.failure is not None
    assert result.rollout.failure.reason == "timeout"


async def test_the_timeout_is_extended_by_the_time_that_the_server_held_calls():
    asked = asyncio.Event()

    async def held_s(rollout: str, since: float) -> float:
        asked.set()
        return float(PATIENCE_S)

    async def late(input: str) -> str:
        await asked.wait()
        return input

    run = over(late, items("a"), timeout_s=0.05, held_s=held_s)
    result = await run.run_item(run.items[0])
    assert result.failure is None and result.item.output_obj == "a"
