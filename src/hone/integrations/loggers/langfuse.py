"""Langfuse: a trace for each rollout, a generation for each model call, and scores.

In:   Rollouts
Out:  spans at /api/public/otel/v1/traces, and scores (`reward`, and one for each evaluator)

Ids are derived from the rollout's id, so an item that is sent again replaces itself. Spans go to
the OTLP endpoint directly, because the package's tracer can neither set a span's times nor report
whether it arrived.
"""
# Installed with its extra only.
# pyright: reportMissingImports=false

import base64
import json
import logging
import os
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, ClassVar

from hone.config.registry import LoggerBaseConfig, register_logger
from hone.files.rollout_record import CallRecord
from hone.loggers.base import LoggedRollout, Run, Sink
from hone.loggers.refusals import Outbox

if TYPE_CHECKING:
    from langfuse.api.scores.types.create_score_request import CreateScoreRequest
    from opentelemetry.sdk.trace import ReadableSpan

log = logging.getLogger("hone.loggers")

CLOUD = "https://cloud.langfuse.com"
MAX_SPANS, MAX_SCORES = 256, 256
"""Maximum number of spans, and of scores, in one request."""


class LangfuseConfig(LoggerBaseConfig, name="langfuse"):
    """Sends a trace for each rollout to Langfuse, with generations and scores."""

    modules: ClassVar[tuple[str, ...]] = ("langfuse", "opentelemetry.exporter.otlp.proto.http")
    extra: ClassVar[str] = "langfuse"
    reads_calls: ClassVar[bool] = True

    public_key: str | None = None
    """`LANGFUSE_PUBLIC_KEY` if not set."""
    secret_key: str | None = None
    """`LANGFUSE_SECRET_KEY` if not set."""
    base_url: str | None = None
    """`LANGFUSE_BASE_URL`, or Langfuse's cloud, if not set."""
    environment: str | None = None
    """Environment of the traces; `LANGFUSE_TRACING_ENVIRONMENT` if not set."""

    def refusal(self) -> str | None:
        for field in ("public_key", "secret_key"):
            variable = f"LANGFUSE_{field.upper()}"
            if not self.resolved(field, variable):
                return f"{field} is missing; set it, or the environment variable {variable}"
        return None

    def resolved(self, field: str, variable: str) -> str | None:
        """A field, or the environment variable in its place."""
        return getattr(self, field) or os.environ.get(variable)


