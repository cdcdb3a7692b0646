"""finetune/validation.py: held-out examples before, during and after; a failure is not a 0."""

import asyncio
import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
from tests.finetune.rehearsal import Rehearsal
from tests.finetune.trainers import Bench, evaluation
from tests.finetune.worlds import collected

from hone.config.schema import EarlyStoppingConfig, ValidationConfig
from hone.errors import PolicyFailure
from hone.evaluation.base import EvalInputItem, EvalOutputItem
from hone.evaluation.run import Evaluation
from hone.files.event_log import EventLog, read
from hone.files.rollout_record import FailureRecord, RolloutRecord
from hone.finetune.base import TrainingStatusEnum
from hone.finetune.journal import Journal
from hone.finetune.resume import RunState
from hone.finetune.validation import Validator, missing
from hone.report.comparison import Comparison, comparison
from hone.report.history import RunHistory

COMPLETED = TrainingStatusEnum.COMPLETED


async def test_validation_comes_first_at_each_interval_and_last(bench: Bench):
    bench.validation, bench.interval = evaluation("xy"), 2
    await bench.run(3)
    result = bench.events("validation")
    assert [(e["epoch"], e["step"], e["avg_reward"]) for e in result] == [
        (0, 0, 0.5),
        (2, 2, 0.5),
        (3, 3, 0.5),
    ]
    assert result[0]["rewards"] == {"x": [0.5], "y": [0.5]}
    assert ("val", 2, {"reward": 0.5, "failure_rate": 0.0}) in bench.adapter.logged
    order = [e.type for e in read(bench.directory / "events.jsonl")]
    assert order.index("validation") < order.index("epoch_started")
    names = {p.name for p in (bench.directory / "trajectories").glob("validation_*")}
    assert names == {"validation_000.jsonl", "validation_002.jsonl", "validation_003.jsonl"}
    await bench.run(3)
    assert len(bench.events("validation")) == 3


async def test_a_validation_that_fails_is_a_gap_and_no_zero(bench: Bench):
    def broken(input: str) -> str:
        raise ConnectionError("no route to the tool")

    bench.validation = evaluation("xy", broken)
    bench.keys = {"rollout_retries": 0}
    statuses = await bench.run(1)
    assert [status.status for status in statuses] == [COMPLETED]
    first, _ = bench.events("validation")
    assert (first["avg_reward"], first["failures"]) == (None, 2)
    assert first["rewards"] == {"x": [None], "y": [None]}
    assert "2 of 2 rollouts failed because of the infrastructure" in first["error"]
    assert not [entry for entry in bench.adapter.logged if entry[0] == "val"]
    history = json.loads((bench.directory / "validation_history.json").read_text())
    assert history[0]["avg_reward"] is None


async def test_greedy_validation_repeats_each_example(bench: Bench):
    seen: list[str] = []
    bench.validation = evaluation("x", lambda input: (seen.append(input), "1")[1])
    bench.keys = {"validation": ValidationConfig(greedy=True, reps=3)}
    await bench.run(1)
    assert seen == ["x"] * 6  # before and after
    assert bench.events("validation")[0]["rewards"] == {"x": [1.0, 1.0, 1.0]}


