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
    gpu: bool = False  # emitted only by a replica on a GPU

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

# a router adds its objectives to the bounds of these two: the share that meets one is then counted, not guessed
TTFT = (.001, .005, .01, .02, .04, .06, .08, .1, .15, .2, .25, .3, .4, .5, .75, 1, 1.5, 2, 2.5, 3, 4, 5, 7.5, 10, 20,
        40, 80, 160)  # fmt: skip
ITL = (.0001, .00025, .0005, .001, .0025, .005, .0075, .01, .015, .02, .025, .03, .04, .05, .075, .1, .15, .2, .3, .5,
       1, 2.5, 5, 10, 20, 40, 60)  # fmt: skip
DURATION = tuple(0.01 * 2**i for i in range(16))  # to 327.68 s
STAGE = (.0001, .0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60)  # fmt: skip
FAST = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, .001, .0025, .005, .01, .05)  # fmt: skip
TOKENS = (*(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5)), 1e6)
BATCH = tuple(float(2**i) for i in range(11))  # to 1,024
RATIO = (.01, .1, .2, .3, .4, .5, .6, .7, .8, .9, 1)  # fmt: skip
AGE = (.1, .5, 1, 5, 10, 30, 60, 300, 900, 3600, 14400)  # fmt: skip

TIERS = ("L1", "L2", "L3")  # the device's KV pool, the host tier, the store; a replica without one tells 0
DEVICE, SIZED, LOWER = TIERS[:1], TIERS[:2], TIERS[1:]
GROUPS = ("full", "window", "state")  # of layers: those that see all, those that do not, states; 0 where there are none
POOL_STATES = ("free", "evictable", "protected", "reserved", "quarantined")
TAKEN = ("protected", "reserved", "quarantined")  # states of tokens that a new request cannot have
BLOCKS = ("pool", "slots")
DRAFT_SOURCES = ("tree", "text")
PHASES = ("prefill", "decode")
BY_PHASE = "prefill: steps with prompts, running requests in them included; decode: all other steps."
STAGES = ("route", "queue", "prefill", "transfer", "decode")
# endpoints that run the model
ANSWERING = ("chat", "completions", "generate", "responses", "messages", "embeddings", "score")
ENDPOINTS = (*ANSWERING, "tokens")
OUTCOMES = ("ok", "error", "invalid", "cancelled", "shed", "timeout")  # of a request; the one list for all that tell it
FAILED = ("error", "shed", "timeout")  # outcomes in which the client did not get its answer
ROLES = ("unified", "prefill", "decode")
SIGNALS = ("queue", "kv_pool", "slots")
LINES = ("completed", "failed", "repeated")  # what becomes of a batch request
MISSES = ("changed", "reordered", "time_stamp", "evicted", "elsewhere", "salt", "tenant", "adapter", "page", "part",
          "restarted", "never_seen")  # why a prompt was not cached: routing/why.py  # fmt: skip
FINISHES = ("stop", "length", "abort", "error")


_EVERY = [
    Metric(Process.EVERY, GAUGE, "build_info", "Always 1; versions as labels.", {"version": OPEN, "ray": OPEN},
            unit="info"),
    Metric(Process.EVERY, COUNTER, "process_cpu_seconds_total", "CPU time of this process, user and system; of a "
            "replica with several ranks, that of its first."),
    Metric(Process.EVERY, GAUGE, "process_resident_memory_bytes", "Memory of this process that is in RAM.",
            unit="bytes"),
    Metric(Process.EVERY, GAUGE, "process_start_time_seconds", "When this process started, in seconds since 1970.",
            unit="seconds"),
    Metric(Process.EVERY, GAUGE, "process_open_fds", "Open file descriptors of this process."),
    Metric(Process.EVERY, GAUGE, "process_max_fds", "File descriptors that this process may open."),
]  # fmt: skip

