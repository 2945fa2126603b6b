"""OpenTelemetry: one SERVER span for each generating HTTP request, its stages under it; off unless configured.

    chat MODEL
      manta.route | manta.queue | manta.prefill | manta.kv_transfer | manta.decode

Owns:      a tracer provider of its own. The process's global one is Ray Serve's: where Serve's tracing is on, its spans
           are our parents.
Never:     does anything per token or step: the stages are written when the request has ended, from its record.
           Sends a prompt's text or ids, or an error's text: a failed try carries its error's name. Fails a request:
           what cannot be written is logged.
Invariant: the span ends on every path. A caller's ``traceparent`` is the parent and its sampled flag decides; without
           one, ``ratio`` of the requests are sampled. The answer's ``traceparent`` header names our span, errors
           included.
Thread:    the router's event loop; the SDK sends on a thread of its own, and drops spans rather than wait. The shutdown
           waits LAST_S for the last ones.
"""

import asyncio
import logging
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

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

from deployments.record.route_log import RouteLog, RouteRecord, Try
from deployments.record.timeline import Arrival
from deployments.settings.schema import ObservabilitySettings
from replicas.errors import InvalidConfig

PROVIDER = "manta"
OPERATIONS = {  # endpoint that generates -> gen_ai.operation.name
    "chat": "chat",
    "completions": "text_completion",
    "generate": "text_completion",
    "responses": "chat",
    "messages": "chat",
    "embeddings": "embeddings",
    "score": "score",
}
_WORST_FIRST = ("error", "timeout", "shed", "invalid", "cancelled", "ok", "running")
Attribute = str | int | float | bool | Sequence[str]
Attributes = Mapping[str, Attribute]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSpan:
    """One stage of one request; times in nanoseconds since 1970."""

    name: str
    start_ns: int
    end_ns: int
    attributes: Attributes


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanTree:
    """The attributes of the span of one HTTP request, and its child spans."""

    attributes: Attributes
    stages: tuple[StageSpan, ...]
    failed_tries: tuple[Attributes, ...] = field(default=())  # in order
    error: str | None = None  # the failure, unless the client caused it


def span_tree(records: Sequence[RouteRecord]) -> SpanTree:
    """Make the spans of one HTTP request. Args: records: of its prompts, at least one, all ended."""
    outcomes = {record.outcome for record in records}
    worst = next(name for name in _WORST_FIRST if name in outcomes)
    attributes: dict[str, Attribute] = {
        "gen_ai.usage.input_tokens": sum(record.tries[-1].decision.num_tokens for record in records),
        "gen_ai.usage.output_tokens": sum(record.timeline.num_output for record in records),
        "gen_ai.response.finish_reasons": [reason for record in records for reason in record.timeline.finish_reasons],
        "manta.outcome": worst,
    }
    first_tokens = [record.timeline.ttft_s for record in records if record.timeline.ttft_s is not None]
    if first_tokens:
        attributes["manta.ttft_s"] = min(first_tokens)
    return SpanTree(
        attributes=attributes,
        stages=tuple(stage for record in records for stage in _stages(record)),
        failed_tries=tuple(
            {"manta.replica": each.decision.replica_id, "error.type": each.failure.partition(":")[0]}
            for record in records
            for each in record.tries
            if each.failure is not None
        ),
        error=worst if worst in ("error", "timeout") else None,
    )


def _stages(record: RouteRecord) -> Iterator[StageSpan]:
    """Yield the stages in order from the request's arrival; none if its stages are unknown."""
    stages, last = record.timeline.stages, record.tries[-1]
    if stages is None:
        return
    start_s = record.time_s
    for name, duration_s, attributes in (
        ("manta.route", stages.route_s, _route(record, last)),
        ("manta.queue", stages.queue_s, {"manta.replica": _prefills(last)}),
        ("manta.prefill", stages.prefill_s, _prefill(last)),
        ("manta.kv_transfer", stages.transfer_s, _transfer(last)),
        ("manta.decode", stages.decode_s, _decode(record, last)),
    ):
        if name != "manta.kv_transfer" or duration_s > 0 or last.kv_transfer is not None:
            yield StageSpan(
                name=name,
                start_ns=_ns(start_s),
                end_ns=_ns(start_s + duration_s),
                attributes={"manta.request": record.name, **attributes},
            )
        start_s += duration_s


