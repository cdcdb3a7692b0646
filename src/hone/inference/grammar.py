"""Grammars: which tokens may come next in an answer, given a constraint and a tokenizer.

In:   a Constraint; the tokenizer, and the size of the model's vocabulary
Out:  a Matcher for every sample: a mask over the vocabulary for each token

The library llguidance computes the masks. A constraint is compiled once and copied for every
sample. Constraints come from clients, so each is first checked in a separate process that may crash
or be killed (grammar_check.py).
"""

import asyncio
import json
import signal
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

import llguidance
import numpy as np
from numpy.typing import NDArray

from hone.errors import EngineError, GrammarError
from hone.inference.background import run_in_background
from hone.inference.base import Constraint, Sampling
from hone.inference.grammar_check import compile_grammar, make_tokenizer

CACHED = 64
"""Compiled constraints that are kept for each tokenizer."""
DEADLINE_S = 5.0
"""Maximum CPU time in seconds for checking one constraint."""
STALLED_S = 60.0
"""Timeout for a reply of the checking process, which may have to start first on a busy machine."""
ENDING_S = 5.0
"""Timeout for a process to end after it has closed its output."""
MESSAGE_CHARACTERS = 600


class Matcher:
    """Follows one answer and says which tokens it may continue with."""

    def __init__(
        self, matcher: llguidance.LLMatcher, *, vocab: int, end: int, stop_ids: Sequence[int]
    ) -> None:
        self._matcher = matcher
        self._vocab = vocab
        self._end = end
        self._stop_ids = [token for token in stop_ids if token < vocab]
        self._lost = False
        self.error = ""
        """Why the answer cannot continue; empty while it can."""

    def allowed(self) -> NDArray[np.bool_]:
        """A mask [vocab]; at least one token is allowed."""
        mask = np.zeros(self._vocab, dtype=np.bool_)
        if not self._matcher.is_stopped():
            packed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
            bits = np.unpackbits(packed, bitorder="little")[: self._vocab]
            mask[: len(bits)] = bits
            if mask[self._end]:
                mask[self._stop_ids] = True
        self.error = self._matcher.get_error()
        if self._matcher.is_stopped() or not mask.any():
            # The text is complete. The end of the turn comes first among the ids that end it.
            mask[:] = False
            mask[self._stop_ids[0] if self._stop_ids else self._end] = True
        return mask

    def accept(self, token: int) -> None:
        """Follow a drawn token that does not end the answer."""
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token)
            self.error = self._matcher.get_error()

    def follow(self, ids: Sequence[int]) -> list[bool | None]:
        """For tokens that another engine sampled: whether each was the only one allowed.

        None from the first token on that this matcher does not allow: it cannot follow the answer
        any further.
        """
        alone: list[bool | None] = []
        for token in ids:
            if self._lost or not (allowed := self.allowed())[token]:
                self._lost = True
                break
            alone.append(bool(np.count_nonzero(allowed) == 1))
            if not self.ends(token):
                self.accept(token)
        return alone + [None] * (len(ids) - len(alone))

    def ends(self, token: int) -> bool:
        return token == self._end


