"""Backends: servers that serve and train models."""
