"""Import every module that registers a component; the entry point names this one."""

from hone_test_plugin import adapter, builder, reward, trainer, workflow

__all__ = ["adapter", "builder", "reward", "trainer", "workflow"]
