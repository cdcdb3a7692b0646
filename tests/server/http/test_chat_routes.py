"""The OpenAI API, driven by the official client against real servers."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tests.chat.conftest import build_tokenizer
from tests.fakes import ScriptedEngine, logprob
from tests.patience import PATIENCE_S
from tests.prose import Prose
from tests.server.conftest import CLIENTS, MakeServer, Server, write_model

from hone import errors
from hone.inference.base import Sampling
from hone.server.settings import Settings
from hone.server.state import State
from hone.types import ModelSpec

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
LOOK: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look up a word",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
    },
}
WEATHER: dict[str, Any] = {"type": "function", "function": {"name": "weather", "parameters": {}}}
CALL = '<tool_call>\n{"name": "look", "arguments": {"word": "caf\u00e9"}}\n</tool_call>'
TWO_CALLS = CALL + '\n<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'


def client(server: Server, **options: Any) -> Any:
    """The official client. Any: its types know nothing of hone's fields, nor of plain dicts."""
    return opened(server.openai_url, **options)


def opened(url: str, **options: Any) -> openai.OpenAI:
    """An official client that is closed at the end of the test."""
    CLIENTS.append(openai.OpenAI(base_url=url, api_key="default", **{"max_retries": 0, **options}))
    return CLIENTS[-1]


@pytest.fixture(scope="module")
def shared(
    tmp_path_factory: pytest.TempPathFactory, tokenizer: Any, tiny_model: Path
) -> Iterator[Server]:
    """One server for all tests that need none of their own."""
    engine = ScriptedEngine(tokenizer=tokenizer)
    root, allowed = tmp_path_factory.mktemp("root"), (str(tiny_model),)
    settings = Settings(root=root, max_n=4, allow_base_models=allowed)
    server = Server(State(settings, open_engine=lambda name: engine), engine).start()
    yield server
    server.stop()


@pytest.fixture
def talk(shared: Server, tiny_model: Path) -> Callable[..., Any]:
    """`talk(text, **request)`: the answer to a chat request, of an engine that says this text."""

    def ask(text: str, **request: Any) -> Any:
        shared.engine.says([text])
        request = {"model": str(tiny_model), "messages": HELLO, **request}
        answer = client(shared).chat.completions.create(**request)
        answer.server = shared
        return answer

    return ask


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    # One client, because making one reads every certificate of the machine. The first large body
    # starts a worker process, which takes seconds on a busy machine.
    with httpx.Client(timeout=PATIENCE_S) as client:
        yield client


@pytest.fixture
def refusing(shared: Server, tiny_model: Path, http: httpx.Client) -> Callable[..., Any]:
    """`refusing(body, status)`: the error in OpenAI's shape that comes back; nothing is sampled."""

    def ask(body: Any, status: int, path: str = "/v1/chat/completions") -> Any:
        if isinstance(body, dict):
            body = {"model": str(tiny_model), **body}
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        before = len(shared.engine.requests)
        answer = http.post(shared.inference_url + path, content=content)
        assert answer.status_code == status, answer.text
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert len(shared.engine.requests) == before
        return answer.json()["error"]

    return ask


def last_request(server: Server) -> Any:
    """What the engine was asked last."""
    return server.engine.requests[-1]


def ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


# ---- answers ---------------------------------------------------------------------------------


def test_an_answer_has_the_prompt_ids_and_the_sampled_ids(talk: Any, tokenizer: Any) -> None:
    answer = talk("the weather is cold")
    (choice,) = answer.choices
    sampled = [*ids(tokenizer, "the weather is cold"), tokenizer.eos_token_id]
    fed = tokenizer.apply_chat_template(HELLO, add_generation_prompt=True, return_dict=False)
    assert answer.id.startswith("chatcmpl-")
    assert (choice.message.role, choice.message.content) == ("assistant", "the weather is cold")
    assert (choice.finish_reason, choice.logprobs) == ("stop", None)
    assert choice.token_ids == sampled
    assert answer.prompt_token_ids == fed == list(last_request(answer.server).prompt_ids)
    assert (answer.policy_step, choice.policy_step) == (0, 0)
    assert answer.usage.prompt_tokens == len(fed)
    assert answer.usage.completion_tokens == len(sampled)
    assert answer.usage.total_tokens == len(fed) + len(sampled)


async def test_the_async_client(make_server: MakeServer, tiny_model: Path) -> None:
    server = make_server(["one"])
    async with openai.AsyncOpenAI(base_url=server.openai_url, api_key="default") as asking:
        answer = await asking.chat.completions.create(model=str(tiny_model), messages=HELLO)
        assert answer.choices[0].message.content == "one"
        stream = await asking.chat.completions.create(
            model=str(tiny_model), messages=HELLO, stream=True
        )
        text = [c.choices[0].delta.content or "" async for c in stream if c.choices]
        assert "".join(text) == "one"


