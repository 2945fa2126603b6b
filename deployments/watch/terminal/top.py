"""``python -m deployments top``: the replicas, pools and rates of a running Manta, until interrupted.

On a terminal the tables are drawn in place; elsewhere, and with NO_COLOR, a block of plain lines comes each interval.
The state's form is deployments/watch/observatory/README.md's.

Invariant: what a state lacks is drawn as "-", never as 0.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from deployments.watch.terminal import ask
from deployments.watch.terminal.table import Bar, Table, count, percent, seconds, share

POOL = (  # (state of tokens, character, colour); what a new request cannot have comes first
    ("protected", "#", "blue"),
    ("reserved", "%", "cyan"),
    ("quarantined", "x", "red"),
    ("evictable", "o", "yellow"),
    ("free", ".", "bright_black"),
)
TAKEN = ("protected", "reserved", "quarantined")
LEGEND = "pool: " + ", ".join(f"{character} {state}" for state, character, _ in POOL)
_ID_CHARS = 12
_NODE_CHARS = 8


def plain(state: Mapping[str, Any]) -> str:
    """Return a block of lines without any escape sequence."""
    return "\n\n".join([_heading(state), *(table.plain() for table in tables(state)), LEGEND])


def drawn(state: Mapping[str, Any], *, note: str = "") -> RenderableType:
    """Return the same for rich; ``note`` comes first, since a low terminal cuts the end off."""
    parts: list[RenderableType] = [Text(note, style="bold red")] if note else []
    parts.append(Text(_heading(state), style="bold"))
    for table in tables(state):
        parts += [Text(), table]
    parts += [Text(), Text(LEGEND, style="bright_black")]
    return Group(*parts)


def tables(state: Mapping[str, Any]) -> list[Table]:
    """Return the tables of replicas and routers, and of links where prefill and decode are apart."""
    found = [_replicas(state["replicas"]), _routers(state["routers"])]
    if state["mode"] == "disaggregated":
        found.append(_links(state["links"]))
    return [table for table in found if table.rows]


def _heading(state: Mapping[str, Any]) -> str:
    totals, replicas, routers = state["totals"], state["replicas"], state["routers"]
    at = datetime.fromtimestamp(state["time"], tz=UTC).astimezone()
    lines = [
        f"{state['model']}, {state['mode']}: {_many(replicas, 'replica')}, {_many(routers, 'router')}  {at:%H:%M:%S}",
        f"requests/s {count(totals['requests_per_s'])}"
        f" | TTFT p50 {seconds(totals['ttft_p50_s'])}, p90 {seconds(totals['ttft_p90_s'])}"
        f" | reused {percent(totals['reuse_ratio'])}"
        f" | running {_total(replicas, 'running')}, waiting {_total(replicas, 'waiting')}"
        f" | fullest pool {percent(totals['fullest_pool_ratio'])}",
    ]
    if not replicas:
        lines.append("no replica yet: its weights are being loaded, or Serve cannot place it (see `serve status`)")
    return "\n".join(lines)


def _replicas(replicas: Sequence[Mapping[str, Any]]) -> Table:
    lower = any(each.get("tiers") for each in replicas)
    below = (">host", ">loaded", ">saved") if lower else ()
    columns = (
        "replica", "role", "node", "state", ">running", ">waiting", "pool", *below, ">hit", ">prefill/s", ">decode/s",
    )  # fmt: skip
    spare = ("node", ">saved", ">hit", ">prefill/s", ">decode/s", "role", ">loaded", ">host")
    return Table(columns=columns, rows=[_replica(each, lower=lower) for each in replicas], spare=spare)


def _replica(each: Mapping[str, Any], *, lower: bool) -> list[str | Bar]:
    rates = each.get("rates") or {}
    computed, cached = rates.get("prefill_tokens_per_s"), rates.get("cached_tokens_per_s")
    hit = None if computed is None or cached is None else share(cached, cached + computed)
    running = each.get("running")
    limit = each.get("running_limit")
    return [
        each["id"][:_ID_CHARS],
        each["role"],
        (each.get("node") or "-")[:_NODE_CHARS],
        each["state"] if not each.get("error") else f"{each['state']}: {each['error']}"[:40],
        f"{count(running)}/{count(limit)}",
        count(_waiting(each)),
        _pool(each.get("pools") or []),
        *(_lower(each) if lower else ()),
        percent(hit),
        count(computed),
        count(rates.get("decode_tokens_per_s")),
    ]


def _lower(each: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return how full the host tier is, the tokens loaded from the lower tiers, and the seconds of prefill saved."""
    tiers = each.get("tiers")
    host = next((pool for pool in each.get("pools") or [] if pool["tier"] == "L2"), None)
    if not tiers or host is None:
        return "-", "-", "-"
    wrong = f", {count(tiers['wrong_pages'])} WRONG" if tiers["wrong_pages"] else ""
    loaded = count(tiers["host_hit_tokens"] + tiers["store_hit_tokens"]) + wrong
    return percent(share(host["evictable"], host["capacity"])), loaded, seconds(tiers["saved_s"])


