"""Workflows that are agents of LangGraph, Google ADK and LlamaIndex."""
