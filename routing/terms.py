"""What the terms of a decision are called and mean; text, JSON, live view, terminal and document are drawn from here.

Owns:   the names, in the order of the JSON. The values are types.py's: `Terms` and what stands beside them in a
        `Candidate`, and `PairTerms`. To add one: docs/extending.md.
Never:  imports numpy: the terminal starts without it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Unit = Literal["s", "tokens", "tokens/s", "pages", "bytes", "requests", "ratio"]


@dataclass(frozen=True, slots=True)
class Term:
    """One number of a candidate."""

    field: str  # its key in JSON
    heading: str  # of its column
    unit: Unit
    meaning: str
    parts_of: tuple[str, ...] = ()  # fields of the sums that it is a part of
    bar: str = ""  # what a bar of the live view calls it; by default the heading
    in_terminal: Literal["always", "if any", "never"] = "if any"  # if any: where a candidate has some


TTFT = ("ttft_s", "cost_s")  # a part of both; cost_s is what `estimated_ttft` compares
CACHED = ("cached_tokens",)
CANDIDATE = (
    Term(
        "cached_tokens", "cached", "tokens", "prompt tokens held there, of all tiers that are quicker than computing",
        in_terminal="always",
    ),
    Term("device_tokens", "device", "tokens", "of those, in its KV pool", CACHED, in_terminal="never"),
    Term("host_tokens", "host", "tokens", "of those, in its host memory", CACHED),
    Term("store_tokens", "store", "tokens", "of those, in its store", CACHED),
    Term("fetched_tokens", "fetched", "tokens", "after those on device and host, sent by another replica", CACHED),
    Term(
        "gone_tokens", "gone", "tokens", "after those in its pool: K and V are there, the window or state is not"
    ),
    Term("own_tokens", "to do", "tokens", "prompt tokens to compute there", in_terminal="always"),
    Term("queued_tokens", "queued", "tokens", "prompt tokens of others, not computed yet", in_terminal="always"),
    Term(
        "passed_tokens", "passed", "tokens", "prompt tokens of late requests, before which it goes: it can be in time"
    ),
    Term(
        "prefill_tokens_per_s", "tok/s", "tokens/s", "prompt tokens that it computes in a second", in_terminal="always"
    ),
    Term("queue_s", "queue", "s", "prompt tokens that are computed before", TTFT, in_terminal="always"),
    Term("own_s", "own", "s", "its own tokens that are not cached there", TTFT, bar="prefill", in_terminal="always"),
    Term("load_s", "load", "s", "its tokens in host memory and store, loaded", TTFT),
    Term("fetch_s", "fetch", "s", "what another replica sends, as far as that takes longer than the queue", TTFT),
    Term("adapter_s", "adapter", "s", "its adapter (LoRA), loaded where it is not yet", TTFT),
    Term(
        "step_s", "step", "s", "a step's fixed part, as far as its tokens and the queued ones are too few to fill it",
        TTFT, bar="fixed part of a step",
    ),
    Term("decode_s", "decode", "s", "the decode step in progress", TTFT, bar="decode step", in_terminal="always"),
    Term(
        "pressure_s", "pressure", "s", "wait for pages or a place", TTFT, bar="wait for pages", in_terminal="always"
    ),
    Term("way_s", "way", "s", "to the replica and back, as measured of late", TTFT, bar="way there and back"),
    Term("ttft_s", "TTFT", "s", "expected time to the first token: queue to way together", in_terminal="always"),
    Term(
        "behind_s", "others", "s", "what it takes from others", ("cost_s",), bar="cost to others", in_terminal="always"
    ),
    Term("num_requests", "requests", "requests", "that run or wait there", in_terminal="always"),
    Term(
        "pool_utilization", "pool", "ratio", "share of the KV pool that a new request cannot have",
        in_terminal="always",
    ),
    Term("free_tokens", "free", "tokens", "that fit into pages of its KV pool that hold nothing", in_terminal="never"),
    Term("report_age_s", "age", "s", "of the replica's report", in_terminal="never"),
)  # fmt: skip
LOCAL, RECEIVED = ("local_cost_s",), ("receive_cost_s",)
DECODE_REPLICA = (
    Term("cached_tokens", "cached", "tokens", "prompt tokens held there", in_terminal="always"),
    Term("own_tokens", "to do", "tokens", "prompt tokens to compute there, or to receive", in_terminal="never"),
    Term("transfer_pages", "pages", "pages", "to receive", in_terminal="never"),
    Term("transfer_bytes", "to receive", "bytes", "K and V of those pages", in_terminal="always"),
    Term("transfer_s", "transfer", "s", "the pages, over the link's rate", RECEIVED, in_terminal="always"),
    Term(
        "overhead_s", "fixed", "s", "what a KV transfer costs however small it is", RECEIVED, bar="fixed cost",
        in_terminal="never",
    ),
    Term(
        "load_s", "load", "s", "what its host memory and store hold, loaded; part of TTFT", RECEIVED,
        in_terminal="never",
    ),
    Term("adapter_s", "adapter", "s", "its adapter, loaded; part of TTFT", RECEIVED, in_terminal="never"),
    Term(
        "pressure_s", "pressure", "s", "wait for pages or a place", RECEIVED, bar="wait for pages",
        in_terminal="never",
    ),
    Term("ttft_s", "TTFT", "s", "first token, computed there", LOCAL, bar="prefill", in_terminal="never"),
    Term("stall_s", "stall", "s", "what its requests lose meanwhile", LOCAL, in_terminal="always"),
    Term(
        "slower_s", "slower", "s", "slower steps beside those that run there; in both sums", LOCAL + RECEIVED,
        bar="slower steps", in_terminal="always",
    ),
    Term("local_cost_s", "computed", "s", "TTFT + stall + slower", in_terminal="always"),
    Term(
        "receive_cost_s", "received", "s",
        "transfer + fixed + load + adapter + pressure + slower, without the prefill replica's part",
        in_terminal="always",
    ),
)  # fmt: skip


def written(
    terms: tuple[Term, ...], values: Mapping[str, Any], form: Mapping[str, Callable[[Any], str]]
) -> dict[str, str]:
    """By field, each term's value in ``values`` as ``form`` writes its unit."""
    return {term.field: form[term.unit](values[term.field]) for term in terms}


def parts(terms: tuple[Term, ...], total: str) -> list[Term]:
    """Those whose sum the field ``total`` is."""
    return [term for term in terms if total in term.parts_of]


def headings(terms: tuple[Term, ...]) -> dict[str, str]:
    """Heading by field."""
    return {term.field: term.heading for term in terms}


def markdown(terms: tuple[Term, ...]) -> str:
    """Make the table of docs/routing.md."""
    rows = [f"| `{term.field}` | {term.heading} | {term.unit} | {term.meaning} |" for term in terms]
    return "\n".join(["| field | heading | unit | meaning |", "|---|---|---|---|", *rows]) + "\n"