def test_logprobs_cover_every_sampled_token_and_the_end(talk: Any, tokenizer: Any) -> None:
    answer = talk("caf\u00e9", logprobs=True, top_logprobs=2)
    (choice,) = answer.choices
    sampled = [*ids(tokenizer, "caf\u00e9"), tokenizer.eos_token_id]
    content = choice.logprobs.content
    assert [entry.logprob for entry in content] == [logprob(t, i) for i, t in enumerate(sampled)]
    assert b"".join(bytes(e.bytes) for e in content) == "caf\u00e9<|im_end|>".encode()
    assert content[-1].token == "<|im_end|>"
    # The scripted engine names the token itself and the next id as alternatives, 1 apart.
    first = content[0].top_logprobs
    assert [other.logprob for other in first] == [content[0].logprob, content[0].logprob - 1]
    assert first[0].token == content[0].token


def test_models_of_art_always_get_their_tokens_by_id(
    make_server: MakeServer, tiny_model: Path, tokenizer: Any
) -> None:
    server = make_server(["cold"])
    server.state.models.register(
        ModelSpec(name="run", base_model=str(tiny_model), token_ids_as_text=True)
    )
    answer: Any = client(server).chat.completions.create(model="run", messages=HELLO)
    sampled = [*ids(tokenizer, "cold"), tokenizer.eos_token_id]
    tokens = [entry.token for entry in answer.choices[0].logprobs.content]
    assert tokens == [f"token_id:{token}" for token in sampled]
    plain: Any = client(server).chat.completions.create(
        model=str(tiny_model),
        messages=HELLO,
        logprobs=True,
        extra_body={"return_tokens_as_token_ids": True},
    )
    assert [entry.token for entry in plain.choices[0].logprobs.content] == tokens


def test_registered_models_return_logprobs_by_default(
    make_server: MakeServer, tiny_model: Path, tokenizer: Any
) -> None:
    """As ART's server does: its users' scripts train on choices and never ask for them."""
    server = make_server(["cold"])
    server.state.models.register(ModelSpec(name="run", base_model=str(tiny_model)))

    def logprobs(**more: Any) -> Any:
        request = {"model": "run", "messages": HELLO} | more
        (choice,) = client(server).chat.completions.create(**request).choices
        return choice.logprobs and [entry.logprob for entry in choice.logprobs.content]

    sampled = [*ids(tokenizer, "cold"), tokenizer.eos_token_id]
    values = [logprob(token, i) for i, token in enumerate(sampled)]
    assert logprobs() == logprobs(model="run@0") == logprobs(logprobs=True) == values
    assert logprobs(logprobs=False) is None
    assert logprobs(model=str(tiny_model)) is None
    # A rollout is trained by its id: its answers are spared what nobody reads.
    inside = {"extra_headers": {"X-Hone-Rollout": "r"}}
    assert logprobs(**inside) is None
    assert logprobs(logprobs=True, **inside) == values


def test_the_parameters_of_sampling(talk: Any) -> None:
    answer = talk(
        "ok",
        temperature=0.5,
        top_p=0.9,
        seed=-3,
        stop=["a", "bb"],
        max_completion_tokens=7,
        logprobs=True,
        top_logprobs=4,
        extra_body={"top_k": 5, "min_p": 0.1},
    )
    sampling = last_request(answer.server).sampling
    assert sampling == Sampling(
        max_tokens=7,
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        seed=-3,
        stop=("a", "bb"),
        stop_ids=sampling.stop_ids,
        top_logprobs=4,
    )


