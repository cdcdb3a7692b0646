"""Bridge: the next prompt begins with the ids that were fed and sampled before."""

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hone.chat.bridge import Conversation, HashedMessages, NextPrompt, Reason, RenderedCall
from hone.chat.messages import check_messages
from hone.chat.template import ChatTemplate

FAMILIES = ("smollm2-instruct", "qwen2.5-instruct", "qwen3")
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "description": "in a caf\u00e9"}}
]
HI: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "caf\u00e9", "n": 1}}\n</tool_call>'


@pytest.fixture(scope="module")
def templates(make_tokenizer) -> dict[str, ChatTemplate]:
    return {family: ChatTemplate.load(make_tokenizer(family)) for family in FAMILIES}


@pytest.fixture(scope="module")
def qwen25(templates) -> ChatTemplate:
    return templates["qwen2.5-instruct"]


def encode(template: ChatTemplate, text: str) -> list[int]:
    return template.tokenizer.encode(text, add_special_tokens=False)


def answered(
    template: ChatTemplate,
    messages: list[dict[str, Any]],
    completion: list[int],
    *,
    tools: list[dict[str, Any]] | None = None,
    prompt: list[int] | None = None,
) -> RenderedCall:
    """A recorded call whose completion was `completion`."""
    prompt = template.render(messages, tools) if prompt is None else prompt
    reply = template.parse(completion, prompt_ids=prompt, tools=tools)
    return RenderedCall(
        prompt_ids=prompt,
        completion_ids=completion,
        messages=messages,
        reply=reply.message,
        tools=tools,
        template=template.fingerprint,
    )


def bridge(
    template: ChatTemplate,
    previous: RenderedCall,
    messages: list[dict[str, Any]],
    tools: Any = None,
) -> NextPrompt:
    """The next prompt after one recorded call."""
    conversation = Conversation(template)
    conversation.add(previous)
    return conversation.prompt(messages, tools)


def continues(prompt: NextPrompt, call: RenderedCall) -> bool:
    """Whether a prompt begins with the ids that a call was fed and sampled."""
    before = [*call.prompt_ids, *call.completion_ids]
    return prompt.ids[: len(before)] == before


def sent_back(message: Any) -> dict[str, Any]:
    """The message after its way through an API and an agent: the same, as fresh JSON."""
    return json.loads(json.dumps(message))


def ending(ids: list[int], turns: int, end: int) -> list[int]:
    """What follows the `turns`-th end token from the back."""
    ends = [i for i, token in enumerate(ids) if token == end]
    return ids[ends[-turns] + 1 :]


# The property of the whole module

words = st.text(
    st.sampled_from("the wind \n\u00e9\u00df\u4f60\u597d\U0001f600\u0301{}\"'"), max_size=16
)
users = st.builds(lambda text: [{"role": "user", "content": text}], words)
results = st.lists(words, min_size=1, max_size=3).map(
    lambda texts: [
        {"role": "tool", "content": t, "tool_call_id": f"c{i}"} for i, t in enumerate(texts)
    ]
)


def sampled(template: ChatTemplate) -> st.SearchStrategy[list[int]]:
    """Ids as an engine samples them: mostly such as no text would be encoded to."""
    ids = st.lists(st.integers(3, len(template.tokenizer) - 1), max_size=8)
    calls = st.lists(st.just(encode(template, CALL)), max_size=2)
    completions = st.tuples(ids, calls).map(
        lambda pair: [*pair[0], *(i for call in pair[1] for i in call)]
    )
    ends = st.sampled_from([[template.stop_ids[0]], [template.stop_ids[0]], [0], []])
    return st.tuples(completions, ends).map(lambda pair: pair[0] + pair[1])


