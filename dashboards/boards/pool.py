"""The board of the KV pools and their prefix caches: what fills them, what is reused, what is lost."""

from dashboards.board import (
    Board,
    Needs,
    Panel,
    Row,
    Shape,
    Thresholds,
    Unit,
    gauge,
    heatmap,
    quantiles,
    rate,
    ratio,
)
from dashboards.boards.fleet import EVENTS, POOL_LIMITS

L1 = {"tier": "L1"}
BY_REPLICA = ("role", "replica")
NAME = "{{role}} {{replica}}"

FULL = Row("Pool use", (
    Panel("Pool in use now",
        shows="Share of each replica's pool that a new request cannot take; evictable pages count as free.",
        act="Above 95 % for minutes: more replicas, a larger pool, or a lower max_running_requests.",
        queries={NAME: gauge("kv_pool_utilization_ratio", over="max", by=BY_REPLICA, where=L1)},
        shape=Shape.BARS, unit=Unit.RATIO, limits=POOL_LIMITS,
    ),
    Panel("Tokens by state",
        shows="Token slots of all pools: free, evictable (cached and unused), protected (cached and in use), "
              "reserved (taken, not yet in the cache), quarantined (of failed hand-offs).",
        act="Free near 0 is normal, the cache uses what is there. Evictable near 0: the pools are too small for the "
            "load.",
        queries={"{{state}}": gauge("kv_pool_tokens", by=["state"], where=L1)},
        shape=Shape.STACKED, unit=Unit.NUMBER,
    ),
    Panel("Pool in use",
        shows="The same share over time, by replica.",
        act="One replica far above the others: long requests or a favoured prefix; see Decisions on the routing board.",
        queries={NAME: gauge("kv_pool_utilization_ratio", over="max", by=BY_REPLICA, where=L1)},
        unit=Unit.RATIO, limits=POOL_LIMITS,
    ),
    Panel("Occupied",
        shows="Share of each pool that is not free; evictable pages count as occupied.",
        act="Far below 100 % after hours of traffic: the pool is larger than clients need.",
        queries={
            NAME: "1 - " + ratio(
                gauge("kv_pool_tokens", by=BY_REPLICA, where={**L1, "state": "free"}),
                gauge("kv_pool_tokens", by=BY_REPLICA, where=L1),
            ),
        },
        unit=Unit.RATIO,
    ),
    Panel("Pool size",
        shows="Capacity of all pools in tokens.",
        act="Lower than expected: memory was short when replicas started; see cache.mem_fraction_static.",
        queries={"tokens": gauge("kv_pool_capacity_tokens", where=L1)}, shape=Shape.STAT, unit=Unit.NUMBER, height=4,
    ),
    Panel("Quarantined tokens",
        shows="Token slots kept from use because the sender of a failed hand-off might still write to them.",
        act="Not 0 for minutes: see Oldest drain on the routing board and the runbook, QuarantineDoesNotEnd.",
        queries={NAME: gauge("kv_pool_tokens", by=BY_REPLICA, where={**L1, "state": "quarantined"})},
        unit=Unit.NUMBER,
    ),
    Panel("Pool memory",
        shows="Capacity of all pools in bytes, all ranks.",
        act="A fall without a change of settings: a replica is gone; see Replicas by state on the fleet board.",
        queries={"of all ranks": gauge("kv_pool_capacity_bytes", where=L1)},
        shape=Shape.STAT, unit=Unit.BYTES, height=4,
    ),
), is_open=True)  # fmt: skip

REUSE = Row("Reuse", (
    Panel("Reused share by tier",
        shows="Share of looked-up prompt tokens found in each tier.",
        act="Below the share of prompts that begin alike: compare the overlaps on the routing board, then evictions "
            "here.",
        queries={
            "{{tier}}": ratio(
                rate("cache_hit_tokens_total", by=["tier"]), rate("cache_lookup_tokens_total"), of_all=True
            ),
        },
        shape=Shape.STACKED, unit=Unit.RATIO,
    ),
    Panel("Reused share by replica",
        shows="The same for each replica.",
        act="One replica far below: it has just started, or the router spills onto it for its short queue.",
        queries={
            NAME: ratio(
                rate("cache_hit_tokens_total", by=BY_REPLICA), rate("cache_lookup_tokens_total", by=BY_REPLICA)
            ),
        },
        unit=Unit.RATIO,
    ),
    Panel("Tokens looked up and reused",
        shows="Prompt tokens looked up and found, per second.",
        act="Prefill has to compute the difference.",
        queries={"looked up": rate("cache_lookup_tokens_total"), "reused": rate("cache_hit_tokens_total")},
        unit=Unit.TOKENS_PER_S,
    ),
    Panel("Tree nodes",
        shows="Nodes of each replica's prefix tree.",
        act="Grows while Occupied stands still: many short branches; prompts differ early (a date at the start, say).",
        queries={NAME: gauge("cache_nodes", by=BY_REPLICA)}, unit=Unit.NUMBER,
    ),
))  # fmt: skip

