"""smolagents' agent that calls tools, over its OpenAIModel. It has plain functions only."""
# pyright: reportMissingImports=false

import talk
from smolagents import LogLevel, OpenAIModel, ToolCallingAgent, tool
from talk import NAMED, SYSTEM, Report


@tool
def weather(city: str) -> str:
    """Look up the temperature in a city, in degrees Celsius.

    Args:
        city: The city.
    """
    return talk.weather(city)


@tool
def fahrenheit(celsius: int) -> str:
    """Convert degrees Celsius to degrees Fahrenheit.

    Args:
        celsius: The temperature.
    """
    return talk.fahrenheit(celsius)


OPTIONS = {"instructions": SYSTEM, "verbosity_level": LogLevel.OFF}


def answer(question: str, llm) -> str:
    model = OpenAIModel(llm.model, api_base=llm.base_url, api_key=llm.api_key)
    return ToolCallingAgent([weather, fahrenheit], model, **OPTIONS).run(question)


def answer_stream(question: str, llm) -> str:
    model = OpenAIModel(llm.model, api_base=llm.base_url, api_key=llm.api_key)
    agent = ToolCallingAgent([weather, fahrenheit], model, stream_outputs=True, **OPTIONS)
    return agent.run(question)


def answer_named(question: str, llm) -> str:
    options = {"client_kwargs": {"default_headers": NAMED}}
    model = OpenAIModel(llm.model, api_base=llm.base_url, api_key=llm.api_key, **options)
    return ToolCallingAgent([weather, fahrenheit], model, **OPTIONS).run(question)


async def typed(question: str, llm) -> Report:
    model = OpenAIModel(llm.model, api_base=llm.base_url, api_key=llm.api_key)
    schema = {"name": "Report", "schema": Report.model_json_schema(), "strict": True}
    form = {"type": "json_schema", "json_schema": schema}
    message = model.generate([{"role": "user", "content": question}], response_format=form)
    return Report.model_validate_json(message.content)


if __name__ == "__main__":
    talk.main({"sync": answer, "sync-stream": answer_stream, "named": answer_named}, typed)
