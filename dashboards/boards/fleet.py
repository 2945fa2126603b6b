"""The board to look at first: is every request answered, how fast, and where does its time go."""

from dashboards.board import KIT, QUANTILES, Board, Limits, Line, Panel, Row, Shape, Unit, quantiles
from dashboards.boards.replicas import ENGINE, REPLICAS
from dashboards.query import Query, none_of, ratio


def share_without(*outcomes: str) -> Query:
    """Of the requests that ended: those that ended in none of ``outcomes``."""
    return ratio(KIT.rate("requests_total", where={"outcome": none_of(*outcomes)}), KIT.rate("requests_total"))


NOW = Row(
    "Now",
    (
        Panel(
            title="Requests per second",
            shows="Requests that ended, of all endpoints and outcomes.",
            act="Zero while clients are sending: look at Replicas by state, then at the routers' logs.",
            lines=(Line(KIT.rate("requests_total"), "all"),),
            shape=Shape.STAT, unit=Unit.REQUESTS_PER_S, width=4, height=5,
        ),
        Panel(
            title="Failed or refused",
            shows="Share of requests that ended neither well nor by their client's wish or mistake.",
            act="Requests by outcome says which kind: shed wants more replicas, error wants a look into the logs.",
            lines=(Line(share_without("ok", "cancelled", "invalid"), "share"),),
            shape=Shape.STAT, unit=Unit.RATIO, limits=Limits(0.01, 0.05), width=4, height=5,
        ),
        Panel(
            title="Time to first token, p90",
            shows="Nine of ten requests had their first token after this time.",
            act="Where the time goes before the first token names the stage; queue wants replicas, prefill wants cache "
                "hits.",
            lines=(Line(KIT.quantile(0.9, "time_to_first_token_seconds"), "p90"),),
            shape=Shape.STAT, unit=Unit.SECONDS, limits=Limits(1, 5), width=4, height=5,
        ),
        Panel(
            title="Within the first-token objective",
            shows="Share of requests whose first token came within the configured objective; what failed or was "
                "refused before it missed it.",
            act="Below the target: Requests by outcome says whether requests fail; if not, add replicas, or find out "
                "with the routing board why prefixes are not reused.",
            lines=(
                Line(
                    ratio(
                        KIT.rate("slo_requests_total", where={"slo": "ttft", "met": "true"}),
                        KIT.rate("slo_requests_total", where={"slo": "ttft"}),
                    ),
                    "met",
                ),
            ),
            shape=Shape.STAT, unit=Unit.RATIO, limits=Limits(0.99, 0.95, falling=True), width=4, height=5,
        ),
        Panel(
            title="Prompt tokens reused",
            shows="Share of looked-up prompt tokens that the prefix cache had; 0 is normal when prompts share nothing.",
            act="A fall without a change of traffic: look for evictions and for spread prefixes on the other two "
                "boards.",
            lines=(Line(ratio(KIT.rate("cache_hit_tokens_total"), KIT.rate("cache_lookup_tokens_total")), "reused"),),
            shape=Shape.STAT, unit=Unit.RATIO, width=4, height=5,
        ),
        Panel(
            title="Fullest pool",
            shows="The highest share of a replica's KV pool that a new request cannot have.",
            act="Above 95 % requests wait and running ones go back: add replicas, or give the pool more memory.",
            lines=(Line(KIT.gauge("kv_pool_utilization_ratio", over="max", where={"tier": "L1"}), "fullest"),),
            shape=Shape.STAT, unit=Unit.RATIO, limits=Limits(0.8, 0.95), width=4, height=5,
        ),
    ),
)  # fmt: skip

