"""ChatML: the same ids as the model's own template, wherever that template supports the case."""

import json
from datetime import date
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hone.chat.chatml import ChatML, recognise
from hone.chat.jinja import Jinja
from hone.chat.template import ChatTemplate

FAMILIES = ("smollm2-instruct", "qwen2.5-instruct")

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather <now> in a caf\u00e9",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
TIME: dict[str, Any] = {"type": "function", "function": {"name": "time", "parameters": {}}}

property_test = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)

texts = st.text(
    st.sampled_from("the wind \n\t<>{}\"'\u00e9\u4f60\u597d\U0001f600\u0301")
    | st.characters(exclude_categories=["Cs"]),
    max_size=24,
) | st.sampled_from(["", "the weather today", "<tool_call>", "<|im_end|>", "<think>x</think> y"])
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts, inner, max_size=2),
    max_leaves=4,
)
calls = st.builds(
    lambda name, arguments: {
        "id": "c0",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    },
    st.sampled_from(["weather", "time"]),
    st.dictionaries(texts, values, max_size=2),
)
talk = st.builds(
    lambda role, text: {"role": role, "content": text},
    st.sampled_from(["system", "user", "assistant"]),
    texts,
)
tool_turn = st.builds(
    lambda text, made, results: [
        {"role": "assistant", "content": text, "tool_calls": made},
        *({"role": "tool", "content": r, "tool_call_id": "c0"} for r in results),
    ],
    texts,
    st.lists(calls, min_size=1, max_size=2),
    st.lists(texts, min_size=1, max_size=3),
)
tool_talks = st.lists(
    tool_turn | st.lists(talk, min_size=1, max_size=2), min_size=1, max_size=4
).map(lambda turns: [message for turn in turns for message in turn])


def own_ids(
    tokenizer: Any, messages: list[Any], tools: list[Any] | None, prompted: bool
) -> list[int]:
    return tokenizer.apply_chat_template(
        messages, tools=tools, add_generation_prompt=prompted, tokenize=True, return_dict=False
    )


def as_sent(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As an OpenAI client sends them: arguments are JSON text."""
    sent = json.loads(json.dumps(messages))
    for message in sent:
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return sent


@pytest.fixture(scope="module")
def templates(make_tokenizer) -> dict[str, ChatTemplate]:
    return {family: ChatTemplate.load(make_tokenizer(family)) for family in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES)
@given(messages=st.lists(talk, min_size=1, max_size=5), prompted=st.booleans())
@property_test
def test_plain_text_gives_the_ids_of_the_models_own_template(templates, family, messages, prompted):
    template = templates[family]
    assert isinstance(template.renderer, ChatML)
    ours = template.render(messages, generation_prompt=prompted)
    assert ours == own_ids(template.tokenizer, messages, None, prompted)


@given(messages=tool_talks, tools=st.sampled_from([None, [WEATHER], [WEATHER, TIME]]))
@property_test
def test_qwen25_with_tools_gives_the_ids_of_its_own_template(templates, messages, tools):
    template = templates["qwen2.5-instruct"]
    tokenizer = template.tokenizer
    assert template.renderer.name == "chatml"
    assert template.render(as_sent(messages), tools) == own_ids(tokenizer, messages, tools, True)


@given(messages=tool_talks)
@property_test
def test_smollm2_with_tools_is_qwen25_with_another_default_sentence(templates, messages):
    # SmolLM2's own template drops tools without a word, so there is nothing of its own to equal.
    smollm2, qwen = templates["smollm2-instruct"], templates["qwen2.5-instruct"].tokenizer
    assert smollm2.renderer.name == "chatml+hermes"
    text = qwen.apply_chat_template(
        messages, tools=[WEATHER], add_generation_prompt=True, tokenize=False
    ).replace(
        "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.",
        "You are a helpful AI assistant named SmolLM, trained by Hugging Face",
        1 if messages[0]["role"] != "system" else 0,
    )
    expected = smollm2.tokenizer.encode(text, add_special_tokens=False)
    assert smollm2.render(as_sent(messages), [WEATHER]) == expected


def test_the_tool_text_of_smollm2_is_spelt_out_once(make_tokenizer):
    template = ChatTemplate.load(make_tokenizer("smollm2-instruct"))
    tool = {"type": "function", "function": {"name": "t"}}
    ids = template.render([{"role": "user", "content": "hi"}], [tool])
    assert template.tokenizer.decode(ids) == (
        "<|im_start|>system\n"
        "You are a helpful AI assistant named SmolLM, trained by Hugging Face\n\n"
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
        '{"type": "function", "function": {"name": "t"}}\n</tools>\n\n'
        "For each function call, return a json object with function name and arguments within "
        "<tool_call></tool_call> XML tags:\n<tool_call>\n"
        '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


CHANGES = {
    "trims content": ("message['content'] +", "message['content'] | trim +"),
    "another closing": ("'<|im_end|>' + '\n'", "'<|im_end|>' + '\n\n'"),
    "cuts reasoning": ("message['content'] +", "message['content'].split('</think>')[-1] +"),
    "greets with the date": ("{% for", "{{ strftime_now('%Y') }}{% for"),
    "refuses a second system message": (
        "{{'<|im_start|>' + message",
        "{% if message['role'] == 'system' and not loop.first %}{{ raise_exception('no') }}"
        "{% endif %}{{'<|im_start|>' + message",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_different_template_is_not_recognised_as_chatml(make_tokenizer, change):
    own = make_tokenizer("smollm2-instruct").chat_template
    assert CHANGES[change][0] in own, "the change would change nothing"
    changed = make_tokenizer("smollm2-instruct", own.replace(*CHANGES[change]))
    assert ChatTemplate.load(changed, "HuggingFaceTB/SmolLM2-135M-Instruct").renderer.name == (
        "jinja"
    )


@pytest.mark.parametrize("sentence", ["Please reason step by step.", None])
def test_the_default_system_message_is_read_from_the_template(make_tokenizer, sentence):
    own = make_tokenizer("qwen2.5-instruct").chat_template
    qwen = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
    if sentence:
        changed = own.replace(qwen, sentence)
    else:
        changed = own.replace(f"{{{{- '<|im_start|>system\\n{qwen}<|im_end|>\\n' }}}}", "")
        changed = changed.replace(f"{{{{- '{qwen}' }}}}", "").replace(
            "{{- messages[0]['content'] }}", "{{- messages[0]['content'] + '\\n\\n' }}"
        )
        changed = changed.replace('"\\n\\n# Tools', '"# Tools')
    tokenizer = make_tokenizer("qwen2.5-instruct", changed)
    template = ChatTemplate.load(tokenizer)
    assert isinstance(template.renderer, ChatML)
    assert template.renderer.default_system == sentence
    for tools in (None, [WEATHER]):
        messages = [{"role": "user", "content": "hi"}]
        assert template.render(messages, tools) == own_ids(tokenizer, messages, tools, True)


def test_a_vocabulary_without_the_end_token_is_not_chatml(make_tokenizer):
    tokenizer = make_tokenizer("smollm2-instruct", special=["<|endoftext|>"])
    assert recognise(Jinja(tokenizer, {}, date(2026, 1, 1))) is None
    assert recognise(Jinja(make_tokenizer("smollm2-instruct"), {}, date(2026, 1, 1))) is not None


def test_a_prompt_that_is_rendered_again_has_a_list_of_its_own(templates):
    messages = [{"role": "user", "content": "Again and again."}]
    first = templates["qwen2.5-instruct"].render(messages)
    expected = list(first)
    first.append(7)
    assert templates["qwen2.5-instruct"].render(messages) == expected