_REPLICA = [
    Metric(REPLICA, GAUGE, "replica_info", "Always 1; static facts of this replica, for joins.",
            {"node": OPEN, "accelerator": OPEN, "attention": OPEN, "tensor_parallel": OPEN, "page_size_tokens": OPEN,
             "num_pages": OPEN, "dtype": OPEN, "quantization": OPEN, "context_len_tokens": OPEN, "kv_dtype": OPEN,
             "transfer_backend": OPEN}, unit="info"),
    Metric(REPLICA, GAUGE, "replica_device_memory_bytes", "Memory of this replica's GPU (of its first rank). "
            "used: by all processes; own: reserved by this one.", {"device": OPEN,
            "kind": ("total", "used", "own")}, unit="bytes", gpu=True),
    Metric(REPLICA, COUNTER, "replica_device_alloc_retries_total", "Times that PyTorch's allocator found no memory on "
            "that GPU, gave back what it had cached, and asked again: a step waits for it.", {"device": OPEN},
            gpu=True),
    Metric(REPLICA, GAUGE, "replica_device_utilization_ratio", "Share of the last moment (up to a second) in which "
            "that GPU ran kernels; only where NVML's Python package is installed.", {"device": OPEN}, unit="ratio",
            gpu=True),
    Metric(REPLICA, GAUGE, "replica_start_seconds", "Duration of this replica's start, by phase.",
            {"phase": ("load_weights", "warm_up", "total")}, unit="seconds"),
    Metric(REPLICA, GAUGE, "scheduler_requests", "Requests in this replica, by state; each is in one. "
            "preallocating: decode legs that wait for pages; receiving: decode legs that wait for K/V; handing_off: "
            "prefill legs that wait for their receiver, send their last pages, or drain.",
            {"state": ("waiting", "running", "preallocating", "receiving", "handing_off")}, unit="requests"),
    Metric(REPLICA, GAUGE, "scheduler_running_limit_requests", "Most requests that can run at once.", unit="requests"),
    Metric(REPLICA, GAUGE, "scheduler_queued_tokens",
            "Prompt tokens in the queue that are in no cache and have to be computed.", unit="tokens"),
    Metric(REPLICA, GAUGE, "admission_blocked", "1 while waiting requests cannot start: the pool has no room for the "
            "next one (pool), or the limit of running requests is reached (slots).", {"reason": BLOCKS}),
    Metric(REPLICA, HISTOGRAM, "scheduler_batch_requests", f"Requests of one forward step. {BY_PHASE}",
            {"phase": PHASES}, unit="requests", buckets=BATCH),
    Metric(REPLICA, HISTOGRAM, "scheduler_batch_tokens", "New tokens of one forward step, those of drafts "
            f"included. {BY_PHASE}",
            {"phase": PHASES}, unit="tokens", buckets=TOKENS),
    Metric(REPLICA, HISTOGRAM, "scheduler_step_duration_seconds", f"Duration of one forward step. {BY_PHASE} "
            "A decode step makes a token of each running request, and those of drafts that came true.",
            {"phase": PHASES}, unit="seconds", buckets=STAGE),
    Metric(REPLICA, COUNTER, "scheduler_mixed_steps_total",
            "Prefill steps in which running requests got a token too."),
    Metric(REPLICA, COUNTER, "scheduler_tokens_total", "Tokens computed, reused from the cache, and generated.",
            {"kind": ("prefill_computed", "prefill_cached", "decode")}),
    Metric(REPLICA, COUNTER, "scheduler_constrained_requests_total",
            "Requests whose output is held to a schema, a regular expression or a grammar."),
    Metric(REPLICA, COUNTER, "scheduler_forced_tokens_total",
            "Tokens of constrained outputs that were taken without a choice, as the grammar allowed no other."),
    Metric(REPLICA, COUNTER, "scheduler_draft_tokens_total",
            "Guessed tokens that decode steps tried. tree: of an answer that the cache keeps to the same prompt; text: "
            "out of the request's own prompt and output. Those accepted are what the model draws, and came without a "
            "step of their own; those rejected cost a row each.",
            {"source": DRAFT_SOURCES, "outcome": ("accepted", "rejected")}),
    Metric(REPLICA, COUNTER, "scheduler_busy_seconds_total",
            f"Time spent in forward steps; its rate is the busy share. {BY_PHASE}", {"phase": PHASES}),
    Metric(REPLICA, COUNTER, "scheduler_retractions_total",
            "Running requests retracted to the queue because the pool was full."),
    Metric(REPLICA, COUNTER, "scheduler_retracted_tokens_total", "Tokens whose K/V was freed by retractions."),
    Metric(REPLICA, COUNTER, "scheduler_failed_steps_total", "Steps that failed with an error and did not end the "
            "replica: requests that fail alone too end, with 500; the others have their tokens."),
    Metric(REPLICA, COUNTER, "scheduler_finished_requests_total", "Requests that ended in this replica, by outcome; "
            "cancelled: by the client, by the router, or at their deadline.",
            {"outcome": ("ok", "cancelled", "error")}),
    Metric(REPLICA, GAUGE, "kv_pool_capacity_tokens", "Size of the pool in tokens.", {"tier": SIZED}, unit="tokens"),
    Metric(REPLICA, GAUGE, "kv_pool_capacity_bytes", "Size of the pool in bytes, all ranks.", {"tier": SIZED},
            unit="bytes"),
    Metric(REPLICA, GAUGE, "kv_pool_tokens", "Token slots by state; the states sum to the capacity.",
            {"tier": DEVICE, "state": POOL_STATES}, unit="tokens"),
    Metric(REPLICA, GAUGE, "kv_pool_utilization_ratio",
            "Share of the pool that a new request cannot take: protected, reserved and quarantined.", {"tier": DEVICE},
            unit="ratio"),
    Metric(REPLICA, COUNTER, "kv_pool_alloc_failures_total", "Allocations that failed even after eviction.",
            {"tier": DEVICE}),
    Metric(REPLICA, COUNTER, "kv_pool_failed_checks_total", "Looks at an idle pool, about two a second, that found "
            "pages neither free nor evictable, or rows of the request table taken: lost.", {"tier": DEVICE}),
    Metric(REPLICA, COUNTER, "cache_lookup_tokens_total", "Prompt tokens looked up in the prefix cache."),
    Metric(REPLICA, COUNTER, "cache_hit_tokens_total", "Prompt tokens that were reused, by tier.", {"tier": TIERS}),
    Metric(REPLICA, COUNTER, "cache_evicted_tokens_total", "Tokens that left a tier of the prefix cache, by reason; "
            "those of L1 may be in L2 then.", {"tier": SIZED, "reason": ("capacity", "flush")}),
    Metric(REPLICA, HISTOGRAM, "cache_evicted_idle_seconds",
            "Time since the last use of nodes evicted for room; small values mean the pool is too small.",
            {"tier": DEVICE}, unit="seconds", buckets=AGE),
    Metric(REPLICA, GAUGE, "cache_nodes", "Nodes of the prefix tree.", {"tier": DEVICE}),
    Metric(REPLICA, GAUGE, "cache_group_capacity_bytes", "Size of each group's pool in bytes, all ranks: K and V of "
            "layers that see all (full), of those that see a window, and snapshots of states, which lie in the pool of "
            "full where that has bytes: what they would take if they had all of it.", {"group": GROUPS},
            unit="bytes"),
    Metric(REPLICA, GAUGE, "cache_group_used_bytes", "Bytes of each group's pool that are not free.",
            {"group": GROUPS}, unit="bytes"),
    Metric(REPLICA, GAUGE, "cache_group_parts", "Pages that are not free, and of them those that have a part in the "
            "window pool, or a snapshot behind them.", {"group": GROUPS}),
    Metric(REPLICA, GAUGE, "cache_group_holes", "Pages that are not free and have no part in that group: no request "
            "goes on behind them.", {"group": GROUPS}),
    Metric(REPLICA, COUNTER, "cache_group_evicted_parts_total", "Parts that went for room, by group; of full: pages.",
            {"group": GROUPS}),
]  # fmt: skip

