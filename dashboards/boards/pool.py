"""The board of the KV pools and the prefix caches in them: what fills them, what is reused, what is lost."""

from dashboards.board import KIT, Board, Limits, Line, Needs, Panel, Row, Shape, Unit, quantiles
from dashboards.query import complement, none_of, ratio

L1 = {"tier": "L1"}
BY_REPLICA = ("role", "replica")
NAME = "{{role}} {{replica}}"

FULL = Row(
    "How full",
    (
        Panel(
            title="Pool in use now",
            shows="Share of each replica's pool that a new request cannot have; what is evictable counts as free.",
            act="Above 95 % for minutes: more replicas, a larger pool, or a lower max_running_requests.",
            lines=(Line(KIT.gauge("kv_pool_utilization_ratio", over="max", by=BY_REPLICA, where=L1), NAME),),
            shape=Shape.BARS, unit=Unit.RATIO, limits=Limits(0.8, 0.95),
        ),
        Panel(
            title="Tokens by state",
            shows="Token slots of all pools: free, evictable (cached, nobody uses it), protected (cached and in use), "
                "reserved (taken, not yet in the cache), quarantined (of failed hand-offs).",
            act="Free near 0 is normal, the cache uses what is there. Evictable near 0: the pools are too small for "
                "the load.",
            lines=(Line(KIT.gauge("kv_pool_tokens", by=["state"], where=L1), "{{state}}"),),
            shape=Shape.STACKED, unit=Unit.NUMBER,
        ),
        Panel(
            title="Pool in use",
            shows="The same share over time, by replica.",
            act="One replica far above the others: long requests or a favoured prefix; see Decisions on the routing "
                "board.",
            lines=(Line(KIT.gauge("kv_pool_utilization_ratio", over="max", by=BY_REPLICA, where=L1), NAME),),
            unit=Unit.RATIO, limits=Limits(0.8, 0.95),
        ),
        Panel(
            title="Occupied",
            shows="Share of each pool that holds anything, evictable pages included.",
            act="Far below 100 % after hours of traffic: the pool is larger than what clients reuse.",
            lines=(
                Line(
                    complement(
                        ratio(
                            KIT.gauge("kv_pool_tokens", by=BY_REPLICA, where={**L1, "state": "free"}),
                            KIT.gauge("kv_pool_tokens", by=BY_REPLICA, where=L1),
                        )
                    ),
                    NAME,
                ),
            ),
            unit=Unit.RATIO,
        ),
        Panel(
            title="Size of the pools",
            shows="Capacity of all pools in tokens.",
            act="Lower than expected: memory was short when replicas started; see cache.mem_fraction_static.",
            lines=(Line(KIT.gauge("kv_pool_capacity_tokens", where=L1), "tokens"),),
            shape=Shape.STAT, unit=Unit.NUMBER, width=4,
        ),
        Panel(
            title="Memory of the pools",
            shows="Capacity of all pools in bytes, all ranks.",
            act="A fall without a change of settings: a replica is gone; see Replicas by state on the fleet board.",
            lines=(Line(KIT.gauge("kv_pool_capacity_bytes", where=L1), "bytes"),),
            shape=Shape.STAT, unit=Unit.BYTES, width=4,
        ),
        Panel(
            title="Quarantined tokens",
            shows="Token slots that nobody may have, since a failed hand-off might still write to them.",
            act="Not 0 for minutes: see Oldest drain on the routing board and the runbook, QuarantineDoesNotEnd.",
            lines=(
                Line(KIT.gauge("kv_pool_tokens", by=BY_REPLICA, where={**L1, "state": "quarantined"}), NAME),
            ),
            unit=Unit.NUMBER,
        ),
    ),
)  # fmt: skip

