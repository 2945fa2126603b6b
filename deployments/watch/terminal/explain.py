"""``manta explain RID``: the answer of ``GET /route/{rid}`` in words and tables.

In order: where the request went and why, its candidates, each try, and where its time went. What an answer lacks (an
older router's, a request that still runs) is left out, never drawn as 0.
"""

import contextlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any

from rich.console import Console, RenderableType

from deployments.watch.terminal import ask
from deployments.watch.terminal.keyboard import on_terminal
from deployments.watch.terminal.table import Cell, Table, bar, count, percent, plain, seconds, spaced
from deployments.watch.terminal.tables import names_of
from deployments.watch.terminal.words import STAGES
from routing.terms import CANDIDATE, DECODE_REPLICA, Term

_BAR_WIDTH = 48
_FORM: Mapping[str, Callable[[float | None], str]] = {
    "s": seconds, "tokens": count, "tokens/s": count, "requests": count, "pages": count,
    "bytes": lambda value: f"{count(value)}B", "ratio": percent,
}  # fmt: skip
_SPARE = (  # columns that a narrow terminal leaves out, in this order, behind any other that is shown "if any"
    ">tok/s", "role", ">pool", ">requests", ">queued", ">store", ">host", ">way", ">step", ">pressure", ">decode",
    ">load", ">to do",
)  # fmt: skip

Part = str | Table


def asked(url: str, rid: str, key: str | None) -> RenderableType:
    """Draw what the Manta at ``url`` knows of request ``rid``. Raises: Unanswered."""
    body, names = ask.route(url, rid, key), {}
    with contextlib.suppress(ask.Unanswered):  # no live view, no names
        names = names_of(ask.state(url, key))
    return drawn(body, names)


def drawn(body: Mapping[str, Any], names: Mapping[str, str] = MappingProxyType({})) -> RenderableType:
    """Draw the heading, then for each try its sentence, candidates, pair, KV transfer and end; then the stages.

    ``names``: of replicas by id, as the live view has them; of those that are not in it only the id is shown.
    """
    said: list[Part] = [_heading(body)]
    for number, each in enumerate(body["tries"]):
        sentence = each.get("sentence") or f"{body['rid']} went to {each['replica']} by {each['policy']}."
        said.append(sentence if len(body["tries"]) == 1 else f"Try {number + 1}: {sentence}")
        if each["candidates"]:
            said.append(_candidates(each["candidates"], names))
        if each.get("pair"):
            said += _pair(each, names)
        if each.get("fetch"):
            said.append(each["fetch"]["sentence"])
        said.append(_end(each))
    waterfall = _waterfall(body)
    return spaced([*said, *([] if waterfall is None else [waterfall])])


def _heading(body: Mapping[str, Any]) -> str:
    at = datetime.fromtimestamp(body["time"], tz=UTC).astimezone()
    tries = len(body["tries"])
    return (
        f"{body['rid']}: {body['outcome']}, {tries} {'try' if tries == 1 else 'tries'}, "
        f"{at:%Y-%m-%d %H:%M:%S}, router {body['router']}"
    )


def _candidates(candidates: Sequence[Mapping[str, Any]], names: Mapping[str, str]) -> Table:
    shown = _shown(CANDIDATE, candidates)
    marked = [index for index, each in enumerate(candidates) if each["chosen"]]
    gone = any(each.get("gone_tokens") for each in candidates)
    rows = [
        {
            "": ">" if each["chosen"] else "",
            "candidate": each["replica"],
            **_named(each["replica"], names),
            "role": each["role"],
            **_numbers(shown, each),
            **({"hit ends by": each["ended_by"]} if gone else {}),
        }
        for each in candidates
    ]
    columns = (f">{term.heading}" for term in shown if term.in_terminal == "if any")
    others = [column for column in columns if column not in _SPARE]
    return Table(rows, styles=dict.fromkeys(marked[:1], "bold"), spare=(*others, *_SPARE))


def _shown(terms: Sequence[Term], rows: Sequence[Mapping[str, Any]]) -> list[Term]:
    return [
        term
        for term in terms
        if term.in_terminal == "always" or (term.in_terminal == "if any" and any(row.get(term.field) for row in rows))
    ]


def _numbers(terms: Sequence[Term], values: Mapping[str, Any]) -> dict[str, str]:
    """Return the terms' values by their columns; ``=`` marks the sum of the others."""
    return {
        f">{'= ' if term.field == 'ttft_s' else ''}{term.heading}": _FORM[term.unit](values[term.field])
        for term in terms
    }


