"""The words and colours that all commands share: states of tokens, outcomes of requests, stages, states of replicas.

Invariant: the words are those of dashboards/catalog.py, which docs/metrics.md is written from; a test holds them to it.
"""

from dashboards.catalog import FAILED

POOL = (  # (state of tokens, character, colour); what a new request cannot have comes first
    ("protected", "#", "blue"),
    ("reserved", "%", "cyan"),
    ("quarantined", "x", "red"),
    ("evictable", "o", "yellow"),
    ("free", ".", "bright_black"),
)
STAGES = (  # of a request, in their order, with character and colour
    ("route", "r", "magenta"),
    ("queue", "q", "yellow"),
    ("prefill", "p", "blue"),
    ("transfer", "t", "cyan"),
    ("decode", "d", "green"),
)

LEGEND = "pool: " + ", ".join(f"{character} {state}" for state, character, _ in POOL)
STAGE_LEGEND = "stages: " + ", ".join(f"{character} {name}" for name, character, _ in STAGES)

RUNNING = "running"
STATE_COLOURS = {"accepting": "green", "starting": "yellow", "draining": "yellow", "released": "yellow"}
ID_CHARS = 12
TROUBLE = "bold red"  # also of any other state: silent, unhealthy
WARNING = "yellow"


def short_id(name: str | None) -> str:
    """Shorten an id to its end, which tells replicas of one deployment apart."""
    return "-" if name is None else name.rpartition("#")[2][:ID_CHARS]


def outcome_colour(word: str) -> str:
    return {"ok": "green", RUNNING: "cyan"}.get(word, TROUBLE if word in FAILED else WARNING)
