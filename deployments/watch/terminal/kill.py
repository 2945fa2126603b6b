"""``manta kill REPLICA``: ends the process of one replica at once, and waits until another one stands in its place.

The observatory ends it, with the admin key, as for the live view. What then happened is told by its events.

Never:     kills without asking on a terminal, unless told to.
"""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from deployments.watch.terminal import ask
from deployments.watch.terminal.table import seconds
from deployments.watch.terminal.words import short_id

LOOK_S = 1.0  # between two questions for the state
Row = Mapping[str, Any]


def chosen(replicas: Sequence[Row], name: str) -> Row:
    """Return the replica that ``name`` means: its name (replica 1), its id, or the number of its name or a part of its
    id that no other has. Raises: Unanswered."""
    found = [each for each in replicas if name in (each["id"], each["name"])]
    found = found or [each for each in replicas if name == each["name"].rpartition(" ")[2]]
    found = found or [each for each in replicas if name in each["id"]]
    if len(found) == 1:
        return found[0]
    what = f"{name!r} may be each of {len(found)} replicas" if found else f"there is no replica {name!r}"
    known = ", ".join(f"{each['name']} ({short_id(each['id'])})" for each in replicas)
    raise ask.Unanswered(f"{what}; there are: {known or 'none'}", ask.NOT_THERE)


def run(
    url: str, name: str, key: str | None, *, sure: bool, for_s: float,
    sleep: Callable[[float], None] = time.sleep, clock: Callable[[], float] = time.monotonic,
) -> int:  # fmt: skip
    """Run the command. Return the exit status: 0, NOT_THERE where nothing was killed or no other replica came within
    ``for_s``, or why Manta did not answer (ask.py)."""
    facts: Row = {}
    try:
        state = ask.state(url, key)
        replica = chosen(state["replicas"], name)
        facts = _facts(url, replica["id"], key)
        if not sure and sys.stdin.isatty() and not _confirmed(replica, facts, state["replicas"]):
            print("nothing was done")
            return ask.NOT_THERE
        killed_s, before = clock(), max((each["seq"] for each in state["events"]), default=0)
        done = ask.replica(url, replica["id"], key, action="kill")
    except ask.Unanswered as error:
        print(error, file=sys.stderr)
        if facts and error.status == ask.REFUSED:  # Manta has no key: a wrong one would have been refused before
            print(f"without one, on node {facts['address']}: kill -9 {facts['pid']}", file=sys.stderr)
        return error.status
    print(f"{_named(replica, facts)}: {done['message']}", flush=True)
    while (waited_s := clock() - killed_s) < for_s:
        sleep(LOOK_S)
        new = [each for each in _events(url, key) if each["seq"] > before]
        replaced = [each for each in new if each["kind"] == "replaced" and each["role"] == replica["role"]]
        if replaced:
            for each in (*(each for each in new if each["replica"] == replica["id"]), replaced[0]):
                print(each["text"])
            return 0
    print(f"no other replica is ready after {seconds(waited_s)}: `manta top` and `manta logs` say why", file=sys.stderr)
    return ask.NOT_THERE


def _facts(url: str, replica_id: str, key: str | None) -> Row:
    """Return the facts about a replica; none where they do not come now: it may hang. Raises: Unanswered."""
    try:
        return ask.replica(url, replica_id, key)
    except ask.Unanswered as error:
        if not error.may_pass:
            raise
        print(f"where it runs is not known: {error}", file=sys.stderr)
        return {}


def _confirmed(replica: Row, facts: Row, replicas: Sequence[Row]) -> bool:
    others = sum(
        each["state"] == "accepting" and each["role"] == replica["role"] and each["id"] != replica["id"]
        for each in replicas
    )
    rest = "its requests go on at another one" if others else "no other one takes requests until it is replaced"
    return input(f"Kill {_named(replica, facts)}? ({rest}) [y/N] ").strip().lower() in ("y", "yes")


def _named(replica: Row, facts: Row) -> str:
    where = f"process {facts.get('pid') or '?'} on node {facts.get('address') or '?'}"
    return f"{replica['name']} ({short_id(replica['id'])}, {where})"


def _events(url: str, key: str | None) -> list[Row]:
    """Return the last events; none while Manta does not answer."""
    try:
        events: list[Row] = ask.state(url, key)["events"]
    except ask.Unanswered:
        return []
    return events
