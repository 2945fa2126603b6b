"""A decision in words and numbers: why the winner won, what was given up, every candidate's terms. Pure."""

from collections.abc import Mapping
from dataclasses import asdict

from routing.terms import CANDIDATE, DECODE_REPLICA, Term, Unit, headings, parts, written
from routing.types import Candidate, Decision, Ending, PageFetch, Pair, PairReason, Reason, RouteOutcome

BECAUSE = {
    Reason.ONLY: "it was the only replica that may take the request",
    Reason.TURN: "it was next in turn",
    Reason.RANDOM: "it was drawn at random",
    Reason.SOONEST: "its first token is expected soonest",
    Reason.WAIT_ALLOWED: "its first token is expected soonest of those whose queue is not too long",
    Reason.CHEAPEST: "the request costs least there",
    Reason.LEAST_DELAY: "where the first token would come sooner, computing the prefix anew would delay others by more",
    Reason.LONGEST_PREFIX: "it holds the longest part of the prompt",
    Reason.BALANCE: "the load was out of balance and it had the fewest requests",
    Reason.FEWER_REQUESTS: "it had the fewest requests of those compared",
    Reason.FEWER_TOKENS: "it had the fewest prompt tokens queued of those compared",
    Reason.SESSION: "it is among the soonest and had this session before",
    Reason.MORE_FREE: "its estimate equals the best within the error of the rates, and it has the most free pages",
    Reason.TIE: "those compared were equally loaded and the draw fell on it",
}
_WIDTHS: Mapping[Unit, int] = {"s": 8, "tokens": 7, "tokens/s": 7}


def _sum(terms: tuple[Term, ...], total: str) -> str:
    """Make the format of a sum's columns: the sum, and its parts."""
    columns = [f"{{{term.field}:>{_WIDTHS[term.unit]}}}" for term in parts(terms, total)]
    (width,) = (_WIDTHS[term.unit] for term in terms if term.field == total)
    return f"{{{total}:>{width}}} = {' + '.join(columns)}"


_CANDIDATE_ROW = (
    f"{{mark}} {{replica:20}} {_sum(CANDIDATE, 'ttft_s')} s | {_sum(CANDIDATE, 'cached_tokens')}"
    " | {own_tokens:>7} {queued_tokens:>7} {passed_tokens:>7} tokens | {behind_s:>8} s | {prefill_tokens_per_s:>7}"
    " | {num_requests}"
)
_DECODE_ROW = (
    f"{{mark}} {{replica:20}} {_sum(DECODE_REPLICA, 'local_cost_s')} s | {_sum(DECODE_REPLICA, 'receive_cost_s')} s"
    " | {cached_tokens:>7} {own_tokens:>7}"
)
_FORM = {"s": "{:.3f}".format, "tokens/s": "{:.0f}".format, "ratio": "{:.0%}".format} | dict.fromkeys(
    ("tokens", "pages", "bytes", "requests"), str
)


def explain(decision: Decision, outcome: RouteOutcome | None = None) -> str:
    """Return the sentence, a row a candidate (the winner marked ``>``), and the end once the outcome is known."""
    lines = [sentence(decision), *_objective(decision)]
    lines.append(_CANDIDATE_ROW.format(mark=" ", replica="replica", **headings(CANDIDATE)))
    lines += [_candidate_row(candidate, decision) for candidate in decision.candidates]
    if decision.pair is not None:
        lines += _decode_rows(decision, decision.pair)
    if decision.overrun > 1.0:
        lines.append(
            f"First tokens lately came {decision.overrun:.2f} times as late as predicted: once one has come later than "
            "router.max_wait_s, waits are multiplied by that before they are compared with it."
        )
    if outcome is not None:
        lines.append(_ending(decision, outcome))
    return "\n".join(lines)


