"""Reply: what a completion says, read whole or as it streams in."""

import json
import re
from datetime import date
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from hone.chat.reply import (
    ByteDecoder,
    Reply,
    WindowDecoder,
    byte_pieces,
)
from hone.chat.template import ChatTemplate
from hone.errors import TemplateError
from hone.wire.json import load_object

HI = [{"role": "user", "content": "hi"}]
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "weather"}}]

property_test = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
words = st.text(st.sampled_from("the wind \n\u00e9\u4f60\U0001f600"), min_size=1, max_size=12)


def say(template: ChatTemplate, text: str) -> list[int]:
    return template.tokenizer.encode(text, add_special_tokens=False)


def test_parallel_calls_after_text(smollm2):
    text = (
        'Let me look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "\u4f60"}}\n</tool_call>'
        '\n<tool_call>\n{"name": "time"}\n</tool_call><|im_end|>'
    )
    reply = smollm2.parse(say(smollm2, text), tools=TOOLS, seed="call-7")
    assert reply.content == "Let me look."
    assert [(c.name, c.arguments) for c in reply.tool_calls] == [
        ("weather", '{"city": "\u4f60"}'),
        ("time", "{}"),
    ]
    assert reply.finish == "tool_calls"
    assert reply.malformed == ()
    # The ids are those of this call, whoever parses it and however often.
    again = smollm2.parse(say(smollm2, text), tools=TOOLS, seed="call-7")
    other = smollm2.parse(say(smollm2, text), tools=TOOLS, seed="call-8")
    ids = [call.id for reply in (again, other) for call in reply.tool_calls]
    assert [call.id for call in reply.tool_calls] == ids[:2]
    assert len(set(ids)) == 4
    assert reply.message["tool_calls"][1] == {
        "id": ids[1],
        "type": "function",
        "function": {"name": "time", "arguments": "{}"},
    }
    # Nobody offered tools: then it is text, tags and all.
    assert smollm2.parse(say(smollm2, text)).content == text.removesuffix("<|im_end|>")


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ('{"name": "f", "arguments": {}', "Expecting ',' delimiter"),
        ('{"name": "f", "arguments": "x"}', "expected arguments to be an object, got 'x'"),
        ('{"arguments": {}}', "expected a name, got None"),
        ("[]", "expected a JSON object, got list"),
        ('{"name": "f", "arguments": {"a": NaN}}', "NaN is not JSON"),
        ('{"name": "f", "arguments": {"a": 1e999}}', "a number too large for JSON"),
        ('{"name": "f", "arguments": {"a": "\\ud800"}}', "surrogates not allowed"),
        ('{"name": "f", "arguments": {"a": ' + "[" * 5000 + "]" * 5000 + "}}", "nested deeper"),
        ("", "Expecting value"),
    ],
)
def test_a_malformed_call_stays_in_the_text_and_is_reported(smollm2, body, says):
    good = '<tool_call>{"name": "g", "arguments": {"a": 1}}</tool_call>'
    text = f"a <tool_call>{body}</tool_call> b"
    reply = smollm2.parse(say(smollm2, text + good), tools=TOOLS)
    assert reply.content == text
    assert [call.name for call in reply.tool_calls] == ["g"]
    assert len(reply.malformed) == 1
    assert says in reply.malformed[0]


def test_parameters_are_arguments(smollm2):
    """Models that saw Llama's tool calls write `parameters`; their call is not an empty one."""
    text = '<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>'
    (call,) = smollm2.parse(say(smollm2, text), tools=TOOLS).tool_calls
    assert (call.name, call.arguments) == ("f", '{"a": 1}')
    both = '<tool_call>{"name": "f", "arguments": {"a": 1}, "parameters": {"b": 2}}</tool_call>'
    assert smollm2.parse(say(smollm2, both), tools=TOOLS).tool_calls[0].arguments == '{"a": 1}'
    wrong = '<tool_call>{"name": "f", "parameters": [1]}</tool_call>'
    reply = smollm2.parse(say(smollm2, wrong), tools=TOOLS)
    assert reply.tool_calls == () and "expected parameters to be an object" in reply.malformed[0]


def test_a_call_cut_off_stays_in_the_text(smollm2):
    text = 'a\n<tool_call>\n{"name": "f'
    reply = smollm2.parse(say(smollm2, text), tools=TOOLS, finish="length")
    assert reply.content == text
    assert reply.malformed == ("<tool_call> was never closed by </tool_call>",)
    assert reply.finish == "length"


def test_reasoning_is_told_from_the_answer(qwen3, qwen25):
    text = "<think>\nwhy <tool_call>\n</think>\n\nso\n<|im_end|>"
    reply = qwen3.parse(say(qwen3, text), tools=TOOLS)
    assert (reply.reasoning, reply.content) == ("why <tool_call>", "so\n")
    assert reply.message["reasoning_content"] == "why <tool_call>"
    # A template that opened the reasoning itself: the completion starts inside it.
    opened = qwen3.parse(say(qwen3, "why</think>so"), prompt_ids=say(qwen3, "<think>\n"))
    assert (opened.reasoning, opened.content) == ("why", "so")
    cut = qwen3.parse(say(qwen3, "<think>\nwhy"), finish="length")
    assert (cut.reasoning, cut.content) == ("why", "")
    assert cut.malformed == ("the reasoning was never closed by </think>",)
    # Qwen2.5 knows no reasoning: what looks like it is the answer.
    assert qwen25.parse(say(qwen25, text)).content == text.removesuffix("<|im_end|>")


