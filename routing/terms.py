"""What the terms of a decision are called and mean; text, JSON, the live view and the terminal are drawn from here.

Owns:   the names, in the order of the JSON. The values are types.py's: `Terms` and what stands beside them in a
        `Candidate`, and `PairTerms`.
Never:  imports numpy: the terminal starts without it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Term:
    """One number of a candidate."""

    field: str  # its key in JSON
    heading: str  # of its column
    unit: str  # s, tokens, tokens/s, pages, bytes, requests, or ratio
    meaning: str


CANDIDATE = (
    Term("cached_tokens", "cached", "tokens", "prompt tokens held there, of all tiers that are quicker than computing"),
    Term("device_tokens", "device", "tokens", "of those, in its KV pool"),
    Term("host_tokens", "host", "tokens", "of those, in its host memory"),
    Term("store_tokens", "store", "tokens", "of those, in its store"),
    Term("num_requests", "requests", "requests", "that run or wait there"),
    Term("queued_tokens", "queued", "tokens", "prompt tokens of others, not computed yet"),
    Term("own_tokens", "to do", "tokens", "prompt tokens to compute there"),
    Term("prefill_tokens_per_s", "tok/s", "tokens/s", "prompt tokens that it computes in a second"),
    Term("ttft_s", "TTFT", "s", "expected time to the first token: all of the next seven"),
    Term("queue_s", "queue", "s", "prompt tokens that are computed before"),
    Term("own_s", "own", "s", "its own tokens that are not cached there"),
    Term("load_s", "load", "s", "its tokens in host memory and store, loaded"),
    Term("step_s", "step", "s", "a step's fixed part, as far as its tokens and the queued ones are too few to fill it"),
    Term("decode_s", "decode", "s", "the decode step in progress"),
    Term("pressure_s", "pressure", "s", "wait for pages or a place"),
    Term("way_s", "way", "s", "to the replica and back, as measured of late"),
    Term("behind_s", "others", "s", "what it takes from others"),
    Term("pool_utilization", "pool", "ratio", "share of the KV pool that a new request cannot have"),
    Term("report_age_s", "age", "s", "of the replica's report"),
)
DECODE_REPLICA = (
    Term("cached_tokens", "cached", "tokens", "prompt tokens held there"),
    Term("own_tokens", "to do", "tokens", "prompt tokens to compute there, or to receive"),
    Term("transfer_pages", "pages", "pages", "to receive"),
    Term("transfer_bytes", "to receive", "bytes", "K and V of those pages"),
    Term("ttft_s", "TTFT", "s", "first token, computed there"),
    Term("stall_s", "stall", "s", "what its requests lose meanwhile"),
    Term("transfer_s", "transfer", "s", "the pages, over the link's rate"),
    Term("overhead_s", "fixed", "s", "what a hand-off costs however small it is"),
    Term("pressure_s", "pressure", "s", "wait for pages or a place"),
    Term("load_s", "load", "s", "what its host memory and store hold, loaded; part of TTFT"),
    Term("slower_s", "slower", "s", "slower steps beside those that run there; in both sums"),
    Term("local_cost_s", "computed", "s", "TTFT + stall + slower"),
    Term(
        "receive_cost_s", "received", "s",
        "transfer + fixed + load + pressure + slower, without the prefill replica's part",
    ),
)


def written(
    terms: tuple[Term, ...], values: Mapping[str, Any], form: Mapping[str, Callable[[Any], str]]
) -> dict[str, str]:
    """By field, each term's value in ``values`` as ``form`` writes its unit."""
    return {term.field: form[term.unit](values[term.field]) for term in terms}


def chosen(terms: tuple[Term, ...], fields: str) -> list[Term]:
    """Those of ``fields``, names with spaces between, in that order."""
    by_field = {term.field: term for term in terms}
    return [by_field[name] for name in fields.split()]


def headings(terms: tuple[Term, ...]) -> dict[str, str]:
    """Heading by field."""
    return {term.field: term.heading for term in terms}
