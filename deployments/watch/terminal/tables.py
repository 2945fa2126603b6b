"""The tables of `manta top`: replicas, requests, routers and links, from the observatory's state.

Never:     asks, or draws on a screen.
Invariant: what a state lacks is drawn as "-", never as 0.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from deployments.watch.terminal.health import device_pool, used_ratio, waiting
from deployments.watch.terminal.table import Cell, Table, bar, count, percent, seconds, share
from deployments.watch.terminal.words import (
    ID_CHARS,
    POOL,
    RUNNING,
    STAGES,
    STATE_COLOURS,
    TROUBLE,
    outcome_colour,
    short_id,
)

_NODE_CHARS = 8
STAGES_WIDTH = 24

Row = Mapping[str, Any]


def replica_table(replicas: Sequence[Row]) -> Table:
    lower = any(each.get("tiers") for each in replicas)
    spare = ("node", ">saved", ">cached", ">prefill/s", ">output/s", "id", ">loaded", ">host")
    return Table([_replica(each, lower=lower) for each in replicas], spare=spare)


def names_of(state: Row) -> dict[str, str]:
    """Return the names of the replicas of a state, those that have ended too, by id."""
    return {each["id"]: each["name"] for each in (*state.get("ended", ()), *state["replicas"])}


def request_table(
    requests: Sequence[Row], names: Mapping[str, str], *, now_s: float, stages_width: int = STAGES_WIDTH
) -> Table:
    """``names``: of replicas by id; ``now_s``: the state's time, for requests that run."""
    spare = (">output", ">cached", "replica", "outcome")
    return Table([_request(each, names, now_s, stages_width) for each in requests], spare=spare)


def router_table(routers: Sequence[Row]) -> Table:
    return Table([
        {
            "router": each["id"][:ID_CHARS],
            "node": (each.get("node") or "-")[:_NODE_CHARS],
            ">open": count(each.get("open")),
            "answering": "yes" if each["answering"] else Text("no", TROUBLE),
        }
        for each in routers
    ])  # fmt: skip


def link_table(links: Sequence[Row], names: Mapping[str, str]) -> Table:
    return Table([
        {
            "from": names.get(each["from"]) or short_id(each["from"]),
            "to": names.get(each["to"]) or short_id(each["to"]),
            ">KV transfers/s": count(each["kv_transfers_per_s"]),
            ">failed/s": Text(count(each["failed_per_s"]), TROUBLE if each["failed_per_s"] else ""),
            ">bytes/s": count(each["bytes_per_s"]),
        }
        for each in links
    ])  # fmt: skip


def cached_share(replica: Row) -> float | None:
    """Return the share of prompt tokens that came from the cache in the last seconds."""
    rates = replica.get("rates") or {}
    computed, cached = rates.get("prefill_tokens_per_s"), rates.get("cached_tokens_per_s")
    return None if computed is None or cached is None else share(cached, cached + computed)


def _replica(each: Row, *, lower: bool) -> dict[str, Cell]:
    rates = each.get("rates") or {}
    return {
        "replica": each["name"],
        "id": short_id(each["id"]),
        "node": each.get("host") or (each.get("node") or "-")[:_NODE_CHARS],
        "state": Text(each["state"], STATE_COLOURS.get(each["state"], TROUBLE)),
        ">running": f"{count(each.get('running'))}/{count(each.get('running_limit'))}",
        ">waiting": count(waiting(each)),
        "pool": _pool(each),
        **(_lower(each) if lower else {}),
        ">cached": percent(cached_share(each)),
        ">prefill/s": count(rates.get("prefill_tokens_per_s")),
        ">output/s": count(rates.get("decode_tokens_per_s")),
    }


def _lower(each: Row) -> dict[str, str]:
    """Return how full the host tier is, the tokens loaded from the lower tiers, and the seconds of prefill saved."""
    tiers = each.get("tiers")
    host = next((pool for pool in each.get("pools") or [] if pool["tier"] == "L2"), None)
    if not tiers or host is None:
        return dict.fromkeys((">host", ">loaded", ">saved"), "-")
    wrong = f", {count(tiers['wrong_pages'])} WRONG" if tiers["wrong_pages"] else ""
    return {
        ">host": percent(share(host["evictable"], host["capacity"])),
        ">loaded": count(tiers["host_hit_tokens"] + tiers["store_hit_tokens"]) + wrong,
        ">saved": seconds(tiers["saved_s"]),
    }


def _pool(each: Row) -> Cell:
    pool = device_pool(each)
    if pool is None:
        return "-"
    capacity = pool["capacity"]
    parts = ((character, colour, pool[state] / capacity) for state, character, colour in POOL)
    return bar(parts, f"{percent(used_ratio(each)):>5} of {count(capacity)}")


def _request(row: Row, names: Mapping[str, str], now_s: float, stages_width: int) -> dict[str, Cell]:
    word = row["outcome"]
    total_s = elapsed_s(row, now_s)
    tries = f", {row['tries']} tries" if row["tries"] > 1 else ""
    cached = None if row["cached_tokens"] is None else share(row["cached_tokens"], row["prompt_tokens"])
    return {
        "request": row["rid"][-ID_CHARS:],
        "outcome": Text(("open" if word == RUNNING else word) + tries, outcome_colour(word)),
        "replica": names.get(row["replica"]) or short_id(row["replica"]),
        ">prompt": count(row["prompt_tokens"]),
        ">cached": percent(cached),
        ">output": count(row["output_tokens"]),
        ">TTFT": seconds(row["ttft_s"]),
        ">total": seconds(total_s),
        "stages": _stages(row, total_s, stages_width),
    }


def elapsed_s(row: Row, now_s: float) -> float | None:
    """Return how long a request took, or has run so far."""
    if row["total_s"] is not None:
        return float(row["total_s"])
    return max(0.0, now_s - row["time"]) if row["outcome"] == RUNNING else None


def _stages(row: Row, total_s: float | None, width: int) -> Cell:
    """Draw each stage's share of the request's own time; of one that runs, the stage it is in takes the rest."""
    if not total_s:
        return "-"
    running, grows = row["outcome"] == RUNNING, "queue" if row["ttft_s"] is None else "decode"
    spent = {name: row["stages"][f"{name}_s"] for name, _, _ in STAGES}
    if running:
        spent[grows] += max(0.0, total_s - sum(spent.values()))
    parts = ((character, colour, spent[name] / total_s) for name, character, colour in STAGES)
    return bar(parts, "..." if running else "", width=width)
