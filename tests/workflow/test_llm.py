"""`llms:` entries: addresses, keys, parameters of every request."""

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.prose import Prose, place_of
from tests.workflow.endpoint import Endpoint, Reply, serving

import hone
from hone.capture.scope import recorded
from hone.config.build import Builder, Served, build
from hone.config.policy import Trained
from hone.config.problems import ConfigProblems
from hone.config.schema import read
from hone.errors import AgentFailed, ConfigError, NotInThisVersion
from hone.wire.access import derive_inference_key
from hone.workflow.llm import LLM, OpenAIConfig, TrainableConfig, dialled

ASK: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture(autouse=True)
def no_keys(monkeypatch: pytest.MonkeyPatch):
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)


async def made(
    directory: Path, entry: str, served: Served | None = None, *, target: str | None = None
) -> LLM:
    """`target`: what a training run says is trained."""
    file = directory / "config.yml"
    file.write_text(f"llms:\n  chat: {{{entry}}}\n  other: {{_type: openai, model: x}}\n")
    async with build(read(file)) as builder:
        builder.served = served
        if target is not None:
            builder.choose_policy(target)
        return await builder.get_llm("chat")


async def test_params_are_sent_with_every_request():
    endpoint = Endpoint()
    async with serving(endpoint) as url:
        params = {"temperature": 0.4, "max_tokens": 8, "top_k": 3, "logprobs": True}
        llm = LLM(base_url=url, model="tiny", params=params)
        answer = await llm.chat(ASK)
        await llm.chat(ASK, temperature=0.0, extra_body={"min_p": 0.1})
        await llm.client.chat.completions.create(model=llm.model, messages=ASK, **llm.params)
        await llm.close()
    assert answer.choices[0].message.content == "ok"
    first, second, third = endpoint.bodies
    assert first == {"model": "tiny", "messages": ASK, **params}
    assert second == first | {"temperature": 0.0, "min_p": 0.1}
    assert third == first


async def test_one_client_per_loop_and_one_for_threads():
    async with serving(Endpoint()) as url:
        llm = LLM(base_url=url, model="m")
        assert llm.client is llm.client and llm.sync_client is llm.sync_client
        assert llm.client.max_retries == 10

        def in_a_loop_of_its_own() -> str | None:
            async def ask() -> str | None:
                answer = await llm.chat(ASK)
                await llm.close()
                return answer.choices[0].message.content

            return asyncio.run(ask())

        assert await asyncio.to_thread(in_a_loop_of_its_own) == "ok"
        raw = await asyncio.to_thread(
            llm.sync_client.chat.completions.create, model="m", messages=ASK
        )
        assert raw.choices[0].message.content == "ok"
        first = llm.client
        await llm.close()
        assert first.is_closed() and llm.client is not first
        await llm.close()


async def test_no_proxy_is_used_for_this_machine(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    async with serving(Endpoint()) as url:
        llm = LLM(base_url=url, model="m", max_retries=0)
        assert (await llm.chat(ASK)).choices[0].message.content == "ok"
        await llm.close()


async def test_the_connection_pool_does_not_limit_the_rollouts():
    gate, together = asyncio.Event(), 120  # httpx's own pool holds 100 connections
    endpoint = Endpoint(*(Reply(gate=gate) for _ in range(together)))
    async with serving(endpoint) as url:
        llm = LLM(base_url=url, model="m")
        calls = [asyncio.create_task(llm.chat(ASK)) for _ in range(together)]
        while len(endpoint.requests) < together:
            await asyncio.sleep(0.01)
        gate.set()
        await asyncio.gather(*calls)
        await llm.close()


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("http://0.0.0.0:8000/v1", "http://127.0.0.1:8000/v1"),
        ("http://localhost:8000/v1", "http://localhost:8000/v1"),
        ("https://models.example/v1", "https://models.example/v1"),
    ],
)
def test_a_wildcard_address_becomes_a_reachable_one(address: str, expected: str):
    assert dialled(address) == expected == LLM(base_url=address, model="m").base_url


@pytest.mark.parametrize("wrong", ["localhost:8000", "8000", "", "ftp://x/v1"])
def test_an_invalid_address_is_refused(prose: Prose, wrong: str):
    with pytest.raises(ConfigError) as caught:
        dialled(wrong)
    prose(caught)


