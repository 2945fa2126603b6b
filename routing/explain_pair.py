"""A decision over prefill and decode replicas in words and numbers. Pure; explain.py calls it."""

from routing.pair_types import Pair, PairReason, PairTerms
from routing.types import Decision

_HEADER = (
    f"  {'decode replica':20} {'computed':>8} = {'TTFT':>8} + {'stall':>8} + {'load':>8} s"
    f" | {'received':>8} = {'transfer':>8} + {'fixed':>8} + {'pressure':>8} + {'load':>8} s"
    f" | {'cached':>7} {'to do':>7} tokens"
)


def pair_clause(decision: Decision, pair: Pair) -> str:
    """Who computes the prompt, and what both ways would have cost."""
    d, terms = decision.replica_id, pair.chosen
    if pair.reason is PairReason.NO_PREFILL:
        return f"{d} computes the prompt itself: no prefill replica may take it"
    if pair.reason is PairReason.ONE_REPLICA:
        return f"{d} computes the prompt itself: {pair.why}"
    local = (
        f"computing it on {d} costs {terms.local_cost_s:.3f} s (first token after {terms.ttft_s:.3f} s, its other "
        f"requests together wait {terms.stall_s:.3f} s meanwhile)"
    )
    handed = (
        f"through {pair.best_prefill_id} it costs {pair.hand_off_cost_s or 0.0:.3f} s ({pair.prefill_s or 0.0:.3f} s "
        f"there, {terms.transfer_s:.3f} s for {terms.transfer_pages} pages, {terms.overhead_s:.3f} s fixed)"
    )
    if pair.prefill_id is None:
        return f"{d} computes the prompt itself: {local}, {handed}"
    if pair.reason is PairReason.ALWAYS:
        return f"{pair.prefill_id} computes the prompt and hands it over, as every prompt (transfer.hand_off): {handed}"
    return f"{pair.prefill_id} computes the prompt and hands it over: {handed}, {local}"


def pair_rows(decision: Decision, pair: Pair) -> list[str]:
    """A header and a row for each decode replica, the one taken marked ``>``."""
    measured = "measured" if pair.link_measured else "assumed"
    rows = [_row(pair.costs.row(index), decision.replica_id) for index in range(len(pair.costs))]
    return [f"{_HEADER} at {pair.link_bytes_per_s / 1e9:.2f} GB/s ({measured})", *rows]


def _row(terms: PairTerms, winner: str) -> str:
    mark = ">" if terms.replica_id == winner else " "
    return (
        f"{mark} {terms.replica_id:20} {terms.local_cost_s:8.3f} = {terms.ttft_s:8.3f} + {terms.stall_s:8.3f}"
        f" + {terms.load_s:8.3f} s | {terms.receive_cost_s:8.3f} = {terms.transfer_s:8.3f} + {terms.overhead_s:8.3f}"
        f" + {terms.pressure_s:8.3f} + {terms.load_s:8.3f} s | {terms.cached_tokens:7} {terms.own_tokens:7}"
    )
