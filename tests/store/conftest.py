"""The fixtures of tests/server that the tests of the store use."""

from tests.server.conftest import queue, store, tokenizer

__all__ = ["queue", "store", "tokenizer"]
