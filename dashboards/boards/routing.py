"""The board of the router's decisions and of the hand-offs between prefill and decode."""

from dashboards.board import KIT, Board, Limits, Line, Needs, Panel, Row, Shape, Unit, quantiles
from dashboards.query import ratio

PROMPT = KIT.rate("router_prompt_tokens_total")
RECEIVED = {"direction": "receive"}

DECISIONS = Row(
    "Decisions",
    (
        Panel(
            title="Decisions by reason",
            shows="Routing decisions per second, by why the winner won.",
            act="A reason that grows: GET /route/{X-Request-Id} of one such request says what the candidates cost.",
            lines=(Line(KIT.rate("router_decisions_total", by=["policy", "reason"]), "{{policy}}: {{reason}}"),),
            shape=Shape.STACKED, unit=Unit.PER_S,
        ),
        Panel(
            title="Overlap: best, predicted, actual",
            shows="Share of prompt tokens that some replica held, that the chosen one was expected to hold, and that "
                  "it reused.",
            act="Best above predicted: reuse given up for shorter queues; more replicas win it back. Predicted above "
                "actual: the router's index is stale; see the next row.",
            lines=tuple(
                Line(ratio(KIT.rate(f"router_{kind}_overlap_tokens_total"), PROMPT), kind)
                for kind in ("best", "predicted", "actual")
            ),
            unit=Unit.RATIO,
        ),
        Panel(
            title="Time of a decision",
            shows="What a decision costs in the router's process.",
            act="p99 above some ms: the process has too little CPU, or very many replicas and long prompts.",
            lines=quantiles("router_decision_duration_seconds"), unit=Unit.SECONDS,
        ),
        Panel(
            title="Error of the predicted prefix, p90",
            shows="Difference of predicted and actual prefix over the prompt's tokens, by sign of the prediction.",
            act="over: pages were evicted that the router thought there; see the cache events. under: they came "
                "meanwhile.",
            lines=(Line(KIT.quantile(0.9, "router_overlap_error_ratio", by=["sign"]), "{{sign}}"),), unit=Unit.RATIO,
        ),
        Panel(
            title="Error of the predicted first-token time, p90",
            shows="Difference of predicted and actual time to first token, by sign of the prediction.",
            act="under and growing: replicas are slower than they measured, or reports are old; see Age of reports.",
            lines=(Line(KIT.quantile(0.9, "router_ttft_error_seconds", by=["sign"]), "{{sign}}"),),
            unit=Unit.SECONDS, needs=Needs.EVENT,
        ),
        Panel(
            title="Tries made again",
            shows="Tries that failed and were made again elsewhere, by error.",
            act="replica_gone and engine_dead: a replica died; replica_hangs: it was silent, or in a step, too long. "
            "See its log. overloaded: queues are full.",
            lines=(Line(KIT.rate("router_retries_total", by=["reason"]), "{{reason}}"),),
            shape=Shape.STACKED, unit=Unit.PER_S,
        ),
    ),
)  # fmt: skip

KNOWLEDGE = Row(
    "What the routers know",
    (
        Panel(
            title="Age of reports",
            shows="Time since each replica's last report; the oldest of any router.",
            act="Above a few seconds the router decides on old loads: the replica's loop is stuck, or the network is.",
            lines=(Line(KIT.gauge("router_report_age_seconds", over="max", by=["target"]), "{{target}}"),),
            unit=Unit.SECONDS, limits=Limits(5, 30),
        ),
        Panel(
            title="Tokens in the index",
            shows="Tokens that the prefix index holds for each replica: told by its events, or expected from "
                  "decisions.",
            act="expected near confirmed or above: events do not come; see the next panel.",
            lines=(
                Line(KIT.gauge("router_index_tokens", over="max", by=["target", "source"]), "{{target}} {{source}}"),
            ),
            unit=Unit.NUMBER,
        ),
        Panel(
            title="Missed cache events",
            shows="Times that events of a replica's cache were missed, and snapshots that came to mend it.",
            act="Gaps that go on: the router is too slow to read them; give it CPU.",
            lines=(
                Line(KIT.rate("router_cache_event_gaps_total"), "gaps"),
                Line(KIT.rate("router_cache_snapshots_total"), "snapshots"),
            ),
            unit=Unit.PER_S,
        ),
    ),
)  # fmt: skip