class LangfuseSink(Sink):
    """Sends spans and scores."""

    reads_rollouts = True

    def __init__(self, config: LangfuseConfig, run: Run) -> None:
        import langfuse
        from langfuse.api.client import LangfuseAPI
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        from hone.integrations.loggers.otel import ResponseStatuses
        from hone.integrations.loggers.spans import Spans

        url = config.resolved("base_url", "LANGFUSE_BASE_URL") or os.environ.get("LANGFUSE_HOST")
        url = (url or CLOUD).rstrip("/")
        public = config.resolved("public_key", "LANGFUSE_PUBLIC_KEY") or ""
        secret = config.resolved("secret_key", "LANGFUSE_SECRET_KEY") or ""
        self._environment = config.resolved("environment", "LANGFUSE_TRACING_ENVIRONMENT")
        self._run = run
        self._statuses = ResponseStatuses()
        self._exporter = OTLPSpanExporter(
            session=self._statuses.session,
            endpoint=f"{url}/api/public/otel/v1/traces",
            headers={
                "Authorization": f"Basic {base64.b64encode(f'{public}:{secret}'.encode()).decode()}",
                "x-langfuse-ingestion-version": "4",  # each span has the attributes of its trace
            },
            timeout=10,
        )
        self._api = LangfuseAPI(
            base_url=url,
            username=public,
            password=secret,
            x_langfuse_sdk_name="hone",
            x_langfuse_sdk_version=langfuse.__version__,
            x_langfuse_public_key=public,
            timeout=10,
        )
        self._make = Spans(run, service="hone", content=False, more=self._attributes)
        self._spans = Outbox["ReadableSpan"](MAX_SPANS, self._send_spans, self.refuse)
        self._scores = Outbox["CreateScoreRequest"](MAX_SCORES, self._send_scores, self.refuse)

    def rollout(self, rollout: LoggedRollout) -> None:
        self._spans.items += self._make.of(rollout)
        self._scores.items += self._scores_of(rollout)

    def flush(self) -> None:
        self._spans.flush()
        self._scores.flush()

    def _send_spans(self, spans: "list[ReadableSpan]") -> None:
        self._statuses.check(self._exporter.export(spans), "traces")

    def _send_scores(self, scores: "list[CreateScoreRequest]") -> None:
        response = self._api.scores.create(request=scores)
        if errors := getattr(response, "errors", None):  # Langfuse would reject them again
            log.warning("Langfuse rejected scores: %s", errors)

    def close(self) -> None:
        self._exporter.shutdown()

    def _attributes(self, rollout: LoggedRollout, call: CallRecord | None) -> dict[str, Any]:
        from langfuse import LangfuseOtelSpanAttributes as Names

        shared = {
            Names.TRACE_NAME: f"{self._run.name or 'rollout'}",
            Names.TRACE_SESSION_ID: f"{self._run.id} {rollout.example}",
            Names.TRACE_TAGS: (self._run.id, rollout.split),
            Names.ENVIRONMENT: self._environment,
            f"{Names.TRACE_METADATA}.run": self._run.id,
            f"{Names.TRACE_METADATA}.step": rollout.step,
            f"{Names.TRACE_METADATA}.epoch": rollout.epoch,
            f"{Names.TRACE_METADATA}.example": rollout.example,
            f"{Names.TRACE_METADATA}.generation": rollout.generation,
        }
        if call is None:
            return shared | {
                Names.OBSERVATION_TYPE: "agent",
                Names.OBSERVATION_INPUT: _json(rollout.input),
                Names.OBSERVATION_OUTPUT: _json(rollout.output),
                Names.OBSERVATION_LEVEL: "ERROR" if rollout.failure else None,
                Names.OBSERVATION_STATUS_MESSAGE: rollout.failure_text or None,
            }
        parts = next(c for c in rollout.conversations() if c[0] is call)
        usage = {"input": call.prompt_tokens, "output": call.completion_tokens}
        return shared | {
            Names.OBSERVATION_TYPE: "generation",
            Names.OBSERVATION_MODEL: call.model,
            Names.OBSERVATION_MODEL_PARAMETERS: _json({"temperature": call.temperature}),
            Names.OBSERVATION_INPUT: _json(parts[1]),
            Names.OBSERVATION_OUTPUT: _json(parts[2]),
            Names.OBSERVATION_USAGE_DETAILS: _json({k: v for k, v in usage.items() if v}),
            Names.OBSERVATION_LEVEL: "ERROR" if call.error else None,
            Names.OBSERVATION_STATUS_MESSAGE: call.error,
        }

    def _scores_of(self, rollout: LoggedRollout) -> list["CreateScoreRequest"]:
        from langfuse.api.scores.types.create_score_request import CreateScoreRequest

        from hone.integrations.loggers.spans import trace_id

        values = {**rollout.scores, "reward": rollout.reward}
        return [
            CreateScoreRequest(
                id=f"{rollout.rollout}:{name}",
                trace_id=f"{trace_id(rollout.rollout):032x}",
                name=name,
                value=value,
                environment=self._environment,
                timestamp=datetime.fromtimestamp(rollout.ended_at, UTC),
            )
            for name, value in values.items()
            if value is not None
        ]


def _json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


@register_logger(config_type=LangfuseConfig)
async def langfuse(config: LangfuseConfig, run: Run) -> AsyncIterator[LangfuseSink]:
    """Sends a trace for each rollout to Langfuse, with generations and scores."""
    yield LangfuseSink(config, run)
