"""Every metric of Manta, once. A metric that is not here can be neither emitted nor plotted.

Owns:      names, kinds, units, labels with their values, and which process emits each metric. Emission
           (deployments/watch/metrics), docs/metrics.md, the boards and the tests derive from it.
Never:     imports a metrics client.
Invariant: names follow Prometheus' conventions (base units, ``_total`` on counters alone). A closed set of label values
           is listed, so series exist from the first scrape. No label has values that grow with requests, users, prompts
           or time: no request ids, salts, texts or paths. ``replica`` and ``target`` name processes; the series of a
           process that left are removed.

Capacity of a pool = free + evictable + protected + reserved + quarantined. Utilisation counts what a new request cannot
take: (protected + reserved + quarantined) / capacity; occupancy is 1 - free / capacity.
"""

import re
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from enum import StrEnum

PREFIX = "manta_"
OPEN: tuple[str, ...] = ()  # a label whose values are known only when the system runs
IDENTITY = ("model", "role", "replica")  # on every series, besides its own labels
UNITS = {"seconds", "bytes", "tokens", "pages", "requests", "replicas", "ratio", "info", ""}


class Kind(StrEnum):
    """Prometheus' types of metrics that Manta uses."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Process(StrEnum):
    """Kinds of processes that emit metrics; EVERY: each of them."""

    REPLICA = "replica"
    ROUTER = "router"
    OBSERVATORY = "observatory"
    EVERY = "every"


@dataclass(frozen=True, slots=True)
class Metric:
    """One entry of the catalogue."""

    process: Process
    kind: Kind
    name: str  # without PREFIX; a counter's ends in _total
    help: str  # one sentence
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # own label -> its values, or OPEN
    _: KW_ONLY
    unit: str = ""
    buckets: tuple[float, ...] = ()  # upper bounds of a histogram, rising, +Inf left out
    disaggregated: bool = False  # emitted only where prefill and decode are apart

    def __post_init__(self) -> None:
        assert re.fullmatch(r"[a-z][a-z0-9_]*[a-z0-9]", self.name), self.name
        assert self.name.endswith("_total") == (self.kind is Kind.COUNTER), f"{self.name}: _total is for counters"
        assert bool(self.buckets) == (self.kind is Kind.HISTOGRAM), f"{self.name}: buckets are for histograms"
        assert list(self.buckets) == sorted(set(self.buckets)), f"{self.name}: bounds must rise"
        assert self.unit in UNITS, f"{self.name}: unit {self.unit!r} is none of {sorted(UNITS)}"
        assert not set(self.labels) & set(IDENTITY), f"{self.name}: {IDENTITY} are on every series"
        assert self.help.endswith("."), f"{self.name}: help is a sentence"
        if self.unit:
            assert f"_{self.unit}" in f"_{self.name}", f"{self.name}: its unit, {self.unit}, is part of the name"

    @property
    def full_name(self) -> str:
        """Name on the wire and in PromQL; a histogram's series add _bucket, _sum and _count."""
        return PREFIX + self.name

    @property
    def label_names(self) -> tuple[str, ...]:
        """IDENTITY, then the metric's own labels."""
        return (*IDENTITY, *self.labels)

    @property
    def series_names(self) -> tuple[str, ...]:
        """Names that PromQL may use."""
        if self.kind is not Kind.HISTOGRAM:
            return (self.full_name,)
        return tuple(f"{self.full_name}_{part}" for part in ("bucket", "sum", "count"))


COUNTER, GAUGE, HISTOGRAM = Kind.COUNTER, Kind.GAUGE, Kind.HISTOGRAM
REPLICA, ROUTER, OBSERVATORY = Process.REPLICA, Process.ROUTER, Process.OBSERVATORY

TTFT = (.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)  # fmt: skip
ITL = (.001, .0025, .005, .0075, .01, .015, .02, .025, .03, .04, .05, .075, .1, .15, .2, .3, .5, 1, 2.5)  # fmt: skip
DURATION = tuple(0.01 * 2**i for i in range(16))  # to 327.68 s
STAGE = (.0001, .0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60)  # fmt: skip
FAST = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, .001, .0025, .005, .01, .05)  # fmt: skip
TOKENS = tuple(float(4**i) for i in range(11))  # to 1,048,576
BATCH = tuple(float(2**i) for i in range(11))  # to 1,024
RATIO = (.01, .1, .2, .3, .4, .5, .6, .7, .8, .9, 1)  # fmt: skip
AGE = (.1, .5, 1, 5, 10, 30, 60, 300, 900, 3600, 14400)  # fmt: skip

