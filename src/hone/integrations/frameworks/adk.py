"""`_type: adk`: a Google ADK agent as the workflow.

In:   `target: module:agent`: an agent, an App, a Runner, or a function that returns one
Out:  a FunctionInfo that sends one input in a new session and returns the text of the final response

The recipe:

    def agent(llm):
        model = OpenAILlm(model=llm.model, base_url=llm.base_url, api_key=llm.api_key)
        return LlmAgent(name="helper", model=model, instruction="...", tools=[search])

Calls carry the names of the agents from the root to the one that calls: `<workflow>.helper`, or
`<workflow>.helper.researcher` for its sub-agent. A plugin of the runner records which agent calls
the model; it changes nothing else.
"""
# Installed with its extra only.
# pyright: reportMissingImports=false

from collections.abc import AsyncIterator
from contextvars import ContextVar
from typing import Any

from pydantic import Field

from hone.capture.scope import called_by
from hone.config.build import Builder
from hone.config.registry import register_function
from hone.errors import PolicyFailure
from hone.workflow.fit import as_text
from hone.workflow.framework import Agents, FrameworkConfig, require, run_name
from hone.workflow.function import FunctionInfo

NAME = "hone"
"""Name of the app, the user and the plugin."""

_agent: ContextVar[str] = ContextVar("hone_adk_agent", default="")
"""Path of the agent that calls the model."""


class AdkConfig(FrameworkConfig, name="adk"):
    """A Google ADK agent, with a new session per rollout."""

    max_llm_calls: int | None = Field(default=None, gt=0)
    """Maximum number of model calls per rollout; ADK's default if not set. A rollout that reaches it
    is a policy failure (`step_limit`)."""
    state: dict[str, Any] = Field(default_factory=dict)
    """State of a new session."""


@register_function(config_type=AdkConfig)
async def adk(config: AdkConfig, builder: Builder) -> AsyncIterator[FunctionInfo]:
    """A Google ADK agent."""
    require("google.adk", "adk")
    from google.adk.agents import BaseAgent
    from google.adk.agents.invocation_context import LlmCallsLimitExceededError
    from google.adk.agents.run_config import RunConfig
    from google.adk.apps import App
    from google.adk.runners import Runner
    from google.genai import types

    agents = await Agents.load(
        config,
        builder,
        is_agent=lambda target: isinstance(target, BaseAgent | App | Runner),
        kind="an agent, an App or a Runner of google.adk",
        prepare=_runner,
    )
    limits = {} if config.max_llm_calls is None else {"max_llm_calls": config.max_llm_calls}

    async def run(input: Any) -> str:
        """Sends one input to the agent, in a new session."""
        runner, is_ours = await agents.get()
        sessions = runner.session_service
        place = {"app_name": runner.app_name, "user_id": NAME, "session_id": run_name()}
        message = types.Content(role="user", parts=[types.Part(text=as_text(input))])
        output = ""
        try:
            await sessions.create_session(**place, state=dict(config.state))
            with called_by(_agent.get):
                async for event in runner.run_async(
                    user_id=NAME,
                    session_id=place["session_id"],
                    new_message=message,
                    run_config=RunConfig(**limits),
                ):
                    if event.is_final_response():
                        output = _text(event) or output
        except LlmCallsLimitExceededError as error:
            raise PolicyFailure(str(error), reason="step_limit") from error
        finally:
            try:
                await sessions.delete_session(**place)
            finally:
                if is_ours and config.per_rollout:
                    await runner.close()  # and the agent's tools
        return output

    yield FunctionInfo.from_fn(run, description=config.description)
    if not config.per_rollout:
        runner, is_ours = await agents.get()
        if is_ours:
            await runner.close()


def _runner(agent: Any) -> tuple[Any, bool]:
    """A runner for the agent, with the plugin that names the agent of each call.

    Also returns whether it was created here and must be closed here.
    """
    from google.adk.apps import App
    from google.adk.runners import InMemoryRunner, Runner

    runner = agent
    if isinstance(agent, App):
        runner = InMemoryRunner(app=agent)
    elif not isinstance(agent, Runner):
        runner = InMemoryRunner(agent=agent, app_name=NAME)
    if runner.plugin_manager.get_plugin(NAME) is None:
        runner.plugin_manager.register_plugin(_plugin())
    return runner, runner is not agent


def _plugin() -> Any:
    from google.adk.plugins.base_plugin import BasePlugin

    class AgentNames(BasePlugin):
        """Records which agent is about to call the model."""

        async def before_model_callback(self, *, callback_context: Any, llm_request: Any) -> None:
            # Awaited in the task that sends the request, so the request sees the value.
            _agent.set(_path(callback_context))

    return AgentNames(name=NAME)


def _path(context: Any) -> str:
    """Names from the root agent to the one that runs."""
    names: list[str] = []
    agent = getattr(getattr(context, "_invocation_context", None), "agent", None)
    while agent is not None and len(names) < 20:
        names.insert(0, agent.name)
        agent = agent.parent_agent
    return ".".join(names) or context.agent_name


def _text(event: Any) -> str:
    parts = (event.content.parts or []) if event.content else []
    return "".join(part.text for part in parts if part.text and not part.thought)
