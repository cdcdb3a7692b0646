"""Servers as the tests of the server and of finetuning start them."""

from tests.finetune.conftest import server, tiny_model
from tests.server.conftest import make_server, make_state, tokenizer

__all__ = ["make_server", "make_state", "server", "tiny_model", "tokenizer"]
