"""``manta top``: a running Manta on the terminal, until q or Ctrl-C.

On a terminal a screen that is drawn in place (view.py); elsewhere, and with NO_COLOR, one snapshot in plain lines. The
state's form is deployments/watch/observatory/README.md's.

Thread:    `run` draws on the main thread. Questions to Manta are asked on threads of their own, so that keys are
           heeded while an answer is late; a thread that still waits at the end is left behind.
"""

import contextlib
import json
import os
import queue
import select
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from deployments.watch.terminal import ask, explain
from deployments.watch.terminal.health import figures, merged, troubles, warnings
from deployments.watch.terminal.keyboard import on_terminal, pressed, single_keys
from deployments.watch.terminal.table import plain, spaced
from deployments.watch.terminal.tables import link_table, names_of, replica_table, request_table, router_table
from deployments.watch.terminal.view import View, heading
from deployments.watch.terminal.words import LEGEND, STAGE_LEGEND, TROUBLE

SNAPSHOT_REQUESTS = 10

Fetch = Callable[[], dict[str, Any]]
Found = dict[str, Any] | RenderableType | ask.Unanswered


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What was typed behind ``top``: once or live, text or JSON."""

    once: bool
    as_json: bool
    interval_s: float


def run(url: str, key: str | None, options: Options) -> int:
    """Run the command. Return the exit status: 0, or why Manta did not answer (ask.py)."""

    version = 0

    def fetch() -> dict[str, Any]:
        nonlocal version
        answer = ask.state(url, key, since=version)
        version = answer["version"]
        return answer

    def told(rid: str) -> RenderableType:
        try:
            return explain.asked(url, rid, key)
        except ask.Unanswered as error:
            return Text(str(error), TROUBLE)

    try:
        state = fetch()
        if options.as_json:
            print(json.dumps(state))
        elif options.once or not on_terminal(sys.stdout):
            print(plain(snapshot(merged(None, state))))
        else:
            _live(View(state, time.monotonic()), fetch, told, options.interval_s)
    except ask.Unanswered as error:
        print(error, file=sys.stderr)
        return error.status
    except KeyboardInterrupt:
        pass
    return 0


def snapshot(state: Mapping[str, Any]) -> RenderableType:
    """Draw a state once, for what is no terminal."""
    told = [f"{each.name} {each.text}{' (!)' if each.is_trouble else ''}" for each in figures(state)]
    wrong = [f"! {each}" for each in [*troubles(state), *warnings(state)]] or ["all well"]
    tables = [
        replica_table(state["replicas"]),
        request_table(state["requests"][:SNAPSHOT_REQUESTS], names_of(state), now_s=state["time"]),
        router_table(state["routers"]),
        link_table(state["links"], names_of(state)),
    ]
    head = "\n".join([heading(state), " | ".join(told), *wrong])
    return spaced([head, *(each for each in tables if each.rows), f"{LEGEND}\n{STAGE_LEGEND}"])


class _Questions:
    """Questions that are asked on threads; `found` has the answers, and the descriptor is readable when one came."""

    def __init__(self) -> None:
        self.found: queue.SimpleQueue[Found] = queue.SimpleQueue()
        self.readable, self._writable = os.pipe()

    def ask(self, question: Callable[[], Found]) -> None:
        threading.Thread(target=self._answer, args=(question,), daemon=True).start()

    def ask_each(self, question: Callable[[], Found], interval_s: float) -> None:
        def go_on() -> None:
            while True:
                time.sleep(interval_s)
                self._answer(question)

        threading.Thread(target=go_on, daemon=True).start()

    def _answer(self, question: Callable[[], Found]) -> None:
        try:
            self.found.put(question())
        except ask.Unanswered as error:
            self.found.put(error)
        os.write(self._writable, b".")


def _live(view: View, fetch: Fetch, told: Callable[[str], RenderableType], interval_s: float) -> None:
    """Draw in place until a key ends it; while Manta does not answer, the last state stays.

    Raises: Unanswered if asking again cannot help.
    """
    console, questions = Console(), _Questions()
    questions.ask_each(fetch, interval_s)
    with single_keys(sys.stdin) as keys, Live(console=console, screen=True, auto_refresh=False) as live:
        while not view.quits:
            live.update(view.drawn(*console.size), refresh=True)
            watched = [questions.readable] if keys is None else [questions.readable, keys]
            ready, _, _ = select.select(watched, [], [])
            if questions.readable in ready:
                os.read(questions.readable, 1024)
                _take(view, questions)
            if keys in ready and keys is not None:
                typed = pressed(keys)
                keys = keys if typed else None  # the end of input
                for key in typed:
                    view.press(key)
            if view.wants is not None:
                rid, view.wants = view.wants, None
                view.show(Text(f"asking for {rid} ..."))
                questions.ask(lambda rid=rid: told(rid))  # type: ignore[misc]


def _take(view: View, questions: _Questions) -> None:
    with contextlib.suppress(queue.Empty):
        while True:
            found = questions.found.get_nowait()
            if isinstance(found, dict):
                view.take(found, time.monotonic())
            elif not isinstance(found, ask.Unanswered):
                view.answer(found)
            elif not found.may_pass:
                raise found
            else:
                view.lose(found, time.monotonic())
