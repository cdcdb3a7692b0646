"""ART's names with `import hone.art as art`: options and captured trajectories, on a real server."""

import asyncio
import logging
import random
import secrets
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from tests.prose import Prose

import hone.art as art
from hone.art import dev
from hone.art.langgraph import init_chat_model, wrap_rollout
from hone.art.local import LocalBackend
from hone.art.serverless.backend import ServerlessBackend
from hone.art.trajectories import History, get_messages
from hone.art.utils import (
    format_message,
    get_model_step,
    iterate_dataset,
    limit_concurrency,
    log_http_errors,
)
from hone.art.utils.strip_logprobs import strip_logprobs
from hone.capture.histories import add_call
from hone.capture.scope import recorded
from hone.errors import ConfigError

ASKED: list[Any] = [{"role": "user", "content": "Say a number."}]


def test_the_newest_step_on_disk_is_that_of_a_whole_checkpoint(tmp_path: Path):
    model = art.TrainableModel(name="a", project="p", base_model="b", report_metrics=[])
    for name in ("0003", "0004.corrupt", "0005.tmp"):
        (tmp_path / "projects" / "p" / "models" / "a" / "checkpoints" / name).mkdir(parents=True)
    assert get_model_step(model, str(tmp_path)) == 3


def test_train_config_has_art_s_fields():
    fields = {"learning_rate": 1e-5, "beta": 0.1, "grad_accumulation_sequences": None}
    config = art.TrainConfig.model_validate(fields)
    assert (config.learning_rate, config.beta) == (1e-5, 0.1)
    with pytest.raises(ValueError, match="set groups_per_optimizer_step"):
        art.TrainConfig.model_validate(fields | {"grad_accumulation_sequences": 4})


# ---- a whole step ------------------------------------------------------------------------------


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> art.TrainableModel:
    return art.TrainableModel(
        name=f"agent {secrets.token_hex(4)}/v2",
        project="Board games",
        base_model=str(tiny_model),
        base_path=str(tmp_path),
        id="1",
        entity="team",
        report_metrics=[],
    )


async def rollout(model: art.TrainableModel, reward: float) -> None:
    """Two turns, as an agent makes them; the trajectory fills itself."""
    messages = list(ASKED)
    for _ in range(2):
        answer = await model.openai_client().chat.completions.create(
            model=model.get_inference_name(), messages=messages, max_tokens=4
        )
        text = answer.choices[0].message.content
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "And?"}]
    art.auto_trajectory(required=True).reward = reward


async def test_art_s_options_in_a_whole_step(
    local: LocalBackend, model: art.TrainableModel, caplog: pytest.LogCaptureFixture
):
    model._internal_config = dev.InternalModelConfig(
        init_args={"max_seq_length": 512, "use_async": True},
        peft_args={"r": 4},
        trainer_args={"learning_rate": 1e-3, "logging_steps": 1},
    )
    with caplog.at_level(logging.WARNING, logger="hone"):
        await model.register(local, {"log_file": "x.log", "server_args": {"port": 1}})
    assert (
        "no effect here: init_args.use_async, trainer_args.logging_steps, log_file" in caplog.text
    )
    info = await local.model_info(model)
    assert (info.rank, info.step) == (4, 0)
    group = await art.TrajectoryGroup(
        art.capture_auto_trajectory(rollout(model, float(i % 2))) for i in range(4)
    )
    for one in group:
        assert [item["role"] for item in one.messages()] == [*["user", "assistant"] * 2]
        assert one.metrics["duration"] > 0
    result = await local.train(
        model, [group], loss_fn="ppo", normalize_advantages=False, save_checkpoint=True
    )
    job = await local.job(result.job)
    # The rate is of trainer_args, the length of init_args; every call was found by its id.
    used = job.config
    assert (used.loss, used.scale_rewards, used.learning_rate) == ("grpo", False, 1e-3)
    assert used.max_seq_length == 512
    assert result.counts == {"matched": 8}, "four trajectories of two calls"
    assert result.step == await model.get_step() == 1
    assert result.checkpoint_path is not None
    assert (Path(result.checkpoint_path) / "adapter_model.safetensors").is_file()
    assert get_model_step(model, str(local.root)) == 1
    again = await model.train(
        [group], _config={"ppo": False}, max_staleness=1, save_checkpoint=False
    )
    assert (again.step, again.checkpoint_path) == (2, None)
    await model.log([group], split="val")
    assert (await local.model_info(model)).best_step == 2
    await model.close()


