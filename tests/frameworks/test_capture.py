"""Each framework's calls are recorded to the token, however it makes them."""

from tests.conformance.capture import CaptureConformance


class TestOpenAI(CaptureConformance):
    client = "openai"


class TestOpenAI3(TestOpenAI):
    environment = "b"


class TestLangGraph(CaptureConformance):
    client = "langgraph"


class TestADK(CaptureConformance):
    client = "adk"


class TestLlamaIndex(CaptureConformance):
    client = "llama_index"


class TestLiteLLM(CaptureConformance):
    client = "litellm"