def test_the_defaults_are_plain_sampling(talk: Any, tokenizer: Any) -> None:
    answer = talk("ok", extra_body={"top_k": -1})
    ends = tuple(tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"]))
    left = 512 - answer.usage.prompt_tokens  # of the model's positions
    assert last_request(answer.server).sampling == Sampling(max_tokens=left, stop_ids=ends)


def test_without_max_tokens_an_answer_may_fill_the_context_unless_there_is_a_cap(
    make_server: MakeServer, tiny_model: Path
) -> None:
    server = make_server(["one", "two"], max_tokens=20, max_seq_length=100)
    ask = client(server).chat.completions.create
    first = ask(model=str(tiny_model), messages=HELLO)
    assert last_request(server).sampling.max_tokens == 20
    # A prompt that leaves less than the cap.
    words = "x" * (100 - first.usage.prompt_tokens - 8)
    longer = [{"role": "user", "content": HELLO[0]["content"] + words}]
    second = ask(model=str(tiny_model), messages=longer)
    assert last_request(server).sampling.max_tokens == 100 - second.usage.prompt_tokens < 20


@pytest.mark.parametrize(
    "request_",
    [{"temperature": 1e-5}, {"temperature": 0.0009, "top_p": 0.9}, {"top_p": 0}, {"top_p": 1e-12}],
)
def test_almost_zero_is_greedy_and_recorded_as_context(talk: Any, request_: dict[str, Any]) -> None:
    server = talk("ok", **request_).server
    assert last_request(server).sampling.temperature == 0
    assert server.state.calls.rollout("")[-1].call.temperature == 0


NULLS = [
    "n",
    "max_tokens",
    "max_completion_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stream",
]
NULLS += [
    "stream_options",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "logprobs",
    "top_logprobs",
    "user",
]
NULLS += [
    "response_format",
    "functions",
    "function_call",
    "logit_bias",
    "presence_penalty",
    "metadata",
]
NULLS += ["reasoning_effort", "verbosity", "some_new_key", "chat_template_kwargs", "guided_json"]


def test_null_means_that_a_key_is_absent(talk: Any, tokenizer: Any) -> None:
    reply = {"role": "assistant", "content": "hi", "tool_calls": None, "function_call": None}
    reply |= {"refusal": None, "audio": None, "name": None}
    talked = [*HELLO, reply, *HELLO]
    plain = talk("ok", messages=[*HELLO, {"role": "assistant", "content": "hi"}, *HELLO])
    with_nulls = talk("ok", messages=talked, extra_body=dict.fromkeys(NULLS))
    assert with_nulls.prompt_token_ids == plain.prompt_token_ids
    options = {"include_usage": None}
    body = {"model": plain.model, "messages": HELLO, "stream": False, "stream_options": options}
    url = f"{plain.server.inference_url}/v1/chat/completions"
    assert httpx.post(url, json=body).status_code == 200
    completion = {"model": plain.model, "prompt": "x", "echo": None, "suffix": None, "n": None}
    url = f"{plain.server.inference_url}/v1/completions"
    assert httpx.post(url, json=completion).status_code == 200


def test_errors_have_the_types_of_the_openai_api(make_server: MakeServer, tiny_model: Path) -> None:
    server = make_server(api_key="k", max_concurrent=1)
    good = {"model": str(tiny_model), "messages": HELLO}
    key = {"Authorization": "Bearer k"}

    def error(body: dict[str, Any], headers: dict[str, str]) -> tuple[int, str, str | None]:
        url = f"{server.inference_url}/v1/chat/completions"
        answer = httpx.post(url, json=body, headers=headers)
        fields = answer.json()["error"]
        return answer.status_code, fields["type"], fields["code"]

    wrong = "invalid_request_error"
    assert error(good, {}) == (401, wrong, "invalid_api_key")
    assert error(good | {"model": "nothing"}, key) == (404, wrong, "model_not_found")
    assert error(good | {"n": 0}, key) == (400, wrong, "invalid_value")
    with server.state.serving.admitted():
        assert error(good, key) == (429, "rate_limit_exceeded", "rate_limit_exceeded")
    server.engine.failing = ZeroDivisionError("broken")
    assert error(good, key)[:2] == (500, "server_error")


@pytest.mark.parametrize(
    ("failure", "status", "requests", "stream"),
    [
        (errors.OutOfMemory("the prompt is too long"), 500, 1, False),
        (errors.OutOfMemory("the prompt is too long"), 500, 1, True),
        (errors.NotInThisVersion("not yet"), 501, 1, False),
        (errors.Conflict("the state does not allow it"), 409, 1, False),
        (errors.EngineError("a step of the engine failed"), 500, 2, False),
        (errors.EngineFailed("the engine crashed"), 503, 2, False),
        (ZeroDivisionError("a defect"), 500, 2, True),
    ],
)
def test_openais_client_retries_only_what_may_succeed_later(
    make_server: MakeServer,
    tiny_model: Path,
    failure: Exception,
    status: int,
    requests: int,
    stream: bool,
) -> None:
    server = make_server()
    server.engine.failing, server.engine.fails_at = failure, 0
    retrying = client(server, max_retries=1)
    with pytest.raises(openai.APIStatusError) as caught:
        retrying.chat.completions.create(model=str(tiny_model), messages=HELLO, stream=stream)
    assert caught.value.status_code == status
    assert len(server.engine.requests) == requests


def test_n_answers_in_order(make_server: MakeServer, tiny_model: Path) -> None:
    server = make_server(["one", "two", "three"])
    answer: Any = client(server).chat.completions.create(model=str(tiny_model), messages=HELLO, n=3)
    assert [choice.message.content for choice in answer.choices] == ["one", "two", "three"]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.usage.completion_tokens == sum(len(c.token_ids) for c in answer.choices)
    recorded = server.state.calls.get([choice.call_id for choice in answer.choices])
    assert [call.reply["content"] for call in recorded] == ["one", "two", "three"]


def test_a_stop_string_ends_the_text_and_its_ids_are_kept(talk: Any, tokenizer: Any) -> None:
    answer = talk("the wind END is strong", stop="END")
    (choice,) = answer.choices
    assert (choice.message.content, choice.finish_reason) == ("the wind ", "stop")
    assert "END" in tokenizer.decode(choice.token_ids)


def test_an_answer_cut_at_its_length(talk: Any) -> None:
    answer = talk("the weather in the city is cold", max_tokens=3)
    assert answer.choices[0].finish_reason == "length"
    assert len(answer.choices[0].token_ids) == 3


# ---- tools -----------------------------------------------------------------------------------


def test_a_tool_call_and_its_answer(make_server: MakeServer, tiny_model: Path) -> None:
    server = make_server([f"Let me see. {CALL}", "It is a drink."])
    ask = client(server).chat.completions.create
    first: Any = ask(model=str(tiny_model), messages=HELLO, tools=[LOOK])
    (choice,) = first.choices
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me see.")
    assert (call.type, call.function.name) == ("function", "look")
    assert json.loads(call.function.arguments) == {"word": "caf\u00e9"}
    turns = [
        *HELLO,
        choice.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "a drink"},
    ]
    second: Any = ask(model=str(tiny_model), messages=turns, tools=[LOOK])
    assert second.choices[0].message.content == "It is a drink."
    before = [*first.prompt_token_ids, *choice.token_ids]
    assert second.prompt_token_ids[: len(before)] == before


