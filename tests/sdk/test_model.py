"""Model and TrainableModel: names, clients, what is logged, and what is refused."""

import asyncio

import openai
import pytest

import hone
from hone import Model, TrainableModel, Trajectory, TrajectoryGroup
from hone.errors import ConfigError, NotInThisVersion
from hone.trajectory import means


def prompted(**more: str) -> Model:
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


def test_without_an_address_there_is_no_client():
    with pytest.raises(ConfigError, match="inference_base_url is None"):
        Model(name="gpt").openai_client()
    trainable = TrainableModel(name="agent", base_model="b")
    with pytest.raises(ConfigError, match=r"await model.register\(backend\) first"):
        trainable.openai_client()
    with pytest.raises(ConfigError, match=r"await model.register\(backend\) first"):
        trainable.backend()


async def test_a_model_that_is_not_trained():
    model = prompted()
    backend = hone.RemoteBackend("http://127.0.0.1:1")  # nobody is there, and nobody is asked
    await model.register(backend)
    assert model.backend() is backend
    assert (model.trainable, await model.get_step()) == (False, 0)
    with pytest.raises(NotInThisVersion, match="only trained models have a history"):
        await model.log([Trajectory(reward=1)])


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
    with pytest.raises(ValueError, match="base_path"):
        TrainableModel(name="a", base_model="b", base_path=".art")
    with pytest.raises(ValueError, match="name"):
        TrainableModel(name="../a", base_model="b")
    with pytest.raises(NotInThisVersion, match="are fields of their own here"):
        TrainableModel(name="a", base_model="b", _internal_config={})
    model = TrainableModel(name="a", base_model="b")
    with pytest.raises(NotInThisVersion, match="are fields of their own here"):
        model._internal_config = {}


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