_TIERS = [
    Metric(REPLICA, GAUGE, "tier_used_bytes", "Bytes of cached pages under the device pool. L3: of the whole store, "
            "which replicas may share.", {"tier": LOWER}, unit="bytes"),
    Metric(REPLICA, GAUGE, "tier_clean_tokens", "Tokens of the device pool that have a copy on the host: evicting "
            "them costs no copy.", unit="tokens"),
    Metric(REPLICA, COUNTER, "tier_written_tokens_total", "Tokens copied into a tier: L2 from the device, L3 from the "
            "host.", {"tier": LOWER}),
    Metric(REPLICA, COUNTER, "tier_write_seconds_total", "Time spent writing into a tier; of background "
            "copies (L2, one GPU), to start them.", {"tier": LOWER}),
    Metric(REPLICA, COUNTER, "tier_loaded_tokens_total", "Tokens read from a tier: L2 to the device, L3 to the host; "
            "what came from L3 and was used is in both.", {"tier": LOWER}),
    Metric(REPLICA, COUNTER, "tier_load_seconds_total", "Time spent reading from a tier.", {"tier": LOWER}),
    Metric(REPLICA, COUNTER, "tier_saved_seconds_total", "Time that computing the loaded prompt tokens would have "
            "taken, less what loading them took."),
    Metric(REPLICA, COUNTER, "tier_moved_tokens_total", "Tokens that replicas push to the host tiers of others when "
            "they leave, or when another is new.", {"direction": ("out", "in")}),
    Metric(REPLICA, COUNTER, "tier_wrong_pages_total", "Pages read back whose digest was not that of what was "
            "written; they are dropped and computed.", {"tier": LOWER}),
    Metric(REPLICA, COUNTER, "tier_slow_loads_total", "Prompts that were computed although a tier had them: loading "
            "was slower, or not over in time."),
    Metric(REPLICA, COUNTER, "tier_store_errors_total", "Reads and writes of the store that failed, or hung."),
    Metric(REPLICA, GAUGE, "tier_store_up", "0 while the store is configured and cannot be used, or hangs, else 1."),
]  # fmt: skip