def _named(replica_id: str, names: Mapping[str, str]) -> dict[str, str]:
    return {"name": names.get(replica_id, "")} if names else {}


def _pair(each: Mapping[str, Any], names: Mapping[str, str]) -> list[Part]:
    """Say where the prompt is computed and what that costs; then how the KV transfer went."""
    pair = each["pair"]
    where = "computed where it decodes" if pair["prefill"] is None else f"handed over by {pair['prefill']}"
    why = f"; {pair['why']}" if pair["why"] else ""
    transfer, local = seconds(pair["kv_transfer_cost_s"]), seconds(pair["local_cost_s"])
    costs = f"handing over costs {transfer}, computing in place {local}"
    shown = _shown(DECODE_REPLICA, pair["decode_replicas"])
    rows = [
        {
            "": ">" if terms["replica_id"] == pair["decode"] else "",
            "decode replica": terms["replica_id"],
            **_named(terms["replica_id"], names),
            **_numbers(shown, terms),
        }
        for terms in pair["decode_replicas"]
    ]
    return [f"The prompt is {where} ({pair['reason']}{why}): {costs}.", Table(rows), *_kv_transfer(each)]


def _kv_transfer(each: Mapping[str, Any]) -> list[Part]:
    report = each.get("kv_transfer")
    lines = [f"Not asked: {replica}, {why}" for replica, why in sorted((each.get("held_out") or {}).items())]
    if report is not None and report["transferred"]:
        lines.append(
            f"KV transfer: {report['num_pages']} pages, {count(report['num_bytes'])}B "
            f"in {seconds(report['transfer_s'])} "
            f"(room after {seconds(report['grant_s'])}, all there {seconds(report['wait_s'])} later)"
        )
    elif report is not None:
        lines.append(f"KV transfer failed: {report['reason']}; the prompt was computed where it decodes")
    return ["\n".join(lines)] if lines else []


def _end(each: Mapping[str, Any]) -> str:
    actual, predicted = each["actual"], each["predicted"]
    if each["failure"]:
        return f"It failed: {each['failure']}"
    if each.get("moved"):
        return f"It waited there, and moved to begin sooner ({each['moved']})."
    if actual["ttft_s"] is None:
        return f"Outcome: {each['outcome']}; no token {'yet' if each['outcome'] == 'running' else 'came'}."
    passed_s = actual.get("passed_s")
    passed = f" For {seconds(passed_s)} others went before it, of tenants that had used less." if passed_s else ""
    drafted = actual.get("drafted_tokens")
    drafts = f" Of {drafted} tokens that were drafted, {actual['accepted_tokens']} came true." if drafted else ""
    miss = each.get("miss")
    missed = f"\nNot cached: {miss['words']}." if miss else ""
    return (
        f"Outcome: {each['outcome']}. First token after "
        f"{seconds(actual['ttft_s'])} ({seconds(predicted['ttft_s'])} predicted); {actual['cached_tokens']} of "
        f"{each['num_tokens']} prompt tokens were cached ({predicted['cached_tokens']} predicted)."
        f"{passed}{drafts}{missed}"
    )


def _waterfall(body: Mapping[str, Any]) -> Table | None:
    """Draw the stages one after the other, each a bar from its start to its end."""
    stages, total_s = body.get("stages"), body.get("total_s")
    if not stages or not total_s:
        return None
    rows: list[dict[str, Cell]] = []
    start_s = 0.0
    for name, _, colour in STAGES:
        duration_s = stages.get(f"{name}_s") or 0.0
        if duration_s or name != "transfer":  # most requests have no transfer
            parts = ((" ", "default", start_s / total_s), ("=", colour, duration_s / total_s))
            drawn = bar(parts, f"{percent(duration_s / total_s):>5}", width=_BAR_WIDTH)
            rows.append({"stage": name, ">time": seconds(duration_s), f"of {seconds(total_s)}": drawn})
        start_s += duration_s
    return Table(rows)


def run(url: str, rid: str, key: str | None, *, as_json: bool) -> int:
    """Print the answer. Return the exit status: 0, or why there is no answer (ask.py)."""
    try:
        if as_json:
            print(json.dumps(ask.route(url, rid, key)))
        elif on_terminal(sys.stdout):
            Console().print(asked(url, rid, key))
        else:
            print(plain(asked(url, rid, key)))
    except ask.Unanswered as error:
        print(error, file=sys.stderr)
        return error.status
    return 0