def test_a_stop_string_cuts_the_text_wherever_the_tokens_end(smollm2):
    ids = say(smollm2, "one two\nUser: three")
    assert smollm2.parse(ids, stop=["User:", "\nUser"]).content == "one two"
    assert smollm2.parse(ids, stop=["nothing"]).content == "one two\nUser: three"


def test_calls_that_a_template_does_not_write_stay_text(make_tokenizer):
    calls = "{% for m in messages %}{{ m.content }}{% for t in tools or [] %}{{ t }}{% endfor %}{% endfor %}"
    template = ChatTemplate.load(make_tokenizer("smollm2-instruct", calls))
    text = '<tool_call>{"name": "f"}</tool_call>'
    assert template.parse(say(template, text), tools=TOOLS).content == text


# Formats that only the library reads


@pytest.fixture(scope="module")
def llama3(make_tokenizer) -> ChatTemplate:
    template = ChatTemplate.load(
        make_tokenizer("llama-3"), "meta-llama/Llama-3.2-1B-Instruct", today=date(2026, 1, 2)
    )
    assert template.renderer_name == "renderers/llama-3"
    return template


def test_the_library_reads_what_it_alone_knows(llama3):
    text = '{"name": "weather", "parameters": {"city": "\u4f60"}}<|eot_id|>'
    parser = llama3.parser(tools=TOOLS, seed="s")
    assert parser.feed(say(llama3, text)) == []  # its parsers want the whole answer
    (event,) = parser.close()
    assert event["tool_calls"][0]["index"] == 0
    reply = parser.reply()
    assert [(c.name, c.arguments) for c in reply.tool_calls] == [("weather", '{"city": "\u4f60"}')]
    assert (reply.content, reply.finish) == ("", "tool_calls")
    assert (
        reply.tool_calls[0].id
        == llama3.parse(say(llama3, text), tools=TOOLS, seed="s").tool_calls[0].id
    )
    # Nobody offered tools: then it is text.
    assert llama3.parse(say(llama3, text)) == Reply(content=text.removesuffix("<|eot_id|>"))


def test_what_the_library_lets_through_is_checked(llama3):
    listed = '{"name": "f", "parameters": [1]}'
    reply = llama3.parse(say(llama3, listed), tools=TOOLS)
    assert reply.content == listed
    assert "expected a JSON object, got list" in reply.malformed[0]
    endless = "{" + '"a": {' * 30_000 + "}" * 30_001
    reply = llama3.parse(say(llama3, endless), tools=TOOLS, finish="length")
    assert reply.content == endless
    assert reply.malformed == ("JSON nested too deeply",)
    assert llama3.parse(say(llama3, "one two three"), stop=["two"]).content == "one "


def test_a_model_without_a_template_is_rendered_by_the_library(llama3):
    text = llama3.tokenizer.decode(llama3.render(HI))
    assert text.startswith("<|begin_of_text|><|start_header_id|>system<|end_header_id|>")
    assert "Today Date: 02 Jan 2026" in text
    with pytest.raises(TemplateError, match=r"^generation_prompt: 'renderers/llama-3' has no"):
        llama3.render(HI, generation_prompt=False)


# Streaming

snippets = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        '<tool_call>\n{"name": "f", "arguments": {"a": "\u4f60 \U0001f600"}}\n</tool_call>',
        "<tool_call>{bad}</tool_call>",
        "<think>",
        "</think>",
        "<tool_",
        "</thi",
        "\n",
        "  ",
        "STOP",
        "STO",
        "the weather",
        "\u4f60\u597d",
        "\U0001f600",
    ]
)


def completions(template: ChatTemplate) -> st.SearchStrategy[list[int]]:
    """Texts a model might say, mixed with ids that no text would be encoded to."""
    spelt = st.sampled_from(["<think>", "</think>", "<tool_call>", "</tool_call>", "STOP"]).map(
        lambda tag: [i for letter in tag for i in say(template, letter)]
    )
    piece = (
        snippets.map(lambda text: say(template, text))
        | spelt
        | st.lists(st.integers(3, len(template.tokenizer) + 2), max_size=3)
    )
    opening = st.sampled_from([[], say(template, "\n<think>"), say(template, "<think>\nthe")])
    return st.tuples(opening, st.lists(piece, max_size=8)).map(
        lambda said: [*said[0], *(i for p in said[1] for i in p)]
    )