TIERS = ("L1",)  # L1: the device's KV pool; others join when they exist
POOL_STATES = ("free", "evictable", "protected", "reserved", "quarantined")
PHASES = ("prefill", "decode")
BY_PHASE = "prefill: steps with prompts, and what running requests make in them. decode: all others."
STAGES = ("route", "queue", "prefill", "transfer", "decode")
ANSWERING = ("chat", "completions", "generate")  # endpoints that generate
ENDPOINTS = (*ANSWERING, "tokens")
OUTCOMES = ("ok", "error", "invalid", "cancelled", "shed", "timeout")
ROLES = ("unified", "prefill", "decode")
SIGNALS = ("queue", "kv_pool", "slots")


_EVERY = [
    Metric(Process.EVERY, GAUGE, "build_info", "Always 1; versions as labels.", {"version": OPEN, "ray": OPEN},
            unit="info"),
]  # fmt: skip

_REPLICA = [
    Metric(REPLICA, GAUGE, "replica_info", "Always 1; static facts of this replica, for joins.",
            {"node": OPEN, "accelerator": OPEN, "attention": OPEN, "tensor_parallel": OPEN, "page_size_tokens": OPEN,
             "kv_dtype": OPEN, "transfer_backend": OPEN}, unit="info"),
    Metric(REPLICA, GAUGE, "replica_start_seconds", "How long this replica's start took, by phase.",
            {"phase": ("load_weights", "warm_up", "total")}, unit="seconds"),
    Metric(REPLICA, GAUGE, "scheduler_requests", "Requests in this replica, by state; each is in one. "
            "preallocating and receiving: decode legs that wait for pages, and for K/V. handing_off: prefill legs "
            "whose receiver is not ready yet, whose last pages are on their way, or that drain.",
            {"state": ("waiting", "running", "preallocating", "receiving", "handing_off")}, unit="requests"),
    Metric(REPLICA, GAUGE, "scheduler_running_limit_requests", "Most requests that can run at once.", unit="requests"),
    Metric(REPLICA, GAUGE, "scheduler_queued_tokens", "Prompt tokens that wait to be computed and no cache holds.",
            unit="tokens"),
    Metric(REPLICA, HISTOGRAM, "scheduler_batch_requests", f"Requests of one forward step. {BY_PHASE}",
            {"phase": PHASES}, unit="requests", buckets=BATCH),
    Metric(REPLICA, HISTOGRAM, "scheduler_batch_tokens", f"New tokens of one forward step. {BY_PHASE}",
            {"phase": PHASES}, unit="tokens", buckets=TOKENS),
    Metric(REPLICA, HISTOGRAM, "scheduler_step_duration_seconds", f"Duration of one forward step. {BY_PHASE}",
            {"phase": PHASES}, unit="seconds", buckets=STAGE),
    Metric(REPLICA, COUNTER, "scheduler_mixed_steps_total",
            "Forward steps of prompts in which running requests made a token too."),
    Metric(REPLICA, COUNTER, "scheduler_tokens_total", "Tokens computed, reused from the cache, and generated.",
            {"kind": ("prefill_computed", "prefill_cached", "decode")}),
    Metric(REPLICA, COUNTER, "scheduler_busy_seconds_total",
            f"Time in forward steps; its rate is the busy share. {BY_PHASE}", {"phase": PHASES}),
    Metric(REPLICA, COUNTER, "scheduler_retractions_total",
            "Running requests that went back to the queue because the pool was full."),
    Metric(REPLICA, COUNTER, "scheduler_retracted_tokens_total", "Tokens whose K/V retractions gave up."),
    Metric(REPLICA, COUNTER, "scheduler_finished_requests_total", "Requests that ended in this replica, by how.",
            {"outcome": ("finished", "aborted", "error")}),
    Metric(REPLICA, GAUGE, "kv_pool_capacity_tokens", "Size of the pool in tokens.", {"tier": TIERS}, unit="tokens"),
    Metric(REPLICA, GAUGE, "kv_pool_capacity_bytes", "Size of the pool in bytes, all ranks.", {"tier": TIERS},
            unit="bytes"),
    Metric(REPLICA, GAUGE, "kv_pool_tokens", "Token slots by state; the states sum to the capacity.",
            {"tier": TIERS, "state": POOL_STATES}, unit="tokens"),
    Metric(REPLICA, GAUGE, "kv_pool_utilization_ratio",
            "Share of the pool that a new request cannot have: protected, reserved and quarantined.", {"tier": TIERS},
            unit="ratio"),
    Metric(REPLICA, COUNTER, "kv_pool_alloc_failures_total", "Allocations that failed even after eviction.",
            {"tier": TIERS}),
    Metric(REPLICA, COUNTER, "cache_lookup_tokens_total", "Prompt tokens looked up in the prefix cache."),
    Metric(REPLICA, COUNTER, "cache_hit_tokens_total", "Prompt tokens that were reused, by tier.", {"tier": TIERS}),
    Metric(REPLICA, COUNTER, "cache_evicted_tokens_total", "Tokens that left the prefix cache, by why.",
            {"tier": TIERS, "reason": ("capacity", "flush")}),
    Metric(REPLICA, HISTOGRAM, "cache_evicted_idle_seconds",
            "Time since the last use of nodes evicted for room; small values mean that the pool is too small.",
            {"tier": TIERS}, unit="seconds", buckets=AGE),
    Metric(REPLICA, GAUGE, "cache_nodes", "Nodes of the prefix tree.", {"tier": TIERS}),
]  # fmt: skip