_ADAPTERS = [
    Metric(REPLICA, GAUGE, "adapters_held", "Adapters (LoRA) that this replica holds."),
    Metric(REPLICA, GAUGE, "adapters_held_bytes", "Memory that they take.", unit="bytes"),
    Metric(REPLICA, COUNTER, "adapter_loads_total", "Adapters that were loaded, since a request asked for them."),
    Metric(REPLICA, COUNTER, "adapter_drops_total", "Adapters that were dropped for the room of others."),
    Metric(REPLICA, GAUGE, "adapter_load_seconds", "Time to load an adapter, smoothed; 0 until one was loaded.",
            unit="seconds"),
    Metric(ROUTER, COUNTER, "adapter_requests_total", "Requests for each adapter, by the name that they used, counted "
            "at their end; others: of all names but the first 100.", {"adapter": OPEN}),
    Metric(ROUTER, COUNTER, "adapter_tokens_total", "Tokens of requests for each adapter: of prompts, cached ones too, "
            "and of outputs; others: of all names but the first 100.", {"adapter": OPEN, "kind": ("input", "output")}),
]  # fmt: skip

_TRANSFER = [
    Metric(REPLICA, COUNTER, "transfers_total", "KV transfers that ended in this replica, by outcome.",
            {"direction": ("send", "receive"), "outcome": ("ok", "error")}, disaggregated=True),
    Metric(REPLICA, COUNTER, "transfer_bytes_total", "K/V bytes moved.", {"direction": ("send", "receive")},
            disaggregated=True),
    Metric(REPLICA, HISTOGRAM, "transfer_duration_seconds",
            "Parts of a KV transfer: grant (until the receiver had a row and pages, or gave up), wait (from then until "
            "all pages had arrived, or it failed), post (processor time) and wire of one NIXL write.",
            {"phase": ("grant", "wait", "post", "wire")}, unit="seconds", buckets=STAGE, disaggregated=True),
    Metric(REPLICA, GAUGE, "transfers_in_flight", "KV transfers in progress; draining: failed, and their pages are "
            "not yet safe to reuse.", {"direction": ("send", "receive", "draining")}, disaggregated=True),
    Metric(REPLICA, GAUGE, "transfer_oldest_drain_seconds", "Age of the oldest draining KV transfer.",
            unit="seconds", disaggregated=True),
    Metric(REPLICA, GAUGE, "transfer_peers", "Replicas to which this one is connected for KV transfers.",
            disaggregated=True),
    Metric(REPLICA, COUNTER, "transfer_digest_mismatches_total",
            "Received pages whose digest was not that of the sent page.", disaggregated=True),
    Metric(REPLICA, COUNTER, "transfer_late_messages_total", "Messages dropped because their room had ended or "
            "they could not be read.", disaggregated=True),
]  # fmt: skip

