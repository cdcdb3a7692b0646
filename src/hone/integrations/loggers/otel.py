"""OpenTelemetry: a trace for each rollout, with the gen_ai conventions, and metrics, over OTLP.

In:   Rollouts, Points
Out:  requests to /v1/traces and /v1/metrics of a collector (OTLP over HTTP, protobuf)

Trace and span ids are derived from the rollout's id, so a trace that is sent again has the same
ids.
"""
# Installed with its extra only.
# pyright: reportMissingImports=false

import os
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from hone.config.registry import LoggerBaseConfig, register_logger
from hone.loggers.base import LoggedRollout, Point, Run, Sink
from hone.loggers.refusals import Outbox

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import MetricsData
    from opentelemetry.sdk.trace import ReadableSpan

MAX_SPANS, MAX_POINTS = 512, 512
"""Maximum number of spans, and of metric points, in one request."""

PROVIDER = "_CREDENTIAL_PROVIDER"
"""Suffix of the OpenTelemetry variables that select a plugin for the session."""


class OTelConfig(LoggerBaseConfig, name="otel"):
    """Sends a trace for each rollout, and metrics, to an OpenTelemetry collector (OTLP over HTTP)."""

    modules: ClassVar[tuple[str, ...]] = (
        "opentelemetry.sdk",
        "opentelemetry.exporter.otlp.proto.http",
    )
    extra: ClassVar[str] = "otel"
    reads_calls: ClassVar[bool] = True

    endpoint: str | None = None
    """Base URL of the collector, such as `http://localhost:4318`. If not set, the variables of
    OpenTelemetry (`OTEL_EXPORTER_OTLP_ENDPOINT`) decide."""
    headers: dict[str, str] = Field(default_factory=dict)
    """Headers of every request, such as `authorization`."""
    service_name: str = "hone"
    """Value of `service.name`."""
    content: bool = False
    """Whether spans hold the text of inputs, outputs and messages."""


class OTelSink(Sink):
    """Exports spans and gauges."""

    reads_rollouts = True

    def __init__(self, config: OTelConfig, run: Run) -> None:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource

        from hone.integrations.loggers.spans import Spans

        def arguments(signal: str) -> dict[str, Any]:
            # The exporter appends no path to an explicit endpoint.
            base = config.endpoint and config.endpoint.rstrip("/")
            endpoint = base and f"{base}/v1/{signal}"
            own = {"endpoint": endpoint, "headers": config.headers or None, "timeout": 10}
            return own | {"session": self._statuses.session}

        self._statuses = ResponseStatuses()
        self._traces = OTLPSpanExporter(**arguments("traces"))
        self._metrics = OTLPMetricExporter(**arguments("metrics"))
        self._make = Spans(
            run, service=config.service_name, content=config.content, more=lambda r, c: {}
        )
        self._resource = Resource.create({"service.name": config.service_name, "hone.run": run.id})
        self._spans = Outbox["ReadableSpan"](MAX_SPANS, self._send_spans, self.refuse)
        self._points = Outbox[Point](MAX_POINTS, self._send_points, self.refuse)

    def rollout(self, rollout: LoggedRollout) -> None:
        self._spans.items += self._make.of(rollout)

    def log(self, point: Point) -> None:
        self._points.items.append(point)

    def flush(self) -> None:
        self._spans.flush()
        self._points.flush()

    def _send_spans(self, spans: "list[ReadableSpan]") -> None:
        self._statuses.check(self._traces.export(spans), "traces")

    def _send_points(self, points: list[Point]) -> None:
        self._statuses.check(self._metrics.export(self._gauges(points)), "metrics")

    def close(self) -> None:
        self._traces.shutdown()
        self._metrics.shutdown()

    def _gauges(self, sent: list[Point]) -> "MetricsData":
        from opentelemetry.sdk.metrics.export import (
            Gauge,
            Metric,
            MetricsData,
            NumberDataPoint,
            ResourceMetrics,
            ScopeMetrics,
        )
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        import hone

        points: dict[str, list[NumberDataPoint]] = {}
        for point in sent:
            at = int(point.at * 1e9)
            for name, value in point.values.items():
                data = NumberDataPoint({"hone.step": point.step}, at, at, value)
                points.setdefault(f"hone.{name.replace('/', '.')}", []).append(data)
        metrics = [Metric(name, "", "", Gauge(data)) for name, data in points.items()]
        scope = InstrumentationScope("hone", hone.__version__)
        return MetricsData(
            [ResourceMetrics(self._resource, [ScopeMetrics(scope, metrics, "")], "")]
        )


class NotAccepted(Exception):
    """The collector did not accept a batch."""

    def __init__(self, signal: str, status: int | None) -> None:
        answer = "no answer" if status is None else f"status {status}"
        super().__init__(f"the collector did not accept the {signal}: {answer}")
        self.status_code = status


class ResponseStatuses:
    """Records response statuses: the exporter itself only logs them and reports a failure."""

    def __init__(self) -> None:
        self.session = None
        self._status: int | None = None
        # With such a variable, the exporter creates the session itself.
        if not any(name.endswith(PROVIDER) for name in os.environ):
            import requests

            self.session = requests.Session()
            self.session.hooks["response"].append(self._note)

    def _note(self, response: Any, *_: Any, **__: Any) -> None:
        self._status = response.status_code

    def check(self, result: Any, signal: str) -> None:
        """Raise if the export that just ended failed."""
        status, self._status = self._status, None
        if result.name != "SUCCESS":
            raise NotAccepted(signal, status)


@register_logger(config_type=OTelConfig)
async def otel(config: OTelConfig, run: Run) -> AsyncIterator[OTelSink]:
    """Sends a trace for each rollout, and metrics, to an OpenTelemetry collector."""
    yield OTelSink(config, run)