_TRANSFER = [
    Metric(REPLICA, COUNTER, "transfers_total", "Hand-offs that ended in this replica, by how.",
            {"direction": ("send", "receive"), "outcome": ("ok", "failed")}, disaggregated=True),
    Metric(REPLICA, COUNTER, "transfer_bytes_total", "K/V bytes moved.", {"direction": ("send", "receive")},
            disaggregated=True),
    Metric(REPLICA, HISTOGRAM, "transfer_duration_seconds",
            "Parts of a hand-off: grant (until the receiver had row and pages, or gave up), wait (from then until all "
            "had come, or it failed), post and wire (one NIXL write, as its telemetry says).",
            {"phase": ("grant", "wait", "post", "wire")}, unit="seconds", buckets=STAGE, disaggregated=True),
    Metric(REPLICA, GAUGE, "transfers_in_flight", "Hand-offs in progress; draining ones have failed and their pages "
            "are not yet safe to reuse.", {"direction": ("send", "receive", "draining")}, disaggregated=True),
    Metric(REPLICA, GAUGE, "transfer_oldest_drain_seconds", "How long the oldest draining hand-off has been waiting.",
            unit="seconds", disaggregated=True),
    Metric(REPLICA, GAUGE, "transfer_peers", "Replicas that this one is connected to for hand-offs.",
            disaggregated=True),
    Metric(REPLICA, COUNTER, "transfer_digest_mismatches_total", "Pages that came and were not what was sent.",
            disaggregated=True),
    Metric(REPLICA, COUNTER, "transfer_late_messages_total", "Messages of rooms that had ended, or that could "
            "not be read; dropped.", disaggregated=True),
]  # fmt: skip

_REQUESTS = [
    Metric(ROUTER, COUNTER, "requests_total", "Requests that ended, by outcome; invalid: the client's mistake; shed: "
            "refused because all queues are too long.", {"endpoint": ENDPOINTS, "outcome": OUTCOMES}),
    Metric(ROUTER, GAUGE, "requests_in_flight", "Prompts whose answers are open.", {"endpoint": ANSWERING}),
    Metric(ROUTER, HISTOGRAM, "time_to_first_token_seconds", "From a request's arrival to its first output token, "
            "counted when that comes.", {"endpoint": ANSWERING}, unit="seconds", buckets=TTFT),
    Metric(ROUTER, HISTOGRAM, "inter_token_latency_seconds", "Gap between deltas of one answer, per token.",
            unit="seconds", buckets=ITL),
    Metric(ROUTER, HISTOGRAM, "request_duration_seconds", "From a request's arrival to its end, of those that "
            "ended ok.", {"endpoint": ENDPOINTS}, unit="seconds", buckets=DURATION),
    Metric(ROUTER, HISTOGRAM, "request_stage_duration_seconds", "What a request that ended ok spent in each "
            "stage.", {"stage": STAGES}, unit="seconds", buckets=STAGE),
    Metric(ROUTER, HISTOGRAM, "request_prompt_tokens", "Length of prompts of requests that ended ok.",
            unit="tokens", buckets=TOKENS),
    Metric(ROUTER, HISTOGRAM, "request_output_tokens", "Length of answers of requests that ended ok.",
            unit="tokens", buckets=TOKENS),
    Metric(ROUTER, COUNTER, "slo_requests_total", "Requests judged against each objective. Met: the "
            "first token, or the mean gap, came in time. Not met also: what ended in an error, a timeout, or was shed, "
            "before its first token (ttft) or after it (itl). Not judged: what clients cancelled, or asked wrongly.",
            {"slo": ("ttft", "itl"), "met": ("true", "false")}),
]  # fmt: skip

