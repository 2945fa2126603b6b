"""The board of the router's decisions and of the KV transfers between prefill and decode."""

import functools

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

apart = functools.partial(Panel, needs=Needs.APART)

DECISIONS = Row("Decisions", (
    Panel("Decisions by reason",
        {"{{policy}}: {{reason}}": rate("router_decisions_total", "policy", "reason")}, Unit.PER_S,
        "Routing decisions per second, by policy and reason.",
        "If a reason grows: GET /route/{X-Request-Id} of such a request lists the costs of the candidates.",
        shape=Shape.STACKED),
    Panel("Prefix overlap: best, predicted, actual",
        {kind: ratio(rate(f"router_{kind}_overlap_tokens_total"), rate("router_prompt_tokens_total"))
         for kind in ("best", "predicted", "actual")}, Unit.RATIO,
        "Share of prompt tokens that the best replica held, that the chosen replica was expected to hold, and that it "
          "reused.",
        "Best above predicted: reuse given up for shorter queues; more replicas win it back. Predicted above actual: "
          "the router's index is stale; see the next row."),
    Panel("Decision time", quantiles("router_decision_duration_seconds"), Unit.SECONDS,
        "Duration of one decision in the router's process.",
        "p99 above some ms: the process has too little CPU, or very many replicas and long prompts."),
    Panel("Prefix prediction error, p90",
        quantile(0.9, "router_overlap_error_ratio", "sign", sign="over|under"), Unit.RATIO,
        "Difference of predicted and actual prefix over the prompt's tokens, by sign of the prediction.",
        "over: the expected pages had been evicted; see the cache events. under: pages were cached meanwhile.",
        needs=Needs.EVENT),
    Panel("TTFT prediction error, p90", quantile(0.9, "router_ttft_error_seconds", "sign"), Unit.SECONDS,
        "Difference of predicted and actual time to first token, by sign of the prediction.",
        "under and growing: replicas are slower than their measurements, or reports are old; see Report age.",
        needs=Needs.EVENT),
    Panel("Retries", rate("router_retries_total", "reason"), Unit.PER_S,
        "Attempts that failed and were retried on another replica, by error.",
        "replica_gone and engine_dead: a replica died; replica_hangs: it was silent, or in a step, too long. See its "
          "log. overloaded: queues are full.", shape=Shape.STACKED),
    Panel("Why not cached", rate("router_uncached_tokens_total", "cause"), Unit.PER_S,
        "Prompt tokens per second that were computed although they, or most of them, could have been cached, by cause.",
        "changed, reordered, time_stamp: clients rewrite what they sent before; `manta why` says whose. evicted: the "
          "pool is too small. never_seen: new prompts.", shape=Shape.STACKED, needs=Needs.EVENT),
    Panel("Requests that reused too little", rate("router_uncached_requests_total", "cause"), Unit.PER_S,
        "Requests per second of which less was cached than could have been, by cause.",
        "As for the tokens beside it.", shape=Shape.STACKED, needs=Needs.EVENT),
    Panel("Moved requests", rate("requests_moved_total", "reason"), Unit.PER_S,
        "Requests that waited and were taken back for a replica that begins them sooner, by reason.",
        "join: a replica came. behind, without end: replicas are slower than they report; see TTFT prediction error.",
        shape=Shape.STACKED),
    Panel("Clients that come back", {
        "waiting": gauge("router_streams_detached", over="sum"),
        "resumed per second, {{how}}": rate("router_streams_resumed_total", "how"),
        "given up per second": rate("router_streams_expired_total"),
    }, Unit.NUMBER,
        "Streams that wait for their clients, clients that resumed one, and streams whose clients did not come back.",
        "again: the router that had the stream died, or the client came to another one. Given up and growing: clients "
          "leave for good; they should abort, or leave x-manta-reconnect out.", needs=Needs.EVENT),
    Panel("Tokens by tenant", {"{{tenant}}, {{kind}}": rate("tenant_tokens_total", "tenant", "kind")}, Unit.PER_S,
        "Uncached prompt tokens and output tokens of the tenants of router.keys_file, per second.",
        "One far above its share while others wait: lower its weight, or set limits.", needs=Needs.EVENT),
    Panel("Requests by tenant", {
        "{{tenant}}": rate("tenant_requests_total", "tenant"),
        "file of keys failed": gauge("router_keys_file_failed", over="max"),
    }, Unit.PER_S,
        "Requests of the tenants of router.keys_file per second; and 1 while that file cannot be used.",
        "File of keys failed: a router's log says why, and `manta key list`; the keys from before stay in force.",
        needs=Needs.EVENT),
    Panel("Tokens by adapter", {"{{adapter}}, {{kind}}": rate("adapter_tokens_total", "adapter", "kind")}, Unit.PER_S,
        "Prompt and output tokens of requests that name an adapter (LoRA), per second.",
        "Many adapters with few tokens each: replicas load them often; see the next panel.", needs=Needs.EVENT),
    Panel("Requests by adapter", rate("adapter_requests_total", "adapter"), Unit.PER_S,
        "Requests of each adapter per second.",
        "One that nobody asks for can be unloaded; its memory goes to others by itself.", needs=Needs.EVENT),
    Panel("Adapters held and loaded", {
        "{{replica}} held": gauge("adapters_held", "replica"),
        "{{replica}} loaded per minute": f"60 * {rate('adapter_loads_total', 'replica')}",
        "{{replica}} dropped per minute": f"60 * {rate('adapter_drops_total', 'replica')}",
    }, Unit.NUMBER,
        "Adapters that each replica holds, and how many it loads, and drops for the room of others, in a minute.",
        "Loaded and dropped without end: more are in use than replicas hold; see the runbook, AdaptersReloaded."),
    Panel("Memory and load time of adapters", {
        "{{replica}} GiB": f"{gauge('adapters_held_bytes', 'replica')} / 1073741824",
        "{{replica}} seconds to load one": gauge("adapter_load_seconds", "replica"),
    }, Unit.NUMBER,
        "Memory of the adapters that each replica holds, and the time in which it loads one.",
        "Seconds of a load far above the others': the folder is on a slow disk."),
    Panel("Batch requests", {
        "running": gauge("router_batch_lines_running", over="sum"),
        "batches that wait for their folder": gauge("router_batches_stalled", over="sum"),
        "{{outcome}} per second": rate("router_batch_lines_total", "outcome"),
    }, Unit.NUMBER,
        "Batch requests that run in the gaps that other requests leave, and what became of those that ran.",
        "Only repeated: others leave no gap, or replicas are not ready; see TTFT. failed: the batch's error file says "
          "why.", needs=Needs.EVENT),
), is_open=True)  # fmt: skip

