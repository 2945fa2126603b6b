"""SGLang's router from outside: what it adds to a request, and what of that its cache-aware policy is.

    python -m benchmarks.routing_cost --sglang-router VENV/bin/python

The wheel has no call for a choice alone, only the whole HTTP proxy (in Rust). So three times are taken in turn, request
by request, with the same prompts: straight to a worker, through a proxy over one worker where there is nothing to
choose, and through a cache-aware one. The last two do the same but for the choice (and its tree of texts taking the
prompt in, as our index takes the pages in), so that the difference of their processes' CPU time is what a choice costs.
Of their medians the difference says the same with more noise.

Workers are loopback addresses of one process that answers at once. A token is 4 characters. One request at a time.
Not measured: our own proxying, which is Ray's and Serve's; this is about the choice.
"""

import asyncio
import http.client
import json
import multiprocessing
import socket
import statistics
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import numpy.typing as npt

START_S = 120.0  # with many workers its start takes that long
WARM_UP = 60  # requests each way: every prefix about once


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Median and 99th percentile of one request's time, in ms, and the proxies' median CPU time for it."""

    num_replicas: int
    prompt_len: int
    direct_ms: tuple[float, float]
    one_worker_ms: tuple[float, float]
    cache_aware_ms: tuple[float, float]
    one_worker_cpu_us: float
    cache_aware_cpu_us: float
    runs: int

    @property
    def choice_cpu_us(self) -> float:
        return self.cache_aware_cpu_us - self.one_worker_cpu_us


def peer_cost(
    python: Path, num_replicas: int, prompt_len: int, prompts: Iterator[npt.NDArray[np.int32]], *, runs: int
) -> Peer:
    """Time ``runs`` requests each way. ``python`` is of an environment that has sglang-router, never our own."""
    with ExitStack() as stack:
        port = stack.enter_context(_workers())
        urls = [f"http://{_address(at)}:{port}" for at in range(num_replicas)]
        one_worker, one_pid = stack.enter_context(_router(python, "round_robin", urls[:1]))
        cache_aware, aware_pid = stack.enter_context(_router(python, "cache_aware", urls))
        ways = {"direct": (port, None), "one_worker": (one_worker, one_pid), "cache_aware": (cache_aware, aware_pid)}
        clients = {way: http.client.HTTPConnection("127.0.0.1", at, timeout=30) for way, (at, _) in ways.items()}
        times_ms: dict[str, list[float]] = {way: [] for way in ways}
        cpu_us: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(WARM_UP + runs):
            body = json.dumps({"text": _text(next(prompts)), "sampling_params": {"max_new_tokens": 1}}).encode()
            for way, (_, pid) in ways.items():
                used_us = _cpu_us(pid)
                times_ms[way].append(_post_ms(clients[way], body, way))
                cpu_us[way].append(_cpu_us(pid) - used_us)
    timed = {way: sorted(each[WARM_UP:]) for way, each in times_ms.items()}
    p50_p99 = {way: (statistics.median(each), each[int(0.99 * (len(each) - 1))]) for way, each in timed.items()}
    return Peer(
        num_replicas=num_replicas,
        prompt_len=prompt_len,
        direct_ms=p50_p99["direct"],
        one_worker_ms=p50_p99["one_worker"],
        cache_aware_ms=p50_p99["cache_aware"],
        one_worker_cpu_us=statistics.median(cpu_us["one_worker"][WARM_UP:]),
        cache_aware_cpu_us=statistics.median(cpu_us["cache_aware"][WARM_UP:]),
        runs=runs,
    )


def _post_ms(client: http.client.HTTPConnection, body: bytes, way: str) -> float:
    begun_s = time.perf_counter()
    client.request("POST", "/generate", body, {"Content-Type": "application/json"})
    answer = client.getresponse()
    said = answer.read()
    took_ms = 1e3 * (time.perf_counter() - begun_s)
    if answer.status != 200:
        raise RuntimeError(f"{way} answered {answer.status} to /generate, 200 was expected: {said[:200]!r}")
    return took_ms


def _cpu_us(pid: int | None) -> float:
    """CPU time of a process's threads until now; 0 for none."""
    if pid is None:
        return 0.0
    return sum(int(each.read_text().split()[0]) for each in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e3


def _text(tokens: npt.NDArray[np.int32]) -> str:
    """A text of four characters a token, the same for the same token."""
    return " ".join([f"{token:03x}"[-3:] for token in tokens.tolist()]) + " "


def _address(at: int) -> str:
    """All of 127.0.0.0/8 is this machine."""
    return f"127.0.{1 + at // 250}.{1 + at % 250}"


class _Worker(asyncio.Protocol):
    """Answers every request at once, with what the router asks workers for at its start."""

    def __init__(self) -> None:
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._address = str(transport.get_extra_info("sockname")[0]).encode()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = self._buffer[:end].lower()
            _, _, after = head.partition(b"content-length:")
            whole = end + 4 + int(after.split(b"\r\n", 1)[0] or 0)
            if len(self._buffer) < whole:
                return
            self._buffer = self._buffer[whole:]
            said = b'{"text": "%s", "meta_info": {"id": "0"}}' % self._address
            self._transport.write(
                b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(said), said)
            )


def _work(told: Connection) -> None:
    async def serve() -> None:
        server = await asyncio.get_running_loop().create_server(_Worker, "0.0.0.0", 0, backlog=2048)
        told.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(serve())


@contextmanager
def _workers() -> Iterator[int]:
    """The port that all workers listen on."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_work, args=(theirs,), daemon=True)
    process.start()
    try:
        if not ours.poll(START_S):
            raise RuntimeError(f"the workers did not listen within {START_S:.0f} s")
        yield int(ours.recv())
    finally:
        process.terminate()
        process.join()


@contextmanager
def _router(python: Path, policy: str, urls: list[str]) -> Iterator[tuple[int, int]]:
    """The port and process of a router over the workers ``urls``, once it is ready."""
    port, metrics_port = _free_ports(2)
    command = [str(python), "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--policy", policy, "--prometheus-port", str(metrics_port), "--log-level", "error"]
    command += ["--disable-retries", "--worker-urls", *urls]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_ready(process, port, len(urls))
        yield port, process.pid
    finally:
        process.terminate()
        process.wait()


def _wait_ready(process: "subprocess.Popen[bytes]", port: int, num_workers: int) -> None:
    give_up_s = time.monotonic() + START_S
    while time.monotonic() < give_up_s:
        if process.poll() is not None:
            raise RuntimeError(f"sglang-router ended with {process.returncode} before it was ready")
        client = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            client.request("GET", "/workers")
            if len(json.loads(client.getresponse().read())["workers"]) == num_workers:
                return
        except (OSError, ValueError, KeyError, http.client.HTTPException):
            pass
        finally:
            client.close()
        time.sleep(0.2)
    raise RuntimeError(f"sglang-router did not take {num_workers} workers within {START_S:.0f} s")


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]