async def test_temperature_and_step_reach_an_agent_in_a_process_of_its_own(
    rehearsal: Rehearsal, tmp_path: Path
):
    """The comparison at the end names two steps; the program's requests name neither."""
    changes: dict[str, Any] = {
        "workflow": {"target": "agent.py:process", "args": {"base_model": str(rehearsal.model)}},
        "finetuning": {"validation": {"greedy": True}},
    }
    async with rehearsal.live(**changes) as run:
        del run.evaluation.items[1:]
        with (
            Journal.open(tmp_path / "run", {}) as journal,
            EventLog(tmp_path / "run" / "events.jsonl") as events,
        ):
            groups = await collected(run.adapter, journal.run_id)
            trained = await run.adapter.wait_until_complete(await run.adapter.submit(groups))
            assert (trained.metadata or {})["step"] == 1
            config = run.builder.document.finetuning
            state = RunState.follow(config, events)
            example = run.evaluation.items[0].id
            for step in (0, 1):
                rewards = {"avg_reward": 0.5, "rewards": {example: [0.5]}, "failures": 0}
                events.append("validation", epoch=step, step=step, **rewards)
            validator = Validator(run.evaluation, config, journal, events, state, run.adapter)
            await validator.compare()
            records = [*journal.records("final", 0, 1), *journal.records("final", 1, 1)]
        calls = [await run.adapter.backend.calls(record.rollout) for record in records]
        await run.adapter.model.close()
    assert [record.policy_steps for record in records] == [[0], [1]]
    for step, made in enumerate(calls):
        assert [(one.call.step, one.call.temperature) for one in made] == [(step, 0.0)] * 2
    assert [(v.step, v.error) for v in state.history.finals[0]] == [(0, None), (1, None)]


async def test_a_failed_evaluator_is_retried_without_running_the_agent(bench: Bench):
    ran: list[str] = []
    bench.validation = evaluation("x", lambda input: (ran.append(input), "no number")[1])
    bench.keys = {"rollout_retries": 2}
    await bench.run(1)
    assert ran == ["x"] * 2  # before and after
    first, _ = bench.events("validation")
    assert (first["avg_reward"], first["rewards"], first["failures"]) == (None, {"x": [None]}, 1)


async def test_failures_of_the_policy_are_worth_what_the_configuration_says(bench: Bench):
    def fails(input: str) -> str:
        raise PolicyFailure("no move", reason="step_limit")

    bench.validation = evaluation("x", fails)
    bench.keys = {"on_policy_failure": {"reward": -1.0}}
    await bench.run(1)
    first, _ = bench.events("validation")
    assert (first["avg_reward"], first["rewards"], first["failures"]) == (-1.0, {"x": [-1.0]}, 0)


async def test_only_the_reward_is_computed_of_an_evaluation_with_more_evaluators(bench: Bench):
    asked: list[str] = []

    class Judge:
        async def evaluate_item(self, item: EvalInputItem) -> EvalOutputItem:
            asked.append(item.id)
            return EvalOutputItem(id=item.id, score=0.0)

    bench.validation = evaluation("x")
    bench.validation.evaluators["judge"] = Judge()
    await bench.run(1)
    with Journal.open(bench.directory, {}) as journal:
        [record] = journal.finished("val", 0).values()
    assert (record.scores, asked) == ({"score": 0.5}, [])


def half_broken(input: str) -> str:
    """A policy that fails on x and solves the rest."""
    if input == "x":
        raise PolicyFailure("no move", reason="step_limit")
    return "1"


async def test_a_policy_that_fails_on_half_of_the_examples_does_not_score_1(bench: Bench, caplog):
    bench.validation = evaluation("xy", half_broken)
    caplog.set_level("INFO", "hone")
    await bench.run(1)
    first = bench.events("validation")[0]
    # 0 for x, the smaller of 0 and the lowest reward of the run, and 1 for y.
    assert (first["avg_reward"], first["min_reward"]) == (0.5, 0.0)
    assert first["rewards"] == {"x": [None], "y": [1.0]}
    assert (first["policy_failures"], first["on_policy_failure"]) == ({"x": 1}, "lowest")
    assert ("val", 0, {"reward": 0.5, "failure_rate": 0.5}) in bench.adapter.logged
    line = "after 0 epochs - Avg Reward: 0.5000, 1 policy failure (50%), each counted as 0.00"
    assert line in caplog.text
    entry = json.loads((bench.directory / "validation_history.json").read_text())[0]
    assert (entry["avg_reward"], entry["failure_rate"], entry["failure_reward"]) == (0.5, 0.5, 0.0)
    assert entry["policy_failures"] == 1


