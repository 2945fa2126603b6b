"""The screen of `manta top`: figures with their history, replicas, requests; and what each key does.

Owns:      the last state, which table the keys act on, its order, its chosen row.
Never:     asks, reads keys or writes to the terminal (top.py does).
Invariant: what is drawn has the height of the terminal: longer tables are scrolled to the chosen row.
Thread:    the main thread.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from rich.console import Group, RenderableType
from rich.layout import Layout
from rich.rule import Rule
from rich.table import Table as RichTable
from rich.text import Text

from dashboards.catalog import FAILED
from deployments.watch.terminal.health import figures, merged, ready_of, troubles, used_ratio, waiting, warnings
from deployments.watch.terminal.table import seconds, sparkline
from deployments.watch.terminal.tables import elapsed_s, link_table, names_of, replica_table, request_table
from deployments.watch.terminal.words import LEGEND, STAGE_LEGEND, TROUBLE, WARNING

CHOSEN = "reverse"
HEAD = 2  # lines
FIGURES = 3
ABOVE_ROWS = 2  # a table's title and its column names
LEAST_STAGES, MOST_STAGES = 12, 60  # characters of a stage bar
WIDE_ROWS = 38  # from this height on there is room for legend and links
KEYS = "q quit  tab other table  s sort  ↑↓ choose  enter explain  p pause  ? help"
HELP = f"""\
q        quit
tab      the keys act on the other table: replicas or requests
s        sort it by the next key; S by the one before
↑ ↓      choose a row (k and j too)
enter    explain the chosen request; escape goes back
p        pause: the screen keeps what it shows
?        this text; any key goes back

