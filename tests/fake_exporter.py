"""A process that serves every metric of the catalogue, and itself as Prometheus' http_sd: a fleet without a fleet.

Counters and histograms rise with each scrape, so that every rate has a value; labels of known values have them all.
"""

import http.server
import itertools
import json
import threading
from collections.abc import Iterator

from dashboards.catalog import METRICS, Kind, Metric, Process

ROLES = {Process.REPLICA: "unified", Process.OBSERVATORY: "observatory"}  # else: router


class FakeExporter:
    """Serves until stopped. ``without``: names of metrics that it lacks, for the time being."""

    def __init__(self, *, without: frozenset[str] = frozenset()) -> None:
        self.without = without
        self._scrapes = itertools.count(1)
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body, kind = outer._answer(self.path)
                self.send_response(200)
                self.send_header("Content-Type", kind)
                self.end_headers()
                self.wfile.write(body.encode())

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)

    def _answer(self, path: str) -> tuple[str, str]:
        if path == "/manta/sd":
            target = {"targets": [f"127.0.0.1:{self.port}"], "labels": {"node": "n1"}}
            return json.dumps([target]), "application/json"
        step = next(self._scrapes)
        lines = [line for metric in METRICS if metric.name not in self.without for line in exposition(metric, step)]
        return "\n".join(lines) + "\n", "text/plain; version=0.0.4"


def exposition(metric: Metric, step: int) -> Iterator[str]:
    """One metric's lines at the ``step``-th scrape."""
    yield f"# HELP {metric.full_name} {metric.help}"
    yield f"# TYPE {metric.full_name} {metric.kind.value}"
    identity = {"model": "m", "role": ROLES.get(metric.process, "router"), "replica": "r1"}
    for values in itertools.product(*(known or ("any",) for known in metric.labels.values())):
        named = {**identity, **dict(zip(metric.labels, values, strict=True))}
        labels = ",".join(f'{label}="{value}"' for label, value in named.items())
        if metric.kind is Kind.HISTOGRAM:
            for bound in (*map(str, metric.buckets), "+Inf"):
                yield f'{metric.full_name}_bucket{{{labels},le="{bound}"}} {step}'
            yield f"{metric.full_name}_sum{{{labels}}} {step * metric.buckets[0] / 2}"
            yield f"{metric.full_name}_count{{{labels}}} {step}"
        else:
            yield f"{metric.full_name}{{{labels}}} {step if metric.kind is Kind.COUNTER else 0.5}"