LATENCY = Row(
    "Latency",
    (
        Panel(
            title="Time to first token",
            shows="From a request's arrival to its first output token.",
            act="p99 far above p90: a few long prompts or one slow replica; compare Waiting requests by replica.",
            lines=quantiles("time_to_first_token_seconds"), unit=Unit.SECONDS,
        ),
        Panel(
            title="Inter-token latency",
            shows="Gap between the deltas of an answer, per token.",
            act="Rises with Requests of one step: batches are large. Peaks alone: long prompts run between decode "
                "steps; prefill and decode apart would keep them out.",
            lines=quantiles("inter_token_latency_seconds"), unit=Unit.SECONDS,
        ),
        Panel(
            title="Whole requests",
            shows="From a request's arrival to its last token.",
            act="Follows the length of answers; if Length of prompts and answers did not change, look at the two "
                "before.",
            lines=quantiles("request_duration_seconds"), unit=Unit.SECONDS,
        ),
        Panel(
            title="Time to first token, all of them",
            shows="How many requests had their first token after how long; two bands are cache hits and misses.",
            act="When the upper band grows, prefixes are lost: see the evictions on the KV pool board.",
            lines=(Line(KIT.heatmap("time_to_first_token_seconds"), "{{le}}"),),
            shape=Shape.HEATMAP, unit=Unit.SECONDS,
        ),
        Panel(
            title="Where the time goes",
            shows="Mean time of a finished request in each stage; the stages add up to the whole.",
            act="The widest band is what to work on. Decode is the answer itself and usually the widest.",
            lines=(Line(KIT.mean("request_stage_duration_seconds", by=["stage"]), "{{stage}}"),),
            shape=Shape.STACKED, unit=Unit.SECONDS,
        ),
        Panel(
            title="Where the time goes before decode",
            shows="The same without decode, which dwarfs the rest.",
            act="Queue: too few replicas (apart: of decode if grant among Parts of a hand-off is long, else of "
                "prefill). Prefill: long prompts or few hits. Transfer: see the routing board. Route: the router's "
                "process has too little CPU.",
            lines=(
                Line(
                    KIT.mean("request_stage_duration_seconds", by=["stage"], where={"stage": none_of("decode")}),
                    "{{stage}}",
                ),
            ),
            shape=Shape.STACKED, unit=Unit.SECONDS,
        ),
    ),
)  # fmt: skip

TRAFFIC = Row(
    "Traffic",
    (
        Panel(
            title="Requests by outcome",
            shows="Requests that ended, by how; shed: refused with 429, as all queues are too long.",
            act="Shed asks for more replicas; error and timeout for the logs of the replica that x-manta-route names.",
            lines=(Line(KIT.rate("requests_total", by=["outcome"]), "{{outcome}}"),),
            shape=Shape.STACKED, unit=Unit.REQUESTS_PER_S,
        ),
        Panel(
            title="Open requests",
            shows="Prompts that have come and whose answers have not ended, by endpoint.",
            act="Grows while Requests per second stands still: replicas are saturated or stuck; see Busy share.",
            lines=(Line(KIT.gauge("requests_in_flight", by=["endpoint"]), "{{endpoint}}"),), shape=Shape.STACKED,
        ),
        Panel(
            title="Tokens per second",
            shows="Prompt tokens computed, prompt tokens reused, and tokens generated.",
            act="Computed high and reused low for chats: routing or eviction loses prefixes; see the other boards.",
            lines=(Line(KIT.rate("scheduler_tokens_total", by=["kind"]), "{{kind}}"),),
            shape=Shape.STACKED, unit=Unit.PER_S,
        ),
        Panel(
            title="Waiting requests by replica",
            shows="Requests in each replica's queue.",
            act="One replica far above the others: the router prefers it for its prefixes; see Decisions on the "
                "routing board. All of them: add replicas.",
            lines=(
                Line(KIT.gauge("scheduler_requests", by=["role", "replica"], where={"state": "waiting"}),
                     "{{role}} {{replica}}"),
            ),
        ),
        Panel(
            title="Busy share",
            shows="Share of time that a replica spends in forward steps, by phase.",
            act="Near 100 % everywhere: more replicas. Low with full queues: the pool is the limit; see the KV pool "
                "board.",
            lines=(
                Line(KIT.rate("scheduler_busy_seconds_total", by=["replica", "phase"]), "{{replica}} {{phase}}"),
            ),
            unit=Unit.RATIO,
        ),
        Panel(
            title="Length of prompts and answers",
            shows="Median and p90 of the tokens of prompts and answers.",
            act="A jump explains most changes of the latencies above; nothing is broken.",
            lines=tuple(
                Line(KIT.quantile(share, f"request_{side}_tokens"), f"{side} {legend}")
                for side in ("prompt", "output") for share, legend in QUANTILES[:2]
            ),
            unit=Unit.NUMBER,
        ),
    ),
)  # fmt: skip

FLEET = Board(
    uid="manta-fleet",
    title="Manta: fleet",
    description="Is every request answered, how fast, and where does its time go.",
    rows=(NOW, LATENCY, TRAFFIC, ENGINE, REPLICAS),
)
