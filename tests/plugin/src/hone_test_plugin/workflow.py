"""`_type: my_workflow`: a question in, the model's answer out."""

from collections.abc import AsyncIterator, Awaitable, Callable

from hone.config.build import Builder
from hone.config.registry import FunctionBaseConfig, LLMRef, register_function


class MyWorkflowConfig(FunctionBaseConfig, name="my_workflow"):
    """Asks a model once."""

    llm: LLMRef
    """A key of `llms`."""
    system_prompt: str | None = None
    """Said before the question."""
    max_tokens: int = 32
    """Of one answer."""


@register_function(config_type=MyWorkflowConfig)
async def my_workflow(
    config: MyWorkflowConfig, builder: Builder
) -> AsyncIterator[Callable[[str], Awaitable[str]]]:
    """Asks a model once."""
    llm = await builder.get_llm(config.llm)

    async def answer(question: str) -> str:
        """Answers a question."""
        messages = [{"role": "user", "content": question}]
        if config.system_prompt is not None:
            messages.insert(0, {"role": "system", "content": config.system_prompt})
        reply = await llm.chat(messages, max_tokens=config.max_tokens)
        return reply.choices[0].message.content or ""

    yield answer
