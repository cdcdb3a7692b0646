"""load.py: values of YAML, the environment and other files, and the place of each value."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.prose import Prose, place_of

from hone.config.load import load, parsed
from hone.config.problems import Place
from hone.errors import ConfigError

Write = Callable[..., Path]


def test_numbers_are_numbers(write: Write):
    file = write("""
        a: 1e-6
        b: [1.5e3, -2E4, .5, 3., +1, 0x1f, 0o17, 1_000]
        c: [.inf, 1e, e5, 1.2.3, "1e-6", -]
        """)
    data = load(file).data
    assert data["a"] == 1e-06 and isinstance(data["a"], float)
    # 0x1f = 31, 0o17 = 15
    assert data["b"] == [1500.0, -20000.0, 0.5, 3.0, 1, 31, 15, 1000]
    assert data["c"] == [float("inf"), "1e", "e5", "1.2.3", "1e-6", "-"]


def test_values_that_yaml_1_1_would_convert_stay_text(write: Write):
    data = load(write("a: 2024-01-31\nb: 12:30:00\nc: ~\nd: yes\n")).data
    assert data == {"a": "2024-01-31", "b": "12:30:00", "c": None, "d": True}


def test_an_empty_file_is_an_empty_document(write: Write):
    assert load(write("# nothing\n")).data == {}


def test_every_key_has_a_line(write: Write):
    file = write("llms:\n  m:\n    _type: openai\nlist:\n  - a\n  - b: 1\n")
    places = load(file).places
    assert places["llms", "m", "_type"] == Place("a.yml", 3)
    assert places["list", 0] == Place("a.yml", 5)
    assert places["list", 1, "b"] == Place("a.yml", 6)
    assert str(places["list", 1, "b"]) == "a.yml:6"


def test_the_place_of_a_missing_key_is_that_of_its_block(write: Write):
    assert load(write("a:\n  b: 1\n")).place(("a", "x", "y")) == Place("a.yml", 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1\nb: 2\n", "a.yml:2: not YAML: expected ',' or ']', but got ':'"),
        ("a:\n\tb: 1\n", "a.yml:2: not YAML: found character '\\t' that cannot start any token; "),
        ("- 1\n", "a.yml:1: the document is a list; expected keys such as `llms:`"),
        ("just text\n", "a.yml:1: the document is 'just text'; expected keys such as `llms:`"),
        ("a: &x\n  b: *x\n", "a.yml:1: this block holds an alias to itself"),
        ("a:\n  {b: 1}: 2\n", "a.yml:2: a key is a block; expected a name"),
        ("a: !!python/none x\n", "a.yml:1: not YAML: could not determine a constructor for"),
    ],
)
def test_invalid_yaml_is_reported_with_its_line(write: Write, text: str, message: str):
    with pytest.raises(ConfigError) as error:
        load(write(text))
    assert str(error.value).startswith(message)


def test_a_missing_file(prose: Prose):
    with pytest.raises(ConfigError) as caught:
        load(Path("nowhere.yml"))
    prose(caught)
    assert place_of(caught).endswith("nowhere.yml")


def test_a_repeated_key_is_reported_with_both_lines(write: Write):
    loaded = load(write("a:\n  b: 1\n  c: 2\n  b: 3\n"))
    assert [str(p) for p in loaded.problems] == [
        "a.yml:4: a.b: written twice, on lines 2 and 4; keep one of them"
    ]


def test_anchors_and_merge_keys(write: Write):
    file = write("base_llm: &b\n  x: 1\n  y: 2\nother:\n  <<: *b\n  y: 3\n")
    loaded = load(file)
    assert loaded.data["other"] == {"x": 1, "y": 3}
    assert loaded.problems == []
    assert loaded.places["other", "y"] == Place("a.yml", 6)


def nested_aliases(first: str, block: str) -> str:
    """Eight blocks, each with ten aliases to the one before it."""
    lines = [f"k0: &k0 {first}"]
    for i in range(1, 9):
        lines.append(f"k{i}: &k{i} {block % ', '.join([f'*k{i - 1}'] * 10)}")
    return "\n".join(lines)


def test_aliases_that_multiply_are_refused(prose: Prose, write: Write):
    with pytest.raises(ConfigError) as error:
        load(write(nested_aliases("[x]", "[%s]")))
    # k1 to k3 repeat 20 + 220 + 2,220 values, k4 22,220; k5 would repeat 222,220.
    prose(error)
    assert place_of(error) == "a.yml:6"
    document = nested_aliases("{x: 1}", "{<<: [%s]}")
    assert load(write(document)).data == {f"k{i}": {"x": 1} for i in range(9)}


def test_a_document_nested_too_deeply_is_refused(prose: Prose, write: Write):
    with pytest.raises(ConfigError) as caught:
        load(write("a: " + "[" * 2000 + "]" * 2000))
    prose(caught)
    assert place_of(caught).endswith("a.yml")


# ---- the environment --------------------------------------------------------------------------


def test_variables_and_defaults(write: Write, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOST", "example.org")
    monkeypatch.setenv("EMPTY", "")
    monkeypatch.delenv("UNSET", raising=False)
    file = write("""
        url: http://${HOST}:8000/v1
        default: ${UNSET:-http://localhost:8000/v1 # not a comment}
        empty: [${EMPTY:-full}, "${EMPTY:-}", 'a${EMPTY}', '${HOST}']
        literal: $${HOST} $HOST ${not a variable}
        ${HOST}: key
        # ${UNSET} in a comment is nobody's
        """)
    assert load(file).data == {
        "url": "http://example.org:8000/v1",
        "default": "http://localhost:8000/v1 # not a comment",
        "empty": ["full", "", "a", "example.org"],
        "literal": "${HOST} $HOST ${not a variable}",
        "example.org": "key",
    }


def test_an_unset_or_empty_variable_is_a_problem_and_not_an_empty_value(
    write: Write, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("TRAINING_API_KEY", raising=False)
    monkeypatch.setenv("EMPTY", "")
    file = write("a:\n  api_key: ${TRAINING_API_KEY}\n  base_url: ${EMPTY}\n  model: '${EMPTY}'\n")
    empty = "${EMPTY} is empty in the environment; give it a value, or write ${EMPTY:-DEFAULT}"
    assert [str(p) for p in load(file).problems] == [
        "a.yml:2: a.api_key: ${TRAINING_API_KEY} is not set in the environment; set it, or write "
        "${TRAINING_API_KEY:-DEFAULT}",
        f"a.yml:3: a.base_url: {empty}",
        f"a.yml:4: a.model: {empty}",
    ]


def test_text_of_the_environment_is_kept_for_the_schema_to_type(
    write: Write, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PORT", "0123")
    loaded = load(write("plain: ${PORT}\nquoted: '${PORT}'\n"))
    assert loaded.data == {"plain": "0123", "quoted": "0123"}
    assert loaded.untyped == {("plain",): "0123"}
    loaded = load(write("a: &a {port: '${PORT}', x: ${PORT}}\nb: {<<: *a, x: 5}\n"))
    assert loaded.untyped == {("a", "x"): "0123"}  # b.x is the number of this file


# ---- other files ------------------------------------------------------------------------------


def test_base_has_lower_precedence_and_blocks_are_merged(write: Write):
    write("a: {x: 1, y: [1, 2]}\nb: 1\n", "lib/deepest.yml")
    write("base: deepest.yml\na:\n  x: 2\n  z: 0\n", "lib/base.yml")
    file = write("base: lib/base.yml\na:\n  y: [3]\nc: 1\n")
    loaded = load(file)
    assert loaded.data == {"a": {"x": 2, "y": [3], "z": 0}, "b": 1, "c": 1}
    assert loaded.places["a", "x"] == Place("lib/base.yml", 3)
    assert loaded.places["a", "y", 0] == Place("a.yml", 3)
    assert loaded.places["b",] == Place("lib/deepest.yml", 2)
    assert ("a", "y", 1) not in loaded.places  # replaced with its list


def test_bases_in_a_circle_are_named(prose: Prose, write: Write):
    write("base: a.yml\n", "b.yml")
    with pytest.raises(ConfigError) as caught:
        load(write("base: b.yml\n"))
    prose(caught)


def test_a_missing_base(prose: Prose, write: Write):
    with pytest.raises(ConfigError) as error:
        load(write("a: 1\nbase: b.yml\n"))
    prose(error)
    assert place_of(error) == "a.yml:2"
    with pytest.raises(ConfigError) as caught:
        load(write("base: [b.yml]\n"))
    prose(caught)
    assert place_of(caught).endswith("a.yml:1")


def test_file_is_replaced_by_the_text_of_the_file(write: Write):
    write("You play\ntic-tac-toe.\n", "conf/prompts/system.md")
    file = write("prompt: file://prompts/system.md\n", "conf/a.yml")
    assert load(file).data == {"prompt": "You play\ntic-tac-toe.\n"}


def test_all_files_that_cannot_be_read_are_reported(write: Write):
    loaded = load(write("a: file://nowhere.md\nb: file://data.json\n"))
    assert [str(p) for p in loaded.problems] == [
        "a.yml:1: a: 'file://nowhere.md' cannot be read from .: No such file or directory",
        "a.yml:2: b: 'file://data.json' is not a text file that hone reads; it may end in .txt, .md, .j2, "
        ".jinja2, .jinja, .prompt, .tpl or .template",
    ]


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-6", 1e-06), ("7", 7), ("true", True), ("null", None), ("a: b", "a: b"), ("", None)],
)
def test_one_scalar(text: str, value: object):
    assert parsed(text) == value and type(parsed(text)) is type(value)
