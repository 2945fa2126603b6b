"""The board of the KV pools and their prefix caches: what fills them, what is reused, what is lost."""

from dashboards.board import Board, Needs, Panel, Row, Shape, Thresholds, Unit, gauge, quantiles, rate, ratio
from dashboards.boards.fleet import EVENTS, POOL_LIMITS

BY_REPLICA = ("role", "replica")

FULL = Row("Pool use", (
    Panel("Pool in use now", gauge("kv_pool_utilization_ratio", *BY_REPLICA, over="max", tier="L1"), Unit.RATIO,
        "Share of each replica's pool that a new request cannot take; evictable pages count as free.",
        "Above 95 % for minutes: more replicas, a larger pool, or a lower max_running_requests.",
        shape=Shape.BARS, limits=POOL_LIMITS),
    Panel("Tokens by state", gauge("kv_pool_tokens", "state", tier="L1"), Unit.NUMBER,
        "Token slots of all pools: free, evictable (cached and unused), protected (cached and in use), reserved "
          "(taken, not yet in the cache), quarantined (of failed KV transfers).",
        "Free near 0 is normal, the cache uses what is there. Evictable near 0: the pools are too small for the load.",
        shape=Shape.STACKED),
    Panel("Pool in use", gauge("kv_pool_utilization_ratio", *BY_REPLICA, over="max", tier="L1"), Unit.RATIO,
        "The same share over time, by replica.",
        "One replica far above the others: long requests or a favoured prefix; see Decisions on the routing board.",
        limits=POOL_LIMITS),
    Panel("Occupied",
        "1 - " + ratio(gauge("kv_pool_tokens", *BY_REPLICA, tier="L1", state="free"),
                       gauge("kv_pool_tokens", *BY_REPLICA, tier="L1")), Unit.RATIO,
        "Share of each pool that is not free; evictable pages count as occupied.",
        "Far below 100 % after hours of traffic: the pool is larger than clients need."),
    Panel("Pool size", {"tokens": gauge("kv_pool_capacity_tokens", tier="L1")}, Unit.NUMBER,
        "Capacity of all pools in tokens.",
        "Lower than expected: memory was short when replicas started; see cache.mem_fraction_static.",
        shape=Shape.STAT, height=4),
    Panel("Quarantined tokens", gauge("kv_pool_tokens", *BY_REPLICA, tier="L1", state="quarantined"), Unit.NUMBER,
        "Token slots kept from use because the sender of a failed KV transfer might still write to them.",
        "Not 0 for minutes: see Oldest drain on the routing board and the runbook, QuarantineDoesNotEnd."),
    Panel("Pool memory", {"of all ranks": gauge("kv_pool_capacity_bytes", tier="L1")}, Unit.BYTES,
        "Capacity of all pools in bytes, all ranks.",
        "A fall without a change of settings: a replica is gone; see Replicas by state on the fleet board.",
        shape=Shape.STAT, height=4),
), is_open=True)  # fmt: skip

