"""What a process may emit, and what a scrape then shows."""

import pytest

from dashboards.catalog import CATALOG, Process
from deployments.watch.metrics.emitter import Emitter, Identity, emitter_of
from tests.scraped import Scraped

WHO = Identity(model="smollm2", role="router", replica="abc")


@pytest.fixture
def emitter() -> Emitter:
    return Emitter(Process.ROUTER, WHO)


def test_a_name_that_is_not_in_the_catalogue_is_refused(emitter: Emitter) -> None:
    with pytest.raises(KeyError, match=r"requests_totl is not in dashboards/catalog.py"):
        emitter.counter("requests_totl")


def test_what_another_process_emits_is_refused(emitter: Emitter) -> None:
    with pytest.raises(ValueError, match="cache_nodes is the replica's to emit; this is a router"):
        emitter.gauge("cache_nodes", tier="L1")
    assert emitter.gauge("build_info", version="1", ray="2") is not None  # everybody's


def test_what_needs_prefill_and_decode_apart_is_refused_without() -> None:
    with pytest.raises(ValueError, match="emitted only where prefill and decode are apart"):
        Emitter(Process.ROUTER, WHO).counter("router_kv_transfers_total", outcome="error")
    apart = Emitter(Process.ROUTER, WHO, disaggregated=True)
    apart.counter("router_kv_transfers_total", outcome="error").inc()
    assert Scraped(apart.registry).value("router_kv_transfers_total", outcome="error") == 1


def test_an_objective_is_a_bound_of_its_histogram_in_its_place() -> None:
    emitter = Emitter(Process.ROUTER, WHO, objectives={"time_to_first_token_seconds": 1.25})
    emitter.histogram("time_to_first_token_seconds", endpoint="chat").observe(1.2)
    seen = Scraped(emitter.registry)
    within = {le: seen.value("time_to_first_token_seconds_bucket", endpoint="chat", le=le) for le in ("1.0", "1.25")}
    assert within == {"1.0": 0, "1.25": 1}
    assert 1.25 not in CATALOG["time_to_first_token_seconds"].buckets


def test_a_process_tells_its_cpu_time_memory_and_files() -> None:
    seen = Scraped(emitter_of(Process.ROUTER, WHO, disaggregated=False).registry)
    assert (seen.value("process_cpu_seconds_total") or 0) > 0
    assert (seen.value("process_resident_memory_bytes") or 0) > 1e6
    opened, most = seen.value("process_open_fds"), seen.value("process_max_fds")
    assert opened is not None
    assert most is not None
    assert 0 < opened < most
    assert (seen.value("process_start_time_seconds", replica="abc") or 0) > 1.5e9


def test_another_kind_label_or_value_is_refused(emitter: Emitter) -> None:
    with pytest.raises(ValueError, match="requests_total is a counter, not a gauge"):
        emitter.gauge("requests_total", endpoint="chat", outcome="ok")
    with pytest.raises(ValueError, match=r"has the labels \['endpoint', 'outcome'\], not \['endpoint'\]"):
        emitter.counter("requests_total", endpoint="chat")
    with pytest.raises(ValueError, match="outcome = 'fine'; it can be ok, error"):
        emitter.counter("requests_total", endpoint="chat", outcome="fine")


def test_a_metric_has_one_source(emitter: Emitter) -> None:
    emitter.tally("inter_token_latency_seconds")
    with pytest.raises(ValueError, match="has a source already"):
        emitter.histogram("inter_token_latency_seconds")
    emitter.counter("router_prompt_tokens_total")
    with pytest.raises(ValueError, match="has a source already"):
        emitter.tell(["router_prompt_tokens_total"], lambda: [])
    assert emitter.bound == {"inter_token_latency_seconds", "router_prompt_tokens_total"}


def test_series_of_known_labels_exist_from_the_first_scrape_and_say_who_tells_them(emitter: Emitter) -> None:
    emitter.counter("slo_requests_total", slo="ttft", met="true").inc(3)
    seen = Scraped(emitter.registry)
    assert seen.value("slo_requests_total", slo="ttft", met="true", model="smollm2", role="router", replica="abc") == 3
    assert seen.value("slo_requests_total", slo="itl", met="false") == 0
    assert seen.text.count("manta_slo_requests_total{") == 4
    assert "_created" not in seen.text


def test_series_of_open_labels_come_with_their_first_use() -> None:
    emitter = Emitter(Process.ROUTER, WHO)
    for target in ("r1", "r2"):
        emitter.gauge("router_report_age_seconds", target=target).set(0.5)
    assert Scraped(emitter.registry).values("router_report_age_seconds", "target") == {"r1": 0.5, "r2": 0.5}


def test_a_tally_shows_as_the_histogram_that_the_client_would_make(emitter: Emitter) -> None:
    """0.003 twice, 0.1 and 9 s: the same buckets, sum and count either way."""
    other = Emitter(Process.ROUTER, WHO)
    quick, usual = emitter.tally("inter_token_latency_seconds"), other.histogram("inter_token_latency_seconds")
    quick.add_many(0.003, 2)
    for value in (0.1, 9.0):
        quick.add(value)
    for value in (0.003, 0.003, 0.1, 9.0):
        usual.observe(value)
    seen = Scraped(emitter.registry)
    assert seen.value("inter_token_latency_seconds_bucket", le="0.005") == 2
    assert seen.value("inter_token_latency_seconds_bucket", le="+Inf") == 4
    assert seen.value("inter_token_latency_seconds_sum") == pytest.approx(9.106)

    def told(who: Emitter) -> dict[str, float]:
        return Scraped(who.registry).values("inter_token_latency_seconds_bucket", "le")

    assert told(emitter) == told(other)
    assert seen.families["manta_inter_token_latency_seconds"].type == "histogram"


def test_what_is_told_at_a_scrape_is_asked_for_at_each(emitter: Emitter) -> None:
    ages = {"r1": 1.0, "r2": 2.0}
    emitter.tell(
        ["router_report_age_seconds"],
        lambda: [("router_report_age_seconds", {"target": each}, age_s) for each, age_s in ages.items()],
    )
    assert Scraped(emitter.registry).values("router_report_age_seconds", "target") == {"r1": 1.0, "r2": 2.0}
    del ages["r1"]
    assert Scraped(emitter.registry).values("router_report_age_seconds", "target") == {"r2": 2.0}


def test_a_function_that_fails_spoils_no_scrape_and_is_told_as_before(
    emitter: Emitter, caplog: pytest.LogCaptureFixture
) -> None:
    """Answers of 1, failure, failure, 4, failure: the log has a line for each time that it begins to fail."""
    turns = iter([1.0, None, None, 4.0, None])

    def read() -> list[tuple[str, dict[str, str], float]]:
        value = next(turns)
        if value is None:
            raise RuntimeError("broken")
        return [("router_report_age_seconds", {"target": "r1"}, value)]

    emitter.tell(["router_report_age_seconds"], read)
    emitter.counter("router_prompt_tokens_total").inc(7)
    seen = [Scraped(emitter.registry) for _ in range(5)]
    assert [each.value("router_report_age_seconds", target="r1") for each in seen] == [1, 1, 1, 4, 4]
    assert all(each.value("router_prompt_tokens_total") == 7 for each in seen)
    assert caplog.text.count("router_report_age_seconds on are told as they were before") == 2
