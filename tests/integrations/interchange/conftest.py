"""A real server, as the tests of finetuning use it."""

from tests.finetune.conftest import server

__all__ = ["server"]
