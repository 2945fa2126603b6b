"""A process's metrics over HTTP."""

import contextlib
import gzip
import logging
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from dashboards.catalog import Process
from deployments.fleet.seen import Target
from deployments.tenancy.keys import digest
from deployments.watch.metrics.emitter import Identity, emitter_of
from deployments.watch.metrics.server import MetricsServer, ServedMetrics
from replicas.errors import InvalidConfig

EMITTER = emitter_of(Process.ROUTER, Identity(model="m", role="router", replica="abc"), disaggregated=False)


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    server = MetricsServer(host="127.0.0.1")
    server.serve(EMITTER.registry)
    yield server
    server.close()


def get(address: str, path: str = "metrics", **headers: str) -> tuple[str, bytes]:
    request = urllib.request.Request(f"http://{address}/{path}", headers=headers)
    with urllib.request.urlopen(request, timeout=10) as answer:
        return answer.headers["Content-Type"], answer.read()


def test_it_answers_text_or_openmetrics_and_compressed_as_asked(server: MetricsServer) -> None:
    kind, plain = get(server.address)
    assert kind.startswith("text/plain; version=0.0.4")
    assert b'manta_build_info{model="m",ray="2.60.0",replica="abc",role="router",version="' in plain
    wanted = {"Accept": "application/openmetrics-text;version=1.0.0", "Accept-Encoding": "gzip"}
    kind, packed = get(server.address, **wanted)
    assert kind.startswith("application/openmetrics-text")
    assert gzip.decompress(packed).endswith(b"# EOF\n")


def test_with_a_guard_it_answers_whoever_shows_the_admin_key_and_nobody_where_there_is_none() -> None:
    guarded, closed = (MetricsServer(host="127.0.0.1", guard=guard) for guard in (digest("the admin key"), b""))
    for server in (guarded, closed):
        server.serve(EMITTER.registry)
    assert b"manta_build_info" in get(guarded.address, Authorization="Bearer the admin key ")[1]
    for server, key in ((guarded, "another"), (guarded, None), (closed, "the admin key"), (closed, None)):
        with pytest.raises(urllib.error.HTTPError, match="401"):
            get(server.address, **({"Authorization": f"Bearer {key}"} if key else {}))
    for server in (guarded, closed):
        server.close()


def test_a_scraper_that_hangs_up_is_worth_a_line_of_the_log_and_no_stack(
    server: MetricsServer, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO)
    try:
        raise ConnectionResetError("gone")
    except ConnectionResetError:
        server._server.handle_error(None, ("192.0.2.7", 5))
    assert "a scrape from ('192.0.2.7', 5) failed: ConnectionResetError('gone')" in caplog.text
    assert capsys.readouterr().err == ""


def test_however_many_connect_and_say_nothing_few_threads_wait_and_a_scrape_is_answered(server: MetricsServer) -> None:
    host, port = server.address.split(":")
    others = set(threading.enumerate())  # of servers that other tests have left
    with contextlib.ExitStack() as held:
        silent = [held.enter_context(socket.create_connection((host, int(port)), timeout=5)) for _ in range(40)]
        assert get(server.address)[1].startswith(b"# HELP")
        waiting = [each for each in set(threading.enumerate()) - others if "process_request_thread" in each.name]
        assert len(waiting) <= 16
        assert silent[0].recv(1) == b""  # the oldest was cut off
        silent[-1].settimeout(0.05)
        with pytest.raises(TimeoutError):
            silent[-1].recv(1)


def test_each_takes_a_free_port_and_says_which() -> None:
    both = [ServedMetrics(EMITTER, MetricsServer(host="127.0.0.1"), node_id="n1") for _ in range(2)]
    first, second = (each.target for each in both)
    assert first.address != second.address
    assert first == Target(address=first.address, role="router", process_id="abc", node_id="n1")
    for each in both:
        each.close()
        each.close()
    with pytest.raises(urllib.error.URLError):
        get(first.address)


def test_a_port_is_taken_before_there_is_anything_to_show_and_given_back_and_who_wants_it_is_told_what_to_do() -> None:
    early = MetricsServer(host="127.0.0.1")
    port = int(early.address.rsplit(":", 1)[1])
    with pytest.raises(InvalidConfig, match=f"metrics_port = {port}: .* each needs a port of its own: leave it at 0"):
        MetricsServer(host="127.0.0.1", port=port)
    early.close()
    MetricsServer(host="127.0.0.1", port=port).close()
