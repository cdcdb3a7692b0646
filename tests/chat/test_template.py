"""ChatTemplate: which renderer is chosen, what is refused, and how completions are read back."""

from copy import deepcopy
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.prose import Prose, place_of

from hone.chat.template import ChatTemplate
from hone.errors import ModelUnsupported, TemplateError

ROOT = Path(__file__).parents[2]
HI = [{"role": "user", "content": "hi"}]
WRITTEN_CALL = {
    "id": "c0",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "the city"}'},
}
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "weather"}}]
NO_TOOLS_TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"

property_test = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


# Which renderer


@pytest.mark.parametrize(
    ("family", "name", "chosen"),
    [
        ("smollm2-instruct", "smollm2-135m-instruct", "chatml+hermes"),
        ("smollm2-instruct", "/models/renamed", "chatml+hermes"),
        ("qwen2.5-instruct", "Qwen/Qwen2.5-3B-Instruct", "chatml"),
        ("qwen3", "Qwen/Qwen3-0.6B", "renderers/qwen3"),
        ("qwen3", "someone/a-fine-tune-of-qwen3", "renderers/qwen3"),
        # Its template is another one than the name promises: the template counts.
        ("qwen2.5-instruct", "Qwen/Qwen3-0.6B", "chatml"),
        # The library knows the name; the tokenizer has none of the tokens.
        ("smollm2-instruct", "Qwen/Qwen3-0.6B", "chatml+hermes"),
    ],
)
def test_the_renderer_is_chosen_by_what_the_template_does(make_tokenizer, family, name, chosen):
    assert ChatTemplate.load(make_tokenizer(family), name).renderer.name == chosen


class _Forgets(dict[str, ChatTemplate]):
    """Variants that another thread clears as soon as one is stored."""

    def __setitem__(self, key: str, value: ChatTemplate) -> None:
        pass


def test_requests_with_different_arguments_do_not_share_templates(make_tokenizer):
    template = ChatTemplate.load(make_tokenizer("smollm2-instruct"))
    template._variants = _Forgets()
    assert template.with_kwargs({"tone": "kind"}).kwargs == {"tone": "kind"}


def test_each_vocabulary_is_spelled_out_once_per_server(make_tokenizer):
    tokenizer = make_tokenizer("smollm2-instruct")
    templates = [ChatTemplate.load(deepcopy(tokenizer)) for _ in range(6)]
    spelled = [template.pieces for template in templates]
    assert all(t.pieces is pieces for t, pieces in zip(templates, spelled, strict=True))


def test_an_unknown_template_is_rendered_as_it_is(prose: Prose, make_tokenizer):
    tokenizer = make_tokenizer("smollm2-instruct", NO_TOOLS_TEMPLATE)
    template = ChatTemplate.load(tokenizer)
    assert template.renderer.name == "jinja"
    assert not template.renderer.bridges
    assert tokenizer.decode(template.render(HI)) == "[user]hi"
    with pytest.raises(TemplateError) as caught:
        template.render(HI, TOOLS)
    prose(caught)
    assert place_of(caught) == "tools"


def test_a_tokenizer_without_a_template_is_refused(prose: Prose, make_tokenizer):
    tokenizer = make_tokenizer("smollm2-instruct", special=["<|im_end|>"])
    tokenizer.chat_template = None
    with pytest.raises(ModelUnsupported) as caught:
        ChatTemplate.load(tokenizer, "base-model")
    prose(caught)


def test_what_the_template_itself_refuses_is_a_template_error(prose: Prose, make_tokenizer):
    strict = "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}x"
    template = ChatTemplate.load(make_tokenizer("smollm2-instruct", strict))
    with pytest.raises(TemplateError) as caught:
        template.render([{"role": "system", "content": "s"}])
    prose(caught)


@pytest.mark.parametrize("family", ["smollm2-instruct", "qwen2.5-instruct", "qwen3"])
def test_turns_end_with_the_models_end_token(make_tokenizer, family):
    tokenizer = make_tokenizer(family)
    names = tokenizer.convert_ids_to_tokens(list(ChatTemplate.load(tokenizer).stop_ids))
    assert names == ["<|im_end|>", "<|endoftext|>"]


# Qwen3, rendered by the library

words = st.text(st.sampled_from("the wind \n\u00e9\u4f60\U0001f600"), min_size=1, max_size=12)


