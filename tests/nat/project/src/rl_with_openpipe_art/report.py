"""A workflow of two functions and a tool: `write_report` calls `draft`, `count_words` and `check`."""
# pyright: reportMissingImports=false, reportGeneralTypeIssues=false, reportCallIssue=false

import os

from nat.builder.builder import Builder
from nat.builder.framework_enum import LLMFrameworkEnum
from nat.builder.function_info import FunctionInfo
from nat.cli.register_workflow import register_function
from nat.data_models.component_ref import FunctionRef, LLMRef
from nat.data_models.function import FunctionBaseConfig

LANGCHAIN = LLMFrameworkEnum.LANGCHAIN


def log(line: str) -> None:
    """The order in which components are built and closed, for the test."""
    if file := os.environ.get("REPORT_LOG"):
        with open(file, "a") as opened:
            opened.write(line + "\n")


class AskConfig(FunctionBaseConfig, name="ask"):
    """Asks a model to do something with a text."""

    llm: LLMRef
    task: str


@register_function(config_type=AskConfig, framework_wrappers=[LANGCHAIN])
async def ask(config: AskConfig, builder: Builder):
    model = await builder.get_llm(config.llm, wrapper_type=LANGCHAIN)
    log(f"build {config.task}")

    async def answer(text: str) -> str:
        return str((await model.ainvoke(f"{config.task}: {text}")).content)

    yield FunctionInfo.from_fn(answer, description=config.task)
    log(f"close {config.task}")


class CountWordsConfig(FunctionBaseConfig, name="count_words"):
    """Counts words."""


@register_function(config_type=CountWordsConfig)
async def count_words(config: CountWordsConfig, builder: Builder):
    async def count(text: str) -> str:
        return str(len(text.split()))

    yield FunctionInfo.from_fn(count, description="Counts the words of a text.")


class WriteReportConfig(FunctionBaseConfig, name="write_report"):
    """Drafts a report, counts its words, and checks it."""

    draft: FunctionRef
    check: FunctionRef
    tools: list[FunctionRef]


@register_function(config_type=WriteReportConfig, framework_wrappers=[LANGCHAIN])
async def write_report(config: WriteReportConfig, builder: Builder):
    draft, check = [await builder.get_function(name) for name in (config.draft, config.check)]
    [count] = await builder.get_tools(config.tools, wrapper_type=LANGCHAIN)
    log("build workflow")

    async def write(input_message: str) -> str:  # the name that `nat eval --endpoint` sends
        text = await draft.ainvoke(input_message, to_type=str)
        words = await count.ainvoke({"text": text})
        verdict = await check.ainvoke(text, to_type=str)
        return f"{words} words: {verdict}"

    yield FunctionInfo.from_fn(write, description="Writes a report.")
    log("close workflow")
