"""Constraints: masks over a vocabulary, caches, and grammars that must not harm the server."""

import asyncio
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.chat.conftest import build_tokenizer
from tests.patience import PATIENCE_S
from tests.prose import Prose

from hone.errors import EngineError, GrammarError
from hone.inference import grammar
from hone.inference.base import Constraint, Sampling
from hone.inference.grammar import Grammars, Matcher, start_matchers


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return build_tokenizer("qwen2.5-instruct")


@pytest.fixture(scope="module")
def grammars(tokenizer: Any) -> Iterator[Grammars]:
    compiled = Grammars(lambda: tokenizer, 512, deadline_s=1.0)
    yield compiled
    compiled.close()


def follow(matcher: Matcher, ids: list[int]) -> None:
    for token in ids:
        assert matcher.allowed()[token], token
        matcher.accept(token)


def texts(tokenizer: Any, matcher: Matcher) -> set[str]:
    return {tokenizer.decode([i]) for i in np.flatnonzero(matcher.allowed())}


def test_masks_follow_the_answer(grammars: Grammars, tokenizer: Any) -> None:
    (matcher,) = grammars.matchers(Constraint("regex", "a(b|c)?"), 1)
    assert texts(tokenizer, matcher) == {"a"}
    follow(matcher, tokenizer.encode("a"))
    # The text may end here, and every token that ends the answer is allowed.
    assert texts(tokenizer, matcher) == {"b", "c", "<|im_end|>"}
    follow(matcher, tokenizer.encode("b"))
    assert texts(tokenizer, matcher) == {"<|im_end|>"}
    assert matcher.ends(tokenizer.eos_token_id) and not matcher.error


def test_ids_that_end_an_answer_are_allowed_where_the_text_may_end(
    grammars: Grammars, tokenizer: Any
) -> None:
    ends = [tokenizer.convert_tokens_to_ids(end) for end in ("<|endoftext|>", "<|im_end|>")]
    (matcher,) = grammars.matchers(Constraint("regex", "a+"), 1, ends)
    assert not matcher.allowed()[ends].any()
    follow(matcher, tokenizer.encode("a"))
    assert matcher.allowed()[ends].all()
    (matcher,) = grammars.matchers(Constraint("regex", "a"), 1, ends)
    follow(matcher, tokenizer.encode("a"))
    # Nothing can follow: the first of them is the end of the turn.
    assert np.flatnonzero(matcher.allowed()).tolist() == [ends[0]]


def test_the_matchers_of_a_request_share_nothing(grammars: Grammars, tokenizer: Any) -> None:
    one, two = grammars.matchers(Constraint("regex", "(ab|cd)+"), 2)
    follow(one, tokenizer.encode("a"))
    assert texts(tokenizer, one) == {"b"}
    assert texts(tokenizer, two) == {"a", "c"}


@settings(max_examples=30, deadline=None)
@given(value=st.recursive(st.booleans() | st.integers(-9, 9) | st.text("ab\u00e9\n\"\\", max_size=3), lambda v: st.lists(v, max_size=2) | st.dictionaries(st.text("xy", max_size=2), v, max_size=2), max_leaves=5))  # fmt: skip
def test_every_json_object_is_allowed_and_its_end_too(
    grammars: Grammars, tokenizer: Any, value: Any
) -> None:
    (matcher,) = grammars.matchers(Constraint("json_schema", '{"type": "object"}'), 1)
    text = json.dumps({"value": value}, ensure_ascii=False)
    follow(matcher, tokenizer.encode(text))
    assert matcher.allowed()[tokenizer.eos_token_id], text