{LEGEND}
{STAGE_LEGEND}
The figures and the alerts are those of the live view. Red: an alert fires."""

Row = Mapping[str, Any]
Order = tuple[str, Callable[[Row], Any]]


def _falling(value: float | None) -> float:
    return float("inf") if value is None else -value


def _calm(each: Row) -> tuple[bool, bool, float]:
    state = each["state"]
    return state not in ("silent", "unhealthy"), state == "accepting", _falling(used_ratio(each))


REPLICA_ORDERS: tuple[Order, ...] = (
    ("trouble", _calm),
    ("pool", lambda each: _falling(used_ratio(each))),
    ("running", lambda each: _falling(each.get("running"))),
    ("waiting", lambda each: _falling(waiting(each))),
    ("output/s", lambda each: _falling((each.get("rates") or {}).get("decode_tokens_per_s"))),
    ("name", lambda each: each["id"]),
)


def _request_orders(now_s: float) -> tuple[Order, ...]:
    return (
        ("newest", lambda row: -row["time"]),
        ("trouble", lambda row: (row["outcome"] not in FAILED, row["tries"] < 2, -row["time"])),
        ("TTFT", lambda row: _falling(row["ttft_s"])),
        ("ITL", lambda row: _falling(row["itl_s"])),
        ("total", lambda row: _falling(elapsed_s(row, now_s))),
        ("prompt", lambda row: -row["prompt_tokens"]),
    )


@dataclass(slots=True)
class Place:
    """Where the keys are in one table: its order, and the chosen row."""

    order: int = 0
    chosen: int = 0

    def move(self, by: int, rows: int) -> None:
        self.chosen = min(max(self.chosen + by, 0), max(rows - 1, 0))

    def window(self, rows: int, room: int) -> range:
        """Return the rows that are shown, the chosen one among them."""
        self.move(0, rows)
        first = min(max(self.chosen - room + 1, 0), max(rows - room, 0))
        return range(first, min(first + room, rows))


class View:
    """The state and what was pressed; `drawn` makes the screen of both."""

    def __init__(self, answer: Row, now_s: float) -> None:
        self.quits = False
        self.wants: str | None = None  # rid of the request to explain
        self._latest: Row | None = None  # also while paused
        self._places = {"requests": Place(), "replicas": Place()}
        self._on = "requests"
        self._over: RenderableType | None = None  # drawn in the place of the tables
        self._paused = False
        self._note = ""
        self.take(answer, now_s)

    def take(self, answer: Row, now_s: float) -> None:
        """Take what is new; while paused the screen keeps what it shows."""
        self._heard_s, self._note = now_s, ""
        self._latest = merged(self._latest, answer)
        if not self._paused:
            self._state = self._latest

    def lose(self, why: object, now_s: float) -> None:
        """Note that there was no answer; the last state stays."""
        self._note = f"no answer for {seconds(now_s - self._heard_s)} (asking again): {why}"

    def show(self, over: RenderableType) -> None:
        """Draw ``over`` in the place of the tables, until a key is pressed."""
        self._over = over

    def answer(self, over: RenderableType) -> None:
        """Draw what `show` has announced, unless a key has been pressed meanwhile."""
        if self._over is not None:
            self._over = over

    def press(self, key: str) -> None:
        """Do what a key says; one without a meaning does nothing."""
        if key == "q":
            self.quits = True
        elif self._over is not None:
            self._over = None
        elif key == "tab":
            self._on = "replicas" if self._on == "requests" else "requests"
        elif key in ("s", "S"):
            place, orders = self._places[self._on], self._orders(self._on)
            place.order = (place.order + (1 if key == "s" else -1)) % len(orders)
            place.chosen = 0
        elif key in ("up", "k", "down", "j"):
            self._places[self._on].move(-1 if key in ("up", "k") else 1, len(self._state[self._on]))
        elif key == "p":
            self._paused = not self._paused
        elif key == "?":
            self._over = Text(HELP)
        elif key == "enter" and self._on == "requests" and (rows := self._sorted("requests")):
            self.wants = rows[min(self._places["requests"].chosen, len(rows) - 1)]["rid"]

    def drawn(self, width: int, height: int) -> RenderableType:
        """Draw a screen of ``width`` x ``height`` characters."""
        screen = Layout()
        head = [Layout(self._head(), size=HEAD), Layout(self._figures(width), size=FIGURES)]
        keys = KEYS if self._over is None else "any key goes back  q quit"
        foot = Layout(Text(keys, style="bright_black", no_wrap=True, overflow="ellipsis"), size=1)
        if self._over is not None:
            screen.split_column(head[0], Layout(self._over), foot)
            return screen
        extra = self._extra() if height >= WIDE_ROWS else []
        taken = HEAD + FIGURES + 1 + sum(size for _, size in extra) + 2 * ABOVE_ROWS
        replicas = min(max(len(self._state["replicas"]), 1), max((height - taken) // 2, 1))
        requests = max(height - taken - replicas, 1)
        screen.split_column(
            *head,
            Layout(self._table("replicas", replicas, width), size=replicas + ABOVE_ROWS),
            Layout(self._table("requests", requests, width), size=requests + ABOVE_ROWS),
            *(Layout(part, size=size) for part, size in extra),
            foot,
        )
        return screen

    def _head(self) -> RenderableType:
        wrong = [self._note] if self._note else troubles(self._state)
        found = [*wrong, *warnings(self._state)]
        more = f"  (and {len(found) - 1} more)" if len(found) > 1 else ""
        colour = TROUBLE if wrong else WARNING if found else "green"
        well = Text(f"! {found[0]}{more}" if found else "all well", colour)
        title = Text(heading(self._state), "bold")
        if self._paused:
            title = Text("PAUSED  ", WARNING).append_text(title)
        for line in (title, well):
            line.no_wrap, line.overflow = True, "ellipsis"
        return Group(title, well)

    def _figures(self, width: int) -> RenderableType:
        """Draw the figures side by side: name, value, history."""
        shown = figures(self._state)
        room = width // max(len(shown), 1) - 1
        grid = RichTable.grid(padding=(0, 1, 0, 0))
        for _ in shown:
            grid.add_column(width=room, no_wrap=True)
        grid.add_row(*(Text(each.name, "bright_black") for each in shown))
        grid.add_row(*(Text(each.text, TROUBLE if each.is_trouble else "bold") for each in shown))
        lines = (sparkline(each.line, min(room, 30)).lstrip() for each in shown)
        styles = (TROUBLE if each.is_trouble else "cyan" for each in shown)
        grid.add_row(*map(Text, lines, styles))
        return grid

    def _table(self, name: str, room: int, width: int) -> RenderableType:
        place, rows, orders = self._places[name], self._sorted(name), self._orders(name)
        window = place.window(len(rows), room)
        shown = [rows[at] for at in window]
        styles = {place.chosen - window.start: CHOSEN} if name == self._on and rows else {}
        of = f"{window.start + 1}-{window.stop} of {len(rows)}" if len(rows) > room else str(len(rows))
        title = f"{'> ' if name == self._on else ''}{name} ({of}), by {orders[place.order][0]}"
        rule = Rule(title, align="left", style="bright_black")
        if not rows:
            return Group(rule, Text("none yet" if name == "requests" else "none", "bright_black"))
        stages = min(max(width - 88, LEAST_STAGES), MOST_STAGES)
        now_s = self._state["time"]
        if name == "replicas":
            cells = replica_table(shown)
        else:
            cells = request_table(shown, names_of(self._state), now_s=now_s, stages_width=stages)
        return Group(rule, replace(cells, styles=styles, tells_left_out=False))

    def _extra(self) -> list[tuple[RenderableType, int]]:
        """Return what only a high terminal has room for, each with its lines."""
        links = self._state["links"]
        legend = Text(f"{LEGEND}\n{STAGE_LEGEND}", style="bright_black")
        found: list[tuple[RenderableType, int]] = [(legend, 2)]
        if links:
            table = link_table(links[:6], names_of(self._state))
            size = ABOVE_ROWS + min(len(links), 6)
            found.insert(0, (Group(Rule("KV transfers", align="left", style="bright_black"), table), size))
        return found

    def _orders(self, name: str) -> tuple[Order, ...]:
        return REPLICA_ORDERS if name == "replicas" else _request_orders(self._state["time"])

    def _sorted(self, name: str) -> list[Row]:
        return sorted(self._state[name], key=self._orders(name)[self._places[name].order][1])


def heading(state: Row) -> str:
    """Return what is served, how many processes there are, and when that was so."""
    at = datetime.fromtimestamp(state["time"], tz=UTC).astimezone()
    replicas, routers = state["replicas"], state["routers"]
    up = f", up {seconds(state['time'] - state['started'])}" if state["started"] else ""  # 0: Serve has not told
    model = state["model"] or "no model yet"
    ready, wanted = ready_of(state)
    there = many(replicas, "replica") if ready >= wanted else f"{ready} of {wanted} replicas ready"
    counted = f"{there}, {many(routers, 'router')}"
    return f"{model}, {state['mode']}: {counted}{up}  {at:%H:%M:%S}"


def many(things: Any, name: str) -> str:
    return f"{len(things)} {name}{'' if len(things) == 1 else 's'}"
