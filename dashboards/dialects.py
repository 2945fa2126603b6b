"""Manta's metrics under the names of vLLM's and SGLang's, for rules, boards and autoscalers that read those.

Owns:      which metric of theirs is which of the catalogue's; the translation of one exposition text into the other.
Never:     makes a metric up: what Manta does not count under any name is left out (`LEFT_OUT` says why).
Invariant: names, types and meanings are theirs (vLLM's V1 engine, SGLang's collectors); buckets are Manta's. Every
           source is an entry of the catalogue. Labels of Manta's that they do not have are summed over.

One series of theirs stays one per process: `engine` (vLLM) and `dp_rank` (SGLang) are the id of Manta's process. Times
and lengths of requests are the routers', queues and pools the replicas'.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from urllib.parse import parse_qs

from dashboards.catalog import ANSWERING, CATALOG, TAKEN, Kind, Metric

TYPE = "text/plain; version=0.0.4; charset=utf-8"  # of the translated text
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_ANSWERS = {"endpoint": ANSWERING}
_L1 = {"tier": ("L1",)}


@dataclass(frozen=True, slots=True, kw_only=True)
class TheirMetric:
    """One metric of another server, and where its numbers come from."""

    name: str  # theirs, as PromQL uses it; a histogram's without _bucket, _sum, _count
    source: str  # of CATALOG
    where: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # own label -> values that count; else all
    labels: Mapping[str, str] = field(default_factory=dict)  # own label -> theirs; the others are summed over
    values: Mapping[str, str] = field(default_factory=dict)  # value of a kept label -> theirs, where that differs

    @property
    def metric(self) -> Metric:
        return CATALOG[self.source]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """All metrics of another server that Manta can give."""

    server: str
    identity: Mapping[str, str]  # of the labels on every series: ours -> theirs
    constant: Mapping[str, str]  # labels that every one of their series has, and that mean nothing here
    terms: tuple[TheirMetric, ...]


def _term(name: str, source: str, /, **labels: tuple[str, ...]) -> TheirMetric:
    return TheirMetric(name=name, source=source, where=labels)


# the names that Prometheus' clients give a process; both servers have them
_PROCESS = tuple(
    TheirMetric(name=name, source=name)
    for name in ("process_cpu_seconds_total", "process_resident_memory_bytes", "process_start_time_seconds",
                 "process_open_fds", "process_max_fds")
)  # fmt: skip
_VLLM = (
    _term("vllm:num_requests_running", "scheduler_requests", state=("running",)),
    _term("vllm:num_requests_waiting", "scheduler_requests", state=("waiting", "preallocating", "receiving")),
    _term("vllm:kv_cache_usage_perc", "kv_pool_utilization_ratio", **_L1),
    TheirMetric(name="vllm:cache_config_info", source="replica_info",
                labels={"page_size_tokens": "block_size", "num_pages": "num_gpu_blocks", "kv_dtype": "cache_dtype"}),
    _term("vllm:prefix_cache_queries_total", "cache_lookup_tokens_total"),
    _term("vllm:prefix_cache_hits_total", "cache_hit_tokens_total"),
    _term("vllm:prompt_tokens_total", "scheduler_tokens_total", kind=("prefill_computed", "prefill_cached")),
    _term("vllm:generation_tokens_total", "scheduler_tokens_total", kind=("decode",)),
    _term("vllm:num_preemptions_total", "scheduler_retractions_total"),
    _term("vllm:iteration_tokens_total", "scheduler_batch_tokens"),
    TheirMetric(name="vllm:request_success_total", source="request_finishes_total",
                labels={"reason": "finished_reason"}),
    _term("vllm:time_to_first_token_seconds", "time_to_first_token_seconds"),
    _term("vllm:inter_token_latency_seconds", "inter_token_latency_seconds"),
    _term("vllm:request_time_per_output_token_seconds", "time_per_output_token_seconds"),
    _term("vllm:e2e_request_latency_seconds", "request_duration_seconds", **_ANSWERS),
    _term("vllm:request_queue_time_seconds", "request_stage_duration_seconds", stage=("queue",)),
    _term("vllm:request_prefill_time_seconds", "request_stage_duration_seconds", stage=("prefill",)),
    _term("vllm:request_decode_time_seconds", "request_stage_duration_seconds", stage=("decode",)),
    _term("vllm:request_prompt_tokens", "request_prompt_tokens"),
    _term("vllm:request_generation_tokens", "request_output_tokens"),
)  # fmt: skip
_SGLANG = (
    _term("sglang:num_running_reqs", "scheduler_requests", state=("running",)),
    _term("sglang:num_queue_reqs", "scheduler_requests", state=("waiting",)),
    _term("sglang:num_decode_prealloc_queue_reqs", "scheduler_requests", state=("preallocating",)),
    _term("sglang:num_decode_transfer_queue_reqs", "scheduler_requests", state=("receiving",)),
    _term("sglang:num_prefill_inflight_queue_reqs", "scheduler_requests", state=("handing_off",)),
    _term("sglang:token_usage", "kv_pool_utilization_ratio", **_L1),
    _term("sglang:num_used_tokens", "kv_pool_tokens", state=TAKEN, **_L1),
    _term("sglang:kv_used_tokens", "kv_pool_tokens", state=TAKEN, **_L1),
    _term("sglang:kv_available_tokens", "kv_pool_tokens", state=("free",), **_L1),
    _term("sglang:kv_evictable_tokens", "kv_pool_tokens", state=("evictable",), **_L1),
    _term("sglang:max_total_num_tokens", "kv_pool_capacity_tokens", **_L1),
    _term("sglang:prompt_tokens_total", "scheduler_tokens_total", kind=("prefill_computed", "prefill_cached")),
    _term("sglang:generation_tokens_total", "scheduler_tokens_total", kind=("decode",)),
    TheirMetric(name="sglang:cached_tokens_total", source="cache_hit_tokens_total", labels={"tier": "cache_source"},
                values={"L1": "device", "L2": "host", "L3": "storage"}),
    _term("sglang:num_retracted_requests_total", "scheduler_retractions_total"),
    _term("sglang:num_requests_total", "requests_total", outcome=("ok",), **_ANSWERS),
    _term("sglang:num_aborted_requests_total", "requests_total", outcome=("cancelled", "timeout"), **_ANSWERS),
    _term("sglang:time_to_first_token_seconds", "time_to_first_token_seconds"),
    _term("sglang:inter_token_latency_seconds", "inter_token_latency_seconds"),
    _term("sglang:e2e_request_latency_seconds", "request_duration_seconds", **_ANSWERS),
    _term("sglang:queue_time_seconds", "request_stage_duration_seconds", stage=("queue",)),
    _term("sglang:prompt_tokens_histogram", "request_prompt_tokens"),
    _term("sglang:generation_tokens_histogram", "request_output_tokens"),
)  # fmt: skip
DIALECTS: Mapping[str, Dialect] = {
    "vllm": Dialect(
        server="vLLM", identity={"model": "model_name", "replica": "engine"}, constant={}, terms=(*_VLLM, *_PROCESS)
    ),
    "sglang": Dialect(
        server="SGLang", identity={"model": "model_name", "role": "engine_type", "replica": "dp_rank"},
        constant={"tp_rank": "0", "pp_rank": "0"}, terms=(*_SGLANG, *_PROCESS),
    ),
}  # fmt: skip
LEFT_OUT = {  # of their metrics that boards use
    "vllm:lora_requests_info": "a series for each set of adapters in use: see `manta_adapters_held`",
    "vllm:num_requests_swapped": "nothing is swapped: a retracted request is computed again",
    "vllm:request_inference_time_seconds": "the sum of prefill and decode time, which two histograms do not give",
    "sglang:cache_hit_rate": "a gauge over an unknown time: divide the rates of cached and prompt tokens",
    "sglang:gen_throughput": "a gauge over an unknown time: take `rate(sglang:generation_tokens_total[1m])`",
}


def dialect_of(path: str, query: str) -> str:
    """Return the dialect that ``/metrics?dialect=NAME`` or ``/metrics/NAME`` asks for; "" for Manta's own names.

    The second is for scrapers whose path can have no query, as that of the Gateway API's endpoint picker.
    """
    named = path.rstrip("/").rpartition("/metrics/")
    return named[2] if named[1] else parse_qs(query).get("dialect", [""])[0]


def check_dialect(name: str) -> None:
    """Raises: ValueError, with what there is, if ``name`` is no dialect."""
    if name not in DIALECTS:
        raise ValueError(f"dialect: {name[:40]!r} is unknown; there are: {', '.join(DIALECTS)}")


def translate(text: str, name: str) -> str:
    """Translate metrics in the text format 0.0.4, of one process or of many; comments stay.

    Raises: ValueError for other dialects.
    """
    check_dialect(name)
    dialect = DIALECTS[name]
    found = _summed(text.splitlines(), dialect)
    lines: list[str] = []
    for term in dialect.terms:
        series = found[term.name]
        if series:
            metric = term.metric
            lines.append(f"# HELP {term.name} {metric.help} From {metric.full_name}.")
            lines.append(f"# TYPE {term.name} {metric.kind.value}")
            lines += [f"{each} {value!r}" for each, value in series.items()]
    heads = ("# HELP ", "# TYPE ")
    lines += [line for line in text.splitlines() if line.startswith("#") and not line.startswith(heads)]
    return "".join(f"{line}\n" for line in lines)


def _summed(lines: Iterable[str], dialect: Dialect) -> dict[str, dict[str, float]]:
    """Return the series of each term with their values, in the order in which they come."""
    found: dict[str, dict[str, float]] = {term.name: {} for term in dialect.terms}
    readers: dict[str, list[tuple[TheirMetric, str]]] = {}  # our series -> who reads it; _bucket, ...
    for term in dialect.terms:
        for series in term.metric.series_names:
            readers.setdefault(series, []).append((term, series.removeprefix(term.metric.full_name)))
    for line in lines:
        own = line.partition("{")[0]
        if own not in readers:
            continue
        inside, _, value = line.removeprefix(f"{own}{{").rpartition("} ")
        labels = dict(_LABEL.findall(inside))
        for term, end in readers[own]:
            if all(labels[label] in values for label, values in term.where.items()):
                series = f"{term.name}{end}{{{_labels(labels, term, dialect)}}}"
                found[term.name][series] = found[term.name].get(series, 0.0) + float(value)
    return found


def _labels(labels: Mapping[str, str], term: TheirMetric, dialect: Dialect) -> str:
    kept = {theirs: term.values.get(labels[own], labels[own]) for own, theirs in term.labels.items() if own in labels}
    named = {theirs: labels[own] for own, theirs in dialect.identity.items()} | dict(dialect.constant) | kept
    if term.metric.kind is Kind.HISTOGRAM and "le" in labels:
        named["le"] = labels["le"]
    return ",".join(f'{label}="{value}"' for label, value in named.items())