def test_parallel_calls_and_only_the_first(talk: Any, tokenizer: Any) -> None:
    both = talk(TWO_CALLS, tools=[LOOK, WEATHER]).choices[0]
    assert [call.function.name for call in both.message.tool_calls] == ["look", "weather"]
    first = talk(TWO_CALLS, tools=[LOOK, WEATHER], parallel_tool_calls=False).choices[0]
    assert [call.function.name for call in first.message.tool_calls] == ["look"]
    assert first.finish_reason == "tool_calls"
    assert tokenizer.decode(first.token_ids).endswith("</tool_call>")


def test_a_tag_inside_constrained_arguments_does_not_end_the_call(talk: Any) -> None:
    strict = {"type": "function", "function": {**LOOK["function"], "strict": True}}
    text = '<tool_call>\n{"name": "look", "arguments": {"word": "a </tool_call> b"}}\n</tool_call>'
    for options in (
        {"tools": [LOOK], "tool_choice": "required", "parallel_tool_calls": False},
        {"tools": [LOOK], "tool_choice": {"type": "function", "function": {"name": "look"}}},
        {"tools": [strict], "parallel_tool_calls": False},
    ):
        (call,) = talk(text, **options).choices[0].message.tool_calls
        assert json.loads(call.function.arguments) == {"word": "a </tool_call> b"}


def test_tool_choice_none_hides_the_tools(talk: Any, tokenizer: Any) -> None:
    answer = talk(CALL, tools=[LOOK], tool_choice="none")
    (choice,) = answer.choices
    assert (choice.message.content, choice.message.tool_calls) == (CALL, None)
    assert choice.finish_reason == "stop"
    assert "look" not in tokenizer.decode(answer.prompt_token_ids)
    shown = talk("ok", tools=[LOOK], tool_choice="auto")
    assert '"name": "look"' in tokenizer.decode(shown.prompt_token_ids)