@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data(), system=st.booleans(), tools=st.sampled_from([None, TOOLS]))
@settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_a_bridged_prompt_begins_with_the_ids_fed_and_sampled(
    templates, family, data, system, tools
):
    template = templates[family]
    end = template.stop_ids[0]
    conversation = Conversation(template)
    messages: list[dict[str, Any]] = [{"role": "system", "content": "s"}] if system else []
    messages += data.draw(users)
    prompt = conversation.prompt(messages, tools)
    assert (prompt.outcome, prompt.reasons) == ("first", (Reason.FIRST,))
    for _ in range(data.draw(st.integers(1, 4))):
        call = answered(
            template, list(messages), data.draw(sampled(template)), tools=tools, prompt=prompt.ids
        )
        conversation.add(call)
        added = data.draw(results | users)
        request = [*messages, sent_back(call.reply), *added]
        following = conversation.prompt(request, tools)
        before = [*call.prompt_ids, *call.completion_ids]
        if family != "qwen3":
            assert following.outcome == "bridged"
        if following.outcome == "bridged":
            assert following.ids[: len(before)] == before
            # What was added is what the model's own template adds after any answer.
            new = following.ids[len(before) :]
            close = [] if call.completion_ids[-1:] == [end] else [end]
            if family == "qwen3" and call.completion_ids[-1:] == [0]:
                close = []  # the library lets <|endoftext|> stand for the end of a turn
            answer = template.tokenizer.decode(call.completion_ids)
            ended = encode(template, "</think>")
            if answer.rfind("<think>") > answer.rfind("</think>") and new[: len(ended)] == ended:
                close = [*ended, *close]  # the library ends a reasoning that began the answer
            assert new[: len(close)] == close
            stand_in = [*messages, {"role": "assistant", "content": "x"}, *added]
            whole = template.render(stand_in, tools)
            assert new[len(close) :] == ending(whole, 1 + new[len(close) :].count(end), end)
        else:
            text = template.tokenizer.decode(before)
            assert "<think>" in text or "</think>" in text
            assert following.ids == template.render(request, tools)
        messages, prompt = request, following


def test_encoding_again_would_have_changed_the_ids(qwen25):
    # "the" is one token here; the same word sampled as three is what the bridge must keep.
    split = [i for letter in "the" for i in encode(qwen25, letter)]
    assert len(split) == 3
    assert encode(qwen25, "the") != split
    call = answered(qwen25, HI, [*split, qwen25.stop_ids[0]])
    request = [*HI, sent_back(call.reply), *HI]
    bridged = bridge(qwen25, call, request)
    assert bridged.ids[len(call.prompt_ids) :][:3] == split
    rendered = qwen25.render(request)
    assert rendered != bridged.ids
    assert qwen25.tokenizer.decode(rendered) == qwen25.tokenizer.decode(bridged.ids)


# Each reason


def ask(
    template: ChatTemplate, call: RenderedCall, reply: dict[str, Any], **over: Any
) -> NextPrompt:
    request = [*over.pop("before", call.messages), reply, {"role": "user", "content": "and?"}]
    return bridge(template, call, request, over.pop("tools", call.tools))


def test_the_message_as_returned_is_exact(qwen25):
    call = answered(qwen25, HI, encode(qwen25, "Look.\n" + CALL + "<|im_end|>"), tools=TOOLS)
    bridged = ask(qwen25, call, sent_back(call.reply))
    assert (bridged.outcome, bridged.reasons, bridged.source) == ("bridged", (Reason.EXACT,), 0)


@pytest.mark.parametrize(
    "arguments", ['{"n":1 ,"city": "\u4f60"}', '{"n": NaN}', '{"city": "the\ncity"}', '{"n": 1,}']
)
def test_arguments_as_the_model_spelt_them_are_exact(qwen25, arguments):
    """Also if they do not parse: an agent that reports the error to the model continues its ids."""
    text = f'<tool_call>\n{{"name": "weather", "arguments": {arguments}}}\n</tool_call><|im_end|>'
    call = answered(qwen25, HI, encode(qwen25, text), tools=TOOLS)
    reply = sent_back(call.reply)
    assert reply["tool_calls"][0]["function"]["arguments"] == arguments
    bridged = ask(qwen25, call, reply)
    assert (bridged.outcome, bridged.reasons) == ("bridged", (Reason.EXACT,))
    assert continues(bridged, call)
    reply["tool_calls"][0]["function"]["arguments"] = '{"n": 1, "n": }'
    assert ask(qwen25, call, reply).reasons == (Reason.REPLY_REWRITTEN,)


