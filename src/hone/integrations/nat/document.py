"""Convert a Document of hone to a Config of NeMo Agent Toolkit.

In:   the Document; the Builder, for the address and the name of each model
Out:  a Config with the blocks that the toolkit builds; models at the training server send the name
      that the run gives them, whatever the YAML says

A function of hone that a block of the toolkit may name becomes one of the toolkit's functions.
"""
# Installed with its extra only.
# pyright: reportMissingImports=false, reportGeneralTypeIssues=false, reportCallIssue=false

import inspect
from collections.abc import AsyncIterator, Mapping
from typing import Any

from nat.builder.builder import Builder as ToolkitBuilder
from nat.builder.function_info import FunctionInfo
from nat.cli.register_workflow import register_function
from nat.data_models.config import Config
from nat.data_models.function import FunctionBaseConfig
from pydantic import Field

from hone.config import registry
from hone.config.base import ComponentConfig
from hone.config.build import Builder
from hone.config.registry import type_key
from hone.config.schema import Document
from hone.workflow.fit import as_text
from hone.workflow.llm import dialled

SECTIONS = (
    *("general", "function_groups", "middleware", "embedders", "retrievers", "memory"),
    *("object_stores", "authentication", "ttc_strategies", "optimizer"),
)
"""Sections that only the toolkit reads."""


def check_section(name: str, value: Any) -> None:
    """Raise pydantic's ValidationError for a section that the toolkit does not accept."""
    Config.model_validate({name: value})


async def toolkit_config(builder: Builder) -> Config:
    """The toolkit's part of the document."""
    document = builder.document
    data, general = document.loaded.data, document.eval.general
    blocks: dict[str, Any] = {name: data[name] for name in SECTIONS if data.get(name)}
    blocks["llms"] = {key: await _llm_block(key, builder) for key in document.llms}
    blocks["eval"] = {
        "general": {
            "max_concurrency": builder.get_max_concurrency(),
            "output_dir": str(general.output_dir),
        },
        "evaluators": {
            key: data["eval"]["evaluators"][key]
            for key, config in document.eval.evaluators.items()
            if is_toolkit("evaluator", config)
        },
    }
    blocks["functions"] = {}
    if builder.runs_workflow:
        blocks["functions"] = {
            key: data["functions"][key]
            for key, config in document.functions.items()
            if is_toolkit("function", config)
        }
        if document.workflow is not None and is_toolkit("function", document.workflow):
            blocks["workflow"] = data["workflow"]
    while missing := _missing_functions(document, blocks):
        for key in missing:
            blocks["functions"][key] = await _function_block(key, builder)
    return Config.model_validate(blocks)


def is_toolkit(kind: str, config: ComponentConfig) -> bool:
    """Whether NeMo Agent Toolkit builds this component."""
    component = registry.find(kind, config.type_name)
    return component is not None and component.toolkit_type is not None


def _missing_functions(document: Document, blocks: Mapping[str, Any]) -> list[str]:
    """Functions that a block may name, and that are not among the blocks yet."""
    mentioned = _texts(blocks)
    return [
        key for key in document.functions if key not in blocks["functions"] and key in mentioned
    ]


async def _function_block(key: str, builder: Builder) -> dict[str, Any]:
    """One entry of `functions`; one of hone becomes one of the toolkit."""
    if is_toolkit("function", builder.document.functions[key]):
        return builder.document.loaded.data["functions"][key]
    return {"_type": HONE_FUNCTION, "function": await builder.get_function(key)}


async def _llm_block(key: str, builder: Builder) -> dict[str, Any]:
    """One entry of `llms`, with the address and the model name that its requests have."""
    config, block = builder.get_llm_config(key), dict(builder.document.loaded.data["llms"][key])
    if not config.has_openai_api:
        return block
    named = {name: value for name, value in block.items() if name != "model"}
    if is_toolkit("llm_provider", config):
        url = dialled(str(block["base_url"]))
        return {**named, "base_url": url, "model_name": builder.get_model_name(key)}
    llm = await builder.get_llm(key)
    named.pop(type_key(block) or "_type")
    if (thinking := named.pop("thinking", None)) is not None:
        # The toolkit knows how to request thinking from some models by name, and refuses other
        # names.
        kwargs = {"enable_thinking": thinking}
        named["extra_body"] = {"chat_template_kwargs": kwargs, **named.get("extra_body", {})}
    address = {"base_url": llm.base_url, "api_key": llm.api_key, "model_name": llm.model}
    return {**named, "_type": "openai", **address}


def _texts(value: Any) -> set[str]:
    """All text in a value."""
    if isinstance(value, str):
        return {value}
    inner = value.values() if isinstance(value, Mapping) else value
    return {t for one in inner for t in _texts(one)} if isinstance(value, Mapping | list) else set()


# ---- functions of hone --------------------------------------------------------------------------

HONE_FUNCTION = "hone_function"


class HoneFunctionConfig(FunctionBaseConfig, name=HONE_FUNCTION):
    """A function of hone, for functions of the toolkit."""

    function: Any = Field(exclude=True, repr=False)


@register_function(config_type=HoneFunctionConfig)
async def _hone_function(
    config: HoneFunctionConfig, builder: ToolkitBuilder
) -> AsyncIterator[FunctionInfo]:
    function = config.function

    name, kind = function.parameter
    kind = function.input_schema or (str if kind is Any else kind)

    async def call(*values: Any, **named: Any) -> str:
        return as_text(await function(*values, *named.values()))

    # The toolkit makes the schema of a tool from the names and annotations of its parameters.
    parameter = inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=kind)
    setattr(call, "__signature__", inspect.Signature([parameter], return_annotation=str))  # noqa: B010
    call.__annotations__ = {name: kind, "return": str}
    yield FunctionInfo.from_fn(call, description=function.description)