async def test_a_server_at_a_url_under_art_s_name(local: LocalBackend, model: art.TrainableModel):
    backend = ServerlessBackend(api_key="wandb-key", base_url=local.base_url)
    await model.register(backend)
    assert art.ServerlessBackend is ServerlessBackend
    assert await model.get_step() == 0
    answer = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(), messages=ASKED, max_tokens=2
    )
    assert answer.choices[0].logprobs is not None
    await model.close()


def test_a_local_backend_refuses_what_it_does_not_count(prose: Prose):
    with pytest.raises(ConfigError) as caught:
        LocalBackend(gpu_cost_per_hour_usd=2.0)  # pyright: ignore[reportArgumentType]
    prose(caught)
    assert LocalBackend(path=None).root.name == ".hone"


@pytest.mark.e2e
def test_in_process_shows_what_the_server_prints(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    with LocalBackend(in_process=True, path=tmp_path / "root") as backend:
        backend.start()
    shown = capfd.readouterr().err
    assert f"state         {backend.root}" in shown
    assert backend.output.read_text() in shown


# ---- captured trajectories ---------------------------------------------------------------------


async def test_branches_become_further_histories(local: LocalBackend, model: art.TrainableModel):
    await model.register(local)

    async def agent() -> str:
        trajectory = art.auto_trajectory(required=True)
        client = model.openai_client()
        name = model.get_inference_name()
        first = await client.chat.completions.create(model=name, messages=ASKED, max_tokens=2)
        assert len(trajectory.messages_and_choices) == 2, "it is filled as the agent runs"
        stream = await client.chat.completions.create(
            model=name, messages=ASKED, max_tokens=2, stream=True
        )
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert trajectory.additional_histories[0].messages()[-1]["content"] == text
        await asyncio.to_thread(ask_from_a_thread, model)
        return first.choices[0].message.content or ""

    trajectory = await art.capture_auto_trajectory(agent())
    assert len(trajectory.additional_histories) == 2
    assert art.auto_trajectory() is None
    with pytest.raises(RuntimeError, match="outside capture_auto_trajectory"):
        art.auto_trajectory(required=True)
    await model.close()


def ask_from_a_thread(model: art.TrainableModel) -> None:
    assert model.inference_base_url and model.inference_api_key
    with OpenAI(base_url=model.inference_base_url, api_key=model.inference_api_key) as client:
        other = [{"role": "user", "content": "Another question"}]
        client.chat.completions.create(
            model=model.get_inference_name(),
            messages=other,  # pyright: ignore[reportArgumentType]
            max_tokens=2,
        )
    assert len(art.auto_trajectory(required=True).additional_histories) == 2


def test_a_call_continues_the_conversation_it_was_sent_with():
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    answer = {"role": "assistant", "content": None, "tool_calls": [{**call, "index": 0}]}
    trajectory = art.Trajectory()
    tools = [{"type": "function", "function": {"name": "f"}}]
    add_call(trajectory, ASKED, tools, {"message": answer, "index": 0, "call_id": "a"})
    # Clients send the answer back without the keys that they do not know.
    back = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "c1", "content": "7"}
    reply = {"message": {"role": "assistant", "content": "7"}, "index": 0, "call_id": "b"}
    add_call(trajectory, [*ASKED, back, result], tools, reply)
    assert [one["role"] for one in trajectory.messages()] == [
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert [trajectory.messages_and_choices[i].call_id for i in (1, 3)] == ["a", "b"]
    add_call(trajectory, [*ASKED, back, result], None, reply)  # without tools it is another prompt
    (other,) = trajectory.additional_histories
    assert len(other.messages()) == 4


async def test_yielded_trajectories():
    async def agent(trajectory: art.Trajectory | None) -> None:
        if trajectory is not None:
            art.yield_trajectory(art.Trajectory(reward=0.5))
            await asyncio.to_thread(art.yield_trajectory, trajectory)

    art.yield_trajectory(art.Trajectory())  # nobody waits
    given = [art.Trajectory(reward=1), art.Trajectory(reward=2)]
    got = await asyncio.gather(*(art.capture_yielded_trajectory(agent(one)) for one in given))
    assert all(a is b for a, b in zip(got, given, strict=True)), "concurrent ones do not mix"
    with pytest.raises(RuntimeError, match="did not call yield_trajectory"):
        await art.capture_yielded_trajectory(agent(None))


async def test_a_wrapped_rollout_gets_the_calls_to_its_model(
    prose: Prose, local: LocalBackend, model: art.TrainableModel
):
    await model.register(local)

    async def rollout(question: str) -> art.Trajectory:
        client, name = model.openai_client(), model.get_inference_name()
        messages: list[Any] = [{"role": "user", "content": question}]
        await client.chat.completions.create(
            model=model.base_model, messages=messages, max_tokens=2
        )
        await client.chat.completions.create(model=name, messages=messages, max_tokens=2)
        return art.Trajectory(reward=1.0, metadata={"question": question})

    trajectory = await wrap_rollout(model, rollout)("Is it late?")
    assert (trajectory.reward, trajectory.metadata) == (1.0, {"question": "Is it late?"})
    assert [one["role"] for one in trajectory.messages()] == ["user", "assistant"]
    assert not trajectory.additional_histories, "the call to another model is not its own"
    with pytest.raises(ConfigError) as caught:
        init_chat_model()
    prose(caught)
    await model.close()


async def test_a_rollout_of_the_harness_is_not_captured_twice(prose: Prose):
    async def agent() -> None: ...

    harness, _ = recorded()
    with harness, pytest.raises(ConfigError) as caught:
        await art.capture_auto_trajectory(agent())
    prose(caught)


# ---- trajectories and utils ---------------------------------------------------------------------


def test_start_time_and_policy_versions():
    began = datetime.now() - timedelta(seconds=90)
    trajectory = art.Trajectory(start_time=began, initial_policy_version=3, final_policy_version=4)
    assert 90 <= trajectory.finish().metrics["duration"] < 150
    dumped = trajectory.model_dump()
    assert "start_time" not in dumped
    assert (dumped["initial_policy_version"], dumped["final_policy_version"]) == (3, 4)
    assert trajectory.for_logging()["initial_policy_version"] == 3
    assert "initial_policy_version" not in art.Trajectory().for_logging()


def test_datasets_in_batches_leave_the_global_generator_alone():
    random.seed(7)
    expected = random.Random(7).random()
    batches = list(iterate_dataset(list("abcde"), groups_per_step=2, num_epochs=2, use_tqdm=False))
    assert random.random() == expected
    assert [(b.step, b.epoch, b.epoch_step, len(b.items)) for b in batches] == [
        (0, 0, 0, 2),
        (1, 0, 1, 2),
        (2, 0, 2, 1),
        (3, 1, 0, 2),
        (4, 1, 1, 2),
        (5, 1, 2, 1),
    ]
    assert sorted(item for b in batches[:3] for item in b.items) == list("abcde")
    resumed = iterate_dataset(
        list("abcde"), groups_per_step=2, num_epochs=2, initial_step=4, use_tqdm=False
    )
    assert [b.items for b in resumed] == [b.items for b in batches[4:]]
    assert list(iterate_dataset([], use_tqdm=False)) == []


async def test_at_most_so_many_run_at_once():
    running: dict[str, int] = {"a": 0, "b": 0}
    most = dict(running)

    @limit_concurrency(2, derive_key=lambda key: key)
    async def work(key: str) -> None:
        running[key] += 1
        most[key] = max(most[key], running[key])
        await asyncio.sleep(0)
        running[key] -= 1

    await asyncio.gather(*(work(key) for key in "ab" * 5))
    assert most == {"a": 2, "b": 2}


async def test_http_errors_say_what_the_server_said(prose: Prose, local: LocalBackend):
    import httpx

    @log_http_errors
    async def get(path: str) -> None:
        async with httpx.AsyncClient(base_url=local.base_url, trust_env=False) as client:
            (await client.get(path)).raise_for_status()

    with pytest.raises(art.errors.HoneError) as caught:
        await get("/nothing")
    prose(caught)


def test_messages_as_text_and_without_logprobs():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert format_message(message) == 'Assistant:\nf({"x": 1})'
    assert format_message({"role": "user", "content": "hi"}) == "User:\nhi"
    history = History(messages_and_choices=[{"message": message, "logprobs": {"content": []}}])
    assert strip_logprobs(history).messages_and_choices == [{"message": message}]
    assert "logprobs" in history.messages_and_choices[0], "it is a copy"
    assert get_messages(history.messages_and_choices) == history.messages()