def test_a_constraint_is_compiled_once(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    compile_grammar = grammar.compile_grammar

    def count(tokenizer: Any, source: str) -> Any:
        compiled.append(source)
        return compile_grammar(tokenizer, source)

    monkeypatch.setattr(grammar, "compile_grammar", count)
    grammars = Grammars(lambda: tokenizer, 512)
    work = [
        threading.Thread(target=lambda: grammars.matchers(Constraint("regex", "ab"), 2))
        for _ in range(4)
    ]
    for thread in work:
        thread.start()
    for thread in work:
        thread.join()
    assert len(compiled) == 1
    for i in range(grammar.CACHED):
        grammars.matchers(Constraint("regex", f"a{{{i}}}"), 1)
    grammars.matchers(Constraint("regex", "ab"), 1)
    assert len(compiled) == grammar.CACHED + 2  # the first was evicted
    grammars.close()


def test_a_crash_of_the_check_is_an_error_and_the_next_check_works(
    prose: Prose, grammars: Grammars
) -> None:
    rules = "\n".join(f'r{i}: "a" r{i + 1}' for i in range(1500))
    deep = Constraint("grammar", f'{rules}\nr1500: "b"\nstart: r0')
    with pytest.raises(GrammarError) as caught:
        grammars.matchers(deep, 1)
    prose(caught)
    assert grammars.matchers(Constraint("regex", "after"), 1)


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_a_check_that_is_killed_or_stopped_does_not_reject_the_constraint(
    prose: Prose, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, sent: signal.Signals
) -> None:
    """The kernel kills it for memory, or the machine is too busy: the next check decides."""
    monkeypatch.setattr(grammar, "STALLED_S", 0.2 if sent == signal.SIGSTOP else 60.0)
    grammars, start = Grammars(lambda: tokenizer, 512), grammar._Checker._started

    def started(self: Any, spec: Any) -> Any:
        process = start(self, spec)
        process.send_signal(sent)
        return process

    with monkeypatch.context() as patch, pytest.raises(EngineError) as caught:
        patch.setattr(grammar._Checker, "_started", started)
        grammars.matchers(Constraint("regex", "fine"), 1)
    prose(caught)
    monkeypatch.setattr(grammar, "STALLED_S", 60.0)
    assert grammars.matchers(Constraint("regex", "fine"), 1)
    grammars.close()


def test_time_in_which_the_check_does_not_run_does_not_count() -> None:
    waits = """
import time
from hone.inference import grammar_check
grammar_check.make_tokenizer = lambda spec: None
grammar_check.check = lambda *_: time.sleep(0.3) or "checked"
grammar_check.main()
"""
    lines = json.dumps({"deadline_s": 0.1}) + '\n"source"\n'
    command = [sys.executable, "-c", waits]
    done = subprocess.run(command, input=lines, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, '"checked"\n')


@pytest.mark.e2e
def test_a_slow_check_does_not_hold_up_what_is_compiled(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = Constraint("regex", "known")
    grammars.matchers(known, 1)
    slow = {"allOf": [{"type": "string", "pattern": f".*a{{{i}}}.*b"} for i in range(40)]}
    errors: list[str] = []
    started = threading.Event()
    check = grammar._Checker.check

    def tell(self: Any, *args: Any) -> str:
        started.set()
        return check(self, *args)

    def compile_slow() -> None:
        try:
            grammars.matchers(Constraint("json_schema", json.dumps(slow)), 1)
        except GrammarError as error:
            errors.append(str(error))

    monkeypatch.setattr(grammar._Checker, "check", tell)
    thread = threading.Thread(target=compile_slow)
    thread.start()
    assert started.wait(PATIENCE_S)
    grammars.matchers(known, 1)
    assert thread.is_alive(), "the slow one had ended already: nothing was shown"
    thread.join()
    assert errors == [
        "this JSON schema cannot constrain the answer: it takes more than 1 s to compile; simplify it"
    ]
    monkeypatch.setattr(grammar._Checker, "check", lambda *_: pytest.fail("it was tried again"))
    with pytest.raises(GrammarError):
        grammars.matchers(Constraint("json_schema", json.dumps(slow)), 1)


async def test_constraints_of_clients_that_left_are_not_checked(
    prose: Prose, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammars = Grammars(lambda: tokenizer, 512)
    checked: list[str] = []
    begun, go_on = threading.Event(), threading.Event()

    def check(self: Any, spec: Any, source: str) -> str:
        checked.append(source)
        begun.set()
        assert go_on.wait(PATIENCE_S)
        return ""

    def ask(regex: str) -> "asyncio.Task[Any]":
        sampling = Sampling(max_tokens=1, constraint=Constraint("regex", regex))
        return asyncio.create_task(start_matchers(grammars, sampling, 1))

    monkeypatch.setattr(grammar._Checker, "check", check)
    left = [ask("first"), *(ask(f"a{i}") for i in range(6))]
    assert await asyncio.to_thread(begun.wait, PATIENCE_S)
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    stayed = ask("stayed")
    await asyncio.sleep(0)  # it is queued
    go_on.set()
    assert await stayed
    assert len(checked) == 2 and "first" in checked[0] and "stayed" in checked[1]
    assert await ask("first")  # known by now
    grammars.close()
    with pytest.raises(EngineError) as caught:
        await ask("another")
    prose(caught)


def test_a_tokenizer_without_an_end_is_refused(prose: Prose) -> None:
    tokenizer = build_tokenizer("qwen2.5-instruct")
    tokenizer.eos_token = None
    with pytest.raises(GrammarError) as caught:
        Grammars(lambda: tokenizer, 512).matchers(Constraint("regex", "a"), 1)
    prose(caught)
