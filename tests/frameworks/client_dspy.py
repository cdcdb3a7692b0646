"""DSPy's ReAct, over its LM with the engine `litellm`. It calls tools by text of its own."""
# pyright: reportMissingImports=false

from typing import Literal

import dspy
import litellm
import talk
from talk import NAMED, SYSTEM, TOOLS, Report

SIGNATURE = dspy.Signature("question -> answer", SYSTEM)


async def answer(question: str, llm) -> str:
    address = {"api_base": llm.base_url, "api_key": llm.api_key}
    lm = dspy.LM(f"openai/{llm.model}", engine="litellm", cache=False, **address)
    agent = dspy.ReAct(SIGNATURE, tools=list(TOOLS.values()))
    with dspy.context(lm=lm):
        return (await agent.acall(question=question)).answer


def model(llm, **options) -> dspy.LM:
    address = {"api_base": llm.base_url, "api_key": llm.api_key}
    return dspy.LM(f"openai/{llm.model}", engine="litellm", cache=False, **address, **options)


def answer_sync(question: str, llm) -> str:
    with dspy.context(lm=model(llm)):
        return dspy.ReAct(SIGNATURE, tools=list(TOOLS.values()))(question=question).answer


def answer_named(question: str, llm) -> str:
    with dspy.context(lm=model(llm, extra_headers=NAMED)):
        return dspy.ReAct(SIGNATURE, tools=list(TOOLS.values()))(question=question).answer


class Ask(dspy.Signature):
    """Report the weather."""

    question: str = dspy.InputField()
    city: Literal["Paris", "Rome"] = dspy.OutputField()
    warm: bool = dspy.OutputField()


async def typed(question: str, llm) -> Report:
    # Without an entry in its table of models LiteLLM takes it for one without schemas.
    entry = {"litellm_provider": "openai", "mode": "chat", "supports_response_schema": True}
    litellm.register_model({f"openai/{llm.model}": entry, llm.model: entry})
    with dspy.context(lm=model(llm), adapter=dspy.JSONAdapter()):
        report = await dspy.Predict(Ask).acall(question=question)
    return Report(city=report.city, warm=report.warm)


if __name__ == "__main__":
    talk.main({"async": answer, "sync": answer_sync, "named": answer_named}, typed)
