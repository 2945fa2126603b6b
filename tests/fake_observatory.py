"""Serves dashboards/ui with fleets that do not exist: for the browser's tests, and by hand for work on the page.

    python -m tests.fake_observatory [--port 8090]     # prints the address of each fleet

Owns:      a thread that serves HTTP.
Never:     asks anything outside; is part of what is installed.
Thread:    one a connection; `tick`, `drop` and the rest are called from the tests' thread. All under one lock.
"""

import argparse
import json
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from deployments.watch.observatory.page_files import read_files
from tests.fake_fleet import FakeFleet

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; font-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'"
)  # stricter than the observatory's own: no style of the page's is inline
KEY = "let-me-in"


class FakeObservatory:
    """Each fleet under its own prefix: /NAME/, as behind a proxy."""

    def __init__(self, fleets: dict[str, FakeFleet], *, port: int = 0) -> None:
        self.fleets = fleets
        self.lock = threading.Lock()
        self.down: set[str] = set()  # fleets whose every call fails
        self.no_tree: set[str] = set()
        self.locked: set[str] = set()  # fleets that want the key
        self.calls: list[str] = []
        handler = type("Handler", (_Handler,), {"observatory": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", port), handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def tick(self, name: str) -> None:
        """The next second of one fleet."""
        with self.lock:
            self.fleets[name].tick()

    def drop(self, name: str) -> None:
        """Answer no more for one fleet, until `restore`."""
        self.down.add(name)

    def restore(self, name: str) -> None:
        self.down.discard(name)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    observatory: FakeObservatory
    files = read_files()

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        name, _, path = url.path.removeprefix("/").partition("/")
        self.observatory.calls.append(self.path)
        fleet = self.observatory.fleets.get(name)
        if fleet is None or name in self.observatory.down:
            self.answer(503, b"down", "text/plain")
        elif path in ("", "login", "runbook"):
            self.file(f"{path or 'index'}.html")
        elif path.startswith("ui/"):
            self.file(path.removeprefix("ui/"))
        elif name in self.observatory.locked and f"key={KEY}" not in self.headers.get("Cookie", ""):
            self.answer(401, b"{}", "application/json")
        else:
            with self.observatory.lock:
                body = self.api(name, fleet, path, parse_qs(url.query))
            self.answer(404 if body is None else 200, json.dumps(body).encode(), "application/json")

    def do_POST(self) -> None:
        name, _, path = self.path.removeprefix("/").partition("/")
        if found := re.fullmatch(r"api/replicas/([^/]+)/(flush|drain|kill)", path):
            self.observatory.calls.append(self.path)
            with self.observatory.lock:
                said = self.observatory.fleets[name].act(unquote(found[1]), found[2])
            self.answer(200, json.dumps({"message": said}).encode(), "application/json")
            return
        given = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
        self.send_response(303)
        if given.get("key") == [KEY]:
            self.send_header("Set-Cookie", f"key={KEY}; Path=/")
        self.send_header("Location", "./")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def api(self, name: str, fleet: FakeFleet, path: str, query: dict[str, list[str]]) -> Any:
        if path == "api/state":
            return fleet.answer(int(query.get("since", ["0"])[0]))
        if path == "api/history":
            return fleet.hour()
        if path == "api/tree" and name not in self.observatory.no_tree:
            return fleet.tree(query["replica"][0], int(query["depth"][0]))
        if found := re.fullmatch(r"api/requests/(.+)", path):
            return fleet.details(unquote(found[1]))
        if found := re.fullmatch(r"api/replicas/([^/]+)/?(logs|stacks)?", path):
            return fleet.process(unquote(found[1]), found[2])
        return None

    def file(self, name: str) -> None:
        found = self.files.get(name)
        if found is None:
            self.answer(404, b"no such file", "text/plain")
        else:
            self.answer(200, found.body, found.content_type)

    def answer(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Security-Policy", POLICY)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_args: object) -> None:
        """`calls` has them."""


def fleets() -> dict[str, FakeFleet]:
    return {
        "unified": FakeFleet(unified=2, ticks=40),
        "disaggregated": FakeFleet(unified=2, prefill=2, ticks=40),
        "eight": FakeFleet(unified=8, requests_per_tick=4, ticks=300),
        "empty": FakeFleet(unified=0),
        "idle": FakeFleet(unified=2, requests_per_tick=0),
        "burning": FakeFleet(unified=2, requests_per_tick=2, ticks=120, slow=True),
        "many": FakeFleet(unified=48, requests_per_tick=8, ticks=60, sick=1),
    }


def states() -> dict[str, FakeFleet]:
    """What an operator meets, beside "idle" and "disaggregated" (docs/observability.md)."""
    killed = FakeFleet(unified=3, requests_per_tick=4, ticks=60, num_nodes=1)
    killed.kill(min(killed.roles))
    stopped = FakeFleet(unified=2, requests_per_tick=3, ticks=60, num_nodes=1)
    stopped.silent.add(min(stopped.roles))
    for _ in range(6):
        killed.tick()
        stopped.tick()
    return {
        "loaded": FakeFleet(unified=2, requests_per_tick=3, ticks=90, num_nodes=1),
        "killed": killed,
        "stopped": stopped,
        "overloaded": FakeFleet(unified=2, requests_per_tick=3, ticks=90, num_nodes=1, overloaded=True),
        "nodes": FakeFleet(unified=6, requests_per_tick=6, ticks=90),
    }


def shows() -> dict[str, FakeFleet]:
    """More fleets, to look at by hand."""
    starting = FakeFleet(unified=2)
    starting.become_starting()
    return states() | {
        "starting": starting,
        "dying": FakeFleet(unified=3, requests_per_tick=4, ticks=42, dies_every=40),
        "busy": FakeFleet(unified=8, requests_per_tick=50, ticks=30),
        "hundred": FakeFleet(unified=100, requests_per_tick=20, ticks=30, sick=2),
        "thousand": FakeFleet(unified=1000, requests_per_tick=20, ticks=5, sick=3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fake_observatory")
    parser.add_argument("--port", type=int, default=8090)
    server = FakeObservatory(fleets() | shows(), port=parser.parse_args().port)
    print(*(f"{server.url}/{name}/" for name in server.fleets), sep="\n", flush=True)
    while True:
        time.sleep(1)
        for name in server.fleets.keys() - {"empty", "starting"}:
            server.tick(name)


if __name__ == "__main__":
    main()
