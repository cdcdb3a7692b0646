"""Reply: a completion parsed as a whole or as it streams in."""

import json
import re
from datetime import date
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tests.prose import Prose, place_of
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from hone.chat.messages import check_messages
from hone.chat.reply import (
    ByteDecoder,
    Reply,
    WindowDecoder,
    byte_pieces,
    call_id,
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


GOOD = '<tool_call>{"name": "g", "arguments": {"a": 1}}</tool_call>'


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ('{"name": "f", "arguments": "x"}', "expected arguments to be an object, got 'x'"),
        ('{"name": "f", "arguments": ["{"]}', "expected arguments to be an object, got ['{']"),
        ('{"arguments": {}}', "expected a name, got None"),
        ('{"name": "", "arguments": {}}', "expected a name, got ''"),
        ('{"name": "\\ud800", "arguments": {}}', "surrogates not allowed"),
        ('{"arguments": {}, "name": "f"', "Expecting ',' delimiter"),
        ("[]", "expected a JSON object, got list"),
        ("", "Expecting value"),
    ],
)
def test_a_malformed_call_stays_in_the_text_and_is_reported(smollm2, body, says):
    text = f"a <tool_call>{body}</tool_call> b"
    reply = smollm2.parse(say(smollm2, text + GOOD), tools=TOOLS)
    assert reply.content == text
    assert [call.name for call in reply.tool_calls] == ["g"]
    assert len(reply.malformed) == 1
    assert says in reply.malformed[0]


@pytest.mark.parametrize(
    ("arguments", "end", "says"),
    [
        ("{}", "", "Expecting ',' delimiter"),
        ("{}", "} or so", "Extra data"),
        ('{"a": NaN}', "}", "NaN is not JSON"),
        ('{"a": 1e999}', "}", "a number too large for JSON"),
        ('{"a": "\\ud800"}', "}", "surrogates not allowed"),
        ('{"a": ' + "[" * 5000 + "]" * 5000 + "}", "}", "nested deeper"),
        ('{"code": "one\ntwo"}', "}", "Invalid control character"),
        ('{"a": "never ended}}\n', "", "Invalid control character"),
        ('{"a": "never ended}}', "", "Unterminated string"),
        ("{}", ', "arguments": {"b": 1}}', "it has a key twice"),
    ],
)
def test_a_call_that_breaks_after_it_began_has_its_arguments_as_sampled(
    smollm2, arguments, end, says
):
    """They were streamed, so they stay: the agent's parser finds the error, and `malformed` names it."""
    text = f'a <tool_call>{{"name": "f", "arguments": {arguments}{end}</tool_call> b '
    reply = smollm2.parse(say(smollm2, text + GOOD), tools=TOOLS)
    assert reply.content == "a\nb"
    assert [(c.name, c.arguments) for c in reply.tool_calls] == [
        ("f", arguments),
        ("g", '{"a": 1}'),
    ]
    assert len(reply.malformed) == 1
    assert says in reply.malformed[0]
    # The agent sends it back: no prompt refuses what the model wrote, and the model sees it again.
    (sent,) = check_messages([reply.message])
    assert sent.tool_calls[0].arguments == arguments
    rendered = whole_text(smollm2, smollm2.render([*HI, reply.message], TOOLS))
    assert f'{{"name": "f", "arguments": {arguments}}}\n</tool_call>' in rendered


def test_a_closing_tag_inside_a_string_does_not_end_the_call(smollm2):
    arguments = '{"xml": "<tool_call>{\\"a\\": 1}</tool_call>\\n", "more": "</tool_call>"}'
    text = f'<tool_call>{{"name": "write", "arguments": {arguments}}}</tool_call>'
    reply = smollm2.parse(say(smollm2, text + GOOD), tools=TOOLS)
    assert [(c.name, c.arguments) for c in reply.tool_calls] == [
        ("write", arguments),
        ("g", '{"a": 1}'),
    ]
    assert (reply.content, reply.malformed) == ("", ())
    # Also where the call is held until it is closed.
    turned = f'<tool_call>{{"arguments": {arguments}, "name": "write"}}</tool_call>'
    assert smollm2.parse(say(smollm2, turned), tools=TOOLS).tool_calls[0].arguments == arguments


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
    begun = 'a\n<tool_call>\n{"name": "f", "arguments": {"a": "the w'
    reply = smollm2.parse(say(smollm2, begun), tools=TOOLS, finish="length")
    assert [(c.name, c.arguments) for c in reply.tool_calls] == [("f", '{"a": "the w')]
    assert reply.malformed == ("<tool_call> was never closed by </tool_call>",)
    assert (reply.content, reply.finish) == ("a", "length")


