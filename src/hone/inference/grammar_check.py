"""Check constraints in a separate process, so that a bad one crashes only this process.

In:   lines of JSON on stdin: first the tokenizer and the deadline, then one grammar per line
Out:  a line of JSON for each: what is wrong with it, or nothing

llguidance 1.9 limits the size of a grammar, but a few lines of Lark can still overflow the stack,
and a JSON schema with a dozen patterns in one `allOf` takes minutes. A thread cannot be stopped in
either case. A process can: a timer or a crash ends it, and the reader sees the end of the file. Its
stack is smaller than that of the server's threads, so what passes here is safe there.
"""

import json
import os
import random
import resource
import signal
import sys
import threading
from contextlib import suppress
from typing import Any

import llguidance

MEMORY_BYTES = 4 << 30
STACK_BYTES = 2 << 20
STEPS = 32
"""Number of tokens of a random answer that the check follows."""
_BITS = [[bit for bit in range(8) if byte >> bit & 1] for byte in range(256)]


def make_tokenizer(spec: dict[str, Any]) -> llguidance.LLTokenizer:
    """`spec` holds the tokenizer's JSON, the size of the vocabulary and the end token."""
    return llguidance.LLTokenizer(spec["json"], n_vocab=spec["vocab"], eos_token=spec["end"])


def compile_grammar(tokenizer: llguidance.LLTokenizer, source: str) -> llguidance.LLMatcher:
    """A matcher at the beginning of an answer. It never raises; it may be in an error state."""
    limits = llguidance.LLParserLimits(verbose_errors=False)
    return llguidance.LLMatcher(tokenizer, source, log_level=0, limits=limits)


def check(tokenizer: llguidance.LLTokenizer, source: str) -> str:
    """What is wrong with a grammar; empty if nothing is."""
    matcher = compile_grammar(tokenizer, source)
    mask = matcher.compute_bitmask()
    error = matcher.get_error()
    choose = random.Random(0)
    for _ in range(STEPS):  # later tokens can overflow the stack too
        allowed = [8 * i + bit for i, byte in enumerate(mask) for bit in _BITS[byte]]
        if matcher.is_stopped() or not allowed or not matcher.consume_token(choose.choice(allowed)):
            break
        mask = matcher.compute_bitmask()
    return error


def _answer_lines() -> None:
    spec = json.loads(sys.stdin.readline())
    tokenizer = make_tokenizer(spec)
    for line in sys.stdin:
        # Nothing handles SIGPROF: it ends the process. CPU time: the machine may be busy.
        signal.setitimer(signal.ITIMER_PROF, spec["deadline_s"])
        try:
            error = check(tokenizer, json.loads(line))
        except MemoryError:
            os.abort()
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(json.dumps(error) + "\n")
        sys.stdout.flush()


def main() -> None:
    for limit, value in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_AS, MEMORY_BYTES)):
        with suppress(OSError, ValueError):  # not available on every system
            resource.setrlimit(limit, (value, value))
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_answer_lines)
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
