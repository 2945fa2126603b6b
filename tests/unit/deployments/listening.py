"""Apps and small servers that tests ask over HTTP."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import uvicorn

Respond = Callable[[str, Mapping[str, str], bytes], tuple[int, bytes]]


def client_of(app: Any, base_url: str = "http://manta") -> httpx.AsyncClient:
    """HTTP to an ASGI app, without a socket."""
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url=base_url, timeout=60)


@contextlib.asynccontextmanager
async def listening(app: Any) -> AsyncIterator[int]:
    """The loopback port of an ASGI app that is served by the test's own event loop."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        async with asyncio.timeout(10):
            while not server.started:
                await asyncio.sleep(0.01)
        yield int(listener.getsockname()[1])
        server.should_exit = True
        await asyncio.wait_for(serving, 10)


@contextlib.contextmanager
def answering(respond: Respond) -> Iterator[int]:
    """The loopback port of a server in threads: ``respond`` makes status and body of path, headers and body."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, payload = respond(self.path, dict(self.headers), body)
            self.send_response(status)
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        do_POST = do_GET

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
    thread.join()


@contextlib.contextmanager
def speaking(answer: bytes | Callable[[socket.socket, bytes], None]) -> Iterator[int]:
    """The loopback port of a server that answers each connection with bytes, or by a call with what it asks, and
    closes it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):  # the end of the listener
                while True:
                    connection, _ = listener.accept()
                    with connection, contextlib.suppress(OSError):  # a client that only looks
                        asked = connection.recv(65536)
                        if callable(answer):
                            answer(connection, asked)
                        else:
                            connection.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
    thread.join()
