"""RULER under ART's names: a judge model scores the trajectories of a group by comparing them.

In:   conversations or a TrajectoryGroup; the judge's name as LiteLLM spells it, and its address
Out:  scores; or a copy of the group with the scores as rewards
"""

import logging
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from hone.errors import ConfigError
from hone.evaluation.ranking import DEFAULT_RUBRIC, TrajectoryScore, rank
from hone.model import TIMEOUT_S
from hone.trajectory import History, MessagesAndChoices, Tools, TrajectoryGroup
from hone.workflow.llm import LLM, MAX_RETRIES

__all__ = ["DEFAULT_RUBRIC", "TrajectoryScore", "judge_of", "ruler", "ruler_score_group"]

log = logging.getLogger("hone")

_PROVIDERS = {
    "openai": ("OPENAI_BASE_URL", "https://api.openai.com/v1", "OPENAI_API_KEY"),
    "hosted_vllm": ("HOSTED_VLLM_API_BASE", "", "HOSTED_VLLM_API_KEY"),
    "openrouter": ("OPENROUTER_API_BASE", "https://openrouter.ai/api/v1", "OPENROUTER_API_KEY"),
    "anthropic": ("ANTHROPIC_API_BASE", "https://api.anthropic.com/v1", "ANTHROPIC_API_KEY"),
    "gemini": (
        "GEMINI_API_BASE",
        "https://generativelanguage.googleapis.com/v1beta/openai",
        "GEMINI_API_KEY",
    ),
}
"""Prefixes of LiteLLM's model names: variable of the address, address, variable of the key."""
_OF_LITELLM = frozenset({"caching", "cache", "drop_params", "custom_llm_provider"})
"""Parameters that configure LiteLLM itself; they are not sent."""


async def ruler(
    message_lists: Sequence[MessagesAndChoices],
    judge_model: str = "openai/o3",
    extra_litellm_params: Mapping[str, Any] | None = None,
    rubric: str = DEFAULT_RUBRIC,
    tools: Tools | None = None,
    *,
    debug: bool = False,
) -> list[TrajectoryScore]:
    """Scores of conversations relative to each other, in the order of the conversations.

    Args:
        message_lists: the conversations; messages, or choices of the OpenAI client.
        judge_model: PROVIDER/NAME as LiteLLM spells it, for openai, hosted_vllm, openrouter,
            anthropic and gemini; or any name, with `api_base` in `extra_litellm_params`.
        extra_litellm_params: `api_base` (or `base_url`), `api_key`, `timeout` and `max_retries` of
            the judge; everything else (`temperature`, ...) is sent with the request.
        rubric: what makes a high score.
        tools: the tools that the agent had.
        debug: log the judge's answer.

    Raises:
        RolloutError: the judge did not score every trajectory, in three attempts.
    """
    histories = [[History(messages_and_choices=list(m)).messages()] for m in message_lists]
    async with judge_of(judge_model, extra_litellm_params) as llm:
        return await rank(llm, histories, rubric=rubric, tools=tools, debug=debug)


async def ruler_score_group(
    group: TrajectoryGroup,
    judge_model: str = "openai/o3",
    extra_litellm_params: Mapping[str, Any] | None = None,
    rubric: str = DEFAULT_RUBRIC,
    *,
    swallow_exceptions: bool = False,
    debug: bool = False,
) -> TrajectoryGroup | None:
    """A copy of the group whose rewards are the judge's scores; everything else stays.

    `metrics` of each trajectory gets `independent_reward` (the reward it had) and `ruler_score`,
    its `logs` the explanation.

    Args:
        group: trajectories with messages; further conversations of a trajectory are judged too.
        judge_model: as in `ruler`.
        extra_litellm_params: as in `ruler`.
        rubric: what makes a high score.
        swallow_exceptions: return None, and log why, if the group cannot be scored.
        debug: log the judge's answer.
    """
    if group.unfinished:
        raise ConfigError(f"{group.unfinished} rollouts of the group have not run; await it first")
    try:
        histories = []
        for number, trajectory in enumerate(group.trajectories, start=1):
            conversations = [trajectory, *trajectory.additional_histories]
            histories.append([one.messages() for one in conversations if one.messages_and_choices])
            if not histories[-1]:
                raise ConfigError(
                    f"trajectory {number} of the group has no messages for the judge to read; set "
                    "its messages_and_choices"
                )
        tools = next((one.tools for one in group.trajectories if one.tools), None)
        async with judge_of(judge_model, extra_litellm_params) as llm:
            scores = await rank(llm, histories, rubric=rubric, tools=tools, debug=debug)
    except Exception as error:
        if not swallow_exceptions:
            raise
        log.warning("RULER could not score a group (%s: %s)", type(error).__name__, error)
        return None
    scored = group.model_copy(deep=True)
    for trajectory, score in zip(scored.trajectories, scores, strict=True):
        trajectory.metrics["independent_reward"] = trajectory.reward
        trajectory.metrics["ruler_score"] = score.score
        trajectory.reward = score.score
        trajectory.log(f"RULER explanation: {score.explanation}")
    return scored


@asynccontextmanager
async def judge_of(judge_model: str, params: Mapping[str, Any] | None = None) -> AsyncIterator[LLM]:
    """The model that a LiteLLM name and its parameters mean; closed at the end."""
    rest = {k: v for k, v in (params or {}).items() if k not in _OF_LITELLM}
    prefix, _, name = judge_model.partition("/")
    is_known = prefix in _PROVIDERS and bool(name)
    variable, address, key_variable = _PROVIDERS[prefix if is_known else "openai"]
    addresses = rest.pop("api_base", None), rest.pop("base_url", None), os.environ.get(variable)
    url = next(filter(None, addresses), address if is_known else "")
    if not url:
        raise ConfigError(
            f"judge_model is {judge_model!r}, whose address is not known; name it in "
            f"extra_litellm_params={{'api_base': 'http://HOST/v1'}}, or in ${variable}. Known "
            f"providers: {', '.join(_PROVIDERS)}"
        )
    llm = LLM(
        base_url=url,
        model=name if is_known else judge_model,
        api_key=rest.pop("api_key", None) or os.environ.get(key_variable) or "default",
        timeout_s=float(rest.pop("timeout", None) or TIMEOUT_S),
        max_retries=int(rest.pop("max_retries", rest.pop("num_retries", MAX_RETRIES))),
        params=rest,
    )
    try:
        yield llm
    finally:
        await llm.close()