def read(text: str, stop: list[str], *, thinks: bool) -> tuple[str | None, str, list[str]]:
    """What StreamParser must find, written another way: with the whole text at hand."""
    text = text[: min((at for at in map(text.find, stop) if at >= 0), default=len(text))]
    reasoning, content, after, names = None, "", False, []
    if thinks and text.lstrip().startswith("<think>"):
        reasoning, _, text = text.lstrip().removeprefix("<think>").partition("</think>")
        reasoning, after = reasoning.strip("\n"), True
    for piece in re.split(r"(<tool_call>.*?</tool_call>)", text, flags=re.DOTALL):
        if piece.startswith("<tool_call>") and piece.endswith("</tool_call>"):
            try:
                names.append(str(load_object(piece[11:-12])["name"]))
                content, after = content.rstrip(), True
                continue
            except (ValueError, KeyError):
                pass
        if after:
            piece = piece.lstrip()
            piece = "\n" + piece if piece and content else piece
        content, after = content + piece, after and not piece
    return reasoning, content.rstrip() if names else content, names


def whole_text(template: ChatTemplate, ids: list[int]) -> str:
    return template.tokenizer.decode(
        ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
    )


@pytest.mark.parametrize("family", ["qwen3", "smollm2-instruct"])
@given(data=st.data(), stop=st.sampled_from([[], ["STOP"], ["\nthe", "</think>"]]))
@property_test
def test_a_stream_adds_up_to_the_answer_read_whole(qwen3, smollm2, family, data, stop):
    template = qwen3 if family == "qwen3" else smollm2
    ids = data.draw(completions(template))
    parser = template.parser(tools=TOOLS, stop=stop, seed="s")
    events, start = [], 0
    one_by_one = st.just([1] * len(ids))
    for size in [*data.draw(one_by_one | st.lists(st.integers(0, 4), max_size=30)), len(ids)]:
        events += parser.feed(ids[start : start + size])
        start += size
    events += parser.close()
    reply = parser.reply()
    # Read whole by the same parser, and from the whole text by another way of doing it.
    assert reply == template.parse(ids, tools=TOOLS, stop=stop, seed="s")
    expected = read(whole_text(template, ids), stop, thinks=family == "qwen3")
    assert (reply.reasoning, reply.content, [c.name for c in reply.tool_calls]) == expected
    assert "".join(e.get("content", "") for e in events) == reply.content
    thought = "".join(e.get("reasoning_content", "") for e in events)
    assert thought == (reply.reasoning or "")
    calls = [call for e in events for call in e.get("tool_calls", ())]
    assert [call.pop("index") for call in calls] == list(range(len(calls)))
    assert calls == reply.message.get("tool_calls", [])


def test_text_is_streamed_as_soon_as_it_is_certain(qwen3):
    parser = qwen3.parser(tools=TOOLS)
    emoji = say(qwen3, "a\U0001f600")
    assert len(emoji) > 2  # the character is split over several tokens
    assert [parser.feed([i]) for i in emoji] == [
        [{"content": "a"}],
        *[[] for _ in emoji[2:]],
        [{"content": "\U0001f600"}],
    ]
    assert parser.feed(say(qwen3, " <tool")) == []
    assert parser.feed(say(qwen3, "box")) == [{"content": " <toolbox"}]
    assert parser.feed(say(qwen3, "\n<tool_call>")) == []
    (event,) = parser.feed(say(qwen3, '{"name": "f"}</tool_call>'))
    assert event["tool_calls"][0]["index"] == 0
    assert parser.close() == []


@given(ids=st.lists(st.integers(0, 430), max_size=12))
@property_test
def test_bytes_decode_as_the_tokenizer_decodes_them(qwen3, ids):
    # Any bytes at all, also such as are no UTF-8, and ids beyond the vocabulary (424 tokens).
    assert len(qwen3.tokenizer) == 424
    pieces = byte_pieces(qwen3.tokenizer)
    assert pieces is not None
    decoder = ByteDecoder(pieces)
    text = "".join(decoder.decode([i]) for i in ids) + decoder.decode((), final=True)
    assert text == whole_text(qwen3, [i for i in ids if i < 424])


@given(text=words)
@example("\U0001f600")
@property_test
def test_vocabularies_that_are_not_byte_level_stream_whole_characters(text):
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocabulary |= {"\u2581": 256, "t": 257, "h": 258, "e": 259, "th": 260, "<unk>": 261}
    backend = Tokenizer(models.BPE(vocabulary, [("t", "h")], byte_fallback=True, unk_token="<unk>"))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    assert byte_pieces(tokenizer) is None
    ids = tokenizer.encode(text.replace(" ", "\u2581"))
    decoder = WindowDecoder(tokenizer)
    pieces = [decoder.decode([i]) for i in ids]
    assert "".join(pieces) + decoder.decode((), final=True) == text
    assert "\ufffd" not in "".join(pieces)


def test_a_reply_sent_back_renders_as_the_model_was_taught(qwen25):
    text = 'Look.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
    reply = qwen25.parse(say(qwen25, text), tools=TOOLS)
    sent_back = json.loads(json.dumps(reply.message))
    rendered = qwen25.render([*HI, sent_back], TOOLS, generation_prompt=False)
    assert whole_text(qwen25, rendered).endswith(f"<|im_start|>assistant\n{text}\n")