LOST = Row("Evictions and retractions", (
    Panel("Evicted tokens",
        shows="Tokens that left the tiers of the caches, by reason; flush: by an operator's request.",
        act="Evictions are normal in a full pool; the panel to the right shows whether they hurt.",
        queries={"{{tier}} {{reason}}": rate("cache_evicted_tokens_total", by=["tier", "reason"])},
        shape=Shape.STACKED, unit=Unit.TOKENS_PER_S,
    ),
    Panel("Idle time of evicted nodes",
        shows="Time since the last use of nodes that were evicted for room.",
        act="Shorter than the pause between two turns of a chat: prefixes are lost that would be reused; enlarge "
            "pools.",
        queries=quantiles("cache_evicted_idle_seconds"), unit=Unit.SECONDS, needs=Needs.EVENT,
    ),
    Panel("Idle time of evicted nodes, distribution",
        shows="Number of evicted nodes by time since their last use.",
        act="Weight at the bottom: the cache thrashes; enlarge pools or add replicas.",
        queries={"{{le}}": heatmap("cache_evicted_idle_seconds")},
        shape=Shape.HEATMAP, unit=Unit.SECONDS, needs=Needs.EVENT,
    ),
    Panel("Retractions and failed allocations",
        shows="Running requests retracted to the queue, allocations that failed even after eviction, and looks at an "
            "idle pool that found pages lost.",
        act="Lasting: raise scheduler.new_token_ratio, lower max_running_requests, or enlarge the pool. lost: see the "
            "runbook, PagesLost.",
        queries={
            "{{replica}} retracted": rate("scheduler_retractions_total", by=["replica"]),
            "{{replica}} failed": rate("kv_pool_alloc_failures_total", by=["replica"]),
            "{{replica}} lost": rate("kv_pool_failed_checks_total", by=["replica"]),
        },
        unit=Unit.PER_S,
    ),
    Panel("Admission blocked",
        shows="1 while waiting requests of a replica cannot start: pool: no room for the next one; slots: as many run "
            "as may.",
        act="pool: enlarge it, or lower max_running_requests; slots: add replicas.",
        queries={"{{replica}} {{reason}}": gauge("admission_blocked", by=["replica", "reason"])}, unit=Unit.NUMBER,
    ),
    Panel("Tokens lost to retractions",
        shows="Tokens whose K/V was freed by retractions and may have to be computed again.",
        act="Against Tokens per second on the fleet board: above a few percent the pool is the bottleneck.",
        queries={"{{replica}}": rate("scheduler_retracted_tokens_total", by=["replica"])}, unit=Unit.TOKENS_PER_S,
    ),
    Panel("Requests by state",
        shows="Requests in replicas that are not running, by state.",
        act="waiting with a full pool: memory is the limit; with a free one: compute is. preallocating for long: the "
            "decode pool is full; handing_off grows with it.",
        queries={"{{state}}": gauge("scheduler_requests", by=["state"], where={"state": "!running"})},
        shape=Shape.STACKED,
    ),
))  # fmt: skip