REUSE = Row("Reuse", (
    Panel("Reused share by tier",
        ratio(rate("cache_hit_tokens_total", "tier"), rate("cache_lookup_tokens_total"), of_all=True), Unit.RATIO,
        "Share of looked-up prompt tokens found in each tier.",
        "Below the share of prompts that begin alike: compare the overlaps on the routing board, then evictions here.",
        shape=Shape.STACKED),
    Panel("Reused share by replica",
        ratio(rate("cache_hit_tokens_total", *BY_REPLICA), rate("cache_lookup_tokens_total", *BY_REPLICA)), Unit.RATIO,
        "The same for each replica.",
        "One replica far below: it has just started, or the router spills onto it for its short queue."),
    Panel("Tokens looked up and reused",
        {"looked up": rate("cache_lookup_tokens_total"), "reused": rate("cache_hit_tokens_total")}, Unit.TOKENS_PER_S,
        "Prompt tokens looked up and found, per second.",
        "Prefill has to compute the difference."),
    Panel("Tree nodes", gauge("cache_nodes", *BY_REPLICA), Unit.NUMBER,
        "Nodes of each replica's prefix tree.",
        "Grows while Occupied stands still: many short branches; prompts differ early (a date at the start, say)."),
    Panel("Memory by group", {
        "{{group}} used": gauge("cache_group_used_bytes", "group"),
        "{{group}} size": gauge("cache_group_capacity_bytes", "group"),
    }, Unit.BYTES,
        "What the caches hold in layers that see all (full), in those that see a window, and in snapshots of states.",
        "window full while full is not: windows go first, and hits end there; see Holes. state lies in full's pool."),
    Panel("Holes and snapshots", {
        "pages without a window": gauge("cache_group_holes", group="window"),
        "pages with a window": gauge("cache_group_parts", group="window"),
        "snapshots": gauge("cache_group_parts", group="state"),
    }, Unit.NUMBER,
        "Pages whose window part is gone or there, and copies of recurrent states that a request can go on from.",
        "Hits fall while few pages are evicted: manta explain says what ended them (gone)."),
    Panel("Evicted parts", rate("cache_group_evicted_parts_total", "group"), Unit.PER_S,
        "Pages (full), window parts and snapshots that went for room, per second.",
        "window far above full: its pool is too small for the texts that come back; give more memory, as for state."),
))  # fmt: skip

LOST = Row("Evictions and retractions", (
    Panel("Evicted tokens", rate("cache_evicted_tokens_total", "tier", "reason"), Unit.TOKENS_PER_S,
        "Tokens that left the tiers of the caches, by reason; flush: by an operator's request.",
        "Evictions are normal in a full pool; the panel to the right shows whether they hurt.", shape=Shape.STACKED),
    Panel("Idle time of evicted nodes", quantiles("cache_evicted_idle_seconds"), Unit.SECONDS,
        "Time since the last use of nodes that were evicted for room.",
        "Shorter than the pause between two turns of a chat: prefixes are lost that would be reused; enlarge pools.",
        needs=Needs.EVENT),
    Panel("Retractions and failed allocations", {
        "{{replica}} retracted": rate("scheduler_retractions_total", "replica"),
        "{{replica}} failed": rate("kv_pool_alloc_failures_total", "replica"),
        "{{replica}} lost": rate("kv_pool_failed_checks_total", "replica"),
        "{{replica}} failed step": rate("scheduler_failed_steps_total", "replica"),
    }, Unit.PER_S,
        "Running requests retracted to the queue, allocations that failed even after eviction, looks at an idle "
          "pool that found pages lost, and steps that failed.",
        "Lasting: lower scheduler.max_running_requests, or enlarge the pool. lost, failed "
          "step: see the runbook, PagesLost and StepsFail."),
    Panel("Admission blocked", gauge("admission_blocked", "replica", "reason"), Unit.NUMBER,
        "1 while waiting requests of a replica cannot start: pool: no room for the next one; slots: as many run as "
          "may.",
        "pool: enlarge it, or lower max_running_requests; slots: add replicas."),
    Panel("Tokens lost to retractions", rate("scheduler_retracted_tokens_total", "replica"), Unit.TOKENS_PER_S,
        "Tokens whose K/V was freed by retractions and may have to be computed again.",
        "Against Tokens per second on the fleet board: above a few percent the pool is the bottleneck."),
    Panel("Requests by state", gauge("scheduler_requests", "state", state="!running"), Unit.COUNT,
        "Requests in replicas that are not running, by state.",
        "waiting with a full pool: memory is the limit; with a free one: compute is. preallocating for long: the "
          "decode pool is full; handing_off grows with it.", shape=Shape.STACKED),
))  # fmt: skip