@given(
    turns=st.lists(st.tuples(words, words, st.none() | words), max_size=3),
    tools=st.sampled_from([None, TOOLS]),
    thinking=st.booleans(),
)
@property_test
def test_qwen3_gives_the_ids_of_its_own_template(qwen3, turns, tools, thinking):
    messages: list[dict[str, Any]] = []
    for question, reply, reasoned in turns:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": reply})
        if reasoned:
            messages[-1]["reasoning_content"] = reasoned
    messages.append({"role": "user", "content": "so?"})
    template = qwen3.with_kwargs({"enable_thinking": thinking})
    assert template.renderer.name == "renderers/qwen3"
    assert template.render(messages, tools) == qwen3.tokenizer.apply_chat_template(
        messages,
        tools=tools,
        add_generation_prompt=True,
        enable_thinking=thinking,
        return_dict=False,
    )


# Arguments, date and fingerprint


def test_arguments_are_used_or_named_as_ignored(prose: Prose, qwen3, qwen25):
    variant = qwen3.with_kwargs({"enable_thinking": False, "mood": "gay"})
    assert variant.renderer.ignored == ("mood",)
    assert variant.fingerprint != qwen3.fingerprint
    assert qwen3.with_kwargs({"mood": "gay"}).fingerprint == qwen3.fingerprint
    assert qwen3.with_kwargs({"mood": "gay"}) is qwen3.with_kwargs({"mood": "gay"})
    assert qwen25.with_kwargs({"enable_thinking": False}).renderer.ignored == ("enable_thinking",)
    assert qwen25.with_kwargs({"enable_thinking": False}).fingerprint == qwen25.fingerprint
    assert qwen25.with_kwargs({}) is qwen25
    with pytest.raises(TemplateError) as caught:
        qwen3.with_kwargs({"enable_thinking": "perhaps"})
    prose(caught)
    assert place_of(caught) == "chat_template_kwargs"


def test_the_date_a_template_prints_is_frozen_and_fingerprinted(make_tokenizer, smollm2):
    dated = make_tokenizer(
        "smollm2-instruct", "{{ strftime_now('%d %b %Y') }}: " + NO_TOOLS_TEMPLATE
    )
    new_year, next_day = date(2026, 1, 1), date(2026, 1, 2)
    first = ChatTemplate.load(dated, today=new_year)
    assert dated.decode(first.render(HI)) == "01 Jan 2026: [user]hi"
    assert first.fingerprint == ChatTemplate.load(dated, today=new_year).fingerprint
    assert first.fingerprint != ChatTemplate.load(dated, today=next_day).fingerprint
    undated = ChatTemplate.load(smollm2.tokenizer, today=next_day)
    assert undated.fingerprint == smollm2.fingerprint


def test_the_fingerprint_names_template_and_vocabulary(make_tokenizer, smollm2, qwen25):
    same_text = make_tokenizer("qwen2.5-instruct", smollm2.tokenizer.chat_template)
    other_vocabulary = ChatTemplate.load(same_text)
    assert other_vocabulary.renderer.name == smollm2.renderer.name
    prints = {smollm2.fingerprint, qwen25.fingerprint, other_vocabulary.fingerprint}
    assert len(prints) == 3
    before = smollm2.fingerprint
    again = ChatTemplate.load(smollm2.tokenizer)
    smollm2.tokenizer.backend_tokenizer.enable_truncation(2)  # as a call with max_length leaves it
    assert again.fingerprint == before
    smollm2.tokenizer.backend_tokenizer.no_truncation()


# What is refused, and how it says so


def _call(arguments: object) -> dict[str, Any]:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


IMAGE = [{"type": "image_url", "image_url": {"url": "x"}}]


@pytest.mark.parametrize(
    "messages",
    [
        [],
        "hi",
        ["hi"],
        [{"role": "robot", "content": ""}],
        [*HI, {"role": "user", "content": None}],
        [*HI, {"role": "user"}],
        [{"role": "user", "content": IMAGE}],
        [{"role": "user", "content": "\ud83d"}],
        [_call("bad")],
        [_call('{"a": "\ud83d"}')],
        [_call("[1]")],
        [_call(7)],
        [{"role": "assistant", "tool_calls": [{"name": "f"}]}],
        [{"role": "assistant", "tool_calls": "f"}],
        [{"role": "assistant", "function_call": {"name": "f"}}],
        [{**_call("{}"), "role": "user", "content": ""}],
        [{**_call("{}"), "reasoning": 3}],
    ],
)
def test_malformed_messages_are_refused_by_field(prose: Prose, qwen25, messages):
    with pytest.raises(TemplateError) as caught:
        qwen25.render(messages)
    prose(caught)