async def test_validations_are_counted_anew_when_a_lower_reward_appears(bench: Bench):
    """Step 0 fails on x and gives 0.4 on y; step 1 gives -1 and 1; step 2 fails and gives 0.4."""

    def answer(input: str) -> str:
        if bench.adapter.step == 1:
            return "-1" if input == "x" else "1"
        if input == "x":
            raise PolicyFailure("no move", reason="step_limit")
        return "0.4"

    bench.validation, bench.interval = evaluation("xy", answer), 1
    await bench.run(2)
    # At first 0 and 0.4; with -1 as the run's lowest reward, -1 and 0.4.
    assert [e["avg_reward"] for e in bench.events("validation")] == pytest.approx([0.2, 0.0, -0.3])
    history = RunHistory.of(read(bench.directory / "events.jsonl"))
    assert history.failure_reward == -1.0
    assert [v.mean for v in history.validations] == pytest.approx([-0.3, 0.0, -0.3])
    assert history.best is not None and history.best.step == 1
    rewards = [
        (step, result["reward"]) for split, step, result in bench.adapter.logged if split == "val"
    ]
    assert rewards == [(0, 0.2), (0, pytest.approx(-0.3)), (1, 0.0), (2, pytest.approx(-0.3))]


async def test_a_failure_of_the_environment_does_not_lower_the_reward(bench: Bench):
    def unlucky(input: str) -> str:
        if input == "x":
            raise ConnectionError("no route to the tool")
        return half_broken("x" if input == "y" else input)

    bench.validation = evaluation("xyzw", unlucky)
    bench.keys = {"rollout_retries": 0, "max_infrastructure_failures": 0.5}
    await bench.run(1)
    history = RunHistory.of(read(bench.directory / "events.jsonl"))
    first = history.validations[0]
    assert first.mean == pytest.approx(2 / 3) and first.failure_rate == pytest.approx(1 / 3)
    assert (first.failures, first.policy_failures) == (2, 1)


# ---- the final validation -------------------------------------------------------------------------


class Recording(Evaluation):
    """Notes which step each rollout asked for; the end of rollout `killed` ends the process.

    One rollout runs at a time.
    """

    turn: asyncio.Lock
    steps: ClassVar[list[tuple[str, int | None]]] = []
    killed: ClassVar[tuple[str, int | None] | None] = None

    async def run_item(self, item: Any, **options: Any) -> Any:
        here = item.id, options.get("step")
        async with self.turn:
            self.steps.append(here)
            result = await super().run_item(item, **options)
            if here == self.killed:
                raise asyncio.CancelledError
            return result


def recording(
    names: str, bench: Bench, changed: dict[int, str] | None = None, answer: Any = None
) -> Recording:
    """Held-out examples; the reward of a step is 0.1, 0.3, 0.6 and 0.5, unless it is `changed`."""
    rewards = {0: "0.1", 1: "0.3", 2: "0.6", 3: "0.5"} | (changed or {})
    plain = evaluation(names, answer or (lambda input: rewards[bench.adapter.step]))
    made = Recording(
        workflow=plain.workflow, items=plain.items, evaluators=plain.evaluators, max_concurrency=4
    )
    made.turn = asyncio.Lock()
    return made


@pytest.fixture
def chosen(bench: Bench) -> Bench:
    """Three trained steps are validated; step 2 is the best."""
    bench.validation = recording("xy", bench)
    bench.interval, bench.adapter.serves_steps = 1, True
    Recording.steps, Recording.killed = [], None
    return bench


def finals() -> list[tuple[str, int]]:
    """Example and step of the rollouts of comparisons, in the order of their starts."""
    return [(id, step) for id, step in Recording.steps if step is not None]


def result_of(bench: Bench) -> Comparison:
    result = comparison(RunHistory.of(read(bench.directory / "events.jsonl")))
    assert result is not None
    return result


