"""The clerk of 04_langgraph as a Google ADK agent.

In:   a customer's question
Out:  the clerk's answer

There is no training code here. `llm` is the model in training; in production, give OpenAILlm your
own address.
"""
# pyright: reportMissingImports=false

import sys
from pathlib import Path
from typing import Any

from google.adk.agents import LlmAgent
from google.adk.agents.callback_context import CallbackContext
from google.adk.integrations.openai import OpenAILlm
from google.adk.models import LlmRequest
from google.genai import types

sys.path.append(str(Path(__file__).parents[1] / "04_langgraph"))
from shop import INSTRUCTIONS, price, stock


def agent(llm: Any) -> LlmAgent:
    """An agent with two tools; its first answer has to be a tool call."""
    return LlmAgent(
        name="clerk",
        model=OpenAILlm(model=llm.model, base_url=llm.base_url, api_key=llm.api_key),
        generate_content_config=types.GenerateContentConfig(
            temperature=llm.params["temperature"], max_output_tokens=llm.params["max_tokens"]
        ),
        instruction=INSTRUCTIONS,
        tools=[price, stock],
        before_model_callback=_limit_calls,
    )


def _limit_calls(context: CallbackContext, request: LlmRequest) -> None:
    # An untrained small model would not call a tool by itself, nor only with the item.
    for tool in request.config.tools or ():
        for function in tool.function_declarations:
            function.parameters_json_schema["additionalProperties"] = False
    if len(request.contents) == 1:
        mode = types.FunctionCallingConfig(mode=types.FunctionCallingConfigMode.ANY)
        request.config.tool_config = types.ToolConfig(function_calling_config=mode)