def test_ids_of_calls_parts_and_foreign_fields_do_not_count(qwen25):
    call = answered(qwen25, HI, encode(qwen25, "Look.\n" + CALL + "<|im_end|>"), tools=TOOLS)
    reply = sent_back(call.reply)
    reply["tool_calls"][0]["id"] = "another"
    reply["content"] = [{"type": "text", "text": reply["content"]}]
    reply |= {"refusal": None, "annotations": [], "audio": None, "function_call": None}
    assert ask(qwen25, call, reply).reasons == (Reason.EXACT,)


@pytest.mark.parametrize(
    ("arguments", "outcome", "why"),
    [
        ('{"n":1,"city":"caf\\u00e9"}', "bridged", Reason.ARGUMENTS),
        ('{"city": "caf\u00e9", "n": 1.0}', "bridged", Reason.ARGUMENTS),
        ({"city": "caf\u00e9", "n": 1}, "bridged", Reason.EXACT),
        ('{"city": "caf\u00e9", "n": true}', "re-rendered", Reason.REPLY_REWRITTEN),
        ('{"city": "caf\u00e9", "n": "1"}', "re-rendered", Reason.REPLY_REWRITTEN),
        ('{"city": "caf\u00e9"}', "re-rendered", Reason.REPLY_REWRITTEN),
    ],
)
def test_arguments_are_compared_by_value(qwen25, arguments, outcome, why):
    call = answered(qwen25, HI, encode(qwen25, CALL + "<|im_end|>"), tools=TOOLS)
    reply = sent_back(call.reply)
    reply["tool_calls"][0]["function"]["arguments"] = arguments
    bridged = ask(qwen25, call, reply)
    assert (bridged.outcome, bridged.reasons) == (outcome, (why,))


def test_a_truncated_answer_is_closed(qwen25):
    end = qwen25.stop_ids[0]
    call = answered(qwen25, HI, encode(qwen25, "cut sho"))
    bridged = ask(qwen25, call, sent_back(call.reply))
    assert (bridged.outcome, bridged.reasons) == ("bridged", (Reason.TRUNCATED,))
    before = [*call.prompt_ids, *call.completion_ids]
    assert bridged.ids[: len(before) + 1] == [*before, end]


def test_a_rewritten_reply_is_rendered_as_it_was_sent(qwen25):
    call = answered(qwen25, HI, encode(qwen25, " the weather<|im_end|>"))
    reply = {"role": "assistant", "content": "the weather"}  # stripped by the agent
    bridged = ask(qwen25, call, reply)
    assert (bridged.outcome, bridged.reasons) == ("re-rendered", (Reason.REPLY_REWRITTEN,))
    request = [*HI, reply, {"role": "user", "content": "and?"}]
    assert bridged.ids == qwen25.render(request)
    assert not continues(bridged, call)


def test_a_rewritten_history_is_named(qwen25):
    call = answered(qwen25, HI, encode(qwen25, "the weather<|im_end|>"))
    summary = [{"role": "system", "content": "summary"}, *HI]
    bridged = ask(qwen25, call, sent_back(call.reply), before=summary)
    assert (bridged.outcome, bridged.reasons) == ("re-rendered", (Reason.HISTORY_REWRITTEN,))


def test_other_tools_or_another_template_make_another_prompt(qwen25, templates):
    call = answered(qwen25, HI, encode(qwen25, "the<|im_end|>"), tools=TOOLS)
    request = ask(qwen25, call, sent_back(call.reply), tools=None)
    assert (request.outcome, request.reasons) == ("re-rendered", (Reason.TOOLS_CHANGED,))
    other = ask(templates["smollm2-instruct"], call, sent_back(call.reply))
    assert (other.outcome, other.reasons) == ("re-rendered", (Reason.TEMPLATE_CHANGED,))