def sentence(decision: Decision, name: str = "") -> str:
    """Say where the request went (or would go), why, what is expected, and what was given up for it.

    Args: name: what to call the request; its rid unless given.
    """
    best_id, best_tokens = decision.best_overlap
    name = name or decision.rid
    verb = "would go" if decision.dry_run else "went"
    tokens = _tokens_clause(decision)
    said = (
        f"{name} ({decision.num_tokens} prompt tokens) {verb} to {decision.replica_id} by {decision.policy}: "
        f"{BECAUSE[decision.reason]}. {tokens} cached there, and the first token after "
        f"{decision.predicted_ttft_s:.3f} s"
    )
    if decision.pair is not None:
        computes = "there" if decision.prefill_id is None else f"on {decision.prefill_id}"
        return (
            f"{name} ({decision.num_tokens} prompt tokens) {verb} to {decision.replica_id} by "
            f"{decision.policy}: {BECAUSE[decision.reason]}. {_pair_clause(decision, decision.pair)}. "
            f"{tokens} cached {computes}, and the first token after "
            f"{decision.predicted_ttft_s:.3f} s."
            f"{'' if decision.fetch is None else f' {fetch_clause(decision.fetch)}.'}"
        )
    if decision.fetch is not None:
        return f"{said}. {fetch_clause(decision.fetch)}."
    if not decision.given_up:
        return f"{said}."
    other = next(candidate for candidate in decision.candidates if candidate.replica_id == best_id)
    return (
        f"{said}; {best_id} holds {best_tokens}, {decision.given_up} more, "
        f"but its first token would come after {other.terms.ttft_s:.3f} s."
    )


def fetch_clause(fetch: PageFetch, *, came: tuple[int, float] | None = None) -> str:
    """Say what a request fetches, or fetched, and what it was weighed against. ``came``: tokens, and in how long."""
    num_tokens, took_s = came or (fetch.num_tokens, fetch.took_s)
    compute_s = fetch.compute_s * num_tokens / max(fetch.num_tokens, 1)
    begins = "" if fetch.donor_ttft_s == float("inf") else (
        f"; {fetch.donor_id} itself would {'begin' if came is None else 'have begun'} after {fetch.donor_ttft_s:.3g} s"
    )  # fmt: skip
    verb, computed = ("It fetches", "takes") if came is None else ("It fetched", "would have taken")
    return (
        f"{verb} {num_tokens:,} tokens from {fetch.donor_id} in {took_s:.2g} s; computing them {computed} "
        f"{compute_s:.2g}{begins}"
    )


def _objective(decision: Decision) -> list[str]:
    """Say whether it is expected in time, what it passes therefore, and else how long it may be passed; nothing where
    no replica looks at objectives."""
    computes = decision.prefill_id or decision.replica_id
    there = next(each for each in decision.candidates if each.replica_id == computes)
    terms = there.terms
    if not there.view.late_factor:
        return []
    if terms.ttft_s <= decision.objective_s:
        passed = f": it goes before {terms.passed_tokens:.0f} prompt tokens of late requests"
        return [f"It can be in time there ({decision.objective_s:g} s){passed if terms.passed_tokens else ''}."]
    bound_s = latest_s(terms.ttft_s, decision.objective_s, there.view.late_factor)
    return [
        f"It cannot be in time there ({decision.objective_s:g} s): requests that can be go before it, until its first "
        f"token takes about {bound_s:.1f} s."
    ]


def latest_s(ttft_s: float, objective_s: float, factor: float) -> float:
    """Estimate by when a late request has its first token, whatever passes it, from what it takes in order of arrival:
    the replica's rule (`bound_len` in replicas/scheduler/precedence.py), in seconds."""
    allowed_s = 3.0 * objective_s
    return max(ttft_s + 0.25 * objective_s, allowed_s) + (factor - 1.0) * max(0.0, ttft_s - allowed_s)


def _tokens_clause(decision: Decision) -> str:
    """Say how many tokens are predicted to be cached, and what of them must be loaded."""
    host, store = decision.host_tokens, decision.store_tokens
    below = f" ({host} of them on the host, {store} in the store: {decision.load_s:.3f} s to load)"
    return f"{decision.overlap_tokens} tokens{below if host or store else ''} are predicted to be"


