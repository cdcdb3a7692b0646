"""Rollouts of a function, as the tests of workflow/run.py and workflow/failure.py make them."""

from typing import Any

from hone.types import Call, RecordedCall
from hone.workflow.function import Function
from hone.workflow.llm import LLM
from hone.workflow.run import RolloutResult, run_rollout

ASK: Any = [{"role": "user", "content": "hi"}]


def model(url: str) -> LLM:
    return LLM(base_url=url, model="m", max_retries=0)


async def ran(fn: Any, input: Any = "x", **options: Any) -> RolloutResult:
    function = fn if isinstance(fn, Function) else Function.of("<workflow>", fn)
    return await run_rollout(function, input, **options)


def why(result: RolloutResult) -> tuple[str, str]:
    assert result.failure is not None and result.output is None, result
    return result.failure.kind, result.failure.reason


async def one_answer(rollout: str) -> list[RecordedCall]:
    """What a server recorded of an agent elsewhere that the policy answered once."""
    call = Call(
        prompt_ids=[1], completion_ids=[2], logprobs=[-0.5], step=3, temperature=1.0, function=""
    )
    known: dict[str, Any] = {"base_model": "base", "adapter_sha256": None, "fingerprint": "f"}
    known |= {"model": "p/mine", "requested_model": "mine", "messages": ASK, "finish": "stop"}
    reply = {"role": "assistant", "content": "yes"}
    return [
        RecordedCall(
            id="c", rollout=rollout, index=0, created_at=1.0, reply=reply, call=call, **known
        )
    ]


async def one_frozen_answer(rollout: str) -> list[RecordedCall]:
    """The same for an agent that only the base weights answered."""
    return [
        one.model_copy(update={"requested_model": "mine@0"}) for one in await one_answer(rollout)
    ]
