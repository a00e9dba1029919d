"""OpenTelemetry spans, where they were asked for: one for each request, and one for each rollout that ended, with its parts.

Configured as everywhere, by the environment (`OTEL_EXPORTER_OTLP_ENDPOINT`, `OTEL_SERVICE_NAME`, …); without it, or without the packages of
`untax[otel]`, nothing is loaded and nothing is sent. There is no telemetry of our own.
"""

from __future__ import annotations

import json
import logging
import os
import time
from typing import TYPE_CHECKING, Any

from untax.core.errors import UsageError

if TYPE_CHECKING:
    from untax.core.ledger import Ledger

log = logging.getLogger("untax.service")

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


class Spans:
    """Made by `from_environment`. What cannot be sent is dropped by the exporter, and nobody waits for it."""

    def __init__(self, provider: Any, tracer: Any) -> None:
        self._provider = provider
        self._tracer = tracer

    def request(self, name: str, tenant: str, status: int, took_s: float) -> None:
        end_ns = time.time_ns()
        span = self._tracer.start_span(f"untax {name}", start_time=end_ns - int(took_s * 1e9))
        span.set_attributes({"untax.operation": name, "untax.tenant": tenant, "http.response.status_code": status})
        span.end(end_time=end_ns)

    def rollout(self, ledger: Ledger, tenant: str) -> None:
        """The rollout from its asking to its end; each part of it is a span inside."""
        from opentelemetry import trace

        told = json.loads(ledger.to_json())
        zero_ns = int(told["asked_at"] * 1e9)
        whole = self._tracer.start_span("untax rollout", start_time=zero_ns)
        whole.set_attributes(
            {
                "untax.rollout": told["rollout"],
                "untax.tenant": tenant,
                "untax.verdict": told["verdict"],
                "untax.actions": int(told["metrics"]["actions"]),
            }
        )
        inside = trace.set_span_in_context(whole)
        for name, start_ns, end_ns in told["parts"]:
            part = self._tracer.start_span(f"untax {name}", context=inside, start_time=zero_ns + start_ns)
            part.end(end_time=zero_ns + end_ns)
        whole.end(end_time=zero_ns + told["total_ns"])

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()


def from_environment() -> Spans | None:
    """None where the environment names no place to send them to. `UsageError` when it does and the packages are missing."""
    if not any(os.environ.get(name) for name in _ENDPOINTS):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as exc:
        raise UsageError(f"{_ENDPOINTS[0]} is set, and {exc.name} is not installed: pip install 'untax[otel]', or unset it") from exc
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Spans(provider, provider.get_tracer("untax"))