_ROUTING = [
    Metric(ROUTER, COUNTER, "router_decisions_total", "Decisions, by policy and why the winner won.",
            {"policy": OPEN, "reason": OPEN}),
    Metric(ROUTER, HISTOGRAM, "router_decision_duration_seconds", "Time of one decision.", unit="seconds",
            buckets=FAST),
    Metric(ROUTER, COUNTER, "router_prompt_tokens_total", "Prompt tokens of requests that had their first token; this "
            "and the three that follow are counted with it."),
    Metric(ROUTER, COUNTER, "router_best_overlap_tokens_total", "Longest prefix known at any candidate."),
    Metric(ROUTER, COUNTER, "router_predicted_overlap_tokens_total", "Prefix expected at the chosen replica."),
    Metric(ROUTER, COUNTER, "router_actual_overlap_tokens_total", "Prefix that the chosen replica then reused."),
    Metric(ROUTER, HISTOGRAM, "router_overlap_error_ratio", "Difference of predicted and actual prefix over the "
            "prompt's tokens; sign: what was predicted was over, under, or exact.",
            {"sign": ("over", "under", "exact")}, unit="ratio", buckets=RATIO),
    Metric(ROUTER, HISTOGRAM, "router_ttft_error_seconds", "Difference of predicted and actual time to first token.",
            {"sign": ("over", "under")}, unit="seconds", buckets=STAGE),
    Metric(ROUTER, GAUGE, "router_index_tokens", "Tokens that the prefix index holds for a replica: told by its "
            "events, or expected from decisions.", {"target": OPEN, "source": ("confirmed", "expected")},
            unit="tokens"),
    Metric(ROUTER, GAUGE, "router_report_age_seconds", "How long ago a replica was as it last told, a step "
            "in progress included; of one that has not told anything, how long it has been known.", {"target": OPEN},
            unit="seconds"),
    Metric(ROUTER, COUNTER, "router_cache_event_gaps_total", "Times that a replica's cache events were missed."),
    Metric(ROUTER, COUNTER, "router_cache_snapshots_total", "Snapshots of replicas' caches that came."),
    Metric(ROUTER, GAUGE, "router_replicas", "Replicas that this router knows, by state.",
            {"target_role": ROLES, "state": ("starting", "accepting", "draining", "unhealthy")}, unit="replicas"),
    Metric(ROUTER, COUNTER, "router_retries_total", "Tries that failed and were made again elsewhere, by error.",
            {"reason": ("replica_gone", "replica_hangs", "engine_dead", "overloaded", "prefill_lost")}),
    Metric(ROUTER, COUNTER, "router_pair_decisions_total", "Whether the prompt was to be handed over, by why.",
            {"reason": OPEN}, disaggregated=True),
    Metric(ROUTER, COUNTER, "router_hand_offs_total", "Hand-offs of finished tries; failed: computed at the decode "
            "replica instead.", {"outcome": ("transferred", "failed")}, disaggregated=True),
]  # fmt: skip

_OBSERVATORY = [
    Metric(OBSERVATORY, GAUGE, "autoscaler_replicas", "Replicas: running, wanted, and the bounds.",
            {"target_role": ROLES, "kind": ("running", "desired", "minimum", "maximum")}, unit="replicas"),
    Metric(OBSERVATORY, GAUGE, "autoscaler_pressure_ratio", "Load over what the replicas carry within the limits; "
            "above 1 asks for more.", {"target_role": ROLES, "signal": SIGNALS}, unit="ratio"),
    Metric(OBSERVATORY, COUNTER, "autoscaler_decisions_total", "Changes of the wanted number of replicas.",
            {"target_role": ROLES, "direction": ("up", "down")}),
    Metric(OBSERVATORY, GAUGE, "observatory_viewers", "Live views that are open."),
    Metric(OBSERVATORY, HISTOGRAM, "observatory_poll_duration_seconds", "Time to ask all routers for their state.",
            unit="seconds", buckets=STAGE),
]  # fmt: skip

METRICS: tuple[Metric, ...] = (*_EVERY, *_REPLICA, *_TRANSFER, *_REQUESTS, *_ROUTING, *_OBSERVATORY)
CATALOG: Mapping[str, Metric] = {metric.name: metric for metric in METRICS}
assert len(CATALOG) == len(METRICS), "a metric is in the catalogue twice"