LOWER = Row("Host memory and store (L2, L3)", (
    Panel("Tiers in use", {
        "{{tier}} used": gauge("tier_used_bytes", "tier"),
        "L2 size": gauge("kv_pool_capacity_bytes", tier="L2"),
    }, Unit.BYTES,
        "Bytes of cached pages in host memory (L2) and in the store (L3), and the size of the host tiers.",
        "L2 far below its size after hours: cache.host_memory_bytes is larger than clients need. Full is normal."),
    Panel("Reused from lower tiers", rate("cache_hit_tokens_total", "tier", tier="L2|L3"), Unit.TOKENS_PER_S,
        "Prompt tokens per second that were loaded from host memory (L2) or the store (L3) instead of computed.",
        "0 with traffic that repeats: nothing was written (Written into tiers), or loading is slower than computing "
          "(Skipped loads).", shape=Shape.STACKED),
    Panel("Prefill time saved", {"saved": rate("tier_saved_seconds_total")}, Unit.SECONDS,
        "Seconds of prefill saved in a second, all replicas together: computing less loading.",
        "Near 0 while tokens are reused: the tiers are about as slow as computing; see the rates to the right."),
    Panel("Written into tiers", rate("tier_written_tokens_total", "tier"), Unit.TOKENS_PER_S,
        "Tokens copied per second: to host memory (L2) and to the store (L3).",
        "Far above what is reused: the host memory is too small for what comes back; enlarge it, or leave it out."),
    # not ratio: series must exist while nothing is loaded, with NaN
    Panel("Load speed",
        f"({rate('tier_loaded_tokens_total', 'tier')} / {rate('tier_load_seconds_total', 'tier')})", Unit.PER_S,
        "Tokens read from each tier in a second of reading.",
        "Below the prefill rate of a replica: that tier saves nothing, and is left out by itself.", needs=Needs.EVENT),
    Panel("Copy time", {
        "{{tier}} write": rate("tier_write_seconds_total", "tier"),
        "{{tier}} load": rate("tier_load_seconds_total", "tier"),
    }, Unit.SECONDS,
        "Seconds that replicas spend copying in a second, by tier and direction. L2 holds up the engine, L3 does not.",
        "L2 above a few percent: the host memory is too small for what comes back; enlarge it, or leave it out."),
    Panel("Wrong pages and failures", {
        "{{replica}} wrong {{tier}}": rate("tier_wrong_pages_total", "replica", "tier"),
        "{{replica}} store failed": rate("tier_store_errors_total", "replica"),
    }, Unit.PER_S,
        "Pages whose digest did not fit when they were read back, and reads and writes of the store that failed.",
        "Any wrong page: memory or disk of that node is damaged; see the runbook, WrongPages."),
    Panel("Skipped loads", rate("tier_slow_loads_total", "replica"), Unit.PER_S,
        "Prompts per second that were computed although a tier had them, since loading was slower.",
        "Often with a fast store: its latency is high, or its thread is busy writing."),
    Panel("Moved between replicas", rate("tier_moved_tokens_total", "direction"), Unit.TOKENS_PER_S,
        "Tokens per second that replicas push to others (out) and take from others (in): those that leave to those "
          "that stay, and those that serve to new ones.",
        "Much more out than in: the host tiers of those that stay are full of what is worth more."),
    Panel("Clean tokens", gauge("tier_clean_tokens", *BY_REPLICA), Unit.NUMBER,
        "Tokens of the device pools that have a copy on the host: evicting them takes no time.",
        "Near 0 with full pools: replicas find no idle time to copy in; evictions then wait for copies."),
    Panel("Failing stores",
        {"replicas": f"{gauge('tier_store_up', over='count')} - {gauge('tier_store_up')}"}, Unit.COUNT,
        "Replicas whose store cannot be used at present.",
        "See the replica's log, and the runbook, StoreOff: a file system or a service that does not answer.",
        shape=Shape.STAT, limits=Thresholds(1, 1), width=4, height=4),
))  # fmt: skip

POOL = Board(
    uid="manta-kv",
    title="Manta: KV pool and prefix cache",
    description="What fills the KV pools, what of it is reused, and what is lost.",
    rows=(FULL, REUSE, LOWER, LOST),
    annotations=EVENTS,
)