KNOWLEDGE = Row("Router state", (
    Panel("Report age", gauge("router_report_age_seconds", "target", over="max"), Unit.SECONDS,
        "Time since each replica's last report; the oldest of any router.",
        "Above a few seconds the router decides by old loads: the replica's loop is stuck, or the network is slow.",
        limits=Thresholds(5, BOUNDS["RouterReportsOld"])),
    Panel("Index tokens", gauge("router_index_tokens", "target", "source", over="max"), Unit.NUMBER,
        "Tokens that the prefix index holds for each replica: confirmed by its events, or expected from decisions.",
        "expected near confirmed or above it: events do not arrive; see the next panel."),
    Panel("Missed cache events",
        {"gaps": rate("router_cache_event_gaps_total"), "snapshots": rate("router_cache_snapshots_total")}, Unit.PER_S,
        "Gaps in the cache events of replicas, and the snapshots that repaired them.",
        "Gaps that go on: the router is too slow to read the events; give it CPU."),
))  # fmt: skip

FETCHES = Row("Fetches", (
    Panel("Fetches by outcome", rate("router_fetches_total", "outcome"), Unit.PER_S,
        "Fetches of cached pages from another replica, where that is quicker than computing them.",
        "error: the replica's log says why; what was missing was computed. Links that fail are left alone for seconds.",
        shape=Shape.STACKED),
    Panel("Fetched tokens", {"tokens": rate("router_fetched_tokens_total")}, Unit.TOKENS_PER_S,
        "Prompt tokens whose pages came from another replica instead of being computed.",
        "Beside the prefill rate of the replicas: what fetches save."),
    Panel("Time of a fetch, mean",
        {"fetch": ratio(rate("router_fetch_seconds_total"), rate("router_fetches_total"))}, Unit.SECONDS,
        "From the arrival of a request at its replica until its fetch had ended; the queue there goes on meanwhile.",
        "Long: the network, or donors whose steps are long.", needs=Needs.FETCH),
))  # fmt: skip