async def test_the_entry_of_the_seed_document(prose: Prose, tmp_path: Path):
    llm = await made(
        tmp_path,
        "_type: openai, model_name: Qwen/Qwen2.5-3B-Instruct, api_key: default, temperature: 0.4, "
        "base_url: 'http://localhost:8000/v1'",
    )
    assert (llm.name, llm.model) == ("chat", "Qwen/Qwen2.5-3B-Instruct")
    assert (llm.base_url, llm.api_key) == ("http://localhost:8000/v1", "default")
    assert (llm.params, llm.api_type) == ({"temperature": 0.4}, "chat_completion")
    entry = "_type: openai, model: m, base_url: 'http://localhost:8000/v1', api_type: responses"
    llm = await made(tmp_path, entry)
    assert llm.api_type == "responses"
    with pytest.raises(ConfigError) as caught:
        await llm.chat([], stream=True)
    prose(caught)


async def test_environment_variables_have_the_lowest_precedence(
    prose: Prose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with pytest.raises(ConfigError) as caught:
        await made(tmp_path, "_type: openai, model: gpt")
    prose(caught)
    assert place_of(caught).endswith("config.yml:2")
    monkeypatch.setenv("OPENAI_API_KEY", "from env")
    monkeypatch.setenv("OPENAI_BASE_URL", "https://proxy.example/v1")
    llm = await made(tmp_path, "_type: openai, model: gpt")
    assert (llm.base_url, llm.api_key) == ("https://proxy.example/v1", "from env")
    llm = await made(tmp_path, "_type: openai, model: gpt, base_url: 'http://[::1]:1', api_key: k")
    assert (llm.base_url, llm.api_key) == ("http://[::1]:1", "k")


async def test_a_trainable_model_has_the_address_of_its_server(prose: Prose, tmp_path: Path):
    served = Served("http://127.0.0.1:7/v1", "secret", "default/mine", "localhost")
    llm = await made(tmp_path, "_type: trainable, temperature: 1.0", served)
    assert (llm.base_url, llm.api_key, llm.model) == (served.base_url, "secret", "default/mine")
    llm = await made(tmp_path, "_type: trainable, model_name: base", served)
    assert llm.model == "base"
    llm = await made(
        tmp_path, "_type: trainable, model: m, base_url: 'http://0.0.0.0:9/v1'", served
    )
    assert (llm.base_url, llm.model) == ("http://127.0.0.1:9/v1", "m")
    with pytest.raises(ConfigError) as caught:
        await made(tmp_path, "_type: trainable")
    prose(caught)
    assert place_of(caught).endswith("config.yml:2")


async def test_inside_a_rollout_the_training_server_has_a_url_for_it(tmp_path: Path):
    trained = Trained("mine", frozenset({"mine"}), "base", frozenset({("localhost", 7)}))
    served = Served("http://127.0.0.1:7/v1", "secret", "mine", "localhost", trained)
    llm = await made(tmp_path, "_type: trainable", served)
    assert (llm.model, llm.rollout_url) == ("mine", llm.base_url)
    with hone.rollout("run:1"):
        assert llm.rollout_url == "http://127.0.0.1:7/rollout/run:1/v1"
    pinned, _ = recorded("run:1", temperature=0.0, step=3)
    with pinned:
        assert llm.rollout_url == "http://127.0.0.1:7/rollout/run:1,temperature=0,step=3/v1"
    elsewhere = "_type: openai, model: base, base_url: 'http://127.0.0.1:9/v1'"
    foreign = await made(tmp_path, elsewhere, served)
    with hone.rollout("run:1"):
        assert (foreign.model, foreign.rollout_url) == ("base", foreign.base_url)


async def test_in_a_training_run_the_role_of_an_entry_decides_its_model_name(tmp_path: Path):
    trained = Trained("mine", frozenset({"mine"}), "base", frozenset({("localhost", 7)}))
    served = Served("http://127.0.0.1:7/v1", "secret", "mine", "localhost", trained)
    entry = "_type: openai, model: base, base_url: 'http://127.0.0.1:7/v1'"
    assert (await made(tmp_path, entry, served, target="chat")).model == "mine"
    assert (await made(tmp_path, entry, served, target="other")).model == "mine@0"
    # Outside a training run, as in `hone eval`, an entry sends its own model name.
    assert (await made(tmp_path, entry, served)).model == "base"


@pytest.mark.parametrize(
    "entry",
    [
        "_type: openai",
        "_type: openai, model: a, model_name: b",
        "_type: openai, model: a, num_retries: 2",
        "_type: openai, model: a, retry_on_errors: [x]",
        "_type: openai, model: a, api_type: assistants",
        "_type: trainable, base_url: 'http://a/v1'",
        "_type: openai, model: a, temperature: -1",
        "_type: openai, model: a, temprature: 1",
    ],
)
async def test_mistakes_in_an_entry_are_reported_with_the_file(
    prose: Prose, tmp_path: Path, entry: str
):
    with pytest.raises(ConfigProblems) as caught:
        await made(tmp_path, entry)
    prose(caught)


async def test_a_framework_s_client_is_not_in_this_version(prose: Prose, tmp_path: Path):
    file = tmp_path / "config.yml"
    file.write_text("llms: {chat: {_type: openai, model: m, base_url: 'http://localhost:1'}}\n")
    async with build(read(file)) as builder:
        assert isinstance(builder, Builder)
        assert await builder.get_llm("chat", "openai") is await builder.get_llm("chat")
        with pytest.raises(NotInThisVersion) as caught:
            await builder.get_llm("chat", wrapper_type="langchain")
        prose(caught)


def test_what_each_key_of_an_entry_does():
    config = OpenAIConfig.model_validate(
        {"model": "m", "seed": 7, "top_p": 0.9, "thinking": False, "max_tokens": 5}
    )
    assert config.params() == {
        "seed": 7,
        "top_p": 0.9,
        "max_tokens": 5,
        "chat_template_kwargs": {"enable_thinking": False},
    }

    def retries(**keys: Any) -> int:
        llm = TrainableConfig(**keys).llm(
            "x", base_url="http://localhost:1", api_key="k", model="m"
        )
        return llm.sync_client.max_retries

    assert retries() == 10
    assert retries(max_retries=3) == 3
    assert retries(do_auto_retry=False) == 0
    assert retries(do_auto_retry=False, max_retries=3) == 3


def test_secrets_are_not_shown():
    config = OpenAIConfig.model_validate({"model": "m", "api_key": "hush"})
    assert "hush" not in repr(config) and "hush" not in str(config.model_dump())
    assert "hush" not in repr(LLM(base_url="http://localhost:1", model="m", api_key="hush"))


async def test_request_timeout_is_the_client_s(tmp_path: Path):
    async with serving(Endpoint(Reply(gate=asyncio.Event()))) as url:
        entry = f"_type: openai, model: m, base_url: '{url}', request_timeout: 0.2, max_retries: 0"
        llm = await made(tmp_path, entry)
        with pytest.raises(openai.APITimeoutError):
            await llm.chat(ASK)
        await llm.close()


async def test_a_server_is_asked_whether_it_has_addresses_for_rollouts():
    ours, other, inference = Endpoint(), Endpoint(), derive_inference_key("secret")
    ours.app.get("/")(lambda: {"name": "hone"})
    async with serving(ours) as here, serving(other) as elsewhere:
        at_rollout, nobody = here.replace("/v1", "/rollout/r/v1"), "http://127.0.0.1:9/v1"
        for url, key, rollout_url, rollout_key in (
            (here, "secret", at_rollout, inference),
            (here, inference, at_rollout, inference),
            (elsewhere, "secret", elsewhere, "secret"),
            (nobody, "default", nobody, "default"),
        ):
            llm = LLM(base_url=url, model="m", api_key=key)
            await llm.find_rollouts_url()
            with hone.rollout("r"):
                assert (llm.rollout_url, llm.rollout_key) == (rollout_url, rollout_key)
            await llm.close()


async def test_a_conversation_over_the_responses_api_continues_with_chat_messages(prose: Prose):
    endpoint = Endpoint(Reply("", tools=[("look", "{}")]), Reply("done"))
    image = {"type": "image_url", "image_url": {"url": "data:"}}
    async with serving(endpoint) as url:
        llm = LLM(base_url=url, model="m", api_type="responses", max_retries=0, params={"top_k": 3})
        message = (await llm.chat(ASK, extra_body=None)).choices[0].message
        answer = {
            "role": "tool",
            "tool_call_id": "t0",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        }
        again = await llm.chat([*ASK, message, answer], extra_body={"min_p": 0.1})
        assert again.choices[0].message.content == "done"
        _, body = endpoint.bodies
        assert (body["top_k"], body["min_p"]) == (3, 0.1)
        assert body["input"][1:] == [
            {"type": "function_call", "call_id": "t0", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "t0", "output": "a\nb"},
        ]
        for wrong in ({"role": "user", "content": [image]}, "hi", {"content": "hi"}):
            with pytest.raises(ConfigError) as caught:
                await llm.chat([wrong])
            prose(caught)
        await llm.close()


async def test_a_failed_response_is_not_an_empty_answer(prose: Prose):
    failed = {"status": "failed", "error": {"code": "server_error", "message": "boom"}}
    async with serving(Endpoint(Reply("", top=failed))) as url:
        llm = LLM(base_url=url, model="m", api_type="responses", max_retries=0)
        with pytest.raises(AgentFailed) as caught:
            await llm.chat(ASK)
        prose(caught)
        await llm.close()
