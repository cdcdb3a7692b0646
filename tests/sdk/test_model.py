"""Model and TrainableModel: names, clients, what is logged, and what is refused."""

import asyncio
import hashlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from tests.prose import Prose, place_of

import hone
from hone import Model, TrainableModel, Trajectory, TrajectoryGroup
from hone.art import dev
from hone.errors import ConfigError, StateError
from hone.trajectory import means
from hone.types import stored_name


def prompted(**more: Any) -> Model:
    return Model(name="gpt", inference_base_url="http://x/v1", inference_api_key="k", **more)


def test_inference_names():
    assert prompted().get_inference_name() == "gpt"
    assert prompted(inference_model_name="gpt-4o").get_inference_name() == "gpt-4o"
    model = TrainableModel(name="agent", project="p", base_model="b")
    assert (model.get_inference_name(), model.get_inference_name(step=0)) == ("agent", "agent@0")


async def test_a_client_is_made_once_and_is_generous():
    model = prompted()
    client = model.openai_client()
    assert model.openai_client() is client
    assert (str(client.base_url), client.api_key) == ("http://x/v1/", "k")
    assert client.timeout == openai.Timeout(1200.0, connect=30.0)
    model.inference_base_url = "http://y/v1"  # as register does when the server moved
    assert str(model.openai_client().base_url) == "http://y/v1/"


def test_each_event_loop_has_its_own_client():
    model = prompted()

    async def ask() -> object:
        return model.openai_client()

    # Connections belong to the loop that made them; the first one's is closed by now.
    assert asyncio.run(ask()) is not asyncio.run(ask())


def test_without_an_address_there_is_no_client(prose: Prose):
    with pytest.raises(ConfigError) as caught:
        Model(name="gpt").openai_client()
    prose(caught)
    trainable = TrainableModel(name="agent", base_model="b")
    with pytest.raises(ConfigError) as caught:
        trainable.openai_client()
    prose(caught)
    with pytest.raises(ConfigError) as caught:
        trainable.backend()
    prose(caught)


async def test_a_model_that_is_not_trained():
    model = prompted()
    backend = hone.RemoteBackend("http://127.0.0.1:1")  # nobody is there, and nobody is asked
    await model.register(backend)
    assert model.backend() is backend
    assert (model.trainable, await model.get_step()) == (False, 0)


async def test_logs_of_an_untrained_model_are_written_beside_it(prose: Prose, tmp_path: Path):
    model = prompted(project="games", base_path=str(tmp_path))
    group = TrajectoryGroup([Trajectory(reward=1, logs=["won"]), Trajectory(reward=0)])
    moves: Any = np.int64(3)
    cost: Any = np.float32(2)
    group.trajectories[0].metrics["moves"] = moves  # assigned values are not validated
    logged = await model.log([group, ValueError("lost")], split="test", metrics={"cost": cost})
    # Two rewards, 1 and 0; one failure in three rollouts.
    assert logged == {
        "test/reward": 0.5,
        "test/reward_std_dev": 0.5,
        "test/exception_rate": pytest.approx(1 / 3),
        "test/moves": 3.0,
        "test/cost": 2.0,
    }
    await model.log(None, metrics={"reward": 0.75}, step=4)
    directory = tmp_path / "projects/games/models/gpt"
    history = [json.loads(line) for line in (directory / "history.jsonl").read_text().splitlines()]
    assert history == [{"step": 0, **logged}, {"step": 4, "val/reward": 0.75}]
    lines = (directory / "trajectories/test/0000.jsonl").read_text().splitlines()
    first, second = (TrajectoryGroup.model_validate_json(line) for line in lines)
    assert (first.trajectories[0].logs, second.exceptions[0].message) == (["won"], "lost")
    with pytest.raises(ConfigError) as caught:
        await model.log()
    prose(caught)