def test_reasoning_is_separated_from_the_answer(qwen3, qwen25):
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
    assert template.renderer.name == "renderers/llama-3"
    return template


def test_the_library_parses_its_own_formats(llama3):
    text = '{"name": "weather", "parameters": {"city": "\u4f60"}}<|eot_id|>'
    parser = llama3.parser(tools=TOOLS, seed="s")
    assert parser.feed(say(llama3, text)) == []  # its parsers want the whole answer
    begin, more = parser.close()
    assert begin["tool_calls"][0]["function"] == {"name": "weather", "arguments": ""}
    assert more["tool_calls"][0]["function"] == {"arguments": '{"city": "\u4f60"}'}
    reply = parser.reply()
    assert [(c.name, c.arguments) for c in reply.tool_calls] == [("weather", '{"city": "\u4f60"}')]
    assert (reply.content, reply.finish) == ("", "tool_calls")
    assert (
        reply.tool_calls[0].id
        == llama3.parse(say(llama3, text), tools=TOOLS, seed="s").tool_calls[0].id
    )
    # Nobody offered tools: then it is text.
    assert llama3.parse(say(llama3, text)) == Reply(content=text.removesuffix("<|eot_id|>"))


def test_replies_of_the_library_are_validated(llama3):
    listed = '{"name": "f", "parameters": [1]}'
    reply = llama3.parse(say(llama3, listed), tools=TOOLS)
    assert reply.content == listed
    assert "expected a JSON object, got list" in reply.malformed[0]
    endless = "{" + '"a": {' * 30_000 + "}" * 30_001
    reply = llama3.parse(say(llama3, endless), tools=TOOLS, finish="length")
    assert reply.content == endless
    assert reply.malformed == ("JSON nested too deeply",)
    assert llama3.parse(say(llama3, "one two three"), stop=["two"]).content == "one "


def test_a_model_without_a_template_is_rendered_by_the_library(prose: Prose, llama3):
    text = llama3.tokenizer.decode(llama3.render(HI))
    assert text.startswith("<|begin_of_text|><|start_header_id|>system<|end_header_id|>")
    assert "Today Date: 02 Jan 2026" in text
    with pytest.raises(TemplateError) as caught:
        llama3.render(HI, generation_prompt=False)
    prose(caught)
    assert place_of(caught) == "generation_prompt"


# Streaming

snippets = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        '<tool_call>\n{"name": "f", "arguments": {"a": "\u4f60 \U0001f600"}}\n</tool_call>',
        "<tool_call>{bad}</tool_call>",
        '<tool_call>{"name": "f", "arguments": {',
        '"a": "',
        '"}',
        "}}",
        "[{",
        '\\"',
        '{"arguments": {"b": "</tool_call>"}, "name": "g"}</tool_call>',
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
        lambda parts: [*parts[0], *(i for p in parts[1] for i in p)]
    )


def read(
    text: str, stop: list[str], *, thinks: bool
) -> tuple[str | None, str, list[tuple[str, str]]]:
    """What StreamParser must find, written another way: with the whole text at hand."""
    text = text[: min((at for at in map(text.find, stop) if at >= 0), default=len(text))]
    reasoning, content, after = None, "", False
    calls: list[tuple[str, str]] = []
    if thinks and text.lstrip().startswith("<think>"):
        reasoning, _, text = text.lstrip().removeprefix("<think>").partition("</think>")
        reasoning, after = reasoning.strip("\n"), True
    while text:
        piece, tag, rest = text.partition("<tool_call>")
        body, close, text = split_call(rest)
        call = read_call(body, bool(close)) if tag else None
        pieces = [piece] if call else [piece, tag + body + close]
        for part in pieces:
            if after:
                part = part.lstrip()
                part = "\n" + part if part and content else part
            content, after = content + part, after and not part
        if call:
            calls.append(call)
            content, after = content.rstrip(), True
    return reasoning, content.rstrip() if calls else content, calls


def split_call(rest: str) -> tuple[str, str, str]:
    """At the first tag that leaves a JSON object before it; if there is none, at the first."""
    ends = [m.start() for m in re.finditer("</tool_call>", rest)]
    for end in ends:
        try:
            load_object(rest[:end])
        except ValueError:
            continue
        return rest[:end], "</tool_call>", rest[end + 12 :]
    return rest.partition("</tool_call>")