_REQUESTS = [
    Metric(ROUTER, COUNTER, "requests_total", "Requests that ended, by outcome; invalid: the client's mistake; shed: "
            "refused because all queues were too long, or its key had too many choices.",
            {"endpoint": ENDPOINTS, "outcome": OUTCOMES}),
    Metric(ROUTER, COUNTER, "request_finishes_total", "Answers that ended in the engines, by reason; a request with "
            "n: 2 has two.", {"reason": FINISHES}),
    Metric(ROUTER, COUNTER, "http_responses_total", "HTTP responses to requests, by status; 499: the client left "
            "before one.", {"status": OPEN}),
    Metric(ROUTER, GAUGE, "requests_in_flight", "Requests received whose answers have not ended.",
            {"endpoint": ANSWERING}),
    Metric(ROUTER, HISTOGRAM, "time_to_first_token_seconds", "Time from a request's arrival to its first output token, "
            "counted at that token.", {"endpoint": ANSWERING}, unit="seconds", buckets=TTFT),
    Metric(ROUTER, HISTOGRAM, "inter_token_latency_seconds", "Time between the deltas of one answer, per token.",
            unit="seconds", buckets=ITL),
    Metric(ROUTER, HISTOGRAM, "time_per_output_token_seconds", "Mean time between the tokens of one answer, for "
            "requests that ended ok with more than one token.", unit="seconds", buckets=ITL),
    Metric(ROUTER, HISTOGRAM, "request_duration_seconds", "Time from a request's arrival to its end, for requests that "
            "ended ok.", {"endpoint": ENDPOINTS}, unit="seconds", buckets=DURATION),
    Metric(ROUTER, HISTOGRAM, "request_stage_duration_seconds", "Time in each stage, for requests that ended "
            "ok.", {"stage": STAGES}, unit="seconds", buckets=STAGE),
    Metric(ROUTER, HISTOGRAM, "request_prompt_tokens", "Prompt length of requests that ended ok.",
            unit="tokens", buckets=TOKENS),
    Metric(ROUTER, HISTOGRAM, "request_output_tokens", "Answer length of requests that ended ok.",
            unit="tokens", buckets=TOKENS),
    Metric(ROUTER, COUNTER, "slo_requests_total", "Requests judged against each objective. Met: the "
            "first token, or the mean gap, was in time. An error, a timeout or a refusal misses ttft before the first "
            "token and itl after it. Cancelled and invalid requests are not judged.",
            {"slo": ("ttft", "itl"), "met": ("true", "false")}),
    Metric(ROUTER, GAUGE, "slo_objective_seconds", "The configured objectives: of the first token, and of the mean gap "
            "between tokens.", {"slo": ("ttft", "itl")}, unit="seconds"),
]  # fmt: skip

