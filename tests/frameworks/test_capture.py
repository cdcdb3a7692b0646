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
    ways = (*CaptureConformance.ways, "litellm", "litellm-stream")


class TestLlamaIndex(CaptureConformance):
    client = "llama_index"


class TestLiteLLM(CaptureConformance):
    """ADK's tests call it too."""

    client = "litellm"
    usual = False


class TestOpenAIAgents(CaptureConformance):
    """Its agents have no streams for plain functions."""

    client, environment = "openai_agents", "b"
    ways = (
        *("async", "sync", "async-stream", "chat", "chat-stream"),
        *("sync-executor", "async-url"),
    )
    trained = ("sync", "async-stream")


class TestPydanticAI(CaptureConformance):
    client, environment = "pydantic_ai", "b"
    ways = (*CaptureConformance.ways, "chat", "chat-stream")


class TestAnthropic(CaptureConformance):
    client, environment = "anthropic", "b"
