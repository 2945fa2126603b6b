"""``python -m deployments top``: the replicas, pools and rates of a running Manta, until interrupted.

On a terminal the table is drawn in place; elsewhere, and with NO_COLOR, a block of plain lines comes each interval.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TextIO

from rich.console import Console
from rich.live import Live

from deployments.watch.terminal import ask, top_view
from deployments.watch.terminal.table import seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    once: bool
    as_json: bool
    interval_s: float


def run(url: str, key: str | None, options: Options) -> int:
    """The exit status: 0, or why Manta did not answer (ask.py)."""

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
    """Whether what is written there may be drawn in place and in colour."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _blocks(
    fetch: Callable[[], dict[str, Any]], options: Options, out: TextIO, err: TextIO, wait: Callable[[float], None]
) -> None:
    """A block each interval. Raises: Unanswered for the first, or when asking again cannot help."""
    answered = False
    while True:
        try:
            state = fetch()
            text = json.dumps(state) if options.as_json else f"{top_view.plain(state)}\n"
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
    """In place; while Manta is away the last table stays, and above it for how long. Raises: as `_blocks`."""
    state, heard_s = fetch(), clock()
    with Live(top_view.drawn(state), console=console, screen=True, auto_refresh=False) as live:
        live.refresh()
        while True:
            wait(interval_s)
            try:
                state, heard_s, note = fetch(), clock(), ""
            except ask.Unanswered as error:
                if not error.may_pass:
                    raise
                note = f"no answer for {seconds(clock() - heard_s)} (asking again): {error}"
            live.update(top_view.drawn(state, note=note), refresh=True)