def candidate_terms(candidate: Candidate, decision: Decision) -> dict[str, float]:
    """Return the numbers of ``candidate`` by field, in the order of terms.CANDIDATE."""
    beside = {
        "cached_tokens": candidate.overlap_tokens,
        "num_requests": candidate.num_requests,
        "queued_tokens": candidate.queued_tokens,
        "passed_tokens": round(candidate.terms.passed_tokens),
        "pool_utilization": candidate.view.pool_utilization,
        "free_tokens": round(candidate.load.free_tokens),
        "report_age_s": decision.time_s - candidate.view.time_s,
    }
    names = (term.field for term in CANDIDATE)
    return {name: beside[name] if name in beside else getattr(candidate.terms, name) for name in names}


def _candidate_row(candidate: Candidate, decision: Decision) -> str:
    view, load = candidate.view, candidate.load
    values = candidate_terms(candidate, decision)
    ended = f", its hit ends by the {candidate.ended_by}: {values['gone_tokens']} more tokens have K and V"
    looked_at = "" if candidate.replica_id in decision.compared or not decision.compared else ", not compared"
    row = _CANDIDATE_ROW.format(
        mark=">" if candidate.replica_id in (decision.replica_id, decision.prefill_id) else " ",
        replica=candidate.replica_id,
        **written(CANDIDATE, values, _FORM),
    )
    return (
        f"{row} ({view.num_running} running and {view.num_waiting} waiting {values['report_age_s']:.2f} s ago, "
        f"{load.requests_since:.0f} sent and {load.ended_since:.0f} ended since), "
        f"pool {view.pool_utilization:.0%} in use, {values['free_tokens']} tokens free"
        f"{ended if values['gone_tokens'] else ''}{looked_at}"
    )


def _decode_rows(decision: Decision, pair: Pair) -> list[str]:
    """Return a header and a row for each decode replica, the chosen one marked ``>``."""
    header = _DECODE_ROW.format(mark=" ", replica="decode replica", **headings(DECODE_REPLICA))
    measured = "measured" if pair.link_measured else "assumed"
    rows = [
        _DECODE_ROW.format(
            mark=">" if replica_id == decision.replica_id else " ",
            replica=replica_id,
            **written(DECODE_REPLICA, asdict(terms), _FORM),
        )
        for replica_id, terms in pair.rows()
    ]
    return [f"{header} tokens at {pair.link_bytes_per_s / 1e9:.2f} GB/s ({measured})", *rows]


def _pair_clause(decision: Decision, pair: Pair) -> str:
    """Say which replica computes the prompt, and what both ways would have cost."""
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
        f"through {pair.best_prefill_id} it costs {pair.kv_transfer_cost_s or 0.0:.3f} s "
        f"({pair.prefill_s or 0.0:.3f} s there, "
        f"{terms.transfer_s:.3f} s for {terms.transfer_pages} pages, {terms.overhead_s:.3f} s fixed)"
    )
    if pair.prefill_id is None:
        return f"{d} computes the prompt itself: {local}, {handed}"
    if pair.reason is PairReason.ALWAYS:
        return f"{pair.prefill_id} computes the prompt and hands it over (transfer.disaggregation: always): {handed}"
    return f"{pair.prefill_id} computes the prompt and hands it over: {handed}, {local}"


def _ending(decision: Decision, outcome: RouteOutcome) -> str:
    if outcome.ending is Ending.MOVED:
        return "Outcome: it waited there, and moved to begin sooner."
    first = "no token came" if outcome.ttft_s is None else f"the first token came after {outcome.ttft_s:.3f} s"
    return (
        f"Outcome: {outcome.ending.value}; {first}; "
        f"{outcome.cached_tokens} of {decision.num_tokens} prompt tokens were cached."
    )