async def test_the_first_and_the_chosen_step_answer_side_by_side_at_the_end(chosen: Bench):
    chosen.validation = recording("uvwxyz", chosen)
    await chosen.run(3)
    # Both answer an example before the next one starts, in an order that is drawn for each.
    ran = finals()
    assert [id for id, _ in ran] == [*"uuvvwwxxyyzz"]
    orders = [tuple(step for _, step in ran[i : i + 2]) for i in range(0, 12, 2)]
    assert set(orders) == {(0, 2), (2, 0)}
    assert [(e["epoch"], e["step"], e["round"]) for e in chosen.events("final_validation")] == [
        (0, 0, 2),
        (2, 2, 2),
    ]
    [began] = [e for e in chosen.events("validation_started") if e["final"]]
    assert (began["epoch"], began["rollouts"], began["resumed"]) == (2, 12, 0)
    # The choice itself rests on the validations before: the backend hears nothing new.
    assert [step for split, step, _ in chosen.adapter.logged if split == "val"] == [0, 1, 2, 3]
    result = result_of(chosen)
    assert result.fresh and result.chosen_of == 3 and not result.others
    assert (result.before.step, result.after.step) == (0, 2)
    assert (chosen.directory / "trajectories" / "final_002.jsonl").exists()
    ids = [e["rollout"] for e in chosen.events("rollout") if e["split"] == "final"]
    assert len(set(ids)) == 12 and {id.partition(":")[2] for id in ids[:2]} == {
        *("f0.2.0.0~1", "f2.2.0.0~1")
    }


async def test_an_outage_during_the_comparison_hits_both_policies(chosen: Bench):
    """The eighth to the nineteenth of forty answers are wrong, whoever gives them."""
    compared: list[str] = []

    def answer(input: str) -> str:
        if Recording.steps[-1][1] is None:
            return str(0.1 * chosen.adapter.step)
        compared.append(input)
        return "0" if 8 <= len(compared) <= 19 else "1"

    chosen.validation = recording("abcdefghijklmnopqrst", chosen, answer=answer)
    await chosen.run(1)
    before, after = result_of(chosen).rewards
    # Pairs 4 and 10 are hit on one side only, at the ends of the outage; 5 to 9 on both.
    assert sum(before[id] != after[id] for id in before) == 2
    assert sum(before[id] == after[id] == [0.0] for id in before) == 5


async def test_an_outage_during_half_of_the_comparison_leaves_the_other_pairs(chosen: Bench):
    """Pairs that nobody answered are left out; the rest is still an answer side by side."""
    compared: list[str] = []

    def answer(input: str) -> str:
        if Recording.steps[-1][1] is None:
            return str(0.1 * chosen.adapter.step)
        compared.append(input)
        if 10 <= len(compared) <= 29:
            raise ConnectionError("no route to the tool")
        return "1" if Recording.steps[-1][1] else "0"

    chosen.validation = recording("abcdefghijklmnopqrst", chosen, answer=answer)
    chosen.keys = {"rollout_retries": 0}
    await chosen.run(1)
    first, second = chosen.events("final_validation")
    assert (first["error"], second["error"]) == (None, None)
    assert (first["avg_reward"], second["avg_reward"]) == (0.0, 1.0)
    result = result_of(chosen)
    # Rollouts 10 to 29 of 40 are the second of pair 5, both of 6 to 14, and the first of 15.
    assert result.fresh and result.num_left_out == 11 and len(result.rewards[0]) == 9


async def test_the_order_is_drawn_for_each_repetition_and_depends_on_the_seed(chosen: Bench):
    orders = []
    for seed in (1, 2, 1):
        chosen.directory, Recording.steps = chosen.directory / "next", []
        chosen.adapter.step = 0
        chosen.keys = {"validation": ValidationConfig(reps=8), "seed": seed}
        await chosen.run(3)
        assert len(finals()) == 2 * 2 * 8
        orders.append(finals())
    assert orders[0] == orders[2] != orders[1]
    assert {(0, 2), (2, 0)} == {tuple(s for _, s in orders[0][i : i + 2]) for i in range(0, 16, 2)}