APART = Row(
    "Prefill and decode apart",
    (
        Panel(
            title="Hand over or not",
            shows="Decisions whether a prompt is handed over from a prefill replica, by why.",
            act="Mostly not handed over under load: the decode replicas hold the prefixes, or prefill replicas are "
                "few.",
            lines=(Line(KIT.rate("router_pair_decisions_total", by=["reason"]), "{{reason}}"),),
            shape=Shape.STACKED, unit=Unit.PER_S, needs=Needs.APART,
        ),
        Panel(
            title="Hand-offs of requests",
            shows="Finished tries whose prompt came over, and those that were computed at the decode replica instead.",
            act="failed: see Failed hand-offs and the replicas' logs.",
            lines=(Line(KIT.rate("router_hand_offs_total", by=["outcome"]), "{{outcome}}"),),
            shape=Shape.STACKED, unit=Unit.PER_S, needs=Needs.APART,
        ),
        Panel(
            title="K/V bytes moved",
            shows="K/V bytes sent and received, by replica.",
            act="Near the link's speed: the network is the bottleneck; more of the prompts should stay.",
            lines=(
                Line(KIT.rate("transfer_bytes_total", by=["direction", "replica"]), "{{direction}} {{replica}}"),
            ),
            unit=Unit.BYTES_PER_S, needs=Needs.APART,
        ),
        Panel(
            title="Parts of a hand-off, mean",
            shows="grant: until the receiver had room. wait: from then until all had come. post, wire: one NIXL write.",
            act="grant long: the decode pool is full. wait long and wire short: prefill is slow. wire long: the "
                "network.",
            lines=(Line(KIT.mean("transfer_duration_seconds", by=["phase"]), "{{phase}}"),),
            unit=Unit.SECONDS, needs=Needs.APART,
        ),
        Panel(
            title="Parts of a hand-off, p99",
            shows="The same parts; one of a hundred takes longer.",
            act="Far above the mean: single replicas or peers are slow; narrow the board to one replica at a time.",
            lines=(Line(KIT.quantile(0.99, "transfer_duration_seconds", by=["phase"]), "{{phase}}"),),
            unit=Unit.SECONDS, needs=Needs.APART,
        ),
        Panel(
            title="Waits for K/V, all of them",
            shows="How many hand-offs waited how long from grant to the last page.",
            act="A second band above the first: some hand-offs wait for slow prefills or a slow link.",
            lines=(Line(KIT.heatmap("transfer_duration_seconds", where={"phase": "wait"}), "{{le}}"),),
            shape=Shape.HEATMAP, unit=Unit.SECONDS, needs=Needs.APART,
        ),
        Panel(
            title="Failed hand-offs",
            shows="Share of ended hand-offs that failed at the receiver, by replica.",
            act="Not 0: a peer died or a deadline passed; the logs name the room. The runbook has KvTransferFailures.",
            lines=(
                Line(
                    ratio(
                        KIT.rate("transfers_total", by=["replica"], where={**RECEIVED, "outcome": "failed"}),
                        KIT.rate("transfers_total", by=["replica"], where=RECEIVED),
                    ),
                    "{{replica}}",
                ),
            ),
            unit=Unit.RATIO, limits=Limits(0.01, 0.05), needs=Needs.APART,
        ),
        Panel(
            title="Hand-offs in progress",
            shows="Hand-offs by direction; draining ones have failed and keep their pages until these are safe to "
                  "reuse.",
            act="draining that stays: see Oldest drain.",
            lines=(Line(KIT.gauge("transfers_in_flight", by=["direction"]), "{{direction}}"),),
            shape=Shape.STACKED, needs=Needs.APART,
        ),
        Panel(
            title="Oldest drain",
            shows="How long the oldest failed hand-off has been keeping its pages.",
            act="Minutes: the sender is gone without a word and nobody said it is dead; the runbook has "
                "QuarantineDoesNotEnd.",
            lines=(
                Line(KIT.gauge("transfer_oldest_drain_seconds", over="max", by=["replica"]), "{{replica}}"),
            ),
            unit=Unit.SECONDS, limits=Limits(30, 300), needs=Needs.APART,
        ),
        Panel(
            title="Peers",
            shows="Replicas that each replica is connected to for hand-offs.",
            act="Fewer than replicas of the other role under traffic: connections fail; see the replica's log.",
            lines=(Line(KIT.gauge("transfer_peers", by=["role", "replica"]), "{{role}} {{replica}}"),),
            needs=Needs.APART,
        ),
        Panel(
            title="Damaged or late",
            shows="Pages that were not what was sent, and messages of hand-offs that had ended.",
            act="Any mismatch: memory or network is faulty, or two versions run together; replace the replica. Late "
                "ones are dropped and harmless.",
            lines=(
                Line(KIT.rate("transfer_digest_mismatches_total"), "mismatches"),
                Line(KIT.rate("transfer_late_messages_total"), "late"),
            ),
            unit=Unit.PER_S, needs=Needs.APART,
        ),
    ),
)  # fmt: skip

ROUTING = Board(
    uid="manta-routing",
    title="Manta: routing and KV transfer",
    description="Where requests are sent and why, how good the guesses are, and how K/V goes from prefill to decode.",
    rows=(DECISIONS, KNOWLEDGE, APART),
)
