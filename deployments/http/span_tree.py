"""What a trace tells of a request, made of its record once it has ended: attributes, and a span a stage.

    chat MODEL                                    (SERVER, tracing.py)
      manta.route | manta.queue | manta.prefill | manta.kv_transfer | manta.decode

Pure. Never holds a prompt's text or ids, or an error's text: a failed try is told by its error's name.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from deployments.dispatch.route_log import RouteRecord, Try

PROVIDER = "manta"
OPERATIONS = {  # endpoint that generates -> gen_ai.operation.name
    "chat": "chat",
    "completions": "text_completion",
    "generate": "text_completion",
}
_WORST_FIRST = ("failed", "refused", "aborted", "finished", "running")

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
    """What is written under, and on, the span of one HTTP request."""

    attributes: Attributes
    stages: tuple[StageSpan, ...]
    failed_tries: tuple[Attributes, ...] = field(default=())  # in order
    error: str | None = None  # how it ended, where that was not the client's doing


def span_tree(records: Sequence[RouteRecord]) -> SpanTree:
    """Of one HTTP request: ``records`` of its prompts, at least one, all ended."""
    endings = {record.ending for record in records}
    attributes: dict[str, Attribute] = {
        "gen_ai.usage.input_tokens": sum(record.tries[-1].decision.num_tokens for record in records),
        "gen_ai.usage.output_tokens": sum(record.timeline.num_output for record in records),
        "gen_ai.response.finish_reasons": [reason for record in records for reason in record.timeline.finish_reasons],
        "manta.outcome": next(name for name in _WORST_FIRST if name in endings),
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
        error="failed" if "failed" in endings else None,
    )


def _stages(record: RouteRecord) -> Iterator[StageSpan]:
    """One after the other from the request's arrival; none of a request whose stages are not known."""
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
        if name != "manta.kv_transfer" or duration_s > 0 or last.hand_off is not None:
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
        "manta.route.tries": len(record.tries),
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
    if last.hand_off is not None:
        ends["manta.transferred"] = last.hand_off.transferred
        ends["manta.pages"] = last.hand_off.num_pages
        ends["manta.bytes"] = last.hand_off.num_bytes
    return ends


def _decode(record: RouteRecord, last: Try) -> Attributes:
    return {"manta.replica": last.decision.replica_id, "manta.output_tokens": record.timeline.num_output}


def _prefills(last: Try) -> str:
    """The replica that computed the prompt."""
    handed_over = last.hand_off is not None and last.hand_off.transferred
    computes = last.decision.prefill_id if handed_over else None
    return computes if computes is not None else last.decision.replica_id


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
