"""Servers as the tests of the server and of finetuning start them."""

from tests.finetune.conftest import server
from tests.server.conftest import make_server, make_state, tokenizer

__all__ = ["make_server", "make_state", "server", "tokenizer"]