@pytest.mark.parametrize("reward", [math.nan, math.inf, None, "0.5"])
async def test_a_reward_that_is_not_a_number_is_not_averaged_away(
    prose: Prose, tmp_path: Path, reward: Any
):
    model = Model(name="m", base_path=str(tmp_path))
    scored, unscored = Trajectory(reward=1.0), Trajectory()
    unscored.reward = reward  # assigned values are not validated
    with pytest.raises(ConfigError) as caught:
        await model.log([TrajectoryGroup([scored, unscored])])
    prose(caught)
    with pytest.raises(ConfigError) as caught:
        await model.log([scored, unscored])
    prose(caught)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "where",
    [{"split": "../x"}, {"step": "x"}, {"step": -1}],
)
async def test_nothing_is_logged_for_a_split_or_a_step_that_is_none(
    prose: Prose, tmp_path: Path, where: dict[str, Any]
):
    model = prompted(project="games", base_path=str(tmp_path))
    with pytest.raises(ConfigError) as caught:
        await model.log([Trajectory(reward=1)], **where)
    prose(caught)
    assert not list(tmp_path.iterdir())


def test_state_is_read_merged_and_written(tmp_path: Path):
    model = prompted(base_path=str(tmp_path))
    assert model.read_state() is None
    model.overwrite_state({"epoch": 1, "seen": {"a": 1}})
    assert model.merge_state({"seen": {"b": 2}}) == {"epoch": 1, "seen": {"a": 1, "b": 2}}
    again = prompted(base_path=str(tmp_path))
    assert again.read_state() == {"epoch": 1, "seen": {"a": 1, "b": 2}}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b'{\n  "epoch": 1,\n  "se',
        b"\xff\xfe",
        b"[1]\n",
    ],
)
def test_a_damaged_state_is_named_and_kept(prose: Prose, tmp_path: Path, content: bytes):
    model = prompted(base_path=str(tmp_path))
    model.overwrite_state({"epoch": 1})
    (file,) = tmp_path.rglob("state.json")
    file.write_bytes(content)
    for use in (model.read_state, lambda: model.merge_state({"epoch": 2})):
        with pytest.raises(StateError) as error:
            use()
        prose(error)
        assert place_of(error) == str(file)
    assert file.read_bytes() == content
    model.overwrite_state({"epoch": 3})
    assert model.read_state() == {"epoch": 3}


def test_arguments_for_litellm():
    assert prompted().litellm_completion_params() == {
        "model": "gpt",
        "base_url": "http://x/v1",
        "api_key": "k",
        "temperature": 1,
    }
    trained = TrainableModel(name="agent", base_model="b")
    assert trained.litellm_completion_params(step=2)["model"] == "hosted_vllm/agent@2"


def test_the_server_is_told_what_was_written():
    model = TrainableModel(
        name="agent",
        project="games",
        base_model="smollm2-135m-instruct",
        rank=4,
        chat_template_kwargs={"enable_thinking": False},
        defaults={"learning_rate": 1e-4},
        init_args={"max_seq_length": 512},
        engine_args={"gpu_memory_utilization": 0.5},
        peft_args={"lora_alpha": 8},
        config={"mine": 1},
    )
    assert model.trainable
    assert model.spec().model_dump(exclude_defaults=True) == {
        "name": "agent",
        "project": "games",
        "base_model": "smollm2-135m-instruct",
        "rank": 4,
        "chat_template_kwargs": {"enable_thinking": False},
        "defaults": {"learning_rate": 1e-4},
        "init_args": {"max_seq_length": 512},
        "engine_args": {"gpu_memory_utilization": 0.5},
        "peft_args": {"lora_alpha": 8},
    }


def test_a_config_of_one_s_own_type_is_kept():
    class Policy(hone.History):
        max_turns: int = 5

    model = TrainableModel[Policy](name="agent", base_model="b", config=Policy(max_turns=7))
    assert model.config is not None
    assert model.config.max_turns == 7


def test_what_hone_does_not_take_is_refused_by_name():
    with pytest.raises(ValueError, match="base_paths"):
        TrainableModel(name="a", base_model="b", base_paths=".art")
    for name in ("../a", "a@1", "a ", "a\nb"):
        with pytest.raises(ValueError, match="name"):
            TrainableModel(name=name, base_model="b")


