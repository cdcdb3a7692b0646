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


class TestAgentFramework(CaptureConformance):
    """Its agents are coroutines."""

    client, environment = "agent_framework", "b"
    ways = ("async", "async-stream", "chat", "chat-stream", "named", "async-url")
    trained, named = ("async", "async-stream"), ("named",)


class TestAgno(CaptureConformance):
    client, environment = "agno", "b"
    ways, named = (*CaptureConformance.ways, "named"), ("named",)


class TestSmolagents(CaptureConformance):
    """Its agents are plain functions, which send tool calls and results back as text."""

    client, environment = "smolagents", "b"
    ways = ("sync", "sync-stream", "named", "sync-executor", "sync-url")
    trained, named = ("sync", "sync-stream"), ("named",)
    continued = (None, None, None)


class TestStrands(CaptureConformance):
    """It streams unless told otherwise."""

    client, environment = "strands", "c"
    ways = (
        *("async-stream", "sync-stream", "events-stream", "async", "sync", "named"),
        *("sync-stream-executor", "async-stream-url"),
    )
    named = ("named",)


class TestDSPy(CaptureConformance):
    """Its prompts are single questions: they hold earlier answers as text."""

    client, environment = "dspy", "c"
    ways = ("async", "sync", "named", "sync-executor", "async-url")
    trained, named = ("async", "sync"), ("named",)
    continued, retries_above = (None, None, None), True


class TestCrewAI(CaptureConformance):
    """It does not send back the text beside a tool call, so the third prompt continues the first."""

    client, environment = "crewai", "d"
    ways, named = (*CaptureConformance.ways, "named"), ("named",)
    continued = (None, 0, 0)
