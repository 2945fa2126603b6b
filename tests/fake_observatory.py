"""Serves dashboards/ui with fleets that do not exist: for the browser's tests, and by hand for work on the page.

    python -m tests.fake_observatory [--port 8090]     # then open /unified/, /disaggregated/, /eight/, /empty/

Owns:      a thread that serves HTTP, and the open event streams.
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
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'"
)  # stricter than the observatory's own: no style of the page's is inline
KEY = "let-me-in"


class FakeObservatory:
    """Each fleet under its own prefix: /NAME/, as behind a proxy."""

    def __init__(self, fleets: dict[str, FakeFleet], *, port: int = 0) -> None:
        self.fleets = fleets
        self.lock = threading.Condition()
        self.down: set[str] = set()  # fleets whose every call fails
        self.no_tree: set[str] = set()
        self.locked: set[str] = set()  # fleets that want the key
        self.calls: list[str] = []
        self.streams: dict[str, int] = dict.fromkeys(fleets, 0)  # open; a page that left counts until the next tick
        self._events: dict[str, list[Any]] = {name: [] for name in fleets}
        handler = type("Handler", (_Handler,), {"observatory": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", port), handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def tick(self, name: str) -> None:
        """The next second of one fleet, told to all who watch it."""
        with self.lock:
            self._events[name].append(self.fleets[name].tick())
            self.lock.notify_all()

    def drop(self, name: str) -> None:
        """Ends the streams of one fleet and answers no more, until `restore`."""
        with self.lock:
            self.down.add(name)
            self.lock.notify_all()

    def restore(self, name: str) -> None:
        with self.lock:
            self.down.discard(name)

    def close(self) -> None:
        with self.lock:
            self.down.update(self.fleets)
            self.lock.notify_all()
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
        elif path in ("", "login"):
            self.file("index.html" if path == "" else "login.html")
        elif path.startswith("ui/"):
            self.file(path.removeprefix("ui/"))
        elif name in self.observatory.locked and f"key={KEY}" not in self.headers.get("Cookie", ""):
            self.answer(401, b"{}", "application/json")
        elif path == "api/events":
            self.events(name, fleet)
        else:
            with self.observatory.lock:
                body = self.api(name, fleet, path, parse_qs(url.query))
            self.answer(404 if body is None else 200, json.dumps(body).encode(), "application/json")

    def do_POST(self) -> None:
        given = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
        self.send_response(303)
        if given.get("key") == [KEY]:
            self.send_header("Set-Cookie", f"key={KEY}; Path=/")
        self.send_header("Location", "./")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def api(self, name: str, fleet: FakeFleet, path: str, query: dict[str, list[str]]) -> Any:
        if path == "api/state":
            return fleet.state
        if path == "api/tree" and name not in self.observatory.no_tree:
            return fleet.tree(query["replica"][0], int(query["depth"][0]))
        if found := re.fullmatch(r"api/requests/(.+)", path):
            return fleet.details(unquote(found[1]))
        return None

    def events(self, name: str, fleet: FakeFleet) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        queue, lock = self.observatory._events[name], self.observatory.lock
        with lock:
            sent = len(queue)
            self.observatory.streams[name] += 1
            told: list[tuple[str, Any]] = [("state", fleet.state)]
        try:
            while True:
                for kind, body in told:
                    self.wfile.write(f"event: {kind}\ndata: {json.dumps(body)}\n\n".encode())
                self.wfile.flush()
                with lock:
                    while len(queue) == sent and name not in self.observatory.down:
                        lock.wait()
                    if name in self.observatory.down:
                        return
                    told = [("delta", delta) for delta in queue[sent:]]
                    sent = len(queue)
        except (BrokenPipeError, ConnectionResetError):
            return  # the page was closed
        finally:
            with lock:
                self.observatory.streams[name] -= 1

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
        "idle": FakeFleet(unified=2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fake_observatory")
    parser.add_argument("--port", type=int, default=8090)
    server = FakeObservatory(fleets(), port=parser.parse_args().port)
    print(*(f"{server.url}/{name}/" for name in server.fleets), sep="\n", flush=True)
    while True:
        time.sleep(1)
        for name in server.fleets:
            server.tick(name)


if __name__ == "__main__":
    main()