def test_forced_calls_are_refused_where_the_template_has_none(
    prose: Prose, make_server: MakeServer, tmp_path: Path
) -> None:
    plain = build_tokenizer(
        "qwen2.5-instruct",
        "{% if tools %}{{ tools }}{% endif %}{% for m in messages %}[{{ m.role }}]{{ m.content }}"
        "<|im_end|>{% endfor %}",
    )
    model = write_model(tmp_path / "plain", plain)
    engine = ScriptedEngine(["ok"], tokenizer=plain)
    server = make_server(engine=engine, allow_base_models=(str(model),))
    ask = client(server).chat.completions.create
    for request in ({"tool_choice": "required"}, {"parallel_tool_calls": False}):
        with pytest.raises(openai.BadRequestError) as caught:
            ask(model=str(model), messages=HELLO, tools=[LOOK], **request)
        prose(caught)
    answer = ask(model=str(model), messages=HELLO, tools=[LOOK])
    assert answer.choices[0].message.content == "ok"
    assert not hasattr(answer, "not_applicable")
    # Frameworks send strict by default: they work with every template.
    strict = {"type": "function", "function": {**LOOK["function"], "strict": True}}
    answer = ask(model=str(model), messages=HELLO, tools=[strict])
    assert answer.not_applicable == ["tools.strict"]
    assert engine.requests[-1].sampling.constraint is None


# ---- template arguments ----------------------------------------------------------------------


def test_template_arguments_come_from_the_request_and_from_the_model(
    make_server: MakeServer, tmp_path: Path
) -> None:
    qwen3 = build_tokenizer("qwen3")
    model = str(write_model(tmp_path / "qwen3", qwen3))
    server = make_server(engine=ScriptedEngine(["ok"], tokenizer=qwen3))
    quiet = {"enable_thinking": False}
    server.state.models.register(
        ModelSpec(name="quiet", base_model=model, chat_template_kwargs={"enable_thinking": False})
    )
    ask = client(server).chat.completions.create

    def prompt(name: str, **request: Any) -> str:
        return qwen3.decode(ask(model=name, messages=HELLO, **request).prompt_token_ids)

    empty = "<think>\n\n</think>\n\n"
    assert not prompt(model).endswith(empty)
    assert prompt(model, extra_body={"chat_template_kwargs": quiet}).endswith(empty)
    assert prompt("quiet").endswith(empty)
    loud = {"chat_template_kwargs": {"enable_thinking": True}}
    assert not prompt("quiet", extra_body=loud).endswith(empty)


def test_template_arguments_without_effect_are_named(talk: Any) -> None:
    answer = talk("ok", extra_body={"chat_template_kwargs": {"enable_thinking": False}})
    assert answer.not_applicable == ["chat_template_kwargs.enable_thinking"]


def test_keys_that_clients_always_send_have_no_effect(talk: Any) -> None:
    answer = talk(
        "ok",
        user="me",
        store=False,
        metadata={"a": "b"},
        service_tier="auto",
        prompt_cache_key="k",
        safety_identifier="s",
        presence_penalty=0,
        frequency_penalty=0.0,
        response_format={"type": "text"},
        logit_bias={},
        modalities=["text"],
    )
    assert answer.choices[0].message.content == "ok"
    assert {*answer.not_applicable} == {
        *("user", "store", "metadata", "service_tier", "prompt_cache_key", "safety_identifier")
    }


def test_keys_of_openai_that_have_no_effect_are_named(talk: Any) -> None:
    keys: dict[str, Any] = {"verbosity": "low", "prompt_cache_retention": "24h"}
    assert talk("ok", **keys).not_applicable == ["prompt_cache_retention", "verbosity"]
    chunks = list(talk("ok", stream=True, **keys))
    assert chunks[-1].not_applicable == ["prompt_cache_retention", "verbosity"]
    assert talk("ok", reasoning_effort="low").not_applicable == ["reasoning_effort"]


def test_the_effort_reaches_a_template_that_has_it(make_server: MakeServer, tmp_path: Path) -> None:
    tokenizer = build_tokenizer("qwen3")
    model = str(write_model(tmp_path / "qwen3", tokenizer))
    server = make_server(engine=ScriptedEngine(["ok"], tokenizer=tokenizer))
    server.state.models.register(ModelSpec(name="thinker", base_model=model))
    ask = client(server).chat.completions.create
    quiet = ask(model=model, messages=HELLO, reasoning_effort="none")
    assert tokenizer.decode(quiet.prompt_token_ids).endswith("<think>\n\n</think>\n\n")
    assert not hasattr(quiet, "not_applicable")
    # This template can only be told whether to think, not how long.
    assert ask(model=model, messages=HELLO, reasoning_effort="low").not_applicable == [
        "reasoning_effort"
    ]