_ROUTING = [
    Metric(ROUTER, COUNTER, "router_decisions_total", "Routing decisions, by policy and reason.",
            {"policy": OPEN, "reason": OPEN}),
    Metric(ROUTER, HISTOGRAM, "router_decision_duration_seconds", "Duration of one routing decision.", unit="seconds",
            buckets=FAST),
    Metric(ROUTER, COUNTER, "router_prompt_tokens_total", "Prompt tokens of requests, counted at the first token like "
            "the three metrics that follow."),
    Metric(ROUTER, COUNTER, "router_best_overlap_tokens_total", "Prefix tokens that the best candidate held."),
    Metric(ROUTER, COUNTER, "router_predicted_overlap_tokens_total", "Prefix tokens expected at the chosen replica."),
    Metric(ROUTER, COUNTER, "router_actual_overlap_tokens_total", "Prefix tokens that the chosen replica reused."),
    Metric(ROUTER, HISTOGRAM, "router_overlap_error_ratio", "Difference of predicted and actual prefix as a share "
            "of the prompt; sign: the prediction was over, under, or exact.",
            {"sign": ("over", "under", "exact")}, unit="ratio", buckets=RATIO),
    Metric(ROUTER, HISTOGRAM, "router_ttft_error_seconds", "Difference of predicted and actual time to first token.",
            {"sign": ("over", "under")}, unit="seconds", buckets=STAGE),
    Metric(ROUTER, GAUGE, "router_index_tokens", "Tokens in the prefix index per replica: confirmed by its "
            "events, or expected from decisions.", {"target": OPEN, "source": ("confirmed", "expected")},
            unit="tokens"),
    Metric(ROUTER, GAUGE, "router_report_age_seconds", "Age of a replica's newest report, a step in progress "
            "included; before its first report, time since the router learnt of it.", {"target": OPEN},
            unit="seconds"),
    Metric(ROUTER, COUNTER, "router_cache_event_gaps_total", "Times that cache events of a replica were missed."),
    Metric(ROUTER, COUNTER, "router_cache_snapshots_total", "Snapshots of replicas' caches received."),
    Metric(ROUTER, GAUGE, "router_replicas", "Replicas that this router knows, by state; released: their memory "
            "is given back; silent: no report comes.", {"target_role": ROLES, "state": ("starting", "accepting",
            "draining", "released", "silent", "unhealthy")}, unit="replicas"),
    Metric(ROUTER, COUNTER, "router_retries_total",
            "Attempts that failed and were retried on another replica, by error.",
            {"reason": ("replica_gone", "replica_hangs", "engine_dead", "died_in_step", "step_failed", "overloaded",
            "prefill_lost")}),
    Metric(ROUTER, COUNTER, "requests_moved_total", "Requests that waited and went to a replica that begins them "
            "sooner: join: it has come since; freed: it is free; silent, behind: the other one says nothing, or is "
            "slower than was estimated.", {"reason": ("join", "freed", "silent", "behind")}),
    Metric(ROUTER, COUNTER, "router_uncached_requests_total", "Answers that reused fewer prompt tokens than they could "
            "have, by cause (`manta why`).", {"cause": MISSES}),
    Metric(ROUTER, COUNTER, "router_uncached_tokens_total", "Prompt tokens that were computed for these causes.",
            {"cause": MISSES}, unit="tokens"),
    Metric(ROUTER, GAUGE, "router_streams_detached", "Streams without a connection that wait for their clients."),
    Metric(ROUTER, COUNTER, "router_streams_resumed_total", "Clients that came back to a stream: it was kept, its "
            "request goes on where a replica remembers it to have been (recalled), or runs again.",
            {"how": ("kept", "recalled", "again")}),
    Metric(ROUTER, COUNTER, "router_streams_expired_total", "Streams that were given up, with something for a client "
            "that did not come back within 30 s."),
    Metric(ROUTER, GAUGE, "router_keys_file_failed", "1: router.keys_file has changed and cannot be used, or is gone; "
            "the keys from before stay in force."),
    Metric(ROUTER, COUNTER, "tenant_requests_total", "Requests of each tenant of router.keys_file that were sent to a "
            "replica, counted at their end; others: of all tenants but the first 100.", {"tenant": OPEN}),
    Metric(ROUTER, COUNTER, "tenant_tokens_total", "Tokens of each tenant: prompt tokens that no cache had, and output "
            "tokens; others: of all tenants but the first 100.", {"tenant": OPEN, "kind": ("input", "output")}),
    Metric(ROUTER, GAUGE, "router_batch_lines_running", "Batch requests that this router has begun and that have no "
            "answer yet; no other count of requests has them."),
    Metric(ROUTER, GAUGE, "router_batches_stalled", "Batches that wait because router.batch_folder cannot keep what "
            "their lines became, or cannot be read; where it cannot be looked into, one more."),
    Metric(ROUTER, COUNTER, "router_batch_lines_total", "Batch requests that ran: completed, failed (an entry of the "
            "error file), or repeated: there was no room for it, and it is run again.", {"outcome": LINES}),
    Metric(ROUTER, COUNTER, "router_fetches_total", "Fetches of cached pages from another replica; error: what was "
            "missing was computed.", {"outcome": ("ok", "error")}),
    Metric(ROUTER, COUNTER, "router_fetched_tokens_total", "Prompt tokens whose pages came from another replica."),
    Metric(ROUTER, COUNTER, "router_fetch_seconds_total", "Seconds from the arrival of requests at a replica until "
            "their fetches had ended, well or not."),
    Metric(ROUTER, COUNTER, "router_pair_decisions_total", "Decisions whether to hand the prompt over, by reason.",
            {"reason": OPEN}, disaggregated=True),
    Metric(ROUTER, COUNTER, "router_kv_transfers_total", "KV transfers of finished attempts; error: the decode replica "
            "computed the prompt itself.", {"outcome": ("ok", "error")}, disaggregated=True),
]  # fmt: skip