def test_an_answer_that_is_left_out_after_a_tool_error_gives_a_branch(qwen25):
    """The requests of smolagents 1.26: after an error of a tool, the call is not sent back."""
    failed = answered(qwen25, HI, encode(qwen25, f"{CALL}<|im_end|>"), tools=TOOLS)
    error = [{"role": "user", "content": "hi\nError:\nno such city\nNow let's retry"}]
    after_error = bridge(qwen25, failed, error, TOOLS)
    assert (after_error.outcome, after_error.reasons) == ("branched", (Reason.OTHER,))
    # After a result, the call comes back as text.
    worked = [
        *HI,
        {"role": "assistant", "content": "Calling tools:\n[{'name': 'weather'}]"},
        {"role": "user", "content": "Observation:\n3"},
    ]
    after_result = bridge(qwen25, failed, worked, TOOLS)
    assert (after_result.outcome, after_result.reasons) == (
        "re-rendered",
        (Reason.REPLY_REWRITTEN,),
    )


def test_branches_are_distinguished_and_the_longest_match_counts(qwen25):
    conversation = Conversation(qwen25)
    first = answered(qwen25, HI, encode(qwen25, "one<|im_end|>"))
    conversation.add(first)
    again = conversation.prompt(HI)
    assert (again.outcome, again.reasons) == ("branched", (Reason.SAME_PROMPT,))
    elsewhere = conversation.prompt([{"role": "user", "content": "other"}])
    assert (elsewhere.outcome, elsewhere.reasons) == ("branched", (Reason.OTHER,))
    conversation.add(answered(qwen25, HI, encode(qwen25, "two<|im_end|>")))
    longer = [*HI, sent_back(first.reply), {"role": "user", "content": "go on"}]
    prompt = conversation.prompt(longer)
    assert prompt.source == 0
    third = answered(qwen25, longer, encode(qwen25, "three<|im_end|>"), prompt=prompt.ids)
    conversation.add(third)
    more = [*longer, sent_back(third.reply), *HI]
    assert conversation.prompt(more).source == 2
    # Its own answer rewritten: the longest recorded beginning is still used, and it is said why.
    rewritten = [*longer, {"role": "assistant", "content": "THREE"}, *HI]
    partial = conversation.prompt(rewritten)
    assert (partial.outcome, partial.source) == ("bridged", 0)
    assert partial.reasons == (Reason.REPLY_REWRITTEN,)
    assert continues(partial, first)
    second_branch = [*HI, {"role": "assistant", "content": "two"}, *HI]
    assert conversation.prompt(second_branch).source == 1


def test_the_newest_of_equal_answers_is_continued(qwen25):
    # Two samples of one prompt that say the same in different ids.
    whole = encode(qwen25, "the<|im_end|>")
    split = [*(i for letter in "the" for i in encode(qwen25, letter)), qwen25.stop_ids[0]]
    conversation = Conversation(qwen25)
    calls = [answered(qwen25, HI, completion) for completion in (whole, split)]
    for call in calls:
        conversation.add(call)
    bridged = conversation.prompt([*HI, {"role": "assistant", "content": "the"}, *HI])
    assert bridged.source == 1
    assert continues(bridged, calls[1])


def test_a_template_that_cannot_bridge_says_so(make_tokenizer):
    jinja = "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}[assistant]"
    template = ChatTemplate.load(make_tokenizer("smollm2-instruct", jinja))
    assert template.renderer.name == "jinja"
    whole = encode(template, "the<|im_end|>")
    split = [*(i for letter in "the" for i in encode(template, letter)), template.stop_ids[0]]
    for completion, same in ((whole, True), (split, False)):
        call = answered(template, HI, completion)
        bridged = ask(template, call, sent_back(call.reply))
        assert (bridged.outcome, bridged.reasons) == ("re-rendered", (Reason.CANNOT,))
        # Rendered again, "the" is one token: by luck the ids that were sampled, or others.
        assert continues(bridged, call) is same


def test_the_same_turns_under_other_tools_do_not_hide_the_ones_that_continue(qwen25):
    conversation = Conversation(qwen25)
    completion = encode(qwen25, "the<|im_end|>")
    conversation.add(answered(qwen25, HI, completion, tools=TOOLS))
    conversation.add(answered(qwen25, HI, completion))
    request = [*HI, {"role": "assistant", "content": "the"}, *HI]
    assert conversation.prompt(request, TOOLS).source == 0
    assert conversation.prompt(request).source == 1


