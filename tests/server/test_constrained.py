"""Constrained answers through the official client: a real engine over a random model.

What the model writes by itself is never JSON, so an answer that matches its schema shows the mask.
"""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter
from tests.chat.conftest import build_tokenizer
from tests.patience import PATIENCE_S
from tests.prose import Prose
from tests.server.conftest import MakeServer, Server, write_model
from tests.server.http.test_chat_routes import HELLO, client

from hone.inference.embedded.engine import EmbeddedEngine
from hone.inference.grammar import Grammars
from hone.models.decoder import Decoder
from hone.server.settings import Settings
from hone.server.state import State

MOST = 300


class Person(BaseModel):
    """What an answer is parsed into."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=6)
    age: int = Field(ge=0, le=120)
    likes: Literal["tea", "coffee"]


class Point(BaseModel):
    """An item of a list."""

    model_config = ConfigDict(extra="forbid")
    x: int = Field(ge=-5, le=5)


class Nested(BaseModel):
    """Objects in a list in an object."""

    model_config = ConfigDict(extra="forbid")
    points: list[Point] = Field(min_length=1, max_length=3)
    ok: bool


class One(BaseModel):
    """The first of two kinds."""

    model_config = ConfigDict(extra="forbid")
    a: Literal[1]


class Other(BaseModel):
    """The second of two kinds."""

    model_config = ConfigDict(extra="forbid")
    b: Literal["x", "y"]


SHAPES = {"person": Person, "nested": Nested, "union": One | Other}
PERSON, NESTED = Person.model_json_schema(), Nested.model_json_schema()


def function(name: str, parameters: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


TOOLS = [function("count", NESTED), function("greet", PERSON)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> str:
    """A random model that reads prompts with tools."""
    directory = tmp_path_factory.mktemp("models") / "long"
    return str(write_model(directory, tokenizer, positions=2048))


@pytest.fixture(scope="module")
def shared(
    tmp_path_factory: pytest.TempPathFactory, model: str, tokenizer: Any
) -> Iterator[Server]:
    decoder = Decoder.load(Path(model), device="cpu")
    grammars = Grammars(lambda: tokenizer, decoder.config.vocab, deadline_s=1.0)
    engine = EmbeddedEngine(decoder, decode=tokenizer.decode, grammars=grammars)
    root, allowed = tmp_path_factory.mktemp("root"), (model,)
    settings = Settings(root=root, max_n=64, allow_base_models=allowed, device="cpu")
    server = Server(State(settings, open_engine=lambda name: engine), engine).start()
    yield server
    server.stop()


@pytest.fixture
def ask(shared: Server, model: str) -> Callable[..., Any]:
    def ask(**request: Any) -> Any:
        given = {"model": model, "messages": HELLO, "max_tokens": MOST, "seed": 1}
        return client(shared).chat.completions.create(**given | request)

    return ask


def json_schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": schema, "strict": True}}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_answer_matches_its_schema(ask: Callable[..., Any], shape: str) -> None:
    kind = TypeAdapter[Any](SHAPES[shape])
    answer = ask(n=50, response_format=json_schema(kind.json_schema()))
    assert len(answer.choices) == 50
    values = [kind.validate_json(choice.message.content) for choice in answer.choices]
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}
    assert len({repr(value) for value in values}) >= (3 if shape == "union" else 10)


def test_without_the_format_no_answer_is_json(ask: Callable[..., Any]) -> None:
    for choice in ask(n=50, max_tokens=30).choices:
        with pytest.raises(ValueError):
            json.loads(choice.message.content)


def test_the_client_parses_into_a_model(shared: Server, model: str) -> None:
    given: dict[str, Any] = {"model": model, "messages": HELLO, "max_tokens": MOST, "seed": 0}
    parsed = client(shared).chat.completions.parse(**given, response_format=Person)
    assert isinstance(parsed.choices[0].message.parsed, Person)
    with client(shared).chat.completions.stream(**given, response_format=Person) as stream:
        pieces = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion().choices[0].message
    assert len(pieces) > 3 and "".join(pieces) == final.content
    assert isinstance(final.parsed, Person)


def test_the_client_parses_a_response_into_a_model(shared: Server, model: str) -> None:
    given: dict[str, Any] = {"model": model, "input": "hello", "max_output_tokens": MOST}
    rollout = {"X-Hone-Rollout": "parsed"}  # which gives the requests their seeds
    with client(shared).with_options(default_headers=rollout) as asking:
        parsed = asking.responses.parse(**given, text_format=Person)
        assert isinstance(parsed.output_parsed, Person)
        with asking.responses.stream(**given, text_format=Person) as stream:
            pieces = [e.delta for e in stream if e.type == "response.output_text.delta"]
            final = stream.get_final_response()
        assert len(pieces) > 3 and "".join(pieces) == final.output_text
        assert isinstance(final.output_parsed, Person)
        call = openai.pydantic_function_tool(Person, name="greet")["function"]
        tool: Any = {"type": "function", **call}
        given |= {"tool_choice": "required", "parallel_tool_calls": False}
        answer = asking.responses.parse(**given, tools=[tool])
        assert {item.type for item in answer.output} == {"function_call"}
        Person.model_validate_json(answer.output[0].arguments)
        stored = asking.responses.retrieve(parsed.id)
    assert stored.text.format.schema_["title"] == "Person"


def test_json_object_is_any_object(ask: Callable[..., Any]) -> None:
    answer = ask(n=8, response_format={"type": "json_object"}, max_tokens=60)
    whole = [choice for choice in answer.choices if choice.finish_reason == "stop"]
    assert all(isinstance(json.loads(choice.message.content), dict) for choice in whole)
    assert whole, "every answer was cut; raise max_tokens"
    assert all(choice.message.content.startswith("{") for choice in answer.choices)


def test_an_answer_cut_inside_json_says_length(ask: Callable[..., Any]) -> None:
    (choice,) = ask(response_format=json_schema(PERSON), max_tokens=4).choices
    assert (choice.finish_reason, len(choice.token_ids)) == ("length", 4)
    assert choice.message.content.startswith("{")


@pytest.mark.parametrize(
    ("body", "matches"),
    [
        ({"guided_regex": r"(ab|c/d)+[0-9]{2}"}, r"(ab|c/d)+[0-9]{2}"),
        ({"structured_outputs": {"regex": r"x{3}y?"}}, "x{3}y?"),
        ({"guided_choice": ["yes.", "no (never)"]}, r"yes\.|no \(never\)"),
        ({"structured_outputs": {"choice": ["a|b", "c"]}}, r"a\|b|c"),
        ({"guided_grammar": 'start: "n" NUMBER\nNUMBER: /[0-9]{2}/'}, "n[0-9]{2}"),
        ({"structured_outputs": {"grammar": 'root ::= "a" [0-9] "b"'}}, "a[0-9]b"),
    ],
)
def test_vllms_keys_constrain_the_text(
    ask: Callable[..., Any], body: dict[str, Any], matches: str, shared: Server, model: str
) -> None:
    for choice in ask(n=10, extra_body=body).choices:
        assert re.fullmatch(matches, choice.message.content), choice.message.content
    text = client(shared).completions.create(
        model=model, prompt="hello", max_tokens=MOST, extra_body=body
    )
    assert re.fullmatch(matches, text.choices[0].text), text.choices[0].text


def arguments(choice: Any) -> list[tuple[str, Any]]:
    """The name and the arguments of every call, but for one that was cut."""
    calls = choice.message.tool_calls or []
    if choice.finish_reason == "length":
        calls = calls[:-1]
    return [(call.function.name, json.loads(call.function.arguments)) for call in calls]


CALLED: dict[str, type[BaseModel]] = {"count": Nested, "greet": Person}


def test_a_required_call_has_arguments_of_its_schema(
    ask: Callable[..., Any], tokenizer: Any
) -> None:
    answer = ask(n=12, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    names = set()
    for choice in answer.choices:
        assert choice.finish_reason == "tool_calls", choice.message.content
        assert not choice.message.content
        ((name, values),) = arguments(choice)
        CALLED[name].model_validate(values)
        names.add(name)
    assert names == {"count", "greet"}
    opening = tokenizer.convert_tokens_to_ids("<tool_call>")
    several = ask(n=2, tools=TOOLS, tool_choice="required", logit_bias={str(opening): 4})
    calls = [arguments(choice) for choice in several.choices]
    assert max(map(len, calls)) > 1
    for name, values in (call for answer in calls for call in answer):
        CALLED[name].model_validate(values)


def test_a_named_function_is_called_once(ask: Callable[..., Any]) -> None:
    named = {"type": "function", "function": {"name": "greet"}}
    answer = ask(n=4, tools=TOOLS, tool_choice=named)
    for choice in answer.choices:
        ((name, values),) = arguments(choice)
        assert (name, Person.model_validate(values).likes) in {
            ("greet", "tea"),
            ("greet", "coffee"),
        }
    deltas = [
        delta
        for chunk in ask(tools=TOOLS, tool_choice=named, stream=True)
        for delta in chunk.choices[0].delta.tool_calls or ()
    ]
    Person.model_validate_json("".join(delta.function.arguments or "" for delta in deltas))


def test_calls_of_strict_functions_match_and_text_stays_free(
    ask: Callable[..., Any], tokenizer: Any
) -> None:
    """The random model opens calls because logit_bias makes it; nothing else does."""
    opening = tokenizer.convert_tokens_to_ids("<tool_call>")
    strict = [function("greet", PERSON, strict=True), function("free", {})]
    answer = ask(n=16, tools=strict, max_tokens=120, logit_bias={str(opening): 5})
    calls = [call for choice in answer.choices for call in arguments(choice)]
    assert {name for name, _ in calls} == {"greet", "free"}
    for name, values in calls:
        assert isinstance(values, dict)
        if name == "greet":
            Person.model_validate(values)
    assert any((choice.message.content or "").strip() for choice in answer.choices)
    for choice in answer.choices:
        broken = getattr(choice, "malformed", None)
        assert not broken or choice.finish_reason == "length", broken


def test_with_tools_and_a_format_an_answer_is_a_call_or_matches(
    ask: Callable[..., Any], tokenizer: Any
) -> None:
    answer = ask(
        n=12,
        tools=[function("count", NESTED, strict=True)],
        parallel_tool_calls=False,
        response_format=json_schema(PERSON),
        logit_bias={str(tokenizer.convert_tokens_to_ids("<tool_call>")): 2},
    )
    kinds = {"call": 0, "text": 0}
    for choice in answer.choices:
        if choice.finish_reason == "length":
            continue
        kinds["call" if arguments(choice) else "text"] += 1
        if not arguments(choice):
            Person.model_validate_json(choice.message.content)
    assert kinds["call"] and kinds["text"], kinds


@pytest.mark.parametrize(
    ("request_", "param", "says"),
    [
        ({"response_format": json_schema({"type": "objekt"})}, "response_format.json_schema.schema", "Invalid type: objekt"),
        ({"response_format": json_schema({"not": {}})}, "response_format.json_schema.schema", 'Unimplemented keys: ["not"]'),
        ({"extra_body": {"guided_regex": "a("}}, "guided_regex", "unclosed group"),
        ({"extra_body": {"guided_grammar": "start: nothing"}}, "guided_grammar", 'unknown name: "nothing"'),
        ({"tools": [function("f", {"type": "objekt"}, strict=True)]}, "tools", "Invalid type: objekt"),
        ({"logit_bias": {"512": 1}}, None, "logit_bias: 512 is outside the vocabulary of 512"),
        (
            {"extra_body": {"guided_grammar": "\n".join(f'r{i}: "a" r{i + 1}' for i in range(1500)) + '\nr1500: "b"\nstart: r0'}},
            "guided_grammar",
            "nested too deeply",
        ),
    ],
    ids=["type", "keyword", "regex", "grammar", "tool", "bias", "deep"],
)  # fmt: skip
def test_what_cannot_be_compiled_is_refused_before_it_takes_an_index(
    prose: Prose, shared: Server, model: str, request_: dict[str, Any], param: str | None, says: str
) -> None:
    scoped = client(shared, default_headers={"X-Hone-Rollout": f"refused-{param}-{len(says)}"})
    given: dict[str, Any] = {"model": model, "messages": HELLO, "max_tokens": 3}
    with pytest.raises(openai.BadRequestError) as raised:
        scoped.chat.completions.create(**given | request_)
    prose(raised.value.message)
    assert raised.value.param == param
    answered = scoped.chat.completions.create(**given)
    (recorded,) = shared.state.calls.get([answered.choices[0].call_id])
    assert recorded.index == 0


def test_a_record_has_the_masks_and_the_forced_tokens(
    ask: Callable[..., Any], shared: Server, tokenizer: Any
) -> None:
    answer = ask(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "greet"}})
    (choice,) = answer.choices
    (recorded,) = shared.state.calls.get([choice.call_id])
    call, masked = recorded.call, recorded.call.masked_logprobs
    assert call.exact and call.completion_ids == choice.token_ids
    assert masked is not None and call.logprobs is not None
    # <tool_call>, and the end of the turn, were the only tokens allowed.
    assert {0, len(masked) - 1} <= {*call.forced}
    assert all(masked[place] == pytest.approx(0, abs=1e-6) for place in call.forced)
    assert all(call.logprobs[place] < -0.01 for place in call.forced)
    free = [i for i in range(len(masked)) if i not in call.forced]
    # A mask leaves every allowed token more likely than it was.
    assert free and all((masked[i] or 0) >= call.logprobs[i] - 1e-5 for i in free)


def test_the_constraint_begins_after_the_reasoning(make_server: MakeServer, tmp_path: Path) -> None:
    thinking = build_tokenizer("qwen3")
    model = str(write_model(tmp_path / "thinking", thinking))
    server = make_server(
        engine=EmbeddedEngine.open(model, device="cpu"), allow_base_models=(model,)
    )
    tags = ("</think>", "<think>", "<|im_end|>")
    close, opening, end = map(thinking.convert_tokens_to_ids, tags)
    request: dict[str, Any] = {"model": model, "messages": HELLO, "max_tokens": MOST, "n": 8}
    request["response_format"] = json_schema(PERSON)
    ask = client(server).chat.completions.create
    reasoned = 0
    for choice in ask(
        **request, logit_bias={str(close): 4, str(opening): 2, str(end): -100}
    ).choices:
        assert choice.finish_reason == "stop", choice.message
        reasoned += bool(getattr(choice.message, "reasoning_content", ""))
        Person.model_validate_json(choice.message.content)
    assert 0 < reasoned < 8
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    for choice in ask(**request, extra_body=off).choices:
        Person.model_validate_json(choice.message.content)


@pytest.mark.e2e
def test_a_slow_schema_is_refused_and_the_server_goes_on(
    prose: Prose, ask: Callable[..., Any], shared: Server
) -> None:
    slow = {"allOf": [{"type": "string", "pattern": f".*a{{{i}}}.*b"} for i in range(40)]}
    with pytest.raises(openai.BadRequestError) as caught:
        ask(response_format=json_schema(slow))
    prose(caught)
    assert httpx.get(f"{shared.inference_url}/health", timeout=PATIENCE_S).status_code == 200
    assert ask(max_tokens=2).choices[0].finish_reason in ("length", "stop")