_OBSERVATORY = [
    Metric(OBSERVATORY, GAUGE, "autoscaler_replicas", "Number of replicas: running, desired, minimum and maximum.",
            {"target_role": ROLES, "kind": ("running", "desired", "minimum", "maximum")}, unit="replicas"),
    Metric(OBSERVATORY, GAUGE, "autoscaler_pressure_ratio", "Load divided by what the replicas can carry within the "
            "limits; above 1 asks for more replicas.", {"target_role": ROLES, "signal": SIGNALS}, unit="ratio"),
    Metric(OBSERVATORY, COUNTER, "autoscaler_decisions_total", "Changes of the desired number of replicas.",
            {"target_role": ROLES, "direction": ("up", "down")}),
    Metric(OBSERVATORY, COUNTER, "replica_deaths_total", "Replicas that died: their process or connection ended, they "
            "hung or failed. Those that Serve stopped do not count.", {"target_role": ROLES}),
    Metric(OBSERVATORY, GAUGE, "observatory_viewers", "Live views that poll."),
    Metric(OBSERVATORY, HISTOGRAM, "observatory_poll_duration_seconds", "Time to ask all routers for their state.",
            unit="seconds", buckets=STAGE),
]  # fmt: skip

METRICS: tuple[Metric, ...] = (
    *_EVERY, *_REPLICA, *_TIERS, *_ADAPTERS, *_TRANSFER, *_REQUESTS, *_ROUTING, *_OBSERVATORY,
)  # fmt: skip
CATALOG: Mapping[str, Metric] = {metric.name: metric for metric in METRICS}
assert len(CATALOG) == len(METRICS), "a metric is in the catalogue twice"