def test_an_internal_config_is_sent_in_hone_s_words(prose: Prose):
    internal = dev.InternalModelConfig(
        init_args=dev.InitArgs(max_seq_length=512),
        engine_args=dev.EngineArgs(gpu_memory_utilization=0.5),
        peft_args=dev.PeftArgs(r=4),
        trainer_args=dev.TrainerArgs(learning_rate=1e-4),
        trainer_gpu_ids=[0],
        inference_gpu_ids=[1],
        chat_template_kwargs={"enable_thinking": False},
        rollout_weights_mode="lora",
        tinker_args=None,
    )
    model = TrainableModel(name="a", base_model="b", engine_args={"max_num_seqs": 8})
    model._internal_config = internal  # as ART's notebooks set it
    assert model._internal_config == internal
    sent = model.spec().model_dump(exclude_defaults=True)
    assert sent == {
        "name": "a",
        "base_model": "b",
        "init_args": {"max_seq_length": 512},
        "engine_args": {
            "max_num_seqs": 8,
            "gpu_memory_utilization": 0.5,
            "trainer_gpu_ids": [0],
            "inference_gpu_ids": [1],
        },
        "peft_args": {"r": 4},
        "trainer_args": {"learning_rate": 1e-4},
        "chat_template_kwargs": {"enable_thinking": False},
    }
    with pytest.raises(ConfigError) as caught:
        TrainableModel(
            name="a",
            base_model="b",
            engine_args={"max_num_seqs": 8},
            _internal_config={"engine_args": {"max_num_seqs": 9}},
        ).spec()
    prose(caught)


@pytest.mark.parametrize(
    "internal",
    [
        {"init_arg": {}},
        {"init_args": 3},
        {"rollout_weights_mode": "merged"},
        {"torchtune_args": {"model": "x"}},
        {"chat_template": "{{ x }}"},
    ],
)
def test_an_internal_config_that_hone_cannot_honour(prose: Prose, internal: dict[str, Any]):
    with pytest.raises(ConfigError) as caught:
        TrainableModel(name="a", base_model="b", _internal_config=internal)
    prose(caught)


def test_a_name_that_is_not_a_valid_directory_is_stored_under_a_derived_name():
    model = TrainableModel(name="my agent/v2", project="Board games", base_model="b")
    spec = model.spec()
    # sha256 of the name as written, so that 'my agent v2' is another model.
    assert spec.name == f"my-agent-v2-{hashlib.sha256(b'my agent/v2').hexdigest()[:8]}"
    assert spec.project == f"Board-games-{hashlib.sha256(b'Board games').hexdigest()[:8]}"
    assert stored_name("my agent v2") != spec.name
    assert stored_name("agent-001") == "agent-001"


def test_means_by_hand():
    groups = [
        TrajectoryGroup(
            [
                Trajectory(reward=0, metrics={"won": False}),
                Trajectory(reward=1, metrics={"won": True}),
            ],
            metrics={"spread": 4},
        ),
        TrajectoryGroup([Trajectory(reward=2, metrics={"turns": 5}), RuntimeError("x")]),
    ]
    # 3 rewards: mean 1; 1 failure in 4 rollouts; the only group of two: population std of 0, 1.
    assert means(groups) == {
        "reward": 1.0,
        "exception_rate": 0.25,
        "won": 0.5,
        "turns": 5.0,
        "reward_std_dev": 0.5,
        "group_spread": 4.0,
    }
    alone = [Trajectory(reward=1), Trajectory(reward=2), ValueError("x")]
    assert means(alone) == {"reward": 1.5, "exception_rate": pytest.approx(1 / 3)}
    assert means([]) == {}


def test_means_that_no_float_can_hold_are_left_out():
    group = TrajectoryGroup(
        [
            Trajectory(reward=1e308, metrics={"huge": 10**400, "won": True}),
            Trajectory(reward=1e308, metrics={"won": float("nan")}),
        ]
    )
    # The sum of the rewards is beyond all floats; of `won` one value is known.
    assert means([group]) == {"exception_rate": 0.0, "won": 1.0}
