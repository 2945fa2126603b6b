"""The token path's figures: the pace of the source, what is taken off, the ratios; and the readers of a watched one."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest
from aiohttp import web

from benchmarks import live_app
from benchmarks.overhead import Path, Spent, main, proxies_of, rows_of, watching
from benchmarks.token_source import Alone, Count, PacedSteps
from deployments.command import haproxy
from replicas.scheduler.plan import DecodePlan, ExtendPlan, SampleRow
from replicas.types import SamplingParams

NO_IDS = np.empty(0, dtype=np.int32)


def decode(*tokens_per_s: int) -> DecodePlan:
    """A step of one token for each."""
    rows = tuple(
        SampleRow(
            params=SamplingParams(seed=pace), position=1, num_output=0, stop_ids=frozenset(), prompt_ids=NO_IDS,
            output_ids=NO_IDS,
        )
        for pace in tokens_per_s
    )  # fmt: skip
    return DecodePlan(
        table_writes=(), rows=NO_IDS, token_ids=NO_IDS, seq_lens=NO_IDS, slots=np.empty(0, np.int64), sampling=rows
    )


def test_steps_are_over_at_the_pace_of_their_slowest_request_and_others_at_once() -> None:
    now_s, slept = [100.0], list[float]()
    steps = PacedSteps(7, clock=lambda: now_s[0], sleep=slept.append)
    assert steps.launch(decode(0, 0)).result().token_ids.tolist() == [7, 7]
    assert slept == []
    for _ in range(3):
        assert steps.launch(decode(40, 20)).result().token_ids.tolist() == [7, 7]
        now_s[0] += 0.02  # the step's own work
    assert slept == pytest.approx([0.03, 0.06])  # the first is due now, the others 50 and 100 ms after it
    prefill = ExtendPlan(table_writes=(), rows=(), sampling=decode(20).sampling)
    assert steps.launch(prefill).result().token_ids.tolist() == [7]
    assert len(slept) == 2


def spent(cpu_s: float) -> Spent:
    idle = {"router": 0.01, live_app.REST: 0.06}
    return Spent.of({"router": cpu_s, live_app.REST: 0.31}, idle, Count(1000, 500), 5.0)


def test_what_idle_processes_use_is_taken_off() -> None:
    assert spent(0.15).cpu == pytest.approx({"router": 0.1, live_app.REST: 0.01})
    assert spent(0.15).us_a_token == pytest.approx(110)
    assert spent(0.15).on_the_way_us == pytest.approx(100)


def test_ratios_are_by_round() -> None:
    alone = Alone(us_a_token={"steady": 50, "flat out": 10}, latency_s={"unary": 0.001, "TTFT": 0.002})
    paths = {"Manta": Path(), "plain": Path()}
    for load in ("steady", "flat out"):
        paths["Manta"].spent[load] = [spent(0.14), spent(0.24)]  # 100 and 200 us, 10 of them beside the way
        paths["plain"].spent[load] = [spent(1.04), spent(1.04)]  # 1,000
    for path in paths.values():
        path.added_ms = {"unary": [4.0], "TTFT": [5.0]}
    rows = {row.name: row for row in rows_of(alone, {"HAProxy": paths})}
    ratio = rows["steady: plain / Manta, HAProxy"]
    assert (ratio.low, ratio.high, ratio.runs) == pytest.approx((5, 10, 2))
    assert rows["flat out: Manta, HAProxy"].target == "<= 50"
    assert rows["flat out: Manta, HAProxy"].note.startswith("200 tokens/s, 2.00 an event; router 140")
    assert rows["flat out: Manta, HAProxy, on the way"].low == pytest.approx(90)


def test_where_haproxy_cannot_be_used_nothing_is_called_by_its_name() -> None:
    """All are wanted unless one is asked for; with HAProxy asked for, nothing else is measured."""
    assert proxies_of(None, "") == (["HAProxy", "Serve's proxy"], "")
    assert proxies_of(None, "none found") == (["Serve's proxy"], "none found")
    assert proxies_of(["HAProxy"], "none found") == ([], "none found")
    assert proxies_of(["Serve's proxy"], "none found") == (["Serve's proxy"], "")


def test_haproxy_where_there_is_none_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(haproxy, "found", lambda environ: "")
    with pytest.raises(SystemExit, match="--proxy HAProxy cannot be measured here: no HAProxy was found: install"):
        main(["path", "--proxy", "HAProxy"])


@asynccontextmanager
async def fleet() -> AsyncIterator[str]:
    """One process that is its own observatory."""
    address = ""

    async def sd(request: web.Request) -> web.Response:
        return web.json_response([{"targets": [address], "labels": {}}])

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(text="manta_build_info 1\n")

    async def state(request: web.Request) -> web.Response:
        return web.json_response({"version": int(request.query["since"]) + 1})

    app = web.Application()
    app.add_routes([web.get("/manta/sd", sd), web.get("/metrics", metrics), web.get("/manta/api/state", state)])
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
    async with fleet() as url, watching(url) as seen, asyncio.timeout(30):
        while not (seen.scrapes and seen.polls):
            await asyncio.sleep(0)
    assert (seen.scrapes, seen.polls) == (1, 1)
