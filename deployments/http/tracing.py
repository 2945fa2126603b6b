"""OpenTelemetry: one SERVER span a generating HTTP request, its stages under it; off unless an endpoint is configured.

Owns:      a tracer provider of its own. The process's global one stays whose it is: Ray Serve sets it where its own
           tracing is on, and its spans are then our parents.
Never:     does anything per token or step: the stages are written when the request has ended, from its record
           (span_tree.py). Sends a prompt's text anywhere.
           Fails a request: what cannot be written is logged.
Invariant: the span ends on every path. A caller's ``traceparent`` is the parent and its sampled flag decides; without
           one, ``ratio`` of the requests are sampled. The answer's ``traceparent`` header names our span, errors
           included.
Thread:    the router's event loop; the SDK sends on a thread of its own, and drops spans rather than wait. The end
           waits LAST_S for the last ones.
"""

import asyncio
import logging
import os
import threading
from collections.abc import Mapping, Sequence

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.dispatch.route_log import RouteLog, RouteRecord
from deployments.dispatch.timeline import Arrival
from deployments.http.span_tree import OPERATIONS, PROVIDER, span_tree
from deployments.settings.schema import ObservabilitySettings
from replicas.errors import InvalidConfig

log = logging.getLogger(__name__)

HEADER = "traceparent"
LAST_S = 3.0
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_W3C = TraceContextTextMapPropagator()


def configured(endpoint: str | None, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether spans are to be sent: to ``endpoint`` (of the settings), or where OpenTelemetry's own variables say."""
    return bool(endpoint) or any(environ.get(name) for name in ENDPOINTS)


def otlp(endpoint: str | None) -> SpanProcessor:
    """Sends batches to ``endpoint``, or where the environment says; headers and certificates from the environment.

    Raises: InvalidConfig where the exporter is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise InvalidConfig(
            f"observability.otlp_endpoint (or one of {', '.join(ENDPOINTS)}) is set, and the exporter is not "
            f"installed ({error}): pip install 'manta[otel]', or take the endpoint away"
        ) from error
    return BatchSpanProcessor(OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces" if endpoint else None))


def check(settings: ObservabilitySettings) -> None:
    """Raises: InvalidConfig where traces are to be sent and cannot be."""
    if configured(settings.otlp_endpoint):
        otlp(settings.otlp_endpoint).shutdown()


def of_router(settings: ObservabilitySettings, *, model: str, router_id: str, version: str) -> "Tracing | None":
    """None where tracing is off. Raises: InvalidConfig as `check`."""
    if not configured(settings.otlp_endpoint):
        return None
    processor = otlp(settings.otlp_endpoint)
    return Tracing(processor, ratio=settings.trace_ratio, model=model, router_id=router_id, version=version)


class Tracing:
    """Writes the spans of one router."""

    def __init__(self, processor: SpanProcessor, *, ratio: float, model: str, router_id: str, version: str) -> None:
        """``ratio``: share of the requests without a parent that are sampled."""
        resource = Resource.create(
            {
                "service.name": os.environ.get("OTEL_SERVICE_NAME", "manta"),
                "service.version": version,
                "service.instance.id": router_id,
            }
        )
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(ratio)),
            resource=resource,
            shutdown_on_exit=False,  # it would wait for a receiver that says nothing
        )
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("manta", version)
        self._model = model

    def begin(self, arrival: Arrival, headers: Mapping[str, str]) -> Span:
        """The span of a request that has come, to one of the endpoints of `OPERATIONS`."""
        operation = OPERATIONS[arrival.endpoint]
        return self._tracer.start_span(
            f"{operation} {self._model}",
            context=_parent(headers),
            kind=SpanKind.SERVER,
            start_time=round(arrival.time_s * 1e9),
            attributes={
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": PROVIDER,
                "gen_ai.request.model": self._model,
            },
        )

    def end(
        self, span: Span, records: Sequence[RouteRecord], *, answer_id: str | None, http_status: int | None
    ) -> None:
        """The request has ended: its answer's id (None: it has none of its own) and status (None: its client left
        before one), and what became of its prompts (none where it was refused before one was routed)."""
        try:
            if span.is_recording():
                self._write(span, records, answer_id, http_status)
        except Exception:  # the answer is out, and a trace is not worth its failure
            log.exception("a trace could not be written whole")
        finally:
            span.end()

    async def stop(self) -> None:
        """Send what is left, for LAST_S at most: a receiver may take connections and say nothing."""
        last = threading.Thread(target=self._provider.shutdown, name="last-spans", daemon=True)
        last.start()
        await asyncio.to_thread(last.join, LAST_S)
        if last.is_alive():
            log.warning("the receiver of traces did not take the last spans within %.0f s: they are dropped", LAST_S)

    def _write(
        self, span: Span, records: Sequence[RouteRecord], answer_id: str | None, http_status: int | None
    ) -> None:
        """As `end`."""
        if answer_id is not None:
            span.set_attribute("gen_ai.response.id", answer_id)
        if http_status is not None:
            span.set_attribute("http.response.status_code", http_status)
        error = str(http_status) if http_status is not None and http_status >= 500 else None
        if records:
            error = self._write_prompts(span, records) or error
        if error is not None:
            span.set_attribute("error.type", error)
            span.set_status(Status(StatusCode.ERROR))

    def _write_prompts(self, span: Span, records: Sequence[RouteRecord]) -> str | None:
        """Stages and attributes; how it failed, if it did."""
        tree = span_tree(records)
        span.set_attributes(tree.attributes)
        for attributes in tree.failed_tries:
            span.add_event("manta.try_failed", attributes)
        inside = trace.set_span_in_context(span)
        for stage in tree.stages:
            child = self._tracer.start_span(
                stage.name, context=inside, start_time=stage.start_ns, attributes=stage.attributes
            )
            child.end(stage.end_ns)
        return tree.error


class Traces:
    """ASGI middleware, inside `Arrivals` and `RequestIds`; only where tracing is on. Streams pass through untouched."""

    def __init__(self, app: ASGIApp, *, tracing: Tracing, routes: RouteLog) -> None:
        self._app = app
        self._tracing = tracing
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope.setdefault("state", {})
        arrival = state.get("arrival")  # of the requests that are counted
        if arrival is None or arrival.endpoint not in OPERATIONS:
            await self._app(scope, receive, send)
            return
        span = self._tracing.begin(arrival, Headers(scope=scope))
        carrier: dict[str, str] = {}
        _W3C.inject(carrier, context=trace.set_span_in_context(span))
        http_status: int | None = None

        async def told(message: Message) -> None:
            nonlocal http_status
            if message["type"] == "http.response.start":
                http_status = message["status"]
                if HEADER in carrier:
                    MutableHeaders(scope=message)[HEADER] = carrier[HEADER]
            await send(message)

        try:
            await self._app(scope, receive, told)
        finally:
            routed = state.get("routed")
            rids = [] if routed is None else routed.rids
            records = [record for rid in rids if (record := self._routes.get(rid)) is not None]
            answer_id = None if routed is None else routed.answer_id
            self._tracing.end(span, records, answer_id=answer_id, http_status=http_status)


def _parent(headers: Mapping[str, str]) -> Context:
    """The span that runs here (Ray Serve's, where its tracing is on), else the caller's, else none."""
    if trace.get_current_span().get_span_context().is_valid:
        return otel_context.get_current()
    return _W3C.extract(headers, context=Context())
