"""The board of the router's decisions and of the hand-offs between prefill and decode."""

from dashboards.alerts import BOUNDS
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
    mean,
    quantile,
    quantiles,
    rate,
    ratio,
)
from dashboards.boards.fleet import EVENTS

PROMPT = rate("router_prompt_tokens_total")
RECEIVED = {"direction": "receive"}

DECISIONS = Row("Decisions", (
    Panel("Decisions by reason",
        shows="Routing decisions per second, by policy and reason.",
        act="If a reason grows: GET /route/{X-Request-Id} of such a request lists the costs of the candidates.",
        queries={"{{policy}}: {{reason}}": rate("router_decisions_total", by=["policy", "reason"])},
        shape=Shape.STACKED, unit=Unit.PER_S,
    ),
    Panel("Prefix overlap: best, predicted, actual",
        shows="Share of prompt tokens that the best replica held, that the chosen replica was expected to hold, and "
              "that it reused.",
        act="Best above predicted: reuse given up for shorter queues; more replicas win it back. Predicted above "
            "actual: the router's index is stale; see the next row.",
        queries={
            kind: ratio(rate(f"router_{kind}_overlap_tokens_total"), PROMPT)
            for kind in ("best", "predicted", "actual")
        },
        unit=Unit.RATIO,
    ),
    Panel("Decision time",
        shows="Duration of one decision in the router's process.",
        act="p99 above some ms: the process has too little CPU, or very many replicas and long prompts.",
        queries=quantiles("router_decision_duration_seconds"), unit=Unit.SECONDS,
    ),
    Panel("Prefix prediction error, p90",
        shows="Difference of predicted and actual prefix over the prompt's tokens, by sign of the prediction.",
        act="over: the expected pages had been evicted; see the cache events. under: pages were cached meanwhile.",
        queries={
            "{{sign}}": quantile(0.9, "router_overlap_error_ratio", by=["sign"], where={"sign": "over|under"}),
        },
        unit=Unit.RATIO, needs=Needs.EVENT,
    ),
    Panel("TTFT prediction error, p90",
        shows="Difference of predicted and actual time to first token, by sign of the prediction.",
        act="under and growing: replicas are slower than their measurements, or reports are old; see Report age.",
        queries={"{{sign}}": quantile(0.9, "router_ttft_error_seconds", by=["sign"])},
        unit=Unit.SECONDS, needs=Needs.EVENT,
    ),
    Panel("Retries",
        shows="Attempts that failed and were retried on another replica, by error.",
        act="replica_gone and engine_dead: a replica died; replica_hangs: it was silent, or in a step, too long. See "
            "its log. overloaded: queues are full.",
        queries={"{{reason}}": rate("router_retries_total", by=["reason"])}, shape=Shape.STACKED, unit=Unit.PER_S,
    ),
), is_open=True)  # fmt: skip

KNOWLEDGE = Row("Router state", (
    Panel("Report age",
        shows="Time since each replica's last report; the oldest of any router.",
        act="Above a few seconds the router decides by old loads: the replica's loop is stuck, or the network is slow.",
        queries={"{{target}}": gauge("router_report_age_seconds", over="max", by=["target"])},
        unit=Unit.SECONDS, limits=Thresholds(5, BOUNDS["RouterReportsOld"]),
    ),
    Panel("Index tokens",
        shows="Tokens that the prefix index holds for each replica: confirmed by its events, or expected "
              "from decisions.",
        act="expected near confirmed or above it: events do not arrive; see the next panel.",
        queries={"{{target}} {{source}}": gauge("router_index_tokens", over="max", by=["target", "source"])},
        unit=Unit.NUMBER,
    ),
    Panel("Missed cache events",
        shows="Gaps in the cache events of replicas, and the snapshots that repaired them.",
        act="Gaps that go on: the router is too slow to read the events; give it CPU.",
        queries={
            "gaps": rate("router_cache_event_gaps_total"),
            "snapshots": rate("router_cache_snapshots_total"),
        },
        unit=Unit.PER_S,
    ),
))  # fmt: skip