def _waiting(each: Mapping[str, Any]) -> float | None:
    """Return the number of requests that do not run yet, those between two replicas among them."""
    if each.get("waiting") is None:
        return None
    return sum(each.get(name) or 0 for name in ("waiting", "preallocating", "receiving", "handing_off"))


def _pool(pools: Sequence[Mapping[str, Any]]) -> str | Bar:
    device = next((pool for pool in pools if pool["tier"] == "L1" and pool["capacity"]), None)
    if device is None:
        return "-"
    capacity = device["capacity"]
    used = sum(device[state] for state in TAKEN) / capacity
    return Bar(
        parts=tuple((character, colour, device[state] / capacity) for state, character, colour in POOL),
        words=f"{percent(used):>5} of {count(capacity)}",
    )


def _routers(routers: Sequence[Mapping[str, Any]]) -> Table:
    return Table(
        columns=("router", "node", ">open", "answering"),
        rows=[
            [
                each["id"][:_ID_CHARS],
                (each.get("node") or "-")[:_NODE_CHARS],
                count(each.get("open")),
                "yes" if each["answering"] else "no",
            ]
            for each in routers
        ],
    )


def _links(links: Sequence[Mapping[str, Any]]) -> Table:
    return Table(
        columns=("from", "to", ">hand-offs/s", ">failed/s", ">bytes/s"),
        rows=[
            [
                each["from"][:_ID_CHARS],
                each["to"][:_ID_CHARS],
                count(each["hand_offs_per_s"]),
                count(each["failed_per_s"]),
                count(each["bytes_per_s"]),
            ]
            for each in links
        ],
    )


def _many(things: Sequence[object], name: str) -> str:
    return f"{len(things)} {name}{'' if len(things) == 1 else 's'}"


def _total(replicas: Sequence[Mapping[str, Any]], name: str) -> str:
    known = [_waiting(each) if name == "waiting" else each.get(name) for each in replicas]
    return count(sum(value for value in known if value is not None))


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What was typed behind ``top``: once or live, table or JSON."""

    once: bool
    as_json: bool
    interval_s: float


def run(url: str, key: str | None, options: Options) -> int:
    """Run the command. Return the exit status: 0, or why Manta did not answer (ask.py)."""

    def fetch() -> dict[str, Any]:
        return ask.state(url, key)

    try:
        if not options.once and not options.as_json and on_terminal(sys.stdout):
            _live(fetch, options.interval_s, Console(), time.sleep, time.monotonic)
        else:
            _blocks(fetch, options, sys.stdout, sys.stderr, time.sleep)
    except ask.Unanswered as error:
        print(error, file=sys.stderr)
        return error.status
    except KeyboardInterrupt:
        pass
    return 0


def on_terminal(stream: TextIO) -> bool:
    """Return whether output there may be drawn in place and in colour."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _blocks(
    fetch: Callable[[], dict[str, Any]], options: Options, out: TextIO, err: TextIO, wait: Callable[[float], None]
) -> None:
    """Print a block each interval. Raises: Unanswered for the first, or if asking again cannot help."""
    answered = False
    while True:
        try:
            state = fetch()
            text = json.dumps(state) if options.as_json else f"{plain(state)}\n"
            print(text, file=out, flush=True)
            answered = True
        except ask.Unanswered as error:
            if not (answered and error.may_pass):
                raise
            print(error, file=err, flush=True)
        if options.once:
            return
        wait(options.interval_s)


def _live(
    fetch: Callable[[], dict[str, Any]],
    interval_s: float,
    console: Console,
    wait: Callable[[float], None],
    clock: Callable[[], float],
) -> None:
    """Draw in place; while Manta does not answer, a note stands above the last table. Raises: as `_blocks`."""
    state, heard_s = fetch(), clock()
    with Live(drawn(state), console=console, screen=True, auto_refresh=False) as live:
        live.refresh()
        while True:
            wait(interval_s)
            try:
                state, heard_s, note = fetch(), clock(), ""
            except ask.Unanswered as error:
                if not error.may_pass:
                    raise
                note = f"no answer for {seconds(clock() - heard_s)} (asking again): {error}"
            live.update(drawn(state, note=note), refresh=True)
