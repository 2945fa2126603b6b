"""Manta's metrics under the names of vLLM and SGLang.

The tables of names and types are from their own code: vLLM's V1 engine (vllm/v1/metrics/loggers.py) and SGLang's
collectors (sglang/srt/observability/metrics_collector.py), read in November 2026.
"""

import pytest

from dashboards.catalog import CATALOG, METRICS, OPEN, Kind
from dashboards.dialects import DIALECTS, LEFT_OUT, dialect_of, translate
from tests.fake_exporter import exposition
from tests.scraped import Scraped

CLIENT = {  # of every process whose metrics a Prometheus client serves
    "process_cpu_seconds_total": "counter", "process_resident_memory_bytes": "gauge",
    "process_start_time_seconds": "gauge", "process_open_fds": "gauge", "process_max_fds": "gauge",
}  # fmt: skip
THEIRS = {
    "vllm": CLIENT | {
        "vllm:num_requests_running": "gauge", "vllm:num_requests_waiting": "gauge", "vllm:kv_cache_usage_perc": "gauge",
        "vllm:cache_config_info": "gauge", "vllm:prefix_cache_queries_total": "counter",
        "vllm:prefix_cache_hits_total": "counter", "vllm:num_preemptions_total": "counter",
        "vllm:prompt_tokens_total": "counter", "vllm:generation_tokens_total": "counter",
        "vllm:request_success_total": "counter", "vllm:iteration_tokens_total": "histogram",
        "vllm:request_prompt_tokens": "histogram", "vllm:request_generation_tokens": "histogram",
        "vllm:time_to_first_token_seconds": "histogram", "vllm:inter_token_latency_seconds": "histogram",
        "vllm:request_time_per_output_token_seconds": "histogram", "vllm:e2e_request_latency_seconds": "histogram",
        "vllm:request_queue_time_seconds": "histogram", "vllm:request_prefill_time_seconds": "histogram",
        "vllm:request_decode_time_seconds": "histogram",
    },
    "sglang": CLIENT | {
        "sglang:num_running_reqs": "gauge", "sglang:num_queue_reqs": "gauge", "sglang:token_usage": "gauge",
        "sglang:num_decode_prealloc_queue_reqs": "gauge", "sglang:num_decode_transfer_queue_reqs": "gauge",
        "sglang:num_prefill_inflight_queue_reqs": "gauge", "sglang:num_used_tokens": "gauge",
        "sglang:kv_used_tokens": "gauge", "sglang:kv_available_tokens": "gauge", "sglang:kv_evictable_tokens": "gauge",
        "sglang:max_total_num_tokens": "gauge", "sglang:prompt_tokens_total": "counter",
        "sglang:generation_tokens_total": "counter", "sglang:cached_tokens_total": "counter",
        "sglang:num_requests_total": "counter", "sglang:num_aborted_requests_total": "counter",
        "sglang:num_retracted_requests_total": "counter", "sglang:time_to_first_token_seconds": "histogram",
        "sglang:inter_token_latency_seconds": "histogram", "sglang:e2e_request_latency_seconds": "histogram",
        "sglang:queue_time_seconds": "histogram", "sglang:prompt_tokens_histogram": "histogram",
        "sglang:generation_tokens_histogram": "histogram",
    },
}  # fmt: skip
WHO = 'model="a \\"b\\", c",role="unified",replica="r1"'


@pytest.fixture(scope="module")
def everything() -> str:
    """Every metric of the catalogue, each series with the value 2 (gauges: 0.5)."""
    return "".join(f"{line}\n" for metric in METRICS for line in exposition(metric, 2))


@pytest.mark.parametrize("name", THEIRS)
def test_names_and_types_are_theirs(name: str, everything: str) -> None:
    families = Scraped(translate(everything, name)).families.values()
    told = {f"{each.name}_total" if each.type == "counter" else each.name: each.type for each in families}
    assert told == THEIRS[name]
    assert not told.keys() & LEFT_OUT.keys()


