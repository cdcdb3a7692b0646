"""How long a test waits for something that must happen."""

PATIENCE_S = 300
"""Ends a test that hangs, with a message of its own; pytest's `timeout` is the second limit. Far more
than anything here takes: a busy machine can be ten times as slow."""
