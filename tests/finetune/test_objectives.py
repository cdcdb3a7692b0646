"""The trainers dpo and sft, the builder conversations: what is read, refused, sent and resumed."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.finetune.command import DOCUMENT, Command, Parts
from tests.prose import Prose

from hone.config.problems import ConfigProblems
from hone.errors import ConfigError, Conflict
from hone.files.event_log import FILE, read
from hone.finetune.base import DPOItem, Trajectory, TrajectoryCollection
from hone.finetune.dataset_builder import ConversationBuilderConfig
from hone.finetune.rerender import sdk_groups
from hone.report.history import RunHistory
from hone.report.plots import training_rewards

USER = {"role": "user", "content": "2 + 2?"}
ROWS = ConversationBuilderConfig()
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def assistant(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def sent(
    row: dict[str, Any], config: ConversationBuilderConfig = ROWS, objective: Any = None
) -> list[Any]:
    """The messages and the reward of each trajectory of a row, as the server gets them."""
    groups, dropped = sdk_groups(
        TrajectoryCollection(trajectories=[config.trajectories("e", row, objective)], run_id="r")
    )
    assert not dropped and groups[0].example == "e"
    return [(one.messages_and_choices, one.reward) for one in groups[0]]


def test_rows_of_every_form_become_conversations():
    context = assistant("hello", weight=0)
    # a whole conversation; OpenAI's weight is kept
    assert sent({"messages": [USER, context, USER, assistant("4")]}) == [
        ([USER, context, USER, assistant("4")], 0.0)
    ]
    # prompt and completion, as text and as messages; the prompt's own answers are context
    assert sent({"prompt": "2 + 2?", "completion": "4"}) == [
        ([{**USER, "weight": 0}, assistant("4")], 0)
    ]
    ((messages, _),) = sent(
        {"prompt": [USER, assistant("hm"), USER], "completion": [assistant("4")]}
    )
    assert [m.get("weight") for m in messages] == [0, 0, 0, None]
    # a pair: the preferred one has reward 1
    pair = sent({"prompt": "2 + 2?", "chosen": "4", "rejected": "5"})
    assert [(m[-1]["content"], reward) for m, reward in pair] == [("4", 1.0), ("5", 0.0)]


def test_what_both_of_a_pair_begin_with_is_context():
    row = {
        "chosen": [USER, assistant("let me see"), USER, assistant("4")],
        "rejected": [USER, assistant("let me see"), USER, assistant("5")],
    }
    for messages, _ in sent(row):
        assert [m.get("weight") for m in messages] == [0, 0, 0, None]


def test_sft_never_trains_on_rejected_answers():
    pair = {"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}

    def answers(row: dict[str, Any]) -> list[str]:
        return [messages[-1]["content"] for messages, _ in sent(row, objective="sft")]

    assert answers(pair) == ["4"]
    assert answers({"prompt": "2 + 2?", "chosen": "4"}) == ["4"]
    assert answers(pair | {"completion": "four"}) == ["four"]
    assert answers(pair | {"messages": [USER, assistant("IV")]}) == ["IV"]
    # and DPO takes the pair, whatever else the row has
    row = pair | {"messages": [USER, assistant("IV")], "completion": "four"}
    assert [messages[-1]["content"] for messages, _ in sent(row, objective="dpo")] == ["4", "5"]


@pytest.mark.parametrize(
    "row",
    [{"messages": [USER, assistant("4")]}, {"prompt": "2 + 2?", "chosen": "4", "rejected": None}],
)
def test_dpo_refuses_a_row_without_a_pair(prose: Prose, row: dict[str, Any]):
    with pytest.raises(ConfigError) as caught:
        ROWS.trajectories("e", row, "dpo")
    prose(caught)


def test_a_prompt_with_which_the_answers_begin_is_not_repeated():
    system = {"role": "system", "content": "Be brief."}
    for before in ([USER], [system, USER], [{**USER, "tool_calls": None}]):
        row = {
            "prompt": "2 + 2?",
            "chosen": [*before, assistant("4")],
            "rejected": [*before, assistant("5")],
        }
        for messages, _ in sent(row):
            assert [m["role"] for m in messages] == [m["role"] for m in before] + ["assistant"]
            assert [m.get("weight") for m in messages] == [0] * len(before) + [None]
    ((messages, _),) = sent({"prompt": [system, USER], "completion": [USER, assistant("4")]})
    assert len(messages) == 4, "another prompt is not left out"


def test_a_dataset_may_have_messages_in_any_order():
    greeting, thought = assistant("Hi!", weight=0), assistant("Let me look.", weight=0)
    for messages in ([greeting, USER, assistant("4")], [USER, thought, assistant("4")]):
        assert sent({"messages": messages}) == [(messages, 0.0)]


def test_columns_can_have_other_names_and_tools():
    config = ConversationBuilderConfig(
        chosen_key="chosen_response", rejected_key="rejected_response"
    )
    row = {
        "prompt": "2 + 2?",
        "chosen_response": "4",
        "rejected_response": "5",
        "tools": json.dumps([TOOL]),  # as tables have them, or as a list
    }
    assert [m[-1]["content"] for m, _ in sent(row, config)] == ["4", "5"]
    assert config.trajectories("e", row)[0].metadata == {
        "id": "e", "from_dataset": True, "tools": [TOOL],
    }  # fmt: skip
    assert config.trajectories("e", row | {"tools": [TOOL]})[0].metadata == {
        "id": "e", "from_dataset": True, "tools": [TOOL],
    }  # fmt: skip


@pytest.mark.parametrize(
    "row",
    [
        {"question": "q"},
        {"messages": [{"content": "x"}]},
        "text",
        {"messages": [USER]},
        {"messages": [USER, assistant("4", weight=0)]},
        {"prompt": "p", "chosen": "4", "rejected": "4"},
        {"messages": [assistant("Hi!"), USER, assistant("4")]},
        {"messages": [USER, assistant("4")], "tools": "add"},
        {"messages": [USER, assistant("4")], "tools": [{"t": 1}]},
    ],
)
def test_a_row_that_is_not_a_conversation_is_refused(prose: Prose, row: Any):
    with pytest.raises(ConfigError) as caught:
        ROWS.trajectories("e", row)
    prose(caught)


def test_preference_pairs_of_other_builders_are_sent_as_groups_of_two():
    pair = DPOItem(prompt="p", chosen_response="a", rejected_response="b")
    one = Trajectory(episode=[pair], reward=0.3, metadata={"id": "e1"})
    groups, dropped = sdk_groups(TrajectoryCollection(trajectories=[[one, one]], run_id="r"))
    assert [g.example for g in groups] == ["e1", "e1"] and not dropped
    prompt = {"role": "user", "content": "p"}
    assert [(t.messages_and_choices, t.reward) for t in groups[0]] == [
        ([prompt, assistant("a")], 1.0),
        ([prompt, assistant("b")], 0.0),
    ]


# ---- the command ----------------------------------------------------------------------------------


def document(trainer: str, builder: str = "conversations", **more: Any) -> dict[str, Any]:
    changed = {
        "trajectory_builders": {"b": {"_type": builder}},
        "trainers": {"t": {"_type": trainer, **more}},
    }
    return {**DOCUMENT, **changed}


@pytest.fixture
def sft(command: Command) -> Command:
    rows = [{"id": q, "question": q, "messages": [USER, assistant(q)]} for q in "abc"]
    (command.directory / "train.json").write_text(json.dumps(rows))
    command.file.write_text(yaml.safe_dump(document("sft")))
    return command


def test_sft_trains_the_rows_without_rollouts_and_measures_held_out_ones(sft: Command):
    assert sft(validation_dataset=Path("val.json")) == 0
    jobs = list(Parts.adapter.jobs.values())
    assert len(jobs) == 2 and all(len(job.trajectories) == 3 for job in jobs)
    assert jobs[0].metadata is not None and jobs[0].metadata["training"] == {"loss": "sft"}
    collected = sft.events("epoch_collected")[0]
    # no rewards, so none are shown, and no group is called flat
    assert collected["metrics"]["avg_reward"] is None
    assert collected["zero_variance_groups"] is None
    assert [e["rollouts"] for e in sft.events("epoch_started")] == [0, 0]
    assert {e["split"] for e in sft.events("rollout")} <= {"val", "final"}
    assert len(sft.events("validation")) == 2
    report = json.loads((sft.out / "report.json").read_text())
    assert report["epochs"] == 2 and (sft.out / "report.html").exists()
    assert training_rewards(RunHistory.of(read(sft.out / FILE))) == []  # and no crosses for gaps


def test_what_an_adapter_cannot_send_is_counted(sft: Command):
    Parts.adapter.dropped = Counter(message_order=2)
    assert sft() == 0
    assert [e["dropped"] for e in sft.events("job_submitted")] == [{"message_order": 2}] * 2
    report = json.loads((sft.out / "report.json").read_text())
    assert report["dropped"] == {"message_order": 4}
    lines = (sft.out / "training_metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["dropped"] for line in lines] == [{"message_order": 2}] * 2


def problems(command: Command, changed: dict[str, Any]) -> str:
    command.file.write_text(yaml.safe_dump(changed))
    with pytest.raises(ConfigProblems) as raised:
        command()
    return str(raised.value)


def test_incompatible_components_are_refused_before_anything_runs(sft: Command):
    art = {
        "_type": "hone_server",
        "backend": {"base_model": "smollm2-135m-instruct"},
    }
    llms = {"policy": {"_type": "trainable"}}

    def with_training(trainer: str, **training: Any) -> dict[str, Any]:
        adapters = {"a": {**art, "training": training}}
        return {**document(trainer), "trainer_adapters": adapters, "llms": llms}

    rollouts = {**document("sft", "rollouts")}
    assert "sft would train on all of them" in problems(sft, rollouts)
    for trainer in ("rl", "openpipe_art_trainer"):
        assert "set a trainer of type sft or dpo" in problems(sft, document(trainer))
    wrong = problems(sft, with_training("dpo", loss="grpo"))
    assert "is 'grpo', but trainer 't' is of type dpo" in wrong
    wrong = problems(sft, with_training("dpo", beta=0.1))
    assert "beta is 0.1, which has no effect on loss 'dpo'" in wrong and "Set dpo_beta" in wrong
    (sft.directory / "train.json").write_text(json.dumps([{"id": "a", "question": "a"}]))
    assert "row 'a' has neither 'messages'" in problems(sft, document("sft"))
    rows = [{"id": "a", "question": "a", "messages": [USER, assistant("4")]}]
    (sft.directory / "train.json").write_text(json.dumps(rows))
    assert "row 'a' has no pair of 'chosen'" in problems(sft, document("dpo"))


def test_a_resumed_run_on_a_dataset_refuses_another_configuration(prose: Prose, sft: Command):
    Parts.adapter.fail = lambda key: "broken" if key.endswith(":1:0") else None
    assert sft() == 1 and not list(sft.out.glob("trajectories/*"))
    Parts.adapter.fail = lambda key: None
    with pytest.raises(Conflict) as caught:
        sft(("finetuning.seed", "5"))
    prose(caught)
    assert sft() == 0 and len(Parts.adapter.jobs) == 3, "the first job is not sent again"


def test_sft_of_a_dataset_with_pairs_trains_the_preferred_answers(sft: Command):
    rows = [{"id": q, "question": q, "prompt": q, "chosen": q, "rejected": "no"} for q in "abc"]
    (sft.directory / "train.json").write_text(json.dumps(rows))
    assert sft() == 0
    job = next(iter(Parts.adapter.jobs.values()))
    groups, _ = sdk_groups(job)
    trained = [[one.messages_and_choices[-1]["content"] for one in group] for group in groups]
    assert sorted(trained) == [["a"], ["b"], ["c"]]


def test_dpo_takes_pairs_from_groups_and_sends_its_keys(command: Command):
    changed = document("dpo", "scripted_builder", beta=0.3, pairs="all")
    command.file.write_text(yaml.safe_dump(changed))
    assert command() == 0
    keys = (next(iter(Parts.adapter.jobs.values())).metadata or {})["training"]
    assert keys == {
        "loss": "dpo", "dpo_beta": 0.3, "dpo_pairs": "all", "dpo_reference": "base",
    }  # fmt: skip
    # rollouts have rewards, and groups with equal ones are counted
    collected = command.events("epoch_collected")[0]
    assert collected["metrics"]["avg_reward"] is not None
    assert collected["zero_variance_groups"] == 0


def test_the_dry_run_of_a_dataset_counts_no_rollouts(
    sft: Command, capsys: pytest.CaptureFixture[str]
):
    assert sft(dry_run=True) == 0
    printed = capsys.readouterr().out
    assert "examples      3, of which 3 an epoch, conversations of the dataset" in printed
    assert "training      2 epochs of 1 round: 2 jobs, " in printed
    assert "preflight     one token from each model" in printed
