"""A decision in words: why the winner won, each candidate's numbers, and what became of it. Pure."""

from routing.types import Candidate, Decision, Outcome, Reason

_BECAUSE = {
    Reason.ONLY: "it was the only replica that may take the request",
    Reason.TURN: "it was next in turn",
    Reason.FEWER_REQUESTS: "it had the fewest requests of those compared",
    Reason.FEWER_TOKENS: "it had the fewest prompt tokens queued of those compared",
    Reason.TIE: "those compared were equally loaded and the draw fell on it",
    Reason.SOONEST: "its first token is expected soonest",
    Reason.RANDOM: "it was drawn at random",
    Reason.LONGEST_PREFIX: "it holds the longest part of the prompt",
    Reason.BALANCE: "the load was out of balance and it had the fewest requests",
    Reason.SESSION: "it is among the soonest and had this session before",
}


def explain(decision: Decision, outcome: Outcome | None = None) -> str:
    """One sentence, a line a candidate (the winner marked ``>``), and a last sentence once the outcome is known."""
    lines = [
        f"{decision.rid} ({decision.num_tokens} prompt tokens) went to {decision.replica_id} by {decision.policy}: "
        f"{_BECAUSE[decision.reason]}."
    ]
    lines += [_line(candidate, decision) for candidate in decision.candidates]
    if outcome is not None:
        lines.append(_ending(decision, outcome))
    return "\n".join(lines)


def _line(candidate: Candidate, decision: Decision) -> str:
    view, sent = candidate.view, candidate.sent
    mark = ">" if candidate.replica_id == decision.replica_id else " "
    looked_at = "" if candidate.replica_id in decision.compared or not decision.compared else ", not compared"
    return (
        f"{mark} {candidate.replica_id}: {candidate.num_requests} requests "
        f"({view.num_running} running and {view.num_waiting} waiting {decision.time_s - view.time_s:.2f} s ago, "
        f"{sent.requests_since} sent and {sent.ended_since} ended since), "
        f"{candidate.queued_tokens} tokens queued ({sent.tokens_since} sent since), "
        f"pool {view.pool_utilization:.0%} in use{looked_at}"
    )


def _ending(decision: Decision, outcome: Outcome) -> str:
    first = "no token came" if outcome.ttft_s is None else f"the first token came after {outcome.ttft_s:.3f} s"
    return (
        f"The request {outcome.ending.value}; {first}; "
        f"{outcome.cached_tokens} of {decision.num_tokens} prompt tokens were cached."
    )