def test_ids_that_end_the_answer(
    prose: Prose, make_server: MakeServer, tokenizer: Any, tiny_model: Path
) -> None:
    server = make_server(["the weather is cold"])
    ids = tokenizer.encode("the weather is cold", add_special_tokens=False)
    ask = client(server).chat.completions.create
    for stream in (False, True):
        body = {"stop_token_ids": [ids[2]], "skip_special_tokens": False}
        answer = ask(model=str(tiny_model), messages=HELLO, stream=stream, extra_body=body)
        if stream:
            text = "".join(c.choices[0].delta.content or "" for c in answer if c.choices)
        else:
            text, finish = answer.choices[0].message.content, answer.choices[0].finish_reason
            assert (answer.choices[0].token_ids, finish) == (ids[:3], "stop")
            assert not hasattr(answer, "not_applicable")
        assert text == tokenizer.decode(ids[:2])
    call = server.state.calls.rollout("")[0].call
    assert call.completion_ids == ids[:3], "the id that ended it was sampled, and is trained"
    plain = client(server).completions.create(
        model=str(tiny_model), prompt="a", extra_body={"stop_token_ids": [ids[2]]}
    )
    assert plain.choices[0].text == tokenizer.decode(ids[:2])
    with pytest.raises(openai.BadRequestError) as caught:
        ask(model=str(tiny_model), messages=HELLO, extra_body={"stop_token_ids": [10**6]})
    prose(caught)


def test_min_tokens_reach_the_engine(
    prose: Prose, make_server: MakeServer, tiny_model: Path
) -> None:
    server = make_server()
    ask = client(server).chat.completions.create
    body = {"min_tokens": 3, "skip_special_tokens": True}
    answer = ask(model=str(tiny_model), messages=HELLO, max_tokens=9, extra_body=body)
    assert answer.not_applicable == ["skip_special_tokens"]
    assert server.engine.requests[0].sampling.min_tokens == 3
    required: dict[str, Any] = {"tools": [LOOK], "tool_choice": "required"}
    with pytest.raises(openai.BadRequestError) as caught:
        ask(model=str(tiny_model), messages=HELLO, extra_body=body, **required)
    prose(caught)


# ---- refusals --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "param", "says"),
    [
        ({"presence_penalty": 2.5}, "presence_penalty", "less than or equal to 2"),
        ({"frequency_penalty": -3}, "frequency_penalty", "greater than or equal to -2"),
        ({"repetition_penalty": 0}, "repetition_penalty", "greater than or equal to 0.01"),
        ({"repetition_penalty": True}, "repetition_penalty", "valid number"),
        ({"response_format": {"type": "xml"}}, "response_format", "json_object"),
        ({"logit_bias": {"one": 2}}, "logit_bias", "token ids as keys"),
        ({"logit_bias": {"1": 101}}, "logit_bias[1]", "less than or equal to 100"),
        ({"guided_json": 3}, "guided_json", "a JSON schema"),
        ({"guided_choice": []}, "guided_choice", "a list of texts"),
        (
            {"guided_regex": "a", "guided_choice": ["a"]},
            "guided_regex",
            "guided_choice is there too",
        ),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "one of json"),
        ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs", "one of json"),
        ({"audio": {"voice": "x"}}, "audio", "not in this version"),
        ({"modalities": ["audio"]}, "modalities", "not in this version"),
        ({"functions": []}, "functions", "send tools instead"),
        ({"temprature": 1}, "temprature", "Did you mean 'temperature'"),
        ({"extra_body": {}}, "extra_body", "top level"),
        ({"model": None}, "model", "missing"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": "hi"}, "messages", "valid list"),
        ({"messages": [{"role": "robot", "content": "x"}]}, None, r"messages\[0\]\.role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            None,
            r"messages\[0\]\.content: .*image_url",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
            None,
            r"messages\[0\]\.content: .*input_audio",
        ),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"n": 5}, "n", "at most 4"),
        ({"n": True}, "n", "valid integer"),
        ({"temperature": -1}, "temperature", "greater than or equal to 0"),
        ({"temperature": "hot"}, "temperature", "valid number"),
        ({"top_p": -0.1}, "top_p", "greater than or equal to 0"),
        ({"top_k": -2}, "top_k", "greater than or equal to -1"),
        ({"top_k": 2**63}, "top_k", "less than 2147483648"),
        ({"min_p": 2}, "min_p", "less than or equal to 1"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"seed": 2**70}, "seed", "less than"),
        ({"stop": [""]}, "stop[0]", "at least 1 character"),
        ({"stop": "x" * 257}, "stop[0]", "at most 256 characters"),
        ({"stop": ["x"] * 17}, "stop", "at most 16 items"),
        ({"top_logprobs": 3}, "top_logprobs", "without logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
        ({"stream_options": {"usage": True}}, "stream_options", "include_usage"),
        ({"tool_choice": "sometimes"}, "tool_choice", "send 'auto'"),
        ({"tool_choice": "required"}, "tools", "no tools are offered"),
        (
            {"tools": [LOOK], "tool_choice": {"type": "function", "function": {"name": "see"}}},
            "tool_choice",
            "offered: look",
        ),
        ({"tools": [{"type": "function"}]}, None, r"tools\[0\]"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs", "valid dictionary"),
    ],
)
def test_what_cannot_be_answered_is_refused_by_name(
    refusing: Any, request_: dict[str, Any], param: str | None, says: str
) -> None:
    error = refusing({"messages": HELLO, **request_}, 400)
    assert error["param"] == param
    assert re.search(says, error["message"]), error["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[1]",
        b'{"model": NaN}',
        b'{"model": "\\ud800"}',
        b'{"a":' * 200 + b"1" + b"}" * 200,
        b"[" * 100000,
        b"\xff\xfe",
    ],
)
def test_bodies_that_are_not_json_objects(prose: Prose, refusing: Any, body: bytes) -> None:
    prose(refusing(body, 400)["message"])