def _route(record: RouteRecord, last: Try) -> Attributes:
    decision = last.decision
    return {
        "manta.replica": decision.replica_id,
        "manta.route.policy": decision.policy,
        "manta.route.reason": decision.reason.value,
        "manta.route.candidates": len(decision.candidates),
        "manta.route.predicted_tokens": decision.overlap_tokens,
        "manta.route.best_tokens": decision.best_overlap[1],
        "manta.route.tries": record.num_tries,
        "manta.route.migrations": record.num_migrations,
    }


def _prefill(last: Try) -> Attributes:
    computed: dict[str, Attribute] = {"manta.replica": _prefills(last)}
    if last.cached_tokens is not None:
        computed["manta.cached_tokens"] = last.cached_tokens
    return computed


def _transfer(last: Try) -> Attributes:
    ends: dict[str, Attribute] = {"manta.target": last.decision.replica_id}
    if last.decision.prefill_id is not None:
        ends["manta.source"] = last.decision.prefill_id
    if last.kv_transfer is not None:
        ends["manta.transferred"] = last.kv_transfer.transferred
        ends["manta.pages"] = last.kv_transfer.num_pages
        ends["manta.bytes"] = last.kv_transfer.num_bytes
    return ends


def _decode(record: RouteRecord, last: Try) -> Attributes:
    return {"manta.replica": last.decision.replica_id, "manta.output_tokens": record.timeline.num_output}


def _prefills(last: Try) -> str:
    """Find the replica that computed the prompt."""
    handed_over = last.kv_transfer is not None and last.kv_transfer.transferred
    computes = last.decision.prefill_id if handed_over else None
    return computes if computes is not None else last.decision.replica_id


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


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
            f"installed ({error}): install it (.venv/bin/pip install -e '.[otel]'), or take the endpoint away"
        ) from error
    return BatchSpanProcessor(OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces" if endpoint else None))


def check(settings: ObservabilitySettings) -> None:
    """Check that configured traces can be sent. Raises: InvalidConfig."""
    if configured(settings.otlp_endpoint):
        otlp(settings.otlp_endpoint).shutdown()


def of_router(settings: ObservabilitySettings, *, model: str, router_id: str, version: str) -> "Tracing | None":
    """Make a router's tracing; None if it is off. Raises: InvalidConfig if traces cannot be sent."""
    if not configured(settings.otlp_endpoint):
        return None
    processor = otlp(settings.otlp_endpoint)
    return Tracing(processor, ratio=settings.trace_ratio, model=model, router_id=router_id, version=version)


class Tracing:
    """The tracer of one router, which writes its spans."""

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
        """Start the span of a request to one of the endpoints of `OPERATIONS`."""
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
        """Write the attributes, stages and status of the span."""
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
        """Write the stages and attributes. Returns: the failure, if there is one."""
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
    """ASGI middleware, inside `Arrivals`; only where tracing is on. Streams pass through untouched."""

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
        traced = span.get_span_context()
        if traced.trace_flags.sampled:
            arrival.exemplar = {"trace_id": trace.format_trace_id(traced.trace_id)}
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
            generations = state.get("generations")
            rids = [] if generations is None else generations.rids
            records = [record for rid in rids if (record := self._routes.get(rid)) is not None]
            answer_id = None if generations is None else generations.answer_id
            self._tracing.end(span, records, answer_id=answer_id, http_status=http_status)


def _parent(headers: Mapping[str, str]) -> Context:
    """The span that runs here (Ray Serve's, where its tracing is on), else the caller's, else none."""
    if trace.get_current_span().get_span_context().is_valid:
        return otel_context.get_current()
    return _W3C.extract(headers, context=Context())
