"""What being watched costs: the ratios' arithmetic, and that somebody watches while it is measured."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from benchmarks.watch_overhead import Measured, Start, rows_of, watching


def batch(requests_per_s: float, cpu_s: float) -> Measured:
    return Measured(requests_per_s=requests_per_s, cpu={"router": 0.01, "replicas": cpu_s - 0.01}, num_failed=0)


def start(*batches: Measured, idle_s: float) -> Start:
    return Start(batches=batches, idle={"router": 0.001, "replicas": idle_s - 0.001})


def test_ratios_are_of_the_medians_of_a_rounds_batches() -> None:
    found = {
        "not watched": [
            start(batch(10, 0.1), batch(1, 9.0), batch(10, 0.1), idle_s=0.02), start(batch(20, 0.2), idle_s=0.02)
        ],
        "watched": [
            start(batch(9, 0.11), batch(9, 0.11), batch(2, 8.0), idle_s=0.03), start(batch(20, 0.2), idle_s=0.04)
        ],
    }
    rows = {row.name: row for row in rows_of(found)}
    throughput, cpu = rows["requests/s, watched / not"], rows["CPU a request, watched / not"]
    assert (throughput.low, throughput.high, throughput.runs) == pytest.approx((0.9, 1.0, 2))
    assert (cpu.low, cpu.high) == pytest.approx((1.0, 1.1))
    assert rows["watched: CPU a request"].value == pytest.approx(155)  # ms; of 110, 110, 8000 and 200
    more = rows["CPU a second, idle: watched more than not"]
    assert (more.low, more.high) == pytest.approx((10, 20))


@asynccontextmanager
async def fleet() -> AsyncIterator[str]:
    """One process that is its own observatory; its stream tells one event and stays open."""
    address = ""

    async def sd(request: web.Request) -> web.Response:
        return web.json_response([{"targets": [address], "labels": {}}])

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(text="manta_build_info 1\n")

    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"event: delta\ndata: {}\n\n")
        await asyncio.Event().wait()
        return response

    app = web.Application()
    app.add_routes([web.get("/manta/sd", sd), web.get("/metrics", metrics), web.get("/manta/api/events", stream)])
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    address = f"{host}:{port}"
    try:
        yield f"http://{address}"
    finally:
        await runner.cleanup()


async def test_a_scraper_and_a_view_watch_until_the_end() -> None:
    async with fleet() as url, watching(url) as seen, asyncio.timeout(5):
        while not (seen.scrapes and seen.events):
            await asyncio.sleep(0)
    assert (seen.scrapes, seen.events) == (1, 1)