def test_unknown_models_are_404_and_say_what_is_served(prose: Prose, refusing: Any) -> None:
    error = refusing({"model": "gpt-4", "messages": HELLO}, 404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    prose(error["message"])


def test_headers_that_name_no_rollout(server: Server, tiny_model: Path) -> None:
    body = {"model": str(tiny_model), "messages": HELLO}
    for headers, url in (
        ({"X-Hone-Rollout": "a b"}, ""),
        ({"X-Hone-Rollout": "one"}, "/rollout/two"),
        ({}, "/rollout/-x"),
        ({"X-Hone-Function": "f" * 513}, ""),
    ):
        path = f"{server.inference_url}{url}/v1/chat/completions"
        assert httpx.post(path, json=body, headers=headers).status_code == 400


def test_prompts_and_answers_that_do_not_fit(
    prose: Prose, make_server: MakeServer, tiny_model: Path
) -> None:
    server = make_server(max_seq_length=64)
    ask = client(server).chat.completions.create
    with pytest.raises(openai.BadRequestError) as raised:
        ask(model=str(tiny_model), messages=[{"role": "user", "content": "x" * 100}])
    assert raised.value.code == "context_length_exceeded"
    prose(raised.value.message)
    fed = len(ask(model=str(tiny_model), messages=HELLO, max_tokens=1).prompt_token_ids)
    with pytest.raises(openai.BadRequestError) as caught:
        ask(model=str(tiny_model), messages=HELLO, max_tokens=65 - fed)
    prose(caught)
    ask(model=str(tiny_model), messages=HELLO, max_tokens=64 - fed)
    ask(model=str(tiny_model), messages=HELLO)
    assert last_request(server).sampling.max_tokens == 64 - fed, (
        "the default is cut to what is left"
    )


def test_max_seq_length_of_a_registered_model_counts_for_its_names_only(
    prose: Prose, server: Server, tiny_model: Path
) -> None:
    spec = ModelSpec(name="short", base_model=str(tiny_model), defaults={"max_seq_length": 80})
    server.state.models.register(spec)
    ask = client(server).chat.completions.create
    long = [{"role": "user", "content": "x" * 100}]
    for name in ("short", "short@0"):
        with pytest.raises(openai.BadRequestError) as caught:
            ask(model=name, messages=long)
        prose(caught)
        fed = len(ask(model=name, messages=HELLO).prompt_token_ids)
        assert last_request(server).sampling.max_tokens == 80 - fed
    ask(model=str(tiny_model), messages=long)


def test_the_models_own_length_counts_too(
    prose: Prose, make_server: MakeServer, tmp_path: Path, tokenizer: Any
) -> None:
    short = write_model(tmp_path / "short", tokenizer, positions=70)
    with pytest.raises(openai.BadRequestError) as caught:
        client(make_server(allow_base_models=(str(short),))).chat.completions.create(
            model=str(short), messages=[{"role": "user", "content": "x" * 70}]
        )
    prose(caught)


def test_too_many_concurrent_requests_get_429_with_retry_after(
    make_server: MakeServer, tiny_model: Path
) -> None:
    server = make_server(max_concurrent=1)
    with server.state.serving.admitted(), pytest.raises(openai.RateLimitError) as raised:
        client(server).chat.completions.create(model=str(tiny_model), messages=HELLO)
    assert raised.value.response.headers["Retry-After"] == "1"
    client(server).chat.completions.create(model=str(tiny_model), messages=HELLO)


def test_while_serving_is_paused_requests_wait_then_are_503(
    prose: Prose, make_server: MakeServer, tiny_model: Path
) -> None:
    server = make_server(hold_s=0.2)
    pause = server.state.serving.engines.paused()
    server.call(pause.__aenter__())
    with pytest.raises(openai.InternalServerError) as raised:
        client(server).chat.completions.create(model=str(tiny_model), messages=HELLO)
    prose(raised)
    assert raised.value.status_code == 503
    server.call(pause.__aexit__(None, None, None))
    client(server).chat.completions.create(model=str(tiny_model), messages=HELLO)


def test_an_engine_that_fails_is_500_without_a_trace(
    make_server: MakeServer, tiny_model: Path
) -> None:
    server = make_server(["the weather is cold"])
    server.engine.failing = ZeroDivisionError("secret")
    answer = httpx.post(
        f"{server.openai_url}/chat/completions", json={"model": str(tiny_model), "messages": HELLO}
    )
    assert answer.status_code == 500
    assert "server.log" in answer.json()["error"]["message"]
    assert "secret" not in answer.text
    (call,) = server.state.calls.rollout("")
    assert call.abandoned
    assert call.finish == "abort"
    assert len(call.call.completion_ids) == 1


# ---- completions and models ------------------------------------------------------------------


def test_a_text_is_continued(make_server: MakeServer, tiny_model: Path, tokenizer: Any) -> None:
    server = make_server([" cold  "])
    ask = client(server).completions.create
    answer: Any = ask(model=str(tiny_model), prompt="the weather is", logprobs=1)
    (choice,) = answer.choices
    sampled = [*ids(tokenizer, " cold  "), tokenizer.eos_token_id]
    assert (choice.text, choice.finish_reason) == (" cold  ", "stop")
    assert answer.prompt_token_ids == ids(tokenizer, "the weather is")
    assert choice.token_ids == sampled
    assert choice.logprobs.token_logprobs == [logprob(t, i) for i, t in enumerate(sampled)]
    assert "".join(choice.logprobs.tokens) == " cold  <|im_end|>"
    assert choice.logprobs.text_offset[:2] == [0, len(choice.logprobs.tokens[0])]
    for prompt in ([5, 6, 7], ["the"], [[5, 6]]):
        assert ask(model=str(tiny_model), prompt=prompt).choices[0].text == " cold  "
    assert last_request(server).prompt_ids == (5, 6)
    (recorded,) = server.state.calls.get([choice.call_id])
    assert (recorded.messages, recorded.reply["content"]) == (None, " cold  ")
    stream = ask(model=str(tiny_model), prompt="the", stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == " cold  "


@pytest.mark.parametrize(
    "request_",
    [
        {"prompt": ["a", "b"]},
        {"prompt": ""},
        {"prompt": []},
        {"prompt": [1.5]},
        {"prompt": [True]},
        {"prompt": "a", "echo": True},
        {"prompt": "a", "best_of": 2},
        {"prompt": "a", "suffix": "b"},
        {"prompt": "a", "messages": []},
        {"prompt": "a", "logprobs": 21},
        {"prompt": "x" * 600},
        {"prompt": [5, 512]},
        {"prompt": [[-1]]},
        {"prompt": [2**31]},
        {"prompt": [2**63, 5]},
        {"prompt": [5, 10**30]},
    ],
)
def test_texts_that_are_refused(prose: Prose, refusing: Any, request_: dict[str, Any]) -> None:
    prose(refusing(request_, 400, "/v1/completions")["message"])


def test_the_list_of_models(prose: Prose, make_server: MakeServer, tiny_model: Path) -> None:
    server = make_server()
    server.state.models.register(ModelSpec(name="agent", base_model=str(tiny_model)))
    listed = {model.id: model for model in client(server).models.list()}
    assert set(listed) == {"agent", "agent@latest", "agent@0", str(tiny_model)}
    one: Any = client(server).models.retrieve("agent@latest")
    assert (one.object, one.root, one.step) == ("model", str(tiny_model), 0)
    with pytest.raises(openai.NotFoundError) as caught:
        client(server).models.retrieve("agnet")
    prose(caught)
    by_rollout = httpx.get(f"{server.inference_url}/rollout/x/v1/models").json()
    assert {model["id"] for model in by_rollout["data"]} == set(listed)


def test_both_ports_have_the_openai_api(server: Server, tiny_model: Path) -> None:
    for url in (server.control_url, server.inference_url):
        asking = opened(f"{url}/v1")
        answer = asking.chat.completions.create(model=str(tiny_model), messages=HELLO)
        assert answer.choices[0].message.content == "ok"
        schema = httpx.get(f"{url}/openapi.json").json()
        assert "/v1/chat/completions" in schema["paths"]