class Grammars:
    """Compiles constraints for one tokenizer. Thread-safe and blocking."""

    def __init__(
        self, load_tokenizer: Callable[[], Any], vocab: int, *, deadline_s: float = DEADLINE_S
    ) -> None:
        """The tokenizer is loaded with the first constraint; `deadline_s` bounds each check."""
        self._deadline_s = deadline_s
        self._load_tokenizer = load_tokenizer
        self._vocab = vocab
        self._checker = _Checker()
        self._compiled: OrderedDict[Constraint, llguidance.LLMatcher | str] = OrderedDict()
        """Matchers at the beginning of an answer, or what is wrong with the constraint."""
        self._spec: dict[str, Any] | None = None
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._lock = threading.Lock()
        self._compiling = threading.Lock()
        self._closed = False
        # One thread for what is not compiled yet: a request that is cancelled leaves the queue.
        self._queue = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hone-grammar")

    def start(
        self, constraint: Constraint, count: int, stop_ids: Sequence[int]
    ) -> Future[list[Matcher]]:
        """`matchers` on another thread; a known constraint does not wait for the check of others."""
        make = partial(self.matchers, constraint, count, stop_ids)
        if self._closed or self._cached(constraint) is not None:
            return run_in_background(make)
        return self._queue.submit(make)

    def matchers(
        self, constraint: Constraint, count: int, stop_ids: Sequence[int] = ()
    ) -> list[Matcher]:
        """Matchers at the beginning of an answer. Raises GrammarError."""
        compiled = self._compile(constraint)
        end = self._tokenizer_spec()["end"]
        return [
            Matcher(compiled.deep_copy(), vocab=self._vocab, end=end, stop_ids=stop_ids)
            for _ in range(count)
        ]

    def close(self) -> None:
        """Stop the running check; requests that wait for it get an error."""
        self._closed = True
        self._queue.shutdown(wait=False)
        self._checker.close()

    def _compile(self, constraint: Constraint) -> llguidance.LLMatcher:
        compiled = self._cached(constraint)
        if compiled is None:
            # One at a time: many rollouts begin with the same constraint at the same moment.
            with self._compiling:
                compiled = self._cached(constraint) or self._new(constraint)
                with self._lock:
                    self._compiled[constraint] = compiled
                    if len(self._compiled) > CACHED:
                        self._compiled.popitem(last=False)
        if isinstance(compiled, str):
            raise GrammarError(compiled)
        return compiled

    def _cached(self, constraint: Constraint) -> llguidance.LLMatcher | str | None:
        with self._lock:
            if constraint in self._compiled:
                self._compiled.move_to_end(constraint)
            return self._compiled.get(constraint)

    def _new(self, constraint: Constraint) -> llguidance.LLMatcher | str:
        if self._closed:
            raise EngineError("the engine was closed; the request was not finished")
        spec, source = self._tokenizer_spec(), _source(constraint)
        if wrong := self._checker.check(spec, source):
            return f"{_NAMES[constraint.kind]} cannot constrain the answer: {_shortened(wrong)}"
        if self._tokenizer is None:
            self._tokenizer = make_tokenizer(spec)
        return compile_grammar(self._tokenizer, source)

    def _tokenizer_spec(self) -> dict[str, Any]:
        if self._spec is None:
            tokenizer = self._load_tokenizer()
            backend = getattr(tokenizer, "backend_tokenizer", None)
            if backend is None or tokenizer.eos_token_id is None:
                raise GrammarError(
                    "answers of this model cannot be constrained: its tokenizer has no end token, "
                    "or is not one of the library tokenizers"
                )
            plain = json.loads(backend.to_str())
            plain.update(truncation=None, padding=None)
            self._spec = {
                "json": json.dumps(plain),
                "vocab": max(self._vocab, len(tokenizer)),
                "end": tokenizer.eos_token_id,
                "deadline_s": self._deadline_s,
            }
        return self._spec


async def start_matchers(
    grammars: Grammars | None, sampling: Sampling, count: int
) -> list[Matcher] | None:
    """Matchers for `count` answers, compiled off the event loop; None without a constraint."""
    constraint = sampling.constraint
    if constraint is None:
        return None
    if grammars is None:
        raise GrammarError("constraints need an engine that has a tokenizer")
    return await asyncio.wrap_future(grammars.start(constraint, count, sampling.stop_ids))


class _Checker:
    """The process of grammar_check.py, started again whenever a grammar has ended it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def check(self, tokenizer: dict[str, Any], source: str) -> str:
        """What is wrong with a grammar; empty if nothing is.

        Raises EngineError if the process ended for another reason than the grammar.
        """
        process = self._started(tokenizer)
        assert process.stdin is not None and process.stdout is not None
        stalled = threading.Timer(STALLED_S, process.kill)
        stalled.start()
        try:
            process.stdin.write(json.dumps(source) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:
            line = ""
        finally:
            stalled.cancel()
        if line.endswith("\n"):
            return json.loads(line)
        with suppress(subprocess.TimeoutExpired):
            process.wait(ENDING_S)
        self.close()
        if process.returncode == -signal.SIGPROF:
            return f"it takes more than {tokenizer['deadline_s']:g} s to compile; simplify it"
        if process.returncode in _CRASHES:
            return "it is nested too deeply, or needs too much memory; simplify it"
        raise EngineError(
            f"the check of a constraint was not finished: its process ended with status "
            f"{process.returncode}. Send the request again."
        )

    def _started(self, tokenizer: dict[str, Any]) -> "subprocess.Popen[str]":
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "hone.inference.grammar_check"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(tokenizer) + "\n")
        return self._process

    def close(self) -> None:
        """End the process; a later check starts another."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


_CRASHES = {-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS}
"""Exit statuses that a grammar can cause. SIGKILL is not one of them: the kernel's OOM killer sends it,
whichever process used the memory."""
_NAMES = {"json_schema": "this JSON schema", "regex": "this regex", "grammar": "this grammar"}


def _source(constraint: Constraint) -> str:
    if constraint.kind == "json_schema":
        return llguidance.LLMatcher.grammar_from_json_schema(constraint.text)
    if constraint.kind == "regex":
        return llguidance.LLMatcher.grammar_from_regex(constraint.text)
    return llguidance.LLMatcher.grammar_from_lark(constraint.text)


def _shortened(message: str) -> str:
    """An error of llguidance, without the state of its parser."""
    text = message.partition("\n<")[0].strip()
    if text.startswith("NoExtension"):
        return "no text that the model can write matches it"
    return text if len(text) <= MESSAGE_CHARACTERS else text[: MESSAGE_CHARACTERS - 3] + "..."
