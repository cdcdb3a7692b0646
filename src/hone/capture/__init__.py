"""Capture every model call that the agent makes."""