@pytest.mark.parametrize("killed", [("x", 0), ("x", 2), ("y", 0), ("y", 2)])
async def test_a_comparison_that_was_killed_goes_on_and_repeats_nothing(
    chosen: Bench, killed: tuple[str, int]
):
    Recording.killed = killed
    with pytest.raises(asyncio.CancelledError):
        await chosen.run(3)
    assert not chosen.events("final_validation")
    ended = [e for e in chosen.events("rollout") if e["split"] == "final"]
    known = [(e["example"], e["epoch"]) for e in ended]
    assert killed not in known
    Recording.steps, Recording.killed = [], None
    await chosen.run(3)
    assert sorted([*known, *Recording.steps]) == [("x", 0), ("x", 2), ("y", 0), ("y", 2)]
    assert len(chosen.events("final_validation")) == 2
    ids = [e["rollout"] for e in chosen.events("rollout")]
    assert len(set(ids)) == len(ids)
    Recording.steps = []
    await chosen.run(3)
    assert not Recording.steps and len(chosen.events("final_validation")) == 2


async def test_a_run_that_goes_on_compares_its_new_best_step_side_by_side(chosen: Bench):
    """The first step's answers of the earlier comparison were given at another time."""
    await chosen.run(2)
    assert (result_of(chosen).after.step, len(finals())) == (2, 4)
    Recording.steps = []
    chosen.validation = recording("xy", chosen, {3: "0.9"})
    await chosen.run(3)
    assert {*finals()} == {("x", 0), ("y", 0), ("x", 3), ("y", 3)}
    assert (result_of(chosen).fresh, result_of(chosen).after.step) == (True, 3)
    assert len(RunHistory.of(read(chosen.directory / "events.jsonl")).finals) == 2
    # Where the best step is the same, its answers count.
    Recording.steps = []
    chosen.validation = recording("xy", chosen, {3: "0.9", 4: "0.1"})
    await chosen.run(4)
    assert not finals() and result_of(chosen).after.step == 3


async def test_a_validation_that_was_not_sent_before_a_kill_is_sent_at_the_next_start(bench: Bench):
    bench.validation, bench.interval = evaluation("xy"), 1
    log_metrics = bench.adapter.log_metrics

    async def killed(*args: Any, **more: Any) -> None:
        raise asyncio.CancelledError

    bench.adapter.log_metrics = killed
    with pytest.raises(asyncio.CancelledError):
        await bench.run(1)
    assert len(bench.events("validation")) == 1
    bench.adapter.log_metrics = log_metrics
    await bench.run(1)
    assert [step for split, step, _ in bench.adapter.logged if split == "val"] == [0, 1]
    assert [event["epoch"] for event in bench.events("validation")] == [0, 1]


async def test_one_trained_step_and_the_first_answer_side_by_side(chosen: Bench):
    chosen.interval = 5
    await chosen.run(3)
    assert {*finals()} == {("x", 0), ("y", 0), ("x", 3), ("y", 3)}
    result = result_of(chosen)
    assert result.fresh and (result.before.step, result.after.step) == (0, 3)
    assert result.chosen_of == 1 and not result.others


async def test_greedy_answers_repeat_those_that_chose_the_step(chosen: Bench):
    """So the p value allows for the choice, although both answered again."""
    chosen.keys = {"validation": ValidationConfig(greedy=True)}
    trainer = await chosen.start()
    place = {"run_id": "r", "session": 1, "epochs": 3, "step": 0}
    trainer.events.append("run_started", validation_greedy=True, **place)
    await trainer.run(3)
    await trainer.cleanup()
    assert {*finals()} == {("x", 0), ("y", 0), ("x", 2), ("y", 2)}
    result = result_of(chosen)
    assert result.fresh and result.chosen_of == 3
    # Steps 1 and 3 against step 0: 0.3 - 0.1 and 0.5 - 0.1.
    assert [other["x"] for other in result.others] == pytest.approx([0.2, 0.4])


