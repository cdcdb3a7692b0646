"""The clerk of 04_langgraph as a LlamaIndex agent.

In:   a customer's question
Out:  the clerk's answer

There is no training code here. `llm` is the model in training; in production, give OpenAILike your
own address.
"""
# pyright: reportMissingImports=false

import sys
from pathlib import Path
from typing import Any

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.llms.openai_like import OpenAILike

sys.path.append(str(Path(__file__).parents[1] / "04_langgraph"))
from shop import INSTRUCTIONS, price, stock


def agent(llm: Any) -> FunctionAgent:
    """An agent with two tools; its first answer has to be a tool call."""
    model = OpenAILike(
        api_base=llm.base_url,
        api_key=llm.api_key,
        model=llm.model,
        is_chat_model=True,
        is_function_calling_model=True,
        **llm.params,
    )
    return FunctionAgent(
        name="clerk",
        llm=model,
        tools=[price, stock],
        system_prompt=INSTRUCTIONS,
        initial_tool_choice="required",  # an untrained small model would not call a tool
    )