APART = Row("Prefill and decode apart", (
    apart("KV transfer decisions", rate("router_pair_decisions_total", "reason"), Unit.PER_S,
        "Decisions whether to hand a prompt over to a prefill replica, by reason.",
        "Mostly not handed over under load: the decode replicas hold the prefixes, or prefill replicas are few.",
        shape=Shape.STACKED),
    apart("KV transfers by outcome", rate("router_kv_transfers_total", "outcome"), Unit.PER_S,
        "Finished attempts with a transferred prompt, and those whose prompt the decode replica computed.",
        "failed: see Failed KV transfers and the replicas' logs.", shape=Shape.STACKED),
    apart("K/V bytes moved", rate("transfer_bytes_total", "direction", "replica"), Unit.BYTES_PER_S,
        "K/V bytes sent and received, by replica.",
        "Near the link's speed: the network is the bottleneck; hand over fewer prompts."),
    apart("KV transfer phases, mean", mean("transfer_duration_seconds", "phase"), Unit.SECONDS,
        "grant: until the receiver had room. wait: from then until all pages had arrived. post, wire: one NIXL write.",
        "grant long: the decode pool is full. wait long and wire short: prefill is slow. wire long: the network."),
    apart("KV transfer phases, p99", quantile(0.99, "transfer_duration_seconds", "phase"), Unit.SECONDS,
        "The same parts; 1 % take longer.",
        "Far above the mean: single replicas or peers are slow; narrow the board to one replica at a time."),
    apart("Wait for K/V, distribution", heatmap("transfer_duration_seconds", phase="wait"), Unit.SECONDS,
        "Number of KV transfers by wait from grant to the last page.",
        "A second band above the first: some KV transfers wait for slow prefills or a slow link.", shape=Shape.HEATMAP),
    apart("Failed KV transfers",
        ratio(rate("transfers_total", "replica", direction="receive", outcome="error"),
              rate("transfers_total", "replica", direction="receive")), Unit.RATIO,
        "Share of ended KV transfers that failed at the receiver, by replica.",
        "Not 0: a peer died or a deadline passed; the logs name the room. The runbook has KvTransferFailures.",
        limits=Thresholds(0.01, BOUNDS["KvTransferFailures"])),
    apart("KV transfers in progress", gauge("transfers_in_flight", "direction"), Unit.COUNT,
        "KV transfers by direction; draining: failed, and their pages are kept until they are safe to reuse.",
        "draining that stays: see Oldest drain.", shape=Shape.STACKED),
    apart("Oldest drain", gauge("transfer_oldest_drain_seconds", "replica", over="max"), Unit.SECONDS,
        "Age of the oldest failed KV transfer that still keeps its pages.",
        "Minutes: the sender vanished and nothing proves that it is dead; the runbook has QuarantineDoesNotEnd.",
        limits=Thresholds(30, BOUNDS["QuarantineDoesNotEnd"])),
    apart("Peers", gauge("transfer_peers", "role", "replica"), Unit.COUNT,
        "Replicas that each replica is connected to for KV transfers.",
        "Fewer than replicas of the other role under traffic: connections fail; see the replica's log."),
    apart("Damaged or late", {
        "mismatches": rate("transfer_digest_mismatches_total"),
        "late": rate("transfer_late_messages_total"),
    }, Unit.PER_S,
        "Received pages that differ from what was sent, and messages of KV transfers that had ended.",
        "Any mismatch: memory or network is faulty, or two versions run together; replace the replica. Late ones are "
          "dropped and harmless."),
))  # fmt: skip

ROUTING = Board(
    uid="manta-routing",
    title="Manta: routing and KV transfer",
    description="Where requests are sent and why, how good the guesses are, and how K/V goes from prefill to decode.",
    rows=(DECISIONS, KNOWLEDGE, FETCHES, APART),
    annotations=EVENTS,
)