REUSE = Row(
    "What is reused",
    (
        Panel(
            title="Reused share by tier",
            shows="Share of looked-up prompt tokens that each tier had.",
            act="Below the share of prompts that begin alike: compare the routing board's overlaps, then evictions "
                "here.",
            lines=(
                Line(ratio(KIT.rate("cache_hit_tokens_total", by=["tier"]), KIT.rate("cache_lookup_tokens_total")),
                     "{{tier}}"),
            ),
            shape=Shape.STACKED, unit=Unit.RATIO,
        ),
        Panel(
            title="Reused share by replica",
            shows="The same for each replica.",
            act="One replica far below: it has just started, or the router spills onto it for its short queue.",
            lines=(
                Line(
                    ratio(KIT.rate("cache_hit_tokens_total", by=BY_REPLICA),
                          KIT.rate("cache_lookup_tokens_total", by=BY_REPLICA)),
                    NAME,
                ),
            ),
            unit=Unit.RATIO,
        ),
        Panel(
            title="Looked up and reused",
            shows="Prompt tokens that were looked up and that were found, per second.",
            act="The gap between the two is what prefill has to compute.",
            lines=(
                Line(KIT.rate("cache_lookup_tokens_total"), "looked up"),
                Line(KIT.rate("cache_hit_tokens_total"), "reused"),
            ),
            unit=Unit.PER_S,
        ),
        Panel(
            title="Nodes of the tree",
            shows="Nodes of each replica's prefix tree.",
            act="Grows while Occupied stands still: many short branches; prompts differ early (a date at the start, "
                "say).",
            lines=(Line(KIT.gauge("cache_nodes", by=BY_REPLICA), NAME),), unit=Unit.NUMBER,
        ),
    ),
)  # fmt: skip

LOST = Row(
    "What is lost",
    (
        Panel(
            title="Evicted tokens",
            shows="Tokens that left the caches, by why; flush: somebody asked for it.",
            act="Evictions are normal in a full pool; what matters is how long ago the evicted was used, to the right.",
            lines=(Line(KIT.rate("cache_evicted_tokens_total", by=["reason"]), "{{reason}}"),),
            shape=Shape.STACKED, unit=Unit.PER_S,
        ),
        Panel(
            title="Idle time of what was evicted",
            shows="Time since the last use of nodes that were evicted for room.",
            act="Shorter than the pause between two turns of a chat: prefixes are lost that would be reused; enlarge "
                "pools.",
            lines=quantiles("cache_evicted_idle_seconds"),
            unit=Unit.SECONDS, needs=Needs.EVENT,
        ),
        Panel(
            title="Idle time of what was evicted, all of it",
            shows="How many nodes were evicted after which time without use.",
            act="Weight at the bottom: the cache thrashes; enlarge pools or add replicas.",
            lines=(Line(KIT.heatmap("cache_evicted_idle_seconds"), "{{le}}"),),
            shape=Shape.HEATMAP, unit=Unit.SECONDS, needs=Needs.EVENT,
        ),
        Panel(
            title="Retractions and failed allocations",
            shows="Running requests that went back to the queue, and allocations that found no room even after "
                "eviction.",
            act="Lasting: raise scheduler.new_token_ratio, lower max_running_requests, or enlarge the pool.",
            lines=(
                Line(KIT.rate("scheduler_retractions_total", by=["replica"]), "{{replica}} retracted"),
                Line(KIT.rate("kv_pool_alloc_failures_total", by=["replica"]), "{{replica}} failed"),
            ),
            unit=Unit.PER_S,
        ),
        Panel(
            title="Tokens given up by retractions",
            shows="K/V that retractions gave back and that may have to be computed again.",
            act="Against Tokens per second on the fleet board: above a few percent the pool is the bottleneck.",
            lines=(Line(KIT.rate("scheduler_retracted_tokens_total", by=["replica"]), "{{replica}}"),), unit=Unit.PER_S,
        ),
        Panel(
            title="Requests by state",
            shows="Requests in replicas that do not run yet or any more, by state.",
            act="waiting with a full pool: memory is the limit; with a free one: compute is. preallocating for long: "
                "the decode pool is full; handing_off grows with it.",
            lines=(
                Line(KIT.gauge("scheduler_requests", by=["state"], where={"state": none_of("running")}), "{{state}}"),
            ),
            shape=Shape.STACKED,
        ),
    ),
)  # fmt: skip

POOL = Board(
    uid="manta-kv",
    title="Manta: KV pool and prefix cache",
    description="What fills the KV pools, what of it is reused, and what is lost.",
    rows=(FULL, REUSE, LOST),
)