def test_an_answer_inserted_by_the_agent_is_encoded_from_text(qwen25):
    call = answered(qwen25, HI, encode(qwen25, "the<|im_end|>"))
    request = [*HI, sent_back(call.reply), *HI, {"role": "assistant", "content": "mine"}, *HI]
    bridged = bridge(qwen25, call, request)
    assert (bridged.outcome, bridged.reasons) == ("bridged", (Reason.ANSWER_ADDED,))
    assert bridged.ids == qwen25.render(request)  # "the" is encoded as it was sampled


# Reasoning, as Qwen3 treats it

THOUGHT = "<think>\nwhy\n</think>\n\n"


def test_reasoning_is_kept_while_tools_answer_and_stripped_when_the_user_speaks(templates):
    qwen3 = templates["qwen3"]
    call = answered(qwen3, HI, encode(qwen3, THOUGHT + CALL + "<|im_end|>"), tools=TOOLS)
    assert call.reply["reasoning_content"] == "why"
    result = [{"role": "tool", "content": "cold", "tool_call_id": "c"}]
    bridged = bridge(qwen3, call, [*HI, sent_back(call.reply), *result], TOOLS)
    assert (bridged.outcome, bridged.reasons) == ("bridged", (Reason.EXACT,))
    forgetful = {k: v for k, v in call.reply.items() if k != "reasoning_content"}
    silent = bridge(qwen3, call, [*HI, forgetful, *result], TOOLS)
    assert (silent.outcome, silent.reasons) == ("bridged", (Reason.REASONING_KEPT,))
    assert silent.ids == bridged.ids
    other = {**forgetful, "reasoning_content": "because"}
    changed = bridge(qwen3, call, [*HI, other, *result], TOOLS)
    assert (changed.outcome, changed.reasons) == ("re-rendered", (Reason.REPLY_REWRITTEN,))
    spoken = bridge(qwen3, call, [*HI, sent_back(call.reply), *HI], TOOLS)
    assert (spoken.outcome, spoken.reasons) == ("re-rendered", (Reason.REASONING_STRIPPED,))
    assert "why" not in qwen3.tokenizer.decode(spoken.ids)


def test_without_reasoning_qwen3_is_bridged_across_user_turns(templates):
    qwen3 = templates["qwen3"]
    call = answered(qwen3, HI, encode(qwen3, "the weather<|im_end|>"))
    request = [*HI, sent_back(call.reply), *HI]
    bridged = bridge(qwen3, call, request)
    assert (bridged.outcome, bridged.reasons) == ("bridged", (Reason.EXACT,))
    # This answer is encoded as it was sampled, so the model's own template must agree.
    assert bridged.ids == qwen3.render(request)
    put_in = [*request, {"role": "assistant", "content": "x"}, *HI]
    added = bridge(qwen3, call, put_in)
    assert (added.outcome, added.reasons) == ("re-rendered", (Reason.ANSWER_ADDED,))
    conversation = Conversation(qwen3)
    conversation.add(call)
    conversation.add(answered(qwen3, request, encode(qwen3, "y<|im_end|>"), prompt=bridged.ids))
    rewritten = conversation.prompt(put_in)
    assert (rewritten.outcome, rewritten.reasons) == ("re-rendered", (Reason.REPLY_REWRITTEN,))


def test_thinking_switched_off_for_one_request_is_another_template(templates):
    qwen3 = templates["qwen3"]
    call = answered(qwen3, HI, encode(qwen3, "the weather<|im_end|>"))
    conversation = Conversation(qwen3)
    conversation.add(call)
    request = [*HI, sent_back(call.reply), *HI]
    silent = qwen3.with_kwargs({"enable_thinking": False})
    prompt = conversation.match(HashedMessages.of(check_messages(request)), []).render(silent)
    assert (prompt.outcome, prompt.reasons) == ("re-rendered", (Reason.TEMPLATE_CHANGED,))
    assert qwen3.tokenizer.decode(prompt.ids).endswith("<think>\n\n</think>\n\n")