def read_call(body: str, closed: bool) -> tuple[str, str] | None:
    try:
        value = load_object(body)
        if closed:
            spelt = re.search(r'"arguments"\s*:\s*(.*)\}\s*$', body, re.DOTALL)
            if list(value) == ["name", "arguments"] and spelt:
                return value["name"], spelt[1]
            return value["name"], json.dumps(value["arguments"], ensure_ascii=False)
    except (ValueError, KeyError):
        pass
    begun = re.match(r'\s*\{\s*"name"\s*:\s*"(\w+)"\s*,\s*"arguments"\s*:\s*(?=\{)', body)
    if begun is None:
        return None
    depth, string, skip = 0, False, False
    for at, letter in enumerate(rest := body[begun.end() :]):
        if skip or letter == "\\":
            skip = not skip and rest[at + 1 : at + 2] in ('"', "\\")
        elif letter == '"':
            string = not string
        elif not string and letter in "{[}]":
            depth += 1 if letter in "{[" else -1
            if depth == 0:
                return begun[1], rest[: at + 1]
    return begun[1], rest


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
    calls = [(call.name, call.arguments) for call in reply.tool_calls]
    assert (reply.reasoning, reply.content, calls) == expected
    assert "".join(e.get("content", "") for e in events) == reply.content
    thought = "".join(e.get("reasoning_content", "") for e in events)
    assert thought == (reply.reasoning or "")
    streamed: list[dict[str, Any]] = []
    for part in [call for e in events for call in e.get("tool_calls", ())]:
        if "id" in part:
            assert (part.pop("index"), part["function"]["arguments"]) == (len(streamed), "")
            streamed.append(part)
        else:
            assert (part["index"], list(part["function"])) == (len(streamed) - 1, ["arguments"])
            assert part["function"]["arguments"]
            streamed[-1]["function"]["arguments"] += part["function"]["arguments"]
    assert streamed == reply.message.get("tool_calls", [])


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
    begin, more = parser.feed(say(qwen3, '{"name": "f"}</tool_call>'))
    assert begin["tool_calls"][0]["index"] == 0
    assert more["tool_calls"] == [{"index": 0, "function": {"arguments": "{}"}}]
    assert parser.close() == []


def test_arguments_are_streamed_as_they_are_sampled(qwen3):
    def feed(text: str) -> list[Any]:
        return [call for e in parser.feed(say(qwen3, text)) for call in e["tool_calls"]]

    def more(text: str) -> list[Any]:
        return [{"index": 0, "function": {"arguments": text}}]

    parser = qwen3.parser(tools=TOOLS, seed="s")
    assert feed('<tool_call>\n{"name": "weather", "argum') == []
    begin = {"index": 0, "id": call_id("s", 0), "type": "function"}
    # The brace says that the arguments are an object: from here on it is a call.
    assert feed('ents": {') == [
        {**begin, "function": {"name": "weather", "arguments": ""}},
        *more("{"),
    ]
    assert feed('"city":  "') == more('"city":  "')
    assert feed("\u4f60 \\") == more("\u4f60 ")  # an escape is not cut
    assert feed('"}') == more('\\"}')
    assert feed("</tool") == []
    assert feed("box") == more("</toolbox")
    assert feed("</tool_call>") == []  # inside the string; certain once the string ends
    assert feed('"} } \n') == []
    assert feed("</tool_call>") == more('</tool_call>"}')
    assert parser.close() == []
    (call,) = parser.reply().tool_calls
    assert call.arguments == '{"city":  "\u4f60 \\"}</toolbox</tool_call>"}'
    # "arguments" before "name": nobody knows yet whose they are.
    parser = qwen3.parser(tools=TOOLS, seed="s")
    assert feed('<tool_call>{"arguments": {"a":1}, "name": "weather"}') == []
    assert feed("</tool_call>")[1:] == more('{"a":1}')


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


def test_a_reply_that_is_sent_back_renders_in_the_models_format(qwen25):
    text = 'Look.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
    reply = qwen25.parse(say(qwen25, text), tools=TOOLS)
    sent_back = json.loads(json.dumps(reply.message))
    rendered = qwen25.render([*HI, sent_back], TOOLS, generation_prompt=False)
    assert whole_text(qwen25, rendered).endswith(f"<|im_start|>assistant\n{text}\n")