async def test_relative_rewards_choose_no_step_and_end_no_run(chosen: Bench):
    """Their mean says nothing about the policy, so nothing is decided by it."""
    chosen.validation = recording("xy", chosen, {1: "0.1", 2: "0.1", 3: "0.1"})
    chosen.keys = {"early_stopping": EarlyStoppingConfig(patience=1)}
    trainer = await chosen.start()
    place = {"run_id": "r", "session": 1, "epochs": 3, "step": 0}
    trainer.events.append("run_started", validation_relative=True, **place)
    assert len(await trainer.run(3)) == 3
    await trainer.cleanup()
    assert len(chosen.events("validation")) == 4 and not finals()
    assert not [entry for entry in chosen.adapter.logged if entry[0] == "val"]
    history = RunHistory.of(read(chosen.directory / "events.jsonl"))
    assert history.best is None and comparison(history) is None


async def test_a_backend_without_earlier_steps_compares_the_answers_of_the_run(chosen: Bench):
    chosen.adapter.serves_steps = False
    await chosen.run(3)
    assert not finals()
    result = result_of(chosen)
    assert not result.fresh and result.chosen_of == 3 and len(result.others) == 2


async def test_where_no_trained_step_is_better_the_last_one_is_compared(chosen: Bench):
    chosen.validation = recording("xy", chosen, {1: "0.09", 2: "0.08", 3: "0.07"})
    await chosen.run(3)
    assert {*finals()} == {("x", 0), ("y", 0), ("x", 3), ("y", 3)}
    result = result_of(chosen)
    assert result.fresh and (result.before.step, result.after.step) == (0, 3)
    assert result.chosen_of == 1


async def test_a_run_that_trained_nothing_compares_no_step_with_itself(chosen: Bench):
    chosen.adapter.moves = False
    await chosen.run(2)
    assert not finals()


async def test_a_step_that_the_backend_lost_leaves_the_answers_of_the_run(chosen: Bench, caplog):
    def answer(input: str) -> str:
        if Recording.steps[-1][1] == 0:
            raise ConnectionError("step 0 is not served")
        return {0: "0.1", 1: "0.3", 2: "0.6", 3: "0.5"}[chosen.adapter.step]

    chosen.validation, chosen.keys = recording("xy", chosen, answer=answer), {"rollout_retries": 0}
    await chosen.run(3)
    first, second = chosen.events("final_validation")
    assert "final validation of step 0: 2 of 2 rollouts failed" in first["error"]
    assert (first["unanswered"], second["error"]) == ({"x": [0], "y": [0]}, None)
    result = result_of(chosen)
    assert not result.fresh and len(result.others) == 2


def test_failures_of_the_environment_are_classified_by_whether_the_policy_answered():
    def record(
        example: str, generation: int, kind: Any, *, answered: bool = False
    ) -> RolloutRecord:
        failure = kind and FailureRecord(kind=kind, reason="connection")
        return RolloutRecord(
            epoch=0,
            split="val",
            example=example,
            generation=generation,
            rollout=f"{example}{generation}",
            reward=None if kind else 1.0,
            failure=failure,
            answered=answered,
        )

    records = [
        record("a", 0, None, answered=True),
        record("a", 1, "infrastructure"),
        record("a", 2, "infrastructure", answered=True),
        record("b", 0, "policy", answered=True),
        record("b", 1, "infrastructure", answered=True),
    ]
    assert missing(records) == {"unanswered": {"a": [1]}, "lost": {"a": [2], "b": [1]}}
