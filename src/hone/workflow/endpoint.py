"""`--endpoint`: the workflow runs at an address, one request per rollout.

In:   the address of `hone serve-workflow` or `nat serve`, and the open rollout
Out:  a Function that sends the input and returns the output; the steps in the rollout's recorder

The header X-Hone-Rollout carries the rollout's id, and `hone serve-workflow` forwards it with every
model call, so the training server records the calls under this rollout.
"""

import json
import os
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import httpx2

from hone.capture.base import current
from hone.capture.scope import not_captured
from hone.errors import AgentCrashed, ConfigError, PolicyFailure
from hone.files.redact import redact_start, redact_urls
from hone.workflow.function import Function
from hone.workflow.jsonable import dumps
from hone.workflow.outside import outside_in
from hone.workflow.service import DETAILS, answered_within, refusal, service_client

KEY_VARIABLE = "HONE_ENDPOINT_API_KEY"
"""The environment variable that contains the endpoint's key."""
STEP, DATA = "intermediate_data: ", "data: "
"""How the lines of /generate/full begin; a line that is a JSON object is an error."""


def endpoint_url(endpoint: str) -> str:
    """The URL that rollouts are sent to; `endpoint` is the root, or ends in /generate."""
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            f"--endpoint {redact_urls(endpoint)}: must look like http://127.0.0.1:8080, the address "
            "that `hone serve-workflow` prints"
        )
    if parts.query or parts.fragment:
        raise ConfigError(
            f"--endpoint {redact_urls(endpoint)}: an address with a query cannot be used; give a key "
            f"in {KEY_VARIABLE}"
        )
    root = endpoint.rstrip("/").removesuffix("/full").removesuffix("/generate")
    return f"{root}/generate/full"


async def open_endpoint(endpoint: str, timeout_s: float) -> AsyncIterator[Function]:
    """The workflow at this address; connections are closed at the end."""
    url = endpoint_url(endpoint)
    key = os.environ.get(KEY_VARIABLE)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with service_client(url, headers=headers) as client:
        service = _Service(url, timeout_s, client)
        yield Function.of("<workflow>", service.run)


class _Service:
    """Calls the workflow at one address."""

    def __init__(self, url: str, timeout_s: float, client: httpx2.AsyncClient) -> None:
        self._url, self._timeout_s, self._client = url, timeout_s, client
        self._name = f"POST {redact_urls(url)}"

    async def run(self, input: Any) -> Any:
        """Runs the workflow on one input."""
        scope = current()
        headers = {"Content-Type": "application/json"}
        if scope is not None:
            headers |= scope.headers
            if scope.recorder is not None:
                scope.recorder.is_incomplete = True
        async with answered_within(self._name, self._timeout_s, "--endpoint_timeout "):
            with not_captured():
                response = await self._client.post(
                    self._url, headers=headers, content=dumps({"input_message": input})
                )
        if not response.is_success:
            raise refusal(self._name, response.status_code, redact_start(response.text, DETAILS))
        return self._output(response.text)

    def _output(self, text: str) -> Any:
        """The output of the workflow; raises the failure that the service reported."""
        scope, values = current(), []
        for line in text.split("\n"):  # not splitlines(): JSON may have U+2028 in it
            line = line.rstrip("\r")
            if line.startswith(STEP) and scope is not None and scope.recorder is not None:
                step = self._object(line.removeprefix(STEP))
                payload = self._object(str(step.get("payload")))
                scope.recorder.add_event(_event(step, payload))
            elif line.startswith(DATA):
                values.append(self._object(line.removeprefix(DATA)).get("value"))
            elif line.startswith("{"):
                self._fail(self._object(line))
        if not values:
            raise AgentCrashed(f"{self._name} answered without an output", reason="no_output")
        if len(values) > 1 and all(isinstance(value, str) for value in values):
            return "".join(values)
        return values[-1]

    def _object(self, text: str) -> dict[str, Any]:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise AgentCrashed(
                f"{self._name} answered with a line that is not a JSON object: "
                f"{redact_start(text, 200)!r}",
                reason="no_output",
            )
        return value

    def _fail(self, error: dict[str, Any]) -> None:
        message = f"{self._name}: {error.get('details', 'Error')}: {error.get('message', '')}"
        more = {"details": str(error.get("traceback") or "")}
        reason, cause = error.get("reason"), error.get("cause")
        if cause == "policy":
            raise PolicyFailure(message, reason=str(reason or "policy"), **more)
        if cause is None:  # `nat serve` sends only the class and the message
            outside = outside_in(f"{error.get('details', 'Error')}: {error.get('message', '')}")
            reason, cause = outside, "outside" if outside else "agent"
        reason, is_outside = str(reason or "agent_error"), cause == "outside"
        raise AgentCrashed(message, reason=reason, is_outside=is_outside, **more)


def _event(line: dict[str, Any], payload: dict[str, Any]) -> dict[str, Any]:
    """One intermediate step; `nat serve` does not say which function it belongs to."""
    unknown = {
        "function_id": payload.get("UUID") or "remote",
        "function_name": payload.get("name") or "remote",
        "parent_id": None,
        "parent_name": None,
    }
    return {
        "parent_id": line.get("parent_id") or "remote",
        "function_ancestry": line.get("function_ancestry") or unknown,
        "payload": payload,
    }
