"""The engine's tallies become histograms without a look at the values: their bounds are the metrics' buckets."""

from dashboards.catalog import CATALOG
from replicas.types import EngineTallies
from tests.harness import fake_engine

METRIC_OF = {
    "prefill_step_s": "scheduler_step_duration_seconds",
    "decode_step_s": "scheduler_step_duration_seconds",
    "prefill_batch_requests": "scheduler_batch_requests",
    "decode_batch_requests": "scheduler_batch_requests",
    "prefill_batch_tokens": "scheduler_batch_tokens",
    "decode_batch_tokens": "scheduler_batch_tokens",
    "evicted_idle_s": "cache_evicted_idle_seconds",
    "grant_s": "transfer_duration_seconds",
    "wait_s": "transfer_duration_seconds",
    "post_s": "transfer_duration_seconds",
    "wire_s": "transfer_duration_seconds",
}


def test_every_tally_has_the_buckets_of_its_metric() -> None:
    assert set(METRIC_OF) == set(EngineTallies.__dataclass_fields__)
    for prefix_cache in ("radix", "chunk"):
        tallies = fake_engine(prefix_cache=prefix_cache)[0].tallies()
        for name, metric in METRIC_OF.items():
            assert getattr(tallies, name).bounds == CATALOG[metric].buckets, name
