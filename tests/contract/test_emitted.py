"""What stands in the catalogue is emitted by a replica and a router under traffic, and nothing else is.

The observatory's own are tested where it is. Engines are real, over a fake device; the router is met over HTTP.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

import httpx
import pytest

from dashboards.catalog import CATALOG, IDENTITY, METRICS, OPEN, Kind, Metric, Process
from deployments.http.http_app import make_app
from deployments.http.service import Service, read_face
from deployments.replica.served_engine import ServedEngine
from deployments.settings.schema import ModelSettings, parse
from deployments.watch.metrics.emitter import Emitter
from deployments.watch.metrics.replica_metrics import replica_emitter
from deployments.watch.metrics.router_metrics import RouterMetrics
from deployments.watch.metrics.server import MetricsServer, ServedMetrics
from replicas.engine.engine import Engine
from replicas.engine.loop import EngineLoop
from replicas.types import EngineTallies
from routing.types import Role
from tests.embedded import MODEL
from tests.harness import fake_engine
from tests.pair import Pair
from tests.scraped import Scraped
from tests.unit.deployments.in_process import PAGE_SIZE, House
from tests.unit.deployments.pair_in_process import Desks, PdTransferReplica
from tests.unit.deployments.sample_values import ask

START_TIMES = {"load_weights": 1.0, "warm_up": 2.0, "total": 3.5}
# counters and histograms that this traffic leaves at 0; each is brought about by a test of its own
QUIET = {
    "scheduler_retractions_total", "scheduler_retracted_tokens_total", "scheduler_mixed_steps_total",
    "scheduler_constrained_requests_total", "scheduler_forced_tokens_total", "scheduler_draft_tokens_total",
    "kv_pool_alloc_failures_total", "kv_pool_failed_checks_total", "scheduler_failed_steps_total",
    "router_retries_total", "requests_moved_total", "router_cache_event_gaps_total",
    "router_streams_resumed_total", "router_streams_expired_total",  # test_resumed_streams.py
    "tenant_requests_total", "tenant_tokens_total",  # test_quotas.py
    "adapter_requests_total", "adapter_tokens_total",  # test_router_events.py
    "adapter_loads_total", "adapter_drops_total",  # test_replica_figures.py
    "router_batch_lines_total",  # test_batches.py
    "router_fetches_total", "router_fetch_seconds_total", "router_fetched_tokens_total",  # test_router_events.py
    *(metric.name for metric in METRICS if metric.name.startswith("tier_")),  # test_replica_figures.py
    "inter_token_latency_seconds",  # a fake device makes all tokens before the router looks
}  # fmt: skip


@dataclass
class Running:
    """A router and a replica in this process, with their metrics over HTTP."""

    client: httpx.AsyncClient
    house: House
    replica: ServedMetrics
    router: ServedMetrics


def wanted(process: Process, *, apart: bool) -> dict[str, Metric]:
    """By full name, what a process must tell."""
    return {
        metric.full_name: metric
        for metric in METRICS
        if metric.process in (process, Process.EVERY) and (apart or not metric.disaggregated) and not metric.gpu
    }


def check_told(seen: Scraped, metrics: dict[str, Metric]) -> None:
    """Every metric, with its kind, its words and its labels, and no other."""
    families = seen.families.values()
    told = {f"{each.name}_total" if each.type == "counter" else each.name: each for each in families}
    assert told.keys() == metrics.keys()
    for name, family in told.items():
        metric = metrics[name]
        assert (family.type, family.documentation) == (metric.kind.value, metric.help)
        assert family.samples, f"{name} has no series"
        for sample in family.samples:
            labels = {key: value for key, value in sample.labels.items() if key != "le"}
            assert set(labels) == set(metric.label_names), sample
            assert sample.name in metric.series_names, sample
            for label, values in metric.labels.items():
                assert values == OPEN or labels[label] in values, sample
        own = [{label: sample.labels[label] for label in metric.labels} for sample in family.samples]
        for label, values in metric.labels.items():
            assert {each[label] for each in own} >= set(values), f"{name}: not every {label} is told from the start"


def check_moved(seen: Scraped, metrics: dict[str, Metric]) -> None:
    """Every counter and histogram that this traffic moves has moved."""
    still = set()
    for metric in metrics.values():
        if metric.kind is not Kind.GAUGE:
            part = metric.name if metric.kind is Kind.COUNTER else f"{metric.name}_count"
            if seen.total(part) == 0:
                still.add(metric.name)
    assert still <= QUIET, f"never counted: {sorted(still - QUIET)}"


def identity(seen: Scraped) -> tuple[str, ...]:
    """Of all series: there is one."""
    [found] = {tuple(sample.labels[label] for label in IDENTITY) for sample in seen.samples}
    return found


def emitted(engine: Engine, loop: EngineLoop | None, *, role: Role) -> Emitter:
    engine.started = replace(engine.started, times=START_TIMES)
    return replica_emitter(
        engine,
        stats=engine.stats if loop is None else loop.stats,
        tallies=engine.tallies if loop is None else loop.tallies,
        model="m",
        role=role,
        replica_id="r0",
        node_id="n0",
    )


@pytest.fixture
async def running() -> AsyncIterator[Running]:
    engine, _ = fake_engine(page_size=PAGE_SIZE, num_pages=8, record_events=True)
    loop = EngineLoop(engine)
    loop.start()
    replica = ServedMetrics(emitted(engine, loop, role=Role.UNIFIED), MetricsServer(host="127.0.0.1"), node_id="n0")
    house = House()
    metrics = RouterMetrics(parse({"model": {"path": MODEL}}), router_id="router", fleet=house.fleet)
    house.dispatcher.watch = metrics.watch
    router = metrics.served(host="127.0.0.1", node_id="n0")
    assert router is not None
    await house.start()
    house.add(ServedEngine(loop, replica_id="r0", node_id="here", metrics_address=replica.target.address))
    assert await house.fleet.wait_ready(30)
    face = read_face(ModelSettings(path=MODEL))
    service = Service(
        model=face, tokenizer=engine.tokenizer, dispatcher=house.dispatcher, fleet=house.fleet, leases=house.leases,
        settings={}, registry=metrics.shown,
    )  # fmt: skip
    transport = httpx.ASGITransport(app=make_app(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://manta", timeout=20) as client:
        yield Running(client, house, replica, router)
    await house.stop()
    router.close()
    replica.close()
    await asyncio.to_thread(loop.stop)


async def scrape(metrics: ServedMetrics) -> Scraped:
    async with httpx.AsyncClient() as client:
        return Scraped((await client.get(f"http://{metrics.target.address}/metrics")).text)


async def traffic(client: httpx.AsyncClient) -> None:
    """Each endpoint once, a cached prefix, an eviction, and what is refused."""
    prompt = list(range(1, 60))
    for _ in range(2):
        answer = await client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 4, "temperature": 0})
        assert answer.status_code == 200, answer.text
    body = {"input_ids": [*range(100, 195)], "sampling_params": {"max_new_tokens": 20}}
    other = await client.post("/generate", json=body)
    assert other.status_code == 200, other.text
    assert (await client.post("/v1/completions", json={"prompt": prompt, "max_tokens": -1})).status_code == 400
    assert (await client.post("/v1/chat/completions", json={"messages": 5})).status_code == 400
    assert (await client.post("/tokenize", json={"prompt": "one two"})).status_code == 200


async def test_a_replica_and_a_router_tell_what_the_catalogue_says_and_no_more(running: Running) -> None:
    before = {each: await scrape(each) for each in (running.replica, running.router)}
    await traffic(running.client)
    async with asyncio.timeout(30):  # until the replica has published what it did last
        while (await scrape(running.replica)).total("scheduler_finished_requests_total") < 3:
            await asyncio.sleep(0.02)
    for process, metrics, who in (
        (Process.REPLICA, running.replica, ("m", "unified", "r0")),
        (Process.ROUTER, running.router, ("SmolLM2-135M-Instruct", "router", "router")),
    ):
        seen, expected = await scrape(metrics), wanted(process, apart=False)
        check_told(seen, expected)
        check_moved(seen, expected)
        assert identity(seen) == who
        fixed = {name for name, metric in expected.items() if OPEN not in metric.labels.values()}
        names = {sample.name for sample in before[metrics].samples}
        assert {each for name in fixed for each in expected[name].series_names} <= names, "not from the first scrape"


async def test_the_router_counts_what_came_over_http(running: Running) -> None:
    """Two prompts and one, a wrong body at two endpoints, and one request for tokens alone."""
    await traffic(running.client)
    seen = Scraped((await running.client.get("/metrics")).text)
    counted = {
        (sample.labels["endpoint"], sample.labels["outcome"]): sample.value
        for sample in seen.samples
        if sample.name == "manta_requests_total" and sample.value
    }
    assert counted == {
        ("completions", "ok"): 2, ("generate", "ok"): 1, ("completions", "invalid"): 1, ("chat", "invalid"): 1,
        ("tokens", "ok"): 1,
    }  # fmt: skip
    assert seen.value("cache_nodes") is None  # a pool behind a load balancer would be anyone's
    stages_s, total_s = seen.total("request_stage_duration_seconds_sum"), seen.total("request_duration_seconds_sum")
    assert 0 < stages_s < total_s  # of prompts; the request for tokens has a duration alone
    assert (await running.client.get("/prometheus/metrics")).status_code == 200
    [info] = running.house.fleet.infos
    assert info.metrics == running.replica.target.address


async def test_several_routers_show_no_counters_behind_one_address() -> None:
    house = House()
    several = RouterMetrics(parse({"model": {"path": MODEL}, "router": {"count": 2}}), router_id="a", fleet=house.fleet)
    assert set(Scraped(several.shown).families) == {"manta_build_info"}


async def test_apart_kv_transfers_are_told_too() -> None:
    pair = Pair()
    pair.ask("a", range(1, 13))
    pair.run()
    for side, role in ((pair.prefill, Role.PREFILL), (pair.decode, Role.DECODE)):
        seen = Scraped(emitted(side.engine, None, role=role).registry)
        check_told(seen, wanted(Process.REPLICA, apart=True))
        assert identity(seen) == ("m", role.value, "r0")
    house, desks = House(always_kv_transfer=True), Desks()
    config = parse({"model": {"path": MODEL}, "mode": "disaggregated"})
    metrics = RouterMetrics(config, router_id="router", fleet=house.fleet)
    house.dispatcher.watch = metrics.watch
    await house.start()
    for replica_id, role in (("p0", Role.PREFILL), ("d0", Role.DECODE)):
        house.add(PdTransferReplica(replica_id, role, desks))
    async with asyncio.timeout(30):
        while len(house.router.views) < 2:
            await asyncio.sleep(0.005)
    async for _ in house.dispatcher.stream(ask()):
        pass
    seen = await asyncio.to_thread(Scraped, metrics.shown)
    check_told(seen, wanted(Process.ROUTER, apart=True))
    await house.stop()


def test_what_is_excused_is_in_the_catalogue() -> None:
    assert CATALOG.keys() >= QUIET


METRIC_OF = {
    "prefill_step_s": "scheduler_step_duration_seconds",
    "decode_step_s": "scheduler_step_duration_seconds",
    "prefill_batch_requests": "scheduler_batch_requests",
    "decode_batch_requests": "scheduler_batch_requests",
    "prefill_batch_tokens": "scheduler_batch_tokens",
    "decode_batch_tokens": "scheduler_batch_tokens",
    "evicted_idle_s": "cache_evicted_idle_seconds",
    "grant_s": "transfer_duration_seconds",
    "wait_s": "transfer_duration_seconds",
    "post_s": "transfer_duration_seconds",
    "wire_s": "transfer_duration_seconds",
}


def test_every_tally_has_the_buckets_of_its_metric() -> None:
    assert set(METRIC_OF) == set(EngineTallies.__dataclass_fields__)
    for prefix_cache in ("radix", "chunk"):
        tallies = fake_engine(prefix_cache=prefix_cache)[0].tallies()
        for name, metric in METRIC_OF.items():
            assert getattr(tallies, name).bounds == CATALOG[metric].buckets, name