APART = Row("Prefill and decode apart", (
    Panel("Hand-off decisions",
        shows="Decisions whether to hand a prompt over to a prefill replica, by reason.",
        act="Mostly not handed over under load: the decode replicas hold the prefixes, or prefill replicas are few.",
        queries={"{{reason}}": rate("router_pair_decisions_total", by=["reason"])},
        shape=Shape.STACKED, unit=Unit.PER_S, needs=Needs.APART,
    ),
    Panel("Hand-offs by outcome",
        shows="Finished attempts with a transferred prompt, and those whose prompt the decode replica computed.",
        act="failed: see Failed hand-offs and the replicas' logs.",
        queries={"{{outcome}}": rate("router_hand_offs_total", by=["outcome"])},
        shape=Shape.STACKED, unit=Unit.PER_S, needs=Needs.APART,
    ),
    Panel("K/V bytes moved",
        shows="K/V bytes sent and received, by replica.",
        act="Near the link's speed: the network is the bottleneck; hand over fewer prompts.",
        queries={"{{direction}} {{replica}}": rate("transfer_bytes_total", by=["direction", "replica"])},
        unit=Unit.BYTES_PER_S, needs=Needs.APART,
    ),
    Panel("Hand-off phases, mean",
        shows="grant: until the receiver had room. wait: from then until all pages had arrived. post, wire: one NIXL "
              "write.",
        act="grant long: the decode pool is full. wait long and wire short: prefill is slow. wire long: the network.",
        queries={"{{phase}}": mean("transfer_duration_seconds", by=["phase"])},
        unit=Unit.SECONDS, needs=Needs.APART,
    ),
    Panel("Hand-off phases, p99",
        shows="The same parts; 1 % take longer.",
        act="Far above the mean: single replicas or peers are slow; narrow the board to one replica at a time.",
        queries={"{{phase}}": quantile(0.99, "transfer_duration_seconds", by=["phase"])},
        unit=Unit.SECONDS, needs=Needs.APART,
    ),
    Panel("Wait for K/V, distribution",
        shows="Number of hand-offs by wait from grant to the last page.",
        act="A second band above the first: some hand-offs wait for slow prefills or a slow link.",
        queries={"{{le}}": heatmap("transfer_duration_seconds", where={"phase": "wait"})},
        shape=Shape.HEATMAP, unit=Unit.SECONDS, needs=Needs.APART,
    ),
    Panel("Failed hand-offs",
        shows="Share of ended hand-offs that failed at the receiver, by replica.",
        act="Not 0: a peer died or a deadline passed; the logs name the room. The runbook has KvTransferFailures.",
        queries={
            "{{replica}}": ratio(
                rate("transfers_total", by=["replica"], where={**RECEIVED, "outcome": "error"}),
                rate("transfers_total", by=["replica"], where=RECEIVED),
            ),
        },
        unit=Unit.RATIO, limits=Thresholds(0.01, BOUNDS["KvTransferFailures"]), needs=Needs.APART,
    ),
    Panel("Hand-offs in progress",
        shows="Hand-offs by direction; draining: failed, and their pages are kept until they are safe to reuse.",
        act="draining that stays: see Oldest drain.",
        queries={"{{direction}}": gauge("transfers_in_flight", by=["direction"])},
        shape=Shape.STACKED, needs=Needs.APART,
    ),
    Panel("Oldest drain",
        shows="Age of the oldest failed hand-off that still keeps its pages.",
        act="Minutes: the sender vanished and nothing proves that it is dead; the runbook has QuarantineDoesNotEnd.",
        queries={"{{replica}}": gauge("transfer_oldest_drain_seconds", over="max", by=["replica"])},
        unit=Unit.SECONDS, limits=Thresholds(30, BOUNDS["QuarantineDoesNotEnd"]), needs=Needs.APART,
    ),
    Panel("Peers",
        shows="Replicas that each replica is connected to for hand-offs.",
        act="Fewer than replicas of the other role under traffic: connections fail; see the replica's log.",
        queries={"{{role}} {{replica}}": gauge("transfer_peers", by=["role", "replica"])}, needs=Needs.APART,
    ),
    Panel("Damaged or late",
        shows="Received pages that differ from what was sent, and messages of hand-offs that had ended.",
        act="Any mismatch: memory or network is faulty, or two versions run together; replace the replica. Late ones "
            "are dropped and harmless.",
        queries={
            "mismatches": rate("transfer_digest_mismatches_total"),
            "late": rate("transfer_late_messages_total"),
        },
        unit=Unit.PER_S, needs=Needs.APART,
    ),
))  # fmt: skip

ROUTING = Board(
    uid="manta-routing",
    title="Manta: routing and KV transfer",
    description="Where requests are sent and why, how good the guesses are, and how K/V goes from prefill to decode.",
    rows=(DECISIONS, KNOWLEDGE, APART),
    annotations=EVENTS,
)
