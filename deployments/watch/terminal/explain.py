"""``python -m deployments explain RID``: why a recent request went where it went, and where its time went."""

import json
import sys

from rich.console import Console

from deployments.watch.terminal import ask, explain_view
from deployments.watch.terminal.top import on_terminal


def run(url: str, rid: str, key: str | None, *, as_json: bool) -> int:
    """The exit status: 0, or why there is no answer (ask.py)."""
    try:
        body = ask.route(url, rid, key)
    except ask.Unanswered as error:
        print(error, file=sys.stderr)
        return error.status
    if as_json:
        print(json.dumps(body))
    elif on_terminal(sys.stdout):
        Console().print(explain_view.drawn(body))
    else:
        print(explain_view.plain(body))
    return 0