@pytest.mark.parametrize("name", THEIRS)
def test_terms_read_labels_and_values_that_the_catalogue_has(name: str) -> None:
    for term in DIALECTS[name].terms:
        metric = CATALOG[term.source]
        for label, values in term.where.items():
            assert metric.labels[label] == OPEN or set(values) <= set(metric.labels[label]), term.name
        assert set(term.labels) <= set(metric.labels), term.name
        if metric.unit == "ratio":  # summing shares means nothing: one series must be left
            dropped = set(metric.labels) - set(term.labels)
            assert all(len(term.where[label]) == 1 for label in dropped), term.name


def test_labels_that_they_lack_are_summed_and_where_chooses() -> None:
    states = {"waiting": 3, "running": 5, "preallocating": 1, "receiving": 2, "handing_off": 7}
    text = "".join(f'manta_scheduler_requests{{{WHO},state="{state}"}} {n}\n' for state, n in states.items())
    vllm, sglang = translate(text, "vllm"), translate(text, "sglang")
    assert 'vllm:num_requests_waiting{model_name="a \\"b\\", c",engine="r1"} 6.0\n' in vllm
    assert 'vllm:num_requests_running{model_name="a \\"b\\", c",engine="r1"} 5.0\n' in vllm
    own = 'model_name="a \\"b\\", c",engine_type="unified",dp_rank="r1",tp_rank="0",pp_rank="0"'
    assert f"sglang:num_queue_reqs{{{own}}} 3.0\n" in sglang


def test_a_histogram_is_summed_bucket_by_bucket_and_stays_cumulative(everything: str) -> None:
    """Seven endpoints with 2 in each bucket; ``tokens`` is counted in durations, and no generation."""
    seen = Scraped(translate(everything, "vllm"))
    [family] = [each for each in seen.families.values() if each.name == "vllm:e2e_request_latency_seconds"]
    values = {sample.value for sample in family.samples if not sample.name.endswith("_sum")}
    assert values == {14.0}
    assert [sample.labels["le"] for sample in family.samples if "le" in sample.labels][-1] == "+Inf"


def test_values_of_labels_are_theirs() -> None:
    text = "".join(f'manta_cache_hit_tokens_total{{{WHO},tier="L{n}"}} {n}\n' for n in (1, 2, 3))
    said = translate(text, "sglang")
    for source, number in (("device", 1), ("host", 2), ("storage", 3)):
        assert f'cache_source="{source}"}} {number}.0\n' in said
    assert "vllm:prefix_cache_hits_total{" in (vllm := translate(text, "vllm"))
    assert vllm.rstrip().endswith(" 6.0")


def test_processes_stay_apart_and_comments_stay() -> None:
    line = 'manta_scheduler_requests{{model="m",role="unified",replica="{0}",state="waiting"}} 1'
    text = "\n".join([line.format("a"), line.format("b"), "# router c did not answer", ""])
    said = translate(text, "vllm").splitlines()
    assert [each for each in said if each.startswith("vllm:num_requests_waiting")] == [
        'vllm:num_requests_waiting{model_name="m",engine="a"} 1.0',
        'vllm:num_requests_waiting{model_name="m",engine="b"} 1.0',
    ]
    assert said[-1] == "# router c did not answer"


def test_another_dialect_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ValueError, match="dialect: 'tgi' is unknown; there are: vllm, sglang"):
        translate("", "tgi")


@pytest.mark.parametrize(
    ("path", "query", "dialect"),
    [
        ("/metrics", "", ""), ("/metrics", "dialect=vllm", "vllm"), ("/metrics/sglang", "", "sglang"),
        ("/metrics/vllm/", "x=1", "vllm"), ("/prometheus/metrics", "", ""), ("/", "dialect=", ""),
    ],
)  # fmt: skip
def test_the_dialect_is_in_the_query_or_the_path(path: str, query: str, dialect: str) -> None:
    assert dialect_of(path, query) == dialect


def test_a_counter_of_ours_is_a_counter_of_theirs() -> None:
    for dialect in DIALECTS.values():
        for term in dialect.terms:
            if term.metric.kind is Kind.COUNTER:
                assert term.name.endswith("_total"), term.name