@pytest.mark.parametrize("tools", ["weather", ["weather"], [{"name": "weather"}]])
def test_malformed_tools_are_refused(prose: Prose, qwen25, tools):
    with pytest.raises(TemplateError) as caught:
        qwen25.render(HI, tools)
    prose(caught)


def test_equivalent_messages_render_alike(qwen25):
    plain = [{"role": "system", "content": "s"}, {"role": "user", "content": "a\nb"}, _call("{}")]
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    other = [{"role": "developer", "content": "s"}, {"role": "user", "content": parts}, _call("")]
    assert qwen25.render(plain) == qwen25.render(other)
    assert qwen25.render([_call({"a": 1})]) == qwen25.render([_call('{"a":1}')])


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("qwen2.5-instruct", "Qwen/Qwen2.5-3B-Instruct"),
        ("llama-3", "meta-llama/Llama-3.2-1B-Instruct"),
    ],
)
def test_end_tokens_of_the_model_s_files_end_the_turn(make_tokenizer, family, name):
    tokenizer = make_tokenizer(family)
    (end,) = tokenizer.encode("!", add_special_tokens=False)
    plain = ChatTemplate.load(tokenizer, name)
    template = ChatTemplate.load(tokenizer, name, end_ids=(plain.stop_ids[0], end))
    assert template.stop_ids == (*plain.stop_ids, end)
    assert template.with_kwargs({"color": "red"}).stop_ids == template.stop_ids
    assert template.with_kwargs({}, date(2026, 1, 2)).stop_ids == template.stop_ids
    ids = tokenizer.encode("Hello", add_special_tokens=False)
    assert template.parse([*ids, end]).content == "Hello"
    assert plain.parse([*ids, end]).content == "Hello!"


@pytest.mark.parametrize("family", ["smollm2", "qwen25", "qwen3"])
@pytest.mark.parametrize(
    "reply",
    [
        {"role": "assistant", "content": "the weather is cold"},
        {"role": "assistant", "content": "\n\nthe wind"},
        {"role": "assistant", "content": "Let me see.", "tool_calls": [WRITTEN_CALL]},
    ],
    ids=["text", "newlines", "tool-call"],
)
def test_a_written_answer_is_what_the_model_would_have_to_sample(request, family, reply):
    template = request.getfixturevalue(family)
    messages, tools = [{"role": "user", "content": "and now?"}], TOOLS
    ids = template.answer_ids(messages, reply, tools)
    assert ids[-1] == template.renderer.turn_ends[0] and ids.count(ids[-1]) == 1
    parsed = template.parse(ids, prompt_ids=template.render(messages, tools), tools=tools).message
    assert (parsed["content"] or "").strip() == reply["content"].strip()
    called = [c["function"]["name"] for c in parsed.get("tool_calls") or ()]
    assert called == [c["function"]["name"] for c in reply.get("tool_calls", ())]
    # prompt and answer together are the template's own text
    whole = template.render([*messages, reply], tools, generation_prompt=False)
    text = template.tokenizer.decode([*template.render(messages, tools), *ids])
    assert template.tokenizer.decode(whole).startswith(text)


def test_a_template_that_hides_where_the_answer_begins_is_refused(prose: Prose, make_tokenizer):
    odd = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}ANSWER NOW{% endif %}"
    )
    template = ChatTemplate.load(make_tokenizer("smollm2-instruct", odd))
    user, reply = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "no"}
    with pytest.raises(TemplateError) as caught:
        template.answer_ids([user], reply)
    prose(caught)


def test_a_written_answer_ends_where_the_model_stops(make_tokenizer):
    """As of Phi: the turn ends with one token, and the whole conversation with another."""
    source = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
        "{% else %}{{ eos_token }}{% endif %}"
    )
    tokenizer = make_tokenizer("smollm2-instruct", source)
    tokenizer.eos_token = "<|endoftext|>"
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    template = ChatTemplate.load(tokenizer, end_ids=[end])
    ids = template.answer_ids(
        [{"role": "user", "content": "hi"}], {"role": "assistant", "content": "no"}
    )
    assert template.text(ids) == "no<|im_end|>"
