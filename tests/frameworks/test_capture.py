"""Each framework's calls are recorded to the token, however it makes them."""

from tests.conformance.capture import CaptureConformance


class TestOpenAI(CaptureConformance):
    client = "openai"


class TestLangGraph(CaptureConformance):
    client = "langgraph"
