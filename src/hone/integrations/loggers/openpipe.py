"""OpenPipe: the request log, one entry for each model call.

In:   Rollouts
Out:  POST /report for each call, with the rollout's reward in its metadata

The API takes no id from the client, so a process that is killed between a request and the next flush
would send these calls again. The cursor is saved after every rollout, and the calls of the first one
of a session are looked up by their metadata: POST /logs/update-metadata says how many logs match.
"""

import os
from collections.abc import AsyncIterator
from typing import Any, ClassVar

import httpx2

from hone.config.registry import LoggerBaseConfig, register_logger
from hone.files.rollout_record import CallRecord
from hone.loggers.base import LoggedRollout, Message, Run, Sink
from hone.loggers.refusals import is_refusal

API = "https://api.openpipe.ai/api/v1"


class OpenPipeConfig(LoggerBaseConfig, name="openpipe"):
    """Sends every model call of a run to OpenPipe's request log."""

    reads_calls: ClassVar[bool] = True

    api_key: str | None = None
    """`OPENPIPE_API_KEY` if not set."""
    base_url: str | None = None
    """`OPENPIPE_BASE_URL`, or OpenPipe's API, if not set."""

    def refusal(self) -> str | None:
        if self.api_key or os.environ.get("OPENPIPE_API_KEY"):
            return None
        return "api_key is missing; set it, or the environment variable OPENPIPE_API_KEY"


class OpenPipeSink(Sink):
    """Reports calls."""

    reads_rollouts = True
    flush_events = 1

    def __init__(self, config: OpenPipeConfig, run: Run) -> None:
        base = config.base_url or os.environ.get("OPENPIPE_BASE_URL") or API
        key = config.api_key or os.environ.get("OPENPIPE_API_KEY", "")
        self._run = run
        self._client = httpx2.Client(
            base_url=base.rstrip("/"), headers={"Authorization": f"Bearer {key}"}, timeout=30
        )
        self._sent: set[tuple[str, int]] = set()
        """Calls of the rollout that is being sent, by rollout and index."""
        self._is_first = True
        """No rollout was sent in this session yet: an earlier session may have sent the next
        one."""

    def rollout(self, rollout: LoggedRollout) -> None:
        for index, (call, messages, reply) in enumerate(rollout.conversations()):
            key = rollout.rollout, index
            if key in self._sent:
                continue  # the request of a later call failed
            report = self._report(rollout, index, call, messages, reply)
            if not (self._is_first and self._has(report["reqPayload"]["metadata"])):
                self._post(report)
            self._sent.add(key)
        self._sent.clear()
        self._is_first = False

    def close(self) -> None:
        self._client.close()

    def _has(self, metadata: dict[str, str]) -> bool:
        """Whether the log has this call. Sets its metadata to the same values, to count matches."""
        ids = {name: metadata[name] for name in ("hone.rollout", "hone.call")}
        filters = [{"field": f"metadata.{name}", "equals": value} for name, value in ids.items()]
        sought = {"filters": filters, "metadata": ids}
        answer = self._client.post("/logs/update-metadata", json=sought)
        if answer.is_client_error:  # a service without this route
            return False
        return answer.raise_for_status().json().get("matchedLogs", 0) > 0

    def _post(self, report: dict[str, Any]) -> None:
        """Send a call; one that is rejected permanently is skipped, and the others are sent."""
        try:
            self._client.post("/report", json=report).raise_for_status()
        except httpx2.HTTPStatusError as error:
            if not is_refusal(error):
                raise
            self.refuse(error)

    def _report(
        self,
        rollout: LoggedRollout,
        index: int,
        call: CallRecord,
        messages: list[Message],
        reply: Message | None,
    ) -> dict[str, Any]:
        metadata = {
            "hone.run": self._run.id,
            "hone.rollout": rollout.rollout,
            "hone.call": call.id or str(index),
            "hone.split": rollout.split,
            "hone.epoch": rollout.epoch,
            "hone.example": rollout.example,
            "hone.step": call.policy_step,
            "hone.reward": rollout.reward,
        }
        body = {
            "requestedAt": call.at * 1000,
            "receivedAt": (call.at + call.seconds) * 1000,
            "reqPayload": {
                "model": call.model,
                "messages": messages,
                **({} if call.temperature is None else {"temperature": call.temperature}),
                "metadata": {k: str(v) for k, v in metadata.items() if v is not None},
            },
            "statusCode": call.status,
            "errorMessage": call.error,
            "respPayload": None if reply is None else _completion(call, reply),
        }
        return {name: value for name, value in body.items() if value is not None}


def _completion(call: CallRecord, reply: Message) -> dict[str, Any]:
    """The answer, as a chat completion of the OpenAI API."""
    usage = {"prompt_tokens": call.prompt_tokens or 0}
    usage["completion_tokens"] = call.completion_tokens or 0
    return {
        "id": call.id or "",
        "object": "chat.completion",
        "created": int(call.at),
        "model": call.model,
        "choices": [{"index": 0, "message": reply, "finish_reason": call.finish}],
        "usage": usage | {"total_tokens": sum(usage.values())},
    }


@register_logger(config_type=OpenPipeConfig)
async def openpipe(config: OpenPipeConfig, run: Run) -> AsyncIterator[OpenPipeSink]:
    """Sends every model call of a run to OpenPipe's request log."""
    yield OpenPipeSink(config, run)