LOWER = Row("Host memory and store (L2, L3)", (
    Panel("Tiers in use",
        shows="Bytes of cached pages in host memory (L2) and in the store (L3), and the size of the host tiers.",
        act="L2 far below its size after hours: cache.host_memory_bytes is larger than clients need. Full is normal.",
        queries={
            "{{tier}} used": gauge("tier_used_bytes", by=["tier"]),
            "L2 size": gauge("kv_pool_capacity_bytes", where={"tier": "L2"}),
        },
        unit=Unit.BYTES,
    ),
    Panel("Reused from lower tiers",
        shows="Prompt tokens per second that were loaded from host memory (L2) or the store (L3) instead of computed.",
        act="0 with traffic that repeats: nothing was written (Written into tiers), or loading is slower than "
            "computing (Skipped loads).",
        queries={"{{tier}}": rate("cache_hit_tokens_total", by=["tier"], where={"tier": "L2|L3"})},
        shape=Shape.STACKED, unit=Unit.TOKENS_PER_S,
    ),
    Panel("Prefill time saved",
        shows="Seconds of prefill saved in a second, all replicas together: computing less loading.",
        act="Near 0 while tokens are reused: the tiers are about as slow as computing; see the rates to the right.",
        queries={"saved": rate("tier_saved_seconds_total")}, unit=Unit.SECONDS,
    ),
    Panel("Written into tiers",
        shows="Tokens copied per second: to host memory (L2) and to the store (L3).",
        act="Far above what is reused: try cache.write_policy: write_through_selective, or adaptive.",
        queries={"{{tier}}": rate("tier_written_tokens_total", by=["tier"])}, unit=Unit.TOKENS_PER_S,
    ),
    Panel("Load speed",
        shows="Tokens read from each tier in a second of reading.",
        act="Below the prefill rate of a replica: that tier saves nothing, and is left out by itself.",
        # not ratio: series must exist while nothing is loaded, with NaN
        queries={
            "{{tier}}": f"({rate('tier_loaded_tokens_total', by=['tier'])} / "
                        f"{rate('tier_load_seconds_total', by=['tier'])})",
        },
        unit=Unit.PER_S, needs=Needs.EVENT,
    ),
    Panel("Copy time",
        shows="Seconds that replicas spend copying in a second, by tier and direction. L2 holds up the engine, L3 does "
              "not.",
        act="L2 above a few percent: prefer adaptive or write_through_selective (cache.write_policy).",
        queries={
            "{{tier}} write": rate("tier_write_seconds_total", by=["tier"]),
            "{{tier}} load": rate("tier_load_seconds_total", by=["tier"]),
        },
        unit=Unit.SECONDS,
    ),
    Panel("Wrong pages and failures",
        shows="Pages whose digest did not fit when they were read back, and reads and writes of the store that failed.",
        act="Any wrong page: memory or disk of that node is damaged; see the runbook, WrongPages.",
        queries={
            "{{replica}} wrong {{tier}}": rate("tier_wrong_pages_total", by=["replica", "tier"]),
            "{{replica}} store failed": rate("tier_store_errors_total", by=["replica"]),
        },
        unit=Unit.PER_S,
    ),
    Panel("Skipped loads",
        shows="Prompts per second that were computed although a tier had them, since loading was slower.",
        act="Often with a fast store: its latency is high, or its thread is busy writing.",
        queries={"{{replica}}": rate("tier_slow_loads_total", by=["replica"])}, unit=Unit.PER_S,
    ),
    Panel("Moved between replicas",
        shows="Tokens per second that replicas push to others (out) and take from others (in): those that leave to "
              "those that stay, and those that serve to new ones.",
        act="Much more out than in: the host tiers of those that stay are full of what is worth more.",
        queries={"{{direction}}": rate("tier_moved_tokens_total", by=["direction"])}, unit=Unit.TOKENS_PER_S,
    ),
    Panel("Clean tokens",
        shows="Tokens of the device pools that have a copy on the host: evicting them takes no time.",
        act="Near 0 with full pools: replicas find no idle time to copy in; evictions then wait for copies.",
        queries={NAME: gauge("tier_clean_tokens", by=BY_REPLICA)}, unit=Unit.NUMBER,
    ),
    Panel("Failing stores",
        shows="Replicas whose store cannot be used at present.",
        act="See the replica's log, and the runbook, StoreOff: a file system or a service that does not answer.",
        queries={"replicas": f"{gauge('tier_store_up', over='count')} - {gauge('tier_store_up')}"},
        shape=Shape.STAT, limits=Thresholds(1, 1), width=4, height=4,
    ),
))  # fmt: skip

POOL = Board(
    uid="manta-kv",
    title="Manta: KV pool and prefix cache",
    description="What fills the KV pools, what of it is reused, and what is lost.",
    rows=(FULL, REUSE, LOWER, LOST),
    annotations=EVENTS,
)
